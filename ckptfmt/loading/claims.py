"""The claim of a load: the levels, the rule for the level, and the reasons for a lower level.

A load claims T1 without any reason for a lower level. A difference between the saved and the live
run, and a part that the caller didn't ask for, are such reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ckptfmt.adapters import torch_side
from ckptfmt.adapters.capture import LOCAL_TOPOLOGY, SEEN_TOPOLOGY
from ckptfmt.adapters.context import (
    PROCESS_COUNTS,
    find_differences,
    local_facts,
    own_config,
    topology,
)
from ckptfmt.adapters.data_position import DATA_DOUBTS
from ckptfmt.adapters.live import NO_SCHEDULE, Live, may_be_schedule
from ckptfmt.adapters.live_trees import GLOBAL, Encoder
from ckptfmt.adapters.load_plan import LoadPlan
from ckptfmt.adapters.unsaved import UNSAVED
from ckptfmt.adapters.visible import compare
from ckptfmt.data.cursor import KIND as CURSOR_KIND
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.errors import Code, err
from ckptfmt.state import NO_RNG, NOT_GIVEN, State

#: Levels of claims, from the lowest to the highest.
CLAIMS: Final = ("S0", "S1", "T1")
#: The claim of a launch whose repeated step differs although T1 was expected.
REFUTED: Final = "refuted"
#: Prefix of another process's reasons.
OTHER_PROCESS: Final = "process "
#: Prefixes of reasons about parts that the caller didn't ask for.
_NOT_IN_STATE: Final = "not in State: "
LEFT_OUT: Final = "left out by only=: "
#: The reason that lowers the claim until the RNG streams are put back.
STREAMS_PENDING: Final = "the random-number streams aren't put back yet"
#: Largest number of configuration differences listed one by one.
_SHOWN: Final = 20


def claim_of(plan: LoadPlan, lowered_by: Iterable[str]) -> str:
    """Return the claim of a load by this process.

    The claim is T1 without a reason for a lower claim; S1 if the load took everything, with the
    cursor of an unchanged order of samples; else S0.

    Args:
        plan: the plan of the load.
        lowered_by: all reasons for a lower claim.
    """
    if not tuple(lowered_by):
        return "T1"
    if plan.is_partial or plan.reorders or ("data", "", GLOBAL) not in plan.taken_leaves:
        return "S0"
    cursor = plan.checkpoint.leaf("data", "", GLOBAL)
    return "S1" if isinstance(cursor, dict) and cursor.get("kind") == CURSOR_KIND else "S0"


def lowest_claim(claims: Iterable[str]) -> str:
    """Return the claim of a load by several processes from the claims of each process.

    >>> lowest_claim(["T1", "S0", "S1"])
    'S0'
    """
    return min(claims, key=CLAIMS.index)


def was_not_asked(reason: str) -> bool:
    """Return whether a reason for a lower claim is a part that the caller didn't ask for.

    The other reasons are differences.

    >>> was_not_asked("process 1: not in State: data"), was_not_asked("processes: saved 2, here 1")
    (True, False)
    """
    said = reason.partition(": ")[2] if reason.startswith(OTHER_PROCESS) else reason
    return said.startswith((_NOT_IN_STATE, LEFT_OUT))


def find_reasons(
    plan: LoadPlan, state: State, live: Live, differences: Iterable[tuple[str, object, object]]
) -> tuple[str, ...]:
    """Return the reasons for a lower claim that are known before the load.

    Args:
        plan: the filled plan of the load.
        state: the state to load into.
        live: the objects of the state.
        differences: differences of the configuration, from `compare_config`.
    """
    return (
        *_missing_fields(plan, state),
        *_list_decisive(state, differences),
        *compare_topology(plan, live),
        *_find_limits(live),
        *_find_lost_schedule(plan),
    )


def _missing_fields(plan: LoadPlan, state: State) -> list[str]:
    left = state.absent_reasons()
    named = [
        field if reason in (NOT_GIVEN, NO_RNG) else f"{field} ({reason})"
        for field, reason in left.items()
    ]
    reasons = {
        field: plan.checkpoint.manifest.fields[field].reason
        for field in FIELDS
        if field not in left
    }
    absent = [
        f"{field} wasn't saved: {reason}" for field, reason in reasons.items() if reason is not None
    ]
    return absent + [f"{_NOT_IN_STATE}{', '.join(named)}"] * bool(named)


def compare_config(plan: LoadPlan, state: State) -> list[tuple[str, object, object]]:
    """Return path, saved value and live value of each difference of the configuration.

    A difference under ``State(identity=...)`` becomes a problem of the plan.

    Raises: StateError(ARGUMENT) for a key of ``identity`` without a value.
    """
    config, is_given = own_config(state.config, worker=plan.worker)
    if config is None:
        return []
    live = Encoder(field="config", scope=GLOBAL, inline=True).encode(config, "")
    key = ("config", "", GLOBAL)
    saved = plan.checkpoint.leaf(*key) if key in plan.checkpoint.leaves else {}
    differences = find_differences(saved, live) if is_given else []
    known = [path for path, _, _ in find_differences({}, live)]
    for identity in state.identity:
        if not any(_lies_under(path, identity) for path in known):
            raise err(Code.ARGUMENT, f"config has no key {identity!r}", where="State(identity=...)")
        for path, before, now in differences:
            if _lies_under(path, identity):
                plan.problem(
                    Code.CONFIG_IDENTITY, f"config:{path}", f"saved {before!r}, here {now!r}"
                )
    return [] if _is_absent(plan, "config") else differences


def _list_decisive(state: State, differences: Iterable[tuple[str, object, object]]) -> list[str]:
    """Return the configuration differences that lower the claim: all except `state.harmless`."""
    decisive = [
        f"config:{path}: saved {before!r}, here {now!r}"
        for path, before, now in differences
        if not any(_lies_under(path, key) for key in state.harmless)
    ]
    more = len(decisive) - _SHOWN
    return decisive if more <= 0 else [*decisive[:_SHOWN], f"config: {more} more values differ"]


def _lies_under(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}/")


def _find_limits(live: Live) -> list[str]:
    """Return the reasons why no checkpoint can restore a part of the live modules."""
    side: Any = torch_side()
    return [limit for view in live.views.values() for limit in side.find_claim_limits(view.module)]


def _find_lost_schedule(plan: LoadPlan) -> list[str]:
    """Return the reason NO_SCHEDULE if the state of the optimizer's scheduler wasn't saved."""
    keys = [key for key in plan.checkpoint.leaves if key[0] in ("optimizer", "data")]
    if plan.is_partial or any(may_be_schedule(name, None) for _, name, _ in keys):
        return []
    # A value may need a read of another process's part, so the names are checked first.
    groups = (plan.checkpoint.leaf(*key) for key in keys if "group" in key[1].split("/"))
    has_schedule = any(
        isinstance(group, Mapping) and "initial_lr" in group.get("options", ()) for group in groups
    )
    is_lost = has_schedule and not any(
        may_be_schedule("", plan.checkpoint.leaf(*key)) for key in keys
    )
    return [NO_SCHEDULE] * is_lost


def _is_absent(plan: LoadPlan, field: str) -> bool:
    """Return whether a field wasn't saved.

    An absent field is a separate reason, so no values are compared.
    """
    return plan.checkpoint.manifest.fields[field].reason is not None


def compare_topology(plan: LoadPlan, live: Live) -> list[str]:
    """Return the differences of the run's surroundings, and the doubts recorded by the save."""
    if _is_absent(plan, "topology"):
        return []
    side = torch_side()
    shared = topology(worker_count=plan.worker_count, side=side)
    facts: dict[str, object] = {"": shared}
    if plan.worker == 0:
        facts[LOCAL_TOPOLOGY] = local_facts(live, side)
    lowered = []
    for name, now in facts.items():
        key = ("topology", name, GLOBAL)
        saved = dict(plan.checkpoint.leaf(*key)) if key in plan.checkpoint.leaves else {}
        for doubt, reason in DATA_DOUBTS.items():
            if saved.pop(doubt, False):
                lowered.append(reason)
                plan.reorders = True
        lowered += [reason for reason in saved.pop(UNSAVED, ()) if isinstance(reason, str)]
        lowered += [
            f"{path}: saved {before!r}, here {after!r}"
            for path, before, after in _list_topology(saved, now)
        ]
    return lowered


def _list_topology(saved: dict[str, object], now: object) -> list[tuple[str, object, object]]:
    """Return path, saved value and live value of each difference of the topology.

    If all counts of processes differ by the same values, one entry stands for all of them.
    """
    differences = find_differences(saved, now)
    counts = [(before, after) for path, before, after in differences if path in PROCESS_COUNTS]
    if len(counts) != len(PROCESS_COUNTS) or len(set(counts)) > 1:
        return differences
    return [
        ("processes", *counts[0]),
        *(one for one in differences if one[0] not in PROCESS_COUNTS),
    ]


def compare_objects(plan: LoadPlan, live: Live) -> list[str]:
    """Return the differences of loaded objects of unknown classes from the objects at the save."""
    key = ("topology", SEEN_TOPOLOGY, GLOBAL)
    is_comparable = plan.worker == 0 and not plan.is_partial and key in plan.checkpoint.leaves
    return compare(live.units, plan.checkpoint.leaf(*key)) if is_comparable else []

"""The rule of a healer, its records, and the end of a launch in a step log."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.loop.healer import ending_of
from ckptfmt.run.failures import (
    FAILURES,
    Decision,
    LaunchFailure,
    Means,
    decide,
    describe_next,
    describe_plan,
    merge_differences,
    read_decisions,
    relate_failures,
)
from ckptfmt.run.witness import ENDING_PLACE, HEADER_NBYTES, Ending, StepDifference
from ckptfmt.store import open_store

HEAD, OLDER = "step-00000020-l0001", "step-00000010-l0001"
MEANS = Means(starts=3, can_skip=True, head=HEAD, older=OLDER)
ALARM = LaunchFailure(
    launch=1, start=None, step=26, kind="alarm", text="loss is nan", is_numeric=True
)  # fmt: skip
BUG = dataclasses.replace(ALARM, kind="error", text="KeyError", signature="K", is_numeric=False)


def again(*choices: Any, first: LaunchFailure = ALARM) -> list[LaunchFailure]:
    """Return a failure, and the same failure after each choice."""
    found = [first]
    for number, choice in enumerate(choices):
        found.append(
            dataclasses.replace(
                first,
                launch=2 + number,
                start=OLDER if choice == "back" else HEAD,
                choice=choice,
                reference=1,
                is_same=choice == "retry",
                skip=(26, 26) if choice == "skip" else None,
            )
        )
    return found


@pytest.mark.parametrize(
    ("failures", "means", "choice"),
    [
        (again(), MEANS, "retry"),
        (again("retry"), MEANS, "skip"),
        (again("retry", "skip"), MEANS, "back"),
        (again("retry", "skip", "back"), MEANS, "stop"),
        (again("retry"), dataclasses.replace(MEANS, can_skip=False), "back"),
        (again("retry", "back"), dataclasses.replace(MEANS, can_skip=False), "stop"),
        (again("retry", "skip"), dataclasses.replace(MEANS, older=None), "stop"),
        (again("retry", first=BUG), MEANS, "skip"),
        (again("retry", "skip", first=BUG), MEANS, "stop"),
        (again("retry", first=BUG), dataclasses.replace(MEANS, can_skip=False), "stop"),
    ],
)
def test_the_next_try_follows_from_the_failures(
    failures: list[LaunchFailure], means: Means, choice: str
) -> None:
    """Spec: REQ-RUN-063."""
    plan = decide(failures, means)
    assert plan.choice == choice
    assert plan.resume_from == (OLDER if choice == "back" else None)
    assert plan.skip == ((26, 26) if choice == "skip" else None)
    assert "\n" not in describe_plan(plan, failures[-1])
    assert describe_next(plan, failures, means)


def test_another_step_or_another_error_is_another_failure() -> None:
    first, second = again("retry")
    assert decide([first, dataclasses.replace(second, step=27)], MEANS).choice == "retry"
    first, second = again("retry", first=BUG)
    assert decide([first, dataclasses.replace(second, signature="V")], MEANS).choice == "retry"


def test_without_a_comparison_the_same_failure_is_tried_again_and_then_the_run_stops() -> None:
    failures = [dataclasses.replace(one, is_same=False) for one in again("retry", "retry")]
    chosen = [decide(failures[: count + 1], MEANS).choice for count in range(3)]
    assert chosen == ["retry", "retry", "stop"]


def test_a_death_without_a_trace_keeps_the_samples_that_were_left_out() -> None:
    failures = again("retry", "skip")
    failures[-1] = dataclasses.replace(failures[-1], kind="lost")
    plan = decide(failures, MEANS)
    assert (plan.choice, plan.skip) == ("retry", (26, 26))


FAILED = st.builds(
    LaunchFailure,
    launch=st.just(0),
    start=st.just(""),
    step=st.integers(21, 23),
    kind=st.sampled_from(["alarm", "error", "outside", "lost"]),
    signature=st.sampled_from(["", "K", "V"]),
    is_numeric=st.booleans(),
    is_same=st.booleans(),
    is_single=st.booleans(),
    difference=st.none(),
)


@given(
    failed=st.lists(FAILED, min_size=FAILURES + 1, max_size=FAILURES + 1),
    starts=st.integers(1, 5),
    can_skip=st.booleans(),
    older=st.sampled_from([None, OLDER]),
)
def test_every_sequence_of_failures_ends_and_no_checkpoint_is_tried_too_often(
    *, failed: list[LaunchFailure], starts: int, can_skip: bool, older: str | None
) -> None:
    """Whatever fails and however: a bounded number of launches begins at a checkpoint. Spec: REQ-RUN-063."""
    means = Means(starts=starts, can_skip=can_skip, head=HEAD, older=older)
    failures = [dataclasses.replace(failed[0], launch=1, start=None)]
    for one in failed[1:]:
        plan = decide(failures, means)
        if plan.choice == "stop":
            break
        start = plan.resume_from or means.head
        # A launch from an older checkpoint reaches the newer one again, under another name.
        means = dataclasses.replace(means, head="step-00000020-l0009") if start == OLDER else means
        failures.append(
            dataclasses.replace(
                one, launch=len(failures) + 1, start=start, choice=plan.choice, skip=plan.skip
            )
        )
    else:
        raise AssertionError("the launches have no end")
    begun = [failure.start for failure in failures[1:]]
    assert all(begun.count(start) <= starts for start in begun)


def test_failures_belong_together_until_a_later_launch_has_saved_the_step() -> None:
    failures = again("retry", "skip")
    assert relate_failures(failures, [(1, 20)]) == failures
    assert relate_failures(failures, [(1, 26), (3, 25)]) == failures
    assert relate_failures(failures, [(2, 26)]) == failures[1:]
    assert relate_failures(failures, [(3, 30)]) == failures[2:]


def differing(writer: int, what: Any = "loss", step: int = 23) -> Any:
    found = StepDifference(step=step, writer=writer, what=what, text="")
    return found, [f"node-{writer}", f"new-{writer}"]


def test_the_process_whose_loss_differs_is_named_with_its_machines() -> None:
    found = merge_differences([differing(0, "weights"), differing(1)], 2)
    assert found is not None
    assert str(found) == "step 23 differs in the loss on process 1 (node-1 and new-1)"
    later = merge_differences([differing(0, step=22), differing(1)], 2)
    assert later is not None
    assert later.writers == (0,)


def test_a_difference_is_the_hardware_if_some_processes_agree_or_the_program_is_deterministic() -> (
    None
):
    assert getattr(merge_differences([differing(1)], 2), "is_proven", None) is True
    assert getattr(merge_differences([differing(0)], 1), "is_proven", None) is False
    verified = merge_differences([differing(0)], 1, has_verified=True)
    assert getattr(verified, "is_proven", None) is True


def test_samples_of_a_step_that_was_not_counted_alone_stay() -> None:
    failures = [dataclasses.replace(one, is_single=False) for one in again("retry")]
    assert decide(failures, MEANS).choice == "back"


def test_no_process_is_named_if_all_differ_alike() -> None:
    found = merge_differences([differing(0, "weights"), differing(1, "weights")], 2)
    assert found is not None
    assert found.nodes == ()
    assert "no machine stands out" in str(found)


def test_other_inputs_are_no_fault_of_the_hardware() -> None:
    assert merge_differences([differing(0, "rng"), differing(1)], 2) is None
    assert merge_differences([], 2) is None


DECISION = Decision(
    run_id="9f8b6c0d2e4a4f1c8d7e6b5a49382716",
    launch=2,
    step=26,
    kind="alarm",
    evidence=("launch 1, step 26: loss is nan",),
    choice="skip",
    resume_from=None,
    skip=(26, 26),
    sample_count=8,
    suspected="data",
    text="launch 2 failed",
    next="after the same failure: the run stops",
)


def test_a_damaged_decision_is_no_decision(tmp_path: Path) -> None:
    """Spec: REQ-RUN-064."""
    with ckptfmt.Checkpointer(tmp_path, ckptfmt.State(data={"n": 1})) as checkpointer:
        checkpointer.save(step=1)
    store = open_store(tmp_path, writable=True)
    store.replace(DECISION.path, DECISION.dump())
    store.replace("healing/0003.json", b"{}")
    assert read_decisions(store) == {2: DECISION}
    assert ckptfmt.Run(tmp_path).decisions() == (DECISION,)
    assert not ckptfmt.validate(tmp_path).violations


@given(text=st.text(max_size=2000), place=st.text(max_size=2000))
def test_an_ending_fits_behind_the_header(text: str, place: str) -> None:
    ending = Ending(kind="error", step=7, name="ValueError", place=place, text=text)
    content = ending.dump()
    assert len(content) == HEADER_NBYTES - ENDING_PLACE
    found = Ending.parse(b"\0" * ENDING_PLACE + content)
    assert found is not None
    assert (found.kind, found.step) == ("error", 7)
    assert text.startswith(found.text)
    assert Ending.parse(b"\0" * HEADER_NBYTES) is None


def raised(error: BaseException) -> BaseException:
    """Return an exception with a traceback."""
    with contextlib.suppress(BaseException):
        raise error
    return error


NUMERIC = [ValueError("loss is nan"), FloatingPointError("overflow")]
OUTSIDE = [
    OSError(5, "Input/output error"),
    ConnectionResetError(),
    RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
]
PROGRAM = [
    SystemExit(1),
    IndexError("index 7"),
    MemoryError(),
    RuntimeError("size"),
    OSError("image file is truncated"),
    FileNotFoundError(2, "No such file", "shard-7"),
]
ENDS: dict[str, list[BaseException | None]] = {
    "closed": [None, KeyboardInterrupt(), SystemExit(0)],
    "error": [*NUMERIC, *PROGRAM],
    "outside": [*OUTSIDE],
}


@pytest.mark.parametrize(
    ("error", "kind"), [(error, kind) for kind, errors in ENDS.items() for error in errors]
)
def test_the_end_of_a_launch_is_told_from_the_exception(
    error: BaseException | None, kind: str
) -> None:
    found = ending_of(None if error is None else raised(error), step=25, alarm=None)
    assert (found.kind, found.is_numeric) == (kind, error in NUMERIC)
    if error is not None and kind != "closed":
        assert found.step == 26
        assert found.place.startswith("test_decisions.py:")


def test_an_exit_code_after_a_stop_is_no_failure() -> None:
    assert ending_of(SystemExit(1), step=3, alarm=None, has_stopped=True).kind == "closed"


def test_an_alarm_of_the_program_is_no_failure_of_numbers() -> None:
    assert not ending_of(None, step=26, alarm=(26, "step 26: checksums differ")).is_numeric
    assert ending_of(None, step=26, alarm=(25, "step 25: grad_norm is 90")).is_numeric


def test_an_alarm_ends_a_launch_whatever_is_raised() -> None:
    for error in (None, raised(SystemExit(1))):
        found = ending_of(error, step=26, alarm=(26, "step 26: loss is nan"))
        assert (found.kind, found.step, found.text) == ("alarm", 26, "loss is nan")


@pytest.mark.parametrize("options", [{"quarantine": -1}, {"starts": 0}, {"quarantine": 1.5}])
def test_wrong_options_of_a_healer_are_refused(options: Any) -> None:
    with pytest.raises(ckptfmt.CkptError, match="ARGUMENT"):
        ckptfmt.Healer(**options)


def test_a_healer_needs_the_witness(tmp_path: Path) -> None:
    with pytest.raises(ckptfmt.CkptError, match="witness, which is off"):
        ckptfmt.Checkpointer(
            tmp_path,
            ckptfmt.State(data={"n": 1}),
            stop=ckptfmt.Stop(healer=ckptfmt.Healer()),
            checks=ckptfmt.Checks(witness=False),
        )

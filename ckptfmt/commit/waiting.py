"""Saves in progress in other processes: list the held attempts, and wait until they are decided.

A run's savers hold files in ``savers/``. Outside of a run, savers hold files in the checkpoint's
directory.

Spec: REQ-RUN-017, REQ-RUN-018, REQ-RUN-019, REQ-CMT-043.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from ckptfmt.documents.manifest import Origin
from ckptfmt.documents.run import SAVERS
from ckptfmt.errors import Code, err
from ckptfmt.store.protocol import Store

_NAME: Final = re.compile(r"([0-9]{4,})-([0-9]{5,})-[0-9a-f]{16}")
_ATTEMPT: Final = re.compile(r"[0-9a-f]{16}")
#: Suffix of the names of files that savers outside of a run hold during a save.
HELD_SUFFIX: Final = ".held"
_HELD_NAME: Final = re.compile(r"saver-([0-9a-f]{16})-[0-9]{5,9}\.held")
#: Sleep of a poll in seconds: the first, the longest, and the longest on a store with leases. There
#: each poll is a request, and a lease lasts a minute.
_POLL_MIN_S = 0.002
_POLL_MAX_S = 0.1
_POLL_LEASES_S = 1.0
#: Largest number of a launch's writers listed in a message.
_SHOWN: Final = 8


def held_path(attempt: str, writer: int) -> str:
    """Return the path of a held file outside of a run, relative to the checkpoint."""
    return f"saver-{attempt}-{writer:05d}{HELD_SUFFIX}"


def parse_held_path(path: str) -> str | None:
    """Return the attempt of a path from `held_path`; None for any other path.

    >>> parse_held_path(held_path("9f3c41d27ab80e65", 7)), parse_held_path("saver-9.held")
    ('9f3c41d27ab80e65', None)
    """
    found = _HELD_NAME.fullmatch(path)
    return None if found is None else found[1]


def poll(deadline_s: float, *, pause_max_s: float = _POLL_MAX_S) -> Iterable[None]:
    """Yield at once, then at growing intervals until the deadline, and once after the deadline."""
    end = time.monotonic() + deadline_s
    pause = _POLL_MIN_S
    while True:
        late = time.monotonic() >= end
        yield None
        if late:
            return
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        pause = min(pause_max_s, pause * 1.5)


def _poll_holds(store: Store, deadline_s: float) -> Iterable[None]:
    return poll(deadline_s, pause_max_s=_POLL_LEASES_S if store.holds_expire else _POLL_MAX_S)


def list_held(store: Store) -> list[str]:
    """Return the names of the files in ``savers/`` of a run that a living process holds.

    Raises: StoreError.
    """
    return store.list_held(SAVERS)


def wait_for_savers(
    store: Store, *, deadline_s: float, on_wait: Callable[[list[str]], Any] | None = None
) -> list[str]:
    """Wait until no living saver of a run has a save in progress.

    Args:
        store: a store rooted at the run.
        deadline_s: longest wait in seconds.
        on_wait: called once before the wait begins, with the held names.

    Returns: the names still held at the deadline; an empty list if all saves are decided.
    Raises: StoreError. Spec: REQ-RUN-018.
    """
    held: list[str] = []
    for turn, _ in enumerate(_poll_holds(store, deadline_s)):
        held = list_held(store)
        if not held:
            return []
        if turn == 0 and on_wait is not None:
            on_wait(held)
    return held


def launches_of(names: Iterable[str]) -> set[int]:
    """Return the launches to which held names belong.

    >>> launches_of(["0003-00000-9f3c41d27ab80e65", "0003-00001-9f3c41d27ab80e65"])
    {3}
    """
    return {int(found[1]) for name in names if (found := _NAME.fullmatch(name)) is not None}


def describe_savers(names: Iterable[str]) -> str:
    """Return a description of the launches and writers to which held names belong.

    >>> describe_savers(["0003-00000-9f3c41d27ab80e65", "0003-00001-9f3c41d27ab80e65"])
    'launch 3 (writers 0, 1)'
    """
    launches: dict[int, list[int]] = {}
    others: list[str] = []
    for name in sorted(names):
        found = _NAME.fullmatch(name)
        if found is None:
            others.append(f"attempt {name}" if _ATTEMPT.fullmatch(name) else repr(name))
        else:
            launches.setdefault(int(found[1]), []).append(int(found[2]))
    return ", ".join(
        [
            *(f"launch {launch} ({_writers(writers)})" for launch, writers in launches.items()),
            *others,
        ]
    )


def _writers(writers: list[int]) -> str:
    shown = ", ".join(map(str, writers[:_SHOWN]))
    more = f" and {len(writers) - _SHOWN} more" if len(writers) > _SHOWN else ""
    return f"writer{'s' if len(writers) > 1 else ''} {shown}{more}"


@contextlib.contextmanager
def hold_attempt(store: Store, origin: Origin, writer: int, *, must: bool) -> Iterator[list[str]]:
    """Hold an undecided attempt outside of a run while the context is open.

    The context's value is a list of the other attempts held before.

    Args:
        must: whether to raise if the file system has no locks, or if holds are leases. Other savers
            delete files of attempts without a hold, so the hold of an attempt that may still
            commit has to be reliable.

    Raises: StoreError(STORE_UNSUPPORTED). Spec: REQ-CMT-043, REQ-STO-011.
    """
    remedy = "Save to a path where nothing is, and remove the old checkpoint afterwards."
    if must and store.holds_expire:
        detail = (
            "holds on an object store run out while their holder may still commit: replace="
            " needs locks"
        )
        raise err(
            Code.STORE_UNSUPPORTED,
            detail,
            where=store.name,
            requirement="REQ-STO-011",
            remedy=remedy,
        )
    earlier = list_held_attempts(store, but=origin.attempt)
    with store.hold(held_path(origin.attempt, writer)):
        if must and origin.attempt not in list_held_attempts(store):
            # Other savers couldn't distinguish this attempt's files from leftovers of a killed
            # save.
            detail = "the file system has no locks, which replace= needs"
            raise err(Code.STORE_UNSUPPORTED, detail, where=store.name, remedy=remedy)
        yield earlier


def list_held_attempts(store: Store, *, but: str = "") -> list[str]:
    """Return the attempts that a living process holds in a checkpoint directory.

    Args:
        but: an attempt to leave out, such as the caller's own. Testing a hold locks the file for an
            instant, and a holder that ends the hold during this instant leaves the file behind.

    Raises: StoreError.
    """
    held = store.list_held("", lambda name: parse_held_path(name) not in (None, but))
    return sorted({attempt for name in held if (attempt := parse_held_path(name)) is not None})


def wait_for_attempts(
    store: Store, attempts: Iterable[str] | None = None, *, deadline_s: float
) -> None:
    """Wait until no living process holds an attempt of `attempts` in a checkpoint directory.

    Args:
        attempts: the attempts to wait for; None for all, including attempts that begin during the
            wait.
        deadline_s: longest wait in seconds.

    Raises: CommitError(SAVE_PENDING) at the deadline; StoreError. Spec: REQ-CMT-043.
    """
    awaited = None if attempts is None else set(attempts)
    held: list[str] = []
    for _ in _poll_holds(store, deadline_s) if awaited != set() else ():
        held = [
            attempt
            for attempt in list_held_attempts(store)
            if awaited is None or attempt in awaited
        ]
        if not held:
            return
    if held:
        detail = (
            f"after {deadline_s:g} s another saver still has a save to this path in hand:"
            f" attempt {held[0]}"
        )
        raise err(Code.SAVE_PENDING, detail, where=store.name, requirement="REQ-CMT-043")

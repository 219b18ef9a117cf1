"""Saves that other processes still have in their hands: who has some, and when they are decided.

Spec: REQ-RUN-017, REQ-RUN-018, REQ-RUN-019.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from ckptfmt.commit.decision import poll
from ckptfmt.documents.run import SAVERS
from ckptfmt.errors import CkptError, StoreError
from ckptfmt.store.protocol import Store

_NAME: Final = re.compile(r"([0-9]{4,})-([0-9]{5,})-[0-9a-f]{16}")
#: How many writers of a launch are named.
_SHOWN: Final = 8


def list_held(store: Store) -> list[str]:
    """Return the names of the files in ``savers/`` of a run that a living process holds. Raises: StoreError."""
    return [name for name in store.list_names(SAVERS) if _is_held(store, f"{SAVERS}/{name}")]


def wait_for_savers(store: Store, *, deadline_s: float, on_wait: Callable[[list[str]], Any] | None = None) -> list[str]:
    """Wait for the saves that living savers have in their hands.

    Args:
        store: rooted at the run.
        deadline_s: how long at most, in seconds.
        on_wait: called once, before anything is waited for, with the names of what is held.

    Returns: the names that are still held at the deadline; empty if all is decided.
    Raises: StoreError. Spec: REQ-RUN-018.
    """
    held: list[str] = []
    for turn, _ in enumerate(poll(deadline_s)):
        held = list_held(store)
        if not held:
            return []
        if turn == 0 and on_wait is not None:
            on_wait(held)
    return held


def launches_of(names: Iterable[str]) -> set[int]:
    """Return the launches whose saves they are.

    >>> launches_of(["0003-00000-9f3c41d27ab80e65", "0003-00001-9f3c41d27ab80e65"])
    {3}
    """
    return {int(found[1]) for name in names if (found := _NAME.fullmatch(name)) is not None}


def describe_savers(names: Iterable[str]) -> str:
    """Say whose saves they are.

    >>> describe_savers(["0003-00000-9f3c41d27ab80e65", "0003-00001-9f3c41d27ab80e65"])
    'launch 3 (writers 0, 1)'
    """
    launches: dict[int, list[int]] = {}
    others: list[str] = []
    for name in sorted(names):
        found = _NAME.fullmatch(name)
        if found is None:
            others.append(repr(name))
        else:
            launches.setdefault(int(found[1]), []).append(int(found[2]))
    return ", ".join([*(f"launch {launch} ({_writers(writers)})" for launch, writers in launches.items()), *others])


def _writers(writers: list[int]) -> str:
    shown = ", ".join(map(str, writers[:_SHOWN]))
    more = f" and {len(writers) - _SHOWN} more" if len(writers) > _SHOWN else ""
    return f"writer{'s' if len(writers) > 1 else ''} {shown}{more}"


def _is_held(store: Store, path: str) -> bool:
    try:
        return store.is_held(path)
    except StoreError:
        raise
    except CkptError:
        return False  # It isn't a regular file, or is gone: nobody holds that.

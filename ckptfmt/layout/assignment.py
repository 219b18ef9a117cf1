"""Who writes what: each key by one of its holders, bytes spread evenly. Pure and the same wherever it is computed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeVar

from ckptfmt.errors import Code, err


class _Key(Hashable, Protocol):
    """What can be put into a set and into order."""

    def __lt__(self, other: Any, /) -> bool: ...  # noqa: ANN401 - of the key's own type


K = TypeVar("K", bound=_Key)


def assign_writers(holdings: Sequence[Sequence[tuple[K, int]]]) -> tuple[frozenset[K], ...]:
    """Return for each writer the keys that it writes: each key exactly once, by one of its holders.

    What has one holder is given to it first. The rest goes, largest first, to the holder with the fewest bytes so far;
    ties go to the lower key, then to the lower writer. The result depends on nothing else, not even on the order
    within a writer's list.

    Args:
        holdings: for each writer, what it holds: key and number of bytes.

    Units: bytes.
    Raises: ARGUMENT when a writer lists a key twice; TENSOR_DIVERGED when two writers give a key different sizes.
    Source: LPT scheduling, R. L. Graham, SIAM J. Appl. Math. 17 (1969), with restricted machines.

    >>> [sorted(keys) for keys in assign_writers([[("a", 5), ("b", 3), ("c", 3)], [("a", 5), ("b", 3)]])]
    [['b', 'c'], ['a']]
    """
    holders, nbytes = _invert(holdings)
    load = [0] * len(holdings)
    written: list[list[K]] = [[] for _ in holdings]
    # The only holder has no choice; the others are balanced around it.
    order = sorted(holders, key=lambda key: (len(holders[key]) > 1, -nbytes[key], key))
    for key in order:
        writer = min(holders[key], key=lambda holder: (load[holder], holder))
        load[writer] += nbytes[key]
        written[writer].append(key)
    return tuple(frozenset(keys) for keys in written)


def _invert(holdings: Sequence[Sequence[tuple[K, int]]]) -> tuple[dict[K, list[int]], dict[K, int]]:
    """Return the writers that hold each key, ascending, and each key's bytes."""
    holders: dict[K, list[int]] = {}
    nbytes: dict[K, int] = {}
    for writer, held in enumerate(holdings):
        for key, key_nbytes in held:
            of_key = holders.setdefault(key, [])
            if of_key and of_key[-1] == writer:
                raise err(Code.ARGUMENT, f"writer {writer} lists {key} twice")
            of_key.append(writer)
            if nbytes.setdefault(key, key_nbytes) != key_nbytes:
                detail = f"{key} has {nbytes[key]} bytes on writer {of_key[0]} and {key_nbytes} on writer {writer}"
                raise err(Code.TENSOR_DIVERGED, detail)
    return holders, nbytes

"""The comparison of plain values that must be equal on all processes, before a save is written."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Final

from ckptfmt.adapters.live_trees import GLOBAL
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.part import Leaf
from ckptfmt.group import Group
from ckptfmt.layout.merge import leaf_diverged

#: Size of the exchanged prefix of a digest in bytes: enough to find mistakes.
_DIGEST_NBYTES: Final = 8
#: Prefix of the values of ``State(extra=...)``. Each of them has a separate mark; the remaining
#: leaves of a field are compared together.
_EXTRA: Final = "extra/"

#: The marks of a process's leaves: for each group a digest of the names and a digest of the values.
Marks = dict[str, list[str]]


def mark_leaves(leaves: Iterable[Leaf], *, fields: frozenset[str] | None = None) -> Marks:
    """Return the marks of the leaves that all processes share, for an exchange.

    Args:
        leaves: leaves of this process, in order.
        fields: fields to compare; None for all.
    """
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.scope == GLOBAL and (fields is None or leaf.field in fields):
            groups.setdefault(_group_of(leaf), []).append(leaf)
    return {
        group: [
            _digest("\0".join(leaf.name for leaf in some).encode()),
            _digest(b"".join(digest_bytes(leaf.value) for leaf in some)),
        ]
        for group, some in groups.items()
    }


def check_same_leaves(group: Group, leaves: Iterable[Leaf], told: list[Marks]) -> None:
    """Refuse leaves of one name that differ between processes; every process calls this.

    Processes with different names in a group, such as stages of a pipeline, aren't compared here.
    The merge of their parts compares them.

    Args:
        told: marks of all processes, by process number.

    Raises: LayoutError(LEAF_DIVERGED), the same on all processes.
    Spec: REQ-CTX-001, REQ-CMT-014.
    """
    groups = sorted({name for marks in told for name in marks})
    differing = next((name for name in groups if _differs(name, told)), None)
    if differing is None:
        return
    mine = {
        leaf.name: leaf for leaf in leaves if leaf.scope == GLOBAL and _group_of(leaf) == differing
    }
    digests = group.all_gather({name: _digest(leaf.value) for name, leaf in mine.items()})
    pair = _find_pair(digests)
    if pair is None:
        return
    name, (one, other) = pair
    own = mine[name].value if group.writer in (one, other) else b""
    values = [
        base64.b64decode(theirs) for theirs in group.all_gather(base64.b64encode(own).decode())
    ]
    raise leaf_diverged(
        (differing.partition("/")[0], name, GLOBAL), (one, values[one]), (other, values[other])
    )


def _group_of(leaf: Leaf) -> str:
    extra = (
        leaf.name.removeprefix(_EXTRA).partition("/")[0] if leaf.name.startswith(_EXTRA) else None
    )
    return leaf.field if extra is None else f"{leaf.field}/{_EXTRA}{extra}"


def _differs(name: str, told: list[Marks]) -> bool:
    """Return whether processes with the same names in a group have different values."""
    values: dict[str, str] = {}
    marks = (theirs[name] for theirs in told if name in theirs)
    return any(values.setdefault(names, digest) != digest for names, digest in marks)


def _find_pair(digests: list[Mapping[str, str]]) -> tuple[str, tuple[int, int]] | None:
    """Return the first differing leaf, and the lowest two writers with different values."""
    first: dict[str, tuple[int, str]] = {}
    found = []
    for writer, theirs in enumerate(digests):
        for name, digest in theirs.items():
            one, known = first.setdefault(name, (writer, digest))
            if known != digest:
                found.append((name, (one, writer)))
    return min(found) if found else None


def _digest(content: bytes) -> str:
    return digest_bytes(content)[:_DIGEST_NBYTES].hex()

"""Plain values that all processes must give alike: compared as a save is agreed on, before anything is written."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Final

from ckptfmt.adapters.live_trees import GLOBAL
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.part import Leaf
from ckptfmt.group import Group
from ckptfmt.layout.merge import leaf_diverged

#: How many bytes of a digest are exchanged: they find mistakes.
_DIGEST_NBYTES: Final = 8
#: Leaves of a field are compared together, but for the values of ``State(extra=...)``, each of which has its own mark.
_EXTRA: Final = "extra/"

#: What a process says of its leaves: by group, the digest of their names and that of their values.
Marks = dict[str, list[str]]


def mark_leaves(leaves: Iterable[Leaf], *, fields: frozenset[str] | None = None) -> Marks:
    """Return what a process tells the others of the leaves that all processes share.

    Args:
        leaves: those of this process, in their order.
        fields: the fields that are compared; None for all.
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
    """Refuse leaves of one name that differ between processes; every process calls it with what all have told.

    Processes that have other leaves of a group, as the stages of a pipeline do, aren't compared here: the merge of
    their parts does that.

    Raises: LayoutError(LEAF_DIVERGED), the same on all processes.
    Spec: REQ-CTX-001, REQ-CMT-014.
    """
    groups = sorted({name for marks in told for name in marks})
    differing = next((name for name in groups if _differs(name, told)), None)
    if differing is None:
        return
    mine = {leaf.name: leaf for leaf in leaves if leaf.scope == GLOBAL and _group_of(leaf) == differing}
    digests = group.all_gather({name: _digest(leaf.value) for name, leaf in mine.items()})
    pair = _find_pair(digests)
    if pair is None:
        return
    name, (one, other) = pair
    own = mine[name].value if group.writer in (one, other) else b""
    values = [base64.b64decode(theirs) for theirs in group.all_gather(base64.b64encode(own).decode())]
    raise leaf_diverged((differing.partition("/")[0], name, GLOBAL), (one, values[one]), (other, values[other]))


def _group_of(leaf: Leaf) -> str:
    extra = leaf.name.removeprefix(_EXTRA).partition("/")[0] if leaf.name.startswith(_EXTRA) else None
    return leaf.field if extra is None else f"{leaf.field}/{_EXTRA}{extra}"


def _differs(name: str, told: list[Marks]) -> bool:
    """Return whether processes that have the same leaves of a group have other values of them."""
    values: dict[str, str] = {}
    marks = (theirs[name] for theirs in told if name in theirs)
    return any(values.setdefault(names, digest) != digest for names, digest in marks)


def _find_pair(digests: list[Mapping[str, str]]) -> tuple[str, tuple[int, int]] | None:
    """Return the first leaf that differs, and the lowest writers that have it differently."""
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

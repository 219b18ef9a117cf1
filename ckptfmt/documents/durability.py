"""Durability levels: the location of a checkpoint's files at its commit, home or node caches.

Spec: REQ-MAN-012.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ckptfmt.errors import CkptError, Code, err
from ckptfmt.features import CACHES

#: The files are in a cache of the writing node, and survive the processes.
NODE: Final = "node"
#: The files are in the cache of another node as well, and survive the loss of a node.
PEERS: Final = "peers"
#: The files are at home, and survive the loss of all nodes. Documents leave out this level.
HOME: Final = "home"
#: All levels, from the weakest to the strongest.
LEVELS: Final = (NODE, PEERS, HOME)


def weakest(levels: Iterable[str]) -> str:
    """Return the weakest of some levels; the strongest level if there are none.

    >>> weakest(["home", "node", "peers"]), weakest([])
    ('node', 'home')
    """
    return min(levels, key=LEVELS.index, default=HOME)


def durability_members(durability: str) -> dict[str, Any]:
    """Return the members of a document; empty if all files are at home."""
    return {} if durability == HOME else {"durability": durability}


def parse_durability(
    members: Mapping[str, Any], features: Iterable[str], run_id: object, where: str
) -> str:
    """Return the durability of a manifest or part, a member behind the feature ``caches``.

    Args:
        members: all members of the document.
        features: the reader features that the document lists.
        run_id: the document's run; None outside of a run, where caches aren't used.

    Raises: FormatError(DOC_SCHEMA). Spec: REQ-MAN-012.
    """
    is_listed = CACHES in features
    if ("durability" in members) != is_listed:
        raise _broken("durability goes with the feature caches", where)
    if not is_listed:
        return HOME
    if run_id is None:
        raise _broken("durability outside of a run", where)
    found = members["durability"]
    if found not in (NODE, PEERS):
        raise _broken(f"durability is neither {NODE} nor {PEERS}", where)
    return str(found)


def _broken(detail: str, where: str) -> CkptError:
    return err(Code.DOC_SCHEMA, detail, where=f"{where}/durability", requirement="REQ-MAN-012")

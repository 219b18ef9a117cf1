"""Where the files of a checkpoint were when it was committed: at home, or in caches of nodes. Spec: REQ-MAN-012."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ckptfmt.errors import CkptError, Code, err
from ckptfmt.features import CACHES

#: In a cache of the node that wrote it: it survives the processes.
NODE: Final = "node"
#: In the cache of another node as well: it survives the loss of a node.
PEERS: Final = "peers"
#: At home: it survives the loss of all nodes. No document says so.
HOME: Final = "home"
#: From the weakest to the strongest.
LEVELS: Final = (NODE, PEERS, HOME)


def weakest(levels: Iterable[str]) -> str:
    """Return what holds for all of them.

    >>> weakest(["home", "node", "peers"]), weakest([])
    ('node', 'home')
    """
    return min(levels, key=LEVELS.index, default=HOME)


def asks_for_home(durability: object) -> bool:
    """Return whether a caller asks that the files of a save go home; None leaves that open.

    Raises: StateError(ARGUMENT).
    """
    if durability not in (None, HOME):
        remedy = "upload_every= says which saves stay in caches."
        raise err(Code.ARGUMENT, f"durability={durability!r} isn't {HOME!r}", where="durability=", remedy=remedy)
    return durability == HOME


def durability_members(durability: str) -> dict[str, Any]:
    """Return the members of a document: none where all files are at home."""
    return {} if durability == HOME else {"durability": durability}


def parse_durability(members: Mapping[str, Any], features: Iterable[str], run_id: object, where: str) -> str:
    """Return the durability that a manifest or part says, which has one behind a feature.

    Args:
        members: what the document has, its other members among them.
        features: the reader features that the document lists.
        run_id: of the document; only checkpoints of runs go through caches.

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

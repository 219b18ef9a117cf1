"""Another library's position in its data: opaque, and true for one number of workers alone.

    {"kind": "ckptfmt.foreign_loader", "v": 1, "lib": "torchdata", "version": "0.11.0", "per": "worker",
     "worker_count": 8, "state": {...}}

`state` is whatever the library gave, and nothing but the library knows what it means. With `per` ``worker``, each
worker saves its own, under its own scope; with ``run`` all save the same, and it counts over all of them.

Spec: REQ-CUR-022, REQ-CUR-023.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Literal, TypeAlias

from ckptfmt import limits
from ckptfmt.documents.cursor_map import CursorMap, refuse, show_value
from ckptfmt.errors import Code, err

KIND: Final = "ckptfmt.foreign_loader"
VERSION: Final = 1

Per: TypeAlias = Literal["worker", "run"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A loader's state, saved by `worker_count` workers: of each of them (`per` ``worker``), or of all at once."""

    lib: str
    version: str
    per: Per
    worker_count: int
    state: object


def is_foreign(tree: object) -> bool:
    """Tell whether a value says that it is another library's position."""
    return type(tree) is dict and tree.get("kind") == KIND


def dump_foreign(foreign: Foreign) -> dict[str, Any]:
    """Return the tree. Raises: CURSOR_FORM. Spec: REQ-CUR-022."""
    members = {field.name: getattr(foreign, field.name) for field in dataclasses.fields(foreign)}
    tree = {"kind": KIND, "v": VERSION, **members}
    parse_foreign(tree)
    return tree


def parse_foreign(tree: object, *, where: str = "loader") -> Foreign:
    """Return what a tree says.

    Raises: CURSOR_FORM, VERSION_UNSUPPORTED.
    Spec: REQ-CUR-022.
    """
    top = CursorMap.of(tree, where, clause="REQ-CUR-022")
    if top.members.get("kind") != KIND:
        refuse(f"not a loader's position: {show_value(top.members.get('kind'))}", f"{where}/kind", "REQ-CUR-022")
    version = top.integer("v", limits.JSON_INTEGER)
    if version != VERSION:
        detail = f"version {version} of a loader's position; this reader knows {VERSION}"
        raise err(Code.VERSION_UNSUPPORTED, detail, where=f"{where}/v", requirement="REQ-CUR-022")
    top.check_names("kind", "v", "lib", "version", "per", "worker_count", "state")
    per = top.text("per")
    if per not in ("worker", "run"):
        refuse(f"{per!r} is neither 'worker' nor 'run'", f"{where}/per", "REQ-CUR-022")
    return Foreign(
        lib=top.text("lib"),
        version=top.text("version"),
        per="worker" if per == "worker" else "run",
        worker_count=top.integer("worker_count", limits.WRITERS, least=1),
        state=top.members["state"],
    )

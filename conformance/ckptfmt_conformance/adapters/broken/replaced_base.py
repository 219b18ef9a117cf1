"""It takes whatever lies where a base should be: a delta on another base is another state."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

CONVICTED_BY = ("deltas/invalid/base-made-again", "deltas/invalid/of-itself")

_find = original("ckptfmt.read.closure:Closure.find")
_read_register = original("ckptfmt.read.closure:read_register")
_manifest = original("ckptfmt.read.closure:Manifest")
_checkpoint = original("ckptfmt.read.reader:Checkpoint")


def _find_any(closure: Any, reference: Any) -> Any:  # noqa: ANN401 - of the implementation
    place = closure._store.beside(reference.name)  # noqa: SLF001 - a fault needs no interface
    return place if isinstance(_read_register(place), _manifest) else _find(closure, reference)


def _open_any(store: Any, reference: Any, closure: Any) -> Any:  # noqa: ANN401 - of the implementation
    return _checkpoint(store, closure=closure, title=reference.name)


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.read.closure:Closure.find", _find_any),
        ("ckptfmt.read.reader:_open_base", _open_any),
    )

"""It takes whatever lies where a base should be: a delta on another base is another state."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

CONVICTED_BY = ("deltas/invalid/base-made-again", "deltas/invalid/of-itself")

_find = original("ckptfmt.read.files:Closure.find")
_read_register = original("ckptfmt.read.files:read_register")
_manifest = original("ckptfmt.read.files:Manifest")
_files = original("ckptfmt.read.files:CheckpointFiles")


def _find_any(closure: Any, reference: Any) -> Any:  # noqa: ANN401 - of the implementation
    place = closure._store.beside(reference.name)  # noqa: SLF001 - a fault needs no interface
    return place if isinstance(_read_register(place), _manifest) else _find(closure, reference)


def _open_any(store: Any, reference: Any, closure: Any) -> Any:  # noqa: ANN401 - of the implementation
    return _files(store, closure=closure, title=reference.name)


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.read.files:Closure.find", _find_any),
        ("ckptfmt.read.files:_open_base", _open_any),
    )

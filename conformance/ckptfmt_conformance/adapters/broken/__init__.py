"""Adapters with one known fault each, one module per area. `broken/lost_tuples` is `LostTuples`.

The docstring of a class describes the fault, `breaks` lists the violated clauses, and
`convicted_by` lists the cases that must not pass. A fault is active only during a question to its
adapter.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

__all__ = ["find_all"]


def find_all() -> dict[str, Any]:
    """Return the classes of the broken adapters by their names."""
    areas = [
        importlib.import_module(f"{__name__}.{area.name}")
        for area in pkgutil.iter_modules(__path__)
    ]
    return {
        re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower(): value
        for area in areas
        for name, value in vars(area).items()
        if isinstance(value, type) and "convicted_by" in vars(value)
    }


def __getattr__(name: str) -> type[Reference]:
    """Return a broken adapter's class by name, for `ckptfmt_conformance.adapters.broken:NAME`."""
    found: type[Reference] | None = None if name.startswith("_") else find_all().get(name)
    if found is None:
        raise AttributeError(f"there is no broken adapter {name!r}")
    return found

"""Adapters with one known fault each, in one module per area; `broken/lost_tuples` is the class `LostTuples`.

The docstring of a class says what is wrong, `breaks` which clauses that breaks, and `convicted_by` which cases must not
pass with it. A fault is in the implementation only while the adapter that has it is asked.
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
    areas = [importlib.import_module(f"{__name__}.{area.name}") for area in pkgutil.iter_modules(__path__)]
    return {
        re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower(): value
        for area in areas
        for name, value in vars(area).items()
        if isinstance(value, type) and "convicted_by" in vars(value)
    }


def __getattr__(name: str) -> type[Reference]:
    """Return a broken adapter by its name, so that `ckptfmt_conformance.adapters.broken:NAME` is its class."""
    found: type[Reference] | None = None if name.startswith("_") else find_all().get(name)
    if found is None:
        raise AttributeError(f"there is no broken adapter {name!r}")
    return found

"""Convert between live objects and saved data: numpy and plain values here, torch and JAX apart.

No module here imports torch or JAX before the program does: until then the program can't hold
objects of that library.
"""

from __future__ import annotations

import functools
import re
import sys
from importlib import import_module
from types import ModuleType
from typing import Any, Final, NamedTuple

from ckptfmt.errors import Code, err

__all__ = ["OLDEST_TORCH", "Sides", "check_torch", "find_sides", "jax_side", "torch_side"]

#: The oldest supported version of torch. `pyproject.toml` and README name the same version, and a
#: test compares them.
OLDEST_TORCH: Final = (2, 7)
#: The module for torch, imported by name so that this package doesn't depend on torch.
_TORCH: Final = "ckptfmt.adapters.torch"
#: The module for JAX, imported by name for the same reason.
_JAX: Final = "ckptfmt.adapters.jax"


def torch_side() -> ModuleType | None:
    """Return `ckptfmt.adapters.torch` if the program has loaded torch, else None.

    Raises: StateError(ARGUMENT) for a torch that is too old.
    """
    return _import_torch_side() if "torch" in sys.modules else None


@functools.cache  # each tensor of a load asks, and `import_module` takes longer than a dictionary
def _import_torch_side() -> ModuleType:
    check_torch(sys.modules["torch"])
    return import_module(_TORCH)


def jax_side() -> ModuleType | None:
    """Return `ckptfmt.adapters.jax` if the program has loaded jax, else None."""
    return import_module(_JAX) if "jax" in sys.modules else None


class Sides(NamedTuple):
    """The modules for torch and for JAX; None for a library that the program hasn't loaded."""

    torch: Any
    jax: Any


def find_sides() -> Sides:
    """Return the modules for torch and JAX. Raises: StateError(ARGUMENT) as `torch_side`."""
    return Sides(torch_side(), jax_side())


def check_torch(torch: ModuleType) -> None:
    """Check that the version of torch is supported. Raises: StateError(ARGUMENT)."""
    version = str(getattr(torch, "__version__", ""))
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        detail = f"ckptfmt needs torch {oldest} or newer, and this is torch {version}"
        raise err(Code.ARGUMENT, detail, where="torch", remedy=f"pip install 'torch>={oldest}'")

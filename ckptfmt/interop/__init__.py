"""From live objects to what the engines write, and back: numpy and plain values here, torch in `ckptfmt.interop.torch`.

Nothing here imports torch before the program does: as long as torch isn't loaded, no object can be one of its own.
"""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["torch_side"]


def torch_side() -> ModuleType | None:
    """Return `ckptfmt.interop.torch` if the program has loaded torch, else None."""
    if "torch" not in sys.modules:
        return None
    import ckptfmt.interop.torch  # noqa: PLC0415 - only now is torch known to be wanted

    return ckptfmt.interop.torch

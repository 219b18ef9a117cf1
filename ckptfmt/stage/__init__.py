"""Staging: memory that a trainer fills and the process that writes reads, and how much of it there may be."""

from __future__ import annotations

from ckptfmt.stage.room import available_nbytes, plan_slots
from ckptfmt.stage.slot import Slot

__all__ = ["Slot", "available_nbytes", "plan_slots"]

"""It deals a step's samples out to the workers in turn: on another number, each worker has others than it should."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

CONVICTED_BY = (
    "context/valid/samples-carry-1-of-2",
    "context/valid/samples-pad-2-of-3",
    "context/valid/samples-mixed-1-of-3",
)


class Broken(Reference):
    """See above."""

    def samples(self, content: bytes, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return every so manieth sample of each step."""
        found = super().samples(content, {**asked, "worker": 0, "worker_count": 1})
        steps = [step[asked["worker"] :: asked["worker_count"]] for step in found["steps"]]
        return {**found, "steps": steps}

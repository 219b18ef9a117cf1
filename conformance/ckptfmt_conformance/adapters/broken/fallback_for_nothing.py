"""It says that it passed over something where nothing was damaged: what was given up, and what was retired."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference

BREAKS = ("REQ-RUN-007",)
CONVICTED_BY = ("run/valid/launch-aborted", "run/valid/launch-resume-from-retired", "run/valid/launch-unfinished")


class Broken(Reference):
    """See above."""

    def launch(self, path: Any) -> dict[str, Any]:  # noqa: ANN401 - a path
        """Count what isn't committed as passed over."""
        found = super().launch(path)
        names = sorted((one.name for one in path.glob("step-*")), reverse=True)
        passed = [one for one in names if b'"manifest"' not in _register(path / one)]
        return {**found, "chosen_by": "fallback" if passed else found["chosen_by"]}


def _register(path: Any) -> bytes:  # noqa: ANN401 - a path
    place = path / "manifest.json"
    return bytes(place.read_bytes()) if place.is_file() else b""

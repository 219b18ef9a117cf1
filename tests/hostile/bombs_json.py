"""JSON documents of less than a megabyte, under valid digests, that would cost whoever reads them a lot: by name."""

from __future__ import annotations

from typing import Any, Final

from ckptfmt import limits

_TYPES: Final = ("manifest", "abort", "tombstone", "run", "launch", "failure", "pins")


def _signed(kind: str, **members: object) -> dict[str, Any]:
    features: dict[str, list[str]] = {"reader": [], "writer": []}
    return {"type": kind, "format_version": limits.FORMAT_VERSION, "features": features, **members}


def _below_long_keys() -> dict[str, object]:
    """Return many members below keys so long that the place of each would take 50 KB."""
    value: dict[str, object] = {f"{n:x}": 0 for n in range(80_000)}
    for _ in range(12):
        value = {"k" * 4000: value}
    return value


_MEMBERS: Final[dict[str, dict[str, Any]]] = {
    "references that are numbers": {"references": [0] * 400_000},
    "references that are lists": {"references": [[[]]] * 180_000},
    "many members": {f"{n:x}": 0 for n in range(90_000)},
    "many fields": {"fields": {"weights": {f"{n:x}": {} for n in range(80_000)}}},
    "members below long keys": {"fields": _below_long_keys()},
}

JSON_BOMBS: Final[dict[str, dict[str, Any]]] = {
    f"{kind}: {title}": _signed(kind, **members)
    for kind in _TYPES
    for title, members in _MEMBERS.items()
}

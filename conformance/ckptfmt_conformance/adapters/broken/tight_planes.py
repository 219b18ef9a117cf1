"""It refuses a zero among the bytes that a plane lists."""

from __future__ import annotations

from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-ENC-012",)
CONVICTED_BY = ("encodings/valid/sparse-plane-zero",)

_SCATTERED: Any = original("ckptfmt.codecs.lanes:_SCATTERED")
_take_set = original("ckptfmt.codecs.lanes:take_set")
np: Any = original("ckptfmt.codecs.lanes:np")


def _take_tight(source: Any, count: int) -> Any:  # noqa: ANN401 - of the implementation
    if not count:
        return source.take(0)
    kind = source.take_byte()
    if kind != _SCATTERED:
        return source.take_string_of(kind, count)
    places = _take_set(source, count)
    listed = source.take_string(places.size)
    if (listed == 0).any():
        raise source.refuse("a listed zero", "REQ-ENC-012")
    found = np.zeros(count, np.uint8)
    found[places] = listed
    return found


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.lanes:take_plane", _take_tight),)

"""It takes a complex element for one lane."""

from __future__ import annotations

import dataclasses

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-ENC-013",)
CONVICTED_BY = ("encodings/valid/difference-dtypes", "encodings/valid/xor-dtypes")

_lanes = original("ckptfmt.codecs.encodings:LANES")
#: That of complex128 would be wider than any integer of numpy.
_wide = {name: dataclasses.replace(_lanes[name], nbytes=2 * _lanes[name].nbytes) for name in ("complex32", "complex64")}


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.encodings:LANES", _lanes | _wide),)

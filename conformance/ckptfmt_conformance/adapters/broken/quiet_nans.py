"""It decodes into floats, and moves these as floats: a NaN that signals becomes one that is quiet."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-ENC-022",)
CONVICTED_BY = ("encodings/valid/bits",)

_QUIET = 1 << 22

_decode = original("ckptfmt.codecs.encodings:decode")


def _decode_as_floats(encoding: str, stored: memoryview, out: memoryview, **members: Any) -> None:  # noqa: ANN401 - of the implementation
    _decode(encoding, stored, out, **members)
    if encoding != "raw" and members["dtype"] == "float32":
        # By bits: whether a float that is copied becomes quiet depends on the machine.
        np.frombuffer(out, np.uint32)[np.isnan(np.frombuffer(out, np.float32))] |= np.uint32(_QUIET)


class Broken(Reference):
    """See above."""

    replacements = (("ckptfmt.codecs.encodings:decode", _decode_as_floats),)

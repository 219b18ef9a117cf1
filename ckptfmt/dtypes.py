"""The closed table of dtypes: name, size of an element, and name in safetensors.

A dtype without a name in safetensors is stored as U8, in separate files. All elements are
little-endian; a complex element is its real part, then its imaginary part. Spec: REQ-TEN-003.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import numpy as np

from ckptfmt.errors import Code, err


@dataclasses.dataclass(frozen=True, slots=True)
class Dtype:
    """One dtype of the format.

    Attributes:
        name: the name in numpy, ml_dtypes and torch.
        nbytes: size of an element in bytes.
        safetensors: the tag in a safetensors header; None where safetensors has no tag.
    """

    name: str
    nbytes: int
    safetensors: str | None


DTYPES: Final[dict[str, Dtype]] = {
    entry.name: entry
    for entry in (
        Dtype("bool", 1, "BOOL"),
        Dtype("uint8", 1, "U8"),
        Dtype("int8", 1, "I8"),
        Dtype("uint16", 2, "U16"),
        Dtype("int16", 2, "I16"),
        Dtype("uint32", 4, "U32"),
        Dtype("int32", 4, "I32"),
        Dtype("uint64", 8, "U64"),
        Dtype("int64", 8, "I64"),
        Dtype("float16", 2, "F16"),
        Dtype("bfloat16", 2, "BF16"),
        Dtype("float32", 4, "F32"),
        Dtype("float64", 8, "F64"),
        Dtype("complex64", 8, "C64"),
        Dtype("float8_e4m3fn", 1, "F8_E4M3"),
        Dtype("float8_e5m2", 1, "F8_E5M2"),
        Dtype("float8_e8m0fnu", 1, "F8_E8M0"),
        Dtype("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
        Dtype("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
        Dtype("complex128", 16, None),
        Dtype("complex32", 4, None),
        Dtype("float4_e2m1fn_x2", 1, None),
    )
}


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a dtype of the format.

    The module ml_dtypes provides bfloat16 and the float8 family.

    Raises: StateError(STATE_UNSUPPORTED) for a dtype missing in numpy and in ml_dtypes.
    """
    import ml_dtypes  # noqa: PLC0415

    if hasattr(ml_dtypes, name):
        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    try:
        return np.dtype(name).newbyteorder("<")
    except TypeError:
        raise err(
            Code.STATE_UNSUPPORTED,
            f"numpy has no dtype {name}",
            remedy="Load it into a torch tensor: pass a state, or framework='torch'.",
        ) from None

"""Saves and loads, with every byte compared."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from functools import partial

import torch

from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.neutral.asking import save_or_stop, try_load
from ckptfmt_conformance.neutral.case import Bench, NeutralCase, Verdict
from ckptfmt_conformance.neutral.peer import Peer
from ckptfmt_conformance.neutral.states import Expected, from_bits

__all__ = ["CASES"]

_STEP = 1234


def _round_trip(
    make: Callable[[], dict[str, object]],
    needs: str | None,
    peer: Peer,
    bench: Bench,
    *,
    may_refuse: bool,
    what: str,
) -> Verdict:
    if needs is not None and needs not in peer.describe().keeps:
        return Verdict(Status.UNSUPPORTED, f"the format keeps no {needs}")
    state = make()
    expected = Expected.of(state, _STEP if needs == "step" else None)
    path = bench.place("saved")
    save_or_stop(peer, path, state, _STEP, may_refuse=may_refuse)
    outcome = try_load(peer, path, state, expected)
    if outcome.kind == "same":
        return Verdict(Status.PASS, f"the same bytes: {what}")
    said = f"the load raised {outcome.said}" if outcome.kind == "raised" else outcome.said
    return Verdict(Status.FAIL, said)


# --- states ---------------------------------------------------------------------------------------


def _patterns(dtype: torch.dtype) -> torch.Tensor:
    """Return all bit patterns of one or two bytes; random and special patterns of wider types."""
    width = dtype.itemsize
    if width == 1:
        return from_bits(bytes(range(256)), dtype)
    if width == 2:
        return from_bits(b"".join(struct.pack("<H", bits) for bits in range(1 << 16)), dtype)
    content = random.Random(width).randbytes(width * 3000)
    if dtype in {torch.float32, torch.float64, torch.complex64, torch.complex128}:
        content += b"".join(_specials(dtype))
    return from_bits(content, dtype)


def _specials(dtype: torch.dtype) -> list[bytes]:
    """Return -0.0, infinities, subnormal numbers, and quiet and signalling NaNs, twice each.

    The NaNs have payloads.
    """
    if dtype in {torch.float32, torch.complex64}:
        words = (
            0x80000000,
            0x7F800000,
            0xFF800000,
            0x00000001,
            0x7FC00000,
            0x7FC12345,
            0xFFC00001,
            0x7F800001,
        )
        return [struct.pack("<II", word, word) for word in words]
    words = (
        1 << 63,
        0x7FF << 52,
        0xFFF << 52,
        1,
        0x7FF8 << 48,
        0x7FF8000012345678,
        0xFFF8000000000001,
        0x7FF << 52 | 1,
    )
    return [struct.pack("<QQ", word, word) for word in words]


def _of_dtypes(*names: str) -> dict[str, object]:
    dtypes = [getattr(torch, name) for name in names if hasattr(torch, name)]
    return {"tensors": {str(dtype).removeprefix("torch."): _patterns(dtype) for dtype in dtypes}}


def _bools() -> dict[str, object]:
    rng = random.Random(1)
    return {
        "tensors": {"mask": from_bits(bytes(rng.randrange(2) for _ in range(1001)), torch.bool)}
    }


def _empty() -> dict[str, object]:
    shapes = {"flat": (0,), "rows": (0, 7), "inner": (3, 0, 5)}
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    return {"tensors": {**tensors, "beside": torch.arange(5)}}


def _scalars() -> dict[str, object]:
    tensors = {
        "float": torch.tensor(-0.0),
        "int": torch.tensor(-(2**63)),
        "bool": torch.tensor(data=True),
    }
    return {"tensors": {**tensors, "one": torch.tensor([3.0])}}


def _views() -> dict[str, object]:
    base = from_bits(random.Random(2).randbytes(40 * 30 * 4), torch.float32, (40, 30))
    large = from_bits(random.Random(3).randbytes(1 << 16), torch.float16)
    return {
        "tensors": {
            "transposed": base.t(),
            "every other": base.clone()[::2, 1::3],
            "expanded": base[:1].clone().expand(7, 30),
            "channels last": base.clone()
            .reshape(2, 5, 10, 12)
            .to(memory_format=torch.channels_last),
            "inside": large[1000:1100],
        }
    }


def _tied() -> dict[str, object]:
    weight = from_bits(random.Random(4).randbytes(20 * 30 * 4), torch.float32, (20, 30))
    return {"tensors": {"embed.weight": weight, "head.weight": weight, "bias": torch.arange(20.0)}}


def _overlapping() -> dict[str, object]:
    weight = from_bits(random.Random(5).randbytes(20 * 30 * 4), torch.float32, (20, 30))
    return {
        "tensors": {
            "all": weight,
            "rows": weight[3:9],
            "turned": weight.t(),
            "beside": torch.arange(5),
        }
    }


def _with(values: dict[str, object]) -> dict[str, object]:
    return {"tensors": {"weight": torch.arange(10.0)}, "values": values}


def _stepped() -> dict[str, object]:
    return {"tensors": {"weight": torch.arange(10.0)}}


_PLAIN: dict[str, object] = {
    "epoch": 3,
    "lr": 0.1,
    "name": "gpt \u00e9 \u4e2d",
    "done": False,
    "nothing": None,
    "losses": [2.5, 1.25, 3],
    "nested": {"a": {"b": [1, [2, "x"]]}, "c": -7},
}
_EXACT: dict[str, object] = {
    "betas": (0.9, 0.95),
    "minus zero": -0.0,
    "not a number": math.nan,
    "infinite": -math.inf,
    "smallest": 5e-324,
    "random state": (3, tuple(range(50)), None),
    "wide": 2**63 - 1,
    "bytes": b"\x00\xff\x80",
}

# --- cases ----------------------------------------------------------------------------------------


def _case(
    name: str,
    asked: str,
    make: Callable[[], dict[str, object]],
    *,
    what: str,
    may_refuse: bool = True,
    needs: str | None = None,
) -> NeutralCase:
    return NeutralCase(
        id=name,
        asked=f"Save and load {asked}.",
        passes="Every byte, dtype, shape and value comes back.",
        fails="Other contents come back without an error, or the load raises.",
        unsupported="The save refuses the state by an error."
        if may_refuse
        else "The peer says so beforehand.",
        judge=partial(_round_trip, make, needs, may_refuse=may_refuse, what=what),
    )


_FLOATS = ("float64", "float32", "float16", "bfloat16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")

CASES = (
    _case(
        "bytes/floats",
        (
            "float64, float32, float16 and bfloat16, with -0.0, infinities, subnormal numbers and"
            " NaN"
            " payloads"
        ),
        partial(_of_dtypes, *_FLOATS),
        what="all patterns of 16 bits; 3,000 random and 16 special patterns of 32 and 64 bits",
        may_refuse=False,
    ),
    _case(
        "bytes/float8",
        "the five kinds of float8",
        partial(_of_dtypes, *_FLOAT8),
        what="all patterns of 8 bits, of each kind in torch",
    ),
    _case(
        "bytes/integers",
        "int8 to int64, and uint8",
        partial(_of_dtypes, "int8", "int16", "int32", "int64", "uint8"),
        what="all patterns of 8 and 16 bits, 3,000 random patterns of 32 and 64",
        may_refuse=False,
    ),
    _case(
        "bytes/unsigned",
        "uint16 to uint64",
        partial(_of_dtypes, "uint16", "uint32", "uint64"),
        what="all patterns of 16 bits, 3,000 random patterns of 32 and 64",
    ),
    _case("bytes/bool", "a mask of 1,001 booleans", _bools, what="still bool", may_refuse=False),
    _case(
        "bytes/complex64",
        "complex64",
        partial(_of_dtypes, "complex64"),
        what="with -0.0 and NaN payloads",
    ),
    _case(
        "bytes/complex128",
        "complex128",
        partial(_of_dtypes, "complex128"),
        what="with -0.0 and NaN payloads",
    ),
    _case(
        "shapes/empty",
        "tensors without elements, of one to three dimensions",
        _empty,
        what="the shapes, too",
    ),
    _case(
        "shapes/scalar",
        "tensors of no dimension",
        _scalars,
        what="the shapes, too",
        may_refuse=False,
    ),
    _case(
        "views/strided",
        "transposed, strided, expanded and channels-last tensors, and a slice of a larger storage",
        _views,
        what="all five",
    ),
    _case("views/tied", "a tensor under two names", _tied, what="under both names"),
    _case(
        "views/overlapping",
        "tensors with shared parts of a storage",
        _overlapping,
        what="under all names",
    ),
    _case(
        "values/step", "the step", _stepped, what="the same step", needs="step", may_refuse=False
    ),
    _case(
        "values/plain",
        "numbers, texts, lists and nested mappings",
        partial(_with, _PLAIN),
        what="of the same types",
        needs="values",
    ),
    _case(
        "values/exact",
        "tuples, bytes, wide integers, -0.0, NaN and infinity among the values",
        partial(_with, _EXACT),
        what="of the same types and bits",
        needs="values",
    ),
)

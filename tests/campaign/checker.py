"""Loads checkpoints into new tensors, and says what they hold; what is right somebody else decides."""

import gc
from typing import Any

import numpy as np

import ckptfmt
from tests.campaign.states import digest_of


def look_at(path: Any, ranges: dict[str, list[list[int]]], *, framework: Any) -> dict[str, Any]:
    """Load a checkpoint; return dtype, shape and digests of each tensor, and the plain values.

    Args:
        ranges: of each tensor, the ranges of its bytes to digest.
        framework: ``numpy`` or ``torch``: of the new tensors.
    """
    try:
        trees: Any = ckptfmt.load(path, framework=framework)
    except ckptfmt.CkptError as error:
        return {"error": str(error)}
    flat = {
        f"{field}:{name}": value
        for field in ("weights", "optimizer", "data")
        for name, value in _flatten(trees.get(field, {}))
        if not name.startswith("group/")
    }
    tensors = {name: value for name, value in flat.items() if hasattr(value, "dtype")}
    found = {
        "tensors": {
            name: _describe(value, ranges.get(name, ())) for name, value in tensors.items()
        },
        "values": {name: repr(value) for name, value in flat.items() if name not in tensors},
    }
    del trees, flat, tensors
    gc.collect()
    return found


def problems_of(run: Any) -> list[str]:
    """Return what `validate` has to say of a run."""
    return [str(violation) for violation in ckptfmt.validate(run).violations]


def _flatten(value: Any, name: str = "") -> Any:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, item in value.items():
        yield from _flatten(item, f"{name}/{key}" if name else str(key))


def _describe(value: Any, ranges: Any) -> dict[str, Any]:
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
        dtype, content = value.dtype.name, array.reshape(-1).view(np.uint8)
    else:
        import torch  # noqa: PLC0415

        dtype = str(value.dtype).removeprefix("torch.")
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    digests = {f"{begin}-{end}": digest_of(content[begin:end]) for begin, end in ranges}
    return {"dtype": dtype, "shape": list(value.shape), "digests": digests}

"""Changes to tensors during an asynchronous save: the checkpoint must hold the earlier values."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.neutral.asking import one_line, try_load
from ckptfmt_conformance.neutral.case import Bench, NeutralCase, Verdict
from ckptfmt_conformance.neutral.peer import AsyncPeer, Peer, Unsupported
from ckptfmt_conformance.neutral.states import Expected, mixed_state

__all__ = ["CASES"]


def _by_operator(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def _by_data(tensor: torch.Tensor) -> None:
    tensor.data[...] = -1


def _by_memory(tensor: torch.Tensor) -> None:
    """Write through numpy, which torch can't notice."""
    tensor.numpy().fill(0.5)


#: Ways to change a tensor, ordered from the most to the least visible to torch.
_WAYS: tuple[tuple[str, Callable[[torch.Tensor], None]], ...] = (
    ("add_", _by_operator),
    (".data", _by_data),
    ("numpy", _by_memory),
)


def _mutated(peer: Peer, bench: Bench) -> Verdict:
    if not isinstance(peer, AsyncPeer):
        return Verdict(Status.UNSUPPORTED, "a save ends before the call returns")
    keeps = peer.describe().keeps
    for round_ in range(bench.effort.async_rounds):
        name, change = _WAYS[round_ % len(_WAYS)]
        state = mixed_state(bench.effort.async_nbytes, round_)
        values = {"loss": [1.5, 2.5], "epoch": round_}
        if "values" in keeps:
            state["values"] = values
        expected = Expected.of(state, round_ + 1 if "step" in keeps else None)
        path = bench.place(f"round-{round_}")
        bench.note(f"saving, then changing tensors by {name}")
        try:
            pending = peer.save_async(path, state, round_ + 1)
            for tensor in reversed(cast("dict[str, torch.Tensor]", state["tensors"]).values()):
                change(tensor)
            values["loss"] = [-1.0]
            pending.wait()
        except Unsupported as error:
            return Verdict(Status.UNSUPPORTED, str(error))
        except KeyboardInterrupt:
            raise
        # Some libraries raise a BaseException that isn't an Exception.
        except BaseException as error:  # noqa: BLE001
            return Verdict(Status.FAIL, f"round {round_}: the save raised {one_line(error)}")
        outcome = try_load(peer, path, state, expected)
        if outcome.kind != "same":
            return Verdict(
                Status.FAIL, f"changed by {name} after the call: {outcome.kind}: {outcome.said}"
            )
    size = bench.effort.async_nbytes >> 20
    ways = ", ".join(name for name, _ in _WAYS[: bench.effort.async_rounds])
    seen = (
        f"{bench.effort.async_rounds} saves of {size} MiB, changed by {ways} right after the call"
    )
    return Verdict(Status.PASS, f"{seen}: the bytes of the call")


CASES = (
    NeutralCase(
        id="async/mutation",
        asked=(
            "Begin a save beside the training, and overwrite all tensors as soon as the call"
            " returns."
        ),
        passes="The checkpoint holds the tensors' contents at the call of the save.",
        fails="The checkpoint holds bytes written after the call, or the save raises.",
        unsupported="The library has no asynchronous save.",
        judge=_mutated,
    ),
)

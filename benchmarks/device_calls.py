"""Calls of a save on a device, counted on a stand-in: ``python -m benchmarks.device_calls``.

The stand-in copies nothing within the device, so the saved bytes mean nothing. Counted are each
thread's calls to the device's runtime, the waits for the device, and the seconds of Python of a
save's capture and plan.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

import ckptfmt
from ckptfmt.adapters import torch_side
from ckptfmt.adapters.torch.device_copies import Cuda
from ckptfmt.adapters.torch.devices import Devices
from ckptfmt.saving import one_save, saves

_DEVICE: Final = torch.device("cuda", 0)
_SPARE_NBYTES: Final = 1 << 40
#: The calls that block the calling thread until the device has done something.
_WAITS: Final = frozenset({"synchronize"})
#: The calls that a driver puts into a queue of bounded length.
_ENQUEUED: Final = frozenset({"copy_to_host", "copy_on_device", "digest_blocks"})


class CountingCuda(Cuda):
    """The calls to a device, counted by thread.

    Attributes:
        calls: the number of calls by thread ("training" or "copies") and name.
    """

    def __init__(self) -> None:
        self._training = threading.get_ident()
        self.calls: dict[str, collections.Counter[str]] = {
            "training": collections.Counter(),
            "copies": collections.Counter(),
        }

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in ("calls", "device_of") or name not in _CALLS:
            return super().__getattribute__(name)
        is_training = threading.get_ident() == self._training
        self.calls["training" if is_training else "copies"][name] += 1
        return functools.partial(_CALLS[name], self)

    def device_of(self, tensor: torch.Tensor) -> torch.device:  # noqa: ARG002
        """Return the only device."""
        return _DEVICE


def _copy(_cuda: Cuda, target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _empty(_cuda: Cuda, nbytes: int, *_: object) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "make_stream": lambda *_: object(),
    "make_pool": lambda *_: object(),
    "follow_current": lambda *_: None,
    "record_current": lambda *_: object(),
    "follow": lambda *_: None,
    "hold_current": lambda *_: None,
    "record": lambda *_: object(),
    "synchronize": lambda *_: None,
    "run_on": lambda _cuda, _stream, work: work(),
    "copy_to_host": _copy,
    "copy_on_device": lambda *_: None,
    "empty": _empty,
    "empty_for_both": _empty,
    "empty_on_host": _empty,
    "spare_nbytes": lambda *_: (_SPARE_NBYTES, _SPARE_NBYTES),
    "register": lambda *_: 0,
    "unregister": lambda *_: 0,
    "has_digests": lambda *_: False,
}


class _Block(torch.nn.Module):
    """Eight parameters, as a block of a transformer has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*size, bias=False) for size in sizes)


def measure(rounds: int = 30, *, blocks: int = 20, width: int = 64) -> dict[str, Any]:
    """Save a state of ``32 * blocks + 8`` tensors some times, and return the figures of a save.

    Returns: tensors; calls by thread and name, waits, enqueued copies, all of the last save;
        medians and least of the seconds of capture and plan, in milliseconds.
    """
    cuda = CountingCuda()
    seconds: dict[str, list[float]] = {"capture": [], "plan": []}
    model = torch.nn.Sequential(
        *(_Block(width) for _ in range(blocks)), torch.nn.Linear(width, width)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    state = ckptfmt.State(weights=model, optimizer=optimizer)
    side: Any = torch_side()
    patched: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, value: Any) -> None:
        patched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    patch(side, "Devices", functools.partial(Devices, cuda=cuda, device_type="cpu"))
    patch(one_save, "capture", _timed(one_save.capture, seconds["capture"]))
    patch(saves, "plan_copies", _timed(saves.plan_copies, seconds["plan"]))
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            ckptfmt.Checkpointer(directory, state, keep=1) as checkpointer,
        ):
            for step in range(1, rounds + 3):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                for times in seconds.values() if step == 3 else ():
                    times.clear()  # of the first saves
                for counter in cuda.calls.values():
                    counter.clear()
                checkpointer.step = step
                handle = checkpointer.save()
                assert handle is not None
                handle.wait()
    finally:
        for owner, name, value in reversed(patched):
            setattr(owner, name, value)
    tensors = 4 * sum(1 for _ in model.parameters())
    return {"tensors": tensors, **_describe(cuda), **_times(seconds)}


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            seconds.append(time.perf_counter() - begin_s)

    return call


def _describe(cuda: CountingCuda) -> dict[str, Any]:
    return {
        thread: {
            "calls": dict(sorted(calls.items())),
            "waits": sum(calls[name] for name in _WAITS),
            "enqueued": sum(calls[name] for name in _ENQUEUED),
        }
        for thread, calls in cuda.calls.items()
    }


def _times(seconds: dict[str, list[float]]) -> dict[str, Any]:
    return {
        f"{name}_ms": {
            "median": round(1e3 * statistics.median(times), 2),
            "least": round(1e3 * min(times), 2),
        }
        for name, times in seconds.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_calls")
    parser.add_argument("--rounds", type=int, default=30, help="saves (%(default)s)")
    options = parser.parse_args(arguments)
    print(json.dumps(measure(options.rounds), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Torch's random-number generators."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ckptfmt.errors import Code, err


def global_streams(devices: frozenset[str]) -> list[dict[str, Any]]:
    """Return the default generators: the host's, and one for each CUDA device in use.

    CUDA devices are numbered by their place among those in use, from 0, not by index: a worker's only device is number
    0 on whichever machine it runs. In use are the current device and those in `devices`.
    """
    streams: list[dict[str, Any]] = [
        {
            "name": "torch.cpu",
            "kind": "torch.mt19937",
            "read": lambda: torch.get_rng_state().numpy(),
            "write": lambda state: torch.set_rng_state(torch.from_numpy(state)),
        }
    ]
    if torch.cuda.is_initialized():
        indices = {torch.device(device).index for device in devices if device.startswith("cuda")}
        for number, index in enumerate(sorted(indices | {torch.cuda.current_device()})):
            streams.append(
                {
                    "name": f"torch.cuda/{number}",
                    "kind": "torch.philox",
                    "read": functools.partial(_read_cuda, index),
                    "write": functools.partial(_write_cuda, index),
                }
            )
    return streams


def is_generator(value: object) -> bool:
    """Tell whether this is a torch generator."""
    return type(value) is torch.Generator


def generator_stream(generator: torch.Generator) -> dict[str, Any]:
    """Return how the caller's generator is read and written; device type and state go together."""

    def read() -> object:
        return {"device": generator.device.type, "state": generator.get_state().numpy()}

    def write(saved: Any) -> None:  # noqa: ANN401 - what `read` returned
        if saved["device"] != generator.device.type:
            detail = f"a generator saved on {saved['device']} can't go on on {generator.device.type}"
            raise err(Code.STREAM_MISSING, detail)
        generator.set_state(torch.from_numpy(saved["state"]))

    return {"kind": "torch.generator", "read": read, "write": write}


def _read_cuda(index: int) -> object:
    return torch.cuda.get_rng_state(index).numpy()


def _write_cuda(index: int, state: Any) -> None:  # noqa: ANN401 - an array of bytes
    torch.cuda.set_rng_state(torch.from_numpy(state), index)

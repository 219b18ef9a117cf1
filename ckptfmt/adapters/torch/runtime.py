"""What torch has for the whole process: settings, versions and devices, random-number generators, other processes.

Settings are probed by name: what a torch lacks is None.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from ckptfmt.errors import Code, err
from ckptfmt.group import Group
from ckptfmt.read.sharing import Message, refuse_sharing

#: Attributes below `torch`; a callable is called without arguments.
_FLAGS: Final = (
    "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "utils.deterministic.fill_uninitialized_memory",
    "get_default_dtype",
    "get_float32_matmul_precision",
    "backends.cudnn.enabled",
    "backends.cudnn.deterministic",
    "backends.cudnn.benchmark",
    "backends.mkldnn.enabled",
    "backends.mkldnn.deterministic",
    "backends.opt_einsum.enabled",
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.fp32_precision",
    "backends.mkldnn.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
)


def flags() -> dict[str, object]:
    """Return the settings that decide bits, by their names in torch; plain values."""
    return {name: _probe(name) for name in _FLAGS}


def versions() -> dict[str, str | None]:
    """Return the versions of torch and of what it was built with."""
    return {
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def world_size() -> int | None:
    """Return the number of ranks where torch.distributed is initialised, else None."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else None


def local_facts(devices: Iterable[str]) -> dict[str, object]:
    """Return what is true of this machine: device kinds and names, threads, instruction set."""
    kinds = sorted({torch.device(device).type for device in devices})
    cuda = [torch.device(device) for device in sorted(devices) if device.startswith("cuda")]
    return {
        "device_kinds": kinds,
        "device_names": sorted({torch.cuda.get_device_name(device) for device in cuda}),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": _probe("backends.cpu.get_cpu_capability"),
        "compile": _compilers(),
    }


def _compilers() -> list[str]:
    """Return what torch.compile was called with in this process so far; of what it compiled torch keeps no list.

    A compiled module and a plain one round differently, and draw other random numbers for dropout.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = list(getattr(frames, "cached_backends", {}).values())
    return sorted({_describe(backend) for backend in backends if callable(backend)})


def _describe(backend: Any) -> str:  # noqa: ANN401 - whatever torch.compile takes
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__qualname__", type(backend).__qualname__)
    options = getattr(backend, "config", None) or getattr(backend, "kwargs", None) or {}
    told = {"dynamic": getattr(backend, "dynamic", None), **(options if isinstance(options, dict) else {})}
    return ", ".join([str(name), *(f"{key}={value}" for key, value in sorted(told.items()) if value is not None)])


def _probe(path: str) -> object:
    value: Any = torch
    for part in path.split("."):
        value = getattr(value, part, None)
    try:
        value = value() if callable(value) else value
    except RuntimeError:  # a setting that this build or this combination of settings doesn't answer for
        return None
    return value if value is None or type(value) in (bool, int, str) else str(value)


def global_streams(devices: frozenset[str]) -> list[dict[str, Any]]:
    """Return the default generators: the host's, and one for each CUDA device in use.

    CUDA devices are numbered by their place among those in use, from 0, not by index: a worker's only device is number
    0 on whichever machine it runs. In use are the current device and those in `devices`.
    """
    streams = [_stream("torch.cpu", "torch.mt19937", torch.get_rng_state, torch.set_rng_state)]
    if torch.cuda.is_initialized():
        indices = {torch.device(device).index for device in devices if device.startswith("cuda")}
        for number, index in enumerate(sorted(indices | {torch.cuda.current_device()})):
            read = functools.partial(torch.cuda.get_rng_state, index)
            write = functools.partial(torch.cuda.set_rng_state, device=index)
            streams.append(_stream(f"torch.cuda/{number}", "torch.philox", read, write))
    return streams


def _stream(
    name: str, kind: str, read: Callable[[], torch.Tensor], write: Callable[[torch.Tensor], None]
) -> dict[str, Any]:
    """Return an RNG stream whose state is an array."""
    return {
        "name": name,
        "kind": kind,
        "read": lambda: read().numpy(),
        "write": lambda state: write(torch.from_numpy(state)),
    }


def is_generator(value: object) -> bool:
    """Tell whether this is a torch generator."""
    return type(value) is torch.Generator


def seeded_state(device: str, seed: int) -> object:
    """Return the state of a generator of a type of device, seeded anew."""
    return torch.Generator(device=device).manual_seed(seed).get_state().numpy()


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


class TorchPeers:
    """See `ckptfmt.read.sharing.Peers`.

    Args:
        group: of the same processes, with the same numbers, for small values.
        process_group: of torch, that can send what is in the host's memory.
    """

    def __init__(self, group: Group, process_group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._process_group = process_group

    @property
    def number(self) -> int:
        """The number of this process."""
        return self._group.writer

    @property
    def count(self) -> int:
        """How many there are."""
        return self._group.writer_count

    def all_gather(self, value: object) -> list[Any]:
        """Return the JSON values of all processes, in their order."""
        return self._group.all_gather(value)

    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """Send each of `outgoing` and fill each of `incoming`; between two processes, in their order."""
        try:
            under_way = [
                dist.isend(torch.frombuffer(content, dtype=torch.uint8), peer, group=self._process_group)
                for peer, content in outgoing
            ]
            under_way += [
                dist.irecv(torch.frombuffer(content, dtype=torch.uint8), peer, group=self._process_group)
                for peer, content in incoming
            ]
            for work in under_way:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise err(Code.WRITERS_MISSING, f"a process that takes part in the load is gone: {error}") from error


@contextlib.contextmanager
def open_peers(group: Group) -> Iterator[TorchPeers]:
    """Give the peers of a group, whose processes are those of torch.distributed. All of them call it.

    Raises: StateError(ARGUMENT) where torch.distributed isn't initialised for just these processes.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != group.writer_count:
        raise refuse_sharing(group.writer_count)
    if "gloo" in str(dist.get_backend_config()):
        yield TorchPeers(group, None)
        return
    made = dist.new_group(backend="gloo")  # NCCL can't send from the host's memory
    try:
        yield TorchPeers(group, made)
    finally:
        dist.destroy_process_group(made)

"""Read torch's process-wide settings, versions, devices and generators; exchange bytes of a load.

Settings are looked up by name. A setting that this version of torch lacks is None.
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

#: Attributes below `torch`. Callables are called without arguments.
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
    """Return the settings that determine bits, by their names in torch, as plain values."""
    return {name: _probe(name) for name in _FLAGS}


def versions() -> dict[str, str | None]:
    """Return the version of torch, and the versions of its build dependencies."""
    return {
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def world_size() -> int | None:
    """Return the number of ranks, or None if torch.distributed isn't initialised."""
    distributed = torch.distributed
    return (
        distributed.get_world_size()
        if distributed.is_available() and distributed.is_initialized()
        else None
    )


def local_facts(devices: Iterable[str]) -> dict[str, object]:
    """Return facts about this machine: devices, threads, instruction set and compilers."""
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
    """Return the backends of torch.compile that this process has used so far.

    Torch keeps no list of the compiled modules. A compiled module rounds differently from a plain
    module, and draws other random numbers for dropout.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = list(getattr(frames, "cached_backends", {}).values())
    return sorted({_describe(backend) for backend in backends if callable(backend)})


def _describe(backend: Any) -> str:
    name = getattr(backend, "compiler_name", None) or getattr(
        backend, "__qualname__", type(backend).__qualname__
    )
    options = getattr(backend, "config", None) or getattr(backend, "kwargs", None) or {}
    told = {
        "dynamic": getattr(backend, "dynamic", None),
        **(options if isinstance(options, dict) else {}),
    }
    return ", ".join(
        [str(name), *(f"{key}={value}" for key, value in sorted(told.items()) if value is not None)]
    )


def _probe(path: str) -> object:
    value: Any = torch
    for part in path.split("."):
        value = getattr(value, part, None)
    try:
        value = value() if callable(value) else value
    except RuntimeError:  # this build, or this combination of settings, doesn't support the query
        return None
    return value if value is None or type(value) in (bool, int, str) else str(value)


def global_streams(devices: frozenset[str]) -> list[dict[str, Any]]:
    """Return the default generators: the host's, and the generator of each CUDA device in use.

    The devices in use are the CUDA devices in `devices`; without any, the current device, once CUDA
    is initialised. Names number the devices from 0 in the order of their indices, so a worker's
    only device has number 0 on each machine. Other accelerators have no streams.

    Args:
        devices: torch devices, such as ``cuda:0``. A device without an index is the current device.
    """
    streams = [
        _stream("torch.cpu", "torch.mt19937", torch.get_rng_state, torch.set_rng_state, "cpu")
    ]
    current = current_device()
    if current is None:
        return streams
    used = {device for device in devices if device.partition(":")[0] == "cuda"} or {current}
    indices = {torch.device(current if device == "cuda" else device).index for device in used}
    for number, index in enumerate(sorted(indices)):
        read = functools.partial(torch.cuda.get_rng_state, index)
        write = functools.partial(torch.cuda.set_rng_state, device=index)
        name = f"torch.cuda/{number}"
        streams.append(_stream(name, "torch.philox", read, write, f"cuda:{index}"))
    return streams


def count_draws_outside(
    devices: frozenset[str], generators: Iterable[object] = ()
) -> dict[str, int]:
    """Return the numbers of draws from the default generators of CUDA devices without a stream.

    A new seed sets the number to 0. The result is empty unless the state uses a CUDA device, and
    during the capture of a CUDA graph.

    Args:
        devices: the devices of the state, such as ``cuda:0``.
        generators: the generators that the caller saves; their devices are left out.
    """
    if not (torch.cuda.is_initialized() and any(device.startswith("cuda") for device in devices)):
        return {}
    if torch.cuda.is_current_stream_capturing():
        return {}
    given = set(map(id, generators))
    found = {}
    for index, generator in enumerate(torch.cuda.default_generators):
        if f"cuda:{index}" not in devices and id(generator) not in given:
            # The state of Philox: the seed, then the offset.
            content = torch.cuda.get_rng_state(index).numpy().tobytes()
            found[f"cuda:{index}"] = int.from_bytes(content[8:16], "little")
    return found


def current_device() -> str | None:
    """Return the current CUDA device, such as ``cuda:0``; None if CUDA isn't initialised."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else None


def _stream(
    name: str,
    kind: str,
    read: Callable[[], torch.Tensor],
    write: Callable[[torch.Tensor], None],
    device: str,
) -> dict[str, Any]:
    """Return an RNG stream with an array as the state."""
    return {
        "name": name,
        "kind": kind,
        "device": device,
        "read": lambda: read().numpy(),
        "write": lambda state: write(torch.from_numpy(state)),
    }


def is_generator(value: object) -> bool:
    """Return whether a value is a torch generator."""
    return type(value) is torch.Generator


def seeded_state(device: str, seed: int) -> object:
    """Return the state of a newly seeded generator for a device type."""
    return torch.Generator(device=device).manual_seed(seed).get_state().numpy()


def generator_stream(generator: torch.Generator) -> dict[str, Any]:
    """Return the device of a generator of the caller, and the functions that read and write it.

    The state includes the device type. A load compares the types before it writes an RNG stream,
    and leaves a generator on another type of device unchanged. Within the position of a loader, the
    order of the samples depends on the generator, so the write is refused.
    """

    def read() -> object:
        return {"device": generator.device.type, "state": generator.get_state().numpy()}

    def write(saved: Any) -> None:
        if saved["device"] != generator.device.type:
            detail = (
                f"a generator saved on {saved['device']} can't go on on {generator.device.type}"
            )
            remedy = f"Make the loader's generator on {saved['device']}, as at the save."
            raise err(Code.STREAM_MISSING, detail, remedy=remedy)
        generator.set_state(torch.from_numpy(saved["state"]))

    return {
        "kind": "torch.generator",
        "read": read,
        "write": write,
        "device": str(generator.device),
    }


class TorchPeers:
    """The processes of a shared load, connected by torch; see `ckptfmt.read.sharing.Peers`.

    Args:
        group: a group of the same processes, with the same numbers, for small values.
        process_group: a process group of torch that can send host memory.
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
        """The number of processes."""
        return self._group.writer_count

    def all_gather(self, value: object) -> list[Any]:
        """Return the JSON values of all processes, in the order of their numbers."""
        return self._group.all_gather(value)

    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """Send each of `outgoing` and fill each of `incoming`.

        Messages between two processes are matched in their order.
        """
        try:
            under_way = [
                dist.isend(
                    torch.frombuffer(content, dtype=torch.uint8), peer, group=self._process_group
                )
                for peer, content in outgoing
            ]
            under_way += [
                dist.irecv(
                    torch.frombuffer(content, dtype=torch.uint8), peer, group=self._process_group
                )
                for peer, content in incoming
            ]
            for work in under_way:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise err(
                Code.WRITERS_MISSING, f"a process that takes part in the load is gone: {error}"
            ) from error


@contextlib.contextmanager
def open_peers(group: Group) -> Iterator[TorchPeers]:
    """Yield the peers of a group. All processes of torch.distributed must call this function.

    Raises: StateError(ARGUMENT) if torch.distributed isn't initialised for exactly these processes.
    """
    if (
        not (dist.is_available() and dist.is_initialized())
        or dist.get_world_size() != group.writer_count
    ):
        raise refuse_sharing(group.writer_count)
    if "gloo" in str(dist.get_backend_config()):
        yield TorchPeers(group, None)
        return
    made = dist.new_group(backend="gloo")  # NCCL can't send host memory
    try:
        yield TorchPeers(group, made)
    finally:
        dist.destroy_process_group(made)

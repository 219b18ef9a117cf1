"""BLAKE3 on a GPU: equality with the host's digests, the rate against copies, and savings."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch

from benchmarks.figures import Figure, paired_ratio, summarize
from benchmarks.gpu_saves import SAVE_GOALS, STORAGE_FACTOR, measure_saves
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, check_room, order_of_round
from ckptfmt import limits
from ckptfmt.adapters.torch import blake3
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.digest import block_digests as host_digests

_ROUNDS: Final = 11
#: The largest multiple of the size in host memory: two slots of each of two runs, a loaded copy,
#: and the remaining buffers.
_MEMORY_FACTOR: Final = 6
_NO_DEVICE: Final = 2  # the exit status without a CUDA device
#: Sizes at which two programs could differ: ends of messages, chunks, blocks and groups of kernels.
_EDGES: Final = (
    1,
    63,
    64,
    65,
    1023,
    1024,
    1025,
    4095,
    4096,
    4097,
    (1 << 20) + 1,
    (9 << 20) + 3 * 1024 + 5,
)
_BLOCKS: Final = (limits.BLOCK_NBYTES_MIN, limits.BLOCK_NBYTES, limits.BLOCK_NBYTES_MAX)
#: Seconds of ours divided by seconds of a copy of the same bytes.
_RATIOS: Final = {
    "digest_vs_d2h": ("digest", "d2h", "<= 0.125"),
    "digest_vs_d2d": ("digest", "d2d", "<= 4"),
}


class Clock(Protocol):
    """A clock for work on a device."""

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds from the start to the end of the operations of `work`."""
        ...


class _EventClock:
    """The device's clock: events before and after the work, on the current stream."""

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds between the events, starting with an idle device."""
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class _WallClock:
    """The host's clock, for synchronous work."""

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds of the call."""
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s


def measure_gpu_digest(
    nbytes: int, *, rounds: int | None, place: Workplace, progress: Progress, device: str = "cuda"
) -> Outcome:
    """Measure digests of `nbytes` bytes on the current CUDA device, then saves of an equal size.

    Args:
        device: ``cpu`` for a rehearsal on the host.

    Raises: SystemExit, 2 without a CUDA device, a sentence without enough room; RuntimeError for a
        digest unlike the host's, or for a load unlike the save.
    """
    rounds = rounds or _ROUNDS
    if device == "cpu":
        host = torch.device(device)
        return measure_on(
            host, nbytes, clock=_WallClock(), rounds=rounds, place=place, progress=progress
        )
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip or "no GPU"
        print(
            (
                f"gpu_digest: no CUDA device here (torch {torch.__version__}, built for {built}):"
                " nothing was measured."
            ),
            file=sys.stderr,
        )
        raise SystemExit(_NO_DEVICE)
    check_room(
        place.directory,
        memory_nbytes=_MEMORY_FACTOR * nbytes,
        storage_nbytes=STORAGE_FACTOR * nbytes,
    )
    current = torch.device("cuda", torch.cuda.current_device())
    free_nbytes, _ = torch.cuda.mem_get_info(current)
    if free_nbytes < 3 * nbytes:
        raise SystemExit(
            f"needs {3 * nbytes / 1e9:.1f} GB of the device, {free_nbytes / 1e9:.1f} are free:"
            " --nbytes"
        )
    return measure_on(
        current, nbytes, clock=_EventClock(), rounds=rounds, place=place, progress=progress
    )


def measure_on(
    device: torch.device,
    nbytes: int,
    *,
    clock: Clock,
    rounds: int,
    place: Workplace,
    progress: Progress,
) -> Outcome:
    """Check and measure on any device: digests, then, with freed memory, saves."""
    digests = _measure_digests(device, nbytes, clock=clock, rounds=rounds, progress=progress)
    saves = measure_saves(device, nbytes, rounds=rounds, place=place, progress=progress)
    return dataclasses.replace(
        digests,
        workload={**digests.workload, **saves.workload},
        settings={**digests.settings, **saves.settings},
        repeats={**digests.repeats, "saves": rounds},
        rounds={**digests.rounds, "saves": saves.rounds},
        figures={**digests.figures, **saves.figures},
        ratios={**digests.ratios, **saves.ratios},
        goals={**digests.goals, **SAVE_GOALS},
        notes={**digests.notes, "saves": saves.notes},
    )


def _measure_digests(
    device: torch.device, nbytes: int, *, clock: Clock, rounds: int, progress: Progress
) -> Outcome:
    progress.say("gpu_digest: comparing with the host")
    content = _random_bytes(nbytes, device)
    checked = _check_equal(content)
    extra_nbytes = _measure_extra(content)
    works = _list_works(content)
    for work in works.values():  # compiled, allocated, pinned
        work()
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        progress.say(f"gpu_digest: round {number + 1} of {rounds}")
        order = order_of_round(list(works), number)
        rows.append({"order": order, "seconds": {name: clock.time(works[name]) for name in order}})
    progress.say("")
    return _sum_up(device, nbytes, rows, checked, extra_nbytes)


def _random_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device, generator=generator)


def _check_equal(content: torch.Tensor) -> dict[str, int]:
    """Compare with the host's digests: all bytes, every edge at two addresses, and a changed bit.

    Raises: RuntimeError.
    """
    held = content.cpu()
    cases = [(0, content.numel(), limits.BLOCK_NBYTES)]
    cases += [
        (begin, begin + nbytes, block_nbytes)
        for nbytes in _EDGES
        if nbytes < content.numel()
        for begin in (0, 1)
        for block_nbytes in _BLOCKS
    ]
    for begin, end, block_nbytes in cases:
        expected = host_digests(memoryview(held[begin:end].numpy()), block_nbytes)
        if _digest(content[begin:end], block_nbytes) != expected:
            raise RuntimeError(
                f"bytes {begin} to {end} in blocks of {block_nbytes}: not the digests of the host"
            )
    flipped = content[: limits.BLOCK_NBYTES].clone()
    before = _digest(flipped, limits.BLOCK_NBYTES)
    flipped[-1:].bitwise_xor_(1)
    if _digest(flipped, limits.BLOCK_NBYTES) == before:
        raise RuntimeError("another bit, the same digest")
    return {"cases": len(cases), "nbytes": sum(end - begin for begin, end, _ in cases)}


def block_digests(content: torch.Tensor, block_nbytes: int) -> torch.Tensor:
    """Return the digests of blocks, computed on their device.

    Raises: SystemExit for a device without a program.
    """
    if not content.is_cuda:
        digests = host_digests(memoryview(content.numpy()), block_nbytes)
        return torch.frombuffer(bytearray(digests), dtype=torch.uint8).reshape(-1, DIGEST_NBYTES)
    found = blake3.block_digests(content, block_nbytes)
    if found is None:
        raise SystemExit(
            "there are no kernels that digest on this device: it takes triton and a C compiler"
        )
    return found


def _digest(content: torch.Tensor, block_nbytes: int) -> bytes:
    return block_digests(content, block_nbytes).cpu().numpy().tobytes()


def _measure_extra(content: torch.Tensor) -> int | None:
    """Return a call's peak of device memory beyond the input, in bytes; None for the host."""
    if not content.is_cuda:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(content.device)
    torch.cuda.reset_peak_memory_stats(content.device)
    block_digests(content, limits.BLOCK_NBYTES)
    return int(torch.cuda.max_memory_allocated(content.device)) - before


def _list_works(content: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the timed operations: all on the same bytes, except the small operation."""
    copy = torch.empty_like(content)
    host = torch.empty(content.shape, dtype=torch.uint8, pin_memory=content.is_cuda)
    small = content[: limits.BLOCK_NBYTES]
    return {
        "digest": lambda: block_digests(content, limits.BLOCK_NBYTES),
        "digest_least_blocks": lambda: block_digests(content, limits.BLOCK_NBYTES_MIN),
        "digest_largest_blocks": lambda: block_digests(content, limits.BLOCK_NBYTES_MAX),
        "digest_unaligned": lambda: block_digests(content[1:], limits.BLOCK_NBYTES),
        "digest_one_block": lambda: block_digests(small, limits.BLOCK_NBYTES),
        "d2d": lambda: copy.copy_(content, non_blocking=True),
        "d2h": lambda: host.copy_(content, non_blocking=True),
    }


def _sum_up(
    device: torch.device,
    nbytes: int,
    rows: list[dict[str, Any]],
    checked: Mapping[str, int],
    extra: int | None,
) -> Outcome:
    seconds = {name: [row["seconds"][name] for row in rows] for name in rows[0]["seconds"]}
    figures: dict[str, Figure] = {"digest_one_block_s": summarize(seconds.pop("digest_one_block"))}
    figures |= {
        f"{name}_gb_per_s": summarize([nbytes / s / 1e9 for s in of])
        for name, of in seconds.items()
    }
    return Outcome(
        workload={"nbytes": nbytes, "tensors": 1, "block_nbytes": limits.BLOCK_NBYTES},
        settings={"device": _describe(device)},
        repeats={"digest": len(rows)},
        rounds={"digest": rows},
        figures=figures,
        ratios={
            name: paired_ratio(seconds[ours], seconds[copy])
            for name, (ours, copy, _) in _RATIOS.items()
        },
        goals={name: goal for name, (_, _, goal) in _RATIOS.items()},
        memory={} if extra is None else {"digest_extra_nbytes": extra},
        notes={"equal_to_host": dict(checked)},
        cache="digests: bytes on the device, more of them than its caches hold; the pinned target"
        " was touched before; "
        "saves: fresh files, slots filled before",
    )


def _describe(device: torch.device) -> dict[str, object]:
    """Return the entries for a record: the device, and the compiler of its program."""
    if device.type != "cuda":
        return {"name": device.type, "kernels": False}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "triton": _find_version("triton"),
        "kernels": blake3._find_kernels(device) is not None,  # noqa: SLF001
    }


def _find_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

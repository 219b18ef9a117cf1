"""Save by four processes, loads by two and by a single process: the bytes must be the same."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn

from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.neutral.asking import one_line
from ckptfmt_conformance.neutral.case import Bench, NeutralCase, Verdict
from ckptfmt_conformance.neutral.children import Child
from ckptfmt_conformance.neutral.peer import DistributedPeer, Loaded, Peer, Unsupported
from ckptfmt_conformance.neutral.states import Expected, from_bits

__all__ = ["CASES"]

_STEP: Final = 400
_COLLECTIVE_S: Final = 60.0
_GANG_S: Final = 120.0
#: Shape, dtype and placements: a mesh of one dimension for one name, of two for two names.
_LAYOUTS: Final[dict[str, tuple[tuple[int, ...], torch.dtype, tuple[str, ...]]]] = {
    "rows, uneven": ((10, 6), torch.float32, ("rows",)),
    "columns, uneven": ((3, 7), torch.bfloat16, ("columns",)),
    "fewer rows than processes": ((3, 5), torch.float32, ("rows",)),
    "replicated": ((5,), torch.int64, ("copy",)),
    "both": ((6, 9), torch.float32, ("rows", "columns")),
    "rows within rows": ((11, 2), torch.float64, ("rows", "rows")),
}


def _content(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the whole content of a tensor, derived from the name."""
    count = 1
    for extent in shape:
        count *= extent
    return from_bits(random.Random(name).randbytes(count * dtype.itemsize), dtype, shape)


def _make(*, right: bool) -> dict[str, object]:
    """Return this process's shards, with the right content or with zeros."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow to import
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - the same

    # The same.
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: PLC0415

    world_size = dist.get_world_size()
    columns = 2 if world_size % 2 == 0 else 1
    line = init_device_mesh("cpu", (world_size,), mesh_dim_names=("all",))
    grid = init_device_mesh("cpu", (world_size // columns, columns), mesh_dim_names=("y", "x"))
    placements = {"rows": Shard(0), "columns": Shard(1), "copy": Replicate()}
    tensors: dict[str, torch.Tensor] = {}
    for name, (shape, dtype, how) in _LAYOUTS.items():
        whole = _content(name, shape, dtype)
        mesh = line if len(how) == 1 else grid
        tensors[name] = distribute_tensor(
            whole if right else torch.zeros_like(whole), mesh, [placements[word] for word in how]
        )
    model = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 3))
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        parameter.data.copy_(_content(name, shape, torch.float32) if right else torch.zeros(shape))
    fully_shard(model, mesh=line)
    tensors |= {f"model.{name}": value for name, value in model.state_dict().items()}
    return {"tensors": tensors}


def _expected() -> Expected:
    tensors = {name: _content(name, shape, dtype) for name, (shape, dtype, _) in _LAYOUTS.items()}
    shapes = {"0.weight": (10, 7), "0.bias": (10,), "1.weight": (3, 10), "1.bias": (3,)}
    tensors |= {
        f"model.{name}": _content(name, shape, torch.float32) for name, shape in shapes.items()
    }
    return Expected.of({"tensors": tensors}, None)


def _whole(loaded: Loaded) -> Loaded:
    """Return a state with all shards gathered. Every process calls this function."""
    tensors = cast("Mapping[str, Any]", loaded.state["tensors"])
    gathered = {name: value.full_tensor() for name, value in tensors.items()}
    return Loaded({"tensors": gathered}, loaded.step)


def _save(peer: DistributedPeer, path: Path) -> str:
    peer.save_distributed(path, _make(right=True), _STEP)
    return ""


def _load(peer: DistributedPeer, path: Path) -> str:
    loaded = peer.load_distributed(path, _make(right=False))
    return _expected().difference(_whole(loaded)) or ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Said:
    """The answer of a process, with details.

    Attributes:
        kind: ``ok``, ``wrong``, ``unsupported``, ``raised`` or ``died``.
        more: the details.
    """

    kind: str
    more: str


def _gang(bench: Bench, world_size: int, act: Callable[[], str]) -> list[_Said]:
    """Run `act` in `world_size` forked processes of a process group, and return the answers."""
    meeting = bench.scratch / f"meeting-{world_size}"
    children = []
    for rank in range(world_size):

        def work(tell: Callable[[str], None], rank: int = rank) -> None:
            said = _act(meeting, rank, world_size, act)
            tell(json.dumps([said.kind, said.more]))

        children.append(Child(work))
    said = []
    for child in children:
        code = child.end(_GANG_S)
        lines = child.lines()
        said.append(
            _Said(*json.loads(lines[-1]))
            if lines
            else _Said("died", f"a process ended with status {code}")
        )
    return said


def _act(meeting: Path, rank: int, world_size: int, act: Callable[[], str]) -> _Said:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(meeting), world_size)  # type: ignore[attr-defined]  # public, but missing in the stubs
    timeout = dt.timedelta(seconds=_COLLECTIVE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        said = act()
    except Unsupported as error:
        return _Said("unsupported", str(error))
    # Any exception is reported to the judging process.
    except BaseException as error:  # noqa: BLE001
        return _Said("raised", one_line(error))
    dist.barrier()  # no process exits before all have received data
    return _Said("wrong" if said else "ok", said)


def _resized(peer: Peer, bench: Bench) -> Verdict:
    if not isinstance(peer, DistributedPeer):
        return Verdict(
            Status.UNSUPPORTED,
            "the library knows no shards: each process's file is a separate checkpoint",
        )
    path = bench.place("saved")
    rounds: list[tuple[str, int, Callable[[], str]]] = [
        ("saved and loaded by 4", 4, lambda: _save(peer, path) or _load(peer, path)),
        ("loaded by 2", 2, lambda: _load(peer, path)),
        ("loaded by 1", 1, lambda: _load(peer, path)),
    ]
    for number, (name, world_size, act) in enumerate(rounds):
        bench.note(name)
        (bench.scratch / str(number)).mkdir()
        inner = dataclasses.replace(bench, scratch=bench.scratch / str(number))
        for rank, said in enumerate(_gang(inner, world_size, act)):
            if said.kind == "unsupported":
                return Verdict(Status.UNSUPPORTED, said.more)
            if said.kind != "ok":
                return Verdict(
                    Status.FAIL, f"{name}, rank {rank} of {world_size}: {said.kind}: {said.more}"
                )
    count = len(_LAYOUTS) + 4
    return Verdict(
        Status.PASS,
        f"{count} tensors (DTensor and FSDP2) saved by 4 processes: the same bytes by 4, 2 and 1",
    )


CASES = (
    NeutralCase(
        id="layout/new-world-size",
        asked=(
            "Save DTensors and a module under FSDP2 with 4 gloo processes; load with 4, with 2"
            " and with 1."
        ),
        passes="Every byte of every tensor is the same in each layout.",
        fails="A tensor differs, or a load raises.",
        unsupported="The library doesn't know shards.",
        judge=_resized,
        # A call of fully_shard imports the last module.
        imports=(
            "torch.distributed.device_mesh",
            "torch.distributed.fsdp",
            "torch.distributed.tensor",
            "torch._dynamo",
        ),
    ),
)

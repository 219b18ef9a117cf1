"""One rank: save or load sharded tensors through torch.distributed.checkpoint.

Usage: dcp_worker.py save|async|process|load|fail|cached|phases|groups CHECKPOINT MEETING_FILE
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader as dcp_load
from torch.distributed.checkpoint import state_dict_saver as dcp_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckptfmt.plugins.dcp import CkptfmtReader, CkptfmtWriter, install


class Opaque:
    """An object that is no plain value."""


def rank_of() -> int:
    """Return the number of this rank."""
    return int(os.environ["RANK"])


def assert_loads(path: str, saved: dict[str, Any]) -> None:
    """Load what was saved into zeros, and compare."""
    into = {
        key: {name: torch.zeros_like(value) for name, value in held.items()}
        if isinstance(held, dict)
        else None
        for key, held in saved.items()
    }
    dcp_load.load(into, storage_reader=CkptfmtReader(path))
    for key, held in saved.items():
        for name, value in held.items() if isinstance(held, dict) else ():
            found: Any = into[key][name]  # type: ignore[index]
            assert torch.equal(
                getattr(found, "to_local", lambda t=found: t)(),
                getattr(value, "to_local", lambda t=value: t)(),
            ), (key, name)
        if not isinstance(held, dict):
            assert into[key] == held, key


def save_cached(path: str, mesh: Any) -> None:
    """Save four times with a planner that caches plans: a first time, alike, changed on one rank, and alike again."""
    own = 2
    for number in range(4):
        own += number == 2 and rank_of() == 1
        whole = torch.arange(42.0).reshape(7, 6) + number
        state = {
            "model": {
                "w": distribute_tensor(whole, mesh, [Shard(0)]),
                f"own{rank_of()}": torch.full((own,), 1.0 + number),
            },
            f"note{rank_of()}": [number, rank_of()],
        }
        planner = DefaultSavePlanner(enable_plan_caching=True)
        if number == 1:
            dcp_save.async_save(
                state, storage_writer=CkptfmtWriter(f"{path}-{number}"), planner=planner
            ).result()  # type: ignore[union-attr]
        else:
            dcp_save.save(state, storage_writer=CkptfmtWriter(f"{path}-{number}"), planner=planner)
        assert_loads(f"{path}-{number}", state)


class Faulty(DefaultSavePlanner):
    """A planner of which one method fails."""

    def __init__(self, method: str) -> None:
        super().__init__()

        def fail(*_args: object, **_kwargs: object) -> Any:
            raise OSError(f"{method} failed here")

        setattr(self, method, fail)


def fail_in_each_phase(path: str, mesh: Any) -> None:
    """Fail on one rank in each phase; in the end save."""
    whole = torch.arange(42.0).reshape(7, 6)
    state = {"model": {"w": distribute_tensor(whole, mesh, [Shard(0)])}}
    phases = [
        ("create_local_plan", 1),
        ("create_global_plan", 0),
        ("finish_plan", 1),
        ("resolve_data", 1),
        ("resolve_data", 0),
    ]
    for method, rank in phases:
        planner = Faulty(method) if rank_of() == rank else DefaultSavePlanner()
        try:
            dcp_save.save(state, storage_writer=CkptfmtWriter(path), planner=planner)
        except CheckpointException as error:
            assert f"{method} failed here" in str(error), error
            assert list(error.failures) == [rank], error.failures
            sys.stdout.write(f"refused by {rank_of()}\n")
        assert not os.path.exists(f"{path}/manifest.json"), method  # noqa: PTH110 - the framework's signature
        dist.barrier()
    dcp_save.save(state, storage_writer=CkptfmtWriter(path))
    assert_loads(path, state)


def save_in_groups(path: str) -> None:
    """Save in a group of one rank each, and without any."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine: dict[str, Any] = {"model": {"w": torch.full((3,), 1.0 + rank_of())}, "n": rank_of()}
    dcp_save.save(
        mine, storage_writer=CkptfmtWriter(f"{path}-{rank_of()}"), process_group=groups[rank_of()]
    )
    dcp_save.save(mine, storage_writer=CkptfmtWriter(f"{path}-alone-{rank_of()}"), no_dist=True)
    for name in ("", "alone-"):
        into: dict[str, Any] = {"model": {"w": torch.zeros(3)}, "n": -1}
        reader = CkptfmtReader(f"{path}-{name}{rank_of()}")
        dcp_load.load(
            into,
            storage_reader=reader,
            process_group=groups[rank_of()],
            planner=DefaultLoadPlanner(),
        )
        assert into["model"]["w"].tolist() == [1.0 + rank_of()] * 3
        assert into["n"] == rank_of()


def main(how: str, path: str, meeting: str) -> None:
    """Do as asked, as one rank of WORLD_SIZE."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    whole = torch.arange(42.0).reshape(7, 6)
    sharded = distribute_tensor(whole if how != "load" else torch.zeros(7, 6), mesh, [Shard(0)])
    replicated = distribute_tensor(
        torch.arange(3.0) if how != "load" else torch.zeros(3), mesh, [Replicate()]
    )
    state: dict[str, Any] = {
        "model": {"w": sharded, "r": replicated},
        "rank0": {"plain": [1, "two"]},
    }
    if how == "load":
        dcp_load.load(state, storage_reader=CkptfmtReader(path))
        for name, expected in (("w", whole), ("r", torch.arange(3.0))):
            held: DTensor = state["model"][name]
            assert held.full_tensor().numpy().tobytes() == expected.numpy().tobytes(), name
    elif how == "async":
        dcp_save.async_save(state, storage_writer=CkptfmtWriter(path)).result()  # type: ignore[union-attr]
    elif how == "process":
        with install():
            kind = dcp_save.AsyncCheckpointerType.PROCESS
            for number in range(2):
                dcp_save.async_save(
                    state, checkpoint_id=f"{path}-{number}", async_checkpointer_type=kind
                ).result()  # type: ignore[union-attr]
    elif how == "cached":
        save_cached(path, mesh)
    elif how == "phases":
        fail_in_each_phase(path, mesh)
    elif how == "groups":
        save_in_groups(path)
    elif how == "fail":
        if rank == 1:
            state["mine"] = Opaque()
        try:
            dcp_save.save(state, storage_writer=CkptfmtWriter(path))
        except CheckpointException as error:
            assert "mine is no plain value" in str(error), error
            sys.stdout.write(f"refused by {rank_of()}\n")
    else:
        dcp_save.save(state, storage_writer=CkptfmtWriter(path))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One process of trainings on two nodes, for tests that kill and stop some of them."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptfmt
from ckptfmt.commit.waiting import poll
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.saving.peers import Replicas
from tests.forks import settle
from tests.resharding.stage import _meet, gradient

WAIT_S: Final = 120.0
_SHAPES: Final = {"embedding": (64, 32), "head": (32, 64)}


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until something holds. Raises: TimeoutError."""
    for _ in poll(WAIT_S):
        if condition():
            return
    raise TimeoutError


class Training:
    """A training whose bits don't depend on the number of processes: sharded parameters, AdamW, a sampler.

    Args:
        options: ``home``; ``out``, where it tells of itself; of each process its ``caches`` and
            ``nodes``; ``peers``; ``deadline_s``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _meet(self.rank, self.world_size)
        self.out, self.cache = (
            pathlib.Path(options["out"]),
            pathlib.Path(options["caches"][self.rank]),
        )
        self.options = options
        mesh = init_device_mesh("cpu", (self.world_size,))
        self.module = nn.ParameterDict(
            {
                name: nn.Parameter(distribute_tensor(gradient(name, shape, 0), mesh, [Shard(0)]))
                for name, shape in _SHAPES.items()
            }
        )
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01, foreach=False)
        self.sampler = ckptfmt.Sampler(1000, global_batch=8, seed=3)
        node = {"peers": 1, "node": options["nodes"][self.rank]} if options["peers"] else {}
        self.checkpointer = ckptfmt.Checkpointer(
            options["home"],
            ckptfmt.State(
                weights=self.module, optimizer=self.optimizer, data=self.sampler, rng=False
            ),
            cache=self.cache,
            deadline_s=options["deadline_s"],
            **node,
        )

    def begin(self) -> int:
        """Restore; return the steps done."""
        self.checkpointer.restore_rng()
        self.batches = iter(self.sampler)
        return self.checkpointer.step

    def step(self) -> SaveHandle:
        """Do a step, tell all bits of the state, and save."""
        step = self.checkpointer.step
        samples = torch.tensor(sum(index * index for index in next(self.batches)))
        dist.all_reduce(samples)
        for name, parameter in self.module.items():
            found = gradient(f"{name} {samples.item()}", _SHAPES[name], step)
            parameter.grad = distribute_tensor(found, parameter.device_mesh, parameter.placements)
        self.optimizer.step()
        self.checkpointer.step = step + 1
        self.tell_bits("state")
        handle = self.checkpointer.save()
        assert handle is not None
        return handle

    def tell_bits(self, kind: str) -> None:
        """Write every bit of parameters and optimizer into a file of the step."""
        content = b""
        for parameter in self.module.values():
            state = self.optimizer.state[parameter]
            for one in (parameter, *(state[key] for key in sorted(state))):
                whole = one.full_tensor() if hasattr(one, "full_tensor") else one
                content += whole.detach().numpy().tobytes()
        if self.rank == 0:
            (self.out / f"{kind}-{self.checkpointer.step}").write_bytes(content)

    def wait_for_parts(self, step: int, count: int) -> None:
        """Wait until the cache of this node has so many parts of a step."""
        wait_for(
            lambda: len(list(self.cache.glob(f"*/step-{step:08d}-l0001/parts/*.msgpack"))) == count
        )

    def saver_pid(self) -> int:
        """Return the saver's process."""
        background = self.checkpointer._saves._background
        assert background is not None
        pid: int = background._link.pid  # type: ignore[union-attr]
        return pid

    def tell(self, name: str, value: object = None) -> None:
        """Write a file that the test waits for, whole and at once."""
        path = self.out / f"{name}-{self.rank}"
        path.with_suffix(".new").write_text(json.dumps(value))
        path.with_suffix(".new").rename(path)

    def is_told(self, name: str) -> bool:
        """Return whether there is such a file."""
        return (self.out / name).exists()


def go_on(training: Training) -> None:
    """Train to the end, and tell what was resumed from."""
    step = training.begin()
    if step:
        training.tell_bits("resumed")
    training.tell("began", step)
    while training.checkpointer.step < training.options["total"]:
        training.step()
    training.checkpointer.close()
    training.tell("reports", training.checkpointer.reports)


def lose_a_node(training: Training) -> None:
    """Commit three steps; save two while home is away; wait to be killed, when all are replicated where they may be."""
    training.begin()
    for _ in range(3):
        training.step().wait(timeout_s=WAIT_S)
    dist.barrier()
    home = pathlib.Path(training.options["home"])
    if training.rank == 0:
        home.rename(home.with_name("away"))
    dist.barrier()
    for step in (4, 5):
        training.step().wait("WRITTEN", timeout_s=WAIT_S)
        parts = training.world_size if training.options["peers"] else training.world_size // 2
        training.wait_for_parts(step, parts)
    training.tell("ready", [os.getpid(), training.saver_pid()])
    signal.pause()


def stop_a_partner(training: Training) -> None:
    """One of two is stopped for longer than the deadline, with a save under way; later it is killed for good."""
    training.begin()
    training.step().wait(timeout_s=WAIT_S)
    dist.barrier()
    home = pathlib.Path(training.options["home"])
    if training.rank == 0:
        home.rename(home.with_name("away"))
    # Process 0 offers its replica to a process that is stopped, which offers its own once it goes on.
    right = Replicas.replicate
    moment = ("stopped", "lost-0")[training.rank]

    def replicate(self: Replicas, *arguments: Any) -> None:
        wait_for(lambda: training.is_told(moment))
        right(self, *arguments)

    mock.patch.object(Replicas, "replicate", replicate).start()
    dist.barrier()
    handle = training.step()
    handle.wait("WRITTEN", timeout_s=WAIT_S)
    training.tell("stop", [os.getpid(), training.saver_pid()])
    if training.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        wait_for(
            lambda: any(
                "takes no replicas" in sentence for sentence in training.checkpointer.reports
            )
        )
        training.tell("lost", training.checkpointer.reports)
        home.with_name("away").rename(home)
    handle.wait(timeout_s=WAIT_S)
    training.step().wait(timeout_s=WAIT_S)
    dist.barrier()
    if training.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(
        lambda: any("sends no replicas" in sentence for sentence in training.checkpointer.reports)
    )
    training.checkpointer.close()
    training.tell("reports", training.checkpointer.reports)


def main(variables: dict[str, str], output: str, scene: str, options: dict[str, Any]) -> None:
    """Be one process of a training, from a fork on."""
    settle(variables, output)
    try:
        {"go_on": go_on, "lose_a_node": lose_a_node, "stop_a_partner": stop_a_partner}[scene](
            Training(options)
        )
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # without the farewells of gloo, in which a survivor would wait for the dead

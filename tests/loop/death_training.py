"""A data-parallel training whose processes die, while the other processes go on; see test_regroup.py.

The test is the rendezvous: it holds a store that outlives all processes, and counts generations of
the process group. A survivor waits for the next generation, and calls `Checkpointer.regroup`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

import ckptfmt
from ckptfmt.group import Group
from ckptfmt.loading.restore import load_once
from ckptfmt.saving.saves import Saves
from ckptfmt.store.local import LocalStore
from ckptfmt.write.staging import Staging
from tests.forks import settle
from tests.resharding.stage import optimizer_bits, weight_bits

STEPS = 14
EVERY = 3
#: The longest wait for other processes in seconds: of a group's calls, of exchanges, of the test.
WAIT_S = 15.0
#: The places where a process dies.
PHASES = ("step", "save", "copy", "commit")
#: A place where a process dies while the others regroup.
IN_REGROUP = "load"
#: The place before an exchange of small values in a step: the others wait in the exchange.
IN_EXCHANGE = "exchange"
#: The further homes of a run, and the time after which a silent home is away, in seconds.
MORE_HOMES = ("second", "third")
AWAY_S = 1.0


class Told(NamedTuple):
    """The arguments of one process.

    Attributes:
        place: folder of the training.
        port: port of the test's store.
        generation: number of the process group that the process joins.
        deaths: the places where this process dies: phase, and number of the step or 0.
        cache: whether saves go through a cache.
        peers: whether each process has a node of its own, with replicas on the next node. Most saves
            stay in the caches.
        draws: whether survivors draw a random number too many, which the test must notice.
        damages: whether the memory of a survivor is damaged before the first regroup.
        homes: whether the run has two more homes.
        away: whether the first home goes away with the first death, and comes back at the end.
        waits: for each generation the step before which all processes wait for the commit of the
            newest save: a survivor that doesn't know of the commit yet reads the run.
    """

    place: str
    rank: int
    world_size: int
    port: int
    generation: int
    deaths: tuple[tuple[str, int], ...]
    cache: bool = False
    peers: bool = False
    draws: bool = False
    damages: bool = False
    homes: bool = False
    away: bool = False
    waits: tuple[int, ...] = ()


def train(variables: dict[str, str], told: Told) -> None:
    """Be one process of the training."""
    settle(variables, f"{told.place}/output-{told.rank}")
    _Training(told).run()


class _Training:
    def __init__(self, told: Told) -> None:
        self.told = told
        self.generation = told.generation
        make: Any = dist.TCPStore  # type: ignore[attr-defined]
        self.store = make("127.0.0.1", told.port, is_master=False)
        self.read_nbytes = 0
        self.step = -1
        self.committed: set[int] = set()
        self.begun_s = time.time()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.25), nn.Linear(6, 2))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        self.sampler = ckptfmt.Sampler(
            64, global_batch=6, seed=2, worker=(told.rank, told.world_size)
        )
        self.inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))

    def run(self) -> None:
        told = self.told
        place = Path(told.place)
        state = ckptfmt.State(
            weights=self.net, optimizer=self.optimizer, data=self.sampler, config={}
        )
        copies: list[Any] = [ckptfmt.Cache(place / "cache")] if told.cache else []
        if told.peers:
            cache = place / f"cache-{told.rank}"
            copies = [ckptfmt.Cache(cache, peers=1, node=str(told.rank), upload_every=100)]
        if told.homes:
            copies = [ckptfmt.Homes([place / name for name in MORE_HOMES], away_after_s=AWAY_S)]
        with contextlib.ExitStack() as stack:
            self._count_reads(stack, place / "run")
            try:
                model = self._meet()
            except RuntimeError:  # another process has died since the start of this process
                model = self._meet_again(None)
            torch.manual_seed(11 + told.rank)
            stack.enter_context(self._dying())
            checkpointer = ckptfmt.Checkpointer(
                place / "run", state, every=EVERY, copies=copies,
                job=ckptfmt.Job(deadline_s=WAIT_S, lost=self._is_lost), on_save=self._hear,
            )  # fmt: skip
            is_first = True
            while True:
                try:
                    if is_first:
                        is_first = False
                        checkpointer.restore()
                    else:
                        self._damage(checkpointer)
                        checkpointer.regroup()
                    self._note_load(checkpointer)
                    self._loop(checkpointer, model)
                    checkpointer.close()
                    break
                except (RuntimeError, ckptfmt.CkptError) as error:
                    self._note(kind="lost", error=str(error))
                    model = self._meet_again(model)
            self._note(
                kind="end",
                weights=weight_bits(self.net),
                optimizer=optimizer_bits(self.optimizer, self.net),
                streams=torch.get_rng_state().numpy().tobytes().hex(),
                launch=checkpointer.launch.launch if checkpointer.launch else None,
                rewinds=checkpointer.rewinds,
                evidence=None
                if checkpointer.load_report is None
                else checkpointer.load_report.evidence,
            )

    def _loop(self, checkpointer: ckptfmt.Checkpointer, model: nn.Module) -> None:
        batches = iter(self.sampler)
        for step in checkpointer.steps(STEPS):
            self.step = step
            if self.told.draws and checkpointer.rewinds:
                torch.rand(1)
            loss = model(self.inputs[next(batches)]).square().mean()
            if (self.generation, step) in enumerate(self.told.waits):
                self._wait_for_commit((step - 1) // EVERY * EVERY)
            self._die("step", step)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._note(kind="step", step=step, loss=loss.item().hex())
            if ("commit", step) in self.told.deaths:  # the save of this step is in flight
                time.sleep(WAIT_S)

    # --- the process group ------------------------------------------------------------------------

    def _meet(self) -> nn.Module:
        name = f"generation-{self.generation}"
        dist.init_process_group(
            "gloo", store=c10d.PrefixStore(name, self.store), rank=self.told.rank,
            world_size=self.told.world_size, timeout=dt.timedelta(seconds=WAIT_S),
        )  # fmt: skip
        # DDP would order its buckets anew after the first step of each object: gloo adds up the
        # gradients of three processes in another order then.
        return nn.parallel.DistributedDataParallel(self.net, find_unused_parameters=True)

    def _meet_again(self, model: nn.Module | None) -> nn.Module:
        """End the group, and make the next group once the test has started the replacement."""
        kept.append(model)  # the destructor of DDP may wait for ever; see trainings.py
        while True:
            if dist.is_initialized():
                dist.destroy_process_group()
            self.generation = self._wait_for_next()
            with contextlib.suppress(RuntimeError):  # the next process may be dead already
                return self._meet()

    def _wait_for_next(self) -> int:
        end_s = time.monotonic() + 6 * WAIT_S
        while time.monotonic() < end_s:
            if (newest := int(self.store.get("newest"))) > self.generation:
                return newest
            time.sleep(0.02)
        raise SystemExit("no process takes the place of the lost one")

    def _is_lost(self) -> bool:
        return int(self.store.get("newest")) > self.generation

    # --- deaths -----------------------------------------------------------------------------------

    def _die(self, phase: str, step: int) -> None:
        if (phase, step) in self.told.deaths:
            self._note(kind="death", phase=phase, step=step)
            if self.told.away:
                Path(self.told.place, "run").rename(Path(self.told.place, "away"))
            os.kill(os.getpid(), signal.SIGKILL)

    def _hear(self, event: ckptfmt.SaveEvent) -> None:
        if event.kind == "committed":
            self.committed.add(event.step)
            self._die("commit", event.step)

    def _wait_for_commit(self, step: int) -> None:
        """Wait until all processes know of the commit of a step; another home then has the save."""
        end_s = time.monotonic() + WAIT_S
        key = f"heard-{self.generation}"
        has_heard = False
        while not has_heard or self.store.add(key, 0) < self.told.world_size:
            assert time.monotonic() < end_s, f"the save of step {step} isn't committed"
            if not has_heard and step in self.committed:
                has_heard = True
                self.store.add(key, 1)
            time.sleep(0.02)

    @contextlib.contextmanager
    def _dying(self) -> Iterator[None]:
        """Die at the begin of a save, while a snapshot is copied, or in a load."""
        deaths = dict(self.told.deaths)
        counts = {"save": 0, "copy": 0, "load": 0}

        def dying(phase: str, action: Callable[..., Any], period: int) -> Callable[..., Any]:
            def act(*args: Any, **options: Any) -> Any:
                counts[phase] += period
                if phase in deaths:
                    self._die(phase, counts[phase] if deaths[phase] else 0)
                return action(*args, **options)

            return act

        from ckptfmt import checkpointer  # noqa: PLC0415

        gather = Group.all_gather

        def all_gather(group: Group, value: object) -> list[Any]:
            self._die(IN_EXCHANGE, self.step)
            return gather(group, value)

        with (
            mock.patch.object(Group, "all_gather", all_gather),
            mock.patch.object(Saves, "_write", dying("save", Saves._write, EVERY)),
            mock.patch.object(Staging, "run", dying("copy", Staging.run, EVERY)),
            mock.patch.object(checkpointer, "load_once", dying("load", load_once, EVERY)),
        ):
            yield

    def _damage(self, checkpointer: ckptfmt.Checkpointer) -> None:
        """Flip a bit of each byte in the slots."""
        background = checkpointer._saves._background
        if self.told.damages and self.generation == 1 and background is not None:
            for place in background._places:
                content = np.frombuffer(place.slot.view, np.uint8)
                np.bitwise_xor(content, 1, out=content)

    # --- the journal ------------------------------------------------------------------------------

    def _note(self, **facts: Any) -> None:
        with Path(self.told.place, f"journal-{self.told.rank}").open("a") as file:
            file.write(json.dumps({"at_s": time.time(), **facts}) + "\n")

    def _note_load(self, checkpointer: ckptfmt.Checkpointer) -> None:
        report = checkpointer.load_report
        reads = None if report is None else report.reads
        self._note(
            kind="load",
            begun_s=self.begun_s,
            generation=self.generation,
            step=checkpointer.step,
            home_nbytes=self.read_nbytes,
            memory_nbytes=0 if reads is None else reads.memory_nbytes,
            received_nbytes=0 if reads is None else reads.received_nbytes,
            notes=[] if report is None else list(report.notes),
        )

    def _count_reads(self, stack: contextlib.ExitStack, run: Path) -> None:
        """Count the bytes of tensor files that this process reads from the run."""
        open_ranges = LocalStore.open_ranges
        read_range = LocalStore.read_range

        def is_counted(store: LocalStore, path: str) -> bool:
            is_tensors = path.endswith((".safetensors", ".pack"))
            return is_tensors and Path(store.name).is_relative_to(run.resolve())

        @contextlib.contextmanager
        def opened(store: LocalStore, path: str) -> Iterator[Any]:
            with open_ranges(store, path) as reader:
                if is_counted(store, path):
                    self.read_nbytes += store.nbytes(path)
                yield reader

        def read(store: LocalStore, path: str, byte_begin: int, nbytes: int) -> bytes:
            if is_counted(store, path):
                self.read_nbytes += nbytes
            return read_range(store, path, byte_begin, nbytes)

        stack.enter_context(mock.patch.object(LocalStore, "open_ranges", opened))
        stack.enter_context(mock.patch.object(LocalStore, "read_range", read))


#: Models whose process group is lost.
kept: list[nn.Module | None] = []

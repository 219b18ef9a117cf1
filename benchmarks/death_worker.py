"""One process of a data-parallel training for `benchmarks.death`, which notes times of phases.

The process runs under torchrun, or meets the other processes through the store of the benchmark.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGIN_UNIX_S = time.time()

import torch  # noqa: E402 - the time before the import is measured
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

import ckptfmt  # noqa: E402
from ckptfmt.store.local import LocalStore  # noqa: E402

EVERY = 3
DEATH = 7
STEPS = 9
#: The longest wait for another process, in seconds.
WAIT_S = 60.0
#: The size of a layer's side; a layer takes 12 bytes for each weight with both moments.
WIDTH = 512


def count_layers(nbytes: int) -> int:
    """Return the number of layers of a state of an approximate size: eight tensors each."""
    return max(1, nbytes // (12 * WIDTH * WIDTH))


def main() -> None:
    """Train until the last step, through the death of another process."""
    told: dict[str, Any] = json.loads(os.environ["DEATH"])
    worker = _Worker(told)
    with worker.counting():
        worker.train()


class _Worker:
    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.times = {"started": BEGIN_UNIX_S, "imported": time.time()}
        self.read_nbytes = 0
        self.store: Any = None
        self.group = int(told.get("group", 0))
        self.rank = int(os.environ.get("RANK", "0"))
        self.is_first = not self.group and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        torch.set_num_threads(1)
        if "port" in told:
            make: Any = dist.TCPStore  # type: ignore[attr-defined]
            self.store = make("127.0.0.1", told["port"], is_master=False)
            if told.get("is_spare"):
                torch.optim.AdamW([torch.zeros(1)])  # imports more modules
                self.store.set("spare", "")
                self.store.wait(["wanted"], dt.timedelta(seconds=5 * WAIT_S))

    def meet(self) -> None:
        """Make the process group."""
        if self.store is None:
            dist.init_process_group("gloo", timeout=dt.timedelta(seconds=WAIT_S))
        else:
            dist.init_process_group(
                "gloo", store=c10d.PrefixStore(f"group-{self.group}", self.store), rank=self.rank,
                world_size=2, timeout=dt.timedelta(seconds=WAIT_S),
            )  # fmt: skip
        self.times["met"] = time.time()

    def train(self) -> None:
        """Train; after the loss of the other process, end or regroup."""
        self.meet()
        torch.manual_seed(0)
        layers = range(count_layers(int(self.told["nbytes"])))
        net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in layers))
        optimizer = torch.optim.AdamW(net.parameters())
        sampler = ckptfmt.Sampler(4096, global_batch=8, seed=1, worker=(self.rank, 2))
        state = ckptfmt.State(weights=net, optimizer=optimizer, data=sampler, config={})
        cache = self.told.get("cache")
        checkpointer = ckptfmt.Checkpointer(
            self.told["run"], state, every=EVERY, copies=[ckptfmt.Cache(cache)] if cache else [],
            job=ckptfmt.Job(deadline_s=WAIT_S),
        )  # fmt: skip
        models = []  # the destructor of DDP may wait for ever
        restore: Any = checkpointer.restore
        while True:
            try:
                models.append(torch.nn.parallel.DistributedDataParallel(net))
                self.times["built"] = time.time()
                restore()
                self.times["loaded"] = time.time()
                self._loop(checkpointer, models[-1], optimizer, sampler)
                break
            except RuntimeError:
                if self.store is None:
                    raise
            self.times = {"noticed": time.time()}
            dist.destroy_process_group()
            self.group += 1
            self.store.wait(["wanted"], dt.timedelta(seconds=WAIT_S))
            self.meet()
            restore = checkpointer.regroup
        checkpointer.close()
        dist.destroy_process_group()

    def _loop(
        self, checkpointer: ckptfmt.Checkpointer, model: Any, optimizer: Any, sampler: Any
    ) -> None:
        batches = iter(sampler)
        is_noted = self.is_first and "noticed" not in self.times
        for step in checkpointer.steps(STEPS):
            self.times.setdefault("ready", time.time())
            ids = next(batches)
            inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(ids[0]))
            if self.is_first and step == DEATH and self.rank == 1:
                self._note({"died": time.time()})
                os.kill(os.getpid(), signal.SIGKILL)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not is_noted:
                is_noted = True
                self.times["stepped"] = time.time()
                assert checkpointer.load_report is not None
                reads = checkpointer.load_report.reads
                amounts = {"home": self.read_nbytes, "received": reads.received_nbytes}
                self._note({"step": step, "times": self.times, "nbytes": amounts})

    def _note(self, facts: dict[str, Any]) -> None:
        with Path(self.told["journal"]).open("a") as file:
            file.write(json.dumps({"rank": self.rank, **facts}) + "\n")

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the bytes of tensor files that this process reads from the run."""
        opened = LocalStore.open_ranges
        run = Path(self.told["run"]).resolve()

        @contextlib.contextmanager
        def open_ranges(store: LocalStore, path: str) -> Iterator[Any]:
            with opened(store, path) as reader:
                if path.endswith((".safetensors", ".pack")) and run in Path(store.name).parents:
                    self.read_nbytes += store.nbytes(path)
                yield reader

        LocalStore.open_ranges = open_ranges  # type: ignore[method-assign]
        try:
            yield
        finally:
            LocalStore.open_ranges = opened  # type: ignore[method-assign]


if __name__ == "__main__":
    main()

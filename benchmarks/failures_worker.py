"""One process of the training that `benchmarks.failures` disturbs.

The processes meet in a store of the benchmark. A process writes a journal: a line for each step,
and for each committed save.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import ckptfmt
from tests.campaign.network import open_home

WORLD_SIZE: Final = 2
WIDTH: Final = 512
GLOBAL_BATCH: Final = 8
SAMPLE_COUNT: Final = 1_000_000
#: The longest wait for another process, in seconds.
WAIT_S: Final = 20.0
#: The longest time of a request to a home in seconds, and the time after which it is away.
REQUEST_S: Final = 20
AWAY_S: Final = 5.0
_NAN: Final = float("nan")
#: Modules that a start imports when it needs them.
_MODULES: Final = (
    "ckptfmt.checkpointer",
    "ckptfmt.run.elections",
    "ckptfmt.saving.home_copies",
    "obstore.store",
)


def main() -> None:
    """Train until SIGTERM."""
    told: dict[str, Any] = json.loads(os.environ["FAILURES"])
    torch.set_num_threads(1)
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make("127.0.0.1", told["port"], is_master=False)
    if "spare" in told:
        torch.optim.AdamW([torch.zeros(1)])  # imports more modules
        for module in _MODULES:
            importlib.import_module(module)
        store.wait([told["spare"]], dt.timedelta(hours=24))
        told |= json.loads(store.get(told["spare"]))
    _Worker(told, store).run()


class _Worker:
    """A process with the facts that it was told.

    The members of `told`: place, a directory; homes, URL and endpoint of each; rank; group, the
    number of the process group to join; in_place, whether failures are healed without a restart;
    every_s and snapshot_every, of the saves; step_s, the length of a step.
    """

    def __init__(self, told: dict[str, Any], store: Any) -> None:
        self.told = told
        self.store = store
        self.rank = int(told["rank"])
        self.group = int(told["group"])
        self.place = Path(told["place"])
        self.journal = (self.place / f"journal-{self.rank}").open("a")
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.sampler = ckptfmt.Sampler(
            SAMPLE_COUNT, global_batch=GLOBAL_BATCH, seed=1, worker=(self.rank, WORLD_SIZE)
        )
        self.damaged = self._read_damaged()

    def run(self) -> None:
        told = self.told
        self.triggers = ckptfmt.Triggers("rewind" if told["in_place"] else "back")
        first, *others = [open_home(*home, timeout_s=REQUEST_S) for home in told["homes"]]
        state = ckptfmt.State(
            weights=self.net, optimizer=self.optimizer, data=self.sampler, config={}
        )
        saving = ckptfmt.Saving(failed_saves=1000, snapshot_every=told["snapshot_every"])
        stop = ckptfmt.Stop(signals=[signal.SIGTERM], triggers=self.triggers)
        try:
            self._meet()
        except RuntimeError:
            if not told["in_place"]:
                raise
            self._meet_again()
        checkpointer = ckptfmt.Checkpointer(
            first, state, every=f"{told['every_s']:g}s", keep=2,
            copies=[ckptfmt.Homes(others, away_after_s=AWAY_S)], saving=saving, stop=stop,
            job=ckptfmt.Job(deadline_s=WAIT_S, lost=self._has_next_group), on_save=self._hear,
        )  # fmt: skip
        begin: Any = checkpointer.restore
        while True:
            try:
                begin()
                self._leave_out()
                self._note("loaded", checkpointer.step)
                self._loop(checkpointer)
                break
            except (RuntimeError, ckptfmt.CkptError) as error:
                self._note("error", f"{type(error).__name__}: {error}"[:300])
                if isinstance(error, ckptfmt.CkptError) and error.code == "ALARM":
                    self.sampler.commit(checkpointer.step)
                    (self.place / "leave-out").write_text(str(self.sampler.position))
                # Without a save, all processes start again.
                has_save = getattr(error, "code", None) != "NOT_COMMITTED"
                if not (told["in_place"] and has_save):
                    os._exit(1)  # no wait for the other process
            self._meet_again()
            begin = checkpointer.regroup
        checkpointer.close()
        self._note("closed", checkpointer.step)

    def _meet(self) -> None:
        wait = dt.timedelta(seconds=WAIT_S)
        store = c10d.PrefixStore(f"group-{self.group}", self.store)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=WORLD_SIZE, timeout=wait
        )

    def _meet_again(self) -> None:
        """Leave the process group, and join the next one that the benchmark announces."""
        while True:
            if dist.is_initialized():
                dist.destroy_process_group()
            self.store.set(f"left-{self.group}-{self.rank}", "")
            self.store.wait([f"group-{self.group + 1}"], dt.timedelta(seconds=10 * WAIT_S))
            self.group += 1
            with contextlib.suppress(RuntimeError):  # another process died in the meantime
                self._meet()
                return

    def _has_next_group(self) -> bool:
        return bool(self.store.check([f"group-{self.group + 1}"]))

    def _leave_out(self) -> None:
        """Leave out the samples before the last alarm, after a restart."""
        path = self.place / "leave-out"
        if not self.told["in_place"] and path.exists():
            begin, end = self.sampler.position, int(path.read_text())
            if begin < end:
                self.sampler.skip(positions=(begin, end), policy="shift", reason="NaN")

    def _read_damaged(self) -> set[int]:
        path = self.place / "damaged"
        return set(map(int, path.read_text().split())) if path.exists() else set()

    def _damage(self, ids: list[int]) -> None:
        """Damage a sample of the batch for good, if the benchmark asks for it."""
        if self.rank == 0 and (self.place / "damage").exists():
            (self.place / "damage").unlink()
            self.damaged.add(ids[0])
            with (self.place / "damaged").open("a") as file:
                file.write(f"{ids[0]}\n")

    def _loop(self, checkpointer: ckptfmt.Checkpointer) -> None:
        parameters = list(self.net.parameters())
        batches = iter(self.sampler)
        for step in checkpointer.steps(10**9):
            begin_s = time.monotonic()
            ids = next(batches)
            self._damage(ids)
            inputs = torch.randn(
                len(ids), WIDTH, generator=torch.Generator().manual_seed(int(ids[0]))
            )
            if self.damaged.intersection(ids):
                inputs[0] = _NAN
            loss = self.net(inputs).square().mean()
            loss.backward()
            flat = torch.cat([one.grad.flatten() for one in parameters])  # type: ignore[union-attr]
            dist.all_reduce(flat)
            offset = 0
            for one in parameters:
                one.grad = flat[offset : offset + one.numel()].view_as(one)
                offset += one.numel()
            self.triggers.feed(loss=loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            time.sleep(max(0.0, begin_s + self.told["step_s"] - time.monotonic()))
            self._note("step", step)

    def _hear(self, event: ckptfmt.SaveEvent) -> None:
        if event.kind == "committed":
            self._note("saved", [event.path, event.seconds["COMMITTED"], event.blocked_s])
        elif event.kind == "failed":
            self._note("failed", str(event.error)[:300])

    def _note(self, kind: str, value: object) -> None:
        self.journal.write(json.dumps([round(time.time(), 4), kind, value]) + "\n")
        self.journal.flush()


if __name__ == "__main__":
    main()

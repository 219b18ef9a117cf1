"""A cache disk that fails at each call of a start, once or from then on: no acknowledged save is lost.

python -m tests.faults.cache_disk
python -m tests.faults.cache_disk --sample 120 --seed 1
"""

import argparse
import collections
import dataclasses
import errno
import itertools
import logging
import os
import pathlib
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Final
from unittest import mock

from ckptfmt.errors import CkptError, StoreError
from ckptfmt.run import node_cache
from ckptfmt.store import LocalStore
from ckptfmt.store.memory import MemoryStore
from tests.save import test_node_cache, test_upload_every
from tests.save.test_node_cache import Outage, committed
from tests.save.test_saves import Run
from tests.saver.test_saver import WAIT_S
from tests.store.helpers import FAST_DIRECTORY
from tests.stores.hooked import HookedCalls, Operation

#: The newest step that was acknowledged, in each scene: COMMITTED with durability "node", or
#: WRITTEN.
NEWEST: Final = 3


class Disk(HookedCalls):
    """The calls to a cache, of which one fails, or all from one on.

    Attributes:
        count: how many calls were made.
        fails_at: number of the call that fails; None for none.
    """

    def __init__(self, base: pathlib.Path, fails_at: int | None, *, stays: bool) -> None:
        super().__init__(base)
        self.count = 0
        self.fails_at = fails_at
        self._stays = stays
        self._lock = threading.Lock()

    def before(self, operation: Operation) -> None:
        """Fail where this is the call."""
        with self._lock:
            self.count += 1
            at = self.count
        if self.fails_at is not None and (
            at == self.fails_at or (self._stays and at > self.fails_at)
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)


def scenes(root: pathlib.Path) -> dict[str, tuple[MemoryStore, pathlib.Path]]:
    """Return what is left of trainers: home and cache, in which the newest acknowledged save is in the cache alone."""
    (root / "committed").mkdir()
    return {
        "committed": test_upload_every.one_that_died(root / "committed"),
        "written": test_node_cache.one_that_died(Outage(), root / "written"),
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one start, and of the start behind it.

    Attributes:
        what: ``went on``, or ``refused``.
        call_count: how many calls the start made to the cache.
        lost: what was lost, a sentence; an empty string for nothing.
    """

    what: str
    call_count: int
    lost: str


def start(
    scene: tuple[MemoryStore, pathlib.Path],
    root: pathlib.Path,
    *,
    fails_at: int | None,
    stays: bool,
) -> Outcome:
    """Start once on a disk that fails, save and clean up, then start on a sound one; and judge both."""
    left, cache_left = scene
    home, cache = MemoryStore(), root / "cache"
    for path, content in left.snapshot().items():
        home.create(path, [content])
    shutil.rmtree(cache, ignore_errors=True)
    shutil.copytree(cache_left, cache)
    disk = Disk(cache, fails_at, stays=stays)
    what, newest, before = "went on", NEWEST, set(committed(home))

    def open_cache(path: str, *, writable: bool) -> LocalStore:
        return LocalStore(path, writable=writable, calls=disk)

    with mock.patch.object(node_cache, "LocalStore", open_cache):
        try:
            run = Run(home, cache=cache, upload_every=NEWEST, resume="auto", keep=1)
            run.checkpointer.restore()
        except CkptError as error:
            if not isinstance(error, StoreError):
                return Outcome("refused", disk.count, f"the start was refused by {error}")
            what = "refused"
    call_count, disk.fails_at = disk.count, None
    if what == "refused" and not before <= set(committed(home)):
        return Outcome(
            what, call_count, f"{sorted(before - set(committed(home)))} isn't committed any more"
        )
    if what == "went on":
        with run:
            if run.checkpointer.step != NEWEST:
                return Outcome(
                    what, call_count, f"the start went on from step {run.checkpointer.step}"
                )
            run.checkpointer.restore_rng()
            newest += 1
            run.save(newest).wait(timeout_s=WAIT_S)
    with Run(home, cache=cache, resume="auto") as again:
        if again.checkpointer.step != newest or not all(
            (one == newest).all() for one in again.weights.values()
        ):
            return Outcome(
                what, call_count, f"the next start went on from step {again.checkpointer.step}"
            )
    return Outcome(what, call_count, "")


def plan(scene: tuple[MemoryStore, pathlib.Path], root: pathlib.Path) -> Iterator[tuple[int, bool]]:
    """Yield each call of a start, once with an error that passes and once with one that stays."""
    calm = start(scene, root, fails_at=None, stays=False)
    assert not calm.lost, calm.lost
    assert calm.what == "went on"
    yield from itertools.product(range(1, calm.call_count + 1), (False, True))


def run_campaign(
    sample: int | None = None, *, seed: int = 0, tell: Callable[[str], object] = print
) -> list[str]:
    """Try each call of each scene, or a sample of them; return what was lost."""
    lost: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY) as directory:
        root = pathlib.Path(directory)
        made = scenes(root)
        rows = [(name, *row) for name, scene in made.items() for row in plan(scene, root)]
        counts["calls"] = len(rows) // 2
        for name, fails_at, stays in random.Random(seed).sample(
            rows, min(sample or len(rows), len(rows))
        ):
            outcome = start(made[name], root, fails_at=fails_at, stays=stays)
            counts["runs"] += 1
            counts[outcome.what] += 1
            if outcome.lost:
                how = "from then on" if stays else "once"
                lost.append(f"{name}, call {fails_at}, {how}: {outcome.lost}")
    tell(f"{dict(counts)}, {len(lost)} lost")
    return lost


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    found = run_campaign(arguments.sample, seed=arguments.seed)
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))

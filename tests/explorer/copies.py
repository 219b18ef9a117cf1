"""Workloads whose checkpoints refer to others or lie in two places: deltas, rewinds, mirrors and caches."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final
from unittest import mock

from ckptfmt.commit.decision import finalize
from ckptfmt.documents.durability import HOME, NODE
from ckptfmt.documents.manifest import Manifest, checkpoint_name
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import Code
from ckptfmt.features import REFERENCED
from ckptfmt.group import Group
from ckptfmt.loop import launching
from ckptfmt.run import lineage, mirror, node_cache
from ckptfmt.run.compaction import compact_run
from ckptfmt.run.mirror import mirror_run
from ckptfmt.run.node_cache import Cache, NodeCache
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Store
from ckptfmt.write.image import Context, plan_image
from ckptfmt.write.writer import LiveContents, write_image
from tests import chains
from tests.builders import known_launches
from tests.explorer import content, workloads
from tests.explorer.crashes import Bench
from tests.explorer.judge import (
    Judge,
    Marks,
    Promises,
    TellingStore,
    Violation,
    clean_up,
    recover,
)
from tests.explorer.workloads import Workload

#: The folders of a disk that is home and cache of a node.
_HOME, _CACHE = "home", "cache"


# --- deltas ---------------------------------------------------------------------------------------


class DeltaSaving(chains.Saving):
    """A launch that saves deltas; attempts are numbered in fives, and so have one shape."""

    def __init__(self, store: Store, run: RunRecord, launch: Launch) -> None:
        snapshots = [content.snapshot_of(f"{5:016x}", n) for n in range(content.WRITER_COUNT)]
        with (
            mock.patch.object(chains, "open_run", return_value=run),
            mock.patch.object(chains, "begin_launch", return_value=(launch, None)),
        ):
            super().__init__(*snapshots, store=store, block_nbytes=1 << 20)
        self._attempt = 0

    def origin(self, step: int) -> Any:
        """Return the origin of the next attempt."""
        return content.origin_of(self.launch, step, self._attempt)

    def save_next(self, step: int, marks: Marks) -> Manifest:
        """Save a step, as a delta of the one before if there is one."""
        self._attempt += 5
        attempt = self.origin(step).attempt
        held = [content.snapshot_of(attempt, n) for n in range(content.WRITER_COUNT)]
        manifest = self.save(step, *held)
        marks.saved(manifest)
        return manifest


def _begin(bench: Bench) -> tuple[RunRecord, Launch]:
    store = bench.store()
    run = lineage.open_run(store, writer_features=(REFERENCED,))
    launch, _ = lineage.begin_launch(store, run)
    bench.marks.launched(launch)
    return run, launch


def delta_saves(bench: Bench) -> None:
    """Launch 1 saves step 10, and steps 20, 30 and 40 as deltas; each time it keeps the newest only."""
    store = bench.store()
    run, launch = _begin(bench)
    saving = DeltaSaving(store, run, launch)
    for step in (10, 20, 30, 40):
        saving.save_next(step, bench.marks)
        clean_up(store, run, launch, bench.marks, keep=1)


def base_and_delta(bench: Bench) -> None:
    """Launch 1 with step 10, and step 20 as a delta of it."""
    store = bench.store()
    saving = DeltaSaving(store, *_begin(bench))
    for step in (10, 20):
        saving.save_next(step, bench.marks)


def compaction(bench: Bench) -> None:
    """Launch 2 makes a full checkpoint of a delta; launch 3 retires all but that."""
    store = bench.store()
    _, manifest, written = compact_run(store)
    assert written
    bench.marks.saved(manifest)
    run = lineage.open_run(store)
    launch, _ = lineage.begin_launch(store, run)
    bench.marks.launched(launch)
    clean_up(store, run, launch, bench.marks, keep=1)


# --- rewinds --------------------------------------------------------------------------------------


def three_steps(bench: Bench) -> None:
    """Launch 1 with steps 10, 20 and 30."""
    store = bench.store()
    _, launch = _begin(bench)
    for number in (1, 2, 3):
        bench.marks.saved(content.save(store, content.origin_of(launch, 10 * number, number)))


def rewind(bench: Bench) -> None:
    """Launch 1 goes back to step 10, saves steps 20 and 30 again as launch 2, and goes back once more."""
    store = bench.store()
    run = lineage.open_run(store)
    first = known_launches(store)[-1]
    second = _go_back(store, run, first, bench.marks, to=10, left=(20, 30))
    bench.marks.saved(content.save(store, content.origin_of(second, 20, 4)))
    clean_up(store, run, second, bench.marks, keep=2)
    third = _go_back(store, run, second, bench.marks, to=10, left=(20,))
    bench.marks.saved(content.save(store, content.origin_of(third, 20, 5)))
    clean_up(store, run, third, bench.marks, keep=1)


def _go_back(
    store: Store, run: RunRecord, launch: Launch, marks: Marks, *, to: int, left: tuple[int, ...]
) -> Launch:
    names = [checkpoint_name(step, launch.launch) for step in left]
    for name in names:
        marks.leaving(name)
    found, checkpoint = lineage.begin_launch(
        store, run, choose=checkpoint_name(to, 1), after=launch.launch
    )
    marks.launched(found)
    for name in names:
        marks.left(name)
    assert checkpoint is not None
    checkpoint.close()
    return found


# --- mirrors --------------------------------------------------------------------------------------


@functools.cache
def homes() -> tuple[Mapping[str, bytes], Mapping[str, bytes]]:
    """Return a home with step 10, and later: with step 20, a delta, and two more of a second launch."""
    with content.deterministic():
        store = MemoryStore()
        run = lineage.open_run(store, writer_features=(REFERENCED,))
        launch, _ = lineage.begin_launch(store, run)
        saving = DeltaSaving(store, run, launch)
        saving.save_next(10, Marks())
        earlier = store.snapshot()
        saving.save_next(20, Marks())
        later, _ = lineage.begin_launch(store, run)
        for step, attempt in ((30, 0x31), (40, 0x32)):
            content.save(store, content.origin_of(later, step, attempt))
        clean_up(store, run, later, Marks(), keep=1)
        return earlier, store.snapshot()


def _one_after_the_other(copy: Callable[[Any], None], files: Any, _: object) -> None:
    for file in files:
        copy(file)


def _copy(files: Mapping[str, bytes], store: Store, marks: Marks) -> None:
    home = MemoryStore.from_snapshot(files)
    telling = TellingStore(store, marks)
    with mock.patch.object(mirror, "for_each_file", _one_after_the_other):
        report = mirror_run(home, telling, retire=True)
    for name in report.copied:
        marks.saved(_manifest_of(home, name))
    for launch in report.launches:
        marks.launched(lineage.read_launch(home, launch))
    for name in telling.replaced:
        marks.retired(name)


def _manifest_of(store: Store, name: str) -> Manifest:
    manifest = next(
        entry.manifest for entry in lineage.list_checkpoints(store) if entry.name == name
    )
    assert manifest is not None
    return manifest


def first_copy(bench: Bench) -> None:
    """A mirror gets a run."""
    _copy(homes()[0], bench.store(), bench.marks)


def later_copy(bench: Bench) -> None:
    """The mirror follows: a delta, a launch, two more checkpoints, and what was retired at home."""
    _copy(homes()[1], bench.store(), bench.marks)


def recover_mirror(store: Store, marks: Marks) -> None:
    """Let the run go on at the mirror without the home, on a trial; then copy what is missing, and go on."""
    if lineage.read_run(store) is not None:
        recover(MemoryStore.from_snapshot(store.snapshot()), Marks())  # type: ignore[attr-defined]
    _copy(homes()[1], store, marks)
    recover(store, marks)


# --- caches ---------------------------------------------------------------------------------------


def open_cache(root: Store, run_id: str) -> NodeCache:
    """Return the cache of a run in a store that is there."""
    with mock.patch.object(node_cache, "LocalStore", return_value=root):
        return NodeCache(Cache(_CACHE, limit_nbytes=1 << 30), run_id)


def _write_to_cache(cache: NodeCache, origin: Any, writer: int, durability: str) -> Any:
    snapshot = content.snapshot_of(origin.attempt, writer)
    image = plan_image(snapshot, block_nbytes=origin.block_nbytes)
    context = dataclasses.replace(Context.of(snapshot), durability=durability)
    part = node_cache.part_of(origin, writer)
    write_image(
        cache.at(part.name),
        image,
        LiveContents(snapshot, image, None),
        origin,
        context,
        writer=writer,
    )
    return part


def save_at_home(bench: Bench) -> None:
    """Launch 1 with step 10 at home."""
    home = bench.store().at(_HOME)
    launch, _ = lineage.begin_launch(home, lineage.open_run(home))
    bench.marks.launched(launch)
    bench.marks.saved(content.save(home, content.origin_of(launch, 10, 1)))


def save_in_cache(bench: Bench) -> None:
    """Launch 1 saves step 20, whose files stay in the cache, and step 30, whose files go home."""
    home = bench.store().at(_HOME)
    run, launch = lineage.read_known_run(home), known_launches(home)[-1]
    cache = open_cache(bench.store().at(_CACHE), run.run_id)
    for step, attempt, durability in ((20, 2, NODE), (30, 3, HOME)):
        origin = content.origin_of(launch, step, attempt)
        parts = [
            _write_to_cache(cache, origin, writer, durability)
            for writer in range(content.WRITER_COUNT)
        ]
        for part in parts:
            cache.upload(part, content.place_of(home, origin))
        bench.marks.saved(finalize(content.place_of(home, origin), origin))
        if durability == HOME:
            bench.marks.retiring(checkpoint_name(20, 1))
            for part in parts:
                cache.settle_up_to(part)
            cache.make_room(math.inf)  # type: ignore[arg-type]
    clean_up(home, run, launch, bench.marks, keep=1)


def recover_with_cache(store: Store, marks: Marks) -> None:
    """Do what a restarted job with a cache does: finish, bring home what it goes on from, then the rest."""
    home = store.at(_HOME)
    run = lineage.open_run(home)
    with mock.patch.object(node_cache, "LocalStore", return_value=store.at(_CACHE)):
        lone = Group(0, 1, lambda own: [own])
        finish = launching._Finish(home, lone, Cache(_CACHE), run.run_id, [], signer=None)
    names = finish.run(0.0)
    finish.fetch(None)
    recover(home, marks)
    finish.tidy(node_cache.list_committed(home, names))


class CacheJudge(Judge):
    """Judges a disk that is a run's home and a node's cache: what home says it has may lie in the cache."""

    def __init__(self) -> None:
        super().__init__(recover_with_cache)

    def _judge_directories(self, files: Mapping[str, bytes], promises: Promises) -> list[Violation]:
        return super()._judge_directories(_join(files), promises)

    def _judge_lineage(
        self, store: MemoryStore, promises: Promises, *, owned: bool
    ) -> list[Violation]:
        joined = MemoryStore.from_snapshot(_join(store.snapshot()))
        return super()._judge_lineage(joined, promises, owned=owned)

    def _find_problem(self, files: Mapping[str, bytes], name: str) -> str | None:
        """Files that the cache let go are gone by right; `_judge_directories` asks for those that were promised."""
        problem = super()._find_problem(files, name)
        return None if problem and str(Code.FILES_IN_CACHES) in problem else problem

    def _judge_deletions(
        self, before: Mapping[str, bytes], after: Mapping[str, bytes], told: list[str]
    ) -> list[Violation]:
        return super()._judge_deletions(_home_of(before), _home_of(after), told)


def _home_of(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {
        path.partition("/")[2]: data for path, data in files.items() if path.startswith(f"{_HOME}/")
    }


def _join(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the run's files, shards of the cache beside those at home."""
    cached = {
        path.split("/", 2)[2]: data
        for path, data in files.items()
        if path.startswith(f"{_CACHE}/") and path.endswith(".safetensors")
    }
    return cached | _home_of(files)


def judge_of(workload: str) -> Judge:
    """Return a judge of a workload's states."""
    if workload == "save_in_cache":
        return CacheJudge()
    return Judge(recover_mirror) if workload in ("first_copy", "later_copy") else Judge()


_OWN: Final = {
    "deltas": Workload(delta_saves, None, 40, 100),
    "compaction": Workload(compaction, base_and_delta, 20, 50),
    "rewind": Workload(rewind, three_steps, 30, 60),
    "first_copy": Workload(first_copy, None, 12, 12),
    "later_copy": Workload(later_copy, first_copy, 12, 12),
    "save_in_cache": Workload(save_in_cache, save_at_home, 20, 20),
}
#: All workloads, those of `tests.explorer.workloads` too.
WORKLOADS: Final = workloads.WORKLOADS | _OWN

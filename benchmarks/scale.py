"""Checkpoints of 1.2 TB and 480 GB by thousands of simulated writers: seconds and memory of a rank.

Documents, headers and protocol are the real ones, and so are writer, committer and reader. The
bytes of tensors are holes, see `benchmarks.holes`. The writers write one after the other. What a
rank does for itself (plan, commit, open, read) runs in a process of its own.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.counting import CountingStore
from benchmarks.figures import summarize
from benchmarks.fleet import Wanted, make_origin
from benchmarks.holes import HoleCalls, HoleContents, plant
from benchmarks.memory import PeakResident
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, check_room, remove
from benchmarks.simulated import Mesh, Simulated
from ckptfmt.box import Box
from ckptfmt.commit.decision import decide
from ckptfmt.documents.holdings import Structure
from ckptfmt.documents.manifest import MANIFEST_NAME, index_name
from ckptfmt.documents.tables import TensorKey, TensorTable, key_of
from ckptfmt.group import Group
from ckptfmt.layout.assignment import assign_writers
from ckptfmt.read.reader import Checkpoint
from ckptfmt.saving.one_save import find_written
from ckptfmt.store import LocalStore, open_store
from ckptfmt.write.image import Context, plan_image, sort_sources
from ckptfmt.write.snapshot import Snapshot
from ckptfmt.write.writer import structure_of, write_image

_ROOT: Final = Path(__file__).parents[1]
#: The ranks that save.
WRITERS: Final = 4096
#: One writer in so many has random bytes in its box of `_PLANTED`, others have zeros.
_PLANTED_EVERY: Final = 16
_PLANTED: Final[TensorKey] = ("weights", "layers.0.attention.wo.weight", "global")
#: By name, the states with their ranks in tensor parallelism: 100 billion parameters under FSDP,
#: and 40 billion under FSDP and tensor parallelism.
STATES: Final = {
    state.name: (state, across)
    for state, across in (
        (Simulated(name="1.2_tb", layers=54, width=12288, vocabulary=128256), 1),
        (Simulated(name="480_gb", layers=47, width=8192, vocabulary=128256), 8),
    )
}
#: Ranks that load, for four that saved: most cuts are new ones.
_LOADERS_OF_4: Final = 3
_ROUNDS: Final = 3  # the ranks that plan, open and read: the first, the middle and the last
_DEADLINE_S: Final = 600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A state, and the ranks that save and load it.

    Attributes:
        saving: the mesh of ranks that save.
        place: directory of all files.
    """

    state: Simulated
    saving: Mesh
    place: Path

    @property
    def loading(self) -> Mesh:
        """The mesh of ranks that load, in FSDP alone."""
        return Mesh(ranks=self.saving.ranks * _LOADERS_OF_4 // 4)

    @property
    def loaders(self) -> int:
        """The number of ranks that load elements: the last ones may have none, as in FSDP."""
        each = -(-self.state.width // self.loading.ranks)
        return -(-self.state.width // each)

    @property
    def directory(self) -> Path:
        """The checkpoint's directory."""
        return self.place / "checkpoint"

    @property
    def told(self) -> Path:
        """The file with a line for each writer's structure, as an all-gather returns it."""
        return self.place / "structures"

    def dump(self) -> str:
        """Return the launch as text, for `parse` in another process."""
        members = dataclasses.asdict(self)
        return json.dumps({**members, "place": str(self.place)})

    @classmethod
    def parse(cls, text: str) -> Launch:
        """Return the launch from the text of `dump`."""
        members = json.loads(text)
        return cls(
            state=Simulated(**members["state"]),
            saving=Mesh(**members["saving"]),
            place=Path(members["place"]),
        )


def measure_scale(
    writers: int,
    *,
    names: Sequence[str] = tuple(STATES),
    rounds: int | None,
    place: Workplace,
    progress: Progress,
) -> Outcome:
    """Save and load the states of some names.

    Args:
        writers: the number of ranks that save, a multiple of 16.
        names: keys of `STATES`.
        rounds: how many ranks plan, open and read.

    Raises: SystemExit without enough memory or storage; RuntimeError for other bytes than saved.
    """
    check_room(place.directory, memory_nbytes=4 * 2**30, storage_nbytes=4 * 2**30)
    found = []
    for state, across in (STATES[name] for name in names):
        directory = place.fresh(state.name)
        directory.mkdir()
        saving = Mesh(ranks=writers, across=across)
        launch = Launch(state=state, saving=saving, place=directory)
        found.append(save_and_load(launch, rounds or _ROUNDS, progress=progress, act=act_alone))
        remove(directory)
    progress.say("")
    return _sum_up(writers, found)


def act_alone(action: str, launch: Launch, rank: int) -> dict[str, Any]:
    """Let a new process act as a rank, so that its memory is measured alone."""
    command = [sys.executable, "-m", "benchmarks.scale", action, launch.dump(), str(rank)]
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def act(action: str, launch: Launch, rank: int) -> dict[str, Any]:
    """Act as a rank: `plan`, `commit`, `open` or `read`."""
    actions = {"plan": plan_rank, "commit": commit_launch, "open": open_rank, "read": read_rank}
    return {"rank": rank, **actions[action](launch, rank)}


def save_and_load(
    launch: Launch,
    ranks: int,
    *,
    progress: Progress,
    act: Callable[[str, Launch, int], dict[str, Any]] = act,
) -> dict[str, Any]:
    """Plan, write, commit, open and read a checkpoint, and return the figures of each.

    Args:
        ranks: how many ranks plan, open and read.
        act: acts as a rank, in this process or as `act_alone`.
    """
    state = launch.state
    progress.say(f"scale: {state.name}: structures")
    gathered = _gather(launch)
    savers = _spread(launch.saving.ranks, ranks)
    planned = []
    for rank in savers:
        progress.say(f"scale: {state.name}: plan of rank {rank}")
        planned.append(act("plan", launch, rank))
    written = []
    for row in iter_written(launch):
        progress.say(f"scale: {state.name}: writer {row['rank']} of {launch.saving.ranks}")
        written.append(row)
    for row in planned:
        if row["pieces"] != written[row["rank"]]["pieces"]:
            raise RuntimeError(f"rank {row['rank']} plans other pieces than it wrote")
    progress.say(f"scale: {state.name}: commit")
    committed = act("commit", launch, 0)
    opened, read = [], []
    for rank in savers:
        progress.say(f"scale: {state.name}: rank {rank} opens")
        opened.append(act("open", launch, rank))
    for rank in _spread(launch.loaders, ranks):
        progress.say(f"scale: {state.name}: rank {rank} of {launch.loading.ranks} reads")
        read.append(act("read", launch, rank))
    return {
        "launch": launch,
        "gathered_nbytes": gathered,
        "plan": planned,
        "write": written,
        "commit": [committed],
        "open": opened,
        "read": read,
    }


def _spread(count: int, ranks: int) -> list[int]:
    """Return the first, the last and further ranks, evenly spread.

    >>> _spread(4096, 3), _spread(2, 5)
    ([0, 2047, 4095], [0, 1])
    """
    return sorted({(count - 1) * number // max(1, ranks - 1) for number in range(ranks)})


def _gather(launch: Launch) -> int:
    """Write the structures of all ranks to the file; return the size in bytes."""
    with launch.told.open("wb") as file:
        for rank in range(launch.saving.ranks):
            content, _ = structure_of(launch.state.snapshot(launch.saving, rank)).dump()
            file.write(json.dumps(base64.b64encode(content).decode()).encode() + b"\n")
    return launch.told.stat().st_size


def _measured(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of an action, with its seconds, and the growth of memory at its peak."""
    with PeakResident() as memory:
        begin_s = time.perf_counter()
        begin_cpu_s = time.process_time()
        result = action()
        seconds = time.perf_counter() - begin_s
        cpu_s = time.process_time() - begin_cpu_s
        time.sleep(0.01)  # the peak is looked for every 2 ms
    return {**result, "s": seconds, "cpu_s": cpu_s, "memory_nbytes": memory.extra_nbytes}


# --- what a rank does -----------------------------------------------------------------------------


def plan_rank(launch: Launch, rank: int) -> dict[str, Any]:
    """Plan a rank's save, from the gathered structures to the image of its files."""
    snapshot = launch.state.snapshot(launch.saving, rank)
    origin = make_origin(launch.saving.ranks)

    def plan() -> dict[str, Any]:
        gathered = launch.told.read_bytes().splitlines()
        group = Group(rank, launch.saving.ranks, lambda _: gathered)
        written = find_written(group, snapshot)
        image = plan_image(snapshot, written=written, block_nbytes=origin.block_nbytes)
        return {"pieces": len(image.pieces), "nbytes": sum(s.nbytes for s in image.shards)}

    return _measured(plan)


def iter_written(launch: Launch) -> Iterator[dict[str, Any]]:
    """Write the files of all writers, one writer after the other; yield the figures of each."""
    store = LocalStore(launch.directory, writable=True, calls=HoleCalls())
    for rank, flags in enumerate(assign_all(launch)):
        yield write_rank(launch, store, rank, flags)


def write_rank(
    launch: Launch, store: LocalStore, rank: int, flags: NDArray[np.bool_]
) -> dict[str, Any]:
    """Write the files of a writer.

    Args:
        flags: whether the rank writes each of its boxes.
    """
    origin = make_origin(launch.saving.ranks)
    snapshot = launch.state.snapshot(launch.saving, rank)
    own = None if flags.all() else _take(snapshot, flags)
    planted = list_planted(launch, rank)
    begin_s = time.perf_counter()
    begin_cpu_s = time.process_time()
    image = plan_image(snapshot, written=own, block_nbytes=origin.block_nbytes)
    contents = HoleContents(image, planted)
    part = write_image(store, image, contents, origin, Context.of(snapshot), writer=rank)
    return {
        "rank": rank,
        "s": time.perf_counter() - begin_s,
        "cpu_s": time.process_time() - begin_cpu_s,
        "pieces": len(image.pieces),
        "boxes": len(part.holdings.replica),
        "digests": int(part.holdings.digest_count.sum()),
        "nbytes": sum(file.nbytes for file in part.files),
        "header_nbytes": sum(file.header_nbytes for file in part.files),
    }


def assign_all(launch: Launch) -> tuple[NDArray[np.bool_], ...]:
    """Return for each rank which of its boxes it writes, as `find_written` finds it."""
    known: dict[bytes, TensorTable] = {}
    lines = launch.told.read_bytes().splitlines()
    return assign_writers(
        [Structure.parse(base64.b64decode(json.loads(line)), known=known) for line in lines]
    )


def _take(snapshot: Snapshot, flags: NDArray[np.bool_]) -> frozenset[tuple[TensorKey, Box]]:
    """Return the boxes of a snapshot that have a flag, in the order of the structure."""
    pieces = ((key_of(one), box) for one in sort_sources(snapshot) for box in one.boxes)
    return frozenset(itertools.compress(pieces, flags.tolist()))


def list_planted(launch: Launch, rank: int) -> Mapping[tuple[TensorKey, Box], bytes]:
    """Return the random bytes of a rank that saves; most ranks have none."""
    if rank % _PLANTED_EVERY:
        return {}
    (one,) = (one for one in launch.state.hold(launch.saving, rank) if key_of(one) == _PLANTED)
    return {(_PLANTED, box): plant(box, f"{launch.state.name} {rank}") for box in one.boxes}


def commit_launch(launch: Launch, rank: int) -> dict[str, Any]:
    """Commit as writer 0."""
    assert rank == 0
    store = open_store(launch.directory, writable=True)
    origin = make_origin(launch.saving.ranks)
    row = _measured(
        lambda: {"step": decide(store, origin, writer=0, deadline_s=_DEADLINE_S).origin.step}
    )
    files = [*launch.directory.iterdir(), *(launch.directory / "parts").iterdir()]
    stats = [file.stat() for file in files if file.is_file()]
    return {
        **row,
        "manifest_nbytes": (launch.directory / MANIFEST_NAME).stat().st_size,
        "index_nbytes": (launch.directory / index_name(origin.attempt)).stat().st_size,
        "parts_nbytes": sum(f.stat().st_size for f in files if f.parent.name == "parts"),
        "files": len(stats),
        "apparent_nbytes": sum(stat.st_size for stat in stats),
        "on_disk_nbytes": sum(512 * stat.st_blocks for stat in stats),
    }


def open_rank(launch: Launch, rank: int) -> dict[str, Any]:
    """Open the checkpoint as a rank of as many, and plan its own boxes down to ranges of files."""
    wanted = launch.state.hold(launch.saving, rank)
    store = CountingStore(launch.directory)

    def plan() -> dict[str, Any]:
        with Checkpoint(store) as checkpoint:
            reading = checkpoint.plan_reading(wanted)
            return {"requests": len(reading.library.plan_requests(reading.ranges))}

    row = _measured(plan)
    return {
        **row,
        "metadata_nbytes": store.metadata_nbytes,
        "parts": store.part_count,
    }


def read_rank(launch: Launch, rank: int) -> dict[str, Any]:
    """Open, plan and read the share of a rank of another world size; compare every byte."""
    store = CountingStore(launch.directory)
    sinks = [Compared(one) for one in launch.state.hold(launch.loading, rank)]
    planted = {
        box: content
        for writer in range(0, launch.saving.ranks, _PLANTED_EVERY)
        for (_, box), content in list_planted(launch, writer).items()
    }
    expected = [sink.expect(planted) for sink in sinks if key_of(sink) == _PLANTED]

    def read() -> dict[str, Any]:
        with Checkpoint(store) as checkpoint:
            report = checkpoint.read_into(sinks)
        return {
            "needed_nbytes": report.needed_nbytes,
            "read_nbytes": report.read_nbytes,
            "verified_nbytes": report.verified_nbytes,
            "requests": report.request_count,
        }

    row = _measured(read)
    filled = sum(sink.nbytes for sink in sinks)
    if filled != row["needed_nbytes"] or not all(sink.is_right for sink in sinks):
        raise RuntimeError(f"rank {rank} of {launch.loading.ranks} read other bytes than saved")
    return {
        **row,
        "metadata_nbytes": store.metadata_nbytes,
        "parts": store.part_count,
        "planted_nbytes": sum(expected),
    }


class Compared:
    """A tensor's boxes that compare received elements with the saved ones, and keep none.

    Attributes:
        nbytes: size of the received elements in bytes.
        is_right: whether all of them were equal so far.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.field = wanted.field
        self.name = wanted.name
        self.scope = wanted.scope
        self.dtype = wanted.dtype
        self.global_shape = wanted.global_shape
        self.boxes = wanted.boxes
        self.nbytes = 0
        self.is_right = True
        self._expected: dict[Box, NDArray[np.uint32]] = {}
        self._lock = threading.Lock()

    def expect(self, planted: Mapping[Box, bytes]) -> int:
        """Expect the bytes of some saved boxes, beside zeros; return their number."""
        nbytes = 0
        for box in self.boxes:
            array = self._expected[box] = np.zeros(box.shape, np.uint32)
            for stored, content in planted.items():
                common = stored.intersect(box)
                if common is not None:
                    values = np.frombuffer(content, np.uint32).reshape(stored.shape)
                    array[common.relative_to(box)] = values[common.relative_to(stored)]
                    nbytes += 4 * common.element_count
        return nbytes

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Compare the elements of `box`. Several threads call this at once."""
        found = np.frombuffer(content, np.uint32).reshape(box.shape)
        outer = next(one for one in self.boxes if one.contains(box))
        expected = self._expected.get(outer)
        same = (
            not found.any()
            if expected is None
            else np.array_equal(found, expected[box.relative_to(outer)])
        )
        with self._lock:
            self.nbytes += len(content)
            self.is_right = self.is_right and bool(same)


# --- the record -----------------------------------------------------------------------------------


def _sum_up(writers: int, found: Sequence[dict[str, Any]]) -> Outcome:
    steps = ("plan", "write", "commit", "open", "read")
    names = [each["launch"].state.name for each in found]
    figures = {
        f"{name}_{step}_{unit}": summarize([row[unit] for row in each[step]])
        for name, each in zip(names, found, strict=True)
        for step in steps
        for unit in ("s", "cpu_s")
    }
    return Outcome(
        workload={
            "nbytes": sum(each["launch"].state.nbytes for each in found),
            "tensors": sum(each["launch"].state.tensors for each in found),
            "writers": writers,
            "states": {name: _describe(each) for name, each in zip(names, found, strict=True)},
        },
        settings={
            "ckptfmt": {
                "plan": "find_written with the structures of all writers, then plan_image",
                "write": "write_image, with holes for zeros",
                "commit": "decide, by writer 0",
                "open": "Checkpoint, and the plan of the saved share down to ranges of files",
                "read": "Checkpoint.read_into, for a share of another world size",
            }
        },
        repeats={
            f"{name}_{step}": len(each[step])
            for name, each in zip(names, found, strict=True)
            for step in steps
        },
        rounds={
            f"{name}_{step}": each[step]
            for name, each in zip(names, found, strict=True)
            for step in steps
            if step != "write"
        },
        figures=figures,
        ratios={},
        goals={},
        memory={
            f"{name}_{step}_nbytes": max(row["memory_nbytes"] for row in each[step])
            for name, each in zip(names, found, strict=True)
            for step in steps
            if step != "write"
        },
        notes={
            "memory": "growth of anonymous and shared memory at the peak of a rank's process",
            "cpu_s": "seconds of processor of the rank's process, all its threads",
        },
        cache="warm: documents were just written, and holes are in no device",
    )


def _describe(each: Mapping[str, Any]) -> dict[str, object]:
    """Return a state's sizes: tensors, documents and files."""
    launch = each["launch"]
    (committed,) = each["commit"]
    return {
        "nbytes": launch.state.nbytes,
        "tensors": launch.state.tensors,
        "tensor_parallel": launch.saving.across,
        "loading_ranks": launch.loading.ranks,
        "boxes": sum(row["boxes"] for row in each["write"]),
        "written_boxes": sum(row["pieces"] for row in each["write"]),
        "digests": sum(row["digests"] for row in each["write"]),
        "gathered_nbytes": each["gathered_nbytes"],
        "header_nbytes": sum(row["header_nbytes"] for row in each["write"]),
        **{
            key: committed[key]
            for key in (
                "manifest_nbytes", "index_nbytes", "parts_nbytes", "files", "apparent_nbytes",
                "on_disk_nbytes",
            )
        },
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(act(sys.argv[1], Launch.parse(sys.argv[2]), int(sys.argv[3]))))

"""Record a run of the real engines on a real directory, and judge every state that a crash within it may leave."""

import contextlib
import dataclasses
import os
import pathlib
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Final

from ckptfmt.store.local import LocalStore
from tests.explorer.fsmodel import LIMIT, POSIX_MIN, Disk, DiskState
from tests.explorer.judge import RECOVERY_ATTEMPT, Judge, Marks, Promises, Violation, recover
from tests.store.helpers import FAST_DIRECTORY
from tests.stores.hooked import Operation
from tests.stores.recorder import ACK, Gate, Log, RecordingCalls

#: Violations kept of one exploration; the rest would say the same.
_KEPT: Final = 20


class Bench:
    """A directory that stores of several actors share, and the log of what they do to it.

    Args:
        root: an empty directory.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.log = Log()
        self.marks = Marks(self.log.ack)

    def store(self, who: str = "", *, gate: Gate | None = None) -> LocalStore:
        """Return the run's directory as a store whose system calls are recorded."""
        calls = RecordingCalls(self.root, log=self.log, who=who, gate=gate)
        return LocalStore(self.root, writable=True, calls=calls)


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """A run: what was there and promised when it began, and what was done."""

    initial: DiskState
    promises: Promises
    operations: tuple[Operation, ...]


@dataclasses.dataclass(slots=True)
class CrashCounts:
    """What an exploration met.

    Attributes:
        point_count: points at which a crash can leave something new.
        state_count: states at these points, some of them equal.
        distinct_count: distinct pairs of a state and what was promised by then.
        violations: what was found.
    """

    point_count: int = 0
    state_count: int = 0
    distinct_count: int = 0
    violations: list[Violation] = dataclasses.field(default_factory=list)

    @property
    def rules(self) -> set[str]:
        """The rules that were broken."""
        return {violation.rule for violation in self.violations}

    def __add__(self, other: "CrashCounts") -> "CrashCounts":
        return CrashCounts(
            self.point_count + other.point_count,
            self.state_count + other.state_count,
            self.distinct_count + other.distinct_count,
            self.violations + other.violations,
        )

    def __str__(self) -> str:
        return (
            f"{self.point_count} crash points, {self.state_count} states, {self.distinct_count}"
            " distinct, "
            f"{len(self.violations)} violations"
        )


@contextlib.contextmanager
def bench_directory() -> Iterator[pathlib.Path]:
    """Make a directory for a run, in memory where there is one."""
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-explorer-") as path:
        root = pathlib.Path(path) / "run"
        root.mkdir()
        yield root


def record(
    run: Callable[[Bench], None],
    *,
    setup: Callable[[Bench], None] | None = None,
    edit: Callable[[tuple[Operation, ...]], tuple[Operation, ...]] = lambda operations: operations,
) -> Recording:
    """Record `run`, after `setup`, whose end is taken as durable; `edit` changes what was recorded."""
    with bench_directory() as root:
        promises = Promises()
        if setup is not None:
            before = Bench(root)
            setup(before)
            promises = _promises_after(promises, before.log.operations)
        initial = scan(root)
        bench = Bench(root)
        run(bench)
        return Recording(initial, promises, edit(bench.log.operations))


def scan(root: pathlib.Path) -> DiskState:
    """Return what is in a directory, temporaries left out."""
    paths = [path for path in root.rglob("*") if not path.name.startswith(".tmp-")]
    return DiskState(
        {path.relative_to(root).as_posix(): path.read_bytes() for path in paths if path.is_file()},
        frozenset(path.relative_to(root).as_posix() for path in paths if path.is_dir()),
    )


def lay_out(state: DiskState, root: pathlib.Path, leftovers: list[str] | None = None) -> None:
    """Put a state on the disk, with some unfinished files beside it where their directory is there."""
    for path in sorted(state.directories):
        (root / path).mkdir()
    for path, data in state.files.items():
        (root / path).write_bytes(data)
    for path in leftovers or []:
        if (root / path).parent.is_dir():
            (root / path).write_bytes(b"unfinished")


def explore_crashes(
    recording: Recording,
    judge: Judge,
    *,
    model: str = POSIX_MIN,
    rng: random.Random,
    recovery: bool = True,
    enough: int = _KEPT,
    limit: int = LIMIT,
    on_state: Callable[[DiskState, Promises, list[str]], None] | None = None,
) -> CrashCounts:
    """Judge every state that a crash during the recording may leave.

    Args:
        model: of the disk.
        recovery: whether each state is recovered from, too.
        enough: after so many violations the rest isn't judged.
        limit: states of a point that are all judged; of more, a sample is.
        on_state: called with each distinct state, what was promised, and some leftovers.
    """
    counts = CrashCounts()
    seen: set[Any] = set()
    disk = Disk(recording.initial)
    promises = recording.promises
    for operation in recording.operations:
        if operation.op == ACK:
            promises = promises.after(operation.path)
        else:
            disk.apply(operation)
            if not disk.changed:
                continue
        counts.point_count += 1
        for state in disk.iter_states(model, rng, limit=limit):
            counts.state_count += 1
            key = (state.key, promises.key)
            if key in seen:
                continue
            seen.add(key)
            counts.violations += judge.judge(state.files, promises, recovery=recovery)
            if on_state is not None:
                on_state(state, promises, disk.leftovers(rng))
            if len(counts.violations) >= enough:
                break
        if len(counts.violations) >= enough:
            break
    counts.distinct_count = len(seen)
    return counts


def explore_recoveries(
    samples: list[tuple[DiskState, Promises, list[str]]], judge: Judge, *, rng: random.Random
) -> CrashCounts:
    """Crash again in the middle of recovery: from each sample, record it on a real directory, and explore that."""
    counts = CrashCounts()
    for state, promises, leftovers in samples:
        counts += explore_crashes(_record_recovery(state, promises, leftovers), judge, rng=rng)
    return counts


def _record_recovery(state: DiskState, promises: Promises, leftovers: list[str]) -> Recording:
    with bench_directory() as root:
        lay_out(state, root, leftovers)
        bench = Bench(root)
        recover(bench.store(), bench.marks, attempt_number=RECOVERY_ATTEMPT * 2)
        _check_no_leftovers(root, state)
        return Recording(state, promises, bench.log.operations)


def _check_no_leftovers(root: pathlib.Path, state: DiskState) -> None:
    """Check that recovery removed the unfinished files from what it gave up or finished retiring."""
    for path, _, names in os.walk(root):
        relative = pathlib.Path(path).relative_to(root).as_posix()
        undecided = relative in state.directories and f"{relative}/manifest.json" not in state.files
        if undecided and relative.startswith("step-"):
            assert not [name for name in names if name.startswith(".tmp-")], (
                f"temporaries stay in {relative}"
            )


def _promises_after(promises: Promises, operations: tuple[Operation, ...]) -> Promises:
    for operation in operations:
        if operation.op == ACK:
            promises = promises.after(operation.path)
    return promises

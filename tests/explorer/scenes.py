"""Actors that meet in one run, on both kinds of store: who may come to what, whatever the order of their steps."""

import copy
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

from ckptfmt.commit import decision as commit
from ckptfmt.documents.manifest import Manifest, checkpoint_name, shard_name
from ckptfmt.documents.run import Launch
from ckptfmt.errors import CkptError, Code
from ckptfmt.run import lineage
from ckptfmt.store.memory import Loss, MemoryStore
from ckptfmt.store.protocol import Store
from tests.explorer import content
from tests.explorer.crashes import Bench, lay_out, scan
from tests.explorer.fsmodel import DiskState
from tests.explorer.judge import Judge, Marks, Promises, Violation, clean_up
from tests.explorer.schedule import Actor, GatedStore, Outcome
from tests.store.helpers import FAST_DIRECTORY
from tests.stores.hooked import Operation
from tests.stores.recorder import Recorder

#: System calls before which an actor on a file system stops: those that other actors can see, or
#: that see them.
_VISIBLE: Final = frozenset(
    {"mkdir", "link", "rename", "unlink", "rmdir", "scan", "open_read", "lstat"}
)

Action = Callable[[Store, Marks], Any]
Outcomes = Mapping[str, Outcome]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Actors, and what they may come to.

    Attributes:
        setup: fills the store before they start.
        actions: what each does.
        refusals: the codes of the errors that each may raise.
        owned: see `Judge.judge`.
        check: says what else is wrong with the outcomes.
        run_floor: complete runs that an exploration makes at least.
        may_delete: whether an actor that doesn't know an outcome may have deleted files before.
    """

    setup: Callable[[Store], None]
    actions: Mapping[str, Action]
    refusals: Mapping[str, frozenset[Code]]
    owned: bool = True
    check: Callable[[Outcomes, MemoryStore], list[str]] = lambda _outcomes, _store: []
    run_floor: int = 3
    may_delete: bool = False

    def but_unsure(self) -> "Case":
        """Return the case with actors that may also say that they don't know; who wins is then anybody's guess."""
        refusals = {name: self.refusals.get(name, frozenset()) | UNKNOWN for name in self.actions}
        return dataclasses.replace(self, refusals=refusals, check=lambda _outcomes, _store: [])


class _CaseScene:
    """What the scenes on both stores share: what actors were told, and the verdict."""

    def __init__(self, case: Case, judge: Judge, promises: Promises) -> None:
        self.actors: dict[str, Actor] = {}
        self._case = case
        self._judge = judge
        self._promises = promises
        self._told: list[str] = []

    def judge(self) -> list[Violation]:
        """Judge the end of a run: the outcomes, then the state with everything that was promised."""
        outcomes = {
            name: actor.outcome for name, actor in self.actors.items() if actor.outcome is not None
        }
        found = [
            violation
            for name, outcome in outcomes.items()
            for violation in self._judge_outcome(name, outcome)
        ]
        files = self._files()
        found += self._judge_files(files)
        return found + [
            Violation("outcome", text)
            for text in self._case.check(outcomes, MemoryStore.from_snapshot(files))
        ]

    def _judge_files(self, files: Mapping[str, bytes]) -> list[Violation]:
        promises = functools.reduce(Promises.after, self._told, self._promises)
        return self._judge.judge(files, promises, owned=self._case.owned)

    def _judge_outcome(self, name: str, outcome: Outcome) -> list[Violation]:
        error = outcome.error
        if error is None or (
            isinstance(error, CkptError) and error.code in self._case.refusals.get(name, ())
        ):
            unknown = isinstance(error, CkptError) and error.code in UNKNOWN
            unsure = unknown and not self._case.may_delete
            deleted = self.actors[name].deletion_count if unsure else 0
            return (
                [Violation("reaped", f"{name} deleted {deleted} files, not knowing the outcome")]
                if deleted
                else []
            )
        return [Violation("outcome", f"{name}: {error!r}")]

    def _files(self) -> Mapping[str, bytes]:
        raise NotImplementedError


class MemoryScene(_CaseScene):
    """A case on an object store in memory.

    Args:
        case: who does what.
        judge: of the end.
        initial: what is in the store at the start, with what was promised of it.
        losses: requests that the network loses; with late ones, an actor ``network`` lets them
            arrive at any time.
    """

    def __init__(
        self,
        case: Case,
        judge: Judge,
        initial: tuple[Mapping[str, bytes], Promises],
        losses: tuple[tuple[Loss, str], ...] = (),
    ) -> None:
        super().__init__(case, judge, initial[1])
        self._store = MemoryStore.from_snapshot(initial[0])
        for loss, path_end in losses:
            self._store.inject(loss, path_end=path_end)
        for name, action in case.actions.items():
            gated = GatedStore(self._store, functools.partial(self.actors.__getitem__, name))
            self.actors[name] = Actor(
                name, functools.partial(action, gated, Marks(self._told.append))
            )
        if any(loss is Loss.LATE for loss, _ in losses):
            self.actors["network"] = Actor("network", self._store.land)

    def key(self) -> Hashable:
        """Return the contents of the store, and what is still under way."""
        bucket = self._store._bucket
        return frozenset(self._store.snapshot().items()), tuple(bucket.late), len(bucket.losses)

    def judge_crash(self) -> list[Violation]:
        """Judge what is there if all actors die now: with the requests that are under way, and without them."""
        found = self._judge_files(self._complete(self._store.snapshot()))
        if self._store.late_count:
            later = copy.deepcopy(self._store._bucket.late)
            store = MemoryStore.from_snapshot(self._store.snapshot())
            store._bucket.late.extend(later)
            store.land()
            found += self._judge_files(self._complete(store.snapshot()))
        return found

    def _files(self) -> Mapping[str, bytes]:
        self._store.land()
        return self._complete(self._store.snapshot())

    def _complete(self, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the files of the store, with those that lie elsewhere."""
        return files


class FileScene(_CaseScene):
    """A case on a real directory, with a stop before each system call that others can see."""

    def __init__(self, case: Case, judge: Judge, initial: tuple[DiskState, Promises]) -> None:
        super().__init__(case, judge, initial[1])
        self._directory = tempfile.TemporaryDirectory(
            dir=FAST_DIRECTORY, prefix="ckptfmt-explorer-"
        )
        root = pathlib.Path(self._directory.name) / "run"
        root.mkdir()
        lay_out(initial[0], root)
        self.bench = Bench(root)
        self.bench.marks = Marks(self._tell)
        for name, action in case.actions.items():
            self.actors[name] = Actor(name, functools.partial(self._act, name, action))

    def key(self) -> None:
        """Nobody knows cheaply what is on the disk."""
        return

    def close(self) -> None:
        """Remove the directory."""
        self._directory.cleanup()

    def _act(self, name: str, action: Action) -> Any:
        return action(self.bench.store(name, gate=self._gate), self.bench.marks)

    def _gate(self, operation: Operation) -> None:
        if operation.op in _VISIBLE and "/.tmp-" not in f"/{operation.to or operation.path}":
            self.actors[operation.who].gate()

    def _tell(self, mark: str) -> None:
        self._told.append(mark)
        self.bench.log.ack(mark)

    def _files(self) -> Mapping[str, bytes]:
        files = dict(scan(self.bench.root).files)
        self.close()
        return files


def prepare(case: Case) -> tuple[Mapping[str, bytes], Promises]:
    """Return what is in the store when the actors of a case start, and what was promised of it."""
    store = MemoryStore()
    case.setup(store)
    promises = Promises()
    for entry in lineage.list_checkpoints(store):
        if entry.manifest is not None:
            promises = promises.after(f"saved {entry.name} {entry.manifest.digest}")
    return store.snapshot(), promises


def put_paths(case: Case) -> list[str]:
    """Return the paths of everything that the actors of a case put, when nothing is lost."""
    files, _ = prepare(case)
    recorder = Recorder(MemoryStore.from_snapshot(files))
    for action in case.actions.values():
        action(recorder, Marks())
    puts = [
        operation.path
        for operation in recorder.log.operations
        if operation.op in ("create", "replace")
    ]
    return list(dict.fromkeys(puts))


def disk_state(files: Mapping[str, bytes]) -> DiskState:
    """Return files as the state of a disk, with their directories."""
    parents = {str(parent) for path in files for parent in pathlib.PurePosixPath(path).parents}
    return DiskState(files, frozenset(parents - {"."}))


# --- setups ---------------------------------------------------------------------------------------


def _saved_steps(store: Store, count: int) -> Launch:
    run = lineage.open_run(store)
    launch, _ = lineage.begin_launch(store, run)
    for number in range(1, count + 1):
        content.save(store, content.origin_of(launch, 10 * number, number))
    return launch


def _one_step(store: Store) -> None:
    _saved_steps(store, 1)


def _two_steps(store: Store) -> None:
    _saved_steps(store, 2)


def _parts(*attempts: int) -> Callable[[Store], None]:
    """Step 10 is saved; of step 20 there are the parts of these attempts."""

    def setup(store: Store) -> None:
        launch = _saved_steps(store, 1)
        for attempt in attempts:
            for number in range(content.WRITER_COUNT):
                content.write(store, content.origin_of(launch, 20, attempt), number)

    return setup


def _parts_and_a_new_launch(store: Store) -> None:
    """The same with one attempt; then launch 2 begins."""
    _parts(2)(store)
    _begin(store)


def _parts_without_a_file(store: Store) -> None:
    _parts(2)(store)
    store.delete(_shard_path())


def _parts_with_a_short_file(store: Store) -> None:
    _parts(2)(store)
    path = _shard_path()
    data = store.read(path, limit_nbytes=1 << 20)
    store.replace(path, data[:-1])


def _shard_path() -> str:
    return f"{checkpoint_name(20, 1)}/{shard_name('weights', f'{2:016x}', 1)}"


def _begin(store: Store) -> Launch:
    return lineage.begin_launch(store, lineage.open_run(store))[0]


def _launch(store: Store, number: int) -> Launch:
    return lineage.read_launch(store, number)


# --- actions --------------------------------------------------------------------------------------


def _finalize(attempt: int) -> Action:
    """Commit step 20 of launch 1 from parts that are there."""

    def action(store: Store, marks: Marks) -> Manifest:
        origin = content.origin_of(_launch(store, 1), 20, attempt)
        manifest = commit.finalize(content.place_of(store, origin), origin)
        marks.saved(manifest)
        return manifest

    return action


def _save(attempt: int, *, launch: int = 1) -> Action:
    """Write and commit step 20."""

    def action(store: Store, marks: Marks) -> Manifest:
        lineage.check_not_fenced(store, launch)
        manifest = content.save(store, content.origin_of(_launch(store, launch), 20, attempt))
        marks.saved(manifest)
        return manifest

    return action


def _clean(*, launch: int, keep: int | None = None) -> Action:
    """Clean up as a launch."""

    def action(store: Store, marks: Marks) -> None:
        clean_up(store, lineage.open_run(store), _launch(store, launch), marks, keep=keep)

    return action


def _read(step: int) -> Action:
    """Read a step of launch 1 completely."""

    def action(store: Store, _: Marks) -> content.Loaded:
        return content.load(store.at(checkpoint_name(step, 1)))

    return action


def _launch_and_save(attempt: int, step: int) -> Action:
    """Begin a launch, load what it says, and save."""

    def action(store: Store, marks: Marks) -> tuple[Launch, Manifest]:
        launch = _begin(store)
        marks.launched(launch)
        assert launch.resume_from is not None
        loaded = content.load(store.at(launch.resume_from.name), digest=launch.resume_from.digest)
        assert loaded.exact
        lineage.check_not_fenced(store, launch.launch)
        manifest = content.save(store, content.origin_of(launch, step, attempt))
        marks.saved(manifest)
        return launch, manifest

    return action


def _launch_only(store: Store, marks: Marks) -> Launch:
    """Open the run, begin a launch."""
    launch = _begin(store)
    marks.launched(launch)
    return launch


def _save_and_retire(attempt: int) -> Action:
    """What a trainer of launch 1 does at each save: look for a newer launch, save, retire all but the newest."""

    def action(store: Store, marks: Marks) -> None:
        _save(attempt)(store, marks)
        lineage.check_not_fenced(store, 1)
        _clean(launch=1, keep=1)(store, marks)

    return action


# --- checks ---------------------------------------------------------------------------------------


def _both_commit_the_same(outcomes: Outcomes, _: MemoryStore) -> list[str]:
    digests = {
        outcome.answer.digest
        for outcome in outcomes.values()
        if isinstance(outcome.answer, Manifest)
    }
    return [] if len(digests) == 1 else [f"committers of the same parts came to {sorted(digests)}"]


def _one_commits(outcomes: Outcomes, _: MemoryStore) -> list[str]:
    count = sum(isinstance(outcome.answer, Manifest) for outcome in outcomes.values())
    return [] if count == 1 else [f"{count} of two attempts were acknowledged"]


def _committed_or_given_up(outcomes: Outcomes, store: MemoryStore) -> list[str]:
    committed = outcomes["committer"].error is None
    register = commit.read_register(store.at(checkpoint_name(20, 1)))
    if committed is not isinstance(register, Manifest) and register is not None:
        return [f"committed: {committed}; the register holds {register!r}"]
    return []


def _can_be_finalized(outcomes: Outcomes, store: MemoryStore) -> list[str]:
    """Whoever doesn't know may ask again: the parts become the same checkpoint."""
    try:
        manifest = commit.finalize(
            store.at(checkpoint_name(20, 1)), content.origin_of(_launch(store, 1), 20, 2)
        )
    except CkptError as error:
        return [f"it can't be finalized again: {error}"]
    answer = outcomes["committer"].answer
    return (
        []
        if answer is None or answer == manifest
        else ["finalized again, it is another checkpoint"]
    )


def _read_is_exact(outcomes: Outcomes, _: MemoryStore) -> list[str]:
    answer = outcomes["reader"].answer
    return [] if answer is None or answer.exact else ["the reader got what nobody saved"]


def _launches_share_nothing(outcomes: Outcomes, _: MemoryStore) -> list[str]:
    launches = [
        outcome.answer[0] for outcome in outcomes.values() if isinstance(outcome.answer, tuple)
    ]
    numbers = [launch.launch for launch in launches]
    found = [] if len(set(numbers)) == len(numbers) else [f"launches share a number: {numbers}"]
    if not any(isinstance(outcome.answer, tuple) for outcome in outcomes.values()):
        found.append("no launch came through")
    return found


_GIVEN_UP: Final = frozenset(
    {Code.CHECKPOINT_ABORTED, Code.FILE_MISSING, Code.FENCED, Code.COMMIT_UNKNOWN}
)
UNKNOWN: Final = frozenset({Code.COMMIT_UNKNOWN, Code.STORE_NO_ANSWER})
_GONE: Final = frozenset({Code.CHECKPOINT_RETIRED, Code.FILE_MISSING, Code.NOT_COMMITTED})

CASES: Final[dict[str, Case]] = {
    "same_parts_twice": Case(
        setup=_parts(2),
        actions={"c0": _finalize(2), "c1": _finalize(2)},
        refusals={},
        check=_both_commit_the_same,
    ),
    "two_attempts": Case(
        setup=_parts(2, 3),
        actions={"c0": _finalize(2), "c1": _finalize(3)},
        refusals=dict.fromkeys(("c0", "c1"), frozenset({Code.COMMIT_CONFLICT})),
        check=_one_commits,
    ),
    "two_savers": Case(
        setup=_one_step,
        actions={"c0": _save(2), "c1": _save(3)},
        refusals=dict.fromkeys(("c0", "c1"), frozenset({Code.COMMIT_CONFLICT})),
        check=_one_commits,
    ),
    "committer_and_cleaner": Case(
        setup=_parts_and_a_new_launch,
        actions={"committer": _finalize(2), "cleaner": _clean(launch=2)},
        refusals={"committer": _GIVEN_UP},
        owned=False,
        check=_committed_or_given_up,
    ),
    "saver_and_cleaner": Case(
        setup=_parts_and_a_new_launch,
        actions={"committer": _save(3), "cleaner": _clean(launch=2)},
        refusals={"committer": _GIVEN_UP},
        owned=False,
        check=_committed_or_given_up,
    ),
    "two_cleaners": Case(
        setup=_parts_and_a_new_launch,
        actions={"c0": _clean(launch=2), "c1": _clean(launch=2)},
        refusals={},
    ),
    "retiring_and_reader": Case(
        setup=_two_steps,
        actions={"reader": _read(10), "cleaner": _clean(launch=1, keep=1)},
        refusals={"reader": _GONE},
        check=_read_is_exact,
    ),
    "two_launches": Case(
        setup=_one_step,
        actions={"l0": _launch_and_save(2, 20), "l1": _launch_and_save(3, 20)},
        refusals=dict.fromkeys(("l0", "l1"), frozenset({Code.FENCED})),
        owned=False,
        check=_launches_share_nothing,
    ),
    "saver_and_new_launch": Case(
        setup=_one_step,
        actions={"old": _save(2), "new": _launch_and_save(3, 30)},
        refusals={"old": frozenset({Code.FENCED})},
        owned=False,
    ),
    "retiring_saver_and_new_launch": Case(
        setup=_one_step,
        actions={"old": _save_and_retire(2), "new": _launch_and_save(3, 30)},
        refusals={"old": frozenset({Code.FENCED}), "new": _GONE},
        owned=False,
    ),
}

#: Cases of so many steps that few preemptions are what can be explored.
LONG_CASES: Final = frozenset(
    {"two_cleaners", "two_launches", "saver_and_new_launch", "retiring_saver_and_new_launch"}
)

#: One actor alone on an object store whose network loses requests and answers.
LONE_CASES: Final[dict[str, Case]] = {
    "committer": Case(
        setup=_parts(2),
        actions={"committer": _finalize(2)},
        refusals={"committer": UNKNOWN},
        check=_can_be_finalized,
    ),
    "saver": Case(setup=_one_step, actions={"saver": _save(2)}, refusals={"saver": UNKNOWN}),
    "launch": Case(setup=_one_step, actions={"launch": _launch_only}, refusals={"launch": UNKNOWN}),
    "first_launch": Case(
        setup=lambda _: None, actions={"launch": _launch_only}, refusals={"launch": UNKNOWN}
    ),
    "retiring": Case(
        setup=_two_steps,
        actions={"cleaner": _clean(launch=1, keep=1)},
        refusals={"cleaner": UNKNOWN},
    ),
    "giving_up": Case(
        setup=_parts_and_a_new_launch,
        actions={"cleaner": _clean(launch=2)},
        refusals={"cleaner": UNKNOWN},
    ),
    # With a file that somebody else removed or cut short, nothing may be committed.
    "committer_without_a_file": Case(
        setup=_parts_without_a_file,
        actions={"committer": _finalize(2)},
        refusals={"committer": frozenset({Code.FILE_MISSING})},
    ),
    "committer_with_a_short_file": Case(
        setup=_parts_with_a_short_file,
        actions={"committer": _finalize(2)},
        refusals={"committer": frozenset({Code.FILE_NBYTES})},
    ),
}

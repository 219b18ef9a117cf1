"""What must hold in every state that a crash or a schedule may leave, asked with the real reader and the real recovery.

The rules, by the words that violations begin with:

- ``silent``: a directory loads, but not what was handed to save; ``untyped``: it raises what isn't
  a CkptError;
- ``lost``: what was acknowledged doesn't load, or isn't there;
- ``partial``: the lineage names what isn't whole; ``older``: it begins with an older one than was
  acknowledged; ``back``: it begins with one that a rewind has left;
- ``stuck``: a new launch with a save and a clean-up doesn't work without a manual step;
- ``reaped``: a clean-up removed what the lineage needs.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Mapping
from typing import Final

from ckptfmt.commit import decision as commit
from ckptfmt.documents.manifest import (
    MANIFEST_NAME,
    Abort,
    Manifest,
    Tombstone,
    parse_checkpoint_name,
    parse_register,
)
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import CkptError, Code
from ckptfmt.read import verify
from ckptfmt.read.report import Report
from ckptfmt.run import lineage, retention
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Store
from tests.explorer import content
from tests.stores.hooked import HookedStore, Operation

#: Attempts of a recovery are numbered from here, those of the recovery of a recovery from there.
RECOVERY_ATTEMPT: Final = 0x1000


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    """A rule that doesn't hold, and where."""

    rule: str
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Promises:
    """What somebody was told up to a moment, and may rely on.

    Attributes:
        launch: greatest launch number that a launch was told that it has.
        saved: digests of acknowledged checkpoints by name, those that may be retired by now left
            out.
        retired: names of which it was said that they are gone.
        leaving: names that a rewind is about to leave, which the lineage may begin with, or not.
        left: names that a rewind has left, which the lineage doesn't begin with any more.
    """

    launch: int = 0
    saved: Mapping[str, str] = dataclasses.field(default_factory=dict)
    retired: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()

    @property
    def key(self) -> Hashable:
        """What makes two of them one."""
        return self.launch, frozenset(self.saved.items()), self.retired, self.leaving, self.left

    def after(self, mark: str) -> "Promises":
        """Return the promises after a mark of `Marks`."""
        kind, name, digest = mark.split(" ")
        rest = {key: value for key, value in self.saved.items() if key != name}
        match kind:
            case "launched":
                return dataclasses.replace(self, launch=max(self.launch, int(name)))
            case "saved":
                return dataclasses.replace(self, saved={**self.saved, name: digest})
            case "retiring":
                return dataclasses.replace(self, saved=rest)
            case "retired":
                return dataclasses.replace(self, retired=self.retired | {name})
            case "leaving":
                return dataclasses.replace(self, leaving=self.leaving | {name})
            case "left":
                return dataclasses.replace(self, left=self.left | {name})
        raise AssertionError(mark)


class Marks:
    """How a run tells the log what it tells its caller.

    Args:
        ack: takes a label: `Log.ack`, or what collects the labels elsewhere.
    """

    def __init__(self, ack: Callable[[str], None] = lambda _: None) -> None:
        self._ack = ack

    def launched(self, launch: Launch) -> None:
        """The launch has its number."""
        self._ack(f"launched {launch.launch} -")

    def saved(self, manifest: Manifest) -> None:
        """The checkpoint is committed and durable."""
        self._ack(f"saved {content.name_of(manifest.origin)} {manifest.digest}")

    def retiring(self, name: str) -> None:
        """From here on the checkpoint may go."""
        self._ack(f"retiring {name} -")

    def retired(self, name: str) -> None:
        """The checkpoint is gone for good."""
        self._ack(f"retired {name} -")

    def leaving(self, name: str) -> None:
        """From here on a rewind may leave the checkpoint."""
        self._ack(f"leaving {name} -")

    def left(self, name: str) -> None:
        """A rewind has left the checkpoint."""
        self._ack(f"left {name} -")


class TellingStore(HookedStore):
    """A store that marks a checkpoint as retiring before anything of it is replaced or deleted."""

    def __init__(self, inner: Store, marks: Marks) -> None:
        super().__init__(inner)
        self.replaced: list[str] = []
        self._marks = marks
        self._told: set[str] = set()

    def before(self, operation: Operation) -> None:
        """Tell of the first change, and remember whose register is replaced."""
        if operation.op not in ("replace", "delete"):
            return
        name = operation.path.partition("/")[0]
        if name not in self._told:
            self._told.add(name)
            self._marks.retiring(name)
        if operation.op == "replace":
            self.replaced.append(name)


def clean_up(
    store: Store, run: RunRecord, launch: Launch, marks: Marks, *, keep: int | None
) -> None:
    """Clean up, telling what may go before it does, and what is gone afterwards."""
    telling = TellingStore(store, marks)
    retention.clean_up(
        telling, run, launch=launch.launch, retention=retention.Retention(newest=keep)
    )
    for name in telling.replaced:
        marks.retired(name)


def recover(store: Store, marks: Marks, *, attempt_number: int = RECOVERY_ATTEMPT) -> Launch:
    """Do what a restarted job does: launch, load what it says, clean up, save, retire what is old."""
    run = lineage.open_run(store)
    launch, _ = lineage.begin_launch(store, run)
    marks.launched(launch)
    step = 1
    if launch.resume_from is not None:
        loaded = content.load(store.at(launch.resume_from.name), digest=launch.resume_from.digest)
        assert loaded.exact, "the launch resumed from what nobody saved"
        step = loaded.step + 1
    clean_up(store, run, launch, marks, keep=None)
    marks.saved(content.save(store, content.origin_of(launch, step, attempt_number)))
    clean_up(store, run, launch, marks, keep=1)
    return launch


class Judge:
    """Judges states; remembers its verdicts: many runs end in one state, and most states share most directories.

    Args:
        recover: goes on after a crash, and tells what it promises.
    """

    def __init__(self, recover: Callable[[Store, Marks], object] = recover) -> None:
        self._recover = recover
        self._verdicts: dict[Hashable, content.Loaded | BaseException] = {}
        self._problems: dict[Hashable, str | None] = {}
        self._judged: dict[Hashable, list[Violation]] = {}

    @property
    def count(self) -> int:
        """How many distinct pairs of files and promises were judged."""
        return len(self._judged)

    def judge(
        self,
        files: Mapping[str, bytes],
        promises: Promises,
        *,
        recovery: bool = True,
        owned: bool = True,
    ) -> list[Violation]:
        """Return the violations in a state.

        Args:
            files: the state.
            promises: what was promised by then.
            recovery: whether to recover from it, too.
            owned: whether one launch after the other owned the run. Else one that was superseded
                may have saved beside the lineage, which is kept, and isn't resumed from.
        """
        key = (frozenset(files.items()), promises.key, recovery, owned)
        if key not in self._judged:
            self._judged[key] = self._judge_anew(files, promises, recovery=recovery, owned=owned)
        return [*self._judged[key]]

    def _judge_anew(
        self, files: Mapping[str, bytes], promises: Promises, *, recovery: bool, owned: bool
    ) -> list[Violation]:
        store = MemoryStore.from_snapshot(files)
        found = self._judge_directories(files, promises)
        found += self._judge_lineage(store, promises, owned=owned)
        if recovery and not found:
            found += self._judge_recovery(store, promises, owned=owned)
        return found

    def load(self, files: Mapping[str, bytes], name: str) -> content.Loaded | BaseException:
        """Read the checkpoint `name`, whose files and those of its bases are `files`, by their paths in the run.

        Returns: the checkpoint, or what was raised.
        """
        key = frozenset(files.items()), name
        if key not in self._verdicts:
            self._verdicts[key] = _load(MemoryStore.from_snapshot(files).at(name))
        return self._verdicts[key]

    def _find_problem(self, files: Mapping[str, bytes], name: str) -> str | None:
        """Return what a complete check of a checkpoint finds, if anything."""
        key = frozenset(files.items()), name
        if key not in self._problems:
            report = Report(target="", kind="checkpoint")
            verify.verify_checkpoint(MemoryStore.from_snapshot(files).at(name), report)
            self._problems[key] = str(report.violations[0]) if report.violations else None
        return self._problems[key]

    def _judge_directories(self, files: Mapping[str, bytes], promises: Promises) -> list[Violation]:
        """Judge rules (i) and (ii)."""
        found = []
        loaded = {name: self.load(own, name) for name, own in by_checkpoint(files).items()}
        for name, answer in loaded.items():
            if isinstance(answer, content.Loaded):
                if not answer.exact:
                    found.append(Violation("silent", f"{name} loads what nobody saved"))
            elif not isinstance(answer, CkptError):
                found.append(Violation("untyped", f"{name}: {answer!r}"))
        for name, digest in promises.saved.items():
            answer = loaded.get(name, KeyError(name))
            if not isinstance(answer, content.Loaded) or answer.digest != digest:
                found.append(Violation("lost", f"{name} was acknowledged: {answer!r}"))
        for name in promises.retired:
            answer = loaded.get(name, KeyError(name))
            if not isinstance(answer, CkptError) or answer.code != Code.CHECKPOINT_RETIRED:
                found.append(Violation("lost", f"that {name} is retired: {answer!r}"))
        return found

    def _judge_lineage(
        self, store: MemoryStore, promises: Promises, *, owned: bool
    ) -> list[Violation]:
        """Judge rule (iii)."""
        try:
            launches, entries = lineage.list_launches(store), lineage.list_checkpoints(store)
        except CkptError as error:
            return [Violation("stuck", f"the run can't be listed: {error}")]
        found = []
        newest = max((launch.launch for launch in launches), default=0)
        if newest < promises.launch:
            found.append(Violation("lost", f"launch {promises.launch}; the newest is {newest}"))
        names = []
        directories = by_checkpoint(store.snapshot())
        for entry in lineage.iter_lineage(launches, entries):
            names.append(entry.name)
            problem = self._find_problem(directories.get(entry.name, {}), entry.name)
            if problem:
                found.append(Violation("partial", f"the lineage names {entry.name}: {problem}"))
        counted = [
            name
            for name in promises.saved.keys() - promises.leaving
            if owned or _place_of(name)[1] == newest
        ]
        head = names[0] if names else None
        if head in promises.left:
            found.append(Violation("back", f"the lineage begins with {head}, which a rewind left"))
        return found + _judge_head(head, counted)

    def _judge_recovery(
        self, store: MemoryStore, promises: Promises, *, owned: bool
    ) -> list[Violation]:
        """Judge rules (iv) and (v): recover, and see that the promises of before and of then are kept."""
        before = store.snapshot()
        told: list[str] = []
        try:
            with content.own_nonces("recovery"):
                self._recover(store, Marks(told.append))
        except CkptError as error:
            return [Violation("stuck", f"recovery after {told}: {error}")]
        except AssertionError as error:
            return [Violation("silent", str(error))]
        for mark in told:
            promises = promises.after(mark)
        found = self._judge_directories(store.snapshot(), promises)
        found += self._judge_lineage(store, promises, owned=owned)
        found = [dataclasses.replace(violation, rule="reaped") for violation in found]
        return found + self._judge_deletions(before, store.snapshot(), told)

    def _judge_deletions(
        self, before: Mapping[str, bytes], after: Mapping[str, bytes], told: list[str]
    ) -> list[Violation]:
        """Judge what recovery removed: files of directories that it said it retires, or that weren't committed."""
        retired = {mark.split(" ")[1] for mark in told if mark.startswith("retiring")}
        found = []
        for path in before.keys() - after.keys():
            name = path.partition("/")[0]
            register = commit.read_register(MemoryStore.from_snapshot(after).at(name))
            if not isinstance(register, Tombstone | Abort) or (
                isinstance(register, Tombstone) and name not in retired
            ):
                # A retirement that was under way before the crash is finished; everything else needs a
                # plan.
                was = commit.read_register(MemoryStore.from_snapshot(before).at(name))
                if not isinstance(was, Tombstone):
                    found.append(Violation("reaped", f"{path} was removed"))
        return found


def _judge_head(name: str | None, saved: list[str]) -> list[Violation]:
    acknowledged = max((_place_of(each)[0] for each in saved), default=0)
    if acknowledged and (name is None or _place_of(name)[0] < acknowledged):
        return [
            Violation(
                "older", f"the lineage begins with {name}; step {acknowledged} was acknowledged"
            )
        ]
    return []


def by_checkpoint(files: Mapping[str, bytes]) -> dict[str, dict[str, bytes]]:
    """Return the files that each checkpoint is read from, its own and those of its bases, by their paths in the run."""
    directories: dict[str, dict[str, bytes]] = {}
    for path, data in files.items():
        name = path.partition("/")[0]
        if parse_checkpoint_name(name) is not None:
            directories.setdefault(name, {})[path] = data
    return {
        name: functools.reduce(
            operator.or_, (directories.get(base, {}) for base in _bases_of(own, name)), own
        )
        for name, own in directories.items()
    }


def _bases_of(files: Mapping[str, bytes], name: str) -> list[str]:
    """Return the names of the checkpoints that a checkpoint refers to."""
    try:
        register = parse_register(files[f"{name}/{MANIFEST_NAME}"])
    except (KeyError, CkptError):
        return []
    return [base.name for base in register.references] if isinstance(register, Manifest) else []


def _load(store: MemoryStore) -> content.Loaded | BaseException:
    try:
        return content.load(store)
    except Exception as error:  # noqa: BLE001
        return error


def _place_of(name: str) -> tuple[int, int]:
    """Return step and launch of a name."""
    found = parse_checkpoint_name(name)
    assert found is not None
    return found

"""Copy a run to another store, its mirror, and let the run go on there.

Spec: REQ-RUN-027 to REQ-RUN-032.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Final

from ckptfmt import limits
from ckptfmt.commit.decision import check_base, create_once, sweep
from ckptfmt.commit.lone import refuse_checkpoint
from ckptfmt.commit.waiting import wait_for_savers
from ckptfmt.documents.manifest import (
    MANIFEST_NAME,
    Abort,
    Manifest,
    Reference,
    Tombstone,
    parse_checkpoint_name,
    parse_register,
)
from ckptfmt.documents.run import (
    LABELS_FOLDER,
    LAUNCHES,
    RUN_NAME,
    LabelsRecord,
    Launch,
    RunRecord,
    launch_name,
    parse_labels_name,
)
from ckptfmt.errors import CkptError, Code, StoreError, err
from ckptfmt.read.files import CheckpointFiles, OpenPart, check_nbytes
from ckptfmt.read.in_caches import check_at_home
from ckptfmt.read.report import is_violation, without_frames
from ckptfmt.read.verified_files import (
    StoppedError,
    VerifiedFile,
    create_verified,
    for_each_file,
    index_file,
    part_files,
    stored_files,
)
from ckptfmt.run.lineage import (
    LostLaunch,
    RunEntry,
    begin_launch,
    check_records,
    check_writer_features,
    digest_of,
    is_overtaken,
    iter_lineage,
    list_checkpoints,
    list_launch_numbers,
    list_launches,
    read_known_run,
    read_run,
)
from ckptfmt.run.retention import retire_as_elsewhere
from ckptfmt.signing.bundles import copy_bundles
from ckptfmt.store import check_apart
from ckptfmt.store.protocol import Store

#: Time to wait for the saves of living savers before the old home is left, in seconds.
_DEADLINE_S: Final = 20.0
#: The longest pause between two failing copies, in seconds.
_PAUSE_MAX_S: Final = 300.0
#: Codes of passing store errors.
_PASSING: Final = frozenset({Code.STORE_IO, Code.STORE_NO_ANSWER, Code.NO_SPACE})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MirrorReport:
    """The result of one copy of a run to its mirror.

    Attributes:
        home, mirror: names of the stores.
        head: name of the checkpoint from which the run goes on, of checkpoints with files at home;
            None without such a checkpoint.
        current: whether the mirror has the head.
        copied: names of the checkpoints committed at the mirror.
        launches: numbers of the launches with records created at the mirror.
        retired: names of the checkpoints retired at the mirror.
        in_caches: names of uncopied checkpoints with files in caches of
            nodes.
        problems: the errors of checkpoints of the home, which aren't copied.
        nbytes: number of bytes compared with a digest and written.
        stopped: whether the copy was stopped before the end.
    """

    home: str
    mirror: str
    head: str | None
    current: bool
    copied: tuple[str, ...]
    launches: tuple[int, ...]
    retired: tuple[str, ...]
    in_caches: tuple[str, ...]
    problems: tuple[CkptError, ...]
    nbytes: int
    stopped: bool

    def as_json(self) -> dict[str, object]:
        """Return the report as a JSON-ready mapping."""
        return {
            **dataclasses.asdict(self),
            "problems": [problem.as_json() for problem in self.problems],
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromoteReport:
    """The launch and the checkpoint with which a run goes on at its former mirror.

    Attributes:
        mirror: name of the store, which is the home now.
        launch: number of the launch begun there.
        name, digest: name and digest of the checkpoint from which this launch resumes.
        passed_over: a sentence for each newer checkpoint that isn't valid there.
        fenced: number of the launch begun at the old home; None without the old home.
        unfinished: savers with an unfinished save when the old home was left.
    """

    mirror: str
    launch: int
    name: str
    digest: str
    passed_over: tuple[str, ...]
    fenced: int | None
    unfinished: tuple[str, ...]


def mirror_run(
    home: Store,
    mirror: Store,
    *,
    retire: bool = False,
    are_homes: bool = False,
    on_progress: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> MirrorReport:
    """Copy missing launch records, checkpoints with their bases, and labels to a run's mirror.

    After any interruption, also by a kill, a reader of the mirror finds the run in the state of an
    earlier moment. The next call continues.

    Args:
        home: rooted at the run; only read.
        mirror: rooted at the copy.
        retire: whether to retire at the mirror the checkpoints retired at home; else the mirror
            keeps them.
        are_homes: see `check_same_history`.
        on_progress: called with the number of bytes just compared and written, by several threads,
            but never at the same time.
        stop: an event to end the copy soon.

    Raises: CommitError(HOMES_DIVERGED, CHECKPOINT_EXISTS); FormatError(RUN_MISMATCH);
        IntegrityError(FILE_MISSING); UnsupportedError(FEATURE_UNSUPPORTED); StoreError;
        StateError(ARGUMENT) where the stores are nested.
    """
    check_apart([home, mirror])
    copying = _Mirroring(home, mirror, on_progress, stop or threading.Event(), are_homes=are_homes)
    return copying.run(retire=retire)


def follow_run(
    home: Store,
    mirror: Store,
    *,
    every_s: float,
    stop: threading.Event,
    on_report: Callable[[MirrorReport], None],
    on_failure: Callable[[StoreError, float], None],
    retire: bool = False,
) -> None:
    """Copy a run by `mirror_run` repeatedly, until `stop` is set.

    Args:
        every_s: pause between copies, in seconds.
        on_report: called with the report of each copy.
        on_failure: called with each passing store error, and with the pause until the next
            try, in seconds.

    Raises: as `mirror_run`, except passing store errors.
    """
    failure_count = 0
    while not stop.is_set():
        try:
            on_report(mirror_run(home, mirror, retire=retire, stop=stop))
            failure_count = 0
            pause_s = every_s
        except StoreError as error:
            if error.code not in _PASSING:
                raise
            failure_count += 1
            pause_s = min(every_s * 2**failure_count, max(every_s, _PAUSE_MAX_S))
            on_failure(error, pause_s)
        stop.wait(pause_s)


def promote(
    mirror: Store,
    home: Store | None = None,
    *,
    deadline_s: float = _DEADLINE_S,
    on_progress: Callable[[int], None] | None = None,
) -> PromoteReport:
    """Make a mirror the home of its run by a launch that names the checkpoint to go on from.

    Args:
        mirror: the mirror, to be written.
        home: the old home, to be written, if still reachable. A launch is begun there
            first, to stop saves there, and the checkpoints are copied.
        deadline_s: time to wait for unfinished saves at the old home, in seconds.
        on_progress: called with the number of bytes just copied, or checked.

    Raises: IntegrityError(NOT_COMMITTED, NO_VALID_CHECKPOINT) without a checkpoint to go on from;
        as `mirror_run`.
    Spec: REQ-RUN-032.
    """
    fenced: int | None = None
    unfinished: tuple[str, ...] = ()
    if home is not None:
        mirror_run(home, mirror, on_progress=on_progress)  # a training may still save meanwhile
    run = read_known_run(mirror)
    check_writer_features(run)
    if next(iter_lineage(*_look(mirror, run)), None) is None:
        detail = "the mirror has no checkpoint that the run could go on from"
        raise err(Code.NOT_COMMITTED, detail, where=mirror.name, requirement="REQ-RUN-032")
    if home is not None:
        unfinished = tuple(wait_for_savers(home, deadline_s=deadline_s))
        fenced = _begin(home, run, on_progress=on_progress).launch
        mirror_run(home, mirror, on_progress=on_progress)
    passed_over: list[str] = []
    launch = _begin(mirror, run, on_passed_over=passed_over.append, on_progress=on_progress)
    assert launch.resume_from is not None  # noqa: S101
    return PromoteReport(
        mirror=mirror.name,
        launch=launch.launch,
        name=launch.resume_from.name,
        digest=launch.resume_from.digest,
        passed_over=tuple(passed_over),
        fenced=fenced,
        unfinished=unfinished,
    )


def _begin(store: Store, run: RunRecord, **options: Callable[..., None] | None) -> Launch:
    """Begin a launch without saves, and return the launch. Raises: as `begin_launch`."""
    launch, checkpoint = begin_launch(
        store,
        run,
        on_passed_over=options.get("on_passed_over"),
        on_progress=options.get("on_progress"),
    )
    if checkpoint is not None:
        checkpoint.close()
    return launch


def _look(store: Store, run: RunRecord) -> tuple[list[Launch | LostLaunch], list[RunEntry]]:
    """Return launches and directories of one moment: no launch began between the listings."""
    while True:
        launches = list_launches(store, run)
        entries = list_checkpoints(store, run, with_labels=False)
        if list_launch_numbers(store) == [launch.launch for launch in launches]:
            return launches, entries


def check_same_history(
    home: tuple[Iterable[Launch | LostLaunch], Iterable[RunEntry]],
    other: tuple[Iterable[Launch | LostLaunch], Iterable[RunEntry]],
    names: tuple[str, str],
    *,
    are_homes: bool = False,
) -> None:
    """Raise if copy `other` of a run has launches or checkpoints missing in copy `home`.

    Args:
        names: names of the two stores.
        are_homes: whether both are homes of a run with several homes. Then `other` may have
            launches and checkpoints of its own, but no newer launch.

    Raises: CommitError(HOMES_DIVERGED); FormatError(RUN_MISMATCH). Spec: REQ-RUN-030.
    """
    launches = {launch.launch: launch for launch in home[0]}
    newest = max(launches, default=0)
    registers = {entry.name: entry.register for entry in home[1]}
    for launch in other[0]:
        found = launches.get(launch.launch)
        if isinstance(launch, LostLaunch) or isinstance(found, LostLaunch):
            # Unknown: `scrub_run` repairs the record if the nonces of checkpoints allow a repair.
            continue
        if found is None and are_homes and launch.launch < newest:
            continue
        if found != launch:
            path = f"{LAUNCHES}/{launch_name(launch.launch)}"
            raise _diverged(path, "isn't" if found is None else "is another one", names)
    for entry in other[1]:
        if isinstance(entry.register, CkptError) and entry.register.code == Code.RUN_MISMATCH:
            raise entry.register.below(entry.name)
        digest = entry.digest
        here = registers.get(entry.name)
        if are_homes and digest_of(here) is None:
            continue
        if digest is not None and not isinstance(here, CkptError) and digest_of(here) != digest:
            raise _diverged(
                entry.name, "isn't" if digest_of(here) is None else "is another one", names
            )


def _diverged(path: str, how: str, names: tuple[str, str]) -> CkptError:
    detail = (
        f"it is at {names[1]}, and {how} at {names[0]}: the run went on at {names[1]}, and"
        " perhaps at both"
    )
    return err(Code.HOMES_DIVERGED, detail, where=path, requirement="REQ-RUN-030")


class _Mirroring:
    """The state of one copy of a run: the listings of both stores, and the work done."""

    def __init__(
        self,
        home: Store,
        mirror: Store,
        on_progress: Callable[[int], None] | None,
        stop: threading.Event,
        *,
        are_homes: bool = False,
    ) -> None:
        self._home = home
        self._mirror = mirror
        self._are_homes = are_homes
        self._on_progress = on_progress
        self._stop = stop
        self._lock = threading.Lock()  # guards the count of bytes, and calls of on_progress
        self._nbytes = 0
        self._entries: dict[str, RunEntry] = {}
        self._there: dict[str, RunEntry] = {}
        self._tried: dict[str, bool] = {}
        self._copied: list[str] = []
        self._launches: list[int] = []
        self._in_caches: list[str] = []
        self._problems: list[CkptError] = []

    def run(self, *, retire: bool) -> MirrorReport:
        """Copy the run. Raises: as `mirror_run`."""
        run = read_known_run(self._home)
        check_writer_features(run, doing="copying this run", undone="nothing was copied")
        found, entries = _look(self._home, run)
        check_records(self._home, entries)
        self._entries = {entry.name: entry for entry in entries}
        self._problems += [
            entry.register.below(entry.name)
            for entry in entries
            if isinstance(entry.register, CkptError)
        ]
        is_new, there = self._meet(run, found, entries)
        launches = self._fill_in(found, there)
        lineage = list(iter_lineage(launches, entries))
        retired: list[str] = []
        try:
            self._bring_launches(launches, {launch.launch for launch in there})
            self._bring_checkpoints(lineage, is_new=is_new)
            self._bring_labels(run)
            head = self._find_head(lineage)
            if head is not None and self._has(head):
                retired = self._retire(run, launches, entries, everything=retire)
        except StoppedError:
            pass
        head = self._find_head(lineage)
        return MirrorReport(
            home=self._home.name,
            mirror=self._mirror.name,
            head=None if head is None else head.name,
            current=head is None or self._has(head),
            copied=tuple(self._copied),
            launches=tuple(self._launches),
            retired=tuple(retired),
            in_caches=tuple(sorted(self._in_caches)),
            problems=tuple(self._problems),
            nbytes=self._nbytes,
            stopped=self._stop.is_set(),
        )

    def _fill_in(
        self, launches: Iterable[Launch | LostLaunch], there: Iterable[Launch | LostLaunch]
    ) -> list[Launch]:
        """Return the launches of the home; for an unreadable record, the record of the mirror.

        Raises: the error of a record missing at the mirror, too: newer records can't be created
            before.
        """
        theirs = {launch.launch: launch for launch in there if isinstance(launch, Launch)}
        filled: list[Launch] = []
        for launch in launches:
            if isinstance(launch, Launch):
                filled.append(launch)
                continue
            if launch.launch not in theirs:
                raise launch.as_error().below(self._home.name)
            self._problems.append(launch.as_error())
            filled.append(theirs[launch.launch])
        return filled

    def _meet(
        self, run: RunRecord, launches: list[Launch | LostLaunch], entries: list[RunEntry]
    ) -> tuple[bool, list[Launch | LostLaunch]]:
        """List the mirror; return whether ``run.json`` is missing there, and its launches."""
        record = read_run(self._mirror)
        if record is None and MANIFEST_NAME in self._mirror.list_names(""):
            raise refuse_checkpoint(self._mirror)
        if record is not None and record.run_id != run.run_id:
            detail = f"run {record.run_id} is here, not run {run.run_id}"
            raise err(
                Code.RUN_MISMATCH,
                detail,
                where=f"{self._mirror.name}/{RUN_NAME}",
                requirement="REQ-RUN-030",
            )
        there, there_entries = _look(self._mirror, run)
        check_same_history(
            (launches, entries),
            (there, there_entries),
            (self._home.name, self._mirror.name),
            are_homes=self._are_homes,
        )
        self._there = {entry.name: entry for entry in there_entries}
        return record is None, there

    def _find_head(self, lineage: list[RunEntry]) -> RunEntry | None:
        """Return the lineage's best checkpoint, without checkpoints in caches of nodes."""
        return next(
            (
                one
                for one in lineage
                if one.manifest is not None and one.name not in self._in_caches
            ),
            None,
        )

    def _has(self, entry: RunEntry) -> bool:
        """Return whether the checkpoint is committed at the mirror."""
        found = self._there.get(entry.name)
        return entry.name in self._copied or (
            found is not None
            and found.manifest is not None
            and found.manifest.digest == entry.digest
        )

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise StoppedError

    # --- steps of a copy, in order ----------------------------------------------------------------

    def _bring_launches(self, launches: list[Launch], known: set[int]) -> None:
        """Create the mirror's missing launch records, oldest first.

        Each record follows the checkpoint named there. Spec: REQ-RUN-029.
        """
        entries = list(self._entries.values())
        for launch in launches:
            # An overtaken launch names a checkpoint retired at home, which the mirror
            # may lack.
            if launch.launch in known or is_overtaken(launch, entries):
                continue
            self._check_stop()
            if launch.resume_from is not None:
                self._bring_named(launch.resume_from)
            path = f"{LAUNCHES}/{launch_name(launch.launch)}"
            content = self._home.read(path, limit_nbytes=limits.JSON_NBYTES)
            if Launch.parse(content, where=path) != launch:
                raise _diverged(path, "is another one", (self._home.name, self._home.name))
            self._create_record(path, content)
            self._mirror.sync(LAUNCHES)
            self._launches.append(launch.launch)

    def _bring_named(self, resume: Reference) -> None:
        """Copy the checkpoint or tombstone of a launch record, unless present at the mirror."""
        entry = self._entries.get(resume.name)
        if entry is None or entry.digest != resume.digest:
            # Lost at home: a reader of the mirror gets the same error as a reader of the home.
            return
        if entry.manifest is not None and not self._bring(entry):
            entry = self._look_again(entry)
        if isinstance(entry.register, Tombstone):
            self._bury(entry)

    def _bring_checkpoints(self, lineage: list[RunEntry], *, is_new: bool) -> None:
        """Copy the committed checkpoints: first the lineage, then the rest.

        At a new mirror, ``run.json`` follows the lineage's first checkpoint.
        """
        found = [entry for entry in lineage if entry.manifest is not None]
        beside = [
            entry
            for entry in self._entries.values()
            if entry.manifest is not None and entry not in found
        ]
        for entry in found:
            self._check_stop()
            if self._bring(entry) and is_new:
                self._create_run()
                is_new = False
        for entry in beside:
            self._check_stop()
            self._bring(entry)
        if is_new and not lineage:  # the home has no checkpoint to go on from either
            self._create_run()
        for entry in self._entries.values():
            there = self._there.get(entry.name)
            if (
                isinstance(entry.register, Tombstone)
                and there is not None
                and there.register is None
            ):
                self._bury(entry)  # it was retired during the copy

    def _create_run(self) -> None:
        content = self._home.read(RUN_NAME, limit_nbytes=limits.JSON_NBYTES)
        # Contents damaged on the way here would stay at the mirror for ever.
        RunRecord.parse(content)
        self._create_record(RUN_NAME, content)
        self._mirror.sync("")

    def _create_record(self, path: str, content: bytes) -> None:
        try:
            create_once(self._mirror, path, content=content)
        except CkptError as error:
            if error.code != Code.COMMIT_CONFLICT:
                raise
            raise _diverged(path, "is another one", (self._home.name, self._mirror.name)) from error

    def _bring_labels(self, run: RunRecord) -> None:
        """Create missing records of labels for the checkpoints at the mirror."""
        known = set(self._mirror.list_names(LABELS_FOLDER))
        created = False
        for name in self._home.list_names(LABELS_FOLDER):
            parsed = parse_labels_name(name)
            if name in known or parsed is None or not self._has_named(parsed[0]):
                continue
            path = f"{LABELS_FOLDER}/{name}"
            try:
                content = self._home.read(path, limit_nbytes=limits.JSON_NBYTES)
                if LabelsRecord.parse(content, where=path).run_id == run.run_id:
                    create_once(self._mirror, path, content=content)
                    created = True
            except CkptError as error:
                if not is_violation(error):
                    raise
                self._problems.append(without_frames(error))
        if created:
            self._mirror.sync(LABELS_FOLDER)

    def _has_named(self, name: str) -> bool:
        entry = self._entries.get(name)
        return entry is not None and self._has(entry)

    def _retire(
        self, run: RunRecord, launches: list[Launch], entries: list[RunEntry], *, everything: bool
    ) -> list[str]:
        """Retire checkpoints at the mirror, following the home.

        Unless `everything` is set, only checkpoints named by overtaken launches are retired: at the
        mirror, such a launch would otherwise still own the run.

        Spec: REQ-RUN-031.
        """
        named = {
            one.resume_from.name
            for one in launches
            if one.resume_from and is_overtaken(one, entries)
        }
        going = {
            entry.name
            for entry in entries
            if isinstance(entry.register, Tombstone)
            and self._has(entry)
            and (everything or entry.name in named)
        }
        return retire_as_elsewhere(self._mirror, run, going) if going else []

    # --- one checkpoint ---------------------------------------------------------------------------

    def _bring(self, entry: RunEntry) -> bool:
        """Copy a checkpoint after its bases; return whether the mirror has the checkpoint."""
        if self._has(entry):
            return True
        if entry.name not in self._tried:
            self._tried[entry.name] = False
            self._tried[entry.name] = self._try(entry)
        return self._tried[entry.name]

    def _try(self, entry: RunEntry) -> bool:
        manifest = entry.manifest
        there = self._there.get(entry.name)
        ended = Tombstone | Abort if self._are_homes else Tombstone
        if manifest is None or (there is not None and isinstance(there.register, ended)):
            return False  # the mirror has retired it, or given a copy up
        try:
            # Bases have smaller steps, and the manifest lists bases
            # completely.
            for one in sorted(
                manifest.references, key=lambda one: parse_checkpoint_name(one.name) or ()
            ):
                base = self._entries.get(one.name)
                if base is None or base.digest != one.digest or not self._bring(base):
                    detail = f"it reads from {one.name}, which can't be copied"
                    raise err(
                        Code.BASE_MISSING, detail, where=entry.name, requirement="REQ-RUN-028"
                    )
            self._copy(entry.name, manifest)
        except CkptError as error:
            if not is_violation(error):
                raise
            if error.code == Code.FILES_IN_CACHES:
                self._in_caches.append(entry.name)
            # A checkpoint retired meanwhile is no problem.
            elif not isinstance(self._look_again(entry).register, Tombstone):
                self._problems.append(without_frames(error.below(entry.name)))
            return False
        self._copied.append(entry.name)
        return True

    def _look_again(self, entry: RunEntry) -> RunEntry:
        """Return the entry of a directory of the home after a second reading of the register."""
        place = self._home.at(entry.name)
        try:
            register = parse_register(
                place.read(MANIFEST_NAME, limit_nbytes=limits.MANIFEST_NBYTES)
            )
        except CkptError as error:
            if isinstance(error, StoreError):
                raise
            return entry
        return dataclasses.replace(entry, register=register)

    def _copy(self, name: str, manifest: Manifest) -> None:
        """Copy one checkpoint, the register last.

        Raises: errors of the files at home; StoreError.
        """
        home = self._home.at(name)
        mirror = self._mirror.at(name)
        present = set(mirror.list(""))
        with CheckpointFiles(home, digest=manifest.digest) as files:
            check_at_home(files)
            self._copy_files(home, mirror, present, _iter_files(files))
            content = home.read(MANIFEST_NAME, limit_nbytes=limits.MANIFEST_NBYTES)
        register = parse_register(content)
        if not isinstance(register, Manifest) or register.digest != manifest.digest:
            raise err(
                Code.CHECKPOINT_RETIRED,
                "the checkpoint was retired during the copy",
                where=MANIFEST_NAME,
            )
        for reference in manifest.references:
            check_base(mirror, reference)
        mirror.sync("parts")
        copy_bundles(home, mirror, manifest)
        create_once(mirror, MANIFEST_NAME, content=content)
        mirror.sync("")
        for prefix in ("", "parts"):
            mirror.delete_leftovers(prefix)  # of a killed process

    def _copy_files(
        self, home: Store, mirror: Store, present: set[str], files: Iterable[VerifiedFile]
    ) -> None:
        """Copy files, several at a time; an error stops the other copies, and is raised."""
        failed = threading.Event()

        def copy_file(file: VerifiedFile) -> None:
            if file.path not in present:
                create_verified(
                    mirror, file, functools.partial(self._iter_counted, file, home, failed)
                )
            try:
                check_nbytes(mirror, file.path, file.nbytes)
            except CkptError as error:
                raise error.below(mirror.name) from error

        for_each_file(copy_file, files, failed)

    def _iter_counted(
        self, file: VerifiedFile, home: Store, failed: threading.Event
    ) -> Generator[memoryview, None, None]:
        for chunk in file.iter_chunks(home):
            if failed.is_set() or self._stop.is_set():
                raise StoppedError
            with self._lock:
                self._nbytes += len(chunk)
                if self._on_progress is not None:
                    self._on_progress(len(chunk))
            yield chunk

    def _bury(self, entry: RunEntry) -> None:
        """Copy a tombstone of the home to the mirror, unless the mirror has a register."""
        there = self._there.get(entry.name)
        if there is not None and there.register is not None:
            return
        content = self._home.at(entry.name).read(MANIFEST_NAME, limit_nbytes=limits.MANIFEST_NBYTES)
        if isinstance(parse_register(content), Tombstone):
            place = self._mirror.at(entry.name)
            create_once(place, MANIFEST_NAME, content=content)
            sweep(place)


def _iter_files(files: CheckpointFiles) -> Iterator[VerifiedFile]:
    """Yield the files of a checkpoint except the register, with one part in memory at a time."""
    for number, part in enumerate(part_files(files)):
        yield from stored_files(OpenPart(files, files.read_part(number)))
        yield part
    yield index_file(files.manifest)

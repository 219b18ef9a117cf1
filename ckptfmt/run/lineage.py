"""The checkpoint from which a run goes on, and the launch that owns the run.

Spec: REQ-RUN-001 to REQ-RUN-007.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from ckptfmt import limits
from ckptfmt.commit.decision import Known, create_once, read_register
from ckptfmt.commit.lone import refuse_checkpoint
from ckptfmt.documents.labels import NO_LABELS, Labels
from ckptfmt.documents.manifest import (
    MANIFEST_NAME,
    Abort,
    Manifest,
    Reference,
    Tombstone,
    checkpoint_name,
    parse_checkpoint_name,
)
from ckptfmt.documents.run import (
    LAUNCHES,
    RUN_NAME,
    LabelsRecord,
    Launch,
    RunRecord,
    Vote,
    check_place,
    check_record,
    check_run_id,
    launch_name,
    parse_launch_name,
)
from ckptfmt.errors import CkptError, Code, StoreError, UnsupportedError, err
from ckptfmt.features import HOMES, WRITER_FEATURES
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.report import Report
from ckptfmt.read.verify import verify_loadable
from ckptfmt.run.labelling import list_newest_labels, read_labels, wait_for_cleaners
from ckptfmt.signing.pin import record_launch
from ckptfmt.signing.trust import Trust, pin_of
from ckptfmt.store import open_store, split_path
from ckptfmt.store.protocol import Store, call_each, read_if_there

#: The remedy where all remaining checkpoints are suspect.
_SUSPECT: Final = (
    "Begin one launch with resume= and the name of one that you trust, or 'fresh';"
    " later ones follow it."
)


def digest_of(register: object) -> str | None:
    """Return the manifest's digest from a register, also from a tombstone; else None."""
    if isinstance(register, Manifest):
        return register.digest
    return register.manifest_digest if isinstance(register, Tombstone) else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One checkpoint directory of a run.

    Attributes:
        name: the directory's name.
        step: the step in the name.
        launch: the launch in the name.
        register: the document in the register; None if undecided; the error if unreadable.
        record: the newest record about a committed checkpoint; None without a record; the error if
            unreadable.
    """

    name: str
    step: int
    launch: int
    register: Manifest | Abort | Tombstone | CkptError | None
    record: LabelsRecord | CkptError | None = None

    @property
    def labels(self) -> Labels:
        """Metrics and tags of the newest record, else of the manifest; `suspect` of the manifest.

        Spec: REQ-RUN-025.
        """
        saved = NO_LABELS if self.manifest is None else self.manifest.labels
        if isinstance(self.record, LabelsRecord):
            return dataclasses.replace(self.record.labels, suspect=saved.suspect)
        return saved

    @property
    def labels_error(self) -> CkptError | None:
        """The error of the newest record about the checkpoint; None if it is read, or missing."""
        return self.record if isinstance(self.record, CkptError) else None

    @property
    def is_suspect(self) -> bool:
        """Whether the save recorded a fault: no launch resumes by lineage from such a checkpoint.

        Spec: REQ-RUN-042.
        """
        return self.manifest is not None and bool(self.manifest.labels.suspect)

    @property
    def is_record(self) -> bool:
        """Whether the entry stands for an unreadable launch record, instead of a checkpoint."""
        return self.name.startswith(f"{LAUNCHES}/")

    @property
    def is_pinned(self) -> bool:
        """Whether the checkpoint is pinned; an unreadable record counts as a pin.

        Spec: REQ-CMT-040.
        """
        return isinstance(self.record, CkptError) or (
            self.record is not None and self.record.pinned
        )

    @property
    def manifest(self) -> Manifest | None:
        """The manifest, where the checkpoint is committed."""
        return self.register if isinstance(self.register, Manifest) else None

    @property
    def digest(self) -> str | None:
        """The manifest's digest of a committed or retired checkpoint, or None."""
        return digest_of(self.register)

    @property
    def references(self) -> tuple[Reference, ...]:
        """The bases of a committed checkpoint."""
        return () if self.manifest is None else self.manifest.references


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LostLaunch:
    """A launch with an unreadable or missing record: only the number is known.

    The number is in the name of the record's file, and in the names of the launch's checkpoints.
    Spec: REQ-RUN-045.

    Attributes:
        launch: the launch's number.
        error: the error of the record.
    """

    launch: int
    error: CkptError

    @property
    def path(self) -> str:
        """The path of the record in the run."""
        return f"{LAUNCHES}/{launch_name(self.launch)}"

    def as_error(self) -> CkptError:
        """Return the error of the record, with the consequence and a remedy."""
        return err(
            self.error.code,
            f"{self.error.detail}; launch {self.launch}'s starting checkpoint can't be known",
            where=self.path,
            requirement=self.error.requirement,
            remedy="`ckptfmt repair RUN --with MIRROR` restores the record from a copy; without a"
            " copy,"
            " `ckptfmt repair RUN` writes the record anew. Or name a checkpoint.",
        )


def read_run(store: Store) -> RunRecord | None:
    """Return the record of a run, or None where there is none.

    Raises: FormatError, IntegrityError.
    """
    content = read_if_there(store, RUN_NAME, limit_nbytes=limits.JSON_NBYTES)
    return None if content is None else RunRecord.parse(content)


def open_run(store: Store, *, writer_features: Sequence[str] = ()) -> RunRecord:
    """Return the record of a run to write into, made if missing.

    If two processes make a record, the first record counts.

    Args:
        writer_features: writer features of a new run.

    Raises: UnsupportedError(FEATURE_UNSUPPORTED and others); StoreError; FormatError. Spec:
        REQ-RUN-001, REQ-VER-003.
    """
    run = read_run(store) or _refuse_other_contents(store)
    if run is not None:
        check_writer_features(run)
        return run
    content = RunRecord(run_id=secrets.token_hex(16), writer_features=tuple(writer_features)).dump()
    try:
        create_once(store, RUN_NAME, content=content)
    except CkptError as error:
        if error.code != Code.COMMIT_CONFLICT:
            raise
    store.sync("")
    run = read_run(store)
    if run is None:
        raise err(
            Code.STORE_IO, "the run's record was just created, and isn't there", where=RUN_NAME
        )
    check_writer_features(run)  # another process may have made the record
    return run


def check_writer_features(
    run: RunRecord,
    requirement: str = "REQ-VER-003",
    *,
    doing: str = "writing into this run",
    undone: str = "nothing was written",
) -> None:
    """Raise if a run has a writer feature unknown to this version.

    Raises: UnsupportedError(FEATURE_UNSUPPORTED). Spec: REQ-VER-003.
    """
    unknown = sorted(set(run.writer_features) - WRITER_FEATURES)
    if unknown:
        raise err(
            Code.FEATURE_UNSUPPORTED,
            f"{doing} needs {', '.join(unknown)}; {undone}",
            where=f"{RUN_NAME}#/signed/features/writer",
            requirement=requirement,
        )


def _refuse_other_contents(store: Store) -> RunRecord | None:
    """Raise if a new run can't begin here; return a run just made by another process."""
    names = set(store.list_names(""))
    if MANIFEST_NAME in names:
        raise refuse_checkpoint(store)
    if f"{LAUNCHES}/" not in names and not list_places(store):
        return None
    return read_known_run(store)


def read_known_run(store: Store) -> RunRecord:
    """Return the record of an existing run.

    Raises: IntegrityError(FILE_MISSING). Spec: REQ-RUN-015.
    """
    run = read_run(store)
    if run is None:
        names = set(store.list_names(""))
        if MANIFEST_NAME in names or (f"{LAUNCHES}/" not in names and not list_places(store)):
            raise err(
                Code.FILE_MISSING,
                "a checkpoint is here, and no run" if MANIFEST_NAME in names else "no run is here",
                where=store.name,
                remedy=f"Give the directory of a run: it has a {RUN_NAME}.",
            )
        raise err(
            Code.FILE_MISSING,
            "launches or checkpoints of a run are here, and its record isn't",
            where=RUN_NAME,
            requirement="REQ-RUN-015",
            remedy=(
                "Restore run.json from a copy; each launch record and each manifest says the"
                " run_id."
            ),
        )
    return run


def list_launches(store: Store, run: RunRecord | None = None) -> list[Launch | LostLaunch]:
    """Return the launches of a run, oldest first, with a `LostLaunch` for each damaged record.

    Raises: FormatError(RUN_MISMATCH) where a record belongs to another run: the files of two runs
        are mixed; StoreError; UnsupportedError of a record by a newer version. Spec: REQ-RUN-003,
        REQ-RUN-045.
    """

    def read(number: int, *, is_doubted: bool = False) -> Launch | LostLaunch:
        try:
            launch = read_launch(store, number)
        except (StoreError, UnsupportedError):
            raise
        except CkptError as error:
            if store.is_remote and not is_doubted:  # the network answer may have been damaged
                return read(number, is_doubted=True)
            return LostLaunch(launch=number, error=error)
        check_run_id(
            None if run is None else run.run_id, launch.run_id, f"{LAUNCHES}/{launch_name(number)}"
        )
        return launch

    return call_each(store, read, list_launch_numbers(store))


def list_missing(
    store: Store, launches: Iterable[Launch | LostLaunch], entries: Iterable[RunEntry]
) -> list[LostLaunch]:
    """Return the launches with a checkpoint directory and without a record, oldest first.

    While there are such launches, the lineage is unknown: nothing of the run may be retired.

    Args:
        launches, entries: the launches and checkpoint directories found before. The launches may
            have been listed first: a launch that began in between isn't missing.

    Spec: REQ-RUN-015.
    """
    known = {launch.launch for launch in launches}
    unknown = {entry.launch: entry.name for entry in entries if entry.launch not in known}
    if not unknown:
        return []
    numbers = list_launch_numbers(store)
    missing = []
    for number, name in sorted(unknown.items()):
        try:
            check_record(name, number, numbers)
        except CkptError as error:
            missing.append(LostLaunch(launch=number, error=error))
    return missing


def list_launch_numbers(store: Store) -> list[int]:
    """Return the numbers of a run's launches in ascending numerical order."""
    numbers = (parse_launch_name(name) for name in store.list_names(LAUNCHES))
    return sorted(number for number in numbers if number is not None)


def read_launch(store: Store, number: int, run: RunRecord | None = None) -> Launch:
    """Return one launch record. Raises: FormatError, IntegrityError."""
    path = f"{LAUNCHES}/{launch_name(number)}"
    launch = Launch.parse(store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path)
    check_run_id(None if run is None else run.run_id, launch.run_id, path)
    return launch


def list_checkpoints(
    store: Store,
    run: RunRecord | None = None,
    *,
    known: Known | None = None,
    with_labels: bool = True,
) -> list[RunEntry]:
    """Return every checkpoint directory of a run by step, then launch, compared as numbers.

    An unreadable register becomes an entry with the error: the state stays unknown.

    A checkpoint may be retired during the call, which happens only after a newer commit. Two rules
    keep the result consistent. Registers are read in ascending order, so that an undecided
    directory was read before directories of greater steps. If a tombstone was found, the
    directories are listed again, and new and undecided directories are read again. A decided
    register is read once.

    Args:
        known: documents of this run parsed before; a directory known as aborted
            or retired isn't read again.
        with_labels: whether to read the records of labels, too. The choice of a checkpoint to
            resume from doesn't depend on them.

    Spec: REQ-RUN-014, REQ-RUN-026.
    """
    entries = dict[tuple[int, int], RunEntry]()
    places = list_places(store)
    is_unsure = store.is_remote
    while True:
        newest = list_newest_labels(store) if with_labels else {}
        read = functools.partial(
            _read_entry, store, run_id=run.run_id if run else None, known=known, newest=newest
        )
        undecided = [
            place for place in places if place not in entries or entries[place].register is None
        ]
        # A remote store is asked for several registers at once.
        pairs = zip(undecided, call_each(store, read, undecided), strict=True)
        found = {
            place: read(place) if store.is_remote and entry.register is None else entry
            for place, entry in pairs
        }
        entries |= found
        is_retired = any(isinstance(entry.register, Tombstone) for entry in found.values())
        listed = places
        if is_retired or is_unsure:  # a damaged network answer may look like a shorter listing
            places = sorted({*places, *list_places(store)})
            is_unsure = False
        if places == listed:
            return [entries[place] for place in listed]


def iter_lineage(
    launches: Sequence[Launch | LostLaunch], entries: list[RunEntry], *, with_suspect: bool = False
) -> Iterator[RunEntry]:
    """Yield the checkpoints from which the newest launch may resume, best first.

    The newest launch's own commits come first, greatest step first. Then comes the checkpoint that
    it resumed from, and the older commits of the same launch as this checkpoint; and so on to the
    first launch. So a rollback stays rolled back. Entries with an unreadable register are yielded
    too: a caller must report each candidate passed over. A suspect checkpoint is left out, unless a
    launch on the way resumed from it, by a person's choice.

    Where the record of a launch on the way can't be read, an entry with the error stands for the
    checkpoint named there (`RunEntry.is_record`). After this entry come the candidates of the
    launches before, of steps up to the smallest step of the lost launch: a caller that finds no
    valid checkpoint before them passes the record over, and reports this.

    Args:
        with_suspect: whether to yield suspect checkpoints, too, in their places.

    Spec: REQ-RUN-006, REQ-RUN-042, REQ-RUN-045.
    """
    by_number = {launch.launch: launch for launch in launches}
    registers = {entry.name: entry.register for entry in entries}
    number = _find_newest(launches, entries)
    bound: int | None = None
    named: str | None = None
    seen: set[int] = set()
    while number is not None and number not in seen:
        seen.add(number)
        own = [
            entry
            for entry in entries
            if entry.launch == number and (bound is None or entry.step <= bound)
        ]
        for entry in sorted(own, key=lambda entry: -entry.step):
            is_candidate = not entry.is_suspect or with_suspect or entry.name == named
            if is_candidate and (
                entry.manifest is not None or isinstance(entry.register, CkptError)
            ):
                yield entry
        record = by_number.get(number)
        if isinstance(record, LostLaunch):
            if not any(entry.launch < number and was_committed(entry) for entry in entries):
                return  # the launch had no checkpoint from which to go on
            yield RunEntry(name=record.path, step=0, launch=number, register=record.as_error())
            named = None
            bound = min((entry.step for entry in entries if entry.launch == number), default=None)
            number = _find_newest(launches, entries, before=number)
            continue
        resume = None if record is None else record.resume_from
        named = None if resume is None else resume.name
        found = parse_checkpoint_name(resume.name) if resume is not None else None
        bound, number = found if found is not None else (None, None)
        if resume is not None and found is not None:
            problem = _find_replacement(resume, registers.get(resume.name))
            if problem is not None:
                yield RunEntry(name=resume.name, step=found[0], launch=found[1], register=problem)
                bound = found[0] - 1


def infer_launch(store: Store, run: RunRecord, number: int) -> Launch | None:
    """Return a replacement of a damaged or missing launch record; None if too little is known.

    The checkpoint resumed from is unknown. The new record names the candidate after the launch's
    own commits, as chosen by hand: no checkpoint of an older launch counts as late or as passed
    over.
    """
    known = {
        launch.launch: launch for launch in list_launches(store, run) if launch.launch < number
    }
    lost = LostLaunch(launch=number, error=err(Code.FILE_MISSING, "it is inferred"))
    entries = [
        entry for entry in list_checkpoints(store, run, with_labels=False) if entry.launch <= number
    ]
    nonces = {
        entry.manifest.origin.nonce
        for entry in entries
        if entry.launch == number and entry.manifest is not None
    }
    if len(nonces) > 1:
        return None
    found = list(iter_lineage([*known.values(), lost], entries))
    older = [entry for entry in found if entry.launch < number and entry.manifest is not None]
    resume = _reference_to(older[0]) if older else None
    if resume is None and any(entry.is_record for entry in found):
        # All checkpoints of older launches are retired. A tombstone has the digest of the manifest.
        first = min(
            (entry.step for entry in entries if entry.launch == number), default=limits.JSON_INTEGER
        )
        retired = [
            entry
            for entry in entries
            if entry.launch < number
            and entry.step <= first
            and isinstance(entry.register, Tombstone)
        ]
        if not retired:
            return None
        newest = max(retired, key=lambda entry: (entry.launch, entry.step))
        resume = _reference_to(newest)
    nonce = nonces.pop() if nonces else secrets.token_hex(16)
    return Launch(
        run_id=run.run_id, launch=number, nonce=nonce, chosen_by="hand", resume_from=resume
    )


def _reference_to(entry: RunEntry) -> Reference:
    """Return the reference to a committed or retired checkpoint."""
    assert entry.digest is not None  # noqa: S101
    return Reference(name=entry.name, digest=entry.digest)


def was_committed(entry: RunEntry) -> bool:
    """Return whether a checkpoint is committed or retired; an unreadable register counts."""
    return isinstance(entry.register, Manifest | Tombstone | CkptError)


def _find_newest(
    launches: Iterable[Launch | LostLaunch], entries: list[RunEntry], *, before: int | None = None
) -> int | None:
    """Return the newest launch, below `before` if given, that isn't overtaken; or None."""
    numbers = (
        launch.launch
        for launch in launches
        if (before is None or launch.launch < before) and not is_overtaken(launch, entries)
    )
    return max(numbers, default=None)


def _find_replacement(
    resume: Reference, register: Manifest | Abort | Tombstone | CkptError | None
) -> CkptError | None:
    """Return the error of a register unlike the checkpoint in a launch record; None if equal.

    A tombstone is no error: the checkpoint was retired. An unreadable register is a candidate by
    itself.
    """
    match register:
        case None:
            code = Code.NOT_COMMITTED
            what = "a launch record names this checkpoint, which has no register"
        case Abort():
            code = Code.CHECKPOINT_ABORTED
            what = "a launch record names this checkpoint, which was given up"
        case Manifest() if register.digest != resume.digest:
            code = Code.DOC_DIGEST
            what = f"a launch record names {resume.digest}, and here is {register.digest}"
        case _:
            return None
    return err(code, what, where=resume.name, requirement="REQ-RUN-022")


def is_overtaken(launch: Launch | LostLaunch, entries: list[RunEntry]) -> bool:
    """Return whether a launch never saved, and the checkpoint to resume from is retired.

    Only a clean-up before the launch's record retires such a checkpoint; the lineage of before goes
    on. A choice by hand stays in force. An unreadable register may belong to a commit, so it counts
    as a commit. A launch with an unreadable record doesn't count as overtaken.
    """
    if isinstance(launch, LostLaunch) or launch.resume_from is None or launch.chosen_by == "hand":
        return False
    registers = {entry.name: entry.register for entry in entries}
    saved = any(entry.launch == launch.launch and was_committed(entry) for entry in entries)
    return not saved and isinstance(registers.get(launch.resume_from.name), Tombstone)


def check_not_fenced(store: Store, launch: int) -> None:
    """Raise if a newer launch owns the run. Raises: FencedError(FENCED). Spec: REQ-RUN-004."""
    newest = max(list_launch_numbers(store), default=launch)
    if newest > launch:
        raise fenced(newest, launch)


def fenced(newest: int, launch: int) -> CkptError:
    """Return the error FENCED for a launch after which a newer one has begun."""
    return err(
        Code.FENCED,
        f"launch {newest} has taken over from launch {launch}",
        where=f"{LAUNCHES}/{launch_name(newest)}",
        requirement="REQ-RUN-004",
    )


def begin_launch(
    store: Store,
    run: RunRecord,
    *,
    choose: str | None = None,
    fresh: bool = False,
    on_passed_over: Callable[[str], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
    trusted: Container[str] = (),
    after: int | None = None,
    require_signature: Trust | None = None,
    elect: Callable[[RunRecord], Vote] | None = None,
    mend: Callable[[str], None] | None = None,
) -> tuple[Launch, Checkpoint | None]:
    """Choose a checkpoint to resume from, verify every byte, and create the next launch's record.

    Args:
        choose: name or manifest digest of a checkpoint, chosen by hand; None to follow the lineage.
        fresh: whether to start without a checkpoint, by hand.
        on_passed_over: called with a sentence for each newer invalid checkpoint.
        on_progress: called with the number of bytes just checked.
        trusted: attempts whose contents all processes of the launch have in memory; only their
            documents are checked. Spec: REQ-RUN-012.
        after: number of the launch that goes back, and must still own the run; None for a start.
        require_signature: signers of a checkpoint to resume from; None for any. No older
            checkpoint takes the place of an unsigned one. Attempts in `trusted` aren't checked.
        elect: returns the votes of a majority of the homes; None for a run with one home. See
            `ckptfmt.run.elections`.
        mend: repairs a damaged candidate, given its name, from other homes; None without any.

    Returns: the launch; and the checkpoint to resume from, open, with the verified documents for
        the caller to load and close. None instead of a checkpoint after a fresh start.
    Raises: FencedError(FENCED); IntegrityError(NO_VALID_CHECKPOINT, NOT_COMMITTED,
        CHECKPOINT_RETIRED); CommitError(CHECKPOINT_CONDEMNED) where a cleaner may retire the
        checkpoint chosen by hand; TrustError; StoreError; FormatError.
    Spec: REQ-RUN-002, REQ-RUN-006, REQ-RUN-007, REQ-RUN-012, REQ-RUN-013.
    """
    open_valid = functools.partial(
        _open_valid,
        store,
        on_progress=on_progress,
        trusted=trusted,
        require_signature=require_signature,
        mend=mend,
    )
    if elect is None and HOMES in run.writer_features:
        raise _without_votes(store)
    while True:
        if after is not None:
            check_not_fenced(store, after)
        # The votes come first: the lists then have each commit that was confirmed before.
        vote = None if elect is None else elect(run)
        launches = list_launches(store, run)
        entries = list_checkpoints(store, run, with_labels=False)
        checkpoint: Checkpoint | None = None
        if fresh:
            chosen_by = "hand"
        elif choose is not None:
            checkpoint = _choose_by_hand(store, entries, choose, open_valid)
            chosen_by = "hand"
        else:
            check_records(store, entries)
            checkpoint, chosen_by = _choose_by_lineage(
                store, run, (launches, entries), on_passed_over, open_valid
            )
        resume = None if checkpoint is None else _name_in_run(checkpoint.manifest)
        taken = {launch.launch for launch in launches} | {entry.launch for entry in entries}
        number = max(taken, default=0) + 1 if vote is None else vote.launch
        if choose is not None and resume is not None:
            # A choice by hand stays in force: a record naming a retired checkpoint would leave
            # the run without a head.
            wait_for_cleaners(store, resume.name, requirement="REQ-RUN-013")
        launch = Launch(
            run_id=run.run_id,
            launch=number,
            nonce=secrets.token_hex(16) if vote is None else vote.nonce,
            chosen_by=chosen_by,
            resume_from=resume,
        )
        try:
            create_once(store, f"{LAUNCHES}/{launch_name(number)}", content=launch.dump())
        except CkptError as error:
            if error.code == Code.COMMIT_CONFLICT:
                # Another launch took the number; the checkpoint to resume from may have changed,
                # too.
                continue
            raise
        store.sync(LAUNCHES)
        if checkpoint is not None and (pin := pin_of(require_signature)):
            record_launch(pin, number, checkpoint.manifest)
        if choose is not None and resume is not None:
            # A clean-up with a newer condemnation may have listed the launches before
            # this record existed.
            wait_for_cleaners(store, resume.name, requirement="REQ-RUN-013")
        if resume is None or _is_committed(store, resume.name):
            return launch, checkpoint
        # A clean-up missed the record and retired the checkpoint; the next record
        # names another checkpoint.


def _without_votes(store: Store) -> CkptError:
    return err(
        Code.ARGUMENT,
        "the run has several homes, and a launch needs the votes of a majority",
        where=store.name,
        remedy="Pass copies=[ckptfmt.Homes([...])] with the other homes of the run; in place of a"
        " lost home, pass an empty place.",
    )


def open_head(
    store: Store,
    *,
    digest: str | None = None,
    bases: Sequence[Store] = (),
    require_signature: Trust | None = None,
) -> Checkpoint:
    """Open the checkpoint from which a run goes on, or its successor after a retirement.

    Raises: as `find_head` and `Checkpoint`. Spec: REQ-RUN-020.
    """
    while True:
        place = store.at(find_head(store)[0])
        check = None
        if require_signature is not None:
            check = functools.partial(require_signature.check, place)
        try:
            return Checkpoint(place, digest=digest, bases=bases, check=check)
        except CkptError:
            # The checkpoint was committed a moment ago: before the retirement, a newer one was
            # committed.
            if not isinstance(read_register(place), Tombstone):
                raise


def find_head(store: Store) -> tuple[str, Manifest]:
    """Return name and manifest of the checkpoint from which a run goes on, by the run's records.

    Raises: as `find_head_entry`.
    """
    entry = find_head_entry(store, with_labels=False)
    assert entry.manifest is not None  # noqa: S101
    return entry.name, entry.manifest


def find_head_entry(store: Store, *, with_labels: bool = True) -> RunEntry:
    """Return the committed checkpoint from which a run goes on, by the run's records.

    Raises: IntegrityError(NOT_COMMITTED, FILE_MISSING); the error of a damaged register.
    Spec: REQ-RUN-006, REQ-RUN-015.
    """
    run = read_known_run(store)
    launches = list_launches(store, run)
    entries = list_checkpoints(store, run, with_labels=with_labels)
    check_records(store, entries)
    for entry in iter_lineage(launches, entries):
        if isinstance(entry.register, CkptError):
            raise entry.register
        if entry.manifest is not None:
            return entry
    head = _named_by_newest(launches)
    if suspect := [entry.name for entry in iter_lineage(launches, entries, with_suspect=True)]:
        detail = (
            "all checkpoints on the way that led to the newest launch are suspect, and"
            " nothing goes on from a suspect"
        )
        detail += f" one unless it is chosen by hand: {', '.join(suspect[:8])}"
        remedy = (
            "`ckptfmt log` says why. Open one by its name. To train on:"
            f" {_SUSPECT[0].lower()}{_SUSPECT[1:]}"
        )
    elif head is not None or any(entry.manifest is not None for entry in entries):
        detail = "no committed checkpoint is on the way that led to the newest launch"
        detail += "" if head is None else f", which began from {head.name}"
        remedy = (
            "Open a checkpoint by its name, or begin a launch with resume= and a name, or"
            " with resume='fresh'."
        )
    else:
        detail = "the run has no checkpoint yet"
        remedy = "Train until the first save."
    raise err(
        Code.NOT_COMMITTED, detail, where=store.name, requirement="REQ-RUN-006", remedy=remedy
    )


def _named_by_newest(launches: Sequence[Launch | LostLaunch]) -> Reference | None:
    """Return the checkpoint that the newest launch resumed from.

    The result is None after a fresh start, and for a lost record.
    """
    newest = launches[-1] if launches else None
    return newest.resume_from if isinstance(newest, Launch) else None


def find_surroundings(path: object) -> Callable[[Manifest], None] | None:
    """Return a check of a manifest against its directory's name and run; None outside of a run.

    The check raises FormatError(STEP_MISMATCH, RUN_MISMATCH). Spec: REQ-MAN-002, REQ-RUN-003.
    """
    if not isinstance(path, str | os.PathLike):
        return None
    parent, name = split_path(path)
    step_and_launch = parse_checkpoint_name(name)
    if step_and_launch is None:
        return None
    run_id = None
    try:
        run = read_run(open_store(parent, writable=False))
        if run is None:
            return None
        run_id = run.run_id
    except CkptError:
        pass  # `validate` on the run reports the error; the name has step and launch all the same
    return functools.partial(check_place, step_and_launch=step_and_launch, run_id=run_id)


def find_checks(
    path: object, store: Store, require_signature: Trust | None
) -> Callable[[Manifest], None]:
    """Return a check of a manifest by `find_surroundings` and, if required, of its signature.

    Args:
        path: path of the checkpoint, as the caller gave it.
        store: store rooted at the checkpoint.
    """
    surroundings = find_surroundings(path)

    def check(manifest: Manifest) -> None:
        if require_signature is not None:
            require_signature.check(store, manifest)
        if surroundings is not None:
            surroundings(manifest)

    return check


def check_records(store: Store, entries: list[RunEntry]) -> None:
    """Raise if a checkpoint's launch has no record: then the lineage is unknown.

    Raises: IntegrityError(FILE_MISSING); StoreError(STORE_NO_ANSWER). Spec: REQ-RUN-015.
    """
    if not entries and store.is_remote and RUN_NAME not in store.list_names(""):
        # obstore reads an error in the body of a listing's answer as an empty listing.
        raise err(
            Code.STORE_NO_ANSWER, "the store lists nothing where the run is", where=store.name
        )
    # The entries were listed before: a launch creates the record before the first directory.
    numbers = set(list_launch_numbers(store))
    for entry in entries:
        check_record(entry.name, entry.launch, numbers)


def _choose_by_hand(
    store: Store,
    entries: list[RunEntry],
    choose: str,
    open_valid: Callable[..., Checkpoint | CkptError],
) -> Checkpoint:
    for entry in entries:
        if entry.manifest is not None and choose in (entry.name, entry.manifest.digest):
            found = open_valid(entry, by_hand=True)
            if isinstance(found, CkptError):
                raise found
            return found
    names = ["auto", "fresh", *(entry.name for entry in entries if entry.manifest is not None)]
    near = difflib.get_close_matches(str(choose), names, n=1)
    of_step = [
        entry.name
        for entry in entries
        if entry.manifest is not None and str(entry.step) == str(choose)
    ]
    meant = "".join(f"Did you mean {name!r}? " for name in (of_step or near)[-1:])
    raise err(
        Code.NOT_COMMITTED,
        f"the run has no committed checkpoint of the name or digest {choose!r}",
        where=store.name,
        remedy=f"{meant}`ckptfmt ls` lists the checkpoints of a run.",
    )


def _choose_by_lineage(
    store: Store,
    run: RunRecord,
    seen: tuple[list[Launch | LostLaunch], list[RunEntry]],
    on_passed_over: Callable[[str], None] | None,
    open_valid: Callable[[RunEntry], Checkpoint | CkptError],
    *,
    doubted: frozenset[str] = frozenset(),
) -> tuple[Checkpoint | None, str]:
    """Return the best valid candidate, open, and the way of the choice.

    A candidate in `doubted` has failed a first reading.

    Raises: IntegrityError(NO_VALID_CHECKPOINT); StoreError; FormatError. Spec: REQ-RUN-006,
        REQ-RUN-007.
    """

    def choose_again(doubted: frozenset[str] = frozenset()) -> tuple[Checkpoint | None, str]:
        anew = list_launches(store, run), list_checkpoints(store, run, with_labels=False)
        return _choose_by_lineage(store, run, anew, on_passed_over, open_valid, doubted=doubted)

    passed_over: dict[str, str] = {}
    suspect = {entry.name for entry in iter_lineage(*seen, with_suspect=True)}
    suspect -= {entry.name for entry in iter_lineage(*seen)}
    chosen: Checkpoint | None = None
    for entry in iter_lineage(*seen, with_suspect=True):
        if entry.name in suspect:
            passed_over[entry.name] = f"{entry.name} is suspect: {entry.labels.suspect}"
            continue
        found = open_valid(entry)
        if not isinstance(found, CkptError):
            chosen = found
            break
        if isinstance(found, UnsupportedError):
            raise found.below(entry.name)
        # A candidate retired meanwhile has a newer successor.
        if not entry.is_record and _is_retired(store, run, entry):
            return choose_again()
        if store.is_remote and entry.name not in doubted:
            # A network answer may be damaged: a candidate is passed over only after a second
            # reading fails.
            return choose_again(doubted | {entry.name})
        passed_over[entry.name] = f"{entry.name} isn't valid: {found}"
    if on_passed_over is not None:
        for sentence in (*_tell_lost(seen[0], but=passed_over), *passed_over.values()):
            on_passed_over(sentence)
    if chosen is not None:
        return chosen, "fallback" if passed_over.keys() - suspect else "lineage"
    head = _named_by_newest(seen[0])
    if passed_over or head is not None:
        named = ", ".join(passed_over) or (head.name if head else "")
        detail = (
            f"the lineage leads to {named}; none of them is"
            f" valid{' and not suspect' if suspect else ''}"
        )
        remedy = _SUSPECT if suspect else None
        raise err(
            Code.NO_VALID_CHECKPOINT,
            detail,
            where=store.name,
            requirement="REQ-RUN-006",
            remedy=remedy,
        )
    return None, "lineage"


def _tell_lost(launches: Iterable[Launch | LostLaunch], *, but: Container[str]) -> Iterator[str]:
    """Yield a sentence for each unreadable launch record, except for the paths in `but`."""
    for launch in launches:
        if isinstance(launch, LostLaunch) and launch.path not in but:
            yield f"{launch.path} can't be read: {launch.as_error()}"


def _open_valid(
    store: Store,
    entry: RunEntry,
    *,
    by_hand: bool = False,
    on_progress: Callable[[int], None] | None,
    trusted: Container[str],
    require_signature: Trust | None,
    mend: Callable[[str], None] | None = None,
) -> Checkpoint | CkptError:
    """Return a candidate, open, after a check of every byte for a load; or the first error.

    A damaged candidate is repaired by `mend`, if given, and checked again.

    Of an attempt in `trusted`, only the documents are checked.
    Damage comes before unknown features: only an undamaged candidate is refused for a feature.

    Raises: TrustError: an unsigned candidate isn't passed over. Spec: REQ-SIG-008.
    """
    if isinstance(entry.register, CkptError):
        return entry.register
    assert entry.manifest is not None  # noqa: S101
    if entry.manifest.origin.attempt in trusted:
        try:
            return Checkpoint(store.at(entry.name), digest=entry.manifest.digest)
        except CkptError as error:
            return error
    if require_signature is not None:
        require_signature.check(store.at(entry.name), entry.manifest, may_be_older=by_hand)
    report = Report(target=entry.name, kind="checkpoint", on_progress=on_progress)
    checkpoint = verify_loadable(store.at(entry.name), report, digest=entry.manifest.digest)
    if checkpoint is not None and report.violations:
        checkpoint.close()
    if checkpoint is not None and not report.violations:
        return checkpoint
    damages = (error for error in report.violations if not isinstance(error, UnsupportedError))
    damage = next(damages, None)
    if damage is None:
        return report.violations[0]
    return damage if mend is None else _open_mended(store, entry, damage, mend, on_progress)


def _open_mended(
    store: Store,
    entry: RunEntry,
    damage: CkptError,
    mend: Callable[[str], None],
    on_progress: Callable[[int], None] | None,
) -> Checkpoint | CkptError:
    """Return a candidate, open, after a repair from other homes; else the damage."""
    try:
        mend(entry.name)
    except CkptError:
        return damage
    return _open_valid(store, entry, on_progress=on_progress, trusted=(), require_signature=None)


def _name_in_run(manifest: Manifest) -> Reference:
    """Return the reference of a launch record to a checkpoint of the run, given the manifest."""
    origin = manifest.origin
    assert origin.launch is not None  # noqa: S101
    return Reference(name=checkpoint_name(origin.step, origin.launch), digest=manifest.digest)


def _is_committed(store: Store, name: str) -> bool:
    return isinstance(read_register(store.at(name)), Manifest)


def _is_retired(store: Store, run: RunRecord, entry: RunEntry) -> bool:
    """Return whether a candidate is retired by now.

    A tombstone of another run or step counts as damage.
    """
    return isinstance(
        _read_entry(store, (entry.step, entry.launch), run.run_id).register, Tombstone
    )


def list_places(store: Store) -> list[tuple[int, int]]:
    """Return step and launch of each checkpoint directory, ascending.

    Symbolic links and files of such names are included, as unreadable. Spec: REQ-RUN-008,
    REQ-CKP-002.
    """
    places = {parse_checkpoint_name(name.removesuffix("/")) for name in store.list_names("")}
    return sorted(place for place in places if place is not None)


def _read_entry(
    store: Store,
    place: tuple[int, int],
    run_id: str | None,
    known: Known | None = None,
    newest: Mapping[str, int] | None = None,
) -> RunEntry:
    """Return the entry of a checkpoint directory.

    Args:
        newest: numbers of the newest records of labels by checkpoint; None to skip records of
            labels.
    """
    name = checkpoint_name(*place)
    known = known or Known()
    register: Manifest | Abort | Tombstone | CkptError | None
    try:
        register = found = known.ended.get(name) or read_register(store.at(name), known=known)
        if found is not None:
            check_place(found, place, run_id)
        if isinstance(register, Abort | Tombstone):
            known.ended[name] = register
    except StoreError:
        raise
    except CkptError as error:
        register = error
    number = (newest or {}).get(name) if isinstance(register, Manifest) else None
    record = None if number is None else read_labels(store, name, number, run_id)
    return RunEntry(name=name, step=place[0], launch=place[1], register=register, record=record)

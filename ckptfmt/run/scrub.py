"""Read all copies of a run or checkpoint, and rewrite what is damaged in one from another.

Spec: REQ-RUN-033, REQ-RUN-034.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ckptfmt import limits
from ckptfmt.commit.decision import create_once, read_register
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import MANIFEST_NAME, Abort, Manifest, Tombstone, index_name, parse_register
from ckptfmt.documents.run import (
    LABELS_FOLDER,
    LAUNCHES,
    RUN_NAME,
    LabelsRecord,
    Launch,
    RunRecord,
    launch_name,
    parse_labels_name,
    parse_launch_name,
)
from ckptfmt.errors import CkptError, Code, StoreError, err
from ckptfmt.read.files import CheckpointFiles, OpenPart
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
    RunEntry,
    check_writer_features,
    infer_launch,
    list_checkpoints,
    list_launch_numbers,
    read_known_run,
)
from ckptfmt.store import check_apart
from ckptfmt.store.protocol import Store

#: The largest record of which each bit is tried, in bytes: a few tenths of a second.
_CORRECTED_NBYTES: Final = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A file of one copy that isn't as it was saved.

    Attributes:
        copy: name of the store.
        path: of the file, in the run.
        error: what is wrong with it.
        repaired_from: name of the store from which it was rewritten, or could be; of a record that no copy has whole,
            what it was written anew from; None where neither is possible.
        repaired: whether it was rewritten.
    """

    copy: str
    path: str
    error: CkptError
    repaired_from: str | None
    repaired: bool

    def as_json(self) -> dict[str, object]:
        """Return the members for programs."""
        return {
            "copy": self.copy,
            "path": self.path,
            "error": self.error.as_json(),
            "repaired_from": self.repaired_from,
            "repaired": self.repaired,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScrubReport:
    """What a scrub read, found and rewrote.

    Attributes:
        copies: names of the stores.
        checkpoints: names of the checkpoints that were read, each in all copies that have it.
        in_caches: names of those among them of which files are in caches of nodes, and in no copy.
        nbytes: how many bytes were read and compared.
        damages: what was wrong, by copy and path.
    """

    copies: tuple[str, ...]
    checkpoints: tuple[str, ...]
    in_caches: tuple[str, ...]
    nbytes: int
    damages: tuple[Damage, ...]

    @property
    def whole(self) -> bool:
        """Whether all copies are whole now."""
        return all(damage.repaired for damage in self.damages)

    def as_json(self) -> dict[str, object]:
        """Return the report as a JSON-ready mapping."""
        return {
            "whole": self.whole,
            "copies": self.copies,
            "checkpoints": self.checkpoints,
            "in_caches": self.in_caches,
            "nbytes": self.nbytes,
            "damages": [damage.as_json() for damage in self.damages],
        }


def scrub_run(
    copies: Sequence[Store], *, dry_run: bool = False, on_progress: Callable[[int], None] | None = None
) -> ScrubReport:
    """Compare every byte of all copies of a run, and rewrite each file that is damaged or missing from a whole one.

    Args:
        copies: each rooted at the run, or at a mirror of it; to be written unless `dry_run` is set.
        dry_run: whether to change nothing.
        on_progress: called with the number of bytes just compared, by several threads, one at a time.

    Raises: CommitError(HOMES_DIVERGED) where copies hold different things under one name; FormatError(RUN_MISMATCH);
        IntegrityError(FILE_MISSING) where none has the run's record; UnsupportedError(FEATURE_UNSUPPORTED); StoreError;
        StateError(ARGUMENT) where one is within another.
    Spec: REQ-RUN-033, REQ-RUN-034.
    """
    check_apart(copies)
    return _Scrubbing(copies, on_progress, dry_run=dry_run).run()


def scrub_checkpoint(
    copies: Sequence[Store], *, dry_run: bool = False, on_progress: Callable[[int], None] | None = None
) -> ScrubReport:
    """Do for copies of one checkpoint, whether it belongs to a run or not, what `scrub_run` does for those of a run.

    Args:
        copies: each rooted at the checkpoint, or at a copy of it.
        dry_run, on_progress: as for `scrub_run`.

    Raises: CommitError(HOMES_DIVERGED) where they are different checkpoints; IntegrityError(NOT_COMMITTED) where none
        has a manifest that can be read; StoreError. Spec: REQ-RUN-033, REQ-RUN-034.
    """
    return _Scrubbing(copies, on_progress, dry_run=dry_run).run_alone()


class _Scrubbing:
    """One scrub: the copies are called by their numbers. A checkpoint of no run has the name ""."""

    def __init__(self, copies: Sequence[Store], on_progress: Callable[[int], None] | None, *, dry_run: bool) -> None:
        self._copies = copies
        self._on_progress = on_progress
        self._dry_run = dry_run
        self._failed = threading.Event()
        self._lock = threading.Lock()  # guards the count of bytes, the list of damages, and calls of on_progress
        self._nbytes = 0
        self._damages: list[Damage] = []
        self._checkpoints: list[str] = []
        self._in_caches: set[str] = set()
        #: By its path, what a record was written anew from that no copy had whole.
        self._anew: dict[str, str] = {}

    def run(self) -> ScrubReport:
        """Do it. Raises: as `scrub_run`."""
        run = self._scrub_identity()
        check_writer_features(run, doing="repairing this run", undone="nothing was changed")
        # Once for each copy, as records of launches aren't needed for it: they may be what is damaged.
        entries = [
            {entry.name: entry for entry in list_checkpoints(store, run, with_labels=False)} for store in self._copies
        ]
        self._scrub_records(run, entries)
        for name in sorted({name for found in entries for name in found}):
            self._scrub_checkpoint(name, [found.get(name) for found in entries])
        return self._report()

    def run_alone(self) -> ScrubReport:
        """Do it for one checkpoint. Raises: as `scrub_checkpoint`."""
        entries = [RunEntry(name="", step=0, launch=0, register=_read_any(store)) for store in self._copies]
        if not any(entry.manifest for entry in entries):
            detail = f"no copy has a {MANIFEST_NAME} that can be read"
            raise err(
                Code.NOT_COMMITTED, detail, where=self._copies[0].name, remedy="Name a copy that has it: --with COPY."
            )
        self._scrub_checkpoint("", list(entries))
        return self._report()

    def _report(self) -> ScrubReport:
        damages = sorted(self._damages, key=lambda one: (one.copy, one.path))
        return ScrubReport(
            copies=tuple(store.name for store in self._copies),
            checkpoints=tuple(self._checkpoints),
            in_caches=tuple(sorted(self._in_caches)),
            nbytes=self._nbytes,
            damages=tuple(damages),
        )

    def _place(self, at: int, name: str) -> Store:
        """Return a copy, rooted at a checkpoint of it."""
        return self._copies[at].at(name) if name else self._copies[at]

    # --- records ------------------------------------------------------------------------------------------------------

    def _scrub_identity(self) -> RunRecord:
        """Mend ``run.json``, and return what it says."""
        found = self._read_records(RUN_NAME, RunRecord.parse)
        runs = {RunRecord.parse(content) for content in found if isinstance(content, bytes)}
        if not runs:
            return read_known_run(self._copies[0])  # it raises
        if len({run.run_id for run in runs}) > 1:
            detail = f"copies of different runs: {', '.join(sorted(run.run_id for run in runs))}"
            raise err(Code.RUN_MISMATCH, detail, where=RUN_NAME, requirement="REQ-RUN-030")
        self._mend_records(RUN_NAME, found, missing=range(len(self._copies)))
        return runs.pop()

    def _scrub_records(self, run: RunRecord, entries: list[dict[str, RunEntry]]) -> None:
        """Mend launch records and records of labels."""

        def parse(kind: type[Launch | LabelsRecord], path: str, content: bytes) -> None:
            found = kind.parse(content, where=path)
            if found.run_id != run.run_id:
                detail = f"it belongs to run {found.run_id}"
                raise err(Code.RUN_MISMATCH, detail, where=path, requirement="REQ-RUN-003")

        for folder, kind in ((LAUNCHES, Launch), (LABELS_FOLDER, LabelsRecord)):
            names = {name for store in self._copies for name in store.list_names(folder)}
            if folder == LAUNCHES:  # without the record of its launch no checkpoint of a run is chosen
                names |= {
                    launch_name(one.launch) for own in entries for one in own.values() if one.manifest is not None
                }
            for name in sorted(names):
                number = parse_launch_name(name)
                if number is None and (folder == LAUNCHES or parse_labels_name(name) is None):
                    continue
                path = f"{folder}/{name}"
                found = self._read_records(path, functools.partial(parse, kind, path))
                contents = {content for content in found if isinstance(content, bytes)}
                if number is None:
                    # Two people may have said different things of a checkpoint, each at another copy.
                    if len(contents) == 1:
                        self._mend_records(path, found, missing=())
                    continue
                # A copy may do without a record whose launch saved nothing in it.
                needed = [at for at, own in enumerate(entries) if any(entry.launch == number for entry in own.values())]
                self._check_nonces(path, number, contents, entries)
                found += [] if contents else self._write_anew(run, number, needed)
                self._mend_records(path, found, missing=needed)

    def _check_nonces(self, path: str, number: int, contents: set[bytes], entries: list[dict[str, RunEntry]]) -> None:
        """Raise unless all copies mean one launch: a record must not come from a run that went on elsewhere."""
        nonces = {Launch.parse(content, where=path).nonce for content in contents}
        if nonces:
            for found in entries:
                for entry in found.values():
                    if entry.manifest is not None and entry.launch == number:
                        nonces.add(entry.manifest.origin.nonce)
        if len(contents) > 1 or len(nonces) > 1:
            detail = f"copies of the run have different launches {number}"
            raise err(Code.HOMES_DIVERGED, detail, where=path, requirement="REQ-RUN-030")

    def _write_anew(self, run: RunRecord, number: int, needed: Sequence[int]) -> list[bytes | CkptError]:
        """Return the record of a launch, for a donor, as far as a copy's checkpoints and older records say what it was.

        The nonce is that of the launch's checkpoints. What the launch resumed from stands nowhere else: the record
        names the candidate behind the launch's own, as if somebody had chosen it. Spec: REQ-RUN-046.
        """
        for store in (self._copies[at] for at in needed or range(len(self._copies))):
            if number not in list_launch_numbers(store) and not needed:
                continue
            record = infer_launch(store, run, number)
            if record is not None:
                self._anew[f"{LAUNCHES}/{launch_name(number)}"] = f"what the checkpoints in {store.name} say"
                return [record.dump()]
        return []

    def _read_records(self, path: str, parse: Callable[[bytes], object]) -> list[bytes | CkptError]:
        """Return the contents of a record in each copy, or what is wrong with it.

        Where no copy has it whole, and in one a single bit is another, what it was before comes behind the copies'.
        """
        found: list[bytes | CkptError] = []
        damaged = b""
        for store in self._copies:
            try:
                content = store.read(path, limit_nbytes=limits.JSON_NBYTES)
                damaged = content
                parse(content)
                self._count(len(content))
                found.append(content)
            except CkptError as error:
                if not is_violation(error):
                    raise
                found.append(without_frames(error))
        if damaged and not any(isinstance(content, bytes) for content in found):
            corrected = _correct_bit(damaged, parse)
            if corrected is not None:
                self._anew[path] = "its own digest: one bit was another"
                found.append(corrected)
        return found

    def _mend_records(self, path: str, found: list[bytes | CkptError], missing: Sequence[int]) -> None:
        """Rewrite a record, in one step, where it is damaged, or isn't there and is among the copies that need it."""
        donor = next((at for at, content in enumerate(found) if isinstance(content, bytes)), None)
        for at, error in enumerate(found[: len(self._copies)]):
            if isinstance(error, bytes) or (error.code == Code.FILE_MISSING and at not in missing):
                continue
            if donor is not None and not self._dry_run:
                content = found[donor]
                assert isinstance(content, bytes)  # noqa: S101 - a donor has it
                self._copies[at].replace(path, content)
                self._copies[at].sync(path.rpartition("/")[0])
            self._note(at, path, error, donor)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _scrub_checkpoint(self, name: str, entries: list[RunEntry | None]) -> None:
        """Mend one checkpoint in the copies that have it: its register last, so that what has one is whole."""
        manifests = {at: entry.manifest for at, entry in enumerate(entries) if entry is not None and entry.manifest}
        if len({manifest.digest for manifest in manifests.values()}) > 1:
            detail = "the copies have different checkpoints of this name"
            raise err(Code.HOMES_DIVERGED, detail, where=name or self._copies[0].name, requirement="REQ-RUN-030")
        lost = {at: error for at, entry in enumerate(entries) if (error := self._find_lost(at, entry, manifests))}
        if not manifests:
            for at, error in lost.items():
                self._note(at, _path(name, MANIFEST_NAME), _below(error, name), None)
            return
        self._checkpoints.append(name or self._copies[0].name)
        donor, manifest = next(iter(manifests.items()))
        before = len(self._damages)
        # Without its index it may be what is left of one that was retired: nobody brings that back.
        index = index_name(manifest.origin.attempt)
        candidates = [at for at in lost if index in self._copies[at].list_names(name)]
        self._scrub_contents(name, manifest, sorted({*manifests, *candidates}))
        broken = {damage.copy for damage in self._damages[before:] if damage.repaired_from is None}
        for at, error in lost.items():
            store = self._copies[at]
            can_mend = at in candidates and store.name not in broken
            if can_mend and not self._dry_run:
                content = self._place(donor, name).read(MANIFEST_NAME, limit_nbytes=limits.MANIFEST_NBYTES)
                self._write_register(self._place(at, name), content, error)
            self._note(at, _path(name, MANIFEST_NAME), _below(error, name), donor if can_mend else None)

    def _find_lost(self, at: int, entry: RunEntry | None, manifests: dict[int, Manifest]) -> CkptError | None:
        """Return what is wrong with a register that can't be read, or is gone from among the files of a checkpoint."""
        if entry is None:
            return None
        if isinstance(entry.register, CkptError):
            return without_frames(entry.register)
        if entry.register is None and manifests:
            index = index_name(next(iter(manifests.values())).origin.attempt)
            if index in self._copies[at].list_names(entry.name):
                detail = "the files of a checkpoint are here, and its register isn't"
                return err(Code.FILE_MISSING, detail, where=MANIFEST_NAME, requirement="REQ-CKP-004")
        return None

    def _write_register(self, place: Store, content: bytes, error: CkptError) -> None:
        assert isinstance(parse_register(content), Manifest)  # noqa: S101 - it was read before
        if error.code == Code.FILE_MISSING:
            create_once(place, MANIFEST_NAME, content=content)  # somebody may decide it meanwhile
        else:
            place.replace(MANIFEST_NAME, content)
        place.sync("")

    def _scrub_contents(self, name: str, manifest: Manifest, members: list[int]) -> None:
        """Mend the index, then the parts that it names, then what these name."""
        self._scrub_files(name, manifest, [index_file(manifest)], members)
        opened = list(self._iter_opened(name, manifest, members))
        if not opened:
            return
        self._scrub_files(name, manifest, part_files(opened[0]), members)
        for number in range(len(opened[0].index.parts)):
            part = next(self._iter_parts(opened, number), None)
            if part is not None:
                is_at_home = part.part.durability == HOME
                self._scrub_files(name, manifest, stored_files(part), members, is_at_home=is_at_home)
        for files in opened:
            files.close()

    def _iter_opened(self, name: str, manifest: Manifest, members: list[int]) -> Iterator[CheckpointFiles]:
        """Yield the checkpoint in each copy in which it can be opened."""
        for at in members:
            try:
                yield CheckpointFiles(self._place(at, name), digest=manifest.digest)
            except CkptError as error:
                if not is_violation(error):
                    raise

    def _iter_parts(self, opened: list[CheckpointFiles], number: int) -> Iterator[OpenPart]:
        """Yield a part from each copy in which it can be read."""
        for files in opened:
            try:
                yield OpenPart(files, files.read_part(number))
            except CkptError as error:
                if not is_violation(error):
                    raise

    def _scrub_files(
        self,
        name: str,
        manifest: Manifest,
        files: Sequence[VerifiedFile],
        members: list[int],
        *,
        is_at_home: bool = True,
    ) -> None:
        """Mend some files, several at a time.

        Args:
            is_at_home: whether the files must be somewhere; else all copies may be without them.
        """
        work = functools.partial(self._scrub_file, name, manifest, members=members, is_at_home=is_at_home)
        for_each_file(work, files, self._failed)

    def _scrub_file(
        self, name: str, manifest: Manifest, file: VerifiedFile, *, members: list[int], is_at_home: bool
    ) -> None:
        """Read a file in all copies, and rewrite it where it is damaged."""
        wrong = {at: error for at in members if (error := self._find_damage(name, file, at)) is not None}
        donor = next((at for at in members if at not in wrong), None)
        if donor is None and not is_at_home and all(error.code == Code.FILE_MISSING for error in wrong.values()):
            with self._lock:
                self._in_caches.add(name or self._copies[0].name)
            return
        for at, error in wrong.items():
            place = self._place(at, name)
            register = self._read_register(place)
            if register is not None and register != manifest:
                continue  # it was retired while it was read
            repaired_from = donor
            if donor is not None and not self._dry_run:
                try:
                    self._rewrite(file, self._place(donor, name), place, is_missing=error.code == Code.FILE_MISSING)
                except CkptError as failure:
                    if not is_violation(failure):
                        raise
                    repaired_from = None  # what was whole a moment ago isn't any more, or the name is a directory's
            self._note(at, _path(name, file.path), _below(error, name), repaired_from)

    def _read_register(self, place: Store) -> object:
        try:
            return read_register(place)
        except CkptError as error:
            if not is_violation(error):
                raise
            return None

    def _find_damage(self, name: str, file: VerifiedFile, at: int) -> CkptError | None:
        store = self._copies[at]
        # An answer may be damaged on its way: nothing is written anew for what another reading doesn't find.
        for _ in range(2 if store.is_remote else 1):
            try:
                for chunk in file.iter_chunks(self._place(at, name)):
                    if self._failed.is_set():
                        raise StoppedError
                    self._count(len(chunk))
            except CkptError as error:
                if not is_violation(error):
                    raise
                found = without_frames(error)
            else:
                return None
        return found

    def _rewrite(self, file: VerifiedFile, donor: Store, place: Store, *, is_missing: bool) -> None:
        """Write a file anew, from a copy in which each byte was compared just now, and is again.

        A document is replaced in one step: an index that is gone would make a damaged register look like a retired one.
        On an object store the deletion of another file may come late, and remove what was written in its place: the
        next scrub finds it missing.

        Spec: REQ-RUN-033.
        """
        if not is_missing and file.is_document:
            place.replace(file.path, b"".join(file.iter_chunks(donor)))
            place.sync(file.path.rpartition("/")[0])
            return
        if not is_missing:
            place.delete(file.path)
        create_verified(place, file, functools.partial(file.iter_chunks, donor))
        place.sync(file.path.rpartition("/")[0])

    # --- what is told -------------------------------------------------------------------------------------------------

    def _note(self, at: int, path: str, error: CkptError, donor: int | None) -> None:
        damage = Damage(
            copy=self._copies[at].name,
            path=path,
            error=error,
            repaired_from=None if donor is None else self._name_donor(donor, path),
            repaired=donor is not None and not self._dry_run,
        )
        with self._lock:
            self._damages.append(damage)

    def _name_donor(self, donor: int, path: str) -> str:
        return self._copies[donor].name if donor < len(self._copies) else self._anew[path]

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
            if self._on_progress is not None:
                self._on_progress(nbytes)


def _correct_bit(content: bytes, parse: Callable[[bytes], object]) -> bytes | None:
    """Return what a record was before one of its bits became another; None where it is no such damage.

    The record's own digest says that it is right.
    """
    for at in range(len(content) if len(content) <= _CORRECTED_NBYTES else 0):
        for bit in range(8):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            with contextlib.suppress(CkptError):
                parse(bytes(changed))
                return bytes(changed)
    return None


def _read_any(place: Store) -> Manifest | Abort | Tombstone | CkptError | None:
    """Return what a register holds, or what is wrong with it. Raises: StoreError."""
    try:
        return read_register(place)
    except StoreError:
        raise
    except CkptError as error:
        return error


def _path(name: str, path: str) -> str:
    return f"{name}/{path}" if name else path


def _below(error: CkptError, name: str) -> CkptError:
    return error.below(name) if name else error

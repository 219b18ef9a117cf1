"""Read all copies of a run or checkpoint, and rewrite damaged files of one copy from another.

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
from ckptfmt.commit.decision import create_once, read_register, refusal_of
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import (
    MANIFEST_NAME,
    Abort,
    Manifest,
    Tombstone,
    index_name,
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

#: Greatest size in bytes of a record of which each bit is tried, which takes a few tenths of a
#: second.
_CORRECTED_NBYTES: Final = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damaged or missing file of one copy.

    Attributes:
        copy: name of the store.
        path: path of the file in the run.
        error: the error of the file.
        repaired_from: name of the store from which the file was rewritten, or could be. For a
            record without a whole copy, the source of the new contents in words. None if the file
            can't be repaired.
        repaired: whether the file was rewritten.
    """

    copy: str
    path: str
    error: CkptError
    repaired_from: str | None
    repaired: bool

    def as_json(self) -> dict[str, object]:
        """Return the damage as a JSON-ready mapping."""
        return {
            "copy": self.copy,
            "path": self.path,
            "error": self.error.as_json(),
            "repaired_from": self.repaired_from,
            "repaired": self.repaired,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScrubReport:
    """The result of a scrub.

    Attributes:
        copies: names of the stores.
        checkpoints: names of the checkpoints read, each in all copies.
        in_caches: names of checkpoints with files in caches of nodes, and in no copy.
        nbytes: number of bytes read and compared.
        damages: the damages, by copy and path.
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
    copies: Sequence[Store],
    *,
    dry_run: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> ScrubReport:
    """Compare every byte of all copies of a run, and rewrite damaged or missing files.

    Args:
        copies: the stores, each rooted at the run, or at a mirror; written unless `dry_run` is set.
        dry_run: whether to change no file.
        on_progress: called with the number of bytes just compared, by several threads, but never at
            the same time.

    Raises: CommitError(HOMES_DIVERGED) where copies hold different things under the same name;
        FormatError(RUN_MISMATCH); IntegrityError(FILE_MISSING) where no copy has the run's record;
        UnsupportedError(FEATURE_UNSUPPORTED); StoreError; StateError(ARGUMENT) where a store is
        within another.
    Spec: REQ-RUN-033, REQ-RUN-034.
    """
    check_apart(copies)
    return _Scrubbing(copies, on_progress, dry_run=dry_run).run()


def scrub_checkpoint(
    copies: Sequence[Store],
    *,
    dry_run: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> ScrubReport:
    """Compare and repair all copies of one checkpoint, as `scrub_run` does for a run.

    Args:
        copies: the stores, each rooted at the checkpoint, or at a copy.
        dry_run: whether to change no file.
        on_progress: called with the number of bytes just compared, as in `scrub_run`.

    Raises: CommitError(HOMES_DIVERGED) where the checkpoints differ; IntegrityError(NOT_COMMITTED)
        where no copy has a readable manifest; StoreError. Spec: REQ-RUN-033, REQ-RUN-034.
    """
    return _Scrubbing(copies, on_progress, dry_run=dry_run).run_alone()


class _Scrubbing:
    """One scrub.

    Copies are referred to by their numbers; a checkpoint outside of a run has the name "".
    """

    def __init__(
        self, copies: Sequence[Store], on_progress: Callable[[int], None] | None, *, dry_run: bool
    ) -> None:
        self._copies = copies
        self._on_progress = on_progress
        self._dry_run = dry_run
        self._failed = threading.Event()
        # Guards the count of bytes, the list of damages, and calls of on_progress.
        self._lock = threading.Lock()
        self._nbytes = 0
        self._damages: list[Damage] = []
        self._checkpoints: list[str] = []
        self._in_caches: set[str] = set()
        # Launch and step of the newest committed or retired checkpoint of each copy of a run.
        self._newest: list[tuple[int, int]] = []
        # Source of the new contents, in words, of each record without a whole copy; by path.
        self._anew: dict[str, str] = {}

    def run(self) -> ScrubReport:
        """Scrub the run. Raises: as `scrub_run`."""
        run = self._scrub_identity()
        check_writer_features(run, doing="repairing this run", undone="nothing was changed")
        # Launch records aren't needed for these listings: such a record may be damaged.
        entries = [
            {entry.name: entry for entry in list_checkpoints(store, run, with_labels=False)}
            for store in self._copies
        ]
        self._newest = [
            max(((one.launch, one.step) for one in own.values() if one.digest), default=(0, 0))
            for own in entries
        ]
        self._scrub_records(run, entries)
        for name in sorted({name for found in entries for name in found}):
            self._scrub_checkpoint(name, [found.get(name) for found in entries])
        return self._report()

    def run_alone(self) -> ScrubReport:
        """Scrub one checkpoint. Raises: as `scrub_checkpoint`."""
        entries = [
            RunEntry(name="", step=0, launch=0, register=_read_any(store)) for store in self._copies
        ]
        if not any(entry.manifest for entry in entries):
            detail = f"no copy has a {MANIFEST_NAME} that can be read"
            raise err(
                Code.NOT_COMMITTED,
                detail,
                where=self._copies[0].name,
                remedy="Name a copy that has it: --with COPY.",
            )
        self._scrub_checkpoint("", list(entries))
        if isinstance(register := entries[0].register, Abort | Tombstone):
            self._note(0, MANIFEST_NAME, refusal_of(register), None)
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
        """Return the store of a checkpoint in a copy."""
        return self._copies[at].at(name) if name else self._copies[at]

    # --- records ----------------------------------------------------------------------------------

    def _scrub_identity(self) -> RunRecord:
        """Repair ``run.json``, and return the run's record."""
        found = self._read_records(RUN_NAME, RunRecord.parse)
        runs = {RunRecord.parse(content) for content in found if isinstance(content, bytes)}
        if not runs:
            return read_known_run(self._copies[0])  # which raises
        if len({run.run_id for run in runs}) > 1:
            detail = f"copies of different runs: {', '.join(sorted(run.run_id for run in runs))}"
            raise err(Code.RUN_MISMATCH, detail, where=RUN_NAME, requirement="REQ-RUN-030")
        self._mend_records(RUN_NAME, found, missing=range(len(self._copies)))
        return runs.pop()

    def _scrub_records(self, run: RunRecord, entries: list[dict[str, RunEntry]]) -> None:
        """Repair launch records and records of labels."""

        def parse(kind: type[Launch | LabelsRecord], path: str, content: bytes) -> None:
            found = kind.parse(content, where=path)
            if found.run_id != run.run_id:
                detail = f"it belongs to run {found.run_id}"
                raise err(Code.RUN_MISMATCH, detail, where=path, requirement="REQ-RUN-003")

        for folder, kind in ((LAUNCHES, Launch), (LABELS_FOLDER, LabelsRecord)):
            names = {name for store in self._copies for name in store.list_names(folder)}
            # No checkpoint of a run is chosen while a directory's launch has no record, also where
            # all checkpoints of the launch are retired.
            if folder == LAUNCHES:
                names |= {launch_name(one.launch) for own in entries for one in own.values()}
            for name in sorted(names):
                number = parse_launch_name(name)
                if number is None and (folder == LAUNCHES or parse_labels_name(name) is None):
                    continue
                path = f"{folder}/{name}"
                found = self._read_records(path, functools.partial(parse, kind, path))
                contents = {content for content in found if isinstance(content, bytes)}
                if number is None:
                    # Two people may have recorded different labels of a checkpoint, each at another
                    # copy.
                    if len(contents) == 1:
                        self._mend_records(path, found, missing=())
                    continue
                # A copy needs no record of a launch without a checkpoint there.
                needed = [
                    at
                    for at, own in enumerate(entries)
                    if any(entry.launch == number for entry in own.values())
                ]
                self._check_nonces(path, number, contents, entries)
                found += [] if contents else self._write_anew(run, number, needed)
                self._mend_records(path, found, missing=needed)

    def _check_nonces(
        self, path: str, number: int, contents: set[bytes], entries: list[dict[str, RunEntry]]
    ) -> None:
        """Raise unless all copies have the same launch.

        A record must not come from a run continued elsewhere.
        """
        nonces = {Launch.parse(content, where=path).nonce for content in contents}
        if nonces:
            for found in entries:
                for entry in found.values():
                    if entry.manifest is not None and entry.launch == number:
                        nonces.add(entry.manifest.origin.nonce)
        if len(contents) > 1 or len(nonces) > 1:
            detail = f"copies of the run have different launches {number}"
            raise err(Code.HOMES_DIVERGED, detail, where=path, requirement="REQ-RUN-030")

    def _write_anew(
        self, run: RunRecord, number: int, needed: Sequence[int]
    ) -> list[bytes | CkptError]:
        """Return the record of a launch, inferred from a copy's checkpoints and older records.

        The nonce is copied from the launch's checkpoints. The checkpoint resumed from is recorded
        in no second place: the new record names the candidate after the launch's own, as chosen by
        hand. Spec: REQ-RUN-046.
        """
        for store in (self._copies[at] for at in needed or range(len(self._copies))):
            if number not in list_launch_numbers(store) and not needed:
                continue
            record = infer_launch(store, run, number)
            if record is not None:
                self._anew[f"{LAUNCHES}/{launch_name(number)}"] = (
                    f"what the checkpoints in {store.name} say"
                )
                return [record.dump()]
        return []

    def _read_records(self, path: str, parse: Callable[[bytes], object]) -> list[bytes | CkptError]:
        """Return the contents of a record in each copy, or the error of the record.

        If no copy is whole, and a single bit differs in one, the corrected contents follow the
        contents of the copies.
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

    def _mend_records(
        self, path: str, found: list[bytes | CkptError], missing: Sequence[int]
    ) -> None:
        """Rewrite a record in one step in the copies where it is damaged, or missing but needed."""
        donor = next((at for at, content in enumerate(found) if isinstance(content, bytes)), None)
        for at, error in enumerate(found[: len(self._copies)]):
            if isinstance(error, bytes) or (error.code == Code.FILE_MISSING and at not in missing):
                continue
            if donor is not None and not self._dry_run:
                content = found[donor]
                assert isinstance(content, bytes)  # noqa: S101
                self._copies[at].replace(path, content)
                self._copies[at].sync(path.rpartition("/")[0])
            self._note(at, path, error, donor)

    # --- checkpoints ------------------------------------------------------------------------------

    def _scrub_checkpoint(self, name: str, entries: list[RunEntry | None]) -> None:
        """Repair one checkpoint in its copies, the register last, after all files are whole."""
        manifests = {
            at: entry.manifest
            for at, entry in enumerate(entries)
            if entry is not None and entry.manifest
        }
        if len({manifest.digest for manifest in manifests.values()}) > 1:
            detail = "the copies have different checkpoints of this name"
            raise err(
                Code.HOMES_DIVERGED,
                detail,
                where=name or self._copies[0].name,
                requirement="REQ-RUN-030",
            )
        lost = {
            at: error
            for at, entry in enumerate(entries)
            if (error := self._find_lost(at, name, entry, manifests))
        }
        if not manifests:
            for at, error in lost.items():
                self._note(at, _path(name, MANIFEST_NAME), _below(error, name), None)
            return
        self._checkpoints.append(name or self._copies[0].name)
        donor, manifest = next(iter(manifests.items()))
        before = len(self._damages)
        # Without an index, the files may be the rest of a retired checkpoint, which isn't restored.
        index = index_name(manifest.origin.attempt)
        candidates = [at for at in lost if index in self._copies[at].list_names(name)]
        self._scrub_contents(name, manifest, sorted({*manifests, *candidates}))
        broken = {damage.copy for damage in self._damages[before:] if damage.repaired_from is None}
        for at, error in lost.items():
            store = self._copies[at]
            is_missing = error.code == Code.FILE_MISSING
            if is_missing and self._read_register(self._place(at, name)) is not None:
                continue  # it was decided meanwhile
            can_mend = at in candidates and store.name not in broken
            if can_mend and not self._dry_run:
                content = self._place(donor, name).read(
                    MANIFEST_NAME, limit_nbytes=limits.MANIFEST_NBYTES
                )
                self._write_register(self._place(at, name), content, error)
            self._note(
                at, _path(name, MANIFEST_NAME), _below(error, name), donor if can_mend else None
            )

    def _find_lost(
        self, at: int, name: str, entry: RunEntry | None, manifests: dict[int, Manifest]
    ) -> CkptError | None:
        """Return the error of an unreadable or missing register; None for any other register.

        A register is missing if the files of a committed checkpoint are in the directory, and if
        the copy can't be just behind another one with the checkpoint.
        """
        if entry is not None and isinstance(entry.register, CkptError):
            return without_frames(entry.register)
        if (entry is not None and entry.register is not None) or not manifests:
            return None
        donor, manifest = next(iter(manifests.items()))
        if index_name(manifest.origin.attempt) in self._copies[at].list_names(name):
            detail = "the files of a checkpoint are here, and its register isn't"
            return err(Code.FILE_MISSING, detail, where=MANIFEST_NAME, requirement="REQ-CKP-004")
        return self._absent(at, name, donor) if self._is_missed(at, name, manifest) else None

    def _absent(self, at: int, name: str, donor: int) -> CkptError:
        """Return the error of a copy that has lost a checkpoint; `donor` has it.

        A repair doesn't bring it back: perhaps it was deleted on purpose (REQ-RUN-034).
        """
        source, target = self._copies[donor].name, self._copies[at].name
        copying = f"`ckptfmt mirror {source} {target}` copies it"
        return err(
            Code.FILE_MISSING,
            f"the checkpoint is in {source}, and not here",
            where=MANIFEST_NAME,
            requirement="REQ-CKP-004",
            remedy=f"{copying if name else f'Copy the directory {source}'}, unless it was deleted"
            " on purpose.",
        )

    def _is_missed(self, at: int, name: str, manifest: Manifest) -> bool:
        """Return whether a copy without a register and index of a checkpoint has lost it.

        A checkpoint named alone is missed in each copy. In a run, the first copy should have all
        checkpoints, and a mirror all but the newest: a copy of these may still be to come. What is
        in caches of nodes isn't copied.
        """
        if not name:
            return True
        place = parse_checkpoint_name(name)
        assert place is not None  # noqa: S101
        return manifest.durability == HOME and (at == 0 or place[::-1] < self._newest[at])

    def _write_register(self, place: Store, content: bytes, error: CkptError) -> None:
        assert isinstance(parse_register(content), Manifest)  # noqa: S101
        if error.code == Code.FILE_MISSING:
            # Another process may decide meanwhile.
            create_once(place, MANIFEST_NAME, content=content)
        else:
            place.replace(MANIFEST_NAME, content)
        place.sync("")

    def _scrub_contents(self, name: str, manifest: Manifest, members: list[int]) -> None:
        """Repair the index, then the parts named there, then the files named in the parts."""
        self._scrub_files(name, manifest, [index_file(manifest)], members)
        opened = list(self._iter_opened(name, manifest, members))
        if not opened:
            return
        self._scrub_files(name, manifest, part_files(opened[0]), members)
        for number in range(len(opened[0].index.parts)):
            part = next(self._iter_parts(opened, number), None)
            if part is not None:
                is_at_home = part.part.durability == HOME
                self._scrub_files(
                    name, manifest, stored_files(part), members, is_at_home=is_at_home
                )
        for files in opened:
            files.close()

    def _iter_opened(
        self, name: str, manifest: Manifest, members: list[int]
    ) -> Iterator[CheckpointFiles]:
        """Yield the opened checkpoint of each copy, except of damaged copies."""
        for at in members:
            try:
                yield CheckpointFiles(self._place(at, name), digest=manifest.digest)
            except CkptError as error:
                if not is_violation(error):
                    raise

    def _iter_parts(self, opened: list[CheckpointFiles], number: int) -> Iterator[OpenPart]:
        """Yield a part from each copy in which the part is readable."""
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
        """Repair files, several at a time.

        Args:
            is_at_home: whether at least one copy must have the files; False for files in caches of
                nodes.
        """
        work = functools.partial(
            self._scrub_file, name, manifest, members=members, is_at_home=is_at_home
        )
        for_each_file(work, files, self._failed)

    def _scrub_file(
        self,
        name: str,
        manifest: Manifest,
        file: VerifiedFile,
        *,
        members: list[int],
        is_at_home: bool,
    ) -> None:
        """Read a file in all copies, and rewrite damaged copies."""
        wrong = {
            at: error for at in members if (error := self._find_damage(name, file, at)) is not None
        }
        donor = next((at for at in members if at not in wrong), None)
        if (
            donor is None
            and not is_at_home
            and all(error.code == Code.FILE_MISSING for error in wrong.values())
        ):
            with self._lock:
                self._in_caches.add(name or self._copies[0].name)
            return
        for at, error in wrong.items():
            place = self._place(at, name)
            register = self._read_register(place)
            if register is not None and register != manifest:
                continue  # retired while it was read
            repaired_from = donor
            if donor is not None and not self._dry_run:
                try:
                    self._rewrite(
                        file,
                        self._place(donor, name),
                        place,
                        is_missing=error.code == Code.FILE_MISSING,
                    )
                except CkptError as failure:
                    if not is_violation(failure):
                        raise
                    # The donor has changed since, or a directory has the file's name.
                    repaired_from = None
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
        # A network answer may be damaged: a file is rewritten only if a second reading finds the
        # damage, too.
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
        """Write a file from a copy in which each byte was just compared, and is compared again.

        A document is replaced in one step: with a missing index, a damaged register would look like
        a retired one. Other files are deleted and created. On an object store the deletion may take
        effect late, and remove the new file: the next scrub finds the loss.

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

    # --- report -----------------------------------------------------------------------------------

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
    """Return a record's contents before the change of one bit; None for any other damage.

    The record's own digest proves the correction.
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
    """Return the document in a register, or the error of the register. Raises: StoreError."""
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

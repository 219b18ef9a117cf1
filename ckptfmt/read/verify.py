"""Check every byte of a checkpoint or of a run, and collect all violations. Spec: REQ-OPN-009."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeAlias

import numpy as np

from ckptfmt import limits
from ckptfmt.commit.decision import read_register
from ckptfmt.commit.waiting import describe_savers, list_held
from ckptfmt.data.cursor import KIND as CURSOR_KIND
from ckptfmt.data.cursor import is_foreign, parse_cursor, parse_foreign
from ckptfmt.documents.durability import weakest
from ckptfmt.documents.extents import Extent
from ckptfmt.documents.manifest import (
    MANIFEST_NAME,
    Manifest,
    Reference,
    index_name,
    parse_checkpoint_name,
    part_path,
)
from ckptfmt.documents.packed import Integers
from ckptfmt.documents.part import Part, PartFile
from ckptfmt.documents.run import (
    LAUNCHES,
    RUN_NAME,
    Launch,
    RunRecord,
    check_place,
    check_record,
    check_run_id,
    parse_launch_name,
)
from ckptfmt.documents.shard import ShardEntry, parse_shard_header
from ckptfmt.documents.sharding import Sharding
from ckptfmt.documents.signature import bundle_prefix
from ckptfmt.documents.tree import iter_references, parse_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, encodable, err
from ckptfmt.features import is_of_delta
from ckptfmt.layout.merge import PartFileEntry, add_stored, merge_deltas, merge_parts, summarise
from ckptfmt.layout.read_plan import BlockRange
from ckptfmt.read.decoding import Decoder, iter_spans
from ckptfmt.read.files import (
    CheckpointFiles,
    OpenPart,
    ReplacedError,
    StoredBox,
    is_current,
    read_anew,
    read_manifest,
)
from ckptfmt.read.frozen_base import FrozenBase, Recorded, find_base
from ckptfmt.read.in_caches import check_at_home
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.reading import Bundle, Reading, WantedBox
from ckptfmt.read.report import ClosureMember, FoundReference, Report, is_violation, without_frames
from ckptfmt.signing.trust import Trust
from ckptfmt.store.protocol import Store, call_each

#: The encoded blocks that were decoded already, by manifest digest, part number and box number.
Done: TypeAlias = dict[tuple[str, int, int], set[int]]

#: Error codes for a missing base. Any other error describes damage to an existing base.
_NOT_FOUND: Final = frozenset({Code.BASE_MISSING, Code.BASE_MISMATCH})


def verify_checkpoint(
    store: Store,
    report: Report,
    *,
    bases: Sequence[Store] = (),
    check: Callable[[Manifest], None] | None = None,
) -> Checkpoint | None:
    """Check every byte of a checkpoint and of all its bases.

    Args:
        store: a store rooted at the checkpoint's directory.
        report: receives the findings.
        bases: further places to search for bases; see `Checkpoint`.
        check: called with the manifest before all other checks; compares the manifest with the
            checkpoint's surroundings, and raises on a mismatch.

    Returns: the checkpoint if manifest and index are sound, else None.
    Raises: StoreError if the store itself fails; StateError(FLOAT_ENVIRONMENT).
    Spec: REQ-OPN-009, REQ-OPN-013, REQ-DEL-020 to REQ-DEL-024.
    """
    found = report

    def verify() -> Checkpoint | None:
        nonlocal found
        found = report.begin()
        verification = _Verification(bases, check=check)
        checkpoint = verification.check(store, found)
        if checkpoint is not None:
            verification.check_closure(checkpoint, found)
            if found.violations:
                checkpoint.check_current()
        return checkpoint

    try:
        return read_anew(verify)
    except ReplacedError as error:
        found = report.begin()
        found.add(error)
        return None
    finally:
        report.absorb(found)


def verify_loadable(
    store: Store, report: Report, *, digest: str | None = None
) -> Checkpoint | None:
    """Check every byte of a checkpoint, and the blocks of its bases needed to load the checkpoint.

    Damage in other blocks of a base doesn't prevent a resume from this checkpoint.

    Args:
        store: a store rooted at the checkpoint's directory.
        report: receives the findings.
        digest: the expected manifest digest, if known.

    Returns: the checkpoint if manifest and index are sound, else None.
    Raises: StoreError if the store itself fails; StateError(FLOAT_ENVIRONMENT).
    Spec: REQ-RUN-012.
    """
    verification = _Verification((), with_bases=True)
    checkpoint = verification.open(store, report, digest=digest)
    if checkpoint is not None:
        with report.collect():
            check_at_home(checkpoint)  # first, to spare a read of the contents
        if not report.violations:
            verification.check_opened(checkpoint, report)
    return checkpoint


def find_damage(
    store: Store, *, digest: str | None = None, on_progress: Callable[[int], None] | None = None
) -> CkptError | None:
    """Return the first error that prevents a load of a checkpoint; None if every byte is intact.

    The sizes of all files are compared first, so that a missing or truncated file is found without
    a read of blocks.

    Args:
        store: a store rooted at the checkpoint's directory.
        digest: the expected manifest digest, if known.
        on_progress: called with the number of bytes just checked.

    Raises: StoreError.
    """
    report = Report(target=store.name, kind="checkpoint", on_progress=on_progress)
    with report.collect(), CheckpointFiles(store, digest=digest) as files:
        files.open_parts(range(len(files.index.parts)))
        for number in range(len(files.index.parts)):
            part = files.open_part(number).part
            for file in part.files:
                files.check_nbytes(part, file)
    if not report.violations:
        checkpoint = verify_loadable(store, report, digest=digest)
        if checkpoint is not None:
            checkpoint.close()
    return next(iter(report.violations), None)


def verify_opened(checkpoint: Checkpoint, report: Report) -> None:
    """Check every byte of an open checkpoint, as `verify_loadable` does.

    Raises: as `verify_loadable`.
    """
    _Verification((), with_bases=True).check_opened(checkpoint, report)


def verify_run(
    store: Store,
    report: Report,
    *,
    bases: Sequence[Store] = (),
    require_signature: Trust | None = None,
) -> None:
    """Check a run: the run's record, the launches, and every committed checkpoint, each once.

    Args:
        store: a store rooted at the run.
        report: receives the findings.
        bases: further places to search for bases of the checkpoints; bases found there are checked
            too.
        require_signature: the signers of each checkpoint; None to check no signature. With a pin,
            the run must have the pinned checkpoint or a newer one.

    Raises: StoreError if the store itself fails; StateError(FLOAT_ENVIRONMENT, ARGUMENT).
    Spec: REQ-RUN-003, REQ-RUN-005, REQ-MAN-002, REQ-OPN-009, REQ-SIG-006.
    """
    if held := list_held(store):  # first: a save committed in between is still checked
        report.warnings.append(
            f"{describe_savers(held)} still has saves in hand: only what was committed before"
            " is"
            " checked"
        )
    run: RunRecord | None = None
    with report.collect():
        run = RunRecord.parse(store.read(RUN_NAME, limit_nbytes=limits.JSON_NBYTES))
    run_id = run.run_id if run is not None else None
    numbers = set()
    for name in store.list_names(LAUNCHES):
        if parse_launch_name(name) is not None:
            numbers.add(parse_launch_name(name))
            with report.collect():
                path = f"{LAUNCHES}/{name}"
                launch = Launch.parse(store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path)
                check_run_id(run_id, launch.run_id, path)
    names = {name.removesuffix("/") for name in store.list_names("")}
    places = {
        name: place for name in sorted(names) if (place := parse_checkpoint_name(name)) is not None
    }
    found = {name: report.begin(name) for name in places}
    try:
        digests: dict[str, str] = {}
        for name, place in places.items():
            with found[name].collect(name):
                check_record(name, place[1], numbers)
            with found[name].collect(name):
                digests.update(_read_digest(store.at(name), place, run_id, found[name], name))
        if require_signature is not None:
            signed = []
            for name in digests:
                with found[name].collect(name):
                    here = store.at(name)
                    manifest = read_manifest(here)
                    require_signature.check(here, manifest, may_be_older=True)
                    signed.append(manifest)
            with report.collect():
                require_signature.check_run(signed)
        verification = _Verification(bases, elsewhere_than=digests.values())
        # The newest first: blocks of bases decoded for a newer checkpoint needn't be decoded again.
        for name in sorted(digests, key=places.__getitem__, reverse=True):
            verification.check_in_run(store.at(name), found[name], name)
            if found[name].violations and not is_current(store.at(name), digests[name]):
                found[name] = report.begin(name)
                found[name].warnings.append(f"{name} was retired while it was checked")
    finally:
        for one in found.values():
            report.absorb(one)


class _Verification:
    """A check of checkpoints that may read from each other. Each encoded block is decoded once.

    Args:
        bases: further places to search for bases.
        with_bases: whether to check the needed blocks of bases along with each checkpoint;
            otherwise each base is checked as a whole, by itself.
        elsewhere_than: manifest digests of checkpoints that the caller checks anyway, and that
            `check_closure` leaves out.
        check: called with the manifest before all other checks.
    """

    def __init__(
        self,
        bases: Sequence[Store],
        *,
        with_bases: bool = False,
        elsewhere_than: Collection[str] = (),
        check: Callable[[Manifest], None] | None = None,
    ) -> None:
        self._bases = tuple(bases)
        self._with_bases = with_bases
        self._done: Done = {}
        #: The frozen base of an earlier checkpoint, with the tensors that were compared.
        self._frozen_base: FrozenBase | None = None
        self._known = set(elsewhere_than)
        self._check = check

    def check(
        self, store: Store, report: Report, directory: str = "", *, digest: str | None = None
    ) -> Checkpoint | None:
        """Check one checkpoint without its closure.

        Returns: the checkpoint if manifest and index are sound, else None.
        """
        checkpoint = self.open(store, report, directory, digest=digest)
        if checkpoint is not None:
            self.check_opened(checkpoint, report, directory)
        return checkpoint

    def open(
        self, store: Store, report: Report, directory: str = "", *, digest: str | None = None
    ) -> Checkpoint | None:
        """Return a checkpoint if manifest and index are sound, else None."""
        with report.collect(directory):
            return Checkpoint(
                store, digest=digest, bases=self._bases, check=self._collecting(report)
            )
        return None

    def _collecting(self, report: Report) -> Callable[[Manifest], None] | None:
        """Return the check of the manifest with its violations collected.

        The rest of the checkpoint is then checked in spite of a violation.
        """
        check = self._check
        if check is None:
            return None

        def collect(manifest: Manifest) -> None:
            with report.collect():
                check(manifest)

        return collect

    def check_opened(self, checkpoint: Checkpoint, report: Report, directory: str = "") -> None:
        """Check one checkpoint with sound manifest and index, without its closure."""
        report.checkpoints[directory or report.target] = checkpoint.digest
        found = [
            self._look(checkpoint, reference, report, directory)
            for reference in _newest_first(checkpoint)
        ]
        self._check_contents(checkpoint, report, directory, can_decode=all(found))
        if checkpoint.frozen and self._bases:
            self._check_frozen(checkpoint, report, directory)
        elif checkpoint.frozen:
            nbytes = sum(one.nbytes for one in checkpoint.frozen.values())
            report.warnings.append(
                f"{encodable(directory or checkpoint.title)} refers to {len(checkpoint.frozen)}"
                f" tensors of {nbytes} bytes in the frozen base"
                f" {encodable(checkpoint.frozen_location)}, which wasn't read"
            )

    def _check_frozen(self, checkpoint: Checkpoint, report: Report, directory: str) -> None:
        """Check the tensors of a frozen base. A base is read once for all checkpoints.

        Of several machines, the machine with the first slice reads the base. Spec: REQ-FRZ-005.
        """
        if report.share[0] > 0:
            return
        tensors = list(checkpoint.frozen.values())
        recorded = Recorded(checkpoint.frozen_location, checkpoint.store.name)
        try:
            base = find_base(tensors, self._bases, recorded, Checkpoint, self._frozen_base)
        except CkptError as error:
            if error.code not in (Code.FROZEN_BASE_MISSING, Code.FROZEN_BASE_CHANGED):
                raise
            report.add(error.below(directory) if directory else error)
            return
        if base is not self._frozen_base:
            self._frozen_base = base
            report.count(sum(one.nbytes for one in tensors))

    def check_in_run(self, store: Store, report: Report, directory: str) -> None:
        """Check one checkpoint of a run, and the bases that aren't checkpoints of the run."""
        checkpoint = self.open(store, report, directory)
        if checkpoint is None:
            return
        try:
            check_at_home(checkpoint)
        except CkptError as error:
            if error.code == Code.FILES_IN_CACHES:
                report.warnings.append(f"{directory} can't be checked: {error}")
                checkpoint.close()
                return
            if not is_violation(error):
                raise  # a violation is found again by the check of the contents
        self.check_opened(checkpoint, report, directory)
        self.check_closure(checkpoint, report)
        checkpoint.close()  # releases the parts before the next checkpoint is checked

    def check_closure(self, checkpoint: Checkpoint, report: Report) -> None:
        """Check the bases that were not checked yet, each by itself, the newest first."""
        there = {one.digest for one in report.references if one.path is not None}
        for reference in _newest_first(checkpoint):
            if reference.digest in there - self._known:
                self._known.add(reference.digest)
                self._check_member(checkpoint, reference, report)

    def _look(
        self, checkpoint: Checkpoint, reference: Reference, report: Report, directory: str
    ) -> bool:
        """Search for a base once, for all blocks; return whether the base can be read."""
        path = None
        reason = ""
        can_read = False
        try:
            path = checkpoint.closure.open(reference).store.name
            can_read = True
        except CkptError as error:
            if not is_violation(error):
                raise
            if error.code in _NOT_FOUND:
                reason = str(error.code)
            else:
                path = checkpoint.closure.find(reference).name
            # Damage to an existing base is reported by the check of the base itself.
            if path is None or error.code == Code.REFERENCE_CLOSURE or self._with_bases:
                report.add(error.below(directory) if directory else error)
        name = directory or checkpoint.title
        report.references.append(
            FoundReference(
                checkpoint=name,
                name=reference.name,
                digest=reference.digest,
                path=path,
                reason=reason,
            )
        )
        return can_read

    def _check_member(self, checkpoint: Checkpoint, reference: Reference, report: Report) -> None:
        """Check a checkpoint of the closure by itself."""
        found = report.begin(reference.name)
        before = len(report.violations)
        try:
            base = None
            with found.collect():
                base = checkpoint.closure.open(reference)
            if base is not None:
                can_decode = all(_can_open(base, one) for one in base.manifest.references)
                self._check_contents(base, found, base.title, can_decode=can_decode)
        finally:
            report.absorb(found)
            report.closure.append(
                ClosureMember(
                    name=reference.name,
                    digest=reference.digest,
                    nbytes=found.nbytes,
                    violation_count=len(report.violations) - before,
                )
            )

    def _check_contents(
        self, checkpoint: CheckpointFiles, report: Report, directory: str, *, can_decode: bool
    ) -> None:
        """Check every byte of an open checkpoint, and the agreement of its documents."""
        before = len(report.violations)
        manifest = checkpoint.manifest
        report.count(manifest.index_nbytes)
        expected = {MANIFEST_NAME, index_name(manifest.origin.attempt)}
        signatures = bundle_prefix(manifest.origin.attempt)
        sound: dict[int, PartFileEntry] = {}
        with contextlib.suppress(CkptError):  # the loop below finds each error again
            checkpoint.open_parts(range(len(checkpoint.index.parts)))
        for number, entry in enumerate(checkpoint.index.parts):
            expected.add(part_path(manifest.origin.attempt, number))
            with report.collect(directory):
                opened = checkpoint.open_part(number)
                sound[number] = PartFileEntry(
                    part=opened.part, digest=entry.digest, nbytes=entry.nbytes
                )
                report.count(entry.nbytes)
                expected.update(file.name for file in opened.part.files)
                self._check_part(opened, report, directory, can_decode=can_decode)
        _verify_holders(checkpoint, set(sound), report, directory)
        if len(report.violations) == before:
            with report.collect(directory):
                _check_merge(checkpoint, list(sound.values()))
        for path in checkpoint.store.list(""):
            if path not in expected and not path.startswith(signatures):
                place = f"{directory}/{path}" if directory else path
                report.warnings.append(
                    f"{encodable(place)} doesn't belong to the checkpoint; readers ignore it"
                )

    def _check_part(
        self, opened: OpenPart, report: Report, directory: str, *, can_decode: bool
    ) -> None:
        """Check the files, the encoded blocks and the values of a part."""
        part = opened.part
        check = _BlockCheck(opened, self._done, report.count, with_bases=self._with_bases)
        shards: list[list[tuple[StoredBox, Extent]]] = [[] for _ in part.files]
        for stored in opened.iter_boxes():
            for extent in stored.extents:
                if extent.file is not None:
                    shards[extent.file].append((stored, extent))
        readable = set()
        sound = set()
        for number, file in enumerate(part.files):
            with report.collect(directory):
                opened.files.check_nbytes(part, file)
                readable.add(number)  # a damaged header doesn't affect the blocks
                with report.collect(directory):
                    _verify_header(opened.files, file, shards[number])
                    sound.add(number)
                report.count(file.header_nbytes)
        # Encoded blocks that can't be decoded are at least compared with the digests of their
        # stored bytes.
        as_stored = readable - sound if can_decode else readable
        check.plan(readable, as_stored=as_stored, can_decode=can_decode, share=report.share)
        for damage in check.find_damages():
            report.add(damage.below(directory) if directory else damage)
        _verify_values(opened.files, part, report, directory)


class _BlockCheck(Reading):
    """A read of all blocks of a part without sinks, with all damage collected.

    Args:
        done: the encoded blocks that were decoded before, and aren't decoded again. Newly decoded
            blocks are added, blocks of bases included.
        count: called with the number of checked bytes, as stored.
        with_bases: whether to check the needed blocks of bases and to report their damage;
            otherwise the bases are checked by themselves.
    """

    def __init__(
        self, opened: OpenPart, done: Done, count: Callable[[int], None], *, with_bases: bool
    ) -> None:
        super().__init__(opened.files)
        self._opened = opened
        self._done = done
        self._count = count
        self._with_bases = with_bases
        self._own = {file.name for file in opened.part.files}
        # Errors with their sort keys: stage, file (or empty), place in the file (or box), block.
        # Stages: 0 blocks of the part, 1 failed lookups, 2 blocks of bases, 3 failed decoding.
        self._damages: list[tuple[tuple[int, str, int, int], CkptError]] = []
        self._lock = threading.Lock()

    def plan(
        self,
        readable: Collection[int],
        *,
        as_stored: Collection[int],
        can_decode: bool,
        share: tuple[int, int],
    ) -> None:
        """Plan the reads.

        Args:
            readable: numbers of the files whose raw blocks are read.
            as_stored: numbers of the files whose encoded blocks are compared with the digests of
                their stored bytes.
            can_decode: whether encoded blocks are decoded.
            share: the slice of the part's blocks; see `Report`.
        """
        count = int(self._opened.part.holdings.extents.block_count.sum())
        begin, end = (count * number // share[1] for number in (share[0], share[0] + 1))
        for stored in self._opened.iter_boxes():
            number = self.add_box(WantedBox(stored=stored))
            for extent in stored.extents:
                first = extent.block_begin + max(0, begin)
                last = extent.block_begin + min(extent.block_count, end)
                begin = begin - extent.block_count
                end = end - extent.block_count
                if first >= last:
                    continue
                if extent.encoding == "raw":
                    if extent.file in readable:
                        self.ranges.append(self.library.range_of(stored, first, last, number))
                    continue
                if extent.file in as_stored:
                    self.ranges += [
                        self.library.range_of(stored, at, at + 1, number)
                        for at in range(first, last)
                    ]
                if can_decode:
                    self._add_decoded(number, stored, first, last)

    def _add_decoded(self, number: int, stored: StoredBox, first: int, last: int) -> None:
        """Add the blocks that were not decoded before to the blocks to decode."""
        try:
            spans = list(iter_spans(stored, first, last))
        except CkptError as error:
            self._note((1, "", number, first), error)
            return
        for span in spans:
            if span.stored.opened is not self._opened and not self._with_bases:
                continue
            if span.encoding == "raw":
                self.add_blocks(number, [span])
                continue
            extent = span.stored.extent_of(span.first)
            done = self._done.get(_key(span.stored), ())
            self._count(sum(extent.stored_nbytes(at) for at in range(span.first, span.last)))
            left = (at for at in range(span.first, span.last) if at not in done)
            self.add_blocks(
                number, (dataclasses.replace(span, first=at, last=at + 1) for at in left)
            )

    def find_damages(self) -> list[CkptError]:
        """Return an error for each damaged block, ordered by stage, file and place.

        Raises: StoreError; StateError(FLOAT_ENVIRONMENT).
        """
        self.run()
        # File names contain the attempt. Damage in files of bases is left out here, because the
        # check of the base reports the damage.
        attempt = self._opened.part.origin.attempt
        damages = [error for _, error in sorted(self._damages, key=lambda row: row[0])]
        return [
            one for one in damages if self._with_bases or one.where is None or attempt in one.where
        ]

    def _note(self, at: tuple[int, str, int, int], error: CkptError) -> None:
        if not is_violation(error):
            raise error
        self._damages.append((at, without_frames(error)))

    def _check_files(self, ranges: list[BlockRange]) -> list[BlockRange]:
        """Return the ranges without those in unreadable files of bases.

        The part's own files were checked before.
        """
        wrong = set()

        def check(path: str) -> None:
            try:
                self.library.check(path)
            except CkptError as error:
                self._note((2, path, -1, 0), error)
                wrong.add(path)

        call_each(
            self.library.files.store, check, sorted({blocks.path for blocks in ranges} - self._own)
        )
        return [blocks for blocks in ranges if blocks.path not in wrong]

    def _take(self, blocks: BlockRange, stored: memoryview) -> None:
        damages = list(self.boxes[blocks.box].stored.iter_damages(blocks, stored))
        with self._lock:
            for error in damages:
                self._note(
                    (0 if blocks.path in self._own else 2, blocks.path, blocks.byte_begin, 0), error
                )
            self._count(blocks.nbytes)

    def _decode_bundle(self, bundle: Bundle, decoder: Decoder) -> None:
        for number, block in bundle:
            try:
                decoder.content(self.boxes[number].stored, block)
            except CkptError as error:
                self._note((3, "", number, block), error)
        for stored, block in decoder.contents:
            self._done.setdefault(_key(stored), set()).add(block)


def _key(stored: StoredBox) -> tuple[str, int, int]:
    return stored.opened.files.digest, stored.opened.part.writer, stored.row


def _newest_first(checkpoint: CheckpointFiles) -> list[Reference]:
    """Return the references of a checkpoint, the newest step first.

    The manifest sorts references by digest.
    """
    return sorted(
        checkpoint.manifest.references,
        key=lambda one: parse_checkpoint_name(one.name) or (),
        reverse=True,
    )


def _can_open(checkpoint: CheckpointFiles, reference: Reference) -> bool:
    """Return whether a base can be opened; an error has been reported before."""
    try:
        checkpoint.closure.open(reference)
    except CkptError as error:
        if not is_violation(error):
            raise
        return False
    return True


def _read_digest(
    store: Store, step_and_launch: tuple[int, int], run_id: str | None, report: Report, name: str
) -> dict[str, str]:
    """Return the digest of a run's checkpoint by its name; an empty dictionary if uncommitted.

    Only the register is read.
    """
    register = read_register(store)
    if register is None:
        report.warnings.append(f"{name}/ isn't committed; readers ignore it")
        return {}
    check_place(register, step_and_launch, run_id)
    return {name: register.digest} if isinstance(register, Manifest) else {}


def _verify_values(checkpoint: CheckpointFiles, part: Part, report: Report, directory: str) -> None:
    """Check the trees of all RNG streams and plain values of a part."""
    where = part_path(part.origin.attempt, part.writer)
    for stream in part.streams:
        with report.collect(directory):
            place = f"{where}#/streams/{stream.name}"
            _check_references(
                checkpoint, "rng", stream.scope, parse_tree(stream.state, where=place), place
            )
    for leaf in part.leaves:
        with report.collect(directory):
            value = parse_tree(leaf.value, where=f"{where}#/leaves/{leaf.field}/{leaf.name}")
            _check_references(
                checkpoint,
                leaf.field,
                leaf.scope,
                value,
                f"{where}#/leaves/{leaf.field}/{leaf.name}",
            )
            if (
                leaf.field == "data"
                and isinstance(value, dict)
                and value.get("kind") == CURSOR_KIND
            ):
                parse_cursor(value)
            elif leaf.field == "data" and is_foreign(value):
                parse_foreign(value)


def _check_references(
    checkpoint: CheckpointFiles, field: str, scope: str, value: object, where: str
) -> None:
    for item in iter_references(value):
        if checkpoint.find(field, item.name, scope) is None:
            raise err(
                Code.TREE_REFERENCE,
                f"refers to the tensor {item.name[:64]!r}, which isn't there",
                where=where,
                requirement="REQ-TRE-004",
            )


def _verify_header(
    files: CheckpointFiles, file: PartFile, extents: Sequence[tuple[StoredBox, Extent]]
) -> None:
    """Check a file's header against its digest; check a shard's header against the part, too."""
    header = files.read_header(file)
    if file.kind == "pack":  # all packs have the same header
        return
    entries = parse_shard_header(header, file_nbytes=file.nbytes, where=file.name)
    # The keys are compared as lists: a set would hide a key that the part names twice.
    keys = [extent.key or stored.key[1] for stored, extent in extents]
    if sorted(keys) != sorted(entries) or not all(
        _agrees(entries[key], stored, extent)
        for key, (stored, extent) in zip(keys, extents, strict=True)
    ):
        raise err(
            Code.SHARD_MISMATCH,
            "the header's keys, dtypes, shapes or places aren't those of the part",
            where=file.name,
            requirement="REQ-SHD-010",
        )


def _agrees(entry: ShardEntry, stored: StoredBox, extent: Extent) -> bool:
    tag = DTYPES[stored.dtype].safetensors
    shape = stored.box.shape if tag else (stored.nbytes,)
    return (entry.tag, entry.shape, entry.byte_begin, entry.byte_end) == (
        tag or "U8",
        shape,
        extent.byte_begin,
        extent.byte_begin + stored.nbytes,
    )


def _check_merge(checkpoint: CheckpointFiles, entries: list[PartFileEntry]) -> None:
    """Raise unless index and manifest are exactly the result of merging the parts.

    Raises: FormatError(DOC_MISMATCH, MANIFEST_SUMMARY); the errors of merging. Spec: REQ-IDX-005,
        REQ-MAN-006, REQ-DEL-021.
    """
    manifest = checkpoint.manifest
    parts = [entry.part for entry in entries]
    if merge_parts(entries) != checkpoint.index:
        detail = "the index isn't the one that follows from the parts"
        where = index_name(manifest.origin.attempt)
        raise err(Code.DOC_MISMATCH, detail, where=where, requirement="REQ-IDX-001")
    features, references = merge_deltas(parts)
    for what, said, merged in (
        ("features", manifest.features, features),
        ("references", manifest.references, references),
    ):
        if said != merged:
            detail = f"the {what} aren't those that follow from the parts"
            where = f"{MANIFEST_NAME}#/signed/{what}"
            raise err(Code.DOC_MISMATCH, detail, where=where, requirement="REQ-DEL-021")
    if manifest.labels != parts[0].labels:
        detail = "metrics, tags and suspect aren't those of part 0"
        where = f"{MANIFEST_NAME}#/signed/metrics"
        raise err(Code.DOC_MISMATCH, detail, where=where, requirement="REQ-CMT-039")
    if manifest.durability != weakest(part.durability for part in parts):
        detail = "the durability isn't the weakest of the parts"
        where = f"{MANIFEST_NAME}#/signed/durability"
        raise err(Code.DOC_MISMATCH, detail, where=where, requirement="REQ-CMT-046")
    if is_of_delta(features) and add_stored(summarise(checkpoint.index), parts) != manifest.fields:
        detail = "stored_nbytes isn't the sum over the parts"
        where = f"{MANIFEST_NAME}#/signed/fields"
        raise err(Code.MANIFEST_SUMMARY, detail, where=where, requirement="REQ-MAN-006")


def _verify_holders(
    checkpoint: CheckpointFiles, sound: set[int], report: Report, directory: str
) -> None:
    """Check that the sound parts contain all entries that the index assigns to them."""
    is_sound = np.zeros(checkpoint.manifest.origin.writer_count, np.bool_)
    is_sound[list(sound)] = True
    rows: dict[Sharding, Integers] = {}
    for tensor in checkpoint.index.tensors:
        # Computed once for tensors with the same sharding: rows of unsound parts are skipped for
        # all of them.
        if tensor.sharding not in rows:
            rows[tensor.sharding] = np.flatnonzero(is_sound[tensor.sharding.part])
        for box, part in tensor.sharding.iter_rows(rows[tensor.sharding]):
            with report.collect(directory):
                checkpoint.stored_box(tensor, box, part)
            if report.is_full:
                return
    for leaf in checkpoint.index.leaves:
        if report.is_full:
            return
        if leaf.part in sound:
            with report.collect(directory):
                checkpoint.stored_leaf(leaf)
    for stream in checkpoint.index.streams:
        if stream.part in sound:
            with report.collect(directory):
                checkpoint.stored_stream(stream)

"""Check every byte of a checkpoint or of a run, and collect everything that is wrong. Spec: REQ-OPN-009."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

from ckptfmt import limits
from ckptfmt.arithmetic.merge import PartFileEntry, merge_parts
from ckptfmt.arithmetic.plan import BlockRange, Request, plan_requests
from ckptfmt.documents.cursor import KIND as CURSOR_KIND
from ckptfmt.documents.cursor import parse_cursor
from ckptfmt.documents.manifest import (
    MANIFEST_NAME,
    Abort,
    Manifest,
    Tombstone,
    index_name,
    parse_checkpoint_name,
    part_path,
)
from ckptfmt.documents.part import Extent, Part, PartBox, PartFile, PartTensor, extent_nbytes
from ckptfmt.documents.run import LAUNCHES, RUN_NAME, Launch, Run, launch_name, parse_launch_name
from ckptfmt.documents.shard import ShardEntry, parse_shard_header
from ckptfmt.documents.tree import TensorRef, iter_values, parse_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.engines.commit import read_register
from ckptfmt.engines.reader import Checkpoint, check_nbytes, read_header
from ckptfmt.engines.stored import iter_damages
from ckptfmt.engines.streaming import REQUEST_NBYTES, stream_requests
from ckptfmt.errors import CkptError, Code, StoreError, err

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from ckptfmt.store.protocol import Store

__all__ = ["Report", "verify_checkpoint", "verify_run"]


@dataclasses.dataclass(slots=True, kw_only=True)
class Report:
    """What a check found.

    Attributes:
        target: name of what was checked.
        kind: ``checkpoint`` or ``run``.
        violations: what breaks the specification, each as an error with code, place, clause and remedy.
        warnings: what is allowed, and worth knowing.
        checkpoints: names of the checkpoints that were checked, with their manifest digests.
        nbytes: how many bytes were read and compared with a digest.
        on_progress: called with the number of bytes just checked.
    """

    target: str
    kind: str
    violations: list[CkptError] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    checkpoints: dict[str, str] = dataclasses.field(default_factory=dict)
    nbytes: int = 0
    on_progress: Callable[[int], None] | None = None

    def count(self, nbytes: int) -> None:
        """Note that so many bytes were checked."""
        self.nbytes += nbytes
        if self.on_progress is not None:
            self.on_progress(nbytes)

    @property
    def valid(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.violations

    def as_json(self) -> dict[str, object]:
        """Return the report as a JSON-ready mapping."""
        return {
            "target": self.target,
            "kind": self.kind,
            "valid": self.valid,
            "violations": [violation.as_json() for violation in self.violations],
            "warnings": self.warnings,
            "checkpoints": self.checkpoints,
            "nbytes": self.nbytes,
            # A full checkpoint reads from nothing else; deltas will list here what they read from.
            "references": [],
        }

    def collect(self, prefix: str = "") -> _Collector:
        """Return a context that adds an error to the violations instead of raising it."""
        return _Collector(self, prefix)


class _Collector:
    def __init__(self, report: Report, prefix: str) -> None:
        self._report = report
        self._prefix = prefix

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, CkptError) or isinstance(error, StoreError):
            return False
        where = f"{self._prefix}{error.where}" if error.where else self._prefix.rstrip("/") or None
        self._report.violations.append(
            type(error)(error.code, error.detail, where=where, requirement=error.requirement, remedy=error.remedy)
        )
        return True


def verify_checkpoint(store: Store, report: Report, *, prefix: str = "") -> Checkpoint | None:
    """Check every byte of one checkpoint.

    Args:
        store: rooted at the checkpoint's directory.
        report: takes what is found.
        prefix: stands before the places in the report.

    Returns: the checkpoint, where manifest and index are sound.
    Raises: StoreError where the store itself fails.
    Spec: REQ-OPN-009.
    """
    before = len(report.violations)
    checkpoint = None
    with report.collect(prefix):
        checkpoint = Checkpoint(store)
    if checkpoint is None:
        return None
    manifest = checkpoint.manifest
    report.checkpoints[prefix.rstrip("/") or report.target] = manifest.digest
    report.count(manifest.index_nbytes)
    expected = {MANIFEST_NAME, index_name(manifest.origin.attempt)}
    sound: dict[int, PartFileEntry] = {}
    for number, entry in enumerate(checkpoint.index.parts):
        expected.add(part_path(manifest.origin.attempt, number))
        with report.collect(prefix):
            part = checkpoint.read_part(number)
            sound[number] = PartFileEntry(part=part, digest=entry.digest, nbytes=entry.nbytes)
            report.count(entry.nbytes)
            expected.update(file.name for file in part.files)
            _verify_part(checkpoint, part, report, prefix)
    _verify_holders(checkpoint, set(sound), report, prefix)
    if len(report.violations) == before:
        with report.collect(prefix):
            _check_merge(checkpoint, list(sound.values()))
    for path in store.list(""):
        if path not in expected:
            report.warnings.append(f"{prefix}{path} doesn't belong to the checkpoint; readers ignore it")
    return checkpoint


def verify_run(store: Store, report: Report) -> None:
    """Check a run: its record, its launches, and every checkpoint that is committed.

    Raises: StoreError where the store itself fails.
    Spec: REQ-RUN-003, REQ-RUN-005, REQ-MAN-002, REQ-OPN-009.
    """
    run: Run | None = None
    with report.collect():
        run = Run.parse(store.read(RUN_NAME, limit_nbytes=limits.JSON_NBYTES))
    run_id = run.run_id if run is not None else None
    numbers = set()
    for name in store.list_names(LAUNCHES):
        if parse_launch_name(name) is not None:
            numbers.add(parse_launch_name(name))
            with report.collect():
                path = f"{LAUNCHES}/{name}"
                launch = Launch.parse(store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path)
                _check_run_id(run_id, launch.run_id, path)
    for name in store.list_names(""):
        found = parse_checkpoint_name(name.rstrip("/")) if name.endswith("/") else None
        if found is not None:
            with report.collect():
                check_record(name.rstrip("/"), found[1], numbers)
            _verify_in_run(store.at(name.rstrip("/")), found, run_id, report, name)


def check_record(name: str, launch: int, numbers: Collection[int | None]) -> None:
    """Raise unless the launch of a checkpoint directory is among those that have a record.

    Raises: IntegrityError(FILE_MISSING). Spec: REQ-RUN-015.
    """
    if launch not in numbers:
        raise err(
            Code.FILE_MISSING,
            f"{name} is of launch {launch}, which has no record",
            where=f"{LAUNCHES}/{launch_name(launch)}",
            requirement="REQ-RUN-015",
            remedy="Restore the record from a copy, or resume by hand from a checkpoint that you name.",
        )


def _verify_in_run(
    store: Store,
    step_and_launch: tuple[int, int],
    run_id: str | None,
    report: Report,
    prefix: str,
) -> None:
    with report.collect(prefix):
        register = read_register(store)
        if register is None:
            report.warnings.append(f"{prefix} isn't committed; readers ignore it")
            return
        check_place(register, step_and_launch, run_id)
        if isinstance(register, Manifest):
            verify_checkpoint(store, report, prefix=prefix)


def check_place(register: Manifest | Abort | Tombstone, step_and_launch: tuple[int, int], run_id: str | None) -> None:
    """Raise unless a register is that of its directory's step, launch and run.

    Raises: FormatError(STEP_MISMATCH, RUN_MISMATCH). Spec: REQ-MAN-002, REQ-RUN-003.
    """
    said = register.origin if isinstance(register, Manifest) else register
    if (said.step, said.launch) != step_and_launch:
        raise err(
            Code.STEP_MISMATCH,
            f"the register is that of step {said.step}, launch {said.launch}",
            where=MANIFEST_NAME,
            requirement="REQ-MAN-002",
        )
    _check_run_id(run_id, said.run_id, MANIFEST_NAME)


def _check_run_id(run_id: str | None, said: str | None, where: str) -> None:
    if run_id is not None and said != run_id:
        raise err(Code.RUN_MISMATCH, f"it belongs to run {said}", where=where, requirement="REQ-RUN-003")


def _verify_part(checkpoint: Checkpoint, part: Part, report: Report, prefix: str) -> None:
    store = checkpoint.store
    for number, file in enumerate(part.files):
        with report.collect(prefix):
            check_nbytes(store, file)
            with report.collect(prefix):  # What the header says doesn't matter to the blocks.
                _verify_header(store, part, number, file)
            report.count(file.header_nbytes)
            for damage in _find_damages(store, part, number, file, report):
                with report.collect(prefix):
                    raise damage
    where = part_path(part.origin.attempt, part.writer)
    for stream in part.streams:
        with report.collect(prefix):
            place = f"{where}#/streams/{stream.name}"
            _check_references(checkpoint, "rng", stream.scope, parse_tree(stream.state, where=place), place)
    for leaf in part.leaves:
        with report.collect(prefix):
            value = parse_tree(leaf.value, where=f"{where}#/leaves/{leaf.field}/{leaf.name}")
            _check_references(checkpoint, leaf.field, leaf.scope, value, f"{where}#/leaves/{leaf.field}/{leaf.name}")
            if leaf.field == "data" and isinstance(value, dict) and value.get("kind") == CURSOR_KIND:
                parse_cursor(value)


def _check_references(checkpoint: Checkpoint, field: str, scope: str, value: object, where: str) -> None:
    for item in iter_values(value):
        if isinstance(item, TensorRef) and checkpoint.find(field, item.name, scope) is None:
            raise err(
                Code.TREE_REFERENCE,
                f"refers to the tensor {item.name[:64]!r}, which isn't there",
                where=where,
                requirement="REQ-TRE-004",
            )


def _verify_header(store: Store, part: Part, number: int, file: PartFile) -> None:
    """Check that a file's header is the one digested and says what the part says."""
    header = read_header(store, file)
    entries = parse_shard_header(header, file_nbytes=file.nbytes, where=file.name)
    stored = [(extent.key, tensor, held, extent.byte_begin) for tensor, held, extent in _extents_of(part, number)]
    # Counted, for a key that the part names twice would hide one of the two.
    if sorted(key for key, *_ in stored) != sorted(entries) or not all(
        _agrees(entries[key], tensor, held, byte_begin) for key, tensor, held, byte_begin in stored
    ):
        raise err(
            Code.SHARD_MISMATCH,
            "the header's keys, dtypes, shapes or places aren't those of the part",
            where=file.name,
            requirement="REQ-SHD-010",
        )


def _agrees(entry: ShardEntry, tensor: PartTensor, held: PartBox, byte_begin: int) -> bool:
    dtype = DTYPES[tensor.dtype]
    nbytes = tensor.box_nbytes(held.box)
    shape = held.box.shape if dtype.safetensors else (nbytes,)
    return (entry.tag, entry.shape, entry.byte_begin, entry.byte_end) == (
        dtype.safetensors or "U8",
        shape,
        byte_begin,
        byte_begin + nbytes,
    )


def _extents_of(part: Part, number: int) -> Iterator[tuple[PartTensor, PartBox, Extent]]:
    for tensor in part.tensors:
        for held in tensor.boxes:
            for extent in held.extents:
                if extent.file == number:
                    yield tensor, held, extent


def _find_damages(store: Store, part: Part, number: int, file: PartFile, report: Report) -> list[CkptError]:
    """Return an error for every block of a file that isn't what was saved, in the order of the file."""
    block_nbytes = part.origin.block_nbytes
    extents = list(_extents_of(part, number))
    ranges = [
        BlockRange(file.name, extent.byte_begin, nbytes, at, extent.block_begin * block_nbytes)
        for at, (tensor, held, extent) in enumerate(extents)
        if (nbytes := extent_nbytes(tensor, held, extent, block_nbytes))
    ]
    requests = plan_requests(ranges, block_nbytes=block_nbytes, request_nbytes=REQUEST_NBYTES, gap_nbytes=0)
    found: list[tuple[int, CkptError]] = []
    lock = threading.Lock()

    def take(request: Request, content: memoryview) -> None:
        for blocks in request.ranges:
            tensor, held, _ = extents[blocks.piece]
            at = blocks.byte_begin - request.byte_begin
            title = f"{tensor.field} {tensor.name[:100]!r}"
            damages = list(iter_damages(blocks, content[at:], held.digests, block_nbytes, title=title))
            with lock:
                found.extend((blocks.byte_begin, damage) for damage in damages)
                report.count(blocks.nbytes)

    stream_requests(store, requests, take)
    return [damage for _, damage in sorted(found, key=lambda pair: pair[0])]


def _check_merge(checkpoint: Checkpoint, entries: list[PartFileEntry]) -> None:
    """Raise unless the index follows from the parts: it may leave out nothing that a part holds. Spec: REQ-IDX-005."""
    if merge_parts(entries) != checkpoint.index:
        raise err(
            Code.DOC_MISMATCH,
            "the index isn't the one that follows from the parts",
            where=index_name(checkpoint.manifest.origin.attempt),
            requirement="REQ-IDX-001",
        )


def _verify_holders(checkpoint: Checkpoint, sound: set[int], report: Report, prefix: str) -> None:
    """Check that every part that is `sound` by itself has what the index says it has."""
    for tensor in checkpoint.index.tensors:
        for box, part in tensor.sharding:
            if part in sound:
                with report.collect(prefix):
                    checkpoint.check_stored(tensor, box, part)
    for leaf in checkpoint.index.leaves:
        if leaf.part in sound:
            with report.collect(prefix):
                checkpoint.stored_leaf(leaf)
    for stream in checkpoint.index.streams:
        if stream.part in sound:
            with report.collect(prefix):
                checkpoint.stored_stream(stream)

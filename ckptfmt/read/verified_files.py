"""Stream the files of a checkpoint with every byte compared with a digest, for copies and checks.

Spec: REQ-RUN-027, REQ-OPN-003, REQ-OPN-006, REQ-OPN-011.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeAlias, cast

from ckptfmt.commit.decision import create_once
from ckptfmt.digest import PREFIX, digest_bytes
from ckptfmt.documents.manifest import Manifest, index_name, part_path
from ckptfmt.documents.msgpk import open_packed_document
from ckptfmt.documents.part import Part, PartFile
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.read_plan import BlockRange
from ckptfmt.read.files import CheckpointFiles, OpenPart, StoredBox, check_nbytes
from ckptfmt.read.streaming import iter_ahead
from ckptfmt.store.direct import make_memory
from ckptfmt.store.protocol import PAGE_NBYTES, FileSource, RangeReader, SizedChunks, Store

#: Size in bytes of the chunks that are read and compared, unless a block is larger.
CHUNK_NBYTES: Final = 4 << 20
#: Number of files processed at the same time.
FILE_COUNT: Final = 4
#: Number of chunks read ahead of the chunk being used.
_AHEAD_COUNT: Final = 3

#: A span of a file: first byte, size in bytes, and a function that raises if the bytes are damaged.
Span: TypeAlias = "tuple[int, int, Callable[[memoryview], None]]"


class StoppedError(Exception):
    """The signal to stop the work on a file early. No public function raises this error."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedFile:
    """A file of a checkpoint with the checks of its bytes.

    Attributes:
        path: path in the checkpoint's directory.
        nbytes: size in bytes.
        spans: the file's spans, in order and without gaps.
        is_document: whether the file is an index or a part, and therefore fits in memory.
    """

    path: str
    nbytes: int
    spans: Sequence[Span]
    is_document: bool = False

    def iter_chunks(self, store: FileSource) -> Generator[memoryview, None, None]:
        """Yield the file's contents from a store, each chunk verified, in memory of its own.

        Raises: IntegrityError(FILE_MISSING, FILE_NBYTES, DOC_DIGEST, HEADER_DIGEST, BLOCK_DIGEST);
            FormatError.
        """
        check_nbytes(store, self.path, self.nbytes)
        with store.open_ranges(self.path) as file:
            read = functools.partial(self._read, file)
            if self.nbytes <= CHUNK_NBYTES:
                yield from map(read, self._chunks())
            else:
                yield from iter_ahead(read, self._chunks(), count=2, ahead_count=_AHEAD_COUNT)

    def _chunks(self) -> Iterator[list[Span]]:
        chunk: list[Span] = []
        for span in self.spans:
            if chunk and span[0] + span[1] - chunk[0][0] > CHUNK_NBYTES:
                yield chunk
                chunk = []
            chunk.append(span)
        yield chunk

    def _read(self, file: RangeReader, chunk: list[Span]) -> memoryview:
        begin = chunk[0][0]
        end = chunk[-1][0] + chunk[-1][1]
        content = file.read_into(begin, end - begin, make_memory(end - begin + 2 * PAGE_NBYTES))
        for first, nbytes, check in chunk:
            check(content[first - begin : first - begin + nbytes])
        return content


def packed_file(path: str, nbytes: int, digest: bytes) -> VerifiedFile:
    """Return an index or a part, given the path, size and digest from the referring document."""

    def check(content: memoryview) -> None:
        open_packed_document(bytes(content), where=path, digest=digest)

    return VerifiedFile(path=path, nbytes=nbytes, spans=[(0, nbytes, check)], is_document=True)


def index_file(manifest: Manifest) -> VerifiedFile:
    """Return the index of a checkpoint as a verified file."""
    digest = bytes.fromhex(manifest.index_digest.removeprefix(PREFIX))
    return packed_file(index_name(manifest.origin.attempt), manifest.index_nbytes, digest)


def part_files(files: CheckpointFiles) -> list[VerifiedFile]:
    """Return the parts of a checkpoint as verified files."""
    attempt = files.manifest.origin.attempt
    return [
        packed_file(part_path(attempt, at), one.nbytes, one.digest)
        for at, one in enumerate(files.index.parts)
    ]


def stored_files(opened: OpenPart) -> list[VerifiedFile]:
    """Return the shards and packs of a part as verified files."""
    files = opened.part.files
    spans: list[list[Span]] = [
        [(0, file.header_nbytes, functools.partial(_check_header, file))] for file in files
    ]
    for stored in opened.iter_boxes():
        for extent in stored.extents:
            if extent.file is None:
                continue
            step = 1 if extent.is_encoded else max(1, CHUNK_NBYTES // stored.block_nbytes)
            end = extent.block_begin + extent.block_count
            for first in range(extent.block_begin, end, step):
                spans[extent.file].append(_block_span(stored, first, min(first + step, end)))
    for found in spans:
        found.sort(key=lambda span: span[0])
    return [
        VerifiedFile(path=file.name, nbytes=file.nbytes, spans=own)
        for file, own in zip(files, spans, strict=True)
    ]


def stored_files_of(part: Part) -> list[VerifiedFile]:
    """Return the shards and packs of a part without opening its checkpoint.

    The checkpoint may be uncommitted.
    """
    # The part alone determines the stored bytes and their digests.
    return stored_files(OpenPart(cast("CheckpointFiles", None), part))


def create_verified(
    store: Store, file: VerifiedFile, chunks: Callable[[], Generator[memoryview, None, None]]
) -> bool:
    """Create a copy of a file; return False if another process has already created the same copy.

    Args:
        store: the destination.
        file: the file to copy.
        chunks: returns a generator of the contents, called once for each try.

    Raises: StoreError; the errors of the generator.
    """
    # An unfinished generator keeps a file open and threads alive until closed.
    with contextlib.ExitStack() as drawn:

        def draw() -> SizedChunks:
            drawn.close()  # closes the generator of the previous try
            return SizedChunks(drawn.enter_context(contextlib.closing(chunks())), file.nbytes)

        try:
            create_once(store, file.path, draw, nbytes=file.nbytes)
        except CkptError as error:
            if error.code != Code.STORE_EXISTS:
                raise
            return False
        return True


def for_each_file(
    work: Callable[[VerifiedFile], None], files: Iterable[VerifiedFile], failed: threading.Event
) -> None:
    """Call `work` with each file, for several files at a time.

    Args:
        work: processes a file; raises `StoppedError` soon after `failed` is set.
        files: the files.
        failed: set when the work on a file fails or the caller is interrupted, so that the work on
            other files stops.

    Raises: the first error of `work` in the order of the files.
    """
    running: collections.deque[Future[None]] = collections.deque()
    with ThreadPoolExecutor(FILE_COUNT, thread_name_prefix="ckptfmt-file") as threads:
        try:
            for file in files:
                running.append(threads.submit(work, file))
                if len(running) > 2 * FILE_COUNT:
                    running.popleft().result()
            while running:
                running.popleft().result()
        except BaseException:
            failed.set()
            for one in running:
                one.cancel()
            raise


def _check_header(file: PartFile, content: memoryview) -> None:
    if digest_bytes(content) != file.header_digest:
        detail = "the header isn't the one that was saved"
        raise err(Code.HEADER_DIGEST, detail, where=file.name, requirement="REQ-PRT-008")


def _block_span(stored: StoredBox, first: int, last: int) -> Span:
    name, byte_begin, nbytes = stored.span_of(first, last)
    blocks = BlockRange(name, byte_begin, nbytes, 0, first * stored.block_nbytes)

    def check(content: memoryview) -> None:
        for damage in stored.iter_damages(blocks, content):
            raise damage

    return byte_begin, nbytes, check

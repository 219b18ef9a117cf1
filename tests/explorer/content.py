"""What the explored runs save: tiny states that follow from the attempt's id, so that any reader can tell the truth."""

import contextlib
import dataclasses
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final
from unittest import mock

import numpy as np

from ckptfmt.box import Box
from ckptfmt.commit import decision as commit
from ckptfmt.documents import canonical
from ckptfmt.documents.index import Index
from ckptfmt.documents.manifest import Manifest, Origin, checkpoint_name
from ckptfmt.documents.part import Leaf, Part, RngStream
from ckptfmt.documents.run import Launch
from ckptfmt.documents.tree import dump_tree
from ckptfmt.errors import CkptError
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run import lineage, retention, save_job
from ckptfmt.store.protocol import Store
from ckptfmt.write import image, writer
from ckptfmt.write.snapshot import Snapshot

WRITER_COUNT: Final = 2
#: Attempts of compactions.
COMPACTIONS: Final = tuple(f"{0xC0FFEE00 + number:016x}" for number in range(16))
_ROWS: Final = 4
#: A tensor that no attempt changes: deltas refer to its bytes.
_FROZEN: Final = np.arange(_ROWS * 8, dtype="<i4").reshape(_ROWS, 8)
_FIXED_UNIX_S: Final = 1_700_000_000
#: Whose nonces are numbered, and the numbers; None for the thread's.
_OWN: Final[ContextVar[tuple[str, Iterator[int]] | None]] = ContextVar("_OWN", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySource:
    """A piece of an array as a `TensorSource`."""

    name: str
    array: np.ndarray[Any, Any]
    boxes: tuple[Box, ...]
    field: str = "weights"
    dtype: str = "int32"
    scope: str = "global"
    replica: bool = False
    storage: str = "persistent"
    aliases: tuple[str, ...] = ()

    @property
    def global_shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def copy_into(self, box: Box, out: memoryview) -> None:
        piece = self.array[
            tuple(slice(begin, end) for begin, end in zip(box.begin, box.end, strict=True))
        ]
        out[:] = np.ascontiguousarray(piece).tobytes()


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was read completely."""

    step: int
    launch: int
    attempt: str
    digest: str
    content: tuple[Any, ...]

    @property
    def exact(self) -> bool:
        """Whether it is what this attempt handed to save; a compaction saves what another did."""
        saved_by = self.content[2]["attempt"]
        known = saved_by == self.attempt or self.attempt in COMPACTIONS
        return known and self.content == content_of(saved_by)


def content_of(attempt: str) -> tuple[Any, ...]:
    """Return what the attempt of this id saves, in the form in which `load` reads it."""
    streams = tuple((f"lw/{w}", "demo", (attempt, w)) for w in range(WRITER_COUNT))
    return _weights(attempt).tobytes(), _FROZEN.tobytes(), {"attempt": attempt}, streams


def origin_of(launch: Launch, step: int, attempt_number: int) -> Origin:
    """Return the origin of an attempt; no number is used twice in one run."""
    return Origin(
        run_id=launch.run_id,
        launch=launch.launch,
        nonce=launch.nonce,
        step=step,
        attempt=f"{attempt_number:016x}",
        writer_count=WRITER_COUNT,
    )


def snapshot_of(attempt: str, number: int) -> Snapshot:
    """What writer `number` holds: every other row of two tensors, a stream of its own, a leaf that all have."""
    stream = dump_tree((attempt, number), where="")
    arrays = {"frozen": _FROZEN, "w": _weights(attempt)}
    return Snapshot(
        tensors=tuple(
            ArraySource(name=name, array=array, boxes=_rows_of(number, array))
            for name, array in arrays.items()
        ),
        streams=(RngStream(name="python", scope=f"lw/{number}", kind="demo", state=stream),),
        leaves=(
            Leaf(
                field="config",
                name="",
                scope="global",
                value=dump_tree({"attempt": attempt}, where=""),
            ),
        ),
        absent={"data": "none"},
    )


def write(run_store: Store, origin: Origin, number: int) -> None:
    """Write the part of one writer; the store is rooted at the run."""
    writer.write_part(
        place_of(run_store, origin), snapshot_of(origin.attempt, number), origin, writer=number
    )


def save(run_store: Store, origin: Origin) -> Manifest:
    """Write all parts, one after the other, and commit them."""
    for number in range(WRITER_COUNT):
        write(run_store, origin, number)
    return commit.finalize(place_of(run_store, origin), origin)


def place_of(run_store: Store, origin: Origin) -> Store:
    """Return the store rooted at an attempt's checkpoint directory."""
    return run_store.at(name_of(origin))


def name_of(origin: Origin) -> str:
    """Return the name of an attempt's checkpoint directory."""
    assert origin.launch is not None
    return checkpoint_name(origin.step, origin.launch)


def load(store: Store, *, digest: str | None = None) -> Loaded:
    """Read a checkpoint completely with the real reader."""
    with Checkpoint(store, digest=digest) as checkpoint:
        origin = checkpoint.manifest.origin
        assert origin.launch is not None
        streams = tuple(
            (stream.scope, *checkpoint.stream(stream.name, stream.scope))
            for stream in checkpoint.index.streams
        )
        tensors = (checkpoint.weights[name][...].tobytes() for name in ("w", "frozen"))
        content = (*tensors, checkpoint.leaf("config"), streams)
        return Loaded(checkpoint.step, origin.launch, origin.attempt, checkpoint.digest, content)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Make nonces and times follow from the thread's name and the order of calls: a schedule can be repeated."""
    clock = types.SimpleNamespace(time=lambda: _FIXED_UNIX_S)
    nonces = types.SimpleNamespace(token_hex=_Nonces())
    compactions = itertools.cycle(COMPACTIONS)
    with (
        remembering(),
        mock.patch.object(lineage, "secrets", nonces),
        mock.patch.object(retention, "secrets", nonces),
        mock.patch.object(
            save_job, "secrets", types.SimpleNamespace(token_hex=lambda _: next(compactions))
        ),
        mock.patch.object(image, "time", clock),
    ):
        yield


@contextlib.contextmanager
def own_nonces(name: str) -> Iterator[None]:
    """Number nonces anew, under a name of their own: work that is repeated makes documents that are remembered."""
    token = _OWN.set((name, itertools.count(1)))
    try:
        yield
    finally:
        _OWN.reset(token)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Parse equal documents once. Parsing is pure: the same bytes give the same object."""
    parse = _Remembered(canonical.parse_document)
    with (
        mock.patch.object(Part, "parse", _Remembered(Part.parse)),
        mock.patch.object(Index, "parse", _Remembered(Index.parse)),
        mock.patch("ckptfmt.documents.manifest.parse_document", parse),
        mock.patch("ckptfmt.documents.run.parse_document", parse),
    ):
        yield


class _Nonces:
    """Instead of `secrets.token_hex`: numbered in each thread, which has a name of its own."""

    def __init__(self) -> None:
        self._of_thread: weakref.WeakKeyDictionary[threading.Thread, Iterator[int]] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, nbytes: int) -> str:
        thread = threading.current_thread()
        name, numbers = _OWN.get() or (
            thread.name,
            self._of_thread.setdefault(thread, itertools.count(1)),
        )
        text = f"{name}/{next(numbers)}".encode().hex()
        return (text * nbytes)[-2 * nbytes :]


class _Remembered:
    """Instead of a function that parses: equal bytes are parsed once, and refused with one error."""

    def __init__(self, parse: Callable[..., Any]) -> None:
        self._parse = parse
        self._answers: dict[Any, tuple[Any, CkptError | None]] = {}

    def __call__(self, content: bytes, **arguments: Any) -> Any:
        # What other parts of an attempt had makes parsing cheaper, and no difference to what comes
        # out.
        key = (
            content,
            tuple(sorted((name, value) for name, value in arguments.items() if name != "known")),
        )
        if key not in self._answers:
            try:
                self._answers[key] = self._parse(content, **arguments), None
            except CkptError as error:
                self._answers[key] = None, error
        answer, refusal = self._answers[key]
        if refusal is not None:
            raise refusal.with_traceback(None)
        return answer


def _rows_of(number: int, array: np.ndarray[Any, Any]) -> tuple[Box, ...]:
    return tuple(Box((row, 0), (1, array.shape[1])) for row in range(number, _ROWS, WRITER_COUNT))


@functools.cache
def _weights(attempt: str) -> np.ndarray[Any, Any]:
    base = int(attempt, 16) % (1 << 20) * 1000
    count = _column_count(attempt)
    return np.arange(base, base + _ROWS * count, dtype="<i4").reshape(_ROWS, count)


def _column_count(attempt: str) -> int:
    return 4 + int(attempt, 16) % 5

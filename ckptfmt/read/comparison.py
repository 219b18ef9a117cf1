"""Compare two checkpoints: by digests where they are cut alike, and of what differs by its elements, block by block.

Equal digests say that the same was saved, not that it is still there: bytes behind equal digests are read only by a
comparison that verifies both sides first.

How far elements are from each other (`measure`) is a pure function of their bytes.

Spec: REQ-TEN-005, REQ-OPN-005, REQ-OPN-006, REQ-OPN-009.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from ckptfmt.box import Box
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.tables import TensorKey, sort_key
from ckptfmt.documents.tree import find_difference, parse_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError
from ckptfmt.layout.read_plan import iter_chunks
from ckptfmt.read.decoding import Library
from ckptfmt.read.files import StoredBox
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.reading import carrier_of
from ckptfmt.read.report import Report
from ckptfmt.read.streaming import iter_ahead
from ckptfmt.read.verify import verify_opened

#: How many bytes of tensors that are cut otherwise are read at a time.
_CHUNK_NBYTES: Final = 4 << 20
#: How many elements that differ are kept of a tensor: those that are the farthest from each other.
_LARGEST_COUNT: Final = 3
#: What of a tensor must be alike for its elements to be compared; and what else is said of it.
_KIND: Final = ("dtype", "global_shape")
_REST: Final = ("storage", "aliases")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that isn't the same on both sides.

    Attributes:
        only_in: 0 or 1, if one side has it alone; None if both have it.
        described: what is said of it otherwise, such as ``dtype``, each with what either side says.
        distance: how far its elements are from each other; None where they can't be compared.
    """

    field: str
    name: str
    scope: str
    dtype: str
    global_shape: tuple[int, ...]
    only_in: int | None = None
    described: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    distance: Distance | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A plain value or an RNG stream that isn't the same on both sides.

    Attributes:
        only_in: as of a tensor.
        place: where in the tree the first difference is; empty for all of it.
    """

    field: str
    name: str
    scope: str
    only_in: int | None = None
    place: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class Counts:
    """What it took.

    Attributes:
        tensor_count: how many tensors both sides have in one dtype and shape.
        block_count: how many blocks of them were compared by digest.
        differing_count: how many of these differ, and were read.
        content_nbytes: size of the tensors of both sides.
        read_nbytes: how many bytes of shards and packs were read for it, of both sides and of what they read from.
    """

    tensor_count: int = 0
    block_count: int = 0
    differing_count: int = 0
    content_nbytes: int = 0
    read_nbytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How two checkpoints differ, by the order of their indexes.

    Attributes:
        is_verified: whether every byte of both sides was read and compared with its digest. Else blocks with equal
            recorded digests count as equal, and their bytes were not read.
        damages: what is wrong with either side; what is damaged isn't compared.
    """

    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    counts: Counts
    is_verified: bool = False
    damages: tuple[tuple[CkptError, ...], tuple[CkptError, ...]] = ((), ())

    @property
    def is_damaged(self) -> bool:
        """Whether one of the two was found damaged."""
        return any(self.damages)

    @property
    def is_same(self) -> bool:
        """Whether nothing differs, and nothing is damaged: of what was saved, or, if verified, of what is there."""
        return not self.tensors and not self.values and not self.is_damaged


def compare(
    one: Checkpoint,
    other: Checkpoint,
    *,
    fields: Collection[str],
    verify: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Compare what two checkpoints hold, whoever wrote it when, in constant memory.

    Args:
        fields: which of the seven fields.
        verify: read every byte of both first, whatever their fields, and of what they read from the blocks that they
            need; without it, blocks of equal recorded digests are equal unseen.
        on_progress: called with the number of bytes of one side that were just compared, however; and, to verify, with
            the number of bytes just checked.

    Raises: IntegrityError; what opening bases raises; FormatError; StoreError. With `verify`, what is damaged is in
        the result instead.
    """
    if verify:
        damages = _verify(one, on_progress), _verify(other, on_progress)
        if any(damages):
            return Comparison(tensors=(), values=(), counts=Counts(), is_verified=True, damages=damages)
    counts = Counts()
    tensors: list[TensorDifference] = []
    for key in sorted(one.tensors.keys() | other.tensors.keys(), key=sort_key):
        if key[0] in fields:
            pair = one.tensors.get(key), other.tensors.get(key)
            found = _compare_tensor((one, other), pair, counts)
            tensors += [] if found is None else [found]
            if on_progress is not None:
                on_progress(sum(tensor.nbytes for tensor in pair if tensor is not None) // 2)
    values = [*_compare_leaves(one, other, fields)]
    values += _compare_streams(one, other) if "rng" in fields else ()
    return Comparison(tensors=tuple(tensors), values=tuple(values), counts=counts, is_verified=verify)


def _verify(side: Checkpoint, on_progress: Callable[[int], None] | None) -> tuple[CkptError, ...]:
    """Return what is wrong with a checkpoint, after reading every byte of it."""
    report = Report(target=side.title, kind="checkpoint", on_progress=on_progress)
    verify_opened(side, report)
    return tuple(report.violations)


# --- tensors ----------------------------------------------------------------------------------------------------------


def _compare_tensor(
    sides: tuple[Checkpoint, Checkpoint], pair: tuple[IndexTensor | None, IndexTensor | None], counts: Counts
) -> TensorDifference | None:
    """Return how a tensor differs; None if it doesn't."""
    one, other = pair
    shown = one or other
    assert shown is not None  # noqa: S101 - one side has it
    difference = TensorDifference(
        field=shown.field, name=shown.name, scope=shown.scope, dtype=shown.dtype, global_shape=shown.global_shape
    )
    if one is None or other is None:
        return dataclasses.replace(difference, only_in=0 if other is None else 1)
    described = {
        what: (getattr(one, what), getattr(other, what))
        for what in (*_KIND, *_REST)
        if getattr(one, what) != getattr(other, what)
    }
    if described.keys() & set(_KIND):
        return dataclasses.replace(difference, described=described)
    counts.tensor_count += 1
    counts.content_nbytes += one.nbytes + other.nbytes
    is_alike = sides[0].manifest.origin.block_nbytes == sides[1].manifest.origin.block_nbytes
    is_alike = is_alike and {box for box, _ in one.sharding} == {box for box, _ in other.sharding}
    distance = Distance()
    for part in (_iter_alike if is_alike else _iter_otherwise)(sides, (one, other), counts):
        distance = distance.add(part)
    if not distance.changed_count and not described:
        return None
    distance = dataclasses.replace(distance, element_count=Box.whole(one.global_shape).element_count)
    return dataclasses.replace(difference, described=described, distance=distance)


def _iter_alike(
    sides: tuple[Checkpoint, Checkpoint], pair: tuple[IndexTensor, IndexTensor], counts: Counts
) -> Iterator[Distance]:
    """Yield how far the elements of each block are whose digests differ; of no other anything is read."""
    parts = [dict(tensor.sharding) for tensor in pair]
    libraries = [Library(side) for side in sides]

    def iter_blocks() -> Iterator[tuple[list[StoredBox], int]]:
        for box in parts[0]:
            found = [
                side.stored_box(tensor, box, own[box]) for side, tensor, own in zip(sides, pair, parts, strict=True)
            ]
            digests = [np.frombuffer(stored.digests, f"V{DIGEST_NBYTES}") for stored in found]
            counts.block_count += len(digests[0])
            for block in np.flatnonzero(digests[0] != digests[1]).tolist():
                counts.differing_count += 1
                yield found, block

    def read(task: tuple[list[StoredBox], int]) -> tuple[Distance, int]:
        found, block = task
        read = [library.read_blocks(stored, [block]) for library, stored in zip(libraries, found, strict=True)]
        ((one,), _), ((other,), _) = read
        first = block * sides[0].manifest.origin.block_nbytes // DTYPES[pair[0].dtype].nbytes
        distance = measure(one, other, pair[0].dtype).within(found[0].box, first)
        return distance, sum(fetched.read_nbytes for _, fetched in read)

    for distance, read_nbytes in iter_ahead(read, iter_blocks()):
        counts.read_nbytes += read_nbytes
        yield distance


def _iter_otherwise(
    sides: tuple[Checkpoint, Checkpoint], pair: tuple[IndexTensor, IndexTensor], counts: Counts
) -> Iterator[Distance]:
    """Yield how far the elements of each chunk are, of tensors that are cut otherwise: everything is read."""
    one, other = pair
    element_nbytes = DTYPES[one.dtype].nbytes
    whole = Box.whole(one.global_shape)
    for chunk in iter_chunks(whole, element_nbytes, _CHUNK_NBYTES) if whole.element_count else ():
        contents = []
        for side, tensor in zip(sides, (one, other), strict=True):
            array = np.empty(chunk.shape, carrier_of(element_nbytes))
            counts.read_nbytes += side.fill(tensor, chunk, array).read_nbytes
            contents.append(array.reshape(-1).view(np.uint8).data)
        yield measure(contents[0], contents[1], one.dtype).within(chunk, 0)


# --- plain values -----------------------------------------------------------------------------------------------------


def _compare_leaves(one: Checkpoint, other: Checkpoint, fields: Collection[str]) -> Iterator[ValueDifference]:
    for key in sorted(one.leaves.keys() | other.leaves.keys(), key=sort_key):
        if key[0] in fields:
            values = [side.stored_leaf(side.leaves[key]).value if key in side.leaves else None for side in (one, other)]
            yield from _compare_trees(key, *values)


def _compare_streams(one: Checkpoint, other: Checkpoint) -> Iterator[ValueDifference]:
    for name, scope in sorted(one.streams.keys() | other.streams.keys()):
        entries = [side.streams.get((name, scope)) for side in (one, other)]
        found = [
            side.stored_stream(entry) if entry else None for side, entry in zip((one, other), entries, strict=True)
        ]
        if len({stream.kind for stream in found if stream is not None}) > 1:
            yield ValueDifference(field="rng", name=name, scope=scope, place="kind")
            continue
        states = [None if stream is None else stream.state for stream in found]
        yield from _compare_trees(("rng", name, scope), *states)


def _compare_trees(key: TensorKey, one: bytes | None, other: bytes | None) -> Iterator[ValueDifference]:
    """Yield the difference of two trees, given as bytes, where there is one."""
    if one == other:
        return
    field, name, scope = key
    only_in, place = None, ""
    if one is None or other is None:
        only_in = 0 if other is None else 1
    else:
        title = f"{field}:{name}"
        place = find_difference(parse_tree(one, where=title), parse_tree(other, where=title)) or ""
    yield ValueDifference(field=field, name=name, scope=scope, only_in=only_in, place=place)


# --- how far elements are from each other -----------------------------------------------------------------------------


#: Elements without an order: they differ or don't.
_NO_NUMBERS: Final = frozenset({"bool", "float4_e2m1fn_x2"})
#: A float without a sign, of which a step is a factor of two.
_UNSIGNED_FLOATS: Final = frozenset({"float8_e8m0fnu"})
#: The least number of each number of binary digits, from one digit on.
_POWERS: Final = np.array([1 << digits for digits in range(64)], np.uint64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An element that differs.

    Attributes:
        index: where it is in the tensor.
        values: what it is on either side; of a dtype without numbers, its bits.
        gap: how far these are from each other; infinite where one of them is no number.
    """

    index: tuple[int, ...]
    values: tuple[float | complex, float | complex]
    gap: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far elements are from each other.

    Attributes:
        element_count: how many were compared.
        changed_count: how many have other bits; a complex one counts once.
        nan_count: how many of these are no number on one side at least, and so are nowhere.
        max_abs: the greatest difference of two numbers; None where no two were compared.
        max_rel: the greatest ratio of such a difference to the larger of the two magnitudes; likewise.
        max_ulps: the greatest number of floats from one number to the other, both zeros being one; None of what isn't
            a float, and where no two were compared.
        ulp_counts: how many numbers are how many ULPs apart: at k those with k binary digits, so that at 0 are those
            that are equal but for the sign of a zero, at 1 those of one ULP, at 2 those of two or three.
        largest: those that are the farthest from each other, the farthest first; what is no number is infinitely far.
    """

    element_count: int = 0
    changed_count: int = 0
    nan_count: int = 0
    max_abs: float | int | None = None
    max_ulps: int | None = None
    ulp_counts: tuple[int, ...] = ()
    max_rel: float | None = None
    largest: tuple[Change, ...] = ()

    @property
    def median_ulps(self) -> int | None:
        """Return a number of ULPs, as few as binary digits tell, within which at least half of the changed ones are."""
        half, seen = sum(self.ulp_counts) / 2, 0
        for digits, count in enumerate(self.ulp_counts):
            seen += count
            if count and seen >= half:
                return min((1 << digits) - 1, self.max_ulps or 0)
        return None

    def add(self, other: Distance) -> Self:
        """Return the distance of these elements and others."""
        return type(self)(
            element_count=self.element_count + other.element_count,
            changed_count=self.changed_count + other.changed_count,
            nan_count=self.nan_count + other.nan_count,
            max_abs=_greater(self.max_abs, other.max_abs),
            max_ulps=_greater(self.max_ulps, other.max_ulps),
            ulp_counts=tuple(map(sum, itertools.zip_longest(self.ulp_counts, other.ulp_counts, fillvalue=0))),
            max_rel=_greater(self.max_rel, other.max_rel),
            largest=tuple(sorted((*self.largest, *other.largest), key=lambda one: -one.gap)[:_LARGEST_COUNT]),
        )

    def within(self, box: Box, first: int) -> Distance:
        """Return this distance of elements of a box, its changes at their indices in the tensor.

        Args:
            first: number of the first of the elements in the box.
        """
        return dataclasses.replace(
            self,
            largest=tuple(dataclasses.replace(one, index=_index(box, first + one.index[0])) for one in self.largest),
        )


def measure(one: memoryview, other: memoryview, dtype: str) -> Distance:
    """Return how far elements are from each other, given as bytes, as many of one as of the other.

    The index of a change is its number among them.

    >>> one, other = (np.array(values, "<f4").data.cast("B") for values in ([1, 2, 0.0], [1, 2.5, -0.0]))
    >>> found = measure(one, other, "float32")
    >>> found.changed_count, found.max_abs, found.max_rel, found.max_ulps, found.largest[0]
    (2, 0.5, 0.2, 2097152, Change(index=(1,), values=(2.0, 2.5), gap=0.5))
    """
    nbytes = DTYPES[dtype].nbytes
    count = one.nbytes // nbytes
    rows = [np.frombuffer(content, np.uint8).reshape(count, nbytes) for content in (one, other)]
    changed = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    found = Distance(element_count=count, changed_count=len(changed))
    if not len(changed):
        return found
    if dtype in _NO_NUMBERS:
        bits = [row[changed].reshape(-1) for row in rows]
        return dataclasses.replace(found, largest=_largest(changed, bits, np.ones(len(changed))))
    lane_nbytes = nbytes // 2 if dtype.startswith("complex") else nbytes
    words = [row[changed].reshape(-1).view(f"<u{lane_nbytes}") for row in rows]
    if not dtype.startswith(("float", "bfloat", "complex")):
        is_signed = dtype.startswith("int")
        gaps = _gaps(words[0], words[1], is_signed=is_signed)
        values = [lanes.view(f"<i{lane_nbytes}") if is_signed else lanes for lanes in words]
        return dataclasses.replace(
            found,
            max_abs=int(gaps.max()),
            max_rel=float(_ratios(gaps.astype(np.float64), *(lanes.astype(np.float64) for lanes in values)).max()),
            largest=_largest(changed, values, gaps.astype(np.float64)),
        )
    return found.add(_measure_floats(words[0], words[1], dtype, changed, lanes=nbytes // lane_nbytes))


def _measure_floats(
    one: NDArray[Any], other: NDArray[Any], dtype: str, changed: NDArray[Any], *, lanes: int
) -> Distance:
    """Return what is to be said of floats of which some bits differ, in each element of so many lanes.

    Args:
        changed: numbers of the elements.
    """
    import ml_dtypes  # noqa: PLC0415 - a twentieth of a second that other commands needn't pay

    kind = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    floats = np.dtype(getattr(ml_dtypes, kind, None) or kind)
    with np.errstate(invalid="ignore", over="ignore"):  # of NaNs, and of two that are infinitely far
        values = [words.view(floats).astype(np.float64) for words in (one, other)]
        gaps = np.abs(values[0] - values[1])
    are_numbers = ~(np.isnan(values[0]) | np.isnan(values[1]))
    nan_count = int((~are_numbers.reshape(-1, lanes).all(axis=1)).sum())
    compared = are_numbers & (one != other)  # of a complex one, the other half may be as it was
    far = np.where(compared, gaps, np.where(are_numbers, 0.0, np.inf)).reshape(-1, lanes).max(axis=1)
    elements = [lane.view(np.complex128) if lanes > 1 else lane for lane in values]
    largest = _largest(changed, elements, far)
    if not compared.any():
        return Distance(nan_count=nan_count, largest=largest)
    is_signed = kind not in _UNSIGNED_FLOATS
    ordered = [_in_order(words[compared]) if is_signed else words[compared] for words in (one, other)]
    steps = _gaps(ordered[0], ordered[1], is_signed=is_signed).astype(np.uint64)
    return Distance(
        nan_count=nan_count,
        max_abs=float(gaps[compared].max()),
        max_rel=float(_ratios(gaps[compared], *(lane[compared] for lane in values)).max()),
        largest=largest,
        max_ulps=int(steps.max()),
        ulp_counts=tuple(np.bincount(np.searchsorted(_POWERS, steps, "right")).tolist()),
    )


def _in_order(words: NDArray[Any]) -> NDArray[Any]:
    """Return integers that count floats from zero on, upwards and downwards; both zeros are 0."""
    bits = 8 * words.itemsize - 1
    signed = words.view(f"<i{words.itemsize}")
    magnitude = signed & ((1 << bits) - 1)
    ordered: NDArray[Any] = np.where(signed < 0, -magnitude, magnitude)
    return ordered


def _gaps(one: NDArray[Any], other: NDArray[Any], *, is_signed: bool) -> NDArray[Any]:
    """Return the differences of integers, which may be more than a signed one of their size holds."""
    width = one.itemsize
    if is_signed:
        one, other = one.view(f"<i{width}"), other.view(f"<i{width}")
    low, high = np.minimum(one, other), np.maximum(one, other)
    gaps: NDArray[Any] = high.view(f"<u{width}") - low.view(f"<u{width}")
    return gaps


def _ratios(gaps: NDArray[Any], one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """Return gaps as parts of the larger magnitude of each two; infinite where one is, 0 of two zeros."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios: NDArray[Any] = gaps / np.maximum(np.abs(one), np.abs(other))
    return np.where(np.isinf(gaps), np.inf, np.nan_to_num(ratios, nan=0.0))


def _largest(changed: NDArray[Any], values: list[NDArray[Any]], gaps: NDArray[Any]) -> tuple[Change, ...]:
    """Return the elements that are the farthest from each other, the farthest first, of equals the first."""
    order = np.argsort(-gaps, kind="stable")[:_LARGEST_COUNT].tolist()
    return tuple(
        Change(index=(int(changed[at]),), values=(values[0][at].item(), values[1][at].item()), gap=float(gaps[at]))
        for at in order
    )


def _index(box: Box, number: int) -> tuple[int, ...]:
    """Return the index in the tensor of an element of a box, counted through by rows."""
    within = np.unravel_index(number, box.shape) if box.shape else ()
    return tuple(begin + int(at) for begin, at in zip(box.begin, within, strict=True))


def _greater(one: Any, other: Any) -> Any:  # noqa: ANN401 - numbers of one kind
    """Return the greater of two, either of which may be None."""
    return max((value for value in (one, other) if value is not None), default=None)

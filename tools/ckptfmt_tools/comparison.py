"""Compare two checkpoints by the digests of their blocks, and by elements where digests differ.

Tensors that the two checkpoints divide into different boxes are compared by elements throughout.

Equal digests show that the same contents were saved. They don't show that the stored bytes are
still intact. Blocks with equal digests are read only by a comparison that first verifies both
sides.

The measure of the distance between elements (`measure`) is a pure function of the bytes.

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

#: Size in bytes of the chunks of a tensor that the two sides divide into different boxes.
_CHUNK_NBYTES: Final = 4 << 20
#: Number of changed elements kept for each tensor: the elements with the greatest gaps.
_LARGEST_COUNT: Final = 3
#: Properties of a tensor that must be equal for a comparison of elements, and further properties
#: that are reported when they differ.
_KIND: Final = ("dtype", "global_shape")
_REST: Final = ("storage", "aliases")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that differs between the two sides.

    Attributes:
        only_in: 0 or 1 if only this side has the tensor; None if both have the tensor.
        described: the properties that differ, such as ``dtype``, each with the values of both
            sides.
        distance: the distance between the elements; None where the elements can't be compared.
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
    """A plain value or an RNG stream that differs between the two sides.

    Attributes:
        only_in: 0 or 1 if only this side has the value; None if both have the value.
        place: path of the first difference in the value's tree; empty for the whole value.
    """

    field: str
    name: str
    scope: str
    only_in: int | None = None
    place: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class Counts:
    """The amount of work of a comparison.

    Attributes:
        tensor_count: number of tensors that both sides have with equal dtype and shape.
        block_count: number of their blocks that were compared by digest.
        differing_count: number of these blocks with different digests; only these were read.
        content_nbytes: total size in bytes of the compared tensors, on both sides.
        read_nbytes: bytes of shards and packs read to compare elements, on both sides, bases
            included.
    """

    tensor_count: int = 0
    block_count: int = 0
    differing_count: int = 0
    content_nbytes: int = 0
    read_nbytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The differences between two checkpoints, in the order of their indexes.

    Attributes:
        is_verified: whether every byte of both sides was read and compared with its digest. Without
            this, blocks with equal recorded digests count as equal, and their bytes were not read.
        damages: the errors found on each side. Damaged checkpoints aren't compared.
    """

    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    counts: Counts
    is_verified: bool = False
    damages: tuple[tuple[CkptError, ...], tuple[CkptError, ...]] = ((), ())

    @property
    def is_damaged(self) -> bool:
        """Whether at least one side was found damaged."""
        return any(self.damages)

    @property
    def is_same(self) -> bool:
        """Whether there is no difference and no damage.

        The answer describes the saved contents by their digests; if verified, also the stored
        bytes.
        """
        return not self.tensors and not self.values and not self.is_damaged


def compare(
    one: Checkpoint,
    other: Checkpoint,
    *,
    fields: Collection[str],
    verify: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Compare the contents of two checkpoints in constant memory.

    The two checkpoints may have different writers and different times of saving.

    Args:
        fields: names of the fields to compare, among the seven fields of a checkpoint.
        verify: whether to read every byte of both checkpoints first, in all fields, and the blocks
            that they need from their bases. Without this, blocks with equal recorded digests count
            as equal and aren't read.
        on_progress: called after each tensor with half the size in bytes of both sides together;
            with `verify`, also with the number of bytes just checked.

    Raises: IntegrityError; the errors of opening bases; FormatError; StoreError. With `verify`,
        damage is returned in the result instead.
    """
    if verify:
        damages = _verify(one, on_progress), _verify(other, on_progress)
        if any(damages):
            return Comparison(
                tensors=(), values=(), counts=Counts(), is_verified=True, damages=damages
            )
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
    return Comparison(
        tensors=tuple(tensors), values=tuple(values), counts=counts, is_verified=verify
    )


def _verify(side: Checkpoint, on_progress: Callable[[int], None] | None) -> tuple[CkptError, ...]:
    """Return the violations in a checkpoint, after a read of every byte."""
    report = Report(target=side.title, kind="checkpoint", on_progress=on_progress)
    verify_opened(side, report)
    return tuple(report.violations)


# --- tensors --------------------------------------------------------------------------------------


def _compare_tensor(
    sides: tuple[Checkpoint, Checkpoint],
    pair: tuple[IndexTensor | None, IndexTensor | None],
    counts: Counts,
) -> TensorDifference | None:
    """Return the difference of a tensor; None if both sides are equal."""
    one, other = pair
    shown = one or other
    assert shown is not None  # noqa: S101
    difference = TensorDifference(
        field=shown.field,
        name=shown.name,
        scope=shown.scope,
        dtype=shown.dtype,
        global_shape=shown.global_shape,
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
    distance = dataclasses.replace(
        distance, element_count=Box.whole(one.global_shape).element_count
    )
    return dataclasses.replace(difference, described=described, distance=distance)


def _iter_alike(
    sides: tuple[Checkpoint, Checkpoint], pair: tuple[IndexTensor, IndexTensor], counts: Counts
) -> Iterator[Distance]:
    """Yield the distance for each block with different digests.

    Blocks with equal digests aren't read.
    """
    parts = [dict(tensor.sharding) for tensor in pair]
    libraries = [Library(side) for side in sides]

    def iter_blocks() -> Iterator[tuple[list[StoredBox], int]]:
        for box in parts[0]:
            found = [
                side.stored_box(tensor, box, own[box])
                for side, tensor, own in zip(sides, pair, parts, strict=True)
            ]
            digests = [np.frombuffer(stored.digests, f"V{DIGEST_NBYTES}") for stored in found]
            counts.block_count += len(digests[0])
            for block in np.flatnonzero(digests[0] != digests[1]).tolist():
                counts.differing_count += 1
                yield found, block

    def read(task: tuple[list[StoredBox], int]) -> tuple[Distance, int]:
        found, block = task
        read = [
            library.read_blocks(stored, [block])
            for library, stored in zip(libraries, found, strict=True)
        ]
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
    """Yield the distance for each chunk of a tensor whose boxes differ between the sides.

    Every element is read.
    """
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


# --- plain values ---------------------------------------------------------------------------------


def _compare_leaves(
    one: Checkpoint, other: Checkpoint, fields: Collection[str]
) -> Iterator[ValueDifference]:
    for key in sorted(one.leaves.keys() | other.leaves.keys(), key=sort_key):
        if key[0] in fields:
            values = [
                side.stored_leaf(side.leaves[key]).value if key in side.leaves else None
                for side in (one, other)
            ]
            yield from _compare_trees(key, *values)


def _compare_streams(one: Checkpoint, other: Checkpoint) -> Iterator[ValueDifference]:
    for name, scope in sorted(one.streams.keys() | other.streams.keys()):
        entries = [side.streams.get((name, scope)) for side in (one, other)]
        found = [
            side.stored_stream(entry) if entry else None
            for side, entry in zip((one, other), entries, strict=True)
        ]
        if len({stream.kind for stream in found if stream is not None}) > 1:
            yield ValueDifference(field="rng", name=name, scope=scope, place="kind")
            continue
        states = [None if stream is None else stream.state for stream in found]
        yield from _compare_trees(("rng", name, scope), *states)


def _compare_trees(
    key: TensorKey, one: bytes | None, other: bytes | None
) -> Iterator[ValueDifference]:
    """Yield the difference of two trees, given as bytes; yield no item if they are equal."""
    if one == other:
        return
    field, name, scope = key
    only_in = None
    place = ""
    if one is None or other is None:
        only_in = 0 if other is None else 1
    else:
        title = f"{field}:{name}"
        place = find_difference(parse_tree(one, where=title), parse_tree(other, where=title)) or ""
    yield ValueDifference(field=field, name=name, scope=scope, only_in=only_in, place=place)


# --- distance between elements --------------------------------------------------------------------


#: Dtypes without an order of elements: two elements are equal or different, without a distance.
_NO_NUMBERS: Final = frozenset({"bool", "float4_e2m1fn_x2"})
#: Unsigned floats, where neighbours differ by a factor of two.
_UNSIGNED_FLOATS: Final = frozenset({"float8_e8m0fnu"})
#: The least integers with 1, 2, 3, ... binary digits.
_POWERS: Final = np.array([1 << digits for digits in range(64)], np.uint64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A changed element.

    Attributes:
        index: the element's index in the tensor.
        values: the element's values on both sides; the bits for a dtype without numbers.
        gap: the absolute difference; infinite if one value is NaN; 1 for a dtype without numbers.
    """

    index: tuple[int, ...]
    values: tuple[float | complex, float | complex]
    gap: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """The distance between elements of two tensors.

    Attributes:
        element_count: number of compared elements.
        changed_count: number of elements with different bits; a complex element counts once.
        nan_count: number of changed elements with a NaN on at least one side. NaNs count neither in
            the maxima nor in `ulp_counts`.
        max_abs: greatest absolute difference of two numbers; None where no two numbers were
            compared.
        max_rel: greatest ratio of a difference to the larger magnitude of the two numbers; None
            where no two numbers were compared.
        max_ulps: greatest number of steps (ULPs) between two floats, with both zeros as one value;
            None for dtypes other than floats, and where no two numbers were compared.
        ulp_counts: histogram of the distances in ULPs, by number of binary digits. Bin 0 counts
            distance 0 (zeros of different sign), bin 1 distance 1, bin 2 distances 2 and 3, and so
            on.
        largest: the changes with the greatest gaps, greatest first; a change with a NaN has an
            infinite gap.
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
        """Return an upper bound of the median distance in ULPs, as exact as `ulp_counts` permits.

        At least half of the changed numbers lie within this distance. None where no floats were
        compared.
        """
        half = sum(self.ulp_counts) / 2
        seen = 0
        for digits, count in enumerate(self.ulp_counts):
            seen += count
            if count and seen >= half:
                return min((1 << digits) - 1, self.max_ulps or 0)
        return None

    def add(self, other: Distance) -> Self:
        """Return the distance of the elements of both operands together."""
        return type(self)(
            element_count=self.element_count + other.element_count,
            changed_count=self.changed_count + other.changed_count,
            nan_count=self.nan_count + other.nan_count,
            max_abs=_greater(self.max_abs, other.max_abs),
            max_ulps=_greater(self.max_ulps, other.max_ulps),
            ulp_counts=tuple(
                map(sum, itertools.zip_longest(self.ulp_counts, other.ulp_counts, fillvalue=0))
            ),
            max_rel=_greater(self.max_rel, other.max_rel),
            largest=tuple(
                sorted((*self.largest, *other.largest), key=lambda one: -one.gap)[:_LARGEST_COUNT]
            ),
        )

    def within(self, box: Box, first: int) -> Distance:
        """Return this distance with the changes at their indices in the tensor.

        Args:
            box: the box of the elements.
            first: number of the first element within the box.
        """
        return dataclasses.replace(
            self,
            largest=tuple(
                dataclasses.replace(one, index=_index(box, first + one.index[0]))
                for one in self.largest
            ),
        )


def measure(one: memoryview, other: memoryview, dtype: str) -> Distance:
    """Return the distance between two equally long sequences of elements, given as bytes.

    The index of a change is its number in the sequence.

    >>> one, other = (np.array(values, "<f4").data.cast("B") for values in ([1, 2, 0.0], [1, 2.5,
    ...     -0.0]))
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
            max_rel=float(
                _ratios(
                    gaps.astype(np.float64), *(lanes.astype(np.float64) for lanes in values)
                ).max()
            ),
            largest=_largest(changed, values, gaps.astype(np.float64)),
        )
    return found.add(
        _measure_floats(words[0], words[1], dtype, changed, lanes=nbytes // lane_nbytes)
    )


def _measure_floats(
    one: NDArray[Any], other: NDArray[Any], dtype: str, changed: NDArray[Any], *, lanes: int
) -> Distance:
    """Return the distance of changed float elements.

    Args:
        changed: numbers of the changed elements.
        lanes: number of floats in an element: 2 for complex dtypes, else 1.
    """
    import ml_dtypes  # noqa: PLC0415

    kind = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}.get(
        dtype, dtype
    )
    floats = np.dtype(getattr(ml_dtypes, kind, None) or kind)
    with np.errstate(invalid="ignore", over="ignore"):  # NaNs, and differences that overflow
        values = [words.view(floats).astype(np.float64) for words in (one, other)]
        gaps = np.abs(values[0] - values[1])
    are_numbers = ~(np.isnan(values[0]) | np.isnan(values[1]))
    nan_count = int((~are_numbers.reshape(-1, lanes).all(axis=1)).sum())
    compared = are_numbers & (one != other)  # in a complex element, only one half may have changed
    far = (
        np.where(compared, gaps, np.where(are_numbers, 0.0, np.inf)).reshape(-1, lanes).max(axis=1)
    )
    elements = [lane.view(np.complex128) if lanes > 1 else lane for lane in values]
    largest = _largest(changed, elements, far)
    if not compared.any():
        return Distance(nan_count=nan_count, largest=largest)
    is_signed = kind not in _UNSIGNED_FLOATS
    ordered = [
        _in_order(words[compared]) if is_signed else words[compared] for words in (one, other)
    ]
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
    """Return integers that number the floats in their order, with 0 for both zeros."""
    bits = 8 * words.itemsize - 1
    signed = words.view(f"<i{words.itemsize}")
    magnitude = signed & ((1 << bits) - 1)
    ordered: NDArray[Any] = np.where(signed < 0, -magnitude, magnitude)
    return ordered


def _gaps(one: NDArray[Any], other: NDArray[Any], *, is_signed: bool) -> NDArray[Any]:
    """Return the absolute differences of integers, as unsigned integers of the same size.

    A difference may exceed the signed range.
    """
    width = one.itemsize
    if is_signed:
        one = one.view(f"<i{width}")
        other = other.view(f"<i{width}")
    low = np.minimum(one, other)
    high = np.maximum(one, other)
    gaps: NDArray[Any] = high.view(f"<u{width}") - low.view(f"<u{width}")
    return gaps


def _ratios(gaps: NDArray[Any], one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """Return each gap divided by the larger magnitude of the pair.

    The ratio is infinite for an infinite gap, and 0 for two zeros.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios: NDArray[Any] = gaps / np.maximum(np.abs(one), np.abs(other))
    return np.where(np.isinf(gaps), np.inf, np.nan_to_num(ratios, nan=0.0))


def _largest(
    changed: NDArray[Any], values: list[NDArray[Any]], gaps: NDArray[Any]
) -> tuple[Change, ...]:
    """Return the changes with the greatest gaps, greatest first.

    Equal gaps stay in the order of the elements.
    """
    order = np.argsort(-gaps, kind="stable")[:_LARGEST_COUNT].tolist()
    return tuple(
        Change(
            index=(int(changed[at]),),
            values=(values[0][at].item(), values[1][at].item()),
            gap=float(gaps[at]),
        )
        for at in order
    )


def _index(box: Box, number: int) -> tuple[int, ...]:
    """Return the index in the tensor of the element with a row-major number in a box."""
    within = np.unravel_index(number, box.shape) if box.shape else ()
    return tuple(begin + int(at) for begin, at in zip(box.begin, within, strict=True))


def _greater(one: Any, other: Any) -> Any:
    """Return the greater of two values, either of which may be None; None if both are None."""
    return max((value for value in (one, other) if value is not None), default=None)

"""Who writes what."""

import dataclasses
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.box import Box
from ckptfmt.documents.holdings import Structure
from ckptfmt.documents.packed import Strings
from ckptfmt.documents.tables import TensorKey
from ckptfmt.errors import CkptError, Code
from ckptfmt.layout.assignment import assign_writers
from ckptfmt.write.image import gather_boxes


@dataclasses.dataclass(frozen=True)
class Held:
    """Boxes of a tensor that a writer holds."""

    name: str
    boxes: tuple[Box, ...]
    dtype: str = "uint8"
    declared_by: str = ""
    field: str = "weights"
    scope: str = "global"
    storage: str = "persistent"
    aliases: tuple[str, ...] = ()

    @property
    def global_shape(self):
        return tuple(100 for _ in self.boxes[0].shape)


def structure_of(held):
    """The structure of a writer, and the pieces in its order."""
    held = sorted(held, key=lambda one: one.name.encode())
    return Structure(
        **gather_boxes(held).members(),
        declared_by=Strings.of([one.declared_by for one in held]),
        replica=[bool(one.declared_by) for one in held],
    )


def written_by(structures):
    """What each writer writes: name, box and declarer."""
    return [
        {
            (key[1], box, declared)
            for (key, box, declared, _), flag in zip(one.iter_pieces(), flags, strict=True)
            if flag
        }
        for one, flags in zip(structures, assign_writers(structures), strict=True)
    ]


def names_of(held):
    """The names that each writer writes, where each tensor is one piece of so many bytes."""
    structures = [
        structure_of([Held(name, (Box((0,), (nbytes,)),)) for name, nbytes in of_writer])
        for of_writer in held
    ]
    return [sorted(name for name, _, _ in found) for found in written_by(structures)]


def assign_one_by_one(structures):
    """The rule piece by piece, as the module's columns follow it."""
    holders: dict[tuple[TensorKey, Box, str], list[int]] = {}
    sizes: dict[tuple[TensorKey, Box, str], int] = {}
    for writer, one in enumerate(structures):
        for key, box, declared, nbytes in one.iter_pieces():
            piece = key, box, declared
            holders.setdefault(piece, []).append(writer)
            sizes[piece] = nbytes
    load = [0] * len(structures)
    written: list[set[tuple[str, Box, str]]] = [set() for _ in structures]
    for piece in sorted(holders, key=lambda one: (len(holders[one]) > 1, -sizes[one], one)):
        writer = min(holders[piece], key=lambda holder: (load[holder], holder))
        load[writer] += sizes[piece]
        (_, name, _), box, declared = piece
        written[writer].add((name, box, declared))
    return written


@st.composite
def boxes_of(draw, ndim):
    begin = draw(st.lists(st.integers(0, 3), min_size=ndim, max_size=ndim))
    shape = draw(st.lists(st.integers(0, 3), min_size=ndim, max_size=ndim))
    return Box(tuple(begin), tuple(shape))


@st.composite
def launches(draw):
    """What up to five writers hold: boxes of tensors of 0 to 3 dimensions, with declarers."""
    tensors = []
    for number in range(draw(st.integers(0, 6))):
        boxes = draw(
            st.lists(boxes_of(draw(st.integers(0, 3))), min_size=1, max_size=4, unique=True)
        )
        boxes = [box for box in boxes if len(box.shape) == len(boxes[0].shape)]
        tensors.append((draw(st.sampled_from("aéz")) + str(number), boxes))
    return [
        [
            Held(
                name,
                tuple(draw(st.lists(st.sampled_from(boxes), min_size=1, unique=True))),
                declared_by=draw(st.sampled_from(["", "", "mesh", "caller"])),
            )
            for name, boxes in tensors
            if draw(st.booleans())
        ]
        for _ in range(draw(st.integers(1, 5)))
    ]


@given(launches())
def test_each_piece_is_written_once_by_a_holder_by_the_rule(launch):
    structures = [structure_of(of_writer) for of_writer in launch]
    written = written_by(structures)
    assert written == assign_one_by_one(structures)
    pieces = [piece for of_writer in written for piece in of_writer]
    assert len(pieces) == len(set(pieces))
    assert set(pieces) == {
        (key[1], box, declared) for one in structures for key, box, declared, _ in one.iter_pieces()
    }


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 6))
def test_full_replicas_are_spread_within_the_bound_of_largest_first(sizes, writer_count):
    held = [[(f"w{key}", nbytes) for key, nbytes in enumerate(sizes)]] * writer_count
    load = [sum(sizes[int(name[1:])] for name in names) for names in names_of(held)]
    # Largest first leaves the fullest at most one item above the emptiest.
    assert max(load) - min(load) <= max(sizes, default=0)


def test_a_sole_holder_is_counted_before_the_others_are_balanced():
    held = [[("only", 10), ("a", 12)], [("a", 12), ("b", 1)]]
    assert names_of(held) == [["only"], ["a", "b"]]


def test_the_largest_goes_first():
    assert names_of([[("a", 1), ("b", 1), ("c", 2)]] * 2) == [["c"], ["a", "b"]]


def test_ties_go_to_the_lower_key_and_writer():
    assert names_of([[(key, 1) for key in "dcba"]] * 3) == [["a", "d"], ["b"], ["c"]]


def test_nobody_holds_nothing():
    assert assign_writers([]) == ()
    assert names_of([[], []]) == [[], []]


def test_a_piece_of_two_declarers_is_written_once_for_each():
    box = Box((0,), (4,))
    held = [[Held("w", (box,), declared_by=name)] for name in ("mesh", "mesh", "caller")]
    assert written_by([structure_of(one) for one in held]) == [
        {("w", box, "mesh")}, set(), {("w", box, "caller")}
    ]  # fmt: skip


def test_sizes_that_differ_are_refused():
    held = [[Held("b", (Box((0,), (2,)),), dtype=dtype)] for dtype in ("uint8", "int16")]
    with pytest.raises(CkptError, match="2 bytes on writer 0 and 4 bytes on writer 1") as raised:
        assign_writers([structure_of(one) for one in held])
    assert raised.value.code is Code.TENSOR_DIVERGED
    assert "'b'" in str(raised.value)


def test_a_piece_listed_twice_is_refused():
    box = Box((0,), (2,))
    held = [[Held("a", (box,))], [Held("a", (Box((1,), (2,)),)), Held("b", (box, box))]]
    with pytest.raises(CkptError, match="writer 1 lists weights 'b'") as raised:
        assign_writers([structure_of(one) for one in held])
    assert raised.value.code is Code.ARGUMENT


@pytest.mark.slow
def test_many_pieces_on_many_writers_take_seconds():
    draw = random.Random(0)
    one = structure_of(
        [Held(f"w{key}", (Box((0,), (draw.randrange(1 << 20),)),)) for key in range(2000)]
    )
    start = time.process_time()
    assign_writers([one] * 256)
    assert time.process_time() - start < 40

"""The merge of parts into an index: a pure function, and each rule of it."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.box import Box
from ckptfmt.digest import block_digests, digest_bytes
from ckptfmt.documents.index import Index
from ckptfmt.documents.part import Part
from ckptfmt.errors import CkptError, Code, LayoutError
from ckptfmt.layout.merge import PartFileEntry, check_index_tiling, merge_parts, summarise
from tests.builders import code_of, error_of, leaf, origin, stream
from tests.layout.merge_oracle import merge_tensors
from tests.part_rows import RowBox, RowExtent, RowTensor, holdings_of

WHOLE = Box((0,), (4,))
HALVES = (Box((0,), (2,)), Box((2,), (2,)))
A, B = b"abcd", b"abcx"


def held(box, content=None, *, written=True, replica=False, block_nbytes=4096):
    """Return a piece as a part has it; without `content` it has no digests."""
    digests = b"" if content is None else block_digests(memoryview(content), block_nbytes)
    extents = (
        (RowExtent(block_begin=0, block_count=len(digests) // 32, file=0, byte_begin=64, key="w"),)
        if written
        else ()
    )
    return RowBox(box=box, replica=replica, digests=digests, extents=extents)


def tensor(*boxes, name="w", **members):
    own = {
        "field": "weights",
        "scope": "global",
        "dtype": "int8",
        "global_shape": (4,),
        "storage": "persistent",
        "aliases": (),
    }
    return RowTensor(name=name, boxes=boxes, **{**own, **members})


def merged(*parts, **members):
    """Merge parts, each given as a tuple of tensors, or as the members of a part."""
    made = origin(writer_count=len(parts), **members)
    entries = []
    for writer, part in enumerate(parts):
        given_members = dict(part) if isinstance(part, dict) else {"tensors": part}
        holdings = holdings_of(given_members.pop("tensors", ()))
        own = {
            "origin": made,
            "writer": writer,
            "saved_unix_s": 10 + writer,
            "files": (),
            "holdings": holdings,
            "streams": (),
        }
        whole = Part(**{**own, "leaves": (), "absent": {}, **given_members})
        entries.append(
            PartFileEntry(part=whole, digest=digest_bytes(bytes([writer])), nbytes=100 + writer)
        )
    return merge_parts(entries)


def test_the_pieces_of_a_tensor_are_found_in_all_parts():
    """REQ-CMT-015, REQ-IDX-004."""
    index = merged((tensor(held(HALVES[1], b"cd")),), (tensor(held(HALVES[0], b"ab")),))
    assert tuple(index.tensors[0].sharding) == ((HALVES[0], 1), (HALVES[1], 0))
    assert [(entry.nbytes, entry.digest) for entry in index.parts] == [
        (100, digest_bytes(b"\0")),
        (101, digest_bytes(b"\1")),
    ]


def test_the_lowest_of_several_writers_is_named():
    """REQ-CMT-016."""
    parts = [(tensor(held(WHOLE, A, written=written)),) for written in (False, True, True)]
    assert tuple(merged(*parts).tensors[0].sharding) == ((WHOLE, 1),)


def test_the_clock_is_that_of_part_0():
    """REQ-CMT-018."""
    assert merged((), ()).saved_unix_s == 10


def test_the_index_depends_on_nothing_but_the_parts():
    """REQ-IDX-005: the same bytes from any merge, and its own parser takes them."""
    parts = [
        (tensor(held(HALVES[writer], b"ab")), tensor(held(WHOLE, A), name="a"))
        for writer in range(2)
    ]
    contents = {merged(*parts).dump() for _ in range(3)}
    assert len(contents) == 1
    content, digest = contents.pop()
    assert Index.parse(content, where="x", digest=digest) == merged(*parts)


REFUSED = {
    "94 replicas differ": (
        [(tensor(held(WHOLE, A)),), (tensor(held(WHOLE, B)),)],
        Code.REPLICA_DIVERGED,
        "REQ-CMT-012",
        ["'w'", "block 0", "0 and 1"],
    ),
    "94 declared replicas differ": (
        [(tensor(held(WHOLE, A, replica=True)),), (tensor(held(WHOLE, B, replica=True)),)],
        Code.REPLICA_DIVERGED,
        "REQ-CMT-012",
        ["'w'", "0 and 1"],
    ),
    "94 the third replica differs": (
        [
            (tensor(held(WHOLE, A)),),
            (tensor(held(WHOLE, A, written=False)),),
            (tensor(held(WHOLE, B, written=False)),),
        ],
        Code.REPLICA_DIVERGED,
        "REQ-CMT-012",
        ["0 and 2"],
    ),
    "94 an undeclared replica without digests": (
        [(tensor(held(WHOLE, A)),), (tensor(held(WHOLE, None, written=False, replica=True)),)],
        Code.REPLICA_DIVERGED,
        "REQ-CMT-012",
        ["writer 1", "'w'"],
    ),
    "held, and written by nobody": (
        [(tensor(held(WHOLE, A, written=False)),), (tensor(held(WHOLE, A, written=False)),)],
        Code.HELD_NOT_WRITTEN,
        "REQ-CMT-013",
        ["writers 0, 1", "'w'"],
    ),
    "declared, and written by nobody": (
        [(tensor(held(WHOLE, None, written=False, replica=True)),)] * 2,
        Code.HELD_NOT_WRITTEN,
        "REQ-CMT-013",
        ["writers 0, 1"],
    ),
    "one of two pieces written by nobody": (
        [(tensor(held(HALVES[0], b"ab")),), (tensor(held(HALVES[1], b"cd", written=False)),)],
        Code.HELD_NOT_WRITTEN,
        "REQ-CMT-013",
        ["writers 1", "'w'"],
    ),
    "89 boxes overlap": (
        [(tensor(held(WHOLE, A)),), (tensor(held(HALVES[0], b"ab")),)],
        Code.TILING_OVERLAP,
        "REQ-IDX-004",
        ["(0,)"],
    ),
    "90 a gap": ([(tensor(held(HALVES[0], b"ab")),)], Code.TILING_GAP, "REQ-IDX-004", ["(2,)"]),
    "91 nobody holds anything": (
        [(tensor(),), (tensor(),)],
        Code.TILING_GAP,
        "REQ-IDX-004",
        ["(0,)"],
    ),
    "91 only an empty box is held": (
        [(tensor(held(Box((0,), (0,)), b"")),)],
        Code.TILING_GAP,
        "REQ-IDX-004",
        ["(0,)"],
    ),
    "one box twice on a writer": (
        [(tensor(held(WHOLE, A), held(WHOLE, A)),)],
        Code.TILING_OVERLAP,
        "REQ-PRT-011",
        ["writer 0"],
    ),
    "92 another dtype": (
        [(tensor(held(HALVES[0], b"ab")),), (tensor(held(HALVES[1], b"cd"), dtype="uint8"),)],
        Code.TENSOR_DIVERGED,
        "REQ-CMT-011",
        ["int8 on writer 0", "uint8 on writer 1"],
    ),
    "92 another shape": (
        [(tensor(held(HALVES[0], b"ab")),), (tensor(held(HALVES[1], b"cd"), global_shape=(5,)),)],
        Code.TENSOR_DIVERGED,
        "REQ-CMT-011",
        ["(4,) on writer 0", "(5,) on writer 1"],
    ),
    "another storage": (
        [
            (tensor(held(HALVES[0], b"ab")),),
            (),
            (tensor(held(HALVES[1], b"cd"), storage="non-persistent"),),
        ],
        Code.TENSOR_DIVERGED,
        "REQ-CMT-011",
        ["writer 0", "writer 2"],
    ),
    "leaves differ": (
        [{"leaves": (leaf("config", {"a": [1, {"lr": x}]}, name="n"),)} for x in (1, 2)],
        Code.LEAF_DIVERGED,
        "REQ-CMT-014",
        ["/a/1/lr", "0 and 1"],
    ),
    "leaves differ in a bit": (
        [{"leaves": (leaf("config", {"a": x}),)} for x in (0.0, -0.0)],
        Code.LEAF_DIVERGED,
        "REQ-CMT-014",
        ["/a"],
    ),
    "leaves differ in order": (
        [{"leaves": (leaf("config", x),)} for x in ({1: 2, 3: 4}, {3: 4, 1: 2})],
        Code.LEAF_DIVERGED,
        "REQ-CMT-014",
        [],
    ),
    "leaves differ in a type": (
        [{"leaves": (leaf("config", x),)} for x in ([1], (1,))],
        Code.LEAF_DIVERGED,
        "REQ-CMT-014",
        ["0 and 1"],
    ),
    "streams differ": (
        [{"streams": (stream("python", x, scope="global"),)} for x in (1, 2)],
        Code.LEAF_DIVERGED,
        "REQ-CMT-014",
        ["0 and 1"],
    ),
    "streams differ in kind": (
        [{"streams": (stream("python", 1, scope="global", kind=kind),)} for kind in "ab"],
        Code.LEAF_DIVERGED,
        "REQ-CMT-014",
        [],
    ),
    "95 a writer twice": (
        [{"writer": 0}, {"writer": 0}],
        Code.WRITERS_DIVERGED,
        "REQ-CMT-010",
        ["writer"],
    ),
    "33 a part of another step": (
        [{}, {"origin": origin(writer_count=2, step=9)}],
        Code.WRITERS_DIVERGED,
        "REQ-CMT-010",
        ["step"],
    ),
    "a part of another attempt": (
        [{}, {"origin": origin(writer_count=2, attempt="f" * 16)}],
        Code.WRITERS_DIVERGED,
        "REQ-CMT-010",
        ["attempt"],
    ),
    "a part of another start": (
        [{}, {"origin": origin(writer_count=2, nonce="f" * 32)}],
        Code.WRITERS_DIVERGED,
        "REQ-CMT-010",
        ["nonce"],
    ),
    "a part of more writers": (
        [{}, {"origin": origin(writer_count=3)}],
        Code.WRITERS_DIVERGED,
        "REQ-CMT-010",
        ["writer_count"],
    ),
}


@pytest.mark.parametrize(("parts", "code", "requirement", "named"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_together_is_refused(parts, code, requirement, named):
    """Rows 33, 88 to 95."""
    error = error_of(lambda: merged(*parts))
    assert (error.code, error.requirement, type(error)) == (code, requirement, LayoutError)
    for text in named:
        assert text in str(error)


def test_a_part_too_few_is_missing():
    """Row 95; REQ-CMT-010."""
    entry = PartFileEntry(
        part=Part(
            origin=origin(writer_count=2),
            writer=0,
            saved_unix_s=0,
            files=(),
            holdings=holdings_of(()),
            streams=(),
            leaves=(),
            absent={},
        ),
        digest=bytes(32),
        nbytes=1,
    )
    assert code_of(lambda: merge_parts([entry])) == Code.WRITERS_MISSING


def test_the_block_that_differs_is_named():
    """REQ-CMT-012: number and first byte."""
    contents = [bytes(10_000), bytes(9000) + b"x" + bytes(999)]
    whole = Box((0,), (10_000,))
    parts = [(tensor(held(whole, content), global_shape=(10_000,)),) for content in contents]
    error = error_of(lambda: merged(*parts))
    assert "block 2 (from byte 8192)" in error.detail


@pytest.mark.parametrize(
    "boxes",
    [
        (held(WHOLE, A, replica=True), held(WHOLE, None, written=False, replica=True)),
        (held(WHOLE, None, written=False, replica=True), held(WHOLE, A, replica=True)),
        (held(WHOLE, A), held(WHOLE, A, written=False)),
        (held(WHOLE, A), held(WHOLE, A, written=False, replica=True)),
        (held(WHOLE, A), held(WHOLE, A)),
    ],
)
def test_replicas_that_are_proved_or_declared_are_one(boxes):
    """REQ-CMT-012."""
    index = merged(*((tensor(box),) for box in boxes))
    assert [box for box, _ in index.tensors[0].sharding] == [WHOLE]


def test_empty_boxes_of_a_tensor_with_elements_do_not_count():
    """REQ-CMT-013: what a rank holds nothing of, nobody has to write."""
    empty = held(Box((4,), (0,)), b"", written=False)
    index = merged((tensor(held(WHOLE, A)),), (tensor(empty),))
    assert tuple(index.tensors[0].sharding) == ((WHOLE, 0),)


def test_tensors_without_elements():
    """REQ-IDX-004: they are tiled by nothing; boxes without elements may be there."""
    for boxes in ((), (held(Box((0, 0), (0, 3)), b""),)):
        index = merged((tensor(*boxes, global_shape=(0, 3)),))
        assert index.tensors[0].nbytes == 0
        assert len(index.tensors[0].sharding) == len(boxes)


def test_scalars():
    """REQ-IDX-004."""
    assert tuple(
        merged((tensor(held(Box((), ()), b"a"), global_shape=()),)).tensors[0].sharding
    ) == ((Box((), ()), 0),)
    assert code_of(lambda: merged((tensor(global_shape=()),))) == Code.TILING_GAP


def test_aliases_are_those_that_any_part_gives():
    """REQ-CMT-011."""
    index = merged(
        (tensor(held(HALVES[0], b"ab"), aliases=("b", "é")),),
        (tensor(held(HALVES[1], b"cd"), aliases=("a", "b")),),
    )
    assert index.tensors[0].aliases == ("a", "b", "é")


def test_scopes_keep_tensors_apart():
    """REQ-IDX-006: each worker has its own."""
    index = merged(
        *((tensor(held(WHOLE, content), scope=f"lw/{n}"),) for n, content in enumerate((A, B)))
    )
    assert [(item.scope, item.sharding[0][1]) for item in index.tensors] == [
        ("lw/0", 0),
        ("lw/1", 1),
    ]


def test_leaves_and_streams_name_the_lowest_writer():
    """REQ-CMT-014."""
    parts: list[dict[str, object]] = [{}, {}, {}]
    for writer in (1, 2):
        parts[writer] = {
            "leaves": (leaf("config", 1),),
            "streams": (stream("s", 1, scope="global"),),
        }
    index = merged(*parts)
    assert [item.part for item in (*index.leaves, *index.streams)] == [1, 1]


def test_a_field_is_absent_if_nobody_has_it_and_all_say_why():
    """REQ-CMT-017, REQ-MAN-003."""
    config = leaf("config", 1)
    index = merged(
        {"absent": {"data": "one", "rng": "one", "config": "one"}, "leaves": ()},
        {"absent": {"data": "two", "config": "two"}, "leaves": (config,)},
    )
    assert index.absent == {"data": "one"}
    summaries = summarise(index)
    assert summaries["data"].reason == "one"
    assert (summaries["rng"].reason, summaries["rng"].stream_count) == (None, 0)
    assert (summaries["config"].reason, summaries["config"].leaf_count) == (None, 1)


def test_summaries_count():
    """REQ-MAN-006."""
    index = merged(
        {
            "tensors": (
                tensor(held(WHOLE, A)),
                tensor(held(WHOLE, A * 4), name="x", dtype="int32", field="data"),
            ),
            "leaves": (leaf("data", 1), leaf("data", 1, name="b")),
            "streams": (stream("s", 1),),
        }
    )
    summaries = summarise(index)
    assert (summaries["weights"].tensor_count, summaries["weights"].nbytes) == (1, 4)
    assert (
        summaries["data"].tensor_count,
        summaries["data"].nbytes,
        summaries["data"].leaf_count,
    ) == (1, 16, 2)
    assert [summaries[field].stream_count for field in ("rng", "data")] == [1, 0]


def cut(shape, rng):
    """Cut a box at random into pieces that tile it."""
    boxes = [Box.whole(shape)]
    for _ in range(rng.randrange(6)):
        box = boxes.pop(rng.randrange(len(boxes)))
        axes = [axis for axis, extent in enumerate(box.shape) if extent > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = rng.choice(axes)
        at = rng.randrange(1, box.shape[axis])
        for begin, extent in ((0, at), (at, box.shape[axis] - at)):
            boxes.append(
                Box(
                    (*box.begin[:axis], box.begin[axis] + begin, *box.begin[axis + 1 :]),
                    (*box.shape[:axis], extent, *box.shape[axis + 1 :]),
                )
            )
    return boxes


@given(
    st.lists(st.integers(1, 5), max_size=3).map(tuple),
    st.randoms(use_true_random=False),
    st.integers(1, 4),
)
def test_random_tilings_and_replicas_against_an_oracle(shape, rng, writers):
    """REQ-CMT-012, REQ-CMT-013, REQ-CMT-015, REQ-CMT-016."""
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int8).reshape(shape)
    boxes = cut(shape, rng)
    parts: list[list[RowBox]] = [[] for _ in range(writers)]
    lowest = {}
    for box in boxes:
        holders = rng.sample(range(writers), rng.randint(1, writers))
        wrote = rng.sample(holders, rng.randint(0, len(holders)))
        content = array[box.relative_to(Box.whole(shape))].tobytes()
        for holder in holders:
            parts[holder].append(held(box, content, written=holder in wrote))
        lowest[box] = min(wrote, default=None)
    dropped = rng.random() < 0.3 and boxes[0]
    given_parts = [
        (tensor(*(b for b in part if b.box != dropped), global_shape=shape),) for part in parts
    ]
    try:
        index = merged(*given_parts)
    except CkptError as error:
        unwritten = [box for box, writer in lowest.items() if writer is None and box != dropped]
        assert error.code == (Code.HELD_NOT_WRITTEN if unwritten else Code.TILING_GAP)
        assert unwritten or dropped
        return
    assert dict(index.tensors[0].sharding) == lowest
    assert not dropped
    check_index_tiling(index)


NAMES = ("w", "a.b", "é")


@st.composite
def attempts(draw):
    """What some writers hold of some tensors: random tilings, replicas, and now and then something wrong."""
    writers = draw(st.integers(1, 4))
    rng = draw(st.randoms(use_true_random=False))
    parts: list[list[RowTensor]] = [[] for _ in range(writers)]
    for name in NAMES[: draw(st.integers(1, 3))]:
        shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
        boxes = cut(shape, rng)
        held_boxes: list[list[RowBox]] = [[] for _ in range(writers)]
        for box in boxes:
            replica = rng.random() < 0.5
            content = rng.randbytes(box.element_count)
            for holder in rng.sample(range(writers), rng.randint(1, writers)):
                own = content if rng.random() < 0.97 else content[::-1]
                digested = rng.random() < 0.8 or not replica
                written = rng.random() < 0.7
                found = held(
                    box, own if digested or written else None, written=written, replica=replica
                )
                held_boxes[holder] += [found] * (1 + (rng.random() < 0.02))
        wrong = rng.choice(["", "", "", "drop", "shift", "empty"])
        some = next((one for one in held_boxes if one), None)
        if wrong == "drop" and some:
            some.pop()
        if wrong == "shift" and some and shape:
            box = some[-1].box
            some[-1] = held(
                Box(tuple(b // 2 for b in box.begin), box.shape), bytes(box.element_count)
            )
        if wrong == "empty":
            held_boxes[0].append(held(Box((0,) * len(shape), (0,) * len(shape)), b""))
        for writer in range(writers):
            rng.shuffle(held_boxes[writer])
            if held_boxes[writer] or rng.random() < 0.5:
                dtype = "int8" if rng.random() < 0.98 else "uint8"
                members = {
                    "dtype": dtype,
                    "aliases": rng.choice([(), ("x",), ("x", "y")]) if name == "w" else (),
                }
                parts[writer].append(
                    tensor(*held_boxes[writer], name=name, global_shape=shape, **members)
                )
    for own in parts:
        rng.shuffle(own)
    return [tuple(own) for own in parts]


def outcome(merge):
    """The tensors, or which error says what of which of them."""
    try:
        return merge()
    except CkptError as error:
        return error.code, error.requirement, error.where


@given(attempts())
def test_the_merge_by_columns_is_the_merge_by_objects(parts):
    """REQ-CMT-011 to REQ-CMT-016, REQ-IDX-004, REQ-PRT-011: same tensors, or the same refusal of the same tensor."""
    made = origin(writer_count=len(parts))
    whole = [
        Part(
            origin=made,
            writer=i,
            saved_unix_s=0,
            files=(),
            holdings=holdings_of(own),
            streams=(),
            leaves=(),
            absent={},
        )
        for i, own in enumerate(parts)
    ]
    entries = [PartFileEntry(part=part, digest=bytes(32), nbytes=1) for part in whole]
    expected = outcome(lambda: merge_tensors(whole, made.block_nbytes))
    assert outcome(lambda: merge_parts(entries).tensors) == expected


def test_a_sharding_is_a_grid_where_it_can_be():
    """REQ-IDX-012."""
    quarters = [Box((a, b), (2, 3)) for a in (0, 2) for b in (0, 3)]
    halves = [Box((0, 0), (2, 6)), Box((2, 0), (2, 3)), Box((2, 3), (2, 3))]
    for boxes, grid in ((quarters, [[2, 2], [3, 3]]), (halves, None)):
        parts = [
            (tensor(held(box, bytes(box.element_count)), global_shape=(4, 6)),)
            for box in boxes[::-1]
        ]
        sharding = merged(*parts).tensors[0].sharding
        assert [box for box, _ in sharding] == boxes
        assert (
            None if sharding.extents is None else [axis.tolist() for axis in sharding.extents]
        ) == grid


def test_the_order_of_tensors_in_parts_does_not_matter():
    """REQ-IDX-003, REQ-IDX-005."""
    names = ["b", "a", "é", "", "A", "\U0001f600", "\uffee"]
    tensors = [tensor(held(WHOLE, A), name=name) for name in names]
    contents = {
        merged(tuple(order)).dump()[0]
        for order in itertools.islice(itertools.permutations(tensors), 0, 5000, 251)
    }
    assert len(contents) == 1
    index = Index.parse(contents.pop(), where="x")
    assert [item.name for item in index.tensors] == sorted(names, key=str.encode)


def test_equal_shardings_are_stored_once():
    """REQ-IDX-009: also those of tensors of different dtypes; a million tensors cost a million numbers."""
    rng = random.Random(1)
    names = [f"{rng.random()}" for _ in range(300)]
    small = merged(tuple(tensor(held(WHOLE, A), name=name) for name in names))
    content, _ = small.dump()
    assert len(content) < 300 * 30 + 1000
    replaced = dataclasses.replace(
        small, tensors=tuple(dataclasses.replace(t, dtype="uint8") for t in small.tensors)
    )
    assert Index.parse(replaced.dump()[0], where="x") == replaced

"""What a writer leaves: shards that other tools open, and a part that says everything."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import load_file

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.digest import block_digests, digest_bytes
from ckptfmt.documents.canonical import parse_document
from ckptfmt.documents.holdings import Structure
from ckptfmt.documents.manifest import failure_path
from ckptfmt.documents.part import Leaf, Part
from ckptfmt.errors import CkptError, Code, StateError, err
from ckptfmt.store import LocalStore
from ckptfmt.store.memory import Loss, MemoryStore
from ckptfmt.write.writer import check_snapshot, structure_of, write_failure, write_part
from tests.builders import ATTEMPT, code_of, error_of, leaf, origin, snapshot, stream, tensor
from tests.part_rows import contents_of, rows_of
from tests.stores.faults import Fault, FaultStore
from tests.stores.recorder import Recorder

PART = f"parts/{ATTEMPT}-00000.msgpack"
WEIGHTS = f"weights-{ATTEMPT}-00000.safetensors"


def write(*tensors, store=None, **members):
    store = MemoryStore() if store is None else store
    options = {key: members.pop(key) for key in ("written", "on_progress") if key in members}
    part = write_part(store, snapshot(*tensors, **members), origin(), writer=0, **options)
    return store, part


def test_a_weights_file_opens_in_safetensors(tmp_path):
    """REQ-SHD-004: by path, with names and shapes as they are in the model."""
    arrays: dict[str, Any] = {
        "layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "layer.bias": np.ones(3, np.float16),
        "count": np.array(7),
        "empty": np.zeros((0, 3), np.uint8),
    }
    write(
        *(tensor(name, array) for name, array in arrays.items()),
        store=LocalStore(tmp_path, writable=True),
    )
    loaded = load_file(tmp_path / WEIGHTS)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert (loaded[name] == array).all()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "__metadata__",
        "a/b",
        "../../etc/passwd",
        "日本語",
        "\U0001f600",
        "\0",
        '"\\',
        "{[",
        "x" * 4096,
    ],
)
def test_any_name_is_a_name(name):
    """REQ-SHD-009: and __metadata__ is never free."""
    store, part = write(tensor(name, np.ones(2, np.float32)))
    (key,) = load_safetensors(store.snapshot()[WEIGHTS])
    assert key == ("__metadata__#1" if name == "__metadata__" else name)
    assert rows_of(part.holdings)[0].name == name
    assert rows_of(part.holdings)[0].boxes[0].extents[0].key == key


def test_pieces_of_one_name_get_keys_of_their_own():
    """REQ-SHD-009: the smallest number that makes a key free; REQ-PRT-010."""
    array = np.arange(6, dtype=np.int16)
    boxes = (Box((0,), (2,)), Box((2,), (2,)), Box((4,), (2,)))
    store, part = write(
        tensor("w", array, boxes=boxes), tensor("w#1", array), tensor("w", array, scope="lw/0")
    )
    loaded = load_safetensors(store.snapshot()[WEIGHTS])
    assert sorted(loaded) == ["w", "w#1", "w#1#1", "w#2", "w#3"]
    assert [held.extents[0].key for held in rows_of(part.holdings)[0].boxes] == ["w", "w#1", "w#2"]
    assert [list(loaded[key]) for key in ("w", "w#1", "w#2")] == [[0, 1], [2, 3], [4, 5]]


def test_kinds_of_tensors_have_files_of_their_own():
    """REQ-TEN-007: a tool that loads weights by name meets only weights it knows."""
    store, part = write(
        tensor("w", np.ones(2, np.float32)),
        tensor("b", np.ones(2), storage="non-persistent"),
        tensor("c", np.array([1 + 2j])),
        tensor("m", np.ones(2), field="optimizer"),
        tensor("n", np.array([1j]), field="optimizer", storage="non-persistent"),
    )
    names = [file.name.partition("-")[0] for file in part.files]
    assert names == [
        "optimizer",
        "optimizer_opaque",
        "weights",
        "weights_buffers",
        "weights_opaque",
    ]
    assert list(load_safetensors(store.snapshot()[WEIGHTS])) == ["w"]


def test_dtypes_that_safetensors_lacks_stand_as_bytes():
    """REQ-TEN-004."""
    array = np.array([[1 + 2j, 3 + 4j]])
    store, part = write(tensor("z", array))
    (loaded,) = load_safetensors(store.snapshot()[part.files[0].name]).values()
    assert loaded.dtype == np.uint8
    assert loaded.shape == (32,)
    assert loaded.tobytes() == array.tobytes()
    assert (rows_of(part.holdings)[0].dtype, rows_of(part.holdings)[0].global_shape) == (
        "complex128",
        (1, 2),
    )


def test_a_part_says_what_its_writer_holds_and_wrote():
    """REQ-PRT-002, REQ-PRT-005."""
    array = np.arange(3000, dtype=np.float32)
    halves = (Box((0,), (1500,)), Box((1500,), (1500,)))
    mine = (("weights", "w", "global"), halves[0])
    sources = [
        tensor("w", array, boxes=halves),
        tensor("r", array, replica=True),
        tensor("none", array, boxes=()),
    ]
    store, part = write(*sources, written=frozenset({mine}))
    none, declared, split = rows_of(part.holdings)
    assert none.boxes == ()
    assert (declared.boxes[0].digests, declared.boxes[0].extents, declared.boxes[0].replica) == (
        b"",
        (),
        True,
    )
    assert [bool(held.extents) for held in split.boxes] == [True, False]
    # Who doesn't declare a replica proves it.
    assert [held.digests for held in split.boxes] == [
        block_digests(memoryview(array[begin : begin + 1500].tobytes()), 4096)
        for begin in (0, 1500)
    ]
    assert (
        len(store.snapshot()[WEIGHTS]) == part.files[0].nbytes == part.files[0].header_nbytes + 6000
    )
    assert (
        digest_bytes(store.snapshot()[WEIGHTS][: part.files[0].header_nbytes])
        == part.files[0].header_digest
    )
    assert contents_of(Part.parse(store.snapshot()[PART], where=PART)[0]) == contents_of(part)


def test_a_writer_without_tensors_writes_its_part_only():
    store, part = write(leaves=[leaf("config", 1)], absent={"data": "none"})
    assert list(store.snapshot()) == [PART]
    assert (part.files, part.absent) == ((), {"data": "none"})


def test_rows_are_sorted_whatever_the_order_given():
    """REQ-IDX-003."""
    arrays = [
        tensor(name, np.ones(2), field=field, scope=scope)
        for name in "ba"
        for field in ("optimizer", "weights")
        for scope in ("lw/2", "global", "lw/10")
    ]
    leaves = [leaf(field, 1, name=name) for name in "ba" for field in ("config", "data")]
    streams = [stream(name, 1, scope=scope) for name in "ba" for scope in ("lw/2", "lw/10")]
    one = write(*arrays, leaves=leaves, streams=streams)[1]
    other = write(*arrays[::-1], leaves=leaves[::-1], streams=streams[::-1])[1]
    assert rows_of(one.holdings) == rows_of(other.holdings)
    assert one.dump()[0][-500:] == other.dump()[0][-500:]
    assert [(t.field, t.name, t.scope) for t in rows_of(one.holdings)][:3] == [
        ("weights", "a", s) for s in ("global", "lw/10", "lw/2")
    ]


def test_writers_learn_each_others_pieces_with_their_bytes():
    held = tensor(
        "w",
        np.ones((4, 2), np.float16),
        boxes=(Box((0, 0), (1, 2)), Box((1, 0), (3, 2))),
        aliases=("b", "a"),
    )
    scalar = tensor("é", np.ones(()), scope="lw/1", replica=True)
    made = dataclasses.replace(
        snapshot(tensor("none", np.ones(3), boxes=()), scalar, held),
        declared_by={("weights", "é", "lw/1"): "mesh"},
    )
    assert list(Structure.parse(structure_of(made).dump()[0]).iter_pieces()) == [
        (("weights", "w", "global"), Box((0, 0), (1, 2)), "", 4),
        (("weights", "w", "global"), Box((1, 0), (3, 2)), "", 12),
        (("weights", "é", "lw/1"), Box((), ()), "mesh", 8),
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "int64"},
        {"replica": True},
        {"storage": "non-persistent"},
        {"aliases": ("v",)},
        {"boxes": (Box((0,), (3,)), Box((3,), (1,)))},
        {"global_shape": (5,)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_structure_has_another_digest_after_any_change_that_its_image_depends_on(changed):
    before, after = snapshot(tensor("w", np.ones(4))), snapshot(tensor("w", np.ones(4), **changed))
    assert structure_of(before).dump()[1] != structure_of(after).dump()[1]


ONE = np.ones(1)
WRONG_NAMES = {
    "a tensor twice": snapshot(tensor("w", ONE), tensor("w", ONE)),
    "an alias that is another's name": snapshot(tensor("w", ONE), tensor("v", ONE, aliases=("w",))),
    "an alias of two": snapshot(tensor("w", ONE, aliases=("x",)), tensor("v", ONE, aliases=("x",))),
    "an alias of itself": snapshot(tensor("w", ONE, aliases=("w",))),
    "a leaf twice": snapshot(leaves=[leaf("config", 1), leaf("config", 2)]),
    "a stream twice": snapshot(streams=[stream("s", 1), stream("s", 2)]),
    "a name too long": snapshot(tensor("x" * (limits.NAME_NBYTES + 1), ONE)),
    "a name too long in bytes": snapshot(tensor("é" * (limits.NAME_NBYTES // 2 + 1), ONE)),
    "a lone surrogate": snapshot(tensor("a\ud800", ONE)),
    "a lone surrogate in a leaf's name": snapshot(
        leaves=[Leaf(field="config", name="\udfff", scope="global", value=b"\xc0")]
    ),
    "a lone surrogate in an alias": snapshot(tensor("w", ONE, aliases=("\udc00",))),
}


@pytest.mark.parametrize("made", WRONG_NAMES.values(), ids=WRONG_NAMES)
def test_names_that_cannot_be_kept_are_refused_before_a_file_is_created(made):
    """REQ-IDX-003, REQ-IDX-008, REQ-LIM-001, REQ-CMT-002."""
    error = error_of(lambda: check_snapshot(made))
    assert (error.code, type(error)) == (Code.STATE_NAME, StateError)
    str(error).encode()
    store = MemoryStore()
    assert code_of(lambda: write_part(store, made, origin(), writer=0)) == Code.STATE_NAME
    assert store.snapshot() == {}


def test_one_name_in_several_fields_and_scopes_is_fine():
    """REQ-IDX-003."""
    check_snapshot(
        snapshot(
            tensor("w", ONE),
            tensor("w", ONE, scope="lw/0"),
            tensor("w", ONE, field="optimizer"),
            leaves=[leaf("weights", 1, name="w")],
            streams=[stream("w", 1), stream("w", 1, scope="lw/1")],
        )
    )


def test_no_part_without_durable_shards():
    """REQ-CMT-005: whatever fails before, no part is there."""
    for fail_at in range(1, 20):
        inner = MemoryStore()
        fault = Fault(fail_at=fail_at)
        store = FaultStore(inner, fault, code=Code.NO_SPACE)
        try:
            write(tensor("w", ONE), tensor("m", ONE, field="optimizer"), store=store)
        except CkptError as error:
            assert error.code == Code.NO_SPACE
            complete = {name.partition("-")[0] for name in inner.snapshot()} >= {
                "weights",
                "optimizer",
            }
            assert PART not in inner.snapshot() or complete
        if not fault.fired_count:
            assert fail_at > 4
            return
    raise AssertionError("no end of operations")


def test_a_part_comes_behind_the_sync_of_its_files():
    """REQ-CMT-005."""
    recorder = Recorder(MemoryStore())
    write(tensor("w", ONE), tensor("m", ONE, field="optimizer"), store=recorder)
    optimizer = WEIGHTS.replace("weights", "optimizer")
    assert [(step.op, step.path) for step in recorder.log.operations] == [
        ("create", optimizer),
        ("create", WEIGHTS),
        ("sync", ""),
        ("create", PART),
        ("sync", "parts"),
    ]


def test_files_whose_names_could_not_be_synced_get_no_part():
    """REQ-CMT-005, REQ-STO-007: they count as not durable."""
    inner = MemoryStore()
    store = FaultStore(inner, Fault(fail_at=1, operations=frozenset({"sync"})))
    assert code_of(lambda: write(tensor("w", ONE), store=store)) == Code.STORE_IO
    assert PART not in inner.snapshot()


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("path_end", [".safetensors", ".msgpack"])
def test_a_lost_answer_is_asked_again(loss, path_end):
    """REQ-STO-003, REQ-CMT-003: the bytes are there once, whole, whenever the lost request arrives."""
    store = MemoryStore()
    store.inject(loss, path_end=path_end)
    write(tensor("w", np.arange(9)), store=store)
    before = store.snapshot()
    store.land()
    assert store.snapshot() == before
    assert before.keys() == {WEIGHTS, PART}


def test_a_store_that_never_answers_is_given_up():
    """REQ-STO-003."""
    store = MemoryStore()
    for _ in range(3):
        store.inject(Loss.REQUEST, path_end=".safetensors")
    assert code_of(lambda: write(tensor("w", ONE), store=store)) == Code.STORE_NO_ANSWER


def test_another_attempts_file_is_not_taken_for_ours():
    """REQ-CMT-003."""
    store = MemoryStore()
    store.create(WEIGHTS, [b"other"])
    assert code_of(lambda: write(tensor("w", ONE), store=store)) == Code.STORE_EXISTS


def test_a_failure_record_says_why():
    """REQ-CMT-004."""
    store = MemoryStore()
    write_failure(store, origin(), 3, err(Code.NO_SPACE, "disk\nfull \u202e", where="weights"))
    path = failure_path(ATTEMPT, 3)
    record, _ = parse_document(store.snapshot()[path], where=path, types=("failure",))
    assert (record["code"], record["writer"]) == ("NO_SPACE", 3)
    assert (record["detail"], record["where"]) == (r"disk\nfull \u202e", "weights")
    assert record["remedy"] == Code.NO_SPACE.remedy
    write_failure(store, origin(), 3, err(Code.NO_SPACE, "disk\nfull \u202e", where="weights"))


def test_progress_is_told_in_bytes():
    told: list[int] = []
    write(tensor("w", np.ones(5, np.float32)), tensor("e", np.ones(0)), on_progress=told.append)
    assert sum(told) == 20

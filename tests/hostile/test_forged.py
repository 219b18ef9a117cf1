"""Checkpoints under valid digests with wrong contents: what is refused must be refused for what it says."""

import dataclasses

import numpy as np
import pytest

from ckptfmt.box import Box
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.manifest import Origin
from ckptfmt.documents.packed import Columns, dump_packed, dump_strings, unfold
from ckptfmt.documents.part import Part, PartFile
from ckptfmt.documents.shard import plan_shard
from ckptfmt.documents.sharding import Sharding, parse_shardings, sharding_columns
from ckptfmt.documents.tree import TensorRef, dump_tree
from ckptfmt.errors import CkptError, Code, FormatError, IntegrityError, LayoutError
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store.memory import MemoryStore
from tests.builders import (
    Forgery,
    code_of,
    edit_strings,
    error_of,
    leaf,
    origin,
    read_all,
    save,
    small_files,
    snapshot,
    stream,
    tensor,
    unpacked,
    unpacked_strings,
    verify,
)
from tests.part_rows import holdings_of

FILES = small_files()
SHARD = "weights-0123456789abcdef-00000.safetensors"
INDEX = "index-0123456789abcdef.msgpack"
PARTS = [f"parts/0123456789abcdef-0000{writer}.msgpack" for writer in range(2)]


def test_an_unedited_forgery_is_the_checkpoint():
    assert Forgery(FILES).store().snapshot() == FILES


def packed(table, key, edit):
    values = unpacked(table[key])
    edit(values)
    table[key] = dump_packed(values)


def put(row, value):
    return lambda values: values.__setitem__(row, value)


def row_of(table, name, key="name"):
    return unpacked_strings(table[key]).index(name)


def rename_key_of(part, name, key):
    """Change the key of the first box of a tensor in its shard: nothing, if it is called as the tensor is."""
    counts = unpacked(part["tensors"]["box_count"])
    box = sum(counts[: row_of(part["tensors"], name)])
    folded = np.array(unpacked(part["extents"]["box"]), np.int64)
    row = (np.cumsum(unfold(folded) + 1) - 1).tolist().index(box)
    edit_strings(part["extents"], "key", put(row, key))


def edit_tiling(*, begin=None, box_shape=None, part=None):
    """Return an edit of the two boxes of `embedding`: begin (0, 0) and (3, 0), shape (3, 4) each."""

    def edit(forgery):
        index = forgery.index
        shardings = parse_shardings(Columns(index, tuple(index), "x"), 2)
        row = unpacked(index["tensors"]["sharding"])[row_of(index["tensors"], "embedding")]
        sharding = shardings[row]
        arrays = [sharding.begin.copy(), sharding.box_shape.copy(), sharding.part.copy()]
        for array, edits in zip(arrays, (begin, box_shape, part), strict=True):
            for at, value in (edits or {}).items():
                array.reshape(-1)[at] = value
        shardings[row] = Sharding.boxes(*arrays)
        index["shardings"] = sharding_columns(shardings, 2)

    return edit


def edit_grid(*extents):
    """Return an edit of the grid of `embedding`: 3 and 3, by 4."""

    def edit(forgery):
        table = forgery.index["shardings"]
        at = unpacked(table["extent"]).index(4) - 2
        packed(table, "extent", lambda values: values.__setitem__(slice(at, at + 3), extents))

    return edit


def rename_tensor(forgery):
    rename_key_of(forgery.parts[0], "bias", "bias")  # as the shard has it
    for table in (forgery.index["tensors"], forgery.parts[0]["tensors"]):
        edit_strings(table, "name", lambda names: names.__setitem__(names.index("bias"), "bias2"))


def drop_last_leaf(forgery):
    table = forgery.index["leaves"]
    edit_strings(table, "name", lambda names: names[:-1])
    for key in ("field", "scope", "part"):
        packed(table, key, lambda values: values.pop())
    forgery.manifest["fields"]["config"]["leaf_count"] -= 1


def drop_aliases(forgery):
    forgery.index["aliases"] = {"tensor": dump_packed([]), "name": dump_strings([])}


def higher_writer(forgery):
    row = row_of(forgery.index["leaves"], "state")
    packed(forgery.index["leaves"], "part", put(row, 1))


def unused_scope(writer):
    def edit(forgery):
        (forgery.index if writer is None else forgery.parts[writer])["scopes"].append("lw/7")

    return edit


def writer_features(forgery):
    for document in (forgery.manifest, forgery.index, *forgery.parts):
        document["features"]["writer"] = ["me.experiment"]


def other_origin(**members):
    def edit(forgery):
        forgery.index.update(members)

    return edit


def part_origin(number, /, **members):
    def edit(forgery):
        forgery.parts[number].update(members)

    return edit


def swap_parts(forgery):
    forgery.parts.reverse()


def summary(field, key, value):
    def edit(forgery):
        forgery.manifest["fields"][field][key] = value

    return edit


def absent_in_index(field, reason):
    def edit(forgery):
        if reason is None:
            del forgery.index["absent"][field]
        else:
            forgery.index["absent"][field] = reason

    return edit


def index_dtype(forgery):
    dtypes = forgery.index["dtypes"]
    row = row_of(forgery.index["tensors"], "bias")
    # int16 stands as bfloat16: a size that fits.
    forgery.index["dtypes"] = sorted({*dtypes, "bfloat16"} - {"int16"})
    old = [dtypes[number] for number in unpacked(forgery.index["tensors"]["dtype"])]
    old[row] = "bfloat16"
    forgery.index["tensors"]["dtype"] = dump_packed(
        [forgery.index["dtypes"].index(name) for name in old]
    )


def index_storage(forgery):
    row = row_of(forgery.index["tensors"], "bias")
    packed(forgery.index["tensors"], "storage", put(row, 1))


def leaf_value(value):
    def edit(forgery):
        row = row_of(forgery.parts[0]["leaves"], "state")
        forgery.parts[0]["leaves"]["value"][row] = value

    return edit


def stream_kind(forgery):
    edit_strings(forgery.index["streams"], "kind", lambda kinds: kinds.__setitem__(0, "torch.cpu"))


def add_stream(forgery):
    table = forgery.index["streams"]
    edit_strings(table, "name", lambda names: names.append("zz"))
    edit_strings(table, "kind", lambda kinds: kinds.append("k"))
    for key in ("scope", "part"):
        packed(table, key, lambda values: values.append(0))
    forgery.manifest["fields"]["rng"]["stream_count"] += 1


def add_leaf(forgery):
    table = forgery.index["leaves"]
    edit_strings(table, "name", lambda names: names.append("zz"))
    for key, value in (("field", 6), ("scope", 0), ("part", 0)):
        packed(table, key, lambda values, value=value: values.append(value))
    del forgery.index["absent"]["provenance"]
    forgery.manifest["fields"]["provenance"] = {
        "state": "present",
        "tensor_count": 0,
        "nbytes": 0,
        "stream_count": 0,
        "leaf_count": 1,
    }


def header_of(edit):
    """Return an edit that puts another header of the same length on a shard, under a valid digest."""

    def changed(forgery):
        content = forgery.files[SHARD]
        nbytes = 8 + int.from_bytes(content[:8], "little")
        header = edit(content[:nbytes])
        assert len(header) == nbytes
        forgery.files[SHARD] = header + content[nbytes:]
        row = row_of(forgery.parts[0]["files"], SHARD)
        digests = forgery.parts[0]["files"]["header_digest"]
        forgery.parts[0]["files"]["header_digest"] = (
            digests[: 32 * row] + digest_bytes(header) + digests[32 * (row + 1) :]
        )

    return changed


def rename_key(forgery):
    rename_key_of(forgery.parts[0], "embedding", "embeddinG")


FORGED = {
    # 88 to 91: the tiling; REQ-IDX-004
    "88 box out of bounds": (edit_tiling(begin={2: 4}), Code.BOX_BOUNDS, "embedding"),
    "89 boxes overlap": (edit_tiling(box_shape={0: 4}), Code.TILING_OVERLAP, "embedding"),
    "90 a gap between boxes": (edit_tiling(box_shape={0: 2}), Code.TILING_GAP, "embedding"),
    "90 a gap in a row": (edit_tiling(box_shape={1: 3}), Code.TILING_GAP, "embedding"),
    "91 an empty box for a tensor with elements": (
        edit_tiling(box_shape={0: 0}),
        Code.TILING_GAP,
        "embedding",
    ),
    "90 gap and overlap of equal size": (
        edit_tiling(begin={2: 2}),
        Code.TILING_OVERLAP,
        "embedding",
    ),
    "90 a grid that ends too early": (edit_grid(3, 2, 4), Code.TILING_GAP, "embedding"),
    "90 a grid that is too narrow": (edit_grid(3, 3, 3), Code.TILING_GAP, "embedding"),
    "88 a grid that ends too late": (edit_grid(3, 4, 4), Code.BOX_BOUNDS, "embedding"),
    "88 a grid too early and too late": (edit_grid(3, 4, 3), Code.BOX_BOUNDS, "embedding"),
    # 93: what the index says of parts; REQ-IDX-001
    "93 part lacks the box": (edit_tiling(part={0: 1}), Code.DOC_MISMATCH, PARTS[1]),
    "93 both boxes elsewhere": (edit_tiling(part={0: 1, 1: 0}), Code.DOC_MISMATCH, "parts/"),
    "92 index gives another dtype": (index_dtype, Code.DOC_MISMATCH, PARTS[0]),
    "index gives another storage": (index_storage, Code.DOC_MISMATCH, PARTS[0]),
    "index gives another kind of stream": (stream_kind, Code.DOC_MISMATCH, "parts/"),
    "index names a stream that no part has": (add_stream, Code.DOC_MISMATCH, PARTS[0]),
    "index names a leaf that no part has": (add_leaf, Code.DOC_MISMATCH, PARTS[0]),
    # attempts, writers and steps that don't belong together; REQ-IDX-001, REQ-PRT-001
    "33 index of another step": (other_origin(step=4), Code.DOC_MISMATCH, INDEX),
    "index of another attempt": (other_origin(attempt="f" * 16), Code.DOC_MISMATCH, INDEX),
    "index of another nonce": (other_origin(nonce="f" * 32), Code.DOC_MISMATCH, INDEX),
    "index of another run": (other_origin(run_id="f" * 32, launch=1), Code.DOC_MISMATCH, INDEX),
    "index of a run without a launch": (other_origin(run_id="f" * 32), Code.DOC_SCHEMA, INDEX),
    "index of another clock": (other_origin(saved_unix_s=1), Code.DOC_MISMATCH, INDEX),
    "index of other blocks": (other_origin(block_nbytes=8192), Code.DOC_MISMATCH, INDEX),
    "33 part of another step": (part_origin(1, step=4), Code.DOC_MISMATCH, PARTS[1]),
    "part of another attempt": (part_origin(1, attempt="f" * 16), Code.UNSAFE_PATH, PARTS[1]),
    "part of another writer": (part_origin(1, writer=0), Code.UNSAFE_PATH, PARTS[1]),
    "part of other blocks": (part_origin(0, block_nbytes=8192), Code.DOC_MISMATCH, PARTS[0]),
    "part of another launch": (
        part_origin(0, run_id="f" * 32, launch=7),
        Code.DOC_MISMATCH,
        PARTS[0],
    ),
    "part of a launch without a run": (part_origin(0, launch=7), Code.DOC_SCHEMA, PARTS[0]),
    "parts swapped": (swap_parts, Code.DOC_MISMATCH, "parts/"),
    # summaries; REQ-MAN-006
    "a tensor more": (
        summary("weights", "tensor_count", 99),
        Code.MANIFEST_SUMMARY,
        "manifest.json",
    ),
    "a byte more": (summary("weights", "nbytes", 1), Code.MANIFEST_SUMMARY, "manifest.json"),
    "a stream less": (summary("rng", "stream_count", 1), Code.MANIFEST_SUMMARY, "manifest.json"),
    "a leaf more": (summary("config", "leaf_count", 2), Code.MANIFEST_SUMMARY, "manifest.json"),
    "another reason": (
        summary("topology", "reason", "lost"),
        Code.MANIFEST_SUMMARY,
        "manifest.json",
    ),
    "absent, and yet there": (
        absent_in_index("config", "gone"),
        Code.MANIFEST_SUMMARY,
        "manifest.json",
    ),
    "neither absent nor there": (
        absent_in_index("topology", None),
        Code.MANIFEST_SUMMARY,
        "manifest.json",
    ),
    # the one form; REQ-IDX-007, REQ-IDX-009
    "index has a scope that nothing is in": (unused_scope(None), Code.COLUMN_ORDER, INDEX),
    "part has a scope that nothing is in": (unused_scope(0), Code.COLUMN_ORDER, PARTS[0]),
    # trees; REQ-TRE-001, REQ-TRE-004
    "reference to no tensor": (
        leaf_value(dump_tree([TensorRef("nowhere", "torch")], where="")),
        Code.TREE_REFERENCE,
        PARTS[0],
    ),
    "reference to another field's tensor": (
        leaf_value(dump_tree({"a": TensorRef("bias", "torch")}, where="")),
        Code.TREE_REFERENCE,
        PARTS[0],
    ),
    "leaf that is no tree": (leaf_value(b"\xc1"), Code.MSGPACK_SYNTAX, PARTS[0]),
    "leaf with a float": (leaf_value(b"\xcb\x7f\xf8" + bytes(6)), Code.MSGPACK_TYPE, PARTS[0]),
    "leaf with a map": (leaf_value(b"\x80"), Code.TREE_TAG, PARTS[0]),
    "leaf that is a bomb": (leaf_value(b"\xdd\xff\xff\xff\xff"), Code.MSGPACK_SYNTAX, PARTS[0]),
    # 86: headers; REQ-SHD-010
    "86 header with another key": (
        header_of(lambda h: h.replace(b'"scale"', b'"scalE"')),
        Code.SHARD_MISMATCH,
        SHARD,
    ),
    "86 header with another dtype": (
        header_of(lambda h: h.replace(b'"I16"', b'"U16"')),
        Code.SHARD_MISMATCH,
        SHARD,
    ),
    "86 header with another shape": (
        header_of(lambda h: h.replace(b"[3,4]", b"[4,3]")),
        Code.SHARD_MISMATCH,
        SHARD,
    ),
    "86 header with another order": (
        header_of(
            lambda h: h.replace(b'"embedding":', b'"embeddinG":').replace(b'"bias":', b'"biaS":')
        ),
        Code.SHARD_MISMATCH,
        SHARD,
    ),
    "86 part with another key": (rename_key, Code.SHARD_MISMATCH, SHARD),
    "64 header that begins with a space": (
        header_of(lambda h: h[:8] + b" " + h[8:-1]),
        Code.SHARD_HEADER_SYNTAX,
        SHARD,
    ),
    "79 header of NULs": (
        header_of(lambda h: h[:8] + bytes(len(h) - 8)),
        Code.SHARD_HEADER_SYNTAX,
        SHARD,
    ),
}


# The index has to be the one that follows from the parts; REQ-IDX-005, REQ-IDX-007, REQ-CMT-016.
UNFAITHFUL = {
    "index leaves out the copy of one writer": rename_tensor,
    "index leaves out an alias": drop_aliases,
    "index names the higher writer": higher_writer,
    "index leaves out a leaf": drop_last_leaf,
}
FORGED |= {name: (edit, Code.DOC_MISMATCH, INDEX) for name, edit in UNFAITHFUL.items()}


@pytest.mark.parametrize(("edit", "code", "place"), FORGED.values(), ids=FORGED)
def test_forged_checkpoints_are_refused(edit, code, place):
    forgery = Forgery(FILES)
    edit(forgery)
    report = verify(forgery.store())
    assert report.violations, "accepted"
    found = {violation.code for violation in report.violations}
    assert found == {code}, report.violations
    assert any(place in str(violation.where) for violation in report.violations)
    assert all(violation.requirement for violation in report.violations)
    assert all(
        isinstance(violation, FormatError | IntegrityError | LayoutError)
        for violation in report.violations
    )


READ = [
    name
    for name in FORGED
    if not name.startswith(("86", "64", "79", "reference")) and name not in UNFAITHFUL
]


@pytest.mark.parametrize("name", READ)
def test_reading_a_forged_checkpoint_is_refused_too(name):
    """All but what only who validates looks at: headers, references, and what nobody asked for."""
    edit, code, _ = FORGED[name]
    forgery = Forgery(FILES)
    edit(forgery)
    with pytest.raises(CkptError) as raised:
        read_all(forgery.store())
    assert raised.value.code == code


def test_writer_features_are_no_concern_of_a_reader():
    """REQ-VER-002."""
    forgery = Forgery(FILES)
    writer_features(forgery)
    assert verify(forgery.store()).violations == []
    assert len(read_all(forgery.store())) == len(read_all(MemoryStore.from_snapshot(FILES)))


def test_nothing_of_a_contradiction_reaches_the_caller():
    """REQ-OPN-004: the tensor next to the damaged one can be read, the damaged one can't."""
    forgery = Forgery(FILES)
    index_dtype(forgery)
    checkpoint = Checkpoint(forgery.store())
    assert checkpoint.weights["scale"][()] == 0.5
    assert code_of(lambda: checkpoint.weights["bias"][...]) == Code.DOC_MISMATCH


def test_a_digest_that_was_asked_for_counts():
    """REQ-OPN-001, REQ-RUN-011; row 127: an older, valid manifest replayed."""
    store = MemoryStore.from_snapshot(FILES)
    digest = Checkpoint(store).digest
    assert Checkpoint(store, digest=digest).digest == digest
    older = MemoryStore.from_snapshot(small_files(step=2))
    error = error_of(lambda: Checkpoint(older, digest=digest))
    assert (error.code, error.requirement, error.where) == (
        Code.DOC_DIGEST,
        "REQ-OPN-001",
        "manifest.json",
    )


@pytest.mark.parametrize("key", ["", "w#1", "x"])
def test_a_second_entry_of_no_bytes_is_seen(key):
    """REQ-SHD-010: an empty tensor takes no bytes, and is told by its key all the same."""
    store = MemoryStore()
    save(
        store,
        snapshot(tensor("w", np.zeros((0, 2), np.float32)), tensor("v", np.ones(3, np.float32))),
    )
    forgery = Forgery(store.snapshot())
    path = next(path for path in forgery.files if path.startswith("weights-"))
    assert unpacked_strings(forgery.parts[0]["extents"]["key"]) == ["", ""]
    row = unpacked(forgery.parts[0]["extents"]["block_count"]).index(0)
    edit_strings(forgery.parts[0]["extents"], "key", put(row, key))
    report = verify(forgery.store())
    assert [violation.code for violation in report.violations] == (
        [] if key == "" else [Code.SHARD_MISMATCH]
    )
    assert path.startswith("weights-0123456789abcdef")


def test_a_cursor_that_is_none_is_found():
    """REQ-CUR-001: by who validates."""
    store = MemoryStore()
    save(
        store,
        snapshot(
            tensor("w", np.ones(2)), leaves=[leaf("data", {"kind": "ckptfmt.data_cursor", "v": 1})]
        ),
    )
    assert [violation.code for violation in verify(store).violations] == [Code.CURSOR_FORM]


def test_a_reference_in_a_stream_is_checked():
    """REQ-TRE-004."""
    store = MemoryStore()
    save(store, snapshot(tensor("w", np.ones(2)), streams=[stream("s", [TensorRef("w", "torch")])]))
    assert [violation.code for violation in verify(store).violations] == [Code.TREE_REFERENCE]


def test_many_boxes_cost_no_quadratic_time():
    """Row 96: ten thousand pieces of one tensor in one part."""
    import time  # noqa: PLC0415

    count = 10_000
    array = np.arange(count, dtype=np.int8)
    boxes = tuple(Box((at,), (1,)) for at in range(count))
    store = MemoryStore()
    save(store, snapshot(tensor("w", array, boxes=boxes)))
    begin = time.process_time()
    assert verify(store).valid
    assert (Checkpoint(store).weights["w"][...] == array).all()
    assert time.process_time() - begin < 40


def test_a_file_of_another_writer_cannot_be_named():
    """REQ-CKP-001: not by the part of this one, whatever digests it has."""
    made: Origin = origin()
    header, _ = plan_shard([])
    file = PartFile(
        name="weights-0123456789abcdef-00001.safetensors",
        kind="safetensors",
        nbytes=len(header),
        header_nbytes=len(header),
        header_digest=digest_bytes(header),
    )
    part = Part(
        origin=made,
        writer=0,
        saved_unix_s=0,
        files=(file,),
        holdings=holdings_of(()),
        streams=(),
        leaves=(),
        absent={},
    )
    assert code_of(lambda: Part.parse(part.dump()[0], where="x")) == Code.UNSAFE_PATH
    own = dataclasses.replace(part, files=(dataclasses.replace(file, name=SHARD),))
    assert code_of(lambda: Part.parse(own.dump()[0], where="x")) == "ok"

"""The layout of a writer's files as one image: it can be told to another process, and says what the writer would."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.box import Box
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.digest import block_digests, digest_bytes
from ckptfmt.documents.manifest import shard_name
from ckptfmt.documents.msgpk import dump_msgpack, parse_msgpack
from ckptfmt.documents.part import Part
from ckptfmt.documents.shard import parse_shard_header, plan_shard
from ckptfmt.documents.tables import key_of
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, LayoutError
from ckptfmt.layout.merge import PartFileEntry, merge_parts
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store.memory import MemoryStore
from ckptfmt.write.image import ALIGN_NBYTES, Context, Image, most_entry_nbytes, plan_image
from ckptfmt.write.snapshot import Snapshot
from ckptfmt.write.writer import structure_of, write_part
from tests.builders import (
    ATTEMPT,
    ArraySource,
    error_of,
    leaf,
    origin,
    save,
    snapshot,
    stream,
    tensor,
    verify,
)
from tests.interface.test_group import Allgather, run_writers
from tests.part_rows import contents_of, rows_of

NAMES = ("", "w", "w#1", "__metadata__", "__metadata__#1", "日本語", "\0", "a/b", '"\\', "x" * 300)


def told(image: Image) -> Image:
    """Return what another process makes of an image."""
    message = dump_msgpack(image.as_dict())
    return Image.from_dict(parse_msgpack(message, where="message", limit_items=1 << 28))


def fill(image: Image, given_snapshot: Snapshot) -> memoryview:
    """Return an image's bytes, as the copies leave them in a slot that held something else before."""
    view = memoryview(bytearray(b"\xa5" * (image.nbytes + 5)))
    for shard in image.shards:
        view[shard.begin : shard.begin + len(shard.header)] = shard.header
    sources = {key_of(source): source for source in given_snapshot.tensors}
    for piece in image.pieces:
        sources[piece.key].copy_into(piece.box, view[piece.begin : piece.end])
    return view


@st.composite
def sources(draw: st.DrawFn, key: tuple[str, str, str]) -> ArraySource:
    """Draw a tensor of any dtype, held wholly, in pieces, in some of them or not at all; some hold nothing."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    long = st.tuples(st.integers(500, 9000))
    shape = draw(st.one_of(st.lists(st.integers(0, 5), max_size=3).map(tuple), long))
    cuts = [
        sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=2))}) for extent in shape
    ]
    spans = [list(itertools.pairwise(cut)) if len(cut) > 1 else [(0, 0)] for cut in cuts]
    grid = [
        Box(tuple(begin for begin, _ in corner), tuple(end - begin for begin, end in corner))
        for corner in itertools.product(*spans)
    ]
    count = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].nbytes
    seed = draw(st.integers(0, 255))
    content = (np.arange(count, dtype=np.uint64) * 7 + seed).astype(np.uint8)
    field, name, scope = key
    return ArraySource(
        field=field,
        name=name,
        scope=scope,
        array=content.view(f"V{DTYPES[dtype].nbytes}").reshape(shape),
        boxes=tuple(draw(st.permutations(grid))[: draw(st.integers(0, len(grid)))]),
        dtype=dtype,
        global_shape=shape,
        replica=draw(st.booleans()),
        storage=draw(st.sampled_from(["persistent", "non-persistent"])),
        aliases=draw(st.sampled_from([(), (f"{name} too",), (f"{name} z", f"{name} é")])),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[Snapshot, dict[str, Any]]:
    """Draw a snapshot, and how it is to be laid out."""
    keys = st.tuples(
        st.sampled_from(["weights", "optimizer", "data"]),
        st.one_of(
            st.sampled_from(NAMES), st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
        ),
        st.sampled_from(["global", "lw/0", "lw/10"]),
    )
    made = snapshot(
        *[draw(sources(key)) for key in draw(st.lists(keys, max_size=6, unique=True))],
        leaves=[leaf("config", {"lr": 0.1}), leaf("data", 3, scope="lw/10")],
        streams=[stream("b", 1), stream("a", (1, 2), scope="lw/10")],
        absent={"topology": "not given"},
    )
    pieces = [(key, box) for key, box, _, _ in structure_of(made).iter_pieces()]
    written = draw(
        st.one_of(
            st.none(), st.sets(st.sampled_from(pieces)).map(frozenset) if pieces else st.none()
        )
    )
    options = {
        "written": written,
        "block_nbytes": draw(st.sampled_from([4096, 8192])),
        "check_replicas": draw(st.booleans()),
    }
    return made, options


deeply = settings(
    max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@deeply
@given(plans())
def test_another_process_gets_the_same_image(plan: tuple[Snapshot, dict[str, Any]]) -> None:
    made, options = plan
    image = plan_image(made, **options)
    assert told(image).as_dict() == image.as_dict()


@deeply
@given(plans())
def test_nothing_overlaps_and_everything_is_within(plan: tuple[Snapshot, dict[str, Any]]) -> None:
    """Direct I/O needs shards at whole pages; two threads that copy must never write to the same byte."""
    made, options = plan
    image = plan_image(made, **options)
    headers = [(shard.begin, shard.begin + len(shard.header)) for shard in image.shards]
    spans = sorted(
        headers + [(piece.begin, piece.end) for piece in image.pieces if piece.end > piece.begin]
    )
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert all(end <= image.nbytes for _, end in spans)
    files = [(shard.begin, shard.begin + shard.nbytes) for shard in image.shards]
    assert all(begin % ALIGN_NBYTES == 0 for begin, _ in files)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(files))
    for piece in image.pieces:
        if piece.shard is None:
            assert piece.begin >= max((end for _, end in files), default=0)
        else:
            begin, end = files[piece.shard]
            assert begin + len(image.shards[piece.shard].header) <= piece.begin <= piece.end <= end
    assert [piece.begin for piece in image.pieces] == sorted(piece.begin for piece in image.pieces)


@deeply
@given(plans())
def test_what_is_written_is_in_files_and_what_must_be_proved_is_digested(
    plan: tuple[Snapshot, dict[str, Any]],
) -> None:
    """REQ-TEN-005, REQ-CMT-012."""
    made, options = plan
    image = plan_image(made, **options)
    held = {(key_of(source), box): source for source in made.tensors for box in source.boxes}
    written = held.keys() if options["written"] is None else options["written"]
    assert {(piece.key, piece.box) for piece in image.pieces if piece.shard is not None} == set(
        written
    )
    digested = {
        piece
        for piece, source in held.items()
        if piece not in written
        and piece[1].element_count
        and (options["check_replicas"] or not source.replica)
    }
    assert {(piece.key, piece.box) for piece in image.pieces if piece.shard is None} == digested


@deeply
@given(plans())
def test_the_part_of_an_image_is_what_the_writer_gives(
    plan: tuple[Snapshot, dict[str, Any]],
) -> None:
    """From a slot or from live tensors: same files, same part; and each tensor's bytes where its extent says."""
    made, options = plan
    store, attempt = MemoryStore(), origin(block_nbytes=options["block_nbytes"], writer_count=3)
    image = plan_image(made, **options)
    part = write_part(store, made, attempt, writer=2, image=image)
    image = told(image)
    view = fill(image, made)
    found = image.part(
        attempt,
        [
            block_digests(view[piece.begin : piece.end], image.block_nbytes)
            for piece in image.pieces
        ],
        dataclasses.replace(Context.of(made), saved_unix_s=part.saved_unix_s),
        writer=2,
    )
    assert contents_of(found) == contents_of(part)
    files = store.snapshot()
    assert {file.name for file in part.files} | {f"parts/{ATTEMPT}-00002.msgpack"} == files.keys()
    for shard in image.shards:
        content = files[shard_name(shard.stem, ATTEMPT, 2)]
        assert content == view[shard.begin : shard.begin + shard.nbytes]
        assert (
            len(
                parse_shard_header(content[: len(shard.header)], file_nbytes=len(content), where="")
            )
            > 0
        )
    sources_by_key = {key_of(source): source for source in made.tensors}
    for tensor_held in rows_of(part.holdings):
        for held in tensor_held.boxes:
            expected = bytearray(tensor_held.box_nbytes(held.box))
            sources_by_key[tensor_held.key].copy_into(held.box, memoryview(expected))
            for extent in held.extents:
                begin = extent.byte_begin
                assert extent.file is not None
                assert (
                    files[part.files[extent.file].name][begin : begin + len(expected)] == expected
                )


def test_an_image_of_nothing() -> None:
    image = plan_image(snapshot(), block_nbytes=4096)
    assert (image.nbytes, image.shards, image.pieces) == (0, (), ())
    assert told(image).as_dict() == image.as_dict()


def test_an_image_holds_no_tensor() -> None:
    """It is kept from save to save: a tensor in it would never be let go."""
    array = np.ones(3)
    image = plan_image(snapshot(tensor("w", array)), block_nbytes=4096)
    array[:] = 7
    assert (
        fill(image, snapshot(tensor("w", array)))[image.pieces[0].begin :][:8]
        == np.float64(7).tobytes()
    )


# --- declared replicas that differ ----------------------------------------------------------------

BLOCK_NBYTES = 1 << 20


def holds_replica(value: int) -> ArraySource:
    """Return a tensor of three blocks that the caller calls a replica; `value` stands in the middle one."""
    array = np.zeros(BLOCK_NBYTES * 3 // 4, np.int32)
    array[BLOCK_NBYTES // 4 + 5] = value
    return tensor("shared", array, replica=True)


def merge(*snapshots: Snapshot, check_replicas: bool) -> Any:
    """Merge what the writers give, of which the first writes everything."""
    entries = []
    attempt = origin(writer_count=len(snapshots), block_nbytes=BLOCK_NBYTES)
    for writer, held in enumerate(snapshots):
        written = None if writer == 0 else frozenset[Any]()
        image = plan_image(
            held, written=written, block_nbytes=BLOCK_NBYTES, check_replicas=check_replicas
        )
        part = write_part(MemoryStore(), held, attempt, writer=writer, image=image)
        content, digest = part.dump()
        assert contents_of(Part.parse(content, where="")[0]) == contents_of(part)
        entries.append(PartFileEntry(part=part, digest=digest, nbytes=len(content)))
    return merge_parts(entries)


def test_declared_replicas_that_others_write_are_digested_where_asked() -> None:
    content = bytes(BLOCK_NBYTES)
    for check_replicas, digests in (
        (True, block_digests(memoryview(content), BLOCK_NBYTES)),
        (False, b""),
    ):
        image = plan_image(
            snapshot(tensor("w", np.frombuffer(content, np.int8), replica=True)),
            written=frozenset(),
            block_nbytes=BLOCK_NBYTES,
            check_replicas=check_replicas,
        )
        assert len(image.pieces) == check_replicas
        assert image.nbytes == check_replicas * BLOCK_NBYTES
        assert (image.holdings.digest_count * 32).tolist() == [len(digests)]


@pytest.mark.parametrize("check_replicas", [True, False])
def test_replica_that_differs_is_found_only_where_asked(check_replicas):
    """REQ-CMT-012."""
    parts = [snapshot(holds_replica(value)) for value in (1, 1, 2)]
    if not check_replicas:
        assert merge(*parts, check_replicas=False).tensors[0].sharding[0][1] == 0
        return
    assert merge(*parts[:2], check_replicas=True).tensors[0].sharding[0][1] == 0
    error = error_of(lambda: merge(*parts, check_replicas=True))
    assert (error.code, error.where) == (Code.REPLICA_DIVERGED, "weights 'shared'")
    assert f"block 1 (from byte {BLOCK_NBYTES})" in error.detail
    assert "writers 0 and 2" in error.detail


@pytest.mark.parametrize("saver", ["thread", "inline"])
@pytest.mark.parametrize("check_replicas", [True, False])
def test_replicas_are_compared_at_each_save_of_a_run(saver, check_replicas):
    """REQ-CMT-012: the first save is fine, then a bit flips on one writer."""
    store, allgather = MemoryStore(), Allgather(2)

    def body(writer: int) -> list[Any]:
        mine = holds_replica(7)
        checkpointer = Checkpointer(
            store,
            ckptfmt.State(weights={"shared": mine}),
            writer=(writer, 2),
            agree=allgather.of(writer),
            saver=saver,
            check_replicas=check_replicas,
            deadline_s=20,
        )
        outcomes: list[Any] = []
        with checkpointer:
            for step in (1, 2):
                checkpointer.step = step
                mine.array[BLOCK_NBYTES // 4 + 9] = writer * (step - 1)
                try:
                    handle = checkpointer.save()
                    assert handle is not None
                    handle.wait(timeout_s=20)
                    outcomes.append("ok")
                except ckptfmt.CkptError as error:
                    outcomes.append(error)
            checkpointer._saves.close(deadline_s=20, quietly=True)
        return outcomes

    (_, first), (_, second) = found = run_writers(2, body)
    assert [outcomes[0] for outcomes in found] == ["ok", "ok"]
    if not check_replicas:
        assert (first, second) == ("ok", "ok")
        return
    assert (first.code, type(first), first.where) == (
        Code.REPLICA_DIVERGED,
        LayoutError,
        "weights 'shared'",
    )
    assert "block 1" in first.detail
    assert "writers 0 and 1" in first.detail
    assert (type(second), second.as_json()) == (LayoutError, first.as_json())


def test_headers_are_those_of_the_files() -> None:
    made = snapshot(
        tensor("w", np.ones(3, np.float32)), tensor("z", np.array([1j])), tensor("m", np.ones(1000))
    )
    store = MemoryStore()
    part = write_part(store, made, origin(), writer=0)
    image = plan_image(made, block_nbytes=4096)
    assert [digest_bytes(shard.header) for shard in image.shards] == [
        file.header_digest for file in part.files
    ]
    assert dataclasses.replace(image).pieces == image.pieces


def test_tensors_that_need_more_headers_than_one_are_divided_among_files(monkeypatch):
    """A header of 16 MiB has room for about 150,000 tensors; here it is made small. REQ-SHD-001."""
    monkeypatch.setattr("ckptfmt.write.image._ENTRIES_NBYTES", 8192)
    names = [f"layers.{number}.weight" for number in range(1000)]
    made = snapshot(*[tensor(name, np.full(3, number)) for number, name in enumerate(names)])
    image = plan_image(made, block_nbytes=4096)
    assert [shard.stem for shard in image.shards][:3] == ["weights", "weights_aa", "weights_ab"]
    assert max(len(shard.header) for shard in image.shards) <= 8192 + 4096
    store = MemoryStore()
    save(store, made)
    with Checkpoint(store) as checkpoint:
        assert [int(checkpoint.weights[name][:][0]) for name in names] == list(range(1000))
    assert not verify(store).violations


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.lists(st.integers(0, 2**20), max_size=4),
)
def test_an_entry_of_a_header_never_takes_more_than_what_is_planned_for_it(name, shape):
    shape = tuple(shape) if math.prod(shape) < 2**60 else ()
    without, _ = plan_shard([])
    header, _ = plan_shard([(f"{name}#{2**20}", "F8_E4M3FNUZ", shape)])
    assert len(header.rstrip()) - len(without.rstrip()) <= most_entry_nbytes(name, len(shape))


# --- what another process is told of an image -----------------------------------------------------


def test_an_image_is_told_without_the_digests_that_are_still_to_come() -> None:
    """It went as a part of no attempt, with 32 zeros for each block, which were compressed and checked."""
    made = snapshot(tensor("w", np.zeros(1 << 20, np.int8)))
    told_nbytes = {
        size: len(dump_msgpack(plan_image(made, block_nbytes=size).as_dict()))
        for size in (4096, 1 << 20)
    }
    assert abs(told_nbytes[4096] - told_nbytes[1 << 20]) < 16


def test_a_damaged_image_is_refused_by_name() -> None:
    """A saver that believed it would write elsewhere in the slot, or die of an IndexError."""
    made = snapshot(
        tensor("w", np.ones((4, 3), np.float32)), tensor("v", np.ones(9)), tensor("x", np.ones(4))
    )
    written = frozenset((key_of(source), source.boxes[0]) for source in made.tensors[:2])
    message = dump_msgpack(plan_image(made, written=written, block_nbytes=4096).as_dict())
    codes = set()
    for at, bit in itertools.product(range(len(message)), (1, 128)):
        changed = bytearray(message)
        changed[at] ^= bit
        try:
            Image.from_dict(parse_msgpack(bytes(changed), where="message", limit_items=1 << 28))
        except CkptError as error:  # and nothing else
            codes.add(error.code)
    assert codes >= {Code.COLUMN_FORM, Code.COLUMN_ORDER, Code.DOC_SCHEMA, Code.PACKED_FORM}

"""Boxes of placements against torch.chunk, real DTensors and FSDP2, and against exact tiling."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.box import Box
from ckptfmt.errors import CkptError, Code
from ckptfmt.layout.placements import (
    LocalPiece,
    Replicate,
    Shard,
    StridedShard,
    boxes_of,
    is_replica,
    local_boxes,
)
from ckptfmt.layout.tiling import check_tiling


def replica_index(mesh_shape, coordinate, placements):
    """The rank's number among those that hold the same pieces: 0 for the first."""
    index = 0
    for count, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            index = index * count + at
    return index


def coordinates(mesh_shape):
    return itertools.product(*map(range, mesh_shape))


def gather(global_shape, pieces):
    """The local array that the pieces describe, of a tensor whose elements are their own C-order numbers."""
    whole = np.arange(math.prod(global_shape)).reshape(global_shape)
    ends = [piece.local_box.end for piece in pieces]
    local = np.full(
        [max(end) for end in zip(*ends, strict=True)] if pieces and global_shape else (), -1
    )
    if not pieces:
        return np.zeros(0, int)
    for piece in pieces:
        local[piece.local_box.relative_to(Box.whole(local.shape))] = whole[
            piece.box.relative_to(Box.whole(global_shape))
        ]
    return local


@st.composite
def layouts(draw):
    global_shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(global_shape) - 1)
    placement = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dims),
        st.builds(StridedShard, dims, split_factor=st.integers(1, 4)),
    )
    return global_shape, mesh_shape, tuple(draw(placement) for _ in mesh_shape)


@given(layouts(), st.booleans())
def test_the_pieces_of_all_ranks_tile_the_tensor(layout, fsdp2):
    global_shape, mesh_shape, placements = layout
    boxes = [
        piece.box
        for coordinate in coordinates(mesh_shape)
        if replica_index(mesh_shape, coordinate, placements) == 0
        for piece in boxes_of(global_shape, mesh_shape, coordinate, placements, fsdp2=fsdp2)
    ]
    rows = [
        np.array([getattr(b, a) for b in boxes], np.int64).reshape(-1, len(global_shape))
        for a in ("begin", "shape")
    ]
    check_tiling(global_shape, *rows, where="w")


@given(layouts())
def test_the_local_boxes_of_a_rank_tile_its_local_tensor(layout):
    global_shape, mesh_shape, placements = layout
    for coordinate in coordinates(mesh_shape):
        pieces = boxes_of(global_shape, mesh_shape, coordinate, placements)
        assert (gather(global_shape, pieces) >= 0).all()
        assert [piece.box.shape for piece in pieces] == [piece.local_box.shape for piece in pieces]
        begins = [piece.local_box.begin for piece in pieces]
        assert begins == sorted(begins)


@given(layouts())
def test_ranks_of_one_replica_group_hold_the_same(layout):
    global_shape, mesh_shape, placements = layout
    holders: dict[object, list[int]] = {}
    for coordinate in coordinates(mesh_shape):
        key = tuple(
            -1 if isinstance(placement, Replicate) else at
            for at, placement in zip(coordinate, placements, strict=True)
        )
        pieces = boxes_of(global_shape, mesh_shape, coordinate, placements)
        holders.setdefault((key, pieces), []).append(
            replica_index(mesh_shape, coordinate, placements)
        )
    sizes = {len(indices) for indices in holders.values()}
    assert len(sizes) == 1
    assert all(indices == list(range(len(indices))) for indices in holders.values())
    assert is_replica(mesh_shape, placements) == (sizes.pop() > 1)


@given(st.integers(0, 40), st.integers(1, 9))
def test_a_shard_is_a_chunk_of_torch(count, ranks):
    torch = pytest.importorskip("torch")
    chunks = [chunk.tolist() for chunk in torch.arange(count).chunk(ranks)]
    chunks += [[]] * (ranks - len(chunks))
    mine = [
        gather((count,), boxes_of((count,), (ranks,), (i,), (Shard(0),))).tolist()
        for i in range(ranks)
    ]
    assert mine == chunks


def test_a_contiguous_shard_is_one_piece():
    placements = (StridedShard(0, split_factor=2), Shard(0))
    for coordinate in coordinates((2, 2)):
        assert len(boxes_of((8, 5), (2, 2), coordinate, placements)) == 1
    assert boxes_of((8,), (1,), (0,), (StridedShard(0, split_factor=4),)) == (
        LocalPiece(Box((0,), (8,)), Box((0,), (8,))),
    )


def test_a_scalar_and_an_empty_shard():
    assert boxes_of((), (2,), (1,), (Replicate(),)) == (LocalPiece(Box((), ()), Box((), ())),)
    assert boxes_of((2,), (4,), (3,), (Shard(0),)) == ()
    assert boxes_of((0, 4), (2,), (0,), (Shard(1),)) == ()


@pytest.mark.parametrize(
    ("mesh_shape", "coordinate", "placements"),
    [
        ((2,), (2,), (Shard(0),)),
        ((2,), (-1,), (Shard(0),)),
        ((2,), (0, 0), (Shard(0),)),
        ((2,), (0,), ()),
        ((2,), (0,), (Shard(2),)),
        ((2,), (0,), (Shard(-1),)),
        ((2,), (0,), (StridedShard(0, split_factor=0),)),
    ],
)
def test_what_does_not_fit_together_is_refused(mesh_shape, coordinate, placements):
    with pytest.raises(CkptError) as raised:
        boxes_of((4, 4), mesh_shape, coordinate, placements)
    assert raised.value.code is Code.ARGUMENT


def test_a_local_tensor_that_no_reading_explains_is_refused():
    placements = (StridedShard(0, split_factor=2), Shard(0))
    with pytest.raises(CkptError) as raised:
        local_boxes((8,), (2, 2), (0, 0), placements, (3,))
    assert raised.value.code is Code.STATE_UNSUPPORTED


def test_a_local_tensor_that_two_readings_explain_is_refused():
    placements = (StridedShard(0, split_factor=6), Shard(0))
    readings = [
        boxes_of((111,), (8, 6), (6, 3), placements, fsdp2=fsdp2)[0].box for fsdp2 in (False, True)
    ]
    assert readings == [Box((108,), (1,)), Box((75,), (1,))]
    with pytest.raises(CkptError) as raised:
        local_boxes((111,), (8, 6), (6, 3), placements, (1,))
    assert raised.value.code is Code.STATE_UNSUPPORTED


@pytest.mark.parametrize(
    ("placements", "order"),
    [
        ((StridedShard(0, split_factor=3), Shard(0)), (1, 0)),
        ((StridedShard(0, split_factor=3), Shard(1), Shard(0)), (1, 2, 0)),
        ((StridedShard(0, split_factor=6), StridedShard(0, split_factor=3), Shard(0)), (2, 1, 0)),
        ((Replicate(), StridedShard(1, split_factor=3), Shard(1)), (0, 2, 1)),
    ],
)
def test_fsdp2_cuts_plainly_what_the_shards_to_the_right_left(placements, order):
    mesh_shape = (4, 2, 3)[-len(placements) :]
    plain = tuple(p if isinstance(p, Replicate) else Shard(p.dim) for p in placements)
    for coordinate in coordinates(mesh_shape):
        turned = [tuple(values[i] for i in order) for values in (mesh_shape, coordinate, plain)]
        for shape in ((16, 31), (23, 16)):
            assert boxes_of(shape, mesh_shape, coordinate, placements, fsdp2=True) == boxes_of(
                shape, *turned
            )


def cases():
    """Shapes, meshes and placements for real DTensors: even, uneven and empty, nested and strided."""
    one = [
        Replicate(),
        Shard(0),
        Shard(1),
        StridedShard(0, 2),
        StridedShard(1, 3),
        StridedShard(0, 5),
    ]
    for shape in ((8, 6), (7, 5), (3, 1), (13, 2)):
        for placement in one:
            yield shape, (8,), (placement,)
        for mesh_shape in ((2, 4), (4, 2)):
            for placements in itertools.product(one, repeat=2):
                yield shape, mesh_shape, placements
    yield (9, 4), (2, 2, 2), (Replicate(), StridedShard(0, 2), Shard(0))
    yield (9, 4), (2, 2, 2), (StridedShard(0, 4), Shard(0), Shard(0))


@pytest.fixture
def fake_rank():
    """Return a function that makes this process pretend to be one rank of several."""
    torch = pytest.importorskip("torch")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    def become(rank, world_size):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group(
            "fake", rank=rank, world_size=world_size, store=FakeStore()
        )

    yield become
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def as_torch(placement):
    from torch.distributed import tensor  # noqa: PLC0415
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415

    if isinstance(placement, StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return tensor.Shard(placement.dim) if isinstance(placement, Shard) else tensor.Replicate()


def test_pieces_are_the_local_tensors_of_dtensor(fake_rank):
    torch = pytest.importorskip("torch")
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

    for rank in range(8):
        fake_rank(rank, 8)
        meshes = {
            shape: torch.distributed.init_device_mesh("cpu", shape)
            for shape in ((8,), (2, 4), (4, 2), (2, 2, 2))
        }
        for shape, mesh_shape, placements in cases():
            full = torch.arange(math.prod(shape)).reshape(shape)
            mesh = meshes[mesh_shape]
            there = distribute_tensor(
                full, mesh, [as_torch(p) for p in placements], src_data_rank=None
            ).to_local()
            pieces = boxes_of(shape, mesh_shape, tuple(mesh.get_coordinate()), placements)
            case = (shape, mesh_shape, mesh.get_coordinate(), placements)
            assert gather(shape, pieces).flatten().tolist() == there.flatten().tolist(), case
            if pieces:
                assert gather(shape, pieces).shape == tuple(there.shape), case


@pytest.mark.parametrize("rows", [1, 5, 12, 15, 16, 17, 22])
def test_pieces_are_the_local_tensors_of_fsdp2_over_tensor_parallelism(fake_rank, rows):
    torch = pytest.importorskip("torch")
    from torch.distributed import tensor  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    mesh_shape, placements = (4, 3), (StridedShard(0, split_factor=3), Shard(0))
    for rank, coordinate in enumerate(coordinates(mesh_shape)):
        fake_rank(rank, 12)
        mesh = torch.distributed.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
        full = torch.arange(rows * 2, dtype=torch.float32).reshape(rows, 2)
        module = torch.nn.Linear(2, rows, bias=False)
        sharded = tensor.distribute_tensor(full, mesh["tp"], [tensor.Shard(0)], src_data_rank=None)
        module.weight = torch.nn.Parameter(sharded)
        fully_shard(module, mesh=mesh["dp"])
        assert module.weight.placements == tuple(as_torch(p) for p in placements)
        there = module.weight.to_local()
        pieces = local_boxes((rows, 2), mesh_shape, coordinate, placements, tuple(there.shape))
        assert gather((rows, 2), pieces).flatten().tolist() == there.flatten().tolist(), coordinate

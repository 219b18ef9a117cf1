"""DTensors and FSDP2: every rank's pieces, from any layout to any other. The ranks are played one after the other."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptfmt.adapters.capture import capture
from ckptfmt.adapters.torch.tensors import pieces_of
from ckptfmt.documents.tree import parse_tree
from ckptfmt.errors import StateError
from ckptfmt.state import State
from tests.adapters.double import checkpoint_of, load, restore, save

LAYOUTS = [(1,), (2,), (4,), (7,), (2, 2), (2, 3)]


@contextlib.contextmanager
def played(rank, world_size):
    torch.distributed.init_process_group(
        "fake", rank=rank, world_size=world_size, store=FakeStore()
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def make(seed, layout=None):
    """A small model with uneven rows, sharded over a mesh (two dimensions: replicated over the first) or not at all."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.LayerNorm(2))
    if layout is not None:
        rank = (
            torch.distributed.get_rank()
        )  # in the names, for torch caches by meshes that compare equal on all ranks
        mesh = init_device_mesh(
            "cpu", layout, mesh_dim_names=(f"outer{rank}", f"inner{rank}")[-len(layout) :]
        )
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer):
    """One step with gradients that each rank cuts out of the same whole ones, so that nothing is communicated."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        whole = torch.rand(parameter.shape, generator=generator)
        parameter.grad = whole if not isinstance(parameter, DTensor) else cut_like(whole, parameter)
    optimizer.step()


def cut_like(whole, parameter):
    local = torch.zeros_like(parameter.to_local().detach())
    for piece in pieces_of(parameter, where="x"):
        cut = tuple(
            slice(begin, end) for begin, end in zip(piece.box.begin, piece.box.end, strict=True)
        )
        into = tuple(
            slice(begin, end)
            for begin, end in zip(piece.local_box.begin, piece.local_box.end, strict=True)
        )
        local[into] = whole[cut]
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def count_of(layout):
    return int(torch.tensor(layout).prod())


def save_sharded(seed, layout, steps=1):
    """Play all ranks of a layout."""
    snapshots, kept = [], []
    for rank in range(count_of(layout)):
        with played(rank, count_of(layout)):
            model, optimizer = make(seed, layout)
            for _ in range(steps):
                step(model, optimizer)
            kept.append((model, optimizer))
            state = State(weights=model, optimizer=optimizer)
            snapshots.append(capture(state, worker=rank, worker_count=count_of(layout)))
    return checkpoint_of(*snapshots)


def contents(checkpoint):
    return {key: checkpoint.read(*key).tobytes() for key in checkpoint.tensors}


@pytest.fixture(scope="module")
def reference():
    model, optimizer = make(1)
    step(model, optimizer)
    return save(State(weights=model, optimizer=optimizer))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_shards_of_all_ranks_make_the_whole(layout, reference):
    checkpoint = save_sharded(1, layout)

    assert contents(checkpoint) == contents(reference)
    for key, tensor in checkpoint.tensors.items():
        elements = sum(box.element_count for box, _ in tensor.sharding)
        assert elements == torch.Size(tensor.global_shape).numel(), key


@pytest.mark.parametrize("before", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_rank_of_a_layout_takes_its_pieces(layout, before, reference):
    snapshots, kept = [], []
    for rank in range(count_of(layout)):
        with played(rank, count_of(layout)):
            model, optimizer = make(2, layout)
            for _ in range(before):
                step(model, optimizer)
            state = State(weights=model, optimizer=optimizer)
            restore(state, reference, worker=rank, worker_count=count_of(layout), strict=False)
            momentum = optimizer.state[model[0].weight]["exp_avg"]
            assert isinstance(momentum, DTensor)
            assert momentum.placements == model[0].weight.placements
            assert not isinstance(optimizer.state[model[0].weight]["step"], DTensor)
            step(model, optimizer)
            kept.append((model, optimizer))
            snapshots.append(capture(state, worker=rank, worker_count=count_of(layout)))

    model, optimizer = make(1)
    step(model, optimizer)
    step(model, optimizer)
    uninterrupted = save(State(weights=model, optimizer=optimizer))
    assert contents(checkpoint_of(*snapshots)) == contents(uninterrupted)


def test_a_sharded_checkpoint_loads_into_a_whole_model(reference):
    model, optimizer = make(2)

    load(State(weights=model, optimizer=optimizer), save_sharded(1, (2, 2)), strict=False)

    assert contents(save(State(weights=model, optimizer=optimizer))) == contents(reference)


def test_replicas_are_declared_by_the_mesh():
    with played(0, 4):
        for layout, replica in (((4,), False), ((2, 2), True)):
            model, _ = make(1, layout)
            sources = capture(State(weights=model), worker=0, worker_count=4).tensors
            assert {source.replica for source in sources} == {replica}
        plain, _ = make(1)
        assert not any(
            source.replica
            for source in capture(State(weights=plain), worker=0, worker_count=4).tensors
        )


def test_after_an_evaluation_the_shards_are_saved():
    with played(0, 2):
        model, _ = make(1, (2,))
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 3))
        assert not isinstance(model[1].weight, DTensor), (
            "the evaluation left no whole parameters: the test is idle"
        )

        sources = {
            source.name: source
            for source in capture(State(weights=model), worker=0, worker_count=2).tensors
        }

    assert sources["1.weight"].boxes[0].shape == (1, 5)


@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Shard(1), Replicate()), (Replicate(), Shard(0))],
    ids=str,
)
def test_tensors_on_a_mesh_of_two_dimensions(placements):
    whole = torch.arange(35.0).reshape(5, 7)
    snapshots = []
    for rank in range(6):
        with played(rank, 6):
            mesh = init_device_mesh("cpu", (2, 3))
            local = whole
            for dim, placement in enumerate(placements):
                if isinstance(placement, Shard):
                    chunks = local.chunk(mesh.size(dim), placement.dim)
                    at = mesh.get_local_rank(dim)
                    local = chunks[at] if at < len(chunks) else local.narrow(placement.dim, 0, 0)
            tensor = DTensor.from_local(
                local.clone(),
                mesh,
                placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            snapshots.append(capture(State(weights={"x": tensor}), worker=rank, worker_count=6))
            assert (
                sum(piece.box.element_count for piece in pieces_of(tensor, where="x"))
                == local.numel()
            )

    other = torch.zeros(5, 7)
    load(State(weights={"x": other}), checkpoint_of(*snapshots), strict=False)
    assert torch.equal(other, whole)


def test_a_rank_outside_of_the_mesh_holds_nothing():
    with played(3, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(
            torch.zeros(0), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
        )
        (source,) = capture(State(weights={"x": tensor}), worker=3, worker_count=4).tensors

    assert source.boxes == ()
    assert source.global_shape == (4,)


def test_a_partial_tensor_is_refused():
    with played(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(StateError, match=r"STATE_UNSUPPORTED.*Partial"):
            capture(State(weights={"x": tensor}), worker=0, worker_count=2)


def test_factored_state_that_does_not_exist_yet_is_refused_for_shards():
    snapshots, kept = [], []
    for rank in range(2):
        with played(rank, 2):
            model, _ = make(1, (2,))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            weight = model[0].weight
            rows = DTensor.from_local(
                torch.ones(weight.to_local().shape[0], 1),
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=torch.Size([5, 1]),
                stride=(1, 1),
            )
            optimizer.state[weight]["row_var"] = rows
            kept.append((model, optimizer))
            snapshots.append(
                capture(State(weights=model, optimizer=optimizer), worker=rank, worker_count=2)
            )
    with played(0, 2):
        model, _ = make(1, (2,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(StateError, match=r"STATE_UNSUPPORTED.*row_var.*by a step"):
            restore(
                State(weights=model, optimizer=optimizer),
                checkpoint_of(*snapshots),
                worker=0,
                worker_count=2,
            )


def test_the_mesh_is_part_of_the_topology():
    with played(0, 4):
        model, _ = make(1, (2, 2))
        snapshot = capture(State(weights=model), worker=0, worker_count=4)

    (leaf,) = (leaf for leaf in snapshot.leaves if (leaf.field, leaf.name) == ("topology", "local"))
    assert parse_tree(leaf.value, where="x")["mesh"] == [
        {"names": ["outer0", "inner0"], "shape": [2, 2]}
    ]


def test_the_step_count_of_a_scalar_parameter_stays_a_plain_tensor():
    def make_scalar():
        mesh = init_device_mesh("cpu", (1,))
        weight = nn.Parameter(
            DTensor.from_local(torch.tensor(2.0), mesh, [Replicate()], run_check=False)
        )
        return State(weights={"w": weight}, optimizer=torch.optim.Adam([weight], lr=0.1)), weight

    with played(0, 1):
        saved, weight = make_scalar()
        weight.grad = weight.detach().clone()
        saved.optimizer.step()
        checkpoint = save(saved)
        live, other = make_scalar()
        load(live, checkpoint)

    state = live.optimizer.state[other]
    assert isinstance(state["exp_avg"], DTensor)
    assert not isinstance(state["step"], DTensor)
    assert float(state["step"]) == 1.0

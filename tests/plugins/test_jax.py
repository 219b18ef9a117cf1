"""JAX: sharded arrays, pytrees of Flax and Optax, on eight virtual devices; trainings that are killed and resumed."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckptfmt
from ckptfmt.errors import CkptError
from ckptfmt.store.memory import MemoryStore
from tests.plugins import trainings
from tests.plugins.trainings import run

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")
linen: Any = pytest.importorskip("flax.linen")
nnx: Any = pytest.importorskip("flax.nnx")
optax: Any = pytest.importorskip("optax")
PendingArray: Any = pytest.importorskip("ckptfmt.adapters.jax").PendingArray
FrozenDict: Any = pytest.importorskip("flax.core").FrozenDict
NamedSharding, P = jax.sharding.NamedSharding, jax.sharding.PartitionSpec
TRAINING = Path(__file__).with_name("jax_training.py")
load: Any = ckptfmt.load
State: Any = ckptfmt.State

DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "int8",
    "int32",
    "uint32",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
)


def code_of(action):
    with pytest.raises(CkptError) as caught:
        action()
    return caught.value.code


def bits(value):
    array = np.asarray(
        jax.random.key_data(value)
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        else value
    )
    return (str(array.dtype), array.shape, array.tobytes())


def all_bits(tree):
    return [
        (jax.tree_util.keystr(path), bits(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def random_array(shape, dtype, seed=0):
    numbers = np.random.default_rng(seed).standard_normal(shape) * 4
    return jnp.asarray(numbers).astype(dtype)


@st.composite
def sharded(draw, shape):
    """Return a sharding of an array of this shape over some of the eight devices."""
    counts = draw(st.sampled_from([(8,), (4, 2), (2, 2), (2, 2, 2), (1,), (3,), (4,)]))
    devices = np.array(draw(st.permutations(jax.devices()))[: math.prod(counts)]).reshape(counts)
    free = [(f"m{number}", count) for number, count in enumerate(counts)]
    spec = []
    for extent in shape:
        left, names = extent, []
        while free and left % free[-1][1] == 0 and draw(st.booleans()):
            name, count = free.pop()
            left //= count
            names.append(name)
        spec.append(tuple(names) or None)
    return NamedSharding(
        jax.sharding.Mesh(devices, [f"m{number}" for number in range(len(counts))]), P(*spec)
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_an_array_of_any_sharding_loads_into_any_other(data, dtype):
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 4, 8, 12, 16]), max_size=3)))
    array = jax.device_put(random_array(shape, dtype), data.draw(sharded(shape)))
    store = MemoryStore()
    ckptfmt.save(store, State(weights={"w": array}, rng=False), step=1)
    sharding = data.draw(sharded(shape))
    for live in (
        jax.device_put(jnp.zeros(shape, dtype), sharding),
        jnp.zeros(shape, dtype),
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),
    ):
        state = State(weights={"w": live}, rng=False)
        load(store, state)
        assert bits(state.weights["w"]) == bits(array)
        if getattr(live, "sharding", None) is not None:
            assert state.weights["w"].sharding == live.sharding
            assert state.weights["w"].committed == getattr(live, "committed", True)
    into = {"w": np.zeros(shape, np.asarray(array).dtype)}
    load(store, State(weights=into, rng=False))
    assert into["w"].tobytes() == np.asarray(array).tobytes()


def test_an_array_is_saved_whole_and_once_and_a_load_reads_what_its_devices_need():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, P("data", None))
    array = jax.device_put(random_array((1024, 64), "float32"), sharding)
    store = MemoryStore()
    ckptfmt.save(store, State(weights={"w": array}, rng=False), step=1)
    with ckptfmt.open(store) as checkpoint:
        assert checkpoint.manifest.fields["weights"].nbytes == array.nbytes
    state = State(weights={"w": jax.device_put(jnp.zeros((1024, 64)), sharding)}, rng=False)
    report = load(store, state)
    assert report.reads.needed_nbytes == array.nbytes
    assert [shard.data.shape for shard in state.weights["w"].addressable_shards] == [(256, 64)] * 8


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(jax.nn.relu(self.norm(self.hidden(x)))))


def linen_params(seed):
    class Mlp(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2)(jax.nn.relu(linen.Dense(8)(x)))

    return Mlp().init(jax.random.key(seed), jnp.zeros((1, 4)))["params"]


def optimizer_of(params):
    chain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(learning_rate=optax.cosine_decay_schedule(1e-3, 100)),
        optax.masked(
            optax.trace(0.9), lambda tree: jax.tree_util.tree_map(lambda leaf: leaf.ndim > 1, tree)
        ),
    )
    state = chain.init(params)
    gradients = jax.tree_util.tree_map(jnp.ones_like, params)
    for _ in range(3):
        _, state = chain.update(gradients, state, params)
    return chain, state


@pytest.mark.parametrize("wrap", [dict, FrozenDict])
def test_trees_of_flax_and_optax_come_back_as_they_were(tmp_path, wrap):
    params = wrap(linen_params(0))
    chain, opt_state = optimizer_of(params)
    extra = {
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), 3),
        "raw": jax.random.PRNGKey(1),
    }
    saved = State(weights=params, optimizer=opt_state, extra=extra)
    ckptfmt.save(tmp_path / "c", saved, step=3)

    fresh = wrap(linen_params(1))
    others = {
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
        "raw": jax.random.PRNGKey(0),
    }
    state = State(weights=fresh, optimizer=chain.init(fresh), extra=others)
    report = load(tmp_path / "c", state)
    assert all_bits(state.weights) == all_bits(params) != all_bits(fresh)
    assert all_bits(state.optimizer) == all_bits(opt_state)
    assert jax.tree_util.tree_structure(state.optimizer) == jax.tree_util.tree_structure(opt_state)
    assert all_bits(state.extra) == all_bits(extra)
    assert type(state.weights) is wrap
    assert report.values["weights:"] is state.weights
    assert report.lowered_by == ("not in State: data, config",)
    assert ckptfmt.validate(tmp_path / "c")
    draws = [jax.random.normal(one["key"], (3,)) for one in (extra, state.extra)]
    assert bits(draws[0]) == bits(draws[1])


def test_the_state_of_an_nnx_module_with_its_keys_and_statistics(tmp_path):
    model, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    x = random_array((6, 4), "float32")
    model(x)
    ckptfmt.save(tmp_path / "c", State(weights=nnx.state(model)), step=1)
    state = State(weights=nnx.state(other))
    load(tmp_path / "c", state)
    nnx.update(other, state.weights)
    assert bits(other(x)) == bits(model(x))
    assert all_bits(nnx.state(other)) == all_bits(nnx.state(model))


def test_what_jax_saved_loads_in_torch_and_the_other_way_round(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(
        torch.bfloat16
    )
    ckptfmt.save(tmp_path / "torch", State(weights=model), step=1)
    mesh = jax.make_mesh((8,), ("x",))
    cut = NamedSharding(mesh, P("x"))
    live = {
        "0": {
            "weight": jax.device_put(jnp.zeros((8, 4), jnp.bfloat16), cut),
            "bias": jnp.zeros(8, jnp.bfloat16),
        },
        "2": {"weight": jnp.zeros((2, 8), jnp.bfloat16), "bias": jnp.zeros(2, jnp.bfloat16)},
    }
    state = State(weights=live, rng=False)
    load(tmp_path / "torch", state, rename=lambda name: name.replace("/", "."))
    for name, parameter in model.named_parameters():
        number, kind = name.split(".")
        assert (
            np.asarray(state.weights[number][kind]).tobytes()
            == parameter.detach().view(torch.uint8).numpy().tobytes()
        )

    ckptfmt.save(tmp_path / "jax", state, step=2)
    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(
        torch.bfloat16
    )
    load(
        tmp_path / "jax",
        State(weights=other, rng=False),
        rename=lambda name: name.replace(".", "/"),
    )
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    (file,) = (tmp_path / "jax").glob("weights-*.safetensors")
    assert set(load_file(file)) == {"0/weight", "0/bias", "2/weight", "2/bias"}
    whole = load(tmp_path / "jax", framework="numpy")["weights"]
    assert whole["0"]["weight"].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("live", "code"),
    [
        ({"a": jnp.zeros((3, 2)), "n": 1}, "SHAPE_MISMATCH"),
        ({"a": jnp.zeros((2, 3), jnp.int32), "n": 1}, "DTYPE_MISMATCH"),
        ({"a": jnp.zeros((2, 3)), "b": jnp.zeros(1), "n": 1}, "TENSOR_MISSING"),
        ({"a": jnp.zeros((2, 3)), "n": 1, "m": 2}, "LEAF_MISSING"),
        ({"a": jnp.zeros((2, 3))}, "LEAF_UNEXPECTED"),
        ({"n": 1, "b": {"c": jnp.zeros((2, 3))}}, "TENSOR_MISSING"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused_and_left_alone(tmp_path, live, code):
    ckptfmt.save(tmp_path / "c", State(weights={"a": jnp.ones((2, 3)), "n": 1}), step=1)
    state = State(weights=live)
    assert code_of(lambda: load(tmp_path / "c", state)) == code
    assert state.weights is live


def test_a_part_of_a_tree_under_other_names_and_converted(tmp_path):
    saved: Any = {"old": {"w": random_array((4,), "float32"), "b": jnp.ones(2)}, "n": 5}
    ckptfmt.save(tmp_path / "c", State(weights=saved), step=1)
    live: Any = {"new": {"w": jnp.zeros(4, jnp.bfloat16), "b": jnp.zeros(2)}, "n": 6}
    state: Any = State(weights=live)
    load(tmp_path / "c", state, rename={"new": "old"}, only="old/w", allow="dtype")
    assert bits(state.weights["new"]["w"]) == bits(saved["old"]["w"].astype(jnp.bfloat16))
    assert (state.weights["new"]["b"].tolist(), state.weights["n"]) == ([0, 0], 6)


def test_keys_of_another_kind_are_refused(tmp_path):
    ckptfmt.save(tmp_path / "c", State(data={"key": jax.random.key(1)}), step=1)
    for live in (jax.random.key(1, impl="unsafe_rbg"), jnp.zeros(2, jnp.uint32)):
        state = State(data={"key": live})
        assert code_of(lambda state=state: load(tmp_path / "c", state)) in (
            "STATE_UNSUPPORTED",
            "TENSOR_MISSING",
        )


def test_keys_are_restored_by_their_shape(tmp_path):
    saved = {
        "one": jax.random.key(3),
        "many": jax.random.split(jax.random.key(4), 8),
        "rbg": jax.random.key(5, impl="rbg"),
    }
    ckptfmt.save(tmp_path / "c", State(extra=saved), step=1)
    shapes = jax.eval_shape(lambda: saved)
    sharding = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("x",)), P("x"))
    many = jax.ShapeDtypeStruct((8,), shapes["many"].dtype, sharding=sharding)
    state = State(extra=shapes | {"many": many})
    load(tmp_path / "c", state)
    for name, key in saved.items():
        assert state.extra[name].dtype == key.dtype
        assert bits(state.extra[name]) == bits(key)
        assert jax.random.bits(state.extra[name].reshape(-1)[0]) == jax.random.bits(
            key.reshape(-1)[0]
        )
    assert state.extra["many"].sharding.is_equivalent_to(sharding, 1)
    other = State(extra=shapes | {"rbg": shapes["one"]})
    assert code_of(lambda: load(tmp_path / "c", other)) == "STATE_UNSUPPORTED"


def test_a_load_without_a_state_returns_arrays_of_jax(tmp_path):
    weights = {"w": jnp.arange(6, dtype="bfloat16").reshape(2, 3), "b": [jnp.ones(2), 3]}
    saved = State(
        weights=weights,
        optimizer=optax.adam(0.1).init(weights["b"][0]),
        extra={"key": jax.random.key(7)},
    )
    ckptfmt.save(tmp_path / "c", saved, step=1)
    trees = load(tmp_path / "c", framework="jax")
    assert isinstance(trees["weights"]["w"], jax.Array)
    assert trees["weights"]["w"].dtype == "bfloat16"
    assert bits(trees["weights"]["w"]) == bits(weights["w"])
    assert trees["weights"]["b"][1] == 3
    assert trees["optimizer"]["extra/key"].dtype == saved.extra["key"].dtype
    assert bits(trees["optimizer"]["extra/key"]) == bits(saved.extra["key"])
    assert all(
        isinstance(value, jax.Array)
        for value in load(tmp_path / "c", only="weights:w", framework="jax")["weights"].values()
    )
    ckptfmt.save(tmp_path / "wide", State(weights={"w": np.ones(3)}), step=1)
    assert code_of(lambda: load(tmp_path / "wide", framework="jax")) == "STATE_UNSUPPORTED"


def test_what_cannot_be_saved_is_named(tmp_path):
    donated = jnp.ones(4)
    donated.delete()
    assert (
        code_of(lambda: ckptfmt.save(tmp_path / "a", State(weights={"w": donated}), step=1))
        == "STATE_UNSUPPORTED"
    )

    def traced(x):
        ckptfmt.save(tmp_path / "b", State(weights={"w": x}), step=1)
        return x

    assert code_of(lambda: jax.jit(traced)(jnp.ones(2))) == "STATE_UNSUPPORTED"
    shape = State(weights={"w": jax.ShapeDtypeStruct((2,), "float32")})
    assert code_of(lambda: ckptfmt.save(tmp_path / "c", shape, step=1)) == "STATE_UNSUPPORTED"
    small = State(weights={"w": jnp.zeros(2, jnp.int4)})
    assert code_of(lambda: ckptfmt.save(tmp_path / "d", small, step=1)) == "STATE_UNSUPPORTED"
    key = State(rng={"key": jax.random.key(0)})
    assert code_of(lambda: ckptfmt.save(tmp_path / "e", key, step=1)) == "STATE_UNSUPPORTED"
    assert code_of(lambda: ckptfmt.sink_of("w", jnp.zeros(2))) == "STATE_UNSUPPORTED"


@pytest.mark.parametrize("saver", ["process", "thread", "inline"])
def test_arrays_that_are_donated_after_save_returned_are_saved_as_they_were(tmp_path, saver):
    step = jax.jit(
        lambda tree: jax.tree_util.tree_map(lambda leaf: leaf + 1, tree), donate_argnums=0
    )
    state = State(weights={"w": jnp.zeros(1 << 18), "n": {"b": jnp.zeros((64, 3))}})
    with ckptfmt.Checkpointer(tmp_path, state, saver=saver) as checkpointer:
        handles: list[Any] = []
        for number in range(1, 5):
            state.weights = step(state.weights)
            handles.append(checkpointer.save(step=number))
        state.weights = step(state.weights)
    for number, handle in enumerate(handles, 1):
        found = load(handle.wait().path)["weights"]
        assert (np.asarray(found["w"]) == number).all()
        assert (np.asarray(found["n"]["b"]) == number).all()


def test_a_scalar_of_weak_type_stays_one(tmp_path):
    state = State(weights={"lr": jnp.asarray(0.5), "n": jnp.asarray(3), "strong": jnp.float32(2)})
    ckptfmt.save(tmp_path / "c", state, step=1)
    live = State(weights={"lr": jnp.asarray(0.1), "n": jnp.asarray(1), "strong": jnp.float32(0)})
    load(tmp_path / "c", live)
    found = live.weights
    assert [found[name].weak_type for name in ("lr", "n", "strong")] == [True, True, False]
    assert [found[name].item() for name in ("lr", "n", "strong")] == [0.5, 3, 2]
    assert (found["lr"] * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_pieces_and_arrays_are_sources_of_their_own(tmp_path):
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    array = jax.device_put(random_array((8, 8), "float32"), NamedSharding(mesh, P("a", "b")))
    source = ckptfmt.source_of("w", array)
    assert source.boxes == (ckptfmt.Box((0, 0), (8, 8)),)
    ckptfmt.save(tmp_path / "c", State(weights={"w": source}), step=1)
    assert np.asarray(load(tmp_path / "c")["weights"]["w"]).tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_number_on_a_device_has_the_bits_of_a_float(dtype):
    """The witness compares losses by all their bits, and doesn't wait for a device."""
    value = random_array((1,), dtype)
    pending = PendingArray(value)
    pending.wait()
    assert pending.is_ready()
    assert pending.bits() == int(np.float64(value[0]).view(np.uint64))


def test_fewer_devices_lower_the_claim(tmp_path):
    def state_on(count):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("x",))
        array = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("x")))
        return State(weights={"w": array}, data={}, config={}, optimizer={"n": 1})

    ckptfmt.save(tmp_path / "c", state_on(8), step=1)
    assert load(tmp_path / "c", state_on(8)).claim == "T1"
    for count in (4, 1):
        state = state_on(count)
        report = load(tmp_path / "c", state)
        assert report.claim == "S0"
        assert any("jax/devices: saved 8" in reason for reason in report.lowered_by)
        assert state.weights["w"].tolist() == list(range(16))
        assert len(state.weights["w"].sharding.device_set) == count


def train(directory, name, *more, devices=8, kill_at=None):
    run(TRAINING, directory / f"run-{name}", directory / name, devices, *more, kill_at=kill_at)
    return directory / name


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return a directory with the journal of an undisturbed training, and a run that was killed behind step 28."""
    directory = tmp_path_factory.mktemp("jax")
    train(directory, "right")
    train(directory, "killed", kill_at=28)
    trainings.await_savers(directory / "run-killed")
    return directory


def test_a_killed_training_goes_on_bit_for_bit(killed, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    resumed = train(tmp_path, "killed")
    assert trainings.compare(tmp_path / "right", resumed, last_step=45) == []
    assert len(trainings.read(resumed)[27]) == 2
    assert Path(f"{resumed}.claim").read_text() == "T1 ()"
    judged, compared, _ = trainings.verdict(tmp_path / "run-killed")
    assert (judged, compared >= {"samples", "loss"}) == ("verified", True)
    assert ckptfmt.validate(tmp_path / "run-killed")
    with ckptfmt.open(tmp_path / "run-killed") as checkpoint:
        assert checkpoint.weights["params/Dense_0/kernel"].shape == (8, 16)
    model = torch.nn.ModuleDict({"Dense_0": torch.nn.Module(), "Dense_1": torch.nn.Module()})
    for name, shape in (("Dense_0", (8, 16)), ("Dense_1", (16, 8))):
        model[name].kernel = torch.nn.Parameter(torch.zeros(shape))
        model[name].bias = torch.nn.Parameter(torch.zeros(shape[1]))
    load(
        tmp_path / "run-killed",
        State(weights=model, rng=False),
        rename=lambda name: f"params/{name.replace('.', '/')}",
    )
    right = load(tmp_path / "run-right", only="weights:*", framework="torch")["weights"]["params"]
    assert all(
        torch.equal(p, right[n.split(".")[0]][n.split(".")[1]]) for n, p in model.named_parameters()
    )


def test_a_resume_that_loses_the_key_is_found_to_differ(killed, tmp_path, may_be_refuted):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    found = trainings.compare(
        tmp_path / "right", train(tmp_path, "killed", "--lose-key"), last_step=45
    )
    assert found[0].startswith("step 26 differs in key")
    judged, what, told = trainings.verdict(tmp_path / "run-killed")
    assert (judged, what) == ("refuted", {"loss"})
    assert "a state that isn't in State" in told
    may_be_refuted.add(tmp_path / "run-killed")


def test_a_run_goes_on_with_the_same_samples_on_fewer_devices(killed, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    resumed = train(tmp_path, "killed", devices=4)
    right, ours = trainings.read(tmp_path / "right"), trainings.read(resumed)
    for name in ("ids", "key", "learning_rate", "noise"):
        assert all(
            line[name] == right[step][0][name] for step, lines in ours.items() for line in lines
        )
    assert Path(f"{resumed}.claim").read_text().startswith("S1 ")


def test_processes_of_jax_save_and_load_their_own_shards(tmp_path):
    told = run(Path(__file__).with_name("jax_processes.py"), tmp_path / "c", processes=2)
    assert [int(line) for line in told.split()] == [8 * 4 * 4 + 256 + 8] * 2
    assert ckptfmt.validate(tmp_path / "c")
    with ckptfmt.open(tmp_path / "c") as checkpoint:
        assert checkpoint.manifest.fields["weights"].nbytes == 2 * 256
        tensors = {
            name: checkpoint.tensors["weights", name, "global"] for name in checkpoint.weights
        }
        assert {name: len(one.sharding) for name, one in tensors.items()} == {
            "layer/cut": 4,
            "layer/copied": 2,
        }
    found = load(tmp_path / "c", framework="numpy")["weights"]["layer"]
    assert all((array == np.arange(64).reshape(8, 8)).all() for array in found.values())
    assert (
        code_of(lambda: load(tmp_path / "c", State(weights={"layer": {"cut": jnp.zeros((4, 4))}})))
        == "SHAPE_MISMATCH"
    )


def test_a_weak_type_is_loaded(tmp_path):
    """It decides the dtype of results: weak float32 times bfloat16 is bfloat16."""
    scalar = jax.jit(lambda: 0.5)()
    tree = {
        "scalar": scalar,
        "vector": jnp.broadcast_to(scalar, (3,)),
        "committed": jax.device_put(jnp.broadcast_to(scalar, (3,)), jax.devices()[0]),
        "whole": jax.jit(lambda: 7)(),
    }
    assert all(array.weak_type for array in tree.values())
    ckptfmt.save(tmp_path / "c", ckptfmt.State(weights=tree, rng=False), step=1)
    state: Any = ckptfmt.State(weights=jax.tree.map(lambda array: array * 0, tree), rng=False)
    ckptfmt.load(tmp_path / "c", state)
    for name, array in state.weights.items():
        assert array.weak_type, name
        assert (array == tree[name]).all(), name
        assert (array.dtype, array.committed) == (tree[name].dtype, tree[name].committed), name


def test_nodes_without_arrays_keep_their_classes(tmp_path):
    weights, rule = {"w": jnp.ones(4)}, optax.sgd(0.1)
    ckptfmt.save(
        tmp_path / "c",
        ckptfmt.State(weights=weights, optimizer=rule.init(weights), rng=False),
        step=1,
    )
    state = ckptfmt.State(weights=weights, optimizer=rule.init(weights), rng=False)
    report: Any = ckptfmt.load(tmp_path / "c", state)
    assert report.claim == "S0"
    assert jax.tree.structure(state.optimizer) == jax.tree.structure(rule.init(weights))

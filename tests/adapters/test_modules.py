"""Modules: names, wrappers, ties, buffers, hooks, kinds of tensors."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel

from ckptfmt.adapters.capture import capture
from ckptfmt.errors import Code, StateError
from ckptfmt.state import Parts, PerWorker, State
from tests.adapters.double import checkpoint_of, load, restore, save


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def weight_names(checkpoint):
    return sorted(name for field, name, _ in checkpoint.tensors if field == "weights")


def round_trip(live, other):
    checkpoint = save(State(weights=live))
    load(State(weights=other), checkpoint)
    return checkpoint


class Odd(nn.Module):
    """Attributes that wrappers also use, in a class that wraps nothing."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)
        self._checkpoint_wrapped_module = nn.Linear(2, 2)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "wrap", [torch.compile, nn.DataParallel, checkpoint_wrapper], ids=lambda wrap: wrap.__name__
)
def test_wrappers_do_not_show_in_names_and_a_users_attributes_do(wrap):
    model = nn.Sequential(nn.Linear(2, 2), Odd())
    plain = copy.deepcopy(model)
    expected = sorted(plain.state_dict())

    inner = nn.Sequential(wrap(model[0]), wrap(model[1]))
    checkpoint = save(State(weights=wrap(inner)))

    assert weight_names(checkpoint) == expected
    load(State(weights=plain), checkpoint)
    assert {key: raw(value) for key, value in plain.state_dict().items()} == {
        key: raw(value) for key, value in model.state_dict().items()
    }


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_parameters_of_wrapped_modules_have_names_for_their_optimizer():
    inner = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    model = torch.compile(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    inner(torch.ones(2)).sum().backward()
    optimizer.step()

    checkpoint = save(State(weights=model, optimizer=optimizer))

    assert ("optimizer", "0.weight/momentum_buffer", "global") in checkpoint.tensors


@pytest.mark.usefixtures("one_process")
def test_statistics_of_a_data_parallel_module_belong_to_the_worker():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = nn.parallel.DistributedDataParallel(model)
    model.append(nn.SyncBatchNorm(2))  # wrapped on CPU it would be refused

    checkpoint = save(State(weights=wrapped), worker_count=2)
    alone = save(State(weights=wrapped))

    own = sorted({name for _, name, scope in checkpoint.tensors if scope != "global"})
    assert own == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert {scope for _, _, scope in checkpoint.tensors} == {"global", "lw/0", "lw/1"}
    assert {scope for _, _, scope in alone.tensors} == {"global"}
    assert weight_names(alone) == sorted(model.state_dict())

    report = load(State(weights=model), checkpoint, strict=False)
    assert any("1.running_mean" in line and "process 0" in line for line in report.downgrades)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_process")
def test_fsdp1_is_refused_by_name():
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))

    with pytest.raises(StateError, match=r"STATE_UNSUPPORTED.*FSDP1.*fully_shard"):
        save(State(weights=model))


class Tied(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        if tied:
            self.head.weight = self.table.weight


def test_tied_weights_are_saved_once_and_loaded_into_either():
    model = Tied(tied=True)
    checkpoint = save(State(weights=model))
    tensor = checkpoint.tensors["weights", "table.weight", "global"]
    assert weight_names(checkpoint) == ["table.weight"]
    assert tensor.aliases == ("head.weight",)

    for tied in (True, False):
        other = Tied(tied=tied)
        load(State(weights=other), checkpoint)
        assert raw(other.table.weight) == raw(other.head.weight) == raw(model.table.weight)
        assert (other.table.weight is other.head.weight) is tied


def test_views_of_the_same_memory_are_tied_too():
    model = Tied(tied=False)
    model.head.weight = nn.Parameter(model.table.weight.detach())

    assert weight_names(save(State(weights=model))) == ["table.weight"]


def test_weights_saved_apart_and_tied_here_must_be_equal():
    apart = Tied(tied=False)
    different = save(State(weights=apart))
    with torch.no_grad():
        apart.head.weight.copy_(apart.table.weight)
    equal = save(State(weights=apart))

    with pytest.raises(StateError, match=r"TENSOR_UNEXPECTED.*other contents"):
        load(State(weights=Tied(tied=True)), different)
    load(State(weights=Tied(tied=True)), equal)


def test_an_optimizer_of_tied_weights_goes_on_under_another_first_name():
    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 4, bias=False)
            self.table = nn.Embedding(4, 3)
            self.table.weight = self.head.weight

    model, other = Tied(tied=True), Swapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.head(model.table(torch.tensor([1]))).sum().backward()
    optimizer.step()
    again = torch.optim.SGD(other.parameters(), lr=0.2, momentum=0.9)

    load(State(weights=other, optimizer=again), save(State(weights=model, optimizer=optimizer)))

    (name,) = (tuple(state) for state in again.state.values())
    assert name == ("momentum_buffer",)
    assert raw(again.state[other.head.weight]["momentum_buffer"]) == raw(
        optimizer.state[model.head.weight]["momentum_buffer"]
    )


def test_non_persistent_buffers_are_saved_as_such():
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(2))
            self.cache = nn.Buffer(torch.zeros(3), persistent=False)
            self.register_buffer("nothing", None, persistent=False)

    inner, again = Cache(), Cache()
    inner.cache.fill_(5)

    checkpoint = round_trip(nn.ModuleDict({"a": inner}), nn.ModuleDict({"a": again}))

    assert checkpoint.tensors["weights", "a.cache", "global"].storage == "non-persistent"
    assert checkpoint.tensors["weights", "a.kept", "global"].storage == "persistent"
    assert again.cache.tolist() == [5, 5, 5]


def test_parameters_stay_the_same_objects():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    weight, pointer = other.weight, other.weight.data_ptr()

    round_trip(model, other)

    assert other.weight is weight
    assert weight.data_ptr() == pointer
    assert weight.requires_grad
    assert weight.is_leaf


SPECIAL = {
    torch.float32: (torch.int32, [0x80000000, 0x7FC00001, 0xFF800001, 0x7F800000, 1]),
    torch.bfloat16: (torch.int16, [0x8000, 0x7FC1, 0xFF81, 0x7F80, 1]),
    torch.float16: (torch.int16, [0x8000, 0x7E01, 0xFC01, 0x7C00, 1]),
    torch.float64: (torch.int64, [0x8000000000000000, 0x7FF8000000000001, 0xFFF0000000000001, 1]),
    torch.complex64: (torch.int64, [0x800000007FC00001, 0xFF80000180000000]),
    torch.float8_e4m3fn: (torch.uint8, [0x80, 0x7F, 0xFF, 1]),
}


@pytest.mark.parametrize("dtype", SPECIAL, ids=str)
def test_minus_zero_and_the_payload_of_a_nan_survive(dtype):
    integer, patterns = SPECIAL[dtype]
    signed = np.array(patterns, np.uint64).astype(f"u{integer.itemsize}")
    tensor = torch.from_numpy(signed.view(f"i{integer.itemsize}")).view(integer).view(dtype)
    other = torch.zeros_like(tensor)

    round_trip({"x": tensor}, {"x": other})

    assert raw(other) == signed.tobytes()


DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
]
DTYPES += [
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
]
DTYPES += ["float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 2), (4, 3, 2)], ids=str)
@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_every_dtype_and_shape(name, shape):
    dtype = getattr(torch, name)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    pattern = torch.arange(nbytes, dtype=torch.uint8) % (2 if name == "bool" else 251)
    tensor = pattern.view(dtype).reshape(shape)
    other = torch.zeros(nbytes, dtype=torch.uint8).view(dtype).reshape(shape)

    round_trip({"x": tensor}, {"x": other})

    assert raw(other) == pattern.numpy().tobytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0).reshape(4, 6).t(),
        lambda: torch.arange(24.0).reshape(4, 6)[1:3, ::2],
        lambda: torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda: torch.tensor([1 + 2j, 3 - 0j]).conj(),
        lambda: torch.tensor([1 + 2j, 3 - 0j]).conj().imag,
    ],
    ids=["transposed", "slice", "channels-last", "conjugated", "negative"],
)
def test_views_are_saved_and_filled_by_what_they_show(make):
    tensor, other = make(), torch.zeros_like(make())
    into = make()
    into.copy_(other)

    round_trip({"x": tensor}, {"x": into})

    assert torch.equal(into, tensor)
    assert raw(into.resolve_conj().resolve_neg()) == raw(tensor.resolve_conj().resolve_neg())


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.zeros(2).as_subclass(Sub), "Sub"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (nn.parameter.UninitializedParameter, "UninitializedParameter"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_more_than_its_bytes_is_refused_by_name(make, said):
    with pytest.raises(StateError) as caught:
        save(State(weights={"deep": [make()]}))

    assert caught.value.code == "STATE_UNSUPPORTED"
    assert said in str(caught.value)
    assert caught.value.where == "weights:deep/0"


def test_a_destination_on_meta_is_refused_with_its_remedy():
    checkpoint = save(State(weights=nn.Linear(2, 2)))

    with pytest.raises(StateError, match=r"META_DESTINATION.*to_empty"):
        load(State(weights=nn.Linear(2, 2, device="meta")), checkpoint)


def test_an_expanded_destination_is_refused():
    checkpoint = save(State(weights={"x": torch.ones(3, 2)}))

    with pytest.raises(StateError, match=r"STATE_UNSUPPORTED.*expanded"):
        load(State(weights={"x": torch.ones(2).expand(3, 2)}), checkpoint)


def test_all_missing_and_unexpected_tensors_are_named_before_anything_changes():
    saved = save(State(weights=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})))
    live = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    before = raw(live["a"].weight)

    with pytest.raises(StateError) as missing:
        load(State(weights=live), saved)
    with pytest.raises(StateError) as unexpected:
        load(State(weights=live), saved, allow={"missing"})

    assert missing.value.code == "TENSOR_MISSING"
    assert "c.weight" in str(missing.value)
    assert "c.bias" in str(missing.value)
    assert unexpected.value.code == "TENSOR_UNEXPECTED"
    assert "b.weight" in str(unexpected.value)
    assert raw(live["a"].weight) == before

    report = load(State(weights=live), saved, allow={"missing", "unexpected"})
    assert raw(live["a"].weight) != before
    assert report.claim == "S0"
    assert any("c.weight" in line for line in report.downgrades)


def test_another_shape_is_refused():
    with pytest.raises(StateError, match=r"SHAPE_MISMATCH.*\(2, 3\).*\(2, 2\)"):
        load(State(weights=nn.Linear(2, 2)), save(State(weights=nn.Linear(3, 2))))


def test_another_dtype_is_refused_or_converted_and_reported():
    saved, live = nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16)
    checkpoint = save(State(weights=saved))

    with pytest.raises(StateError, match="DTYPE_MISMATCH"):
        load(State(weights=live), checkpoint)
    report = load(State(weights=live), checkpoint, allow={"dtype"})

    assert raw(live.weight) == raw(saved.weight.to(torch.bfloat16))
    assert any("DTYPE_MISMATCH" in line for line in report.downgrades)


def test_a_name_that_needs_escaping_and_two_modules():
    checkpoint = save(
        State(weights={"a/b": nn.Linear(2, 2, bias=False), "c~": nn.Linear(2, 2, bias=False)})
    )

    assert weight_names(checkpoint) == ["a~1b/weight", "c~0/weight"]


def test_keys_that_make_the_same_name_are_refused():
    with pytest.raises(StateError, match="STATE_NAME"):
        save(State(weights={1: torch.ones(2), "1": torch.zeros(2)}))


class WithExtra(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.value = value

    def get_extra_state(self):
        return {"amax": torch.tensor([self.value]), "step": int(self.value)}

    def set_extra_state(self, state):
        self.value = float(state["amax"])


def test_extra_state_comes_back_and_has_a_module_of_its_own_name():
    live, other = nn.ModuleDict({"bn": WithExtra(3.0)}), nn.ModuleDict({"bn": WithExtra(0.0)})

    checkpoint = round_trip(checkpoint_wrapper(live), other)

    assert ("weights", "bn._extra_state", "global") in checkpoint.leaves
    assert ("weights", "bn._extra_state/amax", "global") in checkpoint.tensors
    assert other["bn"].value == 3.0


def test_a_buffer_may_be_called_like_extra_state():
    def make(value):
        module = nn.Module()
        module.register_buffer("_extra_state", torch.full((2,), value))
        return module

    live, other = make(3.0), make(0.0)

    checkpoint = round_trip(live, other)

    assert weight_names(checkpoint) == ["_extra_state"]
    assert raw(other.get_buffer("_extra_state")) == raw(live.get_buffer("_extra_state"))


def test_extra_state_that_does_not_take_its_value_is_found_out():
    class Forgetful(WithExtra):
        def set_extra_state(self, state):
            pass

    with pytest.raises(StateError, match=r"READ_BACK.*_extra_state"):
        round_trip(WithExtra(3.0), Forgetful(1.0))


class Hooked(nn.Module):
    """Shows a scaled copy of its weight in place of the weight."""

    def __init__(self, *, faithful=True):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.bias = nn.Parameter(torch.rand(3))
        self.faithful = faithful
        self._register_state_dict_hook(self._show)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _show(_module, state_dict, prefix, _metadata):
        state_dict[f"{prefix}doubled"] = state_dict.pop(f"{prefix}weight").detach() * 2
        state_dict[f"{prefix}factor"] = 2

    @staticmethod
    def _take(module, state_dict, prefix, *_):
        state_dict.pop(f"{prefix}factor")
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}doubled") / (
            2 if module.faithful else 3
        )


def test_what_hooks_make_is_loaded_by_them_and_read_back():
    live, other = nn.Sequential(Hooked()), nn.Sequential(Hooked())

    checkpoint = round_trip(live, other)

    assert weight_names(checkpoint) == ["0.bias", "0.doubled"]
    assert raw(other[0].weight) == raw(live[0].weight)
    with pytest.raises(StateError, match=r"READ_BACK.*0.doubled"):
        load(State(weights=nn.Sequential(Hooked(faithful=False))), checkpoint)


def test_a_view_in_a_state_dict_is_filled_in_place():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qk = nn.Parameter(torch.rand(4))
            self._register_state_dict_hook(self._split)

        @staticmethod
        def _split(_module, state_dict, prefix, _metadata):
            both = state_dict.pop(f"{prefix}qk")
            state_dict[f"{prefix}q"], state_dict[f"{prefix}k"] = both[:2], both[2:]

    live, other = Fused(), Fused()

    checkpoint = round_trip(live, other)

    assert weight_names(checkpoint) == ["k", "q"]
    assert raw(other.qk) == raw(live.qk)


def test_averaged_weights_are_filled_in_place_with_their_counter():
    model = nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    fresh = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    deep = copy.deepcopy(model)
    other = nn.Linear(2, 2)
    copied = copy.deepcopy(other)
    pointer = copied.weight.data_ptr()

    checkpoint = save(State(weights=model, extra={"swa": average, "ema": deep}))
    load(State(weights=other, extra={"swa": fresh, "ema": copied}), checkpoint)

    assert ("optimizer", "extra/swa/module.weight", "global") in checkpoint.tensors
    assert fresh.n_averaged == 1
    assert raw(fresh.module.weight) == raw(average.module.weight)
    assert raw(copied.weight) == raw(deep.weight)
    assert copied.weight.data_ptr() == pointer


def test_per_worker_modules_and_a_load_by_fewer_and_more():
    """REQ-CTX-003, REQ-CTX-004."""
    live = [nn.Linear(2, 2) for _ in range(2)]
    checkpoint = checkpoint_of(
        *(
            capture(State(weights=PerWorker(net)), worker=i, worker_count=2)
            for i, net in enumerate(live)
        )
    )
    assert {scope for field, _, scope in checkpoint.tensors if field == "weights"} == {
        "lw/0",
        "lw/1",
    }

    for worker, source in ((0, 0), (1, 1), (2, 0)):
        other = nn.Linear(2, 2)
        report = restore(
            State(weights=PerWorker(other)), checkpoint, worker=worker, worker_count=3, strict=False
        )
        assert raw(other.weight) == raw(live[source].weight)
        assert any("process 2 saved none" in line for line in report.downgrades) is (worker == 2)


def test_sparse_optimizer_names_of_a_plain_mapping():
    weights = {"w": torch.ones(2, requires_grad=True)}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9)
    weights["w"].sum().backward()
    optimizer.step()

    assert ("optimizer", "w/momentum_buffer", "global") in save(
        State(weights=weights, optimizer=optimizer)
    ).tensors


def test_empty_tensors_at_one_place_are_not_tied():
    flat = torch.zeros(4)
    model = nn.ParameterDict({key: nn.Parameter(flat[:0].reshape(0, 3)) for key in "ab"})

    assert weight_names(save(State(weights=model))) == ["a", "b"]


class Layers(nn.Module):
    """Some layers of a model, under the names that they have in all of it."""

    def __init__(self, numbers, seed, shared=None):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleDict({str(number): nn.Linear(2, 2) for number in numbers})
        self.shared = shared


@pytest.mark.parametrize("owners", [(0, 0, 1, 1), (0, 1, 0, 1), (2, 0, 0, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("is_whole_first", [True, False])
def test_parts_of_a_model_have_the_names_of_the_whole(owners, is_whole_first):
    """As of a process with several stages of a pipeline; each part has an optimizer of its own."""

    def make(seed, *, whole):
        torch.manual_seed(seed)
        shared = nn.Linear(2, 2)
        split = (
            [range(4)]
            if whole
            else [[n for n, owner in enumerate(owners) if owner == part] for part in range(3)]
        )
        modules = [Layers(numbers, seed + part, shared) for part, numbers in enumerate(split)]
        optimizers = [
            torch.optim.AdamW(module.layers.parameters())
            for module in modules
            if len(module.layers)
        ]
        for module, optimizer in zip(
            [m for m in modules if len(m.layers)], optimizers, strict=True
        ):
            sum(layer(torch.ones(1, 2)).sum() for layer in module.layers.values()).backward()
            optimizer.step()
        state = State(weights=modules[0] if whole else Parts(modules), optimizer=optimizers)
        found = {
            name: raw(tensor) for module in modules for name, tensor in module.named_parameters()
        }
        names = {
            id(tensor): name for module in modules for name, tensor in module.named_parameters()
        }
        kept = {
            names[id(tensor)]: {key: raw(value) for key, value in held.items()}
            for optimizer in optimizers
            for tensor, held in optimizer.state.items()
        }
        return state, found, kept

    state, weights, kept = make(1, whole=is_whole_first)
    checkpoint = save(state)
    assert weight_names(checkpoint) == sorted(weights)
    other, before, _ = make(11, whole=not is_whole_first)
    assert before != weights
    load(other, checkpoint, allow=("unexpected",))  # the groups of its optimizers are others
    assert {name: raw(entry) for name, entry in _live(other).items()} == weights
    again, _, _ = make(21, whole=is_whole_first)
    load(again, checkpoint)
    assert kept == {
        name: {key: raw(value) for key, value in held.items()}
        for name, held in _optimizer_state(again).items()
    }


def _live(state):
    modules: Any = state.weights.modules if isinstance(state.weights, Parts) else [state.weights]
    return {name: tensor for module in modules for name, tensor in module.named_parameters()}


def _optimizer_state(state):
    names = {id(tensor): name for name, tensor in _live(state).items()}
    return {
        names[id(one)]: held
        for optimizer in state.optimizer
        for one, held in optimizer.state.items()
    }


def test_parts_with_different_tensors_of_one_name_are_refused():
    with pytest.raises(StateError) as caught:
        save(State(weights=Parts([Layers([1], 1), Layers([1], 2)])))
    assert caught.value.code == Code.STATE_NAME
    with pytest.raises(StateError, match="Parts holds a dict") as caught:
        save(State(weights=Parts([{"w": torch.zeros(1)}])))
    assert caught.value.code == Code.ARGUMENT


class Scaled(nn.Module):
    """A module that initialises itself by the first batch, unless weights were loaded."""

    def __init__(self, how):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))
        self.is_ready = False
        if how == "post hook":
            self.register_load_state_dict_post_hook(lambda module, _: module.note())
        if how == "pre hook":
            self.register_load_state_dict_pre_hook(lambda module, *_: module.note())

    def note(self):
        self.is_ready = True


class ScaledByOverride(Scaled):
    def _load_from_state_dict(self, *arguments):
        super()._load_from_state_dict(*arguments)
        self.note()


class ScaledByItself(Scaled):
    def load_state_dict(self, state_dict):  # type: ignore[override] # without strict and assign
        super().load_state_dict(state_dict)
        self.note()


def scaled(how):
    if how == "load_state_dict":
        return ScaledByItself(how)
    inner = ScaledByOverride(how) if how == "override" else Scaled(how)
    return nn.Sequential(nn.Linear(2, 2), inner)


@pytest.mark.parametrize("how", ["post hook", "pre hook", "override", "load_state_dict"])
def test_a_load_runs_what_runs_in_a_load_of_torch(how):
    """A module with an initialisation by the first batch lost its loaded weights."""
    saved, live, other = scaled(how), scaled(how), scaled(how)
    nn.init.ones_(list(saved.parameters())[-1])
    checkpoint = save(State(weights={"own": saved, "other": saved}))

    load(State(weights={"own": live, "other": other}), checkpoint, only="own")

    inner = [one if isinstance(one, Scaled) else one[-1] for one in (live, other)]
    assert [one.is_ready for one in inner] == [True, False]
    for mine, theirs in zip(live.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_error_of_a_modules_own_load_says_whose_it_is():
    def fail(*_):
        raise ValueError("no")

    saved = nn.Linear(2, 2)
    live = nn.Linear(2, 2)
    live.register_load_state_dict_post_hook(fail)
    with pytest.raises(ValueError, match="no") as raised:
        load(State(weights=live), save(State(weights=saved)))
    assert any(
        "load_state_dict of the module in weights" in note for note in raised.value.__notes__
    )

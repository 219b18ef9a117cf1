"""Deltas on real training: floors against closed forms, peers that lose nothing, training that is kept, the record."""

import dataclasses
import json
import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import ckptfmt
from benchmarks.chains import Replay
from benchmarks.codecs import CODECS, Blocks, measure_codec
from benchmarks.coding import code, list_groups
from benchmarks.delta import steady_of
from benchmarks.floors import (
    change_of,
    entropy,
    entropy_of_changes,
    gradient_nbytes,
    gradient_nbytes_by_block,
    moment_nbytes,
    ordered,
    step_bits,
)
from benchmarks.rounds import Progress
from benchmarks.scenes import Scene, Sizes, list_scenes
from benchmarks.snapshots import WEIGHT, Pair, Tensor, read_snapshot, round_weights, write_snapshot
from benchmarks.throttled import Link, ThrottledStore
from benchmarks.training import Studio
from ckptfmt.store import LocalStore, MemoryStore
from ckptfmt.store.protocol import SizedChunks
from tests.house.sources import ROOT

RATIOS = {
    "bf16_rl_vs_floor",
    "adamw_vs_raw",
    "adamw_bf16_grads_vs_raw",
    "adamw_clipped_vs_raw",
    "sgd_vs_raw",
    "sgd_bf16_grads_vs_raw",
    "adamw_gap10_1e3_vs_raw",
    "adamw_gap10_1e5_vs_raw",
    "frozen_vs_raw",
    "delta_save_vs_full",
    "delta_unchanged_vs_full",
    "delta_throttled_vs_full",
    "chain_restore_vs_bytes",
}
TINY = Sizes(width=32, layers=2, heads=2, context=32, batch=4, steps=6, settle=2, gap=3, experts=8)
RANDOM = np.random.default_rng(5)


def state_of(*arrays, role=WEIGHT, dtype="float32"):
    tensors = [
        Tensor(field="weights", parameter=f"p{number}", role=role, dtype=dtype, array=array)
        for number, array in enumerate(arrays)
    ]
    return {tensor.name: tensor for tensor in tensors}


def pair_of(base, new, **changes):
    plain = Pair(name="pair", kind="", gap=1, lr=1e-3, options={}, base=base, new=new, gradients={})
    return dataclasses.replace(plain, **changes)


# --- floors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.001, 0.01, 0.25, 0.5])
def test_saying_which_elements_changed_costs_the_binary_entropy(p):
    elements = 1_000_000
    binary = -(p * math.log2(p) + (1 - p) * math.log2(1 - p))

    assert entropy_of_changes(elements, round(p * elements)) == pytest.approx(elements * binary)
    assert (
        entropy_of_changes(elements, 0)
        == entropy_of_changes(elements, elements)
        == entropy_of_changes(0, 0)
        == 0
    )


@pytest.mark.parametrize("values", [1, 2, 5, 256])
def test_values_as_likely_as_each_other_cost_their_logarithm(values):
    assert entropy(np.full(values, 7)) == pytest.approx(math.log2(values))


def test_neighbouring_floats_are_one_apart_in_their_order():
    for kind, lanes in ((ml_dtypes.bfloat16, np.uint16), (np.float32, np.uint32)):
        values = np.array([-2.0, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 2.0]).astype(kind)
        above = np.nextafter(values, kind(np.inf))

        steps = ordered(above.view(lanes)) - ordered(values.view(lanes))

        assert (steps == 1).all()
        assert (np.diff(ordered(values.view(lanes))) >= 0).all()


def test_narrow_steps_cost_their_entropy_and_wide_ones_their_length_and_bits():
    narrow = np.repeat([-1, 1, 2, -2], 100)
    wide = RANDOM.integers(1 << 19, 1 << 20, 100_000) * np.where(
        RANDOM.random(100_000) < 0.5, -1, 1
    )

    assert step_bits(narrow, lane_nbytes=2) == pytest.approx(800)
    assert step_bits(wide, lane_nbytes=4) == pytest.approx(
        100_000 * 20, rel=1e-3
    )  # a sign, and 19 bits below the first
    assert step_bits(np.array([], np.int64), lane_nbytes=2) == 0


def test_the_floor_of_a_state_is_that_of_its_changes_and_of_their_steps():
    base = (
        RANDOM.standard_normal(100_000)
        .astype(np.float32)
        .astype(ml_dtypes.bfloat16)
        .view(np.uint16)
    )
    new = base.copy()
    new[::100] += np.where(np.arange(1000) % 4, 1, 2).astype(np.uint16)

    change = change_of(state_of(base, dtype="bfloat16"), state_of(new, dtype="bfloat16"))

    assert (change.elements, change.changed, change.fraction) == (100_000, 1000, 0.01)
    signs = np.where(base[::100] >> 15, -1, 1) * np.where(np.arange(1000) % 4, 1, 2)
    steps = entropy(np.unique(signs, return_counts=True)[1])
    assert 8 * change.floor_nbytes == pytest.approx(
        entropy_of_changes(100_000, 1000) + 1000 * steps
    )


def test_a_zero_that_changes_its_sign_has_changed():
    base, new = (
        state_of(np.zeros(8, np.float32)),
        state_of(np.array([0.0] * 7 + [-0.0], np.float32)),
    )

    assert change_of(base, new).changed == 1
    assert change_of(base, new).floor_nbytes > 0


def test_gradients_of_one_exponent_cost_their_sign_and_mantissa():
    gradient = (RANDOM.integers(0, 1 << 23, 200_000) | 0x3F800000).astype(np.uint32)
    gradient |= (RANDOM.integers(0, 2, 200_000) << 31).astype(np.uint32)
    wide, narrow = (
        gradient.view(np.float32),
        (gradient & 0xFFFF0000).astype(np.uint32).view(np.float32),
    )

    assert gradient_nbytes([wide], narrow=False) == pytest.approx(200_000 * 24 / 8, rel=1e-3)
    assert gradient_nbytes([narrow], narrow=True) == pytest.approx(200_000 * 8 / 8, rel=1e-3)
    scaled = [narrow, narrow * np.float32(0.25)]
    assert gradient_nbytes(scaled, narrow=True) == pytest.approx(400_000 * 9 / 8, rel=1e-3)
    assert gradient_nbytes_by_block(scaled, narrow=True) == pytest.approx(400_000 * 8 / 8, rel=1e-2)


def test_a_large_moment_keeps_few_digits_of_its_gradient():
    base = np.full(100_000, 1.0, np.float32)
    new = np.float32(0.5) + (RANDOM.integers(1 << 9, 1 << 10, 100_000) * 2.0**-24).astype(
        np.float32
    )

    floor = moment_nbytes(
        state_of(base, role="exp_avg"), state_of(new, role="exp_avg"), role="exp_avg", decay=0.5
    )

    assert floor == pytest.approx(100_000 * 9 / 8), (
        "in its own ULPs: ten bits, of which the first is always 1"
    )


def test_full_saves_are_counted_in():
    assert steady_of(0.2) == pytest.approx((1 + 2 * 0.2) / 3), (
        "a third delta would take the restore to 1.6"
    )
    assert steady_of(0.9) == pytest.approx((1 + 0.9) / 2), "one delta in any case"
    assert steady_of(0.001) == pytest.approx((1 + 15 * 0.001) / 16), "every sixteenth is full"


# --- codecs ---------------------------------------------------------------------------------------


def change_a_little(array):
    changed = array.copy()
    changed.reshape(-1).view(np.uint8)[3] ^= 1
    return changed


@pytest.mark.parametrize("name", CODECS)
def test_peers_lose_nothing(name):
    arrays = [
        RANDOM.standard_normal(shape).astype(np.float32) for shape in ((), (1,), (300, 700), (0, 3))
    ]
    base, new = state_of(*arrays[:3]), state_of(*map(change_a_little, arrays[:3]), arrays[3])

    measured = measure_codec(CODECS[name](), new, base)

    assert measured.nbytes == sum(array.nbytes for array in arrays)
    assert 0 < measured.stored_nbytes < 1.1 * measured.nbytes + 100


def test_a_peer_that_loses_something_is_found():
    class Forgetful(Blocks):
        def decode(self, stored, out, known):
            super().decode(stored, out, known)
            next(iter(out.values()))[0] ^= 1

    with pytest.raises(RuntimeError, match="other bytes"):
        measure_codec(
            Forgetful(4096), state_of(np.ones(3, np.float32)), state_of(np.ones(3, np.float32))
        )


def test_a_block_store_keeps_what_is_new_and_all_digests():
    base = RANDOM.integers(0, 256, 10 * 4096 + 7).astype(np.uint8)

    def stored_of(array):
        return measure_codec(Blocks(4096), state_of(array), state_of(base)).stored_nbytes

    assert stored_of(base) == 11 * 32
    assert stored_of(change_a_little(base)) == 11 * 32 + 4096
    assert stored_of(base[4096:]) == 10 * 32, "blocks are found wherever they are"


def test_what_did_not_change_costs_its_digests():
    array = RANDOM.standard_normal(300_000).astype(np.float32)
    coded = code(pair_of(state_of(array), state_of(array.copy())))

    assert (coded.stored_nbytes, coded.digests_nbytes, coded.blocks) == (0, 2 * 32, {"same": 2})


def test_our_own_encodings_are_decoded_again():
    array = (RANDOM.standard_normal(600_000)).astype(np.float32)
    coded = code(pair_of(state_of(array), state_of(np.nextafter(array, np.float32(9)))))

    assert coded.nbytes == array.nbytes
    assert coded.stored_nbytes < array.nbytes / 10
    assert sum(coded.blocks.values()) == 3


# --- training -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    return Studio(TINY, tmp_path_factory.mktemp("training"), Progress())


def scene_of(name):
    return next(scene for scene in list_scenes(TINY) if scene.name == name)


def test_scenes_have_names_of_their_own_and_cover_what_goals_are_said_of():
    names = [scene.name for scene in list_scenes(Sizes())]

    assert len(set(names)) == len(names)
    assert {
        "adamw-1e-3",
        "adamw-1e-4",
        "adamw-1e-5",
        "adamw-1e-6",
        "lora",
        "moe",
        "embedding",
    } <= set(names)
    aged = next(scene for scene in list_scenes(Sizes()) if scene.name == "adamw-1e-5-aged")
    assert (aged.settle, aged.offsets) == (300, (1, 10))


def test_states_are_the_same_in_every_run_and_found_in_a_rerun(tmp_path, studio, monkeypatch):
    scene = scene_of("adamw-clipped-1e-5")
    pair = studio.pair(scene, 0, 1)
    again = Studio(TINY, tmp_path, Progress()).pair(scene, 0, 1)

    assert pair.new.keys() == again.new.keys()
    assert all(tensor.content == again.new[name].content for name, tensor in pair.new.items())

    monkeypatch.setattr(Studio, "_train_anew", None)
    assert Studio(TINY, tmp_path, Progress()).pair(scene, 1, 2).base.keys() == pair.new.keys()


def test_training_learns(studio):
    first = studio.pair(scene_of("adamw-1e-3"), 0, TINY.gap)

    weights = change_of(first.base, first.new, roles=[WEIGHT])
    assert weights.fraction > 0.9
    assert all(np.isfinite(tensor.array).all() for tensor in first.new.values())


@pytest.mark.parametrize("gradients", ["fp32", "bf16", "clipped"])
def test_gradients_have_the_precision_of_their_setting_and_go_into_the_moments(studio, gradients):
    pair = studio.pair(scene_of(f"adamw-{gradients}-1e-3"), 0, 1)

    factors = []
    for name, gradient in pair.gradients.items():
        low = gradient.view(np.uint32) & 0xFFFF
        assert (low == 0).all() if gradients != "fp32" else (low != 0).any()
        moment = f"optimizer/{name}/exp_avg"
        entered = (pair.new[moment].array.astype(np.float64) - 0.9 * pair.base[moment].array) / 0.1
        large = np.abs(gradient) > np.abs(gradient).max() / 2
        factors += list(entered[large] / gradient[large])
    clip = float(np.median(factors))
    assert np.allclose(factors, clip, rtol=1e-3)
    assert clip < 0.9 if gradients == "clipped" else clip == pytest.approx(1)


def test_implementations_take_the_same_step_almost(studio):
    scene = scene_of("adamw-fp32-1e-3")
    steps = [studio.pair(scene, 0, 1, implementation) for implementation in scene.implementations]

    assert [step.options["fused"] for step in steps] == [True, False, False]
    assert [step.options["foreach"] for step in steps] == [False, True, False]
    settled = TINY.steps + TINY.settle
    assert {step.steps_of("norm.weight") for step in steps} == {(settled, settled + 1)}
    for step in steps[1:]:
        for name, tensor in steps[0].new.items():
            assert np.allclose(tensor.array, step.new[name].array, rtol=1e-5, atol=1e-7)


def test_a_later_state_of_a_pair_is_the_earlier_of_the_next(studio):
    scene = scene_of("adamw-1e-5")
    first, second = studio.pair(scene, 0, 1), studio.pair(scene, 1, 2)

    assert all(tensor.content == second.base[name].content for name, tensor in first.new.items())
    settled = TINY.steps + TINY.settle
    assert second.steps_of("norm.weight") == (settled + 1, settled + 2)
    assert not second.gradients


def test_what_is_frozen_or_not_used_stays_as_it_was(studio):
    lora, moe, embedding = (
        studio.pair(scene_of(name), 0, 1) for name in ("lora", "moe", "embedding")
    )

    trained = sum(gradient.size for gradient in lora.gradients.values())
    everything = sum(tensor.array.size for tensor in lora.new.values() if tensor.role == WEIGHT)
    assert trained / everything == pytest.approx(0.05, rel=0.3)
    assert (
        lora.untouched().nbytes + 3 * 4 * trained + 4 * len(lora.gradients) + 8 * 256 == lora.nbytes
    )

    experts = {name for name in moe.new if ".experts." in name and name.startswith("weights/")}
    untouched = experts & moe.untouched().new.keys()
    assert len(untouched) >= (TINY.experts - 1) / TINY.experts * len(experts)
    assert untouched < experts

    table = (state["weights/table.weight"].array for state in (embedding.base, embedding.new))
    rows = (np.not_equal(*table)).any(axis=1)
    assert 0 < rows.mean() < 0.01


def test_weights_are_rounded_as_torch_rounds_them(studio):
    state = studio.state(scene_of("adamw-1e-3"), 0)

    for name, tensor in round_weights(state).items():
        expected = torch.from_numpy(state[name].array).bfloat16().view(torch.int16).numpy()
        assert (tensor.array.view(np.int16) == expected).all()
        assert tensor.dtype == "bfloat16"


def test_files_keep_states_as_they_are(tmp_path):
    state = state_of(
        RANDOM.standard_normal((3, 4)).astype(np.float32), np.arange(5), np.float32(2).reshape(())
    )
    write_snapshot(tmp_path / "state.npz", state)

    found = read_snapshot(tmp_path / "state.npz")

    assert found.keys() == state.keys()
    for name, tensor in found.items():
        assert (tensor.field, tensor.role, tensor.dtype) == ("weights", WEIGHT, "float32")
        assert (tensor.array.dtype, tensor.array.shape) == (
            state[name].array.dtype,
            state[name].array.shape,
        )
        assert tensor.content == state[name].content


def test_groups_are_parameters_with_all_that_their_optimizer_knows(studio):
    pair = studio.pair(scene_of("lora"), 0, 1)

    groups = list_groups(pair, pair.kind)

    assert groups.keys() == pair.gradients.keys()
    assert all(group.keys() == {"exp_avg", "exp_avg_sq", WEIGHT} for group in groups.values())
    assert list_groups(pair.rounded(), "") == {}


@pytest.mark.parametrize("name", ["adamw-1e-3", "sgd-fp32", "lora"])
def test_a_state_is_shown_again_by_a_live_model(tmp_path, studio, name):
    scene = scene_of(name)
    replay, other = (Replay(TINY, scene, copies=2) for _ in range(2))
    first, second = (studio.state(scene, offset) for offset in (0, 1))
    for state in (second, first):
        replay.show(state)
    replay.check(first)
    with pytest.raises(RuntimeError, match="other bytes"):
        replay.check(second)

    ckptfmt.save(tmp_path / "saved", replay.state, step=7)
    other.show(second)
    ckptfmt.load(tmp_path / "saved", other.state)

    other.check(first)


# --- a store far away -----------------------------------------------------------------------------


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def link(clock):
    return Link(1000.0, clock=clock, sleep=clock.sleep)


def test_every_byte_takes_its_time_on_the_link(clock, link):
    store = ThrottledStore(MemoryStore(), link).at("run")

    store.create("a", SizedChunks([b"x" * 300, bytearray(200)], 500))
    store.replace("manifest.json", b"y" * 100)
    assert (link.written_nbytes, link.read_nbytes, clock.now_s) == (600, 0, pytest.approx(100.6))

    assert store.read("a", limit_nbytes=1000) == b"x" * 300 + bytes(200)
    assert store.read_range("a", 299, 2) == b"x\x00"
    buffer = memoryview(bytearray(3 * 4096))
    with store.open_ranges("a") as ranges:
        assert ranges.read_into(0, 300, buffer) == b"x" * 300
    assert store.beside("run").nbytes("a") == 500
    assert (link.written_nbytes, link.read_nbytes, clock.now_s) == (
        600,
        802,
        pytest.approx(101.402),
    )


def test_names_take_no_time(clock, link):
    store = ThrottledStore(MemoryStore(), link)
    store.create("a/b", [b""])
    began_s = clock()

    assert (store.list(""), store.list_names(""), store.nbytes("a/b")) == (["a/b"], ["a/"], 0)
    store.sync("a")
    store.delete("a/b")
    assert store.waits("a/b")
    assert clock() == began_s


def test_work_that_is_done_meanwhile_costs_nothing_extra(clock, link):
    with link.write(1000):
        clock.sleep(0.9)
    assert clock() == pytest.approx(101)
    with link.write(1000):
        clock.sleep(1.5)
    assert clock() == pytest.approx(102.5)


def test_two_who_send_at_once_share_the_link(clock, link):
    with link.write(500), link.read(500):
        pass

    assert clock() == pytest.approx(101)


def test_a_run_is_saved_and_loaded_through_the_link(tmp_path, studio, clock):
    scene = scene_of("adamw-1e-3")
    link = Link(1e9, clock=clock, sleep=clock.sleep)
    store = ThrottledStore(LocalStore(tmp_path / "run", writable=True), link)
    replay, other = (Replay(TINY, scene, copies=1) for _ in range(2))
    state = studio.state(scene, 0)
    nbytes = sum(tensor.array.nbytes for tensor in state.values())
    replay.show(state)

    with ckptfmt.Checkpointer(store, replay.state, resume="fresh", overlap=False) as checkpointer:
        checkpointer.step = 7
        handle = checkpointer.save()
        assert handle is not None
        handle.wait()
    assert nbytes < link.written_nbytes < 2 * nbytes
    assert clock() >= 100 + nbytes / 1e9

    other.show(studio.state(scene, 1))
    before = link.read_nbytes
    with ckptfmt.Checkpointer(store, other.state) as checkpointer:
        checkpointer.restore()
    other.check(state)
    assert link.read_nbytes - before >= nbytes


# --- the record -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("delta")
    options = ["delta", "--width", "32", "--steps", "4", "--copies", "1", "--rounds", "1", "--json"]
    places = ["--directory", str(folder / "files"), "--out", str(folder / "record.json")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *options, *places],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (folder / "files").iterdir()] == ["training"]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_goal_has_a_number(record):
    assert record["ratios"].keys() >= RATIOS
    assert all(type(ratio) is float and ratio > 0 for ratio in record["ratios"].values())
    assert record["goals"].keys() == record["ratios"].keys()
    assert (
        record["command"] == "python -m benchmarks delta --width 32 --steps 4 --copies 1 --rounds 1"
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_setting_has_its_floor_and_every_contestant(record):
    rows = {(row["setting"], row["state"]): row for row in record["rounds"]["coding_1"]}

    for rate in ("1e-3", "1e-4", "1e-5", "1e-6"):
        for gap in (1, 10):
            for state in ("fp32", "bf16"):
                row = rows[f"adamw-{rate}-fused-gap{gap}", state]
                assert row["coded"].keys() >= {"ckptfmt", *CODECS}
                assert 0 < row["told"]["floor_vs_raw"] < 1
                assert 0 < row["told"]["changed_weights"] <= 1
                assert all(coded["encode_gb_per_s"] > 0 for coded in row["coded"].values())
    assert {setting.partition("-")[0] for setting, _ in rows} == {
        "adamw",
        "sgd",
        "lora",
        "moe",
        "embedding",
    }
    assert record["settings"].keys() >= {"ckptfmt", *CODECS}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_setting_that_a_ratio_is_of_counts_with_its_worst(record):
    rows = record["rounds"]["coding_1"]
    clipped = [
        row["coded"]["ckptfmt"]["vs_raw"]
        for row in rows
        if row["setting"].startswith("adamw-clipped-")
    ]

    assert len(clipped) == 6
    assert record["ratios"]["adamw_clipped_vs_raw"] == max(clipped)


def test_a_scene_that_is_changed_is_trained_anew(studio):
    scene = scene_of("adamw-1e-3")
    other = dataclasses.replace(scene, lr=2e-3)

    assert isinstance(other, Scene)
    assert studio.state(other, 1).keys() == studio.state(scene, 1).keys()
    assert change_of(studio.state(other, 1), studio.state(scene, 1), roles=[WEIGHT]).fraction > 0.5

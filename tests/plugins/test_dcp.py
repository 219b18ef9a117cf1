"""torch.distributed.checkpoint through ckptfmt: real processes, DTensors, other numbers of ranks, async saves."""

import functools
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint import state_dict_loader as dcp_load
from torch.distributed.checkpoint import state_dict_saver as dcp_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckptfmt
from ckptfmt.errors import CkptError
from ckptfmt.plugins.dcp import CkptfmtReader, CkptfmtWriter, install
from tests.plugins import trainings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Opaque:
    """An object that is no plain value."""

    def __eq__(self, other):
        return type(other) is Opaque

    __hash__ = None  # type: ignore[assignment]


def trained(seed=1, steps=2):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
    return model, optimizer


def state_dict_of(model, optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optim": optimizer_state,
        "step": torch.tensor(2),
        "epoch": 3,
        "note": ("a", {"b": [1.5, None]}),
        "ema": {"w": torch.arange(5.0)},
        "a/b~c": {"x/y": 5, "t/t": torch.ones(2)},
    }


def flat(tree, prefix=()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def assert_same(left, right):
    left, right = dict(flat(left)), dict(flat(right))
    assert left.keys() == right.keys()
    for key, value in left.items():
        other = right[key]
        if isinstance(value, torch.Tensor):
            assert (value.dtype, value.shape) == (other.dtype, other.shape), key
            assert value.numpy().tobytes() == other.numpy().tobytes(), key
        else:
            assert value == other, key
            assert type(value) is type(other), key


def save(state_dict, path, **options):
    dcp_save.save(state_dict, storage_writer=CkptfmtWriter(path, **options), no_dist=True)


def load(state_dict, path, **options):
    dcp_load.load(state_dict, storage_reader=CkptfmtReader(path, **options), no_dist=True)
    return state_dict


def test_a_state_dict_comes_back_bit_by_bit(tmp_path):
    model, optimizer = trained()
    saved = state_dict_of(model, optimizer)
    save(saved, tmp_path / "step-12")

    other, other_optimizer = trained(seed=5, steps=1)
    found = state_dict_of(other, other_optimizer)
    found |= {"step": torch.tensor(0), "epoch": 0, "note": None, "ema": {"w": torch.zeros(5)}}
    found["a/b~c"] = {"x/y": 0, "t/t": torch.zeros(2)}
    with pytest.raises(AssertionError):
        assert_same(saved, found)  # the control
    load(found, tmp_path / "step-12")
    assert_same(saved, found)
    set_state_dict(
        other, other_optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"]
    )
    assert_same(saved, {**state_dict_of(other, other_optimizer)})


def test_planners_find_the_version_that_torch_tells_them(tmp_path):
    dcp_save.save(
        {"model": {"w": torch.zeros(2)}}, storage_writer=FileSystemWriter(tmp_path / "torch")
    )
    save({"model": {"w": torch.zeros(2)}}, tmp_path / "ours")
    versions = [
        reader.read_metadata().version
        for reader in (FileSystemReader(tmp_path / "torch"), CkptfmtReader(tmp_path / "ours"))
    ]
    assert versions[0] == versions[1]


def test_what_is_written_is_an_ordinary_checkpoint(tmp_path):
    model, optimizer = trained()
    save(state_dict_of(model, optimizer), tmp_path / "step-12")

    assert ckptfmt.validate(tmp_path / "step-12").valid
    command = [sys.executable, "-m", "ckptfmt", "validate", str(tmp_path / "step-12")]
    assert subprocess.run(command, check=False, capture_output=True, timeout=120).returncode == 0
    plain, _ = trained(seed=9, steps=0)
    report: Any = ckptfmt.load(
        tmp_path / "step-12", ckptfmt.State(weights=plain, rng=False), only="weights:*"
    )
    assert report.step == 12
    assert_same(model.state_dict(), plain.state_dict())
    shards = list((tmp_path / "step-12").glob("weights-*.safetensors"))
    with safe_open(shards[0], framework="pt") as opened:
        assert_same({"w": model.state_dict()["2.weight"]}, {"w": opened.get_tensor("2.weight")})
    with ckptfmt.open(tmp_path / "step-12") as checkpoint:
        assert "0.weight/exp_avg" in checkpoint.optimizer
        assert checkpoint.manifest.fields["rng"].reason == "DCP saves no random numbers"
        assert checkpoint.manifest.origin.run_id is None


def test_a_checkpoint_of_a_state_is_read_by_dcp(tmp_path):
    model, _ = trained()
    ckptfmt.save(tmp_path / "c", ckptfmt.State(weights=model), step=1)
    other, _ = trained(seed=4)
    load({"model": other.state_dict()}, tmp_path / "c")
    assert_same(model.state_dict(), other.state_dict())


def test_everything_is_found_without_a_state_dict(tmp_path):
    model, optimizer = trained()
    saved = state_dict_of(model, optimizer)
    save(saved, tmp_path / "c")
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    dcp_load._load_state_dict(found, CkptfmtReader(tmp_path / "c"), planner=planner, no_dist=True)
    assert_same(saved["model"], found["model"])
    assert_same({"e": saved["ema"], "n": saved["note"]}, {"e": found["ema"], "n": found["note"]})


@pytest.mark.parametrize("flatten", [True, False])
def test_flat_state_dicts_and_planners_that_do_not_flatten(tmp_path, flatten):
    model, _ = trained()
    writer = CkptfmtWriter(tmp_path / "c")
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    dcp_save.save(model.state_dict(), storage_writer=writer, planner=planner, no_dist=True)
    other, _ = trained(seed=4)
    found = other.state_dict()
    reader, load_planner = (
        CkptfmtReader(tmp_path / "c"),
        DefaultLoadPlanner(flatten_state_dict=flatten),
    )
    dcp_load.load(found, storage_reader=reader, planner=load_planner, no_dist=True)
    assert_same(model.state_dict(), found)


def test_keys_of_which_several_are_models_keep_apart(tmp_path):
    saved = {
        "model": {"w": torch.ones(2)},
        "module": {"w": torch.zeros(2)},
        "other": {"w": torch.full((2,), 7.0)},
    }
    save(saved, tmp_path / "c")
    assert_same(saved, load({key: {"w": torch.full((2,), -1.0)} for key in saved}, tmp_path / "c"))


@pytest.mark.parametrize(
    "saved",
    [
        {"model": {"a/b": torch.ones(2), "a": {"b": torch.zeros(2)}}},
        {"x/y": torch.ones(2), "x": {"y": torch.zeros(2)}, "model": {"w": torch.ones(1)}},
        {
            "optim": {"extra": {"a": torch.ones(2)}},
            "a": torch.zeros(2),
            "model": {"w": torch.ones(1)},
        },
        {"model": {"~1": torch.ones(2), "/": torch.zeros(2)}},
    ],
)
def test_keys_that_look_alike_keep_apart(tmp_path, saved):
    save(saved, tmp_path / "c")

    def emptied(tree):
        return {
            key: emptied(v) if isinstance(v, dict) else torch.full_like(v, -1)
            for key, v in tree.items()
        }

    assert_same(saved, load(emptied(saved), tmp_path / "c"))


@pytest.mark.parametrize(
    ("saved", "word"),
    [
        ({"dcp": 5}, "taken by"),
        ({"pickle:k": 1, "k": Opaque()}, "taken by"),
        (
            {
                "optim": {
                    "state": {"param_groups": {"0": {"lr": torch.ones(1)}}},
                    "param_groups": [{"params": ["param_groups"], "lr": torch.zeros(1)}],
                }
            },
            "one name",
        ),
    ],
)
def test_keys_that_cannot_keep_apart_are_refused_before_anything_is_written(tmp_path, saved, word):
    with pytest.raises(CheckpointException, match=word):
        save(saved, tmp_path / "c", allow_pickle=True)
    assert not (tmp_path / "c").exists()


def test_a_load_from_a_run_is_of_one_checkpoint(tmp_path, monkeypatch):
    def commit(step):
        state = ckptfmt.State(
            weights={"w": torch.full((2,), float(step))}, extra={"n": step}, rng=False
        )
        with ckptfmt.Checkpointer(
            tmp_path / "run", state, saver="inline", resume="fresh"
        ) as checkpointer:
            checkpointer.save(step=step)

    commit(1)
    opened = ckptfmt.open

    def open_then_move(path, **options):
        monkeypatch.setattr(ckptfmt, "open", opened)
        checkpoint = opened(path, **options)
        commit(2)  # the head of the run moves between the load's metadata and its data
        return checkpoint

    monkeypatch.setattr(ckptfmt, "open", open_then_move)
    found = load({"model": {"w": torch.zeros(2)}}, tmp_path / "run")
    assert found["model"]["w"].tolist() == [1, 1]
    assert load({"model": {"w": torch.zeros(2)}}, tmp_path / "run")["model"]["w"].tolist() == [2, 2]


def test_values_come_from_the_checkpoint_that_the_tensors_come_from(tmp_path, monkeypatch):
    for number in (1, 2):
        save(
            {"model": {"w": torch.full((2,), float(number))}, "n": number}, tmp_path / f"c{number}"
        )
    loaded = ckptfmt.load

    def replace_then_load(path, *arguments, **options):
        shutil.rmtree(tmp_path / "c1")
        shutil.copytree(tmp_path / "c2", tmp_path / "c1")
        return loaded(path, *arguments, **options)

    monkeypatch.setattr(ckptfmt, "load", replace_then_load)
    with pytest.raises(CheckpointException, match=r"DOC_DIGEST|DOC_MISMATCH"):
        load({"model": {"w": torch.zeros(2)}, "n": 0}, tmp_path / "c1")


def test_a_target_of_another_dtype_converts_as_with_dcp(tmp_path):
    save({"model": {"w": torch.tensor([1.5, 2.5])}}, tmp_path / "c")
    found = load({"model": {"w": torch.zeros(2, dtype=torch.float64)}}, tmp_path / "c")
    assert found["model"]["w"].tolist() == [1.5, 2.5]


def test_objects_that_are_no_plain_values_are_refused_unless_asked_for(tmp_path):
    state_dict = {"model": {"w": torch.ones(2)}, "object": Opaque()}
    with pytest.raises(CheckpointException) as caught:
        save(state_dict, tmp_path / "refused")
    assert "object is no plain value" in str(caught.value)
    assert not (tmp_path / "refused" / "manifest.json").exists()

    save(state_dict, tmp_path / "c", allow_pickle=True)
    with pytest.raises(CheckpointException) as caught:
        load({"model": {"w": torch.zeros(2)}, "object": 0}, tmp_path / "c")
    assert "allow_pickle=True" in str(caught.value)
    found = load({"model": {"w": torch.zeros(2)}, "object": 0}, tmp_path / "c", allow_pickle=True)
    assert_same(state_dict, found)


def test_a_damaged_byte_is_named(tmp_path):
    model, _ = trained()
    save({"model": model.state_dict()}, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("weights-*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointException) as caught:
        load({"model": trained(seed=3)[0].state_dict()}, tmp_path / "c")
    assert "BLOCK_DIGEST" in str(caught.value)


def test_a_missing_entry_is_an_error_as_with_dcp(tmp_path):
    save({"model": {"w": torch.ones(2)}}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="Missing key"):
        load({"model": {"w": torch.zeros(2), "b": torch.zeros(2)}}, tmp_path / "c")


def test_random_numbers_stay_where_they_are(tmp_path):
    before = (random.getstate(), torch.get_rng_state().tolist())
    save({"model": {"w": torch.ones(2)}}, tmp_path / "c")
    load({"model": {"w": torch.zeros(2)}}, tmp_path / "c")
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_a_directory_with_a_checkpoint_is_refused_and_stays(tmp_path):
    save({"model": {"w": torch.ones(2)}}, tmp_path / "c")
    with pytest.raises(CheckpointException) as caught:
        save({"model": {"w": torch.zeros(2)}}, tmp_path / "c")
    assert "CHECKPOINT_EXISTS" in str(caught.value)
    assert "Checkpoint already exists" in str(caught.value), "as torch's storage says"
    assert load({"model": {"w": torch.zeros(2)}}, tmp_path / "c")["model"]["w"].tolist() == [1, 1]


def test_planners_are_told_which_checkpoint_it_is(tmp_path):
    writer, reader = CkptfmtWriter(tmp_path / "c"), CkptfmtReader(tmp_path / "c")
    dcp_save.save({"model": {"w": torch.ones(2)}}, storage_writer=writer)
    told: Any = reader.read_metadata().storage_meta
    assert (told.checkpoint_id, told.save_id) == (str(tmp_path / "c"), writer.save_id)
    with ckptfmt.open(tmp_path / "c") as checkpoint:
        assert told.save_id == checkpoint.digest
    assert told.load_id == reader.load_id
    reader.read_metadata()
    assert told.load_id != reader.load_id


def test_overwrite_takes_the_place_of_a_checkpoint_and_of_nothing_else(tmp_path):
    def kept():
        return load({"model": {"w": torch.zeros(2)}}, tmp_path / "c")["model"]["w"].tolist()

    for number in (1.0, 2.0):
        save({"model": {"w": torch.full((2,), number)}}, tmp_path / "c", overwrite=True)
        assert kept() == [number, number]
        assert len(list((tmp_path / "c").glob("weights-*"))) == 1, "the older one's files are gone"
    with pytest.raises(CheckpointException) as failed:
        save({"model": {"w": torch.zeros(2)}, "o": Opaque()}, tmp_path / "c", overwrite=True)
    assert kept() == [2, 2]
    assert failed.tb is not None  # which keeps the writer of that save alive
    save({"model": {"w": torch.full((2,), 3.0)}}, tmp_path / "c", overwrite=True)
    assert kept() == [3, 3]
    assert ckptfmt.validate(tmp_path / "c").valid

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("ten years of work")
    for number in (1.0, 2.0):
        save({"model": {"w": torch.full((2,), number)}}, tmp_path / "mine", overwrite=True)
        found = load({"model": {"w": torch.zeros(2)}}, tmp_path / "mine")
        assert found["model"]["w"].tolist() == [number, number]
        assert (tmp_path / "mine" / "thesis.txt").read_text() == "ten years of work"


@pytest.fixture
def _forget_plans():
    yield
    caches = (
        "_cached_save_plan",
        "_cached_final_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
    )
    for cache in (*caches, "_cached_metadata"):
        getattr(DefaultSavePlanner, cache, {}).clear()


def save_cached(path, state_dict):
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp_save.save(state_dict, storage_writer=CkptfmtWriter(path), planner=planner, no_dist=True)


@pytest.mark.usefixtures("_forget_plans")
def test_a_planner_that_caches_plans(tmp_path):
    for number in range(3):
        saved = {"model": {"w": torch.full((2,), float(number))}, "n": number}
        save_cached(tmp_path / f"c-{number}", saved)
        assert_same(
            saved, load({"model": {"w": torch.full((2,), -1.0)}, "n": -1}, tmp_path / f"c-{number}")
        )
        assert not (tmp_path / f"c-{number}" / "exchange").exists()


@pytest.mark.usefixtures("_forget_plans")
def test_a_cached_plan_of_another_state_dict_commits_nothing(tmp_path, monkeypatch):
    save_cached(tmp_path / "first", {"w": torch.ones(2)})
    grown = {"w": torch.ones(2), "more": torch.ones(2)}

    def fail(*_args):
        raise OSError("no")

    with monkeypatch.context() as patched:
        patched.setattr(CkptfmtWriter, "prepare_global_plan", fail)
        with pytest.raises(CheckpointException):
            save_cached(tmp_path / "c", grown)
    # The planner has noted the grown plan as told, and now gives the older one.
    with pytest.raises(CheckpointException, match="'more' wasn't written"):
        save_cached(tmp_path / "c", grown)
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_saves_without_collectives_are_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="use_collectives=True"):
        dcp_save.save(
            {"w": torch.ones(2)},
            storage_writer=CkptfmtWriter(tmp_path),
            no_dist=True,
            use_collectives=False,
        )


def test_a_second_install_is_refused_and_the_first_is_taken_back():
    theirs = vars(dcp_load)["_storage_setup"]
    with install(), pytest.raises(RuntimeError, match="already"):
        install()
    assert vars(dcp_load)["_storage_setup"] is theirs
    install().close()
    assert vars(dcp_load)["_storage_setup"] is theirs


def test_install_makes_ckptfmt_the_storage_of_paths_until_it_is_closed(tmp_path):
    saved = {"model": {"w": torch.ones(2)}}
    dcp_save.save(saved, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with install():
        dcp_save.save(saved, checkpoint_id=tmp_path / "ours", no_dist=True)
        dcp_save.async_save(saved, checkpoint_id=str(tmp_path / "async"), no_dist=True).result()  # type: ignore[union-attr]
        for name in ("ours", "async", "theirs"):
            found = {"model": {"w": torch.zeros(2)}}
            dcp_load.load(found, checkpoint_id=tmp_path / name, no_dist=True)
            assert_same(saved, found)
        dcp_save.save(
            {"model": {"w": torch.full((2,), 2.0)}}, checkpoint_id=tmp_path / "ours", no_dist=True
        )
        assert load({"model": {"w": torch.zeros(2)}}, tmp_path / "ours")["model"]["w"].tolist() == [
            2,
            2,
        ]
        with pytest.raises(FileExistsError, match="a checkpoint of torch's: remove it"):
            dcp_save.save(
                {"model": {"w": torch.zeros(2)}}, checkpoint_id=tmp_path / "theirs", no_dist=True
            )
        dcp_load.load(
            found := {"model": {"w": torch.zeros(2)}},
            checkpoint_id=tmp_path / "theirs",
            no_dist=True,
        )
        assert_same(saved, found)
        writer = FileSystemWriter(tmp_path / "named")
        dcp_save.save(saved, storage_writer=writer, no_dist=True)
        with pytest.raises(RuntimeError, match="Cannot detect"):
            dcp_save.save(saved, checkpoint_id="abc://abc.abc", no_dist=True)
    dcp_save.save(saved, checkpoint_id=tmp_path / "closed", no_dist=True)

    assert [(tmp_path / name / ".metadata").exists() for name in ("ours", "async", "named", "closed")] == [
        False, False, True, True,
    ]  # fmt: skip
    assert ckptfmt.validate(tmp_path / "ours").valid
    assert ckptfmt.validate(tmp_path / "async").valid


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_torch_save_are_converted_where_they_are(tmp_path, monkeypatch, overwrite):
    monkeypatch.setattr(
        format_utils, "FileSystemWriter", functools.partial(CkptfmtWriter, overwrite=overwrite)
    )
    monkeypatch.setattr(format_utils, "FileSystemReader", CkptfmtReader)
    saved = {"model": dict(trained()[0].state_dict()), "epoch": 3}
    torch.save(saved, tmp_path / "model.pt")
    format_utils.torch_save_to_dcp(tmp_path / "model.pt", tmp_path)
    assert_same(saved, load({"model": dict(trained(seed=2)[0].state_dict()), "epoch": 0}, tmp_path))
    format_utils.dcp_to_torch_save(tmp_path, tmp_path / "again.pt")
    assert_same(saved, torch.load(tmp_path / "again.pt"))


WORKER = Path(__file__).with_name("dcp_worker.py")


def run_ranks(count, *arguments):
    """Run the worker as so many ranks, and return what they printed."""
    return trainings.run(WORKER, *arguments, processes=count)


@pytest.mark.parametrize("how", ["save", "async"])
def test_sharded_tensors_of_two_ranks_load_on_four_and_on_one(tmp_path, how):
    path = tmp_path / "c"
    run_ranks(2, how, path, tmp_path / "meet-2")
    assert ckptfmt.validate(path).valid
    with ckptfmt.open(path) as checkpoint:
        assert checkpoint.manifest.origin.writer_count == 2

    run_ranks(4, "load", path, tmp_path / "meet-4")
    whole = load(
        {"model": {"w": torch.zeros(7, 6), "r": torch.zeros(3)}, "rank0": {"plain": [0, ""]}}, path
    )
    assert (
        whole["model"]["w"].numpy().tobytes() == torch.arange(42.0).reshape(7, 6).numpy().tobytes()
    )
    assert whole["model"]["r"].tolist() == [0, 1, 2]
    assert whole["rank0"] == {"plain": [1, "two"]}


def test_a_rank_that_fails_fails_all_and_leaves_no_checkpoint(tmp_path):
    told = run_ranks(2, "fail", tmp_path / "c", tmp_path / "meet")
    assert all(f"refused by {rank}" in told for rank in range(2))
    with pytest.raises(CkptError) as caught:
        ckptfmt.open(tmp_path / "c")
    assert caught.value.code in ("NOT_COMMITTED", "FILE_MISSING")
    run_ranks(2, "save", tmp_path / "c", tmp_path / "meet-again")
    assert ckptfmt.validate(tmp_path / "c").valid


def test_ranks_that_cache_plans_find_each_save(tmp_path):
    run_ranks(2, "cached", tmp_path / "c", tmp_path / "meet")
    for number in range(4):
        assert ckptfmt.validate(tmp_path / f"c-{number}").valid
        with ckptfmt.open(tmp_path / f"c-{number}") as checkpoint:
            assert sorted(name for _, name, _ in checkpoint.tensors) == ["own0", "own1", "w"]


def test_whichever_phase_fails_on_one_rank_fails_on_all_and_is_in_nobodys_way(tmp_path):
    told = run_ranks(2, "phases", tmp_path / "c", tmp_path / "meet")
    assert [told.count(f"refused by {rank}") for rank in range(2)] == [5, 5]
    assert ckptfmt.validate(tmp_path / "c").valid
    assert len(list((tmp_path / "c" / "parts").iterdir())) == 2, (
        "what the failed saves left is gone"
    )


def test_groups_of_ranks_save_by_themselves(tmp_path):
    run_ranks(2, "groups", tmp_path / "c", tmp_path / "meet")
    assert all(ckptfmt.validate(path).valid for path in tmp_path.glob("c-*"))
    assert len(list(tmp_path.glob("c-*"))) == 4


def test_a_process_that_saves_writes_what_is_installed_here(tmp_path):
    run_ranks(2, "process", tmp_path / "c", tmp_path / "meet")
    for number in range(2):
        assert ckptfmt.validate(tmp_path / f"c-{number}").valid


def test_saved_state_that_no_live_key_asks_for_is_warned_of(tmp_path, caplog):
    """The state_dict of an optimizer without a step has no state: a load left the moments out, and said nothing."""
    model, optimizer = trained()
    saved = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp_save.save(saved, storage_writer=CkptfmtWriter(tmp_path / "c"), no_dist=True)
    fresh_model, fresh = trained(steps=0)

    def load(state_dict):
        caplog.clear()
        dcp_load.load(state_dict, storage_reader=CkptfmtReader(tmp_path / "c"), no_dist=True)
        return [record.getMessage() for record in caplog.records if record.name == "ckptfmt"]

    (said,) = load({"model": fresh_model.state_dict(), "optim": fresh.state_dict()})
    assert "optim.state.0.exp_avg" in said
    assert "get_optimizer_state_dict" in said
    assert load({"model": fresh_model.state_dict()}) == []
    assert load(saved) == []


@pytest.mark.parametrize("key", ["app", "optim"])
def test_what_get_state_dict_creates_asks_for_all_of_it(key, tmp_path, caplog):
    model, optimizer = trained()
    nested: dict[str, Any] = dict(
        zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)
    )
    saved = {"app": nested} if key == "app" else nested
    dcp_save.save(saved, storage_writer=CkptfmtWriter(tmp_path / "c"), no_dist=True)
    other, fresh = trained(seed=2, steps=0)
    live: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(other, fresh), strict=True))
    partly = {**live, "optim": {**live["optim"], "state": {}}}

    def load(state_dict):
        caplog.clear()
        wanted = {"app": state_dict} if key == "app" else state_dict
        dcp_load.load(wanted, storage_reader=CkptfmtReader(tmp_path / "c"), no_dist=True)
        return [record.getMessage() for record in caplog.records if record.name == "ckptfmt"]

    assert load(live) == []
    assert "exp_avg" in load(partly)[0]

"""Save, load, open and validate, as a user meets them first."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import ckptfmt
from ckptfmt.commit.decision import retire
from ckptfmt.documents.manifest import FIELDS, FieldSummary, Manifest, Origin, parse_register
from ckptfmt.errors import CkptError, Code
from ckptfmt.loading.load_report import LoadReport
from ckptfmt.read.files import read_manifest
from ckptfmt.run.lineage import list_checkpoints, open_run
from ckptfmt.store import LocalStore, open_store
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.posix import PosixCalls
from tests.interface.test_group import run_writers
from tests.loop.test_checkpointer import SavingStore, Trainer, run


def make_state(seed: int = 0, **more: Any) -> ckptfmt.State:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    return ckptfmt.State(
        weights=model, optimizer=optimizer, data={"position": 24}, config={"lr": 1e-3}, **more
    )


def test_a_report_is_true_if_what_was_checked_is_valid(tmp_path: Path) -> None:
    """REQ-OPN-009: ``if ckptfmt.validate(path)`` means what it says."""
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights={"w": np.arange(9.0)}), step=1)
    assert bool(ckptfmt.validate(tmp_path / "ckpt")) is True
    (shard,) = (tmp_path / "ckpt").glob("weights-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert bool(ckptfmt.validate(tmp_path / "ckpt")) is False


def train(model: Any, optimizer: Any) -> bytes:
    optimizer.zero_grad()
    loss = model(torch.randn(16, 4)).square().sum()
    loss.backward()
    optimizer.step()
    return bytes_of(loss.detach())


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def trajectory(state: ckptfmt.State, steps: int) -> list[bytes]:
    rows = []
    for _ in range(steps):
        rows.append(train(state.weights, state.optimizer))
        rows += [bytes_of(parameter.detach()) for parameter in state.weights.parameters()]  # type: ignore[attr-defined]
    return rows


def test_save_and_load_with_no_more_than_a_path_a_state_and_a_step(tmp_path: Path) -> None:
    state = make_state()
    report = ckptfmt.save(tmp_path / "c", state, step=3)
    expected = trajectory(state, 4)

    fresh = make_state(seed=1)
    fresh.data["position"] = 0  # type: ignore[index]
    loaded = ckptfmt.load(tmp_path / "c", fresh)

    assert isinstance(loaded, LoadReport)
    assert (loaded.step, loaded.digest, loaded.claim) == (3, report.digest, "T1")
    assert fresh.data == {"position": 24}
    assert trajectory(fresh, 4) == expected


def test_a_run_that_drew_one_number_more_is_another_run(tmp_path: Path) -> None:
    """The negative control of the test above: the comparison notices one draw."""
    state = make_state()
    ckptfmt.save(tmp_path / "c", state, step=3)
    expected = trajectory(state, 4)
    ckptfmt.load(tmp_path / "c", state)
    torch.rand(1)
    assert trajectory(state, 4) != expected


def test_saving_draws_no_random_number_and_changes_nothing(tmp_path: Path) -> None:
    state = make_state()
    torch.manual_seed(5)
    expected = trajectory(state, 2)
    state = make_state()
    torch.manual_seed(5)
    ckptfmt.save(tmp_path / "c", state, step=1)
    assert trajectory(state, 2) == expected


def test_weights_file_loads_straight_into_load_state_dict(tmp_path: Path) -> None:
    state = make_state()
    ckptfmt.save(tmp_path / "c", state, step=3)
    (file,) = (tmp_path / "c").glob("weights-*.safetensors")
    model = make_state(seed=1).weights
    model.load_state_dict(safetensors.torch.load_file(file))  # type: ignore[attr-defined]
    for name, tensor in state.weights.state_dict().items():  # type: ignore[attr-defined]
        assert bytes_of(model.state_dict()[name]) == bytes_of(tensor)  # type: ignore[attr-defined]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.arange(3.0), persistent=False)


def test_weights_file_of_a_tied_model_loads_with_load_model(tmp_path: Path) -> None:
    model = Tied()
    ckptfmt.save(tmp_path / "c", ckptfmt.State(weights=model), step=3)
    (file,) = (tmp_path / "c").glob("weights-*.safetensors")
    other = Tied()
    missing, unexpected = safetensors.torch.load_model(other, file)
    assert (set(missing), list(unexpected)) == (set(), [])
    assert bytes_of(other.head.weight.detach()) == bytes_of(model.embed.weight.detach())


def test_load_without_a_state_returns_trees(tmp_path: Path) -> None:
    weights = {"a": np.array([-0.0, math.nan]), "b": {"c": np.float32(2)}}
    ckptfmt.save(tmp_path / "c", ckptfmt.State(weights=weights, data=(1, "x")), step=3)
    trees = ckptfmt.load(tmp_path / "c", framework="numpy")
    assert isinstance(trees, dict)
    assert trees["weights"]["a"].tobytes() == weights["a"].tobytes()  # type: ignore[attr-defined]
    assert trees["data"] == (1, "x")


class CountingCalls(PosixCalls):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.nbytes = 0

    def read_at(self, fd: int, nbytes: int, byte_begin: int) -> bytes:
        content = super().read_at(fd, nbytes, byte_begin)
        self.nbytes += len(content)
        return content

    def read_into_at(self, fd: int, buffer: memoryview, byte_begin: int) -> int:
        nbytes = super().read_into_at(fd, buffer, byte_begin)
        self.nbytes += nbytes
        return nbytes


def test_open_reads_rows_and_nothing_else(tmp_path: Path) -> None:
    rows = np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, 1 << 10)
    ckptfmt.save(tmp_path / "c", ckptfmt.State(weights={"w": rows}), step=3)
    for file in (tmp_path / "c").glob("*.safetensors"):
        file.read_bytes()  # into the page cache: direct reads are of whole pages
    calls = CountingCalls()
    with ckptfmt.open(LocalStore(tmp_path / "c", writable=False, calls=calls)) as checkpoint:
        before, calls.nbytes = checkpoint.metadata_nbytes, 0
        assert checkpoint.weights["w"][0:128].tobytes() == rows[0:128].tobytes()
        header_nbytes = checkpoint.metadata_nbytes - before - checkpoint.index.parts[0].nbytes
        assert 0 < header_nbytes <= 256
        assert calls.nbytes == (1 << 20) + checkpoint.metadata_nbytes - before


def test_a_committed_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    ckptfmt.save(tmp_path / "c", ckptfmt.State(data=1), step=3)
    before = {
        path.name: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()
    }
    with pytest.raises(CkptError) as caught:
        ckptfmt.save(tmp_path / "c", ckptfmt.State(data=2), step=4)
    assert caught.value.code == Code.CHECKPOINT_EXISTS
    assert {
        path.name: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()
    } == before


def test_what_a_killed_attempt_left_is_gone_after_the_next_save() -> None:
    """REQ-CMT-027"""
    store = MemoryStore()
    for path in (
        "weights-" + "0" * 16 + "-00000.safetensors",
        "parts/" + "0" * 16 + "-00000.msgpack",
        "notes.txt",
    ):
        store.create(path, [b"left over"])
    ckptfmt.save(store, ckptfmt.State(weights={"w": np.zeros(3)}), step=3)
    assert "notes.txt" in store.list("")
    assert not [path for path in store.list("") if "0" * 16 in path]
    assert ckptfmt.validate(store).valid


def attempts_in(store: MemoryStore) -> set[str]:
    return {
        path.split("/")[-1].removeprefix("weights-")[:16]
        for path in store.list("")
        if "-00000." in path
    }


def test_each_try_has_an_attempt_of_its_own() -> None:
    """REQ-CMT-003: also of the same step and state."""
    state, found = ckptfmt.State(weights={"w": np.zeros(3)}), []
    for _ in range(2):
        store = MemoryStore()
        ckptfmt.save(store, state, step=3)
        found.append(attempts_in(store))
    assert len(found[0]) == len(found[1]) == 1
    assert not found[0] & found[1]


def save_by_two(
    store: MemoryStore, *states: ckptfmt.State, steps: tuple[int, int] = (3, 3)
) -> list[Any]:
    """Save as two writers that meet in the store; return reports and codes."""

    def body(writer: int) -> str:
        return ckptfmt.save(
            store,
            states[writer],
            step=steps[writer],
            writer=(writer, 2),
            agree="start-1",
            deadline_s=0.8,
        ).digest

    return [
        outcome if isinstance(outcome, str) else outcome.code for outcome in run_writers(2, body)
    ]


def files_in(store: MemoryStore) -> list[str]:
    return [path for path in store.list("") if not path.startswith("exchange/")]


def test_writers_make_one_attempt_of_one_step() -> None:
    """REQ-CMT-001."""
    state, store = ckptfmt.State(weights={"w": np.zeros(3)}), MemoryStore()
    outcomes = save_by_two(store, state, state)
    assert not [outcome for outcome in outcomes if isinstance(outcome, Code)]
    assert outcomes == [read_manifest(store).digest] * 2
    store = MemoryStore()
    assert save_by_two(store, state, state, steps=(3, 4)) == [Code.WRITERS_DIVERGED] * 2
    assert files_in(store) == []


def test_metrics_and_tags_are_those_of_writer_0() -> None:
    """REQ-PRT-014, REQ-CMT-039: others may have computed a number that differs in the last bit, or none."""
    state, store = ckptfmt.State(weights={"w": np.zeros(3)}), MemoryStore()
    given: list[Any] = [
        {"metrics": {"loss": np.float32(0.5)}, "tags": ["a"]},
        {"metrics": {"loss": math.nan}},
    ]

    outcomes = run_writers(
        2,
        lambda writer: ckptfmt.save(
            store, state, step=3, writer=(writer, 2), agree="start-1", **given[writer]
        ),
    )
    labels = read_manifest(store).labels
    assert (labels.metrics, labels.tags) == ({"loss": "0.5"}, ("a",))
    assert {outcome.digest for outcome in outcomes} == {read_manifest(store).digest}
    assert ckptfmt.validate(store)
    assert not isinstance(ckptfmt.load(store, state, writer=(0, 1)), dict)


def test_a_metric_that_is_no_number_stops_all_writers() -> None:
    """REQ-CMT-002, REQ-MAN-011"""
    state, store = ckptfmt.State(weights={"w": np.zeros(3)}), MemoryStore()
    given: list[Any] = [{"loss": math.nan}, {"loss": 0.5}]

    outcomes = run_writers(
        2,
        lambda writer: ckptfmt.save(
            store, state, step=3, writer=(writer, 2), agree="1", metrics=given[writer]
        ),
    )
    assert [outcome.code for outcome in outcomes] == [Code.ARGUMENT] * 2
    assert files_in(store) == []


@pytest.mark.parametrize("who", [0, 1])
def test_what_one_writer_refuses_reaches_all_before_a_file_is_created(who: int) -> None:
    """REQ-CMT-002."""
    states = [ckptfmt.State(weights={"w": np.zeros(3)}) for _ in range(2)]
    states[who] = ckptfmt.State(weights={"w": np.zeros(3)}, extra={"socket": object()})
    store = MemoryStore()
    codes = save_by_two(store, *states)
    # Writer 0 decides for all: they have its code.
    assert (codes[who], codes[1 - who]) == (
        Code.STATE_UNSUPPORTED,
        Code.PEER_FAILED if who else Code.STATE_UNSUPPORTED,
    )
    assert files_in(store) == []


@pytest.mark.parametrize("step", [-1, 1.0, True, None, 1 << 53])
def test_step_that_is_no_number_of_steps_is_refused(step: Any) -> None:
    with pytest.raises(CkptError) as caught:
        ckptfmt.save(MemoryStore(), ckptfmt.State(data=1), step=step)
    assert caught.value.code == Code.ARGUMENT


@pytest.mark.parametrize("block_nbytes", [0, 4095, 5000, 1 << 27])
def test_block_size_out_of_range_is_refused(block_nbytes: int) -> None:
    with pytest.raises(CkptError) as caught:
        ckptfmt.save(MemoryStore(), ckptfmt.State(data=1), step=1, block_nbytes=block_nbytes)
    assert caught.value.code == Code.ARGUMENT


def test_path_of_a_run_means_the_head_of_its_lineage(tmp_path: Path) -> None:
    state = ckptfmt.State(data={"position": 0})
    with ckptfmt.Checkpointer(tmp_path / "run", state, every=1) as checkpointer:
        for step in checkpointer.steps(3):
            state.data["position"] = step + 1  # type: ignore[index]
    with ckptfmt.open(tmp_path / "run") as checkpoint:
        assert checkpoint.step == 3
    assert len(list_checkpoints(open_store(tmp_path / "run", writable=False))) == 3


def test_path_that_holds_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CkptError) as caught:
        ckptfmt.load(tmp_path)
    assert caught.value.code == Code.NOT_COMMITTED
    assert "manifest.json" in str(caught.value)


def test_every_error_is_picklable_and_has_a_remedy() -> None:
    for code in Code:
        error = code.error(
            code, "found", where="here", requirement="REQ-MAN-001", remedy=code.remedy
        )
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
        assert code.remedy
        assert issubclass(code.error, ckptfmt.CkptError)
        json.dumps(error.as_json())


def test_opening_a_run_says_that_a_saver_has_a_save_in_hand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """REQ-RUN-019: who peeks while a newer checkpoint is being saved doesn't go back to an older one unknowingly."""
    store, trainer = open_store(tmp_path, writable=True), Trainer()
    run(store, 2, saver="inline")
    with store.hold("savers/0001-00000-0123456789abcdef"):
        with ckptfmt.open(tmp_path) as checkpoint:
            assert (checkpoint.step, checkpoint.pending) == (2, ("0001-00000-0123456789abcdef",))
        ckptfmt.load(tmp_path, trainer.state)
        ckptfmt.load(tmp_path)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "step-00000002-l0001 was opened while launch 1 (writer 0) has a save in hand"
    ] * 3
    caplog.clear()
    with ckptfmt.open(
        tmp_path
    ) as checkpoint:  # the file is gone; one that nobody holds means nothing either
        assert checkpoint.pending == ()
    assert ckptfmt.open(tmp_path / checkpoint.title).pending == ()
    assert not caplog.records


def test_opening_a_run_waits_for_saves_in_hand_if_asked_to(tmp_path: Path) -> None:
    """REQ-RUN-019."""
    store = open_store(tmp_path, writable=True)
    run(store, 2, saver="inline")
    with ckptfmt.open(SavingStore(store), wait_s=60) as checkpoint:
        assert (checkpoint.step, checkpoint.pending) == (9, ())


def test_a_run_without_a_checkpoint_says_that_the_first_is_being_saved(tmp_path: Path) -> None:
    """REQ-RUN-019."""
    store = open_store(tmp_path, writable=True)
    open_run(store)
    with store.hold("savers/0001-00000-0123456789abcdef"), pytest.raises(CkptError) as caught:
        ckptfmt.open(tmp_path)
    assert (caught.value.code, "wait_s=" in caught.value.remedy) == (Code.NOT_COMMITTED, True)


def test_checkpoint_outside_of_a_run_names_no_run_and_has_a_nonce_of_its_own() -> None:
    """REQ-CKP-007"""
    origins = []
    for store in (MemoryStore(), MemoryStore()):
        ckptfmt.save(store, ckptfmt.State(data=1), step=1)
        with ckptfmt.open(store) as checkpoint:
            origins.append(checkpoint.manifest.origin)
    assert [(origin.run_id, origin.launch) for origin in origins] == [(None, None)] * 2
    assert origins[0].nonce != origins[1].nonce


def test_extra_lies_in_the_field_optimizer_under_names_of_its_own() -> None:
    """REQ-CTX-002"""
    store = MemoryStore()
    extra = {"average": {"w": np.ones(2)}, "counter": 3}
    ckptfmt.save(store, ckptfmt.State(weights={"w": np.zeros(2)}, extra=extra), step=1)
    with ckptfmt.open(store) as checkpoint:
        assert list(checkpoint.field("optimizer")) == ["extra/average/w"]
        assert (list(checkpoint.optimizer), list(checkpoint.weights)) == ([], ["w"])
        assert checkpoint.leaf("optimizer", "extra/counter") == 3


def test_place_of_a_retired_checkpoint_is_never_used_again() -> None:
    """REQ-CKP-006"""
    store = MemoryStore()
    ckptfmt.save(store, ckptfmt.State(data=1), step=1)
    with ckptfmt.open(store) as checkpoint:
        retire(store, checkpoint.manifest)
    with pytest.raises(CkptError) as caught:
        ckptfmt.save(store, ckptfmt.State(data=2), step=1)
    assert caught.value.code == Code.CHECKPOINT_EXISTS
    assert store.list("") == ["manifest.json"]


@pytest.mark.parametrize(
    "given", [{"run_id": None, "launch": 1}, {"run_id": "0" * 32, "launch": None}]
)
def test_run_and_launch_are_given_together_or_not_at_all(given: dict[str, Any]) -> None:
    """REQ-MAN-008"""
    origin = Origin(nonce="0" * 32, step=1, attempt="0" * 16, writer_count=1, **given)
    fields = {field: FieldSummary(reason="none") for field in FIELDS}
    digest = "blake3:" + "0" * 64
    manifest = Manifest(
        origin=origin, saved_unix_s=1, fields=fields, index_nbytes=1, index_digest=digest
    )
    with pytest.raises(CkptError) as caught:
        parse_register(manifest.dump())
    assert caught.value.code == Code.DOC_SCHEMA


def test_a_module_in_the_place_of_a_state_is_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    ckptfmt.save(tmp_path, ckptfmt.State(weights=model), step=1)

    def save() -> None:
        ckptfmt.save(tmp_path / "other", model, step=1)  # type: ignore[arg-type]

    def load() -> None:
        ckptfmt.load(tmp_path, model)  # type: ignore[call-overload]

    for refused in (save, load):
        with pytest.raises(CkptError, match=r"a Linear where a ckptfmt.State is wanted") as caught:
            refused()
        assert caught.value.code == Code.ARGUMENT
        assert "State(weights=model" in caught.value.remedy


@pytest.mark.skipif(
    torch.__version__ < "2.15", reason="torch.load opens safetensors files since 2.15"
)
def test_weights_open_with_torch_load(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    ckptfmt.save(tmp_path, ckptfmt.State(weights=model), step=1)
    (file,) = tmp_path.glob("weights-*.safetensors")
    found = torch.load(file)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in model.state_dict().items()
    }

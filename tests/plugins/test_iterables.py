"""Iterable data sets of datasets, WebDataset and torchdata: killed in any epoch, and resumed."""

import json
import os
import subprocess
import sys

import pytest

from tests.house.sources import ROOT

datasets = pytest.importorskip("datasets")
pytest.importorskip("webdataset")
StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

import torch  # noqa: E402 - after the check for the packages

import ckptfmt  # noqa: E402 - as above
from ckptfmt.errors import CkptError, Code  # noqa: E402 - as above

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # JAX in another test's process
]
PROGRAM = "tests.plugins.iterable_cells"
DECLARED = {"ckptfmt_exact": True}


def cell(loader, kind, workers=0, loop="steps", **more):
    return {"loader": loader, "kind": kind, "workers": workers, "loop": loop, **more}


#: Cells that are bit for bit, and claim it.
EXACT = [
    cell("stateful", "files"),
    cell("stateful", "files", 2, "set_epoch"),
    cell("stateful", "batched map", loop="range"),
    cell("stateful", "arrow map", 2, "range"),
    cell("stateful", "shards", loop="set_epoch"),
    cell("stateful", "row shards", 2),
    cell("stateful", "rows", 2, "after"),
    cell("stateful", "rows", loop="after", numbered=True),
    cell("stateful", "rows", 2, persistent=True),
    cell("stateful", "positioned"),
    cell("stateful", "positioned", 2, "after"),
    cell("stateful", "exact numbers"),
    cell("stateful", "webdataset", 2, set=DECLARED),
    cell("plain", "webdataset", loop="epochs", set=DECLARED),
    cell("web", "webdataset", 2, "epochs", set=DECLARED),
    cell("plain", "files", loop="epochs"),
    cell("plain", "buffer", loop="epochs"),
    cell("plain", "buffer", 2, "epochs"),
    cell("plain", "noisy numbers", 2, "epochs"),
    cell("nodes", "sampler"),
    cell("nodes", "wrapper", 2),
    cell("nodes", "sampler", loop="after"),
    cell("alone", "rows", loop="set_epoch"),
]
#: Cells that claim nothing, each with the report at the first save and whether the resume differs.
LOWERED = [
    (cell("stateful", "buffer"), "SHUFFLE_BUFFER_LOST", True),
    (cell("alone", "buffer"), "SHUFFLE_BUFFER_LOST", True),
    (cell("nodes", "numbers"), "ORDER_UNDECLARED", False),
    (cell("nodes", "files"), "EPOCH_BEGUN_EARLY", False),
    (cell("nodes", "rows", loop="set_epoch"), "EPOCH_BEGUN_EARLY", True),
    (cell("plain", "unseeded", loop="epochs"), "SHUFFLE_UNSEEDED", True),
    (cell("stateful", "webdataset"), "ORDER_UNDECLARED", False),
    (cell("plain", "noisy numbers", 2, "epochs", persistent=True), None, True),
    (cell("stateful", "rows", lose=True), None, True),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the result of each cell, by the cell as JSON."""
    folder = tmp_path_factory.mktemp("cells")
    cells = [*EXACT, *(one for one, _, _ in LOWERED)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", PROGRAM, folder, json.dumps(cells)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
    return {json.dumps(one): found for one, found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("one", EXACT, ids=lambda one: "-".join(map(str, one.values())))
def test_a_training_killed_in_any_epoch_continues_bit_for_bit(results, one):
    """Samples and weights: within the first epoch, at its end, and within the second epoch."""
    found = results[json.dumps(one)]
    assert found["wrong"] == []
    assert found["claim"][0] == "T1", found["claim"]


@pytest.mark.parametrize(("one", "name", "differs"), LOWERED, ids=str)
def test_a_position_that_its_library_loses_is_reported_before_the_first_step(
    results, one, name, differs
):
    """The negative control as well: the comparison sees other samples."""
    found = results[json.dumps(one)]
    assert found["claim"][0] == "S0"
    assert any(report.startswith(f"{name}: ") for report in found["reports"]) or name is None
    assert bool(found["wrong"]) is differs


def rows(**shuffle):
    whole = datasets.Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(num_shards=2)
    return whole.shuffle(**shuffle) if shuffle else whole


def moved(loader, other, path):
    ckptfmt.save(path, ckptfmt.State(data=loader), step=1)
    return ckptfmt.load(path, ckptfmt.State(data=other))


def test_a_loop_that_begins_with_an_earlier_epoch_is_refused(tmp_path):
    """datasets would drop the loaded position in silence."""
    data = rows()
    data.set_epoch(2)
    loader = StatefulDataLoader(data, batch_size=2)
    next(iter(loader))
    other = StatefulDataLoader(rows(), batch_size=2)
    moved(loader, other, tmp_path / "c")
    assert other.dataset.epoch == 2
    with pytest.raises(CkptError) as caught:
        other.dataset.set_epoch(0)
    assert caught.value.code == Code.CONFIG_IDENTITY
    assert "range(dataset.epoch, epochs)" in str(caught.value)
    for epoch in range(other.dataset.epoch, 3):  # the remedy
        other.dataset.set_epoch(epoch)
        assert len([batch["x"].tolist() for batch in other]) == 5


def test_a_shuffle_of_shards_alone_is_the_remedy_for_a_lost_buffer(tmp_path):
    reports = {}
    for size in (8, 1):
        state = ckptfmt.State(data=StatefulDataLoader(rows(seed=1, buffer_size=size)), config={})
        with ckptfmt.Checkpointer(tmp_path / str(size), state) as checkpointer:
            checkpointer.restore_rng()
            reports[size] = [one for one in checkpointer.reports if "SHUFFLE" in one]
    assert reports[1] == []
    assert "buffer_size=1" in reports[8][0]


def test_a_web_loader_is_refused_with_the_loader_in_it(tmp_path):
    import webdataset  # noqa: PLC0415 - optional

    data = webdataset.WebDataset(["0.tar"], shardshuffle=False)
    data.ckptfmt_exact = True
    loader = webdataset.WebLoader(data, batch_size=2)
    with pytest.raises(CkptError, match=r"State\(data=loader.pipeline\[0\]\)") as caught:
        ckptfmt.save(tmp_path / "c", ckptfmt.State(data=loader), step=1)
    assert caught.value.code == Code.STATE_UNSUPPORTED
    ckptfmt.save(tmp_path / "c", ckptfmt.State(data=loader.pipeline[0]), step=1)


class LateLoader:
    """A loader that moves to a loaded position with its first batch."""

    def __init__(self):
        self.at = 0
        self.begin = 0

    def __iter__(self):
        for number in range(self.begin + 1, 9):
            self.at = number
            yield number

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"]


def test_an_own_loader_that_moves_late_is_loaded_and_claims_nothing(tmp_path):
    """READ_BACK refused this loader at each resume."""
    loader = LateLoader()
    batches = iter(loader)
    assert [next(batches), next(batches)] == [1, 2]
    other = LateLoader()
    report = moved(loader, other, tmp_path / "c")
    assert list(other) == [3, 4, 5, 6, 7, 8]
    assert report.claim == "S0"
    assert any("differs from the loaded state, first at /at" in one for one in report.lowered_by)


def test_worker_processes_that_gave_no_batch_yet_keep_their_position(tmp_path):
    """A save right after a resume, when one of two workers has no batch of this launch."""

    def make():
        return StatefulDataLoader(rows(), batch_size=2, num_workers=2)

    right = [batch["x"].tolist() for batch in make()]
    loader = make()
    seen = []
    for step in range(len(right)):  # a resume after each batch
        seen.append(next(iter(loader))["x"].tolist())
        other = make()
        ckptfmt.save(tmp_path / str(step), ckptfmt.State(data=loader), step=step)
        ckptfmt.load(tmp_path / str(step), ckptfmt.State(data=other))
        loader = other
    assert seen == right


def test_datasets_and_torchdata_are_the_tested_versions():
    """Their corrections depend on names that aren't public."""
    assert hasattr(rows(), "_prepare_ex_iterable_for_iteration")
    assert hasattr(rows(), "_starting_state_dict")
    assert torch.utils.data.IterableDataset in type(rows()).__mro__

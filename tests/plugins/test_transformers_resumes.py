"""Trainings with Hugging Face's Trainer that are ended at any step, and continue bit for bit."""

import pytest

pytest.importorskip("transformers")

import json
import signal
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from transformers.trainer_utils import get_last_checkpoint

import ckptfmt
from tests.plugins.test_transformers import Jittered, committed_steps, train, train_here
from tests.plugins.trainings import compare, verdict
from tests.plugins.transformers_training import SaveAt, Streamed, TerminateAt, Tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

#: Updates in an epoch; saves within the first epoch, within the second, and at its end.
EPOCH = 3
SAVES = (2, 4, 6)
LAST_STEP = 8


def told(processes=1, *, save_at=0, stop=False, **args):
    """Return the settings of a training with `EPOCH` updates of two batches."""
    workers = args.pop("workers", 0)
    count = EPOCH * 2 * 2 * processes
    data: Any = (
        Streamed(count) if args.pop("is_iterable", False) else Subset(Tokens(), range(count))
    )
    options: dict[str, Any] = {"saving": ckptfmt.Saving(saver="inline")}
    callbacks: list[Any] = []
    if save_at:
        callbacks = [TerminateAt(save_at) if stop else SaveAt(save_at)]
        options["stop"] = ckptfmt.Stop(signals=[signal.SIGTERM]) if stop else None
    return {
        "callbacks": callbacks,
        "ckptfmt": options,
        "train_dataset": data,
        "args": {
            "max_steps": LAST_STEP,
            "save_strategy": "no",
            "dataloader_num_workers": workers,
            **args,
        },
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return the directory of an undisturbed training; each is run once."""
    places: dict[str, Path] = {}

    def run(processes, args):
        key = json.dumps([processes, args])
        if key not in places:
            places[key] = tmp_path_factory.mktemp("right")
            train(places[key], processes=processes, **told(processes, **args))
        return places[key]

    return run


ENDS = ("killed", "stopped")
CELLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "workers": {"workers": 2},
    "persistent": {"workers": 2, "dataloader_persistent_workers": True},
    "unseeded": {"accelerator_config": {"use_seedable_sampler": False}},
    "split": {"accelerator_config": {"split_batches": True}},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "iterable": {"is_iterable": True},
}


#: The plain loader on each number of processes and with each end; others with one of these in turn.
EACH = [(cell, count, ends) for cell in CELLS for count in (1, 2) for ends in ENDS]
USUAL = [
    *(one for one in EACH if one[0] == "plain"),
    *((cell, 1 + at % 2, ENDS[at // 2 % 2]) for at, cell in enumerate([*CELLS][1:])),
]


@pytest.mark.parametrize(
    ("cell", "processes", "ends"),
    [pytest.param(*one, marks=[] if one in USUAL else pytest.mark.exhaustive) for one in EACH],
)
def test_a_training_that_ends_at_any_step_continues(tmp_path, reference, cell, processes, ends):
    """The same command begins the training, and continues it after each end."""
    args = CELLS[cell]
    right = reference(processes, args)
    for step in SAVES:
        one = told(processes, save_at=step, stop=ends == "stopped", **args)
        kill_at = step + 1 if ends == "killed" else None
        train(tmp_path, processes=processes, resume=True, kill_at=kill_at, **one)
    train(tmp_path, processes=processes, resume=True, **told(processes, **args))
    for rank in range(processes):
        journals = [place / f"journal-{rank}" for place in (right, tmp_path)]
        assert compare(*journals, last_step=LAST_STEP) == []
    assert (tmp_path / "claim").read_text() == "T1"


@pytest.mark.parametrize("resume", [True, "True"])
def test_the_same_command_begins_and_continues(tmp_path, resume):
    """Before the first save there is nothing to continue from, also after a kill."""
    for stop_at, steps in ((3, []), (6, [(5, 2)])):
        train_here(tmp_path, stop_at=stop_at, resume=resume)
        assert committed_steps(tmp_path) == steps
    continued = train_here(tmp_path, stop_at=7, resume=resume)
    assert continued.checkpointer.load_report.step == 5
    assert continued.state.global_step == 7
    anew = train_here(tmp_path, stop_at=1, resume="False")
    assert anew.checkpointer.load_report is None


def test_get_last_checkpoint_finds_the_run(tmp_path):
    """The idiom of transformers' examples begins and continues, also after a kill before a save."""
    found = []
    for stop_at in (3, 6, 12):
        (tmp_path / "out").mkdir(exist_ok=True)
        found.append(get_last_checkpoint(str(tmp_path / "out")))
        ours = train_here(tmp_path, stop_at=stop_at, resume=found[-1])
    assert found == [None, *[str(tmp_path / "out/checkpoint-0")] * 2]
    assert ours.checkpointer.load_report.step == 5
    # The directory keeps its meaning where the training is moved to.
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "there").mkdir()
    (tmp_path / "moved").rename(tmp_path / "there/out")
    last = get_last_checkpoint(str(tmp_path / "there/out"))
    moved = train_here(tmp_path / "there", stop_at=11, resume=last)
    assert moved.checkpointer.load_report.step == 10
    with pytest.raises(ValueError, match="belongs to the run"):
        train_here(tmp_path / "other", resume=last)


def test_a_finished_training_is_found_with_a_limit_of_one(tmp_path):
    """transformers removes all directories but the best of a finished training."""
    args = {
        "max_steps": 6,
        "save_total_limit": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }
    for options in ({}, {"export_hf": True}):
        train_here(tmp_path, args=args, ckptfmt=options)
        last = get_last_checkpoint(str(tmp_path / "out"))
        assert train_here(tmp_path, args=args, resume=last).checkpointer.load_report.step == 6


class Noisy(Tokens):
    """Tokens with random numbers of the process that fetches."""

    def __getitem__(self, index):
        ids = super().__getitem__(index)["input_ids"] + torch.randint(0, 2, ())
        return {"input_ids": ids % 64, "labels": ids % 64}


INEXACT: list[tuple[str, dict[str, Any]]] = [
    ("fetching a batch draws", {"train_dataset": Noisy()}),
    ("fetching a batch draws", {"data_collator": Jittered()}),
    ("worker processes draw", {"train_dataset": Noisy(), "args": {"dataloader_num_workers": 1}}),
    (
        "worker processes draw",
        {"data_collator": Jittered(), "args": {"dataloader_num_workers": 1}},
    ),
    ("ignore_data_skip=True begins the epoch again", {"args": {"ignore_data_skip": True}}),
    (
        "evaluations reuse their worker processes",
        {
            "args": {
                "dataloader_num_workers": 1,
                "dataloader_persistent_workers": True,
                "eval_strategy": "steps",
                "eval_steps": 4,
            }
        },
    ),
]


@pytest.mark.parametrize(("reason", "told"), INEXACT)
def test_a_resume_that_cant_be_exact_says_so(tmp_path, reason, told, may_be_refuted):
    may_be_refuted.add(tmp_path / "out/ckptfmt")
    train_here(tmp_path, stop_at=6, **told)
    report = train_here(tmp_path, stop_at=7, resume=True, **told).checkpointer.load_report
    assert report.claim != "T1"
    assert any(line.startswith(reason) for line in report.lowered_by)


def test_dispatched_batches_lower_the_claim(tmp_path, may_be_refuted):
    """Within an epoch of two processes; process 0 fetches the batches for both."""
    may_be_refuted.add(tmp_path / "out/ckptfmt")
    args = {"accelerator_config": {"dispatch_batches": True}}
    train(tmp_path, processes=2, kill_at=3, **told(2, save_at=2, **args))
    train(tmp_path, processes=2, resume=True, **told(2, **args))
    claim, *reasons = (tmp_path / "claim").read_text().splitlines()
    assert claim == "S0"
    assert any("dispatch_batches" in reason for reason in reasons)


def test_the_comparison_sees_another_order(tmp_path, monkeypatch, may_be_refuted):
    """The negative control: without the random numbers of an epoch's begin, the order differs.

    The first epoch's order would be right by the seed; the save is within the second epoch.
    """
    may_be_refuted.add(tmp_path / "ours/out/ckptfmt")
    options: dict[str, Any] = {
        "args": CELLS["grouped"],
        "train_dataset": Subset(Tokens(), range(24)),  # the sampler reads all lengths
    }
    train_here(tmp_path / "right", stop_at=13, **options)
    train_here(tmp_path / "ours", stop_at=11, **options)
    monkeypatch.setattr("ckptfmt.plugins.transformers.put_begin", lambda *_, **_named: None)
    train_here(tmp_path / "ours", stop_at=13, resume=True, **options)
    journals = [tmp_path / name / "journal-0" for name in ("right", "ours")]
    lines = compare(*journals, last_step=13)
    assert any("step 11 differs in" in line and "samples" in line for line in lines)
    assert verdict(tmp_path / "ours/out/ckptfmt")[0] == "refuted"

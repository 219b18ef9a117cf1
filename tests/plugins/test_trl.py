"""Trainers of TRL on runs of ckptfmt: killed within and between generations, resumed bit for bit."""

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.plugins.trainings import await_savers, compare, run_ranks

LAST_STEP = 12

#: Processes that can be killed, and needn't import the frameworks anew.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.plugins.vision",
        "tests.plugins.trl_training",
        "torch._dynamo",
        "tests.plugins.warm",
    ]
)


def train(directory: Path, *, kill_at: int | None = None, processes: int = 1, **told: Any) -> None:
    """Train in processes of their own, to the end or until a kill behind a step."""
    directory.mkdir(exist_ok=True)
    told = {"max_steps": LAST_STEP, **told}
    # Imported by the server of forks. Without the variable TRL reports its use.
    offline = {"HF_HUB_OFFLINE": "1", "CI": "1"}
    run_ranks(FORKS, _main, directory, told, processes=processes, kill_at=kill_at, env=offline)


def _main(directory: Path, env: dict[str, str], told: dict[str, Any]) -> None:
    from tests.plugins.trl_training import main  # noqa: PLC0415 - this process doesn't train

    main(directory, env, told)


def read_log(directory: Path) -> list[dict[str, float]]:
    """Return the log of a training without durations and without averages since a resume."""
    entries = json.loads((directory / "log").read_text())
    return [
        {
            name: value
            for name, value in entry.items()
            if name != "loss" and not name.startswith("train_") and "time" not in name
        }
        for entry in entries
        if "loss" in entry
    ]


#: Four batches use a generation, and an epoch has two generations.
WITHIN, BETWEEN, END_OF_EPOCH, WITHIN_LATER = 2, 4, 8, 10
#: Settings, and the saves that are resumed.
CELLS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "GRPO": ({"saver": "process"}, (WITHIN, BETWEEN, END_OF_EPOCH, WITHIN_LATER)),
    # Two batches in an update, four updates with a generation, a reference model that follows.
    "GRPO with a reference model": (
        {
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 4,
            "per_device_train_batch_size": 2,
            "beta": 0.1,
            "use_adaptive_entropy": True,
            "entropy_target": 4.0,
            "sync_ref_model": True,
            "ref_model_sync_steps": 3,
            "ref_model_mixup_alpha": 0.5,
        },
        (WITHIN_LATER,),
    ),
    "RLOO with LoRA": ({"kind": "Rloo", "is_lora": True}, (WITHIN_LATER,)),
    "SFT with LoRA": ({"kind": "Sft", "is_lora": True}, (WITHIN_LATER,)),
    "DPO with LoRA": ({"kind": "Dpo", "is_lora": True}, (WITHIN_LATER,)),
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_training_killed_within_and_between_generations_continues(tmp_path, cell):
    """Prompts, completions, rewards, weights, optimizer and RNG streams are those of one launch."""
    right, ours = tmp_path / "right", tmp_path / "ours"
    told, saves = CELLS[cell]
    train(right, **told)
    for step in saves:
        train(ours, kill_at=step + 1, **told)
    train(ours, **told)
    assert compare(right / "journal-0", ours / "journal-0", last_step=LAST_STEP) == []
    assert (ours / "claim").read_text() == "T1"
    assert read_log(right) == read_log(ours)


def test_each_process_has_its_own_completions(tmp_path):
    """Two processes continue bit for bit; a single process generates again, and the claim says so."""
    right, ours = tmp_path / "right", tmp_path / "ours"
    told: dict[str, Any] = {"max_steps": 5, "saver": "process"}
    train(right, processes=2, **told)
    train(ours, processes=2, kill_at=WITHIN + 1, **told)
    await_savers(ours / "out/ckptfmt")
    shutil.copytree(ours, tmp_path / "alone")
    train(ours, processes=2, **told)
    for rank in range(2):
        journals = [place / f"journal-{rank}" for place in (right, ours)]
        assert compare(*journals, last_step=5) == []
    assert (ours / "claim").read_text() == "T1"
    train(tmp_path / "alone", **told)
    claim, *reasons = (tmp_path / "alone/claim").read_text().splitlines()
    assert claim != "T1"
    assert any("workers that no longer exist" in reason for reason in reasons)


def test_the_comparison_sees_other_completions(tmp_path, may_be_refuted):
    """The negative control: without the saved completions a resume within a generation differs."""
    may_be_refuted.add(tmp_path / "out/ckptfmt")
    train(tmp_path, kill_at=WITHIN + 1)
    train(tmp_path, kind="Forgetful", max_steps=WITHIN + 1)
    (difference,) = compare(tmp_path / "journal-0", tmp_path / "journal-0", last_step=WITHIN + 1)
    assert "rewards" in difference
    assert "weights" in difference

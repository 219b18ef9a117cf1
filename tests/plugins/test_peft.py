"""LoRA adapters of PEFT under the Trainer: checkpoints without the base, killed and resumed, bit for bit."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import huggingface_hub.file_download
import torch
from peft import PeftModel
from transformers import GPT2LMHeadModel, TrainerCallback

import ckptfmt
from ckptfmt.__main__ import main as ckptfmt_main
from ckptfmt.errors import CkptError
from ckptfmt.plugins.peft_bases import find_base
from tests.plugins.test_transformers import StopAt, train, weights_of
from tests.plugins.trainings import compare, digest, verdict
from tests.plugins.transformers_training import adapt, make_model, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

LAST_STEP = 14
#: The number of the base's tensors: a tied tensor counts once.
BASE_COUNT = len(make_model().state_dict()) - 1
ARGS: dict[str, Any] = {"max_steps": LAST_STEP}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory as `save_pretrained` makes it, in two files."""
    make_model().save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert (tmp_path / "base/model.safetensors.index.json").is_file()
    return tmp_path / "base"


def train_here(directory, *, base=None, model=None, stop_at=None, resume=None, **options):
    """Train adapters in this process, with a thread as saver; return the trainer."""
    options["ckptfmt"] = {"saver": "thread", **options.get("ckptfmt", {})}
    options["args"] = {**ARGS, **options.get("args", {})}
    if base is not None:
        options["base"] = str(base)
    trainer = make_trainer(directory, **options, **({} if model is None else {"model": model}))
    if stop_at is not None:
        trainer.add_callback(StopAt(stop_at))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def newest(directory):
    return ckptfmt.open(directory / "out/ckptfmt")


def warnings_of(caplog):
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_killed_training_goes_on_and_saves_adapters_only(tmp_path, base):
    train_here(tmp_path / "right", base=base)
    train(tmp_path / "ours", kill_at=8, base=str(base), args=ARGS)
    ours = train_here(tmp_path / "ours", base=base, resume=True)
    journals = [tmp_path / name / "journal-0" for name in ("right", "ours")]
    assert compare(*journals, last_step=LAST_STEP) == []
    assert ours.checkpointer.load_report.claim == "T1"
    assert verdict(tmp_path / "ours/out/ckptfmt")[0] == "verified"
    with newest(tmp_path / "ours") as checkpoint:
        stored = checkpoint.tensors.keys() - checkpoint.frozen.keys()
        assert {name for field, name, _ in stored if field == "weights"} == {
            name for name, one in ours.model.named_parameters() if one.requires_grad
        }
        assert checkpoint.frozen_location == str(base)
        assert len(checkpoint.frozen) == BASE_COUNT
    assert ckptfmt_main(["validate", str(tmp_path / "ours/out/ckptfmt")]) == 0


def test_a_base_that_moved_is_found_by_its_content(tmp_path, base):
    train_here(tmp_path, base=base, stop_at=6)
    base.rename(tmp_path / "moved")
    ours = train_here(tmp_path, base=tmp_path / "moved", resume=True)
    assert ours.checkpointer.load_report.claim == "T1"
    with newest(tmp_path) as checkpoint:
        assert checkpoint.frozen_location == str(tmp_path / "moved")


def test_a_base_that_changed_is_refused(tmp_path, base):
    train_here(tmp_path, base=base, stop_at=6)
    other = make_model()
    torch.nn.init.normal_(other.transformer.h[0].attn.c_attn.weight)
    other.save_pretrained(base, max_shard_size="20KB")
    with pytest.raises(CkptError, match="another content") as caught:
        train_here(tmp_path, base=base, resume=True)
    assert caught.value.code == "FROZEN_BASE_CHANGED"
    assert str(base) in str(caught.value)


def test_a_base_that_is_missing_is_named_with_the_way_to_give_another(tmp_path, base):
    """The live model has other weights than the base, so that a load needs the base's files."""
    train_here(tmp_path, base=base, stop_at=6)
    base.rename(tmp_path / "moved")
    model = make_model()
    torch.nn.init.normal_(model.transformer.h[0].attn.c_attn.weight)
    with pytest.raises(CkptError, match="isn't found") as caught:
        train_here(tmp_path, model=adapt(model), resume=True)
    assert caught.value.code == "FROZEN_BASE_MISSING"
    assert str(base) in str(caught.value)
    options = {"frozen_base": tmp_path / "moved"}
    ours = train_here(tmp_path, model=adapt(model), resume=True, ckptfmt=options)
    assert ours.checkpointer.load_report.claim == "T1"


def test_without_the_files_of_the_base_all_weights_are_saved_and_a_warning_says_so(
    tmp_path, base, caplog
):
    ours = train_here(tmp_path / "of memory", model=adapt(make_model()), stop_at=6)
    assert [text for text in warnings_of(caplog) if "all weights" in text] == [
        (
            "the safetensors files of the base of the adapters aren't on this machine (a model made"
            " from a configuration): checkpoints hold all weights; ckptfmt={'frozen_base': PATH} gives"
            " their place"
        )
    ]
    with newest(tmp_path / "of memory") as checkpoint:
        assert checkpoint.frozen == {}
        assert {key[1] for key in checkpoint.tensors if key[0] == "weights"} >= {
            name for name, _ in ours.model.named_parameters()
        }
    caplog.clear()
    told = {"ckptfmt": {"frozen_base": base}}
    train_here(tmp_path / "given", model=adapt(make_model()), stop_at=6, **told)
    train_here(tmp_path / "off", base=base, stop_at=6, ckptfmt={"frozen_base": False})
    assert not any("all weights" in text for text in warnings_of(caplog))
    counts = []
    for name in ("given", "off"):
        with newest(tmp_path / name) as checkpoint:
            counts.append(len(checkpoint.frozen))
    assert counts == [BASE_COUNT, 0]


def test_the_base_is_found_in_the_cache_of_the_hub(tmp_path, base, monkeypatch):
    cache = tmp_path / "hub/models--org--tiny"
    snapshot = cache / "snapshots/1234"
    snapshot.parent.mkdir(parents=True)
    base.rename(snapshot)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("5678")
    monkeypatch.setattr(huggingface_hub.file_download.constants, "HF_HUB_CACHE", cache.parent)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache.parent))
    model = adapt(make_model())
    model.config._name_or_path = "org/tiny"
    assert find_base(model) is None  # no file of the revision "5678" is there
    model.config._commit_hash = "1234"
    assert find_base(model) == str(snapshot)
    (snapshot / "model-00001-of-00002.safetensors").unlink()
    assert find_base(model) is None


class RemoveBase(TrainerCallback):
    """Removes the weights of a base behind a step; the configuration stays."""

    def __init__(self, base):
        self.base = base

    def on_step_end(self, _args, state, _control, **_objects):
        if state.global_step == 6:
            for file in self.base.glob("*.safetensors"):
                file.unlink()


def test_an_export_is_an_adapter_directory_and_reads_no_base(tmp_path, base):
    shutil.copytree(base, tmp_path / "kept")
    args = {
        "eval_strategy": "steps",
        "eval_steps": 5,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "save_total_limit": 2,
    }
    told = {"args": args, "ckptfmt": {"export_hf": True}, "callbacks": [RemoveBase(base)]}
    ours = train_here(tmp_path, base=base, stop_at=11, **told)
    place = ours.state.best_model_checkpoint
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in Path(place).iterdir()
    }
    assert place.endswith("checkpoint-10")
    whole = GPT2LMHeadModel.from_pretrained(tmp_path / "kept")
    loaded = PeftModel.from_pretrained(whole, place)
    assert digest(loaded.state_dict()) == weights_of(ours.model)

"""Hugging Face's Trainer on a run of ckptfmt: killed and resumed, bit for bit; the best model; exports; refusals."""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_model
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_utils import get_last_checkpoint

import ckptfmt
from ckptfmt.__main__ import main as ckptfmt_main
from ckptfmt.errors import CkptError
from ckptfmt.plugins.transformers import CkptfmtTrainer
from tests.plugins.trainings import compare, digest, run_ranks, verdict
from tests.plugins.transformers_training import (
    LAST_STEP,
    OfTransformers,
    Tokens,
    Watched,
    main,
    make_model,
    make_trainer,
)

#: Everything at once: evaluations, the best model, a limit, exports.
FULL: dict[str, Any] = {
    "args": {
        "eval_strategy": "steps",
        "eval_steps": 5,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # so that the best is an early one
        "save_total_limit": 2,
    },
    "ckptfmt": {"export_hf": True},
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


#: Processes that can be killed, and needn't import the frameworks anew.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.plugins.vision",
        "tests.plugins.transformers_training",
        "torch._dynamo",
        "tests.plugins.warm",
    ]
)


def train(directory, *, kill_at=None, processes=1, exitcode=0, **told):
    """Train in processes of their own, to the end or until a kill behind a step."""
    run_ranks(FORKS, main, directory, told, processes=processes, kill_at=kill_at, exitcode=exitcode)


def weights_of(model):
    return digest(model.state_dict())


class StopAt(TrainerCallback):
    """Ends the training behind a step; what isn't saved by then is lost."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, _args, state, control, **_objects):
        control.should_training_stop = state.global_step >= self.step


def train_here(directory, *, stop_at=None, resume=None, **options):
    """Train in this process, with a thread as saver; return the trainer."""
    options["ckptfmt"] = {"saver": "thread", **options.get("ckptfmt", {})}
    trainer = make_trainer(directory, **options)
    if stop_at is not None:
        trainer.add_callback(StopAt(stop_at))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def committed_steps(directory):
    run = ckptfmt.Run(directory / "out/ckptfmt")
    return [(one.step, one.launch) for one in run.list() if one.state == "committed"]


def differences(right, ours, last_step=LAST_STEP):
    return compare(right / "journal-0", ours / "journal-0", last_step=last_step)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The directory of a training that nobody disturbed."""
    directory = tmp_path_factory.mktemp("undisturbed")
    make_trainer(directory).train()
    return directory


def test_killed_in_a_step_and_in_a_save(tmp_path, undisturbed, may_be_refuted):
    """A training that is killed twice, once just after a save began, goes on as if it never was."""
    train(tmp_path, kill_at=23)
    shutil.copytree(tmp_path, tmp_path / "control")
    train(tmp_path, resume=True, die_in_save=35, exitcode=-signal.SIGKILL)
    train(tmp_path, resume=True)
    assert (tmp_path / "claim").read_text() == "T1"
    judged, compared, _ = verdict(tmp_path / "out/ckptfmt")
    assert (judged, compared >= {"loss", "gradient norm", "batch", "weights"}) == ("verified", True)
    assert compare(undisturbed / "journal-0", tmp_path / "journal-0", last_step=LAST_STEP) == []
    assert ckptfmt_main(["validate", str(tmp_path / "out/ckptfmt")]) == 0
    # The same without RNG streams does differ, and in the weights from the first step on.
    train(tmp_path / "control", resume=True, kind="WithoutStreams")
    differing = compare(
        undisturbed / "journal-0", tmp_path / "control/journal-0", last_step=LAST_STEP
    )
    assert any("step 21 differs in" in line and "weights" in line for line in differing)
    assert not any("samples" in line for line in differing)
    assert verdict(tmp_path / "control/out/ckptfmt")[:2] == ("refuted", {"rng"})
    may_be_refuted.add(tmp_path / "control/out/ckptfmt")


def test_state_that_the_trainer_does_not_save_is_found_by_the_loss(tmp_path, may_be_refuted):
    """With the same batches and random numbers, another loss shows a state outside of what was saved."""
    for resume in (False, True):
        train(
            tmp_path,
            kind="Curriculum",
            kill_at=None if resume else 9,
            resume=resume,
            args={"max_steps": 12},
        )
    judged, what, told = verdict(tmp_path / "out/ckptfmt")
    assert (judged, what) == ("refuted", {"loss"})
    assert told.startswith("step 6 had the same RNG streams and batch, but its loss differs: ")
    assert "a state that isn't in State" in told
    may_be_refuted.add(tmp_path / "out/ckptfmt")


def test_two_processes(tmp_path):
    """Of two processes under DistributedDataParallel, both are as they would have been."""
    train(tmp_path / "right", processes=2)
    train(tmp_path / "ours", processes=2, kill_at=23)
    train(tmp_path / "ours", processes=2, resume=True)
    for rank in (0, 1):
        journals = [tmp_path / name / f"journal-{rank}" for name in ("right", "ours")]
        assert compare(*journals, last_step=LAST_STEP) == []
    assert (tmp_path / "ours/claim").read_text() == "T1"
    assert ckptfmt_main(["validate", str(tmp_path / "ours/out/ckptfmt")]) == 0
    alone = train_here(
        tmp_path / "ours", stop_at=41, resume=str(tmp_path / "ours/out/ckptfmt/step-00000040-l0002")
    )
    assert alone.state.global_step == 41
    assert any(
        "processes: saved 2, here 1" in reason
        for reason in alone.checkpointer.load_report.lowered_by
    )


def test_fsdp2(tmp_path):
    """Sharded parameters and optimizer state, the best model and exports among them."""
    args = {
        **FULL["args"],
        "fsdp": True,
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]},
    }
    told = {
        "kind": "Sharded",
        "args": {**args, "max_steps": 8},
        "ckptfmt": {"export_hf": True},
        "processes": 2,
    }
    train(tmp_path / "right", **told)
    train(tmp_path / "ours", **told, kill_at=7)
    train(tmp_path / "ours", **told, resume=True)
    for rank in (0, 1):
        journals = [tmp_path / name / f"journal-{rank}" for name in ("right", "ours")]
        assert compare(*journals, last_step=8) == []
    assert (tmp_path / "ours/claim").read_text() == "T1"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "ours/out/checkpoint-8")
    plain = make_model()
    ckptfmt.load(tmp_path / "ours/out/ckptfmt", ckptfmt.State(weights=plain, rng=False))
    assert digest(plain.state_dict()) == digest(exported.state_dict())


def test_best_model_limit_and_exports(tmp_path):
    right = train_here(tmp_path / "right", **FULL)
    train(tmp_path / "ours", kill_at=23, **FULL)
    ours = train_here(tmp_path / "ours", resume=True, **FULL)
    assert differences(tmp_path / "right", tmp_path / "ours") == []

    run = ckptfmt.Run(tmp_path / "ours/out/ckptfmt")
    scores = {log["step"]: log["eval_loss"] for log in ours.state.log_history if "eval_loss" in log}
    assert scores == {
        log["step"]: log["eval_loss"] for log in right.state.log_history if "eval_loss" in log
    }
    best_step = max(scores, key=lambda step: scores[step])
    assert best_step < 23
    best = run.best("eval_loss", "max")
    assert best.step == best_step == ours.state.best_global_step
    assert best.metrics["eval_loss"] == scores[best_step]
    steps = {step for step, _ in committed_steps(tmp_path / "ours")}
    assert steps == {best_step, LAST_STEP}
    # What is live now, what the directory of the best has, and what the checkpoint has, are one
    # model.
    assert ours.state.best_model_checkpoint == str(tmp_path / f"ours/out/checkpoint-{best_step}")
    exported = AutoModelForCausalLM.from_pretrained(ours.state.best_model_checkpoint)
    plain = make_model(embd_pdrop=0.0)
    ckptfmt.load(tmp_path / "ours/out/ckptfmt" / best.name, ckptfmt.State(weights=plain, rng=False))
    assert (
        len({digest(model.state_dict()) for model in (ours.model, right.model, exported, plain)})
        == 1
    )
    # Nothing but whole directories is ever there.
    found = {path.name for path in (tmp_path / "ours/out").iterdir()}
    assert found == {
        "ckptfmt",
        "checkpoint-0",
        f"checkpoint-{best_step}",
        f"checkpoint-{LAST_STEP}",
    }
    told = json.loads(
        (tmp_path / f"ours/out/checkpoint-{LAST_STEP}/trainer_state.json").read_text()
    )
    assert told["log_history"] == [log for log in ours.state.log_history if "train_loss" not in log]
    assert told["best_model_checkpoint"] == ours.state.best_model_checkpoint
    assert get_last_checkpoint(tmp_path / "ours/out") == str(
        tmp_path / f"ours/out/checkpoint-{LAST_STEP}"
    )


def test_of_equals_the_newest_is_the_best(tmp_path):
    """Retention keeps the newest of those that are best; the Trainer counts the first as the best."""
    args = {
        "eval_strategy": "steps",
        "eval_steps": 5,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    told = {
        "args": {**args, "metric_for_best_model": "same"},
        "compute_metrics": lambda _predictions: {"same": 0.5},
    }
    train_here(tmp_path / "there", stop_at=11, **told)
    (tmp_path / "there").rename(
        tmp_path / "here"
    )  # and the best is found where the run has been moved to
    ours = train_here(tmp_path / "here", resume=True, **told)
    assert ours.state.best_global_step == 5
    assert [step for step, _ in committed_steps(tmp_path / "here")] == [LAST_STEP]
    found = ckptfmt.Run(tmp_path / "here/out/ckptfmt").newest()
    assert found.metrics["eval_same"] == 0.5
    plain = make_model()
    ckptfmt.load(tmp_path / "here/out/ckptfmt", ckptfmt.State(weights=plain, rng=False))
    assert digest(plain.state_dict()) == digest(ours.model.state_dict())


def test_an_export_replaces_that_of_an_earlier_launch(tmp_path):
    left = tmp_path / "out/.exporting/made"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    for _ in range(2):
        ours = train_here(tmp_path, stop_at=6, ckptfmt={"export_hf": True})
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "ckptfmt",
        "checkpoint-0",
        "checkpoint-5",
    }
    told = json.loads((tmp_path / "out/checkpoint-5/ckptfmt.json").read_text())
    assert told["checkpoint"] == str(tmp_path / "out/ckptfmt/step-00000005-l0002")
    assert ours.state.best_model_checkpoint is None


def test_a_compiled_model_has_plain_names(tmp_path):
    args = {"torch_compile": True, "torch_compile_backend": "eager"}
    ours = train_here(tmp_path, stop_at=6, args=args)
    plain = make_model()
    ckptfmt.load(tmp_path / "out/ckptfmt", ckptfmt.State(weights=plain, rng=False))
    assert (
        train_here(tmp_path, stop_at=7, resume=True, args=args).checkpointer.load_report.claim
        == "T1"
    )
    assert ours.checkpointer.step == 6


def test_a_resume_follows_the_lineage_and_passes_over_damage(tmp_path, undisturbed):
    train_here(tmp_path, stop_at=23, ckptfmt={"export_hf": True})
    assert committed_steps(tmp_path) == [(5, 1), (10, 1), (15, 1), (20, 1)]
    # By hand, back to a checkpoint's export; from there on the greatest step isn't the newest.
    train_here(tmp_path, stop_at=17, resume=str(tmp_path / "out/checkpoint-10"))
    weights = next((tmp_path / "out/ckptfmt/step-00000015-l0002").glob("weights-*"))
    content = bytearray(weights.read_bytes())
    content[-9] ^= 1
    weights.write_bytes(content)
    ours = train_here(tmp_path, resume=True)
    assert ours.checkpointer.launch.resume_from.name == "step-00000010-l0001"
    assert any("step-00000015-l0002" in sentence for sentence in ours.checkpointer.passed_over)
    assert differences(undisturbed, tmp_path) == []
    # A checkpoint by its own path.
    again = train_here(
        tmp_path, stop_at=26, resume=str(tmp_path / "out/ckptfmt/step-00000020-l0001")
    )
    assert again.checkpointer.launch.resume_from.name == "step-00000020-l0001"
    assert differences(undisturbed, tmp_path) == []


def test_a_training_that_began_without_the_plugin_goes_on_in_a_run(tmp_path, undisturbed):
    before = make_trainer(tmp_path, kind=Trainer)
    before.add_callback(StopAt(13))
    before.train()
    ours = train_here(tmp_path, stop_at=23, resume=True)
    assert committed_steps(tmp_path) == [(15, 1), (20, 1)]
    assert ours.checkpointer.load_report is None  # transformers restored it
    train_here(tmp_path, resume=True)
    lines = differences(undisturbed, tmp_path)
    assert lines == [f"step {step} is missing" for step in range(1, 11)]
    # A path of transformers' own, too.
    train_here(tmp_path, stop_at=12, resume=str(tmp_path / "out/checkpoint-10"))
    assert differences(undisturbed, tmp_path) == lines


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        train_here(tmp_path, resume=str(tmp_path))


def test_a_fresh_start_beside_checkpoints_says_so(tmp_path, caplog):
    train_here(tmp_path, stop_at=6)
    assert "has checkpoints" not in caplog.text
    train_here(tmp_path, stop_at=6)
    assert "resume_from_checkpoint=True goes on from them" in caplog.text
    assert committed_steps(tmp_path) == [(5, 1), (5, 2)]


def test_sigterm_saves_and_ends_the_training(tmp_path, undisturbed):
    class Terminate(TrainerCallback):
        def on_step_end(self, _args, state, _control, **_objects):
            if state.global_step == 12:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(
        signal.SIGTERM
    )  # another framework's, if its tests ran in this process
    ours = make_trainer(tmp_path, callbacks=[Terminate()], ckptfmt={"stop_on": [signal.SIGTERM]})
    ours.train()
    assert ours.checkpointer.stopped
    assert ours.state.global_step == 12
    assert committed_steps(tmp_path)[-1] == (12, 1)
    assert signal.getsignal(signal.SIGTERM) == before
    train_here(tmp_path, resume=True)
    assert differences(undisturbed, tmp_path) == []


class TerminateAt(TrainerCallback):
    """A SIGTERM in a step, and what `on_step_end` finds."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, _args, state, _control, **_objects):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


#: Evaluations at the ends of epochs, by steps 18 and 36, each of which lowers the learning rate.
BY_EPOCH = {
    "eval_strategy": "epoch",
    "max_steps": 40,
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0, "threshold_mode": "abs"},
    "metric_for_best_model": "loss",
}


@pytest.mark.parametrize("strategy", ["epoch", "steps", "no"])
def test_an_evaluation_at_the_end_of_an_epoch_is_part_of_its_last_step(tmp_path, strategy):
    """Whoever asks for the save: the strategy, a signal, an interval."""
    args = {**BY_EPOCH, "save_strategy": strategy, "save_steps": 18}
    train_here(tmp_path / "right", args=args)
    ours = train_here(
        tmp_path / "ours",
        args=args,
        callbacks=[TerminateAt(36)],
        ckptfmt={"stop_on": [signal.SIGTERM]},
    )
    assert ours.checkpointer.stopped
    again = train_here(
        tmp_path / "ours", args=args, resume=str(tmp_path / "ours/out/ckptfmt/step-00000036-l0001")
    )
    assert again.checkpointer.load_report.claim == "T1"
    assert [log["step"] for log in again.state.log_history if "eval_loss" in log] == [18, 36, 40]
    assert differences(tmp_path / "right", tmp_path / "ours", last_step=40) == []
    rates = {
        log["step"]: log["learning_rate"]
        for log in again.state.log_history
        if "learning_rate" in log
    }
    assert rates[40] < rates[35]  # what was compared does depend on the evaluation


def test_a_stop_in_mid_epoch_is_followed_by_no_evaluation(tmp_path):
    args = {**BY_EPOCH, "save_strategy": "epoch", "max_steps": 20}
    train_here(tmp_path / "right", args=args)
    ours = train_here(
        tmp_path / "ours",
        args=args,
        callbacks=[TerminateAt(12)],
        ckptfmt={"stop_on": [signal.SIGTERM]},
    )
    assert committed_steps(tmp_path / "ours") == [(12, 1)]
    assert ours.state.best_global_step is None
    train_here(tmp_path / "ours", args=args, resume=True)
    assert differences(tmp_path / "right", tmp_path / "ours", last_step=20) == []


def test_an_export_is_no_checkpoint_to_resume_from(tmp_path):
    train_here(tmp_path, stop_at=6, ckptfmt={"export_hf": True})
    with pytest.raises(ValueError, match=r"checkpoint-5 is an export without optimizer"):
        train_here(tmp_path, resume=True, ckptfmt={"run": tmp_path / "other"})


def test_what_a_callback_leaves_on_the_state_isnt_saved(tmp_path):
    class Leaves(TrainerCallback):
        def on_train_begin(self, _args, state, _control, **_objects):
            state.note = 1

    train_here(tmp_path, stop_at=6, callbacks=[Leaves()], ckptfmt={"export_hf": True})
    assert train_here(tmp_path, stop_at=7, resume=True).state.global_step == 7


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_is_none_deletes_nothing(tmp_path, limit):
    train_here(tmp_path, stop_at=11, args={"save_total_limit": limit})
    assert committed_steps(tmp_path) == [(5, 1), (10, 1)]


class CannotExport(Watched):
    """Has no room for exports."""

    def _save(self, *_args, **_kwargs):
        raise OSError("no room")


def test_an_export_that_fails_is_raised(tmp_path):
    with pytest.raises(OSError, match="no room"):
        train_here(tmp_path, kind=CannotExport, stop_at=6, ckptfmt={"export_hf": True})
    assert committed_steps(tmp_path) == [(5, 1)]


class Scaled(Watched):
    """Scales the loss, as mixed precision with float16 does; not for the CPU, says accelerate, but torch can."""

    def _prepare_for_training(self, *args, **kwargs):
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        return super()._prepare_for_training(*args, **kwargs)


def test_gradient_scaler_and_epochs(tmp_path):
    """A scaler, an epoch whose last step is short, saves at the ends of epochs."""
    args = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "save_strategy": "epoch",
        "per_device_train_batch_size": 5,
    }
    right = train_here(tmp_path / "right", kind=Scaled, args=args)
    assert right.state.global_step == 16
    train_here(tmp_path / "ours", kind=Scaled, args=args, stop_at=11)
    ours = train_here(tmp_path / "ours", kind=Scaled, args=args, resume=True)
    assert committed_steps(tmp_path / "ours")[0] == (8, 1)
    assert differences(tmp_path / "right", tmp_path / "ours", last_step=16) == []
    assert ours.accelerator.scaler.state_dict() == right.accelerator.scaler.state_dict()
    assert ours.accelerator.scaler.get_scale() > 8.0


class Jittered:
    """A collator that draws from the global stream."""

    def __call__(self, samples):
        ids = torch.stack([sample["input_ids"] for sample in samples])
        ids = torch.where(torch.rand(ids.shape) < 0.3, 1, ids)
        return {"input_ids": ids, "labels": ids}


def test_a_collator_that_draws_isnt_bit_for_bit(tmp_path, may_be_refuted):
    """Nor is it with transformers alone, which fetches the first batches before it puts the streams back."""
    may_be_refuted.add(tmp_path / "Watched/ours/out/ckptfmt")
    for kind in (Watched, OfTransformers):
        here = tmp_path / kind.__name__
        for name, stop_at, resume in (("right", 8, None), ("ours", 6, None), ("ours", 8, True)):
            train_here(
                here / name, kind=kind, data_collator=Jittered(), stop_at=stop_at, resume=resume
            )
        lines = differences(here / "right", here / "ours", last_step=8)
        assert any("step 6 differs in" in line and "samples" in line for line in lines)


def test_another_model_is_refused_by_name(tmp_path):
    train_here(tmp_path, stop_at=6)
    with pytest.raises(CkptError, match=r"transformer\.h\.0\.attn\.c_attn\.weight"):
        train_here(tmp_path, resume=True, model=make_model(n_embd=32))
    changed = train_here(tmp_path, stop_at=7, resume=True, model=make_model(embd_pdrop=0.5))
    assert changed.checkpointer.load_report.claim == "S0"
    assert any("embd_pdrop" in reason for reason in changed.checkpointer.load_report.lowered_by)


def test_the_model_alone(tmp_path):
    args = {"save_only_model": True}
    train_here(tmp_path, stop_at=6, args=args)
    with ckptfmt.open(tmp_path / "out/ckptfmt") as checkpoint:
        assert {name for field, name, _ in checkpoint.leaves if field == "optimizer"} == {
            "extra/trainer"
        }
        assert not checkpoint.streams
    ours = train_here(tmp_path, stop_at=7, resume=True, args=args)
    assert ours.state.global_step == 7
    with pytest.raises(CkptError, match="extra:scheduler: nothing was saved"):
        train_here(tmp_path, stop_at=8, resume=True)


def test_others_read_what_it_wrote(tmp_path):
    ours = train_here(tmp_path, stop_at=5)
    path = tmp_path / "out/ckptfmt/step-00000005-l0001"
    (weights,) = path.glob("weights-*.safetensors")
    opened, loaded = make_model(), make_model()
    load_model(opened, weights)
    assert (
        ckptfmt_main(["convert", str(path), str(tmp_path / "weights.pt"), "--only", "weights"]) == 0
    )
    loaded.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert (
        digest(opened.state_dict())
        == digest(loaded.state_dict())
        == digest(ours.model.state_dict())
    )


class Seen(TrainerCallback):
    """Looks at what `on_save` finds."""

    def __init__(self):
        self.found = []

    def on_save(self, args, state, _control, **_objects):
        path = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.found.append(
            path.is_dir() and AutoModelForCausalLM.from_pretrained(path).num_parameters() > 0
        )


def test_callbacks_find_exports_of_an_inline_saver(tmp_path):
    seen, early = Seen(), EarlyStoppingCallback(early_stopping_patience=3)
    told = {"callbacks": [seen, early], "ckptfmt": {"saver": "inline", "export_hf": True}}
    ours = train_here(tmp_path, stop_at=11, args=FULL["args"], **told)
    assert seen.found == [True, True]
    assert ours.checkpointer.reports == ()
    saved = json.loads((tmp_path / "out/checkpoint-10/trainer_state.json").read_text())[
        "stateful_callbacks"
    ]
    assert saved["EarlyStoppingCallback"]["args"]["early_stopping_patience"] == 3
    assert set(saved) == {"EarlyStoppingCallback", "TrainerControl"}


class Pairs(Dataset[dict[str, torch.Tensor]]):
    """What goes in, and what shall come out."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {**Tokens()[index], "attention_mask": torch.ones(12, dtype=torch.long)}


class Seq2Seq(Watched, Seq2SeqTrainer):
    """Beside another Trainer."""


def test_seq2seq_trainer(tmp_path):
    def make():
        torch.manual_seed(0)
        sizes = {
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
        }
        sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32}
        return BartForConditionalGeneration(BartConfig(vocab_size=64, d_model=16, **sizes))

    def told() -> dict[str, Any]:
        args = {"predict_with_generate": True, "generation_max_length": 4}
        datasets = {
            "train_dataset": Pairs(),
            "eval_dataset": torch.utils.data.Subset(Pairs(), range(4)),
        }
        return {
            "kind": Seq2Seq,
            "model": make(),
            "args": {**FULL["args"], **args},
            "args_type": Seq2SeqTrainingArguments,
        } | datasets

    train_here(tmp_path / "right", stop_at=12, **told())
    train_here(tmp_path / "ours", stop_at=8, **told())
    ours = train_here(tmp_path / "ours", stop_at=12, resume=True, **told())
    assert differences(tmp_path / "right", tmp_path / "ours", last_step=12) == []
    assert ours.checkpointer.load_report.claim == "T1"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"enable_jit_checkpoint": True}, r"Stop\(signals="),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"push_to_hub": True}, "hub_strategy='end'"),
    ],
)
def test_what_cant_be_done_is_refused(tmp_path, monkeypatch, args, sentence):
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda _self: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(NotImplementedError, match=sentence):
        make_trainer(tmp_path, args=args)
    signal.signal(signal.SIGTERM, before)
    assert issubclass(Watched, CkptfmtTrainer)

"""What a newcomer gets wrong, and what comes back: each case is what is typed, and the words of the answer."""

from __future__ import annotations

import ast
import errno
import re
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.torch
import torch

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.errors import CkptError, Code, NotFoundError, remedy_of
from ckptfmt.store.memory import MemoryStore
from ckptfmt_tools.convert.converting import _store_error
from tests.house.sources import ROOT
from tests.interface.test_group import run_writers
from tests.stores.faults import Fault, FaultStore


def told(call: Any, *args: Any, **kwargs: Any) -> str:
    """Return the whole text of the error that a call raises."""
    with pytest.raises(CkptError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


class Net(torch.nn.Module):
    """Two layers of one shape under a name, and a head."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
        self.head = torch.nn.Linear(4, 2)


def trained(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that has made a step."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


# --- a State is wanted ----------------------------------------------------------------------------


@pytest.mark.parametrize("given", [torch.nn.Linear(2, 2), {"model": torch.zeros(2)}, {}])
def test_what_is_no_state_is_named_with_what_to_write(given: Any, tmp_path: Path) -> None:
    """`save("x", model, step=1)`, and the same to whatever takes a State: before anything is written or trained."""
    saved = tmp_path / "saved"
    ckptfmt.save(saved, ckptfmt.State(data=1), step=1)
    calls = {
        "save": lambda: ckptfmt.save(tmp_path / "x", given, step=1),
        "load": lambda: ckptfmt.load(saved, given),
        "Checkpointer": lambda: ckptfmt.Checkpointer(tmp_path / "run", given),
        "restore": lambda: ckptfmt.Checkpointer(tmp_path / "run", saver="inline").restore(given),
        "Saver": lambda: ckptfmt.PathSaver(saver="thread").save(tmp_path / "y", given, step=1),
    }
    for name, call in calls.items():
        text = told(call)
        assert f"a {type(given).__name__} where a ckptfmt.State is wanted" in text, name
        assert "ckptfmt.State(weights=model, optimizer=optimizer, data=sampler)" in text, name
    assert not (tmp_path / "x").exists()


def test_path_and_state_in_the_wrong_order() -> None:
    """`save(state, "x", step=1)`, and the same of `load` and `open`."""
    state, path = cast("Any", ckptfmt.State(data=1)), cast("Any", "x")
    calls: Any = (
        lambda: ckptfmt.save(state, path, step=1),
        lambda: ckptfmt.load(state, path),
        lambda: ckptfmt.open(state),
    )
    for call in calls:
        text = told(call)
        assert "is wanted. Remedy: Give the path first, then the State." in text
        assert (
            "a str where a ckptfmt.State" in text
            or "a State where a path, a URL or a store" in text
        )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("model", "Write State(weights=model)."),
        ("optim", "Write State(optimizer=optim)."),
        ("dataloader", "Write State(data=dataloader)."),
        ("args", "Write State(config=args)."),
        ("scheduler", "Write State(extra={'scheduler': scheduler})."),
        ("weigths", "Write State(weights=weigths)."),
        ("best_loss", "Give the object as extra={'best_loss': ...}."),
    ],
)
def test_an_object_under_another_name_is_told_its_field(name: str, remedy: str) -> None:
    """`State(model=model)` raised a TypeError without a word of `weights`."""
    text = told(ckptfmt.State, **{name: 1})
    assert f"ARGUMENT at State({name}=...): State has no field {name!r}" in text
    assert remedy in text


def test_an_empty_path_is_shown(tmp_path: Path, capsys: Any) -> None:
    """A path from a variable that isn't set; the remedy was to read the documentation."""
    calls: Any = (
        lambda: ckptfmt.save("", ckptfmt.State(data=1), step=1),
        lambda: ckptfmt.load(""),
        lambda: ckptfmt.Checkpointer("", ckptfmt.State(data=1)),
        lambda: ckptfmt.Run(""),
    )
    for call in calls:
        text = told(call)
        assert "ARGUMENT at path: the path is '', an empty text" in text
        assert "Give the path of a directory or file, or a URL" in text
    for typed in (
        ["validate", ""],
        ["convert", "", str(tmp_path / "x")],
        ["convert", str(tmp_path), ""],
    ):
        assert main(typed) == 2
        text = capsys.readouterr().err
        assert "an empty text" in text, typed
        assert "Give the path" in text, typed


# --- a position in the data is wanted -------------------------------------------------------------


@pytest.mark.parametrize("part", ["iterator", "sampler", "batch sampler", "dataset"])
def test_a_part_of_a_dataloader_names_the_loader(part: Any, tmp_path: Path) -> None:
    """`State(data=loader.sampler)`, and what else belongs to a loader."""
    dataset = torch.utils.data.TensorDataset(torch.zeros(8))
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True)
    parts = {
        "iterator": iter(loader),
        "sampler": loader.sampler,
        "batch sampler": loader.batch_sampler,
        "dataset": dataset,
    }
    text = told(ckptfmt.save, tmp_path / "x", ckptfmt.State(data=parts[part]), step=1)
    assert (
        f"STATE_UNSUPPORTED at data: a {type(parts[part]).__name__} doesn't say where it stands"
        in text
    )
    assert "State(data=loader)" in text
    ckptfmt.save(tmp_path / "x", ckptfmt.State(data=loader), step=1)


def test_a_loop_with_a_checkpointer_needs_no_advance(tmp_path: Path) -> None:
    """The docstring of `Sampler` says who moves the cursor; a `Checkpointer` does."""
    assert "don't call `advance` then" in " ".join((ckptfmt.Sampler.__doc__ or "").split())
    sampler = ckptfmt.Sampler(10, global_batch=2)
    with ckptfmt.Checkpointer(
        tmp_path / "run", ckptfmt.State(data=sampler), saver="inline"
    ) as checkpointer:
        batches = iter(sampler)
        for _ in checkpointer.steps(3):
            next(batches)
    assert sampler.steps_done == 3


# --- names ----------------------------------------------------------------------------------------


def test_a_renamed_layer_is_found_under_its_old_name(tmp_path: Path) -> None:
    """`load` after `self.backbone` became `self.encoder`: the remedy is the call that works."""
    old, new = Net("backbone"), Net("encoder")
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights=old, optimizer=trained(old)), step=1)
    state = ckptfmt.State(weights=new, optimizer=torch.optim.AdamW(new.parameters()))
    for allow in ((), ("missing",), ("unexpected",)):
        text = told(ckptfmt.load, tmp_path / "x", state, allow=allow)
        assert ("UNEXPECTED at" if "missing" in allow else "TENSOR_MISSING at") in text
        assert "pass rename={'encoder': 'backbone'} to ckptfmt.load" in text
    assert "which leaves the live tensor as it was made" in told(
        ckptfmt.load, tmp_path / "x", state
    )
    ckptfmt.load(tmp_path / "x", state, rename={"encoder": "backbone"})
    assert torch.equal(
        new.get_parameter("encoder.1.weight"), old.get_parameter("backbone.1.weight")
    )


def test_both_allowed_a_rename_is_still_offered(tmp_path: Path) -> None:
    """`allow=("missing", "unexpected")` leaves random weights: the report says which names may belong together."""
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights=Net("backbone")), step=1)
    report: Any = ckptfmt.load(
        tmp_path / "x", ckptfmt.State(weights=Net("encoder")), allow=("missing", "unexpected")
    )
    assert any("rename={'encoder': 'backbone'}" in reason for reason in report.lowered_by)


def test_names_that_cannot_be_matched_are_listed(tmp_path: Path) -> None:
    """Two tensors of one shape became others: which is which, only the author knows."""
    ckptfmt.save(
        tmp_path / "x", ckptfmt.State(weights={"a": torch.zeros(3), "b": torch.zeros(3)}), step=1
    )
    text = told(
        ckptfmt.load,
        tmp_path / "x",
        ckptfmt.State(weights={"c": torch.zeros(3), "d": torch.zeros(3)}),
    )
    assert "nothing here takes weights:a, weights:b" in text
    assert "the argument rename= maps live names to saved ones" in text
    assert "rename={" not in text  # code or prose, not both
    assert "InitFrom" not in text


def test_a_model_inside_of_another_is_found_without_its_prefix(tmp_path: Path) -> None:
    """`State(weights={"model": model})`, saved from `State(weights=model)`."""
    model = torch.nn.Linear(3, 2)
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights=model), step=1)
    inner = torch.nn.Linear(3, 2)
    state = ckptfmt.State(weights={"model": inner})
    found = re.search(r"rename=(\{[^}]*\})", told(ckptfmt.load, tmp_path / "x", state))
    assert found is not None
    ckptfmt.load(tmp_path / "x", state, rename=ast.literal_eval(found[1]))
    assert torch.equal(inner.weight, model.weight)


def test_nothing_of_that_shape_was_saved_offers_no_rename(tmp_path: Path) -> None:
    """A new layer is no renamed one."""
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights={"a": torch.zeros(3)}), step=1)
    text = told(
        ckptfmt.load,
        tmp_path / "x",
        ckptfmt.State(weights={"a": torch.zeros(3), "b": torch.zeros(5)}),
    )
    assert "rename" not in text


def test_all_that_does_not_fit_is_in_one_message(tmp_path: Path) -> None:
    """A layer that is missing, one of another width and a value that wasn't saved: each code, each place, bounded."""
    saved = torch.nn.ParameterDict({"a": torch.zeros(3)})
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights=saved), step=1)
    live = torch.nn.ParameterDict(
        {"a": torch.zeros(4), **{f"b{number:02}": torch.zeros(5) for number in range(12)}}
    )
    text = told(ckptfmt.load, tmp_path / "x", ckptfmt.State(weights=live, extra={"count": 1}))
    assert "SHAPE_MISMATCH at weights:a: saved with shape (3,), here (4,)" in text
    assert "TENSOR_MISSING at weights:b00: not saved" in text
    assert "weights:b09" in text
    assert "weights:b10" not in text
    assert "; and 2 more" in text
    assert "LEAF_MISSING at extra:count" in text


@pytest.mark.parametrize(
    ("saved", "here", "remedy"),
    [
        (None, None, "No configuration was saved: State(config={...}) is compared by a load"),
        (
            {"width": 64},
            {"width": 128},
            "Build the model as it was saved: config:width was 64, and is 128 here.",
        ),
        ({"width": 64}, None, "/x --field config` shows its configuration"),
    ],
)
def test_another_width_is_told_with_what_decides_it(
    saved: Any, here: Any, remedy: str, tmp_path: Path
) -> None:
    """`nn.Linear(8, 128)` after `nn.Linear(8, 64)`."""
    ckptfmt.save(
        tmp_path / "x", ckptfmt.State(weights=torch.nn.Linear(8, 64), config=saved), step=1
    )
    text = told(
        ckptfmt.load, tmp_path / "x", ckptfmt.State(weights=torch.nn.Linear(8, 128), config=here)
    )
    assert "weights:weight: saved with shape (64, 8), here (128, 8)" in text
    assert remedy in text


def test_the_traceback_of_a_mistake_is_short(tmp_path: Path) -> None:
    """The caller's line, and few of ckptfmt's; no second error below, unless an object of the caller raised it."""
    state, other = (ckptfmt.State(weights={"a": torch.zeros(number)}) for number in (3, 4))
    ckptfmt.save(tmp_path / "x", state, step=1)

    def train(given: ckptfmt.State, **options: Any) -> None:
        with ckptfmt.Checkpointer(
            tmp_path / "run", given, saver="inline", **options
        ) as checkpointer:
            checkpointer.save(step=checkpointer.step + 1)

    train(state)
    calls = {
        "load of another shape": lambda: ckptfmt.load(tmp_path / "x", other),
        "load from nowhere": lambda: ckptfmt.load(tmp_path / "y"),
        "save over": lambda: ckptfmt.save(tmp_path / "x", state, step=1),
        "save of an object": lambda: ckptfmt.save(
            tmp_path / "y", ckptfmt.State(data=object()), step=1
        ),
        "save of no step": lambda: ckptfmt.save(tmp_path / "y", state, step=-1),
        "Checkpointer's every": lambda: train(state, every="5 lightyears"),
        "Checkpointer's keep": lambda: train(state, keep=0),
        "resume of another shape": lambda: train(other),
        "resume from nowhere": lambda: train(state, resume="step-00000009-l0001"),
        "RNG streams": lambda: train(state),
        "deletion": lambda: ckptfmt.Run(tmp_path / "run").delete(1),
    }
    for name, call in calls.items():
        with pytest.raises(CkptError) as caught:
            call()
        error = caught.value
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__
        ]
        assert len(frames) <= 8, name
        assert error.__cause__ is None, name
        assert error.__suppress_context__ or error.__context__ is None, name


def test_a_run_begins_from_nowhere_with_the_words_of_a_load(tmp_path: Path) -> None:
    """`Checkpointer(..., init_from="importd")`, and `init_from=` a directory of another format."""
    (tmp_path / "imported").mkdir()
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "imported" / "model.safetensors")
    state = ckptfmt.State(weights={"w": torch.zeros(3)})
    for name, words in (("importd", "Did you mean"), ("imported", "imported --to ckptfmt")):
        path = str(tmp_path / name)
        run = ckptfmt.Checkpointer(tmp_path / "run", state, init_from=path, saver="inline")
        text = told(run.restore)
        assert text == told(ckptfmt.load, path, state)
        assert words in text


class Classifier(torch.nn.Module):
    """A body, and a head under a name, for a number of classes."""

    def __init__(self, classes: int, head: str = "head") -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.add_module(head, torch.nn.Linear(4, classes))


@pytest.mark.parametrize("head", ["head", "classifier"])
def test_a_new_head_is_told_how_to_take_the_rest(head: str, tmp_path: Path) -> None:
    """`init_from="old"` with 7 classes where 10 were saved: what the remedy says does it."""
    old = Classifier(10)
    ckptfmt.save(tmp_path / "old", ckptfmt.State(weights=old, config={"classes": 10}), step=1)
    live = Classifier(7, head)
    kept = live.get_parameter(f"{head}.weight").detach().clone()
    state = ckptfmt.State(weights=live, config={"classes": 7})
    run = ckptfmt.Checkpointer(tmp_path / "run", state, init_from=tmp_path / "old", saver="inline")
    text = told(run.restore)
    found = re.search(r"init_from=(InitFrom\(.*?\))\)", text)
    assert found is not None, text
    assert found[1] == f"InitFrom({str(tmp_path / 'old')!r}, only=['weights:body'])"
    init = eval(found[1], {"InitFrom": ckptfmt.InitFrom})
    with ckptfmt.Checkpointer(tmp_path / "run", state, init_from=init, saver="inline"):
        pass
    assert torch.equal(live.get_parameter("body.0.weight"), old.get_parameter("body.0.weight"))
    assert torch.equal(live.get_parameter(f"{head}.weight"), kept)


def test_another_width_is_no_new_head(tmp_path: Path) -> None:
    """A bias that fits by chance in a layer that doesn't: nothing of it is offered."""
    old, new = (
        torch.nn.Sequential(torch.nn.Linear(8, n), torch.nn.Linear(n, 1)) for n in (64, 128)
    )
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights=old), step=1)
    assert "only=" not in told(ckptfmt.load, tmp_path / "x", ckptfmt.State(weights=new))


def test_what_only_chooses_and_the_state_lacks_is_refused(tmp_path: Path) -> None:
    """`load(path, State(weights=model), only="extra:ema")` loaded nothing and returned a report."""
    model = torch.nn.Linear(2, 2)
    ema = torch.optim.swa_utils.AveragedModel(model)
    saved = ckptfmt.State(
        weights=model, optimizer=trained(model), config={"width": 2}, extra={"ema": ema}
    )
    ckptfmt.save(tmp_path / "x", saved, step=1)
    live = ckptfmt.State(weights=torch.nn.Linear(2, 2), rng=False)
    for only, remedy in (
        ("extra:ema", "extra={'ema': ...}"),
        ("optimizer:*", "optimizer=..."),
        ("rng:*", "Leave State(rng=False) out"),
        (["weights:*", "extra:ema"], "extra={'ema': ...}"),
    ):
        text = told(ckptfmt.load, tmp_path / "x", live, only=only)
        name = only if isinstance(only, str) else only[1]
        assert (
            f"ARGUMENT at only={name!r}: saved, and no part of the State takes it. Remedy: " in text
        )
        assert remedy in text
    report: Any = ckptfmt.load(
        tmp_path / "x", live, only=["weights:*", "extra:ema"], allow="unexpected"
    )
    assert any("only='extra:ema'" in reason for reason in report.lowered_by)
    assert "only='extra:ema'" in told(
        ckptfmt.load, tmp_path / "x", live, only="extra:ema", allow="unexpected"
    )
    report = ckptfmt.load(tmp_path / "x", live, only=["weights:*", "config:*", "provenance:*"])
    assert report.left_count == 0


@pytest.mark.parametrize("averaged", ["AveragedModel", "dict"])
def test_averaged_weights_go_into_a_plain_model(averaged: str, tmp_path: Path) -> None:
    """One call, which the refusal of `only="extra:ema"` names; and the same to begin a run from them."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    ema = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, _: (old + new) / 2)
    ema.update_parameters(model)
    trained(model)
    ema.update_parameters(model)
    given = ema if averaged == "AveragedModel" else dict(ema.module.state_dict())
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights=model, extra={"ema": given}), step=1)
    live = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = ckptfmt.State(weights=live)
    found = re.search(
        r"with only=('[^']*'), rename=(\{.*?\})",
        told(ckptfmt.load, tmp_path / "x", state, only="extra:ema"),
    )
    assert found is not None
    only, rename = ast.literal_eval(found[1]), ast.literal_eval(found[2])
    report: Any = ckptfmt.load(tmp_path / "x", state, only=only, rename=rename)
    expected = ema.module.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in live.state_dict().items())
    assert ("weights:0.bias", f"{rename['']}0.bias") in report.renamed
    other = ckptfmt.State(weights=torch.nn.Sequential(torch.nn.Linear(2, 3)))
    text = told(ckptfmt.load, tmp_path / "x", other, only=only, rename=rename)
    assert "SHAPE_MISMATCH at weights:0.weight: saved with shape (2, 2), here (3, 2)" in text
    begun = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(begun.parameters())
    init = ckptfmt.InitFrom(tmp_path / "x", only=only, rename=rename)
    state = ckptfmt.State(weights=begun, optimizer=optimizer)
    with ckptfmt.Checkpointer(
        tmp_path / "run", state, init_from=init, saver="inline"
    ) as checkpointer:
        assert checkpointer.step == 0
    assert all(torch.equal(tensor, expected[name]) for name, tensor in begun.state_dict().items())


def test_learning_rates_set_by_hand_are_told_in_one_line(tmp_path: Path, caplog: Any) -> None:
    """nanoGPT sets `group["lr"]` of each group at each step: one line at a resume, whatever the number of groups."""

    def state_at(lr: float) -> ckptfmt.State:
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))
        groups = [
            {"params": [*layer.parameters()], "lr": lr * 2**-at} for at, layer in enumerate(model)
        ]
        return ckptfmt.State(weights=model, optimizer=torch.optim.AdamW(groups))

    with ckptfmt.Checkpointer(tmp_path / "run", state_at(0.5), saver="inline") as checkpointer:
        checkpointer.save(step=1)
    with (
        caplog.at_level("INFO", logger="ckptfmt"),
        ckptfmt.Checkpointer(tmp_path / "run", state_at(0.25), saver="inline"),
    ):
        pass
    lines = [message for message in caplog.messages if message.startswith("changed by the load")]
    assert len(lines) == 1
    assert "lr: 0.25 here, 0.5 as saved (optimizer:group/0.weight); " in lines[0]
    assert "; and 3 more values; the saved value is taken" in lines[0]


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 2), (1, 4)])
def test_another_number_of_processes_is_one_fact(
    saving: int, loading: int, tmp_path: Path, caplog: Any
) -> None:
    """Not `worker_count: ...; logical_workers: ...; world_size: ...; streams of ...`, and a line for each stream."""

    def train(worker: int, total: int) -> Any:
        sampler = ckptfmt.Sampler(40, global_batch=4, worker=(worker, total))
        state = ckptfmt.State(
            weights={"w": torch.zeros(2)}, optimizer={"step": 0}, data=sampler, config={"a": 1}
        )
        options: dict[str, Any] = (
            {"writer": (worker, total), "agree": f"of-{total}"} if total > 1 else {}
        )
        with ckptfmt.Checkpointer(
            tmp_path / "run", state, every=1, saver="inline", **options
        ) as checkpointer:
            batches = iter(sampler)
            for _ in checkpointer.steps(checkpointer.step + 1):
                next(batches)
        return checkpointer.load_report

    def launch(total: int) -> list[Any]:
        return run_writers(total, lambda worker: train(worker, total))

    launch(saving)
    with caplog.at_level("INFO", logger="ckptfmt"):
        reports = launch(loading)
    for report in reports:
        counts, *others = report.lowered_by
        assert counts == f"processes: saved {saving}, here {loading}"
        assert len(others) == 1
        code, scopes = (
            ("MISSING", "lw/1" if loading == 2 else "lw/1 to lw/3")
            if loading > saving
            else ("UNEXPECTED", "lw/1")
        )
        assert others[0].startswith(f"STREAM_{code} at rng ({scopes}): ")
        assert others[0].endswith(": numpy, python, torch.cpu")
    (line,) = (message for message in caplog.messages if "goes on from" in message)
    assert len(line) < 400 + len(str(tmp_path))


# --- places ---------------------------------------------------------------------------------------


def test_a_place_is_printed_once(tmp_path: Path) -> None:
    """Not `at weights:a: weights:a: not saved; ...`."""
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights=torch.nn.Linear(7, 7)), step=1)
    text = told(ckptfmt.load, tmp_path / "x", ckptfmt.State(weights=Net("net")))
    assert text.startswith(
        "TENSOR_MISSING at weights:net.0.weight: not saved (shape here (4, 4));"
        " weights:net.0.bias: "
    )
    assert text.count("weights:net.0.weight") == 1
    (tmp_path / "file").write_bytes(b"")
    path = str(tmp_path / "file" / "below")
    assert told(ckptfmt.save, path, ckptfmt.State(data=1), step=1).count(path) == 1


def test_a_whole_field_is_named_without_a_colon(tmp_path: Path) -> None:
    """Not `at data:: ...`."""
    assert "STATE_UNSUPPORTED at data: a value" in told(
        ckptfmt.save, tmp_path / "x", ckptfmt.State(data=object()), step=1
    )


def test_values_of_extra_are_called_as_they_were_given(tmp_path: Path) -> None:
    """`State(extra={"scheduler": ...})` is `extra:scheduler`, in errors and in what `only` and `override` take."""
    text = told(ckptfmt.save, tmp_path / "x", ckptfmt.State(extra={"scheduler": object()}), step=1)
    assert "STATE_UNSUPPORTED at extra:scheduler: a value" in text
    ckptfmt.save(tmp_path / "x", ckptfmt.State(extra={"count": 3, "other": 4}), step=1)
    assert "LEAF_MISSING at extra:counter" in told(
        ckptfmt.load, tmp_path / "x", ckptfmt.State(extra={"counter": 1})
    )
    assert ckptfmt.load(tmp_path / "x", only="extra:count") == {"optimizer": {"extra/count": 3}}
    for name in ("extra:cuont", "optimizer:extra/cuont"):
        assert "nothing of this name was saved" in told(ckptfmt.load, tmp_path / "x", only=name)


# --- another optimizer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "has"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "momentum"),
        (torch.optim.RMSprop, {"lr": 0.1}, "alpha"),
        (torch.optim.Adagrad, {"lr": 0.1}, "lr_decay"),
    ],
)
def test_state_of_another_optimizer_is_refused_whatever_is_allowed(
    kind: Any, options: Any, has: str, tmp_path: Path
) -> None:
    """AdamW's state into SGD: both are named, and SGD doesn't get Adam's options."""
    model = torch.nn.Linear(3, 2)
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights=model, optimizer=trained(model)), step=1)
    optimizer = kind(model.parameters(), **options)
    state, before = (
        ckptfmt.State(weights=model, optimizer=optimizer),
        dict(optimizer.param_groups[0]),
    )
    for allow in ((), ("missing", "unexpected")):
        text = told(ckptfmt.load, tmp_path / "x", state, allow=allow)
        assert re.search(
            (
                r"saved by another kind of optimizer: that one has .*betas.*; the one here has"
                rf" .*{has}"
            ),
            text,
        )
        assert "only='weights:*'" in text
    assert optimizer.param_groups[0].keys() == before.keys()
    ckptfmt.load(tmp_path / "x", state, only="weights:*")


def test_an_option_of_the_users_own_is_no_other_optimizer(tmp_path: Path) -> None:
    """Groups may have more keys than their optimizer's class knows, and other ones than before."""
    model = torch.nn.Linear(3, 2)
    optimizer = trained(model)
    optimizer.param_groups[0]["layer"] = 1
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights=model, optimizer=optimizer), step=1)
    other = torch.optim.AdamW([{"params": list(model.parameters()), "depth": 2}])
    state = ckptfmt.State(weights=model, optimizer=other)
    assert "LEAF_MISSING" in told(ckptfmt.load, tmp_path / "x", state)
    ckptfmt.load(tmp_path / "x", state, allow=("missing",))


# --- files of others ------------------------------------------------------------------------------


def test_what_another_format_wrote_names_the_conversion(tmp_path: Path) -> None:
    """`load("model.pt")`, a safetensors file, a Hugging Face directory, one of torch.distributed.checkpoint."""
    state = {"w": torch.ones(3)}
    torch.save(state, tmp_path / "model.pt")
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(state, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"")
    for name in ("model.pt", "hf/model.safetensors", "hf", "dcp"):
        path = str(tmp_path / name)
        said = f"python -m ckptfmt convert {path} imported --to ckptfmt"
        assert said in told(ckptfmt.load, path)
        assert said in told(ckptfmt.load, path, ckptfmt.State(weights=state))
        assert said in told(ckptfmt.open, path)


@pytest.mark.parametrize(
    ("entries", "options", "said"),
    [
        ({"step": 1200}, [], "It is of step 1200, as 'step' says."),
        ({"global_step": 7}, [], "It is of step 7, as 'global_step' says."),
        ({"step": 1200}, ["--step", "5"], "It is of step 5."),
        (
            {"step": "many"},
            [],
            "It is of step 0: the source doesn't say how many training steps were done; --step N",
        ),
        ({}, [], "It is of step 0: the source"),
    ],
)
def test_a_step_beside_the_weights_of_a_file_is_taken(
    entries: dict[str, Any], options: list[str], said: str, tmp_path: Path, capsys: Any
) -> None:
    """`torch.save({"model": ..., "step": 1200})`, then `convert` without `--step`."""
    torch.save({"model": {"w": torch.ones(3)}, **entries}, tmp_path / "model.pt")
    assert main(["convert", str(tmp_path / "model.pt"), str(tmp_path / "imported"), *options]) == 0
    assert said in capsys.readouterr().out
    with ckptfmt.open(tmp_path / "imported") as checkpoint:
        assert f"It is of step {checkpoint.step}" in said


def test_a_run_in_the_place_of_a_file_asks_for_another_path(tmp_path: Path) -> None:
    """`Checkpointer("model.pt", state)` is no import."""
    torch.save({}, tmp_path / "model.pt")
    text = told(ckptfmt.Checkpointer, tmp_path / "model.pt", ckptfmt.State(data=1))
    assert "this is a file" in text
    assert "Give a directory" in text


def test_a_path_where_nothing_is_names_the_nearest(tmp_path: Path) -> None:
    """`load("nowhere")`, and a name with a typo: an error of its own, which a loop may take for a first start."""
    ckptfmt.save(tmp_path / "runs" / "first", ckptfmt.State(data=1), step=1)
    for call in (ckptfmt.load, ckptfmt.open):
        with pytest.raises(NotFoundError, match=rf"Did you mean {tmp_path}/runs/first\?"):
            call(tmp_path / "runs" / "frist")
        with pytest.raises(NotFoundError, match=rf"Did you mean {tmp_path}/runs\?"):
            call(tmp_path / "rusn" / "first")
        with pytest.raises(NotFoundError, match=f"{tmp_path} has nothing called nowhere"):
            call(tmp_path / "nowhere")
    with pytest.raises(NotFoundError):
        ckptfmt.load(tmp_path, ckptfmt.State(data=1))


def test_a_path_where_nothing_is_says_so(tmp_path: Path) -> None:
    """Not that a manifest isn't there."""
    assert "nothing is at this path" in told(ckptfmt.load, tmp_path / "typo")
    (tmp_path / "empty").mkdir()
    assert "has no manifest.json" in told(ckptfmt.load, tmp_path / "empty")


# --- other numbers of processes -------------------------------------------------------------------


def test_values_of_one_process_are_told_in_one_sentence() -> None:
    """From 2 to 3 processes: who has none of its own, whose it takes, and of what."""
    store = MemoryStore()

    def state(value: int) -> ckptfmt.State:
        return ckptfmt.State(
            weights={"w": np.zeros(2)},
            data=ckptfmt.PerWorker(value),
            extra={"a": ckptfmt.PerWorker({"n": value})},
        )

    def save(writer: int) -> object:
        return ckptfmt.save(store, state(writer), step=1, writer=(writer, 2), agree="save")

    def load(writer: int) -> Any:
        return ckptfmt.load(store, state(7), writer=(writer, 3), agree="load")

    assert not [found for found in run_writers(2, save) if isinstance(found, Exception)]
    reports = run_writers(3, load)
    found = [reason for reason in reports[2].lowered_by if "process 2 saved none" in reason]
    assert found == [
        "extra:a, data: process 2 saved none, as one of 2 processes, and takes process 0's"
    ]
    assert not any("scope" in reason for report in reports for reason in report.lowered_by)


# --- what was forgotten ---------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["nothing", "scheduler", "state_dict"])
def test_a_scheduler_that_is_in_no_state_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    """It was T1, and another trajectory."""

    def train(steps: int) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        sampler = ckptfmt.Sampler(64, global_batch=4, seed=0)
        options: dict[str, Any] = {"scheduler": {"extra": {"s": scheduler}}, "nothing": {}}
        kept: Any = options.get(given, {"extra": {"s": scheduler.state_dict()}})
        state = ckptfmt.State(weights=model, optimizer=optimizer, data=sampler, config={}, **kept)
        rows: Any = torch.randn(64, 4)
        rates = []
        with ckptfmt.Checkpointer(tmp_path, state, every=1, saver="inline") as checkpointer:
            batches = iter(torch.utils.data.DataLoader(rows, batch_sampler=sampler))
            if given == "state_dict" and checkpointer.step:
                scheduler.load_state_dict(kept["extra"]["s"])
            for _ in checkpointer.steps(steps):
                model(next(batches)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if given == "state_dict":
                    kept["extra"]["s"].update(scheduler.state_dict())
                rates.append(optimizer.param_groups[0]["lr"])
            return rates, checkpointer.load_report

    first, _ = train(2)
    assert any("SCHEDULER_NOT_SAVED" in line for line in caplog.messages) == (given == "nothing")
    rest, report = train(4)
    shutil.rmtree(tmp_path)
    undisturbed, _ = train(4)
    assert ([*first, *rest] == undisturbed) == (report.claim == "T1") == (given != "nothing")
    assert any("initial_lr" in reason for reason in report.lowered_by) == (given == "nothing")


# --- values of arguments --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "example"),
    [
        ({"every": 0}, "every=100 for each hundredth step, every='5min' or every='auto'"),
        ({"every": "10 steps"}, "every=100 for each hundredth step"),
        ({"every": "auto", "mtbf": "often"}, "such as every=Auto(mtbf='3h')"),
        ({"keep": 0}, "such as keep=3 for the newest three"),
        ({"keep": "3"}, "such as keep=3 for the newest three"),
        ({"keep": 1, "keep_every": 0}, "such as keep=Retention(newest=3, every=1000)"),
    ],
)
def test_a_value_that_cannot_be_names_one_that_can(
    given: dict[str, Any], example: str, tmp_path: Path
) -> None:
    """`Checkpointer(every=0)`, `every="10 steps"`, `keep=0`, `keep="3"`: the remedy is an example."""
    text = told(
        ckptfmt.Checkpointer, tmp_path / "run", ckptfmt.State(data=1), saver="inline", **given
    )
    where = "Retention(every=)" if "keep_every" in given else f"{[*given][-1]}="
    assert f"ARGUMENT at {where}:" in text
    assert example in text


def test_a_step_as_text_and_an_unknown_word_of_allow(tmp_path: Path) -> None:
    """`save(..., step="3")` and `load(..., allow=("shape",))`."""
    state = ckptfmt.State(data=1)
    assert "Pass a whole number of steps, from 0 on, such as 100." in told(
        ckptfmt.save, tmp_path / "x", state, step=cast("Any", "3")
    )
    ckptfmt.save(tmp_path / "x", state, step=3)
    text = told(ckptfmt.load, tmp_path / "x", state, allow=("shape",))
    assert "takes dtype, loader, missing, streams, unexpected, and not shape" in text
    assert "such as allow=('missing',)." in text


def test_a_second_save_to_a_path_is_told_of_replace(tmp_path: Path) -> None:
    """`save("x", ...)` twice: the remedy is what makes the second call work; in a run it is none."""
    state = ckptfmt.State(data=1)
    ckptfmt.save(tmp_path / "x", state, step=1)
    assert "save(..., replace=True) takes the place of the old one" in told(
        ckptfmt.save, tmp_path / "x", state, step=2
    )
    ckptfmt.save(tmp_path / "x", state, step=2, replace=True)
    with ckptfmt.Checkpointer(tmp_path / "run", state, saver="inline") as checkpointer:
        checkpointer.save(step=1)
    text = told(ckptfmt.save, next((tmp_path / "run").glob("step-*")), state, step=1)
    assert "CHECKPOINT_EXISTS" in text
    assert "replace" not in text


def test_a_model_without_its_name_in_a_state() -> None:
    """`State(model)`: the remedy says which part it may be. `InitFrom("imported")` needs no name."""
    text = told(cast("Any", ckptfmt.State), torch.nn.Linear(2, 2))
    assert "a Linear that isn't said to be weights" in text
    assert "State(weights=model, optimizer=optimizer, data=sampler)" in text
    assert ckptfmt.InitFrom("imported", only=None) == ckptfmt.InitFrom(path="imported", only=None)


def test_dir_lists_what_is_public() -> None:
    """`dir(ckptfmt)`, which completion in a shell shows too."""
    ckptfmt.State(data=1)
    assert [name for name in dir(ckptfmt) if not name.startswith("__")] == sorted(ckptfmt.__all__)


# --- what the answer leaves open ------------------------------------------------------------------


def test_a_document_of_a_checkpoint_leads_to_its_directory(tmp_path: Path) -> None:
    """`load("x/manifest.json")`: no word of torch."""
    ckptfmt.save(tmp_path / "x", ckptfmt.State(data=1), step=1)
    text = told(ckptfmt.load, tmp_path / "x" / "manifest.json")
    assert text.endswith(f"Give its directory, {tmp_path / 'x'}")


def test_a_report_says_that_there_is_more_to_read(tmp_path: Path) -> None:
    """`print(report)`, lowered by two: one is shown, and where the other is."""
    weights = {"a": torch.zeros(2)}
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights=weights, config={"a": 1, "b": 1}), step=1)
    report: Any = ckptfmt.load(
        tmp_path / "x", ckptfmt.State(weights=weights, config={"a": 2, "b": 2})
    )
    assert "; lowered by 2: config:a: saved 1, here 2; and 1 more in lowered_by)" in str(report)


def test_a_load_of_weights_alone_says_what_it_was_not_asked_for(tmp_path: Path) -> None:
    """`print(load("x", State(weights=model)))`: nothing is "lowered", since nothing differs."""
    state = ckptfmt.State(weights={"a": torch.zeros(2)}, data={"n": 1}, config={"a": 1})
    ckptfmt.save(tmp_path / "x", state, step=1)
    report: Any = ckptfmt.load(tmp_path / "x", ckptfmt.State(weights=state.weights))
    assert repr(report) == "LoadReport(step=1, claim='S0'; not in State: optimizer, data, config)"
    report = ckptfmt.load(
        tmp_path / "x", ckptfmt.State(weights=state.weights, data={"n": 2}), only="weights:*"
    )
    assert "left out by only=: 1 tensors and values" in repr(report)


def test_a_read_only_file_system_is_no_matter_of_owner_and_mode() -> None:
    """STORE_ACCESS of EROFS: to look at owner and mode leads nowhere."""
    assert "mounted for reading only" in (
        remedy_of(OSError(errno.EROFS, "Read-only file system")) or ""
    )
    assert remedy_of(OSError(errno.EACCES, "Permission denied")) is None
    assert "mounted for reading only" in str(
        _store_error(OSError(errno.EROFS, "Read-only file system", "x"), "x")
    )


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    """STORE_IO of EFBIG: to check the storage led nowhere."""
    program = """
import resource, numpy, ckptfmt
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
ckptfmt.save("c", ckptfmt.State(weights={"w": numpy.zeros(1 << 20, "u1")}), step=1)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "STORE_IO" in ended.stderr
    assert "`ulimit -f`" in ended.stderr


def test_a_target_without_suffix_is_a_checkpoint(tmp_path: Path) -> None:
    """`ckptfmt convert sd.pt imported`; from a checkpoint, the kind is still to be said."""
    torch.save({"weight": torch.ones(2)}, tmp_path / "sd.pt")
    assert main(["convert", str(tmp_path / "sd.pt"), str(tmp_path / "imported")]) == 0
    weights = {"weight": torch.zeros(2)}
    ckptfmt.load(tmp_path / "imported", ckptfmt.State(weights=weights))
    assert torch.equal(weights["weight"], torch.ones(2))
    assert main(["convert", str(tmp_path / "imported"), str(tmp_path / "other")]) == 2


# --- what a second newcomer met -------------------------------------------------------------------


def train(
    path: Path, *, steps: int, seed: int = 0, read: bool = True, **options: Any
) -> tuple[Any, list[Any]]:
    """Train with a sampler; return the Checkpointer and the batches that were taken."""
    sampler = ckptfmt.Sampler(40, global_batch=4, seed=seed, worker=(0, 1))
    state = ckptfmt.State(
        weights={"w": torch.zeros(2)}, optimizer={"step": 0}, data=sampler, config={}
    )
    batches: list[Any] = []
    with ckptfmt.Checkpointer(path, state, every=1, saver="inline", **options) as checkpointer:
        taken = iter(sampler)
        for _ in checkpointer.steps(steps):
            batches += [next(taken)] if read else []
    return checkpointer, batches


def test_a_sampler_that_nobody_reads_claims_no_t1(tmp_path: Path) -> None:
    """`State(data=sampler)` beside a loop over a DataLoader that doesn't have it."""
    saving, _ = train(tmp_path / "unread", steps=2, read=False)
    assert any(report.startswith("SAMPLER_UNREAD: no batch was taken") for report in saving.reports)
    resumed, _ = train(tmp_path / "unread", steps=3)
    assert resumed.load_report.claim == "S0"
    assert any(
        "the training didn't follow its order" in reason
        for reason in resumed.load_report.lowered_by
    )
    again, _ = train(tmp_path / "unread", steps=4)  # what was saved since then was read
    assert (again.load_report.claim, saving.load_report) == ("T1", None)
    saving, _ = train(tmp_path / "read", steps=2)
    assert saving.reports == ()
    assert train(tmp_path / "read", steps=3)[0].load_report.claim == "T1"


def test_a_sampler_that_is_asked_by_step_is_read() -> None:
    sampler = ckptfmt.Sampler(40, global_batch=4, worker=(0, 1))
    found = [sampler.is_unread]
    for act in (sampler.advance, lambda: sampler.indices(1)):
        act()
        found.append(sampler.is_unread)
    assert found == [False, True, False]


def test_data_begin_anew_under_another_seed(tmp_path: Path) -> None:
    """`Sampler(seed=1)` where the run has seed=0: the remedy of the error, and starts behind it."""
    train(tmp_path / "run", steps=3)
    text = told(train, tmp_path / "run", steps=5, seed=1)
    assert "the cursor's seed is 0, the sampler's 1" in text
    assert "override=['data:*'] for one start of a Checkpointer" in text
    _, anew = train(tmp_path / "run", steps=5, seed=1, override=["data:*"])
    _, later = train(tmp_path / "run", steps=6, seed=1)
    order = ckptfmt.Sampler(40, global_batch=4, seed=1, worker=(0, 1))
    assert anew + later == [order.indices(step) for step in range(3)]


def test_a_sampler_that_comes_to_a_run_later_begins_there(tmp_path: Path) -> None:
    """The run had none: `allow=("missing",)`, and the steps go on."""
    state = ckptfmt.State(weights={"w": torch.zeros(2)}, optimizer={"step": 0}, config={})
    with ckptfmt.Checkpointer(tmp_path / "run", state, saver="inline") as checkpointer:
        for _ in checkpointer.steps(3):
            pass
    _, batches = train(tmp_path / "run", steps=5, allow=("missing",))
    _, later = train(tmp_path / "run", steps=6)
    order = ckptfmt.Sampler(40, global_batch=4, worker=(0, 1))
    assert batches + later == [order.indices(step) for step in range(3)]


def test_a_scheduler_of_another_class_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    """`extra={"sched": StepLR(...)}`, saved from CosineAnnealingLR."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    ckptfmt.save(
        tmp_path / "c",
        ckptfmt.State(weights=model, optimizer=optimizer, extra={"sched": cosine}),
        step=1,
    )
    other = torch.nn.Linear(2, 2)
    kept = other.weight.detach().clone()
    live = torch.optim.SGD(other.parameters(), lr=0.1)
    step_lr = torch.optim.lr_scheduler.StepLR(live, 5)
    before = dict(step_lr.state_dict())
    text = told(
        ckptfmt.load,
        tmp_path / "c",
        ckptfmt.State(weights=other, optimizer=live, extra={"sched": step_lr}),
    )
    assert (
        "READ_BACK at extra:sched: the saved state lacks gamma, step_size, which a StepLR has"
        in text
    )
    assert "Give an object of the class that was saved" in text
    assert torch.equal(other.weight, kept)
    assert step_lr.state_dict() == before


@pytest.mark.parametrize(
    ("only", "meant"),
    [("weigths:*", "weights:*"), ("weights:heads", "weights:head"), ("haed", "head")],
)
def test_a_typo_in_only_is_told_what_was_meant(tmp_path: Path, only: str, meant: str) -> None:
    """And not to allow it, which loads nothing."""
    ckptfmt.save(tmp_path / "c", ckptfmt.State(weights={"head": torch.ones(2)}), step=1)
    live = ckptfmt.State(weights={"head": torch.zeros(2)})
    text = told(ckptfmt.load, tmp_path / "c", live, only=only)
    assert f"Did you mean {meant!r}?" in text
    assert "allow=" not in text
    ckptfmt.load(tmp_path / "c", live, only=meant)
    assert torch.equal(cast("Any", live.weights)["head"], torch.ones(2))


def test_a_value_that_nothing_takes_and_one_of_another_name_are_told_how_to_take_them(
    tmp_path: Path,
) -> None:
    """A scheduler that was forgotten, and one under another key: what the messages say does it."""
    ckptfmt.save(tmp_path / "c", ckptfmt.State(weights={}, extra={"sched": {"step": 7}}), step=1)
    text = told(
        ckptfmt.load,
        tmp_path / "c",
        ckptfmt.State(weights={}, extra={"other": 1}),
        allow=("missing",),
    )
    assert "Give it to State: extra={'sched': ...}" in text
    live = ckptfmt.State(weights={}, extra={"scheduler": {"step": 0}})
    text = told(ckptfmt.load, tmp_path / "c", live)
    found = re.search(r"If only the names differ, pass rename=(\{[^}]*\}) to ckptfmt.load", text)
    assert found is not None, text
    assert ast.literal_eval(found[1]) == {"extra:scheduler": "extra:sched"}
    ckptfmt.load(tmp_path / "c", live, rename=ast.literal_eval(found[1]))
    assert live.extra == {"scheduler": {"step": 7}}


def test_a_run_goes_on_under_another_name_as_its_error_says(tmp_path: Path) -> None:
    """The remedy named an argument that Checkpointer doesn't have."""

    def train(place: Path, name: str, **options: Any) -> Any:
        state = ckptfmt.State(data={"p": 1}, config={}, extra={name: {"n": 7}})
        with ckptfmt.Checkpointer(place, state, saver="inline", **options) as checkpointer:
            checkpointer.restore_rng()
            checkpointer.save(step=checkpointer.step + 1)
        return state.extra

    train(tmp_path / "run", "scheduler")
    text = told(train, tmp_path / "run", "sched")
    found = re.search(r"init_from=InitFrom\(RUN, only=None, rename=(\{[^}]*\})\)", text)
    assert found is not None, text
    begun = ckptfmt.InitFrom(tmp_path / "run", only=None, rename=ast.literal_eval(found[1]))
    assert train(tmp_path / "new", "sched", init_from=begun) == {"sched": {"n": 7}}


@pytest.mark.parametrize("resume", [35, None, True, Path("step-00000001-l0001")])
def test_a_resume_that_is_no_text_is_refused_by_name(tmp_path: Path, resume: Any) -> None:
    """An int was called as a function, at the start of the launch."""
    text = told(ckptfmt.Checkpointer, tmp_path, ckptfmt.State(data={"p": 1}), resume=resume)
    assert "ARGUMENT at resume=" in text
    assert "step-00000035-l0003" in text


def test_an_override_that_fits_nothing_is_refused_whatever_is_allowed(tmp_path: Path) -> None:
    """`override=["optimizer:group/lrr"]` with `allow=("missing",)` kept the saved value in silence."""
    train(tmp_path / "run", steps=1)
    for override, meant in (
        (["data"], "The field is 'data:*'."),
        (["optimizer:group/lrr"], "'optimizer:group/lr'"),
    ):
        text = told(train, tmp_path / "run", steps=2, override=override, allow=("missing",))
        assert f"ARGUMENT at override={override[0]!r}: nothing of this name was saved" in text
        assert meant in text
        assert "allow=" not in text


def test_a_wrong_allow_is_refused_by_the_first_start(tmp_path: Path) -> None:
    assert "allow= takes dtype, loader" in told(ckptfmt.Checkpointer, tmp_path / "run", allow="foo")


@pytest.mark.parametrize("total", ["10", 2.5, -1])
def test_a_total_that_is_no_number_of_steps_is_refused(tmp_path: Path, total: Any) -> None:
    text = told(train, tmp_path / "run", steps=total)
    assert f"ARGUMENT at steps(): {total!r} isn't a number of steps" in text


@pytest.mark.parametrize("given", ["16", 0, 1.5])
def test_a_batch_that_is_no_number_of_samples_is_refused(given: Any) -> None:
    assert f"global_batch={given!r} isn't from 1 to" in told(
        ckptfmt.Sampler, 40, global_batch=given
    )


def test_a_checkpoint_of_a_run_is_no_run(tmp_path: Path) -> None:
    """`Checkpointer("run/step-00000001-l0001")`."""
    train(tmp_path / "run", steps=1)
    text = told(train, tmp_path / "run" / "step-00000001-l0001", steps=2)
    assert f"this is a checkpoint of the run {tmp_path / 'run'}" in text
    assert "resume='step-00000001-l0001' goes back to this checkpoint" in text


@pytest.mark.parametrize(
    ("resume", "meant"), [("3", "step-00000003-l0001"), ("fesh", "fresh"), ("atuo", "auto")]
)
def test_a_wrong_resume_is_told_what_was_meant(tmp_path: Path, resume: str, meant: str) -> None:
    train(tmp_path / "run", steps=3)
    assert f"Did you mean {meant!r}?" in told(train, tmp_path / "run", steps=4, resume=resume)


def test_a_value_that_was_not_saved_is_told_what_there_is(tmp_path: Path) -> None:
    """`open("c").leaf("optimizer", "extra/confg")`: the remedy was an argument that leaf doesn't have."""
    ckptfmt.save(tmp_path / "c", ckptfmt.State(extra={"config": 1}), step=1)
    with ckptfmt.open(tmp_path / "c") as checkpoint:
        text = told(checkpoint.leaf, "optimizer", "extra/confg")
    assert "Did you mean 'extra/config'?" in text
    assert "allow=" not in text


def test_a_tensor_in_the_configuration_is_told_where_it_belongs(tmp_path: Path) -> None:
    text = told(ckptfmt.save, tmp_path / "c", ckptfmt.State(config={"x": torch.ones(2)}), step=1)
    assert "STATE_UNSUPPORTED at config/x: a torch.Tensor is no configuration" in text
    assert "give tensors to weights= or extra=" in text


def test_an_array_in_the_configuration_is_compared_by_its_bytes(tmp_path: Path) -> None:
    """Of NaN, too, and where the other side lacks it."""
    table: dict[str, Any] = {"table": np.array([0.5, np.nan])}
    ckptfmt.save(tmp_path / "c", ckptfmt.State(weights={}, config=table), step=1)
    other = {"table": np.array([0.25, np.nan])}
    differing = [
        [
            path
            for path, *_ in ckptfmt.load(
                tmp_path / "c", ckptfmt.State(weights={}, config=live)
            ).config_differences
        ]
        for live in (table, other, {})
    ]
    assert differing == [[], ["table"], ["table"]]


def test_the_report_of_a_beginning_does_not_wait_for_streams(tmp_path: Path) -> None:
    """`init_from=PATH` takes the weights alone: no RNG streams are to come."""
    train(tmp_path / "run", steps=1)
    begun, _ = train(tmp_path / "new", steps=1, init_from=tmp_path / "run")
    assert not any("aren't put back" in reason for reason in begun.load_report.lowered_by)


def test_a_damaged_block_of_a_run_is_told_with_its_checkpoint(tmp_path: Path) -> None:
    """`load(RUN)`: BLOCK_DIGEST named the file alone."""
    train(tmp_path / "run", steps=2)
    (file,) = (tmp_path / "run" / "step-00000002-l0001").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    live = ckptfmt.State(weights={"w": torch.zeros(2)}, rng=False)
    text = told(ckptfmt.load, tmp_path / "run", live, only="weights:*")
    assert f"BLOCK_DIGEST at {tmp_path / 'run' / 'step-00000002-l0001' / file.name}" in text


def test_a_damaged_block_is_told_with_both_ways_out(tmp_path: Path, capsys: Any) -> None:
    """`ckptfmt validate RUN`: the remedy had no word of `ckptfmt repair`; it is tried here."""
    train(tmp_path / "run", steps=2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (file,) = (tmp_path / "run" / "step-00000002-l0001").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["validate", str(tmp_path / "run")]) == 1
    text = capsys.readouterr().out
    assert "BLOCK_DIGEST" in text
    assert "Load another checkpoint of the run; or mend this one from a copy" in text
    assert "`ckptfmt repair PATH --with COPY`" in text
    assert main(["repair", str(tmp_path / "run"), "--with", str(tmp_path / "copy")]) == 0
    assert main(["validate", str(tmp_path / "run")]) == 0


def test_a_run_without_its_launch_records_is_mended(tmp_path: Path, capsys: Any) -> None:
    """`ckptfmt repair RUN` called a run whole that nothing could be loaded from; now it writes the records again."""
    train(tmp_path / "run", steps=1)
    shutil.rmtree(tmp_path / "run" / "launches")
    assert main(["repair", str(tmp_path / "run")]) == 0
    assert "launches/0001.json  FILE_MISSING" in capsys.readouterr().out
    ckptfmt.load(
        tmp_path / "run", ckptfmt.State(weights={"w": torch.zeros(2)}, rng=False), only="weights:*"
    )


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path, capsys: Any) -> None:
    """`ckptfmt ls DIRECTORY`."""
    for name in ("bad", "good"):
        train(tmp_path / "runs" / name, steps=1)
    (tmp_path / "runs" / "bad" / "run.json").write_text("{", "utf-8")
    assert main(["ls", str(tmp_path / "runs")]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"bad +run +can't be read: DOC_SYNTAX at .*run.json", lines[0])
    assert re.match(r"good +run +1 committed +head step-00000001-l0001", lines[1])


@pytest.mark.parametrize(
    ("typed", "meant"), [("delete", "rm"), ("verify", "validate"), ("info", "inspect")]
)
def test_commands_of_other_programs_are_told_ours(typed: str, meant: str, capsys: Any) -> None:
    assert main([typed]) == 2
    assert f"Did you mean `ckptfmt {meant}`?" in capsys.readouterr().err


def test_a_metric_that_comes_once_an_epoch_is_waited_for_in_silence(caplog: Any) -> None:
    """`best=("eval_loss", "min", 2)`: the saves before the first evaluation said `clean-up stopped`."""

    def train(metrics: Any) -> tuple[list[str], int]:
        state, store = ckptfmt.State(weights={"w": torch.zeros(2)}, config={}), MemoryStore()
        options: dict[str, Any] = {
            "keep": 1,
            "keep_best": ("eval_loss", "min", 2),
            "saver": "inline",
        }
        caplog.clear()
        with (
            caplog.at_level("WARNING", logger="ckptfmt"),
            ckptfmt.Checkpointer(store, state, **options) as checkpointer,
        ):
            for step in range(1, 20):
                checkpointer.save(step=step, metrics=metrics(step))
        said = [
            message
            for message in caplog.messages
            if "Retention(best=)" in message or "clean-up" in message
        ]
        return said, sum(one.state == "committed" for one in ckptfmt.Run(store).list())

    assert train(
        lambda step: {"train_loss": 1.0, **({} if step % 8 else {"eval_loss": 1 / step})}
    ) == ([], 3)
    never, count = train(lambda _: {"train_loss": 1.0})
    assert (len(never), count) == (1, 19)
    assert "so 16 stay that keep= would let go; their metrics: train_loss" in never[0]
    misspelt, _ = train(lambda _: {"eval_los": 1.0})
    assert "so 1 stay" in misspelt[0]
    assert "did you mean 'eval_los'?" in misspelt[0]


@pytest.mark.parametrize("saver", ["inline", "thread"])
@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (
            {},
            "Without keep= this run keeps all its checkpoints: `ckptfmt gc {run} --keep 3` deletes",
        ),
        ({"keep": 3}, "This run was begun with keep=3: `ckptfmt gc {run} --keep 1` deletes"),
        ({"keep": 1}, "This run keeps one checkpoint, and a save needs room for a second one"),
    ],
)
def test_a_full_disk_is_told_with_what_frees_space_here(
    saver: Any, options: Any, remedy: str
) -> None:
    """NO_SPACE said "lower keep=" where no `keep=` was given."""
    full = Fault(fail_at=1, operations=frozenset({"create"}), path_end=".safetensors")
    store = FaultStore(MemoryStore(), full, code=Code.NO_SPACE)
    state = ckptfmt.State(weights={"w": torch.zeros(2)})
    run = ckptfmt.Checkpointer(store, state, saver=saver, **options)
    run.restore()
    handle = run.save(step=1)
    assert handle is not None
    handle.wait_over(60)
    for text in (str(handle.error), told(run.close)):
        assert remedy.format(run=store.name) in text
        assert "lower keep=" not in text


def test_a_full_disk_outside_of_a_run_speaks_of_no_run() -> None:
    full = Fault(fail_at=1, operations=frozenset({"create"}), path_end=".safetensors")
    store = FaultStore(MemoryStore(), full, code=Code.NO_SPACE)
    text = told(ckptfmt.save, store, ckptfmt.State(weights={"w": torch.zeros(2)}), step=1)
    assert text.endswith("Remedy: Free space in that place, then try again.")


def test_the_first_screen_of_the_readme_has_commands_that_work_on_a_fresh_machine() -> None:
    """The first command was an installation of a package that no index has yet."""
    begin = (ROOT / "README.md").read_text("utf-8").partition("## A loop")[0]
    commands = re.findall(r"^\$ (.*)$", begin, re.MULTILINE)
    assert commands == ["make demo", "make test", 'pip install ".[torch]"']
    assert "From the first release on" in begin
    targets = (ROOT / "Makefile").read_text("utf-8")
    assert all(re.search(rf"^{name}: venv", targets, re.MULTILINE) for name in ("demo", "test"))


def test_the_comparison_has_a_column_for_each_framework_that_people_come_from() -> None:
    """Neither Lightning nor the Trainer was there; each row has a cell for every column."""
    lines = (ROOT / "docs" / "comparison.md").read_text("utf-8").splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    assert {"Lightning 2.6", "Trainer (transformers 5.23)"} <= {cell.strip() for cell in rows[0]}
    assert {len(row) for row in rows} == {8}
    assert all(cell.strip() for row in rows[2:] for cell in row)


# --- what the commands say ------------------------------------------------------------------------


def test_a_diff_begins_with_a_summary(tmp_path: Path, capsys: Any) -> None:
    """Two checkpoints of a small model were 240 lines, the verdict last."""
    for name, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(seed)
        model = torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
        )
        optimizer = trained(model)
        ckptfmt.save(
            tmp_path / name,
            ckptfmt.State(weights=model, optimizer=optimizer, data={"n": seed}),
            step=seed,
        )
    paths = [str(tmp_path / name) for name in ("a", "b")]
    assert main(["diff", *paths]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.match(
        r"different  .*a \(step 1\) and .*b \(step 2\): \d+ tensors and \d+ values differ", lines[0]
    )
    assert re.match(r"  weights +\d+ tensors +by at most ", lines[1])
    assert len(lines) < 50
    assert re.search(r"and \d+ differences more: --all shows them", lines[-1])
    assert main(["diff", "--all", *paths]) == 1
    text = capsys.readouterr().out
    assert text.count("layers.1.linear2.weight") > 0
    assert "more: --all" not in text


@pytest.fixture
def run_path(tmp_path: Path) -> str:
    state = ckptfmt.State(weights={"a": torch.zeros(3)})
    with ckptfmt.Checkpointer(tmp_path / "run", state, every=1, saver="inline") as checkpointer:
        for _ in checkpointer.steps(2):
            pass
    return str(tmp_path / "run")


def test_the_newest_checkpoint_is_not_deleted_and_the_way_out_is_told(
    run_path: str, capsys: Any
) -> None:
    """`ckptfmt rm RUN 2`: not to delete what needs it, since nothing can be."""
    assert main(["rm", run_path, "2"]) == 2
    text = capsys.readouterr().err
    assert "CHECKPOINT_NEEDED at step-00000002-l0001: the run goes on from it" in text
    assert "train on until the next save" in text
    assert "resume='step-00000001-l0001'" in text
    assert "To delete the whole run, delete its directory." in text


def test_a_valid_checkpoint_that_is_no_delta_is_told_without_references(
    run_path: str, capsys: Any
) -> None:
    """`ckptfmt validate RUN`: no word of references and closure where there are none."""
    assert main(["validate", run_path]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"valid  {run_path}: 2 checkpoints, ")
    assert not re.search("reference|closure", text)


def test_streams_that_nobody_seeded_alike_are_told_from_another_training(
    tmp_path: Path, capsys: Any
) -> None:
    """`ckptfmt diff calm killed`, where only the streams differ from which the training doesn't draw."""
    for name, seed in (("calm", 1), ("killed", 2)):
        stream = np.random.default_rng(seed)
        state = ckptfmt.State(weights={"a": torch.zeros(3)}, rng={"own": stream})
        ckptfmt.save(tmp_path / name, state, step=1)
    paths = [str(tmp_path / name) for name in ("calm", "killed")]
    assert main(["diff", *paths]) == 1
    assert "Only RNG streams differ" in capsys.readouterr().out


def test_what_was_deleted_is_named_where_it_is_asked_for(run_path: str, capsys: Any) -> None:
    """`ckptfmt rm RUN 1` twice, and `pin`: not `CHECKPOINT_RETIRED at manifest.json`."""
    assert main(["rm", run_path, "1"]) == 0
    assert "`ckptfmt ls --all` lists it as retired" in capsys.readouterr().out
    for command in ("rm", "pin"):
        assert main([command, run_path, "1"]) == 2
        assert "CHECKPOINT_RETIRED at step-00000001-l0001" in capsys.readouterr().err

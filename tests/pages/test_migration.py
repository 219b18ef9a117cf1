"""From another format into a run: what was converted loads at the first try, and says what wasn't there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.errors import CkptError


def trained(
    kind: Any = torch.optim.AdamW, *, seed: int = 0, **options: Any
) -> tuple[torch.nn.Module, Any]:
    """Return a model and its optimizer after two steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = kind(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def fresh(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(99)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return model, kind(model.parameters(), **options)


def convert(source: Path, target: Path, *more: str) -> None:
    assert main(["convert", str(source), str(target), *more]) == 0


def imported(path: Path, content: object) -> Path:
    torch.save(content, path / "model.pt")
    convert(path / "model.pt", path / "imported", "--to", "ckptfmt", "--step", "1200")
    return path / "imported"


def same(left: Any, right: Any) -> bool:
    """Tell whether two state_dicts are equal, bit by bit."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and torch.equal(left, right)
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def test_weights_of_a_file_load_into_a_whole_state_without_allow(tmp_path: Path) -> None:
    """`convert model.pt imported`, then `load`: all else stays as it is, and the report names it."""
    model, _ = trained()
    path = imported(tmp_path, model.state_dict())
    other, optimizer = fresh()
    sampler = ckptfmt.Sampler(10, global_batch=2)
    average = fresh()[0]
    extra = {"scheduler": {"n": 4}, "ema": average}
    state = ckptfmt.State(
        weights=other, optimizer=optimizer, data=sampler, config={"lr": 1}, extra=extra
    )
    ema = {name: value.clone() for name, value in average.state_dict().items()}
    report: Any = ckptfmt.load(path, state)
    assert same(other.state_dict(), model.state_dict())
    assert same(average.state_dict(), ema)
    assert (report.step, report.claim) == (1200, "S0")
    assert not optimizer.state
    for what in ("optimizer", "data", "extra:scheduler", "extra:ema"):
        assert f"{what} wasn't imported: it stays as it is" in report.lowered_by
    assert "rng wasn't saved: imported from a torch.save file" in report.lowered_by
    # What follows from that isn't told one by one: versions, devices, each key of the
    # configuration.
    assert not [reason for reason in report.lowered_by if "<absent>" in reason]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
    ],
)
def test_an_imported_optimizer_goes_on_where_it_was(
    kind: Any, options: Any, tmp_path: Path
) -> None:
    """Weights and optimizer of a torch.save file, into a State: the next step is that of who was never saved."""
    model, optimizer = trained(kind, **options)
    path = imported(
        tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    )
    other, another = fresh(kind, **{**options, "lr": 0.5})
    report: Any = ckptfmt.load(path, ckptfmt.State(weights=other, optimizer=another))
    assert same(another.state_dict(), optimizer.state_dict())
    assert "extra:epoch was imported, and nothing here takes it" in report.lowered_by
    batch = torch.randn(5, 3)
    for one, its in ((model, optimizer), (other, another)):
        its.zero_grad()
        one(batch).square().mean().backward()
        its.step()
    assert same(other.state_dict(), model.state_dict())


def test_a_numbered_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    """Positions say nothing: their number, and the shapes that lie there, are compared."""
    model, optimizer = trained()
    path = imported(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    turned = torch.optim.AdamW(list(reversed(list(model.parameters()))))
    with pytest.raises(CkptError, match=r"SHAPE_MISMATCH at optimizer:1.bias/exp_avg"):
        ckptfmt.load(path, ckptfmt.State(weights=model, optimizer=turned))
    fewer = torch.optim.AdamW(list(model.parameters())[:2])
    with pytest.raises(CkptError, match=r"GROUP_MISMATCH at optimizer: .*groups of \[4\].* \[2\]"):
        ckptfmt.load(path, ckptfmt.State(weights=model, optimizer=fewer))
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(CkptError, match="another kind of optimizer"):
        ckptfmt.load(
            path, ckptfmt.State(weights=model, optimizer=sgd), allow=("missing", "unexpected")
        )


def test_a_parameter_that_is_not_in_the_file_is_still_an_error(tmp_path: Path) -> None:
    """What wasn't imported of the weights would be random."""
    model, _ = trained()
    path = imported(tmp_path, {f"net.{name}": value for name, value in model.state_dict().items()})
    with pytest.raises(CkptError, match=r"TENSOR_MISSING.*rename="):
        ckptfmt.load(path, ckptfmt.State(weights=fresh()[0]))
    ckptfmt.load(path, ckptfmt.State(weights=model), rename={"": "net."})


def test_a_checkpoint_of_our_own_still_misses_what_was_not_saved(tmp_path: Path) -> None:
    """Only other formats lack fields without anybody's will."""
    model, optimizer = trained()
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights=model), step=1)
    with pytest.raises(CkptError, match="GROUP_MISMATCH"):
        ckptfmt.load(tmp_path / "x", ckptfmt.State(weights=model, optimizer=optimizer))


# --- a run that begins from another checkpoint ----------------------------------------------------


def run_of(path: Path, state: ckptfmt.State, steps: int, **options: Any) -> ckptfmt.Checkpointer:
    with ckptfmt.Checkpointer(path, state, every=1, saver="inline", **options) as checkpointer:
        for _ in checkpointer.steps(steps):
            torch.rand(1)
    return checkpointer


def test_a_run_begins_from_imported_weights_and_resumes_from_its_own(tmp_path: Path) -> None:
    """`Checkpointer(..., init_from="imported")`: once, and step 0 is the first."""
    model, optimizer = trained()
    path = imported(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, another = fresh()
    state = ckptfmt.State(weights=other, optimizer=another)
    with ckptfmt.Checkpointer(
        tmp_path / "run", state, saver="inline", init_from=path
    ) as checkpointer:
        assert same(other.state_dict(), model.state_dict())
        assert (checkpointer.step, another.state) == (0, {})
        assert checkpointer.choose() is None
        report: Any = checkpointer.load_report
        assert report.left_count > 0
        for _ in checkpointer.steps(2):
            with torch.no_grad():
                other[0].weight.fill_(7.0)  # type: ignore[index]
    again, its = fresh()
    resumed = run_of(
        tmp_path / "run", ckptfmt.State(weights=again, optimizer=its), 2, init_from=path
    )
    assert resumed.step == 2
    assert torch.all(again[0].weight == 7.0)  # type: ignore[index]


def test_checkpoints_of_a_run_say_what_it_began_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Path, step, digest and what was taken are in the provenance, also behind a resume that names no `init_from`."""
    path = imported(tmp_path, {"model": trained()[0].state_dict()})
    with ckptfmt.open(path) as checkpoint:
        begun = {
            "path": str(path),
            "step": checkpoint.step,
            "digest": checkpoint.digest,
            "only": ["weights:*"],
        }
    run_of(tmp_path / "run", ckptfmt.State(weights=fresh()[0]), 1, init_from=path)
    run_of(tmp_path / "run", ckptfmt.State(weights=fresh()[0], provenance={"ticket": "A-7"}), 2)
    run = ckptfmt.Run(tmp_path / "run")
    for one in run.list():
        with run.open(one.name) as checkpoint:
            assert checkpoint.provenance["init_from"] == begun, one
    run_of(tmp_path / "other", ckptfmt.State(weights=fresh()[0]), 1)
    with ckptfmt.open(tmp_path / "other") as checkpoint:
        assert "init_from" not in checkpoint.provenance

    assert main(["inspect", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert f"{path}: step {begun['step']}, {begun['digest']}, only ['weights:*']" in " ".join(
        said.split()
    )


def test_a_run_begins_from_all_of_another_run_and_goes_on_from_its_step(tmp_path: Path) -> None:
    """`InitFrom(path=..., only=None)`: optimizer, position, step and RNG streams too; the same as to go on there."""
    position = {"sample": 0}
    model, optimizer = trained()
    whole = ckptfmt.State(weights=model, optimizer=optimizer, data=position)
    run_of(tmp_path / "first", whole, 3)
    expected = torch.rand(3)
    other, another = fresh()
    state = ckptfmt.State(weights=other, optimizer=another, data={"sample": 5})
    torch.manual_seed(1)
    init = ckptfmt.InitFrom(path=tmp_path / "first", only=None)
    with ckptfmt.Checkpointer(
        tmp_path / "second", state, saver="inline", init_from=init
    ) as checkpointer:
        assert checkpointer.step == 3
        assert same(another.state_dict(), optimizer.state_dict())
        checkpointer.restore_rng()
        assert torch.equal(torch.rand(3), expected)
        for step in checkpointer.steps(5):
            assert step >= 3
    assert [one.step for one in ckptfmt.Run(tmp_path / "second").list()] == [5]


def test_a_run_begins_under_other_names(tmp_path: Path) -> None:
    """`InitFrom(..., rename=...)`, as for `load`; what doesn't fit is refused before a step is made."""
    model, _ = trained()
    path = imported(tmp_path, {f"net.{name}": value for name, value in model.state_dict().items()})
    other = fresh()[0]
    with pytest.raises(CkptError, match="TENSOR_MISSING"):
        run_of(tmp_path / "refused", ckptfmt.State(weights=other), 1, init_from=path)
    init = ckptfmt.InitFrom(path=path, rename={"": "net."})
    run_of(tmp_path / "run", ckptfmt.State(weights=other), 1, init_from=init)
    assert same(other.state_dict(), model.state_dict())


# --- one safetensors file -------------------------------------------------------------------------


def test_one_safetensors_file_is_a_target_of_its_own(tmp_path: Path) -> None:
    """`convert ckpt model.safetensors`: the name says so; safetensors itself reads it."""
    model, optimizer = trained()
    ckptfmt.save(tmp_path / "x", ckptfmt.State(weights=model, optimizer=optimizer), step=1)
    convert(tmp_path / "x", tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").is_file()
    assert same(
        safetensors.torch.load_file(tmp_path / "model.safetensors"), dict(model.state_dict())
    )
    convert(tmp_path / "x", tmp_path / "other", "--to", "safetensors", "--only", "weights")
    assert (tmp_path / "other").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    convert(tmp_path / "model.safetensors", tmp_path / "back", "--to", "ckptfmt")
    ckptfmt.load(tmp_path / "back", ckptfmt.State(weights=fresh()[0]))
    assert (
        main(
            ["convert", str(tmp_path / "x"), str(tmp_path / "o.safetensors"), "--only", "optimizer"]
        )
        == 2
    )
    assert not (tmp_path / "o.safetensors").exists()

"""Runs of earlier versions of the format, as their own writers left them (spec/kept): read, validated, continued."""

import json
import shutil
from typing import Any

import pytest
import torch
from blake3 import blake3

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.documents.versions import EARLIER
from ckptfmt.errors import IntegrityError
from tests.house.sources import ROOT

KEPT = ROOT / "spec" / "kept"
VERSIONS = pytest.mark.parametrize("version", EARLIER)


def digests_of(path):
    checkpoint = ckptfmt.open(path)
    return {
        f"{field}/{name}": blake3(checkpoint.read(field, name, scope).tobytes()).hexdigest()
        for field, name, scope in checkpoint.tensors
    }


def versions_of(run):
    found = {}
    for path in sorted(run.glob("step-*/manifest.json")):
        found[path.parent.name] = json.loads(path.read_bytes())["signed"]["format_version"]
    return found


def state_of(model, optimizer, scheduler, data):
    return ckptfmt.State(
        weights=model,
        optimizer=optimizer,
        extra={"scheduler": scheduler},
        data=data,
        config={"lr": 1e-3, "names": ["layer"] * 20},
    )


def training():
    """The model, optimizer and scheduler of spec/kept/make_checkpoints.py, with other weights."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])


@VERSIONS
def test_every_tensor_of_every_checkpoint_is_as_its_writer_left_it(version):
    expected = json.loads((KEPT / version / "digests.json").read_bytes())

    assert set(versions_of(KEPT / version / "run").values()) == {version}
    assert {name: digests_of(KEPT / version / "run" / name) for name in expected} == expected
    assert len(expected) == 4


@VERSIONS
def test_the_run_has_deltas_and_is_whole(version, capsys):
    run = KEPT / version / "run"

    assert list(run.glob("step-*/*.pack"))
    assert main(["validate", str(run)]) == 0
    assert "4 checkpoints" in capsys.readouterr().out


@VERSIONS
def test_lists_and_tuples_of_many_numbers_come_back_as_they_were(version):
    """0.9 stored an entry of such a list as a tree of its own."""
    data = ckptfmt.open(KEPT / version / "run" / "step-00000004-l0001").leaf("data")

    assert data["seen"] == tuple(range(40))
    assert (len(data["losses"]), type(data["losses"])) == (4, list)


@VERSIONS
def test_the_run_goes_on_with_saves_of_this_version_and_deltas_over_the_old_ones(version, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(KEPT / version / "run", run)
    model, optimizer, scheduler = training()
    data: dict[str, Any] = {"position": 0, "losses": [], "seen": ()}
    state = state_of(model, optimizer, scheduler, data)
    options = ckptfmt.Saving(delta="smallest", saver="thread")
    with ckptfmt.Checkpointer(run, state, every=1, saving=options) as checkpointer:
        at_start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for _ in checkpointer.steps(6):
            optimizer.zero_grad()
            model(torch.randint(0, 8, (16,))).square().mean().backward()
            optimizer.step()
            scheduler.step()
            data["position"] += 1

    for name, tensor in at_start.items():
        saved = json.loads((KEPT / version / "digests.json").read_bytes())["step-00000004-l0001"]
        assert blake3(tensor.numpy().tobytes()).hexdigest() == saved[f"weights/{name}"]
    assert [*versions_of(run).values()] == [version] * 4 + ["1.0"] * 2
    assert main(["validate", str(run)]) == 0


@VERSIONS
def test_compact_writes_a_checkpoint_of_this_version(version, tmp_path):
    source = KEPT / version / "run" / "step-00000002-l0001"
    out = tmp_path / "compacted"

    assert main(["compact", str(source), "--out", str(out)]) == 0
    assert json.loads((out / "manifest.json").read_bytes())["signed"]["format_version"] == "1.0"
    assert digests_of(out) == digests_of(source)
    assert ckptfmt.open(out).leaf("data") == ckptfmt.open(source).leaf("data")


@VERSIONS
def test_a_flipped_bit_is_found(version, tmp_path):
    """The negative control: the digests of an earlier version are compared, too."""
    run = tmp_path / "run"
    shutil.copytree(KEPT / version / "run", run)
    (shard,) = (run / "step-00000001-l0001").glob("weights-*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    with pytest.raises(IntegrityError, match="BLOCK_DIGEST"):
        digests_of(run / "step-00000001-l0001")
    assert main(["validate", str(run)]) == 1

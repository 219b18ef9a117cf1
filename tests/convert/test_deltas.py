"""Deltas become files of other kinds, whole: what they read from goes along."""

import numpy as np
import pytest
import safetensors.numpy
import torch

from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.store import LocalStore
from tests.builders import leaf, snapshot, tensor
from tests.chains import Saving
from tests.convert.made import done, refused, stored

BLOCK = 4096


def state(step):
    rng = np.random.default_rng(2)
    w = rng.standard_normal((9, BLOCK // 4)).astype(np.float32)
    w.view(np.uint32)[:, ::3] += step
    frozen = rng.integers(0, 99, 3000)
    return snapshot(
        tensor("layer.w", w), tensor("layer.frozen", frozen), leaves=[leaf("config", {"lr": 0.5})]
    )


@pytest.fixture
def delta(tmp_path):
    """The last of three saves, of which two are deltas."""
    saving = Saving(state(0), store=LocalStore(tmp_path / "run", writable=True), block_nbytes=BLOCK)
    for step in (1, 2, 3):
        saving.save(step, state(step))
    assert saving.open(3).manifest.profile == "delta"
    assert len(saving.open(3).manifest.references) == 2
    return tmp_path / "run" / checkpoint_name(3, 1)


def test_to_hugging_face(delta, tmp_path):
    done(delta, tmp_path / "hf", "--to", "hf", "--only", "weights")

    (path,) = (tmp_path / "hf").glob("*.safetensors")
    found = safetensors.numpy.load_file(path)
    assert {name: array.tobytes() for name, array in found.items()} == {
        source.name: source.array.tobytes() for source in state(3).tensors
    }


def test_to_a_torch_file(delta, tmp_path):
    done(delta, tmp_path / "there.pt")

    found = torch.load(tmp_path / "there.pt", weights_only=True)
    for source in state(3).tensors:
        assert found["weights"][source.name].numpy().tobytes() == source.array.tobytes()


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf"])
def test_there_and_back(kind, delta, tmp_path):
    done(delta, tmp_path / "there", "--to", kind, "--only", "weights")
    rules = [] if kind == "hf" else ["--field", "weights"]
    done(tmp_path / "there", tmp_path / "back", "--to", "ckptfmt", "--step", "3", *rules)

    expected = {source.name: source.array.tobytes() for source in state(3).tensors}
    assert {
        key[1]: row[-1] for key, row in stored(tmp_path / "back")["tensors"].items()
    } == expected


def test_from_another_place_with_its_bases(delta, tmp_path):
    alone = tmp_path / "elsewhere" / delta.name
    alone.parent.mkdir()
    delta.rename(alone)
    code, _ = refused(alone, tmp_path / "hf", "--to", "hf")

    assert code == "BASE_MISSING"
    assert not (tmp_path / "hf").exists()
    done(alone, tmp_path / "hf", "--to", "hf", "--base", str(tmp_path / "run"))
    assert (tmp_path / "hf").exists()

"""Whatever bytes of a foreign file are damaged: a named error, or a target; never a foreign error, never a rest."""

import random
import shutil

import pytest
import safetensors.torch
import torch

from tests.convert.made import convert, save_dcp

FILES = {
    "a.pt": "a.pt",
    "dcp/.metadata": "dcp",
    "dcp/__0_0.distcp": "dcp",
    "hf/model.safetensors": "hf",
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    path = tmp_path_factory.mktemp("sources")
    weights = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
    value = {"model": weights, "epoch": 3, "list": [1, {"x": torch.ones(2)}]}
    torch.save(value, path / "a.pt")
    save_dcp(value, path / "dcp")
    (path / "hf").mkdir()
    safetensors.torch.save_file(weights, path / "hf" / "model.safetensors")
    return path


@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_or_harmless(name, sources, tmp_path, monkeypatch):

    def show(error):
        raise error

    monkeypatch.setattr("ckptfmt.__main__._fail_unexpectedly", show)
    chance = random.Random(name)
    shutil.copytree(sources, tmp_path / "in")
    whole = (tmp_path / "in" / name).read_bytes()
    codes = set()
    for _ in range(40):
        content = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 8])):
            content[chance.randrange(len(content))] = chance.randrange(256)
        (tmp_path / "in" / name).write_bytes(content)
        said = convert(tmp_path / "in" / FILES[name], tmp_path / "out", "--to", "ckptfmt")

        codes.add(said.get("error", {}).get("code", "done"))
        assert {path.name for path in tmp_path.iterdir()} <= {"in", "out"}
        assert ("error" in said) == (not (tmp_path / "out").exists())
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert len(codes) > 1

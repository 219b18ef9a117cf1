"""The files beside the weights of a Hugging Face directory: what is copied, recorded and refused."""

import json

import numpy as np
import pytest

import ckptfmt
from tests.convert.made import done, refused


@pytest.fixture
def like(tmp_path):
    place = tmp_path / "base"
    (place / "nested").mkdir(parents=True)
    config = {"model_type": "tiny", "width": 3, "torch_dtype": "float32"}
    (place / "config.json").write_text(json.dumps(config))
    for name in (
        "tokenizer.json", "merges.txt", "chat_template.jinja",  # copied
        "model.safetensors", "model.safetensors.index.json", "README.md", "trainer_state.json",
        "adapter_config.json", ".hidden.json", "training_args.bin",
    ):  # fmt: skip
        (place / name).write_text("{}")
    return place


def save(path, config=None):
    weights = {"w": np.ones((4, 4), np.float16), "b": np.ones(3, np.float32)}
    ckptfmt.save(path, ckptfmt.State(weights=weights, config=config, rng=False), step=3)
    return path


def test_the_configuration_of_the_checkpoint_comes_before_the_copied(tmp_path, like):
    ckpt = save(tmp_path / "ckpt", {"model": {"model_type": "tiny", "width": 4}})
    done(ckpt, tmp_path / "hf", "--to", "hf", "--like", str(like))
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "README.md", "config.json", "tokenizer.json", "merges.txt", "chat_template.jinja",
        "model.safetensors",
    }  # fmt: skip
    assert json.loads((tmp_path / "hf/config.json").read_text()) == {
        "model_type": "tiny",
        "width": 4,
        "dtype": "float16",
    }


def test_without_a_configuration_there_is_a_card_and_no_config(tmp_path):
    done(save(tmp_path / "ckpt"), tmp_path / "hf", "--to", "hf", "--card", "license=mit")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"README.md", "model.safetensors"}
    head = (tmp_path / "hf/README.md").read_text().split("---\n")[1]
    assert head == 'license: "mit"\ntags: ["ckptfmt"]\n'


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--to", "hf", "--card", "license"], "--card"),
        (["--to", "hf", "--like", "nowhere"], "--like nowhere"),
        (["--to", "torch", "--card", "license=mit"], "--card"),
    ],
)
def test_what_makes_no_card_is_refused(tmp_path, arguments, where):
    _, error = refused(save(tmp_path / "ckpt"), tmp_path / "out", *arguments)
    assert (error["code"], error["where"]) == ("ARGUMENT", where)
    assert not (tmp_path / "out").exists()

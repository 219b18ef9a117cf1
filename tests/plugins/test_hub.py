"""Directories of `ckptfmt convert --to hf`, read by transformers, PEFT and huggingface_hub."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
)

import ckptfmt
from ckptfmt.__main__ import main
from tests.plugins.trainings import digest
from tests.plugins.transformers_training import Tokens, make_model, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def trained(directory, **options):
    """Train two steps, with the committed checkpoint of the second; return the trainer."""
    args = {"max_steps": 2, "save_steps": 2}
    trainer = make_trainer(directory, args=args, ckptfmt={"saver": "thread"}, **options)
    trainer.train()
    return trainer


def convert(*arguments):
    assert main(["convert", *map(str, arguments)]) == 0


def make_tokenizer(place):
    words = {f"w{number}": number for number in range(60)} | {"<unk>": 60}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(place)


def test_a_trainers_checkpoint_becomes_a_model_with_tokenizer_and_card(tmp_path):
    base = tmp_path / "base"
    make_model().save_pretrained(base)
    make_tokenizer(base)
    ours = trained(tmp_path)
    told = ["--like", base, "--card", "license=apache-2.0", "--card", "datasets=org/tokens"]
    convert(tmp_path / "out/ckptfmt", tmp_path / "hf", "--to", "hf", *told)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(loaded) is GPT2LMHeadModel
    assert digest(loaded.state_dict()) == digest(ours.model.state_dict())
    assert loaded.config.embd_pdrop == 0.2
    assert GenerationConfig.from_pretrained(tmp_path / "hf").bos_token_id == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("w3 w5 other")["input_ids"] == [3, 5, 60]
    assert tokenizer.chat_template is not None
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["GPT2LMHeadModel"], "float32")
    # The Trainer takes the directory.
    args = ours.args.__class__(output_dir=str(tmp_path / "again"), max_steps=1, use_cpu=True)
    args.report_to = []
    Trainer(model=loaded, args=args, train_dataset=Tokens()).train()

    card = ModelCard.load(tmp_path / "hf/README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "datasets": ["org/tokens"],
        "tags": ["ckptfmt"],
    }
    with ckptfmt.open(tmp_path / "out/ckptfmt") as checkpoint:
        assert f"| checkpoint | {checkpoint.digest} |" in card.text
        assert f"| run | {checkpoint.manifest.origin.run_id} |" in card.text
    assert "| step | 2 |" in card.text
    assert "| claim of a resume | T1 at most |" in card.text
    assert f"| torch | {torch.__version__} |" in card.text


def test_a_plain_loop_names_the_model_by_its_configuration(tmp_path):
    """Tied weights under the embedding's name, in files of a given size, in bfloat16."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        name_or_path="org/llama",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    state = ckptfmt.State(weights=model, config={"model": config.to_dict()}, rng=False)
    tags = ["a|b <i>"]
    ckptfmt.save(tmp_path / "ckpt", state, step=7, metrics={"eval_loss": 0.5}, tags=tags)
    told = ["--to", "hf", "--max-shard-size", "4KB"]
    convert(tmp_path / "ckpt", tmp_path / "hf", *told, "--card", "base_model=org/llama")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    theirs = json.loads((tmp_path / "theirs/model.safetensors.index.json").read_text())
    # vLLM and SGLang skip lm_head of a tied model, and read the files that the index names.
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
    assert "lm_head.weight" not in index["weight_map"]
    assert index["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert len(set(index["weight_map"].values())) > 2
    for name in set(index["weight_map"].values()):
        held = load_file(tmp_path / "hf" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == held.keys()
    # The bytes of the tensors count, and not those of the header.
    assert all(path.stat().st_size < 5000 for path in (tmp_path / "hf").glob("*.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.bfloat16
    assert digest(loaded.state_dict()) == digest(model.state_dict())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    card = ModelCard.load(tmp_path / "hf/README.md")
    assert card.data.base_model == "org/llama"
    assert "| tags | a\\|b &lt;i> |" in card.text
    assert "| eval_loss | 0.5 |" in card.text


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_checkpoint_with_adapters_becomes_the_adapters_directory(tmp_path, is_whole):
    """With and without a frozen base, which isn't read: its weights are gone."""
    base = tmp_path / "base"
    make_model().save_pretrained(base)
    trainer = make_trainer(
        tmp_path,
        base=str(base),
        args={"max_steps": 2, "save_steps": 2},
        ckptfmt={"saver": "thread", "frozen_base": False if is_whole else None},
    )
    trainer.train()
    (base / "model.safetensors").rename(tmp_path / "kept")
    convert(tmp_path / "out/ckptfmt", tmp_path / "hf", "--to", "hf")
    (tmp_path / "kept").rename(base / "model.safetensors")
    trainer.model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("hf", "theirs")
    )
    assert digest(ours) == digest(theirs)
    loaded = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(base), tmp_path / "hf")
    assert digest(loaded.state_dict()) == digest(trainer.model.state_dict())
    assert isinstance(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "hf"), PeftModel)
    assert ModelCard.load(tmp_path / "hf/README.md").data.library_name == "peft"
    # The weights as a whole, of the base and of the adapter.
    convert(tmp_path / "out/ckptfmt", tmp_path / "whole.safetensors")
    whole = load_file(tmp_path / "whole.safetensors")
    assert digest(whole) == digest(
        {name: value for name, value in trainer.model.state_dict().items() if "lm_head" not in name}
    )

"""The files beside the weights of a Hugging Face directory: configurations, tokenizer, model card.

The configuration of the model comes from the checkpoint's `config`: the Trainer's plug-in records
the entries ``model``, ``generation``, ``base_model`` and ``peft``; a plain loop may pass
``config={"model": model.config.to_dict()}``.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from ckptfmt.adapters.live_trees import GLOBAL
from ckptfmt.documents.manifest import Manifest
from ckptfmt.errors import Code, err
from ckptfmt_tools.convert.content import Content, Tensor

CARD_NAME: Final = "README.md"
CONFIG_NAME: Final = "config.json"
_GENERATION_NAME: Final = "generation_config.json"
#: Endings of the files of configurations and tokenizers.
_SUFFIXES: Final = (".jinja", ".json", ".model", ".tiktoken", ".txt")
#: JSON files of a directory that don't describe model or tokenizer.
_NOT_COPIED: Final = ("adapter_", "ckptfmt.json", "trainer_state.json")
_FLOATS: Final = frozenset({"bfloat16", "float16", "float32", "float64"})
#: Packages that the card names with their versions.
_PACKAGES: Final = ("torch", "transformers", "peft", "ckptfmt")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """What the caller says about a Hugging Face directory.

    Attributes:
        max_shard_nbytes: greatest size of a file.
        like: a directory whose configuration and tokenizer files are copied; None to copy nothing.
        card: ``KEY=VALUE`` for the head of the model card; several values of a key make a list.
    """

    max_shard_nbytes: int
    like: str | None = None
    card: tuple[str, ...] = ()


def recorded(content: Content, key: str) -> Any:
    """Return an entry of the configuration in a checkpoint; None without the entry.

    A configuration with ``model_type`` is the model's own.
    """
    tree = content.leaves.get(("config", "", GLOBAL))
    if not isinstance(tree, dict):
        return None
    return tree if key == "model" and "model_type" in tree else tree.get(key)


def plan_files(
    content: Content, tensors: Iterable[Tensor], options: HubOptions, *, adapter: bool = False
) -> dict[str, bytes]:
    """Return name and content of the files beside the weights.

    Args:
        tensors: the tensors of the directory; their dtype becomes the configuration's.
        adapter: whether the directory has an adapter, and no model.

    Raises: StateError(ARGUMENT).
    """
    card = _parse_card(options.card)
    files = {} if options.like is None else _copies(Path(options.like))
    model = recorded(content, "model")
    if adapter:
        files.pop(CONFIG_NAME, None)
        files.pop(_GENERATION_NAME, None)
    elif (isinstance(model, dict) and "model_type" in model) or CONFIG_NAME in files:
        there = json.loads(files.get(CONFIG_NAME, b"{}"))
        own = {name: value for name, value in (model or {}).items() if name != "_name_or_path"}
        found = {**there, **own}
        found.pop("torch_dtype", None)  # the name of dtype in earlier versions
        dtype = _dtype_of(tensors)
        files[CONFIG_NAME] = _dump({**found, **({} if dtype is None else {"dtype": dtype})})
        generation = recorded(content, "generation")
        if isinstance(generation, dict):
            told = {name: value for name, value in generation.items() if value is not None}
            files[_GENERATION_NAME] = _dump(told)
    if content.manifest is not None or card:
        library = "peft" if adapter else "transformers" if CONFIG_NAME in files else None
        files[CARD_NAME] = _card(content, library, card).encode()
    return files


def _copies(like: Path) -> dict[str, bytes]:
    """Return the files of configurations and tokenizer of a directory."""
    try:
        paths = [path for path in sorted(like.iterdir()) if path.is_file()]
    except OSError as error:
        raise err(Code.ARGUMENT, error.strerror or str(error), where=f"--like {like}") from None
    return {
        path.name: path.read_bytes()
        for path in paths
        if path.suffix in _SUFFIXES
        and not path.name.startswith((".", *_NOT_COPIED))
        and not path.name.endswith(".index.json")
    }


def _dtype_of(tensors: Iterable[Tensor]) -> str | None:
    """Return the floating dtype of most bytes; None without floating numbers."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in _FLOATS:
            counts[tensor.dtype] += tensor.nbytes
    return counts.most_common(1)[0][0] if counts else None


def _dump(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _parse_card(texts: Iterable[str]) -> dict[str, str | list[str]]:
    """Return the entries of a card's head. Raises: StateError(ARGUMENT)."""
    found: dict[str, list[str]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier() or not value:
            remedy = "Such as --card license=mit."
            raise err(Code.ARGUMENT, f"{text!r} isn't KEY=VALUE", where="--card", remedy=remedy)
        found.setdefault(key, []).append(value)
    return {
        key: values if key in ("tags", "datasets") or len(values) > 1 else values[0]
        for key, values in found.items()
    }


def _card(content: Content, library: str | None, given: Mapping[str, str | list[str]]) -> str:
    """Return a model card: a head in YAML, and a table of the checkpoint's facts."""
    head: dict[str, object] = {}
    base = recorded(content, "base_model")
    if library is not None:
        head["library_name"] = library
    if isinstance(base, str):
        head["base_model"] = base
    tags = given.get("tags", [])
    head |= {**given, "tags": ["ckptfmt", *tags]}
    # JSON is YAML.
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", ""]
    manifest = content.manifest
    if manifest is None:
        return "\n".join(lines)
    origin = manifest.origin
    lines += [
        f"# Step {origin.step}",
        "",
        "Made by `ckptfmt convert`, which compared every byte with its digest.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in _facts(content, manifest)),
        "",
    ]
    return "\n".join(lines)


def _facts(content: Content, manifest: Manifest) -> list[tuple[str, str]]:
    origin = manifest.origin
    absent = [field for field, summary in manifest.fields.items() if summary.reason]
    provenance = content.leaves.get(("provenance", "", GLOBAL))
    packages = provenance.get("packages") if isinstance(provenance, dict) else None
    claim = f"S1 at most, without {', '.join(absent)}" if absent else "T1 at most"
    labels = manifest.labels
    saved = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.saved_unix_s))
    facts = [
        ("run", origin.run_id or "none"),
        ("launch", str(origin.launch)),
        ("step", str(origin.step)),
        ("saved", saved),
        ("checkpoint", manifest.digest),
        ("claim of a resume", claim),
        ("tags", ", ".join(labels.tags)),
        *((name, str(value)) for name, value in sorted(labels.metrics.items())),
    ]
    if isinstance(packages, dict):
        facts += [(name, str(packages[name])) for name in _PACKAGES if name in packages]
    return [(name, value) for name, value in facts if value]


def _cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")

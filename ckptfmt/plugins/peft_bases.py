"""Find the files from which the base model of adapters was loaded, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

_FILES: Final = (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME)


def has_adapters(model: Any) -> bool:
    """Return whether a model has adapters of PEFT, around the model or in the model."""
    return bool(getattr(model, "peft_config", None))


def names_of_base(model: Any) -> list[str]:
    """Return the directories or names of the hub from which a model with adapters was loaded."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(whole, "config", None)
    adapters = [one.base_model_name_or_path for one in model.peft_config.values()]
    names = [getattr(config, "_name_or_path", None), *adapters]
    return list(dict.fromkeys(name for name in names if name))


def find_base(model: Any) -> str | None:
    """Return the directory with the safetensors files of the base of a model with adapters.

    A name of the hub is looked up in the cache, at the revision from which the model was loaded.
    Nothing is downloaded.

    Returns: None if no directory has all files.
    """
    config = getattr(model, "config", None)
    revision = getattr(config, "_commit_hash", None)
    for name in names_of_base(model):
        for file in _FILES:
            path = _find_file(name, file, revision)
            if path is not None and all((path.parent / one).is_file() for one in _shards(path)):
                return str(path.parent)
    return None


def _find_file(name: str, file: str, revision: str | None) -> Path | None:
    """Return the path of a file of a model, without resolving the links of the hub's cache."""
    if Path(name).is_dir():
        path = Path(name, file).absolute()
        return path if path.is_file() else None
    try:
        found = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:  # the path of a directory that isn't there
        return None
    return Path(found) if isinstance(found, str) else None


def _shards(path: Path) -> list[str]:
    """Return the names of the files that an index names; of another file, only the file's name."""
    if path.name != SAFE_WEIGHTS_INDEX_NAME:
        return [path.name]
    return sorted(set(json.loads(path.read_text())["weight_map"].values()))

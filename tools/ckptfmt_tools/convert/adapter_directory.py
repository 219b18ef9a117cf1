"""A directory of a LoRA adapter, as PEFT reads it, from a checkpoint of a model with the adapter.

The tensors of the base aren't read. Names and files are those of PEFT's `save_pretrained`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ckptfmt_tools.convert.content import Content, LeftOut, Tensor
from ckptfmt_tools.convert.hf import Layout, list_others
from ckptfmt_tools.convert.hub import recorded

WEIGHTS_NAME: Final = "adapter_model.safetensors"
CONFIG_NAME: Final = "adapter_config.json"
#: The adapter that PEFT saves at the top; others are in a folder of their name.
_DEFAULT: Final = "default"
_OTHER: Final = "it is of the base, and a directory of an adapter has the adapter's tensors only"


def adapters_of(content: Content) -> dict[str, dict[str, Any]]:
    """Return the configurations of the adapters by name; empty if this module can't write them."""
    found = recorded(content, "peft")
    if not isinstance(found, dict) or not found:
        return {}
    is_known = all(
        isinstance(one, dict) and one.get("peft_type") == "LORA" and one.get("bias") == "none"
        for one in found.values()
    )
    return found if is_known else {}


def plan_adapters(
    content: Content, adapters: Mapping[str, dict[str, Any]], only: str | None
) -> tuple[Layout, dict[str, bytes]]:
    """Return the tensors of each adapter's file, and the configurations by file name.

    Args:
        content: the contents of a checkpoint.
        adapters: the result of `adapters_of`.
        only: the only field to convert; None for all fields.

    Raises: StateError(ARGUMENT) for another field than weights.
    """
    files: dict[str, list[tuple[str, Tensor]]] = {}
    left_out = list_others(content, only, "a directory of an adapter holds weights only")
    for tensor in content.tensors.values():
        if tensor.field != "weights":
            continue
        found = [(one, key) for one in adapters if (key := adapter_key(tensor.name, one))]
        for adapter, key in found:
            files.setdefault(_folder(adapter) + WEIGHTS_NAME, []).append((key, tensor))
        if not found and tensor.key not in content.frozen:
            left_out.append(LeftOut(f"weights:{tensor.name}", _OTHER))
    configs = {
        _folder(adapter) + CONFIG_NAME: json.dumps(
            {**config, "inference_mode": True}, indent=2, sort_keys=True
        ).encode()
        for adapter, config in adapters.items()
    }
    return Layout(files=files, left_out=left_out), configs


def _folder(adapter: str) -> str:
    return "" if adapter == _DEFAULT else f"{adapter}/"


def adapter_key(name: str, adapter: str) -> str | None:
    """Return a tensor's name in the file of an adapter; None for a tensor of the base.

    >>> adapter_key("base_model.model.q.lora_A.default.weight", "default")
    'base_model.model.q.lora_A.weight'
    >>> adapter_key("base_model.model.score.modules_to_save.default.weight", "default")
    'base_model.model.score.weight'
    >>> adapter_key("base_model.model.q.lora_magnitude_vector.default.weight", "default")
    'base_model.model.q.lora_magnitude_vector'
    >>> adapter_key("base_model.model.q.base_layer.weight", "default")
    """
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if parts[at + 1] != adapter:
            continue
        if part == "modules_to_save":
            return ".".join((*parts[:at], *parts[at + 2 :]))
        if part == "lora_magnitude_vector":
            return ".".join(parts[: at + 1])
        if part.startswith("lora_") or part == "trainable_tokens_delta":
            return ".".join((*parts[: at + 1], *parts[at + 2 :]))
    return None

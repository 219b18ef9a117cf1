"""What the tests of `convert` convert, and how they compare: bytes with bytes, of tensors and of plain values."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.adapters.live_trees import Encoder
from ckptfmt.adapters.torch.tensors import TORCH_DTYPES
from ckptfmt.box import Box
from ckptfmt.documents.tree import dump_tree
from ckptfmt.dtypes import DTYPES

#: Names that other formats might take for something else.
STRANGE_NAMES = (
    "a/b",
    "a~1b",
    "__metadata__x",
    "café.重み",
    "with space",
    "dots.in.name",
    "model.weight",
    "..",
    "~",
)


def tensor_of(dtype: str, shape: tuple[int, ...] = (3, 5), seed: int = 0) -> torch.Tensor:
    """Return a tensor of arbitrary bits, signalling NaNs and negative zeros among them."""
    count = int(np.prod(shape)) * DTYPES[dtype].nbytes
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    content = raw.tobytes()
    if dtype == "float32" and count >= 12:
        content = np.array([0x7FA00001, 0xFFC12345, 0x80000000], "<u4").tobytes() + content[12:]
    flat = (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if count
        else torch.empty(0, dtype=torch.uint8)
    )
    return flat.view(TORCH_DTYPES[dtype]).reshape(shape)


def all_dtypes() -> dict[str, torch.Tensor]:
    """Return a tensor of each dtype of the format that this torch has, with and without elements, and scalars."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "ComplexHalf is experimental"
        made = {
            f"{name}.weight": tensor_of(name, seed=number)
            for number, name in enumerate(TORCH_DTYPES)
        }
        made |= {
            f"{name}.scalar": tensor_of(name, (), seed=99)
            for name in ("float32", "int64", "bool", "bfloat16")
        }
        made |= {
            f"{name}.empty": tensor_of(name, (0, 3)) for name in ("float32", "uint8", "complex64")
        }
    return made


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and bytes of a tensor."""
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), content


def frozen(value: Any) -> Any:
    """Return what is equal for two nested values of torch exactly if all bits and kinds are."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, dict):
        return type(value).__name__, {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [frozen(item) for item in value]
    return dump_tree(Encoder(field="", scope="global").encode(value, ""), where="")


def stored(path: Any) -> dict[str, Any]:
    """Return what the fields of a checkpoint hold: tensors with dtype, shape, aliases and bytes; values as bytes."""
    with ckptfmt.open(path) as checkpoint:
        tensors = {}
        for key, tensor in checkpoint.tensors.items():
            raw = np.dtype((np.void, DTYPES[tensor.dtype].nbytes))
            array: Any = np.zeros(tensor.global_shape, raw)
            whole = Box.whole(tensor.global_shape)
            for box, content in checkpoint.iter_content(tensor, whole) if array.size else ():
                array[(*box.relative_to(whole), ...)] = np.frombuffer(content, raw).reshape(
                    box.shape
                )
            tensors[key] = (tensor.dtype, tensor.global_shape, tensor.aliases, array.tobytes())
        leaves = {key: dump_tree(checkpoint.leaf(*key), where="") for key in checkpoint.leaves}
    context = ("rng", "topology", "provenance")
    return {
        "tensors": tensors,
        "leaves": {key: leaf for key, leaf in leaves.items() if key[0] not in context},
    }


def trees(path: Any, framework: Any = "torch") -> Any:
    """Return what a checkpoint holds, by field."""
    return ckptfmt.load(path, framework=framework)


def save_dcp(state_dict: dict[str, Any], path: Any) -> Any:
    """Save with torch.distributed.checkpoint, and return the path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        save(state_dict, checkpoint_id=path, no_dist=True)
    return path


def load_dcp(state_dict: dict[str, Any], path: Any) -> dict[str, Any]:
    """Load with torch.distributed.checkpoint, in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        load(state_dict, checkpoint_id=path, no_dist=True)
    return state_dict


def convert(source: Any, target: Any, *options: str) -> dict[str, Any]:
    """Convert in this process; return what ``--json`` says, which is an error where the exit code isn't 0."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        code = main(["convert", str(source), str(target), *options, "--json"])
    said: dict[str, Any] = json.loads(output.getvalue())
    assert code == (2 if "error" in said else 0)
    return said


def done(source: Any, target: Any, *options: str) -> dict[str, Any]:
    """Convert, and see that it succeeds and that what it made of ckptfmt's is valid."""
    said = convert(source, target, *options)
    assert "error" not in said, said
    if said["target"]["kind"] == "ckptfmt":
        assert not ckptfmt.validate(target).violations
    return said


def refused(source: Any, target: Any, *options: str) -> tuple[str, dict[str, Any]]:
    """Convert, and see that it fails and leaves nothing; return the error's code and the error."""
    beside = sorted(target.parent.iterdir()) if target.parent.exists() else []
    said = convert(source, target, *options)
    assert "error" in said, said
    assert (sorted(target.parent.iterdir()) if target.parent.exists() else []) == beside, (
        "something is left"
    )
    assert said["error"]["remedy"]
    return said["error"]["code"], said["error"]


def reasons(said: dict[str, Any]) -> dict[str, str]:
    """Return what was left out, with the reasons."""
    return {entry["what"]: entry["reason"] for entry in said["left_out"]}


class Net(torch.nn.Module):
    """Tied weights, statistics, a buffer that isn't saved by torch, and extra state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.arange(3.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.norm(self.embed(ids)))


def trained(seed: int = 0) -> tuple[Net, torch.optim.AdamW, torch.optim.lr_scheduler.StepLR]:
    """Return a net with an optimizer that has state, and a scheduler."""
    net = Net(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        net(torch.arange(7)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return net, optimizer, scheduler


def state_of(net: Net, optimizer: Any, scheduler: Any) -> ckptfmt.State:
    """Return the state of a run with all of it."""
    return ckptfmt.State(
        weights=net,
        optimizer=optimizer,
        data={"position": 24, "seen": (1, 2), "shuffle": None},
        config={"lr": 1e-3, "betas": [0.9, float("nan")]},
        extra={
            "scheduler": scheduler,
            "ema": {"decay": 0.5, "shadow": torch.arange(3.0)},
            "count": 5,
        },
    )

"""Real training for delta benchmarks, with states in files, so that reruns need no training.

The demo's GPT learns the sources of Python's standard library. The base is trained once (AdamW,
1e-3), and every other setting branches off: fine-tuning at 1e-5, for example, begins with a trained
model.

Training uses a single thread: sums then don't depend on the number of threads, and a setting has
the same states on any machine with the same kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import models
from benchmarks.rounds import Progress
from benchmarks.scenes import PRETRAIN_RATE, Scene, Sizes
from benchmarks.snapshots import STEP, WEIGHT, Pair, Snapshot, Tensor, read_snapshot, write_snapshot
from ckptfmt_tools.demo.task import TinyGPT, read_text

IMPLEMENTATIONS: Final = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
_WARM_UP: Final = 20
_CLIP: Final = 0.1  # the norm's bound, below every gradient's norm, so each is scaled
_TEXT_NBYTES: Final = 4 << 20
_SEED: Final = 2026

Array = np.ndarray[Any, np.dtype[Any]]


class Studio:
    """A studio that trains the scenes, or finds the states of an earlier run.

    Args:
        scratch: the directory of the files, with a folder per set of factors that determine the
            bytes.
    """

    def __init__(self, sizes: Sizes, scratch: Path, progress: Progress) -> None:
        self._sizes = sizes
        self._progress = progress
        self._text = np.frombuffer(
            read_text(text_nbytes=_TEXT_NBYTES, chunk_nbytes=1).content, dtype=np.uint8
        )
        self._folder = scratch / f"training-{self._fingerprint()}"
        self._folder.mkdir(parents=True, exist_ok=True)

    def iter_pairs(self, scenes: Sequence[Scene]) -> Iterator[Pair]:
        """Yield each scene's pairs: a step per implementation, and pairs with later states."""
        for scene in scenes:
            for offset in scene.offsets:
                if offset in (1, self._sizes.gap):
                    names = scene.implementations if offset == 1 else scene.implementations[:1]
                    yield from (
                        self.pair(scene, 0, offset, implementation) for implementation in names
                    )

    def pair(self, scene: Scene, begin: int, end: int, implementation: str | None = None) -> Pair:
        """Return two states of a scene.

        Args:
            begin: the older state's steps after the first state.
            end: the newer state's steps after the first state.
            implementation: the step's implementation, where several exist.
        """
        told = self._train(scene)
        gap = end - begin
        implementation = implementation or scene.implementations[0]
        return Pair(
            name=f"{scene.name}-{implementation}-gap{gap}",
            kind={"adamw": "adam", "sgd": "sgd", "sparse": ""}[scene.optimizer],
            gap=gap,
            lr=scene.lr,
            options=told["options"][implementation],
            base=self.state(scene, begin),
            new=self.state(scene, end, implementation),
            gradients=self._read_gradients(scene) if (begin, end) == (0, 1) else {},
        )

    def state(self, scene: Scene, offset: int, implementation: str | None = None) -> Snapshot:
        """Return the state of a scene `offset` steps after the first state."""
        self._train(scene)
        is_first = implementation in (None, scene.implementations[0]) or offset != 1
        return read_snapshot(
            self._path(scene, f"{offset}" if is_first else f"{offset}-{implementation}")
        )

    def _path(self, scene: Scene, state: str, suffix: str = "npz") -> Path:
        told = hashlib.sha256(repr(scene).encode()).hexdigest()[
            :8
        ]  # a changed scene is another scene
        return self._folder / f"{scene.name}-{told}-{state}.{suffix}"

    def _fingerprint(self) -> str:
        """Return a name for all factors of the states: sizes, text, sources, torch, kernels."""
        sources = [
            inspect.getsource(module) for module in (models, inspect.getmodule(TinyGPT)) if module
        ]
        decisive = [
            repr(self._sizes),
            hashlib.sha256(self._text.tobytes()).hexdigest(),
            *sources,
            Path(__file__).read_text("utf-8"),
            torch.__version__,
            torch.backends.cpu.get_cpu_capability(),
        ]
        return hashlib.sha256("\n".join(decisive).encode()).hexdigest()[:16]

    def _read_gradients(self, scene: Scene) -> Mapping[str, Array]:
        state = read_snapshot(self._path(scene, "gradients"))
        return {tensor.parameter: tensor.array for tensor in state.values()}

    def _pretrain(self) -> Snapshot:
        """Return the initial state of all scenes of the GPT."""
        scene = Scene(name="pretrained", lr=PRETRAIN_RATE, settle=self._sizes.steps, offsets=())
        path = self._path(scene, "0")
        if not path.exists():
            run = _Run(self._sizes, self._text, scene)
            with _one_thread():
                for step in range(scene.settle):
                    self._progress.say(f"delta: training, step {step} of {scene.settle}")
                    run.set_rate(PRETRAIN_RATE * min(1.0, (step + 1) / _WARM_UP))
                    run.step()
            write_snapshot(path, run.capture())
        return read_snapshot(path)

    def _train(self, scene: Scene) -> dict[str, Any]:
        """Train a scene unless its states exist, and return the further facts."""
        path = self._path(scene, "told", "json")
        if not path.exists():
            with _one_thread():
                told = self._train_anew(scene)
            path.write_text(json.dumps(told), encoding="utf-8")
        read: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return read

    def _train_anew(self, scene: Scene) -> dict[str, Any]:
        run = _Run(self._sizes, self._text, scene)
        if scene.model in ("gpt", "lora"):
            run.fill(self._pretrain())
        for number in range(scene.settle):
            self._progress.say(f"delta: training {scene.name}, step {number} of {scene.settle}")
            run.step()
        told: dict[str, Any] = {"options": {}}
        first = run.capture()
        write_snapshot(self._path(scene, "0"), first)
        gradients = run.differentiate()
        write_snapshot(self._path(scene, "gradients"), gradients)
        for implementation in reversed(scene.implementations):  # the first trains on
            if len(scene.implementations) > 1:
                run.choose(implementation)
                run.fill(first)
            run.update()
            told["options"][implementation] = run.options()
            name = "1" if implementation == scene.implementations[0] else f"1-{implementation}"
            write_snapshot(self._path(scene, name), run.capture())
        for offset in range(2, max(scene.offsets) + 1):
            run.step()
            if offset in scene.offsets:
                write_snapshot(self._path(scene, str(offset)), run.capture())
        return told


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Run:
    """A model in training."""

    def __init__(self, sizes: Sizes, text: Array, scene: Scene) -> None:
        torch.manual_seed(_SEED)
        self._scene = scene
        self._text = text
        self._batch = _narrow(scene, sizes.batch)
        self._context = sizes.context
        self._random = np.random.default_rng([_SEED, *scene.name.encode()])
        self._model = make_model(sizes, scene.model)
        self._parameters = {
            name: p for name, p in self._model.named_parameters() if p.requires_grad
        }
        self._optimizers = make_optimizers(scene, self._parameters)

    def step(self) -> None:
        """Run a training step."""
        self.differentiate()
        self.update()

    def differentiate(self) -> Snapshot:
        """Compute a batch's gradients for the scene, and return the gradients before clipping."""
        tokens, self._targets = self._next_batch()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss = functional.cross_entropy(self._model(tokens).flatten(0, 1), self._targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call] # torch has no types here
        found, gradients = [], {}
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            found.append(parameter)
            if self._scene.gradients != "fp32":
                parameter.grad = parameter.grad.bfloat16().float()
            if not parameter.grad.is_sparse:
                gradients[name] = _make_tensor("gradients", name, "gradient", parameter.grad)
        if self._scene.gradients == "clipped":
            norm = nn.utils.clip_grad_norm_(found, _CLIP)
            if float(norm) <= _CLIP:
                raise RuntimeError(f"a gradient of norm {float(norm)} isn't clipped at {_CLIP}")
        return gradients

    def update(self) -> None:
        """Run a step of the optimizers with the present gradients."""
        for optimizer in self._optimizers:
            optimizer.step()
        self._model.count(self._targets)

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of all later steps."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def choose(self, implementation: str) -> None:
        """Choose another implementation of the same optimizer for the next steps."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group.update(
                    {
                        key: value
                        for key, value in IMPLEMENTATIONS[implementation].items()
                        if key in group
                    }
                )

    def options(self) -> dict[str, object]:
        """Return the scalars of the first optimizer."""
        group = self._optimizers[0].param_groups[0]
        return {name: value for name, value in group.items() if name != "params"}

    def capture(self) -> Snapshot:
        """Return a copy of the state: parameters, buffers, and the optimizers' states."""
        tensors = [
            _make_tensor("weights", name, WEIGHT, p) for name, p in self._model.named_parameters()
        ]
        tensors += [
            _make_tensor("weights", name, "buffer", b) for name, b in self._model.named_buffers()
        ]
        for name, parameter in self._parameters.items():
            for optimizer in self._optimizers:
                known = optimizer.state.get(parameter, {})
                tensors += [
                    _make_tensor("optimizer", name, role, value)
                    for role, value in known.items()
                    if isinstance(value, torch.Tensor)
                    and (role == STEP or value.shape == parameter.shape)
                ]
        return {tensor.name: tensor for tensor in tensors}

    def fill(self, state: Snapshot) -> None:
        """Restore a state; tensors missing in the state keep their values, gradients too."""
        fill(self._model, self._optimizers, state)

    def _next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        begins = self._random.integers(len(self._text) - self._context, size=self._batch)
        windows = torch.from_numpy(
            np.stack([self._text[begin : begin + self._context + 1] for begin in begins])
        ).long()
        return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def fill(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: Snapshot) -> None:
    """Fill a model and its optimizers with a state; missing tensors keep their values.

    Args:
        optimizers: the optimizers, which may have parameters of other models too.
    """
    parameters = dict(model.named_parameters())
    places = parameters | dict(model.named_buffers())
    groups = [(optimizer, optimizer.param_groups[0]) for optimizer in optimizers]
    owners = {
        id(parameter): (optimizer, group)
        for optimizer, group in groups
        for parameter in group["params"]
    }
    for tensor in state.values():
        value = torch.from_numpy(tensor.array)
        if tensor.field == "weights":
            places[tensor.parameter].copy_(value)
            continue
        parameter = parameters[tensor.parameter]
        optimizer, group = owners.get(id(parameter), (None, {}))
        if optimizer is None or (tensor.role == "momentum_buffer") != ("momentum" in group):
            continue
        known = optimizer.state[parameter]
        if tensor.role in known:
            known[tensor.role].copy_(value)
        else:
            known[tensor.role] = value.clone()


def _narrow(scene: Scene, batch: int) -> int:
    """Return the windows in a step: few for scenes that should touch few experts."""
    return max(1, batch // 4) if scene.model == "moe" else batch


def make_model(sizes: Sizes, kind: str) -> TinyGPT:
    """Return a model of a scene's kind."""
    narrow = {"moe": 2, "embedding": 4}.get(kind, 1)
    model = models.make_gpt(
        width=max(sizes.heads, sizes.width // narrow),
        layers=max(1, sizes.layers // narrow),
        heads=sizes.heads,
        context=sizes.context,
    )
    if kind == "lora":
        models.adapt(model, part=0.05)
    elif kind == "moe":
        models.split_feeds(model, experts=sizes.experts)
    elif kind == "embedding":
        models.add_table(model)
    return model


def make_optimizers(
    scene: Scene, parameters: Mapping[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a scene, for parameters by name."""
    flags: dict[str, Any] = IMPLEMENTATIONS[scene.implementations[0]]
    if scene.optimizer == "sgd":
        return [torch.optim.SGD(parameters.values(), lr=scene.lr, momentum=0.9, **flags)]
    dense = [parameter for name, parameter in parameters.items() if not name.startswith("table.")]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(dense, lr=scene.lr, **flags)]
    if scene.optimizer == "sparse":
        sparse = [parameter for name, parameter in parameters.items() if name.startswith("table.")]
        optimizers.append(torch.optim.SparseAdam(sparse, lr=scene.lr))
    return optimizers


def _make_tensor(field: str, parameter: str, role: str, value: torch.Tensor) -> Tensor:
    array = value.detach().clone().numpy()
    return Tensor(field=field, parameter=parameter, role=role, dtype=str(array.dtype), array=array)

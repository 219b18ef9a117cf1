"""States that a trainer of the campaign holds and changes, and what they are made of: bytes, whatever their dtype."""

import dataclasses
import hashlib
import random
from typing import Any, Final

import ml_dtypes
import numpy as np

import ckptfmt
from ckptfmt.box import Box

#: Dtypes, and how wide an element is, in bytes.
_DTYPES: Final = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "uint16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint32": 4,
}  # fmt: skip
#: How a tensor lies in memory: rows after rows; columns after columns; every other element of a
#: larger one; with the most significant byte first (numpy's). Or who holds it: each worker some of
#: the rows, or each worker its own.
_FORMS: Final = (
    "plain",
    "plain",
    "plain",
    "transposed",
    "strided",
    "swapped",
    "rows",
    "rows",
    "own",
)
#: What a step does to it: new bytes; some bytes; little to each element; a range of new bytes;
#: nothing.
_COURSES: Final = ("new", "some", "some", "near", "range", "still")
_WIDE_NBYTES: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One tensor: what it is, how it lies, what a step does to it, and what other name it has."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    form: str
    course: str
    alias: str | None = None

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Spec":
        """Return what `dataclasses.asdict` was asked of."""
        return cls(**{**row, "shape": tuple(row["shape"])})


def make_specs(rng: random.Random, nbytes: int, *, elastic: bool) -> list[Spec]:
    """Return the tensors of a state of about `nbytes`.

    Args:
        elastic: whether the number of workers may change, so that nobody holds anything alone.
    """
    large = nbytes > _WIDE_NBYTES
    count = rng.randint(2, 9)
    specs = []
    for number in range(count):
        dtype = rng.choice(list(_DTYPES)[: 4 if large and number < 2 else None])
        share = nbytes * (0.4 if number < 2 else 0.2 / count)
        specs.append(_make_spec(rng, f"t{number}", dtype, int(share), elastic=elastic))
    return specs


def change_specs(rng: random.Random, specs: list[Spec], *, elastic: bool) -> list[Spec]:
    """Return other tensors: one larger or smaller, one more, or one less."""
    changed = list(specs)
    at = rng.randrange(len(changed))
    what = rng.choice(("resize", "resize", "add", "remove"))
    if what == "resize":
        old = changed[at]
        nbytes = int(np.prod(old.shape)) * _DTYPES[old.dtype]
        factor = (
            rng.choice((0.3, 0.9, 1.1, 2.0))
            if nbytes < 8 * _WIDE_NBYTES
            else rng.choice((0.5, 1.1))
        )
        changed[at] = _make_spec(rng, old.name, old.dtype, int(nbytes * factor), elastic=elastic)
    elif what == "add" or len(changed) == 1:
        changed.append(
            _make_spec(rng, f"n{rng.getrandbits(32):08x}", "float32", 4000, elastic=elastic)
        )
    else:
        del changed[at]
    return changed


def _make_spec(rng: random.Random, name: str, dtype: str, nbytes: int, *, elastic: bool) -> Spec:
    element_count = max(1, nbytes // _DTYPES[dtype])
    shapes = [
        (element_count,),
        (max(1, element_count // 16), 16),
        (max(1, element_count // 21), 7, 3),
        (),
        (0, 3),
    ]
    shape = rng.choice(shapes[: 3 if nbytes > _WIDE_NBYTES else None])
    form = rng.choice([form for form in _FORMS if not (elastic and form == "own")])
    if len(shape) < 2 and form in ("transposed", "rows"):
        form = "plain"
    alias = (
        f"{name}.tied"
        if form == "plain" and shape not in ((), (0, 3)) and rng.random() < 0.2
        else None
    )
    return Spec(
        name=name, dtype=dtype, shape=shape, form=form, course=rng.choice(_COURSES), alias=alias
    )


def digest_of(content: Any) -> str:
    """Return the digest of bytes, as the log has it."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class _Rows:
    """Some rows of a tensor that several workers hold together: a source and a sink."""

    def __init__(self, spec: Spec, array: Any, begin: int) -> None:
        self.field, self.name, self.dtype, self.scope = "weights", spec.name, spec.dtype, "global"
        self.global_shape = spec.shape
        self.replica = False
        self.storage = "persistent"
        self.aliases: tuple[str, ...] = ()
        self._array = array
        rest = spec.shape[1:]
        box = Box((begin, *(0 for _ in rest)), (len(array), *rest))
        self.boxes: tuple[Box, ...] = (box,) if len(array) else ()

    def copy_into(self, box: Box, out: memoryview) -> None:
        """Copy the elements of `box` into `out`."""
        part = self._part(box)
        np.frombuffer(out, np.uint8)[:] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Take the elements of `box`."""
        part = self._part(box)
        part[...] = np.frombuffer(content, part.dtype).reshape(part.shape)

    def _part(self, box: Box) -> Any:
        return self._array[box.relative_to(self.boxes[0])]


@dataclasses.dataclass(slots=True)
class _Tensor:
    """A tensor that is held: its bytes, its elements in the order of the format, and which of them they are."""

    spec: Spec
    memory: Any
    live: Any
    rows: tuple[int, int] | None = None


class Held:
    """A state of numpy arrays, or of tensors of torch in the same memory.

    Attributes:
        state: what is saved and restored.
        specs: of its tensors.
        data: where the training stands.
    """

    def __init__(
        self, specs: list[Spec], *, worker: int, worker_count: int, framework: str, alone: bool
    ) -> None:
        self._worker, self._worker_count, self._framework = worker, worker_count, framework
        self._tensors: list[_Tensor] = []
        self._weights: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        self.data: dict[str, Any] = {"step": 0, "history": []}
        extra = {"own": ckptfmt.PerWorker(self._own)} if alone else None
        self.state = ckptfmt.State(weights=self._weights, data=self.data, extra=extra)
        self.specs: list[Spec] = []
        self.become(specs, np.random.default_rng(0))

    @property
    def step(self) -> int:
        """Training steps done."""
        step: int = self.data["step"]
        return step

    def become(self, specs: list[Spec], rng: np.random.Generator) -> None:
        """Hold other tensors; those that stay the same keep their bytes."""
        kept = {tensor.spec: tensor for tensor in self._tensors}
        seeds = rng.integers(
            1 << 32, size=len(specs)
        )  # a generator for each: not all workers hold equally many bytes
        made = zip(specs, seeds, strict=True)
        self._tensors = [
            kept.get(spec) or self._make(spec, np.random.default_rng(seed)) for spec, seed in made
        ]
        self._weights.clear()
        self._own.clear()
        for tensor in self._tensors:
            place = self._own if tensor.spec.form == "own" else self._weights
            place[tensor.spec.name] = tensor.live
            if tensor.spec.alias is not None:
                place[tensor.spec.alias] = tensor.live
        self.specs = specs

    def _make(self, spec: Spec, rng: np.random.Generator) -> _Tensor:
        shape, rows = spec.shape, None
        if spec.form == "rows":
            rows = (
                shape[0] * self._worker // self._worker_count,
                shape[0] * (self._worker + 1) // self._worker_count,
            )
            shape = (rows[1] - rows[0], *shape[1:])
        width = _DTYPES[spec.dtype] * (2 if spec.form == "strided" else 1)
        memory = np.frombuffer(bytearray(int(np.prod(shape)) * width), np.uint8)
        tensor = _Tensor(spec, memory, None, rows)
        if spec.dtype != "bool":
            memory[:] = np.frombuffer(rng.bytes(memory.nbytes), np.uint8)
        array = self._look_at(memory, spec, shape)
        tensor.live = _Rows(spec, array, rows[0]) if rows is not None else array
        return tensor

    def _look_at(self, memory: Any, spec: Spec, shape: tuple[int, ...]) -> Any:
        """Return the elements that lie in memory."""
        if self._framework == "torch" and spec.form != "rows":
            import torch  # noqa: PLC0415

            flat = torch.from_numpy(memory).view(getattr(torch, spec.dtype))
            if spec.form == "strided":
                return (
                    flat[::2].reshape(shape)
                    if len(shape) < 2
                    else flat.view(*shape[:-1], 2 * shape[-1])[..., ::2]
                )
            return (
                flat.view(shape[::-1]).permute(*reversed(range(len(shape))))
                if _flips(spec)
                else flat.view(shape)
            )
        dtype = np.dtype(getattr(ml_dtypes, spec.dtype, None) or spec.dtype)
        dtype = (
            dtype.newbyteorder(">") if spec.form == "swapped" and dtype.kind in "iufc" else dtype
        )
        flat = memory.view(dtype)
        if spec.form == "strided":
            return flat[::2].reshape(shape)
        return flat.reshape(shape[::-1]).T if _flips(spec) else flat.reshape(shape)

    def train(self, rng: np.random.Generator) -> None:
        """Do a step; with the same generator all workers do the same."""
        for tensor in self._tensors:
            mine = np.random.default_rng(
                (int(rng.integers(1 << 32)), tensor.rows[0] if tensor.rows else 0)
            )
            _change(tensor, mine)
        self.data["step"] += 1
        self.data["history"].append(float(rng.random()))
        del self.data["history"][:-50]

    def describe(self) -> dict[str, Any]:
        """Return what there is now, as the log has it: of each tensor dtype, shape, a range of its bytes, and its
        digest.
        """
        tensors = {}
        for tensor in self._tensors:
            spec, content = tensor.spec, self._content(tensor)
            row_nbytes = int(np.prod(spec.shape[1:])) * _DTYPES[spec.dtype]
            begin = tensor.rows[0] * row_nbytes if tensor.rows is not None else 0
            prefix = f"optimizer:lw/{self._worker}/extra/own" if spec.form == "own" else "weights:"
            row = [spec.dtype, list(spec.shape), begin, begin + content.nbytes, digest_of(content)]
            for name in filter(None, (spec.name, spec.alias)):
                tensors[f"{prefix}/{name}" if spec.form == "own" else f"{prefix}{name}"] = row
        values = {f"data:{key}": repr(value) for key, value in self.data.items()}
        return {"tensors": tensors, "values": values}

    def _content(self, tensor: _Tensor) -> Any:
        """Return the bytes of the elements as the format has them."""
        live = tensor.live._array if isinstance(tensor.live, _Rows) else tensor.live
        if not isinstance(live, np.ndarray):
            import torch  # noqa: PLC0415

            return live.contiguous().reshape(-1).view(torch.uint8).numpy()
        return (
            np.ascontiguousarray(live, dtype=live.dtype.newbyteorder("<"))
            .reshape(-1)
            .view(np.uint8)
        )

    def meddle(self) -> None:
        """Change something at a moment at which a program shouldn't; nothing here is copied beside the training."""


def _flips(spec: Spec) -> bool:
    return spec.form == "transposed" and len(spec.shape) > 1


def _change(tensor: _Tensor, rng: np.random.Generator) -> None:
    memory, course = tensor.memory, tensor.spec.course
    if not memory.nbytes or course == "still":
        return
    if course == "new":
        memory[:] = np.frombuffer(rng.bytes(memory.nbytes), np.uint8)
    elif course == "some":
        places = rng.integers(0, memory.nbytes, max(1, memory.nbytes // 500))
        memory[places] = np.frombuffer(rng.bytes(len(places)), np.uint8)
    elif course == "near" and memory.nbytes % 2 == 0:
        words = memory.view(np.uint16)
        words[:: 2 if memory.nbytes % 4 == 0 else 1] += rng.integers(0, 3, dtype=np.uint16)
    else:
        begin = int(rng.integers(memory.nbytes))
        part = memory[begin : begin + max(1, memory.nbytes // 10)]
        part[:] = np.frombuffer(rng.bytes(part.nbytes), np.uint8)
    if tensor.spec.dtype == "bool":
        memory &= 1


class TorchHeld(Held):
    """A module with its optimizer: what it saves is copied beside the next step."""

    def __init__(self, specs: list[Spec]) -> None:
        import torch  # noqa: PLC0415

        self._torch = torch
        self.specs = specs
        self.module = torch.nn.Module()
        generator = torch.Generator().manual_seed(1)
        for number, spec in enumerate(specs):
            tensor = torch.randn(spec.shape, generator=generator).to(
                torch.bfloat16 if number % 3 == 2 else None
            )
            if spec.course == "still":
                self.module.register_buffer(spec.name, tensor)
            else:
                self.module.register_parameter(spec.name, torch.nn.Parameter(tensor))
                if spec.alias is not None:
                    self.module.register_parameter(
                        spec.alias.replace(".", "_"), getattr(self.module, spec.name)
                    )
        parameters = [*self.module.parameters()] or [torch.nn.Parameter(torch.zeros(3))]
        if not [*self.module.parameters()]:
            self.module.register_parameter("only", parameters[0])
        kinds: dict[str, Any] = {"new": torch.optim.AdamW, "some": torch.optim.Adam}
        kind = kinds.get(specs[0].course)
        self.optimizer: Any = (
            kind(parameters, lr=1e-3) if kind else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        )
        self.data = {"step": 0, "history": []}
        self.state = ckptfmt.State(weights=self.module, optimizer=self.optimizer, data=self.data)

    def become(self, specs: list[Spec], rng: np.random.Generator) -> None:
        """Stay as it is: a module's tensors are those that it was made with."""

    def train(self, rng: np.random.Generator) -> None:
        """Do a step; with the same generator all workers do the same."""
        generator = self._torch.Generator().manual_seed(int(rng.integers(1 << 32)))
        for parameter in self.module.parameters():
            parameter.grad = self._torch.randn(parameter.shape, generator=generator).to(
                parameter.dtype
            )
        self.optimizer.step()
        self.data["step"] += 1
        self.data["history"].append(float(rng.random()))

    def describe(self) -> dict[str, Any]:
        """Return what there is now, as the log has it."""
        tensors = {f"weights:{name}": tensor for name, tensor in self.module.state_dict().items()}
        for name, parameter in self.module.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    tensors[f"optimizer:state/{name}/{key}"] = value
        values = {f"data:{key}": repr(value) for key, value in self.data.items()}
        return {
            "tensors": {name: self._row(tensor) for name, tensor in tensors.items()},
            "values": values,
        }

    def _row(self, tensor: Any) -> list[Any]:
        content = tensor.detach().contiguous().reshape(-1).view(self._torch.uint8).numpy()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return [dtype, list(tensor.shape), 0, content.nbytes, digest_of(content)]

    def meddle(self) -> None:
        """Write to parameters by other means than the optimizer's step, while they may be being copied."""
        with self._torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(1)


def hold(
    specs: list[Spec], *, worker: int, worker_count: int, framework: str, alone: bool = False
) -> Held:
    """Return a state: of ``numpy`` arrays, of tensors of ``torch``, or of a ``module`` and its optimizer.

    Args:
        alone: whether a worker may hold something that is its alone.
    """
    if framework == "module":
        return TorchHeld(specs)
    return Held(specs, worker=worker, worker_count=worker_count, framework=framework, alone=alone)

"""The state of a transformer under AdamW, divided among thousands of ranks, without an element.

The ranks form a mesh of FSDP and tensor parallelism, as PyTorch's DTensors do: the matrices of a
layer's entry are cut by rows in both dimensions of the mesh, those of its exit by columns in the
dimension of tensor parallelism, and vectors are replicated there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from benchmarks.fleet import Wanted
from ckptfmt.box import Box
from ckptfmt.documents.part import Leaf, RngStream
from ckptfmt.documents.tree import dump_tree
from ckptfmt.write.snapshot import Snapshot

_ELEMENT_NBYTES: Final = 4
#: Tensors of a parameter: field, and name for the name of the parameter.
_TENSORS: Final = (
    ("weights", "{}"),
    ("optimizer", "state/{}/exp_avg"),
    ("optimizer", "state/{}/exp_avg_sq"),
)
#: Size of the state of torch's generator on the CPU, in bytes.
_RNG_NBYTES: Final = 5056


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A mesh of ranks: `ranks` in all, `across` of them in each group of tensor parallelism."""

    ranks: int
    across: int = 1

    def place(self, rank: int) -> tuple[int, int]:
        """Return the rank's place in FSDP and in tensor parallelism."""
        return divmod(rank, self.across)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A transformer's state: float32 weights, and both moments of AdamW."""

    name: str
    layers: int
    width: int
    vocabulary: int

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield name, shape and cut (`entry`, `exit` or `vector`) of each parameter."""
        width = self.width
        yield "embedding.weight", (self.vocabulary, width), "entry"
        for layer in range(self.layers):
            name = f"layers.{layer}"
            yield f"{name}.attention.wqkv.weight", (3 * width, width), "entry"
            yield f"{name}.attention.wo.weight", (width, width), "exit"
            yield f"{name}.feed_forward.w1.weight", (4 * width, width), "entry"
            yield f"{name}.feed_forward.w2.weight", (width, 4 * width), "exit"
            yield f"{name}.attention_norm.weight", (width,), "vector"
            yield f"{name}.ffn_norm.weight", (width,), "vector"
        yield "norm.weight", (width,), "vector"
        yield "output.weight", (self.vocabulary, width), "entry"

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return len(_TENSORS) * sum(1 for _ in self.parameters())

    @property
    def nbytes(self) -> int:
        """Size of the state in bytes."""
        whole = (Box.whole(shape).element_count for _, shape, _ in self.parameters())
        return len(_TENSORS) * _ELEMENT_NBYTES * sum(whole)

    def hold(self, mesh: Mesh, rank: int) -> tuple[Wanted, ...]:
        """Return a rank's box of each tensor; a rank without elements of a tensor has none."""
        held = []
        boxes: dict[tuple[tuple[int, ...], str], Box] = {}  # few differ: layers are alike
        for name, shape, cut in self.parameters():
            box = boxes.get((shape, cut)) or _cut(shape, cut, mesh, rank)
            boxes[shape, cut] = box
            replica = cut == "vector" and mesh.across > 1
            for field, form in _TENSORS:
                held.append(
                    Wanted(
                        field=field,
                        name=form.format(name),
                        global_shape=shape,
                        boxes=(box,) if all(box.shape) else (),
                        replica=replica,
                    )
                )
        return tuple(held)

    def snapshot(self, mesh: Mesh, rank: int) -> Snapshot:
        """Return a rank's contribution to a save, with an RNG stream and the configuration."""
        held = self.hold(mesh, rank)
        state = rank.to_bytes(8, "little") * (_RNG_NBYTES // 8)
        config = dataclasses.asdict(self)
        return Snapshot(
            tensors=held,
            streams=(
                RngStream(
                    name="cpu",
                    scope=f"lw/{rank}",
                    kind="torch-cpu",
                    state=dump_tree(state, where="rng"),
                ),
            ),
            leaves=(
                Leaf(field="config", name="", scope="global", value=dump_tree(config, where="")),
            ),
            absent=dict.fromkeys(("data", "topology", "provenance"), "simulated"),
            declared_by={
                (one.field, one.name, one.scope): "tensor_parallel" for one in held if one.replica
            },
        )


def _cut(shape: tuple[int, ...], cut: str, mesh: Mesh, rank: int) -> Box:
    """Return a rank's box of a parameter."""
    down, across = mesh.place(rank)
    rows = (0, shape[0])
    columns = [(0, extent) for extent in shape[1:]]
    if cut == "entry":
        rows = _chunk(rows, mesh.across, across)
    if cut == "exit":
        columns = [_chunk(column, mesh.across, across) for column in columns]
    rows = _chunk(rows, mesh.ranks // mesh.across, down)
    begins, counts = zip(rows, *columns, strict=True)
    return Box(begins, counts)


def _chunk(interval: tuple[int, int], count: int, number: int) -> tuple[int, int]:
    """Return begin and length of a chunk of an interval, by the rule of `torch.chunk`."""
    begin, extent = interval
    each = -(-extent // count)
    first = min(extent, number * each)
    return begin + first, min(each, extent - first)

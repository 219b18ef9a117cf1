"""Deltas with their bases: a full checkpoint, and checkpoints derived from the full checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conformance.generate.bases import RUN_ID
from conformance.generate.encodings import encode
from conformance.generate.model import Checkpoint, build, checkpoint_name
from conformance.generate.plans import Plan, Reference, Stored, Tensor, whole

__all__ = [
    "BASE",
    "DELTA",
    "SECOND",
    "Chain",
    "base_plan",
    "chain",
    "in_run",
    "later",
    "placed",
    "reference_to",
    "stored_as",
]

BASE, DELTA, SECOND = (checkpoint_name(step, 1) for step in (3, 4, 5))


@dataclass(slots=True)
class Chain:
    """A delta, and the files of all bases below the directories of a run."""

    delta: Checkpoint
    beside: dict[str, bytes]


def in_run(step: int, **members: Any) -> Plan:
    """Return a plan of a step of the run."""
    return Plan(run_id=RUN_ID, launch=1, step=step, attempt=f"{step:016x}", **members)


def base_plan(*tensors: Tensor, **members: Any) -> Plan:
    """Return the plan of a full checkpoint, the first of the run."""
    return in_run(3, tensors=list(tensors), **members)


def reference_to(base: Checkpoint) -> Reference:
    """Return the reference to a checkpoint of the run."""
    return Reference(name=checkpoint_name(base.plan.step, 1), digest=base.digest)


def placed(made: Checkpoint) -> dict[str, bytes]:
    """Return the files of a checkpoint, in the checkpoint's directory."""
    name = checkpoint_name(made.plan.step, 1)
    return {f"{name}/{path}": content for path, content in made.seal().items()}


def stored_as(encoding: str, tensor: Tensor, content: bytes, **members: Any) -> Tensor:
    """Return a tensor of one block with new content, encoded against the content of the base."""
    needs_base = encoding in ("same", "xor", "difference", "sparse", "classes") and not members.get(
        "predicted"
    )
    blocks = (
        []
        if encoding in ("same", "raw")
        else [encode(encoding, content, tensor.content, tensor.dtype)]
    )
    stored = Stored(
        encoding=encoding,
        **({"blocks": blocks, "reference": BASE if needs_base else None} | members),
    )
    return Tensor(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        content=content,
        field=tensor.field,
        scope=tensor.scope,
        aliases=tensor.aliases,
        pieces=[whole(tensor.shape, stored=[stored])],
    )


def later(*bases: Checkpoint, step: int = 4, **members: Any) -> Plan:
    """Return a plan with references to checkpoints of the run."""
    return in_run(step, references=[reference_to(base) for base in bases], **members)


def chain(base: Plan | Checkpoint, *tensors: Tensor, **members: Any) -> Chain:
    """Return a delta of `tensors` against `base`."""
    made = build(base) if isinstance(base, Plan) else base
    return Chain(build(later(made, tensors=list(tensors), **members)), placed(made))

"""Deltas from which the cases of spec/delta/45-deltas.md are made."""

from __future__ import annotations

from collections.abc import Callable

from conformance.generate.cases import FileMap, Page
from conformance.generate.chains import (
    BASE,
    DELTA,
    Chain,
    base_plan,
    chain,
    in_run,
    later,
    placed,
    reference_to,
    stored_as,
)
from conformance.generate.model import Edit, build
from conformance.generate.plans import Group, Piece, Reference, Stored, Tensor, whole

__all__ = [
    "BASE_SHARD",
    "BIAS",
    "NEXT",
    "PACK",
    "WEIGHT",
    "blocks",
    "blocks_backwards",
    "example",
    "reject",
    "same_of_same",
    "third_step",
    "two_writers",
]

FORM = "what a file claims has to be bounded by what is asked for, and read alike by all"
PACK = "weights-0000000000000004-00000.pack"
BASE_SHARD = f"{BASE}/weights-0000000000000003-00000.safetensors"

BIAS = Tensor(name="bias", shape=(3,))
WEIGHT = Tensor(
    name="weight",
    shape=(2, 3),
    content=bytes.fromhex("000000000000803f0000004000004040000080400000a040"),
)
NEXT = WEIGHT.content[:12] + bytes.fromhex("01004040") + WEIGHT.content[16:]
ROUNDED = b"".join(NEXT[at + 2 : at + 4] for at in range(0, 24, 4))
CAST = ["d", "kind", "cast", "copy", "bfloat16"]


def example() -> Chain:
    """Return the page's delta: an unchanged bias, a changed weight and its rounded copy."""
    copy = Tensor(
        name="weight.bfloat16",
        dtype="bfloat16",
        shape=(2, 3),
        content=ROUNDED,
        pieces=[whole((2, 3), stored=[Stored(encoding="sparse", blocks=[b"\0"], predicted=True)])],
    )
    base = base_plan(BIAS, WEIGHT)
    groups = [Group(kind="cast", rule=CAST, members=["weight", "weight.bfloat16"])]
    return chain(
        base,
        stored_as("same", BIAS, BIAS.content),
        stored_as("sparse", WEIGHT, NEXT),
        copy,
        groups=groups,
    )


def blocks() -> Chain:
    """Return a delta of a box of three blocks: unchanged, in planes, unchanged."""
    base = Tensor(name="b", dtype="uint8", shape=(9000,), content=b"\1" * 9000)
    content = base.content[:4096] + b"\2" * 4096 + base.content[8192:]
    stored = [
        Stored(encoding="same", first=0, count=1, reference=BASE),
        Stored(encoding="planes", first=1, count=1, blocks=[b"\1\2"]),
        Stored(encoding="same", first=2, count=1, reference=BASE),
    ]
    return chain(
        base_plan(base),
        Tensor(
            name="b",
            dtype="uint8",
            shape=(9000,),
            content=content,
            pieces=[whole((9000,), stored=stored)],
        ),
    )


def blocks_backwards() -> Chain:
    """Return a delta of a box of three blocks, of which the last lies first in the pack."""
    base = Tensor(name="b", dtype="uint8", shape=(9000,), content=b"\1" * 9000)
    content = b"".join(bytes([number]) * 4096 for number in (2, 3, 4))[:9000]
    stored = [
        Stored(
            encoding="planes", first=number, count=1, blocks=[bytes([1, number + 2])], place=-number
        )
        for number in range(3)
    ]
    return chain(
        base_plan(base),
        Tensor(
            name="b",
            dtype="uint8",
            shape=(9000,),
            content=content,
            pieces=[whole((9000,), stored=stored)],
        ),
    )


def third_step(link: Chain) -> Chain:
    """Return step 5: the bias is taken from step 3, the weight is changed from step 4."""
    base = Reference(
        name=BASE, digest=bytes.fromhex(link.delta.manifest["references"][0]["digest"][7:])
    )
    moved = NEXT[:-4] + bytes.fromhex("0000c040")
    weight = Tensor(name="weight", shape=(2, 3), content=NEXT)
    tensors = [
        stored_as("same", BIAS, BIAS.content),
        stored_as("sparse", weight, moved, reference=DELTA),
    ]
    plan = in_run(5, tensors=tensors, references=[base, reference_to(link.delta)])
    return Chain(build(plan), link.beside | placed(link.delta))


def same_of_same() -> Chain:
    """Return step 5 with a block equal to step 4's, which in turn equals step 3's."""
    base = build(base_plan(BIAS))
    middle = chain(base, stored_as("same", BIAS, BIAS.content))
    last = later(
        base, middle.delta, step=5, tensors=[stored_as("same", BIAS, BIAS.content, reference=DELTA)]
    )
    return Chain(build(last), middle.beside | placed(middle.delta))


def two_writers() -> Chain:
    """Return a delta of two writers, of which the first has a full part."""
    base = build(base_plan(BIAS))
    full = Tensor(name="full", shape=(2,), pieces=[whole((2,), 0)])
    delta = Tensor(
        name="bias",
        shape=(3,),
        pieces=[
            Piece(
                writer=1,
                begin=(0,),
                shape=(3,),
                stored=[Stored(encoding="sparse", blocks=[b"\0"], reference=BASE)],
            )
        ],
    )
    # The base has only a part from writer 0: the writer of a box may change from step to step.
    return Chain(build(later(base, tensors=[full, delta], writer_count=2)), placed(base))


def reject(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, link: Chain, edit: Edit | None, clauses: str, error: str, says: str, *,
    why: str = FORM,
    bug: str = "AMBIGUITY", phase: str = "open", after: Callable[[FileMap], object] | None = None,
    of: str = "example", beside: FileMap | None = None,
) -> None:  # fmt: skip
    """Add a delta that differs from a valid delta by one edit and has to be refused."""
    made.reject(
        slug,
        of,
        edit,
        clauses,
        error,
        says,
        why=why,
        bug=bug,
        phase=phase,
        after=after,
        place=DELTA,
        beside=link.beside if beside is None else beside,
    )

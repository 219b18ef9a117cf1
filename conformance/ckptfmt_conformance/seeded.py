"""Questions drawn by a seed. An adapter can't have the answers in a table.

A released case is a public file with its answer. For drawn questions, the tensors of released
cases get other bytes with matching digests, and new boxes are drawn. The suite's own reader
computes the expected answers. A report names the seed, and the same seed draws the same questions.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from ckptfmt_conformance.cases import Case, Expectation
from ckptfmt_conformance.perturb import perturb
from ckptfmt_conformance.readback import ReadbackError, read_back, read_contents

__all__ = ["PREFIX", "SEEDED", "draw_cases"]

#: The prefix of the ids of drawn cases.
PREFIX: Final = "seeded/"
#: The name of the drawn cases as a group.
SEEDED: Final = "seeded"
#: The number of drawn checkpoints, and the largest number of boxes in a question.
_CHECKPOINTS: Final = 24
_BOXES: Final = 5

Box = list[list[int]]


def draw_cases(cases: Sequence[Case], seed: int) -> tuple[Case, ...]:
    """Return drawn questions about checkpoints of `cases`.

    Each drawn checkpoint gets an `open`, a `read` and a `reshard`.
    """
    rng = random.Random(seed)
    spec = max((case.spec for case in cases), key=_version, default="")
    sources = [case for case in cases if case.spec == spec and _is_source(case)]
    rng.shuffle(sources)
    drawn: list[Case] = []
    for source in sources:
        if len(drawn) < 3 * _CHECKPOINTS:
            drawn += _draw_about(source, rng)
    return tuple(drawn)


def _is_source(case: Case) -> bool:
    is_plain = (
        not case.features and not set(case.request or {}) - {"verify"} and "reader" in case.roles
    )
    return (
        case.kind == "open"
        and case.expect.outcome == "accept"
        and is_plain
        and "tensors" in case.expect.members
    )


def _version(spec: str) -> tuple[int, ...]:
    return tuple(int(number) for number in spec.split(".") if number.isdigit())


def _draw_about(source: Case, rng: random.Random) -> Iterator[Case]:
    """Yield the questions about a checkpoint.

    Yield none for a checkpoint without elements, or with another profile than `full`.
    """
    with tempfile.TemporaryDirectory(prefix="ckptfmt-conformance-") as folder:
        root = source.write_files(Path(folder))
        try:
            perturb(root, rng)
            contents = read_contents(root)
            tensors = read_back(root)["tensors"]
        except ReadbackError:
            return
        files = {name: (Path(folder) / name).read_bytes() for name in source.files}
    names = sorted(name for name, (_, _, content) in contents.items() if content)
    if not names:
        return
    common: dict[str, Any] = {
        "requirements": source.requirements or ("REQ-OPN-005",),
        "spec": source.spec,
        "profiles": source.profiles,
        "derived_from": source.id,
        "path": source.path,
        "bug_class": "WRONG_BYTES",
        "why": "a table of answers reads no checkpoint",
        "files": files,
    }
    name = rng.choice(names)
    place = source.id.replace("/", "-")
    boxes = [_draw_box(contents[name][1], rng) for _ in range(rng.randint(2, _BOXES))]
    digests = [_digest_of(contents[name], box) for box in boxes]
    for kind, request, members in (
        ("open", source.request, {"tensors": tensors}),
        ("read", {"tensor": name, "box": boxes[0]}, {"blake3": digests[0]}),
        ("reshard", {"tensor": name, "boxes": boxes}, {"digests": digests}),
    ):
        yield Case(
            id=f"{PREFIX}{kind}/{place}",
            description=f"{source.id} with bytes that the seed drew",
            kind=kind,
            request=request,
            expect=Expectation(outcome="accept", members=members),
            **common,
        )


def _digest_of(tensor: tuple[int, tuple[int, ...], bytes], box: Box) -> str:
    width, shape, content = tensor
    array = np.frombuffer(content, np.uint8).reshape((*shape, width))
    return blake3(array[tuple(slice(*side) for side in box)].tobytes()).hexdigest()


def _draw_box(shape: tuple[int, ...], rng: random.Random) -> Box:
    return [sorted(rng.sample(range(extent + 1), 2)) for extent in shape]

"""Costs of signatures: milliseconds that a signature adds to a save, and a required one to an open.

A signature is of the manifest alone, so that its cost shouldn't depend on the state: three states
are compared, one of them with a million tensors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import torch

import ckptfmt
from benchmarks.figures import summarize
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, remove
from tests.signing.keys import write_key

_ROUNDS: Final = 5
_SMALL_NBYTES: Final = 1_000_000
_TENSORS: Final = 64
_MANY: Final = 1_000_000
_GOAL: Final = "<= 10"


def measure_signing(
    nbytes: int, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Save and open each state in each round, signed."""
    rounds = rounds or _ROUNDS
    keys = place.fresh("keys")
    keys.mkdir()
    private, public = write_key(keys)
    trust = ckptfmt.Trust(keys=[public])
    states = {
        "1_MB": _state(_SMALL_NBYTES, _TENSORS),
        f"{nbytes // 1_000_000}_MB": _state(nbytes, _TENSORS),
        "million_tensors": _state(4 * _MANY, _MANY),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for name, state in states.items():
        for number in range(rounds):
            progress.say(f"signing: {name}, round {number + 1}")
            path = place.fresh("signed")
            with _timed(ckptfmt.Signer, "sign") as seconds:
                begin_s = time.perf_counter()
                ckptfmt.save(path, state, step=1, sign=private)
                save_s = time.perf_counter() - begin_s
            with _timed(ckptfmt.Trust, "check") as check_seconds:
                ckptfmt.open(path, require_signature=trust).close()
            row = {
                "sign_ms": sum(seconds) * 1e3,
                "save_ms": save_s * 1e3,
                "check_ms": sum(check_seconds) * 1e3,
                "manifest_nbytes": (path / "manifest.json").stat().st_size,
                "bundle_nbytes": next(path.glob("signature-*")).stat().st_size,
            }
            found.setdefault(name, []).append(row)
            remove(path)
    figures = {
        f"{key}_of_{name}": summarize([row[key] for row in rows])
        for name, rows in found.items()
        for key in rows[0]
    }
    return Outcome(
        workload={"nbytes": nbytes, "tensors": _MANY, "state": "a module of torch, float32"},
        settings={"ckptfmt": {"saver": "ckptfmt.save", "key": "P-256"}},
        repeats=dict.fromkeys(found, rounds),
        rounds=found,
        figures=figures,
        ratios={},
        goals={f"sign_ms_of_{name}": _GOAL for name in found},
        memory={},
        notes={
            "sign_ms": "from the manifest to the durable signature, within the save",
            "check_ms": "of an open with require_signature=, in addition to the open",
            "save_ms": "the whole save, signature included",
        },
    )


def _state(nbytes: int, count: int) -> ckptfmt.State:
    elements = max(1, nbytes // 4 // count)
    values = torch.arange(count * elements, dtype=torch.float32).reshape(count, elements)
    return ckptfmt.State(weights=torch.nn.ParameterList(values.unbind()))


@contextlib.contextmanager
def _timed(owner: type, name: str) -> Iterator[list[float]]:
    """Collect the seconds of each call of a method."""
    right = getattr(owner, name)
    seconds: list[float] = []

    def timed(*arguments: Any, **keywords: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return right(*arguments, **keywords)
        finally:
            seconds.append(time.perf_counter() - begin_s)

    with mock.patch.object(owner, name, timed):
        yield seconds

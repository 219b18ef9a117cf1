"""Mutants of saves: of which moment they are, what is said of them and when, and what keeps their bases."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

from ckptfmt.adapters.torch import guard
from ckptfmt.adapters.torch.guard import Guard
from ckptfmt.commit import decision as commit
from ckptfmt.delta import base, chain
from ckptfmt.documents.canonical import parse_document
from ckptfmt.documents.manifest import Origin, Reference, pins_path
from ckptfmt.documents.run import Pins, RunRecord
from ckptfmt.loop import launching
from ckptfmt.saving.saver import Saver
from ckptfmt.store.protocol import Store
from ckptfmt.write.slot_contents import FillProgress
from tests.mutants.mutant import Mutant, replaced

#: What a saver says too early, one state ahead.
_AHEAD = {"STAGED": "WRITTEN", "WRITTEN": "COMMITTED"}


@contextlib.contextmanager
def _nobody_waits() -> Iterator[None]:
    with (
        mock.patch.object(Guard, "_wait_for", return_value=None),
        mock.patch.object(guard._CheckedCopy, "_check", return_value=None),
    ):
        yield


def _say_ahead(right: Any, self: Saver, number: int, state: str, told: dict[str, Any]) -> None:
    right(self, number, state, told)
    if state in _AHEAD:
        right(
            self,
            number,
            _AHEAD[state],
            {"digest": "", "nbytes": 0, "profile": "full", "stored_nbytes": 0},
        )


def _pin_the_base_alone(
    right: Any, store: Store, origin: Origin, writer: int, given: base.Base, **known: Any
) -> Any:
    own = replaced(
        base, "Pins", lambda pins, **members: pins(**{**members, "references": (given.reference,)})
    )
    with own():
        return right(store, origin, writer, given, **known)


def _look_then_pin(
    right: Any, store: Store, origin: Origin, writer: int, given: base.Base, **known: Any
) -> Any:
    for reference in {given.reference, *given.manifest.references}:
        commit.check_base(store, reference)
    with mock.patch.object(base, "check_base"):
        references: tuple[Reference, ...] = right(store, origin, writer, given, **known)
    return references


def _as_if_listed(right: Any, store: Store, *, writer_features: tuple[str, ...]) -> RunRecord:
    run: RunRecord = right(store, writer_features=writer_features)
    return dataclasses.replace(run, writer_features=writer_features)


def _parse_anywhere(right: Any, content: bytes, *, where: str) -> Pins:
    signed, _ = parse_document(content, where=where, types=("pins",))
    pins: Pins = right(content, where=pins_path(signed["attempt"], signed["writer"]))
    return pins


MUTANTS = {
    "written_to_and_saved": Mutant(
        clauses=("REQ-CMT-028",),
        fault="doesn't look whether a tensor was written to before it was copied",
        patch=replaced(guard._CheckedCopy, "_check", lambda *_: None),
        tests=(
            "overlap/test_guard.py::test_what_is_written_to_before_its_copy_fails_the_save[by_one_element]",
            "overlap/test_guard.py::test_what_is_written_to_before_its_copy_fails_the_save[by_data]",
        ),
    ),
    "steps_while_it_copies": Mutant(
        clauses=("REQ-CMT-028",),
        fault="copies beside the training, whose next step doesn't wait",
        patch=_nobody_waits,
        tests=(
            "overlap/test_trainings.py::test_no_value_is_from_after_the_call[SGD with momentum]",
        ),
    ),
    "part_before_the_snapshot": Mutant(
        clauses=("REQ-CMT-029",),
        fault=(
            "creates the part when all bytes are there, and may still turn out not to be of one"
            " moment"
        ),
        patch=replaced(FillProgress, "wait_complete", lambda *_: None),
        tests=(
            "saver/test_saver.py::test_abandoned_save_leaves_nothing[1-1.0]",
            "saver/test_saver.py::test_states_come_in_order_each_with_what_it_promises",
        ),
    ),
    "said_one_state_ahead": Mutant(
        clauses=("REQ-CMT-030",),
        fault="says WRITTEN and COMMITTED when that begins",
        patch=replaced(Saver, "_report", _say_ahead),
        tests=("saver/test_saver.py::test_states_come_in_order_each_with_what_it_promises",),
    ),
    "only_the_base_pinned": Mutant(
        clauses=("REQ-CMT-035",),
        fault="pins its base, and not what that one has its blocks of",
        patch=replaced(chain, "pin_base", _pin_the_base_alone),
        tests=(
            "delta/test_delta.py::test_pins_are_there_before_the_part_and_gone_after_the_commit",
        ),
    ),
    "pinned_after_the_look": Mutant(
        clauses=("REQ-CMT-035",),
        fault="sees that its bases stand, and pins them then",
        patch=replaced(chain, "pin_base", _look_then_pin),
        tests=("delta/test_delta.py::test_a_base_that_is_condemned_once_it_is_pinned_is_not_used",),
    ),
    "deltas_in_any_run": Mutant(
        clauses=("REQ-CMT-036",),
        fault="takes every run for one that lists references",
        patch=replaced(launching, "open_run", _as_if_listed),
        tests=("save/test_deltas.py::test_a_run_that_was_begun_without_deltas_refuses_them",),
    ),
    "pins_of_the_first_writer": Mutant(
        clauses=("REQ-CMT-037",),
        fault="says in every writer's pins that they are writer 0's",
        patch=replaced(base, "Pins", lambda pins, **members: pins(**{**members, "writer": 0})),
        tests=("delta/test_delta.py::test_each_writer_has_pins_of_its_own",),
    ),
    "pins_of_anybody": Mutant(
        clauses=("REQ-CMT-037",),
        fault="doesn't compare pins with their file's name",
        patch=replaced(Pins, "parse", _parse_anywhere),
        tests=(
            "documents/test_deltas.py::test_wrong_pins_are_refused[another writer]",
            "documents/test_deltas.py::test_wrong_pins_are_refused[another attempt]",
        ),
    ),
}

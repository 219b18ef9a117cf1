"""Mutants of readers, of what no file shows: what is read, in which order, how much at once, by what arithmetic."""

from __future__ import annotations

from typing import Any

from ckptfmt import limits
from ckptfmt.codecs import prediction as codec
from ckptfmt.documents.manifest import part_path
from ckptfmt.loading import agreement
from ckptfmt.read import decoding, files
from ckptfmt.run import lineage
from tests.mutants.mutant import Mutant, replaced


def _parts_too(right: Any, store: Any, manifest: Any, known: Any) -> Any:
    index = right(store, manifest, known)
    for number in range(len(index.parts)):
        store.read(part_path(manifest.origin.attempt, number), limit_nbytes=limits.MSGPACK_NBYTES)
    return index


def _without_limit(right: Any, ranges: Any, **members: Any) -> Any:
    return right(ranges, **{**members, "request_nbytes": 1 << 60})


def _listed_once(_right: Any, store: Any, run: Any, **_: Any) -> Any:
    return [lineage._read_entry(store, place, run.run_id) for place in lineage.list_places(store)]


MUTANTS = {
    "parts_read_at_opening": Mutant(
        clauses=("REQ-OPN-002",),
        fault="reads all parts when a checkpoint is opened",
        patch=replaced(files, "read_index", _parts_too),
        tests=("read/test_reader.py::test_a_row_reads_the_blocks_that_have_it_and_no_others",),
    ),
    "register_read_once": Mutant(
        clauses=("REQ-OPN-013",),
        fault="reports damage without reading the register again",
        patch=replaced(files, "is_current", lambda _right, _store, _digest: True),
        tests=(
            "read/test_replaced.py::test_a_save_that_replaces_at_any_moment_is_no_damage[load]",
            "read/test_replaced.py::test_a_save_that_replaces_at_any_moment_is_no_damage[validate]",
            "read/test_replaced.py::test_what_is_open_and_was_replaced_says_so_and_never_mixes",
        ),
    ),
    "tensors_of_two_checkpoints": Mutant(
        clauses=("REQ-OPN-014",),
        fault="loads a checkpoint on top of a part of the one that it replaced, whatever that had",
        patch=replaced(agreement, "_check_filled", lambda _right, _checkpoint, _filled: None),
        tests=("read/test_replaced.py::test_a_state_never_has_tensors_of_two_checkpoints",),
    ),
    "requests_without_a_limit": Mutant(
        clauses=("REQ-OPN-008",),
        fault="reads blocks that follow each other at once, however many they are",
        patch=replaced(decoding, "plan_requests", _without_limit),
        tests=(
            "read/test_reader.py::test_memory_does_not_grow_with_a_tensor[shape0]",
            "read/test_reader.py::test_memory_does_not_grow_with_a_tensor[shape1]",
        ),
    ),
    "arithmetic_not_looked_at": Mutant(
        clauses=("REQ-PRE-003",),
        fault="predicts by whatever arithmetic the thread has",
        patch=replaced(codec, "check_float_environment", lambda _right: None),
        tests=("codecs/test_prediction.py::test_rounding_upwards_is_refused",),
    ),
    "directories_listed_once": Mutant(
        clauses=("REQ-RUN-014",),
        fault="doesn't list the directories again once it has read the registers",
        patch=replaced(lineage, "list_checkpoints", _listed_once),
        tests=(
            "run/test_lineage.py::test_what_is_retired_meanwhile_is_seen_with_what_came_instead[memory-False]",
        ),
    ),
    "newest_registers_first": Mutant(
        clauses=("REQ-RUN-014",),
        fault="reads the registers of the greatest steps first",
        patch=replaced(
            lineage,
            "call_each",
            lambda right, store, act, items: right(store, act, items[::-1])[::-1],
        ),
        tests=(
            "run/test_lineage.py::test_what_is_retired_meanwhile_is_seen_with_what_came_instead[memory-True]",
        ),
    ),
}

"""Mutants of the stores: what a store promises to all that is built on it."""

from __future__ import annotations

from ckptfmt.store.recorder import RecordingCalls
from tests.mutants.mutant import Mutant, replaced

MUTANTS = {
    "no_fsync_of_files": Mutant(
        clauses=("REQ-STO-002",),
        fault="gives files their names before their contents are durable",
        patch=replaced(RecordingCalls, "fsync", lambda *_: None),
        tests=(
            "store/test_local.py::test_a_file_is_durable_before_it_has_its_name",
            "store/test_local.py::test_a_replacement_is_durable_before_it_has_its_name",
        ),
    ),
}

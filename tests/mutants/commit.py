"""Mutants of writers and committers: from what all have agreed on to the register."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from ckptfmt.commit import decision as commit
from ckptfmt.delta import chain
from ckptfmt.documents.canonical import parse_document
from ckptfmt.documents.manifest import MANIFEST_NAME, Manifest, parse_register
from ckptfmt.group import Group
from ckptfmt.run import save_job
from ckptfmt.saving import one_save as saving
from ckptfmt.store.protocol import Store
from ckptfmt.write import writer
from tests.mutants.mutant import Mutant, replaced, rewritten


def _with_the_committers_clock(right: Any, self: Manifest) -> Any:
    return right(dataclasses.replace(self, saved_unix_s=int(time.time())))


def _look_then_replace(_right: Any, store: Store, content: bytes) -> None:
    found = commit._read_back(store)
    if found not in (None, content):
        raise commit.refusal_of(parse_register(found))
    store.replace(MANIFEST_NAME, content)


def _say_node(right: Any, *arguments: Any, **options: Any) -> Any:
    *others, snapped = arguments
    context = dataclasses.replace(snapped.context, durability="node")
    return right(*others, dataclasses.replace(snapped, context=context), **options)


def _parse_anybodys(_right: Any, content: bytes, *, where: str) -> dict[str, Any]:
    return parse_document(content, where=where, types=("failure",))[0]


MUTANTS = {
    "attempts_of_their_own": Mutant(
        clauses=("REQ-CMT-001",),
        fault="saves under an attempt that each writer drew for itself",
        patch=rewritten(
            saving.agree_on_save, 'attempt=told[0]["attempt"]', 'attempt=mine["attempt"]'
        ),
        tests=("interface/test_api.py::test_writers_make_one_attempt_of_one_step",),
    ),
    "steps_not_compared": Mutant(
        clauses=("REQ-CMT-001",),
        fault="begins to write whatever step the others save",
        patch=rewritten(Group.agree, "if len(steps) > 1:", "if not steps:"),
        tests=("interface/test_api.py::test_writers_make_one_attempt_of_one_step",),
    ),
    "refusal_not_told": Mutant(
        clauses=("REQ-CMT-002",),
        fault="raises what it refuses before it tells the others",
        patch=rewritten(
            Group.raise_together,
            "    mine = {",
            "    if error is not None:\n        raise error\n    mine = {",
        ),
        tests=(
            "interface/test_api.py::test_what_one_writer_refuses_reaches_all_before_a_file_is_created[1]",
        ),
    ),
    "replaces_what_is_there": Mutant(
        clauses=("REQ-CMT-003",),
        fault="writes over a file that is there already",
        patch=rewritten(
            commit.create_once,
            "store.create(path, contents)",
            'store.replace(path, b"".join(contents))',
        ),
        tests=(
            "write/test_writer.py::test_another_attempts_file_is_not_taken_for_ours",
            "commit/test_commit.py::test_create_once_tells_own_files_from_others",
        ),
    ),
    "attempt_named_after_its_step": Mutant(
        clauses=("REQ-CMT-003",),
        fault="gives each try to save a step the same attempt",
        patch=rewritten(save_job.new_origin, "secrets.token_hex(8)", 'f"{int(step):016x}"'),
        tests=("interface/test_api.py::test_each_try_has_an_attempt_of_its_own",),
    ),
    "relies_on_what_is_in_caches": Mutant(
        clauses=("REQ-CMT-047",),
        fault="takes a checkpoint for a base whose files may be in caches",
        patch=rewritten(commit.check_base, "register.durability != HOME", "False"),
        tests=("documents/test_durability.py::test_what_is_in_caches_is_no_base",),
    ),
    "cache_claimed_that_took_nothing": Mutant(
        clauses=("REQ-CMT-048",),
        fault="says of files that it writes to home that they are in a cache",
        patch=replaced(chain.Chain, "write", _say_node),
        tests=("save/test_upload_every.py::test_a_cache_that_goes_makes_saves_go_home",),
    ),
    "durability_of_part_0": Mutant(
        clauses=("REQ-CMT-046",),
        fault="says of a checkpoint what the part of writer 0 says",
        patch=rewritten(
            commit.finalize, "weakest(part.durability for part in parts)", "parts[0].durability"
        ),
        tests=(
            "documents/test_durability.py::test_a_checkpoint_is_as_durable_as_the_weakest_of_its_parts[levels2-node]",
        ),
    ),
    "no_failure_record": Mutant(
        clauses=("REQ-CMT-004",),
        fault="fails without leaving a record for those who wait",
        patch=rewritten(writer.tell_failure, "write_failure(store, origin, writer, error)", "pass"),
        tests=(
            "saver/test_saver.py::test_run_that_cannot_be_held_is_told_to_the_other_writers[1]",
        ),
    ),
    "verdict_taken_for_one_writers_own": Mutant(
        clauses=("REQ-CMT-038",),
        fault=(
            "says only that another writer failed, where that one says that the attempt can't"
            " be committed"
        ),
        patch=rewritten(commit._error_of_record, "code in _VERDICTS or", "False and"),
        tests=("commit/test_commit.py::test_what_one_writer_says_of_the_attempt_all_raise",),
    ),
    "full_disk_of_another_taken_for_ones_own": Mutant(
        clauses=("REQ-CMT-038",),
        fault="fails with the code of any failure record, as if it spoke of this writer",
        patch=rewritten(commit._error_of_record, "code in _VERDICTS or", "True or"),
        tests=(
            "commit/test_commit.py::test_what_one_writer_says_of_itself_is_not_said_of_the_others",
        ),
    ),
    "failure_records_not_read": Mutant(
        clauses=("REQ-CMT-004",),
        fault="waits for a writer that said it failed",
        patch=replaced(commit, "_raise_failures", lambda *_: None),
        tests=("commit/test_commit.py::test_a_failed_writer_is_not_waited_for",),
    ),
    "failure_records_of_anybody": Mutant(
        clauses=("REQ-CMT-050",),
        fault=(
            "takes a failure record for that of the writer in the file's name, whatever the"
            " record says"
        ),
        patch=replaced(commit, "parse_failure", _parse_anybodys),
        tests=(
            "commit/test_commit.py::test_a_failure_record_under_the_name_of_another_is_refused",
        ),
    ),
    "part_before_names_are_durable": Mutant(
        clauses=("REQ-CMT-005",),
        fault="creates the part before the names of its files are durable",
        patch=rewritten(writer.write_part_file, 'store.sync("")', "pass"),
        tests=(
            "write/test_writer.py::test_a_part_comes_behind_the_sync_of_its_files",
            "write/test_writer.py::test_files_whose_names_could_not_be_synced_get_no_part",
        ),
    ),
    "part_after_a_failed_sync": Mutant(
        clauses=("REQ-CMT-005", "REQ-STO-007"),
        fault="creates the part although the names of its files couldn't be synced",
        patch=rewritten(
            writer.write_part_file,
            'store.sync("")',
            'with contextlib.suppress(CkptError): store.sync("")',
        ),
        tests=("write/test_writer.py::test_files_whose_names_could_not_be_synced_get_no_part",),
    ),
    "parts_not_waited_for": Mutant(
        clauses=("REQ-CMT-005",),
        fault="goes on before the parts of all writers are there",
        patch=replaced(commit, "_wait_for_parts", lambda *_: None),
        tests=(
            "commit/test_commit.py::test_a_late_part_is_waited_for",
            "commit/test_commit.py::test_a_missing_writer_is_named_at_the_deadline",
        ),
    ),
    "any_index_is_ours": Mutant(
        clauses=("REQ-CMT-006",),
        fault="takes an index that is there for the one that it would have created",
        patch=rewritten(
            commit._read_equal_index,
            "if _versionless(said) != _versionless(open_packed_document(content, where=path)[0]):",
            "if 0:",
        ),
        tests=(
            "commit/test_commit.py::test_an_index_that_says_something_else_is_a_conflict[memory-of another content]",
        ),
    ),
    "manifest_names_the_own_index": Mutant(
        clauses=("REQ-CMT-006",),
        fault="names its own index in the manifest where another is there that says the same",
        patch=rewritten(
            commit._create_index, "return _read_equal_index(store, path, content)", "pass"
        ),
        tests=(
            "commit/test_commit.py::test_an_index_that_says_the_same_is_taken_as_it_is[memory-0]",
            "commit/test_commit.py::test_an_index_that_says_the_same_is_taken_as_it_is[memory-9]",
        ),
    ),
    "files_not_looked_for": Mutant(
        clauses=("REQ-CMT-007",),
        fault="trusts the parts that their files are there",
        patch=replaced(commit, "_check_file", lambda *_: None),
        tests=(
            "commit/test_commit.py::test_every_file_is_there_with_its_size_before_the_decision",
        ),
    ),
    "sizes_not_compared": Mutant(
        clauses=("REQ-CMT-007",),
        fault="looks whether a file is there, and not how long it is",
        patch=replaced(commit, "_check_file", lambda _right, store, path, _: store.nbytes(path)),
        tests=(
            "commit/test_commit.py::test_every_file_is_there_with_its_size_before_the_decision",
        ),
    ),
    "register_looked_at_then_replaced": Mutant(
        clauses=("REQ-CMT-008",),
        fault="looks whether the register is free, and then replaces it",
        patch=replaced(commit, "_decide", _look_then_replace),
        tests=(
            "commit/test_commit.py::test_whenever_another_attempt_commits_one_of_the_two_has_the_register",
        ),
    ),
    "taken_register_is_success": Mutant(
        clauses=("REQ-CMT-008",),
        fault="takes a register that is there for its own, without reading it",
        patch=rewritten(commit._decide, "if found == content:", "if found is not None:"),
        tests=("commit/test_commit.py::test_the_second_attempt_loses",),
    ),
    "unknown_outcome_is_cleaned_up": Mutant(
        clauses=("REQ-CMT-008",),
        fault="deletes its files when it can't learn whether it was committed",
        patch=rewritten(
            commit._decide,
            "    raise err(\n        Code.COMMIT_UNKNOWN,",
            "    _delete_all_but_register(store)\n    raise err(\n        Code.COMMIT_UNKNOWN,",
        ),
        tests=("commit/test_commit.py::test_a_store_that_never_answers_leaves_it_unknown",),
    ),
    "committed_before_its_name_is_synced": Mutant(
        clauses=("REQ-CMT-009",),
        fault="calls a save committed as soon as the register is there",
        patch=rewritten(
            commit.finalize,
            'else _decide(store, content)\n    store.sync("")\n',
            "else _decide(store, content)\n",
        ),
        tests=(
            "commit/test_commit.py::test_a_save_is_committed_only_when_the_name_of_its_register_is_synced[memory-0]",
        ),
    ),
    "seen_is_durable": Mutant(
        clauses=("REQ-CMT-009",),
        fault="calls a save committed whose register it sees, and doesn't sync the name",
        patch=rewritten(commit.wait_for_decision, 'store.sync("")', "pass"),
        tests=(
            "commit/test_commit.py::test_a_save_is_committed_only_when_the_name_of_its_register_is_synced[memory-1]",
        ),
    ),
    "any_manifest_is_ours": Mutant(
        clauses=("REQ-CMT-009",),
        fault="calls a save committed when the register holds the manifest of another attempt",
        patch=rewritten(
            commit.wait_for_decision, " and register.origin.attempt == origin.attempt", ""
        ),
        tests=("commit/test_commit.py::test_the_second_attempt_loses",),
    ),
    "committers_clock": Mutant(
        clauses=("REQ-MAN-009",),
        fault="says in the manifest when it committed",
        patch=replaced(Manifest, "dump", _with_the_committers_clock),
        tests=("commit/test_commit.py::test_who_commits_and_when_does_not_show",),
    ),
}

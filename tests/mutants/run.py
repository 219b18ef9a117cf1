"""Mutants of runs: who owns one, what a launch goes on from, and names that are used once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from ckptfmt import api
from ckptfmt.adapters.torch import fingerprints
from ckptfmt.commit import decision as commit
from ckptfmt.documents.manifest import MANIFEST_NAME, Manifest, Origin, parse_checkpoint_name
from ckptfmt.documents.run import RUN_NAME
from ckptfmt.loop import launching, repeated_steps
from ckptfmt.loop.comparing import StepComparison
from ckptfmt.loop.repeated_steps import RepeatedSteps
from ckptfmt.loop.step_log import StepLog
from ckptfmt.read import verify
from ckptfmt.read.cached import CachedStore
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.report import Report
from ckptfmt.read.verified_files import VerifiedFile
from ckptfmt.run import compaction as compact
from ckptfmt.run import (
    elections,
    failures,
    homes,
    lineage,
    mirror,
    node_cache,
    save_job,
    scrub,
    spent_time,
    votes,
)
from ckptfmt.run.witness import StepsHeader
from ckptfmt.saving import peers, uploads
from ckptfmt.saving.saver import Saver
from ckptfmt.store.direct import make_memory
from ckptfmt.store.local import LocalStore
from ckptfmt.store.protocol import PAGE_NBYTES, RangeReader, Store
from tests.mutants.mutant import Mutant, replaced, rewritten


def _refuse_header(_right: Any, _content: bytes) -> Any:
    raise ValueError("a header that can't be read")


def _all_settled(right: Any, *arguments: Any) -> Any:
    found = right(*arguments)
    for files in found.values():
        files.settled = files.settled or "0"
    return found


def _look_once() -> AbstractContextManager[Any]:
    return mock.patch.object(
        save_job, "check_not_fenced", functools.cache(lineage.check_not_fenced)
    )


def _open_only(_right: Any, store: Store, report: Report, *, digest: str) -> Checkpoint | None:
    """Take for whole what has a manifest and an index."""
    with report.collect():
        return Checkpoint(store, digest=digest)
    return None


def _without_bases(_right: Any, store: Store, report: Report, *, digest: str) -> Checkpoint | None:
    return verify._Verification(()).check(store, report, digest=digest)


def _let_go_at_the_first(right: Any, self: Saver, number: int, work: Any) -> None:
    with contextlib.suppress(KeyError):
        self._held.close()
    right(self, number, work)


def _delete_everything(right: Any, store: Store) -> None:
    right(store)
    store.delete(MANIFEST_NAME)


def _write_as_the_run(
    right: Any, checkpoint: Checkpoint, store: Store, origin: Origin, *rest: Any
) -> Manifest:
    old = checkpoint.manifest.origin
    manifest: Manifest = right(
        checkpoint, store, dataclasses.replace(origin, run_id=old.run_id, launch=old.launch), *rest
    )
    return manifest


def _copy_blindly(
    _right: Any, _self: VerifiedFile, file: RangeReader, chunk: list[Any]
) -> memoryview:
    begin, end = chunk[0][0], chunk[-1][0] + chunk[-1][1]
    return file.read_into(begin, end - begin, make_memory(end - begin + 2 * PAGE_NBYTES))


def _list_directories(_right: Any, store: Store) -> list[tuple[int, int]]:
    places = (
        parse_checkpoint_name(name[:-1]) for name in store.list_names("") if name.endswith("/")
    )
    return sorted(place for place in places if place is not None)


def _follow(_right: Any, self: LocalStore, name: str) -> LocalStore:
    return LocalStore(Path(self.name).parent / name, writable=False)


def _run_record_first(right: Any, self: Any, *rest: Any) -> None:
    if RUN_NAME not in self._mirror.list_names(""):
        self._create_run()
    right(self, *rest)


MUTANTS = {
    "links_for_nothing": Mutant(
        clauses=("REQ-RUN-008", "REQ-CKP-002"),
        fault="doesn't see what has the name of a checkpoint and is no directory",
        patch=replaced(lineage, "list_places", _list_directories),
        tests=(
            "hostile/test_local.py::test_a_link_in_the_place_of_a_checkpoint_is_passed_over_by_name",
        ),
    ),
    "unknown_features_for_damage": Mutant(
        clauses=("REQ-VER-010",),
        fault="passes over a checkpoint that needs a feature which it doesn't know",
        patch=rewritten(lineage._choose_by_lineage, "isinstance(found, UnsupportedError)", "False"),
        tests=(
            "run/test_lineage.py::test_what_a_newer_program_saved_is_refused_and_not_passed_over",
        ),
    ),
    "links_to_bases_followed": Mutant(
        clauses=("REQ-DEL-020", "REQ-CKP-002"),
        fault="follows a link that lies beside a delta to its base",
        patch=replaced(LocalStore, "beside", _follow),
        tests=("hostile/test_local.py::test_a_base_behind_a_link_is_found_where_the_caller_says",),
    ),
    "newer_launches_looked_for_once": Mutant(
        clauses=("REQ-RUN-004",),
        fault="looks for a newer launch before its first save, and then goes on for ever",
        patch=_look_once,
        tests=("saver/test_saver.py::test_launch_that_was_taken_over_writes_nothing",),
    ),
    "candidates_only_opened": Mutant(
        clauses=("REQ-RUN-012",),
        fault="takes a checkpoint that can be opened for one that is whole",
        patch=replaced(lineage, "verify_loadable", _open_only),
        tests=(
            "run/test_lineage.py::test_a_damaged_newest_is_passed_over_and_recorded",
            "run/test_lineage.py::test_whatever_is_damaged_is_passed_over[memory-missing]",
        ),
    ),
    "blocks_of_bases_not_checked": Mutant(
        clauses=("REQ-RUN-012",),
        fault=(
            "checks a delta's own bytes before a launch names it, and not what it needs of its"
            " bases"
        ),
        patch=replaced(lineage, "verify_loadable", _without_bases),
        tests=(
            "read/test_verify_deltas.py::test_a_launch_passes_over_a_delta_whose_base_is_damaged",
        ),
    ),
    "register_not_read_again": Mutant(
        clauses=("REQ-RUN-013",),
        fault="believes that what its record names is still there",
        patch=replaced(lineage, "_is_committed", lambda *_: True),
        tests=(
            "run/test_lineage.py::test_what_is_retired_before_the_record_is_there_is_chosen_anew",
        ),
    ),
    "checkpoint_in_a_run_directory": Mutant(
        clauses=("REQ-RUN-016",),
        fault="saves a checkpoint where a run is",
        patch=replaced(
            save_job, "check_no_run", lambda _, store, **_how: commit.check_vacant(store)
        ),
        tests=("loop/test_checkpointer.py::test_directory_is_a_run_or_a_checkpoint_and_not_both",),
    ),
    "run_in_a_checkpoint_directory": Mutant(
        clauses=("REQ-RUN-016",),
        fault="begins a run where a checkpoint is",
        patch=replaced(lineage, "_refuse_other_contents", lambda *_: None),
        tests=("loop/test_checkpointer.py::test_directory_is_a_run_or_a_checkpoint_and_not_both",),
    ),
    "let_go_with_a_save_to_do": Mutant(
        clauses=("REQ-RUN-017",),
        fault="lets its file in the run go when the first of its saves is decided",
        patch=replaced(Saver, "_release", _let_go_at_the_first),
        tests=(
            "saver/test_saver.py::test_run_is_held_from_the_first_save_to_the_last_ones_end[memory]",
        ),
    ),
    "launch_does_not_wait": Mutant(
        clauses=("REQ-RUN-018",),
        fault="chooses what to resume from while a saver is at work",
        patch=replaced(launching, "wait_for_savers", lambda *_, **__: []),
        tests=(
            "loop/test_checkpointer.py::test_launch_waits_for_what_an_old_saver_has_in_its_hands",
        ),
    ),
    "compaction_does_not_wait": Mutant(
        clauses=("REQ-RUN-018",),
        fault="compacts a run while a saver is at work",
        patch=replaced(compact, "wait_for_savers", lambda *_, **__: []),
        tests=("run/test_compaction.py::test_somebody_who_is_saving_is_not_fenced_off",),
    ),
    "run_opened_without_a_word_of_saves_in_hand": Mutant(
        clauses=("REQ-RUN-019",),
        fault=(
            "opens the newest committed checkpoint of a run without a word of the save that a"
            " saver has in hand"
        ),
        patch=replaced(api, "wait_for_savers", lambda *_, **__: []),
        tests=("interface/test_api.py::test_opening_a_run_says_that_a_saver_has_a_save_in_hand",),
    ),
    "rewind_of_an_overtaken_launch": Mutant(
        clauses=("REQ-RUN-066",),
        fault="begins a launch by its votes alone, without a look at the launches between",
        patch=replaced(elections, "check_votes", lambda *_, **__: None),
        tests=("loop/test_homes.py::test_a_rewind_of_an_overtaken_job_is_refused",),
    ),
    "commit_not_confirmed": Mutant(
        clauses=("REQ-RUN-067",),
        fault="reports a commit without a look at the votes of the other homes",
        patch=replaced(votes.OtherHomes, "confirm", lambda *_, **__: None),
        tests=("loop/test_homes.py::test_votes_of_a_minority_overtake_nobody",),
    ),
    "commit_ahead_of_the_copies": Mutant(
        clauses=("REQ-RUN-068",),
        fault="commits although no other home has the save before",
        patch=replaced(votes.OtherHomes, "await_copy", lambda *_, **__: None),
        tests=("loop/test_homes.py::test_no_save_is_two_ahead_of_the_other_homes",),
    ),
    "homes_not_compared": Mutant(
        clauses=("REQ-RUN-069",),
        fault="copies to a home that has another launch of a number",
        patch=replaced(mirror, "check_same_history", lambda *_, **__: None),
        tests=("loop/test_homes.py::test_copies_between_homes",),
    ),
    "empty_place_confirms": Mutant(
        clauses=("REQ-RUN-070",),
        fault="counts the answer of a place that isn't a home of the run",
        patch=replaced(homes, "check_member", lambda *_, **__: None),
        tests=("loop/test_homes.py::test_a_place_without_the_run_confirms_nothing",),
    ),
    "register_of_the_retired_removed": Mutant(
        clauses=("REQ-CKP-006",),
        fault="removes the register of what it retires too, so that the name is free again",
        patch=replaced(commit, "_delete_all_but_register", _delete_everything),
        tests=("interface/test_api.py::test_place_of_a_retired_checkpoint_is_never_used_again",),
    ),
    "nonce_from_a_fixed_seed": Mutant(
        clauses=("REQ-CKP-007",),
        fault="gives every checkpoint outside of a run the same nonce",
        patch=functools.partial(
            mock.patch.object,
            save_job,
            "secrets",
            mock.Mock(token_hex=lambda nbytes: "5a" * nbytes),
        ),
        tests=(
            "interface/test_api.py::test_checkpoint_outside_of_a_run_names_no_run_and_has_a_nonce_of_its_own",
        ),
    ),
    "run_kept_by_what_is_compacted": Mutant(
        clauses=("REQ-CKP-007",),
        fault="gives what it compacts out of a run that run and launch",
        patch=replaced(compact, "_write", _write_as_the_run),
        tests=(
            "run/test_compaction.py::test_it_holds_what_was_saved_and_reads_from_nothing[memory-1]",
        ),
    ),
    "writer_features_ignored": Mutant(
        clauses=("REQ-VER-003",),
        fault="writes into a run whatever its writers must know",
        patch=replaced(lineage, "check_writer_features", lambda *_: None),
        tests=(
            "run/test_lineage.py::test_a_run_with_a_writer_feature_that_is_not_known_is_not_written_to",
        ),
    ),
    "copied_without_a_look": Mutant(
        clauses=("REQ-RUN-027",),
        fault="copies to a mirror what it reads, damaged or not",
        patch=replaced(VerifiedFile, "_read", _copy_blindly),
        tests=(
            "run/test_mirror.py::test_damage_at_home_is_told_and_not_copied",
            "run/test_mirror.py::test_a_header_that_was_changed_at_home_is_not_copied",
        ),
    ),
    "sizes_at_the_mirror_not_compared": Mutant(
        clauses=("REQ-RUN-028",),
        fault="takes a file that is at the mirror for whole, whatever its size is",
        patch=replaced(mirror, "check_nbytes", lambda *_: None),
        tests=(
            "run/test_mirror.py::test_a_file_of_another_size_at_the_mirror_keeps_the_register_away",
        ),
    ),
    "deltas_before_their_bases": Mutant(
        clauses=("REQ-RUN-028",),
        fault="copies a delta, and doesn't look whether the mirror has what it reads from",
        patch=rewritten(mirror._Mirroring._copy, "check_base(mirror, reference)", "pass"),
        tests=("run/test_mirror.py::test_a_base_that_the_mirror_is_about_to_retire_is_none",),
    ),
    "run_json_first": Mutant(
        clauses=("REQ-RUN-029",),
        fault="creates run.json at a mirror before there is anything to go on from",
        patch=replaced(mirror._Mirroring, "_bring_launches", _run_record_first),
        tests=("run/test_mirror.py::test_at_every_moment_a_mirror_is_the_run_as_it_was_once",),
    ),
    "record_before_what_it_names": Mutant(
        clauses=("REQ-RUN-029",),
        fault="copies a launch record, and what it names later, or never",
        patch=rewritten(
            mirror._Mirroring._bring_launches, "self._bring_named(launch.resume_from)", "pass"
        ),
        tests=("run/test_mirror.py::test_a_launch_whose_checkpoint_is_gone_finds_its_tombstone",),
    ),
    "two_homes_mixed": Mutant(
        clauses=("REQ-RUN-030",),
        fault="copies a run into one that went on by itself",
        patch=replaced(mirror, "check_same_history", lambda *_, **__: None),
        tests=(
            "run/test_mirror.py::test_two_homes_that_both_went_on_are_a_named_error",
            "run/test_mirror.py::test_a_home_that_saved_behind_its_mirrors_back_is_no_mirror_of_it",
        ),
    ),
    "retired_before_the_newest_is_there": Mutant(
        clauses=("REQ-RUN-031",),
        fault="retires at the mirror although what the run goes on from isn't there",
        patch=rewritten(
            mirror._Mirroring.run, "if head is not None and self._has(head):", "if True:"
        ),
        tests=("run/test_mirror.py::test_nothing_is_retired_as_long_as_the_newest_is_not_there",),
    ),
    "old_home_not_taken_over": Mutant(
        clauses=("REQ-RUN-032",),
        fault="promotes a mirror while somebody may save at the old home",
        patch=rewritten(
            mirror.promote,
            "fenced = _begin(home, run, on_progress=on_progress).launch",
            "fenced = 2",
        ),
        tests=("run/test_mirror.py::test_promotion_takes_over_the_old_home_and_its_last_saves",),
    ),
    "damaged_file_deleted_without_another": Mutant(
        clauses=("REQ-RUN-033",),
        fault="deletes a damaged file before it knows that another copy has it whole",
        patch=rewritten(
            scrub._Scrubbing._scrub_file, "if at not in wrong", "if at not in wrong or at > 0"
        ),
        tests=("run/test_mirror.py::test_what_no_copy_has_whole_is_reported_and_left_as_it_is",),
    ),
    "a_failing_cache_disk_counts_as_damage": Mutant(
        clauses=("REQ-RUN-047",),
        fault="goes on without what a cache holds where the disk of the cache fails",
        patch=rewritten(
            launching._Finish._open,
            "if isinstance(error, StoreError) and error.code != Code.STORE_UNSUPPORTED:",
            "if False:",
        ),
        tests=(
            "faults/test_cache_disk.py::test_a_cache_disk_that_cannot_be_opened_refuses_the_start",
        ),
    ),
    "inferred_as_if_by_lineage": Mutant(
        clauses=("REQ-RUN-046",),
        fault="writes a lost launch record anew as if the launch had followed the lineage",
        patch=rewritten(lineage.infer_launch, 'chosen_by="hand"', 'chosen_by="lineage"'),
        tests=(
            "run/test_lost_records.py::test_without_a_copy_a_record_is_written_anew_from_what_checkpoints_say[memory-True-cut]",
        ),
    ),
    "register_written_whatever_is_beside_it": Mutant(
        clauses=("REQ-RUN-034",),
        fault="writes a register from another copy although files are gone or damaged",
        patch=rewritten(
            scrub._Scrubbing._scrub_checkpoint,
            "at in candidates and store.name not in broken",
            "bool(store)",
        ),
        tests=(
            "run/test_mirror.py::test_a_register_is_not_rewritten_over_files_that_cannot_be_repaired",
            "run/test_mirror.py::test_what_was_retired_is_not_brought_back",
        ),
    ),
    "cached_bytes_not_compared": Mutant(
        clauses=("REQ-RUN-035",),
        fault="copies what a cache has without a look at its digests",
        patch=rewritten(
            VerifiedFile._read, "check(content[first - begin : first - begin + nbytes])", "pass"
        ),
        tests=(
            "save/test_node_cache.py::test_what_is_damaged_in_the_cache_is_not_finished[damaged-.safetensors]",
        ),
    ),
    "nothing_finished_from_caches": Mutant(
        clauses=("REQ-RUN-036",),
        fault="begins a launch without a look into the caches",
        patch=replaced(launching, "plan_finish", lambda *_: []),
        tests=(
            "save/test_node_cache.py::test_a_launch_finishes_what_a_killed_one_left",
            "save/test_node_cache.py::test_the_parts_of_all_writers_come_from_wherever_they_are[True]",
            "save/test_node_cache.py::test_one_process_finishes_from_a_shared_cache",
        ),
    ),
    "older_launches_finished": Mutant(
        clauses=("REQ-RUN-036",),
        fault="finishes what a launch left that was overtaken",
        patch=rewritten(node_cache.plan_finish, "parsed[1] != newest", "parsed[1] < 0"),
        tests=("save/test_node_cache.py::test_what_an_older_launch_left_is_not_finished",),
    ),
    "half_an_attempt_finished": Mutant(
        clauses=("REQ-RUN-036",),
        fault="copies parts of an attempt of which others are lost",
        patch=rewritten(
            node_cache.plan_finish, "there | set(writers) < set(range(writer_count))", "not writers"
        ),
        tests=("save/test_node_cache.py::test_a_lost_node_leaves_nothing_half_visible",),
    ),
    "unfinished_evicted": Mutant(
        clauses=("REQ-RUN-037",),
        fault="makes room in the cache by what home doesn't have",
        patch=replaced(node_cache.NodeCache, "_scan", _all_settled),
        tests=("save/test_node_cache.py::test_what_home_lacks_stays_and_the_saver_waits",),
    ),
    "settled_while_nothing_is_at_home": Mutant(
        clauses=("REQ-RUN-037",),
        fault="lets the files go of what is committed and in caches alone",
        patch=rewritten(uploads.bring_home, "manifest.durability == HOME", "True"),
        tests=(
            "save/test_upload_every.py::test_what_nothing_at_home_replaces_stays_and_a_save_without_room_goes_home",
            "save/test_upload_every.py::test_of_so_many_saves_one_goes_home",
        ),
    ),
    "never_settled": Mutant(
        clauses=("REQ-RUN-037",),
        fault="keeps the files of what is in caches when a newer one is at home",
        patch=replaced(node_cache.NodeCache, "settle_up_to", lambda *_: None),
        tests=(
            "save/test_upload_every.py::test_what_nothing_at_home_replaces_stays_and_a_save_without_room_goes_home",
            "save/test_upload_every.py::test_once_a_newer_one_is_at_home_the_cache_may_let_all_older_ones_go",
        ),
    ),
    "settled_for_an_older_one": Mutant(
        clauses=("REQ-RUN-037",),
        fault="takes a checkpoint at home for a reason to let newer ones go",
        patch=rewritten(node_cache.NodeCache.settle_up_to, "ours <= theirs for", "True for"),
        tests=(
            "save/test_upload_every.py::test_once_a_newer_one_is_at_home_the_cache_may_let_all_older_ones_go",
        ),
    ),
    "nothing_brought_home": Mutant(
        clauses=("REQ-RUN-041",),
        fault="chooses without a look for committed files in the caches",
        patch=replaced(launching, "list_in_caches", lambda *_: []),
        tests=(
            "save/test_upload_every.py::test_a_launch_goes_on_from_the_newest_in_its_cache",
            "save/test_upload_every.py::test_what_is_chosen_by_hand_is_brought_home",
            "save/test_upload_every.py::test_each_writers_files_come_from_wherever_they_are[True]",
        ),
    ),
    "newest_alone_brought_home": Mutant(
        clauses=("REQ-RUN-041",),
        fault="looks in the caches for the newest checkpoint, and for no older one",
        patch=replaced(
            launching, "list_in_caches", lambda right, *arguments: right(*arguments)[:1]
        ),
        tests=(
            "save/test_upload_every.py::test_where_the_newest_is_damaged_the_next_older_one_is_taken[damaged]",
        ),
    ),
    "half_a_checkpoint_brought_home": Mutant(
        clauses=("REQ-RUN-041",),
        fault="brings home files of a checkpoint of which nobody has the others",
        patch=rewritten(
            node_cache.plan_fetch, "return []\n        plan.append", "continue\n        plan.append"
        ),
        tests=("save/test_upload_every.py::test_without_one_of_two_nodes_all_go_on_from_home",),
    ),
    "cached_files_believed": Mutant(
        clauses=("REQ-RUN-038",),
        fault="reads from the cache what isn't what was saved, and doesn't ask home",
        patch=replaced(CachedStore, "_verify", lambda *_: True),
        tests=(
            "save/test_node_cache.py::test_what_is_not_whole_in_the_cache_is_read_from_home[damaged-off]",
        ),
    ),
    "newer_replicas_settled": Mutant(
        clauses=("REQ-RUN-037",),
        fault="lets replicas go that are newer than what home has",
        patch=rewritten(node_cache.NodeCache.settle_up_to, "ours <= theirs", "ours"),
        tests=("save/test_peers.py::test_only_what_is_not_newer_is_settled_with_a_commit",),
    ),
    "peers_told_without_a_replica": Mutant(
        clauses=("REQ-CMT-048",),
        fault="commits a save as one that survives its node, whatever the partner says",
        patch=replaced(Saver, "_has_replica", lambda *_: True),
        tests=(
            "save/test_peers.py::test_what_stays_in_caches_survives_a_node_with_replicas[problem]",
        ),
    ),
    "entries_of_the_ledger_needed": Mutant(
        clauses=("REQ-RUN-044",),
        fault="gives up where an entry of the ledger can't be read",
        patch=rewritten(spent_time._read_entry, "return error", "raise error"),
        tests=("loop/test_ledger.py::test_an_entry_that_can_not_be_read_stops_nothing",),
    ),
    "steps_recorded_at_the_end": Mutant(
        clauses=("REQ-RUN-061",),
        fault="keeps the records of steps until the launch ends",
        patch=replaced(StepLog, "put", lambda *_: None),
        tests=(
            "witness/test_witness.py::test_record_of_a_step_is_in_the_file_while_the_launch_goes_on",
        ),
    ),
    "decisions_needed": Mutant(
        clauses=("REQ-RUN-064",),
        fault="gives up where a decision of a healer can't be read",
        patch=rewritten(failures.read_decisions, "except StoreError:", "except CkptError:"),
        tests=("loop/test_decisions.py::test_a_damaged_decision_is_no_decision",),
    ),
    "step_logs_needed": Mutant(
        clauses=("REQ-RUN-062",),
        fault="gives up where the step log of an earlier launch is damaged",
        patch=replaced(StepsHeader, "parse", _refuse_header),
        tests=(
            "witness/test_witness.py::test_damaged_log_of_an_earlier_launch_costs_the_comparison_alone[header]",
        ),
    ),
    "witness_that_looks_at_nothing": Mutant(
        clauses=("REQ-RUN-060",),
        fault="compares no member of two records of a step",
        patch=replaced(
            repeated_steps, "compare_steps", lambda *_, **__: StepComparison(compared=())
        ),
        tests=(
            "witness/test_witness.py::test_cause_of_a_difference_is_named_as_far_as_it_shows[draw]",
            "witness/test_witness.py::test_steps_done_again_are_identical_and_said_to_be",
        ),
    ),
    "witness_that_compares_with_itself": Mutant(
        clauses=("REQ-RUN-060",),
        fault="compares a step with its own record",
        patch=rewritten(
            RepeatedSteps.compare,
            "earlier, earlier_header = reference",
            "earlier, earlier_header = record, header",
        ),
        tests=(
            "witness/test_witness.py::test_cause_of_a_difference_is_named_as_far_as_it_shows[moments]",
        ),
    ),
    "fingerprint_that_misses_a_tensor": Mutant(
        clauses=("REQ-RUN-060",),
        fault="leaves the last tensor out of the digest of the weights",
        patch=rewritten(
            fingerprints.Fingerprint.__init__,
            "tensor_count = len(rows)",
            "tensor_count = len(rows) - 1",
        ),
        tests=("witness/test_witness.py::test_each_tensor_convicts_by_itself",),
    ),
    "replica_on_the_same_node": Mutant(
        clauses=("REQ-RUN-039",),
        fault="takes the next process for its partner, whichever node that is on",
        patch=replaced(peers, "choose_partners", lambda _, nodes: [*range(1, len(nodes)), 0]),
        tests=("save/test_peers.py::test_partners_are_on_another_node_and_share_the_work",),
    ),
    "replicated_bytes_not_compared": Mutant(
        clauses=("REQ-RUN-040",),
        fault="takes what another node sends without a look at its digests",
        patch=rewritten(
            VerifiedFile._read, "check(content[first - begin : first - begin + nbytes])", "pass"
        ),
        tests=("save/test_peers.py::test_what_is_damaged_is_no_replica[damaged-.safetensors]",),
    ),
    "replicated_part_first": Mutant(
        clauses=("REQ-RUN-040",),
        fault="creates the part of a replica before its files",
        patch=rewritten(
            node_cache.NodeCache.take,
            "for file in files:",
            "place.create(part.path, [content])\n            for file in files:",
        ),
        tests=("save/test_peers.py::test_the_part_of_a_replica_comes_last",),
    ),
}

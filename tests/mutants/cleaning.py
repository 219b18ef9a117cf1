"""Mutants of cleaners: what is given up, retired or swept, behind which record, and what stays."""

from __future__ import annotations

from ckptfmt.commit import decision as commit
from ckptfmt.commit import lone
from ckptfmt.run import labelling, lineage, retention, save_job
from tests.mutants.mutant import Mutant, replaced, rewritten

_NO_SYNC = ('    store.sync("")\n', "")

MUTANTS = {
    "files_before_the_abort_record": Mutant(
        clauses=("REQ-CMT-020",),
        fault="deletes the files of an unfinished checkpoint before it creates the abort record",
        patch=rewritten(
            commit.abort,
            "_decide(store, record.dump())",
            "_delete_all_but_register(store); _decide(store, record.dump())",
        ),
        tests=(
            "run/test_retention.py::test_files_go_only_behind_a_record_that_is_synced[memory-given up]",
            "commit/test_commit.py::test_an_abort_without_an_answer_deletes_nothing",
        ),
    ),
    "abort_record_not_synced": Mutant(
        clauses=("REQ-CMT-020",),
        fault="deletes files behind an abort record that a crash may take away",
        patch=rewritten(commit.abort, *_NO_SYNC),
        tests=(
            "run/test_retention.py::test_files_go_only_behind_a_record_that_is_synced[memory-given up]",
        ),
    ),
    "a_missing_file_counts_as_whole": Mutant(
        clauses=("REQ-CMT-052",),
        fault="deletes the last checkpoint that can be loaded, since it doesn't look at the others",
        patch=replaced(retention, "find_damage", lambda _right, *_, **__: None),
        tests=(
            "run/test_last_loadable.py::test_gc_keeps_the_last_checkpoint_that_can_be_loaded[missing]",
        ),
    ),
    "a_lost_record_is_no_barrier": Mutant(
        clauses=("REQ-CMT-051",),
        fault="retires what older launches saved, although a launch record can't be read",
        patch=replaced(retention, "find_barrier", lambda _right, *_: 0),
        tests=(
            "run/test_lost_records.py::test_nothing_of_older_launches_goes_before_a_repair[memory]",
        ),
    ),
    "caches_count_as_home": Mutant(
        clauses=("REQ-CMT-049", "REQ-CMT-026"),
        fault="counts what is in caches among what it keeps",
        patch=replaced(retention, "is_at_home", lambda _right, entry: entry.manifest is not None),
        tests=(
            "save/test_upload_every.py::test_what_is_in_caches_does_not_count_and_goes_once_a_newer_one_is_at_home[1]",
            "save/test_upload_every.py::test_the_last_at_home_cannot_be_deleted_for_one_in_caches",
        ),
    ),
    "caches_kept_for_ever": Mutant(
        clauses=("REQ-CMT-049",),
        fault="never retires what is in caches",
        patch=replaced(retention, "_iter_behind", lambda *_: []),
        tests=(
            "save/test_upload_every.py::test_what_is_in_caches_does_not_count_and_goes_once_a_newer_one_is_at_home[None]",
            "save/test_upload_every.py::test_a_launch_goes_on_from_the_newest_in_its_cache",
            "save/test_upload_every.py::test_without_its_cache_a_launch_goes_on_from_home",
        ),
    ),
    "pinned_in_a_cache": Mutant(
        clauses=("REQ-CMT-041",),
        fault="promises to keep what isn't at home",
        patch=replaced(labelling, "check_at_home", lambda *_: None),
        tests=("save/test_upload_every.py::test_a_pin_is_refused_where_the_files_are_not_at_home",),
    ),
    "own_saves_given_up": Mutant(
        clauses=("REQ-CMT-021",),
        fault="gives up what the newest launch is still saving",
        patch=rewritten(
            retention.list_abandoned, "entry.launch < launch", "entry.launch <= launch"
        ),
        tests=("run/test_retention.py::test_only_what_older_launches_left_unfinished_is_aborted",),
    ),
    "files_before_the_tombstone": Mutant(
        clauses=("REQ-CMT-022",),
        fault="deletes the files of a committed checkpoint before it replaces the manifest",
        patch=rewritten(
            commit.retire,
            "store.replace(MANIFEST_NAME, tombstone.dump())",
            "_delete_all_but_register(store); store.replace(MANIFEST_NAME, tombstone.dump())",
        ),
        tests=(
            "run/test_retention.py::test_files_go_only_behind_a_record_that_is_synced[memory-retired]",
        ),
    ),
    "tombstone_not_synced": Mutant(
        clauses=("REQ-CMT-022",),
        fault="deletes files behind a tombstone that a crash may take away",
        patch=rewritten(commit.retire, *_NO_SYNC),
        tests=(
            "run/test_retention.py::test_files_go_only_behind_a_record_that_is_synced[memory-retired]",
        ),
    ),
    "register_deleted_too": Mutant(
        clauses=("REQ-CMT-023",),
        fault="deletes the register with the files",
        patch=rewritten(commit._delete_all_but_register, " if path != MANIFEST_NAME]", "]"),
        tests=(
            "commit/test_commit.py::test_what_was_retired_stays_retired",
            "commit/test_commit.py::test_what_was_aborted_is_never_committed",
        ),
    ),
    "record_found_not_synced": Mutant(
        clauses=("REQ-CMT-024",),
        fault="trusts that the record which it finds is durable",
        patch=rewritten(commit.sweep, *_NO_SYNC),
        tests=(
            (
                "run/test_retention.py::test_files_go_only_behind_a_record_that_is_synced[memory-left"
                " behind]"
            ),
        ),
    ),
    "unknown_features_are_no_matter": Mutant(
        clauses=("REQ-CMT-025",),
        fault="stops at no writer feature",
        patch=replaced(retention, "check_writer_features", lambda *_, **__: None),
        tests=("run/test_retention.py::test_an_unknown_writer_feature_removes_nothing",),
    ),
    "the_last_one_retired": Mutant(
        clauses=("REQ-CMT-026",),
        fault="retires the first candidate when one is to be kept",
        patch=rewritten(retention._list_ended, "at_home[:keep]", "at_home[: keep - 1]"),
        tests=("run/test_retention.py::test_the_last_one_never_goes[memory]",),
    ),
    "what_was_resumed_from_retired": Mutant(
        clauses=("REQ-CMT-026",),
        fault="retires what its launch resumed from before that launch has a commit of its own",
        patch=rewritten(
            retention.plan_retention,
            "if not own and isinstance(newest, Launch)",
            "if own and isinstance(newest, Launch)",
        ),
        tests=("run/test_retention.py::test_what_a_launch_resumes_from_stays_until_it_saved",),
    ),
    "what_lies_beside_retired": Mutant(
        clauses=("REQ-CMT-026",),
        fault="retires what a rollback left beside the lineage",
        patch=rewritten(
            retention.plan_retention,
            "itertools.takewhile(lambda entry: not entry.is_record, iter_lineage(launches, entries))",
            "itertools.takewhile(lambda entry: not entry.is_record, sorted(entries, key=lambda entry:"
            " (-entry.launch, -entry.step)))",
        ),
        tests=("run/test_retention.py::test_what_a_rollback_left_beside_is_left_alone",),
    ),
    "late_retired_too_soon": Mutant(
        clauses=("REQ-CMT-026",),
        fault="retires what was committed late before the newest launch has a commit of its own",
        patch=rewritten(retention._list_ended, "if has_own:", "if keep >= 0:"),
        tests=(
            "run/test_retention.py::test_what_a_fenced_launch_committed_late_goes_once_its_successor_saved",
        ),
    ),
    "given_up_taken_for_late": Mutant(
        clauses=("REQ-CMT-026",),
        fault="retires what a rollback left beside the lineage as if it had been committed late",
        patch=rewritten(retention._iter_beside, "successor.chosen_by != chosen_by", "False"),
        tests=(
            "run/test_retention.py::test_what_a_rollback_left_beside_is_left_alone",
            "run/test_retention.py::test_what_a_launch_fell_back_from_goes_with_others_of_its_step",
        ),
    ),
    "passed_over_retired_too_soon": Mutant(
        clauses=("REQ-CMT-026",),
        fault="retires what was passed over as damaged before any candidate has a greater step",
        patch=rewritten(
            retention._list_ended,
            "sum(other.step > one.step for other in at_home) >= keep",
            "True",
        ),
        tests=(
            "run/test_retention.py::test_what_a_launch_fell_back_from_goes_with_others_of_its_step",
        ),
    ),
    "unknown_files_swept": Mutant(
        clauses=("REQ-CMT-027",),
        fault="deletes what has no attempt in its name, too",
        patch=rewritten(
            commit.sweep_attempts,
            "    committed = ",
            "    unknown = [path for path in paths if path[-1] != '/' and not"
            " _ATTEMPT.fullmatch(path)]\n"
            "    [store.delete(path) for path in unknown if path != MANIFEST_NAME]\n"
            "    committed = ",
        ),
        tests=("commit/test_commit.py::test_leftovers_of_other_attempts_are_swept",),
    ),
    "swept_before_the_decision": Mutant(
        clauses=("REQ-CMT-027",),
        fault="deletes the files of other attempts before its own is committed",
        patch=rewritten(
            commit.decide,
            "    if origin.writer_count > 1:",
            "    for path in filter(_ATTEMPT.fullmatch, store.list('')):\n"
            "        None if origin.attempt in path else store.delete(path)\n"
            "    if origin.writer_count > 1:",
        ),
        tests=("commit/test_commit.py::test_nothing_is_swept_before_the_decision",),
    ),
    "replaced_behind_the_files": Mutant(
        clauses=("REQ-CMT-042",),
        fault="deletes the files of the old checkpoint before the new manifest takes its place",
        patch=rewritten(
            commit._decide_anew,
            "            store.replace(MANIFEST_NAME, content)\n",
            "            [store.delete(path) for path in store.list('') if"
            " register.origin.attempt in path]\n"
            "            store.replace(MANIFEST_NAME, content)\n",
        ),
        tests=("commit/test_replace.py::test_no_crash_leaves_neither[posix-min]",),
    ),
    "checkpoint_of_a_run_replaced": Mutant(
        clauses=("REQ-CMT-042",),
        fault="replaces whatever manifest is there",
        patch=rewritten(commit._decide_anew, "register.origin.run_id is not None", "False"),
        tests=("commit/test_replace.py::test_a_checkpoint_that_a_run_commits_meanwhile_stays",),
    ),
    "earlier_saves_not_waited_for": Mutant(
        clauses=("REQ-CMT-043",),
        fault="replaces while a save that began before is still under way",
        patch=replaced(save_job, "wait_for_attempts", lambda *_, **__: None),
        tests=("commit/test_replace.py::test_an_earlier_save_is_waited_for",),
    ),
    "removed_before_it_says_so": Mutant(
        clauses=("REQ-CMT-045",),
        fault="deletes the files of a checkpoint outside of a run before its register says so",
        patch=replaced(lone, "_end", lambda *_: None),
        tests=("commit/test_replace.py::test_no_crash_leaves_half_of_what_is_removed",),
    ),
    "other_files_removed": Mutant(
        clauses=("REQ-CMT-045",),
        fault="removes whatever lies beside a checkpoint",
        patch=replaced(lone, "_is_ours", lambda *_: True),
        tests=("commit/test_replace.py::test_what_is_removed_is_gone_and_nothing_else",),
    ),
    "held_attempts_swept": Mutant(
        clauses=("REQ-CMT-044",),
        fault="deletes the files of whatever isn't in the register",
        patch=rewritten(
            commit.sweep_attempts, "list_held_attempts(store, but=origin.attempt)", "()"
        ),
        tests=("commit/test_replace.py::test_files_of_a_save_that_is_held_stay[before the index]",),
    ),
    "register_not_read_again": Mutant(
        clauses=("REQ-CMT-044",),
        fault="takes its own attempt for what the register still holds",
        patch=rewritten(
            commit.sweep_attempts,
            "committed = register.origin.attempt",
            "committed = origin.attempt",
        ),
        tests=(
            "commit/test_replace.py::test_one_that_was_replaced_meanwhile_is_not_taken_for_what_is_there",
        ),
    ),
    "retired_uncondemned": Mutant(
        clauses=("REQ-CMT-032",),
        fault="retires without saying so before",
        patch=rewritten(
            retention._retire_unread, 'store.at(entry.name).create(name, [b""])', "pass"
        ),
        tests=(
            "delta/test_delta.py::test_a_cleaner_condemns_then_looks_for_pins_then_for_references",
        ),
    ),
    "looked_for_before_condemned": Mutant(
        clauses=("REQ-CMT-032",),
        fault="looks for pins and references first, and condemns then",
        patch=rewritten(
            retention._retire_unread,
            "        for entry in going:\n"
            '            store.at(entry.name).create(name, [b""])\n'
            "        read = _find_read(store, run, going, known)\n",
            "        read = _find_read(store, run, going, known)\n"
            "        for entry in going:\n"
            '            store.at(entry.name).create(name, [b""])\n',
        ),
        tests=(
            "delta/test_delta.py::test_a_cleaner_condemns_then_looks_for_pins_then_for_references",
        ),
    ),
    "references_before_pins": Mutant(
        clauses=("REQ-CMT-032",),
        fault="reads the registers before it looks for pins",
        patch=rewritten(
            retention._find_read,
            "    pinned = _find_pinned(store, list_checkpoints(store, run, known=known))\n"
            "    entries = list_checkpoints(store, run, known=known)\n",
            (
                "    entries = list_checkpoints(store, run, known=known)\n    pinned ="
                " _find_pinned(store, entries)\n"
            ),
        ),
        tests=(
            "delta/test_delta.py::test_a_cleaner_condemns_then_looks_for_pins_then_for_references",
        ),
    ),
    "pins_not_looked_for": Mutant(
        clauses=("REQ-CMT-032",),
        fault="retires what an undecided checkpoint has pinned",
        patch=replaced(retention, "_find_pinned", lambda *_: set()),
        tests=("delta/test_delta.py::test_what_is_pinned_stays_and_is_no_more_condemned",),
    ),
    "one_name_for_all_cleaners": Mutant(
        clauses=("REQ-CMT-033",),
        fault="condemns under a name that every cleaner of the run uses",
        patch=rewritten(retention._retire_unread, "secrets.token_hex(8)", "run.run_id[:16]"),
        tests=("delta/test_delta.py::test_no_cleaner_takes_a_condemnation_of_another_away",),
    ),
    "all_condemnations_withdrawn": Mutant(
        clauses=("REQ-CMT-033",),
        fault="deletes the condemnations of others with its own",
        patch=rewritten(
            retention._retire_unread,
            "store.at(entry.name).delete(name)",
            (
                "[store.at(entry.name).delete(one) for one in store.at(entry.name).list('') if"
                " one.startswith(CONDEMNED)]"
            ),
        ),
        tests=("delta/test_delta.py::test_no_cleaner_takes_a_condemnation_of_another_away",),
    ),
    "unreadable_registers_passed_over": Mutant(
        clauses=("REQ-CMT-034",),
        fault="passes over a register that it can't read",
        patch=rewritten(
            retention._find_read,
            "if any(isinstance(entry.register, CkptError) for entry in entries):",
            "if not entries:",
        ),
        tests=("delta/test_delta.py::test_a_register_that_cannot_be_read_protects_everything",),
    ),
    "unreadable_pins_passed_over": Mutant(
        clauses=("REQ-CMT-034",),
        fault="passes over pins that it can't read",
        patch=rewritten(
            retention._find_pinned,
            (
                "                found.update(one.digest for one in Pins.parse(content,"
                " where=path).references)\n"
            ),
            "                try:\n"
            "                    found.update(one.digest for one in Pins.parse(content,"
            " where=path).references)\n"
            "                except CkptError:\n"
            "                    pass\n",
        ),
        tests=("delta/test_delta.py::test_pins_that_cannot_be_read_protect_everything",),
    ),
    "pins_by_hand_not_looked_for": Mutant(
        clauses=("REQ-CMT-040", "REQ-CMT-032"),
        fault="goes by the pins that it saw before it condemned",
        patch=replaced(retention, "_find_labelled", lambda *_: {}),
        tests=("run/test_catalog.py::test_a_pin_between_the_choice_and_the_tombstone_holds",),
    ),
    "unreadable_labels_pin_nothing": Mutant(
        clauses=("REQ-CMT-040",),
        fault="takes a record of labels that it can't read for none",
        patch=rewritten(
            lineage.RunEntry.is_pinned.fget,  # type: ignore[attr-defined]
            "isinstance(self.record, CkptError) or (self.record is not None and",
            "not isinstance(self.record, CkptError) and (self.record is not None and",
        ),
        tests=(
            "run/test_catalog.py::test_a_record_that_cannot_be_read_pins_until_somebody_unpins",
        ),
    ),
    "resuming_reads_labels": Mutant(
        clauses=("REQ-RUN-026",),
        fault="reads the records of labels to find what to resume from",
        patch=replaced(
            lineage,
            "list_checkpoints",
            lambda right, *arguments, **options: right(
                *arguments, **{**options, "with_labels": True}
            ),
        ),
        tests=(
            "run/test_catalog.py::test_what_to_resume_from_is_chosen_without_records_of_labels",
        ),
    ),
    "pinned_before_it_is_recorded": Mutant(
        clauses=("REQ-CMT-041",),
        fault="looks for condemnations, and records the pin without looking again",
        patch=rewritten(
            labelling.pin_checkpoint,
            "    made = change_labels(store, run, checkpoint, lambda known:"
            " dataclasses.replace(known, pinned=True))\n"
            '    wait_for_cleaners(store, checkpoint, requirement="REQ-CMT-041")\n'
            "    return made\n",
            '    wait_for_cleaners(store, checkpoint, requirement="REQ-CMT-041")\n'
            "    return change_labels(store, run, checkpoint, lambda known:"
            " dataclasses.replace(known, pinned=True))\n",
        ),
        tests=("run/test_catalog.py::test_a_pin_that_comes_second_waits_for_the_cleaner",),
    ),
    "pin_not_synced": Mutant(
        clauses=("REQ-CMT-041",),
        fault="relies on a record whose name a crash may take away",
        patch=rewritten(labelling.change_labels, "        store.sync(LABELS_FOLDER)\n", ""),
        tests=("run/test_catalog.py::test_a_pin_looks_for_condemnations_and_then_at_the_register",),
    ),
    "labels_of_another_overwritten": Mutant(
        clauses=("REQ-RUN-024",),
        fault="makes a record from what it read first, and takes any number",
        patch=rewritten(
            labelling.change_labels,
            "                continue\n",
            "                made = dataclasses.replace(made, number=number + 1)\n"
            "                store.create(made.path, [made.dump()])\n"
            "                return made\n",
        ),
        tests=("run/test_catalog.py::test_who_was_slower_adds_to_what_the_faster_one_said",),
    ),
    "first_record_counts": Mutant(
        clauses=("REQ-RUN-025",),
        fault="goes by the first record of a checkpoint",
        patch=replaced(
            lineage,
            "list_newest_labels",
            lambda _, store: {name[:-10]: 1 for name in store.list_names("labels")},
        ),
        tests=("run/test_catalog.py::test_tags_and_pins_are_given_and_taken",),
    ),
}

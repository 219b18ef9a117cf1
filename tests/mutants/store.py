"""Mutants of the stores: what a store promises to all that is built on it."""

from __future__ import annotations

import errno
import functools
from collections.abc import Iterable
from typing import Any
from unittest import mock

from ckptfmt.commit import decision as commit
from ckptfmt.commit import lone, waiting
from ckptfmt.errors import Code
from ckptfmt.store import leases, local, posix
from ckptfmt.store.local import LocalStore
from ckptfmt.store.memory import _Bucket
from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.protocol import Buffer
from tests.mutants.mutant import Mutant, replaced, rewritten
from tests.stores.hooked import HookedCalls
from tests.stores.recorder import RecordingCalls


def _look_then_rename(
    _right: Any, self: LocalStore, directory: int, temporary: str, name: str
) -> None:
    try:
        self._calls.lstat(name, directory)
    except FileNotFoundError:
        self._calls.rename(temporary, name, directory)
    else:
        self._discard(directory, temporary)
        raise FileExistsError(name)


def _write_in_place(_right: Any, self: LocalStore, path: str, chunks: Iterable[Buffer]) -> None:
    with self._changing(path), self._parent(path, make=True) as (directory, name):
        fd = self._calls.open_new(name, directory)
        for chunk in chunks:
            self._calls.write(fd, memoryview(chunk))
        self._calls.fsync(fd)
        self._calls.close(fd)


def _once_more(right: Any, self: HookedCalls, fd: int) -> None:
    try:
        right(self, fd)
    except OSError:
        right(self, fd)


def _is_there(_right: Any, calls: PosixCalls, directory: int, name: str) -> bool:
    calls.lstat(name, directory)
    return True


MUTANTS = {
    "looks_before_it_renames": Mutant(
        clauses=("REQ-STO-001",),
        fault="looks whether a name is free, and then renames over whatever has it by then",
        patch=replaced(LocalStore, "_publish", _look_then_rename),
        tests=(
            "store/test_local.py::test_whenever_another_takes_the_name_one_of_the_two_has_it[link]",
        ),
    ),
    "unconditional_put": Mutant(
        clauses=("REQ-STO-001",),
        fault="puts an object that is there already",
        patch=rewritten(
            _Bucket.carry_out, "put.exclusive and put.key in self.objects", "not put.key"
        ),
        tests=(
            "store/test_protocol.py::test_a_taken_name_stays_as_it_is[memory]",
            "store/test_protocol.py::test_of_eight_threads_one_wins_each_name[memory]",
        ),
    ),
    "no_fsync_of_files": Mutant(
        clauses=("REQ-STO-002",),
        fault="gives files their names before their contents are durable",
        patch=replaced(RecordingCalls, "fsync", lambda *_: None),
        tests=(
            "store/test_local.py::test_a_file_is_durable_before_it_has_its_name",
            "store/test_local.py::test_a_replacement_is_durable_before_it_has_its_name",
        ),
    ),
    "written_under_its_name": Mutant(
        clauses=("REQ-STO-002",),
        fault="writes a file under its own name",
        patch=replaced(LocalStore, "create", _write_in_place),
        tests=("store/test_local.py::test_a_reader_sees_a_new_file_whole_or_not_at_all",),
    ),
    "lost_answer_is_a_failure": Mutant(
        clauses=("REQ-STO-003",),
        fault="takes an error of a link for a failure, without looking whether the name is there",
        patch=rewritten(
            LocalStore._publish,
            "if not self._is_published(directory, temporary, name):",
            "if self._discard(directory, temporary) is None:",
        ),
        tests=(
            "store/test_local.py::test_a_link_whose_answer_is_lost_is_recognised_as_ours[5]",
            "store/test_local.py::test_when_the_outcome_of_a_link_cannot_be_told_that_is_said[lstat]",
        ),
    ),
    "time_out_is_a_failure": Mutant(
        clauses=("REQ-STO-003",),
        fault="takes the time-out of a network file system for any other error",
        patch=functools.partial(mock.patch.dict, local._CODES, {errno.ETIMEDOUT: Code.STORE_IO}),
        tests=(
            "store/test_faults.py::test_a_file_system_that_does_not_answer_leaves_it_unknown[create]",
            "store/test_faults.py::test_a_file_system_that_does_not_answer_leaves_it_unknown[replace]",
        ),
    ),
    "only_the_last_directory_synced": Mutant(
        clauses=("REQ-STO-004",),
        fault="makes the names in a directory durable, and not the directory's own",
        patch=rewritten(
            LocalStore.sync,
            "self._directory(self._full(path), on_each=self._calls.fsync_directory):\n        pass",
            (
                "self._directory(self._full(path)) as directory:\n       "
                " self._calls.fsync_directory(directory)"
            ),
        ),
        tests=(
            "store/test_local.py::test_sync_reaches_from_the_directory_up_to_the_opened_root[link-x]",
        ),
    ),
    "removed_before_it_is_replaced": Mutant(
        clauses=("REQ-STO-005",),
        fault="removes a file before it puts another in its place",
        patch=rewritten(
            LocalStore.replace,
            "self._calls.rename(temporary, name, directory)",
            "self._discard(directory, name); self._calls.rename(temporary, name, directory)",
        ),
        tests=("store/test_local.py::test_a_reader_sees_the_old_bytes_or_the_new_ones",),
    ),
    "replaces_what_had_no_answer": Mutant(
        clauses=("REQ-STO-005",),
        fault="replaces a file whose creation got no answer, instead of creating it again",
        patch=rewritten(
            commit.create_once,
            "store.create(path, contents)",
            (
                "store.create(path, contents) if attempt == 0 else store.replace(path,"
                ' b"".join(contents))'
            ),
        ),
        tests=("commit/test_commit.py::test_only_a_register_is_ever_replaced[Loss.REQUEST]",),
    ),
    "fsync_tried_again": Mutant(
        clauses=("REQ-STO-007",),
        fault="repeats an fsync that failed",
        patch=replaced(HookedCalls, "fsync", _once_more),
        tests=(
            "store/test_faults.py::test_an_fsync_that_fails_is_not_tried_again[create-fsync]",
            "store/test_faults.py::test_an_fsync_that_fails_is_not_tried_again[replace-fsync]",
        ),
    ),
    "fsync_of_names_tried_again": Mutant(
        clauses=("REQ-STO-007",),
        fault="repeats the fsync of a directory that failed",
        patch=replaced(HookedCalls, "fsync_directory", _once_more),
        tests=(
            "store/test_faults.py::test_an_fsync_that_fails_is_not_tried_again[sync-fsync_directory]",
        ),
    ),
    "held_as_long_as_the_file_is_there": Mutant(
        clauses=("REQ-STO-008",),
        fault="takes a file for held that a killed process left",
        patch=replaced(local, "is_held", _is_there),
        tests=(
            "store/test_hold.py::test_a_killed_process_holds_no_more_and_its_file_does_no_harm",
        ),
    ),
    "asking_removes_the_file": Mutant(
        clauses=("REQ-STO-008",),
        fault="removes a file that nobody holds when it is asked",
        patch=rewritten(
            posix.is_held,
            "return not _try_lock(calls, fd)",
            (
                "free = _try_lock(calls, fd); free and calls.unlink(name, directory_fd); return not"
                " free"
            ),
        ),
        tests=("store/test_hold.py::test_asking_changes_nothing",),
    ),
    "lease_counts_as_long_as_it_is_there": Mutant(
        clauses=("REQ-STO-008",),
        fault="takes a lease for running that nobody renews any more",
        patch=rewritten(leases.Leases.list_held, " if now_s - modified_s < self._term_s", ""),
        tests=("store/test_leases.py::test_a_dead_process_holds_for_a_term_and_no_longer",),
    ),
    "lease_not_renewed": Mutant(
        clauses=("REQ-STO-009",),
        fault="writes a lease once",
        patch=rewritten(leases.Leases._renew, "self._objects.put(lease.key)", "pass"),
        tests=("store/test_leases.py::test_a_living_process_holds_for_as_long_as_it_wants",),
    ),
    "lease_given_up_after_an_error": Mutant(
        clauses=("REQ-STO-009",),
        fault="doesn't renew a lease any more once that has failed",
        patch=rewritten(leases.Leases._renew, "now_s + self._term_s / _REPEATS", "now_s + 1e9"),
        tests=("store/test_leases.py::test_renewals_that_fail_are_repeated",),
    ),
    "lease_by_the_askers_clock": Mutant(
        clauses=("REQ-STO-010",),
        fault="goes by its own clock although it may write",
        patch=rewritten(leases.Leases._look, "not self._writable", "True"),
        tests=("store/test_leases.py::test_clocks_of_machines_mean_nothing_to_who_may_write[30]",),
    ),
    "replaces_where_holds_are_leases": Mutant(
        clauses=("REQ-STO-011",),
        fault="replaces a checkpoint where a stopped save holds nothing any more",
        patch=rewritten(waiting.hold_attempt, "must and store.holds_expire", "False"),
        tests=("commit/test_replace.py::test_a_store_without_locks_is_refused",),
    ),
    "register_removed_where_holds_are_leases": Mutant(
        clauses=("REQ-STO-011",),
        fault="deletes the register of what it removes although a stopped save may go on",
        patch=rewritten(lone.remove_alone, "not store.holds_expire", "True"),
        tests=("commit/test_replace.py::test_a_stopped_save_commits_nothing_that_was_removed",),
    ),
}

"""From parts to a decision: waiting, conflicts, repeats, lost answers, ends."""

import dataclasses
import itertools
import os
import shutil
import socket
import threading
import time
import zlib

import numpy as np
import pytest

from ckptfmt.commit.decision import (
    abort,
    commit,
    create_once,
    decide,
    finalize,
    read_register,
    retire,
    sweep,
    sweep_attempts,
    wait_for_decision,
)
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.manifest import (
    Abort,
    Manifest,
    Tombstone,
    failure_path,
    index_name,
    part_path,
)
from ckptfmt.documents.msgpk import dump_msgpack, dump_packed_document, open_packed_document
from ckptfmt.documents.part import dump_failure
from ckptfmt.documents.versions import EARLIER
from ckptfmt.errors import CkptError, Code, CommitError, IntegrityError, LayoutError, err
from ckptfmt.read.files import read_manifest
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store import LocalStore, open_store
from ckptfmt.store.memory import Loss, MemoryStore
from ckptfmt.write.writer import tell_failure, write_failure, write_part
from tests.builders import (
    ATTEMPT,
    code_of,
    error_of,
    leaf,
    origin,
    parse_signed,
    save,
    snapshot,
    tensor,
    two_writers,
    verify,
)
from tests.homes import files_of
from tests.house.sources import ROOT
from tests.stores.faults import Fault, FaultStore
from tests.stores.recorder import Recorder

INDEX = index_name(ATTEMPT)
ORIGIN = origin(writer_count=2)


def write_parts(store):
    for writer, held in enumerate(two_writers()):
        write_part(store, held, ORIGIN, writer=writer)
    return store


@pytest.fixture
def written(home):
    """A store with the parts of two writers, undecided."""
    return write_parts(home.store())


@pytest.fixture
def lossy():
    """The same in a store that loses requests and answers as it is told to."""
    return write_parts(MemoryStore())


def another(step=3, **members):
    return origin(writer_count=2, step=step, attempt="f" * 16, **members)


def test_a_commit_is_there_and_whole(written):
    """REQ-CMT-009."""
    manifest = commit(written, ORIGIN, deadline_s=1)
    assert read_register(written) == manifest
    assert manifest.digest
    assert verify(written).valid
    assert wait_for_decision(written, ORIGIN, deadline_s=0) == manifest


def test_finalize_may_be_called_by_anyone_any_number_of_times(written):
    """REQ-IDX-005, REQ-CMT-006: the same bytes each time."""
    first = finalize(written, ORIGIN)
    before = files_of(written)
    assert finalize(written, ORIGIN) == first
    assert files_of(written) == before


def test_who_commits_and_when_does_not_show(home, written, monkeypatch):
    """REQ-MAN-009: two committers of the same parts make the same files."""
    twin = home.store(files_of(written))
    finalize(written, ORIGIN)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    finalize(twin, ORIGIN)
    assert files_of(twin) == files_of(written)


def recompressed(content, level):
    """The same document, from a committer whose zlib makes something else of it."""
    stored = zlib.compress(open_packed_document(content, where="x")[0], level)
    nbytes = len(zlib.decompress(stored))
    return dump_msgpack({"digest": digest_bytes(stored), "nbytes": nbytes, "signed": stored})


@pytest.mark.parametrize("level", [0, 9])
def test_an_index_that_says_the_same_is_taken_as_it_is(home, written, level):
    """REQ-CMT-006, REQ-IDX-005: another committer compressed it, to more bytes or to fewer."""
    twin = home.store(files_of(written))
    finalize(twin, ORIGIN)
    theirs = recompressed(files_of(twin)[INDEX], level)
    assert theirs != files_of(twin)[INDEX]
    written.create(INDEX, [theirs])
    manifest = finalize(written, ORIGIN)
    assert manifest.index_nbytes == len(theirs)
    assert files_of(written)[INDEX] == theirs
    assert finalize(written, ORIGIN) == manifest
    assert verify(written).valid


def other_index(content):
    """An index that says something else, under a valid digest."""
    signed = parse_signed(content)
    signed["absent"] = dict.fromkeys(signed["absent"], "another reason")
    return dump_packed_document(signed)[0]


OTHER_INDICES = {
    "cut": lambda content: content[:-1],
    "longer": lambda content: content + b"x",
    "damaged": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "empty": lambda _: b"",
    "of another content": other_index,
    "no document": lambda _: b"hello",
}


@pytest.mark.parametrize("change", OTHER_INDICES.values(), ids=OTHER_INDICES)
def test_an_index_that_says_something_else_is_a_conflict(home, written, change):
    """REQ-CMT-006: nothing is decided then."""
    twin = home.store(files_of(written))
    finalize(twin, ORIGIN)
    written.create(INDEX, [change(files_of(twin)[INDEX])])
    error = error_of(lambda: finalize(written, ORIGIN))
    assert (error.code, error.requirement, error.where) == (
        Code.COMMIT_CONFLICT,
        "REQ-CMT-006",
        INDEX,
    )
    assert read_register(written) is None


def test_eight_committers_at_once_make_one_checkpoint(written):
    results: list[object] = []

    def run():
        try:
            results.append(finalize(written, ORIGIN))
        except CkptError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(result == results[0] for result in results)
    assert isinstance(results[0], Manifest)


def test_a_missing_writer_is_named_at_the_deadline(home):
    """Row 95; REQ-CMT-005."""
    store = home.store()
    write_part(store, two_writers()[0], ORIGIN, writer=0)
    error = error_of(lambda: commit(store, ORIGIN, deadline_s=0.02))
    assert (error.code, type(error)) == (Code.WRITERS_MISSING, CommitError)
    assert "writers 1 " in error.detail
    assert read_register(store) is None
    assert INDEX not in files_of(store)


def test_parts_of_another_attempt_do_not_count(written):
    """REQ-CMT-003, REQ-CKP-005."""
    error = error_of(lambda: commit(written, another(), deadline_s=0.01))
    assert error.code == Code.WRITERS_MISSING
    assert "0, 1" in error.detail


def test_a_failed_writer_is_not_waited_for(home, monkeypatch):
    """REQ-CMT-004: the first look finds it."""
    monkeypatch.setattr("ckptfmt.commit.decision.poll", lambda _: [None])
    store = home.store()
    write_part(store, two_writers()[0], ORIGIN, writer=0)
    write_failure(store, ORIGIN, 1, err(Code.NO_SPACE, "full"))
    for wait in (
        lambda: commit(store, ORIGIN, deadline_s=60),
        lambda: wait_for_decision(store, ORIGIN, deadline_s=60),
    ):
        error = error_of(wait)
        assert (error.code, error.requirement) == (Code.WRITER_FAILED, "REQ-CMT-004")
        assert "writer 1: NO_SPACE" in error.detail
    assert read_register(store) is None


def test_what_one_writer_says_of_the_attempt_all_raise(home):
    """REQ-CMT-038: the same error, whole, whoever found it."""
    told = [
        err(
            Code.REPLICA_DIVERGED,
            "writers 0 and 1 differ",
            where="weights 'w'",
            requirement="REQ-CMT-012",
        ),
        err(Code.FENCED, "launch 2 has taken over from launch 1", requirement="REQ-RUN-004"),
        err(
            Code.WRITERS_MISSING,
            "no part of writers 2 within 1 s",
            where="parts/",
            remedy="Look at writer 2.",
        ),
    ]
    for error in told:
        store = home.store()
        write_failure(store, ORIGIN, 0, error)
        found = error_of(lambda store=store: wait_for_decision(store, ORIGIN, deadline_s=60))
        assert (type(found), found.as_json()) == (type(error), error.as_json())


def test_what_one_writer_says_of_itself_is_not_said_of_the_others(home):
    """REQ-CMT-038: with all that it said, and not cut in mid-word."""
    store, long = home.store(), "no space is left " * 100
    write_failure(store, ORIGIN, 1, err(Code.NO_SPACE, long, where="weights", remedy="Free space."))
    error = error_of(lambda: wait_for_decision(store, ORIGIN, deadline_s=60))
    assert error.code == Code.WRITER_FAILED
    assert error.detail.startswith("writer 1: NO_SPACE at weights: no space is left no space")
    assert len(error.detail) > 900
    assert error.detail.rpartition(" ")[2] in ("no...", "space...", "is...", "left...")
    assert error.remedy == "On writer 1: Free space."


def test_a_record_of_another_writers_failure_is_not_left(home):
    """REQ-CMT-004: who waits finds the record of the one that failed."""
    store = home.store()
    write_failure(store, ORIGIN, 1, err(Code.NO_SPACE, "full"))
    tell_failure(
        store, ORIGIN, 0, error_of(lambda: wait_for_decision(store, ORIGIN, deadline_s=60))
    )
    assert [path for path in files_of(store) if "failure" in path] == [
        failure_path(ORIGIN.attempt, 1)
    ]


def test_a_failure_of_another_attempt_does_not_count(written):
    write_failure(written, another(), 1, err(Code.NO_SPACE, "full"))
    assert commit(written, ORIGIN, deadline_s=1) == read_register(written)


@pytest.mark.parametrize(("attempt", "writer"), [(ORIGIN.attempt, 0), ("f" * 16, 1)])
def test_a_failure_record_under_the_name_of_another_is_refused(home, attempt, writer):
    """REQ-CMT-050: a record that was copied to another name says nothing of the writer in that name."""
    store = home.store()
    record = dump_failure(
        dataclasses.replace(ORIGIN, attempt=attempt), writer, err(Code.NO_SPACE, "full")
    )
    store.create(failure_path(ORIGIN.attempt, 1), [record])

    error = error_of(lambda: wait_for_decision(store, ORIGIN, deadline_s=60))

    assert (error.code, error.requirement) == (Code.DOC_MISMATCH, "REQ-CMT-050")
    assert f"writer {writer} of attempt {attempt}" in error.detail


@pytest.mark.parametrize("writer", [0, 1])
def test_a_save_is_committed_only_when_the_name_of_its_register_is_synced(home, written, writer):
    """REQ-CMT-009: for who commits, and for who learns it from the register."""
    if writer:
        finalize(written, ORIGIN)
    twin = home.store(files_of(written))
    recorder = Recorder(written)
    decide(recorder, ORIGIN, writer=writer, deadline_s=1)
    steps = [(step.op, step.path) for step in recorder.log.operations]
    assert ("sync", "") in steps[steps.index(("read" if writer else "create", "manifest.json")) :]
    # The committer syncs the names of the parts before.
    failing = FaultStore(twin, Fault(fail_at=1 if writer else 2, operations=frozenset({"sync"})))
    assert code_of(lambda: decide(failing, ORIGIN, writer=writer, deadline_s=1)) == Code.STORE_IO
    assert isinstance(read_register(twin), Manifest)


def test_waiting_for_a_decision_has_a_deadline(home, written):
    """REQ-CMT-009."""
    assert (
        code_of(lambda: wait_for_decision(written, ORIGIN, deadline_s=0.01)) == Code.COMMIT_UNKNOWN
    )
    nobody = home.store()
    assert (
        code_of(lambda: wait_for_decision(nobody, ORIGIN, deadline_s=0.01)) == Code.WRITERS_MISSING
    )


def test_a_late_part_is_waited_for(home):
    """REQ-CMT-005."""
    store = home.store()
    parts = two_writers()
    write_part(store, parts[0], ORIGIN, writer=0)
    late = threading.Timer(0.05, lambda: write_part(store, parts[1], ORIGIN, writer=1))
    late.start()
    assert commit(store, ORIGIN, deadline_s=30) == read_register(store)
    late.join()


@pytest.mark.parametrize("edit", ["step", "nonce", "writer"])
def test_a_part_under_the_wrong_name_is_refused(home, edit):
    """REQ-PRT-001, REQ-CMT-010: a part of another origin, with this attempt's id."""
    other = {
        "step": origin(writer_count=2, step=4),
        "nonce": origin(writer_count=2, nonce="0" * 32),
        "writer": ORIGIN,
    }[edit]
    store = home.store()
    elsewhere = home.store()
    parts = two_writers()
    write_part(store, parts[0], ORIGIN, writer=0)
    write_part(elsewhere, parts[1], other, writer=0 if edit == "writer" else 1)
    content = files_of(elsewhere)[part_path(ATTEMPT, 0 if edit == "writer" else 1)]
    store.create(part_path(ATTEMPT, 1), [content])
    assert code_of(lambda: commit(store, ORIGIN, deadline_s=1)) == Code.WRITERS_DIVERGED
    assert read_register(store) is None


def test_parts_that_agree_on_another_step_than_the_committer_are_refused(home):
    """REQ-PRT-001, REQ-CMT-010."""
    store = home.store()
    for writer, held in enumerate(two_writers()):
        write_part(store, held, origin(writer_count=2, step=4), writer=writer)
    assert code_of(lambda: commit(store, ORIGIN, deadline_s=1)) == Code.WRITERS_DIVERGED
    assert read_register(store) is None


def test_layouts_that_do_not_fit_decide_nothing(home):
    """REQ-CMT-012, REQ-CMT-013, REQ-CMT-015: the register isn't created."""
    for other, code in (
        (tensor("w", np.zeros(3)), Code.REPLICA_DIVERGED),
        (tensor("w", np.ones(4)), Code.TENSOR_DIVERGED),
        (tensor("w", np.ones(3, np.float32)), Code.TENSOR_DIVERGED),
    ):
        store = home.store()
        error = error_of(
            lambda store=store, other=other: save(
                store, snapshot(tensor("w", np.ones(3))), snapshot(other)
            )
        )
        assert (error.code, type(error)) == (code, LayoutError)
        assert "'w'" in error.where
        assert read_register(store) is None
        assert not any(name.startswith("index") for name in files_of(store))


@pytest.mark.parametrize(
    ("field", "remedy"), [("data", "ckptfmt.PerWorker"), ("config", "ckptfmt.FirstWorker(config)")]
)
def test_a_leaf_that_differs_is_named_by_its_path(home, field, remedy):
    """REQ-CMT-014, REQ-CTX-001: a configuration is that of the whole run, and belongs to no process."""
    parts = [
        snapshot(leaves=[leaf(field, {"data": {"rank": rank}}, name="cfg")]) for rank in range(2)
    ]
    error = error_of(lambda: save(home.store(), *parts))
    assert error.code == Code.LEAF_DIVERGED
    assert "'cfg'" in error.where
    assert "at /data/rank: 0 and 1" in error.detail
    assert remedy in error.remedy


@pytest.mark.parametrize(
    "path", [f"weights-{ATTEMPT}-00001.safetensors", f"optimizer-{ATTEMPT}-00000.safetensors"]
)
def test_every_file_is_there_with_its_size_before_the_decision(home, written, path):
    """REQ-CMT-007."""
    files = files_of(written)
    for content, code in (
        (None, Code.FILE_MISSING),
        (files[path][:-1], Code.FILE_NBYTES),
        (files[path] + b"x", Code.FILE_NBYTES),
    ):
        changed = {name: data for name, data in files.items() if name != path} | (
            {path: content} if content else {}
        )
        store = home.store(changed)
        error = error_of(lambda store=store: finalize(store, ORIGIN))
        assert (error.code, error.where, type(error)) == (code, path, IntegrityError)
        assert read_register(store) is None


def test_a_damaged_part_decides_nothing(home, written):
    files = files_of(written)
    path = part_path(ATTEMPT, 1)
    files[path] = files[path][:-1] + bytes([files[path][-1] ^ 1])
    store = home.store(files)
    assert code_of(lambda: finalize(store, ORIGIN)) in (
        Code.DOC_DIGEST,
        Code.MSGPACK_SYNTAX,
        Code.DOC_NOT_CANONICAL,
    )
    assert read_register(store) is None


def test_a_reason_that_no_manifest_may_hold_decides_nothing(home):
    """REQ-PRT-009, REQ-MAN-003: what is committed can be read; a register can't be mended."""
    for reason in ("x" * 1001, "line\nfeed", "\u202e", "e\u0301", ""):
        store = home.store()
        made = snapshot(tensor("w", np.ones(2)), absent={"data": reason})
        assert code_of(lambda store=store, made=made: save(store, made)) == Code.MANIFEST_FIELDS
        assert read_register(store) is None


def test_a_step_that_no_document_may_hold_decides_nothing(home):
    """REQ-DOC-005."""
    store = home.store()
    assert code_of(lambda: save(store, snapshot(tensor("w", np.ones(2))), step=2**53)) != "ok"
    assert read_register(store) is None


def test_an_index_of_other_contents_is_a_conflict(written):
    """REQ-CMT-006."""
    written.create(INDEX, [b"other"])
    error = error_of(lambda: finalize(written, ORIGIN))
    assert (error.code, error.where) == (Code.COMMIT_CONFLICT, INDEX)
    assert read_register(written) is None


def test_the_second_attempt_loses(written):
    """REQ-CMT-008; row 128."""
    first = commit(written, ORIGIN, deadline_s=1)
    for writer, held in enumerate(two_writers()):
        write_part(written, held, another(), writer=writer)
    for refused in (
        lambda: finalize(written, another()),
        lambda: wait_for_decision(written, another(), deadline_s=9),
    ):
        error = error_of(refused)
        assert (error.code, type(error)) == (Code.COMMIT_CONFLICT, CommitError)
        assert ATTEMPT in error.detail
    assert read_register(written) == first
    assert Checkpoint(written).digest == first.digest


def commit_twice(home, files, at):
    """Commit an attempt, and another just before the operation `at` of the first; return outcomes and store."""
    store, operations = home.store(files), itertools.count(1)
    outcomes: list[Manifest | Code] = []

    def attempt(place, made):
        try:
            outcomes.append(finalize(place, made))
        except CkptError as error:
            outcomes.append(error.code)

    def gate(_):
        if next(operations) == at:
            attempt(store, another())

    attempt(Recorder(store, gate=gate), ORIGIN)
    return outcomes, store


@pytest.mark.long_on_s3
def test_whenever_another_attempt_commits_one_of_the_two_has_the_register(home, written):
    """REQ-CMT-008."""
    for writer, held in enumerate(two_writers()):
        write_part(written, held, another(), writer=writer)
    winners = set()
    for at in itertools.count(1):
        outcomes, store = commit_twice(home, files_of(written), at)
        if len(outcomes) == 1:
            break
        won = read_register(store)
        assert isinstance(won, Manifest)
        assert outcomes in ([won, Code.COMMIT_CONFLICT], [Code.COMMIT_CONFLICT, won])
        winners.add(won.origin.attempt)
    assert winners == {ATTEMPT, another().attempt}


def test_what_was_aborted_is_never_committed(home, written):
    """REQ-CMT-020: a committer that was only slow finds the record."""
    assert abort(written, run_id=None, launch=None, step=3, reason="gone")
    assert list(files_of(written)) == ["manifest.json"]
    late = home.store(files_of(written))
    for writer, held in enumerate(two_writers()):
        write_part(late, held, ORIGIN, writer=writer)
    for refused in (
        lambda: finalize(late, ORIGIN),
        lambda: wait_for_decision(late, ORIGIN, deadline_s=9),
        lambda: read_manifest(late),
    ):
        assert error_of(refused).code == Code.CHECKPOINT_ABORTED
    assert abort(late, run_id=None, launch=None, step=3, reason="again")
    assert read_register(late) == Abort(run_id=None, launch=None, step=3, reason="gone")


def test_what_was_decided_is_not_aborted(written):
    """REQ-CMT-020."""
    manifest = commit(written, ORIGIN, deadline_s=1)
    assert abort(written, run_id=None, launch=None, step=3, reason="gone") is False
    assert verify(written).valid
    retire(written, manifest)
    assert abort(written, run_id=None, launch=None, step=3, reason="gone") is False


def test_what_was_retired_stays_retired(written):
    """REQ-CMT-022, REQ-CMT-023."""
    manifest = commit(written, ORIGIN, deadline_s=1)
    retire(written, manifest)
    assert list(files_of(written)) == ["manifest.json"]
    assert read_register(written) == Tombstone(
        run_id=None, launch=None, step=3, manifest_digest=manifest.digest
    )
    error = error_of(lambda: read_manifest(written))
    assert (error.code, type(error)) == (Code.CHECKPOINT_RETIRED, IntegrityError)
    assert manifest.digest in error.detail
    for writer, held in enumerate(two_writers()):
        write_part(written, held, another(), writer=writer)
    assert code_of(lambda: finalize(written, another())) == Code.CHECKPOINT_RETIRED
    assert (
        code_of(lambda: wait_for_decision(written, another(), deadline_s=9))
        == Code.CHECKPOINT_RETIRED
    )
    sweep(written)
    assert list(files_of(written)) == ["manifest.json"]


@pytest.mark.long_on_s3
def test_the_record_comes_before_the_first_file_goes(home):
    """REQ-CMT-020, REQ-CMT-022: at whatever operation it fails, files go only behind a record."""
    for ending in ("abort", "retire"):
        for fail_at in range(1, 60):
            inner = home.store()
            for writer, held in enumerate(two_writers()):
                write_part(inner, held, ORIGIN, writer=writer)
            manifest = commit(inner, ORIGIN, deadline_s=1) if ending == "retire" else None
            before = set(files_of(inner))
            fault = Fault(fail_at=fail_at)
            store = FaultStore(inner, fault)
            try:
                if manifest is not None:
                    retire(store, manifest)
                else:
                    abort(store, run_id=None, launch=None, step=3, reason="gone")
            except CkptError:
                register = read_register(inner)
                assert set(files_of(inner)) >= before or isinstance(register, Abort | Tombstone)
            if not fault.fired_count:
                assert fail_at > 5
                break
        else:
            raise AssertionError("no end of operations")


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("path_end", ["manifest.json", ".msgpack"])
def test_a_lost_answer_does_not_lose_the_commit(lossy, loss, path_end):
    """REQ-CMT-008, REQ-STO-003."""
    lossy.inject(loss, path_end=path_end)
    manifest = commit(lossy, ORIGIN, deadline_s=1)
    lossy.land()
    assert read_register(lossy) == manifest
    assert verify(lossy).valid


@pytest.mark.parametrize("loss", list(Loss))
def test_only_a_register_is_ever_replaced(loss):
    """REQ-STO-005: and no file that is created again because an answer was lost."""
    inner = MemoryStore()
    recorder = Recorder(inner)
    for path_end in (".safetensors", "-00001.msgpack", INDEX, "manifest.json"):
        inner.inject(loss, path_end=path_end)
    manifest = save(recorder, *two_writers())
    assert not [step for step in recorder.log.operations if step.op == "replace"]
    retire(recorder, manifest)
    assert [step.path for step in recorder.log.operations if step.op == "replace"] == [
        "manifest.json"
    ]


def test_a_store_that_never_answers_leaves_it_unknown(lossy):
    """REQ-CMT-008: nothing is deleted, and who comes later finds out."""
    before = set(lossy.snapshot())
    for _ in range(3):
        lossy.inject(Loss.LATE, path_end="manifest.json")
    error = error_of(lambda: commit(lossy, ORIGIN, deadline_s=1))
    assert (error.code, type(error)) == (Code.COMMIT_UNKNOWN, CommitError)
    assert set(lossy.snapshot()) == before | {INDEX}
    assert lossy.land() == ["manifest.json"]
    assert finalize(lossy, ORIGIN) == read_register(lossy)
    assert verify(lossy).valid


def test_a_register_that_cannot_be_read_back_leaves_it_unknown(lossy):
    """REQ-CMT-008."""
    fault = Fault(fail_at=1, sticky=True, operations=frozenset({"read"}), path_end="manifest.json")
    store = FaultStore(lossy, fault)
    lossy.inject(Loss.ANSWER, path_end="manifest.json")
    assert code_of(lambda: finalize(store, ORIGIN)) == Code.COMMIT_UNKNOWN
    assert isinstance(read_register(lossy), Manifest)
    assert verify(lossy).valid


def test_an_abort_without_an_answer_deletes_nothing(lossy):
    """REQ-CMT-020."""
    before = set(lossy.snapshot())
    for _ in range(3):
        lossy.inject(Loss.REQUEST, path_end="manifest.json")
    assert (
        code_of(lambda: abort(lossy, run_id=None, launch=None, step=3, reason="gone"))
        == Code.COMMIT_UNKNOWN
    )
    assert set(lossy.snapshot()) == before


def test_a_late_abort_meets_the_manifest(lossy):
    """REQ-CMT-008, REQ-CMT-020: the decision is one, whoever comes last."""
    lossy.inject(Loss.LATE, path_end="manifest.json")
    assert abort(lossy, run_id=None, launch=None, step=3, reason="gone")
    assert lossy.land() == []
    assert isinstance(read_register(lossy), Abort)


def test_other_errors_of_the_store_come_through(written):
    """What failed is what is said."""
    fault = Fault(fail_at=1, operations=frozenset({"create"}), path_end="manifest.json")
    assert (
        code_of(lambda: finalize(FaultStore(written, fault, code=Code.NO_SPACE), ORIGIN))
        == Code.NO_SPACE
    )
    assert read_register(written) is None
    assert finalize(written, ORIGIN) == read_register(written)


@pytest.mark.long_on_s3
def test_a_failure_at_any_operation_leaves_all_or_nothing(home):
    """REQ-CMT-005 to REQ-CMT-009: and finalize mends it, once and twice."""
    for applied in (False, True):
        for fail_at in range(1, 40):
            inner = home.store()
            for writer, held in enumerate(two_writers()):
                write_part(inner, held, ORIGIN, writer=writer)
            fault = Fault(fail_at=fail_at, applied=applied)
            code = Code.STORE_NO_ANSWER if applied else Code.STORE_IO
            outcome = code_of(
                lambda inner=inner, fault=fault, code=code: commit(
                    FaultStore(inner, fault, code=code), ORIGIN, deadline_s=1
                )
            )
            if isinstance(read_register(inner), Manifest):
                assert verify(inner).valid
            else:
                assert outcome != "ok"
            assert finalize(inner, ORIGIN) == finalize(inner, ORIGIN)
            assert verify(inner).valid
            if not fault.fired_count:
                assert outcome == "ok"
                break
        else:
            raise AssertionError("no end of operations")


def test_create_once_tells_own_files_from_others(home):
    """REQ-CMT-003, REQ-CMT-006."""
    store = home.store()
    create_once(store, "a", lambda: [b"x"], content=b"x")
    create_once(store, "a", lambda: [b"x"], content=b"x")
    assert (
        code_of(lambda: create_once(store, "a", lambda: [b"y"], content=b"y"))
        == Code.COMMIT_CONFLICT
    )
    assert code_of(lambda: create_once(store, "a", lambda: [b"yy"], content=b"yy")) != "ok"
    assert code_of(lambda: create_once(store, "a", lambda: [b"x"], nbytes=1)) == Code.STORE_EXISTS


def test_leftovers_of_other_attempts_are_swept(home):
    """REQ-CMT-027, REQ-CKP-005: nothing else is."""
    store = home.store()
    save(store, *two_writers())
    store.create("notes.txt", [b"mine"])
    before = files_of(store)
    for writer, held in enumerate(two_writers()):
        write_part(store, held, another(), writer=writer)
    write_failure(store, another(), 1, err(Code.NO_SPACE, "full"))
    store.create(index_name("f" * 16), [b"x"])
    manifest = read_manifest(store)
    sweep_attempts(store, manifest.origin)
    assert files_of(store) == before
    assert verify(store).valid


def test_nothing_is_swept_before_the_decision(home):
    """REQ-CMT-027: until then another attempt may be the one that is committed."""
    store = home.store()
    for writer, held in enumerate(two_writers()):
        write_part(store, held, another(), writer=writer)
    write_part(store, two_writers()[0], ORIGIN, writer=0)
    before = files_of(store)
    assert code_of(lambda: decide(store, ORIGIN, writer=0, deadline_s=0)) == Code.WRITERS_MISSING
    assert files_of(store) == before
    assert finalize(store, another()) == read_register(store)
    assert verify(store).valid


def test_the_same_code_commits_on_a_file_system(tmp_path):
    store = LocalStore(tmp_path / "c", writable=True)
    manifest = save(store, *two_writers())
    assert verify(LocalStore(tmp_path / "c", writable=False)).valid
    retire(store, manifest)
    assert [path.name for path in (tmp_path / "c").rglob("*")] == ["manifest.json"]


@pytest.mark.parametrize("version", EARLIER)
def test_an_attempt_with_parts_and_index_of_an_earlier_version_is_committed(version, tmp_path):
    """A newer program finishes a save after an upgrade: REQ-CMT-006."""
    run = tmp_path / "run"
    shutil.copytree(ROOT / "spec" / "kept" / version / "run", run)
    place = open_store(run, writable=True).at("step-00000001-l0001")
    register = read_register(place)
    assert isinstance(register, Manifest)
    (run / "step-00000001-l0001" / "manifest.json").unlink()

    committed = finalize(place, register.origin)

    assert (committed.index_nbytes, committed.index_digest) == (
        register.index_nbytes,
        register.index_digest,
    )
    assert committed.fields == register.fields
    shutil.rmtree(run)  # the stranger's reader reads no part of these versions

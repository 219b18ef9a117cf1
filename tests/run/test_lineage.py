"""What a run resumes from, and who owns it."""

import json
import threading
from typing import Any

import numpy as np
import pytest

from ckptfmt.commit.decision import abort, retire
from ckptfmt.documents.canonical import dump_document
from ckptfmt.documents.labels import NO_LABELS
from ckptfmt.documents.manifest import Abort, Manifest, Reference, Tombstone, checkpoint_name
from ckptfmt.documents.run import RUN_NAME, Launch, RunRecord, launch_name
from ckptfmt.errors import (
    Code,
    CommitError,
    FencedError,
    FormatError,
    IntegrityError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)
from ckptfmt.run.catalog import Run
from ckptfmt.run.lineage import (
    begin_launch,
    check_not_fenced,
    find_head,
    iter_lineage,
    list_checkpoints,
    list_launches,
    open_run,
    read_run,
)
from ckptfmt.run.retention import Retention, clean_up
from ckptfmt.store import LocalStore
from ckptfmt.store.memory import Loss, MemoryStore
from ckptfmt.write.writer import write_part
from tests.builders import NONCE, code_of, error_of, origin, save, snapshot, tensor
from tests.homes import files_of
from tests.stores.faults import Fault, FaultStore
from tests.stores.hooked import HookedStore


class RunOfSteps:
    """A run in memory, in which launches save steps."""

    def __init__(self, store=None):
        self.store = MemoryStore() if store is None else store
        self.run: Any = open_run(self.store)
        self.launch: Any = None
        self.passed_over: list[str] = []
        self.nonces: dict[int, str] = {}

    def begin(self, **options):
        self.launch, _ = begin_launch(
            self.store, self.run, on_passed_over=self.passed_over.append, **options
        )
        self.nonces[self.launch.launch] = self.launch.nonce
        return self.launch

    def place(self, step, launch=None):
        return self.store.at(checkpoint_name(step, launch or self.launch.launch))

    def save(self, *steps, launch=None, run_id=None, labels=NO_LABELS):
        number = launch or self.launch.launch
        for step in steps:
            save(
                self.place(step, number),
                snapshot(tensor("w", np.full(3, step)), labels=labels),
                step=step,
                launch=number,
                run_id=run_id or self.run.run_id,
                attempt=f"{number:08x}{step:08x}",
                nonce=self.nonces.get(number, NONCE),
            )
        return self

    def damage(self, step, launch):
        """Flip a bit of a tensor."""
        name = checkpoint_name(step, launch)
        path = next(path for path in self.store.list(name) if "weights-" in path)
        content = self.store.read(path, limit_nbytes=10_000)
        self.store.delete(path)
        self.store.create(path, [content[:-1] + bytes([content[-1] ^ 1])])

    def head(self):
        """What a new launch would resume from, by name."""
        resume = self.begin().resume_from
        return resume and resume.name


def manifests(made) -> list[Any]:
    """The manifests of a run's checkpoints, by step."""
    return [entry.manifest for entry in list_checkpoints(made.store, made.run)]


def test_the_first_launch_starts_from_nothing(home):
    """REQ-RUN-001, REQ-RUN-002."""
    made = RunOfSteps(home.store())
    launch = made.begin()
    assert (launch.launch, launch.chosen_by, launch.resume_from) == (1, "lineage", None)
    assert launch.run_id == made.run.run_id
    assert read_run(made.store) == made.run
    assert open_run(made.store) == made.run


def test_the_greatest_step_of_the_newest_launch(home):
    """REQ-RUN-006, REQ-RUN-009: as numbers, also past 10^8 steps and 10^4 launches."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(9_900, 10_000, 99_999_999, 100_000_000)
    assert made.head() == "step-100000000-l0001"


def test_the_digest_that_is_named_is_the_manifests(home):
    """REQ-RUN-011."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(5)
    manifest = manifests(made)[0]
    assert made.begin().resume_from == Reference(name="step-00000005-l0001", digest=manifest.digest)


def test_a_rollback_stays_rolled_back(home):
    """REQ-RUN-006: launch 1 saved 400 and 800, launch 2 went on to 1200; somebody rolled back to 400."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(400, 800)
    assert made.begin().resume_from.name == "step-00000800-l0001"
    made.save(1200)
    third = made.begin(choose="step-00000400-l0001")
    assert (third.chosen_by, third.resume_from.name) == ("hand", "step-00000400-l0001")
    # It dies before it saved: still 400. Then it saves 600: 600, though 1200 is there.
    assert made.head() == "step-00000400-l0001"
    made.save(600)
    assert made.head() == "step-00000600-l0004"
    launches, entries = list_launches(made.store, made.run), list_checkpoints(made.store, made.run)
    assert [entry.name for entry in iter_lineage(launches, entries)] == [
        "step-00000600-l0004",
        "step-00000400-l0001",
    ]


def test_a_choice_by_digest(home):
    """REQ-RUN-007."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2)
    digest = manifests(made)[0].digest
    assert made.begin(choose=digest).resume_from.name == "step-00000001-l0001"
    error = error_of(lambda: made.begin(choose="step-00000009-l0001"))
    assert (error.code, type(error)) == (Code.NOT_COMMITTED, NotFoundError)


def test_a_fresh_start_by_hand_is_one(home):
    """REQ-RUN-006, REQ-RUN-010: and what comes after follows it."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1)
    launch = made.begin(fresh=True)
    assert (launch.chosen_by, launch.resume_from) == ("hand", None)
    assert made.head() is None
    made.save(7)
    assert made.head() == "step-00000007-l0003"


class Noisy(HookedStore):
    """Objects behind a network, which damages some answers: of each path whose name has `part` so many."""

    is_remote = True

    def __init__(self, inner, part, count):
        super().__init__(inner)
        self._part = part
        self._left = {"count": count}

    def _damaged(self, path, content):
        if self._part not in f"{self._prefix}/{path}" or self._left["count"] == 0:
            return content
        self._left["count"] -= 1
        return content[:-1] + bytes([content[-1] ^ 1])

    def read(self, path, *, limit_nbytes):
        return self._damaged(path, super().read(path, limit_nbytes=limit_nbytes))

    def read_range(self, path, byte_begin, nbytes):
        return self._damaged(path, super().read_range(path, byte_begin, nbytes))


@pytest.mark.parametrize("part", ["manifest.json", "index-", "parts/", "weights-"])
def test_a_run_does_not_go_back_for_an_answer_that_was_damaged_on_its_way(part):
    """REQ-RUN-012: found by the campaign of faults, on all but a local store."""
    made = RunOfSteps()
    made.begin()
    made.save(1, 2)
    passed_over: list[str] = []
    launch: Any = begin_launch(
        Noisy(made.store, part, 1), made.run, on_passed_over=passed_over.append
    )[0]
    assert (launch.chosen_by, launch.resume_from.name, passed_over) == (
        "lineage",
        checkpoint_name(2, 1),
        [],
    )
    noisy: Any = Noisy(made.store, part, 1000)
    with pytest.raises(IntegrityError, match="NO_VALID_CHECKPOINT"):
        begin_launch(noisy, made.run, on_passed_over=passed_over.append)
    assert len(passed_over) == 2


class Blind(Noisy):
    """Objects behind a network, whose listing of the run is empty."""

    def list_names(self, prefix):
        return super().list_names(prefix) if prefix else []


def test_a_run_does_not_begin_anew_because_a_listing_is_empty():
    made = RunOfSteps()
    made.begin()
    made.save(1)
    blind: Any = Blind(made.store, "", 0)
    assert code_of(lambda: begin_launch(blind, made.run)) == Code.STORE_NO_ANSWER


class BlindOnce(HookedStore):
    """A store behind a network, one of whose listings of the run comes as an empty one."""

    is_remote = True

    def __init__(self, inner, number):
        super().__init__(inner)
        self._left = [number]  # shared by all places

    def list_names(self, prefix):
        found = super().list_names(prefix)
        if not prefix and not self._prefix:
            self._left[0] -= 1
            return [] if self._left[0] == 0 else found
        return found


@pytest.mark.parametrize("is_retired", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_no_single_listing_that_comes_empty_makes_a_run_begin_anew(number, is_retired):
    made = RunOfSteps()
    made.begin()
    made.save(1, 2, 3)
    if is_retired:
        retire(made.place(1), manifests(made)[0])
    launch, _ = begin_launch(BlindOnce(made.store, number), made.run)
    assert launch.resume_from is not None
    assert launch.resume_from.name == "step-00000003-l0001"


def test_a_manifest_that_a_late_repair_puts_back_is_retired_again():
    """What page 70 says of requests that come late."""
    made = RunOfSteps()
    made.begin()
    made.save(1, 2)
    content = made.place(1).read("manifest.json", limit_nbytes=1 << 16)
    for _ in range(2):
        assert clean_up(made.store, made.run, launch=1, retention=Retention(newest=1)) == [
            checkpoint_name(1, 1)
        ]
        made.place(1).replace("manifest.json", content)
    assert made.head() == checkpoint_name(2, 1)


def test_labels_are_not_lost_for_an_answer_that_was_damaged_on_its_way():
    """REQ-RUN-025."""
    made = RunOfSteps()
    made.begin()
    made.save(1)
    Run(made.store).set_metrics(1, {"loss": 1.5})
    Run(Noisy(made.store, "labels/", 1)).set_metrics(1, {"accuracy": 0.5})
    assert Run(made.store).newest().metrics == {"loss": 1.5, "accuracy": 0.5}


def test_a_damaged_newest_is_passed_over_and_recorded(home):
    """REQ-RUN-007, REQ-RUN-012."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2, 3)
    made.damage(3, 1)
    launch = made.begin()
    assert (launch.chosen_by, launch.resume_from.name) == ("fallback", "step-00000002-l0001")
    assert len(made.passed_over) == 1
    assert "step-00000003-l0001 isn't valid: BLOCK_DIGEST" in made.passed_over[0]
    # From then on the lineage leads past the damaged one without another look.
    made.passed_over.clear()
    assert made.begin().chosen_by == "lineage"
    assert made.passed_over == []


def test_what_a_newer_program_saved_is_refused_and_not_passed_over(home):
    """REQ-VER-010: it isn't damaged; an older checkpoint is gone on from only if somebody chooses it."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2)
    register = made.place(2).read("manifest.json", limit_nbytes=10_000)
    signed = json.loads(register)["signed"] | {
        "features": {"reader": ["nobody.knows"], "writer": []}
    }
    made.place(2).replace("manifest.json", dump_document(signed))

    error = error_of(made.begin)
    assert (error.code, type(error), made.passed_over) == (
        Code.FEATURE_UNSUPPORTED,
        UnsupportedError,
        [],
    )
    assert error.where.startswith("step-00000002-l0001/")
    assert [launch.launch for launch in list_launches(made.store)] == [1]

    assert made.begin(choose="step-00000001-l0001").chosen_by == "hand"


class RetiringStore(HookedStore):
    """A store in which an older launch, the moment another takes its number, saves a step and retires the one before.

    It looked for newer launches before there was one.
    """

    def __init__(self, made):
        super().__init__(made.store)
        self.made = made
        self.numbers: list[str] = []

    def after(self, operation):
        if operation.op == "create" and operation.path.startswith("launches/"):
            self.numbers.append(operation.path)
            if len(self.numbers) == 1:
                *_, newest = manifests(self.made)
                self.made.save(newest.origin.step + 1)
                retire(self.made.place(newest.origin.step), newest)


def test_what_is_retired_before_the_record_is_there_is_chosen_anew(home):
    """REQ-RUN-013: the number is used up, and the next record names what is there."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2)
    store = RetiringStore(made)
    launch: Any = begin_launch(store, made.run)[0]
    assert store.numbers == [f"launches/{launch_name(number)}" for number in (2, 3)]
    assert (launch.launch, launch.resume_from.name) == (3, "step-00000003-l0001")


def test_a_run_with_a_writer_feature_that_is_not_known_is_not_written_to(home):
    """REQ-VER-003."""
    store = home.store()
    store.create(
        RUN_NAME, [RunRecord(run_id="a" * 32, writer_features=("references", "me.packs")).dump()]
    )
    before = files_of(store)
    error = error_of(lambda: begin_launch(store, open_run(store)))
    assert (error.code, type(error), error.requirement) == (
        Code.FEATURE_UNSUPPORTED,
        UnsupportedError,
        "REQ-VER-003",
    )
    assert "me.packs" in error.detail
    assert "references" not in error.detail
    assert files_of(store) == before


def test_fallback_goes_down_through_launches(home):
    """REQ-RUN-006."""
    made = RunOfSteps(home.store())
    for step in (1, 2, 3):
        made.begin()
        made.save(step)
    made.damage(3, 3)
    made.damage(2, 2)
    launch = made.begin()
    assert (launch.chosen_by, launch.resume_from.name) == ("fallback", "step-00000001-l0001")
    assert len(made.passed_over) == 2


@pytest.mark.parametrize("what", ["register", "index", "part", "missing"])
def test_whatever_is_damaged_is_passed_over(home, what):
    """REQ-RUN-012: register, index, parts and blocks are all checked."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2)
    names = made.store.list("step-00000002-l0001")
    path = next(
        name
        for name in names
        if {"register": "manifest", "index": "index-", "part": "parts/", "missing": "weights"}[what]
        in name
    )
    content = made.store.read(path, limit_nbytes=10_000)
    made.store.delete(path)
    if what != "missing":
        made.store.create(path, [content[:-3] + b"xyz"])
    launch = made.begin()
    assert (launch.chosen_by, launch.resume_from.name) == ("fallback", "step-00000001-l0001")


def put_register(made, step, launch, content):
    """Put something else into the register of a checkpoint."""
    path = f"{checkpoint_name(step, launch)}/manifest.json"
    made.store.delete(path)
    made.store.create(path, [content])


def test_a_tombstone_of_another_run_is_damage_and_no_endless_recursion(home):
    """REQ-RUN-003: a launch looked again and again whether somebody had retired the checkpoint meanwhile."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2)
    digest = manifests(made)[1].digest
    put_register(
        made, 2, 1, Tombstone(run_id="0" * 32, launch=1, step=2, manifest_digest=digest).dump()
    )

    launch = made.begin()

    assert (launch.chosen_by, launch.resume_from.name) == ("fallback", "step-00000001-l0001")
    assert "RUN_MISMATCH" in made.passed_over[0]


def test_what_a_record_names_is_known_by_its_digest(home):
    """REQ-RUN-022: another checkpoint under the name that a record has was gone on from."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2, 3)
    first, second, _ = manifests(made)
    resume = Reference(name=checkpoint_name(2, 1), digest=first.digest)
    record = Launch(
        run_id=made.run.run_id, launch=2, nonce=NONCE, chosen_by="hand", resume_from=resume
    )
    made.store.create("launches/0002.json", [record.dump()])

    assert code_of(lambda: find_head(made.store)) == Code.DOC_DIGEST
    assert made.head() == checkpoint_name(1, 1)
    assert second.digest in made.passed_over[0]


def test_what_a_record_names_and_is_aborted_is_passed_over_by_name(home):
    """REQ-RUN-022: it was gone past as if it had been retired."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2)
    made.begin(choose=checkpoint_name(2, 1))
    put_register(made, 2, 1, Abort(run_id=made.run.run_id, launch=1, step=2, reason="x").dump())

    assert code_of(lambda: find_head(made.store)) == Code.CHECKPOINT_ABORTED
    assert (made.begin().chosen_by, made.launch.resume_from.name) == (
        "fallback",
        checkpoint_name(1, 1),
    )


def test_a_launch_whose_only_register_is_damaged_is_not_overtaken(home):
    """REQ-RUN-006: the run went on from the launch before, without a word, past what this one had saved."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2)
    made.damage(2, 1)
    made.begin()
    made.save(3)
    retire(made.place(1, 1), manifests(made)[0])
    put_register(made, 3, 2, b"{")

    assert code_of(lambda: find_head(made.store)) == Code.DOC_SYNTAX
    assert code_of(made.begin) == Code.NO_VALID_CHECKPOINT


def test_nothing_whole_is_no_fresh_start(home):
    """REQ-RUN-010."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2)
    made.damage(1, 1)
    made.damage(2, 1)
    error = error_of(made.begin)
    assert (error.code, type(error)) == (Code.NO_VALID_CHECKPOINT, IntegrityError)
    assert "step-00000002-l0001" in error.detail
    assert len(list_launches(made.store)) == 1


def test_what_was_resumed_from_and_is_gone_is_no_fresh_start(home):
    """REQ-RUN-010."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1)
    made.begin(choose="step-00000001-l0001")
    for path in made.store.list("step-00000001-l0001"):
        made.store.delete(path)
    assert code_of(made.begin) == Code.NO_VALID_CHECKPOINT


def test_an_error_of_the_store_is_no_damage(home):
    """REQ-RUN-012: nobody falls back because the storage had a bad moment."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2)
    before = len(list_launches(made.store))
    for op in ("read", "read_range", "nbytes"):
        fault = Fault(
            fail_at=1,
            operations=frozenset({op}),
            path_end=".safetensors" if op != "read" else ".msgpack",
        )
        error = error_of(lambda fault=fault: begin_launch(FaultStore(made.store, fault), made.run))
        assert isinstance(error, StoreError)
        assert fault.fired_count == 1
    assert len(list_launches(made.store)) == before
    assert made.begin().chosen_by == "lineage"


def test_undecided_aborted_and_retired_directories_are_no_candidates(home):
    """REQ-MAN-001, REQ-RUN-006."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2)
    write_part(
        made.place(3),
        snapshot(tensor("w", np.ones(2))),
        origin(step=3, launch=1, run_id=made.run.run_id),
        writer=0,
    )
    abort(made.place(4), run_id=made.run.run_id, launch=1, step=4, reason="x")
    retire(made.place(2), manifests(made)[1])
    made.store.create("step-00000009-l0001", [b"a file"])
    made.store.create("step-9-l1/manifest.json", [b"{}"])
    made.store.create("latest/manifest.json", [b"{}"])
    assert made.head() == "step-00000001-l0001"


class Meanwhile(HookedStore):
    """Lets another job work once, around the first look at a register."""

    def __init__(self, inner, work, *, when):
        super().__init__(inner)
        self._jobs = {when: work}  # shared by all places of the store

    def before(self, operation):
        self._let_work("before", operation)

    def after(self, operation):
        self._let_work("after", operation)

    def _let_work(self, when, operation):
        if (operation.op, operation.path.rpartition("/")[2]) == (
            "read",
            "manifest.json",
        ) and when in self._jobs:
            self._jobs.pop(when)()


@pytest.mark.parametrize("is_begun", [False, True])
def test_what_is_retired_meanwhile_is_seen_with_what_came_instead(home, is_begun):
    """REQ-RUN-014: directories are listed again, and smaller steps read first; else the run would seem to be empty."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(10)
    manifest = manifests(made)[0]
    if is_begun:
        named = origin(step=20, launch=1, run_id=made.run.run_id)
        write_part(made.place(20, 1), snapshot(tensor("w", np.ones(2))), named, writer=0)

    def work():
        made.save(20)
        retire(made.place(10), manifest)

    looking = Meanwhile(made.store, work, when="after" if is_begun else "before")

    assert find_head(looking)[0] == "step-00000020-l0001"


class Overtaken(HookedStore):
    """A store behind a network: while the answer for an older register is on its way, a job gets on with its work."""

    is_remote = True

    def __init__(self, inner, older, work):
        super().__init__(inner)
        self._older, self._work = older, work
        self._asked, self._done = threading.Event(), threading.Event()

    def before(self, operation):
        if operation.op == "read" and operation.path == f"{self._older}/manifest.json":
            assert self._done.wait(60)

    def after(self, operation):
        if (
            operation.op == "read"
            and operation.path.endswith("manifest.json")
            and self._older not in operation.path
        ):
            if not self._asked.is_set():
                self._asked.set()
                self._work()
            self._done.set()


def test_registers_that_are_read_at_once_hide_no_newer_checkpoint():
    """REQ-RUN-014: the newer one was undecided when it was read, and the older one retired for its sake behind that."""
    made = RunOfSteps(MemoryStore())
    made.begin()
    made.save(10)
    manifest = manifests(made)[0]
    named = origin(step=20, launch=1, run_id=made.run.run_id)
    write_part(made.place(20, 1), snapshot(tensor("w", np.ones(2))), named, writer=0)

    def work():
        made.save(20)
        retire(made.place(10), manifest)

    assert find_head(Overtaken(made.store, "step-00000010-l0001", work))[0] == "step-00000020-l0001"


class Busy(HookedStore):
    """A job saves a step whenever so many registers were read, and may retire all older ones."""

    def __init__(self, made, *, reads_per_save, is_retiring):
        super().__init__(made.store)
        self._state = {
            "made": made,
            "reads": 0,
            "step": 100,
            "is_retiring": is_retiring,
        }  # shared by all places
        self._reads_per_save = reads_per_save

    def after(self, operation):
        state = self._state
        if (operation.op, operation.path.rpartition("/")[2]) != ("read", "manifest.json"):
            return
        state["reads"] += 1
        assert state["reads"] < 200, "it reads, and reads"
        if state["reads"] % self._reads_per_save == 0:
            older = manifests(state["made"])[-1]
            state["step"] += 1
            state["made"].save(state["step"])
            if state["is_retiring"]:
                retire(state["made"].place(older.origin.step), older)


@pytest.mark.parametrize(("reads_per_save", "is_retiring"), [(1, False), (3, True)])
def test_a_job_that_saves_faster_than_a_run_is_listed_keeps_nobody_waiting(
    reads_per_save, is_retiring
):
    """REQ-RUN-014: what is decided isn't read again, only what has come since."""
    made = RunOfSteps(MemoryStore())
    made.begin()
    made.save(*range(1, 25))
    entries = list_checkpoints(
        Busy(made, reads_per_save=reads_per_save, is_retiring=is_retiring), made.run
    )
    assert [entry.step for entry in entries][:24] == [*range(1, 25)]
    assert isinstance(entries[-1].register, Manifest)


def test_a_directory_under_another_name_is_refused(home):
    """Row 33; REQ-MAN-002, REQ-RUN-003."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1)
    for path in made.store.list("step-00000001-l0001"):
        content = made.store.read(path, limit_nbytes=10_000)
        made.store.create(path.replace("step-00000001", "step-00000009"), [content])
    made.save(5, run_id="0" * 32)
    entries: dict[str, Any] = {
        entry.name: entry.register for entry in list_checkpoints(made.store, made.run)
    }
    assert isinstance(entries["step-00000001-l0001"], Manifest)
    assert (entries["step-00000009-l0001"].code, entries["step-00000005-l0001"].code) == (
        Code.STEP_MISMATCH,
        Code.RUN_MISMATCH,
    )
    assert made.head() == "step-00000001-l0001"
    assert len(made.passed_over) == 2


def test_launch_numbers_are_numbers(home):
    """REQ-RUN-005, REQ-RUN-009: 9999, then 10000, then 10001."""
    made = RunOfSteps(home.store())
    for number in (9, 9998, 9999):
        record = Launch(
            run_id=made.run.run_id,
            launch=number,
            nonce=NONCE,
            chosen_by="lineage",
            resume_from=None,
        )
        made.store.create(f"launches/{launch_name(number)}", [record.dump()])
    assert [made.begin().launch for _ in range(2)] == [10_000, 10_001]
    assert [launch.launch for launch in list_launches(made.store, made.run)] == [
        9,
        9998,
        9999,
        10_000,
        10_001,
    ]
    made.save(3)
    assert made.head() == "step-00000003-l10001"
    check_not_fenced(made.store, 10_002)
    assert code_of(lambda: check_not_fenced(made.store, 10_001)) == Code.FENCED
    error = error_of(lambda: check_not_fenced(made.store, 9999))
    assert (error.code, type(error), error.where) == (
        Code.FENCED,
        FencedError,
        "launches/10002.json",
    )
    assert isinstance(error, CommitError)


def test_files_that_are_no_launch_records_are_none(home):
    """REQ-RUN-005."""
    made = RunOfSteps(home.store())
    for name in ("3.json", "00004.json", "0005.json.bak", "latest"):
        made.store.create(f"launches/{name}", [b"x"])
    assert made.begin().launch == 1


def test_a_launch_of_another_run_is_refused(home):
    """REQ-RUN-003."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1)
    record = Launch(run_id="0" * 32, launch=2, nonce=NONCE, chosen_by="lineage", resume_from=None)
    made.store.create("launches/0002.json", [record.dump()])
    error = error_of(lambda: find_head(made.store))
    assert (error.code, error.where, type(error)) == (
        Code.RUN_MISMATCH,
        "launches/0002.json",
        FormatError,
    )


def test_a_record_that_says_another_number_is_refused(home):
    """REQ-RUN-005."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1)
    record = Launch(
        run_id=made.run.run_id, launch=1, nonce=NONCE, chosen_by="lineage", resume_from=None
    )
    made.store.create("launches/0002.json", [record.dump()])
    assert code_of(lambda: find_head(made.store)) == Code.RUN_MISMATCH


def test_records_that_lead_in_a_circle_end(home):
    """REQ-RUN-006: whoever wrote them."""
    made = RunOfSteps(home.store())
    digest = "blake3:" + "0" * 64
    for number, other in ((1, 2), (2, 1)):
        resume = Reference(name=checkpoint_name(5, other), digest=digest)
        record = Launch(
            run_id=made.run.run_id, launch=number, nonce=NONCE, chosen_by="hand", resume_from=resume
        )
        made.store.create(f"launches/{launch_name(number)}", [record.dump()])
    assert code_of(made.begin) == Code.NO_VALID_CHECKPOINT


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("path_end", ["run.json", "0001.json"])
def test_a_lost_answer_takes_no_second_number(loss, path_end):
    """REQ-RUN-001, REQ-RUN-002."""
    store = MemoryStore()
    store.inject(loss, path_end=path_end)
    made = RunOfSteps(store)
    launch = made.begin()
    store.land()
    assert (launch.launch, len(list_launches(store, read_run(store)))) == (1, 1)
    assert read_run(store) == made.run


def test_jobs_that_start_at_once_take_one_run_and_numbers_of_their_own(tmp_path):
    """REQ-RUN-001, REQ-RUN-002."""
    launches: list[Launch] = []

    def start():
        store = LocalStore(tmp_path, writable=True)
        launches.append(begin_launch(store, open_run(store))[0])

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(launch.launch for launch in launches) == list(range(1, 9))
    assert len({launch.run_id for launch in launches}) == 1
    assert len({launch.nonce for launch in launches}) == 8


def test_a_damaged_run_record_is_an_error(home):
    """REQ-RUN-001: nobody founds a second run over it."""
    store = home.store()
    content = RunRecord(run_id="0" * 32).dump()
    store.create("run.json", [content.replace(b"0000", b"0001", 1)])
    assert code_of(lambda: open_run(store)) == Code.DOC_DIGEST

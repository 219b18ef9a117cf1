"""A launch record that can't be read costs that record: the run goes on, nothing is lost, and a repair mends it."""

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest

from ckptfmt.__main__ import main
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.commit.decision import retire
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.documents.run import Launch, launch_name
from ckptfmt.errors import Code
from ckptfmt.run.catalog import Run
from ckptfmt.run.lineage import (
    LostLaunch,
    check_not_fenced,
    find_head,
    iter_lineage,
    list_checkpoints,
    list_launches,
)
from ckptfmt.run.mirror import mirror_run
from ckptfmt.run.retention import (
    Retention,
    clean_up,
    list_abandoned,
    plan_retention,
    tidy_up,
)
from ckptfmt.run.scrub import scrub_run
from ckptfmt.state import State
from ckptfmt.store.memory import MemoryStore
from tests.builders import code_of, error_of, known_launches
from tests.run.test_lineage import RunOfSteps

#: What becomes of a record.
DAMAGES = {
    "bit": lambda content: content[:150] + bytes([content[150] ^ 1]) + content[151:],
    "cut": lambda content: content[:-1],
    "empty": lambda content: content[:0],
    "zeros": lambda content: bytes(len(content)),
    "moved": lambda content: dataclasses.replace(
        Launch.parse(content, where="launches/0002.json"), launch=1
    ).dump(),
}


def spoil(made: RunOfSteps, number: int, how: str = "bit") -> bytes:
    """Damage the record of a launch; return what it was."""
    path = f"launches/{launch_name(number)}"
    content: bytes = made.store.read(path, limit_nbytes=10_000)
    made.store.replace(path, DAMAGES[how](content))
    return content


def two_launches(store=None, *, saved: bool = True) -> RunOfSteps:
    """Return a run whose second launch resumed from step 2 of the first, and has saved steps 3 and 4, or nothing."""
    made = RunOfSteps(store)
    made.begin()
    made.save(1, 2)
    made.begin()
    return made.save(3, 4) if saved else made


def names_of(made: RunOfSteps) -> list[str]:
    return [
        entry.name for entry in list_checkpoints(made.store, made.run) if entry.manifest is not None
    ]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_launch_with_checkpoints_of_its_own_is_gone_on_from(home, how):
    """REQ-RUN-045: its number is known by the name of the file, and its checkpoints by theirs."""
    made = two_launches(home.store())
    spoil(made, 2, how)
    assert find_head(made.store)[0] == checkpoint_name(4, 2)
    launch = made.begin()
    assert (launch.launch, launch.chosen_by, launch.resume_from.name) == (
        3,
        "lineage",
        checkpoint_name(4, 2),
    )
    (told,) = made.passed_over
    assert told.startswith("launches/0002.json can't be read")
    assert "ckptfmt repair" in told


@pytest.mark.parametrize("how", DAMAGES)
def test_a_launch_that_saved_nothing_is_passed_over_and_said(home, how):
    """REQ-RUN-045, REQ-RUN-007: a reader leaves no record of what it passed over, and refuses; a launch goes on."""
    made = two_launches(home.store(), saved=False)
    spoil(made, 2, how)
    error = error_of(lambda: find_head(made.store))
    assert error.where == "launches/0002.json"
    assert "launch 2's starting checkpoint can't be known" in error.detail
    launch = made.begin()
    assert (launch.launch, launch.chosen_by, launch.resume_from.name) == (
        3,
        "fallback",
        checkpoint_name(2, 1),
    )
    assert made.passed_over[0].startswith("launches/0002.json isn't valid")
    assert find_head(made.store)[0] == checkpoint_name(2, 1)


def test_a_late_commit_of_an_overtaken_launch_does_not_come_before_what_its_successor_saved(home):
    """REQ-RUN-045: the record fences by its name."""
    made = two_launches(home.store())
    spoil(made, 2)
    assert code_of(lambda: check_not_fenced(made.store, 1)) == Code.FENCED
    made.save(9, launch=1)  # it was on its way
    assert find_head(made.store)[0] == checkpoint_name(4, 2)
    for step in (3, 4):
        made.damage(step, 2)
    assert made.begin().resume_from.name == checkpoint_name(2, 1)  # and not step 9


def test_a_run_does_not_begin_anew(home):
    """REQ-RUN-010: where nothing is whole, and a record can't be read."""
    made = two_launches(home.store(), saved=False)
    for step in (1, 2):
        entry = next(one for one in list_checkpoints(made.store, made.run) if one.step == step)
        assert entry.manifest is not None
        retire(made.place(step, 1), entry.manifest)
    spoil(made, 2)
    assert code_of(made.begin) == Code.NO_VALID_CHECKPOINT


def test_a_run_whose_launches_saved_nothing_begins_anew(home):
    """There was nothing that the launch could have gone on from."""
    made = RunOfSteps(home.store())
    made.begin()
    made.begin()
    spoil(made, 2, "cut")
    launch = made.begin()
    assert (launch.launch, launch.resume_from) == (3, None)


def test_nothing_of_older_launches_goes_before_a_repair(home):
    """REQ-CMT-051: launch 2 was a rollback by hand, which its record alone says."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2, 3)
    made.begin(choose=checkpoint_name(1, 1))
    made.save(2, 3, 4)
    content = spoil(made, 2)
    told: list[str] = []
    removed = clean_up(
        made.store, made.run, launch=2, retention=Retention(newest=1), on_problem=told.append
    )
    assert removed == [checkpoint_name(step, 2) for step in (2, 3)]
    assert "the record of launch 2 can't be read" in told[0]
    assert names_of(made) == [
        checkpoint_name(1, 1),
        checkpoint_name(2, 1),
        checkpoint_name(3, 1),
        checkpoint_name(4, 2),
    ]
    made.store.replace("launches/0002.json", content)
    assert clean_up(made.store, made.run, launch=2, retention=Retention(newest=1)) == [
        checkpoint_name(1, 1)
    ]


def test_what_the_newest_launch_may_resume_from_is_not_deleted(home):
    made = two_launches(home.store(), saved=False)
    spoil(made, 2, "cut")
    error = error_of(lambda: Run(made.store).delete(1))
    assert error.code == Code.CHECKPOINT_NEEDED
    assert "launch 2 may resume from it" in error.detail


def test_what_a_record_may_name_is_not_given_up(home):
    """REQ-CMT-021: a register that is gone is damage, where a record names the checkpoint."""
    made = two_launches(home.store())
    made.store.at(checkpoint_name(2, 1)).delete("manifest.json")
    launches, entries = list_launches(made.store), list_checkpoints(made.store)
    assert list_abandoned(launches, entries, 2) == []
    spoil(made, 2)
    assert list_abandoned(list_launches(made.store), entries, 2) == []


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_record_lets_nothing_go_that_would_have_stayed(seed):
    """REQ-CMT-051: whatever the history, and whichever record it is; and no launch goes on from what is older."""
    rng = random.Random(seed)
    made = RunOfSteps(MemoryStore())
    step = 0
    for _ in range(rng.randint(2, 5)):
        committed = names_of(made)
        made.begin(
            **({"choose": rng.choice(committed)} if committed and rng.random() < 0.4 else {})
        )
        resume = made.launch.resume_from
        step = int(resume.name[5:13]) if resume else 0
        for _ in range(rng.randint(0, 4)):
            step += 1
            save_with_loss(made, step, rng.random())
        if rng.random() < 0.5:
            clean_up(
                made.store,
                made.run,
                launch=made.launch.launch,
                retention=Retention(newest=rng.randint(1, 3)),
            )
    number = rng.randint(1, made.launch.launch)
    entries = list_checkpoints(made.store, made.run)
    launches = list_launches(made.store, made.run)
    lost = [
        LostLaunch(launch=one.launch, error=error_of(spoiled)) if one.launch == number else one
        for one in launches
    ]
    for keep in (1, 2, 3):
        for keep_best in (None, ("loss", "min", 1)):
            retention = Retention(newest=keep, best=keep_best)
            going = {one.name for one in plan_retention(lost, entries, retention)}
            assert going <= {one.name for one in plan_retention(launches, entries, retention)}
    head = next((one for one in iter_lineage(launches, entries) if one.manifest is not None), None)
    found = next(
        (one for one in iter_lineage(lost, entries) if one.manifest is not None or one.is_record),
        None,
    )
    if found is not None and not found.is_record:
        assert found == head
    assert (found is None) == (head is None)


def save_with_loss(made: RunOfSteps, step: int, loss: float) -> None:
    made.save(step)
    Run(made.store).set_metrics(checkpoint_name(step, made.launch.launch), {"loss": loss})


def spoiled() -> None:
    Launch.parse(b"{}", where="launches/0001.json")


# --- a record that is gone ------------------------------------------------------------------------


def without_its_rollback(home) -> RunOfSteps:
    """Return a run that lost the record of its second launch, which went back to step 1 by hand."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2, 3)
    made.begin(choose=checkpoint_name(1, 1))
    made.save(2, 3)
    made.store.delete("launches/0002.json")
    return made


@pytest.mark.parametrize("newest", [1, 3])
def test_nothing_is_retired_while_a_record_is_gone(home, newest):
    """REQ-RUN-015: the lineage is unknown; a save reports it, and doesn't fail."""
    made = without_its_rollback(home)
    if newest == 3:  # resumed by hand, as the remedy says
        made.begin(choose=checkpoint_name(3, 2))
        made.save(4, 5)
        assert made.launch.launch == 3
    before = names_of(made)
    unfinished = made.place(9, 1)
    unfinished.create("parts/00000.abcdefgh.json", [b"{}"])
    removed, told = tidy_up(made.store, made.run, launch=newest, retention=Retention(newest=1))
    assert removed == []
    assert "launch 2 has a checkpoint and no record: nothing is retired" in told
    assert "ckptfmt repair" in told
    assert names_of(made) == before
    assert unfinished.list("")
    assert scrub_run([made.store]).whole
    removed, told = tidy_up(
        made.store, made.run, launch=max(newest, 2), retention=Retention(newest=1)
    )
    assert checkpoint_name(2, 2) in removed
    assert checkpoint_name(9, 1) in removed
    assert told == ""


def test_a_launch_begun_during_a_clean_up_has_its_record(home, monkeypatch):
    """The launches are listed first, then the checkpoints."""
    made = two_launches(home.store())

    def list_one(store, run=None):
        return list_launches(store, run)[:1]

    monkeypatch.setattr("ckptfmt.run.retention.list_launches", list_one)
    told: list[str] = []
    clean_up(made.store, made.run, launch=2, retention=Retention(), on_problem=told.append)
    assert told == []


def test_nothing_is_deleted_while_a_record_is_gone(home):
    """REQ-RUN-015: the checkpoint may be what the run goes on from."""
    made = without_its_rollback(home)
    before = names_of(made)
    for name in before:
        for options in ({}, {"force": True}, {"dry_run": True}):
            error = error_of(
                lambda name=name, options=options: Run(made.store).delete(name, **options)
            )
            assert (error.code, error.where, error.requirement) == (
                Code.FILE_MISSING,
                "launches/0002.json",
                "REQ-RUN-015",
            )
            assert "ckptfmt repair" in error.remedy
    assert names_of(made) == before
    assert scrub_run([made.store]).whole
    Run(made.store).delete(checkpoint_name(3, 1))
    assert checkpoint_name(3, 1) not in names_of(made)


def test_a_step_saved_twice_is_not_chosen_while_a_record_is_gone(home):
    """REQ-RUN-015: which of both is on the lineage is unknown; a name says it."""
    made = without_its_rollback(home)
    error = error_of(lambda: Run(made.store).find(3))
    assert (error.code, error.where) == (Code.FILE_MISSING, "launches/0002.json")
    assert Run(made.store).find(1).name == checkpoint_name(1, 1)
    assert Run(made.store).find(checkpoint_name(3, 2)).launch == 2
    assert scrub_run([made.store]).whole
    assert Run(made.store).find(3).name == checkpoint_name(3, 2)


def test_a_gone_record_of_a_launch_without_checkpoints_left_is_written_anew(home):
    """REQ-RUN-046: `find_head` wants a record for each directory, also of retired checkpoints."""
    made = two_launches(home.store())
    clean_up(made.store, made.run, launch=2, retention=Retention(newest=1))
    made.store.delete("launches/0001.json")
    assert code_of(lambda: find_head(made.store)) == Code.FILE_MISSING
    assert scrub_run([made.store]).whole
    assert find_head(made.store)[0] == checkpoint_name(4, 2)
    assert made.begin().resume_from.name == checkpoint_name(4, 2)


# --- repair ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 40, 90, 150, 300])
@pytest.mark.parametrize("bit", [0, 5])
def test_one_bit_is_mended_by_the_digest_of_the_record(home, at, bit):
    """REQ-RUN-046: no copy is needed."""
    made = two_launches(home.store(), saved=False)
    content = made.store.read("launches/0002.json", limit_nbytes=10_000)
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    made.store.replace("launches/0002.json", bytes(changed))
    report = scrub_run([made.store])
    assert report.whole
    assert [one.path for one in report.damages] == ["launches/0002.json"]
    assert made.store.read("launches/0002.json", limit_nbytes=10_000) == content


def test_a_copy_is_asked_before_anything_is_inferred(home):
    made = two_launches(home.store())
    other = home.store()
    mirror_run(made.store, other)
    content = spoil(made, 2, "empty")
    report = scrub_run([made.store, other])
    assert [one.repaired_from for one in report.damages] == [other.name]
    assert made.store.read("launches/0002.json", limit_nbytes=10_000) == content


@pytest.mark.parametrize("how", ["cut", "empty", "zeros", "gone"])
@pytest.mark.parametrize("saved", [True, False])
def test_without_a_copy_a_record_is_written_anew_from_what_checkpoints_say(home, how, saved):
    """REQ-RUN-046."""
    made = two_launches(home.store(), saved=saved)
    if how == "gone":
        made.store.delete("launches/0002.json")
    else:
        spoil(made, 2, how)
    report = scrub_run([made.store])
    if how == "gone" and not saved:
        assert not report.damages  # nothing says that there was one
        return
    assert report.whole
    record = newest_record(made)
    assert (record.launch, record.chosen_by, record.resume_from.name) == (
        2,
        "hand",
        checkpoint_name(2, 1),
    )
    if saved:
        assert record.nonce == next(iter(made_manifests(made, 2))).origin.nonce
    assert find_head(made.store)[0] == (checkpoint_name(4, 2) if saved else checkpoint_name(2, 1))
    assert scrub_run([made.store]).damages == ()


def newest_record(made: RunOfSteps) -> Any:
    return known_launches(made.store)[-1]


def made_manifests(made: RunOfSteps, launch: int) -> list[Any]:
    return [
        one.manifest
        for one in list_checkpoints(made.store, made.run)
        if one.launch == launch and one.manifest
    ]


def test_where_all_that_older_launches_saved_is_retired_a_record_names_the_newest_of_it(home):
    made = two_launches(home.store())
    clean_up(made.store, made.run, launch=2, retention=Retention(newest=1))
    assert names_of(made) == [checkpoint_name(4, 2)]
    spoil(made, 2, "cut")
    assert scrub_run([made.store]).whole
    assert newest_record(made).resume_from.name == checkpoint_name(2, 1)
    assert made.begin().resume_from.name == checkpoint_name(4, 2)


def test_a_dry_run_writes_nothing(home):
    made = two_launches(home.store())
    spoil(made, 2, "cut")
    before = made.store.read("launches/0002.json", limit_nbytes=10_000)
    report = scrub_run([made.store], dry_run=True)
    assert (report.whole, [one.repaired for one in report.damages]) == (False, [False])
    assert made.store.read("launches/0002.json", limit_nbytes=10_000) == before


def test_a_mirror_that_has_the_record_is_brought_up_to_date(home):
    made = two_launches(home.store())
    other = home.store()
    mirror_run(made.store, other)
    spoil(made, 2)
    made.save(5)
    report = mirror_run(made.store, other)
    assert (report.copied, [one.where for one in report.problems]) == (
        (checkpoint_name(5, 2),),
        ["launches/0002.json"],
    )
    empty = home.store()
    assert error_of(lambda: mirror_run(made.store, empty)).where.endswith("launches/0002.json")
    assert empty.list("") == []


# --- what a user sees -----------------------------------------------------------------------------


def train(path, count: int) -> Checkpointer:
    weights = {"w": np.zeros(4)}
    with Checkpointer(
        path, State(weights=weights, rng=False), every=1, saver="inline", keep=2
    ) as checkpointer:
        for step in checkpointer.steps(checkpointer.step + count):
            weights["w"][...] = step + 1
    return checkpointer


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    capsys.readouterr()
    code = main([str(one) for one in argv])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_training_commands_and_repair_go_on(tmp_path, capsys):
    """`ls` and `log` show the record, `gc` cleans what it may, training goes on, and `repair` mends it."""
    train(tmp_path / "run", 2)
    train(tmp_path / "run", 2)
    path = tmp_path / "run" / "launches" / "0002.json"
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(content[:-1])
    for command in ("ls", "log"):
        code, out = call(capsys, command, tmp_path / "run")
        assert code == 2
        assert "launches/0002.json" in out
    code, out = call(capsys, "ls", tmp_path / "run", "--json")
    assert [one["where"] for one in json.loads(out)["problems"]] == ["launches/0002.json"]
    code, out = call(capsys, "gc", tmp_path / "run", "--keep", "1")
    assert code == 1
    assert "launches/0002.json" in out
    assert train(tmp_path / "run", 1).step == 5
    code, out = call(capsys, "repair", tmp_path / "run")
    assert code == 0
    assert "what the checkpoints in" in out
    assert call(capsys, "ls", tmp_path / "run")[0] == 0
    assert train(tmp_path / "run", 1).step == 6


def test_commands_say_that_a_record_is_gone(tmp_path, capsys):
    """REQ-RUN-015: no command shows a head, or cleans up, as if all records were there."""
    train(tmp_path / "run", 2)
    train(tmp_path / "run", 2)
    path = tmp_path / "run" / "launches" / "0002.json"
    path.unlink()
    for command in ("ls", "log", "inspect"):
        code, out = call(capsys, command, tmp_path / "run")
        assert code == 2
        assert "launch 2, which has no record" in out
        code, out = call(capsys, command, tmp_path / "run", "--json")
        told = json.loads(out)
        assert [one["where"] for one in told["problems"]] == ["launches/0002.json"]
        head = told.get("head") or next(
            (one["name"] for one in told["checkpoints"] if one.get("is_head")), None
        )
        assert head == checkpoint_name(4, 2)  # as after damage to the record
    code, out = call(capsys, "ls", tmp_path)
    assert code == 2
    for options in ((), ("--dry-run",)):
        code, out = call(capsys, "gc", tmp_path / "run", "--keep", "1", *options)
        assert code == 1
        assert "launches/0002.json" in out
        assert "until then nothing is retired" in out
    code, out = call(capsys, "rm", tmp_path / "run", checkpoint_name(4, 2), checkpoint_name(3, 2))
    assert code == 2
    assert "launch 2, which has no record" in out
    assert call(capsys, "repair", tmp_path / "run")[0] == 0
    code, out = call(capsys, "gc", tmp_path / "run", "--keep", "1")
    assert code == 0
    assert train(tmp_path / "run", 1).step == 5

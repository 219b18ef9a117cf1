"""The judge of the demo, judged: whatever differs is found, and what is the same is called so."""

import dataclasses
import json

import pytest

from ckptfmt_tools.demo.journal import (
    Header,
    JournalEntry,
    JournalWriter,
    check_history,
    compare,
    compare_worlds,
    join_samples,
    read_journal,
    read_progress,
)

NAMES = [
    "parameter/w",
    "moment/exp_avg/w",
    "step/w",
    "buffer/b",
    "schedule/scheduler",
    "cursor/data",
    "rng/numpy",
]
HEADER = Header(
    pid=7,
    rank=0,
    world_size=2,
    launch=1,
    resumed_from=None,
    claim=None,
    parameter_count=1,
    sample_count=8,
    text="a text",
)


def entry(step, *, rank=0, begins=False):
    samples = (4 * step - 4 + 2 * rank, 4 * step - 3 + 2 * rank)
    return JournalEntry(
        step=step,
        digests={
            name: f"{name} {step} {rank if name.startswith('rng/') else ''}" for name in NAMES
        },
        samples=None if begins else samples,
        loss=None if begins else (1.5 + step + rank).hex(),
    )


def run(first=0, last=6, *, rank=0):
    return [entry(step, rank=rank, begins=step == first) for step in range(first, last + 1)]


def processes(**bounds):
    return [run(**bounds), run(**bounds, rank=1)]


def changed(entries, index, **changes):
    return [*entries[:index], dataclasses.replace(entries[index], **changes), *entries[index + 1 :]]


def test_a_run_is_identical_with_itself():
    same = compare(processes(), processes(), steps=6)

    assert same.identical
    assert same.identical_steps() == 6
    assert same.compared == 2 * (7 * len(NAMES) + 6 * 2)
    assert same.repeated == ()


def test_nothing_compared_is_not_identical():
    assert not compare([[]], [[]], steps=0).identical


def test_steps_done_twice_are_compared_twice():
    twice = [[*run(last=4), *run(first=2)], [*run(last=3, rank=1), *run(first=2, rank=1)]]

    same = compare(processes(), twice, steps=6)

    assert same.identical
    assert same.repeated == ((3, 0), (3, 1), (4, 0))


@pytest.mark.parametrize("time", [0, 1], ids=["before the kill", "after it"])
def test_a_difference_in_either_of_two_times_is_found(time):
    launches = [run(last=4), run(first=2)]
    launches[time] = changed(launches[time], 3 if time == 0 else 1, loss=(9.0).hex())

    same = compare([run()], [[*launches[0], *launches[1]]], steps=6)

    assert [(one.step, one.name) for one in same.differences] == [(3, "loss/bits")]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [0, 3, 6])
@pytest.mark.parametrize("name", NAMES)
def test_one_other_digest_anywhere_is_found(name, step, rank):
    found = processes()
    found[rank] = changed(found[rank], step, digests=found[rank][step].digests | {name: "another"})

    same = compare(processes(), found, steps=6)

    assert not same.identical
    assert [(one.step, one.rank, one.name) for one in same.differences] == [(step, rank, name)]
    assert same.identical_steps() == (6 if step == 0 else 5)
    assert f"step {step}, process {rank}: {name};" in same.explain()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"samples": (13, 12)}, "sample/ids"),
        ({"samples": (12,)}, "sample/ids"),
        ({"loss": (-0.0).hex()}, "loss/bits"),
    ],
    ids=["other order", "one fewer", "other loss"],
)
def test_other_samples_and_another_loss_are_found(changes, name):
    same = compare([run()], [changed(run(), 4, **changes)], steps=6)

    assert [(one.step, one.name) for one in same.differences] == [(4, name)]


def test_minus_zero_is_not_zero():
    zero, minus = changed(run(), 4, loss=(0.0).hex()), changed(run(), 4, loss=(-0.0).hex())

    assert not compare([zero], [minus], steps=6).identical


@pytest.mark.parametrize("name", NAMES)
def test_a_fact_that_one_side_lacks_is_found(name):
    fewer = {other: digest for other, digest in run()[2].digests.items() if other != name}

    for reference, candidate in (
        (run(), changed(run(), 2, digests=fewer)),
        (changed(run(), 2, digests=fewer), run()),
    ):
        same = compare([reference], [candidate], steps=6)
        assert [(one.step, one.name) for one in same.differences] == [(2, name)]


def test_a_missing_step_is_found():
    same = compare([run()], [[*run()[:3], *run()[4:]]], steps=6)

    assert same.explain() == "step 3, process 0: not in the journal"
    assert same.identical_steps("parameter") == 5


def test_a_step_too_many_is_found():
    same = compare([run()], [run(last=7)], steps=6)

    assert same.explain() == "step 7, process 0: in the journal, and shouldn't be"


def test_a_step_that_no_run_has_is_found():
    assert not compare([run(last=5)], [run(last=5)], steps=6).identical


def test_another_number_of_processes_is_refused():
    with pytest.raises(ValueError, match="1 processes can't be compared with 2"):
        compare(processes(), [run()], steps=6)


@pytest.mark.parametrize(
    ("names", "guess"),
    [
        (["rng/numpy"], "most likely not restored: the random-number stream numpy"),
        (["moment/exp_avg/w"], "most likely not restored: the optimizer's exp_avg"),
        (["loss/bits"], "the state before it was the same"),
        (["parameter/w", "step/w"], "several kinds of state at once"),
    ],
)
def test_the_first_divergence_says_what_to_look_at(names, guess):
    other = {name: "another" for name in names if name != "loss/bits"}
    found = changed(
        run(),
        3,
        digests=run()[3].digests | other,
        loss="0x1p0" if "loss/bits" in names else run()[3].loss,
    )

    assert guess in compare([run()], [found], steps=6).explain()


# Two runs on other numbers of processes


def shared(step, *, ranks, begins=False):
    """What the processes of a run on so many write at a step: a part of six samples each, all else the same."""
    part = 6 // ranks
    return [
        dataclasses.replace(
            entry(step, rank=rank, begins=begins),
            samples=None
            if begins
            else tuple(range(6 * step + part * rank, 6 * step + part * (rank + 1))),
            loss=None if begins else (1.5 + step).hex(),
        )
        for rank in range(ranks)
    ]


def world(ranks, first=0):
    steps = [shared(step, ranks=ranks, begins=step == first) for step in range(first, 7)]
    return [list(entries) for entries in zip(*steps, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_a_run_is_identical_on_any_number_of_processes(ranks):
    same = compare_worlds(world(2), world(ranks, first=2), first=2, steps=6)

    assert same.identical, same.explain()
    assert (same.steps, same.identical_steps()) == (4, 4)
    assert same.names["rng/numpy"] == 5 * min(2, ranks)
    assert same.names["parameter/w"] == 5 * ranks
    assert same.names["sample/ids"] == same.names["loss/bits"] == 4 * ranks


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("step", [2, 5, 6])
@pytest.mark.parametrize("name", NAMES)
def test_one_other_digest_on_another_number_of_processes_is_found(name, step, rank):
    found = world(3, first=2)
    found[rank] = changed(
        found[rank], step - 2, digests=found[rank][step - 2].digests | {name: "another"}
    )

    same = compare_worlds(world(2), found, first=2, steps=6)

    # The third process's streams are new: there is nothing to compare them with.
    expected = [] if name.startswith("rng/") and rank == 2 else [(step, rank, name)]
    assert [(one.step, one.rank, one.name) for one in same.differences] == expected


@pytest.mark.parametrize(
    "samples", [(31, 30), (30,), (30, 32)], ids=["other order", "one fewer", "another"]
)
def test_other_samples_on_another_number_of_processes_are_found(samples):
    found = world(3, first=2)
    found[0] = changed(found[0], 3, samples=samples)

    same = compare_worlds(world(2), found, first=2, steps=6)

    assert {(one.step, one.name) for one in same.differences} == {(5, "sample/ids")}


@pytest.mark.parametrize("rank", [0, 2])
def test_another_loss_on_another_number_of_processes_is_found(rank):
    found = world(3, first=2)
    found[rank] = changed(found[rank], 4, loss=(9.0).hex())

    same = compare_worlds(world(2), found, first=2, steps=6)

    assert [(one.step, one.rank, one.name) for one in same.differences] == [(6, rank, "loss/bits")]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_missing_step_on_another_number_of_processes_is_found(rank):
    found = world(3, first=2)
    del found[rank][4]

    same = compare_worlds(world(2), found, first=2, steps=6)

    assert (6, rank, "entry/whole") in [(one.step, one.rank, one.name) for one in same.differences]


# Files


def test_what_is_written_is_read(tmp_path):
    writer = JournalWriter(tmp_path / "journal.jsonl")
    writer.write(HEADER)
    for one in run():
        writer.write(one)
    writer.close()

    journal = read_journal(tmp_path / "journal.jsonl")

    assert journal.header == HEADER
    assert list(journal.entries) == run()


def test_a_journal_is_never_written_over(tmp_path):
    JournalWriter(tmp_path / "journal.jsonl").close()

    with pytest.raises(FileExistsError):
        JournalWriter(tmp_path / "journal.jsonl")


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    lines = [json.dumps(dataclasses.asdict(record)) + "\n" for record in (HEADER, *run(last=2))]
    content = "".join(lines).encode()

    for nbytes in range(len(content) + 1):
        path = tmp_path / "journal.jsonl"
        path.write_bytes(content[:nbytes])
        whole = content[:nbytes].count(b"\n")
        assert len(read_journal(path).entries) == max(0, whole - 1)


def test_progress_is_that_of_the_whole_lines(tmp_path):
    path = tmp_path / "journal.jsonl"
    assert read_progress(path) == (None, 0)

    content = "".join(
        json.dumps(dataclasses.asdict(record)) + "\n" for record in (HEADER, *run(last=3))
    ).encode()
    seen = []
    with path.open("ab", buffering=0) as file:
        for begin in range(0, len(content), 50):
            file.write(content[begin : begin + 50])
            seen.append(read_progress(path)[1])

    assert read_progress(path)[0] == HEADER.pid
    assert sorted(set(seen)) == [0, 1, 2, 3]
    assert seen == sorted(seen)


# Samples


def test_samples_of_all_processes_stand_in_the_order_of_the_ranks():
    assert join_samples(processes(last=2)) == {1: (0, 1, 2, 3), 2: (4, 5, 6, 7)}


@pytest.mark.parametrize(
    ("history", "wrong"),
    [
        ({1: (0, 1), 2: (2, 0)}, ""),
        ({1: (0, 1), 2: (2, 2)}, ""),
        ({1: (0, 1), 2: (1, 0)}, "one sample was taken 2 times, another 0 times"),
        ({1: (0, 1), 2: (2,)}, "step 2 took 1 samples, not 2"),
        ({1: (0, 1)}, "the history has 1 steps, not 2"),
    ],
)
def test_skipped_and_repeated_samples_are_counted(history, wrong):
    assert check_history(history, sample_count=3, global_batch=2, steps=2) == wrong

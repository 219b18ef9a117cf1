"""A process dies, and the others go on: in DDP on gloo, with a replacement that joins them."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import ckptfmt
from tests.forks import fork
from tests.loop.death_training import (
    IN_EXCHANGE,
    IN_REGROUP,
    MORE_HOMES,
    PHASES,
    STEPS,
    Told,
    train,
)

pytestmark = [pytest.mark.dist, pytest.mark.slow]

#: The time between deaths that count as one, in seconds.
TOGETHER_S = 0.3
Deaths = tuple[tuple[str, int], ...]


def play(
    place: Path, world_size: int, deaths: Sequence[tuple[int, Deaths]], **options: Any
) -> Path:
    """Train, and replace each process that dies.

    Args:
        deaths: rank and deaths of the processes that die, in the order of their starts. The first
            entry of a rank is for the first process of the rank, and so on.
        options: more members of `Told`.
    """
    import torch.distributed as dist  # noqa: PLC0415

    place.mkdir()
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("newest", "0")
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    left = list(deaths)

    def start(rank: int, generation: int) -> Any:
        found = next((row for row in left if row[0] == rank), None)
        if found is not None:
            left.remove(found)
        own = () if found is None else found[1]
        told = Told(str(place), rank, world_size, store.port, generation, own, **options)
        return fork(train, variables, told)

    processes = [start(rank, 0) for rank in range(world_size)]
    generation = 0
    end_s = time.monotonic() + 300
    try:
        while any(process.exitcode is None for process in processes):
            assert time.monotonic() < end_s, "the training hangs\n" + read_output(place)
            if any(process.exitcode for process in processes):
                time.sleep(TOGETHER_S)
                generation += 1
                for rank, process in enumerate(processes):
                    if process.exitcode:
                        assert process.exitcode == -signal.SIGKILL, read_output(place)
                        processes[rank] = start(rank, generation)
                store.set("newest", str(generation))
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not left, "not every process died"
    return place


def read_output(place: Path) -> str:
    return "\n".join(path.read_text()[-4000:] for path in sorted(place.glob("output-*")))


def read(place: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / f"journal-{rank}").read_text().splitlines()]


def losses(rows: list[dict[str, Any]]) -> dict[int, set[str]]:
    """Return all losses of each step; a step that was done again has one more, or the same."""
    found: dict[int, set[str]] = {}
    for row in rows:
        if row["kind"] == "step":
            found.setdefault(row["step"], set()).add(row["loss"])
    return found


def ending(rows: list[dict[str, Any]]) -> Mapping[str, Any]:
    (row,) = [row for row in rows if row["kind"] == "end"]
    return row


def differences(right: Path, ours: Path, world_size: int) -> list[str]:
    """Return a sentence for each difference from an undisturbed training."""
    found = []
    for rank in range(world_size):
        undisturbed = read(right, rank)
        disturbed = read(ours, rank)
        expected = losses(undisturbed)
        assert sorted(expected) == list(range(STEPS))
        if losses(disturbed) != expected:
            found.append(f"rank {rank}: losses")
        found += [
            f"rank {rank}: {name}"
            for name in ("weights", "optimizer", "streams")
            if ending(undisturbed)[name] != ending(disturbed)[name]
        ]
    return found


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    place = tmp_path_factory.mktemp("undisturbed")
    return {size: play(place / str(size), size, []) for size in (2, 3)}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("world_size", "rank"), [(2, 1), (3, 0)])
def test_survivors_go_on_bit_for_bit(
    tmp_path: Path, right: dict[int, Path], world_size: int, rank: int, phase: str
) -> None:
    """The replacement gets the tensors from a survivor or the cache; no tensor is read at home."""
    step = {"step": 7, "commit": 9}.get(phase, 6)
    ours = play(tmp_path / "run", world_size, [(rank, ((phase, step),))], cache=True)
    assert differences(right[world_size], ours, world_size) == []
    for number in range(world_size):
        rows = read(ours, number)
        assert sum(row["home_nbytes"] for row in rows if row["kind"] == "load") == 0
        assert ending(rows)["launch"] == 2
        # A death after the commit of step 6 leaves no step to repeat, if the others were as far.
        assert ending(rows)["evidence"] in ("verified", "expected")
        assert (ending(rows)["rewinds"] == 1) is (number != rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_for_a_lost_process_ends_once_the_program_knows(
    tmp_path: Path, right: dict[int, Path], rank: int
) -> None:
    """The survivor met the lost process in no collective call, but at the begin of a save."""
    ours = play(tmp_path / "run", 2, [(rank, ((IN_EXCHANGE, 5),))])
    assert differences(right[2], ours, 2) == []
    (lost,) = [row for row in read(ours, 1 - rank) if row["kind"] == "lost"]
    assert "Job(lost=)" in lost["error"]


def test_tensors_come_from_memory(tmp_path: Path, right: dict[int, Path]) -> None:
    ours = play(tmp_path / "run", 3, [(1, (("step", 7),))])
    assert differences(right[3], ours, 3) == []
    loads = [[row for row in read(ours, rank) if row["kind"] == "load"][-1] for rank in range(3)]
    for rank, load in enumerate(loads):
        assert load["step"] == 6
        assert load["home_nbytes"] == 0
        assert (load["memory_nbytes"] > 0) is (rank != 1)
        assert (load["received_nbytes"] > 0) is (rank == 1)


def test_the_run_is_read_if_memory_is_damaged(tmp_path: Path, right: dict[int, Path]) -> None:
    """Each regroup failed with BLOCK_DIGEST. The slots serve again once a later save fills them."""
    deaths = [(1, (("step", 7),)), (1, (("step", 11),))]
    ours = play(tmp_path / "run", 3, deaths, damages=True, waits=(7, 11))
    assert differences(right[3], ours, 3) == []
    for rank in range(3):
        loads = [row for row in read(ours, rank) if row["kind"] == "load" and row["generation"]]
        first, second = loads
        assert (first["step"], second["step"]) == (6, 9)
        assert first["home_nbytes"] > 0
        assert second["home_nbytes"] == (0 if rank == 1 else first["home_nbytes"])
        assert first["memory_nbytes"] == 0
        assert any(note.startswith("MEMORY_DAMAGED: ") for note in first["notes"])
        assert (second["memory_nbytes"] > 0) is (rank != 1)
        assert second["notes"] == []


def test_an_additional_random_number_is_noticed(tmp_path: Path, right: dict[int, Path]) -> None:
    ours = play(tmp_path / "run", 2, [(1, (("step", 7),))], draws=True)
    assert differences(right[2], ours, 2)


def test_ten_deaths(tmp_path: Path, right: dict[int, Path]) -> None:
    """A tenth death has the same effect as the first; each process dies several times."""
    chance = random.Random(3)
    deaths = []
    last = [4, 4, 4]
    for _ in range(10):
        rank = chance.randrange(3)
        last[rank] = min(STEPS - 1, last[rank] + chance.randrange(3))
        deaths.append((rank, (("step", last[rank]),)))
    ours = play(tmp_path / "run", 3, deaths, cache=True)
    assert differences(right[3], ours, 3) == []
    for rank in range(3):
        assert all(row["home_nbytes"] == 0 for row in read(ours, rank) if row["kind"] == "load")


@pytest.mark.parametrize("second", [0, 1])
def test_a_death_while_the_others_regroup(
    tmp_path: Path, right: dict[int, Path], second: int
) -> None:
    """A survivor, or the replacement itself, dies in the load: the next group does the same."""
    first = (("step", 7),)
    deaths = [(0, first), (second, ((IN_REGROUP, 0),))]
    ours = play(tmp_path / "run", 3, deaths)
    assert differences(right[3], ours, 3) == []
    (survivor,) = {1, 2} - {second} if second else {2}
    lost = [row for row in read(ours, survivor) if row["kind"] == "lost"]
    assert len(lost) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_replicas_on_other_nodes_go_on(tmp_path: Path, right: dict[int, Path], rank: int) -> None:
    ours = play(tmp_path / "run", 2, [(rank, (("step", 7),))], peers=True)
    assert differences(right[2], ours, 2) == []
    for number in range(2):
        assert all(row["home_nbytes"] == 0 for row in read(ours, number) if row["kind"] == "load")
    lines = [line for line in read_output(ours).splitlines() if "(durability peers)" in line]
    assert any(line.endswith("l0002") for line in lines)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["step", "save"])
def test_a_run_with_three_homes(
    tmp_path: Path, right: dict[int, Path], phase: str, rank: int
) -> None:
    """The launch of the survivors and the replacement has votes of its own, at the same home.

    The save in which a process dies may have taken the slot of the save before.
    """
    step = {"step": 7, "save": 6}[phase]
    waits = (7,) if phase == "step" else ()
    ours = play(tmp_path / "run", 2, [(rank, ((phase, step),))], homes=True, waits=waits)
    assert differences(right[2], ours, 2) == []
    heads = [ckptfmt.Run(ours / name).newest() for name in ("run", *MORE_HOMES)]
    assert {(head.step, head.launch) for head in heads} == {(STEPS, 2)}
    assert len({head.digest for head in heads}) == 1
    survivor = [row for row in read(ours, 1 - rank) if row["kind"] == "load"][-1]
    assert survivor["memory_nbytes"] > 0 or phase == "save"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_home_goes_away_with_a_process(tmp_path: Path, right: dict[int, Path], rank: int) -> None:
    """The survivors go on at another home, by their memory if the newest save is there."""
    death = (rank, (("step", 10),))
    ours = play(tmp_path / "run", 2, [death], homes=True, away=True, waits=(10,))
    assert differences(right[2], ours, 2) == []
    assert not (ours / "run").exists()
    heads = [ckptfmt.Run(ours / name).newest() for name in MORE_HOMES]
    assert {(head.step, head.launch) for head in heads} == {(STEPS, 2)}
    assert len({head.digest for head in heads}) == 1
    survivor = [row for row in read(ours, 1 - rank) if row["kind"] == "load"][-1]
    assert survivor["step"] in (6, 9)
    lost = [row for row in read(ours, 1 - rank) if row["kind"] == "lost"]
    assert len(lost) == 1

"""A checkpoint is replaced while it is read: the reader finds a whole one. REQ-OPN-013, REQ-OPN-014."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.errors import Code, IntegrityError
from ckptfmt.store.posix import PosixCalls
from tests.builders import code_of, error_of
from tests.interface.test_group import Allgather, run_writers

#: The most files that a reader in these tests opens.
MOST_OPENED = 200


def state_of(number: int, *names: str) -> ckptfmt.State:
    weights = {name: np.full(3000, number, np.int32) for name in names or ("v", "w")}
    return ckptfmt.State(
        weights=weights, config={"n": number}, data={"position": number}, rng=False
    )


def replace(place: pathlib.Path, number: int, *names: str) -> None:
    ckptfmt.save(place, state_of(number, *names), step=number, replace=True)


def numbers_of(state: Any) -> set[int]:
    """Return the numbers of the checkpoints that a state has something of."""
    return {int(value) for array in state.weights.values() for value in np.unique(array)} | {
        state.data["position"]
    }


@contextlib.contextmanager
def before_opening(act: Callable[[int], None], *, ending: str = "") -> Iterator[list[int]]:
    """Call `act` before each file whose name ends so is opened for reading, with the number of such files so far."""
    opened, busy = [0], [False]
    right = PosixCalls.open_read

    def open_read(calls: PosixCalls, name: str, directory_fd: int) -> int:
        if not busy[0] and name.endswith(ending):
            opened[0] += 1
            busy[0] = True
            try:
                act(opened[0])
            finally:
                busy[0] = False
        return right(calls, name, directory_fd)

    with mock.patch.object(PosixCalls, "open_read", open_read):
        yield opened


def load(place: pathlib.Path) -> set[int]:
    trees: Any = ckptfmt.load(place, framework="numpy")
    return {int(value) for array in trees["weights"].values() for value in np.unique(array)} | {
        trees["data"]["position"],
        trees["config"]["n"],
    }


def load_into_state(place: pathlib.Path) -> set[int]:
    state = state_of(0)
    report = ckptfmt.load(place, state, allow=["missing", "unexpected"])
    return numbers_of(state) | {report.step}


def open_and_read(place: pathlib.Path) -> set[int]:
    with ckptfmt.open(place) as checkpoint:
        return {checkpoint.manifest.origin.step, checkpoint.index.origin.step}


def validate(place: pathlib.Path) -> set[int]:
    report = ckptfmt.validate(place)
    assert report.violations == []
    assert len(report.checkpoints) == 1
    return {1}


def command(*arguments: str, codes: tuple[int, ...] = (0,)) -> Callable[[pathlib.Path], set[int]]:
    def run(place: pathlib.Path) -> set[int]:
        paths = {"PLACE": str(place), "OTHER": str(place.parent / "other")}
        assert main([paths.get(one, one) for one in arguments]) in codes
        return {1}

    return run


def convert(place: pathlib.Path) -> set[int]:
    target = place.parent / "target.safetensors"
    assert main(["convert", str(place), str(target)]) == 0
    content = target.read_bytes()
    target.unlink()
    begin = 8 + int.from_bytes(content[:8], "little")
    assert len(content) == begin + 2 * 3000 * 4
    return set(np.frombuffer(content[begin:], np.int32).tolist())


READERS = {
    "load": load,
    "load into a state": load_into_state,
    "open": open_and_read,
    "validate": validate,
    "ckptfmt validate": command("validate", "PLACE"),
    "ckptfmt inspect": command("inspect", "PLACE"),
    "ckptfmt inspect --json": command("inspect", "PLACE", "--json"),
    "ckptfmt diff": command("diff", "PLACE", "OTHER", codes=(1,)),
    "ckptfmt diff --verify": command("diff", "OTHER", "PLACE", "--verify", "--json", codes=(1,)),
    "ckptfmt convert": convert,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_save_that_replaces_at_any_moment_is_no_damage(
    read: Callable[[pathlib.Path], set[int]],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place, counter = tmp_path / "place", itertools.count(1)
    replace(place, next(counter))
    replace(tmp_path / "other", 0)
    for moment in range(1, MOST_OPENED):

        def act(number: int, moment: int = moment) -> None:
            if number == moment:
                replace(place, next(counter))

        with before_opening(act) as opened:
            found = read(place)
        assert len(found) == 1, (moment, found)
        said = capsys.readouterr()
        assert "unreadable" not in said.out
        if "--json" in said.out or said.out.startswith("{"):
            assert json.loads(
                said.out
            )  # one object: nothing was printed of the checkpoint that was replaced
        if opened[0] < moment:
            return
    raise AssertionError


def test_what_is_open_and_was_replaced_says_so_and_never_mixes(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "place"
    replace(place, 1)
    with ckptfmt.open(place) as checkpoint:
        assert (checkpoint.weights["w"][...] == 1).all()
        replace(place, 2)
        for read in (lambda: checkpoint.weights["v"][...], lambda: checkpoint.read("weights", "w")):
            error = error_of(read)
            assert error.code == Code.CHECKPOINT_RETIRED
            assert checkpoint.digest in error.detail
    with ckptfmt.open(place) as checkpoint, ckptfmt.open(place) as unread:
        assert (checkpoint.weights["v"][...] == 2).all()
        replace(place, 3)
        assert checkpoint.config["n"] == 2  # read before, with its part
        assert code_of(lambda: unread.config["n"]) == Code.CHECKPOINT_RETIRED


def test_damage_is_still_told_as_such(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "place"
    replace(place, 1)
    (shard,) = place.glob("weights*")
    shard.unlink()
    assert code_of(lambda: ckptfmt.load(place)) == Code.FILE_MISSING
    assert [error.code for error in ckptfmt.validate(place).violations] == [Code.FILE_MISSING]
    (part,) = (place / "parts").iterdir()
    part.unlink()
    assert code_of(lambda: ckptfmt.load(place)) == Code.FILE_MISSING
    assert {error.code for error in ckptfmt.validate(place).violations} == {Code.FILE_MISSING}


def test_a_removed_checkpoint_is_told_as_such(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "place"
    replace(place, 1)
    with ckptfmt.open(place) as checkpoint, ckptfmt.PathSaver() as saver:
        saver.remove(place)
        assert code_of(lambda: checkpoint.weights["v"][...]) == Code.CHECKPOINT_RETIRED
    assert code_of(lambda: ckptfmt.load(place)) == Code.NOT_COMMITTED


@pytest.mark.parametrize("read", [load, load_into_state], ids=["load", "load into a state"])
def test_a_reader_that_is_always_too_slow_ends(
    read: Callable[[pathlib.Path], set[int]], tmp_path: pathlib.Path
) -> None:
    place, counter = tmp_path / "place", itertools.count(1)
    replace(place, next(counter))
    with before_opening(lambda _: replace(place, next(counter)), ending=".safetensors"):
        assert code_of(lambda: read(place)) == Code.CHECKPOINT_RETIRED
        (error,) = ckptfmt.validate(place).violations
    assert isinstance(error, IntegrityError)
    assert error.code == Code.CHECKPOINT_RETIRED


def test_a_state_never_has_tensors_of_two_checkpoints(tmp_path: pathlib.Path) -> None:
    """A tensor that the next checkpoint lacks may be in the state already: nothing says that it isn't its own."""
    place = tmp_path / "place"
    replace(place, 1, "v", "w")

    def act(number: int) -> None:
        if number == 1:
            replace(place, 2, "v")

    with before_opening(act, ending=".safetensors"):
        error = error_of(lambda: load_into_state(place))
    assert error.code == Code.CHECKPOINT_RETIRED
    assert "w" in error.detail


@pytest.mark.parametrize("moment", range(1, 12))
def test_all_processes_load_one_checkpoint(moment: int, tmp_path: pathlib.Path) -> None:
    place, gather = tmp_path / "place", Allgather(2)
    replace(place, 1)

    def act(number: int) -> None:
        if number == moment:
            replace(place, 2)

    def read(writer: int) -> set[int]:
        state = state_of(0)
        ckptfmt.load(place, state, writer=(writer, 2), agree=gather.of(writer))
        return numbers_of(state)

    with before_opening(act):
        found = run_writers(2, read)
    assert found in ([{1}, {1}], [{2}, {2}])


def test_a_checkpoint_that_is_retired_during_a_validation_of_its_run_is_no_damage(
    tmp_path: pathlib.Path,
) -> None:
    run, data, weights = tmp_path / "run", {"position": 0}, {"w": np.zeros(3000, np.int32)}
    state = ckptfmt.State(weights=weights, data=data, rng=False)

    def train(training: ckptfmt.Checkpointer, step_count: int) -> None:
        for step in training.steps(step_count):
            weights["w"][:] = data["position"] = step

    with ckptfmt.Checkpointer(run, state, every=1, keep=1, saver="inline") as training:
        train(training, 2)
        with before_opening(lambda number: train(training, 2 + 2 * number), ending=".safetensors"):
            report = ckptfmt.validate(run)
    assert report.violations == []
    assert report.warnings == ["step-00000002-l0001 was retired while it was checked"]

"""The disk is full, or loses what it was given: the save fails, by name, and the one after it works."""

import contextlib
import errno
import itertools
import os
import subprocess

import numpy as np
import pytest

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.store.local import LocalStore
from tests.faults.driver import PATIENCE_S, Toy, code_of, committed, outcome_of, problems, resume
from tests.store.helpers import temporaries
from tests.stores.faults import Fault, FaultCalls


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("only root may mount")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place):
    """Leave not a byte."""
    with contextlib.suppress(OSError), place.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return place


@pytest.mark.parametrize("saver", ["process", "thread"])
def test_full_disk_fails_the_save_and_the_next_one_works_when_there_is_room(small_disk, saver):
    run, toy = small_disk / "run", Toy(3 << 20)
    with Checkpointer(run, toy.state, saver=saver, failed_saves=0) as checkpointer:
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
        ballast = fill(small_disk / "ballast")
        handle = toy.save(checkpointer)
        assert outcome_of(handle) == "NO_SPACE"
        assert code_of(checkpointer.save) == "NO_SPACE"
        # Still full: no slot is lost by it, whatever is tried.
        for _ in range(3):
            handle = toy.save(checkpointer)
            assert outcome_of(handle) == "NO_SPACE"
            assert code_of(checkpointer.save) == "NO_SPACE"
        assert temporaries(run) == []
        assert [
            place.name
            for place in run.rglob("*.safetensors")
            if "00000001" not in str(place.parent)
        ] == []
        ballast.unlink()
        toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
    assert committed(run) == [1, 6]
    assert problems(run) == []
    assert resume(run, Toy(3 << 20)) == 6


@pytest.mark.parametrize("shard", ["weights", "optimizer"])
def test_disk_that_gets_full_amid_a_save_has_its_room_back(small_disk, shard):
    """The first file that doesn't fit takes with it what was written of it, and the one that did fit."""
    run, sizes = (
        small_disk / "run",
        {"weights": 8, "optimizer": 3} if shard == "weights" else {"weights": 3, "optimizer": 8},
    )
    parts = {name: {"w": np.ones(mib << 17)} for name, mib in sizes.items()}
    state = ckptfmt.State(weights=parts["weights"], optimizer=parts["optimizer"])
    with Checkpointer(run, state, failed_saves=0) as checkpointer:
        checkpointer.prepare()
        (small_disk / "ballast").write_bytes(bytes(5 << 20))
        handle = checkpointer.save(step=0)
        assert handle is not None
        assert outcome_of(handle) == "NO_SPACE"
        assert handle.error is not None
        assert str(handle.error.where).startswith(shard)
        room = os.statvfs(small_disk)
        assert room.f_bavail * room.f_frsize >= 6 << 20
        assert code_of(checkpointer.save) == "NO_SPACE"
        (small_disk / "ballast").unlink()
        again = checkpointer.save(step=0)
        assert again is not None
        assert outcome_of(again) == "ok"
    assert ckptfmt.validate(small_disk / "run").valid


@pytest.mark.parametrize("operation", ["fsync", "fsync_directory"])
def test_every_fsync_that_fails_is_a_save_that_fails(tmp_path, operation):
    run, toy = tmp_path / "run", Toy()
    calls = FaultCalls(run, Fault(fail_at=0), errno_value=errno.EIO)
    store = LocalStore(run, writable=True, calls=calls)
    with Checkpointer(store, toy.state, saver="thread", failed_saves=0) as checkpointer:
        checkpointer.prepare()
        for number in itertools.count(1):
            fault = calls.fault = Fault(fail_at=number, operations=frozenset({operation}))
            handle = toy.save(checkpointer)
            code = outcome_of(handle)
            assert handle.wait_over(PATIENCE_S)
            calls.fault = Fault(fail_at=0)
            if not fault.fired_count:
                break
            assert code == "STORE_IO"
            assert code_of(lambda: checkpointer.save(step=toy.data["step"])) == "STORE_IO"
            # The last of a directory comes after the decision: it may be there, but nobody was told
            # so.
            assert handle.step not in committed(run) or operation == "fsync_directory"
            toy.save(checkpointer).wait("COMMITTED", PATIENCE_S)
        assert number > 3
    assert problems(run) == []
    assert resume(run) == toy.data["step"]


def test_disk_that_fails_for_good_never_has_a_save_acknowledged(tmp_path):
    run, toy = tmp_path / "run", Toy()
    calls = FaultCalls(run, Fault(fail_at=0), errno_value=errno.EIO)
    store = LocalStore(run, writable=True, calls=calls)
    checkpointer = Checkpointer(store, toy.state, saver="thread", failed_saves=0)
    checkpointer.prepare()
    calls.fault = Fault(fail_at=1, sticky=True, operations=frozenset({"fsync"}))
    for _ in range(5):
        handle = toy.save(checkpointer)
        assert outcome_of(handle) == "STORE_IO"
        assert code_of(lambda: checkpointer.save(step=toy.data["step"])) == "STORE_IO"
    toy.save(checkpointer)
    assert code_of(checkpointer.close) == "STORE_IO"
    assert committed(run) == []
    assert problems(run) == []

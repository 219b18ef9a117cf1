"""The model of the disk, by examples that can be told by hand."""

import random

from tests.explorer.crashes import scan
from tests.explorer.fsmodel import EXT4_ORDERED, POSIX_MIN, Disk, DiskState
from tests.stores.hooked import Operation

EMPTY = DiskState({}, frozenset())


def states_after(*operations, initial=EMPTY, model=POSIX_MIN):
    disk = Disk(initial)
    for op, path, *rest in operations:
        to, data = (rest[0], b"") if op in ("link", "rename") else ("", rest[0] if rest else b"")
        disk.apply(Operation(op, path, to, data))
    return {frozenset(state.files.items()) for state in disk.iter_states(model, random.Random(1))}


def files(**contents):
    return frozenset((name, data) for name, data in contents.items())


WRITE = (("open_new", ".tmp-1"), ("write", ".tmp-1", b"abcd"))


def test_a_synced_file_without_its_name_is_there_or_not():
    assert states_after(*WRITE, ("fsync", ".tmp-1"), ("link", ".tmp-1", "a")) == {
        files(),
        files(a=b"abcd"),
    }


def test_writes_with_a_place_of_their_own_may_come_in_any_order():
    disk = Disk()
    steps = [
        Operation("open_new", ".tmp-1"),
        Operation("write_at", ".tmp-1", data=b"cd", byte_begin=2),
        Operation("preallocate", ".tmp-1", nbytes=9),
        Operation("write_at", ".tmp-1", data=b"ab", byte_begin=0),
        Operation("truncate", ".tmp-1", nbytes=5),
    ]
    for operation in [*steps, Operation("fsync", ".tmp-1"), Operation("link", ".tmp-1", "a")]:
        disk.apply(operation)

    states = {
        frozenset(state.files.items()) for state in disk.iter_states(POSIX_MIN, random.Random(1))
    }
    assert states == {files(), files(a=b"abcd\0")}


def test_a_synced_name_stays():
    operations = (*WRITE, ("fsync", ".tmp-1"), ("link", ".tmp-1", "a"), ("fsync_directory", ""))

    assert states_after(*operations) == {files(a=b"abcd")}


def test_a_name_without_its_contents_may_be_anything():
    states = states_after(*WRITE, ("link", ".tmp-1", "a"), ("fsync_directory", ""))

    assert {
        files(a=b"abcd"),
        files(a=b""),
        files(a=bytes(4)),
        files(a=b"ab\0\0"),
        files(a=b"\xa5\xa5cd"),
    } <= states
    assert files() not in states
    assert len(states) == 9 + 1 + 3


def test_unsynced_names_are_lost_independently():
    two = (("mkdir", "a"), ("mkdir", "b"))
    disk = Disk()
    for op, path in two:
        disk.apply(Operation(op, path))

    found = {state.directories for state in disk.iter_states(POSIX_MIN, random.Random(1))}
    ordered = {state.directories for state in disk.iter_states(EXT4_ORDERED, random.Random(1))}

    assert found == {frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")}
    assert ordered == {frozenset(), frozenset("a"), frozenset("ab")}


def test_what_is_in_a_lost_directory_is_lost():
    operations = (
        ("mkdir", "d"),
        ("open_new", "d/.tmp-1"),
        ("fsync", "d/.tmp-1"),
        ("link", "d/.tmp-1", "d/a"),
        ("fsync_directory", "d"),
    )

    assert states_after(*operations) == {files(), files(**{"d/a": b""})}


def test_a_rename_shows_the_old_or_the_new_contents_never_none():
    initial = DiskState({"a": b"old"}, frozenset())

    states = states_after(*WRITE, ("fsync", ".tmp-1"), ("rename", ".tmp-1", "a"), initial=initial)

    assert states == {files(a=b"old"), files(a=b"abcd")}


def test_a_removed_name_may_come_back():
    initial = DiskState({"a": b"1", "b": b"2"}, frozenset())

    states = states_after(("unlink", "a"), ("unlink", "b"), initial=initial)

    assert states == {files(), files(a=b"1"), files(b=b"2"), files(a=b"1", b=b"2")}


def test_an_fsync_of_any_file_commits_the_names_before_it_under_ext4_and_not_under_posix():
    operations = (("mkdir", "d"), *WRITE, ("fsync", ".tmp-1"))
    found = {}
    for model in (POSIX_MIN, EXT4_ORDERED):
        disk = Disk()
        for op, path, *rest in operations:
            disk.apply(Operation(op, path, data=rest[0] if rest else b""))
        found[model] = {state.directories for state in disk.iter_states(model, random.Random(1))}

    assert found == {POSIX_MIN: {frozenset(), frozenset("d")}, EXT4_ORDERED: {frozenset("d")}}


def test_a_scan_returns_what_is_there(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_bytes(b"1")
    (tmp_path / ".tmp-x").write_bytes(b"2")

    assert scan(tmp_path) == DiskState({"d/a": b"1"}, frozenset("d"))

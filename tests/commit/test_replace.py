"""Checkpoints outside of a run are replaced and removed: at every moment one is there whole, or says that it isn't."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.commit import decision
from ckptfmt.commit.lone import remove_alone
from ckptfmt.commit.waiting import hold_attempt, list_held_attempts
from ckptfmt.documents.manifest import MANIFEST_NAME, Manifest
from ckptfmt.errors import Code
from ckptfmt.saving.path_saver import PathSaver
from ckptfmt.store import Store, open_store
from ckptfmt.store.leases import TERM_S
from ckptfmt.store.local import LocalStore
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.symlinks import detach_link, is_link, remove_link
from ckptfmt.write.writer import write_part
from tests.builders import code_of, error_of, origin, save, snapshot, tensor
from tests.explorer.crashes import Bench, bench_directory, lay_out, record
from tests.explorer.fsmodel import EXT4_ORDERED, POSIX_MIN, Disk, DiskState
from tests.interface.test_group import Allgather, run_writers
from tests.saver.test_saver import WAIT_S
from tests.store.helpers import ROOT
from tests.stores.hooked import HookedStore, Operation
from tests.stores.recorder import ACK

SEED = 20261123


def state_of(number: int) -> ckptfmt.State:
    return ckptfmt.State(
        weights={"w": np.full(700, number, np.int32)}, data={"position": number}, rng=False
    )


def replace(place: Any, number: int, **options: Any) -> None:
    ckptfmt.save(
        place, state_of(number), step=number, **{"replace": True, "deadline_s": WAIT_S, **options}
    )


def number_at(place: Any) -> int:
    """Return the number of the state at a place, after a check of every byte."""
    report = ckptfmt.validate(place)
    assert report, report.violations
    trees: Any = ckptfmt.load(place, framework="numpy")
    assert (trees["weights"]["w"] == trees["data"]["position"]).all()
    return int(trees["data"]["position"])


def assert_clean(place: Any) -> None:
    """Check that nothing lies there but the checkpoint."""
    assert ckptfmt.validate(place).warnings == []


class Stopped(HookedStore):
    """A store that does something else first, before the operation that a test names, once."""

    def __init__(self, inner: Store, op: str, path: str, action: Callable[[], object]) -> None:
        super().__init__(inner)
        self._when, self._action = (op, path), action

    def before(self, operation: Operation) -> None:
        if (operation.op, operation.path) == self._when:
            self._when = ("", "")
            self._action()


@pytest.fixture
def store(tmp_path: pathlib.Path) -> LocalStore:
    return LocalStore(tmp_path / "place", writable=True)


# --- what is replaced -----------------------------------------------------------------------------


def test_the_new_one_takes_the_place_and_nothing_of_the_old_one_stays(store: LocalStore) -> None:
    """REQ-CMT-042"""
    for number in (1, 2, 3):
        replace(store, number)
        assert number_at(store) == number
        assert_clean(store)
    assert code_of(lambda: replace(store, 4, replace=False)) == Code.CHECKPOINT_EXISTS
    assert number_at(store) == 3


def test_what_was_retired_or_given_up_is_replaced(store: LocalStore) -> None:
    """REQ-CMT-042: outside of a run, no lineage speaks of it."""
    decision.abort(store, run_id=None, launch=None, step=1, reason="by hand")
    replace(store, 1)
    register = decision.read_register(store)
    assert isinstance(register, Manifest)
    decision.retire(store, register)
    assert code_of(lambda: ckptfmt.open(store)) == Code.CHECKPOINT_RETIRED
    replace(store, 2)
    assert number_at(store) == 2
    assert_clean(store)


def test_files_beside_the_checkpoint_stay(store: LocalStore) -> None:
    replace(store, 1)
    store.create("notes/mine.txt", [b"mine"])
    replace(store, 2)
    assert number_at(store) == 2
    assert store.read("notes/mine.txt", limit_nbytes=10) == b"mine"


def test_a_directory_of_other_files_is_saved_to_and_they_stay(tmp_path: pathlib.Path) -> None:
    """With nothing to replace, a save does what it does without `replace`; also through a link, which stays then."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.bin").write_bytes(b"x")
    (tmp_path / "link").symlink_to("data")
    for number, place in enumerate(("data", "link", "link")):
        replace(tmp_path / place, number)
        assert number_at(tmp_path / place) == number
        assert (tmp_path / place / "x.bin").read_bytes() == b"x"
        assert (tmp_path / "link").is_symlink() == (number == 0)
    assert number_at(tmp_path / "data") == 0


def test_a_link_to_a_directory_of_other_files_stays(tmp_path: pathlib.Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.bin").write_bytes(b"x")
    (tmp_path / "link").symlink_to("data")
    replace(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink()
    assert number_at(tmp_path / "data") == 1
    assert (tmp_path / "data" / "x.bin").read_bytes() == b"x"


def test_neither_a_run_nor_a_part_of_it_is_replaced(tmp_path: pathlib.Path) -> None:
    """REQ-CMT-042: and it is refused by name."""
    with ckptfmt.Checkpointer(tmp_path / "run", state_of(1), saver="inline") as checkpointer:
        handle = checkpointer.save(step=1)
    assert handle is not None
    before = sorted(tmp_path.rglob("*"))
    errors = {
        place: error_of(lambda p=place: replace(tmp_path / p, 2)) for place in ("run", handle.path)
    }
    assert {error.code for error in errors.values()} == {Code.CHECKPOINT_EXISTS}
    assert "belongs to a run" in errors["run"].detail
    assert "belongs to the run" in errors[handle.path].detail
    assert sorted(tmp_path.rglob("*")) == before
    assert number_at(tmp_path / "run") == 1


def test_a_checkpoint_that_a_run_commits_meanwhile_stays(store: LocalStore) -> None:
    """REQ-CMT-042: it is looked at again when the register is replaced."""
    members: dict[str, Any] = {"run_id": "0" * 32, "launch": 1, "attempt": "0123456789abcdef"}
    state = snapshot(tensor("w", np.arange(9)))
    racing = Stopped(store, "create", MANIFEST_NAME, lambda: save(store, state, **members))
    assert code_of(lambda: replace(racing, 2)) == Code.COMMIT_CONFLICT
    with ckptfmt.open(store) as checkpoint:
        assert checkpoint.manifest.origin.run_id == "0" * 32
        assert checkpoint.weights["w"][3] == 3


def test_a_store_without_locks_is_refused() -> None:
    """REQ-CMT-043, REQ-STO-011: nobody could tell what is under way from what is left over."""
    store = MemoryStore()
    assert code_of(lambda: replace(store, 1)) == Code.STORE_UNSUPPORTED
    replace(store, 1, replace=False)
    assert code_of(lambda: replace(store, 2)) == Code.STORE_UNSUPPORTED
    assert number_at(store) == 1


def test_writers_replace_together(store: LocalStore) -> None:
    """REQ-CMT-042: and all wait for the new one, which the old one in the register doesn't end."""
    for number in (1, 2, 3):
        allgather = Allgather(2)

        def write(writer: int, number: int = number, allgather: Allgather = allgather) -> None:
            replace(store, number, writer=(writer, 2), agree=allgather.of(writer))

        run_writers(2, write)
        assert number_at(store) == number
        assert_clean(store)


# --- symbolic links -------------------------------------------------------------------------------


def linked(directory: pathlib.Path) -> pathlib.Path:
    """Save state 1 as `best`, and return the path of a link to it."""
    replace(directory / "best", 1)
    link = directory / "last"
    link.symlink_to("best")
    return link


@pytest.mark.parametrize("how", ["save", "Saver"])
def test_a_link_gives_way_to_a_checkpoint_of_its_own(tmp_path: pathlib.Path, how: str) -> None:
    """What it leads to is the best one, say, and stays."""
    link = linked(tmp_path)
    if how == "Saver":
        with PathSaver(saver="thread") as saving:
            assert saving.save(link, state_of(2), step=2, replace=True).path == str(link)
    else:
        replace(link, 2)
    assert not link.is_symlink()
    assert [number_at(tmp_path / "best"), number_at(link)] == [1, 2]
    assert_clean(link)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "last"]


@pytest.mark.parametrize("failing", range(1, 25))
def test_a_look_at_a_link_that_fails_costs_no_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """A link that was taken for a directory had the save write to the link's target."""
    link = linked(tmp_path)
    right = os.lstat
    looks = 0

    def lstat(path: Any, **options: Any) -> os.stat_result:
        nonlocal looks
        looks += str(path).startswith(str(tmp_path))
        if looks == failing:
            looks += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return right(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", lstat)
        with contextlib.suppress(ckptfmt.CkptError):
            replace(link, 2)
    assert number_at(tmp_path / "best") == 1
    assert number_at(link) in (1, 2)


@pytest.mark.parametrize("call", ["lstat", "unlink"])
def test_a_link_that_cannot_be_removed_costs_no_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A failed look at the link was a bare OSError."""
    link = linked(tmp_path)

    def fail(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        assert code_of(lambda: PathSaver().remove(link)) == Code.STORE_IO
    assert link.is_symlink()
    assert number_at(tmp_path / "best") == 1


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_slash_behind_a_link_changes_nothing(tmp_path: pathlib.Path, slash: str) -> None:
    """The check of what the link leads to was left out."""
    with ckptfmt.Checkpointer(tmp_path / "run", state_of(1), saver="inline") as checkpointer:
        checkpointer.save(step=1)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").write_bytes(b"mine")
    for name in ("run", "others"):
        (tmp_path / f"to-{name}").symlink_to(name)
    assert code_of(lambda: replace(f"{tmp_path}/to-run{slash}", 2)) == Code.CHECKPOINT_EXISTS
    replace(f"{tmp_path}/to-others{slash}", 2)
    assert (tmp_path / "to-run").is_symlink()
    assert (tmp_path / "to-others").is_symlink()
    assert number_at(tmp_path / "others") == 2


@pytest.mark.parametrize("how", ["save", "Saver", "remove"])
@pytest.mark.parametrize(
    "form",
    [
        "file://{root}/d/last",
        "{root}/d/into/../last",
        "{root}/d/into/.././last/.",
        "{root}/missing/../d/last",
    ],
)
def test_a_link_under_another_name_costs_no_checkpoint(
    tmp_path: pathlib.Path, how: str, form: str
) -> None:
    """A URL, and `..` behind a link to a directory elsewhere: the target was overwritten or deleted."""
    replace(tmp_path / "best", 1)
    replace(tmp_path / "other", 3)
    for name in ("d", "far", "far/x"):
        (tmp_path / name).mkdir()
    (tmp_path / "d" / "into").symlink_to("../far/x")
    (tmp_path / "d" / "last").symlink_to("../other")
    link = tmp_path / ("far" if "into" in form else "d") / "last"
    link.unlink(missing_ok=True)
    link.symlink_to("../best")
    place = form.format(root=tmp_path)
    with PathSaver(saver="thread") as saver:
        if how == "save":
            replace(place, 2)
        elif how == "Saver":
            saver.save(place, state_of(2), step=2, replace=True).wait()
        else:
            saver.remove(place)
    assert [number_at(tmp_path / "best"), number_at(tmp_path / "other")] == [1, 3]
    assert (tmp_path / "d" / "last").is_symlink() == ("into" in form)
    assert not link.is_symlink()
    assert link.exists() == (how != "remove")
    if how != "remove":
        assert number_at(link) == 2


@pytest.mark.parametrize("path", ["/", ".", "..", "", "a\0b"])
def test_a_path_without_a_name_is_no_link(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_link(path)
    assert not remove_link(path)
    detach_link(path)


@pytest.mark.parametrize("moment", ["mkdir", "link", "exchange", "unlink"])
def test_a_kill_while_a_link_gives_way_leaves_a_checkpoint(
    tmp_path: pathlib.Path, moment: str
) -> None:
    """Whether it is the link still or the directory already; and the next save removes what was left beside."""
    link = linked(tmp_path)
    kill = f"""
        import os, sys
        from ckptfmt.store import posix, symlinks
        owner = posix.PosixCalls if {moment!r} == "exchange" else os
        right = getattr(owner, {moment!r})
        def die(*given, **options):
            {moment!r} == "exchange" and right(*given, **options)
            os.kill(os.getpid(), 9)
        setattr(owner, {moment!r}, die)
        symlinks.detach_link(sys.argv[1])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(kill), str(link)], cwd=ROOT, check=False
    )
    assert done.returncode == -9
    assert number_at(link) == 1
    assert link.is_symlink() == (moment in ("mkdir", "link"))
    replace(link, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "last"]
    assert [number_at(tmp_path / "best"), number_at(link)] == [1, 2]


def test_a_link_stays_where_names_cannot_be_exchanged(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A named error is better than a moment without a checkpoint."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EINVAL, "not here")

    monkeypatch.setattr(PosixCalls, "exchange", refuse)
    link = linked(tmp_path)
    error = error_of(lambda: replace(link, 2))
    assert error.code == Code.STORE_UNSUPPORTED
    assert "Remove the link" in error.remedy
    assert link.is_symlink()
    assert number_at(link) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "last"]


def test_a_link_to_nothing_or_to_a_run(tmp_path: pathlib.Path) -> None:
    (tmp_path / "nowhere").symlink_to("gone")
    replace(tmp_path / "nowhere", 1)
    assert number_at(tmp_path / "nowhere") == 1
    with ckptfmt.Checkpointer(tmp_path / "run", state_of(1), saver="inline") as checkpointer:
        handle = checkpointer.save(step=1)
    assert handle is not None
    for number, target in enumerate(("run", handle.path)):
        link = tmp_path / f"link{number}"
        link.symlink_to(target)
        assert code_of(lambda p=link: replace(p, 2)) == Code.CHECKPOINT_EXISTS
        assert link.is_symlink()


# --- crashes --------------------------------------------------------------------------------------


def explore(
    model: str, run: Callable[[Bench], None]
) -> dict[Any, tuple[DiskState, list[str], bool]]:
    """Return the states that a crash may leave, each with leftovers and whether the end was told of before."""
    recording = record(run, setup=first)
    rng, disk, is_told = random.Random(SEED), Disk(recording.initial), False
    found: dict[Any, tuple[DiskState, list[str], bool]] = {}
    for operation in recording.operations:
        if operation.op == ACK:
            is_told = True
        else:
            disk.apply(operation)
        for state in disk.iter_states(model, rng):
            found.setdefault((state.key, is_told), (state, disk.leftovers(rng), is_told))
    return found


def first(bench: Bench) -> None:
    replace(bench.store(), 1)


def second(bench: Bench) -> None:
    replace(bench.store(), 2)
    bench.log.ack("replaced")


@pytest.mark.parametrize("model", [POSIX_MIN, EXT4_ORDERED])
def test_no_crash_leaves_neither(model: str, tmp_path: pathlib.Path) -> None:
    """REQ-CMT-042: and what it leaves beside is removed by the next save."""
    states = explore(model, second)
    assert len(states) >= 10
    numbers = set()
    for state, _, is_told in states.values():
        number = number_at(MemoryStore.from_snapshot(state.files))
        assert number in ({2} if is_told else {1, 2})
        numbers.add(number)
    assert numbers == {1, 2}
    sample = random.Random(SEED).sample(list(states.values()), 10)
    for count, (state, leftovers, _) in enumerate(sample):
        root = tmp_path / f"{count}"
        root.mkdir()
        lay_out(state, root, leftovers)
        replace(root, 3)
        assert number_at(root) == 3
        assert_clean(root)
        assert not [path for path in root.rglob(".tmp-*") if path.is_file()]


def removal(bench: Bench) -> None:
    remove_alone(bench.store(), deadline_s=WAIT_S)
    bench.log.ack("removed")


def test_no_crash_leaves_half_of_what_is_removed() -> None:
    """REQ-CMT-045: and who removes again, or saves again, finishes it."""
    states = explore(POSIX_MIN, removal)
    assert len(states) >= 6
    seen = set()
    for state, leftovers, is_told in states.values():
        store = MemoryStore.from_snapshot(state.files)
        code = code_of(lambda s=store: ckptfmt.open(s))
        if code == "ok":
            assert not is_told
            assert number_at(store) == 1
        else:
            assert code in (Code.CHECKPOINT_RETIRED, Code.NOT_COMMITTED)
            # Without a register nothing of it is left.
            assert code == Code.CHECKPOINT_RETIRED or not state.files
        seen.add(code)
        with bench_directory() as root:
            lay_out(state, root, leftovers)
            if code != Code.NOT_COMMITTED:
                PathSaver().remove(root)
                assert not root.exists()
        with bench_directory() as root:
            lay_out(state, root, leftovers)
            replace(root, 2)
            assert number_at(root) == 2
            assert_clean(root)
    assert seen == {"ok", Code.CHECKPOINT_RETIRED, Code.NOT_COMMITTED}


#: Forks a process for each number that it reads, which replaces from there on until it is killed.
SCRIPT = """
    import os, sys, threading
    from tests.commit.test_replace import replace
    replace(f"{sys.argv[1]}-first", 0)  # what is imported at the first time is there in all of them
    assert threading.active_count() == 1
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            print(os.getpid(), flush=True)
            for number in range(int(line), 1_000_000):
                replace(sys.argv[1], number)
                print(number, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)
"""


@pytest.mark.slow
def test_kills_at_any_moment_leave_the_last_or_the_next() -> None:
    rng, last = random.Random(SEED), 0
    with bench_directory() as root, contextlib.ExitStack() as stack:
        place = root / "place"
        replace(place, last)
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(place)]
        server = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.enter_context(server)
        assert server.stdin is not None
        assert server.stdout is not None
        for _ in range(12):
            print(last + 1, file=server.stdin, flush=True)
            pid = int(server.stdout.readline())
            told = [int(server.stdout.readline()) for _ in range(rng.randrange(3))]
            time.sleep(rng.uniform(0.0, 0.03))
            os.kill(pid, signal.SIGKILL)
            told += [int(line) for line in iter(server.stdout.readline, "ended\n")]
            last = max([last, *told])
            found = number_at(place)
            assert found in (last, last + 1)
            last = found
        server.stdin.close()
        assert last > 4
        replace(place, last + 1)
        assert_clean(place)


# --- others in the same directory -----------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before the part", "before the index", "before the register"])
def test_files_of_a_save_that_is_held_stay(store: LocalStore, moment: str) -> None:
    """REQ-CMT-044: who replaces at the same time deletes only what is nobody's; the last one stays, whole."""
    replace(store, 1)
    paths = {
        "before the part": "parts/",
        "before the index": "index-",
        "before the register": MANIFEST_NAME,
    }

    class Racing(HookedStore):
        told = False

        def before(self, operation: Operation) -> None:
            if (
                operation.op in ("create", "replace")
                and operation.path.startswith(paths[moment])
                and not self.told
            ):
                self.told = True
                # Another one that didn't see this one yet: both began at the same moment.
                assert len(list_held_attempts(store)) == 1
                _replace_at_once(store, 2)

    racing = Racing(store)
    replace(racing, 3)
    assert racing.told
    assert number_at(store) == 3
    replace(store, 4)
    assert_clean(store)


def _replace_at_once(store: LocalStore, number: int) -> None:
    """Replace without a wait for those who began before."""
    made = origin(attempt=f"{number:016x}", step=number)
    state = snapshot(tensor("w", np.full(700, number, np.int32)))
    with hold_attempt(store, made, 0, must=True):
        decision.sweep_attempts(store, made)
        write_part(store, state, made, writer=0)
        decision.decide(store, made, writer=0, deadline_s=WAIT_S, replace=True)
        decision.sweep_attempts(store, made)


def test_files_of_its_own_attempt_stay(store: LocalStore) -> None:
    """REQ-CMT-044: another writer may have written its part before writer 0 looks for what is left over."""
    replace(store, 1)
    made = origin(attempt=f"{7:016x}", writer_count=2)
    write_part(store, snapshot(tensor("w", np.zeros(9))), made, writer=1)
    before = store.list("")
    decision.sweep_attempts(store, made)
    assert store.list("") == before


def test_one_that_was_replaced_meanwhile_is_not_taken_for_what_is_there(store: LocalStore) -> None:
    """REQ-CMT-044: the register is read last, and says what stays."""
    made = origin(attempt=f"{7:016x}")
    with hold_attempt(store, made, 0, must=True):
        write_part(store, snapshot(tensor("w", np.zeros(9))), made, writer=0)
        manifest = decision.commit(store, made, deadline_s=WAIT_S, replace=True)
        replace_without_waiting = threading.Thread(target=_replace_at_once, args=(store, 8))
        replace_without_waiting.start()
        replace_without_waiting.join(WAIT_S)
        decision.sweep_attempts(store, manifest.origin)
    with ckptfmt.open(store) as checkpoint:
        assert (checkpoint.weights["w"][...] == 8).all()
    assert ckptfmt.validate(store)


def test_an_earlier_save_is_waited_for(store: LocalStore) -> None:
    """REQ-CMT-043: a saver that outlived its trainer must not replace what came after it."""
    earlier = origin(attempt=f"{7:016x}")
    with hold_attempt(store, earlier, 0, must=True):
        assert list_held_attempts(store) == [earlier.attempt]
        error = error_of(lambda: replace(store, 1, deadline_s=0.05))
        assert error.code == Code.SAVE_PENDING
        assert earlier.attempt in error.detail
        waiting = threading.Thread(target=replace, args=(store, 2))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
    waiting.join(WAIT_S)
    assert number_at(store) == 2
    assert_clean(open_store(store, writable=True))


# --- what is removed ------------------------------------------------------------------------------


def test_what_is_removed_is_gone_and_nothing_else(tmp_path: pathlib.Path) -> None:
    """REQ-CMT-045"""
    for name in ("one", "other", "left"):
        replace(tmp_path / name, 1)
    (tmp_path / "other" / "notes.txt").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("left")
    (tmp_path / "slash").symlink_to("left")
    removing = PathSaver()
    for name in ("one", "other", "link", "slash"):
        removing.remove(f"{tmp_path / name}/" if name == "slash" else tmp_path / name)
        assert code_of(lambda n=name: removing.remove(tmp_path / n)) == Code.NOT_COMMITTED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["left", "other"]
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]
    assert number_at(tmp_path / "left") == 1
    ckptfmt.save(tmp_path / "one", state_of(2), step=2)
    assert number_at(tmp_path / "one") == 2


def test_what_a_killed_save_left_is_removed(store: LocalStore) -> None:
    """REQ-CMT-045: a committer that was only slow finds an abort record."""
    made = origin(attempt=f"{7:016x}")
    write_part(store, snapshot(tensor("w", np.zeros(9))), made, writer=0)
    stopped = Stopped(
        store,
        "delete",
        f"parts/{made.attempt}-00000.msgpack",
        lambda: refused.append(code_of(lambda: commit(made))),
    )
    refused: list[str] = []

    def commit(made: Any) -> None:
        decision.commit(store, made, deadline_s=WAIT_S)

    remove_alone(stopped, deadline_s=WAIT_S)
    assert refused
    assert refused[0] != "ok"
    assert code_of(lambda: ckptfmt.open(store)) == Code.NOT_COMMITTED


@pytest.mark.parametrize("begun", [False, True], ids=["nothing decided", "beside a checkpoint"])
def test_a_stopped_save_commits_nothing_that_was_removed(*, begun: bool) -> None:
    """REQ-STO-011: it has checked its files when they are deleted, and goes on when all is over."""
    now_s = [0.0]
    store = MemoryStore(clock=lambda: now_s[0])
    made = origin(attempt=f"{7:016x}")
    if begun:
        save(store, snapshot(tensor("w", np.ones(9))))

    def remove_meanwhile() -> None:
        now_s[0] += 2 * TERM_S
        assert list_held_attempts(store) == []
        remove_alone(store, deadline_s=WAIT_S)
        assert store.list("") == [MANIFEST_NAME]

    stopped = Stopped(store, "create", MANIFEST_NAME, remove_meanwhile)
    with hold_attempt(store, made, 0, must=False):
        assert list_held_attempts(store) == [made.attempt]
        write_part(stopped, snapshot(tensor("w", np.zeros(9))), made, writer=0)
        code = code_of(lambda: decision.commit(stopped, made, deadline_s=WAIT_S))
    assert code == (Code.CHECKPOINT_RETIRED if begun else Code.CHECKPOINT_ABORTED)
    assert code_of(lambda: ckptfmt.open(store)) == code
    remove_alone(store, deadline_s=WAIT_S)
    assert store.list("") == [MANIFEST_NAME]


def test_neither_a_run_nor_a_part_of_it_nor_anything_else_is_removed(
    tmp_path: pathlib.Path,
) -> None:
    """REQ-CMT-045"""
    with ckptfmt.Checkpointer(tmp_path / "run", state_of(1), saver="inline") as checkpointer:
        handle = checkpointer.save(step=1)
    assert handle is not None
    before = sorted(tmp_path.rglob("*"))
    codes = {
        place: code_of(lambda p=place: PathSaver().remove(tmp_path / p))
        for place in ("run", handle.path)
    }
    assert set(codes.values()) == {Code.ARGUMENT}
    for place in ("data", "nowhere"):
        assert code_of(lambda p=place: PathSaver().remove(tmp_path / p)) == Code.NOT_COMMITTED
    assert sorted(tmp_path.rglob("*")) == before


def test_a_save_of_another_process_is_waited_for(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    """By `remove`, and by `load` and `open`, which say so and give the old one."""
    replace(store, 1)
    made = origin(attempt=f"{7:016x}")
    with hold_attempt(store, made, 0, must=True):
        assert code_of(lambda: PathSaver(deadline_s=0.05).remove(store)) == Code.SAVE_PENDING
        assert number_at(store) == 1
        assert made.attempt in caplog.text
        with ckptfmt.open(store, wait_s=0.01) as checkpoint:
            assert checkpoint.pending == (made.attempt,)
        waiting = threading.Thread(target=PathSaver(deadline_s=WAIT_S).remove, args=(store,))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
    waiting.join(WAIT_S)
    assert store.list("") == []


def test_a_reader_meets_the_new_one_where_the_old_one_goes_while_it_opens(
    store: LocalStore,
) -> None:
    replace(store, 1)
    (index,) = [path for path in store.list("") if path.startswith("index-")]
    racing = Stopped(store, "read", index, lambda: replace(store, 2))
    with ckptfmt.open(racing) as checkpoint:
        assert checkpoint.step == 2

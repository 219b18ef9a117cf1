"""What only a directory meets: links and pipes in the way, other processes, kills, full disks, odd file systems."""

import errno
import itertools
import os
import pathlib
import shutil
import socket
import subprocess

import pytest

from ckptfmt.errors import Code
from ckptfmt.store import LocalStore
from ckptfmt.store.posix import PosixCalls
from tests.store.helpers import (
    NoLinkCalls,
    code_of,
    no_fd_leak,
    outcome_of,
    python,
    run_python,
    temporaries,
)
from tests.stores.recorder import RecordingCalls

# Links, pipes and the like


def make_socket(path):
    # A socket's address is at most 108 bytes long.
    before = pathlib.Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


NOT_REGULAR = {
    "symlink": lambda path, outside: path.symlink_to(outside / "file"),
    "dangling symlink": lambda path, outside: path.symlink_to(outside / "nowhere"),
    "symlink to itself": lambda path, _: path.symlink_to(path),
    "symlink to a directory": lambda path, outside: path.symlink_to(outside),
    "directory": lambda path, _: path.mkdir(),
    "named pipe": lambda path, _: os.mkfifo(path),
    "socket": lambda path, _: make_socket(path),
    "device": lambda path, _: path.symlink_to("/dev/zero"),
}


@pytest.fixture
def outside(tmp_path):
    """A directory that no operation may touch."""
    path = tmp_path / "outside"
    path.mkdir()
    (path / "file").write_bytes(b"kept")
    yield path
    assert [entry.name for entry in path.iterdir()] == ["file"]
    assert (path / "file").read_bytes() == b"kept"


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def store(root):
    return LocalStore(root, writable=True)


@pytest.mark.timeout(10)  # a named pipe that is opened without O_NONBLOCK waits for ever
@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_only_regular_files_are_read(store, root, outside, kind):
    NOT_REGULAR[kind](root / "a", outside)

    with no_fd_leak():
        assert code_of(lambda: store.read("a", limit_nbytes=99)) == Code.UNSAFE_FILE
        assert code_of(lambda: store.read_range("a", 0, 0)) == Code.UNSAFE_FILE
        assert code_of(lambda: store.nbytes("a")) == Code.UNSAFE_FILE


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_only_regular_files_are_held(store, root, outside, kind):
    NOT_REGULAR[kind](root / "a", outside)
    before = (root / "a").lstat()

    with no_fd_leak():
        assert code_of(lambda: store.hold("a").__enter__()) == Code.UNSAFE_FILE
        assert code_of(lambda: store.is_held("a")) == Code.UNSAFE_FILE
    assert os.path.samestat((root / "a").lstat(), before)


@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_whatever_has_the_name_keeps_it(store, root, outside, kind):
    NOT_REGULAR[kind](root / "a", outside)
    before = (root / "a").lstat()

    assert code_of(lambda: store.create("a", [b"new"])) == Code.STORE_EXISTS
    assert os.path.samestat((root / "a").lstat(), before)
    assert temporaries(root) == []


@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_replace_takes_the_place_of_a_link_and_not_of_its_target(store, root, outside, kind):
    NOT_REGULAR[kind](root / "a", outside)

    code = code_of(lambda: store.replace("a", b"new"))

    assert code == (Code.UNSAFE_FILE if kind == "directory" else "ok")
    assert (root / "a").is_dir() or (root / "a").read_bytes() == b"new"
    assert temporaries(root) == []


@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_delete_removes_a_link_and_not_its_target(store, root, outside, kind):
    NOT_REGULAR[kind](root / "a", outside)

    code = code_of(lambda: store.delete("a"))

    assert code == (Code.UNSAFE_FILE if kind == "directory" else "ok")
    assert os.path.lexists(root / "a") == (kind == "directory")


@pytest.mark.parametrize("depth", ["a", "a/b", "a/b/c"])
@pytest.mark.parametrize(
    "parent", ["symlink to a directory", "named pipe", "socket", "dangling symlink", "file"]
)
def test_nothing_goes_through_a_parent_that_is_no_directory(store, root, outside, parent, depth):
    place = root / depth
    place.parent.mkdir(parents=True, exist_ok=True)
    (place.write_bytes(b"") if parent == "file" else NOT_REGULAR[parent](place, outside))
    path = f"{depth}/file"
    operations = [
        lambda: store.create(path, [b"new"]),
        lambda: store.create(f"{depth}/new/deeper", [b"new"]),
        lambda: store.replace(path, b"new"),
        lambda: store.read(path, limit_nbytes=9),
        lambda: store.read_range(path, 0, 1),
        lambda: store.nbytes(path),
        lambda: store.delete(path),
        lambda: store.list(depth),
        lambda: store.list_names(depth),
        lambda: store.delete_leftovers(depth),
        lambda: store.remove_directory(depth),
        lambda: store.sync(depth),
        lambda: store.hold(path).__enter__(),
        lambda: store.is_held(path),
        lambda: store.at(depth).read("file", limit_nbytes=9),
    ]

    with no_fd_leak():
        assert [code_of(operation) for operation in operations] == [Code.UNSAFE_FILE] * len(
            operations
        )
    assert os.path.lexists(place)


def test_walks_do_not_follow_links(store, root, outside):
    (root / "link").symlink_to(outside)
    (outside / ".tmp-1").write_bytes(b"")

    assert store.list("") == ["link"]
    assert store.list_names("") == ["link"]
    store.delete_leftovers("")
    store.remove_directory("")

    (outside / ".tmp-1").unlink()


def test_the_root_itself_may_be_reached_through_a_link(tmp_path, root):
    (tmp_path / "link").symlink_to(root)

    LocalStore(tmp_path / "link", writable=True).create("a", [b"1"])

    assert (root / "a").read_bytes() == b"1"


def test_names_that_we_would_not_write_are_listed(store, root):
    for name in (b"back\\slash", b"new\nline", b"\xff"):
        (root / os.fsdecode(name)).touch()

    assert store.list("") == sorted(["back\\slash", "new\nline", "\udcff"])


def test_a_deep_tree_is_listed_without_recursion(store, root):
    directory = os.open(root, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d", dir_fd=directory)
        directory, upper = os.open("d", os.O_RDONLY, dir_fd=directory), directory
        os.close(upper)
    os.close(directory)

    assert store.list("") == []
    store.remove_directory("d")
    assert store.list_names("") == []


# Opening


def test_opening_for_reading_changes_nothing(tmp_path):
    calls = RecordingCalls(tmp_path)
    store = LocalStore(tmp_path / "no" / "such", writable=False, calls=calls)

    assert store.list("") == []
    assert store.list_names("") == []
    assert code_of(lambda: store.read("a", limit_nbytes=9)) == Code.FILE_MISSING
    refused = [
        lambda: store.create("a", []),
        lambda: store.replace("a", b""),
        lambda: store.delete("a"),
        lambda: store.delete_leftovers(""),
        lambda: store.remove_directory("a"),
        lambda: store.sync(""),
        lambda: store.at("b").create("a", []),
    ]
    assert {code_of(operation) for operation in refused} == {Code.STORE_ACCESS}
    assert calls.log.operations == ()
    assert list(tmp_path.iterdir()) == []


def test_opening_for_writing_makes_the_root_durable_and_leaves_nothing_in_it(tmp_path):
    calls = RecordingCalls(tmp_path)

    LocalStore(tmp_path / "a" / "b", writable=True, calls=calls)

    steps = [(operation.op, operation.path) for operation in calls.log.operations]
    for made, parent in (("a", ""), ("a/b", "a")):
        assert steps.index(("mkdir", made)) < steps.index(("fsync_directory", parent))
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_root_that_somebody_else_made_is_made_durable_too(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    calls = RecordingCalls(tmp_path)

    LocalStore(tmp_path / "a" / "b", writable=True, calls=calls)

    synced = {
        operation.path for operation in calls.log.operations if operation.op == "fsync_directory"
    }
    assert synced >= {"a", ""}


@pytest.mark.parametrize("writable", [True, False])
def test_a_root_that_is_a_file_is_refused(tmp_path, writable):
    (tmp_path / "model.safetensors").write_bytes(b"")

    def use():
        LocalStore(tmp_path / "model.safetensors", writable=writable).read(
            "manifest.json", limit_nbytes=9
        )

    assert code_of(use) == Code.UNSAFE_FILE


class FailingCalls(PosixCalls):
    """A file system that refuses what is asked for by name."""

    def __init__(self, **errno_of_op):
        for op, number in errno_of_op.items():
            setattr(self, op, self._refusal(number))

    @staticmethod
    def _refusal(number):
        def refuse(*_):
            raise OSError(number, os.strerror(number))

        return refuse


@pytest.mark.parametrize("moment", [1, 2], ids=["before the first link", "between the links"])
def test_a_store_opens_while_somebody_cleans_up_there(fast_path, moment):
    """As a saver does behind one save to a path while it takes the next one to the same path."""

    class BesideCleanUp(PosixCalls):
        count = 0

        def link(self, name, new_name, directory_fd):
            self.count += 1
            if self.count == moment:
                cleaner.delete_leftovers("")
            super().link(name, new_name, directory_fd)

    cleaner = LocalStore(fast_path, writable=True)
    calls = BesideCleanUp()
    store = LocalStore(fast_path, writable=True, calls=calls)
    store.create("a", [b"1"])

    assert calls.count > moment
    assert [path.name for path in fast_path.iterdir()] == ["a"]


class OverwritingLinkCalls(NoLinkCalls):
    """A file system that ignores RENAME_NOREPLACE."""

    def rename_noreplace(self, name, new_name, directory_fd):
        self.rename(name, new_name, directory_fd)


@pytest.mark.parametrize(
    "calls",
    [
        FailingCalls(link=errno.EPERM, rename_noreplace=errno.EINVAL),
        FailingCalls(link=errno.EOPNOTSUPP, rename_noreplace=errno.ENOSYS),
        FailingCalls(fsync_directory=errno.EINVAL),
        OverwritingLinkCalls(),
    ],
    ids=["EPERM", "EOPNOTSUPP", "no fsync of directories", "overwrites"],
)
def test_a_file_system_that_cannot_keep_the_promises_is_refused(tmp_path, calls):
    assert (
        code_of(lambda: LocalStore(tmp_path / "a", writable=True, calls=calls))
        == Code.STORE_UNSUPPORTED
    )
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, Code.NO_SPACE),
        (errno.EDQUOT, Code.NO_SPACE),
        (errno.EACCES, Code.STORE_ACCESS),
        (errno.EROFS, Code.STORE_ACCESS),
        (errno.EIO, Code.STORE_IO),
        (errno.EMFILE, Code.STORE_IO),
        (errno.ETIMEDOUT, Code.STORE_NO_ANSWER),
    ],
)
@pytest.mark.parametrize("op", ["open_new", "write", "fsync", "close", "link", "open_root"])
def test_errors_of_the_system_have_names(root, op, number, code):
    broken = CloseFailsOnce(number) if op == "close" else FailingCalls(**{op: number})
    store = LocalStore(root, writable=True)
    store._calls = broken

    assert code_of(lambda: store.create("a", [b"abc"])) == code
    assert list(root.iterdir()) == []


class CloseFailsOnce(PosixCalls):
    """Network file systems and quotas may say only at close that the bytes aren't kept."""

    def __init__(self, number):
        self.number = number
        self.new_fds = set()

    def open_new(self, name, directory_fd):
        fd = super().open_new(name, directory_fd)
        self.new_fds.add(fd)
        return fd

    def close(self, fd):
        super().close(fd)
        if fd in self.new_fds:
            self.new_fds.discard(fd)
            raise OSError(self.number, os.strerror(self.number))


def test_a_missing_permission_to_open_an_ancestor_is_somebody_elses_affair(root):
    class ForeignAncestors(PosixCalls):
        def open_root(self, path):
            if path == str(root.parent):
                raise PermissionError(errno.EACCES, "not yours", path)
            return super().open_root(path)

    LocalStore(root, writable=True, calls=ForeignAncestors()).create("a", [])


# Steps, and their order


@pytest.fixture(params=["link", "rename"])
def recorded(request, root):
    """A store whose steps are recorded, without those of opening it."""
    calls = RecordingCalls(root, inner=PosixCalls() if request.param == "link" else NoLinkCalls())
    store = LocalStore(root, writable=True, calls=calls)
    opening_count = len(calls.log.operations)
    return request.param, store, lambda: calls.log.operations[opening_count:]


def test_a_file_is_durable_before_it_has_its_name(recorded):
    """REQ-STO-002."""
    kind, store, steps = recorded

    store.create("a", [b"x", b"", b"yz"])

    temporary = steps()[0].path
    wanted = [
        ("open_new", temporary, "", b""),
        ("write", temporary, "", b"x"),
        ("write", temporary, "", b"yz"),
        ("fsync", temporary, "", b""),
    ]
    wanted += (
        [("link", temporary, "a", b""), ("unlink", temporary, "", b"")]
        if kind == "link"
        else [("rename_noreplace", temporary, "a", b"")]
    )
    assert [(step.op, step.path, step.to, step.data) for step in steps()] == wanted
    assert temporary.startswith(".tmp-")


def test_a_replacement_is_durable_before_it_has_its_name(recorded):
    _, store, steps = recorded

    store.replace("a", b"x")

    assert [step.op for step in steps()] == ["open_new", "write", "fsync", "rename"]


def seen_at_each_call(root, action):
    """Change a store, and return what a reader finds under the name "a" before each call, and in the end."""
    reader, seen = LocalStore(root, writable=False), []

    def look(_=None):
        seen.append(outcome_of(lambda: reader.read("a", limit_nbytes=9)))

    store = LocalStore(root, writable=True).at("")
    store._calls = RecordingCalls(root, gate=look)
    action(store)
    look()
    assert len(seen) > 4
    return seen


def test_a_reader_sees_a_new_file_whole_or_not_at_all(root):
    """REQ-STO-002."""
    seen = seen_at_each_call(root, lambda store: store.create("a", [b"abc", b"def"]))

    assert (seen[0], seen[-1]) == (Code.FILE_MISSING, b"abcdef")
    assert set(seen) == {Code.FILE_MISSING, b"abcdef"}


def test_a_reader_sees_the_old_bytes_or_the_new_ones(root):
    """REQ-STO-005."""
    LocalStore(root, writable=True).create("a", [b"old"])
    seen = seen_at_each_call(root, lambda store: store.replace("a", b"newer"))

    assert (seen[0], seen[-1]) == (b"old", b"newer")
    assert set(seen) == {b"old", b"newer"}


@pytest.mark.parametrize("lower", ["", "x", "x/y"])
def test_sync_reaches_from_the_directory_up_to_the_opened_root(recorded, lower):
    """REQ-STO-004."""
    _, store, steps = recorded
    store.create("x/y/a", [])
    count = len(steps())

    store.at(lower).sync("x/y".removeprefix(lower).removeprefix("/"))

    assert sorted((step.op, step.path) for step in steps()[count:]) == [
        ("fsync_directory", ""),
        ("fsync_directory", "x"),
        ("fsync_directory", "x/y"),
    ]


def test_sync_of_what_is_not_there_is_an_error(store):
    assert code_of(lambda: store.sync("nowhere")) == Code.FILE_MISSING


def test_short_writes_are_continued(root):
    class ShortWrites(PosixCalls):
        def write(self, fd, data):
            return super().write(fd, data[:3])

    store = LocalStore(root, writable=True, calls=ShortWrites())
    store.create("a", [b"0123456789", b"", b"ab"])

    assert store.read("a", limit_nbytes=12) == b"0123456789ab"


def test_short_reads_are_continued_and_a_file_that_shrinks_is_named(root):
    class ShortReads(PosixCalls):
        shrunk = False

        def read_at(self, fd, nbytes, byte_begin):
            return (
                b""
                if self.shrunk and byte_begin
                else super().read_at(fd, min(nbytes, 3), byte_begin)
            )

    calls = ShortReads()
    store = LocalStore(root, writable=True, calls=calls)
    store.create("a", [b"0123456789"])

    assert store.read_range("a", 1, 8) == b"12345678"
    calls.shrunk = True
    assert code_of(lambda: store.read("a", limit_nbytes=10)) == Code.FILE_NBYTES


# NFS


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT, errno.ENOENT])
def test_a_link_whose_answer_is_lost_is_recognised_as_ours(root, number):
    """REQ-STO-003: to fail says that the file isn't there."""

    class LostAnswer(PosixCalls):
        def link(self, name, new_name, directory_fd):
            super().link(name, new_name, directory_fd)
            raise OSError(number, os.strerror(number))

    store = LocalStore(root, writable=True)
    store._calls = LostAnswer()
    with no_fd_leak():
        assert code_of(lambda: store.create("a", [b"ours"])) == "ok"

    assert [entry.name for entry in root.iterdir()] == ["a"]
    assert store.read("a", limit_nbytes=4) == b"ours"


def test_a_second_name_that_a_backup_gives_us_does_not_make_us_the_winner(root):
    class Backup(PosixCalls):
        def link(self, name, new_name, directory_fd):
            os.link(name, "backup", src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
            super().link(name, new_name, directory_fd)

    store = LocalStore(root, writable=True)
    store.create("a", [b"theirs"])
    store._calls = Backup()

    assert code_of(lambda: store.create("a", [b"ours"])) == Code.STORE_EXISTS
    assert store.read("a", limit_nbytes=9) == b"theirs"


@pytest.mark.parametrize("op", ["open_read", "unlink", "lstat"])
def test_when_the_outcome_of_a_link_cannot_be_told_that_is_said(root, op):
    """REQ-STO-003."""
    store = LocalStore(root, writable=True)
    store._calls = FailingCalls(link=errno.EIO, **{op: errno.EIO})

    with no_fd_leak():
        assert code_of(lambda: store.create("a", [b"ours"])) == Code.STORE_NO_ANSWER


def test_a_link_that_arrives_after_all_finds_nothing_to_link(root):
    late = []

    class LateLink(PosixCalls):
        def link(self, name, new_name, _):
            late.append((name, new_name))
            raise OSError(errno.EIO, "lost")

    store = LocalStore(root, writable=True)
    store._calls = LateLink()
    assert code_of(lambda: store.create("a", [b"ours"])) == Code.STORE_IO

    with pytest.raises(FileNotFoundError):
        os.link(root / late[0][0], root / late[0][1])


def test_a_link_whose_answer_is_lost_is_recognised_even_when_the_temporary_is_gone(root):
    class LostAnswer(PosixCalls):
        def link(self, name, new_name, directory_fd):
            super().link(name, new_name, directory_fd)
            raise OSError(errno.EIO, "lost")

        def unlink(self, name, directory_fd):
            super().unlink(name, directory_fd)
            super().unlink(name, directory_fd)

    store = LocalStore(root, writable=True)
    store._calls = LostAnswer()
    store.create("a", [b"ours"])

    assert [entry.name for entry in root.iterdir()] == ["a"]


@pytest.mark.parametrize(("stale_count", "code"), [(2, "ok"), (3, Code.STORE_IO)])
def test_a_stale_handle_is_looked_up_again(root, stale_count, code):
    class Stale(PosixCalls):
        left = stale_count

        def open_directory(self, name, directory_fd):
            if self.left:
                self.left -= 1
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return super().open_directory(name, directory_fd)

    store = LocalStore(root, writable=True)
    store.create("x/a", [b"1"])
    store._calls = Stale()

    assert code_of(lambda: store.read("x/a", limit_nbytes=1)) == code


# Leftovers


def test_leftovers_are_hidden_and_can_be_deleted(store, root):
    store.create("x/y/a", [b""])
    ours, foreign = ".tmp-" + "0a" * 16, ".tmp-notes"
    for place in ("", "x", "x/y"):
        (root / place / ours).write_bytes(b"half")
    (root / foreign).write_bytes(b"somebody else's")

    assert store.list("") == ["x/y/a"]
    assert store.list_names("x") == ["y/"]
    store.delete_leftovers("x")
    assert sorted(temporaries(root)) == sorted([ours, ours, foreign])
    store.delete_leftovers("x/y")
    store.delete_leftovers("")
    assert temporaries(root) == [foreign]
    assert store.list("") == ["x/y/a"]


def test_a_writer_whose_temporary_was_taken_for_a_leftover_fails_cleanly(store, root):
    def chunks():
        yield b"abc"
        store.delete_leftovers("")

    assert code_of(lambda: store.create("a", chunks())) in (Code.STORE_IO, Code.STORE_NO_ANSWER)
    assert list(root.iterdir()) == []


# Others who want the same name


def race(root, inner, at):
    """Create a file, with another who creates it just before our call number `at`; return the codes of both."""
    other, codes, calls = LocalStore(root, writable=True, calls=inner), {}, itertools.count(1)

    def gate(_):
        if next(calls) == at:
            codes["theirs"] = code_of(lambda: other.create("a", [b"theirs"]))

    store = other.at("")
    store._calls = RecordingCalls(root, gate=gate, inner=inner)
    codes["ours"] = code_of(lambda: store.create("a", [b"ours"]))
    return codes


@pytest.mark.parametrize("kind", ["link", "rename"])
def test_whenever_another_takes_the_name_one_of_the_two_has_it(fast_path, kind):
    """REQ-STO-001."""
    inner = PosixCalls() if kind == "link" else NoLinkCalls()
    winners = set()
    for at in itertools.count(1):
        codes = race(fast_path / str(at), inner, at)
        if "theirs" not in codes:
            break
        assert sorted(codes.values()) == [Code.STORE_EXISTS, "ok"]
        winner = "ours" if codes["ours"] == "ok" else "theirs"
        assert (fast_path / str(at) / "a").read_bytes() == winner.encode()
        winners.add(winner)

    assert winners == {"theirs", "ours"}


# Other processes

RACE = """
import sys
from ckptfmt.errors import CkptError
from ckptfmt.store import LocalStore
from tests.store.helpers import NoLinkCalls

root, who, count, link = sys.argv[1:]
store = LocalStore(root, writable=True, calls=None if link == "link" else NoLinkCalls())
print("ready", flush=True)
sys.stdin.readline()
wins = []
for number in range(int(count)):
    try:
        store.create(f"run/{number}", [who.encode()] * 1000)
        wins.append(number)
    except CkptError as error:
        assert error.code == "STORE_EXISTS", error
print(*wins)
"""


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["link", "rename"])
def test_of_eight_processes_exactly_one_wins_each_name(fast_path, kind):
    """REQ-STO-001."""
    count = 200
    processes = [python(RACE, fast_path, who, count, kind) for who in range(8)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120) for process in processes]

    assert [errors for _, errors in outputs if errors] == []
    winner_of = {
        int(number): who for who, (output, _) in enumerate(outputs) for number in output.split()
    }
    assert sum(len(output.split()) for output, _ in outputs) == count
    assert sorted(winner_of) == list(range(count))
    store = LocalStore(fast_path, writable=False)
    for number, who in winner_of.items():
        assert store.read(f"run/{number}", limit_nbytes=1000) == b"%d" % who * 1000
    assert temporaries(fast_path) == []


KILL = """
import os, signal, sys
from ckptfmt.store import LocalStore
from tests.stores.recorder import RecordingCalls

root, operation = sys.argv[1:]
LocalStore(root, writable=True).create("run/old", [b"old"])
for at in range(1, 1000):
    seen = 0

    def gate(call):
        global seen
        seen += 1
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        calls = RecordingCalls(root, gate=gate)
        store = LocalStore(root, writable=True, calls=calls)
        if operation == "create":
            store.create(f"run/new/{at}", [b"0123456789"] * 3)
        else:
            store.replace("run/old", b"new")
        store.sync("run")
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    reader = LocalStore(root, writable=True)
    for path in reader.list(""):
        data = reader.read(path, limit_nbytes=100)
        assert data in ([b"old", b"new"] if path == "run/old" else [b"0123456789" * 3]), (at, path, data)
    reader.create(f"run/next/{at}", [b"0123456789"] * 3)
    if not killed:
        break
for place in ("", "run", "run/new", "run/next"):
    reader.delete_leftovers(place)
print(at)
"""


@pytest.mark.dist
@pytest.mark.parametrize("operation", ["create", "replace"])
def test_a_kill_at_any_call_leaves_whole_files_or_none(fast_path, operation):
    calls_count = int(run_python(KILL, fast_path, operation))

    assert calls_count > 30
    assert temporaries(fast_path) == []


KILL_LOOP = """
import itertools, os, sys
from ckptfmt.store import LocalStore

store = LocalStore(sys.argv[1], writable=True)
print("ready", flush=True)
for number in itertools.count():
    store.create(f"run/{os.getpid()}-{number}", (b"x" * 5000 for _ in range(20)))
"""


@pytest.mark.dist
def test_a_kill_at_any_moment_leaves_whole_files_or_none(fast_path):
    for round_number in range(8):
        with python(KILL_LOOP, fast_path) as process:
            process.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.02 + 0.007 * round_number)
            process.kill()

    store = LocalStore(fast_path, writable=True)
    assert {store.nbytes(path) for path in store.list("")} == {100_000}
    for place in ("", "run"):
        store.delete_leftovers(place)
    assert temporaries(fast_path) == []


FULL = """
import os, subprocess, sys
from ckptfmt.errors import CkptError
from ckptfmt.store import LocalStore

root = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", root], check=True)
store = LocalStore(root, writable=True)
store.create("run/old", [b"o" * 300_000])
for write in (
    lambda: store.create("run/new", [b"n" * 100_000] * 20),
    lambda: store.replace("run/old", b"n" * 2_000_000),
):
    try:
        write()
    except CkptError as error:
        print(error.code)
assert store.list("") == ["run/old"]
assert store.read("run/old", limit_nbytes=300_000) == b"o" * 300_000
assert os.listdir(root + "/run") == ["old"]
store.create("run/new", [b"n" * 300_000])
"""


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path):
    prefix = ["unshare", "-Urm"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no user namespaces here, so no file system of our own to fill")

    assert run_python(FULL, tmp_path, prefix=prefix).split() == ["NO_SPACE", "NO_SPACE"]


SYSTEM_CALLS = """
import sys
from ckptfmt.store import LocalStore

store = LocalStore(sys.argv[1], writable=True)
store.create("run/a", [b"abc", b"def"])
store.sync("run")
"""


def test_the_kernel_sees_fsync_of_the_file_then_link_then_fsync_of_the_directories(tmp_path):
    if not shutil.which("strace"):
        pytest.skip("strace isn't installed")
    trace = tmp_path / "trace"
    prefix = [
        "strace",
        "-y",
        "-s",
        "9",
        "-o",
        trace,
        "-e",
        "trace=fsync,fdatasync,linkat,mkdirat,write",
    ]
    root = tmp_path / "root"
    run_python(SYSTEM_CALLS, root, prefix=prefix)

    lines = [
        line
        for line in trace.read_text().splitlines()
        if str(root) in line and line.endswith("= 0")
    ]
    writes = [
        line
        for line in trace.read_text().splitlines()
        if line.startswith("write(") and '"abc"' in line
    ]
    temporary = writes[-1].partition("<")[2].partition(">")[0]
    after = itertools.dropwhile(
        lambda line: not line.startswith("fsync(") or temporary not in line, lines
    )
    steps = [
        line.partition("(")[0] + " " + line.partition("<")[2].partition(">")[0] for line in after
    ]
    assert steps == [
        f"fsync {temporary}",
        f"linkat {root}/run",
        f"fsync {root}",
        f"fsync {root}/run",
    ]

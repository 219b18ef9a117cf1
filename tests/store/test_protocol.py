"""The promises of `Store`, asked of every kind of store, and the rules for paths."""

import mmap
import pathlib
import pickle
import tempfile
import threading
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import strategies as st

from ckptfmt.errors import CkptError, Code
from ckptfmt.store import LocalStore, MemoryStore, Store, check_path, open_store
from ckptfmt.store.protocol import PAGE_NBYTES, check_prefix
from tests.store.helpers import FAST_DIRECTORY, NoLinkCalls, code_of, outcome_of
from tests.stores.hooked import HookedCalls, HookedStore

KINDS: dict[str, Callable[[pathlib.Path], Store]] = {
    "local": lambda path: LocalStore(path, writable=True),
    "local, disk": lambda path: LocalStore(path, writable=True),
    "local, rename": lambda path: LocalStore(path, writable=True, calls=NoLinkCalls()),
    "local, hooked calls": lambda path: LocalStore(path, writable=True, calls=HookedCalls(path)),
    "local, lower": lambda path: LocalStore(path, writable=True).at("lower/still"),
    "local, hooked": lambda path: HookedStore(LocalStore(path, writable=True)).at("lower"),
    "memory": lambda _: MemoryStore(),
    "memory, lower": lambda _: MemoryStore().at("lower"),
    "memory, hooked": lambda _: HookedStore(MemoryStore()),
}


@pytest.fixture(params=[*KINDS, "s3"])
def store(request, tmp_path, fast_path) -> Store:
    if request.param == "s3":
        return open_store(f"{request.getfixturevalue('bucket').url}/lower", writable=True)
    return KINDS[request.param](tmp_path if request.param == "local, disk" else fast_path)


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [b""],
        [b"abc"],
        [b"a", b"", bytearray(b"b"), memoryview(b"xcx")[1:2]],
        [b"%d" % i for i in range(100)],
    ],
    ids=["none", "empty", "one", "mixed", "many"],
)
def test_a_created_file_is_read_back(store, chunks):
    store.create("parts/a.bin", (chunk for chunk in chunks))
    store.sync("parts")

    data = b"".join(chunks)
    assert store.read("parts/a.bin", limit_nbytes=len(data)) == data
    assert store.nbytes("parts/a.bin") == len(data)


def test_a_buffer_of_numbers_is_written_as_its_bytes(store):
    numbers = memoryview(bytearray(range(16))).cast("I")

    store.create("a", [numbers])

    assert store.read("a", limit_nbytes=16) == bytes(range(16))


def test_a_taken_name_stays_as_it_is(store):
    store.create("a", [b"first"])

    assert code_of(lambda: store.create("a", [b"second"])) == Code.STORE_EXISTS
    assert store.read("a", limit_nbytes=99) == b"first"
    assert store.list("") == ["a"]


def test_what_the_chunks_raise_comes_through_and_nothing_is_created(store):
    def chunks():
        yield b"abc"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.create("a", chunks())

    assert store.list("") == []
    store.create("a", [b"abc"])


def test_replace_takes_the_place_of_anything_or_nothing(store):
    """REQ-STO-005."""
    store.replace("run/register", b"one")
    store.replace("run/register", b"two")
    store.sync("run")

    assert store.read("run/register", limit_nbytes=3) == b"two"
    assert store.list("") == ["run/register"]


def test_missing_files(store):
    for path in ("a", "no/such/file"):
        assert code_of(lambda path=path: store.read(path, limit_nbytes=9)) == Code.FILE_MISSING
        assert code_of(lambda path=path: store.read_range(path, 0, 0)) == Code.FILE_MISSING
        with pytest.raises(CkptError, match="FILE_MISSING"), store.open_ranges(path) as file:
            file.read_into(0, 1, buffer())
        assert code_of(lambda path=path: store.nbytes(path)) == Code.FILE_MISSING
        store.delete(path)
    assert store.list("no/such") == []
    assert store.list_names("no/such") == []
    store.remove_directory("no/such")
    store.delete_leftovers("no/such")


def test_what_was_just_written_need_not_be_waited_for(store):
    """A hint: of a file that isn't there it says something, too."""
    store.create("a", [bytes(1 << 20)])
    # The system may take pages away at any time: then the file is read into the cache again.
    seen = [store.waits("a")]
    while seen[-1] is not store.is_remote and len(seen) < 20:
        store.read("a", limit_nbytes=1 << 20)
        seen.append(store.waits("a"))
    assert seen[-1] is store.is_remote
    assert store.waits("no/such/file") in (False, True)


def test_an_error_names_the_file_the_place_and_the_clause(store):
    with pytest.raises(CkptError) as caught:
        store.read("parts/a", limit_nbytes=9)

    assert caught.value.where == "parts/a"
    assert caught.value.requirement == "REQ-CKP-004"
    assert store.name in caught.value.detail


def test_a_read_is_refused_when_the_file_is_larger_than_the_limit(store):
    store.create("a", [b"abcd"])

    assert code_of(lambda: store.read("a", limit_nbytes=3)) == Code.LIMIT_EXCEEDED


def buffer():
    return memoryview(mmap.mmap(-1, 4 * PAGE_NBYTES))


@pytest.mark.parametrize("byte_range", [(0, 0), (0, 4), (1, 2), (4, 0)])
def test_a_range_inside(store, byte_range):
    store.create("a", [b"abcd"])
    begin, nbytes = byte_range

    assert store.read_range("a", begin, nbytes) == b"abcd"[begin : begin + nbytes]
    with store.open_ranges("a") as file:
        assert bytes(file.read_into(begin, nbytes, buffer())) == b"abcd"[begin : begin + nbytes]


@pytest.mark.parametrize(
    "byte_range", [(0, 5), (4, 1), (5, 0), (-1, 2), (2, -1), (0, 1 << 62), (1 << 70, 1)]
)
def test_a_range_that_the_file_does_not_have(store, byte_range):
    store.create("a", [b"abcd"])

    assert code_of(lambda: store.read_range("a", *byte_range)) == Code.FILE_NBYTES
    with store.open_ranges("a") as file:
        assert code_of(lambda: file.read_into(*byte_range, buffer())) == Code.FILE_NBYTES


def test_listings(store):
    for path in ("b", "a/x", "a/c/y", "a-/z", "a0"):
        store.create(path, [b""])

    assert store.list("") == ["a-/z", "a/c/y", "a/x", "a0", "b"]
    assert store.list("a") == ["a/c/y", "a/x"]
    assert store.list_names("") == ["a-/", "a/", "a0", "b"]
    assert store.list_names("a") == ["c/", "x"]


def test_a_deleted_file_is_gone_and_its_name_is_free(store):
    store.create("a/b", [b"1"])
    store.delete("a/b")
    store.delete("a/b")

    assert store.list("") == []
    store.create("a/b", [b"2"])
    assert store.read("a/b", limit_nbytes=1) == b"2"


def test_a_directory_without_files_goes_and_one_with_files_stays(store):
    store.create("run/a/x", [b""])
    store.create("run/b/y", [b""])
    store.delete("run/a/x")

    store.remove_directory("run")

    assert store.list_names("run") == ["b/"]
    store.delete("run/b/y")
    store.at("run").remove_directory("")
    assert store.list_names("") == []


def test_a_store_rooted_lower_is_the_same_store(store):
    lower = store.at("run").at("parts")
    lower.create("a", [b"abc"])
    lower.sync("")

    assert store.read("run/parts/a", limit_nbytes=3) == b"abc"
    assert store.at("run").list("") == ["parts/a"]
    assert lower.list("") == ["a"]
    assert store.at("").list("") == ["run/parts/a"]
    assert lower.name.endswith("run/parts")


def test_a_file_is_held_as_long_as_somebody_holds_it(store):
    assert not store.is_held("x/a")
    with store.hold("x/a"):
        assert store.is_held("x/a")
        assert store.at("x").is_held("a")
        assert not store.is_held("x/b")
        with store.at("x").hold("a"):
            assert store.is_held("x/a")
        assert store.is_held("x/a")

    assert not store.is_held("x/a")
    assert store.list("") == []


def test_a_held_file_is_no_obstacle_elsewhere_and_ends_with_an_error_of_the_context(store):
    def use():
        with store.hold("x/a"):
            store.create("x/b", [b"1"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()

    assert not store.is_held("x/a")
    assert store.list("") == ["x/b"]


def test_of_eight_threads_one_wins_each_name(store):
    """REQ-STO-001."""
    wins = [0] * 20
    start = threading.Barrier(8)

    def race(who):
        start.wait()
        for number in range(len(wins)):
            if (
                code_of(lambda number=number: store.create(f"run/{number}", [b"%d" % who] * 3))
                == "ok"
            ):
                wins[number] += 1

    threads = [threading.Thread(target=race, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wins == [1] * len(wins)
    for path in store.list("run"):
        data = store.read(path, limit_nbytes=3)
        assert data == data[:1] * 3


HOSTILE = [
    *("/etc/passwd", "/", "..", "../a", "a/../b", "a/..", ".", "./a", "a/.", "a//b", "a/", "a\\b"),
    *("a\0b", "\0", "a\n", "\x1b[2J", "\x7f", "\ud800", ".tmp-1", "a/.tmp-1/b"),
    *("x" * 256, "ä" * 128, "a/" + "x" * 256 + "/b"),
]


@pytest.mark.parametrize("path", ["", *HOSTILE], ids=ascii)
def test_no_operation_takes_a_hostile_path(store, path):
    """REQ-STO-006."""
    operations = [
        lambda: check_path(path),
        lambda: store.create(path, [b""]),
        lambda: store.replace(path, b""),
        lambda: store.read(path, limit_nbytes=9),
        lambda: store.read_range(path, 0, 0),
        lambda: store.open_ranges(path).__enter__(),
        lambda: store.nbytes(path),
        lambda: store.delete(path),
        lambda: store.hold(path).__enter__(),
        lambda: store.is_held(path),
    ]

    assert {code_of(operation) for operation in operations} == {Code.UNSAFE_PATH}
    assert store.list("") == []


@pytest.mark.parametrize("prefix", HOSTILE, ids=ascii)
def test_no_operation_takes_a_hostile_prefix(store, prefix):
    operations = [
        lambda: check_prefix(prefix),
        lambda: store.list(prefix),
        lambda: store.list_names(prefix),
        lambda: store.delete_leftovers(prefix),
        lambda: store.remove_directory(prefix),
        lambda: store.sync(prefix),
        lambda: store.at(prefix),
    ]

    assert {code_of(operation) for operation in operations} == {Code.UNSAFE_PATH}


@pytest.mark.parametrize(
    "path", ["a", "...", ".hidden", "a b", "x" * 255, "ä" * 127, "-rf", "a/b/c/d", "tmp-1"]
)
def test_odd_but_harmless_paths_work(store, path):
    store.create(path, [b"abc"])

    assert store.list("") == [path]
    assert store.read(path, limit_nbytes=3) == b"abc"


def test_a_refused_path_cannot_forge_a_line_of_a_log():
    with pytest.raises(CkptError) as caught:
        check_path("..\nall is well \x1b[2J" + "x" * 10_000 + "/..")

    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500


PATHS = st.sampled_from(["a", "b/c", "b/d", "b/e/f", "g"])
PREFIXES = st.sampled_from(["", "b", "b/e", "nowhere"])
SMALL = st.integers(0, 5)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), PATHS, st.lists(st.binary(max_size=3), max_size=3)),
        st.tuples(st.just("replace"), PATHS, st.binary(max_size=5)),
        st.tuples(st.just("read_range"), PATHS, SMALL, SMALL),
        st.tuples(st.just("nbytes"), PATHS),
        st.tuples(st.just("delete"), PATHS),
        st.tuples(st.just("list"), PREFIXES),
        st.tuples(st.just("remove_directory"), PREFIXES),
    ),
    max_size=25,
)


@hypothesis.given(STEPS)
def test_a_directory_answers_as_an_object_store_does(steps):
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY) as root:
        local, memory = LocalStore(root, writable=True), MemoryStore()
        for op, *arguments in steps:
            answers = [outcome_of(lambda s=s: getattr(s, op)(*arguments)) for s in (local, memory)]  # noqa: B023
            assert answers[0] == answers[1], (op, arguments)

        assert {
            path: local.read(path, limit_nbytes=99) for path in local.list("")
        } == memory.snapshot()


def test_a_local_store_survives_pickling(tmp_path):
    store = pickle.loads(pickle.dumps(LocalStore(tmp_path, writable=True).at("run")))

    store.create("a", [b"1"])

    assert (tmp_path / "run" / "a").read_bytes() == b"1"

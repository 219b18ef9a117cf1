"""Shared memory between processes: what is seen, what is kept, what is given back, and what never crashes."""

import contextlib
import ctypes
import errno
import gc
import hashlib
import mmap
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ckptfmt.errors import CkptError
from ckptfmt.write.slot import MemoryCalls, Slot, slot_nbytes
from tests.stage.holdings import descriptors, mappings
from tests.store.helpers import ROOT, code_of, no_fd_leak, run_python

PAGE = mmap.PAGESIZE
MIB = 2**20
PIECE = 64 * MIB
EHWPOISON = 133  # Linux; Python has no name for it


@pytest.fixture(autouse=True)
def _nothing_left():
    gc.collect()  # what other tests of this process left
    assert not mappings()
    with no_fd_leak():
        yield
        gc.collect()
    assert not mappings()


@pytest.fixture
def slot():
    with contextlib.closing(Slot.make(3 * PAGE)) as made:
        yield made


def attached(slot):
    return contextlib.closing(Slot.attach(os.dup(slot.fd)))


# Sharing


def test_core_dumps_have_none_of_it(slot):
    with attached(slot) as other:
        for address in (slot.address, other.address):
            maps = pathlib.Path("/proc/self/smaps").read_text().split(f"{address:x}-", 1)[1]
            flags = maps.split("VmFlags:", 1)[1].splitlines()[0].split()
            assert {"dd", "dc"} <= set(flags)  # don't dump, don't copy


def test_another_process_sees_the_bytes_of_the_maker(slot):
    content = os.urandom(slot.nbytes)
    slot.view[:] = content
    script = (
        "import sys, hashlib; from ckptfmt.write.slot import Slot; slot ="
        " Slot.attach(int(sys.argv[1])); slot.touch();"
        "print(slot.nbytes, slot.view.readonly, hashlib.sha256(slot.view).hexdigest())"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(slot.fd)],
        pass_fds=[slot.fd],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split() == [str(slot.nbytes), "True", hashlib.sha256(content).hexdigest()]


def test_an_attached_slot_follows_later_writes(slot):
    with attached(slot) as reader:
        assert bytes(reader.view) == bytes(slot.nbytes)
        slot.view[PAGE + 1] = 7
        assert reader.view[PAGE + 1] == 7


def test_the_address_is_that_of_the_view(slot):
    slot.view[5:8] = b"abc"

    assert ctypes.string_at(slot.address + 5, 3) == b"abc"


def test_an_attached_slot_refuses_writes(slot):
    with attached(slot) as reader, pytest.raises(TypeError):
        reader.view[0] = 1


def test_bytes_outlive_a_maker_that_was_killed():
    script = (
        "import sys, socket, os, time; from ckptfmt.write.slot import Slot; slot ="
        " Slot.make(10_000); slot.touch();"
        "slot.view[9_995:10_000] = b'hello'; channel = socket.socket(fileno=int(sys.argv[1]));"
        "socket.send_fds(channel, [b'x'], [slot.fd]); time.sleep(300)"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        maker = subprocess.Popen(
            [sys.executable, "-c", script, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        with contextlib.closing(Slot.attach(fds[0])) as reader:
            maker.kill()
            assert maker.wait() == -signal.SIGKILL
            assert bytes(reader.view[9_990:10_000]) == b"\0\0\0\0\0hello"


@pytest.mark.parametrize("nbytes", [0, PAGE, 2 * PAGE, 4 * PAGE])
def test_nobody_can_change_the_size(slot, nbytes):
    with pytest.raises(PermissionError):
        os.ftruncate(slot.fd, nbytes)
    assert os.fstat(slot.fd).st_size == slot.nbytes


@pytest.mark.parametrize(("image", "slot_pages"), [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2)])
def test_sizes_are_whole_pages_and_one_at_least(image, slot_pages):
    with contextlib.closing(Slot.make(image)) as made:
        made.touch()
        assert made.nbytes == len(made.view) == slot_nbytes(image) == slot_pages * PAGE


# Giving back


def test_close_gives_back_mapping_and_descriptor(slot):
    slot.view[0] = 1
    assert len(mappings()) == len(descriptors()) == 1

    slot.close()
    slot.close()

    assert not mappings()
    assert not descriptors()
    assert [
        code_of(lambda name=name: getattr(slot, name)) for name in ("view", "address", "fd")
    ] == ["SLOT_MEMORY"] * 3
    assert code_of(slot.touch) == "SLOT_MEMORY"
    assert "closed" in repr(slot)


def test_a_slot_that_is_dropped_gives_back_all():
    Slot.make(PAGE).touch()
    gc.collect()

    assert not mappings()
    assert not descriptors()


@pytest.mark.parametrize(
    "hold",
    [
        lambda view: view,
        lambda view: view[PAGE:],
        lambda view: np.frombuffer(view, np.uint8)[1:].reshape(-1, 1)[::2],
    ],
    ids=["view", "slice", "array"],
)
def test_what_was_made_of_a_view_stays_valid_after_close_and_then_goes(slot, hold):
    slot.view[:] = b"7" * slot.nbytes
    held = hold(slot.view)

    slot.close()

    assert not descriptors()
    assert bytes(held) == b"7" * held.nbytes
    assert mappings()
    del held
    assert not mappings()


def test_close_fd_leaves_the_memory(slot):
    slot.close_fd()
    slot.close_fd()

    assert not descriptors()
    slot.view[0] = 1
    assert code_of(lambda: slot.fd) == "SLOT_MEMORY"


def test_an_executed_program_inherits_no_descriptor(slot):
    received = os.dup(slot.fd)
    os.set_inheritable(received, True)  # noqa: FBT003
    with contextlib.closing(Slot.attach(received)):
        command = [
            sys.executable,
            "-c",
            "from tests.stage.holdings import descriptors; print(descriptors())",
        ]
        done = subprocess.run(
            command, close_fds=False, cwd=ROOT, capture_output=True, text=True, check=True
        )

    assert done.stdout.strip() == "[]"


# Forks

FORK = """
import contextlib, ctypes, gc, os, sys
from ckptfmt.errors import CkptError
from ckptfmt.write.slot import Slot
from tests.stage.holdings import descriptors, forked, mappings
"""


def test_a_forked_process_has_neither_mapping_nor_descriptor():
    run_python(
        FORK
        + """
made = Slot.make(1 << 20)
made.touch()
reader = Slot.attach(os.dup(made.fd))
view = made.view
assert len(mappings()) == len(descriptors()) == 2

def child():
    assert not mappings() and not descriptors()
    for slot in (made, reader):
        for use in (lambda: slot.view, lambda: slot.address, lambda: slot.fd, slot.touch):
            try:
                use()
            except CkptError as error:
                assert error.code == "SLOT_MEMORY"
            else:
                raise AssertionError("used after a fork")
        slot.close()
    with contextlib.closing(Slot.make(1)) as own:
        own.view[0] = 1
        forked(lambda: None)
        assert own.view[0] == 1

forked(child)
view[:2] = b"ok"
assert bytes(reader.view[:2]) == b"ok" and len(descriptors()) == 2
"""
    )


def test_a_forked_process_that_drops_a_view_unmaps_nothing_of_its_own():
    run_python(
        FORK
        + """
slot = Slot.make(1 << 20)
held = [slot.view, Slot.make(1 << 20).view]  # one with its slot, one without
addresses = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in held]
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

def child():
    global slot
    for address in addresses:
        assert libc.mmap(address, 1 << 20, 3, 0x22, -1, 0) == address  # free, hence ours
    slot = None
    held.clear()
    gc.collect()
    for address in addresses:
        assert ctypes.string_at(address, 1 << 20) == bytes(1 << 20)

forked(child)
held[1][0] = 1
"""
    )


def test_a_fork_while_slots_are_made_takes_no_half_made_one_along():
    run_python(
        FORK
        + """
import threading
stop = threading.Event()

def make_many():
    while not stop.is_set():
        Slot.make(1 << 16).close()

def child():
    assert not mappings() and not descriptors(), (mappings(), descriptors())
    Slot.make(1).close()

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=make_many) for _ in range(3)]
for thread in threads:
    thread.start()
try:
    for _ in range(100):
        forked(child)
finally:
    stop.set()
"""
    )


def test_forks_are_watched_once_and_not_before_there_is_a_slot():
    output = run_python(
        "import os; calls = []; os.register_at_fork = lambda **given: calls.append(given);"
        "import ckptfmt.write.slot; before = [*calls];"
        "[ckptfmt.write.slot.Slot.make(1).close() for _ in range(3)];"
        "ours = [given for given in calls if given not in before and 'ckptfmt' in"
        " given['after_in_child'].__module__];"
        "print(sum('ckptfmt' in str(given) for given in before), len(ours))"
    )

    assert output.split() == ["0", "1"]


# Touching


class OldLinux(MemoryCalls):
    """Linux before 5.14."""

    def populate(self, *_, **__):
        raise OSError(errno.EINVAL, "no such advice")


class FailingCalls(MemoryCalls):
    """A system that refuses one call."""

    def __init__(self, name, number):
        self._name = name
        self._number = number

    def __getattribute__(self, name):
        if not name.startswith("_") and name == self._name:
            raise OSError(self._number, os.strerror(self._number))
        return super().__getattribute__(name)


@pytest.fixture(params=[MemoryCalls, OldLinux])
def calls(request):
    return request.param()


def fault_count():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_a_copy_after_the_touch_waits_for_no_page(calls):
    with contextlib.closing(Slot.make(PIECE + 16 * MIB, calls=calls)) as made:
        assert os.fstat(made.fd).st_blocks == 0
        made.touch()
        assert os.fstat(made.fd).st_blocks * 512 == made.nbytes

        before = fault_count()
        ctypes.memset(made.address, 0x55, made.nbytes)

        assert fault_count() - before < made.nbytes // PAGE // 50


def test_a_reader_that_touched_waits_for_no_page(calls):
    with contextlib.closing(Slot.make(32 * MIB)) as made:
        made.touch()
        with contextlib.closing(Slot.attach(os.dup(made.fd), calls=calls)) as reader:
            reader.touch()
            goal = bytearray(made.nbytes)

            before = fault_count()
            ctypes.memmove(
                (ctypes.c_char * made.nbytes).from_buffer(goal), reader.address, made.nbytes
            )

            assert fault_count() - before < made.nbytes // PAGE // 50


def test_touching_keeps_what_is_there(calls):
    content = os.urandom(5 * PAGE)
    with contextlib.closing(Slot.make(len(content), calls=calls)) as made:
        made.view[:] = content
        made.touch()
        assert bytes(made.view) == content


@pytest.mark.parametrize("thread_count", [1, 3])
def test_touching_tells_how_far_it_is(thread_count):
    done: list[int] = []
    with contextlib.closing(Slot.make(2 * PIECE + PAGE)) as made:
        made.touch(on_progress=done.append, thread_count=thread_count)

    assert done == [PIECE, 2 * PIECE, 2 * PIECE + PAGE]


class CountingCalls(MemoryCalls):
    """Calls that note the pieces that are touched, and take their time."""

    def __init__(self):
        self.touched: set[int] = set()

    def populate(self, address, nbytes, *, writable):
        time.sleep(0.01)
        super().populate(address, nbytes, writable=writable)
        self.touched.add(address)


@pytest.mark.parametrize("thread_count", [1, 4])
def test_several_threads_touch_all_pieces_and_end_early_with_the_caller(monkeypatch, thread_count):
    monkeypatch.setattr("ckptfmt.write.slot._PIECE_NBYTES", 2 * PAGE)

    def stop(nbytes):
        if nbytes == 6 * PAGE:
            raise KeyboardInterrupt

    for on_progress in (None, stop):
        calls = CountingCalls()
        with contextlib.closing(Slot.make(100 * PAGE, calls=calls)) as made:
            if on_progress is None:
                made.touch(thread_count=thread_count)
                assert len(calls.touched) == 50
            else:
                with pytest.raises(KeyboardInterrupt):
                    made.touch(on_progress, thread_count=thread_count)
                assert len(calls.touched) < 20


@pytest.mark.parametrize("thread_count", [1, 4])
def test_a_piece_without_memory_is_a_named_error_from_any_thread(monkeypatch, thread_count):
    monkeypatch.setattr("ckptfmt.write.slot._PIECE_NBYTES", PAGE)
    with contextlib.closing(
        Slot.make(9 * PAGE, calls=FailingCalls("populate", errno.ENOMEM))
    ) as made:
        assert code_of(lambda: made.touch(thread_count=thread_count)) == "SLOT_MEMORY"


def test_a_slot_that_is_closed_while_it_is_touched_is_refused(calls):
    made = Slot.make(PIECE + PAGE, calls=calls)

    assert code_of(lambda: made.touch(on_progress=lambda _: made.close())) == "SLOT_MEMORY"


def test_what_is_being_touched_is_not_unmapped():
    class ClosingCalls(MemoryCalls):
        def populate(self, address, nbytes, *, writable):
            made.close()
            super().populate(address, nbytes, writable=writable)

    made = Slot.make(PAGE, calls=ClosingCalls())

    assert code_of(made.touch) == "ok"


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFAULT, EHWPOISON])
def test_memory_that_runs_out_is_a_named_error(number):
    with (
        contextlib.closing(Slot.make(PAGE, calls=FailingCalls("populate", number))) as made,
        pytest.raises(CkptError, match=f"{PAGE} bytes") as caught,
    ):
        made.touch()
    assert caught.value.code == "SLOT_MEMORY"


def test_an_old_system_refuses_memory_before_a_page_is_touched():
    class FullOldLinux(OldLinux):
        def allocate(self, *_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with contextlib.closing(Slot.make(PAGE, calls=FullOldLinux())) as made:
        assert code_of(made.touch) == "SLOT_MEMORY"
        assert os.fstat(made.fd).st_blocks == 0


# Refusals


@pytest.mark.parametrize("name", ["make_memory", "seal_size", "map"])
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.ENOSYS])
def test_a_refusal_of_the_system_is_a_named_error_and_leaves_nothing(name, number):
    assert code_of(lambda: Slot.make(PAGE, calls=FailingCalls(name, number))) == "SLOT_MEMORY"


@pytest.mark.parametrize("nbytes", [2**62, 2**63 - PAGE, 2**63, 2**70])
def test_sizes_that_no_machine_has_are_named_errors(nbytes):
    assert code_of(lambda: Slot.make(nbytes)) == "SLOT_MEMORY"


def test_a_negative_size_is_refused():
    assert code_of(lambda: Slot.make(-1)) == "ARGUMENT"


def test_a_limit_of_address_space_is_a_named_error():
    output = run_python(
        FORK
        + """
import pathlib, resource
in_use = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 64 * 2**20,) * 2)
try:
    Slot.make(2**30)
except CkptError as error:
    print(error.code, len(mappings()), len(descriptors()))
"""
    )

    assert output.split() == ["SLOT_MEMORY", "0", "0"]


def test_a_system_that_cannot_seal_against_execution_gives_slots_all_the_same():
    class OldCalls(MemoryCalls):
        def _memfd_create(self, flags):
            if flags & 0x8:
                raise OSError(errno.EINVAL, "unknown flag")
            return super()._memfd_create(flags)

    with contextlib.closing(Slot.make(PAGE, calls=OldCalls())) as made:
        made.touch()


@pytest.mark.parametrize("kind", ["file", "pipe", "unsealed memory", "closed"])
def test_what_is_no_slot_is_refused_and_closed(kind, tmp_path):
    (tmp_path / "file").write_bytes(bytes(PAGE))
    other = None
    if kind == "file":
        fd = os.open(tmp_path / "file", os.O_RDWR)
    elif kind == "unsealed memory":
        fd = MemoryCalls().make_memory()
        os.ftruncate(fd, PAGE)
    else:
        fd, other = os.pipe()
    if kind == "closed":
        os.close(fd)

    assert code_of(lambda: Slot.attach(fd)) == "SLOT_MEMORY"

    assert not pathlib.Path(f"/proc/self/fd/{fd}").exists()
    if other is not None:
        os.close(other)


def test_other_threads_run_while_a_slot_is_touched():
    count = 0
    stop = threading.Event()

    def run():
        nonlocal count
        while not stop.is_set():
            count += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with contextlib.closing(Slot.make(PIECE)) as made:
            while count == 0:
                pass
            before = count
            made.touch()
            assert count > before
    finally:
        stop.set()
        thread.join()

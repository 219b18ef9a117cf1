"""Processes that encode for a saver: what they do is what it would do, and nothing depends on them."""

import contextlib
import functools
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckptfmt.delta import chain, coders
from ckptfmt.delta.block_coder import UNDECIDED, VERDICT, BlockCoder
from ckptfmt.delta.chain import Chain
from ckptfmt.delta.coders import Coders
from ckptfmt.write.slot import Slot
from tests.builders import error_of
from tests.chains import Saving, mixed

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr(chain, "_LEAST_NBYTES", 0)
    monkeypatch.setattr(coders, "coder_count", lambda: 2)
    monkeypatch.setattr("ckptfmt.delta.delta.coder_count", lambda: 2)


class Processes(Saving):
    """Saves from slots such as trainers have, by one writer whose chain may start processes."""

    def __init__(self, held, **options):
        super().__init__(held, **options)
        (writer,) = self.writers
        self.coders = Coders()
        self.held = [Slot.make(writer.image.nbytes) for _ in writer.slots]
        for number, slot in enumerate(self.held):
            self.coders.add_slot(number, slot)
        writer.slots = [slot.view for slot in self.held]
        writer.chain = Chain(self.coders)

    @property
    def processes(self):
        return [coder.process for coder in self.coders._all]


@contextlib.contextmanager
def saving(held, **options):
    made = Processes(held, **options)
    try:
        yield made
    finally:
        made.coders.close()


def states(count):
    """States of a weight and its copy, each a little further than the one before."""
    master = np.random.default_rng(3).standard_normal(40_960, dtype=np.float32)
    for _ in range(count):
        yield mixed(master)
        master = master * np.float32(1.0001)


def read(made, step):
    with made.open(step) as opened:
        return [
            opened.read(field, name).tobytes()
            for field, name in (("weights", "w"), ("optimizer", "master/w"))
        ]


def expected(held):
    rows = {source.field: source for source in held.tensors}
    found = []
    for field in ("weights", "optimizer"):
        (box,) = rows[field].boxes
        out = memoryview(bytearray(box.element_count * (2 if field == "weights" else 4)))
        rows[field].copy_into(box, out)
        found.append(bytes(out))
    return found


@pytest.fixture
def noted(monkeypatch):
    """Blocks that were encoded in this very process."""
    found = []
    code = BlockCoder.code

    def note(self, number, block, *, digest=None):
        found.append((number, block))
        return code(self, number, block, digest=digest)

    monkeypatch.setattr(BlockCoder, "code", note)
    return found


def test_processes_encode_what_the_saver_would():
    first, *rest = states(4)
    with saving(first) as made:
        alone = Saving(first)
        for step, held in enumerate((first, *rest), 1):
            manifest, of_alone = made.save(step, held), alone.save(step, held)
            assert manifest.profile == of_alone.profile == ("delta" if step > 1 else "full")
            assert manifest.stored_nbytes == of_alone.stored_nbytes
            assert read(made, step) == read(alone, step) == expected(held)
        assert len(made.processes) == 2


def test_nothing_is_encoded_here_while_they_live(noted):
    first, second, third = states(3)
    with saving(first) as made:
        for step, held in enumerate((first, second, third), 1):
            made.save(step, held)
            assert read(made, step) == expected(held)
        assert noted == []


@pytest.mark.parametrize("count", [1, 2])
def test_a_process_that_is_killed_is_done_without(noted, count):
    first, second, third = states(3)
    with saving(first) as made:
        made.save(1, first)
        made.save(2, second)
        for process in made.processes[:count]:
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_S)
        assert made.save(3, third).profile == "delta"
        assert read(made, 3) == expected(third)
        assert bool(noted) or count == 1


def test_a_process_that_dies_on_a_block_leaves_it_to_the_saver(noted, monkeypatch):
    first, second = states(2)
    with saving(first) as made:
        made.save(1, first)
        begin = Coders.begin

        def begin_and_kill(self, *arguments, **members):
            begin(self, *arguments, **members)
            for coder in self._all:  # it has been told of the delta, and of no block
                coder.process.kill()

        monkeypatch.setattr(Coders, "begin", begin_and_kill)
        assert made.save(2, second).profile == "delta"
        assert read(made, 2) == expected(second)
        assert noted


def test_a_base_that_has_left_its_slot_is_read_from_its_files(noted):
    """REQ-DEL-008: the trainer may fill the slot of the base while the delta is made."""
    first, second = states(2)
    with saving(first) as made:
        made.save(1, first)
        made.held[0].view[:] = bytes(made.held[0].nbytes)
        assert made.save(2, second).profile == "delta"
        assert read(made, 2) == expected(second)
        assert noted


def test_where_no_process_can_be_started_there_is_none(monkeypatch, noted):
    def refuse(*_, **__):
        raise OSError(11, "no more processes")

    monkeypatch.setattr(coders, "start_helper", refuse)
    first, second = states(2)
    with saving(first) as made:
        made.save(1, first)
        made.save(2, second)
        assert made.processes == []
        assert read(made, 2) == expected(second)
        assert noted


def test_a_small_state_and_a_single_processor_start_none(monkeypatch):
    first, second = states(2)
    for name, value in (("_LEAST_NBYTES", 1 << 30), ("coder_count", lambda: 1)):
        with monkeypatch.context() as changed:
            changed.setattr(chain if name.startswith("_") else coders, name, value)
            with saving(first) as made:
                made.save(1, first)
                made.save(2, second)
                assert made.processes == []


def test_a_layout_and_a_slot_that_are_new_reach_the_processes():
    first, second = states(2)
    with saving(first) as made:
        made.save(1, first)
        made.save(2, second)
        (writer,) = made.writers
        for number in (0, 1):  # what the trainer does when its state grows
            made.held[number] = slot = Slot.make(writer.image.nbytes + 4096)
            made.coders.add_slot(number, slot)
            writer.slots[number] = slot.view
        made.save(3, first)
        assert made.save(4, second).profile == "delta"
        assert read(made, 4) == expected(second)


def test_an_error_of_a_block_is_met_by_the_saver():
    """A base that can't be read is a named error, whoever was to encode the block."""
    first, second = states(2)
    with saving(first) as made:
        made.save(1, first)
        made.held[0].view[:] = bytes(made.held[0].nbytes)
        for path in made.place(1).list(""):
            if path.endswith(".safetensors"):
                made.place(1).delete(path)
        error = error_of(functools.partial(made.save, 2, second))
        assert error.code == "FILE_MISSING"


def test_processes_end_with_their_saver_even_if_it_is_killed():
    program = (
        "import sys, time\n"
        "from ckptfmt.delta import coders\n"
        "coders.coder_count = lambda: 2\n"
        "made = coders.Coders()\n"
        "made.start()\n"
        "print(*[coder.process.pid for coder in made._all], flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    end_s = time.monotonic() + WAIT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < end_s, "a process outlives its saver"
        time.sleep(0.05)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or before it is read
        return False


def undecided(count):
    """Return what a process tells that codes none of some blocks."""
    verdicts = np.zeros(count, VERDICT)
    verdicts["encoding"] = UNDECIDED
    return verdicts.tobytes()


class _SlowChannel:
    """To a process that answers one message for each `answers.release()`."""

    def __init__(self):
        self.asked = []
        self.answers = threading.Semaphore(0)

    def send(self, message):
        self.asked.append(message["blocks"])

    def receive(self):
        assert self.answers.acquire(timeout=20)
        return None if self.asked[-1] == [[-1, 0]] else ({"verdicts": undecided(1)}, None)

    def shut_down(self):
        """Nobody asks it again."""


@pytest.mark.parametrize("dies", [False, True])
def test_who_waits_longest_gets_the_next_process(dies):
    """The store waits for the oldest batch: one that is overtaken again and again keeps all others waiting."""
    channel, found = _SlowChannel(), []
    made = Coders()
    process: Any = SimpleNamespace(channel=channel, results=SimpleNamespace(view=memoryview(b"")))
    made._idle = [process]
    made._alive_count = 1

    def ask(number):
        # Each comes again at once, as threads with more to do would.
        found.append(made.code([(number, 0)], 0))
        if not dies:
            found.append(made.code([(number + 10, 0)], 0))

    threads = []
    for number in range(-1 if dies else 0, 4):
        threads.append(threading.Thread(target=ask, args=(number,), daemon=True))
        threads[-1].start()
        wait_for(lambda: len(made._waiting) == len(threads) - 1 and channel.asked)
    for _ in range(8):
        channel.answers.release()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert found == [{}] * (5 if dies else 8)
    asked = [number for ((number, _),) in channel.asked]
    assert asked[:4] == ([-1] if dies else [0, 1, 2, 3])
    assert sorted(asked[4:]) == ([] if dies else [10, 11, 12, 13])


def test_a_process_whose_answer_cannot_be_taken_is_done_without():
    """As where this process has no descriptor left for the memory of its results."""
    made, channel = Coders(), _SlowChannel()
    process: Any = SimpleNamespace(
        channel=channel, results=None
    )  # an answer without the descriptor that it needs
    made._idle, made._alive_count = [process], 1
    channel.answers.release()
    with pytest.raises(AssertionError):
        made.code([(0, 0)], 0)
    assert made.code([(1, 0)], 0) == {}  # nobody is left, and nobody waits


def wait_for(is_so, timeout_s=20):
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.001)

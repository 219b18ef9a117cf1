"""Raises at every line of the threads that save, at every message, and interrupts the trainer at every line of `save`.

One exception for each life of a checkpointer: three saves of a small training, the second and third
of them copied beside a step. After the exception each call must end, with a result or with an error
of ckptfmt; a later save must work; and what is committed must be what was live. A process of its
own: it traces its threads, and its main thread is interrupted.

    CKPTFMT_FAULTS_MARK=me python -m tests.faults.injecting lines --saver thread --seed 1 --sample 100
"""

import argparse
import collections
import contextlib
import dataclasses
import dis
import functools
import itertools
import json
import logging
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final

import torch

import ckptfmt
import ckptfmt.saving.links
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError
from ckptfmt.saving.background import Background
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.saving.saver import Saver
from ckptfmt.write.helper_process import Channel, start_helper
from tests.faults.driver import problems
from tests.store.helpers import FAST_DIRECTORY

_PACKAGE: Final = str(pathlib.Path(ckptfmt.__file__).parent)
#: After how many seconds a call counts as hanging. Deadlines are shorter, so that a call that waits
#: one out is no hang.
_HANG_S: Final = 40.0
_DEADLINE_S: Final = 15.0
#: How many places are tried, at most, for each exception that a sample asks for.
_TRIES_A_SAMPLE: Final = 5
#: Where interrupts of the trainer's own thread matter: the mechanics of a save.
_OF_TRAINER: Final = (
    "saving/background.py",
    "saving/links.py",
    "saving/handle.py",
    "write/staging.py",
    "write/slot_contents.py",
    "saving/saver.py",
    "run/save_job.py",
)
#: By this variable a saver's process is told at which of its messages to raise; see
#: `tests.faults.injected_saver`.
AT_MESSAGE: Final = "CKPTFMT_FAULTS_AT_MESSAGE"


_LIVES: Final = itertools.count()
#: What becomes of the calls of a life in which nothing is raised.
_WELL: Final = ("step: ok", "save: ok", "wait: ok", "close: ok")


class Injected(Exception):  # noqa: N818
    """What is raised where nobody expects it."""


class Hang(BaseException):
    """A call didn't end."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where to raise: the n-th time that a kind of thread comes to a line, or that a message passes a point."""

    thread: str
    file: str
    line: int
    time: int = 1

    def __str__(self) -> str:
        return f"{self.thread} {self.file}:{self.line} #{self.time}"


@dataclasses.dataclass(slots=True)
class Report:
    """What was done, and what was found."""

    injections: int = 0
    raised: int = 0
    hangs: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)
    longest_s: float = 0.0
    longest_at: str = ""


class Injector:
    """Counts how often each place is come to and, given one of them, raises there, once."""

    def __init__(
        self,
        at: Place | None,
        error: Callable[[], BaseException],
        *,
        wants: Callable[[str, str], bool],
    ) -> None:
        self.at = at
        self.counts: collections.Counter[tuple[str, str, int]] = collections.Counter()
        self.is_armed = self.has_raised = False
        self._error = error
        self._wants = wants
        self._lock = threading.Lock()

    def meet(self, file: str, line: int) -> None:
        """Take note that this thread comes to a place; raise if that is the one."""
        if not self.is_armed:
            return
        kind = _kind_of(threading.current_thread().name)
        if not self._wants(kind, file):
            return
        with self._lock:
            place = kind, file, line
            self.counts[place] += 1
            if (
                self.at is None
                or self.has_raised
                or (*place, self.counts[place]) != dataclasses.astuple(self.at)
            ):
                return
            self.has_raised = True
        raise self._error()

    def trace(self, frame: FrameType, _event: str, _arg: object) -> Any:
        """Trace the frames of the package; where it is known where to raise, those that have the line."""
        code, at = frame.f_code, self.at
        if not code.co_filename.startswith(_PACKAGE):
            return None
        if at is not None and (
            code.co_filename[len(_PACKAGE) + 1 :] != at.file or at.line not in _lines_of(code)
        ):
            return None
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line" and frame.f_lasti not in _exits_of(frame.f_code):
            self.meet(frame.f_code.co_filename[len(_PACKAGE) + 1 :], frame.f_lineno)
        return self._trace_line

    def places(self) -> list[Place]:
        """Return where to raise: the first and the last time that each place was come to."""
        return sorted(
            {Place(*place, time) for place, count in self.counts.items() for time in (1, count)}
        )


@functools.cache
def _kind_of(thread: str) -> str:
    """Return what threads of a pool have in common: their name without the number."""
    return re.sub(r"_[0-9]+$", "", thread)


@functools.cache
def _lines_of(code: CodeType) -> frozenset[int]:
    return frozenset(line for _, _, line in code.co_lines() if line is not None)


@functools.cache
def _exits_of(code: CodeType) -> frozenset[int]:
    """Return where a function leaves a `with`: there a line begins, and no exception can arise before the exit is done.

    What is raised there by tracing would leave a lock taken for ever, which neither an error nor a
    signal can.
    """
    found = list(dis.get_instructions(code))
    names = [
        f"{one.opname} {one.argval}" if one.opname == "LOAD_CONST" else one.opname for one in found
    ]
    exits = [
        ["LOAD_CONST None"] * 3,
        ["SWAP", *["LOAD_CONST None"] * 3],
        ["PUSH_EXC_INFO", "WITH_EXCEPT_START"],
    ]
    return frozenset(
        one.offset
        for at, one in enumerate(found)
        if any(names[at : at + len(part)] == part for part in exits)
    )


class Life:
    """One checkpointer, and what became of its calls."""

    def __init__(self, run: pathlib.Path, saver: Any, options: dict[str, Any]) -> None:
        torch.manual_seed(1)
        self.run = run
        self.model = torch.nn.ParameterList([torch.zeros(2_000) for _ in range(3)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        self.data = {"step": 0}
        state = ckptfmt.State(weights=self.model, optimizer=self.optimizer, data=self.data)
        self.checkpointer = Checkpointer(run, state, saver=saver, deadline_s=_DEADLINE_S, **options)
        self.handles: list[SaveHandle] = []
        self.outcomes: list[str] = []
        self.longest_s = 0.0
        self.checkpointer.restore()

    def train(self) -> None:
        """Do a step, of which follows what the weights are."""
        for parameter in self.model:
            parameter.grad = parameter.detach() * 0 - 1
        self.optimizer.step()
        self.data["step"] += 1

    def call(self, name: str, action: Callable[[], object]) -> str:
        """Call something that must end, and return how it did."""
        begin_s = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, _HANG_S)
        try:
            action()
            found = "ok"
        except CkptError as error:
            found = str(error.code)
        except (Injected, KeyboardInterrupt) as error:
            found = type(error).__name__
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.longest_s = max(self.longest_s, time.monotonic() - begin_s)
        self.outcomes.append(f"{name}: {found}")
        return found

    def save(self) -> str:
        """Do a step, and begin its save."""

        def begin() -> None:
            self.checkpointer.step = self.data["step"]
            handle = self.checkpointer.save()
            assert handle is not None
            self.handles.append(handle)

        step = self.call("step", self.train)
        return self.call("save", begin) if step == "ok" else step


def _body(life: Life) -> None:
    """Save three times, and wait in all ways that there are."""
    life.save()
    life.save()
    for handle in life.handles[-1:]:
        life.call("wait", handle.wait_staged)
    life.save()
    life.call("step", life.train)
    for handle in life.handles:
        life.call("wait", handle.wait)


def _after(life: Life) -> list[str]:
    """Save once more, as often as failures are to be told; return what is wrong then."""
    found = []
    failed = sum(handle.state == "FAILED" for handle in life.handles)
    for _ in range(len(life.handles) + 4):
        life.handles.clear()
        if life.save() == "ok" and life.call("wait", life.handles[-1].wait) == "ok":
            break
    else:
        found.append(f"no save works any more ({failed} had failed): {life.outcomes}")
    life.call("close", life.checkpointer.close)
    if found or life.outcomes[-1] != "close: ok":
        life.call("close", life.checkpointer.close)
        if life.outcomes[-1] != "close: ok":
            found.append(f"close: {life.outcomes}")
    return found


def _check(life: Life, handles: list[SaveHandle], *, is_in_trainer: bool) -> list[str]:
    found = list(problems(life.run))
    committed = [handle for handle in handles if handle.state == "COMMITTED"]
    found += [
        f"{one} isn't committed"
        for one in committed
        if not pathlib.Path(one.path, "manifest.json").exists()
    ]
    raw = [outcome for outcome in life.outcomes if "Injected" in outcome or "Interrupt" in outcome]
    if not is_in_trainer and any(not outcome.startswith("save") for outcome in raw):
        found.append(f"an error without a name: {raw}")
    return found


@contextlib.contextmanager
def _traced(injector: Injector, *, threads: bool, trainer: bool) -> Iterator[None]:
    if threads:
        threading.settrace(injector.trace)
    if trainer:
        sys.settrace(injector.trace)
    try:
        yield
    finally:
        threading.settrace(None)
        sys.settrace(None)


@contextlib.contextmanager
def _messages(injector: Injector, saver: str) -> Iterator[None]:
    """Meet the injector before and behind every message, in either direction, where a thread hands it on."""

    def around(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            injector.meet(f"before {name}", 0)
            result = inner(*args, **options)
            injector.meet(f"behind {name}", 0)
            return result

        return call

    points: list[tuple[Any, str]] = [(Background, "_on_message"), (Background, "_on_lost")]
    points += (
        [(Channel, "send"), (Channel, "receive")]
        if saver == "process"
        else [(Saver, "handle"), (Saver, "_report")]
    )
    kept = [(kind, name, getattr(kind, name)) for kind, name in points]
    for kind, name, inner in kept:
        setattr(kind, name, around(name, inner))
    try:
        yield
    finally:
        for kind, name, inner in kept:
            setattr(kind, name, inner)


def _live(
    root: pathlib.Path,
    what: str,
    saver: str,
    injector: Injector,
    report: Report | None = None,
    *,
    name: str = "",
) -> None:
    """Live once, with an exception at one place or none."""
    # A saver that was dropped may still finish what it has in the directory of an earlier life.
    run = root / f"run-{next(_LIVES)}"
    # With deltas, slots are read by more than who writes.
    options: dict[str, Any] = {"delta": "smallest"} if what == "lines" and saver == "thread" else {}
    with _traced(injector, threads=what == "lines", trainer=False), contextlib.ExitStack() as stack:
        if what == "messages":
            stack.enter_context(_messages(injector, saver))
        life = Life(run, saver, options)
        injector.is_armed = True
        try:
            if what == "interrupts":
                with _traced(injector, threads=False, trainer=True):
                    _body(life)
            else:
                _body(life)
            injector.is_armed = False
            handles = list(life.handles)
            found = _after(life)
            found += _check(life, handles, is_in_trainer=what == "interrupts")
        except Hang:
            injector.is_armed = False
            found = []
            if report is not None:
                report.hangs.append(f"{name}: {life.outcomes}")
    shutil.rmtree(run, ignore_errors=True)
    if report is not None:
        report.injections += 1
        report.raised += injector.has_raised or (what == "remote" and {*life.outcomes} != {*_WELL})
        report.problems += [f"{name}: {problem}" for problem in found]
        for outcome in set(life.outcomes):
            report.outcomes[outcome] = report.outcomes.get(outcome, 0) + 1
        if life.longest_s > report.longest_s:
            report.longest_s, report.longest_at = life.longest_s, name
    else:
        assert not found, found


def _wants(what: str, kind: str, file: str) -> bool:
    if what == "interrupts":
        return kind == "MainThread" and (file in _OF_TRAINER or file == "saving/saves.py")
    return kind.startswith("ckptfmt-")


def _list_places(root: pathlib.Path, what: str, saver: str) -> list[Place]:
    injector = Injector(None, Injected, wants=lambda kind, file: _wants(what, kind, file))
    _live(root, what, saver, injector)
    found = injector.places()
    if what == "messages":  # every one of them
        found = sorted(
            {
                Place(*place, number)
                for place, count in injector.counts.items()
                for number in range(1, count + 1)
            }
        )
    return found


def _raise_hang(*_: object) -> None:
    raise Hang


def inject_all(what: str, saver: str, *, seed: int, sample: int | None, file: str = "") -> Report:
    """Live once for each place, or until `sample` exceptions have been raised at places chosen by chance."""
    logging.disable(logging.CRITICAL)
    threading.excepthook = lambda _: None  # a thread that dies without a word is what is looked for
    signal.signal(signal.SIGALRM, _raise_hang)
    report = Report()
    with tempfile.TemporaryDirectory(
        dir=FAST_DIRECTORY, prefix="ckptfmt-faults-", ignore_cleanup_errors=True
    ) as directory:
        root = pathlib.Path(directory)
        _live(
            root, what, saver, Injector(None, Injected, wants=lambda *_: False)
        )  # imports and the like
        if what == "remote":
            places = [
                Place("saver", point, 0, n)
                for point in ("send", "receive", "sent")
                for n in range(1, 20)
            ]
        else:
            places = [
                place for place in _list_places(root, what, saver) if re.search(file, place.file)
            ]
        wanted = len(places) if sample is None else sample
        if sample is not None:
            # Threads take other ways from life to life: a place that one came to, another may miss.
            tries = min(len(places), _TRIES_A_SAMPLE * sample)
            places = random.Random(seed).sample(places, tries)
        for number, place in enumerate(places):
            if report.raised == wanted:
                break
            if not number % 100:
                sys.stderr.write(f"{number} of {len(places)}\n")
            error: Callable[[], BaseException] = (
                KeyboardInterrupt if what == "interrupts" else Injected
            )
            injector = Injector(place, error, wants=lambda kind, file: _wants(what, kind, file))
            if what == "remote":
                os.environ[AT_MESSAGE] = f"{place.file} {place.time}"
            _live(root, what, saver, injector, report, name=str(place))
            if report.hangs:
                break
    return report


def _start_failing(_: str) -> Any:
    """Start a saver that fails; the next one doesn't."""
    found = start_helper("tests.faults.injected_saver")
    os.environ.pop(AT_MESSAGE, None)
    return found


def main() -> None:
    """Run from the command line; the report is one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["lines", "messages", "interrupts", "remote"])
    parser.add_argument("--saver", choices=["thread", "process"], default="thread")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--file", default="")
    arguments = parser.parse_args()
    if arguments.what == "remote":
        vars(ckptfmt.saving.links)["start_helper"] = _start_failing
    report = inject_all(
        arguments.what,
        arguments.saver,
        seed=arguments.seed,
        sample=arguments.sample,
        file=arguments.file,
    )
    json.dump(dataclasses.asdict(report), sys.stdout, indent=1)


if __name__ == "__main__":
    main()

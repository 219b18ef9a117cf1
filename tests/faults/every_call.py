"""Fails each system call of an operation on a run once and from then on, and judges what is left.

An operation is a launch with saves, a load, a clean-up, a mirror and so on, by the public
interface. It begins at the same directory each time. All calls to the file system pass through
`PosixCalls`, of which the hooked form takes the place for the whole process.

    python -m tests.faults.every_call
    python -m tests.faults.every_call --only launch --sample 100 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import errno
import hashlib
import io
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
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Final
from unittest import mock

import numpy as np

import ckptfmt
from ckptfmt import api
from ckptfmt.__main__ import main as command_line
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.documents.manifest import checkpoint_name, parse_checkpoint_name
from ckptfmt.errors import CkptError, Code, IntegrityError, StoreError
from tests.store.helpers import FAST_DIRECTORY, open_fd_count
from tests.stores.hooked import OK, HookedCalls, Operation

#: After how many seconds an operation counts as hanging. The deadlines of the operations are
#: shorter.
HANG_S: Final = 60
#: The verdict on a checkpoint that loads what nobody saved.
INEXACT: Final = "inexact"
_DEADLINE_S: Final = 3.0
#: Deltas whatever the measured times: the calls of an operation are the same each time.
_DELTAS: Final = {"mode": "smallest", "restore_budget": 1000}

_OPENS: Final = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE)
_LOOKS: Final = (errno.EIO, errno.ESTALE)
_LOCKS: Final = (errno.EIO, errno.ENOLCK)
_NAMES: Final = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_REMOVALS: Final = (errno.EIO, errno.EROFS, errno.ENOENT, errno.EBUSY)
#: The errors that a kernel may return for a call. Python repeats a call after EINTR, except calls
#: by ctypes, here fallocate. ENOENT is possible only where another process may remove a name.
ERRORS: Final[dict[str, tuple[int, ...]]] = {
    "open_root": _OPENS,
    "open_directory": _OPENS,
    "open_read": _OPENS,
    "open_lock": _OPENS,
    "open_new": (*_NAMES, errno.EMFILE),
    "read_at": _LOOKS,
    "read_into_at": _LOOKS,
    "fstat": _LOOKS,
    "lstat": _LOOKS,
    "scan": _LOOKS,
    "lock_shared": _LOCKS,
    "try_lock": _LOCKS,
    "mkdir": _NAMES,
    "link": (*_NAMES, errno.EMLINK),
    "rename": _NAMES,
    "rename_noreplace": _NAMES,
    "exchange": _NAMES,
    "write": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "write_at": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "set_direct": (errno.EINVAL,),
    "preallocate": (errno.EIO, errno.ENOSPC, errno.EOPNOTSUPP, errno.EINTR),
    "truncate": (errno.EIO, errno.EROFS),
    "fsync": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "fsync_directory": (errno.EIO, errno.ESTALE),
    "close": (errno.EIO, errno.EDQUOT),
    "unlink": _REMOVALS,
    "rmdir": (*_REMOVALS, errno.ENOTEMPTY),
}
#: Calls that a full disk fails.
_FILLING: Final = frozenset(
    {"open_new", "mkdir", "link", "rename", "rename_noreplace", "exchange", "write", "write_at"}
    | {"preallocate", "fsync"}
)
#: Calls that a file system fails after it was remounted read-only.
_CHANGING: Final = _FILLING | {"unlink", "rmdir", "truncate", "open_lock"}
#: Calls whose answer may be lost after the server carried them out.
_ANSWERED: Final = frozenset(
    {"open_new", "mkdir", "link", "rename", "rename_noreplace", "unlink", "rmdir", "fsync"}
    | {"fsync_directory"}
)
#: A phrase for each kind of fault, and the calls that fail from the first one on. None: only one
#: call fails.
_LATER: Final[dict[str, frozenset[str] | None]] = {
    "once": None,
    "after it was carried out": None,
    "and all later calls": frozenset(ERRORS),
    "and all later writing calls": _FILLING,
    "and all later changes": _CHANGING,
}


class Hang(BaseException):
    """An operation didn't end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A failure to inject: the number of the call, from 1 on, the error, and a key of `_LATER`."""

    number: int
    error: int
    how: str

    def __str__(self) -> str:
        return f"call {self.number}: {errno.errorcode[self.error]} {self.how}"


class FailingCalls(HookedCalls):
    """The system calls of this process, of which `fault` says which fail.

    Attributes:
        fault: the failure; None for none.
        made: the names of the calls so far.
        failed: the calls that failed, each with its path.
    """

    def __init__(self, base: pathlib.Path) -> None:
        super().__init__(base)
        self.fault: Fault | None = None
        self.made: list[str] = []
        self.failed: list[str] = []
        self._due: set[int] = set()
        self._written: set[int] = set()
        self._lock = threading.Lock()

    def start(self, fault: Fault | None) -> None:
        """Count from 0 on, and fail as `fault` says."""
        with self._lock:
            self.fault, self.made, self.failed = fault, [], []

    def open_new(self, name: str, directory_fd: int) -> int:
        """See `PosixCalls.open_new`."""
        fd = super().open_new(name, directory_fd)
        self._written.add(fd)
        return fd

    def close(self, fd: int) -> None:
        """See `PosixCalls.close`; a descriptor that was only read is closed without an error."""
        if fd in self._written:
            self._written.discard(fd)
            super().close(fd)
        else:
            self._path_of_fd.pop(fd)
            self._inner.close(fd)

    def fsync(self, fd: int) -> None:
        """See `PosixCalls.fsync`; after an error the contents are lost, as the kernel may do."""
        try:
            super().fsync(fd)
        except OSError:
            nbytes = os.fstat(fd).st_size
            os.ftruncate(fd, 0)
            os.ftruncate(fd, nbytes)
            raise

    def before(self, operation: Operation) -> None:
        """Count a call, and fail a call that isn't to be carried out."""
        with self._lock:
            self.made.append(operation.op)
            fault, number = self.fault, len(self.made)
            if fault is None:
                return
            later = _LATER[fault.how]
            if fault.how == "after it was carried out":
                if number == fault.number:
                    self._due.add(threading.get_ident())
                return
            if number == fault.number or (
                later is not None and number > fault.number and operation.op in later
            ):
                self._fail(operation, fault)

    def after(self, operation: Operation) -> None:
        """Fail a call whose answer is lost."""
        with self._lock:
            if self.fault is not None and threading.get_ident() in self._due:
                self._due.discard(threading.get_ident())
                if operation.outcome == OK:
                    self._fail(operation, self.fault)

    def _fail(self, operation: Operation, fault: Fault) -> None:
        self.failed.append(f"{operation.op} {operation.path}")
        error = fault.error
        # With several threads, the call of this number may be another call than in the record.
        if fault.how == "once" and error not in ERRORS[operation.op]:
            error = ERRORS[operation.op][0]
        raise OSError(error, f"{os.strerror(error)} (injected)")


@contextlib.contextmanager
def failing_calls(base: pathlib.Path) -> Iterator[FailingCalls]:
    """Let every store of this process use the same hooked calls while the context is open."""
    calls = FailingCalls(base)
    with (
        mock.patch("ckptfmt.store.local.PosixCalls", return_value=calls),
        mock.patch("ckptfmt.store.symlinks.PosixCalls", return_value=calls),
    ):
        yield calls


def list_faults(made: Sequence[str], *, every_error: bool) -> Iterator[Fault]:
    """Yield the failures to inject into a sequence of calls.

    Each call fails once, and it fails together with later calls.

    Args:
        made: the names of the calls.
        every_error: whether each call fails with each error in each way. Else the calls of a name
            take the errors and the ways in turns.
    """
    turns: collections.Counter[str] = collections.Counter()
    for number, op in enumerate(made, 1):
        once = [Fault(number, error, "once") for error in ERRORS[op]]
        if op in _ANSWERED:
            once += [
                Fault(number, error, "after it was carried out")
                for error in (errno.EIO, errno.ETIMEDOUT)
            ]
        stays = [Fault(number, error, "and all later calls") for error in _LOOKS]
        if op in _FILLING:
            stays.append(Fault(number, errno.ENOSPC, "and all later writing calls"))
        if op in _CHANGING:
            stays.append(Fault(number, errno.EROFS, "and all later changes"))
        for ways in (once, stays):
            yield from ways if every_error else [ways[turns[op] % len(ways)]]
        turns[op] += 1


# --- a training whose state follows from its step -------------------------------------------------


class Toy:
    """A training on two arrays; `large` makes one of them large enough for direct I/O."""

    def __init__(self, *, large: bool = False) -> None:
        sizes = {"bias": 50, "weight": 400_000 if large else 3_000}
        self.weights = {name: np.zeros(size, np.int64) for name, size in sizes.items()}
        self.data = {"step": 0}
        self.state = ckptfmt.State(weights=self.weights, data=self.data)

    def set(self, step: int) -> None:
        """Be what this training is after `step` steps."""
        self.data["step"] = step
        for array in self.weights.values():
            array[...] = _values(step, array.size)

    def check(self, step: int) -> None:
        """Raise AssertionError unless this is what the training is after `step` steps."""
        assert is_exact({"weights": self.weights, "data": self.data}, step), "inexact: live state"


def _values(step: int, size: int) -> np.ndarray[Any, Any]:
    values = np.arange(size, dtype=np.int64)
    values[:40:7] += step * 1_000_003
    return values


def is_exact(trees: Any, step: int) -> bool:
    """Return whether trees are those of a `Toy` after `step` steps."""
    weights = trees["weights"]
    return (
        trees["data"] == {"step": step}
        and set(weights) == {"bias", "weight"}
        and all(bool((array == _values(step, array.size)).all()) for array in weights.values())
    )


# --- operations -----------------------------------------------------------------------------------

#: Names of acknowledged checkpoints, relative to the root of a scene, with their steps.
Told = dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """An operation, and the directory at which it begins.

    Attributes:
        prepare: makes the directory, and returns the acknowledged checkpoints.
        act: does the operation, checks the result, and adds what was acknowledged. An error that
            the operation reports without an exception is raised as a CkptError.
        keep: how many of the newest acknowledged checkpoints stay; None for all.
        gone: the steps that the operation removes.
    """

    prepare: Callable[[pathlib.Path], Told]
    act: Callable[[pathlib.Path, Told], None]
    keep: int | None = None
    gone: frozenset[int] = frozenset()


def train(
    run: pathlib.Path,
    told: Told,
    *,
    count: int = 2,
    keep: int | None = None,
    saver: Any = "thread",
    delta: Any = "off",
    large: bool = False,
    deadline_s: float = _DEADLINE_S,
    **options: Any,
) -> None:
    """Launch, load, and save `count` times; the outcome of each save is awaited.

    A wait ends after the deadline, too: a cache keeps a save while the run's directory fails.
    """
    toy = Toy(large=large)
    newest = max(
        (step for name, step in told.items() if name.startswith(f"{run.name}/")), default=0
    )
    with Checkpointer(
        run,
        toy.state,
        keep=keep,
        loading=ckptfmt.Loading(allow="streams"),
        saving=ckptfmt.Saving(saver=saver, delta=delta, failed_saves=0),
        job=ckptfmt.Job(deadline_s=deadline_s),
        **options,
    ) as checkpointer:
        checkpointer.restore()
        step = checkpointer.step
        assert step >= newest, f"older: the launch resumes from step {step}, not {newest}"
        if step:
            toy.check(step)
        checkpointer.restore_rng()
        for _ in range(count):
            step += 1
            toy.set(step)
            handle = checkpointer.save(step=step)
            assert handle is not None
            handle.wait(timeout_s=deadline_s)
            told[f"{run.name}/{pathlib.Path(handle.path).name}"] = step


def prepare_run(root: pathlib.Path, *, delta: Any = "off", torn: bool = True) -> Told:
    """Make a run with three checkpoints, and the directory of a save that wasn't finished."""
    told: Told = {}
    train(root / "run", told, count=3, delta=delta)
    stored = {each.step: each.stored_nbytes or 0 for each in ckptfmt.Run(root / "run").list()}
    assert delta == "off" or stored[3] < stored[1] // 2, "step 3 isn't a delta"
    if torn:
        undecided = root / "run" / checkpoint_name(4, 1)
        (undecided / "parts").mkdir(parents=True)
        (undecided / f".tmp-{'0' * 32}").write_bytes(b"unfinished")
        (undecided / "parts" / f".tmp-{'1' * 32}").write_bytes(b"unfinished")
    return told


def _prepare_mirrored(root: pathlib.Path, *, damaged: bool = False) -> Told:
    """Make a run and its mirror; the newest checkpoint of the run may be damaged."""
    told = prepare_run(root)
    ckptfmt.Run(root / "run").mirror(root / "mirror")
    told |= {f"mirror/{name.partition('/')[2]}": step for name, step in told.items()}
    if damaged:
        name = f"run/{checkpoint_name(3, 1)}"
        del told[name]
        path = next((root / name).rglob("*.safetensors"))
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    return told


def _save_alone(root: pathlib.Path, told: Told, *, large: bool = False) -> None:
    toy = Toy(large=large)
    toy.set(5)
    if not (root / "alone" / "manifest.json").exists():
        ckptfmt.save(root / "alone", toy.state, step=5)
    told["alone"] = 5


def _load(root: pathlib.Path, _: Told) -> None:
    toy = Toy()
    report = ckptfmt.load(root / "run", toy.state, allow="streams")
    assert report.step == 3, f"older: step {report.step} was loaded"
    toy.check(3)


def _open(root: pathlib.Path, _: Told) -> None:
    with ckptfmt.open(root / "run") as checkpoint:
        assert checkpoint.step == 3, f"older: step {checkpoint.step} was opened"
        array = checkpoint.weights["weight"][...]
        assert bool((array == _values(3, array.size)).all()), "inexact: opened"


def _validate(root: pathlib.Path, _: Told) -> None:
    report = ckptfmt.validate(root / "run")
    if report.violations:
        raise report.violations[0]
    assert len(report.checkpoints) == 3, "silent: validate checked fewer checkpoints"


def _list(root: pathlib.Path, _: Told) -> None:
    found = [each.step for each in ckptfmt.Run(root / "run").list() if each.state == "committed"]
    assert sorted(found) == [1, 2, 3], f"silent: the list is {found}"


def _call(*words: object) -> str:
    """Call the command line, and return what it printed; raise the error that it named."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = command_line([str(word) for word in words])
    if code:
        named = re.search(r"error: ([A-Z_]+)\b", errors.getvalue())
        assert named or out.getvalue(), f"unnamed: {errors.getvalue()}"
        assert named or not errors.getvalue(), f"unnamed: {errors.getvalue()}"
        name = named[1] if named else "STORE_IO"
        raise StoreError(Code[name], errors.getvalue() or out.getvalue())
    return out.getvalue()


def _collect_garbage(root: pathlib.Path, _: Told) -> None:
    _call("gc", root / "run", "--keep", 1)
    found = [each.step for each in ckptfmt.Run(root / "run").list() if each.state == "committed"]
    assert found == [3], f"silent: gc left {found}"


def _delete(root: pathlib.Path, _: Told) -> None:
    run = ckptfmt.Run(root / "run")
    if any(each.step == 1 and each.state == "committed" for each in run.list()):
        run.delete(1)
    found = [each.step for each in run.list() if each.state == "committed"]
    assert sorted(found) == [2, 3], f"silent: the deletion left {found}"


def _label(root: pathlib.Path, _: Told) -> None:
    run = ckptfmt.Run(root / "run")
    with mock.patch.object(logging.getLogger("ckptfmt"), "warning") as warning:
        run.tag(2, "good")
        run.set_metrics(2, {"loss": 0.5})
        run.pin(2)
    (found,) = [each for each in run.list() if each.step == 2]
    labels = (found.tags, found.metrics)
    warned = any("goes without" in call.args[0] for call in warning.call_args_list)
    is_told = found.labels_error is not None or warned
    assert is_told or labels == (("good",), {"loss": 0.5}), f"silent: the labels are {labels}"
    assert found.pinned, "silent: not pinned"


def _mirror(root: pathlib.Path, told: Told) -> None:
    report = ckptfmt.Run(root / "run").mirror(root / "mirror")
    if report.problems:
        raise report.problems[0]
    assert report.current, "silent: the mirror isn't current"
    told |= {
        f"mirror/{name.partition('/')[2]}": step
        for name, step in list(told.items())
        if name.startswith("run/")
    }


def _repair(root: pathlib.Path, told: Told) -> None:
    report = ckptfmt.Run(root / "run").scrub([root / "mirror"])
    for damage in report.damages:
        if not damage.repaired:
            raise damage.error
    told[f"run/{checkpoint_name(3, 1)}"] = 3


def _promote(root: pathlib.Path, _: Told) -> None:
    try:
        ckptfmt.Run(root / "mirror").promote(root / "run")
    except CkptError as error:
        # A promotion that failed behind its launch has taken effect, and the next one says so.
        if error.code != Code.HOMES_DIVERGED:
            raise
    launches = [
        {path.name for path in (root / run / "launches").glob("*.json")}
        for run in ("run", "mirror")
    ]
    assert launches[0] < launches[1], f"silent: no launch at the mirror: {launches}"


def _compact(root: pathlib.Path, told: Told) -> None:
    report = api.compact(root / "run", take_over=True)
    assert report.step == 3, f"older: step {report.step} was compacted"
    told[f"run/{pathlib.Path(report.path).name}"] = 3


def _compact_out(root: pathlib.Path, told: Told) -> None:
    if not (root / "full" / "manifest.json").exists():
        api.compact(root / "run", out=root / "full")
    told["full"] = 3


def _launch(**options: Any) -> Callable[[pathlib.Path, Told], None]:
    def act(root: pathlib.Path, told: Told) -> None:
        train(root / "run", told, **options)

    return act


def _launch_with_cache(root: pathlib.Path, told: Told) -> None:
    train(root / "run", told, count=1, keep=2, copies=[ckptfmt.Cache(root / "cache")])


def _launch_with_mirror(root: pathlib.Path, told: Told) -> None:
    train(root / "run", told, count=1, copies=[ckptfmt.Mirror(root / "mirror")])


SCENES: Final[dict[str, Scene]] = {
    "first launch": Scene(prepare=lambda _: {}, act=_launch(count=1)),
    "resume": Scene(prepare=prepare_run, act=_launch(keep=2, count=1), keep=2),
    "delta saves": Scene(
        prepare=lambda root: prepare_run(root, delta=_DELTAS),
        act=_launch(delta=_DELTAS, count=2),
    ),
    "launch with cache": Scene(prepare=prepare_run, act=_launch_with_cache, keep=2),
    "launch with mirror": Scene(prepare=prepare_run, act=_launch_with_mirror),
    "save alone": Scene(prepare=lambda _: {}, act=_save_alone),
    "large save": Scene(
        prepare=lambda _: {}, act=lambda root, told: _save_alone(root, told, large=True)
    ),
    "load": Scene(prepare=prepare_run, act=_load),
    "load of deltas": Scene(prepare=lambda root: prepare_run(root, delta=_DELTAS), act=_load),
    "open": Scene(prepare=prepare_run, act=_open),
    "validate": Scene(
        prepare=lambda root: prepare_run(root, delta=_DELTAS, torn=False), act=_validate
    ),
    "list": Scene(prepare=prepare_run, act=_list),
    "gc": Scene(prepare=prepare_run, act=_collect_garbage, keep=1),
    "delete": Scene(prepare=prepare_run, act=_delete, gone=frozenset({1})),
    "labels": Scene(prepare=prepare_run, act=_label),
    "mirror": Scene(prepare=prepare_run, act=_mirror),
    "repair": Scene(prepare=lambda root: _prepare_mirrored(root, damaged=True), act=_repair),
    "promote": Scene(prepare=_prepare_mirrored, act=_promote),
    "compact": Scene(prepare=lambda root: prepare_run(root, delta=_DELTAS), act=_compact),
    "compact out": Scene(prepare=lambda root: prepare_run(root, delta=_DELTAS), act=_compact_out),
}


# --- judgement ------------------------------------------------------------------------------------


def _find_problem(path: pathlib.Path, step: int) -> str:
    """Return what is wrong with a checkpoint; empty if it validates and loads exactly."""
    try:
        report = ckptfmt.validate(path)
        if report.violations:
            return str(report.violations[0])
        return "" if is_exact(ckptfmt.load(path, framework="numpy"), step) else INEXACT
    except CkptError as error:
        return str(error)


class Judge:
    """Judges directories of checkpoints; remembers the verdict on equal bytes.

    A checkpoint without files of a delta is equal if its own files are; else the whole run counts.
    """

    def __init__(self) -> None:
        self._verdicts: dict[object, str] = {}

    def verdict(self, path: pathlib.Path, step: int) -> str:
        """Return what is wrong with a checkpoint; empty if it validates and loads exactly."""
        whole = path if b'"references":[]' in _manifest(path) else path.parent
        key = (path.name, step, _digest(whole))
        if key not in self._verdicts:
            self._verdicts[key] = _find_problem(path, step)
        return self._verdicts[key]

    def find_silent(self, root: pathlib.Path) -> Iterator[str]:
        """Yield which directories of the tree load what nobody saved."""
        for path in sorted(root.rglob("step-*")):
            parsed = parse_checkpoint_name(path.name)
            if parsed and "cache" not in path.parts and self.verdict(path, parsed[0]) == INEXACT:
                yield f"silent: {path.name} loads what nobody saved"

    def find_lost(self, root: pathlib.Path, scene: Scene, told: Told) -> Iterator[str]:
        """Yield which acknowledged checkpoints are lost."""
        for name, step in told.items():
            problem = self.verdict(root / name, step)
            if not problem or step in scene.gone:
                continue
            newer = 0
            for path in (root / name.partition("/")[0]).glob("step-*"):
                parsed = parse_checkpoint_name(path.name)
                if parsed is not None and parsed[0] > step:
                    newer += not self.verdict(path, parsed[0])
            if scene.keep is None or newer < scene.keep:
                yield f"lost: {name} was acknowledged: {problem}"


def _manifest(path: pathlib.Path) -> bytes:
    try:
        return (path / "manifest.json").read_bytes()
    except OSError:
        return b""


def _digest(path: pathlib.Path) -> bytes:
    total = hashlib.sha256()
    for folder, _, names in sorted(os.walk(path)):
        for name in sorted(names):
            content = pathlib.Path(folder, name).read_bytes()
            total.update(f"{folder[len(str(path)) :]}/{name} {len(content)}\n".encode() + content)
    return total.digest()


def _list_leftovers(root: pathlib.Path) -> list[str]:
    """Return the unfinished files in directories of checkpoints that take space of their own.

    A temporary file beside the records of a run is as small as a record, and may stay.
    """
    return [
        path.relative_to(root).as_posix()
        for path in root.rglob("step-*/**/.tmp-*")
        if path.stat().st_nlink == 1
    ]


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Raise Hang in this thread after `HANG_S`."""

    def hang(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def do(scene: Scene, root: pathlib.Path, told: Told) -> tuple[str, str]:
    """Do an operation; return ``ok`` or the code of its error, and what is wrong with its end."""
    try:
        with _ending():
            scene.act(root, told)
    except CkptError as error:
        problem = "" if error.code in Code else "unnamed"
        if error.code == Code.ARGUMENT:
            problem = f"blamed: {error}"
        if isinstance(error, IntegrityError) and "can't be read: STORE_" not in error.detail:
            problem = f"blamed: {error}"
        return str(error.code), problem
    except AssertionError as error:
        return "wrong", str(error)
    except Hang:
        return "hang", "hang"
    except Exception as error:  # noqa: BLE001
        return "untyped", f"untyped: {error!r}"
    return "ok", ""


@dataclasses.dataclass(slots=True)
class Report:
    """What a campaign did and found.

    Attributes:
        scenes: for each operation, its number of calls.
        fault_count: how many faults were injected: operations in which a call failed.
        failed_count: how many calls failed in all.
        outcomes: how often each end came; ``ok`` for an exact result.
        problems: what was found, with the scene and the fault.
        longest_s: seconds of the longest operation, and which it was.
    """

    scenes: dict[str, int] = dataclasses.field(default_factory=dict)
    fault_count: int = 0
    failed_count: int = 0
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problems: list[str] = dataclasses.field(default_factory=list)
    longest_s: float = 0.0
    longest_at: str = ""

    def as_json(self) -> dict[str, object]:
        """Return the report as a JSON-ready mapping."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {
            "outcomes": dict(self.outcomes)
        }

    def __str__(self) -> str:
        return (
            f"{len(self.scenes)} operations, {sum(self.scenes.values())} calls,"
            f" {self.fault_count} faults, {self.failed_count} failed calls;"
            f" {self.outcomes['ok']} succeeded exactly,"
            f" {self.fault_count - self.outcomes['ok']} raised a named error;"
            f" {len(self.problems)} violations; the longest took {self.longest_s:.1f} s"
            f" ({self.longest_at})"
        )


def _await_savers() -> None:
    """Wait for the savers of launches that ended with SAVE_PENDING: their saves go on."""
    for thread in threading.enumerate():
        if thread.name.startswith("ckptfmt-saver"):
            thread.join(HANG_S)


class Campaign:
    """Runs scenes in a directory of its own.

    Args:
        directory: an empty directory.
        calls: the calls of this process.
    """

    def __init__(self, directory: pathlib.Path, calls: FailingCalls) -> None:
        self._directory = directory
        self._calls = calls
        self._numbers = itertools.count()
        self._judge = Judge()
        self.report = Report()

    def run(
        self,
        name: str,
        *,
        sample: int | None,
        every_error: bool,
        only: Container[str],
        rng: random.Random,
    ) -> None:
        """Inject the faults into a scene, or a sample of the faults; `only` names the calls."""
        scene = SCENES[name]
        start = self._directory / f"start-{next(self._numbers)}"
        start.mkdir()
        told = scene.prepare(start)
        made = self._live(name, scene, start, told, None)
        faults = [
            fault
            for fault in list_faults(made, every_error=every_error)
            if made[fault.number - 1] in only
        ]
        self.report.scenes[name] = len(made)
        if sample is not None:
            faults = rng.sample(faults, min(sample, len(faults)))
        for fault in faults:
            self._live(name, scene, start, told, fault)
        shutil.rmtree(start)

    def _live(
        self, name: str, scene: Scene, start: pathlib.Path, told: Told, fault: Fault | None
    ) -> list[str]:
        """Do an operation with a fault, judge, do it again without, and judge; return the calls."""
        root = self._directory / f"life-{next(self._numbers)}"
        shutil.copytree(start, root)
        told = dict(told)
        fd_count = open_fd_count()
        self._calls.start(fault)
        begin_s = time.monotonic()
        outcome, problem = do(scene, root, told)
        elapsed_s = time.monotonic() - begin_s
        made, failed = self._calls.made, self._calls.failed
        self._calls.start(None)
        found = [problem] if problem else []
        if fault is None:
            assert outcome == "ok", (name, outcome, problem)
        found += self._judge.find_lost(root, scene, told)
        found += self._judge.find_silent(root)
        again, problem = do(scene, root, told)
        if again != "ok":
            found.append(f"stuck: the operation again: {again} {problem}")
        found += self._judge.find_lost(root, scene, told)
        found += self._judge.find_silent(root)
        if name in ("resume", "first launch") and (left := _list_leftovers(root)):
            found.append(f"left: {left}")
        _await_savers()
        if open_fd_count() > fd_count:
            found.append("a descriptor was left open")
        if fault is not None and failed:
            self._note(name, fault, failed, outcome, elapsed_s)
        self.report.problems += [f"{name}, {fault}, at {failed[:1]}: {each}" for each in found]
        shutil.rmtree(root)
        return made

    def _note(
        self, name: str, fault: Fault, failed: Sequence[str], outcome: str, elapsed_s: float
    ) -> None:
        report = self.report
        report.fault_count += 1
        report.failed_count += len(failed)
        report.outcomes[outcome] += 1
        if elapsed_s > report.longest_s:
            report.longest_s, report.longest_at = elapsed_s, f"{name}, {fault}"


def run_campaign(
    names: Sequence[str],
    *,
    sample: int | None = None,
    every_error: bool = False,
    only: Container[str] = ERRORS,
    seed: int = 0,
) -> Report:
    """Run scenes, each with all faults or a sample of them; see `list_faults`.

    Args:
        names: of the scenes.
        sample: the number of faults of each scene; None for all.
        every_error: as in `list_faults`.
        only: the names of the calls that fail first.
        seed: of the sample.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-calls-") as directory:
        root = pathlib.Path(directory)
        with failing_calls(root) as calls:
            campaign = Campaign(root, calls)
            for name in names:
                campaign.run(name, sample=sample, every_error=every_error, only=only, rng=rng)
    return campaign.report


def main() -> int:
    """Run from the command line; the last line is the report, as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.every_call", description=__doc__)
    parser.add_argument("--only", choices=SCENES, action="append")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--every-error", action="store_true", help="each call with each error")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    whole = Report()
    for name in arguments.only or SCENES:
        begin_s = time.monotonic()
        report = run_campaign(
            [name],
            sample=arguments.sample,
            every_error=arguments.every_error,
            seed=arguments.seed,
        )
        sys.stdout.write(f"{name}: {report}; {time.monotonic() - begin_s:.0f} s\n")
        sys.stdout.write("".join(f"  {problem}\n" for problem in report.problems[:10]))
        sys.stdout.flush()
        whole.scenes |= report.scenes
        whole.fault_count += report.fault_count
        whole.failed_count += report.failed_count
        whole.outcomes += report.outcomes
        whole.problems += report.problems
        if report.longest_s > whole.longest_s:
            whole.longest_s, whole.longest_at = report.longest_s, report.longest_at
    sys.stdout.write(f"{whole}\n{json.dumps(whole.as_json())}\n")
    return 1 if whole.problems else 0


if __name__ == "__main__":
    sys.exit(main())

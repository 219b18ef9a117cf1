"""Faults inside the processes of a job. Python imports this module at start, from the search path.

A file in the directory that an environment variable names arms a fault. A process takes a fault
that strikes once by renaming its file. Calls on files outside of the run are unaffected. This
module imports only modules that Python has already imported at start.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

_ARMED = os.environ.get("CKPTFMT_CHAOS_INSIDE", "")
_RUN = os.environ.get("CKPTFMT_CHAOS_RUN", "")


def _is_armed(name: str) -> bool:
    return _exists(f"{_ARMED}/{name}")


def _take(name: str) -> bool:
    """Return whether this process has taken a fault that strikes once."""
    try:
        os.rename(f"{_ARMED}/{name}", f"{_ARMED}/{name}.struck.{os.getpid()}.{time.monotonic_ns()}")
    except OSError:
        return False
    return True


_exists = os.path.exists


def _is_of_run(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(_RUN)
    except OSError:
        return False


def _before_write() -> None:
    """Apply the armed faults due before a write."""
    if _is_armed("slow"):
        time.sleep(0.2)
    if _is_armed("full"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if _is_armed("fail"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    if _take("kill-write"):
        os.kill(os.getpid(), signal.SIGKILL)


def _wrong(data: Any) -> memoryview:
    """Return a copy of data with a flipped bit, aligned to pages as direct I/O needs."""
    import mmap

    view = memoryview(data).cast("B")
    copy = mmap.mmap(-1, len(view))
    copy[:] = view.tobytes()
    copy[len(view) // 2] ^= 0x10
    return memoryview(copy)


def _patch_write(name: str) -> None:
    original = getattr(os, name)

    def write(fd: int, data: Any, *rest: Any) -> int:
        if not _is_of_run(fd):
            return int(original(fd, data, *rest))
        _before_write()
        nbytes = memoryview(data).nbytes
        if nbytes >= 64:
            if _take("flip"):
                return int(original(fd, _wrong(data), *rest))
            if _take("lose"):
                return nbytes
            if _take("short"):
                return int(
                    original(
                        fd, memoryview(data).cast("B")[: nbytes // 2 // 512 * 512 or nbytes], *rest
                    )
                )
        return int(original(fd, data, *rest))

    setattr(os, name, write)


def _patch_fsync() -> None:
    original = os.fsync

    def fsync(fd: int) -> None:
        if _is_of_run(fd):
            if _take("kill-fsync"):
                os.kill(os.getpid(), signal.SIGKILL)
            if _take("fsync-fail"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(fd)

    setattr(os, "fsync", fsync)


def _patch_link() -> None:
    original = os.link

    def link(source: Any, target: Any, **options: Any) -> None:
        directory = options.get("dst_dir_fd")
        if directory is None or not _is_of_run(directory):
            original(source, target, **options)
            return
        if _take("kill-link"):
            os.kill(os.getpid(), signal.SIGKILL)
        original(source, target, **options)
        if _take("link-unknown"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if _take("kill-linked"):
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, "link", link)


def _patch_clock() -> None:
    seconds = time.time
    nanoseconds = time.time_ns

    def jump() -> float:
        if not _is_armed("clock"):
            return 0.0
        try:
            with open(f"{_ARMED}/clock", encoding="utf-8") as file:
                return float(file.read() or 0)
        except OSError:
            return 0.0

    time.time = lambda: seconds() + jump()
    time.time_ns = lambda: nanoseconds() + int(jump() * 1e9)


def _hook_optimizers(module: Any) -> None:
    """Register hooks for armed faults in the steps of all optimizers of this process."""

    def before(optimizer: Any, *_: Any) -> None:
        if _take("raise"):
            raise RuntimeError("an injected error: device-side assert triggered")
        if _take("nan"):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.fill_(float("nan"))

    def after(optimizer: Any, *_: Any) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        if _take("flip-weight"):
            _flip(parameter)
        if _take("flip-moment"):
            _flip(optimizer.state[parameter]["exp_avg"])

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)


def _flip(tensor: Any) -> None:
    import torch

    tensor.detach().view(-1).view(torch.int32)[0] ^= 1 << 18


class _AfterImport:
    """An import hook that calls a function with a module after the module's import."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                self._then(module)

            setattr(spec.loader, "exec_module", exec_module)
        return spec


if _ARMED and _RUN:
    for _name in ("write", "pwrite"):
        _patch_write(_name)
    _patch_fsync()
    _patch_link()
    _patch_clock()
    if "RANK" in os.environ:
        sys.meta_path.insert(0, _AfterImport("torch.optim.optimizer", _hook_optimizers))

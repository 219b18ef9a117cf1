"""What the tests of stores share: odd file systems, short ways to ask, and scripts in processes of their own."""

import contextlib
import errno
import os
import pathlib
import subprocess
import sys

from ckptfmt.errors import CkptError
from ckptfmt.store.posix import PosixCalls

# In memory: fsync costs nothing there, and it is a second kind of file system besides.
FAST_DIRECTORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
ROOT = pathlib.Path(__file__).resolve().parents[2]


class NoLinkCalls(PosixCalls):
    """A file system without hard links."""

    def link(self, *_):
        raise OSError(errno.EPERM, "no hard links here")


def code_of(action):
    """Return the code of the error that `action` raises, or "ok"."""
    try:
        action()
    except CkptError as error:
        return str(error.code)
    return "ok"


def outcome_of(action):
    """Return what `action` returns, or the code of the error that it raises."""
    try:
        return action()
    except CkptError as error:
        return error.code


def temporaries(root):
    """Return the names of unfinished files anywhere below `root`."""
    return [name for _, _, names in os.walk(root) for name in names if name.startswith(".tmp-")]


def open_fd_count():
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def no_fd_leak():
    before = open_fd_count()
    yield
    assert open_fd_count() == before, "a descriptor was left open"


def python(script, *arguments, prefix=()):
    """Start `script` in a new interpreter."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(script, *arguments, prefix=()):
    """Run `script` to its end; return what it printed."""
    with python(script, *arguments, prefix=prefix) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output

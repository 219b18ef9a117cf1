"""What a process has of slots, for tests and for the scripts that they run."""

import contextlib
import os
import pathlib


def mappings():
    """Return the lines of this process's memory map that are slots."""
    return [
        line
        for line in pathlib.Path("/proc/self/maps").read_text("utf-8").splitlines()
        if "memfd:ckptfmt" in line
    ]


def descriptors():
    """Return what this process's descriptors of slots point to."""
    targets = []
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(FileNotFoundError):  # the one that listed is gone
            targets.append(os.readlink(f"/proc/self/fd/{entry}"))  # noqa: PTH115
    return [target for target in targets if "memfd:ckptfmt" in target]


def forked(body):
    """Run `body` in a process forked from this one; fail if it fails."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException as error:  # noqa: BLE001
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the forked process ended with {status}"

"""Where nothing can be cold: what these tests need of kernel and file system, and what they do without."""

import errno

import pytest

from benchmarks.cold import cached_nbytes
from benchmarks.machine import file_system_of


def skip_unless_cold(directory):
    """Skip a test where files are memory, or where the kernel doesn't tell which of their pages are."""
    if file_system_of(directory)[0] in ("tmpfs", "ramfs"):
        pytest.skip("files are memory here")
    file = directory / "asked"
    file.write_bytes(b"x")
    try:
        cached_nbytes([file])
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
            raise
        pytest.skip("this kernel has no cachestat(2)")
    finally:
        file.unlink()

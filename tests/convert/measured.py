"""Convert in this process, and say how much anonymous memory it took at its peak, beyond what it had at its start.

``python -m tests.convert.measured SOURCE TARGET OPTION...`` prints one number, in bytes. Memory that is mapped
from files isn't counted: the kernel takes it back whenever it likes.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
import time
from pathlib import Path


def anonymous_nbytes() -> int:
    """Return how much memory of this process no file stands behind, shared memory included."""
    text = Path("/proc/self/status").read_text("ascii")
    return sum(int(kib) << 10 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", text, re.MULTILINE))


def measure(argv: list[str]) -> int:
    """Convert, and return the peak beyond the start."""
    import torch.distributed.checkpoint  # noqa: F401, PLC0415 - what a program weighs by itself is not the point

    import ckptfmt.convert.torch_targets  # noqa: F401, PLC0415
    from ckptfmt.__main__ import main  # noqa: PLC0415

    before, peak, ended = anonymous_nbytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            peak[0] = max(peak[0], anonymous_nbytes())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = main(["convert", *argv])
    finally:
        ended.set()
        watcher.join()
    if code:
        sys.exit(code)
    return peak[0] - before


if __name__ == "__main__":
    sys.stdout.write(f"{measure(sys.argv[1:])}\n")

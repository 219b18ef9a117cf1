"""Convert in a fork, and say how much anonymous memory it took at its peak, beyond what it had at its start.

Memory that is mapped from files isn't counted: the kernel takes it back whenever it likes.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import threading
import time
import warnings
from pathlib import Path

from tests.forks import settle


def anonymous_nbytes() -> int:
    """Return how much memory of this process no file stands behind, shared memory included."""
    text = Path("/proc/self/status").read_text("ascii")
    return sum(
        int(kib) << 10 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", text, re.MULTILINE)
    )


def measure(argv: list[str]) -> int:
    """Convert, and return the peak beyond the start."""
    import torch.distributed.checkpoint  # noqa: F401, PLC0415

    import ckptfmt_tools.convert.torch_targets  # noqa: F401, PLC0415
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


def convert(variables: dict[str, str], output: str, peak: str, argv: list[str]) -> None:
    """Convert in this fork, and write the peak into a file, in bytes."""
    settle(variables, output)
    Path(peak).write_text(json.dumps(measure(argv)))


def make(variables: dict[str, str], output: str, directory: str) -> None:
    """Write what is converted, with torch.save and with DCP."""
    settle(variables, output)
    import torch  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    torch.manual_seed(0)
    model = {
        "large": torch.randint(-(2**31), 2**31 - 1, (56_000, 1_000), dtype=torch.int32).view(
            torch.float32
        )
    }
    model |= {f"small.{number}": torch.full((2_621_440,), float(number)) for number in range(5)}
    warnings.simplefilter("ignore")
    torch.save({"model": model}, f"{directory}/a.pt")
    save({"model": model}, checkpoint_id=f"{directory}/a.dcp", no_dist=True)

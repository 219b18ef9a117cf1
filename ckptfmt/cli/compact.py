"""``compact``: convert a delta into a full checkpoint, outside of a run or as its run's newest."""

from __future__ import annotations

import argparse
import dataclasses
import time

from ckptfmt.api import FULL_ALREADY, compact, open_checkpoint
from ckptfmt.cli.console import Console, Progress, bytes_text, clean, print_json
from ckptfmt.errors import CkptError


def run(arguments: argparse.Namespace) -> int:
    """Write a delta as a full checkpoint, print the result, and return the exit code.

    Raises: CkptError of any kind; then no checkpoint was committed.
    """
    path = arguments.path
    take_over = arguments.take_over

    def total_nbytes() -> int | None:
        """Return the number of bytes to write; None in a run, where the verification adds more."""
        try:
            return None if take_over else open_checkpoint(path).manifest.nbytes
        except CkptError:
            return None

    begin_s = time.perf_counter()
    with Progress(total_nbytes, quiet=False) as progress:
        report = compact(
            path,
            out=arguments.out,
            take_over=take_over,
            bases=arguments.bases,
            on_progress=progress.advance,
            sign=arguments.sign,
        )
    elapsed_s = time.perf_counter() - begin_s
    if arguments.json:
        checked = "registers" if report.reason == FULL_ALREADY else "bytes"
        print_json(
            {
                "source": path,
                "checked": checked,
                **dataclasses.asdict(report),
                "elapsed_s": round(elapsed_s, 6),
            }
        )
        return 0
    console = Console()
    if report.reason == FULL_ALREADY:
        console.line(("full already", "green bold"), f"  {clean(report.path)}: nothing was written")
        console.line(
            (
                "  According to the manifest; the bytes were not read: validate checks them.",
                "dim",
            )
        )
        return 0
    done = f"step {report.step}, {bytes_text(report.nbytes)} in {elapsed_s:.2f} s"
    console.line(("compacted", "green bold"), f"  {clean(path)} to {clean(report.path)}: {done}")
    console.line(("  Every block was compared with its digest before the write.", "dim"))
    if take_over:
        console.line(
            (
                (
                    "  The run goes on from the compacted checkpoint; a later clean-up deletes the"
                    " chain of deltas."
                ),
                "dim",
            )
        )
    return 0

"""``goodput``: the time of a run by use, over all launches."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from ckptfmt.cli.console import Console, clean, count_text, print_json
from ckptfmt.cli.places import open_run_place
from ckptfmt.run.accounts import Goodput
from ckptfmt.run.spent_time import read_goodput
from ckptfmt_tools.cli.waste import seconds_text

#: The meaning of the training time if a launch has no ledger.
_UNMEASURED: Final = (
    "from the first save to the last one of launches without a ledger; the cost of saves is"
    " included"
)
#: The meanings of the members of `Goodput.times_s`.
_MEANINGS: Final = {
    "training": "training that counts",
    "blocked": "training stood still for saves",
    "lost": "steps beside saves were slower",
    "redone": "training that was thrown away, with its saves",
    "initialising": "from the start of the process to the first step",
    "restoring": "choosing, verifying and loading a checkpoint",
    "waiting": "for saves of earlier launches",
    "down": "between launches",
    "unknown": "thrown away or between launches: no record tells",
}


def run(arguments: argparse.Namespace) -> int:
    """Print the time of a run by use, and return the exit code.

    Raises: StateError(ARGUMENT), IntegrityError(FILE_MISSING), StoreError; the error of an
        unreadable launch record.
    """
    place = open_run_place(arguments.path)
    goodput = read_goodput(place.store)
    if arguments.json:
        print_json({"kind": "goodput", "target": place.path, **goodput.as_json()})
        return 0
    console = Console()
    launches = count_text(goodput.launch_count, "launch", "launches")
    console.line((clean(place.path), "bold"), f"  {launches}, goodput {goodput_text(goodput)}")
    console.table(time_rows(goodput), right=(1, 2), indent=0)
    if line := simulate_line(goodput):
        console.line()
        console.line((line, "dim"))
    for doubt in goodput.doubts:
        console.line()
        console.line(("not known: ", "yellow"), clean(doubt))
    return 0


def goodput_text(goodput: Goodput) -> str:
    """Return the share of effective training in the time; the reason if the share is unknown."""
    if goodput.goodput is not None:
        return f"{goodput.goodput:.1%}".replace("%", " %")
    if goodput.unmeasured_count:
        return "unknown: no ledger was kept; Checkpointer(ledger=True) keeps one"
    return "unknown"


def time_rows(goodput: Goodput) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, time, share and meaning of each use of time, and the sum as the last row."""
    elapsed_s = goodput.elapsed_s
    if not elapsed_s:
        yield "", "", "", "no record says when the run trained"
        return
    is_known = not goodput.unmeasured_count
    for name, seconds in goodput.times_s.items():
        if seconds or name == "training":
            share = f"{seconds / elapsed_s:.2%}".replace("%", " %") if is_known else ""
            meaning = _MEANINGS[name] if is_known or name != "training" else _UNMEASURED
            yield name, seconds_text(seconds), share, meaning
    yield "in all", seconds_text(elapsed_s), "", count_text(goodput.save_count, "save")


def simulate_line(goodput: Goodput) -> str:
    """Return the command that simulates a run with this run's costs; empty if a cost is unknown."""
    costs = goodput.costs
    named = (
        ("lost", costs.lost_s),
        ("commit", costs.commit_s),
        ("restore", costs.restore_s),
        ("mtbf", costs.mtbf_s),
    )
    if costs.interval_s is None or any(seconds is None for _, seconds in named):
        return ""
    options = " ".join(f"--{name} {seconds:.4g}" for name, seconds in named)
    return f"ckptfmt simulate {options} --every {costs.interval_s:.4g}"

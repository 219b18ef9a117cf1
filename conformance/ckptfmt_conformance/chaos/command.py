"""``python -m ckptfmt_conformance chaos``: a campaign of faults from a shell."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ckptfmt_conformance.chaos.campaign import Campaign, Verdict
from ckptfmt_conformance.chaos.kinds import KINDS, Kind
from ckptfmt_conformance.chaos.nodes import network_problem
from ckptfmt_conformance.chaos.report import as_run, dump_json, sum_of, text_of
from ckptfmt_conformance.errors import SuiteError
from ckptfmt_conformance.page import dump_html
from ckptfmt_conformance.reports import dump_junit

__all__ = ["add_parser"]

_REFERENCE: Final = (sys.executable, "-m", "ckptfmt_conformance.adapters.chaos_job")


def add_parser(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "chaos",
        help="break a live training job on purpose, again and again",
        description="Train under torchrun on this machine, inject faults, and compare every"
        " checkpoint with that of "
        "an undisturbed run. Exit code 0: all that is promised was kept; 1: something wasn't; 2:"
        " it couldn't be run.",
    )
    parser.add_argument(
        "--adapter", metavar="COMMAND", help="`reference`, or the command line of a training job"
    )
    parser.add_argument(
        "--count", type=int, default=len(KINDS), metavar="N", help="how many injections"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="M", help="inject nothing after so long"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn")
    parser.add_argument(
        "--filter", action="append", default=[], metavar="GLOB", help="only kinds whose name fits"
    )
    parser.add_argument(
        "--nodes", type=int, default=2, metavar="N", help="nodes, with one process each (2)"
    )
    parser.add_argument(
        "--no-network",
        action="store_true",
        help="no network for each node, and no kind that needs it",
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=0.05,
        metavar="S",
        help="seconds that the job rests after a step",
    )
    parser.add_argument(
        "--timeout", type=float, default=180.0, metavar="S", help="seconds that a recovery may take"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="a new folder in which runs and logs stay"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a report for programs")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write a report as JUnit XML")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report as one page")
    parser.add_argument(
        "--sum", type=Path, nargs="+", metavar="FILE", help="only sum what --json wrote"
    )
    parser.add_argument("--list", action="store_true", help="only list the kinds")
    parser.set_defaults(command=_chaos)


def _chaos(arguments: argparse.Namespace) -> int:
    if arguments.sum:
        print(sum_of([json.loads(path.read_text("utf-8")) for path in arguments.sum]))
        return 0
    kinds = [
        kind
        for kind in KINDS
        if not arguments.filter
        or any(fnmatch.fnmatch(kind.name, glob) for glob in arguments.filter)
    ]
    if arguments.list:
        for kind in kinds:
            print(f"{kind.name:32} {kind.phase:9} {kind.does}")
        return 0
    problem = "" if arguments.no_network else network_problem()
    if arguments.no_network or problem:
        left_out = [kind.name for kind in kinds if kind.needs_network]
        kinds = [kind for kind in kinds if not kind.needs_network]
        if problem and left_out:
            print(f"left out: {', '.join(left_out)}: {problem}", file=sys.stderr)
    if arguments.adapter is None or not kinds:
        raise SuiteError(
            "there is no job, or no kind of fault",
            remedy="Give --adapter; `chaos --list` lists the kinds.",
        )
    adapter = (
        _REFERENCE if arguments.adapter == "reference" else tuple(shlex.split(arguments.adapter))
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    begin_s = time.monotonic()
    verdicts = _run(arguments, adapter, kinds, is_network=not arguments.no_network and not problem)
    seconds = time.monotonic() - begin_s
    print(text_of(verdicts, seed=arguments.seed, seconds=seconds))
    options = {
        "adapter": arguments.adapter,
        "nodes": arguments.nodes,
        "network": not problem,
        "pace_s": arguments.pace,
    }
    run = as_run(verdicts, adapter=arguments.adapter, seed=arguments.seed, seconds=seconds)
    if arguments.json is not None:
        arguments.json.write_text(
            dump_json(verdicts, seed=arguments.seed, seconds=seconds, options=options), "utf-8"
        )
    if arguments.junit is not None:
        arguments.junit.write_text(dump_junit(run), "utf-8")
    if arguments.html is not None:
        arguments.html.write_text(dump_html(run), "utf-8")
    return 0 if all(verdict.is_kept for verdict in verdicts) and verdicts else 1


def _interrupt(*_: object) -> None:
    """End the campaign by KeyboardInterrupt, and ignore further signals.

    Processes, networks and files are then removed without another interruption.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(
    arguments: argparse.Namespace,
    adapter: Sequence[str],
    kinds: Sequence[Kind],
    *,
    is_network: bool,
) -> list[Verdict]:
    def tell(verdict: Verdict) -> None:
        how = (
            f"{verdict.seconds:.1f} s, {verdict.steps_lost} steps lost"
            if verdict.recovered
            else verdict.message
        )
        print(
            f"{verdict.index:4} {verdict.kind.name:32} {verdict.victim}: {how}",
            file=sys.stderr,
            flush=True,
        )

    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        directory = arguments.keep or Path(temporary) / "campaign"
        directory.mkdir(parents=True)
        campaign = Campaign(
            adapter,
            kinds,
            seed=arguments.seed,
            node_count=arguments.nodes,
            is_network=is_network,
            directory=directory.resolve(),
            pace_s=arguments.pace,
            timeout_s=arguments.timeout,
            on_verdict=tell,
        )
        return campaign.run(arguments.count, within_s=60 * arguments.minutes)

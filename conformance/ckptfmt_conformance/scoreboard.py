"""Put the neutral cases to all peers, and write what each of them does as a table.

python -m ckptfmt_conformance.scoreboard --out conformance/SCOREBOARD.md
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import json
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ckptfmt_conformance.neutral import Description, NeutralCase, Result

__all__ = ["PEERS", "main", "render"]

_PACKAGE: Final = "ckptfmt_conformance.adapters.peers"
#: The default peers.
PEERS: Final = (
    f"{_PACKAGE}.torch_save:TorchSave",
    f"{_PACKAGE}.safetensors_file:SafetensorsFile",
    f"{_PACKAGE}.dcp:Dcp",
    f"{_PACKAGE}.ckptfmt_peer:Ckptfmt",
)
_CELLS: Final = {
    "PASS": "PASS",
    "FAIL": "**FAIL**",
    "UNSUPPORTED": "unsupported",
    "SKIPPED": "skipped",
}
_HEAD: Final = """# Checkpoint libraries under the same cases

A run on {date} generated this page; don't edit the page by hand.
To run the cases again with the installed versions, enter
`python -m ckptfmt_conformance.scoreboard --out SCOREBOARD.md`.
To add a library, write a class of three methods and pass `--peer package.module:Class`.
`ckptfmt_conformance/neutral/peer.py` describes the methods.

The cases know no format: they save, load, damage files, change tensors, kill processes, and
compare bytes.
PASS: the result is as the case requires.
FAIL: a load returned other bytes without an error, saved data is lost, or a valid call raised.
Unsupported: the library refuses with an error or documents the limit; the case counts against no
library.
Skipped: the case doesn't apply.
Error: the process died or didn't end.
No times are measured; counts depend only on versions, except for the moments of kills.
"""


def render(
    results: Sequence[Result],
    peers: dict[str, Description],
    cases: Sequence[NeutralCase],
    *,
    date: str,
) -> str:
    """Return the page.

    Args:
        results: the results of all peers and cases.
        peers: each peer's own description, by name.
        cases: the cases in the order of the table.
        date: the date of the run.
    """
    by_place = {(result.case, result.peer): result for result in results}
    lines = [_HEAD.format(date=date), "| Library | Version | Use in this run |", "|---|---|---|"]
    lines += [f"| {said.name} | {said.version} | {said.settings} |" for said in peers.values()]
    lines += [
        "",
        f"Python {platform.python_version()} on {platform.system()}, torch {_version('torch')}.",
        "",
    ]
    lines += [
        "## At a glance",
        "",
        "| Case | " + " | ".join(said.name for said in peers.values()) + " |",
    ]
    lines.append("|---" * (len(peers) + 1) + "|")
    for case in cases:
        statuses = [by_place[case.id, name].status.value for name in peers]
        cells = " | ".join(_cell(status) for status in statuses)
        lines.append(f"| [{case.id}](#{_anchor(case.id)}) | {cells} |")
    counts = [Counter(by_place[case.id, name].status.value for case in cases) for name in peers]
    lines.append(
        f"| PASS of {len(cases)}; FAIL | "
        + " | ".join(f"{c['PASS']}; {c['FAIL']}" for c in counts)
        + " |"
    )
    lines += ["", "## What was seen", ""]
    for case in cases:
        lines += [
            f"### {case.id}",
            "",
            case.asked,
            "",
            f"- PASS: {case.passes}",
            f"- FAIL: {case.fails}",
        ]
        lines += [f"- Unsupported: {case.unsupported}", "", "| Library | | Seen |", "|---|---|---|"]
        seen: dict[str, list[str]] = {}  # peers with the same observation share a row
        for name, said in peers.items():
            seen.setdefault(_seen(by_place[case.id, name]), []).append(said.name)
        lines += [f"| {', '.join(names)} | {text} |" for text, names in seen.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _anchor(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum() or letter == "-")


def _cell(status: str) -> str:
    return _CELLS.get(status, f"**{status}**")


def _seen(result: Result) -> str:
    said = f"{result.seen}. {result.remark}" if result.remark else result.seen
    return f"{_cell(result.status.value)} | {said.replace('|', '&#124;')}"


def _version(name: str) -> str:
    from importlib.metadata import version  # noqa: PLC0415 - slow to import, and needed once

    return version(name).partition("+")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Return the exit code: 0 written, 2 couldn't run."""
    parser = argparse.ArgumentParser(
        prog="python -m ckptfmt_conformance.scoreboard", description=__doc__
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME",
        help="package.module:Class, besides ours",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there, too")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the page there; else to standard output"
    )
    parser.add_argument("--quick", action="store_true", help="try less of everything")
    arguments = parser.parse_args(argv)
    missing = [
        name
        for name in ("torch", "safetensors", "ckptfmt")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        print(
            f"scoreboard: {missing[0]} isn't installed: pip install {' '.join(missing)}",
            file=sys.stderr,
        )
        return 2
    try:
        page, document = _run([*PEERS, *arguments.peer], is_quick=arguments.quick)
        if arguments.json is not None:
            arguments.json.write_text(
                json.dumps(document, indent=2, sort_keys=True) + "\n", "utf-8"
            )
        if arguments.out is not None:
            arguments.out.write_text(page, "utf-8")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"scoreboard: {error}", file=sys.stderr)
        return 2
    if arguments.out is None:
        print(page, end="")
    return 0


def _run(names: Sequence[str], *, is_quick: bool) -> tuple[str, dict[str, object]]:
    from ckptfmt_conformance import neutral  # noqa: PLC0415 - the module imports torch

    peers = {name: neutral.find_peer(name).describe() for name in names}
    plan = [(name, [case.id for case in neutral.CASES]) for name in peers]
    results = []
    for result in neutral.judge(plan, effort=neutral.QUICK if is_quick else neutral.FULL):
        if sys.stderr.isatty():
            print(f"{peers[result.peer].name}: {result.case}: {result.status}", file=sys.stderr)
        results.append(result)
    date = dt.datetime.now(dt.UTC).date().isoformat()
    document: dict[str, object] = {
        "date": date,
        "python": platform.python_version(),
        "peers": {
            name: {"name": said.name, "version": said.version, "settings": said.settings}
            for name, said in peers.items()
        },
        "results": [
            {
                "peer": result.peer,
                "case": result.case,
                "status": result.status.value,
                "seen": result.seen,
                "remark": result.remark,
            }
            for result in results
        ],
    }
    return render(results, peers, neutral.CASES, date=date), document


if __name__ == "__main__":
    sys.exit(main())

"""Fuzz all targets for some time: ``python -m tests.fuzz.night CORPUS [--minutes M] [--jobs N] [--json FILE]``.

Each target gets the same share of the time, in a process of its own; see `tests.fuzz.guided`. The corpus grows
from night to night. The number of inputs of each target is printed. An input that is a finding is written to
CORPUS, and the exit status is 1 then.
"""

# ruff: noqa: T201 - a command that prints

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence

from tests.fuzz.targets import TARGETS

_COUNT = re.compile(r"^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)
#: The time for imports and the seeds, and for the last input, in seconds.
_SPARE_S = 300


def fuzz(target: str, corpus: pathlib.Path, seconds: int) -> dict[str, int | str]:
    """Fuzz one target, and return the number of inputs, or the end of the output of a finding."""
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.guided",
        target,
        str(corpus / target),
        str(seconds),
    ]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + _SPARE_S, check=False
    )
    output = ended.stdout + ended.stderr
    count = _COUNT.search(output)
    found: dict[str, int | str] = {"inputs": int(count[1]) if count else 0, "seconds": seconds}
    if ended.returncode or not count:
        found["finding"] = output[-4000:]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.night")
    parser.add_argument("corpus", type=pathlib.Path, help="folder of inputs that reached new code")
    parser.add_argument("--minutes", type=float, default=60, help="for all targets (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the figures")
    options = parser.parse_args(arguments)
    options.corpus.mkdir(parents=True, exist_ok=True)
    seconds = max(1, int(60 * options.minutes * options.jobs / len(TARGETS)))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        rows = pool.map(lambda target: fuzz(target, options.corpus, seconds), TARGETS)
        found = dict(zip(TARGETS, rows, strict=True))
    for target, row in found.items():
        print(f"{target}: {row['inputs']:,} inputs in {row['seconds']} s", row.get("finding", ""))
    print(f"all: {sum(int(row['inputs']) for row in found.values()):,} inputs")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(any("finding" in row for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())

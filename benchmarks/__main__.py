"""The command line: ``python -m benchmarks save`` and ``python -m benchmarks stall``."""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import build_record, default_path, dump_record
from benchmarks.rounds import Progress, workplace
from benchmarks.save import measure_save
from benchmarks.stall import measure_stall
from benchmarks.table import format_record

NBYTES = 1_600_000_000
MEASURE = {"save": measure_save, "stall": measure_stall}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure ckptfmt beside its peers.")
    parser.add_argument("command", choices=MEASURE, help="what to measure")
    parser.add_argument("--nbytes", type=_count, default=NBYTES, help="about how large the state is (%(default)s)")
    parser.add_argument("--rounds", type=_count, help="of each experiment (11; lost seconds 7; first saves 5)")
    parser.add_argument("--directory", type=Path, default=Path("out"), help="where to write and delete (%(default)s)")
    parser.add_argument("--out", type=Path, help="file of the record (below out/benchmarks)")
    parser.add_argument("--json", action="store_true", help="print the record, and nothing else")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the record."""
    options = parse_arguments(arguments)
    began = dt.datetime.now(dt.UTC)
    with workplace(options.directory) as place:
        outcome = MEASURE[options.command](options.nbytes, rounds=options.rounds, place=place, progress=Progress())
        record = build_record(_repeat(options), outcome, directory=place.directory, began=began)
    out: Path = options.out or default_path(record, options.command)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = dump_record(record)
    out.write_text(text, encoding="utf-8")
    print(text.rstrip() if options.json else f"{format_record(record)}\n\nrecord: {out}")
    return 0


def _repeat(options: argparse.Namespace) -> str:
    """Return the command that measures the same again; paths are this machine's own, and left out."""
    rounds = f" --rounds {options.rounds}" if options.rounds else ""
    return f"python -m benchmarks {options.command} --nbytes {options.nbytes}{rounds}"


def _count(text: str) -> int:
    """Return a positive whole number; ``1.6e9`` is one."""
    value = float(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a positive whole number")
    return int(value)


if __name__ == "__main__":
    raise SystemExit(main())

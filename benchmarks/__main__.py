"""The command line: ``python -m benchmarks EXPERIMENT``, such as `save`, `stall` and `load`."""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.adapters import measure_adapters
from benchmarks.death import measure_death
from benchmarks.delta import measure_delta
from benchmarks.frameworks import measure_frameworks
from benchmarks.goodput import MINUTES, measure_goodput
from benchmarks.gpu_digest import measure_gpu_digest
from benchmarks.load import measure_load
from benchmarks.plan import measure_plan
from benchmarks.record import Outcome, build_record, default_path, dump_record, format_record
from benchmarks.reshard import measure_reshard
from benchmarks.rewind import measure_rewind
from benchmarks.rollouts import ROWS, measure_rollouts
from benchmarks.rounds import Progress, Workplace, workplace
from benchmarks.save import measure_save
from benchmarks.scale import STATES, WRITERS, measure_scale
from benchmarks.scenes import Sizes
from benchmarks.stall import measure_stall
from benchmarks.tensors import MOST, measure_tensors
from benchmarks.witness import MOST_PARAMETERS, measure_witness

NBYTES = 1_600_000_000
CASES = 200
RANKS = TENSORS = 1024


def measure_s3(*arguments: Any, **options: Any) -> Outcome:
    """Call `benchmarks.s3.measure_s3`, whose import needs the packages of the tests."""
    from benchmarks.s3 import measure_s3 as measure  # noqa: PLC0415

    return measure(*arguments, **options)


def measure_healer(*arguments: Any, **options: Any) -> Outcome:
    """Call `benchmarks.healer.measure_healer`, whose import needs the packages of the tests."""
    from benchmarks.healer import measure_healer as measure  # noqa: PLC0415

    return measure(*arguments, **options)


def measure_failures(*arguments: Any, **options: Any) -> Outcome:
    """Call `benchmarks.failures.measure_failures`, whose import needs the packages of the tests."""
    from benchmarks.failures import measure_failures as measure  # noqa: PLC0415

    return measure(*arguments, **options)


def measure_signing(*arguments: Any, **options: Any) -> Outcome:
    """Call `benchmarks.signing.measure_signing`, whose import needs the packages of the tests."""
    from benchmarks.signing import measure_signing as measure  # noqa: PLC0415

    return measure(*arguments, **options)


MEASURE = {
    "save": measure_save,
    "stall": measure_stall,
    "load": measure_load,
    "reshard": measure_reshard,
    "gpu_digest": measure_gpu_digest,
    "frameworks": measure_frameworks,
    "s3": measure_s3,
    "adapters": measure_adapters,
    "rewind": measure_rewind,
    "death": measure_death,
    "signing": measure_signing,
}
#: The size for `frameworks`, where a single thread trains a state of this size in seconds, and for
#: `s3`, where a server shares the processors.
SMALLER_NBYTES = 300_000_000
# Experiments with a size other than the size of a state.
PLAN = "plan"
DELTA = "delta"
MANY = "tensors"
LIVE = "goodput"
FAILURES = "failures"
WITNESS = "witness"
ROLLOUTS = "rollouts"
HEALER = "healer"
SCALE = "scale"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure ckptfmt beside its peers."
    )
    parser.add_argument(
        "command",
        choices=[*MEASURE, PLAN, DELTA, MANY, LIVE, FAILURES, WITNESS, ROLLOUTS, HEALER, SCALE],
        help="what to measure",
    )
    sizes_text = f"about how large the state is ({NBYTES}; frameworks, s3 {SMALLER_NBYTES})"
    parser.add_argument("--nbytes", type=_count, help=sizes_text)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="stall (cpu), gpu_digest (cuda): of the state"
    )
    parser.add_argument(
        "--ranks", type=_count, default=RANKS, help="plan: how many, a power of two (%(default)s)"
    )
    parser.add_argument(
        "--writers",
        type=_count,
        default=WRITERS,
        help="scale: how many, a multiple of 16 (%(default)s)",
    )
    parser.add_argument(
        "--states", nargs="+", choices=STATES, default=[*STATES], help="scale: which (all)"
    )
    parser.add_argument(
        "--tensors", type=_count, default=TENSORS, help="plan: how many (%(default)s)"
    )
    parser.add_argument(
        "--most", type=_count, default=MOST, help="tensors: how many at most (%(default)s)"
    )
    parser.add_argument(
        "--parameters",
        type=_count,
        default=MOST_PARAMETERS,
        help="witness: how many at most (%(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=_count,
        default=MINUTES,
        help="goodput, failures: how long it runs (%(default)s)",
    )
    parser.add_argument(
        "--snapshot-every", type=_count, help="goodput: steps between snapshots in memory (none)"
    )
    parser.add_argument(
        "--rows", type=_count, default=ROWS, help="rollouts: how many (%(default)s)"
    )
    parser.add_argument(
        "--cases", type=_count, default=CASES, help="healer: how many (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="healer: of the first case (%(default)s)"
    )
    sizes = Sizes()
    parser.add_argument(
        "--width", type=_count, default=sizes.width, help="delta: of the model (%(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=_count,
        default=sizes.steps,
        help="delta: of the first training (%(default)s)",
    )
    parser.add_argument(
        "--copies", type=_count, default=8, help="delta: of the model, to time saves (%(default)s)"
    )
    parser.add_argument(
        "--scratch", type=Path, help="delta: where to keep trained states (DIRECTORY/training)"
    )
    parser.add_argument(
        "--rounds",
        type=_count,
        help="of each experiment (11; lost seconds, s3 7; first saves, plan, frameworks 5; delta,"
        " scale 3; tensors and goodput 1)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("out"),
        help="where to write and delete (%(default)s)",
    )
    parser.add_argument("--out", type=Path, help="file of the record (below out/benchmarks)")
    parser.add_argument(
        "--json",
        nargs="?",
        const=True,
        metavar="FILE",
        help="print the record, and nothing else; with a file, write it there, and print tables",
    )
    options = parser.parse_args(arguments)
    if options.nbytes is None:
        options.nbytes = SMALLER_NBYTES if options.command in ("frameworks", "s3") else NBYTES
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the record."""
    options = parse_arguments(arguments)
    began = dt.datetime.now(dt.UTC)
    logging.basicConfig(level=logging.WARNING)  # a run would report each save during the timing
    with workplace(options.directory) as place:
        outcome = _measure(options, place)
        record = build_record(_repeat(options), outcome, directory=place.directory, began=began)
    is_printed = options.json is True
    named = Path(options.json) if options.json and not is_printed else options.out
    out: Path = named or default_path(record, options.command)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = dump_record(record)
    out.write_text(text, encoding="utf-8")
    print(text.rstrip() if is_printed else f"{format_record(record)}\n\nrecord: {out}")
    return 0


def _measure(options: argparse.Namespace, place: Workplace) -> Outcome:
    rounds = options.rounds
    progress = Progress()
    if options.command == PLAN:
        return measure_plan(
            options.ranks, options.tensors, rounds=rounds, place=place, progress=progress
        )
    if options.command == HEALER:
        return measure_healer(options.cases, seed=options.seed, place=place, progress=progress)
    sized: dict[str, tuple[Callable[..., Outcome], int]] = {
        LIVE: (
            functools.partial(measure_goodput, snapshot_every=options.snapshot_every),
            options.minutes,
        ),
        FAILURES: (measure_failures, options.minutes),
        MANY: (measure_tensors, options.most),
        WITNESS: (measure_witness, options.parameters),
        ROLLOUTS: (measure_rollouts, options.rows),
        SCALE: (functools.partial(measure_scale, names=options.states), options.writers),
    }
    if options.command in sized:
        measure, size = sized[options.command]
        return measure(size, rounds=rounds, place=place, progress=progress)
    if options.command == DELTA:
        sizes = Sizes(width=options.width, steps=options.steps)
        scratch = options.scratch or options.directory / "training"
        copies = options.copies
        return measure_delta(
            sizes, copies=copies, scratch=scratch, rounds=rounds, place=place, progress=progress
        )
    measure = MEASURE[options.command]
    device = {"device": options.device} if options.device else {}
    return measure(options.nbytes, rounds=rounds, place=place, progress=progress, **device)


def _repeat(options: argparse.Namespace) -> str:
    """Return the command for a rerun, without paths of this machine."""
    rounds = f" --rounds {options.rounds}" if options.rounds else ""
    snapshots = f" --snapshot-every {options.snapshot_every}" if options.snapshot_every else ""
    sizes = {
        PLAN: f"--ranks {options.ranks} --tensors {options.tensors}",
        MANY: f"--most {options.most}",
        LIVE: f"--minutes {options.minutes}{snapshots}",
        FAILURES: f"--minutes {options.minutes}",
        WITNESS: f"--parameters {options.parameters}",
        ROLLOUTS: f"--rows {options.rows}",
        SCALE: f"--writers {options.writers} --states {' '.join(options.states)}",
        HEALER: f"--cases {options.cases} --seed {options.seed}",
        DELTA: f"--width {options.width} --steps {options.steps} --copies {options.copies}",
    }
    size = sizes.get(options.command, f"--nbytes {options.nbytes}")
    device = f" --device {options.device}" if options.device else ""
    return f"python -m benchmarks {options.command} {size}{device}{rounds}"


def _count(text: str) -> int:
    """Return a positive whole number, also from a text such as ``1.6e9``."""
    value = float(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} isn't a positive whole number")
    return int(value)


if __name__ == "__main__":
    raise SystemExit(main())

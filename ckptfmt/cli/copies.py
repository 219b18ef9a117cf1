"""``mirror``, ``promote``, ``scrub``, ``repair``: commands for copies of a run or checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator

from ckptfmt.cli.console import (
    Console,
    Progress,
    bytes_text,
    clean,
    count_text,
    print_errors,
    print_json,
)
from ckptfmt.cli.places import open_checkpoint_place, open_place, open_run_place
from ckptfmt.cli.survey import iter_beside
from ckptfmt.errors import CkptError, Code, StoreError, err
from ckptfmt.run.catalog import Run
from ckptfmt.run.lineage import check_records, iter_lineage, list_checkpoints, list_launches
from ckptfmt.run.mirror import MirrorReport, follow_run
from ckptfmt.run.scrub import ScrubReport, scrub_checkpoint
from ckptfmt.store import open_store


def run(arguments: argparse.Namespace) -> int:
    """Run the command, print the result, and return the exit code.

    Raises: CommitError(HOMES_DIVERGED); FormatError(RUN_MISMATCH); IntegrityError;
        StateError(ARGUMENT); StoreError.
    """
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "mirror": _mirror,
        "promote": _promote,
        "scrub": _scrub,
        "repair": _scrub,
    }
    return commands[arguments.command](arguments)


def _mirror(arguments: argparse.Namespace) -> int:
    open_run_place(arguments.path)
    if arguments.follow:
        return _follow(arguments)
    begin_s = time.perf_counter()
    with Progress(lambda: None, quiet=False) as progress:
        report = Run(arguments.path).mirror(
            arguments.mirror, retire=arguments.retire, on_progress=progress.advance
        )
    if arguments.json:
        elapsed_s = round(time.perf_counter() - begin_s, 6)
        print_json(
            {
                "target": arguments.path,
                "checked": "bytes",
                **report.as_json(),
                "elapsed_s": elapsed_s,
            }
        )
    else:
        _print_mirror(Console(), report)
    return 1 if report.problems else 0


def _print_mirror(console: Console, report: MirrorReport) -> None:
    print_errors(console, report.problems, "red bold")
    for name in report.retired:
        console.line(("retired", "yellow"), f"  {clean(name)}")
    for name in report.in_caches:
        console.line(
            ("in caches", "yellow"),
            f"  {clean(name)}: not copied, its files are in caches of nodes",
        )
    what = (
        f"{count_text(len(report.copied), 'checkpoint')},"
        f" {count_text(len(report.launches), 'launch record')}"
    )
    head = "no checkpoint yet" if report.head is None else report.head
    state = "has" if report.current else "lacks"
    console.line(
        ("mirrored", "green bold" if report.current else "yellow bold"),
        (
            f"  {what}, {bytes_text(report.nbytes)} to {clean(report.mirror)}, which {state} the"
            f" newest: {clean(head)}"
        ),
    )


def _follow(arguments: argparse.Namespace) -> int:
    """Copy new checkpoints until a signal arrives, print each change, and return the exit code."""
    console = Console()
    problems = set[str]()
    reports = 0

    def tell(report: MirrorReport) -> None:
        nonlocal reports
        reports += 1
        new = [one for one in report.problems if str(one) not in problems]
        problems.update(map(str, new))
        if arguments.json:
            if report.copied or report.launches or report.retired or new:
                print_json({"target": arguments.path, "checked": "bytes", **report.as_json()})
        elif report.copied or report.launches or report.retired or new or reports == 1:
            _print_mirror(console, dataclasses.replace(report, problems=tuple(new)))

    def tell_failure(error: StoreError, pause_s: float) -> None:
        console.line(("waiting", "magenta bold"), f"  {clean(str(error))}")
        console.line((f"  next try in {pause_s:g} s", "dim"))

    if arguments.every <= 0:
        raise err(Code.ARGUMENT, f"{arguments.every:g} s isn't a pause", where="--every")
    home = open_store(arguments.path, writable=False)
    mirror = open_store(arguments.mirror, writable=True)
    with _until_signal() as stop:
        follow_run(
            home,
            mirror,
            every_s=arguments.every,
            stop=stop,
            retire=arguments.retire,
            on_report=tell,
            on_failure=tell_failure,
        )
    return 1 if problems else 0


@contextlib.contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """Yield an event that is set by SIGINT and SIGTERM; a second SIGINT interrupts."""
    stop = threading.Event()

    def end(number: int, _: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _promote(arguments: argparse.Namespace) -> int:
    open_run_place(arguments.path)
    with Progress(lambda: None, quiet=False) as progress:
        report = Run(arguments.path).promote(arguments.home, on_progress=progress.advance)
    if arguments.json:
        print_json({"target": arguments.path, "checked": "bytes", **dataclasses.asdict(report)})
        return 0
    console = Console()
    for passed in report.passed_over:
        console.line(("passed over", "yellow bold"), f"  {clean(passed)}")
    console.line(
        ("promoted", "green bold"),
        f"  {clean(report.mirror)}: launch {report.launch}, from {report.name}",
    )
    if report.fenced is None:
        console.line(
            (
                (
                    "  The old home wasn't asked: checkpoints saved there since the last copy"
                    " aren't here."
                ),
                "dim",
            )
        )
    else:
        console.line(
            (
                f"  Nobody saves into the old home any more: launch {report.fenced} took it over.",
                "dim",
            )
        )
    if report.unfinished:
        console.line(
            ("  A save was still in hand there, and isn't here if it is committed now.", "yellow")
        )
    return 0


def _scrub(arguments: argparse.Namespace) -> int:
    begin_s = time.perf_counter()
    is_run = open_place(arguments.path).is_run
    with Progress(lambda: None, quiet=False) as progress:
        dry_run = arguments.dry_run
        on_progress = progress.advance
        if is_run:
            report = Run(arguments.path).scrub(
                arguments.others, dry_run=dry_run, on_progress=on_progress
            )
        else:
            paths = [
                open_checkpoint_place(path).path for path in (arguments.path, *arguments.others)
            ]
            stores = [open_store(path, writable=not dry_run) for path in paths]
            report = scrub_checkpoint(stores, dry_run=dry_run, on_progress=on_progress)
    elapsed_s = time.perf_counter() - begin_s
    if arguments.json:
        print_json(
            {
                "target": arguments.path,
                "checked": "bytes",
                **report.as_json(),
                "head": _find_sound_head(arguments.path, report) if is_run else None,
                "elapsed_s": round(elapsed_s, 6),
            }
        )
        return 0 if report.whole else 1
    console = Console()
    for damage in report.damages:
        if damage.repaired_from is None:
            state = ("beyond repair", "red bold")
        else:
            state = (
                ("rewritten", "yellow bold")
                if damage.repaired
                else ("can be rewritten", "yellow bold")
            )
        source = "" if damage.repaired_from is None else f", from {clean(damage.repaired_from)}"
        where = f"{damage.copy}/{damage.path}"
        console.line(state, "  ", (clean(where), "bold"), f"  {damage.error.code}{source}")
    for name in report.in_caches:
        console.line(
            ("in caches", "yellow"),
            f"  {clean(name)}: files of it are in caches of nodes, and in no copy",
        )
    what = (
        f"{count_text(len(report.checkpoints), 'checkpoint')} in"
        f" {count_text(len(report.copies), 'place')}"
    )
    read = f"{bytes_text(report.nbytes)} compared in {elapsed_s:.2f} s"
    damaged = f", {count_text(len(report.damages), 'damaged file')}" if report.damages else ""
    verdict = ("whole", "green bold") if report.whole else ("damaged", "red bold")
    console.line(verdict, f"  {clean(arguments.path)}: {what}{damaged}, {read}")
    if not report.whole:
        _print_outlook(console, arguments, report, is_run=is_run)
    elif is_run:
        _print_beside(console, arguments.path)
    return 0 if report.whole else 1


def _print_outlook(
    console: Console, arguments: argparse.Namespace, report: ScrubReport, *, is_run: bool
) -> None:
    """Print the consequences of the remaining damage for the run, and possible repairs."""
    head = _find_sound_head(arguments.path, report) if is_run else None
    if not is_run:
        console.line(
            (
                f"  Loads that need one of the damaged files are refused: {clean(arguments.path)}",
                "red",
            )
        )
    elif head is None:
        console.line(
            (
                "  No checkpoint on the lineage is whole: the next launch would refuse to start.",
                "red",
            )
        )
    else:
        console.line(
            (
                (
                    f"  The next launch goes on from {head}, and passes over newer, damaged"
                    " checkpoints."
                ),
                "yellow",
            )
        )
    stays = [one.error for one in report.damages if one.repaired_from is None]
    for remedy in sorted({one.remedy for one in stays if one.code == Code.FILE_MISSING}):
        if remedy != Code.FILE_MISSING.remedy:
            console.line((f"  {clean(remedy)}", "dim"))
    if len(report.copies) == 1:
        console.line(("  Another copy can mend it: --with DEST.", "dim"))
    elif arguments.dry_run:
        console.line(
            (
                (
                    "  No file was changed: without --dry-run, `ckptfmt repair` rewrites repairable"
                    " files."
                ),
                "dim",
            )
        )


def _print_beside(console: Console, path: str) -> None:
    """Print the newer checkpoints beside the lineage.

    An example is a checkpoint that a launch passed over before its repair.
    """
    store = open_store(path, writable=False)
    launches = list_launches(store)
    entries = list_checkpoints(store, with_labels=False)
    head = next(
        (entry for entry in iter_lineage(launches, entries) if entry.manifest is not None), None
    )
    beside = [entry for entry, _ in iter_beside(launches, entries) if not entry.is_suspect]
    newer = [entry.name for entry in beside if head is not None and entry.step > head.step]
    if head is not None and newer:
        told = (
            f"  The next launch goes on from {head.name}. Newer, and beside the lineage:"
            f" {', '.join(newer[:8])};"
        )
        console.line(
            (
                f"{told} to go on from one of these, begin a launch with resume= and the name.",
                "yellow",
            )
        )


def _find_sound_head(path: str, report: ScrubReport) -> str | None:
    """Return the name of the newest undamaged checkpoint on the lineage of the run at `path`.

    Returns: None without such a checkpoint, or if a launch record is damaged.
    """
    store = open_store(path, writable=False)
    stays = {
        one.path.partition("/")[0]
        for one in report.damages
        if one.copy == store.name and not one.repaired
    }
    try:
        launches = list_launches(store)
        entries = list_checkpoints(store, with_labels=False)
        check_records(store, entries)
    except StoreError:
        raise
    except CkptError:
        return None  # a launch record is among the damages
    lineage = (entry for entry in iter_lineage(launches, entries) if entry.manifest is not None)
    broken = stays | {
        entry.name for entry in entries if any(one.name in stays for one in entry.references)
    }
    return next((entry.name for entry in lineage if entry.name not in broken), None)

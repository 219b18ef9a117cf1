"""``python -m ckptfmt_conformance run|list|extract|badge|chaos``: the suite from a shell.

Exit codes of ``run``: 0 all cases are green · 1 a case fails, or an expected failure passes · 2 the
suite couldn't be run, or no case was judged · 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ckptfmt_conformance import __version__, cells
from ckptfmt_conformance.badge import badge_svg
from ckptfmt_conformance.callers import Target, find_target
from ckptfmt_conformance.cases import KINDS, Case, load_cases, select_cases, vectors_root
from ckptfmt_conformance.chaos.command import add_parser as add_chaos
from ckptfmt_conformance.errors import SuiteError
from ckptfmt_conformance.page import dump_html
from ckptfmt_conformance.protocol import Description
from ckptfmt_conformance.reports import Progress, clean, dump_json, dump_junit, parse_json, text_of
from ckptfmt_conformance.runner import TIMEOUT_S, Run, run_cases
from ckptfmt_conformance.seeded import draw_cases
from ckptfmt_conformance.xfails import Xfails

__all__ = ["main", "read_xfails"]

EXIT_GREEN: Final = 0
EXIT_RED: Final = 1
EXIT_FAILED: Final = 2
EXIT_INTERRUPTED: Final = 130
#: The largest default number of parallel jobs. More jobs rarely gain time: the cases are small.
JOBS_MAX: Final = 4


def main(
    argv: Sequence[str] | None = None, *, program: str = "python -m ckptfmt_conformance"
) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments without the program's name; those of the process by default.
        program: the program's name in usage messages.
    """
    try:
        arguments = _parser(program).parse_args(argv)
        command: Callable[[argparse.Namespace], int] = arguments.command
        code = command(arguments)
        sys.stdout.flush()
    except SuiteError as error:
        print(f"error: {clean(error.detail)}\n  {clean(error.remedy)}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        print(
            f"error: {clean(str(error))}\n  See that the file can be read or written.",
            file=sys.stderr,
        )
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=(
            "Judge a reader or writer of checkpoints, in any language, by the conformance suite."
        ),
    )
    parser.add_argument("--version", action="version", version=f"ckptfmt_conformance {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run",
        help="run the suite against an adapter",
        description=(
            "Run the suite. Exit code 0: all green; 1: something fails; 2: it couldn't be run."
        ),
    )
    run.add_argument(
        "--adapter",
        required=True,
        metavar="ADAPTER",
        help="`reference`, package.module:Class, or a command line",
    )
    _add_selection(run)
    run.add_argument(
        "--jobs", type=_positive(int), default=None, metavar="N", help="how many cases at once"
    )
    run.add_argument(
        "--timeout",
        type=_positive(float),
        default=TIMEOUT_S,
        metavar="S",
        help="seconds for each case (30); a trajectory has ten times as many",
    )
    run.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help=(
            "ask in an order drawn by N, and the questions that N draws, as a report says (drawn"
            " anew if left out)"
        ),
    )
    run.add_argument(
        "--no-serve",
        action="store_true",
        help="a process for each case, also of a command that serves",
    )
    run.add_argument("--json", type=Path, metavar="FILE", help="write a report for programs")
    run.add_argument("--junit", type=Path, metavar="FILE", help="write a report as JUnit XML")
    run.add_argument("--html", type=Path, metavar="FILE", help="write a report as one page")
    run.add_argument("--badge", type=Path, metavar="FILE", help="write a badge, as SVG")
    run.add_argument(
        "--xfails",
        type=Path,
        metavar="FILE",
        help="list of expected failures, if not <adapter>.xfails",
    )
    run.add_argument("--list", action="store_true", help="only list what would be asked")
    run.add_argument("-v", "--verbose", action="store_true", help="say how every case went")
    run.set_defaults(command=_run)

    listing = commands.add_parser("list", help="list the cases")
    _add_selection(listing)
    listing.set_defaults(command=_list)

    extract = commands.add_parser(
        "extract", help="write the files of cases into a folder, to look at them"
    )
    _add_selection(extract)
    extract.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a folder, made if it isn't there"
    )
    extract.set_defaults(command=_extract)

    badge = commands.add_parser(
        "badge", help="make a badge, or a page, of the JSON report of a run"
    )
    badge.add_argument("report", type=Path, metavar="REPORT", help="what `run --json` wrote")
    badge.add_argument(
        "--out", type=Path, metavar="FILE", help="where to; standard output if it isn't given"
    )
    badge.add_argument("--html", type=Path, metavar="FILE", help="write the page as well")
    badge.add_argument(
        "--profile", metavar="NAME", default="", help="the badge of a profile, such as R-core"
    )
    badge.set_defaults(command=_badge)
    add_chaos(commands)
    return parser


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="GLOB",
        help="only cases whose id fits; may be repeated",
    )
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        choices=KINDS,
        help="only cases of this kind; may be repeated",
    )
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="NAME",
        help="only cases that need no profile but this one, such as R-core; may be repeated",
    )
    parser.add_argument(
        "--vectors", type=Path, metavar="DIR", help="other vectors than those of the suite"
    )


def _positive(kind: type[int | float]) -> Callable[[str], int | float]:
    def parse(text: str) -> int | float:
        value = kind(text)
        if not 0 < value < 10**6:
            raise argparse.ArgumentTypeError(f"{text} isn't above 0 and below a million")
        return value

    parse.__name__ = "number"
    return parse


def _run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        return _list(arguments)
    target = find_target(arguments.adapter)
    vectors = load_cases(arguments.vectors or vectors_root())
    xfails = read_xfails(target, arguments.xfails)
    chosen = _select(arguments, vectors)
    progress: list[Progress] = []
    drawn_by = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    if arguments.vectors is None:
        drawn = draw_cases(vectors, drawn_by)
        chosen += _select(arguments, drawn)

    def choose(description: Description, cases: Sequence[Case]) -> Sequence[Case]:
        """Return `cases` and the trajectories that the selection and the adapter admit.

        Listing trajectories may import a framework. Hence they are added only here, when the
        adapter's description is known.
        """
        found = [*cases, *_choose_cells(arguments, description, drawn_by)]
        if not found:
            raise SuiteError(
                "no case fits", remedy="See `list` for the ids and kinds that there are."
            )
        progress.append(Progress(len(found)))
        return found

    selection = [f"--vectors {arguments.vectors}"] * (arguments.vectors is not None)
    selection += [f"--filter {pattern}" for pattern in arguments.filter] + [
        f"--kind {kind}" for kind in arguments.kind
    ]
    selection += [f"--profile {name}" for name in arguments.profile]
    try:
        run = run_cases(
            target,
            chosen,
            jobs=arguments.jobs or min(JOBS_MAX, len(os.sched_getaffinity(0))),
            timeout_s=arguments.timeout,
            xfails=xfails,
            selection=selection,
            known=[case.id for case in vectors],
            choose=choose,
            may_serve=not arguments.no_serve,
            seed=arguments.seed,
            drawn_by=drawn_by,
            # The list is filled later.
            on_result=lambda result: progress[0].take(result),  # noqa: PLW0108
        )
    finally:
        for line in progress:
            line.close()
    print(text_of(run, verbose=arguments.verbose))
    _write_reports(run, arguments)
    if run.is_green:
        return EXIT_GREEN
    if not run.has_answers:
        raise SuiteError(
            "nothing was judged: all cases were left out",
            remedy="See what the adapter's `describe` says, and --filter.",
        )
    return EXIT_RED


def _choose_cells(
    arguments: argparse.Namespace, description: Description, drawn_by: int
) -> Sequence[Case]:
    kinds = arguments.kind or description.kinds
    if "trajectory" not in kinds or arguments.vectors is not None or arguments.profile:
        return ()
    found = cells.find_cases(arguments.filter)
    # A command can't be asked for witnessed trajectories. Where no trajectory is chosen, no
    # framework is imported.
    return (*found, *cells.draw_witnessed(drawn_by, arguments.filter)) if found else ()


def _select(arguments: argparse.Namespace, cases: Sequence[Case]) -> tuple[Case, ...]:
    return select_cases(
        cases,
        patterns=arguments.filter,
        kinds=arguments.kind,
        profiles=arguments.profile,
    )


def _write_reports(run: Run, arguments: argparse.Namespace) -> None:
    for path, dump in (
        (arguments.json, dump_json),
        (arguments.junit, dump_junit),
        (arguments.html, dump_html),
        (arguments.badge, badge_svg),
    ):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dump(run), "utf-8")


def read_xfails(target: Target, path: Path | None) -> Xfails:
    """Return the list of expected failures in `path`, else the list beside the adapter, else none.

    Raises: SuiteError where `path` is given and can't be read.
    """
    if path is not None:
        return Xfails.read(path)
    beside = target.xfails
    return Xfails.read(beside) if beside is not None and beside.is_file() else Xfails()


def _list(arguments: argparse.Namespace) -> int:
    cases = list(_select(arguments, load_cases(arguments.vectors or vectors_root())))
    has_cells = "trajectory" in (arguments.kind or KINDS) and not arguments.profile
    if has_cells and arguments.vectors is None:
        cases += cells.find_cases(arguments.filter)
    width = max((len(case.id) for case in cases), default=0)
    for case in cases:
        print(f"{case.kind:10} {case.id:{width}}  {case.description}")
    return EXIT_GREEN


def _extract(arguments: argparse.Namespace) -> int:
    cases = load_cases(arguments.vectors or vectors_root())
    for case in _select(arguments, cases):
        print(case.write_files(arguments.out / case.id))
    return EXIT_GREEN


def _badge(arguments: argparse.Namespace) -> int:
    run = parse_json(arguments.report.read_text("utf-8"))
    if arguments.html is not None:
        arguments.html.write_text(dump_html(run), "utf-8")
    badge = badge_svg(run, profile=arguments.profile)
    if arguments.out is None:
        sys.stdout.write(badge)
    else:
        arguments.out.write_text(badge, "utf-8")
    return EXIT_GREEN


if __name__ == "__main__":
    sys.exit(main())

"""The arguments and help texts of the tools' commands, and the parser of all commands."""

from __future__ import annotations

import argparse

from ckptfmt.cli.arguments import (
    FIELDS,
    Parser,
    add_bases,
    add_run,
    fill_parser,
)
from ckptfmt.cli.arguments import add_arguments as add_core_arguments
from ckptfmt.cli.commands import COMMANDS, PROGRAM, TOOLS

# A substitute for typing.TYPE_CHECKING: the import of typing would delay the help text.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, for completion."""
    parser = Parser(
        prog=PROGRAM, description="Checkpoints: weights and the context they came from."
    )
    parser.add_argument(
        "--version", action="store_true", help="print the versions of library and format"
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    for name, (text, module) in COMMANDS.items():
        add = add_arguments if module == TOOLS else add_core_arguments
        has_own_parser = name in ("conformance", "demo")
        command = commands.add_parser(
            name, help=text, prog=f"{PROGRAM} {name}", add_help=not has_own_parser
        )
        if not has_own_parser:
            add(name, command)
    return parser


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the description of a command of this distribution to its parser."""
    fill_parser(name, parser, _ARGUMENTS[name], _DESCRIPTIONS.get(name))


def _add_report(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--html", metavar="FILE", help="where the page is to be; a file that is there is replaced"
    )
    parser.add_argument(
        "--against",
        metavar="RUN",
        help="a run that should be the same: show which tensors differ, from which step on",
    )


def _add_view(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="directory of a run or checkpoint, or of several"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "one", metavar="A", help="directory of a checkpoint, or of a run, for its newest"
    )
    parser.add_argument("other", metavar="B", help="what it is compared with")
    parser.add_argument(
        "third",
        metavar="C",
        nargs="?",
        help="with it A is a run, and B and C are names, digests or steps in it",
    )
    parser.add_argument(
        "--all", action="store_true", help="show all that differs, and not the first of each kind"
    )
    parser.add_argument("--field", metavar="FIELD", help=f"compare one field alone: {FIELDS}")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="first read every byte of both, and name what is damaged",
    )
    add_bases(parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", nargs="?", help="where checkpoints are, or are to be"
    )
    parser.add_argument(
        "--processes",
        metavar="N",
        type=int,
        default=1,
        help="how many processes of this machine save at once (1)",
    )


def _add_interval(parser: argparse.ArgumentParser) -> None:
    for name, text, is_required in (
        ("commit", "from the begin of a save until the level has all of it", True),
        ("restore", "from a failure until training goes on from the level", True),
        ("lost", "seconds of training that a save to the level costs (0)", False),
        (
            "mtbf",
            "mean time between failures for which the level is the nearest that survives (inf)",
            False,
        ),
    ):
        parser.add_argument(f"--{name}", metavar="TIME", nargs="+", required=is_required, help=text)
    parser.add_argument(
        "--share", metavar="N", nargs="+", help="of N saves one goes to the level (the best)"
    )
    parser.add_argument(
        "--nodes", metavar="N", type=int, default=1, help="how many nodes there are (1)"
    )
    parser.add_argument(
        "--node-mtbf", metavar="TIME", help="mean time between failures of one node (inf)"
    )


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    _add_interval(parser)
    parser.add_argument("--every", metavar="TIME", help="from save to save (the best)")
    parser.add_argument("--duration", metavar="TIME", default="30d", help="of each run (30d)")
    parser.add_argument(
        "--runs", metavar="N", type=int, default=32, help="how many runs are played (32)"
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="equal seeds give equal outcomes (0)"
    )
    parser.add_argument(
        "--shape",
        metavar="K",
        type=float,
        default=1.0,
        help="of Weibull times between failures; below 1: clusters (1)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="failures to play: lines SECONDS LEVEL, or SECONDS node NUMBER",
    )


def _add_rehearse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", metavar="N", type=int, default=24, help="steps of each run (24)")
    parser.add_argument(
        "--every", metavar="N", type=int, default=5, help="steps from save to save (5)"
    )
    parser.add_argument(
        "--kills", metavar="N", type=int, default=2, help="launches that are killed (2)"
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="equal seeds kill at equal steps (0)"
    )
    parser.add_argument(
        "--world",
        metavar="N[,N]",
        help="processes of each launch in turn, under torchrun (as started)",
    )
    parser.add_argument(
        "--keep", metavar="DIRECTORY", help="keep the runs and what the program printed there"
    )
    parser.add_argument("--junit", metavar="FILE", help="write the verdict as JUnit XML, too")
    parser.add_argument(
        "program",
        metavar="-- PROGRAM",
        nargs=argparse.REMAINDER,
        help="the training, as it is started",
    )


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", metavar="SHELL", choices=("bash", "zsh", "tcsh"), help="bash, zsh or tcsh"
    )


def _add_convert(parser: argparse.ArgumentParser) -> None:
    kinds = ("ckptfmt", "torch", "dcp", "hf", "safetensors")
    fields = "weights, optimizer, data, config or extra"
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="checkpoint of any of these kinds, or a run, for its newest",
    )
    parser.add_argument("target", metavar="TARGET", help="where nothing is yet")
    parser.add_argument(
        "--from", dest="from_kind", choices=kinds, help="what SOURCE is, if it isn't recognised"
    )
    parser.add_argument(
        "--to",
        dest="to_kind",
        choices=kinds,
        help="what TARGET shall be; .pt and .safetensors say it (else ckptfmt, if SOURCE isn't)",
    )
    parser.add_argument(
        "--field",
        metavar="KEY=FIELD",
        action="append",
        default=[],
        help=f"where an entry of a torch or dcp SOURCE goes, or without KEY all of it: {fields}",
    )
    parser.add_argument("--only", metavar="FIELD", help="convert this field alone, such as weights")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="training steps done (else what SOURCE has as step or global_step)",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="of each file of an hf TARGET (5GB)"
    )
    parser.add_argument(
        "--like",
        metavar="DIRECTORY",
        help="whose configuration and tokenizer files an hf TARGET gets, such as the base model's",
    )
    parser.add_argument(
        "--card",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="entry of the model card of an hf TARGET, such as license=mit; may be repeated",
    )
    add_bases(parser)
    parser.add_argument("--strict", action="store_true", help="refuse to leave anything out")
    parser.add_argument(
        "--statement",
        metavar="FILE",
        help="also write the digests of the target's files, and the recorded origin of the"
        " checkpoint, as an in-toto statement of SLSA",
    )


_ARGUMENTS: Final[dict[str, Callable[[argparse.ArgumentParser], None]]] = {
    "report": _add_report,
    "view": _add_view,
    "goodput": add_run,
    "diff": _add_diff,
    "doctor": _add_doctor,
    "interval": _add_interval,
    "simulate": _add_simulate,
    "completion": _add_completion,
    "rehearse": _add_rehearse,
    "convert": _add_convert,
}
#: Descriptions by command, instead of the short text in `COMMANDS`.
_DESCRIPTIONS: Final = {
    "rehearse": "Start a training undisturbed, then once more with kills between its saves, and"
    " compare each step. Runs"
    " are made in a scratch directory, with the options of the program's Checkpointer but for"
    " every=, copies= and"
    " caches. Exit code 0: the same trajectory; 1: another one, with the first difference and its"
    " cause.",
    "interval": "Print the expected waste of a run by the interval of its saves. A level is a"
    " place that saves go to;"
    " each option has one value for each level, nearest first (cache, peers, home). Times are"
    " seconds, or have a unit:"
    " 90, 5min, 1.5h, 30d.",
    "simulate": "Play runs that fail, save and restore, and print their goodput. Levels and times"
    " are those of"
    " `interval`.",
    "doctor": "Look at this machine, and try out what every save at PATH relies on; nothing is"
    " left behind. Exit code"
    " 0: it will do; 1: something failed.",
    "completion": "Print a script with which a shell completes what is typed. In bash: source"
    " <(ckptfmt completion"
    " bash); in zsh, into a file _ckptfmt in a directory of $fpath.",
    "goodput": "Say where the time of a run went: training that counts, saves, training that was"
    " thrown away, restarts."
    " The times are those of the run's ledger, which Checkpointer(..., ledger=True) writes; of"
    " launches without it, as"
    " far as the checkpoints that are left say it.",
    "report": "Make a picture of a run: launches, sizes, tensors, pieces, times, metrics and"
    " tags. The page stands by"
    " itself and needs no network. Exit code 0: done; 2: it couldn't be, or something of the run"
    " can't be read.",
    "view": "Show a run or checkpoint in the browser. The command serves the directory for this"
    " machine alone, read-only, at"
    " a random address, and prints the address. Ctrl-C ends the command.",
    "diff": "Compare two checkpoints, by recorded digests or, with --verify, after reading every"
    " byte of both."
    " Exit code 0: the same; 1: they differ; 2: they couldn't be compared, or one of them is"
    " damaged.",
    "convert": (
        "Convert a checkpoint, a few MiB in memory at a time. What the target can't hold is listed."
    ),
}

"""The arguments and help texts of each command."""

from __future__ import annotations

import argparse
import os

from ckptfmt.cli.commands import COMMANDS, PROGRAM, suggest

TYPE_CHECKING = False  # typing's constant; importing typing takes as long as importing argparse
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final, NoReturn

#: The least width of a help text, in characters; a narrower text loses its two columns.
_WIDTH_MIN: Final = 40


class Parser(argparse.ArgumentParser):
    """An argument parser with a usage as wide as the terminal, and with suggestions for options."""

    def __init__(self, *, prog: str, description: str | None = None, add_help: bool = True) -> None:
        super().__init__(
            prog=prog, description=description, add_help=add_help, formatter_class=_formatter
        )

    def error(self, message: str) -> NoReturn:
        """Print usage and message, with the nearest name of an unknown option, and exit with 2."""
        _, unknown, typed = message.partition("unrecognized arguments: ")
        if unknown:
            meant = [
                near
                for word in typed.split()
                if (near := suggest(word.partition("=")[0], self.options()))
            ]
            message += f" (did you mean {' '.join(meant)}?)" if meant else ""
        from ckptfmt.errors import printable

        super().error(printable(message))

    def options(self) -> list[str]:
        """Return the long options."""
        return [name for name in self._option_string_actions if name.startswith("--")]


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Return the formatter of help texts, as wide as the terminal.

    `HelpFormatter` would import shutil to find out the width.
    """
    try:
        columns = int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS") else 0
        columns = columns or os.get_terminal_size(1).columns
    except (AttributeError, ValueError, OSError):
        columns = 80
    return argparse.HelpFormatter(prog, width=max(_WIDTH_MIN, columns) - 2)


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
        command = commands.add_parser(
            name, help=text, prog=f"{PROGRAM} {name}", add_help=bool(module)
        )
        if module:
            add_arguments(name, command)
    return parser


def make_command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command, for the arguments after the command's name."""
    parser = Parser(prog=f"{PROGRAM} {name}")
    add_arguments(name, parser)
    return parser


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the description of a command to its parser."""
    text = COMMANDS[name][0]
    parser.description = _DESCRIPTIONS.get(name, f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(command=name)
    _ARGUMENTS[name](parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


#: The fields of a checkpoint, for help texts of options with a field. The names are those of
#: `ckptfmt.documents.manifest.FIELDS`; importing that module would delay the help text.
_FIELDS: Final = "weights, optimizer (with extra), rng, data, config, topology or provenance"


def _add_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", nargs="?", help="directory of a checkpoint or of a run"
    )
    _add_bases(parser)
    parser.add_argument(
        "--split",
        metavar="I/N",
        help="check slice I of N of the blocks, on one of N machines; join what --json prints",
    )
    parser.add_argument(
        "--join",
        metavar="FILE",
        nargs="+",
        help="instead of PATH: what --json printed of each slice, as one report",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="no text and no progress: only the exit code"
    )


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        nargs="?",
        help="of a run: its name, its digest or its step",
    )
    _add_bases(parser)
    parser.add_argument(
        "--tensors",
        metavar="PATTERN",
        nargs="?",
        const="*",
        help="list each tensor, or those whose name matches",
    )
    parser.add_argument(
        "--field", metavar="FIELD", help=f"show one field alone, and all of it: {_FIELDS}"
    )
    parser.add_argument(
        "--all", action="store_true", help="show everything, and not what fits a screen"
    )


def _add_ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        default=".",
        help="directory of a run, or of several (this one)",
    )
    parser.add_argument(
        "--all", action="store_true", help="those that were retired or given up, too"
    )


def _add_gc(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--keep",
        metavar="N",
        type=int,
        help="how many of the newest checkpoints stay; without it all",
    )
    parser.add_argument(
        "--keep-every", metavar="N", type=int, help="those of steps divisible by this stay, too"
    )
    parser.add_argument(
        "--keep-best", metavar="METRIC:min|max:N", help="the best by a metric stay, too"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read what the run doesn't go on from: is it damaged?"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be done, and change nothing"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="don't read what stays: the last checkpoint that can be loaded may go",
    )


def _add_log(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--html", metavar="FILE", help="where the page is to be; a file that is there is replaced"
    )
    parser.add_argument(
        "--against",
        metavar="RUN",
        help="a run that should be the same: show which tensors differ, from which step on",
    )


def _add_change(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its name, its digest or its step")


def _add_rm(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "checkpoints", metavar="CHECKPOINT", nargs="+", help="its name, its digest or its step"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be deleted, and change nothing"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="don't read what stays: the last checkpoint that can be loaded may go",
    )


def _add_tag(parser: argparse.ArgumentParser) -> None:
    _add_untag(parser)
    parser.add_argument(
        "--metric",
        metavar="NAME=NUMBER",
        action="append",
        default=[],
        help="a metric; may be repeated",
    )


def _add_untag(parser: argparse.ArgumentParser) -> None:
    _add_change(parser)
    parser.add_argument("tags", metavar="TAG", nargs="*", help="a short text")


def _add_mirror(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("mirror", metavar="DEST", help="where the copy is, or is to be")
    parser.add_argument(
        "--retire", action="store_true", help="retire at DEST what the run has retired"
    )
    parser.add_argument(
        "--follow", action="store_true", help="go on copying what is committed, until interrupted"
    )
    parser.add_argument(
        "--every", metavar="SECONDS", type=float, default=10.0, help="pause of --follow (10)"
    )


def _add_promote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="MIRROR", help="the copy of the run that becomes its home")
    parser.add_argument("--home", metavar="RUN", help="the old home, if it can be reached")


def _add_scrub(parser: argparse.ArgumentParser) -> None:
    _add_path(parser)
    parser.add_argument(
        "--with",
        metavar="DEST",
        dest="others",
        action="append",
        default=[],
        help="another copy; may be repeated",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="read and report, and change nothing"
    )


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


def _add_compact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="directory of a checkpoint, or of a run, for its newest"
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--out", metavar="PATH", help="directory of the full one, which then belongs to no run"
    )
    where.add_argument(
        "--take-over",
        action="store_true",
        help=(
            "write it into the run at PATH, which goes on from it; who still trains there is"
            " fenced off"
        ),
    )
    _add_bases(parser)


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
    parser.add_argument("--field", metavar="FIELD", help=f"compare one field alone: {_FIELDS}")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="first read every byte of both, and name what is damaged",
    )
    _add_bases(parser)


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
    _add_bases(parser)
    parser.add_argument("--strict", action="store_true", help="refuse to leave anything out")


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="directory of a checkpoint or of a run")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="directory of a run")


def _add_bases(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base",
        metavar="PATH",
        dest="bases",
        action="append",
        default=[],
        help=(
            "where else to look for what a delta reads from: a checkpoint, or a directory of"
            " them; may be repeated"
        ),
    )


_ARGUMENTS: Final[dict[str, Callable[[argparse.ArgumentParser], None]]] = {
    "inspect": _add_inspect,
    "log": _add_log,
    "report": _add_report,
    "goodput": _add_run,
    "ls": _add_ls,
    "du": _add_path,
    "gc": _add_gc,
    "diff": _add_diff,
    "validate": _add_validate,
    "pin": _add_change,
    "unpin": _add_change,
    "tag": _add_tag,
    "untag": _add_untag,
    "rm": _add_rm,
    "mirror": _add_mirror,
    "promote": _add_promote,
    "scrub": _add_scrub,
    "repair": _add_scrub,
    "doctor": _add_doctor,
    "interval": _add_interval,
    "simulate": _add_simulate,
    "completion": _add_completion,
    "rehearse": _add_rehearse,
    "compact": _add_compact,
    "convert": _add_convert,
}
#: Descriptions by command, instead of the short text in `COMMANDS`.
_DESCRIPTIONS: Final = {
    "rehearse": "Start a training undisturbed, then once more with kills between its saves, and"
    " compare each step. Runs"
    " are made in a scratch directory, with the options of the program's Checkpointer but for"
    " every=, mirrors= and"
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
    "repair": "Read every byte of a run, or of one checkpoint, and of its copies, rewrite each"
    " damaged file from a copy"
    " that has it whole, and say what a run goes on from. Exit code 0: all is whole now; 1:"
    " damage stays; 2:"
    " it couldn't be done.",
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
    "gc": "Delete what retention lets go, and what saves of older launches left that were killed;"
    " say what else is"
    " there that the run doesn't go on from. Exit code 0: done; 1: something is damaged or can't"
    " be read; 2: it"
    " couldn't be done.",
    "diff": "Compare two checkpoints, by recorded digests or, with --verify, after reading every"
    " byte of both."
    " Exit code 0: the same; 1: they differ; 2: they couldn't be compared, or one of them is"
    " damaged.",
    "validate": "Check every byte. Exit code 0: valid; 1: violations; 2: the check couldn't be"
    " made, or finished. With"
    " --split, every machine checks its slice and all documents, and --join says what all of them"
    " found.",
    "compact": (
        "Make a full checkpoint of a delta, a few MiB in memory at a time: outside of a"
        " run, or in it."
    ),
    "convert": (
        "Convert a checkpoint, a few MiB in memory at a time. What the target can't hold is listed."
    ),
}

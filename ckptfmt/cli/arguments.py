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


def make_command_parser(
    name: str, add: Callable[[str, argparse.ArgumentParser], None] | None = None
) -> argparse.ArgumentParser:
    """Return the parser of a command, for the arguments after the command's name.

    Args:
        add: adds the command's arguments; `add_arguments` for a command of this package.
    """
    parser = Parser(prog=f"{PROGRAM} {name}")
    (add or add_arguments)(name, parser)
    return parser


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Add the arguments and the description of a command of this package to its parser."""
    fill_parser(name, parser, _ARGUMENTS[name], _DESCRIPTIONS.get(name))


def fill_parser(
    name: str,
    parser: argparse.ArgumentParser,
    add: Callable[[argparse.ArgumentParser], None],
    description: str | None,
) -> None:
    """Add arguments, the option ``--json`` and a description to the parser of a command.

    Args:
        description: in place of the command's short text.
    """
    text = COMMANDS[name][0]
    parser.description = description or f"{text[0].upper()}{text[1:]}."
    parser.set_defaults(command=name)
    add(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


#: The fields of a checkpoint, for help texts of options with a field. The names are those of
#: `ckptfmt.documents.manifest.FIELDS`; importing that module would delay the help text.
FIELDS: Final = "weights, optimizer (with extra), rng, data, config, topology or provenance"


def _add_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", nargs="?", help="directory of a checkpoint or of a run"
    )
    add_bases(parser)
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
    _add_trust(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the signers of checkpoints."""
    group = parser.add_argument_group("signatures", "each checkpoint must have one of a signer")
    group.add_argument(
        "--key",
        metavar="FILE",
        dest="keys",
        action="append",
        default=[],
        help="public key of a signer, in PEM; may be given again",
    )
    group.add_argument(
        "--root",
        metavar="FILE",
        dest="roots",
        action="append",
        default=[],
        help="root certificates of signers, in PEM; may be given again",
    )
    group.add_argument(
        "--identity", metavar="NAME", help="identity in a certificate of Sigstore; with --issuer"
    )
    group.add_argument("--issuer", metavar="URL", help="provider that vouches for the identity")
    group.add_argument(
        "--sigstore-root",
        metavar="FILE",
        help="keys of an instance of Sigstore (trusted_root.json); default: the public instance",
    )
    group.add_argument(
        "--pin",
        metavar="FILE",
        help="file with the newest checkpoint seen: refuse older ones, and a run without it",
    )


def _add_sign(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="directory of a checkpoint; of a run: its newest checkpoint"
    )
    parser.add_argument("--key", metavar="FILE", help="private key in PEM, of an elliptic curve")
    parser.add_argument(
        "--password-env",
        metavar="NAME",
        help="environment variable with the password of an encrypted key",
    )
    parser.add_argument(
        "--certificates", metavar="FILE", help="certificate of the key and its chain, in PEM"
    )
    parser.add_argument(
        "--bundle",
        metavar="FILE",
        help="instead of --key: add a signature that another program made of manifest.json",
    )


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        nargs="?",
        help="of a run: its name, its digest or its step",
    )
    add_bases(parser)
    parser.add_argument(
        "--tensors",
        metavar="PATTERN",
        nargs="?",
        const="*",
        help="list each tensor, or those whose name matches",
    )
    parser.add_argument(
        "--field", metavar="FIELD", help=f"show one field alone, and all of it: {FIELDS}"
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
    add_run(parser)
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
    add_run(parser)


def _add_change(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its name, its digest or its step")


def _add_rm(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
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
    add_run(parser)
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
    add_path(parser)
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
    add_bases(parser)
    parser.add_argument(
        "--sign", metavar="FILE", help="private key in PEM, with which the full one is signed"
    )


def add_path(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a checkpoint or a run."""
    parser.add_argument("path", metavar="PATH", help="directory of a checkpoint or of a run")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a run."""
    parser.add_argument("path", metavar="RUN", help="directory of a run")


def add_bases(parser: argparse.ArgumentParser) -> None:
    """Add the option for places of base checkpoints."""
    parser.add_argument(
        "--base",
        metavar="PATH",
        dest="bases",
        action="append",
        default=[],
        help=(
            "where else to look for what a delta reads from, or for a frozen base: a checkpoint,"
            " a directory of checkpoints or of safetensors files; may be repeated"
        ),
    )


_ARGUMENTS: Final[dict[str, Callable[[argparse.ArgumentParser], None]]] = {
    "inspect": _add_inspect,
    "log": _add_log,
    "ls": _add_ls,
    "du": add_path,
    "gc": _add_gc,
    "validate": _add_validate,
    "sign": _add_sign,
    "pin": _add_change,
    "unpin": _add_change,
    "tag": _add_tag,
    "untag": _add_untag,
    "rm": _add_rm,
    "mirror": _add_mirror,
    "promote": _add_promote,
    "scrub": _add_scrub,
    "repair": _add_scrub,
    "compact": _add_compact,
}
#: Descriptions by command, instead of the short text in `COMMANDS`.
_DESCRIPTIONS: Final = {
    "repair": "Read every byte of a run, or of one checkpoint, and of its copies, rewrite each"
    " damaged file from a copy"
    " that has it whole, and say what a run goes on from. Exit code 0: all is whole now; 1:"
    " damage stays; 2:"
    " it couldn't be done.",
    "gc": "Delete what retention lets go, and what saves of older launches left that were killed;"
    " say what else is"
    " there that the run doesn't go on from. Exit code 0: done; 1: something is damaged or can't"
    " be read; 2: it"
    " couldn't be done.",
    "validate": "Check every byte. Exit code 0: valid; 1: violations; 2: the check couldn't be"
    " made, or finished. With"
    " --split, every machine checks its slice and all documents, and --join says what all of them"
    " found.",
    "compact": (
        "Make a full checkpoint of a delta, a few MiB in memory at a time: outside of a"
        " run, or in it."
    ),
}

"""``python -m ckptfmt``: the parser, and the guard: whatever happens, one line says what, the exit code of what kind.

Exit codes: 0 done, and valid, or the same · 1 violations were found (`validate`), or differences (`diff`), or damage
that stays (`scrub`, `mirror`) · 2 it couldn't be done, or what `diff` was to compare is damaged · 130 interrupted.

An error that isn't a `CkptError` is a bug of ckptfmt, and shown as one line too; with ``CKPTFMT_TRACEBACK=1`` in the
environment its traceback is shown, for the report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import Final

from ckptfmt.cli.console import Console, clean, print_json, version_members
from ckptfmt.errors import CkptError, Code, err

EXIT_FAILED: Final = 2
EXIT_INTERRUPTED: Final = 130
#: What a shell says of a program that wrote into a pipe that nobody reads any more: 128 + SIGPIPE.
EXIT_PIPE: Final = 141

#: The commands that say something of a checkpoint of a run.
_CHANGES: Final = {
    "pin": "keep a checkpoint of a run, whatever retention says",
    "unpin": "leave a checkpoint of a run to retention again",
    "tag": "give a checkpoint of a run tags, or metrics that were known only after its save",
    "untag": "take tags of a checkpoint of a run away",
    "rm": "delete a checkpoint of a run, unless something needs it",
}
#: The commands that copy, move or repair a run in several stores.
_COPIES: Final = {
    "mirror": "copy a run to another place, every byte compared with its digest, so that it can go on there",
    "promote": "let a run go on from its mirror",
    "scrub": "read every byte of all copies of a run, and rewrite what is damaged from a good copy",
}
_PROGRAM: Final = "python -m ckptfmt"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Nothing but SystemExit of the interpreter's own leaves this call.

    Args:
        argv: `sys.argv` without the program's name.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _dispatch(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
    except SystemExit as request:  # argparse: usage is printed
        return request.code if isinstance(request.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return EXIT_PIPE
    except CkptError as error:
        return _fail(error, as_json="--json" in argv)
    except Exception as error:  # noqa: BLE001 - the outermost frame: a traceback says nothing to who runs a command
        return _fail_unexpectedly(error)
    return code


def _dispatch(argv: list[str]) -> int:
    """Run a command: a module of that name in `ckptfmt.cli`, of which only the one that runs is imported."""
    if argv[:1] == ["demo"]:  # it has a parser of its own
        from ckptfmt import demo

        return demo.main(argv[1:])
    if argv[:1] == ["conformance"]:  # so has it
        return _run_conformance(argv[1:])
    parser, commands = _parser()
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        import difflib

        near = difflib.get_close_matches(argv[0], commands, n=1)
        remedy = f"Did you mean `{_PROGRAM} {near[0]}`?" if near else f"One of {', '.join(commands)}."
        raise err(Code.ARGUMENT, f"there is no command {argv[0]!r}", remedy=remedy)
    arguments = parser.parse_args(argv)
    module = {**dict.fromkeys(_CHANGES, "change"), **dict.fromkeys(_COPIES, "copies")}.get(
        arguments.command, arguments.command
    )
    command: Callable[[argparse.Namespace], int] = import_module(f"ckptfmt.cli.{module}").run
    return command(arguments)


def _run_conformance(argv: list[str]) -> int:
    """Hand over to the conformance suite. Raises: StateError(STATE_UNSUPPORTED) where it isn't installed."""
    try:
        from ckptfmt_conformance import __main__ as conformance
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ckptfmt_conformance":
            raise
        raise err(
            Code.STATE_UNSUPPORTED,
            "the conformance suite isn't installed",
            where="ckptfmt_conformance",
            remedy="Install the wheel of ckptfmt again; in a checkout, run `make venv`.",
        ) from error
    return conformance.main(argv, program="python -m ckptfmt conformance")


def _parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """Return the parser, and the names of its commands."""
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="Checkpoints: weights and the context they came from.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of library and format")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("demo", help="the whole story on this machine, in about a minute", add_help=False)
    commands.add_parser("conformance", help="judge a reader or writer, in any language", add_help=False)

    validate = commands.add_parser(
        "validate",
        help="check every byte of a checkpoint or of a run",
        description="Check every byte. Exit code 0: valid; 1: violations; 2: the check couldn't be made, or finished.",
    )
    validate.add_argument("path", metavar="PATH", help="directory of a checkpoint or of a run")
    _add_bases(validate)
    validate.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    validate.add_argument("--quiet", action="store_true", help="no text and no progress: only the exit code")

    inspect = commands.add_parser("inspect", help="what is in a checkpoint, or in a run")
    _add_inspect_arguments(inspect)

    log = commands.add_parser("log", help="the checkpoints of a run and their lineage, newest first")
    log.add_argument("path", metavar="RUN", help="directory of a run")
    log.add_argument("--json", action="store_true", help="print one JSON object, for programs")

    for name, text in _CHANGES.items():
        _add_change_arguments(commands.add_parser(name, help=text, description=f"{text.capitalize()}."))

    for name, text in _COPIES.items():
        _add_copy_arguments(name, commands.add_parser(name, help=text, description=f"{text.capitalize()}."))

    compact = commands.add_parser(
        "compact",
        help="make a full checkpoint of a delta",
        description="Make a full checkpoint of a delta, a few MiB in memory at a time: outside of a run, or in it.",
    )
    _add_compact_arguments(compact)

    diff = commands.add_parser(
        "diff",
        help="which tensors of two checkpoints differ, and by how much",
        description="Compare two checkpoints, by recorded digests or, with --verify, after reading every byte of both."
        " Exit code 0: the same; 1: they differ; 2: they couldn't be compared, or one of them is damaged.",
    )
    _add_diff_arguments(diff)

    convert = commands.add_parser(
        "convert",
        help="from and to torch.save files, DCP directories and Hugging Face directories",
        description="Convert a checkpoint, a few MiB in memory at a time. What the target can't hold is listed.",
    )
    _add_convert_arguments(convert)
    return parser, commands.choices


def _add_change_arguments(change: argparse.ArgumentParser) -> None:
    change.add_argument("path", metavar="RUN", help="directory of a run")
    change.add_argument("checkpoint", metavar="CHECKPOINT", help="its name, its digest or its step")
    if change.prog.endswith("tag"):
        change.add_argument("tags", metavar="TAG", nargs="*", help="a short text")
    if change.prog.endswith(" tag"):
        change.add_argument(
            "--metric", metavar="NAME=NUMBER", action="append", default=[], help="a metric; may be repeated"
        )
    change.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def _add_copy_arguments(name: str, copies: argparse.ArgumentParser) -> None:
    if name == "promote":
        copies.add_argument("path", metavar="MIRROR", help="the copy of the run that becomes its home")
        copies.add_argument("--home", metavar="RUN", help="the old home, if it can be reached")
    else:
        copies.add_argument("path", metavar="RUN", help="directory of a run")
    if name == "mirror":
        copies.add_argument("mirror", metavar="DEST", help="where the copy is, or is to be")
        copies.add_argument("--retire", action="store_true", help="retire at DEST what the run has retired")
        copies.add_argument("--follow", action="store_true", help="go on copying what is committed, until interrupted")
        copies.add_argument("--every", metavar="SECONDS", type=float, default=10.0, help="pause of --follow (10)")
    if name == "scrub":
        copies.add_argument(
            "--with", metavar="DEST", dest="others", action="append", default=[], help="another copy; may be repeated"
        )
        copies.add_argument("--dry-run", action="store_true", help="read and report, and change nothing")
    copies.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def _add_inspect_arguments(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument("path", metavar="PATH", help="directory of a checkpoint or of a run")
    _add_bases(inspect)
    inspect.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    inspect.add_argument(
        "--tensors",
        metavar="PATTERN",
        nargs="?",
        const="*",
        help="list each tensor, or those whose name matches",
    )
    inspect.add_argument("--field", metavar="FIELD", help="show only this one of the seven fields, and all of it")


def _add_convert_arguments(convert: argparse.ArgumentParser) -> None:
    kinds = ("ckptfmt", "torch", "dcp", "hf")
    fields = "weights, optimizer, data, config or extra"
    convert.add_argument("source", metavar="SOURCE", help="checkpoint of any of these kinds, or a run, for its newest")
    convert.add_argument("target", metavar="TARGET", help="where nothing is yet")
    convert.add_argument("--from", dest="from_kind", choices=kinds, help="what SOURCE is, if it isn't recognised")
    convert.add_argument("--to", dest="to_kind", choices=kinds, help="what TARGET shall be; torch for a name in .pt")
    convert.add_argument(
        "--field",
        metavar="KEY=FIELD",
        action="append",
        default=[],
        help=f"where an entry of a torch or dcp SOURCE goes, or without KEY all of it: {fields}",
    )
    convert.add_argument("--only", metavar="FIELD", help="convert this field alone, such as weights")
    convert.add_argument("--step", type=int, metavar="N", help="training steps done, if SOURCE doesn't say (else 0)")
    convert.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of each file of an hf TARGET (5GB)")
    _add_bases(convert)
    convert.add_argument("--strict", action="store_true", help="refuse to leave anything out")
    convert.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def _add_compact_arguments(compact: argparse.ArgumentParser) -> None:
    compact.add_argument("path", metavar="PATH", help="directory of a checkpoint, or of a run, for its newest")
    where = compact.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", metavar="PATH", help="directory of the full one, which then belongs to no run")
    where.add_argument(
        "--take-over",
        action="store_true",
        help="write it into the run at PATH, which goes on from it; who still trains there is fenced off",
    )
    _add_bases(compact)
    compact.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def _add_diff_arguments(diff: argparse.ArgumentParser) -> None:
    diff.add_argument("one", metavar="A", help="directory of a checkpoint, or of a run, for its newest")
    diff.add_argument("other", metavar="B", help="what it is compared with")
    diff.add_argument("--field", metavar="FIELD", help="compare only this one of the seven fields")
    diff.add_argument("--verify", action="store_true", help="first read every byte of both, and name what is damaged")
    _add_bases(diff)
    diff.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def _add_bases(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base",
        metavar="PATH",
        dest="bases",
        action="append",
        default=[],
        help="where else to look for what a delta reads from: a checkpoint, or a directory of them; may be repeated",
    )


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        members = version_members()
        print(f"ckptfmt {members['version']} (format {members['format']})")
        parser.exit()


def _fail(error: CkptError, *, as_json: bool) -> int:
    if as_json:
        print_json({"error": error.as_json()})
    place = f" at {error.where}" if error.where else ""
    clause = f" [{error.requirement}]" if error.requirement else ""
    _say(f"error: {error.code}{place}: {error.detail}{clause}", error.remedy)
    return EXIT_FAILED


def _fail_unexpectedly(error: Exception) -> int:
    if os.environ.get("CKPTFMT_TRACEBACK"):
        import traceback

        traceback.print_exc()
    if isinstance(error, OSError):
        _forget_output()  # what couldn't be written would be tried again, and complained about, at exit
        _say(f"error: {error}")
    elif isinstance(error, MemoryError):
        _say("error: this machine hasn't enough memory for it")
    else:
        _say(
            f"error: {type(error).__name__}: {error}",
            "This is a bug of ckptfmt: run it again with CKPTFMT_TRACEBACK=1 and report what it says.",
        )
    return EXIT_FAILED


def _say(text: str, remedy: str = "") -> None:
    """Say one thing on standard error, and what to do about it."""
    if sys.stderr is None:
        return
    console = Console(sys.stderr)
    console.line((clean(text[:2000]), "red"))
    if remedy:
        console.line(f"  {clean(remedy)}")


def _forget_output() -> None:
    """Let what couldn't be written go, so that the interpreter doesn't complain at exit."""
    try:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)
    except (OSError, ValueError, AttributeError):
        return


if __name__ == "__main__":
    sys.exit(main())

"""The program ``ckptfmt``, also ``python -m ckptfmt``: an error is a line and an exit code.

Exit codes: 0 done, and valid, or equal · 1 violations were found (`validate`), or differences
(`diff`), or unrepaired damage (`scrub`, `mirror`) · 2 the command couldn't be done, or an input of
`diff` is damaged · 130 interrupted.

An error other than a `CkptError` is a bug of ckptfmt, and shown as one line too. With
``CKPTFMT_TRACEBACK=1`` in the environment, the traceback is shown, for a bug report.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from ckptfmt.cli.commands import COMMANDS, PROGRAM, TOOLS, USAGE, help_text, suggest

# A substitute for typing.TYPE_CHECKING: the import of typing takes longer than help and version.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import Final

    from ckptfmt.errors import CkptError

EXIT_FAILED: Final = 2
EXIT_INTERRUPTED: Final = 130
#: Exit code of a shell for a program that writes into a closed pipe: 128 + SIGPIPE.
EXIT_PIPE: Final = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Only the interpreter's own SystemExit leaves this call.

    Args:
        argv: `sys.argv` without the program's name.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _dispatch(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
    except SystemExit as request:  # raised by argparse after its own message
        return request.code if isinstance(request.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return EXIT_PIPE
    except Exception as error:  # noqa: BLE001
        from ckptfmt.errors import CkptError

        if isinstance(error, CkptError):
            return _fail(error, as_json="--json" in argv)
        return _fail_unexpectedly(error)
    return code


def _dispatch(argv: list[str]) -> int:
    """Run a command of `ckptfmt.cli`, of the tools or of the conformance suite.

    Only the modules of this command are imported.
    """
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name == "--version":
        return _print_version()
    if name in ("--help", "-h", "help") and not rest:
        print(help_text())
        return 0
    if name == "conformance":  # parses its arguments itself
        return _run_conformance(rest)
    if not name or name.startswith("-"):
        print(
            f"{USAGE}\n{PROGRAM}: error: a command comes first; `{PROGRAM} --help` lists them",
            file=sys.stderr,
        )
        return EXIT_FAILED
    if name not in COMMANDS:
        raise _no_command(name)
    if COMMANDS[name][1] == TOOLS:
        return _run_tool(name, rest)
    from ckptfmt.cli.arguments import make_command_parser

    arguments = make_command_parser(name).parse_args(rest)
    command: Callable[[argparse.Namespace], int] = import_module(
        f"ckptfmt.cli.{COMMANDS[name][1]}"
    ).run
    return command(arguments)


def _print_version() -> int:
    from ckptfmt import __version__, limits

    print(f"{PROGRAM} {__version__} (format {limits.FORMAT_VERSION})")
    return 0


def _no_command(name: str) -> Exception:
    """Return the error for an unknown command: a path, or a command with a typo."""
    from ckptfmt.errors import Code, err

    near = suggest(name, COMMANDS)
    remedy = f"Did you mean `{PROGRAM} {near}`?" if near else f"One of {', '.join(COMMANDS)}."
    if near is None and os.path.exists(name):  # noqa: PTH110
        remedy = f"A command comes first: `{PROGRAM} inspect {name}` shows what is there."
    return err(Code.ARGUMENT, f"there is no command {name!r}", remedy=remedy)


def _run_conformance(argv: list[str]) -> int:
    """Run the conformance suite.

    Raises: StateError(STATE_UNSUPPORTED) where the suite isn't installed.
    """
    try:
        from ckptfmt_conformance import __main__ as conformance
    except ModuleNotFoundError as error:
        raise _not_installed(error, "ckptfmt_conformance", "the conformance suite") from error
    return conformance.main(argv, program=f"{PROGRAM} conformance")


def _run_tool(name: str, argv: list[str]) -> int:
    """Run a command of the distribution `ckptfmt-tools`.

    Raises: StateError(STATE_UNSUPPORTED) where the tools aren't installed.
    """
    try:
        from ckptfmt_tools import handover
    except ModuleNotFoundError as error:
        raise _not_installed(error, TOOLS, f"the command `{name}`") from error
    return handover.run(name, argv)


def _not_installed(error: ModuleNotFoundError, module: str, thing: str) -> Exception:
    """Return the error for a missing distribution, or `error` if another module is missing."""
    from ckptfmt.errors import Code, err

    if error.name is None or error.name.partition(".")[0] != module:
        return error
    extra = module.removeprefix(f"{PROGRAM}_")
    return err(
        Code.STATE_UNSUPPORTED,
        f"{thing} isn't installed",
        where=module,
        remedy=f'Install it: pip install "ckptfmt[{extra}]"; in a checkout, `make venv`.',
    )


def _fail(error: CkptError, *, as_json: bool) -> int:
    if as_json:
        from ckptfmt.cli.console import print_json

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
        # The interpreter would write the output again at exit, and report the error again.
        _forget_output()
        _say(f"error: {error}")
    elif isinstance(error, MemoryError):
        _say("error: this machine hasn't enough memory for it")
    else:
        _say(
            f"error: {type(error).__name__}: {error}",
            (
                "This is a bug of ckptfmt: run it again with CKPTFMT_TRACEBACK=1 and report what it"
                " says."
            ),
        )
    return EXIT_FAILED


def _say(text: str, remedy: str = "") -> None:
    """Write a message on standard error, and a remedy."""
    if sys.stderr is None:
        return
    from ckptfmt.cli.console import Console, clean

    console = Console(sys.stderr)
    console.line((clean(text[:2000]), "red"))
    if remedy:
        console.line(f"  {clean(remedy)}")


def _forget_output() -> None:
    """Discard the unwritten output, so that the interpreter reports no error at exit."""
    try:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)
    except (OSError, ValueError, AttributeError):
        return


if __name__ == "__main__":
    sys.exit(main())

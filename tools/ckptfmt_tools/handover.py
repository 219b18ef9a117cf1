"""The entry from the program `ckptfmt`: run one of the commands in this distribution."""

from __future__ import annotations

from importlib import import_module

# A substitute for typing.TYPE_CHECKING: the import of typing would delay the help text.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import Final

#: The module of each command, in `ckptfmt_tools`.
_MODULES: Final = {
    "completion": "cli.completion",
    "convert": "cli.convert",
    "diff": "cli.diff",
    "doctor": "cli.doctor",
    "goodput": "cli.goodput_table",
    "interval": "cli.waste",
    "rehearse": "cli.rehearse",
    "report": "report.run_report",
    "simulate": "cli.waste",
    "view": "cli.view",
}


def run(name: str, argv: list[str]) -> int:
    """Run a command and return the exit code.

    Args:
        argv: the arguments after the command's name.
    """
    if name == "demo":  # parses the arguments itself
        from ckptfmt_tools import demo

        return demo.main(argv)
    from ckptfmt.cli.arguments import make_command_parser
    from ckptfmt_tools.options import add_arguments

    arguments = make_command_parser(name, add_arguments).parse_args(argv)
    command: Callable[[argparse.Namespace], int] = import_module(
        f"ckptfmt_tools.{_MODULES[name]}"
    ).run
    return command(arguments)

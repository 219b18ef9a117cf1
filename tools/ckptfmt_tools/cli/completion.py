"""``completion``: a shell script, made by shtab, for completing commands, options and paths."""

from __future__ import annotations

import argparse
from typing import Final

from ckptfmt.errors import Code, err
from ckptfmt_tools.options import make_parser

#: Destinations of the arguments for files. The remaining arguments with a metavar in `_PATHS` are
#: directories.
_FILES: Final = frozenset({"join", "source", "target"})
_PATHS: Final = frozenset({"PATH", "RUN", "DEST", "MIRROR", "SOURCE", "TARGET", "FILE", "A", "B"})


def run(arguments: argparse.Namespace) -> int:
    """Print the script for a shell, and return the exit code.

    Raises: StateError(STATE_UNSUPPORTED) if shtab isn't installed.
    """
    try:
        import shtab
    except ModuleNotFoundError as error:
        remedy = 'Install it: pip install "ckptfmt[completion]".'
        raise err(
            Code.STATE_UNSUPPORTED, "completion is made by shtab", where="shtab", remedy=remedy
        ) from error
    parser = make_parser()
    for action in parser._actions:  # noqa: SLF001
        for command in (action.choices or {}).values() if isinstance(action.choices, dict) else ():
            for argument in command._actions:  # noqa: SLF001
                if argument.metavar in _PATHS:
                    argument.complete = shtab.FILE if argument.dest in _FILES else shtab.DIRECTORY
    print(shtab.complete(parser, shell=arguments.shell))
    return 0

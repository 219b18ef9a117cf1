"""``view``: a run or checkpoint in the browser, served by this machine for this machine."""

from __future__ import annotations

import argparse
import contextlib
import sys
import webbrowser
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from ckptfmt.cli.console import Console, clean, print_json
from ckptfmt.documents.manifest import parse_checkpoint_name
from ckptfmt.documents.run import RUN_NAME
from ckptfmt.errors import Code, err
from ckptfmt_tools.cli.serving import PAGE_FILES, ViewServer

#: The built page. `make view` copies the files to this directory, and a wheel has the files.
PAGE: Final = Path(__file__).parents[1] / "_view"


def run(arguments: argparse.Namespace) -> int:
    """Serve a directory and the page until Ctrl-C, and return the exit code.

    Raises: StateError(ARGUMENT) for a path that is no directory of this machine,
        StateError(STATE_UNSUPPORTED) without the built page.
    """
    if not all((PAGE / name).is_file() for name in PAGE_FILES):
        remedy = "In a checkout, `make view` builds the page; `make view` needs Node 20 and npm."
        raise err(Code.STATE_UNSUPPORTED, "the page isn't built", where=str(PAGE), remedy=remedy)
    directory = Path(arguments.path)
    if not directory.is_dir():
        remedy = "Give a directory of this machine. For a bucket, `ckptfmt mirror` makes a copy."
        raise err(Code.ARGUMENT, "there is no such directory", where=arguments.path, remedy=remedy)
    directory = directory.resolve()
    place = ""
    if parse_checkpoint_name(directory.name) and (directory.parent / RUN_NAME).is_file():
        # A delta needs its bases, which lie beside the checkpoint.
        place = f"#{urlencode({'view': 'checkpoint', 'path': directory.name})}"
        directory = directory.parent
    with ViewServer(PAGE, directory) as server:
        url = f"{server.url}{place}"
        if arguments.json:
            print_json({"url": url, "directory": str(directory)})
        else:
            console = Console()
            console.line((url, "bold"))
            console.line(f"  serves {clean(str(directory))}, read-only, until Ctrl-C")
        sys.stdout.flush()
        if arguments.open:
            webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0

"""``report``: a picture of a run, as a self-contained HTML page, or the same facts as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import errno
from collections import Counter
from pathlib import Path

from ckptfmt.cli.console import Console, bytes_text, clean, count_text, print_json
from ckptfmt.cli.places import open_run_place
from ckptfmt.errors import Code, err, remedy_of
from ckptfmt_tools.report.divergence import divergence_text, find_divergence
from ckptfmt_tools.report.run_picture import picture_members, read_picture


def run(arguments: argparse.Namespace) -> int:
    """Write the page of a run, or print its JSON, and return the exit code.

    Returns: 2 if a record can't be read, or a comparison failed; otherwise 0.
    Raises: StateError(ARGUMENT), IntegrityError(FILE_MISSING); StoreError, also if the page can't
        be written.
    """
    if arguments.html is None and not arguments.json:
        remedy = "Say where the page shall be: `--html run.html`; or print the same with --json."
        raise err(
            Code.ARGUMENT, "neither --html nor --json is given", where="--html", remedy=remedy
        )
    place = open_run_place(arguments.path)
    against = None if arguments.against is None else open_run_place(arguments.against)
    picture = read_picture(place)
    if against is not None:
        picture = dataclasses.replace(picture, divergence=find_divergence(place, against))
    if arguments.html is not None:
        from ckptfmt_tools.report.report_page import make_page

        content = make_page(picture).encode("utf-8", "backslashreplace")
        try:
            Path(arguments.html).write_bytes(content)
        except OSError as error:
            remedy = "Give a path in a directory that is there and may be written to."
            code = (
                Code.NO_SPACE if error.errno in (errno.ENOSPC, errno.EDQUOT) else Code.STORE_ACCESS
            )
            raise err(
                code,
                error.strerror or str(error),
                where=arguments.html,
                remedy=remedy_of(error) or remedy,
            ) from error
        if not arguments.json:
            states = Counter(save.state for save in picture.saves)
            counted = ", ".join(f"{count} {state}" for state, count in states.most_common())
            saves = count_text(len(picture.saves), "checkpoint")
            if counted:
                saves += f" ({counted})"
            Console().line(
                (clean(arguments.html), "bold"), f"  {saves}, page of {bytes_text(len(content))}"
            )
            if picture.divergence is not None:
                Console().line(clean(divergence_text(picture.divergence)))
    if arguments.json:
        print_json(picture_members(picture))
    unread = picture.divergence is not None and picture.divergence.problems
    return 2 if picture.problems or unread else 0

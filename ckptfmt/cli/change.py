"""``pin``, ``unpin``, ``tag``, ``untag`` and ``rm``: what a person says of a checkpoint of a run, and deleting one."""

from __future__ import annotations

import argparse
import dataclasses

from ckptfmt import limits
from ckptfmt.cli.console import Console, clean, labels_text, print_json
from ckptfmt.cli.places import open_run_place
from ckptfmt.errors import Code, err
from ckptfmt.run.catalog import Run


def run(arguments: argparse.Namespace) -> int:
    """Do what the command says, print what holds now, and return the exit code.

    Raises: CommitError(CHECKPOINT_NEEDED, CHECKPOINT_CONDEMNED); IntegrityError; StateError(ARGUMENT); StoreError.
    """
    open_run_place(arguments.path)
    found = Run(arguments.path)
    text = arguments.checkpoint
    which = int(text) if text.isdecimal() and len(text) <= len(str(limits.JSON_INTEGER)) else text
    action = arguments.command
    name = found.find(which).name
    if action == "tag":
        found.add_labels(name, metrics=dict(map(_parse_metric, arguments.metric)), tags=arguments.tags)
    elif action == "untag":
        found.untag(name, *arguments.tags)
    else:
        {"pin": found.pin, "unpin": found.unpin, "rm": found.delete}[action](name)
    now = found.find(name)
    if arguments.json:
        print_json({"target": arguments.path, "checked": "registers", **dataclasses.asdict(now)})
        return 0
    console = Console()
    if action == "rm":
        console.line(("deleted", "green bold"), f"  {clean(name)}: its name stays taken, and says so")
    else:
        console.line((clean(name), "bold"), "  ", labels_text(now.metrics, now.tags, pinned=now.pinned) or "no labels")
    return 0


def _parse_metric(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError:
        raise err(Code.ARGUMENT, f"{text!r} isn't NAME=NUMBER", where="--metric") from None

"""``pin``, ``unpin``, ``tag``, ``untag``, ``rm``: labels of a run's checkpoints, and deletion."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ckptfmt import limits
from ckptfmt.cli.console import Console, clean, labels_text, print_errors, print_json
from ckptfmt.cli.places import open_run_place
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.run.catalog import Run


def run(arguments: argparse.Namespace) -> int:
    """Run the command, print the resulting labels or deletions, and return the exit code.

    Raises: CommitError(CHECKPOINT_NEEDED, CHECKPOINT_CONDEMNED); IntegrityError;
        StateError(ARGUMENT); StoreError.
    """
    open_run_place(arguments.path)
    found = Run(arguments.path)
    action = arguments.command
    if action == "rm":
        return _delete(arguments, found)
    name = found.find(_which(arguments.checkpoint)).name
    if action == "tag":
        found.add_labels(
            name, metrics=dict(map(_parse_metric, arguments.metric)), tags=arguments.tags
        )
    elif action == "untag":
        found.untag(name, *arguments.tags)
    else:
        {"pin": found.pin, "unpin": found.unpin}[action](name)
    now = found.find(name)
    if arguments.json:
        print_json({"target": arguments.path, "checked": "registers", **dataclasses.asdict(now)})
        return 0
    labels = (
        labels_text(now.metrics, now.tags, pinned=now.pinned, suspect=now.suspect) or "no labels"
    )
    Console().line((clean(name), "bold"), "  ", labels)
    return 0


def _which(text: str) -> int | str:
    """Return a step as a number, and a name or a digest unchanged."""
    return int(text) if text.isdecimal() and len(text) <= len(str(limits.JSON_INTEGER)) else text


def _delete(arguments: argparse.Namespace, found: Run) -> int:
    """Delete checkpoints, and return the exit code.

    The newest checkpoint is deleted first: a delta is deleted before its bases. Of several named
    checkpoints, every failed deletion is reported as refused, and the rest is deleted.

    Raises: the errors of `Run.delete` for a single named checkpoint, such as
        CommitError(CHECKPOINT_NEEDED).
    """
    named = {one.name: one for one in (found.find(_which(text)) for text in arguments.checkpoints)}
    refused: dict[str, CkptError] = {}
    gone: list[str] = []
    for name in sorted(
        named, key=lambda name: (named[name].step, named[name].launch), reverse=True
    ):
        try:
            found.delete(name, dry_run=arguments.dry_run, force=arguments.force, gone=gone)
            gone.append(name)
        except CkptError as error:
            if len(named) == 1:
                raise
            refused[name] = error
    if arguments.json:
        members: dict[str, Any] = {
            "deleted": [name for name in named if name in gone],
            "refused": [error.as_json() for error in refused.values()],
        }
        if len(named) == 1:
            members |= dataclasses.asdict(found.find(next(iter(named))))
        print_json(
            {
                "target": arguments.path,
                "checked": "registers",
                "dry_run": arguments.dry_run,
                **members,
            }
        )
    else:
        console = Console()
        done = "would be deleted" if arguments.dry_run else "deleted"
        for name in named:
            if name in gone:
                console.line(
                    (done, "green bold"), f"  {clean(name)}: `ckptfmt ls --all` lists it as retired"
                )
        print_errors(console, refused.values(), "red bold")
    return 2 if refused else 0


def _parse_metric(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError:
        raise err(Code.ARGUMENT, f"{text!r} isn't NAME=NUMBER", where="--metric") from None

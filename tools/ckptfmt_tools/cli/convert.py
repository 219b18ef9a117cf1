"""``convert``: from and to files of torch.save, DCP directories, and Hugging Face directories."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import time
from pathlib import Path
from typing import Final

from ckptfmt.api import open_checkpoint
from ckptfmt.cli.console import Console, Progress, bytes_text, clean, count_text, print_json
from ckptfmt.errors import Code, err
from ckptfmt.read.files import read_anew
from ckptfmt.store import LocalStore, check_path, empty_path, is_url
from ckptfmt_tools.convert.content import LeftOut
from ckptfmt_tools.convert.converting import Conversion, plan_conversion
from ckptfmt_tools.convert.hf import parse_nbytes
from ckptfmt_tools.convert.hub import HubOptions
from ckptfmt_tools.convert.statement import dump_statement

#: The number of names shown for each reason; ``--json`` has all names.
_SHOWN: Final = 4


def run(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint, print the result and the omitted parts, and return the exit code.

    Raises: CkptError of any kind; then no target exists.
    """
    if arguments.step is not None and not 0 <= arguments.step < 1 << 53:
        raise err(Code.ARGUMENT, f"{arguments.step} is no number of steps", where="--step")
    begin_s = time.perf_counter()
    conversion = read_anew(lambda: _convert(arguments))
    elapsed_s = time.perf_counter() - begin_s
    if arguments.json:
        _print_json(conversion, elapsed_s)
    else:
        _print_text(conversion, elapsed_s)
    return 0


def _convert(arguments: argparse.Namespace) -> Conversion:
    with plan_conversion(
        arguments.source,
        arguments.target,
        from_kind=arguments.from_kind,
        to_kind=arguments.to_kind,
        open_checkpoint=functools.partial(open_checkpoint, bases=arguments.bases),
        rules=arguments.field,
        only=arguments.only,
        step=arguments.step,
        hub=HubOptions(
            max_shard_nbytes=parse_nbytes(arguments.max_shard_size),
            like=arguments.like,
            card=tuple(arguments.card),
        ),
    ) as conversion:
        if arguments.strict and conversion.left_out:
            raise _refusal(conversion)
        statement = None if arguments.statement is None else Path(arguments.statement)
        if statement is not None:
            _check_statement(arguments.statement, conversion)
        with Progress(lambda: conversion.nbytes, quiet=False) as progress:
            conversion.run(progress.advance)
        if statement is not None:
            content = dump_statement(conversion.content, Path(conversion.target))
            LocalStore(statement.parent, writable=True).create(statement.name, [content])
    return conversion


def _check_statement(said: str, conversion: Conversion) -> None:
    """Raise where no statement can be written, before the conversion writes anything.

    Raises: StateError(ARGUMENT); StoreError(STORE_EXISTS) for an existing file;
        FormatError(UNSAFE_PATH) for a name that stores refuse.
    """
    if is_url(conversion.target) or is_url(said):
        detail = "a statement is a local file about local files"
        remedy = "Convert to a path on this machine."
        raise err(Code.ARGUMENT, detail, where="--statement", remedy=remedy)
    if conversion.source_kind != "ckptfmt":
        remedy = "Convert a checkpoint of ckptfmt, or leave out --statement."
        detail = f"{conversion.content.origin} records no origin"
        raise err(Code.ARGUMENT, detail, where="--statement", remedy=remedy)
    if not said:
        raise empty_path("--statement")
    _check_place(said, conversion)
    path = Path(said)
    if not os.path.isdir(path.parent):  # noqa: PTH112 - Path's raises errors of the system
        remedy = "Make the directory first."
        raise err(Code.ARGUMENT, "the directory isn't there", where=said, remedy=remedy)
    check_path(path.name)


def _check_place(said: str, conversion: Conversion) -> None:
    """Raise where a statement would replace a file, or lie in the target or the source.

    Raises: StateError(ARGUMENT); StoreError(STORE_EXISTS).
    """
    remedy = "Give a path that isn't there yet, outside of the source and the target."
    if os.path.lexists(said):
        detail = "the file for the statement exists already"
        raise err(Code.STORE_EXISTS, detail, where=said, remedy=remedy)
    path = Path(os.path.realpath(said))
    for name, place in (("target", conversion.target), ("source", conversion.source)):
        if not is_url(place) and path.is_relative_to(os.path.realpath(place)):
            detail = f"the statement is in the {name}"
            raise err(Code.ARGUMENT, detail, where=said, remedy=remedy)


def _refusal(conversion: Conversion) -> Exception:
    first = conversion.left_out[0]
    count = len(conversion.left_out)
    return err(
        Code.STATE_UNSUPPORTED,
        f"{count_text(count, 'thing')} would be left out, first {first.what}: {first.reason}",
        where=conversion.target,
        remedy=(
            "Convert without --strict to see the list, or a field that passes whole with --only."
        ),
    )


def _print_json(conversion: Conversion, elapsed_s: float) -> None:
    print_json(
        {
            "source": {"path": conversion.source, "kind": conversion.source_kind},
            "target": {"path": conversion.target, "kind": conversion.target_kind},
            "checked": "bytes" if conversion.source_kind == "ckptfmt" else "nothing",
            "step": conversion.step,
            "step_key": conversion.step_key,
            "tensor_count": conversion.tensor_count,
            "nbytes": conversion.nbytes,
            "left_out": [dataclasses.asdict(left_out) for left_out in conversion.left_out],
            "elapsed_s": round(elapsed_s, 6),
        }
    )


def _print_text(conversion: Conversion, elapsed_s: float) -> None:
    console = Console()
    console.line(
        ("converted", "green bold"),
        f"  {clean(conversion.source)} ({conversion.source_kind}) to"
        f" {clean(conversion.target)} ({conversion.target_kind}):"
        f" {count_text(conversion.tensor_count, 'tensor')}, {bytes_text(conversion.nbytes)} in"
        f" {elapsed_s:.2f} s",
    )
    checked = "The source has no digests: its bytes were taken as they are."
    if conversion.source_kind == "ckptfmt":
        checked = "Every byte that was converted was compared with its digest first."
    console.line((f"  {checked}", "dim"))
    if conversion.source_kind != "ckptfmt" and conversion.target_kind == "ckptfmt":
        console.line((f"  {_step_text(conversion)}", "dim"))
    ordered = sorted(conversion.left_out, key=lambda left_out: left_out.reason)
    for reason, same in itertools.groupby(ordered, key=lambda left_out: left_out.reason):
        console.line(
            ("left out", "yellow bold"), f"  {_names(list(same))}", (f"  {clean(reason)}", "dim")
        )


def _step_text(conversion: Conversion) -> str:
    if conversion.step is None:
        return (
            "It is of step 0: the source doesn't say how many training steps were done; --step"
            " N does."
        )
    return (
        "It is of step"
        f" {conversion.step}{f', as {conversion.step_key!r} says' if conversion.step_key else ''}."
    )


def _names(same: list[LeftOut]) -> str:
    shown = ", ".join(clean(left_out.what) for left_out in same[:_SHOWN])
    return shown if len(same) <= _SHOWN else f"{shown} and {len(same) - _SHOWN} more"

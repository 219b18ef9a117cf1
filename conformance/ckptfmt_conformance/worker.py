"""The process that an adapter's class runs in: one JSON object per line in, one per line out.

So a class that crashes, hangs or leaves the interpreter costs one answer and not the run. What it prints goes to
standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from ckptfmt_conformance.protocol import ask

__all__ = ["EXIT_FAILED", "load_class", "main"]

#: What a call ended with that raised anything but an answer.
EXIT_FAILED: Final = 1


def load_class(name: str) -> Any:  # noqa: ANN401 - whatever class its author wrote
    """Return an instance of ``package.module:Class``. Raises: ImportError, AttributeError, and what it raises."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)()


def main(argv: list[str]) -> int:
    """Answer what comes on standard input, until that ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    adapter = None
    try:
        adapter = load_class(argv[0])
    except Exception as error:  # noqa: BLE001 - whatever an import does wrong, the suite is to say it
        _reply(answers, EXIT_FAILED, {}, f"{argv[0]} can't be made: {type(error).__name__}: {error}")
        return EXIT_FAILED
    _reply(answers, 0, {}, "")
    for line in sys.stdin.buffer:
        _reply(answers, *_answer(adapter, json.loads(line)))
    return 0


def _answer(adapter: Any, call: Mapping[str, Any]) -> tuple[int, Mapping[str, Any], str]:  # noqa: ANN401 - a class
    try:
        if call["kind"] == "trajectory":
            from ckptfmt_conformance.cells import run_cell  # noqa: PLC0415 - it imports a framework

            return 0, run_cell(adapter, call["cell"], Path(call["output"])), ""
        paths = {name: Path(call[name]) if call[name] is not None else None for name in ("path", "output")}
        return *ask(adapter, call["kind"], request=call["request"], **paths), ""
    except Exception as error:  # noqa: BLE001 - a crash is an answer, though never a good one
        traceback.print_exc()
        return EXIT_FAILED, {}, f"{type(error).__name__}: {error}"


def _reply(answers: BinaryIO, exit_code: int, body: Mapping[str, Any], message: str) -> None:
    try:
        line = json.dumps({"exit": exit_code, "body": body, "message": message}, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        line = json.dumps({"exit": EXIT_FAILED, "body": {}, "message": f"the result has no form in JSON: {error}"})
    answers.write(line.encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

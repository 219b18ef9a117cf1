"""The process in which an adapter's class runs. The process serves questions and runs trajectories.

A class that crashes, hangs or exits the interpreter costs one answer, and the run goes on. Printed
output of the class goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfmt_conformance.protocol import EXIT_ACCEPTED, EXIT_FAILED, ask_line, serve, take_output

__all__ = ["load_class", "main"]


def load_class(name: str) -> Any:
    """Return an instance of ``package.module:Class``.

    Raises: ImportError, AttributeError, and any exception of the class.
    """
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)()


def main(argv: list[str]) -> int:
    """Answer the questions on standard input until the input ends."""
    with take_output() as answers:
        try:
            adapter = load_class(argv[0])
        except Exception as error:  # noqa: BLE001 - the suite reports any exception of an import
            message = f"{argv[0]} can't be made: {type(error).__name__}: {error}"
            answers.write(json.dumps({"ready": False, "message": message}).encode() + b"\n")
            return EXIT_FAILED
        serve(sys.stdin.buffer, answers, lambda question: _answer(adapter, question))
    return EXIT_ACCEPTED


def _answer(adapter: Any, question: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    if question["kind"] == "witness":
        # The module imports a framework.
        from ckptfmt_conformance.trajectories.witness import answer_witness  # noqa: PLC0415

        answer_witness(adapter.checkpointing(), question["request"])
        return EXIT_ACCEPTED, {}
    if question["kind"] != "trajectory":
        return ask_line(adapter, question)
    from ckptfmt_conformance.cells import run_cell  # noqa: PLC0415 - the module imports a framework

    return EXIT_ACCEPTED, run_cell(adapter, question["cell"], Path(question["output"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

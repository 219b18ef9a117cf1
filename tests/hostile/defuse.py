"""Do with a checkpoint what people do, and say what it cost: ``python -m tests.hostile.defuse DIRECTORY``."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import ckptfmt
from ckptfmt.__main__ import main as command
from ckptfmt.errors import CkptError


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(action: Callable[[], object]) -> dict[str, Any]:
    """Return how an action ended: a code, or ok; processor time; the peak so far."""
    gc.collect()
    begin_s = time.process_time()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            outcome = str(action())
    except CkptError as error:
        outcome = str(error.code)
    return {"outcome": outcome[:60], "cpu_s": round(time.process_time() - begin_s, 2), "peak_mib": round(_peak_mib())}


def _validate(path: str) -> str:
    report = ckptfmt.validate(path)
    return str(report.violations[0].code) if report.violations else "ok"


def _open(path: str) -> str:
    with ckptfmt.open(path):
        return "ok"


def _load(path: str) -> str:
    ckptfmt.load(path)
    return "ok"


def _inspect(path: str) -> str:
    return f"exit {command(['inspect', path])}"


def main(path: str) -> None:
    """Print what each thing that people do came to, as JSON."""
    steps: dict[str, Callable[[str], str]] = {
        "open": _open,
        "validate": _validate,
        "load": _load,
        "inspect": _inspect,
    }
    found = {"import": {"outcome": "ok", "cpu_s": round(time.process_time(), 2), "peak_mib": round(_peak_mib())}}
    found |= {name: measure(lambda step=step: step(path)) for name, step in steps.items()}  # type: ignore[misc]
    print(json.dumps(found))  # noqa: T201 - a program


if __name__ == "__main__":
    main(sys.argv[1])

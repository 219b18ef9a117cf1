"""Do with checkpoints what people do, and say what it cost: ``python -m tests.hostile.defuse < QUESTIONS``.

A question is a line: names of `ACTIONS` or ``parse``, with commas between, a blank, and a directory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Final

import numpy as np

import ckptfmt
from ckptfmt.__main__ import main as command
from ckptfmt.box import Box
from ckptfmt.documents.canonical import parse_document
from ckptfmt.errors import CkptError


def _validate(path: str) -> str:
    report = ckptfmt.validate(path)
    return str(report.violations[0].code) if report.violations else "ok"


def _open(path: str) -> str:
    """Open a checkpoint; read a value, and an element of a tensor."""
    with ckptfmt.open(path) as checkpoint:
        for key in list(checkpoint.leaves)[:1]:
            checkpoint.leaf(*key)
        for tensor in checkpoint.index.tensors[:1]:
            first = Box(
                (0,) * len(tensor.global_shape),
                tuple(min(1, extent) for extent in tensor.global_shape),
            )
            checkpoint.read(tensor.field, tensor.name, tensor.scope, first)
    return "ok"


def _load(path: str) -> str:
    ckptfmt.load(path)
    return "ok"


def _inspect(path: str) -> str:
    return f"exit {command(['inspect', path])}"


def _parse(path: str) -> str:
    """Parse the document in a directory; the file is named like the document's type."""
    (file,) = pathlib.Path(path).iterdir()
    parse_document(file.read_bytes(), where="x", types=(file.stem,))
    return "ok"


#: What people do with a checkpoint.
ACTIONS: Final[dict[str, Callable[[str], str]]] = {
    "open": _open,
    "validate": _validate,
    "load": _load,
    "inspect": _inspect,
}
#: What a question may name.
_KNOWN: Final[dict[str, Callable[[str], str]]] = {**ACTIONS, "parse": _parse}


def measure(action: Callable[[], str]) -> dict[str, Any]:
    """Return how an action ended, in a process of its own: a code, or ok; its processor time; what it grew by."""
    get, put = os.pipe()
    resident = int(pathlib.Path("/proc/self/statm").read_text("utf-8").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )
    child = os.fork()
    if not child:
        _end(put, _outcome(action))
    os.close(put)
    with os.fdopen(get) as said:
        outcome = said.read()
    _, status, usage = os.wait4(child, 0)
    return {
        "outcome": outcome[:60] or f"wait status {status}",
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        # A process that is forked has what its parent had: a large one, where other tests ran
        # before.
        "growth_mib": round(usage.ru_maxrss / 1024 - resident / 2**20),
    }


def _outcome(action: Callable[[], str]) -> str:
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return action()
    except CkptError as error:
        return str(error.code)
    except BaseException as error:  # noqa: BLE001
        return repr(error)


def _end(put: int, outcome: str) -> None:
    os.write(put, outcome.encode())
    os._exit(0)


def main() -> None:
    """Print what each action came to, as a line of JSON for each question that comes in."""
    import torch  # noqa: F401, PLC0415

    for action in ACTIONS.values():  # and so what else the actions import
        with tempfile.TemporaryDirectory() as path:
            ckptfmt.save(
                path, ckptfmt.State(weights={"w": np.zeros(2)}, data={"position": 1}), step=1
            )
            assert _outcome(functools.partial(action, path)) in ("ok", "exit 0")
    gc.freeze()  # or a collection in a child copies what it looks at
    for line in sys.stdin:
        names, _, path = line.rstrip("\n").partition(" ")
        found = {name: measure(functools.partial(_KNOWN[name], path)) for name in names.split(",")}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

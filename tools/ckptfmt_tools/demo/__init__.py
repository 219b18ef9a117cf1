"""The demo: a real training run, killed in the middle, resumed, and compared bit by bit.

The resumed run is compared with an undisturbed run. It is resumed twice, on as many processes as
before and on one process more; neither resumption may change a bit.

    ckptfmt demo ckptfmt demo --store s3

Start reading at `ckptfmt_tools.demo.train`, the training script, as a user writes it.
`ckptfmt_tools.demo.story` starts the script several times and compares the results.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from ckptfmt.errors import CkptError, Code, err
from ckptfmt.store import is_url, open_store
from ckptfmt_tools.demo.screen import DemoProgress, Look, as_json, render
from ckptfmt_tools.demo.settings import ITEMS, STEPS_MIN, make_settings
from ckptfmt_tools.demo.story import Home, JobError, tell

__all__ = ["main"]

#: Exit codes: all comparisons hold; a comparison fails; the demo couldn't run; interrupted.
_HOLDS = 0
_DIFFERS = 1
_FAILED = 2
_INTERRUPTED = 130
#: Value of `--store` that isn't a URL: start a server.
_SERVER = "s3"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code: 0 only if all comparisons hold.

    Raises: StateError(STATE_UNSUPPORTED) where torch, or the conformance suite with its trainer,
        isn't installed.
    """
    # Imported late, since the module is also a program.
    from ckptfmt_tools.demo.servers import ServerError

    arguments = _parse_arguments(argv)
    for module in ("torch", "ckptfmt_conformance"):
        if importlib.util.find_spec(module) is None:
            raise err(
                Code.STATE_UNSUPPORTED,
                f"the demo trains a small model with {module}",
                where="demo",
                remedy=(
                    'Install it: pip install "ckptfmt[conformance,tools,torch]"; in a checkout,'
                    " `make venv`."
                ),
            )
    try:
        with _ended_as_by_ctrl_c(signal.SIGTERM):
            return _run(arguments)
    except (JobError, ServerError, CkptError, OSError) as error:
        print(f"\nThe demo couldn't run: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("\nInterrupted; nothing is left running.", file=sys.stderr)
        return _INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    begin_s = time.monotonic()
    settings = make_settings(steps=arguments.steps, quick=arguments.quick)
    options = [f"--steps={settings.steps}", *(["--quick"] if arguments.quick else [])]
    directory = _make_directory(arguments.run)
    progress = DemoProgress(3 if arguments.leave_out else 4)
    with _home(arguments.store) as home:
        try:
            outcome = tell(
                directory,
                settings,
                options,
                without=arguments.leave_out,
                show_phase=progress.phase,
                home=home,
            )
        finally:
            progress.end()
    seconds = time.monotonic() - begin_s
    if arguments.json:
        print(json.dumps(as_json(outcome, seconds=seconds), indent=2))
    else:
        print("\n" + render(outcome, Look.of(sys.stdout), seconds=seconds))
    return _HOLDS if outcome.holds else _DIFFERS


def _make_directory(wanted: Path | None) -> Path:
    """Return an empty directory. Raises: FileExistsError."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="ckptfmt-demo-"))
    wanted.mkdir(parents=True, exist_ok=True)
    if any(wanted.iterdir()):
        raise FileExistsError(f"{wanted} isn't empty; the demo writes over nothing")
    return wanted.resolve()


@contextmanager
def _home(store: str | None) -> Iterator[Home | None]:
    """Yield the home of the runs.

    The home is below a URL, or in a bucket of a new server; None for the demo's directory.

    Raises: ServerError; FileExistsError; CkptError.
    """
    from ckptfmt_tools.demo.servers import KINDS, Server, choose_kind

    if store is None:
        yield None
    elif store == _SERVER:
        kind = choose_kind()
        print(f"  starting {KINDS[kind]}", file=sys.stderr, flush=True)
        with Server(kind) as server:
            os.environ.update(server.endpoint.environment)  # inherited by the trainings
            url = f"s3://{server.endpoint.make_bucket()}"
            yield Home(url, f"{url} of {KINDS[kind]}, started for the demo")
    else:
        if open_store(store, writable=False).list_names(""):
            raise FileExistsError(f"{store} isn't empty; the demo writes over nothing")
        yield Home(store, store)


@contextmanager
def _ended_as_by_ctrl_c(number: signal.Signals) -> Iterator[None]:
    """Turn a signal into KeyboardInterrupt, so that no process is left behind."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ckptfmt demo",
        description="Train a small GPT on two processes, kill one, resume, and compare every bit"
        " with a run left in"
        " peace; then resume on three processes, and compare every bit again. About a minute on"
        " two cores.",
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="where to leave the run: an empty or a new directory",
    )
    parser.add_argument(
        "--store",
        type=_store,
        metavar="STORE",
        help="keep the runs in an object store: `s3` starts a server for them, Ceph's gateway or"
        " else moto; or the URL"
        " of an empty place, such as s3://bucket/demo",
    )
    parser.add_argument(
        "--steps", type=_steps, metavar="N", help=f"training steps, at least {STEPS_MIN}"
    )
    parser.add_argument("--quick", action="store_true", help="a much smaller model and fewer steps")
    parser.add_argument(
        "--leave-out",
        choices=ITEMS,
        metavar="ITEM",
        help="a negative control: leave this out when the killed run is restored, so that the"
        " comparison fails; one"
        f" of {', '.join(ITEMS)}",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args(argv)


def _store(text: str) -> str:
    if text != _SERVER and not is_url(text):
        raise argparse.ArgumentTypeError(
            f"{_SERVER}, or a URL such as s3://bucket/demo; --run takes a directory"
        )
    return text.rstrip("/")


def _steps(text: str) -> int:
    steps = int(text)
    if steps < STEPS_MIN:
        raise argparse.ArgumentTypeError(f"at least {STEPS_MIN}")
    return steps

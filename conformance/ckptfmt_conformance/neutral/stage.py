"""The process for judging cases: imports every module once, then forks a child for each case.

`judge` starts the process. Its plan comes by standard input. Its results go to a separate
descriptor, since a library may write to standard output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.neutral import asynchronous, damage, gang, killing, roundtrips
from ckptfmt_conformance.neutral.asking import VerdictError, one_line
from ckptfmt_conformance.neutral.case import FULL, Bench, Effort, NeutralCase, Result, Verdict
from ckptfmt_conformance.neutral.children import call
from ckptfmt_conformance.neutral.peer import Peer, find_peer

__all__ = ["CASES", "find_cases", "judge", "main"]

#: All neutral cases.
CASES: Final[tuple[NeutralCase, ...]] = (
    *roundtrips.CASES,
    *damage.CASES,
    *asynchronous.CASES,
    *killing.CASES,
    *gang.CASES,
)
#: Without threads of the libraries, a process has no threads at a fork.
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

#: The time limit for repeated removals of a case's directory, in seconds.
_LINGER_S: Final = 10.0


def find_cases(ids: Sequence[str]) -> list[NeutralCase]:
    """Return cases by their ids. Raises: ValueError for an unknown id."""
    by_id = {case.id: case for case in CASES}
    unknown = [name for name in ids if name not in by_id]
    if unknown:
        raise ValueError(f"no neutral case {unknown[0]!r}; there are {', '.join(by_id)}")
    return [by_id[name] for name in ids]


def judge(plan: Sequence[tuple[str, Sequence[str]]], *, effort: Effort = FULL) -> Iterator[Result]:
    """Run cases for peers in a new process with one import of torch. Yield each result at once.

    Args:
        plan: each peer's name, as in ``package.module:Class``, and the ids of the cases.
        effort: the amount of testing.

    Raises: ValueError for an unknown case; RuntimeError if the process fails.
    """
    for _, ids in plan:
        find_cases(ids)
    read_fd, write_fd = os.pipe()
    places = os.pathsep.join(dict.fromkeys(place or str(Path.cwd()) for place in sys.path))
    with tempfile.TemporaryFile() as errors, os.fdopen(read_fd, encoding="utf-8") as results:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main({write_fd})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": places},
            pass_fds=(write_fd,),
        )
        os.close(write_fd)
        assert process.stdin is not None
        with process, process.stdin as asked:
            asked.write(json.dumps([plan, dataclasses.asdict(effort)]).encode())
            asked.close()
            try:
                for line in results:
                    said = json.loads(line)
                    yield Result(**{**said, "status": Status(said["status"])})
            except BaseException:
                process.kill()  # the caller wants no more results
                raise
        if process.returncode:
            errors.seek(0)
            last = errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            raise RuntimeError(
                f"the judging process ended with status {process.returncode}: {' '.join(last)}"
            )


# --- in the judging process -----------------------------------------------------------------------


def main(write_fd: int) -> None:
    """Judge the plan on standard input."""
    plan, effort = json.load(sys.stdin)
    with os.fdopen(write_fd, "w", encoding="utf-8") as results:
        for name, ids in plan:
            peer = find_peer(name)
            for case in find_cases(ids):
                for module in case.imports:
                    importlib.import_module(module)
                result = _judge_one(name, peer, case, Effort(**effort))
                results.write(json.dumps(dataclasses.asdict(result)) + "\n")
                results.flush()


def _judge_one(name: str, peer: Peer, case: NeutralCase, effort: Effort) -> Result:
    """Judge one case in a forked process, which isolates crashes and a library's global state."""
    says = peer.describe()
    with _directory() as directory:
        scratch = Path(directory, "scratch")
        scratch.mkdir()
        noted = Path(directory, "noted")
        bench = Bench(scratch=scratch, effort=effort, note=lambda text: _note(noted, text))
        answer = call(lambda: _ask(case, peer, bench), timeout_s=effort.timeout_s)
        if answer.problem:
            at = noted.read_text("utf-8") if noted.exists() else "at the begin"
            verdict = Verdict(Status.ERROR, f"{answer.problem}: {at}")
        else:
            verdict = Verdict(Status(answer.value[0]), answer.value[1])
        verdict = Verdict(verdict.status, verdict.seen.replace(directory, "..."))
    remark = says.remarks.get(case.id, "")
    if verdict.status is Status.FAIL and case.id in says.disclaims:
        verdict = Verdict(Status.UNSUPPORTED, verdict.seen)
        remark = says.disclaims[case.id]
    return Result(peer=name, case=case.id, status=verdict.status, seen=verdict.seen, remark=remark)


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """Create a directory, and remove the directory at the end.

    The removal is repeated while a saver process that outlived its trainer still writes there.
    """
    directory = tempfile.mkdtemp(prefix="ckptfmt-neutral-")
    try:
        yield directory
    finally:
        end_s = time.monotonic() + _LINGER_S
        while Path(directory).exists() and time.monotonic() < end_s:
            shutil.rmtree(directory, ignore_errors=True)
            time.sleep(0.01)


def _note(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")


def _ask(case: NeutralCase, peer: Peer, bench: Bench) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning turned into an error would look like a refusal
        try:
            verdict = case.judge(peer, bench)
        except VerdictError as error:
            verdict = error.verdict
        except Exception as error:  # noqa: BLE001 - an unexpected error of the suite or the peer
            verdict = Verdict(Status.ERROR, one_line(error))
    return [verdict.status, verdict.seen]

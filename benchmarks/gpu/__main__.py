"""Run all GPU checks, step by step and in order of value, and write records meanwhile.

The command needs only Python's standard library: a step without a needed package reports the
package, and the other steps go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
WHEELS: Final = ROOT / ".wheels"
#: The time limit of all steps, in seconds: devices are lent for ten minutes.
BOUND_S: Final = 570.0
_TAIL: Final = 6000


def find_tests() -> list[str]:
    """Return the test files with device tests: an import of all files would take half a minute."""
    found = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if MARK in path.read_text(encoding="utf-8")
    ]
    return [str(path.relative_to(ROOT)) for path in sorted(found)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step in a separate process.

    Attributes:
        name: the name of the step's records.
        arguments: the interpreter's arguments; ``{device}``, ``{out}``, ``{scratch}`` and
            ``{nbytes}`` are filled in.
        limit_s: the time limit in seconds.
        nbytes: the size of the state, and the size in a rehearsal.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    nbytes: tuple[int, int] = (0, 0)


#: The mark of tests that need a device.
MARK: Final = "@pytest.mark.cuda\n"
_PYTEST: Final = (
    *("-m", "pytest", "-q", "-m", "cuda", "-rs", "-p", "pytest_timeout", "-p", "no:cacheprovider"),
    *(
        "-o",
        "addopts=--import-mode=importlib --strict-markers",
        "-W",
        "default",
        "--junitxml={out}/cuda_tests.xml",
    ),
)
STEPS: Final = (
    Step(
        name="environment",
        arguments=("-m", "benchmarks.gpu.environment", "--device", "{device}"),
        limit_s=60,
    ),
    Step(
        name="round_trip",
        arguments=(
            "-m",
            "benchmarks.gpu.round_trip",
            "--device",
            "{device}",
            "--nbytes",
            "{nbytes}",
        ),
        limit_s=120,
        nbytes=(200_000_000, 2_000_000),
    ),
    Step(
        name="device_training",
        arguments=(
            "-m",
            "benchmarks.gpu.device_training",
            "--device",
            "{device}",
            "--nbytes",
            "{nbytes}",
        ),
        limit_s=150,
        nbytes=(3_200_000_000, 2_000_000),
    ),
    Step(name="cuda_tests", arguments=(*_PYTEST, *find_tests()), limit_s=120),
    Step(
        name="gpu_digest",
        arguments=(
            *(
                "-m",
                "benchmarks",
                "gpu_digest",
                "--device",
                "{device}",
                "--nbytes",
                "{nbytes}",
                "--rounds",
                "5",
            ),
            *("--directory", "{scratch}", "--out", "{out}/gpu_digest.json"),
        ),
        limit_s=120,
        nbytes=(2_000_000_000, 1_000_000),
    ),
    Step(
        name="stall",
        arguments=(
            *(
                "-m",
                "benchmarks",
                "stall",
                "--device",
                "{device}",
                "--nbytes",
                "{nbytes}",
                "--rounds",
                "3",
            ),
            *("--directory", "{scratch}", "--out", "{out}/stall.json"),
        ),
        limit_s=220,
        nbytes=(800_000_000, 8_000_000),
    ),
    Step(
        name="trajectories",
        arguments=(
            *(
                "-m",
                "ckptfmt",
                "conformance",
                "run",
                "--adapter",
                "reference",
                "--kind",
                "trajectory",
            ),
            *("--filter", "trajectory/t1/plain/*", "--json", "{out}/trajectories.json"),
        ),
        limit_s=180,
    ),
)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="directory of the records, made if missing"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="do the same on the processor, as far as that goes"
    )
    parser.add_argument("--steps", help="names of steps, with commas between them (all)")
    parser.add_argument(
        "--bound", type=float, default=BOUND_S, help="seconds for all of it (%(default)s)"
    )
    parser.add_argument(
        "--wheels", type=Path, default=WHEELS, help="packages that travelled along (%(default)s)"
    )
    parser.add_argument(
        "--scratch", type=Path, help="where to write and delete (a temporary directory)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; return 0 for success, 1 if a step failed, 2 for an unknown name."""
    options = parse_arguments(arguments)
    names = [step.name for step in STEPS] if options.steps is None else options.steps.split(",")
    if unknown := set(names) - {step.name for step in STEPS}:
        print(
            f"no step {', '.join(sorted(unknown))}: there are"
            f" {', '.join(step.name for step in STEPS)}"
        )
        return 2
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + options.bound
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="ckptfmt-gpu-") as scratch:
        site = Path(scratch) / "site"
        print(f"packages: {unpack(options.wheels, site)} from {options.wheels}")
        device = "cpu" if options.rehearse else "cuda"
        environment = environment_of(site, device=device)
        codes = {}
        for step in STEPS:
            if step.name in names:
                words = {
                    "device": device,
                    "out": str(out),
                    "scratch": scratch,
                    "nbytes": step.nbytes[device == "cpu"],
                }
                command = [
                    sys.executable,
                    *(argument.format(**words) for argument in step.arguments),
                ]
                limit_s = min(step.limit_s, end_s - time.monotonic())
                record = run_step(
                    step.name, command, environment, limit_s=limit_s, log=out / "output.log"
                )
                codes[step.name] = record["exit_code"]
                with (out / "records.jsonl").open("a", encoding="utf-8") as records:
                    records.write(f"{json.dumps({'rehearsal': options.rehearse, **record})}\n")
                print(
                    f"{step.name}: exit code {record['exit_code']} after {record['seconds']:.0f} s",
                    flush=True,
                )
    return int(any(codes.values()))


def unpack(wheels: Path, site: Path) -> int:
    """Unpack the transferred wheels, and return their number.

    A wheel is an archive, so that no installer is needed, which some environments lack. A wheel for
    another machine fails in the first step that imports the package, by name.
    """
    site.mkdir(parents=True)
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return len(found)


def environment_of(site: Path, *, device: str) -> dict[str, str]:
    """Return the environment of the steps: our packages first, and deterministic kernels."""
    places = [str(site), str(ROOT), str(ROOT / "conformance"), str(ROOT / "tools")]
    if inherited := os.environ.get("PYTHONPATH"):
        places.append(inherited)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CKPTFMT_CONFORMANCE_DEVICE": device,
    }


def run_step(
    name: str, command: Sequence[str], environment: dict[str, str], *, limit_s: float, log: Path
) -> dict[str, Any]:
    """Run a command until its end or its time limit, and return the record.

    Args:
        log: the file for the whole output, appended at once.
    """
    began = dt.datetime.now(dt.UTC)
    begin_s = time.monotonic()
    code: int | None = None
    with log.open("ab+") as output:
        output.write(f"=== {name}: {' '.join(command)}\n".encode())
        output.flush()
        begin = output.tell()
        if limit_s > 0:
            # In a separate session, so that child processes end with the step.
            with subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process:
                try:
                    code = process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
        output.seek(begin)
        told = output.read().decode(errors="replace")
    return {
        "step": name,
        "command": list(command),
        "began": began.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - begin_s, 2),
        "limit_s": round(limit_s, 1),
        "exit_code": 124 if code is None else code,
        "output_tail": told[-_TAIL:],
    }


if __name__ == "__main__":
    raise SystemExit(main())

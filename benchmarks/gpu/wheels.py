"""Fetch the packages for a machine with torch and numpy and without a network."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.gpu.__main__ import ROOT, WHEELS

#: The imports of the steps except torch and numpy, and their dependencies. numpy stays as in
#: torch's own environment.
NAMES: Final = (
    *(
        "attrs",
        "blake3",
        "hypothesis",
        "iniconfig",
        "jsonschema",
        "jsonschema-specifications",
        "ml_dtypes",
        "msgpack",
    ),
    *(
        "packaging",
        "pluggy",
        "Pygments",
        "pytest",
        "pytest-timeout",
        "referencing",
        "rpds-py",
        "safetensors",
    ),
    *("sortedcontainers", "typing_extensions", "xxhash", "zstandard"),
)
PYTHON: Final = "3.12"
_PLATFORMS: Final = (
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_24",
    "manylinux_2_17",
    "manylinux2014",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the packages, and return the exit status of the installer."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.wheels", description=__doc__)
    parser.add_argument(
        "--python", default=PYTHON, help="version of the machine's Python (%(default)s)"
    )
    parser.add_argument("--machine", default="x86_64", help="its processor (%(default)s)")
    parser.add_argument("--out", type=Path, default=WHEELS, help="where to put them (%(default)s)")
    options = parser.parse_args(arguments)
    return fetch(options.out, python=options.python, machine=options.machine)


def fetch(out: Path, *, python: str, machine: str) -> int:
    """Fetch the pins of `constraints.txt` into an empty directory, and return the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.whl"):
        old.unlink()
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_{machine}")]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *(
            "--implementation",
            "cp",
            "--python-version",
            python,
            *platforms,
            "--dest",
            str(out),
            *pins(),
        ),
    ]
    status = subprocess.run(command, check=False).returncode
    found = [wheel.stat().st_size for wheel in out.glob("*.whl")]
    print(f"{len(found)} packages for Python {python}, {sum(found) / 1e6:.1f} MB, in {out}")
    return status


def pins() -> list[str]:
    """Return each package with its version, in an installer's syntax."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions = dict(line.split("==") for line in lines if not line.startswith("#"))
    return [f"{name}=={versions[name]}" for name in NAMES]


if __name__ == "__main__":
    raise SystemExit(main())

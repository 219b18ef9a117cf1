"""Rehearse the GPU steps on this machine, with torch and numpy only.

The interpreter is the base interpreter of this environment, without the environment's packages;
links provide torch and numpy with their dependencies.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.__main__ import ROOT
from benchmarks.gpu.wheels import fetch


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse; the arguments are the arguments of `benchmarks.gpu`."""
    with tempfile.TemporaryDirectory(prefix="ckptfmt-rehearsal-") as directory:
        wheels = Path(directory) / "wheels"
        site = Path(directory) / "site"
        python = ".".join(platform.python_version_tuple()[:2])
        if status := fetch(wheels, python=python, machine=platform.machine()):
            return status
        lend(site, ("torch", "numpy"))
        below = Path(sys.base_prefix) / "bin" / f"python{python}"
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        command = [str(below), "-m", "benchmarks.gpu", "--rehearse", "--wheels", str(wheels)]
        command += sys.argv[1:] if arguments is None else arguments
        return subprocess.run(
            command, cwd=ROOT, env={**own, "PYTHONPATH": str(site)}, check=False
        ).returncode


def lend(site: Path, names: Sequence[str]) -> None:
    """Make links to packages of this environment and to their dependencies."""
    site.mkdir(parents=True)
    for distribution in _with_needs(names):
        for file in distribution.files or ():
            top = file.parts[0]
            target = Path(str(distribution.locate_file(top)))
            if top != ".." and target.exists() and not (site / top).exists():
                (site / top).symlink_to(target)


def _with_needs(names: Sequence[str]) -> Iterator[importlib.metadata.Distribution]:
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another machine
        yield distribution
        needs = [need for need in distribution.requires or () if "extra ==" not in need]
        waiting += [re.split(r"[^A-Za-z0-9._-]", need, maxsplit=1)[0] for need in needs]


if __name__ == "__main__":
    raise SystemExit(main())

"""The distributions of this repository, built, and environments in which they are installed without a network."""

import fcntl
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.gpu.rehearsal import lend
from tests.house.sources import ROOT

#: Where each is built.
PROJECTS = {
    "ckptfmt": ROOT,
    "ckptfmt-conformance": ROOT / "conformance",
    "ckptfmt-tools": ROOT / "tools",
}


def run(*command, cwd, path=None, code=0):
    """Run a command with nothing of the checkout in sight, and only `path` in front of what is installed."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "CKPTFMT"))
    }
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def build(folder, name):
    """Build a source distribution and, of what is in it, the wheel. Returns both paths."""
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(PROJECTS[name]),
        cwd=folder,
    )
    stem = name.replace("-", "_")
    (source,) = folder.glob(f"{stem}-[0-9]*.tar.gz")
    (wheel,) = folder.glob(f"{stem}-[0-9]*.whl")
    return source, wheel


def build_once(tmp_path_factory, name):
    """Build a distribution, once for all workers of a test session; return both paths."""
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    folder, done = place / name, place / f"{name}.json"
    with (place / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()
            done.write_text(json.dumps([str(path) for path in build(folder, name)]))
    return tuple(Path(path) for path in json.loads(done.read_text()))


def pip(python, *arguments):
    """Return the command with which this environment's pip installs for an interpreter, without a network."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "--disable-pip-version-check",
        "--python",
        str(python),
    ]
    return [*command, "install", "--quiet", "--no-index", *map(str, arguments)]


class Environment:
    """An environment of its own, which is lent some packages of this one, with what they need."""

    def __init__(self, folder: Path, lent):
        venv.create(folder / "env", symlinks=True, with_pip=False)
        self.bin = folder / "env" / "bin"
        self.python = self.bin / "python"
        lend(folder / "lent", lent)
        (site,) = (folder / "env" / "lib").glob("python3.*/site-packages")
        (site / "lent.pth").write_text(f"{folder / 'lent'}\n")

    def install(self, *arguments):
        run(*pip(self.python, *arguments), cwd=self.bin)

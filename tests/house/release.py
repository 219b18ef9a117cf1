"""Build all distributions twice, compare the bytes, and write them with their sums: ``python -m tests.house.release``.

Each build takes place in a copy of the committed files, with the time of the commit as
SOURCE_DATE_EPOCH. The two copies differ in path, time zone, locale, umask and hash seed. Nothing is
uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.house.sources import ROOT

#: The folder of each distribution in the repository.
FOLDERS: Final = {"ckptfmt": ".", "ckptfmt-conformance": "conformance", "ckptfmt-tools": "tools"}
SUMS: Final = "SHA256SUMS"


class ReleaseError(Exception):
    """The distributions can't be released; the text says why."""


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def check_committed() -> None:
    """Raise ReleaseError if files of the repository aren't committed."""
    changed = _git("status", "--porcelain").decode().splitlines()
    if changed:
        raise ReleaseError("commit these files first:\n" + "\n".join(changed))


def copy_commit(folder: Path) -> None:
    """Write the files of the newest commit into an empty folder."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "HEAD"))) as archive:
        archive.extractall(folder, filter="data")


def build_page(folder: Path) -> None:
    """Build the page of `ckptfmt view` in a copy of the repository, for the wheel of the tools.

    Raises: ReleaseError without the tools of the JavaScript package, or if the build fails.
    """
    tools = ROOT / "js" / "node_modules"
    if not tools.is_dir():
        raise ReleaseError("the page of `ckptfmt view` can't be built: run `make js-tools` first")
    (folder / "js" / "node_modules").symlink_to(tools)
    done = subprocess.run(
        ["npm", "run", "--silent", "view"],
        cwd=folder / "js",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ReleaseError(f"the page can't be built:\n{done.stdout}\n{done.stderr}")
    shutil.copytree(folder / "js" / "view" / "dist", folder / "tools" / "ckptfmt_tools" / "_view")


def build(
    folder: Path, out: Path, *, epoch_s: int, variables: Mapping[str, str], umask: int
) -> None:
    """Build sdist and wheel of each distribution from a copy of the repository.

    Args:
        folder: the copy.
        out: the empty folder of the distributions.
        epoch_s: time of the files in the distributions, in seconds since 1970.
        variables: further variables of the environment.
        umask: the umask of the build.

    Raises: ReleaseError with the output of a build that failed.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "CKPTFMT"))
    }
    for name, place in FOLDERS.items():
        done = subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, folder / place],
            cwd=folder,
            env={**kept, **variables, "SOURCE_DATE_EPOCH": str(epoch_s)},
            umask=umask,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ReleaseError(f"{name} can't be built:\n{done.stdout}\n{done.stderr}")


def _members(path: Path) -> dict[str, bytes]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(path) as source:
        files = {member.name: source.extractfile(member) for member in source if member.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None}


def find_differences(one: Path, other: Path) -> list[str]:
    """Return a sentence for each difference between two folders of distributions."""
    names = [{path.name for path in folder.iterdir()} for folder in (one, other)]
    found = [f"{name} is in one build only" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        first, second = one / name, other / name
        if first.read_bytes() == second.read_bytes():
            continue
        contents, others = _members(first), _members(second)
        members = sorted(
            member
            for member in contents.keys() | others.keys()
            if contents.get(member) != others.get(member)
        )
        found.append(
            f"{name} differs, in {', '.join(members[:5])}"
            if members
            else f"{name} differs, in order, times, modes or compression of its members"
        )
    return found


def check_equal(one: Path, other: Path) -> None:
    """Raise ReleaseError if two folders of distributions differ."""
    differences = find_differences(one, other)
    if differences:
        raise ReleaseError("two builds differ:\n" + "\n".join(differences))


def write_sums(folder: Path) -> str:
    """Write the file of sums into a folder of distributions, for ``sha256sum --check``."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
    ]
    (folder / SUMS).write_text("".join(lines), "utf-8")
    return "".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns: 0 if both builds have the same bytes, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.house.release", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="replaced by the result")
    out = parser.parse_args(arguments).out
    settings = (
        ("first", {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "1"}, 0o022),
        ("second/copy", {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "2"}, 0o077),
    )
    try:
        check_committed()
        epoch_s = int(_git("log", "-1", "--format=%ct"))
        with tempfile.TemporaryDirectory() as place:
            builds = []
            for name, variables, umask in settings:
                folder, made = Path(place, name), Path(place, name.partition("/")[0] + "-dist")
                folder.mkdir(parents=True)
                copy_commit(folder)
                build_page(folder)
                build(folder, made, epoch_s=epoch_s, variables=variables, umask=umask)
                builds.append(made)
            check_equal(*builds)
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(builds[0], out)
    except ReleaseError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sums = write_sums(out)
    count = len(sums.splitlines())
    sys.stdout.write(f"{sums}{count} files, built twice with the same bytes: {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

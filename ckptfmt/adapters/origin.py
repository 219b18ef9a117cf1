"""The origin of the running program: git checkout, host, driver and container.

No environment variable is recorded but the two that name a commit or an image, no remote, no author
and no file name.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: Environment variables with the commit of the program, for programs outside of a checkout.
_COMMIT_VARIABLES: Final = ("CKPTFMT_GIT_COMMIT", "GITHUB_SHA")
#: The environment variable with the digest of the container's image, which no container knows.
_IMAGE_VARIABLE: Final = "CKPTFMT_IMAGE_DIGEST"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
#: A commit or tag in a variable, but no address: an address may have a password.
_NAMED: Final = re.compile(r"\w[\w.+/-]{0,63}", re.ASCII)
_IMAGE: Final = re.compile(r"(sha256:)?[0-9a-f]{64}")
#: Longest time for the comparison of a checkout with its commit, in seconds.
_GIT_S: Final = 2.0
_GIT: Final = ("git", "-c", "core.fsmonitor=false")
#: The comparison of tracked files with the commit. Only filters of the configuration may run.
_DIFF: Final = (*_GIT, "diff", "--no-ext-diff", "--no-textconv", "--quiet", "HEAD")
#: The list of the named files neither tracked nor ignored by git.
_UNTRACKED: Final = (*_GIT, "ls-files", "--others", "--exclude-standard", "--")
_LOG: Final = logging.getLogger(__name__)
_TEXT_NBYTES: Final = 4096


@functools.cache
def program_origin() -> dict[str, str]:
    """Return facts on the origin of this program, each a short text; found once for a process.

    ``git_commit`` is the commit of the checkout with the main program, or of the current directory,
    unless a variable names another commit.
    ``git_changes`` is ``some`` if tracked files differ from the commit or git doesn't know the main
    program; otherwise ``none``, or ``unknown``.
    ``host`` is the name of the machine, ``nvidia_driver`` the version of the driver,
    and ``container`` and ``image_digest`` are the container's kind and image, as far as known.
    """
    found = {"host": platform.node()[:255]}
    with contextlib.suppress(OSError):  # a folder that is gone, or that can't be read
        program = _program_file()
        found |= _checkout(Path.cwd() if program is None else program.parent, program)
    named = next(filter(None, (_read_variable(name, _NAMED) for name in _COMMIT_VARIABLES)), None)
    if named is not None and named != found.get("git_commit"):
        found.pop("git_changes", None)
        found["git_commit"] = named
    found |= _container(Path("/"), _read_variable(_IMAGE_VARIABLE, _IMAGE))
    driver = _read(Path("/proc/driver/nvidia/version"))
    if match := re.search(r"Kernel Module\D{0,40}(\d+(?:\.\d+){1,3})", driver):
        found["nvidia_driver"] = match[1]
    return found


def _read_variable(name: str, form: re.Pattern[str]) -> str:
    """Return an environment variable; "" for an unset variable, and for a value of another form.

    A value of another form is logged by the variable's name.
    """
    value = os.environ.get(name, "")
    if not value or form.fullmatch(value):
        return value
    _LOG.warning("%s isn't recorded: its value has another form than %s", name, form.pattern)
    return ""


def _program_file() -> Path | None:
    """Return the file of the main program; None for an interactive session."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if file else None


def _checkout(folder: Path, program: Path | None = None) -> dict[str, str]:
    """Return commit and changes of the git checkout around a folder; nothing without a checkout.

    Args:
        program: the main program, which counts as a change if git doesn't know it.
    """
    for root in (folder, *folder.parents):
        git = root / ".git"
        if git.exists():
            commit = _head_of(_git_folder(git))
            return {"git_commit": commit, "git_changes": _changes(root, program)} if commit else {}
    return {}


def _git_folder(git: Path) -> Path:
    """Return the folder of a checkout's repository, which a file names in a linked worktree."""
    if git.is_dir():
        return git
    return (git.parent / _read(git).removeprefix("gitdir:").strip()).resolve()


def _head_of(git: Path) -> str:
    """Return the commit that is checked out; "" if there is none."""
    head = _read(git / "HEAD").strip()
    name = head.removeprefix("ref:").strip()
    if name == head:
        return head if _COMMIT.fullmatch(head) else ""
    common = (git / (_read(git / "commondir").strip() or ".")).resolve()
    for folder in (git, common):
        commit = _read(folder / name).strip()
        if _COMMIT.fullmatch(commit):
            return commit
    packed = _read(common / "packed-refs", 16 << 20)
    match = re.search(rf"^([0-9a-f]+) {re.escape(name)}$", packed, re.MULTILINE)
    return match[1] if match and _COMMIT.fullmatch(match[1]) else ""


def _changes(root: Path, program: Path | None) -> str:
    """Return ``none`` or ``some`` for the tracked files and the program, or ``unknown``."""
    differs = _run_git(_DIFF, root)
    if differs is not None and differs.returncode == 0 and program is not None:
        listed = _run_git((*_UNTRACKED, os.fspath(program)), root)
        return "unknown" if listed is None else ("some" if listed.stdout else "none")
    return (
        "unknown" if differs is None else {0: "none", 1: "some"}.get(differs.returncode, "unknown")
    )


def _run_git(command: Sequence[str], root: Path) -> subprocess.CompletedProcess[bytes] | None:
    """Run a command of git in a checkout; return None if there is no git, or no end in time."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.environ.get("HOME", ""),
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_LAZY_FETCH": "1",
    }
    try:
        return subprocess.run(  # noqa: S603 - a fixed command in the program's own checkout
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _container(root: Path, image: str) -> dict[str, str]:
    """Return the kind of the container around the program, and its image as far as known."""
    podman = _read(root / "run" / ".containerenv")
    kind = "podman" if podman else ""
    if not kind and (root / ".dockerenv").exists():
        kind = "docker"
    if not kind and "KUBERNETES_SERVICE_HOST" in os.environ:
        kind = "kubernetes"
    match = re.search(r'^imageid="([0-9a-f]{64})"$', podman, re.MULTILINE)
    digest = image or (match[1] if match else "")
    found = {"container": kind, "image_digest": digest}
    return {name: value for name, value in found.items() if value}


def _read(path: Path, limit_nbytes: int = _TEXT_NBYTES) -> str:
    """Return the beginning of a regular file as text; "" for a file that can't be read."""
    try:
        if not path.is_file():  # opening a pipe would wait
            return ""
        with path.open("rb") as file:
            return file.read(limit_nbytes).decode("utf-8", "replace")
    except OSError:
        return ""

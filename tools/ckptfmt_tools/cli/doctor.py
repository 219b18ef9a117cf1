"""``doctor``: checks of a machine and a place: versions, memory for slots, store guarantees."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import functools
import importlib.metadata
import mmap
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ckptfmt.cli.console import Console, bytes_text, clean, count_text, print_json, version_members
from ckptfmt.commit.lone import is_run
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.catalog import Run
from ckptfmt.store import Store, is_url, open_store
from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.protocol import PAGE_NBYTES, TEMPORARY_PREFIX
from ckptfmt.write.slot import Slot, available_nbytes, plan_slots

#: The size of the test file, in bytes.
_TRY_NBYTES: Final = 4 << 20
#: The default number of slots of a `Checkpointer`.
_SLOTS: Final = 2
_STYLES: Final = {"ok": "green", "warning": "yellow bold", "failed": "red bold"}
#: The optional libraries, and their purposes.
_OPTIONAL: Final = {
    "torch": "tensors of torch", "obstore": "object stores: s3://, gs://, az://", "jax": ("arrays"
    " of"
    " JAX")
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check.

    Attributes:
        about: the checked subject.
        state: ``ok``; ``warning`` for a function that works with a drawback; ``failed`` for a
            function that doesn't work.
        detail: the observation.
        remedy: the advice to the user, or an empty string.
    """

    about: str
    state: str
    detail: str
    remedy: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Check this machine, and a place if given; print the findings, and return the exit code.

    Files written for the checks are removed again.

    Returns: 1 if a check failed, otherwise 0.
    Raises: StateError(ARGUMENT) for an invalid place, or a number of processes below 1.
    """
    if arguments.processes < 1:
        raise err(Code.ARGUMENT, f"{arguments.processes} processes can't save", where="--processes")
    findings = [*_look_at_versions()]
    image_nbytes = None
    if arguments.path is not None:
        findings += _look_at_place(arguments.path)
        image_nbytes = _find_image_nbytes(arguments.path)
    findings.append(_look_at_memory(image_nbytes, arguments.processes))
    if arguments.json:
        print_json(
            {"target": arguments.path, "findings": [dataclasses.asdict(one) for one in findings]}
        )
    else:
        console = Console()
        for one in findings:
            console.line(
                (one.state.ljust(9), _STYLES[one.state]),
                (one.about.ljust(12), "bold"),
                f"{clean(one.detail)}",
            )
            if one.remedy:
                console.line((f"  {clean(one.remedy)}", "dim"))
    return 1 if any(one.state == "failed" for one in findings) else 0


# --- versions -------------------------------------------------------------------------------------


def _look_at_versions() -> Iterator[Finding]:
    members = version_members()
    machine = f"Python {platform.python_version()}, {platform.platform()}"
    detail = f"{members['version']}, format {members['format']}, {machine}"
    yield Finding(about="ckptfmt", state="ok", detail=detail)
    try:
        required = importlib.metadata.requires("ckptfmt") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    names = [re.split(r"[^A-Za-z0-9._-]", text)[0] for text in required if "extra ==" not in text]
    versions = {name: _version_of(name) for name in names}
    missing = [name for name, version in versions.items() if version is None]
    detail = ", ".join(
        f"{name} {version}" for name, version in versions.items() if version is not None
    )
    if missing:
        remedy = "Install ckptfmt again: pip install --force-reinstall ckptfmt"
        yield Finding(
            about="libraries",
            state="failed",
            detail=f"not there: {', '.join(missing)}",
            remedy=remedy,
        )
    elif detail:
        yield Finding(about="libraries", state="ok", detail=detail)
    found = {name: _version_of(name) for name in _OPTIONAL}
    there = [f"{name} {version}" for name, version in found.items() if version is not None]
    lacking = [
        f"no {name} ({_OPTIONAL[name]})" for name, version in found.items() if version is None
    ]
    yield Finding(about="optional", state="ok", detail=", ".join([*there, *lacking]))


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- memory ---------------------------------------------------------------------------------------


def _find_image_nbytes(path: str) -> int | None:
    """Return the average bytes per writer of the newest checkpoint at a place.

    Returns: None if the place has no readable checkpoint.
    """
    try:
        store = open_store(path, writable=False)
        manifest = (Run(store).open() if is_run(store) else Checkpoint(store)).manifest
    except CkptError:
        return None
    return -(-manifest.nbytes // manifest.origin.writer_count)


def _look_at_memory(image_nbytes: int | None, processes: int) -> Finding:
    room_nbytes = available_nbytes()
    try:
        Slot.make(PAGE_NBYTES).close()
    except CkptError as error:
        remedy = "Saves need shared memory (memfd_create); saver='inline' does without."
        return Finding(about="slots", state="failed", detail=str(error), remedy=remedy)
    room = (
        f"{bytes_text(room_nbytes)} of memory left for"
        f" {count_text(processes, 'process', 'processes')}"
    )
    if image_nbytes is None:
        return Finding(about="slots", state="ok", detail=room)
    count = plan_slots(image_nbytes, _SLOTS, room_nbytes, processes)
    detail = (
        f"{room}: {count} of {_SLOTS} slots of {bytes_text(image_nbytes)} each, as the"
        " newest checkpoint has it"
    )
    if count == _SLOTS:
        return Finding(about="slots", state="ok", detail=detail)
    remedy = (
        "A save will wait for the one before."
        if count
        else "Saves need saver='inline', or more memory."
    )
    return Finding(
        about="slots", state="warning" if count else "failed", detail=detail, remedy=remedy
    )


# --- the place ------------------------------------------------------------------------------------


def _look_at_place(path: str) -> Iterator[Finding]:
    """Check the operations of a save at a place, in a directory that is removed again."""
    if is_url(path) and not path.startswith("file:"):
        yield from _try_store(path, path)
        return
    directory = Path(open_store(path, writable=False).name)
    try:
        directory = _existing(directory)
        trial = tempfile.TemporaryDirectory(prefix=f"{TEMPORARY_PREFIX}doctor-", dir=directory)
    except OSError as error:
        detail = f"nothing can be created in {directory}: {error.strerror}"
        yield Finding(
            about="place",
            state="failed",
            detail=detail,
            remedy="Give a directory that may be written.",
        )
        return
    free_nbytes = shutil.disk_usage(directory).free
    yield Finding(about="place", state="ok", detail=f"{directory}, {bytes_text(free_nbytes)} free")
    with trial as name:
        yield from _try_store(name, path)
        yield _try_direct(Path(name))


def _existing(directory: Path) -> Path:
    """Return a directory, or its nearest existing parent."""
    return next(one for one in (directory, *directory.parents) if one.is_dir())


def _try_store(trial: str, path: str) -> Iterator[Finding]:
    """Check a store: exclusive creation, fsync of directories, a file written and read, holds.

    Opening a store for writing checks exclusive creation and fsync.
    """

    def attempt(about: str, action: Callable[[], str], remedy: str = "") -> Finding:
        try:
            return Finding(about=about, state="ok", detail=action())
        except CkptError as error:
            return Finding(
                about=about, state="failed", detail=str(error).replace(trial, path), remedy=remedy
            )

    stores: list[Store] = []

    def open_it() -> str:
        stores.append(open_store(trial, writable=True))
        return "of several that create one name at once, exactly one succeeds, durably"

    yield attempt(
        "commits",
        open_it,
        "A checkpoint can't be committed there: choose another file system or server.",
    )
    for store in stores:
        yield attempt("a file", functools.partial(_try_file, store))
        if store.holds_expire:
            yield Finding(
                about="holds",
                state="ok",
                detail="by leases: a killed saver counts as living for a minute",
            )
            continue
        with store.hold("savers/doctor"):
            is_held = store.list_held("savers") == ["doctor"]
        if is_held:
            yield Finding(
                about="holds",
                state="ok",
                detail="by locks: a launch waits for the saver of the one before",
            )
        else:
            remedy = (
                "A launch can't see that an older one still saves: end it before you start"
                " the next."
            )
            yield Finding(
                about="holds", state="warning", detail="the file system has no locks", remedy=remedy
            )


def _try_file(store: Store) -> str:
    """Write a file durably, read it back, compare the contents, and delete the file.

    Returns: the time of the durable write, in a sentence.
    Raises: CkptError of the store; StoreError(STORE_IO) for different contents.
    """
    content = os.urandom(_TRY_NBYTES)
    path = f"{TEMPORARY_PREFIX.lstrip('.')}doctor-{os.getpid()}"
    begin_s = time.perf_counter()
    store.create(path, [content])
    store.sync("")
    elapsed_s = time.perf_counter() - begin_s
    found = store.read(path, limit_nbytes=_TRY_NBYTES)
    store.delete(path)
    if found != content:
        raise err(Code.STORE_IO, "the bytes read differ from the bytes written", where=store.name)
    return (
        f"{bytes_text(_TRY_NBYTES)} written durably in {elapsed_s * 1000:.0f} ms, read back"
        " and compared"
    )


def _try_direct(directory: Path) -> Finding:
    """Check direct I/O by writing a page."""
    calls = PosixCalls()
    page = mmap.mmap(-1, PAGE_NBYTES)  # page-aligned memory, required by direct I/O
    with (directory / "direct").open("wb", buffering=0) as file, contextlib.closing(page):
        try:
            calls.set_direct(file.fileno(), on=True)
            with memoryview(page) as view:
                calls.write_at(file.fileno(), view, 0)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error))
            detail = f"the file system refuses it ({name}): files go through the page cache"
            return Finding(about="direct I/O", state="warning", detail=detail)
    return Finding(
        about="direct I/O", state="ok", detail="large files are written past the page cache"
    )

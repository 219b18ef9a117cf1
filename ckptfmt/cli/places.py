"""The kind of a path given by the user: a checkpoint, a run, or an error."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ckptfmt import limits
from ckptfmt.cli.commands import suggest
from ckptfmt.documents.manifest import FIELDS, MANIFEST_NAME
from ckptfmt.documents.run import LAUNCHES, RUN_NAME
from ckptfmt.errors import CkptError, Code, FormatError, StateError, StoreError, err
from ckptfmt.store import LocalStore, Store, open_store, suggest_path

#: The names in the directory of a checkpoint, also before its commit (specification, page 30).
_OF_A_CHECKPOINT: Final = re.compile(r"manifest\.json|parts|[a-z_]+-[0-9a-f]{16}([-.].*)?")
_FILE_REMEDY = (
    "`ckptfmt convert` makes a checkpoint of a file of torch.save; a checkpoint or run"
    " is a directory."
)
_REMEDY = (
    "Give the directory of a checkpoint (it has a manifest.json) or of a run (it has a run.json)."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory given by the user: a run or a checkpoint.

    Attributes:
        path: the path, as given.
        store: a store rooted at the path, for reading.
        is_run: whether the directory is a run: with ``run.json`` or ``launches/``, and without
            ``manifest.json``. A directory with only files of an attempt is an uncommitted
            checkpoint.
    """

    path: str
    store: Store
    is_run: bool


def open_place(path: str) -> Place:
    """Return the run or checkpoint at `path`.

    Raises: IntegrityError(FILE_MISSING) if the path doesn't exist; StateError(ARGUMENT) for a file,
        or for a directory that is neither; StoreError.
    """
    store = open_store(path, writable=False)
    if not isinstance(store, LocalStore):
        return _place(path, store)
    try:
        is_directory = stat.S_ISDIR(Path(store.name).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise err(
            Code.FILE_MISSING, "no such file or directory", where=path, remedy=suggest_path(path)
        ) from None
    except ValueError:
        raise err(
            Code.ARGUMENT, "the path has a NUL character", where=path, remedy=_REMEDY
        ) from None
    except OSError as error:
        code = Code.STORE_ACCESS if isinstance(error, PermissionError) else Code.STORE_IO
        raise err(code, error.strerror or str(error), where=path) from error
    if not is_directory:
        raise err(
            Code.ARGUMENT, "the path is a file, not a directory", where=path, remedy=_FILE_REMEDY
        )
    return _place(path, store)


def find_places(path: str) -> list[Place] | None:
    """Return the runs and checkpoints in a directory; None if `path` is a run or a checkpoint.

    A directory that can't be listed counts as a run, so that the caller meets and reports the
    error.

    Raises: as `open_place`, also for a directory without a run or checkpoint.
    """
    try:
        open_place(path)
    except StateError:
        found = []
        with contextlib.suppress(CkptError):  # the path may be a file
            store = open_store(path, writable=False)
            for name in sorted(name for name in store.list_names("") if name.endswith("/")):
                # StateError: neither a run nor a checkpoint. FormatError: an invalid name.
                with contextlib.suppress(StateError, FormatError):
                    found.append(_place_in(path, store, name[:-1]))
        if not found:
            raise
        return found
    return None


def _place_in(path: str, store: Store, name: str) -> Place:
    """Return the place of a name in a directory; see `find_places`.

    Raises: StateError(ARGUMENT); FormatError(UNSAFE_PATH).
    """
    inner = f"{path.rstrip('/')}/{name}"
    below = store.at(name)
    try:
        return _place(inner, below)
    except StoreError:
        return Place(path=inner, store=below, is_run=True)


def _place(path: str, store: Store) -> Place:
    """Return the run or checkpoint at the root of a store. Raises: as `open_place`."""
    try:
        names = {name.rstrip("/") for name in store.list_names("")}
    except CkptError as error:
        raise type(error)(error.code, error.detail, where=path, remedy=error.remedy) from error
    if not names and not isinstance(store, LocalStore):
        raise err(Code.FILE_MISSING, "no object there", where=path, remedy=_REMEDY)
    is_run = MANIFEST_NAME not in names and not names.isdisjoint((RUN_NAME, LAUNCHES))
    if not is_run and not any(map(_OF_A_CHECKPOINT.fullmatch, names)):
        raise err(
            Code.ARGUMENT,
            "the directory is neither a checkpoint nor a run",
            where=path,
            remedy=_REMEDY,
        )
    return Place(path=path, store=store, is_run=is_run)


def checkpoint_path(run_path: str, text: str) -> str:
    """Return the path of a checkpoint of a run, given its name, digest or step.

    Raises: as `open_run_place`; IntegrityError(NOT_COMMITTED) if no checkpoint matches, or several.
    """
    from ckptfmt.run.catalog import Run

    open_run_place(run_path)
    which = int(text) if text.isdecimal() and len(text) <= len(str(limits.JSON_INTEGER)) else text
    return f"{run_path.rstrip('/')}/{Run(run_path).find(which).name}"


def open_bases(paths: Sequence[str]) -> list[Store]:
    """Return the stores of `--base`: checkpoints, runs, or directories of safetensors files.

    Raises: as `open_place`.
    """
    return [_open_base(path) for path in paths]


def _open_base(path: str) -> Store:
    try:
        return open_place(path).store
    except StateError as error:
        if error.code != Code.ARGUMENT:
            raise
        store = open_store(path, writable=False)
        if not any(name.endswith(".safetensors") for name in store.list_names("")):
            raise
        return store


def open_run_place(path: str) -> Place:
    """Return the run at `path`. Raises: as `open_place`; StateError(ARGUMENT) for a checkpoint."""
    place = open_place(path)
    if not place.is_run:
        raise err(
            Code.ARGUMENT,
            (
                f"the directory isn't a run: {RUN_NAME} and {LAUNCHES}/ are both missing, or a"
                f" {MANIFEST_NAME} lies there"
            ),
            where=path,
            remedy="Give the directory of a run; `ckptfmt inspect` shows a checkpoint.",
        )
    return place


def open_checkpoint_place(path: str) -> Place:
    """Return the checkpoint at `path`. Raises: as `open_place`; StateError(ARGUMENT) for a run."""
    place = open_place(path)
    if place.is_run:
        remedy = "Give the directory of a checkpoint in it, as for the other."
        raise err(
            Code.ARGUMENT,
            "this is a run, and the other path is a checkpoint",
            where=path,
            remedy=remedy,
        )
    return place


def check_field(field: str | None) -> None:
    """Check that a name is the name of a field, or None. Raises: StateError(ARGUMENT)."""
    if field == "extra":
        remedy = (
            "Values of State(extra=...) are in the field optimizer, with extra/ before their names."
        )
        raise err(Code.ARGUMENT, "there is no field 'extra'", where="--field", remedy=remedy)
    if field is not None and field not in FIELDS:
        near = suggest(field, FIELDS)
        remedy = f"Did you mean {near}?" if near else f"One of {', '.join(FIELDS)}."
        raise err(Code.ARGUMENT, f"there is no field {field!r}", where="--field", remedy=remedy)

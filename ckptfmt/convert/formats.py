"""What kind of checkpoint a path is, and a target that is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ckptfmt.convert.hf import INDEX_NAME
from ckptfmt.documents.manifest import MANIFEST_NAME
from ckptfmt.documents.run import LAUNCHES, RUN_NAME
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.protocol import TEMPORARY_PREFIX

KINDS: Final = ("ckptfmt", "torch", "dcp", "hf")

_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin")
_SAY: Final = f"Say which kind it is: {', '.join(KINDS)}."


def source_kind(path: str) -> str:
    """Return what kind of checkpoint is at `path`.

    Raises: IntegrityError(FILE_MISSING); StateError(ARGUMENT) where none is recognised.
    """
    try:
        names = {entry.name for entry in Path(path).iterdir()}
    except FileNotFoundError:
        raise err(Code.FILE_MISSING, "there is nothing here", where=path, remedy="Give a path that is there.") from None
    except NotADirectoryError:
        return "hf" if path.endswith(".safetensors") else "torch"
    except OSError as error:
        raise _store_error(error, path) from error
    if names & {MANIFEST_NAME, RUN_NAME, LAUNCHES, "parts"}:
        return "ckptfmt"
    if ".metadata" in names:
        return "dcp"
    if INDEX_NAME in names or any(name.endswith(".safetensors") for name in names):
        return "hf"
    detail = "it has no manifest.json, .metadata or safetensors file"
    raise err(Code.ARGUMENT, f"no kind of checkpoint that is known: {detail}", where=path, remedy=f"{_SAY} (--from)")


def target_kind(path: str) -> str:
    """Return the kind of checkpoint that a name asks for. Raises: StateError(ARGUMENT) if it doesn't."""
    if path.endswith(_TORCH_SUFFIXES):
        return "torch"
    raise err(Code.ARGUMENT, "its name doesn't say what it shall be", where=path, remedy=f"{_SAY} (--to)")


def check_paths(source: str, target: str) -> None:
    """Check that a target is neither there yet nor within its source. Raises: StoreError; StateError(ARGUMENT)."""
    if not target:
        raise err(Code.ARGUMENT, "the path is empty", where="TARGET")
    if os.path.lexists(target):
        raise _exists(target)
    if Path(target).resolve().is_relative_to(Path(source).resolve()):
        raise err(Code.ARGUMENT, "it lies within the source", where=target, remedy="Give a path outside of it.")


@contextlib.contextmanager
def staged(target: str) -> Iterator[Path]:
    """Give a place to write to, and move what is there to `target` at the end; after an error, nothing is left.

    Raises: StoreError(STORE_EXISTS and others).
    """
    path = Path(target)
    scratch = path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
        yield scratch / path.name
        _publish(scratch, path)
    except OSError as error:
        raise _store_error(error, target) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(scratch: Path, path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            PosixCalls().rename_noreplace(f"{scratch.name}/{path.name}", path.name, directory)
        except FileExistsError:
            raise _exists(str(path)) from None
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP) or os.path.lexists(path):
                raise
            (scratch / path.name).rename(path)
        os.fsync(directory)
    finally:
        os.close(directory)


def _exists(path: str) -> CkptError:
    return err(Code.STORE_EXISTS, "it is there already", where=path, remedy="Give a path that isn't there yet.")


def _store_error(error: OSError, where: str) -> CkptError:
    codes = {
        errno.ENOSPC: Code.NO_SPACE,
        errno.EDQUOT: Code.NO_SPACE,
        errno.EACCES: Code.STORE_ACCESS,
        errno.EPERM: Code.STORE_ACCESS,
    }
    return err(codes.get(error.errno or 0, Code.STORE_IO), error.strerror or str(error), where=error.filename or where)

"""Files of other programs, recognised by first bytes or names in the archive, and refused.

A file is recognised before any reader parses it: a reader of another format would only report a
damaged file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ckptfmt.errors import CkptError, Code, err
from ckptfmt_tools.convert.content import COPY

#: First bytes of a zip archive.
ZIP: Final = b"PK\x03\x04"
#: The magic number of torch.save's files before torch 1.6, in a pickle of any binary protocol.
OLD_MAGIC: Final = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")

_HEAD_NBYTES: Final = 512
#: The place of the magic text in a tar archive.
_TAR_AT: Final = slice(257, 262)
_LFS_SIZE: Final = re.compile(rb"^size (\d{1,19})$", re.MULTILINE)
_SAVE: Final = 'In Python: ckptfmt.save("imported", ckptfmt.State(weights={}, rng=False), step=0).'
_TRUST: Final = (
    'In Python, if you trust the file: torch.save({}, "weights.pt"); then convert weights.pt.'
)
_UNPACK: Final = "Unpack it, and convert the file that is in it."

#: First bytes, the file in words, and a remedy in which ``PATH`` is the file's path.
_FORMATS: Final[tuple[tuple[tuple[bytes, ...], str, str], ...]] = (
    (
        (b"GGUF", b"ggml", b"lmgg", b"ggjt", b"tjgg", b"ggmf", b"fmgg"),
        "a GGUF file, as llama.cpp has it",
        (
            "Convert the model that it was made from, such as a Hugging Face directory of"
            " safetensors"
            " files."
        ),
    ),
    (
        (b"\x93NUMPY",),
        "an array of numpy",
        _SAVE.format('{"array": numpy.load("PATH")}'),
    ),
    (
        (b"\x89HDF\r\n\x1a\n",),
        "an HDF5 file, as Keras writes it",
        (
            "Read its arrays with h5py, and save them as a dict: ckptfmt.State(weights=arrays,"
            " rng=False)."
        ),
    ),
    (
        (b"<!DOCTYPE", b"<!doctype", b"<html", b"<HTML"),
        "a web page: the server sent it in the place of the file",
        "Download the file again, with the login that it needs.",
    ),
    (
        (b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf\x27\x1c"),
        "a compressed file",
        _UNPACK,
    ),
)

#: Records of an archive of torch.jit: code in addition to the pickle; of torch 1.0, a description
#: instead of the pickle.
_SCRIPT: Final = re.compile(r"(?:^|/)(?:constants\.pkl|model\.json|bytecode\.pkl|code/.*\.py)$")
_EXPORT: Final = re.compile(r"(?:^|/)(?:serialized_exported_program\.json|archive_format)$")


def read_head(path: str | Path) -> bytes:
    """Return a file's first bytes, enough to recognise its format. Raises: OSError."""
    with Path(path).open("rb") as file:
        return file.read(_HEAD_NBYTES)


def is_old(head: bytes) -> bool:
    """Return whether a file is a torch.save file from before torch 1.6."""
    return head[:1] == b"\x80" and OLD_MAGIC in head[:32]


def is_tar(head: bytes) -> bool:
    """Return whether a file is a tar archive."""
    return head[_TAR_AT] == b"ustar"


def is_safetensors(head: bytes) -> bool:
    """Return whether a file may be safetensors: a header's length, then a JSON object."""
    return len(head) > 8 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") < 1 << 32


def is_torch(head: bytes) -> bool:
    """Return whether a file may be a torch.save file, in any of its forms."""
    return head.startswith(ZIP) or is_old(head) or is_tar(head)


def check_pointer(head: bytes, *, where: str) -> None:
    """Check that a file is no pointer of git-LFS to missing contents.

    Raises: IntegrityError(FILE_MISSING).
    """
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        size = _LFS_SIZE.search(head)
        content = f"content of {int(size[1]):,} bytes" if size else "content"
        detail = f"the file is a pointer of git-LFS, and its {content} isn't here"
        raise err(
            Code.FILE_MISSING,
            detail,
            where=where,
            remedy="Fetch it: git lfs pull, in the clone of the file.",
        )


def check_format(head: bytes, *, where: str) -> None:
    """Check that a file's first bytes are of no known inconvertible format.

    Raises: StateError(ARGUMENT); IntegrityError(FILE_MISSING, FILE_NBYTES).
    """
    check_pointer(head, where=where)
    if not head:
        raise err(Code.FILE_NBYTES, "the file is empty", where=where, remedy=COPY)
    for begins, is_what, remedy in _FORMATS:
        if head.startswith(begins):
            raise _other(is_what, remedy, where)


def unknown_format(head: bytes, *, where: str) -> CkptError:
    """Return the error for a file whose first bytes are of no convertible format."""
    if is_safetensors(head):
        return _other("a safetensors file", "Convert it with --from safetensors.", where)
    if head[:1] == b"\x80":
        remedy = (
            "Load it with the program that wrote it, if you trust the file, and save tensors and"
            " plain values with"
            " torch.save."
        )
        return _other("a pickle, but not one of torch.save", remedy, where)
    detail = f"the file isn't one of torch.save: it begins with {head[:8]!r}"
    return err(
        Code.ARGUMENT,
        detail,
        where=where,
        remedy="Give a file that torch.save made, or a safetensors file.",
    )


def check_records(names: Iterable[str], *, where: str) -> None:
    """Check that an archive's records are of no known inconvertible format.

    Raises: StateError(ARGUMENT).
    """
    names = list(names)
    if any(map(_SCRIPT.search, names)):
        raise _other(
            "a program of TorchScript", _TRUST.format('torch.jit.load("PATH").state_dict()'), where
        )
    if any(map(_EXPORT.search, names)):
        remedy = (
            "In Python, if you trust the file:"
            ' torch.save(torch.export.load("PATH").state_dict, "weights.pt"); then'
        )
        raise _other("a program of torch.export", f"{remedy} convert weights.pt.", where)
    if names and all(name.endswith(".npy") for name in names):
        remedy = (
            'In Python: ckptfmt.save("imported",'
            ' ckptfmt.State(weights=dict(numpy.load("PATH")), rng=False), step=0).'
        )
        raise _other("an archive of numpy's arrays (npz)", remedy, where)


def unknown_archive(names: list[str], *, where: str) -> CkptError:
    """Return the error for an archive other than a torch.save file."""
    found = ", ".join(name[:100] for name in names[:3]) or "nothing"
    detail = (
        f"the file is an archive, but not of torch.save, which has one data.pkl: it holds {found}"
    )
    return err(
        Code.ARGUMENT,
        detail[:500],
        where=where,
        remedy="Give a file of torch.save; or unpack the archive first.",
    )


def _other(is_what: str, remedy: str, where: str) -> CkptError:
    return err(
        Code.ARGUMENT, f"the file is {is_what}", where=where, remedy=remedy.replace("PATH", where)
    )

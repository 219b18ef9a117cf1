"""Versions of the format that this reader accepts, and the differences of the earlier versions.

Spec: pages 01 and 95, REQ-VER-001, REQ-VER-011.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Final

from ckptfmt import limits

__all__ = ["EARLIER", "UNPACKED", "is_known", "known_members", "pack_header"]

#: The earlier versions that are still read. Their documents have the form of version 1.0, except
#: for the header of packs and, in 0.9, for lists of many numbers or strings.
EARLIER: Final = ("0.9", "0.10")
#: The version without packed lists.
UNPACKED: Final = "0.9"
_MINOR: Final = re.compile(r"1\.(0|[1-9][0-9]{0,8})")


def is_known(version: str) -> bool:
    """Return whether this reader reads documents of a version: an earlier one, or any 1.x.

    >>> [is_known(version) for version in ("0.1", "0.9", "0.10", "1.0", "1.17", "1.00", "2.0")]
    [False, True, True, True, True, False, False]
    """
    return version in EARLIER or _MINOR.fullmatch(version) is not None


def _is_later(version: str) -> bool:
    """Return whether a known version is a later minor version than this reader's."""
    return version not in EARLIER and int(version[2:]) > int(limits.FORMAT_VERSION[2:])


def known_members(signed: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the members of a document that this reader knows.

    Only a document of a later minor version loses members. Otherwise an unknown member stays, for
    the document's own check to refuse.

    Spec: REQ-VER-011.
    """
    if not _is_later(signed["format_version"]):
        return signed
    return {name: member for name, member in signed.items() if name in known}


def pack_header(version: str = limits.FORMAT_VERSION) -> bytes:
    r"""Return the first 64 bytes of each pack of a part of this version. Spec: REQ-DEL-012.

    >>> pack_header("0.10").rstrip(bytes(1)), pack_header("1.7").rstrip(bytes(1))
    (b'ckptfmt pack 0.10\n', b'ckptfmt pack 1.0\n')
    """
    named = version if version in EARLIER else "1.0"
    return f"ckptfmt pack {named}\n".encode().ljust(64, b"\0")

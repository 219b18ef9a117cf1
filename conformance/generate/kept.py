"""The vectors of earlier versions: kept as they were, in a folder of the version's name, and never edited.

When the version of the format rises, what was generated for the last one goes there, with the version before its ids,
and its digest into `KEPT`.
"""

from __future__ import annotations

from pathlib import Path

from conformance.generate.wire import digest_text

__all__ = ["KEPT", "digest_of_folder", "edited_versions", "is_kept"]

#: The versions that are kept, and the digest of each one's files: of 0.1 and 0.9, which were never released, six cases.
KEPT = {
    "0.1": "blake3:d42f4260f43df789f531ce351ae468511469ba18cd01e185a671c2499c125c3a",
    "0.9": "blake3:005fa8ca13b63c48f10e74dd2af1aeebbd91be4107b276b6e4c6aca2739acb26",
}


def is_kept(name: str) -> bool:
    """Say whether a folder of the vectors is that of an earlier version."""
    return name in KEPT


def digest_of_folder(folder: Path) -> str:
    """Return the digest of the paths and contents of a folder's files."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    lines = (f"{digest_text(path.read_bytes())}  {name}\n" for name, path in sorted(files.items()))
    return digest_text("".join(lines).encode())


def edited_versions(root: Path) -> list[str]:
    """Return the earlier versions whose files below `root` aren't those that were kept."""
    return [version for version, digest in KEPT.items() if digest_of_folder(root / version) != digest]

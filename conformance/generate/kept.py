"""The vectors of earlier versions: kept unchanged, in an area with the version's name.

When the version of the format rises, move the generated vectors of the last version into such an
area, put the version before their ids, and add the digest of the area's files to `KEPT`.
"""

from __future__ import annotations

from pathlib import Path

from conformance.generate.wire import digest_text

__all__ = ["KEPT", "digest_of_area", "edited_versions", "is_kept"]

#: The kept versions, each with the digest of the version's two files; six cases each. Documents of
#: 0.10 have the form of 1.0, so that the cases of 1.0 show nothing else.
KEPT = {
    "0.1": "blake3:bd0d1725eefd77812e5ed81ab85c1d07a31aa3571e2d6f2230d6069b992eb515",
    "0.9": "blake3:520f69f869151c9b047d176da5ad83ed214bf8a5dca579fe815dc81cf5e74267",
    "0.10": "blake3:197a4686008557d2936d6acab3f6d10f133c15e47943352915982b8cdb3eaf96",
}


def is_kept(area: str) -> bool:
    """Return whether an area of the vectors belongs to an earlier version."""
    return area in KEPT


def digest_of_area(root: Path, area: str) -> str:
    """Return the digest of an area's files: the cases, then their contents."""
    return digest_text(
        (root / f"{area}.json").read_bytes() + (root / "files" / f"{area}.json").read_bytes()
    )


def edited_versions(root: Path) -> list[str]:
    """Return the earlier versions with changed files below `root`."""
    return [version for version, digest in KEPT.items() if digest_of_area(root, version) != digest]

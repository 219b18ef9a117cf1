"""A statement of provenance on the files of a conversion, as an in-toto statement of SLSA.

The statement has the digests of the written files, and the recorded origin of the checkpoint: the
run, the commit, the packages. The statement isn't signed: a program for attestations signs it.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ckptfmt import __version__
from ckptfmt.documents.manifest import Manifest
from ckptfmt.documents.signature import STATEMENT_TYPE
from ckptfmt_tools.convert.content import Content

_PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
#: Identifies the meaning of the parameters: a training, and a conversion of its checkpoint.
_BUILD_TYPE: Final = "urn:ckptfmt:training:1"
#: Members of the provenance that describe the surroundings; the rest may hold any value.
_FACTS: Final = ("python", "platform", "host", "container", "nvidia_driver", "git_changes")


def dump_statement(content: Content, target: Path) -> bytes:
    """Return the statement on the files below a target, or on the target itself.

    Args:
        content: contents of the converted checkpoint of ckptfmt.
        target: the written directory or file.
    """
    manifest = content.manifest
    assert manifest is not None  # noqa: S101 - the command refuses foreign sources
    provenance = content.leaves.get(("provenance", "", "global"))
    recorded = provenance if isinstance(provenance, dict) else {}
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": name, "digest": {"sha256": _digest(path)}} for name, path in _files(target)
        ],
        "predicateType": _PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": _position(manifest),
                "internalParameters": {
                    name: recorded[name] for name in _FACTS if isinstance(recorded.get(name), str)
                },
                "resolvedDependencies": list(_dependencies(manifest, recorded)),
            },
            "runDetails": {
                "builder": {"id": "urn:ckptfmt", "version": {"ckptfmt": __version__}},
                "metadata": {
                    "invocationId": f"{manifest.origin.run_id or ''}/{manifest.origin.launch or 0}",
                    "finishedOn": _time_text(manifest.saved_unix_s),
                },
            },
        },
    }
    return json.dumps(statement, indent=2, ensure_ascii=False).encode() + b"\n"


def _position(manifest: Manifest) -> dict[str, Any]:
    origin = manifest.origin
    return {
        "run_id": origin.run_id,
        "launch": origin.launch,
        "step": origin.step,
        "manifest": manifest.digest,
    }


def _dependencies(manifest: Manifest, recorded: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the checkpoint, the commit of the program, and the packages, as resources."""
    digest = manifest.digest.removeprefix("blake3:")
    yield {"name": "checkpoint", "digest": {"blake3": digest}}
    commit = recorded.get("git_commit")
    if isinstance(commit, str):
        yield {"name": "program", "digest": {"gitCommit": commit}}
    image = recorded.get("image_digest")
    if isinstance(image, str):
        yield {"name": "container", "digest": {"sha256": image.removeprefix("sha256:")}}
    packages = recorded.get("packages")
    for name, version in packages.items() if isinstance(packages, dict) else ():
        yield {"uri": f"pkg:pypi/{str(name).lower()}@{version}"}


def _files(target: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each written file, sorted."""
    if target.is_file():
        yield target.name, target
        return
    for path in sorted(target.rglob("*")):
        if path.is_file():
            yield path.relative_to(target).as_posix(), path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _time_text(unix_s: int) -> str:
    try:
        return dt.datetime.fromtimestamp(unix_s, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):  # a clock far from ours
        return "1970-01-01T00:00:00Z"

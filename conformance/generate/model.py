"""A checkpoint in memory: documents for editing, then signed again from the parts upwards.

The only fault of an invalid case is therefore the named edit, and never a stale digest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from conformance.generate.parts import Files, part_of, stored_nbytes
from conformance.generate.plans import FIELDS, Plan
from conformance.generate.tables import base_document, index_of
from conformance.generate.wire import Bend, Packed, json_document, table_document

__all__ = ["Checkpoint", "Edit", "build", "checkpoint_name"]

Edit = Callable[["Checkpoint"], object]


def checkpoint_name(step: int, launch: int) -> str:
    """Return the directory of a checkpoint in a run."""
    return f"step-{step:08d}-l{launch:04d}"


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint with editable documents.

    Attributes:
        plan: the plan of the checkpoint.
        manifest, index, parts: the signed contents of the documents.
        files: shards and packs, by name.
        bends: the changes of the bytes of `"manifest"`, `"index"` or `"part/0"`.
        kept: the values left unchanged when sizes and digests are computed again, among
            `"index/nbytes"`, `"index/digest"`, `"parts/nbytes"`, `"parts/digest"`.
        extra: the files that replace files at the end, by path; None removes a file.
    """

    plan: Plan
    manifest: dict[str, Any]
    index: dict[str, Any]
    parts: list[dict[str, Any]]
    files: Files
    bends: dict[str, Bend] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    extra: dict[str, bytes | None] = field(default_factory=dict)

    def bend(self, document: str, **changes: Any) -> None:
        """Add changes of a document's bytes."""
        self.bends[document] = Bend(**changes)

    def edited(self, edit: Edit) -> Checkpoint:
        """Return an edited copy."""
        made = copy.deepcopy(self)
        edit(made)
        return made

    @property
    def part(self) -> dict[str, Any]:
        """The signed content of the part of writer 0."""
        return self.parts[0]

    @property
    def index_name(self) -> str:
        """Name of the index."""
        return f"index-{self.plan.attempt}.msgpack"

    def part_name(self, writer: int = 0) -> str:
        """Path of a part."""
        return f"parts/{self.plan.attempt}-{writer:05d}.msgpack"

    def file_name(self, ending: str = "") -> str:
        """Name of the first shard or pack with this ending."""
        return next(name for name in sorted(self.files) if name.endswith(ending))

    def seal(self) -> dict[str, bytes]:
        """Return all files, with digests and sizes computed from the parts upwards."""
        made: dict[str, bytes] = dict(self.files)
        documents = [
            table_document(part, self.bends.get(f"part/{i}")) for i, part in enumerate(self.parts)
        ]
        for writer, (content, _) in enumerate(documents):
            made[self.part_name(writer)] = content
        index = copy.deepcopy(self.index)
        table = index.get("parts")
        if isinstance(table, dict):
            if "parts/nbytes" not in self.kept and "nbytes" in table:
                table["nbytes"] = Packed(len(content) for content, _ in documents)
            if "parts/digest" not in self.kept and "digest" in table:
                table["digest"] = b"".join(digest for _, digest in documents)
        made[self.index_name], digest = table_document(index, self.bends.get("index"))
        manifest = copy.deepcopy(self.manifest)
        entry = manifest.get("index")
        if isinstance(entry, dict):
            if "index/nbytes" not in self.kept and "nbytes" in entry:
                entry["nbytes"] = len(made[self.index_name])
            if "index/digest" not in self.kept and "digest" in entry:
                entry["digest"] = "blake3:" + digest.hex()
        made["manifest.json"], _ = json_document(manifest, self.bends.get("manifest"))
        for path, other in self.extra.items():
            made.pop(path, None)
            if other is not None:
                made[path] = other
        return made

    @property
    def digest(self) -> bytes:
        """Digest of the manifest: the name of the checkpoint."""
        register = self.seal()["manifest.json"]
        return bytes.fromhex(register[len('{"digest":"blake3:') :][:64].decode())


def build(plan: Plan) -> Checkpoint:
    """Return the checkpoint that writers and committer make from a plan."""
    made = [part_of(plan, writer) for writer in range(plan.writer_count)]
    parts = [part for part, _ in made]
    files = {name: content for _, own in made for name, content in own.items()}
    index = index_of(plan, parts)
    return Checkpoint(
        plan=plan, manifest=_manifest_of(plan, parts, index), index=index, parts=parts, files=files
    )


def _manifest_of(plan: Plan, parts: list[dict[str, Any]], index: dict[str, Any]) -> dict[str, Any]:
    features = sorted({name for part in parts for name in part["features"]["reader"]})
    references = {one["digest"]: one["name"] for part in parts for one in part["references"]}
    head = base_document("manifest", plan)
    return {
        **head,
        "features": {"reader": features, "writer": []},
        "profile": "delta" if features else "full",
        "references": [
            {"name": references[one], "digest": "blake3:" + one.hex()} for one in sorted(references)
        ],
        "fields": {name: _summary(plan, name, index, is_delta=bool(features)) for name in FIELDS},
        "index": {"name": f"index-{plan.attempt}.msgpack", "nbytes": 0, "digest": ""},
    }


def _summary(plan: Plan, name: str, index: dict[str, Any], *, is_delta: bool) -> dict[str, Any]:
    if name in index["absent"]:
        return {"state": "absent", "reason": index["absent"][name]}
    tensors = [one for one in plan.tensors if one.field == name]
    stored = {"stored_nbytes": sum(stored_nbytes(plan, one) for one in tensors)} if is_delta else {}
    return {
        "state": "present",
        "tensor_count": len(tensors),
        "nbytes": sum(one.nbytes for one in tensors),
        "stream_count": len(plan.streams) if name == "rng" else 0,
        "leaf_count": sum(one.field == name for one in plan.leaves),
        **stored,
    }

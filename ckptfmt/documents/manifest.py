"""The decision register ``manifest.json``: a manifest, an abort record or a tombstone.

Spec: REQ-MAN-001 and following.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.documents.canonical import dump_document, head_of, parse_document
from ckptfmt.documents.durability import HOME, durability_members, parse_durability
from ckptfmt.documents.labels import NO_LABELS, Labels, parse_labels
from ckptfmt.errors import Code, err
from ckptfmt.features import DELTAS, is_of_delta

MANIFEST_NAME: Final = "manifest.json"
#: Suffix of the names of pins.
PINS_SUFFIX: Final = ".pins.json"
#: The seven fields, in the order of their numbers in index and parts.
FIELDS: Final = ("weights", "optimizer", "rng", "data", "config", "topology", "provenance")

_CHECKPOINT_NAME: Final = re.compile(r"step-([0-9]{8,})-l([0-9]{4,})")


def checkpoint_name(step: int, launch: int) -> str:
    """Return the directory name of a checkpoint in a run.

    >>> checkpoint_name(1200, 3)
    'step-00001200-l0003'
    """
    return f"step-{step:08d}-l{launch:04d}"


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """Return step and launch of a checkpoint directory's name, or None for any other name.

    >>> parse_checkpoint_name("step-00001200-l0003"), parse_checkpoint_name("step-1200-l3")
    ((1200, 3), None)
    """
    found = _CHECKPOINT_NAME.fullmatch(name)
    if not found or len(name) > 64:
        return None
    step = int(found[1])
    launch = int(found[2])
    return (step, launch) if checkpoint_name(step, launch) == name else None


def index_name(attempt: str) -> str:
    """Return the file name of an attempt's index."""
    return f"index-{attempt}.msgpack"


def part_path(attempt: str, writer: int) -> str:
    """Return the path of a writer's part, relative to the checkpoint."""
    return f"parts/{attempt}-{writer:05d}.msgpack"


def failure_path(attempt: str, writer: int) -> str:
    """Return the path of a writer's failure record, relative to the checkpoint."""
    return f"parts/{attempt}-{writer:05d}.failure.json"


def pins_path(attempt: str, writer: int) -> str:
    """Return the path of a writer's pins, relative to the checkpoint."""
    return f"parts/{attempt}-{writer:05d}{PINS_SUFFIX}"


def shard_name(stem: str, attempt: str, writer: int) -> str:
    """Return the file name of a shard."""
    return f"{stem}-{attempt}-{writer:05d}.safetensors"


def pack_name(stem: str, attempt: str, writer: int) -> str:
    """Return the file name of a pack."""
    return f"{stem}-{attempt}-{writer:05d}.pack"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A committed checkpoint of a run: the directory's name, and the decisive manifest digest."""

    name: str
    digest: str


def check_references(references: Sequence[Reference], where: str) -> None:
    """Raise unless references name checkpoints of a run, sorted by digest without duplicates.

    Raises: FormatError(UNSAFE_PATH, COLUMN_ORDER). Spec: REQ-DEL-002.
    """
    for number, reference in enumerate(references):
        if parse_checkpoint_name(reference.name) is None:
            raise err(
                Code.UNSAFE_PATH,
                f"{reference.name[:64]!r} is no name of a checkpoint in a run",
                where=f"{where}/{number}/name",
                requirement="REQ-DEL-002",
            )
    if any(one.digest >= other.digest for one, other in itertools.pairwise(references)):
        raise err(
            Code.COLUMN_ORDER,
            "references aren't sorted by digest, each once",
            where=where,
            requirement="REQ-DEL-002",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The common members of all documents of one attempt.

    Attributes:
        run_id: the run's id; None for a checkpoint outside of a run.
        launch: number of the launch; None outside of a run.
        nonce: the launch's nonce; outside of a run, the nonce of this save.
        step: number of training steps done.
        attempt: the attempt's id.
        writer_count: number of writers.
        block_nbytes: size of a block in bytes.
    """

    run_id: str | None
    launch: int | None
    nonce: str
    step: int
    attempt: str
    writer_count: int
    block_nbytes: int = limits.BLOCK_NBYTES

    def as_dict(self) -> dict[str, Any]:
        """Return the members for a document."""
        return dataclasses.asdict(self)


def check_membership(run_id: str | None, launch: int | None, where: str) -> None:
    """Raise unless a document has both run and launch, or neither. Raises: FormatError(DOC_SCHEMA).

    Spec: REQ-MAN-008.
    """
    if (run_id is None) != (launch is None):
        raise err(
            Code.DOC_SCHEMA,
            "run_id and launch are given together or not at all",
            where=where,
            requirement="REQ-MAN-008",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FieldSummary:
    """The manifest's summary of one field.

    Attributes:
        nbytes: total size of the field's tensors in bytes, each counted once.
        stored_nbytes: number of these bytes that the checkpoint's own files store; set in a delta
            only.
        reason: the reason for the field's absence; None for a present field.
    """

    tensor_count: int = 0
    nbytes: int = 0
    stream_count: int = 0
    leaf_count: int = 0
    stored_nbytes: int | None = None
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        if self.reason is not None:
            return {"state": "absent", "reason": self.reason}
        counts = {
            name: count for name, count in dataclasses.asdict(self).items() if count is not None
        }
        return {"state": "present", **counts}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> FieldSummary:
        """Return the summary of a JSON object that fits the schema."""
        return cls(**{key: member for key, member in value.items() if key != "state"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed checkpoint.

    Attributes:
        origin: run, launch, step and attempt.
        saved_unix_s: time of writer 0's snapshot by its own clock, in seconds since 1970;
            information only.
        features: the reader features that the checkpoint needs.
        labels: metrics and tags given with the save, and the reason if the checkpoint is suspect.
        durability: weakest durability of the files at the commit: "home", "peers" or "node".
        references: all checkpoints that this checkpoint reads from, directly or indirectly; empty
            for a full checkpoint.
        fields: a summary of each of the seven fields.
        index_nbytes: size of the index file in bytes.
        index_digest: digest in the envelope of the index.
        digest: the manifest's own digest, which identifies the checkpoint; empty before `dump`.
    """

    origin: Origin
    saved_unix_s: int
    fields: dict[str, FieldSummary]
    index_nbytes: int
    index_digest: str
    features: tuple[str, ...] = ()
    references: tuple[Reference, ...] = ()
    labels: Labels = NO_LABELS
    durability: str = HOME
    digest: str = ""

    @property
    def profile(self) -> str:
        """``full``, or ``delta``."""
        return "delta" if is_of_delta(self.features) else "full"

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes, each counted once."""
        return sum(field.nbytes for field in self.fields.values())

    @property
    def stored_nbytes(self) -> int:
        """Number of the tensors' bytes that the checkpoint's own files store."""
        stored = (
            field.nbytes if field.stored_nbytes is None else field.stored_nbytes
            for field in self.fields.values()
        )
        return sum(stored)

    def dump(self) -> bytes:
        """Return the bytes of ``manifest.json``.

        Raises: FormatError(LIMIT_EXCEEDED). Spec: REQ-MAN-004.
        """
        content = dump_document(
            {
                **head_of("manifest", reader=self.features),
                **self.origin.as_dict(),
                "saved_unix_s": self.saved_unix_s,
                "profile": self.profile,
                "references": [dataclasses.asdict(reference) for reference in self.references],
                **self.labels.featured_members(),
                **durability_members(self.durability),
                "fields": {field: self.fields[field].as_dict() for field in FIELDS},
                "index": {
                    "name": index_name(self.origin.attempt),
                    "nbytes": self.index_nbytes,
                    "digest": self.index_digest,
                },
            }
        )
        if len(content) > limits.MANIFEST_NBYTES:
            raise err(
                Code.LIMIT_EXCEEDED,
                f"a manifest of {len(content)} bytes",
                where=MANIFEST_NAME,
                requirement="REQ-MAN-004",
            )
        return content

    @classmethod
    def from_signed(cls, signed: dict[str, Any], digest: str, *, where: str) -> Manifest:
        """Return the manifest of a signed object that fits the schema.

        Raises: FormatError(DOC_SCHEMA, PROFILE_MISMATCH, UNSAFE_PATH).
        """
        origin = Origin(**{key.name: signed[key.name] for key in dataclasses.fields(Origin)})
        if origin.block_nbytes.bit_count() != 1:
            raise err(
                Code.DOC_SCHEMA,
                f"{origin.block_nbytes} is no power of two",
                where=f"{where}#/signed/block_nbytes",
                requirement="REQ-TEN-005",
            )
        references = tuple(Reference(**one) for one in signed["references"])
        fields = {field: FieldSummary.from_dict(signed["fields"][field]) for field in FIELDS}
        _check_profile(signed, references, fields, where)
        if signed["index"]["name"] != index_name(origin.attempt):
            raise err(
                Code.UNSAFE_PATH,
                f"the index of this attempt is {index_name(origin.attempt)}",
                where=f"{where}#/signed/index/name",
                requirement="REQ-CKP-001",
            )
        return cls(
            origin=origin,
            saved_unix_s=signed["saved_unix_s"],
            fields=fields,
            index_nbytes=signed["index"]["nbytes"],
            index_digest=signed["index"]["digest"],
            features=tuple(signed["features"]["reader"]),
            references=references,
            labels=parse_labels(signed, signed["features"]["reader"], f"{where}#/signed"),
            durability=parse_durability(
                signed, signed["features"]["reader"], origin.run_id, f"{where}#/signed"
            ),
            digest=digest,
        )


def _check_profile(
    signed: dict[str, Any],
    references: Sequence[Reference],
    fields: dict[str, FieldSummary],
    where: str,
) -> None:
    """Raise unless features, references and summaries fit the profile.

    Spec: REQ-MAN-005, REQ-DEL-001, REQ-DEL-027.
    """
    features = signed["features"]["reader"]
    is_delta = signed["profile"] == "delta"
    stored = [field.stored_nbytes is not None for field in fields.values() if field.reason is None]
    clause = "REQ-MAN-005"
    if (
        is_of_delta(features) != is_delta
        or (is_delta and DELTAS not in features)
        or features != sorted(features)
    ):
        problem = f"features {', '.join(features) or 'none'}"
    elif references and not is_delta:
        problem = "references"
    elif is_delta and not all(stored):
        problem = "a field without stored_nbytes"
        clause = "REQ-DEL-027"
    elif any(stored) and not is_delta:
        problem = "a field with stored_nbytes"
    else:
        check_references(references, f"{where}#/signed/references")
        return
    raise err(
        Code.PROFILE_MISMATCH,
        f"{problem} in a {signed['profile']} checkpoint",
        where=f"{where}#/signed/profile",
        requirement=clause,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The record of an attempt that was given up.

    It exists before files are removed, so a slow committer finds it.
    """

    run_id: str | None
    launch: int | None
    step: int
    reason: str

    def dump(self) -> bytes:
        """Return the bytes of the register."""
        return dump_document({**head_of("abort"), **dataclasses.asdict(self)})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """The record of a retired checkpoint. It exists before files are removed."""

    run_id: str | None
    launch: int | None
    step: int
    manifest_digest: str

    def dump(self) -> bytes:
        """Return the bytes of the register."""
        return dump_document({**head_of("tombstone"), **dataclasses.asdict(self)})


def parse_register(content: bytes, *, where: str = MANIFEST_NAME) -> Manifest | Abort | Tombstone:
    """Return the contents of a decision register.

    Raises: FormatError, IntegrityError, UnsupportedError. Spec: REQ-MAN-001.
    """
    signed, digest = parse_document(
        content,
        where=where,
        types=("manifest", "abort", "tombstone"),
        limit_nbytes=limits.MANIFEST_NBYTES,
    )
    check_membership(signed["run_id"], signed["launch"], f"{where}#/signed/launch")
    kind = signed["type"]
    if kind == "manifest":
        return Manifest.from_signed(signed, digest, where=where)
    record = {
        key: value
        for key, value in signed.items()
        if key not in {"type", "format_version", "features"}
    }
    return Abort(**record) if kind == "abort" else Tombstone(**record)

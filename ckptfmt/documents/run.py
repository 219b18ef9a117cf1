"""Documents of a run: ``run.json``, launch records, votes, records of labels, and pins of a save.

Spec: REQ-RUN-001 to REQ-RUN-007, REQ-RUN-023 to REQ-RUN-025, REQ-RUN-065, REQ-CMT-035,
REQ-CMT-037.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.documents.canonical import dump_document, head_of, parse_document
from ckptfmt.documents.labels import Labels, check_labels
from ckptfmt.documents.manifest import (
    MANIFEST_NAME,
    Abort,
    Manifest,
    Reference,
    Tombstone,
    check_references,
    parse_checkpoint_name,
    pins_path,
)
from ckptfmt.errors import Code, err

RUN_NAME: Final = "run.json"
#: The identity of a home, in a run with several homes.
HOME_NAME: Final = "home.json"
LAUNCHES: Final = "launches"
#: The directory in which each saver holds a file during a save.
SAVERS: Final = "savers"
#: The directory of a home's votes, in a run with several homes.
VOTES: Final = "votes"

#: The directory of records of labels, written after commits.
LABELS_FOLDER: Final = "labels"

_LABELS_NAME: Final = re.compile(r"(step-[0-9]+-l[0-9]+)-([0-9]{4,})\.json")
_LAUNCH_NAME: Final = re.compile(r"([0-9]{4,})\.json")


def launch_name(launch: int) -> str:
    """Return the file name of a launch record.

    >>> launch_name(3)
    '0003.json'
    """
    return f"{launch:04d}.json"


def parse_launch_name(name: str) -> int | None:
    """Return the launch number of a launch record's file name, or None for any other name.

    >>> parse_launch_name("0003.json"), parse_launch_name("00003.json")
    (3, None)
    """
    found = _LAUNCH_NAME.fullmatch(name)
    number = int(found[1]) if found and len(name) < 24 else None
    return number if number is not None and launch_name(number) == name else None


def parse_of_launch(content: bytes, *, where: str, kind: str, requirement: str) -> dict[str, Any]:
    """Return the members of a document about a launch, in a file named by the launch's number.

    Raises: FormatError (RUN_MISMATCH if the number differs from the file's name), IntegrityError,
        UnsupportedError.
    """
    signed, _ = parse_document(content, where=where, types=(kind,))
    if parse_launch_name(where.rpartition("/")[2]) != signed["launch"]:
        detail = f"the document is that of launch {signed['launch']}"
        raise err(Code.RUN_MISMATCH, detail, where=where, requirement=requirement)
    return signed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The identity of a run, and the features that clean-up and compaction must support."""

    run_id: str
    writer_features: tuple[str, ...] = ()

    def dump(self) -> bytes:
        """Return the bytes of ``run.json``."""
        return dump_document(
            {
                **head_of("run", writer=self.writer_features),
                "run_id": self.run_id,
            }
        )

    @classmethod
    def parse(cls, content: bytes, *, where: str = RUN_NAME) -> RunRecord:
        """Return the run of ``run.json``. Raises: FormatError, IntegrityError, UnsupportedError."""
        signed, _ = parse_document(content, where=where, types=("run",))
        return cls(run_id=signed["run_id"], writer_features=tuple(signed["features"]["writer"]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of a job on a run.

    Attributes:
        run_id: the run's id.
        launch: number of the launch.
        nonce: a random text that distinguishes launches with equal numbers.
        chosen_by: ``lineage``, ``fallback`` (a newer checkpoint was skipped) or ``hand``.
        resume_from: the checkpoint to resume from; None for a fresh start.
    """

    run_id: str
    launch: int
    nonce: str
    chosen_by: str
    resume_from: Reference | None

    def dump(self) -> bytes:
        """Return the bytes of the launch record."""
        resume = None if self.resume_from is None else dataclasses.asdict(self.resume_from)
        return dump_document(
            {
                **head_of("launch"),
                "run_id": self.run_id,
                "launch": self.launch,
                "nonce": self.nonce,
                "chosen_by": self.chosen_by,
                "resume_from": resume,
            }
        )

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> Launch:
        """Return the launch of a record.

        Raises: FormatError (RUN_MISMATCH if the number differs from the file's name),
            IntegrityError, UnsupportedError.
        """
        signed = parse_of_launch(content, where=where, kind="launch", requirement="REQ-RUN-005")
        resume = signed["resume_from"]
        return cls(
            run_id=signed["run_id"],
            launch=signed["launch"],
            nonce=signed["nonce"],
            chosen_by=signed["chosen_by"],
            resume_from=None if resume is None else Reference(**resume),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The vote of a home for a launch, in a run with several homes.

    Attributes:
        run_id: the run's id.
        launch: number of the launch.
        nonce: nonce of the launch, equal in all votes for this launch.
        homes: ids of the homes of the run, as of this launch.
    """

    run_id: str
    launch: int
    nonce: str
    homes: tuple[str, ...]

    @property
    def path(self) -> str:
        """The path of the vote in the run."""
        return f"{VOTES}/{launch_name(self.launch)}"

    def dump(self) -> bytes:
        """Return the bytes of the vote."""
        members = {**dataclasses.asdict(self), "homes": list(self.homes)}
        return dump_document({**head_of("vote"), **members})

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> Vote:
        """Return the vote of a file.

        Raises: FormatError (RUN_MISMATCH if the number differs from the file's name),
            IntegrityError, UnsupportedError.
        """
        signed = parse_of_launch(content, where=where, kind="vote", requirement="REQ-RUN-065")
        return cls(
            run_id=signed["run_id"],
            launch=signed["launch"],
            nonce=signed["nonce"],
            homes=tuple(signed["homes"]),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HomeRecord:
    """The identity of a home, in a run with several homes.

    Attributes:
        run_id: the run's id.
        home: id of the home, random.
        homes: ids of the homes of the run; empty as long as unknown.
        launch: number of the launch since which these are the homes; 0 without one.
    """

    run_id: str
    home: str
    homes: tuple[str, ...] = ()
    launch: int = 0

    def dump(self) -> bytes:
        """Return the bytes of ``home.json``."""
        members = {**dataclasses.asdict(self), "homes": list(self.homes)}
        return dump_document({**head_of("home"), **members})

    @classmethod
    def parse(cls, content: bytes, *, where: str = HOME_NAME) -> HomeRecord:
        """Return the home of ``home.json``. Raises: FormatError, IntegrityError."""
        signed, _ = parse_document(content, where=where, types=("home",))
        return cls(
            run_id=signed["run_id"],
            home=signed["home"],
            homes=tuple(signed["homes"]),
            launch=signed["launch"],
        )


def labels_name(checkpoint: str, number: int) -> str:
    """Return the file name of a record of labels.

    >>> labels_name("step-00001200-l0003", 2)
    'step-00001200-l0003-0002.json'
    """
    return f"{checkpoint}-{number:04d}.json"


def parse_labels_name(name: str) -> tuple[str, int] | None:
    """Return checkpoint and number from the file name of a record of labels; else None.

    >>> (parse_labels_name("step-00001200-l0003-0002.json"),
    ...  parse_labels_name("step-00001200-l0003-2.json"))
    (('step-00001200-l0003', 2), None)

    Spec: REQ-RUN-023.
    """
    found = _LABELS_NAME.fullmatch(name) if len(name) < 100 else None
    if found is None or parse_checkpoint_name(found[1]) is None:
        return None
    number = int(found[2])
    is_number = 1 <= number <= limits.JSON_INTEGER
    return (found[1], number) if is_number and labels_name(found[1], number) == name else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LabelsRecord:
    """Labels given to a checkpoint after its commit.

    Only the record with the greatest number counts.

    Attributes:
        run_id: the run's id.
        checkpoint: name of the checkpoint's directory.
        number: number of the record among the checkpoint's records.
        pinned: whether the checkpoint stays until it is unpinned.
        labels: all metrics and tags, replacing those of the manifest.
    """

    run_id: str
    checkpoint: str
    number: int
    pinned: bool
    labels: Labels

    @property
    def path(self) -> str:
        """The record's path in the run."""
        return f"{LABELS_FOLDER}/{labels_name(self.checkpoint, self.number)}"

    def dump(self) -> bytes:
        """Return the bytes of the record."""
        return dump_document(
            {
                **head_of("labels"),
                "run_id": self.run_id,
                "checkpoint": self.checkpoint,
                "number": self.number,
                "pinned": self.pinned,
                **self.labels.members(),
            }
        )

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> LabelsRecord:
        """Return the record of a file.

        Raises: FormatError (RUN_MISMATCH if checkpoint or number differ from the file's name),
            IntegrityError, UnsupportedError.
        """
        signed, _ = parse_document(content, where=where, types=("labels",))
        checkpoint = signed["checkpoint"]
        number = signed["number"]
        if parse_labels_name(where.rpartition("/")[2]) != (checkpoint, number):
            detail = f"the record is number {number} of {checkpoint}"
            raise err(Code.RUN_MISMATCH, detail, where=where, requirement="REQ-RUN-023")
        labels = check_labels(signed["metrics"], signed["tags"], f"{where}#/signed")
        return cls(
            run_id=signed["run_id"],
            checkpoint=checkpoint,
            number=number,
            pinned=signed["pinned"],
            labels=labels,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """The references of a writer before its part is written.

    Attributes:
        attempt: the attempt's id.
        writer: number of the writer.
        references: the checkpoints to which the part may refer.
    """

    attempt: str
    writer: int
    references: tuple[Reference, ...]

    def dump(self) -> bytes:
        """Return the bytes of the file."""
        references = [dataclasses.asdict(one) for one in self.references]
        return dump_document(
            {**head_of("pins"), **dataclasses.asdict(self), "references": references}
        )

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> Pins:
        """Return the pins of a file.

        Args:
            where: the file's path in the checkpoint's directory.

        Raises: FormatError, IntegrityError, UnsupportedError.
        """
        signed, _ = parse_document(content, where=where, types=("pins",))
        references = tuple(Reference(**one) for one in signed["references"])
        check_references(references, f"{where}#/signed/references")
        if pins_path(signed["attempt"], signed["writer"]) != where:
            raise err(
                Code.DOC_MISMATCH,
                "they belong to another writer",
                where=where,
                requirement="REQ-CMT-037",
            )
        return cls(attempt=signed["attempt"], writer=signed["writer"], references=references)


def check_record(name: str, launch: int, numbers: Collection[int | None]) -> None:
    """Raise unless a checkpoint directory's launch has a record.

    Raises: IntegrityError(FILE_MISSING). Spec: REQ-RUN-015.
    """
    if launch not in numbers:
        raise err(
            Code.FILE_MISSING,
            f"{name} is of launch {launch}, which has no record",
            where=f"{LAUNCHES}/{launch_name(launch)}",
            requirement="REQ-RUN-015",
            remedy=(
                "`ckptfmt repair RUN --with MIRROR` restores the record from a copy; without a"
                " copy, `ckptfmt repair RUN` writes it anew. Or resume by hand from a checkpoint"
                " that you name."
            ),
        )


def check_place(
    register: Manifest | Abort | Tombstone, step_and_launch: tuple[int, int], run_id: str | None
) -> None:
    """Raise unless a register has the step and launch of its directory, and the id of the run.

    Raises: FormatError(STEP_MISMATCH, RUN_MISMATCH). Spec: REQ-MAN-002, REQ-RUN-003.
    """
    said = register.origin if isinstance(register, Manifest) else register
    if (said.step, said.launch) != step_and_launch:
        raise err(
            Code.STEP_MISMATCH,
            f"the register is that of step {said.step}, launch {said.launch}",
            where=MANIFEST_NAME,
            requirement="REQ-MAN-002",
        )
    check_run_id(run_id, said.run_id, MANIFEST_NAME)


def check_run_id(run_id: str | None, said: str | None, where: str) -> None:
    """Raise unless a record or register belongs to the run.

    Raises: FormatError(RUN_MISMATCH). Spec: REQ-RUN-003.
    """
    if run_id is not None and said != run_id:
        raise err(
            Code.RUN_MISMATCH, f"it belongs to run {said}", where=where, requirement="REQ-RUN-003"
        )

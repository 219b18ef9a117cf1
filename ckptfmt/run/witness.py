"""The witness of a launch: a record of each step, and the verdict on repeated steps.

Spec: REQ-RUN-060 to REQ-RUN-062.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import struct
import zlib
from typing import Any, Final, Literal, Self

from ckptfmt.documents.canonical import dump_document, head_of
from ckptfmt.documents.run import launch_name, parse_of_launch

#: The directory of a run with step logs and verdicts.
WITNESS: Final = "witness"
#: The size of a step log's header, in bytes.
HEADER_NBYTES: Final = 8192
#: The place of a launch's end in a step log, in bytes: the last part of the header.
ENDING_PLACE: Final = HEADER_NBYTES - 1024
#: The number of steps in a step log; a further step's record replaces the oldest record.
STEP_COUNT: Final = 16384
#: The size of the record of one step, in bytes.
RECORD_NBYTES: Final = 128
#: The largest number of RNG digests. With more streams, the last digest covers all remaining
#: streams.
STREAM_COUNT: Final = 12
#: The number of steps from one full record to the next. The first step after a start or a save has
#: a full record, too.
FULL_EVERY: Final = 8

_MAGIC: Final = b"ckptfmt-steps-1\n"
_RECORD: Final = struct.Struct(f"<QHBB4x7Q{STREAM_COUNT}I")
_CHECKSUM: Final = struct.Struct("<I")
#: The members of a record that may be missing, in the order of their bits and of their places.
_MEMBERS: Final = ("weights", "position", "samples", "batch", "loss", "grad_norm", "options")
_VALUES: Final = operator.attrgetter(*_MEMBERS)
_BITS: Final = tuple(1 << place for place in range(len(_MEMBERS)))
_NO_STREAMS: Final = (0,) * STREAM_COUNT
#: Flag: the digests of RNG streams were taken before the step.
_BEFORE: Final = 1 << 15
#: Flag: loss and gradient norm are digests of several observed numbers.
_SEVERAL: Final = 1 << 14
#: Flag: the record is full.
_FULL: Final = 1 << 13

#: The texts of an ending, which may be long.
_TEXTS: Final = ("name", "place", "text")

Verdict = Literal["expected", "verified", "refuted"]
What = Literal["samples", "rng", "batch", "loss", "grad_norm", "options", "weights"]
#: The members of a record in the order of comparison, each with a word for sentences.
WORDS: Final[dict[str, str]] = {
    "samples": "samples",
    "rng": "RNG streams",
    "batch": "batch",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "options": "learning rates",
    "weights": "weights",
}
#: The members that are results of a step. The remaining members are inputs of the step.
RESULTS: Final[frozenset[What]] = frozenset({"loss", "grad_norm", "weights"})


def steps_path(launch: int, writer: int) -> str:
    """Return the path in a run of the step log of one process.

    >>> steps_path(3, 0)
    'witness/0003/00000.steps'
    """
    return f"{WITNESS}/{launch:04d}/{writer:05d}.steps"


def verdict_path(launch: int) -> str:
    """Return the path in a run of the verdict on a launch.

    >>> verdict_path(3)
    'witness/0003.json'
    """
    return f"{WITNESS}/{launch_name(launch)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The record of one step of one process. Unobserved members are None.

    Attributes:
        step: the number of training steps done, including this step.
        weights: a digest of chosen elements of the state's tensors after the step.
        position: the position in the data after the step, of all samplers together.
        samples: a digest of the samples of this process in this step, independent of their order.
        batch: a digest of the step's batch as observed by the program.
        loss: the bits of the observed loss, as a float of 64 bits.
        grad_norm: the bits of the observed norm of the gradients, as a float of 64 bits.
        options: a digest of the learning rates, momenta and weight decays of the optimizers after
            the step.
        streams: a digest of each RNG stream of the process; empty in a record that isn't full.
        is_before: whether the digests of the RNG streams were taken before the step, not after.
        is_several: whether the program observed several losses or norms in the step. The member is
            then a digest of all.
        is_full: whether the RNG streams were read and more tensors were sampled than in most steps.
            The weights of a full record can't be compared with the weights of a record that isn't
            full.
    """

    step: int
    weights: int | None = None
    position: int | None = None
    samples: int | None = None
    batch: int | None = None
    loss: int | None = None
    grad_norm: int | None = None
    options: int | None = None
    streams: tuple[int, ...] = ()
    is_before: bool = True
    is_several: bool = False
    is_full: bool = True

    def dump(self) -> bytes:
        """Return the bytes of the record, `RECORD_NBYTES` in all."""
        values = _VALUES(self)
        mask = sum([bit for bit, value in zip(_BITS, values, strict=True) if value is not None])
        mask |= _BEFORE if self.is_before else 0
        mask |= _SEVERAL if self.is_several else 0
        mask |= _FULL if self.is_full else 0
        streams = self.streams
        padding = _NO_STREAMS[len(streams) :]
        numbers = [value or 0 for value in values]
        content = _RECORD.pack(self.step, mask, len(streams), 0, *numbers, *streams, *padding)
        content += _CHECKSUM.pack(zlib.crc32(content))
        return content.ljust(RECORD_NBYTES, b"\0")

    @classmethod
    def parse(cls, content: bytes) -> Self | None:
        """Return the record; None for an empty record, or for a wrong checksum."""
        body = content[: _RECORD.size]
        (checksum,) = _CHECKSUM.unpack_from(content, _RECORD.size)
        step, mask, stream_count, _, *numbers = _RECORD.unpack(body)
        if step == 0 or zlib.crc32(body) != checksum or stream_count > STREAM_COUNT:
            return None
        values = numbers[: len(_MEMBERS)]
        members: dict[str, Any] = {
            name: values[bit] if mask >> bit & 1 else None for bit, name in enumerate(_MEMBERS)
        }
        streams = tuple(numbers[len(_MEMBERS) : len(_MEMBERS) + stream_count])
        flags = {
            "is_before": bool(mask & _BEFORE),
            "is_several": bool(mask & _SEVERAL),
            "is_full": bool(mask & _FULL),
        }
        return cls(step=step, streams=streams, **flags, **members)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepsHeader:
    """The header of a step log.

    Attributes:
        run_id: the id of the run.
        launch: the number of the launch.
        writer: the number of the process.
        writer_count: the number of processes.
        first_step: the number of steps done when the launch began.
        resumed: the digest of the manifest that the launch resumed from; None for a fresh start.
        expected: the claim of the load, ``T1``, ``S1`` or ``S0``; None for a fresh start.
        streams: the names of the RNG streams, in the order of their digests.
        tensors: a digest of the names, shapes and dtypes of the sampled tensors; empty before the
            first step.
        node: the name of the machine; empty without a healer.
        follows: the number of the failed launch whose decision this launch follows; 0 without a
            decision; None without a healer.
    """

    run_id: str
    launch: int
    writer: int
    writer_count: int
    first_step: int
    resumed: str | None
    expected: str | None
    streams: tuple[str, ...]
    tensors: str
    node: str = ""
    follows: int | None = None

    def dump(self) -> bytes:
        """Return the bytes of the header, `ENDING_PLACE` in all."""
        content = _MAGIC + json.dumps(dataclasses.asdict(self), ensure_ascii=False).encode() + b"\n"
        if len(content) > ENDING_PLACE:  # the caller's names of streams may be long
            count = len(self.streams)
            return dataclasses.replace(
                self, streams=tuple(f"stream {number}" for number in range(count))
            ).dump()
        return content.ljust(ENDING_PLACE, b"\0")

    @classmethod
    def parse(cls, content: bytes) -> Self | None:
        """Return the header, or None for other bytes."""
        if not content.startswith(_MAGIC):
            return None
        try:
            members = json.loads(content[len(_MAGIC) :].partition(b"\n")[0])
            header = cls(**{**members, "streams": tuple(members["streams"])})
        except (ValueError, TypeError, KeyError):
            return None
        return header


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a launch ended on one process; a step log without an ending ended without a trace.

    Attributes:
        kind: "closed" (the run was closed without an error), "alarm", "error" (an exception of the
            program), "outside" (an exception that a store, a network or another process caused), or
            "unknown" (the witness was switched off).
        step: the number of the step under way.
        name: the type of the exception, with its module; empty without an exception.
        place: file, line and function that raised the exception.
        text: the alarm, or the text of the exception.
        is_numeric: whether numbers that aren't finite, or rise, are the cause.
    """

    kind: Literal["closed", "alarm", "error", "outside", "unknown"]
    step: int
    name: str = ""
    place: str = ""
    text: str = ""
    is_numeric: bool = False

    def dump(self) -> bytes:
        """Return the bytes of the ending, at most as many as follow `ENDING_PLACE`."""
        content = json.dumps(dataclasses.asdict(self)).encode() + b"\n"
        if len(content) > HEADER_NBYTES - ENDING_PLACE:
            half = {name: getattr(self, name)[: len(getattr(self, name)) // 2] for name in _TEXTS}
            return dataclasses.replace(self, **half).dump()
        return content.ljust(HEADER_NBYTES - ENDING_PLACE, b"\0")

    @classmethod
    def parse(cls, content: bytes) -> Self | None:
        """Return the ending in the header of a step log; None without an ending."""
        try:
            return cls(**json.loads(content[ENDING_PLACE:HEADER_NBYTES].partition(b"\n")[0]))
        except (ValueError, TypeError):
            return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """The first difference between a step and the same step of an earlier launch.

    Attributes:
        step: the number of the step, as in `StepRecord`.
        writer: the number of the process that found the difference.
        what: the first member that differs, in the order of likely causes.
        text: the sentence for people.
    """

    step: int
    writer: int
    what: What
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WitnessRecord:
    """The verdict on the steps of a launch that an earlier launch had done.

    Attributes:
        run_id: the id of the run.
        launch: the number of the launch.
        expected: the claim of the load: ``T1``, ``S1`` or ``S0``.
        verdict: ``expected`` (no step was repeated), ``verified`` or ``refuted``.
        first_step: the first compared step; None if no step was compared.
        last_step: the last compared step without a difference; None if there is no such step.
        step_count: the number of compared steps without a difference, up to `last_step`.
        compared: the compared members, in words.
        difference: the first difference; None for equal steps.
    """

    run_id: str
    launch: int
    expected: str
    verdict: Verdict
    first_step: int | None
    last_step: int | None
    step_count: int
    compared: tuple[str, ...]
    difference: StepDifference | None

    @property
    def summary(self) -> str:
        """The verdict in a few words, such as ``T1 verified over 5 steps``."""
        if self.verdict == "refuted" and self.difference is not None:
            return f"NOT the same trajectory: {self.difference.text}"
        if self.verdict == "verified":
            return (
                f"{self.expected} verified over {self.step_count}"
                f" step{'s' * (self.step_count != 1)}"
            )
        return f"{self.expected} expected" if self.expected != "S0" else "S0"

    def dump(self) -> bytes:
        """Return the bytes of the verdict."""
        members = dataclasses.asdict(self)
        return dump_document(
            {
                **head_of("witness"),
                **members,
                "compared": list(self.compared),
            }
        )

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> Self:
        """Return the verdict of a file.

        Raises: FormatError (RUN_MISMATCH if the number differs from the file's name),
            IntegrityError, UnsupportedError.
        """
        signed = parse_of_launch(content, where=where, kind="witness", requirement="REQ-RUN-060")
        members: dict[str, Any] = {
            field.name: signed[field.name] for field in dataclasses.fields(cls)
        }
        difference = members.pop("difference")
        compared = tuple(members.pop("compared"))
        return cls(
            **members,
            compared=compared,
            difference=None if difference is None else StepDifference(**difference),
        )

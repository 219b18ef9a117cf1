"""Every error that ckptfmt raises: one tree under `CkptError`, and one table of codes.

The classes are grouped by what a handler would do:

    CkptError
    ├── FormatError         the bytes break the specification: use another checkpoint, report the writer
    ├── IntegrityError      bytes are damaged, missing or replaced: use another checkpoint or another copy
    ├── UnsupportedError    a newer writer made it: upgrade the reader
    ├── LayoutError         what the writers hold doesn't fit together: mend the program that saves
    ├── StateError          a live object can't be saved or restored as asked: mend the call
    ├── CommitError         this save didn't become a checkpoint, or isn't known to have become one
    │   └── FencedError     a newer launch owns the run: stop this process
    └── StoreError          the storage refused, failed or didn't answer

A code is never renumbered, renamed or reused. ``spec/80-errors.md`` lists the same codes; a test compares the two.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Self

__all__ = [
    "CODES",
    "CkptError",
    "Code",
    "CodeEntry",
    "CommitError",
    "FencedError",
    "FormatError",
    "IntegrityError",
    "LayoutError",
    "StateError",
    "StoreError",
    "UnsupportedError",
    "encodable",
    "err",
]


class CkptError(Exception):
    """The root of all errors of ckptfmt.

    Attributes:
        code: what went wrong, from the append-only table `CODES`.
        detail: what was found, in one sentence.
        where: file with JSON pointer or byte range, or the name of the live object; None where there is no place.
        requirement: the clause of the specification that is broken, such as ``REQ-MAN-003``.
        remedy: what to do about it, in one line.

    Lone surrogates in these texts, which names of files and of tensors may have, are escaped: no encoding takes them.
    """

    def __init__(
        self, code: Code, detail: str, *, where: str | None = None, requirement: str | None = None, remedy: str = ""
    ) -> None:
        detail = encodable(detail)
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.where = None if where is None else encodable(where)
        self.requirement = requirement
        self.remedy = encodable(remedy)

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        clause = f" [{self.requirement}]" if self.requirement else ""
        remedy = f" Remedy: {self.remedy}" if self.remedy else ""
        return f"{self.code}{place}: {self.detail}{clause}{remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.code, self.detail, self.where, self.requirement, self.remedy)

    def below(self, directory: str) -> Self:
        """Return the same error, its place below a directory; itself, if it says so already.

        >>> err(Code.FILE_MISSING, "no such file", where="manifest.json").below("step-00000003-l0001").where
        'step-00000003-l0001/manifest.json'
        """
        directory = encodable(directory)
        if self.where is not None and (self.where == directory or self.where.startswith(f"{directory}/")):
            return self
        where = f"{directory}/{self.where}" if self.where else directory
        return type(self)(self.code, self.detail, where=where, requirement=self.requirement, remedy=self.remedy)

    def as_json(self) -> dict[str, str | None]:
        """Return the error as a JSON-ready mapping."""
        return {
            "code": str(self.code),
            "detail": self.detail,
            "where": self.where,
            "requirement": self.requirement,
            "remedy": self.remedy,
        }


class FormatError(CkptError):
    """The bytes break the specification."""


class IntegrityError(CkptError):
    """Bytes are damaged, missing or replaced."""


class UnsupportedError(CkptError):
    """The checkpoint needs a reader that knows more."""


class LayoutError(CkptError):
    """What the writers hold doesn't fit together."""


class StateError(CkptError):
    """A live object can't be saved or restored as asked."""


class CommitError(CkptError):
    """This save didn't become a checkpoint, or isn't known to have become one."""


class FencedError(CommitError):
    """A newer launch owns the run."""


class StoreError(CkptError):
    """The storage refused, failed or didn't answer."""


class Code(StrEnum):
    """What went wrong. Append-only."""

    # documents
    DOC_ENCODING = "DOC_ENCODING"
    DOC_SYNTAX = "DOC_SYNTAX"
    DOC_DUPLICATE_KEY = "DOC_DUPLICATE_KEY"
    DOC_NUMBER = "DOC_NUMBER"
    DOC_STRING = "DOC_STRING"
    DOC_DEPTH = "DOC_DEPTH"
    DOC_NOT_CANONICAL = "DOC_NOT_CANONICAL"
    DOC_SCHEMA = "DOC_SCHEMA"
    DOC_DIGEST = "DOC_DIGEST"
    DOC_MISMATCH = "DOC_MISMATCH"
    DOC_COMPRESSION = "DOC_COMPRESSION"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    MSGPACK_SYNTAX = "MSGPACK_SYNTAX"
    MSGPACK_TYPE = "MSGPACK_TYPE"
    PACKED_FORM = "PACKED_FORM"
    COLUMN_FORM = "COLUMN_FORM"
    COLUMN_ORDER = "COLUMN_ORDER"
    SCOPE_FORM = "SCOPE_FORM"
    TREE_TAG = "TREE_TAG"
    TREE_REFERENCE = "TREE_REFERENCE"
    CURSOR_FORM = "CURSOR_FORM"
    MANIFEST_FIELDS = "MANIFEST_FIELDS"
    MANIFEST_SUMMARY = "MANIFEST_SUMMARY"
    PROFILE_MISMATCH = "PROFILE_MISMATCH"
    STEP_MISMATCH = "STEP_MISMATCH"
    RUN_MISMATCH = "RUN_MISMATCH"
    UNSAFE_PATH = "UNSAFE_PATH"
    UNSAFE_FILE = "UNSAFE_FILE"
    EXTENT_COVERAGE = "EXTENT_COVERAGE"
    FILE_COVERAGE = "FILE_COVERAGE"
    SHARD_HEADER_NBYTES = "SHARD_HEADER_NBYTES"
    SHARD_HEADER_SYNTAX = "SHARD_HEADER_SYNTAX"
    SHARD_HEADER_SCHEMA = "SHARD_HEADER_SCHEMA"
    SHARD_DTYPE = "SHARD_DTYPE"
    SHARD_SHAPE = "SHARD_SHAPE"
    SHARD_OFFSETS = "SHARD_OFFSETS"
    SHARD_MISMATCH = "SHARD_MISMATCH"
    ENCODED_FORM = "ENCODED_FORM"
    DECODED_DIGEST = "DECODED_DIGEST"
    BASE_BLOCK = "BASE_BLOCK"
    REFERENCE_CLOSURE = "REFERENCE_CLOSURE"
    # integrity
    FILE_MISSING = "FILE_MISSING"
    FILE_NBYTES = "FILE_NBYTES"
    BLOCK_DIGEST = "BLOCK_DIGEST"
    HEADER_DIGEST = "HEADER_DIGEST"
    NOT_COMMITTED = "NOT_COMMITTED"
    CHECKPOINT_ABORTED = "CHECKPOINT_ABORTED"
    CHECKPOINT_RETIRED = "CHECKPOINT_RETIRED"
    NO_VALID_CHECKPOINT = "NO_VALID_CHECKPOINT"
    BASE_MISSING = "BASE_MISSING"
    BASE_MISMATCH = "BASE_MISMATCH"
    # unsupported
    VERSION_UNSUPPORTED = "VERSION_UNSUPPORTED"
    FEATURE_UNSUPPORTED = "FEATURE_UNSUPPORTED"
    # layout
    BOX_BOUNDS = "BOX_BOUNDS"
    TILING_GAP = "TILING_GAP"
    TILING_OVERLAP = "TILING_OVERLAP"
    REPLICA_DIVERGED = "REPLICA_DIVERGED"
    HELD_NOT_WRITTEN = "HELD_NOT_WRITTEN"
    TENSOR_DIVERGED = "TENSOR_DIVERGED"
    LEAF_DIVERGED = "LEAF_DIVERGED"
    WRITERS_DIVERGED = "WRITERS_DIVERGED"
    # state
    STATE_UNSUPPORTED = "STATE_UNSUPPORTED"
    STATE_NAME = "STATE_NAME"
    PARAMETER_UNNAMED = "PARAMETER_UNNAMED"
    META_DESTINATION = "META_DESTINATION"
    TENSOR_MISSING = "TENSOR_MISSING"
    TENSOR_UNEXPECTED = "TENSOR_UNEXPECTED"
    DTYPE_MISMATCH = "DTYPE_MISMATCH"
    SHAPE_MISMATCH = "SHAPE_MISMATCH"
    LEAF_MISSING = "LEAF_MISSING"
    LEAF_UNEXPECTED = "LEAF_UNEXPECTED"
    STREAM_MISSING = "STREAM_MISSING"
    STREAM_UNEXPECTED = "STREAM_UNEXPECTED"
    GROUP_MISMATCH = "GROUP_MISMATCH"
    CONFIG_IDENTITY = "CONFIG_IDENTITY"
    READ_BACK = "READ_BACK"
    ARGUMENT = "ARGUMENT"
    WRITERS_UNKNOWN = "WRITERS_UNKNOWN"
    PEER_FAILED = "PEER_FAILED"
    STATE_CHANGED = "STATE_CHANGED"
    SLOT_MEMORY = "SLOT_MEMORY"
    LOAD_MEMORY = "LOAD_MEMORY"
    FLOAT_ENVIRONMENT = "FLOAT_ENVIRONMENT"
    LOADER_NOT_ELASTIC = "LOADER_NOT_ELASTIC"
    # commit
    FENCED = "FENCED"
    CHECKPOINT_EXISTS = "CHECKPOINT_EXISTS"
    COMMIT_CONFLICT = "COMMIT_CONFLICT"
    COMMIT_UNKNOWN = "COMMIT_UNKNOWN"
    WRITERS_MISSING = "WRITERS_MISSING"
    WRITER_FAILED = "WRITER_FAILED"
    SLOTS_BUSY = "SLOTS_BUSY"
    SAVE_PENDING = "SAVE_PENDING"
    SAVER_LOST = "SAVER_LOST"
    TRAINER_LOST = "TRAINER_LOST"
    # store
    STORE_EXISTS = "STORE_EXISTS"
    STORE_IO = "STORE_IO"
    STORE_NO_ANSWER = "STORE_NO_ANSWER"
    STORE_UNSUPPORTED = "STORE_UNSUPPORTED"
    STORE_ACCESS = "STORE_ACCESS"
    NO_SPACE = "NO_SPACE"


@dataclasses.dataclass(frozen=True, slots=True)
class CodeEntry:
    """What a code means, for the handler and for the reader of the specification."""

    error: type[CkptError]
    meaning: str
    remedy: str


_RESTORE = "Load another checkpoint of the run, or restore this file from another copy."
_WRITER = "The writer of this file is at fault; use another checkpoint and report it to the writer's authors."
_SCOPE = "Wrap what belongs to one worker in ckptfmt.PerWorker, or make it equal on all workers."

CODES: dict[Code, CodeEntry] = {
    Code.DOC_ENCODING: CodeEntry(FormatError, "a document isn't UTF-8, or starts with a byte-order mark", _RESTORE),
    Code.DOC_SYNTAX: CodeEntry(FormatError, "a document isn't one JSON object", _RESTORE),
    Code.DOC_DUPLICATE_KEY: CodeEntry(FormatError, "a map has one key twice", _WRITER),
    Code.DOC_NUMBER: CodeEntry(FormatError, "a number isn't an integer in range", _WRITER),
    Code.DOC_STRING: CodeEntry(FormatError, "a string has a forbidden character, or isn't normalised", _WRITER),
    Code.DOC_DEPTH: CodeEntry(FormatError, "a document nests too deeply", _WRITER),
    Code.DOC_NOT_CANONICAL: CodeEntry(FormatError, "a document isn't in its canonical form", _RESTORE),
    Code.DOC_SCHEMA: CodeEntry(FormatError, "a document has a missing, unknown or ill-typed member", _WRITER),
    Code.DOC_DIGEST: CodeEntry(IntegrityError, "a document isn't the one that its digest names", _RESTORE),
    Code.DOC_MISMATCH: CodeEntry(FormatError, "two documents of one checkpoint contradict each other", _RESTORE),
    Code.DOC_COMPRESSION: CodeEntry(FormatError, "a compressed document doesn't hold what it says", _RESTORE),
    Code.LIMIT_EXCEEDED: CodeEntry(FormatError, "something is larger than the table of limits allows", _WRITER),
    Code.MSGPACK_SYNTAX: CodeEntry(FormatError, "bytes aren't one whole msgpack value", _RESTORE),
    Code.MSGPACK_TYPE: CodeEntry(FormatError, "a msgpack type is outside of the profile", _WRITER),
    Code.PACKED_FORM: CodeEntry(FormatError, "a packed array isn't in its one form", _WRITER),
    Code.COLUMN_FORM: CodeEntry(FormatError, "columns disagree in length, or an entry is out of range", _WRITER),
    Code.COLUMN_ORDER: CodeEntry(FormatError, "rows aren't sorted and unique", _WRITER),
    Code.SCOPE_FORM: CodeEntry(FormatError, "a scope is neither global nor lw/<i>", _WRITER),
    Code.TREE_TAG: CodeEntry(FormatError, "a tree has an unknown tag, or a tag with the wrong contents", _WRITER),
    Code.TREE_REFERENCE: CodeEntry(FormatError, "a tree refers to a tensor that isn't there", _WRITER),
    Code.CURSOR_FORM: CodeEntry(FormatError, "a data cursor isn't of the form that the specification gives", _WRITER),
    Code.MANIFEST_FIELDS: CodeEntry(FormatError, "a field is neither present nor absent with a reason", _WRITER),
    Code.MANIFEST_SUMMARY: CodeEntry(FormatError, "the manifest's summary isn't what the index says", _WRITER),
    Code.PROFILE_MISMATCH: CodeEntry(FormatError, "a full checkpoint has references or encoded blocks", _WRITER),
    Code.STEP_MISMATCH: CodeEntry(
        FormatError,
        "the manifest isn't that of this directory's step and launch",
        "The directory was renamed or copied over another: give it the name that its manifest says.",
    ),
    Code.RUN_MISMATCH: CodeEntry(
        FormatError, "a document belongs to another run", "Move it back to its own run's directory."
    ),
    Code.UNSAFE_PATH: CodeEntry(FormatError, "a path isn't of an allowed form", _WRITER),
    Code.UNSAFE_FILE: CodeEntry(
        FormatError, "a file is a link, pipe, device or directory", "Replace it by the regular file that was saved."
    ),
    Code.EXTENT_COVERAGE: CodeEntry(FormatError, "a written box's extents don't hold each block once", _WRITER),
    Code.FILE_COVERAGE: CodeEntry(FormatError, "header and extents don't tile a file exactly", _WRITER),
    Code.SHARD_HEADER_NBYTES: CodeEntry(FormatError, "a shard's header length is wrong", _RESTORE),
    Code.SHARD_HEADER_SYNTAX: CodeEntry(FormatError, "a shard's header isn't one padded JSON object", _RESTORE),
    Code.SHARD_HEADER_SCHEMA: CodeEntry(FormatError, "a shard's header has a wrong or unknown member", _WRITER),
    Code.SHARD_DTYPE: CodeEntry(FormatError, "a shard's header names an unknown dtype", _WRITER),
    Code.SHARD_SHAPE: CodeEntry(FormatError, "a shard's header has a shape out of range", _WRITER),
    Code.SHARD_OFFSETS: CodeEntry(FormatError, "a shard's tensors don't tile its data exactly", _WRITER),
    Code.SHARD_MISMATCH: CodeEntry(FormatError, "a shard's header isn't what its part says", _WRITER),
    Code.ENCODED_FORM: CodeEntry(FormatError, "the stored bytes of a block aren't of its encoding's form", _WRITER),
    Code.DECODED_DIGEST: CodeEntry(FormatError, "a block decodes to other bytes than were saved", _WRITER),
    Code.BASE_BLOCK: CodeEntry(FormatError, "a base doesn't have what a delta reads from it", _WRITER),
    Code.REFERENCE_CLOSURE: CodeEntry(
        FormatError, "the references of a checkpoint leave out what its bases refer to", _WRITER
    ),
    Code.FILE_MISSING: CodeEntry(IntegrityError, "a file isn't there", _RESTORE),
    Code.FILE_NBYTES: CodeEntry(IntegrityError, "a file has another number of bytes than declared", _RESTORE),
    Code.BLOCK_DIGEST: CodeEntry(IntegrityError, "a block's bytes aren't those that were saved", _RESTORE),
    Code.HEADER_DIGEST: CodeEntry(IntegrityError, "a shard's header isn't the one that was saved", _RESTORE),
    Code.NOT_COMMITTED: CodeEntry(
        IntegrityError,
        "there is no committed checkpoint here",
        "Give the path of a checkpoint directory (it has a manifest.json) or of a run.",
    ),
    Code.CHECKPOINT_ABORTED: CodeEntry(
        IntegrityError, "this attempt was given up and cleaned away", "Load another checkpoint of the run."
    ),
    Code.CHECKPOINT_RETIRED: CodeEntry(
        IntegrityError, "this checkpoint was retired and its files deleted", "Load another checkpoint of the run."
    ),
    Code.NO_VALID_CHECKPOINT: CodeEntry(
        IntegrityError,
        "none of the checkpoints that the lineage names is valid",
        "Run `python -m ckptfmt validate` on the run; resume by hand from another checkpoint, or start afresh.",
    ),
    Code.BASE_MISSING: CodeEntry(
        IntegrityError,
        "a checkpoint that this one reads from isn't there",
        "Put the base back beside it, say with bases= where it lies, or load another checkpoint.",
    ),
    Code.BASE_MISMATCH: CodeEntry(
        IntegrityError,
        "another checkpoint lies where a base should be",
        "Put the base back under its name, say with bases= where it lies, or load another checkpoint.",
    ),
    Code.VERSION_UNSUPPORTED: CodeEntry(
        UnsupportedError, "another version of the format", "Install the ckptfmt that writes this version."
    ),
    Code.FEATURE_UNSUPPORTED: CodeEntry(
        UnsupportedError, "a feature that this reader doesn't know", "Install a newer ckptfmt."
    ),
    Code.BOX_BOUNDS: CodeEntry(LayoutError, "a box leaves its tensor", _WRITER),
    Code.TILING_GAP: CodeEntry(LayoutError, "the boxes leave a part of a tensor uncovered", _WRITER),
    Code.TILING_OVERLAP: CodeEntry(
        LayoutError, "two boxes of a tensor overlap", "Give workers that hold different pieces disjoint boxes."
    ),
    Code.REPLICA_DIVERGED: CodeEntry(
        LayoutError,
        "workers hold the same tensor with other contents",
        "Give the tensors different names if they are different; wrap them in ckptfmt.PerWorker if each worker has"
        " its own; otherwise suspect silent corruption.",
    ),
    Code.HELD_NOT_WRITTEN: CodeEntry(
        LayoutError, "a worker holds a piece that nobody wrote", "Save again; report it if it happens twice."
    ),
    Code.TENSOR_DIVERGED: CodeEntry(
        LayoutError,
        "workers give one tensor different shapes, dtypes or kinds",
        "Give different tensors different names.",
    ),
    Code.LEAF_DIVERGED: CodeEntry(LayoutError, "workers give one value differently", _SCOPE),
    Code.WRITERS_DIVERGED: CodeEntry(
        LayoutError,
        "workers disagree on what they save or load",
        "Call save and load on all workers with the same step and path, at the same point of the program.",
    ),
    Code.STATE_UNSUPPORTED: CodeEntry(
        StateError,
        "an object can't be saved without guessing",
        "Turn it into tensors, arrays and plain values, or give it state_dict and load_state_dict.",
    ),
    Code.STATE_NAME: CodeEntry(StateError, "a name is used twice or isn't usable", "Rename one of the two."),
    Code.PARAMETER_UNNAMED: CodeEntry(
        StateError,
        "an optimizer updates a parameter that has no name in weights",
        "Pass every module whose parameters the optimizer updates as State(weights=...).",
    ),
    Code.META_DESTINATION: CodeEntry(
        StateError,
        "a destination has no memory",
        "Call module.to_empty(device=...) before load; what isn't loaded must be initialised by you.",
    ),
    Code.TENSOR_MISSING: CodeEntry(
        StateError,
        "the checkpoint lacks a tensor that the state wants",
        "Fix the model, or pass allow=('missing',) to keep the live value.",
    ),
    Code.TENSOR_UNEXPECTED: CodeEntry(
        StateError,
        "the checkpoint has a tensor that the state doesn't want",
        "Fix the model, or pass allow=('unexpected',) to leave it out.",
    ),
    Code.DTYPE_MISMATCH: CodeEntry(
        StateError,
        "a tensor was saved with another dtype",
        "Create the destination with the saved dtype, or pass allow=('dtype',) to convert.",
    ),
    Code.SHAPE_MISMATCH: CodeEntry(StateError, "a tensor was saved with another shape", "Fix the model's sizes."),
    Code.LEAF_MISSING: CodeEntry(
        StateError,
        "the checkpoint lacks a value that the state wants",
        "Pass allow=('missing',) to keep the live value.",
    ),
    Code.LEAF_UNEXPECTED: CodeEntry(
        StateError,
        "the checkpoint has a value that the state doesn't want",
        "Pass allow=('unexpected',) to leave it out.",
    ),
    Code.STREAM_MISSING: CodeEntry(
        StateError,
        "the checkpoint lacks a random-number stream that is live here",
        "Pass allow=('streams',) to go on with the fresh stream; the claim is lowered.",
    ),
    Code.STREAM_UNEXPECTED: CodeEntry(
        StateError,
        "the checkpoint has a random-number stream that nothing here takes",
        "Pass allow=('streams',) to leave it out; the claim is lowered.",
    ),
    Code.GROUP_MISMATCH: CodeEntry(
        StateError,
        "an optimizer's parameter groups can't be matched to the saved ones",
        "Build the optimizer with the same groups as when it was saved.",
    ),
    Code.CONFIG_IDENTITY: CodeEntry(
        StateError,
        "a configuration key that defines the run differs",
        "Use the saved configuration, or take the key out of State(identity=...).",
    ),
    Code.READ_BACK: CodeEntry(
        StateError,
        "an object doesn't hold what its load_state_dict was given",
        "Its load_state_dict changes values: give its tensors to State as a mapping instead.",
    ),
    Code.ARGUMENT: CodeEntry(StateError, "an argument is out of range", "See the docstring."),
    Code.WRITERS_UNKNOWN: CodeEntry(
        StateError,
        "several workers, and no way to agree among them",
        "Initialise torch.distributed, or pass writer=(i, n) with agree=.",
    ),
    Code.PEER_FAILED: CodeEntry(
        StateError, "another worker refused the save or the load", "See the error that the named worker raised."
    ),
    Code.STATE_CHANGED: CodeEntry(
        StateError,
        "a tensor changed while it was copied beside the training",
        "Change parameters in optimizer.step() only, or pass overlap=False.",
    ),
    Code.SLOT_MEMORY: CodeEntry(
        StateError,
        "memory doesn't suffice for a snapshot",
        "Free memory, pass slots=1, or pass saver='inline' to save without a snapshot.",
    ),
    Code.LOAD_MEMORY: CodeEntry(
        StateError,
        "memory doesn't suffice for a tensor that is loaded",
        "Load into live tensors, choose less with only=, or read boxes of it: ckptfmt.open(path).read(..., box=...).",
    ),
    Code.FLOAT_ENVIRONMENT: CodeEntry(
        StateError,
        "this thread's floating point doesn't round as IEEE 754 says",
        "Turn flush-to-zero off: torch.set_flush_denormal(False), and no library built with -ffast-math.",
    ),
    Code.LOADER_NOT_ELASTIC: CodeEntry(
        StateError,
        "another library's position in its data holds for another number of workers",
        "Load with as many workers as saved, or pass allow=('loader',); the claim is lowered.",
    ),
    Code.FENCED: CodeEntry(
        FencedError, "a newer launch has taken over the run", "Stop this process; the newer launch goes on."
    ),
    Code.CHECKPOINT_EXISTS: CodeEntry(
        CommitError, "a checkpoint is here already", "Save to another path; a committed checkpoint is never changed."
    ),
    Code.COMMIT_CONFLICT: CodeEntry(
        CommitError, "another checkpoint was committed here first", "Load what was committed, or save another step."
    ),
    Code.COMMIT_UNKNOWN: CodeEntry(
        CommitError,
        "the store didn't say whether the commit took place",
        "Nothing was deleted. When the store answers again, `python -m ckptfmt validate` says which it is.",
    ),
    Code.WRITERS_MISSING: CodeEntry(
        CommitError, "not every writer's part came in time", "See why the named writers stopped; save again."
    ),
    Code.WRITER_FAILED: CodeEntry(
        CommitError, "a writer reported that it failed", "See the error that the named writer raised; save again."
    ),
    Code.SLOTS_BUSY: CodeEntry(
        CommitError,
        "the saves before this one aren't written yet",
        "Save less often, or pass when_busy='skip'; if the storage hangs, see why.",
    ),
    Code.SAVE_PENDING: CodeEntry(CommitError, "a save isn't that far yet", "It goes on; wait for it again."),
    Code.SAVER_LOST: CodeEntry(
        CommitError,
        "the process that writes ended before it said that the checkpoint is committed",
        "The next save starts another one; `python -m ckptfmt log` says whether this one was committed.",
    ),
    Code.TRAINER_LOST: CodeEntry(
        CommitError, "the training process ended before its snapshot was complete", "Resume from an older checkpoint."
    ),
    Code.STORE_EXISTS: CodeEntry(StoreError, "a file is there already", "Save to another path."),
    Code.STORE_IO: CodeEntry(StoreError, "the storage failed", "Check the storage; save again."),
    Code.STORE_NO_ANSWER: CodeEntry(StoreError, "the storage didn't answer", "Try again when it answers."),
    Code.STORE_UNSUPPORTED: CodeEntry(
        StoreError,
        "the file system can't create a file exclusively and whole",
        "Use a file system with hard links or renameat2(RENAME_NOREPLACE).",
    ),
    Code.STORE_ACCESS: CodeEntry(StoreError, "permission denied", "Check owner and mode of the path."),
    Code.NO_SPACE: CodeEntry(StoreError, "no space is left", "Free space or lower keep=, then save again."),
}


def err(
    code: Code, detail: str, *, where: str | None = None, requirement: str | None = None, remedy: str | None = None
) -> CkptError:
    """Return the error of `code`, of the class and with the remedy that the table gives.

    >>> str(err(Code.FILE_MISSING, "no such file", where="parts/x.msgpack", remedy="look elsewhere"))
    'FILE_MISSING at parts/x.msgpack: no such file Remedy: look elsewhere'
    """
    entry = CODES[code]
    return entry.error(
        code, detail, where=where, requirement=requirement, remedy=entry.remedy if remedy is None else remedy
    )


def encodable(text: str) -> str:
    r"""Return a text that can be printed and sent: a lone surrogate becomes its escape, such as ``\\udcff``."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _rebuild(  # noqa: PLR0917 - pickle passes arguments by position
    cls: type[CkptError], code: Code, detail: str, where: str | None, requirement: str | None, remedy: str
) -> CkptError:
    return cls(code, detail, where=where, requirement=requirement, remedy=remedy)

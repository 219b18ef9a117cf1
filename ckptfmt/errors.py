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

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self


class CkptError(Exception):
    """The root of all errors of ckptfmt.

    Attributes:
        code: what went wrong, from the append-only table `Code`.
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


_RESTORE = "Load another checkpoint of the run, or restore this file from another copy."
_WRITER = "The writer of this file is at fault; use another checkpoint and report it to the writer's authors."
_SCOPE = "Wrap what belongs to one worker in ckptfmt.PerWorker, or make it equal on all workers."


class Code(StrEnum):
    """What went wrong. Append-only.

    Attributes:
        error: the class of errors with this code: what a handler would do.
        meaning: what the code says, in one clause.
        remedy: what to do about it, where the place that raises it has nothing better to say.
    """

    error: type[CkptError]
    meaning: str
    remedy: str

    def __new__(cls, code: str, error: type[CkptError], meaning: str, remedy: str) -> Self:  # noqa: D102 - a row
        member = str.__new__(cls, code)
        member._value_ = code
        member.error, member.meaning, member.remedy = error, meaning, remedy
        return member

    # documents
    DOC_ENCODING = ("DOC_ENCODING", FormatError, "a document isn't UTF-8, or starts with a byte-order mark", _RESTORE)
    DOC_SYNTAX = ("DOC_SYNTAX", FormatError, "a document isn't one JSON object", _RESTORE)
    DOC_DUPLICATE_KEY = ("DOC_DUPLICATE_KEY", FormatError, "a map has one key twice", _WRITER)
    DOC_NUMBER = ("DOC_NUMBER", FormatError, "a number isn't an integer in range", _WRITER)
    DOC_STRING = ("DOC_STRING", FormatError, "a string has a forbidden character, or isn't normalised", _WRITER)
    DOC_DEPTH = ("DOC_DEPTH", FormatError, "a document nests too deeply", _WRITER)
    DOC_NOT_CANONICAL = ("DOC_NOT_CANONICAL", FormatError, "a document isn't in its canonical form", _RESTORE)
    DOC_SCHEMA = ("DOC_SCHEMA", FormatError, "a document has a missing, unknown or ill-typed member", _WRITER)
    DOC_DIGEST = ("DOC_DIGEST", IntegrityError, "a document isn't the one that its digest names", _RESTORE)
    DOC_MISMATCH = ("DOC_MISMATCH", FormatError, "two documents of one checkpoint contradict each other", _RESTORE)
    DOC_COMPRESSION = ("DOC_COMPRESSION", FormatError, "a compressed document doesn't hold what it says", _RESTORE)
    LIMIT_EXCEEDED = ("LIMIT_EXCEEDED", FormatError, "something is larger than the table of limits allows", _WRITER)
    MSGPACK_SYNTAX = ("MSGPACK_SYNTAX", FormatError, "bytes aren't one whole msgpack value", _RESTORE)
    MSGPACK_TYPE = ("MSGPACK_TYPE", FormatError, "a msgpack type is outside of the profile", _WRITER)
    PACKED_FORM = ("PACKED_FORM", FormatError, "a packed array isn't in its one form", _WRITER)
    COLUMN_FORM = ("COLUMN_FORM", FormatError, "columns disagree in length, or an entry is out of range", _WRITER)
    COLUMN_ORDER = ("COLUMN_ORDER", FormatError, "rows aren't sorted and unique", _WRITER)
    SCOPE_FORM = ("SCOPE_FORM", FormatError, "a scope is neither global nor lw/<i>", _WRITER)
    TREE_TAG = ("TREE_TAG", FormatError, "a tree has an unknown tag, or a tag with the wrong contents", _WRITER)
    TREE_REFERENCE = ("TREE_REFERENCE", FormatError, "a tree refers to a tensor that isn't there", _WRITER)
    CURSOR_FORM = ("CURSOR_FORM", FormatError, "a data cursor isn't of the form that the specification gives", _WRITER)
    MANIFEST_FIELDS = ("MANIFEST_FIELDS", FormatError, "a field is neither present nor absent with a reason", _WRITER)
    MANIFEST_SUMMARY = ("MANIFEST_SUMMARY", FormatError, "the manifest's summary isn't what the index says", _WRITER)
    PROFILE_MISMATCH = ("PROFILE_MISMATCH", FormatError, "a full checkpoint has references or encoded blocks", _WRITER)
    STEP_MISMATCH = (
        "STEP_MISMATCH",
        FormatError,
        "the manifest isn't that of this directory's step and launch",
        "The directory was renamed or copied over another: give it the name that its manifest says.",
    )
    RUN_MISMATCH = (
        "RUN_MISMATCH",
        FormatError,
        "a document belongs to another run",
        "Move it back to its own run's directory.",
    )
    UNSAFE_PATH = ("UNSAFE_PATH", FormatError, "a path isn't of an allowed form", _WRITER)
    UNSAFE_FILE = (
        "UNSAFE_FILE",
        FormatError,
        "a file is a link, pipe, device or directory",
        "Replace it by the regular file that was saved.",
    )
    EXTENT_COVERAGE = ("EXTENT_COVERAGE", FormatError, "a written box's extents don't hold each block once", _WRITER)
    FILE_COVERAGE = ("FILE_COVERAGE", FormatError, "header and extents don't tile a file exactly", _WRITER)
    SHARD_HEADER_NBYTES = ("SHARD_HEADER_NBYTES", FormatError, "a shard's header length is wrong", _RESTORE)
    SHARD_HEADER_SYNTAX = (
        "SHARD_HEADER_SYNTAX",
        FormatError,
        "a shard's header isn't one padded JSON object",
        _RESTORE,
    )
    SHARD_HEADER_SCHEMA = (
        "SHARD_HEADER_SCHEMA",
        FormatError,
        "a shard's header has a wrong or unknown member",
        _WRITER,
    )
    SHARD_DTYPE = ("SHARD_DTYPE", FormatError, "a shard's header names an unknown dtype", _WRITER)
    SHARD_SHAPE = ("SHARD_SHAPE", FormatError, "a shard's header has a shape out of range", _WRITER)
    SHARD_OFFSETS = ("SHARD_OFFSETS", FormatError, "a shard's tensors don't tile its data exactly", _WRITER)
    SHARD_MISMATCH = ("SHARD_MISMATCH", FormatError, "a shard's header isn't what its part says", _WRITER)
    ENCODED_FORM = ("ENCODED_FORM", FormatError, "the stored bytes of a block aren't of its encoding's form", _WRITER)
    DECODED_DIGEST = ("DECODED_DIGEST", FormatError, "a block decodes to other bytes than were saved", _WRITER)
    BASE_BLOCK = ("BASE_BLOCK", FormatError, "a base doesn't have what a delta reads from it", _WRITER)
    REFERENCE_CLOSURE = (
        "REFERENCE_CLOSURE",
        FormatError,
        "the references of a checkpoint leave out what its bases refer to",
        _WRITER,
    )
    # integrity
    FILE_MISSING = ("FILE_MISSING", IntegrityError, "a file isn't there", _RESTORE)
    FILE_NBYTES = ("FILE_NBYTES", IntegrityError, "a file has another number of bytes than declared", _RESTORE)
    BLOCK_DIGEST = ("BLOCK_DIGEST", IntegrityError, "a block's bytes aren't those that were saved", _RESTORE)
    HEADER_DIGEST = ("HEADER_DIGEST", IntegrityError, "a shard's header isn't the one that was saved", _RESTORE)
    NOT_COMMITTED = (
        "NOT_COMMITTED",
        IntegrityError,
        "there is no committed checkpoint here",
        "Give the path of a checkpoint directory (it has a manifest.json) or of a run.",
    )
    CHECKPOINT_ABORTED = (
        "CHECKPOINT_ABORTED",
        IntegrityError,
        "this attempt was given up and cleaned away",
        "Load another checkpoint of the run.",
    )
    CHECKPOINT_RETIRED = (
        "CHECKPOINT_RETIRED",
        IntegrityError,
        "this checkpoint was retired and its files deleted",
        "Load another checkpoint of the run.",
    )
    NO_VALID_CHECKPOINT = (
        "NO_VALID_CHECKPOINT",
        IntegrityError,
        "none of the checkpoints that the lineage names is valid",
        "Run `python -m ckptfmt validate` on the run; resume by hand from another checkpoint, or start afresh.",
    )
    BASE_MISSING = (
        "BASE_MISSING",
        IntegrityError,
        "a checkpoint that this one reads from isn't there",
        "Put the base back beside it, say with bases= where it lies, or load another checkpoint.",
    )
    BASE_MISMATCH = (
        "BASE_MISMATCH",
        IntegrityError,
        "another checkpoint lies where a base should be",
        "Put the base back under its name, say with bases= where it lies, or load another checkpoint.",
    )
    # unsupported
    VERSION_UNSUPPORTED = (
        "VERSION_UNSUPPORTED",
        UnsupportedError,
        "the document has another version of the format",
        "Install the ckptfmt that writes this version.",
    )
    FEATURE_UNSUPPORTED = (
        "FEATURE_UNSUPPORTED",
        UnsupportedError,
        "the document needs a feature that this reader doesn't know",
        "Install a newer ckptfmt.",
    )
    # layout
    BOX_BOUNDS = ("BOX_BOUNDS", LayoutError, "a box leaves its tensor", _WRITER)
    TILING_GAP = ("TILING_GAP", LayoutError, "the boxes leave a part of a tensor uncovered", _WRITER)
    TILING_OVERLAP = (
        "TILING_OVERLAP",
        LayoutError,
        "two boxes of a tensor overlap",
        "Give workers that hold different pieces disjoint boxes.",
    )
    REPLICA_DIVERGED = (
        "REPLICA_DIVERGED",
        LayoutError,
        "workers hold the same tensor with other contents",
        (
            "Give the tensors different names if they are different; wrap them in ckptfmt.PerWorker if each worker has"
            " its own; otherwise suspect silent corruption."
        ),
    )
    HELD_NOT_WRITTEN = (
        "HELD_NOT_WRITTEN",
        LayoutError,
        "a worker holds a piece of a tensor that no worker wrote",
        "Save again. If it happens twice, report it as a bug of the program that saves.",
    )
    TENSOR_DIVERGED = (
        "TENSOR_DIVERGED",
        LayoutError,
        "workers give one tensor different shapes, dtypes or kinds",
        "Give different tensors different names.",
    )
    LEAF_DIVERGED = ("LEAF_DIVERGED", LayoutError, "workers give one value differently", _SCOPE)
    WRITERS_DIVERGED = (
        "WRITERS_DIVERGED",
        LayoutError,
        "workers disagree on what they save or load",
        "Call save and load on all workers with the same step and path, at the same point of the program.",
    )
    # state
    STATE_UNSUPPORTED = (
        "STATE_UNSUPPORTED",
        StateError,
        "an object can't be saved without guessing",
        "Turn it into tensors, arrays and plain values, or give it state_dict and load_state_dict.",
    )
    STATE_NAME = (
        "STATE_NAME",
        StateError,
        "a name is used twice, or can't stand in a checkpoint",
        "Rename the module, parameter or key that this error names.",
    )
    PARAMETER_UNNAMED = (
        "PARAMETER_UNNAMED",
        StateError,
        "an optimizer updates a parameter that has no name in weights",
        "Pass every module whose parameters the optimizer updates as State(weights=...).",
    )
    META_DESTINATION = (
        "META_DESTINATION",
        StateError,
        "a destination has no memory",
        "Call module.to_empty(device=...) before load; what isn't loaded must be initialised by you.",
    )
    TENSOR_MISSING = (
        "TENSOR_MISSING",
        StateError,
        "the checkpoint lacks a tensor that the state wants",
        "Fix the model, or pass allow=('missing',) to keep the live value.",
    )
    TENSOR_UNEXPECTED = (
        "TENSOR_UNEXPECTED",
        StateError,
        "the checkpoint has a tensor that the state doesn't want",
        "Fix the model, or pass allow=('unexpected',) to leave it out.",
    )
    DTYPE_MISMATCH = (
        "DTYPE_MISMATCH",
        StateError,
        "a tensor was saved with another dtype",
        "Create the destination with the saved dtype, or pass allow=('dtype',) to convert.",
    )
    SHAPE_MISMATCH = ("SHAPE_MISMATCH", StateError, "a tensor was saved with another shape", "Fix the model's sizes.")
    LEAF_MISSING = (
        "LEAF_MISSING",
        StateError,
        "the checkpoint lacks a value that the state wants",
        "Pass allow=('missing',) to keep the live value.",
    )
    LEAF_UNEXPECTED = (
        "LEAF_UNEXPECTED",
        StateError,
        "the checkpoint has a value that the state doesn't want",
        "Pass allow=('unexpected',) to leave it out.",
    )
    STREAM_MISSING = (
        "STREAM_MISSING",
        StateError,
        "the checkpoint lacks an RNG stream that is live here",
        "Pass allow=('streams',) to go on with the fresh RNG stream; the claim is lowered.",
    )
    STREAM_UNEXPECTED = (
        "STREAM_UNEXPECTED",
        StateError,
        "the checkpoint has an RNG stream that nothing here takes",
        "Pass allow=('streams',) to leave it out; the claim is lowered.",
    )
    GROUP_MISMATCH = (
        "GROUP_MISMATCH",
        StateError,
        "an optimizer's parameter groups can't be matched to the saved ones",
        "Build the optimizer with the same groups as when it was saved.",
    )
    CONFIG_IDENTITY = (
        "CONFIG_IDENTITY",
        StateError,
        "a configuration key that defines the run differs",
        "Use the saved configuration, or take the key out of State(identity=...).",
    )
    READ_BACK = (
        "READ_BACK",
        StateError,
        "an object doesn't hold what its load_state_dict was given",
        "Its load_state_dict changes values: give its tensors to State as a mapping instead.",
    )
    ARGUMENT = (
        "ARGUMENT",
        StateError,
        "an argument is out of range",
        "The docstring of the function or class says which values it takes.",
    )
    WRITERS_UNKNOWN = (
        "WRITERS_UNKNOWN",
        StateError,
        "there are several workers, and no way for them to agree",
        "Initialise torch.distributed, or pass writer=(i, n) with agree=.",
    )
    PEER_FAILED = (
        "PEER_FAILED",
        StateError,
        "another worker refused the save or the load",
        "See the error that the named worker raised.",
    )
    STATE_CHANGED = (
        "STATE_CHANGED",
        StateError,
        "a tensor changed while it was copied beside the training",
        "Change parameters in optimizer.step() only, or pass overlap=False.",
    )
    SLOT_MEMORY = (
        "SLOT_MEMORY",
        StateError,
        "memory doesn't suffice for a snapshot",
        "Free memory, pass slots=1, or pass saver='inline' to save without a snapshot.",
    )
    LOAD_MEMORY = (
        "LOAD_MEMORY",
        StateError,
        "memory doesn't suffice for a tensor that is loaded",
        "Load into live tensors, choose less with only=, or read boxes of it: ckptfmt.open(path).read(..., box=...).",
    )
    FLOAT_ENVIRONMENT = (
        "FLOAT_ENVIRONMENT",
        StateError,
        "this thread's floating point doesn't round as IEEE 754 says",
        "Turn flush-to-zero off: torch.set_flush_denormal(False), and no library built with -ffast-math.",
    )
    LOADER_NOT_ELASTIC = (
        "LOADER_NOT_ELASTIC",
        StateError,
        "another library's position in its data holds for another number of workers",
        "Load with as many workers as saved, or pass allow=('loader',); the claim is lowered.",
    )
    # commit
    FENCED = (
        "FENCED",
        FencedError,
        "a newer launch has taken over the run",
        "Stop this process. The newer launch goes on with the run.",
    )
    CHECKPOINT_EXISTS = (
        "CHECKPOINT_EXISTS",
        CommitError,
        "a checkpoint is here already",
        "Save to another path; a committed checkpoint is never changed.",
    )
    COMMIT_CONFLICT = (
        "COMMIT_CONFLICT",
        CommitError,
        "another checkpoint was committed here first",
        "Load what was committed, or save another step.",
    )
    COMMIT_UNKNOWN = (
        "COMMIT_UNKNOWN",
        CommitError,
        "the store didn't say whether the commit took place",
        "Nothing was deleted. When the store answers again, `python -m ckptfmt validate` says which it is.",
    )
    WRITERS_MISSING = (
        "WRITERS_MISSING",
        CommitError,
        "not every writer's part arrived in time",
        "Find out why the named writers stopped, then save again.",
    )
    WRITER_FAILED = (
        "WRITER_FAILED",
        CommitError,
        "a writer reported that it failed",
        "See the error that the named writer raised, then save again.",
    )
    SLOTS_BUSY = (
        "SLOTS_BUSY",
        CommitError,
        "every slot holds a save that isn't written yet",
        "Save less often, or pass when_busy='skip'. If the storage hangs, find out why.",
    )
    SAVE_PENDING = (
        "SAVE_PENDING",
        CommitError,
        "the save has not reached that state within the time given",
        "The save goes on: wait again, or longer.",
    )
    SAVER_LOST = (
        "SAVER_LOST",
        CommitError,
        "the saver process ended before it confirmed the commit",
        "The next save starts a new saver process; `python -m ckptfmt log` says whether this step was committed.",
    )
    TRAINER_LOST = (
        "TRAINER_LOST",
        CommitError,
        "the training process ended before its snapshot was complete",
        "Resume from an older checkpoint.",
    )
    # store
    STORE_EXISTS = ("STORE_EXISTS", StoreError, "a file is there already", "Save to another path.")
    STORE_IO = ("STORE_IO", StoreError, "the storage reported an error", "Check the storage, then try again.")
    STORE_NO_ANSWER = ("STORE_NO_ANSWER", StoreError, "the storage didn't answer in time", "Try again when it answers.")
    STORE_UNSUPPORTED = (
        "STORE_UNSUPPORTED",
        StoreError,
        "the file system can't create a file exclusively and whole",
        "Use a file system with hard links or renameat2(RENAME_NOREPLACE).",
    )
    STORE_ACCESS = ("STORE_ACCESS", StoreError, "permission denied", "Check owner and mode of the path.")
    NO_SPACE = ("NO_SPACE", StoreError, "no space is left", "Free space or lower keep=, then save again.")


def err(
    code: Code, detail: str, *, where: str | None = None, requirement: str | None = None, remedy: str | None = None
) -> CkptError:
    """Return the error of `code`, of the class and with the remedy that the table gives.

    >>> str(err(Code.FILE_MISSING, "no such file", where="parts/x.msgpack", remedy="look elsewhere"))
    'FILE_MISSING at parts/x.msgpack: no such file Remedy: look elsewhere'
    """
    return code.error(
        code, detail, where=where, requirement=requirement, remedy=code.remedy if remedy is None else remedy
    )


def error_from_json(found: Mapping[str, Any]) -> CkptError:
    """Return the error that another process sent, in the form of `CkptError.as_json`.

    >>> str(error_from_json(err(Code.NO_SPACE, "full", where="a").as_json())).split(" Remedy")[0]
    'NO_SPACE at a: full'
    """
    members = {name: found[name] for name in ("where", "requirement", "remedy")}
    return err(Code[found["code"]], found["detail"], **members)


def encodable(text: str) -> str:
    r"""Return a text that can be printed and sent: a lone surrogate becomes its escape, such as ``\\udcff``."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _rebuild(  # noqa: PLR0917 - pickle passes arguments by position
    cls: type[CkptError], code: Code, detail: str, where: str | None, requirement: str | None, remedy: str
) -> CkptError:
    return cls(code, detail, where=where, requirement=requirement, remedy=remedy)

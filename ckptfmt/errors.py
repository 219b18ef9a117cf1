"""The errors that ckptfmt raises: one tree under `CkptError`, and one table of codes.

The classes are grouped by the reaction of a handler:

    CkptError
    ├── FormatError         the bytes break the specification: use another checkpoint
    ├── IntegrityError      bytes are damaged, missing or replaced: use another checkpoint or copy
    │   └── NotFoundError   no checkpoint is at this place: correct the path, or begin without one
    ├── UnsupportedError    a newer writer made the checkpoint: upgrade the reader
    ├── LayoutError         the writers' states are contradictory: fix the program that saves
    ├── StateError          a live object can't be saved or restored as asked: fix the call
    ├── CommitError         this save didn't become a checkpoint, or perhaps didn't
    │   └── FencedError     a newer launch owns the run: stop this process
    └── StoreError          the storage refused, failed or didn't answer

A code is never renumbered, renamed or reused. ``spec/appendix/81-errors.md`` lists the same codes;
a test compares the two.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, Self

#: Secrets in a URL: credentials before the host, and a query, which may be a signature.
_SECRETS: Final = re.compile(r"(://)(?:[^/@\s]*@)?([^\s\"'?]*)(\?[^\s\"'?]+)?")


class CkptError(Exception):
    """The root of all errors of ckptfmt.

    Attributes:
        code: the kind of mistake or damage, from the append-only table `Code`.
        detail: the finding, in one sentence.
        where: file with JSON pointer or byte range, or the name of the live object; None without a
            place.
        requirement: the violated clause of the specification, such as ``REQ-MAN-003``.
        remedy: the way out, in one line.

    In all texts, lone surrogates are escaped, since no encoding takes them; names of files and
    tensors may have some. URLs are without their credentials and queries. `str` escapes control
    characters, to protect a terminal from names.
    """

    def __init__(
        self,
        code: Code,
        detail: str,
        *,
        where: str | None = None,
        requirement: str | None = None,
        remedy: str = "",
    ) -> None:
        detail = _without_secrets(encodable(detail))
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.where = None if where is None else _without_secrets(encodable(where))
        self.requirement = requirement
        self.remedy = _without_secrets(encodable(remedy))

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        clause = f" [{self.requirement}]" if self.requirement else ""
        said = f"{self.code}{place}: {self.detail}{clause}"
        end = "" if said.endswith((".", "?", "!")) else "."
        return printable(f"{said}{end} Remedy: {self.remedy}" if self.remedy else said)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (
            type(self),
            self.code,
            self.detail,
            self.where,
            self.requirement,
            self.remedy,
        )

    def below(self, directory: str) -> Self:
        """Return the error with its place below a directory; unchanged if already there.

        >>> err(Code.FILE_MISSING, "no such file",
        ...     where="manifest.json").below("step-00000003-l0001").where
        'step-00000003-l0001/manifest.json'
        """
        directory = encodable(directory)
        if self.where is not None and (
            self.where == directory or self.where.startswith(f"{directory}/")
        ):
            return self
        where = f"{directory}/{self.where}" if self.where else directory
        return type(self)(
            self.code, self.detail, where=where, requirement=self.requirement, remedy=self.remedy
        )

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


class NotFoundError(IntegrityError):
    """No committed checkpoint is at this place."""


class UnsupportedError(CkptError):
    """The checkpoint needs a newer reader."""


class LayoutError(CkptError):
    """The states of the writers are contradictory."""


class StateError(CkptError):
    """A live object can't be saved or restored as asked."""


class CommitError(CkptError):
    """This save didn't become a checkpoint, or perhaps didn't."""


class FencedError(CommitError):
    """A newer launch owns the run."""


class TrustError(CkptError):
    """The checkpoint isn't of a trusted signer, or isn't the newest."""


class StoreError(CkptError):
    """The storage refused, failed or didn't answer."""


_RESTORE = (
    "Load another checkpoint of the run; or mend this one from a copy, such as a mirror:"
    " `ckptfmt repair PATH --with COPY`."
)
_WRITER = (
    "The writer of this file is at fault; use another checkpoint and report it to the"
    " writer's authors."
)
_SCOPE = (
    "Wrap a value that belongs to a single worker in ckptfmt.PerWorker, or in"
    " ckptfmt.FirstWorker where worker 0's value counts for all; or make the value equal on all"
    " workers."
)


class Code(StrEnum):
    """The append-only table of error codes.

    The comment above a code is the meaning in the specification's table.

    Attributes:
        error: the class of errors with this code.
        remedy: the default remedy, for an error without a remedy of its own.
    """

    error: type[CkptError]
    remedy: str

    def __new__(cls, code: str, error: type[CkptError], remedy: str) -> Self:  # noqa: D102
        member = str.__new__(cls, code)
        member._value_ = code
        member.error = error
        member.remedy = remedy
        return member

    # documents
    #: a document isn't UTF-8, or starts with a byte-order mark
    DOC_ENCODING = ("DOC_ENCODING", FormatError, _RESTORE)
    #: a document isn't one JSON object
    DOC_SYNTAX = ("DOC_SYNTAX", FormatError, _RESTORE)
    #: a map has one key twice
    DOC_DUPLICATE_KEY = ("DOC_DUPLICATE_KEY", FormatError, _WRITER)
    #: a number isn't an integer in range
    DOC_NUMBER = ("DOC_NUMBER", FormatError, _WRITER)
    #: a string has a forbidden character, or isn't normalised
    DOC_STRING = ("DOC_STRING", FormatError, _WRITER)
    #: a document nests too deeply
    DOC_DEPTH = ("DOC_DEPTH", FormatError, _WRITER)
    #: a document isn't in canonical form
    DOC_NOT_CANONICAL = ("DOC_NOT_CANONICAL", FormatError, _RESTORE)
    #: a document has a missing, unknown or ill-typed member
    DOC_SCHEMA = ("DOC_SCHEMA", FormatError, _WRITER)
    #: a document doesn't have the expected digest
    DOC_DIGEST = ("DOC_DIGEST", IntegrityError, _RESTORE)
    #: two documents of one checkpoint contradict each other
    DOC_MISMATCH = ("DOC_MISMATCH", FormatError, _RESTORE)
    #: a compressed document doesn't inflate to the declared content
    DOC_COMPRESSION = ("DOC_COMPRESSION", FormatError, _RESTORE)
    #: a value exceeds the table of limits
    LIMIT_EXCEEDED = ("LIMIT_EXCEEDED", FormatError, _WRITER)
    #: bytes aren't one whole msgpack value
    MSGPACK_SYNTAX = ("MSGPACK_SYNTAX", FormatError, _RESTORE)
    #: a msgpack type is outside of the profile
    MSGPACK_TYPE = ("MSGPACK_TYPE", FormatError, _WRITER)
    #: a packed array isn't in canonical form
    PACKED_FORM = ("PACKED_FORM", FormatError, _WRITER)
    #: columns disagree in length, or an entry is out of range
    COLUMN_FORM = ("COLUMN_FORM", FormatError, _WRITER)
    #: rows aren't sorted and unique
    COLUMN_ORDER = ("COLUMN_ORDER", FormatError, _WRITER)
    #: a scope is neither global nor lw/<i>
    SCOPE_FORM = ("SCOPE_FORM", FormatError, _WRITER)
    #: a tree has an unknown tag, or a tag with the wrong contents
    TREE_TAG = ("TREE_TAG", FormatError, _WRITER)
    #: a tree refers to a missing tensor
    TREE_REFERENCE = ("TREE_REFERENCE", FormatError, _WRITER)
    #: a data cursor isn't of the specified form
    CURSOR_FORM = ("CURSOR_FORM", FormatError, _WRITER)
    #: a reference to a frozen base isn't of the specified form
    FROZEN_FORM = ("FROZEN_FORM", FormatError, _WRITER)
    #: a field is neither present nor absent with a reason
    MANIFEST_FIELDS = ("MANIFEST_FIELDS", FormatError, _WRITER)
    #: the manifest's summary contradicts the index
    MANIFEST_SUMMARY = ("MANIFEST_SUMMARY", FormatError, _WRITER)
    #: a full checkpoint has references or encoded blocks
    PROFILE_MISMATCH = ("PROFILE_MISMATCH", FormatError, _WRITER)
    #: the manifest has another step or launch than this directory
    STEP_MISMATCH = (
        "STEP_MISMATCH",
        FormatError,
        (
            "The directory was renamed or copied over another: give it the name that its manifest"
            " says."
        ),
    )
    #: a document belongs to another run
    RUN_MISMATCH = ("RUN_MISMATCH", FormatError, "Move it back to its own run's directory.")
    #: a path isn't of an allowed form
    UNSAFE_PATH = ("UNSAFE_PATH", FormatError, _WRITER)
    #: a file is a link, pipe, device or directory
    UNSAFE_FILE = (
        "UNSAFE_FILE",
        FormatError,
        "Put the file or directory itself there, as it was saved.",
    )
    #: a written box's extents don't hold each block once
    EXTENT_COVERAGE = ("EXTENT_COVERAGE", FormatError, _WRITER)
    #: header and extents don't tile a file exactly
    FILE_COVERAGE = ("FILE_COVERAGE", FormatError, _WRITER)
    #: a shard's header length is wrong
    SHARD_HEADER_NBYTES = ("SHARD_HEADER_NBYTES", FormatError, _RESTORE)
    #: a shard's header isn't one padded JSON object
    SHARD_HEADER_SYNTAX = ("SHARD_HEADER_SYNTAX", FormatError, _RESTORE)
    #: a shard's header has a wrong or unknown member
    SHARD_HEADER_SCHEMA = ("SHARD_HEADER_SCHEMA", FormatError, _WRITER)
    #: a shard's header names an unknown dtype
    SHARD_DTYPE = ("SHARD_DTYPE", FormatError, _WRITER)
    #: a shard's header has a shape out of range
    SHARD_SHAPE = ("SHARD_SHAPE", FormatError, _WRITER)
    #: a shard's tensors don't tile the data exactly
    SHARD_OFFSETS = ("SHARD_OFFSETS", FormatError, _WRITER)
    #: a shard's header contradicts the part
    SHARD_MISMATCH = ("SHARD_MISMATCH", FormatError, _WRITER)
    #: the stored bytes of a block aren't of the encoding's form
    ENCODED_FORM = ("ENCODED_FORM", FormatError, _WRITER)
    #: a block doesn't decode to the saved bytes
    DECODED_DIGEST = ("DECODED_DIGEST", FormatError, _WRITER)
    #: a base lacks content for a delta
    BASE_BLOCK = ("BASE_BLOCK", FormatError, _WRITER)
    #: the references of a checkpoint leave out references of a base
    REFERENCE_CLOSURE = ("REFERENCE_CLOSURE", FormatError, _WRITER)
    # integrity
    #: a file isn't there
    FILE_MISSING = ("FILE_MISSING", IntegrityError, _RESTORE)
    #: a file has another number of bytes than declared
    FILE_NBYTES = ("FILE_NBYTES", IntegrityError, _RESTORE)
    #: a block's bytes aren't the saved bytes
    BLOCK_DIGEST = ("BLOCK_DIGEST", IntegrityError, _RESTORE)
    #: a shard's header isn't the saved header
    HEADER_DIGEST = ("HEADER_DIGEST", IntegrityError, _RESTORE)
    #: there is no committed checkpoint here
    NOT_COMMITTED = (
        "NOT_COMMITTED",
        NotFoundError,
        "Give the path of a checkpoint directory (it has a manifest.json) or of a run.",
    )
    #: this attempt was given up and cleaned away
    CHECKPOINT_ABORTED = (
        "CHECKPOINT_ABORTED",
        IntegrityError,
        "Load another checkpoint of the run.",
    )
    #: this checkpoint was retired and the files deleted
    CHECKPOINT_RETIRED = (
        "CHECKPOINT_RETIRED",
        IntegrityError,
        "Load another checkpoint of the run.",
    )
    #: no checkpoint in the lineage is valid
    NO_VALID_CHECKPOINT = (
        "NO_VALID_CHECKPOINT",
        IntegrityError,
        (
            "Run `ckptfmt validate` on the run; resume by hand from another checkpoint, or start"
            " afresh."
        ),
    )
    #: a base of this checkpoint is missing
    BASE_MISSING = (
        "BASE_MISSING",
        IntegrityError,
        "Put the base back beside it, say with bases= where it lies, or load another checkpoint.",
    )
    #: another checkpoint lies where a base should be
    BASE_MISMATCH = (
        "BASE_MISMATCH",
        IntegrityError,
        (
            "Put the base back under its name, say with bases= where it lies, or load another"
            " checkpoint."
        ),
    )
    #: files of this checkpoint are in caches of nodes, and not at home
    FILES_IN_CACHES = (
        "FILES_IN_CACHES",
        IntegrityError,
        (
            "Resume the run with cache= on the nodes that saved it, which brings it home; or take"
            " an"
            " older checkpoint."
        ),
    )
    # unsupported
    #: the document has another version of the format
    VERSION_UNSUPPORTED = (
        "VERSION_UNSUPPORTED",
        UnsupportedError,
        "Install the ckptfmt that writes this version.",
    )
    #: the document needs a feature unknown to this reader
    FEATURE_UNSUPPORTED = ("FEATURE_UNSUPPORTED", UnsupportedError, "Install a newer ckptfmt.")
    # layout
    #: a box exceeds the bounds of the tensor
    BOX_BOUNDS = ("BOX_BOUNDS", LayoutError, _WRITER)
    #: the boxes leave a part of a tensor uncovered
    TILING_GAP = (
        "TILING_GAP",
        LayoutError,
        (
            "A program that saves gives boxes that together hold each element of the tensor. A"
            " reader takes another checkpoint."
        ),
    )
    #: two boxes of a tensor overlap
    TILING_OVERLAP = (
        "TILING_OVERLAP",
        LayoutError,
        "Give workers that hold different pieces disjoint boxes.",
    )
    #: workers hold the same tensor with other contents
    REPLICA_DIVERGED = (
        "REPLICA_DIVERGED",
        LayoutError,
        (
            "Give the tensors different names if they are different; wrap them in"
            " ckptfmt.PerWorker if each worker has"
            " its own. Of BatchNorm's statistics, give the DistributedDataParallel module and not"
            " its .module, or use"
            " SyncBatchNorm. Otherwise suspect silent corruption."
        ),
    )
    #: a worker holds a piece of a tensor, and no worker wrote the piece
    HELD_NOT_WRITTEN = (
        "HELD_NOT_WRITTEN",
        LayoutError,
        "Save again. If it happens twice, report it as a bug of the program that saves.",
    )
    #: workers give one tensor different shapes, dtypes or kinds
    TENSOR_DIVERGED = ("TENSOR_DIVERGED", LayoutError, "Give different tensors different names.")
    #: workers give different values for one leaf
    LEAF_DIVERGED = ("LEAF_DIVERGED", LayoutError, _SCOPE)
    #: workers disagree on the content of the save or load
    WRITERS_DIVERGED = (
        "WRITERS_DIVERGED",
        LayoutError,
        (
            "Call save and load on all workers with the same step and path, at the same point of"
            " the"
            " program."
        ),
    )
    # state
    #: an object can't be saved without guessing
    STATE_UNSUPPORTED = (
        "STATE_UNSUPPORTED",
        StateError,
        "Turn it into tensors, arrays and plain values, or give it state_dict and load_state_dict.",
    )
    #: a name is used twice, or can't stand in a checkpoint
    STATE_NAME = (
        "STATE_NAME",
        StateError,
        "Rename the module, parameter or key that this error names.",
    )
    #: an optimizer updates a parameter without a name in weights
    PARAMETER_UNNAMED = (
        "PARAMETER_UNNAMED",
        StateError,
        "Pass every module with parameters of the optimizer as State(weights=...).",
    )
    #: a destination has no memory
    META_DESTINATION = (
        "META_DESTINATION",
        StateError,
        (
            "Call module.to_empty(device=...) before load; your program must initialise tensors"
            " outside of the load."
        ),
    )
    #: the checkpoint lacks a tensor of the state
    TENSOR_MISSING = (
        "TENSOR_MISSING",
        StateError,
        "Fix the model; or pass allow=('missing',), which leaves the live tensor as it was made.",
    )
    #: the checkpoint has a tensor unknown to the state
    TENSOR_UNEXPECTED = (
        "TENSOR_UNEXPECTED",
        StateError,
        "Fix the model, or pass allow=('unexpected',) to leave it out.",
    )
    #: a tensor was saved with another dtype
    DTYPE_MISMATCH = (
        "DTYPE_MISMATCH",
        StateError,
        "Create the destination with the saved dtype, or pass allow=('dtype',) to convert.",
    )
    #: a tensor was saved with another shape
    SHAPE_MISMATCH = (
        "SHAPE_MISMATCH",
        StateError,
        "Build the model with the sizes that were saved.",
    )
    #: the checkpoint lacks a value of the state
    LEAF_MISSING = ("LEAF_MISSING", StateError, "Pass allow=('missing',) to keep the live value.")
    #: the checkpoint has a value unknown to the state
    LEAF_UNEXPECTED = ("LEAF_UNEXPECTED", StateError, "Pass allow=('unexpected',) to leave it out.")
    #: the checkpoint lacks a live RNG stream
    STREAM_MISSING = (
        "STREAM_MISSING",
        StateError,
        "Pass allow=('streams',) to go on with the fresh RNG stream; the claim is lowered.",
    )
    #: the checkpoint has an RNG stream without a live counterpart
    STREAM_UNEXPECTED = (
        "STREAM_UNEXPECTED",
        StateError,
        "Pass allow=('streams',) to leave it out; the claim is lowered.",
    )
    #: an optimizer's parameter groups can't be matched to the saved ones
    GROUP_MISMATCH = (
        "GROUP_MISMATCH",
        StateError,
        "Build the optimizer with the same groups as when it was saved.",
    )
    #: a configuration key differs, and this key is part of the run's identity
    CONFIG_IDENTITY = (
        "CONFIG_IDENTITY",
        StateError,
        "Use the saved configuration, or take the key out of State(identity=...).",
    )
    #: an object's state differs from the argument of load_state_dict
    READ_BACK = (
        "READ_BACK",
        StateError,
        (
            "Give an object of the class that was saved; if its load_state_dict changes values,"
            " give"
            " its tensors instead."
        ),
    )
    #: a frozen base isn't found at any of the known places
    FROZEN_BASE_MISSING = (
        "FROZEN_BASE_MISSING",
        StateError,
        (
            "Say where the base is now: State(frozen_base=PATH), or bases=[PATH] without a State;"
            " or load the base into the live module first."
        ),
    )
    #: a frozen base has another tensor than the checkpoint refers to
    FROZEN_BASE_CHANGED = (
        "FROZEN_BASE_CHANGED",
        StateError,
        (
            "Give the base with which the checkpoint was saved, in State(frozen_base=PATH), or in"
            " bases=[PATH] without a State."
        ),
    )
    #: an argument is out of range
    ARGUMENT = (
        "ARGUMENT",
        StateError,
        "Give another value: the documentation of this function, class or command says which.",
    )
    #: there are several workers, and no way for them to agree
    WRITERS_UNKNOWN = (
        "WRITERS_UNKNOWN",
        StateError,
        "Initialise torch.distributed, or pass writer=(i, n) with agree=.",
    )
    #: another worker refused the save or the load
    PEER_FAILED = ("PEER_FAILED", StateError, "See the error that the named worker raised.")
    #: a tensor changed during the copy, in parallel to the training
    STATE_CHANGED = (
        "STATE_CHANGED",
        StateError,
        "Change parameters in optimizer.step() only, or pass overlap=False.",
    )
    #: there isn't enough memory for a snapshot
    SLOT_MEMORY = (
        "SLOT_MEMORY",
        StateError,
        "Free memory, pass slots=1, or pass saver='inline' to save without a snapshot.",
    )
    #: there isn't enough memory for a loaded tensor
    LOAD_MEMORY = (
        "LOAD_MEMORY",
        StateError,
        (
            "Load into live tensors, choose less with only=, or read boxes of it:"
            " ckptfmt.open(path).read(..., box=...)."
        ),
    )
    #: this thread's floating point doesn't round as IEEE 754 says
    FLOAT_ENVIRONMENT = (
        "FLOAT_ENVIRONMENT",
        StateError,
        (
            "Turn flush-to-zero off: torch.set_flush_denormal(False), and no library built with"
            " -ffast-math."
        ),
    )
    #: a foreign loader's position is valid only for another number of workers
    LOADER_NOT_ELASTIC = (
        "LOADER_NOT_ELASTIC",
        StateError,
        (
            "Load with as many workers as saved; or pass allow=('loader',) to load, or"
            " loading=Loading(allow=('loader',)) to Checkpointer, which lowers the claim: the data"
            " begins anew, and epochs(n) with the first epoch. A ckptfmt.Sampler goes on with any"
            " number of workers."
        ),
    )
    #: an alarm sends the training back to the last good checkpoint
    ALARM = (
        "ALARM",
        StateError,
        "Start the program again: the run goes on from its last good checkpoint.",
    )
    #: a training failed again and again, and nothing is left to try
    HEALING_STOPPED = (
        "HEALING_STOPPED",
        StateError,
        (
            "`ckptfmt log` shows each decision with its evidence. Mend the cause, and begin one"
            " launch with resume= and the name of a checkpoint; later ones follow it."
        ),
    )
    #: no step began in time, and the process ends
    STEP_OVERDUE = (
        "STEP_OVERDUE",
        StateError,
        "Find the step's wait in the stacks of all threads below; start the program again.",
    )
    # commit
    #: a newer launch has taken over the run
    FENCED = ("FENCED", FencedError, "Stop this process. The newer launch goes on with the run.")
    #: a checkpoint is here already
    CHECKPOINT_EXISTS = (
        "CHECKPOINT_EXISTS",
        CommitError,
        "Save to another path; a committed checkpoint is never changed.",
    )
    #: this checkpoint is needed, and stays
    CHECKPOINT_NEEDED = (
        "CHECKPOINT_NEEDED",
        CommitError,
        "First delete the dependent checkpoints, or remove the pin, named in the error.",
    )
    #: a clean-up may be about to retire this checkpoint
    CHECKPOINT_CONDEMNED = (
        "CHECKPOINT_CONDEMNED",
        CommitError,
        "Ask again later; if the clean-up was killed, the next clean-up keeps pinned checkpoints.",
    )
    #: another checkpoint was committed here first
    COMMIT_CONFLICT = (
        "COMMIT_CONFLICT",
        CommitError,
        "Load the committed checkpoint, or save another step.",
    )
    #: a run went on in two places, or in its intended mirror
    HOMES_DIVERGED = (
        "HOMES_DIVERGED",
        CommitError,
        (
            "If only the place that has it went on, mirror from there to the other one. Otherwise"
            " decide which one goes"
            " on, keep the other under another name, and mirror to a new place."
        ),
    )
    #: the store didn't say whether the commit took place
    COMMIT_UNKNOWN = (
        "COMMIT_UNKNOWN",
        CommitError,
        "Nothing was deleted. When the store answers again, `ckptfmt validate` says which it is.",
    )
    #: not every writer's part arrived in time
    WRITERS_MISSING = (
        "WRITERS_MISSING",
        CommitError,
        "Find out why the named writers stopped, then save again.",
    )
    #: a writer reported a failure
    WRITER_FAILED = (
        "WRITER_FAILED",
        CommitError,
        "See the error that the named writer raised, then save again.",
    )
    #: every slot holds a save in progress
    SLOTS_BUSY = (
        "SLOTS_BUSY",
        CommitError,
        "Save less often, or pass when_busy='skip'. If the storage hangs, find out why.",
    )
    #: the save has not reached the state within the time given
    SAVE_PENDING = ("SAVE_PENDING", CommitError, "The save goes on: wait again, or longer.")
    #: the saver process ended before confirming the commit
    SAVER_LOST = (
        "SAVER_LOST",
        CommitError,
        (
            "The next save starts a new saver process; `ckptfmt log` says whether this step was"
            " committed."
        ),
    )
    #: the training process ended before the snapshot was complete
    TRAINER_LOST = ("TRAINER_LOST", CommitError, "Resume from an older checkpoint.")
    # trust
    #: no trusted signer signed the checkpoint
    SIGNATURE_MISSING = (
        "SIGNATURE_MISSING",
        TrustError,
        (
            "Give the key or identity of the signer; or sign the checkpoint, if you know that it is"
            " what was saved: `ckptfmt sign PATH --key KEY`."
        ),
    )
    #: a newer checkpoint of the run was seen
    ROLLED_BACK = (
        "ROLLED_BACK",
        TrustError,
        (
            "Find out who put the older checkpoint there. To go back on purpose, delete the file of"
            " the pin first."
        ),
    )
    # store
    #: a file is there already
    STORE_EXISTS = ("STORE_EXISTS", StoreError, "Save to another path.")
    #: the storage reported an error
    STORE_IO = ("STORE_IO", StoreError, "Check the storage, then try again.")
    #: the storage didn't answer in time
    STORE_NO_ANSWER = ("STORE_NO_ANSWER", StoreError, "Try again when it answers.")
    #: too few of a run's homes answer to decide which launch may commit
    HOMES_AWAY = (
        "HOMES_AWAY",
        StoreError,
        (
            "Try again when a majority of the homes answers. In place of a home that is lost for"
            " good, pass an empty place."
        ),
    )
    #: no other home of a run has the save before
    HOME_BEHIND = (
        "HOME_BEHIND",
        StoreError,
        (
            "Find out why the copies to the other homes fail or are slow (Checkpointer.reports),"
            " or save less often."
        ),
    )
    #: the file system can't create a file exclusively and whole
    STORE_UNSUPPORTED = (
        "STORE_UNSUPPORTED",
        StoreError,
        "Use a file system with hard links or renameat2(RENAME_NOREPLACE).",
    )
    #: permission denied
    STORE_ACCESS = ("STORE_ACCESS", StoreError, "Check owner and mode of the path.")
    #: no space is left
    NO_SPACE = ("NO_SPACE", StoreError, "Free space in that place, then try again.")


def remedy_of(error: OSError) -> str | None:
    """Return a remedy for a system error, where the default remedy doesn't help; else None."""
    if error.errno == errno.EROFS:
        return (
            "The file system is mounted for reading only: give a path on another one, or mount"
            " it for writing."
        )
    if error.errno == errno.EFBIG:
        return (
            "The file is larger than this process or this file system allows: raise the limit of"
            " the process (`ulimit -f`), or give a path on another file system."
        )
    return None


def err(
    code: Code,
    detail: str,
    *,
    where: str | None = None,
    requirement: str | None = None,
    remedy: str | None = None,
) -> CkptError:
    """Return the error of a code, of the class and with the default remedy of the table.

    >>> str(err(Code.FILE_MISSING, "no such file", where="parts/x.msgpack",
    ...     remedy="look elsewhere"))
    'FILE_MISSING at parts/x.msgpack: no such file. Remedy: look elsewhere'
    """
    return code.error(
        code,
        detail,
        where=where,
        requirement=requirement,
        remedy=code.remedy if remedy is None else remedy,
    )


def check_flags(group: object, *names: str) -> None:
    """Check that attributes of a group of options are flags. Raises: StateError(ARGUMENT)."""
    for name in names:
        value = getattr(group, name)
        if type(value) is not bool:
            raise err(
                Code.ARGUMENT,
                f"{name}={value!r} isn't True or False",
                where=f"{name}=",
                remedy="Pass True or False.",
            )


def error_from_json(found: Mapping[str, Any]) -> CkptError:
    """Return an error received from another process, in the form of `CkptError.as_json`.

    >>> str(error_from_json(err(Code.NO_SPACE, "full", where="a").as_json())).split(". Remedy")[0]
    'NO_SPACE at a: full'
    """
    members = {name: found[name] for name in ("where", "requirement", "remedy")}
    return err(Code[found["code"]], found["detail"], **members)


def encodable(text: str) -> str:
    r"""Return an encodable text: a lone surrogate becomes an escape, such as ``\\udcff``."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def printable(text: str) -> str:
    r"""Return a text for a terminal: unprintable characters except line ends are escaped.

    Control and bidi characters are among the unprintable ones.

    >>> print(printable("a\x1b[31mb"))
    a\x1b[31mb
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def _without_secrets(text: str) -> str:
    """Return a text without the credentials in URLs, such as the signature of a presigned URL.

    >>> _without_secrets("https://me:key@host/a?X-Amz-Signature=1 is gone; s3://b/c?")
    'https://host/a?... is gone; s3://b/c?'
    """
    if "://" not in text:
        return text
    return _SECRETS.sub(lambda found: found[1] + found[2] + ("?..." if found[3] else ""), text)


def _rebuild(  # noqa: PLR0917
    cls: type[CkptError],
    code: Code,
    detail: str,
    where: str | None,
    requirement: str | None,
    remedy: str,
) -> CkptError:
    return cls(code, detail, where=where, requirement=requirement, remedy=remedy)

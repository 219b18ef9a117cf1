"""The commit of an attempt: merge its parts, create the decision register, or give the attempt up.

The same steps run on a file system and on an object store. Committers don't talk to each other: the
store's exclusive creation of the decision register decides which of them wins, and the decision is
final.

Spec: ``spec/writing/75-commit.md``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from ckptfmt import limits
from ckptfmt.commit.waiting import list_held_attempts, poll
from ckptfmt.digest import digest_text
from ckptfmt.documents.durability import HOME, weakest
from ckptfmt.documents.manifest import (
    MANIFEST_NAME,
    PINS_SUFFIX,
    Abort,
    Manifest,
    Origin,
    Reference,
    Tombstone,
    failure_path,
    index_name,
    parse_register,
    part_path,
)
from ckptfmt.documents.msgpk import open_packed_document
from ckptfmt.documents.part import Part, parse_failure
from ckptfmt.documents.tables import TensorTable
from ckptfmt.errors import CkptError, Code, FormatError, IntegrityError, LayoutError, err
from ckptfmt.features import is_of_delta
from ckptfmt.layout.merge import PartFileEntry, add_stored, merge_deltas, merge_parts, summarise
from ckptfmt.signing.signer import Signer
from ckptfmt.store.protocol import CALLS_AT_ONCE, Buffer, Store, call_each, read_if_there

Register: TypeAlias = Manifest | Abort | Tombstone

#: Largest number of parsed registers kept in memory. A clean-up reads all registers of a run in
#: turn, so a smaller least-recently-used cache than the run's number of registers would never have
#: a hit.
_COUNT: Final = 4096
#: Largest number of tensor tables kept in memory; above this number all are dropped. Writers that
#: hold shards of the same tensors share a few tables; otherwise each writer has its own table.
_TABLE_COUNT: Final = 16
#: The name of a file that belongs to an attempt; the group is the attempt's id.
_ATTEMPT: Final = re.compile(
    r"(?:parts/|index-|[a-z][a-z_]*-)([0-9a-f]{16})"
    r"(?:\.msgpack|-[0-9a-f]{16}\.sigstore\.json"
    r"|-[0-9]{5,9}(?:\.safetensors|\.pack|\.msgpack|\.failure\.json|\.pins\.json|\.held))"
)
#: Codes of a failure record that describe the attempt instead of one writer, and so hold for all
#: writers. Every `LayoutError` does too.
_VERDICTS: Final = frozenset(
    {
        Code.FENCED, Code.CHECKPOINT_EXISTS, Code.COMMIT_CONFLICT, Code.CHECKPOINT_ABORTED,
        Code.CHECKPOINT_RETIRED, Code.WRITERS_MISSING,
    }
)  # fmt: skip
_REPLACE: Final = (
    "Save to another path; on a file system, save(..., replace=True) takes the"
    " place of the old one."
)
#: Prefix of the names of condemnation files.
CONDEMNED: Final = "condemned-"
#: Number of tries of a store call that gets no answer, before the outcome counts as unknown.
_TRIES: Final = 3
#: The version of the format in the canonical msgpack of an index.
_VERSION: Final = re.compile(rb"(?<=\xaeformat_version)[\xa1-\xbf][0-9.]+")


class Known:
    """A saver's cache of parsed registers and tensor tables, which recur at every save.

    For use by one thread.

    Each file is still read at each use, since only its current bytes count. The cache maps equal
    bytes to their parsed object. Parsing a register takes a millisecond, and a chain of thirty
    deltas parses registers 150 times.

    Attributes:
        tables: tensor tables of parts, looked up and added to by `Part.parse`.
        ended: registers of a run's aborted and retired checkpoints, by the checkpoint's name.
        swept: names of the checkpoints in `ended` of which all files but the register are removed.
    """

    def __init__(self) -> None:
        self._registers: collections.OrderedDict[bytes, Register] = collections.OrderedDict()
        self.tables: dict[bytes, TensorTable] = {}
        self.ended: dict[str, Register] = {}
        self.swept: set[str] = set()

    def parse_register(self, content: bytes) -> Register:
        """Return the parsed contents of a decision register.

        Raises: the errors of `manifest.parse_register`.
        """
        # Each line makes one atomic change of the dictionary, because threads of `call_each` may
        # run this at once.
        register = self._registers.pop(content, None) or parse_register(content)
        self._registers[content] = register
        if len(self._registers) > _COUNT:
            self._registers.popitem(last=False)
        return register

    def limit_tables(self) -> None:
        """Drop all tables if there are more than `_TABLE_COUNT`."""
        self.tables = self.tables if len(self.tables) <= _TABLE_COUNT else {}


def read_register(store: Store, *, known: Known | None = None) -> Register | None:
    """Return the contents of a checkpoint directory's register; None while there is no decision.

    Args:
        known: the caller's cache of parsed registers.

    Raises: FormatError, IntegrityError, UnsupportedError, StoreError. Spec: REQ-MAN-001.
    """
    content = read_if_there(store, MANIFEST_NAME, limit_nbytes=limits.MANIFEST_NBYTES)
    return None if content is None else (known or Known()).parse_register(content)


def check_vacant(store: Store, *, but: Origin | None = None) -> None:
    """Raise if a checkpoint directory already has a register.

    Args:
        but: origin of the caller's own attempt, if an earlier try may have committed the attempt
            without an answer of the store.

    Raises: CommitError(CHECKPOINT_EXISTS).
    """
    register = read_register(store)
    if isinstance(register, Manifest) and register.origin == but:
        return
    if register is not None:
        told = "Checkpoint already exists" + {Manifest: "", Abort: ", given up"}.get(
            type(register), ", and is retired"
        )
        remedy = (
            _REPLACE if isinstance(register, Manifest) and register.origin.run_id is None else None
        )
        raise err(
            Code.CHECKPOINT_EXISTS, told, where=store.name, requirement="REQ-CMT-008", remedy=remedy
        )


def create_once(
    store: Store,
    path: str,
    chunks: Callable[[], Iterable[Buffer]] | None = None,
    *,
    content: bytes | None = None,
    nbytes: int | Callable[[], int] | None = None,
) -> None:
    """Create a file, and repeat the call if the store gives no answer.

    The file's name is used by this caller only, or by callers that write the same bytes.

    Args:
        chunks: a function that returns the contents, called once for each try; None if `content` is
            given.
        content: the whole contents, for a name that another caller may have created with the same
            bytes.
        nbytes: size in bytes, or a function that returns the size after the contents were drawn.
            Used for a name of this caller only: an existing file of this size comes from a try of
            this call that got no answer.

    Raises: StoreError; CommitError(COMMIT_CONFLICT) if the existing file has other contents.
    Spec: REQ-CMT-003, REQ-CMT-006.
    """
    for attempt in range(_TRIES):
        contents = [content or b""] if chunks is None else chunks()
        try:
            store.create(path, contents)
        except CkptError as error:
            if error.code == Code.STORE_NO_ANSWER and attempt + 1 < _TRIES:
                continue
            if error.code != Code.STORE_EXISTS or (content is None and attempt == 0):
                raise
            same = (
                store.nbytes(path) == len(content)
                and store.read(path, limit_nbytes=len(content)) == content
                if content is not None
                else store.nbytes(path) == (nbytes() if callable(nbytes) else nbytes)
            )
            if not same:
                raise err(
                    Code.COMMIT_CONFLICT,
                    "the file is there with other contents",
                    where=path,
                    requirement="REQ-CMT-006",
                ) from error
        return


def commit(
    store: Store,
    origin: Origin,
    *,
    deadline_s: float,
    known: Known | None = None,
    replace: bool = False,
) -> Manifest:
    """Wait for the parts of an attempt, and commit them as a checkpoint.

    Args:
        store: a store rooted at the checkpoint's directory.
        origin: the attempt's origin.
        deadline_s: longest time to wait for parts, in seconds.
        known: the caller's cache of parsed registers and tables.
        replace: whether to replace an existing checkpoint outside of a run; see `finalize`.

    Returns: the manifest in the register, which is durable.
    Raises: CommitError: WRITERS_MISSING, WRITER_FAILED, COMMIT_CONFLICT, COMMIT_UNKNOWN, with all
        files left in place; IntegrityError(CHECKPOINT_ABORTED, CHECKPOINT_RETIRED, FILE_MISSING,
        FILE_NBYTES); LayoutError; StoreError.
    Spec: REQ-CMT-005 to REQ-CMT-009.
    """
    _wait_for_parts(store, origin, deadline_s)
    return finalize(store, origin, known=known, replace=replace)


def decide(
    store: Store,
    origin: Origin,
    *,
    writer: int,
    deadline_s: float,
    known: Known | None = None,
    replace: bool = False,
    signer: Signer | None = None,
) -> Manifest:
    """Commit an attempt as writer 0, or wait for the decision as another writer.

    Called after the part of `writer` is written. The caller removes the files of other attempts
    afterwards (`sweep_attempts`).

    Args:
        replace, signer: see `finalize`.

    Raises: the errors of `commit` and `wait_for_decision`.
    Spec: REQ-CMT-005 to REQ-CMT-009, REQ-CMT-027, REQ-CMT-042.
    """
    if writer != 0:
        return wait_for_decision(store, origin, deadline_s=deadline_s, replace=replace)
    if origin.writer_count > 1:  # a sole writer has just written the only part
        _wait_for_parts(store, origin, deadline_s)
    return finalize(store, origin, known=known, replace=replace, signer=signer)


def finalize(
    store: Store,
    origin: Origin,
    *,
    known: Known | None = None,
    part_digests: Sequence[str] | None = None,
    replace: bool = False,
    signer: Signer | None = None,
) -> Manifest:
    """Commit an attempt of which all parts are present.

    Any process may call this, any number of times.

    Args:
        known: the caller's cache of parsed registers and tables.
        part_digests: expected digests of the parts, in writer order, if the caller received them
            from the writers.
        replace: whether to replace an existing checkpoint outside of a run. Only writer 0 may, and
            only while holding the attempt (`hold_attempt`): otherwise another saver's
            `sweep_attempts` could remove the files meanwhile.
        signer: signs the manifest before the commit, so that no committed checkpoint is unsigned.

    Raises: the errors of `commit`; FormatError(DOC_MISMATCH) for a part with an unexpected digest.
    Spec: REQ-CMT-005 to REQ-CMT-009.
    """
    known = known or Known()
    entries = list(_iter_parts(store, origin, known.tables))
    known.limit_tables()
    for entry, told in zip(entries, part_digests or (), strict=part_digests is not None):
        if digest_text(entry.digest) != told:
            where = part_path(origin.attempt, entry.part.writer)
            raise err(
                Code.DOC_MISMATCH,
                "the part's digest differs from the digest told by the writer",
                where=where,
            )
    index = merge_parts(entries)
    content, digest = index.dump()
    index_nbytes, index_digest = _create_index(store, index_name(origin.attempt), content, digest)
    parts = [entry.part for entry in entries]
    files = [file for part in parts if part.durability == HOME for file in part.files]
    call_each(store, lambda file: _check_file(store, file.name, file.nbytes), files)
    features, references = merge_deltas(parts)
    fields = summarise(index)
    manifest = Manifest(
        origin=origin,
        saved_unix_s=index.saved_unix_s,
        fields=add_stored(fields, parts) if is_of_delta(features) else fields,
        index_nbytes=index_nbytes,
        index_digest=digest_text(index_digest),
        features=features,
        references=references,
        labels=parts[0].labels,
        durability=weakest(part.durability for part in parts),
    )
    for reference in references:
        check_base(store, reference, known=known)
    store.sync("parts")
    content = manifest.dump()
    # Checked before the register is created: a register that no reader accepts could never be
    # corrected afterwards.
    decided = known.parse_register(content)
    assert isinstance(decided, Manifest)  # noqa: S101
    if signer is not None:
        signer.sign(store, decided, content)
    _decide_anew(store, content) if replace else _decide(store, content)
    store.sync("")
    return decided


def check_base(store: Store, reference: Reference, *, known: Known | None = None) -> None:
    """Raise unless a base checkpoint is committed and not condemned.

    The caller has pinned the base before.

    Args:
        store: the store of the checkpoint that refers to the base.

    Raises: IntegrityError(BASE_MISSING, BASE_MISMATCH). Spec: REQ-CMT-031, REQ-CMT-033,
        REQ-CMT-047.
    """
    base = store.beside(reference.name)
    # Condemnations are listed before the register is read: a cleaner that retires a checkpoint
    # removes the condemnation last, after the tombstone is in the register.
    condemned = any(name.startswith(CONDEMNED) for name in base.list_names(""))
    register = read_register(base, known=known)
    if condemned or register is None:
        detail = (
            "the checkpoint is about to be retired" if condemned else "there is no such checkpoint"
        )
        raise err(Code.BASE_MISSING, detail, where=base.name, requirement="REQ-CMT-031")
    if not isinstance(register, Manifest) or register.digest != reference.digest:
        raise err(
            Code.BASE_MISMATCH,
            "another checkpoint is there",
            where=base.name,
            requirement="REQ-CMT-031",
        )
    if register.durability != HOME:
        detail = "its files may be in caches of nodes only"
        raise err(Code.BASE_MISSING, detail, where=base.name, requirement="REQ-CMT-047")


def abort(store: Store, *, run_id: str | None, launch: int | None, step: int, reason: str) -> bool:
    """Give up an undecided checkpoint directory, then remove its files.

    The abort record is created before any file is removed: otherwise a slow committer could commit
    removed files.

    Returns: False if the register already held another decision.
    Raises: StoreError; CommitError(COMMIT_UNKNOWN).
    Spec: REQ-CMT-020, REQ-CMT-021.
    """
    record = Abort(run_id=run_id, launch=launch, step=step, reason=reason)
    try:
        _decide(store, record.dump())
    except CkptError as error:
        if error.code == Code.COMMIT_UNKNOWN or not isinstance(read_register(store), Abort):
            if error.code in (
                Code.COMMIT_CONFLICT,
                Code.CHECKPOINT_ABORTED,
                Code.CHECKPOINT_RETIRED,
            ):
                return False
            raise
    store.sync("")
    _delete_all_but_register(store)
    return True


def retire(store: Store, manifest: Manifest) -> None:
    """Replace a committed manifest by a tombstone, then remove the files.

    Safe to repeat after a crash.

    Raises: StoreError.
    Spec: REQ-CMT-022, REQ-CMT-023.
    """
    origin = manifest.origin
    tombstone = Tombstone(
        run_id=origin.run_id,
        launch=origin.launch,
        step=origin.step,
        manifest_digest=manifest.digest,
    )
    store.replace(MANIFEST_NAME, tombstone.dump())
    store.sync("")
    _delete_all_but_register(store)


def delete_unfinished(store: Store) -> None:
    """Remove the temporary files of killed writers in an aborted or retired directory."""
    # Leases lie in the run's directory only.
    for prefix in () if store.holds_expire else ("", "parts"):
        store.delete_leftovers(prefix)


def sweep(store: Store) -> None:
    """Remove files left by an interrupted `abort` or `retire`, behind an existing record.

    Spec: REQ-CMT-024.
    """
    store.sync("")
    _delete_all_but_register(store)


def is_of_attempt(path: str) -> bool:
    """Return whether a file name in a checkpoint directory is a name of an attempt's file."""
    return _ATTEMPT.fullmatch(path) is not None


def sweep_attempts(store: Store, origin: Origin, *, known: Known | None = None) -> None:
    """Remove files of other attempts from a directory with a committed checkpoint.

    No other attempt can commit any more.

    Outside of a run, another save may be about to replace the checkpoint. Such a save holds its
    attempt from before its first file until the attempt is decided. So names are listed first, then
    held attempts, and the register is read last: an attempt that isn't held at the second step
    either is in the register or can never commit.

    Args:
        origin: the calling save's origin. Files of this attempt stay, for all
            its writers.
        known: the caller's cache of parsed registers.

    Spec: REQ-CMT-027, REQ-CMT-044.
    """
    if origin.launch is None:
        paths = [
            prefix + name
            for prefix in ("", "parts/")
            for name in store.list_names(prefix.rstrip("/"))
        ]
        held = list_held_attempts(store, but=origin.attempt)
    else:  # in a run, this directory has the attempts of one step, and no holds
        paths = store.list("")
        held = []
    register = read_register(store, known=known)
    if not isinstance(register, Manifest):
        return
    committed = register.origin.attempt
    kept = {committed, origin.attempt, *held}
    named = ((path, found[1]) for path in paths if (found := _ATTEMPT.fullmatch(path)) is not None)
    # Pins of the committed attempt aren't needed any more: its manifest lists the references.
    going = [
        path
        for path, of in named
        if of not in kept or (of == committed and path.endswith(PINS_SUFFIX))
    ]
    call_each(store, store.delete, going)
    for prefix in (
        () if held or (store.holds_expire and origin.launch is not None) else ("", "parts")
    ):
        store.delete_leftovers(prefix)


def wait_for_decision(
    store: Store, origin: Origin, *, deadline_s: float, replace: bool = False
) -> Manifest:
    """Wait until the committer has decided, or until a writer leaves a failure record.

    Args:
        replace: whether this save replaces an existing checkpoint, whose register is then ignored
            while waiting.

    Raises: CommitError(WRITER_FAILED, WRITERS_MISSING, COMMIT_CONFLICT, COMMIT_UNKNOWN);
        IntegrityError(CHECKPOINT_ABORTED, CHECKPOINT_RETIRED); LayoutError, FencedError if a
        failure record has such a code.
    Spec: REQ-CMT-009, REQ-CMT-038.
    """
    for _ in poll(deadline_s):
        register = read_register(store)
        if isinstance(register, Manifest) and register.origin.attempt == origin.attempt:
            # A visible register isn't durable yet: the committer may still fail in its last sync.
            store.sync("")
            return register
        if register is not None and not replace:
            raise refusal_of(register)
        _raise_failures(store, origin)
    missing = _list_missing(origin, set(store.list_names("parts")))
    if missing:
        whom = ", ".join(map(str, missing[:16]))
        code = Code.WRITERS_MISSING
        detail = f"no part of writers {whom} within {deadline_s:g} s, and no decision"
    else:
        # All parts are present: the committer, or another process that finishes the attempt, may
        # commit.
        code = Code.COMMIT_UNKNOWN
        detail = f"the committer didn't decide within {deadline_s:g} s"
    raise err(code, detail, where=MANIFEST_NAME, requirement="REQ-CMT-009")


# --- waiting --------------------------------------------------------------------------------------


def _wait_for_parts(store: Store, origin: Origin, deadline_s: float) -> None:
    missing: list[int] = []
    for _ in poll(deadline_s):
        present = set(store.list_names("parts"))
        missing = _list_missing(origin, present)
        if not missing:
            return
        _raise_failures(store, origin, present)
    detail = f"no part of the writers {', '.join(map(str, missing[:16]))} within {deadline_s:g} s"
    raise err(Code.WRITERS_MISSING, detail, where="parts/", requirement="REQ-CMT-005")


def _list_missing(origin: Origin, present: set[str]) -> list[int]:
    """Return the writers without a part among the names in ``parts/``."""
    writers = range(origin.writer_count)
    return [
        writer
        for writer in writers
        if part_path(origin.attempt, writer)[len("parts/") :] not in present
    ]


def _raise_failures(store: Store, origin: Origin, present: set[str] | None = None) -> None:
    names = set(store.list_names("parts")) if present is None else present
    for writer in range(origin.writer_count):
        path = failure_path(origin.attempt, writer)
        if path[len("parts/") :] in names:
            record = parse_failure(store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path)
            raise _error_of_record(record, path)


def _error_of_record(record: Mapping[str, Any], path: str) -> CkptError:
    """Return the error to raise after finding a failure record of another writer.

    Spec: REQ-CMT-038.
    """
    writer = record["writer"]
    code = record["code"]
    detail = record["detail"]
    remedy = record["remedy"]
    if code in _VERDICTS or (
        code in Code.__members__ and issubclass(Code[code].error, LayoutError)
    ):
        return err(
            Code[code],
            detail,
            where=record["where"],
            requirement=record["requirement"],
            remedy=remedy,
        )
    place = f" at {record['where']}" if record["where"] else ""
    remedy = f"On writer {writer}: {remedy}" if remedy else None
    told = f"writer {writer}: {code}{place}: {detail}"
    return err(Code.WRITER_FAILED, told, where=path, requirement="REQ-CMT-004", remedy=remedy)


# --- deciding -------------------------------------------------------------------------------------


def _create_index(store: Store, path: str, content: bytes, digest: bytes) -> tuple[int, bytes]:
    """Create the index, or accept the equal index of another committer.

    Return the file's size in bytes and digest.

    Committers write equal documents but may compress them differently. The manifest refers to the
    existing file.

    Raises: StoreError; CommitError(COMMIT_CONFLICT). Spec: REQ-CMT-006.
    """
    try:
        create_once(store, path, content=content)
    except CkptError as error:
        # Other bytes, or a longer file.
        if error.code not in (Code.COMMIT_CONFLICT, Code.LIMIT_EXCEEDED):
            raise
        return _read_equal_index(store, path, content)
    return len(content), digest


def _read_equal_index(store: Store, path: str, content: bytes) -> tuple[int, bytes]:
    """Return size and digest of an existing index with the same document as `content`.

    The version of the format may differ: the other committer may be an older program.

    Raises: CommitError(COMMIT_CONFLICT).
    """
    found = store.read(path, limit_nbytes=limits.MSGPACK_NBYTES)
    try:
        said, digest, _ = open_packed_document(found, where=path)
    except (FormatError, IntegrityError):
        said = b""
        digest = b""
    if _versionless(said) != _versionless(open_packed_document(content, where=path)[0]):
        raise err(
            Code.COMMIT_CONFLICT,
            "an index is there with other contents",
            where=path,
            requirement="REQ-CMT-006",
        )
    return len(found), digest


def _versionless(content: bytes) -> bytes:
    """Return the msgpack of an index without the value of ``format_version``."""
    return _VERSION.sub(b"", content, count=1)


def _iter_parts(
    store: Store, origin: Origin, known: dict[bytes, TensorTable]
) -> Iterator[PartFileEntry]:
    """Read, check and yield the parts of an attempt.

    At most `CALLS_AT_ONCE` parts are in memory.
    """
    read = functools.partial(store.read, limit_nbytes=limits.MSGPACK_NBYTES)
    for first in range(0, origin.writer_count, CALLS_AT_ONCE):
        writers = range(first, min(first + CALLS_AT_ONCE, origin.writer_count))
        contents = call_each(store, read, [part_path(origin.attempt, writer) for writer in writers])
        for writer, content in zip(writers, contents, strict=True):
            yield _parse_part(origin, writer, content, known)


def _parse_part(
    origin: Origin, writer: int, content: bytes, known: dict[bytes, TensorTable]
) -> PartFileEntry:
    path = part_path(origin.attempt, writer)
    part, digest = Part.parse(content, where=path, known=known)
    if part.origin != origin or part.writer != writer:
        detail = f"the part of writer {writer} isn't of this attempt"
        raise err(Code.WRITERS_DIVERGED, detail, where=path, requirement="REQ-CMT-010")
    return PartFileEntry(part=part, digest=digest, nbytes=len(content))


def _check_file(store: Store, path: str, nbytes: int) -> None:
    if (actual := store.nbytes(path)) != nbytes:
        raise err(
            Code.FILE_NBYTES,
            f"the file has {actual} bytes, not {nbytes}",
            where=path,
            requirement="REQ-CMT-007",
        )


def _decide(store: Store, content: bytes) -> None:
    """Create the decision register, or raise the error that fits the existing register.

    Spec: REQ-CMT-008.
    """
    for _ in range(_TRIES):
        try:
            store.create(MANIFEST_NAME, [content])
        except CkptError as error:
            if error.code not in (Code.STORE_EXISTS, Code.STORE_NO_ANSWER):
                raise
        else:
            return
        found = _read_back(store)
        if found == content:
            return
        if found is not None:
            raise refusal_of(parse_register(found))
        # The register is absent: the request was lost or is delayed. Repeating it is safe: creation
        # is exclusive.
    raise err(
        Code.COMMIT_UNKNOWN,
        "the store doesn't say whether the register was created",
        where=MANIFEST_NAME,
        requirement="REQ-CMT-008",
    )


def _decide_anew(store: Store, content: bytes) -> None:
    """Put a manifest into the register, replacing a register that belongs to no run.

    Spec: REQ-CMT-042.
    """
    try:
        _decide(store, content)
    except CkptError as error:
        if error.code not in (
            Code.COMMIT_CONFLICT,
            Code.CHECKPOINT_ABORTED,
            Code.CHECKPOINT_RETIRED,
        ):
            raise
    else:
        return
    register = read_register(store)
    if isinstance(register, Manifest) and register.origin.run_id is not None:
        raise refusal_of(register)
    for _ in range(_TRIES):
        try:
            store.replace(MANIFEST_NAME, content)
        except CkptError as problem:
            if problem.code != Code.STORE_NO_ANSWER:
                raise
        else:
            return
        if _read_back(store) == content:
            return
    detail = "the store doesn't say whether the register was replaced"
    raise err(Code.COMMIT_UNKNOWN, detail, where=MANIFEST_NAME, requirement="REQ-CMT-008")


def _read_back(store: Store) -> bytes | None:
    try:
        return store.read(MANIFEST_NAME, limit_nbytes=limits.MANIFEST_NBYTES)
    except CkptError as error:
        if error.code == Code.FILE_MISSING:
            return None
        raise err(
            Code.COMMIT_UNKNOWN,
            f"the register can't be read back: {error}",
            where=MANIFEST_NAME,
            requirement="REQ-CMT-008",
        ) from error


def refusal_of(register: Manifest | Abort | Tombstone) -> CkptError:
    """Return the error of a committer that finds another decision in the register."""
    if isinstance(register, Abort):
        return err(
            Code.CHECKPOINT_ABORTED,
            register.reason,
            where=MANIFEST_NAME,
            requirement="REQ-MAN-001",
            remedy=(
                "A newer launch cleaned up. A process that saves here must stop; a reader takes"
                " another checkpoint."
            ),
        )
    if isinstance(register, Tombstone):
        return err(
            Code.CHECKPOINT_RETIRED,
            "a checkpoint was here and was retired",
            where=MANIFEST_NAME,
            requirement="REQ-MAN-001",
            remedy=(
                "It can't be had again: take another checkpoint, or save under another step or"
                " path."
            ),
        )
    return err(
        Code.COMMIT_CONFLICT,
        f"attempt {register.origin.attempt} of step {register.origin.step} was committed here",
        where=MANIFEST_NAME,
        requirement="REQ-CMT-008",
    )


def _delete_all_but_register(store: Store) -> None:
    def delete(path: str) -> None:
        with contextlib.suppress(FormatError):  # a directory entry with a name outside the format
            store.delete(path)

    call_each(store, delete, [path for path in store.list("") if path != MANIFEST_NAME])
    delete_unfinished(store)
    store.remove_directory("parts")
    store.sync("")

"""A save in two phases for callers with their own collectives: each process writes, one commits."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator
import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self, SupportsFloat

from ckptfmt import limits
from ckptfmt.adapters.capture import add_optimizers, capture
from ckptfmt.adapters.data_loaders import refuse_shares
from ckptfmt.commit.lone import own_place
from ckptfmt.commit.waiting import list_held_attempts
from ckptfmt.digest import digest_text
from ckptfmt.documents.labels import NO_LABELS, Labels
from ckptfmt.documents.manifest import Origin
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.group import DEADLINE_S, EXCHANGE
from ckptfmt.run.save_job import SaveJob, SaveState, new_origin
from ckptfmt.saving.handle import SaveReport
from ckptfmt.saving.one_save import check_step
from ckptfmt.state import State, check_state
from ckptfmt.store import open_store
from ckptfmt.store.protocol import Store
from ckptfmt.write.writer import as_ckpt_error, for_saving, write_part

_ID: Final = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")
#: Held attempts of this process by place, at most one for each place.
_HOLDS: Final[weakref.WeakValueDictionary[str, contextlib.ExitStack]] = (
    weakref.WeakValueDictionary()
)
#: Members of a part's record.
_RECORD: Final = {"attempt", "writer", "part_digest"}
#: Path of a published attempt, and the largest size of its file in bytes.
_PUBLISHED: Final = f"{EXCHANGE}/attempt.json"
_PUBLISHED_NBYTES: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class SaveAttempt:
    """A save of several processes, for callers with their own planning and collectives.

    One process begins the attempt and sends the text of `dump` to all processes, which call
    `parse`. Each process writes a part and returns a record, which the caller gathers. One process
    commits. No method waits for another process, and no method is a collective. Without a commit
    the parts are no checkpoint, and the next commit in the directory removes the parts.

    Each piece of a tensor must be in the state of exactly one process, even if several processes
    hold the piece. To let ckptfmt choose the writers, call `ckptfmt.save` on all processes instead.

    Args:
        origin: step and ids from `begin` or `parse`.
        note: JSON value for all processes.
        replace: whether the save replaces an existing checkpoint, while `hold` protects the files.

    >>> import ckptfmt, tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     attempt = ckptfmt.SaveAttempt.begin(step=3, writer_count=1)
    ...     told = attempt.dump()  # to the other processes
    ...     record = ckptfmt.SaveAttempt.parse(told).write_part(path,
    ...         ckptfmt.State(data={"position": 24}), writer=0)
    ...     attempt.commit(path, [record]).step
    3
    """

    origin: Origin
    note: Any = None
    replace: bool = False

    @classmethod
    def begin(
        cls,
        *,
        step: int,
        writer_count: int,
        block_nbytes: int = limits.BLOCK_NBYTES,
        note: object = None,
        replace: bool = False,
    ) -> Self:
        """Begin a save. Exactly one process calls this.

        Args:
            step: number of training steps done.
            writer_count: number of processes that write a part, at least 1.
            block_nbytes: see `ckptfmt.save`.
            note: JSON value for all processes; the value isn't saved.
            replace: see `ckptfmt.save`. With True one process must call `hold` before any
                process writes its part.

        Raises: StateError(ARGUMENT).
        """
        check_step(step)
        if type(writer_count) is not int or not 1 <= writer_count <= limits.WRITERS:
            detail = f"writer_count={writer_count!r} isn't a number from 1 to {limits.WRITERS}"
            raise err(Code.ARGUMENT, detail, where="writer_count=")
        check_block_nbytes(block_nbytes)
        return cls(
            new_origin(
                step=operator.index(step), writer_count=writer_count, block_nbytes=block_nbytes
            ),
            note,
            replace,
        )

    def dump(self) -> str:
        """Return the attempt as text, for `parse` in the other processes."""
        return json.dumps({**self.origin.as_dict(), "note": self.note, "replace": self.replace})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the attempt from the text of `dump`. Raises: StateError(ARGUMENT)."""
        where = "SaveAttempt.parse()"
        told = _parse(
            text, {"note", "replace", *(field.name for field in dataclasses.fields(Origin))}, where
        )
        begun = cls.begin(
            **{name: told[name] for name in ("step", "writer_count", "block_nbytes")}
        ).origin
        ids = {"nonce": told["nonce"], "attempt": told["attempt"]}
        if not all(isinstance(text, str) and _ID.fullmatch(text) for text in ids.values()):
            raise err(Code.ARGUMENT, "ids that SaveAttempt.begin doesn't make", where=where)
        return cls(dataclasses.replace(begun, **ids), told["note"], told["replace"] is True)

    def hold(self, path: str | os.PathLike[str] | Store) -> contextlib.ExitStack:
        """Check that a save to a path is allowed, and hold a replacing attempt.

        Other saves don't remove the files of a held attempt. This method waits for other processes'
        saves to the path. An earlier attempt that this process holds at the path is abandoned and
        can't be committed any more. A symbolic link is replaced by a directory, as for
        `ckptfmt.save`.

        Args:
            path: see `write_part`.

        Returns: a context that ends the hold. Close the context after `commit`, or after giving up
            the attempt.
        Raises: CommitError(CHECKPOINT_EXISTS) if the existing files may not be replaced;
            CommitError(SAVE_PENDING) after ten minutes of waiting; StoreError(STORE_UNSUPPORTED) if
            a file system has no locks.
        Spec: REQ-CMT-042, REQ-CMT-043.
        """
        if self.replace:
            own_place(path)
        store = open_store(path, writable=True)
        job = self._job(store)
        job.check()
        with job.held:
            if self.replace:
                # Without this, an earlier failed attempt of this process would be waited for.
                _HOLDS.pop(store.name, contextlib.ExitStack()).close()
                job.hold()
                job.wait()
            kept = job.held.pop_all()
        if self.replace:
            _HOLDS[store.name] = kept
        return kept

    def publish(self, path: str | os.PathLike[str] | Store) -> None:
        """Write the attempt into the directory, for processes without the text of `dump`.

        The file replaces an older published attempt. `commit` removes the file, and readers ignore
        the file.

        Args:
            path: see `write_part`.

        Raises: CommitError(CHECKPOINT_EXISTS); StoreError.
        """
        store = self._open(path)
        store.delete(_PUBLISHED)
        store.create(_PUBLISHED, [self.dump().encode()])

    @classmethod
    def find(cls, path: str | os.PathLike[str] | Store) -> Self:
        """Return the newest published attempt.

        Call this after `publish` has returned in the other process.

        Raises: IntegrityError(FILE_MISSING); StateError(ARGUMENT); StoreError.
        """
        content = open_store(path, writable=False).read(_PUBLISHED, limit_nbytes=_PUBLISHED_NBYTES)
        return cls.parse(content.decode(errors="replace"))

    def write_part(
        self,
        path: str | os.PathLike[str] | Store,
        state: State,
        *,
        writer: int,
        optimizers: Mapping[tuple[str | int, ...], Mapping[str, Any]] | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        tags: Iterable[str] = (),
        on_progress: Callable[[int], None] | None = None,
    ) -> str:
        """Write this process's part, and return once the part is durable.

        Each process calls this once.

        Args:
            path: directory of the checkpoint, made if missing; or a store rooted there.
            state: objects of this process; all of them are written.
            writer: number of this process, from 0.
            optimizers: state_dicts of torch optimizers, by the path of keys of each optimizer in
                ``State(optimizer=...)``: ``()`` for the only optimizer. The state_dicts have the
                names of parameters, as `get_optimizer_state_dict` of
                `torch.distributed.checkpoint.state_dict` returns them. A `TensorSource` in a
                state_dict refers to the tensor of its name, whose pieces the processes give in
                `state`. Processes that give the same optimizer give equal values.
            metrics, tags: see `ckptfmt.save`; the values of process 0 count.
            on_progress: called with the number of bytes just written.

        Returns: the record of the part for `commit`, a short text.
        Raises: StateError for a state that can't be saved; CommitError(CHECKPOINT_EXISTS);
            StoreError. After an error no files of the part are left, or none that a reader takes
            for a checkpoint.
        Spec: REQ-CMT-003, REQ-CMT-004.
        """
        check_state(state)
        if type(writer) is not int or not 0 <= writer < self.origin.writer_count:
            detail = f"writer={writer!r} isn't a number below {self.origin.writer_count}"
            raise err(Code.ARGUMENT, detail, where="writer=")
        store = self._open(path)
        try:
            labels = Labels.of(metrics, tags) if writer == 0 else NO_LABELS
            refuse_shares(state)
            snapshot = capture(state, worker=writer, worker_count=self.origin.writer_count)
            snapshot = dataclasses.replace(snapshot, labels=labels)
            if optimizers:
                snapshot = add_optimizers(snapshot, optimizers)
        except CkptError as error:
            raise for_saving(error) from error
        try:
            part = write_part(store, snapshot, self.origin, writer=writer, on_progress=on_progress)
        except Exception as error:
            raise as_ckpt_error(error) from error
        part_digest = digest_text(part.dump()[1])
        return json.dumps(
            {"attempt": self.origin.attempt, "writer": writer, "part_digest": part_digest}
        )

    def commit(self, path: str | os.PathLike[str] | Store, records: Iterable[str]) -> SaveReport:
        """Commit the parts as a durable checkpoint, and return the report.

        One process calls this, after all processes have written their parts.

        Args:
            path: see `write_part`.
            records: records of all parts, in any order.

        Raises: StateError(ARGUMENT) if a record is missing, given twice, or of another attempt;
            FormatError(DOC_MISMATCH) if a part differs from its record; LayoutError if the parts
            contradict each other, such as TILING_OVERLAP for a piece that two processes gave;
            CommitError(CHECKPOINT_EXISTS, COMMIT_CONFLICT, COMMIT_UNKNOWN);
            IntegrityError(FILE_MISSING); StoreError.
        Spec: REQ-CMT-005 to REQ-CMT-009, REQ-CMT-027.
        """
        digests = self._digests(records)
        store = self._open(path)
        if self.replace and self.origin.attempt not in list_held_attempts(store):
            detail = (
                "an attempt that replaces is held from before its first part until it is committed"
            )
            raise err(Code.ARGUMENT, detail, where="SaveAttempt.hold()", requirement="REQ-CMT-043")
        job = self._job(store)
        manifest = job.decide(part_digests=digests)
        job.sweep()
        # The save is done. Files left by a failed clean-up only take space.
        with contextlib.suppress(CkptError):
            store.delete(_PUBLISHED)
            store.remove_directory(EXCHANGE)
        return SaveReport.of(manifest, path=store.name)

    def _open(self, path: str | os.PathLike[str] | Store) -> Store:
        """Return the store of a path where a save is allowed; `hold` has checked a replacement."""
        store = open_store(path, writable=True)
        if not self.replace:
            self._job(store).check()
        return store

    def _job(self, store: Store) -> SaveJob:
        return SaveJob(
            SaveState(store=store, origin=self.origin, deadline_s=DEADLINE_S, replace=self.replace)
        )

    def _digests(self, records: Iterable[str]) -> list[str]:
        """Return the digests of the parts in writer order. Raises: StateError(ARGUMENT)."""
        digests: dict[int, str] = {}
        for record in records:
            told = _parse(record, _RECORD, "records")
            if type(told["writer"]) is not int:
                raise err(
                    Code.ARGUMENT, f"a record is of the writer {told['writer']!r}", where="records"
                )
            if told["attempt"] != self.origin.attempt:
                raise err(
                    Code.ARGUMENT,
                    f"a record is of the attempt {told['attempt']!r}",
                    where="records",
                )
            if told["writer"] in digests:
                raise err(
                    Code.ARGUMENT, f"two records are of writer {told['writer']}", where="records"
                )
            digests[told["writer"]] = told["part_digest"]
        missing = [
            str(writer) for writer in range(self.origin.writer_count) if writer not in digests
        ]
        if missing or len(digests) != self.origin.writer_count:
            named = ", ".join(missing[:16]) or "none"
            detail = (
                f"{len(digests)} records for {self.origin.writer_count} writers; missing: {named}"
            )
            remedy = "Gather the records of write_part from all processes, and commit with all."
            raise err(Code.ARGUMENT, detail, where="records", remedy=remedy)
        return [digests[writer] for writer in range(self.origin.writer_count)]


def _parse(text: str, members: set[str], where: str) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except (TypeError, ValueError):
        told = None
    if not isinstance(told, dict) or told.keys() != members:
        raise err(Code.ARGUMENT, f"not the text of a SaveAttempt: {text!r:.100}", where=where)
    return told


def check_block_nbytes(block_nbytes: int) -> None:
    """Check that a value is a block size.

    Raises: StateError(ARGUMENT).
    Spec: REQ-TEN-005.
    """
    if (
        type(block_nbytes) is not int
        or not limits.BLOCK_NBYTES_MIN <= block_nbytes <= limits.BLOCK_NBYTES_MAX
        or block_nbytes & (block_nbytes - 1)
    ):
        raise err(
            Code.ARGUMENT,
            (
                f"block_nbytes={block_nbytes}: a power of two from {limits.BLOCK_NBYTES_MIN} to"
                f" {limits.BLOCK_NBYTES_MAX}"
            ),
            where="block_nbytes=",
            requirement="REQ-TEN-005",
        )

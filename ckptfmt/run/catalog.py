"""The checkpoints of a run: list, find, label, pin, delete, mirror and repair."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, SupportsFloat, TypeAlias

from ckptfmt import limits
from ckptfmt.commit.lone import is_run
from ckptfmt.commit.waiting import describe_savers, launches_of, list_held
from ckptfmt.documents.labels import Labels, check_name
from ckptfmt.documents.manifest import Abort, Manifest, Tombstone
from ckptfmt.documents.run import LabelsRecord, RunRecord
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.read.in_caches import check_at_home
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.accounts import Goodput
from ckptfmt.run.failures import Decision, read_decisions
from ckptfmt.run.labelling import change_labels, pin_checkpoint
from ckptfmt.run.lineage import (
    RunEntry,
    check_records,
    check_writer_features,
    find_head_entry,
    iter_lineage,
    list_checkpoints,
    list_launches,
    open_head,
    read_known_run,
)
from ckptfmt.run.mirror import MirrorReport, PromoteReport, mirror_run, promote
from ckptfmt.run.retention import delete_checkpoint, sort_by_metric
from ckptfmt.run.scrub import ScrubReport, scrub_run
from ckptfmt.run.spent_time import read_goodput
from ckptfmt.store import open_store
from ckptfmt.store.protocol import Store

_LOG: Final = logging.getLogger("ckptfmt")
_STATES: Final = (
    (Manifest, "committed"),
    (Abort, "aborted"),
    (Tombstone, "retired"),
    (CkptError, "unreadable"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoint:
    """A checkpoint directory of a run, described by its register and the records of the run.

    Attributes:
        name: the directory's name.
        step, launch: the step and the launch in the name.
        state: "committed", "aborted", "retired" or "unreadable", by the register. Without a
            decision: "saving" where a living saver of the launch is writing a save, else
            "unfinished".
        digest: digest of the manifest, which names the checkpoint; None without a manifest.
        saved_unix_s: time when writer 0 took the state, in seconds since 1970; None without a
            manifest.
        nbytes: size of all tensors in bytes.
        stored_nbytes: bytes of the tensors in the checkpoint's own files.
        metrics, tags: metrics and tags, as recorded last; those of the save if `labels_error`.
        suspect: why the checkpoint is suspect: the run doesn't go on from a suspect checkpoint
            unless a person chooses it. None if the checkpoint isn't suspect.
        pinned: whether the checkpoint is pinned, and stays until unpinned; true if `labels_error`.
        labels_error: why the newest record of metrics, tags and pin can't be read; None if it is
            read, or missing.
        durability: the least durable place of the files at the commit: "home", or "node" or "peers"
            for caches of nodes; None without a manifest.
    """

    name: str
    step: int
    launch: int
    state: str
    digest: str | None = None
    saved_unix_s: int | None = None
    nbytes: int | None = None
    stored_nbytes: int | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tags: tuple[str, ...] = ()
    suspect: str | None = None
    pinned: bool = False
    labels_error: str | None = None
    durability: str | None = None


#: A reference to a checkpoint: an entry of a listing, a name, a digest, or a step.
Which: TypeAlias = RunCheckpoint | str | int


class Run:
    """The checkpoints of a run: list them, find the best, label them, pin them, delete them.

    Only registers and records are read, never a tensor. So "committed" means: a manifest exists.
    `validate` compares the tensors' bytes with their digests. Any process may call every method
    while a training saves.

    Args:
        path: the run's directory, or a store rooted there.

    Raises: IntegrityError(NOT_COMMITTED) from calls for a checkpoint that doesn't exist;
        StoreError.

    >>> import ckptfmt, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with ckptfmt.Checkpointer(directory, ckptfmt.State(data={"position": 0}),
    ...         saving=ckptfmt.Saving(saver="inline")) as checkpointer:
    ...         _ = checkpointer.save(step=1, metrics={"eval_loss": 2.5})
    ...         _ = checkpointer.save(step=2, metrics={"eval_loss": 2.25})
    ...     ckptfmt.Run(directory).best("eval_loss", "min").step
    2
    """

    def __init__(self, path: str | os.PathLike[str] | Store) -> None:
        self._path = path
        self._store = open_store(path, writable=False)
        # Digests of checkpoints found loadable by `delete`.
        self._loadable: set[str] = set()

    def __repr__(self) -> str:
        return f"Run({self._store.name!r})"

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of the living savers: while there are any, a newer checkpoint may be committed."""
        return tuple(list_held(self._store))

    def list(self) -> tuple[RunCheckpoint, ...]:
        """Return all checkpoint directories by step, then launch, in whatever state."""
        # Savers are listed before the registers: a save decided in between is seen there.
        held = launches_of(list_held(self._store))
        return tuple(describe_entry(entry, held) for entry in self._entries())

    def newest(self) -> RunCheckpoint:
        """Return the checkpoint from which the run goes on, by the run's records.

        Raises: as `ckptfmt.open`.
        """
        return describe_entry(find_head_entry(self._store))

    def goodput(self) -> Goodput:
        """Return the use of the run's time over all launches.

        The result has `times_s`, in seconds by name, and `goodput`.

        Launches of `Checkpointer(..., ledger=True)` have recorded their times. Gaps of other
        launches are in `doubts`.

        Raises: IntegrityError(FILE_MISSING) without a run; errors of a damaged launch record.
        """
        return read_goodput(self._store)

    def decisions(self) -> tuple[Decision, ...]:
        """Return the decisions of a `Healer` after failures, by the number of the failed launch.

        Unreadable records are left out. Raises: StoreError.
        """
        return tuple(found for _, found in sorted(read_decisions(self._store).items()))

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> RunCheckpoint:
        """Return the committed checkpoint with the best value of a metric; of equals the newest.

        Suspect checkpoints don't count. A record of metrics that can't be read is logged as a
        warning, and the metrics of the save are compared instead.

        Args:
            metric: the metric's name.
            mode: "min" where less is better, "max" where more is better.

        Raises: IntegrityError(NOT_COMMITTED) where no checkpoint has the metric;
            StateError(ARGUMENT).
        """
        if mode not in ("min", "max"):
            raise err(Code.ARGUMENT, f"{mode!r}: min or max", where="mode=")
        check_name(metric, "metric=")
        entries = [entry for entry in self._entries() if not entry.is_suspect]
        for entry in entries:
            if entry.labels_error:
                _LOG.warning(
                    "%s is compared by the metrics of its save: %s", entry.name, entry.labels_error
                )
        found = sort_by_metric(entries, metric, mode)
        if not found:
            known = sorted({name for entry in entries for name in entry.labels.metrics})
            raise err(
                Code.NOT_COMMITTED,
                (
                    f"no committed checkpoint has the metric {metric!r}; there are:"
                    f" {', '.join(known) or 'none'}"
                ),
                where=self._store.name,
                remedy="Pass metrics= to save, or give them to Run.set_metrics.",
            )
        return describe_entry(found[0])

    def open(self, which: Which | None = None) -> Checkpoint:
        """Open a checkpoint, or by default the newest, for reading, as `ckptfmt.open` does.

        Returns: the checkpoint; `pending` has the names of the savers at work just before.
        """
        held = tuple(list_held(self._store))
        if which is None:
            checkpoint = open_head(self._store)
        else:
            found = self.find(which)
            checkpoint = Checkpoint(self._store.at(found.name), digest=found.digest)
        check_at_home(checkpoint)
        checkpoint.pending = held
        return checkpoint

    def set_metrics(self, which: Which, metrics: Mapping[str, SupportsFloat]) -> None:
        """Set metrics of a committed checkpoint; metrics of the same names are replaced.

        Raises: StateError(ARGUMENT) as `ckptfmt.save`; as `pin`.
        """
        self.add_labels(which, metrics=metrics)

    def tag(self, which: Which, *tags: str) -> None:
        """Add tags to a committed checkpoint. Raises: as `set_metrics`."""
        self.add_labels(which, tags=tags)

    def add_labels(
        self,
        which: Which,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        tags: Iterable[str] = (),
    ) -> None:
        """Set metrics and add tags in one step; without metrics and tags, no record is written.

        Raises: as `set_metrics`.
        """
        given = Labels.of(metrics, tags)
        if given:
            self._change(
                which,
                lambda known: Labels.of(
                    {**known.numbers(), **given.numbers()}, {*known.tags, *given.tags}
                ),
            )

    def untag(self, which: Which, *tags: str) -> None:
        """Remove tags; missing tags are ignored. Raises: as `set_metrics`."""
        gone = {check_name(tag, "tags=") for tag in tags}
        if gone:
            self._change(
                which, lambda known: dataclasses.replace(known, tags=_without(known.tags, gone))
            )

    def pin(self, which: Which) -> None:
        """Pin a committed checkpoint: retention rules don't apply until the checkpoint is unpinned.

        Raises: IntegrityError(NOT_COMMITTED, CHECKPOINT_RETIRED and others);
            CommitError(CHECKPOINT_CONDEMNED); StateError(ARGUMENT) for a run begun by a version
            without pins. Spec: REQ-CMT-041.
        """
        store, run = self._writable()
        pin_checkpoint(store, run, self.find(which).name)

    def unpin(self, which: Which) -> None:
        """Remove the pin, so that the retention rules apply again. Raises: as `set_metrics`."""
        store, run = self._writable()
        change_labels(
            store,
            run,
            self.find(which).name,
            lambda record: dataclasses.replace(record, pinned=False),
        )

    def delete(
        self, which: Which, *, dry_run: bool = False, force: bool = False, gone: Iterable[str] = ()
    ) -> None:
        """Delete a committed checkpoint: retire the checkpoint in one step, then remove the files.

        First, every byte of another checkpoint is read, once for each `Run` object: the last
        checkpoint that can be loaded stays.

        Args:
            which: the checkpoint.
            dry_run: whether to raise the errors of a deletion without a change.
            force: whether to delete the checkpoint without a check that another checkpoint can be
                loaded.
            gone: names of checkpoints regarded as deleted, for a dry run of several
                deletions.

        Raises: CommitError(CHECKPOINT_NEEDED) for a pinned checkpoint, the checkpoint from which
            the run goes on or its newest launch resumes, the last committed checkpoint, the last
            loadable checkpoint, and a base of a delta.
        Spec: REQ-CMT-022, REQ-CMT-026, REQ-CMT-052.
        """
        store, run = (self._store, read_known_run(self._store)) if dry_run else self._writable()
        delete_checkpoint(
            store,
            run,
            self.find(which).name,
            dry_run=dry_run,
            force=force,
            gone=gone,
            loadable=self._loadable,
        )

    def mirror(
        self,
        mirror: str | os.PathLike[str] | Store,
        *,
        retire: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> MirrorReport:
        """Copy missing parts of the run to a mirror, from which the run can go on.

        Every byte is compared with a digest. A second call continues after an interruption. A
        training may save into the run during the copy.

        Args:
            mirror: directory of the copy, made if missing; or a store rooted there.
            retire: whether to retire the run's retired checkpoints at the mirror, too; else
                the mirror keeps them.
            on_progress: called with the number of bytes just copied.

        Raises: CommitError(HOMES_DIVERGED) where the run went on in the copy; as `mirror_run`.
            Spec: REQ-RUN-027 to REQ-RUN-031.
        """
        # Before the store is opened for writing, which makes the directory.
        read_known_run(self._store)
        return mirror_run(
            self._store, open_store(mirror, writable=True), retire=retire, on_progress=on_progress
        )

    def scrub(
        self,
        others: Iterable[str | os.PathLike[str] | Store] = (),
        *,
        dry_run: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> ScrubReport:
        """Compare every byte of this run and its copies, and rewrite damaged files from whole ones.

        Args:
            others: mirrors of the run, or the run of which this is a mirror.
            dry_run: whether to change no file.
            on_progress: called with the number of bytes just compared.

        Returns: the damages, each with whether the file was rewritten; `whole` is True if all
            copies are whole now.
        Raises: as `scrub_run`. Spec: REQ-RUN-033, REQ-RUN-034.
        """
        paths = (self._path, *others)
        # Before the stores are opened for writing, which makes the directories.
        for path in paths:
            if not is_run(open_store(path, writable=False)):
                raise err(
                    Code.FILE_MISSING, "no run is here", where=open_store(path, writable=False).name
                )
        return scrub_run(
            [open_store(path, writable=not dry_run) for path in paths],
            dry_run=dry_run,
            on_progress=on_progress,
        )

    def promote(
        self,
        home: str | os.PathLike[str] | Store | None = None,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> PromoteReport:
        """Make this copy the home of its run by a launch that names the checkpoint to go on from.

        Args:
            home: the old home, if reachable. The old home is fenced off: no
                training saves there any more, and the last saves are copied.
            on_progress: called with the number of bytes just copied or checked.

        Raises: IntegrityError(NOT_COMMITTED, NO_VALID_CHECKPOINT); as `mirror`. Spec: REQ-RUN-032.
        """
        store, _ = self._writable()
        old = None if home is None else Run(home)._writable()[0]  # noqa: SLF001
        return promote(store, old, on_progress=on_progress)

    def _writable(self) -> tuple[Store, RunRecord]:
        # Before the store is opened for writing, which makes the directory.
        run = read_known_run(self._store)
        check_writer_features(run)
        return open_store(self._path, writable=True), run

    def _change(self, which: Which, change: Callable[[Labels], Labels]) -> None:
        store, run = self._writable()

        def change_record(record: LabelsRecord) -> LabelsRecord:
            return dataclasses.replace(record, labels=change(record.labels))

        change_labels(store, run, self.find(which).name, change_record)

    def _entries(self) -> Iterable[RunEntry]:
        return list_checkpoints(self._store, read_known_run(self._store))

    def find(self, which: Which) -> RunCheckpoint:
        """Return the checkpoint that `which` names.

        If several launches saved the step, the checkpoint on the lineage is returned.

        Args:
            which: an entry of a listing, a name, a digest, or a step.

        Raises: IntegrityError(NOT_COMMITTED, or FILE_MISSING of a launch record);
            StateError(ARGUMENT) for an argument of another type.
        """
        wanted = which.name if isinstance(which, RunCheckpoint) else _check_wanted(which)
        entries = list_checkpoints(self._store, read_known_run(self._store))
        found = [
            entry
            for entry in entries
            if wanted in (entry.name, entry.step)
            or (entry.manifest is not None and entry.manifest.digest == wanted)
        ]
        if len(found) > 1:
            check_records(self._store, entries)
            lineage = {entry.name for entry in iter_lineage(list_launches(self._store), entries)}
            found = [entry for entry in found if entry.name in lineage]
        if len(found) != 1:
            held = list_held(self._store)
            saving = f"; {describe_savers(held)} has a save in hand" if held else ""
            raise err(
                Code.NOT_COMMITTED,
                (
                    f"{'several checkpoints are' if found else 'no checkpoint is'}"
                    f" {str(wanted)[:100]!r}{saving}"
                ),
                where=self._store.name,
                remedy=_suggest(str(wanted), entries),
            )
        return describe_entry(found[0])


def _suggest(wanted: str, entries: Iterable[RunEntry]) -> str:
    """Return the remedy where no checkpoint or several match, with the most similar name."""
    near = difflib.get_close_matches(wanted, [entry.name for entry in entries], n=1)
    meant = f"Did you mean {near[0]}? " if near else "Give a name, a digest or a step; "
    return f"{meant}`ckptfmt log` lists the checkpoints of a run."


def _check_wanted(which: object) -> str | int:
    """Return a name, a digest or a step given by a caller. Raises: StateError(ARGUMENT)."""
    if isinstance(which, str):
        return which
    remedy = "Give a name, a digest or a step."
    if isinstance(which, bool) or not hasattr(which, "__index__"):
        raise err(
            Code.ARGUMENT,
            f"a {type(which).__name__} doesn't say which",
            where="which=",
            remedy=remedy,
        )
    step = operator.index(which)
    if not 0 <= step <= limits.JSON_INTEGER:
        detail = f"no step is outside of 0 to {limits.JSON_INTEGER}"
        raise err(Code.ARGUMENT, detail, where="which=", remedy=remedy)
    return step


def _without(tags: Iterable[str], gone: Iterable[str]) -> tuple[str, ...]:
    return tuple(tag for tag in tags if tag not in set(gone))


def state_of(entry: RunEntry, held: Iterable[int] = ()) -> str:
    """Return the state of a checkpoint directory in a word, as in `RunCheckpoint.state`.

    Args:
        held: launches of living savers.
    """
    undecided = "saving" if entry.launch in held else "unfinished"
    return next((state for kind, state in _STATES if isinstance(entry.register, kind)), undecided)


def describe_entry(entry: RunEntry, held: Iterable[int] = ()) -> RunCheckpoint:
    """Return the description of a directory for a listing.

    Args:
        held: launches of living savers.
    """
    found = RunCheckpoint(
        name=entry.name,
        step=entry.step,
        launch=entry.launch,
        state=state_of(entry, held),
        digest=entry.register.manifest_digest if isinstance(entry.register, Tombstone) else None,
        metrics=entry.labels.numbers(),
        tags=entry.labels.tags,
        suspect=entry.labels.suspect or None,
        pinned=entry.is_pinned,
        labels_error=str(entry.labels_error) if entry.labels_error else None,
    )
    manifest = entry.manifest
    if manifest is None:
        return found
    return dataclasses.replace(
        found,
        digest=manifest.digest,
        saved_unix_s=manifest.saved_unix_s,
        nbytes=manifest.nbytes,
        stored_nbytes=manifest.stored_nbytes,
        durability=manifest.durability,
    )

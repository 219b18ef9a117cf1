"""The checkpoints of a run, for who looks for one, labels it, pins it or deletes it."""

from __future__ import annotations

import dataclasses
import difflib
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
from ckptfmt.goodput.accounts import Goodput
from ckptfmt.read.in_caches import check_at_home
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.labelling import change_labels, pin_checkpoint
from ckptfmt.run.lineage import (
    RunEntry,
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

_STATES: Final = ((Manifest, "committed"), (Abort, "aborted"), (Tombstone, "retired"), (CkptError, "unreadable"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoint:
    """A checkpoint directory of a run, as far as its register and the records of the run say.

    Attributes:
        name: of the directory.
        step, launch: of the name.
        state: "committed"; "saving" where it isn't decided and a living saver has a save of its launch in hand;
            "unfinished" where it isn't decided otherwise; "aborted", "retired" or "unreadable".
        digest: of the manifest, which names the checkpoint; None where there is none.
        saved_unix_s: when writer 0 took the state, in seconds since 1970; None where there is no manifest.
        nbytes: of all tensors.
        stored_nbytes: of what the checkpoint's own files have of them.
        metrics, tags: as they were said last.
        suspect: why it is suspect, so that the run doesn't go on from it unless somebody chooses it; None if it isn't.
        pinned: whether it stays until somebody unpins it.
        durability: where its files were at least when it was committed: "home", or "node" or "peers", in caches of
            nodes; None where there is no manifest.
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
    durability: str | None = None


#: Which checkpoint: what a listing gave, its name, its digest, or its step.
Which: TypeAlias = RunCheckpoint | str | int


class Run:
    """The checkpoints of a run: list them, find the best, label them, pin them, delete them.

    Registers and records are read, never a tensor: "committed" is what a manifest says, and `validate` checks
    that its bytes are as they were saved. Any process may do all of this beside a training.

    Args:
        path: directory of the run; or a store rooted there.

    Raises: IntegrityError(NOT_COMMITTED) from calls that look for a checkpoint which isn't there; StoreError.

    >>> import ckptfmt, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with ckptfmt.Checkpointer(directory, ckptfmt.State(data={"position": 0}), saver="inline") as checkpointer:
    ...         _ = checkpointer.save(step=1, metrics={"eval_loss": 2.5})
    ...         _ = checkpointer.save(step=2, metrics={"eval_loss": 2.25})
    ...     ckptfmt.Run(directory).best("eval_loss", "min").step
    2
    """

    def __init__(self, path: str | os.PathLike[str] | Store) -> None:
        self._path = path
        self._store = open_store(path, writable=False)
        #: Digests of checkpoints that `delete` has found to be whole.
        self._loadable: set[str] = set()

    def __repr__(self) -> str:
        return f"Run({self._store.name!r})"

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of what living savers hold: a newer checkpoint may be committed at any moment if there are any."""
        return tuple(list_held(self._store))

    def list(self) -> tuple[RunCheckpoint, ...]:
        """Return all checkpoint directories by step, then launch: those that aren't committed, too."""
        # Before the registers: a save that is decided in between is seen there.
        held = launches_of(list_held(self._store))
        return tuple(describe_entry(entry, held) for entry in self._entries())

    def newest(self) -> RunCheckpoint:
        """Return the checkpoint that the run goes on from, as far as its records say. Raises: as `ckptfmt.open`."""
        return describe_entry(find_head_entry(self._store))

    def goodput(self) -> Goodput:
        """Return where the time of the run went, over all launches: `times_s`, in seconds by name, and `goodput`.

        Launches with `Checkpointer(..., ledger=True)` have recorded it. Of others, `doubts` says what isn't known.

        Raises: IntegrityError(FILE_MISSING) where no run is; what is wrong with a launch record.
        """
        return read_goodput(self._store)

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> RunCheckpoint:
        """Return the committed checkpoint that is best by a metric and isn't suspect; of equals the newest.

        Args:
            mode: "min" where less is better, "max" where more is.

        Raises: IntegrityError(NOT_COMMITTED) where none has the metric; StateError(ARGUMENT).
        """
        if mode not in ("min", "max"):
            raise err(Code.ARGUMENT, f"{mode!r}: min or max", where="mode=")
        check_name(metric, "metric=")
        entries = [entry for entry in self._entries() if not entry.is_suspect]
        found = sort_by_metric(entries, metric, mode)
        if not found:
            known = sorted({name for entry in entries for name in entry.labels.metrics})
            raise err(
                Code.NOT_COMMITTED,
                f"no committed checkpoint has the metric {metric!r}; there are: {', '.join(known) or 'none'}",
                where=self._store.name,
                remedy="Pass metrics= to save, or give them to Run.set_metrics.",
            )
        return describe_entry(found[0])

    def open(self, which: Which | None = None) -> Checkpoint:
        """Open a checkpoint, or the newest, for reading, as `ckptfmt.open` does.

        Returns: the checkpoint; its `pending` says what savers had in hand just before.
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
        """Give a committed checkpoint metrics that were known only after its save; those that it has are replaced.

        Raises: StateError(ARGUMENT) as `ckptfmt.save`; as `pin`.
        """
        self.add_labels(which, metrics=metrics)

    def tag(self, which: Which, *tags: str) -> None:
        """Give a committed checkpoint tags, beside those that it has. Raises: as `set_metrics`."""
        self.add_labels(which, tags=tags)

    def add_labels(
        self, which: Which, *, metrics: Mapping[str, SupportsFloat] | None = None, tags: Iterable[str] = ()
    ) -> None:
        """Do what `set_metrics` and `tag` do, in one step; without metrics and tags, nothing is recorded.

        Raises: as `set_metrics`.
        """
        given = Labels.of(metrics, tags)
        if given:
            self._change(
                which,
                lambda known: Labels.of({**known.numbers(), **given.numbers()}, {*known.tags, *given.tags}),
            )

    def untag(self, which: Which, *tags: str) -> None:
        """Take tags away; what it doesn't have isn't missed. Raises: as `set_metrics`."""
        gone = {check_name(tag, "tags=") for tag in tags}
        if gone:
            self._change(which, lambda known: dataclasses.replace(known, tags=_without(known.tags, gone)))

    def pin(self, which: Which) -> None:
        """Keep a committed checkpoint, whatever retention says, until somebody unpins it.

        Raises: IntegrityError(NOT_COMMITTED, CHECKPOINT_RETIRED and others); CommitError(CHECKPOINT_CONDEMNED);
            StateError(ARGUMENT) for a run begun by a version without pins. Spec: REQ-CMT-041.
        """
        store, run = self._writable()
        pin_checkpoint(store, run, self.find(which).name)

    def unpin(self, which: Which) -> None:
        """Leave a checkpoint to retention again. Raises: as `set_metrics`."""
        store, run = self._writable()
        change_labels(store, run, self.find(which).name, lambda record: dataclasses.replace(record, pinned=False))

    def delete(self, which: Which, *, dry_run: bool = False, force: bool = False, gone: Iterable[str] = ()) -> None:
        """Delete a committed checkpoint: from a moment on it is none any more, then its files go.

        Before that, every byte of another checkpoint is read, once for each `Run` object: the last checkpoint that can
        be loaded stays.

        Args:
            which: checkpoint.
            dry_run: whether to raise what would be raised, and change nothing.
            force: whether to delete the checkpoint without looking whether another one can be loaded.
            gone: names of others that count as deleted, for a dry run of several.

        Raises: CommitError(CHECKPOINT_NEEDED) for what is pinned, what the run goes on from, what its newest launch
            resumes from, the last committed one, the last that can be loaded, and what a delta reads from.
        Spec: REQ-CMT-022, REQ-CMT-026, REQ-CMT-052.
        """
        store, run = (self._store, read_known_run(self._store)) if dry_run else self._writable()
        delete_checkpoint(
            store, run, self.find(which).name, dry_run=dry_run, force=force, gone=gone, loadable=self._loadable
        )

    def mirror(
        self,
        mirror: str | os.PathLike[str] | Store,
        *,
        retire: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> MirrorReport:
        """Copy what another place lacks of the run, every byte compared with a digest, so that it can go on there.

        It may be interrupted, and is done again to go on. A training may save into the run meanwhile.

        Args:
            mirror: directory of the copy, made if it isn't there; or a store rooted there.
            retire: whether what the run has retired is retired there, too; else the copy keeps what it has.
            on_progress: called with the number of bytes just copied.

        Raises: CommitError(HOMES_DIVERGED) where the run went on in the copy; as `mirror_run`. Spec: REQ-RUN-027 to
            REQ-RUN-031.
        """
        read_known_run(self._store)  # first: to open a store for writing makes its directory
        return mirror_run(self._store, open_store(mirror, writable=True), retire=retire, on_progress=on_progress)

    def scrub(
        self,
        others: Iterable[str | os.PathLike[str] | Store] = (),
        *,
        dry_run: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> ScrubReport:
        """Compare every byte of this run and of its copies, and rewrite what is damaged in one from another.

        Args:
            others: mirrors of the run, or the run of which this is the mirror.
            dry_run: whether to change nothing.
            on_progress: called with the number of bytes just compared.

        Returns: the damages, and whether each was mended; `whole` says whether all copies are whole now.
        Raises: as `scrub_run`. Spec: REQ-RUN-033, REQ-RUN-034.
        """
        paths = (self._path, *others)
        for path in paths:  # first: to open a store for writing makes its directory
            if not is_run(open_store(path, writable=False)):
                raise err(Code.FILE_MISSING, "no run is here", where=open_store(path, writable=False).name)
        return scrub_run(
            [open_store(path, writable=not dry_run) for path in paths], dry_run=dry_run, on_progress=on_progress
        )

    def promote(
        self,
        home: str | os.PathLike[str] | Store | None = None,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> PromoteReport:
        """Make this copy the home of its run: begin a launch here, which names what the run goes on from.

        Args:
            home: the old one, if it can be reached: nobody saves there any more then, and its last saves are copied.
            on_progress: called with the number of bytes just copied or checked.

        Raises: IntegrityError(NOT_COMMITTED, NO_VALID_CHECKPOINT); as `mirror`. Spec: REQ-RUN-032.
        """
        store, _ = self._writable()
        old = None if home is None else Run(home)._writable()[0]  # noqa: SLF001 - another one of this class
        return promote(store, old, on_progress=on_progress)

    def _writable(self) -> tuple[Store, RunRecord]:
        run = read_known_run(self._store)  # first: to open a store for writing makes its directory
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
        """Return the one checkpoint that is meant; of a step in several launches, the one on the lineage.

        Args:
            which: a checkpoint of a listing, a name, a digest, or a step.

        Raises: IntegrityError(NOT_COMMITTED); StateError(ARGUMENT) for what is none of these.
        """
        wanted = which.name if isinstance(which, RunCheckpoint) else _check_wanted(which)
        entries = list_checkpoints(self._store, read_known_run(self._store))
        found = [
            entry
            for entry in entries
            if wanted in (entry.name, entry.step) or (entry.manifest is not None and entry.manifest.digest == wanted)
        ]
        if len(found) > 1:
            lineage = {entry.name for entry in iter_lineage(list_launches(self._store), entries)}
            found = [entry for entry in found if entry.name in lineage]
        if len(found) != 1:
            held = list_held(self._store)
            saving = f"; {describe_savers(held)} has a save in hand" if held else ""
            raise err(
                Code.NOT_COMMITTED,
                f"{'several checkpoints are' if found else 'no checkpoint is'} {str(wanted)[:100]!r}{saving}",
                where=self._store.name,
                remedy=_suggest(str(wanted), entries),
            )
        return describe_entry(found[0])


def _suggest(wanted: str, entries: Iterable[RunEntry]) -> str:
    """Return the remedy where no checkpoint is meant, or several are: the name that comes nearest, if one does."""
    near = difflib.get_close_matches(wanted, [entry.name for entry in entries], n=1)
    meant = f"Did you mean {near[0]}? " if near else "Give a name, a digest or a step; "
    return f"{meant}`ckptfmt log` lists the checkpoints of a run."


def _check_wanted(which: object) -> str | int:
    """Return a name, a digest or a step that a caller gives. Raises: StateError(ARGUMENT)."""
    if isinstance(which, str):
        return which
    remedy = "Give a name, a digest or a step."
    if isinstance(which, bool) or not hasattr(which, "__index__"):
        raise err(Code.ARGUMENT, f"a {type(which).__name__} doesn't say which", where="which=", remedy=remedy)
    step = operator.index(which)
    if not 0 <= step <= limits.JSON_INTEGER:
        detail = f"no step is outside of 0 to {limits.JSON_INTEGER}"
        raise err(Code.ARGUMENT, detail, where="which=", remedy=remedy)
    return step


def _without(tags: Iterable[str], gone: Iterable[str]) -> tuple[str, ...]:
    return tuple(tag for tag in tags if tag not in set(gone))


def state_of(entry: RunEntry, held: Iterable[int] = ()) -> str:
    """Return what a directory is, in a word.

    Args:
        held: launches of which living savers have saves in hand.
    """
    undecided = "saving" if entry.launch in held else "unfinished"
    return next((state for kind, state in _STATES if isinstance(entry.register, kind)), undecided)


def describe_entry(entry: RunEntry, held: Iterable[int] = ()) -> RunCheckpoint:
    """Return what a listing says of a directory.

    Args:
        held: as for `state_of`.
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

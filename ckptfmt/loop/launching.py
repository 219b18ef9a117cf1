"""The start of a launch: wait for savers, finish saves in caches, choose a checkpoint to resume."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ckptfmt.adapters import torch_side
from ckptfmt.commit.waiting import describe_savers, poll, wait_for_savers
from ckptfmt.documents.manifest import Reference
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import CkptError, Code, StoreError, err
from ckptfmt.features import LABELS
from ckptfmt.group import Group, attempt
from ckptfmt.loop.rewinding import choose_save
from ckptfmt.read.cached import CachedStore
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.lineage import begin_launch, open_run
from ckptfmt.run.node_cache import (
    Cache,
    CachedPart,
    NodeCache,
    commit_finished,
    list_committed,
    list_in_caches,
    plan_fetch,
    plan_finish,
)
from ckptfmt.signing.signer import Signer
from ckptfmt.signing.trust import Trust
from ckptfmt.store.protocol import Store
from ckptfmt.write.writer import as_ckpt_error

if TYPE_CHECKING:
    from ckptfmt.run.elections import RunHomes

T = TypeVar("T")

_LOG: Final = logging.getLogger("ckptfmt")
#: Pauses before another try to read the disk of a cache, in seconds.
_PAUSES_S: Final = (0.05, 0.5)
_CACHE_REMEDY: Final = (
    "Mend the disk, and start again. A start without cache=, or with another directory, goes on"
    " without the saves that"
    " this cache alone has, and these may be retired then."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """The memory of a process that goes on with other processes.

    Attributes:
        common: attempts with the contents of all processes in the memory of this process.
        problem: the reason for which this process can't go on, to be raised on all processes.
    """

    common: list[str]
    problem: Exception | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A begun launch.

    Attributes:
        launch: record of the launch.
        run: record of the run.
        checkpoint: open checkpoint from which the launch resumes; None after a fresh start.
        passed_over: one sentence for each newer checkpoint not taken, with the reason.
        reports: one sentence for each unusable part of this node's cache.
        seconds: duration of the start.
        waited_s: time for which process 0 waited for savers, in seconds; 0 on other processes.
        lends: whether processes with contents in memory lend the contents to other processes.
    """

    launch: Launch
    run: RunRecord
    checkpoint: Checkpoint | None
    passed_over: list[str]
    reports: list[str]
    seconds: float
    waited_s: float
    lends: bool = False


def take_launch(
    store: Store,
    group: Group,
    *,
    resume: str | Callable[[], str],
    writer_features: Sequence[str],
    deadline_s: float,
    cache: Cache | None,
    trusted: Collection[str] = (),
    after: int | None = None,
    survivor: Survivor | None = None,
    known: int = 0,
    on_begun: Callable[[int], None] | None = None,
    signer: Signer | None = None,
    require_signature: Trust | None = None,
    homes: RunHomes | None = None,
) -> Taken:
    """Begin the next launch of a run; every process calls this, and process 0 decides.

    Where some processes go on, and others take the places of lost processes, the launch follows the
    lineage. Only a function in `resume` has an effect there.

    Args:
        store: store rooted at the run.
        resume: see `Checkpointer`; or a function that returns the value on all processes, once no
            save of an earlier launch is in flight.
        writer_features: features required of the run.
        deadline_s: longest wait of the processes for each other, in seconds. Process 0 waits for
            savers for half of this time.
        cache: cache of this node; None if no process has a cache.
        trusted: attempts whose contents all processes have in memory.
        after: number of the launch of these processes that goes back; None for a start.
        survivor: for a process that goes on with other processes; None for any other process.
        known: number of the newest launch that this process knows; 0 before the first.
        on_begun: called on process 0 with the number of the begun launch.
        signer: signs the saves that are completed from caches.
        require_signature: see `begin_launch`.
        homes: the homes of the run, entered; None for a run with one home.

    Raises: as `Checkpointer.choose`; IntegrityError(NOT_COMMITTED) if processes go on, and there is
        no save to go back to.
    Spec: REQ-RUN-002, REQ-RUN-018, REQ-RUN-036.
    """
    begin_s = time.monotonic()
    reports: list[str] = []
    opened: list[Checkpoint] = []
    waited_s: list[float] = []
    # `RunHomes.enter` has waited for the savers at all homes.
    wait_s = 0.0 if homes is not None and homes.is_entered else deadline_s / 2
    waited, joined = _meet(
        group,
        survivor,
        known,
        lambda: _open_and_wait(store, writer_features, wait_s, waited_s),
    )
    if joined is not None:
        trusted = joined.trusted
        after = joined.launch
    finish: _Finish | None = None
    names: list[str] = []
    reading = store
    if cache is not None:
        finish = _Finish(store, group, cache, waited["run_id"], reports, signer=signer)
        names = finish.run(0 if waited["passed_over"] else deadline_s / 2)
    if not isinstance(resume, str):
        chosen = resume()
    elif joined is not None:
        chosen = group.run_on_first(lambda: choose_save(store, None))
    else:
        chosen = resume
    if finish is not None:
        finish.fetch(None if chosen == "auto" else chosen)
        reading = finish.reading()
    told = _run_on_first(
        group,
        lambda: _begin(
            reading,
            waited,
            chosen,
            names,
            opened,
            trusted=trusted,
            after=after,
            on_begun=on_begun,
            require_signature=require_signature,
            homes=homes,
        ),
    )
    if finish is not None:
        finish.tidy(told["committed"])
    named = told["launch"].pop("resume_from")
    found = None if named is None else Reference(**named)
    if joined is not None and found is None:
        detail = "processes go on with others, and a healer has chosen a fresh start"
        remedy = "Start all processes again."
        raise err(Code.NOT_COMMITTED, detail, where=store.name, remedy=remedy)
    checkpoint: Checkpoint | None = None
    if found is not None:
        # Process 0 opened the checkpoint for verification. The same object is loaded, so that no
        # document is parsed twice.
        checkpoint = group.together(
            lambda: opened[0] if opened else Checkpoint(reading.at(found.name), digest=found.digest)
        )
    launch = Launch(**told["launch"], resume_from=found)
    run = RunRecord(run_id=launch.run_id, writer_features=tuple(told["writer_features"]))
    return Taken(
        launch=launch,
        run=run,
        checkpoint=checkpoint,
        passed_over=told["passed_over"],
        reports=reports,
        seconds=time.monotonic() - begin_s,
        waited_s=sum(waited_s),
        lends=joined is not None and joined.lends,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Joined:
    """The knowledge and memory of all processes of a launch that goes on.

    Attributes:
        launch: number of the newest launch known to a process.
        trusted: attempts with the contents of all processes in the memory of a process that lends
            the contents.
        lends: see `Taken`.
    """

    launch: int
    trusted: frozenset[str]
    lends: bool


def _meet(
    group: Group, survivor: Survivor | None, known: int, action: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], _Joined | None]:
    """Run an action on process 0, and return the result on all, with the survivors' knowledge.

    Returns: the result; None instead of the second value if no process goes on, as at a start.
    Raises: as `Group.run_on_first`.
    """
    result, error = attempt(action) if group.writer == 0 else (None, None)
    mine: dict[str, Any] = {"opened": result, "known": known}
    if survivor is not None:
        mine["common"] = survivor.common
        error = survivor.problem or error
    told = group.raise_together(error, value=mine)
    if any(not isinstance(theirs, dict) or "known" not in theirs for theirs in told):
        raise diverged()
    opened = _check_opened(told[0]["opened"])
    survivors = [theirs for theirs in told if "common" in theirs]
    if not survivors:
        return opened, None
    # Contents are sent by torch.distributed. The option `agree` may connect other processes.
    lends = all(group.all_gather(_is_connected(group)))
    common = {name for theirs in survivors for name in theirs["common"]}
    return opened, _Joined(
        launch=max(theirs["known"] for theirs in told),
        trusted=frozenset(common if lends else ()),
        lends=lends,
    )


def _is_connected(group: Group) -> bool:
    side = torch_side()
    return side is not None and side.find_rank() == (group.writer, group.writer_count)


def diverged() -> CkptError:
    """Return the error for processes that make other exchanges than this process."""
    detail = "the writers aren't at the same point"
    return err(Code.WRITERS_DIVERGED, detail, requirement="REQ-CMT-001")


def _check_opened(told: Any) -> dict[str, Any]:
    """Return a value from process 0. Raises: LayoutError(WRITERS_DIVERGED) if it isn't as sent."""
    if not isinstance(told, dict) or "writer_features" not in told:
        raise diverged()
    return told


def _run_on_first(group: Group, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run an action on process 0, and return its result on all. Raises: as `Group.run_on_first`."""
    return _check_opened(group.run_on_first(action))


def _open_and_wait(
    store: Store, writer_features: Sequence[str], wait_s: float, waited_s: list[float]
) -> dict[str, Any]:
    """Open the run, and wait for the saves of living savers; on process 0 only."""
    run = open_run(store, writer_features=(LABELS, *writer_features))
    missing = sorted(set(writer_features) - set(run.writer_features))
    if missing:
        raise err(
            Code.ARGUMENT,
            (
                f"the run was begun without {', '.join(missing)}: programs without support for"
                " deltas may delete bases"
            ),
            where="delta=",
            requirement="REQ-CMT-036",
            remedy=(
                "Pass delta='off', or begin another run with delta= and load this run's"
                " checkpoint there."
            ),
        )
    passed_over: list[str] = []
    # A saver that hangs mustn't stop the run. A later commit of that saver is outside of the
    # lineage.
    begin_s = time.monotonic()
    if held := wait_for_savers(
        store, deadline_s=wait_s, on_wait=functools.partial(_say_waiting, wait_s)
    ):
        passed_over.append(
            f"the saves of {describe_savers(held)} weren't committed within {wait_s:g} s"
        )
        _LOG.warning("passed over: %s", passed_over[0])
    waited_s.append(time.monotonic() - begin_s)
    return {
        "run_id": run.run_id,
        "writer_features": list(run.writer_features),
        "passed_over": passed_over,
    }


def _begin(
    store: Store,
    waited: dict[str, Any],
    resume: str,
    names: Sequence[str],
    opened: list[Checkpoint],
    *,
    trusted: Collection[str],
    after: int | None,
    on_begun: Callable[[int], None] | None,
    require_signature: Trust | None,
    homes: RunHomes | None,
) -> dict[str, Any]:
    """Choose and record the checkpoint from which this launch resumes; on process 0 only.

    Args:
        names: names of the checkpoints with files in caches.
        opened: list to which the chosen open checkpoint is added.
        trusted, after, require_signature, homes: see `take_launch`.
        on_begun: called with the number of the launch.
    """
    passed_over: list[str] = waited["passed_over"]

    def note(sentence: str) -> None:
        _LOG.warning("passed over: %s", sentence)
        passed_over.append(sentence)

    run = RunRecord(run_id=waited["run_id"], writer_features=tuple(waited["writer_features"]))
    by_hand = None if resume in ("auto", "fresh") else resume
    launch, checkpoint = begin_launch(
        store,
        run,
        choose=by_hand,
        fresh=resume == "fresh",
        on_passed_over=note,
        trusted=trusted,
        # With votes in hand, `RunHomes.enter` has checked the newest launch before.
        after=None if homes is not None and homes.is_entered else after,
        require_signature=require_signature,
        elect=None if homes is None else homes.elect,
        mend=None if homes is None else homes.mend,
    )
    if on_begun is not None:
        on_begun(launch.launch)
    if checkpoint is not None:
        opened.append(checkpoint)
    committed = list_committed(store, names)
    return {
        "launch": dataclasses.asdict(launch),
        "writer_features": list(run.writer_features),
        "passed_over": passed_over,
        "committed": committed,
    }


def _say_waiting(wait_s: float, names: list[str]) -> None:
    """Log the reason and the longest duration of the following wait."""
    _LOG.warning(
        "waiting at most %g s for the saves that %s has in hand", wait_s, describe_savers(names)
    )


class _Finish:
    """The completion of earlier launches' saves from the caches, by all processes of a launch.

    Spec: REQ-RUN-036, REQ-RUN-037.
    """

    def __init__(
        self,
        store: Store,
        group: Group,
        options: Cache,
        run_id: str,
        reports: list[str],
        *,
        signer: Signer | None,
    ) -> None:
        self._store = store
        self._group = group
        self._reports = reports
        self._signer = signer
        self._cache: NodeCache | None = None
        #: The parts in each process's cache: name, attempt and writer of each part.
        self._parts: list[list[list[Any]]] = []
        self._options = options
        self._cache = group.together(lambda: self._open(run_id))

    def run(self, wait_s: float) -> list[str]:
        """Finish saves whose parts are in the caches, as far as possible.

        Args:
            wait_s: longest wait for living savers of this node, in seconds.

        Returns: the names of all checkpoints with files in the caches.
        Raises: errors of home or of a cache's disk, on all processes.
        """
        told = self._group.all_gather(self._group.together(lambda: self._look(wait_s)))
        self._parts = [theirs[2] for theirs in told]
        plan = self._group.run_on_first(
            lambda: plan_finish(self._store, [theirs[0] for theirs in told])
        )
        if plan:
            rows = [
                [name, attempt_id, writer, process] for name, attempt_id, writer, _, process in plan
            ]
            self._group.together(lambda: self._copy(rows, NodeCache.upload))
            for problem in self._group.run_on_first(
                lambda: commit_finished(self._store, plan, self._signer)
            ):
                self._report(problem)
        return sorted({name for theirs in told for name in theirs[1]})

    def fetch(self, resume: str | None) -> None:
        """Upload the checkpoint from which this launch would resume, if files are in the caches.

        If files of the newest checkpoint are missing, the next older checkpoint is tried, and so
        on, until a checkpoint is complete at home.

        Args:
            resume: name or digest of a checkpoint chosen by hand, or "fresh"; None for the lineage.

        Raises: errors of home, on all processes.
        Spec: REQ-RUN-041.
        """
        for name in (
            ()
            if resume == "fresh"
            else self._group.run_on_first(lambda: list_in_caches(self._store, resume))
        ):
            tried: set[tuple[int, int]] = set()
            while plan := self._group.run_on_first(
                lambda: plan_fetch(self._store, name, self._parts, tried)  # noqa: B023
            ):
                self._group.together(lambda: self._copy(plan, NodeCache.upload_files))
                tried |= {(row[2], row[3]) for row in plan}
            if plan is None:
                return

    def reading(self) -> Store:
        """Return the run's store; complete files in this node's cache are read there.

        Spec: REQ-RUN-038.
        """
        if self._cache is None:
            return self._store
        return CachedStore(self._store, self._cache.store, self._report)

    def tidy(self, committed: dict[str, str]) -> None:
        """Remove files that no launch needs. Several processes may clean one cache together."""
        if self._cache is not None:
            self._cache.tidy(committed)

    def _open(self, run_id: str) -> NodeCache | None:
        try:
            return self._ask(lambda: NodeCache(self._options, run_id))
        except CkptError as error:
            if isinstance(error, StoreError) and error.code != Code.STORE_UNSUPPORTED:
                raise
            self._report(
                f"CACHE_FAILED: {error}"
            )  # no directory, or a directory that never held a save
            return None

    def _ask(self, action: Callable[[], T], *, asks_home: bool = False) -> T:
        """Return the result of an action on the cache; try again if the disk of the cache fails.

        A failing disk may still hold the only copy of a save.

        Args:
            asks_home: whether the action uses home too. An error of home is raised unchanged.

        Raises: StoreError if the last try fails.
        Spec: REQ-RUN-047.
        """
        for pause_s in (*_PAUSES_S, None):
            try:
                return action()
            except CkptError as error:
                failure = (
                    error.__cause__ if asks_home or not isinstance(error, StoreError) else error
                )
                if not isinstance(failure, StoreError) or failure.code == Code.STORE_UNSUPPORTED:
                    raise
                if pause_s is None:
                    detail = f"the cache {self._options.path} can't be read: {failure.detail}"
                    raise err(
                        failure.code, detail, where=failure.where, remedy=_CACHE_REMEDY
                    ) from error
            time.sleep(pause_s)
        raise AssertionError  # the last try returns or raises

    def _wait(self, cache: NodeCache, wait_s: float) -> None:
        """Wait for the saves of living savers in this node's cache.

        Home lists the living savers too, but an object store does so by leases. A lease expires if
        home doesn't answer the saver or the saver gets no processor time. The lock file in the
        cache is held as long as the saver lives.
        """
        held: list[str] = []
        for turn, _ in enumerate(poll(wait_s)):
            held = sorted({part.name for part in self._ask(cache.list_held)})
            if not held:
                return
            if turn == 0:
                _LOG.warning(
                    "waiting at most %g s for the saver that has %s in hand",
                    wait_s,
                    ", ".join(held),
                )
        if held:
            self._report(
                f"CACHE_UNFINISHED: {', '.join(held)}: a living saver has it in hand, after"
                f" {wait_s:g} s"
            )

    def _look(self, wait_s: float) -> list[list[Any]]:
        """Return the contents of the cache: unfinished parts, names of checkpoints, and all parts.

        Raises: StoreError if the disk of the cache fails.
        """
        cache = self._cache
        if cache is None:
            return [[], [], []]
        self._wait(cache, wait_s)
        table: list[list[Any]] = []
        for part in self._ask(cache.list_unfinished):
            try:
                found = self._ask(functools.partial(cache.read_part, part))[0]
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001
                self._report(f"CACHE_UNFINISHED: {part.name}: {as_ckpt_error(error)}")
            else:
                table.append([part.name, part.attempt, part.writer, found.origin.writer_count])
        parts = [[part.name, part.attempt, part.writer] for part in self._ask(cache.list_parts)]
        return [table, self._ask(cache.list_names), parts]

    def _copy(
        self, rows: list[list[Any]], copy: Callable[[NodeCache, CachedPart, Store], None]
    ) -> None:
        """Upload the rows of this process. A row is a name, an attempt, a writer and a process."""
        for name, attempt_id, writer, process in rows:
            if process != self._group.writer or self._cache is None:
                continue
            part = CachedPart(name, attempt_id, writer)
            _LOG.info("bringing the save of writer %d to %s home from the cache", writer, name)
            with contextlib.ExitStack() as held:
                with contextlib.suppress(CkptError):  # a missing cache raises below
                    held.enter_context(self._cache.hold(part))
                try:
                    self._ask(
                        functools.partial(copy, self._cache, part, self._store.at(name)),
                        asks_home=True,
                    )
                except StoreError:
                    raise
                except Exception as error:  # noqa: BLE001
                    self._report(f"CACHE_UNFINISHED: {name}: {as_ckpt_error(error)}")

    def _report(self, sentence: str) -> None:
        _LOG.warning("%s", sentence)
        self._reports.append(sentence)

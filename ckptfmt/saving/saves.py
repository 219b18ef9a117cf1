"""The saves of a run and of a path: inline in the calling thread, or in the background."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from ckptfmt import limits
from ckptfmt.adapters import torch_side
from ckptfmt.adapters.data_position import DATA_DOUBTS, UNREAD
from ckptfmt.adapters.live import Live, list_doubts
from ckptfmt.adapters.unsaved import Unheld
from ckptfmt.commit.decision import Known, read_register
from ckptfmt.delta.policy import DeltaOptions
from ckptfmt.documents.durability import HOME, NODE, PEERS
from ckptfmt.documents.labels import NO_LABELS, Labels
from ckptfmt.documents.manifest import Manifest, Origin
from ckptfmt.documents.part import Leaf
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import is_near_limit
from ckptfmt.errors import CkptError, Code, StoreError, check_flags, err, error_from_json
from ckptfmt.group import Group, attempt
from ckptfmt.run.node_cache import Cache, CachedPart, NodeCache, part_of
from ckptfmt.run.retention import Retention
from ckptfmt.run.save_job import SaveJob, SaveState
from ckptfmt.saving.background import Background, SaveSlot
from ckptfmt.saving.handle import (
    STATES,
    Callbacks,
    SaveEvent,
    SaveHandle,
    SaveReport,
    tell_committed,
)
from ckptfmt.saving.mirrors import Mirrors
from ckptfmt.saving.mirrors import Place as MirrorPlace
from ckptfmt.saving.one_save import Ownership, agree_on_save, prepare_once, write_live
from ckptfmt.saving.peers import Replicas, check_peers, connect_by_torch
from ckptfmt.saving.request import dump_request
from ckptfmt.signing.signer import Signer
from ckptfmt.state import State
from ckptfmt.store import address_of
from ckptfmt.store.protocol import Store
from ckptfmt.write.image import Context
from ckptfmt.write.snapshot import Memory, Snapshot
from ckptfmt.write.staging import Copy, Fillings, plan_copies
from ckptfmt.write.writer import as_ckpt_error

if TYPE_CHECKING:
    from ckptfmt.run.votes import OtherHomes
    from ckptfmt.saving.home_copies import HomeCopies

_LOG: Final = logging.getLogger("ckptfmt")
#: Kinds of saver.
_SAVERS: Final = ("process", "thread", "inline")
#: Policies for a save while every slot is busy.
_POLICIES: Final = ("wait", "skip")
#: Codes of failures of the storage: the store is full, unreachable, or reports an error; or the
#: saver lacks memory for a slot.
_STORAGE: Final = frozenset(
    {
        Code.STORE_IO,
        Code.STORE_NO_ANSWER,
        Code.STORE_ACCESS,
        Code.NO_SPACE,
        Code.COMMIT_UNKNOWN,
        Code.HOMES_AWAY,
        Code.HOME_BEHIND,
        Code.SLOTS_BUSY,
        Code.SLOT_MEMORY,
    }
)
#: Codes of the other processes' saves after such a failure.
_FOLLOWING: Final = frozenset({Code.WRITER_FAILED, Code.WRITERS_MISSING, Code.CHECKPOINT_ABORTED})
#: The code of the failed writer in the detail of WRITER_FAILED (`ckptfmt.commit.decision`).
_HEARD: Final = re.compile(r"writer [0-9]+: ([A-Z_0-9]+)\b")
#: Prefix of the report of a failed save. The reports keep only the newest report with this prefix.
_SAVE_FAILED: Final = "SAVE_FAILED: "
#: Time for which the interpreter's exit waits for the saver, in seconds. The wait is for a thread
#: to finish its saves, or for the copies into a saver process's slots.
_EXIT_S: Final = 60.0
#: Shortest time for callbacks at the end of the saves, in seconds.
_CALLBACKS_S: Final = 1.0
#: Longest wait for the saver to drop a snapshot, in seconds.
_DROP_S: Final = 1.0
#: Longest wait for partners' replicas at the end of the saves, in seconds.
_PARTNERS_S: Final = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The options of the saves beside the training, for ``Checkpointer(saving=)``.

    Attributes:
        saver: the writer: "process" (the default), a separate process that outlives this process;
            "thread", a thread of this process; "inline", the calling thread: `Checkpointer.save`
            returns after the commit.
        overlap: whether the parameters and their optimizer state are copied during the next
            forward and backward pass; by default True. State on a device is first copied within
            the device, if the device has spare memory. All other state is copied later only if
            the first save has shown no other change than by the optimizer's step.
        slots: largest number of snapshots in shared memory, from 1 to 8; by default 2. The first
            slot is made before the first save, each further slot when a save finds all slots busy.
        when_busy: behaviour of `Checkpointer.save` while each slot holds a save that isn't WRITTEN:
            "wait" (the default) or "skip".
        nice: increment of the niceness of the saver's process, and of the niceness of its session
            (the scheduler's autogroup), from 0 to 19; by default 0.
        delta: "off" (the default) to write full checkpoints; "auto" to write only the changes where
            this is no slower than a full save; "smallest" to write the changes in the fewest bytes,
            for remote stores. Or a mapping with ``mode``, any of the three; ``full_every``, the
            period of full saves in saves (16), shorter where deltas don't pay; ``restore_budget``,
            the longest restore as a factor of the time that a full checkpoint takes (1.5);
            ``fields``, the fields in which changes are encoded; changed blocks of other fields are
            written unencoded.
        failed_saves: number of consecutive saves that may fail because of the storage (full,
            unreachable, or with an I/O error) before the run ends with the error; by default 10.
            Until then the training goes on, the log and `Checkpointer.reports` have the failures,
            and the next due save tries again. 0 to end the run at the first failure. Any other
            failure ends the run in any case, and so does a failure of the last save.
        tags: tags of each save, in addition to the tags that the call gives, such as the ids of the
            run in trackers; process 0's tags are recorded.
        sign: a `Signer`, or the file of a private key, with which process 0 signs each save before
            the commit; by default None, for no signature.
        snapshot_every: number of steps between snapshots that stay in memory, without a write; by
            default None, for no such snapshots. A snapshot takes a slot, needs a saver in a process
            or a thread, and is skipped while no slot is free. The next snapshot or save replaces
            the snapshot, once all is copied, or before if no other slot is free.
            `Checkpointer.rewind` writes the snapshot. In a training of one process the end of the
            training writes the snapshot, too, and so does the saver's process after the death of
            the training's process.

    Raises: StateError(ARGUMENT) for an unknown word, a number outside of its range, and deltas with
        ``saver="inline"``.

    >>> Saving(slots=1, delta="auto").when_busy
    'wait'
    """

    saver: Literal["process", "thread", "inline"] = "process"
    overlap: bool = True
    slots: int = 2
    when_busy: Literal["wait", "skip"] = "wait"
    nice: int = 0
    delta: Literal["off", "auto", "smallest"] | Mapping[str, Any] = "off"
    failed_saves: int = 10
    tags: Iterable[str] = ()
    sign: Signer | str | os.PathLike[str] | None = None
    snapshot_every: int | None = None

    def __post_init__(self) -> None:
        check_flags(self, "overlap")
        self._check_snapshots()
        object.__setattr__(self, "tags", Labels.of(None, self.tags).tags)
        object.__setattr__(self, "sign", Signer.of(self.sign))
        has_deltas = DeltaOptions.of(self.delta).mode != "off"
        if type(self.failed_saves) is not int or self.failed_saves < 0:
            detail = f"failed_saves={self.failed_saves!r} isn't a number from 0 on"
            remedy = (
                "Pass how many saves in a row may fail before the run ends, such as"
                " failed_saves=10."
            )
            raise err(Code.ARGUMENT, detail, where="failed_saves=", remedy=remedy)
        for name, value, known in (
            ("saver", self.saver, _SAVERS),
            ("when_busy", self.when_busy, _POLICIES),
        ):
            if value not in known:
                raise err(
                    Code.ARGUMENT,
                    f"{name}={value!r} isn't one of {', '.join(known)}",
                    where=f"{name}=",
                )
        if type(self.slots) is not int or not 1 <= self.slots <= 8:
            raise err(
                Code.ARGUMENT, f"slots={self.slots!r} isn't a number from 1 to 8", where="slots="
            )
        if has_deltas and self.saver == "inline":
            remedy = "Pass saver='process' or saver='thread': a delta is made from a snapshot."
            raise err(
                Code.ARGUMENT, "saver='inline' can't save deltas", where="delta=", remedy=remedy
            )
        if type(self.nice) is not int or not 0 <= self.nice <= 19:
            raise err(
                Code.ARGUMENT, f"nice={self.nice!r} isn't a number from 0 to 19", where="nice="
            )

    def _check_snapshots(self) -> None:
        every = self.snapshot_every
        if every is None:
            return
        where = "snapshot_every="
        if type(every) is not int or every < 1:
            detail = f"snapshot_every={every!r} isn't a number of steps from 1 on"
            raise err(Code.ARGUMENT, detail, where=where, remedy="Pass snapshot_every=10, or None.")
        if self.saver == "inline":
            remedy = "Pass saver='process' or saver='thread': a snapshot stays in a slot."
            detail = "saver='inline' can't keep snapshots"
            raise err(Code.ARGUMENT, detail, where=where, remedy=remedy)


class Saves:
    """The saves of one trainer process, through one saver and its slots.

    Args:
        store: store rooted at the run; None outside of a run.
        group: group of the trainer processes.
        saving: options of the saves.
        deadline_s: longest wait for the other processes, for a free slot and for the saver, in
            seconds.
        cache: cache on a disk of this node; None for none.
        mirrors: places to which writer 0 copies the run.
        check_replicas: whether the digests of replicas are compared at each save.

    Attributes:
        unsaved: one sentence for each part of the training that the last check found missing.
        reports: one sentence for each request not carried out as asked. A sentence begins with the
            report's name.
    """

    def __init__(
        self,
        store: Store | None,
        group: Group,
        saving: Saving,
        *,
        deadline_s: float,
        cache: Cache | None = None,
        mirrors: Sequence[MirrorPlace] = (),
        check_replicas: bool = False,
    ) -> None:
        if cache is not None and cache.peers:
            check_peers(group)
        self.reports: list[str] = []
        self._mirrors: Mirrors | None = None
        self._mirror_places = tuple(mirrors)
        if store is not None and mirrors and group.writer == 0:
            self._mirrors = Mirrors(store, mirrors, self.reports)
        #: The other homes of the run, and the copies to them; None for a run with one home.
        self._others: OtherHomes | None = None
        self._home_copies: HomeCopies | None = None
        self._near_limit: set[tuple[str, str]] = set()
        self._store = store
        self._group = group
        self._saving = saving
        self._delta = DeltaOptions.of(saving.delta)
        self._deadline_s = deadline_s
        self._cache = cache
        self._known = Known()
        self._callbacks = Callbacks()
        self._ownership = Ownership(check_replicas=check_replicas)
        # Only with torch: one ckptfmt.adapters.torch.Guard for each state, by id, and one Devices.
        self._guards: dict[int, Any] = {}
        side = torch_side()
        self._devices: Any = None if side is None else side.Devices(self._report)
        self._has_device_tensors = False
        self._fillings = Fillings()
        self.unheld = Unheld()
        self._has_looked = self._has_looked_at_save = False
        self.unsaved: list[str] = []
        self._trainers_here = 1
        #: Number of started saves. With a cache, the files of every `upload_every`-th save are
        #: uploaded to home, beginning with the first save.
        self._begun_count = 0
        # The next three: saves still in progress at the last look; whether a save was committed
        # since the last exchange with the other processes; and the number of saves that failed in a
        # row.
        self._undecided: list[SaveHandle] = []
        self._has_news = False
        self._failed_count = 0
        #: Attempts that failed in this thread, still unknown to the other processes.
        self._own_failures: list[tuple[str, SaveHandle]] = []
        #: Handle of the last started save, its attempt's origin, and the process id at the start.
        self._last: tuple[SaveHandle, Origin, int] | None = None
        #: Function for the events of a snapshot in memory, once it is written.
        self._on_held: Callable[[SaveEvent], object] | None = None
        self._background: Background | None = None
        self._replicas: Replicas | None = None
        self._finalizer: weakref.finalize[[Background, dict[int, Any]], Any] | None = None

    # --- getting ready ----------------------------------------------------------------------------

    def begin_replicas(self, launch: Launch, nodes: Sequence[str]) -> None:
        """Connect with processes of other nodes, to store replicas of saves in their caches.

        Every process calls this method.

        Args:
            nodes: node of each process. If all processes are on one node, the saves have no
                replicas, and a report says so.
        """
        if self._replicas is not None:  # other processes have joined
            self._replicas.close(0.0)
            self._replicas = None
            if self._background is not None:
                self._background.replicate_by(lambda *_: None)
        if len(set(nodes)) == 1:
            told = (
                f"PEER_LOST: all {len(nodes)} processes are on node {nodes[0]!r}: saves have"
                " no replicas"
            )
            add_report(self.reports, told)
            return
        number = self._group.writer
        assert self._cache is not None  # noqa: S101
        name = f"{launch.run_id}-{launch.launch}-{launch.nonce}"
        self._replicas = Replicas(
            self._cache,
            launch.run_id,
            rank=number,
            nodes=nodes,
            connect=connect_by_torch(number, name=name, deadline_s=self._deadline_s),
            deadline_s=self._deadline_s,
            note=functools.partial(add_report, self.reports),
        )
        if self._background is not None:
            self._background.replicate_by(functools.partial(_replicate, self._replicas))
        # Closed at the interpreter's exit: the threads of the replicas must end before the modules
        # that they use.
        weakref.finalize(self, self._replicas.close, 0.0)

    def check(self, state: State, *, step: int | None = None) -> None:
        """Check a state as a save does, and report doubtful parts of the state.

        Args:
            step: number of training steps done; None if unknown.

        Raises: StateError; FormatError; LayoutError.
        """

        def find_unsaved(live: Live) -> list[str]:
            self.unheld.follow(state, live)
            self.unsaved = self._find_unsaved(state, live, saves=False)
            return self.unsaved

        snapshot = prepare_once(
            self._group,
            state,
            self._ownership,
            block_nbytes=limits.BLOCK_NBYTES,
            step=step,
            unsaved=find_unsaved,
        )
        self._look_for_devices(snapshot)
        for sentence in list_doubts(state, worker=self._group.writer):
            if not any(report.startswith(sentence.partition(":")[0]) for report in self.reports):
                self._report(sentence)

    def _find_unsaved(self, state: State, live: Live, *, saves: bool = True) -> list[str]:
        """Report the parts of the training missing from a save now.

        Returns: the texts for the checkpoint, so that later loads can report the missing parts.
        """
        # The search of the process runs at the first check, and again at the first save or
        # snapshot: a program may make its schedulers as late as that.
        looks_around = not (self._has_looked_at_save if saves else self._has_looked)
        self._has_looked = True
        self._has_looked_at_save |= saves
        found = self.unheld.find(state, live, looks_around=looks_around, saves=saves)
        texts = []
        for unsaved in found:
            self._report(f"{unsaved}; a resume claims no T1")
            texts.append(unsaved.text)
        return texts

    def _look_for_devices(self, snapshot: Snapshot) -> None:
        self._has_device_tensors |= self._devices is not None and self._devices.holds_any(
            snapshot.tensors
        )

    def prepare(self, state: State, *, step: int | None = None) -> None:
        """Check a state, make and touch the slots for the state, and start the saver.

        If slots and saver are ready, only the check remains.

        Raises: as `check`; CommitError(SAVER_LOST); StateError(SLOT_MEMORY).
        """
        self.check(state, step=step)
        if self._saving.saver != "inline":
            self._count_trainers()
            background = self._background or self._make_background()
            self._group.together(functools.partial(self._prepare_slots, background))
            self._guard_of(state)  # the guard learns from every step from now on

    def begin_preparing(self, state: State, *, step: int | None = None) -> None:
        """Check a state, and make the slots and start the saver in a thread, beside the training.

        A failure in the thread is logged; the first save prepares again.

        Raises: as `check`.
        """
        self.check(state, step=step)
        if self._saving.saver != "inline":
            self._count_trainers()
            self._guard_of(state)
            background = self._background or self._make_background()
            background.begin_preparing(functools.partial(self._prepare_slots, background))

    def _count_trainers(self) -> None:
        hosts = self._group.all_gather(socket.gethostname())
        self._trainers_here = hosts.count(hosts[self._group.writer])

    def _prepare_slots(self, background: Background) -> None:
        image = self._ownership.image
        assert image is not None  # noqa: S101
        pin = self._devices.pin if self._has_device_tensors else None
        if self._has_device_tensors and self._delta.mode != "off":
            self._devices.begin_digests()
        problem = background.prepare(image, shared_by=self._trainers_here, pin=pin)
        if problem:
            self._report(problem if background.has_slots else f"{problem}; saves are made inline")

    def _make_background(self) -> Background:
        saving = self._saving
        in_process = saving.saver == "process" and (
            self._store is None or address_of(self._store) is not None
        )
        homes = () if self._others is None else self._others.homes
        unknown = [home.address for home in homes if not home.has_address]
        in_process &= not unknown
        if saving.saver == "process" and not in_process:
            kind = type(unknown[0] if unknown else self._store).__qualname__
            self._report(f"SAVER_IN_THREAD: a {kind} can't be handed to another process")
        self._background = background = Background(
            self._store,
            in_process=in_process,
            slot_count=saving.slots,
            # A snapshot stays until the next one is complete.
            first_count=1 if saving.snapshot_every is None else min(2, saving.slots),
            nice=saving.nice,
            deadline_s=self._deadline_s,
            cache=self._cache,
            note=functools.partial(add_report, self.reports),  # holds the list, not this object
            **(
                {}
                if self._replicas is None
                else {"on_written": functools.partial(_replicate, self._replicas)}
            ),
        )
        # Runs at the interpreter's exit, or when the checkpointer is garbage-collected, so that no
        # staged save is lost.
        self._finalizer = weakref.finalize(self, _let_go, background, self._guards)
        return background

    def _guard_of(self, state: State) -> Any:
        """Return the guard against changes of a state during copies; freed with the state."""
        side = torch_side()
        key = id(state)
        if side is None or not self._saving.overlap:
            return None
        if key not in self._guards:
            self._guards[key] = side.Guard(self._report)
            # Removed with the state, before another object gets the same id. A guard with copies
            # in progress lives until the copies are done.
            weakref.finalize(state, self._guards.pop, key, None).atexit = False
        return self._guards[key]

    def _report(self, sentence: str) -> None:
        add_report(self.reports, sentence)

    def use_home(self, store: Store, others: OtherHomes) -> None:
        """Save at a home of a run with several homes. No save is in progress.

        Args:
            store: store rooted at the run, at this home.
            others: the other homes.
        """
        if store is not self._store:
            if self._background is not None:
                self._background.use_home(store)
            if self._home_copies is not None:
                self._home_copies.stop()
                self._home_copies = None
            self._known = Known()
        if self._mirrors is not None:
            self._mirrors.stop()  # a copy from another home may hang
            self._mirrors = Mirrors(store, self._mirror_places, self.reports, are_homes=True)
        self._store = store
        self._others = others

    def begin_copies(self, run: RunRecord, launch: Launch, retention: Retention) -> None:
        """Copy the run to the other homes from now on, as writer 0.

        Args:
            run, launch: the run, and the launch that has begun.
            retention: rule by which checkpoints stay at each home.
        """
        if self._store is None or self._others is None or self._group.writer != 0:
            return
        from ckptfmt.saving.home_copies import HomeCopies  # noqa: PLC0415 - few runs need it

        if self._home_copies is None:
            self._home_copies = HomeCopies(self._store, self._others.homes, self.reports)
        self._home_copies.begin(run, launch, retention)

    def note_launch(self, reports: list[str]) -> None:
        """Take note of a new launch, and of sentences for the reports, logged already."""
        self.reports += [sentence for sentence in reports if sentence not in self.reports]
        if self._mirrors is not None:
            self._mirrors.note_launch()

    def _warn_of_limits(self, leaves: Iterable[Leaf]) -> None:
        """Report each value above half of a limit, long before the limit stops a save."""
        for leaf in leaves:
            key = leaf.field, leaf.name
            is_long = len(leaf.value) > limits.TREE_ITEMS // 2
            if is_long and key not in self._near_limit and is_near_limit(leaf.value):
                self._near_limit.add(key)
                title = f"{leaf.field}:{leaf.name}"
                self._report(
                    f"LIMIT_NEAR: {title} has more than half of the {limits.TREE_ITEMS} values,"
                    " or of the"
                    f" {limits.TREE_NBYTES} bytes, that a plain value may have; put large data"
                    " into tensors or arrays"
                )

    # --- saving -----------------------------------------------------------------------------------

    def save(
        self,
        state: State,
        save: SaveState,
        *,
        must: bool = False,
        deadline_s: float | None = None,
        label: Callable[[], Labels] | None = None,
        to_home: bool = False,
        on_event: Callable[[SaveEvent], object] | None = None,
        hold: bool = False,
    ) -> SaveHandle:
        """Start a save, or make a whole save inline; every process calls this at the same step.

        The snapshot of an earlier call with `hold` is dropped once the new one is complete, or
        before if no other slot is free.

        Args:
            save: values of the save, as proposed by this process.
            must: whether to wait for a slot even if the policy is "skip", and to store the files at
                home.
            deadline_s: longest wait for a slot, in seconds; None for `deadline_s`.
            label: returns metrics and tags; called on writer 0.
            to_home: whether the files go home regardless of the cache. Writer 0's value counts.
            on_event: function for `SaveHandle.on_event`, also for a save with an error raised here.
            hold: whether the snapshot stays in memory, and is written only by `settle_held` and by
                the end of the saves. Without a free slot the save is skipped.

        After a failure of the storage the handle and the reports have the error. Only after more
        than `failed_saves` such failures in a row is the error raised.

        Raises: the error of an earlier failed save, once; the error that refuses this save.
        """
        begin_s = time.monotonic()
        background = self._find_background(state)
        waits = (must or self._saving.when_busy == "wait") and not hold
        timeout_s = self._deadline_s if deadline_s is None else deadline_s
        problem = self._wait_free(background, timeout_s if waits else None)
        path = save.store.name
        step = save.origin.step
        handle = SaveHandle(
            step=step,
            path=path,
            begin_s=begin_s,
            callbacks=self._callbacks,
            look=None if background is None else background.look,
        )
        if on_event is not None and not hold:
            handle.on_event(on_event)
        has_committed = self._has_committed()
        try:
            save, snapshot, told = agree_on_save(
                self._group,
                state,
                dataclasses.replace(save, deadline_s=self._deadline_s),
                ownership=self._ownership,
                # Else the saver checks.
                checks=save.run is None or (background is None and not hold),
                label=self._tag(label),
                unsaved=functools.partial(self._find_unsaved, state),
                say={
                    "durability": self._least_durability(to_home=must or to_home),
                    "failure": self._say_failure(),
                    "committed": has_committed,
                    "busy": problem is not None or (hold and background is None),
                },
            )
        except StoreError as error:  # from writer 0's check; all processes raise it
            self._fail_together(handle, error, must=must)
            return handle
        except CkptError as error:
            handle.tell_failed(error)
            raise
        self._raise_failure(told)
        self._report_on(snapshot)
        if any(theirs["busy"] for theirs in told):
            if waits:
                busy = problem or err(
                    Code.SLOTS_BUSY, "another writer has no free slot", where=path
                )
                self._fail_together(handle, busy, must=must)
                return handle
            if not hold:
                _LOG.warning("step %d SKIPPED: the saves before it aren't written yet", step)
            return SaveHandle(step=step, path=path, begin_s=begin_s, state="SKIPPED")
        if hold:
            self._on_held = on_event
        else:
            self._begun_count += 1
            self._note_begun(handle, save.origin)
        save = dataclasses.replace(save, durability=told[0]["durability"])
        self._write(background, save, snapshot, handle, state, hold=hold)
        handle.blocked_s = time.monotonic() - begin_s
        return handle

    def _find_background(self, state: State) -> Background | None:
        """Return the slots and the saver; None if the save is made inline."""
        if self._saving.saver != "inline" and self._background is None:
            self.prepare(state)
        background = self._background
        # Memory may be too short for slots.
        return background if background is not None and background.has_slots else None

    def _report_on(self, snapshot: Snapshot) -> None:
        """Report doubtful parts of a snapshot."""
        if UNREAD in snapshot.doubts:
            self._report(f"SAMPLER_UNREAD: {DATA_DOUBTS[UNREAD]}; a resume claims no T1")
        for sentence in self._ownership.position.reports:
            self._report(sentence)
        self._warn_of_limits(snapshot.leaves)

    def _note_begun(self, handle: SaveHandle, origin: Origin) -> None:
        self._last = handle, origin, os.getpid()
        self._undecided.append(handle)
        if self._mirrors is not None:
            self._mirrors.follow(handle)
        if self._home_copies is not None:
            self._home_copies.follow(handle)

    def settle_held(self, timeout_s: float, *, write: bool) -> None:
        """Write the snapshot in memory if all processes have it and want so, else drop it.

        Every process calls this.

        Args:
            timeout_s: longest wait for copies in progress, in seconds.
            write: whether this process wants the snapshot to be written.
        """
        background = self._background
        step = background.held_step(timeout_s) if write and background is not None else None
        told = self._group.all_gather(step)
        if background is None:
            return
        if step is not None and set(told) == {step}:
            self._note_released(background.release_held(step))
        background.drop_held()

    def _note_released(self, released: tuple[SaveHandle, Origin] | None) -> None:
        """Treat a snapshot that is written as a save."""
        if released is not None:
            handle, origin = released
            if self._on_held is not None:
                handle.on_event(self._on_held)
            self._note_begun(handle, origin)

    def _wait_free(
        self, background: Background | None, timeout_s: float | None
    ) -> CkptError | None:
        """Wait until a slot is free. If all are busy, a further slot is made.

        Args:
            background: the slots; None without any.
            timeout_s: longest wait in seconds; None to wait for nothing, not even a further slot.

        Returns: the error SLOTS_BUSY without a free slot, which all writers exchange; else None.
        """
        if background is None or not background.is_busy():
            return None
        if background.drop_held() and background.wait_free(_DROP_S) is None:
            return None
        background.begin_adding_slot(self._report)
        return background.busy_error(0.0) if timeout_s is None else background.wait_free(timeout_s)

    def _write(
        self,
        background: Background | None,
        save: SaveState,
        snapshot: Snapshot,
        handle: SaveHandle,
        state: State,
        *,
        hold: bool,
    ) -> None:
        """Hand an agreed save over to the saver, or make the save inline.

        A failure of the storage ends in the handle, and the other processes learn of the failure at
        the next save.

        Raises: any other failure, and each failure if `failed_saves` is 0.
        """
        try:
            is_begun = background is not None and self._save_beside(
                background, save, snapshot, handle, state, hold=hold
            )
            if hold and not is_begun:
                raise err(Code.SLOT_MEMORY, "there is no slot for it", where=handle.path)
            if not is_begun:
                self._save_inline(save, snapshot, handle)
        except CkptError as error:
            if hold:  # a later snapshot or save may succeed, or tells of the error
                handle.tell_failed(error)
                handle.tell_copied()
                _LOG.warning("no snapshot of step %d: %s", handle.step, error)
                return
            if not (
                self._saving.failed_saves
                and (error.code in _FOLLOWING or _is_of_storage(error.as_json()))
            ):
                handle.tell_failed(error)
                raise
            if handle.tell_failed(error):
                _LOG.error("step %d FAILED: %s", handle.step, error)
            handle.tell_copied()
            # The other processes learn of the failure at the next save, so that all counts agree.
            self._own_failures.append((save.origin.attempt, handle))

    def _least_durability(self, *, to_home: bool) -> str:
        """Return the least durability of this process's files at the commit."""
        if to_home or self._is_homes_turn():
            return HOME
        return NODE if self._replicas is None else PEERS

    def _is_homes_turn(self) -> bool:
        """Return whether the files of this save go home: always, if there is no cache."""
        cache = self._cache
        return cache is None or self._begun_count % cache.upload_every == 0

    def _save_inline(self, save: SaveState, snapshot: Snapshot, handle: SaveHandle) -> None:
        job = SaveJob(save, self._known)
        manifest = write_live(job, snapshot, self._ownership)
        handle.tell_copied()
        report = SaveReport.of(manifest, path=handle.path, reason="saved inline")
        handle.tell_state("COMMITTED", report)
        tell_committed(save.writer, report, handle.times["COMMITTED"])
        job.record()
        removed, problem = job.retain()
        if problem:
            _LOG.warning("%s", problem)
        handle.tell_over(tuple(removed))

    def _save_beside(
        self,
        background: Background,
        save: SaveState,
        snapshot: Snapshot,
        handle: SaveHandle,
        state: State,
        *,
        hold: bool,
    ) -> bool:
        """Start a save in the background.

        Returns: False if memory is too short for slots; then no save was started.
        """
        request = dump_request(save, Context.of(snapshot), self._delta)
        try:
            assert self._ownership.image is not None  # noqa: S101
            if not background.fits(self._ownership.image):  # the structure may have grown
                self._look_for_devices(snapshot)
                self._prepare_slots(background)
                if not background.has_slots:
                    return False
            background.save(
                save,
                request,
                handle,
                functools.partial(self._plan_copies, snapshot, handle, state),
                hold=hold,
            )
        except BaseException as error:
            # Interrupts included. The error is raised here; all writers can read of the failure in
            # the store.
            background.abandon(handle, save.origin.attempt, error)
            if not hold:  # no writer waits for a snapshot
                SaveJob(save).fail(error)
            raise
        return True

    def _plan_copies(
        self,
        snapshot: Snapshot,
        handle: SaveHandle,
        state: State,
        place: SaveSlot,
        view: memoryview,
    ) -> tuple[list[Copy], list[Copy]]:
        """Return the copies into a slot: copies to do now, and copies to do during the next step.

        The guard delays the optimizer's step until the second group is done.
        """
        image = self._ownership.image
        assert image is not None  # noqa: S101
        guard = self._guard_of(state)
        sources = snapshot.tensors
        constant: frozenset[TensorKey] = frozenset()
        for other in list(self._guards.values()):
            other.end_probation()  # the slot may have held any state
        if guard is not None:
            constant = guard.find_constant(sources)
        filling = None
        if self._delta.mode != "off":  # without deltas every block is copied, without checksums
            filling = self._fillings.begin(place.number, image, was_written=place.was_written)
        plan = plan_copies(
            snapshot,
            image,
            view,
            later=constant,
            devices=self._devices,
            filling=filling,
            takes_apart=guard is not None and guard.has_met_step,
        )
        later: list[Copy] = plan.later
        if guard is not None:
            later = guard.hold(later, sources, handle)
            guard.begin_probation(sources, image, view, without=plan.keys_apart)
        return plan.now, [*later, *plan.apart]

    def snapshots(self, timeout_s: float) -> dict[str, tuple[Memory, bool]]:
        """Wait for the saves in flight, and return the snapshots in memory, before a load.

        Args:
            timeout_s: longest wait in seconds.

        Returns: as `Background.snapshots`.
        Raises: CommitError(SAVE_PENDING).
        """
        background = self._background
        if background is None:
            return {}
        if not background.wait_over(timeout_s):
            detail = f"the saves in flight aren't over in {timeout_s:g} s"
            where = None if self._store is None else self._store.name
            raise err(Code.SAVE_PENDING, detail, where=where)
        for guard in list(self._guards.values()):
            guard.forget_copies()
        return background.snapshots()

    def regroup(self, timeout_s: float) -> tuple[dict[str, tuple[Memory, bool]], list[str]]:
        """Let go of the saves in flight, since other processes take the places of lost processes.

        The saves get some time to end by themselves: the saver of a lost process may live.

        Args:
            timeout_s: longest wait in seconds.

        Returns: as `Background.snapshots`; and the attempts whose contents of all processes are in
            the memory of this process.
        Raises: CommitError(SAVE_PENDING) if a snapshot is still being copied.
        """
        if self._background is not None:
            self._background.drop_held()  # the lost process's saver writes none, either
        self._failed_count = self._begun_count = 0
        self._undecided = []
        self._own_failures = []
        self._has_news = False
        background = self._background
        ownership = self._ownership
        ownership.is_new_group = True
        if background is None:
            return {}, []
        where = None if self._store is None else self._store.name
        gone = err(Code.WRITERS_MISSING, "a process was lost during the save", where=where)
        if not background.give_up(timeout_s, gone):
            detail = f"a snapshot isn't copied in {timeout_s:g} s"
            raise err(Code.SAVE_PENDING, detail, where=where)
        for guard in list(self._guards.values()):
            guard.forget_copies()
        # Equal structures on all processes: each process had all boxes, such as with DDP.
        are_equal = len(set(ownership.fingerprints)) == 1
        common = background.list_attempts(ownership.image) if are_equal else []
        return background.snapshots(), common

    def drop_snapshots(self) -> None:
        """Use no snapshot in memory any more: the next save copies all contents into its slot."""
        if self._background is not None:
            self._background.drop_snapshots()

    # --- failures, and the end --------------------------------------------------------------------

    def _next_failure(self, *, at_end: bool = False) -> tuple[str, CkptError] | None:
        """Return attempt and error of a failed save, if not yet raised or reported."""
        own = (
            (attempt, handle.error)
            for attempt, handle in self._own_failures
            if not handle.is_failure_taken
        )
        found = next(((attempt, error) for attempt, error in own if error is not None), None)
        if found is None and self._background is not None:
            found = self._background.next_failure(at_end=at_end)
        return found

    def _say_failure(self) -> dict[str, Any] | None:
        failure = self._next_failure()
        return None if failure is None else {"attempt": failure[0], "error": failure[1].as_json()}

    def _tag(self, label: Callable[[], Labels] | None) -> Callable[[], Labels] | None:
        """Return a function for the labels of a save, with the tags of each save."""
        tags = self._saving.tags
        if not tags:
            return label
        return lambda: (NO_LABELS if label is None else label()).tagged(tags)

    def _has_committed(self) -> bool:
        """Return whether a save was committed since the last exchange with the other processes."""
        undecided = self._undecided
        self._undecided = []
        for handle in undecided:
            state = handle.state
            if state in STATES[:-1]:
                self._undecided.append(handle)
            self._has_news |= state == "COMMITTED"
        return self._has_news

    def _raise_failure(self, told: list[Any]) -> None:
        """Raise or report the failure of an earlier save, on every process alike and only once."""
        self._has_news = False
        if told[0]["committed"]:
            self._failed_count = 0
        failures = [theirs["failure"] for theirs in told]
        for failure in failures:
            if failure is not None:
                self._note_told(failure["attempt"])
        own = failures[self._group.writer]
        first = own or next(filter(None, failures), None)
        if first is None:
            return
        errors = [failure["error"] for failure in failures if failure is not None]
        if not (
            any(map(_is_of_storage, errors))
            and all(_is_of_storage(e) or e["code"] in _FOLLOWING for e in errors)
        ):
            raise error_from_json(first["error"])
        self._count_failure(error_from_json(first["error"]))

    def _note_told(self, attempt: str) -> None:
        self._own_failures = [failure for failure in self._own_failures if failure[0] != attempt]
        if self._background is not None:
            self._background.note_told(attempt)

    def _fail_together(self, handle: SaveHandle, error: CkptError, *, must: bool = False) -> None:
        """Let a save fail before its start, for a reason known to all processes.

        Args:
            must: whether no later save replaces this save; then the error is raised.

        Raises: the error, unless `failed_saves` allows this failure of the storage.
        """
        handle.tell_failed(error)
        handle.tell_copied()
        if must or not _is_of_storage(error.as_json()):
            raise error
        self._count_failure(error)

    def _count_failure(self, error: CkptError) -> None:
        """Report a failure of the storage. Raises: the error, after too many failures in a row."""
        self._failed_count += 1
        most = self._saving.failed_saves
        if self._failed_count > most:
            raise error
        self.reports[:] = [report for report in self.reports if not report.startswith(_SAVE_FAILED)]
        self._report(
            f"{_SAVE_FAILED}a checkpoint is missing, and the training goes on: {error} The run"
            " saves again when the"
            f" next save is due, and ends when more than {most} saves in a row have failed"
            " (failed_saves=); it is"
            f" {self._failed_count} now"
        )

    def close(self, *, deadline_s: float, quietly: bool = False) -> None:
        """Wait for the saves in flight and their callbacks, then close the saver and the slots.

        A single process writes its snapshot in memory. The files of the last save are brought home
        from the cache.

        Args:
            deadline_s: longest wait in seconds.
            quietly: whether the caller already raises an error. Then a failure is logged instead of
                raised, and files in caches are left to the next start.

        Raises: the error of a failed save, if no caller was told of the failure;
            CommitError(SAVE_PENDING) if a save isn't over by the deadline.
        """
        end_s = time.monotonic() + deadline_s
        brought_home = None
        if self._background is not None:
            self._note_released(self._background.end_held(deadline_s))
        self.unheld.close()
        try:
            self._close_background(max(0.0, end_s - time.monotonic()), quietly=quietly)
            if not quietly:
                brought_home = self._bring_last_home(end_s)
        finally:
            if not self._callbacks.wait(max(_CALLBACKS_S, end_s - time.monotonic())):
                _LOG.warning("callbacks of saves aren't over when the saves are")
            if self._mirrors is not None:
                self._mirrors.close(max(0.0, end_s - time.monotonic()), brought_home)
            if self._home_copies is not None:
                self._home_copies.close(0.0 if quietly else max(0.0, end_s - time.monotonic()))
            if self._replicas is not None:
                self._replicas.close(max(0.0, min(_PARTNERS_S, end_s - time.monotonic())))

    def _bring_last_home(self, end_s: float) -> str | None:
        """Upload this process's files of the last save, if they may be in a cache only.

        No later save replaces the last save, so the files must reach home. A failed upload is
        reported; the next launch on this node tries again.

        Args:
            end_s: deadline by the monotonic clock, in seconds.

        Returns: the name of the checkpoint, if this process's files are at home now; else None.
        Spec: REQ-RUN-035.
        """
        if self._last is None:
            return None
        handle, origin, pid = self._last
        if handle.report is None or handle.report.durability == HOME or os.getpid() != pid:
            return None
        part = part_of(origin, self._group.writer)
        outcomes: list[tuple[bool | None, Exception | None]] = []
        # A thread bounds the wait: a request to an unresponsive store has no deadline.
        thread = threading.Thread(
            target=lambda: outcomes.append(attempt(lambda: self._upload_last(part, origin, end_s))),
            name="ckptfmt-bring-home",
            daemon=True,
        )
        thread.start()
        thread.join(max(0.0, end_s - time.monotonic()))
        late = err(
            Code.SAVE_PENDING,
            "its files aren't at home by the deadline",
            remedy="The next start brings them.",
        )
        is_there, error = outcomes[0] if outcomes else (None, late)
        if error is not None:
            self._report(f"CACHE_UNFINISHED: {part.name}: {as_ckpt_error(error)}")
        if not is_there:
            return None
        _LOG.info(
            "step %d is at home now, with the files of writer %d", handle.step, self._group.writer
        )
        return part.name

    def _upload_last(self, part: CachedPart, origin: Origin, end_s: float) -> bool:
        """Copy a save from the cache to home; return False for a save retired by a newer launch."""
        assert self._store is not None and self._cache is not None  # noqa: PT018, S101
        cache = NodeCache(self._cache, origin.run_id or "")
        home = self._store.at(part.name)
        with cache.hold(part):
            register = read_register(home)
            if not isinstance(register, Manifest) or register.origin != origin:
                return False
            cache.upload_files(part, home, deadline_s=max(0.0, end_s - time.monotonic()))
        return True

    def _close_background(self, deadline_s: float, *, quietly: bool) -> None:
        background = self._background
        self._background = None
        rest: list[SaveHandle] = []
        if background is not None:
            if self._finalizer is not None:
                self._finalizer.detach()
            try:
                rest = background.close(deadline_s)
            finally:
                for guard in list(self._guards.values()):
                    guard.close()
                self._guards.clear()
        problem = self._find_last_problem(background)
        if rest and problem is None:
            detail = (
                f"{len(rest)} saves aren't over {deadline_s:g} s after the checkpointer was closed"
            )
            problem = err(Code.SAVE_PENDING, detail, where=rest[0].path)
        if problem is not None and not quietly:
            raise problem
        if problem is not None:
            _LOG.error("%s", problem)

    def _find_last_problem(self, background: Background | None) -> CkptError | None:
        """Return the error of a failed save, if not yet raised or reported.

        If a later save is committed, the failure is reported instead of returned.
        """
        self._background = background
        try:
            while (failure := self._next_failure(at_end=True)) is not None:
                attempt, error = failure
                self._note_told(attempt)
                is_made_up_for = self._last is not None and self._last[0].state == "COMMITTED"
                if not (
                    self._saving.failed_saves and is_made_up_for and _is_of_storage(error.as_json())
                ):
                    return error
                self._report(
                    f"{_SAVE_FAILED}a checkpoint is missing, and a later one was saved: {error}"
                )
        finally:
            self._background = None
        return None


def _is_of_storage(error: Mapping[str, Any]) -> bool:
    """Return whether an error is the storage's fault, on this writer or on the named writer."""
    heard = error["code"] == Code.WRITER_FAILED and _HEARD.match(error["detail"])
    return (heard[1] if heard else error["code"]) in _STORAGE


def add_report(reports: list[str], sentence: str) -> None:
    """Log a sentence and add it to the reports, unless the reports contain it already."""
    if sentence not in reports:
        _LOG.warning("%s", sentence)
        reports.append(sentence)


def _replicate(replicas: Replicas, save: SaveState, answer: Callable[[str], None]) -> None:
    replicas.replicate(part_of(save.origin, save.writer), answer)


def _let_go(background: Background, guards: dict[int, Any]) -> None:
    for guard in list(guards.values()):
        guard.close()
    with contextlib.suppress(CkptError):
        background.let_go(_EXIT_S)

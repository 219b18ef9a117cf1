"""Background saves to paths outside of runs, of several states, through one saver and its slots."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, Self, SupportsFloat

from ckptfmt.commit.lone import (
    check_before_opening,
    check_removable,
    is_run,
    own_place,
    remove_alone,
)
from ckptfmt.documents.labels import Labels
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.group import DEADLINE_S, Agree, Group, check_deadline, make_group
from ckptfmt.run.save_job import SaveState, new_origin
from ckptfmt.saving.handle import SaveHandle, SaveReport
from ckptfmt.saving.saves import Saves, Saving
from ckptfmt.state import State, check_state
from ckptfmt.store import address_of, local_path, open_store
from ckptfmt.store.protocol import Store
from ckptfmt.store.symlinks import remove_link


class PathSaver:
    """A saver of any number of states to any number of paths, in the background.

    This class is for programs that choose the directory of each checkpoint themselves, such as a
    framework with its own file names. The saves belong to no run, and equal saves by
    `ckptfmt.save`. For a training loop use `Checkpointer`, which also resumes and applies
    retention.

    Every process of the job makes a `PathSaver` with the same arguments, and calls `save` for the
    same paths in the same order. The saver process finishes saves that are STAGED when this process
    ends, even after a crash.

    Pass the same `State` object for the same live objects each time: the saver learns for each
    state which tensors can be copied during the next step.

    Args:
        saver, overlap, when_busy, nice: the fields of `Saving`.
        writer, agree: the fields of `Job`. `agree` can't be a token,
            because a token needs a directory.
        slots: number of snapshots that fit into shared memory. A slot grows to the largest saved
            state.
        deadline_s: longest wait of the processes for each other, for a free slot, and for saves at
            the end, in seconds.

    Raises: StateError(ARGUMENT).

    >>> import ckptfmt, tempfile
    >>> saving = ckptfmt.PathSaver(saver="thread", slots=1)
    >>> with tempfile.TemporaryDirectory() as path, saving as saver:
    ...     handle = saver.save(f"{path}/last", ckptfmt.State(data={"position": 24}), step=3)
    ...     handle.wait().step
    3
    """

    def __init__(
        self,
        *,
        saver: Literal["process", "thread", "inline"] = "process",
        overlap: bool = True,
        slots: int = 2,
        when_busy: Literal["wait", "skip"] = "wait",
        nice: int = 0,
        writer: tuple[int, int] | None = None,
        agree: Agree = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if isinstance(agree, str):
            remedy = "Pass an all-gather of bytes, or None for torch.distributed."
            raise err(
                Code.ARGUMENT,
                "a PathSaver has no directory to meet in by a token",
                where="agree=",
                remedy=remedy,
            )
        check_deadline(deadline_s)
        self._saving = Saving(
            saver=saver,
            overlap=bool(overlap),
            slots=slots,
            when_busy=when_busy,
            nice=nice,
            failed_saves=0,
        )
        self._deadline_s = deadline_s
        self._writer = writer
        self._agree = agree
        #: Made by the first save, since the program may make a process group after this object.
        self._saves: Saves | None = None
        self._group: Group | None = None
        #: Handles of the saves that may not be over.
        self._handles: list[SaveHandle] = []
        self._is_closed = False

    @property
    def reports(self) -> tuple[str, ...]:
        """Sentences about requests that aren't carried out as asked, such as too few slots."""
        return () if self._saves is None else tuple(self._saves.reports)

    def __repr__(self) -> str:
        return (
            f"PathSaver(saver={self._saving.saver!r}, {len(self._in_hand())} saves in"
            f" hand{', closed' * self._is_closed})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        self._close(quietly=error is not None)

    def prepare(self, state: State) -> None:
        """Check the state, make and touch slots, and start the saver; every process calls this.

        The first save does the same. Call this method to choose the moment.

        Raises: StateError; LayoutError; CommitError(SAVER_LOST).
        """
        self._begin()[1].prepare(state)

    def save(
        self,
        path: str | os.PathLike[str] | Store,
        state: State,
        *,
        step: int,
        metrics: Mapping[str, SupportsFloat] | None = None,
        tags: Iterable[str] = (),
        replace: bool = False,
        on_committed: Callable[[SaveReport], object] | None = None,
        on_failed: Callable[[CkptError], object] | None = None,
    ) -> SaveHandle:
        """Start a save to a directory; every process calls this, with the same path and step.

        Saves are carried out in the order of the calls. The rules of `Checkpointer.save` for copies
        and for the training during a save apply here too.

        Args:
            path: directory of the checkpoint, made if missing; or a store rooted there, which needs
                another `saver` than "process".
            state: objects to save.
            step: number of training steps done.
            metrics, tags, replace: see `ckptfmt.save`.
            on_committed, on_failed: as the methods of `SaveHandle`. `on_failed` doesn't get an
                error that this call raises.

        Returns: the handle. A failure is raised by a wait for the handle, or by the next `save`,
            `wait` or `close`.
        Raises: CommitError(CHECKPOINT_EXISTS) if the path has a checkpoint or is part of a run, or
            another save to the path is in progress; the error of an earlier save, if not raised
            yet; CommitError(SLOTS_BUSY); other errors as `ckptfmt.save`.
        Spec: REQ-CMT-001 to REQ-CMT-009.
        """
        check_state(state)
        group, saves = self._begin()
        if replace:
            group.run_on_first(lambda: own_place(path))
        store = group.together(lambda: self._open(path, replace=replace))
        handle = saves.save(
            state,
            SaveState(store=store, origin=new_origin(step=step), replace=replace),
            label=functools.partial(Labels.of, metrics, tags),
        )
        if on_committed is not None:
            handle.on_committed(on_committed)
        if on_failed is not None:
            handle.on_failed(on_failed)
        self._handles = [*self._in_hand(), handle]
        return handle

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all started saves are over.

        Args:
            timeout_s: longest wait in seconds; None for no limit.

        Raises: the error of a failed save, if not raised yet; CommitError(SAVE_PENDING) at the
            timeout.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        for handle in self._in_hand():
            handle.wait(timeout_s=None if end_s is None else max(0.0, end_s - time.monotonic()))
            handle.wait_over(None if end_s is None else max(0.0, end_s - time.monotonic()))

    def remove(self, path: str | os.PathLike[str] | Store) -> None:
        """Remove a checkpoint that belongs to no run; one process calls this.

        The method waits for saves to this path, by this object and by savers of other processes.
        From the first change on the rest is no checkpoint, and readers report CHECKPOINT_RETIRED. A
        second `remove` removes the rest after an interruption. Other files in the directory stay,
        and the directory then stays too. If the path is a symbolic link, only the link is removed.

        Raises: IntegrityError(NOT_COMMITTED) if the path has no part of a checkpoint;
            StateError(ARGUMENT) for a run or a checkpoint of a run; CommitError(SAVE_PENDING) at
            the deadline; StoreError.
        Spec: REQ-CMT-045.
        """
        here = local_path(path)
        if here is not None and remove_link(here):
            return
        place = open_store(path, writable=False)
        check_removable(place, is_in_run=is_run(place))
        deadline_s = self._deadline_s
        for handle in self._in_hand():
            if handle.path == place.name and not handle.wait_over(deadline_s):
                detail = (
                    f"the save of step {handle.step} to this path isn't over after {deadline_s:g} s"
                )
                raise err(Code.SAVE_PENDING, detail, where=handle.path)
        remove_alone(open_store(path, writable=True), deadline_s=deadline_s)
        if isinstance(path, str | os.PathLike):
            with contextlib.suppress(OSError):  # the directory may have other files
                Path(place.name).rmdir()

    def close(self) -> None:
        """Wait for the saves in flight, and close the saver. Later saves are refused.

        Raises: the error of a failed save, if not raised yet; CommitError(SAVE_PENDING) if a save
            isn't over by the deadline. A saver process continues with that save.
        """
        self._close(quietly=False)

    def _close(self, *, quietly: bool) -> None:
        self._is_closed = True
        if self._saves is not None:
            self._saves.close(deadline_s=self._deadline_s, quietly=quietly)

    def _begin(self) -> tuple[Group, Saves]:
        if self._is_closed:
            raise err(Code.ARGUMENT, "this PathSaver is closed", remedy="Make another one.")
        if self._saves is None or self._group is None:
            self._group = make_group(self._writer, self._agree, None, deadline_s=self._deadline_s)
            self._saves = Saves(None, self._group, self._saving, deadline_s=self._deadline_s)
        return self._group, self._saves

    def _open(self, path: str | os.PathLike[str] | Store, *, replace: bool) -> Store:
        """Return the store of a path, unless a save that can't be replaced is in progress."""
        check_before_opening(path)
        store = open_store(path, writable=True)
        if self._saving.saver == "process" and address_of(store) is None:
            remedy = "Pass saver='thread' or saver='inline'."
            detail = f"a {type(store).__qualname__} can't be handed to a saver's process"
            raise err(Code.ARGUMENT, detail, where="path=", remedy=remedy)
        same = [handle for handle in self._in_hand() if handle.path == store.name]
        if same and not replace:
            detail = f"step {same[0].step} is being saved to this path"
            remedy = "Wait for that save, or save to another path."
            raise err(Code.CHECKPOINT_EXISTS, detail, where=os.fspath(store.name), remedy=remedy)
        return store

    def _in_hand(self) -> list[SaveHandle]:
        return [handle for handle in self._handles if not handle.is_over]

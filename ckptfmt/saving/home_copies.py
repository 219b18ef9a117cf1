"""The copies of a launch's commits to the further homes of a run, beside the training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from ckptfmt.commit.waiting import poll
from ckptfmt.documents.run import VOTES, Launch, RunRecord
from ckptfmt.run.homes import HomePlace, majority_of
from ckptfmt.run.retention import Retention, tidy_up
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.saving.mirrors import Mirrors
from ckptfmt.store.protocol import Store

#: Longest time for the rest of the homes once a majority has all commits, in seconds.
_GRACE_S: Final = 5.0


class HomeCopies:
    """The copies of a launch's commits to the further homes of the run, a thread for each home.

    Args:
        home: home at which the launch commits.
        others: the further homes.
        reports: list to which a sentence is added for each problem.
    """

    def __init__(self, home: Store, others: Sequence[HomePlace], reports: list[str]) -> None:
        self._needed_count = majority_of(len(others) + 1) - 1
        self._copies = [
            Mirrors(
                home,
                [other],
                reports,
                opens=_open,
                are_homes=True,
                repeats=True,
                tidy=self._tidy,
            )
            for other in others
        ]
        self._launch: tuple[RunRecord, Launch, Retention] | None = None

    def begin(self, run: RunRecord, launch: Launch, retention: Retention) -> None:
        """Start a copy to each home at the begin of a launch.

        The checkpoint from which the launch resumes may be at a single home.

        Args:
            retention: rule by which checkpoints stay at each home.
        """
        self._launch = run, launch, retention
        self.start()

    def start(self) -> None:
        """Start a copy to each home, after a copy in progress."""
        for copy in self._copies:
            copy.start()

    def follow(self, handle: SaveHandle) -> None:
        """Copy the checkpoints at the end of a save; a failed save may be committed, too."""
        handle.call_at_end(self.start)

    def stop(self) -> None:
        """Begin no further copy, and end the copies in progress soon."""
        for copy in self._copies:
            copy.stop()

    def close(self, deadline_s: float) -> None:
        """Wait until a majority of the homes has all commits, at most until the deadline.

        Homes that are still behind get `_GRACE_S` more within the deadline, and are reported.
        """
        end_s = time.monotonic() + deadline_s
        for _ in poll(max(0.0, deadline_s - _GRACE_S)):
            overtaken_count = sum(copy.is_overtaken for copy in self._copies)
            if len(self._copies) - overtaken_count < self._needed_count:
                break
            if sum(not copy.is_behind for copy in self._copies) >= self._needed_count:
                break
        end_s = min(end_s, time.monotonic() + _GRACE_S)
        for copy in self._copies:
            copy.close(max(0.0, end_s - time.monotonic()))

    def _tidy(self, store: Store) -> str:
        """Retire checkpoints at a home, by the rule of the saves and the records there."""
        assert self._launch is not None  # noqa: S101
        run, launch, retention = self._launch
        return tidy_up(store, run, launch=launch.launch, retention=retention, aborts=False)[1]


def _open(home: HomePlace) -> Store:
    """Return the store of a home, after an answer: a silent home costs no look at the run."""
    store = home.open()
    store.list_names(VOTES)
    return store

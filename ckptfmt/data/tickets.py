"""Tickets of samples: issued ahead, and consumed or discarded later, in any order.

A launch begins with the open positions of the cursor and with all positions from the cursor's
`global_pos` on. Worker i of w takes each w-th open position, beginning with the i-th, and then the
positions ``global_pos + i``, ``global_pos + i + w`` and so on. So no exchange is necessary before a
sample is issued. At a save, the shares of all workers are merged into a single cursor, which
no longer depends on the workers.

Spec: REQ-PIP-001 to REQ-PIP-004.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.data.course import (
    COUNTS,
    EMPTY,
    Course,
    add_ledgers,
    ledger_of_samples,
    list_bounds,
    list_positions,
)  # fmt: skip
from ckptfmt.data.cursor import Ledger, Pipeline
from ckptfmt.errors import CkptError, Code, err

#: Number of tickets prepared at once.
_READY: Final = 256
#: Attempts to find a position with a counting sample, before the order counts as empty.
_EMPTY_READS: Final = 1 << 12
_WHERE: Final = "tickets"


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """A sample handed out by `Sampler.issue`.

    Attributes:
        position: position of the sample in the order of the run; equal in every launch.
        source: name of the data set.
        sample: number of the sample in the data set.
        epoch: epoch of the data set.
        launch: random number of the issuing sampler. A load changes the number, and
            makes older tickets invalid.
    """

    position: int
    source: str
    sample: int
    epoch: int
    launch: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The samples of a run before a launch: open positions and digests."""

    position: int = 0
    open: tuple[int, ...] = ()
    ledger: Ledger = EMPTY
    discarded: Ledger = EMPTY


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The samples issued and finished by a worker in a launch.

    Attributes:
        worker: number of the worker.
        worker_count: number of workers.
        begin: position at which the launch began.
        next: first position from `begin` on, not issued by this worker.
        top: end of the positions from `begin` on, issued by this worker.
        open: open positions of this worker, as begins and ends of ranges.
        ledger, discarded: samples consumed and discarded by this worker in this launch.
        is_untouched: whether this worker has issued nothing.
    """

    worker: int
    worker_count: int
    begin: int
    next: int
    top: int
    open: tuple[int, ...]
    ledger: Ledger
    discarded: Ledger
    is_untouched: bool

    def as_json(self) -> dict[str, Any]:
        """Return the share as a JSON value, with positions as strings."""
        return {
            **dataclasses.asdict(self),
            "begin": str(self.begin),
            "next": str(self.next),
            "top": str(self.top),
            "open": [str(bound) for bound in self.open],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Share:
        """Return the share of a JSON value."""
        positions = {name: int(value[name]) for name in ("begin", "next", "top")}
        ledgers = {name: Ledger(**value[name]) for name in ("ledger", "discarded")}
        return cls(**{**value, **positions, **ledgers, "open": tuple(map(int, value["open"]))})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The samples of a run up to now, from the shares of all workers.

    `is_untouched`: whether no worker has issued a sample in the launch.
    """

    position: int
    ledger: Ledger
    pipeline: Pipeline
    is_untouched: bool


class Tickets:
    """The tickets of a worker in a launch. All methods may be called by several threads.

    Args:
        begin: the samples of the run before this launch.
    """

    def __init__(self, begin: Begin) -> None:
        self.begin = begin
        self._launch = secrets.randbits(63)
        self._lock = threading.Lock()
        self._worker: tuple[int, int] | None = None
        #: This worker's positions of `begin.open`, except those in `_ready`.
        self._again: deque[int] = deque()
        #: First position behind `_ready`, from `begin.position` on.
        self._unread = begin.position
        #: First position from `begin.position` on without an issue.
        self._next = begin.position
        self._top = begin.position
        self._ready: deque[Ticket] = deque()
        #: Tickets neither consumed nor discarded, in the order of issue.
        self._outstanding: dict[int, Ticket] = {}
        #: Tickets consumed by the step before its count.
        self._consumed: dict[int, Ticket] = {}
        self._ledger = EMPTY
        self._discarded = EMPTY
        self._is_untouched = True
        self._is_answered = False

    @property
    def is_untouched(self) -> bool:
        """Whether no ticket was issued."""
        return self._is_untouched

    @property
    def is_answered(self) -> bool:
        """Whether a ticket was consumed or discarded."""
        return self._is_answered

    @property
    def top(self) -> int:
        """The end of the issued positions."""
        return self._top

    def outstanding(self) -> list[Ticket]:
        """Return the tickets neither consumed nor discarded, in the order of issue."""
        with self._lock:
            return list(self._outstanding.values())

    def issue(
        self, count: int, *, course: Course, names: Sequence[str], worker: tuple[int, int]
    ) -> list[Ticket]:
        """Return tickets for this worker's next samples.

        Raises: StateError(ARGUMENT).
        """
        with self._lock:
            if count + len(self._outstanding) + len(self._consumed) > limits.OPEN_POSITIONS:
                raise err(
                    Code.ARGUMENT,
                    f"{len(self._outstanding)} tickets are neither consumed nor discarded, and"
                    f" {count} more would exceed {limits.OPEN_POSITIONS}",
                    where=_WHERE,
                    remedy="Call consume() for trained tickets, and discard() for given-up ones.",
                )
            self._start(worker)
            while len(self._ready) < count:
                self._read(max(_READY, count - len(self._ready)), course, names)
            self._is_untouched = False
            tickets = [self._ready.popleft() for _ in range(count)]
            self._outstanding.update((ticket.position, ticket) for ticket in tickets)
            new = [ticket.position for ticket in tickets if ticket.position >= self.begin.position]
            if new:
                self._top = new[-1] + 1
                self._next = new[-1] + worker[1]
            return tickets

    def consume(self, tickets: Iterable[Ticket]) -> None:
        """Record the tickets as trained in the step before its count.

        Raises: StateError(ARGUMENT). Then no ticket was recorded.
        """
        with self._lock:
            taken = self._check(tickets)
            self._consumed.update(taken)
            self._finish(taken)

    def discard(self, tickets: Iterable[Ticket]) -> None:
        """Record tickets without a step in the future. Raises: as `consume`."""
        with self._lock:
            taken = self._check(tickets)
            self._discarded = add_ledgers(self._discarded, _ledger_of(taken.values()))
            self._finish(taken)

    def commit(self) -> None:
        """Record the end of a step: the consumed tickets are in the ledger from now on."""
        with self._lock:
            self._ledger = add_ledgers(self._ledger, _ledger_of(self._consumed.values()))
            self._consumed = {}

    def forget_ready(self) -> None:
        """Drop the prepared samples from the first position on without an issue.

        Called after a change of the course.
        """
        with self._lock:
            old = [one for one in self._ready if one.position < self.begin.position]
            self._ready = deque(old)
            self._unread = self._next

    def share(self, worker: tuple[int, int]) -> Share:
        """Return this worker's share of the launch's samples."""
        with self._lock:
            self._start(worker)
            again = [one.position for one in self._ready if one.position < self.begin.position]
            pending = [*self._outstanding, *self._consumed, *again, *self._again]
            return Share(
                worker=worker[0],
                worker_count=worker[1],
                begin=self.begin.position,
                next=self._next,
                top=self._top,
                open=tuple(list_bounds(sorted(pending))),
                ledger=self._ledger,
                discarded=self._discarded,
                is_untouched=self._is_untouched,
            )

    def _start(self, worker: tuple[int, int]) -> None:
        """Take this worker's samples of the launch, at the first call."""
        if self._worker is None:
            self._worker = worker
            number, count = worker
            self._again.extend(list_positions(self.begin.open)[number::count])
            self._unread = self._next = self.begin.position + number
        elif self._worker != worker:
            raise err(
                Code.ARGUMENT,
                f"tickets were issued as worker {self._worker[0]} of {self._worker[1]}, and this is"
                f" worker {worker[0]} of {worker[1]}",
                where=_WHERE,
                remedy="Initialise torch.distributed before the first ticket, or pass worker=.",
            )

    def _read(self, count: int, course: Course, names: Sequence[str]) -> None:
        """Prepare up to `count` tickets, but not zero."""
        _, stride = self._worker or (0, 1)
        for _ in range(_EMPTY_READS):
            if self._again:
                positions = [self._again.popleft() for _ in range(min(count, len(self._again)))]
            else:
                positions = list(range(self._unread, self._unread + count * stride, stride))
                self._unread += count * stride
            rows = course.at(positions)
            counting = np.flatnonzero(rows.uses == COUNTS).tolist()
            sources = rows.sources.tolist()
            samples = rows.samples.tolist()
            epochs = rows.epochs.tolist()
            self._ready.extend(
                Ticket(positions[i], names[sources[i]], samples[i], epochs[i], self._launch)
                for i in counting
            )
            if counting:
                return
        raise err(
            Code.ARGUMENT,
            f"no sample counts among {_EMPTY_READS * count} positions",
            where=_WHERE,
            remedy="Leave fewer samples out with Sampler.skip.",
        )

    def _check(self, tickets: Iterable[Ticket]) -> dict[int, Ticket]:
        """Return tickets by position. Raises: StateError(ARGUMENT) for the first invalid ticket."""
        taken: dict[int, Ticket] = {}
        for ticket in tickets:
            if type(ticket) is not Ticket:
                raise _refusal(f"{ticket!r:.80} isn't a ticket of Sampler.issue")
            at = f"the ticket of position {ticket.position}"
            if ticket.launch != self._launch:
                raise _refusal(
                    f"{at} was issued by another launch, or before load_state_dict",
                    "Take tickets of this launch: issue() returns open positions first.",
                )
            if ticket.position in taken:
                raise _refusal(f"{at} is given twice")
            if self._outstanding.get(ticket.position) != ticket:
                known = ticket.position < self._top
                raise _refusal(
                    f"{at} was consumed or discarded already" if known else f"{at} wasn't issued",
                    "Call consume() or discard() once for each ticket.",
                )
            taken[ticket.position] = ticket
        return taken

    def _finish(self, taken: Iterable[int]) -> None:
        for position in taken:
            del self._outstanding[position]
            self._is_answered = True


def _refusal(detail: str, remedy: str = "Pass tickets as issue() returned them.") -> CkptError:
    return err(Code.ARGUMENT, detail, where=_WHERE, remedy=remedy)


def _ledger_of(tickets: Iterable[Ticket]) -> Ledger:
    groups: dict[tuple[str, int], list[int]] = {}
    for ticket in tickets:
        groups.setdefault((ticket.source, ticket.epoch), []).append(ticket.sample)
    total = EMPTY
    for (source, epoch), samples in groups.items():
        total = add_ledgers(total, ledger_of_samples(source, epoch, np.array(samples, np.int64)))
    return total


def merge_shares(shares: Iterable[Share], begin: Begin, course: Course) -> Merged:
    """Return the samples of the run up to now, from the shares of all workers of a launch.

    Args:
        shares: the share of each process; processes with the same worker number have equal shares,
            or a single process with this number has issued samples.
        begin: the samples of the run before the launch.
        course: the order of samples.

    Raises: StateError(ARGUMENT); LayoutError(WRITERS_DIVERGED) for shares of different
        launches.
    """
    by_worker = _by_worker(shares, begin)
    stride = len(by_worker)
    top = max(share.top for share in by_worker)
    late = sum(len(range(share.next, top, stride)) for share in by_worker)
    pending = [position for share in by_worker for position in list_positions(share.open)]
    if late + len(pending) > limits.OPEN_POSITIONS:
        slowest = min(by_worker, key=lambda share: share.next)
        raise err(
            Code.ARGUMENT,
            f"{late + len(pending)} positions are open, more than {limits.OPEN_POSITIONS}; worker"
            f" {slowest.worker} of {stride} has issued the fewest samples",
            where=_WHERE,
            remedy="Issue on every worker; or let one process issue for all, with worker=(0, 1) and"
            " State(data=FirstWorker(sampler)).",
        )
    unissued = sorted(p for share in by_worker for p in range(share.next, top, stride))
    counting = np.flatnonzero(course.at(unissued).uses == COUNTS).tolist()
    pending += [unissued[i] for i in counting]
    ledger = begin.ledger
    discarded = begin.discarded
    for share in by_worker:
        ledger = add_ledgers(ledger, share.ledger)
        discarded = add_ledgers(discarded, share.discarded)
    return Merged(
        position=top,
        ledger=ledger,
        pipeline=Pipeline(open=tuple(list_bounds(sorted(pending))), discarded=discarded),
        is_untouched=all(share.is_untouched for share in by_worker),
    )


def _by_worker(shares: Iterable[Share], begin: Begin) -> list[Share]:
    """Return a share for each worker, by number."""
    found: dict[int, Share] = {}
    counts = set()
    for share in shares:
        counts.add(share.worker_count)
        if share.begin != begin.position:
            detail = f"tickets of positions {begin.position} and {share.begin} on, in one launch"
            raise err(Code.WRITERS_DIVERGED, detail, where=_WHERE)
        known = found.setdefault(share.worker, share)
        if known == share or share.is_untouched:
            continue
        if not known.is_untouched:
            raise err(
                Code.ARGUMENT,
                f"two processes issued different tickets as worker {share.worker}",
                where=_WHERE,
                remedy="Of processes with the same worker=, let one issue tickets, and pass the"
                " samples on to the others.",
            )
        found[share.worker] = share
    if len(counts) != 1 or sorted(found) != list(range(counts.pop())):
        raise err(
            Code.WRITERS_DIVERGED,
            f"tickets of the workers {sorted(found)} in one save",
            where=_WHERE,
            remedy="Give the sampler in the State of every process that issues tickets.",
        )
    return [found[number] for number in sorted(found)]

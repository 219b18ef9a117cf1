"""The order in which a run sees its data: shuffled, endless, the same on any number of workers, resumable."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Final, Self

from ckptfmt import limits
from ckptfmt.data.course import COUNTS, EMPTY, HOLE, Course, Stretch, add_ledgers, check_order
from ckptfmt.data.shuffle import sample_indices
from ckptfmt.data.workers import check_worker, count_primed, distributed_worker
from ckptfmt.documents.cursor import (
    BatchPlan,
    Commit,
    Cursor,
    Ledger,
    Mixture,
    Order,
    Source,
    Tail,
    VectorCheck,
    dump_cursor,
    parse_cursor,
    parse_mixture,
)  # fmt: skip
from ckptfmt.documents.cursor_map import CursorMap, Policy, PosSkip, SampleSkip, ShardSkip, Skip
from ckptfmt.errors import CkptError, Code, err

#: Positions after which `advance` brings the ledger up to date, so that a save never has to catch up with many.
_LEDGER_LAG: Final = 1 << 16
#: More batches than any loader fetches ahead: who fetched as many and never counted a step has forgotten to.
_AHEAD_MAX: Final = 512
#: Where a wrong number of steps is said.
_STEPS: Final = "Sampler"
#: An iterator that served one step and was given up held this many shares that were never trained: no loop prefetches
#: so far for a single step.
_GIVEN_UP_MIN: Final = 2


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Fetches:
    """The pieces that one iterator of a sampler handed out; a piece is a step's part of a worker, or a micro-batch.

    Attributes:
        first_step: the step of the first piece.
        primed: the number of pieces that a DataLoader requests for its worker processes before the first batch.
        taken: the number of pieces handed out.
        threads: the threads that requested pieces.
        counted_step: the number of steps done at the last count.
        counted_taken: the number of pieces handed out at the last count.
        first_spare: the number of pieces, beyond those of the steps done, that were fetched at the first count.
        spare: the same number at the last count.
        mark: the value that `Sampler.note_fetch` returned for the last piece.
    """

    first_step: int
    primed: int
    taken: int = 0
    threads: set[int] = dataclasses.field(default_factory=set)
    counted_step: int
    counted_taken: int
    first_spare: int | None = None
    spare: int = 0
    mark: object = None

    def begin_at(self, step: int) -> Self:
        """Begin anew at a step."""
        self.first_step = self.counted_step = step
        self.taken = self.counted_taken = self.spare = 0
        self.first_spare = None
        return self

    @property
    def is_in_hand(self) -> bool:
        """Whether the loop has taken a batch of a step that isn't counted, from an iterator that it has begun."""
        return self.taken > self.primed and self.counted_step == self.first_step


@dataclasses.dataclass(slots=True, kw_only=True)
class _Progress:
    """Where the run stands since it began or a cursor was loaded."""

    first_step: int = 0
    first_position: int = 0
    steps_done: int = 0
    steps_fetched: int = 0
    #: Whether a batch was asked for, by iterating or by number.
    read: bool = False
    #: Whether `advance` or `commit` was ever called.
    told: bool = False
    #: The iterators that are alive.
    fetches: list[_Fetches] = dataclasses.field(default_factory=list)
    #: The iterator that served the last step that was counted; and those that moved since, in this order.
    serving: _Fetches | None = None
    moved: list[_Fetches] = dataclasses.field(default_factory=list)
    #: The ledger of the positions before `counted_to`.
    counted: Ledger = EMPTY
    counted_to: int = 0
    #: The parts of this worker that were read, of steps that aren't done, by step.
    drawn: dict[int, Stretch] = dataclasses.field(default_factory=dict)


class Sampler:
    """Yield this worker's part of each step's samples, step after step, and know which steps are done.

    It is a `batch_sampler` for a map-style DataLoader, ``DataLoader(dataset, batch_sampler=sampler)``, without torch.

    **Order.** The order is a pure function of `seed`: epoch after epoch without end, each a permutation
    (``feistel-v1``) in which every sample stands once. Step s takes the next `global_batch` positions, and worker i
    of w the contiguous slice from ``i * global_batch // w`` to ``(i + 1) * global_batch // w`` of them: so the
    samples of a step don't depend on w.

    **Tail.** There is no short batch: one that reaches the end of an epoch goes on with the next (``carry``), unless
    `tail` says that the rest of an epoch is left out (``drop``), or that its last batch is filled up with samples of
    weight zero (``pad_masked``).

    **Several sources.** Given a mapping from names to data sets, and a `mixture`, each block of positions has so many
    samples of each source, in an order of its own; each source has its own endless order. Batches are then lists of
    name and sample.

    **Skips.** `skip` leaves out samples, shards or positions, from a position on that no step has consumed. Past it, a
    batch may be shorter (``hole``) or have samples of weight zero (``mask``): see `weights` and `weight_sum`.

    **Position.** A batch that was fetched isn't consumed. The cursor moves when a step is said to be done: by a
    `Checkpointer` for the samplers of its `State` (don't call `advance` beside one), else by `commit` or `advance`.
    Iterators start at the cursor; those from before a `load_state_dict` are refused: what they prefetched isn't due.

    Args:
        dataset: the data set, or its number of samples; with a mixture, a mapping from names to these.
        global_batch: positions per step, over all workers; at least as many as workers.
        seed: of the order, 64 bits. A cursor of another seed is refused.
        worker: this worker's number and how many there are. Left out: rank and world size of torch.distributed where it
            is initialised by the time of the first batch, else the only worker. Workers that must see the same samples
            (tensor or pipeline parallel) pass the data-parallel rank and size.
        source: a name of the data set; it enters the ledger. In a mixture, the names are those of the mapping.
        fingerprint: of the data set's contents, by any means of the caller's; a cursor with another is refused. With a
            mixture, a mapping from names to these.
        mixture: how many positions of a block each source has; their sum is the block. Or several such, by the position
            from which on each holds: ``{0: {"books": 3, "code": 1}, 4096: {"books": 1, "code": 3}}``.
        tail: ``carry``, ``drop`` or ``pad_masked``; a mixture has ``carry``.
        micro_batches: in how many pieces, one after the other, the iterator hands out each step's part of a worker, for
            loops that accumulate gradients. A step is still counted once; `indices` has all of its samples.

    Raises: StateError(ARGUMENT).

    >>> sampler = Sampler(10, global_batch=4, seed=0, worker=(0, 2))
    >>> batches = iter(sampler)
    >>> next(batches), next(batches), sampler.steps_done
    ([3, 1], [8, 5], 0)
    >>> sampler.advance()
    >>> next(iter(sampler))
    [8, 5]
    >>> mixed = Sampler({"books": 10, "code": 5}, mixture={"books": 3, "code": 1}, global_batch=4, worker=(0, 1))
    >>> sorted(name for name, sample in next(iter(mixed)))
    ['books', 'books', 'books', 'code']
    """

    #: Called before each piece is handed out by iterating; see `drawn_in_hand`.
    note_fetch: Callable[[], object] | None = None

    def __init__(
        self,
        dataset: int | Sized | Mapping[str, int | Sized],
        *,
        global_batch: int,
        seed: int = 0,
        worker: tuple[int, int] | None = None,
        source: str = "data",
        fingerprint: str | Mapping[str, str] | None = None,
        mixture: Mapping[str, int] | Mapping[int, Mapping[str, int]] | None = None,
        tail: Tail = "carry",
        micro_batches: int = 1,
    ) -> None:
        for name, number in (("global_batch", global_batch), ("micro_batches", micro_batches)):
            if not hasattr(number, "__index__") or not 1 <= number <= limits.DIM:
                remedy = "Pass a whole number."
                raise err(Code.ARGUMENT, f"{name}={number!r} isn't from 1 to {limits.DIM}", where=name, remedy=remedy)
        check_worker(worker or (0, 1), global_batch // micro_batches)
        self._sources = _sources(dataset, fingerprint, source, is_mixed=mixture is not None)
        for one in self._sources:
            sample_indices(one.n, seed=seed, begin=0, end=1)  # refuses a length or a seed out of range
        self._plan = BatchPlan(global_batch=global_batch, tail=tail)
        self._seed = seed
        self._mixture = None if mixture is None else _mixture(mixture, seed, self._sources)
        self._skips: tuple[Skip, ...] = ()
        self._worker, self._micro_batches = worker, micro_batches
        self._loaded: Cursor | None = None
        #: Whether something was skipped since the sampler was made or a cursor was loaded.
        self.has_new_skips = False
        self._progress = _Progress()
        self._course = self._try_course(self._skips)

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], *, worker: tuple[int, int] | None = None) -> Sampler:
        """Return a sampler that goes on from a cursor, with the data sets, order, mixture and tail that this names.

        It is for programs that hold nothing against the cursor; one that knows its data makes a sampler of it and calls
        `load_state_dict`, which refuses the cursor of other data.

        Raises: FormatError(CURSOR_FORM), UnsupportedError; StateError(ARGUMENT) for the worker.
        Spec: REQ-CUR-006, REQ-CUR-014.

        >>> sampler = Sampler(10, global_batch=4, seed=0, worker=(0, 1))
        >>> sampler.advance()
        >>> Sampler.from_state_dict(sampler.state_dict(), worker=(1, 2)).indices(1)
        [9, 6]
        """
        cursor = parse_cursor(dict(state_dict))
        mixture = cursor.mixture
        sampler = cls(
            cursor.sources[0].n if mixture is None else {source.id: source.n for source in cursor.sources},
            global_batch=cursor.plan.global_batch,
            seed=cursor.order.seed,
            worker=worker,
            source=cursor.sources[0].id,
            mixture=None if mixture is None else {stage.from_pos: stage.counts for stage in mixture.stages},
            tail=cursor.plan.tail,
        )
        sampler._mixture = mixture  # its seed may be another one than the order's
        sampler.load_state_dict(state_dict)
        return sampler

    @property
    def steps_done(self) -> int:
        """The number of steps that are done, over the whole run."""
        return self._progress.steps_done

    @property
    def position(self) -> int:
        """The number of positions that the steps done have consumed, over all workers and the whole run.

        They are as many samples, unless some were skipped or filled up a batch.
        """
        return self._position_of(self.steps_done)

    @property
    def is_unread(self) -> bool:
        """Whether steps were said to be done, and no batch was ever asked for: by iterating, or by `indices`."""
        progress = self._progress
        return progress.steps_done > progress.first_step and not progress.read

    def __repr__(self) -> str:
        sizes = ", ".join(f"{source.id}: {source.n}" for source in self._sources)
        return (
            f"Sampler({sizes}, global_batch={self._plan.global_batch}, seed={self._seed}, steps_done={self.steps_done})"
        )

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield this worker's samples of each step that isn't done yet, or of its micro-batches, without end.

        The first step is that of the cursor when the first batch is asked for.

        Raises: StateError(ARGUMENT) when a cursor was loaded since the first batch, or a skip begins before what was
            fetched, or there are more workers than samples in a batch; StateError(WRITERS_UNKNOWN).
        """
        progress, first, count = self._progress, self.steps_done, self._micro_batches
        fetches = _Fetches(first_step=first, primed=count_primed(), counted_step=first, counted_taken=0)
        progress.fetches.append(fetches)
        indices: list[Any] = []
        step = first
        piece = 0
        try:
            while True:
                if progress is not self._progress:
                    if fetches not in self._progress.fetches:
                        detail = "load_state_dict or skip was called after this iterator's first batch"
                        raise err(
                            Code.ARGUMENT, detail, remedy="Restore and skip first, then call iter() on the loader."
                        )
                    progress = self._progress
                    step = self.steps_done
                    piece = 0
                if piece == 0:
                    indices = self.indices(step)
                    progress.steps_fetched = max(progress.steps_fetched, step + 1)
                fetches.taken += 1
                fetches.threads.add(threading.get_ident())
                if not progress.moved or progress.moved[-1] is not fetches:
                    progress.moved = [*(one for one in progress.moved if one is not fetches), fetches]
                if self.note_fetch is not None:
                    fetches.mark = self.note_fetch()
                yield indices[piece * len(indices) // count : (piece + 1) * len(indices) // count]
                piece = (piece + 1) % count
                step += piece == 0
        finally:
            for known in {id(one): one for one in (progress, self._progress)}.values():
                if fetches in known.fetches:
                    known.fetches.remove(fetches)

    @property
    def can_go_back(self) -> bool:
        """Whether each iterator that is alive has handed out what the steps done took, and no batch ahead of that."""
        size = self._micro_batches
        return all(
            one.primed == 0
            and one.threads <= {threading.get_ident()}
            and one.taken == (self.steps_done - one.first_step) * size
            for one in self._progress.fetches
        )

    @contextlib.contextmanager
    def keep_iterators(self) -> Iterator[None]:
        """Let the iterators that are alive go on from the cursor that is loaded within, instead of refusing them.

        Only where `can_go_back`: what an iterator has handed out ahead can't be taken back.
        """
        kept = list(self._progress.fetches)
        before = self._progress
        yield
        if self._progress is not before:
            self._progress.fetches = [one.begin_at(self.steps_done) for one in kept]

    def indices(self, step: int) -> list[Any]:
        """Return this worker's samples of one step, counted over the whole run from 0.

        They are numbers; in a mixture, pairs of the source's name and a number. Past a hole there may be none.

        Raises: StateError(ARGUMENT) for a step before the loaded cursor's, whose batches may have had another size;
            StateError(WRITERS_UNKNOWN).
        """
        part = self._part(step)
        present = part.uses != HOLE
        samples: list[Any] = part.samples[present].tolist()
        if self._mixture is None:
            return samples
        names = [self._sources[number].id for number in part.sources[present].tolist()]
        return list(zip(names, samples, strict=True))

    def weights(self, step: int) -> list[int]:
        """Return the weight of each of `indices`: 1, or 0 for what is masked or only fills the batch.

        Raises: as `indices`.
        """
        uses = self._part(step).uses
        weights: list[int] = (uses[uses != HOLE] == COUNTS).astype(int).tolist()
        return weights

    def epochs(self, step: int) -> list[int]:
        """Return of each of `indices` the epoch of its source: with the sample, it says which of its draws this is.

        Raises: as `indices`.

        >>> Sampler(10, global_batch=4, seed=0, worker=(0, 1)).epochs(2)
        [0, 0, 1, 1]
        """
        part = self._part(step)
        epochs: list[int] = part.epochs[part.uses != HOLE].tolist()
        return epochs

    def weight_sum(self, step: int) -> int:
        """Return how many samples of a step count, over all workers: the divisor of a mean over them.

        Raises: StateError(ARGUMENT) for a step before the loaded cursor's.
        """
        position = self._first_position(step)
        return int((self._course.stretch(position, position + self._plan.global_batch).uses == COUNTS).sum())

    def advance(self, steps: int = 1) -> None:
        """Say that `steps` more steps are done.

        Raises: StateError(ARGUMENT) for less than none.
        """
        self.commit(self.steps_done + steps)

    def commit(self, step: int) -> None:
        """Say that `step` steps are done, over the whole run; saying it twice changes nothing.

        Raises: StateError(ARGUMENT) when more are done already: only `load_state_dict` goes back.
        """
        if step < self.steps_done:
            raise err(Code.ARGUMENT, f"{self.steps_done} steps are done; the cursor doesn't go back to {step}")
        self._progress.told = True
        self._progress.steps_done = step
        drawn = self._progress.drawn
        for old in [number for number in drawn if number < step - 1]:
            del drawn[old]
        if self.position - self._progress.counted_to >= _LEDGER_LAG:
            self._count()

    def samples_digest(self, step: int) -> int | None:
        """Return a digest of this worker's samples of a step; None where nobody asked for them.

        It is that of the samples that were handed out, by iterating or by `indices`. A witness compares the digests of
        steps done twice.

        Args:
            step: the last step that is done, or a later one; counted over the whole run from 0.
        """
        part = self._progress.drawn.get(step)
        if part is None:
            return None
        digest = zlib.crc32(part.uses.data, zlib.crc32(part.samples.data))
        return digest if self._mixture is None else zlib.crc32(part.sources.data, digest)

    def begin_at(self, step: int) -> None:
        """Say that the run has done `step` steps without this sampler, whose first batch comes next.

        A `Checkpointer` says it where the checkpoint that it restored has no position for the sampler, or that one
        was left out. A sampler that has begun stays as it is.
        """
        progress = self._progress
        if self._loaded is None and not progress.told and not progress.read:
            self._progress = _Progress(first_step=step, steps_done=step, steps_fetched=step)

    def check_fetched(self, step: int) -> None:
        """Refuse a number of steps done that contradicts the batches fetched by iterating; `indices` isn't looked at.

        A `Checkpointer` asks it before it commits. Batches that were fetched ahead are allowed: those that a DataLoader
        requests for its worker processes, those that a loop or another thread fetches before the steps that take them.

        Raises: StateError(ARGUMENT) when the steps counted took fewer batches, or micro-batches, than their share; when
            they took more, so that the cursor falls behind what was trained.
        """
        progress, size = self._progress, self._micro_batches
        moved, progress.moved = progress.moved, []
        fetches = progress.serving
        if moved and not any(one is fetches for one in moved):
            fetches = moved[-1]
        if fetches is None:  # no batch was ever taken by iterating
            return
        spare = fetches.taken - fetches.primed - (step - fetches.first_step) * size
        if spare < 0:
            raise _shares(fetches, step, size, "Take the batches of a step in the step that trains on them, once each")
        is_anew = fetches.first_spare is None
        if fetches.first_spare is None:
            fetches.first_spare = spare
        given_up = progress.serving if is_anew else None
        is_wasted = (
            given_up is not None
            and given_up.spare == spare >= _GIVEN_UP_MIN * size
            and given_up.counted_step - given_up.first_step == step - fetches.first_step == 1
        )
        # Another thread that fetches ahead may be anywhere between its first batch and the end of its queue.
        bound = 0 if fetches.threads <= {threading.get_ident()} else _AHEAD_MAX * size
        if is_wasted or spare > fetches.first_spare + bound:
            raise _shares(fetches, step, size, "A batch that is to be left out goes to Sampler.skip")
        fetches.counted_step, fetches.counted_taken, fetches.spare = step, fetches.taken, spare
        progress.serving = fetches

    def drawn_in_hand(self, mark: object) -> bool:
        """Return whether a batch of a step that isn't counted was taken, and then random numbers were drawn.

        Args:
            mark: the value that `note_fetch` would return now.
        """
        return any(one.is_in_hand and one.mark not in (None, mark) for one in self._progress.fetches)

    def skip(
        self,
        *,
        samples: Iterable[int] | None = None,
        shard: tuple[str, int, int] | None = None,
        positions: tuple[int, int] | None = None,
        policy: Policy = "hole",
        source: str | None = None,
        from_pos: int | None = None,
        reason: str = "",
    ) -> None:
        """Leave something out, from a position on that no step has consumed. Each worker says the same.

        Iterators that have fetched beyond that position are refused from now on: call iter() on the loader again. A
        skip lasts, and is part of the cursor; to skip the same again changes nothing.

        Args:
            samples: numbers of samples of the source;
            shard: or a name, and begin and end of the samples that are its own;
            positions: or begin and end of what is left out, whichever samples stand there.
            policy: ``hole``: the position is consumed, and has no sample. ``mask``: it has its sample, of weight zero.
                ``shift``: what comes after moves up.
            source: of the samples or the shard; needed with several sources.
            from_pos: where the skip of samples or a shard begins; left out, at `position`.
            reason: for those who read the cursor.

        Raises: StateError(ARGUMENT).
        Spec: REQ-CUR-017 to REQ-CUR-020.

        >>> sampler = Sampler(10, global_batch=4, seed=0, worker=(0, 1))
        >>> sampler.advance()
        >>> sampler.skip(samples=[8, 9], policy="shift", reason="corrupt")
        >>> sampler.indices(1)
        [5, 6, 0, 7]
        """
        begin = self.position if from_pos is None else from_pos
        if sum(what is not None for what in (samples, shard, positions)) != 1:
            raise err(Code.ARGUMENT, "give exactly one of samples=, shard= and positions=")
        name = self._sources[0].id if source is None and len(self._sources) == 1 else source
        skip: Skip
        if positions is not None:
            begin = positions[0]
            skip = PosSkip(policy=policy, reason=reason, range=positions)
        elif name is None:
            raise err(Code.ARGUMENT, "there are several sources: say with source= which")
        elif shard is not None:
            skip = ShardSkip(policy=policy, from_pos=begin, reason=reason, source=name, shard=shard[0], range=shard[1:])
        else:
            ids = tuple(sorted({int(sample) for sample in samples or ()}))
            skip = SampleSkip(policy=policy, from_pos=begin, reason=reason, source=name, ids=ids)
        if any(_says_the_same(known, skip) for known in self._skips):
            return
        if begin < self.position:
            detail = f"the skip begins at position {begin}, and {self.position} positions are consumed already"
            raise err(Code.ARGUMENT, detail, requirement="REQ-CUR-020")
        self._course = self._try_course((*self._skips, skip))
        self._skips = (*self._skips, skip)
        self._loaded = None
        self.has_new_skips = True
        if begin < self._position_of(self._progress.steps_fetched):
            self._progress = dataclasses.replace(
                self._progress, steps_fetched=self.steps_done, fetches=[], serving=None, moved=[]
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: the same tree on every worker, and for every number of workers.

        Raises: StateError(ARGUMENT) when hundreds of batches were fetched and no step was ever said to be done.
        Spec: REQ-CUR-002, REQ-CUR-004, REQ-CUR-005, REQ-CUR-010, REQ-CUR-021.
        """
        ahead = self._progress.steps_fetched - self.steps_done
        if ahead > _AHEAD_MAX and not self._progress.told:
            detail = f"{ahead} batches were fetched, and no step was counted"
            raise err(Code.ARGUMENT, detail, remedy="Call sampler.advance() after each step, or sampler.commit(step).")
        if self._loaded is not None and self._loaded.commit.step == self.steps_done:
            return dump_cursor(self._loaded)
        self._count()
        progress = self._progress
        cursor = self._cursor(
            self._course, self._skips, step=progress.steps_done, position=self.position, ledger=progress.counted
        )
        return dump_cursor(cursor)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to where a cursor stands; right after it, `state_dict` returns what was loaded.

        Another number of workers is fine, and with the tail ``carry`` another `global_batch`; so are other stages of a
        mixture, from the cursor's position on. The skips are those of the cursor.

        Raises: FormatError(CURSOR_FORM), UnsupportedError; StateError(CONFIG_IDENTITY) when a data set's length,
            name or fingerprint, the seed, the tail, or what was consumed of the mixture, is another one.
        Spec: REQ-CUR-001 to REQ-CUR-004, REQ-CUR-006, REQ-CUR-014.
        """
        cursor = parse_cursor(dict(state_dict))
        self._check_same(cursor)
        check_order(cursor)
        course = self._try_course(cursor.skips)
        self._sources = tuple(
            theirs if ours.fingerprint is None else ours
            for ours, theirs in zip(self._sources, cursor.sources, strict=True)
        )
        self._skips = cursor.skips
        self.has_new_skips = False
        self._course = course
        self._loaded = cursor
        step, position = cursor.commit.step, cursor.commit.global_pos
        self._progress = _Progress(
            first_step=step,
            first_position=position,
            steps_done=step,
            steps_fetched=step,
            counted=cursor.ledger,
            counted_to=position,
        )

    def _position_of(self, step: int) -> int:
        return self._progress.first_position + (step - self._progress.first_step) * self._plan.global_batch

    def _first_position(self, step: int) -> int:
        if step < self._progress.first_step:
            raise err(Code.ARGUMENT, f"step {step} is before the first one, {self._progress.first_step}")
        return self._position_of(step)

    def _part(self, step: int) -> Stretch:
        """Return what this worker's positions of a step have."""
        position, size = self._first_position(step), self._plan.global_batch
        self._progress.read = True
        number, count = self._worker or distributed_worker()
        check_worker((number, count), size // self._micro_batches)
        part = self._course.stretch(position + number * size // count, position + (number + 1) * size // count)
        if step >= self.steps_done and len(self._progress.drawn) <= _AHEAD_MAX:
            self._progress.drawn[step] = part
        return part

    def _count(self) -> None:
        progress = self._progress
        news = self._course.ledger(progress.counted_to, self.position)
        progress.counted = add_ledgers(progress.counted, news)
        progress.counted_to = self.position

    def _try_course(self, skips: tuple[Skip, ...]) -> Course:
        """Return the course with these skips. Raises: StateError(ARGUMENT)."""
        with _as_argument():
            course = Course(self._sources, seed=self._seed, plan=self._plan, mixture=self._mixture, skips=skips)
            dump_cursor(self._cursor(course, skips, step=0, position=0, ledger=EMPTY))
        return course

    def _cursor(self, course: Course, skips: tuple[Skip, ...], *, step: int, position: int, ledger: Ledger) -> Cursor:
        source, sample = course.sample_at(position)
        epoch, pos_in_epoch = course.epoch_at(position)
        commit = Commit(step=step, global_pos=position, epoch=epoch, pos_in_epoch=pos_in_epoch)
        vector = VectorCheck(pos=position, id=sample)
        sources = self._sources
        if self._mixture is not None:
            commit = Commit(step=step, global_pos=position)
            vector = VectorCheck(pos=position, id=sample, source=source)
            draws = course.draws_before(position)
            sources = tuple(dataclasses.replace(one, pos=pos) for one, pos in zip(sources, draws, strict=True))
        return Cursor(
            plan=self._plan,
            commit=commit,
            order=Order(seed=self._seed, vector_check=vector),
            sources=sources,
            ledger=ledger,
            mixture=self._mixture,
            skips=skips,
        )

    def _check_same(self, cursor: Cursor) -> None:
        both = (cursor.sources, self._sources)
        fingerprints = [
            (saved.fingerprint, ours.fingerprint)
            for saved, ours in zip(*both, strict=False)
            if None not in (saved.fingerprint, ours.fingerprint)
        ]
        # A skip that shifts what follows decides by all stages that it reaches over, from where it begins.
        shifts = (skip for skip in cursor.skips if isinstance(skip, PosSkip) and skip.policy == "shift")
        position = max(cursor.commit.global_pos, *(s.range[1] for s in shifts if s.begin < cursor.commit.global_pos), 0)
        pairs: dict[str, tuple[object, object]] = {
            "number of samples": _each([source.n for source in sources] for sources in both),
            "source": _each([source.id for source in sources] for sources in both),
            "fingerprint": _each([pair[side] for pair in fingerprints] for side in (0, 1)),
            "seed": (cursor.order.seed, self._seed),
            "tail": (cursor.plan.tail, self._plan.tail),
            "mixture": (_begun(cursor.mixture, position), _begun(self._mixture, position)),
        }
        if self._plan.tail != "carry":  # where an epoch ends depends on it
            pairs["global_batch"] = (cursor.plan.global_batch, self._plan.global_batch)
        for name, (theirs, ours) in pairs.items():
            if theirs != ours:
                raise err(
                    Code.CONFIG_IDENTITY,
                    f"the cursor's {name} is {theirs!r}, the sampler's {ours!r}",
                    where="cursor",
                    remedy="Make the sampler of the same data set and seed. To begin the data anew: override=['data:*']"
                    " for one start of a Checkpointer, or a load without the data.",
                )


def _shares(fetches: _Fetches, step: int, size: int, remedy: str) -> CkptError:
    """Return the error of steps that took another number of pieces than their share."""
    count, taken = step - fetches.counted_step, fetches.taken - fetches.counted_taken
    if not fetches.counted_taken:
        taken -= fetches.primed
    pieces = "batches" if size == 1 else "micro-batches"
    which = f"step {step - 1}" if count == 1 else f"steps {fetches.counted_step} to {step - 1}"
    if taken > count * size and taken % count == 0:
        remedy = (
            f"Where a step accumulates the gradients of {taken // count} batches, pass micro_batches={taken // count}"
            f" to Sampler, and as global_batch= the samples of the whole step. {remedy}"
        )
    return err(
        Code.ARGUMENT,
        f"{which} took {taken} {pieces} of the sampler by iterating, where {count * size} is right: the cursor of a"
        " save would not be the place where the training stands",
        where=_STEPS,
        remedy=f"{remedy}; a Sampler that isn't read as the training goes stays out of State.",
    )


def _says_the_same(known: Skip, skip: Skip) -> bool:
    """Return whether a skip leaves out what a known one does, from no earlier position on; for whatever reason."""
    if isinstance(skip, PosSkip) or isinstance(known, PosSkip):
        return known == dataclasses.replace(skip, reason=known.reason)
    begins_earlier = known.from_pos <= skip.from_pos
    return begins_earlier and known == dataclasses.replace(skip, reason=known.reason, from_pos=known.from_pos)


def _each(sides: Iterable[list[Any]]) -> tuple[object, object]:
    """Return what both sides say, without the list where there is one source."""
    theirs, ours = (values[0] if len(values) == 1 else values for values in sides)
    return theirs, ours


def _begun(mixture: Mixture | None, position: int) -> object:
    """Return what of a mixture decided the positions before one: what may not change any more."""
    if mixture is None:
        return None
    stages = [(stage.from_pos, dict(stage.counts)) for stage in mixture.stages]
    return mixture.block, mixture.seed, [stage for stage in stages if stage[0] < position]


def _sources(
    dataset: int | Sized | Mapping[str, int | Sized],
    fingerprint: str | Mapping[str, str] | None,
    source: str,
    *,
    is_mixed: bool,
) -> tuple[Source, ...]:
    if not is_mixed:
        if isinstance(dataset, Mapping) and any(isinstance(key, str) for key in dataset):
            raise err(Code.ARGUMENT, "there are several sources, and no mixture", remedy="Pass mixture={name: count}.")
        if isinstance(fingerprint, Mapping):
            raise err(Code.ARGUMENT, "fingerprint is a mapping, but there is one source only")
        return (Source(id=source, fingerprint=fingerprint, n=_length(dataset)),)
    if not isinstance(dataset, Mapping) or not dataset:
        raise err(Code.ARGUMENT, "a mixture needs a mapping from names to data sets")
    if not (fingerprint is None or isinstance(fingerprint, Mapping)):
        raise err(Code.ARGUMENT, "a mixture needs a mapping from names to fingerprints")
    prints = fingerprint or {}
    return tuple(Source(id=name, fingerprint=prints.get(name), n=_length(one)) for name, one in dataset.items())


def _length(dataset: int | Sized) -> int:
    return dataset if isinstance(dataset, int) else len(dataset)


def _mixture(
    mixture: Mapping[str, int] | Mapping[int, Mapping[str, int]], seed: int, sources: Iterable[Source]
) -> Mixture:
    stages: dict[Any, Any] = dict(mixture)
    if not any(isinstance(counts, Mapping) for counts in stages.values()):
        stages = {0: stages}
    if not all(isinstance(counts, Mapping) for counts in stages.values()):
        raise err(Code.ARGUMENT, "a mixture maps names to counts, or positions to such mappings")
    first = next(iter(stages.values())).values()
    tree: dict[object, object] = {
        "block": sum(count for count in first if isinstance(count, int)),
        "seed": seed,
        "alg": "block-det-v1",
        "stages": [{"from_pos": begin, "counts": dict(counts)} for begin, counts in stages.items()],
    }
    with _as_argument():
        return parse_mixture(CursorMap(tree, "mixture="), {source.id: source.n for source in sources})


@contextlib.contextmanager
def _as_argument() -> Iterator[None]:
    """Let what is wrong with a cursor's members be wrong with the arguments that they were made of."""
    try:
        yield
    except CkptError as error:
        raise err(Code.ARGUMENT, error.detail, where=error.where) from error

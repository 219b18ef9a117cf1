"""The sampler: a shuffled, endless order of samples, equal on any number of workers, resumable."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Final, Self

from ckptfmt import limits
from ckptfmt.data.course import COUNTS, EMPTY, HOLE, Course, Stretch, add_ledgers, check_order
from ckptfmt.data.cursor import (
    BatchPlan,
    Commit,
    Cursor,
    Ledger,
    Mixture,
    Order,
    Pipeline,
    Source,
    Tail,
    VectorCheck,
    dump_cursor,
    parse_cursor,
    parse_mixture,
)  # fmt: skip
from ckptfmt.data.cursor_map import CursorMap, Policy, PosSkip, SampleSkip, ShardSkip, Skip
from ckptfmt.data.shuffle import sample_indices
from ckptfmt.data.tickets import Begin, Merged, Share, Ticket, Tickets, merge_shares
from ckptfmt.data.workers import check_worker, count_primed, distributed_worker
from ckptfmt.errors import CkptError, Code, err

#: Number of positions after which `advance` updates the ledger, so that a save has little to count.
_LEDGER_LAG: Final = 1 << 16
#: More batches than any loader fetches ahead. A loop that fetched as many and counted no step has
#: forgotten to count.
_AHEAD_MAX: Final = 512
#: `where` of errors about a wrong number of steps.
_STEPS: Final = "Sampler"
#: If an iterator served a single step and was given up with this many unused shares, the shares
#: were dropped by mistake: no loop prefetches so far for a single step.
_GIVEN_UP_MIN: Final = 2


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Fetches:
    """The pieces that an iterator of a sampler has handed out.

    A piece is a worker's part of a step, or of a micro-batch.

    Attributes:
        first_step: step of the first piece.
        primed: number of pieces that a DataLoader requests for its worker processes before the
            first batch.
        taken: number of pieces handed out.
        threads: threads that requested pieces.
        counted_step: number of steps done at the last count.
        counted_taken: number of pieces handed out at the last count.
        first_spare: number of pieces fetched beyond the steps done, at the first count.
        spare: the same number at the last count.
        mark: result of `Sampler.note_fetch` for the last piece.
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
        """Reset the counts to an iterator that begins at a step."""
        self.first_step = self.counted_step = step
        self.taken = self.counted_taken = self.spare = 0
        self.first_spare = None
        return self

    @property
    def is_in_hand(self) -> bool:
        """Whether the loop has taken a batch from this iterator, but counted no step of it yet."""
        return self.taken > self.primed and self.counted_step == self.first_step


@dataclasses.dataclass(slots=True, kw_only=True)
class _Progress:
    """The progress of a run since its begin or since a cursor was loaded."""

    first_step: int = 0
    first_position: int = 0
    steps_done: int = 0
    steps_fetched: int = 0
    #: Whether a batch was requested, by iterating or by number.
    read: bool = False
    #: Whether `advance` or `commit` was called.
    told: bool = False
    #: The live iterators.
    fetches: list[_Fetches] = dataclasses.field(default_factory=list)
    #: The iterator of the last counted step; and the iterators that handed out pieces since, in
    #: order.
    serving: _Fetches | None = None
    moved: list[_Fetches] = dataclasses.field(default_factory=list)
    #: The ledger of the positions before `counted_to`.
    counted: Ledger = EMPTY
    counted_to: int = 0
    #: This worker's parts that were read, for steps that aren't done, by step.
    drawn: dict[int, Stretch] = dataclasses.field(default_factory=dict)


class Sampler:
    """An endless iterable of this worker's part of each step's samples, with a count of steps done.

    A `Sampler` is a `batch_sampler` for a map-style DataLoader,
    ``DataLoader(dataset, batch_sampler=sampler)``, and works without torch.

    **Order.** The order is a pure function of `seed`: epoch after epoch without end, each a
    permutation (``feistel-v1``) that contains every sample once. Step s takes the next
    `global_batch` positions. Worker i of w takes the contiguous slice of them from
    ``i * global_batch // w`` to ``(i + 1) * global_batch // w``. The samples of a step therefore
    don't depend on w.

    **Tail.** No batch is short. A batch that reaches the end of an epoch continues with the next
    epoch (``carry``). With other values of `tail` the rest of an epoch is left out (``drop``), or
    its last batch is filled up with samples of weight zero (``pad_masked``).

    **Several sources.** With a mapping from names to data sets, and a `mixture`, each block of
    positions has a fixed number of samples of each source, in an order of its own. Each source has
    its own endless order. Batches are then lists of pairs of name and sample.

    **Skips.** `skip` leaves out samples, shards or positions, from a position on that no step has
    consumed. After a skip, a batch may be shorter (``hole``) or have samples of weight zero
    (``mask``): see `weights` and `weight_sum`.

    **Pipelines.** A loop that trains on answers out of order, such as reinforcement learning with
    asynchronous generation, makes the sampler with ``pipeline=True``, and calls `issue`, `consume`
    and `discard` instead of iterating. Each sample is then consumed or discarded once, in any
    order and over any number of resumes.

    **Position.** A fetched batch isn't consumed yet. The cursor moves when a step is reported as
    done: by a `Checkpointer` for the samplers of its `State` (don't call `advance` then), otherwise
    by `commit` or `advance`. Iterators start at the cursor. Iterators from before a
    `load_state_dict` raise an error, since their prefetched batches are no longer due.

    Args:
        dataset: data set, or its number of samples; with a mixture, a mapping from names to these.
        global_batch: positions per step, over all workers; at least the number of workers.
        seed: seed of the order, 64 bits. A cursor with another seed raises an error.
        worker: number of this worker, and number of workers. Default: rank and world size of
            torch.distributed if initialised by the first batch, otherwise the only worker. Workers
            that must read the same samples (tensor or pipeline parallel) pass the data-parallel
            rank and size.
        source: name of the data set, which enters the ledger. With a mixture, the mapping has the
            names.
        fingerprint: fingerprint of the data set's contents, computed by the caller; a cursor with
            another fingerprint raises an error. With a mixture, a mapping from names to
            fingerprints.
        mixture: number of positions in a block for each source; the sum is the block's size. Or
            several such mappings, by the position from which each applies:
            ``{0: {"books": 3, "code": 1}, 4096: {"books": 1, "code": 3}}``.
        tail: ``carry``, ``drop`` or ``pad_masked``; a mixture needs ``carry``.
        micro_batches: number of consecutive pieces into which the iterator divides a worker's part
            of a step, for loops that accumulate gradients. A step is still counted once; `indices`
            has all samples of the step.
        pipeline: whether samples are taken by `issue`, in any number for each step. Such a sampler
            can't be iterated, and a load of its cursor claims at most S1.

    Raises: StateError(ARGUMENT).

    >>> sampler = Sampler(10, global_batch=4, seed=0, worker=(0, 2))
    >>> batches = iter(sampler)
    >>> next(batches), next(batches), sampler.steps_done
    ([3, 1], [8, 5], 0)
    >>> sampler.advance()
    >>> next(iter(sampler))
    [8, 5]
    >>> mixed = Sampler({"books": 10, "code": 5}, mixture={"books": 3, "code": 1}, global_batch=4,
    ...     worker=(0, 1))
    >>> sorted(name for name, sample in next(iter(mixed)))
    ['books', 'books', 'books', 'code']
    """

    #: Called before iterating hands out a piece; see `drawn_in_hand`.
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
        pipeline: bool = False,
    ) -> None:
        for name, number in (("global_batch", global_batch), ("micro_batches", micro_batches)):
            if not hasattr(number, "__index__") or not 1 <= number <= limits.DIM:
                remedy = "Pass a whole number."
                raise err(
                    Code.ARGUMENT,
                    f"{name}={number!r} isn't from 1 to {limits.DIM}",
                    where=name,
                    remedy=remedy,
                )
        check_worker(worker or (0, 1), global_batch // micro_batches)
        self._sources = _sources(dataset, fingerprint, source, is_mixed=mixture is not None)
        for one in self._sources:
            sample_indices(one.n, seed=seed, begin=0, end=1)  # checks the ranges of length and seed
        self._plan = BatchPlan(global_batch=global_batch, tail=tail)
        self._seed = seed
        self._mixture = None if mixture is None else _mixture(mixture, seed, self._sources)
        self._skips: tuple[Skip, ...] = ()
        self._worker = worker
        self._micro_batches = micro_batches
        self._loaded: Cursor | None = None
        #: Whether a skip was added since the sampler was made or a cursor was loaded.
        self.has_new_skips = False
        self._progress = _Progress()
        self._course = self._try_course(self._skips)
        self._tickets = Tickets(Begin()) if pipeline else None
        #: The samples of all workers, while `merging`.
        self._merged: Merged | None = None

    @classmethod
    def from_state_dict(
        cls, state_dict: Mapping[str, Any], *, worker: tuple[int, int] | None = None
    ) -> Sampler:
        """Return a sampler that continues from a cursor, with data sets and options of the cursor.

        The options are the order, the mixture and the tail.

        The cursor isn't compared with any data. A program with data at hand makes a sampler of the
        data and calls `load_state_dict`, which raises an error for a cursor of other data.

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
            cursor.sources[0].n
            if mixture is None
            else {source.id: source.n for source in cursor.sources},
            global_batch=cursor.plan.global_batch,
            seed=cursor.order.seed,
            worker=worker,
            source=cursor.sources[0].id,
            mixture=None
            if mixture is None
            else {stage.from_pos: stage.counts for stage in mixture.stages},
            tail=cursor.plan.tail,
            pipeline=cursor.pipeline is not None,
        )
        sampler._mixture = mixture  # its seed may differ from the order's
        sampler.load_state_dict(state_dict)
        return sampler

    @property
    def steps_done(self) -> int:
        """The number of steps done, over the whole run."""
        return self._progress.steps_done

    @property
    def position(self) -> int:
        """The number of positions consumed by the steps done, over all workers and the whole run.

        This is also the number of samples, except for skipped samples and samples that fill up
        batches. With ``pipeline=True``, the end of the positions that this worker has issued.
        """
        if self._tickets is not None:
            return self._tickets.top
        return self._position_of(self.steps_done)

    @property
    def is_pipeline(self) -> bool:
        """Whether samples are taken by `issue`."""
        return self._tickets is not None

    @property
    def is_unread(self) -> bool:
        """Whether steps were counted, but no batch was requested by iterating or by `indices`."""
        progress = self._progress
        return progress.steps_done > progress.first_step and not progress.read

    def __repr__(self) -> str:
        sizes = ", ".join(f"{source.id}: {source.n}" for source in self._sources)
        return (
            f"Sampler({sizes}, global_batch={self._plan.global_batch}, seed={self._seed},"
            f" steps_done={self.steps_done})"
        )

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield this worker's samples of each step from the cursor on, or of its micro-batches.

        The iterator has no end. The first request for a batch determines the first step: the first
        step that isn't done then.

        Raises: StateError(ARGUMENT) if a cursor was loaded after the first batch, if a skip begins
            before the last fetched position, or if a batch has fewer samples than workers;
            StateError(WRITERS_UNKNOWN).
        """
        progress = self._progress
        first = self.steps_done
        count = self._micro_batches
        fetches = _Fetches(
            first_step=first, primed=count_primed(), counted_step=first, counted_taken=0
        )
        progress.fetches.append(fetches)
        indices: list[Any] = []
        step = first
        piece = 0
        try:
            while True:
                if progress is not self._progress:
                    if fetches not in self._progress.fetches:
                        detail = (
                            "load_state_dict or skip was called after this iterator's first batch"
                        )
                        raise err(
                            Code.ARGUMENT,
                            detail,
                            remedy="Restore and skip first, then call iter() on the loader.",
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
                    progress.moved = [
                        *(one for one in progress.moved if one is not fetches),
                        fetches,
                    ]
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
        """Whether all live iterators have handed out exactly the batches of the steps done."""
        size = self._micro_batches
        return not self.is_pipeline and all(
            one.primed == 0
            and one.threads <= {threading.get_ident()}
            and one.taken == (self.steps_done - one.first_step) * size
            for one in self._progress.fetches
        )

    def has_fetched_ahead(self, step: int) -> bool:
        """Return whether a live iterator has handed out more than the batches of `step` steps."""
        size = self._micro_batches
        return self.is_pipeline or any(
            one.primed > 0
            or not one.threads <= {threading.get_ident()}
            or one.taken > (step - one.first_step) * size
            for one in self._progress.fetches
        )

    @property
    def has_iterators(self) -> bool:
        """Whether an iterator of this cursor has handed out a batch."""
        return bool(self._progress.fetches)

    @property
    def skips(self) -> tuple[Skip, ...]:
        """The skips of the cursor, in the order of their calls."""
        return self._skips

    @contextlib.contextmanager
    def keep_iterators(self) -> Iterator[None]:
        """Let live iterators continue from a cursor that is loaded within the context.

        Without this context such iterators raise an error. Requires that no batch was handed out
        ahead of the steps: such batches can't be taken back.
        """
        kept = list(self._progress.fetches)
        before = self._progress
        yield
        if self._progress is not before:
            self._progress.fetches = [one.begin_at(self.steps_done) for one in kept]

    def indices(self, step: int) -> list[Any]:
        """Return this worker's samples of a step, where steps count over the whole run from 0.

        Samples are numbers; in a mixture, pairs of the source's name and a number. A step may have
        no samples where a skip left holes.

        Raises: StateError(ARGUMENT) for a step before the loaded cursor, since earlier batches may
            have had another size; StateError(WRITERS_UNKNOWN).
        """
        part = self._part(step)
        present = part.uses != HOLE
        samples: list[Any] = part.samples[present].tolist()
        if self._mixture is None:
            return samples
        names = [self._sources[number].id for number in part.sources[present].tolist()]
        return list(zip(names, samples, strict=True))

    def weights(self, step: int) -> list[int]:
        """Return the weight of each of `indices`: 1, or 0 for a masked or padding sample.

        Raises: the errors of `indices`.
        """
        uses = self._part(step).uses
        weights: list[int] = (uses[uses != HOLE] == COUNTS).astype(int).tolist()
        return weights

    def epochs(self, step: int) -> list[int]:
        """Return the source's epoch for each of `indices`: sample and epoch identify the draw.

        Raises: the errors of `indices`.

        >>> Sampler(10, global_batch=4, seed=0, worker=(0, 1)).epochs(2)
        [0, 0, 1, 1]
        """
        part = self._part(step)
        epochs: list[int] = part.epochs[part.uses != HOLE].tolist()
        return epochs

    def weight_sum(self, step: int) -> int:
        """Return how many samples of a step count, over all workers: the divisor of a mean.

        Raises: StateError(ARGUMENT) for a step before the loaded cursor.
        """
        return int((self._course.stretch(*self.positions_of(step)).uses == COUNTS).sum())

    @property
    def global_batch(self) -> int:
        """The number of positions of each step, over all workers."""
        return self._plan.global_batch

    def positions_of(self, step: int) -> tuple[int, int]:
        """Return begin and end of a step's positions, where steps count over the whole run from 0.

        Raises: StateError(ARGUMENT) for a step before the loaded cursor.
        """
        begin = self._first_position(step)
        return begin, begin + self._plan.global_batch

    def advance(self, steps: int = 1) -> None:
        """Record that `steps` more steps are done.

        Raises: StateError(ARGUMENT) for a negative number.
        """
        self.commit(self.steps_done + steps)

    def commit(self, step: int) -> None:
        """Record that `step` steps are done, over the whole run. Idempotent.

        Raises: StateError(ARGUMENT) if more steps are done: only `load_state_dict` goes back.
        """
        if step < self.steps_done:
            raise err(
                Code.ARGUMENT,
                f"{self.steps_done} steps are done; the cursor doesn't go back to {step}",
            )
        if self._tickets is not None and step > self.steps_done:
            self._tickets.commit()
        self._progress.told = True
        self._progress.steps_done = step
        drawn = self._progress.drawn
        for old in [number for number in drawn if number < step - 1]:
            del drawn[old]
        if not self.is_pipeline and self.position - self._progress.counted_to >= _LEDGER_LAG:
            self._count()

    def samples_digest(self, step: int) -> int | None:
        """Return a digest of this worker's samples of a step; None if they were never requested.

        The digest covers the samples handed out by iterating or by `indices`. A witness compares
        the digests of a step that was done twice.

        Args:
            step: number of the step, over the whole run from 0; the last step done or a later step.
        """
        part = self._progress.drawn.get(step)
        if part is None:
            return None
        digest = zlib.crc32(part.uses.data, zlib.crc32(part.samples.data))
        return digest if self._mixture is None else zlib.crc32(part.sources.data, digest)

    def begin_at(self, step: int) -> None:
        """Record that the run has done `step` steps without this sampler, before its first batch.

        A `Checkpointer` calls this if the restored checkpoint has no position of the sampler, or if
        the position was excluded. A sampler that has begun doesn't change.
        """
        progress = self._progress
        if self._loaded is None and not progress.told and not progress.read:
            self._progress = _Progress(first_step=step, steps_done=step, steps_fetched=step)

    def check_fetched(self, step: int) -> None:
        """Check a number of steps done against the batches fetched by iterating.

        A `Checkpointer` calls this before each commit. Batches fetched ahead are allowed: those
        that a DataLoader requests for its worker processes, and those that a loop or another thread
        fetches before their steps. Calls of `indices` are ignored.

        Raises: StateError(ARGUMENT) if the counted steps took fewer batches, or micro-batches, than
            they need; or more, so that the cursor would fall behind the training.
        """
        progress = self._progress
        size = self._micro_batches
        moved = progress.moved
        progress.moved = []
        fetches = progress.serving
        if moved and not any(one is fetches for one in moved):
            fetches = moved[-1]
        if fetches is None:  # no batch was taken by iterating
            return
        spare = fetches.taken - fetches.primed - (step - fetches.first_step) * size
        if spare < 0:
            raise _shares(
                fetches,
                step,
                size,
                "Take the batches of a step in the step that trains on them, once each",
            )
        is_anew = fetches.first_spare is None
        if fetches.first_spare is None:
            fetches.first_spare = spare
        given_up = progress.serving if is_anew else None
        is_wasted = (
            given_up is not None
            and given_up.spare == spare >= _GIVEN_UP_MIN * size
            and given_up.counted_step - given_up.first_step == step - fetches.first_step == 1
        )
        # Another thread may have prefetched any number of batches up to the length of its queue.
        bound = 0 if fetches.threads <= {threading.get_ident()} else _AHEAD_MAX * size
        if is_wasted or spare > fetches.first_spare + bound:
            raise _shares(
                fetches, step, size, "A batch that is to be left out goes to Sampler.skip"
            )
        fetches.counted_step = step
        fetches.counted_taken = fetches.taken
        fetches.spare = spare
        progress.serving = fetches

    def drawn_in_hand(self, mark: object) -> bool:
        """Return whether random numbers were drawn after a batch of an uncounted step was taken.

        Args:
            mark: current result of `note_fetch`.
        """
        return any(
            one.is_in_hand and one.mark not in (None, mark) for one in self._progress.fetches
        )

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
        """Leave out samples, a shard or positions, from a position on that no step has consumed.

        Each worker makes the same call. Iterators that have fetched beyond the position raise an
        error from now on: call iter() on the loader again. A skip is permanent, and part of the
        cursor. Repeating a skip has no effect.

        Args:
            samples: numbers of samples of the source;
            shard: or name, begin and end of a shard's samples;
            positions: or begin and end of positions, regardless of their samples.
            policy: ``hole``: the position is consumed without a sample. ``mask``: the sample has
                weight zero. ``shift``: later samples move up.
            source: source of the samples or the shard; required with several sources.
            from_pos: first position of a skip of samples or a shard; `position` by default.
            reason: explanation for readers of the cursor.

        Raises: StateError(ARGUMENT).
        Spec: REQ-CUR-017 to REQ-CUR-020.

        >>> sampler = Sampler(10, global_batch=4, seed=0, worker=(0, 1))
        >>> sampler.advance()
        >>> sampler.skip(samples=[8, 9], policy="shift", reason="corrupt")
        >>> sampler.indices(1)
        [5, 6, 0, 7]
        """
        begin = self.position if from_pos is None else from_pos
        if self.is_shared and not self._is_untouched:
            raise err(
                Code.ARGUMENT,
                "several workers have issued samples of the launch, up to different positions",
                where="skip",
                remedy="Skip before the first issue() after a load; or discard() the tickets.",
            )
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
            skip = ShardSkip(
                policy=policy,
                from_pos=begin,
                reason=reason,
                source=name,
                shard=shard[0],
                range=shard[1:],
            )
        else:
            ids = tuple(sorted({int(sample) for sample in samples or ()}))
            skip = SampleSkip(policy=policy, from_pos=begin, reason=reason, source=name, ids=ids)
        if begin < self.position and not any(_says_the_same(known, skip) for known in self._skips):
            detail = (
                f"the skip begins at position {begin}, and {self.position} positions are"
                " consumed already"
            )
            raise err(Code.ARGUMENT, detail, requirement="REQ-CUR-020")
        self.add_skip(skip)

    def add_skip(self, skip: Skip) -> None:
        """Add a skip that begins at no consumed position, unless the cursor has the skip."""
        if any(_says_the_same(known, skip) for known in self._skips):
            return
        self._course = self._try_course((*self._skips, skip))
        self._skips = (*self._skips, skip)
        self._loaded = None
        self.has_new_skips = True
        if self._tickets is not None:
            self._tickets.forget_ready()
            return
        if skip.begin < self._position_of(self._progress.steps_fetched):
            self._progress = dataclasses.replace(
                self._progress, steps_fetched=self.steps_done, fetches=[], serving=None, moved=[]
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: the same tree on every worker, for any number of workers.

        If several workers issue samples, a save merges their shares first. Outside of a save the
        result is then this worker's share, which `load_state_dict` refuses.

        Raises: StateError(ARGUMENT) if hundreds of batches were fetched and no step was counted, or
            hundreds of steps were counted and no ticket was consumed or discarded.
        Spec: REQ-CUR-002, REQ-CUR-004, REQ-CUR-005, REQ-CUR-010, REQ-CUR-021, REQ-PIP-003.
        """
        ahead = self._progress.steps_fetched - self.steps_done
        if ahead > _AHEAD_MAX and not self._progress.told:
            detail = f"{ahead} batches were fetched, and no step was counted"
            raise err(
                Code.ARGUMENT,
                detail,
                remedy="Call sampler.advance() after each step, or sampler.commit(step).",
            )
        is_as_loaded = self._loaded is not None and self._loaded.commit.step == self.steps_done
        if self._loaded is not None and is_as_loaded and self._is_untouched:
            return dump_cursor(self._loaded)
        if self._tickets is not None:
            return self._pipeline_tree(self._tickets)
        self._count()
        progress = self._progress
        cursor = self._cursor(
            self._course,
            self._skips,
            step=progress.steps_done,
            position=self.position,
            ledger=progress.counted,
        )
        return dump_cursor(cursor)

    def _pipeline_tree(self, tickets: Tickets) -> dict[str, Any]:
        """Return the cursor of a pipeline, or this worker's share of the cursor."""
        steps = self.steps_done - self._progress.first_step
        if steps > _AHEAD_MAX and not (self._is_untouched or tickets.is_answered):
            raise err(
                Code.ARGUMENT,
                f"{steps} steps were counted, and no ticket was consumed or discarded",
                remedy="Call sampler.consume(tickets) in the step that trains on the tickets.",
            )
        merged = self._merged
        if merged is None:
            share = self.share()
            begin = tickets.begin
            if share.worker_count > 1 and (steps or not share.is_untouched):
                kind = "ckptfmt.data_cursor_share"
                return {"kind": kind, "v": 1, "step": self.steps_done, "share": share.as_json()}
            if share.worker_count > 1:
                share = dataclasses.replace(
                    share, worker=0, worker_count=1, next=begin.position, open=begin.open
                )
            merged = merge_shares([share], begin, self._course)
        cursor = self._cursor(
            self._course,
            self._skips,
            step=self.steps_done,
            position=merged.position,
            ledger=merged.ledger,
        )
        return dump_cursor(dataclasses.replace(cursor, pipeline=merged.pipeline))

    # --- tickets ----------------------------------------------------------------------------------

    def issue(self, count: int = 1) -> list[Ticket]:
        """Return tickets for the next samples of this worker, for a pipeline.

        The open positions of a loaded cursor come first: the samples that were issued, but neither
        consumed nor discarded, before the saved step. The order has no end: a loop that stops after
        an epoch compares `Ticket.epoch` or `Ticket.position`.

        Any thread may call `issue`, `consume` and `discard`.

        Raises: StateError(ARGUMENT) without ``pipeline=True``, or with more than
            `limits.OPEN_POSITIONS` open tickets; StateError(WRITERS_UNKNOWN).

        >>> sampler = Sampler(10, global_batch=4, seed=0, worker=(0, 1), pipeline=True)
        >>> first, second, third = sampler.issue(3)
        >>> first.position, first.sample
        (0, 3)
        >>> sampler.discard([third])
        >>> sampler.consume([second])
        >>> sampler.advance()
        >>> resumed = Sampler(10, global_batch=4, seed=0, worker=(0, 1), pipeline=True)
        >>> resumed.load_state_dict(sampler.state_dict())
        >>> [ticket.position for ticket in resumed.issue(3)]
        [0, 3, 4]
        """
        tickets = self._tickets_or_refuse("issue")
        if not hasattr(count, "__index__") or count < 1:
            raise err(Code.ARGUMENT, f"issue({count!r}) isn't a number of samples from 1 on")
        self._progress.read = True
        return tickets.issue(
            count,
            course=self._course,
            names=[source.id for source in self._sources],
            worker=self._worker or distributed_worker(),
        )

    def consume(self, tickets: Iterable[Ticket]) -> None:
        """Record tickets as trained in the step that the loop is now in.

        The samples are consumed once the step is counted: a save before then still has them as
        open. Call this within the last step that trains on the samples.

        Raises: StateError(ARGUMENT) for a ticket that was consumed or discarded before, or that
            another launch issued. Then none of the tickets is recorded.
        """
        self._tickets_or_refuse("consume").consume(tickets)

    def discard(self, tickets: Iterable[Ticket]) -> None:
        """Record that no step will train on tickets, such as prompts with useless answers.

        The cursor has the number and a digest of all discarded samples.

        Raises: as `consume`.
        """
        self._tickets_or_refuse("discard").discard(tickets)

    @property
    def outstanding(self) -> list[Ticket]:
        """The tickets that are neither consumed nor discarded, in the order of issue.

        Raises: StateError(ARGUMENT) without ``pipeline=True``.
        """
        return self._tickets_or_refuse("outstanding").outstanding()

    @property
    def is_shared(self) -> bool:
        """Whether several workers issue samples, whose shares a save merges."""
        return self.is_pipeline and (self._worker or distributed_worker())[1] > 1

    @property
    def _is_untouched(self) -> bool:
        """Whether this worker has issued no ticket; while `merging`, whether no worker has."""
        if self._merged is not None:
            return self._merged.is_untouched
        return self._tickets is None or self._tickets.is_untouched

    def share(self) -> Share:
        """Return this worker's share of the samples issued by the workers of a launch.

        Raises: StateError(ARGUMENT) without ``pipeline=True``; StateError(WRITERS_UNKNOWN).
        """
        return self._tickets_or_refuse("share").share(self._worker or distributed_worker())

    @contextlib.contextmanager
    def merging(self, shares: Sequence[Share]) -> Iterator[None]:
        """Let `state_dict` return the cursor of all workers within the context.

        Args:
            shares: the shares of all workers.

        Raises: as `ckptfmt.data.tickets.merge_shares`.
        """
        tickets = self._tickets_or_refuse("merging")
        self._merged = merge_shares(shares, tickets.begin, self._course)
        try:
            yield
        finally:
            self._merged = None

    def _tickets_or_refuse(self, name: str) -> Tickets:
        if self._tickets is None:
            raise err(
                Code.ARGUMENT,
                f"{name} is called on a sampler that is read by iterating",
                where=_STEPS,
                remedy="Pass pipeline=True to Sampler.",
            )
        return self._tickets

    # --- positions --------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the position of a cursor. Right afterwards, `state_dict` returns the same cursor.

        A loop with ``pipeline=True`` stops its other threads first: tickets from before the load
        are invalid.

        The number of workers may differ; with the tail ``carry``, `global_batch` may differ; and
        stages of a mixture after the cursor's position may differ. The skips are taken from the
        cursor.

        Raises: FormatError(CURSOR_FORM), UnsupportedError; StateError(CONFIG_IDENTITY) if a data
            set's length, name or fingerprint, the seed, the tail, or the consumed part of the
            mixture differs.
        Spec: REQ-CUR-001 to REQ-CUR-004, REQ-CUR-006, REQ-CUR-014, REQ-PIP-004.
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
        step = cursor.commit.step
        position = cursor.commit.global_pos
        self._progress = _Progress(
            first_step=step,
            first_position=position,
            steps_done=step,
            steps_fetched=step,
            counted=cursor.ledger,
            counted_to=position,
        )
        if self._tickets is not None:
            pipeline = cursor.pipeline or Pipeline(open=(), discarded=EMPTY)
            self._tickets = Tickets(
                Begin(
                    position=position,
                    open=pipeline.open,
                    ledger=cursor.ledger,
                    discarded=pipeline.discarded,
                )
            )

    def _position_of(self, step: int) -> int:
        return (
            self._progress.first_position
            + (step - self._progress.first_step) * self._plan.global_batch
        )

    def _first_position(self, step: int) -> int:
        if self.is_pipeline:
            raise err(
                Code.ARGUMENT,
                "the sampler has pipeline=True: steps have no samples of their own",
                where=_STEPS,
                remedy="Call issue(), consume() and discard(); or make the sampler without"
                " pipeline=True, and iterate.",
            )
        if step < self._progress.first_step:
            raise err(
                Code.ARGUMENT, f"step {step} is before the first one, {self._progress.first_step}"
            )
        return self._position_of(step)

    def _part(self, step: int) -> Stretch:
        """Return the rows of this worker's positions in a step."""
        position = self._first_position(step)
        size = self._plan.global_batch
        self._progress.read = True
        number, count = self._worker or distributed_worker()
        check_worker((number, count), size // self._micro_batches)
        part = self._course.stretch(
            position + number * size // count, position + (number + 1) * size // count
        )
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
            course = Course(
                self._sources, seed=self._seed, plan=self._plan, mixture=self._mixture, skips=skips
            )
            dump_cursor(self._cursor(course, skips, step=0, position=0, ledger=EMPTY))
        return course

    def _cursor(
        self, course: Course, skips: tuple[Skip, ...], *, step: int, position: int, ledger: Ledger
    ) -> Cursor:
        source, sample = course.sample_at(position)
        epoch, pos_in_epoch = course.epoch_at(position)
        commit = Commit(step=step, global_pos=position, epoch=epoch, pos_in_epoch=pos_in_epoch)
        vector = VectorCheck(pos=position, id=sample)
        sources = self._sources
        if self._mixture is not None:
            commit = Commit(step=step, global_pos=position)
            vector = VectorCheck(pos=position, id=sample, source=source)
            draws = course.draws_before(position)
            sources = tuple(
                dataclasses.replace(one, pos=pos) for one, pos in zip(sources, draws, strict=True)
            )
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
        # A shifting skip depends on all stages of the mixture within its range.
        shifts = (
            skip for skip in cursor.skips if isinstance(skip, PosSkip) and skip.policy == "shift"
        )
        position = max(
            cursor.commit.global_pos,
            *(s.range[1] for s in shifts if s.begin < cursor.commit.global_pos),
            0,
        )
        pairs: dict[str, tuple[object, object]] = {
            "number of samples": _each([source.n for source in sources] for sources in both),
            "source": _each([source.id for source in sources] for sources in both),
            "fingerprint": _each([pair[side] for pair in fingerprints] for side in (0, 1)),
            "seed": (cursor.order.seed, self._seed),
            "tail": (cursor.plan.tail, self._plan.tail),
            "mixture": (_begun(cursor.mixture, position), _begun(self._mixture, position)),
        }
        if cursor.pipeline is not None:
            pairs["pipeline"] = (True, self.is_pipeline)
        if self._plan.tail != "carry":  # the ends of epochs depend on it
            pairs["global_batch"] = (cursor.plan.global_batch, self._plan.global_batch)
        for name, (theirs, ours) in pairs.items():
            if theirs != ours:
                raise err(
                    Code.CONFIG_IDENTITY,
                    f"the cursor's {name} is {theirs!r}, the sampler's {ours!r}",
                    where="cursor",
                    remedy="Make the sampler of the same data set and seed. To begin the data"
                    " anew: override=['data:*']"
                    " for one start of a Checkpointer, or a load without the data.",
                )


def _shares(fetches: _Fetches, step: int, size: int, remedy: str) -> CkptError:
    """Return the error of steps that took a wrong number of pieces."""
    count = step - fetches.counted_step
    taken = fetches.taken - fetches.counted_taken
    if not fetches.counted_taken:
        taken -= fetches.primed
    pieces = "batches" if size == 1 else "micro-batches"
    which = f"step {step - 1}" if count == 1 else f"steps {fetches.counted_step} to {step - 1}"
    if taken > count * size and taken % count == 0:
        remedy = (
            f"Where a step accumulates the gradients of {taken // count} batches, pass"
            f" micro_batches={taken // count}"
            f" to Sampler, and as global_batch= the samples of the whole step. {remedy}"
        )
    return err(
        Code.ARGUMENT,
        f"{which} took {taken} {pieces} of the sampler by iterating, where {count * size} is"
        " right: the cursor of a"
        " save would not be the place where the training stands",
        where=_STEPS,
        remedy=f"{remedy}; a Sampler that isn't read as the training goes stays out of State.",
    )


def _says_the_same(known: Skip, skip: Skip) -> bool:
    """Return whether a known skip leaves out the same from the same or an earlier position on.

    The reasons may differ.
    """
    if isinstance(skip, PosSkip) or isinstance(known, PosSkip):
        return known == dataclasses.replace(skip, reason=known.reason)
    begins_earlier = known.from_pos <= skip.from_pos
    return begins_earlier and known == dataclasses.replace(
        skip, reason=known.reason, from_pos=known.from_pos
    )


def _each(sides: Iterable[list[Any]]) -> tuple[object, object]:
    """Return the values of both sides, without the list if there is a single source."""
    theirs, ours = (values[0] if len(values) == 1 else values for values in sides)
    return theirs, ours


def _begun(mixture: Mixture | None, position: int) -> object:
    """Return the parts of a mixture that decided the positions before `position`.

    These parts may not change any more.
    """
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
            raise err(
                Code.ARGUMENT,
                "there are several sources, and no mixture",
                remedy="Pass mixture={name: count}.",
            )
        if isinstance(fingerprint, Mapping):
            raise err(Code.ARGUMENT, "fingerprint is a mapping, but there is one source only")
        return (Source(id=source, fingerprint=fingerprint, n=_length(dataset)),)
    if not isinstance(dataset, Mapping) or not dataset:
        raise err(Code.ARGUMENT, "a mixture needs a mapping from names to data sets")
    if not (fingerprint is None or isinstance(fingerprint, Mapping)):
        raise err(Code.ARGUMENT, "a mixture needs a mapping from names to fingerprints")
    prints = fingerprint or {}
    return tuple(
        Source(id=name, fingerprint=prints.get(name), n=_length(one))
        for name, one in dataset.items()
    )


def _length(dataset: int | Sized) -> int:
    return dataset if isinstance(dataset, int) else len(dataset)


def _mixture(
    mixture: Mapping[str, int] | Mapping[int, Mapping[str, int]],
    seed: int,
    sources: Iterable[Source],
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
        return parse_mixture(
            CursorMap(tree, "mixture="), {source.id: source.n for source in sources}
        )


@contextlib.contextmanager
def _as_argument() -> Iterator[None]:
    """Turn an error of a cursor's members into an error of the arguments behind them."""
    try:
        yield
    except CkptError as error:
        raise err(Code.ARGUMENT, error.detail, where=error.where) from error

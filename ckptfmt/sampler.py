"""The order in which a run sees its data: shuffled, endless, the same on any number of workers, resumable."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.arithmetic.ledger import EMPTY, add_ledgers, ledger_of_range
from ckptfmt.arithmetic.shuffle import sample_at, sample_indices
from ckptfmt.documents.cursor import Commit, Cursor, Ledger, Order, Plan, Source, VectorCheck, dump_cursor, parse_cursor
from ckptfmt.errors import CkptError, Code, err

__all__ = ["Sampler"]

#: Samples after which `advance` brings the ledger up to date, so that a save never has to catch up with many.
_LEDGER_LAG: Final = 1 << 16
#: More batches than any loader fetches ahead: who fetched as many and never said that a step is done has forgotten to.
_AHEAD_MAX: Final = 512


@dataclasses.dataclass(slots=True, kw_only=True)
class _Progress:
    """Where the run stands since it began or a cursor was loaded."""

    first_step: int = 0
    first_position: int = 0
    steps_done: int = 0
    steps_fetched: int = 0
    #: Whether `advance` or `commit` was ever called.
    told: bool = False
    #: Samples in the ledger.
    counted: Ledger = EMPTY


class Sampler:
    """Yield this worker's part of each step's samples, step after step, and know which steps are done.

    It is a `batch_sampler` for a map-style DataLoader, ``DataLoader(dataset, batch_sampler=sampler)``, without torch.

    **Order.** The order is a pure function of `seed`: epoch after epoch without end, each a permutation
    (``feistel-v1``) in which every sample stands once. Step s takes the next `global_batch` positions, and worker i
    of w the contiguous slice from ``i * global_batch // w`` to ``(i + 1) * global_batch // w`` of them: so the
    samples of a step don't depend on w. There is no short batch: one that reaches the end of an epoch goes on with
    the next (nothing is dropped or padded, so `drop_last` has no meaning here).

    **Position.** What a loader has fetched is not what the run has consumed. The cursor moves only when the program
    says that a step is done: `commit` with the number of steps done, or `advance` after each. Iterators start at
    the cursor, and those from before a `load_state_dict` are refused, since what they prefetched is no longer due.

    Args:
        dataset: the data set, or its number of samples.
        global_batch: samples per step, over all workers; at least as many as workers.
        seed: of the order, 64 bits. A cursor of another seed is refused.
        worker: this worker's number and how many there are. Left out: rank and world size of torch.distributed where it
            is initialised by the time of the first batch, else the only worker. Workers that must see the same samples
            (tensor or pipeline parallel) pass the data-parallel rank and size.
        source: a name of the data set; it enters the ledger.
        fingerprint: of the data set's contents, by any means of the caller's; a cursor with another is refused.

    Raises: StateError(ARGUMENT).

    >>> sampler = Sampler(10, global_batch=4, seed=0, worker=(0, 2))
    >>> batches = iter(sampler)
    >>> next(batches), next(batches), sampler.steps_done
    ([3, 1], [8, 5], 0)
    >>> sampler.advance()
    >>> next(iter(sampler))
    [8, 5]
    """

    def __init__(
        self,
        dataset: int | Sized,
        *,
        global_batch: int,
        seed: int = 0,
        worker: tuple[int, int] | None = None,
        source: str = "data",
        fingerprint: str | None = None,
    ) -> None:
        count = dataset if isinstance(dataset, int) else len(dataset)
        if not 1 <= global_batch <= limits.DIM:
            raise err(Code.ARGUMENT, f"global_batch {global_batch}: it is at least 1")
        if worker is not None:
            _check_worker(worker, global_batch)
        sample_at(count, seed=seed, position=0)  # refuses a length or a seed out of range
        self._source = Source(id=source, fingerprint=fingerprint, n=count)
        self._global_batch = global_batch
        self._seed = seed
        self._worker = worker
        self._loaded: Cursor | None = None
        self._progress = _Progress()

    @property
    def steps_done(self) -> int:
        """How many steps are done, over the whole run."""
        return self._progress.steps_done

    @property
    def position(self) -> int:
        """How many samples the steps that are done have consumed, over all workers and the whole run."""
        return self._position_of(self.steps_done)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this worker's samples of each step that isn't done yet, without end.

        The first step is that of the cursor when the first batch is asked for.

        Raises: StateError(ARGUMENT) when a cursor was loaded since the first batch, or there are more workers than
            samples in a batch; StateError(WRITERS_UNKNOWN).
        """
        progress, step = self._progress, self.steps_done
        while True:
            if progress is not self._progress:
                detail = "load_state_dict was called after this iterator's first batch"
                raise err(Code.ARGUMENT, detail, remedy="Restore first, then call iter() on the loader.")
            yield self.indices(step)
            step += 1
            progress.steps_fetched = max(progress.steps_fetched, step)

    def indices(self, step: int) -> list[int]:
        """Return this worker's samples of one step, counted over the whole run from 0.

        Raises: StateError(ARGUMENT) for a step before the loaded cursor's, whose batches may have had another size;
            StateError(WRITERS_UNKNOWN).
        """
        if step < self._progress.first_step:
            raise err(Code.ARGUMENT, f"step {step} is before the first one, {self._progress.first_step}")
        number, count = self._worker or _distributed_worker()
        _check_worker((number, count), self._global_batch)
        position = self._position_of(step)
        begin = position + number * self._global_batch // count
        end = position + (number + 1) * self._global_batch // count
        samples: list[int] = sample_indices(self._source.n, seed=self._seed, begin=begin, end=end).tolist()
        return samples

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
        if self.position - self._progress.counted.count >= _LEDGER_LAG:
            self._count()

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: the same tree on every worker, and for every number of workers.

        Raises: StateError(ARGUMENT) when hundreds of batches were fetched and no step was ever said to be done.
        Spec: REQ-CUR-002, REQ-CUR-004, REQ-CUR-005.
        """
        ahead = self._progress.steps_fetched - self.steps_done
        if ahead > _AHEAD_MAX and not self._progress.told:
            detail = f"{ahead} batches were fetched, and no step was said to be done"
            raise err(Code.ARGUMENT, detail, remedy="Call sampler.advance() after each step, or sampler.commit(step).")
        if self._loaded is not None and self._loaded.commit.step == self.steps_done:
            return dump_cursor(self._loaded)
        self._count()
        return dump_cursor(self._cursor())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to where a cursor stands. Another number of workers and another `global_batch` are fine.

        Right after it, `state_dict` returns what was loaded.

        Raises: FormatError(CURSOR_FORM), UnsupportedError; StateError(CONFIG_IDENTITY) when the data set's length,
            name or fingerprint, or the seed, is another one.
        Spec: REQ-CUR-001 to REQ-CUR-004.
        """
        cursor = parse_cursor(dict(state_dict))
        self._check_same(cursor)
        vector = cursor.order.vector_check
        sample = sample_at(self._source.n, seed=self._seed, position=vector.pos)
        if sample != vector.id:
            detail = f"the order has sample {sample} at position {vector.pos}, the cursor says {vector.id}"
            raise err(Code.CURSOR_FORM, detail, where="cursor/order/vector_check", requirement="REQ-CUR-006")
        if self._source.fingerprint is None:
            self._source = cursor.sources[0]
        self._loaded = cursor
        step, position = cursor.commit.step, cursor.commit.global_pos
        self._progress = _Progress(
            first_step=step,
            first_position=position,
            steps_done=step,
            steps_fetched=step,
            counted=cursor.ledger,
        )

    def _position_of(self, step: int) -> int:
        return self._progress.first_position + (step - self._progress.first_step) * self._global_batch

    def _count(self) -> None:
        counted = self._progress.counted
        begin, end = counted.count, self.position
        news = ledger_of_range(self._source.id, self._source.n, seed=self._seed, begin=begin, end=end)
        self._progress.counted = add_ledgers(counted, news)

    def _cursor(self) -> Cursor:
        n, position = self._source.n, self.position
        epoch, pos_in_epoch = divmod(position, n)
        vector = VectorCheck(pos=position, id=sample_at(n, seed=self._seed, position=position))
        return Cursor(
            plan=Plan(global_batch=self._global_batch),
            commit=Commit(step=self.steps_done, global_pos=position, epoch=epoch, pos_in_epoch=pos_in_epoch),
            order=Order(seed=self._seed, vector_check=vector),
            sources=(self._source,),
            ledger=self._progress.counted,
        )

    def _check_same(self, cursor: Cursor) -> None:
        saved = cursor.sources[0]
        fingerprints = (saved.fingerprint, self._source.fingerprint)
        pairs = {
            "number of samples": (saved.n, self._source.n),
            "source": (saved.id, self._source.id),
            "fingerprint": fingerprints if None not in fingerprints else (None, None),
            "seed": (cursor.order.seed, self._seed),
        }
        for name, (theirs, ours) in pairs.items():
            if theirs != ours:
                raise _other(name, theirs, ours)


def _other(name: str, theirs: object, ours: object) -> CkptError:
    return err(
        Code.CONFIG_IDENTITY,
        f"the cursor's {name} is {theirs!r}, the sampler's {ours!r}",
        where="cursor",
        remedy="Make the sampler of the same data set and seed; to begin anew on other data, leave the cursor out.",
    )


def _check_worker(worker: tuple[int, int], global_batch: int) -> None:
    number, count = worker
    if not 0 <= number < count:
        raise err(Code.ARGUMENT, f"there is no worker {number} of {count}")
    if count > global_batch:
        raise err(Code.ARGUMENT, f"a batch of {global_batch} samples can't be spread over {count} workers")


def _distributed_worker() -> tuple[int, int]:
    """Return rank and world size of torch.distributed; who didn't import it is alone."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    # Every rank of a launcher would read the same samples, and nothing would say so.
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        detail = f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and torch.distributed isn't initialised"
        raise err(Code.WRITERS_UNKNOWN, detail, remedy="Initialise torch.distributed first, or pass worker=(i, n).")
    return 0, 1

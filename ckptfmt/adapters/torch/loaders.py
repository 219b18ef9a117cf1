"""Follow a torch DataLoader as it is: count the batches that the loop takes, and resume by index.

A followed loader has one attribute more, a replacement of ``_get_iterator``. The replacement makes
torch's own iterators, of subclasses that count. The loader, its samplers, their order and the
length stay as they are.

The samplers draw random numbers when an epoch begins. The position has the states of the streams at
this moment. A resume sets these states, lets the samplers make the same order again, drops the
indices of the batches taken, and puts the streams back. No dropped sample is loaded.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import functools
import gc
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.data import dataloader as torch_loaders

from ckptfmt.adapters.data_loaders import EpochLoader
from ckptfmt.adapters.streamed_data import EXACT, is_repeatable
from ckptfmt.adapters.torch.loader_streams import (
    DrawnBatch,
    LoaderStreams,
    States,
    WorkerStreams,
    dump_states,
    is_of_program,
    parse_states,
)
from ckptfmt.data.cursor import Foreign, dump_foreign, parse_foreign
from ckptfmt.data.epoch_position import (
    LIB,
    Epoch,
    EpochPosition,
    Sizes,
    dump_position,
    parse_position,
)
from ckptfmt.digest import digest_bytes
from ckptfmt.errors import CkptError, Code, err

_WHERE: Final = "loader"
_NO_DIGEST: Final = bytes(32)
_SCALARS: Final = (bool, int, float, str, type(None))
#: Numbers of batches in the first steps of a loop that takes each batch a step ahead.
_AHEAD: Final = [2, 1, 1, 1, 1, 1]
_SEED: Final = "_ckptfmt_seed"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Visit:
    """An iteration over the loader, which is an epoch, or the begin of an epoch.

    Attributes:
        number: number of epochs before.
        streams: the streams from which samplers and data set may draw.
        taken: number of batches taken by the loop.
        digest: digest of the samples taken; None for samples without numbers.
        attributes: changed attributes of the samplers at the begin.
        begin, first: streams before the sampler's iterator was made, and before its first batch.
        redrawn: names of the streams from which later batches were drawn.
        ahead: batches drawn by the sampler, and not taken by the loop.
        is_drawn: whether the sampler has no further batch.
        seed: seed of the worker processes.
        workers: states of each worker process's streams after its last batch taken.
        is_over: whether the loop has come to the end.
        is_counted: whether a step was counted since the begin of the epoch.
        restored_streams: whether the begin of this visit has put back the RNG streams.
        source: the position from which the visit began; None for a fresh epoch.
        mark: result of `note_fetch` before the last batch.
    """

    number: int
    streams: LoaderStreams
    taken: int = 0
    digest: bytes | None = _NO_DIGEST
    attributes: dict[str, object]
    begin: States = dataclasses.field(default_factory=dict)
    first: States | None = None
    redrawn: set[str] = dataclasses.field(default_factory=set)
    ahead: collections.deque[Any] = dataclasses.field(default_factory=collections.deque)
    is_drawn: bool = False
    seed: int | None = None
    workers: list[States | None]
    is_over: bool = False
    is_counted: bool = False
    restored_streams: bool = False
    source: EpochPosition | None = None
    mark: object = None


class FollowedLoader(EpochLoader):
    """The position of a DataLoader, as an object of a State.

    Attributes:
        worker_count: number of workers of the job.
        before_batch: called before each batch is loaded; false ends the iteration.
        begin_streams: puts the RNG streams of a checkpoint back; None once they are.
        after_batch: called after each batch is loaded.
        before_epoch: called before the iterator of an epoch draws random numbers.
        note_fetch: called before each batch is loaded; see `drawn_in_hand`.
        is_by_steps: whether a `Checkpointer` counts the steps.
        has_begun: whether the first step has begun. An iterator made before may be a look at the
            data; an iterator made after belongs to the training.

    Raises: StateError(STATE_UNSUPPORTED) for a loader whose order can't be followed.
    """

    has_new_skips = False
    is_pipeline = False

    def __init__(self, loader: Any, *, where: str) -> None:
        _check(loader, where)
        self._ref = weakref.ref(loader)
        self.worker_count = 1
        self.before_batch: Callable[[], bool] | None = None
        self.begin_streams: Callable[[], object] | None = None
        self.after_batch: Callable[[], object] | None = None
        self.before_epoch: Callable[[], object] | None = None
        self.note_fetch: Callable[[], object] | None = None
        self.is_by_steps = self.has_begun = False
        #: Attributes of the samplers when the loader was first seen, and names of loaded ones.
        self._attributes = _attributes(loader)
        self._loaded_names: set[str] = set()
        self._draws = False
        self._epoch = 0
        self._visit: _Visit | None = None
        #: The visit during which a position was loaded.
        self._left: _Visit | None = None
        #: The loaded position and its tree, until a visit has gone on from there.
        self._loaded: EpochPosition | None = None
        self._tree: dict[str, Any] | None = None
        #: Seed and streams of worker processes that live for all epochs.
        self._seed: int | None = None
        self._workers: list[States | None] = [None] * loader.num_workers
        self._steps = self._taken = self._counted = 0
        self._thread: int | None = None
        self._counts: list[int] = []
        self._samples = 0
        self._step_samples: dict[int, int] = {}
        loader._get_iterator = self._make  # noqa: SLF001 - torch's only hook

    @property
    def loader(self) -> Any:
        """The loader."""
        found = self._ref()
        assert found is not None  # noqa: S101 - the State holds the loader
        return found

    @property
    def epoch(self) -> int:
        """The number of epochs before the current epoch."""
        if self._visit is not None:
            return self._visit.number
        return self._epoch

    @property
    def position(self) -> int:
        """A number that grows with each batch taken, over all epochs."""
        return (self.epoch << 32) + (0 if self._visit is None else self._visit.taken)

    @property
    def is_unread(self) -> bool:
        """Whether steps were counted, but no batch was taken."""
        return self._steps > 0 and not self._taken

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position. Spec: REQ-EPO-001."""
        if self._tree is not None and self._visit is None:
            return self._tree
        if self._tree is not None and self._visit is not None and self._is_at_loaded(self._visit):
            return self._tree
        return dump_foreign(
            Foreign(
                lib=LIB,
                version=str(torch.__version__),
                per="worker",
                worker_count=self.worker_count,
                state=dump_position(self._position()),
            )
        )

    def _is_at_loaded(self, visit: _Visit) -> bool:
        source = visit.source
        return source is not None and visit.taken == source.batches and not visit.is_over

    def _position(self) -> EpochPosition:
        loader = self.loader
        visit = self._visit
        workers = self._workers if visit is None else visit.workers
        current = None
        if visit is not None:
            current = Epoch(
                begin=dump_states(visit.begin),
                first=None if visit.first is None else dump_states(visit.first),
                redrawn=tuple(sorted(visit.redrawn)),
                ahead=tuple(visit.ahead) if visit.redrawn else None,
                is_drawn=visit.is_drawn,
                seed=visit.seed,
                digest=None if visit.digest is None else visit.digest.hex(),
            )
        return EpochPosition(
            sizes=_sizes(loader),
            epoch=self.epoch,
            batches=0 if visit is None else visit.taken,
            attributes=self._changed_attributes() if visit is None else visit.attributes,
            process_count=loader.num_workers,
            draws=self._draws,
            streams=tuple(None if states is None else dump_states(states) for states in workers),
            current=current,
            seed=self._seed,
        )

    def compare(self, saved: Foreign) -> list[str]:
        """Return the differences of the loader from the saved loader; any forbids a load.

        Raises: FormatError(CURSOR_FORM).
        Spec: REQ-EPO-003.
        """
        if saved.lib != LIB:
            return [f"the saved position is of {saved.lib!r}, and here is a DataLoader of torch"]
        before = parse_position(saved.state).sizes
        now = _sizes(self.loader)
        return [
            f"{field.name}: saved {getattr(before, field.name)!r},"
            f" here {getattr(now, field.name)!r}"
            for field in dataclasses.fields(Sizes)
            if getattr(before, field.name) != getattr(now, field.name)
        ]

    def find_doubts(self, saved: Foreign) -> list[str]:
        """Return the reasons why a load of the position claims no T1."""
        position = parse_position(saved.state)
        doubts = []
        names = set() if position.current is None else set(position.current.redrawn)
        if drawn := sorted(filter(is_of_program, names)):
            doubts.append(
                "the sampler draws from the program's random numbers"
                f" ({', '.join(drawn)}) all through an epoch: the rest of the epoch may have"
                " another order; give the sampler a generator of its own"
            )
        count = self.loader.num_workers
        if position.draws and position.process_count != count:
            doubts.append(
                f"the data set draws random numbers in {position.process_count or 'no'} worker"
                f" processes, and here are {count or 'none'}: num_workers="
            )
        if _is_iterable(self.loader) and position.draws and position.seed is not None:
            doubts.append(
                "the data set draws random numbers in worker processes that live for all epochs"
                " (persistent_workers=True), and begins the epoch again with other random numbers"
            )
        return doubts

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Move to a position. Iterators made before raise an error from now on.

        Raises: FormatError(CURSOR_FORM); StateError(CONFIG_IDENTITY).
        Spec: REQ-EPO-001, REQ-EPO-003.
        """
        foreign = parse_foreign(dict(state_dict))
        if differences := self.compare(foreign):
            raise err(Code.CONFIG_IDENTITY, "; ".join(differences), where=_WHERE)
        loader = self.loader
        position = parse_position(foreign.state)
        self._left = self._visit or self._left
        self._visit = None
        self._samples = 0
        self._step_samples = {}
        loader._iterator = None  # noqa: SLF001 - worker processes of another position
        self._loaded = position
        self._tree = dict(state_dict)
        self.worker_count = foreign.worker_count
        self._epoch = position.epoch
        self._draws = position.draws
        self._seed = position.seed
        self._workers = [None] * loader.num_workers
        if position.process_count == loader.num_workers:
            self._workers = [None if one is None else parse_states(one) for one in position.streams]
        self._loaded_names |= position.attributes.keys()
        _set_attributes(loader, position.attributes)
        self._counts = []
        self._counted = self._taken

    # --- steps ------------------------------------------------------------------------------------

    def note_step(self, step: int) -> None:
        """Count a step.

        Raises: StateError(ARGUMENT) if the batches are taken ahead of the steps.
        """
        visit = self._visit
        self._steps += 1
        if visit is not None:
            visit.is_counted = True
        if self._thread not in (None, threading.get_ident()):
            raise _misuse(
                "the batches of the loader are taken by another thread than the steps are"
                " counted by: batches that the other thread holds would be lost at a resume",
                "Take the batches in the thread that trains.",
            )
        self._step_samples = {step - 1: self._samples}
        self._samples = 0
        if len(self._counts) < len(_AHEAD):
            self._counts.append(self._taken - self._counted)
            if self._counts == _AHEAD:
                raise _misuse(
                    f"step {step} is counted, and the loop has taken a batch more: it takes each"
                    " batch a step ahead, and the batch at hand would be lost at a resume",
                    "Take each batch in the step that trains on it; worker processes"
                    " (num_workers=) load batches ahead.",
                )
        self._counted = self._taken

    def samples_digest(self, step: int) -> int | None:
        """Return a digest of the samples of a step; None if they are unknown."""
        return self._step_samples.get(step)

    def drawn_in_hand(self, mark: object) -> bool:
        """Return whether random numbers were drawn after a batch of an uncounted step was taken."""
        visit = self._visit
        if visit is None or visit.is_counted or visit.mark is None:
            return False
        return visit.mark != mark

    @property
    def is_at_end(self) -> bool:
        """Whether the loop has taken all batches of the epoch, by the loader's length."""
        count = _sizes(self.loader).batch_count
        return self._visit is not None and self._visit.taken == count

    def leave_epoch(self) -> None:
        """End the current epoch after a loop without the last batches."""
        if self._visit is not None:
            self.end(self._visit)

    # --- iterators --------------------------------------------------------------------------------

    def _make(self) -> Any:
        """Return an iterator of the loader: the replacement of ``_get_iterator``."""
        loader = self.loader
        visit = self.open()
        if loader.num_workers:
            loader.check_worker_number_rationality()
        base: Any = (
            torch_loaders._MultiProcessingDataLoaderIter  # noqa: SLF001 - torch has no public name
            if loader.num_workers
            else torch_loaders._SingleProcessDataLoaderIter  # noqa: SLF001
        )
        kind = _following(base)
        iterator = kind.__new__(kind)
        iterator.follower = self
        iterator.visit = visit
        source = visit.source
        current = None if source is None else source.current
        seed = self._seed if current is None else current.seed
        iterator.given_seed = seed
        is_quiet = current is not None or seed is not None
        iterator.shift = visit.taken % loader.num_workers if loader.num_workers else 0
        if _is_iterable(loader):
            self._make_iterable(iterator, visit, current, is_quiet=is_quiet)
        else:
            with self._replacing(loader, is_quiet=is_quiet):
                iterator.__init__(loader)
            iterator.prepare()
        if loader.num_workers:
            visit.seed = iterator._base_seed  # noqa: SLF001 - torch's
            self._seed = visit.seed if loader.persistent_workers else None
        return iterator

    def _make_iterable(
        self, iterator: Any, visit: _Visit, current: Epoch | None, *, is_quiet: bool
    ) -> None:
        """Make an iterator of an iterable data set, and read the batches taken again."""
        loader = self.loader
        streams = visit.streams
        visit.digest = None
        iterator.shift = 0
        if current is None:
            visit.begin = streams.read()
            with self._replacing(loader, is_quiet=is_quiet):
                iterator.__init__(loader)
            return
        before = streams.read()
        visit.begin = parse_states(current.begin)
        visit.first = None if current.first is None else parse_states(current.first)
        visit.redrawn = set(current.redrawn)
        try:
            streams.write(visit.begin)
            with self._replacing(loader, is_quiet=is_quiet):
                iterator.__init__(loader)
            streams.write(visit.first or {})
            for _ in range(visit.taken):
                iterator.skip()
        finally:
            streams.write(before)

    @contextlib.contextmanager
    def _replacing(self, loader: Any, *, is_quiet: bool) -> Iterator[None]:
        """Replace arguments of the loader while torch makes an iterator from them.

        Args:
            is_quiet: whether the seed of worker processes is known, and its draw is no draw from
                the program's streams.
        """
        given: dict[str, Any] = {}
        if not _is_iterable(loader):
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            given[name] = _FollowedSampler(self, getattr(loader, name))
        if is_quiet:
            given["generator"] = torch.Generator()
        if loader.num_workers:
            visit = self._visit
            states = list(self._workers if visit is None else visit.workers)
            if visit is not None and visit.source is not None and _is_iterable(loader):
                states = [None] * loader.num_workers  # they begin the epoch again
            workers = WorkerStreams(loader.collate_fn, loader.worker_init_fn, states)
            given["collate_fn"] = workers.collate
            given["worker_init_fn"] = workers.begin
        own = vars(loader)  # __setattr__ of a DataLoader refuses some of the names
        kept = {name: own[name] for name in given}
        own.update(given)
        try:
            yield
        finally:
            own.update(kept)

    def open(self) -> _Visit:
        """Begin a visit, from the loaded position or from the begin of an epoch."""
        before = self._visit
        if before is not None:
            is_peek = self.is_by_steps and not before.is_counted
            if is_peek and before.restored_streams:
                raise _misuse(
                    "an iterator of the loader was made and dropped between the load and the first"
                    " step, and has drawn the random numbers of the epoch",
                    "Look at a sample without the loader: loader.dataset[0].",
                )
            if before.taken and not is_peek:
                self.end(before)
            self._visit = None
        source = self._loaded
        if source is not None and source.current is None:
            source = None
        restores = source is None and self.begin_streams is not None
        if restores and self.begin_streams is not None:
            self.begin_streams()
        if self.before_epoch is not None:
            self.before_epoch()
        loader = self.loader
        visit = _Visit(
            number=self._epoch,
            streams=LoaderStreams(loader),
            attributes=self._changed_attributes(),
            workers=list(self._workers),
            source=source,
            restored_streams=restores,
        )
        if source is not None and source.current is not None:
            visit.taken = source.batches
            visit.is_counted = self.has_begun and source.batches > 0
            visit.attributes = dict(source.attributes)
            _set_attributes(loader, source.attributes, is_again=True)
            digest = source.current.digest
            visit.digest = None if digest is None else bytes.fromhex(digest)
        self._visit = visit
        self._counted = self._taken
        return visit

    def end(self, visit: _Visit) -> None:
        """Record the end of an epoch's loop."""
        self._epoch = visit.number + 1
        self._loaded = self._tree = None
        loader = self.loader
        self._workers = [None] * loader.num_workers
        if loader.persistent_workers:
            self._workers = visit.workers
        if self._visit is visit:
            self._visit = None

    def request(self, visit: _Visit) -> bool:
        """Check a request for a batch, and return whether the iteration goes on.

        Raises: StateError(ARGUMENT).
        """
        if visit.is_over:
            return True
        if visit is self._left and self.before_batch is not None:
            return False  # the loop of epochs() went back in the middle of the epoch
        if visit is not self._visit:
            raise _misuse(
                "a batch is taken from an iterator that isn't the loader's newest: the loader was"
                " iterated again meanwhile, or a position was loaded",
                "Make the iterator after the load, and evaluate on a loader of its own.",
            )
        if self.before_batch is not None and not self.before_batch():
            return False
        if self.note_fetch is not None:
            visit.mark = self.note_fetch()
        return True

    def take(self, visit: _Visit, batch: Any, *, has_drawn: bool) -> Any:
        """Count a batch that the loop takes, and return the batch itself.

        Args:
            has_drawn: whether the data set has drawn random numbers in this process.
        """
        self._draws |= has_drawn
        if visit.first is None:  # an iterable data set in worker processes, which have own streams
            visit.first = {}
        self._thread = threading.get_ident()
        self._taken += 1
        visit.taken += 1
        if isinstance(batch, DrawnBatch):
            visit.workers[batch.worker] = {**(visit.workers[batch.worker] or {}), **batch.states}
            self._draws = True
            batch = batch.batch
        if visit.ahead:
            content = _index_bytes(visit.ahead.popleft())
            self._samples = zlib.crc32(content or b"", self._samples)
            if content is None or visit.digest is None:
                visit.digest = None
            else:
                visit.digest = digest_bytes(visit.digest + content)
        if self.after_batch is not None:
            self.after_batch()
        return batch

    def _changed_attributes(self) -> dict[str, object]:
        now = _attributes(self.loader)
        return {
            name: value
            for name, value in now.items()
            if name in self._loaded_names
            or name not in self._attributes
            or self._attributes[name] != value
        }


class _FollowedSampler:
    """The sampler in a followed iterator: the loader's sampler, with each batch recorded."""

    def __init__(self, follower: FollowedLoader, sampler: Any) -> None:
        self._follower = follower
        self._sampler = sampler

    def __iter__(self) -> _Course:
        visit = self._follower._visit  # noqa: SLF001
        assert visit is not None  # noqa: S101
        return _Course(visit, self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


class _Course:
    """An iteration over a sampler, which records the streams from which the sampler draws."""

    def __init__(self, visit: _Visit, sampler: Any) -> None:
        self._visit = visit
        self._streams = visit.streams
        self._given: collections.deque[Any] = collections.deque()
        self._sampler = sampler
        self._inner: Any = None
        #: Marks of the streams after the last draw of the sampler.
        self.marks: tuple[int, ...] = ()
        if visit.source is None:
            before = self._streams.read()
            marks = self._streams.marks()
            self._inner = iter(sampler)
            visit.begin = {name: before[name] for name in self._streams.moved(marks)}

    def __iter__(self) -> _Course:
        return self

    def __next__(self) -> Any:
        self.prepare()
        visit = self._visit
        if self._given:
            self.marks = self._streams.marks()
            return self._given.popleft()
        if visit.is_drawn:
            raise StopIteration
        streams = self._streams
        marks = streams.marks()
        before = streams.read() if visit.first is None else {}
        try:
            batch = next(self._inner)
        except StopIteration:
            visit.is_drawn = True
            raise
        finally:
            moved = streams.moved(marks)
            if visit.first is None:
                visit.first = {name: before[name] for name in moved}
            else:
                visit.redrawn.update(moved)
            self.marks = streams.marks()
        if isinstance(batch, list):
            batch = list(batch)
        visit.ahead.append(batch)
        return batch

    def prepare(self) -> None:
        """Draw the batches taken before the save again, if that isn't done yet.

        Raises: StateError(CONFIG_IDENTITY).
        """
        if self._inner is not None:
            return
        visit = self._visit
        source = visit.source
        assert source is not None and source.current is not None  # noqa: PT018, S101
        current = source.current
        visit.begin = parse_states(current.begin)
        visit.first = None if current.first is None else parse_states(current.first)
        visit.redrawn = set(current.redrawn)
        before = self._streams.read()
        digest: bytes | None = _NO_DIGEST
        try:
            self._streams.write(visit.begin)
            self._inner = iter(self._sampler)
            if visit.first is not None:
                self._streams.write(visit.first)
                drawn = [next(self._inner) for _ in range(0 if visit.taken or current.ahead else 1)]
                for _ in range(visit.taken):
                    content = _index_bytes(next(self._inner))
                    digest = (
                        None
                        if digest is None or content is None
                        else digest_bytes(digest + content)
                    )
                for _ in current.ahead or ():
                    next(self._inner)
                drawn += current.ahead or ()
                visit.is_drawn = current.is_drawn and current.ahead is not None
                self._given.extend(drawn)
                visit.ahead.extend(drawn)
        except StopIteration:
            if visit.taken:
                raise _other_order("ends before") from None
        finally:
            self._streams.write(before)
        is_free = any(map(is_of_program, current.redrawn))
        if digest != visit.digest and visit.digest is not None and not is_free:
            raise _other_order("begins with other samples than")


def _other_order(difference: str) -> CkptError:
    return err(
        Code.CONFIG_IDENTITY,
        f"the sampler's order {difference} the part of the epoch that the run has trained on",
        where=_WHERE,
        remedy=(
            "Make the sampler as it was at the save, with the same number of the epoch: loop over"
            " checkpointer.epochs(...), and give set_epoch() its number."
        ),
        requirement="REQ-EPO-003",
    )


class _Following(torch_loaders._BaseDataLoaderIter):  # noqa: SLF001 - torch has no public name
    """The counting part of a followed loader's iterator.

    Attributes:
        follower: the loader's position.
        visit: the epoch.
        given_seed: seed of the worker processes; None for the drawn seed.
        shift: number of worker processes before the process that loads the first batch.
    """

    follower: FollowedLoader
    visit: _Visit
    given_seed: int | None
    shift: int

    @property
    def _base_seed(self) -> Any:
        return self.__dict__[_SEED]

    @_base_seed.setter
    def _base_seed(self, drawn: Any) -> None:
        self.__dict__[_SEED] = drawn if self.given_seed is None else self.given_seed

    def _reset(self, loader: Any, first_iter: bool = False) -> None:  # noqa: FBT001, FBT002 - torch's
        if not first_iter:  # the next epoch of persistent worker processes
            self.visit = self.follower.open()
            self.visit.seed = self._base_seed
        super()._reset(loader, first_iter)

    def _try_put_index(self) -> None:
        # Batch k of an epoch is loaded by worker process k modulo their number.
        parent: Any = super()
        own: Any = self
        for _ in range(self.shift):
            next(own._worker_queue_idx_cycle)  # noqa: SLF001 - torch's
        self.shift = 0
        parent._try_put_index()  # noqa: SLF001 - torch's

    def __next__(self) -> Any:
        follower = self.follower
        visit = self.visit
        if not follower.request(visit):
            raise StopIteration
        look = None if self._num_workers or visit.is_over else _Look(visit, self._sampler_iter)
        try:
            batch = super().__next__()
        except StopIteration:
            if not visit.is_over:
                visit.is_over = True
                follower.end(visit)
            raise
        return follower.take(visit, batch, has_drawn=look is not None and look.has_drawn())

    def skip(self) -> None:
        """Load a batch again that the loop has taken before the save."""
        super().__next__()

    def prepare(self) -> None:
        """Let the sampler draw the batches taken before the save again."""
        if isinstance(self._sampler_iter, _Course):
            self._sampler_iter.prepare()


@functools.cache
def _following(base: type[Any]) -> Any:
    """Return a subclass of a class of torch's iterators that counts batches."""
    return type(f"Followed{base.__name__}", (_Following, base), {"__doc__": _Following.__doc__})


class _Look:
    """A look at the streams around the load of a batch in this process."""

    def __init__(self, visit: _Visit, course: Any) -> None:
        self._visit = visit
        self._course = course if isinstance(course, _Course) else None
        self._marks = visit.streams.marks()
        self._is_first = visit.first is None
        if self._course is None and self._is_first:
            visit.first = visit.streams.read()

    def has_drawn(self) -> bool:
        """Return whether the data set has drawn random numbers for the batch."""
        visit = self._visit
        if self._course is not None:
            return bool(visit.streams.moved(self._course.marks or self._marks))
        moved = visit.streams.moved(self._marks)
        if not self._is_first:
            visit.redrawn.update(filter(is_of_program, moved))
        return bool(moved)


# --- loaders --------------------------------------------------------------------------------------


def follow_loader(loader: Any, *, where: str) -> FollowedLoader:
    """Return the position of a loader; a second call returns the same object.

    Raises: StateError(STATE_UNSUPPORTED, ARGUMENT).
    """
    found = find_followed(loader)
    return FollowedLoader(loader, where=where) if found is None else found


def find_followed(loader: Any) -> FollowedLoader | None:
    """Return the position of a followed loader, or None."""
    owner = getattr(vars(loader).get("_get_iterator"), "__self__", None)
    return owner if isinstance(owner, FollowedLoader) and owner.loader is loader else None


def is_loader(value: object) -> bool:
    """Return whether a value is a DataLoader without a state_dict of its own."""
    return isinstance(value, torch.utils.data.DataLoader) and not hasattr(value, "state_dict")


def _is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, torch.utils.data.IterableDataset)


def _check(loader: Any, where: str) -> None:
    """Check the options of a loader. Raises: StateError(STATE_UNSUPPORTED, ARGUMENT)."""
    refuse = functools.partial(err, Code.STATE_UNSUPPORTED, where=where)
    if _is_iterable(loader) and not is_repeatable(loader.dataset):
        raise refuse(
            f"the DataLoader reads an iterable data set ({type(loader.dataset).__name__}), which"
            " has no index to go on from",
            remedy=(
                "Use torchdata's StatefulDataLoader and a data set with a state_dict. Or, if each"
                " iteration gives the same samples in the same order, set"
                f" dataset.{EXACT} = True: a resume then reads the batches of the epoch again."
            ),
        )
    if not getattr(loader, "in_order", True):
        raise refuse(
            "the DataLoader has in_order=False: the order of its batches isn't reproducible",
            remedy="Make the DataLoader without in_order=False.",
        )
    if type(loader)._get_iterator is not torch.utils.data.DataLoader._get_iterator:  # noqa: SLF001
        raise refuse(
            f"a {type(loader).__name__} makes its iterators itself, and can't be followed",
            remedy=(
                "Give a torch.utils.data.DataLoader, or an object with state_dict and"
                " load_state_dict."
            ),
        )
    if _has_iterator(loader):
        raise _misuse(
            "the loader was iterated before the State was saved, loaded or given to a"
            " Checkpointer: the batches taken weren't counted",
            "Make the Checkpointer before the iterator of the loader.",
        )


def _has_iterator(loader: Any) -> bool:
    """Return whether an unfinished iterator of the loader is alive."""
    if loader._iterator is not None:  # noqa: SLF001 - torch's
        return True
    if _is_iterable(loader):
        return False
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    kind = torch_loaders._BaseDataLoaderIter  # noqa: SLF001 - torch has no public name
    for found in gc.get_referrers(sampler):
        owners = [found] if isinstance(found, kind) else []
        if type(found) is dict and found.get("_index_sampler") is sampler:
            owners = [one for one in gc.get_referrers(found) if isinstance(one, kind)]
        if any(one._num_yielded for one in owners):  # noqa: SLF001 - torch's
            return True
    return False


def _sizes(loader: Any) -> Sizes:
    dataset = loader.dataset
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    inner = loader.sampler if type(sampler) is torch.utils.data.BatchSampler else sampler
    kind = type(inner)
    return Sizes(
        samples=_length(dataset),
        batch_size=loader.batch_size,
        drop_last=bool(loader.drop_last),
        batch_count=None if _is_iterable(loader) else _length(sampler),
        sampler=f"{kind.__module__}.{kind.__qualname__}",
    )


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def samplers_of(loader: Any) -> dict[str, Any]:
    """Return the samplers of a loader by path, each once."""
    found: dict[str, Any] = {}
    waiting = [("sampler", loader.sampler), ("batch_sampler", loader.batch_sampler)]
    while waiting:
        path, one = waiting.pop(0)
        if one is None or any(known is one for known in found.values()):
            continue
        found[path] = one
        own = getattr(one, "__dict__", {})
        waiting += [
            (f"{path}.{name}", own[name]) for name in ("sampler", "batch_sampler") if name in own
        ]
    return found


def _attributes(loader: Any) -> dict[str, object]:
    """Return the plain values in the attributes of a loader's samplers, by path."""
    return {
        f"{path}.{name}": value
        for path, sampler in samplers_of(loader).items()
        for name, value in getattr(sampler, "__dict__", {}).items()
        if type(value) in _SCALARS
    }


def _set_attributes(
    loader: Any, attributes: Mapping[str, object], *, is_again: bool = False
) -> None:
    """Set attributes of a loader's samplers.

    Args:
        is_again: whether they were set before; then the program's own `set_epoch` counts.
    """
    samplers = samplers_of(loader)
    for path, value in attributes.items():
        place, _, name = path.rpartition(".")
        sampler = samplers.get(place)
        if sampler is None or (is_again and name == "epoch" and hasattr(sampler, "set_epoch")):
            continue
        setattr(sampler, name, value)


def _index_bytes(batch: Any) -> bytes | None:
    """Return the samples of a batch as LE64; None for samples without integers."""
    try:
        numbers = array.array("q", batch if isinstance(batch, list | tuple) else [batch])
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return numbers.tobytes()


def _misuse(detail: str, remedy: str) -> CkptError:
    return err(Code.ARGUMENT, detail, where=_WHERE, remedy=remedy)

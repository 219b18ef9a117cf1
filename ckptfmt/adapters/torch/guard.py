"""Which tensors may be copied beside the training, and what keeps an optimizer from changing them meanwhile.

Between two steps of its optimizer a parameter should be constant, and so should the optimizer's state. Should: a hook,
an embedding with ``max_norm``, or a program that writes to ``.data`` may change it all the same. Hence a tensor is
trusted only when that was seen: after a save it must be the same, bytes and version, at the next step of its optimizer.
And a trusted one is looked at again when it is copied: if its version has changed by then, or some of its elements
aren't those of the call, the save fails, rather than to contain what nobody asked it to; and it is trusted no more.

The guard is a hook before every step of every optimizer of this process, ahead of all other hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckptfmt.adapters.torch.tensors import TorchSource, _as_integers, local_of
from ckptfmt.box import Box
from ckptfmt.documents.tables import TensorKey
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.state import place_of
from ckptfmt.write.image import Image, Piece, key_of
from ckptfmt.write.snapshot import TensorSource
from ckptfmt.write.staging import Copy, HostCopy, Seen

#: How many names a report gives.
_SHOWN: Final = 4
#: How many elements of a tensor are remembered from the call to its copy.
_SAMPLE: Final = 16
#: Of how many tensors, about: each costs time while the training waits.
_SAMPLED: Final = 8
#: An odd number that scatters the elements of a sample over rows and columns alike.
_STRIDE: Final = 0x9E3779B97F4A7C1


class Awaited(Protocol):
    """A save whose copies are waited for; `ckptfmt.trainer.handle.SaveHandle` is one."""

    blocked_s: float

    def wait_copied(self) -> None:
        """Return when no copy is under way any more."""


class _CheckedCopy:
    """A copy beside the training: it fails if a tensor was written to between the call and its optimizer's step."""

    def __init__(
        self,
        guard: Guard,
        inner: Copy,
        sources: Iterable[TorchSource],
        batch: Sequence[_CheckedCopy],
        *,
        is_sampled: bool,
    ) -> None:
        # Who copies keeps the guard at work, even if nobody has the state any more.
        self._guard = guard
        self.keys, self.begin, self.end = inner.keys, inner.begin, inner.end
        self.inner = inner
        #: What was seen to be written to, by torch's count; and whether something else was written.
        self.changed: list[TorchSource] = []
        self.has_hidden_write = False
        self._sources = list(sources)
        self._versions = [_version(source.local) for source in self._sources]
        self._sample = _Sample.of(inner, self._sources[0]) if is_sampled and isinstance(inner, HostCopy) else None
        self._batch = batch
        self.is_over = False
        self._is_closed = False
        self._judging = threading.Lock()

    @property
    def seen(self) -> Sequence[Seen]:
        """What was found of what it copied."""
        return self.inner.seen

    def start(self) -> None:
        """Set it going."""
        self.inner.start()

    def finish(self) -> None:
        """Do it, or wait for it; then check. Raises: StateError(STATE_CHANGED)."""
        try:
            self.inner.finish()
            self._check()
        finally:
            self.is_over = True

    def _check(self) -> None:
        # Behind the last one all are checked again: torch counts a write when it is over, not when it begins.
        for copy in self._batch if self is self._batch[-1] else (self,):
            copy.judge()
            if copy.changed:
                raise _changed_error(copy.changed[0])
        if self._sample is not None and not self._sample.is_held():
            self.has_hidden_write = True
            raise _changed_error(self._sources[0])

    def guard(self) -> None:
        """Keep later work of the device from overtaking it. What is written from now on is no concern of it."""
        self.judge(is_last=True)
        self.inner.guard()

    def judge(self, *, is_last: bool = False) -> None:
        """Find what was written to, unless its optimizer has begun to step."""
        with self._judging:
            if not self._is_closed:
                rows = zip(self._sources, self._versions, strict=True)
                self.changed = [source for source, version in rows if _version(source.local) != version]
            self._is_closed |= is_last


@dataclasses.dataclass(frozen=True, slots=True)
class _Sample:
    """A few elements of what the host copies, as they were at the call.

    Torch counts no write through ``.data``, of numpy, or of another library. Most of those change nearly all elements,
    as exchanging weights for their average does, or clipping them.
    """

    content: memoryview
    at: torch.Tensor
    elements: torch.Tensor

    @classmethod
    def of(cls, copy: HostCopy, source: TorchSource) -> _Sample | None:
        held = _as_integers(source.held_at(copy.box).resolve_conj().resolve_neg())
        if held.is_complex():
            return None  # of 16 bytes each, which no integer has
        at = _sample_at(held.numel())
        return cls(copy.view[copy.begin : copy.end], at, held.take(at))

    def is_held(self) -> bool:
        """Tell whether the copy has these elements."""
        return torch.equal(torch.frombuffer(self.content, dtype=self.elements.dtype).take(self.at), self.elements)


@functools.lru_cache(maxsize=1024)
def _sample_at(element_count: int) -> torch.Tensor:
    """Return which elements are a sample."""
    if element_count <= _SAMPLE:
        return torch.arange(element_count, device="cpu")
    return torch.arange(_SAMPLE, device="cpu") * (_STRIDE % element_count) % element_count


def _changed_error(source: TorchSource) -> CkptError:
    return err(
        Code.STATE_CHANGED,
        "the tensor was changed between the save and its optimizer's step",
        where=place_of(source.field, source.name),
        requirement="REQ-CMT-028",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Watched:
    """A piece of a tensor that a save has copied, and the tensor's version then.

    The memory isn't kept alive: it may have been made for this save alone. Nor is there a weak reference to the tensor:
    torch refuses to move a parameter that has one.
    """

    key: TensorKey
    memory: StorageWeakRef
    local_box: Box
    content: memoryview
    version: int

    @classmethod
    def of(cls, source: TorchSource, piece: Piece, view: memoryview) -> _Watched:
        part = next(part for part in source.pieces if part.box == piece.box)
        content = view[piece.begin : piece.end]
        memory = StorageWeakRef(source.local.untyped_storage())
        return cls(piece.key, memory, part.local_box, content, _version(source.local))

    def is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Tell whether this tensor has the memory that was copied, and that still is the same."""
        local = local_of(tensor)
        is_this = not self.memory.expired() and self.memory == StorageWeakRef(local.untyped_storage())
        if not is_this or _version(local) != self.version:
            return False
        return _holds(local[self.local_box.relative_to(Box.whole(tuple(local.shape)))], self.content)


class Guard:
    """Keeps what is being copied from being changed by a step.

    Args:
        report: called with a sentence about tensors that can't be copied beside the training.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        # Weak, as the hooks are: nobody lives for as long as torch only because of being guarded.
        self._report = weakref.WeakMethod(report)
        self._trusted: set[TensorKey] = set()
        self._refused: set[TensorKey] = set()
        #: Those that have done a step, and aren't in one.
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._captured: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._on_probation: dict[int, list[_Watched]] = {}
        self._in_flight: list[tuple[Awaited, list[_CheckedCopy]]] = []
        hooks = _register(weakref.ref(self))
        #: Takes the hooks away: when it is called, or when nobody has the guard any more.
        self.close = weakref.finalize(self, _remove_all, hooks)

    def find_constant(self, sources: Iterable[TensorSource]) -> frozenset[TensorKey]:
        """Return which tensors may be copied beside the training."""
        for flight in list(self._in_flight):
            self._learn(flight[1])
            if any(copy.is_over for copy in flight[1][-1:]):
                self._in_flight.remove(flight)  # no step came behind it, and none may ever come
        owned = {id(tensor) for optimizer in self._seen for tensor in _iter_tensors(optimizer)}
        return frozenset(
            key
            for source in sources
            if isinstance(source, TorchSource) and id(source.tensor) in owned
            for key in [key_of(source)]
            if key in self._trusted
        )

    def hold(self, copies: Sequence[Copy], sources: Iterable[TensorSource], handle: Awaited) -> list[_CheckedCopy]:
        """Let no optimizer step before these copies are done; account what it waits to `handle`.

        Returns: the copies to use in their place.
        """
        by_key = {key_of(source): source for source in sources if isinstance(source, TorchSource)}
        checked: list[_CheckedCopy] = []
        stride = max(1, len(copies) // _SAMPLED)
        checked += [
            _CheckedCopy(self, copy, [by_key[key] for key in copy.keys], checked, is_sampled=number % stride == 0)
            for number, copy in enumerate(copies)
        ]
        # Beside those of the save before, if no step came in between.
        self._in_flight += [(handle, checked)] if checked else []
        return checked

    def begin_probation(self, sources: Iterable[TensorSource], image: Image, view: memoryview) -> None:
        """Watch what is copied now, until the next step of its optimizer or until `end_probation`."""
        known = self._trusted | self._refused
        # Counters and the like are no parameter's state; to ask them would take time of the training.
        by_key = {
            key: source
            for source in sources
            if isinstance(source, TorchSource) and (source.global_shape or source.field == "weights")
            for key in [key_of(source)]
            if key not in known
        }
        for piece in image.pieces if by_key else ():
            source = by_key.get(piece.key)
            if source is not None and piece.end > piece.begin and _is_private(source):
                watched = _Watched.of(source, piece, view)
                self._on_probation.setdefault(id(source.tensor), []).append(watched)

    def end_probation(self) -> None:
        """Let go of what is watched: its slot is about to be filled with something else."""
        self._on_probation = {}

    def meet_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what is to be done before a step."""
        is_capturing = _is_capturing()
        for flight in list(self._in_flight):
            self._wait_for(*flight, is_capturing=is_capturing)
            # Behind the wait: a step of another thread, or after an interrupt, waits as well.
            with contextlib.suppress(ValueError):
                self._in_flight.remove(flight)
        self._seen.discard(optimizer)
        if is_capturing or any(group.get("capturable") for group in optimizer.param_groups):
            self._captured.add(optimizer)
        if optimizer not in self._captured:
            self._judge(optimizer)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what is to be done after a step."""
        # Steps may be replayed from a graph, which calls no hook.
        if optimizer not in self._captured:
            self._seen.add(optimizer)

    def _wait_for(self, handle: Awaited, copies: Sequence[_CheckedCopy], *, is_capturing: bool) -> None:
        begin_s = time.monotonic()
        if not is_capturing:  # a graph can't wait for what isn't in it
            for copy in copies:
                copy.guard()
        if is_capturing or any(isinstance(copy.inner, HostCopy) for copy in copies):
            # What a device copies, its own queue keeps in order. What failed is told by the handle.
            with contextlib.suppress(CkptError):
                handle.wait_copied()
        handle.blocked_s += time.monotonic() - begin_s
        self._learn(copies)

    def _judge(self, optimizer: torch.optim.Optimizer) -> None:
        """Trust what is the same as when it was copied, and refuse the rest from now on."""
        refused: set[TensorKey] = set()
        for tensor in _iter_tensors(optimizer) if self._on_probation else ():
            watched = self._on_probation.pop(id(tensor), [])
            keys = {one.key for one in watched}
            if all(one.is_unchanged(tensor) for one in watched):
                self._trusted |= keys
            else:
                refused |= keys
        self._refuse(refused)

    def _learn(self, copies: Iterable[_CheckedCopy]) -> None:
        """Refuse what was written to since it was trusted; all of it, if the writes can't be told one by one."""
        copies = list(copies)
        hidden = any(copy.has_hidden_write for copy in copies)
        self._refuse(set(self._trusted) if hidden else {key_of(row) for copy in copies for row in copy.changed})

    def _refuse(self, keys: set[TensorKey]) -> None:
        keys = keys - self._refused
        self._trusted -= keys
        self._refused |= keys
        report = self._report()
        if keys and report is not None:
            names = sorted(place_of(field, name) for field, name, _ in keys)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            shown = ", ".join(names[:_SHOWN]) + more
            report(f"OVERLAP_REFUSED: changed between save and step, so copied before save returns: {shown}")


def _remove_all(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _register(this: weakref.ref[Guard]) -> list[RemovableHandle]:
    """Register hooks for all optimizers, that do nothing once the guard is gone."""

    def hook_of(method: Callable[[Guard, torch.optim.Optimizer], None]) -> Callable[..., None]:
        def call(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401
            guard = this()
            if guard is not None:
                method(guard, optimizer)

        # Torch's compiler leaves it as it is: a compiled step calls it too.
        hook: Callable[..., None] = torch.compiler.disable(call)
        return hook

    hook = register_optimizer_step_pre_hook(hook_of(lambda guard, optimizer: guard.meet_step(optimizer)))
    hooks = hook.hooks_dict_ref()
    if isinstance(hooks, OrderedDict):
        hooks.move_to_end(hook.id, last=False)  # ahead of those that may change tensors
    return [hook, register_optimizer_step_post_hook(hook_of(lambda guard, optimizer: guard.end_step(optimizer)))]


def _is_capturing() -> bool:
    """Tell whether what this thread enqueues is recorded for a graph, and not done."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_private(source: TorchSource) -> bool:
    """Tell whether other processes can't write to a tensor."""
    # Asked of the storage: `Tensor.is_shared` makes a typed one first, at ten times the cost.
    return source.local.device.type != "cpu" or not source.local.untyped_storage().is_shared()


def _version(local: torch.Tensor) -> int:
    """Return torch's own count of the writes to a tensor; tensors of inference mode have none."""
    return -1 if local.is_inference() else local._version  # noqa: SLF001 - there is no public name


def _iter_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer, and those tensors of its state that have their parameter's shape."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            state = optimizer.state.get(parameter)
            for value in state.values() if isinstance(state, Mapping) else ():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim:
                    yield value


def _holds(local: torch.Tensor, content: memoryview) -> bool:
    """Tell whether a tensor has exactly these bytes."""
    held = _as_integers(local.resolve_conj().resolve_neg()).contiguous().cpu().reshape(-1).view(torch.uint8)
    kept = torch.frombuffer(content, dtype=torch.uint8)
    wide = content.nbytes // 8 * 8  # compared as wide integers where that is possible: eight times as fast
    if held.data_ptr() % 8 == 0 and kept.data_ptr() % 8 == 0 and wide:
        same = torch.equal(held[:wide].view(torch.int64), kept[:wide].view(torch.int64))
        return same and torch.equal(held[wide:], kept[wide:])
    return torch.equal(held, kept)

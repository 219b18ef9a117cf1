"""Decide which tensors may be copied during training, and keep optimizers from changing them.

Between two steps of an optimizer, parameters and the optimizer's state are normally constant. A
hook, an embedding with ``max_norm``, or a program that writes to ``.data`` may still change them.
Therefore a tensor is trusted only after an observation: after a save, bytes and version must be
unchanged at the next step of the tensor's optimizer. A trusted tensor is checked again at each
copy. If its version has changed by then, or some elements differ from those at the call, the save
fails instead of storing inconsistent values, and the tensor is no longer trusted.

The guard is a hook before each step of each optimizer in this process, ahead of all other hooks.
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
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ckptfmt.adapters.torch.tensors import TorchSource, _as_integers, local_of
from ckptfmt.box import Box
from ckptfmt.documents.tables import TensorKey, key_of
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.state import place_of
from ckptfmt.write.image import Image, Piece
from ckptfmt.write.snapshot import TensorSource
from ckptfmt.write.staging import Copy, HostCopy, Seen

#: The number of bytes that are compared at a time.
_COMPARED_NBYTES: Final = 64 << 20
#: The number of names in a report.
_SHOWN: Final = 4
#: The number of elements that are compared between the call and the copy.
_SAMPLE: Final = 16
#: The approximate number of sampled tensors. Each sample takes time while training waits.
_SAMPLED: Final = 8
#: An odd number that scatters a sample's elements evenly over rows and columns.
_STRIDE: Final = 0x9E3779B97F4A7C1


class Awaited(Protocol):
    """A save with copies in progress; `ckptfmt.saving.handle.SaveHandle` implements it."""

    blocked_s: float

    def wait_copied(self) -> None:
        """Wait until no copy is in progress."""


class _CheckedCopy:
    """A copy during training that detects writes to its tensors before the optimizer's step.

    A detected write fails the copy.
    """

    def __init__(
        self,
        guard: Guard,
        inner: Copy,
        sources: Iterable[TorchSource],
        batch: Sequence[_CheckedCopy],
        *,
        is_sampled: bool,
    ) -> None:
        # The reference keeps the guard alive during the copy, even if the program drops the state.
        self._guard = guard
        self.keys = inner.keys
        self.begin = inner.begin
        self.end = inner.end
        self.inner = inner
        #: The tensors with a changed write count; and whether a write without a count was detected.
        self.changed: list[TorchSource] = []
        self.has_hidden_write = False
        self._sources = list(sources)
        self._versions = [_version(source.local) for source in self._sources]
        self._sample = (
            _Sample.of(inner, self._sources[0])
            if is_sampled and isinstance(inner, HostCopy)
            else None
        )
        self._batch = batch
        self.is_over = False
        self._is_closed = False
        self._judging = threading.Lock()

    @property
    def seen(self) -> Sequence[Seen]:
        """The digests and comparisons of the inner copy."""
        return self.inner.seen

    def start(self) -> None:
        """Start the inner copy."""
        self.inner.start()

    def finish(self) -> None:
        """Finish the inner copy, then check its tensors. Raises: StateError(STATE_CHANGED)."""
        try:
            self.inner.finish()
            self._check()
        finally:
            self.is_over = True

    def _check(self) -> None:
        # The last copy checks all copies again: torch counts a write at its end, not at its begin.
        for copy in self._batch if self is self._batch[-1] else (self,):
            copy.judge()
            if copy.changed:
                raise _changed_error(copy.changed[0])
        if self._sample is not None and not self._sample.is_held():
            self.has_hidden_write = True
            raise _changed_error(self._sources[0])

    def guard(self) -> None:
        """Make later device work wait for the copy. Later writes aren't checked."""
        self.judge(is_last=True)
        self.inner.guard()

    def settle(self) -> None:
        """End the inner copy after a failure."""
        self.is_over = True
        self.inner.settle()

    def judge(self, *, is_last: bool = False) -> None:
        """Find changed tensors, unless the tensors' optimizer has begun to step."""
        with self._judging:
            if not self._is_closed:
                rows = zip(self._sources, self._versions, strict=True)
                self.changed = [
                    source for source, version in rows if _version(source.local) != version
                ]
            self._is_closed |= is_last


@dataclasses.dataclass(frozen=True, slots=True)
class _Sample:
    """Some elements of a host tensor, as they were at the call of the save.

    Torch doesn't count writes through ``.data``, by numpy, or by another library. Most of these
    writes change nearly all elements, for example an exchange of weights for their average, or
    clipping.
    """

    content: memoryview
    at: torch.Tensor
    elements: torch.Tensor

    @classmethod
    def of(cls, copy: HostCopy, source: TorchSource) -> _Sample | None:
        held = _as_integers(source.held_at(copy.box).resolve_conj().resolve_neg())
        if held.is_complex():
            return None  # 16-byte elements, for which no integer type exists
        at = _sample_at(held.numel())
        return cls(copy.view[copy.begin : copy.end], at, held.take(at))

    def is_held(self) -> bool:
        """Return whether the copy has the sampled elements."""
        return torch.equal(
            torch.frombuffer(self.content, dtype=self.elements.dtype).take(self.at), self.elements
        )


@functools.lru_cache(maxsize=1024)
def _sample_at(element_count: int) -> torch.Tensor:
    """Return the indices of the sampled elements."""
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
    """A piece of a tensor that a save has copied, and the tensor's version at that time.

    The memory isn't kept alive, because it may exist for this save only. The tensor isn't
    referenced weakly either: torch refuses to move a parameter with a weak reference.
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
        """Return whether a tensor still has the copied memory, with the same version and bytes."""
        local = local_of(tensor)
        is_this = not self.memory.expired() and self.memory == StorageWeakRef(
            local.untyped_storage()
        )
        if not is_this or _version(local) != self.version:
            return False
        return _holds(
            local[self.local_box.relative_to(Box.whole(tuple(local.shape)))], self.content
        )


class Guard:
    """A guard that keeps optimizer steps from changing tensors while they are copied.

    Args:
        report: called with a sentence about tensors that can't be copied during training.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        # Weak references, here and in the hooks, since hooks live as long as the process.
        self._report = weakref.WeakMethod(report)
        self._trusted: set[TensorKey] = set()
        self._refused: set[TensorKey] = set()
        #: The optimizers that have made a step, and aren't in the middle of a step.
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._captured: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._on_probation: dict[int, list[_Watched]] = {}
        self._in_flight: list[tuple[Awaited, list[_CheckedCopy]]] = []
        #: Whether an optimizer of this process has begun a step since the guard was made.
        self.has_met_step = False
        hooks = _register(weakref.ref(self))
        #: Removes the hooks, when called or when the guard is garbage-collected.
        self.close = weakref.finalize(self, _remove_all, hooks)

    def find_constant(self, sources: Iterable[TensorSource]) -> frozenset[TensorKey]:
        """Return the keys of tensors that may be copied during training."""
        for flight in list(self._in_flight):
            self._learn(flight[1])
            if any(copy.is_over for copy in flight[1][-1:]):
                self._in_flight.remove(flight)  # no step followed, and maybe none will
        owned = {id(tensor) for optimizer in self._seen for tensor in _iter_tensors(optimizer)}
        return frozenset(
            key
            for source in sources
            if isinstance(source, TorchSource) and id(source.tensor) in owned
            for key in [key_of(source)]
            if key in self._trusted
        )

    def hold(
        self, copies: Sequence[Copy], sources: Iterable[TensorSource], handle: Awaited
    ) -> list[_CheckedCopy]:
        """Make optimizer steps wait until these copies are done.

        The waiting time is added to `handle.blocked_s`.

        Returns: checked copies, which replace the given copies.
        """
        by_key = {key_of(source): source for source in sources if isinstance(source, TorchSource)}
        checked: list[_CheckedCopy] = []
        stride = max(1, len(copies) // _SAMPLED)
        checked += [
            _CheckedCopy(
                self,
                copy,
                [by_key[key] for key in copy.keys],
                checked,
                is_sampled=number % stride == 0,
            )
            for number, copy in enumerate(copies)
        ]
        # In addition to the previous save's copies, if no step came in between.
        self._in_flight += [(handle, checked)] if checked else []
        return checked

    def begin_probation(
        self,
        sources: Iterable[TensorSource],
        image: Image,
        view: memoryview,
        *,
        without: frozenset[TensorKey] = frozenset(),
    ) -> None:
        """Watch the tensors of this save until their optimizer's next step, or `end_probation`.

        Args:
            sources: the tensors.
            image: the places in the slot.
            view: the slot's memory.
            without: tensors that aren't watched.
        """
        known = self._trusted | self._refused | without
        # Scalars in optimizer state, such as counters, aren't worth the training time of the check.
        by_key = {
            key: source
            for source in sources
            if isinstance(source, TorchSource)
            and (source.global_shape or source.field == "weights")
            for key in [key_of(source)]
            if key not in known
        }
        for piece in image.pieces if by_key else ():
            source = by_key.get(piece.key)
            if source is not None and piece.end > piece.begin and _is_private(source):
                watched = _Watched.of(source, piece, view)
                self._on_probation.setdefault(id(source.tensor), []).append(watched)

    def end_probation(self) -> None:
        """Stop watching, because the slot is about to be refilled."""
        self._on_probation = {}

    def forget_copies(self) -> None:
        """Stop watching, because the state is about to be replaced; all copies are done."""
        for _, copies in self._in_flight:
            self._learn(copies)
        self._in_flight = []
        self._on_probation = {}

    def meet_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the begin of an optimizer's step."""
        self.has_met_step = True
        is_capturing = _is_capturing()
        for flight in list(self._in_flight):
            self._wait_for(*flight, is_capturing=is_capturing)
            # Removed only after the wait, so that a step in another thread, or after an interrupt,
            # waits too.
            with contextlib.suppress(ValueError):
                self._in_flight.remove(flight)
        self._seen.discard(optimizer)
        if is_capturing or any(group.get("capturable") for group in optimizer.param_groups):
            self._captured.add(optimizer)
        if optimizer not in self._captured:
            self._judge(optimizer)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the end of an optimizer's step."""
        # Steps that are replayed from a CUDA graph call no hook.
        if optimizer not in self._captured:
            self._seen.add(optimizer)

    def _wait_for(
        self, handle: Awaited, copies: Sequence[_CheckedCopy], *, is_capturing: bool
    ) -> None:
        begin_s = time.monotonic()
        if not is_capturing:  # a graph can't wait for events outside of the graph
            for copy in copies:
                copy.guard()
        if is_capturing or any(isinstance(copy.inner, HostCopy) for copy in copies):
            # The device's queue keeps device copies in order. The handle reports failures.
            with contextlib.suppress(CkptError):
                handle.wait_copied()
        handle.blocked_s += time.monotonic() - begin_s
        self._learn(copies)

    def _judge(self, optimizer: torch.optim.Optimizer) -> None:
        """Trust the watched tensors that are unchanged since the copy, and refuse all others."""
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
        """Refuse trusted tensors that were written to.

        After a write without a count all trusted tensors are refused, because the changed tensors
        are unknown.
        """
        copies = list(copies)
        hidden = any(copy.has_hidden_write for copy in copies)
        self._refuse(
            set(self._trusted)
            if hidden
            else {key_of(row) for copy in copies for row in copy.changed}
        )

    def _refuse(self, keys: set[TensorKey]) -> None:
        keys = keys - self._refused
        self._trusted -= keys
        self._refused |= keys
        report = self._report()
        if keys and report is not None:
            names = sorted(place_of(field, name) for field, name, _ in keys)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            shown = ", ".join(names[:_SHOWN]) + more
            report(
                "OVERLAP_REFUSED: changed between save and step, so copied before save returns:"
                f" {shown}"
            )


def _remove_all(hooks: Iterable[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _register(this: weakref.ref[Guard]) -> list[RemovableHandle]:
    """Register hooks for all optimizers. The hooks do nothing once the guard is gone."""

    def hook_of(method: Callable[[Guard, torch.optim.Optimizer], None]) -> Callable[..., None]:
        def call(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            guard = this()
            if guard is not None:
                method(guard, optimizer)

        # The compiler of torch doesn't trace the hook: a compiled step calls the hook too.
        hook: Callable[..., None] = torch.compiler.disable(call)
        return hook

    hook = register_optimizer_step_pre_hook(
        hook_of(lambda guard, optimizer: guard.meet_step(optimizer))
    )
    hooks = hook.hooks_dict_ref()
    if isinstance(hooks, OrderedDict):
        hooks.move_to_end(hook.id, last=False)  # ahead of hooks that may change tensors
    return [
        hook,
        register_optimizer_step_post_hook(
            hook_of(lambda guard, optimizer: guard.end_step(optimizer))
        ),
    ]


def _is_capturing() -> bool:
    """Return whether this thread's work is being captured for a CUDA graph instead of executed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _is_private(source: TorchSource) -> bool:
    """Return whether no other process can write to a tensor."""
    # `Tensor.is_shared` would first create a typed storage, at ten times the cost.
    return source.local.device.type != "cpu" or not source.local.untyped_storage().is_shared()


def _version(local: torch.Tensor) -> int:
    """Return torch's count of the writes to a tensor, or -1 for an inference tensor."""
    return -1 if local.is_inference() else local._version  # noqa: SLF001


def _iter_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer, and the state tensors of the parameters' shape."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            state = optimizer.state.get(parameter)
            for value in state.values() if isinstance(state, Mapping) else ():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape == parameter.shape
                    and value.ndim
                ):
                    yield value


def _holds(local: torch.Tensor, content: memoryview) -> bool:
    """Return whether a tensor has exactly these bytes.

    The tensor's device compares, or the host if the device has too little memory.
    """
    try:
        return _are_equal(local, content)
    except torch.OutOfMemoryError:
        return _are_equal(local.cpu(), content)


def _are_equal(local: torch.Tensor, content: memoryview) -> bool:
    plain = _as_integers(local.resolve_conj().resolve_neg()).contiguous()
    held = plain.reshape(-1).view(torch.uint8).split(_COMPARED_NBYTES)
    kept = torch.frombuffer(content, dtype=torch.uint8).split(_COMPARED_NBYTES)
    return all(_is_equal(one, other.to(one.device)) for one, other in zip(held, kept, strict=True))


def _is_equal(held: torch.Tensor, kept: torch.Tensor) -> bool:
    wide = held.nbytes // 8 * 8  # 64-bit integers compare eight times as fast
    if held.data_ptr() % 8 == 0 and kept.data_ptr() % 8 == 0 and wide:
        same = torch.equal(held[:wide].view(torch.int64), kept[:wide].view(torch.int64))
        return same and torch.equal(held[wide:], kept[wide:])
    return torch.equal(held, kept)

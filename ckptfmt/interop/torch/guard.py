"""Which tensors may be copied beside the training, and what keeps an optimizer from changing them meanwhile.

Between two steps of its optimizer a parameter should be constant, and so should the optimizer's state. Should: a hook,
an embedding with ``max_norm``, or a program that writes to ``.data`` may change it all the same. Hence a tensor is
trusted only when that was seen: after a save it must be the same, bytes and version, at the next step of its optimizer.
And a trusted one is looked at again when it is copied: if its version has changed by then, the save fails, rather than
to contain what nobody asked it to.

The guard is a hook before every step of every optimizer of this process, ahead of the optimizers' own hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptfmt.documents.tables import TensorKey
from ckptfmt.engines.image import Image, Piece, key_of
from ckptfmt.engines.snapshot import TensorSource
from ckptfmt.engines.staging import Copy, HostCopy
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.interop.torch.devices import held_at
from ckptfmt.interop.torch.tensors import TorchSource

__all__ = ["Guard"]

#: How many names a report gives.
_SHOWN: Final = 4


class Awaited(Protocol):
    """A save whose copies are waited for; `ckptfmt.handle.SaveHandle` is one."""

    blocked_s: float

    def wait_staged(self) -> None:
        """Return when no copy is under way any more."""


class _CheckedCopy:
    """A copy beside the training: it fails if a tensor was written to between the call and its optimizer's step."""

    def __init__(self, inner: Copy, sources: Iterable[TorchSource]) -> None:
        self.keys, self.begin, self.end = inner.keys, inner.begin, inner.end
        self.inner = inner
        self._versions = [(source, _version(source)) for source in sources]
        self._problem: CkptError | None = None
        self._is_judged = False
        self._judging = threading.Lock()

    def start(self) -> None:
        """Set it going."""
        self.inner.start()

    def finish(self) -> None:
        """Do it, or wait for it; then check. Raises: StateError(STATE_CHANGED)."""
        self.inner.finish()
        self._judge()
        if self._problem is not None:
            raise self._problem

    def guard(self) -> None:
        """Keep later work of the device from overtaking it. What is written from now on is no concern of it."""
        self._judge()
        self.inner.guard()

    def _judge(self) -> None:
        """Once: when the copy is done, or when its optimizer is about to step and waits for it."""
        with self._judging:
            changed = [] if self._is_judged else [row for row, version in self._versions if _version(row) != version]
            self._is_judged = True
            for source in changed[:1]:
                self._problem = err(
                    Code.STATE_CHANGED,
                    "it was written to before its optimizer's step",
                    where=f"{source.field}:{source.name}",
                    requirement="REQ-CMT-028",
                )


@dataclasses.dataclass(frozen=True, slots=True)
class _Watched:
    """A piece of a tensor that a save has copied, and the tensor's version then."""

    source: TorchSource
    piece: Piece
    content: memoryview
    version: int

    def is_unchanged(self) -> bool:
        """Tell whether the live tensor still is what was copied."""
        return _version(self.source) == self.version and _holds(self.source, self.piece, self.content)


class Guard:
    """Keeps what is being copied from being changed by a step.

    Args:
        report: called with a sentence about tensors that can't be copied beside the training.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._trusted: set[TensorKey] = set()
        self._refused: set[TensorKey] = set()
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._on_probation: dict[int, list[_Watched]] = {}
        self._in_flight: tuple[Awaited, list[_CheckedCopy]] | None = None
        this = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401
            guard = this()
            if guard is not None:
                guard.meet_step(optimizer)

        self._hook = register_optimizer_step_pre_hook(before_step)

    def close(self) -> None:
        """Take the hook away."""
        self._hook.remove()

    def find_constant(self, sources: Iterable[TensorSource]) -> frozenset[TensorKey]:
        """Return which tensors may be copied beside the training."""
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
        checked = [_CheckedCopy(copy, [by_key[key] for key in copy.keys]) for copy in copies]
        self._in_flight = (handle, checked) if checked else None
        return checked

    def begin_probation(self, sources: Iterable[TensorSource], image: Image, view: memoryview) -> None:
        """Watch what was copied until the next step of its optimizer, or until `end_probation`."""
        by_key = {key_of(source): source for source in sources if isinstance(source, TorchSource)}
        for piece in image.pieces:
            source = by_key.get(piece.key)
            if source is not None and piece.key not in self._trusted and piece.key not in self._refused:
                watched = _Watched(source, piece, view[piece.begin : piece.end], _version(source))
                self._on_probation.setdefault(id(source.tensor), []).append(watched)

    def end_probation(self) -> None:
        """Let go of what is watched: its slot is about to be filled with something else."""
        self._on_probation = {}

    def meet_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what is to be done before a step."""
        begin_s = time.monotonic()
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            handle, copies = in_flight
            for copy in copies:
                copy.guard()
            if any(isinstance(copy.inner, HostCopy) for copy in copies):
                # What a device copies, its own queue keeps in order. What failed is told by the handle.
                with contextlib.suppress(CkptError):
                    handle.wait_staged()
            handle.blocked_s += time.monotonic() - begin_s
        if not _is_captured(optimizer):
            self._seen.add(optimizer)
            self._judge(optimizer)

    def _judge(self, optimizer: torch.optim.Optimizer) -> None:
        """Trust what is the same as when it was copied, and refuse the rest from now on."""
        refused = []
        for tensor in _iter_tensors(optimizer) if self._on_probation else ():
            watched = self._on_probation.pop(id(tensor), [])
            keys = {key_of(one.source) for one in watched}
            if all(one.is_unchanged() for one in watched):
                self._trusted |= keys
            else:
                self._refused |= keys
                refused += [f"{field}:{name}" for field, name, _ in keys]
        if refused:
            shown = ", ".join(sorted(refused)[:_SHOWN])
            shown += f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
            self._report(f"OVERLAP_REFUSED: changed between save and step, so copied before save returns: {shown}")


def _version(source: TorchSource) -> int:
    """Return torch's own count of the writes to a tensor; tensors of inference mode have none."""
    return -1 if source.local.is_inference() else source.local._version  # noqa: SLF001 - there is no public name


def _iter_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of an optimizer, and those tensors of its state that have their parameter's shape."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim:
                    yield value


def _is_captured(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether steps may be replayed from a graph, which calls no hook."""
    return any(group.get("capturable") for group in optimizer.param_groups)


def _holds(source: TorchSource, piece: Piece, content: memoryview) -> bool:
    """Tell whether a live tensor has exactly these bytes at a piece."""
    local = held_at(source, piece.box)
    if local.device.type == "cpu" and local.is_contiguous() and not (local.is_conj() or local.is_neg()):
        held = local.reshape(-1).view(torch.uint8)
    else:
        held = torch.empty(content.nbytes, dtype=torch.uint8)
        source.copy_into(piece.box, memoryview(held.numpy().data))
    kept = torch.frombuffer(content, dtype=torch.uint8)
    wide = content.nbytes // 8 * 8  # compared as wide integers where that is possible: eight times as fast
    if held.data_ptr() % 8 == 0 and kept.data_ptr() % 8 == 0 and wide:
        same = torch.equal(held[:wide].view(torch.int64), kept[:wide].view(torch.int64))
        return same and torch.equal(held[wide:], kept[wide:])
    return torch.equal(held, kept)

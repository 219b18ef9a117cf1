"""What the steps of optimizers show of a training: gradients of an unfinished step, and optimizers outside of State."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptfmt.adapters.live_trees import attributes_of
from ckptfmt.adapters.torch.optimizer_kinds import unwrap_optimizer
from ckptfmt.adapters.torch.tensors import is_distributed, local_of

#: The number of parameters whose gradients are marked at each step.
_SAMPLED: Final = 16

#: Place of a parameter: its optimizer's id, its group, and its number in the group.
_Place: TypeAlias = tuple[int, int, int]
#: A gradient as it was: its memory, which isn't kept alive, and torch's count of the writes to it.
_Mark: TypeAlias = tuple[StorageWeakRef, int]


class StepWatch:
    """Watches the steps of all optimizers of this process, by a hook behind each of them.

    A gradient that the last step left is of no consequence: the next pass clears it. A gradient that was computed since
    then belongs to a step that is still to be made, and no checkpoint has it. The two are told apart by the memory and
    the write count of some gradients, as they were at the end of the last step.

    Args:
        optimizers: those of the State.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._own: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        #: Of each optimizer outside of the State: at which steps of the State's ones it made its first and last step.
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._step_count = 0
        self._sampled: dict[int, list[_Place]] = {}
        #: Marks as of the last step of any optimizer of the State, and as of the last step of the optimizer itself.
        self._left: dict[_Place, _Mark] = {}
        self._left_by_itself: dict[_Place, _Mark] = {}
        #: Optimizers that use gradients from before another optimizer's step, and from before their own last one.
        self._spanning: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._carrying: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.follow(optimizers)
        self._left = {place: mark for optimizer in self._own for place, mark in self._marks(optimizer)}
        self._left_by_itself = dict(self._left)
        this = weakref.ref(self)

        def hook(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401 - torch's
            watch = this()
            if watch is not None:
                watch.note_step(optimizer)

        # Torch's compiler leaves it as it is: a compiled step calls it too.
        handle = register_optimizer_step_post_hook(torch.compiler.disable(hook))
        #: Removes the hook: when it is called, or when nobody has the watch any more.
        self.close = weakref.finalize(self, handle.remove)

    def follow(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Watch these optimizers as those of the State, in the place of those before."""
        self._own = weakref.WeakSet(optimizers)
        self._sampled = {id(optimizer): list(_sample(optimizer)) for optimizer in self._own}
        for optimizer in self._own:
            self._others.pop(optimizer, None)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of a step that an optimizer has made."""
        if optimizer not in self._own:
            first, _ = self._others.get(optimizer, (self._step_count, 0))
            self._others[optimizer] = first, self._step_count
            return
        self._step_count += 1
        marks = dict(self._marks(optimizer))
        if marks and all(_is_added_once(self._left_by_itself.get(place), mark) for place, mark in marks.items()):
            self._carrying.add(optimizer)
        else:
            self._carrying.discard(optimizer)
        if len(self._own) > 1:
            own = self._left_by_itself
            if any(_is_added_to(self._left.get(place), mark, own.get(place)) for place, mark in marks.items()):
                self._spanning.add(optimizer)
            others = (one for one in self._own if one is not optimizer)
            self._left = dict(marks) | {place: mark for one in others for place, mark in self._marks(one)}
        else:
            self._left = marks
        self._left_by_itself = {
            place: mark for place, mark in self._left_by_itself.items() if place[0] != id(optimizer)
        } | marks

    def has_pending_gradients(self) -> bool:
        """Return whether there are gradients that a step still to be made uses."""
        return any(self._is_accumulating(optimizer) for optimizer in self._own)

    def _is_accumulating(self, optimizer: torch.optim.Optimizer) -> bool:
        left = self._left_by_itself if optimizer in self._spanning else self._left
        if optimizer not in self._carrying and all(
            _is_same(left.get(place), mark) for place, mark in self._marks(optimizer)
        ):
            return False
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        greatest = [_greatest(gradient) for gradient in gradients]
        # A scaler leaves out a step whose gradients aren't finite, and the next pass clears them.
        return any(greatest) and all(map(math.isfinite, greatest))

    def list_strangers(self, parameters: Iterable[torch.Tensor]) -> list[torch.optim.Optimizer]:
        """Return the optimizers that make steps of this training and aren't in the State.

        An optimizer that lives for one training step, as those of inner loops do, isn't among them.

        Args:
            parameters: those of the State; an optimizer of one of them needn't be seen twice.
        """
        if not self._others:
            return []
        held = {id(part) for optimizer in self._own for part in list_parts(optimizer)}
        known = {id(parameter) for parameter in parameters}
        return [
            optimizer
            for optimizer, (first, last) in list(self._others.items())
            if not (unwrap_optimizer(optimizer) in self._own or id(optimizer) in held)
            and not (any(part in self._own for part in list_parts(optimizer)) and not optimizer.state)
            and (first < last or any(id(parameter) in known for parameter in _iter_parameters(optimizer)))
        ]

    def _marks(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[_Place, _Mark]]:
        """Yield marks of the gradients that are there."""
        groups = optimizer.param_groups
        for place in self._sampled.get(id(optimizer), ()):
            _, group, number = place
            if group < len(groups) and number < len(groups[group]["params"]):
                gradient = groups[group]["params"][number].grad
                memory = None if gradient is None else _memory_of(gradient)
                if memory is not None:
                    yield place, (StorageWeakRef(memory.untyped_storage()), memory._version)  # noqa: SLF001


def list_parts(value: Any) -> list[torch.optim.Optimizer]:  # noqa: ANN401 - anything
    """Return the optimizers that an object holds in its attributes."""
    found: list[torch.optim.Optimizer] = []
    for part in list(attributes_of(value).values()):
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else (part,)
        found += [one for one in parts if isinstance(one, torch.optim.Optimizer)]
    return found


def _sample(optimizer: torch.optim.Optimizer) -> Iterator[_Place]:
    """Yield the places of some parameters, spread over all."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    stride = max(1, -(-sum(sizes) // _SAMPLED))
    places = ((group, number) for group, size in enumerate(sizes) for number in range(size))
    for count, (group, number) in enumerate(places):
        if count % stride == 0:
            yield id(optimizer), group, number


def _iter_parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _memory_of(gradient: torch.Tensor) -> torch.Tensor | None:
    """Return a plain tensor that has the memory of a gradient on this worker; None where there isn't one."""
    local = local_of(gradient) if is_distributed(gradient) else gradient
    if local.layout == torch.sparse_coo:
        return local._values()  # noqa: SLF001 - values() wants it coalesced
    return local if local.layout == torch.strided and not local.is_inference() else None


def _is_same(before: _Mark | None, now: _Mark) -> bool:
    return before is not None and before == now and not before[0].expired()


def _is_added_once(before: _Mark | None, now: _Mark) -> bool:
    """Return whether a gradient was written to once since it was marked: clearing and computing it would be twice."""
    return before is not None and not before[0].expired() and before[0] == now[0] and now[1] == before[1] + 1


def _is_added_to(before: _Mark | None, now: _Mark, own: _Mark | None) -> bool:
    """Return whether a gradient from before another optimizer's step was added to, not cleared and made anew."""
    if before is None or before[0].expired() or before[0] != now[0]:
        return False
    is_leftover = own is not None and not own[0].expired() and own == before
    return before[1] != now[1] and not is_leftover


def _greatest(gradient: torch.Tensor) -> float:
    """Return the greatest absolute value of what is here of a gradient."""
    memory = _memory_of(gradient)
    return 0.0 if memory is None or not memory.numel() else float(memory.detach().abs().max())

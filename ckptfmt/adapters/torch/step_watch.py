"""Observe optimizer steps, to find pending gradients and optimizers outside of the State."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptfmt.adapters.live_trees import attributes_of
from ckptfmt.adapters.torch.optimizer_kinds import iter_parameters, unwrap_optimizer
from ckptfmt.adapters.torch.tensors import is_distributed, local_of

#: The number of parameters whose gradients are marked at each step.
_SAMPLED: Final = 16

#: The place of a parameter: the optimizer's id, the group's index, and the index in the group.
_Place: TypeAlias = tuple[int, int, int]
#: A mark of a gradient: a weak reference to its memory, and torch's count of the writes.
_Mark: TypeAlias = tuple[StorageWeakRef, int]


def watch_updates(note: Callable[[torch.optim.Optimizer], None]) -> Callable[[], None]:
    """Register a function to be called after each step of every optimizer in the process.

    Returns: the function to end the registration.
    """

    def call(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        note(optimizer)

    # The compiler of torch doesn't trace the hook: a compiled step calls the hook too.
    hook: Callable[..., None] = torch.compiler.disable(call)
    return register_optimizer_step_post_hook(hook).remove


class StepWatch:
    """An observer of the steps of all optimizers in this process, by a hook after each step.

    A gradient that the last step used doesn't matter: the next pass clears it. A gradient that was
    computed after the last step belongs to a future step, and no checkpoint has it. Memory and
    write count of some gradients, marked at the end of the last step, distinguish the two cases.

    Args:
        optimizers: the optimizers of the State.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._own: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        #: The optimizers in attributes of the State's optimizers, as in SAM.
        self._parts: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        #: For each optimizer outside of the State: the step counts of the State's optimizers at the
        #: first and the last step.
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._step_count = 0
        self._sampled: dict[int, list[_Place]] = {}
        #: The marks at the last step of any optimizer of the State, and at the last step of the
        #: mark's own optimizer.
        self._left: dict[_Place, _Mark] = {}
        self._left_by_itself: dict[_Place, _Mark] = {}
        #: Optimizers that use gradients from before another optimizer's step, and from before their
        #: own last step.
        self._spanning: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._carrying: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.follow(optimizers)
        self._left = {
            place: mark for optimizer in self._own for place, mark in self._marks(optimizer)
        }
        self._left_by_itself = dict(self._left)
        this = weakref.ref(self)

        def note(optimizer: torch.optim.Optimizer) -> None:
            watch = this()
            if watch is not None:
                watch.note_step(optimizer)

        #: Removes the hook, when called or when the watch is garbage-collected.
        self.close = weakref.finalize(self, watch_updates(note))

    @property
    def has_optimizers(self) -> bool:
        """Whether the State has optimizers."""
        return bool(self._own)

    def follow(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Replace the set of the State's optimizers."""
        self._own = weakref.WeakSet(optimizers)
        self._parts = weakref.WeakSet(part for one in self._own for part in list_parts(one))
        self._sampled = {id(optimizer): list(_sample(optimizer)) for optimizer in self._own}
        for optimizer in self._own:
            self._others.pop(optimizer, None)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a step of an optimizer."""
        if optimizer not in self._own:
            self._step_count += optimizer in self._parts
            first, _ = self._others.get(optimizer, (self._step_count, 0))
            self._others[optimizer] = first, self._step_count
            return
        self._step_count += 1
        marks = dict(self._marks(optimizer))
        if marks and all(
            _is_added_once(self._left_by_itself.get(place), mark) for place, mark in marks.items()
        ):
            self._carrying.add(optimizer)
        else:
            self._carrying.discard(optimizer)
        if len(self._own) > 1:
            own = self._left_by_itself
            if any(
                _is_added_to(self._left.get(place), mark, own.get(place))
                for place, mark in marks.items()
            ):
                self._spanning.add(optimizer)
            others = (one for one in self._own if one is not optimizer)
            self._left = dict(marks) | {
                place: mark for one in others for place, mark in self._marks(one)
            }
        else:
            self._left = marks
        self._left_by_itself = {
            place: mark for place, mark in self._left_by_itself.items() if place[0] != id(optimizer)
        } | marks

    def progress(self) -> tuple[int, dict[_Place, _Mark]]:
        """Return the number of the optimizers' steps, and the marks of their gradients."""
        return self._step_count, dict(mark for one in self._own for mark in self._marks(one))

    def has_trained(self, since: tuple[int, dict[_Place, _Mark]]) -> bool:
        """Return whether an optimizer made a step, or a gradient was computed or cleared.

        Args:
            since: an earlier result of `progress`.
        """
        count, marks = self.progress()
        return (
            count != since[0]
            or marks.keys() != since[1].keys()
            or not all(_is_same(since[1][place], mark) for place, mark in marks.items())
        )

    def has_pending_gradients(self) -> bool:
        """Return whether gradients exist that a future step uses."""
        return any(self._is_accumulating(optimizer) for optimizer in self._own)

    def _is_accumulating(self, optimizer: torch.optim.Optimizer) -> bool:
        left = self._left_by_itself if optimizer in self._spanning else self._left
        if optimizer not in self._carrying and all(
            _is_same(left.get(place), mark) for place, mark in self._marks(optimizer)
        ):
            return False
        gradients = [
            parameter.grad for parameter in iter_parameters(optimizer) if parameter.grad is not None
        ]
        greatest = [_greatest(gradient) for gradient in gradients]
        # A scaler skips a step with non-finite gradients, and the next pass clears them.
        return any(greatest) and all(map(math.isfinite, greatest))

    def list_strangers(self, parameters: Iterable[torch.Tensor]) -> list[torch.optim.Optimizer]:
        """Return the optimizers that take part in this training and aren't in the State.

        An optimizer that lives for a single training step, as in an inner loop, is excluded.

        Args:
            parameters: the parameters of the State. A single step of an optimizer with such a
                parameter suffices for inclusion.
        """
        if not self._others:
            return []
        held = {id(part) for optimizer in self._own for part in list_parts(optimizer)}
        known = {id(parameter) for parameter in parameters}
        return [
            optimizer
            for optimizer, (first, last) in list(self._others.items())
            if not (unwrap_optimizer(optimizer) in self._own or id(optimizer) in held)
            and not (
                any(part in self._own for part in list_parts(optimizer)) and not optimizer.state
            )
            and (
                first < last
                or any(id(parameter) in known for parameter in iter_parameters(optimizer))
            )
        ]

    def _marks(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[_Place, _Mark]]:
        """Yield the marks of the sampled gradients that exist."""
        groups = optimizer.param_groups
        for place in self._sampled.get(id(optimizer), ()):
            _, group, number = place
            if group < len(groups) and number < len(groups[group]["params"]):
                gradient = groups[group]["params"][number].grad
                memory = None if gradient is None else _memory_of(gradient)
                if memory is not None:
                    yield place, (StorageWeakRef(memory.untyped_storage()), memory._version)  # noqa: SLF001


def list_parts(value: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in the attributes of an object."""
    found: list[torch.optim.Optimizer] = []
    for part in list(attributes_of(value).values()):
        parts = (
            part.values()
            if isinstance(part, dict)
            else part
            if isinstance(part, list | tuple)
            else (part,)
        )
        found += [one for one in parts if isinstance(one, torch.optim.Optimizer)]
    return found


def _sample(optimizer: torch.optim.Optimizer) -> Iterator[_Place]:
    """Yield the places of some parameters, spread evenly over all that require a gradient."""
    places = [
        (id(optimizer), index, number)
        for index, group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(group["params"])
        if parameter.requires_grad
    ]
    yield from places[:: max(1, -(-len(places) // _SAMPLED))]


def _memory_of(gradient: torch.Tensor) -> torch.Tensor | None:
    """Return a plain tensor that shares the local memory of a gradient, or None."""
    local = local_of(gradient) if is_distributed(gradient) else gradient
    if local.layout == torch.sparse_coo:
        return local._values()  # noqa: SLF001
    return local if local.layout == torch.strided and not local.is_inference() else None


def _is_same(before: _Mark | None, now: _Mark) -> bool:
    return before is not None and before == now and not before[0].expired()


def _is_added_once(before: _Mark | None, now: _Mark) -> bool:
    """Return whether a gradient was written exactly once since its mark.

    Clearing and recomputing a gradient would be two writes.
    """
    return (
        before is not None
        and not before[0].expired()
        and before[0] == now[0]
        and now[1] == before[1] + 1
    )


def _is_added_to(before: _Mark | None, now: _Mark, own: _Mark | None) -> bool:
    """Return whether a gradient was added to since another optimizer's step.

    The result is false for a gradient that was cleared and recomputed.
    """
    if before is None or before[0].expired() or before[0] != now[0]:
        return False
    is_leftover = own is not None and not own[0].expired() and own == before
    return before[1] != now[1] and not is_leftover


def _greatest(gradient: torch.Tensor) -> float:
    """Return the greatest absolute value of the local part of a gradient."""
    memory = _memory_of(gradient)
    return 0.0 if memory is None or not memory.numel() else float(memory.detach().abs().max())

"""Detect training state outside the State: optimizers, schedulers, pending gradients, loaders."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any, Final

from ckptfmt.adapters.live import Kind, Live
from ckptfmt.state import State

#: The maximum depth in a tree at which copies of an object's state are searched.
_DEPTH: Final = 2
#: The member of topology that lists the unsaved state found by a save.
UNSAVED: Final = "unsaved"


@dataclasses.dataclass(frozen=True, slots=True)
class Unsaved:
    """A part of the training state that a save omits. Each lowers the claim of every load.

    Attributes:
        name: the word for this case in the log and in `Checkpointer.reports`.
        text: a description, the consequence and the remedy.
    """

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


class Unheld:
    """A detector of training state outside a State, such as other optimizers and schedulers.

    The detector observes all optimizers of the process from its construction until `close`.
    """

    def __init__(self) -> None:
        self._watch: Any = None
        #: The progress of the optimizers at the begin of an epoch, until the first batch ends.
        self._progress: Any = None
        self._is_ahead = False
        self._found: list[Unsaved] = []
        #: Loaders outside the State with persistent worker processes.
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        #: The loaders with workers at the first search, before the RNG streams are restored: a
        #: resume starts the workers at the same point.
        self._early: weakref.WeakSet[Any] | None = None
        #: The draws on devices outside the State at the previous search, by device; and the devices
        #: that were drawn from since the first search.
        self._draws: dict[str, int] | None = None
        self._drawn: set[str] = set()

    def follow(self, state: State, live: Live) -> None:
        """Start observing the steps of a state's optimizers."""
        side = live.sides.torch
        if side is None or state.rng is False:  # a framework decides on the saved state
            return
        optimizers = side.list_optimizers(unit.value for unit in live.units)
        if self._watch is None:
            self._watch = side.StepWatch(optimizers)
        else:
            self._watch.follow(optimizers)

    def begin_epoch(self) -> None:
        """Record that the loop begins an epoch."""
        watch = self._watch
        self._progress = watch.progress() if watch is not None and watch.has_optimizers else None

    def end_batch(self) -> None:
        """Record that the loop asks for another batch. Only the first call in an epoch matters."""
        if self._progress is not None and self._watch is not None:
            self._is_ahead |= not self._watch.has_trained(self._progress)
        self._progress = None

    def find(
        self, state: State, live: Live, *, looks_around: bool, saves: bool = True
    ) -> list[Unsaved]:
        """Return the training state that a save at this moment omits.

        Args:
            state: the state to save.
            live: the state's structure.
            looks_around: whether to search the objects of the process, which takes some tens of
                milliseconds. If false, the results of the previous search are returned.
            saves: whether the state is saved now. If false, pending gradients don't matter.
        """
        side = live.sides.torch
        doubts = [Unsaved("NOT_EXACT", text) for text in state.doubts]
        if side is None or state.rng is False:
            return doubts
        values = [unit.value for unit in live.units]
        trees = [
            unit.value
            for unit in live.units
            if unit.kind is Kind.TREE and unit.field == "optimizer"
        ]

        def is_copied(value: object) -> bool:
            # A program may keep the result of state_dict() in the State, renewed for each save.
            return bool(
                side.is_copied(value, [copy for tree in trees for copy in _mappings_in(tree)])
            )

        if looks_around:
            helpers, loaders = side.list_unheld(values)
            self._found = [_of_holder(side, value) for value in helpers if not is_copied(value)]
            self._loaders = weakref.WeakSet(loaders)
            if self._early is None:
                self._early = weakref.WeakSet(self._begun_loaders())
        given = state.rng.values() if isinstance(state.rng, Mapping) else ()
        draws = side.count_draws_outside(live.devices, given)
        found = [*self._found, *self._find_draws(draws)]
        early = self._early or ()
        found += [_of_loader(loader) for loader in self._begun_loaders() if loader not in early]
        optimizers = side.list_optimizers(values)
        if optimizers:
            parts = side.list_unheld_parts(optimizers)
            found += [_of_part(side, part) for part in parts if not is_copied(part)]
            names = side.list_unsaved_parameters(live.views.values(), optimizers)
            found += [_of_parameter(name) for name in names[:1]]
        if self._watch is not None:
            self._watch.follow(optimizers)
            parameters = (tensor for value in values for tensor in side.list_parameters(value))
            strangers = self._watch.list_strangers(parameters)
            found += [_of_optimizer(one) for one in strangers if not is_copied(one)]
            found += [PENDING] if saves and self._watch.has_pending_gradients() else []
            found += [AHEAD] if self._is_ahead else []
        return list(dict.fromkeys((*found, *doubts)))

    def _find_draws(self, draws: dict[str, int]) -> list[Unsaved]:
        """Return a part for the devices outside the State with draws since the first search."""
        before = self._draws
        self._draws = draws
        if before is not None:
            self._drawn |= {name for name, count in draws.items() if count != before.get(name, 0)}
        drawn = sorted(name for name in self._drawn if draws.get(name))
        return [_of_draws(drawn)] if drawn else []

    def _begun_loaders(self) -> list[Any]:
        """Return the found loaders with running worker processes."""
        return [one for one in self._loaders if one._iterator is not None]  # noqa: SLF001 - torch's

    def close(self) -> None:
        """Stop observing optimizers."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _mappings_in(value: object, depth: int = 0) -> list[Mapping[Any, Any]]:
    """Return the mappings in a tree, the root included, down to `_DEPTH` levels."""
    found = [value] if isinstance(value, Mapping) else []
    parts = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return found + [
        one for part in parts if depth < _DEPTH for one in _mappings_in(part, depth + 1)
    ]


#: The report of gradients that exist at a save and that no step has applied yet.
PENDING: Final = Unsaved(
    "GRADIENTS_PENDING",
    "gradients that the next optimizer.step() uses were there at the save, and gradients aren't"
    " saved: save where the"
    " next backward() begins with zero_grad(), not within an accumulation",
)


#: The report of a loop that takes a batch before the training on the batch before.
AHEAD: Final = Unsaved(
    "LOADER_AHEAD",
    "the loop asked for the second batch of an epoch before an optimizer's step or a backward pass:"
    " a wrapper around the DataLoader takes batches ahead, and each step is counted one batch too"
    " early. Give epochs() a loop over the DataLoader itself; num_workers= loads ahead as well",
)


def _of_holder(side: Any, value: object) -> Unsaved:
    kind = side.describe(value)
    if side.is_scaler(value):
        text = (
            f"a {kind} scales the gradients, and no State holds it: give extra={{'scaler':"
            f" scaler}}, the object itself"
        )
        return Unsaved("SCALER_NOT_SAVED", text)
    does = "changes the options of" if side.is_schedule(value) else "has a step() and holds"
    text = (
        f"a {kind} {does} an optimizer in State, and no State holds it: give"
        f" State(extra={{'scheduler': scheduler}}),"
        " the object itself"
    )
    return Unsaved("SCHEDULER_NOT_SAVED", text)


def _of_loader(loader: Any) -> Unsaved:
    text = (
        f"a {type(loader).__qualname__} outside the State (num_workers={loader.num_workers},"
        " persistent_workers=True) has drawn the seed of its worker processes from the program's"
        " random numbers, once in this launch, and a resume draws the seed again: give the loader"
        " generator=torch.Generator(), or persistent_workers=False if its data set draws random"
        " numbers"
    )
    return Unsaved("PERSISTENT_WORKERS", text)


def _of_draws(devices: list[str]) -> Unsaved:
    index = devices[0].partition(":")[2]
    text = (
        f"random numbers are drawn on {', '.join(devices)}, where no tensor of the State is, and no"
        " save has the position of these generators: give"
        f" State(rng={{'{devices[0]}': torch.cuda.default_generators[{index}]}})"
    )
    return Unsaved("DEVICE_DRAWS", text)


def _of_optimizer(optimizer: Any) -> Unsaved:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    text = (
        f"another optimizer ({type(optimizer).__qualname__}, {count} parameters) makes steps in"
        " this training, and no"
        " State holds it: give the object itself, as in State(optimizer={'first': optimizer,"
        " 'second': other})"
    )
    return Unsaved("OPTIMIZER_NOT_SAVED", text)


def _of_part(side: Any, optimizer: object) -> Unsaved:
    text = (
        f"an optimizer of the State holds another one ({side.describe(optimizer)}), whose state no"
        " save has: give that object too, as in State(extra={'base': optimizer.base_optimizer})"
    )
    return Unsaved("OPTIMIZER_NOT_SAVED", text)


def _of_parameter(name: str) -> Unsaved:
    text = (
        f"the state_dict of the module leaves out {name}, which an optimizer of the State trains:"
        " let its state_dict and its hooks keep all trained parameters"
    )
    return Unsaved("PARAMETER_NOT_SAVED", text)

"""The objects that a user saves: `State` with the seven fields of a run, and wrappers of values."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from ckptfmt.documents.manifest import FIELDS
from ckptfmt.errors import CkptError, Code, err

#: Reason of the absence of a field left out by the caller.
NOT_GIVEN: Final = "not given to State"

#: Prefix of the reason of the absence of a field missing in another format.
IMPORTED: Final = "imported from "

#: Reason of the absence of the field rng, by default.
NO_RNG: Final = "State(rng=False)"

#: Fields of every checkpoint, which a caller can't leave out.
_COLLECTED: Final = ("topology", "provenance")


#: Number of a mapping's keys shown in the representation of a State.
_KEYS_SHOWN: Final = 8

#: Key of the checkpoint from which a run began, in the field provenance.
INIT_FROM: Final = "init_from"

#: Prefix of the names of values of ``State(extra=...)`` in their field.
_EXTRA: Final = "extra/"


def place_of(field: str, name: str) -> str:
    """Return the name of a part of a `State` in messages, given field and name in a checkpoint.

    >>> (place_of("weights", "head.bias"), place_of("optimizer", "extra/scheduler"),
    ...  place_of("data", ""))
    ('weights:head.bias', 'extra:scheduler', 'data')
    """
    if field == "optimizer" and name.startswith(_EXTRA):
        field = "extra"
        name = name.removeprefix(_EXTRA)
    return f"{field}:{name}" if name else field


@dataclasses.dataclass(slots=True, eq=False)
class PerWorker:
    """A value that differs between workers.

    Each worker saves a value; a load gives the value back to the worker of the same number.

    >>> PerWorker({"batches": 3})
    PerWorker({batches})
    """

    value: object

    def __repr__(self) -> str:
        return f"PerWorker({_summary(self.value)})"


@dataclasses.dataclass(slots=True, eq=False)
class FirstWorker:
    """A value saved by worker 0 for all workers, and given to every worker by a load.

    For plain values and objects with a ``state_dict``, different between workers without a purpose,
    such as the trainer state of a framework, or a configuration with the rank among its values.
    Without this wrapper, different values of one name on two workers are an error.

    >>> FirstWorker({"best_metric": 0.5})
    FirstWorker({best_metric})
    """

    value: object

    def __repr__(self) -> str:
        return f"FirstWorker({_summary(self.value)})"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Modules as parts of a model, in one name space, as if a single module held all parts.

    For a process with several parts, such as virtual stages of a pipeline, if the names of their
    layers are those of the whole model. For modules in a list or mapping, in contrast, the key
    precedes each name.

    Args:
        modules: the parts; two parts have no tensor of the same name, unless they share the tensor.
    """

    modules: Sequence[object]

    def __repr__(self) -> str:
        return f"Parts([{', '.join(map(_summary, self.modules))}])"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveRngStream:
    """A generator of this process.

    Attributes:
        name: the logical name. Device names aren't used, since another machine may number devices
            differently.
        kind: the algorithm, and the library that defines the form of the state.
        read: returns the state, as plain values and arrays; of a captured stream, the state at the
            time of the capture.
        write: sets a state of the same form.
        device: the device of a generator of torch, such as ``cuda:3``; None for other generators.
    """

    name: str
    kind: str
    read: Callable[[], object]
    write: Callable[[Any], None]
    device: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CapturedRng:
    """The state of the RNG streams of this process at the call of `ckptfmt.capture_rng`.

    Attributes:
        streams: one stream for each generator.
    """

    streams: tuple[LiveRngStream, ...]

    def put_back(self) -> None:
        """Set the generators to the captured state, which undoes draws since then."""
        for stream in self.streams:
            stream.write(stream.read())


#: Names of other libraries for the fields of a `State`.
_OTHER_NAMES: Final = {
    "weights": (
        "model",
        "models",
        "module",
        "net",
        "network",
        "params",
        "parameters",
        "state_dict",
    ),
    "optimizer": ("optimizers", "optim", "opt"),
    "data": ("dataloader", "loader", "train_loader", "sampler", "dataset", "iterator"),
    "config": ("args", "cfg", "hparams", "hyper_parameters"),
    "extra": ("scheduler", "lr_scheduler", "schedulers", "scaler", "ema", "epoch", "step"),
    "rng": ("generator", "generators"),
}


def _unknown_argument(name: str, known: Sequence[str]) -> CkptError:
    """Return the error for an unknown argument of `State`, with the field for the object."""
    meant = next((field for field, names in _OTHER_NAMES.items() if name.lower() in names), None)
    near = [meant] if meant is not None else difflib.get_close_matches(name, known, n=1)
    if not near:
        remedy = f"Give the object as extra={{{name!r}: ...}}. The fields are {', '.join(known)}."
    elif near[0] in ("extra", "rng"):
        remedy = f"Write State({near[0]}={{{name!r}: {name}}})."
    else:
        remedy = f"Write State({near[0]}={name})."
    return err(
        Code.ARGUMENT, f"State has no field {name!r}", where=f"State({name}=...)", remedy=remedy
    )


def _refusing_unknown(cls: type[State]) -> type[State]:
    """Return the class with an `__init__` that suggests a field for a wrong argument."""
    make = cls.__init__

    @functools.wraps(make)
    def init(self: State, *given: object, **named: Any) -> None:
        if given:
            raise err(
                Code.ARGUMENT,
                (
                    f"a {type(given[0]).__qualname__} that isn't said to be weights, optimizer,"
                    " data"
                    " or config"
                ),
                where="State(...)",
                remedy=(
                    "Say which part of the run each is: State(weights=model,"
                    " optimizer=optimizer, data=sampler)."
                ),
            )
        known = [field.name for field in dataclasses.fields(cls) if field.init]
        for name in named.keys() - known:
            raise _unknown_argument(name, known)
        make(self, **named)

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


@_refusing_unknown
@dataclasses.dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class State:
    """The live objects of a run, for a checkpoint to be made from or loaded into.

    Each of `weights`, `optimizer`, `data` and the values of `extra` is a module, an optimizer, an
    object with ``state_dict`` and ``load_state_dict``, a tree of tensors, arrays and plain values
    (strings, numbers, ``bytes``, containers and others), or a mapping or list of such objects. A
    pytree of JAX, with arrays of any sharding and typed keys, is such a tree. JAX's arrays can't be
    changed: a load makes a new tree, and assigns the tree to `weights`, `optimizer`, `data` or the
    value of `extra`.

    Attributes:
        weights: module or modules; the `Parts` of a module; a mapping of tensors.
        optimizer: optimizer or optimizers; their parameters are named by `weights`.
        data: the position of the run in its data, such as a `ckptfmt.Sampler`.
        config: a tree, compared on load, never loaded. Namespaces, dataclasses, paths and enums are
            turned into plain values. The tree is equal on all processes, or in a `FirstWorker`:
            then process 0's is saved and compared.
        extra: further objects changed by a step, by name: schedulers, scalers, averaged weights,
            counters.
        rng: the caller's own generators, by name, in addition to those of Python, numpy and torch;
            False to save and load no RNG stream, if a framework does. A value of
            `ckptfmt.capture_rng` is saved with the captured state; a load sets the live generators.
        provenance: the origin of the run, in the caller's words; a tree.
        identity: keys of `config`, such as ``"model/width"``, to be equal on load.
        harmless: keys of `config`, such as ``"out_dir"``, without influence on the training: a
            difference is reported, and lowers no claim.
        absent: reasons for fields left out on purpose.
        frozen_base: the place of the weights that this run doesn't train, such as the base of LoRA
            adapters: the path or URL of a checkpoint, of a directory of safetensors files as of
            Hugging Face, or of a safetensors file. A save refers by digest to tensors of `weights`
            that require no gradient and are bit for bit equal to a tensor of the base, instead of
            storing them. A load reads them from the base, unless the live tensors are equal
            already. None to store everything, and to look for a base at the recorded place, unless
            this is a URL outside of the checkpoint's bucket.
        init_from: the checkpoint from which the state's run began, or None. A `Checkpointer` sets
            this attribute; saves copy it into the provenance.
        doubts: reasons why a resume from this state can't be exact, found by a framework's plug-in.
            A plug-in assigns the reasons before a save; process 0's are saved, and lower the claim
            of each load.

    Raises: StateError(ARGUMENT).

    >>> State(weights={"w": 1}, absent={"data": "synthetic"}).absent_reasons()["data"]
    'synthetic'
    """

    weights: object = None
    optimizer: object = None
    data: object = None
    config: object = None
    extra: Mapping[str, object] | None = None
    rng: Mapping[str, object] | CapturedRng | Literal[False] | None = None
    provenance: Mapping[str, object] | None = None
    identity: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    frozen_base: str | os.PathLike[str] | None = None
    init_from: Mapping[str, object] | None = dataclasses.field(default=None, init=False)
    doubts: tuple[str, ...] = dataclasses.field(default=(), init=False)
    #: The comparisons of tensors with a frozen base at earlier saves, by place and name.
    _frozen: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        base: object = self.frozen_base
        if base is not None and not (isinstance(base, str | os.PathLike) and os.fspath(base)):
            raise err(
                Code.ARGUMENT,
                f"frozen_base is {base!r}, not a path or URL",
                where="State(frozen_base=...)",
            )
        for name in ("identity", "harmless"):
            if isinstance(getattr(self, name), str):
                raise err(
                    Code.ARGUMENT,
                    f"{name} is one string, not a tuple of keys",
                    where=f"State({name}=...)",
                )
        for name in ("extra", "rng", "provenance"):
            value = getattr(self, name)
            if value is None or (
                name == "rng" and (value is False or isinstance(value, CapturedRng))
            ):
                continue
            if not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
                raise err(
                    Code.ARGUMENT,
                    f"{name} isn't a mapping with strings as keys",
                    where=f"State({name}=...)",
                )
        given: Mapping[str, object] = self.absent
        for field, reason in given.items():
            if field not in FIELDS or field in _COLLECTED:
                raise err(
                    Code.ARGUMENT,
                    f"{field!r} isn't a field that can be left out",
                    where="State(absent=...)",
                )
            if not isinstance(reason, str) or not reason:
                raise err(
                    Code.ARGUMENT,
                    f"{field!r} has no reason, a text that isn't empty",
                    where="State(absent=...)",
                )
            if not self._is_left_out(field):
                raise err(
                    Code.ARGUMENT,
                    f"{field!r} is said to be absent, but is given",
                    where="State(absent=...)",
                )

    def __repr__(self) -> str:
        """Return the kinds of the objects, since the representation of a model fills a page."""
        given = [
            (field.name, getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.repr
        ]
        texts = [
            f"{name}={_summary(value)}" for name, value in given if value not in (None, (), {})
        ]
        return f"State({', '.join(texts)})"

    def absent_reasons(self) -> dict[str, str]:
        """Return the fields left out, each with the reason."""
        fields = [field for field in FIELDS if field not in _COLLECTED and self._is_left_out(field)]
        return {
            field: self.absent.get(field, NO_RNG if field == "rng" else NOT_GIVEN)
            for field in fields
        }

    def _is_left_out(self, field: str) -> bool:
        if field == "rng":
            return self.rng is False
        return getattr(self, field) is None and not (field == "optimizer" and self.extra)


def _summary(value: object) -> str:
    """Return a word for an object of a State: the class, or the keys of a mapping."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return f"{{{', '.join(value)}}}" if len(value) <= _KEYS_SHOWN else f"{{{len(value)} keys}}"
    return (
        repr(value) if isinstance(value, bool | int | float | str | tuple) else type(value).__name__
    )


def check_state(value: object) -> None:
    """Raise unless `value` is a `State`, with a remedy. Raises: StateError(ARGUMENT)."""
    if not isinstance(value, State):
        is_path = isinstance(value, str | os.PathLike)
        raise err(
            Code.ARGUMENT,
            f"a {type(value).__qualname__} where a ckptfmt.State is wanted",
            where="state",
            remedy="Give the path first, then the State."
            if is_path
            else (
                "Say which part of the run it is: ckptfmt.State(weights=model,"
                " optimizer=optimizer, data=sampler)."
            ),
        )

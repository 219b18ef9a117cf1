"""Save and restore RNG streams: of Python, numpy and torch, and of the caller's generators."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import random
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final, Literal

import numpy as np

from ckptfmt.adapters import Sides, torch_side
from ckptfmt.adapters.data_loaders import PassiveLoader
from ckptfmt.adapters.device_streams import DeviceMatch, is_of_device, match_devices
from ckptfmt.adapters.live import Kind, Unit, is_generator
from ckptfmt.adapters.live_trees import (
    GLOBAL,
    attributes_of,
    plain_leaves,
    plain_values,
    worker_scope,
)
from ckptfmt.adapters.load_plan import LoadPlan
from ckptfmt.documents.part import RngStream
from ckptfmt.errors import Code, err
from ckptfmt.state import CapturedRng, LiveRngStream

_PYTHON: Final = "python.mt19937"
_NUMPY_LEGACY: Final = "numpy.legacy"
#: The seed of an arbitrary position, used as a mark.
_NOWHERE: Final = 0x5EED_0F_A_5E77
#: The size of numpy's MT19937 state in bytes: 624 words of 32 bits, and the position.
_MT19937_NBYTES: Final = 625 * 4
#: The number of last words of Python's state in a digest. The position is the last of 625 words.
_WORDS: Final = 16
#: The size of the end of numpy's and torch's states in a digest. The end has numpy's position, and
#: the normal numbers that torch keeps for the next draw.
_TAIL_NBYTES: Final = 64
#: The size of the begin of torch's state in a digest, with the position and some words.
_TORCH_HEAD_NBYTES: Final = 128
#: The prefix of names of RNG streams whose generators are attributes of objects.
HELD: Final = "held/"
#: The maximum depth of the search for generators in attributes.
_HELD_DEPTH: Final = 2
#: The effect of another type of device on a generator of the caller, for people.
_OWN_STATE: Final = (
    "no other type of device can take the saved state, so that the generator keeps its own state,"
    " and draws from the generator differ from an uninterrupted run"
)


def capture_rng(
    generators: Mapping[str, object] | None = None, *, devices: Iterable[object] = ()
) -> CapturedRng:
    """Return the current state of this process's RNG streams, to be saved or restored later.

    A resumed run continues from the saved streams. Some trainers draw random numbers between the
    end of a step and the save, and draw the same numbers again after a resume, for example to
    prefetch a batch. Such a trainer captures the streams before the draw, and saves with
    ``state.rng = captured``. `CapturedRng.put_back` undoes draws that a resumed run doesn't repeat.

    Args:
        generators: the program's own generators, by name, as for ``State(rng=...)``. The streams of
            Python, numpy and torch are always captured.
        devices: the CUDA devices that hold tensors of the state, such as ``cuda:3``. Without any,
            the stream of the current device is captured, once CUDA is initialised. A save takes
            the streams of the state's devices; `CapturedRng.put_back` sets all captured streams.

    Raises: StateError(STATE_UNSUPPORTED) for a generator of an unknown type.

    >>> import random
    >>> captured = capture_rng()
    >>> drawn = random.random()
    >>> captured.put_back()
    >>> drawn == random.random()
    True
    """
    live = live_streams(generators, frozenset(map(str, devices)), torch_side())
    return CapturedRng(
        tuple(dataclasses.replace(stream, read=_returning(stream.read())) for stream in live)
    )


def _returning(state: object) -> Callable[[], object]:
    return lambda: state


def live_streams(
    rng: Mapping[str, object] | CapturedRng | None, devices: frozenset[str], side: Any
) -> list[LiveRngStream]:
    """Return the RNG streams of this process.

    Args:
        rng: the caller's generators, by name; or captured streams, which are returned instead.
        devices: torch devices that hold tensors of the state, such as ``cuda:0``.
        side: the result of `torch_side`.

    Raises: StateError(STATE_UNSUPPORTED) for a generator of an unknown type;
        StateError(STREAM_MISSING) for a stream that wasn't captured.
    """
    if isinstance(rng, CapturedRng):
        return _choose_captured(rng, live_streams(None, devices, side))
    streams = [
        LiveRngStream(name="python", kind=_PYTHON, read=random.getstate, write=random.setstate),
        LiveRngStream(
            name="numpy",
            kind=_NUMPY_LEGACY,
            read=functools.partial(np.random.get_state, legacy=False),
            write=np.random.set_state,
        ),
    ]
    if side is not None:
        streams += [LiveRngStream(**stream) for stream in side.global_streams(devices)]
    return streams + [
        _user_stream(f"user/{name}", generator) for name, generator in (rng or {}).items()
    ]


def _choose_captured(rng: CapturedRng, wanted: Iterable[LiveRngStream]) -> list[LiveRngStream]:
    """Return the captured streams of a state, under the names that the state gives to its devices.

    Numbers in names depend on the devices given to `capture_rng`, so devices are compared instead.

    Args:
        rng: the captured streams.
        wanted: the global streams that the state needs.

    Raises: StateError(STREAM_MISSING).
    """
    names = {_place_of(stream): stream.name for stream in wanted}
    captured = {_place_of(stream) for stream in rng.streams}
    missing = [
        name if place == name else f"{name} ({place})"
        for place, name in names.items()
        if place not in captured
    ]
    if missing:
        raise err(
            Code.STREAM_MISSING,
            f"{', '.join(sorted(missing))} wasn't captured",
            where="State(rng=...)",
            remedy=(
                "Capture once torch is imported and its devices are in use; pass"
                " capture_rng(devices=...)."
            ),
        )
    return [
        dataclasses.replace(stream, name=names.get(_place_of(stream), stream.name))
        for stream in rng.streams
        if _place_of(stream) in names or not is_of_device(stream.name)
    ]


def _place_of(stream: LiveRngStream) -> str:
    """Return the device of a device's default generator, and the name of any other stream."""
    return str(stream.device) if is_of_device(stream.name) else stream.name


def unit_streams(
    units: Iterable[Unit],
    rng: Mapping[str, object] | CapturedRng | Literal[False] | None,
    side: Any,
) -> list[LiveRngStream]:
    """Return the generators that are values of a State, or attributes of a State's objects.

    Args:
        units: the units of the State.
        rng: the caller's generators, as for `live_streams`. They are excluded from the result.
            False if a framework handles the generators in attributes.
        side: the result of `torch_side`.
    """
    given = rng.values() if isinstance(rng, Mapping) else ()
    seen = {id(generator) for generator in given}
    streams = []
    for unit in units:
        found: Iterable[tuple[str, object]] = ()
        if unit.kind is Kind.GENERATOR:
            found = [("", unit.value)]
        elif rng is not False:
            found = _held_by(unit, side)
        for path, generator in found:
            if id(generator) not in seen:
                seen.add(id(generator))
                place = "/".join(filter(None, (unit.field, unit.name)))
                name = f"{HELD}{place}/{path}" if path else f"user/{place}"
                streams.append(_user_stream(name, generator))
    return streams


def held_streams(holder: object, prefix: str, side: Any) -> list[LiveRngStream]:
    """Return the generators in an object's attributes, each once, named by prefix and path.

    Args:
        holder: the object.
        prefix: first part of the names.
        side: the result of `torch_side`.
    """
    found: dict[int, LiveRngStream] = {}
    for path, generator in _generators_in(holder, prefix, 0, side):
        if id(generator) not in found:
            found[id(generator)] = _user_stream(path, generator)
    return list(found.values())


def _held_by(unit: Unit, side: Any) -> Iterator[tuple[str, object]]:
    """Yield the path and the generator of each generator in an object's attributes."""
    if unit.kind is Kind.MODULE:
        yield from side.generators_of(unit.value, functools.partial(is_generator, side=side))
        return
    if unit.kind is Kind.OPTIMIZER:
        attributes = list(attributes_of(unit.value).items())
        yield from ((name, part) for name, part in attributes if is_generator(part, side))
        return
    value = unit.value.loader if isinstance(unit.value, PassiveLoader) else unit.value
    # Classes of ckptfmt save and restore their own generators.
    if unit.kind is Kind.STATEFUL and type(value).__module__.partition(".")[0] != "ckptfmt":
        yield from _generators_in(value, "", 0, side)


def _generators_in(value: object, path: str, depth: int, side: Any) -> Iterator[tuple[str, object]]:
    for name, part in list(attributes_of(value).items()):
        if is_generator(part, side):
            yield f"{path}{name}", part
        elif (
            depth < _HELD_DEPTH
            and attributes_of(part)
            and not isinstance(part, type | ModuleType)
            and (side is None or not (side.is_module(part) or side.is_optimizer(part)))
        ):
            yield from _generators_in(part, f"{path}{name}.", depth + 1, side)


def capture_streams(
    streams: list[LiveRngStream], *, worker: int, sides: Sides | None = None
) -> list[RngStream]:
    """Return the current state of RNG streams. Each stream belongs to a single worker.

    Args:
        streams: the streams.
        worker: the number of the worker.
        sides: the modules for torch and JAX; None to look the modules up.
    """
    positions = [("rng", stream.name, stream.read()) for stream in streams]
    scope = worker_scope(worker)
    leaves = plain_leaves(positions, sides)
    return [
        RngStream(name=stream.name, scope=scope, kind=stream.kind, state=leaf.value)
        for stream, leaf in zip(streams, leaves, strict=True)
    ]


def digest_stream(stream: LiveRngStream) -> int:
    """Return a 32-bit digest of the position of an RNG stream."""
    return make_stream_digest(stream)()


def make_stream_digest(stream: LiveRngStream) -> Callable[[], int]:
    """Return a function that returns a 32-bit digest of an RNG stream's position.

    The function takes a few microseconds. The digest distinguishes two positions of a generator for
    a witness, and isn't part of the format. For a Mersenne twister the digest covers the position
    and a few of the 624 words: each draw changes the position, and all words change when the
    position wraps around. The second normal number that numpy's global stream keeps isn't covered.
    """
    if stream.kind == _PYTHON:
        return functools.partial(_digest_python, stream.read)
    if stream.name == "numpy" and stream.kind == _NUMPY_LEGACY:
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined] # numpy's stubs lack it
        if type(bits) is np.random.MT19937:
            address = bits.ctypes.state_address + _MT19937_NBYTES - _TAIL_NBYTES
            return functools.partial(
                _digest_numpy, bits, (ctypes.c_uint8 * _TAIL_NBYTES).from_address(address)
            )
    if stream.name == "torch.cpu":
        return functools.partial(_digest_torch, stream.read)
    return lambda: _digest_value(stream.read())


def _digest_python(read: Callable[[], Any]) -> int:
    _, words, gauss = read()
    return hash((words[-_WORDS:], gauss or 0.0)) & 0xFFFFFFFF


def _digest_numpy(known: object, tail: Any) -> int:
    if np.random.get_bit_generator() is known:  # type: ignore[attr-defined] # numpy's stubs lack it
        return zlib.crc32(tail)
    return _digest_value(np.random.get_state(legacy=False))  # noqa: NPY002


def _digest_torch(read: Callable[[], Any]) -> int:
    content = read()
    return zlib.crc32(content[-_TAIL_NBYTES:], zlib.crc32(content[:_TORCH_HEAD_NBYTES]))


def _digest_value(state: object) -> int:
    if isinstance(state, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(state).view(np.uint8).data)
    if isinstance(state, Mapping):
        content = [_digest_value(value) for _, value in sorted(state.items())]
        return zlib.crc32(repr(content).encode())
    return zlib.crc32(repr(state).encode())


def plan_streams(
    plan: LoadPlan, streams: list[LiveRngStream], *, strict: bool
) -> list[Callable[[], None]]:
    """Return the actions that restore the RNG streams.

    Streams that can't be restored become problems. Unless `strict` is set, three kinds of streams
    are only reported: streams of devices, because another machine has other devices; generators in
    attributes of objects; and all streams of a load by another number of workers, whose new workers
    keep their fresh streams. A single line reports all new or absent workers, and is equal on all
    workers.

    Problems: STREAM_MISSING, STREAM_UNEXPECTED.
    """
    left = [stream.name for stream in streams if plan.only.is_overridden("rng", stream.name)]
    plan.downgrades += [f"rng:{name} stays as it is here: override=" for name in left]
    streams = [stream for stream in streams if plan.only.fits("rng", stream.name)]
    saved_streams = {
        key: stream
        for key, stream in plan.checkpoint.streams.items()
        if plan.only.fits("rng", key[0])
    }
    if not saved_streams and (plan.is_imported or (plan.is_partial and not streams)):
        return []
    saved_count = plan.checkpoint.manifest.origin.writer_count
    elastic = saved_count != plan.worker_count
    is_reported = elastic and not strict
    if is_reported:
        plan.downgrades += _list_moved(saved_streams, streams, saved_count, plan.worker_count)

    report = functools.partial(_report, plan, is_elastic=is_reported, strict=strict)
    scope = worker_scope(plan.worker)
    # All workers use a stream of scope global, unless a worker has its own stream of that name.
    places = {name: at for wanted in (GLOBAL, scope) for name, at in saved_streams if at == wanted}
    is_new = is_reported and plan.worker >= saved_count
    devices = _match_devices(places, streams)
    if devices.code is not None and not is_new:
        names = ", ".join(devices.names)
        report(devices.code, names, scope, devices.detail, outcome=devices.outcome)
    actions: list[Callable[[], None]] = []
    for stream in streams:
        name = devices.saved_names.get(stream.name, stream.name)
        if name in places:
            state, difference, outcome = _find_state(plan, stream, (name, places[name]))
            if difference is None:
                actions.append(functools.partial(_put_back, plan, stream, state))
            else:
                report(Code.STREAM_MISSING, stream.name, scope, difference, outcome=outcome)
        elif not (is_new or is_of_device(name)):
            report(Code.STREAM_MISSING, stream.name, scope, "not saved")
    for name in places.keys() - {stream.name for stream in streams}:
        if not is_of_device(name):
            report(Code.STREAM_UNEXPECTED, name, scope, "no live RNG stream has this name")
    for name, at in saved_streams if not is_reported else ():
        if at != GLOBAL and _number(at) >= plan.worker_count:
            report(Code.STREAM_UNEXPECTED, name, at, "this load has no such worker")
    return actions


def _report(
    plan: LoadPlan,
    code: Code,
    name: str,
    scope: str,
    detail: str,
    *,
    outcome: str | None = None,
    is_elastic: bool,
    strict: bool,
) -> None:
    """Record a stream that can't be restored, as a problem of the plan or as a downgrade.

    Args:
        plan: the plan of the load.
        code: the error code.
        name: the name of the stream, or the names of several streams.
        scope: the scope of the stream.
        detail: the difference.
        outcome: for a difference between devices, the treatment of the stream.
        is_elastic: whether another number of workers is only reported.
        strict: whether to refuse differences between devices, and of generators in attributes.
    """
    where = f"rng:{name} ({scope})"
    # An attribute may hold another generator by now, or none, and older versions didn't save such
    # generators.
    is_mild = outcome is not None or name.startswith(HELD)
    if is_elastic or (is_mild and not strict):
        told = detail if outcome is None else f"{detail}: {outcome}"
        plan.downgrades.append(f"{code} at {where}: {told}")
    else:
        plan.problem(code, where, detail)


def _match_devices(saved: Iterable[str], streams: Iterable[LiveRngStream]) -> DeviceMatch:
    side = torch_side()
    return match_devices(
        filter(is_of_device, saved),
        {stream.name: str(stream.device) for stream in streams if is_of_device(stream.name)},
        None if side is None else side.current_device(),
    )


def _find_state(
    plan: LoadPlan, stream: LiveRngStream, place: tuple[str, str]
) -> tuple[object, str | None, str | None]:
    """Return the saved state for a stream; or the reason why the stream can't take the state.

    Args:
        plan: the plan of the load.
        stream: the live stream.
        place: name and scope of the saved stream.

    Returns: state, reason and outcome. Without a reason, the stream takes the state. An outcome is
        given if the stream's generator is on another type of device, and keeps its own state.
    """
    kind = plan.checkpoint.streams[place].kind
    if kind != stream.kind:
        return None, f"saved as {kind}, here {stream.kind}", None
    state = plain_values(plan.checkpoint.stream(*place)[1])
    saved = state.get("device") if isinstance(state, Mapping) else None
    if stream.device is None or saved is None or saved == stream.device.partition(":")[0]:
        return state, None, None
    return None, f"saved on {saved}, and the generator here is on {stream.device}", _OWN_STATE


def _put_back(plan: LoadPlan, stream: LiveRngStream, state: object) -> None:
    """Restore an RNG stream, unless the object's own load_state_dict has set the generator."""
    if stream.name not in plan.settled:
        stream.write(state)


@contextlib.contextmanager
def settling(plan: LoadPlan, unit: Unit) -> Iterator[None]:
    """Record the generators that an object sets while loading its state.

    An object may restore the position of a generator itself, for example the position at the begin
    of an epoch. The generator's saved position must not overwrite such a position. Before the load,
    each generator is moved to an arbitrary position. A generator at this position after the load
    wasn't set, and returns to the original position.
    """
    held = unit_streams([unit], None, torch_side())
    rows = [(stream, stream.read(), _mark(stream)) for stream in held]
    try:
        yield
    finally:
        for stream, before, mark in rows:
            if digest_stream(stream) == mark:
                stream.write(before)
            else:
                plan.settled.add(stream.name)


def _mark(stream: LiveRngStream) -> int:
    """Move a generator to an arbitrary position, and return the digest of that position."""
    state: Any = stream.read()
    if stream.kind == _PYTHON:
        state = random.Random(_NOWHERE).getstate()  # noqa: S311
    elif stream.kind == _NUMPY_LEGACY:
        state = np.random.RandomState(_NOWHERE).get_state(legacy=False)
    elif stream.kind.startswith("numpy."):
        state = getattr(np.random, stream.kind.removeprefix("numpy."))(_NOWHERE).state
    else:
        side: Any = torch_side()
        state = {**state, "state": side.seeded_state(state["device"], _NOWHERE)}
    stream.write(state)
    return digest_stream(stream)


def _list_moved(
    saved: Collection[tuple[str, str]],
    live: Iterable[LiveRngStream],
    saved_count: int,
    worker_count: int,
) -> list[str]:
    """Return sentences on the RNG streams of absent workers and of new workers.

    Args:
        saved: name and scope of each saved stream.
        live: the streams of this worker. All workers have streams of the same names.
        saved_count: the number of workers that saved.
        worker_count: the number of workers that load.
    """
    gone = {name for name, at in saved if at != GLOBAL and _number(at) >= worker_count}
    new = {stream.name for stream in live} - {name for name, at in saved if at == GLOBAL}
    said = []
    if gone:
        scopes = _scopes(worker_count, saved_count)
        detail = "streams of processes that this load doesn't have are left out"
        said.append(
            f"{Code.STREAM_UNEXPECTED} at rng ({scopes}): {detail}: {', '.join(sorted(gone))}"
        )
    if new and saved_count < worker_count:
        scopes = _scopes(saved_count, worker_count)
        detail = "no streams were saved for these processes, which go on with fresh ones"
        said.append(f"{Code.STREAM_MISSING} at rng ({scopes}): {detail}: {', '.join(sorted(new))}")
    return said


def _number(scope: str) -> int:
    return int(scope.removeprefix("lw/"))


def _scopes(first: int, end: int) -> str:
    """Return a text for the scopes of workers from `first` up to, but without, `end`."""
    return (
        worker_scope(first)
        if end - first == 1
        else f"{worker_scope(first)} to {worker_scope(end - 1)}"
    )


def _user_stream(name: str, generator: object) -> LiveRngStream:
    if type(generator) is random.Random:
        return LiveRngStream(
            name=name, kind=_PYTHON, read=generator.getstate, write=generator.setstate
        )
    if isinstance(generator, np.random.RandomState):
        read = functools.partial(generator.get_state, legacy=False)
        return LiveRngStream(name=name, kind=_NUMPY_LEGACY, read=read, write=generator.set_state)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return LiveRngStream(
            name=name,
            kind=f"numpy.{type(bits).__name__}",
            read=lambda: bits.state,
            write=functools.partial(setattr, bits, "state"),
        )
    side = torch_side()
    if side is not None and side.is_generator(generator):
        return LiveRngStream(name=name, **side.generator_stream(generator))
    kind = f"{type(generator).__module__}.{type(generator).__qualname__}"
    raise err(
        Code.STATE_UNSUPPORTED,
        f"{kind} is no generator that can be saved",
        where=f"rng:{name}",
        remedy=(
            "Use random.Random, numpy.random.Generator or torch.Generator; a key of JAX is a"
            " value: State(extra=)."
        ),
    )

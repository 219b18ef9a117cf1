"""The adapter of the reference implementation. Only this module and `chaos_job` import ckptfmt.

The adapter is an example too: opening, loading and saving use ckptfmt's public functions.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import shutil
import struct
import sys
import tempfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from blake3 import blake3

import ckptfmt
from ckptfmt import Box, CkptError, PerWorker, Sampler, State
from ckptfmt.adapters.data_loaders import ConsumedSamples, ForeignLoader
from ckptfmt.adapters.load_plan import LoadPlan
from ckptfmt.data.cursor import parse_cursor
from ckptfmt.documents.index import Index
from ckptfmt.documents.manifest import parse_register
from ckptfmt.documents.msgpk import open_packed_document, parse_msgpack
from ckptfmt.documents.packed import Columns, parse_packed
from ckptfmt.documents.part import Part, parse_failure
from ckptfmt.documents.run import HomeRecord, LabelsRecord, Launch, Pins, RunRecord, Vote
from ckptfmt.documents.shard import parse_shard_header
from ckptfmt.documents.tree import (
    DeviceName,
    DtypeName,
    InlineArray,
    Size,
    TensorRef,
    dump_tree,
    iter_values,
    parse_tree,
)
from ckptfmt.documents.versions import EARLIER
from ckptfmt.dtypes import numpy_dtype
from ckptfmt.errors import Code
from ckptfmt.features import READER_FEATURES
from ckptfmt.limits import FORMAT_VERSION
from ckptfmt.loading.restore import plan_restore
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.failures import Decision
from ckptfmt.run.ledger import LedgerEntry
from ckptfmt.run.lineage import begin_launch, open_run
from ckptfmt.run.witness import WitnessRecord
from ckptfmt.saving.handle import STATES, SaveHandle
from ckptfmt.store.local import LocalStore
from ckptfmt_conformance.protocol import METHODS, Rejected, Unsupported, run_as_command

__all__ = [
    "FORMAT_VERSION",
    "Box",
    "Checkpoint",
    "Checkpointing",
    "CkptError",
    "Code",
    "Reference",
    "Run",
    "Save",
    "numpy_dtype",
    "original",
    "tagged",
]


class Reference:
    """The reference implementation.

    Attributes:
        replacements: replacements of the implementation's functions during a question, with their
            places ``module:name``. Empty here; broken adapters disable checks by replacements.
    """

    replacements: tuple[tuple[str, object], ...] = ()

    def describe(self) -> Mapping[str, Any]:
        """Return the adapter's description."""
        return {
            "name": "ckptfmt",
            "version": ckptfmt.__version__,
            "spec": [*EARLIER, FORMAT_VERSION],
            "roles": ["reader", "writer", "committer"],
            "features": sorted(
                {
                    *READER_FEATURES,
                    "launch",
                    "loader",
                    "samples",
                    "tickets",
                    *(f"parse-{form}" for form in _FORMS),
                }
            ),
            "kinds": [*METHODS, "trajectory"],
        }

    def open(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Open a checkpoint, check all metadata, and read every tensor.

        With ``verify``, check every byte. With ``launch``, return the checkpoint from which a run's
        next launch resumes.
        """
        asked = request or {}
        with self._broken_as_said():
            if asked.get("launch"):
                with _phase("open"):
                    return {"launch": self.launch(path)}
            with _phase("open"), self._open(path, asked) as checkpoint:
                _check_metadata(checkpoint)
                with _phase("read"):
                    tensors = {
                        _key_of(key): self.digests(checkpoint, key)
                        for key in checkpoint.tensors
                        if key not in checkpoint.frozen
                    }
                found = {"tensors": tensors, "step": checkpoint.step, "digest": checkpoint.digest}
            if asked.get("verify") == "all":
                self.validate(path, asked)
            return found

    def read(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the digest of a box."""
        return {"blake3": self.reshard(path, {**request, "boxes": [request["box"]]})["digests"][0]}

    def reshard(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the digests of boxes, in order."""
        with self._broken_as_said(), _phase("open"), self._open(path, request) as checkpoint:
            field, name, scope = _parse_key(request["tensor"])
            with _phase("read"):
                boxes = [_box_of(bounds) for bounds in request["boxes"]]
                return {
                    "digests": [
                        self.digest_of(checkpoint, field, name, scope, box) for box in boxes
                    ]
                }

    def write(
        self, path: Path | None, request: Mapping[str, Any], output: Path
    ) -> Mapping[str, Any]:
        """Save the requested state."""
        del path
        fields: dict[str, Any] = {}
        for key, tensor in request["tensors"].items():
            # The names of a tree's tensors are made from its keys. A slash in a name separates
            # nested mappings.
            *outer, last = [piece.replace("~1", "/").replace("~0", "~") for piece in key.split("/")]
            mapping = fields
            for piece in outer:
                mapping = mapping.setdefault(piece, {})
            mapping[last] = self.array_of(tensor["dtype"], tensor["shape"])
        with self._broken_as_said(), _phase("open"):
            state = ckptfmt.State(config=request.get("config"), **fields)
            report = ckptfmt.save(output, state, step=request["step"])
        return {"digest": report.digest}

    def context(self, path: Path, request: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return a tree as tagged JSON, the next samples, or another library's loader state.

        The samples are those of steps, or of tickets.
        """
        with self._broken_as_said(), _phase("open"):
            match request or {}:
                case {"samples": asked}:
                    return self.samples((path / "tree.msgpack").read_bytes(), asked)
                case {"tickets": asked}:
                    return self.tickets((path / "tree.msgpack").read_bytes(), asked)
                case {"loader": asked}:
                    with self._open(path, {}) as checkpoint:
                        return _loader(checkpoint, asked)
            return {"tree": self.tree_of((path / "tree.msgpack").read_bytes())}

    def parse(self, path: Path, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parse a document or value, and return the value."""
        form = request["form"]
        name = request["file"]
        if form not in _FORMS:
            raise Unsupported(f"parse-{form}")
        with self._broken_as_said(), _phase("open"):
            value = _FORMS[form]((path / name).read_bytes(), name)
        return {"value": value} if form in _VALUES else {}

    def checkpointing(self) -> Checkpointing:
        """Return the object by which trajectories save and load."""
        return Checkpointing()

    # Methods overridden by broken adapters.

    def digests(self, checkpoint: Checkpoint, key: tuple[str, str, str]) -> dict[str, Any]:
        """Return dtype, shape, digest and first bytes of a tensor."""
        tensor = checkpoint.tensors[key]
        content = self.content(checkpoint, key, Box.whole(tensor.global_shape))
        return {
            "dtype": tensor.dtype,
            "shape": list(tensor.global_shape),
            "blake3": blake3(content).hexdigest(),
            "first16": content[:16].hex(),
        }

    def digest_of(self, checkpoint: Checkpoint, field: str, name: str, scope: str, box: Box) -> str:
        """Return the digest of a box."""
        if checkpoint.find(field, name, scope) is None:
            raise Rejected("TENSOR_MISSING", name, "open")
        return blake3(self.content(checkpoint, (field, name, scope), box)).hexdigest()

    def content(self, checkpoint: Checkpoint, key: tuple[str, str, str], box: Box) -> bytes:
        """Return the bytes of a box, in C order."""
        tensor = checkpoint.find(*key)
        assert tensor is not None
        return b"".join(bytes(content) for _, content in checkpoint.iter_content(tensor, box))

    def tree_of(self, content: bytes) -> Any:
        """Return a tree as tagged JSON."""
        return tagged(parse_tree(content, where="tree.msgpack"))

    def samples(self, content: bytes, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Continue from a cursor as a worker, and return the samples of the next steps."""
        worker = asked["worker"], asked["worker_count"]
        sampler = Sampler.from_state_dict(parse_tree(content, where="tree.msgpack"), worker=worker)
        found: dict[str, Any] = {}
        if "fetched" in asked:
            for _ in itertools.islice(sampler, asked["fetched"]):
                pass
            sampler.advance(asked["done"])
            saved = sampler.state_dict()
            found = {"commit": saved["commit"], "ledger": saved["ledger"]}
            sampler = Sampler.from_state_dict(saved, worker=worker)
        name = sampler.state_dict()["sources"][0]["id"]
        steps = range(sampler.steps_done, sampler.steps_done + asked["steps"])
        return {"steps": [[*_rows(sampler, step, name)] for step in steps], **found}

    def tickets(self, content: bytes, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Continue a pipeline from a cursor, and return the next tickets of the only worker."""
        state = parse_tree(content, where="tree.msgpack")
        sampler = Sampler.from_state_dict(state, worker=(0, 1))
        found: dict[str, Any] = {}
        if "issued" in asked:
            tickets = {ticket.position: ticket for ticket in sampler.issue(asked["issued"])}
            for step in asked["steps"]:
                sampler.consume([tickets[position] for position in step["consume"]])
                sampler.discard([tickets[position] for position in step["discard"]])
                sampler.advance()
            saved = sampler.state_dict()
            found = {"pipeline": saved["pipeline"], "ledger": saved["ledger"]}
            sampler = Sampler.from_state_dict(saved, worker=(0, 1))
        rows = [
            [ticket.position, ticket.source, ticket.epoch, ticket.sample]
            for ticket in sampler.issue(asked["count"])
        ]
        return {"tickets": rows, **found}

    def launch(self, path: Path) -> dict[str, Any]:
        """Begin a launch on a copy of a run, and return the launch's resumed checkpoint."""
        passed_over: list[str] = []
        with tempfile.TemporaryDirectory() as folder:
            store = LocalStore(shutil.copytree(path, Path(folder, "run")), writable=True)
            begun, _ = begin_launch(
                store,
                open_run(store),
                on_passed_over=lambda text: passed_over.append(text.partition(" ")[0]),
            )
        name = None if begun.resume_from is None else begun.resume_from.name
        passed_over = [name for name in passed_over if not name.startswith("launches/")]
        return {"resume_from": name, "chosen_by": begun.chosen_by, "passed_over": passed_over}

    def validate(self, path: Path, request: Mapping[str, Any]) -> None:
        """Check every byte. Raises: the first violation."""
        with _phase("validate"):
            report = ckptfmt.validate(path, bases=_bases_of(path, request))
            if report.violations:
                raise report.violations[0]

    def array_of(self, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
        """Return an array whose byte i is i mod 251."""
        kind = numpy_dtype(dtype)
        nbytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        content = (np.arange(nbytes, dtype=np.int64) % 251).astype(np.uint8)
        return content.view(kind).reshape(shape)

    def _open(self, path: Path, request: Mapping[str, Any]) -> Checkpoint:
        return ckptfmt.open(path, digest=request.get("digest"), bases=_bases_of(path, request))

    @contextlib.contextmanager
    def _broken_as_said(self) -> Iterator[None]:
        """Apply the replacements for the duration of a question."""
        with contextlib.ExitStack() as stack:
            for place, replacement in self.replacements:
                module, _, name = place.partition(":")
                stack.enter_context(
                    mock.patch.object(_owner(module, name), name.rpartition(".")[2], replacement)
                )
            yield


class Checkpointing:
    """The saves and loads of trajectories: `ckptfmt.save` and `ckptfmt.load` of a `ckptfmt.State`.

    Attributes:
        phases: the phases of a save reported by a `ckptfmt.Checkpointer`, in order.
        refusals: the exceptions by which `ckptfmt.load` refuses.
    """

    phases = (*STATES, "DONE")
    refusals = (CkptError,)

    def save(self, path: str, state: Mapping[str, object], step: int) -> None:
        """Save a state as a separate checkpoint."""
        ckptfmt.save(path, _state_of(state), step=step)

    def load(self, path: str, state: Mapping[str, object]) -> None:
        """Load a checkpoint into live objects, in place."""
        ckptfmt.load(path, _state_of(state))

    def sampler(self, plan: Any, worker: tuple[int, int]) -> ckptfmt.Sampler:
        """Return the library's sampler."""
        common = {
            "global_batch": plan.batch,
            "seed": plan.seed,
            "worker": worker,
            "tail": plan.tail,
        }
        if plan.mixture:
            return ckptfmt.Sampler(plan.lengths, mixture=plan.mixture, **common)
        ((source, count),) = plan.sources
        return ckptfmt.Sampler(count, source=source, **common)

    def foreign_loader(self, loader: Any) -> ForeignLoader:
        """Return the loader in the library's wrapper."""
        return ForeignLoader(loader, lib="stand-in")

    def consumed_samples(self, holder: object, name: str) -> ConsumedSamples:
        """Return the count in the library's wrapper."""
        return ConsumedSamples(holder, names=(name,), lib="stand-in")

    def open_run(self, path: str, state: Mapping[str, object], *, delta: bool) -> Run:
        """Resume or begin a run with asynchronous saves."""
        return Run(path, state, delta={"mode": "smallest", "full_every": 2} if delta else "off")


class Run:
    """A run continued by a trajectory's trainer: a `ckptfmt.Checkpointer` with explicit steps.

    Attributes:
        step: the number of finished training steps in the resumed checkpoint.
    """

    def __init__(
        self,
        path: str,
        state: Mapping[str, object],
        *,
        delta: Any = "off",
        saver: Any = "process",
    ) -> None:
        self._checkpointer = ckptfmt.Checkpointer(
            path, _state_of(state), keep=2, saving=ckptfmt.Saving(saver=saver, delta=delta)
        )
        self._checkpointer.restore_rng()
        self.step = self._checkpointer.step

    def save(self, step: int) -> Save:
        """Start a save."""
        handle = self._checkpointer.save(step=step)
        assert handle is not None
        return Save(handle)

    def close(self) -> None:
        """Wait for all saves, and end the saver."""
        self._checkpointer.close()


class Save:
    """An asynchronous save."""

    def __init__(self, handle: SaveHandle) -> None:
        self._handle = handle

    def phase(self) -> str:
        """Return the reached phase. Raises: the save's error."""
        if self._handle.error is not None:
            raise self._handle.error
        state = self._handle.state
        return "DONE" if state == "COMMITTED" and self._handle.is_over else state


def _rows(sampler: Sampler, step: int, name: str) -> Iterator[list[Any]]:
    """Yield source, epoch, sample and weight of a worker's samples.

    Args:
        name: the name of a single source.
    """
    for taken, epoch, weight in zip(
        sampler.indices(step), sampler.epochs(step), sampler.weights(step), strict=True
    ):
        source, sample = taken if isinstance(taken, tuple) else (name, taken)
        yield [source, epoch, sample, weight]


def _loader(checkpoint: Checkpoint, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Load the field `data` into another library's loader, and return the loader's state."""
    saved = next(checkpoint.leaf(*key) for key in checkpoint.leaves if key[0] == "data")
    worker = asked["worker"]
    count = asked["worker_count"]
    loader = _Loader()
    counts = SimpleNamespace()
    data: Any = PerWorker(ForeignLoader(loader, lib=saved["lib"], worker_count=count))
    if saved["per"] == "run":
        vars(counts).update(dict.fromkeys(saved["state"]))
        data = ConsumedSamples(
            counts, names=tuple(saved["state"]), lib=saved["lib"], worker_count=count
        )
    # The case has no random numbers of the interpreter, which stay unchanged.
    allow = frozenset({"streams", *(["loader"] if asked["allow"] else [])})
    plan = LoadPlan(checkpoint, worker=worker, worker_count=count, allow=allow)
    restoration = plan_restore(State(data=data), plan)
    # With several workers, values left by this worker may belong to another worker.
    restoration.check(restoration.leftover() if count == 1 else frozenset())
    report = restoration.apply(restoration.plan_reading().run())
    return {
        "state": tagged(vars(counts) or loader.given),
        "reported": any(line.startswith("LOADER_NOT_ELASTIC ") for line in report.downgrades),
    }


class _Loader:
    """A stand-in for another library's loader, which keeps the received state.

    Attributes:
        given: the received state; None before.
    """

    given: object = None

    def __iter__(self) -> Iterator[object]:
        """Return an empty iterator, as there is no data."""
        return iter(())

    def state_dict(self) -> object:
        """Return the received state."""
        return self.given

    def load_state_dict(self, state: object) -> None:
        """Keep a state."""
        self.given = state


def _state_of(state: Mapping[str, Any]) -> ckptfmt.State:
    """Return a trajectory's state as a `ckptfmt.State`: fields by name, other values as extra."""
    own: dict[str, Any] = {name: _value_of(value) for name, value in state.items()}
    fields: dict[str, Any] = {
        name: own.pop(name)
        for name in ("weights", "optimizer", "data", "config", "rng")
        if name in own
    }
    return ckptfmt.State(**fields, extra=own or None)


def _value_of(value: object) -> object:
    """Return a value in ckptfmt's form: a value of each process is marked as `PerWorker`."""
    if type(value).__name__ == "PerRank":
        return ckptfmt.PerWorker(value.value)  # type: ignore[attr-defined]
    return value


def original(place: str) -> Any:
    """Return the implementation's object at ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(_owner(module, name), name.rpartition(".")[2])


def _owner(module: str, name: str) -> Any:
    """Return the owner of a name: a module, or a class for ``Class.method``."""
    owner: Any = importlib.import_module(module)
    for piece in name.split(".")[:-1]:
        owner = getattr(owner, piece)
    return owner


@contextlib.contextmanager
def _phase(name: str) -> Iterator[None]:
    """Raise a refusal where the implementation raises a CkptError."""
    try:
        yield
    except CkptError as error:
        if error.code == "STATE_UNSUPPORTED":
            raise Unsupported(error.detail) from error
        # Readers find a missing file of tensors in `read` at the latest. ckptfmt reports it at the
        # opening.
        raise Rejected(
            error.code, error.where, "read" if error.code == "FILES_IN_CACHES" else name
        ) from error


def _check_metadata(checkpoint: Checkpoint) -> None:
    """Check all metadata, before any byte of a tensor is read."""
    for reference in checkpoint.manifest.references:
        checkpoint.closure.open(reference)
    for number in range(len(checkpoint.index.parts)):
        checkpoint.open_part(number)
    for tensor in checkpoint.index.tensors:
        for box, part in tensor.sharding:
            checkpoint.stored_box(tensor, box, part)
    for field, name, scope in checkpoint.leaves:
        for value in iter_values(checkpoint.leaf(field, name, scope)):
            if isinstance(value, TensorRef) and checkpoint.find(field, value.name, scope) is None:
                raise Rejected("TREE_REFERENCE", value.name, "open")
    for name, scope in checkpoint.streams:
        if any(
            isinstance(value, TensorRef) for value in iter_values(checkpoint.stream(name, scope)[1])
        ):
            raise Rejected("TREE_REFERENCE", name, "open")


def _bases_of(path: Path, request: Mapping[str, Any]) -> list[Path]:
    return [path / base for base in request.get("bases", ())]


def _key_of(key: tuple[str, str, str]) -> str:
    field, name, scope = key
    return f"{field}/{name}" + ("" if scope == "global" else f"@{scope}")


def _parse_key(key: str) -> tuple[str, str, str]:
    field, _, name = key.partition("/")
    stem, at, scope = name.rpartition("@")
    return (field, stem, scope) if at and scope.startswith("lw/") else (field, name, "global")


def _box_of(bounds: list[list[int]]) -> Box:
    return Box(tuple(begin for begin, _ in bounds), tuple(end - begin for begin, end in bounds))


def tagged(value: object) -> Any:
    """Return a value as tagged JSON."""
    if value is None or isinstance(value, bool | str):
        return value
    maker = _TAGGED.get(type(value))
    assert maker is not None, f"{type(value).__name__} is no value of a tree"
    return maker(value)


def _int(value: int) -> int | dict[str, str]:
    return value if abs(value) < 1 << 53 else {"int": str(value)}


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _pairs(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: [[tagged(key), tagged(item)] for key, item in value.items()]}


def _items(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: [tagged(item) for item in value]}


def _members(name: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function for a set, with members sorted by their bytes, as in a checkpoint."""
    return lambda value: {
        name: [tagged(item) for item in sorted(value, key=lambda item: dump_tree(item, where=""))]
    }


def _array(value: InlineArray) -> dict[str, Any]:
    if value.scalar:
        return {"scalar": value.content.hex(), "dtype": value.dtype}
    return {"array": value.content.hex(), "dtype": value.dtype, "shape": list(value.shape)}


_TAGGED: dict[type, Callable[[Any], Any]] = {
    int: _int,
    bytes: lambda value: {"bytes": value.hex()},
    float: lambda value: {"float": _bits(value)},
    complex: lambda value: {"complex": [_bits(value.real), _bits(value.imag)]},
    list: _items("list"),
    tuple: _items("tuple"),
    set: _members("set"),
    frozenset: _members("frozenset"),
    dict: _pairs("dict"),
    OrderedDict: _pairs("ordered_dict"),
    Counter: _pairs("counter"),
    deque: lambda value: {"deque": [tagged(item) for item in value], "maxlen": value.maxlen},
    InlineArray: _array,
    TensorRef: lambda value: {"tensor": value.name, "kind": value.kind},
    DtypeName: lambda value: {"dtype": value.name},
    DeviceName: lambda value: {"device": value.name},
    Size: lambda value: {"size": list(value.shape)},
}


def _unpack(content: bytes, where: str) -> Any:
    return parse_msgpack(content, where=where, limit_items=99)


def _strings(content: bytes, where: str) -> list[str]:
    found: list[str] = (
        Columns({"column": _unpack(content, where)}, ("column",), where).strings("column").tolist()
    )
    return found


#: The parser of each form of single document or value, given its bytes and its file's name.
_FORMS: dict[str, Callable[[bytes, str], Any]] = {
    "run": lambda content, where: RunRecord.parse(content, where=where),
    "launch": lambda content, where: Launch.parse(content, where=where),
    "labels": lambda content, where: LabelsRecord.parse(content, where=where),
    "ledger": lambda content, where: LedgerEntry.parse(content, where=where),
    "witness": lambda content, where: WitnessRecord.parse(content, where=where),
    "healing": lambda content, where: Decision.parse(content, where=where),
    "vote": lambda content, where: Vote.parse(content, where=where),
    "home": lambda content, where: HomeRecord.parse(content, where=where),
    "pins": lambda content, where: Pins.parse(content, where=where),
    "failure": lambda content, where: parse_failure(content, where=where),
    **dict.fromkeys(
        ("manifest", "abort", "tombstone"),
        lambda content, where: parse_register(content, where=where),
    ),
    "index": lambda content, where: Index.parse(content, where=where),
    "part": lambda content, where: Part.parse(content, where=where),
    "shard": lambda content, where: parse_shard_header(
        content, file_nbytes=len(content), where=where
    ),
    "cursor": lambda content, where: parse_cursor(parse_tree(content, where=where)),
    "tree": lambda content, where: tagged(parse_tree(content, where=where)),
    "msgpack": lambda content, where: tagged(_unpack(content, where)),
    "packed": lambda content, where: tagged(parse_packed(_unpack(content, where), where).tolist()),
    "strings": lambda content, where: tagged(_strings(content, where)),
    "packed_document": lambda content, where: open_packed_document(content, where=where),
}
#: The forms with a value in the answer.
_VALUES = ("tree", "msgpack", "packed", "strings")


if __name__ == "__main__":
    sys.exit(run_as_command(Reference(), sys.argv[1:]))

"""What the tests of overlap share: copies that come as late as they may, and what a save should contain."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Final, Self

import pytest
import torch

from ckptfmt.adapters.capture import capture
from ckptfmt.adapters.torch.guard import Guard
from ckptfmt.box import Box
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.documents.tree import dump_tree
from ckptfmt.errors import CkptError
from ckptfmt.read.reader import Checkpoint
from ckptfmt.saving.background import Background
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.state import State
from ckptfmt.store import open_store
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import Store
from ckptfmt.write.staging import HostCopy

#: By kind, field, name, scope and box: the bytes of a tensor, the dumped tree of a leaf or stream.
Contents = dict[tuple[Any, ...], bytes]
#: After how many seconds a copy that nobody waits for is done all the same.
PATIENCE_S: Final = 60.0


def live_contents(state: State, *, worker: int = 0, worker_count: int = 1) -> Contents:
    """Return what is live here now, copied: the bytes of tensors and arrays, piece by piece, and all values."""
    snapshot: Any = capture(state, worker=worker, worker_count=worker_count)
    found: Contents = {}
    for source in snapshot.tensors:
        local = source.local if hasattr(source, "local") else torch.from_numpy(source.array)
        places = (
            [piece.local_box for piece in source.pieces]
            if hasattr(source, "pieces")
            else source.boxes
        )
        for box, place in zip(source.boxes, places, strict=True):
            held = local[place.relative_to(Box.whole(tuple(local.shape)))]
            found["tensor", source.field, source.name, source.scope, box] = bytes_of(held)
    for leaf in snapshot.leaves:
        found["leaf", leaf.field, leaf.name, leaf.scope] = leaf.value
    for stream in snapshot.streams:
        found["stream", "rng", stream.name, stream.scope] = stream.state
    return {key: value for key, value in found.items() if key[1] not in ("provenance", "topology")}


def bytes_of(tensor: torch.Tensor) -> bytes:
    content = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return content.view(torch.uint8).numpy().tobytes()


def differences(store: Store, wanted: Contents) -> list[str]:
    """Return the names of what a checkpoint doesn't contain as it should."""
    checkpoint = Checkpoint(store)

    def read(kind: str, *key: Any) -> bytes:
        if kind == "tensor":
            return checkpoint.read(*key).tobytes()
        value = checkpoint.leaf(*key) if kind == "leaf" else checkpoint.stream(*key[1:])[1]
        return dump_tree(value, where="")

    return sorted(f"{key[1]}:{key[2]}" for key, value in wanted.items() if read(*key) != value)


class Late:
    """Makes the copies beside the training come as late as they may: when somebody waits for them.

    So a step that doesn't wait changes what wasn't copied yet: for sure, however fast or slow the
    machine is.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gates: dict[SaveHandle, threading.Event] = {}
        self._gate_of: dict[int, threading.Event] = {}
        self._is_on = True
        finish, save = HostCopy.finish, Background.save
        wait_copied, wait_free = SaveHandle.wait_copied, Background.wait_free

        def save_late(
            background: Background,
            state: Any,
            request: Any,
            handle: SaveHandle,
            plan: Any,
            **options: Any,
        ) -> None:
            def plan_late(*lent: Any) -> Any:
                now, later = plan(*lent)
                gate = self._gates[handle] = threading.Event()
                self._gate_of = {**self._gate_of, **{id(copy.inner): gate for copy in later}}
                if not self._is_on:
                    gate.set()
                return now, later

            save(background, state, request, handle, plan_late, **options)

        def finish_late(copy: HostCopy) -> None:
            gate = self._gate_of.get(id(copy))
            if gate is not None:
                gate.wait(PATIENCE_S)
            finish(copy)

        def wait_for_copies(handle: SaveHandle, timeout_s: float | None = None) -> None:
            if handle in self._gates:
                self._gates[handle].set()
            wait_copied(handle, timeout_s)

        def wait_for_slot(background: Background, timeout_s: float) -> CkptError | None:
            if background.is_busy():
                self.release()
            return wait_free(background, timeout_s)

        monkeypatch.setattr(Background, "save", save_late)
        monkeypatch.setattr(HostCopy, "finish", finish_late)
        monkeypatch.setattr(SaveHandle, "wait_copied", wait_for_copies)
        monkeypatch.setattr(Background, "wait_free", wait_for_slot)

    def release(self) -> None:
        """Let the copies of all saves until now go on."""
        for gate in list(self._gates.values()):
            gate.set()

    def end(self) -> None:
        """Let all copies go on, from now on."""
        self._is_on = False
        self.release()


class Spy:
    """Notes which tensors were copied beside the training, for each save."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.overlapped: list[set[str]] = []
        hold = Guard.hold

        def note(guard: Guard, copies: Any, *args: Any, **kwargs: Any) -> Any:
            self.overlapped.append({f"{key[0]}:{key[1]}" for copy in copies for key in copy.keys})
            return hold(guard, copies, *args, **kwargs)

        monkeypatch.setattr(Guard, "hold", note)


class Trainer:
    """Saves as it is told to, and knows what each save should contain."""

    def __init__(
        self,
        state: State,
        late: Late,
        *,
        path: Any = None,
        writer: tuple[int, int] = (0, 1),
        **options: Any,
    ) -> None:
        self.state = state
        self._writer = writer
        self._store = MemoryStore() if path is None else open_store(path, writable=True)
        options.setdefault("saver", "thread" if path is None else "process")
        self.checkpointer = Checkpointer(self._store, state, **options)
        self.saves: list[tuple[SaveHandle, Contents]] = []
        self._late = late

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._late.end()
        # What failed, the handles say.
        with contextlib.suppress(CkptError):
            self.checkpointer.close()

    def save(self) -> SaveHandle:
        """Ask for a save, and note what was live right then."""
        wanted = live_contents(self.state, worker=self._writer[0], worker_count=self._writer[1])
        handle = self.checkpointer.save(step=self.checkpointer.step + 1)
        assert handle is not None
        self.saves.append((handle, wanted))
        return handle

    def torn(self) -> dict[int, list[str]]:
        """Return by step what saves contain that was not live when they were asked for."""
        found = {}
        for handle, wanted in self.saves:
            handle.wait(timeout_s=PATIENCE_S)
            names = differences(self._store.at(checkpoint_name(handle.step, 1)), wanted)
            if names:
                found[handle.step] = names
        return found

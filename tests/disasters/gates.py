"""A store that holds back the files of a save until a test lets the files through."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckptfmt.store.protocol import Store
from tests.stores.hooked import HookedStore, Operation

#: The longest wait for a save, in seconds.
WAIT_S = 60.0


class GatedStore(HookedStore):
    """A store whose shards are created only while the gate is open."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()

    def before(self, operation: Operation) -> None:
        """Hold back a shard while the gate is closed."""
        if operation.op == "create" and operation.path.endswith(".safetensors"):
            self.arrived.set()
            assert self.gate.wait(WAIT_S), "the gate stayed closed"

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close the gate for the time of the block."""
        self.arrived.clear()
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

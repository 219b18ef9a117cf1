"""What was parsed before: a saver meets the same registers and the same tables of tensors at every save.

A file is read anew each time, since what it holds is what counts. Only what these very bytes mean isn't found out
again: of a register that takes a millisecond, and a chain of thirty deltas asks for it a hundred and fifty times.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptfmt.documents.manifest import Abort, Manifest, Tombstone, parse_register

if TYPE_CHECKING:
    from ckptfmt.documents.tables import TensorTable

Register: TypeAlias = Manifest | Abort | Tombstone

#: Of how many registers it is remembered: a few times as many as a checkpoint may refer to.
_COUNT: Final = 256
#: With more tables than this all are forgotten: they are a few where writers hold shards, and one each else.
_TABLE_COUNT: Final = 16


class Known:
    """What one saver has parsed; used by one thread.

    Attributes:
        tables: the tables of tensors that parts had, for `Part.parse` to take from and to add to.
    """

    def __init__(self) -> None:
        self._registers: collections.OrderedDict[bytes, Register] = collections.OrderedDict()
        self.tables: dict[bytes, TensorTable] = {}

    def parse_register(self, content: bytes) -> Register:
        """Return what a decision register holds. Raises: as the function of that name, each time."""
        known = self._registers
        if content not in known:
            known[content] = parse_register(content)
            if len(known) > _COUNT:
                known.popitem(last=False)
        known.move_to_end(content)
        return known[content]

    def limit_tables(self) -> None:
        """Forget the tables if they are too many."""
        if len(self.tables) > _TABLE_COUNT:
            self.tables = {}

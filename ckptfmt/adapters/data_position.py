"""The check that a State's position in the data moves with the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from ckptfmt.adapters import torch_side
from ckptfmt.adapters.live import Kind, Unit
from ckptfmt.adapters.live_trees import source_digest
from ckptfmt.adapters.streamed_data import LOSSES
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.part import Leaf
from ckptfmt.dtypes import DTYPES
from ckptfmt.write.snapshot import TensorSource

#: Members of topology for doubts, each with the reason for a lower claim of the checkpoint.
UNREAD: Final = "unread_samplers"
STILL: Final = "still_data"
SHUFFLED: Final = "unsaved_shuffle"
DATA_DOUBTS: Final = {
    UNREAD: (
        "no batch was taken of a Sampler or DataLoader in State, neither by iterating nor by"
        " indices(): the training didn't follow its order"
    ),
    STILL: (
        "the position in the data was the same at an earlier step of the launch: it doesn't"
        " move with the training"
    ),
    SHUFFLED: (
        "the position in the data is plain values, and a DataLoader of the launch took its order"
        " from torch's random"
        " numbers (shuffle=True): a resume within an epoch sees other samples"
    ),
    **LOSSES,
}
#: The remedy for positions as plain values.
_REMEDY: Final = (
    "give an object with the position, State(data=ckptfmt.Sampler(...)) or a StatefulDataLoader, or"
    " keep the mapping in the"
    " State up to date as the training goes: state.data['position'] = position"
)
#: Largest size of compared tensors in the field `data`, in bytes.
_TENSORS_NBYTES: Final = 1 << 20


@dataclasses.dataclass(slots=True)
class DataPosition:
    """The evidence of a launch's saves about the field `data`, on this process.

    Attributes:
        doubts: names of the `DATA_DOUBTS` that apply to a save now.
        reports: one sentence for each doubt that two saves have shown. A save and the launch's
            start aren't enough.
    """

    doubts: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    #: Step and digest to compare with: values of the last save, or of the launch's start.
    _step: int = 0
    _digest: bytes = b""
    _is_of_save: bool = False
    #: Doubts that stay until the end of the launch, with their reports.
    _found: dict[str, str] = dataclasses.field(default_factory=dict)
    _has_looked_for_shuffle: bool = False

    def look(
        self,
        units: Sequence[Unit],
        leaves: Sequence[Leaf],
        tensors: Sequence[TensorSource],
        *,
        step: int,
        is_save: bool,
    ) -> tuple[str, ...]:
        """Compare the data of a save, or of the launch's start, with the data before.

        Args:
            units: objects of the State.
            leaves, tensors: leaves and tensors of all fields, from this process.
            step: number of training steps done.
            is_save: whether a save follows.

        Returns: `doubts`.
        """
        mine = [leaf for leaf in leaves if leaf.field == "data"]
        sources = [source for source in tensors if source.field == "data"]
        self.doubts = tuple(self._found)
        if not mine or sum(map(_nbytes, sources)) > _TENSORS_NBYTES:
            return self.doubts
        values = [leaf.name.encode() + leaf.value for leaf in mine] + [
            source_digest(source) for source in sources
        ]
        digest = digest_bytes(b"".join(digest_bytes(value) for value in values))
        if self._digest and is_save and step > self._step and digest == self._digest:
            if self._is_of_save:
                told = (
                    f"DATA_UNCHANGED: data is the same at the saves of steps {self._step} and"
                    f" {step}: it says nothing"
                    f" of where the training stands, and a resume claims no T1; {_REMEDY}"
                )
                self._found.setdefault(STILL, told)
            self.doubts = (*self.doubts, STILL)
        if is_save and not self._has_looked_for_shuffle:
            self._has_looked_for_shuffle = True
            side = torch_side()
            is_plain = all(unit.kind is Kind.TREE for unit in units if unit.field == "data")
            if side is not None and is_plain and side.has_shuffling_sampler():
                self._found[SHUFFLED] = f"DATA_SHUFFLED: {DATA_DOUBTS[SHUFFLED]}; {_REMEDY}"
        if is_save or not self._digest:
            self._step = step
            self._digest = digest
            self._is_of_save = is_save
        self.doubts = tuple(dict.fromkeys((*self.doubts, *self._found)))
        self.reports = tuple(self._found.values())
        return self.doubts


def _nbytes(source: TensorSource) -> int:
    return sum(box.element_count for box in source.boxes) * DTYPES[source.dtype].nbytes

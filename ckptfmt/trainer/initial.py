"""The beginning of a run without a checkpoint: another checkpoint, all of it or a part."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ckptfmt.adapters.load_plan import Allow, Patterns, Rename
from ckptfmt.group import Group
from ckptfmt.read.reader import Checkpoint
from ckptfmt.state import INIT_FROM, State
from ckptfmt.store.protocol import Store
from ckptfmt.trainer.restore import LoadReport, load_once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InitFrom:
    """The beginning of a run that has no checkpoint of its own yet: another checkpoint, such as an imported one.

    Attributes:
        path: directory of a checkpoint, or of a run, whose lineage then says which; or a store rooted there.
        only: names of what is taken, as for `ckptfmt.load`. By default the weights: optimizer, position in the data,
            RNG streams and the count of steps begin anew. None takes everything, and the run goes on from its step.
        rename, allow: as for `ckptfmt.load`.
        digest: the manifest digest that is expected, if one is.

    >>> InitFrom("imported", rename={"encoder": "backbone"})
    InitFrom(path='imported', only='weights:*', rename={'encoder': 'backbone'}, allow=(), digest=None)
    """

    path: str | os.PathLike[str] | Store = dataclasses.field(kw_only=False)
    only: Patterns = "weights:*"
    rename: Rename = None
    allow: Allow = ()
    digest: str | None = None

    @classmethod
    def of(cls, given: str | os.PathLike[str] | Store | InitFrom | None) -> InitFrom | None:
        """Return what a caller chose; a path alone is the weights of what is there."""
        return given if given is None or isinstance(given, InitFrom) else cls(given)

    @property
    def is_whole(self) -> bool:
        """Whether everything is taken, so that the run goes on from the step."""
        return self.only is None

    def load(self, state: State, checkpoint: Checkpoint, group: Group, **choices: Any) -> LoadReport:  # noqa: ANN401
        """Load the checkpoint at `path`, without RNG streams, on all processes, which call it.

        Args:
            checkpoint: the one at `path`, open.
            choices: other arguments of `load_once`.

        Returns: the report. The state then says what it began from.
        Raises: as `ckptfmt.load`.
        """
        report = load_once(
            state,
            checkpoint,
            group,
            allow=self.allow or (),
            only=self.only,
            rename=self.rename,
            strict=False,
            streams=False,
            **choices,
        )
        if not self.is_whole:
            report = report.with_streams()  # none are to come
        state.init_from = {
            "path": checkpoint.store.name,
            "step": checkpoint.step,
            "digest": checkpoint.digest,
            "only": [self.only] if isinstance(self.only, str) else None if self.only is None else [*self.only],
        }
        return report


def carry_init(checkpoint: Checkpoint, state: State, group: Group) -> None:
    """Have a state say what its run began from, as a checkpoint of the run says it: of process 0, which records it."""
    if group.writer == 0:
        recorded = checkpoint.provenance.get(INIT_FROM)
        state.init_from = recorded if isinstance(recorded, dict) else None

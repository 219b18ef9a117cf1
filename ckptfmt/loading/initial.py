"""The first state of a run without a checkpoint: another checkpoint, all of it or a part."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ckptfmt.adapters.load_plan import Allow, Patterns, Rename
from ckptfmt.group import Group
from ckptfmt.loading.load_report import LoadReport
from ckptfmt.loading.restore import load_once
from ckptfmt.read.reader import Checkpoint
from ckptfmt.signing.trust import Trust
from ckptfmt.state import INIT_FROM, State
from ckptfmt.store.protocol import Store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InitFrom:
    """The source of a run's first state: another checkpoint, such as an imported checkpoint.

    Attributes:
        path: directory of a checkpoint, or of a run, whose lineage then chooses the checkpoint; or
            a store rooted there.
        only: patterns of the names to load, as for `ckptfmt.load`. By default the weights are
            loaded; optimizer, position in the data, RNG streams and count of steps begin anew. None
            loads everything, and the run continues from the checkpoint's step.
        rename, allow: see `ckptfmt.load`.
        digest: expected manifest digest; None for any.
        require_signature: see `ckptfmt.open`.

    >>> InitFrom("imported", rename={"encoder": "backbone"})
    InitFrom(path='imported', only='weights:*', rename={'encoder': 'backbone'}, allow=(),
    digest=None, require_signature=None)
    """

    path: str | os.PathLike[str] | Store = dataclasses.field(kw_only=False)
    only: Patterns = "weights:*"
    rename: Rename = None
    allow: Allow = ()
    digest: str | None = None
    require_signature: Trust | str | os.PathLike[str] | None = None

    @classmethod
    def of(cls, given: str | os.PathLike[str] | Store | InitFrom | None) -> InitFrom | None:
        """Return a caller's choice as an object. A path means the weights of that checkpoint."""
        return given if given is None or isinstance(given, InitFrom) else cls(given)

    @property
    def is_whole(self) -> bool:
        """Whether everything is loaded, so that the run continues from the checkpoint's step."""
        return self.only is None

    def load(
        self, state: State, checkpoint: Checkpoint, group: Group, **choices: Any
    ) -> LoadReport:
        """Load the checkpoint at `path`, without RNG streams; every process calls this.

        Args:
            checkpoint: open checkpoint of `path`.
            choices: other arguments of `load_once`.

        Returns: the report. `state.init_from` then names the checkpoint.
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
            report = report.with_streams()  # a partial load puts no RNG streams back
        state.init_from = {
            "path": checkpoint.store.name,
            "step": checkpoint.step,
            "digest": checkpoint.digest,
            "only": [self.only]
            if isinstance(self.only, str)
            else None
            if self.only is None
            else [*self.only],
        }
        return report


def carry_init(checkpoint: Checkpoint, state: State, group: Group) -> None:
    """Copy the record of a run's source from a checkpoint into the state, on process 0.

    Process 0 writes the record into later checkpoints.
    """
    if group.writer == 0:
        recorded = checkpoint.provenance.get(INIT_FROM)
        state.init_from = recorded if isinstance(recorded, dict) else None

"""Checkpoints outside of a run: what may take the place of what. Spec: REQ-CMT-042."""

from __future__ import annotations

from ckptfmt.commit.decision import is_of_attempt, read_register
from ckptfmt.documents.manifest import Manifest
from ckptfmt.errors import Code, err
from ckptfmt.store.protocol import Store

#: Where writers meet that know each other by a token: `ckptfmt.group.EXCHANGE`.
_MET = "exchange/"


def check_replaceable(store: Store) -> None:
    """Raise unless a directory is empty, or has a checkpoint that belongs to no run, or what is left of one.

    Raises: CommitError(CHECKPOINT_EXISTS); what is wrong with the register. Spec: REQ-CMT-042.
    """
    register = read_register(store)
    problem = ""
    if register is None:
        foreign = [path for path in store.list("") if not is_of_attempt(path) and not path.startswith(_MET)]
        if foreign:
            problem = f"the directory holds no checkpoint, and other files, such as {foreign[0]!r}"
            remedy = "Save to a directory of its own; or without replace=, which leaves other files alone."
    else:
        run_id = register.origin.run_id if isinstance(register, Manifest) else register.run_id
        if run_id is not None:
            problem = f"the checkpoint belongs to the run {run_id}"
            remedy = "Save to a directory of its own, or through a Checkpointer."
    if problem:
        raise err(Code.CHECKPOINT_EXISTS, problem, where=store.name, requirement="REQ-CMT-042", remedy=remedy)

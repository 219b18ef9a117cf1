"""Checkpoints outside of a run: what may take the place of what, and how one is removed.

Spec: REQ-CMT-042, REQ-CMT-045.
"""

from __future__ import annotations

import os
from typing import Final

from ckptfmt.commit.decision import Register, check_vacant, create_once, is_of_attempt, read_register
from ckptfmt.commit.waiting import wait_for_attempts
from ckptfmt.documents.manifest import MANIFEST_NAME, Abort, Manifest, Tombstone, parse_checkpoint_name
from ckptfmt.documents.run import LAUNCHES, RUN_NAME
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.store import LocalStore, is_url, split_path
from ckptfmt.store.protocol import Store
from ckptfmt.store.symlinks import detach_link

#: Where writers meet that know each other by a token: `ckptfmt.group.EXCHANGE`.
_MET: Final = "exchange/"


def _check_replaceable(store: Store) -> None:
    """Raise if a directory has the checkpoint of a run.

    Raises: CommitError(CHECKPOINT_EXISTS); what is wrong with the register. Spec: REQ-CMT-042.
    """
    register = read_register(store)
    if register is not None and (run_id := _run_of(register)) is not None:
        problem = f"the checkpoint belongs to the run {run_id}"
        remedy = "Save to a directory of its own, or through a Checkpointer."
        raise err(Code.CHECKPOINT_EXISTS, problem, where=store.name, requirement="REQ-CMT-042", remedy=remedy)


def is_run(store: Store) -> bool:
    """Tell whether a store is rooted at a run."""
    return not {RUN_NAME, f"{LAUNCHES}/"}.isdisjoint(store.list_names(""))


def refuse_checkpoint(store: Store) -> CkptError:
    """Return the error where a run is to be, and a checkpoint is. Spec: REQ-RUN-016."""
    detail, remedy = "a checkpoint is here, and no run", "Give the run a directory of its own."
    parent, name = split_path(store.name)
    if parse_checkpoint_name(name) is not None:
        detail = f"this is a checkpoint of the run {parent}"
        remedy = f"Give the run's directory; resume={name!r} goes back to this checkpoint."
    return err(Code.CHECKPOINT_EXISTS, detail, where=store.name, requirement="REQ-RUN-016", remedy=remedy)


def check_no_run(store: Store, *, replace: bool = False) -> None:
    """Raise where a lone checkpoint can't be saved.

    Args:
        replace: whether it may take the place of another one.

    Raises: CommitError(CHECKPOINT_EXISTS). Spec: REQ-RUN-016, REQ-CMT-042.
    """
    if is_run(store):
        raise err(
            Code.CHECKPOINT_EXISTS,
            "this directory is that of a run",
            where=store.name,
            requirement="REQ-RUN-016",
            remedy="Save to a directory of its own, or through a Checkpointer.",
        )
    _check_replaceable(store) if replace else check_vacant(store)


def own_place(path: str | os.PathLike[str] | Store) -> None:
    """Make a path that is a symbolic link to a checkpoint, which is to be replaced, a checkpoint by itself.

    What the link leads to is another checkpoint, and stays as it is. A link to a directory of other files stays too.

    Raises: as `check_no_run`; StoreError(STORE_UNSUPPORTED).
    """
    if isinstance(path, str | os.PathLike) and not is_url(path):
        if os.path.islink(path):  # noqa: PTH114 - a path needn't be text
            leads_to = LocalStore(path, writable=False)
            check_no_run(leads_to, replace=True)
            found = [] if read_register(leads_to) else leads_to.list("")
            if found and not any(map(_is_ours, found)):
                return
        detach_link(path)


def check_removable(store: Store, *, is_in_run: bool) -> None:
    """Raise unless there is something of a checkpoint that belongs to no run.

    Args:
        is_in_run: whether the directory is that of a run.

    Raises: IntegrityError(NOT_COMMITTED); StateError(ARGUMENT); what is wrong with the register. Spec: REQ-CMT-045.
    """
    register = read_register(store)
    if is_in_run or (register is not None and _run_of(register) is not None):
        what = "this directory is that of a run" if is_in_run else "the checkpoint belongs to a run"
        remedy = "Call ckptfmt.Run(path).delete(checkpoint), or `ckptfmt rm`."
        raise err(Code.ARGUMENT, what, where=store.name, requirement="REQ-CMT-045", remedy=remedy)
    if register is None and not any(map(is_of_attempt, store.list(""))):
        remedy = "Give the directory of a checkpoint."
        raise err(Code.NOT_COMMITTED, "no checkpoint is here", where=store.name, remedy=remedy)


def remove_alone(store: Store, *, deadline_s: float) -> None:
    """Remove what a directory has of checkpoints outside of a run, once nobody saves there any more.

    The register says first that there is none any more, and goes last. Again, if a crash came between. Where holds are
    leases, it stays: a save that was stopped for longer than its lease would find the name free, and its files gone.

    Args:
        deadline_s: how long to wait for savers, in seconds.

    Raises: as `check_removable`; CommitError(SAVE_PENDING); StoreError. Spec: REQ-CMT-045, REQ-STO-011.
    """
    wait_for_attempts(store, deadline_s=deadline_s)
    check_removable(store, is_in_run=False)
    _end(store)
    store.sync("")
    for path in store.list(""):
        if path != MANIFEST_NAME and _is_ours(path):
            store.delete(path)
    for prefix in ("", "parts"):
        store.delete_leftovers(prefix)
    store.remove_directory("parts")
    store.sync("")
    if not store.holds_expire:
        store.delete(MANIFEST_NAME)
        store.sync("")


def _end(store: Store) -> None:
    """Put a tombstone in the place of a manifest, or an abort record where nothing was decided."""
    register = read_register(store)
    if register is None:
        record = Abort(run_id=None, launch=None, step=0, reason="removed")
        try:
            create_once(store, MANIFEST_NAME, content=record.dump())
        except CkptError as error:
            if error.code != Code.COMMIT_CONFLICT:
                raise
            register = read_register(store)  # a save without a hold was faster
    if isinstance(register, Manifest):
        origin = register.origin
        tombstone = Tombstone(run_id=None, launch=None, step=origin.step, manifest_digest=register.digest)
        store.replace(MANIFEST_NAME, tombstone.dump())


def _is_ours(path: str) -> bool:
    """Tell whether a path is that of a file of an attempt, or of an exchange among writers."""
    return is_of_attempt(path) or path.startswith(_MET)


def _run_of(register: Register) -> str | None:
    return register.origin.run_id if isinstance(register, Manifest) else register.run_id

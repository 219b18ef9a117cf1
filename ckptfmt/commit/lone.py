"""Checkpoints outside of a run: the rules for replacing and removing them.

Spec: REQ-CMT-042, REQ-CMT-045.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from ckptfmt.commit.decision import (
    Register,
    check_vacant,
    create_once,
    is_of_attempt,
    read_register,
)
from ckptfmt.commit.waiting import wait_for_attempts
from ckptfmt.documents.manifest import (
    MANIFEST_NAME,
    Abort,
    Manifest,
    Tombstone,
    parse_checkpoint_name,
)
from ckptfmt.documents.run import HOME_NAME, LABELS_FOLDER, LAUNCHES, RUN_NAME, SAVERS, VOTES
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.store import (
    LocalStore,
    address_of,
    is_url,
    local_path,
    open_address,
    open_store,
    split_path,
)
from ckptfmt.store.protocol import Store
from ckptfmt.store.symlinks import detach_link, is_link

#: Directory in which writers that share a token exchange messages: `ckptfmt.group.EXCHANGE`.
_MET: Final = "exchange/"

#: The names in a run besides those of checkpoints (specification, page 20).
_OF_A_RUN: Final = frozenset(
    {
        *(RUN_NAME, HOME_NAME, LAUNCHES, LABELS_FOLDER, SAVERS, VOTES),
        *("ledger", "witness", "healing"),
    }
)
#: A checkpoint has one level of directories below its own; one more is looked at.
_LEVELS: Final = 3


def _check_replaceable(store: Store) -> None:
    """Raise if a directory has a checkpoint of a run.

    Raises: CommitError(CHECKPOINT_EXISTS); the errors of `read_register`. Spec: REQ-CMT-042.
    """
    register = read_register(store)
    if register is not None and (run_id := _run_of(register)) is not None:
        problem = f"the checkpoint belongs to the run {run_id}"
        remedy = "Save to a separate directory, or through a Checkpointer."
        raise err(
            Code.CHECKPOINT_EXISTS,
            problem,
            where=store.name,
            requirement="REQ-CMT-042",
            remedy=remedy,
        )


def is_run(store: Store) -> bool:
    """Return whether a store is rooted at a run."""
    return not {RUN_NAME, f"{LAUNCHES}/"}.isdisjoint(store.list_names(""))


def refuse_checkpoint(store: Store) -> CkptError:
    """Return the error for a run's path at which a checkpoint is found. Spec: REQ-RUN-016."""
    detail = "a checkpoint is here, and no run"
    remedy = "Give the run a directory of its own."
    parent, name = split_path(store.name)
    if parse_checkpoint_name(name) is not None:
        detail = f"this is a checkpoint of the run {parent}"
        remedy = f"Give the run's directory; resume={name!r} goes back to this checkpoint."
    return err(
        Code.CHECKPOINT_EXISTS, detail, where=store.name, requirement="REQ-RUN-016", remedy=remedy
    )


def check_no_run(store: Store, *, replace: bool = False) -> None:
    """Raise if a checkpoint outside of a run can't be saved in a directory.

    Args:
        replace: whether the save may replace an existing checkpoint.

    Raises: CommitError(CHECKPOINT_EXISTS); StoreError. Spec: REQ-RUN-016, REQ-CMT-042.
    """
    check_outside(store)
    if is_run(store):
        raise err(
            Code.CHECKPOINT_EXISTS,
            "this directory belongs to a run",
            where=store.name,
            requirement="REQ-RUN-016",
            remedy="Save to a separate directory, or through a Checkpointer.",
        )
    _check_replaceable(store) if replace else check_vacant(store)


def check_outside(store: Store) -> None:
    """Raise if a directory is a run's own, such as a checkpoint's, or lies within.

    A clean-up of the run would delete a checkpoint there, or readers would count the checkpoint
    among the run's. Surrounding directories are looked at only for names used by runs, and only if
    the store's address is known.

    Raises: CommitError(CHECKPOINT_EXISTS); StoreError. Spec: REQ-RUN-016.
    """
    for path, name in _surroundings(store):
        is_used = name in _OF_A_RUN or parse_checkpoint_name(name) is not None
        if is_used and _is_known_run(store, path):
            raise err(
                Code.CHECKPOINT_EXISTS,
                f"this directory belongs to the run {path}",
                where=store.name,
                requirement="REQ-RUN-016",
                remedy="Save to a separate directory, or through a Checkpointer.",
            )


def check_before_opening(path: str | os.PathLike[str] | Store) -> None:
    """Raise if a local path is a run's own, before a store to write makes the directory.

    Raises: as `check_outside`.
    """
    if local_path(path) is not None:
        check_outside(open_store(path, writable=False))


def _surroundings(store: Store) -> Iterator[tuple[str, str]]:
    """Yield the paths around a store's root, innermost first, each with the name in it."""
    path = store.name
    for _ in range(_LEVELS):
        path, name = os.path.split(path)
        if is_url(store.name) and not is_url(path):
            return  # the name is the bucket's
        yield path, name


def _is_known_run(store: Store, path: str) -> bool:
    """Return whether a run is at a path around a store; False for a directory without access.

    Raises: StoreError.
    """
    address = address_of(store)
    if address is None:
        return False
    around = {**address, "url": path} if isinstance(address, dict) else os.fsencode(path)
    try:
        return is_run(open_address(around, writable=False))
    except CkptError as error:
        if error.code != Code.STORE_ACCESS:
            raise
        return False


def own_place(path: str | os.PathLike[str] | Store) -> None:
    """Replace a symbolic link to a checkpoint by a directory, before a save with `replace`.

    The checkpoint at the link's target stays as it is. A link to a directory with other files stays
    a link. A ``file://`` URL may name the link, too.

    Raises: the errors of `check_no_run`; StoreError(STORE_UNSUPPORTED, STORE_IO).
    """
    here = local_path(path)
    if here is not None:
        if is_link(here):
            leads_to = LocalStore(here, writable=False)
            check_no_run(leads_to, replace=True)
            found = [] if read_register(leads_to) else leads_to.list("")
            if found and not any(map(_is_ours, found)):
                return
        detach_link(here)


def check_removable(store: Store, *, is_in_run: bool) -> None:
    """Raise unless a directory has files of a checkpoint outside of a run.

    Args:
        is_in_run: whether the directory belongs to a run.

    Raises: IntegrityError(NOT_COMMITTED); StateError(ARGUMENT); the errors of `read_register`.
        Spec: REQ-CMT-045.
    """
    register = read_register(store)
    if is_in_run or (register is not None and _run_of(register) is not None):
        what = "this directory belongs to a run" if is_in_run else "the checkpoint belongs to a run"
        remedy = "Call ckptfmt.Run(path).delete(checkpoint), or `ckptfmt rm`."
        raise err(Code.ARGUMENT, what, where=store.name, requirement="REQ-CMT-045", remedy=remedy)
    if register is None and not any(map(is_of_attempt, store.list(""))):
        remedy = "Give the directory of a checkpoint."
        raise err(Code.NOT_COMMITTED, "no checkpoint is here", where=store.name, remedy=remedy)


def remove_alone(store: Store, *, deadline_s: float) -> None:
    """Wait for the savers of a checkpoint outside of a run, then remove the files of its attempts.

    A tombstone or an abort record comes first, and the register is deleted last, so that a call
    after a crash completes the removal. On a store with leases the register stays:
    otherwise a save that was suspended for longer than its lease would find the register's name
    free, and commit deleted files.

    Args:
        deadline_s: longest time to wait for savers, in seconds.

    Raises: the errors of `check_removable`; CommitError(SAVE_PENDING); StoreError. Spec:
        REQ-CMT-045, REQ-STO-011.
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
    """Replace a manifest by a tombstone, or create an abort record if the register is absent."""
    register = read_register(store)
    if register is None:
        record = Abort(run_id=None, launch=None, step=0, reason="removed")
        try:
            create_once(store, MANIFEST_NAME, content=record.dump())
        except CkptError as error:
            if error.code != Code.COMMIT_CONFLICT:
                raise
            register = read_register(store)  # a save without a hold has committed meanwhile
    if isinstance(register, Manifest):
        origin = register.origin
        tombstone = Tombstone(
            run_id=None, launch=None, step=origin.step, manifest_digest=register.digest
        )
        store.replace(MANIFEST_NAME, tombstone.dump())


def _is_ours(path: str) -> bool:
    """Return whether a path names a file of an attempt, or of a message exchange among writers."""
    return is_of_attempt(path) or path.startswith(_MET)


def _run_of(register: Register) -> str | None:
    return register.origin.run_id if isinstance(register, Manifest) else register.run_id

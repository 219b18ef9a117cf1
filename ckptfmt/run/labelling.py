"""Records about a committed checkpoint: pins, and metrics and tags instead of the manifest's.

Spec: REQ-RUN-023 to REQ-RUN-026, REQ-CMT-041.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Final

from ckptfmt import limits
from ckptfmt.commit.decision import CONDEMNED, create_once, read_register, refusal_of
from ckptfmt.commit.waiting import poll
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import Manifest
from ckptfmt.documents.run import (
    LABELS_FOLDER,
    LabelsRecord,
    RunRecord,
    labels_name,
    parse_labels_name,
)
from ckptfmt.errors import CkptError, Code, StoreError, err
from ckptfmt.features import LABELS
from ckptfmt.read.files import CheckpointFiles
from ckptfmt.read.in_caches import check_at_home
from ckptfmt.store.protocol import Store

_LOG: Final = logging.getLogger("ckptfmt")
#: Number of repetitions of a change whose record number was taken by another process.
_TRIES = 1000
#: Time to wait for a cleaner about to retire a checkpoint to be pinned, in seconds.
_CLEANER_S = 10.0


def list_newest_labels(store: Store) -> dict[str, int]:
    """Return the greatest record number of each checkpoint of a run with records.

    Spec: REQ-RUN-025.
    """
    found: dict[str, int] = {}
    for name in store.list_names(LABELS_FOLDER):
        parsed = parse_labels_name(name)
        if parsed is not None:
            found[parsed[0]] = max(parsed[1], found.get(parsed[0], 0))
    return found


def read_labels(
    store: Store, checkpoint: str, number: int, run_id: str | None
) -> LabelsRecord | CkptError:
    """Return a record of labels, or the error of an unreadable record, also without permission.

    Raises: StoreError, except STORE_ACCESS. Spec: REQ-RUN-023, REQ-RUN-026.
    """
    path = f"{LABELS_FOLDER}/{labels_name(checkpoint, number)}"
    # A network answer may be damaged, and the next record omits the contents of a record that can't
    # be read.
    for is_last in (False, True) if store.is_remote else (True,):
        try:
            record = LabelsRecord.parse(
                store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path
            )
            break
        except CkptError as error:
            if isinstance(error, StoreError) and error.code != Code.STORE_ACCESS:
                raise
            if is_last:
                return error
    if run_id is not None and record.run_id != run_id:
        return err(
            Code.RUN_MISMATCH,
            f"it belongs to run {record.run_id}",
            where=path,
            requirement="REQ-RUN-023",
        )
    return record


def change_labels(
    store: Store, run: RunRecord, checkpoint: str, change: Callable[[LabelsRecord], LabelsRecord]
) -> LabelsRecord:
    """Write a new record about a committed checkpoint, based on the newest record.

    Args:
        store: rooted at the run.
        change: returns the new record, given the current record; may be called again after a race
            with another process.

    Returns: the record now in force.
    Raises: IntegrityError(NOT_COMMITTED, CHECKPOINT_ABORTED, CHECKPOINT_RETIRED);
        FormatError(LIMIT_EXCEEDED) where the largest number is taken; CommitError(COMMIT_CONFLICT)
        where other processes were faster each time; StoreError.
    Spec: REQ-RUN-024, REQ-RUN-025.
    """
    manifest = _read_manifest(store, checkpoint)
    number = 0
    for _ in range(_TRIES):
        # A name that can't be created belongs to a record, even if a listing doesn't show the
        # record yet.
        number = max(number, list_newest_labels(store).get(checkpoint, 0))
        known = _read_newest(store, run, manifest, checkpoint, number)
        if number == limits.JSON_INTEGER:
            raise _refuse_number(known.path)
        made = dataclasses.replace(change(known), number=number + 1)
        content = made.dump()
        try:
            create_once(store, made.path, functools.partial(list, [content]), content=content)
        except CkptError as error:
            if error.code == Code.COMMIT_CONFLICT:
                number += 1
                # Another process took the number: the change is applied to that process's record.
                continue
            raise
        store.sync(LABELS_FOLDER)
        return made
    raise err(
        Code.COMMIT_CONFLICT,
        (
            f"other processes recorded labels of this checkpoint {_TRIES} times while this change"
            " was"
            " being made"
        ),
        where=f"{LABELS_FOLDER}/{labels_name(checkpoint, number)}",
        requirement="REQ-RUN-024",
        remedy="Find out which process writes these records, and repeat the change.",
    )


def _read_newest(
    store: Store, run: RunRecord, manifest: Manifest, checkpoint: str, number: int
) -> LabelsRecord:
    """Return a record; if unreadable, a pin with the labels of the last readable record before.

    Args:
        number: number of the record; 0 where there is no record.

    Raises: StoreError, except STORE_ACCESS. Spec: REQ-RUN-024, REQ-RUN-026.
    """
    older = {
        parsed[1]
        for parsed in map(parse_labels_name, store.list_names(LABELS_FOLDER))
        if parsed is not None and parsed[0] == checkpoint and parsed[1] < number
    }
    for candidate in (*([number] if number else []), *sorted(older, reverse=True)):
        record = read_labels(store, checkpoint, candidate, run.run_id)
        if isinstance(record, CkptError):
            path = f"{LABELS_FOLDER}/{labels_name(checkpoint, candidate)}"
            _LOG.warning(
                "the next record of labels goes without metrics and tags of %s: %s", path, record
            )
            continue
        # An unreadable record counts as a pin until the checkpoint is unpinned.
        return dataclasses.replace(
            record, number=number, pinned=record.pinned or candidate != number
        )
    pinned = number > 0
    return LabelsRecord(
        run_id=run.run_id,
        checkpoint=checkpoint,
        number=number,
        pinned=pinned,
        labels=manifest.labels,
    )


def pin_checkpoint(store: Store, run: RunRecord, checkpoint: str) -> LabelsRecord:
    """Pin a checkpoint: no cleaner retires a pinned checkpoint.

    Raises: as `change_labels`; StateError(ARGUMENT) for a run without the writer feature;
        IntegrityError(FILES_IN_CACHES) for a checkpoint with files in caches only;
        CommitError(CHECKPOINT_CONDEMNED) where a cleaner is about to retire the checkpoint, or died
        before the tombstone. Spec: REQ-CMT-041.
    """
    if LABELS not in run.writer_features:
        raise err(
            Code.ARGUMENT,
            "the run was begun by a version without pins, which may delete the checkpoint",
            where=store.name,
            requirement="REQ-CMT-041",
            remedy="Copy the checkpoint out of the run, or train on in a new run.",
        )
    if _read_manifest(store, checkpoint).durability != HOME:
        with CheckpointFiles(store.at(checkpoint)) as files:
            # Files in a node's cache may vanish with the node, in spite of the pin.
            check_at_home(files)
    made = change_labels(
        store, run, checkpoint, lambda known: dataclasses.replace(known, pinned=True)
    )
    wait_for_cleaners(store, checkpoint, requirement="REQ-CMT-041")
    return made


def wait_for_cleaners(store: Store, checkpoint: str, *, requirement: str) -> None:
    """Wait until a checkpoint is committed and safe from cleaners.

    Args:
        store: rooted at the run.
        requirement: number of the requirement, for errors.

    Raises: IntegrityError(NOT_COMMITTED, CHECKPOINT_ABORTED, CHECKPOINT_RETIRED);
        CommitError(CHECKPOINT_CONDEMNED) where a cleaner takes too long, or died before the
        tombstone; StoreError.
    Spec: REQ-CMT-041, REQ-RUN-013.
    """
    place = store.at(checkpoint)
    condemned: list[str] = []
    for _ in poll(_CLEANER_S):
        # In this order: a cleaner removes a condemnation after the tombstone, or after it has
        # found a reader.
        condemned = sorted(name for name in place.list_names("") if name.startswith(CONDEMNED))
        _read_manifest(store, checkpoint)
        if not condemned:
            return
    raise err(
        Code.CHECKPOINT_CONDEMNED,
        (
            f"{condemned[0]} is still there after {_CLEANER_S:g} s: a clean-up is slow, or was"
            " killed"
            " and left the file"
        ),
        where=place.name,
        requirement=requirement,
        remedy=(
            "If a clean-up runs, ask again when it has ended. If none does, delete the file,"
            " and ask again."
        ),
    )


def _refuse_number(path: str) -> CkptError:
    return err(
        Code.LIMIT_EXCEEDED,
        "this record has the largest number that a record can have; no record can follow",
        where=path,
        requirement="REQ-RUN-024",
        remedy="Delete this file: no version of ckptfmt wrote it.",
    )


def _read_manifest(store: Store, checkpoint: str) -> Manifest:
    """Return the manifest of a committed checkpoint.

    Raises: IntegrityError(NOT_COMMITTED, CHECKPOINT_ABORTED, CHECKPOINT_RETIRED); errors of a
        damaged register.
    """
    place = store.at(checkpoint)
    register = read_register(place)
    if register is None:
        remedy = "Wait for its save: the handle of a save has wait()."
        raise err(
            Code.NOT_COMMITTED,
            "it isn't committed",
            where=place.name,
            requirement="REQ-CMT-041",
            remedy=remedy,
        )
    if not isinstance(register, Manifest):
        raise refusal_of(register).below(checkpoint)
    return register

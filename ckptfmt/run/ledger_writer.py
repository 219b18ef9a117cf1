"""The ledger entry of a launch in its run: written after each commit and when the launch ends.

An error of an entry never fails a save: entries only record where time went. Spec: REQ-RUN-043.
"""

from __future__ import annotations

import contextlib
import dataclasses

from ckptfmt import limits
from ckptfmt.errors import CkptError, FormatError, IntegrityError
from ckptfmt.run.ledger import LedgerEntry, ledger_path
from ckptfmt.store.protocol import Store


def put_entry(store: Store, launch: int | None, content: bytes) -> None:
    """Write a launch's entry into the run at `store`, in place of an older one; ignore errors.

    A newer entry stays: the last saves may commit after the trainer has written its last
    entry. Empty content, or no launch, writes no entry.
    """
    if not content or launch is None:
        return
    path = ledger_path(launch)
    with contextlib.suppress(CkptError):
        with contextlib.suppress(FormatError, IntegrityError):  # no entry yet, or a damaged entry
            present = LedgerEntry.parse(
                store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path
            )
            if present.measured_unix_ms > LedgerEntry.parse(content, where=path).measured_unix_ms:
                return
        store.replace(path, content)


def end_entry(store: Store, launch: int, ended_unix_ms: int) -> None:
    """Write the end of a launch into its entry, unless the entry has an end; ignore errors."""
    path = ledger_path(launch)
    with contextlib.suppress(CkptError):
        entry = LedgerEntry.parse(store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path)
        if entry.ended_unix_ms is None:
            ended = dataclasses.replace(
                entry, ended_unix_ms=max(ended_unix_ms, entry.measured_unix_ms)
            )
            store.replace(path, ended.dump())

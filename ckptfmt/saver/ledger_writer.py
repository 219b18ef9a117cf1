"""The entry of a launch in the ledger of its run: written behind each commit, and once more at the launch's end.

Nothing that goes wrong with an entry is an error of a save: it says where time went, and no more. Spec: REQ-RUN-043.
"""

from __future__ import annotations

import contextlib
import dataclasses

from ckptfmt import limits
from ckptfmt.documents.ledger import LedgerEntry, ledger_path
from ckptfmt.errors import CkptError, FormatError, IntegrityError
from ckptfmt.store.protocol import Store


def put_entry(store: Store, launch: int | None, content: bytes) -> None:
    """Put the entry of a launch into the run at `store`, in the place of an earlier one; nothing if it is empty.

    A later one stays: a trainer that doesn't wait for its last saves has written its last entry before they commit.
    """
    if not content or launch is None:
        return
    path = ledger_path(launch)
    with contextlib.suppress(CkptError):
        with contextlib.suppress(FormatError, IntegrityError):  # none is there, or a damaged one
            present = LedgerEntry.parse(store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path)
            if present.measured_unix_ms > LedgerEntry.parse(content, where=path).measured_unix_ms:
                return
        store.replace(path, content)


def end_entry(store: Store, launch: int, ended_unix_ms: int) -> None:
    """Say in the entry of a launch when that launch ended, unless the entry says it."""
    path = ledger_path(launch)
    with contextlib.suppress(CkptError):
        entry = LedgerEntry.parse(store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path)
        if entry.ended_unix_ms is None:
            ended = dataclasses.replace(entry, ended_unix_ms=max(ended_unix_ms, entry.measured_unix_ms))
            store.replace(path, ended.dump())

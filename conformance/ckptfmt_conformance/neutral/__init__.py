"""The neutral part: what any checkpoint library can be asked, whatever its format.

Save and load give the same bytes; damaged files are refused; a save beside the training holds one moment; a killed one
leaves what was there; another number of processes loads the same bytes; nothing is executed.

    from ckptfmt_conformance import neutral
    for result in neutral.judge([("my_package.peer:Peer", [case.id for case in neutral.CASES])]):
        print(result.case, result.status, result.seen)
"""

from __future__ import annotations

from ckptfmt_conformance.neutral.case import FULL, QUICK, Bench, Effort, NeutralCase, Result, Status, Verdict
from ckptfmt_conformance.neutral.peer import (
    AsyncPeer,
    Description,
    DistributedPeer,
    Loaded,
    Peer,
    Pending,
    Unsupported,
    find_peer,
)
from ckptfmt_conformance.neutral.stage import CASES, find_cases, judge

__all__ = [
    "CASES",
    "FULL",
    "QUICK",
    "AsyncPeer",
    "Bench",
    "Description",
    "DistributedPeer",
    "Effort",
    "Loaded",
    "NeutralCase",
    "Peer",
    "Pending",
    "Result",
    "Status",
    "Unsupported",
    "Verdict",
    "find_cases",
    "find_peer",
    "judge",
]

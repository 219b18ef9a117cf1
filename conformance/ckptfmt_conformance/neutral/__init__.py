"""The neutral part: questions to any checkpoint library, independent of its format.

Loaded bytes equal saved bytes. Damaged files are refused. An asynchronous save holds one moment. A
killed save leaves earlier checkpoints intact. Another number of processes loads the same bytes. A
load executes no code.

    from ckptfmt_conformance import neutral
    for result in neutral.judge([("my_package.peer:Peer", [case.id for case in neutral.CASES])]):
        print(result.case, result.status, result.seen)
"""

from __future__ import annotations

from ckptfmt_conformance.neutral.case import (
    FULL,
    QUICK,
    Bench,
    Effort,
    NeutralCase,
    Result,
    Status,
    Verdict,
)
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

"""It deals other loaders' positions out to whoever asks, on any number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfmt_conformance.adapters.reference import Reference, original

BREAKS = ("REQ-CUR-023",)
CONVICTED_BY = (
    "context/valid/loader-allowed-fewer",
    "context/valid/loader-allowed-more",
    "context/valid/loader-run-allowed",
    "context/invalid/loader-on-fewer",
    "context/invalid/loader-on-more",
    "context/invalid/loader-on-a-third",
    "context/invalid/loader-run-on-fewer",
    "context/invalid/loader-run-on-more",
)

_load = original("ckptfmt.adapters.data_loaders:ForeignLoader.load_state_dict")


def _load_anywhere(loader: Any, state_dict: Mapping[str, Any]) -> None:  # noqa: ANN401 - of the implementation
    loader._worker_count = state_dict["worker_count"]  # noqa: SLF001 - of the implementation
    _load(loader, state_dict)


def _may_always(*_: object) -> bool:
    return True


class Broken(Reference):
    """See above."""

    replacements = (
        ("ckptfmt.trainer.restore:may_load", _may_always),
        ("ckptfmt.adapters.data_loaders:ForeignLoader.load_state_dict", _load_anywhere),
    )

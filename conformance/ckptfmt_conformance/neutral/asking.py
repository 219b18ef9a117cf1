"""Saves and loads by a peer, with refusals told apart from faults."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ckptfmt_conformance.neutral.case import Status, Verdict
from ckptfmt_conformance.neutral.peer import Peer, Unsupported
from ckptfmt_conformance.neutral.states import Expected, template

__all__ = ["Outcome", "VerdictError", "files_of", "one_line", "put", "save_or_stop", "try_load"]


class VerdictError(Exception):
    """Ends a case with a verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.seen)
        self.verdict = verdict


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a load.

    Attributes:
        kind: ``raised`` for an error, ``same`` for the saved bytes, ``other`` for different bytes.
        said: the error, or the difference.
    """

    kind: Literal["raised", "same", "other"]
    said: str


def one_line(error: BaseException) -> str:
    """Return an error in a line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text[:137]}..." if len(text) > 140 else f"{name}: {text}"


def save_or_stop(
    peer: Peer, path: Path, state: Mapping[str, object], step: int, *, may_refuse: bool = False
) -> None:
    """Save a state.

    Raises: VerdictError: UNSUPPORTED where the peer reports a missing feature, or refuses where
    refusal is allowed; FAIL for another error.
    """
    try:
        peer.save(path, state, step)
    except Unsupported as error:
        raise VerdictError(Verdict(Status.UNSUPPORTED, str(error))) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # some libraries raise a BaseException that isn't an Exception
        if may_refuse:
            raise VerdictError(
                Verdict(Status.UNSUPPORTED, f"refused: {one_line(error)}")
            ) from error
        raise VerdictError(Verdict(Status.FAIL, f"the save raised {one_line(error)}")) from error


def try_load(peer: Peer, path: Path, state: Mapping[str, object], expected: Expected) -> Outcome:
    """Load into a state of the same structure, and compare.

    Args:
        state: the saved state, or a template. The load doesn't change the template.
    """
    try:
        loaded = peer.load(path, template(state))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - any exception is a refusal
        return Outcome("raised", one_line(error))
    said = expected.difference(loaded)
    return Outcome("same", "") if said is None else Outcome("other", said)


def files_of(path: Path) -> list[Path]:
    """Return all files in a checkpoint's directory."""
    return sorted(Path(at, name) for at, _, names in os.walk(path.parent) for name in names)


def put(path: Path, content: bytes, scratch: Path) -> None:
    """Replace a file by a new file with new content. A memory map of the old file stays valid."""
    new = scratch / "new"
    new.write_bytes(content)
    new.replace(path)

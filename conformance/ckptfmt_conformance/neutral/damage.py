"""Damage to complete checkpoints: a load must refuse, or return the saved bytes."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import pickle
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.neutral.asking import Outcome, files_of, put, save_or_stop, try_load
from ckptfmt_conformance.neutral.case import Bench, NeutralCase, Verdict
from ckptfmt_conformance.neutral.peer import Peer
from ckptfmt_conformance.neutral.states import Expected, small_state

__all__ = ["CASES"]

_STEP = 77
_IDS = re.compile(r"[0-9a-f]{8,}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Saved:
    """A checkpoint and the saved content."""

    peer: Peer
    bench: Bench
    path: Path
    state: Mapping[str, object]
    expected: Expected

    @classmethod
    def make(cls, peer: Peer, bench: Bench, name: str = "saved", seed: int = 1) -> _Saved:
        """Save a state, and return the checkpoint. Raises: VerdictError."""
        keeps = peer.describe().keeps
        state = small_state(seed, keeps)
        step = _STEP + seed
        saved = cls(
            peer,
            bench,
            bench.place(name),
            state,
            Expected.of(state, step if "step" in keeps else None),
        )
        save_or_stop(peer, saved.path, state, step)
        return saved

    def load(self) -> Outcome:
        """Load the checkpoint in the current state."""
        return try_load(self.peer, self.path, self.state, self.expected)

    def damaged(self, path: Path, content: bytes | None, what: str) -> tuple[str, Outcome]:
        """Load with a replaced or missing file, and restore the file afterwards.

        Args:
            content: the file's content during the load; None for a missing file.
        """
        whole = path.read_bytes()
        name = _IDS.sub("#", path.relative_to(self.path.parent).as_posix())
        self.bench.note(f"loading with {name} {what}")
        if content is None:
            path.unlink()
        else:
            put(path, content, self.bench.scratch)
        try:
            return f"{name} {what}", self.load()
        finally:
            put(path, whole, self.bench.scratch)


def _judge(saved: _Saved, tried: Iterator[tuple[str, Outcome]], what: str) -> Verdict:
    """Return the verdict on loads of damaged checkpoints. No load may return wrong bytes."""
    kinds: Counter[str] = Counter()
    first = ""
    for name, outcome in tried:
        kinds[outcome.kind] += 1
        if outcome.kind == "other" and not first:
            first = f"; first: {name}: {outcome.said}"
    healthy = saved.load()
    if healthy.kind != "same":
        return Verdict(Status.FAIL, f"undamaged: {healthy.kind}: {healthy.said}")
    total = kinds.total()
    seen = f"{what}: {total}; {kinds['raised']} refused, {kinds['same']} came back whole"
    if kinds["other"]:
        return Verdict(
            Status.FAIL,
            f"{seen}, {kinds['other']} came back as other bytes without an error{first}",
        )
    return Verdict(Status.PASS, seen) if total else Verdict(Status.ERROR, "nothing was tried")


def _cuts(nbytes: int, count: int) -> list[int]:
    """Return places to cut a file of `nbytes` bytes, including first and last bytes."""
    inner = [nbytes * part // (count + 1) for part in range(1, count + 1)]
    return sorted({at for at in (0, 1, 8, *inner, nbytes - 8, nbytes - 1) if 0 <= at < nbytes})


def _torn(peer: Peer, bench: Bench) -> Verdict:
    saved = _Saved.make(peer, bench)

    def tried() -> Iterator[tuple[str, Outcome]]:
        for path in files_of(saved.path):
            whole = path.read_bytes()
            for at in _cuts(len(whole), bench.effort.cuts_per_file):
                yield saved.damaged(path, whole[:at], f"cut at byte {at} of {len(whole)}")

    return _judge(saved, tried(), "files cut")


def _zeros(peer: Peer, bench: Bench) -> Verdict:
    saved = _Saved.make(peer, bench)

    def tried() -> Iterator[tuple[str, Outcome]]:
        for path in files_of(saved.path):
            whole = path.read_bytes()
            for at in _cuts(len(whole), bench.effort.cuts_per_file):
                if any(whole[at:]):
                    content = whole[:at] + bytes(len(whole) - at)
                    yield saved.damaged(
                        path, content, f"with zeros from byte {at} of {len(whole)} on"
                    )

    return _judge(saved, tried(), "files with a tail of zeros")


def _flipped(peer: Peer, bench: Bench) -> Verdict:
    saved = _Saved.make(peer, bench)
    rng = random.Random(7)

    def tried() -> Iterator[tuple[str, Outcome]]:
        for path in files_of(saved.path):
            whole = path.read_bytes()
            for at in _regions(len(whole), bench.effort.flips_per_file, rng):
                bit = rng.randrange(8)
                content = bytearray(whole)
                content[at] ^= 1 << bit
                yield saved.damaged(path, bytes(content), f"with bit {bit} of byte {at} flipped")

    return _judge(saved, tried(), "bits flipped")


def _regions(nbytes: int, count: int, rng: random.Random) -> list[int]:
    """Return a byte of each region, and a byte each of the first and the last 64 bytes.

    Headers and ends of files are there.
    """
    if nbytes <= count:
        return list(range(nbytes))
    bounds = [nbytes * part // count for part in range(count + 1)]
    ends = {rng.randrange(min(64, nbytes)), nbytes - 1 - rng.randrange(min(64, nbytes))}
    return sorted({rng.randrange(begin, end) for begin, end in itertools.pairwise(bounds)} | ends)


def _missing(peer: Peer, bench: Bench) -> Verdict:
    saved = _Saved.make(peer, bench)
    tried = (saved.damaged(path, None, "missing") for path in files_of(saved.path))
    return _judge(saved, tried, "files taken away")


def _swapped(peer: Peer, bench: Bench) -> Verdict:
    saved = _Saved.make(peer, bench)
    other = _Saved.make(peer, bench, "other", seed=2)
    ours = _by_role(saved.path)
    theirs = _by_role(other.path)
    if len(ours) < 2:
        return Verdict(Status.SKIPPED, "a single file is the whole checkpoint: no files to mix")
    if ours.keys() != theirs.keys():
        return Verdict(
            Status.ERROR, f"files without a counterpart: {sorted(ours.keys() ^ theirs.keys())[:3]}"
        )
    tried = (
        saved.damaged(path, theirs[role].read_bytes(), "taken from another checkpoint")
        for role, path in ours.items()
        if theirs[role].read_bytes() != path.read_bytes()
    )
    return _judge(saved, tried, "files swapped")


def _by_role(path: Path) -> dict[str, Path]:
    """Return the files of a checkpoint by their names without the parts unique to a checkpoint."""
    return {_IDS.sub("#", at.relative_to(path.parent).as_posix()): at for at in files_of(path)}


# --- no code execution ----------------------------------------------------------------------------


class _Trap:
    """An object with a pickle that creates a directory at the load."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def _executed(peer: Peer, bench: Bench) -> Verdict:
    saved = _Saved.make(peer, bench)
    marker = bench.scratch / "executed"
    count = 0
    ran = []
    for path in files_of(saved.path):
        for name, content in _traps(marker):
            where, _ = saved.damaged(path, content, f"replaced by {name}")
            count += 1
            if marker.exists():
                marker.rmdir()
                ran.append(where)
    said = _saved_trap(peer, bench, marker)
    if marker.exists():
        ran.append("an object among the values")
    seen = f"{count} files replaced by pickles; an object with code among the values: {said}"
    if ran:
        return Verdict(Status.FAIL, f"{seen}; the code ran {len(ran)} times, first: {ran[0]}")
    return Verdict(Status.PASS, f"{seen}; no code ran")


def _traps(marker: Path) -> list[tuple[str, bytes]]:
    made = [("a pickle", pickle.dumps(_Trap(marker), protocol=2))]
    for name, zipped in (("an archive of torch.save", True), ("an old file of torch.save", False)):
        file = io.BytesIO()
        torch.save({"tensors": _Trap(marker)}, file, _use_new_zipfile_serialization=zipped)
        made.append((name, file.getvalue()))
    return made


def _saved_trap(peer: Peer, bench: Bench, marker: Path) -> str:
    state = {"tensors": {"weight": torch.arange(10.0)}, "values": {"object": _Trap(marker)}}
    path = bench.place("trap")
    try:
        peer.save(path, state, _STEP)
    except BaseException as error:  # noqa: BLE001 - any exception is a refusal
        return f"refused on save ({type(error).__name__})"
    try:
        peer.load(path, {"tensors": {"weight": torch.zeros(10)}, "values": {"object": None}})
    except BaseException as error:  # noqa: BLE001 - the same
        return f"refused on load ({type(error).__name__})"
    return "loaded"


# --- cases ----------------------------------------------------------------------------------------

_SAME = "Every load raises, or gives the saved bytes."
_OTHER = "A load gives other bytes, or leaves some as they were, without an error."
_NEVER = "The library's documentation excludes the check."

CASES = (
    NeutralCase(
        id="damage/torn",
        asked="Cut each file of a checkpoint at several places, and load.",
        passes=_SAME,
        fails=_OTHER,
        unsupported=_NEVER,
        judge=_torn,
    ),
    NeutralCase(
        id="damage/zero-tail",
        asked=(
            "Let each file keep the size, but hold zeros from some place on, as after a power"
            " cut, and load."
        ),
        passes=_SAME,
        fails=_OTHER,
        unsupported=_NEVER,
        judge=_zeros,
    ),
    NeutralCase(
        id="damage/flipped-bit",
        asked="Flip one bit in each region of each file, and load.",
        passes=_SAME,
        fails=_OTHER,
        unsupported=_NEVER,
        judge=_flipped,
    ),
    NeutralCase(
        id="damage/missing-file",
        asked="Take each file away in turn, and load.",
        passes=_SAME,
        fails=_OTHER,
        unsupported=_NEVER,
        judge=_missing,
    ),
    NeutralCase(
        id="damage/swapped-file",
        asked=(
            "Put each file's counterpart of another checkpoint of the same structure in its"
            " place, and load."
        ),
        passes=_SAME,
        fails=_OTHER,
        unsupported=f"{_NEVER} SKIPPED where a single file is the whole checkpoint.",
        judge=_swapped,
    ),
    NeutralCase(
        id="damage/nothing-executed",
        asked=(
            "Put pickles with code in the place of each file, and an object among the values; load."
        ),
        passes="No code ran, in a load with or without an error.",
        fails="Code ran.",
        unsupported="The library's documentation demands trusted checkpoints.",
        judge=_executed,
    ),
)

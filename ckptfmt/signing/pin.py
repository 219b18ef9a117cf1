"""The pin of a run: a file with the newest checkpoint that was seen. Spec: REQ-SIG-006."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection
from pathlib import Path

from ckptfmt.documents.manifest import Manifest
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.signing.bundles import name_of
from ckptfmt.store.local import LocalStore


@dataclasses.dataclass(frozen=True, slots=True)
class _Pin:
    """The newest state of a run that was seen.

    Attributes:
        run_id: id of the run.
        launch: number of the newest launch.
        step: step of the launch's newest checkpoint; -1 before the first checkpoint.
        digest: digest of the newest checkpoint, which may be of an earlier launch.
    """

    run_id: str
    launch: int
    step: int
    digest: str


def record_commit(path: str | os.PathLike[str], manifest: Manifest) -> None:
    """Record a committed checkpoint of a run as the newest, unless a newer checkpoint was seen.

    Args:
        path: file of the pin.

    Raises: StateError(ARGUMENT); StoreError. Spec: REQ-SIG-006.
    """
    pinned = _read_pin(path)
    if pinned is None or _is_newer(manifest, pinned):
        _write_pin(path, _pin_of(manifest))


def record_launch(path: str | os.PathLike[str], launch: int, manifest: Manifest) -> None:
    """Record that a launch resumes from a checkpoint: all checkpoints of the launch are newer.

    Args:
        path: file of the pin.
        launch: number of the launch.

    Raises: StoreError. Spec: REQ-SIG-006.
    """
    pin = dataclasses.replace(_pin_of(manifest), launch=launch, step=-1)
    _write_pin(path, pin)


def compare_with_pin(path: str | os.PathLike[str], manifest: Manifest) -> None:
    """Raise if a newer checkpoint was seen; record a newer checkpoint.

    Raises: TrustError(ROLLED_BACK); StateError(ARGUMENT). Spec: REQ-SIG-006.
    """
    if manifest.origin.run_id is None:
        remedy = "Trust a digest instead: pass digest=."
        detail = "a pin follows one run, and this checkpoint is of none"
        raise err(Code.ARGUMENT, detail, where="Trust(pin=)", remedy=remedy)
    pinned = _read_pin(path)
    if pinned is None or _is_newer(manifest, pinned):
        _write_pin(path, _pin_of(manifest))
    elif pinned.digest != manifest.digest:
        step = f"step {pinned.step} of " if pinned.step >= 0 else ""
        raise err(
            Code.ROLLED_BACK,
            f"{name_of(manifest)} of run {manifest.origin.run_id} isn't newer than"
            f" {step}launch {pinned.launch} of run {pinned.run_id}",
            where=os.fspath(path),
            requirement="REQ-SIG-006",
        )


def compare_run_with_pin(path: str | os.PathLike[str], manifests: Collection[Manifest]) -> None:
    """Raise unless a run has the pinned checkpoint or a newer one, and record a newer one.

    Args:
        path: file of the pin.
        manifests: manifests of the run's checkpoints, in any order.

    Raises: as `compare_with_pin`. Spec: REQ-SIG-006.
    """
    pinned = _read_pin(path)
    if not manifests:
        if pinned is not None:
            detail = f"no checkpoint is left of run {pinned.run_id}"
            where = os.fspath(path)
            raise err(Code.ROLLED_BACK, detail, where=where, requirement="REQ-SIG-006")
        return
    newest = max(manifests, key=lambda one: (one.origin.launch or 0, one.origin.step))
    has_pinned = pinned is not None and pinned.digest in {one.digest for one in manifests}
    if pinned is None or not has_pinned or _is_newer(newest, pinned):
        compare_with_pin(path, newest)


def _is_newer(manifest: Manifest, pinned: _Pin) -> bool:
    found = _pin_of(manifest)
    return found.run_id == pinned.run_id and (found.launch, found.step) > (
        pinned.launch,
        pinned.step,
    )


def _pin_of(manifest: Manifest) -> _Pin:
    origin = manifest.origin
    return _Pin(origin.run_id or "", origin.launch or 0, origin.step, manifest.digest)


def _read_pin(path: str | os.PathLike[str]) -> _Pin | None:
    """Return the content of a pin; None without a file. Raises: StateError(ARGUMENT)."""
    try:
        found = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _no_pin(path, str(error)) from error
    kinds = {"run_id": str, "launch": int, "step": int, "digest": str}
    if not isinstance(found, dict) or {name: type(value) for name, value in found.items()} != kinds:
        raise _no_pin(path, "the members aren't run_id, launch, step and digest")
    return _Pin(**found)


def _no_pin(path: str | os.PathLike[str], problem: str) -> CkptError:
    remedy = "Delete the file, to take the next checkpoint as the newest."
    detail = f"the file isn't a pin: {problem}"
    return err(Code.ARGUMENT, detail, where=os.fspath(path), remedy=remedy)


def _write_pin(path: str | os.PathLike[str], pin: _Pin) -> None:
    place = Path(path)
    content = json.dumps(dataclasses.asdict(pin)).encode()
    LocalStore(place.parent, writable=True).replace(place.name, content)

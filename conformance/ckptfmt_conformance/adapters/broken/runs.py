"""Faults in resuming a run: launches, lineage, and checkpoints passed over."""

from __future__ import annotations

import dataclasses
from typing import Any

from ckptfmt_conformance.adapters.reference import CkptError, Code, Reference, original
from ckptfmt_conformance.protocol import Rejected

_choose_by_lineage = original("ckptfmt.run.lineage:_choose_by_lineage")
_verify_checkpoint = original("ckptfmt.read.verify:verify_checkpoint")
_iter_lineage = original("ckptfmt.run.lineage:iter_lineage")
_list_checkpoints = original("ckptfmt.run.lineage:list_checkpoints")
_find_replacement = original("ckptfmt.run.lineage:_find_replacement")
_check_place = original("ckptfmt.run.lineage:check_place")


def _choose_or_begin(*arguments: Any) -> Any:
    try:
        return _choose_by_lineage(*arguments)
    except CkptError as error:
        if error.code == "NO_VALID_CHECKPOINT":
            return None, "lineage"
        raise


class Afresh(Reference):
    """It begins a run anew where no candidate is whole."""

    breaks = ("REQ-RUN-010",)
    convicted_by = (
        "run/invalid/launch-base-needed",
        "run/invalid/launch-none-whole",
        "run/invalid/launch-resume-from-gone",
        "run/invalid/launch-ring",
    )
    replacements = (("ckptfmt.run.lineage:_choose_by_lineage", _choose_or_begin),)


def _choose_nothing(*_: Any) -> Any:
    return None, "lineage"


class AlwaysAfresh(Reference):
    """It begins each launch anew, even with checkpoints in the run."""

    breaks = ("REQ-RUN-006",)
    convicted_by = (
        "run/invalid/launch-none-whole",
        "run/valid/launch-aborted",
        "run/valid/launch-damaged",
        "run/valid/launch-newest",
        "run/valid/launch-unfinished",
    )
    replacements = (("ckptfmt.run.lineage:_choose_by_lineage", _choose_nothing),)


class NeedsOne(Reference):
    """It refuses a launch on a run without checkpoints."""

    breaks = ("REQ-RUN-006",)
    convicted_by = ("run/valid/launch-first", "run/valid/launch-second")

    def launch(self, path: Any) -> dict[str, Any]:
        """Refuse to begin without a checkpoint."""
        found = super().launch(path)
        if found["resume_from"] is None:
            raise Rejected("NO_VALID_CHECKPOINT", str(path), "open")
        return found


def _open_nothing(_: object, entry: Any, *_others: object) -> Any:
    if isinstance(entry.register, CkptError):
        return entry.register
    return entry  # The entry has a manifest, like an open checkpoint.


class RegistersOnly(Reference):
    """It begins a launch from a checkpoint after reading only the checkpoint's register."""

    breaks = ("REQ-RUN-010", "REQ-RUN-012")
    convicted_by = (
        "run/invalid/launch-base-needed",
        "run/invalid/launch-none-whole",
        "run/valid/launch-damaged",
        "run/valid/launch-down",
        "run/valid/launch-smaller-steps",
    )
    replacements = (("ckptfmt.run.lineage:_open_valid", _open_nothing),)


def _verify_all(store: Any, report: Any, **_: Any) -> Any:
    return _verify_checkpoint(store, report)


class WholeClosure(Reference):
    """It passes over a delta because of damage in unused content of a base."""

    breaks = ("REQ-RUN-012",)
    convicted_by = ("run/valid/launch-base-not-needed",)
    replacements = (("ckptfmt.run.lineage:verify_loadable", _verify_all),)


def _iter_first(*arguments: Any) -> Any:
    return iter(list(_iter_lineage(*arguments))[:1])


class FirstOrNone(Reference):
    """It begins no launch if the newest candidate is damaged."""

    breaks = ("REQ-RUN-007", "REQ-RUN-012")
    convicted_by = (
        "run/valid/launch-abort-of-another-step",
        "run/valid/launch-damaged",
        "run/valid/launch-down",
        "run/valid/launch-foreign",
        "run/valid/launch-smaller-steps",
        "run/valid/launch-unreadable",
    )
    replacements = (("ckptfmt.run.lineage:iter_lineage", _iter_first),)


def _iter_committed(*arguments: Any) -> Any:
    return (entry for entry in _iter_lineage(*arguments) if entry.manifest is not None)


class OpensTheNext(Reference):
    """It opens a run's first readable candidate, without a report on unreadable candidates."""

    breaks = ("REQ-RUN-020", "REQ-RUN-003", "REQ-MAN-002")
    convicted_by = (
        "run/invalid/abort-of-another-step",
        "run/invalid/first-unreadable",
        "run/invalid/foreign",
        "run/invalid/overtaken-but-unreadable",
        "run/invalid/resume-from-aborted",
        "run/invalid/resume-from-digest",
        "run/invalid/step-of-another",
        "run/invalid/tombstone-of-another-launch",
        "run/invalid/tombstone-of-another-run",
        "run/valid/launch-unreadable",
    )
    replacements = (("ckptfmt.run.lineage:iter_lineage", _iter_committed),)


def _register(path: Any) -> bytes:
    place = path / "manifest.json"
    return bytes(place.read_bytes()) if place.is_file() else b""


class FallbackForNothing(Reference):
    """It reports a fallback for abandoned or retired checkpoints, though none is damaged."""

    breaks = ("REQ-RUN-007",)
    convicted_by = (
        "run/valid/launch-aborted",
        "run/valid/launch-resume-from-retired",
        "run/valid/launch-unfinished",
    )

    def launch(self, path: Any) -> dict[str, Any]:
        """Count uncommitted checkpoints as passed over."""
        found = super().launch(path)
        names = sorted((one.name for one in path.glob("step-*")), reverse=True)
        passed = [one for one in names if b'"manifest"' not in _register(path / one)]
        return {**found, "chosen_by": "fallback" if passed else found["chosen_by"]}


def _list_readable(*arguments: Any) -> Any:
    entries = _list_checkpoints(*arguments)
    for entry in entries:
        if isinstance(entry.register, CkptError):
            raise entry.register
    return entries


class StrictRun(Reference):
    """It refuses a run with any unreadable register, even outside the lineage."""

    breaks = ("REQ-RUN-007", "REQ-RUN-021")
    convicted_by = (
        "run/valid/launch-abort-of-another-step",
        "run/valid/launch-foreign",
        "run/valid/launch-moved",
        "run/valid/launch-smaller-steps-unreadable",
        "run/valid/launch-tombstone-of-another-run",
        "run/valid/launch-unreadable",
        "run/valid/unreadable-beside",
        "run/valid/unreadable-beyond",
    )
    replacements = (("ckptfmt.run.lineage:list_checkpoints", _list_readable),)


def _iter_with_retired(launches: list[Any], entries: list[Any]) -> Any:
    damaged = CkptError(Code.CHECKPOINT_RETIRED, "it was retired")
    return _iter_lineage(
        launches,
        [
            dataclasses.replace(one, register=damaged) if _is_retired(one) else one
            for one in entries
        ],
    )


def _is_retired(entry: Any) -> bool:
    return hasattr(entry.register, "manifest_digest")


class RetiredCandidates(Reference):
    """It treats a retired checkpoint of the lineage as damaged."""

    breaks = ("REQ-RUN-006", "REQ-RUN-007")
    convicted_by = ("run/invalid/all-retired", "run/valid/launch-resume-from-retired")
    replacements = (
        ("ckptfmt.run.lineage:iter_lineage", _iter_with_retired),
        ("ckptfmt.run.lineage:_is_retired", lambda *_: False),
    )


def _iter_greatest(_: list[Any], entries: list[Any]) -> Any:
    return iter(
        sorted(
            (one for one in entries if one.manifest is not None),
            key=lambda one: (-one.step, -one.launch),
        )
    )


class GreatestStep(Reference):
    """It resumes from the greatest step of all, even after a rollback."""

    breaks = ("REQ-RUN-006",)
    convicted_by = (
        "run/valid/fallback",
        "run/valid/launch-resume-from-retired",
        "run/valid/launch-smaller-steps",
        "run/valid/overtaken-but-retired",
        "run/valid/overtaken-by-hand",
        "run/valid/resume-from-retired",
        "run/valid/rolled-back",
        "run/valid/rolled-forward",
        "run/valid/rolled-back-unsaved",
    )
    replacements = (("ckptfmt.run.lineage:iter_lineage", _iter_greatest),)


class _Text(int):
    """A number ordered by its decimal digits as text."""

    def __lt__(self, other: int) -> bool:
        return str(int(self)) < str(int(other))

    def __gt__(self, other: int) -> bool:
        return str(int(self)) > str(int(other))

    def __le__(self, other: int) -> bool:
        return str(int(self)) <= str(int(other))

    def __neg__(self) -> _Backwards:
        return _Backwards(self)


class _Backwards(_Text):
    """The same order reversed."""

    def __lt__(self, other: int) -> bool:
        return _Text.__gt__(self, other)


def _iter_by_text(launches: list[Any], entries: list[Any]) -> Any:
    return _iter_lineage(
        [dataclasses.replace(one, launch=_Text(one.launch)) for one in launches],
        [
            dataclasses.replace(one, step=_Text(one.step), launch=_Text(one.launch))
            for one in entries
        ],
    )


class StepsAsText(Reference):
    """It compares steps and launches as text, so that a number with more digits may come first."""

    breaks = ("REQ-RUN-009",)
    convicted_by = ("run/valid/numbers", "run/valid/launch-of-five-digits")
    replacements = (("ckptfmt.run.lineage:iter_lineage", _iter_by_text),)


def _iter_newest(launches: list[Any], entries: list[Any]) -> Any:
    found = list(_iter_lineage(launches, entries))
    newest = max((one.launch for one in launches), default=0)
    named = [
        one.resume_from.name
        for one in launches
        if one.launch == newest and one.resume_from is not None
    ]
    return iter([one for one in found if one.launch == newest or one.name in named or not named])


class NewestLaunchOnly(Reference):
    """It considers only the newest launch and the checkpoint named in that launch's record."""

    breaks = ("REQ-RUN-006",)
    convicted_by = (
        "run/valid/launch-down",
        "run/valid/launch-resume-from-aborted",
        "run/valid/launch-resume-from-digest",
        "run/valid/launch-resume-from-lost",
        "run/valid/launch-resume-from-retired",
        "run/valid/launch-smaller-steps-down",
        "run/valid/launch-smaller-steps-retired",
        "run/valid/launch-smaller-steps-unreadable",
        "run/valid/overtaken-but-retired",
        "run/valid/overtaken-by-hand",
    )
    replacements = (("ckptfmt.run.lineage:iter_lineage", _iter_newest),)


def _iter_all(launches: list[Any], entries: list[Any]) -> Any:
    """Return the lineage with another checkpoint in the newest record: the named launch's last."""
    last = {one.launch: one for one in entries}
    moved = []
    for launch in launches:
        named = next(
            (one for one in entries if launch.resume_from and one.name == launch.resume_from.name),
            None,
        )
        if named is not None and launch.launch == max(one.launch for one in launches):
            resume = last[named.launch]
            digest = resume.manifest.digest if resume.manifest else launch.resume_from.digest
            moved.append(
                dataclasses.replace(
                    launch,
                    resume_from=dataclasses.replace(
                        launch.resume_from, name=resume.name, digest=digest
                    ),
                )
            )
        else:
            moved.append(launch)
    return _iter_lineage(moved, entries)


class UnboundedLineage(Reference):
    """It includes all checkpoints of a launch on the lineage, even beyond the resumed step."""

    breaks = ("REQ-RUN-006", "REQ-RUN-021")
    convicted_by = (
        "run/valid/launch-resume-from-retired",
        "run/valid/launch-smaller-steps",
        "run/valid/launch-smaller-steps-down",
        "run/valid/launch-smaller-steps-retired",
        "run/valid/overtaken-by-hand",
        "run/valid/rolled-back-unsaved",
        "run/valid/unreadable-beyond",
    )
    replacements = (("ckptfmt.run.lineage:iter_lineage", _iter_all),)


def _is_never(*_: object) -> bool:
    return False


class NeverOvertaken(Reference):
    """It follows every launch record, even of a launch overtaken by a clean-up."""

    breaks = ("REQ-RUN-006",)
    convicted_by = ("run/valid/overtaken",)
    replacements = (("ckptfmt.run.lineage:is_overtaken", _is_never),)


def _is_overtaken(launch: Any, entries: list[Any]) -> bool:
    committed = {entry.name: entry.launch for entry in entries if entry.manifest is not None}
    named = launch.resume_from
    return (
        named is not None
        and named.name not in committed
        and launch.launch not in committed.values()
    )


class LightlyOvertaken(Reference):
    """It treats a launch without commits as overtaken if its named checkpoint isn't committed."""

    breaks = ("REQ-RUN-006",)
    convicted_by = (
        "run/invalid/overtaken-but-unreadable",
        "run/invalid/resume-from-aborted",
        "run/valid/launch-resume-from-aborted",
        "run/valid/launch-resume-from-lost",
        "run/valid/launch-resume-from-retired",
        "run/valid/overtaken-but-retired",
        "run/valid/overtaken-by-hand",
    )
    replacements = (("ckptfmt.run.lineage:is_overtaken", _is_overtaken),)


def _find_nothing(*_: object) -> None:
    return None


class ForgottenLoss(Reference):
    """It treats a missing checkpoint, named by a launch record, as retired, and resumes below."""

    breaks = ("REQ-RUN-022",)
    convicted_by = (
        "run/invalid/resume-from-aborted",
        "run/valid/launch-resume-from-aborted",
        "run/valid/launch-resume-from-lost",
    )
    replacements = (("ckptfmt.run.lineage:_find_replacement", _find_nothing),)


def _find_absence(resume: Any, register: Any) -> Any:
    found = _find_replacement(resume, register)
    return None if found is not None and found.code == "DOC_DIGEST" else found


class NameCounts(Reference):
    """It resumes by the name in a launch record, without a comparison of the digest."""

    breaks = ("REQ-RUN-022",)
    convicted_by = ("run/invalid/resume-from-digest", "run/valid/launch-resume-from-digest")
    replacements = (("ckptfmt.run.lineage:_find_replacement", _find_absence),)


def _check_manifests(register: Any, *others: Any) -> None:
    if hasattr(register, "origin"):
        _check_place(register, *others)


class AnyPlace(Reference):
    """It doesn't compare the register of an aborted or retired checkpoint with its directory."""

    breaks = ("REQ-RUN-003", "REQ-MAN-002")
    convicted_by = (
        "run/invalid/abort-of-another-step",
        "run/invalid/tombstone-of-another-launch",
        "run/invalid/tombstone-of-another-run",
        "run/valid/launch-abort-of-another-step",
        "run/valid/launch-tombstone-of-another-run",
    )
    replacements = (("ckptfmt.run.lineage:check_place", _check_manifests),)


def _check_nothing(*_: object) -> None:
    return None


class AnyRecords(Reference):
    """It doesn't check the run of launch records, nor the presence of a record for each launch."""

    breaks = ("REQ-RUN-003", "REQ-RUN-015")
    convicted_by = (
        "run/invalid/launch-of-another-run",
        "run/invalid/launch-record-of-another-run",
        "run/invalid/launch-unrecorded",
    )
    replacements = (
        ("ckptfmt.run.lineage:check_run_id", _check_nothing),
        ("ckptfmt.run.lineage:check_records", _check_nothing),
    )


class HalfInARun(Reference):
    """It accepts a document with a launch and no run, or with a run and no launch."""

    breaks = ("REQ-MAN-008",)
    convicted_by = (
        "parts/invalid/index-launch-of-no-run",
        "parts/invalid/part-launch-of-no-run",
        "run/invalid/abort-without-launch",
        "run/invalid/abort-without-run",
        "run/invalid/tombstone-without-run",
    )
    replacements = (
        ("ckptfmt.documents.manifest:check_membership", lambda *_: None),
        ("ckptfmt.documents.tables:check_membership", lambda *_: None),
    )


class UnmergedParts(Reference):
    """It accepts a checkpoint whose index doesn't follow from the parts."""

    breaks = ("REQ-CKP-008", "REQ-IDX-001")
    convicted_by = (
        "whole/invalid/absent-for-another-reason",
        "whole/invalid/absent-in-all-parts",
        "whole/invalid/absent-in-one-part",
        "whole/invalid/alias-left-out",
        "whole/invalid/leaf-diverged",
        "whole/valid/launch-absent-for-another-reason",
        "whole/valid/launch-absent-in-all-parts",
        "whole/valid/launch-absent-in-one-part",
        "whole/valid/launch-alias-left-out",
        "whole/valid/launch-leaf-diverged",
    )
    replacements = (("ckptfmt.read.verify:_check_merge", _check_nothing),)


class UnreadValues(Reference):
    """It accepts a checkpoint without a check of leaves and streams."""

    breaks = ("REQ-CKP-008", "REQ-OPN-009")
    convicted_by = (
        "whole/invalid/cursor-form",
        "whole/invalid/loader-form",
        "whole/valid/launch-cursor-form",
        "whole/valid/launch-leaf-no-tree",
        "whole/valid/launch-leaf-refers-to-nothing",
        "whole/valid/launch-loader-form",
        "whole/valid/launch-stream-no-tree",
    )
    replacements = (("ckptfmt.read.verify:_verify_values", _check_nothing),)


def _agrees_always(*_: object) -> bool:
    return True


class UncomparedHeaders(Reference):
    """It checks only the digests of shard headers, and not their content."""

    breaks = ("REQ-CKP-008", "REQ-SHD-010")
    convicted_by = (
        "whole/invalid/header-of-another-dtype",
        "whole/valid/launch-header-of-another-dtype",
    )
    replacements = (("ckptfmt.read.verify:_agrees", _agrees_always),)


class _NoError(CkptError):
    """An exception class for no actual error."""


class UnknownIsDamaged(Reference):
    """It passes over a candidate with an unknown version or feature, as if damaged."""

    breaks = ("REQ-VER-010",)
    convicted_by = (
        "whole/invalid/launch-unknown-cursor",
        "whole/invalid/launch-unknown-feature",
        "whole/invalid/launch-unknown-version",
    )
    replacements = (("ckptfmt.run.lineage:UnsupportedError", _NoError),)


def _find_no_surroundings(_: object) -> None:
    return None


class NamelessCheckpoints(Reference):
    """It opens a single checkpoint without a check of its name and its run."""

    breaks = ("REQ-MAN-002", "REQ-RUN-003")
    convicted_by = (
        "run/invalid/damaged-run-json-step-of-another",
        "run/invalid/order-digest-third",
        "run/invalid/order-run-second",
        "run/invalid/order-step-first",
    )
    replacements = (("ckptfmt.run.lineage:find_surroundings", _find_no_surroundings),)

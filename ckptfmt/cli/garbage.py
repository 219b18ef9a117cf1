"""``gc``: delete checkpoints by retention, and leftovers of killed saves; list other leftovers."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from ckptfmt.cli.console import Cell, Console, Progress, bytes_text, clean, count_text, print_json
from ckptfmt.cli.listing import directory_nbytes
from ckptfmt.cli.places import open_run_place
from ckptfmt.cli.survey import Survey, survey_run
from ckptfmt.documents.run import RunRecord
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.read.report import Report
from ckptfmt.read.verify import verify_loadable
from ckptfmt.run.lineage import (
    RunEntry,
    iter_lineage,
    list_checkpoints,
    list_launches,
    read_known_run,
)
from ckptfmt.run.retention import KeepBest, LastLoadable, Retention, clean_up, find_last_loadable
from ckptfmt.store import Store, open_store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A directory of the run, and its treatment by the clean-up.

    Attributes:
        name: the directory's name.
        what: the treatment: ``retired``, ``given_up`` and ``swept`` directories are removed, or
            would be; ``needed``, ``unfinished``, ``saving``, ``beside``, ``damaged`` and
            ``unreadable`` directories stay.
        nbytes: the size of the directory's files in bytes; None if not determined.
        reason: the reason of the treatment.
    """

    name: str
    what: str
    nbytes: int | None
    reason: str


#: The words for the best of a metric.
_MODES: Final[Mapping[str, Literal["min", "max"]]] = {"min": "min", "max": "max"}
#: Removing treatments: the word after the removal, the word for a dry run, and the style.
_DONE = {
    "retired": ("retired", "would retire", "yellow"),
    "given_up": ("given up", "would give up", "yellow"),
    "swept": ("swept", "would sweep", "yellow"),
}
_STAYS = {
    "needed": "cyan", "unfinished": "cyan", "saving": "cyan", "beside": "cyan", "damaged": "red",
    "unreadable": "red"
}  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Clean up a run, or print the effect of a clean-up, and return the exit code.

    Returns: 1 if a damaged or unreadable directory needs a person's attention, or if the last
        loadable checkpoint was kept against the retention; otherwise 0.
    Raises: UnsupportedError(FEATURE_UNSUPPORTED); StateError(ARGUMENT); FencedError if a launch
        begins meanwhile; IntegrityError, FormatError of the run's records; StoreError.
    """
    for option, count in (("--keep", arguments.keep), ("--keep-every", arguments.keep_every)):
        if count is not None and count < 1:
            remedy = f"Give a whole number from 1 on, such as {option} 3."
            raise err(
                Code.ARGUMENT, f"{count} isn't a positive number", where=option, remedy=remedy
            )
    for option, given in (
        ("--keep-every", arguments.keep_every),
        ("--keep-best", arguments.keep_best),
    ):
        if arguments.keep is None and given is not None:
            remedy = "Say with --keep how many of the newest stay beside them."
            raise err(
                Code.ARGUMENT, "without --keep all checkpoints stay", where=option, remedy=remedy
            )
    retention = Retention(
        newest=arguments.keep,
        every=arguments.keep_every,
        best=parse_keep_best(arguments.keep_best),
    )
    place = open_run_place(arguments.path)
    record = read_known_run(place.store)
    survey = survey_run(place.store, record, retention)
    damages = _find_damages(place.store, survey) if arguments.verify else {}
    last = None if arguments.force else _find_last(place.store, record, survey)
    items = _list_items(place.store, survey, damages, verified=arguments.verify)
    if last is not None:
        names = last.names or {entry.name for entry in survey.going}
        items = [
            dataclasses.replace(item, what="needed", reason=f"{last.reason}: --force lets it go")
            if item.what == "retired" and item.name in names
            else item
            for item in items
        ]
    if not arguments.dry_run:
        store = open_store(arguments.path, writable=True)
        staying = {item.name for item in items if item.what == "needed"}
        removed = set(
            clean_up(store, record, launch=survey.launch, retention=retention, staying=staying)
        )
        items = [_as_done(item, removed) for item in items]
    if arguments.json:
        _print_json(arguments, survey, items)
    else:
        _print_text(arguments, survey, items)
    return (
        1
        if last is not None or any(item.what in ("damaged", "unreadable") for item in items)
        else 0
    )


def _find_last(store: Store, run: RunRecord, survey: Survey) -> LastLoadable | None:
    """Return the checkpoints to keep against the retention, so that a loadable checkpoint stays.

    Returns: None if the retention may retire all chosen checkpoints.
    """
    if not survey.going:
        return None
    launches = list_launches(store, run)
    entries = list_checkpoints(store, run)
    newest = next(
        (entry.manifest for entry in iter_lineage(launches, entries) if entry.manifest is not None),
        None,
    )
    with Progress(
        lambda: None if newest is None else newest.stored_nbytes, quiet=False
    ) as progress:
        return find_last_loadable(
            store, launches, entries, survey.going, on_progress=progress.advance
        )


def parse_keep_best(text: str | None) -> KeepBest | None:
    """Return the metric, ``min`` or ``max``, and the number. Raises: StateError(ARGUMENT).

    >>> parse_keep_best("eval_loss:min:3")
    ('eval_loss', 'min', 3)
    """
    if text is None:
        return None
    metric, _, rest = text.rpartition(":")
    metric, _, mode = metric.rpartition(":")
    if metric and mode in _MODES and rest.isdecimal():
        return metric, _MODES[mode], int(rest)
    remedy = "Write a metric, min or max, and how many, as in eval_loss:min:3."
    raise err(
        Code.ARGUMENT,
        f"{text!r} doesn't name a metric, min or max, and a number",
        where="--keep-best",
        remedy=remedy,
    )


def _find_damages(store: Store, survey: Survey) -> dict[str, CkptError | None]:
    """Read every byte of the checkpoints beside the lineage.

    Returns: the first violation of each checkpoint, by name; None for an undamaged checkpoint.
    """
    found: dict[str, CkptError | None] = {}
    total_nbytes = sum(
        entry.manifest.stored_nbytes for entry, _ in survey.beside if entry.manifest is not None
    )
    with Progress(lambda: total_nbytes, quiet=False) as progress:
        for entry, _ in survey.beside:
            assert entry.manifest is not None  # noqa: S101
            report = Report(target=entry.name, kind="checkpoint", on_progress=progress.advance)
            checkpoint = verify_loadable(store.at(entry.name), report, digest=entry.manifest.digest)
            if checkpoint is not None:
                checkpoint.close()
            found[entry.name] = next(iter(report.violations), None)
    return found


def _list_items(
    store: Store, survey: Survey, damages: dict[str, CkptError | None], *, verified: bool
) -> list[_Item]:
    """Return the directories that the clean-up removes or keeps, with the reasons."""

    def item(entry: RunEntry, what: str, reason: str) -> _Item:
        return _Item(
            name=entry.name, what=what, nbytes=directory_nbytes(store.at(entry.name)), reason=reason
        )

    by_hand = "`ckptfmt rm` deletes it"
    items = [item(entry, "retired", "retention doesn't keep it") for entry in survey.going]
    left = f"left by a save that ended before launch {survey.launch}"
    items += [item(entry, "given_up", left) for entry in survey.abandoned]
    for name in survey.remains:
        nbytes = directory_nbytes(store.at(name))
        items.append(
            _Item(name=name, what="swept", nbytes=nbytes, reason="left by an interrupted clean-up")
        )
    next_launch = "the next launch gives it up, or finishes it from a node's cache"
    items += [item(entry, "unfinished", next_launch) for entry in survey.unfinished]
    items += [
        item(entry, "saving", "a living saver has saves of its launch in hand")
        for entry in survey.in_hand
    ]
    for entry, reason in survey.beside:
        damage = damages.get(entry.name)
        pinned = "it is pinned" if entry.is_pinned else by_hand
        if damage is not None:
            items.append(
                item(entry, "damaged", f"{damage.code} at {damage.where}; {reason}; {pinned}")
            )
        else:
            items.append(item(entry, "beside", f"{'sound; ' * verified}{reason}; {pinned}"))
    for entry, error in survey.unreadable:
        mend = (
            "`ckptfmt repair --with MIRROR` restores it; until then no delta and no base of"
            " one is retired"
        )
        items.append(item(entry, "unreadable", f"{error.code}; {mend}"))
    for launch in (*survey.lost, *survey.missing):
        kept = "is retired" if launch in survey.missing else "of older launches goes"
        mend = f"`ckptfmt repair {clean(store.name)}` mends it; until then nothing {kept}"
        items.append(
            _Item(
                name=launch.path,
                what="unreadable",
                nbytes=None,
                reason=f"{launch.error.code}; {mend}",
            )
        )
    return items


def _as_done(item: _Item, removed: set[str]) -> _Item:
    """Return an item with its actual treatment.

    A directory chosen for removal stays if it has become needed, or if its save was decided
    meanwhile.
    """
    if item.what not in ("retired", "given_up") or item.name in removed:
        return item
    reason = "possibly needed, or the register changed meanwhile: `ckptfmt rm` gives the reason"
    return dataclasses.replace(item, what="needed", reason=reason)


def _print_json(arguments: argparse.Namespace, survey: Survey, items: list[_Item]) -> None:
    print_json(
        {
            "kind": "run",
            "target": arguments.path,
            "checked": "bytes" if arguments.verify else "registers",
            "dry_run": arguments.dry_run,
            "items": [dataclasses.asdict(item) for item in items],
            "freed_nbytes": _freed_nbytes(items),
            "problem": survey.problem or None,
        }
    )


def _freed_nbytes(items: list[_Item]) -> int:
    return sum(item.nbytes or 0 for item in items if item.what in _DONE)


def _print_text(arguments: argparse.Namespace, survey: Survey, items: list[_Item]) -> None:
    console = Console()
    tense = 1 if arguments.dry_run else 0
    header: list[Cell | str] = [(text, "dim") for text in ("", "checkpoint", "files", "")]
    console.table(
        [header] * bool(items)
        + [
            [
                (_DONE[item.what][tense], _DONE[item.what][2])
                if item.what in _DONE
                else (item.what, _STAYS[item.what]),
                (clean(item.name), "bold"),
                bytes_text(item.nbytes) if item.nbytes is not None else "",
                (clean(item.reason), "dim"),
            ]
            for item in items
        ],
        right=(2,),
        indent=0,
        cut=False,
    )
    if items:
        console.line()
    done = [item for item in items if item.what in _DONE]
    verb = "would be freed" if arguments.dry_run else "freed"
    stays = count_text(len(items) - len(done), "other directory", "other directories")
    console.line(
        (verb, "green bold"),
        (
            f"  {bytes_text(_freed_nbytes(items))} of files in"
            f" {count_text(len(done), 'directory', 'directories')}"
        ),
        f"; {stays} to look at" if len(items) > len(done) else "",
    )
    if survey.problem:
        console.line((clean(survey.problem), "yellow"))
    if arguments.keep is None:
        console.line(
            ("  Retention wasn't asked for: --keep N says how many of the newest stay.", "dim")
        )
    if survey.beside and not arguments.verify:
        console.line(
            (
                (
                    "  Checkpoints beside the lineage were not read: --verify names the damaged"
                    " checkpoints."
                ),
                "dim",
            )
        )

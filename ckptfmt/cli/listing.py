"""``ls`` and ``du``: the checkpoints of a run, the runs of a directory, and the space they take."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter

from ckptfmt.cli.console import (
    Cell,
    Console,
    bytes_text,
    clean,
    count_text,
    labels_text,
    print_errors,
    print_json,
    time_text,
)
from ckptfmt.cli.places import Place, find_places, open_place, open_run_place
from ckptfmt.cli.survey import iter_beside
from ckptfmt.commit.waiting import launches_of, list_held
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import CkptError, StoreError
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.catalog import RunCheckpoint, describe_entry, state_of
from ckptfmt.run.lineage import (
    LostLaunch,
    RunEntry,
    iter_lineage,
    list_checkpoints,
    list_launches,
    list_missing,
    read_run,
)
from ckptfmt.store import Store

#: The states shown by `ls` without ``--all``: checkpoints, possible checkpoints, unreadable ones.
_SHOWN = frozenset({"committed", "saving", "unfinished", "unreadable"})
_STYLES = {"committed": "green", "saving": "yellow", "unfinished": "yellow", "unreadable": "red"}


def run(arguments: argparse.Namespace) -> int:
    """List or measure the contents of a path, and return the exit code.

    Returns: 2 if a record or register can't be read, otherwise 0.

    Raises: StateError(ARGUMENT), IntegrityError(FILE_MISSING and others), FormatError, StoreError.
    """
    return _measure(arguments) if arguments.command == "du" else _list(arguments)


# --- ls -------------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace) -> int:
    places = find_places(arguments.path)
    if places is not None:
        return _list_places(arguments, places)
    place = open_run_place(arguments.path)
    found, head, beside, lost = _read_checkpoints(place.store)
    shown = [one for one in found if arguments.all or one.state in _SHOWN]
    if arguments.json:
        members = [
            {**dataclasses.asdict(one), "is_head": one.name == head, "beside": beside.get(one.name)}
            for one in shown
        ]
        problems = [error.as_json() for error in lost]
        told = {"kind": "run", "target": place.path, "checked": "registers", "checkpoints": members}
        print_json({**told, "problems": problems})
    else:
        _print_list(shown, head, beside, hidden_count=len(found) - len(shown))
        print_errors(Console(), lost, "red bold")
    return 2 if lost or any(one.state == "unreadable" for one in found) else 0


def _read_checkpoints(
    store: Store,
) -> tuple[list[RunCheckpoint], str | None, dict[str, str], list[CkptError]]:
    """Return the checkpoints of a run, and their roles; read each register once.

    Returns: the checkpoints; the name of the checkpoint that the run goes on from; the reasons, by
        name, of the committed checkpoints beside the lineage (passed over as damaged, or left by a
        rollback); the errors of the records of launches and labels.
    """
    # Holds are read before the registers, which show a save decided in between.
    held = launches_of(list_held(store))
    run = read_run(store)
    entries = list_checkpoints(store, run)
    launches, lost = read_launches(store, run, entries)
    lost += [entry.labels_error for entry in entries if entry.labels_error]
    head = next(
        (entry.name for entry in iter_lineage(launches, entries) if entry.manifest is not None),
        None,
    )
    beside = (
        {entry.name: reason for entry, reason in iter_beside(launches, entries)} if launches else {}
    )
    return [describe_entry(entry, held) for entry in entries], head, beside, lost


def read_launches(
    store: Store, run: RunRecord | None, entries: list[RunEntry]
) -> tuple[list[Launch | LostLaunch], list[CkptError]]:
    """Return the launches of a run, oldest first, and the errors of their records.

    A record that belongs to a different run counts as an error, and so does a missing record.

    Args:
        entries: the run's checkpoint directories, which were listed before.
    """
    problems: list[CkptError] = []
    try:
        launches = list_launches(store, run)
        launches += list_missing(store, launches, entries)
        launches.sort(key=lambda launch: launch.launch)
    except StoreError:
        raise
    except CkptError as error:
        launches = []
        problems.append(error)
    return launches, problems + [
        launch.as_error() for launch in launches if isinstance(launch, LostLaunch)
    ]


def _print_list(
    shown: list[RunCheckpoint], head: str | None, beside: dict[str, str], *, hidden_count: int
) -> None:
    console = Console()
    has_labels = any(one.metrics or one.tags or one.pinned for one in shown)
    header = ("checkpoint", "state", "tensors", "saved", "labels" if has_labels else "", "")
    rows: list[list[Cell | str]] = [[(text, "dim") for text in header]] if shown else []
    rows += [
        [
            (one.name, "bold"),
            _state_cell(one, is_head=one.name == head, is_beside=one.name in beside),
            bytes_text(one.stored_nbytes) if one.stored_nbytes is not None else "",
            time_text(one.saved_unix_s) if one.saved_unix_s is not None else "",
            (labels_text(one.metrics, one.tags, pinned=one.pinned), "cyan"),
            (beside.get(one.name, ""), "dim"),
        ]
        for one in shown
    ]
    console.table(rows, right=(2,), indent=0)
    if not shown:
        console.line(("no checkpoint yet", "dim"))
    if hidden_count:
        console.line(
            (
                (
                    f"{count_text(hidden_count, 'retired or given-up checkpoint')} more: --all"
                    " shows"
                    " all"
                ),
                "dim",
            )
        )


def _state_cell(one: RunCheckpoint, *, is_head: bool, is_beside: bool) -> Cell:
    is_elsewhere = one.durability not in (None, HOME)
    words = (
        ["head"] * is_head
        + ["beside"] * is_beside
        + [f"durability {one.durability}"] * is_elsewhere
    )
    return ", ".join([one.state, *words]), "yellow" if is_beside else _STYLES.get(one.state, "dim")


def _list_places(arguments: argparse.Namespace, places: list[Place]) -> int:
    """List the runs and checkpoints in a directory, and return the exit code."""
    rows: list[dict[str, object]] = []
    for place in places:
        name = place.store.name.rstrip("/").rpartition("/")[2]
        if place.is_run:
            try:
                found, head, _, lost = _read_checkpoints(place.store)
            except CkptError as error:  # the remaining places are still listed
                rows.append({"name": name, "kind": "run", "error": error.as_json()})
                continue
            counts = Counter(one.state for one in found)
            rows.append({"name": name, "kind": "run", "head": head, "states": dict(counts)})
            if lost:
                rows[-1]["error"] = lost[0].as_json()
        else:
            rows.append({"name": name, "kind": "checkpoint"})
    code = 2 if any("error" in row for row in rows) else 0
    if arguments.json:
        print_json(
            {"kind": "directory", "target": arguments.path, "checked": "registers", "entries": rows}
        )
        return code
    cells: list[list[Cell | str]] = []
    for row in rows:
        if isinstance(failure := row.get("error"), dict):
            text = f"{failure['code']} at {failure.get('where') or row['name']}"
            cells.append(
                [
                    (clean(str(row["name"])), "bold"),
                    "run",
                    (f"can't be read: {clean(text)}", "red"),
                    "",
                ]
            )
            continue
        states = row.get("states")
        text = (
            ", ".join(f"{count} {state}" for state, count in states.items())
            if isinstance(states, dict)
            else ""
        )
        head = f"head {row['head']}" if row.get("head") else ""
        cells.append([(clean(str(row["name"])), "bold"), str(row["kind"]), text, (head, "green")])
    Console().table(cells, indent=0)
    return code


# --- du -------------------------------------------------------------------------------------------


def entry_nbytes(store: Store, entry: RunEntry) -> int:
    """Return the size of a checkpoint directory in bytes.

    The manifest has the size if all files are at home. Otherwise the existing files are measured.
    """
    if entry.manifest is not None and entry.manifest.durability == HOME:
        return entry.manifest.index_nbytes + entry.manifest.stored_nbytes
    return directory_nbytes(store.at(entry.name))


def directory_nbytes(store: Store) -> int:
    """Return the size of all files below a directory in bytes. Raises: StoreError."""
    total_nbytes = 0
    for path in store.list(""):
        try:
            total_nbytes += store.nbytes(path)
        except StoreError:
            raise
        except CkptError:
            continue  # A link, a pipe, or a file deleted meanwhile: no size to add.
    return total_nbytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """The space taken by a part of a run or checkpoint.

    Attributes:
        name: the name of the run's directory, or of the checkpoint's field; empty for the rest.
        nbytes: the size of the directory's files, or the stored bytes of the field.
        content_nbytes: the size of the tensors when loaded, in bytes; None without tensors.
        note: a description.
    """

    name: str
    nbytes: int
    content_nbytes: int | None
    note: str


def _measure(arguments: argparse.Namespace) -> int:
    place = open_place(arguments.path)
    total_nbytes = directory_nbytes(place.store)
    uses = _uses_of_run(place) if place.is_run else _uses_of_checkpoint(place)
    rest_nbytes = total_nbytes - sum(use.nbytes for use in uses)
    rest = "records of the run" if place.is_run else "index, parts, headers, and foreign files"
    uses.append(_Use(name="", nbytes=rest_nbytes, content_nbytes=None, note=rest))
    if arguments.json:
        print_json(
            {
                "kind": "run" if place.is_run else "checkpoint",
                "target": place.path,
                "checked": "sizes",
                "nbytes": total_nbytes,
                "uses": [dataclasses.asdict(use) for use in uses],
            }
        )
        return 0
    console = Console()
    rows: list[list[Cell | str]] = []
    for use in uses:
        is_less = use.content_nbytes is not None and use.nbytes < use.content_nbytes
        whole = f"of {bytes_text(use.content_nbytes or 0)}" if is_less else ""
        rows.append(
            [
                bytes_text(use.nbytes),
                (whole, "dim"),
                (clean(use.name), "bold"),
                (clean(use.note), "dim"),
            ]
        )
    rows.append(
        [(bytes_text(total_nbytes), "bold"), "", ("in all", "bold"), (clean(place.path), "dim")]
    )
    console.table(rows, right=(0,), indent=0)
    return 0


def _uses_of_run(place: Place) -> list[_Use]:
    """Return the space of each directory of a run, by the sizes of its files."""
    held = launches_of(list_held(place.store))
    entries = list_checkpoints(place.store, read_run(place.store))
    readers = Counter(one.name for entry in entries for one in entry.references)
    uses = []
    for entry in entries:
        state = state_of(entry, held)
        notes = [] if state == "committed" else [state]
        content_nbytes = None if entry.manifest is None else entry.manifest.nbytes
        if entry.manifest is not None and entry.manifest.profile != "full":
            notes.append("delta")
        if readers[entry.name]:
            count = readers[entry.name]
            notes.append(f"{count_text(count, 'checkpoint')} read{'s' * (count == 1)} from it")
        notes += ["pinned"] if entry.is_pinned else []
        nbytes = directory_nbytes(place.store.at(entry.name))
        uses.append(
            _Use(
                name=entry.name, nbytes=nbytes, content_nbytes=content_nbytes, note=", ".join(notes)
            )
        )
    return uses


def _uses_of_checkpoint(place: Place) -> list[_Use]:
    """Return the space of each field of a checkpoint, by the manifest."""
    manifest = Checkpoint(place.store).manifest
    uses = []
    for field in FIELDS:
        summary = manifest.fields[field]
        if summary.reason is None and summary.tensor_count:
            stored_nbytes = (
                summary.nbytes if summary.stored_nbytes is None else summary.stored_nbytes
            )
            note = count_text(summary.tensor_count, "tensor")
            uses.append(
                _Use(name=field, nbytes=stored_nbytes, content_nbytes=summary.nbytes, note=note)
            )
    return uses

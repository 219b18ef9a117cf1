"""``log``: the checkpoints of a run, newest first, and their lineage.

The command reads records and registers, but no data files of checkpoints. A state shows the
decision about a save; the saved bytes may have changed since. The output mentions this.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from ckptfmt.cli.console import (
    Cell,
    Console,
    bytes_text,
    clean,
    count_text,
    labels_text,
    print_json,
    share_text,
    time_text,
)
from ckptfmt.cli.listing import entry_nbytes, read_launches
from ckptfmt.cli.places import Place, open_run_place
from ckptfmt.commit.waiting import describe_savers, launches_of, list_held
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import Abort, Manifest, Tombstone
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.errors import CkptError, StoreError
from ckptfmt.loop.step_log import read_verdicts
from ckptfmt.run.catalog import state_of
from ckptfmt.run.failures import Decision, read_decisions
from ckptfmt.run.lineage import LostLaunch, RunEntry, iter_lineage, list_checkpoints, read_run
from ckptfmt.run.witness import WitnessRecord

T = TypeVar("T")

_STYLES: Final = {
    "committed": "green",
    "saving": "yellow",
    "unfinished": "yellow",
    "aborted": "dim",
    "retired": "dim",
    "unreadable": "red",
}
_MARKS: Final = {
    "committed": "o",
    "saving": "x",
    "unfinished": "x",
    "aborted": "x",
    "retired": "-",
    "unreadable": "!",
}


def run(arguments: argparse.Namespace) -> int:
    """Print the checkpoints of a run, and return the exit code.

    Returns: 2 if a record can't be read, otherwise 0.
    Raises: StateError(ARGUMENT), IntegrityError(FILE_MISSING), StoreError.
    """
    place = open_run_place(arguments.path)
    history = read_history(place)
    if arguments.json:
        print_json(run_members(place, history))
    else:
        console = Console()
        _print_header(console, place, history)
        _print_checkpoints(console, history)
        _print_launches(console, history)
        _print_decisions(console, history)
        _print_problems(console, history)
        _print_checked(console)
    return 2 if history.problems else 0


def print_summary(console: Console, place: Place, history: History) -> None:
    """Print a summary of a run, for `inspect`."""
    _print_header(console, place, history)
    head = history.head
    if head is not None and head.manifest is not None:
        saved = time_text(head.manifest.saved_unix_s)
        said = head.labels
        labels = labels_text(said.numbers(), said.tags, pinned=head.is_pinned, suspect=said.suspect)
        cells = f"  {_short(head.manifest.digest)}  {saved}{f'  {labels}' if labels else ''}"
        console.line(("head", "dim"), "  ", (head.name, "bold green"), cells)
    else:
        console.line(("head", "dim"), "  nothing to resume from")
    for launch in history.launches[-1:]:
        resume = (
            "from nothing"
            if launch.resume_from is None
            else f"from {clean(launch.resume_from.name)}"
        )
        console.line(
            ("newest", "dim"), f" launch {launch.launch}, {resume}, chosen by {launch.chosen_by}"
        )
    _print_problems(console, history)
    console.line()
    console.line((f"All its checkpoints: ckptfmt log {clean(place.path)}", "dim"))
    console.line(("Only registers were read: validate checks the bytes.", "dim"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The readable records of a run.

    Attributes:
        run: the run's record; None if unreadable.
        records: the records of all launches, ascending, with a `LostLaunch` for each unreadable or
            missing record.
        launches: the launches with a readable record.
        entries: the run's checkpoint directories, newest first.
        lineage: the names of the checkpoints that the newest launch may resume from, best first.
        nbytes: the size of each entry in bytes, by name: the stored bytes by the manifest if all
            files are at home, otherwise the sum of the existing files.
        pending: the names of the savers' holds, listed before the registers were read.
        verdicts: the verdicts on repeated steps, by the number of the launch.
        decisions: the decisions of a healer, by the number of the failed launch.
        problems: the errors of unreadable records.
    """

    run: RunRecord | None
    records: list[Launch | LostLaunch]
    launches: list[Launch]
    entries: list[RunEntry]
    lineage: list[str]
    nbytes: dict[str, int]
    pending: list[str]
    verdicts: dict[int, WitnessRecord]
    decisions: dict[int, Decision]
    problems: list[CkptError]

    @property
    def head(self) -> RunEntry | None:
        """The committed checkpoint that the newest launch would resume from, by the manifests."""
        lineage = iter_lineage(self.records, self.entries)
        return next((entry for entry in lineage if entry.manifest is not None), None)

    def state(self, entry: RunEntry) -> str:
        """Return the state of a checkpoint directory, in a word."""
        return state_of(entry, launches_of(self.pending))

    def parents(self) -> dict[str, str | None]:
        """Return the parent of each checkpoint, by name.

        The parent is the previous checkpoint of the launch, or the checkpoint that the launch
        resumed from.
        """
        resumed = {launch.launch: launch.resume_from for launch in self.launches}
        parents: dict[str, str | None] = {}
        before: dict[int, str] = {}
        for entry in reversed(self.entries):
            resume = resumed.get(entry.launch)
            parents[entry.name] = before.get(
                entry.launch, resume.name if resume is not None else None
            )
            if entry.register is not None and not isinstance(entry.register, Abort):
                before[entry.launch] = entry.name
        return parents


def read_history(place: Place) -> History:
    """Read the records and registers of a run. Raises: StoreError."""
    problems: list[CkptError] = []
    pending = list_held(place.store)
    run = _attempt(problems, read_run, place.store)
    entries = list_checkpoints(place.store, run)
    records, lost = read_launches(place.store, run, entries)
    problems += lost
    entries.sort(key=lambda entry: (-entry.launch, -entry.step))
    return History(
        run=run,
        records=records,
        launches=[record for record in records if isinstance(record, Launch)],
        entries=entries,
        lineage=[entry.name for entry in iter_lineage(records, entries)],
        nbytes={entry.name: entry_nbytes(place.store, entry) for entry in entries},
        pending=pending,
        verdicts=read_verdicts(place.store),
        decisions=read_decisions(place.store),
        problems=problems
        + [
            entry.register.below(entry.name)
            for entry in entries
            if isinstance(entry.register, CkptError)
        ]
        + [entry.labels_error for entry in entries if entry.labels_error],
    )


def _attempt(problems: list[CkptError], read: Callable[..., T], *arguments: object) -> T | None:
    try:
        return read(*arguments)
    except StoreError:
        raise
    except CkptError as error:
        problems.append(error)
        return None


def _short(digest: str) -> str:
    return digest.removeprefix("blake3:")[:12]


# --- JSON -----------------------------------------------------------------------------------------


def run_members(place: Place, history: History) -> dict[str, object]:
    """Return the facts about a run as the members of a JSON object."""
    head = history.head
    parents = history.parents()
    return {
        "kind": "run",
        "target": place.path,
        "run_id": history.run.run_id if history.run is not None else None,
        "checked": "registers",
        "head": head.name if head is not None else None,
        "pending": history.pending,
        "lineage": history.lineage,
        "checkpoints": [
            _entry_members(
                entry,
                history.state(entry),
                history.nbytes[entry.name],
                parents[entry.name],
                history.lineage,
            )
            for entry in history.entries
        ],
        "launches": [
            {
                **dataclasses.asdict(launch),
                "witness": _record_members(history.verdicts.get(launch.launch)),
                "healing": _record_members(history.decisions.get(launch.launch)),
            }
            for launch in reversed(history.launches)
        ],
        "problems": [problem.as_json() for problem in history.problems],
    }


def _record_members(record: WitnessRecord | Decision | None) -> dict[str, object] | None:
    """Return a record about a launch as members; None without a record."""
    if record is None:
        return None
    members = dataclasses.asdict(record)
    return {name: value for name, value in members.items() if name not in ("run_id", "launch")}


def _entry_members(
    entry: RunEntry, state: str, nbytes: int, parent: str | None, lineage: list[str]
) -> dict[str, object]:
    register = entry.register
    manifest = entry.manifest
    return {
        "name": entry.name,
        "step": entry.step,
        "launch": entry.launch,
        "state": state,
        "nbytes": nbytes,
        "saved_unix_s": manifest.saved_unix_s if manifest is not None else None,
        "digest": register.manifest_digest
        if isinstance(register, Tombstone)
        else manifest and manifest.digest,
        "profile": manifest and manifest.profile,
        "stored_nbytes": manifest and manifest.stored_nbytes,
        "durability": manifest and manifest.durability,
        "fields": manifest and _field_members(manifest),
        "metrics": entry.labels.numbers(),
        "tags": entry.labels.tags,
        "suspect": entry.labels.suspect or None,
        "pinned": entry.is_pinned,
        "references": [dataclasses.asdict(reference) for reference in entry.references],
        "reason": register.reason if isinstance(register, Abort) else None,
        "error": register.as_json() if isinstance(register, CkptError) else None,
        "parent": parent,
        "on_lineage": entry.name in lineage,
    }


def _field_members(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Return size and stored bytes of each present field, by name."""
    return {
        name: {
            "nbytes": field.nbytes,
            "stored_nbytes": field.nbytes if field.stored_nbytes is None else field.stored_nbytes,
        }
        for name, field in manifest.fields.items()
        if field.reason is None
    }


# --- text -----------------------------------------------------------------------------------------


def _print_checked(console: Console) -> None:
    console.line()
    console.line(("* on the lineage, o beside it, x uncommitted, - retired", "dim"))
    console.line(("Only registers were read: validate checks the bytes.", "dim"))


def _print_header(console: Console, place: Place, history: History) -> None:
    run_id = history.run.run_id if history.run is not None else "without a record"
    counts = Counter(map(history.state, history.entries))
    states = ", ".join(f"{counts[state]} {state}" for state in _STYLES if counts[state])
    console.line(("run", "dim"), "   ", (clean(place.path), "bold"), (f"  {run_id}", "dim"))
    manifests = [entry.manifest for entry in history.entries if entry.manifest]
    stored_nbytes = sum(manifest.stored_nbytes for manifest in manifests)
    console.line(
        ("has", "dim"),
        f"   {count_text(len(history.launches), 'launch', 'launches')},"
        f" {count_text(len(history.entries), 'checkpoint')}{f': {states}' if states else ''},"
        f" {bytes_text(stored_nbytes)} of tensors",
    )
    if history.pending:
        whose = clean(describe_savers(history.pending))
        console.line(
            ("saving", "yellow"), f" {whose}: a newer checkpoint may be committed at any moment"
        )


def _print_checkpoints(console: Console, history: History) -> None:
    if not history.entries:
        return
    parents = history.parents()
    lineage = set(history.lineage)
    nodes = [
        (
            entry.name,
            parents[entry.name],
            "*" if entry.name in lineage else _MARKS[history.state(entry)],
        )
        for entry in history.entries
    ]
    header = ("", "step", "launch", "state", "tensors", "saved", "digest", "delta", "")
    rows: list[list[Cell | str]] = [[(text, "dim") for text in header]]
    head = history.head
    for entry, lines in zip(history.entries, draw_graph(nodes), strict=True):
        rows += [[(line, "blue"), *[""] * (len(header) - 1)] for line in lines[:-1]]
        on_lineage = entry.name in lineage
        rows.append(
            [(lines[-1], "green" if on_lineage else "blue"), *_entry_cells(entry, history, head)]
        )
    console.line()
    console.table(rows, right=(1, 2, 4), indent=0)


def _entry_cells(entry: RunEntry, history: History, head: RunEntry | None) -> list[Cell | str]:
    state = history.state(entry)
    manifest = entry.manifest
    register = entry.register
    said = entry.labels
    labels = labels_text(said.numbers(), said.tags, pinned=entry.is_pinned, suspect=said.suspect)
    remark = (labels, "yellow" if said.suspect else "cyan")
    if isinstance(register, CkptError):
        remark = (str(register.code), "red")
    elif isinstance(register, Abort):
        remark = (clean(register.reason), "dim")
    digest = (
        register.manifest_digest
        if isinstance(register, Tombstone)
        else manifest.digest
        if manifest
        else ""
    )
    return [
        (str(entry.step), "bold"),
        str(entry.launch),
        (
            f"{state}, head" if entry is head else state,
            f"bold {_STYLES[state]}" if entry is head else _STYLES[state],
        ),
        bytes_text(manifest.stored_nbytes) if manifest is not None else "",
        time_text(manifest.saved_unix_s) if manifest is not None else "",
        (_short(digest), "yellow" if manifest is not None else "dim"),
        _delta_text(manifest) if manifest is not None else "",
        remark,
    ]


def _delta_text(manifest: Manifest) -> str:
    """Return the stored share and the number of references of a delta; "full" for a full one."""
    if manifest.profile == "full":
        return "full" if manifest.durability == HOME else f"full, in caches ({manifest.durability})"
    share = share_text(manifest.stored_nbytes, manifest.nbytes)
    return f"{share}, {count_text(len(manifest.references), 'reference')}"


def _print_launches(console: Console, history: History) -> None:
    if not history.launches:
        return
    rows: list[list[Cell | str]] = [
        [(text, "dim") for text in ("launch", "chosen by", "resumed from", "", "steps done again")]
    ]
    present = {entry.name for entry in history.entries}
    for launch in reversed(history.launches):
        resume = launch.resume_from
        gone = resume is not None and resume.name not in present
        rows.append(
            [
                (str(launch.launch), "bold"),
                (launch.chosen_by, "yellow" if launch.chosen_by == "fallback" else ""),
                (clean(resume.name), "") if resume is not None else ("nothing", "dim"),
                (
                    f"{_short(resume.digest)}{', which is gone' if gone else ''}"
                    if resume is not None
                    else "",
                    "dim",
                ),
                _verdict_cell(history.verdicts.get(launch.launch)),
            ]
        )
    console.line()
    console.table(rows, right=(0,), indent=0)
    for number, verdict in sorted(history.verdicts.items()):
        if verdict.verdict == "refuted":
            console.line()
            console.line(("launch", "red bold"), f" {number} is {clean(verdict.summary)}")


def _verdict_cell(verdict: WitnessRecord | None) -> Cell:
    """Return the verdict on a launch's steps, in two words."""
    if verdict is None or verdict.verdict == "expected":
        return "", "dim"
    if verdict.verdict == "refuted":
        return (
            (
                "refuted at step"
                f" {verdict.first_step if verdict.difference is None else verdict.difference.step}"
            ),
            "red",
        )
    return verdict.summary, "green"


def _print_decisions(console: Console, history: History) -> None:
    for _, decision in sorted(history.decisions.items()):
        console.line()
        console.line(("healer", "yellow bold"), f"  {clean(decision.text)}")
        for sentence in decision.evidence:
            console.line((f"        {clean(sentence)}", "dim"))
        outcome = decision.outcome
        if outcome is None:
            console.line((f"        {clean(decision.next)}", "dim"))
        else:
            console.line((f"        {outcome.cause}", "bold"), f": {clean(outcome.text)}")


def _print_problems(console: Console, history: History) -> None:
    for problem in history.problems:
        console.line()
        console.line(("unreadable", "red bold"), f"  {clean(str(problem))}")


def draw_graph(nodes: Sequence[tuple[str, str | None, str]]) -> list[list[str]]:
    """Return the graph's lines for each node; the last line is drawn before the node's text.

    Args:
        nodes: name, parent's name (None for a root) and mark; each parent follows its children.

    >>> for lines in draw_graph([("d", "a", "*"), ("c", "b", "o"), ("b", "a", "o"), ("a", None,
    ...     "*")]):
    ...     print(lines)
    ['*']
    ['| o']
    ['| o']
    ['|/', '*']
    """
    names = {name for name, _, _ in nodes}
    lanes: list[str] = []  # for each lane, the name of its next node
    drawn = []
    for name, parent, mark in nodes:
        lines = []
        while lanes.count(name) > 1:
            lines.append(_merge(lanes, name))
        if name not in lanes:
            lanes.append(name)
        lane = lanes.index(name)
        lines.append(" ".join(mark if number == lane else "|" for number in range(len(lanes))))
        if parent in names and parent is not None:
            lanes[lane] = parent
        else:
            del lanes[lane]
        names.discard(name)
        drawn.append(lines)
    return drawn


def _merge(lanes: list[str], name: str) -> str:
    """Merge the last lane that leads to `name` into the previous such lane; return the drawn line.

    Lane i is drawn in column 2i. The line crosses the lanes between both; the lanes to the right
    move a lane to the left.
    """
    target, last = [number for number, leads_to in enumerate(lanes) if leads_to == name][-2:]
    line = [" "] * (2 * len(lanes))
    for number in range(len(lanes)):
        if number < last:
            line[2 * number] = "|"
            line[2 * number + 1] = "_" if target <= number < last - 1 else " "
        else:
            line[2 * number - 1] = "/"
    del lanes[last]
    return "".join(line).rstrip()

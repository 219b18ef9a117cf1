"""``inspect``: the contents of a checkpoint, or of a run and its newest checkpoint.

The output is text that fits a screen, complete text with ``--all``, or JSON. The command reads the
manifest, the index, and the parts with values to be shown, but no bytes of tensors. Unreadable
contents are named in their place, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from ckptfmt.cli.commands import suggest
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
from ckptfmt.cli.places import Place, check_field, checkpoint_path, open_bases, open_place
from ckptfmt.cli.views import TensorRow, dump_view, group_tensors, iter_lines, list_tensors
from ckptfmt.data.cursor import KIND as CURSOR_KIND
from ckptfmt.data.cursor import parse_cursor
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.labels import Labels
from ckptfmt.documents.manifest import FIELDS, FieldSummary, Reference, parse_checkpoint_name
from ckptfmt.errors import CkptError, Code, StoreError, err
from ckptfmt.features import ENCODINGS, reader_profiles
from ckptfmt.read.files import ReplacedError, read_anew
from ckptfmt.read.in_caches import find_elsewhere
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.labelling import list_newest_labels, read_labels
from ckptfmt.state import INIT_FROM
from ckptfmt.store import Store, open_store, split_path

#: The fields with small values of interest to a reader.
_CONTEXT: Final = ("data", "config", "topology", "provenance")
_LEAF_LINES: Final = 60
#: The fields shown on a single screen, the lines of each of their values, and the rows of tensors.
_SCREEN_FIELDS: Final = ("config",)
_SCREEN_LINES: Final = 10
_SCREEN_TENSORS: Final = 8
#: The greatest exact count of hidden lines.
_COUNTED_LINES: Final = 1000
_FILE_LINES: Final = 24
#: The greatest number of rows of like tensors in a field, shown without a pattern.
_TENSOR_LINES: Final = 10_000
#: The greatest number of boxes, over all tensors, that JSON lists. Tensors share shardings, so a
#: small index may have billions of boxes.
_LISTED_BOXES: Final = 200_000


def run(arguments: argparse.Namespace) -> int:
    """Print the contents of a checkpoint or run, and return the exit code.

    Raises: IntegrityError(NOT_COMMITTED and others), FormatError, StateError(ARGUMENT), StoreError.
    """
    check_field(arguments.field)
    path = arguments.path
    if arguments.checkpoint is not None:
        path = checkpoint_path(path, arguments.checkpoint)
    place = open_place(path)
    if place.is_run:
        return read_anew(lambda: _show_run(place, arguments))
    return read_anew(lambda: _show_checkpoint(place.store, path, arguments))


def _show_checkpoint(store: Store, path: str, arguments: argparse.Namespace) -> int:
    """Print a checkpoint, and return the exit code. Raises: ReplacedError, before any output."""
    view = _open_view(store, path, arguments)
    members = None
    console = Console(holds=True)
    if arguments.json:
        members = _members(view)
    else:
        if view.shows_everything:
            _print_header(view, console)
        _print_text(view, console)
    view.check_current()
    if members is not None:
        print_json(members)
    console.release()
    return 2 if view.problems else 0


def _open_view(store: Store, path: str, arguments: argparse.Namespace) -> _View:
    return _View(
        path=path,
        checkpoint=Checkpoint(store, bases=open_bases(arguments.bases)),
        pattern=arguments.tensors,
        field=arguments.field,
        is_whole=arguments.all,
    )


def _show_run(place: Place, arguments: argparse.Namespace) -> int:
    """Print a summary of a run, then the checkpoint it goes on from, and return the exit code.

    Raises: ReplacedError, before any output.
    """
    from ckptfmt.cli.log import print_summary, read_history, run_members

    history = read_history(place)
    head = history.head
    view = None
    failure = None
    if head is not None:
        try:
            view = _open_view(
                place.store.at(head.name), f"{place.path.rstrip('/')}/{head.name}", arguments
            )
        except (StoreError, ReplacedError):
            raise
        except CkptError as error:
            failure = error.below(head.name)
    members = None
    console = Console(holds=True)
    if arguments.json:
        checkpoint = None if view is None else _members(view)
        problem = None if failure is None else failure.as_json()
        members = {
            **run_members(place, history),
            "checkpoint": checkpoint,
            "checkpoint_error": problem,
        }
    else:
        if arguments.tensors is None and arguments.field is None:
            print_summary(console, place, history)
        if view is not None:
            _print_text(view, console)
        if failure is not None:
            console.line()
            console.line(("unreadable", "red bold"), f"  {clean(str(failure))}")
    if view is not None:
        view.check_current()
    if members is not None:
        print_json(members)
    console.release()
    is_damaged = history.problems or failure is not None or (view is not None and view.problems)
    return 2 if is_damaged else 0


@dataclasses.dataclass(kw_only=True)
class _View:
    """The requested contents of a checkpoint, and the errors of the unreadable contents.

    Attributes:
        path: the path of the checkpoint, as given.
        checkpoint: the checkpoint.
        pattern: the shell pattern of the names of tensors to list; None for rows of like tensors.
        field: the only field to show, completely; None for all fields.
        is_whole: whether to show all contents, regardless of the length.
        problems: the errors of unreadable contents.
    """

    path: str
    checkpoint: Checkpoint
    pattern: str | None
    field: str | None
    is_whole: bool = False
    problems: list[CkptError] = dataclasses.field(default_factory=list)

    @property
    def shows_everything(self) -> bool:
        """Whether all fields are requested."""
        return self.pattern is None and self.field is None

    @functools.cached_property
    def labels(self) -> tuple[Labels, bool]:
        """The newest metrics and tags, `suspect`, and whether it is pinned. Spec: REQ-RUN-025."""
        manifest = self.checkpoint.manifest
        parent, name = split_path(self.path)
        if manifest.origin.run_id is None or parse_checkpoint_name(name) is None:
            return manifest.labels, False
        run = open_store(parent, writable=False)
        number = self.attempt({}, list_newest_labels, run).get(name)
        if number is None:
            return manifest.labels, False
        record = read_labels(run, name, number, manifest.origin.run_id)
        if isinstance(record, CkptError):  # an unreadable record counts as a pin (REQ-CMT-040)
            self.problems.append(record)
            return manifest.labels, True
        return dataclasses.replace(record.labels, suspect=manifest.labels.suspect), record.pinned

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields to show."""
        return FIELDS if self.field is None else (self.field,)

    def attempt(self, otherwise: Any, read: Callable[..., Any], *arguments: object) -> Any:
        """Return the result of `read`; after an error, record it once and return `otherwise`."""
        try:
            return read(*arguments)
        except CkptError as error:
            if str(error) not in map(str, self.problems):
                self.problems.append(error)
            return otherwise

    def check_current(self) -> None:
        """Raise ReplacedError if a read failed and the checkpoint was replaced meanwhile."""
        if self.problems:
            self.checkpoint.check_current()

    def tensors(self) -> list[IndexTensor]:
        """Return the tensors to show."""
        pattern = self.pattern or "*"
        return [
            tensor
            for tensor in self.checkpoint.index.tensors
            if tensor.field in self.fields
            and any(fnmatch.fnmatchcase(name, pattern) for name in (tensor.name, *tensor.aliases))
        ]

    def files(self) -> list[tuple[str, int]]:
        """Return path and size in bytes of every existing file."""
        paths: list[str] = self.attempt([], self.checkpoint.store.list, "")
        sizes = [(path, self.attempt(None, self._find_nbytes, path)) for path in paths]
        return [(path, nbytes) for path, nbytes in sizes if nbytes is not None]

    def _find_nbytes(self, path: str) -> int | None:
        """Return the size of a file in bytes; None if the file was deleted after its listing."""
        try:
            return self.checkpoint.store.nbytes(path)
        except CkptError as error:
            if error.code != Code.FILE_MISSING:
                raise
            return None

    def references(self) -> list[tuple[Reference, str | None, str | None]]:
        """Return the references of the checkpoint, newest first, each with place and error code.

        The place is None for a reference that can't be found; otherwise the error code is None.
        """
        found: list[tuple[Reference, str | None, str | None]] = []
        for reference in sorted(
            self.checkpoint.manifest.references, key=lambda one: one.name, reverse=True
        ):
            try:
                found.append((reference, self.checkpoint.closure.find(reference).name, None))
            except CkptError as error:
                found.append((reference, None, str(error.code)))
        return found

    def frozen_base(self) -> dict[str, Any] | None:
        """Return the recorded location of the frozen base, and the amount taken from the base."""
        frozen = self.checkpoint.frozen.values()
        if not frozen:
            return None
        return {
            "location": self.checkpoint.frozen_location,
            "tensor_count": len(frozen),
            "nbytes": sum(one.nbytes for one in frozen),
        }

    def encodings(self) -> dict[str, int] | None:
        """Return the number of a delta's blocks by encoding.

        Returns: None for a full checkpoint: all blocks are raw.
        """
        if self.checkpoint.manifest.profile == "full":
            return None
        counts: Counter[str] = Counter()
        for number in range(len(self.checkpoint.index.parts)):
            part = self.attempt(None, self.checkpoint.read_part, number)
            if part is not None:
                extents = part.holdings.extents
                for encoding, blocks in zip(
                    extents.encoding.tolist(), extents.block_count.tolist(), strict=True
                ):
                    counts[ENCODINGS[encoding]] += blocks
        return {name: counts[name] for name in ENCODINGS if name in counts}

    def leaf(self, key: tuple[str, str, str]) -> tuple[bool, Any]:
        """Return whether a value is readable, and the value."""
        absent = object()
        value = self.attempt(absent, self.checkpoint.leaf, *key)
        return value is not absent, value

    @functools.cached_property
    def cursor(self) -> dict[Any, Any] | None:
        """The tree of the data cursor; None if the data field has no cursor."""
        for key in self.checkpoint.leaves:
            if key[0] == "data":
                _, value = self.leaf(key)
                if isinstance(value, dict) and value.get("kind") == CURSOR_KIND:
                    return value
        return None

    def claim(self) -> tuple[str, list[str]]:
        """Return the highest claim of a load of this checkpoint, and the reasons that lower it."""
        fields = self.checkpoint.manifest.fields
        lowered_by = [
            f"{field} is absent: {fields[field].reason}" for field in FIELDS if fields[field].reason
        ]
        if not lowered_by:
            return "T1", lowered_by
        if self.cursor is not None:
            return "S1", lowered_by
        if fields["data"].reason is None:
            lowered_by.append("data has no cursor")
        return "S0", lowered_by


# --- JSON -----------------------------------------------------------------------------------------


def _members(view: _View) -> dict[str, object]:
    """Return the requested contents as the members of a JSON object."""
    checkpoint = view.checkpoint
    manifest = view.checkpoint.manifest
    files = view.files()
    claim, lowered_by = view.claim()
    labels, pinned = view.labels
    members: dict[str, object] = {
        "kind": "checkpoint",
        "target": view.path,
        "checked": "documents",
        "digest": manifest.digest,
        **manifest.origin.as_dict(),
        "saved_unix_s": manifest.saved_unix_s,
        "saved": time_text(manifest.saved_unix_s),
        "profile": manifest.profile,
        "reader_profiles": reader_profiles(manifest.features),
        "metrics": labels.numbers(),
        "tags": labels.tags,
        "suspect": labels.suspect or None,
        "pinned": pinned,
        "durability": manifest.durability,
        "references": [
            {**dataclasses.asdict(one), "path": path, "reason": why}
            for one, path, why in view.references()
        ],
        "frozen_base": view.frozen_base(),
        "encodings": view.encodings(),
        "stored_nbytes": manifest.stored_nbytes,
        "nbytes": sum(nbytes for _, nbytes in files),
        "fields": {field: manifest.fields[field].as_dict() for field in view.fields},
        "claim": {"at_most": claim, "lowered_by": lowered_by},
        "files": [{"name": name, "nbytes": nbytes} for name, nbytes in files],
        "tensors": _list_members(view.tensors()),
    }
    if view.pattern is None:
        members["streams"] = [
            {
                **dataclasses.asdict(stream),
                "state": dump_view(view.attempt((None, None), checkpoint.stream, *key)[1]),
            }
            for key, stream in checkpoint.streams.items()
            if "rng" in view.fields
        ]
        members["leaves"] = [
            {
                **dataclasses.asdict(leaf),
                "value": dump_view(view.attempt(None, checkpoint.leaf, *key)),
            }
            for key, leaf in checkpoint.leaves.items()
            if leaf.field in view.fields
        ]
    return {**members, "problems": [problem.as_json() for problem in view.problems]}


def _list_members(tensors: list[IndexTensor]) -> list[dict[str, object]]:
    with_boxes = sum(len(tensor.sharding) for tensor in tensors) <= _LISTED_BOXES
    return [_tensor_members(tensor, with_boxes=with_boxes) for tensor in tensors]


def _tensor_members(tensor: IndexTensor, *, with_boxes: bool) -> dict[str, object]:
    return {
        "field": tensor.field,
        "name": tensor.name,
        "scope": tensor.scope,
        "dtype": tensor.dtype,
        "global_shape": list(tensor.global_shape),
        "nbytes": tensor.nbytes,
        "storage": tensor.storage,
        "aliases": list(tensor.aliases),
        "box_count": len(tensor.sharding),
        "boxes": [
            {"begin": list(box.begin), "box_shape": list(box.shape), "part": part}
            for box, part in tensor.sharding
        ]
        if with_boxes
        else None,
    }


# --- text -----------------------------------------------------------------------------------------


def _print_text(view: _View, console: Console) -> None:
    if view.pattern is not None:
        tensors = view.tensors()
        if not tensors and view.pattern != "*":
            raise _no_tensor(view, view.pattern)
        _print_tensors(console, list_tensors(tensors))
        console.line((count_text(len(tensors), "tensor"), "dim"))
        return
    if view.shows_everything:
        _print_fields(view, console)
        _print_references(view, console)
        _print_facts(view, console)
        if view.is_whole:
            _print_files(console, view.files())
    is_screen = view.shows_everything and not view.is_whole
    tensors = [one for one in view.tensors() if not is_screen or one.field == "weights"]
    _print_tensors(console, group_tensors(tensors), _SCREEN_TENSORS if is_screen else _TENSOR_LINES)
    if view.field == "rng":
        _print_streams(view, console)
    shown = _SCREEN_FIELDS if is_screen else _CONTEXT
    for key in view.checkpoint.leaves:
        if key[0] == view.field or (view.field is None and key[0] in shown):
            _print_leaf(
                view,
                console,
                key,
                _SCREEN_LINES if is_screen else None if view.field else _LEAF_LINES,
            )
    if is_screen:
        console.line()
        rest = (
            "All tensors, files, data, topology and provenance: --all; one field and all of"
            " it: --field FIELD."
        )
        console.line((rest, "dim"))
    if view.field is None:
        if not is_screen:
            console.line()
        console.line(("No tensor's bytes were read: validate checks them.", "dim"))
    for problem in view.problems:
        console.line()
        console.line(("unreadable", "red bold"), f"  {clean(str(problem))}")


def _no_tensor(view: _View, pattern: str) -> Exception:
    """Return the error for a pattern without a matching name. JSON has an empty list instead."""
    tensors = [tensor for tensor in view.checkpoint.index.tensors if tensor.field in view.fields]
    near = suggest(pattern, [name for tensor in tensors for name in (tensor.name, *tensor.aliases)])
    remedy = (
        f"Did you mean {near}?"
        if near
        else "`--tensors` alone lists all; a * stands for any characters."
    )
    return err(Code.ARGUMENT, f"no tensor is called {pattern!r}", where="--tensors", remedy=remedy)


def _print_header(view: _View, console: Console) -> None:
    manifest = view.checkpoint.manifest
    origin = manifest.origin
    launch = (
        "outside of a run"
        if origin.launch is None
        else f"launch {origin.launch} of run {origin.run_id}"
    )
    nbytes = sum(nbytes for _, nbytes in view.files())
    size = f"{bytes_text(nbytes)} ({nbytes} bytes)"
    absent = sum(map(len, view.attempt({}, find_elsewhere, view.checkpoint).values()))
    durability = manifest.durability + (
        f", {count_text(absent, 'file')} in caches and not at home" if absent else ""
    )
    if manifest.profile == "delta":
        stored = manifest.stored_nbytes
        whole = manifest.nbytes
        size += (
            f", {bytes_text(stored)} of tensors: {share_text(stored, whole)} of their"
            f" {bytes_text(whole)}"
        )
    form = manifest.profile
    form += f", {count_text(len(manifest.references), 'reference')}" if manifest.references else ""
    writers = count_text(origin.writer_count, "writer")
    labels, pinned = view.labels
    rows: list[tuple[Cell, Cell | str]] = [
        (("checkpoint", "dim"), (clean(view.path), "bold")),
        (("step", "dim"), (str(origin.step), "bold green")),
        (("saved by", "dim"), f"{launch}, attempt {origin.attempt}, {writers}"),
        (("saved at", "dim"), f"{time_text(manifest.saved_unix_s)}, by the clock of writer 0"),
        (("digest", "dim"), (manifest.digest, "yellow")),
        (("size", "dim"), size),
        (("profile", "dim"), f"{form}, blocks of {bytes_text(origin.block_nbytes)}"),
        (("readers", "dim"), f"of {', '.join(reader_profiles(manifest.features))}"),
        *([(("durability", "dim"), durability)] if manifest.durability != HOME else []),
    ]
    if text := labels_text(labels.numbers(), labels.tags, pinned=pinned, suspect=labels.suspect):
        rows.append((("labels", "dim"), (text, "cyan")))
    console.table(rows, indent=0, cut=False)  # a digest must be complete for copying


def _short_digest(digest: str) -> str:
    return digest.removeprefix("blake3:")[:12]


def _print_fields(view: _View, console: Console) -> None:
    console.title("fields")
    rows: list[list[Cell | str]] = []
    for field in FIELDS:
        summary = view.checkpoint.manifest.fields[field]
        if summary.reason is not None:
            rows.append(
                [(field, "dim"), "", "", "", (f"absent: {clean(summary.reason)}", "yellow")]
            )
            continue
        others = (
            (summary.stream_count, "stream", "streams"), (summary.leaf_count, "value", "values"),
        )  # fmt: skip
        rows.append(
            [
                (field, "bold"),
                count_text(summary.tensor_count, "tensor") if summary.tensor_count else "",
                bytes_text(summary.nbytes) if summary.tensor_count else "",
                (_stored_text(summary), "cyan"),
                ", ".join(count_text(count, *noun) for count, *noun in others if count)
                or ("" if summary.tensor_count else ("empty", "dim")),
            ]
        )
    console.table(rows, right=(1, 2, 3))


def _stored_text(summary: FieldSummary) -> str:
    """Return the bytes that a delta stores of a field; "" for a full checkpoint."""
    if summary.stored_nbytes is None or not summary.tensor_count:
        return ""
    return (
        f"{bytes_text(summary.stored_nbytes)} stored,"
        f" {share_text(summary.stored_nbytes, summary.nbytes)}"
    )


def _print_references(view: _View, console: Console) -> None:
    """Print a delta's references, each with its place or an error code, and the frozen base."""
    references = view.references()
    rows = [
        [
            (clean(reference.name), "bold"),
            (_short_digest(reference.digest), "yellow"),
            (clean(path), "dim") if path is not None else (reason or "", "red"),
        ]
        for reference, path, reason in references
    ]
    frozen = view.frozen_base()
    if frozen is not None:
        held = count_text(frozen["tensor_count"], "tensor")
        text = f"{held}, {bytes_text(frozen['nbytes'])}"
        rows.append([("frozen base", "bold"), (text, "yellow"), (clean(frozen["location"]), "dim")])
    if rows:
        console.title("reads from")
        console.table(rows)


def _print_facts(view: _View, console: Console) -> None:
    """Print the facts that determine how exactly a run can resume from the checkpoint."""
    claim, lowered_by = view.claim()
    meaning = {
        "T1": "the same layout goes on bit for bit", "S1": "each sample once", "S0": ("the same"
        " bytes"
        " in"
        " any layout")
    }[claim]  # fmt: skip
    console.title("what it can resume as")
    style = "green" if claim == "T1" else ""
    rows: list[list[Cell | str]] = [[("claim", "dim"), (f"{claim} at most: {meaning}", style)]]
    rows += [[("", ""), (clean(reason), "yellow")] for reason in lowered_by]
    cursor = view.cursor
    data = (
        "no cursor: another number of workers can't take it over"
        if cursor is None
        else _cursor_text(cursor)
    )
    if view.checkpoint.manifest.fields["data"].reason is None:
        rows.append([("data", "dim"), data])
    workers = {scope for _, scope in view.checkpoint.streams} | {
        t.scope for t in view.checkpoint.index.tensors
    }
    workers.discard("global")
    if workers:
        rows.append(
            [
                ("workers", "dim"),
                f"{count_text(len(workers), 'logical worker')} with state of its own",
            ]
        )
    console.table(rows)
    begun: Any = view.attempt(None, view.checkpoint.provenance.get, INIT_FROM)
    if isinstance(begun, dict):
        only = "" if begun.get("only") is None else f", only {begun['only']}"
        text = f"{begun.get('path')}: step {begun.get('step')}, {begun.get('digest')}{only}"
        console.line(("  the run began from ", "dim"), clean(text))


def _cursor_text(tree: dict[Any, Any]) -> str:
    try:
        cursor = parse_cursor(tree)
    except CkptError as error:
        return f"a cursor that can't be used: {clean(str(error))}"
    commit = cursor.commit
    source = cursor.sources[0]
    left_out = f"; {count_text(len(cursor.skips), 'skip')}" if cursor.skips else ""
    steps = (
        f"{count_text(cursor.ledger.count, 'sample')} consumed in"
        f" {count_text(commit.step, 'step')}: "
    )
    if cursor.mixture is None:
        # With skips, or a tail other than carry, the positions of an epoch don't end at n.
        is_plain = cursor.plan.tail == "carry" and not cursor.skips
        position = f"epoch {commit.epoch} (from 0), position {commit.pos_in_epoch}"
        return f"{steps}{position}" + (f" of {source.n}" if is_plain else left_out)
    return steps + ", ".join(f"{one.pos} of {clean(one.id)}" for one in cursor.sources) + left_out


def _print_files(console: Console, files: list[tuple[str, int]]) -> None:
    console.title("files")
    if len(files) <= _FILE_LINES:
        console.table([[bytes_text(nbytes), clean(name)] for name, nbytes in files], right=(0,))
        return
    kinds: dict[str, list[int]] = {}
    for name, nbytes in files:
        folder, _, last = name.rpartition("/")
        kinds.setdefault(f"{folder}/" if folder else last.partition("-")[0], []).append(nbytes)
    console.table(
        [
            [bytes_text(sum(sizes)), count_text(len(sizes), "file"), clean(kind)]
            for kind, sizes in kinds.items()
        ],
        right=(0, 1),
    )


def _print_tensors(console: Console, rows: list[TensorRow], most: int | None = None) -> None:
    """Print the tensors by field, up to `most` rows for each field."""
    for field, of_field in itertools.groupby(rows, key=lambda row: row.tensors[0].field):
        listed = list(of_field)
        console.title(f"{field} tensors")
        console.table([_tensor_cells(row) for row in listed[:most]], right=(1, 4))
        if most is not None and len(listed) > most:
            console.line(
                (f"  and {count_text(len(listed) - most, 'row')} more: --tensors lists each", "dim")
            )


def _tensor_cells(row: TensorRow) -> list[Cell | str]:
    first = row.tensors[0]
    count = len(row.tensors)
    remarks = [row.cut]
    remarks += [row.scope] if row.scope != "global" else []
    remarks += [first.storage] if first.storage != "persistent" else []
    if first.aliases:
        remarks.append(
            "also " + ", ".join(map(clean, first.aliases)) if count == 1 else "with other names"
        )
    return [
        (clean(row.name), "bold"),
        (f"x{count}" if count > 1 else "", "dim"),
        (first.dtype, "cyan"),
        str(list(first.global_shape)),
        bytes_text(row.nbytes),
        (", ".join(filter(None, remarks)), "dim"),
    ]


def _print_streams(view: _View, console: Console) -> None:
    console.title("random-number streams")
    streams = view.checkpoint.streams.values()
    console.table(
        [
            [(clean(stream.name), "bold"), stream.scope, (clean(stream.kind), "cyan")]
            for stream in streams
        ]
    )


def _print_leaf(
    view: _View, console: Console, key: tuple[str, str, str], limit: int | None
) -> None:
    field, name, scope = key
    readable, value = view.leaf(key)
    if not readable:
        return
    console.title(clean(" ".join(filter(None, (field, name, scope if scope != "global" else "")))))
    lines = iter_lines(value)
    for depth, text, item in itertools.islice(lines, limit):
        console.line("  " * (depth + 1), (text, "cyan"), f"  {item}" if text else item)
    rest = sum(1 for _ in itertools.islice(lines, _COUNTED_LINES + 1))
    if rest:
        count = (
            count_text(rest, "line") if rest <= _COUNTED_LINES else f"over {_COUNTED_LINES} lines"
        )
        console.line((f"  ... and {count} more: --field {field} shows all", "dim"))

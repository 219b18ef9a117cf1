"""The HTML page of `report`: a single file with drawings, style and script, without network access.

The page is complete without its script; the script shows tooltips without the browser's delay. A
content security policy allows only this style and this script.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ckptfmt.cli.console import bytes_text, count_text, share_text, shorten, time_text
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import FIELDS
from ckptfmt_tools.cli.goodput_table import goodput_text, time_rows
from ckptfmt_tools.cli.waste import seconds_text
from ckptfmt_tools.report.charts import (
    draw_divergence,
    draw_lines,
    draw_pieces,
    draw_sizes,
    draw_timeline,
    draw_tree_map,
    draw_writers,
    launch_text,
    text_of,
)
from ckptfmt_tools.report.divergence import divergence_text
from ckptfmt_tools.report.run_picture import (
    NewestFacts,
    RunPicture,
    SaveFacts,
    WriterFacts,
    durations_of,
)

#: The greatest number of charts of metrics, and of rows of a table.
_METRICS: Final = 12
_ROWS: Final = 2000
_MARKED_ROWS: Final = 60
#: The greatest number of bars of writers, or of groups of neighbouring writers.
_WRITER_ROWS: Final = 48
_TIME_UNITS: Final = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
#: The greatest length of a text from the run in a table, in characters.
_TEXT_LENGTH: Final = 160

_STYLE: Final = """
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; color: #1c2430; background: #fff;
  max-width: 960px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 20px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 30px 0 6px; border-top: 1px solid #d4d9e0; padding-top: 12px; }
h3 { font-size: 14px; margin: 14px 0 2px; overflow-wrap: anywhere; }
p { margin: 4px 0 8px; max-width: 80ch; overflow-wrap: anywhere; }
.note, .tick { color: #5a6675; fill: #5a6675; }
.note { font-size: 13px; }
.bad { color: #a3201d; }
svg { display: block; max-width: 100%; height: auto; fill: #1c2430;
  font: 11px system-ui, "DejaVu Sans", sans-serif; }
svg text { pointer-events: none; }
svg .strong { font-weight: 600; }
.grid { stroke: #e6eaef; } .axis { stroke: #9aa5b1; }
.lane { stroke: #b3bcc7; stroke-width: 3; } .lane.on { stroke: #2f7d4f; }
.branch { stroke: #2f7d4f; stroke-width: 1.5; stroke-dasharray: 2 2; }
.back { fill: none; stroke: #c2571a; stroke-width: 1.5; stroke-dasharray: 5 3; }
.mark { fill: #8d98a5; stroke: #fff; stroke-width: 1; } .mark.on { fill: #2f7d4f; }
.mark.retired { stroke: #8d98a5; stroke-width: 1.5; }
.mark.saving { fill: #fff; stroke: #b07d00; stroke-width: 2; }
.mark.unfinished, .mark.aborted, .mark.unreadable { fill: none; stroke: #a3201d; stroke-width: 2; }
.mark.aborted { stroke: #c2571a; }
.head { fill: none; stroke: #1c2430; stroke-width: 1.5; } .label { fill: #3b5fb0; }
.whole { fill: #e6eaef; } .full { fill: #3b5fb0; } .delta { fill: #2f9e8f; } .off { opacity: 0.45; }
.line { fill: none; stroke-width: 1.5; } .line.on { stroke: #2f7d4f; } .dot.on { fill: #2f7d4f; }
.dot.off { fill: #8d98a5; opacity: 1; }
.line.launch { stroke: #3b5fb0; } .dot.launch { fill: #3b5fb0; }
.cell { stroke: #fff; stroke-width: 1; } .piece, .share { stroke: #fff; stroke-width: 0.5; }
.field-weights { fill: #a9c7ee; } .field-optimizer { fill: #f6cf9c; } .field-rng { fill: #d9c4ec; }
.field-data { fill: #b5e0c3; } .field-config, .field-topology, .field-provenance { fill: #d4d9e0; }
.cell.depth-0 { fill-opacity: 0.45; } .cell.depth-1 { fill-opacity: 0.7; }
.writer-0 { fill: #a9c7ee; } .writer-1 { fill: #f6cf9c; } .writer-2 { fill: #b5e0c3; }
.writer-3 { fill: #f2b8b5; }
.writer-4 { fill: #d9c4ec; } .writer-5 { fill: #e6d8a2; } .writer-6 { fill: #b8dde6; }
.writer-7 { fill: #f4c2dd; }
.writer-8 { fill: #d4d9e0; } .writer-9 { fill: #cfe39b; }
.same { fill: #eef1f4; } .far-0 { fill: #f7dfa5; } .far-1 { fill: #f0b56a; }
.far-2 { fill: #dd7c45; }
.far-3 { fill: #b9432f; } .far-4 { fill: #7a1621; }
.key { display: inline-block; margin: 0 16px 4px 0; white-space: nowrap; font-size: 13px; }
.key svg { display: inline-block; vertical-align: -3px; margin-right: 5px; }
table { border-collapse: collapse; font-size: 13px; margin: 6px 0; }
th, td { text-align: left; padding: 2px 12px 2px 0; vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; border-bottom: 1px solid #9aa5b1; white-space: nowrap; }
td.number, th.number { text-align: right; }
summary { cursor: pointer; margin: 6px 0; }
#tip { position: fixed; background: #1c2430; color: #fff; padding: 3px 8px; border-radius: 3px;
  max-width: 60ch; font-size: 12px; pointer-events: none; overflow-wrap: anywhere; }
@media print {
  body { margin: 0; padding: 0; max-width: none; font-size: 11pt; }
  #tip, details:not([open]) { display: none; }
  svg, h2, h3, tr { break-inside: avoid; } h2, h3, p:has(+ svg) { break-after: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""

_SCRIPT: Final = """
"use strict";
const tip = document.body.appendChild(document.createElement("div"));
tip.id = "tip";
tip.hidden = true;
document.addEventListener("pointerover", (event) => {
  const shown = event.target.closest("svg [data-tip], svg :has(> title)");
  tip.hidden = shown === null;
  if (shown === null) return;
  const title = shown.querySelector(":scope > title");
  if (title !== null) {  // or the browser shows it once more
    shown.dataset.tip = title.textContent;
    title.remove();
  }
  tip.textContent = shown.dataset.tip;
});
document.addEventListener("pointermove", (event) => {
  if (tip.hidden) return;
  const room = document.documentElement;
  const left = Math.min(event.clientX + 12, room.clientWidth - tip.offsetWidth - 4);
  const top = Math.min(event.clientY + 14, room.clientHeight - tip.offsetHeight - 4);
  tip.style.left = Math.max(0, left) + "px";
  tip.style.top = Math.max(0, top) + "px";
});
"""


def _source_of(text: str) -> str:
    """Return the source expression of a style or script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def make_page(picture: RunPicture) -> str:
    """Return the HTML page of a run."""
    policy = f"default-src 'none'; style-src {_source_of(_STYLE)}; script-src {_source_of(_SCRIPT)}"
    sections = (
        _summary(picture),
        _problems(picture),
        _divergence(picture),
        _launches(picture),
        _sizes(picture),
        _tensors(picture),
        _goodput(picture),
        _durations(picture),
        _metrics(picture),
        _checkpoints(picture),
    )
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text_of(shorten(picture.target, _TEXT_LENGTH))} - ckptfmt report</title>",
            f"<style>{_STYLE}</style></head><body>\n",
            *itertools.chain.from_iterable(sections),
            f"<script>{_SCRIPT}</script></body></html>\n",
        )
    )


def _paragraph(text: str, style: str = "") -> str:
    return f'<p class="{style}">{text_of(text)}</p>\n' if text else ""


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the pieces of a table; the columns in `numbers` are aligned to the right."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        styles = ('class="number"' if column in numbers else "" for column in range(len(texts)))
        return "".join(
            f"<{tag} {style}>{text_of(shorten(text, _TEXT_LENGTH))}</{tag}>"
            for text, style in zip(texts, styles, strict=True)
        )

    yield f"<table><thead><tr>{cells('th', header)}</tr></thead><tbody>\n"
    for row in rows:
        yield f"<tr>{cells('td', row)}</tr>\n"
    yield "</tbody></table>\n"


def _keys(*keys: tuple[str, str]) -> str:
    """Return a legend from pairs of an SVG drawing (16 by 16 units) and its text."""
    return "".join(
        f'<span class="key"><svg viewBox="0 0 16 16" width="16" height="16">{drawing}</svg>'
        f"{text_of(text)}</span>"
        for drawing, text in keys
    )


def _square(style: str) -> str:
    return f'<rect x="2" y="2" width="12" height="12" class="{style}"/>'


# --- sections -------------------------------------------------------------------------------------


def _summary(picture: RunPicture) -> Iterator[str]:
    states = Counter(save.state for save in picture.saves)
    yield f"<h1>{text_of(picture.target)}</h1>\n"
    yield _paragraph(f"run {picture.run_id or 'without a record that can be read'}", "note")
    counted = ", ".join(f"{count} {state}" for state, count in states.most_common())
    checkpoints = count_text(len(picture.saves), "checkpoint")
    launches = count_text(len(picture.launches), "launch", "launches")
    yield _paragraph(f"{launches}, {checkpoints}{f': {counted}' if counted else ''}.")
    head = next((save for save in picture.saves if save.is_head), None)
    if head is not None and head.saved_unix_s is not None:
        yield _paragraph(f"The run goes on from {head.name}, saved {time_text(head.saved_unix_s)}.")
    else:
        yield _paragraph("There is no checkpoint to go on from.")
    if picture.pending:
        savers = count_text(len(picture.pending), "saver")
        yield _paragraph(
            f"{savers} had a save in hand: a newer checkpoint may be committed at any moment."
        )
    blocks = "" if picture.divergence is None else ", and the blocks in which the two runs differ,"
    yield _paragraph(
        f"Only registers, records and the index of the newest checkpoint{blocks} were read: ckptfmt"
        f" validate checks the"
        " bytes.",
        "note",
    )


def _problems(picture: RunPicture) -> Iterator[str]:
    if picture.problems:
        yield '<h2 id="problems">What can\'t be read</h2>\n'
        for problem in picture.problems[:_MARKED_ROWS]:
            yield _paragraph(shorten(str(problem), 500), "bad")
        if len(picture.problems) > _MARKED_ROWS:
            yield _paragraph(
                f"And {len(picture.problems) - _MARKED_ROWS} more: ckptfmt log names them.", "bad"
            )


def _divergence(picture: RunPicture) -> Iterator[str]:
    found = picture.divergence
    if found is None:
        return
    yield '<h2 id="divergence">Divergence</h2>\n'
    for problem in found.problems[:_MARKED_ROWS]:
        yield _paragraph(shorten(str(problem), 500), "bad")
    yield _paragraph(divergence_text(found))
    if not found.steps:
        return
    yield _keys(
        ('<rect x="2" y="2" width="12" height="12" class="same"/>', "the same"),
        *(
            (_square(f"far far-{number}"), text)
            for number, text in enumerate(
                ("below 1e-6 relative", "1e-6", "1e-4", "1e-2", "1 and more, or no number")
            )
        ),
    )
    yield draw_divergence(found)
    rows = [(str(one.step), str(one.tensor_count), str(one.value_count)) for one in found.steps]
    yield from _table(("step", "tensors", "values"), rows, numbers=(0, 1, 2))
    if found.more_count:
        yield _paragraph(
            f"{count_text(found.more_count, 'tensor or value', 'tensors and values')} more differ.",
            "note",
        )
    if found.compared_count < found.shared_count:
        yield _paragraph(f"Steps after {found.steps[-1].step} weren't compared.", "note")


def _launches(picture: RunPicture) -> Iterator[str]:
    yield '<h2 id="launches">Launches</h2>\n'
    if not picture.launches:
        yield _paragraph("No launch has begun.")
        return
    drawing, left_out = draw_timeline(picture)
    yield _launch_keys(picture)
    yield drawing
    yield _paragraph(left_out, "note")
    yield _paragraph(
        "How a launch ended isn't recorded: a kill shows as a save that was cut off, and as the"
        " launch that follows."
        " Steps that were trained behind the last commit and lost aren't recorded either.",
        "note",
    )
    rows = [
        (
            str(launch.launch),
            launch_text(launch).partition(" ")[2].partition(" ")[2],
            "" if launch.first_step is None else f"{launch.first_step} to {launch.last_step}",
            launch.verdict or "",
        )
        for launch in picture.launches[-_MARKED_ROWS:]
    ]
    yield from _table(("launch", "", "its saves, by step", "steps done again"), rows)
    if len(picture.launches) > _MARKED_ROWS:
        yield _paragraph(f"The newest {_MARKED_ROWS} of {len(picture.launches)} launches.", "note")


def _launch_keys(picture: RunPicture) -> str:
    """Return the legend of the timeline, with only the marks that occur."""
    circle = '<circle cx="8" cy="8" r="4" class="mark{}"/>'
    cross = '<path d="M4 4 l8 8 m0 -8 l-8 8" class="mark {}"/>'
    saves = picture.saves
    states = {save.state for save in saves}
    keys = (
        (any(save.on_lineage for save in saves), circle.format(" on"), "checkpoint on the lineage"),
        (
            any(not save.on_lineage for save in picture.committed),
            circle.format(""),
            "checkpoint beside it",
        ),
        (any(save.is_head for save in saves), '<circle cx="8" cy="8" r="6" class="head"/>', "head"),
        ("retired" in states, '<path d="M8 3 v10" class="mark retired"/>', "retired"),
        ("unfinished" in states, cross.format("unfinished"), "save cut off before its commit"),
        ("unreadable" in states, cross.format("unreadable"), "register that can't be read"),
        ("aborted" in states, '<path d="M4 4 h8 v8 h-8 z" class="mark aborted"/>', "save given up"),
        ("saving" in states, circle.format(" saving"), "save in hand"),
        (
            any(save.tags or save.pinned for save in saves),
            '<path d="M8 12 l-4 -7 h8 z" class="label"/>',
            "tag or pin",
        ),
        (
            any(one.resume_step for one in picture.launches),
            '<path d="M0 8 H16" class="branch"/>',
            "resumed from",
        ),
        (
            any(one.back_steps for one in picture.launches),
            '<path d="M0 8 H16" class="back"/>',
            "rolled back",
        ),
    )
    return _keys(*((drawing, text) for occurs, drawing, text in keys if occurs))


def _sizes(picture: RunPicture) -> Iterator[str]:
    yield '<h2 id="sizes">Sizes, and what deltas save</h2>\n'
    committed = picture.committed
    if not committed:
        yield _paragraph("No checkpoint is committed.")
        return
    nbytes = sum(save.nbytes or 0 for save in committed)
    stored_nbytes = sum(save.stored_nbytes or 0 for save in committed)
    yield _paragraph(
        f"{count_text(len(committed), 'committed checkpoint')} hold {bytes_text(nbytes)} of tensors"
        f" and store"
        f" {bytes_text(stored_nbytes)}: {share_text(stored_nbytes, nbytes)}."
    )
    deltas = [save for save in committed if save.profile == "delta"]
    if deltas:
        of_deltas = (
            sum(save.nbytes or 0 for save in deltas),
            sum(save.stored_nbytes or 0 for save in deltas),
        )
        yield _paragraph(
            f"{count_text(len(deltas), 'delta')} store {share_text(of_deltas[1], of_deltas[0])} of"
            f" what they hold;"
            f" {bytes_text(max(0, of_deltas[0] - of_deltas[1]))} are saved."
        )
    else:
        yield _paragraph("All of them are full: deltas save nothing here.")
    drawing, shared = draw_sizes(committed)
    keys = (
        (len(deltas) < len(committed), "full", "stored by a full checkpoint"),
        (bool(deltas), "delta", "stored by a delta"),
        (bool(deltas), "whole", "held in all"),
        (any(not save.on_lineage for save in committed), "full off", "pale: beside the lineage"),
    )
    yield _keys(*((_square(style), text) for occurs, style, text in keys if occurs))
    yield drawing
    yield _paragraph(shared, "note")
    if any(save.state == "retired" for save in picture.saves):
        yield _paragraph("The sizes of retired checkpoints aren't recorded.", "note")


def _tensors(picture: RunPicture) -> Iterator[str]:
    newest = picture.newest
    yield '<h2 id="tensors">Tensors of the newest checkpoint</h2>\n'
    if newest is None or not newest.nbytes:
        yield _paragraph(
            "There are none to show."
            if newest is None
            else f"{newest.name} has no bytes of tensors."
        )
        return
    yield _paragraph(
        f"{newest.name}: {count_text(newest.tensor_count, 'tensor')}, {bytes_text(newest.nbytes)}."
    )
    yield draw_tree_map(newest.cells)
    yield _paragraph(
        "Areas are sizes. Tensors too small to be seen share a rectangle with others whose names"
        " begin alike, or lie in one range: xN is how many they are, and * stands for the rest of"
        " their names.",
        "note",
    )
    yield '<h3 id="writers">Who stored what</h3>\n'
    yield _keys(
        *(
            (_square(f"field-{field}"), field)
            for field in FIELDS
            if any(cell.name == field for cell in newest.cells)
        )
    )
    yield draw_writers(_writer_rows(newest))
    if len(newest.writers) == 1 and all(tensor.piece_count == 1 for tensor in newest.largest):
        return
    yield '<h3 id="pieces">Pieces of the largest tensors</h3>\n'
    yield draw_pieces([tensor for tensor in newest.largest if tensor.nbytes])
    yield _paragraph(
        "A writer is a process of the job, by its rank. Numbers in the strips are writers. A"
        " replica that another process holds isn't stored once more, and isn't shown.",
        "note",
    )


def _writer_rows(newest: NewestFacts) -> list[tuple[str, dict[str, int], str]]:
    """Return a row for each writer, or for groups of neighbouring writers if there are many."""
    per_row = -(-len(newest.writers) // _WRITER_ROWS)
    rows = []
    for at in range(0, len(newest.writers), per_row):
        group: Sequence[WriterFacts] = newest.writers[at : at + per_row]
        nbytes = {
            field: sum(writer.nbytes_by_field.get(field, 0) for writer in group) for field in FIELDS
        }
        one = len(group) == 1
        name = f"writer {at}" if one else f"writers {at} to {at + len(group) - 1}"
        pieces = count_text(sum(writer.piece_count for writer in group), "piece")
        rows.append(
            (name, {field: count for field, count in nbytes.items() if count}, f"{name}: {pieces}")
        )
    return rows


def _goodput(picture: RunPicture) -> Iterator[str]:
    goodput = picture.goodput
    if goodput is None:
        return
    yield '<h2 id="goodput">Where the time went</h2>\n'
    yield _paragraph(f"Goodput, the share of training that counts: {goodput_text(goodput)}.")
    yield from _table(("", "time", "share", ""), time_rows(goodput), numbers=(1, 2))
    for doubt in goodput.doubts:
        yield _paragraph(f"Not known: {doubt}.", "note")


def _durations(picture: RunPicture) -> Iterator[str]:
    yield '<h2 id="times">Times</h2>\n'
    names = (
        "training that it cost: while it was staged, and beside it",
        "from its begin to its commit",
    )
    told = ["not recorded" if one is None else seconds_text(one) for one in durations_of(picture)]
    yield from _table(("a save, on average", ""), zip(names, told, strict=True))
    if "not recorded" in told:
        yield _paragraph("Checkpointer(..., ledger=True) records how long saves take.", "note")
    timed = [save for save in picture.committed if save.saved_unix_s is not None]
    between_s = [
        (later.saved_unix_s or 0) - (earlier.saved_unix_s or 0)
        for earlier, later in itertools.pairwise(timed)
        if earlier.launch == later.launch
    ]
    if between_s:
        yield _paragraph(
            f"From one committed checkpoint to the next of the same launch: {min(between_s)} s at"
            f" least,"
            f" {statistics.median(between_s):.6g} s as the median, {max(between_s)} s at most, by"
            f" the clock of writer"
            " 0."
        )
    if len(timed) > 1:
        first_s = min(save.saved_unix_s or 0 for save in timed)
        lines = [
            ("launch", [_time_point(save, first_s) for save in group])
            for _, group in itertools.groupby(timed, key=lambda save: save.launch)
        ]
        yield "<h3>Time of each committed checkpoint, since the first</h3>\n"
        span_s = max(save.saved_unix_s or 0 for save in timed) - first_s
        name, unit_s = next(
            (unit for unit in _TIME_UNITS if span_s >= 2 * unit[1]), _TIME_UNITS[-1]
        )
        yield draw_lines(
            lines,
            lambda s: f"{s / unit_s:.4g} {name}",
            "time of saves over training steps",
            unit=unit_s,
        )
        yield _paragraph("A line is a launch.", "note")


def _time_point(save: SaveFacts, first_s: int) -> tuple[float, float, str]:
    saved_s = save.saved_unix_s or 0
    return save.step, saved_s - first_s, f"{save.name}: {time_text(saved_s)}"


def _metrics(picture: RunPicture) -> Iterator[str]:
    yield '<h2 id="metrics">Metrics</h2>\n'
    committed = picture.committed
    names = Counter(name for save in committed for name in save.metrics)
    if not names:
        yield _paragraph("No committed checkpoint has a metric.")
        return
    shown = sorted(names, key=lambda name: (-names[name], name))[:_METRICS]
    for name in shown:
        lines = [
            (
                style,
                [
                    _metric_point(save, name)
                    for save in committed
                    if name in save.metrics and save.on_lineage is on
                ],
            )
            for style, on in (("off", False), ("on", True))
        ]
        yield f"<h3>{text_of(shorten(name, _TEXT_LENGTH))}</h3>\n"
        yield draw_lines(lines, lambda value: f"{value:.5g}", f"metric {name}")
    yield _paragraph("Green: checkpoints on the lineage. Grey: those beside it.", "note")
    if len(names) > _METRICS:
        yield _paragraph(
            f"{len(names) - _METRICS} more metrics aren't drawn: ckptfmt report --json has all.",
            "note",
        )


def _metric_point(save: SaveFacts, name: str) -> tuple[float, float, str]:
    return save.step, save.metrics[name], f"{save.name}: {name} {save.metrics[name]!r}"


def _checkpoints(picture: RunPicture) -> Iterator[str]:
    yield '<h2 id="checkpoints">Tags, pins and durability</h2>\n'
    marked = [save for save in picture.saves if _is_marked(save)]
    if marked:
        yield from _save_table(marked[-_MARKED_ROWS:])
        if len(marked) > _MARKED_ROWS:
            yield _paragraph(
                f"The newest {_MARKED_ROWS} of {len(marked)}; all are in the list below.", "note"
            )
    else:
        yield _paragraph(
            "No checkpoint has a tag or a pin, and all were at home when they were committed."
        )
    if picture.saves:
        listed = picture.saves[-_ROWS:]
        yield f"<details><summary>All {count_text(len(listed), 'checkpoint')}</summary>\n"
        yield from _save_table(listed)
        if len(listed) < len(picture.saves):
            yield _paragraph(f"The newest of {len(picture.saves)}: ckptfmt log lists all.", "note")
        yield "</details>\n"


def _is_marked(save: SaveFacts) -> bool:
    return bool(
        save.tags
        or save.pinned
        or save.suspect
        or save.reason
        or save.error
        or save.durability not in (None, HOME)
    )


def _save_table(saves: Iterable[SaveFacts]) -> Iterator[str]:
    rows = (
        (
            save.name,
            f"{save.state}, head" if save.is_head else save.state,
            "" if save.stored_nbytes is None else bytes_text(save.stored_nbytes),
            "" if save.saved_unix_s is None else time_text(save.saved_unix_s),
            save.durability or "",
            "; ".join(
                [
                    *["pinned"] * save.pinned,
                    *(f"#{tag}" for tag in save.tags),
                    *([f"suspect: {save.suspect}"] if save.suspect else []),
                    *(text for text in (save.reason, save.error) if text),
                ]
            ),
        )
        for save in saves
    )
    yield from _table(
        ("checkpoint", "state", "stored", "saved", "durability", ""), rows, numbers=(2,)
    )

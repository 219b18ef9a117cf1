"""Drawings of `report` as SVG: a timeline of launches, bars, lines, a tree map, strips of pieces.

Each drawing is self-contained. `text_of` escapes names and texts from the run. Colours are classes
of the page's style sheet. Tooltips are in `title` elements, which need no script. Lengths are in
user units (pixels at the width of the page).
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ckptfmt.cli.console import bytes_text, clean, count_text, shorten
from ckptfmt.documents.durability import HOME
from ckptfmt.state import place_of
from ckptfmt_tools.report.divergence import Divergence
from ckptfmt_tools.report.run_picture import (
    LaunchFacts,
    RunPicture,
    SaveFacts,
    TensorFacts,
    TreeCell,
)

WIDTH: Final = 960
_LEFT: Final = 92
_RIGHT: Final = 14
#: The number of newest launches drawn in the timeline, a line each.
_LANES: Final = 100
#: The least distance of two marks of the same kind; nearer marks are merged.
_MARK_WIDTH: Final = 5.0
#: The greatest number of bars in a chart; with more checkpoints, several share a bar.
_BARS: Final = 240
_LINE_POINTS: Final = 800
#: The approximate width of a character of small text.
_CHARACTER: Final = 5.9
#: The number of colours for writers in the style sheet.
WRITER_COLOURS: Final = 10

Rectangle = tuple[float, float, float, float]


def text_of(text: str) -> str:
    """Return text escaped for HTML: markup, and characters that aren't printable.

    >>> text_of('<b title="x">&')
    '&lt;b title=&quot;x&quot;&gt;&amp;'
    """
    return html.escape(clean(text), quote=True)


def _svg(height: float, body: Iterable[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img"'
        f' aria-label="{text_of(label)}">{"".join(body)}</svg>'
    )


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{style}"'
        f' text-anchor="{anchor}">{text_of(text)}</text>'
    )


def _line(x: float, y: float, to_x: float, to_y: float, style: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="{style}"/>'


def _rectangle(at: Rectangle, style: str, title: str) -> str:
    x, y, width, height = at
    size = f'width="{max(width, 0):.2f}" height="{max(height, 0):.2f}"'
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" {size}'
        f' class="{style}"><title>{text_of(title)}</title></rect>'
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """A linear scale from the numbers `low` to `high` to the positions `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """Return the position of a number. The halves avoid an overflow of the largest floats."""
        span = self.high / 2 - self.low / 2
        share = (value / 2 - self.low / 2) / span if span else 0.5
        return self.begin + share * (self.end - self.begin)

    def ticks(self, most: int, *, whole: bool = False, unit: float = 1.0) -> list[float]:
        """Return about `most` numbers within the scale that are round multiples of a unit.

        >>> Scale(0, 97, 0, 1).ticks(5)
        [0.0, 20.0, 40.0, 60.0, 80.0]
        """
        if unit != 1:
            scaled = dataclasses.replace(self, low=self.low / unit, high=self.high / unit)
            return [tick * unit for tick in scaled.ticks(most, whole=whole)]
        span = self.high - self.low
        if (
            not math.isfinite(span)
            or span <= 0
            or math.ulp(max(abs(self.low), abs(self.high))) * 100 > span
        ):
            return [self.low]
        power = 10.0 ** math.floor(math.log10(span / most))
        if not power:
            return [self.low]
        step = next(
            (power * factor for factor in (1, 2, 5) if power * factor * most >= span), power * 10
        )
        step = max(step, 1.0) if whole else step
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step) + 1)]


def _axes(
    x: Scale, y: Scale, label: Callable[[float], str], *, steps: bool = True, unit: float = 1.0
) -> Iterator[str]:
    """Yield grid lines and numbers: those of `y` on the left, those of `x` below."""
    for tick in y.ticks(4, unit=unit):
        yield _line(x.begin, y.at(tick), x.end, y.at(tick), "grid")
        yield _text(x.begin - 6, y.at(tick) + 4, label(tick), "tick", "end")
    yield _line(x.begin, y.begin, x.end, y.begin, "axis")
    if steps:
        for tick in x.ticks(8, whole=True):
            yield _line(x.at(tick), y.begin, x.at(tick), y.begin + 4, "axis")
            yield _text(x.at(tick), y.begin + 16, f"{tick:.0f}", "tick", "middle")


# --- launches -------------------------------------------------------------------------------------


def draw_timeline(picture: RunPicture) -> tuple[str, str]:
    """Return the launches over training steps, and a sentence on launches not drawn, or ""."""
    launches = picture.launches[-_LANES:]
    left_out = len(picture.launches) - len(launches)
    lane_height = 26 if len(launches) <= 40 else 16
    last_step = max(
        [1, *(launch.reached_step for launch in launches), *(save.step for save in picture.saves)]
    )
    x = Scale(0, last_step, _LEFT, WIDTH - _RIGHT - 8)
    lanes = {launch.launch: 20 + lane_height * row for row, launch in enumerate(launches)}
    bottom = 20 + lane_height * len(launches)
    own: dict[int, list[SaveFacts]] = {}
    for save in picture.saves:
        own.setdefault(save.launch, []).append(save)
    body: list[str] = [
        piece
        for tick in x.ticks(8, whole=True)
        for piece in (
            _line(x.at(tick), 8, x.at(tick), bottom, "grid"),
            _text(x.at(tick), bottom + 14, f"{tick:.0f}", "tick", "middle"),
        )
    ]
    body.append(_text(WIDTH - _RIGHT, bottom + 30, "training steps", "tick", "end"))
    for launch in launches:
        body += _draw_launch(launch, own.get(launch.launch, []), lanes, x)
    sentence = (
        f"Not drawn: the {count_text(left_out, 'oldest launch', 'oldest launches')}."
        if left_out
        else ""
    )
    return _svg(bottom + 36, body, "launches over training steps"), sentence


def _draw_launch(
    launch: LaunchFacts, saves: list[SaveFacts], lanes: dict[int, int], x: Scale
) -> Iterator[str]:
    y = lanes[launch.launch]
    is_on = any(save.on_lineage for save in saves)
    begin = x.at(launch.begin_step)
    end = x.at(max(launch.begin_step, launch.last_step or 0))
    title = launch_text(launch)
    parent = lanes.get(launch.resume_launch or 0)
    yield f"<g><title>{text_of(title)}</title>"
    if parent is not None:
        yield _line(begin, parent, begin, y, "branch")
    back_y = lanes.get(launch.back_from or 0)
    if back_y is not None:
        back_x = x.at(launch.begin_step + launch.back_steps)
        yield f'<path d="M{back_x:.1f} {back_y} L{back_x:.1f} {y} L{begin:.1f} {y}" class="back"/>'
    yield _line(begin, y, max(end, begin + 3), y, "lane on" if is_on else "lane")
    yield (
        f'<text x="8" y="{y + 4}" class="{"strong" if is_on else "tick"}">launch'
        f" {launch.launch}</text></g>"
    )
    yield from _draw_marks(saves, x, y)


def launch_text(launch: LaunchFacts) -> str:
    """Return the recorded facts of a launch's start, as a text."""
    if launch.chosen_by is None:
        return f"launch {launch.launch}: its record can't be read"
    start = f"resumed from {launch.resume_name}" if launch.resume_name else "began from nothing"
    how = {"fallback": ", a newer one was passed over", "hand": ", chosen by hand"}.get(
        launch.chosen_by, ""
    )
    back = ""
    if launch.back_from is not None:
        back = (
            f"; {count_text(launch.back_steps, 'step')} back from where launch"
            f" {launch.back_from} had come to"
        )
    return f"launch {launch.launch} {start}{how}{back}"


def _draw_marks(saves: Iterable[SaveFacts], x: Scale, y: float) -> Iterator[str]:
    """Yield a mark for each save; overlapping neighbours of the same kind share a mark."""

    def kind_of(save: SaveFacts) -> tuple[str, bool]:
        return save.state, save.on_lineage

    kinds: dict[tuple[str, bool], list[SaveFacts]] = {}
    for save in saves:
        kinds.setdefault(kind_of(save), []).append(save)
    # Failed saves are drawn last, on top.
    for (state, on_lineage), of_kind in sorted(
        kinds.items(), key=lambda item: (item[0][0] in _CROSSED, item[0])
    ):
        for _, group in itertools.groupby(
            of_kind, key=lambda save: int(x.at(save.step) / _MARK_WIDTH)
        ):
            shared = list(group)
            at = x.at(shared[-1].step)
            title = text_of(save_text(shared[0]) if len(shared) == 1 else _group_text(shared))
            style = f"mark {state}{' on' if on_lineage else ''}"
            yield (
                f'<path d="{_mark_path(state, at, y)}"'
                f' class="{style}"><title>{title}</title></path>'
            )
    for save in (save for saves in kinds.values() for save in saves):
        at = x.at(save.step)
        title = f"<title>{text_of(save_text(save))}</title>"
        if save.is_head:
            yield f'<circle cx="{at:.1f}" cy="{y}" r="7.5" class="head">{title}</circle>'
        if save.pinned or save.tags:
            yield f'<path d="M{at:.1f} {y - 6} l-4 -7 h8 z" class="label">{title}</path>'


#: States marked by a cross or a box, drawn on top of other marks.
_CROSSED: Final = frozenset({"unfinished", "aborted", "unreadable"})


def _mark_path(state: str, x: float, y: float) -> str:
    if state == "aborted":
        return f"M{x - 4:.1f} {y - 4} h8 v8 h-8 z"
    if state in _CROSSED:
        return f"M{x - 4:.1f} {y - 4} l8 8 m0 -8 l-8 8"
    if state == "retired":
        return f"M{x:.1f} {y - 5} v10"
    return f"M{x - 4:.1f} {y} a4 4 0 1 0 8 0 a4 4 0 1 0 -8 0"


def save_text(save: SaveFacts) -> str:
    """Return a description of a checkpoint, in a line."""
    facts = [
        save.state,
        *["head"] * save.is_head,
        *["pinned"] * save.pinned,
        *["suspect"] * bool(save.suspect),
    ]
    if save.nbytes is not None:
        facts.append(
            f"{save.profile}, {bytes_text(save.stored_nbytes or 0)} stored of"
            f" {bytes_text(save.nbytes)}"
        )
    if save.durability not in (None, HOME):
        facts.append(f"durability {save.durability}")
    facts += [f"{name}={number:.6g}" for name, number in itertools.islice(save.metrics.items(), 8)]
    facts += [f"#{tag}" for tag in save.tags[:8]]
    facts += [reason for reason in (save.reason, save.error) if reason]
    return shorten(clean(f"{save.name}: {', '.join(facts)}"), 400)


def _group_text(saves: Sequence[SaveFacts]) -> str:
    return f"{len(saves)} {saves[0].state} saves, steps {saves[0].step} to {saves[-1].step}"


# --- sizes and metrics ----------------------------------------------------------------------------


def draw_sizes(saves: Sequence[SaveFacts]) -> tuple[str, str]:
    """Return bars of the sizes of committed checkpoints, and a sentence on shared bars, or "".

    The front bar has the stored bytes, the bar behind it the bytes of all tensors.
    """
    per_bar = -(-len(saves) // _BARS)
    groups = [saves[at : at + per_bar] for at in range(0, len(saves), per_bar)]
    most_nbytes = max(
        [1, *(save.nbytes or 0 for save in saves), *(save.stored_nbytes or 0 for save in saves)]
    )
    x = Scale(0, len(groups), _LEFT, WIDTH - _RIGHT)
    y = Scale(0, most_nbytes, 190, 14)
    unit = 1024.0 ** ((most_nbytes.bit_length() - 1) // 10)
    body = list(_axes(x, y, lambda nbytes: bytes_text(int(nbytes)), steps=False, unit=unit))
    width = max(1.0, min(40.0, (x.at(1) - x.at(0)) * 0.8))
    labelled = -math.inf
    for number, group in enumerate(groups):
        at = x.at(number + 0.5)
        nbytes = sum(save.nbytes or 0 for save in group) / len(group)
        by_profile = {
            profile: sum(save.stored_nbytes or 0 for save in group if save.profile == profile)
            / len(group)
            for profile in ("full", "delta")
        }
        title = (
            save_text(group[0])
            if len(group) == 1
            else _bar_text(group, nbytes, sum(by_profile.values()))
        )
        body.append(
            _rectangle((at - width / 2, y.at(nbytes), width, 190 - y.at(nbytes)), "whole", title)
        )
        off = "" if any(save.on_lineage for save in group) else " off"
        top = 190.0
        for profile, stored_nbytes in by_profile.items():
            if stored_nbytes:
                height = 190 - y.at(stored_nbytes)
                top -= height
                body.append(_rectangle((at - width / 2, top, width, height), profile + off, title))
        if at - labelled > 56:
            body.append(_text(at, 206, str(group[0].step), "tick", "middle"))
            labelled = at
    body.append(_text(WIDTH - _RIGHT, 222, "training steps, launch by launch", "tick", "end"))
    sentence = (
        (
            f"A bar is the mean of up to {per_bar} checkpoints that follow each other, full ones"
            " and"
            " deltas."
        )
        if per_bar > 1
        else ""
    )
    return _svg(228, body, "bytes of each committed checkpoint"), sentence


def _bar_text(saves: Sequence[SaveFacts], nbytes: float, stored_nbytes: float) -> str:
    span = f"{saves[0].name} to {saves[-1].name}"
    return (
        f"{len(saves)} checkpoints, {span}: mean {bytes_text(int(stored_nbytes))} of"
        f" {bytes_text(int(nbytes))}"
    )


def draw_lines(
    lines: Sequence[tuple[str, Sequence[tuple[float, float, str]]]],
    label: Callable[[float], str],
    title: str,
    *,
    unit: float = 1.0,
) -> str:
    """Return a chart of lines over training steps.

    Args:
        lines: style and points of each line; a point has step, value and tooltip. The style "off"
            draws points without a line.
        label: function from a value to its text.
        unit: unit of round values on the axis.
    """
    points = [point for _, line in lines for point in line]
    steps = [step for step, _, _ in points] or [0]
    values = [value for _, value, _ in points] or [0]
    x = Scale(min(steps), max(steps), _LEFT, WIDTH - _RIGHT - 8)
    y = Scale(min(values), max(values), 136, 14)
    body = list(_axes(x, y, label, unit=unit))
    for style, line in lines:
        places = [(x.at(step), y.at(value), note) for step, value, note in _thin(line, x)]
        if style != "off" and len(places) > 1:
            joined = " ".join(f"{at:.1f},{height:.1f}" for at, height, _ in places)
            body.append(f'<polyline points="{joined}" class="line {style}"/>')
        body += [
            f'<circle cx="{at:.1f}" cy="{height:.1f}" r="{2.5 if len(places) < 200 else 1.5}"'
            f' class="dot {style}">'
            f"<title>{text_of(note)}</title></circle>"
            for at, height, note in places
        ]
    return _svg(158, body, title)


def _thin(points: Sequence[tuple[float, float, str]], x: Scale) -> list[tuple[float, float, str]]:
    """Return the distinguishable points: first, least, greatest and last of each pixel column."""
    if len(points) <= _LINE_POINTS:
        return list(points)
    kept: list[tuple[float, float, str]] = []
    for _, group in itertools.groupby(points, key=lambda point: int(x.at(point[0]) / 4)):
        column = list(group)
        values = [value for _, value, _ in column]
        chosen = {0, values.index(min(values)), values.index(max(values)), len(column) - 1}
        kept += [column[number] for number in sorted(chosen)]
    return kept


# --- tensors --------------------------------------------------------------------------------------


def squarify(sizes: Sequence[float], within: Rectangle) -> list[Rectangle]:
    """Return a rectangle for each size, nearly square; together they fill `within`.

    Args:
        sizes: positive numbers, in descending order.
        within: position, width and height of the area to divide.

    Source: Bruls, Huizing, van Wijk, "Squarified Treemaps", 2000.

    >>> squarify([2, 1, 1], (0, 0, 4, 2))
    [(0.0, 0.0, 2.0, 2.0), (2.0, 0.0, 2.0, 1.0), (2.0, 1.0, 2.0, 1.0)]
    """
    x, y, width, height = map(float, within)
    scale = width * height / (math.fsum(sizes) or 1)
    areas = [size * scale for size in sizes]
    found: list[Rectangle] = []
    at = 0
    while at < len(areas):
        short = min(width, height)
        end = at + 1
        while end < len(areas) and _worst(areas[at : end + 1], short) <= _worst(
            areas[at:end], short
        ):
            end += 1
        depth = math.fsum(areas[at:end]) / short if short > 0 else 0.0
        offset = 0.0
        for area in areas[at:end]:
            length = area / depth if depth > 0 else 0.0
            is_row = width < height
            found.append(
                (x + offset, y, length, depth) if is_row else (x, y + offset, depth, length)
            )
            offset += length
        if width < height:
            y = y + depth
            height = max(0.0, height - depth)
        else:
            x = x + depth
            width = max(0.0, width - depth)
        at = end
    return found


def _worst(areas: Sequence[float], short: float) -> float:
    """Return the worst aspect ratio of the rectangles in a row; 1 for squares."""
    total = math.fsum(areas)
    if total <= 0 or short <= 0:
        return math.inf
    return max(short**2 * max(areas) / total**2, total**2 / (short**2 * max(min(areas), 1e-300)))


def draw_tree_map(cells: Sequence[TreeCell]) -> str:
    """Return a tree map of tensors by size: a rectangle for each, nested in those of its groups."""
    shown = [cell for cell in cells if cell.nbytes]
    height = 460.0
    body: list[str] = []
    places = squarify([cell.nbytes for cell in shown], (0, 0, WIDTH, height))
    for cell, place in zip(shown, places, strict=True):
        body += _draw_cell(cell, place, f"field-{cell.name}", "")
    return _svg(height, body, "tensors by size")


def _draw_cell(
    cell: TreeCell, place: Rectangle, style: str, prefix: str, depth: int = 0
) -> Iterator[str]:
    x, y, width, height = place
    title = f"{cell.name}: {count_text(cell.tensor_count, 'tensor')}, {bytes_text(cell.nbytes)}"
    yield _rectangle(place, f"cell {style} depth-{min(depth, 3)}", title)
    name = cell.name.removeprefix(prefix) or cell.name
    shown = [one for one in cell.cells if one.nbytes]
    is_group = not shown and cell.tensor_count > 1
    label = name if is_group else f"{name}  {bytes_text(cell.nbytes)}"
    room = int((width - 6) / _CHARACTER)
    has_label = room >= 4 and height >= 15
    if has_label:
        text = label if len(label) <= room else shorten(name, room)
        yield _text(x + 4, y + 12, text, "strong" if shown else "")
    if has_label and is_group and height >= 30:
        yield _text(x + 4, y + 26, f"x{cell.tensor_count}", "tick")
    if not shown:
        return
    header = 17 if has_label and height > 34 else 2
    inner = (x + 2, y + header, max(0.0, width - 4), max(0.0, height - header - 2))
    sizes: list[float] = [one.nbytes for one in shown]
    for one, at in zip(shown, squarify(sizes, inner), strict=True):
        if at[2] >= 0.5 and at[3] >= 0.5:
            yield from _draw_cell(one, at, style, "" if depth == 0 else cell.name, depth + 1)


def draw_pieces(tensors: Sequence[TensorFacts]) -> str:
    """Return a strip for each tensor, cut into its pieces in the order of their first elements."""
    body: list[str] = []
    row_height = 24
    begin = 430
    for row, tensor in enumerate(tensors):
        y = row * row_height
        name = f"{tensor.field} {tensor.name}" + (
            f" ({tensor.scope})" if tensor.scope != "global" else ""
        )
        body.append(_text(0, y + 15, shorten(name, 44), "strong"))
        shape = f"{tensor.dtype} {list(tensor.global_shape)}"
        body.append(_text(begin - 10, y + 15, shorten(shape, 24), "tick", "end"))
        if tensor.pieces is None:
            body.append(
                _text(begin, y + 15, f"{tensor.piece_count} pieces: too many to draw", "tick")
            )
            continue
        at = float(begin)
        for piece in tensor.pieces:
            width = (WIDTH - begin) * piece.nbytes / (tensor.nbytes or 1)
            ranges = ", ".join(
                f"{low}:{low + extent}"
                for low, extent in zip(piece.begin, piece.box_shape, strict=True)
            )
            title = (
                f"{tensor.name}[{ranges}] from writer {piece.writer}, {bytes_text(piece.nbytes)}"
            )
            style = f"piece writer-{piece.writer % WRITER_COLOURS}"
            body.append(_rectangle((at, y + 3, width, row_height - 6), style, title))
            if width > 16:
                body.append(_text(at + width / 2, y + 16, str(piece.writer), "", "middle"))
            at += width
    return _svg(row_height * len(tensors), body, "pieces of the largest tensors")


def draw_writers(rows: Sequence[tuple[str, dict[str, int], str]]) -> str:
    """Return a bar for each writer or group of writers, divided by the stored bytes of each field.

    Args:
        rows: name, bytes by field, and tooltip of each bar.
    """
    most_nbytes = max([1, *(sum(nbytes.values()) for _, nbytes, _ in rows)])
    x = Scale(0, most_nbytes, 130, WIDTH - 100)
    body: list[str] = []
    for row, (name, by_field, title) in enumerate(rows):
        y = row * 18
        body.append(_text(122, y + 13, name, "tick", "end"))
        at = 0
        for field, nbytes in by_field.items():
            place = (x.at(at), y + 3.0, x.at(nbytes) - x.at(0), 12.0)
            body.append(
                _rectangle(place, f"share field-{field}", f"{title}; {field} {bytes_text(nbytes)}")
            )
            at += nbytes
        body.append(_text(x.at(at) + 6, y + 13, bytes_text(at), "tick"))
    return _svg(18 * len(rows), body, "bytes by writer")


# --- divergence -----------------------------------------------------------------------------------

#: The ratios of a difference to its element at which the rectangle becomes darker.
_FAR: Final = (1e-6, 1e-4, 1e-2, 1.0)
_NAMES_WIDTH: Final = 330.0
_ROW_HEIGHT: Final = 16.0


def draw_divergence(divergence: Divergence) -> str:
    """Return a map of differences: a row for each tensor or value, a column for each step."""
    width = (WIDTH - _NAMES_WIDTH - _RIGHT) / max(len(divergence.steps), 1)
    body = []
    for row, one in enumerate(divergence.names):
        y = row * _ROW_HEIGHT
        name = shorten(place_of(one.field, one.name), int(_NAMES_WIDTH / _CHARACTER) - 2)
        body.append(_text(_NAMES_WIDTH - 6, y + 12, name, "", "end"))
        for column, (step, distance) in enumerate(
            zip(divergence.steps, one.distances, strict=True)
        ):
            style = "same" if distance is None else f"far far-{_far(one.ratios[column])}"
            note = f"{place_of(one.field, one.name)} at step {step.step}: {distance or 'the same'}"
            body.append(
                _rectangle(
                    (_NAMES_WIDTH + column * width, y + 1, width - 1, _ROW_HEIGHT - 2), style, note
                )
            )
    end = len(divergence.names) * _ROW_HEIGHT
    shown = (
        max(1, math.ceil(len(str(divergence.steps[-1].step)) * _CHARACTER * 1.4 / width))
        if divergence.steps
        else 1
    )
    for column, step in enumerate(divergence.steps):
        if column % shown == 0:
            body.append(
                _text(
                    _NAMES_WIDTH + (column + 0.5) * width,
                    end + 14,
                    str(step.step),
                    "tick",
                    "middle",
                )
            )
    return _svg(end + 20, body, "what differs, by step")


def _far(ratio: float | None) -> int:
    return len(_FAR) if ratio is None else sum(ratio >= bound for bound in _FAR)

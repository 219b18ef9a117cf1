"""The output of commands: colours on a terminal, tables, sizes, times, a progress bar, JSON.

Names from a checkpoint are cleaned before printing: they can't inject control sequences.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import IO, Final, Self

from ckptfmt import limits
from ckptfmt.errors import CkptError

_SGR: Final = {
    "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34",
    "magenta": "35", "cyan": "36",
}  # fmt: skip

#: The last second of the year 9999.
_UNIX_S_MAX: Final = 253_402_300_799

#: The greatest width of a table's column, in characters; a longer cell shifts the rest of its row.
_WIDEST: Final = 200

#: A cell of a table: its text, and the style of that text ("" for none).
Cell = tuple[str, str]


def clean(text: str) -> str:
    r"""Return printable text: control, bidi and other unprintable characters become escapes.

    >>> print(clean("a\x1b[31mb\nc"))
    a\x1b[31mb\nc
    """
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    return (
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
    )


def bytes_text(nbytes: int) -> str:
    """Return a number of bytes as a text with a binary unit.

    >>> [bytes_text(nbytes) for nbytes in (0, 1023, 1024, 1536, 3 << 30)]
    ['0 B', '1023 B', '1.0 KiB', '1.5 KiB', '3.0 GiB']
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    power = min((nbytes.bit_length() - 1) // 10, len(units))
    if power < len(units) and nbytes * 10 >= 10239.5 * 1024**power:  # would round up to 1024.0
        power += 1
    return f"{nbytes / 1024**power:.1f} {units[power - 1]}"


def share_text(part: int, whole: int) -> str:
    """Return a part of a whole as a percentage; "0 %" if the whole is 0.

    >>> [share_text(part, 1000) for part in (0, 4, 284, 999, 1000)], share_text(0, 0)
    (['0 %', '<1 %', '28 %', '>99 %', '100 %'], '0 %')
    """
    percent = round(100 * part / whole) if whole else 0
    if part and not percent:
        return "<1 %"
    return ">99 %" if part < whole and percent == 100 else f"{percent} %"


def count_text(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun.

    >>> count_text(1, "leaf", "leaves"), count_text(2, "tensor")
    ('1 leaf', '2 tensors')
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def time_text(unix_s: int) -> str:
    """Return a time as ISO 8601 in UTC; in seconds if the year doesn't have four digits.

    >>> time_text(0), time_text(1 << 53)
    ('1970-01-01T00:00:00Z', '9007199254740992 s')
    """
    if not 0 <= unix_s <= _UNIX_S_MAX:
        return f"{unix_s} s"
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


def shorten(text: str, width: int) -> str:
    """Return a text shortened in the middle to at most `width` characters.

    >>> shorten("layers.0.attention.weight", 12)
    'layers...ght'
    """
    if len(text) <= width:
        return text
    tail = max(0, (width - 3) // 3)
    return f"{text[: max(0, width - 3 - tail)]}...{text[len(text) - tail :] if tail else ''}"[
        : max(width, 0)
    ]


def is_terminal(stream: IO[str] | None) -> bool:
    """Return whether a stream is an open terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # the stream is closed
        return False


class Console:
    """The output of a command, with the width and the colours of the terminal.

    Args:
        stream: the stream to print to; None for standard output.
        holds: whether lines are buffered until `release`.

    Attributes:
        colour: whether styles are shown: on a terminal that isn't dumb, unless NO_COLOR is set.
        width: columns of the terminal; None for a pipe, where lines aren't cut.
    """

    def __init__(self, stream: IO[str] | None = None, *, holds: bool = False) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._held: list[str] | None = [] if holds else None
        terminal = is_terminal(self._stream)
        self.colour = (
            terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
        self.width = max(40, shutil.get_terminal_size((100, 24)).columns) if terminal else None
        with contextlib.suppress(AttributeError, ValueError, OSError):
            self._stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]

    def style(self, text: str, style: str) -> str:
        """Return text in a style, or plain text without colours.

        Args:
            text: the text.
            style: names of `_SGR` joined by spaces.
        """
        if not self.colour or not style or not text:
            return text
        return f"\x1b[{';'.join(_SGR[name] for name in style.split())}m{text}\x1b[0m"

    def line(self, *cells: Cell | str) -> None:
        """Print cells as a line."""
        text = "".join(self._cell(cell) for cell in cells).rstrip(" ")
        if self._held is None:
            print(text, file=self._stream)
        else:
            self._held.append(text)

    def release(self) -> None:
        """Print the buffered lines, and buffer no further lines."""
        held = self._held or ()
        self._held = None
        for text in held:
            print(text, file=self._stream)

    def title(self, text: str) -> None:
        """Print the title of a section, with an empty line before."""
        self.line()
        self.line((text, "bold"))

    def table(
        self,
        rows: Iterable[Sequence[Cell | str]],
        *,
        right: Sequence[int] = (),
        indent: int = 2,
        cut: bool = True,
    ) -> None:
        """Print rows in aligned columns, without columns that have only empty cells.

        Args:
            rows: rows of cells, with the same number of cells in each.
            right: numbers of the columns aligned to the right.
            indent: number of spaces before each line.
            cut: whether lines are cut at the terminal's width.
        """
        table = [[cell if isinstance(cell, tuple) else (cell, "") for cell in row] for row in rows]
        if not table:
            return
        # Cells are padded to `_WIDEST` at most: with 300,000 rows, a single name of 4 KiB would
        # cause a gigabyte of blanks.
        widths = [
            min(_WIDEST, max(len(row[column][0]) for row in table))
            for column in range(len(table[0]))
        ]
        shown = [column for column, width in enumerate(widths) if width]
        for row in table:
            pieces: list[Cell] = [(" " * indent, "")]
            for column in shown:
                text, style = row[column]
                gap = " " * (widths[column] - len(text))
                pieces += (
                    [(gap, ""), (text, style)] if column in right else [(text, style), (gap, "")]
                )
                pieces.append(("  ", ""))
            self.line(*(self._fit(pieces[:-1]) if cut else pieces[:-1]))

    def _fit(self, pieces: list[Cell]) -> list[Cell]:
        """Return the cells of a line, cut at the terminal's width."""
        if self.width is None:
            return pieces
        room = self.width
        fitting = []
        while pieces and not pieces[-1][0].strip():
            pieces = pieces[:-1]
        for number, (text, style) in enumerate(pieces):
            if len(text) > room:
                last = number == len(pieces) - 1
                fitting.append((shorten(text, room) if last else text[:room], style))
                break
            fitting.append((text, style))
            room -= len(text)
        return fitting

    def _cell(self, cell: Cell | str) -> str:
        return cell if isinstance(cell, str) else self.style(*cell)


def print_errors(console: Console, errors: Iterable[CkptError], style: str) -> None:
    """Print a line for each error, and a shared remedy of consecutive errors once."""
    for (code, remedy), same in itertools.groupby(
        errors, key=lambda error: (error.code, error.remedy)
    ):
        for error in same:
            cells: list[Cell] = [(str(code), style)]
            if error.where:
                cells += [("  ", ""), (clean(error.where), "bold")]
            if error.requirement:
                cells += [("  ", ""), (error.requirement, "cyan")]
            console.line(*cells, f"  {clean(error.detail)}")
        if remedy:
            console.line((f"  remedy: {clean(remedy)}", "dim"))


def labels_text(
    metrics: Mapping[str, float], tags: Iterable[str], *, pinned: bool, suspect: str | None = None
) -> str:
    """Return the labels of a checkpoint, on one line.

    >>> labels_text({"eval_loss": 2.5}, ["release"], pinned=True)
    'pinned  eval_loss=2.5  #release'
    >>> labels_text({}, [], pinned=False, suspect="grad_norm is nan at step 12")
    'suspect: grad_norm is nan at step 12'
    """
    numbers = [f"{clean(name)}={number:.6g}" for name, number in metrics.items()]
    doubt = [f"suspect: {clean(suspect)}"] if suspect else []
    return "  ".join(["pinned"] * pinned + doubt + numbers + [f"#{clean(tag)}" for tag in tags])


def version_members() -> dict[str, str]:
    """Return the first members of every JSON object: the versions of library and format."""
    import ckptfmt

    return {"version": getattr(ckptfmt, "__version__", "unknown"), "format": limits.FORMAT_VERSION}


def print_json(members: Mapping[str, object]) -> None:
    """Print a JSON object in ASCII, safe for any terminal and encoding, and without NaN."""
    print(json.dumps({**version_members(), **members}, indent=2, allow_nan=False))


#: The time before the bar appears, and the interval of its updates, in seconds.
_DELAY_S: Final = 0.5
_EVERY_S: Final = 0.1
_BAR_WIDTH: Final = 24


class Progress:
    """A progress bar on standard error, as a context manager that erases the bar at the end.

    Args:
        total: function that returns the total number of bytes, or None if unknown; called only if
            the bar is shown.
        quiet: whether to show no bar in any case.
    """

    def __init__(self, total: Callable[[], int | None], *, quiet: bool) -> None:
        self._shown = not quiet and is_terminal(sys.stderr)
        self._ask_total = total
        self._total_nbytes: int | None = None
        self._done_nbytes = 0
        self._begin_s = self._last_s = time.monotonic()
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def advance(self, nbytes: int) -> None:
        """Add finished bytes, and redraw the bar if its interval has passed."""
        self._done_nbytes += nbytes
        if not self._shown:
            return
        now_s = time.monotonic()
        if now_s - self._begin_s < _DELAY_S or now_s - self._last_s < _EVERY_S:
            return
        if not self._drawn:
            self._total_nbytes = self._ask_total()
        self._drawn = True
        self._last_s = now_s
        print(f"\r\x1b[K{self._text(now_s)}", end="", file=sys.stderr, flush=True)

    def _text(self, now_s: float) -> str:
        rate = bytes_text(int(self._done_nbytes / max(now_s - self._begin_s, 1e-9)))
        done = bytes_text(self._done_nbytes)
        if not self._total_nbytes:
            return f"{done}  {rate}/s"
        part = min(1.0, self._done_nbytes / self._total_nbytes)
        bar = ("#" * round(part * _BAR_WIDTH)).ljust(_BAR_WIDTH, ".")
        return f"[{bar}] {part:4.0%}  {done} of {bytes_text(self._total_nbytes)}  {rate}/s"

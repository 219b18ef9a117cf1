"""The rounds: fresh names, no dirty pages, hot memory, every contestant, turning order."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.machine import available_nbytes


class Saver(Protocol):
    """A contestant of the rounds.

    Attributes:
        name: the name in the record.
        is_buffered: whether writes go through the page cache.
    """

    name: str
    is_buffered: bool

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        ...

    def save(self, path: Path) -> Path:
        """Save durably under a fresh name, and return the path to delete."""
        ...


class Progress:
    """Show the progress on a terminal, and print no progress elsewhere."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def say(self, text: str) -> None:
        """Replace the line by another line; an empty text clears the line."""
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()


class Workplace:
    """A separate directory, in which no name is used twice.

    A buffered writer's files stay until the next buffered writer begins: the page cache is then
    freed and reused at once, the hottest possible memory of a guest. Memory left free for seconds
    costs ten times as much to touch.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._count = 0
        self._held: Path | None = None

    def fresh(self, name: str) -> Path:
        """Return an unused path."""
        self._count += 1
        return self.directory / f"{name}-{self._count:05d}"

    def settle(self, *, is_buffered: bool) -> None:
        """Prepare a save: delete retained files, and write back all dirty pages."""
        if is_buffered and self._held is not None:
            remove(self._held)
            self._held = None
        os.sync()

    def discard(self, path: Path, *, is_buffered: bool) -> None:
        """Delete a save's files; files of a buffered save are deleted at the next `settle`."""
        if is_buffered:
            if self._held is not None:
                remove(self._held)
            self._held = path
        else:
            remove(path)


@contextlib.contextmanager
def workplace(directory: Path) -> Iterator[Workplace]:
    """Make a workplace below `directory`, and remove the workplace with all contents."""
    directory.mkdir(parents=True, exist_ok=True)
    # Before Python 3.12 the path of a temporary directory is relative where `dir` is, and a file://
    # URL of a relative path is another file.
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=directory.resolve()) as path:
        yield Workplace(Path(path))


def remove(path: Path) -> None:
    """Delete a file, or a directory with all contents."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def order_of_round(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: rotated every second round, and reversed in the rounds between.

    >>> ["".join(order_of_round("abc", number)) for number in range(6)] ['abc', 'cba', 'bca', 'acb',
    'cab', 'bac']
    """
    turn = number // 2 % len(names)
    turned = [*names[turn:], *names[:turn]]
    return turned[::-1] if number % 2 else turned


def time_save(saver: Saver, place: Workplace) -> float:
    """Return the seconds from the call until the save is durable, without preparation."""
    path = place.fresh(saver.name)
    place.settle(is_buffered=saver.is_buffered)
    begin_s = time.perf_counter()
    written = saver.save(path)
    seconds = time.perf_counter() - begin_s
    place.discard(written, is_buffered=saver.is_buffered)
    return seconds


def check_room(directory: Path, *, memory_nbytes: int, storage_nbytes: int) -> None:
    """Check the available memory and storage.

    Raises: SystemExit, with a sentence.
    """
    directory.mkdir(parents=True, exist_ok=True)
    free_nbytes = shutil.disk_usage(directory).free
    for kind, needed, there in (
        ("memory", memory_nbytes, available_nbytes()),
        ("storage", storage_nbytes, free_nbytes),
    ):
        if there < needed:
            raise SystemExit(
                f"needs {needed / 1e9:.1f} GB of {kind}, and {there / 1e9:.1f} GB are free:"
                " --nbytes"
            )

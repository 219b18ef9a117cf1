"""What a power cut may leave of a recorded run: a model of the disk, and the states it may be in.

Two models of what is durable before anybody asked for it:

- `POSIX_MIN`, the verdict that counts: of the directory operations that no fsync of the directory
  followed, any subset; of file contents that no fsync followed, each block written, zero or
  garbage, and the size independently of them.
- `EXT4_ORDERED`, the realistic one: directory operations in their order, any number of them, all
  before any fsync; contents without fsync zero, cut or written.

Names that belong to the store alone (`TEMPORARY_PREFIX`) are left out of the states: no listing
shows them. Leftovers are put back where states are laid out on a real file system.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from ckptfmt.store.protocol import TEMPORARY_PREFIX
from tests.stores.hooked import Operation

POSIX_MIN: Final = "posix-min"
EXT4_ORDERED: Final = "ext4-ordered"
#: Up to so many combinations are all taken at a point, if nothing else is said; of more, a sample.
LIMIT: Final = 1 << 10
_SAMPLE_COUNT: Final = 200


@dataclasses.dataclass(frozen=True, slots=True)
class DiskState:
    """What is on the disk after a crash.

    Attributes:
        files: contents by path.
        directories: paths of the directories.
    """

    files: Mapping[str, bytes]
    directories: frozenset[str]

    @property
    def key(self) -> tuple[frozenset[tuple[str, bytes]], frozenset[str]]:
        """What makes two states one."""
        return frozenset(self.files.items()), self.directories


class _File:
    """A file: what was written, and how much of it an fsync followed."""

    def __init__(self, content: bytes = b"", *, synced: bool = False) -> None:
        self.content = content
        self.synced = synced
        self.named = False  # by another name than a temporary's

    def contents(self, model: str) -> list[bytes]:
        """Return every content that the file may have after a crash."""
        if self.synced:
            return [self.content]
        nbytes = len(self.content)
        half = nbytes // 2
        blocks = [self.content[:half], self.content[half:]]
        if model == EXT4_ORDERED:
            return list(
                dict.fromkeys([self.content, b"", bytes(nbytes), blocks[0] + bytes(nbytes - half)])
            )
        each = [(block, bytes(len(block)), b"\xa5" * len(block)) for block in blocks]
        whole = [first + second for first, second in itertools.product(*each)]
        return list(dict.fromkeys([*whole, b"", *each[0]]))


class _Directory:
    """A directory: for each name, what it was when it was last durable, and what it has been since, in order.

    Values are pairs: the number of the operation, and the file, the directory or None (no such
    name).
    """

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[int, _Node | None]]] = {}

    def newest(self, name: str) -> "_Node | None":
        values = self.values.get(name)
        return values[-1][1] if values else None

    def put(self, name: str, node: "_Node | None", number: int) -> None:
        self.values.setdefault(name, [(0, None)]).append((number, node))

    def sync(self) -> None:
        for values in self.values.values():
            del values[:-1]

    def choices(self, name: str, model: str, forced: int) -> "list[_Node | None]":
        """Return what the name may be after a crash, under `POSIX_MIN` each regardless of the others."""
        values = self.values[name]
        if (
            model == EXT4_ORDERED
        ):  # what was forced is the last value up to `forced`; the rest is decided by the cut
            return [values[-1][1]]
        del forced
        return list(dict.fromkeys(node for _, node in values))

    def at(self, name: str, cut: int) -> "_Node | None":
        """Return what the name was after the first `cut` operations, or the oldest that is remembered."""
        values = self.values[name]
        return next((node for number, node in reversed(values) if number <= cut), values[0][1])


_Node = _File | _Directory


class Disk:
    """A disk to which recorded operations are applied one by one.

    Args:
        initial: what is on it, durably, at the start.
    """

    def __init__(self, initial: DiskState | None = None) -> None:
        self._root = _Directory()
        self._files: dict[str, _File] = {}
        self._number = 0
        self._forced = 0
        self.changed = True
        if initial is not None:
            for path in sorted(initial.directories):
                self._put(path, _Directory())
            for path, content in initial.files.items():
                self._put(path, _File(content, synced=True))
            for directory in self._iter_directories(self._root):
                directory.sync()

    def apply(self, operation: Operation) -> None:
        """Carry out a recorded operation; `changed` says whether a crash may leave more than before it."""
        self._number += 1
        path = operation.path
        match operation.op:
            case "mkdir":
                self._put(path, _Directory())
            case "open_new":
                self._files[path] = _File()
                self._put(path, self._files[path])
            case "write":
                file = self._files[path]
                file.content += operation.data
                file.synced = False
            case "write_at" | "preallocate" | "truncate":
                _write_at(self._files[path], operation)
            case "fsync":
                self._files[path].synced = True
                self._forced = self._number
            case "fsync_directory":
                self._directory(path).sync()
                self._forced = self._number
            case "link":
                self._put(operation.to, self._node(path))
            case "rename" | "rename_noreplace":
                self._put(operation.to, self._node(path))
                self._put(path, None)
            case "unlink" | "rmdir":
                self._put(path, None)
            case _:
                raise AssertionError(f"{operation.op} isn't modelled")
        self.changed = self._adds_states(operation)

    def iter_states(
        self, model: str, rng: random.Random, *, limit: int = LIMIT
    ) -> Iterator[DiskState]:
        """Yield what a crash now may leave; all of it, or a sample where there is more than `limit`."""
        if model == EXT4_ORDERED:
            for cut in range(self._forced, self._number + 1):
                yield from self._iter_combinations(model, cut, rng, limit)
        else:
            yield from self._iter_combinations(model, self._number, rng, limit)

    def leftovers(self, rng: random.Random) -> list[str]:
        """Return some of the temporaries that a crash now may leave."""
        found: list[str] = []
        self._collect_temporaries(self._root, "", found)
        return [path for path in found if rng.random() < 0.5]

    def _adds_states(self, operation: Operation) -> bool:
        """Say whether an operation can lead to states that weren't possible before; an fsync only rules some out."""
        match operation.op:
            case "fsync" | "fsync_directory":
                return False
            case "write" | "write_at" | "preallocate" | "truncate":
                return self._files[operation.path].named
            case "open_new" | "unlink":
                return not _is_temporary(operation.path)
            case "link" | "rename" | "rename_noreplace":
                return not _is_temporary(operation.to)
        return True

    def _iter_combinations(
        self, model: str, cut: int, rng: random.Random, limit: int
    ) -> Iterator[DiskState]:
        slots = self._slots(model, cut)
        total = math.prod(len(choices) for _, choices in slots)
        keys = [key for key, _ in slots]
        picks: Iterable[tuple[object, ...]]
        if total <= limit:
            picks = itertools.product(*(choices for _, choices in slots))
        else:
            picks = (
                tuple(rng.choice(choices) for _, choices in slots)
                for _ in range(min(limit, _SAMPLE_COUNT))
            )
        for pick in picks:
            yield self._lay_out(dict(zip(keys, pick, strict=True)), cut)

    def _slots(self, model: str, cut: int) -> list[tuple[object, list[object]]]:
        """Return everything that is free: names of directories, and contents of files, each with its choices."""
        slots: dict[object, list[object]] = {}
        for directory in self._iter_directories(self._root):
            for name in directory.values:
                if _is_temporary(name):
                    continue
                nodes = (
                    [directory.at(name, cut)]
                    if model == EXT4_ORDERED
                    else directory.choices(name, model, cut)
                )
                if len(nodes) > 1:
                    slots[id(directory), name] = list(nodes)
                for node in nodes:
                    if isinstance(node, _File) and not node.synced:
                        slots[node] = list(node.contents(model))
        return list(slots.items())

    def _lay_out(self, pick: dict[object, object], cut: int) -> DiskState:
        files: dict[str, bytes] = {}
        directories: set[str] = set()
        pending: list[tuple[str, _Directory]] = [("", self._root)]
        while pending:
            prefix, directory = pending.pop()
            for name in directory.values:
                if _is_temporary(name):
                    continue
                key = (id(directory), name)
                node = pick[key] if key in pick else directory.at(name, cut)
                path = prefix + name
                if isinstance(node, _Directory):
                    directories.add(path)
                    pending.append((f"{path}/", node))
                elif isinstance(node, _File):
                    content = pick.get(node, node.content)
                    assert isinstance(content, bytes)
                    files[path] = content
        return DiskState(files, frozenset(directories))

    def _iter_directories(self, root: _Directory) -> Iterator[_Directory]:
        """Yield every directory that may be there, also those whose name may be lost."""
        seen = {id(root)}
        pending = [root]
        while pending:
            directory = pending.pop()
            yield directory
            for values in directory.values.values():
                for _, node in values:
                    if isinstance(node, _Directory) and id(node) not in seen:
                        seen.add(id(node))
                        pending.append(node)

    def _collect_temporaries(self, directory: _Directory, prefix: str, found: list[str]) -> None:
        for name, values in directory.values.items():
            if _is_temporary(name) and any(isinstance(node, _File) for _, node in values):
                found.append(prefix + name)
            node = values[-1][1]
            if isinstance(node, _Directory):
                self._collect_temporaries(node, f"{prefix}{name}/", found)

    def _directory(self, path: str) -> _Directory:
        directory = self._root
        for name in path.split("/") if path else []:
            below = directory.newest(name)
            assert isinstance(below, _Directory), path
            directory = below
        return directory

    def _node(self, path: str) -> _Node:
        head, _, name = path.rpartition("/")
        node = self._directory(head).newest(name)
        assert node is not None, path
        return node

    def _put(self, path: str, node: _Node | None) -> None:
        head, _, name = path.rpartition("/")
        if isinstance(node, _File) and not _is_temporary(name):
            node.named = True
        self._directory(head).put(name, node, self._number)


def _write_at(file: _File, operation: Operation) -> None:
    """Apply what isn't a write at the end."""
    before, file.synced = file.content, False
    match operation.op:
        case "write_at":
            end = operation.byte_begin + len(operation.data)
            file.content = before[: operation.byte_begin].ljust(operation.byte_begin, b"\0")
            file.content += operation.data + before[end:]
        case "preallocate":
            file.content = before.ljust(operation.nbytes, b"\0")
        case "truncate":
            file.content = before[: operation.nbytes].ljust(operation.nbytes, b"\0")


def _is_temporary(path: str) -> bool:
    return path.rpartition("/")[2].startswith(TEMPORARY_PREFIX)

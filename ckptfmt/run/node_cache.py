"""The cache of one node: files of saves on the way to the home, and of checkpoints at the home.

Shards, packs and parts lie below ``<cache>/<run id>/`` under their paths at the home. A part allows
another process to finish a save. A part is *settled*, by a file next to it, once the attempt is
decided for this writer; until then the files of the save stay. A process at work on a save holds a
file, which is released when the process ends.

Spec: REQ-RUN-035 to REQ-RUN-037.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.commit.decision import create_once, finalize, read_register
from ckptfmt.commit.waiting import held_path
from ckptfmt.documents.durability import HOME, PEERS
from ckptfmt.documents.manifest import (
    Manifest,
    Origin,
    checkpoint_name,
    parse_checkpoint_name,
    part_path,
)
from ckptfmt.documents.part import Part
from ckptfmt.errors import CkptError, Code, StoreError, err
from ckptfmt.read.files import CheckpointFiles, check_nbytes
from ckptfmt.read.in_caches import find_elsewhere
from ckptfmt.read.report import is_violation
from ckptfmt.read.verified_files import (
    StoppedError,
    VerifiedFile,
    create_verified,
    for_each_file,
    stored_files_of,
)
from ckptfmt.run.lineage import iter_lineage, list_checkpoints, list_launch_numbers, list_launches
from ckptfmt.signing.signer import Signer
from ckptfmt.store import LocalStore, is_url
from ckptfmt.store.protocol import FileSource, SizedChunks, Store

_RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
_SETTLED_SUFFIX: Final = ".settled"
_PART_SUFFIX: Final = ".msgpack"
_PATH: Final = re.compile(
    r"([0-9a-f]{32})/(step-[0-9]{8,}-l[0-9]{4,})/"
    r"(?:parts/|[a-z][a-z_]{0,40}-)([0-9a-f]{16})-([0-9]{5,9})(\.[a-z.]{1,20})"
)
#: Without a limit, 1 / `_FREE_SHARE` of the file system stays free.
_FREE_SHARE: Final = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A cache on a disk of each node, for ``Checkpointer(copies=)``: saves lie there first.

    A save is WRITTEN, and its slot is free, as soon as the cache has the files. The upload to the
    run and the commit follow in the order of the saves; they continue after a temporary outage of
    the run's store. A start first finishes the uploads that a killed process left in the cache, and
    reads the undamaged files from the cache. A failure after WRITTEN appears in the handle and in
    `Checkpointer.reports`, and is raised by `Checkpointer.close`. No guarantee depends on the
    cache: the directory may be deleted at any time.

    Attributes:
        path: directory on a disk of this node (NVMe, tmpfs); other processes and runs may share the
            directory.
        limit_nbytes: greatest size of the cache in bytes; by default None, to leave a tenth of the
            file system free. To make room, the saver removes saves that the run already has, oldest
            first, and then waits for an upload.
        upload_every: period, in saves, of the saves whose files are all uploaded to the run; by
            default 1. The first and the last save of a start are among them. For the other saves,
            only the documents are committed in the run; `Checkpointer.close` uploads the files of
            the newest save, and so does the next start.
        peers: 1 to copy each WRITTEN save to the cache of a process on another node, through
            torch.distributed, in parallel with the training; 0 (the default) for no copy. After the
            loss of a node, a start finishes the replicated saves from the other caches. If the
            partner is gone, hangs for `Job.deadline_s` or has no room, `Checkpointer.reports` has a
            sentence about this, and each save goes to the run.
        node: name of this node, by which `peers` distinguishes nodes; by default None, for the host
            name.

    Raises: StateError(ARGUMENT) for a URL, a number below 1, and `node` without
        `peers`.

    >>> Cache("/nvme/ckpt", upload_every=10).peers
    0
    """

    path: str | os.PathLike[str] = dataclasses.field(kw_only=False)
    limit_nbytes: int | None = None
    upload_every: int = 1
    peers: int = 0
    node: str | None = None

    def __post_init__(self) -> None:
        given: object = self.path
        if not isinstance(given, str | os.PathLike):
            raise err(
                Code.ARGUMENT,
                f"{self.path!r} isn't a directory",
                where="Cache(path=)",
                remedy="Pass a directory on a disk of this node.",
            )
        if type(self.upload_every) is not int or self.upload_every < 1:
            detail = f"upload_every={self.upload_every!r} isn't a positive number"
            remedy = "1 brings every save home, 10 every tenth."
            raise err(Code.ARGUMENT, detail, where="upload_every=", remedy=remedy)
        limit_nbytes = self.limit_nbytes
        if limit_nbytes is not None and (type(limit_nbytes) is not int or limit_nbytes < 1):
            detail = f"limit_nbytes={limit_nbytes!r} isn't a number of bytes"
            remedy = "Give a positive integer, or None to leave a tenth of the disk free."
            raise err(Code.ARGUMENT, detail, where="limit_nbytes=", remedy=remedy)
        if is_url(self.path):
            remedy = "Pass a directory on a disk of this node."
            raise err(
                Code.ARGUMENT,
                f"{self.path!r} isn't a directory",
                where="Cache(path=)",
                remedy=remedy,
            )
        if self.node is not None and (type(self.node) is not str or not self.node):
            detail = f"node={self.node!r} isn't the name of a node"
            raise err(Code.ARGUMENT, detail, where="node=")
        if type(self.peers) is not int or self.peers not in (0, 1):
            remedy = (
                "Pass peers=1: replicas on more nodes would need a partner of each process"
                " on each of these."
            )
            detail = f"peers={self.peers!r} isn't 0 or 1"
            raise err(Code.ARGUMENT, detail, where="peers=", remedy=remedy)
        if self.peers == 0 and self.node is not None:
            raise err(
                Code.ARGUMENT,
                "there are no replicas to place",
                where="node=",
                remedy="Pass peers=1, too.",
            )

    def absolute(self) -> Cache:
        """Return the same cache with an absolute path."""
        return dataclasses.replace(self, path=os.path.abspath(self.path))  # noqa: PTH100

    def as_dict(self) -> dict[str, Any]:
        """Return path and limit as plain values."""
        return {"path": os.fsencode(self.path), "limit_nbytes": self.limit_nbytes}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Cache:
        """Return the cache of the plain values of `as_dict`."""
        return cls(os.fsdecode(value["path"]), limit_nbytes=value["limit_nbytes"])


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class CachedPart:
    """The identity of one writer's save of one step: checkpoint name, attempt and writer."""

    name: str
    attempt: str
    writer: int

    @property
    def launch(self) -> int | None:
        """The launch of the save."""
        parsed = parse_checkpoint_name(self.name)
        return None if parsed is None else parsed[1]

    @property
    def path(self) -> str:
        """The path of the part in the checkpoint's directory."""
        return part_path(self.attempt, self.writer)

    @property
    def settled_path(self) -> str:
        """The path of the file which marks the attempt as decided for this writer."""
        return self.path.removesuffix(_PART_SUFFIX) + _SETTLED_SUFFIX


@dataclasses.dataclass(slots=True)
class _Found:
    """The files of one writer's save in the cache."""

    paths: list[str] = dataclasses.field(default_factory=list)
    nbytes: int = 0
    has_part: bool = False
    settled: str | None = None


class NodeCache:
    """The files of one run in the cache of this node; the cache may hold several runs.

    Any call may raise a StoreError: the directory may be full, or be deleted at any time.

    Args:
        options: path and limit of the cache.
        run_id: id of the run.

    Raises: StoreError.
    """

    def __init__(self, options: Cache, run_id: str) -> None:
        try:
            self._root = LocalStore(os.fspath(options.path), writable=True)
        except CkptError as error:
            if error.code != Code.UNSAFE_FILE:
                raise
            remedy = "Pass ckptfmt.Cache a directory on a disk of this node."
            raise err(
                error.code, error.detail, where=os.fspath(options.path), remedy=remedy
            ) from None
        self._limit_nbytes = options.limit_nbytes
        self._run_id = run_id
        self.store: Final[Store] = self._root.at(run_id)

    def at(self, name: str) -> Store:
        """Return the store of a checkpoint's files."""
        return self.store.at(name)

    def hold(self, part: CachedPart) -> contextlib.AbstractContextManager[None]:
        """Mark a save as being worked on while the context is open. Spec: REQ-RUN-036."""
        return self.at(part.name).hold(held_path(part.attempt, part.writer))

    def is_held(self, part: CachedPart) -> bool:
        """Return whether a living process works on a save."""
        return self.at(part.name).is_held(held_path(part.attempt, part.writer))

    def list_names(self) -> list[str]:
        """Return the names of the checkpoints with files in the cache. Raises: StoreError."""
        return [name[:-1] for name in self.store.list_names("") if name.endswith("/")]

    def list_unfinished(self) -> list[CachedPart]:
        """Return the complete, unsettled saves in the cache held by no process, by step."""
        return [part for part in self._list_unsettled() if not self.is_held(part)]

    def list_held(self) -> list[CachedPart]:
        """Return the complete, unsettled saves in the cache held by a process, by step."""
        return [part for part in self._list_unsettled() if self.is_held(part)]

    def _list_unsettled(self) -> list[CachedPart]:
        found = [
            part for part, files in self._scan().items() if files.has_part and files.settled is None
        ]
        return sorted(found, key=_order)

    def is_unfinished(self, part: CachedPart) -> bool:
        """Return whether a save is complete here, and not settled. Raises: StoreError."""
        names = {f"parts/{name}" for name in self.at(part.name).list_names("parts")}
        return part.path in names and part.settled_path not in names

    def read_part(self, part: CachedPart) -> tuple[Part, bytes]:
        """Return a cached part, parsed and as bytes.

        Raises: IntegrityError; FormatError. Spec: REQ-RUN-035.
        """
        with _as_damage():
            content = self.at(part.name).read(part.path, limit_nbytes=limits.MSGPACK_NBYTES)
        return self._parse(part, content), content

    def _parse(self, part: CachedPart, content: bytes) -> Part:
        found, _ = Part.parse(content, where=part.path)
        origin = found.origin
        name = None if origin.launch is None else checkpoint_name(origin.step, origin.launch)
        if (origin.run_id, name, origin.attempt, found.writer) != (
            self._run_id,
            part.name,
            part.attempt,
            part.writer,
        ):
            raise err(
                Code.DOC_MISMATCH,
                "the cached part doesn't belong to this checkpoint and writer",
                where=part.path,
            )
        return found

    def list_parts(self) -> list[CachedPart]:
        """Return the complete saves in the cache, settled or not, by step. Raises: StoreError."""
        return sorted((part for part, files in self._scan().items() if files.has_part), key=_order)

    def upload(self, part: CachedPart, home: Store, *, has_replica: bool = False) -> None:
        """Copy a save to the home: its files, unless they may stay here, then the part.

        Args:
            home: rooted at the checkpoint's directory.
            has_replica: whether another node's cache surely has the files; without a replica, the
                files of a save of durability "peers" are copied, too.

        Raises: as `upload_files`. Spec: REQ-RUN-035, REQ-CMT-005, REQ-CMT-048.
        """
        found, content = self.read_part(part)
        if found.durability == HOME or (found.durability == PEERS and not has_replica):
            self.upload_files(part, home, found)
        create_once(home, part.path, content=content)
        home.sync("parts")

    def upload_files(
        self,
        part: CachedPart,
        home: Store,
        found: Part | None = None,
        *,
        deadline_s: float = math.inf,
    ) -> None:
        """Copy the files of a save to the home, each byte compared with a digest.

        An existing file at the home stays unchanged. Where the home is full, the files created by
        this call are removed again. After any other error the files stay, for the next try, or
        until a commit or an abort in this directory.

        Args:
            home: rooted at the checkpoint's directory.
            found: the cached part; None to read it.
            deadline_s: time limit of the call, in seconds.

        Raises: IntegrityError, FormatError of files in the cache; StoreError of the home;
            CommitError(SAVE_PENDING).
        Spec: REQ-RUN-035.
        """
        files = stored_files_of(found or self.read_part(part)[0])
        place = self.at(part.name)
        failed = threading.Event()
        end_s = time.monotonic() + deadline_s
        present = set(home.list_names(""))
        created = []

        def copy_file(file: VerifiedFile) -> None:
            chunks = functools.partial(_iter_cached, file, place, failed, end_s)
            if file.path not in present and create_verified(home, file, chunks):
                created.append(file.path)
            check_nbytes(home, file.path, file.nbytes)

        try:
            for_each_file(copy_file, files, failed)
        except CkptError as error:
            for path in created if error.code == Code.NO_SPACE else ():
                with contextlib.suppress(CkptError):
                    home.delete(path)
            raise
        if files:
            home.sync("")

    def take(self, part: CachedPart, source: FileSource) -> None:
        """Copy another node's save to this cache, each byte compared with a digest, the part last.

        The save is held during the copy. After an error, no file of the save stays here.

        Args:
            source: source of the files.

        Raises: StoreError; IntegrityError, FormatError of files in the source; errors of the
            source.
        Spec: REQ-RUN-039, REQ-RUN-040.
        """
        content = source.read(part.path, limit_nbytes=limits.MSGPACK_NBYTES)
        files = stored_files_of(self._parse(part, content))
        place = self.at(part.name)
        present = {*place.list_names(""), *(f"parts/{name}" for name in place.list_names("parts"))}
        if present & {part.path, *(file.path for file in files)}:
            remedy = "Pass ckptfmt.Cache a directory that only the processes of one node share."
            raise err(
                Code.STORE_EXISTS, "both nodes have one cache", where=place.name, remedy=remedy
            )
        nbytes = sum(file.nbytes for file in files) + len(content)
        if not self.make_room(nbytes):
            detail = f"no room for a replica of {nbytes} bytes"
            raise err(
                Code.NO_SPACE,
                detail,
                where=self.store.name,
                remedy="Raise Cache(limit_nbytes=), or free space.",
            )
        with self.hold(part):
            try:
                for file in files:  # in sequence, to hold few chunks at a time
                    # The closing ends the read-ahead threads.
                    with contextlib.closing(file.iter_chunks(source)) as chunks:
                        place.create(file.path, SizedChunks(chunks, file.nbytes))
                place.sync("")
                place.create(part.path, [content])
                place.sync("parts")
            except BaseException:
                self.drop(part)
                raise

    def settle(self, part: CachedPart) -> None:
        """Mark a save as decided for its writer, so that the files may go. Spec: REQ-RUN-037."""
        with contextlib.suppress(CkptError):  # without the mark, the next launch finds the decision
            self.at(part.name).create(part.settled_path, [str(time.time_ns()).encode()])

    def settle_up_to(self, part: CachedPart) -> None:
        """Settle a save committed at the home, and the older saves superseded by the commit.

        The older saves are of the same or an older launch, and of the same or an older step, and no
        process works on them: replicas of other nodes' saves. Each writer copies its own saves to
        the home in their order.

        Spec: REQ-RUN-037.
        """
        bound = _order(part)
        for found, files in self._scan_safely().items():
            with contextlib.suppress(CkptError):
                is_older = all(
                    ours <= theirs for ours, theirs in zip(_order(found), bound, strict=True)
                )
                if (
                    is_older
                    and files.has_part
                    and files.settled is None
                    and not self.is_held(found)
                ):
                    self.settle(found)

    def drop(self, part: CachedPart) -> None:
        """Remove the files of a save from the cache, as far as possible."""
        for found, files in self._scan_safely().items():
            if found == part:
                self._delete(f"{self._run_id}/", part, files)

    def make_room(self, nbytes: int) -> bool:
        """Delete settled saves of all runs, oldest first, until there is room; return the success.

        Raises: StoreError. Spec: REQ-RUN-037.
        """
        runs = {run_id: self._scan(run_id) for run_id in {self._run_id, *self._list_runs()}}
        used_nbytes = sum(files.nbytes for found in runs.values() for files in found.values())
        settled = [
            (files.settled, run_id, part, files)
            for run_id, found in runs.items()
            for part, files in found.items()
            if files.settled is not None
        ]
        for _, run_id, part, files in sorted(
            settled, key=lambda row: (len(row[0]), row[0], row[1], _order(row[2]))
        ):
            if self._fits(nbytes, used_nbytes):
                return True
            self._delete(f"{run_id}/", part, files)
            used_nbytes -= files.nbytes
        return self._fits(nbytes, used_nbytes)

    def tidy(self, committed: Mapping[str, str]) -> None:
        """Remove saves neither committed at the home nor held by a living process.

        Args:
            committed: committed attempts at the home by the names of checkpoints; an empty text
                where the home's register can't be read.

        Spec: REQ-RUN-037.
        """
        names = set()
        for part, files in self._scan_safely().items():
            with contextlib.suppress(CkptError):
                if self.is_held(part):
                    names.add(part.name)
                elif committed.get(part.name) == "":
                    names.add(part.name)  # unknown whether the files are needed
                elif not files.has_part or committed.get(part.name) != part.attempt:
                    self._delete(f"{self._run_id}/", part, files)
                elif files.settled is None:
                    self.settle(part)
        with contextlib.suppress(CkptError):
            for name in {
                entry[:-1] for entry in self.store.list_names("") if entry.endswith("/")
            } - names:
                for prefix in (name, f"{name}/parts"):
                    self.store.delete_leftovers(prefix)
                self.store.remove_directory(name)

    # --- files ------------------------------------------------------------------------------------

    def _list_runs(self) -> list[str]:
        return [name[:-1] for name in self._root.list_names("") if _RUN_ID.fullmatch(name[:-1])]

    def _scan(self, run_id: str | None = None) -> dict[CachedPart, _Found]:
        """Return the files of all saves of a run; None for this run."""
        found: dict[CachedPart, _Found] = {}
        for path in self._root.list(run_id or self._run_id):
            named = _PATH.fullmatch(path)
            if named is None:
                continue
            part = CachedPart(named[2], named[3], int(named[4]))
            files = found.setdefault(part, _Found())
            below = path.partition("/")[2].partition("/")[2]
            with contextlib.suppress(CkptError):  # the file was just deleted
                files.nbytes += self._root.nbytes(path)
                if below == part.settled_path:
                    files.settled = self._root.read(path, limit_nbytes=64).decode(errors="replace")
            files.has_part |= below == part.path
            files.paths.append(below)
        return found

    def _scan_safely(self) -> dict[CachedPart, _Found]:
        with contextlib.suppress(CkptError):
            return self._scan()
        return {}

    def _delete(self, prefix: str, part: CachedPart, files: _Found) -> None:
        """Delete the files of a save.

        The mark of a settled save goes last, to keep any process from finishing the rest.
        """
        last = (part.path, part.settled_path)
        for path in sorted(files.paths, key=lambda path: (path in last, path == part.settled_path)):
            with contextlib.suppress(CkptError):
                self._root.delete(f"{prefix}{part.name}/{path}")

    def _fits(self, nbytes: int, used_nbytes: int) -> bool:
        if self._limit_nbytes is not None and used_nbytes + nbytes > self._limit_nbytes:
            return False
        try:
            room = os.statvfs(self._root.name)
        except OSError as error:
            raise err(Code.STORE_IO, str(error), where=self._root.name) from error
        spare_nbytes = (
            0 if self._limit_nbytes is not None else room.f_blocks * room.f_frsize // _FREE_SHARE
        )
        return room.f_bavail * room.f_frsize - nbytes >= spare_nbytes


def _order(part: CachedPart) -> tuple[int, ...]:
    return _step_of(part.name)


@contextlib.contextmanager
def _as_damage() -> Iterator[None]:
    """Raise errors of the cache's store as damage: no caller waits for a disk to answer again."""
    try:
        yield
    except StoreError as error:
        raise err(
            Code.FILE_MISSING,
            f"the cache can't be read: {error.code}: {error.detail}",
            where=error.where,
        ) from error


def _iter_cached(
    file: VerifiedFile, place: Store, failed: threading.Event, end_s: float
) -> Generator[memoryview, None, None]:
    with _as_damage():
        for chunk in file.iter_chunks(place):
            if failed.is_set():
                raise StoppedError
            if time.monotonic() > end_s:
                raise err(
                    Code.SAVE_PENDING, "the file isn't at home by the deadline", where=file.path
                )
            yield chunk

    # --- a launch after a dead launch -------------------------------------------------------------


def plan_finish(home: Store, tables: Iterable[Iterable[Sequence[Any]]]) -> list[list[Any]]:
    """Return the newest launch's saves that can be finished, by part and process.

    Args:
        home: rooted at the run.
        tables: for each process, rows of name, attempt, writer and number of writers of the
            unfinished saves in its cache.

    Returns: rows of name, attempt, writer, number of writers and process for each part missing at
        the home, by step. Writer and process are -1 for an attempt with all parts at the home.
    Raises: StoreError; errors of a damaged register. Spec: REQ-RUN-036.
    """
    newest = max(list_launch_numbers(home), default=None)
    holders: dict[tuple[str, str, int], dict[int, list[int]]] = {}
    for process, table in enumerate(tables):
        for name, attempt, writer, writer_count in table:
            holders.setdefault((name, attempt, writer_count), {}).setdefault(writer, []).append(
                process
            )
    plan: list[list[Any]] = []
    for (name, attempt, writer_count), writers in sorted(
        holders.items(), key=lambda row: _step_of(row[0][0])
    ):
        parsed = parse_checkpoint_name(name)
        place = home.at(name)
        if parsed is None or parsed[1] != newest or read_register(place) is not None:
            continue
        there = {writer for writer in range(writer_count) if _is_there(place, attempt, writer)}
        if there | set(writers) < set(range(writer_count)):
            continue  # a node is gone with its cache: no process can finish the save
        for writer in sorted(set(writers) - there):
            processes = writers[writer]
            process = writer if writer in processes else processes[writer % len(processes)]
            plan.append([name, attempt, writer, writer_count, process])
        if set(range(writer_count)) <= there:
            plan.append([name, attempt, -1, writer_count, -1])
    return plan


def _step_of(name: str) -> tuple[int, ...]:
    return parse_checkpoint_name(name) or ()


def _is_there(place: Store, attempt: str, writer: int) -> bool:
    try:
        place.nbytes(part_path(attempt, writer))
    except CkptError as error:
        if error.code == Code.FILE_MISSING:
            return False
        raise
    return True


def commit_finished(
    home: Store, plan: Iterable[Sequence[Any]], signer: Signer | None = None
) -> list[str]:
    """Commit the attempts of a plan with all parts at the home, by step; sign their manifests.

    Returns: the errors of uncommitted attempts, as texts.

    Raises: StoreError. Spec: REQ-RUN-036, REQ-CMT-008.
    """
    problems = []
    for name, attempt in dict.fromkeys((row[0], row[1]) for row in plan):
        place = home.at(name)
        try:
            content = place.read(part_path(attempt, 0), limit_nbytes=limits.MSGPACK_NBYTES)
            finalize(place, Part.parse(content, where=name)[0].origin, signer=signer)
        except StoreError:
            raise
        except CkptError as error:
            problems.append(f"CACHE_UNFINISHED: {name}: {error}")
    return problems


def list_in_caches(home: Store, by_hand: str | None = None) -> list[str]:
    """Return the checkpoints to copy home before a launch's choice, the preferred one first.

    Args:
        home: rooted at the run.
        by_hand: name or digest of the checkpoint chosen by hand; None for the candidates of the
            lineage.

    Returns: names of committed checkpoints in caches, up to the first candidate at the home.
    Raises: StoreError; FormatError. Spec: REQ-RUN-041.
    """
    entries = list_checkpoints(home, with_labels=False)
    found = []
    for entry in iter_lineage(list_launches(home), entries) if by_hand is None else entries:
        manifest = entry.manifest
        if manifest is None or by_hand not in (None, entry.name, manifest.digest):
            continue
        if manifest.durability == HOME:
            break
        found.append(entry.name)
    return found


def plan_fetch(
    home: Store,
    name: str,
    tables: Sequence[Iterable[Sequence[Any]]],
    tried: Iterable[tuple[int, int]],
) -> list[list[Any]] | None:
    """Return a process for each part of a checkpoint to copy files home; None if all are there.

    Args:
        home: rooted at the run.
        tables: for each process, rows of name, attempt and writer of the parts in its cache.
        tried: pairs of a writer and a process, for failed copies.

    Returns: rows of name, attempt, writer and process for each part with files missing at the home;
        an empty list if no process has some part's files.
    Raises: StoreError. Spec: REQ-RUN-041.
    """
    try:
        with CheckpointFiles(home.at(name)) as files:
            attempt = files.manifest.origin.attempt
            elsewhere = find_elsewhere(files)
    except CkptError as error:
        if not is_violation(error):
            raise
        return []  # the caller finds the error on opening the checkpoint
    if not elsewhere:
        return None
    plan = []
    for writer in elsewhere:
        wanted = [name, attempt, writer]
        holders = [
            process
            for process, table in enumerate(tables)
            if wanted in [list(row) for row in table]
        ]
        left = [process for process in holders if (writer, process) not in tried]
        if not left:
            return []
        plan.append([*wanted, writer if writer in left else left[writer % len(left)]])
    return plan


def list_committed(home: Store, names: Iterable[str]) -> dict[str, str]:
    """Return the committed attempts by checkpoint name; "" for an unreadable register."""
    found = {}
    for name in names:
        try:
            register = read_register(home.at(name))
        except CkptError:
            found[name] = ""
            continue
        if isinstance(register, Manifest):
            found[name] = register.origin.attempt
    return found


def part_of(origin: Origin, writer: int) -> CachedPart:
    """Return the identity of a writer's save in an attempt of a run."""
    assert origin.launch is not None  # noqa: S101
    return CachedPart(checkpoint_name(origin.step, origin.launch), origin.attempt, writer)

"""Protocols that are broken on purpose, each by one small patch of the real code: the explorer convicts every one.

A patch holds where the protocol is carried out, never where it is judged: crash workloads are
judged after it is taken back, scenes by the main thread, to which `in_actors` leaves the right
code.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest import mock

from ckptfmt.commit import decision as commit
from ckptfmt.documents.manifest import MANIFEST_NAME, Manifest, Origin, index_name
from ckptfmt.documents.run import LAUNCHES
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.read import files
from ckptfmt.run import lineage, mirror, retention
from ckptfmt.store.local import LocalStore
from ckptfmt.store.memory import Loss
from ckptfmt.store.protocol import Buffer, Store
from tests.explorer import copies
from tests.explorer.crashes import Recording, record
from tests.stores.hooked import HookedStore, Operation
from tests.stores.recorder import ACK, RecordingCalls

Patch = Callable[[], AbstractContextManager[Any]]
Operations = tuple[Operation, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CrashMutant:
    """A broken protocol that a crash uncovers.

    Attributes:
        workload: in which.
        rules: those of the judge that may convict it.
        patch: of the code, while it is recorded.
        edit: of what was recorded, where the order of system calls is what is broken.
    """

    workload: str
    rules: frozenset[str]
    patch: Patch = contextlib.nullcontext
    edit: Callable[[Operations], Operations] = lambda operations: operations


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SceneMutant:
    """A broken protocol that a meeting of actors, or a lost request, uncovers.

    Attributes:
        case: in which.
        rules: those of the judge that may convict it.
        patch: of the code, in the actors' threads.
        losses: of the network.
        on_files: whether on a file system; else on objects.
    """

    case: str
    rules: frozenset[str]
    patch: Patch
    losses: tuple[tuple[Loss, str], ...] = ()
    on_files: bool = False


def record_mutant(mutant: CrashMutant) -> Recording:
    """Record the workload of a broken protocol."""
    workload = copies.WORKLOADS[mutant.workload]
    with mutant.patch():
        return record(workload.run, setup=workload.setup, edit=mutant.edit)


class SkipSync(HookedStore):
    """A store that forgets its first so many syncs of a directory, or of any."""

    def __init__(self, inner: Store, path: str | None = None, *, count: int = 1_000_000) -> None:
        super().__init__(inner)
        self._path = path
        self._left = count

    def sync(self, path: str) -> None:
        if self._path in (path, None) and self._left:
            self._left -= 1
        else:
            super().sync(path)


class IndexLast(HookedStore):
    """A store that creates the index only after the register."""

    def __init__(self, inner: Store, origin: Origin) -> None:
        super().__init__(inner)
        self._index = index_name(origin.attempt)
        self._waiting = b""

    def create(self, path: str, chunks: Any) -> None:
        if path == self._index:
            self._waiting = b"".join(chunks)
            return
        super().create(path, chunks)
        if path == MANIFEST_NAME:
            super().create(self._index, [self._waiting])


def in_actors(owner: Any, name: str, broken: Callable[..., Any]) -> Patch:
    """Return a patch that puts `broken`, which is given the right function first, in place of a function."""

    def patch() -> AbstractContextManager[Any]:
        right = getattr(owner, name)

        def either(*arguments: Any, **keywords: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                return right(*arguments, **keywords)
            return broken(right, *arguments, **keywords)

        return mock.patch.object(owner, name, either)

    return patch


def _wrapped(owner: Any, name: str, wrap: Callable[..., Store]) -> Patch:
    """Return a patch that gives a function of an engine another store."""

    def patch() -> AbstractContextManager[Any]:
        right = getattr(owner, name)
        return mock.patch.object(
            owner, name, lambda store, *rest, **more: right(wrap(store, *rest), *rest, **more)
        )

    return patch


# --- of crashes -----------------------------------------------------------------------------------


def _no_file_fsync() -> AbstractContextManager[Any]:
    return mock.patch.object(RecordingCalls, "fsync", return_value=None)


def _last_directory_only() -> AbstractContextManager[Any]:
    def sync(self: LocalStore, path: str) -> None:
        with self._directory(self._full(path)) as directory:
            self._calls.fsync_directory(directory)

    return mock.patch.object(LocalStore, "sync", sync)


def _retire_files_first() -> AbstractContextManager[Any]:
    def retire(store: Store, manifest: Manifest) -> None:
        commit._delete_all_but_register(store)
        commit.retire(store, manifest)

    return mock.patch.object(retention, "retire", retire)


def _fsync_after_link(operations: Operations) -> Operations:
    """Give files their names first, then make their contents durable."""
    edited = list(operations)
    for position in range(len(edited) - 1):
        if edited[position].op == "fsync" and edited[position + 1].op in ("link", "rename"):
            edited[position], edited[position + 1] = edited[position + 1], edited[position]
    return tuple(edited)


def no_shard_fsync(operations: Operations) -> Operations:
    """Leave out the fsync of files with tensors: what a disk does that says it wrote and didn't."""
    shards = {operation.path for operation in operations if operation.to.endswith(".safetensors")}
    return tuple(
        operation
        for operation in operations
        if operation.op != "fsync" or operation.path not in shards
    )


def _ack_before_sync(operations: Operations) -> Operations:
    """Acknowledge a save as soon as the register has its name."""
    edited: list[Operation] = []
    for operation in operations:
        if operation.op == ACK and operation.path.startswith("saved"):
            at = max(
                n
                for n, done in enumerate(edited)
                if done.op == "link" and done.to.endswith(MANIFEST_NAME)
            )
            edited.insert(at + 1, operation)
        else:
            edited.append(operation)
    return tuple(edited)


def _bases_first() -> AbstractContextManager[Any]:
    right = retention._retire_condemned
    return mock.patch.object(
        retention,
        "_retire_condemned",
        lambda store, going, name: right(store, list(reversed(going)), name),
    )


def _rewind_by_lineage() -> AbstractContextManager[Any]:
    right = lineage.begin_launch
    return mock.patch.object(lineage, "begin_launch", lambda store, run, **_: right(store, run))


def _unsynced_mirror() -> AbstractContextManager[Any]:
    right = mirror.mirror_run
    return mock.patch.object(
        copies,
        "mirror_run",
        lambda home, store, **more: right(home, SkipSync(store, "parts"), **more),
    )


def _unsynced_cache() -> AbstractContextManager[Any]:
    right = copies.open_cache
    return mock.patch.object(
        copies, "open_cache", lambda root, run_id: right(SkipSync(root), run_id)
    )


_LOST: Final = frozenset({"lost"})
_PARTIAL: Final = frozenset({"partial", "lost"})

CRASH_MUTANTS: Final = {
    "no_fsync_of_shards": CrashMutant(workload="first_save", rules=_PARTIAL, edit=no_shard_fsync),
    "no_file_fsync": CrashMutant(
        workload="first_save", rules=_PARTIAL | {"stuck"}, patch=_no_file_fsync
    ),
    "fsync_after_the_name": CrashMutant(
        workload="first_save", rules=frozenset({"partial", "stuck"}), edit=_fsync_after_link
    ),
    "no_directory_fsync_before_the_manifest": CrashMutant(
        workload="first_save",
        rules=frozenset({"partial"}),
        patch=_wrapped(commit, "finalize", lambda store, _: SkipSync(store, "parts")),
    ),
    "no_directory_fsync_after_the_manifest": CrashMutant(
        workload="first_save",
        rules=_LOST,
        patch=_wrapped(commit, "finalize", lambda store, _: SkipSync(store, "")),
    ),
    "only_the_last_directory_fsynced": CrashMutant(
        workload="first_save", rules=_LOST | {"stuck"}, patch=_last_directory_only
    ),
    "manifest_before_the_index": CrashMutant(
        workload="first_save",
        rules=frozenset({"partial"}),
        patch=_wrapped(commit, "finalize", IndexLast),
    ),
    "acknowledged_before_the_sync": CrashMutant(
        workload="first_save", rules=_LOST, edit=_ack_before_sync
    ),
    "launch_record_not_synced": CrashMutant(
        workload="resume",
        rules=_LOST,
        patch=_wrapped(lineage, "begin_launch", lambda store, _: SkipSync(store, LAUNCHES)),
    ),
    "retiring_removes_files_first": CrashMutant(
        workload="retirement", rules=frozenset({"partial"}), patch=_retire_files_first
    ),
    "tombstone_not_synced_before_files_go": CrashMutant(
        workload="retirement",
        rules=frozenset({"partial"}),
        patch=_wrapped(retention, "retire", lambda store, _: SkipSync(store, "", count=1)),
    ),
    "bases_retired_before_their_deltas": CrashMutant(
        workload="compaction", rules=_PARTIAL, patch=_bases_first
    ),
    "rewind_resumes_the_newest": CrashMutant(
        workload="rewind", rules=frozenset({"back"}), patch=_rewind_by_lineage
    ),
    "mirror_not_synced_before_the_register": CrashMutant(
        workload="first_copy",
        rules=_PARTIAL,
        patch=_unsynced_mirror,
    ),
    "launches_mirrored_before_their_checkpoints": CrashMutant(
        workload="later_copy",
        rules=_PARTIAL,
        patch=lambda: mock.patch.object(mirror._Mirroring, "_bring_named"),
    ),
    "cache_not_synced": CrashMutant(workload="save_in_cache", rules=_LOST, patch=_unsynced_cache),
}


# --- of meetings and networks ---------------------------------------------------------------------


def _rename_over(_right: Any, self: LocalStore, directory: int, temporary: str, name: str) -> None:
    self._calls.rename(temporary, name, directory)


def _replace_register(_right: Any, store: Store, content: bytes) -> None:
    store.replace(MANIFEST_NAME, content)


def _look_then_replace(_right: Any, store: Store, content: bytes) -> None:
    """Look whether it is free, then write: what isn't exclusive."""
    if commit.read_register(store) is not None:
        raise err(Code.COMMIT_CONFLICT, "taken")
    store.replace(MANIFEST_NAME, content)


def _swallow(*codes: Code) -> Callable[..., None]:
    """Take these errors of creating the register for a success."""

    def decide(_right: Any, store: Store, content: bytes) -> None:
        try:
            store.create(MANIFEST_NAME, [content])
        except CkptError as error:
            if error.code not in codes:
                raise

    return decide


def _delete_on_no_answer(right: Any, store: Store, origin: Origin, **known: Any) -> Manifest:
    try:
        return right(store, origin, **known)  # type: ignore[no-any-return]
    except CkptError as error:
        if error.code == Code.COMMIT_UNKNOWN:
            commit._delete_all_but_register(store)
        raise


def _fail_on_no_answer(_right: Any, store: Store, content: bytes) -> None:
    """Take a lost answer for a failure, and clean up after it."""
    try:
        store.create(MANIFEST_NAME, [content])
    except CkptError as error:
        if error.code == Code.STORE_NO_ANSWER:
            commit._delete_all_but_register(store)
        raise


def _abort_without_record(_right: Any, store: Store, **_: Any) -> bool:
    commit._delete_all_but_register(store)
    return True


def _record_after_files(right: Any, store: Store, **record: Any) -> bool:
    commit._delete_all_but_register(store)
    return bool(right(store, **record))


def _overwrite(
    _right: Any, store: Store, path: str, chunks: Callable[[], list[Buffer]], **_: Any
) -> None:
    store.replace(path, b"".join(chunks()))


def _list_once(_right: Any, store: Store, run: Any = None, **_: Any) -> list[lineage.RunEntry]:
    return [
        lineage._read_entry(store, place, run.run_id if run else None)
        for place in lineage.list_places(store)
    ]


def _launch_without_a_second_look(right: Any, store: Store, name: str) -> bool:
    del right, store, name
    return False


@contextlib.contextmanager
def _never_overtaken() -> Iterator[None]:
    with mock.patch.object(lineage, "is_overtaken", return_value=False):
        yield


_OUTCOME: Final = frozenset({"outcome"})
_MANIFEST_LATE: Final = ((Loss.LATE, MANIFEST_NAME),)

SCENE_MUTANTS: Final = {
    "rename_instead_of_link": SceneMutant(
        case="two_attempts",
        rules=_OUTCOME | _LOST,
        patch=in_actors(LocalStore, "_publish", _rename_over),
        on_files=True,
    ),
    "register_replaced": SceneMutant(
        case="two_attempts",
        rules=_OUTCOME | _LOST,
        patch=in_actors(commit, "_decide", _replace_register),
    ),
    "register_looked_at_then_replaced": SceneMutant(
        case="two_attempts",
        rules=_OUTCOME | _LOST,
        patch=in_actors(commit, "_decide", _look_then_replace),
    ),
    "taken_register_is_success": SceneMutant(
        case="two_attempts",
        rules=_OUTCOME | _LOST,
        patch=in_actors(commit, "_decide", _swallow(Code.STORE_EXISTS)),
    ),
    "no_answer_is_success": SceneMutant(
        case="committer",
        rules=_LOST,
        patch=in_actors(commit, "_decide", _swallow(Code.STORE_NO_ANSWER)),
        losses=((Loss.REQUEST, MANIFEST_NAME),),
    ),
    "no_answer_is_failure": SceneMutant(
        case="committer",
        rules=frozenset({"partial", "reaped"}),
        patch=in_actors(commit, "_decide", _fail_on_no_answer),
        losses=((Loss.ANSWER, MANIFEST_NAME),),
    ),
    "unknown_outcome_cleaned_up": SceneMutant(
        case="committer",
        rules=frozenset({"partial", "reaped"}),
        patch=in_actors(commit, "finalize", _delete_on_no_answer),
        losses=_MANIFEST_LATE * 3,
    ),
    "aborted_without_a_record": SceneMutant(
        case="committer_and_cleaner",
        rules=_PARTIAL | _OUTCOME,
        patch=in_actors(retention, "abort", _abort_without_record),
    ),
    "abort_record_after_the_files": SceneMutant(
        case="committer_and_cleaner",
        rules=_PARTIAL | _OUTCOME,
        patch=in_actors(retention, "abort", _record_after_files),
    ),
    "files_not_looked_for": SceneMutant(
        case="committer_without_a_file",
        rules=_PARTIAL | _OUTCOME,
        patch=in_actors(commit, "_check_file", lambda *_: None),
    ),
    "sizes_not_compared": SceneMutant(
        case="committer_with_a_short_file",
        rules=_PARTIAL | _OUTCOME,
        patch=in_actors(commit, "_check_file", lambda _right, store, path, _: store.nbytes(path)),
    ),
    "launch_number_not_exclusive": SceneMutant(
        case="two_launches",
        rules=_OUTCOME | {"partial", "lost", "stuck"},
        patch=in_actors(lineage, "create_once", _overwrite),
    ),
    "checkpoints_listed_once": SceneMutant(
        case="retiring_saver_and_new_launch",
        rules=_OUTCOME,
        patch=in_actors(lineage, "list_checkpoints", _list_once),
    ),
    "overtaken_launch_decides": SceneMutant(
        case="retiring_saver_and_new_launch", rules=frozenset({"stuck"}), patch=_never_overtaken
    ),
    "retired_while_looking_is_invalid": SceneMutant(
        case="retiring_saver_and_new_launch",
        rules=_OUTCOME,
        patch=in_actors(lineage, "_is_retired", _launch_without_a_second_look),
    ),
}


@contextlib.contextmanager
def _nothing_compared() -> Iterator[None]:
    with (
        mock.patch.object(files.StoredBox, "iter_damages", return_value=iter(())),
        mock.patch.multiple(files, check_nbytes=lambda *_: None, read_header=lambda *_: b""),
    ):
        yield


#: A reader that doesn't compare digests, on a disk that says it wrote what it didn't.
READER_MUTANTS: Final[dict[str, Patch]] = {"nothing_compared": _nothing_compared}

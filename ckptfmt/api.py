"""Save, load, open and validate one checkpoint."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from ckptfmt import limits
from ckptfmt.documents.manifest import Manifest
from ckptfmt.documents.run import LAUNCHES, RUN_NAME
from ckptfmt.engines.commit import check_vacant
from ckptfmt.engines.lineage import check_records, iter_lineage, list_checkpoints, list_launches, read_run
from ckptfmt.engines.reader import Checkpoint
from ckptfmt.engines.verify import Report, verify_checkpoint, verify_run
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.group import EXCHANGE, Agree, make_group
from ckptfmt.handle import SaveReport
from ckptfmt.loading import load_once
from ckptfmt.restore import LoadReport, load_trees
from ckptfmt.saving import Ownership, save_once
from ckptfmt.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptfmt.interop.choice import Patterns, Rename
    from ckptfmt.state import State
    from ckptfmt.store.protocol import Store

    PathOrStore = str | os.PathLike[str] | Store

__all__ = ["load", "open_checkpoint", "save", "validate"]

#: How long writers wait for each other, in seconds.
DEADLINE_S = 600.0


def save(
    path: PathOrStore,
    state: State,
    *,
    step: int,
    writer: tuple[int, int] | None = None,
    agree: Agree = None,
    deadline_s: float = DEADLINE_S,
    block_nbytes: int = limits.BLOCK_NBYTES,
) -> SaveReport:
    """Save a state as one checkpoint directory, committed when this returns.

    With several processes every one of them calls it, and it returns on all of them after the commit.

    Args:
        path: directory of the checkpoint, made if missing; or a store rooted there.
        state: what to save.
        step: training steps done.
        writer: (number, count) of this process; None to ask torch.distributed, else the only one.
        agree: how the processes tell each other what must be the same: None for torch.distributed; an all-gather
            ``agree(value: bytes) -> list[bytes]`` such as mpi4py's ``comm.allgather``; or a token, the same on all
            processes and new at each start, to exchange through the store.
        deadline_s: how long to wait for the other processes, in seconds.
        block_nbytes: size of a digested block in bytes; a power of two.

    Returns: a `SaveReport`.
    Raises: StateError for what can't be saved; LayoutError where the processes contradict each other; CommitError
        (CHECKPOINT_EXISTS; COMMIT_UNKNOWN: it may have been committed); StoreError.
    Spec: REQ-CMT-001 to REQ-CMT-009.

    >>> import ckptfmt, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     ckptfmt.save(directory, ckptfmt.State(data={"position": 24}), step=3).step
    3
    """
    _check_block_nbytes(block_nbytes)
    store = open_store(path, writable=True)
    group = make_group(writer, agree, store, deadline_s=deadline_s)
    manifest = save_once(
        store,
        group,
        state,
        step=step,
        block_nbytes=block_nbytes,
        deadline_s=deadline_s,
        ownership=Ownership(),
        check=lambda: _check_no_run(store),
    )
    if isinstance(agree, str) and group.writer == 0:
        with contextlib.suppress(CkptError):
            _delete_exchange(store, agree)
    return report_save(store.name, manifest)


def load(
    path: PathOrStore,
    state: State | None = None,
    *,
    only: Patterns = None,
    rename: Rename = None,
    allow: Iterable[str] = (),
    strict: bool = False,
    framework: str | None = None,
    writer: tuple[int, int] | None = None,
    agree: Agree = None,
    share: bool = False,
    deadline_s: float = DEADLINE_S,
) -> LoadReport | dict[str, object]:
    """Load a checkpoint into a state, in place; or return what it holds as trees.

    With several processes every one of them calls it: what none of them takes is an error on all. To load on one
    of them alone, pass ``writer=(0, 1)``.

    Args:
        path: directory of a checkpoint, or of a run, whose lineage then says which; or a store rooted there.
        state: what to load into; None to return a mapping from field to tree.
        only: patterns of what to load, by the names in the checkpoint: ``"encoder"`` with everything beneath it,
            ``"layers.*.bias"``, ``"weights:*"`` for a field; optimizer state goes by the name of its parameter. What
            fits none stays as it is, and is neither missing nor unexpected. None for everything.
        rename: what the live names were called: a mapping from live to saved names, or to what they begin with, as in
            ``{"backbone": "encoder"}``; or a function of the live name. Optimizer state goes along. Several live names
            may take the same saved one.
        allow: what may differ, each then reported: any of ``missing``, ``unexpected``, ``dtype``, ``streams``. With
            ``dtype``, tensors are converted to the live dtype, and optimizer state along with its parameter.
        strict: whether random-number streams of another number of processes are an error instead of a report.
        framework: ``torch`` or ``numpy`` for the tensors of trees; None for torch where it is imported.
        writer, agree, deadline_s: as for `save`; an exchange by token needs a directory that can be written.
        share: whether each block that several processes want is read by one, who sends it to the others through
            torch.distributed. It pays where the store is slower than the network between the processes; from a local
            disk it doesn't, as a rule.

    Returns: a `LoadReport` with the claim level that holds; without `state` the trees.
    Raises: IntegrityError where bytes are damaged or missing: the state is partly loaded then, and not fit to go on
        with; StateError where the state doesn't fit: nothing is changed then; UnsupportedError.
    Spec: REQ-OPN-001 to REQ-OPN-008.

    >>> import ckptfmt, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = ckptfmt.save(directory, ckptfmt.State(data={"position": 24}), step=3)
    ...     ckptfmt.load(directory)["data"]
    {'position': 24}
    """
    if state is None:
        if rename is not None:
            raise err(Code.ARGUMENT, "there is no live name without a state", where="rename=")
        with open_checkpoint(path) as checkpoint:
            return load_trees(checkpoint, framework, only=only)
    store = open_store(path, writable=isinstance(agree, str))
    # Not where a save by the same token meets: its writer 0 removes that when others may be here already.
    group = make_group(writer, agree, store.at("loading"), deadline_s=deadline_s)
    with group.together(lambda: Checkpoint(_find_checkpoint(store))) as checkpoint:
        return load_once(state, checkpoint, group, allow=allow, strict=strict, only=only, rename=rename, share=share)


def open_checkpoint(path: PathOrStore, *, digest: str | None = None) -> Checkpoint:
    """Open a checkpoint for reading, lazily and without torch.

    Args:
        path: directory of a checkpoint, or of a run, whose lineage then says which; or a store rooted there.
        digest: the manifest digest that is expected, if one is.

    Returns: a `Checkpoint`; ``checkpoint.weights["layers.0.w"][0:128]`` reads those rows and nothing else.
    Raises: IntegrityError(NOT_COMMITTED and others), FormatError, UnsupportedError, StoreError.
    Spec: REQ-OPN-001 to REQ-OPN-004.
    """
    store = open_store(path, writable=False)
    return Checkpoint(_find_checkpoint(store), digest=digest)


def validate(path: PathOrStore, *, on_progress: Callable[[int], None] | None = None) -> Report:
    """Check every byte of a checkpoint or of a run, and collect all that is wrong.

    Raises: StoreError where the store itself fails, such as a path that isn't there.
    Spec: REQ-OPN-009.
    """
    store = open_store(path, writable=False)
    kind, verify = ("run", verify_run) if is_run(store) else ("checkpoint", verify_checkpoint)
    report = Report(target=store.name, kind=kind, on_progress=on_progress)
    verify(store, report)
    return report


def is_run(store: Store) -> bool:
    """Tell whether a store is rooted at a run."""
    return bool({RUN_NAME, f"{LAUNCHES}/"} & set(store.list_names("")))


def report_save(path: str, manifest: Manifest, removed: tuple[str, ...] = ()) -> SaveReport:
    """Return the report of a committed save."""
    return SaveReport(
        path=path,
        digest=manifest.digest,
        step=manifest.origin.step,
        nbytes=manifest.nbytes,
        writer_count=manifest.origin.writer_count,
        removed=removed,
    )


def _check_no_run(store: Store) -> None:
    if is_run(store):
        raise err(
            Code.CHECKPOINT_EXISTS,
            "a run is here",
            where=store.name,
            requirement="REQ-RUN-016",
            remedy="Save to a directory of its own, or through a Checkpointer.",
        )
    check_vacant(store)


def _find_checkpoint(store: Store) -> Store:
    """Return the store of the checkpoint that a path means: its own, or the head of the run's lineage."""
    if not is_run(store):
        return store
    run = read_run(store)
    launches, entries = list_launches(store, run), list_checkpoints(store, run)
    check_records(store, entries)
    for entry in iter_lineage(launches, entries):
        if isinstance(entry.register, CkptError):
            raise entry.register
        return store.at(entry.name)
    raise err(
        Code.NOT_COMMITTED,
        "the run has no checkpoint yet",
        where=store.name,
        requirement="REQ-RUN-006",
        remedy="Train until the first save.",
    )


def _check_block_nbytes(block_nbytes: int) -> None:
    if not limits.BLOCK_NBYTES_MIN <= block_nbytes <= limits.BLOCK_NBYTES_MAX or block_nbytes & (block_nbytes - 1):
        raise err(
            Code.ARGUMENT,
            f"block_nbytes={block_nbytes}: a power of two from {limits.BLOCK_NBYTES_MIN} to {limits.BLOCK_NBYTES_MAX}",
            where="block_nbytes=",
            requirement="REQ-TEN-005",
        )


def _delete_exchange(store: Store, token: str) -> None:
    for path in store.list(f"{EXCHANGE}/{token}"):
        store.delete(path)
    store.remove_directory(f"{EXCHANGE}/{token}")
    store.remove_directory(EXCHANGE)

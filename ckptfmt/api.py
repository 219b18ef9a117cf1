"""Save, load, open, validate and compact one checkpoint."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, SupportsFloat, overload

from ckptfmt import limits
from ckptfmt.adapters.live import Live, list_doubts
from ckptfmt.adapters.live_trees import find_below
from ckptfmt.adapters.load_plan import Allow, Patterns, Rename
from ckptfmt.adapters.numbering import nest, take_optimizers
from ckptfmt.adapters.placing import load_trees
from ckptfmt.adapters.unsaved import Unheld, Unsaved
from ckptfmt.commit.lone import check_before_opening, check_no_run, is_run, own_place
from ckptfmt.commit.waiting import (
    describe_savers,
    list_held_attempts,
    wait_for_attempts,
    wait_for_savers,
)
from ckptfmt.documents.labels import Labels
from ckptfmt.documents.manifest import MANIFEST_NAME, parse_checkpoint_name
from ckptfmt.documents.run import LAUNCHES, RUN_NAME
from ckptfmt.errors import CkptError, Code, CommitError, IntegrityError, err
from ckptfmt.group import DEADLINE_S, EXCHANGE, Agree, make_group
from ckptfmt.loading.agreement import LoadTries
from ckptfmt.loading.load_report import LoadReport
from ckptfmt.loading.restore import load_once
from ckptfmt.read.files import ReadTries, read_anew, read_manifest
from ckptfmt.read.in_caches import check_at_home
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.report import Report
from ckptfmt.read.verify import verify_checkpoint, verify_run
from ckptfmt.run.compaction import compact_checkpoint, compact_run
from ckptfmt.run.lineage import find_checks, find_head, open_head
from ckptfmt.run.save_job import SaveState, new_origin
from ckptfmt.saving.handle import SaveReport
from ckptfmt.saving.one_save import save_once
from ckptfmt.saving.save_attempt import check_block_nbytes
from ckptfmt.signing.bundles import attach_bundle
from ckptfmt.signing.signer import Signer
from ckptfmt.signing.trust import Trust
from ckptfmt.state import State, check_state, place_of
from ckptfmt.store import is_url, open_store, split_path, suggest_path
from ckptfmt.store.protocol import Store

PathOrStore = str | os.PathLike[str] | Store

_LOG: Final = logging.getLogger("ckptfmt")
#: Descriptions of foreign directories, by the kind recognised by a conversion.
#: Reasons of a `SaveReport` for the full checkpoint of a compaction.
COMPACTED = "made from a delta"
FULL_ALREADY = "it is full already"


def save(
    path: PathOrStore,
    state: State,
    *,
    step: int,
    metrics: Mapping[str, SupportsFloat] | None = None,
    tags: Iterable[str] = (),
    writer: tuple[int, int] | None = None,
    agree: Agree = None,
    deadline_s: float = DEADLINE_S,
    block_nbytes: int = limits.BLOCK_NBYTES,
    replace: bool = False,
    sign: Signer | str | os.PathLike[str] | None = None,
) -> SaveReport:
    """Save a state as one checkpoint directory, which is committed when the call returns.

    With several processes, each process calls the function; the call returns on all processes after
    the commit.

    Args:
        path: directory of the checkpoint, made if missing; or a store rooted there.
        state: the objects to save.
        step: number of training steps done.
        metrics: finite numbers by name, at most 64, such as ``{"eval_loss": 2.31}``, recorded in
            the manifest. With several processes, process 0's metrics are recorded, and the metrics
            of other processes are ignored.
        tags: short strings, at most 32; process 0's tags are recorded.
        writer: (number, count) of this process; None to ask torch.distributed or jax.distributed,
            else (0, 1).
        agree: the exchange of small values between the processes: None for torch.distributed; an
            all-gather ``agree(value: bytes) -> list[bytes]`` such as mpi4py's ``comm.allgather``;
            or a token, equal on all processes and new at each start, for an exchange through the
            store.
        deadline_s: time to wait for the other processes, in seconds.
        block_nbytes: size of a digested block in bytes; a power of two.
        replace: whether to replace an existing checkpoint outside of a run. At every moment, also
            after a crash, either the old checkpoint is whole or the new one; then the files of the
            old checkpoint are deleted. There must be room for both. Other files in the directory
            stay. A symbolic link is replaced by a directory; its target stays.
        sign: a `Signer`, or the file of a private key, to sign the checkpoint; None for no
            signature. Process 0 signs.

    Returns: a `SaveReport`.
    Raises: StateError for an object that can't be saved; LayoutError where the processes contradict
        each other; CommitError(CHECKPOINT_EXISTS; COMMIT_UNKNOWN: the checkpoint may have been
        committed); StoreError.
    Spec: REQ-CMT-001 to REQ-CMT-009.

    >>> import ckptfmt, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     ckptfmt.save(directory, ckptfmt.State(data={"position": 24}), step=3).step
    3
    """
    check_state(state)
    check_block_nbytes(block_nbytes)
    signer = Signer.of(sign)
    check_before_opening(path)
    store = meeting = open_store(path, writable=True)
    group = make_group(writer, agree, meeting, deadline_s=deadline_s)
    if replace:
        group.run_on_first(lambda: own_place(path))
        store = open_store(path, writable=True)  # the path may lead to another directory now
    unsaved: list[Unsaved] = []

    def find_unsaved(live: Live) -> list[str]:
        unsaved.extend(Unheld().find(state, live, looks_around=True))
        return [one.text for one in unsaved]

    save = SaveState(
        store=store,
        origin=new_origin(step=step, block_nbytes=block_nbytes),
        deadline_s=deadline_s,
        replace=replace,
        signer=signer,
    )
    label = functools.partial(Labels.of, metrics, tags)
    manifest = save_once(group, state, save, label=label, unsaved=find_unsaved)
    for sentence in [*list_doubts(state, worker=group.writer), *map(str, unsaved)]:
        _LOG.warning("%s", sentence)
    if isinstance(agree, str) and group.writer == 0:
        with contextlib.suppress(CkptError):
            _delete_exchange(meeting, agree)
    return SaveReport.of(manifest, path=store.name)


@overload
def load(
    path: PathOrStore,
    state: State,
    *,
    only: Patterns = ...,
    rename: Rename = ...,
    allow: Allow = ...,
    strict: bool = ...,
    framework: Literal["torch", "numpy", "jax"] | None = ...,
    writer: tuple[int, int] | None = ...,
    agree: Agree = ...,
    share: bool = ...,
    bases: Iterable[PathOrStore] = ...,
    deadline_s: float = ...,
    wait_s: float = ...,
    digest: str | None = ...,
    require_signature: Trust | str | os.PathLike[str] | None = ...,
) -> LoadReport: ...


@overload
def load(
    path: PathOrStore,
    state: None = ...,
    *,
    only: Patterns = ...,
    rename: Rename = ...,
    allow: Allow = ...,
    strict: bool = ...,
    framework: Literal["torch", "numpy", "jax"] | None = ...,
    writer: tuple[int, int] | None = ...,
    agree: Agree = ...,
    share: bool = ...,
    bases: Iterable[PathOrStore] = ...,
    deadline_s: float = ...,
    wait_s: float = ...,
    digest: str | None = ...,
    require_signature: Trust | str | os.PathLike[str] | None = ...,
) -> dict[str, Any]: ...


def load(
    path: PathOrStore,
    state: State | None = None,
    *,
    only: Patterns = None,
    rename: Rename = None,
    allow: Allow = (),
    strict: bool = False,
    framework: Literal["torch", "numpy", "jax"] | None = None,
    writer: tuple[int, int] | None = None,
    agree: Agree = None,
    share: bool = False,
    bases: Iterable[PathOrStore] = (),
    deadline_s: float = DEADLINE_S,
    wait_s: float = 0.0,
    digest: str | None = None,
    require_signature: Trust | str | os.PathLike[str] | None = None,
) -> LoadReport | dict[str, Any]:
    """Load a checkpoint into a state, in place; or return the contents as trees.

    With several processes, each process calls the function: a saved tensor that no process takes is
    an error on all. To load on a single process, pass ``writer=(0, 1)``.

    Args:
        path: directory of a checkpoint, or of a run, for the checkpoint from which the run goes on;
            or a store rooted there.
        state: the objects to load into; None to return a mapping from field to tree.
        only: patterns of names in the checkpoint, to be loaded: ``"encoder"`` with all names
            beneath it, ``"layers.*.bias"``, ``"weights:*"`` for a field, ``"extra:n"``; optimizer
            state has the name of its parameter. A live tensor that fits no pattern stays unchanged,
            and counts as neither missing nor unexpected. None for all names. A pattern is refused
            if it fits no saved name, or no name that the state takes.
        rename: the saved names of live ones: a mapping from live to saved names, or to prefixes of
            names, as in ``{"backbone": "encoder"}``; or a function of the live name. Optimizer
            state is renamed, too. Several live names may take the same saved name. A saved name
            such as ``extra:ema/module.`` loads weights from a value of ``State(extra=...)``.
        allow: kinds of differences to report instead of to refuse: any of ``missing``,
            ``unexpected``, ``dtype``, ``streams``, ``loader``. With ``dtype``, tensors are
            converted to the live dtype, and optimizer state along with its parameter.
        strict: whether RNG streams of another number of processes, or of other devices, are an
            error instead of a report.
        framework: ``torch``, ``numpy`` or ``jax`` for the tensors of trees; None for torch if
            imported, else numpy. With ``jax``, arrays are on JAX's default device, and typed keys
            come back as keys.
        writer, agree, deadline_s: as in `save`; an exchange by token needs a writable directory.
        share: whether a block wanted by several processes is read by a single process, and sent to
            the rest through torch.distributed. This is faster if the store is slower than the
            network between the processes; for a local disk, usually not.
        bases: further places of the bases of a delta, besides the delta's own directory:
            checkpoints, or directories of checkpoints; a base is recognised by its digest.
        wait_s, digest, require_signature: as in `open`.

    Loading a delta reads the delta's blocks and its bases' blocks of the same tensors, and decodes
    them. A part of a delta may cost more than its share: an optimizer's weights are predicted from
    the moments, so that reading the weights alone (``only="weights:*"``) reads and decodes the
    blocks of the moments, too. `LoadReport.reads` has the numbers: `decoded_nbytes` and
    `read_nbytes`, in addition to `needed_nbytes`.

    Where a save replaces the checkpoint meanwhile, the load starts again with the new checkpoint.

    Returns: a `LoadReport` with the claim level; without `state`, the trees.
    Raises: IntegrityError where bytes are damaged or missing: the state is then partly loaded, and
        must not be used; StateError where the state doesn't fit: then no object is changed, except
        for READ_BACK of an object that differs from the argument of its load_state_dict;
        UnsupportedError; TrustError. An error of an object's own load_state_dict or
        set_extra_state is raised as it is, with a note; other objects are changed then.
    Spec: REQ-OPN-001 to REQ-OPN-008, REQ-OPN-013, REQ-OPN-014.

    >>> import ckptfmt, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = ckptfmt.save(directory, ckptfmt.State(data={"position": 24}), step=3)
    ...     ckptfmt.load(directory)["data"]
    {'position': 24}
    """
    trust = Trust.of(require_signature)
    if state is None:
        if rename is not None:
            raise err(Code.ARGUMENT, "there is no live name without a state", where="rename=")

        tries = ReadTries()
        while True:
            with (
                tries,
                open_checkpoint(
                    path, digest=digest, bases=bases, wait_s=wait_s, require_signature=trust
                ) as checkpoint,
            ):
                return load_trees(checkpoint, framework, only=only)
    check_state(state)
    store = open_store(path, writable=isinstance(agree, str))
    # A separate place: a save with the same token removes its own place at the end, when a load may
    # have begun.
    group = make_group(writer, agree, store.at("loading"), deadline_s=deadline_s)
    places = _open_bases(bases)

    load_tries = LoadTries(group)
    while True:
        with load_tries:
            checkpoint = load_tries.open(
                lambda: _open(path, store, digest=digest, bases=places, wait_s=wait_s, trust=trust)
            )
            with checkpoint, _naming_checkpoint(checkpoint, store):
                if group.writer == 0:
                    _warn_of_pending(checkpoint)
                return load_once(
                    state,
                    checkpoint,
                    group,
                    allow=allow,
                    strict=strict,
                    only=only,
                    rename=rename,
                    share=share,
                )


@contextlib.contextmanager
def _naming_checkpoint(checkpoint: Checkpoint, store: Store) -> Iterator[None]:
    """Add the name of a run's checkpoint to an IntegrityError, so that another one can be chosen.

    Args:
        checkpoint: the open checkpoint.
        store: the store of the path that the caller gave.
    """
    try:
        yield
    except IntegrityError as error:
        if checkpoint.store.name == store.name:
            raise
        raise error.below(checkpoint.store.name) from None


def optimizer_state_dict(
    path: PathOrStore, *keys: str | int, bases: Iterable[PathOrStore] = ()
) -> dict[str, Any]:
    """Return the argument of `torch.optim.Optimizer.load_state_dict`, for a loop without ckptfmt.

    A checkpoint stores optimizer state by the names of parameters; a state_dict stores it by the
    positions of parameters in the groups of the saved optimizer. The optimizer to load must have
    the same groups, with the same parameters in the same order.

    Torch's ``load_state_dict`` converts state, except a step's count, to the dtype of its
    parameter. For state of another dtype, such as float32 moments of bfloat16 weights, a warning is
    logged: a load into a `State` with the live optimizer keeps the dtype.

    Args:
        path: directory of a checkpoint or of a run, or a store rooted there.
        keys: path of the optimizer in ``State(optimizer=...)``: ``"gen"`` for the optimizer of this
            key in ``State(optimizer={"gen": ..., "dis": ...})``; no key if the optimizer is the
            whole field.
        bases: as in `load`.

    Raises: StateError(GROUP_MISMATCH) where the order of the parameters is unknown, because an
        older ckptfmt saved the optimizer, or processes with different parameters did;
        StateError(LEAF_MISSING); errors of `load`.
    """
    is_whole, values = read_anew(lambda: _read_optimizers(path, bases))
    if is_whole and isinstance(values, dict):
        values = values.get("", values)  # the values under extra/ may be next to it
    found, errors = ({}, []) if is_whole else take_optimizers(values, where="optimizer")
    tree = find_below(values if is_whole else nest(found) if found else None, keys)
    if isinstance(tree, dict) and {"state", "param_groups"} <= tree.keys():
        return tree
    if errors:
        raise errors[0]
    there = ", ".join(
        f"optimizer_state_dict(path{''.join(f', {key!r}' for key in place)})" for place in found
    )
    remedy = f"There is: {there}." if there else "Save it in State(optimizer=...)."
    raise err(
        Code.LEAF_MISSING,
        "there is no optimizer of torch",
        where=place_of("optimizer", "/".join(map(str, keys))),
        remedy=remedy,
    )


def _read_optimizers(
    path: PathOrStore, bases: Iterable[PathOrStore]
) -> tuple[bool, dict[str, Any]]:
    """Return whether the field optimizer is a single value, and its values by name."""
    with open_checkpoint(path, bases=bases) as checkpoint:
        _warn_of_conversion(checkpoint)
        names = [
            name
            for field, name, scope in checkpoint.leaves
            if field == "optimizer" and scope == "global"
        ]
        is_whole = "" in names
        kinds = {
            f"optimizer:{name.partition('/')[0]}"
            for name in names
            if name.startswith(("group/", "state/"))
        }
        only = ["optimizer:*"] if is_whole else sorted(kinds)
        return is_whole, load_trees(checkpoint, "torch", only=only).get(
            "optimizer", {}
        ) if only else {}


def open_checkpoint(
    path: PathOrStore,
    *,
    digest: str | None = None,
    bases: Iterable[PathOrStore] = (),
    wait_s: float = 0.0,
    require_signature: Trust | str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Open a checkpoint for reading, lazily and without torch.

    In a run, the newest committed checkpoint of the lineage is opened. While a living saver hasn't
    finished a save, to the run or in the place of this checkpoint, a newer checkpoint may follow:
    then a warning is logged, and `Checkpoint.pending` names the saver.

    A later read raises IntegrityError(CHECKPOINT_RETIRED) where a save has replaced the checkpoint
    since, or a training has retired the checkpoint, and the files are gone: open the path again.

    Args:
        path: directory of a checkpoint, or of a run, for the checkpoint from which the run goes on;
            or a store rooted there.
        digest: the expected digest of the manifest; None for any.
        bases: as in `load`; a base is looked up when its blocks are first read.
        wait_s: greatest time to wait until no saver has an unfinished save in this place, in
            seconds.
        require_signature: the accepted signers: a `Trust`, or the file of a public key; None to
            accept an unsigned checkpoint. The signature is verified before anything else is read.

    Returns: a `Checkpoint`. ``checkpoint.weights["layers.0.w"][0:128]`` reads only these rows, and
        of a delta the blocks needed to decode them: see `load`.

    Raises: IntegrityError(NOT_COMMITTED and others), FormatError, UnsupportedError, StoreError;
        TrustError(SIGNATURE_MISSING, ROLLED_BACK).
    Spec: REQ-OPN-001 to REQ-OPN-004, REQ-OPN-013, REQ-RUN-019, REQ-SIG-004 to REQ-SIG-006.
    """
    store = open_store(path, writable=False)
    trust = Trust.of(require_signature)
    places = _open_bases(bases)
    checkpoint = _open(path, store, digest=digest, bases=places, wait_s=wait_s, trust=trust)
    _warn_of_pending(checkpoint)
    return checkpoint


def validate(
    path: PathOrStore,
    *,
    bases: Iterable[PathOrStore] = (),
    on_progress: Callable[[int], None] | None = None,
    require_signature: Trust | str | os.PathLike[str] | None = None,
) -> Report:
    """Check every byte of a checkpoint or of a run, and of their bases, and collect all violations.

    Args:
        path: directory of a checkpoint or of a run; or a store rooted there.
        bases: as in `load`. If any place is given, frozen bases are checked as well: there, or at
            the recorded place, unless this is a URL outside of the checkpoint's bucket.
        on_progress: called with the number of bytes just checked.
        require_signature: the signers of each checkpoint, as in `open`; None to check no signature.
            A run's checkpoints aren't compared with a pin.

    Returns: a `Report`, separately for own bytes, references and their closure.
    Raises: StoreError where the store itself fails, for example for a missing path.
    Spec: REQ-OPN-009.
    """
    trust = Trust.of(require_signature)
    store = open_store(path, writable=False)
    places = _open_bases(bases)
    if is_run(store):
        report = Report(target=store.name, kind="run", on_progress=on_progress)
        verify_run(store, report, bases=places, require_signature=trust)
        return report
    report = Report(target=store.name, kind="checkpoint", on_progress=on_progress)
    verify_checkpoint(store, report, bases=places, check=find_checks(path, store, trust))
    return report


def compact(
    path: PathOrStore,
    *,
    out: PathOrStore | None = None,
    take_over: bool = False,
    bases: Iterable[PathOrStore] = (),
    on_progress: Callable[[int], None] | None = None,
    sign: Signer | str | os.PathLike[str] | None = None,
) -> SaveReport:
    """Make a full checkpoint of a delta, in constant memory, outside of a run or in the run.

    Args:
        path: path of a checkpoint; or of a run, for its newest checkpoint.
        out: directory of the full checkpoint, outside of a run. Exactly one of `out` and
            `take_over` is required.
        take_over: write the full checkpoint into the run at `path`, in a new launch that resumes
            from the delta. Then the run goes on from the full checkpoint; a later clean-up removes
            the delta and its bases; a training that still runs there is fenced off.
        bases: as in `load`; with `out` only.
        on_progress: called with the number of bytes just checked, or written.
        sign: as in `save`: the full checkpoint has another manifest, without a signature otherwise.

    Returns: a `SaveReport` of the full checkpoint; if the run's newest checkpoint is full already,
        of this checkpoint.
    Raises: CommitError(CHECKPOINT_EXISTS, SAVE_PENDING and others); IntegrityError;
        StateError(ARGUMENT); StoreError.
    Spec: REQ-CKP-006, REQ-CKP-007, REQ-RUN-004, REQ-RUN-008.
    """
    if (out is None) != take_over:
        remedy = (
            "Pass out= with a new path; or take_over=True to write into the run, which"
            " fences off its training."
        )
        raise err(
            Code.ARGUMENT,
            "exactly one of out= and take_over=True is needed",
            where="out=",
            remedy=remedy,
        )
    signer = Signer.of(sign)
    if out is None:
        run = open_store(path, writable=True)
        if not is_run(run):
            raise err(
                Code.ARGUMENT,
                "this directory isn't a run",
                where=run.name,
                remedy="Pass out= with a new path.",
            )
        name, manifest, is_new = compact_run(run, on_progress=on_progress, signer=signer)
        return SaveReport.of(
            manifest, path=run.at(name).name, reason=COMPACTED if is_new else FULL_ALREADY
        )
    with open_checkpoint(path, bases=bases) as checkpoint:
        _check_out(out, checkpoint)
        store = open_store(out, writable=True)
        check_no_run(store)
        manifest = compact_checkpoint(checkpoint, store, on_progress=on_progress, signer=signer)
    return SaveReport.of(manifest, path=store.name, reason=COMPACTED)


def sign(
    path: PathOrStore,
    key: Signer | str | os.PathLike[str] | None = None,
    *,
    bundle: bytes | None = None,
) -> str:
    """Sign a committed checkpoint, or add a signature made elsewhere.

    Only the manifest is read: the signature says that the digests are right, and `validate` that
    the bytes have these digests. An earlier signature by the same key is replaced.

    Args:
        path: directory of a checkpoint, or of a run, for the checkpoint from which the run goes on;
            or a store rooted there.
        key: a `Signer`, or the file of a private key. Exactly one of `key` and `bundle` is
            required.
        bundle: content of a bundle of Sigstore that signs the file ``manifest.json``. The
            signature isn't verified here.

    Returns: the path of the new file in the checkpoint's directory.
    Raises: StateError(ARGUMENT); TrustError(SIGNATURE_MISSING) for a bundle that signs other
        bytes; IntegrityError(NOT_COMMITTED and others); StoreError.
    Spec: REQ-SIG-001 to REQ-SIG-003.
    """
    signer = Signer.of(key)
    if (signer is None) == (bundle is None):
        remedy = "Pass the file of a private key, or the content of a bundle."
        raise err(Code.ARGUMENT, "either key or bundle= is needed", where="sign()", remedy=remedy)
    store = open_store(path, writable=True)
    if is_run(store):
        store = store.at(find_head(store)[0])
    manifest = read_manifest(store)
    content = store.read(MANIFEST_NAME, limit_nbytes=limits.MANIFEST_NBYTES)
    if signer is None:
        return attach_bundle(store, manifest, content, bundle or b"")
    return signer.sign(store, manifest, content)


def _check_out(out: PathOrStore, checkpoint: Checkpoint) -> None:
    """Raise where a checkpoint outside of a run would lie in a run, or in its source.

    Spec: REQ-CKP-007.
    """
    if not isinstance(out, str | os.PathLike):
        return
    parent, name = split_path(out)
    if f"{parent}/{name}/".startswith(f"{'/'.join(split_path(checkpoint.store.name))}/"):
        raise err(
            Code.ARGUMENT,
            "the target is in the source",
            where=str(out),
            remedy="Give a path outside of the source.",
        )
    if parse_checkpoint_name(name) and is_run(open_store(parent, writable=False)):
        remedy = "Give a path outside of the run, or compact the run itself."
        raise err(
            Code.ARGUMENT,
            "the run around the target would count the target among the run's checkpoints",
            where=str(out),
            remedy=remedy,
        )


def _open(
    path: PathOrStore,
    store: Store,
    *,
    bases: Sequence[Store],
    digest: str | None = None,
    wait_s: float = 0.0,
    trust: Trust | None = None,
) -> Checkpoint:
    """Open the checkpoint of a path: the path's own, or the head of the run's lineage."""
    is_in_run = is_run(store)
    # Before the registers are read: a save decided in between is released, and seen there.
    held = (
        wait_for_savers(store, deadline_s=wait_s)
        if is_in_run
        else _wait_for_attempts(store, wait_s)
    )

    def open_committed() -> Checkpoint:
        if is_in_run:
            found = open_head(store, digest=digest, bases=bases, require_signature=trust)
        else:
            check = find_checks(path, store, trust)
            found = Checkpoint(store, digest=digest, bases=bases, check=check)
        check_at_home(found)
        return found

    try:
        checkpoint = read_anew(open_committed)
    except IntegrityError as error:
        if error.code == Code.NOT_COMMITTED and not held:
            raise _say_what_is_there(error, path) from None
        if error.code != Code.NOT_COMMITTED:
            raise
        detail = f"{error.detail}; {describe_savers(held)} hasn't finished a save yet"
        raise err(
            error.code, detail, where=error.where, remedy="Wait for that save: pass wait_s=."
        ) from error
    checkpoint.pending = tuple(held)
    return checkpoint


def _warn_of_conversion(checkpoint: Checkpoint) -> None:
    """Warn of state that torch's ``load_state_dict`` converts to the dtype of its parameter."""
    dtypes = {
        name: tensor.dtype
        for tensor in checkpoint.tensors.values()
        if tensor.field == "weights" and "float" in tensor.dtype
        for name in (tensor.name, *tensor.aliases)
    }
    found = []
    for tensor in checkpoint.tensors.values():
        parameter, _, key = tensor.name.rpartition("/")
        if (
            tensor.field == "optimizer"
            and key != "step"
            and dtypes.get(parameter, tensor.dtype) != tensor.dtype
        ):
            found.append(f"{tensor.name} is {tensor.dtype}, and its parameter {dtypes[parameter]}")
    if found:
        _LOG.warning(
            "%s: load_state_dict of torch converts %d tensors of the optimizer to the dtype of"
            " their parameters, which"
            " changes bits (%s); ckptfmt.load into a State with the live optimizer keeps them",
            checkpoint.title,
            len(found),
            found[0],
        )


def _say_what_is_there(error: CkptError, path: PathOrStore) -> CkptError:
    """Return the error for a local path without a checkpoint, with a fitting remedy."""
    if not isinstance(path, str | os.PathLike) or is_url(path):
        return error
    if not os.path.lexists(path):
        detail = "nothing is at this path"
        remedy = suggest_path(os.fsdecode(path))
        return err(
            error.code,
            detail,
            where=os.fsdecode(path),
            requirement=error.requirement,
            remedy=remedy,
        )
    kind = _foreign_kind(path)
    if kind is None:
        return error
    remedy = (
        f"Make a checkpoint of it: python -m ckptfmt convert {os.fsdecode(path)} imported"
        " --to ckptfmt"
    )
    detail = f"this is {kind}, and no checkpoint of ckptfmt"
    return err(
        error.code, detail, where=os.fsdecode(path), requirement=error.requirement, remedy=remedy
    )


def _foreign_kind(path: str | os.PathLike[str]) -> str | None:
    """Return a description of a directory of another library, recognised by file names."""
    try:
        names = {entry.name for entry in Path(path).iterdir()}
    except OSError:
        return None
    if names & {MANIFEST_NAME, RUN_NAME, LAUNCHES, "parts"}:
        return None
    if ".metadata" in names:
        return "a directory of torch.distributed.checkpoint"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "a Hugging Face directory of safetensors files"
    return None


def _wait_for_attempts(store: Store, wait_s: float) -> list[str]:
    """Return the attempts still held after a wait."""
    with contextlib.suppress(CommitError):  # raised at the deadline
        wait_for_attempts(store, deadline_s=wait_s)
    return list_held_attempts(store)


def _warn_of_pending(checkpoint: Checkpoint) -> None:
    if checkpoint.pending:
        _LOG.warning(
            "%s was opened while %s has a save in hand: a newer checkpoint may be committed at"
            " any moment; wait for it"
            " with wait_s=",
            checkpoint.title,
            describe_savers(checkpoint.pending),
        )


def _open_bases(bases: Iterable[PathOrStore]) -> list[Store]:
    """Return the stores of `bases`. Raises: StateError(ARGUMENT) for a single path."""
    if isinstance(bases, str | os.PathLike):  # a string would be iterated letter by letter
        raise err(
            Code.ARGUMENT,
            "bases= is a single path",
            where="bases=",
            remedy="Give a list of paths or stores.",
        )
    return [open_store(base, writable=False) for base in bases]


def _delete_exchange(store: Store, token: str) -> None:
    for path in store.list(f"{EXCHANGE}/{token}"):
        store.delete(path)
    store.remove_directory(f"{EXCHANGE}/{token}")
    store.remove_directory(EXCHANGE)

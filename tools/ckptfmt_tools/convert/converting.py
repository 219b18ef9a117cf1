"""One conversion: recognise and read the source, plan the target, stream the tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib
import os
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from ckptfmt.adapters import check_torch
from ckptfmt.box import Box
from ckptfmt.commit.lone import check_no_run, check_outside
from ckptfmt.digest import block_digests
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.manifest import FIELDS, MANIFEST_NAME, Manifest
from ckptfmt.documents.part import Leaf
from ckptfmt.documents.run import LAUNCHES, RUN_NAME
from ckptfmt.documents.tables import sort_key, sort_rows
from ckptfmt.documents.tree import dump_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, FormatError, IntegrityError, LayoutError, err, remedy_of
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.reading import carrier_of
from ckptfmt.run.save_job import SaveJob, SaveState, new_origin
from ckptfmt.state import IMPORTED
from ckptfmt.store import LocalStore, empty_path, is_url, local_path, open_store, suggest_path
from ckptfmt.store.posix import PosixCalls
from ckptfmt.store.protocol import TEMPORARY_PREFIX, Store
from ckptfmt.write.image import Context, Piece, plan_image
from ckptfmt.write.snapshot import Snapshot
from ckptfmt.write.writer import LiveContents, check_snapshot, write_image
from ckptfmt_tools.convert import hf, torch_sources
from ckptfmt_tools.convert.adapter_directory import adapters_of, plan_adapters
from ckptfmt_tools.convert.content import ANEW, COPY, Content, LeftOut, Tensor, map_tree
from ckptfmt_tools.convert.fields import assemble, find_step, nothing_in, parse_rules, sort_fields
from ckptfmt_tools.convert.hf import INDEX_NAME
from ckptfmt_tools.convert.hub import HubOptions, plan_files
from ckptfmt_tools.convert.recognition import check_format, is_safetensors, is_torch, read_head

#: Options of a Hugging Face directory, if the caller gives none.
DEFAULTS: Final = HubOptions(max_shard_nbytes=5 * 10**9)

#: The part of a checkpoint without a counterpart in foreign formats.
_PROOF = (LeftOut("digests", "the target has none: damage to it won't be noticed"),)

_TORCH_FORMATS: Final[dict[str, tuple[Callable[[str, Content], object], str]]] = {
    "torch": (torch_sources.read_file, "a torch.save file"),
    "dcp": (torch_sources.read_directory, "a directory of torch.distributed.checkpoint"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A planned conversion: every error knowable before writing has been raised.

    Attributes:
        source, source_kind: path or URL of the source, and its kind.
        target, target_kind: path or URL of the target, and its kind.
        step: number of training steps done, by the source or the caller; None if neither gives it.
        step_key: key of the step in a foreign source; None where the source has none, or the caller
            gives the step.
        tensor_count: number of tensors written.
        nbytes: bytes of these tensors.
        left_out: parts of the source that the target lacks, or holds differently.
        write: the function to write the target. Arguments: a path, or a store for a
            bucket, and a function to receive the number of bytes of each piece written.
        content: contents of the source.
    """

    source: str
    source_kind: str
    target: str
    target_kind: str
    step: int | None
    step_key: str | None
    tensor_count: int
    nbytes: int
    left_out: list[LeftOut]
    write: Callable[[Any, Callable[[int], None]], None]
    content: Content

    def run(self, on_progress: Callable[[int], None]) -> None:
        """Write the target, whole or not at all.

        Raises: StoreError; errors of reading the source.
        """
        if is_url(self.target):  # a checkpoint, whose manifest is written last
            store = open_store(self.target, writable=True)
            check_no_run(store)
            self.write(store, on_progress)
            return
        with staged(self.target) as path:
            self.write(path, on_progress)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The plan of a target: tensors to write, parts left out, and the function to write."""

    tensors: list[Tensor]
    left_out: list[LeftOut]
    write: Callable[[Any, Callable[[int], None]], None]


@contextlib.contextmanager
def plan_conversion(
    source: str,
    target: str,
    *,
    from_kind: str | None = None,
    to_kind: str | None = None,
    open_checkpoint: Callable[[str], Checkpoint],
    rules: Iterable[str] = (),
    only: str | None = None,
    step: int | None = None,
    hub: HubOptions = DEFAULTS,
) -> Iterator[Conversion]:
    """Read a source's structure and plan the target; the source stays open until the context ends.

    Args:
        source: path of the source, or the URL of a checkpoint of ckptfmt.
        target: path of the target, or the URL for a checkpoint of ckptfmt; the path must not exist.
        from_kind, to_kind: kinds of source and target, of `KINDS`; None to recognise them.
        open_checkpoint: a function to open a checkpoint of ckptfmt, or the head of a run.
        rules: ``KEY=FIELD`` for entries of a torch or DCP source.
        only: the only field to convert; None for all fields.
        step: number of training steps done, which replaces the source's number; None for the
            source's number.
        hub: options of a Hugging Face directory.

    Raises: CkptError of any code.
    """
    source, target = (local_path(path) or path for path in (source, target))
    check_paths(source, target)
    from_kind = from_kind or source_kind(source)
    to_kind = to_kind or target_kind(target, from_kind)
    if only is not None and only not in FIELDS:
        raise err(
            Code.ARGUMENT, f"{only!r} is none of the fields {', '.join(FIELDS)}", where="--only"
        )
    _check_kinds(source, from_kind, target, to_kind)
    rules = parse_rules(rules)
    if rules and from_kind not in _TORCH_FORMATS:
        raise err(
            Code.ARGUMENT, f"a source of kind {from_kind} has its fields already", where="--field"
        )
    if to_kind != "hf" and (hub.like is not None or hub.card):
        detail = f"a target of kind {to_kind} has neither a model card nor a tokenizer"
        raise err(Code.ARGUMENT, detail, where="--like" if hub.like is not None else "--card")
    if step is not None and to_kind in ("hf", "safetensors"):
        raise err(Code.ARGUMENT, f"a target of kind {to_kind} has no step", where="--step")
    if step is not None and from_kind == "ckptfmt":
        raise err(Code.ARGUMENT, "a checkpoint of ckptfmt has its step already", where="--step")
    with contextlib.ExitStack() as opened:
        if from_kind != "ckptfmt":
            opened.enter_context(_foreign_remedies())
        opened.enter_context(warnings.catch_warnings())
        # Torch warns of a new dtype, and of a missing process group.
        warnings.simplefilter("ignore")
        if from_kind == "ckptfmt":
            content = read_checkpoint(opened.enter_context(open_checkpoint(source)))
        else:
            content = _read_foreign(source, from_kind, rules, step)
            _check_refused(content, "weights" if to_kind in ("hf", "safetensors") else only)
        plan = _PLANS[to_kind](content, only, hub)
        kept = content.left_out if only is None or from_kind != "ckptfmt" else []
        if from_kind == "ckptfmt" and only is None:
            of_step = LeftOut(
                f"step {content.step}",
                "the target has no place for it; to convert it back, pass --step",
            )
            kept = [*_PROOF, *([of_step] if to_kind in ("hf", "safetensors") else []), *kept]
        yield Conversion(
            source=source,
            source_kind=from_kind,
            target=target,
            target_kind=to_kind,
            step=content.step,
            step_key=content.step_key,
            tensor_count=len(plan.tensors),
            nbytes=sum(tensor.nbytes for tensor in plan.tensors),
            left_out=kept + plan.left_out,
            write=plan.write,
            content=content,
        )


#: Remedies for a foreign source, by code or class of the error: the table of codes has remedies for
#: checkpoints only.
_FOREIGN_REMEDIES: Final[dict[object, str]] = {
    FormatError: (
        "Fetch the file again; if the error stays, write it anew with the program that made it."
    ),
    IntegrityError: COPY,
    LayoutError: (
        "Copy the directory again from where it came from; if the error stays, save it anew."
    ),
    Code.STATE_UNSUPPORTED: ANEW,
    Code.STATE_NAME: "Save it anew with other keys; or convert one field of it, by --only.",
    Code.SHAPE_MISMATCH: (
        "Copy the directory again from where it came from; if the error stays, save it anew."
    ),
}


@contextlib.contextmanager
def _foreign_remedies() -> Iterator[None]:
    """Replace the default remedy of a foreign source's error by a suitable remedy."""
    try:
        yield
    except CkptError as error:
        if error.remedy == error.code.remedy:
            error.remedy = _FOREIGN_REMEDIES.get(
                error.code, _FOREIGN_REMEDIES.get(type(error), error.remedy)
            )
        raise


def _read_foreign(source: str, kind: str, rules: dict[str, str], step: int | None) -> Content:
    """Return the contents of a foreign source; `step`, if given, replaces the source's own step."""
    content = _read_source(source, kind, rules, step)
    if step is not None:
        content.step = step
        content.step_key = None
    return content


def _check_refused(content: Content, only: str | None) -> None:
    """Check that every value to be converted of a foreign source can be converted.

    Raises: StateError(STATE_UNSUPPORTED) for the first value that can't; the remedy names a field
        that can be converted alone.
    """
    for field, refused in content.refused.items():
        if only in (None, field):
            error = refused.error
            held = {key[0] for key in content.tensors}
            if only is None and "weights" in held and "weights" not in content.refused:
                error.remedy = (
                    f"Convert the weights without it, by --only weights. Or: {error.remedy}"
                )
            raise error


def _read_source(source: str, kind: str, rules: dict[str, str], step: int | None) -> Content:
    if kind in ("hf", "safetensors"):
        return hf.read_directory(source)
    read, origin = _TORCH_FORMATS[kind]
    content = Content(origin=origin)
    root = read(source, content)
    content.step, content.step_key = find_step(root) or (None, None)
    if step not in (None, content.step):
        content.step_key = None
    sort_fields(root, rules, content, where=source)
    return content


def _torch_side() -> ModuleType:
    try:
        check_torch(importlib.import_module("torch"))
        return importlib.import_module("ckptfmt_tools.convert.torch_targets")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        remedy = 'pip install "ckptfmt[torch]"'
        raise err(
            Code.ARGUMENT, "this kind of checkpoint needs torch", where="torch", remedy=remedy
        ) from None


def _plan_native(content: Content, only: str | None, _hub: HubOptions) -> _Target:
    if only is not None:
        content.tensors = {key: tensor for key, tensor in content.tensors.items() if key[0] == only}
        content.leaves = {key: tree for key, tree in content.leaves.items() if key[0] == only}
        if not content.tensors and not content.leaves:
            raise nothing_in(only)
    snapshot = snapshot_of(content)

    def write(place: Path | Store, on_progress: Callable[[int], None]) -> None:
        store = LocalStore(place, writable=True) if isinstance(place, Path) else place
        write_checkpoint(store, snapshot, step=content.step or 0, on_progress=on_progress)

    return _Target(tensors=list(content.tensors.values()), left_out=[], write=write)


def _plan_hf(content: Content, only: str | None, hub: HubOptions) -> _Target:
    adapters = adapters_of(content)
    others: dict[str, bytes] = {}
    if adapters:
        layout, others = plan_adapters(content, adapters, only)
    else:
        layout = hf.plan_layout(content, max_shard_nbytes=hub.max_shard_nbytes, only=only)
    others |= plan_files(content, layout.tensors, hub, adapter=bool(adapters))

    def write(path: Path, on_progress: Callable[[int], None]) -> None:
        store = LocalStore(path, writable=True)
        hf.write_directory(store, layout, others, on_progress=on_progress)

    return _Target(tensors=layout.tensors, left_out=layout.left_out, write=write)


def _plan_safetensors(content: Content, only: str | None, _hub: HubOptions) -> _Target:
    layout = hf.plan_layout(content, max_shard_nbytes=None, only=only)

    def write(path: Path, on_progress: Callable[[int], None]) -> None:
        (rows,) = layout.files.values()
        hf.write_file(
            LocalStore(path.parent, writable=True), path.name, rows, on_progress=on_progress
        )

    return _Target(tensors=layout.tensors, left_out=layout.left_out, write=write)


def _plan_torch(content: Content, only: str | None, _hub: HubOptions) -> _Target:
    side = _torch_side()
    root, left_out = _fitting(content, only, side, numbered=True)
    tensors = list({id(tensor): tensor for tensor in side.iter_tensors(root)}.values())

    def write(path: Path, on_progress: Callable[[int], None]) -> None:
        side.write_file(root, path, on_progress=on_progress)

    return _Target(tensors=tensors, left_out=left_out, write=write)


def _plan_dcp(content: Content, only: str | None, _hub: HubOptions) -> _Target:
    side = _torch_side()
    root, left_out = _fitting(content, only, side, numbered=False)
    flat = side.plan_flat(root)

    # Torch's writer makes an archive of each tensor, half a millisecond each: 28,000 tensors in a
    # megabyte take 15 s. The number of tensors isn't limited here; to convert an untrusted file,
    # bound the time by a limit of the process.
    def write(path: Path, on_progress: Callable[[int], None]) -> None:
        side.write_directory(path, flat, on_progress=on_progress)

    return _Target(
        tensors=list(flat.tensors.values()), left_out=left_out + flat.left_out, write=write
    )


def _fitting(
    content: Content, only: str | None, side: ModuleType, *, numbered: bool
) -> tuple[dict[str, Any], list[LeftOut]]:
    """Return a nested mapping of values for torch, and the parts left out."""
    root, left_out = assemble(content, only, side.fit, numbered=numbered)
    if only is None and content.step is not None:
        root["step"] = content.step

    def check(value: object, _: str) -> object:
        if isinstance(value, Tensor):
            side.check_dtype(value.dtype)
        return value

    root = map_tree(root, check, drop=lambda path, reason: left_out.append(LeftOut(path, reason)))
    return root, left_out


_PLANS: dict[str, Callable[[Content, str | None, HubOptions], _Target]] = {
    "ckptfmt": _plan_native,
    "torch": _plan_torch,
    "dcp": _plan_dcp,
    "hf": _plan_hf,
    "safetensors": _plan_safetensors,
}


KINDS: Final = ("ckptfmt", "torch", "dcp", "hf", "safetensors")

_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin")
_SAY: Final = f"Say which kind it is: {', '.join(KINDS)}."


def source_kind(path: str) -> str:
    """Return the kind of the checkpoint at `path`.

    Raises: IntegrityError(FILE_MISSING); StateError(ARGUMENT) where none is recognised.
    """
    try:
        if is_url(path):
            names = {name.rstrip("/") for name in open_store(path, writable=False).list_names("")}
        else:
            names = {entry.name for entry in Path(path).iterdir()}
    except FileNotFoundError:
        raise _missing(path) from None
    except NotADirectoryError:
        return _file_kind(path)
    except OSError as error:
        raise _store_error(error, path) from error
    if names & {MANIFEST_NAME, RUN_NAME, LAUNCHES, "parts"}:
        return "ckptfmt"
    if ".metadata" in names:
        return "dcp"
    if INDEX_NAME in names or any(name.endswith(".safetensors") for name in names):
        return "hf"
    detail = "it has no manifest.json, .metadata or safetensors file"
    remedy = f"{_SAY} (--from)"
    if files := sorted(name for name in names if name.endswith(_TORCH_SUFFIXES)):
        remedy = f"Give one file of it, such as {Path(path) / files[0]}."
    raise err(
        Code.ARGUMENT,
        f"not a kind of checkpoint that is known: {detail}",
        where=path,
        remedy=remedy,
    )


def _file_kind(path: str) -> str:
    """Return the kind of a file, by the first bytes, or else by the name.

    Raises: OSError; StateError(ARGUMENT) for a file of another program;
        IntegrityError(FILE_MISSING, FILE_NBYTES).
    """
    head = read_head(path)
    check_format(head, where=path)
    if is_torch(head):
        return "torch"
    return "hf" if path.endswith(".safetensors") or is_safetensors(head) else "torch"


def target_kind(path: str, from_kind: str) -> str:
    """Return the kind of checkpoint implied by the target's name.

    A name without a known suffix is a checkpoint of ckptfmt if the source is of another kind.

    Raises: StateError(ARGUMENT) where the source is a checkpoint of ckptfmt, and the name shows no
        kind.
    """
    if path.endswith(_TORCH_SUFFIXES):
        return "torch"
    if path.endswith(".safetensors"):
        return "safetensors"
    if from_kind != "ckptfmt":
        return "ckptfmt"
    raise err(
        Code.ARGUMENT,
        "the name doesn't say which kind to write",
        where=path,
        remedy=f"{_SAY} (--to)",
    )


def check_paths(source: str, target: str) -> None:
    """Check that a target doesn't exist and isn't within the source, and that the source does.

    Raises: StoreError; StateError(ARGUMENT); the errors of `_check_source`.
    """
    for name, path in (("SOURCE", source), ("TARGET", target)):
        if not path:
            raise empty_path(name)
    if not is_url(target) and os.path.lexists(target):
        raise _exists(target)  # `Conversion.run` checks whether the target of a URL exists
    if is_url(source):
        return
    inner, outer = (Path(os.path.realpath(path)) for path in (target, source))
    if not is_url(target) and inner.is_relative_to(outer):
        raise err(
            Code.ARGUMENT,
            "the target is in the source",
            where=target,
            remedy="Give a path outside of it.",
        )
    _check_source(source)


def _check_source(source: str) -> None:
    """Check that a local source is a regular file or a directory.

    A read of a named pipe would wait for a writer.

    Raises: IntegrityError(FILE_MISSING); FormatError(UNSAFE_FILE); StoreError.
    """
    try:
        mode = Path(source).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(source) from None
    except OSError as error:
        raise _store_error(error, source) from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        detail = "this is neither a regular file nor a directory"
        raise err(Code.UNSAFE_FILE, detail, where=source, remedy="Copy its content to a file.")


def _missing(path: str) -> CkptError:
    remedy = suggest_path(path)
    return err(Code.FILE_MISSING, "no such file or directory", where=path, remedy=remedy)


def _check_kinds(source: str, from_kind: str, target: str, to_kind: str) -> None:
    """Check that the kinds of source and target fit together, and fit their places.

    Raises: StateError(ARGUMENT); CommitError(CHECKPOINT_EXISTS) for a target among a run's files.
    """
    if (from_kind, to_kind) == ("ckptfmt", "ckptfmt"):
        remedy = "Copy the directory; of a delta, `ckptfmt compact` makes a full one."
        raise err(
            Code.ARGUMENT,
            "source and target are both checkpoints of ckptfmt",
            where=target,
            remedy=remedy,
        )
    for place, kind in ((source, from_kind), (target, to_kind)):
        if kind != "ckptfmt" and is_url(place):
            remedy = (
                "Give a path on this machine, and copy between it and the bucket by other means."
            )
            raise err(
                Code.ARGUMENT,
                f"a checkpoint of kind {kind} can't lie in a bucket",
                where=place,
                remedy=remedy,
            )
    if to_kind == "ckptfmt":
        check_outside(open_store(target, writable=False))


@contextlib.contextmanager
def staged(target: str) -> Iterator[Path]:
    """Yield a scratch path to write to, and rename the result to `target` at the end.

    After an error, nothing is left.

    Raises: StoreError(STORE_EXISTS and other codes).
    """
    path = Path(target)
    scratch = path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
        yield scratch / path.name
        _publish(scratch, path)
    except OSError as error:
        raise _store_error(error, target) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(scratch: Path, path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            PosixCalls().rename_noreplace(f"{scratch.name}/{path.name}", path.name, directory)
        except FileExistsError:
            raise _exists(str(path)) from None
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP) or os.path.lexists(
                path
            ):
                raise
            (scratch / path.name).rename(path)
        os.fsync(directory)
    finally:
        os.close(directory)


def _exists(path: str) -> CkptError:
    return err(
        Code.STORE_EXISTS,
        "the target exists already",
        where=path,
        remedy="Give a path that isn't there yet.",
    )


def _store_error(error: OSError, where: str) -> CkptError:
    codes = {
        errno.ENOSPC: Code.NO_SPACE,
        errno.EDQUOT: Code.NO_SPACE,
        errno.EACCES: Code.STORE_ACCESS,
        errno.EPERM: Code.STORE_ACCESS,
        errno.EROFS: Code.STORE_ACCESS,
    }
    code = codes.get(error.errno or 0, Code.STORE_IO)
    return err(
        code, error.strerror or str(error), where=error.filename or where, remedy=remedy_of(error)
    )


def read_checkpoint(checkpoint: Checkpoint) -> Content:
    """Return the contents of a checkpoint.

    Each tensor is read and verified when the bytes are requested.
    """
    content = Content(
        origin="a checkpoint of ckptfmt",
        step=checkpoint.step,
        manifest=checkpoint.manifest,
        frozen=frozenset(checkpoint.frozen),
    )
    for tensor in checkpoint.tensors.values():
        content.add(
            Tensor(
                field=tensor.field,
                name=tensor.name,
                scope=tensor.scope,
                dtype=tensor.dtype,
                global_shape=tensor.global_shape,
                storage=tensor.storage,
                aliases=tensor.aliases,
                read=functools.partial(_read, checkpoint, tensor),
            )
        )
    content.leaves = {key: checkpoint.leaf(*key) for key in checkpoint.leaves}
    content.left_out = [
        LeftOut(f"rng:{name} ({scope})", "the target has no random-number streams")
        for name, scope in checkpoint.streams
    ]
    return content


def _read(checkpoint: Checkpoint, tensor: IndexTensor, box: Box, out: memoryview) -> None:
    carrier = carrier_of(DTYPES[tensor.dtype].nbytes)
    checkpoint.fill(tensor, box, np.frombuffer(out, carrier).reshape(box.shape))


def snapshot_of(content: Content) -> Snapshot:
    """Return the snapshot that a save of these contents writes.

    Raises: StateError(STATE_UNSUPPORTED, STATE_NAME) for a value or name that a checkpoint can't
        hold; FormatError(LIMIT_EXCEEDED).
    """
    leaves = [
        Leaf(field=field, name=name, scope=scope, value=dump_tree(tree, where=f"{field}:{name}"))
        for (field, name, scope), tree in content.leaves.items()
    ]
    given = {leaf.field for leaf in leaves} | {tensor.field for tensor in content.tensors.values()}
    snapshot = Snapshot(
        tensors=tuple(content.tensors[key] for key in sorted(content.tensors, key=sort_key)),
        streams=(),
        leaves=sort_rows(leaves),
        absent={field: f"{IMPORTED}{content.origin}" for field in FIELDS if field not in given},
    )
    check_snapshot(snapshot)
    return snapshot


def write_checkpoint(
    store: Store, snapshot: Snapshot, *, step: int, on_progress: Callable[[int], None]
) -> Manifest:
    """Write and commit a checkpoint of a conversion's tensors, with one chunk in memory at a time.

    Raises: StoreError; errors of reading the source. Spec: REQ-CMT-003 to REQ-CMT-008.
    """
    origin = new_origin(step=step)
    image = plan_image(snapshot, block_nbytes=origin.block_nbytes)
    contents = _Streamed(snapshot, image, on_progress)
    # The place is new, so that a sweep would find nothing.
    return SaveJob(SaveState(store=store, origin=origin)).run(
        lambda: write_image(store, image, contents, origin, Context.of(snapshot), writer=0),
        sweeps=False,
    )


class _Streamed(LiveContents):
    """The bytes of an image, read in chunks: no tensor is ever whole in memory."""

    def _iter_piece(self, piece: Piece) -> Iterator[memoryview]:
        source = self._sources[piece.key]
        assert isinstance(source, Tensor)  # noqa: S101
        found = []
        for chunk in _whole_blocks(source.iter_content(), self._image.block_nbytes):
            found.append(block_digests(chunk, self._image.block_nbytes))
            yield chunk
            self._tell(chunk.nbytes)
        self._digests[piece] = b"".join(found)


def _whole_blocks(chunks: Iterator[memoryview], block_nbytes: int) -> Iterator[memoryview]:
    """Yield the bytes of `chunks`, cut at multiples of a block."""
    rest = b""
    for chunk in chunks:
        content = memoryview(b"".join((rest, chunk))) if rest else chunk
        whole = content.nbytes - content.nbytes % block_nbytes
        if whole:
            yield content[:whole]
        rest = bytes(content[whole:])
    if rest:
        yield memoryview(rest)

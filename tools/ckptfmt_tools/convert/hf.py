"""A Hugging Face directory, or a single safetensors file, as source or target; without torch."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ckptfmt.box import Box
from ckptfmt.documents.shard import ShardEntry, plan_shard
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code, err
from ckptfmt.layout.read_plan import strides_of
from ckptfmt.store.protocol import Buffer, SizedChunks, Store
from ckptfmt_tools.convert.content import (
    Content,
    LeftOut,
    Tensor,
    map_tree,
    member_of,
    read_exactly,
    text_of,
)
from ckptfmt_tools.convert.fields import assemble
from ckptfmt_tools.convert.recognition import check_format, check_pointer, is_torch, read_head

WEIGHTS_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"

_SHARD_OF: Final = re.compile(r".*-\d+-of-\d+\.safetensors")
_METADATA: Final = "__metadata__"
_UNITS: Final = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
}
#: Tag, and elements in a byte, of dtypes that safetensors has and shards lack: safetensors' shapes
#: count elements.
_PACKED: Final = {"float4_e2m1fn_x2": ("F4", 2)}
_DTYPE_OF: Final = {
    **{dtype.safetensors: dtype.name for dtype in DTYPES.values() if dtype.safetensors},
    **{tag: name for name, (tag, _) in _PACKED.items()},
}


def parse_nbytes(text: str) -> int:
    """Return the number of bytes of a size such as ``5GB``. Raises: StateError(ARGUMENT).

    >>> parse_nbytes("5GB"), parse_nbytes("200MiB"), parse_nbytes("1000")
    (5000000000, 209715200, 1000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?", text.strip().upper())
    nbytes = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if nbytes < 1:
        raise err(
            Code.ARGUMENT,
            f"{text!r} isn't a size",
            where="--max-shard-size",
            remedy="Such as 5GB or 200MiB.",
        )
    return nbytes


# --- source ---------------------------------------------------------------------------------------


def read_directory(path: str) -> Content:
    """Return the weights of a directory, or of one safetensors file.

    Raises: IntegrityError(FILE_MISSING, FILE_NBYTES); FormatError(DOC_SYNTAX, DOC_SCHEMA,
        UNSAFE_PATH, UNSAFE_FILE, SHARD_HEADER_SYNTAX, SHARD_DTYPE, SHARD_MISMATCH, LIMIT_EXCEEDED).
    """
    content = Content(origin="a Hugging Face directory")
    root = Path(path)
    if root.is_file():
        _read_file(root, None, content)
    else:
        names = _files_of(root)
        paths = {name: member_of(root, name, named_by=str(root / INDEX_NAME)) for name in names}
        others = sorted(
            entry.name for entry in root.iterdir() if entry.name not in {*names, INDEX_NAME}
        )
        content.left_out = [
            LeftOut(name, "only tensors are converted") for name in others if name[:1] != "."
        ]
        for name, wanted in names.items():
            _read_file(paths[name], wanted, content)
    return content


def _files_of(root: Path) -> dict[str, set[str] | None]:
    """Return the files of a directory, each with the names of wanted tensors; None for all."""
    if not os.path.lexists(root / INDEX_NAME):
        present = sorted(entry.name for entry in root.glob("*.safetensors"))
        if WEIGHTS_NAME in present:
            return {WEIGHTS_NAME: None}
        if len(present) != 1 or _SHARD_OF.fullmatch(present[0]):
            detail = (
                f"{len(present)} safetensors files, and nothing that says which tensor is where"
            )
            remedy = "Fetch the index file of the model as well, or give one file."
            raise err(Code.FILE_MISSING, detail, where=str(root / INDEX_NAME), remedy=remedy)
        return {present[0]: None}
    files: dict[str, set[str] | None] = {}
    for tensor, name in _weight_map(member_of(root, INDEX_NAME, named_by=str(root))).items():
        if not isinstance(name, str):
            raise err(
                Code.UNSAFE_PATH, f"{tensor[:200]!r} is in no file", where=str(root / INDEX_NAME)
            )
        wanted = files.setdefault(name, set())
        assert wanted is not None  # noqa: S101
        wanted.add(tensor)
    return files


def _weight_map(path: Path) -> dict[str, Any]:
    check_pointer(read_head(path), where=str(path))
    try:
        found = json.loads(path.read_text("utf-8"))
    # json raises ValueError also for an integer of too many digits.
    except (ValueError, RecursionError) as error:
        raise err(Code.DOC_SYNTAX, str(error)[:200], where=str(path)) from None
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict):
        raise err(Code.DOC_SCHEMA, "the file has no weight_map", where=str(path))
    return weight_map


def _read_file(path: Path, wanted: set[str] | None, content: Content) -> None:
    """Add the tensors of one file; safetensors' own parser decides whether the file is valid."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    where = str(path)
    head = read_head(path)
    check_format(head, where=where)
    if is_torch(head):
        detail = "the file is one of torch.save, by its content"
        raise err(
            Code.ARGUMENT, detail, where=where, remedy="Convert this file alone, with --from torch."
        )
    try:
        with safe_open(where, framework="numpy") as file, path.open("rb") as raw:
            at = 8 + int.from_bytes(raw.read(8), "little")
            metadata = file.metadata() or {}
            rows = [(key, file.get_slice(key)) for key in file.offset_keys()]
            types = [(key, piece.get_dtype(), tuple(piece.get_shape())) for key, piece in rows]
    except SafetensorError as error:
        raise err(Code.SHARD_HEADER_SYNTAX, f"safetensors says: {error}", where=where) from None
    content.left_out += [
        LeftOut(f"{path.name}:{_METADATA}/{key}", "only tensors are converted")
        for key in metadata
        if key != "format"
    ]
    present = set()
    for key, tag, extents in types:
        present.add(key)
        if tag not in _DTYPE_OF:
            detail = f"{key!r} has the dtype {tag}, which the format lacks"
            remedy = "Save it in another dtype with the program that wrote it, or as bytes."
            raise err(Code.SHARD_DTYPE, detail, where=where, remedy=remedy)
        shape = _shape_of(key, _DTYPE_OF[tag], extents, where=where)
        begin = at
        at = at + math.prod(shape) * DTYPES[_DTYPE_OF[tag]].nbytes
        if wanted is not None and key not in wanted:
            content.left_out.append(LeftOut(f"{path.name}:{key}", "the index doesn't name it"))
            continue
        element_nbytes = DTYPES[_DTYPE_OF[tag]].nbytes
        read = functools.partial(
            _read, path=path, begin=begin, shape=shape, element_nbytes=element_nbytes
        )
        content.add(
            Tensor(field="weights", name=key, dtype=_DTYPE_OF[tag], global_shape=shape, read=read)
        )
    for key in sorted((wanted or set()) - present):
        raise err(
            Code.SHARD_MISMATCH,
            f"{key!r} isn't in this file, where {INDEX_NAME} says it is",
            where=where,
        )


def _shape_of(key: str, dtype: str, extents: tuple[int, ...], *, where: str) -> tuple[int, ...]:
    """Return the shape in whole bytes of a tensor with several elements in a byte.

    Raises: FormatError(SHARD_DTYPE).
    """
    _, count = _PACKED.get(dtype, ("", 1))
    if count > 1 and (not extents or extents[-1] % count):
        detail = (
            f"the last dimension of {key[:200]!r}, of the shape {extents}, isn't a multiple"
            f" of {count} elements"
        )
        raise err(Code.SHARD_DTYPE, detail, where=where)
    return extents if count == 1 else (*extents[:-1], extents[-1] // count)


def _entry_of(key: str, tensor: Tensor) -> tuple[str, str, tuple[int, ...]]:
    """Return a tensor's key, tag and shape in safetensors' terms."""
    if tensor.dtype not in _PACKED:
        return key, DTYPES[tensor.dtype].safetensors or "", tensor.global_shape
    tag, count = _PACKED[tensor.dtype]
    return key, tag, (*tensor.global_shape[:-1], tensor.global_shape[-1] * count)


def _read(
    box: Box,
    out: memoryview,
    *,
    path: Path,
    begin: int,
    shape: tuple[int, ...],
    element_nbytes: int,
) -> None:
    """Read the bytes of a box of `Tensor.iter_chunks`; such a box is contiguous in the file."""
    strides = strides_of(shape, element_nbytes)
    offset = begin + sum(index * stride for index, stride in zip(box.begin, strides, strict=True))
    read_exactly(path, offset, out, str(path))


# --- target ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The distribution of tensors to files, and the list of the parts left out.

    Attributes:
        files: by file name, the tensors of each file, with their names there.
        left_out: parts of the source without a place in the target.
    """

    files: dict[str, list[tuple[str, Tensor]]]
    left_out: list[LeftOut]

    @property
    def has_index(self) -> bool:
        """Whether the weights are in several files of one model."""
        return all(_SHARD_OF.fullmatch(name) for name in self.files)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors to write."""
        return [tensor for rows in self.files.values() for _, tensor in rows]


def plan_layout(content: Content, *, max_shard_nbytes: int | None, only: str | None) -> Layout:
    """Return the file of each tensor of the weights, in the order of names.

    A new file begins where the next tensor doesn't fit.

    Args:
        max_shard_nbytes: greatest size of a file; None for one file of any size.

    Raises: StateError(ARGUMENT) for another field than weights, or where there are no weights.
    """
    kind = "safetensors file" if max_shard_nbytes is None else "Hugging Face directory"
    others = list_others(content, only, f"a {kind} holds weights only")
    root, left_out = assemble(content, "weights", lambda value: value, numbered=False)
    left_out += others
    stored: dict[int, str] = {}
    shards: list[list[tuple[str, Tensor]]] = []
    room = 0
    for name, tensor in _iter_named(root, left_out):
        reason = _why_not(name, tensor)
        if id(tensor) in stored:
            reason = f"tied to {stored[id(tensor)]}, which is stored once"
        if reason:
            left_out.append(LeftOut(f"weights:{name}", reason))
            continue
        stored[id(tensor)] = name
        if not shards or (max_shard_nbytes is not None and tensor.nbytes > room):
            shards.append([])
            room = max_shard_nbytes or 0
        shards[-1].append((name, tensor))
        room -= tensor.nbytes
    if not shards:
        raise err(
            Code.ARGUMENT,
            "there are no weights that a safetensors file could hold",
            where="weights",
        )
    numbers = range(1, len(shards) + 1)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in numbers]
    return Layout(
        files=dict(zip(names if len(shards) > 1 else [WEIGHTS_NAME], shards, strict=True)),
        left_out=left_out,
    )


def list_others(content: Content, only: str | None, holds: str) -> list[LeftOut]:
    """Return the tensors and values to be left out because they aren't weights.

    Args:
        only: the only field to convert; for None the others are listed.
        holds: a sentence about the target.

    Raises: StateError(ARGUMENT) for another field than weights.
    """
    if only not in (None, "weights"):
        raise err(Code.ARGUMENT, holds, where="--only")
    keys = [key for key in (*content.tensors, *content.leaves) if key[0] != "weights"]
    return [LeftOut(text_of(key), holds) for key in keys] if only is None else []


def _iter_named(root: dict[str, Any], left_out: list[LeftOut]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree of weights; below the first level, a path is the name."""
    for key, value in root.items():
        if isinstance(value, Tensor):
            yield key, value
            continue
        found: list[tuple[str, Tensor]] = []

        def take(item: object, path: str, found: list[tuple[str, Tensor]] = found) -> None:
            if isinstance(item, Tensor):
                found.append((path, item))
            else:
                left_out.append(
                    LeftOut(f"weights:{path}", "a safetensors file holds no plain values")
                )

        map_tree(value, take, key, kept=frozenset())
        yield from found


def _why_not(name: str, tensor: Tensor) -> str:
    if DTYPES[tensor.dtype].safetensors is None and (
        tensor.dtype not in _PACKED or not tensor.global_shape
    ):
        return f"safetensors has no dtype {tensor.dtype}"
    return "safetensors keeps this name for itself" if name == _METADATA else ""


def write_directory(
    store: Store,
    layout: Layout,
    others: Mapping[str, bytes],
    *,
    on_progress: Callable[[int], None],
) -> None:
    """Write the files, each created whole; the index last.

    Args:
        others: name and content of the files beside the weights.

    Raises: StoreError; errors of reading the source.
    """
    for name, rows in layout.files.items():
        write_file(store, name, rows, on_progress=on_progress)
    for name, content in others.items():
        store.create(name, [content])
    if layout.has_index:
        weight_map = {key: name for name, rows in layout.files.items() for key, _ in rows}
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in layout.tensors)},
            "weight_map": weight_map,
        }
        store.create(INDEX_NAME, [json.dumps(index, ensure_ascii=False, indent=2).encode()])
    store.sync("")


def write_file(
    store: Store, name: str, rows: list[tuple[str, Tensor]], *, on_progress: Callable[[int], None]
) -> None:
    """Write one safetensors file, created whole.

    Raises: StoreError; errors of reading the source.
    """
    header, entries = plan_shard([_entry_of(key, tensor) for key, tensor in rows])
    nbytes = max(entry.byte_end for entry in entries)
    store.create(
        name,
        SizedChunks(
            _iter_file(header, entries, [tensor for _, tensor in rows], on_progress), nbytes
        ),
    )


def _iter_file(
    header: bytes,
    entries: list[ShardEntry],
    tensors: list[Tensor],
    on_progress: Callable[[int], None],
) -> Iterator[Buffer]:
    yield header
    for _, tensor in sorted(
        zip(entries, tensors, strict=True), key=lambda row: (row[0].byte_begin, row[0].byte_end)
    ):
        for chunk in tensor.iter_content():
            yield chunk
            on_progress(chunk.nbytes)

"""Find the tensors of a save with an equal tensor in a frozen base, to be left out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from blake3 import blake3

from ckptfmt.adapters.torch.blake3 import block_digests
from ckptfmt.adapters.torch.modules import Entry
from ckptfmt.adapters.torch.tensors import TorchSource, _as_integers, _bytes_at, inner_tensors
from ckptfmt.box import Box
from ckptfmt.documents.frozen_tensors import FrozenTensor
from ckptfmt.layout.placements import LocalPiece
from ckptfmt.read.frozen_base import FrozenBase, Place, cut_chunk
from ckptfmt.read.reader import Checkpoint

_LOG: Final = logging.getLogger("ckptfmt")
#: The parts of names that PEFT adds around a module with an adapter.
_ADDED: Final = frozenset({"base_layer", "original_module"})
#: Size in bytes of the digested blocks of device memory.
_BLOCK_NBYTES: Final = 1 << 20
#: Content of fewer bytes is digested by one thread, which is faster.
_THREADED_NBYTES: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class BaseVerdict:
    """The result of a comparison with the base.

    Attributes:
        mark: digests of the elements in this process.
        found: the reference; None if the base has no equal tensor.
        location: the base's location.
    """

    mark: bytes
    found: FrozenTensor | None
    location: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The tensors of a save: to be stored, and of the frozen base.

    Attributes:
        stored: the sources of the tensors to be stored.
        frozen: the references to the base.
        location: the base's location.
    """

    stored: list[TorchSource]
    frozen: list[FrozenTensor]
    location: str


def split_frozen(
    sources: Sequence[TorchSource],
    entries: Iterable[Entry],
    place: Place,
    seen: dict[str, BaseVerdict],
) -> Split:
    """Return the sources to store, and references for tensors equal to a tensor of the base.

    Every call examines all elements: torch's version counter doesn't count writes through
    `Tensor.data`, such as the merge of an adapter into the base. If the digests of the elements
    differ from the digests of an earlier call, the tensor is compared with the base again.

    Args:
        sources: the sources of the entries.
        entries: the tensors of the modules.
        place: the place of the base.
        seen: the results of earlier calls by name, updated here.

    Raises: StateError(FROZEN_BASE_MISSING, ARGUMENT); the errors of reading a checkpoint;
        StoreError. Spec: REQ-FRZ-007.
    """
    fixed = {
        id(tensor): isinstance(entry.tensor, torch.nn.Parameter)
        for entry in entries
        if not entry.tensor.requires_grad
        and (entry.scope, entry.storage) == ("global", "persistent")
        for _, tensor in inner_tensors(entry.tensor, "")
    }
    split = Split(stored=[], frozen=[], location="")
    unlike: list[TorchSource] = []
    location = ""
    base: FrozenBase | None = None
    is_first = not seen
    try:
        for source in sources:
            if id(source.tensor) not in fixed or 0 in source.global_shape:
                split.stored.append(source)
                continue
            mark, digest = _mark(source)
            verdict = seen.get(source.name)
            if verdict is None or not _is_valid(verdict, mark, source):
                base = FrozenBase(place, Checkpoint) if base is None else base
                verdict = BaseVerdict(mark, _compare(source, base, digest), base.location)
                seen[source.name] = verdict
                if verdict.found is None and fixed[id(source.tensor)]:
                    unlike.append(source)
            location = verdict.location
            if verdict.found is None:
                split.stored.append(source)
            else:
                split.frozen.append(verdict.found)
    finally:
        if base is not None:
            base.close()
    _tell(split.frozen if is_first else [], unlike, location)
    return dataclasses.replace(split, location=location)


def _tell(frozen: Sequence[FrozenTensor], unlike: Sequence[TorchSource], location: str) -> None:
    if frozen:
        nbytes = sum(one.nbytes for one in frozen)
        _LOG.info(
            "%d tensors of %d bytes are those of the frozen base %s: saves refer to them",
            len(frozen),
            nbytes,
            location,
        )
    if unlike:
        _LOG.warning(
            "%d frozen parameters aren't equal to a tensor of the frozen base %s, and are stored"
            " in full; the first is %s, %s of shape %s",
            len(unlike),
            location,
            unlike[0].name,
            unlike[0].dtype,
            unlike[0].global_shape,
        )


def _is_valid(verdict: BaseVerdict, mark: bytes, source: TorchSource) -> bool:
    """Return whether an earlier verdict holds for the present elements."""
    found = verdict.found
    return verdict.mark == mark and (
        found is None
        or (found.dtype, found.global_shape, found.aliases)
        == (source.dtype, source.global_shape, source.aliases)
    )


def _mark(source: TorchSource) -> tuple[bytes, bytes | None]:
    """Return digests of the elements in this process, and the digest of the content.

    The digest of the content is that of a reference; None if this process has a part of the tensor,
    or has the tensor on a GPU.
    """
    local = source.local.resolve_conj().resolve_neg().contiguous()
    shape = repr((tuple(local.shape), local.dtype)).encode()
    if not local.numel():
        return shape, None
    if local.device.type == "cuda":
        digests = block_digests(local.reshape(-1).view(torch.uint8), _BLOCK_NBYTES)
        if digests is not None:
            return shape + digests.cpu().numpy().tobytes(), None
    local = local.cpu()
    threads = blake3.AUTO if local.nbytes >= _THREADED_NBYTES else 1
    content = _bytes_at(local.data_ptr(), local.nbytes).data
    digest = blake3(content, max_threads=threads).digest()
    is_whole = [piece.box for piece in source.pieces] == [Box.whole(source.global_shape)]
    is_in_order = tuple(local.shape) == source.global_shape
    return shape + digest, digest if is_whole and is_in_order else None


def _compare(source: TorchSource, base: FrozenBase, digest: bytes | None) -> FrozenTensor | None:
    """Return the reference to the base's tensor equal to a source; None without such a tensor.

    Args:
        source: the source, with the base's dtype and shape.
        base: the base.
        digest: the digest of the source's content, compared instead of the elements; None to
            compare the elements.
    """
    name = _find_name(source, base)
    if name is None:
        return None
    hasher = blake3(max_threads=blake3.AUTO)
    for chunk, content in base.iter_content(name):
        hasher.update(content)
        for piece in source.pieces if digest is None else ():
            common = chunk.intersect(piece.box)
            if common is not None and not _is_equal(source, piece, common, chunk, content):
                return None
    if digest not in (None, hasher.digest()):
        return None
    return FrozenTensor(
        name=source.name,
        aliases=source.aliases,
        dtype=source.dtype,
        global_shape=source.global_shape,
        name_in_base=name,
        digest=hasher.digest(),
    )


def _is_equal(
    source: TorchSource, piece: LocalPiece, common: Box, chunk: Box, content: memoryview
) -> bool:
    """Return whether the live elements of a box equal the elements of a chunk, bit for bit."""
    begin = tuple(
        at - first + base
        for at, first, base in zip(
            common.begin, piece.box.begin, piece.local_box.begin, strict=True
        )
    )
    whole = Box.whole(tuple(source.local.shape))
    index: Any = (*Box(begin, common.shape).relative_to(whole), ...)
    live = source.local[index]
    live = _as_integers(live.resolve_conj().resolve_neg().contiguous())
    cut = cut_chunk(content, chunk, common, live.element_size())
    cut = memoryview(bytearray(cut)) if cut.readonly else cut
    saved = torch.frombuffer(cut, dtype=live.dtype).view(live.shape)
    return torch.equal(live, saved.to(live.device))


def _find_name(source: TorchSource, base: FrozenBase) -> str | None:
    """Return the name of the base's tensor to compare with a source; None without a candidate.

    The base's tensor has the source's dtype and shape. The name is the longest end of the source's
    name, without the parts added by PEFT, present in the base; otherwise the only name of the base
    with the source's name as its end.
    """

    def fits(name: str) -> bool:
        found = base.find(name)
        return found is not None and (found.dtype, found.global_shape) == (
            source.dtype,
            source.global_shape,
        )

    names = (source.name, *source.aliases)
    stripped = [".".join(part for part in name.split(".") if part not in _ADDED) for name in names]
    for name in (*names, *stripped):
        for end in _iter_ends(name):
            if fits(end):
                return end
    return next(
        (found for name in stripped for found in base.find_longer(name) if fits(found)), None
    )


def _iter_ends(name: str) -> Iterable[str]:
    """Yield a name, and each end of the name behind a dot or a slash, longest first.

    >>> list(_iter_ends("a/b.c"))
    ['a/b.c', 'b.c', 'c']
    """
    yield name
    yield from (name[at + 1 :] for at, letter in enumerate(name) if letter in "./")

"""Use torch tensors and DTensors as sources and sinks. Values are converted only on request."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from ckptfmt.box import Box
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.tables import TensorKey, key_of
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout import placements as layout
from ckptfmt.layout.placements import LocalPiece
from ckptfmt.layout.read_plan import find_stretch
from ckptfmt.state import place_of

#: The format's dtypes that this version of torch supports.
TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name)
    for name in DTYPES
    if isinstance(getattr(torch, name, None), torch.dtype)
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}

#: The integer dtype for each element size. Copies as integers preserve all bits of a NaN, and work
#: for dtypes with few kernels.
_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


#: Size in bytes of the pieces of a tensor that are digested at a time.
_CHUNK_NBYTES: Final = 64 << 20
#: The exact classes of tensors that have no content beyond their elements.
_PLAIN_KINDS: Final[frozenset[type]] = frozenset({torch.Tensor, torch.nn.Parameter})


def dtype_name(dtype: torch.dtype, *, where: str) -> str:
    """Return the format's name of a torch dtype. Raises: StateError(STATE_UNSUPPORTED)."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise err(Code.STATE_UNSUPPORTED, f"the format has no dtype like {dtype}", where=where)
    return name


def torch_dtype(name: str, *, where: str | None = None) -> torch.dtype:
    """Return the torch dtype of the format's name. Raises: StateError(STATE_UNSUPPORTED)."""
    if name not in TORCH_DTYPES:
        raise err(
            Code.STATE_UNSUPPORTED,
            f"this torch ({torch.__version__}) has no dtype {name}",
            where=where,
        )
    return TORCH_DTYPES[name]


def is_plain(tensor: object) -> bool:
    """Return whether a value is exactly a `torch.Tensor` or a `torch.nn.Parameter`.

    Instances of subclasses aren't plain.
    """
    return type(tensor) in _PLAIN_KINDS


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is exactly a DTensor, not a subclass."""
    if is_plain(tensor):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(tensor) is module.DTensor


def check_tensor(tensor: torch.Tensor, *, where: str) -> None:
    """Check that the bytes of a tensor are its complete content.

    Raises: StateError(STATE_UNSUPPORTED) for subclasses, sparse, quantized and nested tensors,
        unknown dtypes, and DTensors with partial placements.
    """
    if is_plain(tensor) and _is_dense(tensor):
        return  # the usual case
    distributed = is_distributed(tensor)
    if not distributed and not is_plain(tensor):
        raise _unsupported(
            f"{type(tensor).__module__}.{type(tensor).__qualname__} is a kind of tensor of its own",
            where,
            (
                "Register it with ckptfmt.adapters.torch.register_flatten, if __tensor_flatten__"
                " gives all of it."
            ),
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise _unsupported(
            f"a tensor of layout {tensor.layout}", where, "Save its parts as dense tensors."
        )
    if tensor.is_quantized:
        raise _unsupported(
            "a quantized tensor", where, "Save int_repr() and the scales as tensors."
        )
    if tensor._is_zerotensor():  # noqa: SLF001
        raise _unsupported(
            "a tensor of zeros that has no memory, as forward-mode AD makes",
            where,
            "Save a clone().",
        )
    dtype_name(tensor.dtype, where=where)
    if distributed:
        _placements(tensor, where)
        check_tensor(local_of(tensor), where=where)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor passes the checks of `check_tensor`."""
    return (
        tensor.layout is torch.strided
        and tensor.dtype in DTYPE_NAMES
        and not (tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor())  # noqa: SLF001
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in this worker's memory, detached."""
    if not is_distributed(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()  # type: ignore[attr-defined, no-any-return]


def is_meta(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the meta device."""
    return local_of(tensor).is_meta


def device_of(tensor: torch.Tensor) -> str:
    """Return the device of a tensor's local part, as torch prints the device."""
    return str(tensor.device) if not is_distributed(tensor) else str(local_of(tensor).device)


def devices_of(tensors: Iterable[torch.Tensor]) -> frozenset[str]:
    """Return the devices of the local parts of some tensors."""
    tensors = list(tensors)
    plain = {tensor.device for tensor in tensors if is_plain(tensor)}
    return frozenset(map(str, plain)) | {
        device_of(tensor) for tensor in tensors if not is_plain(tensor)
    }


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[dict[str, list[Any] | None]]:
    """Return the names and shapes of the distinct meshes of DTensors, sorted."""
    meshes = [tensor.device_mesh for tensor in tensors if is_distributed(tensor)]  # type: ignore[attr-defined]
    found = [(mesh.mesh_dim_names, list(mesh.shape)) for mesh in meshes]
    facts = [
        {"names": None if names is None else list(names), "shape": shape} for names, shape in found
    ]
    distinct = {repr(fact): fact for fact in facts}
    return [distinct[key] for key in sorted(distinct)]


def pieces_of(tensor: torch.Tensor, *, where: str) -> tuple[LocalPiece, ...]:
    """Return the local pieces of a tensor.

    The single piece of a plain tensor is the whole tensor. A worker outside of a DTensor's mesh
    holds no piece.

    Raises: StateError(STATE_UNSUPPORTED).
    """
    if not is_distributed(tensor):
        return _whole(tuple(tensor.shape))[0]
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    try:
        return layout.local_boxes(
            tuple(tensor.shape),
            tuple(mesh.shape),
            tuple(coordinate),
            _placements(tensor, where),
            tuple(local_of(tensor).shape),
        )
    except CkptError as error:
        error.where = where
        raise


@functools.lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> tuple[tuple[LocalPiece, ...], tuple[Box, ...]]:
    """Return the pieces and the boxes of a tensor that is completely local."""
    whole = Box.whole(shape)
    return (LocalPiece(whole, whole),), (whole,)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element, or 0 for a tensor without storage.

    Two plain tensors with different addresses never have exactly the same memory, so the slower
    call of `memory_of` is unnecessary. Tensors with equal addresses may still differ.
    """
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0  # sparse tensors have no storage


def storage_of(tensor: torch.Tensor) -> tuple[object, object] | None:
    """Return a key of a tensor's storage, equal for tensors that share the storage.

    Returns: None if the tensor has no storage that could be shared.
    """
    try:
        local = local_of(tensor)
        address = local.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None  # wrappers around several tensors, sparse tensors, and zeros without memory
    if not address or not local.numel() or local.device.type == "meta":
        return None  # the storages of empty shards may have the same address
    return local.device, address


def memory_of(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return a key of a tensor's elements; equal keys mean the same elements of the same memory.

    The key has all facts that determine the elements: storage, offset, dtype, shape, strides, a
    DTensor's mesh and placements, and the bits of lazy operations (conjugate, negative).

    Returns: None if the memory is unknown.
    """
    distributed = is_distributed(tensor)
    storage = storage_of(tensor) if distributed or is_plain(tensor) else None
    if storage is None:
        return None  # the memory layout of a subclass is unknown
    local = local_of(tensor)
    shape = (tuple(tensor.shape), tuple(local.shape), local.stride())
    lazy = (local.is_conj(), local.is_neg())
    spread = (tensor.device_mesh, str(tensor.placements)) if distributed else ()  # type: ignore[attr-defined]
    return (*storage, local.storage_offset(), local.dtype, *shape, *lazy, *spread)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class TorchSource:
    """A source that reads a tensor; see `ckptfmt.write.snapshot.MemoryOf`.

    Attributes:
        tensor: the live tensor.
        local: the tensor's local memory, which stays valid if the program assigns other memory to
            the tensor.
        pieces: the boxes, with their places in `local`.
    """

    field: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    scope: str
    tensor: torch.Tensor
    local: torch.Tensor
    pieces: tuple[LocalPiece, ...]
    boxes: tuple[Box, ...]
    replica: bool
    storage: str
    aliases: tuple[str, ...]

    def copy_into(self, box: Box, out: memoryview) -> None:
        """Copy the elements of `box` into `out`. The copy releases the GIL.

        Contiguous host memory is copied by the calling thread only. For more speed, callers use
        several threads.
        """
        if not box.element_count:
            return
        local = self.held_at(box).resolve_conj().resolve_neg()
        if local.is_cpu and local.is_contiguous():
            _copy_memory(local, out)
        else:
            held = _as_integers(local)
            torch.frombuffer(out, dtype=held.dtype).view(held.shape).copy_(held)

    def memory_of(self, box: Box) -> NDArray[np.uint8] | None:
        """Return the bytes of the elements of `box`, read-only.

        Returns: None if the elements aren't contiguous in host memory.
        """
        local = self.held_at(box)
        if not local.is_cpu or not local.is_contiguous() or local.is_conj() or local.is_neg():
            return None
        return _bytes_at(local.data_ptr(), local.nbytes)

    def held_at(self, box: Box) -> torch.Tensor:
        """Return the elements of a box as a view of the live memory."""
        pieces = self.pieces
        piece = (
            pieces[0] if len(pieces) == 1 else next(piece for piece in pieces if piece.box == box)
        )
        if piece.local_box.shape == tuple(self.local.shape):
            return self.local
        return self.local[piece.local_box.relative_to(Box.whole(tuple(self.local.shape)))]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class TorchSink:
    """A sink that fills a tensor in place; see `ckptfmt.write.snapshot.MemoryOf`.

    If the tensor has another dtype than the saved tensor, the elements are converted.

    Attributes:
        arrive: copies to the tensor's device; None for torch's own copy. See
            `ckptfmt.adapters.torch.arrivals`.
    """

    field: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    scope: str
    tensor: torch.Tensor
    local: torch.Tensor
    pieces: tuple[LocalPiece, ...]
    boxes: tuple[Box, ...] = dataclasses.field(init=False)
    arrive: Callable[[torch.Tensor, torch.Tensor], None] | None = dataclasses.field(
        init=False, default=None
    )
    _address: int | None = dataclasses.field(init=False, default=None)
    _is_flat: bool = dataclasses.field(init=False, default=False)

    def __post_init__(self) -> None:
        self.boxes = tuple(piece.box for piece in self.pieces)
        local = self.local
        plain = local.dtype == TORCH_DTYPES[self.dtype] and not (local.is_conj() or local.is_neg())
        self._is_flat = plain and local.is_contiguous()
        if self._is_flat and local.is_cpu:
            self._address = local.data_ptr()

    def copy_from(self, box: Box, content: memoryview) -> None:
        """Copy `content` into the elements of `box`."""
        if not box.element_count:
            return
        target = self._find(box)
        memory = self._memory_at(target)
        if memory is not None:
            np.copyto(memory, np.frombuffer(content, np.uint8))
            return
        incoming = _tensor_of(content)
        slices = target.relative_to(Box.whole(tuple(self.local.shape)))
        _copy(
            self.local[slices],
            incoming.view(TORCH_DTYPES[self.dtype]).reshape(box.shape),
            by=self.arrive,
        )

    def content_digest(self) -> bytes | None:
        """Return BLAKE3-256 of the tensor's content, as a reference to a frozen base has it.

        Returns: None if this process doesn't hold the whole tensor, or the tensor has another dtype
            than the saved tensor.
        """
        local = self.local
        if self.boxes != (Box.whole(self.global_shape),) or (
            local.dtype != TORCH_DTYPES[self.dtype] or tuple(local.shape) != self.global_shape
        ):
            return None
        hasher = blake3(max_threads=blake3.AUTO)
        flat = local.resolve_conj().resolve_neg().contiguous().reshape(-1)
        for chunk in flat.split(max(1, _CHUNK_NBYTES // flat.element_size())) if len(flat) else ():
            held = chunk.cpu()
            hasher.update(_bytes_at(held.data_ptr(), held.nbytes).data)
        return hasher.digest()

    def memory_of(self, box: Box) -> NDArray[np.uint8] | None:
        """Return the bytes of the elements of `box`, writable.

        The call counts as a write to the tensor.

        Returns: None if the elements aren't contiguous in host memory, or need a conversion.
        """
        return self._memory_at(self._find(box))

    def fill_of(self, box: Box) -> Callable[[int, memoryview], None] | None:
        """Return a function that copies bytes of the elements of `box` to the tensor's device.

        The function's arguments are the first byte, and the bytes from there on.

        Returns: None if the elements aren't contiguous, need a conversion, or if `arrive` is None.
        """
        if self.arrive is None or not self._is_flat:
            return None
        first = find_stretch(Box.whole(tuple(self.local.shape)), self._find(box))
        if first is None:
            return None
        # Not `reshape`, which keeps the arbitrary stride of a single element.
        flat = self.local.as_strided((self.local.numel(),), (1,))
        elements = flat[first : first + box.element_count].view(torch.uint8)
        return functools.partial(_fill, elements, self.arrive)

    def _memory_at(self, target: Box) -> NDArray[np.uint8] | None:
        """Return the result of `memory_of` for a box of the local tensor."""
        if self._address is None:
            return None
        first = find_stretch(Box.whole(tuple(self.local.shape)), target)
        if first is None:
            return None
        element_nbytes = self.local.element_size()
        torch.autograd.graph.increment_version(self.local)
        return _bytes_at(
            self._address + first * element_nbytes, target.element_count * element_nbytes
        )

    def _find(self, box: Box) -> Box:
        """Return the box of the local tensor that holds the elements of `box`."""
        if len(self.pieces) == 1 and self.pieces[0].box == box:  # the usual case
            return self.pieces[0].local_box
        piece = next(piece for piece in self.pieces if piece.box.contains(box))
        offsets = (
            at - begin + base
            for at, begin, base in zip(
                box.begin, piece.box.begin, piece.local_box.begin, strict=True
            )
        )
        return Box(tuple(offsets), box.shape)


def source_of(
    tensor: torch.Tensor,
    *,
    field: str,
    name: str,
    scope: str,
    storage: str = "persistent",
    aliases: tuple[str, ...] = (),
) -> TorchSource:
    """Return the source of a tensor.

    Raises: StateError(STATE_UNSUPPORTED), also for a tensor on the meta device.
    """
    if type(tensor) in _PLAIN_KINDS:
        if not _is_dense(tensor):
            check_tensor(tensor, where=place_of(field, name))
        global_shape = tuple(tensor.shape)
        local = tensor.detach()
        pieces, boxes = _whole(global_shape)
        replica = False
    else:
        where = place_of(field, name)
        check_tensor(tensor, where=where)
        global_shape = tuple(tensor.shape)
        local = local_of(tensor)
        pieces = pieces_of(tensor, where=where)
        boxes = tuple(piece.box for piece in pieces)
        replica = layout.is_replica(tuple(tensor.device_mesh.shape), _placements(tensor, where))  # type: ignore[attr-defined]
    if local.is_meta:
        where = place_of(field, name)
        raise _unsupported(
            "a tensor on the meta device has no contents", where, "Materialise it before the save."
        )
    return TorchSource(
        field=field,
        name=name,
        dtype=DTYPE_NAMES[tensor.dtype],
        global_shape=global_shape,
        scope=scope,
        tensor=tensor,
        local=local,
        pieces=pieces,
        boxes=boxes,
        replica=replica,
        storage=storage,
        aliases=aliases,
    )


def declared_by(sources: Iterable[object]) -> dict[TensorKey, str]:
    """Return for each replica a digest of its mesh's ranks.

    Ranks outside of a mesh may hold a different tensor of the same name.
    """
    return {
        key_of(source): _mesh_digest(source.tensor.device_mesh)  # type: ignore[attr-defined]
        for source in sources
        if isinstance(source, TorchSource) and source.replica
    }


@functools.lru_cache(maxsize=16)
def _mesh_digest(mesh: Any) -> str:
    return digest_bytes(repr(mesh.mesh.tolist()).encode()).hex()


def sink_of(tensor: torch.Tensor, *, field: str, name: str, scope: str, dtype: str) -> TorchSink:
    """Return a sink that fills a live tensor with the saved tensor `name` of dtype `dtype`.

    Raises: StateError(STATE_UNSUPPORTED).
    """
    where = place_of(field, name)
    check_tensor(tensor, where=where)
    local = local_of(tensor)
    torch_dtype(dtype, where=where)
    if not local.is_contiguous() and any(
        stride == 0 and extent > 1
        for stride, extent in zip(local.stride(), local.shape, strict=True)
    ):
        raise _unsupported(
            "an expanded tensor can't be filled", where, "Call clone() or contiguous() on it first."
        )
    return TorchSink(
        field=field,
        name=name,
        dtype=dtype,
        global_shape=tuple(tensor.shape),
        scope=scope,
        tensor=tensor,
        local=local,
        pieces=pieces_of(tensor, where=where),
    )


def allocate(
    dtype: str, shape: tuple[int, ...], *, like: object = None, device: torch.device | None = None
) -> torch.Tensor:
    """Return a new, uninitialised tensor.

    Args:
        dtype: the format's name of the dtype.
        shape: the shape of the whole tensor.
        like: a tensor that determines the device. Given the same shape, it determines placements
            and strides too.
        device: the device if `like` isn't a tensor with memory. Default: CPU.

    Raises: StateError(STATE_UNSUPPORTED) for a dtype that this version of torch lacks.
    """
    kind = torch_dtype(dtype)
    if not isinstance(like, torch.Tensor) or local_of(like).device.type == "meta":
        return torch.empty(shape, dtype=kind, device=device or "cpu")
    if tuple(like.shape) != shape:
        return torch.empty(shape, dtype=kind, device=local_of(like).device)
    local = torch.empty_like(local_of(like), dtype=kind)
    if not is_distributed(like):
        return local
    make: Callable[..., torch.Tensor] = type(like).from_local  # type: ignore[attr-defined]
    with torch.no_grad():
        return make(
            local,
            like.device_mesh,  # type: ignore[attr-defined]
            like.placements,  # type: ignore[attr-defined]
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


def _copy_memory(tensor: torch.Tensor, out: memoryview) -> None:
    """Copy contiguous memory with the C library, twice as fast as torch outside of the caches.

    A copy through numpy would be as fast, but a tensor that was viewed as an array can't be resized
    later.
    """
    if out.nbytes != tensor.nbytes:
        raise ValueError(f"{tensor.nbytes} bytes don't fill {out.nbytes}")
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(out)), tensor.data_ptr(), out.nbytes)


def _bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return a tensor's memory as an array.

    `Tensor.numpy` isn't used: a tensor that was viewed as an array can't be resized later.
    """
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))


def _copy(
    target: torch.Tensor,
    incoming: torch.Tensor,
    *,
    by: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> None:
    if target.dtype == incoming.dtype and not (target.is_conj() or target.is_neg()):
        target = _as_integers(target)
        incoming = _as_integers(incoming)
    if by is not None:
        by(target, incoming)
        return
    with torch.no_grad():
        target.copy_(incoming)


def _fill(
    elements: torch.Tensor,
    arrive: Callable[[torch.Tensor, torch.Tensor], None],
    at: int,
    content: memoryview,
) -> None:
    """Copy bytes to a device, from a byte of `elements` on."""
    arrive(elements[at : at + content.nbytes], _tensor_of(content))


def _tensor_of(content: memoryview) -> torch.Tensor:
    """Return bytes as a tensor. The tensor shares the memory of writable bytes."""
    return torch.frombuffer(bytearray(content) if content.readonly else content, dtype=torch.uint8)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    carrier = _CARRIERS.get(tensor.element_size())
    return tensor if carrier is None else tensor.view(carrier)


def _placements(tensor: torch.Tensor, where: str) -> tuple[layout.Placement, ...]:
    return tuple(_placement(placement, where) for placement in tensor.placements)  # type: ignore[attr-defined]


def _placement(placement: Any, where: str) -> layout.Placement:
    kind = type(placement).__name__
    if kind == "Replicate":
        return layout.Replicate()
    if kind == "_StridedShard":
        return layout.StridedShard(int(placement.dim), int(placement.split_factor))
    if kind == "Shard":
        return layout.Shard(int(placement.dim))
    raise _unsupported(
        f"a DTensor with the placement {placement!r}", where, "Redistribute it before the save."
    )


def _unsupported(detail: str, where: str, remedy: str) -> CkptError:
    return err(Code.STATE_UNSUPPORTED, detail, where=where, remedy=remedy)


_REGISTERED: Final[set[type[torch.Tensor]]] = set()


def register_flatten(kind: type[torch.Tensor]) -> None:
    """Register a tensor class whose instances are saved as their inner tensors.

    The class's ``__tensor_flatten__`` names the inner tensors, which are saved as
    ``<name>/<attribute>``. Only instances of exactly this class are included. A load fills the
    inner tensors of a live tensor in place. Without a live tensor, as in an optimizer that has made
    no step, the class's ``__tensor_unflatten__`` creates a tensor. The context from
    ``__tensor_flatten__`` is saved if it consists of plain values. Any other data of an instance
    isn't saved, and must follow from the program that creates the instance.

    A program registers its classes at each start, before the first save or load.

    Raises: StateError(ARGUMENT) if the class has no ``__tensor_flatten__``.
    """
    if not hasattr(kind, "__tensor_flatten__"):
        raise err(Code.ARGUMENT, f"{kind.__qualname__} has no __tensor_flatten__")
    _REGISTERED.add(kind)


def is_registered(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's class is registered."""
    return type(tensor) in _REGISTERED


def kind_of(kind: type) -> str:
    """Return the qualified name of a class, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def unflatten(form: dict[str, Any], inner: dict[str, Any], *, where: str) -> torch.Tensor:
    """Return a new tensor of a registered class from inner tensors that are filled later.

    Args:
        form: the result of `flattened_form`, with torch's own values.
        inner: the inner tensors, or trees of them, by attribute.
        where: the tensor's name, for messages.

    Raises: StateError(STATE_UNSUPPORTED) for a class that isn't registered, or that doesn't keep
        the given inner tensors.
    """
    kind = next((kind for kind in _REGISTERED if kind_of(kind) == form["kind"]), None)
    if kind is None:
        remedy = "Call ckptfmt.adapters.torch.register_flatten with this class before the load."
        raise _unsupported(
            f"a tensor of {form['kind']}, which isn't registered here", where, remedy
        )
    remedy = "Create the tensor before the load, for an optimizer by a step."
    unflatten_kind: Any = getattr(kind, "__tensor_unflatten__", None)
    if unflatten_kind is None:
        raise _unsupported(f"{form['kind']} has no __tensor_unflatten__", where, remedy)
    try:
        made: torch.Tensor = unflatten_kind(inner, form["context"], form["size"], form["stride"])
        kept = all(getattr(made, key) is value for key, value in inner.items())
    except Exception as error:
        detail = (
            f"{form['kind']}.__tensor_unflatten__ raised {type(error).__name__}: {str(error)[:200]}"
        )
        raise _unsupported(detail, where, remedy) from error
    if not kept:
        detail = f"{form['kind']}.__tensor_unflatten__ doesn't keep the tensors that it is given"
        raise _unsupported(detail, where, remedy)
    return made


def flattened_form(tensor: Any) -> dict[str, Any]:
    """Return the data that rebuild a tensor of a registered class from its inner tensors."""
    _, context = tensor.__tensor_flatten__()
    form = {"context": context, "size": tensor.shape, "stride": tensor.stride()}
    return {"kind": kind_of(type(tensor)), **form}


def inner_tensors(tensor: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    """Return the names and inner tensors of a tensor of a registered class.

    For any other tensor, the result is the tensor itself.
    """
    if not is_registered(tensor):
        return [(name, tensor)]
    attributes, _ = tensor.__tensor_flatten__()
    return [
        pair for key in attributes for pair in inner_tensors(getattr(tensor, key), f"{name}/{key}")
    ]

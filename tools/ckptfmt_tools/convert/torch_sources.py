"""Files of torch.save and directories of torch's distributed checkpoints, read without torch.

Tensors in the trees are `Array`; torch's own values have the types of `ckptfmt.documents.tree`. The
``.metadata`` of a directory is a pickle with the list of the tensors, their chunks, and the place
of each chunk: a torch.save file within a larger file. Both kinds of pickle are read by
`ckptfmt_tools.convert.pickles`: as data, with paths as text.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.adapters.live_trees import child_name
from ckptfmt.box import Box
from ckptfmt.documents.tree import DeviceName, DtypeName, Size
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, StateError, err
from ckptfmt.layout.tiling import check_tiling
from ckptfmt_tools.convert.content import (
    ANEW,
    Array,
    Budget,
    Content,
    LeftOut,
    Refused,
    check_depth,
    member_of,
    tensor_budget,
    value_budget,
)
from ckptfmt_tools.convert.old_files import OldFile, TarFile
from ckptfmt_tools.convert.pickles import (
    CALLED,
    COUNTER,
    DICT,
    FROZENSET,
    ORDERED_DICT,
    PERSISTENT,
    SET,
    Made,
    Named,
    parse_pickle,
)
from ckptfmt_tools.convert.recognition import (
    ZIP,
    check_format,
    check_pointer,
    is_old,
    is_tar,
    read_head,
    unknown_format,
)
from ckptfmt_tools.convert.torch_archive import (
    DTYPE_NAMES,
    TENSORS,
    Archive,
    StoredTensor,
    TorchFile,
    damaged,
    only,
    shape_of,
    size_of,
    tensor_of,
)

#: Types of values unchanged in a tree; and the types among them of one machine word.
_SCALARS: Final[frozenset[type]] = frozenset({type(None), bool, float, int, str, bytes})
_SIMPLE: Final[frozenset[type]] = frozenset({type(None), bool, float})
#: Bound of integers as keys: larger integers can be chosen to have one hash.
_KEY_INTEGER: Final = 1 << 63
#: Greatest number of compound keys and set members, and of the values in each.
_COMPOUND_KEYS: Final = 4096
_COMPOUND_LENGTH: Final = 16
#: Greatest number of refused values of a file: each takes some hundred bytes.
_REFUSED_COUNT: Final = 100_000
_DEVICE: Final = re.compile(r"[a-z_]{1,32}")


def read_file(path: str, content: Content) -> object:
    """Return the contents of a torch.save file as a tree, tensors as `Array`, without calling code.

    Raises: IntegrityError(FILE_NBYTES) for an incomplete file; StateError(ARGUMENT,
        STATE_UNSUPPORTED); FormatError(LIMIT_EXCEEDED, DOC_DEPTH).
    """
    with damaged(path):
        file = _open_file(path)
        root = file.root()
        content.budget = tensor_budget(Path(path).stat().st_size, where=path)
        return Trees(file, content, value_budget(file.pickle_nbytes, where=path)).whole(root)


def _open_file(path: str) -> TorchFile:
    """Return a torch.save file of any form.

    Raises: StateError(ARGUMENT); IntegrityError(FILE_NBYTES).
    """
    head = read_head(path)
    check_format(head, where=path)
    if is_old(head):
        return OldFile(path)
    if is_tar(head):
        return TarFile(path)
    if not head.startswith(ZIP[: len(head)]):
        raise unknown_format(head, where=path)
    return Archive(path)


class Trees:
    """Turns the value of a pickle into a tree, with one `Array` for each memory of tensors.

    Args:
        file: the pickle's file.
        content: the contents, whose list `left_out` receives the parts without a place.
        budget: budget of plain values.
    """

    def __init__(self, file: TorchFile, content: Content, budget: Budget) -> None:
        self._file = file
        self._content = content
        self._budget = budget
        self._arrays: dict[object, Array] = {}
        self._seen: list[tuple[str, StoredTensor]] = []
        self._compound = 0
        self._refused = 0

    def whole(self, root: object) -> object:
        """Return the tree of a whole pickle, with a `Refused` for each inconvertible value.

        Raises: StateError(STATE_UNSUPPORTED); FormatError(LIMIT_EXCEEDED);
            IntegrityError(FILE_NBYTES).
        """
        tree = self._value(root, "", 0)
        self._content.left_out += _lost_of_tensors(self._seen)
        return tree

    def _value(self, item: Any, name: str, depth: int) -> Any:
        kind = type(item)
        if kind in _SCALARS:
            self._budget.spend(1 + _size(item))
            return item
        self._budget.spend(8 + len(name) // 8)
        check_depth(depth, name)
        if kind is list or kind is tuple:
            return self._items(item, name, depth)
        if kind is Made:
            return self._made(item, name, depth)
        if item.name not in DTYPE_NAMES:
            return self._refuse(_without_form(item, name or self._file.where))
        return DtypeName(DTYPE_NAMES[item.name])

    def _made(self, item: Made, name: str, depth: int) -> Any:
        try:
            if item.kind in TENSORS:
                return self._tensor(item, name)
            if item.kind in _CONTAINERS:
                return _CONTAINERS[item.kind](self, item, name, depth)
            if item.kind in _VALUES:
                return _VALUES[item.kind](self, item)
            return self._refuse(_without_form(item, name or self._file.where))
        except StateError as error:
            return self._refuse(error, is_tensor=item.kind in TENSORS, where=name)

    def _refuse(self, error: CkptError, *, is_tensor: bool = False, where: str = "") -> Refused:
        """Return a placeholder of an inconvertible value.

        Raises: `error`, after too many placeholders.
        """
        self._refused += 1
        if self._refused > _REFUSED_COUNT:
            raise error
        error.where = error.where or where[:500] or self._file.where
        return Refused(error.with_traceback(None), is_tensor=is_tensor)

    def _items(self, items: Any, name: str, depth: int) -> Any:
        kinds = set(map(type, items))
        if kinds <= _SIMPLE or (
            kinds == {int} and -_KEY_INTEGER <= min(items) <= max(items) < _KEY_INTEGER
        ):
            self._budget.spend(len(items))
            return items[:]
        return type(items)(
            [self._value(item, _below(name, index), depth + 1) for index, item in enumerate(items)]
        )

    def _tensor(self, made: Made, name: str) -> Array:
        tensor = tensor_of(self._file, made, where=name)
        self._seen.append((name, tensor))
        key = tensor.memory or id(made)
        if key not in self._arrays:
            self._arrays[key] = Array(tensor.dtype, tensor.shape, tensor.read)
        return self._arrays[key]

    def dict_of(self, made: Made, name: str, depth: int) -> Any:
        """Return a mapping, and list the mapping's attributes as left out."""
        found: dict[Any, Any] = OrderedDict() if made.kind == ORDERED_DICT else {}
        items = [*_pairs_of(made), *(made.items or ())] if made.args else made.items or []
        for key, item in zip(items[::2], items[1::2], strict=True):
            plain = self._key(key)
            found[plain] = self._value(item, _below(name, plain), depth + 1)
        if made.state is not None:
            for key in (only(made.state, Made).items or [])[::2]:
                self._budget.spend(8 + len(name) // 8)
                lost = LeftOut(
                    f"{name or 'the file'}: {key}"[:500], "a dict is kept without attributes"
                )
                self._content.left_out.append(lost)
        return found

    def counter_of(self, made: Made, name: str, depth: int) -> Any:
        """Return a Counter."""
        counter: Counter[Any] = Counter()
        counter.update(self.dict_of(only(made.args[0], Made), name, depth) if made.args else {})
        return counter

    def set_of(self, made: Made) -> Any:
        """Return a set."""
        items = [*(only(made.args[0], list) if made.args else ()), *(made.items or ())]
        members = [self._key(item) for item in items]
        return frozenset(members) if made.kind == FROZENSET else set(members)

    def _key(self, item: Any) -> Any:
        """Return a mapping's key or a set's member, if its type can't make a hash table slow.

        The hash of text differs in each process. The hash of numbers, and of tuples of numbers, is
        known: keys of types for which many values can have one hash are limited in number.
        """
        kind = type(item)
        if kind in _SCALARS and (kind is not int or -_KEY_INTEGER <= item < _KEY_INTEGER):
            self._budget.spend(1 + _size(item))
            return item
        if kind is Made and item.kind == "_codecs.encode":
            return self.bytes_of(item)
        self._compound += 1
        if self._compound > _COMPOUND_KEYS:
            detail = f"more than {_COMPOUND_KEYS} keys that are neither text nor usual numbers"
            raise err(
                Code.LIMIT_EXCEEDED,
                detail,
                where=self._file.where,
                remedy="Save it with texts as keys.",
            )
        if (
            kind is tuple
            and len(item) <= _COMPOUND_LENGTH
            and not any(type(part) is tuple for part in item)
        ):
            return tuple(map(self._key, item))
        if kind is Made and item.kind == "builtins.complex":
            return self.complex_of(item)
        raise err(
            Code.STATE_UNSUPPORTED,
            (
                f"a key of type {(item.kind if kind is Made else kind.__name__)[:200]} has no"
                " form in"
                " a checkpoint"
            ),
            remedy=ANEW,
        )

    def bytes_of(self, made: Made) -> bytes:
        """Return bytes, which protocol 2 writes as a text."""
        text, encoding = made.args
        if encoding != "latin1":
            raise _without_form(made, "")
        self._budget.spend(1 + len(only(text, str)) // 8)
        return str(text).encode("latin-1")

    def bytearray_of(self, made: Made) -> bytearray:
        """Return a bytearray."""
        (content,) = made.args or (b"",)
        return bytearray(content if type(content) is bytes else self.bytes_of(only(content, Made)))

    def complex_of(self, made: Made) -> complex:
        """Return a complex number."""
        real, imag = made.args
        return complex(only(real, float), only(imag, float))

    def shape_of(self, made: Made) -> Size:
        """Return a torch.Size."""
        return Size(shape_of(made))

    def device_of(self, made: Made) -> DeviceName:
        """Return a torch.device."""
        kind, *index = made.args
        if not _DEVICE.fullmatch(only(kind, str)) or len(index) > 1:
            raise _without_form(made, "")
        return DeviceName(":".join([kind, *(str(size_of(number)) for number in index)]))


#: Functions to turn a record into a container, given its name and depth.
_CONTAINERS: Final[dict[str, Callable[[Trees, Made, str, int], Any]]] = {
    DICT: Trees.dict_of,
    ORDERED_DICT: Trees.dict_of,
    COUNTER: Trees.counter_of,
}
#: Records of calls with the object's class as first argument.
_MAKERS: Final = (
    CALLED,
    PERSISTENT,
    "copyreg._reconstructor",
    "copy_reg._reconstructor",
    "copyreg.__newobj__",
)
#: Functions to turn a record into a value.
_VALUES: Final[dict[str, Callable[[Trees, Made], Any]]] = {
    SET: Trees.set_of,
    FROZENSET: Trees.set_of,
    "_codecs.encode": Trees.bytes_of,
    "builtins.bytearray": Trees.bytearray_of,
    "builtins.complex": Trees.complex_of,
    "torch.Size": Trees.shape_of,
    "torch.device": Trees.device_of,
}


def _pairs_of(made: Made) -> Iterable[Any]:
    """Yield alternately keys and values of a dict made of pairs, the form of Python 2."""
    (pairs,) = made.args
    for pair in only(pairs, list):
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise TypeError("a dict with an entry that isn't a pair")
        yield from pair


def _size(item: object) -> int:
    """Return the number of words of eight bytes of a scalar beyond the first."""
    if type(item) is str or type(item) is bytes:
        return len(item) // 8
    return item.bit_length() // 64 if type(item) is int else 0


def _below(name: str, key: object) -> str:
    """Return the name of the value under `key`, cut to a length just above a name's limit."""
    return child_name(name, key)[: limits.NAME_NBYTES + 1]


def _without_form(item: Named | Made, name: str) -> CkptError:
    """Return the error for an object of a class other than tensors and plain values."""
    found: Any = item
    while type(found) is Made and found.args and found.kind in _MAKERS:
        found = found.args[0]
        if type(found) is tuple and len(found) > 1:  # a class and its source, by a persistent id
            found = found[1]
    kind = (
        found.name
        if type(found) is Named
        else found.kind
        if type(found) is Made
        else type(found).__name__
    )
    return err(
        Code.STATE_UNSUPPORTED,
        f"an object of {kind[:200]} isn't loaded: only tensors and plain values are safe to load",
        where=name[:500] or None,
        remedy=ANEW,
    )


def _lost_of_tensors(tensors: list[tuple[str, StoredTensor]]) -> Iterable[LeftOut]:
    """Yield the lost properties of tensors: partly shared memory, attributes, requires_grad."""
    spans = []
    for name, tensor in tensors:
        if tensor.requires_grad:
            yield LeftOut(
                f"{name}: requires_grad", "a checkpoint keeps values, not what is trained"
            )
        if tensor.attributes is not None:
            yield LeftOut(f"{name}: attributes", "a tensor is kept without attributes")
        if tensor.memory is not None:
            spans.append((tensor.begin, tensor.end, name, tensor.memory))
    spans.sort(key=lambda span: span[:3])
    end = 0
    holder = ""
    held = None
    for begin, span_end, name, memory in spans:
        if begin < end and memory != held:
            yield LeftOut(
                f"{name}: the memory that it shares with {holder}",
                "only tensors of one shape can be tied",
            )
        if span_end > end:
            end = span_end
            holder = name
            held = memory


METADATA_NAME: Final = ".metadata"

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
_CLASSES: Final = (
    *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
)
#: Names to which the metadata may refer.
_PERMITTED: Final = frozenset(
    {
        *(f"{_METADATA}.{name}" for name in _CLASSES),
        *DTYPE_NAMES,
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ("Path", "PosixPath")
        ),
        *(f"{module}.PurePosixPath" for module in ("pathlib", "pathlib._local")),
        _STORAGE_INFO,
        "torch.serialization._get_layout",
        "torch.Size",
        ORDERED_DICT,
    }
)


def read_directory(path: str, content: Content) -> object:
    """Return the contents of a directory as a tree, tensors as `Array`, without calling code.

    Raises: IntegrityError(FILE_MISSING, FILE_NBYTES); StateError(STATE_UNSUPPORTED);
        LayoutError(TILING_GAP, TILING_OVERLAP, BOX_BOUNDS); FormatError(UNSAFE_PATH, UNSAFE_FILE,
        LIMIT_EXCEEDED, DOC_DEPTH).
    """
    with damaged(str(Path(path) / METADATA_NAME)):
        return _Directory(Path(path), content).tree()


@dataclasses.dataclass(frozen=True, slots=True)
class _Stored:
    """The place of an item: a torch.save file within a file."""

    path: Path
    begin: int
    nbytes: int
    where: str

    def archive(self) -> Archive:
        """Open the torch.save file.

        Raises: IntegrityError(FILE_NBYTES); StateError(STATE_UNSUPPORTED).
        """
        with damaged(self.where):
            return Archive(str(self.path), self.begin, self.nbytes, where=self.where)


class _Directory:
    def __init__(self, root: Path, content: Content) -> None:
        self._root = root
        self._content = content
        self._where = str(root / METADATA_NAME)
        pickled = member_of(root, METADATA_NAME, named_by=str(root)).read_bytes()
        check_pointer(pickled[:512], where=self._where)
        made = parse_pickle(pickled, permitted=_PERMITTED, where=self._where)
        self._nbytes = len(pickled)
        self._budget = value_budget(len(pickled), where=self._where)
        self._metadata = self._state(made, "Metadata")
        self._sizes: dict[str, int] = {}
        self._items = self._places(self._metadata.get("storage_data"))
        stored_nbytes = len(pickled) + sum(self._sizes.values())
        self._content.budget = tensor_budget(stored_nbytes, where=self._where)
        # Bytes stored once and named several times are read several times.
        self._reading = value_budget(stored_nbytes, where=self._where)

    def tree(self) -> object:
        """Return the whole tree."""
        flat: dict[str, Any] = {}
        for name, described in self._pairs(self._metadata.get("state_dict_metadata")):
            if type(name) is not str:
                raise TypeError("a name that isn't text")
            self._budget.spend(8 + len(name) // 8)
            if type(described) is Made and described.kind == f"{_METADATA}.TensorStorageMetadata":
                try:
                    flat[name] = self._array(name, self._state(described, "TensorStorageMetadata"))
                except StateError as error:
                    flat[name] = Refused(error.with_traceback(None), is_tensor=True)
            else:
                flat[name] = self._value(name)
        paths = self._metadata.get("planner_data")
        if type(paths) is not Made or paths.kind not in (DICT, ORDERED_DICT):
            return flat
        by_name = {name: where for name, where in self._pairs(paths) if type(name) is str}
        return self._nested(flat, by_name) if by_name.keys() == flat.keys() else flat

    # --- metadata ---------------------------------------------------------------------------------

    def _state(self, made: object, kind: str) -> dict[str, Any]:
        """Return the attributes of a record by name."""
        full = kind if "." in kind else f"{_METADATA}.{kind}"
        if type(made) is not Made or made.kind != full:
            detail = (
                f"the file isn't the metadata of a distributed checkpoint: no {kind} where"
                " one belongs"
            )
            raise err(Code.STATE_UNSUPPORTED, detail, where=self._where)
        return {name: value for name, value in self._pairs(made.state) if type(name) is str}

    def _pairs(self, made: object) -> list[tuple[Any, Any]]:
        """Return the items of a mapping."""
        if type(made) is not Made or made.kind not in (DICT, ORDERED_DICT):
            raise TypeError("no mapping where one belongs")
        items = made.items or []
        self._budget.spend(len(items))
        return list(zip(items[::2], items[1::2], strict=True))

    def _places(self, stored: object) -> dict[tuple[str, str], _Stored]:
        """Return the place of each item by name and offsets.

        Offsets are text: the hash of numbers can be chosen.
        """
        places = {}
        for index, info in self._pairs(stored):
            key = self._state(index, "MetadataIndex")
            of = self._state(info, _STORAGE_INFO)
            name = key.get("fqn")
            offsets = key.get("offset")
            if type(name) is not str:
                raise TypeError("a name that isn't text")
            places[name, "" if offsets is None else str(shape_of(offsets))] = self._place(name, of)
        return places

    def _place(self, name: str, of: dict[str, Any]) -> _Stored:
        path = member_of(self._root, of.get("relative_path"), named_by=self._where)
        if of.get("transform_descriptors"):
            detail = f"{name[:200]!r} is stored by an extension of torch's format"
            raise err(Code.STATE_UNSUPPORTED, detail, where=str(path))
        begin = of.get("offset")
        nbytes = of.get("length")
        if type(begin) is not int or type(nbytes) is not int or begin < 0 or nbytes < 0:
            raise ValueError("a place out of range")
        if path.name not in self._sizes:
            self._sizes[path.name] = path.stat().st_size
            check_pointer(read_head(path), where=str(path))
        if begin + nbytes > self._sizes[path.name]:
            remedy = "Copy the directory again."
            raise err(
                Code.FILE_NBYTES,
                f"the file ends within {name[:200]!r}",
                where=str(path),
                remedy=remedy,
            )
        return _Stored(path, begin, nbytes, f"{path}: {name[:200]}")

    def _item(self, name: str, offsets: tuple[int, ...] | None) -> _Stored:
        stored = self._items.get((name, "" if offsets is None else str(offsets)))
        if stored is None:
            raise err(
                Code.FILE_MISSING,
                f"nothing says where {name[:200]!r} is stored",
                where=str(self._root),
            )
        self._reading.spend(stored.nbytes)
        return stored

    # --- tensors and values -----------------------------------------------------------------------

    def _value(self, name: str) -> object:
        stored = self._item(name, None)
        archive = stored.archive()
        with damaged(stored.where):
            return Trees(
                archive, self._content, value_budget(archive.pickle_nbytes, where=stored.where)
            ).whole(archive.root())

    def _array(self, name: str, described: dict[str, Any]) -> Array:
        where = f"{self._root}: {name[:200]}"
        dtype = self._dtype(described.get("properties"), where)
        shape = shape_of(described.get("size"))
        boxes = []
        for chunk in described["chunks"]:
            of = self._state(chunk, "ChunkStorageMetadata")
            boxes.append(Box(shape_of(of.get("offsets")), shape_of(of.get("sizes"))))
            self._budget.spend(8 + len(shape))
        rows = [[box.begin for box in boxes], [box.shape for box in boxes]]
        begin, extents = (np.array(row, np.int64).reshape(len(boxes), len(shape)) for row in rows)
        check_tiling(shape, begin, extents, where=where)
        chunks = [_Chunk(box, self._item(name, box.begin), dtype) for box in boxes]
        return Array(dtype, shape, functools.partial(_read, chunks))

    def _dtype(self, properties: object, where: str) -> str:
        """Return the dtype of a tensor.

        TensorProperties is pickled as a tuple whose first item is the dtype, or with an attribute.
        """
        if type(properties) is not Made or properties.kind != f"{_METADATA}.TensorProperties":
            raise TypeError("a tensor without properties")
        state = properties.state
        named = (
            state[0]
            if type(state) is tuple
            else self._state(properties, "TensorProperties").get("dtype")
        )
        if type(named) is not Named or named.name not in DTYPE_NAMES:
            raise err(Code.STATE_UNSUPPORTED, "the format lacks the tensor's dtype", where=where)
        return DTYPE_NAMES[named.name]

    # --- nesting ----------------------------------------------------------------------------------

    def _nested(self, flat: dict[str, Any], paths: dict[str, Any]) -> dict[str, Any]:
        """Return the nested mapping before torch's flattening, by the path of each name."""
        root: dict[str, Any] = {}
        for name, value in flat.items():
            path = paths[name]
            if type(path) is not tuple or not path or type(path[0]) is not str:
                raise TypeError("a path that isn't a tuple with a string in front")
            check_depth(len(path), name)
            at: Any = root
            for key, inner in itertools.pairwise(path):
                if self._take(at, key) is None:
                    at[key] = {} if type(inner) is str else []
                at = at[key]
            self._take(at, path[-1])
            at[path[-1]] = value
        return root

    def _take(self, at: Any, key: object) -> object:
        """Return the value under a key, or None; extend a list to hold the position."""
        if type(at) is dict and type(key) is str:
            self._budget.spend(1 + len(key) // 8)
            return at.get(key)
        if type(at) is not list or type(key) is not int or key < 0:
            raise err(
                Code.STATE_UNSUPPORTED,
                "the paths of two names contradict each other",
                where=self._where,
            )
        self._budget.spend(1 + max(0, key + 1 - len(at)))
        at += [None] * (key + 1 - len(at))
        return at[key]


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """A stored chunk of a tensor."""

    box: Box
    stored: _Stored
    dtype: str

    def tensor(self) -> StoredTensor:
        """Return the chunk as a tensor.

        Raises: IntegrityError(FILE_NBYTES); LayoutError(SHAPE_MISMATCH).
        """
        archive = self.stored.archive()
        with damaged(self.stored.where):
            found = tensor_of(archive, archive.root(), where=self.stored.where)
        if (found.shape, found.dtype) != (self.box.shape, self.dtype):
            detail = f"stored as {found.dtype} {found.shape}, not {self.dtype} {self.box.shape}"
            raise err(Code.SHAPE_MISMATCH, detail, where=self.stored.where)
        return found


def _read(chunks: list[_Chunk], box: Box, out: memoryview) -> None:
    """Fill `out` with the bytes of a box, from the intersecting chunks."""
    for chunk in chunks:
        common = chunk.box.intersect(box)
        if common is None:
            continue
        if common == box:
            chunk.tensor().read(_within(box, chunk.box), out)
            continue
        element = np.dtype((np.void, DTYPES[chunk.dtype].nbytes))
        piece = bytearray(common.element_count * element.itemsize)
        chunk.tensor().read(_within(common, chunk.box), memoryview(piece))
        made: Any = np.frombuffer(out, element).reshape(box.shape)
        made[(*common.relative_to(box), ...)] = np.frombuffer(piece, element).reshape(common.shape)


def _within(box: Box, chunk: Box) -> Box:
    """Return a box relative to the containing chunk."""
    return Box(
        tuple(at - begin for at, begin in zip(box.begin, chunk.begin, strict=True)), box.shape
    )

"""A directory of torch.distributed.checkpoint, read without torch.

Its ``.metadata`` is a pickle that says which tensors there are, in which chunks, and where each is stored: as a
torch.save file within a larger file. It is read as `ckptfmt.convert.pickles` says: as data, paths as text.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptfmt import limits
from ckptfmt.box import Box
from ckptfmt.convert.content import Array, Content, member_of, tensor_budget, value_budget
from ckptfmt.convert.pickles import DICT, ORDERED_DICT, Made, Named, parse_pickle
from ckptfmt.convert.torch_archive import DTYPE_NAMES, Archive, StoredTensor, damaged, shape_of
from ckptfmt.convert.torch_trees import Trees
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.layout.tiling import check_tiling

METADATA_NAME: Final = ".metadata"

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
_CLASSES: Final = (
    *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
)
#: Names that it may refer to.
_PERMITTED: Final = frozenset(
    {
        *(f"{_METADATA}.{name}" for name in _CLASSES),
        *DTYPE_NAMES,
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath")),
        *(f"{module}.PurePosixPath" for module in ("pathlib", "pathlib._local")),
        _STORAGE_INFO,
        "torch.serialization._get_layout",
        "torch.Size",
        ORDERED_DICT,
    }
)


def read_directory(path: str, content: Content) -> object:
    """Return what a directory holds as a tree, its tensors as `Array`; nothing in it is called.

    Raises: IntegrityError(FILE_MISSING, FILE_NBYTES); StateError(STATE_UNSUPPORTED); LayoutError(TILING_GAP,
        TILING_OVERLAP, BOX_BOUNDS); FormatError(UNSAFE_PATH, UNSAFE_FILE, LIMIT_EXCEEDED, DOC_DEPTH).
    """
    with damaged(str(Path(path) / METADATA_NAME)):
        return _Directory(Path(path), content).tree()


@dataclasses.dataclass(frozen=True, slots=True)
class _Stored:
    """Where an item lies: a torch.save file within a file."""

    path: Path
    begin: int
    nbytes: int
    where: str

    def archive(self) -> Archive:
        """Open it. Raises: IntegrityError(FILE_NBYTES); StateError(STATE_UNSUPPORTED)."""
        with damaged(self.where):
            return Archive(str(self.path), self.begin, self.nbytes, where=self.where)


class _Directory:
    def __init__(self, root: Path, content: Content) -> None:
        self._root = root
        self._content = content
        self._where = str(root / METADATA_NAME)
        pickled = member_of(root, METADATA_NAME, named_by=str(root)).read_bytes()
        made = parse_pickle(pickled, permitted=_PERMITTED, where=self._where)
        self._nbytes = len(pickled)
        self._budget = value_budget(len(pickled), where=self._where)
        self._metadata = self._state(made, "Metadata")
        self._sizes: dict[str, int] = {}
        self._items = self._places(self._metadata.get("storage_data"))
        stored_nbytes = len(pickled) + sum(self._sizes.values())
        self._content.budget = tensor_budget(stored_nbytes, where=self._where)
        #: What is stored once and named several times is read as often.
        self._reading = value_budget(stored_nbytes, where=self._where)

    def tree(self) -> object:
        """Return all of it."""
        flat: dict[str, Any] = {}
        for name, described in self._pairs(self._metadata.get("state_dict_metadata")):
            if type(name) is not str:
                raise TypeError("a name that isn't text")
            self._budget.spend(8 + len(name) // 8)
            if type(described) is Made and described.kind == f"{_METADATA}.TensorStorageMetadata":
                flat[name] = self._array(name, self._state(described, "TensorStorageMetadata"))
            else:
                flat[name] = self._value(name)
        paths = self._metadata.get("planner_data")
        if type(paths) is not Made or paths.kind not in (DICT, ORDERED_DICT):
            return flat
        by_name = {name: where for name, where in self._pairs(paths) if type(name) is str}
        return self._nested(flat, by_name) if by_name.keys() == flat.keys() else flat

    # --- what the metadata says ---------------------------------------------------------------------------------------

    def _state(self, made: object, kind: str) -> dict[str, Any]:
        """Return the attributes of a record, by name."""
        full = kind if "." in kind else f"{_METADATA}.{kind}"
        if type(made) is not Made or made.kind != full:
            detail = f"it isn't the metadata of a distributed checkpoint: no {kind} where one belongs"
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
        """Return where each item lies, by name and offsets as text: the hash of numbers can be chosen."""
        places = {}
        for index, info in self._pairs(stored):
            key, of = self._state(index, "MetadataIndex"), self._state(info, _STORAGE_INFO)
            name, offsets = key.get("fqn"), key.get("offset")
            if type(name) is not str:
                raise TypeError("a name that isn't text")
            places[name, "" if offsets is None else str(shape_of(offsets))] = self._place(name, of)
        return places

    def _place(self, name: str, of: dict[str, Any]) -> _Stored:
        path = member_of(self._root, of.get("relative_path"), named_by=self._where)
        if of.get("transform_descriptors"):
            detail = f"{name[:200]!r} is stored by an extension of torch's format"
            raise err(Code.STATE_UNSUPPORTED, detail, where=str(path))
        begin, nbytes = of.get("offset"), of.get("length")
        if type(begin) is not int or type(nbytes) is not int or begin < 0 or nbytes < 0:
            raise ValueError("a place out of range")
        if path.name not in self._sizes:
            self._sizes[path.name] = path.stat().st_size
        if begin + nbytes > self._sizes[path.name]:
            remedy = "Copy the directory again."
            raise err(Code.FILE_NBYTES, f"it ends within {name[:200]!r}", where=str(path), remedy=remedy)
        return _Stored(path, begin, nbytes, f"{path}: {name[:200]}")

    def _item(self, name: str, offsets: tuple[int, ...] | None) -> _Stored:
        stored = self._items.get((name, "" if offsets is None else str(offsets)))
        if stored is None:
            raise err(Code.FILE_MISSING, f"nothing says where {name[:200]!r} is stored", where=str(self._root))
        self._reading.spend(stored.nbytes)
        return stored

    # --- tensors and values -------------------------------------------------------------------------------------------

    def _value(self, name: str) -> object:
        stored = self._item(name, None)
        archive = stored.archive()
        with damaged(stored.where):
            return Trees(archive, self._content, value_budget(archive.pickle_nbytes, where=stored.where)).whole(
                archive.root()
            )

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
        """Return the dtype of a tensor: first of a tuple, as its class writes itself, or an attribute."""
        if type(properties) is not Made or properties.kind != f"{_METADATA}.TensorProperties":
            raise TypeError("a tensor without properties")
        state = properties.state
        named = state[0] if type(state) is tuple else self._state(properties, "TensorProperties").get("dtype")
        if type(named) is not Named or named.name not in DTYPE_NAMES:
            raise err(Code.STATE_UNSUPPORTED, "the format has no dtype like it", where=where)
        return DTYPE_NAMES[named.name]

    # --- nesting ------------------------------------------------------------------------------------------------------

    def _nested(self, flat: dict[str, Any], paths: dict[str, Any]) -> dict[str, Any]:
        """Return the nested mapping whose flat form torch wrote: each name's path of keys and positions in lists."""
        root: dict[str, Any] = {}
        for name, value in flat.items():
            path = paths[name]
            if type(path) is not tuple or not path or type(path[0]) is not str:
                raise TypeError("a path that isn't one")
            if len(path) > limits.MSGPACK_DEPTH:
                raise err(Code.DOC_DEPTH, f"nests deeper than {limits.MSGPACK_DEPTH}", where=name[:64])
            at: Any = root
            for key, inner in itertools.pairwise(path):
                if self._take(at, key) is None:
                    at[key] = {} if type(inner) is str else []
                at = at[key]
            self._take(at, path[-1])
            at[path[-1]] = value
        return root

    def _take(self, at: Any, key: object) -> object:  # noqa: ANN401 - dict or list
        """Return what is under a key, None if nothing is; a list is made long enough for it."""
        if type(at) is dict and type(key) is str:
            self._budget.spend(1 + len(key) // 8)
            return at.get(key)
        if type(at) is not list or type(key) is not int or key < 0:
            raise self._contradiction()
        self._budget.spend(1 + max(0, key + 1 - len(at)))
        at += [None] * (key + 1 - len(at))
        return at[key]

    def _contradiction(self) -> CkptError:
        return err(Code.STATE_UNSUPPORTED, "the paths of two names contradict each other", where=self._where)


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """A stored piece of a tensor."""

    box: Box
    stored: _Stored
    dtype: str

    def tensor(self) -> StoredTensor:
        """Return it as it is stored. Raises: IntegrityError(FILE_NBYTES); LayoutError(SHAPE_MISMATCH)."""
        archive = self.stored.archive()
        with damaged(self.stored.where):
            found = archive.tensor(archive.root(), where=self.stored.where)
        if (found.shape, found.dtype) != (self.box.shape, self.dtype):
            detail = f"stored as {found.dtype} {found.shape}, not {self.dtype} {self.box.shape}"
            raise err(Code.SHAPE_MISMATCH, detail, where=self.stored.where)
        return found


def _read(chunks: list[_Chunk], box: Box, out: memoryview) -> None:
    """Fill memory with the bytes of a box, from the chunks that have some of them."""
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
    """Return a box by its place in the chunk that it lies in."""
    return Box(tuple(at - begin for at, begin in zip(box.begin, chunk.begin, strict=True)), box.shape)

"""What a file of torch.save holds, as a tree: tensors as `Array`, torch's own values as trees have them."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.adapters.names import key_text
from ckptfmt.convert.content import Array, Budget, Content, LeftOut, tensor_budget, value_budget
from ckptfmt.convert.pickles import COUNTER, DICT, FROZENSET, ORDERED_DICT, SET, Made
from ckptfmt.convert.torch_archive import (
    DTYPE_NAMES,
    TENSORS,
    Archive,
    StoredTensor,
    damaged,
    only,
    shape_of,
    size_of,
)
from ckptfmt.documents.tree import DeviceName, DtypeName, Size
from ckptfmt.errors import CkptError, Code, err

#: What is left as it is, by type; and that of these which takes a word.
_SCALARS: Final[frozenset[type]] = frozenset({type(None), bool, float, int, str, bytes})
_SIMPLE: Final[frozenset[type]] = frozenset({type(None), bool, float})
#: Integers that may be keys: others of them can be chosen to have one hash.
_KEY_INTEGER: Final = 1 << 63
#: How many keys and members of sets may be made of several values, and of how many at most.
_COMPOUND_KEYS: Final = 4096
_COMPOUND_LENGTH: Final = 16
_DEVICE: Final = re.compile(r"[a-z_]{1,32}")


def read_file(path: str, content: Content) -> object:
    """Return what a torch.save file holds as a tree, its tensors as `Array`; nothing in it is called.

    Raises: IntegrityError(FILE_NBYTES) for a file that isn't whole; StateError(ARGUMENT, STATE_UNSUPPORTED);
        FormatError(LIMIT_EXCEEDED, DOC_DEPTH).
    """
    with damaged(path):
        archive = Archive(path)
        stored_nbytes = Path(path).stat().st_size
        trees = Trees(archive, content, value_budget(archive.pickle_nbytes, where=path))
        content.budget = tensor_budget(stored_nbytes, where=path)
        return trees.whole(archive.root())


class Trees:
    """Turns what a pickle holds into trees: tensors as `Array`, one for each memory, and torch's values as trees do.

    Args:
        archive: that the pickle is of.
        content: is told what has no place.
        budget: of values.
    """

    def __init__(self, archive: Archive, content: Content, budget: Budget) -> None:
        self._archive = archive
        self._content = content
        self._budget = budget
        self._arrays: dict[object, Array] = {}
        self._seen: list[tuple[str, StoredTensor]] = []
        self._compound = 0

    def whole(self, root: object) -> object:
        """Return the tree of a whole pickle. Raises: StateError(STATE_UNSUPPORTED); FormatError(LIMIT_EXCEEDED)."""
        tree = self._value(root, "", 0)
        self._content.left_out += _lost_of_tensors(self._seen)
        return tree

    def _value(self, item: Any, name: str, depth: int) -> Any:  # noqa: ANN401 - of a pickle, and of a tree
        kind = type(item)
        if kind in _SCALARS:
            self._budget.spend(1 + _size(item))
            return item
        self._budget.spend(8 + len(name) // 8)
        if depth > limits.MSGPACK_DEPTH:
            detail = f"nests deeper than {limits.MSGPACK_DEPTH}"
            raise err(Code.DOC_DEPTH, detail, where=name[:64], requirement="REQ-TRE-007")
        if kind is list or kind is tuple:
            return self._items(item, name, depth)
        if kind is Made:
            return self._made(item, name, depth)
        if item.name not in DTYPE_NAMES:
            raise _without_form(item.name, name)
        return DtypeName(DTYPE_NAMES[item.name])

    def _made(self, item: Made, name: str, depth: int) -> Any:  # noqa: ANN401 - of a tree
        if item.kind in TENSORS:
            return self._tensor(item, name)
        if item.kind in _CONTAINERS:
            return _CONTAINERS[item.kind](self, item, name, depth)
        if item.kind in _VALUES:
            return _VALUES[item.kind](self, item)
        raise _without_form(item.kind, name)

    def _items(self, items: Any, name: str, depth: int) -> Any:  # noqa: ANN401 - list or tuple
        kinds = set(map(type, items))
        if kinds <= _SIMPLE or (kinds == {int} and -_KEY_INTEGER <= min(items) <= max(items) < _KEY_INTEGER):
            self._budget.spend(len(items))
            return items[:]
        return type(items)([self._value(item, _below(name, index), depth + 1) for index, item in enumerate(items)])

    def _tensor(self, made: Made, name: str) -> Array:
        tensor = self._archive.tensor(made, where=name)
        self._seen.append((name, tensor))
        key = tensor.memory or id(made)
        if key not in self._arrays:
            self._arrays[key] = Array(tensor.dtype, tensor.shape, tensor.read)
        return self._arrays[key]

    def dict_of(self, made: Made, name: str, depth: int) -> Any:  # noqa: ANN401 - dict or OrderedDict
        """Return a mapping, with what it has beside its items told as left out."""
        if made.args:
            raise TypeError("a dict that is made of something")
        found: dict[Any, Any] = OrderedDict() if made.kind == ORDERED_DICT else {}
        items = made.items or []
        for key, item in zip(items[::2], items[1::2], strict=True):
            plain = self._key(key)
            found[plain] = self._value(item, _below(name, plain), depth + 1)
        if made.state is not None:
            for key in (only(made.state, Made).items or [])[::2]:
                self._budget.spend(8 + len(name) // 8)
                lost = LeftOut(f"{name or 'the file'}: {key}"[:500], "a dict is kept without attributes")
                self._content.left_out.append(lost)
        return found

    def counter_of(self, made: Made, name: str, depth: int) -> Any:  # noqa: ANN401
        """Return a Counter."""
        counter: Counter[Any] = Counter()
        counter.update(self.dict_of(only(made.args[0], Made), name, depth) if made.args else {})
        return counter

    def set_of(self, made: Made) -> Any:  # noqa: ANN401 - set or frozenset
        """Return a set."""
        items = [*(only(made.args[0], list) if made.args else ()), *(made.items or ())]
        members = [self._key(item) for item in items]
        return frozenset(members) if made.kind == FROZENSET else set(members)

    def _key(self, item: Any) -> Any:  # noqa: ANN401 - of a pickle, and of a tree
        """Return the key of a mapping, or the member of a set: only what can't be chosen to make a table slow.

        The hash of text differs in each process. That of numbers, and of what is made of numbers, is known: of those
        that can be equal for many, only few are let in.
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
            raise err(Code.LIMIT_EXCEEDED, detail, where=self._archive.where, remedy="Save it with texts as keys.")
        if kind is tuple and len(item) <= _COMPOUND_LENGTH and not any(type(part) is tuple for part in item):
            return tuple(map(self._key, item))
        if kind is Made and item.kind == "builtins.complex":
            return self.complex_of(item)
        raise err(
            Code.STATE_UNSUPPORTED,
            f"a key of type {(item.kind if kind is Made else kind.__name__)[:200]} has no form in a checkpoint",
            where=self._archive.where,
            requirement="REQ-TRE-008",
        )

    def bytes_of(self, made: Made) -> bytes:
        """Return bytes, which protocol 2 writes as text."""
        text, encoding = made.args
        if encoding != "latin1":
            raise _without_form("_codecs.encode", self._archive.where)
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
            raise _without_form("torch.device", self._archive.where)
        return DeviceName(":".join([kind, *(str(size_of(number)) for number in index)]))


#: What makes a container of a record, given its name and depth.
_CONTAINERS: Final[dict[str, Callable[[Trees, Made, str, int], Any]]] = {
    DICT: Trees.dict_of,
    ORDERED_DICT: Trees.dict_of,
    COUNTER: Trees.counter_of,
}
#: What makes a value of a record.
_VALUES: Final[dict[str, Callable[[Trees, Made], Any]]] = {
    SET: Trees.set_of,
    FROZENSET: Trees.set_of,
    "_codecs.encode": Trees.bytes_of,
    "builtins.bytearray": Trees.bytearray_of,
    "builtins.complex": Trees.complex_of,
    "torch.Size": Trees.shape_of,
    "torch.device": Trees.device_of,
}


def _size(item: object) -> int:
    """Return how many words of eight bytes a scalar takes beyond the first."""
    if type(item) is str or type(item) is bytes:
        return len(item) // 8
    return item.bit_length() // 64 if type(item) is int else 0


def _below(name: str, key: object) -> str:
    """Return the name of what lies under `key`; beyond what a name may have, one that no tensor can have."""
    text = f"{name}/{key_text(key)}" if name else key_text(key)
    return text[: limits.NAME_NBYTES + 1]


def _without_form(what: str, name: str) -> CkptError:
    return err(
        Code.STATE_UNSUPPORTED,
        f"a value of type {what[:200]} has no form in a checkpoint",
        where=name[:500],
        requirement="REQ-TRE-001",
    )


def _lost_of_tensors(tensors: list[tuple[str, StoredTensor]]) -> Iterable[LeftOut]:
    """Yield what tensors are beside their elements: parts of another's memory, attributes, and who wants gradients."""
    spans = []
    for name, tensor in tensors:
        if tensor.requires_grad:
            yield LeftOut(f"{name}: requires_grad", "a checkpoint keeps values, not what is trained")
        if tensor.attributes is not None:
            yield LeftOut(f"{name}: attributes", "a tensor is kept without attributes")
        if tensor.memory is not None:
            spans.append((tensor.begin, tensor.end, name, tensor.memory))
    spans.sort(key=lambda span: span[:3])
    end, holder, held = 0, "", None
    for begin, span_end, name, memory in spans:
        if begin < end and memory != held:
            yield LeftOut(f"{name}: the memory that it shares with {holder}", "only tensors of one shape can be tied")
        if span_end > end:
            end, holder, held = span_end, name, memory

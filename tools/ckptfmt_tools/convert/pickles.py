"""Pickles read as data: an interpreter that makes plain values and inert records.

The interpreter calls no code named by a pickle.

A pickle is a program. REDUCE calls a function, BUILD sets attributes or calls ``__setstate__``,
APPENDS calls ``extend``: a program can call or change any real class or function that an unpickler
gives it. (BUILD with slot state on a class is ``setattr`` on that class, for the whole process.)
`pickle.Unpickler` offers no safe subset: its ``find_class`` decides only which objects the program
gets. `pickle.Unpickler` also allocates as much as an operand requests, such as the memo of
LONG_BINPUT, whatever the size of the file.

This interpreter resolves no name. GLOBAL makes a `Named`, which is immutable; REDUCE and NEWOBJ
make a `Made`, a record of a name and its arguments; BUILD, SETITEMS and ADDITEMS are defined for
`Made` alone, APPENDS for lists and `Made`. So a pickle can change only the lists and records that
were made for it. No value is hashed either: dicts and sets are records of their items, so that no
choice of keys makes a hash table slow. The caller decides which records have a meaning; a record of
any other name, such as ``os.system``, is as inert as text.

Each operation takes at least one byte, and makes one object of less than 100 bytes, or text that
the pickle holds: memory and time are bounded by the size of the pickle. Operations that torch
doesn't write are refused by name.

`pickletools` of the standard library splits a pickle into operations and operands, and makes no
other objects.
"""

from __future__ import annotations

import dataclasses
import pickletools
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol, TypeAlias, cast

from ckptfmt.errors import CkptError, Code, err
from ckptfmt_tools.convert.content import COPY

#: Kinds of records made by operations without a name in the pickle, or filled by SETITEMS.
DICT: Final = "builtins.dict"
SET: Final = "builtins.set"
FROZENSET: Final = "builtins.frozenset"
ORDERED_DICT: Final = "collections.OrderedDict"
COUNTER: Final = "collections.Counter"
_MAPPINGS: Final = (DICT, ORDERED_DICT, COUNTER)
#: Kind of the record of a persistent id; ``args`` holds the id.
PERSISTENT: Final = "a persistent id"

#: Kind of the record of a call with a record as its function; ``args`` holds the inner record
#: and the arguments.
CALLED: Final = "a call of an object"

#: Limits on a name's characters and a pickle's names: two texts stored once can be joined to a name
#: many times.
_NAME_LENGTH: Final = 1000
_NAME_COUNT: Final = 10_000
_BYTEARRAY: Final = "builtins.bytearray"
#: Text of Python 2 in another encoding than UTF-8: a reader can't distinguish such text from bytes.
UNDECODED: Final = "a text of Python 2 that isn't UTF-8"
_LAST_PROTOCOL: Final = 5
#: Python 2's names of modules, which protocol 2 still writes.
_RENAMED: Final = {"__builtin__": "builtins"}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A name of a class, a function or a constant, such as ``torch.float32``."""

    name: str


@dataclasses.dataclass(slots=True, eq=False)
class Made:
    """A record of an object requested by a pickle.

    Attributes:
        kind: name of the object's class or of the function called.
        args: the arguments of the class or function.
        state: the argument of BUILD.
        items: items added, or keys and values of a mapping alternately.
    """

    kind: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] | None = None


def parse_pickle(
    content: bytes | PickleFile,
    *,
    where: str,
    permitted: Collection[str] | None = None,
    persistent: Callable[[Made], Made] = lambda made: made,
) -> Any:
    """Return the value of a pickle.

    The value consists of None, bool, int, float, str, bytes, list, tuple, `Named` and `Made`.

    Args:
        content: the pickle's bytes, or a file that is read from its position to the end of STOP.
        where: the pickle's name, for messages.
        permitted: permitted full names; None for all names, for the caller to check.
        persistent: a function called with the record of each persistent id, in order, which
            returns the replacement.

    Raises: StateError(STATE_UNSUPPORTED) for a name without permission, or an operation that torch
        doesn't write; IntegrityError(FILE_NBYTES) for an incomplete pickle.

    >>> import pickle
    >>> parse_pickle(pickle.dumps([1, ("x", None)]), permitted=(), where="a")
    [1, ('x', None)]
    """
    try:
        return _Machine(content, permitted, persistent, where).run()
    except (LookupError, ValueError, TypeError) as error:
        raise _damaged(where, f"{type(error).__name__}: {str(error)[:100]}") from None


def _damaged(where: str, detail: str) -> CkptError:
    return err(
        Code.FILE_NBYTES, f"the file's pickle isn't whole: {detail}", where=where, remedy=COPY
    )


class PickleFile(Protocol):
    """A file with a pickle, such as `ckptfmt_tools.convert.old_files.Mapped`."""

    def read(self, nbytes: int, /) -> bytes:
        """Return at most `nbytes` bytes, and no more than the file has."""

    def readline(self) -> bytes:
        """Return the bytes up to and with the next line feed."""

    def tell(self) -> int:
        """Return the position."""


class _Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(
        self,
        content: bytes | PickleFile,
        permitted: Collection[str] | None,
        persistent: Callable[[Made], Made],
        where: str,
    ) -> None:
        self.where = where
        self._content = content
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self._permitted = permitted
        self.persistent = persistent
        self._named: dict[str, Named] = {}

    def run(self) -> Any:
        """Execute all operations up to STOP, and return the top of the stack."""
        for operation, operand, _ in pickletools.genops(cast(Any, self._content)):
            do = _OPERATIONS.get(operation.name)
            if do is None:
                if operation.name == "STOP":
                    break
                raise self.refuse(f"an operation {operation.name} that torch doesn't write")
            do(self, operand)
        return self.stack.pop()

    def refuse(self, what: str) -> CkptError:
        """Return the error for a forbidden name or operation."""
        return err(
            Code.STATE_UNSUPPORTED,
            f"the file holds an object or operation that isn't safe to load: {what[:300]}",
            where=self.where,
            remedy="If you trust the file, load it with the program that wrote it, and save only"
            " the state_dict and plain values.",
        )

    def named(self, module: object, name: object) -> Named:
        """Return the `Named` of a module and a name. Raises: StateError(STATE_UNSUPPORTED)."""
        if type(module) is not str or type(name) is not str:
            raise TypeError("a name that isn't text")
        if len(module) + len(name) > _NAME_LENGTH or len(self._named) > _NAME_COUNT:
            raise self.refuse(
                f"names of more than {_NAME_LENGTH} characters, or more than {_NAME_COUNT} names"
            )
        full = f"{_RENAMED.get(module, module)}.{name}"
        if self._permitted is not None and full not in self._permitted:
            raise self.refuse(full)
        return self._named.setdefault(full, Named(full))

    def push(self, value: object) -> None:
        """Push a value on the current stack, which `cut` may have replaced in the meantime."""
        self.stack.append(value)

    def cut(self) -> list[Any]:
        """Remove and return the values above the last mark."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def filled(self, *, but: Collection[str]) -> list[Any]:
        """Return the items of the record on top of the stack, to be extended. Raises: TypeError.

        Args:
            but: kinds of records without such items.
        """
        target = self.stack[-1]
        if type(target) is not Made or target.kind in but:
            raise TypeError(f"items for a {type(target).__name__}")
        if target.items is None:
            target.items = []
        return target.items


# --- operations -----------------------------------------------------------------------------------


def _protocol(machine: _Machine, operand: int) -> None:
    if operand > _LAST_PROTOCOL:
        raise machine.refuse(f"protocol {operand}")


def _push(machine: _Machine, operand: object) -> None:
    machine.push(operand)


def _push_text(machine: _Machine, operand: str) -> None:
    """Push a text of Python 2, which `pickletools` decodes as Latin-1.

    Python 2 wrote UTF-8 or plain bytes.
    """
    try:
        machine.push(operand.encode("latin-1").decode())
    except UnicodeDecodeError:
        machine.push(Made(UNDECODED))


def _constant(value: object) -> _Operation:
    return lambda machine, _: machine.push(value)


def _record(kind: str) -> _Operation:
    return lambda machine, _: machine.push(Made(kind))


def _mark(machine: _Machine, _operand: None) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _tuple_of(count: int) -> _Operation:
    def operation(machine: _Machine, _operand: None) -> None:
        if len(machine.stack) < count:
            raise LookupError("the stack is empty")
        machine.stack[-count:] = [tuple(machine.stack[-count:])]

    return operation


def _extend(machine: _Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not list:
        # The target is an object of a class derived from list.
        target = machine.filled(but=(*_MAPPINGS, SET, FROZENSET))
    target += items


def _set_item(machine: _Machine, _operand: None) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    machine.filled(but=(SET, FROZENSET)).extend((key, value))


def _set_items(machine: _Machine, _operand: None) -> None:
    items = machine.cut()
    if len(items) % 2:
        raise ValueError("a key without a value")
    machine.filled(but=(SET, FROZENSET)).extend(items)


def _add_items(machine: _Machine, _operand: None) -> None:
    items = machine.cut()
    machine.filled(but=(*_MAPPINGS, FROZENSET)).extend(items)


def _put(machine: _Machine, operand: int) -> None:
    machine.memo[operand] = machine.stack[-1]


def _stack_global(machine: _Machine, _operand: None) -> None:
    name = machine.stack.pop()
    module = machine.stack.pop()
    machine.push(machine.named(module, name))


def _make(machine: _Machine, _operand: None) -> None:
    args = machine.stack.pop()
    maker = machine.stack.pop()
    if type(args) is not tuple:
        raise TypeError(f"arguments that are a {type(args).__name__}")
    if type(maker) is Named:
        machine.push(Made(maker.name, args))
    # A method is the result of a getattr; a class may be given by its persistent id.
    elif type(maker) is Made:
        machine.push(Made(CALLED, (maker, args)))
    else:
        raise TypeError(f"a call of a {type(maker).__name__}")


def _build(machine: _Machine, _operand: None) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is not Made:
        raise machine.refuse(
            f"a state for {target.name if type(target) is Named else type(target).__name__}"
        )
    target.state = state


_Operation: TypeAlias = Callable[[_Machine, Any], None]

_OPERATIONS: Final[dict[str, _Operation]] = {
    "PROTO": _protocol,
    "FRAME": lambda _machine, _operand: None,  # a frame's end matters only to a reader of a stream
    "MARK": _mark,
    "NONE": _constant(None),
    "NEWTRUE": _constant(value=True),
    "NEWFALSE": _constant(value=False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"), _push),
    **dict.fromkeys(("SHORT_BINSTRING", "BINSTRING"), _push_text),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), _push),
    "BYTEARRAY8": lambda machine, operand: machine.push(Made(_BYTEARRAY, (bytes(operand),))),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "APPEND": lambda machine, _: _extend(machine, [machine.stack.pop()]),
    "APPENDS": lambda machine, _: _extend(machine, machine.cut()),
    "EMPTY_TUPLE": _constant(()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.cut())),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "EMPTY_DICT": _record(DICT),
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "EMPTY_SET": _record(SET),
    "ADDITEMS": _add_items,
    "FROZENSET": lambda machine, _: machine.push(Made(FROZENSET, items=machine.cut())),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, at: machine.push(machine.memo[at])),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _put),
    "MEMOIZE": lambda machine, _: _put(machine, len(machine.memo)),
    "GLOBAL": lambda machine, pair: machine.push(machine.named(*pair.split(" ", 1))),
    "STACK_GLOBAL": _stack_global,
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _make),
    "BUILD": _build,
    "BINPERSID": lambda machine, _: machine.push(
        machine.persistent(Made(PERSISTENT, (machine.stack.pop(),)))
    ),
}

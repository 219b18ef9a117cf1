"""The field of each entry of a foreign file, and the nested mapping of a checkpoint's fields."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.adapters.live_trees import GLOBAL, key_text
from ckptfmt.adapters.numbering import nest, take_optimizers
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import TensorRef, iter_references
from ckptfmt.errors import CkptError, Code, err
from ckptfmt_tools.convert.content import (
    Array,
    Content,
    LeftOut,
    Refused,
    Tensor,
    Unfit,
    map_tree,
    text_of,
)

#: Fields for entries; ``extra`` is the part of the field optimizer that is neither
#: weights nor optimizer.
FIELDS_TAKEN: Final = ("weights", "optimizer", "data", "config", "extra")

#: Field of an entry by its key, if the caller gives no rule. An entry with any other key is extra.
_USUAL: Final = {
    **dict.fromkeys(
        ("weights", "model", "module", "state_dict", "model_state_dict", "net"), "weights"
    ),
    **dict.fromkeys(
        ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_states"),
        "optimizer",
    ),
    "data": "data",
    "config": "config",
}

#: Keys at the top of a foreign file for the number of training steps done: of a plain training
#: loop, and of Lightning.
STEP_KEYS: Final = ("step", "global_step")

#: All keys of a file converted from a checkpoint.
_OWN_KEYS: Final = {"weights", "optimizer", "data", "config", "extra", "step"}

#: Containers that some targets lack: `fit` decides about them.
_HASHED: Final = (set, frozenset, deque, Counter)
_SCOPED: Final = "it belongs to one worker alone, and the target has no scopes"
_SPOKEN_OF: Final = ("rng", "topology", "provenance")


def parse_rules(texts: Iterable[str]) -> dict[str, str]:
    """Return the field of each key, given as ``KEY=FIELD``.

    A field without a key is for the whole source.

    Raises: StateError(ARGUMENT).

    >>> parse_rules(["ema=extra", "a=b=weights"]), parse_rules(["weights"])
    ({'ema': 'extra', 'a=b': 'weights'}, {'': 'weights'})
    """
    rules = {}
    for text in texts:
        key, equals, field = text.rpartition("=")
        if field not in FIELDS_TAKEN or (not equals and field == "extra"):
            detail = (
                f"{text!r} is neither KEY=FIELD nor FIELD, with one of {', '.join(FIELDS_TAKEN)}"
            )
            raise err(Code.ARGUMENT, detail, where="--field", remedy="Such as --field ema=extra.")
        rules[key] = field
    if "" in rules and len(rules) > 1:
        raise err(
            Code.ARGUMENT,
            "--field gives a field for the whole source, and others for entries",
            where="--field",
        )
    return rules


# --- from a foreign file --------------------------------------------------------------------------


def sort_fields(root: Any, rules: Mapping[str, str], content: Content, *, where: str) -> None:
    """Add each entry of a nested mapping to `content`, with its field and names.

    A mapping of tensors alone is weights. In any other mapping, the keys of the entries decide.

    Args:
        root: the mapping; tensors are `Array`, plain values have the types of trees.
        rules: field by key, which takes precedence over the usual fields; the field of ``""`` is
            for the whole source.
        where: the source's path, for messages.

    Raises: StateError(ARGUMENT, STATE_NAME); FormatError(DOC_DEPTH).
    """
    if isinstance(root, Refused):
        raise root.error
    namer = _Namer(content)
    if "" in rules:
        namer.add_field(rules[""], {"": root})
        return
    if type(root) not in (dict, OrderedDict) or not all(isinstance(key, str) for key in root):
        raise err(
            Code.ARGUMENT,
            f"the file holds {type(root).__name__}, not a mapping with names as keys",
            where=where,
            remedy=(
                "Save a dict, such as {'model': model.state_dict(), 'optimizer':"
                " optimizer.state_dict()}."
            ),
        )
    for key in rules.keys() - root.keys():
        raise err(
            Code.ARGUMENT,
            f"the file has no entry {key!r}, but {', '.join(map(repr, root))}"[:500],
            where=where,
        )
    if not rules and _is_flat(root):
        namer.add_weights(root, "")
        return
    by_field: dict[str, dict[str, Any]] = {}
    for key, value in root.items():
        if key == "step" == content.step_key and root.keys() <= _OWN_KEYS:
            # A conversion from a checkpoint wrote this entry, and the step isn't part of a field.
            continue
        field = rules.get(key) or _usual(key, value)
        if field == "extra" and key == "extra" and key not in rules:
            by_field.setdefault("extra", {}).update(value)
        else:
            by_field.setdefault(field, {})[key] = value
    for field, entries in by_field.items():
        namer.add_field(field, entries)


def _usual(key: str, value: object) -> str:
    field = _USUAL.get(key, "extra")
    if key == "extra" and not (
        isinstance(value, dict) and all(isinstance(name, str) for name in value)
    ):
        return "optimizer"
    return field


def _is_flat(value: Any) -> bool:
    """Return whether a value is like a module's state_dict: tensors by name, and extra state."""
    return (
        type(value) in (dict, OrderedDict)
        and all(
            isinstance(key, str) and (_is_tensor(item) or key.rpartition(".")[2] == "_extra_state")
            for key, item in value.items()
        )
        and any(map(_is_tensor, value.values()))
    )


def _is_tensor(item: object) -> bool:
    return isinstance(item, Array) or (isinstance(item, Refused) and item.is_tensor)


def find_step(root: Any) -> tuple[int, str] | None:
    """Return the number of training steps recorded in a foreign file, and the number's key.

    >>> find_step({"model": {}, "global_step": 1200}), find_step({"step": -1}), find_step([])
    ((1200, 'global_step'), None, None)
    """
    if not isinstance(root, dict):
        return None
    for key in STEP_KEYS:
        value = root.get(key)
        if type(value) is int and 0 <= value <= limits.JSON_INTEGER:
            return value, key
    return None


class _Namer:
    """Gives names to tensors and values, and adds them to a `Content`."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self._named: dict[tuple[str, int], Tensor] = {}

    def add_field(self, field: str, entries: dict[str, Any]) -> None:
        """Add the entries of one field."""
        alone = len(entries) == 1
        for key, value in entries.items():
            prefix = "" if alone else key_text(key)
            if field == "weights" and _is_flat(value):
                self.add_weights(value, f"{prefix}/" if prefix else "")
            elif field == "extra":
                self.add_leaf("optimizer", f"extra/{key_text(key)}", value)
            elif field == "optimizer" and alone and _is_native_optimizer(value):
                self._add_native_optimizer(value)
            else:
                self.add_leaf(field, prefix, value)

    def add_weights(self, entries: Mapping[str, Any], prefix: str) -> None:
        """Add a module's state_dict: tensors under exactly these names, tied tensors once."""
        for key, value in entries.items():
            if not isinstance(value, Array):
                self.add_leaf("weights", f"{prefix}{key}", value)
            elif ("weights", id(value)) in self._named:
                tensor = self._named["weights", id(value)]
                tensor.aliases = (*tensor.aliases, f"{prefix}{key}")
            else:
                self._add_tensor("weights", f"{prefix}{key}", value)

    def add_leaf(
        self, field: str, name: str, value: object, *, tensors_under: str | None = None
    ) -> None:
        """Add a tree; tensors in the tree are named by their paths of keys."""

        def refer(item: object, path: str) -> object:
            if isinstance(item, Refused):
                self.content.refused.setdefault(field, item)
            if not isinstance(item, Array):
                return item
            held = self._named.get((field, id(item)))
            return TensorRef((held or self._add_tensor(field, path, item)).name, "torch")

        tree = map_tree(value, refer, name if tensors_under is None else tensors_under)
        if (field, name, GLOBAL) in self.content.leaves:
            raise err(Code.STATE_NAME, f"{field} has the value {name!r} twice", where=name)
        self.content.leaves[field, name, GLOBAL] = tree

    def _add_native_optimizer(self, entries: Mapping[str, Any]) -> None:
        for name, value in entries.items():
            under = name.removeprefix("state/") if name.startswith("state/") else name
            if isinstance(value, Array):
                self._add_tensor("optimizer", name, value)
            else:
                self.add_leaf("optimizer", name, value, tensors_under=under)

    def _add_tensor(self, field: str, name: str, array: Array) -> Tensor:
        tensor = Tensor(
            field=field, name=name, dtype=array.dtype, global_shape=array.shape, read=array.read
        )
        self.content.add(tensor)
        self._named[field, id(array)] = tensor
        return tensor


def _is_native_optimizer(value: Any) -> bool:
    """Return whether `assemble` made this value of an optimizer saved by parameter names."""
    return (
        type(value) is dict
        and bool(value)
        and all(str(key).startswith(("state/", "group/")) for key in value)
    )


# --- to a foreign file ----------------------------------------------------------------------------


def assemble(
    content: Content, only: str | None, fit: Callable[[Any], Any], *, numbered: bool
) -> tuple[dict[str, Any], list[LeftOut]]:
    """Return a checkpoint's fields as one nested mapping, and the parts left out.

    Tensors in the mapping are `Tensor`.

    Args:
        only: the only field to return; None for all fields.
        fit: a function to return the target's form of a value, neither tensor nor dict,
            list or tuple, or raises `Unfit`.
        numbered: whether optimizers become the argument of load_state_dict, where the order of
            parameters is known.

    Raises: StateError(ARGUMENT) for a field missing in the checkpoint, or no mapping.
    """
    builder = _Builder(content, fit, numbered=numbered)
    root: dict[str, Any] = {}
    for field in ("weights", "optimizer", "data", "config"):
        if only is None or field == only:
            root.update(builder.field(field))
    left_out = builder.left_out + [
        LeftOut(text_of(key), f"the target has no place for {key[0]}")
        for key in content.leaves
        if key[0] in _SPOKEN_OF
    ]
    if only is None:
        return root, left_out
    if only not in root:
        raise nothing_in(only)
    tree = root[only]
    if only == "optimizer" and "extra" in root:
        tree = {**tree, "extra": root["extra"]} if isinstance(tree, dict) else tree
    return tree if isinstance(tree, dict) else {only: tree}, builder.left_out


def nothing_in(field: str) -> CkptError:
    """Return the error for a requested field missing in the source."""
    remedy = (
        "Give another field; or, of a torch.save file, say which entries belong there:"
        f" --field KEY={field}."
    )
    return err(
        Code.ARGUMENT, f"there is nothing in the field {field!r}", where="--only", remedy=remedy
    )


def _why_not(tensor: Tensor, content: Content) -> str:
    """Return why a tensor doesn't go into a state_dict; an empty text if it does.

    Of a tensor with one value per worker, such as BatchNorm's statistics, worker 0's is taken.
    """
    if tensor.storage != "persistent":
        return "a non-persistent buffer is no part of a state_dict"
    of_all = tensor.field, tensor.name, GLOBAL
    is_taken = tensor.key == of_all or (tensor.scope == "lw/0" and of_all not in content.tensors)
    return "" if is_taken else _SCOPED


class _Builder:
    """Builds the trees of fields, and collects the parts without a place."""

    def __init__(self, content: Content, fit: Callable[[Any], Any], *, numbered: bool) -> None:
        self._numbered = numbered
        self._content = content
        self._fit = fit
        self._by_name: dict[TensorKey, Tensor] = {}
        for tensor in content.tensors.values():
            for name in (tensor.name, *tensor.aliases):
                self._by_name[tensor.field, name, tensor.scope] = tensor
        self._referred = {
            (field, value.name, scope)
            for (field, _, scope), tree in content.leaves.items()
            for value in iter_references(tree)
        }
        self.left_out: list[LeftOut] = []

    def field(self, field: str) -> dict[str, Any]:
        """Return the entries of the nested mapping for one field."""
        values: dict[str, Any] = {}
        for key, tree in self._content.leaves.items():
            if key[0] == field:
                self._add_leaf(key, tree, values)
        whole = "" in values
        for tensor in self._content.tensors.values():
            if tensor.field == field and not self._is_referred(tensor):
                self._add_tensor(tensor, values)
                whole = False
        extra = self._extra(values) if field == "optimizer" else {}
        made: dict[str, Any] = {}
        if field == "optimizer" and self._numbered:
            values = self._with_state_dicts(values, field)
            extra = {
                key: self._with_state_dicts(value, f"extra:{key}") if type(value) is dict else value
                for key, value in extra.items()
            }
        if values:
            made[field] = values[""] if whole and len(values) == 1 else values
        return {**made, "extra": extra} if extra else made

    def _with_state_dicts(self, values: dict[str, Any], where: str) -> Any:
        """Return values in which a state_dict replaces the leaves of each optimizer."""
        found, errors = take_optimizers(values, where=where)
        self.left_out += [
            LeftOut(error.where or where, f"{error.detail}; it stays by names") for error in errors
        ]
        trees = nest(found) if found else {}
        return {**trees, **values} if isinstance(trees, dict) else trees

    def _extra(self, values: dict[str, Any]) -> dict[str, Any]:
        """Remove and return the values under ``extra/`` of the field optimizer."""
        extra: dict[str, Any] = {}
        for name in [name for name in values if name.startswith("extra/")]:
            key, _, rest = name.removeprefix("extra/").partition("/")
            key = key.replace("~1", "/").replace("~0", "~")
            value = values.pop(name)
            if rest:
                extra.setdefault(key, {})[rest] = value
            else:
                extra[key] = value
        return extra

    def _add_leaf(self, key: TensorKey, tree: object, values: dict[str, Any]) -> None:
        field, name, scope = key
        if scope != GLOBAL:
            self.left_out.append(LeftOut(text_of(key), _SCOPED))
            return

        def value_of(item: object, _path: str) -> object:
            return (
                self._by_name[field, item.name, scope]
                if isinstance(item, TensorRef)
                else self._fit(item)
            )

        def drop(path: str, reason: str) -> None:
            self.left_out.append(LeftOut(f"{field}:{path}", reason))

        try:
            values[name] = map_tree(tree, value_of, name, drop=drop, whole=_HASHED)
        except Unfit as unfit:
            drop(name, str(unfit))

    def _is_referred(self, tensor: Tensor) -> bool:
        return any(
            (tensor.field, name, tensor.scope) in self._referred
            for name in (tensor.name, *tensor.aliases)
        )

    def _add_tensor(self, tensor: Tensor, values: dict[str, Any]) -> None:
        reason = _why_not(tensor, self._content)
        if reason:
            self.left_out.append(LeftOut(text_of(tensor.key), reason))
            return
        values |= dict.fromkeys((tensor.name, *tensor.aliases), tensor)

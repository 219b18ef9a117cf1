"""The names in a checkpoint of the entries of a DCP state_dict, and the entries of a checkpoint.

A checkpoint has one form of an optimizer, whichever program saved the checkpoint: leaves for groups
and for the state of parameters, by the parameters' names (page 60 of the specification). DCP has
three forms of an optimizer's state_dict: nested and flattened with the names of parameters
(`get_optimizer_state_dict`), and with numbers (`torch.optim.Optimizer.state_dict`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Self, TypeAlias

#: The keys that lead to an entry of a state_dict. A position in a list is an int.
Path: TypeAlias = tuple[str | int, ...]

#: Keys of a state_dict by which models and optimizers are known.
MODELS: Final = ("model", "module", "weights", "state_dict", "model_state_dict")
OPTIMIZERS: Final = ("optim", "optimizer", "optimizer_state_dict")
#: Keys of an optimizer's state_dict.
_STATE: Final = "state"
_GROUPS: Final = "param_groups"


def join(keys: Iterable[object]) -> str:
    """Return the name of the value under these keys, escaped as in a JSON pointer.

    >>> join(["a/b", "c~", 0])
    'a~1b/c~0/0'
    """
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def split(name: str) -> Path:
    """Return the keys of a name.

    >>> split("a~1b/c~0/0")
    ('a/b', 'c~', '0')
    """
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in name.split("/"))


def dotted(path: Path) -> str:
    """Return DCP's name of an entry."""
    return ".".join(map(str, path))


def is_reference(value: object) -> bool:
    """Return whether a value of a leaf refers to a tensor."""
    return type(value).__name__ == "TensorRef"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlace:
    """An optimizer in a state_dict.

    Attributes:
        head: the keys that lead to the optimizer in the state_dict.
        path: the keys that lead to the optimizer in ``State(optimizer=...)``.
        prefix: the prefix of the names of parameters in the checkpoint.
        form: "nested" or "flat", with the names of parameters; or "numbered".
    """

    head: Path
    path: Path = ()
    prefix: str = ""
    form: str = "nested"

    def split(self, path: Path) -> tuple[str, str, Path] | None:
        """Return "state", a parameter and keys; or "param_groups", a group and keys; else None.

        In the flattened form a group is the name of its only parameter.
        """
        rest = path[len(self.head) :]
        if path[: len(self.head)] != self.head or not rest:
            return None
        if self.form == "flat" and len(rest) == 1:
            kind, dot, tail = str(rest[0]).partition(".")
            member, _, key = tail.rpartition(".")
            return (kind, member, (key,)) if dot and member and kind in (_STATE, _GROUPS) else None
        if self.form == "flat" or len(rest) < 3 or rest[0] not in (_STATE, _GROUPS):
            return None
        return str(rest[0]), str(rest[1]), rest[2:]

    def name_of(self, path: Path) -> str | None:
        """Return the name of a tensor of this optimizer, or None for another entry."""
        found = self.split(path)
        if found is None:
            return None
        kind, member, keys = found
        if kind == _STATE and self.form != "numbered":
            return self.prefix + join((member, *keys))
        return join((*self.path, kind, member, *keys))

    def assemble(self, pairs: Iterable[tuple[Path, object]]) -> dict[str, Any]:
        """Return the state_dict that has the names of parameters as in the checkpoint.

        Args:
            pairs: paths and values of entries for which `split` finds a place.
        """
        trees: dict[str, dict[str, dict[Any, Any]]] = {_STATE: {}, _GROUPS: {}}
        for path, value in pairs:
            kind, member, keys = self.split(path) or ("", "", ())
            tree = trees[kind].setdefault(member, {})
            for key in keys[:-1]:
                tree = tree.setdefault(key, {})
            tree[keys[-1]] = value
        groups = {name: _with_lists(tree) for name, tree in trees[_GROUPS].items()}
        states = {name: _with_lists(tree) for name, tree in trees[_STATE].items()}
        if self.form == "flat":
            return {_STATE: self._named(states), _GROUPS: self._gather(groups)}
        listed = [groups[name] for name in sorted(groups, key=int)]
        if self.form == "numbered" or _has_numbers(listed):
            return {_STATE: {_number(name): one for name, one in states.items()}, _GROUPS: listed}
        for group in listed:
            group["params"] = [self.prefix + join((name,)) for name in group.get("params", ())]
        return {_STATE: self._named(states), _GROUPS: listed}

    def _named(self, states: Mapping[str, Any]) -> dict[str, Any]:
        return {self.prefix + join((name,)): state for name, state in states.items()}

    def _gather(self, groups: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Return groups of consecutive parameters with equal options."""
        found: list[dict[str, Any]] = []
        for member, options in groups.items():
            last = (
                {key: value for key, value in found[-1].items() if key != "params"} if found else {}
            )
            if not found or not _are_equal(last, options):
                found.append({**options, "params": []})
            found[-1]["params"].append(self.prefix + join((member,)))
        return found


def _has_numbers(groups: Iterable[Mapping[str, Any]]) -> bool:
    return any(type(one) is int for group in groups for one in group.get("params", ()))


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _are_equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return whether options are equal, types included. Tensors equal nothing."""
    if left.keys() != right.keys():
        return False
    pairs = [(left[key], right[key]) for key in left]
    return all(type(one) is type(other) and one == other for one, other in pairs)


def _with_lists(tree: Any) -> Any:
    """Return a tree with lists in the place of dicts from positions."""
    if not isinstance(tree, dict):
        return tree
    made = {key: _with_lists(value) for key, value in tree.items()}
    if made and all(type(key) is int for key in made):
        return [made[key] for key in sorted(made)]
    return made


@dataclasses.dataclass(frozen=True, slots=True)
class StateDictLayout:
    """The models and optimizers in a state_dict.

    Attributes:
        models: the keys that lead to each model, and the prefix of its names in the checkpoint.
        optimizers: the optimizers.
    """

    models: Mapping[Path, str]
    optimizers: tuple[OptimizerPlace, ...]

    @classmethod
    def find(cls, paths: Iterable[Path]) -> Self:
        """Return the layout of a state_dict with these entries.

        An optimizer is known by its groups. A model is known by its key, or by entries with the
        names of an optimizer's parameters. The shortest such key counts: an average of the weights
        at a longer key is no second model.
        """
        paths = list(dict.fromkeys(paths))
        forms = dict(filter(None, map(_find_optimizer, paths)))
        others = [path for path in paths if not _is_within(path, forms)]
        members = {
            head: _members(OptimizerPlace(head=head, form=form), paths)
            for head, form in forms.items()
        }
        models = _find_models(others)
        owners = {head: _owner_of(head, found, others, models) for head, found in members.items()}
        models = list(
            dict.fromkeys([*models, *(one for one in owners.values() if one is not None)])
        )
        if not models and not forms and all(len(path) == 1 for path in paths):
            models = [()]  # the state_dict of a module
        heads = _short_keys(models)
        prefixes = {head: f"{join(keys)}/" if keys else "" for head, keys in heads.items()}
        optimizers = []
        for head, keys in _short_keys(list(forms)).items():
            owner = owners[head]
            form = forms[head]
            prefix = "" if owner is None else prefixes[owner]
            if owner is None and members[head] and all(one.isdecimal() for one in members[head]):
                form = "numbered"
            optimizers.append(OptimizerPlace(head=head, path=keys, prefix=prefix, form=form))
        return cls(prefixes, _without_collisions(optimizers, members))

    @classmethod
    def parse(cls, told: Mapping[str, Any]) -> Self:
        """Return the layout from the result of `dump`."""
        optimizers = [
            OptimizerPlace(**{**one, "head": tuple(one["head"]), "path": tuple(one["path"])})
            for one in told["optimizers"]
        ]
        return cls({tuple(head): prefix for head, prefix in told["models"]}, tuple(optimizers))

    def dump(self) -> dict[str, Any]:
        """Return the layout as a JSON value."""
        return {
            "models": [[[*head], prefix] for head, prefix in self.models.items()],
            "optimizers": [
                {**dataclasses.asdict(one), "head": [*one.head], "path": [*one.path]}
                for one in self.optimizers
            ],
        }

    def optimizer_of(self, path: Path) -> OptimizerPlace | None:
        """Return the optimizer with an entry in its state or groups."""
        return next((one for one in self.optimizers if one.split(path) is not None), None)

    def place_of(self, path: Path) -> tuple[str, str]:
        """Return the field and name of a tensor."""
        for optimizer in self.optimizers:
            name = optimizer.name_of(path)
            if name is not None:
                return "optimizer", name
        for head, prefix in self.models.items():
            rest = path[len(head) :]
            if path[: len(head)] == head and rest and (head or len(rest) == 1):
                return "weights", prefix + join(rest)
        return "optimizer", join(("extra", *path))

    def path_of(self, field: str, name: str) -> Path | None:
        """Return the path of a tensor of a model, or None for another tensor."""
        if field != "weights":
            return None
        longest = sorted(self.models.items(), key=lambda one: -len(one[1]))
        found = next(
            ((head, name[len(one) :]) for head, one in longest if name.startswith(one)), None
        )
        return None if found is None else (*found[0], *split(found[1]))


def _find_optimizer(path: Path) -> tuple[Path, str] | None:
    """Return head and form of the optimizer, for an entry of an optimizer's groups."""
    for at, key in enumerate(path):
        if key == _GROUPS and path[at + 2 : at + 3] == ("params",) and type(path[at + 1]) is int:
            return path[:at], "nested"
    if str(path[-1]).startswith(f"{_GROUPS}."):
        return path[:-1], "flat"
    return None


def _is_within(path: Path, heads: Mapping[Path, str]) -> bool:
    return any(
        OptimizerPlace(head=head, form=form).split(path) is not None for head, form in heads.items()
    )


def _members(optimizer: OptimizerPlace, paths: Iterable[Path]) -> set[str]:
    """Return the parameters of an optimizer that are told by paths."""
    found = filter(None, map(optimizer.split, paths))
    flat = optimizer.form == "flat"
    return {member for kind, member, _ in found if kind == _STATE or flat}


def _find_models(paths: Sequence[Path]) -> list[Path]:
    """Return the shortest heads with a model's key, if there are any."""
    heads: dict[Path, None] = {}
    for path in paths:
        for at, key in enumerate(path[:-1]):
            is_wrapper = len(path) > at + 2 and path[at + 1] in (*MODELS, *OPTIMIZERS)
            if key in MODELS and not is_wrapper:
                heads[path[: at + 1]] = None
                break
    least = min(map(len, heads), default=0)
    return [head for head in heads if len(head) == least]


def _owner_of(
    head: Path, members: set[str], paths: Sequence[Path], models: Sequence[Path]
) -> Path | None:
    """Return the head of the model with an optimizer's parameters."""
    if not members:
        near = [model for model in models if model[:-1] == head[:-1]]
        return near[0] if len(near) == 1 else None
    held: dict[Path, set[object]] = {}
    for path in paths:
        held.setdefault(path[:-1], set()).add(path[-1])
    fitting = [one for one, keys in held.items() if one and members <= keys]
    for found in (
        [one for one in fitting if one in models and one[:-1] == head[:-1]],
        [one for one in fitting if one in models],
        [one for one in fitting if one[:-1] == head[:-1]],
        fitting,
    ):
        if len(found) == 1:
            return found[0]
    return None


def _short_keys(heads: Sequence[Path]) -> dict[Path, Path]:
    """Return the keys that tell several heads apart; for a single head, no keys.

    >>> _short_keys([("gen", "model"), ("dis", "model")])
    {('gen', 'model'): ('gen',), ('dis', 'model'): ('dis',)}
    >>> _short_keys([("app", "model")])
    {('app', 'model'): ()}
    """
    if len(heads) == 1:
        return {heads[0]: ()}
    short = [head[:-1] if head and head[-1] in (*MODELS, *OPTIMIZERS) else head for head in heads]
    are_apart = len(set(short)) == len(short) and all(short)
    return dict(zip(heads, short if are_apart else heads, strict=True))


def _without_collisions(
    optimizers: Sequence[OptimizerPlace], members: Mapping[Path, set[str]]
) -> tuple[OptimizerPlace, ...]:
    """Return the optimizers without a parameter of an earlier optimizer, or of ``extra``."""
    taken: set[str] = set()
    kept = []
    for one in optimizers:
        names = (
            {one.prefix + name for name in members[one.head]} if one.form != "numbered" else set()
        )
        if not names & taken and "extra" not in names:
            taken |= names
            kept.append(one)
    return tuple(kept)


def default_layout(groups: Sequence[Mapping[str, Any]]) -> StateDictLayout:
    """Return the layout under which DCP finds a checkpoint that DCP didn't write.

    The only model is found under "model", the optimizer under "optim". Where ``State`` has several
    models and optimizers by key, they are found under ``<key>.model`` and ``<key>.optim``.

    Args:
        groups: the leaves of all groups of the checkpoint's optimizers.
    """
    paths = list(dict.fromkeys(tuple(group["path"]) for group in groups))
    prefixes = {path: f"{join(path)}/" for path in paths}
    have_keys = len(paths) > 1 and all(
        name.startswith(prefixes[tuple(group["path"])])
        for group in groups
        for name in group["params"]
    )
    if not have_keys:
        return StateDictLayout({("model",): ""}, (OptimizerPlace(head=("optim",)),))
    optimizers = tuple(
        OptimizerPlace(head=(*path, "optim"), path=path, prefix=prefixes[path]) for path in paths
    )
    models = {(*path, "model"): prefixes[path] for path in paths}
    return StateDictLayout({**models, ("model",): ""}, optimizers)


def list_entries(
    optimizer: OptimizerPlace,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[str, Any],
    whole: Any,
) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of each entry of an optimizer's state_dict; tensors as references.

    Args:
        optimizer: the optimizer, with the form of the state_dict.
        groups: the leaves of the optimizer's groups, in their order.
        states: the leaves of the states of all parameters of the checkpoint, by their names.
        whole: the state_dict that numbers parameters, or None.
    """
    head = optimizer.head
    if whole is not None:
        yield from ((head + path, value) for path, value in _flatten(whole))
        return
    cut = len(optimizer.prefix)
    for number, group in enumerate(groups):
        members = [dotted(split(name[cut:])) for name in group["params"]]
        if optimizer.form == "flat":
            for member in members:
                for path, value in _flatten(group["options"]):
                    yield (*head, f"{_GROUPS}.{member}.{dotted(path)}"), value
        else:
            yield (*head, _GROUPS, number, "params"), members
            for path, value in _flatten(group["options"]):
                yield (*head, _GROUPS, number, *path), value
        for name, member in zip(group["params"], members, strict=True):
            for path, value in _flatten(states.get(name, {})):
                is_flat = optimizer.form == "flat"
                place = (
                    (f"{_STATE}.{member}.{dotted(path)}",) if is_flat else (_STATE, member, *path)
                )
                yield (*head, *place), value


def _flatten(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of each entry, as DCP flattens a state_dict."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten(value, (*path, str(key)))
    elif isinstance(tree, list) and not _is_plain(tree):
        for number, value in enumerate(tree):
            yield from _flatten(value, (*path, number))
    else:
        yield path, tree


def _is_plain(values: Sequence[Any]) -> bool:
    return not any(
        isinstance(value, Mapping)
        or (isinstance(value, list) and not _is_plain(value))
        or is_reference(value)
        for value in values
    )

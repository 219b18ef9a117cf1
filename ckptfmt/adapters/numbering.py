"""State_dicts of torch optimizers as leaves of a checkpoint, and back.

A checkpoint stores an optimizer by the names of parameters. The state_dict of an optimizer numbers
parameters in the order of the live groups. The leaf of a group holds the position of the group in
its optimizer, and the order of its parameters. Spec: page 60, names in the reference writer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ckptfmt.digest import digest_bytes
from ckptfmt.errors import CkptError, Code, err

_GROUP: Final = re.compile(r"(?:^|(?<=/))group/")
_REMEDY: Final = (
    "Load the checkpoint into a State with the live model and optimizer, and save"
    " the optimizer.state_dict() of these."
)


def group_name(number: int, members: Sequence[str]) -> str:
    """Return the name of a group's leaf, without the prefix of the optimizer.

    The name depends on the group's number and its ordered parameters only. The first parameter's
    name alone isn't unique: ranks that share some parameters and have their own experts have
    different groups with the same first parameter.

    >>> group_name(0, ["a.weight", "a.bias"]), group_name(1, [])
    ('group/a.weight/eb76e424978e1b13', 'group/#1')
    """
    if not members:
        return f"group/#{number}"
    return (
        f"group/{members[0]}/{digest_bytes(json.dumps([number, [*members]]).encode()).hex()[:16]}"
    )


def list_leaves(optimizers: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the trees of optimizers' state_dicts, by the names of their leaves.

    An optimizer with the names of parameters in its groups has a leaf for each group, and for each
    parameter with state. Optimizers with numbers of parameters in their groups are a single leaf.

    Args:
        optimizers: state_dicts by the path of keys of each optimizer in the field.

    Raises: StateError(STATE_NAME) for two groups or two states with one name.

    >>> leaves = list_leaves({(): {"state": {"w": {"step": 3}}, "param_groups": [{"params": []}]}})
    >>> leaves["state/w"], leaves["group/#0"]
    ({'step': 3}, {'params': [], 'number': 0, 'path': [], 'options': {}})
    """
    leaves: dict[str, Any] = {}
    numbered: dict[tuple[Any, ...], Any] = {}

    def add(name: str, tree: object) -> None:
        if name in leaves:
            detail = "two optimizers have a value of this name"
            raise err(Code.STATE_NAME, detail, where=f"optimizer:{name}")
        leaves[name] = tree

    for path, state_dict in optimizers.items():
        groups = state_dict["param_groups"]
        if any(type(name) is int for group in groups for name in group["params"]):
            numbered[path] = state_dict
            continue
        for number, group in enumerate(groups):
            members = [*group["params"]]
            options = {key: value for key, value in group.items() if key != "params"}
            tree = {"params": members, "number": number, "path": [*path], "options": options}
            add(group_name(number, members), tree)
        for name, state in state_dict["state"].items():
            if state:
                add(f"state/{name}", state)
    return leaves | ({"": nest(numbered)} if numbered else {})


def take_optimizers(
    values: dict[str, Any], *, where: str
) -> tuple[dict[tuple[Any, ...], Any], list[CkptError]]:
    """Remove torch optimizers' leaves from a field's values, and return their state_dicts.

    Args:
        values: trees by the names of leaves; the leaves of a returned state_dict are removed.
        where: the field's name, for messages.

    Returns: state_dicts by the path of keys of each optimizer in the field; and an error
        GROUP_MISMATCH for each optimizer whose parameters have no known order, and whose leaves
        stay.
    """
    groups: dict[tuple[str, tuple[Any, ...]], dict[str, Any]] = {}
    for name, tree in values.items():
        prefix = _prefix_of(name, tree)
        if prefix is not None:
            groups.setdefault((prefix, tuple(tree.get("path", ()))), {})[name] = tree
    found: dict[tuple[Any, ...], Any] = {}
    errors = []
    for (prefix, path), members in groups.items():
        place = (*(prefix.rstrip("/").split("/") if prefix else ()), *path)
        try:
            found[place] = _state_dict(
                values, prefix, list(members.values()), where="/".join(map(str, (where, *place)))
            )
        except CkptError as error:
            errors.append(error)
            continue
        names = {f"{prefix}state/{name}" for tree in members.values() for name in tree["params"]}
        for name in (*members, *(names & values.keys())):
            del values[name]
    return found, errors


def nest(found: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return a tree with each value under its keys.

    The containers are dicts, or lists where the keys are all positions.

    >>> nest({("d",): 1, ("g", 0): 2, ("g", 1): 3}), nest({(): 1})
    ({'d': 1, 'g': [2, 3]}, 1)
    """
    if () in found:
        return found[()]
    below: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (key, *path), value in found.items():
        below.setdefault(key, {})[tuple(path)] = value
    made = {key: nest(values) for key, values in below.items()}
    return (
        [made[number] for number in range(len(made))]
        if made.keys() == set(range(len(made)))
        else made
    )


def _prefix_of(name: str, tree: object) -> str | None:
    """Return the name prefix of an optimizer's leaves, if this leaf is a group; else None."""
    if not (
        isinstance(tree, dict)
        and isinstance(tree.get("params"), list)
        and isinstance(tree.get("options"), dict)
    ):
        return None
    for found in _GROUP.finditer(name):
        member = name[found.end() :].rpartition("/")[0]
        if member in tree["params"] or (not tree["params"] and name.startswith("#", found.end())):
            return name[: found.start()]
    return None


def _state_dict(
    values: Mapping[str, Any], prefix: str, groups: list[dict[str, Any]], *, where: str
) -> dict[str, Any]:
    """Return the argument of `torch.optim.Optimizer.load_state_dict`.

    Raises: StateError(GROUP_MISMATCH).
    """
    if any(type(group.get("number")) is not int for group in groups):
        raise _unknown("a ckptfmt saved it that sorted their names", where)
    groups.sort(key=lambda group: group["number"])
    members = [name for group in groups for name in group["params"]]
    if [group["number"] for group in groups] != list(range(len(groups))) or len({*members}) < len(
        members
    ):
        raise _unknown(
            "processes had optimizers of different parameters, which were never in one list", where
        )
    number_of = {name: number for number, name in enumerate(members)}
    return {
        "state": {
            number: values[f"{prefix}state/{name}"]
            for name, number in number_of.items()
            if f"{prefix}state/{name}" in values
        },
        "param_groups": [
            {**group["options"], "params": [number_of[name] for name in group["params"]]}
            for group in groups
        ],
    }


def _unknown(why: str, where: str) -> CkptError:
    detail = f"the order of the optimizer's parameters isn't in the checkpoint: {why}"
    return err(Code.GROUP_MISMATCH, detail, where=where, remedy=_REMEDY)

"""References to tensors of a frozen base: plain values of weights, instead of stored tensors.

Spec: REQ-FRZ-001 to REQ-FRZ-004.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import Any, Final, Protocol

from ckptfmt import limits
from ckptfmt.digest import DIGEST_NBYTES
from ckptfmt.documents.tree import dump_tree
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code, err

#: The name of the leaf with the base's location. No path of keys has this name: a path escapes the
#: tilde.
BASE_LEAF: Final = "~frozen"
#: Prefix of the leaves of references, before the tensor's name.
_PREFIX: Final = f"{BASE_LEAF}/"
_FIELD: Final = "weights"
_SCOPE: Final = "global"
_BASE_KEYS: Final = {"kind", "location"}
_KEYS: Final = {"aliases", "digest", "dtype", "name_in_base", "shape"}
#: The value of `kind`.
KIND: Final = "ckptfmt.frozen_base"


class _Named(Protocol):
    """A leaf, or the entry of a leaf in an index."""

    @property
    def field(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def scope(self) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenTensor:
    """A tensor of the field weights that isn't stored, because a frozen base has the same content.

    Attributes:
        name: the tensor's name in the checkpoint.
        aliases: further names of the tensor, sorted by their UTF-8 bytes.
        dtype, global_shape: as in the index.
        name_in_base: the tensor's name in the base.
        digest: BLAKE3-256 of the content: C order, little-endian.
    """

    name: str
    aliases: tuple[str, ...]
    dtype: str
    global_shape: tuple[int, ...]
    name_in_base: str
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.global_shape) * DTYPES[self.dtype].nbytes

    @property
    def leaf_name(self) -> str:
        """The name of the leaf with the reference."""
        return _PREFIX + self.name

    def dump(self) -> bytes:
        """Return the bytes of the leaf's tree."""
        tree = {
            "aliases": list(self.aliases),
            "digest": self.digest,
            "dtype": self.dtype,
            "name_in_base": self.name_in_base,
            "shape": list(self.global_shape),
        }
        return dump_tree(tree, where=self.leaf_name)


def dump_location(location: str) -> bytes:
    """Return the bytes of the tree of the leaf `BASE_LEAF`."""
    return dump_tree({"kind": KIND, "location": location}, where=BASE_LEAF)


def is_frozen_leaf(leaf: _Named) -> bool:
    """Return whether a leaf belongs to the references to a frozen base. Spec: REQ-FRZ-001."""
    return leaf.field == _FIELD and (leaf.name == BASE_LEAF or leaf.name.startswith(_PREFIX))


def has_frozen_leaves(leaves: Iterable[_Named]) -> bool:
    """Return whether a part or an index needs the feature `frozen`. Spec: REQ-FRZ-001."""
    return any(map(is_frozen_leaf, leaves))


def check_frozen_scopes(leaves: Iterable[_Named], where: str) -> None:
    """Raise unless all leaves of references are in the scope global, with a base's location.

    Raises: FormatError(FROZEN_FORM). Spec: REQ-FRZ-002.
    """
    names = set()
    for leaf in filter(is_frozen_leaf, leaves):
        names.add(leaf.name)
        if leaf.scope != _SCOPE:
            raise _broken(f"{leaf.name[:64]!r} is in the scope {leaf.scope}", where)
    if names and BASE_LEAF not in names:
        raise _broken("there are references, and no location of a base", where)


def check_frozen_names(
    found: Iterable[FrozenTensor], stored: Collection[tuple[str, str, str]]
) -> None:
    """Raise unless each name and alias of a reference belongs to this reference only.

    Args:
        found: the references.
        stored: field, name and scope of the stored tensors, aliases included.

    Raises: LayoutError(TENSOR_DIVERGED). Spec: REQ-FRZ-004.
    """
    owners: dict[str, str] = {}
    for one in found:
        for name in (one.name, *one.aliases):
            owner = owners.setdefault(name, one.name)
            if owner != one.name or (_FIELD, name, _SCOPE) in stored:
                detail = (
                    f"{name!r} is taken from a frozen base, and stored as well"
                    if owner == one.name
                    else f"{name!r} belongs to two references to a frozen base"
                )
                raise err(
                    Code.TENSOR_DIVERGED,
                    detail,
                    where=f"{_FIELD}:{name}",
                    requirement="REQ-FRZ-004",
                )


def parse_location(tree: Any, *, where: str) -> str:
    """Return the location of the base. Raises: FormatError(FROZEN_FORM). Spec: REQ-FRZ-002."""
    if type(tree) is not dict or set(tree) != _BASE_KEYS or tree["kind"] != KIND:
        raise _broken(f"isn't a map of kind {KIND} and location", where)
    location = tree["location"]
    if not isinstance(location, str) or not 0 < len(location.encode()) <= limits.NAME_NBYTES:
        raise _broken("the location isn't a string of an allowed length", where)
    return location


def parse_frozen(leaf_name: str, tree: Any, *, where: str) -> FrozenTensor:
    """Return the reference of a leaf. Raises: FormatError(FROZEN_FORM). Spec: REQ-FRZ-003."""
    if type(tree) is not dict or set(tree) != _KEYS:
        raise _broken(f"hasn't exactly the members {', '.join(sorted(_KEYS))}", where)
    aliases = tree["aliases"]
    dtype = tree["dtype"]
    shape = tree["shape"]
    if not _are_names(aliases) or sorted(set(aliases), key=str.encode) != aliases:
        raise _broken("the aliases aren't different names, sorted by their bytes", where)
    if not _are_names([tree["name_in_base"]]):
        raise _broken("the name in the base isn't a name", where)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _broken(f"the dtype is {str(dtype)[:32]!r}", where)
    if (
        type(shape) is not list
        or len(shape) > limits.NDIM
        or not all(type(extent) is int and 0 <= extent <= limits.DIM for extent in shape)
        or math.prod(extent for extent in shape if extent) > limits.ELEMENTS
    ):
        raise _broken("the shape is out of range", where)
    if type(tree["digest"]) is not bytes or len(tree["digest"]) != DIGEST_NBYTES:
        raise _broken(f"the digest isn't {DIGEST_NBYTES} bytes", where)
    return FrozenTensor(
        name=leaf_name.removeprefix(_PREFIX),
        aliases=tuple(aliases),
        dtype=dtype,
        global_shape=tuple(shape),
        name_in_base=tree["name_in_base"],
        digest=tree["digest"],
    )


def _are_names(values: Any) -> bool:
    return type(values) is list and all(
        type(value) is str and len(value.encode()) <= limits.NAME_NBYTES for value in values
    )


def _broken(detail: str, where: str) -> CkptError:
    return err(Code.FROZEN_FORM, detail, where=where, requirement="REQ-FRZ-003")

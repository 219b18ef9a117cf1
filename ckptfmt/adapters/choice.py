"""What a caller chooses of a load: which of the saved tensors and values, and what the live ones were called."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptfmt.documents.manifest import FIELDS
from ckptfmt.errors import Code, err

if TYPE_CHECKING:
    from ckptfmt.read.reader import Checkpoint

#: Names to load, as patterns; None for everything.
Patterns: TypeAlias = "str | Iterable[str] | None"

#: What live names were called when saved: a mapping of names or of what names begin with, or a function.
Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str] | None"

#: Where a name may end and go on with what lies beneath it: in a module, or in a container.
_JOINTS: Final = "./"
_STATE: Final = "state/"
_GROUP: Final = re.compile(r"((?:.*?/)??)group/")


class Only:
    """The tensors and values that a load is about, by patterns of their saved names.

    A pattern fits a name as `fnmatch.fnmatchcase` has it, and everything beneath it: ``encoder`` and ``enc*`` fit
    ``encoder.0.weight``, and ``layers.1`` doesn't fit ``layers.10.weight``. Begun with a field, as in ``weights:enc*``,
    it is about that field alone. The state of a parameter in an optimizer goes by the parameter's name.

    Args:
        patterns: one, or several of which one has to fit; None for everything.
        override: patterns of what is left as it is live, of which none may fit. An option of an optimizer's groups is
            called ``group/`` and its key.

    Raises: StateError(ARGUMENT).

    >>> only = Only(["encoder", "rng:*"])
    >>> only.fits("weights", "encoder.0.weight"), only.fits("weights", "encoders.weight"), only.fits("rng", "python")
    (True, False, True)
    """

    def __init__(self, patterns: Patterns, *, override: Patterns = ()) -> None:
        self.override: Only | None = None if override is None or not tuple(override) else Only(override)
        self.patterns: tuple[str, ...] | None = None
        if patterns is None:
            return
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        texts: tuple[object, ...] = self.patterns
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise err(Code.ARGUMENT, f"only={self.patterns!r} has no pattern, or an empty one", where="only=")
        self._expressions = {field: _compile(self.patterns, field) for field in FIELDS}

    def fits(self, field: str, name: str) -> bool:
        """Tell whether this is to be loaded."""
        if self.is_overridden(field, name):
            return False
        return self.patterns is None or self._expressions[field].match(name) is not None

    def is_overridden(self, field: str, name: str) -> bool:
        """Tell whether the live one stands, by the caller's word."""
        return self.override is not None and self.override.fits(field, name)

    def fits_leaf(self, field: str, name: str, value: Callable[[], Any]) -> bool:
        """Tell whether a saved leaf is to be loaded: an optimizer's by its parameters, a group by all of them.

        Args:
            field: of the leaf.
            name: of the leaf.
            value: returns what was saved, if it is needed.
        """
        if self.override is not None and self.override.fits_leaf(field, name, value):
            return False
        if self.patterns is None or self.fits(field, name):
            return True
        group = _GROUP.match(name)
        if group is not None:
            tree = value()
            members = tree.get("params") if isinstance(tree, dict) else None
            return bool(members) and all(self.fits(field, group[1] + member) for member in members or ())
        return _STATE in name and self.fits(field, name.replace(_STATE, "", 1))

    def iter_idle(self, checkpoint: Checkpoint) -> Iterator[str]:
        """Yield the patterns that fit nothing in a checkpoint."""
        for pattern in self.patterns or ():
            alone = Only(pattern)
            if not any(alone.fits(field, name) for field, name in iter_saved(checkpoint)):
                yield pattern

    def iter_idle_overrides(self, checkpoint: Checkpoint) -> Iterator[str]:
        """Yield the patterns of `override` that fit nothing in a checkpoint, and no option of an optimizer's groups."""
        if self.override is None:
            return
        options = [
            (key[0], f"{group[1]}group/{option}")
            for key in checkpoint.leaves
            if (group := _GROUP.match(key[1])) is not None
            for option in checkpoint.leaf(*key).get("options", ())
        ]
        for pattern in self.override.iter_idle(checkpoint):
            if not any(Only(pattern).fits(*option) for option in options):
                yield pattern


def iter_saved(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield field and name of everything in a checkpoint by which a pattern may go."""
    for tensor in checkpoint.tensors.values():
        yield from ((tensor.field, name) for name in (tensor.name, *tensor.aliases))
    for field, name, _ in checkpoint.leaves:
        yield field, name
        yield field, name.replace(_STATE, "", 1)
    yield from (("rng", name) for name, _ in checkpoint.streams)


class Renaming:
    """What live names were called when they were saved.

    A key of a mapping is a name, or what names begin with: as it is where it is empty or ends with a dot or a slash,
    else up to a dot or slash. The longest that fits is replaced by its value. A function gets the whole name.

    Raises: StateError(ARGUMENT).

    >>> renaming = Renaming({"backbone": "encoder", "backbone.norm": "norm"})
    >>> [renaming.saved_name(name) for name in ("backbone.0.weight", "backbone.norm.weight", "backbones", "head")]
    ['encoder.0.weight', 'norm.weight', 'backbones', 'head']
    >>> Renaming({"": "model."}).saved_name("head.weight")
    'model.head.weight'
    """

    def __init__(self, rename: Rename) -> None:
        self._function = rename if callable(rename) else None
        self._keys: dict[str, str] = {}
        self._used: set[str] = set()
        if isinstance(rename, Mapping):
            self._keys = dict(rename)
        elif rename is not None and self._function is None:
            raise err(Code.ARGUMENT, "not a mapping of names, nor a function", where="rename=")
        pairs: Iterable[tuple[object, object]] = self._keys.items()
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise err(Code.ARGUMENT, "a mapping from strings to strings is needed", where="rename=")
        self._longest_first = sorted(self._keys, key=len, reverse=True)

    def saved_name(self, name: str) -> str:
        """Return the saved name of a live one; of a whole field, which has none, the same."""
        if not name:
            return name
        if self._function is not None:
            saved: object = self._function(name)
            if not isinstance(saved, str):
                raise err(Code.ARGUMENT, f"rename({name!r}) returned {saved!r}, not a name", where="rename=")
            return saved
        fitting = [key for key in self._longest_first if _leads_to(key, name)]
        self._used.update(fitting)
        return self._keys[fitting[0]] + name[len(fitting[0]) :] if fitting else name

    def __bool__(self) -> bool:
        return self._function is not None or bool(self._keys)

    def unused(self) -> frozenset[str]:
        """Return the keys of a mapping that no live name has met so far."""
        return frozenset(self._keys.keys() - self._used)


def _leads_to(key: str, name: str) -> bool:
    return name.startswith(key) and (name == key or not key or key[-1] in _JOINTS or name[len(key)] in _JOINTS)


def _compile(patterns: Iterable[str], field: str) -> re.Pattern[str]:
    expressions = []
    for text in patterns:
        head, colon, tail = text.partition(":")
        pattern = tail if colon and head in FIELDS else text
        if pattern is text or head == field:
            expressions += [fnmatch.translate(pattern), fnmatch.translate(f"{pattern}[{_JOINTS}]*")]
    return re.compile("|".join(expressions) or r"(?!)")

"""A load in the making: what the caller chose of it, what to read into what, what to do afterwards, and what is wrong.

Nothing live is changed while a plan is made, so that a load that can't succeed leaves everything as it was.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from ckptfmt.adapters.live_trees import GLOBAL, worker_scope
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.manifest import FIELDS
from ckptfmt.documents.tables import TensorKey
from ckptfmt.documents.tree import TensorRef, iter_values
from ckptfmt.errors import Code, err
from ckptfmt.read.reader import Checkpoint
from ckptfmt.state import IMPORTED, place_of
from ckptfmt.write.snapshot import TensorSink

#: Names to load, as patterns; None for everything.
Patterns: TypeAlias = "str | Iterable[str] | None"

#: What live names were called when saved: a mapping of names or of what names begin with, or a function.
Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str] | None"

#: Differences that a load reports instead of refusing them.
Allowed: TypeAlias = Literal["missing", "unexpected", "dtype", "streams", "loader"]
Allow: TypeAlias = "Allowed | Iterable[Allowed]"

#: Where a name may end and go on with what lies beneath it: in a module, or in a container.
_JOINTS: Final = "./"
_STATE: Final = "state/"
#: The prefix of the names of ``State(extra=...)`` in the field optimizer.
_EXTRA: Final = "extra/"
#: Fields that a load compares and never loads.
_COMPARED: Final = ("config", "topology", "provenance")
_GROUP: Final = re.compile(r"((?:.*?/)??)group/")


class Only:
    """The tensors and values that a load is about, by patterns of their saved names.

    A pattern fits a name as `fnmatch.fnmatchcase` has it, and everything beneath it: ``encoder`` and ``enc*`` fit
    ``encoder.0.weight``, and ``layers.1`` doesn't fit ``layers.10.weight``. Begun with a field, as in ``weights:enc*``,
    it is about that field alone; ``extra:`` begins those of ``State(extra=...)``. The state of a parameter in an
    optimizer goes by the parameter's name.

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
    A saved name of weights that begins with ``extra:`` is that of a value of ``State(extra=...)``: averaged weights.

    Raises: StateError(ARGUMENT).

    >>> renaming = Renaming({"backbone": "encoder", "backbone.norm": "norm"})
    >>> [renaming.saved_name(name) for name in ("backbone.0.weight", "backbone.norm.weight", "backbones", "head")]
    ['encoder.0.weight', 'norm.weight', 'backbones', 'head']
    >>> Renaming({"": "model."}).saved_name("head.weight")
    'model.head.weight'
    >>> Renaming({"": "extra:ema/module."}).saved_name("head.weight")
    'extra:ema/module.head.weight'
    """

    def __init__(self, rename: Rename) -> None:
        self._function = rename if callable(rename) else None
        self._keys: dict[str, str] = {}
        self._used: set[str] = set()
        if isinstance(rename, Mapping):
            self._keys = {_spelled(live): saved for live, saved in rename.items()}
        elif rename is not None and self._function is None:
            raise err(Code.ARGUMENT, "rename= is neither a mapping of names nor a function", where="rename=")
        pairs: Iterable[tuple[object, object]] = self._keys.items()
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise err(Code.ARGUMENT, "rename= isn't a mapping from strings to strings", where="rename=")
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
        saved = self._keys[fitting[0]] + name[len(fitting[0]) :] if fitting else name
        return _spelled(saved) if name.startswith(_EXTRA) else saved

    def __bool__(self) -> bool:
        return self._function is not None or bool(self._keys)

    def unused(self) -> frozenset[str]:
        """Return the keys of a mapping that no live name has met so far."""
        return frozenset(self._keys.keys() - self._used)


def _spelled(name: Any) -> Any:  # noqa: ANN401 - what isn't text is refused by name
    """Return the name of a value of ``State(extra=...)``, which messages begin with ``extra:``."""
    return f"{_EXTRA}{name.removeprefix('extra:')}" if isinstance(name, str) and name.startswith("extra:") else name


def _saved_place(field: str, name: str) -> tuple[str, str]:
    """Return the field and the name in a checkpoint of a saved name.

    >>> _saved_place("weights", "extra:ema/module.bias"), _saved_place("weights", "bias")
    (('optimizer', 'extra/ema/module.bias'), ('weights', 'bias'))
    """
    return ("optimizer", _spelled(name)) if name.startswith("extra:") else (field, name)


def _leads_to(key: str, name: str) -> bool:
    return name.startswith(key) and (name == key or not key or key[-1] in _JOINTS or name[len(key)] in _JOINTS)


def _remedy_of_pattern(pattern: str, checkpoint: Checkpoint) -> str:
    """Return what to write in place of a pattern that fits nothing."""
    if pattern in FIELDS:
        return f"The field is {f'{pattern}:*'!r}."
    head, colon, tail = pattern.partition(":")
    names = {name for field, name in iter_saved(checkpoint) if not colon or field == head}
    known = [place_of(field, name) for field, name in iter_saved(checkpoint)] if colon else [*names]
    if colon and head not in (*FIELDS, "extra"):
        near = [f"{field}:{tail}" for field in difflib.get_close_matches(head, [*FIELDS, "extra"], n=1)]
    else:
        near = difflib.get_close_matches(pattern, sorted({*known, *(name.split(".")[0] for name in names)}), n=1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    return f"{meant}`ckptfmt inspect PATH --tensors --all` lists the names that were saved."


def _compile(patterns: Iterable[str], field: str) -> re.Pattern[str]:
    expressions = []
    for text in patterns:
        head, colon, tail = text.partition(":")
        if colon and head == "extra":  # as in messages
            head, tail = "optimizer", f"extra/{tail}"
        pattern = tail if colon and head in FIELDS else text
        if pattern is text or head == field:
            expressions += [fnmatch.translate(pattern), fnmatch.translate(f"{pattern}[{_JOINTS}]*")]
    return re.compile("|".join(expressions) or r"(?!)")


#: Stands for a value that the checkpoint lacks.
MISSING: Final = object()

#: Codes that a caller may allow, by the word for it.
_ALLOWED_BY: Final = {
    Code.TENSOR_MISSING: "missing",
    Code.LEAF_MISSING: "missing",
    Code.TENSOR_UNEXPECTED: "unexpected",
    Code.LEAF_UNEXPECTED: "unexpected",
    Code.DTYPE_MISMATCH: "dtype",
    Code.STREAM_MISSING: "streams",
    Code.STREAM_UNEXPECTED: "streams",
    Code.LOADER_NOT_ELASTIC: "loader",
}

_SHOWN: Final = 10
#: How many pairs of a live and a saved value of one option are told.
_OPTIONS_SHOWN: Final = 3


def check_allow(allow: str | Iterable[str]) -> frozenset[str]:
    """Return the kinds of differences that a caller allows. Raises: StateError(ARGUMENT) for others."""
    allowed = frozenset[str]((allow,) if isinstance(allow, str) else allow)
    if unknown := allowed - set(_ALLOWED_BY.values()):
        known = ", ".join(sorted(set(_ALLOWED_BY.values())))
        detail = f"allow= takes {known}, and not {', '.join(sorted(map(str, unknown)))}"
        remedy = "Pass a tuple of these words, such as allow=('missing',)."
        raise err(Code.ARGUMENT, detail, where="allow=", remedy=remedy)
    return allowed


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Something for which a load is refused; with a remedy where there is a better one than the code's."""

    code: Code
    where: str
    detail: str
    remedy: str | None = None


class LoadPlan:
    """What a load of one worker will do.

    Args:
        checkpoint: what is loaded.
        worker: number of this worker.
        worker_count: number of workers that load.
        allow: kinds of differences that the caller accepts: ``missing``, ``unexpected``, ``dtype``, ``streams``,
            ``loader``.
        only: patterns of the saved names that the load is about; see `ckptfmt.adapters.load_plan.Only`.
        rename: saved names of live ones; see `ckptfmt.adapters.load_plan.Renaming`.
        override: patterns of what stays as it is live, though it was saved; see `ckptfmt.adapters.load_plan.Only`.

    Attributes:
        only: what the load is about.
        renaming: what the live names were called.
        sinks: destinations to fill.
        actions: what to do after that, in this order.
        problems: why the load is refused.
        downgrades: what is done in another way than asked for; lowers the claim.
        notes: what changed and is worth a line; doesn't lower the claim.
        reorders: whether the run sees its data from here on in another order than it would have.
        values: values that could not be put back into an immutable place, by name.
        renamed: field and live name, and the saved name where that is another.
        left_count: how many live tensors and values stay as they are because of `only`.
        left_weights: live names of the weights among these.
        missing: live tensors that weren't saved, with their shapes, by field and name.
        unused: saved tensors of mappings in which nothing has their keys.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        worker: int,
        worker_count: int,
        allow: frozenset[str],
        only: Patterns = None,
        rename: Rename = None,
        override: Patterns = (),
    ) -> None:
        check_allow(allow)
        self.checkpoint = checkpoint
        self.worker = worker
        self.worker_count = worker_count
        self.allow = allow
        self.sinks: list[TensorSink] = []
        self.actions: list[Callable[[], None]] = []
        self.problems: list[Problem] = []
        self.downgrades: list[str] = []
        #: The RNG streams of generators that objects have set by their own load_state_dict.
        self.settled: set[str] = set()
        self.notes: list[str] = []
        self.reorders = False
        self.values: dict[str, object] = {}
        self.taken_tensors: set[TensorKey] = set()
        self.taken_leaves: set[TensorKey] = set()
        self.renaming = Renaming(rename)
        self.renamed: dict[tuple[str, str], str] = {}
        self.left_count = 0
        self.left_weights: list[str] = []
        self.missing: dict[tuple[str, str], tuple[int, ...]] = {}
        self.unused: list[IndexTensor] = []
        self.only = Only(only, override=override)
        #: By option of optimizers' groups: the index of its note, and for each group place, live and saved value.
        self._options: dict[str, tuple[int, list[tuple[str, object, object]]]] = {}
        #: Of what belongs to one worker and was taken from another: where that is said, and of what.
        self._elsewhere: dict[tuple[str, str], tuple[int, list[str]]] = {}
        #: By saved tensor, the live name and the saved one that it was first taken for.
        self._destinations: dict[TensorKey, tuple[str, str]] = {}
        for pattern in self.only.iter_idle(checkpoint):
            remedy = _remedy_of_pattern(pattern, checkpoint)
            self.problem(Code.TENSOR_MISSING, f"only={pattern!r}", "nothing of this name was saved", remedy=remedy)
        for pattern in self.only.iter_idle_overrides(checkpoint):
            remedy = _remedy_of_pattern(pattern, checkpoint)
            remedy += " An option of an optimizer's groups is called group/ and its key: 'optimizer:group/lr'."
            self.problem(Code.ARGUMENT, f"override={pattern!r}", "nothing of this name was saved", remedy=remedy)

    @property
    def is_imported(self) -> bool:
        """Whether this was converted from another format, which lacks whole fields."""
        return any((field.reason or "").startswith(IMPORTED) for field in self.checkpoint.manifest.fields.values())

    def has(self, field: str, name: str) -> bool:
        """Tell whether anything was saved of a unit of a State, by its name; of a whole field, which has none, too."""
        field, saved = _saved_place(field, self.renaming.saved_name(name))
        keys = (key for keys in (self.checkpoint.leaves, self.checkpoint.tensors) for key in keys if key[0] == field)
        if not place_of(field, saved).startswith("extra:"):
            return any(not place_of(*key[:2]).startswith("extra:") for key in keys)
        return any(key[1] == saved or key[1].startswith((f"{saved}/", f"{saved}.")) for key in keys)

    # --- choose -------------------------------------------------------------------------------------------------------

    @property
    def is_partial(self) -> bool:
        """Whether the caller chose by `only`."""
        return self.only.patterns is not None

    def choose(self, field: str, names: Sequence[str], *, prefix: str = "") -> tuple[str, ...]:
        """Return the saved names of something live, none if it is to be left as it is, and take note of either.

        Args:
            field: of the live thing.
            names: all of its live names.
            prefix: of the saved names that `only` goes by, where they have one that live names have not.
        """
        saved = tuple(self.renaming.saved_name(name) for name in names)
        if not any(self.only.fits(*_saved_place(field, prefix + name)) for name in saved):
            self.left_count += 1
            if field == "weights":
                self.left_weights.append(names[0])
            if self.only.is_overridden(field, prefix + saved[0]):
                self.downgrades.append(f"{place_of(field, names[0])} stays as it is here: override=")
            return ()
        pairs = zip(names, saved, strict=True)
        self.renamed |= {(field, name): other for name, other in pairs if name != other}
        return saved

    def list_renamed(self) -> tuple[tuple[str, str], ...]:
        """Return live and saved name, with their field, of what was saved under another name."""
        return tuple(
            (f"{field}:{name}", saved if saved.startswith("extra:") else f"{field}:{saved}")
            for (field, name), saved in sorted(self.renamed.items())
        )

    def note_destination(self, saved: IndexTensor, live_name: str, saved_name: str) -> None:
        """Report that a tensor that had several names when it was saved is several tensors here."""
        first_live, first_saved = self._destinations.setdefault(saved.key, (live_name, saved_name))
        if first_saved != saved_name:
            self.downgrades.append(
                f"{saved.field}:{live_name} was one tensor with {first_live} when saved (tied), and isn't here"
            )

    # --- look up ------------------------------------------------------------------------------------------------------

    def tensor(self, field: str, names: Iterable[str], scope: str) -> IndexTensor | None:
        """Return the saved tensor of one of `names`, and count it as taken; None if there is none.

        Another scope than the wanted one is taken where that isn't there, and reported.
        """
        names = tuple(names)
        for at in self._scopes(scope):
            for name in names:
                found = self.checkpoint.find(*_saved_place(field, name), at)
                if found is not None:
                    self.taken_tensors.add(found.key)
                    self._report_scope(field, name, scope, at)
                    return found
        return None

    def leaf(self, field: str, names: Iterable[str], scope: str) -> tuple[str, str, Any]:
        """Return name, scope and value of the saved leaf of one of `names`, counted as taken; MISSING for none."""
        names = tuple(names)
        for at in self._scopes(scope):
            for name in names:
                key = (*_saved_place(field, name), at)
                if key in self.checkpoint.leaves:
                    self.taken_leaves.add(key)
                    self._report_scope(field, name, scope, at)
                    return name, at, self.checkpoint.leaf(*key)
        return names[0], scope, MISSING

    def _scopes(self, scope: str) -> tuple[str, ...]:
        own = worker_scope(self.worker)
        return (GLOBAL, own, worker_scope(0)) if scope == GLOBAL else (scope, GLOBAL, worker_scope(0))

    def _report_scope(self, field: str, name: str, wanted: str, found: str) -> None:
        if wanted == found:
            return
        at, names = self._elsewhere.setdefault((wanted, found), (len(self.downgrades), []))
        if not names:
            self.downgrades.append("")
        names.append(place_of(field, name))
        shown = f"{', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        count = self.checkpoint.manifest.origin.writer_count
        if found == GLOBAL:
            said = "saved once for all processes, and each has its own here"
        elif wanted == GLOBAL:
            said = f"each of {count} processes saved its own, and {_process(found)}'s is taken for all"
        else:
            said = f"{_process(wanted)} saved none, as one of {count} processes, and takes {_process(found)}'s"
        self.downgrades[at] = f"{shown}: {said}"

    def note_option(self, where: str, key: str, live: object, saved: object) -> None:
        """Report that the saved value of an option of an optimizer's group replaces another live one.

        An option has one note, however many groups have it.
        """
        at, changes = self._options.setdefault(key, (len(self.notes), []))
        if not changes:
            self.notes.append("")
        changes.append((where, live, saved))
        places: dict[tuple[str, str], list[str]] = {}
        for place, before, after in changes:
            places.setdefault((repr(before), repr(after)), []).append(place)
        told = [
            f"{before} here, {after} as saved ({same[0]}{f' and {len(same) - 1} more' if len(same) > 1 else ''})"
            for (before, after), same in places.items()
        ]
        more = f"; and {len(told) - _OPTIONS_SHOWN} more values" if len(told) > _OPTIONS_SHOWN else ""
        said = f"{'; '.join(told[:_OPTIONS_SHOWN])}{more}"
        self.notes[at] = f"{key}: {said}; the saved value is taken, unless override= names it"

    # --- problems -----------------------------------------------------------------------------------------------------

    def problem(self, code: Code, where: str, detail: str, *, remedy: str | None = None) -> bool:
        """Take note of a problem; return whether the caller allows it, and the load goes on without."""
        if _ALLOWED_BY.get(code) in self.allow:
            self.downgrades.append(f"{code} at {where}: {detail}")
            return True
        self.problems.append(Problem(code, where, detail, remedy))
        return False

    def miss(self, field: str, name: str, detail: str, *, shape: tuple[int, ...]) -> None:
        """Take note of a live tensor that wasn't saved."""
        self.missing[field, name] = shape
        self.problem(Code.TENSOR_MISSING, place_of(field, name), detail)

    def check(self) -> None:
        """Raise the first problem's error, with the places of all problems: those of its code, then the others.

        Of each code at most ten are named, and the rest is counted.
        """
        if not self.problems:
            return
        first, by_code = self.problems[0], dict[Code, list[Problem]]()
        for problem in self.problems:
            by_code.setdefault(problem.code, []).append(problem)
        detail = first.detail
        for code, same in by_code.items():
            begin = "" if code is first.code else f"{code} at "
            named = [f"; {begin}{problem.where}: {problem.detail}" for problem in same[:_SHOWN] if problem is not first]
            detail += "".join(named) + (f"; and {len(same) - _SHOWN} more" if len(same) > _SHOWN else "")
        raise err(first.code, detail, where=first.where, remedy=first.remedy)

    def list_idle_patterns(self, *, has_streams: bool) -> list[str]:
        """Return the patterns of `only` for saved tensors and values of which nothing here takes any.

        Args:
            has_streams: whether RNG streams are put back.
        """
        taken = {(key[0], name) for key in self.taken_tensors for name in self._names_of(key)}
        for field, name, _ in self.taken_leaves:
            taken |= {(field, name), (field, name.replace(_STATE, "", 1))}
        taken |= {("rng", name) for name, _ in self.checkpoint.streams if has_streams}
        idle = []
        for pattern in self.only.patterns or ():
            alone = Only(pattern)
            saved = {one for one in iter_saved(self.checkpoint) if alone.fits(*one)}
            if saved and not any(one in taken or one[0] in _COMPARED or self.only.is_overridden(*one) for one in saved):
                idle.append(pattern)
        return idle

    def refuse_idle_patterns(self, idle: Iterable[str]) -> None:
        """Refuse patterns of `only` that choose nothing which the State takes; report them where that is allowed.

        Args:
            idle: patterns of which no process takes anything.
        """
        idle = sorted(idle)
        loads_something = set(self.only.patterns or ()) > set(idle)
        for pattern in idle if not self.problems else ():
            detail = "saved, and no part of the State takes it"
            if "unexpected" in self.allow and loads_something:
                self.downgrades.append(f"only={pattern!r}: {detail}")
            else:
                remedy = self._remedy_of_idle(pattern)
                self.problems.append(Problem(Code.ARGUMENT, f"only={pattern!r}", detail, remedy))

    def _remedy_of_idle(self, pattern: str) -> str:
        alone = Only(pattern)
        saved = {one for one in iter_saved(self.checkpoint) if alone.fits(*one)}
        field, name = min(saved, key=lambda one: (FIELDS.index(one[0]), one[1]))
        if field == "optimizer" and name.startswith(_EXTRA):
            key = name.removeprefix(_EXTRA).partition("/")[0]
            remedy = f"Give State the object that takes it: extra={{{key!r}: ...}}."
        elif field == "rng":
            remedy = "Leave State(rng=False) out: RNG streams are put back without it."
        else:
            remedy = f"Give State the object that takes it: {field}=..."
        if not name.startswith(_EXTRA):
            return remedy
        prefixes = [{one.removesuffix(live) for _, one in saved if one.endswith(live)} for live in self.left_weights]
        common = set.intersection(*prefixes) if prefixes else set()
        begins = sorted(prefix for prefix in common if prefix[-1] in _JOINTS)
        if len(begins) == 1:
            prefix = f"extra:{begins[0].removeprefix(_EXTRA)}"
            remedy += f" The live weights take it with only={prefix.rstrip(_JOINTS)!r}, rename={{'': {prefix!r}}}."
        return remedy

    def _names_of(self, key: TensorKey) -> tuple[str, ...]:
        return (key[1], *self.checkpoint.tensors[key].aliases)

    def leftover(self, fields: Iterable[str]) -> frozenset[tuple[str, TensorKey]]:
        """Return what of these fields nobody took here: ``tensor`` or ``leaf``, with the key.

        What belongs to another worker that loads too is left to it.
        """
        fields = set(fields)
        tensors = {("tensor", key) for key in self.checkpoint.tensors if key not in self.taken_tensors}
        leaves = {("leaf", key) for key in self.checkpoint.leaves if key not in self.taken_leaves}
        mine = {(kind, key) for kind, key in tensors | leaves if key[0] in fields and self._is_mine(key[2])}
        return frozenset(item for item in mine if self._is_wanted(*item))

    def _is_wanted(self, kind: str, key: TensorKey) -> bool:
        field, name, _ = key
        if kind == "leaf":
            if self.renaming and self._says_only_names(key):
                return False
            return self.only.fits_leaf(field, name, lambda: self.checkpoint.leaf(*key))
        names = self._names_of(key) if self.is_partial else ()
        return not names or any(self.only.fits(field, name) for name in names)

    def _says_only_names(self, key: TensorKey) -> bool:
        """Return whether a saved value is made of tensors alone, and all of them were taken, as weights."""
        values = [*iter_values(self.checkpoint.leaf(*key))] if place_of(*key[:2]).startswith("extra:") else []
        found = [self.checkpoint.find(key[0], one.name, key[2]) for one in values if isinstance(one, TensorRef)]
        return len(found) == len(values) > 0 and all(one and one.key in self.taken_tensors for one in found)

    def _is_mine(self, scope: str) -> bool:
        return scope in (GLOBAL, worker_scope(self.worker)) or int(scope.removeprefix("lw/")) >= self.worker_count

    def refuse_leftover(self, leftover: frozenset[tuple[str, TensorKey]]) -> None:
        """Make problems of what nobody takes; what belonged to workers that no longer are is only reported."""
        gone = 0
        tensors = (self.checkpoint.tensors[key] for kind, key in sorted(leftover) if kind == "tensor")
        unused = [*self.unused, *(one for one in tensors if one.storage == "persistent")]
        renaming = guess_renaming(self.missing, unused)
        unmatched = [] if renaming else list_unmatched(self.missing, unused)
        if renaming and {"missing", "unexpected"} <= self.allow:
            self.downgrades.append(f"tensors that weren't saved may have had other names: rename={renaming!r}")
        for kind, (field, name, scope) in sorted(leftover):
            if scope != GLOBAL and scope != worker_scope(self.worker):
                gone += 1
                continue
            tensor = self.checkpoint.tensors.get((field, name, scope)) if kind == "tensor" else None
            if tensor is not None and tensor.storage != "persistent":
                self.downgrades.append(f"{field}:{name}: saved as a non-persistent buffer, and nothing here takes it")
                continue
            if self.is_imported and field != "weights":
                self.downgrades.append(f"{place_of(field, name)} was imported, and nothing here takes it")
                continue
            code = Code.TENSOR_UNEXPECTED if kind == "tensor" else Code.LEAF_UNEXPECTED
            suffix = "" if scope == GLOBAL else f" by {_process(scope)}"
            self.problem(code, place_of(field, name), f"saved{suffix}, and nothing here takes it")
        self._name_values()
        if gone:
            self.downgrades.append(f"{gone} tensors and values of workers that no longer exist are left")
        offer = _offer_renaming(renaming) if renaming else self._offer_rest(unmatched)
        self.problems = [_offer(offer, problem) if offer else problem for problem in self.problems]

    def _offer_rest(self, unmatched: Sequence[str]) -> str:
        """Return how to take the modules whose tensors all fit, where others don't; empty where none does.

        Args:
            unmatched: saved tensors that may be those that are missing here, under other names.
        """
        wrong = {problem.where for problem in self.problems if problem.code in (*_OF_NAMES, Code.SHAPE_MISMATCH)}
        wrong = {where.removeprefix("weights:") for where in wrong if where.startswith("weights:")}
        if not wrong:
            return ""
        offer = ""
        if unmatched:
            shown = (
                f"{', '.join(unmatched[:_SHOWN])}{f' and {len(unmatched) - _SHOWN} more' * (len(unmatched) > _SHOWN)}"
            )
            offer = (
                "Which saved tensor belongs to which live name can't be told from their shapes; nothing here takes"
                f" {shown}. If only names differ, the argument rename= maps live names to saved ones. "
            )
        fitting = {key[1] for key in self.taken_tensors if key[0] == "weights"} - wrong
        rest = _list_whole_modules(fitting, wrong)
        if not rest or self.renaming or self.only.patterns not in {None, ("weights:*",)}:
            return offer
        patterns = [f"weights:{name}" for name in rest]
        return (
            f"{offer}To keep what is new here as it was made, and take the rest, pass only={patterns!r} to"
            " ckptfmt.load; a new run begins from the rest with"
            f" Checkpointer(NEW, state, init_from=InitFrom({self.checkpoint.store.name!r}, only={patterns!r})). "
        )

    def _name_values(self) -> None:
        """Give values of ``State(extra=...)`` that don't meet a remedy: one that takes them along."""
        wanted, saved = (
            [problem.where for problem in self.problems if problem.code is code and problem.where.startswith("extra:")]
            for code in (Code.LEAF_MISSING, Code.LEAF_UNEXPECTED)
        )
        renamed = f"If only the name differs, pass rename={{{wanted[0]!r}: {saved[0]!r}}}. " if wanted and saved else ""
        for number, problem in enumerate(self.problems):
            name = problem.where.removeprefix("extra:")
            if problem.where in saved:
                remedy = f"{renamed}Give it to State: extra={{{name!r}: ...}}; allow=('unexpected',) leaves it out."
            elif problem.where in wanted:
                remedy = f"{renamed}allow=('missing',) keeps the live one."
            else:
                continue
            self.problems[number] = dataclasses.replace(problem, remedy=problem.remedy or remedy)


def _process(scope: str) -> str:
    return f"process {scope.removeprefix('lw/')}"


#: What is wrong where names differ.
_OF_NAMES: Final = (Code.TENSOR_MISSING, Code.TENSOR_UNEXPECTED, Code.LEAF_MISSING, Code.LEAF_UNEXPECTED)


def _offer_renaming(renaming: Mapping[str, str]) -> str:
    return (
        f"If only the names differ, pass rename={renaming!r} to ckptfmt.load. A run goes on under other names in"
        f" another directory: Checkpointer(NEW, state, init_from=InitFrom(RUN, only=None, rename={renaming!r})). "
    )


def _offer(offer: str, problem: Problem) -> Problem:
    """Return a problem of names or shapes, with an offer as its remedy before any other."""
    is_about = problem.code in (*_OF_NAMES, Code.SHAPE_MISMATCH)
    if not is_about or problem.where.partition(":")[0] not in ("weights", "optimizer"):
        return problem
    return dataclasses.replace(problem, remedy=f"{offer}{problem.remedy or problem.code.remedy}")


def _list_whole_modules(fitting: set[str], wrong: set[str]) -> list[str]:
    """Return the outermost names under which all tensors fit; none where a module has both kinds of its own.

    >>> _list_whole_modules({"body.0.weight", "body.1.weight", "norm.weight"}, {"head.weight", "head.bias"})
    ['body', 'norm']
    >>> _list_whole_modules({"2.bias"}, {"2.weight", "0.weight", "0.bias"})
    []
    """
    if {_owner(name) for name in fitting} & {_owner(name) for name in wrong}:
        return []
    blocked = {begin for name in wrong for begin in _iter_beginnings(name)}
    found = {next((begin for begin in _iter_beginnings(name) if begin not in blocked), name) for name in fitting}
    return sorted(found) if len(found) <= _SHOWN else []


def _owner(name: str) -> str:
    """Return the name of the module or container that has a tensor."""
    return name[: max(name.rfind(joint) for joint in _JOINTS) + 1]


def _iter_beginnings(name: str) -> Iterator[str]:
    """Yield what a name begins with, up to each of its joints, and the name itself; the shortest first."""
    yield from (name[:at] for at, letter in enumerate(name) if letter in _JOINTS)
    yield name


def guess_renaming(missing: Mapping[tuple[str, str], tuple[int, ...]], unused: Sequence[IndexTensor]) -> dict[str, str]:
    """Return what live tensors may have been called, as ``rename=`` takes it; empty without a guess.

    Names that end alike, with tensors of one shape, are taken for the same; what is left of them before that is the
    renaming. There is no guess where that doesn't lead to just one saved name for each live one.

    Args:
        missing: shapes of live tensors, by field and name.
        unused: saved tensors that nothing takes.

    Shapes: global.
    """
    by_field: dict[str, list[IndexTensor]] = {}
    for tensor in unused:
        by_field.setdefault(tensor.field, []).append(tensor)
    pairs: dict[str, str] = {}
    taken: set[tuple[str, str]] = set()
    for (field, name), shape in missing.items():
        fitting = [one.name for one in by_field.get(field, ()) if one.global_shape == shape]
        fitting = [other for other in fitting if (field, other) not in taken]
        if not fitting:
            continue
        lengths = {other: _common_end(name, other) for other in fitting}
        best = max(lengths.values())
        if list(lengths.values()).count(best) > 1:
            continue
        other = next(other for other in fitting if lengths[other] == best)
        taken.add((field, other))
        live, saved = (text[: len(text) - best] if best else text for text in (name, other))
        pairs.setdefault(live, saved)
    renaming = Renaming(pairs)
    names = {(tensor.field, tensor.name) for tensor in unused}
    if pairs and all((field, renaming.saved_name(name)) in names for field, name in missing):
        shown = {live.rstrip(_JOINTS): saved.rstrip(_JOINTS) for live, saved in pairs.items()}
        if all(live and saved for live, saved in shown.items()) and len(shown) == len(pairs):
            pairs = shown
        if len(pairs) <= _SHOWN:
            return pairs
    return {}


def list_unmatched(missing: Mapping[tuple[str, str], tuple[int, ...]], unused: Sequence[IndexTensor]) -> list[str]:
    """Return the places of saved tensors that nothing takes, if one of them may be a live tensor that wasn't saved.

    Args:
        missing: shapes of live tensors, by field and name.
        unused: saved tensors that nothing takes.

    Shapes: global.
    """
    wanted = {(field, shape) for (field, _), shape in missing.items()}
    if not any((tensor.field, tensor.global_shape) in wanted for tensor in unused):
        return []
    return sorted({place_of(tensor.field, tensor.name) for tensor in unused})


def _common_end(left: str, right: str) -> int:
    """Return the length of the longest common end of two names that begins with a joint."""
    length = 0
    for at, (one, other) in enumerate(zip(reversed(left), reversed(right), strict=False), 1):
        if one != other:
            break
        if one in _JOINTS:
            length = at
    return length

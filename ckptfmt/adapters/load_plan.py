"""Plan a load: selection, destinations, later actions, and the problems that refuse the load.

Planning changes no live value, so a load that is refused leaves the program's state unchanged.
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

#: Patterns of the names to load; None for all names.
Patterns: TypeAlias = "str | Iterable[str] | None"

#: The saved names of live names: a mapping of names or prefixes, or a function.
Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str] | None"

#: Differences that a load reports instead of refusing them.
Allowed: TypeAlias = Literal["missing", "unexpected", "dtype", "streams", "loader"]
Allow: TypeAlias = "Allowed | Iterable[Allowed]"

#: The separators in a name: between modules, and between containers.
_JOINTS: Final = "./"
_STATE: Final = "state/"
#: The prefix of the names of ``State(extra=...)`` in the field optimizer.
_EXTRA: Final = "extra/"
#: Fields that a load compares and never loads.
_COMPARED: Final = ("config", "topology", "provenance")
_GROUP: Final = re.compile(r"((?:.*?/)??)group/")


class Only:
    """A selection of tensors and values for a load, by patterns of their saved names.

    A pattern matches a name as in `fnmatch.fnmatchcase`, and all names beneath the match:
    ``encoder`` and ``enc*`` match ``encoder.0.weight``, but ``layers.1`` doesn't match
    ``layers.10.weight``. With a field as prefix, as in ``weights:enc*``, a pattern matches in that
    field only. The prefix ``extra:`` stands for the names of ``State(extra=...)``. A parameter's
    optimizer state is selected by the parameter's name.

    Args:
        patterns: a single pattern, or several patterns of which at least one has to match; None for
            all names.
        override: patterns of names that keep their live values. An option of an optimizer's groups
            is called ``group/`` plus the option's key.

    Raises: StateError(ARGUMENT).

    >>> only = Only(["encoder", "rng:*"])
    >>> (only.fits("weights", "encoder.0.weight"), only.fits("weights", "encoders.weight"),
    ...  only.fits("rng", "python"))
    (True, False, True)
    """

    def __init__(self, patterns: Patterns, *, override: Patterns = ()) -> None:
        self.override: Only | None = (
            None if override is None or not tuple(override) else Only(override)
        )
        self.patterns: tuple[str, ...] | None = None
        if patterns is None:
            return
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        texts: tuple[object, ...] = self.patterns
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise err(
                Code.ARGUMENT,
                f"only={self.patterns!r} has no pattern, or an empty one",
                where="only=",
            )
        self._expressions = {field: _compile(self.patterns, field) for field in FIELDS}

    def fits(self, field: str, name: str) -> bool:
        """Return whether the load includes a saved name."""
        if self.is_overridden(field, name):
            return False
        return self.patterns is None or self._expressions[field].match(name) is not None

    def is_overridden(self, field: str, name: str) -> bool:
        """Return whether the caller keeps the live value of a name."""
        return self.override is not None and self.override.fits(field, name)

    def fits_leaf(self, field: str, name: str, value: Callable[[], Any]) -> bool:
        """Return whether the load includes a saved leaf.

        An optimizer's state is selected by the parameter's name, and an optimizer's group by the
        names of all its parameters.

        Args:
            field: the leaf's field.
            name: the leaf's name.
            value: returns the saved value. Called only if needed.
        """
        if self.override is not None and self.override.fits_leaf(field, name, value):
            return False
        if self.patterns is None or self.fits(field, name):
            return True
        group = _GROUP.match(name)
        if group is not None:
            tree = value()
            members = tree.get("params") if isinstance(tree, dict) else None
            return bool(members) and all(
                self.fits(field, group[1] + member) for member in members or ()
            )
        return _STATE in name and self.fits(field, name.replace(_STATE, "", 1))

    def iter_idle(self, checkpoint: Checkpoint) -> Iterator[str]:
        """Yield the patterns that match no name in a checkpoint."""
        for pattern in self.patterns or ():
            alone = Only(pattern)
            if not any(alone.fits(field, name) for field, name in iter_saved(checkpoint)):
                yield pattern

    def iter_idle_overrides(self, checkpoint: Checkpoint) -> Iterator[str]:
        """Yield the patterns of `override` that match no name in a checkpoint.

        The options of an optimizer's groups count as names.
        """
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
    """Yield field and name of every saved item that a pattern can match."""
    for tensor in checkpoint.tensors.values():
        yield from ((tensor.field, name) for name in (tensor.name, *tensor.aliases))
    for field, name, _ in checkpoint.leaves:
        yield field, name
        yield field, name.replace(_STATE, "", 1)
    yield from (("rng", name) for name, _ in checkpoint.streams)


class Renaming:
    """A translation of live names to saved names.

    A key of a mapping is a name or a prefix. A key that is empty or ends with a dot or a slash
    matches as a plain prefix. Any other key matches a whole name, or a prefix up to a dot or a
    slash. The longest matching key is replaced by its value. A function receives the whole name.
    A saved name of weights with the prefix ``extra:`` refers to a value of ``State(extra=...)``,
    such as averaged weights.

    Raises: StateError(ARGUMENT).

    >>> renaming = Renaming({"backbone": "encoder", "backbone.norm": "norm"})
    >>> [renaming.saved_name(name) for name in ("backbone.0.weight", "backbone.norm.weight",
    ...     "backbones", "head")]
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
            raise err(
                Code.ARGUMENT,
                "rename= is neither a mapping of names nor a function",
                where="rename=",
            )
        pairs: Iterable[tuple[object, object]] = self._keys.items()
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise err(
                Code.ARGUMENT, "rename= isn't a mapping from strings to strings", where="rename="
            )
        self._longest_first = sorted(self._keys, key=len, reverse=True)

    def saved_name(self, name: str) -> str:
        """Return the saved name of a live name. The empty name of a whole field stays empty.

        Raises: StateError(ARGUMENT) if the caller's function returns no string.
        """
        if not name:
            return name
        if self._function is not None:
            saved: object = self._function(name)
            if not isinstance(saved, str):
                raise err(
                    Code.ARGUMENT,
                    f"rename({name!r}) returned {saved!r}, not a name",
                    where="rename=",
                )
            return saved
        fitting = [key for key in self._longest_first if _leads_to(key, name)]
        self._used.update(fitting)
        saved = self._keys[fitting[0]] + name[len(fitting[0]) :] if fitting else name
        return _spelled(saved) if name.startswith(_EXTRA) else saved

    def __bool__(self) -> bool:
        return self._function is not None or bool(self._keys)

    def unused(self) -> frozenset[str]:
        """Return the keys of the mapping that have matched no live name so far."""
        return frozenset(self._keys.keys() - self._used)


def _spelled(name: Any) -> Any:
    """Return the internal name of a value of ``State(extra=...)``.

    Messages spell such a name with the prefix ``extra:``. Other names stay unchanged.
    """
    return (
        f"{_EXTRA}{name.removeprefix('extra:')}"
        if isinstance(name, str) and name.startswith("extra:")
        else name
    )


def _saved_place(field: str, name: str) -> tuple[str, str]:
    """Return the field and the name under which the checkpoint stores a saved name.

    >>> _saved_place("weights", "extra:ema/module.bias"), _saved_place("weights", "bias")
    (('optimizer', 'extra/ema/module.bias'), ('weights', 'bias'))
    """
    return ("optimizer", _spelled(name)) if name.startswith("extra:") else (field, name)


def _leads_to(key: str, name: str) -> bool:
    return name.startswith(key) and (
        name == key or not key or key[-1] in _JOINTS or name[len(key)] in _JOINTS
    )


def _remedy_of_pattern(pattern: str, checkpoint: Checkpoint) -> str:
    """Return a suggestion to replace a pattern that matches no saved name."""
    if pattern in FIELDS:
        return f"The field is {f'{pattern}:*'!r}."
    head, colon, tail = pattern.partition(":")
    names = {name for field, name in iter_saved(checkpoint) if not colon or field == head}
    known = [place_of(field, name) for field, name in iter_saved(checkpoint)] if colon else [*names]
    if colon and head not in (*FIELDS, "extra"):
        near = [
            f"{field}:{tail}" for field in difflib.get_close_matches(head, [*FIELDS, "extra"], n=1)
        ]
    else:
        near = difflib.get_close_matches(
            pattern, sorted({*known, *(name.split(".")[0] for name in names)}), n=1
        )
    meant = f"Did you mean {near[0]!r}? " if near else ""
    return f"{meant}`ckptfmt inspect PATH --tensors --all` lists the names that were saved."


def _compile(patterns: Iterable[str], field: str) -> re.Pattern[str]:
    expressions = []
    for text in patterns:
        head, colon, tail = text.partition(":")
        if colon and head == "extra":  # messages use this prefix
            head = "optimizer"
            tail = f"extra/{tail}"
        pattern = tail if colon and head in FIELDS else text
        if pattern is text or head == field:
            expressions += [fnmatch.translate(pattern), fnmatch.translate(f"{pattern}[{_JOINTS}]*")]
    return re.compile("|".join(expressions) or r"(?!)")


#: The result of a lookup of a value that the checkpoint lacks.
MISSING: Final = object()

#: Error codes that a caller may allow, each with the word for ``allow=``.
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
#: The number of pairs of live and saved values that a note about an option lists.
_OPTIONS_SHOWN: Final = 3


def check_allow(allow: str | Iterable[str]) -> frozenset[str]:
    """Return the kinds of differences that a caller allows.

    Raises: StateError(ARGUMENT) for unknown kinds.
    """
    allowed = frozenset[str]((allow,) if isinstance(allow, str) else allow)
    if unknown := allowed - set(_ALLOWED_BY.values()):
        known = ", ".join(sorted(set(_ALLOWED_BY.values())))
        detail = f"allow= takes {known}, and not {', '.join(sorted(map(str, unknown)))}"
        remedy = "Pass a tuple of these words, such as allow=('missing',)."
        raise err(Code.ARGUMENT, detail, where="allow=", remedy=remedy)
    return allowed


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A reason to refuse a load.

    Attributes:
        code: the error code.
        where: the place of the problem.
        detail: a description.
        remedy: a remedy for this case; None for the code's general remedy.
    """

    code: Code
    where: str
    detail: str
    remedy: str | None = None


class LoadPlan:
    """The plan of a load by a single worker.

    Args:
        checkpoint: the checkpoint to load.
        worker: the number of this worker.
        worker_count: the number of workers that load.
        allow: kinds of differences that the caller accepts: ``missing``, ``unexpected``, ``dtype``,
            ``streams``, ``loader``.
        only: patterns of the saved names to load; see `ckptfmt.adapters.load_plan.Only`.
        rename: the translation of live names; see `ckptfmt.adapters.load_plan.Renaming`.
        override: patterns of names that keep their live values; see
            `ckptfmt.adapters.load_plan.Only`.
        goes_back: whether the live state is a later state of the same training: optimizer state
            missing in the checkpoint is dropped.

    Attributes:
        only: the selection of saved names.
        renaming: the translation of live names to saved names.
        sinks: destinations to fill.
        actions: functions to call after all reads, in this order.
        problems: the reasons to refuse the load.
        downgrades: deviations from an exact restore, one sentence each. They lower the claim.
        notes: differences that deserve a line in the report. They don't lower the claim.
        reorders: whether the remaining data comes in another order than in an uninterrupted run.
        values: new values without a mutable container to hold them, by name.
        renamed: the saved names that differ from live names, by field and live name.
        left_count: the number of live tensors and values that `only` excludes.
        left_weights: the live names of the excluded weights.
        missing: the shapes of live tensors that weren't saved, by field and name.
        unused: saved tensors of mappings whose live counterpart lacks the key.
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
        goes_back: bool = False,
    ) -> None:
        check_allow(allow)
        self.goes_back = goes_back
        self.checkpoint = checkpoint
        self.worker = worker
        self.worker_count = worker_count
        self.allow = allow
        self.sinks: list[TensorSink] = []
        self.actions: list[Callable[[], None]] = []
        self.problems: list[Problem] = []
        self.downgrades: list[str] = []
        #: Names of RNG streams that an object's own load_state_dict has set.
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
        #: For each option of optimizers' groups: the index of the option's note, and place, live
        #: value and saved value for each group.
        self._options: dict[str, tuple[int, list[tuple[str, object, object]]]] = {}
        #: Items found in another scope, by wanted and found scope: the index of the downgrade, and
        #: the items' places.
        self._elsewhere: dict[tuple[str, str], tuple[int, list[str]]] = {}
        #: For each saved tensor, the live name and the saved name of its first use.
        self._destinations: dict[TensorKey, tuple[str, str]] = {}
        for pattern in self.only.iter_idle(checkpoint):
            remedy = _remedy_of_pattern(pattern, checkpoint)
            self.problem(
                Code.TENSOR_MISSING,
                f"only={pattern!r}",
                "nothing of this name was saved",
                remedy=remedy,
            )
        for pattern in self.only.iter_idle_overrides(checkpoint):
            remedy = _remedy_of_pattern(pattern, checkpoint)
            remedy += (
                " An option of an optimizer's groups is called group/ and its key:"
                " 'optimizer:group/lr'."
            )
            self.problem(
                Code.ARGUMENT,
                f"override={pattern!r}",
                "nothing of this name was saved",
                remedy=remedy,
            )

    @property
    def is_imported(self) -> bool:
        """Whether the checkpoint was converted from another format, which lacks whole fields."""
        return any(
            (field.reason or "").startswith(IMPORTED)
            for field in self.checkpoint.manifest.fields.values()
        )

    def has(self, field: str, name: str) -> bool:
        """Return whether any part of a unit of a State was saved.

        Args:
            field: the unit's field.
            name: the unit's live name; empty for a whole field.
        """
        field, saved = _saved_place(field, self.renaming.saved_name(name))
        keys = (
            key
            for keys in (self.checkpoint.leaves, self.checkpoint.tensors)
            for key in keys
            if key[0] == field
        )
        if not place_of(field, saved).startswith("extra:"):
            return any(not place_of(*key[:2]).startswith("extra:") for key in keys)
        return any(key[1] == saved or key[1].startswith((f"{saved}/", f"{saved}.")) for key in keys)

    # --- choose -----------------------------------------------------------------------------------

    @property
    def is_partial(self) -> bool:
        """Whether the caller selected names with `only`."""
        return self.only.patterns is not None

    def choose(self, field: str, names: Sequence[str], *, prefix: str = "") -> tuple[str, ...]:
        """Return the saved names of a live item, or no names if the item isn't selected.

        The plan records the item as renamed or as excluded.

        Args:
            field: the item's field.
            names: all live names of the item.
            prefix: a prefix of the saved names in patterns, which live names lack.
        """
        saved = tuple(self.renaming.saved_name(name) for name in names)
        if not any(self.only.fits(*_saved_place(field, prefix + name)) for name in saved):
            self.left_count += 1
            if field == "weights":
                self.left_weights.append(names[0])
            if self.only.is_overridden(field, prefix + saved[0]):
                self.downgrades.append(
                    f"{place_of(field, names[0])} stays as it is here: override="
                )
            return ()
        pairs = zip(names, saved, strict=True)
        self.renamed |= {(field, name): other for name, other in pairs if name != other}
        return saved

    def list_renamed(self) -> tuple[tuple[str, str], ...]:
        """Return the live and saved names, with fields, of items saved under other names."""
        return tuple(
            (f"{field}:{name}", saved if saved.startswith("extra:") else f"{field}:{saved}")
            for (field, name), saved in sorted(self.renamed.items())
        )

    def note_destination(self, saved: IndexTensor, live_name: str, saved_name: str) -> None:
        """Report a tensor that was tied under several names at the save, and isn't tied now."""
        first_live, first_saved = self._destinations.setdefault(saved.key, (live_name, saved_name))
        if first_saved != saved_name:
            self.downgrades.append(
                f"{saved.field}:{live_name} was one tensor with {first_live} when saved (tied),"
                " and isn't here"
            )

    # --- look up ----------------------------------------------------------------------------------

    def tensor(self, field: str, names: Iterable[str], scope: str) -> IndexTensor | None:
        """Return the first existing saved tensor among `names`, and mark the tensor as taken.

        If the wanted scope has no such tensor, another scope is searched, and the substitution is
        reported.

        Returns: None if no scope has the tensor.
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
        """Return name, scope and value of the saved leaf of the first of `names` that exists.

        The leaf is marked as taken. The value is `MISSING` if no scope has the leaf.
        """
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
        return (
            (GLOBAL, own, worker_scope(0)) if scope == GLOBAL else (scope, GLOBAL, worker_scope(0))
        )

    def _report_scope(self, field: str, name: str, wanted: str, found: str) -> None:
        if wanted == found:
            return
        at, names = self._elsewhere.setdefault((wanted, found), (len(self.downgrades), []))
        if not names:
            self.downgrades.append("")
        names.append(place_of(field, name))
        shown = _shorten(names)
        count = self.checkpoint.manifest.origin.writer_count
        if found == GLOBAL:
            said = "saved once for all processes, and each has its own here"
        elif wanted == GLOBAL:
            said = (
                f"each of {count} processes saved its own, and {_process(found)}'s is taken for all"
            )
        else:
            said = (
                f"{_process(wanted)} saved none, as one of {count} processes, and takes"
                f" {_process(found)}'s"
            )
        self.downgrades[at] = f"{shown}: {said}"

    def note_option(self, where: str, key: str, live: object, saved: object) -> None:
        """Report that an optimizer group's saved option replaces a different live value.

        Each option has a single note, for all groups together.
        """
        at, changes = self._options.setdefault(key, (len(self.notes), []))
        if not changes:
            self.notes.append("")
        changes.append((where, live, saved))
        places: dict[tuple[str, str], list[str]] = {}
        for place, before, after in changes:
            places.setdefault((repr(before), repr(after)), []).append(place)
        told = [
            (
                f"{before} here, {after} as saved"
                f" ({same[0]}{f' and {len(same) - 1} more' if len(same) > 1 else ''})"
            )
            for (before, after), same in places.items()
        ]
        more = (
            f"; and {len(told) - _OPTIONS_SHOWN} more values" if len(told) > _OPTIONS_SHOWN else ""
        )
        said = f"{'; '.join(told[:_OPTIONS_SHOWN])}{more}"
        self.notes[at] = f"{key}: {said}; the saved value is taken, unless override= names it"

    # --- problems ---------------------------------------------------------------------------------

    def problem(self, code: Code, where: str, detail: str, *, remedy: str | None = None) -> bool:
        """Record a problem, and return whether the caller allows the problem.

        An allowed problem becomes a downgrade, and the load goes on.
        """
        if _ALLOWED_BY.get(code) in self.allow:
            self.downgrades.append(f"{code} at {where}: {detail}")
            return True
        self.problems.append(Problem(code, where, detail, remedy))
        return False

    def miss(self, field: str, name: str, detail: str, *, shape: tuple[int, ...]) -> None:
        """Record a live tensor that wasn't saved."""
        self.missing[field, name] = shape
        self.problem(Code.TENSOR_MISSING, place_of(field, name), detail)

    def check(self) -> None:
        """Raise an error that lists all problems, if there are any.

        The error's code is the first problem's. Problems of this code come first. At most ten
        problems of each code are listed, and the rest is counted.
        """
        if not self.problems:
            return
        first = self.problems[0]
        by_code = dict[Code, list[Problem]]()
        for problem in self.problems:
            by_code.setdefault(problem.code, []).append(problem)
        detail = first.detail
        for code, same in by_code.items():
            begin = "" if code is first.code else f"{code} at "
            named = [
                f"; {begin}{problem.where}: {problem.detail}"
                for problem in same[:_SHOWN]
                if problem is not first
            ]
            detail += "".join(named) + (
                f"; and {len(same) - _SHOWN} more" if len(same) > _SHOWN else ""
            )
        raise err(first.code, detail, where=first.where, remedy=first.remedy)

    def list_idle_patterns(self, *, has_streams: bool) -> list[str]:
        """Return the patterns of `only` that match saved items, but none that this load takes.

        Args:
            has_streams: whether RNG streams are restored.
        """
        taken = {(key[0], name) for key in self.taken_tensors for name in self._names_of(key)}
        for field, name, _ in self.taken_leaves:
            taken |= {(field, name), (field, name.replace(_STATE, "", 1))}
        taken |= {("rng", name) for name, _ in self.checkpoint.streams if has_streams}
        idle = []
        for pattern in self.only.patterns or ():
            alone = Only(pattern)
            saved = {one for one in iter_saved(self.checkpoint) if alone.fits(*one)}
            if saved and not any(
                one in taken or one[0] in _COMPARED or self.only.is_overridden(*one)
                for one in saved
            ):
                idle.append(pattern)
        return idle

    def refuse_idle_patterns(self, idle: Iterable[str]) -> None:
        """Add a problem for each pattern of `only` that matches no item which the State takes.

        If the caller allows ``unexpected``, and another pattern loads an item, the pattern is only
        reported.

        Args:
            idle: the patterns that are idle in all processes.
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
        prefixes = [
            {one.removesuffix(live) for _, one in saved if one.endswith(live)}
            for live in self.left_weights
        ]
        common = set.intersection(*prefixes) if prefixes else set()
        begins = sorted(prefix for prefix in common if prefix[-1] in _JOINTS)
        if len(begins) == 1:
            prefix = f"extra:{begins[0].removeprefix(_EXTRA)}"
            remedy += (
                f" The live weights take it with only={prefix.rstrip(_JOINTS)!r},"
                f" rename={{'': {prefix!r}}}."
            )
        return remedy

    def _names_of(self, key: TensorKey) -> tuple[str, ...]:
        return (key[1], *self.checkpoint.tensors[key].aliases)

    def leftover(self, fields: Iterable[str]) -> frozenset[tuple[str, TensorKey]]:
        """Return the saved items of some fields that this load didn't take.

        Items of another worker that also loads are excluded.

        Returns: pairs of ``tensor`` or ``leaf`` and the item's key.
        """
        fields = set(fields)
        tensors = {
            ("tensor", key) for key in self.checkpoint.tensors if key not in self.taken_tensors
        }
        leaves = {("leaf", key) for key in self.checkpoint.leaves if key not in self.taken_leaves}
        mine = {
            (kind, key)
            for kind, key in tensors | leaves
            if key[0] in fields and self._is_mine(key[2])
        }
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
        """Return whether a saved value consists of tensors only, and the load took all of them.

        Weights can take the tensors of ``State(extra=...)``.
        """
        values = (
            [*iter_values(self.checkpoint.leaf(*key))]
            if place_of(*key[:2]).startswith("extra:")
            else []
        )
        found = [
            self.checkpoint.find(key[0], one.name, key[2])
            for one in values
            if isinstance(one, TensorRef)
        ]
        return len(found) == len(values) > 0 and all(
            one and one.key in self.taken_tensors for one in found
        )

    def _is_mine(self, scope: str) -> bool:
        return (
            scope in (GLOBAL, worker_scope(self.worker))
            or int(scope.removeprefix("lw/")) >= self.worker_count
        )

    def refuse_leftover(self, leftover: frozenset[tuple[str, TensorKey]]) -> None:
        """Add a problem for each saved item that no process takes.

        Items of workers that no longer exist are only reported.
        """
        gone = 0
        tensors = (
            self.checkpoint.tensors[key] for kind, key in sorted(leftover) if kind == "tensor"
        )
        unused = [*self.unused, *(one for one in tensors if one.storage == "persistent")]
        renaming = guess_renaming(self.missing, unused)
        unmatched = [] if renaming else list_unmatched(self.missing, unused)
        if renaming and {"missing", "unexpected"} <= self.allow:
            self.downgrades.append(
                f"tensors that weren't saved may have had other names: rename={renaming!r}"
            )
        for kind, (field, name, scope) in sorted(leftover):
            if scope != GLOBAL and scope != worker_scope(self.worker):
                gone += 1
                continue
            tensor = self.checkpoint.tensors.get((field, name, scope)) if kind == "tensor" else None
            if tensor is not None and tensor.storage != "persistent":
                self.downgrades.append(
                    f"{field}:{name}: saved as a non-persistent buffer, and nothing here takes it"
                )
                continue
            if self.is_imported and field != "weights":
                self.downgrades.append(
                    f"{place_of(field, name)} was imported, and nothing here takes it"
                )
                continue
            code = Code.TENSOR_UNEXPECTED if kind == "tensor" else Code.LEAF_UNEXPECTED
            suffix = "" if scope == GLOBAL else f" by {_process(scope)}"
            self.problem(code, place_of(field, name), f"saved{suffix}, and nothing here takes it")
        self._name_values()
        if gone:
            self.downgrades.append(
                f"{gone} tensors and values of workers that no longer exist are left"
            )
        offer = _offer_renaming(renaming) if renaming else self._offer_rest(unmatched)
        self.problems = [_offer(offer, problem) if offer else problem for problem in self.problems]

    def _offer_rest(self, unmatched: Sequence[str]) -> str:
        """Return advice to load only the modules whose tensors all fit; an empty text if none does.

        Args:
            unmatched: saved tensors that may be missing live tensors with new names.
        """
        wrong = {
            problem.where
            for problem in self.problems
            if problem.code in (*_OF_NAMES, Code.SHAPE_MISMATCH)
        }
        wrong = {where.removeprefix("weights:") for where in wrong if where.startswith("weights:")}
        if not wrong:
            return ""
        offer = ""
        if unmatched:
            shown = _shorten(unmatched)
            offer = (
                "Which saved tensor belongs to which live name can't be told from their shapes;"
                " nothing here takes"
                f" {shown}. If only names differ, the argument rename= maps live names to saved"
                " ones. "
            )
        fitting = {key[1] for key in self.taken_tensors if key[0] == "weights"} - wrong
        rest = _list_whole_modules(fitting, wrong)
        if not rest or self.renaming or self.only.patterns not in {None, ("weights:*",)}:
            return offer
        patterns = [f"weights:{name}" for name in rest]
        return (
            f"{offer}To keep new tensors as made here, and load the rest, pass"
            f" only={patterns!r} to"
            " ckptfmt.load; a new run begins from the rest with"
            f" Checkpointer(NEW, state, init_from=InitFrom({self.checkpoint.store.name!r},"
            f" only={patterns!r})). "
        )

    def _name_values(self) -> None:
        """Add remedies to problems with values of ``State(extra=...)``."""
        wanted, saved = (
            [
                problem.where
                for problem in self.problems
                if problem.code is code and problem.where.startswith("extra:")
            ]
            for code in (Code.LEAF_MISSING, Code.LEAF_UNEXPECTED)
        )
        renamed = _offer_renaming({wanted[0]: saved[0]}) if wanted and saved else ""
        for number, problem in enumerate(self.problems):
            name = problem.where.removeprefix("extra:")
            if problem.where in saved:
                remedy = (
                    f"{renamed}Give it to State: extra={_nested(name)};"
                    " allow=('unexpected',) leaves it out."
                )
            elif problem.where in wanted:
                remedy = f"{renamed}allow=('missing',) keeps the live one."
            else:
                continue
            self.problems[number] = dataclasses.replace(problem, remedy=problem.remedy or remedy)


def _nested(name: str) -> str:
    """Return the mapping for a name, as a program writes it.

    >>> _nested("best/epoch")
    "{'best': {'epoch': ...}}"
    """
    text = "..."
    for key in reversed(name.split("/")):
        text = f"{{{key!r}: {text}}}"
    return text


def _process(scope: str) -> str:
    return f"process {scope.removeprefix('lw/')}"


#: The error codes that differing names cause.
_OF_NAMES: Final = (
    Code.TENSOR_MISSING,
    Code.TENSOR_UNEXPECTED,
    Code.LEAF_MISSING,
    Code.LEAF_UNEXPECTED,
)


def _offer_renaming(renaming: Mapping[str, str]) -> str:
    return (
        f"If only the names differ, pass rename={renaming!r} to ckptfmt.load. A run goes on under"
        " other names in"
        " another directory: Checkpointer(NEW, state, init_from=InitFrom(RUN, only=None,"
        f" rename={renaming!r})). "
    )


def _offer(offer: str, problem: Problem) -> Problem:
    """Return a problem with an offer before the remedy.

    Only problems of names or shapes in weights and optimizers get the offer.
    """
    is_about = problem.code in (*_OF_NAMES, Code.SHAPE_MISMATCH)
    if not is_about or problem.where.partition(":")[0] not in ("weights", "optimizer"):
        return problem
    return dataclasses.replace(problem, remedy=f"{offer}{problem.remedy or problem.code.remedy}")


def _list_whole_modules(fitting: set[str], wrong: set[str]) -> list[str]:
    """Return the outermost names beneath which all tensors fit.

    Returns: an empty list if a module directly holds both fitting and wrong tensors, or if the list
        would be long.

    >>> _list_whole_modules({"body.0.weight", "body.1.weight", "norm.weight"}, {"head.weight",
    ...     "head.bias"})
    ['body', 'norm']
    >>> _list_whole_modules({"2.bias"}, {"2.weight", "0.weight", "0.bias"})
    []
    """
    if {_owner(name) for name in fitting} & {_owner(name) for name in wrong}:
        return []
    blocked = {begin for name in wrong for begin in _iter_beginnings(name)}
    found = {
        next((begin for begin in _iter_beginnings(name) if begin not in blocked), name)
        for name in fitting
    }
    return sorted(found) if len(found) <= _SHOWN else []


def _owner(name: str) -> str:
    """Return the name of the module or container that holds a tensor."""
    return name[: max(name.rfind(joint) for joint in _JOINTS) + 1]


def _iter_beginnings(name: str) -> Iterator[str]:
    """Yield each prefix of a name up to a separator, shortest first, and then the name."""
    yield from (name[:at] for at, letter in enumerate(name) if letter in _JOINTS)
    yield name


def guess_renaming(
    missing: Mapping[tuple[str, str], tuple[int, ...]], unused: Sequence[IndexTensor]
) -> dict[str, str]:
    """Return a guess of the saved names of missing live tensors, as ``rename=`` takes them.

    Names with a common end and tensors of the same shape are matched. The remaining beginnings form
    the renaming. The guess is empty unless each live name gets exactly one saved name.

    Args:
        missing: the shapes of live tensors, by field and name.
        unused: saved tensors that the load doesn't take.

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


def list_unmatched(
    missing: Mapping[tuple[str, str], tuple[int, ...]], unused: Sequence[IndexTensor]
) -> list[str]:
    """Return the places of unused saved tensors if any of them may be a missing live tensor.

    Args:
        missing: the shapes of live tensors, by field and name.
        unused: saved tensors that the load doesn't take.

    Shapes: global.
    """
    wanted = {(field, shape) for (field, _), shape in missing.items()}
    if not any((tensor.field, tensor.global_shape) in wanted for tensor in unused):
        return []
    return sorted({place_of(tensor.field, tensor.name) for tensor in unused})


def _common_end(left: str, right: str) -> int:
    """Return the length of the longest common end of two names that begins with a separator."""
    length = 0
    for at, (one, other) in enumerate(zip(reversed(left), reversed(right), strict=False), 1):
        if one != other:
            break
        if one in _JOINTS:
            length = at
    return length


def _shorten(names: Sequence[str]) -> str:
    """Return the first names as text, with the number of names left out."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

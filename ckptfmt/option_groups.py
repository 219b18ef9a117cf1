"""The options of `Checkpointer` in groups, and the replaced keywords of version 0.9."""

from __future__ import annotations

import dataclasses
import difflib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict

from ckptfmt.adapters.load_plan import Allow, check_allow
from ckptfmt.errors import Code, check_flags, err
from ckptfmt.group import DEADLINE_S, Agree, check_deadline
from ckptfmt.loop.loop import StopSignals, parse_mtbf
from ckptfmt.run.node_cache import Cache
from ckptfmt.run.retention import KeepBest, Retention
from ckptfmt.saving.saves import Saving
from ckptfmt.signing.trust import Trust
from ckptfmt.store.protocol import Store

if TYPE_CHECKING:
    from ckptfmt.loop.healer import Healer
    from ckptfmt.loop.triggers import Triggers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """The choice of the interval with the least waste, for ``Checkpointer(every=)``.

    Process 0 computes the interval from the measured cost of saves and the observed failures of
    launches. ``every="auto"`` is the same as ``every=Auto()``. The log has the chosen interval.

    Attributes:
        mtbf: expected mean time between failures until the first failure: a number with a unit,
            such as "90s", "30min" or "3h". By default None, for 50,700 hours divided by the number
            of processes.

    Raises: StateError(ARGUMENT) for text without a number and a unit.

    >>> Auto(mtbf="3h")
    Auto(mtbf='3h')
    """

    mtbf: str | None = None

    def __post_init__(self) -> None:
        if self.mtbf is not None:
            parse_mtbf(self.mtbf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """The options of the load with which a launch resumes, for ``Checkpointer(loading=)``.

    Attributes:
        allow: kinds of differences between the checkpoint and the live state to report instead of
            to refuse, such as ``("missing",)``; by default none. See `ckptfmt.load`.
        strict: whether RNG streams of another number of processes, or of other devices, are an
            error instead of a report; by default False.
        override: live values to keep although the checkpoint has other values; by default none. The
            claim is lowered, and the log has both values. Names as in the checkpoint, or patterns
            of names: ``"optimizer:group/lr"`` for an option of an optimizer's parameter groups,
            ``"extra:scheduler"`` for a value of `State.extra`.
        share: whether a block wanted by several processes is read by a single process, and sent to
            the rest through torch.distributed; by default False. See `ckptfmt.load`.
        require_signature: the signers of a checkpoint from which the run goes on: a `Trust`, or the
            file of a public key. Without a trusted signature, the start ends with TrustError, and
            no older checkpoint is taken instead. By default None, for any checkpoint.

    Raises: StateError(ARGUMENT) for an unknown kind of difference, and as `Trust`.

    >>> Loading(override=["optimizer:group/lr"]).override
    ('optimizer:group/lr',)
    """

    allow: Allow = ()
    strict: bool = False
    override: Iterable[str] = ()
    share: bool = False
    require_signature: Trust | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "require_signature", Trust.of(self.require_signature))
        # Iterators are read once, here.
        override = (self.override,) if isinstance(self.override, str) else tuple(self.override)
        object.__setattr__(self, "allow", check_allow(self.allow))
        object.__setattr__(self, "override", override)
        check_flags(self, "strict", "share")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """Another place with a copy of the run, for ``Checkpointer(copies=)``.

    Process 0 copies the committed checkpoints there, as `Run.mirror` does. `Checkpointer.reports`
    has the failures of a mirror; the training goes on.

    Attributes:
        place: directory or URL of the copy, or a store rooted there.

    Raises: StateError(ARGUMENT) for a number or None.

    >>> Mirror("/elsewhere/my-run")
    Mirror(place='/elsewhere/my-run')
    """

    place: str | os.PathLike[str] | Store = dataclasses.field(kw_only=False)

    def __post_init__(self) -> None:
        _check_place(self.place, "Mirror(place=)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """Two other homes of the run, for ``Checkpointer(copies=)``: a region may be lost.

    A launch saves at the run's place if possible, and its saves are copied to the other homes. If
    the place doesn't answer at a start, the launch goes on at another home by itself. The votes of
    two of the three homes decide which launch may commit, so that no second launch goes on
    elsewhere. At most one save is lost with a home.

    Attributes:
        places: directories or URLs of two other homes, or stores rooted there. Every start has the
            same homes, in the same order.
        away_after_s: time after which a home that doesn't answer counts as away, in seconds; by
            default 60.

    Raises: StateError(ARGUMENT) unless there are two places, and for a time of 0 or less.

    >>> Homes(["s3://europe/my-run", "s3://asia/my-run"]).away_after_s
    60.0
    """

    places: Sequence[str | os.PathLike[str] | Store] = dataclasses.field(kw_only=False)
    away_after_s: float = 60.0

    def __post_init__(self) -> None:
        is_text = isinstance(self.places, str | os.PathLike)
        places = () if is_text else _as_tuple(self.places, "Homes(places)", "places")
        if len(places) != _OTHER_HOMES:
            raise err(
                Code.ARGUMENT,
                f"{self.places!r} aren't two places",
                where="Homes(places)",
                remedy="Pass Homes([PLACE, PLACE]), with two other homes beside the run: two of"
                " three homes decide when one is away. For a copy without a vote, pass a Mirror.",
            )
        for place in places:
            _check_place(place, "Homes(places)")
        object.__setattr__(self, "places", places)
        if not 0 < self.away_after_s <= _AWAY_AFTER_MAX_S:
            detail = f"away_after_s={self.away_after_s!r} isn't a time of at most a day"
            remedy = "Pass a time in seconds, such as away_after_s=60."
            raise err(Code.ARGUMENT, detail, where="away_after_s=", remedy=remedy)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The processes of the job, and how they reach each other, for ``Checkpointer(job=)``.

    Attributes:
        writer: number of this process and number of processes; by default None, to ask
            torch.distributed or jax.distributed, else ``(0, 1)``.
        agree: the exchange of small values between the processes: an all-gather of bytes, or a
            token, equal on all processes and new at each start; by default None, for the key-value
            store of torch.distributed. See `ckptfmt.save`.
        deadline_s: longest wait for the other processes, for a free slot, and for the saves at the
            end, in seconds; by default 600.
        lost: returns whether a process of the job is lost, as the program's own rendezvous knows;
            by default None. The function is called a few times a second while this process waits
            for the others, and ends the wait with WRITERS_MISSING. See `Checkpointer.regroup`. A
            function in `agree` waits by itself.

    Raises: StateError(ARGUMENT) for a deadline of 0 or less, and unless `lost` is a function.
        `Checkpointer` checks `writer` and `agree`.

    >>> Job(writer=(0, 1)).deadline_s
    600.0
    """

    writer: tuple[int, int] | None = None
    agree: Agree = None
    deadline_s: float = DEADLINE_S
    lost: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        check_deadline(self.deadline_s)
        if self.lost is not None and not callable(self.lost):
            raise err(
                Code.ARGUMENT,
                f"lost={self.lost!r} isn't a function",
                where="Job(lost)",
                remedy="Pass a function without arguments that returns whether a process is lost.",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The reasons to save and end the training before its last step, for ``Checkpointer(stop=)``.

    Attributes:
        signals: signals to stop at, such as ``signal.SIGTERM``; by default none. The run is saved
            at the end of the step, `Checkpointer.steps` ends, and `Checkpointer.stopped` is true.
        deadline_s: longest time for such a stop, in seconds; by default 30. Also the longest wait
            for missing processes after a signal from torchrun, which sends the signal when a
            process is lost.
        triggers: conditions that stop the training, and the action that follows; by default None.
            See `Triggers`.
        healer: decisions after failures, so that no launch repeats a failure for ever; by default
            None. See `Healer`. Requires ``Checks(witness=True)``.

    Raises: StateError(ARGUMENT) for an unknown signal number, for SIGKILL and SIGSTOP, and for a
        deadline of 0 or less.

    >>> Stop(deadline_s=10).signals
    ()
    """

    signals: Iterable[int] = ()
    deadline_s: float = 30.0
    triggers: Triggers | None = None
    healer: Healer | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "signals", _as_tuple(self.signals, "signals=", "signal numbers"))
        self.make_signals()
        if self.triggers is not None and not hasattr(self.triggers, "look"):
            raise err(
                Code.ARGUMENT,
                f"{self.triggers!r} isn't a ckptfmt.Triggers",
                where="Stop(triggers=)",
                remedy="Pass Stop(triggers=ckptfmt.Triggers()).",
            )
        if self.healer is not None and not hasattr(self.healer, "quarantine"):
            raise err(
                Code.ARGUMENT,
                f"{self.healer!r} isn't a ckptfmt.Healer",
                where="Stop(healer=)",
                remedy="Pass Stop(healer=ckptfmt.Healer()).",
            )

    def make_signals(self) -> StopSignals:
        """Return a new watch over the signals, which a `Checkpointer` installs."""
        return StopSignals(self.signals, deadline_s=self.deadline_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """The checks of a training while it runs, for ``Checkpointer(checks=)``.

    Attributes:
        witness: whether to record a few bytes of each step in the run, and to compare the steps
            repeated after a resume with their records; by default True. The claim T1 is then
            verified, or refuted with the first difference and its cause.
        rehearse: number of steps that `Checkpointer.steps` repeats after the first save of a launch
            from nothing: the checkpoint is loaded into the live state, and the witness compares
            both passes. 0 (the default) for no repetition. `ckptfmt rehearse` is the rehearsal that
            kills processes.
        replicas: whether the processes that hold the same tensor of a mesh compare its digests at
            each save; by default False.

    Raises: StateError(ARGUMENT) for a number of steps below 0. `Checkpointer` refuses `rehearse`
        with as many steps as ``every=`` has.

    >>> Checks(rehearse=3).witness
    True
    """

    witness: bool = True
    rehearse: int = 0
    replicas: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "witness", "replicas")
        if type(self.rehearse) is not int or self.rehearse < 0:
            raise err(
                Code.ARGUMENT,
                f"rehearse={self.rehearse!r} isn't a number of steps",
                where="rehearse=",
                remedy="Pass a number of steps from 0 on, such as Checks(rehearse=3).",
            )


#: Number of other homes: a majority of three is two, also while one home is away.
_OTHER_HOMES: Final = 2
#: Longest time after which a home counts as away, in seconds.
_AWAY_AFTER_MAX_S: Final = 86_400.0


def _check_place(given: object, where: str) -> None:
    """Refuse a number or None in place of a place. Raises: StateError(ARGUMENT)."""
    if given is None or isinstance(given, int | float):
        raise err(
            Code.ARGUMENT,
            f"{given!r} isn't a place",
            where=where,
            remedy="Pass a directory, a URL or a store, as for Run.mirror.",
        )


def _as_tuple(given: Iterable[Any], where: str, kind: str) -> tuple[Any, ...]:
    try:
        return tuple(given)
    except TypeError as error:
        remedy = f"Pass a list of {kind}, also for a single entry."
        raise err(Code.ARGUMENT, f"{given!r} isn't a list", where=where, remedy=remedy) from error


def _divide_copies(
    given: Iterable[Cache | Mirror | Homes],
) -> tuple[Cache | None, tuple[str | os.PathLike[str] | Store, ...], Homes | None]:
    """Return the cache of ``copies=``, if any, the places of the mirrors, and the other homes.

    Raises: StateError(ARGUMENT).
    """
    copies = _as_tuple(given or (), "copies=", "Cache, Mirror and Homes objects")
    remedy = "Pass copies=[ckptfmt.Cache(DIRECTORY), ckptfmt.Mirror(PLACE), ...]."
    for copy in copies:
        if not isinstance(copy, Cache | Mirror | Homes):
            detail = f"{copy!r} is neither a Cache nor a Mirror, and no Homes"
            raise err(Code.ARGUMENT, detail, where="copies=", remedy=remedy)
    caches = [copy.absolute() for copy in copies if isinstance(copy, Cache)]
    if len(caches) > 1:
        raise err(
            Code.ARGUMENT,
            f"{len(caches)} caches are given, and a process has one at most",
            where="copies=",
            remedy="Pass a single Cache; the number of mirrors is free.",
        )
    homes = [copy for copy in copies if isinstance(copy, Homes)]
    if len(homes) > 1 or (homes and caches):
        given_text = "a Cache and Homes" if caches else f"{len(homes)} Homes"
        raise err(
            Code.ARGUMENT,
            f"{given_text} are given together",
            where="copies=",
            remedy="Pass a single Homes with both other places, and no Cache: a save in a cache is"
            " at no home.",
        )
    mirrors = tuple(copy.place for copy in copies if isinstance(copy, Mirror))
    return caches[0] if caches else None, mirrors, homes[0] if homes else None


# --- the keywords of version 0.9 -----------------------------------------------------------------


class OldKeywords(TypedDict, total=False):
    """The replaced keywords of `Checkpointer` of version 0.9."""

    mtbf: str | None
    keep_every: int | None
    keep_best: KeepBest | None
    mirrors: Iterable[str | os.PathLike[str] | Store]
    cache: str | os.PathLike[str] | None
    cache_nbytes: int | None
    peers: int
    node: str | None
    upload_every: int
    allow: Allow
    strict: bool
    override: Iterable[str]
    share: bool
    writer: tuple[int, int] | None
    agree: Agree
    deadline_s: float
    saver: Literal["process", "thread", "inline"]
    overlap: bool
    slots: int
    when_busy: Literal["wait", "skip"]
    nice: int
    delta: Literal["off", "auto", "smallest"] | Mapping[str, Any]
    failed_saves: int
    check_replicas: bool
    stop_on: Iterable[int]
    stop_deadline_s: float
    triggers: Triggers | None
    witness: bool
    rehearse: int


class NewForm(NamedTuple):
    """The place of an old keyword's value now.

    Attributes:
        keyword: keyword of `Checkpointer`.
        group: class of the keyword's value, or of its entries.
        field: field of the class.
    """

    keyword: str
    group: type
    field: str

    def show(self, value: str) -> str:
        """Return the new form as text, for a text of the value."""
        made = f"ckptfmt.{self.group.__name__}({self.field}={value})"
        return f"{self.keyword}=[{made}]" if self.keyword == "copies" else f"{self.keyword}={made}"


#: Each old keyword, with the group and field of its value now.
OLD_KEYWORDS: Final[Mapping[str, NewForm]] = {
    "mtbf": NewForm("every", Auto, "mtbf"),
    "keep_every": NewForm("keep", Retention, "every"),
    "keep_best": NewForm("keep", Retention, "best"),
    "mirrors": NewForm("copies", Mirror, "place"),
    "cache": NewForm("copies", Cache, "path"),
    "cache_nbytes": NewForm("copies", Cache, "limit_nbytes"),
    "upload_every": NewForm("copies", Cache, "upload_every"),
    "peers": NewForm("copies", Cache, "peers"),
    "node": NewForm("copies", Cache, "node"),
    "allow": NewForm("loading", Loading, "allow"),
    "strict": NewForm("loading", Loading, "strict"),
    "override": NewForm("loading", Loading, "override"),
    "share": NewForm("loading", Loading, "share"),
    "saver": NewForm("saving", Saving, "saver"),
    "overlap": NewForm("saving", Saving, "overlap"),
    "slots": NewForm("saving", Saving, "slots"),
    "when_busy": NewForm("saving", Saving, "when_busy"),
    "nice": NewForm("saving", Saving, "nice"),
    "delta": NewForm("saving", Saving, "delta"),
    "failed_saves": NewForm("saving", Saving, "failed_saves"),
    "writer": NewForm("job", Job, "writer"),
    "agree": NewForm("job", Job, "agree"),
    "deadline_s": NewForm("job", Job, "deadline_s"),
    "stop_on": NewForm("stop", Stop, "signals"),
    "stop_deadline_s": NewForm("stop", Stop, "deadline_s"),
    "triggers": NewForm("stop", Stop, "triggers"),
    "witness": NewForm("checks", Checks, "witness"),
    "rehearse": NewForm("checks", Checks, "rehearse"),
    "check_replicas": NewForm("checks", Checks, "replicas"),
}
#: Old keywords with a truth value, which took any object.
_OLD_FLAGS: Final = frozenset({"check_replicas", "overlap", "share", "strict", "witness"})
#: Start of the warning about old keywords.
OLD_KEYWORD_WARNING: Final = "old keywords of Checkpointer"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a `Checkpointer` in groups, each with its value.

    Attributes:
        every: interval of saves, as `parse_every` takes it.
        mtbf: mean time between failures for ``every="auto"``; None for the default.
        keep: rules of retention.
        loading, saving, job, stop, checks: the groups.
        cache: the cache, with an absolute path; None for no cache.
        mirrors: places of the mirrors.
        homes: the other homes; None for a run with one home.
    """

    every: int | str | None
    mtbf: str | None
    keep: Retention
    loading: Loading
    saving: Saving
    cache: Cache | None
    mirrors: tuple[str | os.PathLike[str] | Store, ...]
    homes: Homes | None
    job: Job
    stop: Stop
    checks: Checks

    @classmethod
    def of(cls, given: Mapping[str, Any], deprecated: Mapping[str, Any]) -> Options:
        """Return the options of a caller, whose keywords may be of version 0.9.

        Args:
            given: keywords of `Checkpointer` by name, with None for an absent group.
            deprecated: other keywords. The warning about old keywords names the caller of the
                function around the call of this method.

        Raises: TypeError for an unknown keyword; StateError(ARGUMENT).
        """
        found = dict(given)
        if deprecated:
            deprecated = dict(deprecated)
            if "mirrors" in deprecated:
                deprecated["mirrors"] = _as_tuple(deprecated["mirrors"], "mirrors=", "places")
            _check_known(deprecated, found.keys())
            _check_alone(deprecated, found)
            warnings.warn(_tell_new_form(deprecated, found), DeprecationWarning, stacklevel=3)
            found |= _make_groups(deprecated, found)
        every = found["every"]
        mtbf = found.pop("mtbf", None)
        if isinstance(every, Auto):
            mtbf = every.mtbf
            every = "auto"
        saving = _check_group(found["saving"], "saving", Saving)
        cache, mirrors, homes = _divide_copies(found["copies"])
        if cache is not None and saving.saver == "inline":
            remedy = "Pass saver='process' or saver='thread': the upload goes on behind the save."
            raise err(Code.ARGUMENT, "saver='inline' has no cache", where="cache=", remedy=remedy)
        return cls(
            every=every,
            mtbf=mtbf,
            keep=Retention.of(found["keep"]),
            loading=_check_group(found["loading"], "loading", Loading),
            saving=saving,
            cache=cache,
            mirrors=mirrors,
            homes=homes,
            job=_check_group(found["job"], "job", Job),
            stop=_check_group(found["stop"], "stop", Stop),
            checks=_check_group(found["checks"], "checks", Checks),
        )

    def for_rehearsal(self, every: int) -> Options:
        """Return the options of a rehearsal by `ckptfmt rehearse`, which saves every so many steps.

        The run has no copies elsewhere, and the witness is on.
        """
        return dataclasses.replace(
            self,
            every=every,
            mtbf=None,
            cache=None,
            mirrors=(),
            homes=None,
            checks=dataclasses.replace(self.checks, witness=True, rehearse=0),
        )


def _check_group(given: Any, keyword: str, group: type) -> Any:
    """Return a group, by default with its default values. Raises: StateError(ARGUMENT)."""
    if given is None:
        return group()
    if not isinstance(given, group):
        raise err(
            Code.ARGUMENT,
            f"{given!r} isn't a ckptfmt.{group.__name__}",
            where=f"{keyword}=",
            remedy=f"Pass {keyword}=ckptfmt.{group.__name__}(...).",
        )
    return given


def _check_known(deprecated: Iterable[str], keywords: Iterable[str]) -> None:
    """Check that each keyword is one of version 0.9.

    Raises: TypeError with the nearest name for an unknown keyword.
    """
    unknown = next((name for name in deprecated if name not in OLD_KEYWORDS), None)
    if unknown is None:
        return
    texts = {name: f"{name}=" for name in (*keywords, "resume", "init_from", "ledger", "on_save")}
    for name, form in OLD_KEYWORDS.items():
        texts.setdefault(form.field, form.show("..."))
        texts[name] = form.show("...")
    near = next(iter(difflib.get_close_matches(unknown, texts, n=1)), None)
    meant = "" if near is None else f"; did you mean {texts[near]}?"
    raise TypeError(f"Checkpointer() got an unexpected keyword argument {unknown!r}{meant}")


def _list_meant(deprecated: Mapping[str, Any]) -> list[str]:
    """Return the old keywords with an effect: not ``mtbf=None``, or options of no cache."""
    return [
        name
        for name, value in deprecated.items()
        if not (
            (name == "mtbf" and value is None)
            or (name == "mirrors" and not value)
            or (OLD_KEYWORDS[name].group is Cache and deprecated.get("cache") is None)
        )
    ]


def _check_alone(deprecated: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Check that no old keyword stands beside the group with the same field.

    Raises: StateError(ARGUMENT).
    """
    for name in _list_meant(deprecated):
        form = OLD_KEYWORDS[name]
        value = given[form.keyword]
        if isinstance(value, form.group) or (form.keyword in _GROUPS and value):
            raise err(
                Code.ARGUMENT,
                f"{name}= and {form.keyword}= are given together",
                where=f"{name}=",
                remedy=f"Leave {name}= out, and pass {form.show('...')} with the other fields.",
            )


#: Keywords whose value is a group or a list of groups only.
_GROUPS: Final = frozenset({"loading", "saving", "copies", "job", "stop", "checks"})


def _tell_new_form(deprecated: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return the warning about old keywords: the new form with the caller's values."""
    fields: dict[tuple[str, type], list[str]] = {}
    mirrors: list[str] = []
    for name in _list_meant(deprecated):
        form = OLD_KEYWORDS[name]
        value = deprecated[name]
        if form.group is Mirror:
            mirrors += [f"ckptfmt.Mirror({place!r})" for place in value]
        else:
            fields.setdefault((form.keyword, form.group), []).append(f"{form.field}={value!r}")
    if ("keep", Retention) in fields:
        fields["keep", Retention].insert(0, f"newest={given['keep']!r}")
    groups = {
        keyword: f"ckptfmt.{group.__name__}({', '.join(texts)})"
        for (keyword, group), texts in fields.items()
    }
    copies = [*([groups.pop("copies")] if "copies" in groups else []), *mirrors]
    new = [f"{keyword}={text}" for keyword, text in groups.items()]
    if copies:
        new.append(f"copies=[{', '.join(copies)}]")
    remedy = f"Write Checkpointer(..., {', '.join(new)}) instead." if new else "Leave them out."
    return f"{OLD_KEYWORD_WARNING}, which end with ckptfmt 2.0: {', '.join(deprecated)}. {remedy}"


def _make_groups(deprecated: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups of old keywords, by keyword. Raises: StateError(ARGUMENT)."""
    made: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {}
    for name, value in deprecated.items():
        form = OLD_KEYWORDS[name]
        if form.group is not Mirror:
            given_value = bool(value) if name in _OLD_FLAGS else value
            fields.setdefault(form.keyword, {})[form.field] = given_value
    for keyword, values in fields.items():
        if keyword == "every":
            made |= values  # every= may be any interval: `make_meters` checks both
        elif keyword == "keep":
            made["keep"] = Retention(newest=given["keep"], **values)
        elif keyword == "copies":
            made["copies"] = _make_cache(values)
        else:
            group: Callable[..., Any] = next(
                form.group for form in OLD_KEYWORDS.values() if form.keyword == keyword
            )
            made[keyword] = group(**values)
    mirrors = map(Mirror, deprecated.get("mirrors", ()))
    if "mirrors" in deprecated or "copies" in made:
        made["copies"] = [*made.get("copies", ()), *mirrors]
    return made


def _make_cache(values: dict[str, Any]) -> list[Cache]:
    """Return the cache of old keywords in a list; an empty list for ``cache=None``.

    Raises: StateError(ARGUMENT).
    """
    path = values.pop("path", None)
    if path is not None:
        return [Cache(path, **values)]
    absent = Cache(os.curdir, **values)
    for name, detail, is_given in (
        ("limit_nbytes", "there is no cache to limit", absent.limit_nbytes is not None),
        ("upload_every", "without a cache all saves go home", absent.upload_every > 1),
        ("peers", "replicas lie in caches, and there is none", absent.peers > 0),
    ):
        if is_given:
            remedy = (
                f"Pass copies=[ckptfmt.Cache(DIRECTORY, {name}=...)], with a disk of this node."
            )
            raise err(Code.ARGUMENT, detail, where=f"{name}=", remedy=remedy)
    return []

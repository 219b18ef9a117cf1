"""The options of Checkpointer: groups, the keywords of version 0.9, and the events of saves."""

import contextlib
import dataclasses
import inspect
import logging
import signal
import threading
import warnings
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt.errors import CkptError, Code
from ckptfmt.option_groups import OLD_KEYWORD_WARNING, OLD_KEYWORDS, OldKeywords, Options
from ckptfmt.store.memory import MemoryStore
from tests.save.test_failed_saves import FULL as FULL_DISK
from tests.save.test_failed_saves import FailingStore, Outage

#: The package without types, for calls that a type checker refuses.
untyped: Any = ckptfmt
#: A value of each old keyword that isn't the default, and that needs no other keyword.
VALUES: dict[str, Any] = {
    "mtbf": "3h",
    "keep_every": 5,
    "keep_best": ("loss", "min", 1),
    "mirrors": ["elsewhere", "there"],
    "cache": "/cache",
    "cache_nbytes": 1 << 30,
    "upload_every": 4,
    "peers": 1,
    "node": "rack7",
    "allow": frozenset({"missing"}),
    "strict": True,
    "override": ("optimizer:group/lr",),
    "share": True,
    "saver": "thread",
    "overlap": False,
    "slots": 1,
    "when_busy": "skip",
    "nice": 3,
    "delta": "smallest",
    "failed_saves": 0,
    "writer": (0, 1),
    "agree": "token",
    "deadline_s": 12.0,
    "stop_on": [signal.SIGTERM],
    "stop_deadline_s": 3.0,
    "triggers": ckptfmt.Triggers(),
    "witness": False,
    "rehearse": 2,
    "check_replicas": True,
}
#: Keywords that others need beside them.
NEEDED: dict[str, dict[str, Any]] = {
    "mtbf": {"every": "auto"},
    "keep_every": {"keep": 2},
    "keep_best": {"keep": 2},
    "cache_nbytes": {"cache": "/cache"},
    "upload_every": {"cache": "/cache"},
    "peers": {"cache": "/cache"},
    "node": {"cache": "/cache", "peers": 1},
}
LEFT_OUT = {
    "every": None, "keep": None, "loading": None, "saving": None, "copies": (), "job": None, "stop": None,
    "checks": None,
}  # fmt: skip


def options_of(**given):
    """Return the options, and the texts of the warnings."""
    old = {name: given.pop(name) for name in list(given) if name not in LEFT_OUT}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = Options.of({**LEFT_OUT, **given}, old)
    assert all(one.category is DeprecationWarning for one in caught)
    return found, [str(one.message) for one in caught]


def make(**options):
    return ckptfmt.Checkpointer(MemoryStore(), ckptfmt.State(data={"n": 1}), **options)


def error_of(action) -> CkptError:
    with pytest.raises(CkptError) as caught:
        action()
    return caught.value


def test_at_most_twelve_keywords_beside_the_run_and_the_state():
    parameters = inspect.signature(ckptfmt.Checkpointer).parameters.values()
    named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    assert len(named) <= 12, named
    assert [one.name for one in parameters if one.kind is one.VAR_KEYWORD] == ["deprecated"]


def test_every_group_is_frozen_keyword_only_and_says_what_its_fields_are():
    groups: tuple[Any, ...] = (
        ckptfmt.Auto, ckptfmt.Cache, ckptfmt.Checks, ckptfmt.Job, ckptfmt.Loading, ckptfmt.Mirror,
        ckptfmt.Retention, ckptfmt.Saving, ckptfmt.Stop,
    )  # fmt: skip
    for group in groups:
        assert group.__dataclass_params__.frozen
        assert not hasattr(
            group("x") if group in (ckptfmt.Cache, ckptfmt.Mirror) else group(), "__dict__"
        )
        for field in dataclasses.fields(group):
            assert f"        {field.name}: " in group.__doc__, (group, field.name)
        assert "Raises: StateError(ARGUMENT)" in group.__doc__


def test_one_table_has_every_old_keyword():
    assert set(OLD_KEYWORDS) == set(VALUES) == OldKeywords.__optional_keys__
    for form in OLD_KEYWORDS.values():
        assert form.field in {field.name for field in dataclasses.fields(form.group)}


@pytest.mark.parametrize("name", OLD_KEYWORDS)
def test_an_old_keyword_is_the_field_of_a_group_and_warns_once(name):
    value = VALUES[name]
    found, told = options_of(**{name: value}, **NEEDED.get(name, {}))

    form = OLD_KEYWORDS[name]
    if form.group is ckptfmt.Auto:
        assert (found.every, found.mtbf) == ("auto", value)
        assert options_of(every=ckptfmt.Auto(mtbf=value)) == (found, [])
    elif form.group is ckptfmt.Mirror:
        assert found.mirrors == tuple(value)
    else:
        group = found.cache if form.group is ckptfmt.Cache else getattr(found, form.keyword)
        kept = getattr(group, form.field)
        assert kept == (tuple(value) if name == "stop_on" else value)
    assert len(told) == 1
    assert told[0].startswith(OLD_KEYWORD_WARNING)
    shown = value[0] if form.group is ckptfmt.Mirror else value
    assert f"{form.keyword}=" in told[0]
    assert f"ckptfmt.{form.group.__name__}(" in told[0]
    assert repr(shown) in told[0]


def test_the_warning_is_the_new_form_and_names_the_line_of_the_program():
    with pytest.warns(DeprecationWarning, match=OLD_KEYWORD_WARNING) as caught:
        make(keep=3, keep_every=10, slots=1, saver="inline", mirrors=[MemoryStore()], stop_on=[15])
    assert [one.filename for one in caught] == [__file__]
    text = str(caught[0].message)
    new = text.partition("Write ")[2].partition(" instead.")[0]
    assert "keep=ckptfmt.Retention(newest=3, every=10)" in new
    assert "saving=ckptfmt.Saving(slots=1, saver='inline')" in new
    assert "copies=[ckptfmt.Mirror(" in new
    assert "stop=ckptfmt.Stop(signals=[15])" in new


def test_the_new_form_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(
            every=ckptfmt.Auto(mtbf="3h"),
            keep=ckptfmt.Retention(newest=3, every=100),
            loading=ckptfmt.Loading(strict=True),
            saving=ckptfmt.Saving(saver="thread"),
            copies=[ckptfmt.Mirror(MemoryStore())],
            job=ckptfmt.Job(deadline_s=20),
            stop=ckptfmt.Stop(signals=[signal.SIGTERM]),
            checks=ckptfmt.Checks(witness=False),
            ledger=True,
            on_save=print,
        ).close()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"slots": 1}, {"saving": ckptfmt.Saving()}),
        ({"share": True}, {"loading": ckptfmt.Loading()}),
        ({"deadline_s": 3}, {"job": ckptfmt.Job()}),
        ({"stop_on": [15]}, {"stop": ckptfmt.Stop()}),
        ({"witness": False}, {"checks": ckptfmt.Checks()}),
        ({"keep_every": 5}, {"keep": ckptfmt.Retention(newest=1)}),
        ({"mtbf": "3h"}, {"every": ckptfmt.Auto()}),
        ({"cache": "/x"}, {"copies": [ckptfmt.Mirror("y")]}),
        ({"mirrors": ["y"]}, {"copies": [ckptfmt.Cache("/x")]}),
    ],
)
def test_an_old_keyword_beside_its_group_is_refused(old, new):
    error = error_of(lambda: make(**old, **new))
    assert error.code == Code.ARGUMENT
    assert error.where == f"{next(iter(old))}="
    assert "Leave" in (error.remedy or "")


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("evry", "every="),
        ("slot", "saving=ckptfmt.Saving(slots=...)"),
        ("stop_one", "stop=ckptfmt.Stop(signals=...)"),
        ("limit_nbytes", "copies=[ckptfmt.Cache(limit_nbytes=...)]"),
        ("onsave", "on_save="),
    ],
)
def test_an_unknown_keyword_is_a_type_error_with_the_nearest_name(keyword, hint):
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{keyword}'") as caught:
        make(**{keyword: 1})
    assert f"did you mean {hint}?" in str(caught.value)
    with pytest.raises(TypeError, match=r"'xxxxx'$"):
        make(xxxxx=1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: untyped.Auto(mtbf="soon"),
        lambda: untyped.Loading(allow=("mising",)),
        lambda: untyped.Loading(share="yes"),
        lambda: untyped.Saving(saver="proces"),
        lambda: untyped.Saving(slots=0),
        lambda: untyped.Saving(overlap=None),
        lambda: untyped.Saving(nice=20),
        lambda: untyped.Saving(failed_saves=-1),
        lambda: untyped.Saving(saver="inline", delta="auto"),
        lambda: untyped.Cache(None),
        lambda: untyped.Cache("s3://bucket/x"),
        lambda: untyped.Cache("/x", limit_nbytes=0),
        lambda: untyped.Cache("/x", upload_every=0),
        lambda: untyped.Cache("/x", peers=2),
        lambda: untyped.Cache("/x", node="a"),
        lambda: untyped.Mirror(None),
        lambda: untyped.Job(deadline_s=0),
        lambda: untyped.Stop(signals=[signal.SIGKILL]),
        lambda: untyped.Stop(signals=signal.SIGTERM),
        lambda: untyped.Stop(deadline_s=0),
        lambda: untyped.Stop(triggers="drain"),
        lambda: untyped.Checks(rehearse=-1),
        lambda: untyped.Checks(witness=1),
        lambda: untyped.Retention(newest=0),
        lambda: untyped.Retention(newest=1, every=0),
        lambda: untyped.Retention(best=("loss", "min", 1)),
        lambda: make(keep="3"),
        lambda: make(saving={"slots": 1}),
        lambda: make(copies=["/elsewhere"]),
        lambda: make(copies=untyped.Mirror("x")),
        lambda: make(copies=[untyped.Cache("/x"), untyped.Cache("/y")]),
        lambda: make(saving=untyped.Saving(saver="inline"), copies=[untyped.Cache("/x")]),
        lambda: make(on_save="log"),
    ],
)
def test_what_a_group_cannot_mean_is_refused_with_a_remedy(wrong):
    error = error_of(wrong)
    assert error.code == Code.ARGUMENT
    assert error.where
    assert error.remedy


def test_old_keywords_for_a_cache_without_a_cache_are_refused():
    for name in ("cache_nbytes", "upload_every", "peers", "node"):
        assert error_of(lambda name=name: options_of(**{name: VALUES[name]})).code == Code.ARGUMENT
    found, _ = options_of(cache=None, peers=0)
    assert (found.cache, found.mirrors) == (None, ())


def test_saver_is_the_old_name_of_path_saver():
    with pytest.warns(DeprecationWarning, match=r"ckptfmt\.PathSaver") as caught:
        assert ckptfmt.Saver is ckptfmt.PathSaver
    assert [one.filename for one in caught] == [__file__]
    assert "Saver" not in ckptfmt.__all__


# --- the events of saves -------------------------------------------------------------------------


@pytest.mark.parametrize("saver", ["process", "thread", "inline"])
def test_the_saves_that_steps_makes_are_told(saver, tmp_path):
    events: list[ckptfmt.SaveEvent] = []
    threads = set()

    def note(event):
        events.append(event)
        threads.add(threading.current_thread().name)

    state = ckptfmt.State(weights={"w": np.ones(1000, np.float32)})
    saving = ckptfmt.Saving(saver=saver)
    with ckptfmt.Checkpointer(
        tmp_path / "run", state, every=2, saving=saving, on_save=note
    ) as checkpointer:
        for _ in checkpointer.steps(4):
            pass
    expected = ["committed"] if saver == "inline" else ["staged", "committed"]
    for step in (2, 4):
        assert [one.kind for one in events if one.step == step] == expected
    assert {one.step for one in events} == {2, 4}
    assert threads == {"ckptfmt-callbacks"}
    last: Any = events[-1]
    assert last.path == str(tmp_path / "run/step-00000004-l0001")
    assert (last.nbytes, last.error) == (4000, None)
    assert 0 < last.stored_nbytes <= 4000
    assert last.blocked_s >= 0
    assert list(last.seconds.values()) == sorted(last.seconds.values())
    assert "COMMITTED" in last.seconds
    with pytest.raises(dataclasses.FrozenInstanceError):
        last.step = 3
    if saver != "inline":
        assert (events[0].nbytes, events[0].stored_nbytes) == (None, None)
        assert "COMMITTED" not in events[0].seconds


def test_a_failed_save_is_told_with_its_error():
    events: list[ckptfmt.SaveEvent] = []
    code, operations = FULL_DISK
    outage = Outage(code, operations=operations)
    store = FailingStore(MemoryStore(), outage)
    state = ckptfmt.State(data={"n": 1})
    saving = ckptfmt.Saving(saver="thread")
    with ckptfmt.Checkpointer(store, state, saving=saving, on_save=events.append) as checkpointer:
        checkpointer.restore_rng()
        outage.is_on = True
        handle = checkpointer.save(step=1)
        assert handle is not None
        handle.wait_over(60)
        outage.is_on = False
        checkpointer.save(step=2)

    assert [(one.step, one.kind) for one in events if one.kind != "staged"] == [
        (1, "failed"),
        (2, "committed"),
    ]
    failed: Any = next(one for one in events if one.kind == "failed")
    assert failed.error.code == Code.NO_SPACE
    assert (failed.nbytes, failed.stored_nbytes) == (None, None)
    assert "COMMITTED" not in failed.seconds


@pytest.mark.parametrize("saver", ["thread", "inline"])
def test_a_save_whose_error_is_raised_is_told_too(saver):
    events: list[ckptfmt.SaveEvent] = []
    code, operations = FULL_DISK
    outage = Outage(code, operations=operations)
    store = FailingStore(MemoryStore(), outage)
    saving = ckptfmt.Saving(saver=saver, failed_saves=0)
    checkpointer = ckptfmt.Checkpointer(
        store, ckptfmt.State(data={"n": 1}), saving=saving, on_save=events.append
    )
    checkpointer.restore_rng()
    outage.is_on = True
    with contextlib.suppress(CkptError):
        handle = checkpointer.save(step=1)
        assert saver == "thread"
        assert handle is not None
        assert handle.wait_over(60)
    with contextlib.suppress(CkptError):
        checkpointer.close()
    failed = [one.error for one in events if one.kind == "failed"]
    assert [error.code for error in failed if error is not None] == [Code.NO_SPACE]


def test_a_refused_state_is_told_as_a_failed_save():
    events: list[ckptfmt.SaveEvent] = []
    data: dict[str, Any] = {"n": 1}
    saving = ckptfmt.Saving(saver="inline")
    checkpointer = ckptfmt.Checkpointer(
        MemoryStore(), ckptfmt.State(data=data), saving=saving, on_save=events.append
    )
    checkpointer.restore_rng()
    data["n"] = object()
    with pytest.raises(CkptError):
        checkpointer.save(step=1)
    checkpointer.close()
    assert [one.kind for one in events] == ["failed"]


def test_iterators_are_read_once():
    loading = ckptfmt.Loading(allow=iter(["missing"]), override=iter(["optimizer:group/lr"]))  # type: ignore[arg-type]
    assert (loading.allow, loading.override) == (frozenset({"missing"}), ("optimizer:group/lr",))
    assert ckptfmt.Loading(override="extra:s").override == ("extra:s",)


def test_old_flags_take_any_truth_value():
    options, _ = options_of(overlap=0, witness=0, share=1, strict=None, check_replicas=[1])
    assert not options.saving.overlap
    assert options.checks == ckptfmt.Checks(witness=False, replicas=True)
    assert options.loading == ckptfmt.Loading(share=True)


@pytest.mark.parametrize(
    ("old", "told"),
    [
        ({"every": 100, "mtbf": None}, "Leave them out."),
        ({"cache": None, "upload_every": 1, "cache_nbytes": None}, "Leave them out."),
        ({"peers": 0}, "Leave them out."),
        ({"mirrors": []}, "Leave them out."),
        (
            {"mtbf": None, "slots": 1},
            "Write Checkpointer(..., saving=ckptfmt.Saving(slots=1)) instead.",
        ),
    ],
)
def test_old_keywords_without_an_effect_are_left_out_of_the_new_form(old, told):
    with pytest.warns(DeprecationWarning, match=OLD_KEYWORD_WARNING) as caught:
        make(**old)
    assert str(caught[0].message).endswith(told)


def test_no_copies_are_none_or_an_empty_list():
    make(copies=None)
    with pytest.warns(DeprecationWarning, match="mirrors"):
        make(copies=[ckptfmt.Mirror(MemoryStore())], mirrors=[])


def test_an_exception_in_the_function_is_logged_and_the_next_event_comes(caplog):
    kinds: list[str] = []

    def note(event):
        kinds.append(event.kind)
        raise ValueError("the monitor is away")

    with caplog.at_level(logging.ERROR, "ckptfmt"), make(on_save=note) as checkpointer:
        checkpointer.save(step=1)

    assert kinds == ["staged", "committed"]
    assert caplog.text.count("ValueError: the monitor is away") == 2

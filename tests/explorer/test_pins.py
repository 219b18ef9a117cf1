"""A saver that makes a delta of a base, and a cleaner that retires that base: in every order, one of them gives way.

What must hold at the end of each run: every committed checkpoint can be read, bases included, and
gives what was saved.
"""

import contextlib
import copy
import functools
import threading
from unittest import mock

import numpy as np
import pytest

from ckptfmt.commit import decision as commit
from ckptfmt.delta import base
from ckptfmt.documents.manifest import Manifest, checkpoint_name, parse_checkpoint_name
from ckptfmt.documents.run import RunRecord
from ckptfmt.errors import CkptError, Code
from ckptfmt.features import LABELS, REFERENCED
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run import labelling, lineage, retention
from ckptfmt.store.memory import MemoryStore
from ckptfmt.write import image
from tests.builders import snapshot, tensor
from tests.chains import Saving
from tests.explorer.content import remembering
from tests.explorer.schedule import Actor, GatedStore, explore
from tests.explorer.telling import tell

ARRAY = np.arange(3000, dtype=np.float32)
STATE = snapshot(tensor("w", ARRAY))
#: What a cleaner of the third launch, or a saver whose base goes, may be told.
REFUSED = {Code.BASE_MISSING, Code.BASE_MISMATCH, Code.CHECKPOINT_ABORTED, Code.FILE_MISSING}


def prepare():
    """Return a run: step 10 of launch 1, whose saver lives on, and a full step 20 of launch 2, which has taken over."""
    saving = Saving(STATE)
    saving.save(10, STATE)
    chain = saving.writers[0].chain
    newer = Saving(STATE, store=saving.store)
    newer.save(20, STATE)
    return saving, chain, saving.store.snapshot()


class PinScene:
    """Launch 1 saves step 30 as a delta of step 10; cleaners of launch 2 keep the newest only."""

    def __init__(self, prepared, *, cleaners=1):
        saving, chain, files = prepared
        self._store = MemoryStore.from_snapshot(files)
        self._run = RunRecord(run_id=saving.run.run_id, writer_features=(REFERENCED,))
        self.actors = {}
        self._add("saver", lambda store: self._save(store, copy.copy(saving), copy.copy(chain)))
        for number in range(cleaners):
            self._add(
                f"cleaner{number}",
                lambda store: retention.clean_up(
                    store, self._run, launch=2, retention=retention.Retention(newest=1)
                ),
            )

    def _add(self, name, action):
        gated = GatedStore(self._store, functools.partial(self.actors.__getitem__, name))
        self.actors[name] = Actor(name, lambda: action(gated))

    @staticmethod
    def _save(store, saving, chain):
        saving.store, saving.number = store, 1
        chain.history = copy.copy(chain.history)
        saving.writers = [copy.copy(saving.writers[0])]
        saving.writers[0].chain = chain
        saving.writers[0].slots = [bytearray(slot) for slot in saving.writers[0].slots]
        with mock.patch("tests.chains.secrets.token_hex", return_value="00000000000000aa"):
            return saving.save(30, STATE)

    def key(self):
        return frozenset(self._store.snapshot().items())

    def judge(self):
        found = []
        for name, actor in self.actors.items():
            error = actor.outcome.error
            if error is not None and not (isinstance(error, CkptError) and error.code in REFUSED):
                found.append(f"{name}: {error!r}")
        for name in self._store.list_names(""):
            place = self._store.at(name.rstrip("/"))
            if parse_checkpoint_name(name.rstrip("/")) and isinstance(
                commit.read_register(place), Manifest
            ):
                found += self._read(name, place)
        return found

    @staticmethod
    def _read(name, place):
        try:
            content = Checkpoint(place).read("weights", "w").tobytes()
        except CkptError as error:
            return [f"{name} can't be read: {error}"]
        return [] if content == ARRAY.tobytes() else [f"{name} gives what nobody saved"]


@pytest.fixture(autouse=True)
def _repeatable():
    """The same names in every run; a cleaner's condemnations are called after its thread."""
    names = mock.Mock(token_hex=lambda _: threading.current_thread().name.encode().hex()[-16:])
    nonces = mock.Mock(token_hex=lambda nbytes: "ab" * nbytes)
    with (
        remembering(),
        mock.patch.object(retention, "secrets", names),
        mock.patch.object(lineage, "secrets", nonces),
        mock.patch.object(image, "time", mock.Mock(time=lambda: 1_700_000_000)),
    ):
        yield


@pytest.mark.parametrize(("cleaners", "preemptions"), [(1, 2), (2, 1)])
def test_no_order_of_steps_takes_a_base_from_a_delta(cleaners, preemptions):
    """REQ-CMT-035, REQ-CMT-031, REQ-CMT-032, REQ-CMT-033"""
    prepared = prepare()
    result = explore(lambda: PinScene(prepared, cleaners=cleaners), preemptions=preemptions)

    tell(f"{cleaners} cleaners, {preemptions} preemptions: {result}")
    assert result.violations == []
    assert result.run_count >= 3


def test_both_outcomes_are_met():
    """The search sees deltas that were committed, and bases that were retired."""
    prepared, met = prepare(), set()

    class Noting(PinScene):
        def judge(self):
            register = commit.read_register(self._store.at(checkpoint_name(10, 1)))
            delta = commit.read_register(self._store.at(checkpoint_name(30, 1)))
            met.add((isinstance(register, Manifest), isinstance(delta, Manifest) and delta.profile))
            return super().judge()

    explore(lambda: Noting(prepared), preemptions=1)
    assert {(True, "delta"), (False, "full")} <= met


class HandScene(PinScene):
    """A person pins step 10 of launch 1, which cleaners of launch 2 are about to retire; no saver."""

    def __init__(self, prepared, *, cleaners=1):
        super().__init__(prepared, cleaners=cleaners)
        self._run = RunRecord(run_id=self._run.run_id, writer_features=(LABELS,))
        del self.actors["saver"]
        self._add(
            "person",
            lambda store: labelling.pin_checkpoint(store, self._run, checkpoint_name(10, 1)),
        )

    def judge(self):
        person = self.actors["person"].outcome
        if person.error is not None:
            codes = (Code.CHECKPOINT_RETIRED, Code.CHECKPOINT_CONDEMNED)
            is_named = isinstance(person.error, CkptError) and person.error.code in codes
            return [] if is_named else [f"person: {person.error!r}"]
        register = commit.read_register(self._store.at(checkpoint_name(10, 1)))
        return [] if isinstance(register, Manifest) else ["what was called pinned is retired"]


def test_no_order_of_steps_retires_what_was_called_pinned(monkeypatch):
    """REQ-CMT-040, REQ-CMT-041, REQ-CMT-032: and both outcomes are met."""
    monkeypatch.setattr(labelling, "_CLEANER_S", 0.0)
    prepared, outcomes = prepare(), set()

    class Noting(HandScene):
        def judge(self):
            outcomes.add(self.actors["person"].outcome.error is None)
            return super().judge()

    result = explore(lambda: Noting(prepared), preemptions=1)
    tell(f"a person and a cleaner, 1 preemption: {result}")
    assert result.violations == []
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("where", "broken"),
    [
        ("ckptfmt.run.retention._find_labelled", lambda *_: {}),
        ("ckptfmt.run.labelling.CONDEMNED", "nothing is called so"),
    ],
)
def test_a_person_or_a_cleaner_who_does_not_look_is_convicted(monkeypatch, where, broken):
    """REQ-CMT-040, REQ-CMT-041"""
    monkeypatch.setattr(where, broken)
    monkeypatch.setattr(labelling, "_CLEANER_S", 0.0)
    prepared = prepare()
    found = [
        violation
        for preemptions in range(2)
        for violation, _ in explore(lambda: HandScene(prepared), preemptions=preemptions).violations
    ]
    assert "what was called pinned is retired" in found


def _no_pins(right, store, origin, writer, given, **known):
    with mock.patch.object(base, "create_once"):
        return right(store, origin, writer, given, **known)


def _looking_first(right, store, run, *chosen):
    """Look for pins and references, and condemn afterwards."""
    _, going, _ = chosen
    entries = lineage.list_checkpoints(store, run)
    pinned = retention._find_pinned(store, entries)
    read = {one.digest for entry in entries for one in entry.references} | pinned
    for entry in going:
        store.at(entry.name).create(f"{commit.CONDEMNED}{0:016x}", [b""])
    del right
    return retention._retire(
        store, [entry for entry in going if entry.manifest.digest not in read]
    ), {}


#: Protocols that are broken, each by one patch: where, what, and what stands there instead.
MUTANTS = {
    "no pins": (1, "ckptfmt.delta.chain.pin_base", _no_pins),
    "pins are not looked for": (1, "ckptfmt.run.retention._find_pinned", lambda *_: set()),
    "a base is not checked": (1, "ckptfmt.delta.base.check_base", lambda *_, **__: None),
    "looked for before it is condemned": (
        1,
        "ckptfmt.run.retention._retire_unread",
        _looking_first,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_protocol_is_convicted(name):
    cleaners, where, broken = MUTANTS[name]
    module, _, attribute = where.rpartition(".")
    right = getattr(__import__(module, fromlist=[attribute]), attribute)
    replaced = functools.partial(broken, right) if broken in (_no_pins, _looking_first) else broken
    prepared, found = prepare(), []
    patches = [mock.patch(where, replaced)]
    if name == "a base is not checked":
        patches.append(mock.patch("ckptfmt.commit.decision.check_base", replaced))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for preemptions in range(4):
            result = explore(
                lambda: PinScene(prepared, cleaners=cleaners),
                preemptions=preemptions,
                stop_early=True,
            )
            found = [violation for violation, _ in result.violations]
            if found:
                break
    tell(f"{name}: {preemptions} preemptions, run {result.run_count}: {found[:1]}")
    assert any("can't be read" in violation for violation in found), (
        f"{name} wasn't convicted: {found}"
    )

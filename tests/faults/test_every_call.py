"""Each system call of an operation fails once and from then on: an exact result or a named error, and nothing is lost."""

import contextlib
from unittest import mock

import pytest

from ckptfmt.store.posix import PosixCalls
from tests.explorer.telling import tell
from tests.faults.every_call import ERRORS, SCENES, FailingCalls, list_faults, run_campaign
from tests.stores.hooked import HookedCalls

#: Calls of `PosixCalls` without a hook: a name that is drawn by chance, and a question on the page
#: cache whose answer decides nothing but the way.
UNHOOKED = {"temporary_name", "cached_page_count"}


def check(report, *, fault_floor):
    tell(str(report))
    assert report.problems == []
    assert report.fault_count >= fault_floor


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_a_failing_call_is_an_exact_result_or_a_named_error(name):
    """`make test` takes a few faults of each operation."""
    check(run_campaign([name], sample=3, seed=20261129), fault_floor=1)


@pytest.mark.exhaustive
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", SCENES)
def test_each_failing_call_is_an_exact_result_or_a_named_error(name):
    """Each call fails once, and together with later ones."""
    report = run_campaign([name])
    check(report, fault_floor=report.scenes[name])


def test_every_system_call_of_a_store_can_fail():
    """A new call of `PosixCalls` has a hook and errors, or a reason to have none."""
    calls = {name for name in vars(PosixCalls) if not name.startswith("_")}
    assert calls - UNHOOKED == ERRORS.keys()
    assert calls - UNHOOKED <= vars(HookedCalls).keys()


def test_every_call_of_a_sequence_fails_in_each_way():
    made = ["open_root", "open_new", "write", "fsync", "close", "link", "unlink"]
    each = list(list_faults(made, every_error=True))
    in_turns = list(list_faults(made, every_error=False))

    assert set(in_turns) < set(each)
    for faults in (each, in_turns):
        for number in range(1, len(made) + 1):
            hows = [fault.how for fault in faults if fault.number == number]
            assert any(how.startswith("and all later") for how in hows)
            assert any(not how.startswith("and all later") for how in hows)


# --- negative controls: a store that hides an error is found --------------------------------------


def swallowed(op):
    """Return a patch of the store under test: an error of `op` reaches nobody."""
    inner = getattr(FailingCalls, op)

    def call(self, *arguments):
        with contextlib.suppress(OSError):
            return inner(self, *arguments)

    return mock.patch.object(FailingCalls, op, call)


def repeated(op):
    """Return a patch of the store under test: a call that fails is made once more."""
    inner = getattr(FailingCalls, op)

    def call(self, *arguments):
        with contextlib.suppress(OSError):
            return inner(self, *arguments)
        return inner(self, *arguments)

    return mock.patch.object(FailingCalls, op, call)


@pytest.mark.parametrize(
    ("patched", "op", "name", "rule"),
    [
        (swallowed, "fsync", "save alone", "lost"),
        (repeated, "fsync", "save alone", "lost"),
        (swallowed, "scan", "list", "untyped"),
    ],
)
def test_a_store_that_hides_an_error_is_found(patched, op, name, rule):
    with patched(op):
        report = run_campaign([name], only={op})

    assert any(f": {rule}" in problem for problem in report.problems), report.problems[:3]

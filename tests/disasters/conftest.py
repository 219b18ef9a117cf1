"""Processes that a test starts carry a mark in the environment, and end before the test ends."""

import os
import secrets
import signal

import pytest

from tests.faults.driver import MARK, PATIENCE_S, savers, until


@pytest.fixture(autouse=True)
def _mark(monkeypatch):
    """Mark the savers of a test, and wait at the end of the test until each saver has ended."""
    monkeypatch.setenv(MARK, secrets.token_hex(8))
    yield
    ended = until(lambda: not savers(), timeout_s=PATIENCE_S)
    for pid in savers():
        os.kill(pid, signal.SIGKILL)
    assert ended, "a saver is still there"


@pytest.fixture
def place(tmp_path):
    """Return the path of a run that doesn't exist yet."""
    return tmp_path / "run"

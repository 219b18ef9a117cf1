"""Every test of a fault ends without a saver: what it started is known by a mark, and must be gone."""

import os
import secrets
import signal

import pytest

from tests.faults.driver import MARK, PATIENCE_S, savers, until


@pytest.fixture(autouse=True)
def _mark(monkeypatch):
    """Mark what the test starts; afterwards wait for its savers to end, and see that they do."""
    monkeypatch.setenv(MARK, secrets.token_hex(8))
    yield
    ended = until(lambda: not savers(), timeout_s=PATIENCE_S)
    for pid in savers():
        os.kill(pid, signal.SIGKILL)
    assert ended, "a saver is still there"


@pytest.fixture
def run(tmp_path):
    """Where the run of the test will be."""
    return tmp_path / "run"

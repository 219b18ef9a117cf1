"""An error of a cache's disk at a start is no damage: the start tries again, then is refused, and loses nothing."""

import pathlib
from unittest import mock

import pytest

from ckptfmt.errors import Code, err
from ckptfmt.run import node_cache
from tests.builders import error_of
from tests.faults.cache_disk import run_campaign
from tests.save.test_node_cache import committed
from tests.save.test_saves import Run
from tests.save.test_upload_every import one_that_died


def test_an_error_of_a_cache_disk_at_a_start_loses_no_save():
    """REQ-RUN-047: what only the cache has isn't passed over, retired or deleted while the disk can't be read."""
    assert run_campaign(16, seed=1) == []


@pytest.mark.exhaustive
def test_an_error_at_many_calls_of_a_start_loses_no_save():
    """All calls, thousands: ``python -m tests.faults.cache_disk``."""
    assert run_campaign(300, seed=2) == []


def test_a_cache_disk_that_cannot_be_opened_refuses_the_start(tmp_path: pathlib.Path) -> None:
    """REQ-RUN-047: on all processes, with what to do about it."""
    left, cache = one_that_died(tmp_path)

    fail = mock.Mock(side_effect=err(Code.STORE_IO, "Input/output error", where=str(cache)))
    with mock.patch.object(node_cache, "LocalStore", fail):
        run = Run(left, cache=cache, resume="auto")
        error = error_of(run.checkpointer.restore)
    assert error.code == Code.STORE_IO
    assert str(cache) in error.detail
    assert "A start without cache=" in error.remedy
    assert committed(left) == [1, 2, 3]
    with Run(left, cache=cache, resume="auto") as run:
        assert run.checkpointer.step == 3

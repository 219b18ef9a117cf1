"""Deaths under torchrun and without a restart: the bytes that the next step costs at home."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.death import WAYS, play
from benchmarks.rounds import Workplace

pytestmark = [pytest.mark.dist, pytest.mark.slow]
NBYTES = 7_000_000


@pytest.mark.parametrize("way", list(WAYS))
def test_only_a_restart_without_a_cache_reads_tensors_of_the_run(tmp_path: Path, way: str) -> None:
    row = play(way, NBYTES, Workplace(tmp_path))
    assert (row["home_nbytes"] > 0) is (way == "restart_home")
    assert row["stepped_s"] >= row["loaded_s"] > 0

"""What all tests of plug-ins hold: a witness refutes no trajectory but those that a test names."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.plugins.vision  # noqa: F401 - for the import of torchvision
from tests.plugins.trainings import verdict


@pytest.fixture(autouse=True)
def may_be_refuted(tmp_path: Path) -> Iterator[set[Path]]:
    """Return the runs below ``tmp_path`` whose newest verdict may be "refuted": a test adds them, if it has any."""
    named: set[Path] = set()
    yield named
    runs = {path.parents[1] for path in tmp_path.rglob("witness/*.json")}
    assert {run for run in runs if verdict(run)[0] == "refuted"} <= named

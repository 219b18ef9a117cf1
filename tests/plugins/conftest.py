"""What all tests of plug-ins hold: a witness refutes no trajectory but those that a test names."""

import sys
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


@pytest.fixture(autouse=True)
def _forget_compilers() -> Iterator[None]:
    """Let no later test of the process find a compiler that a test used, which lowers claims."""
    yield
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if getattr(frames, "cached_backends", None):
        sys.modules["torch._dynamo"].reset()

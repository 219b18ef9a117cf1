"""Copies that come late, for every test of overlap; no hook is left behind by any."""

from collections.abc import Iterator

import pytest
from torch.optim import optimizer as torch_optimizer

from tests.overlap.watching import Late, Spy


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    made = Late(monkeypatch)
    yield made
    made.end()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.fixture(autouse=True)
def _hooks() -> Iterator[None]:
    """Take away the hooks of all optimizers that a training registered."""
    before = set(torch_optimizer._global_optimizer_pre_hooks)
    yield
    for number in set(torch_optimizer._global_optimizer_pre_hooks) - before:
        del torch_optimizer._global_optimizer_pre_hooks[number]

"""What holds for every test: depth of property tests, one thread per worker, a second reader, no slot left behind."""

import collections
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator

import hypothesis
import pytest

from tests import forks
from tests.builders import slot_count

# As many workers as cores, or more: more threads inside each only make all wait. Set before torch
# is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Who starts the tests in the background of a shell has them ignore Ctrl-C, and all that they start
# would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, so that a red build can be repeated; --hypothesis-profile=search
# looks further.
hypothesis.settings.register_profile(
    "house",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # a busy machine is no fault of a test
)
hypothesis.settings.register_profile("search", deadline=None, max_examples=5000)
hypothesis.settings.load_profile("house")

# Everything that a test saves and leaves whole is also read by a reader that knows the
# specification alone.
pytest_plugins = ["tests.plugins_stranger", "tests.s3.fixtures", "tests.homes"]


#: The configuration of the run that isn't nested in a test.
_FROZEN_BY: list[pytest.Config] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `cuda` where there is no such device. `python -m benchmarks.gpu` runs it where there is.

    Workers of xdist begin with files that have slow tests, and go on with those that have many:
    begun last, one would be waited for.
    """
    if hasattr(config, "workerinput"):
        slow = {
            item.path
            for item in items
            if item.get_closest_marker("slow") or item.get_closest_marker("dist")
        }
        counts = collections.Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path not in slow, -counts[item.path]))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if (
        marked and not sys.modules["torch"].cuda.is_available()
    ):  # whoever needs a device has imported torch
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep imported modules and collected tests out of later garbage collections.

    Nested runs of tests/mutants collect anew; their objects are not kept.
    """
    if not _FROZEN_BY:
        _FROZEN_BY.append(session.config)
        _freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Keep the objects that a finished file left out of later garbage collections, too.

    A full collection takes a second where earlier tests left a million objects, and each test that
    leaves a slot in a reference cycle asks for a full collection.
    """
    result = yield
    if (nextitem is None or nextitem.path != item.path) and item.config in _FROZEN_BY:
        _freeze()
    return result


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the server of forks with the modules for all of them, whichever test needs a fork first."""
    if item.get_closest_marker("dist") and "torch" in sys.modules:
        forks.start_server()


@pytest.fixture(autouse=True)
def _slots() -> Iterator[None]:
    """See that no test leaves the memory of a snapshot behind."""
    before = slot_count()
    yield
    if slot_count() != before:
        gc.collect()
    assert slot_count() == before, "a slot is left behind"

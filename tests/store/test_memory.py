"""What an object store does to requests: answers lost, requests lost, requests that come late."""

import pytest

from ckptfmt.errors import Code
from ckptfmt.store import MemoryStore
from ckptfmt.store.memory import Loss
from tests.store.helpers import code_of

WRITES = {
    "create": lambda store: store.create("a", [b"new"]),
    "replace": lambda store: store.replace("a", b"new"),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    ("loss", "state"), [(Loss.ANSWER, {"a": b"new"}), (Loss.REQUEST, {}), (Loss.LATE, {})]
)
def test_a_loss_is_never_answered(write, loss, state):
    store = MemoryStore()
    store.inject(loss)

    assert code_of(lambda: WRITES[write](store)) == Code.STORE_NO_ANSWER
    assert store.snapshot() == state
    assert store.land() == (["a"] if loss is Loss.LATE else [])
    assert store.land() == []


def test_a_lost_answer_may_have_been_a_refusal():
    store = MemoryStore.from_snapshot({"a": b"theirs"})
    store.inject(Loss.ANSWER)

    assert code_of(lambda: store.create("a", [b"ours"])) == Code.STORE_NO_ANSWER
    assert store.snapshot() == {"a": b"theirs"}


def test_a_late_create_meets_what_is_there_when_it_lands():
    store = MemoryStore()
    store.inject(Loss.LATE)
    assert code_of(lambda: store.create("a", [b"late"])) == Code.STORE_NO_ANSWER
    store.create("a", [b"early"])

    assert store.late_count == 1
    assert store.land() == []
    assert store.late_count == 0
    assert store.snapshot() == {"a": b"early"}


def test_a_late_create_lands_on_a_name_that_was_deleted_meanwhile():
    store = MemoryStore()
    store.inject(Loss.LATE)
    assert code_of(lambda: store.create("a", [b"late"])) == Code.STORE_NO_ANSWER
    store.create("a", [b"early"])
    store.delete("a")

    assert store.land() == ["a"]
    assert store.snapshot() == {"a": b"late"}


def test_a_late_replace_takes_the_place_of_what_came_after_it():
    store = MemoryStore()
    store.inject(Loss.LATE)
    assert code_of(lambda: store.replace("a", b"late")) == Code.STORE_NO_ANSWER
    store.replace("a", b"newer")

    assert store.land() == ["a"]
    assert store.snapshot() == {"a": b"late"}


def test_late_requests_land_in_order_and_as_many_as_asked():
    store = MemoryStore()
    for path in ("a", "b", "c"):
        store.inject(Loss.LATE)
        assert code_of(lambda path=path: store.create(path, [])) == Code.STORE_NO_ANSWER

    assert store.land(count=2) == ["a", "b"]
    assert store.late_count == 1


def test_losses_wait_for_the_path_that_they_are_meant_for():
    store = MemoryStore()
    store.inject(Loss.REQUEST, path_end="manifest.json")
    store.inject(Loss.ANSWER, path_end="manifest.json")

    store.at("run").create("a", [])
    assert code_of(lambda: store.at("run").create("manifest.json", [])) == Code.STORE_NO_ANSWER
    assert store.list("run") == ["run/a"]
    assert code_of(lambda: store.at("run").create("manifest.json", [])) == Code.STORE_NO_ANSWER
    assert store.list("run") == ["run/a", "run/manifest.json"]
    assert code_of(lambda: store.at("run").create("manifest.json", [])) == Code.STORE_EXISTS


def test_a_snapshot_is_a_copy():
    store = MemoryStore.from_snapshot({"a/b": b"1"})
    snapshot = store.snapshot()
    copy = MemoryStore.from_snapshot(snapshot)
    copy.delete("a/b")
    snapshot["c"] = b""

    assert store.snapshot() == {"a/b": b"1"}


def test_a_snapshot_with_a_hostile_key_is_refused():
    assert code_of(lambda: MemoryStore.from_snapshot({"../a": b""})) == Code.UNSAFE_PATH


def test_what_is_stored_does_not_change_with_the_callers_buffer():
    store = MemoryStore()
    data = bytearray(b"abc")
    store.create("a", [data])
    data[:] = b"xyz"

    assert store.snapshot() == {"a": b"abc"}

"""A save in two phases: every process writes its part, one commits with their records."""

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.box import Box
from ckptfmt.errors import CkptError
from ckptfmt.saving import save_attempt
from tests.builders import tensor

WHOLE = np.arange(24, dtype=np.int32).reshape(6, 4)


def rows(begin, end):
    """Return a state that gives these rows of the tensor."""
    return ckptfmt.State(
        weights={"w": tensor("w", WHOLE, boxes=(Box((begin, 0), (end - begin, 4)),))}, rng=False
    )


def loaded(path) -> Any:
    return ckptfmt.load(path, framework="numpy")


def write_all(path, states):
    attempt = ckptfmt.SaveAttempt.begin(step=7, writer_count=len(states))
    return attempt, [
        attempt.write_part(path, state, writer=writer) for writer, state in enumerate(states)
    ]


def code_of(action):
    with pytest.raises(CkptError) as caught:
        action()
    return caught.value.code


def test_parts_of_several_writers_become_one_checkpoint(tmp_path):
    attempt, records = write_all(tmp_path / "c", [rows(0, 2), rows(2, 5), rows(5, 6)])
    assert code_of(lambda: ckptfmt.open(tmp_path / "c")) == "NOT_COMMITTED"

    report = attempt.commit(tmp_path / "c", reversed(records))

    assert (report.step, report.writer_count) == (7, 3)
    assert ckptfmt.validate(tmp_path / "c").valid
    found = loaded(tmp_path / "c")["weights"]["w"]
    assert found.tobytes() == WHOLE.tobytes()
    assert found.dtype == WHOLE.dtype


def test_an_attempt_that_replaces_waits_for_an_earlier_save_and_leaves_what_a_link_leads_to(
    tmp_path,
):
    """REQ-CMT-043"""
    attempt, records = write_all(tmp_path / "best", [rows(0, 6)])
    attempt.commit(tmp_path / "best", records)
    (tmp_path / "last").symlink_to("best")
    begun = [ckptfmt.SaveAttempt.begin(step=step, writer_count=1, replace=True) for step in (8, 9)]
    held = begun[0].hold(tmp_path / "last")
    save_attempt._HOLDS.clear()  # as if another process held it
    assert not (tmp_path / "last").is_symlink()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(begun[1].hold, tmp_path / "last")
        begun[0].commit(
            tmp_path / "last", [begun[0].write_part(tmp_path / "last", rows(0, 6), writer=0)]
        )
        assert not waiting.done()
        held.close()
        with waiting.result(60):
            begun[1].commit(
                tmp_path / "last", [begun[1].write_part(tmp_path / "last", rows(0, 6), writer=0)]
            )
    for name, step in (("best", 7), ("last", 9)):
        with ckptfmt.open(tmp_path / name) as checkpoint:
            assert checkpoint.step == step


def test_an_attempt_that_replaces_is_held_until_it_is_committed(tmp_path):
    attempt, records = write_all(tmp_path / "c", [rows(0, 6)])
    attempt.commit(tmp_path / "c", records)
    anew = ckptfmt.SaveAttempt.begin(step=8, writer_count=1, replace=True)
    with anew.hold(tmp_path / "c"):
        records = [
            ckptfmt.SaveAttempt.parse(anew.dump()).write_part(tmp_path / "c", rows(0, 6), writer=0)
        ]
        other = ckptfmt.State(weights={"other": np.zeros(2)}, rng=False)
        assert (
            code_of(
                lambda: ckptfmt.save(tmp_path / "c", other, step=9, replace=True, deadline_s=0.1)
            )
            == "SAVE_PENDING"
        )
        assert anew.commit(tmp_path / "c", records).step == 8
    assert ckptfmt.validate(tmp_path / "c").valid
    assert loaded(tmp_path / "c")["weights"].keys() == {"w"}

    careless = ckptfmt.SaveAttempt.begin(step=9, writer_count=1, replace=True)
    records = [careless.write_part(tmp_path / "c", rows(0, 6), writer=0)]
    assert code_of(lambda: careless.commit(tmp_path / "c", records)) == "ARGUMENT"
    timid = ckptfmt.SaveAttempt.begin(step=9, writer_count=1)
    assert (
        code_of(lambda: timid.write_part(tmp_path / "c", rows(0, 6), writer=0))
        == "CHECKPOINT_EXISTS"
    )


WRITER = """
import sys, numpy, ckptfmt
path, told, writer = sys.argv[1], sys.argv[2], int(sys.argv[3])
state = ckptfmt.State(data=ckptfmt.PerWorker({"writer": writer}), weights={f"w{writer}": numpy.full(3, writer)})
print(ckptfmt.SaveAttempt.parse(told).write_part(path, state, writer=writer))
"""


def test_an_attempt_is_found_where_it_was_published(tmp_path):
    older = ckptfmt.SaveAttempt.begin(step=1, writer_count=1)
    older.publish(tmp_path / "c")
    attempt = ckptfmt.SaveAttempt.begin(step=1, writer_count=1, note={"order": ["w"]})
    attempt.publish(tmp_path / "c")
    assert code_of(lambda: ckptfmt.open(tmp_path / "c")) == "NOT_COMMITTED"

    found = ckptfmt.SaveAttempt.find(tmp_path / "c")

    assert found == attempt
    assert found.note == {"order": ["w"]}
    attempt.commit(tmp_path / "c", [found.write_part(tmp_path / "c", rows(0, 6), writer=0)])
    assert ckptfmt.validate(tmp_path / "c").valid
    assert not (tmp_path / "c" / "exchange").exists()
    assert code_of(lambda: ckptfmt.SaveAttempt.find(tmp_path / "c")) == "FILE_MISSING"
    assert code_of(lambda: attempt.publish(tmp_path / "c")) == "CHECKPOINT_EXISTS"


def test_each_process_writes_and_one_commits(tmp_path):
    path = str(tmp_path / "c")
    attempt = ckptfmt.SaveAttempt.begin(step=1, writer_count=2)
    records = [
        subprocess.run(
            [sys.executable, "-c", WRITER, path, attempt.dump(), str(writer)],
            check=True, capture_output=True, text=True, env={**os.environ}, timeout=120,
        ).stdout
        for writer in range(2)
    ]  # fmt: skip
    attempt.commit(path, records)

    with ckptfmt.open(path) as checkpoint:
        assert [checkpoint.leaf("data", "", f"lw/{writer}") for writer in range(2)] == [
            {"writer": 0},
            {"writer": 1},
        ]
        assert {name for _, name, _ in checkpoint.tensors} == {"w0", "w1"}
        assert len({scope for _, scope in checkpoint.streams}) == 2, (
            "each process gives its own RNG streams"
        )


@settings(max_examples=30, deadline=None)
@given(cuts=st.sets(st.integers(1, 5)), order=st.randoms(use_true_random=False))
def test_any_division_of_rows_gives_the_same_tensor(cuts, order):
    bounds = [0, *sorted(cuts), 6]
    states = [rows(begin, end) for begin, end in itertools.pairwise(bounds)]
    store = memory_store()
    attempt, records = write_all(store, states)
    order.shuffle(records)
    attempt.commit(store, records)

    assert loaded(store)["weights"]["w"].tobytes() == WHOLE.tobytes()


def memory_store():
    from ckptfmt.store.memory import MemoryStore  # noqa: PLC0415

    return MemoryStore()


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([rows(0, 4), rows(3, 6)], "TILING_OVERLAP"),
        ([rows(0, 2), rows(3, 6)], "TILING_GAP"),
        ([ckptfmt.State(data={"n": 1}), ckptfmt.State(data={"n": 2})], "LEAF_DIVERGED"),
    ],
)
def test_parts_that_contradict_each_other_are_no_checkpoint(tmp_path, states, code):
    attempt, records = write_all(tmp_path / "c", states)
    assert code_of(lambda: attempt.commit(tmp_path / "c", records)) == code
    assert code_of(lambda: ckptfmt.open(tmp_path / "c")) == "NOT_COMMITTED"

    # Nothing that it left is in the way of the next attempt, or stays after it.
    again, records = write_all(tmp_path / "c", [rows(0, 6)])
    again.commit(tmp_path / "c", records)
    names = {file.name for file in (tmp_path / "c").rglob("*") if file.is_file()}
    assert not {name for name in names if attempt.origin.attempt in name}
    assert ckptfmt.validate(tmp_path / "c").valid


def test_records_are_those_of_all_parts_and_of_this_attempt(tmp_path):
    attempt, records = write_all(tmp_path / "c", [rows(0, 2), rows(2, 6)])
    other, others = write_all(tmp_path / "d", [rows(0, 2), rows(2, 6)])
    stray = json.dumps({**json.loads(records[1]), "writer": 2})
    for wrong in (
        [],
        records[:1],
        [records[0], records[0]],
        [records[0], others[1]],
        [*records, stray],
        [records[0], stray],
        ["", *records],
        [None, records[0]],
        [json.dumps({**json.loads(records[0]), "writer": [1]}), records[0]],
        ["[]", records[0]],
        [json.dumps({**json.loads(records[0]), "more": 1}), records[1]],
    ):
        assert code_of(lambda wrong=wrong: attempt.commit(tmp_path / "c", wrong)) == "ARGUMENT"
    assert (
        attempt.commit(tmp_path / "c", records).digest
        != other.commit(tmp_path / "d", others).digest
    )


def test_a_part_that_is_another_than_its_record_says_is_refused(tmp_path):
    attempt, records = write_all(tmp_path / "c", [rows(0, 2), rows(2, 6)])
    changed = {**json.loads(records[1]), "part_digest": json.loads(records[0])["part_digest"]}

    assert (
        code_of(lambda: attempt.commit(tmp_path / "c", [records[0], json.dumps(changed)]))
        == "DOC_MISMATCH"
    )
    (tmp_path / "c" / "parts" / f"{attempt.origin.attempt}-00001.msgpack").unlink()
    assert code_of(lambda: attempt.commit(tmp_path / "c", records)) == "FILE_MISSING"


def test_a_committed_directory_and_a_run_are_refused(tmp_path):
    attempt, records = write_all(tmp_path / "c", [rows(0, 6)])
    attempt.commit(tmp_path / "c", records)
    with ckptfmt.Checkpointer(tmp_path / "run", ckptfmt.State(data={"n": 1}), saver="inline"):
        pass
    for path in (tmp_path / "c", tmp_path / "run"):
        assert code_of(lambda path=path: write_all(path, [rows(0, 6)])) == "CHECKPOINT_EXISTS"
        assert code_of(lambda path=path: attempt.commit(path, records)) == "CHECKPOINT_EXISTS"


@pytest.mark.parametrize(
    "arguments",
    [
        {"step": -1, "writer_count": 1},
        {"step": True, "writer_count": 1},
        {"step": 1, "writer_count": 0},
        {"step": 1, "writer_count": 1.0},
        {"step": 1, "writer_count": 10**7},
        {"step": 1, "writer_count": 1, "block_nbytes": 5000},
        {"step": 1, "writer_count": 1, "block_nbytes": "x"},
    ],
)
def test_arguments_of_an_attempt_are_checked(arguments):
    assert code_of(lambda: ckptfmt.SaveAttempt.begin(**arguments)) == "ARGUMENT"


def test_metrics_and_tags_of_the_first_writer_count(tmp_path):
    attempt = ckptfmt.SaveAttempt.begin(step=1, writer_count=2)
    records = [
        attempt.write_part(
            tmp_path / "c", rows(3 * n, 3 * n + 3), writer=n, metrics={"loss": n}, tags=[f"of-{n}"]
        )
        for n in range(2)
    ]
    attempt.commit(tmp_path / "c", records)
    with ckptfmt.open(tmp_path / "c") as checkpoint:
        assert dict(checkpoint.manifest.labels.metrics) == {"loss": "0.0"}
        assert checkpoint.manifest.labels.tags == ("of-0",)


@pytest.mark.parametrize("text", ["", "5", "{}", '{"step": 1}'])
def test_an_attempt_that_was_not_dumped_is_refused(text):
    assert code_of(lambda: ckptfmt.SaveAttempt.parse(text)) == "ARGUMENT"


@pytest.mark.parametrize(
    "change",
    [
        {"step": "x"},
        {"block_nbytes": 3},
        {"nonce": 5},
        {"attempt": "../../../etc/abcd"},
        {"writer_count": 0},
    ],
)
def test_an_attempt_that_was_changed_on_the_way_is_refused(change):
    told = json.loads(ckptfmt.SaveAttempt.begin(step=1, writer_count=2).dump())
    assert code_of(lambda: ckptfmt.SaveAttempt.parse(json.dumps({**told, **change}))) == "ARGUMENT"


@pytest.mark.parametrize("writer", [2, -1, "0", 1.0, True])
def test_a_writer_that_is_none_of_the_attempt_is_refused(tmp_path, writer):
    attempt = ckptfmt.SaveAttempt.begin(step=1, writer_count=2)
    assert (
        code_of(lambda: attempt.write_part(tmp_path / "c", rows(0, 6), writer=writer)) == "ARGUMENT"
    )
    assert not (tmp_path / "c").exists()


def test_an_attempt_that_failed_untold_is_given_up_by_the_next_one_of_its_process(tmp_path):
    """REQ-CMT-043: it isn't waited for, and it can't be committed any more."""
    state = ckptfmt.State(data={"position": 1}, rng=False)
    ckptfmt.save(tmp_path, state, step=1)
    failed = ckptfmt.SaveAttempt.begin(step=2, writer_count=1, replace=True)
    kept = failed.hold(tmp_path)  # as a traceback keeps it
    record = failed.write_part(tmp_path, state, writer=0)
    later = ckptfmt.SaveAttempt.begin(step=3, writer_count=1, replace=True)
    with later.hold(tmp_path):
        assert later.commit(tmp_path, [later.write_part(tmp_path, state, writer=0)]).step == 3
    with pytest.raises(ckptfmt.CkptError):
        failed.commit(tmp_path, [record])
    kept.close()
    assert ckptfmt.open(tmp_path).step == 3


def moments(writer):
    """Return a state with a half of an optimizer's tensor."""
    half = Box((3 * writer, 0), (3, 4))
    source = tensor("w/exp_avg", WHOLE, field="optimizer", boxes=(half,))
    return ckptfmt.State(optimizer={"moment": source}, rng=False)


def adam(step=3, name="w"):
    stand_in = tensor(f"{name}/exp_avg", WHOLE, field="optimizer", boxes=())
    return {
        "state": {name: {"step": step, "exp_avg": stand_in}},
        "param_groups": [{"lr": 0.5, "params": [name]}],
    }


def test_an_optimizer_of_several_writers_is_stored_by_names(tmp_path):
    attempt = ckptfmt.SaveAttempt.begin(step=7, writer_count=2)
    records = [
        attempt.write_part(tmp_path / "c", moments(writer), writer=writer, optimizers={(): adam()})
        for writer in range(2)
    ]
    attempt.commit(tmp_path / "c", records)

    assert ckptfmt.validate(tmp_path / "c").valid
    found = ckptfmt.optimizer_state_dict(tmp_path / "c")
    assert found["param_groups"] == [{"lr": 0.5, "params": [0]}]
    assert found["state"][0]["step"] == 3
    assert np.asarray(found["state"][0]["exp_avg"]).tobytes() == WHOLE.tobytes()


def test_writers_with_different_values_of_an_optimizer_are_refused(tmp_path):
    attempt = ckptfmt.SaveAttempt.begin(step=7, writer_count=2)
    records = [
        attempt.write_part(
            tmp_path / "c", moments(writer), writer=writer, optimizers={(): adam(step=writer)}
        )
        for writer in range(2)
    ]
    assert code_of(lambda: attempt.commit(tmp_path / "c", records)) == "LEAF_DIVERGED"


def test_a_tensor_in_an_optimizers_state_dict_is_refused_by_name(tmp_path):
    attempt = ckptfmt.SaveAttempt.begin(step=7, writer_count=1)
    wrong = adam()
    wrong["state"]["w"]["exp_avg"] = WHOLE
    with pytest.raises(CkptError, match=r"state/w/exp_avg.*TensorSource"):
        attempt.write_part(tmp_path / "c", moments(0), writer=0, optimizers={(): wrong})
    same: dict[Any, Any] = {("a",): adam(), ("b",): adam()}
    assert code_of(
        lambda: attempt.write_part(tmp_path / "c", moments(0), writer=0, optimizers=same)
    ) == "STATE_NAME"  # fmt: skip

"""Records of steps: their bytes, and the comparison of two."""

from __future__ import annotations

import dataclasses
import errno
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.errors import StoreError
from ckptfmt.loop.comparing import compare_steps
from ckptfmt.loop.step_log import StepLog, Steps
from ckptfmt.run.witness import (
    RECORD_NBYTES,
    STEP_COUNT,
    STREAM_COUNT,
    StepRecord,
    StepsHeader,
)

U64 = st.none() | st.integers(0, 2**64 - 1)
RECORDS = st.builds(
    StepRecord,
    step=st.integers(1, 2**63),
    weights=U64,
    position=U64,
    samples=U64,
    batch=U64,
    loss=U64,
    grad_norm=U64,
    options=U64,
    streams=st.lists(st.integers(0, 2**32 - 1), max_size=STREAM_COUNT).map(tuple),
    is_before=st.booleans(),
    is_several=st.booleans(),
    is_full=st.booleans(),
)
HEADER = StepsHeader(
    run_id="0" * 32,
    launch=1,
    writer=0,
    writer_count=1,
    first_step=0,
    resumed=None,
    expected=None,
    streams=("torch.cpu", "user/é"),
    tensors="",
)
RECORD = StepRecord(
    step=21,
    weights=1,
    position=168,
    samples=2,
    batch=3,
    loss=4,
    grad_norm=5,
    options=6,
    streams=(7, 8),
)


@given(RECORDS)
def test_record_comes_back_from_its_bytes(record: StepRecord) -> None:
    content = record.dump()
    assert len(content) == RECORD_NBYTES
    assert StepRecord.parse(content) == record


@given(RECORDS, st.integers(0, 8 * 120 - 1))
def test_record_with_a_flipped_bit_is_none(record: StepRecord, bit: int) -> None:
    content = bytearray(record.dump())
    content[bit // 8] ^= 1 << bit % 8
    assert StepRecord.parse(bytes(content)) is None


def test_record_that_was_cut_off_is_none() -> None:
    content = RECORD.dump()
    assert all(
        StepRecord.parse(content[:size].ljust(RECORD_NBYTES, b"\0")) is None for size in range(120)
    )


@pytest.mark.parametrize(
    "names", [(), ("python", "user/" + "n" * 500), tuple(f"user/{n * 99}" for n in range(400))]
)
def test_header_comes_back_whatever_the_streams_are_called(names: tuple[str, ...]) -> None:
    header = dataclasses.replace(HEADER, streams=names)
    found = StepsHeader.parse(header.dump())
    assert found is not None
    assert len(found.streams) == len(names)
    assert dataclasses.replace(found, streams=()) == dataclasses.replace(header, streams=())


def test_record_of_a_later_step_takes_the_place_of_the_oldest(tmp_path: Any) -> None:
    log = StepLog(tmp_path / "witness" / "0001" / "00000.steps", HEADER)
    for step in (3, 4, STEP_COUNT + 3):
        log.put(dataclasses.replace(RECORD, step=step))
    assert log.close(30)
    steps = Steps.parse(log.path.read_bytes())
    assert steps is not None
    assert sorted(steps.records) == [4, STEP_COUNT + 3]


def test_log_ends_at_once_behind_a_record_that_could_not_be_written(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error took the end of the thread, and the answer to a flush, along."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(StepLog, "_write", refuse)
    log = StepLog(tmp_path / "witness" / "0001" / "00000.steps", HEADER)
    assert log.flush(10)
    with pytest.raises(StoreError, match="Input/output error"):
        log.close(10)
    assert not log._thread.is_alive()


def compared(
    now: StepRecord, earlier: StepRecord = RECORD, *, is_first: bool = True, same: bool = True
) -> Any:
    names = ("torch.cpu", "python")
    return compare_steps(
        earlier, now, streams=names, earlier_streams=names, same_tensors=same, is_first=is_first
    )


def test_identical_records_differ_in_nothing() -> None:
    found = compared(RECORD)
    assert found.what is None
    assert found.compared == ("samples", "rng", "batch", "loss", "grad_norm", "options", "weights")


@pytest.mark.parametrize(
    ("change", "what", "told"),
    [
        (
            {"position": 200, "streams": (9, 9), "loss": 9, "weights": 9},
            "samples",
            "ends at position 200, and ended at",
        ),
        ({"samples": 9, "loss": 9}, "samples", "step 21: its samples differ at the same position"),
        (
            {"streams": (9, 8), "loss": 9, "weights": 9},
            "rng",
            "had the same samples, but the RNG stream torch.cpu",
        ),
        ({"streams": (9, 9)}, "rng", "the RNG streams torch.cpu and python differ before the step"),
        ({"batch": 9, "loss": 9}, "batch", "samples and RNG streams, but its batch differs"),
        (
            {"loss": struct.unpack("<Q", struct.pack("<d", 0.25))[0], "weights": 9},
            "loss",
            "its loss is 0.25, and was",
        ),
        ({"grad_norm": 9, "weights": 9}, "grad_norm", "its gradient norm is"),
        (
            {"options": 9, "weights": 9},
            "options",
            "an option of an optimizer, such as its learning rate",
        ),
        (
            {"weights": 9},
            "weights",
            "learning rates, but the weights differ after it: the state of an optimizer",
        ),
    ],
)
def test_first_member_that_differs_tells_causes_apart(
    change: dict[str, Any], what: str, told: str
) -> None:
    found = compared(dataclasses.replace(RECORD, **change))
    assert found.what == what
    assert told in found.detail


def test_only_what_both_have_is_compared() -> None:
    bare = StepRecord(step=21, weights=9, streams=(1,), is_before=False)
    assert compared(bare, same=False).compared == ()
    found = compared(bare)
    assert found.compared == ("weights",)
    assert "observe(loss=..., batch=...) tells these apart" in found.detail


@pytest.mark.parametrize(
    ("gone", "change", "told", "untold"),
    [
        ((), {"batch": 9}, "those of a worker process", "shuffle=True"),
        (("position", "samples"), {"batch": 9}, "that of shuffle=True", ""),
        ((), {"loss": 9}, "averaged weights", "the batch,"),
        (("batch",), {"loss": 9}, "the batch, a state", "random numbers"),
        (("streams",), {"loss": 9}, "random numbers that were drawn after the save", "the batch,"),
        ((), {"weights": 9}, "the state of an optimizer", "an accumulation half-way"),
        (("grad_norm",), {"weights": 9}, "an accumulation half-way", "the batch,"),
        (("loss", "batch"), {"weights": 9}, "the batch, a state", "a scheduler"),
    ],
)
def test_causes_are_those_that_the_members_before_leave(
    gone: tuple[str, ...], change: dict[str, Any], told: str, untold: str
) -> None:
    """An accumulation half-way was told as an optimizer's state, and the order of shuffle=True as a worker's draws."""
    without: dict[str, Any] = {name: () if name == "streams" else None for name in gone}
    earlier = dataclasses.replace(RECORD, **without)
    found = compared(dataclasses.replace(earlier, **change), earlier)
    assert told in found.detail
    assert not untold or untold not in found.detail


def test_streams_of_a_later_step_have_another_cause() -> None:
    found = compared(dataclasses.replace(RECORD, streams=(9, 8)), is_first=False)
    assert found.detail.endswith(
        "the step before, or something after it, drew other random numbers"
    )
    after = dataclasses.replace(RECORD, streams=(9, 8), is_before=False)
    found = compared(after, dataclasses.replace(RECORD, is_before=False))
    assert "torch.cpu differs after it" in found.detail

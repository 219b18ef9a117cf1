"""The benchmark of digests on a GPU: refused without one; its checks and its sums, on the host in place of a device."""

import datetime as dt
import functools
import json
import os

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import gpu_digest
from benchmarks.gpu_saves import measure_saves
from benchmarks.record import build_record, dump_record, format_record
from benchmarks.rounds import Progress, Workplace
from ckptfmt import limits

HOST = torch.device("cpu")

_block_digests = gpu_digest.block_digests


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_is_measured_and_the_status_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit) as raised:
        benchmarks.main(["gpu_digest", "--json", "--directory", str(tmp_path)])

    assert raised.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def measure_on(tmp_path, monkeypatch):
    """Measure on the host, where a state is too small for `auto` to look for a gain."""
    monkeypatch.setattr(
        os, "sync", lambda: None
    )  # nothing is timed here: what others write needn't be waited for
    monkeypatch.setattr(
        gpu_digest, "measure_saves", functools.partial(measure_saves, mode="smallest")
    )

    def measure(nbytes, *, rounds):
        place = Workplace(tmp_path)
        return gpu_digest.measure_on(
            HOST,
            nbytes,
            clock=gpu_digest._WallClock(),
            rounds=rounds,
            place=place,
            progress=Progress(),
        )

    return measure


def test_digests_are_compared_and_every_contestant_is_in_each_round(measure_on):
    outcome = measure_on(limits.BLOCK_NBYTES + 77, rounds=2)

    assert outcome.goals == {
        "digest_vs_d2h": "<= 0.125",
        "digest_vs_d2d": "<= 4",
        "delta_save_1pct_vs_full": "<= 0.1",
    }
    assert outcome.ratios.keys() == outcome.goals.keys()
    assert [sorted(row["seconds"]) for row in outcome.rounds["digest"]] == [
        sorted(outcome.rounds["digest"][0]["order"])
    ] * 2
    assert outcome.figures["digest_gb_per_s"].count == 2
    assert outcome.settings["device"] == {"name": "cpu", "kernels": False}
    checked = outcome.notes["equal_to_host"]
    assert isinstance(checked, dict)
    assert checked["cases"] > 60


def test_digests_and_saves_are_one_record(measure_on, tmp_path):
    outcome = measure_on(5000, rounds=2)
    record = build_record("command", outcome, directory=tmp_path, began=dt.datetime.now(dt.UTC))

    assert (
        outcome.repeats
        == {name: len(rows) for name, rows in outcome.rounds.items()}
        == {"digest": 2, "saves": 2}
    )
    assert outcome.figures["save_delta_stored_nbytes"].median < outcome.workload["saved_nbytes"]
    assert json.loads(dump_record(record))["rounds"].keys() == {"digest", "saves"}
    assert "delta_save_1pct_vs_full" in format_record(record)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            lambda content, _: torch.zeros((len(content), 32), dtype=torch.uint8),
            "not the digests of the host",
        ),
        (
            lambda content, block: _block_digests(content & 254, block),
            "not the digests of the host",
        ),
    ],
    ids=["zeros", "a bit is left out"],
)
def test_another_digest_ends_the_benchmark(measure_on, monkeypatch, fault, words):
    monkeypatch.setattr(gpu_digest, "block_digests", fault)

    with pytest.raises(RuntimeError, match=words):
        measure_on(5000, rounds=1)

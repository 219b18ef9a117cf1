"""The benchmark of digests on a GPU: refused without one; its checks and its sums, on the host in place of a device."""

import time

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import gpu_digest
from benchmarks.rounds import Progress
from ckptfmt import limits
from ckptfmt.interop.torch.blake3 import block_digests

HOST = torch.device("cpu")


class WallClock:
    def time(self, work):
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_is_measured_and_the_status_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit) as raised:
        benchmarks.main(["gpu_digest", "--json", "--directory", str(tmp_path)])

    assert raised.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_digests_are_compared_and_every_contestant_is_in_each_round():
    outcome = gpu_digest.measure_on(HOST, limits.BLOCK_NBYTES + 77, clock=WallClock(), rounds=2, progress=Progress())

    assert outcome.goals == {"digest_vs_d2h": "<= 0.125"}
    assert outcome.ratios.keys() == {"digest_vs_d2h", "digest_vs_d2d", "torch_program_vs_d2h"}
    assert [sorted(row["seconds"]) for row in outcome.rounds["digest"]] == [
        sorted(outcome.rounds["digest"][0]["order"])
    ] * 2
    assert outcome.figures["digest_gb_per_s"].count == 2
    assert outcome.settings["device"] == {"name": "cpu", "kernels": False}
    checked = outcome.notes["equal_to_host"]
    assert isinstance(checked, dict)
    assert checked["cases"] > 60


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda content, _: torch.zeros((len(content), 32), dtype=torch.uint8), "not the digests of the host"),
        (lambda content, block: block_digests(content & 254, block), "not the digests of the host"),
    ],
    ids=["zeros", "a bit is left out"],
)
def test_another_digest_ends_the_benchmark(monkeypatch, fault, words):
    monkeypatch.setattr(gpu_digest, "block_digests", fault)

    with pytest.raises(RuntimeError, match=words):
        gpu_digest.measure_on(HOST, 5000, clock=WallClock(), rounds=1, progress=Progress())

"""A checkpoint that is several times larger than what a conversion may hold passes in every direction."""

import json
import os
import shutil

import pytest

import ckptfmt
from tests.convert import measured
from tests.forks import fork
from tests.part_rows import rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: What a conversion may hold beyond what the program has at its start. The largest tensor alone is
#: twice as large.
LIMIT_NBYTES = 96 << 20


def test_memory_is_constant_in_every_direction(tmp_path):
    """What comes back from files of torch and of DCP is compared bit by bit in test_round_trips.py."""

    def run(target, *arguments):
        process = fork(target, dict(os.environ), str(tmp_path / "output"), *arguments)
        process.join(600)
        assert process.exitcode == 0, (tmp_path / "output").read_text()

    run(measured.make, str(tmp_path))
    assert (tmp_path / "a.pt").stat().st_size > 2.5 * LIMIT_NBYTES
    peaks = {}

    def convert(source, target, *options, drop=()):
        run(
            measured.convert,
            str(tmp_path / "peak"),
            [str(tmp_path / source), str(tmp_path / target), *options],
        )
        peaks[f"{source} to {target}"] = json.loads((tmp_path / "peak").read_text()) >> 20
        for name in drop:
            path = tmp_path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    convert("a.pt", "of-torch", "--to", "ckptfmt", drop=["a.pt"])
    convert("a.dcp", "of-dcp", "--to", "ckptfmt", drop=["a.dcp"])
    assert digests(tmp_path / "of-torch") == digests(tmp_path / "of-dcp")
    shutil.rmtree(tmp_path / "of-dcp")
    for kind in ("torch", "dcp"):
        convert("of-torch", f"b.{kind}", "--to", kind, drop=[f"b.{kind}"])
    convert("of-torch", "b.hf", "--to", "hf")
    convert("b.hf", "back.hf", "--to", "ckptfmt", drop=["b.hf"])
    assert digests(tmp_path / "of-torch") == digests(tmp_path / "back.hf")

    assert len(peaks) == 6, peaks
    assert max(peaks.values()) < LIMIT_NBYTES >> 20, peaks


def digests(path):
    """Return the digests of every block of the weights, by name: equal exactly if the bytes are."""
    with ckptfmt.open(path) as checkpoint:
        part = checkpoint.read_part(0)
        return {
            tensor.name: [(held.box, held.digests) for held in tensor.boxes]
            for tensor in rows_of(part.holdings)
        }

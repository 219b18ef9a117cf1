"""A checkpoint that is several times larger than what a conversion may hold passes in every direction."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckptfmt
from tests.part_rows import rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
#: What a conversion may hold beyond what the program has at its start. The largest tensor alone is twice as large.
LIMIT_NBYTES = 96 << 20

MAKE = """
import sys, warnings, torch, torch.distributed.checkpoint as dcp
torch.manual_seed(0)
model = {"large": torch.randint(-2**31, 2**31 - 1, (56_000, 1_000), dtype=torch.int32).view(torch.float32)}
model |= {f"small.{number}": torch.full((2_621_440,), float(number)) for number in range(12)}
warnings.simplefilter("ignore")
torch.save({"model": model}, sys.argv[1] + "/a.pt")
dcp.save({"model": model}, checkpoint_id=sys.argv[1] + "/a.dcp", no_dist=True)
"""


def test_memory_is_constant_in_every_direction(tmp_path):
    subprocess.run([sys.executable, "-c", MAKE, str(tmp_path)], check=True, cwd=ROOT, timeout=300)
    assert (tmp_path / "a.pt").stat().st_size > 3 * LIMIT_NBYTES
    peaks = {}

    def convert(source, target, *options, drop=()):
        command = [sys.executable, "-m", "tests.convert.measured", str(tmp_path / source), str(tmp_path / target)]
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        peaks[f"{source} to {target}"] = int(done.stdout) >> 20
        for name in drop:
            path = tmp_path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    convert("a.pt", "of-torch", "--to", "ckptfmt", drop=["a.pt"])
    convert("a.dcp", "of-dcp", "--to", "ckptfmt", drop=["a.dcp"])
    assert digests(tmp_path / "of-torch") == digests(tmp_path / "of-dcp")
    shutil.rmtree(tmp_path / "of-dcp")
    for kind in ("torch", "dcp", "hf"):
        convert("of-torch", f"b.{kind}", "--to", kind)
        convert(f"b.{kind}", f"back.{kind}", "--to", "ckptfmt", drop=[f"b.{kind}"])
        assert digests(tmp_path / "of-torch") == digests(tmp_path / f"back.{kind}")
        shutil.rmtree(tmp_path / f"back.{kind}")

    assert len(peaks) == 8, peaks
    assert max(peaks.values()) < LIMIT_NBYTES >> 20, peaks


def digests(path):
    """Return the digests of every block of the weights, by name: equal exactly if the bytes are."""
    with ckptfmt.open(path) as checkpoint:
        part = checkpoint.read_part(0)
        return {tensor.name: [(held.box, held.digests) for held in tensor.boxes] for tensor in rows_of(part.holdings)}

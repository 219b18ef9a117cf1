"""Many simulated writers, whose files are holes: every document, digest and byte is a true one."""

import os

import numpy as np
import pytest

import ckptfmt
from benchmarks.holes import HoleCalls
from benchmarks.rounds import Progress
from benchmarks.scale import Launch, act_alone, list_planted, read_rank, save_and_load
from benchmarks.simulated import Mesh, Simulated
from ckptfmt.errors import IntegrityError

#: 10^4 boxes on 64 writers.
STATE = Simulated(name="small", layers=8, width=512, vocabulary=1000)


def read_all(launch):
    for rank in range(launch.loading.ranks):
        read_rank(launch, rank)


@pytest.fixture(scope="module", params=[1, 8], ids=["fsdp", "tensor-parallel"])
def saved(request, tmp_path_factory):
    saving = Mesh(ranks=64, across=request.param)
    launch = Launch(state=STATE, saving=saving, place=tmp_path_factory.mktemp("scale"))
    return launch, save_and_load(launch, 3, progress=Progress())


def test_each_byte_of_the_state_is_in_one_file_and_costs_no_disk(saved):
    found = saved[1]
    rows = found["write"]
    assert sum(row["boxes"] for row in rows) > 9_000
    assert (
        sum(row["nbytes"] - row["header_nbytes"] for row in rows)
        == STATE.nbytes
        == sum(3 * 4 * int(np.prod(shape)) for _, shape, _ in STATE.parameters())
    )
    (committed,) = found["commit"]
    assert committed["apparent_nbytes"] > STATE.nbytes > 4 * committed["on_disk_nbytes"]


def test_anyone_opens_and_validates_the_checkpoint(saved):
    launch, _ = saved
    report = ckptfmt.validate(launch.directory)
    assert report
    assert report.nbytes > STATE.nbytes
    with ckptfmt.open(launch.directory) as checkpoint:
        assert checkpoint.config["width"] == STATE.width
        assert len(checkpoint.rng) == launch.saving.ranks
        (((_, name, _), box), content), *_ = list_planted(launch, 16).items()
        rows, *columns = (slice(a, a + n) for a, n in zip(box.begin, box.shape, strict=True))
        assert checkpoint.weights[name][(rows, *columns)].tobytes() == content


def test_a_rank_reads_little_beside_its_share_whatever_the_world_size(saved):
    launch, found = saved
    assert launch.loading.ranks != launch.saving.ranks
    of_all = found["commit"][0]["parts_nbytes"]
    for row in found["open"]:
        assert row["parts"] <= launch.saving.across
        assert row["metadata_nbytes"] < of_all / 4
    assert sum(row["planted_nbytes"] for row in found["read"]) > 0
    for row in found["read"]:
        assert row["verified_nbytes"] >= row["needed_nbytes"] > 0
        assert row["metadata_nbytes"] < of_all / 2


def test_a_rank_that_reads_other_bytes_than_saved_says_so(saved):
    launch, _ = saved
    (key, box), content = next(iter(list_planted(launch, 16).items()))
    with ckptfmt.open(launch.directory) as checkpoint:
        stored = checkpoint.tensors[key].sharding
        part = next(part for one, part in stored if one == box)
    assert part == 16
    (path,) = launch.directory.glob(f"weights-*-{part:05d}.safetensors")
    before = path.read_bytes()
    at = before.index(content)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes(len(content)), at)
    try:
        with pytest.raises(IntegrityError):
            read_all(launch)
    finally:
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), content, at)


def test_a_process_of_its_own_acts_as_a_rank(saved):
    launch, found = saved
    first = found["open"][0]
    alone = act_alone("open", launch, first["rank"])
    assert alone["requests"] == first["requests"]
    assert alone["metadata_nbytes"] == first["metadata_nbytes"]


def test_a_hole_is_only_made_of_zeros(tmp_path):
    """Other bytes are written, zeros of the caller's own memory too."""
    calls = HoleCalls()
    with (tmp_path / "file").open("wb") as file:
        for chunk in (b"abc", bytes(4)):
            assert calls.write(file.fileno(), memoryview(chunk)) == len(chunk)
        assert calls.write_at(file.fileno(), memoryview(b"x"), 9) == 1
    assert (tmp_path / "file").read_bytes() == b"abc" + bytes(6) + b"x"

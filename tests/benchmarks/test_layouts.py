"""Cuts and mixtures: what is timed and counted is a layout that covers every element once, or one that doesn't."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks.counting import CountingStore
from benchmarks.dcp_boxes import load_as_rank, save_as_ranks
from benchmarks.fleet import iter_bad, make_origin, write_fleet
from benchmarks.layouts import BLOCK_NBYTES, Cut, Matrices, count_edge_nbytes, save_in_rows
from benchmarks.mixture import describe_mixture, halve, make_mixture, split_rows
from benchmarks.plan import plan_reads
from ckptfmt.box import Box
from ckptfmt.commit.decision import finalize
from ckptfmt.read.reader import Checkpoint
from ckptfmt.store import open_store
from tests.benchmarks.storage import skip_unless_cold
from tests.house.sources import ROOT

CUTS = [Cut(name="c", dim=dim, ranks=ranks) for dim in (0, 1) for ranks in (1, 2, 3, 8)]


def paint(shape, boxes):
    """Return how often each element is covered."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.relative_to(Box.whole(shape))] += 1
    return counts


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_covers_a_matrix_once_and_as_torch_chunk_does(cut):
    shape = (27, 30)
    boxes = [cut.box(shape, rank) for rank in range(cut.ranks)]

    assert (paint(shape, boxes) == 1).all()
    extents = [len(chunk) for chunk in torch.arange(shape[cut.dim]).chunk(cut.ranks)]
    assert [box.shape[cut.dim] for box in boxes if box.element_count] == extents


@pytest.mark.parametrize("cut", CUTS)
def test_what_any_rank_loads_is_its_share(tmp_path, cut):
    matrices = Matrices(3, 24, most=1)
    save_in_rows(tmp_path / "ckptfmt", matrices, Cut(name="rows", dim=0, ranks=4))

    with Checkpoint(open_store(tmp_path / "ckptfmt", writable=False)) as checkpoint:
        for rank in range(cut.ranks):
            matrices.spoil(cut, rank)
            with pytest.raises(RuntimeError, match="other bytes"):
                matrices.check(cut, rank)
            checkpoint.read_into(matrices.sinks(cut, rank))
            matrices.check(cut, rank)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_does_the_same_without_processes(tmp_path):
    matrices = Matrices(3, 24, most=1)
    save_as_ranks(tmp_path / "dcp", matrices, Cut(name="rows", dim=0, ranks=4))

    for cut in CUTS:
        for rank in range(cut.ranks):
            matrices.spoil(cut, rank)
            load_as_rank(tmp_path / "dcp", matrices, cut, rank)
            matrices.check(cut, rank)


def test_block_edges_are_counted_as_whole_blocks_have_them():
    # A row is a tenth of a block: rows 7 to 13 of a piece of 25 touch both of its first blocks, of
    # three.
    shape = (25, BLOCK_NBYTES // 40)
    row_nbytes = shape[1] * 4
    whole, thirds = Cut(name="whole", dim=0, ranks=1), Cut(name="thirds", dim=0, ranks=3)

    counts = count_edge_nbytes(shape, whole, thirds)

    assert thirds.box(shape, 0).shape[0] == 9
    covered = [BLOCK_NBYTES, 2 * BLOCK_NBYTES, 25 * row_nbytes - BLOCK_NBYTES]
    assert counts == {"needed": 25 * row_nbytes, "edges": sum(covered) - 25 * row_nbytes}


@pytest.fixture(scope="module")
def mixture():
    return make_mixture(16, 64)


def test_a_mixture_has_rows_grids_and_irregular_cuts_each_of_its_own_shape(mixture):
    told = describe_mixture(mixture)

    assert told["kinds"] == {
        "rows, torch.chunk": 28,
        "rows, balanced": 28,
        "grid, uneven": 7,
        "irregular": 1,
    }
    assert (told["shapes"], told["boxes"], told["grid"]) == (64, 1024, [4, 4])
    assert make_mixture(16, 64) == mixture


def test_every_tensor_of_a_mixture_is_covered_once_by_what_was_saved_and_by_what_is_asked_for(
    mixture,
):
    for tensor in mixture:
        assert all(box.element_count for box in tensor.boxes)
        assert (paint(tensor.global_shape, tensor.boxes) == 1).all(), tensor.kind
        halves = [box for rank in range(8) for box in halve(tensor, rank)]
        assert (paint(tensor.global_shape, halves) == 1).all(), tensor.kind
        assert (paint(tensor.global_shape, split_rows(tensor, 16)) == 1).all(), tensor.kind


def test_rows_are_uneven_and_grids_are_not_even(mixture):
    for tensor in mixture:
        assert len({box.shape for box in tensor.boxes}) > 1, tensor.kind


def test_bad_tilings_are_bad_each_in_its_own_way(mixture):
    for tensor in {tensor.kind: tensor for tensor in mixture}.values():
        found = {}
        for wrong, boxes in iter_bad(tensor.boxes, tensor.global_shape):
            inside = [box for box in boxes if Box.whole(tensor.global_shape).contains(box)]
            counts = paint(tensor.global_shape, inside)
            found[wrong] = ((counts == 0).any(), (counts > 1).any(), len(inside) < len(boxes))
        assert found["gap"] == (True, False, False)
        assert found["overlap"] == (False, True, False)
        assert found["shifted"] == (True, True, False)
        assert found["out of bounds"][2]


def test_what_is_read_of_the_metadata_is_counted(tmp_path, mixture):
    directory, origin = tmp_path / "fleet", make_origin(16)
    ranks: list[int] = []
    digests = write_fleet(directory, mixture, 16, ranks.append)
    finalize(open_store(directory, writable=True), origin)
    parts = sorted((directory / "parts").iterdir())

    store = CountingStore(directory)
    with Checkpoint(store) as checkpoint:
        before = store.metadata_nbytes
        assert (directory / "manifest.json").stat().st_size < before
        checkpoint.read_part(3)
        assert store.metadata_nbytes - before == parts[3].stat().st_size
        assert plan_reads(checkpoint, []) == 0

    assert store.part_count == 1
    assert digests >= 16 * 64
    assert ranks == list(range(16))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_extra_memory_is_told_for_cold_and_warm(tmp_path):
    def run(action):
        command = [
            sys.executable,
            "-m",
            "benchmarks.extra_memory",
            action,
            str(tmp_path / "files"),
            "4000000",
        ]
        return json.loads(
            subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        )

    skip_unless_cold(tmp_path)
    written = run("write")

    assert written["nbytes"] == pytest.approx(4_000_000, rel=0.2)
    for cache in ("cold", "warm"):
        told = run(cache)
        assert told["nbytes"] == written["nbytes"]
        assert 0 <= told["extra_nbytes"] < 2**28

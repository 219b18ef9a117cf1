"""Read once, share, under gloo: each byte leaves the store once, and reaches everybody who wants it."""

import pytest
import torch

import ckptfmt
from ckptfmt.errors import CkptError, Code
from tests.resharding.launch import launch

pytestmark = pytest.mark.dist

NBYTES = 512 * 2048 * 4


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return launch(
        "tests.resharding.sharing_scenes",
        ["shared", "damaged"],
        world_size=3,
        scratch=tmp_path_factory.mktemp("sharing"),
    )


def test_every_byte_is_there_and_was_read_once(three):
    """REQ-OPN-005, REQ-OPN-006: replicas, columns and rows; without sharing replicas and columns are read thrice."""
    for share in ("False", "True"):
        said = [rank[share] for rank in three.of("shared")]
        assert all(all(rank["same"].values()) for rank in said)
        # Rows of 512 don't divide by three at a block's edge.
        needed = NBYTES * (3 + 1 + 1)
        assert sum(rank["needed_nbytes"] for rank in said) == needed
        read = sum(rank["read_nbytes"] for rank in said)
        received = sum(rank["received_nbytes"] for rank in said)
        if share == "True":
            assert read == 3 * NBYTES
            assert received >= 2 * NBYTES + 2 * NBYTES
        else:
            assert read >= (3 + 3 + 1) * NBYTES
            assert received == 0


def test_damage_fails_all_of_them(three):
    said = three.of("damaged")
    assert sorted(rank["code"] for rank in said) == ["BLOCK_DIGEST", "PEER_FAILED", "PEER_FAILED"]


def test_sharing_without_a_process_group_is_refused(tmp_path):
    """A remedy is named; a single process has nobody to share with."""
    state = ckptfmt.State(weights={"w": torch.ones(3)})
    ckptfmt.save(tmp_path / "c", state, step=1)
    ckptfmt.load(tmp_path / "c", state, share=True)
    with pytest.raises(CkptError) as caught:
        ckptfmt.load(
            tmp_path / "c", state, share=True, writer=(0, 2), agree=lambda value: [value, value]
        )
    assert (caught.value.code, caught.value.where) == (Code.ARGUMENT, "share=")

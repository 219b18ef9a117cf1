"""Durability in manifests and parts: which files a commit looks for, and what a reader says of those that aren't there.

The forms that documents may have are cases of the vectors' area ``caches``.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import ckptfmt
from ckptfmt.commit.decision import check_base, commit
from ckptfmt.documents.durability import HOME, NODE, PEERS
from ckptfmt.documents.manifest import Manifest, Reference, checkpoint_name
from ckptfmt.documents.run import RunRecord
from ckptfmt.errors import Code
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.report import Report
from ckptfmt.read.verify import verify_run
from ckptfmt.store.memory import MemoryStore
from ckptfmt.write.image import Context, plan_image
from ckptfmt.write.writer import LiveContents, write_image
from tests import builders
from tests.builders import code_of, error_of, snapshot, tensor

NAME = checkpoint_name(3, 1)
IN_RUN = {"run_id": builders.RUN_ID, "launch": 1}


def saved(*levels: str, lost: tuple[int, ...] = ()) -> tuple[MemoryStore, Manifest]:
    """Return a run with a checkpoint, each of whose writers says a durability; files of those `lost` aren't there."""
    home = MemoryStore()
    home.create("run.json", [RunRecord(run_id=builders.RUN_ID, writer_features=()).dump()])
    place, origin = home.at(NAME), builders.origin(writer_count=len(levels), **IN_RUN)
    for writer, level in enumerate(levels):
        held = snapshot(tensor(f"w{writer}", np.arange(3.0)))
        image = plan_image(held, written=None, block_nbytes=origin.block_nbytes)
        context = dataclasses.replace(Context.of(held), durability=level)
        write_image(place, image, LiveContents(held, image, None), origin, context, writer=writer)
    for writer in lost:
        place.delete(f"weights-{origin.attempt}-{writer:05d}.safetensors")
    return home, commit(place, origin, deadline_s=1)


@pytest.mark.parametrize(
    ("levels", "found"),
    [
        ((HOME, HOME), HOME), ((NODE, NODE), NODE), ((PEERS, NODE), NODE), ((HOME, PEERS), PEERS), ((NODE, HOME), NODE),
    ],
)  # fmt: skip
def test_a_checkpoint_is_as_durable_as_the_weakest_of_its_parts(
    levels: tuple[str, ...], found: str
) -> None:
    """REQ-CMT-046, REQ-MAN-012"""
    home, manifest = saved(*levels)

    assert manifest.durability == found
    assert manifest.features == (() if found == HOME else ("caches",))
    assert manifest.profile == "full"
    assert (b"durability" in home.read(f"{NAME}/manifest.json", limit_nbytes=1 << 20)) == (
        found != HOME
    )
    assert not builders.verify(home.at(NAME)).violations


def test_a_commit_looks_for_the_files_of_parts_without_durability() -> None:
    """REQ-CMT-007"""
    assert saved(NODE, HOME, lost=(0,))[1].durability == NODE
    assert code_of(lambda: saved(NODE, HOME, lost=(1,))) == Code.FILE_MISSING


def test_what_is_in_caches_is_no_damage() -> None:
    """REQ-OPN-012: opened by its path, of a run, read bit by bit and validated, it has a code of its own."""
    home, _ = saved(NODE, PEERS, lost=(0,))
    place = home.at(NAME)

    found = error_of(lambda: ckptfmt.open(place))
    assert found.code == Code.FILES_IN_CACHES
    assert found.where == f"weights-{builders.ATTEMPT}-00000.safetensors"
    assert "cache=" in found.remedy
    with Checkpoint(place) as checkpoint:
        assert code_of(lambda: checkpoint.read("weights", "w0")) == Code.FILES_IN_CACHES
        assert (checkpoint.read("weights", "w1") == np.arange(3.0)).all()
    assert [error.code for error in builders.verify(place).violations] == [Code.FILES_IN_CACHES]


def test_a_check_of_a_run_says_what_it_could_not_check() -> None:
    """REQ-OPN-012, REQ-OPN-009: it isn't among what was checked."""
    home, _ = saved(NODE, lost=(0,))
    report = Report(target="x", kind="run")
    verify_run(home, report)

    # This run has no record of its launch.
    assert [error.code for error in report.violations] == [Code.FILE_MISSING]
    assert NAME not in report.checkpoints
    assert any("FILES_IN_CACHES" in sentence and NAME in sentence for sentence in report.warnings)


def test_what_is_in_caches_is_no_base() -> None:
    """REQ-CMT-047"""
    for level, code in ((HOME, "ok"), (NODE, Code.BASE_MISSING), (PEERS, Code.BASE_MISSING)):
        home, manifest = saved(level)
        reference = Reference(name=NAME, digest=manifest.digest)
        place = home.at(checkpoint_name(4, 1))
        assert (
            code_of(lambda place=place, reference=reference: check_base(place, reference)) == code
        )

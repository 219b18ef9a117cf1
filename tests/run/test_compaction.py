"""A delta made full: the same parts and bytes as if it had been saved in full, and nothing lost on the way."""

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest

from ckptfmt.box import Box
from ckptfmt.documents.manifest import FIELDS, checkpoint_name, part_path
from ckptfmt.documents.part import Part
from ckptfmt.documents.run import RunRecord
from ckptfmt.errors import Code
from ckptfmt.features import REFERENCED
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.compaction import compact_checkpoint, compact_run
from ckptfmt.run.lineage import begin_launch, find_head, list_launches, open_run
from ckptfmt.run.retention import Retention, clean_up
from ckptfmt.store import LocalStore
from ckptfmt.write.writer import write_part
from ckptfmt_tools.comparison import compare
from tests.builders import (
    code_of,
    error_of,
    leaf,
    origin,
    save,
    snapshot,
    tensor,
    two_writers,
    verify,
)
from tests.chains import Saving, cast_chain
from tests.homes import files_of
from tests.part_rows import rows_of
from tests.stores.faults import Fault, FaultStore

BLOCK = 4096
WRITES = frozenset({"create", "replace", "delete", "sync"})


def later(snapshots, step):
    """Return what the writers hold some steps on: elements of each tensor are an ULP from where they were."""
    found = []
    for held in snapshots:
        sources = []
        for source in held.tensors:
            raw = np.frombuffer(source.array.tobytes(), np.uint8).copy()
            if source.name != "bias":
                raw[: 3 * step] ^= 1
            sources.append(
                dataclasses.replace(
                    source, array=raw.view(source.array.dtype).reshape(source.array.shape)
                )
            )
        leaves = [
            one if one.field != "data" else leaf("data", step, scope=one.scope)
            for one in held.leaves
        ]
        found.append(snapshot(*sources, leaves=leaves, streams=held.streams, absent=held.absent))
    return found


def three_writers():
    """Return two writers with something of every kind and large tensors, and one that holds replicas only."""
    rng = np.random.default_rng(3)
    large = rng.standard_normal((6, 2000)).astype(np.float32)
    replica = tensor("shared", rng.standard_normal(5000).astype(np.float32), replica=True)
    opaque = tensor("opaque", rng.standard_normal(900) + 1j)
    halves = (Box((0, 0), (3, 2000)), Box((3, 0), (3, 2000)))
    found = []
    for half, held in zip(halves, two_writers(), strict=True):
        own = [tensor("large", large, boxes=(half,)), replica]
        own += [opaque] if half.begin[0] else []
        tensors = (*held.tensors, *own)
        found.append(dataclasses.replace(held, tensors=tensors))
    absent = dict.fromkeys(("topology", "provenance"), "not given to State")
    return [*found, snapshot(replica, leaves=found[0].leaves[:2], absent=absent)]


def one_writer():
    """Return what is small and has blocks of each kind."""
    array = np.random.default_rng(3).standard_normal(2000).astype(np.float32)
    return [
        snapshot(
            tensor("w", array), tensor("bias", array[:3]), leaves=[leaf("config", {"lr": 1.0})]
        )
    ]


def written_of(snapshots):
    """Return which pieces each writer writes: of what several hold, the first one alone."""
    seen: set[Any] = set()
    found = []
    for held in snapshots:
        own = {((one.field, one.name, one.scope), box) for one in held.tensors for box in one.boxes}
        found.append(frozenset(own - seen))
        seen |= own
    return found


def chain(make=three_writers, steps=3, store=None):
    """Save a full checkpoint and deltas; return the run and what was saved at each step."""
    first = make()
    saving = Saving(*first, block_nbytes=BLOCK, store=store, written=written_of(first))
    states = {step: later(first, step) for step in range(1, steps + 1)}
    for step, held in states.items():
        saving.save(step, *held)
    assert saving.open(steps).manifest.profile == "delta"
    return saving, states


def contents(checkpoint):
    """Everything that a checkpoint holds, but for who wrote it when."""
    found: dict[Any, Any] = {}
    for item in checkpoint.index.tensors:
        whole = Box.whole(item.global_shape)
        pieces = [(box, bytes(content)) for box, content in checkpoint.iter_content(item, whole)]
        found[item.key] = (item.dtype, item.storage, item.aliases, list(item.sharding), pieces)
    for key in checkpoint.leaves:
        found["leaf", *key] = checkpoint.stored_leaf(checkpoint.leaves[key])
    for key in checkpoint.streams:
        found["stream", *key] = checkpoint.stored_stream(checkpoint.streams[key])
    return found, checkpoint.step, checkpoint.manifest.saved_unix_s, checkpoint.index.absent


def lines_of(files):
    """Files without the attempt in their names."""
    return {
        path.replace(path.split("-")[1], "*"): content
        for path, content in files.items()
        if "-" in path
    }


# --- outside of a run -----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3])
def test_it_holds_what_was_saved_and_reads_from_nothing(home, step):
    """REQ-CKP-007: with a nonce of its own, of no run."""
    saving, _ = chain(store=home.store())
    out = home.store()
    told: list[int] = []
    manifest = compact_checkpoint(saving.open(step), out, on_progress=told.append)

    made, old = Checkpoint(out), saving.open(step)
    assert made.digest == manifest.digest
    assert contents(made) == contents(old)
    assert (manifest.profile, manifest.features, manifest.references) == ("full", (), ())
    assert (manifest.origin.run_id, manifest.origin.launch) == (None, None)
    assert manifest.origin.nonce != old.manifest.origin.nonce
    assert manifest.origin.attempt != old.manifest.origin.attempt
    assert (manifest.origin.writer_count, manifest.origin.block_nbytes) == (3, BLOCK)
    assert verify(out).valid
    assert verify(out).warnings == []
    written = sum(
        tensor.box_nbytes(box.box)
        for number in range(3)
        for tensor in rows_of(made.read_part(number).holdings)
        for box in tensor.boxes
        if box.extents
    )
    assert sum(told) == written


def test_its_files_are_those_of_a_full_save(home, monkeypatch):
    """REQ-SHD-003: shards, byte by byte, and what each writer holds without having written it."""
    saving, states = chain(store=home.store())
    out, full = home.store(), home.store()
    monkeypatch.setattr("time.time", lambda: saving.open(3).manifest.saved_unix_s)
    compact_checkpoint(saving.open(3), out)
    at = origin(writer_count=3, block_nbytes=BLOCK)
    for number, (held, written) in enumerate(zip(states[3], written_of(states[3]), strict=True)):
        write_part(full, held, at, writer=number, written=written)
        assert rows_of(Checkpoint(out).read_part(number).holdings) == rows_of(
            part_of(full, number).holdings
        )
    shards = {
        path: content
        for path, content in lines_of(files_of(out)).items()
        if path.endswith(".safetensors")
    }
    assert shards == {
        path: one for path, one in lines_of(files_of(full)).items() if path.endswith(".safetensors")
    }
    assert len(shards) >= 4


def part_of(store, number):
    path = part_path(origin().attempt, number)
    return Part.parse(store.read(path, limit_nbytes=1 << 20), where=path)[0]


def test_a_full_checkpoint_is_copied(home):
    store, out = home.store(), home.store()
    save(store, *two_writers())
    compact_checkpoint(Checkpoint(store), out)

    assert contents(Checkpoint(out)) == contents(Checkpoint(store))


def test_what_is_predicted_becomes_raw(home):
    """REQ-DEL-010: members of a group, in files of different fields and in blocks of different numbers of elements."""
    saving = cast_chain(store=home.store())
    out = home.store()
    compact_checkpoint(saving.open(2), out)

    assert contents(Checkpoint(out)) == contents(saving.open(2))
    assert compare(Checkpoint(out), saving.open(2), fields=FIELDS).is_same


def test_where_something_is_nothing_is_written(home):
    """REQ-CMT-008."""
    saving, _ = chain(store=home.store())
    out = home.store()
    save(out, *two_writers())
    before = files_of(out)

    assert code_of(lambda: compact_checkpoint(saving.open(3), out)) == Code.CHECKPOINT_EXISTS
    assert files_of(out) == before


@pytest.mark.parametrize("sticky", [False, True], ids=["error", "killed"])
@pytest.mark.long_on_s3
def test_interrupted_anywhere_it_leaves_no_checkpoint_and_works_when_done_again(home, sticky):
    """REQ-CKP-005, REQ-CMT-027: what a killed one left goes when the next one has committed."""
    saving, _ = chain(one_writer if sticky else three_writers, steps=2, store=home.store())
    expected = contents(saving.open(2))
    reached = set()
    for fail_at in range(1, 200, 1 if sticky else 3):
        inner = home.store()
        fault = Fault(fail_at=fail_at, sticky=sticky)
        out = FaultStore(inner, fault)
        outcome = code_of(lambda out=out: compact_checkpoint(saving.open(2), out))
        reached.add(outcome)
        if not fault.fired_count:
            break
        left = files_of(inner)
        if "manifest.json" not in left:
            assert code_of(lambda inner=inner: Checkpoint(inner)) == Code.NOT_COMMITTED
            compact_checkpoint(saving.open(2), inner)
        assert contents(Checkpoint(inner)) == expected
        report = verify(inner)
        assert report.valid
        assert outcome == "ok" or report.warnings == [] or "manifest.json" in left
    assert reached >= {"ok", "STORE_IO"}
    assert fail_at > 10


def test_damage_in_a_base_stops_it(home):
    """REQ-OPN-006."""
    saving, _ = chain(steps=2, store=home.store())
    files = dict(files_of(saving.store))
    (path,) = [
        path
        for path in files
        if path.startswith(f"{checkpoint_name(1, 1)}/weights-") and "-00001" in path
    ]
    files[path] = files[path][:-1] + bytes([files[path][-1] ^ 1])
    out = home.store()
    damaged = home.store(files).at(checkpoint_name(2, 1))
    error = error_of(lambda: compact_checkpoint(Checkpoint(damaged), out))

    assert error.code == Code.BLOCK_DIGEST
    assert error.where.startswith(path)
    assert code_of(lambda: Checkpoint(out)) == Code.NOT_COMMITTED


def test_memory_does_not_grow_with_a_tensor(tmp_path):
    """REQ-OPN-008."""
    rng = np.random.default_rng(1)
    held = [snapshot(tensor("w", rng.standard_normal(6 << 20).astype(np.float32)))]
    store = LocalStore(tmp_path / "run", writable=True)
    saving = Saving(*held, block_nbytes=1 << 16, store=store)
    for _ in range(2):
        saving.save(saving.number + 1, *held)
        held = later(held, 1000)
    assert saving.open(2).manifest.stored_nbytes < 1 << 20
    del saving.writers, held
    checkpoint = saving.open(2)
    checkpoint.open_part(0)
    tracemalloc.start()
    compact_checkpoint(checkpoint, LocalStore(tmp_path / "full", writable=True))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20  # of 24 MiB


# --- in the run -----------------------------------------------------------------------------------


def test_in_a_run_it_is_the_first_commit_of_a_launch_that_goes_on_from_the_delta(home):
    """REQ-CKP-006, REQ-RUN-008: no name is used twice, and lineage leads through the delta."""
    saving, _ = chain(store=home.store())
    delta = saving.open(3)
    name, manifest, is_new = compact_run(saving.store)

    assert (name, is_new) == (checkpoint_name(3, 2), True)
    launch: Any = list_launches(saving.store, saving.run)[-1]
    assert (launch.launch, launch.chosen_by) == (2, "hand")
    assert (launch.resume_from.name, launch.resume_from.digest) == (
        checkpoint_name(3, 1),
        delta.digest,
    )
    assert (manifest.origin.run_id, manifest.origin.nonce) == (saving.run.run_id, launch.nonce)
    assert find_head(saving.store)[0] == name
    assert contents(Checkpoint(saving.store.at(name))) == contents(delta)
    after: Any = begin_launch(saving.store, saving.run)[0]
    assert after.resume_from.digest == manifest.digest


def test_afterwards_the_old_may_go(home):
    saving, _ = chain(store=home.store())
    expected = contents(saving.open(3))
    name, _, _ = compact_run(saving.store)
    launch, _ = begin_launch(saving.store, saving.run)
    removed = clean_up(
        saving.store, saving.run, launch=launch.launch, retention=Retention(newest=1)
    )

    assert sorted(removed) == [checkpoint_name(step, 1) for step in (1, 2, 3)]
    assert contents(Checkpoint(saving.store.at(name))) == expected


def test_what_is_full_already_stays_as_it_is(home):
    saving, _ = chain(store=home.store())
    compact_run(saving.store)
    before = files_of(saving.store)
    name, manifest, is_new = compact_run(saving.store)

    assert (name, manifest.profile, is_new) == (checkpoint_name(3, 2), "full", False)
    assert files_of(saving.store) == before


@pytest.mark.parametrize("sticky", [False, True], ids=["error", "killed"])
@pytest.mark.long_on_s3
def test_interrupted_anywhere_the_run_goes_on_from_where_it_was(home, sticky):
    """REQ-RUN-006: from the delta, or from the full one; and doing it again works."""
    saving, _ = chain(one_writer, steps=2, store=home.store())
    files = files_of(saving.store)
    expected = contents(saving.open(2))
    for fail_at in range(1, 400):
        inner = home.store(files)
        fault = Fault(fail_at=fail_at, sticky=sticky, operations=WRITES)
        store = FaultStore(inner, fault)
        code_of(lambda store=store: compact_run(store))
        if not fault.fired_count:
            break
        run = open_run(inner)
        launch: Any = begin_launch(home.store(files_of(inner)), run)[0]
        assert launch.resume_from.name in {checkpoint_name(2, number) for number in (1, 2)}
        assert contents(Checkpoint(inner.at(launch.resume_from.name))) == expected
        name, manifest, _ = compact_run(inner)
        assert (manifest.profile, manifest.origin.step) == ("full", 2)
        assert contents(Checkpoint(inner.at(name))) == expected
    assert fail_at > 10


def test_somebody_who_is_saving_is_not_fenced_off(tmp_path):
    """REQ-RUN-018."""
    store = LocalStore(tmp_path, writable=True)
    chain(one_writer, steps=2, store=store)
    with store.hold("savers/0001-00000-0123456789abcdef"):
        assert (
            code_of(lambda: compact_run(LocalStore(tmp_path, writable=True), deadline_s=0))
            == Code.SAVE_PENDING
        )
    assert store.list_names("launches") == ["0001.json"]
    assert compact_run(store)[2]


def test_a_run_with_a_feature_that_is_not_known_is_left_alone(home):
    """REQ-VER-003."""
    saving, _ = chain(steps=2, store=home.store())
    files = dict(files_of(saving.store))
    files["run.json"] = RunRecord(
        run_id=saving.run.run_id, writer_features=(REFERENCED, "unheard-of")
    ).dump()
    store = home.store(files)

    assert code_of(lambda: compact_run(store)) == Code.FEATURE_UNSUPPORTED
    assert files_of(store) == files


def test_a_damaged_head_is_refused_before_a_launch_is_made(home):
    """REQ-RUN-012."""
    saving, _ = chain(steps=2, store=home.store())
    files = dict(files_of(saving.store))
    (path,) = [
        path
        for path in files
        if path.startswith(f"{checkpoint_name(1, 1)}/parts/") and "-00000." in path
    ]
    del files[path]
    store = home.store(files)

    assert error_of(lambda: compact_run(store)).where == path
    assert store.list_names("launches") == ["0001.json"]

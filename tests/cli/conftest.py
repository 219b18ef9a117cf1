"""Small checkpoints and runs on disk, made by the engines, and the ways to call the command line."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from ckptfmt.__main__ import main
from ckptfmt.box import Box
from ckptfmt.commit.decision import abort, commit
from ckptfmt.documents.manifest import Origin, checkpoint_name
from ckptfmt.documents.part import Leaf, RngStream
from ckptfmt.documents.tree import dump_tree
from ckptfmt.features import LABELS
from ckptfmt.run.lineage import begin_launch, open_run
from ckptfmt.store import LocalStore
from ckptfmt.write.snapshot import Snapshot
from ckptfmt.write.writer import write_part

ROOT = pathlib.Path(__file__).resolve().parents[2]
ATTEMPT = "a" * 16
CONFIG = {
    "lr": 3e-4,
    "betas": (0.9, 0.95),
    "bad": float("nan"),
    1: b"\x00\xff",
    "model": {"width": 512},
}
CURSOR = {
    "kind": "ckptfmt.data_cursor",
    "v": 1,
    "plan": {"unit": "sample", "global_batch": 4, "assign": "contig-v1", "tail": "carry"},
    "commit": {"step": 3, "global_pos": 12, "epoch": 1, "pos_in_epoch": 2},
    "order": {"alg": "feistel-v1", "seed": 7, "vector_check": {"pos": 12, "id": 3}},
    "sources": [{"id": "books", "fingerprint": None, "n": 10}],
    "skips": [],
    "ledger": {"alg": "mix64-add4-v1", "count": 12, "set_digest": "0" * 64},
}


@dataclasses.dataclass(kw_only=True)
class Source:
    """A piece of an array, ready to be written; a `ckptfmt.write.snapshot.TensorSource`."""

    name: str
    array: np.ndarray
    field: str = "weights"
    box: Box | None = None
    scope: str = "global"
    replica: bool = False
    storage: str = "persistent"
    aliases: tuple[str, ...] = ()

    @property
    def dtype(self):
        return str(self.array.dtype)

    @property
    def global_shape(self):
        return self.array.shape

    @property
    def boxes(self):
        return (self.box or Box.whole(self.array.shape),)

    def copy_into(self, box, out):
        out[:] = np.ascontiguousarray(
            self.array[box.relative_to(Box.whole(self.array.shape))]
        ).tobytes()


def leaf_of(field, value, name="", scope="global"):
    return Leaf(field=field, name=name, scope=scope, value=dump_tree(value, where=field))


def snapshot_of(writer, writer_count, *, leaves=None, names=("layers.0.w", "layers.1.w")):
    rows = 12 // writer_count
    array = np.arange(12 * 700, dtype=np.float32).reshape(12, 700)
    box = Box((writer * rows, 0), (rows, 700))
    tensors = [Source(name=name, array=array, box=box) for name in sorted(names)]
    tensors.append(Source(name="scale", array=np.array(5.0), aliases=("tied.scale",)))
    return Snapshot(
        tensors=tuple(tensors),
        streams=(
            RngStream(
                name="python",
                scope=f"lw/{writer}",
                kind="python.mt19937",
                state=dump_tree((1, 2), where=""),
            ),
        ),
        leaves=tuple(
            leaves if leaves is not None else [leaf_of("config", CONFIG), leaf_of("data", CURSOR)]
        ),
        absent={"optimizer": "not given to State"},
    )


def save(
    store,
    *,
    step=3,
    attempt=ATTEMPT,
    writer_count=1,
    run_id=None,
    launch=None,
    nonce="0" * 32,
    **options,
):
    """Commit one checkpoint in the root of `store`."""
    origin = Origin(
        run_id=run_id,
        launch=launch,
        nonce=nonce,
        step=step,
        attempt=attempt,
        writer_count=writer_count,
        block_nbytes=4096,
    )
    for writer in range(writer_count):
        write_part(store, snapshot_of(writer, writer_count, **options), origin, writer=writer)
    return commit(store, origin, deadline_s=5)


def save_in_run(store, launch, step, **options):
    """Commit one checkpoint of a launch."""
    return save(
        store.at(checkpoint_name(step, launch.launch)),
        step=step,
        attempt=f"{launch.launch:08x}{step:08x}",
        run_id=launch.run_id,
        launch=launch.launch,
        nonce=launch.nonce,
        **options,
    )


def make_run(path):
    """Make a run with a rollback by hand, an attempt that was given up, and one that never finished."""
    store = LocalStore(path, writable=True)
    run = open_run(store, writer_features=(LABELS,))
    first, _ = begin_launch(store, run)
    for step in (10, 20, 30):
        save_in_run(store, first, step)
    store.at(checkpoint_name(40, 1)).create("parts/unfinished.msgpack", [b"x" * 2048])
    second, _ = begin_launch(store, run, choose=checkpoint_name(20, 1))
    save_in_run(store, second, 30)
    abort(store.at(checkpoint_name(40, 2)), run_id=run.run_id, launch=2, step=40, reason="given up")
    save_in_run(store, second, 50)
    return store


@pytest.fixture(scope="session")
def _masters():
    with tempfile.TemporaryDirectory(prefix="ckptfmt-cli-") as folder:
        masters = pathlib.Path(folder)
        save(LocalStore(masters / "checkpoint", writable=True), writer_count=2)
        make_run(masters / "run")
        yield masters


@pytest.fixture
def checkpoint_path(_masters, tmp_path):
    """A checkpoint of two writers, outside of a run; the test may damage it."""
    return pathlib.Path(shutil.copytree(_masters / "checkpoint", tmp_path / "checkpoint"))


@pytest.fixture
def run_path(_masters, tmp_path):
    """The run of `make_run`; the test may damage it."""
    return pathlib.Path(shutil.copytree(_masters / "run", tmp_path / "run"))


@pytest.fixture
def call(capsys):
    """Call the command line in this process: exit code, standard output, standard error."""

    def call(*argv):
        code = main([str(argument) for argument in argv])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def call_json(call):
    """Call the command line with --json: exit code and the object."""

    def call_json(*argv):
        code, out, _ = call(*argv, "--json")
        return code, json.loads(out)

    return call_json


def spawn(*argv, **options):
    """Call the command line in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-m", "ckptfmt", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
        **options,
    )

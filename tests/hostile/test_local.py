"""Files that aren't files, on a real file system: rows 44 to 59; REQ-CKP-002."""

import os
import pathlib

import numpy as np
import pytest

import ckptfmt
from ckptfmt.errors import CkptError, Code, StoreError
from ckptfmt.run.lineage import begin_launch, list_checkpoints, open_run
from ckptfmt.run.retention import Retention, clean_up
from ckptfmt.store import LocalStore
from tests.builders import read_all, save, small_files, two_writers, verify

FILES = small_files()


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "checkpoint"
    save(LocalStore(path, writable=True), *two_writers())
    return path


def paths(root):
    return sorted(path for path in root.rglob("*") if path.is_file())


def codes(root):
    store = LocalStore(root, writable=False)
    report = verify(store)
    try:
        read_all(store)
        loaded = "ok"
    except CkptError as error:
        loaded = str(error.code)
    return {str(violation.code) for violation in report.violations}, loaded


def test_a_saved_checkpoint_is_sound(root):
    assert codes(root) == (set(), "ok")
    assert {path.relative_to(root).as_posix() for path in paths(root)} == FILES.keys()


def moved(path, outside):
    target = outside / path.name
    target.write_bytes(path.read_bytes())
    return target


NOT_REGULAR = {
    "44 link to the same bytes outside": lambda path, outside: path.symlink_to(
        moved(path, outside)
    ),
    "44 link to itself": lambda path, _: path.symlink_to(path.name),
    "44 dangling link": lambda path, outside: path.symlink_to(outside / "nowhere"),
    "46 FIFO": lambda path, _: os.mkfifo(path),
    "46 directory": lambda path, _: path.mkdir(),
    "46 device": lambda path, _: path.symlink_to("/dev/zero"),
}
PLACES = ["manifest.json", "index", "parts/", "weights-", "weights_opaque-", "optimizer-"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", NOT_REGULAR)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_regular_file_is_refused(root, tmp_path, place, kind):
    path = next(path for path in paths(root) if path.relative_to(root).as_posix().startswith(place))
    (tmp_path / "outside").mkdir()
    content = path.read_bytes()
    if "outside" in kind:
        target = tmp_path / "outside" / "copy"
        target.write_bytes(content)
        path.unlink()
        path.symlink_to(target)
    else:
        path.unlink()
        NOT_REGULAR[kind](path, tmp_path / "outside")
    verified, loaded = codes(root)
    assert verified == {Code.UNSAFE_FILE}
    # A second copy of a replica isn't read.
    assert (
        loaded in (Code.UNSAFE_FILE, "ok") if place == "optimizer-" else loaded == Code.UNSAFE_FILE
    )


def test_a_directory_that_is_a_link_is_refused(root, tmp_path):
    """Row 45."""
    (root / "parts").rename(tmp_path / "elsewhere")
    (root / "parts").symlink_to(tmp_path / "elsewhere")
    assert codes(root) == ({Code.UNSAFE_FILE}, Code.UNSAFE_FILE)


def test_the_opened_path_itself_may_be_a_link(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    assert codes(tmp_path / "link") == (set(), "ok")


@pytest.mark.parametrize("place", ["index", "parts/", "weights-"])
def test_a_sparse_file_of_2_to_the_40_is_not_read(root, place):
    """Row 57."""
    path = next(path for path in paths(root) if path.relative_to(root).as_posix().startswith(place))
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    verified, loaded = codes(root)
    assert verified == {Code.FILE_NBYTES}
    assert loaded == Code.FILE_NBYTES or place == "weights-"


def test_a_sparse_manifest_is_not_read(root):
    """Rows 4 and 57; REQ-MAN-004."""
    with (root / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)
    assert codes(root) == ({Code.LIMIT_EXCEEDED}, Code.LIMIT_EXCEEDED)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_the_stores_error(root):
    """Row 59: nobody says that the checkpoint is damaged."""
    (root / "manifest.json").chmod(0)
    with pytest.raises(StoreError) as raised:
        verify(LocalStore(root, writable=False))
    assert raised.value.code == Code.STORE_ACCESS


def test_reading_writes_nothing(root):
    """REQ-VER-005."""
    for path in [root, *root.rglob("*")]:
        os.utime(path, ns=(1, 1))
    assert codes(root) == (set(), "ok")
    assert {path.stat().st_mtime_ns for path in [root, *root.rglob("*")]} == {1}
    assert {path.relative_to(root).as_posix() for path in paths(root)} == FILES.keys()


@pytest.fixture
def moved_run(tmp_path):
    """A run of three deltas behind a full checkpoint, whose newest lies elsewhere, and a link is in its place."""
    weights = np.zeros(4096, np.float32)
    state = ckptfmt.State(weights={"w": weights})
    delta = {"mode": "smallest", "full_every": 9}
    with ckptfmt.Checkpointer(
        tmp_path / "run", state, saver="thread", delta=delta, keep=9
    ) as checkpointer:
        for step in range(1, 4):
            weights[step] = step
            handle = checkpointer.save(step=step)
            assert handle is not None
            handle.wait()
    newest = max((tmp_path / "run").glob("step-*"))
    newest.rename(tmp_path / newest.name)
    newest.symlink_to(tmp_path / newest.name)
    return tmp_path / "run"


def test_a_link_in_the_place_of_a_checkpoint_is_passed_over_by_name(moved_run):
    """REQ-RUN-008, REQ-CKP-002: a launch that doesn't see it would go back a step, and say nothing of it."""
    passed_over: list[str] = []
    store = LocalStore(moved_run, writable=True)

    with pytest.raises(ckptfmt.CkptError) as opened:
        ckptfmt.open(moved_run)
    launch, checkpoint = begin_launch(store, open_run(store), on_passed_over=passed_over.append)

    assert opened.value.code == Code.UNSAFE_FILE
    assert checkpoint is not None
    assert (launch.chosen_by, checkpoint.step) == ("fallback", 2)
    assert [text.split()[0] for text in passed_over] == ["step-00000003-l0001"]
    assert [error.code for error in ckptfmt.validate(moved_run).violations] == [Code.UNSAFE_FILE]
    assert "step-00000003-l0001" in [entry.name for entry in list_checkpoints(store)]


def test_a_base_behind_a_link_is_found_where_the_caller_says(moved_run, tmp_path):
    """REQ-DEL-020: beside a checkpoint is in the directory that the links of its path lead to."""
    newest = next(path for path in moved_run.iterdir() if path.is_symlink())
    bases = [path for path in sorted(moved_run.glob("step-*")) if path != newest]

    assert ckptfmt.open(newest, bases=[moved_run]).weights["w"][:4].tolist() == [0, 1, 2, 3]
    with pytest.raises(ckptfmt.CkptError) as missing:
        ckptfmt.open(newest).weights["w"][:]
    assert missing.value.code == Code.BASE_MISSING

    for base in bases:
        (tmp_path / base.name).symlink_to(base)
    with pytest.raises(ckptfmt.CkptError) as linked:
        ckptfmt.open(newest).weights["w"][:]
    assert linked.value.code == Code.BASE_MISMATCH
    assert ckptfmt.open(newest, bases=[tmp_path / base.name for base in bases]).weights["w"][
        :4
    ].tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_clean_up_follows_no_link_out_of_a_run(tmp_path):
    """Row 44: a link with the name of an old checkpoint is nobody's checkpoint."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    store = LocalStore(tmp_path / "run", writable=True)
    run = open_run(store)
    begin_launch(store, run)
    launch, _ = begin_launch(store, run)
    pathlib.Path(tmp_path / "run" / "step-00000001-l0001").symlink_to(outside)
    clean_up(store, run, launch=launch.launch, retention=Retention(newest=1))
    assert (outside / "precious").read_bytes() == b"x"
    assert sorted(path.name for path in outside.iterdir()) == ["precious"]

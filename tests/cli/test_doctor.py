"""`doctor`, `repair` and `completion`: will it do, what can be mended, and what the shell completes."""

import errno
import shutil
import subprocess
import sys

import pytest

import ckptfmt
from ckptfmt.errors import Code, err
from ckptfmt.run.lineage import begin_launch, open_run
from ckptfmt.store import LocalStore, open_store
from ckptfmt.store.posix import PosixCalls
from ckptfmt.write.slot import Slot
from ckptfmt_tools.cli import doctor
from tests.cli.conftest import save
from tests.cli.test_listing import contents_of

NAME = "step-00000050-l0002"


def states_of(answer):
    return {one["about"]: one["state"] for one in answer["findings"]}


# doctor


def test_doctor_finds_a_good_place_good_and_leaves_nothing_behind(call, call_json, run_path):
    before = contents_of(run_path.parent)

    code, answer = call_json("doctor", run_path)

    assert code == 0
    states = states_of(answer)
    assert {
        states[about] for about in ("ckptfmt", "commits", "a file", "holds", "place", "slots")
    } == {"ok"}
    details = {one["about"]: one["detail"] for one in answer["findings"]}
    assert details["ckptfmt"].startswith(f"{ckptfmt.__version__}, format ")
    assert "2 of 2 slots of 65.6 KiB each" in details["slots"]
    assert contents_of(run_path.parent) == before
    assert call("doctor")[0] == 0
    # Where nothing is yet, the place above it is tried out, and nothing is made.
    assert call("doctor", run_path.parent / "new" / "run")[0] == 0
    assert not (run_path.parent / "new").exists()


def test_doctor_names_what_a_place_lacks(call, call_json, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(PosixCalls, "set_direct", refuse)
    assert states_of(call_json("doctor", tmp_path)[1])["direct I/O"] == "warning"
    monkeypatch.setattr(PosixCalls, "link", refuse)
    monkeypatch.setattr(PosixCalls, "rename_noreplace", refuse)
    code, out, _ = call("doctor", tmp_path)
    assert code == 1
    (line,) = [line for line in out.splitlines() if line.startswith("failed")]
    assert "STORE_UNSUPPORTED" in line
    assert str(tmp_path) in line
    assert ".tmp-" not in out
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_a_place_that_cannot_be_looked_at(call_json):
    """A bare OSError."""
    code, answer = call_json("doctor", "a" * 300)
    (found,) = [one for one in answer["findings"] if one["about"] == "place"]
    assert (code, found["state"]) == (1, "failed")
    assert "File name too long" in found["detail"]


def test_doctor_counts_the_slots_that_memory_has_room_for(call_json, run_path, monkeypatch):
    margin = 1 << 28  # which stays free
    for room_nbytes, processes, state in (
        (margin + (3 << 17), 1, "ok"),
        (margin + (3 << 15), 1, "warning"),
        (0, 1, "failed"),
        (margin, 64, "failed"),
    ):
        monkeypatch.setattr(doctor, "available_nbytes", lambda room_nbytes=room_nbytes: room_nbytes)
        code, answer = call_json("doctor", run_path, "--processes", processes)
        assert states_of(answer)["slots"] == state
        assert code == (1 if state == "failed" else 0)
    assert call_json("doctor", run_path, "--processes", 0)[0] == 2


def test_doctor_says_if_shared_memory_is_refused(call_json, monkeypatch):
    def refuse(*_, **__):
        raise err(Code.SLOT_MEMORY, "no memfd")

    monkeypatch.setattr(Slot, "make", refuse)
    code, answer = call_json("doctor")
    assert (code, states_of(answer)["slots"]) == (1, "failed")


# repair


def test_repair_mends_from_a_mirror_byte_for_byte(call, call_json, run_path, tmp_path):
    assert call("mirror", run_path, tmp_path / "mirror")[0] == 0
    before = contents_of(run_path)
    shard = next((run_path / NAME).glob("weights-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (run_path / NAME / "manifest.json").write_bytes(b"{}")
    damaged = contents_of(run_path)

    code, answer = call_json("repair", run_path, "--with", tmp_path / "mirror", "--dry-run")
    assert (code, len(answer["damages"]), contents_of(run_path) == damaged) == (1, 2, True)
    code, out, _ = call("repair", run_path, "--with", tmp_path / "mirror")

    assert code == 0
    assert out.count("rewritten") == 2
    assert contents_of(run_path) == before
    assert call("validate", run_path, "--quiet")[0] == 0


def test_repair_says_what_the_run_goes_on_from_where_damage_stays(call, call_json, run_path):
    shard = next((run_path / NAME).glob("weights-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")

    code, out, _ = call("repair", run_path)

    assert code == 1
    assert f"beyond repair  {run_path}/{NAME}/{shard.name}" in out
    assert "The next launch goes on from step-00000030-l0002" in out
    assert "Another copy can mend it: --with DEST." in out
    assert call_json("repair", run_path)[1]["head"] == "step-00000030-l0002"
    for other in run_path.glob("step-*/weights-*"):
        other.unlink()
    assert "the next launch would refuse to start" in call("repair", run_path)[1]


def test_repair_names_what_a_launch_passed_over_before_it(call, run_path, tmp_path):
    """A start between damage and repair leaves the mended checkpoint beside the lineage: "whole" alone misleads."""
    assert call("mirror", run_path, tmp_path / "mirror")[0] == 0
    shard = next((run_path / NAME).glob("weights-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    store = open_store(run_path, writable=True)
    assert begin_launch(store, open_run(store))[0].chosen_by == "fallback"

    code, out, _ = call("repair", run_path, "--with", tmp_path / "mirror")
    assert code == 0
    assert "The next launch goes on from step-00000030-l0002" in out
    assert f"beside the lineage: {NAME}; to go on from one of these" in out
    begin_launch(store, open_run(store), choose=NAME)
    assert "beside the lineage" not in call("repair", run_path, "--with", tmp_path / "mirror")[1]


def test_repair_mends_a_checkpoint_outside_of_a_run(call, checkpoint_path, tmp_path):
    """`repair CHECKPOINT --with COPY`: register, index and shard; and another checkpoint is no copy."""
    shutil.copytree(checkpoint_path, tmp_path / "copy")
    before = contents_of(checkpoint_path)
    shard = next(checkpoint_path.glob("weights-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    next(checkpoint_path.glob("parts/*")).unlink()
    (checkpoint_path / "manifest.json").write_bytes(b"{}")
    assert call("repair", checkpoint_path)[0] == 2
    assert "no copy has a manifest.json that can be read" in call("repair", checkpoint_path)[2]

    code, out, _ = call("repair", checkpoint_path, "--with", tmp_path / "copy")

    assert (code, out.count("rewritten")) == (0, 3)
    assert contents_of(checkpoint_path) == before
    shard.write_bytes(b"")
    code, out, _ = call("repair", checkpoint_path)
    assert code == 1
    assert "Loads that need one of the damaged files are refused" in out
    save(LocalStore(tmp_path / "other", writable=True), step=4)
    code, out, err = call("repair", checkpoint_path, "--with", tmp_path / "other")
    assert (code, out) == (2, "")
    assert "HOMES_DIVERGED" in err
    assert contents_of(tmp_path / "copy") == before


# completion


def test_the_shell_completes_commands_and_options():
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    assert bash is not None
    script = subprocess.run(
        [sys.executable, "-m", "ckptfmt", "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    asked = "\n".join(
        f"COMP_WORDS=({words}); COMP_CWORD={count}; _shtab_ckptfmt; echo ${{COMPREPLY[@]}}"
        for words, count in (("ckptfmt va", 1), ("ckptfmt gc --dr", 2), ("ckptfmt ls /et", 2))
    )
    done = subprocess.run(
        [bash, "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines() == ["validate", "--dry-run", "/etc"]


def test_completion_without_shtab_says_what_to_install(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)

    code, out, text = call("completion", "bash")

    assert (code, out) == (2, "")
    assert 'pip install "ckptfmt[completion]"' in text

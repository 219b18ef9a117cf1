"""A target is there whole or not at all; what a person sees meanwhile, and what a program does."""

import errno
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt_tools.convert.content import Tensor
from tests.cli.conftest import ROOT, spawn
from tests.convert.made import done, refused, trees

KINDS = ("torch", "dcp", "hf")


@pytest.fixture
def checkpoint(tmp_path):
    ckptfmt.save(
        tmp_path / "ckpt", ckptfmt.State(weights={"a": torch.ones(9), "b": torch.zeros(3)}), step=1
    )
    return tmp_path / "ckpt"


def stop_at_second(monkeypatch, error):
    """Let the second tensor that is read fail."""
    read, count = Tensor.iter_chunks, [0]

    def iter_chunks(self):
        for box in read(self):
            count[0] += 1
            if count[0] == 2:
                # Not where a plan is made: where bytes are asked for.
                self.read = fail
            yield box

    def fail(_box, _out):
        raise error

    monkeypatch.setattr(Tensor, "iter_chunks", iter_chunks)


@pytest.mark.parametrize("kind", KINDS)
def test_interrupt_leaves_nothing(kind, checkpoint, tmp_path, monkeypatch, capsys):
    stop_at_second(monkeypatch, KeyboardInterrupt())

    assert (
        main(["convert", str(checkpoint), str(tmp_path / "a"), "--to", kind, "--only", "weights"])
        == 130
    )
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    assert "interrupted" in capsys.readouterr().err


def test_interrupt_of_an_import_leaves_nothing(tmp_path, monkeypatch):
    torch.save({"a": torch.ones(9), "b": torch.zeros(3)}, tmp_path / "a.pt")
    stop_at_second(monkeypatch, KeyboardInterrupt())

    assert (
        main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "ckpt"), "--to", "ckptfmt"]) == 130
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("kind", KINDS)
def test_full_disk_leaves_nothing(kind, checkpoint, tmp_path, monkeypatch):
    stop_at_second(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    assert refused(checkpoint, tmp_path / "a", "--to", kind, "--only", "weights")[0] == "NO_SPACE"


def test_target_that_appears_meanwhile_is_kept(checkpoint, tmp_path, monkeypatch):
    content = Tensor.iter_content

    def iter_content(self, memory=None):
        (tmp_path / "a.pt").write_bytes(b"precious")
        return content(self, memory)

    monkeypatch.setattr(Tensor, "iter_content", iter_content)

    assert main(["convert", str(checkpoint), str(tmp_path / "a.pt")]) == 2
    assert (tmp_path / "a.pt").read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "ckpt"]


def test_ctrl_c_in_a_process_of_its_own(tmp_path):
    big = {"w": np.zeros(1 << 26, np.uint8)}
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights=big), step=1)
    program = (
        "import time, sys; from ckptfmt_tools.convert.content import Tensor; from ckptfmt.__main__"
        " import main\n"
        "read = Tensor.iter_content\n"
        "def slowly(self):\n"
        "    for chunk in read(self):\n"
        "        yield chunk\n"
        "        print('chunk', flush=True); time.sleep(10)\n"
        "Tensor.iter_content = slowly\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "convert",
        str(tmp_path / "ckpt"),
        str(tmp_path / "hf"),
        "--to",
        "hf",
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "chunk\n"
        process.send_signal(signal.SIGINT)
        process.wait(30)

    assert process.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


# --- without torch --------------------------------------------------------------------------------


def test_hugging_face_needs_no_torch(tmp_path):
    weights = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "s": np.array(0.5)}
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(weights=weights), step=1)
    program = (
        "import sys; sys.modules['torch'] = None; from ckptfmt.__main__ import main\n"
        "def run(*argv):\n"
        "    code = main(['convert', *argv])\n"
        "    assert code == 0, code\n"
        "run('ckpt', 'hf', '--to', 'hf')\n"
        "run('hf', 'back', '--to', 'ckptfmt')\n"
        "assert main(['convert', 'ckpt', 'a.pt']) == 2\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert 'pip install "ckptfmt[torch]"' in ran.stderr
    back = trees(tmp_path / "back", "numpy")["weights"]
    assert {name: array.tobytes() for name, array in back.items()} == {
        name: np.asarray(array).tobytes() for name, array in weights.items()
    }
    assert not (tmp_path / "a.pt").exists()


# --- what is said ---------------------------------------------------------------------------------


def test_quiet_in_a_pipe_and_plain_for_programs(checkpoint, tmp_path):
    ran = spawn("convert", checkpoint, tmp_path / "hf", "--to", "hf", "--json")
    said = json.loads(ran.stdout)

    assert (ran.returncode, ran.stderr) == (0, "")
    assert said["source"] == {"path": str(checkpoint), "kind": "ckptfmt"}
    assert said["target"] == {"path": str(tmp_path / "hf"), "kind": "hf"}
    assert (said["step"], said["tensor_count"], said["nbytes"]) == (1, 2, 48)
    assert {"what", "reason"} == said["left_out"][0].keys()


def test_text_says_what_was_done_and_groups_what_was_left_out(checkpoint, tmp_path):
    ran = spawn("convert", checkpoint, tmp_path / "hf", "--to", "hf")

    assert ran.stdout.startswith("converted  ")
    assert "2 tensors, 48 B" in ran.stdout
    (line,) = [line for line in ran.stdout.splitlines() if "random-number" in line]
    assert line.startswith("left out  rng:")


def test_run_is_converted_from_the_head_of_its_lineage(tmp_path):
    weights = {"w": np.zeros(2)}
    state = ckptfmt.State(weights=weights, data={"n": 0})
    with ckptfmt.Checkpointer(tmp_path / "run", state, every=1) as checkpointer:
        for step in checkpointer.steps(3):
            weights["w"] += step + 1
    said = done(tmp_path / "run", tmp_path / "a.pt", "--only", "weights")

    assert said["step"] == 3
    assert torch.load(tmp_path / "a.pt")["w"].tolist() == weights["w"].tolist()


def test_bar_on_a_terminal(checkpoint, tmp_path, monkeypatch):
    from ckptfmt.cli import console  # noqa: PLC0415

    shown = []

    def show(self, _now_s):
        shown.append(self._done_nbytes)
        return ""

    monkeypatch.setattr(console, "is_terminal", lambda _stream: True)
    monkeypatch.setattr(console, "_DELAY_S", 0.0)
    monkeypatch.setattr(console, "_EVERY_S", 0.0)
    monkeypatch.setattr(console.Progress, "_text", show)

    assert main(["convert", str(checkpoint), str(tmp_path / "a.pt")]) == 0
    assert shown[-1] == 48

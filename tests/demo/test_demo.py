"""The demo as a person starts it, small: it holds, it can fail, it leaves nothing running and writes over nothing."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

import ckptfmt
import ckptfmt_tools.demo
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.errors import CkptError
from ckptfmt_tools.demo.journal import compare_worlds, read_journal
from ckptfmt_tools.demo.servers import ServerError, choose_kind
from ckptfmt_tools.demo.settings import STEPS_MIN, make_settings
from ckptfmt_tools.demo.story import DemoJob, JobError

pytest.importorskip("torch")

COMMAND = [sys.executable, "-m", "ckptfmt", "demo", "--quick"]


def run_demo(*options, **settings):
    return subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, check=False, **settings
    )


def pids_of(directory):
    headers = [read_journal(path).header for path in directory.glob("journals/*.jsonl")]
    return [header.pid for header in headers if header is not None]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The demo, run once; several tests look at what it left."""
    directory = tmp_path_factory.mktemp("demo") / "left"
    done = run_demo("--run", str(directory))
    return done, directory


@pytest.mark.slow
@pytest.mark.dist
class TestAsItIsShown:
    def test_it_holds(self, shown):
        done, _ = shown

        assert done.returncode == 0, done.stdout + done.stderr
        assert "identical over all 24 steps" in done.stdout
        assert "identical  8 of 8 steps" in done.stdout
        assert "none skipped, none repeated" in done.stdout
        assert "DIFFERENT" not in done.stdout

    def test_the_screen_is_one_screen(self, shown):
        lines = shown[0].stdout.strip().splitlines()

        assert len(lines) <= 36
        assert max(len(line) for line in lines if "    ckptfmt " not in line) <= 80

    def test_a_process_was_killed_and_steps_were_done_twice(self, shown):
        _, directory = shown
        killed = [
            read_journal(directory / "journals" / f"killed-rank{rank}.jsonl") for rank in range(2)
        ]
        resumed = read_journal(directory / "journals" / "resumed-rank0.jsonl")

        assert max(journal.last_step for journal in killed) < make_settings(quick=True).steps
        assert "Signal 9 (SIGKILL)" in (directory / "logs" / "killed.txt").read_text("utf-8")
        assert resumed.header is not None
        assert resumed.header.resumed_from is not None
        assert resumed.header.claim == "T1"
        assert resumed.entries[0].step <= max(journal.last_step for journal in killed)

    def test_the_run_left_behind_is_valid(self, shown):
        report = ckptfmt.validate(shown[1] / "run")

        assert report.valid, report.violations
        assert report.checkpoints

    @pytest.mark.exhaustive
    def test_in_an_object_store_it_is_the_same_screen(self, shown, tmp_path, s3_bucket):
        url, environment = (
            f"s3://{s3_bucket.name}/demo",
            os.environ | s3_bucket.endpoint.environment,
        )
        done = run_demo("--run", str(tmp_path / "left"), "--store", url, env=environment)

        assert done.returncode == 0, done.stdout + done.stderr
        here, there = (screen.split("\n\n") for screen in (shown[0].stdout, done.stdout))
        assert here[1:-1] == there[1:-1]
        assert f"Checkpoints in {url}." in " ".join(there[0].split())
        assert ckptfmt.validate(tmp_path / "left" / "run").valid
        assert {name.split("/")[0] for name in s3_bucket.names("demo")} == {"run", "undisturbed"}
        again = run_demo("--run", str(tmp_path / "again"), "--store", url, env=environment)
        assert again.returncode == 2
        assert f"{url} isn't empty" in again.stderr

    def test_nothing_is_left_running(self, shown):
        assert len(pids_of(shown[1])) == 2 + 2 + 2 + 3
        assert not [pid for pid in pids_of(shown[1]) if is_alive(pid)]

    def test_progress_is_plain_lines_in_a_pipe(self, shown):
        assert "\x1b" not in shown[0].stderr + shown[0].stdout
        assert [line.split()[0] for line in shown[0].stderr.splitlines()] == [
            "1/4",
            "2/4",
            "3/4",
            "4/4",
        ]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.dist
def test_with_something_left_out_it_fails_and_says_what(tmp_path):
    done = run_demo(
        "--steps", str(STEPS_MIN), "--run", str(tmp_path / "left"), "--leave-out", "numpy", "--json"
    )

    assert done.returncode == 1, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert not said["holds"]
    assert said["identical_steps"] < said["steps"]
    assert said["first_divergence"].endswith(
        "most likely not restored: the random-number stream numpy"
    )


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)],
    ids=lambda number: number.name,
)
def test_interrupted_it_leaves_nothing_running(tmp_path, number):
    directory = tmp_path / "left"
    with subprocess.Popen(
        [*COMMAND, "--steps", "2000", "--run", str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as demo:
        while demo.poll() is None and len(pids_of(directory)) < 2:
            time.sleep(0.1)
        demo.send_signal(number)
        demo.communicate(timeout=60)

    assert demo.returncode == 130
    assert not [pid for pid in pids_of(directory) if is_alive(pid)]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.dist
def test_on_any_number_of_processes_it_is_the_same_run(tmp_path):
    """The demo goes from two to three; here three, of which one has twice as much to do, go to the fewest and most."""
    settings = make_settings(steps=STEPS_MIN, quick=True)
    options = [f"--steps={STEPS_MIN}", "--quick"]
    resume = ["--resume", checkpoint_name(settings.every, 1)]
    first = launch(tmp_path, 3, options)

    for world_size in (1, settings.workers):
        found = launch(tmp_path, world_size, [*options, *resume])
        same = compare_worlds(first, found, first=settings.every, steps=STEPS_MIN)
        assert same.identical, same.explain()
        assert same.identical_steps() == STEPS_MIN - settings.every


def launch(directory, world_size, options):
    name = f"{len(list(directory.glob('logs/*')))}-on-{world_size}"
    with DemoJob(directory, run="run", name=name, world_size=world_size, options=options) as job:
        job.wait(lambda _step: None)
        return [journal.entries for journal in job.journals()]


@pytest.mark.parametrize("store", ["s4", "/tmp/demo"])
def test_a_store_is_a_server_or_a_url(store, capsys):
    with pytest.raises(SystemExit):
        ckptfmt_tools.demo.main(["--store", store])

    assert "s3, or a URL such as s3://bucket/demo" in capsys.readouterr().err


def test_the_server_is_ceph_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/there")
    assert choose_kind() == "ceph"
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert choose_kind() == "moto"
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "moto" else there(name)
    )
    with pytest.raises(ServerError, match="pip install"):
        choose_kind()


@pytest.mark.parametrize("module", ["torch", "ckptfmt_conformance"])
def test_without_what_it_trains_with_it_says_so(monkeypatch, module):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else there(name)
    )

    with pytest.raises(CkptError, match=f"trains a small model with {module}") as caught:
        ckptfmt_tools.demo.main([])

    assert caught.value.code == "STATE_UNSUPPORTED"


def test_it_writes_over_nothing(tmp_path, capsys):
    (tmp_path / "mine").write_text("precious", "utf-8")

    assert ckptfmt_tools.demo.main(["--run", str(tmp_path)]) == 2

    assert "isn't empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.dist
def test_a_job_that_cannot_start_says_what_it_said(tmp_path):
    options = ["--no-such-option"]
    job = DemoJob(tmp_path, run="run", name="broken", world_size=1, options=options)
    with job, pytest.raises(JobError, match="unrecognized arguments: --no-such-option"):
        job.wait(lambda _step: None)


@pytest.mark.parametrize(
    "argument", [["--steps", str(STEPS_MIN - 1)], ["--leave-out", "nothing"], ["--steps", "few"]]
)
def test_other_arguments_are_refused(argument, capsys):
    with pytest.raises(SystemExit) as caught:
        ckptfmt_tools.demo.main(argument)

    assert caught.value.code == 2
    assert argument[0] in capsys.readouterr().err


@pytest.mark.parametrize("steps", [*range(STEPS_MIN, 40), 60, 100, 1000])
def test_any_number_of_steps_has_a_kill_between_two_saves(steps):
    settings = make_settings(steps=steps)

    assert settings.killed_step % settings.every != 0
    assert settings.every < settings.killed_step < settings.resized_step < steps
    assert settings.resized_step % settings.every == 0


@pytest.mark.parametrize("quick", [False, True])
def test_the_logical_workers_share_a_batch_evenly(quick):
    settings = make_settings(quick=quick)

    assert settings.global_batch % settings.workers == 0
    assert settings.workers > 3


def test_importing_the_demo_does_not_import_torch():
    program = "import ckptfmt_tools.demo, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "False"

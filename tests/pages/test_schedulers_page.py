"""docs/schedulers.md: programs compile and name options that exist, YAML and scripts are parsed, the script of SLURM runs."""

import ast
import inspect
import os
import re
import signal
import subprocess
import time
from typing import Any

import pytest

import ckptfmt
from tests.house.sources import ROOT

PAGE = ROOT / "docs" / "schedulers.md"


def fences(kind: str) -> list[str]:
    """Return the blocks of the page of one kind."""
    fence = re.compile(rf"^```{kind}\n((?:.*\n)*?)^```$", re.MULTILINE)
    found: list[str] = fence.findall(PAGE.read_text("utf-8"))
    return found


def calls_of(text: str) -> list[tuple[str, set[str]]]:
    """Return the calls of names of ckptfmt in a program, with the keywords of each call."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [
        (call.func.attr, {keyword.arg for keyword in call.keywords if keyword.arg})
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "ckptfmt"
    ]


def test_the_options_of_the_programs_exist():
    text = PAGE.read_text("utf-8")
    inline = re.findall(r"`stop=(ckptfmt\.Stop\(.*?\))`", text)
    calls = [call for program in [*fences("python no-run"), *inline] for call in calls_of(program)]

    assert {"Cache", "Checkpointer", "Job", "Stop", "Triggers"} <= {name for name, _ in calls}
    for name, keywords in calls:
        parameters = inspect.signature(getattr(ckptfmt, name)).parameters
        assert keywords <= set(parameters), name


def test_the_deadline_of_a_stop_fits_into_the_time_that_is_given():
    (deadline_s, _) = re.findall(r"Stop\(signals=\[signal.SIGTERM\], deadline_s=(\d+)\)",
                                 PAGE.read_text("utf-8"))  # fmt: skip
    times = re.findall(
        r"terminationGracePeriodSeconds: (\d+)|shutdown-timeout=(\d+)|--signal=B:TERM@(\d+)",
        "".join(fences("yaml") + fences("sh")),
    )

    assert len(times) == 4
    assert all(int("".join(found)) > int(deadline_s) for found in times)


def test_the_objects_of_kubernetes_are_yaml_with_volumes_that_are_mounted():
    yaml: Any = pytest.importorskip("yaml")
    job, group = (yaml.safe_load(text) for text in fences("yaml"))
    pods = [job["spec"]["template"], group["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]]

    assert (job["kind"], group["kind"]) == ("Job", "PyTorchJob")
    for pod in (pod["spec"] for pod in pods):
        (container,) = pod["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted == {"cache": "/cache", "shm": "/dev/shm"}
        assert {volume["name"] for volume in pod["volumes"]} == set(mounted)
        assert {entry["name"] for entry in container["env"]} == {"RUN", "CACHE"}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A directory of programs in place of SLURM's and of the training, first in PATH."""
    programs = {
        "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
        "scontrol": 'if [ "$1" = show ]; then echo node1; else echo "$@" >> requeued; fi',
        "python": "trap 'echo TERM >> got; exit 143' TERM\n"
        '[ -n "$ENDS" ] && exit $ENDS\ntouch ready\nwhile true; do sleep 0.1; done',
    }  # fmt: skip
    for name, text in programs.items():
        place = tmp_path / name
        place.write_text(f"#!/bin/bash\n{text}\n", "utf-8")
        place.chmod(0o755)
    (script,) = fences("sh")
    (tmp_path / "job.sh").write_text(script, "utf-8")
    for name, value in {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS_PER_NODE": "8",
        "ENDS": "",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_the_script_of_slurm_passes_the_signal_on_once_and_asks_for_a_requeue(cluster):
    with subprocess.Popen(["bash", "job.sh"], cwd=cluster) as script:
        end_s = time.monotonic() + 60
        while not (cluster / "ready").exists() and time.monotonic() < end_s:
            time.sleep(0.02)
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 143

    assert (cluster / "got").read_text("utf-8") == "TERM\n"
    assert (cluster / "requeued").read_text("utf-8") == "requeue 4711\n"


@pytest.mark.parametrize("code", [0, 1])
def test_the_script_of_slurm_asks_for_nothing_after_another_end(cluster, monkeypatch, code):
    monkeypatch.setenv("ENDS", str(code))

    done = subprocess.run(["bash", "job.sh"], cwd=cluster, check=False, timeout=60)

    assert done.returncode == code
    assert not (cluster / "requeued").exists()

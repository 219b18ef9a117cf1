"""The notices of docs/healing.md: DCGM, SLURM and Kubernetes, by programs that print as theirs do."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from ckptfmt.run.catalog import Run
from tests.house.sources import ROOT
from tests.pages.test_examples_of_pages import fences_of

#: What `dcgmi health --check --json` prints where a GPU has a warning.
_WARNING = {
    "body": {
        "GPU": {
            "children": {
                "3": {"children": {"Errors": {"children": {"PCIe system": {"value": "Warning"}}}}}
            },
        },
        "Overall Health": {"value": "Warning"},
    },
    "header": ["Health Monitor Report"],
}
_HEALTHY = {"body": {"Overall Health": {"value": "Healthy"}}, "header": ["Health Monitor Report"]}
_NODE = "NodeName=n7 Arch=x86_64 CPUAlloc=64 State=%s ThreadsPerCore=2 Partitions=gpu%s"
_DRAINED = _NODE % ("MIXED+DRAIN", " Reason=ECC rate rises on GPU 3 [root@2026-11-26T10:00:00]")
_REASONS = {
    "dcgm": "DCGM: Warning",
    "slurm": "SLURM: ECC rate rises on GPU 3",
    "kubernetes": "row remapping is pending",
}


def lay_out(place: pathlib.Path, *, is_calm: bool) -> dict[str, str]:
    """Write the page's programs, and those that they ask; return the environment."""
    for kind, body in fences_of(ROOT / "docs/healing.md"):
        if kind.startswith("python file="):
            (place / kind.removeprefix("python file=")).write_text(body, "utf-8")
    for name in ("bin", "podinfo"):
        (place / name).mkdir(exist_ok=True)
    printed = {
        "dcgmi": json.dumps(_HEALTHY if is_calm else _WARNING),
        "scontrol": _NODE % ("MIXED", "") if is_calm else _DRAINED,
    }
    for name, text in printed.items():
        (place / "bin" / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (place / "bin" / name).chmod(0o755)
    (place / "podinfo/drain").write_text("" if is_calm else f"{_REASONS['kubernetes']}\n")
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "SLURMD_NODENAME": "n7",
        "PODINFO": "podinfo",
        "PYTHONPATH": str(ROOT),
    }


def run(place: pathlib.Path, program: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


#: A training that only a notice ends, asked beside the training.
_TRAINED = """
import sys, ckptfmt, notices
triggers = ckptfmt.Triggers("drain")
stop = ckptfmt.Stop(triggers=triggers)
loading = ckptfmt.Loading(allow="streams")
with ckptfmt.Checkpointer("run", ckptfmt.State(data={"position": 0}), stop=stop, loading=loading) as run:
    started = run.step
    notices.watch(triggers, notices.NAME, pause_s=0.01)
    for step in run.steps(10**9):
        pass
print(started, run.step, run.alarm)
"""


@pytest.mark.parametrize("name", sorted(_REASONS))
def test_what_is_saved_at_a_notice_is_what_the_next_start_goes_on_from(
    tmp_path: Any, name: str
) -> None:
    environment = lay_out(tmp_path, is_calm=False)
    program = _TRAINED.replace("NAME", name)
    started, step, alarm = run(tmp_path, program, environment).strip().split(" ", 2)
    assert (started, alarm) == ("0", f"step {step}: {_REASONS[name]}")
    assert [(one.step, one.suspect) for one in Run(tmp_path / "run").list()] == [(int(step), None)]
    assert run(tmp_path, program, environment).split(" ", 1)[0] == step


@pytest.mark.parametrize("name", sorted(_REASONS))
def test_a_healthy_machine_gives_no_notice(tmp_path: Any, name: str) -> None:
    program = f"import notices; print(notices.{name}())"
    assert run(tmp_path, program, lay_out(tmp_path, is_calm=True)) == "None\n"

"""The notices of docs/healing.md: DCGM, the kernel's log, SLURM and Kubernetes, by programs that print as theirs do."""

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
#: Lines of the kernel's log of machines with such faults, as their owners have published them.
_OF_PROGRAMS = """\
NVRM: Xid (PCI:0000:01:00): 31, pid=4711, name=python3, Ch 00000008, intr 00000000. MMU Fault
NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.
mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE"""
_OFF_THE_BUS = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"
_RESET = (
    "NVRM: Xid (PCI:0000:0b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1"
    " (GPU Reset Required)"
)
_REASONS = {
    "dcgm": "DCGM: Warning",
    "xid": "Xid 79 of PCI:0000:44:00: GPU has fallen off the bus",
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
        "journalctl": _OF_PROGRAMS if is_calm else f"{_OF_PROGRAMS}\n{_OFF_THE_BUS}",
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


def test_a_reset_that_the_driver_requires_is_a_notice(tmp_path: Any) -> None:
    environment = lay_out(tmp_path, is_calm=True)
    (tmp_path / "bin/journalctl").write_text(f"#!/bin/sh\ncat <<'END'\n{_RESET}\nEND\n")
    printed = run(tmp_path, "import notices; print(notices.xid())", environment)
    assert printed.startswith("Xid 154 of PCI:0000:0b:00: GPU recovery action changed")


def test_the_log_is_read_from_the_start_of_the_training_on(tmp_path: Any) -> None:
    environment = lay_out(tmp_path, is_calm=True)
    (tmp_path / "bin/journalctl").write_text('#!/bin/sh\necho "$@" > asked\n')
    run(tmp_path, "import notices; print(notices.xid(), notices.BEGUN_S)", environment)
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:2] == ["--dmesg", "--output=cat"]
    assert asked[2].startswith("--since=@")

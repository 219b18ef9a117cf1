"""The public names: few, documented, and there without torch."""

import inspect
import subprocess
import sys

import pytest

import ckptfmt
from tests.house.public_api import LIST, UNPROMISED, list_interface


def test_public_names_are_few():
    results = {"Checkpoint", "LoadReport", "Report", "RunCheckpoint", "SaveHandle", "SaveReport"}
    results |= {"SaveEvent", "Ticket"}
    assert results < set(
        ckptfmt.__all__
    )  # nobody makes them; they are there to be named in annotations
    options = {
        "Auto",
        "Cache",
        "Checks",
        "Healer",
        "Job",
        "Homes",
        "Loading",
        "Mirror",
        "Retention",
        "Saving",
        "Signer",
        "Stop",
        "Trust",
    }
    assert options < set(ckptfmt.__all__)
    assert len(ckptfmt.__all__) - len(results) - len(options) <= 25
    assert len(set(ckptfmt.__all__)) == len(ckptfmt.__all__)


def test_every_public_name_is_there_and_documented():
    for name in ckptfmt.__all__:
        value = getattr(ckptfmt, name)
        if callable(value):
            assert inspect.getdoc(value), f"ckptfmt.{name} has no docstring"


def test_the_public_interface_is_the_frozen_one():
    """A program of 1.0 runs with every 1.x: see the rule in tests/house/public_api.py."""
    frozen = LIST.read_text("utf-8").splitlines()

    assert list_interface() == frozen


def test_members_that_are_not_promised_exist():
    for name, members in UNPROMISED.items():
        assert all(hasattr(getattr(ckptfmt, name), member) for member in members)


@pytest.mark.parametrize("module", ["ckptfmt", "ckptfmt.__main__"])
def test_the_core_starts_without_torch(module, tmp_path):
    program = (
        f"import {module}, sys; print([name for name in sys.modules if"
        " name.partition('.')[0] == 'torch'])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_importing_and_asking_for_help_import_nothing_heavy(tmp_path):
    program = """
import sys
import ckptfmt
from ckptfmt.__main__ import main
main(["validate", "--help"])
print(sorted({name.partition(".")[0] for name in sys.modules} & {"numpy", "torch", "msgpack", "blake3", "zstandard"}))
"""

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


#: Imports all modules, and tells what they did to the process. What libraries do that they import
#: is not ours.
IMPORT_ALL = """
import gc, os, pkgutil, signal, sys, threading

calls = []

def note(module, name):
    inner = getattr(module, name)
    def call(*arguments, **options):
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("ckptfmt"):
            calls.append((caller, name))
        return inner(*arguments, **options)
    setattr(module, name, call)

note(os, "register_at_fork")
note(signal, "signal")
for name in ("set_threshold", "disable", "freeze"):
    note(gc, name)
before = dict(os.environ), sys.excepthook, threading.excepthook, gc.get_threshold(), gc.isenabled()

import ckptfmt

for found in pkgutil.walk_packages(ckptfmt.__path__, "ckptfmt."):
    if not found.name.endswith(("__main__", "blake3_triton")):
        try:
            __import__(found.name)
        except ModuleNotFoundError as error:  # a framework that isn't installed here
            assert not error.name.startswith("ckptfmt"), error
after = dict(os.environ), sys.excepthook, threading.excepthook, gc.get_threshold(), gc.isenabled()
print(calls, before == after, len(threading.enumerate()))
"""


def test_imports_change_nothing_in_the_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout.strip()) == (0, "[] True 1"), done.stdout + done.stderr


#: Saves and loads in each way, and prints each call that changes the collector of garbage, and who
#: made it.
SAVE_AND_LOAD = """
import gc, os, sys

calls = []

def note(name):
    inner = getattr(gc, name)
    def call(*arguments):
        calls.append((name, sys._getframe(1).f_globals["__name__"]))
        return inner(*arguments)
    setattr(gc, name, call)

for name in ("set_threshold", "disable", "enable", "freeze", "unfreeze", "collect"):
    note(name)
before = gc.get_threshold(), gc.isenabled(), list(gc.callbacks)

import ckptfmt
import numpy as np

arrays = {f"w{number}": np.zeros(40, np.float32) for number in range(100)}
state = ckptfmt.State(weights=arrays)
for saver in ("process", "thread", "inline"):
    for delta in ("off", "smallest")[: 1 if saver == "inline" else 2]:
        run = f"{sys.argv[1]}/{saver}-{delta}"
        with ckptfmt.Checkpointer(run, state, saver=saver, delta=delta) as checkpointer:
            for step in (1, 2, 3):
                arrays["w1"] += 1
                path = checkpointer.save(step=step).wait().path
        ckptfmt.load(path, state)
ckptfmt.validate(path)
print(calls, before == (gc.get_threshold(), gc.isenabled(), list(gc.callbacks)))
"""


def test_saves_and_loads_leave_the_garbage_collector_to_the_program(tmp_path):
    """Its thresholds once were those of a pause for milliseconds at a time, in every thread of the training."""
    done = subprocess.run(
        [sys.executable, "-c", SAVE_AND_LOAD, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout.strip()) == (0, "[] True"), done.stdout + done.stderr


#: What takes longer to import than the texts of `--version` and `--help` take to print, and neither
#: of them needs.
SLOW = {
    "typing",
    "dataclasses",
    "inspect",
    "json",
    "shutil",
    "tempfile",
    "importlib.metadata",
    "pathlib",
    "difflib",
}


@pytest.mark.parametrize(
    ("argv", "slow"),
    [(["--version"], {"argparse"}), (["--help"], {"argparse"}), (["log", "-h"], set())],
)
def test_version_and_help_come_at_once(argv, slow, tmp_path):
    """Without argparse they take no longer than ``python -c "import argparse"``; that of a command hardly does."""
    program = """
import sys
before = set(sys.modules)
from ckptfmt.__main__ import main
main(sys.argv[1:])
print(*sorted(set(sys.modules) - before))
"""

    done = subprocess.run(
        [sys.executable, "-I", "-c", program, *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1].split()
    assert [name for name in loaded if name in SLOW | slow] == []
    assert {name for name in loaded if name.startswith("ckptfmt.cli.")} <= {
        "ckptfmt.cli.arguments",
        "ckptfmt.cli.commands",
    }

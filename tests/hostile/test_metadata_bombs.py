"""Forged metadata of less than a megabyte costs little, whatever is done with it. REQ-DOC-029, REQ-DOC-030."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptfmt.documents.canonical import dump_document
from tests.hostile.bombs_encoded import ENCODED_BOMBS, constant
from tests.hostile.bombs_json import JSON_BOMBS
from tests.hostile.bombs_metadata import BOMBS, LARGE_BOMBS, LARGE_NBYTES, Edit, build
from tests.hostile.bombs_runs import RUN_BOMBS
from tests.hostile.defuse import ACTIONS

ROOT = pathlib.Path(__file__).parents[2]
MOST_MIB = 512
#: What a Python has that has imported torch.
PROCESS_MIB = 160
#: The worst takes 5 s on a processor of 2021 that is shared; a bomb that goes off takes minutes.
MOST_CPU_S = 20.0

Defuse = Callable[[pathlib.Path, tuple[str, ...]], dict[str, dict[str, Any]]]
Make = Callable[[], dict[str, bytes]]


def bombs(
    made: dict[str, Any], actions: tuple[str, ...] = ("validate", "load", "open", "inspect")
) -> list[Any]:
    """Have each bomb met by one of the actions, in turn; the rest of them is exhaustive."""
    params = []
    for number, (name, bomb) in enumerate(made.items()):
        one = actions[number % len(actions)]
        params.append(pytest.param(bomb, (one,), id=name))
        rest = tuple(action for action in actions if action != one)
        params.append(
            pytest.param(
                bomb, rest, id=f"{name}, {' and '.join(rest)}", marks=pytest.mark.exhaustive
            )
        )
    return params


#: Documents of megabytes whose leaves hold another value than those of a neighbour.
ALIKE = {"Nones in one leaf after the other"}


def test_all_that_people_do_is_done_to_bombs() -> None:
    assert {action for param in bombs({"a": None}) for action in param.values[1]} == ACTIONS.keys()


@pytest.fixture(scope="module")
def defuse() -> Iterator[Defuse]:
    """Return what opens, validates, loads and inspects a checkpoint, each in a process of its own."""
    asked = [sys.executable, "-m", "tests.hostile.defuse"]
    with subprocess.Popen(
        asked, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        put, get = server.stdin, server.stdout

        def ask(path: pathlib.Path, actions: tuple[str, ...]) -> dict[str, dict[str, Any]]:
            put.write(f"{','.join(actions)} {path}\n")
            put.flush()
            found: dict[str, dict[str, Any]] = json.loads(get.readline())
            return found

        yield ask
        put.close()


def check_costs(found: dict[str, dict[str, Any]]) -> None:
    # Processor time, of system and user, so that it holds on a busy machine; each action is in a
    # process of its own.
    assert max(step["growth_mib"] for step in found.values()) < MOST_MIB - PROCESS_MIB, found
    assert max(step["cpu_s"] for step in found.values()) < MOST_CPU_S, found


def check_named(found: dict[str, dict[str, Any]]) -> None:
    """Check for a named error, or nothing: what else a process ends with has a bracket or a blank in it."""
    assert all(
        step["outcome"].removeprefix("exit ").replace("_", "").isalnum() for step in found.values()
    ), found


def write(files: dict[str, bytes], directory: pathlib.Path, *, most_nbytes: int = 1 << 20) -> None:
    assert sum(map(len, files.values())) < most_nbytes
    for path, content in files.items():
        place = directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a directory that isn't the test's own: whatever lies there is read once more, in this process."""
    return tmp_path_factory.mktemp("bomb")


@pytest.mark.parametrize(("edit", "actions"), bombs(BOMBS))
def test_a_bomb_is_refused_before_it_goes_off(
    edit: Edit, actions: tuple[str, ...], place: pathlib.Path, defuse: Defuse
) -> None:
    write(build(edit), place)
    found = defuse(place, actions)
    # What is at the limits, and not beyond, may be read; it costs no more than what is refused.
    check_costs(found)
    check_named(found)


@pytest.mark.parametrize(
    ("edit", "actions"),
    [
        param
        if param.id not in ALIKE
        else pytest.param(*param.values, id=param.id, marks=pytest.mark.exhaustive)
        for param in bombs(LARGE_BOMBS, ("load", "validate", "open", "inspect"))
    ],
)
def test_a_document_of_megabytes_has_a_bound_of_its_own(
    edit: Edit, actions: tuple[str, ...], place: pathlib.Path, defuse: Defuse
) -> None:
    """REQ-DOC-030, REQ-LIM-001: fourteen leaves of half a million empty lists took a minute and gigabytes."""
    write(build(edit), place, most_nbytes=LARGE_NBYTES)
    found = defuse(place, actions)
    check_costs(found)
    assert {step["outcome"] for step in found.values()} <= {"LIMIT_EXCEEDED", "exit 0", "exit 2"}


@pytest.mark.parametrize(("make", "actions"), bombs(RUN_BOMBS))
def test_a_run_of_many_records_costs_little(
    make: Make, actions: tuple[str, ...], place: pathlib.Path, defuse: Defuse
) -> None:
    write(make(), place)
    found = defuse(place, actions)
    check_costs(found)
    check_named(found)


# A load takes the memory of the tensors, which the manifest says: page 90.
@pytest.mark.parametrize(("make", "actions"), bombs(ENCODED_BOMBS, ("validate", "open", "inspect")))
def test_blocks_cost_a_few_at_a_time(
    make: Make, actions: tuple[str, ...], place: pathlib.Path, defuse: Defuse
) -> None:
    """REQ-ENC-005, REQ-ENC-009: whether they are decoded or refused."""
    write(make(), place)
    found = defuse(place, actions)
    check_costs(found)
    check_named(found)


def _is_at_work(pid: int, *, cpu_s: float) -> bool:
    """Return whether a process has used so much processor time."""
    values = pathlib.Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK") >= cpu_s


@pytest.mark.slow
def test_a_check_of_hundreds_of_gibibytes_is_interrupted_in_seconds(tmp_path: pathlib.Path) -> None:
    """Page 90: time goes by what is declared, memory doesn't, and nobody has to wait for the end."""
    write(constant(5000), tmp_path)
    command = [sys.executable, "-m", "ckptfmt", "validate", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as check:
        # In the middle of the check: an interpreter starts in less than a second of its time.
        while not _is_at_work(check.pid, cpu_s=2.0):
            assert check.poll() is None
            time.sleep(0.05)
        status = pathlib.Path(f"/proc/{check.pid}/status").read_text("ascii")
        check.send_signal(signal.SIGINT)
        assert check.wait(60) == 130
    (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    assert int(peak.split()[1]) < MOST_MIB << 10


LOAD = """
import resource, sys
import ckptfmt

own = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (own + (1 << 30), resource.RLIM_INFINITY))
for load in (lambda: ckptfmt.load(sys.argv[1]), lambda: ckptfmt.open(sys.argv[1]).read("weights", "w")):
    try:
        load()
    except ckptfmt.CkptError as error:
        print(error.code, error.where)
"""


@pytest.mark.parametrize("framework", ["", "import torch"])
def test_a_tensor_beyond_memory_is_refused_by_name(framework: str, tmp_path: pathlib.Path) -> None:
    write(constant(64), tmp_path)
    command = [sys.executable, "-c", framework + LOAD, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines(), done.returncode) == (["LOAD_MEMORY w"] * 2, 0), done.stderr


@pytest.mark.parametrize(
    "signed",
    [
        # A third of the bombs is of each type, and has each kind of member.
        pytest.param(signed, id=name, marks=[pytest.mark.exhaustive] if number % 3 else [])
        for number, (name, signed) in enumerate(JSON_BOMBS.items())
    ],
)
def test_a_json_document_costs_little(
    signed: dict[str, object], place: pathlib.Path, defuse: Defuse
) -> None:
    write({f"{signed['type']}.json": dump_document(signed)}, place)
    found = defuse(place, ("parse",))
    check_costs(found)
    assert found["parse"]["outcome"] in ("DOC_SCHEMA", "DOC_STRING"), found

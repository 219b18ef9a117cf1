"""Examples of README and of the pages are run in the order in which a reader meets them, and what they print compared.

A fence `python` is a program of its own, `python file=NAME` is written to a file, `python no-run`
is compiled alone; `text printed` is what the program before it prints; `console` has commands, and
below each what it prints, if anything: a line `...` stands for any lines, `Killed` for the end by
SIGKILL. Numbers of seconds and bytes, and the bits of losses, differ from machine to machine, and
are taken for equal; a loss must be the same throughout a page.
"""

import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.errors import Code
from tests.forks import run_program
from tests.house.sources import ROOT

WALK = ROOT / "spec" / "core" / "05-first-tensor.md"
PAGES = [ROOT / "README.md", WALK, *sorted((ROOT / "docs").glob("*.md"))]
#: Pages of which not every command and example can run here: those of stores, of frameworks, and of
#: other tests.
ELSEWHERE = {
    "commands.md",
    "elastic.md",
    "frameworks.md",
    "index.md",
    "api.md",
    "places.md",
    "releasing.md",
    "report.md",
    "rl.md",
    "schedulers.md",
    "signing.md",
    "viewing.md",  # its command needs the page that `make view` builds
}
KINDS = {"text", "text printed", "console", "python", "python no-run"}
#: Pages with a command that takes long, and of which tests/conformance/test_adapters.py has a sample.
LONG = {"comparison.md"}
#: Blocks that tests/cli/test_rehearse_page.py runs.
REHEARSED = ("diff mends=", "text rehearsed=")
#: Commands that aren't run: an installation, and targets that are tested by themselves.
NOT_RUN = ("pip ", "make ")
#: Pages whose programs run in interpreters of their own: what a reader sees first. A fork would start
#: so early behind a kill that it says how long it waits for the killed program's saver.
FRESH = {"README.md", "tutorial.md"}
#: The folder of a module that every program of a page imports at its start.
LATE_KILLS = ROOT / "tests" / "pages" / "late_kills"
_RUN_OF_THE_PAGE = """
import ckptfmt
with ckptfmt.Checkpointer("my-run", ckptfmt.State(data={"position": 0})) as checkpointer:
    for _ in checkpointer.steps(2): pass
"""
#: What pages rely on that others of them made.
BEFORE = {
    "moving.md": "import torch, ckptfmt\nm = torch.nn.Linear(8, 8)\no ="
    " torch.optim.AdamW(m.parameters())\n"
    "ckptfmt.save('ckpt', ckptfmt.State(weights=m, optimizer=o), step=3)",
    "operating.md": _RUN_OF_THE_PAGE,
}


def fences_of(page):
    return re.findall(r"^```(.+)\n((?:.*\n)*?)^```$", page.read_text("utf-8"), re.MULTILINE)


def steady(text, place):
    """The text without what differs from machine to machine."""
    text = text.replace(f"{place}/", "")
    text = re.sub(
        r"[0-9.]+ (?:[KMG]i)?B in [0-9.]+ m?s \([0-9.]+ (?:[KMG]i)?B/s\)",
        "SIZE in TIME (RATE)",
        text,
    )
    return re.sub(r"-?0x[01]\.[0-9a-f]+p[+-][0-9]+", "FLOAT", text).strip()


def run(argv, place, environment=None, *, is_strict=False, is_fork=True, hides_errors=False):
    """Run ``python`` with some arguments; return the exit code and the output.

    Programs run in forks of a process with torch imported, except those of `FRESH` pages and of
    other forms than a script or a text.
    """
    path = f"{LATE_KILLS}{os.pathsep}{ROOT}"
    variables = {**os.environ, "PYTHONPATH": path, **(environment or {})}
    if is_fork and (argv[0] == "-c" or argv[0].endswith(".py")):
        errors = os.devnull if hides_errors else None
        warn = ["error"] if is_strict else []
        return run_program(argv, place=place, variables=variables, warn=warn, errors=errors)
    done = subprocess.run(
        [sys.executable, *(["-W", "error"] if is_strict else []), *argv],
        cwd=place,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if hides_errors else subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout


def run_command(command, place, capsys, *, is_fork):
    """Return exit code and output of one line of a `console` fence."""
    command, _, aside = command.partition(" 2> ")
    words = shlex.split(command)
    environment = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    if words[0] == "ckptfmt":
        code = main(words[1:])
        captured = capsys.readouterr()
        return code, captured.out + (captured.err if code else "")
    assert words[0] == "python", command
    return run(words[1:], place, environment, is_fork=is_fork, hides_errors=bool(aside))


def commands_of(body):
    """Each command of a `console` fence with what the page says it prints."""
    for chunk in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, _, printed = chunk.partition("\n")
        yield command, printed


def same(printed, said, place):
    pattern = "\n".join(
        "(?:.|\n)*" if line == "..." else re.escape(line)
        for line in steady(said, place).split("\n")
    )
    return re.fullmatch(pattern, steady(printed, place)) is not None


def check_console(body, place, capsys, *, is_fork):
    for command, said in commands_of(body):
        if command.startswith(NOT_RUN):
            continue
        code, printed = run_command(command, place, capsys, is_fork=is_fork)
        is_killed = said.endswith("Killed\n")
        shown = said.removesuffix("Killed\n")
        assert code == (-signal.SIGKILL if is_killed else 0), f"{command}: {printed}"
        if shown or is_killed:
            assert same(printed, shown, place), f"{command} printed\n{printed}"
        yield printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.exhaustive] if page.name in LONG else [])
        for page in PAGES
        if page.name not in ELSEWHERE
    ],
    ids=lambda page: page.name,
)
def test_examples_run_and_print_what_the_page_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if page.name in BEFORE:
        assert run(["-c", BEFORE[page.name]], tmp_path, is_strict=True)[0] == 0
    is_fork = page.name not in FRESH
    printed, numbers = "", set()
    for kind, body in fences_of(page):
        if kind == "python":
            code, printed = run(["-c", body], tmp_path, is_strict=True, is_fork=is_fork)
            assert code == 0, f"{body}\n{printed}"
        elif kind == "text printed":
            assert same(printed, body, tmp_path), printed
        elif kind == "console":
            for shown in check_console(body, tmp_path, capsys, is_fork=is_fork):
                numbers |= set(re.findall(r"0x[01]\.[0-9a-f]+p[+-][0-9]+", shown))
        elif kind.startswith(REHEARSED):
            pass
        elif kind.startswith("python file="):
            (tmp_path / kind.removeprefix("python file=")).write_text(body, "utf-8")
        else:
            assert kind in KINDS, kind
        if kind.startswith("python"):
            compile(body, page.name, "exec")
    assert len(numbers) == (page.name == "tutorial.md")


def test_another_output_is_noticed(tmp_path):
    """The negative control of the comparisons above."""
    said = "goes on from step 20\n...\nstep 40 COMMITTED: 1.0 KiB in 2 s (0.5 KiB/s): x\n"
    assert same(
        "goes on from step 20\nmore\nstep 40 COMMITTED: 9 MiB in 0.1 s (90 MiB/s): x\n",
        said,
        tmp_path,
    )
    assert not same(
        "goes on from step 10\nmore\nstep 40 COMMITTED: 9 MiB in 0.1 s (90 MiB/s): x",
        said,
        tmp_path,
    )
    assert not same("goes on from step 20\nmore\n", said, tmp_path)
    assert not same("00 ..x", "00 ...", tmp_path)


def test_the_readme_fits_a_screen_and_a_half():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 100


def test_the_loop_of_the_page_is_that_of_the_package():
    loop = 'ckptfmt.Checkpointer("runs/gpt", state, every="5min", keep=3)'
    assert loop in (ROOT / "docs/loops.md").read_text("utf-8")
    assert loop in (ckptfmt.__doc__ or "")


def test_targets_of_make_that_the_readme_names_are_there():
    named = set(re.findall(r"`make ([a-z-]+)`", (ROOT / "README.md").read_text("utf-8")))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert {"demo", "docs", "test"} <= named <= targets


def test_codes_that_the_pages_name_are_codes():
    table = (ROOT / "docs/operating.md").read_text("utf-8").partition("## What to do when")[2]
    firsts = re.findall(r"^\| (`[A-Z_`, ]+) \|", table, re.MULTILINE)
    named = {code for first in firsts for code in re.findall("[A-Z_]+", first)}
    assert len(named) > 15
    assert named - {str(code) for code in Code} == set()

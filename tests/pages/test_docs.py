"""The pages of docs/: their examples are Python, their links lead somewhere, and their versions are those tested."""

import ast
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.cli.commands import COMMANDS
from tests.signing.keys import write_key

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def exit_code_of(arguments):
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_python_and_links_lead_somewhere(page):
    text = page.read_text("utf-8")
    fences = re.findall(r"^```(.*)\n((?:.*\n)*?)^```$", text, re.MULTILINE)
    for kind, body in fences:
        if kind == "console":
            for command in re.findall(r"^\$ ckptfmt (\S+)", body, re.MULTILINE):
                assert exit_code_of([command, "--help"]) == 0, command
        elif kind == "python no-run":
            compile(body, page.name, "exec")
    for target in re.findall(r"\]\((?!https?:)([^)#]*)", text):
        assert (page.parent / target).exists(), target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the page of commands works on: a run of three checkpoints."""
    place = tmp_path_factory.mktemp("commands")
    weights = {"layers.0.w": np.arange(6, dtype=np.float32), "layers.1.w": np.ones(4, np.float32)}
    state = ckptfmt.State(weights=weights, config={"lr": 0.1})
    with ckptfmt.Checkpointer(place / "runs/gpt", state, saver="inline") as checkpointer:
        for step, loss in ((100, 3.0), (200, 2.5), (300, 2.6)):
            weights["layers.0.w"] += 1
            checkpointer.save(step=step, metrics={"eval_loss": loss})
    write_key(place)
    return place


def commands_of(page):
    """Each command of a page, with the exit code that the page says."""
    fences = re.findall(
        r"^```console\n((?:.*\n)*?)^```$", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE
    )
    for line in re.findall(r"^\$ ckptfmt (.*)$", "".join(fences), re.MULTILINE):
        typed, _, comment = line.partition("    # ")
        said = re.match(r"exits with ([0-9]+): ", comment)
        yield typed, int(said[1]) if said else 0


def test_the_commands_of_the_page_do_what_it_says(folder, monkeypatch, capsys):
    """In their order, in one directory."""
    monkeypatch.chdir(folder)
    ran = set()
    for typed, code in commands_of("commands.md"):
        words = shlex.split(typed)
        target = words.pop() if ">" in words else None
        words = [word for word in words if word != ">"]

        assert main(words) == code, f"{typed}: {capsys.readouterr().err}"

        out = capsys.readouterr().out
        if target is not None:
            Path(target).write_text(out, "utf-8")
        ran.add(words[0])
    own_parsers = {"demo", "conformance"}
    starts_programs = {"rehearse"}  # tests/cli/test_rehearse.py runs it
    serves = {"view"}  # tests/cli/test_view.py runs it
    assert set(COMMANDS) - ran == own_parsers | starts_programs | serves


def test_the_frameworks_are_those_that_are_tested():
    """And no plug-in is left out."""
    page = (ROOT / "docs/frameworks.md").read_text("utf-8")
    lines = (ROOT / "constraints-plugins.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    told = re.findall(
        r"\b(torch|transformers|accelerate|lightning|torchdata|ray|jax|flax|optax) (\d+\.\d+\.\d+)",
        page,
    )
    assert [(name, version) for name, version in told if pins[name] != version] == []
    texts = {path.stem: path.read_text("utf-8") for path in (ROOT / "ckptfmt/plugins").glob("*.py")}
    parts = {
        name
        for name in texts
        if any(f"from ckptfmt.plugins.{name} " in texts[other] for other in texts.keys() - {name})
    }
    plugins = texts.keys() - {"__init__"} - parts
    assert {name for name in plugins if f"ckptfmt.plugins.{name}" not in page} == set()


def tables_of(section):
    """Yield each table of a section of a page: the lines in front of the table, and its rows."""
    before: list[str] = []
    rows: list[str] = []
    for line in [*section.splitlines(), ""]:
        if line.startswith("|"):
            rows.append(line)
        else:
            if rows:
                yield "\n".join(before[-3:]), rows[0], rows[2:]
                rows = []
            before.append(line)


def test_each_claim_about_frameworks_names_a_test():
    """In its row, or in front of the table; or its row links to a table that does."""
    page = (ROOT / "docs/frameworks.md").read_text("utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", part.splitlines()[0]).lower().replace(" ", "-")
               for part in sections if list(tables_of(part))}  # fmt: skip
    assert len(anchors) > 10
    for section in sections:
        for before, _, rows in tables_of(section):
            unheld = [
                row
                for row in rows
                if not re.search(r"`test_\w+`", row)
                and not re.search(r"`test_\w+`", before)
                and not set(re.findall(r"\]\(#([\w-]+)\)", row)) & anchors
            ]
            assert unheld == []


def test_the_tests_that_the_page_on_frameworks_names_exist():
    page = (ROOT / "docs/frameworks.md").read_text("utf-8")
    paths = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    named = 0
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        files = set(re.findall(r"\b(test_\w+\.py)", section))
        assert files <= paths.keys()
        found: set[str] = set()
        for file in files:
            tree = ast.parse(paths[file].read_text("utf-8"))
            found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        told = set(re.findall(r"`(test_\w+)`", section))
        assert told <= found, section.splitlines()[0]
        named += len(told)
    assert named > 50

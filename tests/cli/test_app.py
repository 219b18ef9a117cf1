"""The guard around the commands: exit codes, streams, terminals, interrupts, start-up."""

import ast
import contextlib
import os
import pathlib
import pty
import re
import resource
import select
import signal
import subprocess
import sys

import pytest

from ckptfmt.__main__ import EXIT_PIPE, main
from ckptfmt.cli import console
from ckptfmt.cli.commands import COMMANDS, TOOLS
from ckptfmt.errors import Code, err
from tests.cli.conftest import ROOT, spawn

ANSI = "\x1b["
FULL = pathlib.Path("/dev/full")


# Processes


@pytest.mark.parametrize("command", ["validate", "inspect", "log"])
def test_commands_run_in_a_process_of_their_own(command, run_path):
    done = spawn(command, run_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    assert ANSI not in done.stdout


@pytest.mark.parametrize(
    "command", ["validate", "inspect", "log", "ls", "du", "gc", "repair", "doctor"]
)
def test_no_command_but_the_demo_imports_torch(command, run_path):
    program = (
        "import sys; from ckptfmt.__main__ import main; code = main(sys.argv[1:]);"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'ml_dtypes'}),"
        " file=sys.stderr);"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, str(run_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr.strip()) == (0, "[]")


#: The modules that a command's help text imports; a command of the tools imports those of `TOOL_HELP` too.
HELP = {
    "ckptfmt",
    "ckptfmt.__main__",
    "ckptfmt.cli",
    "ckptfmt.cli.arguments",
    "ckptfmt.cli.commands",
}
TOOL_HELP = {"ckptfmt_tools", "ckptfmt_tools.handover", "ckptfmt_tools.options"}


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"conformance", "demo"}))
def test_the_help_of_a_command_imports_the_parser_alone(command):
    """So it takes no longer than to import argparse, and a little."""
    program = (
        "import argparse, importlib, sys; before = set(sys.modules);"
        "from ckptfmt.__main__ import main; code = main(sys.argv[1:]);"
        "print(sorted(set(sys.modules) - before), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    imported = set(ast.literal_eval(done.stderr))

    assert done.returncode == 0
    expected = HELP | (TOOL_HELP if COMMANDS[command][1] == TOOLS else set())
    assert {name for name in imported if name.startswith("ckptfmt")} == expected
    assert {name for name in imported if not name.startswith("ckptfmt")} <= {
        "__future__", "_locale", "errno", "locale", "textwrap"
    }  # fmt: skip


def test_a_small_checkpoint_is_valid_in_a_fraction_of_a_second_of_the_processor(checkpoint_path):
    def spent_s():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times_s = []
    for _ in range(5):
        begin_s = spent_s()
        assert spawn("validate", "--quiet", checkpoint_path).returncode == 0
        times_s.append(spent_s() - begin_s)

    assert (
        min(times_s) < 1.0
    )  # a quarter of a second; of a busy machine's clock it may take any time


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_of_the_output_will_do(checkpoint_path, encoding):
    (checkpoint_path / "\N{SNOWMAN}").write_text("")

    done = spawn("validate", checkpoint_path, env={"PYTHONIOENCODING": encoding})

    assert done.returncode == 0
    assert "warning" in done.stdout


def test_a_reader_that_goes_away_is_no_error(run_path):
    command = (
        f"{sys.executable} -m ckptfmt log {run_path} --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.stderr == ""
    assert done.returncode in {0, EXIT_PIPE}


@pytest.mark.skipif(not FULL.exists(), reason="needs a full device")
def test_a_full_device_cannot_run(run_path):
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ckptfmt", "log", str(run_path)],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip

    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


# Usage


@pytest.mark.parametrize("argv", [[], ["inspect"], ["validate", "--no-such-option", "x"], ["log"]])
def test_bad_usage_exits_with_two(call, argv):
    code, out, err_text = call(*argv)

    assert (code, out) == (2, "")
    assert err_text.startswith("usage: ckptfmt ")


@pytest.mark.parametrize(
    ("typed", "said"),
    [("valdate", "Did you mean `ckptfmt validate`?"), ("no-such-command", "One of ls, inspect, ")],
)
def test_a_mistyped_command_gets_a_suggestion(call, typed, said):
    code, out, text = call(typed, "somewhere")

    assert (code, out) == (2, "")
    assert text.startswith(f"error: ARGUMENT: there is no command {typed!r}\n")
    assert said in text


@pytest.mark.parametrize(
    "argv", [["--help"], ["validate", "--help"], ["inspect", "-h"], ["log", "-h"], ["--version"]]
)
def test_help_exits_with_zero(call, argv):
    code, out, _ = call(*argv)

    assert code == 0
    assert out


def test_main_takes_the_arguments_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ckptfmt", "--version"])

    assert main() == 0
    assert "(format 1.0)" in capsys.readouterr().out


def test_the_demo_takes_its_own_options(monkeypatch):
    monkeypatch.setattr(
        "ckptfmt_tools.demo.main", lambda argv: 7 if argv == ["--keep", "-h"] else 0
    )

    assert main(["demo", "--keep", "-h"]) == 7


# Errors


def failing(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("ckptfmt.cli.validate.verify_checkpoint", fail)


def test_a_named_error_is_one_line_and_its_remedy(call, checkpoint_path, monkeypatch):
    failing(
        monkeypatch,
        err(Code.FEATURE_UNSUPPORTED, "x\x1b[31m", where="a", requirement="REQ-DOC-010"),
    )

    code, out, text = call("validate", checkpoint_path)

    assert (code, out) == (2, "")
    assert text == (
        "error: FEATURE_UNSUPPORTED at a: x\\x1b[31m [REQ-DOC-010]\n  Install a newer ckptfmt.\n"
    )


@pytest.mark.parametrize(
    "error",
    [RecursionError("deep"), MemoryError(), OSError(5, "I/O"), ValueError("\ud800"), KeyError()],
)
def test_no_error_shows_a_traceback(call, checkpoint_path, monkeypatch, error):
    failing(monkeypatch, error)

    code, out, text = call("validate", checkpoint_path)

    assert (code, out) == (2, "")
    assert text.startswith("error: ")
    assert "Traceback" not in text


def test_a_traceback_can_be_asked_for(call, checkpoint_path, monkeypatch):
    monkeypatch.setenv("CKPTFMT_TRACEBACK", "1")
    failing(monkeypatch, KeyError("x"))

    assert "Traceback" in call("validate", checkpoint_path)[2]


def test_an_interrupt_ends_without_traceback(call, checkpoint_path, monkeypatch):
    failing(monkeypatch, KeyboardInterrupt())

    assert call("validate", checkpoint_path) == (130, "", "interrupted\n")


def test_ctrl_c_ends_the_process_without_traceback(checkpoint_path):
    program = (
        "import sys, time; import ckptfmt.cli.validate as v; from ckptfmt.__main__ import main;"
        "v.verify_checkpoint = lambda *a, **k: (print('ready', flush=True), time.sleep(60));"
        "sys.exit(main(sys.argv[1:]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, "validate", str(checkpoint_path)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, text = process.communicate(timeout=30)

    assert (process.returncode, out, text) == (130, "", "interrupted\n")


# Terminals


def on_terminal(*argv, env=None, program=("-m", "ckptfmt"), columns=100):
    """Run the command line on a terminal of its own: exit code, and what it showed."""
    master, slave = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    environment |= {"TERM": "xterm", "COLUMNS": str(columns)} | (env or {})
    with subprocess.Popen(
        [sys.executable, *program, *map(str, argv)],
        cwd=ROOT,
        env=environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    ) as process:
        os.close(slave)
        shown = b""
        while select.select([master], [], [], 60)[0]:
            with contextlib.suppress(OSError):  # how Linux says that the other end is closed
                piece = os.read(master, 65536)
                shown += piece
                if piece:
                    continue
            break
        os.close(master)
    return process.returncode, shown.decode()


@pytest.mark.parametrize("command", ["validate", "inspect", "log"])
def test_a_terminal_shows_colours(command, run_path):
    code, shown = on_terminal(command, run_path)

    assert code == 0
    assert ANSI in shown


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_can_be_declined(run_path, env):
    code, shown = on_terminal("log", run_path, env=env)

    assert code == 0
    assert ANSI not in shown


@pytest.mark.parametrize("command", ["inspect", "log"])
def test_tables_fit_the_terminal(command, run_path):
    path = run_path / "step-00000020-l0001" if command == "inspect" else run_path
    _, shown = on_terminal(command, path, columns=60)

    table = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in shown.split("\r\n")]
    end = table.index("config") if command == "inspect" else len(table)
    begin = table.index("fields") if command == "inspect" else 3
    assert max(map(len, table[begin:end])) <= 60


def test_the_head_stays_in_sight_on_a_narrow_terminal(run_path):
    assert "committed, head" in on_terminal("log", run_path, columns=60)[1]


def test_errors_are_red_on_a_terminal(tmp_path):
    code, shown = on_terminal("validate", tmp_path / "nowhere")

    assert code == 2
    assert "\x1b[31merror: FILE_MISSING" in shown


def test_json_has_no_colours_on_a_terminal(run_path):
    assert ANSI not in on_terminal("log", run_path, "--json")[1]


ALWAYS_A_BAR = """
import sys
import ckptfmt.cli.console as console
from ckptfmt.__main__ import main
console._DELAY_S = console._EVERY_S = 0.0
sys.exit(main(sys.argv[1:]))
"""
SLOWLY = ("-c", ALWAYS_A_BAR)


@pytest.mark.parametrize("kind", ["checkpoint", "run"])
def test_long_work_shows_a_bar_that_goes_away(request, kind):
    path = request.getfixturevalue(f"{kind}_path")
    code, shown = on_terminal("validate", path, program=SLOWLY)

    assert code == 0
    assert re.search(r"\[#+\.*\] +[0-9]+%  .* of ", shown)
    assert "\r\x1b[K" in shown
    assert "%" not in shown.rpartition("\r\x1b[K")[2]


@pytest.mark.parametrize("option", ["--quiet"])
def test_quiet_work_shows_no_bar(checkpoint_path, option):
    assert on_terminal("validate", checkpoint_path, option, program=SLOWLY) == (0, "")


def test_a_bar_without_total_counts(monkeypatch, capsys):
    monkeypatch.setattr(console, "_DELAY_S", 0.0)
    monkeypatch.setattr(console, "_EVERY_S", 0.0)
    monkeypatch.setattr(console, "is_terminal", lambda _: True)

    with console.Progress(lambda: None, quiet=False) as bar:
        bar.advance(2048)

    assert "2.0 KiB  " in capsys.readouterr().err


# Typos


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["inspect", "{run}/step-0000020-l0001"], "Did you mean {run}/step-00000020-l0001?"),
        (
            ["inspect", "{run}/step-00000020-l0001", "--tensors", "layer.1.w"],
            "Did you mean layers.1.w?",
        ),
        (
            ["inspect", "{run}/step-00000020-l0001", "--tensors", "zzz"],
            "`--tensors` alone lists all",
        ),
        (["inspect", "{run}", "--field", "weigths"], "Did you mean weights?"),
        (["rm", "{run}", "step-0000020-l0001"], "Did you mean step-00000020-l0001?"),
        (["pin", "{run}", "7"], "`ckptfmt log` lists the checkpoints of a run."),
        (["{run}"], "A command comes first: `ckptfmt inspect {run}` shows what is there."),
    ],
)
def test_a_mistyped_name_gets_a_suggestion(call, run_path, typed, said):
    code, out, text = call(*(word.format(run=run_path) for word in typed))

    assert (code, out) == (2, "")
    assert said.format(run=run_path) in text


def test_a_mistyped_option_gets_a_suggestion(call, run_path):
    code, out, text = call("validate", run_path, "--jsno", "--quite")

    assert (code, out) == (2, "")
    assert text.startswith("usage: ckptfmt validate ")
    assert "(did you mean --json --quiet?)" in text


@pytest.mark.parametrize("command", ["validate", "inspect", "log", "pin", "compact"])
@pytest.mark.parametrize("what", ["nothing", "a file", "an empty directory", "another directory"])
def test_a_path_that_is_no_checkpoint_is_no_damaged_one(call, tmp_path, command, what):
    """Code 2, "cannot run", and no verdict: 1 says that a checkpoint is there and isn't valid."""
    path = tmp_path / "model.pt"
    if what == "a file":
        path.write_bytes(b"PK")
    elif what != "nothing":
        path.mkdir()
        (path / "weights.bin").write_text("") if what == "another directory" else None
    code, out, text = call(
        command,
        path,
        *(["1"] if command == "pin" else []),
        *(["--out", tmp_path / "out"] if command == "compact" else []),
    )

    assert (code, out) == (2, "")
    assert text.startswith("error: ")
    assert str(path) in text
    assert "bug" not in text
    assert not (tmp_path / "out").exists()

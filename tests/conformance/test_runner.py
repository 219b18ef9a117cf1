"""The runner: what answers mean, what a crash is, strict lists, reports, badges, exit codes."""

import contextlib
import dataclasses
import doctest
import importlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree as ET

import pytest

from ckptfmt.__main__ import main as ckptfmt_main
from ckptfmt_conformance import callers, cells
from ckptfmt_conformance.__main__ import main
from ckptfmt_conformance.badge import badge_svg, badge_text, claim_of
from ckptfmt_conformance.callers import Target, describe, find_target
from ckptfmt_conformance.cases import KINDS, Case, Expectation, load_cases, select_cases
from ckptfmt_conformance.errors import SuiteError
from ckptfmt_conformance.judge import Status
from ckptfmt_conformance.page import dump_html
from ckptfmt_conformance.protocol import Answer, Description, parse_answer, parse_description
from ckptfmt_conformance.reports import Progress, dump_json, dump_junit, parse_json, text_of
from ckptfmt_conformance.runner import Result, Run, ask_case, run_cases
from ckptfmt_conformance.xfails import Xfails
from tests.conformance.scripted import ALL_BYTES, BEHAVIOURS, reject, write_case, write_vectors
from tests.conformance.vectors import cases_by_id, read_area

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLASS = "tests.conformance.scripted:Scripted"
COMMAND = shlex.join([sys.executable, str(HERE / "scripted.py")])


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'conformance'}")


READER = Description(
    name="x", version="1", spec=("0.1",), roles=("reader",), features=(), kinds=("open",)
)
#: A class, a command that serves, and the same command with a process for each case.
WAYS = pytest.mark.parametrize(
    ("adapter", "options"),
    [(CLASS, {}), (COMMAND, {}), (COMMAND, {"may_serve": False})],
    ids=["class", "server", "command"],
)


def run_of(vectors, adapter=CLASS, **options):
    return run_cases(find_target(adapter), load_cases(vectors), **options)


def statuses(run):
    return {result.case.id.removeprefix("page/"): str(result.status) for result in run.results}


# What answers are worth


@WAYS
def test_every_behaviour_has_its_status(adapter, options, tmp_path):
    answering = {name: status for name, (_, _, status) in BEHAVIOURS.items() if name != "hang"}
    run = run_of(write_vectors(tmp_path, *answering), adapter, jobs=2, **options)

    assert statuses(run) == answering
    assert [result.case.id for result in run.results] == sorted(
        result.case.id for result in run.results
    )


@pytest.mark.parametrize(
    ("exit_code", "stdout", "outcome"),
    [
        (0, b'{"tensors": {}}', "accepted"),
        (10, b'{"error": "TILING_GAP"}', "rejected"),
        (11, b'{"feature": "deltas"}', "unsupported"),
        (0, b"", "error"),
        (0, b"[]", "error"),
        (0, b"{} {}", "error"),
        (0, b"\xff", "error"),
        (0, b"[" * 100_000, "error"),
        (10, b"{}", "error"),
        (10, b'{"error": 3}', "error"),
        (11, b'{"error": "TILING_GAP"}', "error"),
        (1, b'{"error": "TILING_GAP"}', "error"),
        (2, b'{"error": "TILING_GAP"}', "error"),
        (-9, b'{"error": "TILING_GAP"}', "error"),
        (139, b'{"error": "TILING_GAP"}', "error"),
    ],
)
def test_only_three_exit_codes_are_answers(exit_code, stdout, outcome):
    assert parse_answer(exit_code, stdout).outcome == outcome


@pytest.mark.parametrize("adapter", [CLASS, COMMAND], ids=["class", "server"])
def test_a_server_goes_on_after_a_crash_and_says_what_it_was(adapter, tmp_path):
    vectors = write_vectors(
        tmp_path, "crash-is-no-refusal", "exit-1", "hang", "segfault", "tensors"
    )
    run = run_of(vectors, adapter, timeout_s=4)
    messages = {result.case.id: result.message for result in run.results}

    assert "RuntimeError: TILING_GAP" in messages["page/crash-is-no-refusal"]
    assert "exit code 1" in messages["page/exit-1"]
    assert "signal 11" in messages["page/segfault"]
    assert "no answer within 4 s" in messages["page/hang"]
    assert statuses(run)["tensors"] == "PASS"


@WAYS
def test_what_hangs_is_killed_with_all_that_it_started(adapter, options, tmp_path):
    mark = tmp_path / "mark"
    write_case(tmp_path / "vectors", "page/fork", request={"fork": str(mark)})

    run = run_of(tmp_path / "vectors", adapter, timeout_s=0.8, **options)
    time.sleep(1.5)

    assert statuses(run) == {"fork": "ERROR"}
    assert not mark.exists()


def test_what_a_server_prints_is_no_answer_and_what_a_command_prints_is(tmp_path):
    write_case(tmp_path, "page/chatty", request={"print": "progress: 1 %"})

    assert statuses(run_of(tmp_path, CLASS)) == {"chatty": "PASS"}
    assert statuses(run_of(tmp_path, COMMAND)) == {"chatty": "PASS"}
    assert statuses(run_of(tmp_path, COMMAND, may_serve=False)) == {"chatty": "ERROR"}


def test_several_at_once_answer_the_same(tmp_path):
    for number in range(40):
        write_case(
            tmp_path,
            f"page/{number:02}",
            request={"accept": {"n": number}},
            expect={"outcome": "accept", "n": number},
        )

    assert set(statuses(run_of(tmp_path, jobs=3)).values()) == {"PASS"}


# Phases


class Asked:
    def close(self):
        """Nothing is open."""


def answer_of(text):
    if text in ("accepted", "crashed"):
        return Answer(outcome={"accepted": "accepted", "crashed": "error"}[text], message=text)
    code, phase = text.split()
    return Answer(outcome="rejected", body={"error": code, "phase": phase})


#: What readers answer when they are asked to verify; without that; and where the file of tensors
#: has other bytes.
READERS = {
    "opening finds it": ("A open", "A open", "A open"),
    "reading finds it": ("A read", "A read", "B read"),
    "reading finds it in whatever is there": ("A read", "A read", "A read"),
    "validating finds it": ("A validate", "accepted", "accepted"),
    "reading finds it and calls that opening": ("A open", "A open", "B open"),
    "reading finds it and says so if it is asked less": ("A open", "A open", "A read"),
    "validating finds it and calls that reading": ("A read", "accepted", "accepted"),
    "validating finds it and calls that opening": ("A open", "accepted", "accepted"),
    "it crashes if it is asked less": ("A open", "crashed", "crashed"),
    "it finds something else": ("C open", "C open", "C open"),
    "it finds nothing": ("accepted", "accepted", "accepted"),
}
PASSES = {
    ("opening finds it", phase) for phase in ("open", "read", "validate")
} | {
    ("reading finds it", "read"), ("reading finds it", "validate"),
    ("reading finds it in whatever is there", "read"), ("reading finds it in whatever is there", "validate"),
    ("validating finds it", "validate"),
}  # fmt: skip


@pytest.mark.parametrize("due", ["open", "read", "validate"])
@pytest.mark.parametrize("name", READERS)
def test_a_phase_is_shown_and_not_believed(name, due, tmp_path):
    write_case(
        tmp_path, "page/case", request={"verify": "all", "more": 1}, expect=reject("A", phase=due)
    )
    content = ALL_BYTES
    (case,) = load_cases(tmp_path)

    class Caller(Asked):
        def call(self, *_, **asked):
            path, request = asked["path"], asked["request"]
            assert (path / "a-file").read_bytes() == b""
            found = (path / "weights.safetensors").read_bytes()
            assert len(found) == len(content)
            assert found == content or not any(
                one == other for one, other in zip(found, content, strict=True)
            )
            assert request in ({"verify": "all", "more": 1}, {"more": 1})
            number = 2 if found != content else 0 if "verify" in request else 1
            return answer_of(READERS[name][number])

    verdict = ask_case(Caller(), case, READER)

    expected = "PASS" if (name, due) in PASSES else "FAIL"
    if name == "it crashes if it is asked less" and due != "validate":
        # Whatever it is asked, a crash is one.
        expected = "ERROR"
    assert verdict.status == expected, verdict
    assert (verdict.status == "PASS") == (not verdict.message)


def test_what_is_wrong_with_a_phase_is_said(tmp_path):
    write_case(tmp_path, "page/case", request={"verify": "all"}, expect=reject("A", phase="read"))
    (case,) = load_cases(tmp_path)

    class Caller(Asked):
        def call(self, *_, **asked):
            return answer_of("A read" if "verify" in asked["request"] else "accepted")

    assert ask_case(Caller(), case, READER).message == (
        "it isn't found in phase read: asked without that every byte be verified: accepted,"
        " though it must be refused "
        "with A"
    )


# Serving

#: A command that says that it serves, and does it as `{body}` has it.
SERVER = """
import json, os, sys, time
if sys.argv[1] == "describe":
    names = ("spec", "roles", "features")
    said = {{name: [] for name in names}} | {{"roles": ["reader"], "spec": ["0.1"], "kinds": ["open"]}}
    print(json.dumps({{"name": "server", "version": "1", "serve": True, **said}}))
    sys.exit()
with open({log!r}, "a") as log:
    print(sys.argv[1], file=log)
def say(**members):
    print(json.dumps(members), flush=True)
{body}
"""
ANSWER = """
say(ready=True)
for line in sys.stdin:
    question = json.loads(line)
    asked = question["request"].get("do")
    {body}
    say(id=question["id"], exit=0, answer={{}})
"""


def write_server(folder, body, *, after="pass"):
    """Write a command whose server runs `body`, and if it comes to answers, `after` before each."""
    script, log = folder / "server.py", folder / "starts"
    whole = ANSWER.format(body=after.replace("\n", "\n    ")) if body is None else body
    script.write_text(SERVER.format(body=whole, log=str(log)))
    return shlex.join([sys.executable, str(script)]), log


def write_questions(root, *asked):
    for number, one in enumerate(asked):
        write_case(root, f"page/{number}", request={"do": one})
    return root


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("os._exit(3)", "its process ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "its process ended by signal 9"),
        ("os.close(1); time.sleep(60)", "it closed its standard output"),
        (
            "say(id=question['id'] + 1, exit=0, answer={})",
            "it answered the question 3 instead of 2",
        ),
        ("say(id=True, exit=0, answer={})", "it answered the question True"),
        ("say(id=question['id'], exit=True, answer={})", "'exit' is True"),
        ("say(id=question['id'], exit=10, answer={})", "doesn't name its 'error'"),
        ("say(id=question['id'], exit=0)", "isn't one JSON object"),
        ("say(id=question['id'], exit=7)", "exit code 7, which is no answer"),
        ("say(id=question['id'], exit=1, message='KeyError: 3')", "KeyError: 3"),
        ("print('progress: 1 %', flush=True)", "isn't JSON"),
        ("print('[1]', flush=True)", "isn't one JSON object"),
        ("os.write(1, b'{}\\n{}\\n')", "it answered the question None"),
        ("os.write(1, b'x' * 5000 + b'\\n')", "more than 4096 bytes of output"),
        ("time.sleep(60)", "no answer within 4 s"),
        (
            "print('the reason', file=sys.stderr, flush=True); os._exit(1)",
            "exit code 1\nthe reason",
        ),
    ],
)
def test_what_a_server_does_wrong_costs_that_case_alone(act, message, tmp_path, monkeypatch):
    # Short waits are only for what is waited for in vain: on a busy machine, all else takes its
    # time.
    monkeypatch.setattr(callers, "OUTPUT_NBYTES", 4096)
    monkeypatch.setattr(callers, "END_S", 0.5 if "closed" in message else 60)
    command, log = write_server(tmp_path, None, after=f"if asked:\n    {act}\n    continue")

    run = run_of(
        write_questions(tmp_path / "vectors", 0, 1, 0),
        command,
        timeout_s=4 if "within" in message else 60,
    )

    assert statuses(run) == {"0": "PASS", "1": "ERROR", "2": "PASS"}
    assert message in run.results[1].message
    # Where its next words may still belong to the last question, another one is begun.
    assert log.read_text().split() in (["serve"], ["serve", "serve"])


def test_two_lines_for_one_question_cost_the_question_that_they_answer(tmp_path):
    twice = 'if asked:\n    os.write(1, b\'{"id":2,"exit":0,"answer":{}}\\n{}\\n\')\n    continue'
    command, _ = write_server(tmp_path, None, after=twice)

    run = run_of(write_questions(tmp_path / "vectors", 0, 1, 0), command)

    assert statuses(run) == {"0": "PASS", "1": "ERROR", "2": "PASS"}
    assert run.results[1].message == "more than one line of output"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('no such word')", "its process ended with exit code 1\nno such word"),
        ("say(ready=False, message='no license')", "no license"),
        ("print('usage: server', flush=True)", "isn't JSON"),
        ("say(ready=1)", 'its first line isn\'t {"ready": true}'),
        ("time.sleep(60)", "it wasn't ready within 1 s"),
    ],
)
def test_a_server_that_never_begins_is_waited_for_once(body, message, tmp_path, monkeypatch):
    monkeypatch.setattr(callers, "START_S", 1.0 if "within" in message else 60)
    monkeypatch.setattr(callers, "END_S", 60)
    command, log = write_server(tmp_path, body)
    caller = find_target(command).open(is_serving=True)

    answers = [caller.call("open", path=tmp_path) for _ in range(3)]
    caller.close()

    assert [answer.outcome for answer in answers] == ["error"] * 3
    assert message in answers[0].message
    assert log.read_text().split() in (["serve"], [] if "within" in message else ["serve"])


def test_a_server_ends_with_its_input_and_is_killed_if_it_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(callers, "END_S", 20.0)
    ended = tmp_path / "ended"
    command, log = write_server(
        tmp_path, f"{ANSWER.format(body='pass')}\nopen({str(ended)!r}, 'w').close()"
    )
    assert statuses(
        run_of(write_questions(tmp_path / "vectors", 0, 0, 0), command)
    ) == dict.fromkeys("012", "PASS")
    assert ended.exists()
    assert log.read_text().split() == ["serve"]

    monkeypatch.setattr(callers, "END_S", 0.2)
    command, _ = write_server(
        tmp_path,
        f"{ANSWER.format(body='pass')}\nprint(os.getpid(), file=sys.stderr)\ntime.sleep(600)",
    )
    caller = callers.ServerCaller((*shlex.split(command), "serve"))
    assert caller.call("open", path=tmp_path, request={}).outcome == "accepted"
    process = caller._process
    caller.close()
    assert process is not None
    assert process.returncode == -signal.SIGKILL


def test_a_question_longer_than_a_pipe_is_not_waited_for_without_end(tmp_path):
    command, _ = write_server(tmp_path, "say(ready=True)\ntime.sleep(600)")
    caller = find_target(command).open(is_serving=True)

    answer = caller.call("open", path=tmp_path, request={"text": "x" * (1 << 20)}, timeout_s=0.5)
    caller.close()

    assert answer.message == "no answer within 0.5 s"


def test_what_a_server_is_asked_is_as_the_readme_says(tmp_path):
    seen = tmp_path / "seen"
    command, _ = write_server(tmp_path, None, after=f"open({str(seen)!r}, 'a').write(line)")
    caller = find_target(command).open(is_serving=True)
    caller.call("write", request={"step": 1}, output=tmp_path / "out")
    caller.call("open", path=tmp_path, request={"verify": "all"})
    assert caller.call("trajectory", cell="x", output=tmp_path).outcome == "unsupported"
    caller.close()

    assert [json.loads(line) for line in seen.read_text().splitlines()] == [
        {"id": 1, "kind": "write", "request": {"step": 1}, "output": str(tmp_path / "out")},
        {"id": 2, "kind": "open", "request": {"verify": "all"}, "input": str(tmp_path)},
    ]


def test_a_seed_gives_an_order_and_reports_keep_theirs(tmp_path):
    vectors = write_questions(tmp_path / "vectors", *range(8))
    orders: list[list[str]] = []
    for seed in (None, 1, 1, 2):
        asked = tmp_path / f"asked-{len(orders)}"
        command, _ = write_server(
            tmp_path, None, after=f"print(asked, file=open({str(asked)!r}, 'a'))"
        )
        run = run_of(vectors, command, seed=seed)
        assert list(statuses(run)) == list("01234567")
        orders.append(asked.read_text().split())

    assert orders[0] == list("01234567")
    assert orders[1] == orders[2] != orders[3]
    assert sorted(orders[1]) == sorted(orders[3]) == orders[0]


def test_serve_is_true_or_false():
    body = {"name": "x", "version": "1", "spec": "0.1", "roles": [], "features": [], "kinds": []}

    assert [parse_description({**body, **more}).serve for more in ({}, {"serve": True}, {"serve": False})] == [
        False, True, False,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="serve"):
        parse_description({**body, "serve": 1})


# Cases


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "other/case"}, "of another area"),
        ({"path": "../elsewhere"}, "leads elsewhere"),
        ({"path": None}, "path"),
        ({"files": {"a-file": "02"}}, "no content"),
        ({"files": {"../a-file": "00"}}, "no place"),
        ({"files": {"/a-file": "00"}}, "no place"),
        ({"files": None}, "files"),
        ({"kind": "opening"}, "no kind"),
        ({"expect": {"outcome": "maybe"}}, "what to expect"),
        ({"expect": {"outcome": "reject"}}, "what to expect"),
        ({"expect": {"outcome": "reject", "error": "A", "phase": "later"}}, "what to expect"),
        ({"expect": {"outcome": "accept", "error": "A"}}, "what to expect"),
        ({"requirements": "REQ"}, "requirements"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_case_of_another_form_is_an_error_of_the_suite(change, message, tmp_path):
    write_case(tmp_path, "page/case", request={"accept": {}})
    path = tmp_path / "page.json"
    path.write_text(json.dumps([read_area(path)[0] | change]))

    with pytest.raises(SuiteError, match=message):
        load_cases(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[{}]", "[[]]", "\x00", "[" * 100_000])
def test_an_area_that_is_no_list_of_cases_is_an_error_of_the_suite(text, tmp_path):
    write_case(tmp_path, "page/case", request={})
    (tmp_path / "page.json").write_text(text)

    with pytest.raises(SuiteError, match=r"page\.json"):
        load_cases(tmp_path)


def test_a_folder_without_areas_is_an_error_of_the_suite(tmp_path):
    with pytest.raises(SuiteError, match="no areas"):
        load_cases(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"00": "text"}',
        '{"00": {"hex": ""}}',
        '{"00": {"text": "", "base64": ""}}',
        '{"00": {"base64": "*"}}',
    ],
)
def test_contents_of_another_form_are_an_error_of_the_suite(text, tmp_path):
    write_case(tmp_path, "page/case", request={})
    (tmp_path / "files" / "page.json").write_text(text)

    with pytest.raises(SuiteError, match=r"files/page\.json"):
        load_cases(tmp_path)


def test_an_id_is_there_once(tmp_path):
    for _ in range(2):
        write_case(tmp_path, "page/case", request={})

    with pytest.raises(SuiteError, match="twice"):
        load_cases(tmp_path)


def test_each_question_is_about_files_of_its_own(tmp_path):
    """An adapter that writes into the folder, or remembers its path, spoils no later answer, and not the vectors."""
    write_case(tmp_path, "page/case", request={"verify": "all"}, expect=reject("A", phase="open"))
    (case,) = load_cases(tmp_path)
    paths = []

    class Caller(Asked):
        def call(self, *_, **asked):
            paths.append(asked["path"])
            assert sorted(entry.name for entry in paths[-1].iterdir()) == [
                "a-file",
                "weights.safetensors",
            ]
            assert [entry.name for entry in paths[-1].parent.iterdir()] == [paths[-1].name]
            (paths[-1] / "a-file").unlink()
            return answer_of("accepted")

    assert ask_case(Caller(), case, READER).status == "FAIL"
    assert len(set(paths)) == len(paths) == 2
    assert not any(path.exists() for path in paths)


def test_cases_are_chosen_by_pattern_and_kind(tmp_path):
    cases = load_cases(write_vectors(tmp_path, "accepts", "prefixed", "rejects"))

    assert [case.id for case in select_cases(cases, patterns=["page/*cc*", "page/r*"])] == [
        "page/accepts",
        "page/rejects",
    ]
    assert [case.id for case in select_cases(cases, kinds=["read"])] == ["page/prefixed"]


# Expected failures


def test_expected_failures_are_strict(tmp_path):
    vectors = write_vectors(tmp_path, "accepts", "wrong-code", "segfault", "unsupported")
    listed = Xfails.parse(
        "page/*o*e  # wrong-code\npage/segfault\npage/unsupported\npage/accepts\npage/none\n"
    )

    run = run_of(vectors, xfails=listed)

    assert statuses(run) == {
        "accepts": "XPASS",
        "wrong-code": "XFAIL",
        "segfault": "XFAIL",
        "unsupported": "UNSUPPORTED",
    }
    assert run.idle == ("page/none",)
    assert not run.is_green


def test_a_list_that_fits_exactly_is_green_and_claims_nothing(tmp_path):
    run = run_of(
        write_vectors(tmp_path, "accepts", "wrong-code"),
        xfails=Xfails(patterns=("page/wrong-code",)),
    )

    assert run.is_green
    assert claim_of(run) == ""


def test_the_list_beside_the_adapter_is_taken(tmp_path, capsys):
    script = tmp_path / "adapter.py"
    script.write_text((HERE / "scripted.py").read_text())
    vectors = write_vectors(tmp_path / "vectors", "accepts", "wrong-code")
    command = ["run", "--adapter", f"{sys.executable} {script}", "--vectors", str(vectors)]

    assert main(command) == 1
    (tmp_path / "adapter.py.xfails").write_text("page/wrong-code\n")
    assert main(command) == 0
    (tmp_path / "adapter.py.xfails").write_text("page/wrong-code\npage/accepts\n")
    assert main(command) == 1
    assert main([*command, "--xfails", os.devnull]) == 1
    assert "take it off the list" in capsys.readouterr().out


# The command


@pytest.mark.parametrize(
    ("names", "options", "code"),
    [
        (["accepts", "rejects"], [], 0),
        (["accepts", "unsupported", "another-kind"], [], 0),
        (["accepts", "wrong-code"], [], 1),
        (["accepts", "segfault"], [], 1),
        (["another-kind", "unsupported"], [], 2),
        (["accepts"], ["--filter", "nothing/*"], 2),
        (["accepts"], ["--xfails", "/no/such/file"], 2),
        (["accepts"], ["--json", "/dev/null/report.json"], 2),
        (["accepts", "wrong-code"], ["--filter", "*/accepts"], 0),
        (["accepts"], ["--jobs", "0"], 2),
        (["accepts"], ["--timeout", "-1"], 2),
        (["accepts"], ["--timeout", "nan"], 2),
        (["accepts"], ["--kind", "none"], 2),
    ],
)
def test_exit_codes(names, options, code, tmp_path, capsys):
    vectors = write_vectors(tmp_path, *names)
    with contextlib.suppress(SystemExit):
        found = main(["run", "--adapter", CLASS, "--vectors", str(vectors), *options])
        assert found == code
        assert code != 2 or re.fullmatch(r"error: .+\n  .+\n", capsys.readouterr().err)
        return
    assert code == 2


@pytest.mark.parametrize(
    "adapter",
    [
        "no-such-command",
        "no.such.module:Class",
        "tests.conformance.scripted:Missing",
        "tests.conformance.scripted:write_case",
        "broken/none",
        "'unclosed",
        "",
        "false",
        "true",
        "echo []",
        """echo '{"name": 3}' #""",
    ],
)
def test_what_is_no_adapter_is_one_line_and_its_remedy(adapter, tmp_path, capsys):
    assert (
        main(["run", "--adapter", adapter, "--vectors", str(write_vectors(tmp_path, "accepts"))])
        == 2
    )

    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.match(r"error: .+\n", captured.err)
    assert captured.err.splitlines()[-1].startswith("  ")


def test_without_vectors_it_says_so(tmp_path, capsys):
    assert main(["list", "--vectors", str(tmp_path / "none")]) == 2
    assert "--vectors" in capsys.readouterr().err


def test_list_lists(tmp_path, capsys):
    vectors = write_vectors(tmp_path, "accepts", "prefixed")

    assert main(["list", "--vectors", str(vectors), "--kind", "read"]) == 0
    assert (
        main(
            [
                "run",
                "--list",
                "--adapter",
                "unused",
                "--vectors",
                str(vectors),
                "--filter",
                "*/accepts",
            ]
        )
        == 0
    )

    assert capsys.readouterr().out == (
        "read       page/prefixed  what page/prefixed is\nopen       page/accepts  what"
        " page/accepts is\n"
    )


def test_extract_writes_the_files_of_the_cases_that_are_chosen(tmp_path, capsys):
    vectors, out = write_vectors(tmp_path / "vectors", "accepts", "rejects"), tmp_path / "out"

    assert (
        main(["extract", "--vectors", str(vectors), "--filter", "*/accepts", "--out", str(out)])
        == 0
    )

    assert capsys.readouterr().out == f"{out / 'page' / 'accepts'}\n"
    found = {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file()
    }
    assert found == {"page/accepts/a-file": b"", "page/accepts/weights.safetensors": ALL_BYTES}


def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    vectors = write_vectors(tmp_path)
    command = f"{sys.executable} -m ckptfmt_conformance list --vectors {vectors} | true"

    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT
    )

    assert "Traceback" not in done.stderr


def test_reports_are_written(tmp_path, capsys):
    vectors = write_vectors(
        tmp_path / "vectors", "accepts", "wrong-code", "segfault", "unsupported", "another-kind"
    )
    files = {
        name: tmp_path / "out" / f"report.{name}" for name in ("json", "junit", "html", "badge")
    }
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]

    assert (
        main(["run", "--adapter", CLASS, "--vectors", str(vectors), *options, "--timeout", "5"])
        == 1
    )

    out = capsys.readouterr().out
    assert "FAIL        page/wrong-code\n" in out
    assert "1 PASS, 1 FAIL, 1 UNSUPPORTED, 1 SKIPPED, 1 ERROR" in out
    assert json.loads(files["json"].read_text())["counts"]["ERROR"] == 1
    assert "2 failing" in files["badge"].read_text()
    assert main(["badge", str(files["json"])]) == 0
    assert capsys.readouterr().out == files["badge"].read_text()
    assert (
        main(
            [
                "badge",
                str(files["json"]),
                "--html",
                str(tmp_path / "again.html"),
                "--out",
                os.devnull,
            ]
        )
        == 0
    )
    assert (tmp_path / "again.html").read_text().count("<tr data-status") == 5
    assert main(["badge", str(files["badge"])]) == 2


# Reports


KINDS_OF_S0 = ("open", "read", "reshard")


def result(case_id, status, *, kind="open", message="", claim=None, seconds=0.25, features=()):
    case = Case(
        id=case_id,
        description="a <case> & more",
        requirements=("REQ-OPN-001",),
        kind=kind,
        roles=(),
        features=features,
        expect=Expectation(outcome="accept"),
        request={"claim": claim} if claim else None,
    )
    return Result(case=case, status=Status(status), message=message, seconds=seconds)


def a_run(*results, **members):
    description = Description(
        name="n<m>",
        version="1",
        spec=("0.1",),
        roles=("reader",),
        features=("deltas",),
        kinds=("open", "trajectory"),
    )
    return Run(
        adapter="a",
        description=description,
        results=results,
        seconds=1.5,
        unix_s=1793491200,
        **members,
    )


VECTORS = tuple(
    result(f"{page}/{kind}", "PASS", kind=kind) for page in ("p", "seeded") for kind in KINDS_OF_S0
)
ALL = tuple(
    result(f"p/valid/{status.lower()}", status, message="it <is>\x00\x1b[31m & so")
    for status in Status
)


def test_junit_counts_and_keeps_what_xml_cannot_hold_out():
    suites = ET.fromstring(dump_junit(a_run(*ALL)))
    cases = {case.get("name"): [child.tag for child in case] for case in suites.iter("testcase")}

    assert (
        suites.get("tests"),
        suites.get("failures"),
        suites.get("errors"),
        suites.get("skipped"),
    ) == (
        "7",
        "2",
        "1",
        "3",
    )
    assert cases == {
        "pass": [], "fail": ["failure"], "xpass": ["failure"], "error": ["error"],
        "xfail": ["skipped"], "skipped": ["skipped"], "unsupported": ["skipped"],
    }  # fmt: skip
    assert suites[0][1][0].get("message") == "FAIL: it <is>??[31m & so"


def test_the_page_is_whole_and_nothing_in_it_is_markup_of_an_adapter():
    page = dump_html(a_run(*ALL, idle=("p/<none>",)))

    assert page.count("<tr data-status") == len(ALL)
    assert page.index("p/valid/fail") < page.index("p/valid/pass")
    for text in ("<is>", "<case>", "n<m>", "<none>", "http:", "src="):
        assert text not in page.replace("http://www.w3.org/2000/svg", "")


def test_reports_group_by_clause_and_show_red_clauses_first():
    def of(case_id, status, *clauses):
        made = result(case_id, status)
        return dataclasses.replace(made, case=dataclasses.replace(made.case, requirements=clauses))

    run = a_run(
        of("p/fine", "PASS", "clause A", "clause B"),
        of("p/good", "PASS", "clause B", "clause A"),
        of("p/bad", "FAIL", "clause B"),
        of("p/none", "PASS"),
    )

    page = dump_html(run)
    heads = [
        page.index(f"<th colspan=4>{head}")
        for head in ("clause B <small>1 PASS, 1 FAIL", "clause A", "open")
    ]
    assert heads == sorted(heads)
    assert page.count("<tbody>") == 3
    assert (
        heads[0]
        < page.index("p/bad")
        < page.index("p/good")
        < heads[1]
        < page.index("p/fine")
        < heads[2]
    )
    told = text_of(run, stream=io.StringIO()).splitlines()
    assert told[:2] == ["clause B: 1 PASS, 1 FAIL", "FAIL        p/bad"]
    assert not any(line.startswith("clause A:") for line in told)


def test_text_shows_no_control_characters_and_colours_only_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    plain, verbose = (
        text_of(a_run(*ALL), stream=io.StringIO()),
        text_of(a_run(*ALL), stream=Terminal(), verbose=True),
    )

    assert "\x1b" not in plain
    assert "\\x1b[31m & so" in plain
    assert "p/valid/pass" not in plain
    assert "SKIPPED     1 case: " in plain
    assert "\x1b[32mPASS       \x1b[0m p/valid/pass" in verbose


def test_progress_is_for_terminals(monkeypatch):
    for terminal in (True, False):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        progress = Progress(1, stream)
        progress.take(result("p/x", "FAIL"))
        progress.close()
        assert ("1/1, 1 red  p/x" in stream.getvalue()) is terminal


def test_json_comes_back_as_the_same_run():
    run = a_run(
        *ALL,
        result("trajectory/a", "PASS", kind="trajectory", claim="T2"),
        selection=("--kind open",),
        idle=("x",),
    )

    again = parse_json(dump_json(run))

    assert dump_json(again) == dump_json(run)
    assert badge_svg(again) == badge_svg(run)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": 3}'])
def test_what_is_no_report_is_said_so(text):
    with pytest.raises(SuiteError, match="no report"):
        parse_json(text)


# Claims


def cell(claim, status="PASS", number=0, features=()):
    return result(
        f"trajectory/{claim}/{number}", status, kind="trajectory", claim=claim, features=features
    )


WITNESSED = result(
    "trajectory/witnessed/t1/plain/mlp/sgd/boundary", "PASS", kind="trajectory", claim="T1"
)
ELASTIC = ("layout:elastic", "new-world-size")


@pytest.mark.parametrize(
    ("results", "claim"),
    [
        (VECTORS, "S0"),
        (VECTORS[:2], ""),
        (VECTORS[:3], ""),  # nothing that a seed drew
        ((*VECTORS[:5], result("seeded/reshard", "SKIPPED", kind="reshard")), ""),
        ((*VECTORS, result("p/other", "UNSUPPORTED")), ""),
        ((*VECTORS, result("p/other", "UNSUPPORTED", features=("deltas",))), "S0"),
        ((*VECTORS, cell("T1"), WITNESSED), "T1"),
        ((*VECTORS, cell("T1")), "S0"),  # which the adapter's process says alone
        ((*VECTORS, cell("T1"), cell("T2")), "S0"),
        ((*VECTORS, cell("T1"), WITNESSED, cell("T2")), "T2"),
        ((*VECTORS, cell("S1"), cell("T1", "XFAIL"), cell("T2")), "S1"),
        ((*VECTORS, cell("T1"), WITNESSED, cell("T2", "SKIPPED")), "T1"),
        ((*VECTORS, cell("T1"), WITNESSED, cell("T2", "UNSUPPORTED")), "T1"),
        ((*VECTORS, cell("T1"), cell("T1", "UNSUPPORTED", 1), WITNESSED), "S0"),
        ((*VECTORS, cell("T1"), cell("T1", "UNSUPPORTED", 1, ("sampler",)), WITNESSED), "T1"),
        # One of 71 passes, and the others aren't supported.
        (
            (
                *VECTORS, cell("T1"), WITNESSED, cell("T2", "PASS", 0, ELASTIC),
                *(cell("T2", "UNSUPPORTED", number, ELASTIC) for number in range(1, 71)),
            ),
            "T1",
        ),
        (
            (
                *VECTORS, cell("T1"), WITNESSED, *(cell("T2", "PASS", number, ELASTIC) for number in range(70)),
                cell("T2", "UNSUPPORTED", 70, (*ELASTIC, "sampler")),
            ),
            "T2",
        ),
        ((*VECTORS, cell("T1", "FAIL")), ""),
        ((*VECTORS, result("p/x", "ERROR")), ""),
        ((*VECTORS, result("p/x", "XFAIL")), ""),
        ((cell("T1"),), ""),
        ((), ""),
    ],
)  # fmt: skip
def test_the_claim_is_the_highest_level_with_all_below_it(results, claim):
    assert claim_of(a_run(*results)) == claim


def test_a_line_of_xfails_that_fits_nothing_is_red():
    assert a_run(*VECTORS).is_green
    assert not a_run(*VECTORS, idle=("page/misspelt",)).is_green


def test_a_selection_claims_nothing():
    run = a_run(*VECTORS, selection=("--kind open",))

    assert claim_of(run) == ""
    assert badge_text(run)[0] == "partial run"


def test_the_badge_says_claim_and_what_is_left_out():
    unsupported = result("p/delta", "UNSUPPORTED", features=("deltas",))

    assert badge_text(a_run(*VECTORS, cell("T1"), WITNESSED))[0] == "T1, self-reported"
    assert badge_text(a_run(*VECTORS, unsupported))[0] == "S0, self-reported, 1 unsupported"
    assert badge_text(a_run(*VECTORS, result("p/x", "XFAIL")))[0] == "no claim, 1 known failures"
    svg = ET.fromstring(badge_svg(a_run(*VECTORS)))
    assert svg.get("aria-label") == "ckptfmt 0.1: S0, self-reported"


def test_a_report_says_the_seed_and_that_nobody_else_ran_it():
    run = a_run(*VECTORS, seed=4711)

    assert "claim level: S0, self-reported; the same questions: --seed 4711" in text_of(run)
    members = json.loads(dump_json(run))
    assert (members["claim"], members["claim_by"], members["seed"]) == ("S0", "self-reported", 4711)
    assert parse_json(dump_json(run)).seed == 4711
    assert "self-reported; the same questions: --seed 4711" in dump_html(run)


# Trajectories


class OneAnswer:
    def __init__(self, answer):
        self.answer = answer

    def call(self, *_, **__):
        return self.answer

    def close(self):
        pass


DESCRIBED = Description(
    name="x", version="1", spec=("0.1",), roles=(), features=(), kinds=("trajectory",)
)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (Answer(outcome="accepted", body={"status": "PASS", "divergence": None}), "PASS"),
        (Answer(outcome="accepted", body={"status": "FAIL", "divergence": "step 3"}), "FAIL"),
        (Answer(outcome="accepted", body={"status": "UNSUPPORTED"}), "UNSUPPORTED"),
        (Answer(outcome="accepted", body={"status": "fine"}), "ERROR"),
        (Answer(outcome="accepted", body={}), "ERROR"),
        (Answer(outcome="error", message="killed"), "ERROR"),
        (Answer(outcome="rejected", body={"error": "X"}), "ERROR"),
        (Answer(outcome="unsupported", body={"feature": "x"}), "SKIPPED"),
    ],
)
def test_cells_keep_their_status(answer, status):
    case = result("trajectory/a", "PASS", kind="trajectory", claim="T1").case

    assert ask_case(OneAnswer(answer), case, DESCRIBED).status == status


def test_without_the_trajectories_one_case_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "ckptfmt_conformance.trajectories", None)

    (case,) = cells.list_cases()
    verdict = ask_case(OneAnswer(Answer(outcome="error")), case, DESCRIBED)

    assert verdict.status == "SKIPPED"
    assert "trajectories need more" in verdict.message


def test_cells_that_start_processes_are_left_to_one_caller():
    cases = [
        Case(
            id=f"trajectory/{number}", description="", kind="trajectory", roles=(),
            request={"claim": "T1", "processes": 2}, expect=Expectation(outcome="accept"),
        )
        for number in range(6)
    ]  # fmt: skip
    asked = []

    class Caller:
        def call(self, kind, **_):
            if kind == "describe":
                names = ("spec", "roles", "features")
                return Answer(
                    outcome="accepted",
                    body={
                        "name": "x",
                        "version": "1",
                        "kinds": ["trajectory"],
                        **{name: [] for name in names},
                    },
                )
            asked.append(self)
            time.sleep(0.05)
            return Answer(outcome="accepted", body={"status": "PASS"})

        def close(self):
            """Nothing is open."""

    class Several(Target):
        def open(self, *, is_serving=False):
            assert not is_serving
            return Caller()

    run = run_cases(Several("x", xfails=None), cases, jobs=3)

    assert run.counts[Status.PASS] == 6
    assert len(set(asked)) == 1


def test_describe_wants_all_members():
    body = {"name": "x", "version": "1", "spec": "0.1", "roles": [], "features": [], "kinds": []}

    assert describe(OneAnswer(Answer(outcome="accepted", body=body))).spec == ("0.1",)
    for name in body:
        with pytest.raises(SuiteError, match=name):
            describe(OneAnswer(Answer(outcome="accepted", body={**body, name: 3})))


# Under pytest


def test_pytest_shows_every_status(tmp_path):
    write_vectors(
        tmp_path / "vectors",
        "accepts",
        "rejects",
        "wrong-code",
        "segfault",
        "unsupported",
        "another-kind",
    )
    write_vectors(tmp_path / "vectors", "exit-1", "rejects-valid")
    (tmp_path / "xfails").write_text("page/exit-1\npage/rejects\n")
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "ckptfmt_conformance.plugin", "-rA",
        "--pyargs", "ckptfmt_conformance", "--adapter", CLASS, "--vectors", str(tmp_path / "vectors"),
        "--xfails", str(tmp_path / "xfails"), "--case-timeout", "20",
    ]  # fmt: skip

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "4 failed, 1 passed, 2 skipped, 1 xfailed" in done.stdout, done.stdout + done.stderr
    assert "refused with TILING_OVERLAP" in done.stdout
    assert "take it off the list" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "which adapter?"), (["--adapter", "no-such"], "there is no adapter 'no-such'")],
)
def test_pytest_without_an_adapter_says_what_to_give(options, message, tmp_path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "ckptfmt_conformance.plugin",
    ]

    done = subprocess.run(
        [*command, "--pyargs", "ckptfmt_conformance", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode
    assert message in done.stdout + done.stderr


# As a command of ckptfmt


def test_ckptfmt_hands_over(tmp_path, capsys):
    vectors = write_vectors(tmp_path, "accepts", "wrong-code")

    assert ckptfmt_main(["conformance", "list", "--vectors", str(vectors)]) == 0
    assert "page/accepts" in capsys.readouterr().out
    assert ckptfmt_main(["conformance", "run", "--adapter", CLASS, "--vectors", str(vectors)]) == 1
    assert ckptfmt_main(["conformance", "--help"]) == 0
    assert "usage: ckptfmt conformance" in capsys.readouterr().out
    assert ckptfmt_main(["--help"]) == 0
    assert "conformance" in capsys.readouterr().out


def test_ckptfmt_without_the_suite_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ckptfmt_conformance", None)
    monkeypatch.delitem(sys.modules, "ckptfmt_conformance.__main__", raising=False)

    assert ckptfmt_main(["conformance", "list"]) == 2

    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(
        "error: STATE_UNSUPPORTED at ckptfmt_conformance: the conformance suite isn't installed"
    )
    assert "make venv" in lines[1]


def test_ckptfmt_imports_the_suite_for_this_command_only():
    program = "import sys, ckptfmt.__main__; print('ckptfmt_conformance' in sys.modules)"

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "False"


# Examples


@pytest.mark.parametrize("name", ["msgpk", "protocol", "reports", "tagged", "xfails"])
def test_the_examples_hold(name):
    failed, tried = doctest.testmod(importlib.import_module(f"ckptfmt_conformance.{name}"))

    assert tried
    assert not failed


# The README


README = (ROOT / "conformance" / "README.md").read_text("utf-8")


def test_the_exchange_in_the_readme_is_what_is_said(tmp_path):
    (exchange,) = re.findall(r"^```serve\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    for case_id in set(re.findall(r"/cases/([a-z0-9/-]+)", exchange)):
        cases_by_id()[case_id].write_files(tmp_path / case_id)
    lines = exchange.replace("/cases/", f"{tmp_path}/").splitlines()
    asked = "".join(f"{line[2:]}\n" for line in lines if line.startswith("> "))
    command = [sys.executable, "-m", "ckptfmt_conformance.adapters.reference", "serve"]

    done = subprocess.run(
        command, input=asked, capture_output=True, text=True, check=True, cwd=ROOT
    )

    said = [json.loads(line[2:]) for line in lines if line.startswith("< ")]
    assert [json.loads(line) for line in done.stdout.splitlines()] == said
    assert len(said) == 1 + asked.count("\n")
    assert {line.get("exit") for line in said} == {None, 0, 10, 11}


def members_of(value):
    """Names of members, at any depth; those of a map of tensors are names of tensors, of `leaves` names of leaves with
    their trees, and of `config` anything.
    """
    if not isinstance(value, dict):
        return set()
    found = set(value)
    for name, inner in value.items():
        if name == "tensors":
            found |= set().union(*map(members_of, inner.values()))
        elif name not in ("config", "leaves", "tree", "value", "state", "commit", "ledger"):
            found |= members_of(inner)
    return found


def test_every_member_of_the_protocol_is_in_the_readme():
    """What a case asks and expects, what a question and an answer are made of, and what `describe` says."""
    cases = cases_by_id().values()
    used = set().union(
        *(
            members_of(dict(case.request or {})) | members_of(dict(case.expect.members))
            for case in cases
        )
    )
    used |= {"id", "kind", "input", "request", "output", "exit", "answer", "message", "ready"}
    used |= {"error", "where", "phase", "feature"} | {
        field.name for field in dataclasses.fields(Description)
    }
    named = set(re.findall(r"[`\"]([a-z_0-9]+)[`\"]", README))

    assert {
        "verify",
        "digest",
        "bases",
        "launch",
        "samples",
        "loader",
        "form",
        "file",
        "box",
        "fetched",
    } <= used
    assert used <= named, used - named
    assert set(KINDS) - {"trajectory"} <= named
    assert {(case.request or {})["form"] for case in cases if case.kind == "parse"} <= named


def test_every_option_of_run_is_in_the_readme(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])

    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help", "--verbose"}
    assert "--seed" in options
    assert options <= set(re.findall(r"--[a-z-]+", README))


@pytest.mark.parametrize(
    ("patterns", "is_listed"),
    [
        ((), True),
        (("*",), True),
        (("manifest/valid/*", "documents/invalid/e*"), False),
        (("manifest/valid/*", "t*"), True),
        (("trees/*",), False),
        (("trajectory/t1/plain/*",), True),
        (("[mt]*",), True),
    ],
)
def test_trajectories_are_listed_only_where_a_pattern_may_fit_one(patterns, is_listed, monkeypatch):
    """To list them takes the import of a framework: seconds, for a command that asks for something else."""
    case = Case(
        id="trajectory/x",
        description="",
        kind="trajectory",
        roles=(),
        expect=Expectation(outcome="accept"),
    )
    asked = mock.Mock(return_value=(case,))
    monkeypatch.setattr(cells, "list_cases", asked)

    found = cells.find_cases(patterns)

    assert asked.called == is_listed
    assert found == ((case,) if not patterns or {"*", "t*", "[mt]*"} & set(patterns) else ())

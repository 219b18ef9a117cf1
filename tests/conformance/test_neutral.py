"""The neutral cases convict a peer of each fault, and clear what has none: ckptfmt, and a small sound format."""

import dataclasses
import json
from pathlib import Path

import pytest

from ckptfmt_conformance import neutral, scoreboard
from ckptfmt_conformance.neutral import Description, Result, Status

ROOT = Path(__file__).resolve().parents[2]
BAD = "tests.conformance.bad_peers:"
SOUND = f"{BAD}Sound"
OURS = "ckptfmt_conformance.adapters.peers.ckptfmt_peer:Ckptfmt"

#: By fault, the cases that must convict it, in one process each.
FAULTS = {
    "ThroughFloat32": (
        "bytes/floats",
        "bytes/integers",
        "bytes/unsigned",
        "bytes/complex64",
        "bytes/complex128",
    ),
    "MinusZeroIsZero": ("bytes/floats",),
    "Untyped": ("bytes/float8", "bytes/bool"),
    "Flat": ("shapes/empty", "shapes/scalar"),
    "Memory": ("views/strided",),
    "OncePerStorage": ("views/tied", "views/overlapping"),
    "NoStep": ("values/step",),
    "Texts": ("values/plain",),
    "PlainJson": ("values/exact",),
    "CannotLoad": ("bytes/floats", "damage/torn", "damage/flipped-bit", "async/mutation"),
    "Unchecked": ("damage/torn", "damage/zero-tail", "damage/flipped-bit"),
    "Lenient": ("damage/missing-file",),
    "OwnDigests": ("damage/swapped-file",),
    "Pickles": ("damage/nothing-executed",),
    "KeepsReferences": ("async/mutation",),
    "CopiesLate": ("async/mutation",),
}
#: The same, where the case starts processes of its own.
FAULTS_OF_PROCESSES = {
    "InPlace": ("crash/killed-in-save",),
    "RemovesFirst": ("crash/killed-in-save",),
    "OwnShards": ("layout/new-world-size",),
}
OF_PROCESSES = ("crash/killed-in-save", "layout/new-world-size")
ALONE = tuple(case.id for case in neutral.CASES if case.id not in OF_PROCESSES)

EFFORT = dataclasses.replace(
    neutral.QUICK, flips_per_file=8, kills=3, killed_nbytes=2 << 20, async_nbytes=4 << 20
)


def pairs(faults):
    return [(fault, case) for fault, cases in faults.items() for case in cases]


def judged(plan):
    return {(result.peer, result.case): result for result in neutral.judge(plan, effort=EFFORT)}


@pytest.fixture(scope="module")
def alone():
    """Return the results of all cases that play in one process: one start of torch for all."""
    plan = [(f"{BAD}{fault}", cases) for fault, cases in FAULTS.items()]
    more = [
        (f"{BAD}Disclaiming", ("damage/flipped-bit",)),
        (f"{BAD}Crashes", ("damage/flipped-bit",)),
    ]
    return judged([*plan, *more, (SOUND, ALONE), (OURS, ALONE)])


@pytest.fixture(scope="module")
def with_processes():
    plan = [(f"{BAD}{fault}", cases) for fault, cases in FAULTS_OF_PROCESSES.items()]
    return judged([*plan, (SOUND, OF_PROCESSES), (OURS, OF_PROCESSES)])


@pytest.mark.parametrize(("fault", "case"), pairs(FAULTS))
def test_a_fault_is_convicted_by_its_case(alone, fault, case):
    result = alone[f"{BAD}{fault}", case]

    assert result.status is Status.FAIL, result.seen


@pytest.mark.parametrize("case", ALONE)
@pytest.mark.parametrize("peer", [SOUND, OURS])
def test_what_has_no_fault_passes(alone, peer, case):
    result = alone[peer, case]

    assert result.status is Status.PASS, result.seen


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "case"), pairs(FAULTS_OF_PROCESSES))
def test_a_fault_among_processes_is_convicted_by_its_case(with_processes, fault, case):
    result = with_processes[f"{BAD}{fault}", case]

    assert result.status is Status.FAIL, result.seen


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("case", OF_PROCESSES)
@pytest.mark.parametrize("peer", [SOUND, OURS])
def test_what_has_no_fault_passes_among_processes(with_processes, peer, case):
    result = with_processes[peer, case]

    assert result.status is Status.PASS, result.seen


def test_every_case_convicts_some_fault():
    convicting = {
        case
        for faults in (FAULTS, FAULTS_OF_PROCESSES)
        for cases in faults.values()
        for case in cases
    }

    assert convicting == {case.id for case in neutral.CASES}


def test_what_a_library_says_it_does_not_do_is_no_failure_and_is_still_looked_at(alone):
    result = alone[f"{BAD}Disclaiming", "damage/flipped-bit"]

    assert result.status is Status.UNSUPPORTED
    assert "came back as other bytes" in result.seen
    assert result.remark == "Bits that flip are left to the disk: README.md"


def test_a_crash_is_no_refusal(alone):
    result = alone[f"{BAD}Crashes", "damage/flipped-bit"]

    assert result.status is Status.ERROR
    assert "it died of SIGSEGV: loading with checkpoint/" in result.seen


def test_an_unknown_case_is_refused_by_name():
    with pytest.raises(ValueError, match="no neutral case 'bytes/none'; there are bytes/floats, "):
        list(neutral.judge([(SOUND, ("bytes/none",))]))


@pytest.mark.parametrize(
    "name", ["tests.nowhere:Peer", f"{BAD}Nobody", f"{BAD}OnlySaves", "json:loads", "json"]
)
def test_what_is_no_peer_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"'{name}'"):
        neutral.find_peer(name)


# --- the scoreboard -------------------------------------------------------------------------------


def test_the_committed_page_comes_from_a_run_of_these_cases_and_peers():
    page = (ROOT / "conformance" / "SCOREBOARD.md").read_text("utf-8")
    rows = [
        line.strip("| ").split(" | ")
        for line in page.splitlines()
        if line.startswith(("| [", "| Case"))
    ]
    names = [neutral.find_peer(name).describe().name for name in scoreboard.PEERS]

    assert rows[0] == ["Case", *names], "run the scoreboard again: its peers are others now"
    assert [row[0] for row in rows[1:]] == [
        f"[{case.id}](#{case.id.replace('/', '')})" for case in neutral.CASES
    ]
    assert {row[-1] for row in rows[1:]} == {"PASS"}


def made_up(peer, case, status, seen, remark=""):
    return Result(peer=peer, case=case, status=status, seen=seen, remark=remark)


def test_the_page_shows_status_and_what_was_seen():
    cases = neutral.find_cases(["bytes/bool", "damage/torn", "views/tied"])
    peers = {
        "a:A": Description(name="alpha", version="1.0", settings="as it comes"),
        "b:B": Description(name="beta", version="2", settings="with care"),
    }
    results = [
        made_up("a:A", "bytes/bool", Status.PASS, "the same"),
        made_up("a:A", "damage/torn", Status.FAIL, "a | came back", "It says so: there"),
        made_up("b:B", "bytes/bool", Status.UNSUPPORTED, "refused"),
        made_up("b:B", "damage/torn", Status.ERROR, "it died"),
        made_up("a:A", "views/tied", Status.PASS, "the same"),
        made_up("b:B", "views/tied", Status.PASS, "the same"),
    ]

    page = scoreboard.render(results, peers, cases, date="2026-01-31")

    assert "A run on 2026-01-31 generated this page" in page
    assert "| alpha | 1.0 | as it comes |" in page
    assert "| [bytes/bool](#bytesbool) | PASS | unsupported |" in page
    assert "| [damage/torn](#damagetorn) | **FAIL** | **ERROR** |" in page
    assert "| alpha | **FAIL** | a &#124; came back. It says so: there |" in page
    assert "| alpha, beta | PASS | the same |" in page
    assert "| PASS of 3; FAIL | 2; 1 | 1; 0 |" in page


def test_a_peer_that_is_not_there_is_told_in_one_line(capsys):
    assert scoreboard.main(["--peer", "tests.nowhere:Peer"]) == 2
    said = capsys.readouterr()

    assert said.out == ""
    assert said.err.startswith("scoreboard: no peer 'tests.nowhere:Peer'")
    assert said.err.count("\n") == 1


def test_a_run_writes_page_and_document(tmp_path, monkeypatch):
    monkeypatch.setattr(scoreboard, "PEERS", (SOUND,))
    monkeypatch.setattr(neutral, "CASES", neutral.find_cases(["bytes/bool", "damage/torn"]))

    assert (
        scoreboard.main(
            ["--quick", "--out", str(tmp_path / "page"), "--json", str(tmp_path / "document")]
        )
        == 0
    )

    document = json.loads((tmp_path / "document").read_text("utf-8"))
    assert [result["status"] for result in document["results"]] == ["PASS", "PASS"]
    assert "| [damage/torn](#damagetorn) | PASS |" in (tmp_path / "page").read_text("utf-8")

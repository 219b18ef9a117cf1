"""``ckptfmt rehearse``: a training is killed on purpose, and its steps compared with those of an undisturbed run."""

import json
import pathlib
import sys
import textwrap
import types
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from ckptfmt.__main__ import main
from ckptfmt.errors import CkptError, Code
from ckptfmt.loop.rehearsal import VARIABLE, Account, Rehearsal
from ckptfmt.loop.step_log import StepLog
from ckptfmt.run.witness import StepRecord, StepsHeader, steps_path
from ckptfmt_tools.cli.judging import judge
from ckptfmt_tools.cli.rehearse import plan_kills
from tests.forks import start_script

#: A small nanoGPT: crops of a text by torch.randint, and learning rates set by hand. Prefetching is
#: its common fault.
TRAIN = """
import sys, torch, ckptfmt
torch.manual_seed(1)
text = torch.randint(16, (512,), generator=torch.Generator().manual_seed(0))
model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def get_batch():
    at = torch.randint(len(text) - 9, (4,))
    return torch.stack([text[i : i + 8] for i in at]), torch.stack([text[i + 1 : i + 9] for i in at])

state = ckptfmt.State(weights=model, optimizer=optimizer, data={}, config={"lr": 1e-3})
prefetches = "prefetch" in sys.argv
with ckptfmt.Checkpointer("never-made", state, every="10min", saver="inline") as checkpointer:
    batch = get_batch() if prefetches else None
    for step in checkpointer.steps(10_000):
        if not prefetches:
            batch = get_batch()
        loss = torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        checkpointer.observe(loss=loss, batch=batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if prefetches:
            batch = get_batch()
print("never reached")
"""


def rehearse(*words: str) -> int:
    return main(["rehearse", "--steps", "12", "--every", "4", "--kills", "1", *words])


@pytest.fixture
def script(tmp_path: pathlib.Path, monkeypatch: Any) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return "train.py"


def test_training_that_goes_on_as_the_same_run(
    script: str, capsys: Any, tmp_path: pathlib.Path
) -> None:
    assert rehearse("--json", "--junit", "out.xml", "--", sys.executable, script) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "same"
    assert found["difference"] is None
    assert found["step_count"] == 12 - found["resumed"][0]
    assert found["is_repeatable"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.xml",
        "train.py",
    ]  # the run is a scratch one
    suite = ET.fromstring((tmp_path / "out.xml").read_bytes())
    assert (suite.get("tests"), suite.get("failures")) == ("1", "0")


def test_training_that_does_not_is_told_with_the_cause(
    script: str, capsys: Any, tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    module = types.SimpleNamespace(run=start_script)
    monkeypatch.setattr("ckptfmt_tools.cli.rehearse.subprocess", module)
    assert rehearse("--junit", "out.xml", "--", sys.executable, script, "prefetch") == 1
    told = capsys.readouterr().out
    assert "NOT the same trajectory" in told
    assert "batch was fetched before the state was restored" in told
    assert b"failure" in (tmp_path / "out.xml").read_bytes()


def test_program_that_fails_by_itself_is_told_with_its_last_words(
    tmp_path: pathlib.Path, capsys: Any
) -> None:
    (tmp_path / "bad.py").write_text("raise SystemExit('no such data')")
    assert rehearse("--", sys.executable, str(tmp_path / "bad.py")) == 2
    told = capsys.readouterr().err
    assert "no such data" in told
    assert "Run the program by itself first" in told


def test_program_that_cannot_be_started_is_refused_by_name(
    tmp_path: pathlib.Path, capsys: Any
) -> None:
    """A bare OSError."""
    program = tmp_path / "program"
    assert rehearse("--", str(program)) == 2
    assert f"ARGUMENT at {program}" in capsys.readouterr().err
    program.write_bytes(b"")
    assert rehearse("--", str(program)) == 2
    assert "Permission denied" in (told := capsys.readouterr().err)
    assert "ARGUMENT" in told


def test_failure_of_several_processes_is_told_with_the_words_of_the_first(
    tmp_path: pathlib.Path, capsys: Any
) -> None:
    """The last lines of torchrun say that a process failed, and not why."""
    program = """
        import os, time
        time.sleep(60 * int(os.environ["RANK"]))  # two tracebacks at once would be mixed with each other
        raise ValueError("no such data")
    """
    (tmp_path / "bad.py").write_text(textwrap.dedent(program))
    assert rehearse("--world", "2", "--", sys.executable, str(tmp_path / "bad.py")) == 2
    assert "ended with exit code 1: ValueError: no such data" in capsys.readouterr().err


def test_program_without_a_checkpointer_is_refused_by_name(
    tmp_path: pathlib.Path, capsys: Any
) -> None:
    (tmp_path / "idle.py").write_text("")
    assert rehearse("--", sys.executable, str(tmp_path / "idle.py")) == 2
    assert "the undisturbed run recorded no step" in capsys.readouterr().err
    assert main(["rehearse"]) == 2
    assert "ckptfmt rehearse -- python train.py" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(20))
def test_kills_lie_between_saves_and_come_again_with_their_seed(seed: int) -> None:
    kills = plan_kills(24, 5, 2, seed)
    assert kills == plan_kills(24, 5, 2, seed) == sorted(kills)
    assert all(kill > 5 and kill % 5 not in (0, 1) for kill in kills)
    assert len({kill // 5 for kill in kills}) == 2


@pytest.mark.parametrize(("steps", "every", "kills"), [(10, 5, 2), (24, 2, 1), (24, 5, 0)])
def test_kills_without_room_are_refused(steps: int, every: int, kills: int) -> None:
    with pytest.raises(CkptError) as caught:
        plan_kills(steps, every, kills, 0)
    assert caught.value.code == Code.ARGUMENT


def log(
    folder: pathlib.Path,
    launch: int,
    steps: range,
    *,
    first: int,
    loss: int = 0,
    drawn: int = 0,
    writer_count: int = 1,
) -> None:
    for writer in range(writer_count):
        header = StepsHeader(
            run_id="0" * 32,
            launch=launch,
            writer=writer,
            writer_count=writer_count,
            first_step=first,
            resumed="blake3:" + "0" * 64 if first else None,
            expected="T1" if first else None,
            streams=("torch.cpu",),
            tensors="",
        )
        found = StepLog(folder / "run" / steps_path(launch, writer), header)
        for step in steps:
            found.put(StepRecord(step=step, loss=step + loss, streams=(step + drawn,)))
        assert found.close(30)


def test_fresh_starts_that_differ_are_no_fault_of_a_resume(tmp_path: pathlib.Path) -> None:
    log(tmp_path / "calm", 1, range(1, 25), first=0)
    log(tmp_path / "killed", 1, range(1, 9), first=0, loss=100)
    log(tmp_path / "killed", 2, range(6, 25), first=5, loss=100)
    outcome = judge(tmp_path, [8])
    assert (outcome.verdict, outcome.is_repeatable, outcome.step_count) == ("same", False, 3)
    assert outcome.notes[0].startswith(
        "two fresh starts differ by themselves from step 1 on (loss): seed the program"
    )


def test_difference_behind_the_second_kill_is_found(tmp_path: pathlib.Path) -> None:
    log(tmp_path / "calm", 1, range(1, 25), first=0)
    log(tmp_path / "killed", 1, range(1, 9), first=0)
    log(tmp_path / "killed", 2, range(6, 14), first=5)
    log(tmp_path / "killed", 3, range(11, 25), first=10, loss=1)
    outcome = judge(tmp_path, [8, 13])
    assert outcome.verdict == "different"
    assert outcome.difference is not None
    assert (outcome.difference.step, outcome.difference.what) == (11, "loss")
    assert outcome.resumed == [5, 10]


def test_random_numbers_drawn_behind_the_last_kill_are_told_as_the_cause(
    tmp_path: pathlib.Path,
) -> None:
    """Streams weren't compared with the undisturbed run, so that the loss was said to differ, with another cause."""
    log(tmp_path / "calm", 1, range(1, 25), first=0)
    log(tmp_path / "killed", 1, range(1, 9), first=0)
    log(tmp_path / "killed", 2, range(9, 25), first=5, loss=1, drawn=1)
    outcome = judge(tmp_path, [8])
    assert outcome.difference is not None
    assert outcome.difference.what == "rng"


def test_streams_that_fresh_starts_do_not_seed_are_not_compared(tmp_path: pathlib.Path) -> None:
    log(tmp_path / "calm", 1, range(1, 25), first=0)
    log(tmp_path / "killed", 1, range(1, 9), first=0, drawn=7)
    log(tmp_path / "killed", 2, range(6, 25), first=5, drawn=7)
    outcome = judge(tmp_path, [8])
    assert (outcome.verdict, outcome.step_count, outcome.compared) == ("same", 19, ("loss",))


def give(folder: pathlib.Path, launch: int, **members: Any) -> None:
    found = {"claim": "T1", "lowered_by": (), "changes": (), "modules": {}, **members}
    rehearsal = Rehearsal(folder=str(folder), every=5, steps=24, kill_at=None)
    rehearsal.give("run", Account(launch=launch, writer=0, step=24, **found))


@pytest.mark.parametrize(("average", "verdict"), [(1, "same"), (2, "different")])
def test_module_outside_of_the_state_that_ends_otherwise_is_found(
    average: int, verdict: str, tmp_path: pathlib.Path
) -> None:
    """Averaged weights that no step depends on show in no step."""
    log(tmp_path / "calm", 1, range(1, 25), first=0)
    log(tmp_path / "killed", 1, range(1, 9), first=0)
    log(tmp_path / "killed", 2, range(6, 25), first=5)
    give(tmp_path / "calm", 1, claim=None, modules={"AveragedModel (w)": [1], "LPIPS (w)": [5]})
    give(tmp_path / "killed", 2, modules={"AveragedModel (w)": [average], "LPIPS (w)": [5]})
    outcome = judge(tmp_path, [8])
    assert outcome.verdict == verdict
    if outcome.difference is not None:
        assert (outcome.difference.what, outcome.difference.step) == ("outside", 24)
        assert "AveragedModel (w) isn't in State" in outcome.difference.text


def test_claim_of_the_resume_is_told_with_its_reasons(tmp_path: pathlib.Path) -> None:
    log(tmp_path / "calm", 1, range(1, 25), first=0)
    log(tmp_path / "killed", 1, range(1, 9), first=0)
    log(tmp_path / "killed", 2, range(6, 25), first=5)
    give(
        tmp_path / "killed",
        2,
        claim="S1",
        lowered_by=("a GradScaler scales the gradients, and no State holds it",),
    )
    outcome = judge(tmp_path, [8])
    assert (outcome.verdict, outcome.claim) == ("same", "S1")
    assert outcome.lowered_by[0].startswith("a GradScaler")


def test_launches_of_another_number_of_processes_are_not_judged(tmp_path: pathlib.Path) -> None:
    log(tmp_path / "calm", 1, range(1, 25), first=0, writer_count=2)
    log(tmp_path / "killed", 1, range(1, 9), first=0, writer_count=2)
    log(tmp_path / "killed", 2, range(6, 25), first=5)
    assert judge(tmp_path, [8]).verdict == "unknown"


def test_variable_that_is_no_rehearsal_is_refused_by_name(monkeypatch: Any) -> None:
    monkeypatch.setenv(VARIABLE, "{}")
    with pytest.raises(CkptError) as caught:
        Rehearsal.from_environment()
    assert (caught.value.code, caught.value.where) == (Code.ARGUMENT, VARIABLE)

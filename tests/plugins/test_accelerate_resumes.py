"""Trainings with accelerate that are ended at any step, and continue bit for bit."""

from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from tests.plugins import trainings

SCRIPT = Path(__file__).with_name("accelerate_cells.py")
#: Saves within the first epoch, within the second, and at its end.
SAVES = (2, 7, 10)
LAST_STEP = 15

ENDS = ("killed", "stopped")
CELLS = {
    "plain": ("plain",),
    "plain, workers": ("plain", "--workers", "2"),
    "plain, persistent": ("plain", "--workers", "2", "--persistent"),
    "seedable": ("seedable",),
    "stateful": ("stateful",),
    "stateful, workers": ("stateful", "--workers", "2"),
    "stateful, persistent": ("stateful", "--workers", "2", "--persistent"),
    "seedable stateful, workers": ("seedable-stateful", "--workers", "2"),
    "split": ("split",),
    "iterable": ("iterable",),
    "stateful iterable": ("stateful-iterable",),
    "stateful iterable, workers": ("stateful-iterable", "--workers", "2"),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return the directory of an undisturbed training; each is run once."""
    places: dict[tuple[str, int], Path] = {}

    def run(cell, processes):
        if (cell, processes) not in places:
            places[cell, processes] = place = tmp_path_factory.mktemp("right")
            command = (SCRIPT, place / "run", place / "journal", "--loader", *CELLS[cell])
            trainings.run(*command, processes=processes)
        return places[cell, processes]

    return run


def resume_three_times(place, cell, *options, processes=1, ends="killed"):
    """End a training after three saves, and return what its last launch printed."""
    command = (SCRIPT, place / "run", place / "journal", "--loader", *CELLS[cell], *options)
    for step in SAVES:
        told = ("--save-at", str(step), *(["--stop"] if ends == "stopped" else []))
        kill_at = step + 1 if ends == "killed" else None
        trainings.run(*command, *told, processes=processes, kill_at=kill_at)
    return trainings.run(*command, processes=processes)


#: The plain loader on each number of processes and with each end; others with one of these in turn.
EACH = [(cell, count, ends) for cell in CELLS for count in (1, 2) for ends in ENDS]
USUAL = [
    *(one for one in EACH if one[0] == "plain"),
    *((cell, 1 + at % 2, ENDS[at // 2 % 2]) for at, cell in enumerate([*CELLS][1:])),
]


@pytest.mark.parametrize(
    ("cell", "processes", "ends"),
    [pytest.param(*one, marks=[] if one in USUAL else pytest.mark.exhaustive) for one in EACH],
)
def test_a_training_that_ends_at_any_step_continues(tmp_path, reference, cell, processes, ends):
    if "stateful" in cell:
        pytest.importorskip("torchdata")
    right = reference(cell, processes)
    printed = resume_three_times(tmp_path, cell, processes=processes, ends=ends)
    for rank in range(processes):
        journals = [place / f"journal-{rank}" for place in (right, tmp_path)]
        assert trainings.compare(*journals, last_step=LAST_STEP) == []
    assert "claim T1 ()" in printed


def test_the_comparison_sees_another_order(tmp_path, reference, may_be_refuted):
    """The negative control: without the streams of an iterator's begin, the order differs."""
    pytest.importorskip("torchdata")
    may_be_refuted.add(tmp_path / "run")
    right = reference("stateful", 1)
    resume_three_times(tmp_path, "stateful", "--forget")
    journals = [place / "journal-0" for place in (right, tmp_path)]
    lines = trainings.compare(*journals, last_step=LAST_STEP)
    assert "numbers" in lines[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("noisy",), "fetching a batch draws"),
        (("noisy", "--workers", "1"), "worker processes draw"),
        (("dispatched",), "one process fetches the batches for all"),
    ],
)
def test_a_resume_that_cant_be_exact_says_so(tmp_path, options, reason, may_be_refuted):
    processes = 2 if "dispatched" in options else 1
    may_be_refuted.add(tmp_path / "run")
    command = (SCRIPT, tmp_path / "run", tmp_path / "journal", "--loader", *options)
    trainings.run(*command, "--save-at", "3", "--stop", processes=processes)
    printed = trainings.run(*command, processes=processes)
    assert "claim S0" in printed
    assert reason in printed

"""The programs of docs/your-trainer.md: killed by SIGKILL twice, they go on as if undisturbed, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ckptfmt  # noqa: E402 - after the check for torch
from tests.house.sources import ROOT  # noqa: E402 - as above
from tests.plugins import trainings  # noqa: E402 - as above

PAGE = ROOT / "docs" / "your-trainer.md"
DRIVER = Path(__file__).parent / "observed.py"
#: Most lines of code of a block of the page, without blank lines and comments.
MOST_LINES = 40


def blocks() -> dict[str, str]:
    """Return the programs of the page by file name."""
    fence = re.compile(r"^```python file=(\S+)\n((?:.*\n)*?)^```$", re.MULTILINE)
    return dict(fence.findall(PAGE.read_text("utf-8")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """A program of the page, and where it is killed.

    Attributes:
        program: name of the file.
        modules: modules to import before the launches.
        edits: replacements in the programs, for another kind of training.
        kills: events of two launches at which they are killed; the second launch is a resume.
        run: directory of the run.
        fault: a replacement after which a resume isn't exact.
    """

    program: str
    modules: str
    edits: tuple[tuple[str, str], ...] = ()
    kills: tuple[int, int]
    run: str
    fault: tuple[str, str]


SAC = (
    ("import PPO", "import SAC"),
    ("CartPole-v1", "Pendulum-v1"),
    ("n_steps=32, batch_size=16, n_epochs=2", "buffer_size=80, batch_size=8, learning_starts=20"),
    ("model = PPO(", "model = SAC("),
    ("learn(512", "learn(160"),
    ("every=64", "every=24"),
)
PLATEAU = (
    ('sched="cosine"', 'sched="plateau", patience_epochs=0'),
    (
        '"scheduler": lr_scheduler}',
        '"scheduler": lr_scheduler, "plateau": lr_scheduler.lr_scheduler}',
    ),
)
TRAINERS = {
    "fabric": Trainer(
        program="fabric.py",
        modules="lightning.fabric",
        kills=(7, 14),
        run="runs/fabric",
        fault=('extra={"scheduler": scheduler}', "extra={}"),
    ),
    "litgpt": Trainer(
        program="pretrain.py",
        modules="lightning.pytorch",
        kills=(7, 8),
        run="runs/pretrain",
        fault=("data=loaders", 'data=loaders["text"]'),
    ),
    "torchtune": Trainer(
        program="recipe.py",
        modules="",
        kills=(28, 60),
        run="runs/recipe",
        fault=("self.model.named_parameters()\n", 'self.model.named_parameters() if "2" in name\n'),
    ),
    "timm": Trainer(
        program="train_timm.py",
        modules="timm",
        kills=(5, 11),
        run="runs/timm",
        fault=("optimizer=optimizer, ", ""),
    ),
    "timm plateau": Trainer(
        program="train_timm.py",
        modules="timm",
        edits=PLATEAU,
        kills=(14, 4),
        run="runs/timm",
        fault=("optimizer=optimizer, ", ""),
    ),
    "diffusers LoRA": Trainer(
        program="train_unet.py",
        modules="diffusers.training_utils diffusers.optimization peft accelerate",
        kills=(5, 11),
        run="runs/unet",
        fault=("accelerator.skip_first_batches(loader)", "loader"),
    ),
    "diffusers": Trainer(
        program="train_unet.py",
        modules="diffusers.training_utils diffusers.optimization peft accelerate",
        edits=(('"base-unet", 4', '"base-unet", 0'),),
        kills=(5, 11),
        run="runs/unet",
        fault=("accelerator.skip_first_batches(loader)", "loader"),
    ),
    "stable-baselines3 PPO": Trainer(
        program="train_sb3.py",
        modules="stable_baselines3",
        kills=(50, 70),
        run="runs/sb3",
        fault=('"env", ', ""),
    ),
    "stable-baselines3 SAC": Trainer(
        program="train_sb3.py",
        modules="stable_baselines3",
        edits=SAC,
        kills=(50, 60),
        run="runs/sb3",
        fault=(', "replay_buffer"', ""),
    ),
}


def write(trainer: Trainer, folder: Path, *, has_fault: bool = False) -> Path:
    """Write the programs of the page, and return the trainer's."""
    folder.mkdir()
    edits = [*trainer.edits, *([trainer.fault] if has_fault else [])]
    found = blocks()
    for old, new in edits:
        assert any(old in text for text in found.values()), old
        found = {name: text.replace(old, new) for name, text in found.items()}
    for name, text in found.items():
        (folder / name).write_text(text, "utf-8")
    return folder / trainer.program


def events(journal: Path) -> list[dict[str, Any]]:
    """Return the events of a launch without their numbers."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    return [{name: fact for name, fact in line.items() if name != "step"} for line in lines]


def launch(trainer: Trainer, program: Path, place: Path, *kills: int | None) -> list[list[Any]]:
    """Launch the program several times, and return the events of each launch."""
    place.mkdir()
    trainings.run(DRIVER, place, program, trainer.modules, json.dumps(kills), "1")
    return [events(place / f"journal-{number}") for number in range(len(kills))]


def place_in(calm: list[Any], part: list[Any]) -> int | None:
    """Return where a launch repeats a part of the undisturbed launch; None for another trajectory."""
    begins = [begin for begin, event in enumerate(calm) if event == part[0]]
    return next((at for at in begins if calm[at : at + len(part)] == part), None)


def tensors(run: Path) -> tuple[int, dict[str, bytes]]:
    """Return the step and the bytes of all tensors of the newest checkpoint of a run."""
    with ckptfmt.open(run) as checkpoint:
        found = {str(key): checkpoint.read(*key).tobytes() for key in checkpoint.tensors}
        return checkpoint.step, found


@pytest.mark.parametrize("name", TRAINERS)
def test_a_program_of_the_page_that_is_killed_is_the_same_training(
    name: str, tmp_path: Path, may_be_refuted: set[Path]
) -> None:
    """Each kill lies between two saves: the first in the first epoch or rollouts, the second later.

    A program with a fault, the negative control, is another training after the resume.
    """
    trainer = TRAINERS[name]
    for module in trainer.modules.split():
        pytest.importorskip(module)
    program = write(trainer, tmp_path / "programs")
    [calm] = launch(trainer, program, tmp_path / "calm", None)
    first, second, third = launch(trainer, program, tmp_path / "killed", *trainer.kills, None)

    assert place_in(calm, first) == 0
    begin = place_in(calm, second)
    assert begin is not None
    assert 0 < begin <= len(first), "the second launch goes on from a save"
    last = place_in(calm, third)
    assert last is not None
    assert begin < last <= begin + len(second), "the third launch goes on from a later save"
    assert last + len(third) == len(calm)
    assert tensors(tmp_path / "killed" / trainer.run) == tensors(tmp_path / "calm" / trainer.run)
    for number in (1, 2):
        told = (tmp_path / f"killed/output-{number}").read_text()
        assert "claim T1 expected" in told
        assert "NOT the same" not in told

    faulty = write(trainer, tmp_path / "faults", has_fault=True)
    may_be_refuted.add(tmp_path / "faulty" / trainer.run)
    first, second = launch(trainer, faulty, tmp_path / "faulty", trainer.kills[0], 6)
    assert place_in(calm, first) == 0
    assert place_in(calm, second) is None


def test_fabric_on_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("lightning.fabric")
    trainer = TRAINERS["fabric"]
    program = write(trainer, tmp_path / "programs")
    for place, kills in (("calm", "[null]"), ("killed", "[4, 7, null]")):
        (tmp_path / place).mkdir()
        trainings.run(DRIVER, tmp_path / place, program, trainer.modules, kills, "2")
    for rank in range(2):
        calm = events(tmp_path / f"calm/journal-0-{rank}")
        parts = [events(tmp_path / f"killed/journal-{number}-{rank}") for number in range(3)]
        assert [place_in(calm, part) for part in parts] == [0, 3, 9]
        assert len(calm) == 9 + len(parts[2])


HIDDEN = """
from gymnasium.envs.classic_control import CartPoleEnv
class Hidden(CartPoleEnv):
    state = property(lambda self: self.simulator["state"])
    @state.setter
    def state(self, value): self.simulator = {"state": value}
"""


def test_an_environment_with_a_hidden_state_lowers_the_claim(
    tmp_path: Path, may_be_refuted: set[Path]
) -> None:
    pytest.importorskip("stable_baselines3")
    trainer = dataclasses.replace(
        TRAINERS["stable-baselines3 PPO"],
        edits=(
            ('make_vec_env("CartPole-v1"', "make_vec_env(Hidden"),
            ("env = Vec", f"{HIDDEN}\nenv = Vec"),
        ),
    )
    program = write(trainer, tmp_path / "programs")
    may_be_refuted.add(tmp_path / "killed/runs/sb3")
    [calm] = launch(trainer, program, tmp_path / "calm", 90)
    _, second = launch(trainer, program, tmp_path / "killed", 50, 10)
    assert place_in(calm, second) is None
    told = (tmp_path / "killed/output-1").read_text()
    assert "claim S" in told
    assert "env.unwrapped.simulator isn't saved" in told


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "partial"])
def test_a_plateau_scheduler_of_timm_is_whole_with_the_scheduler_within(
    is_whole: object, tmp_path: Path
) -> None:
    schedulers = pytest.importorskip("timm.scheduler")

    def make() -> tuple[Any, ckptfmt.State]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plateau = schedulers.PlateauLRScheduler(optimizer, patience_t=5)
        inner = {"plateau": plateau.lr_scheduler} if is_whole else {}
        extra = {"scheduler": plateau, **inner}
        data = {"position": 0}
        state = ckptfmt.State(weights=model, optimizer=optimizer, data=data, config={}, extra=extra)
        return plateau, state

    before, state = make()
    for epoch, metric in enumerate((0.5, 0.4, 0.3)):
        before.step(epoch + 1, metric)
    ckptfmt.save(tmp_path / "saved", state, step=3)
    after, state = make()
    report = ckptfmt.load(tmp_path / "saved", state)
    assert before.lr_scheduler.num_bad_epochs == 2
    assert (report.claim, after.lr_scheduler.num_bad_epochs) == (
        ("T1", 2) if is_whole else ("S0", 0)
    )
    assert ("lr_scheduler.num_bad_epochs" in str(report.lowered_by)) is not is_whole


def test_glue_is_short() -> None:
    counts = {
        name: sum(
            bool(line.strip()) and not line.strip().startswith("#") for line in text.split("\n")
        )
        for name, text in blocks().items()
    }
    assert {name: count for name, count in counts.items() if count > MOST_LINES} == {}
    assert {trainer.program for trainer in TRAINERS.values()} <= counts.keys()

"""Hugging Face's Trainer on a run of ckptfmt: killed and resumed, bit for bit; the best model; exports; refusals."""

import multiprocessing
import shutil
import signal
import socket

import pytest

pytest.importorskip("transformers")


from ckptfmt.__main__ import main as ckptfmt_main
from tests.plugins.trainings import compare, digest
from tests.plugins.transformers_training import LAST_STEP, main, make_trainer

#: Everything at once: evaluations, the best model, a limit, exports.
FULL = {
    "args": {
        "eval_strategy": "steps",
        "eval_steps": 5,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "save_total_limit": 2,
    },
    "ckptfmt": {"export_hf": True},
}

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


#: Processes that can be killed, and needn't import the frameworks anew.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.plugins.transformers_training"])


def train(directory, *, kill_at=None, processes=1, exitcode=0, **told):
    """Train in processes of their own; process 0 ends, or is killed behind a step, and then the others are, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {} if kill_at is None else {"KILL_AT_STEP": str(kill_at)}
    if processes > 1:
        env |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = []
    try:
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            ranks.append(FORKS.Process(target=main, args=(directory, env | own, told)))
            ranks[-1].start()
        ranks[0].join(200)
        for process in ranks[1:]:
            process.join(30 if exitcode == 0 and kill_at is None else 0)
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert codes[0] == (-signal.SIGKILL if kill_at is not None else exitcode), codes
    assert kill_at is not None or not any(codes[1:]), codes


def weights_of(model):
    return digest(model.state_dict())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The directory of a training that nobody disturbed."""
    directory = tmp_path_factory.mktemp("undisturbed")
    make_trainer(directory).train()
    return directory


def test_killed_in_a_step_and_in_a_save(tmp_path, undisturbed):
    """A training that is killed twice, once just after a save began, goes on as if it never was."""
    train(tmp_path, kill_at=23)
    shutil.copytree(tmp_path, tmp_path / "control")
    train(tmp_path, resume=True, die_in_save=35, exitcode=-signal.SIGKILL)
    train(tmp_path, resume=True)
    assert (tmp_path / "claim").read_text() == "T1"
    assert compare(undisturbed / "journal-0", tmp_path / "journal-0", last_step=LAST_STEP) == []
    assert ckptfmt_main(["validate", str(tmp_path / "out/ckptfmt")]) == 0
    # The same without RNG streams does differ, and in the weights from the first step on.
    train(tmp_path / "control", resume=True, without_streams=True)
    differing = compare(undisturbed / "journal-0", tmp_path / "control/journal-0", last_step=LAST_STEP)
    assert any("step 21 differs in" in line and "weights" in line for line in differing)
    assert not any("samples" in line for line in differing)


def test_two_processes(tmp_path):
    """Of two processes under DistributedDataParallel, both are as they would have been."""
    train(tmp_path / "right", processes=2)
    train(tmp_path / "ours", processes=2, kill_at=23)
    train(tmp_path / "ours", processes=2, resume=True)
    for rank in (0, 1):
        journals = [tmp_path / name / f"journal-{rank}" for name in ("right", "ours")]
        assert compare(*journals, last_step=LAST_STEP) == []
    assert (tmp_path / "ours/claim").read_text() == "T1"
    assert ckptfmt_main(["validate", str(tmp_path / "ours/out/ckptfmt")]) == 0

"""Deltas of tensors on a device, which is simulated: only blocks that a slot lacks cross the bus, and all arrive."""

import functools

import pytest
import torch

import ckptfmt
from ckptfmt import Checkpointer, State
from ckptfmt.adapters import torch_side
from ckptfmt.adapters.torch.devices import Devices
from ckptfmt.delta import block_coder as coding
from ckptfmt.digest import digest_bytes
from ckptfmt.errors import Code
from tests.adapters.test_device import FakeCuda
from tests.builders import code_of

MIB = 1 << 20
#: Full at first, then deltas, however long reading them takes.
DELTA = {"mode": "smallest", "restore_budget": 100.0}
ROW_NBYTES = 64 * 4


@pytest.fixture
def cuda(monkeypatch):
    """Let tensors of the host lie on a device."""
    fake = FakeCuda()
    monkeypatch.setattr(
        torch_side(), "Devices", functools.partial(Devices, cuda=fake, device_type="cpu")
    )
    return fake


class Run:
    """A table of eight blocks with momentum, and rows of it that a step changes."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.module = torch.nn.Embedding(8 * MIB // ROW_NBYTES, 64, sparse=True)
        self.frozen = torch.nn.Linear(1024, 1024, bias=False).requires_grad_(requires_grad=False)
        self.optimizer = torch.optim.SparseAdam(self.module.parameters(), lr=1e-3)
        self.state = State(
            weights={"table": self.module, "frozen": self.frozen}, optimizer=self.optimizer
        )

    def step(self, *blocks):
        """Change one row in each of some blocks of the table and of both its moments."""
        rows = torch.tensor([MIB // ROW_NBYTES * block for block in blocks], dtype=torch.long)
        self.module(rows).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self):
        moments = self.optimizer.state[self.module.weight]
        tensors = [
            self.module.weight,
            self.frozen.weight,
            moments["exp_avg"],
            moments["exp_avg_sq"],
        ]
        return [tensor.detach().numpy().tobytes() for tensor in tensors]


def save(ck, cuda, run, *blocks):
    """Train and save; return what the save said, and how many blocks crossed the bus."""
    run.step(*blocks)
    ck.step += 1
    del cuda.sent[:]
    handle = ck.save()
    assert handle is not None
    report = handle.wait()
    return report, sum(nbytes for _, nbytes in cuda.sent if nbytes >= MIB) // MIB


def check_loads(report, held):
    other = Run(seed=1)
    other.step(0)
    ckptfmt.load(report.path, other.state)
    assert other.held() == held


@pytest.mark.parametrize("saver", ["thread", "process"])
@pytest.mark.parametrize("overlap", [False, True])
def test_only_changed_blocks_cross_the_bus(tmp_path, cuda, overlap, saver):
    run = Run()
    with Checkpointer(tmp_path / "run", run.state, delta=DELTA, saver=saver, overlap=overlap) as ck:
        saved = []
        for blocks in ((0,), (1,), (2,), (3,), (3, 4), ()):
            report, sent = save(ck, cuda, run, *blocks)
            saved.append((report, sent, run.held()))
    # The slot is filled once: table, moments and what is frozen. Then what changed in the last step.
    assert [sent for _, sent, _ in saved] == [28, 3, 3, 3, 6, 0]
    assert [report.profile for report, _, _ in saved] == ["full"] + ["delta"] * 5
    assert saved[-1][0].stored_nbytes < 1000
    for report, _, held in saved:
        check_loads(report, held)
    assert ckptfmt.validate(tmp_path / "run").valid


def test_full_saves_in_between_are_whole(tmp_path, cuda):
    """What a slot had before is in the files of a full save as well."""
    run = Run()
    options = {"mode": "smallest", "full_every": 3, "restore_budget": 100.0}
    with Checkpointer(tmp_path / "run", run.state, delta=options, saver="thread") as ck:
        saved = [(*save(ck, cuda, run, number % 8), run.held()) for number in range(7)]
    assert [report.profile for report, _, _ in saved].count("full") >= 2
    assert [sent for _, sent, _ in saved[1:]] == [3] * 6
    for report, _, held in saved:
        check_loads(report, held)


def test_what_did_not_cross_the_bus_is_not_digested_again(tmp_path, cuda, monkeypatch):
    digested = []

    def count(content):
        digested.append(len(content))
        return digest_bytes(content)

    run = Run()
    with Checkpointer(tmp_path / "run", run.state, delta=DELTA, saver="thread") as ck:
        for number in range(3):
            save(ck, cuda, run, number)
        monkeypatch.setattr(coding, "digest_bytes", count)
        _, sent = save(ck, cuda, run, 3)
    assert digested.count(MIB) == sent == 3


def test_without_deltas_nothing_is_looked_at(tmp_path, cuda, monkeypatch):
    monkeypatch.setattr(cuda, "digest_blocks", None)
    run = Run()
    with Checkpointer(tmp_path / "run", run.state, saver="thread") as ck:
        assert [save(ck, cuda, run, 0)[1] for _ in range(3)] == [28] * 3


@pytest.mark.parametrize("profile", ["full", "delta"])
def test_a_block_that_arrives_as_something_else_fails_the_save(
    tmp_path, cuda, monkeypatch, profile
):
    """A write past torch's count of them, between the digests and the copy, or a bus that errs."""
    run = Run()
    copy_to_host = cuda.copy_to_host

    def err_once(target, source):
        copy_to_host(target, source)
        if len(target) >= MIB:
            target[-1] ^= 1
            monkeypatch.setattr(cuda, "copy_to_host", copy_to_host)

    with Checkpointer(tmp_path / "run", run.state, delta=DELTA, saver="thread", slots=1) as ck:
        for number in range(0 if profile == "full" else 3):
            save(ck, cuda, run, number)
        monkeypatch.setattr(cuda, "copy_to_host", err_once)
        assert code_of(lambda: save(ck, cuda, run, 5)) == Code.STATE_CHANGED
        assert (
            code_of(ck.save) == Code.STATE_CHANGED
        )  # who doesn't wait for a save learns of it at the next
        # Nothing of that slot is believed any more.
        saved = [(*save(ck, cuda, run, 6), run.held()) for _ in range(4)]
    assert [sent for _, sent, _ in saved][-1] == 3
    assert max(sent for _, sent, _ in saved[:2]) == 28
    for report, _, held in saved:
        check_loads(report, held)
    assert ckptfmt.validate(tmp_path / "run").valid

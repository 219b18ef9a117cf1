"""Deltas in a training loop: saved by a process or a thread, resumed, and the same run bit by bit."""

import logging
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import ckptfmt
from ckptfmt import Checkpointer, State
from ckptfmt.adapters.torch.tensors import TorchSource
from ckptfmt.delta import block_coder as coding
from ckptfmt.delta.chain import Chain
from ckptfmt.delta.coders import Coders
from ckptfmt.digest import digest_bytes
from ckptfmt.errors import Code
from ckptfmt.run import save_job
from ckptfmt.store import open_store
from ckptfmt.write.staging import Fillings
from tests.builders import code_of, error_of
from tests.homes import named_homes
from tests.save.test_device_deltas import MIB, check_loads
from tests.save.test_device_deltas import Run as Table

#: Full at first, then deltas, however long reading them takes.
DELTA = {"mode": "smallest", "restore_budget": 100.0}

OPTIMIZERS = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False),
    "foreach": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=True),
    "fused": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True),
    "amsgrad": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, amsgrad=True),
    "adam with decay": lambda module: torch.optim.Adam(
        module.parameters(), lr=1e-3, weight_decay=0.1
    ),
    "momentum": lambda module: torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9),
    "rmsprop": lambda module: torch.optim.RMSprop(module.parameters(), lr=1e-3),
}


class Run:
    """A module, its optimizer, and what a step does to them."""

    def __init__(self, optimizer="adamw", seed=0):
        torch.manual_seed(seed)
        self.module = torch.nn.Sequential(
            torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64)
        )
        self.optimizer = OPTIMIZERS[optimizer](self.module)
        self.state = State(weights=self.module, optimizer=self.optimizer, data={"position": 0})

    def step(self, number, *, gradients="float32"):
        generator = torch.Generator().manual_seed(number)
        loss = (self.module(torch.randn(32, 64, generator=generator)) ** 2).mean()
        loss.backward()
        if gradients == "bfloat16":
            for parameter in self.module.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.bfloat16().float()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self):
        tensors = {**self.module.state_dict()}
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors |= {
                f"{number}/{name}": value for name, value in state.items() if torch.is_tensor(value)
            }
        return {name: value.numpy().tobytes() for name, value in tensors.items()}


def save(checkpointer):
    """Save and wait for it; return what it said."""
    handle = checkpointer.save()
    assert handle is not None
    return handle.wait()


def save_steps(path, run, steps, **options):
    """Train and save at each step; return what each save said, and what was held then."""
    reports, held = [], []
    with Checkpointer(path, run.state, **{"delta": DELTA, "saver": "thread", **options}) as ck:
        for step in steps:
            run.step(step)
            ck.step = step
            reports.append(save(ck))
            held.append(run.held())
    return reports, held


@named_homes
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_step_is_loaded_as_it_was(home, optimizer):
    place = home.path()
    reports, held = save_steps(place, Run(optimizer), range(1, 5))
    assert [report.profile for report in reports] == ["full", "delta", "delta", "delta"]
    for report, expected in zip(reports, held, strict=True):
        other = Run(optimizer, seed=1)
        ckptfmt.load(report.path, other.state)
        assert other.held() == expected


@pytest.mark.parametrize(
    ("optimizer", "gradients", "limit"),
    [
        ("adamw", "float32", 0.30),
        ("foreach", "float32", 0.30),
        ("fused", "float32", 0.30),
        ("adamw", "bfloat16", 0.15),
        ("momentum", "float32", 0.44),
        ("momentum", "bfloat16", 0.22),
    ],
)
def test_the_gradient_is_the_only_news(tmp_path, optimizer, gradients, limit):
    """Stored over raw of a small state, whose blocks are short: the larger ones of the benchmark need less."""
    run = Run(optimizer)
    for step in range(20):
        run.step(step, gradients=gradients)
    with Checkpointer(tmp_path / "run", run.state, delta=DELTA, saver="thread") as ck:
        for step in (1, 2):
            run.step(100 + step, gradients=gradients)
            ck.step = step
            report = save(ck)
    assert report.profile == "delta"
    assert report.stored_nbytes < limit * report.nbytes
    other = Run(optimizer, seed=1)
    ckptfmt.load(report.path, other.state)
    assert other.held() == run.held()


@pytest.fixture
def costs(monkeypatch):
    """Sizes of what was copied into slots, and of what savers digested."""
    copied, digested = [], []
    copyto, copy_into = np.copyto, TorchSource.copy_into

    def note_copy(place, content):
        copied.append(content.nbytes)
        copyto(place, content)

    def note_whole(self, box, out):
        copied.append(out.nbytes)
        copy_into(self, box, out)

    def note_digest(content):
        digested.append(len(content))
        return digest_bytes(content)

    monkeypatch.setattr(np, "copyto", note_copy)
    monkeypatch.setattr(TorchSource, "copy_into", note_whole)
    monkeypatch.setattr(coding, "digest_bytes", note_digest)
    return copied, digested


def use_second_slot(ck):
    """Make the slot that a save makes when it finds the first one busy."""
    background = background_of(ck)
    background._make_slot(background._image.nbytes)
    background._ready_link()


@pytest.mark.parametrize("slots", [1, 2])
def test_what_has_not_changed_is_neither_copied_nor_digested(tmp_path, costs, slots):
    """A slot is compared with what it holds: what changed since its last save is copied."""
    run, told, saved = Table(), [], []
    with Checkpointer(tmp_path / "run", run.state, delta=DELTA, saver="thread") as ck:
        for number in range(6):
            run.step(number)
            ck.step += 1
            for noted in costs:
                noted.clear()
            saved.append((save(ck), run.held()))
            copied, digested = costs
            told.append((sum(copied) // MIB, digested.count(MIB)))
            if number == 0 and slots == 2:
                use_second_slot(ck)
    # Each slot is filled once; then table and moments, a block of each for each step.
    expected = {1: [28, 3, 3, 3, 3, 3], 2: [28, 28, 6, 6, 6, 6]}[slots]
    assert [copied for copied, _ in told] == expected
    assert [digested for _, digested in told[2:]] == expected[2:]
    for report, held in saved:
        check_loads(report, held)


def test_processes_are_handed_only_what_was_copied(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptfmt.delta.chain._LEAST_NBYTES", 0)
    monkeypatch.setattr("ckptfmt.delta.coders.coder_count", lambda: 2)
    monkeypatch.setattr("ckptfmt.delta.delta.coder_count", lambda: 2)
    handed, code = [], Coders.code

    def note(self, blocks, nbytes):
        handed.append(nbytes)
        return code(self, blocks, nbytes)

    monkeypatch.setattr(Coders, "code", note)
    run, told, saved = Table(), [], []
    with Checkpointer(tmp_path / "run", run.state, delta=DELTA, saver="thread") as ck:
        for number in range(5):
            run.step(number)
            ck.step += 1
            handed.clear()
            saved.append((save(ck), run.held()))
            told.append(sum(handed) // MIB)
            if number == 0:
                use_second_slot(ck)
    # The first is full, the second slot's first filling is whole; then table and moments, two
    # blocks of each.
    assert told == [0, 28, 6, 6, 6]
    for report, held in saved:
        check_loads(report, held)


def test_without_deltas_nothing_is_compared(tmp_path, costs):
    run = Table()
    with Checkpointer(tmp_path / "run", run.state, saver="thread") as ck:
        for number in range(4):
            run.step(0)
            ck.step += 1
            costs[0].clear()
            save(ck)
            assert sum(costs[0]) // MIB == 28, number


@named_homes
def test_what_a_slot_holds_of_a_save_that_failed_is_not_believed(home, costs, monkeypatch):
    place = home.path()
    run = Table()
    with Checkpointer(place, run.state, delta=DELTA, saver="thread", slots=1) as ck:
        for number in range(3):
            run.step(number)
            ck.step += 1
            save(ck)
        with monkeypatch.context() as patch:
            patch.setattr(Chain, "write", lambda *_, **__: 1 / 0)
            run.step(3)
            ck.step += 1
            with pytest.raises(ckptfmt.CkptError):
                save(ck)
            with pytest.raises(ckptfmt.CkptError):
                ck.save()
        copied = []
        for number in range(4, 8):
            run.step(number)
            ck.step += 1
            costs[0].clear()
            report = save(ck)
            copied.append(sum(costs[0]) // MIB)
    assert copied == [28, 3, 3, 3]
    check_loads(report, run.held())


@named_homes
def test_a_save_that_fails_once_it_is_written_leaves_nothing_stale(home, monkeypatch):
    """Its slot was written, and its digests are those of what lies there; it is no base."""
    place = home.path()
    run, saved = Table(), []
    with Checkpointer(place, run.state, delta=DELTA, saver="thread") as ck:
        for number in range(7):
            run.step(number)
            ck.step += 1
            with monkeypatch.context() as patch:
                if number == 3:
                    patch.setattr(save_job, "decide", lambda *_, **__: 1 / 0)
                    with pytest.raises(ckptfmt.CkptError):
                        save(ck)
                    with pytest.raises(ckptfmt.CkptError):
                        ck.save()
                else:
                    saved.append((save(ck), run.held()))
    assert [report.profile for report, _ in saved] == ["full", *["delta"] * 5]
    for report, held in saved:
        check_loads(report, held)


@named_homes
def test_a_saver_that_is_started_again_knows_no_digest_of_what_was_kept(home):
    place = home.path()
    run, saved = Table(), []
    with Checkpointer(place, run.state, delta=DELTA, saver="process") as ck:
        for number in range(8):
            run.step(number)
            ck.step += 1
            if number == 4:
                os.kill(link_of(ck).pid, signal.SIGKILL)
                while True:  # it is told once by the save that meets it, once by the next
                    try:
                        report = save(ck)
                        break
                    except ckptfmt.CkptError as error:
                        assert error.code == Code.SAVER_LOST
                        ck.step += 1
            else:
                report = save(ck)
            saved.append((report, run.held()))
    assert [report.profile for report, _ in saved] == ["full", *["delta"] * 3] * 2
    for report, held in saved:
        check_loads(report, held)


@named_homes
def test_a_slot_that_somebody_else_has_written_to_fails_the_next_save_in_full(home):
    """What is kept isn't looked at again for a delta, which refers to the base; but this would store it."""
    place = home.path()
    run, saved, refused = Table(), [], []
    delta = {**DELTA, "full_every": 4}
    with Checkpointer(place, run.state, delta=delta, saver="thread") as ck:
        for number in range(12):
            run.step(number % 8)
            ck.step += 1
            if number == 3:
                for place in background_of(ck)._places:
                    at = bytes(place.slot.view).index(run.held()[1][:64])
                    place.slot.view[at + 5000] ^= 1
            try:
                saved.append((save(ck), run.held()))
            except ckptfmt.CkptError as error:
                refused.append(error)
                assert code_of(ck.save) == Code.STATE_CHANGED, (
                    "once more, as that of an earlier save"
                )
    assert {error.code for error in refused} == {Code.STATE_CHANGED}
    assert 1 <= len(refused) <= 2, "one for each slot at most"
    assert "weights:frozen/weight" in str(refused[0])
    assert [report.profile for report, _ in saved].count("full") >= 2
    for report, held in saved:
        check_loads(report, held)


#: The first words of the secret that XXH3 is published with.
XXH3_SECRET = bytes.fromhex("b8fe6c3923a44bbe7c01812cf721ad1c")


def colliding(seed):
    """Return two contents that differ in two bytes, and have one checksum under every seed that ends in these 32 bits.

    A word whose one half is that of the secret adds nothing to the products, whatever its other
    half is; two of them add up to the same, one greater and one smaller.
    """
    halves = [
        int.from_bytes(XXH3_SECRET[at : at + 8], "little") + sign * seed
        for at, sign in ((0, 1), (8, -1))
    ]
    made = []
    for others in ((5, 5), (6, 4)):
        content = np.zeros(MIB, np.uint8)
        for at, half, other in zip((0, 64), halves, others, strict=True):
            content[at : at + 8] = np.frombuffer(
                (half % 2**32 + (other << 32)).to_bytes(8, "little"), np.uint8
            )
        made.append(content)
    return made


def test_contents_that_collide_under_a_known_seed_are_told_apart(tmp_path):
    """What a slot has is known by checksums: with the seed that everybody knows, the older content was committed."""
    old, new = colliding(0)
    assert np.count_nonzero(old != new) == 2
    assert xxhash.xxh3_128_digest(old) == xxhash.xxh3_128_digest(new)
    held = old.copy()
    with Checkpointer(
        tmp_path / "run", State(weights={"w": held}), delta=DELTA, slots=1, saver="thread"
    ) as ck:
        for content in (old, new):
            held[:] = content
            ck.step += 1
            save(ck)
    loaded: Any = ckptfmt.load(tmp_path / "run", framework="numpy")
    assert np.array_equal(loaded["weights"]["w"], new)


def test_the_seed_of_checksums_is_nobody_elses():
    """Of another trainer neither: contents that collide there don't here."""
    checksums: list[Any] = [Fillings()._checksum for _ in range(8)]
    seeds = {checksum.keywords["seed"] for checksum in checksums}
    assert len(seeds) == 8
    old, new = colliding(min(seeds) % 2**32)
    digests = [
        [xxhash.xxh3_128_digest(content, seed=seed) for content in (old, new)]
        for seed in sorted(seeds)
    ]
    assert [one == other for one, other in digests] == [True, *[False] * 7]


def background_of(checkpointer):
    return checkpointer._saves._background


def link_of(checkpointer):
    return background_of(checkpointer)._link


@named_homes
def test_a_process_saves_deltas_and_the_run_goes_on_from_one(home):
    """The next launch resumes from a delta, and its first save is full: its saver has read no base."""
    place = home.path()
    run = Run()
    reports, held = save_steps(place, run, range(1, 4), saver="process")
    assert reports[-1].profile == "delta"
    again = Run(seed=1)
    with Checkpointer(place, again.state, delta=DELTA, saver="process") as ck:
        assert ck.step == 3
        assert again.held() == held[-1]
        ck.restore_rng()
        ck.step = 4
        again.step(4)
        assert save(ck).profile == "full"
    run.step(4)
    assert again.held() == run.held()


@named_homes
def test_what_is_kept_keeps_its_base(home):
    place = home.path()
    run = Run()
    reports, held = save_steps(place, run, range(1, 6), keep=1)
    assert ckptfmt.validate(place).valid
    other = Run(seed=1)
    ckptfmt.load(place, other.state)
    assert other.held() == held[-1]
    assert [report.removed for report in reports] == [()] * 5


@named_homes
def test_fields_that_are_not_encoded_are_written_as_they_are(home):
    place = home.path()
    delta = {**DELTA, "fields": "optimizer"}
    save_steps(place, Run(), range(1, 3), delta=delta)
    with ckptfmt.open(place) as checkpoint:
        fields = checkpoint.manifest.fields
        assert fields["weights"].stored_nbytes == fields["weights"].nbytes
        assert (fields["optimizer"].stored_nbytes or 0) < fields["optimizer"].nbytes / 2


@named_homes
def test_auto_writes_in_full_what_changes_everywhere(home):
    place = home.path()
    reports, _ = save_steps(place, Run(), range(1, 5), delta="auto")
    assert {report.profile for report in reports} == {"full"}
    assert all(report.reason for report in reports)


@named_homes
def test_a_run_that_was_begun_without_deltas_refuses_them(home):
    """REQ-CMT-036"""
    place = home.path()
    save_steps(place, Run(), range(1, 2), delta="off")
    error = error_of(Checkpointer(place, Run().state, delta="auto").restore)
    assert (error.code, error.requirement) == (Code.ARGUMENT, "REQ-CMT-036")
    assert "delta='off'" in error.remedy


@pytest.mark.parametrize(
    "delta",
    [
        "always",
        None,
        {"mode": "auto", "full_every": 0},
        {"mode": "auto", "full_every": 33},
        {"mode": "auto", "restore_budget": 0.5},
        {"mode": "auto", "restore_budget": "1.5"},
        {"mode": "auto", "fields": ["wheels"]},
        {"mode": "auto", "every": 3},
    ],
)
def test_options_that_make_no_sense_are_named(tmp_path, delta):
    assert (
        code_of(lambda: Checkpointer(tmp_path / "run", Run().state, delta=delta)) == Code.ARGUMENT
    )
    assert not (tmp_path / "run").exists()


def test_a_save_inline_is_no_delta(tmp_path):
    assert (
        code_of(lambda: Checkpointer(tmp_path / "run", Run().state, delta="auto", saver="inline"))
        == Code.ARGUMENT
    )


@named_homes
def test_a_base_that_went_away_costs_a_full_save_and_nothing_else(home, caplog):
    place = home.path()
    run = Run()
    with (
        caplog.at_level(logging.ERROR),
        Checkpointer(place, run.state, delta=DELTA, saver="thread") as ck,
    ):
        for step in (1, 2):
            run.step(step)
            ck.step = step
            report = save(ck)
        open_store(place, writable=True).delete("step-00000002-l0001/manifest.json")
        run.step(3)
        ck.step = 3
        report = save(ck)
    assert report.profile == "full"
    assert "base" in report.reason
    assert not caplog.records

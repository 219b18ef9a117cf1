"""Who loads, loads everything: raw readers every byte once, the others into tensors that are looked at."""

import os
import time
from collections.abc import Callable

import pytest
import torch

from benchmarks.bare import BareLoad
from benchmarks.load import Destination
from benchmarks.loaders import DcpLoad, Loader, OursLoad, SafetensorsLoad, TorchLoad
from benchmarks.memory import PeakResident
from benchmarks.pages import map_anonymous
from benchmarks.raw import READ_SETTINGS, RawReader, RawSetting
from benchmarks.state import Trainer
from ckptfmt.errors import IntegrityError


@pytest.fixture(scope="module")
def trainer():
    threads = torch.get_num_threads()
    yield Trainer(1_000_000, threads=1)
    torch.set_num_threads(threads)


@pytest.fixture
def destination(trainer):
    made = Destination(trainer.tensors())
    yield made
    made.check_all()


@pytest.mark.parametrize("touches", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_raw_reads_read_every_byte_once(tmp_path, monkeypatch, threads, touches):
    path, content = tmp_path / "raw", os.urandom(100_001)
    path.write_bytes(content)
    found: dict[int, bytes] = {}
    read = os.preadv

    def note(opened, targets, begin):
        nbytes = read(opened, targets, begin)
        found.setdefault(begin, bytes(targets[0][:nbytes]))
        return nbytes

    monkeypatch.setattr(os, "preadv", note)
    RawReader(RawSetting(threads=threads, request_nbytes=8192), touches=touches).load(path)

    assert b"".join(found[begin] for begin in sorted(found)) == content


def test_raw_reads_are_tried_with_few_and_many_threads_and_short_and_long_requests():
    assert {setting.threads for setting in READ_SETTINGS} == {1, 2, 4, 8}
    assert {setting.request_nbytes >> 19 for setting in READ_SETTINGS} == {1, 2, 8, 32}


@pytest.mark.parametrize("spoilt", ["first", "middle", "last"])
def test_a_tensor_that_was_not_loaded_is_found(destination, spoilt):
    flat = list(destination.tensors.values())[7].detach().view(-1)
    at = {"first": 0, "middle": flat.numel() // 2, "last": -1}[spoilt]
    before = flat[at].clone()
    destination.check_all()
    flat[at] += 1

    try:
        with pytest.raises(RuntimeError, match="other bytes"):
            destination.check_all()
        if spoilt != "middle":
            with pytest.raises(RuntimeError, match="as it was"):
                destination.check()
    finally:
        flat[at] = before


@pytest.mark.parametrize(
    "name", ["ours", "unverified", "torch", "torch_mmap", "load_file", "safe_open", "dcp", "bare"]
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_everyone_fills_every_tensor(tmp_path, trainer, destination, name):
    tensors = destination.tensors
    makers: dict[str, Callable[[], Loader]] = {
        "ours": lambda: OursLoad("ours", trainer),
        "unverified": lambda: OursLoad("ours", trainer, verify=False),
        "torch": lambda: TorchLoad("torch", tensors, mmap=False),
        "torch_mmap": lambda: TorchLoad("torch", tensors, mmap=True),
        "load_file": lambda: SafetensorsLoad(tensors, one_by_one=False),
        "safe_open": lambda: SafetensorsLoad(tensors, one_by_one=True),
        "bare": lambda: BareLoad(tensors),
        "dcp": lambda: DcpLoad(tensors, thread_count=2, copy_threads=1),
    }
    loader = makers[name]()
    path = loader.write(tmp_path / "files")
    destination.spoil()

    loader.load(path)

    destination.check_all()


def test_the_bare_loop_verifies_every_block(tmp_path, destination):
    bare = BareLoad(destination.tensors)
    path = bare.write(tmp_path / "files")
    for at in (0, path.stat().st_size // 2, path.stat().st_size - 1):
        with path.open("r+b") as file:
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(bytes((old[0] ^ 1,)))
        with pytest.raises(AssertionError, match="aren't what was written"):
            bare.load(path)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(old)
    bare.load(path)


def test_only_who_asks_for_it_goes_unverified(tmp_path, trainer):
    path = OursLoad("ours", trainer).write(tmp_path / "files")
    shard = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    with shard.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\xff")

    OursLoad("ours", trainer, verify=False).load(path)
    with pytest.raises(IntegrityError):
        OursLoad("ours", trainer).load(path)


def test_the_most_memory_of_a_while_is_what_was_taken_then():
    nbytes = 1 << 25
    with PeakResident() as memory:
        taken = map_anonymous(nbytes)
        taken.write(bytes(nbytes))
        time.sleep(0.1)
        taken.close()

    assert nbytes <= memory.extra_nbytes < 4 * nbytes

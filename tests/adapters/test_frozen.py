"""Saves of adapters that refer to a frozen base: what is stored, what a load takes from where, and what it refuses."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptfmt
from ckptfmt.__main__ import main
from ckptfmt.adapters.capture import capture
from ckptfmt.errors import CkptError, Code, IntegrityError
from ckptfmt.read.frozen_base import Recorded
from ckptfmt.store import direct
from tests.adapters.double import checkpoint_of, restore
from tests.adapters.test_distributed import played
from tests.builders import code_of, error_of
from tests.pages.stranger_reader import read_checkpoint

WIDTH = 48


class Adapted(nn.Module):
    """A frozen linear layer with a LoRA adapter; names as PEFT gives them."""

    def __init__(self, base_layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(requires_grad=False)
        self.lora_A = nn.ModuleDict(
            {"default": nn.Linear(base_layer.in_features, rank, bias=False)}
        )
        self.lora_B = nn.ModuleDict(
            {"default": nn.Linear(rank, base_layer.out_features, bias=False)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.lora_B["default"](self.lora_A["default"](x))
        whole: torch.Tensor = self.base_layer(x)
        return whole + added


class Inner(nn.Module):
    """The base: an embedding tied to the head, and two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(10, WIDTH),
                "q_proj": nn.Linear(WIDTH, WIDTH),
                "v_proj": nn.Linear(WIDTH, WIDTH, bias=False),
            }
        )
        self.lm_head = nn.Linear(WIDTH, 10, bias=False)
        self.lm_head.weight = self.model["embed_tokens"].get_parameter("weight")

    def forward(self, tokens: torch.Tensor) -> Any:
        x: Any = self.model["embed_tokens"](tokens)
        logits: Any = self.lm_head(self.model["v_proj"](self.model["q_proj"](x)))
        return logits


def make_base(seed: int = 0) -> Inner:
    torch.manual_seed(seed)
    return Inner()


def adapt(base: Inner, seed: int = 1) -> nn.Module:
    """Return the module as PEFT wraps it: `base_model.model.` before each name, `base_layer` inside."""
    torch.manual_seed(seed)
    base.requires_grad_(requires_grad=False)
    for name in ("q_proj", "v_proj"):
        base.model[name] = Adapted(base.model[name])  # type: ignore[arg-type]
    outer, inner = nn.Module(), nn.Module()
    inner.model = base
    outer.base_model = inner
    with torch.no_grad():
        for name, parameter in outer.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    return outer


def write_base(place: Path, seed: int = 0) -> Path:
    """Write the base as transformers does: a tied tensor under one name only."""
    place.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value
        for name, value in make_base(seed).state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, place / "model.safetensors")
    return place


def zeroed(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


def bytes_of(module: nn.Module) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in module.state_dict().items()}


def stored_nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.safetensors"))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path, nn.Module]:
    """A base, a checkpoint of an adapted module, and the module."""
    base = write_base(tmp_path / "base")
    module = adapt(make_base())
    ckptfmt.save(tmp_path / "adapters", ckptfmt.State(weights=module, frozen_base=base), step=1)
    return base, tmp_path / "adapters", module


def test_only_the_trainable_part_is_stored(saved: Any) -> None:
    """Spec: REQ-FRZ-001, REQ-FRZ-002, REQ-FRZ-003."""
    _, path, _ = saved
    with ckptfmt.open(path) as checkpoint:
        assert checkpoint.manifest.features == ("frozen",)
        assert checkpoint.manifest.profile == "full"
        stored = {one.name for one in checkpoint.index.tensors}
        names = {one.name_in_base for one in checkpoint.frozen.values()}
    assert all("lora_" in name for name in stored)
    assert len(stored) == 4
    assert names == {
        "model.embed_tokens.weight",
        "model.q_proj.weight",
        "model.q_proj.bias",
        "model.v_proj.weight",
    }
    assert stored_nbytes(path) < 4 * WIDTH * 2 * 4 + 1000


def test_without_the_option_nothing_changes(saved: Any, tmp_path: Path) -> None:
    """The control: all tensors are stored, and a reader needs no feature."""
    _, _, module = saved
    ckptfmt.save(tmp_path / "whole", ckptfmt.State(weights=module), step=1)
    with ckptfmt.open(tmp_path / "whole") as checkpoint:
        assert checkpoint.manifest.features == ()
        assert checkpoint.frozen == {}
        assert len(checkpoint.tensors) == 8


def test_a_load_reads_the_base_where_it_was(saved: Any) -> None:
    """Spec: REQ-FRZ-005, REQ-FRZ-006."""
    _, path, module = saved
    other = zeroed(adapt(make_base()))
    report = ckptfmt.load(path, ckptfmt.State(weights=other))
    assert bytes_of(other) == bytes_of(module)
    assert report.reads.read_nbytes > 2 * WIDTH * WIDTH * 4


def test_a_load_into_the_base_itself_needs_no_file(saved: Any, tmp_path: Path) -> None:
    base, path, module = saved
    base.rename(tmp_path / "gone")
    other = adapt(make_base(), seed=2)
    report = ckptfmt.load(path, ckptfmt.State(weights=other))
    assert bytes_of(other) == bytes_of(module)
    assert report.reads.read_nbytes < WIDTH * WIDTH * 4


def test_a_base_that_moved_is_asked_for_and_found_where_the_caller_says(
    saved: Any, tmp_path: Path
) -> None:
    """Spec: REQ-FRZ-006."""
    base, path, module = saved
    base.rename(tmp_path / "moved")
    other = zeroed(adapt(make_base()))
    before = bytes_of(other)
    error = error_of(lambda: ckptfmt.load(path, ckptfmt.State(weights=other)))
    assert error.code == "FROZEN_BASE_MISSING"
    assert str(base) in str(error)
    assert "State(frozen_base=PATH)" in error.remedy
    assert bytes_of(other) == before
    state = ckptfmt.State(weights=other, frozen_base=tmp_path / "moved")
    ckptfmt.load(path, state)
    assert bytes_of(other) == bytes_of(module)
    trees = ckptfmt.load(path, bases=[tmp_path / "moved"])["weights"]
    assert {name: value.numpy().tobytes() for name, value in trees.items()} == bytes_of(module)


@pytest.mark.parametrize("how", ["content", "shape", "name"])
def test_a_base_that_changed_is_refused_before_anything_changes(saved: Any, how: str) -> None:
    """Spec: REQ-FRZ-005."""
    base, path, _ = saved
    file = base / "model.safetensors"
    if how == "content":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        tensors = make_base().state_dict()
        del tensors["lm_head.weight"]
        moved = tensors.pop("model.v_proj.weight")
        tensors["model.v_proj.weight" if how == "shape" else "other"] = (
            moved.reshape(2, -1) if how == "shape" else moved
        ).clone()
        save_file(tensors, file)
    other = zeroed(adapt(make_base()))
    before = bytes_of(other)
    error = error_of(lambda: ckptfmt.load(path, ckptfmt.State(weights=other)))
    assert error.code == "FROZEN_BASE_CHANGED"
    assert "base_model.model.model." in error.where
    assert str(base) in error.detail
    assert bytes_of(other) == before


def test_the_base_may_be_a_file_or_a_checkpoint_and_the_same_content_is_the_same_base(
    saved: Any, tmp_path: Path
) -> None:
    base, path, module = saved
    ckptfmt.save(tmp_path / "as checkpoint", ckptfmt.State(weights=make_base()), step=0)
    for place in (base / "model.safetensors", tmp_path / "as checkpoint"):
        other = adapt(make_base())
        ckptfmt.load(path, ckptfmt.State(weights=zeroed(other), frozen_base=place))
        assert bytes_of(other) == bytes_of(module)
        out = tmp_path / f"of {place.name}"
        ckptfmt.save(out, ckptfmt.State(weights=other, frozen_base=place), step=1)
        assert stored_nbytes(out) == stored_nbytes(path)
        ckptfmt.load(out, ckptfmt.State(weights=zeroed(other)))
        assert bytes_of(other) == bytes_of(module)


def test_a_snapshot_in_the_cache_of_hugging_face_is_a_base(tmp_path: Path) -> None:
    """Its files are symbolic links, which stores refuse in a checkpoint."""
    write_base(tmp_path / "blobs")
    (tmp_path / "blobs" / "model.safetensors").rename(tmp_path / "blobs" / "8a3f")
    snapshot = tmp_path / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/8a3f")
    for place in (snapshot, snapshot / "model.safetensors"):
        module = adapt(make_base())
        out = tmp_path / place.name
        ckptfmt.save(out, ckptfmt.State(weights=module, frozen_base=place), step=1)
        with ckptfmt.open(out) as checkpoint:
            assert (len(checkpoint.frozen), checkpoint.frozen_location) == (4, str(place))
        ckptfmt.load(out, ckptfmt.State(weights=zeroed(module)))
        assert bytes_of(module) == bytes_of(adapt(make_base()))


def test_another_base_is_looked_at_anew(saved: Any, tmp_path: Path) -> None:
    base, _, module = saved
    state = ckptfmt.State(weights=module, frozen_base=base)
    ckptfmt.save(tmp_path / "first", state, step=1)
    state.frozen_base = write_base(tmp_path / "other", seed=3)
    ckptfmt.save(tmp_path / "second", state, step=2)
    with ckptfmt.open(tmp_path / "second") as checkpoint:
        assert checkpoint.frozen == {}
        assert checkpoint.manifest.features == ()


def test_a_base_outside_of_the_page_cache_is_read(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct I/O reads whole pages, into memory at the begin of a page."""
    base, path, module = saved
    monkeypatch.setattr(direct, "is_cached", lambda *_: False)
    monkeypatch.setattr(direct, "DIRECT_NBYTES", 0)
    other = zeroed(adapt(make_base()))
    ckptfmt.load(path, ckptfmt.State(weights=other, frozen_base=base))
    assert bytes_of(other) == bytes_of(module)


def test_a_run_is_no_base(tmp_path: Path) -> None:
    with ckptfmt.Checkpointer(tmp_path / "run", ckptfmt.State(weights=make_base())) as checkpointer:
        checkpointer.save(step=0)
    state = ckptfmt.State(weights=adapt(make_base()), frozen_base=tmp_path / "run")
    error = error_of(lambda: ckptfmt.save(tmp_path / "out", state, step=1))
    assert error.code == "ARGUMENT"
    assert "checkpoint of the run" in error.remedy


@pytest.mark.parametrize(
    "location", ["s3://[", "s3://elsewhere/base", "https://10.0.0.1/", "s3://run2", "file://["]
)
def test_a_recorded_url_that_the_caller_has_not_named_is_not_opened(location: str) -> None:
    """A URL that can't be parsed raised ValueError."""
    recorded = Recorded(location, "s3://run/adapters")
    assert code_of(recorded.check) == "FROZEN_BASE_MISSING"


@pytest.mark.parametrize("location", ["/models/[base]", "file:///models/base", "s3://run/base"])
def test_a_recorded_path_and_the_bucket_of_the_checkpoint_are_opened(location: str) -> None:
    assert Recorded(location, "s3://run/adapters").check() == location


def test_a_save_without_the_base_is_refused_and_an_argument_of_another_type(tmp_path: Path) -> None:
    state = ckptfmt.State(weights=adapt(make_base()), frozen_base=tmp_path / "nowhere")
    assert code_of(lambda: ckptfmt.save(tmp_path / "out", state, step=1)) == "FROZEN_BASE_MISSING"
    assert code_of(lambda: ckptfmt.State(weights=make_base(), frozen_base=3)) == "ARGUMENT"  # type: ignore[arg-type]


def test_frozen_weights_that_differ_from_the_base_are_stored(
    saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A write through `.data`, as a merge of an adapter makes, which torch's version doesn't count. Spec: REQ-FRZ-007."""
    base, _, module = saved
    state = ckptfmt.State(weights=module, frozen_base=base)
    ckptfmt.save(tmp_path / "first", state, step=1)
    weight = module.get_parameter("base_model.model.model.q_proj.base_layer.weight")
    version = weight._version
    weight.data[0, 0] += 1
    assert weight._version == version
    with caplog.at_level(logging.WARNING, "ckptfmt"):
        ckptfmt.save(tmp_path / "merged", state, step=2)
    assert "1 frozen parameters aren't equal" in caplog.text
    other = zeroed(adapt(make_base()))
    ckptfmt.load(tmp_path / "merged", ckptfmt.State(weights=other))
    assert bytes_of(other) == bytes_of(module)
    weight.data[0, 0] -= 1
    exact = make_base().state_dict()["model.q_proj.weight"]
    weight.data.copy_(exact)
    ckptfmt.save(tmp_path / "back", state, step=3)
    assert stored_nbytes(tmp_path / "back") == stored_nbytes(tmp_path / "first")


def test_a_tensor_of_the_base_that_is_trained_is_stored(saved: Any, tmp_path: Path) -> None:
    base, _, module = saved
    module.get_parameter("base_model.model.lm_head.weight").requires_grad_()
    ckptfmt.save(tmp_path / "out", ckptfmt.State(weights=module, frozen_base=base), step=1)
    with ckptfmt.open(tmp_path / "out") as checkpoint:
        assert "base_model.model.lm_head.weight" in {
            name for one in checkpoint.index.tensors for name in (one.name, *one.aliases)
        }
        assert len(checkpoint.frozen) == 3


def test_a_reader_reads_rows_of_a_tensor_of_the_base(saved: Any) -> None:
    _, path, module = saved
    name = "base_model.model.model.q_proj.base_layer.weight"
    with ckptfmt.open(path) as checkpoint:
        assert name in checkpoint.weights
        rows = checkpoint.weights[name][3:5, 7:]
        tied = checkpoint.weights["base_model.model.lm_head.weight"][...]
    assert rows.tobytes() == module.get_parameter(name)[3:5, 7:].detach().numpy().tobytes()
    head = module.get_parameter("base_model.model.lm_head.weight")
    assert tied.tobytes() == head.detach().numpy().tobytes()


def test_a_selection_and_other_names(saved: Any) -> None:
    _, path, module = saved
    body = adapt(make_base()).base_model.model  # type: ignore[union-attr]
    body = zeroed(body)  # type: ignore[arg-type]
    ckptfmt.load(
        path,
        ckptfmt.State(weights=body),
        only="*q_proj*",
        rename={"": "base_model.model."},
    )
    of_q = {name: value for name, value in bytes_of(body).items() if "q_proj" in name}
    expected = {
        name.removeprefix("base_model.model."): value for name, value in bytes_of(module).items()
    }
    assert of_q == {name: expected[name] for name in of_q}
    assert not any(map(any, (value for name, value in bytes_of(body).items() if "v_proj" in name)))


def test_a_live_module_without_the_frozen_tensor_is_unexpected(saved: Any) -> None:
    _, path, _ = saved
    module = adapt(make_base())
    layer: Any = module.get_submodule("base_model.model.model.v_proj")
    del layer.base_layer
    assert code_of(lambda: ckptfmt.load(path, ckptfmt.State(weights=module))) == "TENSOR_UNEXPECTED"


def shard(module: nn.Module, rank: int, world_size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=(f"frozen{rank}",))
    fully_shard(module, mesh=mesh)
    return module


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_of_fsdp2_compare_their_pieces_and_any_world_size_reads(
    world_size: int, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base")
    snapshots = []
    for rank in range(world_size):
        with played(rank, world_size):
            module = shard(adapt(make_base()), rank, world_size)
            state = ckptfmt.State(weights=module, frozen_base=base)
            snapshots.append(capture(state, worker=rank, worker_count=world_size))
    checkpoint = checkpoint_of(*snapshots)
    assert len(checkpoint.index.tensors) == 4
    assert len(checkpoint.frozen) == 4
    whole = adapt(make_base())
    for rank in range(2):
        with played(rank, 2):
            module = shard(zeroed(adapt(make_base())), rank, 2)
            restore(ckptfmt.State(weights=module), checkpoint, worker=rank, worker_count=2)
            for name, parameter in module.named_parameters():
                expected = whole.get_parameter(name).chunk(2)[rank]
                local = parameter.to_local().detach()  # type: ignore[attr-defined]
                assert torch.equal(local, expected), name


def test_two_replicas_agree_and_each_loads(tmp_path: Path) -> None:
    """Two workers of one job with the same weights; worker 1 reads the base from a place of its own."""
    base = write_base(tmp_path / "base")
    own = write_base(tmp_path / "own")
    places = (base, own)
    modules = [adapt(make_base()) for _ in places]

    def act(rank: int) -> None:
        state = ckptfmt.State(weights=modules[rank], frozen_base=places[rank])
        told: Any = {"writer": (rank, 2), "deadline_s": 60}
        ckptfmt.save(tmp_path / "out", state, step=1, agree="save", **told)
        ckptfmt.load(
            tmp_path / "out",
            ckptfmt.State(weights=zeroed(modules[rank]), frozen_base=places[rank]),
            agree="load",
            **told,
        )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(act, range(2)))
    assert bytes_of(modules[0]) == bytes_of(modules[1]) == bytes_of(adapt(make_base()))
    with ckptfmt.open(tmp_path / "out") as checkpoint:
        assert checkpoint.manifest.origin.writer_count == 2
        assert checkpoint.frozen_location == str(base)
        assert len(checkpoint.frozen) == 4
    assert stored_nbytes(tmp_path / "out") < 4 * WIDTH * 2 * 4 + 1000


def test_a_rank_with_another_base_is_refused(tmp_path: Path) -> None:
    """One rank refers, the other stores: named, not merged. Spec: REQ-FRZ-004."""
    base = write_base(tmp_path / "base")
    modules = adapt(make_base()), adapt(make_base())
    modules[1].get_parameter("base_model.model.model.v_proj.base_layer.weight").data[0] = 1
    snapshots = [
        capture(ckptfmt.State(weights=module, frozen_base=base), worker=rank, worker_count=2)
        for rank, module in enumerate(modules)
    ]
    error = error_of(lambda: checkpoint_of(*snapshots))
    assert (error.code, error.requirement) == ("TENSOR_DIVERGED", "REQ-FRZ-004")
    assert "v_proj" in error.where


RUN = """
import hashlib, os, signal, sys, time, torch, ckptfmt
from pathlib import Path
from tests.adapters.test_frozen import adapt, bytes_of, make_base
here, name, kill, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
module = adapt(make_base(), seed=seed)
trained = [one for one in module.parameters() if one.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=0.01)
state = ckptfmt.State(weights=module, optimizer=optimizer, frozen_base=here / "base")
saving = ckptfmt.Saving(delta="smallest")
torch.manual_seed(seed)
with ckptfmt.Checkpointer(here / name, state, every=2, saving=saving) as checkpointer:
    for step in checkpointer.steps(8):
        tokens = torch.randint(10, (6,))
        loss = module.base_model.model(tokens).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        while checkpointer.step == kill:
            if list((here / name).glob("step-00000004-*/manifest.json")):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
print(hashlib.sha256(b"".join(bytes_of(module).values())).hexdigest())
"""


def run(here: Path, name: str, *, kill: int = -1, seed: int) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, str(here), name, str(kill), str(seed)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == (-signal.SIGKILL if kill > 0 else 0), done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_a_killed_run_of_adapters_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """With deltas; the resumed process begins with other adapters and other random numbers."""
    write_base(tmp_path / "base")
    whole = run(tmp_path, "whole", seed=1)
    run(tmp_path, "killed", kill=5, seed=1)
    assert run(tmp_path, "killed", seed=5) == whole
    assert run(tmp_path, "another", seed=5) != whole
    kept = sorted((tmp_path / "killed").glob("step-*"))
    assert kept
    assert all(stored_nbytes(path) < WIDTH * WIDTH * 4 for path in kept)
    assert any(ckptfmt.open(path).manifest.profile == "delta" for path in kept)
    assert ckptfmt.validate(tmp_path / "killed")


def test_a_reader_without_the_feature_refuses_by_its_name(saved: Any) -> None:
    """A reader written by others from the pages, before there were frozen bases. Spec: REQ-VER-002."""
    with pytest.raises(ValueError, match="needs features \\['frozen'\\]"):
        read_checkpoint(saved[1])


def test_refusals_keep_their_class() -> None:
    """A resume passes over damaged checkpoints, and must not pass over one with a base elsewhere."""
    for code in (Code.FROZEN_BASE_MISSING, Code.FROZEN_BASE_CHANGED):
        assert not issubclass(code.error, IntegrityError)
        assert issubclass(code.error, CkptError)


@pytest.mark.parametrize("how", ["same", "moved", "changed", "missing"])
def test_a_validation_with_a_place_checks_the_base(
    saved: Any, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spec: REQ-FRZ-005, REQ-FRZ-006."""
    base, path, _ = saved
    told = str(base)
    if how == "moved":
        told = str(base.rename(tmp_path / "moved"))
    elif how == "changed":
        write_base(base, seed=3)
    elif how == "missing":
        told = str(write_base(tmp_path / "other", seed=3))
        base.rename(tmp_path / "moved")
    found = ckptfmt.validate(path, bases=[told])
    codes = [one.code for one in found.violations]
    assert codes == (["FROZEN_BASE_CHANGED"] if how in ("changed", "missing") else [])
    assert found.warnings == []
    whole = ckptfmt.validate(path)
    assert whole.violations == []
    assert "wasn't read" in whole.warnings[0]
    if how in ("same", "moved"):
        assert found.nbytes > whole.nbytes + 2 * WIDTH * WIDTH * 4
    assert main(["validate", str(path), "--base", told]) == bool(codes)
    output = capsys.readouterr().out
    assert ("FROZEN_BASE_CHANGED" in output) == bool(codes)


def test_a_validation_of_a_run_reads_the_base_once(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    module = adapt(make_base())
    state = ckptfmt.State(weights=module, frozen_base=base)
    with ckptfmt.Checkpointer(tmp_path / "run", state, every=1) as checkpointer:
        for _ in checkpointer.steps(3):
            pass
    with_base = ckptfmt.validate(tmp_path / "run", bases=[base])
    assert (with_base.violations, with_base.warnings) == ([], [])
    nbytes = with_base.nbytes - ckptfmt.validate(tmp_path / "run").nbytes
    assert nbytes == sum(
        value.nbytes for name, value in make_base().state_dict().items() if "lm_head" not in name
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["validate", str(tmp_path / "run"), "--base", str(empty)]) == 2

"""Training seconds lost per save in a framework: the framework's own saving, and the plug-in.

``python -m benchmarks frameworks`` runs every training in a separate process; ``make venv-plugins``
installs the frameworks. ``python -m benchmarks.frameworks FRAMEWORK HOW DIRECTORY NBYTES`` is such
a process, and prints the start of each step and the blocking time of each save.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from benchmarks.figures import Figure, floor_all, median_of, paired_ratio, summarize
from benchmarks.pages import Region
from benchmarks.raw import RawSetting, RawWriter
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, check_room, order_of_round, remove
from ckptfmt.digest import digest_bytes

#: The ways measured per framework: the framework's own saves, bounds, and the plug-in's saves.
HOW: Final = {
    "transformers": ("own", "ckptfmt"),
    "lightning": ("own", "own_async", "ckptfmt"),
    "dcp": (
        "own",
        "own_async",
        "own_process",
        "staging",
        "hashing",
        "writing",
        "ckptfmt",
        "ckptfmt_process",
    ),
}
#: Bounds, which are no complete saves: the initial copy of every asynchronous DCP save; the copy
#: with digests, needed by every ckptfmt save; and both with a raw direct write of equally many
#: bytes.
_BOUNDS: Final = ("staging", "hashing", "writing")
_NEVER: Final = "never"
_STEPS: Final = 48
#: The number of steps per save. The first save starts processes and allocates memory, and the last
#: save has no following step; neither counts.
_EVERY: Final = 8
_COUNTED: Final = _STEPS // _EVERY - 2
#: The number of undisturbed steps before each save except the first.
_CALM: Final = 3
_WIDTH: Final = 1024
#: A parameter under AdamW: weights and both moments, in fp32.
_NBYTES_OF_LAYER: Final = 12 * _WIDTH * _WIDTH
_ROWS: Final = 96
_ROUNDS: Final = 5
#: The resolution of the experiment's clock, in seconds per save.
_LEAST_S: Final = 1e-3
_ROOT: Final = Path(__file__).parents[1]


def measure_frameworks(
    nbytes: int, *, rounds: int | None, place: Workplace, progress: Progress
) -> Outcome:
    """Measure lost seconds in interleaved rounds: each round trains every kind, in turning order.

    Args:
        nbytes: the approximate size of the state.
        rounds: the number of rounds; None for 5.

    Raises: SystemExit without enough memory or storage, or without a framework.
    """
    missing = [
        name for name in ("transformers", "accelerate", "lightning") if not _version_of(name)
    ]
    if missing:
        raise SystemExit(
            f"{', '.join(missing)}: not installed; run it with .venv-plugins (make venv-plugins)"
        )
    check_room(place.directory, memory_nbytes=6 * nbytes, storage_nbytes=8 * nbytes)
    rounds = rounds or _ROUNDS
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in HOW}
    for number in range(rounds):
        for name, ways in HOW.items():
            seconds: dict[str, Any] = {}
            order = order_of_round([_NEVER, *ways], number)
            for how in order:
                progress.say(f"frameworks: {name}, {how}, round {number + 1} of {rounds}")
                seconds[how] = _run_child(name, how, place, nbytes)
            rows[name].append({"order": order, "seconds": seconds})
    progress.say("")
    lost = {
        f"{name}_{how}": [
            row["seconds"][how]["lost_s"] - row["seconds"][_NEVER]["lost_s"] for row in found
        ]
        for name, found in rows.items()
        for how in HOW[name]
    }
    blocked = {
        f"{name}_{how}_blocked": [median_of(row["seconds"][how]["blocked_s"]) for row in found]
        for name, found in rows.items()
        for how in HOW[name]
    }
    ratios = _list_ratios(lost)
    return Outcome(
        workload={
            "nbytes": nbytes,
            "tensors": 6 * _layer_count(nbytes),
            "model": (
                f"{_layer_count(nbytes)} layers of {_WIDTH} x {_WIDTH} under AdamW, fp32,"
                " one thread"
            ),
            "steps": _STEPS,
            "saves_counted": _COUNTED,
            "calm_step_s": {
                name: {
                    how: median_of([row["seconds"][how]["calm_step_s"] for row in found])
                    for how in (_NEVER, *HOW[name])
                }
                for name, found in rows.items()
            },
        },
        settings={
            name: {"version": _version_of("torch" if name == "dcp" else name)} for name in HOW
        },
        repeats={name: len(found) for name, found in rows.items()},
        rounds=rows,
        figures={f"{name}_s": summarize(values) for name, values in (lost | blocked).items()},
        ratios=ratios,
        goals={name: "<= 0.2" for name in ratios if not name.endswith(_BOUNDS)},
        memory={},
        notes={
            "lost": f"a save's {_EVERY} steps, less {_EVERY} times the median of the last {_CALM}"
            " before each save; "
            "less what the same difference is in the round's training that never saves",
            "blocked": (
                "seconds that the call of a save takes, with the wait for its copy; the"
                " median of a training's"
            ),
            "processes": (
                "each training in one of its own; it computes with one thread, so that a"
                " core is left"
            ),
        },
    )


def _list_ratios(lost: dict[str, list[float]]) -> dict[str, Figure]:
    """Return the plug-in's losses as a share of each other way's losses."""
    return {
        f"{name}_lost_vs_{how}": paired_ratio(
            floor_all(lost[f"{name}_ckptfmt"], _LEAST_S), floor_all(lost[f"{name}_{how}"], _LEAST_S)
        )
        for name, ways in HOW.items()
        for how in ways
        if not how.startswith("ckptfmt")
    }


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run_child(name: str, how: str, place: Workplace, nbytes: int) -> dict[str, Any]:
    directory = place.fresh(f"{name}-{how}")
    directory.mkdir()
    os.sync()
    command = [
        sys.executable,
        "-m",
        "benchmarks.frameworks",
        name,
        how,
        str(directory.resolve()),
        str(nbytes),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{name}, {how} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    remove(directory)
    stamps = told["stamps"]
    assert len(stamps) == _STEPS, f"{name}, {how}: {len(stamps)} steps"
    assert how == _NEVER or len(told["blocked_s"]) > _COUNTED, f"{name}, {how}: {told['blocked_s']}"
    steps_s = [end - begin for begin, end in itertools.pairwise(stamps)]
    # Each window begins with the step that ends with a save.
    windows = [steps_s[at : at + _EVERY] for at in range(_EVERY - 1, len(steps_s), _EVERY)]
    calm_s = median_of([step for window in windows for step in window[-_CALM:]])
    return {
        "lost_s": sum(sum(window) - _EVERY * calm_s for window in windows[1:]) / _COUNTED,
        "calm_step_s": calm_s,
        "blocked_s": told["blocked_s"][1 : 1 + _COUNTED] or [0.0],
    }


# --- a training in a separate process -----------------------------------------------------------


class _Clock:
    """The start of each step, and the blocking time of each save."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.blocked_s: list[float] = []

    def note(self, *_: object) -> None:
        """Record the start of a step."""
        self.stamps.append(time.perf_counter())

    def timed(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return a timed function that saves."""

        def call(*arguments: Any, **options: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return save(*arguments, **options)
            finally:
                self.blocked_s.append(time.perf_counter() - begin_s)

        return call


def _layer_count(nbytes: int) -> int:
    return max(1, round(nbytes / _NBYTES_OF_LAYER))


class _Net(nn.Module):
    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(_WIDTH, _WIDTH) for _ in range(_layer_count(nbytes)))
        )

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        out = self.layers(inputs)
        return {
            "loss": ((out - labels) ** 2).mean() if labels is not None else out.mean(),
            "logits": out,
        }


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return _STEPS * _ROWS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = torch.full((_WIDTH,), number / len(self))
        return {"inputs": row, "labels": row}


def _hash(staged: Future[Any], then: Callable[[], object]) -> None:
    """Digest every tensor, as a save of ckptfmt does, then run the continuation."""
    leaves, _ = torch.utils._pytree.tree_flatten(staged.result())  # noqa: SLF001
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            local = leaf.to_local() if hasattr(leaf, "to_local") else leaf
            digest_bytes(memoryview(local.contiguous().reshape(-1).numpy()).cast("B"))
    then()


def _make_stager(*, is_process: bool) -> Any:
    """Return a stager for all saves, which keeps its memory and copies during training."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: PLC0415

    # The other options are for accelerators.
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=is_process,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
    )


def _make_raw_writer(nbytes: int) -> RawWriter:
    """Return a writer of as many bytes as the state has, from separate, touched memory."""
    region = Region(
        [torch.zeros(_layer_count(nbytes) * _NBYTES_OF_LAYER, dtype=torch.uint8)], huge=False
    )
    return RawWriter("raw", region, RawSetting(threads=1, request_nbytes=2**22))


def _train_dcp(how: str, directory: Path, nbytes: int, clock: _Clock) -> None:
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.checkpoint import state_dict_saver as dcp  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    from ckptfmt.plugins.dcp import CkptfmtWriter  # noqa: PLC0415

    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=0, world_size=1)
    model = _Net(nbytes)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.ones(_ROWS, _WIDTH)
    staged: Future[Any] | None = None
    saved: Future[Any] | None = None
    is_process = how.endswith("_process")
    kind = dcp.AsyncCheckpointerType.PROCESS if is_process else dcp.AsyncCheckpointerType.THREAD
    stager = _make_stager(is_process=is_process)
    hasher = ThreadPoolExecutor(1)
    raw = _make_raw_writer(nbytes) if how == "writing" else None

    def save(step: int) -> None:
        nonlocal staged, saved
        weights, moments = get_state_dict(model, optimizer)
        state, path = {"model": weights, "optimizer": moments}, directory / str(step)
        if how == "own":
            dcp.save(state, checkpoint_id=path)
            return
        if saved is not None:
            saved.result()
        if how in _BOUNDS:
            staged = stager.stage(state)
            if how != "staging":
                saved = hasher.submit(
                    _hash, staged, functools.partial(raw.save, path) if raw else lambda: None
                )
            return
        storage = (
            {"checkpoint_id": path}
            if how.startswith("own")
            else {"storage_writer": CkptfmtWriter(path)}
        )
        begun = dcp.async_save(state, async_checkpointer_type=kind, async_stager=stager, **storage)
        staged, saved = begun.staging_completion, begun.upload_completion

    save, wait = clock.timed(save), clock.timed(lambda: staged and staged.result())
    for step in range(1, _STEPS + 1):
        clock.note()
        model(rows, rows)["loss"].backward()
        if staged is not None:  # no change is allowed before the copy
            wait()
            staged = None
            clock.blocked_s[-2:] = [sum(clock.blocked_s[-2:])]
        optimizer.step()
        optimizer.zero_grad()
        if how != _NEVER and step % _EVERY == 0:
            save(step)
    if saved is not None:
        saved.result()
    stager.close()
    hasher.shutdown()
    dist.destroy_process_group()


def _train_transformers(how: str, directory: Path, nbytes: int, clock: _Clock) -> None:
    import transformers  # noqa: PLC0415

    from ckptfmt.plugins.transformers import CkptfmtTrainer  # noqa: PLC0415

    class Stamps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            clock.note()

    options: dict[str, Any] = {"save_strategy": "no"} if how == _NEVER else {"save_steps": _EVERY}
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=_STEPS,
        per_device_train_batch_size=_ROWS,
        report_to=[],
        logging_steps=10 * _STEPS,
        disable_tqdm=True,
        use_cpu=True,
        **({"save_strategy": "steps"} | options),
    )
    kind = CkptfmtTrainer if how == "ckptfmt" else transformers.Trainer
    trainer = kind(model=_Net(nbytes), args=arguments, train_dataset=_Rows(), callbacks=[Stamps()])
    trainer._save_checkpoint = clock.timed(trainer._save_checkpoint)  # noqa: SLF001
    trainer.train()


def _train_lightning(how: str, directory: Path, nbytes: int, clock: _Clock) -> None:
    import lightning  # noqa: PLC0415
    from lightning.pytorch import callbacks  # noqa: PLC0415
    from lightning.pytorch.plugins.io import AsyncCheckpointIO  # noqa: PLC0415

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = _Net(nbytes)

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_start(self, *_: object) -> None:
            clock.note()

    if how == "ckptfmt":
        from ckptfmt.plugins.lightning import CkptfmtIO  # noqa: PLC0415

        plugins = [CkptfmtIO()]
    else:
        plugins = [AsyncCheckpointIO()] if how == "own_async" else []
    saves = callbacks.ModelCheckpoint(dirpath=directory, every_n_train_steps=_EVERY, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=_STEPS,
        accelerator="cpu",
        plugins=plugins,
        callbacks=[] if how == _NEVER else [saves],
        enable_checkpointing=how != _NEVER,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.save_checkpoint = clock.timed(trainer.save_checkpoint)
    trainer.fit(Module(), torch.utils.data.DataLoader(_Rows(), batch_size=_ROWS))


TRAININGS: Final = {
    "transformers": _train_transformers,
    "lightning": _train_lightning,
    "dcp": _train_dcp,
}


def _main(name: str, how: str, directory: str, nbytes: str) -> None:
    import tests.plugins.vision  # noqa: F401, PLC0415 - before a framework imports torchvision

    torch.manual_seed(0)
    torch.set_num_threads(1)
    clock = _Clock()
    TRAININGS[name](how, Path(directory), int(nbytes), clock)
    print(json.dumps({"stamps": clock.stamps, "blocked_s": clock.blocked_s}), flush=True)
    # All results are printed and saved. torch's threads sometimes abort a process that exits
    # normally.
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])

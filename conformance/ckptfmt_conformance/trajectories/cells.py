"""The list of cells: models, layouts, and points of interruption."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Final

from ckptfmt_conformance.trajectories import foreign, loaded_job
from ckptfmt_conformance.trajectories.controls import CONTROLS
from ckptfmt_conformance.trajectories.data_cells import iter_data_cells
from ckptfmt_conformance.trajectories.killed import FEATURE
from ckptfmt_conformance.trajectories.ledger import Position
from ckptfmt_conformance.trajectories.protocol import Cell, Kill
from ckptfmt_conformance.trajectories.recipes import EPOCH_STEPS, OVERFLOW_STEP, STEPS, Recipe

__all__ = ["WORLD_SIZES", "list_cells"]

#: The world sizes of the pairs: each size is resumed by each size.
WORLD_SIZES: Final = (1, 2, 3, 4, 5, 8)

#: Interruptions by name: positions of finished steps, and finished microbatches of the next step.
INTERRUPTIONS: Final[dict[str, tuple[Position, ...]]] = {
    "boundary": ((7, 0),),
    "fresh": ((0, 0),),
    "window": ((7, 1),),
    "epoch": ((EPOCH_STEPS, 0),),
    "skipped": ((OVERFLOW_STEP + 1, 0),),
    "growth": ((3, 0),),
    "last": ((STEPS - 1, 0),),
    "twice": ((7, 0), (7, 0)),
    "often": ((0, 0), (1, 0), (4, 0), (5, 0), (9, 0)),
}

_WORDS: Final = {
    "boundary": "between two steps",
    "fresh": "before the first step, when the optimizer has no state yet",
    "window": "inside an accumulation window",
    "epoch": "at an epoch's end",
    "skipped": "right after a step that an overflow skipped",
    "growth": "right after the loss scale grew",
    "last": "before the last step",
    "twice": "between two steps, and resumed and saved again without a step",
    "often": "five times, the first before the first step",
}


def list_cells() -> list[Cell]:
    """Return all cells: those of tier T-0, and the negative controls of tier T-N.

    >>> cells = list_cells()
    >>> len({cell.id for cell in cells}) == len(cells)
    True
    """
    return [
        *_iter_plain(),
        *_iter_killed(),
        *_iter_spread(),
        *_iter_pairs(),
        *_iter_chains(),
        *_iter_refusals(),
        *_iter_layouts(),
        *iter_data_cells(),
        *_iter_controls(),
    ]


def _make(name: str, recipe: Recipe, interruption: str) -> Cell:
    return Cell(
        id=f"t1/{recipe.layout}/{name}/{interruption}",
        features=_features_of(recipe, interruption),
        recipe=recipe,
        cuts=INTERRUPTIONS[interruption],
        description=f"{_describe(recipe)}, interrupted {_WORDS[interruption]}",
    )


def _describe(recipe: Recipe) -> str:
    return f"{recipe.model} with {recipe.optimizer} in {recipe.precision}, {recipe.layout}"


def _features_of(recipe: Recipe, interruption: str = "") -> tuple[str, ...]:
    features = {
        f"layout:{recipe.layout}": recipe.layout != "plain",
        "non-persistent-buffers": recipe.model == "moe" and recipe.accumulate > 1,
        "extra-state": recipe.model == "cnn",
        "state-dtypes": recipe.optimizer == "adamw-masters",
        "accumulation-window": interruption == "window",
        "new-world-size": recipe.layout == "elastic",
        loaded_job.FEATURE: bool(recipe.data) and not foreign.is_foreign(recipe),
        foreign.FEATURE: foreign.is_foreign(recipe),
    }
    return tuple(name for name, needed in features.items() if needed)


def _iter_plain() -> Iterator[Cell]:
    """Yield the cells of one process."""
    for model, optimizer in itertools.product(
        ("mlp", "cnn", "gpt", "moe"), ("sgd", "adamw-loop", "adamw-foreach", "adamw-fused")
    ):
        recipe = Recipe(model=model, optimizer=optimizer)
        yield _make(f"{model}/{optimizer}", recipe, "boundary")
    for model in ("mlp", "cnn", "gpt", "moe"):
        optimizer = "sgd" if model == "cnn" else "adamw-foreach"
        recipe = Recipe(model=model, optimizer=optimizer, averaged=True)
        for interruption in ("fresh", "epoch", "twice", "often"):
            yield _make(f"{model}/averaged", recipe, interruption)
        yield _make(
            f"{model}/accumulated",
            dataclasses.replace(recipe, averaged=False, accumulate=3),
            "window",
        )
    for model, interruption in itertools.product(("mlp", "gpt"), ("boundary", "fresh", "window")):
        recipe = Recipe(
            model=model,
            optimizer="adamw-masters",
            precision="bf16",
            accumulate=2 if interruption == "window" else 1,
        )
        yield _make(f"{model}/bf16-masters", recipe, interruption)
    for model, interruption in itertools.product(
        ("mlp", "gpt"), ("fresh", "skipped", "growth", "window", "often")
    ):
        recipe = Recipe(
            model=model,
            optimizer="adamw-loop",
            precision="fp16",
            accumulate=2 if interruption == "window" else 1,
        )
        yield _make(f"{model}/fp16-scaler", recipe, interruption)
    for optimizer in (
        "sgd-nesterov",
        "adam-amsgrad",
        "adamw-tensor-lr",
        "nadam",
        "rmsprop",
        "adagrad",
    ):
        yield _make(f"mlp/{optimizer}", Recipe(optimizer=optimizer), "boundary")
    for schedule in ("exponential", "one-cycle", "plateau"):
        yield _make(f"mlp/{schedule}", Recipe(schedule=schedule), "epoch")
    yield _make("gpt", Recipe(model="gpt"), "last")


#: The moments when a trainer is killed, by name, with a text for the description.
KILLS: Final[dict[str, tuple[Kill, str]]] = {
    "before": (Kill(phase=None), "before a save"),
    "staging": (Kill(phase="STAGING"), "while its state is being copied"),
    "staged": (Kill(phase="STAGED"), "as soon as its state is copied"),
    "writing": (Kill(phase="STAGED", midway=True), "while its state is being written"),
    "written": (Kill(phase="WRITTEN"), "when its state is written, and not committed"),
    "committed": (Kill(phase="COMMITTED", together=True), "as soon as a save is committed"),
    "retention": (
        Kill(phase="COMMITTED", midway=True, together=True),
        "while older checkpoints are let go",
    ),
    "torn": (Kill(phase="STAGED", midway=True, together=True), "while its state is being written"),
}
#: The kills of a full save, and the kills of a delta save.
FULL_KILLS: Final = ("before", "staging", "staged", "writing", "written", "committed", "retention")
DELTA_KILLS: Final = ("staged", "torn", "written", "committed", "retention")


def _iter_killed() -> Iterator[Cell]:
    """Yield cells whose trainers are killed during an asynchronous save."""
    kinds = (
        ("full", Recipe(averaged=True), FULL_KILLS, (), ""),
        ("delta", Recipe(), DELTA_KILLS, ("deltas",), " what changed"),
    )
    for prefix, recipe, names, features, what in kinds:
        for name in names:
            kill, words = KILLS[name]
            whom = "the trainer and all that it started" if kill.together else "the trainer alone"
            yield Cell(
                id=f"t1/killed/{prefix}/{name}",
                features=(FEATURE, *features),
                recipe=recipe,
                cuts=((6, 0),),
                kill=dataclasses.replace(kill, delta=bool(features)),
                description=(
                    f"{_describe(recipe)}, saved{what} beside the training, {whom} killed {words}"
                ),
            )


def _iter_spread() -> Iterator[Cell]:
    """Yield the cells of several processes with a constant world size."""
    ddp = Recipe(layout="ddp", world_size=2, optimizer="adamw-loop")
    for interruption in ("boundary", "fresh", "epoch", "window"):
        recipe = dataclasses.replace(ddp, accumulate=2) if interruption == "window" else ddp
        yield _make("mlp", recipe, interruption)
    yield _make("mlp/fp16-scaler", dataclasses.replace(ddp, precision="fp16"), "skipped")
    yield _make("gpt/averaged", dataclasses.replace(ddp, model="gpt", averaged=True), "boundary")
    yield _make("cnn/three", dataclasses.replace(ddp, model="cnn", world_size=3), "boundary")
    fsdp2 = Recipe(layout="fsdp2", world_size=2, model="gpt")
    for interruption in ("boundary", "fresh", "often"):
        yield _make("gpt", fsdp2, interruption)
    yield _make("gpt/sgd-three", dataclasses.replace(fsdp2, optimizer="sgd", world_size=3), "epoch")
    tp = Recipe(layout="tp", world_size=2, model="gpt", optimizer="adamw-loop")
    for interruption in ("boundary", "fresh", "epoch"):
        yield _make("gpt", tp, interruption)


#: The recipes of the reference trainer's cells.
ELASTIC: Final[dict[str, Recipe]] = {
    "gpt": Recipe(layout="elastic", world_size=None, model="gpt", optimizer="adamw-loop"),
    "mlp": Recipe(layout="elastic", world_size=None, model="mlp", optimizer="sgd", averaged=True),
    "moe": Recipe(layout="elastic", world_size=None, model="moe", optimizer="adamw-foreach"),
    "cnn": Recipe(layout="elastic", world_size=None, model="cnn-bare", optimizer="adamw-fused"),
    "window": Recipe(
        layout="elastic", world_size=None, model="gpt", optimizer="adamw-loop", accumulate=3
    ),
    "fp16": Recipe(
        layout="elastic", world_size=None, model="mlp", optimizer="adamw-loop", precision="fp16"
    ),
    "bf16": Recipe(
        layout="elastic", world_size=None, model="gpt", optimizer="adamw-masters", precision="bf16"
    ),
}


def _make_elastic(name: str, key: str, worlds: tuple[int, ...], cuts: tuple[Position, ...]) -> Cell:
    recipe = ELASTIC[key]
    chain = ", ".join(map(str, worlds))
    return Cell(
        id=f"t2/{name}",
        claim="T2",
        features=_features_of(recipe, "window" if cuts[0][1] else ""),
        recipe=recipe,
        cuts=cuts,
        worlds=worlds,
        description=f"{_describe(recipe)}, on {chain} processes one after the other",
    )


def _iter_pairs() -> Iterator[Cell]:
    """Yield a cell for each pair of world sizes."""
    keys = ("gpt", "mlp", "gpt", "moe", "cnn")
    for number, (before, after) in enumerate(itertools.product(WORLD_SIZES, WORLD_SIZES)):
        key = keys[number % len(keys)]
        yield _make_elastic(f"pairs/{before}-to-{after}", key, (before, after), ((7, 0),))


def _iter_chains() -> Iterator[Cell]:
    """Yield cells with longer chains of world sizes."""
    five = ((2, 0), (5, 0), (6, 0), (9, 0))
    yield _make_elastic("chains/8-3-1-4-8", "gpt", (8, 3, 1, 4, 8), five)
    yield _make_elastic("chains/6-7-2-5-1", "moe", (6, 7, 2, 5, 1), five)
    yield _make_elastic("chains/1-8-5-7-3", "mlp", (1, 8, 5, 7, 3), five)
    each = tuple((step, 0) for step in range(STEPS))
    for world_size in (6, 7):  # the pairs omit these world sizes
        there_and_back = itertools.chain.from_iterable((world_size, other) for other in WORLD_SIZES)
        yield _make_elastic(
            f"chains/{world_size}-and-all", "gpt", (*there_and_back, world_size), each
        )
    yield _make_elastic("chains/6-6-7-7-6", "mlp", (6, 6, 7, 7, 6), five)
    yield _make_elastic("window/4-to-3", "window", (4, 3), ((7, 1),))
    yield _make_elastic("window/3-to-8-to-1", "window", (3, 8, 1), ((4, 2), (7, 1)))
    yield _make_elastic("fresh/2-to-5", "gpt", (2, 5), ((0, 0),))
    yield _make_elastic("epoch/5-to-2", "mlp", (5, 2), ((EPOCH_STEPS, 0),))
    yield _make_elastic("skipped/4-to-1", "fp16", (4, 1), ((OVERFLOW_STEP + 1, 0),))
    yield _make_elastic("growth/2-to-3", "fp16", (2, 3), ((3, 0),))
    yield _make_elastic("masters/3-to-2", "bf16", (3, 2), ((7, 0),))


def _iter_refusals() -> Iterator[Cell]:
    """Yield cells of a run with another plan, which must be refused."""
    recipe = ELASTIC["gpt"]
    for workers in (4, 16):
        yield Cell(
            id=f"t2/refused/8-to-{workers}-workers",
            claim="T2",
            features=_features_of(recipe),
            recipe=recipe,
            cuts=((7, 0),),
            worlds=(2, 2),
            target=dataclasses.replace(recipe, workers=workers),
            description=(
                f"{_describe(recipe)}, of 8 logical workers: one of {workers} mustn't go on with it"
            ),
        )


#: Layout and world size of the save, layout and world size of the load.
LAYOUTS: Final = (
    ("ddp", 2, "ddp", 3), ("fsdp2", 5, "fsdp2", 2), ("fsdp2", 4, "ddp", 2), ("ddp", 2, "fsdp2", 3),
    ("tp", 2, "fsdp2", 3), ("fsdp2", 3, "tp", 2), ("tp", 2, "plain", 1), ("plain", 1, "fsdp2", 4),
)  # fmt: skip


def _iter_layouts() -> Iterator[Cell]:
    """Yield cells with loads into another layout: all bytes, and the order of the samples."""
    for claim, (layout, before, other, after) in itertools.product(("S0", "S1"), LAYOUTS):
        recipe = Recipe(model="gpt", optimizer="adamw-loop", layout=layout, world_size=before)
        target = dataclasses.replace(recipe, layout=other, world_size=after)
        what = "all bytes of weights and optimizer" if claim == "S0" else "the order of the samples"
        yield Cell(
            id=f"{claim.lower()}/{layout}-{before}-to-{other}-{after}",
            claim=claim,
            features=("new-layout", *_features_of(recipe), *_features_of(target)),
            recipe=recipe,
            cuts=((7, 0),),
            worlds=(before, after),
            target=target,
            description=f"{what}, from {layout} on {before} processes into {other} on {after}",
        )


def _iter_controls() -> Iterator[Cell]:
    """Yield the negative controls, which pass by turning red."""
    for name, control in CONTROLS.items():
        yield Cell(
            id=f"control/{name}",
            tier="T-N",
            claim="T2" if control.worlds else "T1",
            features=_features_of(control.recipe),
            recipe=control.recipe,
            cuts=(control.cut,),
            worlds=control.worlds,
            loaders=control.loaders,
            control=name,
            description=f"{control.named} is lost or damaged after the load, and that must be seen",
        )

"""The cells with loaders: the complete data cursor, and foreign loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ckptfmt_conformance.trajectories import foreign, loaded_job
from ckptfmt_conformance.trajectories.ledger import Position
from ckptfmt_conformance.trajectories.protocol import Cell
from ckptfmt_conformance.trajectories.recipes import Recipe

__all__ = ["iter_data_cells"]

#: By name: the data in words, and the steps of interruption by name.
PLANS: Final[dict[str, tuple[str, dict[str, int]]]] = {
    "shuffled": ("one shuffled source", {"middle": 7, "epoch": 5, "epochs": 10}),
    "carry": ("one source whose epochs end within a step", {"middle": 7, "before": 4, "epoch": 5}),
    "drop": ("one source, the rest of an epoch left out", {"middle": 6, "before": 3, "epoch": 4}),
    "pad": ("one source, an epoch's last step filled up", {"middle": 7, "before": 4, "epoch": 5}),
    "mixed": ("three sources in stages, two of which wrap", {"middle": 3, "switch": 6, "after": 7}),
    "mixed-within": (
        "three sources whose stages switch within a step",
        {"middle": 3, "after": 5, "twice": 8},
    ),
    "quarantine": (
        "one source, with a sample, a shard and positions left out",
        {"middle": 3, "before": 4, "after": 7},
    ),
    "quarantine-late": (
        "one source, with more left out after the load",
        {"between": 7, "before": 6, "after": 8},
    ),
    "quarantine-drop": (
        "left out, and so is the rest of an epoch",
        {"epoch": 4, "between": 6, "after": 7},
    ),
    "quarantine-pad": (
        "left out, and an epoch's last step filled up",
        {"epoch": 4, "between": 6, "after": 7},
    ),
    "quarantine-mixed": (
        "three sources in stages, left out of each",
        {"switch": 6, "between": 7, "after": 8},
    ),
}

_WORDS: Final = {
    "middle": "in the middle of an epoch",
    "epoch": "at an epoch's end",
    "epochs": "at the second epoch's end",
    "before": "before an epoch's last step",
    "switch": "as the weights switch",
    "after": "just after",
    "twice": "just after the second time",
    "between": "as more is left out",
    "often": "three times",
}
#: Numbers of worker processes before and after the interruption.
_LOADERS: Final = ((5, 0), (0, 2), (2, 5))


def iter_data_cells() -> Iterator[Cell]:
    """Yield all cells with loaders."""
    yield from _iter_single()
    yield from _iter_elastic()
    yield from _iter_foreign()


def _iter_single() -> Iterator[Cell]:
    for name, (_, cuts) in PLANS.items():
        for (interruption, step), loaders in zip(cuts.items(), _LOADERS, strict=True):
            yield _make(name, interruption, (step,), loaders)
    for name in ("shuffled", "mixed", "quarantine-pad", "quarantine-mixed"):
        yield _make(name, "often", (2, 4, 7), (2, 5, 0, 2))


def _make(name: str, interruption: str, steps: tuple[int, ...], loaders: tuple[int, ...]) -> Cell:
    chain = "-to-".join(map(str, loaders))
    when = _WORDS[interruption]
    return Cell(
        id=f"t1/data/{name}/{interruption}/{chain}",
        features=(loaded_job.FEATURE,),
        recipe=Recipe(data=name),
        cuts=tuple((step, 0) for step in steps),
        loaders=loaders,
        description=(
            f"{PLANS[name][0]}; interrupted {when}; {', '.join(map(str, loaders))} worker processes"
        ),
    )


def _iter_elastic() -> Iterator[Cell]:
    chains: tuple[tuple[str, tuple[int, ...], tuple[Position, ...]], ...] = (
        ("shuffled", (3, 8), ((5, 0),)),
        ("carry", (2, 5), ((4, 0),)),
        ("drop", (4, 1), ((4, 0),)),
        ("pad", (1, 3), ((4, 0),)),
        ("mixed", (8, 3), ((6, 0),)),
        ("quarantine-late", (5, 2), ((7, 0),)),
        ("quarantine-mixed", (8, 3, 1, 4), ((2, 0), (6, 0), (7, 0))),
    )
    for name, worlds, cuts in chains:
        chain = "-to-".join(map(str, worlds))
        yield Cell(
            id=f"t2/data/{name}/{chain}",
            claim="T2",
            features=(loaded_job.FEATURE, "layout:elastic", "new-world-size"),
            recipe=Recipe(
                layout="elastic", world_size=None, model="gpt", optimizer="adamw-loop", data=name
            ),
            cuts=cuts,
            worlds=worlds,
            description=(
                f"{PLANS[name][0]}; on {', '.join(map(str, worlds))} processes one after the other"
            ),
        )


def _iter_foreign() -> Iterator[Cell]:
    kinds = {
        foreign.LOADER: "a loader with a position of its own",
        foreign.COUNT: "a count of consumed samples",
    }
    for data, words in kinds.items():
        short = data.removeprefix("foreign-")
        for processes in (0, 2, 5) if data == foreign.LOADER else (0,):
            for step in (3, 6) if processes == 0 else (5,):
                yield Cell(
                    id=f"t1/foreign/{short}/{step}/{processes}-to-{processes}",
                    features=(foreign.FEATURE,),
                    recipe=Recipe(data=data),
                    cuts=((step, 0),),
                    loaders=(processes, processes),
                    description=(
                        f"{words}, interrupted after {step} steps; {processes} worker processes"
                    ),
                )
        yield Cell(
            id=f"t1/foreign/{short}/two",
            features=(foreign.FEATURE, "layout:ddp"),
            recipe=Recipe(data=data, layout="ddp", world_size=2),
            cuts=((7, 0),),
            description=f"{words}, on two processes before and after",
        )
        # With another world size, each process would find only its own position. Positions of
        # missing processes would be lost silently.
        for before, after in ((2, 3), (3, 2)):
            yield Cell(
                id=f"t1/foreign/refused/{short}-{before}-to-{after}",
                features=(foreign.FEATURE, "layout:ddp"),
                recipe=Recipe(data=data, layout="ddp", world_size=before),
                cuts=((7, 0),),
                worlds=(before, after),
                target=Recipe(data=data, layout="ddp", world_size=after),
                description=f"{words}, saved by {before} processes: {after} mustn't go on with it",
            )

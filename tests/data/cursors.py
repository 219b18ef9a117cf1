"""Cursors to draw: of one source or a mixture with stages, with tails and skips, small enough to be played through."""

from typing import Any

from hypothesis import strategies as st

from ckptfmt.data.course import COUNTS, HOLE, MASKED, Course
from ckptfmt.data.cursor import BatchPlan, Mixture, Source, Stage
from ckptfmt.data.cursor_map import CursorMap, parse_skips

USES = {COUNTS: "counts", MASKED: "masked", HOLE: "hole"}


@st.composite
def skip_trees(draw, lengths, *, unit=1):
    """A skip; with another tail than carry, it begins and ends where a step does."""
    policy = draw(st.sampled_from(["hole", "mask", "shift"]))
    begin = draw(st.integers(0, 40 // unit)) * unit
    source = draw(st.sampled_from(sorted(lengths)))
    sample = draw(st.integers(0, lengths[source] - 1))
    tree: dict[str, Any] = {"scope": "pos", "policy": policy, "reason": "drawn"}
    match draw(st.sampled_from(["sample", "shard", "pos"])):
        case "sample":
            return tree | {"scope": "sample", "from_pos": begin, "source": source, "ids": [sample]}
        case "shard":
            end = min(lengths[source], sample + draw(st.integers(1, 2)))
            return tree | {
                "scope": "shard", "from_pos": begin, "source": source, "shard": "x", "range": [sample, end]
            }  # fmt: skip
    return tree | {"range": [begin, begin + draw(st.integers(1, 12 // unit + 1)) * unit]}


@st.composite
def mixture_trees(draw, names):
    """A mixture of these sources, with up to three stages."""
    counts = [
        draw(st.lists(st.integers(0, 4), min_size=len(names), max_size=len(names)).filter(any))
    ]
    block = sum(counts[0])
    for _ in range(draw(st.integers(0, 2))):
        cuts = sorted(
            draw(st.lists(st.integers(0, block), min_size=len(names) - 1, max_size=len(names) - 1))
        )
        counts.append([end - begin for begin, end in zip([0, *cuts], [*cuts, block], strict=True)])
    begins = sorted(
        draw(st.sets(st.integers(1, 12), min_size=len(counts) - 1, max_size=len(counts) - 1))
    )
    stages = [
        {"from_pos": begin * block, "counts": dict(zip(names, each, strict=True))}
        for begin, each in zip([0, *begins], counts, strict=True)
    ]
    return {
        "alg": "block-det-v1",
        "block": block,
        "seed": draw(st.integers(0, 99)),
        "stages": stages,
    }


@st.composite
def orders(draw, batch=None):
    """What of a cursor says its order: plan, order, sources, perhaps mixture, skips."""
    batch = draw(st.integers(1, 6)) if batch is None else batch
    is_mixed = draw(st.booleans())
    tail = "carry" if is_mixed else draw(st.sampled_from(["carry", "drop", "pad_masked"]))
    names = ["books", "code", "web"][: draw(st.integers(1, 3)) if is_mixed else 1]
    # What three skips remove leaves a batch.
    lengths = {name: draw(st.integers(7 + batch, 24)) for name in names}
    # `Sampler.skip` takes a skip that is told twice as one.
    skips = st.lists(
        skip_trees(lengths, unit=1 if tail == "carry" else batch),
        max_size=3,
        unique_by=lambda skip: repr(sorted((skip | {"reason": ""}).items())),
    )
    tree = {
        "plan": {"unit": "sample", "global_batch": batch, "assign": "contig-v1", "tail": tail},
        "order": {"seed": draw(st.integers(0, 2**64 - 1))},
        "sources": [{"id": name, "fingerprint": None, "n": n} for name, n in lengths.items()],
        "skips": draw(skips),
    }
    return tree | ({"mixture": draw(mixture_trees(names))} if is_mixed else {})


def course_of(tree):
    """The library's course of what `orders` draws."""
    mixture = None
    if "mixture" in tree:
        stages = tuple(Stage(**stage) for stage in tree["mixture"]["stages"])
        mixture = Mixture(**{**tree["mixture"], "stages": stages})
    lengths = {source["id"]: source["n"] for source in tree["sources"]}
    return Course(
        [Source(**source) for source in tree["sources"]],
        seed=tree["order"]["seed"],
        plan=BatchPlan(**tree["plan"]),
        mixture=mixture,
        skips=parse_skips(CursorMap(tree, "cursor"), lengths),
    )


def ledger_of_range(source, n, *, seed, begin, end):
    """The ledger of the positions [begin, end) of one source's endless order."""
    course = Course(
        [Source(id=source, fingerprint=None, n=n)], seed=seed, plan=BatchPlan(global_batch=1)
    )
    return course.ledger(begin, end)

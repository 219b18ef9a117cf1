"""Continuation of a run from the field `data`; spec/context/64-cursor.md."""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterable
from typing import Any

from blake3 import blake3

from conformance.generate.cases import Page
from conformance.generate.course import Place, course, positions, worker_part
from conformance.generate.model import build
from conformance.generate.order import sample_at
from conformance.generate.pages.context import cursor, pipelined, tree_of, went_on
from conformance.generate.plans import Leaf, Plan, Tensor
from conformance.generate.tagged import tagged
from conformance.generate.wire import msgpack

__all__ = ["page"]

SEED = 7
WHY = "who takes other samples repeats some and leaves out others, and nothing else shows it"

Tree = dict[str, Any]


def page() -> Page:
    """Return the cases of continuation."""
    made = Page("context")
    _plain(made)
    _mixtures(made)
    _skips(made)
    _ahead(made)
    _pipelines(made)
    _refused(made)
    _refused_mixtures(made)
    _loaders(made)
    return made


# --- cursors --------------------------------------------------------------------------------------


def plain(tail: str = "carry", *, skips: Iterable[Tree] = (), steps: int = 1) -> Tree:
    """Return a cursor of 21 samples with steps of eight samples."""
    tree = cursor() | {
        "sources": [{"id": "books", "fingerprint": None, "n": 21}],
        "skips": list(skips),
    }
    tree["plan"] |= {"global_batch": 8, "tail": tail}
    return went_on(tree, steps)


def mixed(*, skips: Iterable[Tree] = (), seed: int = 11, batch: int = 5, steps: int = 4) -> Tree:
    """Return a cursor of three sources, two of equal length, one step before the second stage."""
    lengths = {"books": 20, "code": 7, "news": 20}
    tree = cursor() | {
        "sources": [{"id": name, "fingerprint": None, "n": n} for name, n in lengths.items()],
        "skips": list(skips),
        "mixture": {
            "alg": "block-det-v1", "block": 8, "seed": seed,
            "stages": [
                {"from_pos": 0, "counts": {"books": 4, "code": 2, "news": 2}},
                {"from_pos": 24, "counts": {"books": 1, "code": 5, "news": 2}},
            ],
        },
    }  # fmt: skip
    tree["plan"]["global_batch"] = batch
    return went_on(tree, steps)


def mixed_by_blocks() -> Tree:
    """Return a cursor of the same sources, with a block per step and the order's seed."""
    return mixed(seed=SEED, batch=8, steps=2)


def skip_samples(policy: str, ids: list[int], begin: int, source: str = "books") -> Tree:
    """Return a skip of samples."""
    return {
        "scope": "sample",
        "policy": policy,
        "from_pos": begin,
        "reason": "nan",
        "source": source,
        "ids": ids,
    }


def skip_shard(policy: str, samples: tuple[int, int], begin: int) -> Tree:
    """Return a skip of a shard."""
    return {
        "scope": "shard", "policy": policy, "from_pos": begin, "reason": "lost", "source": "books",
        "shard": "00017.tar", "range": list(samples),
    }  # fmt: skip


def skip_positions(policy: str, begin: int, end: int) -> Tree:
    """Return a skip of positions."""
    return {"scope": "pos", "policy": policy, "reason": "spike", "range": [begin, end]}


def later() -> list[Tree]:
    """Return a skip that begins after its samples were drawn, in the first epoch of 21."""
    return [skip_samples("shift", sorted(sample_at(21, SEED, at) for at in (17, 18)), 21)]


def each_scope(policy: str) -> list[Tree]:
    """Return three skips around position 16: begun before, beginning there, and beginning later."""
    return [
        skip_samples(policy, [2, 11, 19], 5),
        skip_shard(policy, (6, 9), 16),
        skip_positions(policy, 24, 29),
    ]


# --- requests -------------------------------------------------------------------------------------


def _ask(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, tree: Tree, worker: int, workers: int, steps: int, clauses: str,
    says: str, *, ahead: tuple[int, int] | None = None, why: str = WHY,
) -> None:  # fmt: skip
    """Add a case that requests the samples of worker `worker` of `workers`."""
    asked: Tree = {"worker": worker, "worker_count": workers, "steps": steps}
    begins = tree
    result = {}
    if ahead is not None:
        asked |= {"fetched": ahead[0], "done": ahead[1]}
        begins = went_on(copy.deepcopy(tree), tree["commit"]["step"] + ahead[1])
        result = {"commit": begins["commit"], "ledger": begins["ledger"]}
    made.ask(
        f"samples-{slug}",
        "",
        "context",
        {"samples": asked},
        clauses,
        says + (f", by worker {worker} of {workers}" if workers > 1 else ""),
        why=why,
        result={"steps": _taken(begins, worker, workers, steps)} | result,
        files=_files(tree),
        bug="WRONG_RUN",
        features=["samples"],
    )


def _files(tree: Tree) -> dict[str, bytes]:
    return {"tree.msgpack": msgpack(tree_of(tree))}


def _taken(tree: Tree, worker: int, workers: int, steps: int) -> list[list[list[Any]]]:
    begin = tree["commit"]["global_pos"]
    size = tree["plan"]["global_batch"]
    places = _places(tree, begin, begin + steps * size)
    parts = [
        worker_part(places[at : at + size], worker, workers) for at in range(0, len(places), size)
    ]
    return [
        [[one.source, one.epoch, one.sample, int(one.use == "counts")] for one in part]
        for part in parts
    ]


def _places(tree: Tree, begin: int, end: int) -> list[Place]:
    if end < 1 << 20:
        return list(course(tree, end))[begin:]
    # Too far to play through: without mixture, skips and tail, the order alone gives the sample.
    (source,) = tree["sources"]
    n = source["n"]
    seed = tree["order"]["seed"]
    return [
        Place(source["id"], at // n, sample_at(n, seed, at), "counts") for at in range(begin, end)
    ]


def _plain(made: Page) -> None:
    """Add one source, with each tail, over the end of an epoch, at several numbers of workers."""
    for slug, tail, clauses, says, others in (
        (
            "carry",
            "carry",
            "CUR-013",
            "a batch goes on with the next epoch",
            ((1, 2), (2, 3), (3, 5)),
        ),
        ("drop", "drop", "CUR-015", "the rest of an epoch is left out", ((1, 2),)),
        (
            "pad",
            "pad_masked",
            "CUR-016",
            "the last batch of an epoch is filled up",
            ((2, 3), (3, 5)),
        ),
    ):
        labels = f"CUR-006 CUR-007 CUR-014 {clauses}"
        _ask(made, slug, plain(tail), 0, 1, 3, labels, says)
        for worker, workers in others:
            _ask(
                made, f"{slug}-{worker}-of-{workers}", plain(tail), worker, workers, 3, labels, says
            )
    elsewhere = plain()
    elsewhere["order"]["vector_check"] = {"pos": 30, "id": sample_at(21, SEED, 30)}
    _ask(
        made,
        "check-elsewhere",
        elsewhere,
        0,
        1,
        1,
        "CUR-006",
        "the check is of another position than the next one",
    )
    far = plain()
    n = 2**48 - 59
    epoch = 2**40
    position = (epoch + 1) * n - 3
    far["commit"] = {"step": 9, "global_pos": position, "epoch": epoch, "pos_in_epoch": n - 3}
    far["order"] |= {
        "seed": 2**64 - 1,
        "vector_check": {"pos": 0, "id": sample_at(n, 2**64 - 1, 0)},
    }
    far["sources"][0]["n"] = n
    far["ledger"]["count"] = position
    _ask(
        made,
        "far",
        far,
        0,
        1,
        1,
        "CUR-006 CUR-007 CUR-014",
        "nearly the longest epoch, and a position beyond 2^64",
    )


def _mixtures(made: Page) -> None:
    """Add three sources over the beginning of a stage."""
    clauses = "CUR-006 CUR-007 CUR-012 CUR-013 CUR-014"
    says = "three sources, from one stage into the next"
    _ask(made, "mixed", mixed(), 0, 1, 3, clauses, says)
    for worker, workers in ((0, 2), (1, 3), (4, 5)):
        _ask(made, f"mixed-{worker}-of-{workers}", mixed(), worker, workers, 3, clauses, says)
    says = "a mixture whose blocks have the seed of the order, and are steps"
    _ask(made, "mixed-by-blocks", mixed_by_blocks(), 0, 1, 2, clauses, says)
    skips = [
        skip_samples("shift", [0, 3], 24, "code"),
        skip_samples("mask", list(range(5, 12)), 0, "news"),
        skip_positions("hole", 29, 31),
    ]
    says = "three sources, of which two have skips"
    _ask(made, "mixed-skips", mixed(skips=skips), 0, 1, 4, "CUR-012 CUR-018", says)
    _ask(made, "mixed-skips-1-of-2", mixed(skips=skips), 1, 2, 4, "CUR-012 CUR-018", says)


def _skips(made: Page) -> None:
    """Add skips of each policy, already begun and not yet begun."""
    for policy, says in (
        ("hole", "skipped positions have no sample"),
        ("mask", "skipped samples have weight zero"),
        ("shift", "what comes after a skip moves up"),
    ):
        tree = plain(skips=each_scope(policy), steps=2)
        clauses = "CUR-014 CUR-018"
        _ask(made, f"skips-{policy}", tree, 0, 1, 3, clauses, says)
        _ask(made, f"skips-{policy}-1-of-3", tree, 1, 3, 3, clauses, says)
    holes = plain(skips=each_scope("hole"), steps=2)
    _ask(made, "skips-none-left", holes, 0, 5, 3, "CUR-018", "a step has no sample for a worker")
    both = [
        skip_samples("hole", [2, 11], 20),
        skip_samples("mask", [11, 12, 13], 0),
        skip_positions("mask", 18, 26),
    ]
    _ask(
        made,
        "skips-meet",
        plain(skips=both, steps=2),
        0,
        1,
        2,
        "CUR-018",
        "a hole where a mask is, too",
    )
    listed = [
        skip_positions("shift", 24, 40),
        skip_samples("shift", [2, 11, 19], 8),
        skip_shard("shift", (6, 9), 16),
    ]
    says = "skips take effect by where they begin, and not by where they stand in the list"
    _ask(made, "skips-unsorted", plain(skips=listed, steps=2), 0, 1, 3, "CUR-018", says)
    says = "a skip begins behind the place of what it leaves out"
    _ask(made, "skips-later", plain(skips=later(), steps=2), 0, 1, 3, "CUR-018", says)
    some = [skip_samples("shift", [4, 17], 16), skip_positions("hole", 17, 19)]
    for tail, slug in (("drop", "drop"), ("pad_masked", "pad")):
        clauses = "CUR-018 CUR-016" if slug == "pad" else "CUR-018"
        says = f"skips shorten the epochs, whose tail is {tail}"
        _ask(made, f"skips-{slug}", plain(tail, skips=some, steps=2), 0, 1, 4, clauses, says)

    _fills(made)
    for slug, end in (("left-out", 12), ("left-out-epoch", 16)):
        tree = plain(skips=[skip_positions("shift", 8, end)], steps=2)
        says = "what a shift left out counts in pos_in_epoch, and not in global_pos"
        _ask(made, slug, tree, 0, 1, 2, "CUR-004 CUR-014 CUR-018", says)


def _fills(made: Page) -> None:
    """Add skips at positions 21 to 23, which only fill the batch of an epoch of 21 samples."""
    nine, last = (sample_at(21, SEED, at) for at in (0, 17))
    for slug, skip, says in (
        ("hole", skip_positions("hole", 22, 23), "a position that only fills a batch is in a hole"),
        (
            "hole-sample",
            skip_samples("hole", [nine], 17),
            "a sample that fills a batch is in a hole by then",
        ),
        ("mask", skip_samples("mask", [nine], 17), "a sample that fills a batch is masked"),
        (
            "shift",
            skip_samples("shift", sorted((nine, last)), 16),
            "a batch is filled without what is removed by then",
        ),
        (
            "shift-step",
            skip_positions("shift", 8, 16),
            "a shift leaves out the end of the epoch, and what filled it",
        ),
    ):
        tree = plain("pad_masked", skips=[skip], steps=2)
        clauses = "CUR-016 CUR-018"
        _ask(made, f"fill-{slug}", tree, 0, 1, 2, clauses, says)
        _ask(made, f"fill-{slug}-2-of-3", tree, 2, 3, 2, clauses, says)


def _ahead(made: Page) -> None:
    """Add workers that prefetch more samples than are done when they save."""
    why = "who counts what was fetched leaves out the samples that no step had yet"
    skips = each_scope("hole")
    for slug, tree, worker, workers, ahead in (
        ("plain", plain(), 1, 2, (3, 1)),
        ("none-done", plain(), 0, 1, (2, 0)),
        ("pad", plain("pad_masked"), 0, 3, (3, 2)),
        ("mixed", mixed(), 0, 1, (4, 2)),
        ("skips", plain(skips=skips, steps=2), 0, 2, (4, 1)),
        (
            "fill",
            plain("pad_masked", skips=[skip_positions("hole", 22, 23)], steps=2),
            0,
            1,
            (3, 1),
        ),
        ("left-out", plain(skips=[skip_positions("shift", 24, 32)], steps=2), 0, 1, (4, 2)),
    ):
        says = (
            f"of {ahead[0]} steps fetched, {ahead[1] or 'none'}"
            f" {'are' if ahead[1] != 1 else 'is'} done"
        )
        _ask(
            made,
            f"ahead-{slug}",
            tree,
            worker,
            workers,
            2,
            "CUR-005 CUR-008 CUR-021",
            says,
            ahead=ahead,
            why=why,
        )


def _pipelines(made: Page) -> None:
    """Add runs with samples issued ahead: open samples come first."""
    why = "who loses what was under way leaves these samples out, and nothing else shows it"
    some = {9, 10, 15, 19}
    holes = [skip_positions("hole", 21, 23), skip_samples("mask", [2, 11], 0)]
    skipping = plain(skips=holes)
    uses = [place.use for place in course(skipping, 24)]
    for slug, tree, end, pending, discarded, then, clauses, says in (
        ("plain", plain(), 20, some, {3, 18}, (), "PIP-004", "some samples are open"),
        ("none-open", plain(), 20, (), {3}, (), "PIP-004", "no sample is open"),
        ("skips", skipping, 21, {at for at in some if uses[at] == "counts"}, (), (),
         "PIP-004 CUR-018", "the next positions have no samples"),
        ("mixed", mixed(), 26, {20, 22, 25}, {21}, (), "PIP-004 CUR-012", "three sources"),
        ("goes-on", plain(), 20, some, {3, 18}, (((19, 10), (21,)), ((9,), ())),
         "PIP-003 PIP-004", "two more steps are done out of order"),
    ):  # fmt: skip
        base = pipelined(tree, end, pending, discarded)
        asked: Tree = {"count": 6}
        result: Tree = {}
        if then:
            asked["issued"] = 7
            asked["steps"] = [
                {"consume": list(consumed), "discard": list(dropped)} for consumed, dropped in then
            ]
            first = sorted(pending) + list(range(end, end + 7 - len(pending)))
            done = {at for step in then for at in step[0]}
            dropped = {at for step in then for at in step[1]}
            after = pipelined(
                tree, first[-1] + 1, {*first} - done - dropped, {*discarded, *dropped}
            )
            result = {"pipeline": after["pipeline"], "ledger": after["ledger"]}
            due = [at for at in first if at not in done | dropped]
            due += range(first[-1] + 1, first[-1] + 7)
        else:
            due = [*sorted(pending), *range(end, end + 12)]
        places = list(course(tree, end + 30))
        made.ask(
            f"tickets-{slug}",
            "",
            "context",
            {"tickets": asked},
            clauses,
            says,
            why=why,
            result={
                "tickets": [
                    [at, places[at].source, places[at].epoch, places[at].sample]
                    for at in due
                    if places[at].use == "counts"
                ][:6],
                **result,
            },
            files=_files(base),
            bug="WRONG_RUN",
            features=["tickets"],
        )
    made.reject(
        "tickets-hole",
        "context/valid/tickets-skips",
        None,
        "PIP-004",
        "CURSOR_FORM",
        "an open position has no sample",
        why=why,
        bug="WRONG_RUN",
        phase="open",
        kind="context",
        files=_files(pipelined(skipping, 24, {9, 22}, ())),
        request={"tickets": {"count": 2}},
        features=["tickets"],
    )


# --- refusals -------------------------------------------------------------------------------------


def _refuse(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, of: str, tree: Tree, clauses: str, says: str
) -> None:
    made.reject(
        f"samples-{slug}",
        f"context/valid/samples-{of}",
        None,
        clauses,
        "CURSOR_FORM",
        says,
        why=WHY,
        bug="WRONG_RUN",
        phase="open",
        kind="context",
        files=_files(tree),
        request={"samples": {"worker": 0, "worker_count": 1, "steps": 2}},
        features=["samples"],
    )


def _checked(tree: Tree, position: int, sample: int, source: str | None = None) -> Tree:
    """Return a cursor with another check, which is wrong."""
    here = list(course(tree, position + 1))[position]
    if (here.sample, here.source) == (sample, source or here.source):
        raise ValueError("that check is right")
    changed = copy.deepcopy(tree)
    changed["order"]["vector_check"] |= {"pos": position, "id": sample} | (
        {"source": source} if source else {}
    )
    return changed


def _refused(made: Page) -> None:
    """Add cursors of one source with an order unlike the computed order."""
    tree = plain()
    right = tree["order"]["vector_check"]["id"]
    _refuse(
        made,
        "check",
        "carry",
        _checked(tree, 8, (right + 1) % 21),
        "CUR-006",
        "the check is of the next number",
    )
    told = _checked(tree, 3, right)
    _refuse(
        made,
        "check-behind",
        "carry",
        told,
        "CUR-006",
        "the check is of a consumed position, and wrong there",
    )
    again = _checked(tree, 24, sample_at(21, SEED, 3))
    _refuse(
        made,
        "order-again",
        "carry",
        again,
        "CUR-006 CUR-007",
        "the second epoch has the order of the first",
    )
    from_one = _checked(tree, 8, sample_at(21, SEED, 29))
    _refuse(
        made, "epochs-from-one", "carry", from_one, "CUR-006 CUR-007", "epochs are counted from one"
    )
    own = _checked(tree, 8, sample_at(21, _source_seed("books"), 8))
    _refuse(
        made,
        "own-seed-alone",
        "carry",
        own,
        "CUR-006 CUR-013",
        "the only source has a seed of its own",
    )
    pad = plain("pad_masked")
    for slug, position, says in (
        ("pad-next", 22, "a batch is filled up from the next epoch"),
        ("pad-last", 20, "a batch is filled up with the last sample"),
    ):
        _refuse(
            made,
            slug,
            "pad",
            _checked(pad, 22, sample_at(21, SEED, position)),
            "CUR-006 CUR-016",
            says,
        )
    shifted = plain(skips=each_scope("shift"), steps=2)
    without = list(course(shifted | {"skips": []}, 19))[18].sample
    unseen = _checked(shifted, 18, without)
    _refuse(
        made,
        "skip-unseen",
        "skips-shift",
        unseen,
        "CUR-006 CUR-018",
        "the check is of the order without skips",
    )
    tree = plain(skips=later(), steps=2)
    early = copy.deepcopy(tree["skips"])
    early[0]["from_pos"] = 0
    wrong = _checked(tree, 18, list(course(tree | {"skips": early}, 19))[18].sample)
    _refuse(
        made,
        "skip-early",
        "skips-later",
        wrong,
        "CUR-006 CUR-018",
        "the check is of a skip that begins at once",
    )
    left_out = plain(skips=[skip_positions("shift", 8, 12)], steps=2)
    left_out["commit"]["pos_in_epoch"] = 16
    says = "pos_in_epoch is 16, as if a shift had left nothing out"
    _refuse(made, "stand-left-out", "left-out", left_out, "CUR-004 CUR-014", says)
    for slug, change in (
        ("stand", {"pos_in_epoch": 15}),
        ("stand-epoch", {"epoch": 1, "pos_in_epoch": 0}),
    ):
        wrong = copy.deepcopy(shifted)
        if wrong["commit"] == wrong["commit"] | change:
            raise ValueError("that commit is right")
        wrong["commit"] |= change
        said = ", ".join(f"{name} is {value}" for name, value in change.items())
        _refuse(
            made,
            slug,
            "skips-shift",
            wrong,
            "CUR-014",
            f"{said}, which only who plays the skips through sees",
        )


def _refused_mixtures(made: Page) -> None:
    """Add cursors of mixtures with an order unlike the computed order."""
    # At the beginning of a block, the sources stand alike in every order of blocks: only the check
    # differs.
    tree = mixed_by_blocks()
    block = ["books"] * 4 + ["code"] * 2 + ["news"] * 2
    position = next(
        at for at, one in enumerate(course(tree, 24)) if at >= 16 and one.source != block[at - 16]
    )
    source = block[position - 16]
    draw = (block * 3)[:position].count(source)
    listed = _checked(
        tree, position, sample_at(_length(tree, source), _source_seed(source), draw), source
    )
    says = "a block has its sources one after the other"
    _refuse(made, "blocks-listed", "mixed-by-blocks", listed, "CUR-006 CUR-012", says)
    tree = mixed()
    here = list(course(tree, 25))[24]
    anew = _checked(
        tree, 24, sample_at(_length(tree, here.source), _source_seed(here.source), 0), here.source
    )
    _refuse(made, "draws-anew", "mixed", anew, "CUR-006 CUR-012", "a stage begins each source anew")
    here = list(course(tree, 21))[20]
    draw = positions(tree, 20)[here.source]
    shared = _checked(tree, 20, sample_at(_length(tree, here.source), SEED, draw), here.source)
    _refuse(
        made,
        "one-seed",
        "mixed",
        shared,
        "CUR-006 CUR-013",
        "a source has the seed of the cursor's order",
    )
    moved = copy.deepcopy(tree)
    moved["sources"][0]["pos"] += 1
    moved["sources"][2]["pos"] -= 1
    _refuse(made, "stand-mixed", "mixed", moved, "CUR-014", "a position of one source is another's")


def _length(tree: Tree, name: str) -> int:
    return next(int(source["n"]) for source in tree["sources"] if source["id"] == name)


def _source_seed(name: str) -> int:
    """Return the seed of a source in a mixture."""
    digest = blake3(b"ckptfmt/source-v1" + struct.pack("<Q", SEED) + name.encode()).digest()
    return int.from_bytes(digest[:8], "little")


# --- foreign loaders ------------------------------------------------------------------------------


def _loaders(made: Page) -> None:
    """Add positions of foreign loaders, for the saved number of workers and for other numbers."""
    theirs = {"kind": "ckptfmt.foreign_loader", "v": 1, "lib": "torchdata", "version": "0.11.0",
              "per": "worker",
              "worker_count": 2}  # fmt: skip
    states = [{"_num_yielded": 3 + i, "fetcher_state": None} for i in range(2)]
    count = {"consumed_train_samples": 640}
    each = [
        Leaf(
            field="data",
            scope=f"lw/{i}",
            value=tree_of(theirs | {"state": states[i]}),
            writers=(i,),
        )
        for i in range(2)
    ]
    whole = tree_of(theirs | {"lib": "megatron", "per": "run", "state": count})
    inputs = {
        "": _checkpoint(each),
        "run-": _checkpoint([Leaf(field="data", value=whole, writers=(0, 1))]),
    }
    for slug, of, worker, workers, allow, state, says in (
        ("first", "", 0, 2, False, states[0], "the first of two workers asks for its position"),
        ("second", "", 1, 2, False, states[1], "the second of two workers asks for its position"),
        (
            "allowed-fewer",
            "",
            0,
            1,
            True,
            None,
            "one worker may go on without the positions of two",
        ),
        (
            "allowed-more",
            "",
            2,
            3,
            True,
            None,
            "three workers may go on without the positions of two",
        ),
        (
            "same",
            "run-",
            1,
            2,
            False,
            count,
            "as many workers as saved ask for the count of the run",
        ),
        ("allowed", "run-", 0, 3, True, count, "three workers may go on with the count of two"),
    ):
        made.ask(
            f"loader-{of}{slug}",
            "",
            "context",
            {"loader": {"worker": worker, "worker_count": workers, "allow": allow}},
            "CUR-022 CUR-023",
            says,
            why="a loader has to get what it saved, and whoever goes on without has to be told",
            result={"state": None if state is None else tagged(tree_of(state)), "reported": allow},
            files=inputs[of],
            bug="WRONG_RUN",
            features=["loader"],
        )
    for slug, of, base, worker, workers in (
        ("on-fewer", "", "first", 0, 1),
        ("on-more", "", "first", 0, 3),
        ("on-a-third", "", "second", 2, 3),
        ("on-fewer", "run-", "same", 0, 1),
        ("on-more", "run-", "same", 1, 3),
    ):
        made.reject(
            f"loader-{of}{slug}",
            f"context/valid/loader-{of}{base}",
            None,
            "CUR-023",
            "LOADER_NOT_ELASTIC",
            f"{workers} workers ask for it, of which this is number {worker}"
            if workers > 1
            else "one worker asks for it",
            why=(
                "per-worker positions, dealt out to other workers, repeat some samples and skip"
                " others"
            ),
            bug="WRONG_RUN",
            kind="context",
            files=inputs[of],
            request={"loader": {"worker": worker, "worker_count": workers, "allow": False}},
            features=["loader"],
        )


def _checkpoint(leaves: list[Leaf]) -> dict[str, bytes]:
    return build(
        Plan(tensors=[Tensor(name="w", dtype="int8", shape=(2,))], leaves=leaves, writer_count=2)
    ).seal()

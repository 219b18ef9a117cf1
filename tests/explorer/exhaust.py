"""Explore what a crash may leave, without a sample where all of it can be judged: ``python -m tests.explorer.exhaust``.

A row of the table is a task:

- ``disk``: a power cut at each point of a workload, under both models of a disk;
- ``again``: a power cut in the recovery from what a power cut left;
- ``orders``: a power cut while actors go on in an order by chance;
- ``objects``: the death of all actors at each point of all their orders, on an object store;
- ``network``: the same for one actor whose requests and answers are lost, or arrive late;
- ``homes``: the death of all jobs at each point of all their orders, in a run with three homes;
- ``mutant``: a power cut in a protocol that is broken on purpose, which has to be convicted.

Each state is read, judged and recovered from. States with equal files and promises are judged once:
``distinct`` counts the judgements. The status is 1 if a rule was broken.
"""

# ruff: noqa: T201 - a command that prints

import argparse
import dataclasses
import functools
import itertools
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from ckptfmt.store.memory import Loss
from ckptfmt.store.protocol import Store
from tests.explorer import homes, scenes, workloads
from tests.explorer.content import deterministic
from tests.explorer.copies import WORKLOADS, judge_of
from tests.explorer.crashes import CrashCounts, explore_crashes, explore_recoveries, record
from tests.explorer.fsmodel import EXT4_ORDERED, POSIX_MIN
from tests.explorer.judge import Judge, Marks, Violation
from tests.explorer.mutants import CRASH_MUTANTS, record_mutant
from tests.explorer.scenes import Case, MemoryScene
from tests.explorer.schedule import Exploration, explore

SEED: Final = 20261121
#: Workloads of one actor that an object store can have as well. A compaction's threads can't be held.
_OF_ONE: Final = (
    "first_save",
    "second_attempt",
    "retirement",
    "save_and_retire",
    "life",
    "deltas",
    "rewind",
    "first_copy",
    "later_copy",
    "save_in_cache",
)
#: Most states of one point of a workload that are all judged; of more, 200 are.
_LIMIT: Final = 1 << 12
#: Recoveries in which the power is cut again, of each workload; and orders by chance.
_AGAIN, _ORDERS = 150, 12_000
_TIMES: Final = (1, 2, 3, 4)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What a task came to.

    Attributes:
        counts: states that a crash may leave, counted at each point of each order; and distinct
            pairs of files and promises, each of which was judged.
    """

    task: str
    counts: CrashCounts
    seconds: float


# --- tasks ----------------------------------------------------------------------------------------


def on_disk(name: str) -> CrashCounts:
    """Cut the power at each point of a workload."""
    recording = record(WORKLOADS[name].run, setup=WORKLOADS[name].setup)
    counts = CrashCounts()
    for model in (POSIX_MIN, EXT4_ORDERED):
        counts += explore_crashes(
            recording, judge_of(name), model=model, rng=random.Random(SEED), limit=_LIMIT
        )
    return counts


def again(name: str, count: int) -> CrashCounts:
    """Cut the power at each point of the recovery from so many of a workload's states."""
    rng = random.Random(SEED)
    recording = record(WORKLOADS[name].run, setup=WORKLOADS[name].setup)
    met: list[Any] = []
    explore_crashes(
        recording, Judge(), rng=rng, recovery=False, on_state=lambda *state: met.append(state)
    )
    return explore_recoveries(rng.sample(met, min(count, len(met))), Judge(), rng=rng)


def in_orders(count: int) -> CrashCounts:
    """Cut the power while two writers and a cleaner go on, in so many orders by chance."""
    rng, judge = random.Random(SEED), Judge()
    setup = WORKLOADS["second_save_of_two_at_once"].setup
    counts = CrashCounts()
    for _ in range(count):
        counts += explore_crashes(
            record(workloads.saves_by_chance(rng), setup=setup), judge, rng=rng, limit=_LIMIT
        )
    return counts


def on_objects(name: str, preemptions: int) -> CrashCounts:
    """Let all actors of a case die at each point of their orders."""
    case, judge = scenes.CASES[name], Judge()
    initial = scenes.prepare(case)
    result = explore(
        lambda: MemoryScene(case, judge, initial),
        preemptions=preemptions,
        limit=1_000_000,
        judge_state=MemoryScene.judge_crash,
    )
    return _count([result], judge)


def on_network(case: Case, judge: Judge, preemptions: int) -> CrashCounts:
    """Lose each put of one actor in each way, and let it die at each point."""
    initial = scenes.prepare(case)
    faults = itertools.product(scenes.put_paths(case), Loss, _TIMES)
    losses = [((loss, path),) * count for path, loss, count in faults]
    results = [
        explore(
            functools.partial(MemoryScene, case, judge, initial, lost),
            preemptions=preemptions,
            judge_state=MemoryScene.judge_crash,
        )
        for lost in [(), *losses]
    ]
    return _count(results, judge)


def on_homes(name: str) -> CrashCounts:
    """Let all jobs of a case die at each point of their orders, with three homes."""
    judged: dict[Any, list[Violation]] = {}
    with homes.in_turn():
        initial = {} if name == "new_run" else homes.prepare()
        jobs = homes.NEW_RUN if name == "new_run" else homes.CASES[name]
        result = explore(
            lambda: homes.HomesScene(jobs, initial, judged),
            preemptions=1,
            limit=1_000_000,
            judge_state=homes.HomesScene.judge_state,
        )
    return CrashCounts(
        state_count=result.state_count,
        distinct_count=len(judged),
        violations=[violation for violation, _ in result.violations],
    )


def _count(results: Sequence[Exploration], judge: Judge) -> CrashCounts:
    """Return the states of explorations, each of which a crash may leave."""
    return CrashCounts(
        state_count=sum(result.state_count for result in results),
        distinct_count=judge.count,
        violations=[violation for result in results for violation, _ in result.violations],
    )


def convict(name: str) -> CrashCounts:
    """Look for a state that convicts a broken protocol."""
    mutant = CRASH_MUTANTS[name]
    counts = explore_crashes(
        record_mutant(mutant),
        judge_of(mutant.workload),
        rng=random.Random(SEED),
        recovery=False,
        limit=_LIMIT,
        enough=sys.maxsize,
    )
    missing = [] if counts.rules & mutant.rules else [Violation("mutant", f"{name} is at large")]
    return dataclasses.replace(counts, violations=missing)


class ObjectBench:
    """A store and its marks, as workloads ask for them."""

    def __init__(self, store: Store, marks: Marks) -> None:
        self._store = store
        self.marks = marks

    def store(self) -> Store:
        """Return the store."""
        return self._store


def case_of(name: str) -> Case:
    """Return a workload as the case of one actor on an object store."""
    workload: Any = WORKLOADS[name]

    def setup(store: Store) -> None:
        if workload.setup is not None:
            workload.setup(ObjectBench(store, Marks()))

    return Case(
        setup=setup,
        actions={"job": lambda store, marks: workload.run(ObjectBench(store, marks))},
        refusals={"job": scenes.UNKNOWN},
        may_delete=True,
    )


def list_tasks() -> dict[str, Callable[[], Any]]:
    """Return all tasks by name."""
    found: dict[str, Callable[[], Any]] = {}
    for name in scenes.CASES:
        preemptions = 3 if name in scenes.LONG_CASES else 4
        found[f"objects/{name}"] = functools.partial(on_objects, name, preemptions)
    for name in ("committer", "saver", "launch", "first_launch", "retiring", "giving_up"):
        case = scenes.LONE_CASES[name]
        found[f"network/{name}"] = functools.partial(on_network, case, Judge(), 3)
    for name in _OF_ONE:
        found[f"network/{name}"] = functools.partial(on_network, case_of(name), judge_of(name), 1)
    for name in (*homes.CASES, "new_run"):
        found[f"homes/{name}"] = functools.partial(on_homes, name)
    for name in CRASH_MUTANTS:
        found[f"mutant/{name}"] = functools.partial(convict, name)
    for name in WORKLOADS:
        found[f"disk/{name}"] = functools.partial(on_disk, name)
    for name in workloads.WORKLOADS:
        found[f"again/{name}"] = functools.partial(again, name, _AGAIN)
    found["orders/two_writers_and_a_cleaner"] = functools.partial(in_orders, _ORDERS)
    return found


def run(task: str) -> Row:
    """Run a task."""
    begin_s = time.perf_counter()
    try:
        with deterministic():
            counts = list_tasks()[task]()
    except Exception as error:  # noqa: BLE001
        counts = CrashCounts(violations=[Violation("stopped", repr(error))])
    return Row(task, counts, time.perf_counter() - begin_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tasks", nargs="*", help="beginnings of names; by default all")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    chosen = parser.parse_args(arguments)
    names = [
        name
        for name in list_tasks()
        if not chosen.tasks or any(name.startswith(begin) for begin in chosen.tasks)
    ]
    rows = []
    with multiprocessing.get_context("spawn").Pool(chosen.processes, maxtasksperchild=1) as pool:
        for row in pool.imap_unordered(run, names):
            rows.append(row)
            print(
                f"{row.task:40} {row.counts.state_count:9} states"
                f" {row.counts.distinct_count:8} distinct"
                f" {len(row.counts.violations):3} violations {row.seconds:7.1f} s",
                flush=True,
            )
            for violation in row.counts.violations[:3]:
                print(f"    {violation.rule}: {violation.detail[:400]}", flush=True)
    total = sum((row.counts for row in rows), CrashCounts())
    print(
        f"{len(rows)} tasks: {total.state_count} states, {total.distinct_count} distinct,"
        f" {len(total.violations)} violations"
    )
    return int(bool(total.violations))


if __name__ == "__main__":
    sys.exit(main())

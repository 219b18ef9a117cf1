"""The runs whose crashes are explored: small, for most bugs of crash safety need no more than three operations.

Source: Mohan et al., "Finding Crash-Consistency Bugs with Bounded Black-Box Crash Testing" (OSDI
2018).
"""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

from ckptfmt.commit import decision as commit
from ckptfmt.documents.manifest import Origin
from ckptfmt.documents.run import Launch, RunRecord
from ckptfmt.run import lineage
from tests.builders import known_launches
from tests.explorer import content
from tests.explorer.crashes import Bench
from tests.explorer.judge import clean_up
from tests.explorer.schedule import Actor, Scheduler
from tests.stores.hooked import Operation

#: Who goes on: by the choices so far, who may, and who is the default.
Choose = Callable[[tuple[str, ...], list[str], str], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A run to record.

    Attributes:
        run: what is recorded.
        setup: what comes before, and is durable by then.
        point_floor: crash points that there are at least; fewer say that the exploration missed the
            run.
        state_floor: distinct states that there are at least.
    """

    run: Callable[[Bench], None]
    setup: Callable[[Bench], None] | None
    point_floor: int
    state_floor: int


def first_save(bench: Bench) -> None:
    """A run from nothing: launch 1 saves step 10."""
    store = bench.store()
    _, launch = _launch(bench)
    bench.marks.saved(content.save(store, content.origin_of(launch, 10, 1)))


def one_save(bench: Bench) -> None:
    """Launch 1 with step 10."""
    first_save(bench)


def three_saves(bench: Bench) -> None:
    """Launch 1 with steps 10, 20 and 30."""
    store = bench.store()
    _, launch = _launch(bench)
    for number in (1, 2, 3):
        bench.marks.saved(content.save(store, content.origin_of(launch, 10 * number, number)))


def one_save_and_a_torn_one(bench: Bench) -> None:
    """Launch 1 with step 10; writer 1 died before its part of step 20."""
    store = bench.store()
    _, launch = _launch(bench)
    bench.marks.saved(content.save(store, content.origin_of(launch, 10, 1)))
    content.write(store, content.origin_of(launch, 20, 2), 0)


def second_save_of_two_at_once(bench: Bench) -> None:
    """Both writers write step 20 in turns, one system call each; then writer 0 commits."""
    launch = known_launches(bench.store())[-1]
    origin = content.origin_of(launch, 20, 2)
    in_turns(bench, _writers_of(origin))
    bench.marks.saved(commit.finalize(content.place_of(bench.store(), origin), origin))


def second_attempt(bench: Bench) -> None:
    """Step 20 again, in the directory where the first attempt didn't get through."""
    store = bench.store()
    launch = known_launches(store)[-1]
    bench.marks.saved(content.save(store, content.origin_of(launch, 20, 3)))


def two_committers(bench: Bench) -> None:
    """Two committers finalize the same parts in turns, and each tells that it did."""
    store = bench.store()
    launch = known_launches(store)[-1]
    origin = content.origin_of(launch, 20, 2)
    for number in range(content.WRITER_COUNT):
        content.write(store, origin, number)

    def finalize(store: Any) -> None:
        bench.marks.saved(commit.finalize(content.place_of(store, origin), origin))

    in_turns(bench, {"c0": finalize, "c1": finalize})


def retirement(bench: Bench) -> None:
    """Launch 1 retires all but its newest."""
    store = bench.store()
    run, launch = _current(bench)
    clean_up(store, run, launch, bench.marks, keep=1)


def resume(bench: Bench) -> None:
    """Launch 2 of two writers: both load what it says, then save; the torn save of launch 1 is given up."""
    store = bench.store()
    run, launch = _launch(bench)
    resume_from = launch.resume_from
    assert resume_from is not None
    in_turns(
        bench,
        {
            f"w{n}": (
                lambda store: content.load(store.at(resume_from.name), digest=resume_from.digest)
            )
            for n in range(content.WRITER_COUNT)
        },
    )
    clean_up(store, run, launch, bench.marks, keep=None)
    bench.marks.saved(content.save(store, content.origin_of(launch, 20, 3)))


def save_and_retire(bench: Bench) -> None:
    """Two saves, each followed by a clean-up that keeps two."""
    store = bench.store()
    run, launch = _current(bench)
    for number in (4, 5):
        bench.marks.saved(content.save(store, content.origin_of(launch, 10 * number, number)))
        clean_up(store, run, launch, bench.marks, keep=2)


def save_beside_a_clean_up(bench: Bench) -> None:
    """Writer 0 writes and commits step 40 while another thread retires all but the newest, in turns."""
    run, launch = _current(bench)
    origin = content.origin_of(launch, 40, 4)
    in_turns(
        bench,
        {
            "saver": lambda store: bench.marks.saved(content.save(store, origin)),
            "cleaner": lambda store: clean_up(store, run, launch, bench.marks, keep=1),
        },
    )


def life(bench: Bench) -> None:
    """From nothing: launch, two saves, a retirement, a second launch, a save, a clean-up."""
    store = bench.store()
    run, first = _launch(bench)
    for number in (1, 2):
        bench.marks.saved(content.save(store, content.origin_of(first, 10 * number, number)))
    clean_up(store, run, first, bench.marks, keep=1)
    _, second = _launch(bench)
    bench.marks.saved(content.save(store, content.origin_of(second, 30, 3)))
    clean_up(store, run, second, bench.marks, keep=1)


def _next_one(path: tuple[str, ...], enabled: list[str], _: str) -> str:
    last = path[-1] if path else enabled[-1]
    return next((name for name in enabled if name > last), enabled[0])


def saves_by_chance(rng: random.Random) -> Callable[[Bench], None]:
    """Return a run of two writers of step 20 and a clean-up of their own launch beside them, in an order by chance."""

    def run(bench: Bench) -> None:
        recorded_run, launch = _current(bench)
        origin = content.origin_of(launch, 20, 2)
        actions = _writers_of(origin)
        actions["cleaner"] = lambda store: clean_up(
            store, recorded_run, launch, bench.marks, keep=1
        )
        in_turns(bench, actions, choose=lambda _, enabled, __: rng.choice(enabled))
        bench.marks.saved(commit.finalize(content.place_of(bench.store(), origin), origin))

    return run


WORKLOADS: Final = {
    "first_save": Workload(first_save, None, 12, 12),
    "second_save_of_two_at_once": Workload(second_save_of_two_at_once, one_save, 8, 10),
    "second_attempt": Workload(second_attempt, one_save_and_a_torn_one, 7, 8),
    "two_committers": Workload(two_committers, one_save, 8, 8),
    "retirement": Workload(retirement, three_saves, 15, 60),
    "resume": Workload(resume, one_save_and_a_torn_one, 12, 14),
    "save_and_retire": Workload(save_and_retire, three_saves, 40, 110),
    "save_beside_a_clean_up": Workload(save_beside_a_clean_up, three_saves, 30, 100),
    "life": Workload(life, None, 45, 90),
}


def in_turns(
    bench: Bench, actions: Mapping[str, Callable[[Any], object]], choose: Choose = _next_one
) -> None:
    """Do the actions in threads, choosing between them at each lasting system call."""
    actors: dict[str, Actor] = {}
    lasting = {"mkdir", "link", "rename", "unlink", "fsync_directory"}

    def start(name: str, action: Callable[[Any], object]) -> Actor:
        def gate(operation: Operation) -> None:
            if operation.op in lasting:
                actors[operation.who].gate()

        return Actor(name, lambda: action(bench.store(name, gate=gate)))

    actors.update({name: start(name, action) for name, action in actions.items()})

    class Turns:
        def __init__(self) -> None:
            self.actors = actors

        def key(self) -> None:
            return None

        def judge(self) -> list[Any]:
            return []

    Scheduler(Turns(), choose).run()
    for actor in actors.values():
        assert actor.outcome is not None
        if actor.outcome.error is not None:
            raise actor.outcome.error


def _writers_of(origin: Origin) -> dict[str, Callable[[Any], None]]:
    def action(number: int) -> Callable[[Any], None]:
        return lambda store: content.write(store, origin, number)

    return {f"w{number}": action(number) for number in range(content.WRITER_COUNT)}


def _launch(bench: Bench) -> tuple[RunRecord, Launch]:
    store = bench.store()
    run = lineage.open_run(store)
    launch, _ = lineage.begin_launch(store, run)
    bench.marks.launched(launch)
    return run, launch


def _current(bench: Bench) -> tuple[RunRecord, Launch]:
    store = bench.store()
    run = lineage.read_run(store)
    assert run is not None
    return run, known_launches(store)[-1]

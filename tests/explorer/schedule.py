"""A deterministic scheduler: actors in threads that stop before each operation, and one choice after the other.

One actor runs at a time, so a run is determined by the list of choices, and can be made again.
`explore` makes all runs with at most so many preemptions: most bugs of protocols need one or two.

Source: Musuvathi and Qadeer, "Iterative context bounding for systematic testing of multithreaded
programs" (PLDI 2007).
"""

import dataclasses
import random
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol, TypeVar

from ckptfmt.store.memory import MemoryStore
from tests.stores.hooked import HookedStore, Operation

#: An actor that doesn't come back to the gate in this time hangs.
_PATIENCE_S = 30.0


class Stopped(BaseException):
    """Ends an actor whose run isn't wanted any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What an actor came to: an answer, or an error."""

    answer: Any = None
    error: BaseException | None = None


class Actor:
    """A thread that does `action`, and stops at each `gate`.

    Attributes:
        history: a hash of everything that the actor has seen; equal histories continue equally.
        outcome: None while it isn't at its end.
        deletion_count: how many files it deleted.
    """

    def __init__(self, name: str, action: Callable[[], Any]) -> None:
        self.name = name
        self.history: Hashable = 0
        self.outcome: Outcome | None = None
        self.deletion_count = 0
        self._action = action
        # Two locks that are handed to and fro, held by nobody's right: ten times as fast as
        # semaphores.
        self._go, self._halted = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._halted.acquire()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_here(self) -> bool:
        """Whether the caller is the actor's thread, and not one that reads ahead for it."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Start the thread; it waits before its first step."""
        self._thread.start()

    def step(self) -> None:
        """Let the actor go on to its next gate, or to its end."""
        self._go.release()
        assert self._halted.acquire(timeout=_PATIENCE_S), f"{self.name} hangs"

    def gate(self) -> None:
        """Wait for the next turn; called in the actor's own thread."""
        if self._stopping:
            raise Stopped
        self._halted.release()
        self._go.acquire()
        if self._stopping:
            raise Stopped

    def stop(self) -> None:
        """End the thread, wherever it is."""
        if self.outcome is None:
            self._stopping = True
            self._go.release()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._stopping:
                self.outcome = Outcome(answer=self._action())
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001
            self.outcome = Outcome(error=error)
        self._halted.release()


class GatedStore(HookedStore):
    """A store at which an actor stops before each operation, and whose answers go into its history.

    Args:
        inner: the store in memory, seen from its root.
        actor: returns whose store it is.
    """

    def __init__(self, inner: MemoryStore, actor: Callable[[], Actor]) -> None:
        super().__init__(inner)
        self._root = inner
        self._actor = actor

    def before(self, operation: Operation) -> None:
        """Wait for the actor's turn; note what the operation will see."""
        actor = self._actor()
        if operation.op in ("sync", "delete_leftovers", "remove_directory") or not actor.is_here:
            return  # nothing happens there, so there is nothing to interleave
        actor.gate()
        actor.deletion_count += operation.op == "delete"
        snapshot = self._root.snapshot()
        seen: Hashable = snapshot.get(operation.path)
        if operation.op.startswith("list"):
            seen = tuple(key for key in snapshot if key.startswith(operation.path))
        actor.history = hash((actor.history, operation.op, operation.path, operation.data, seen))

    def after(self, operation: Operation) -> None:
        """Note the outcome."""
        actor = self._actor()
        if actor.is_here:
            actor.history = hash((actor.history, operation.outcome))


class Scene(Protocol):
    """One run to be scheduled: fresh actors over a fresh store."""

    @property
    def actors(self) -> Mapping[str, Actor]:
        """The actors by name."""

    def key(self) -> Hashable:
        """Return what the rest of the run depends on beside the actors' histories; None: it can't be told."""

    def judge(self) -> list[Any]:
        """Return what is wrong, now that all actors are at their end."""


@dataclasses.dataclass(slots=True)
class Exploration:
    """What was explored.

    Attributes:
        run_count: complete runs.
        cut_count: runs cut short where another had been.
        state_count: distinct states met on the way.
        violations: with the choices that lead there.
    """

    run_count: int = 0
    cut_count: int = 0
    state_count: int = 0
    violations: list[tuple[Any, tuple[str, ...]]] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.run_count} runs, {self.cut_count} cut short, {self.state_count} states"


class _Cut(Exception):  # noqa: N818
    """The rest of this run was explored before."""


SceneT = TypeVar("SceneT", bound=Scene)


class Scheduler:
    """Runs one scene by a list of choices, then by default: whoever ran last goes on while it can.

    Args:
        scene: what to run.
        on_choice: makes the choices behind the list, from those so far, who may go, and who is the
            default.
    """

    def __init__(
        self,
        scene: Scene,
        on_choice: Callable[[tuple[str, ...], list[str], str], str] | None = None,
    ) -> None:
        self._scene = scene
        self._on_choice = on_choice
        self.path: list[str] = []

    def run(self, choices: tuple[str, ...] = ()) -> None:
        """Run the scene to its end; whatever happens, no thread stays."""
        actors = self._scene.actors
        for actor in actors.values():
            actor.start()
        try:
            current = ""
            while enabled := [name for name, actor in actors.items() if actor.outcome is None]:
                current = current if current in enabled else enabled[0]
                if len(self.path) < len(choices):
                    current = choices[len(self.path)]
                elif self._on_choice is not None:
                    current = self._on_choice(tuple(self.path), enabled, current)
                self.path.append(current)
                actors[current].step()
        finally:
            for actor in actors.values():
                actor.stop()


def explore(
    make: Callable[[], SceneT],
    *,
    preemptions: int,
    limit: int = 100_000,
    stop_early: bool = False,
    judge_state: Callable[[SceneT], list[Any]] = lambda _: [],
) -> Exploration:
    """Make all runs with at most so many preemptions, each part of them once.

    Args:
        make: returns the scene anew.
        preemptions: how often a run may change the actor though the last one could go on.
        limit: most runs; a loud error beyond, for "all" would be a lie.
        stop_early: whether the first violation ends it.
        judge_state: returns what is wrong with each state on the way.
    """
    result = Exploration()
    seen: dict[Hashable, int] = {}
    pending: list[tuple[str, ...]] = [()]
    while pending and not (stop_early and result.violations):
        choices = pending.pop()
        scene = make()

        def on_choice(
            path: tuple[str, ...], enabled: list[str], default: str, scene: SceneT = scene
        ) -> str:
            spent = _count_preemptions(path, scene)
            _cut_if_seen(scene, path, spent, seen)
            result.violations += [(violation, path) for violation in judge_state(scene)]
            if spent + (bool(path) and default == path[-1]) <= preemptions:
                pending.extend((*path, other) for other in enabled if other != default)
            return default

        scheduler = Scheduler(scene, on_choice)
        try:
            scheduler.run(choices)
        except _Cut:
            result.cut_count += 1
            continue
        result.run_count += 1
        result.violations += [(violation, tuple(scheduler.path)) for violation in scene.judge()]
        assert result.run_count + result.cut_count < limit, "too many runs for an exhaustive search"
    result.state_count = len(seen)
    return result


def sample(make: Callable[[], Scene], *, count: int, rng: random.Random) -> Exploration:
    """Make `count` runs with choices by chance: a change of the actor at one operation in eight."""
    result = Exploration()
    for _ in range(count):
        scene = make()

        def on_choice(_: tuple[str, ...], enabled: list[str], default: str) -> str:
            return rng.choice(enabled) if rng.random() < 1 / 8 else default

        scheduler = Scheduler(scene, on_choice)
        scheduler.run()
        result.run_count += 1
        result.violations += [(violation, tuple(scheduler.path)) for violation in scene.judge()]
    return result


def _cut_if_seen(
    scene: Scene, path: tuple[str, ...], spent: int, seen: dict[Hashable, int]
) -> None:
    """Stop a run at a state that was met before with as many preemptions left."""
    state = scene.key()
    if state is None:
        return
    histories = tuple((actor.history, actor.outcome is None) for actor in scene.actors.values())
    key = (state, histories, path[-1] if path else "")
    if seen.get(key, spent + 1) <= spent:
        raise _Cut
    seen[key] = spent


def _count_preemptions(path: tuple[str, ...], scene: Scene) -> int:
    """Count the changes away from an actor that wasn't at its end; every actor's last step is its last turn."""
    count = 0
    for position in range(1, len(path)):
        previous = path[position - 1]
        if path[position] != previous:
            ended = scene.actors[previous].outcome is not None and previous not in path[position:]
            count += not ended
    return count

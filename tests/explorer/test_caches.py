"""Checkpoints whose files stay in caches while they are committed at home: every order in which actors meet there.

Home is the store that actors share; caches hold the shards of step 20, and don't change. What is
judged in the end is home together with the caches, since an acknowledged checkpoint of this kind is
whole there.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest

from ckptfmt.commit.decision import create_once, finalize
from ckptfmt.documents.durability import NODE
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.documents.run import Launch
from ckptfmt.errors import Code
from ckptfmt.run import lineage
from ckptfmt.run.node_cache import list_in_caches, plan_fetch
from ckptfmt.store.memory import Loss, MemoryStore
from ckptfmt.store.protocol import Store
from ckptfmt.write.image import Context, plan_image
from ckptfmt.write.writer import LiveContents, write_image
from tests.explorer import content, scenes
from tests.explorer.content import deterministic
from tests.explorer.judge import Judge, Marks, Promises
from tests.explorer.scenes import Action, Case, MemoryScene, Outcomes
from tests.explorer.schedule import explore
from tests.explorer.telling import tell

NAME, OLDER = checkpoint_name(20, 1), checkpoint_name(10, 1)
ATTEMPT = 2


@pytest.fixture(autouse=True)
def _deterministic():
    with deterministic():
        yield


def write_to_caches(store: Store, launch: Launch) -> None:
    """Write all parts of step 20, which say that their files may be in caches."""
    origin = content.origin_of(launch, 20, ATTEMPT)
    for writer in range(content.WRITER_COUNT):
        snapshot = content.snapshot_of(origin.attempt, writer)
        image = plan_image(snapshot, block_nbytes=origin.block_nbytes)
        context = dataclasses.replace(Context.of(snapshot), durability=NODE)
        write_image(
            store.at(NAME),
            image,
            LiveContents(snapshot, image, None),
            origin,
            context,
            writer=writer,
        )


@dataclasses.dataclass(frozen=True)
class Place:
    """What is there when the actors start.

    Attributes:
        home: its files.
        caches: the files of step 20 that home doesn't have.
        promises: what was acknowledged.
    """

    home: Mapping[str, bytes]
    caches: Mapping[str, bytes]
    promises: Promises


def prepare(*, committed: bool) -> Place:
    """Return step 10 at home, and the parts of step 20, perhaps committed."""
    store = MemoryStore()
    launch = scenes._saved_steps(store, 1)
    write_to_caches(store, launch)
    caches = {
        path: store.read(path, limit_nbytes=1 << 20)
        for path in store.list(NAME)
        if "parts/" not in path
    }
    for path in caches:
        store.delete(path)
    if committed:
        finalize(store.at(NAME), content.origin_of(launch, 20, ATTEMPT))
    promises = Promises()
    for entry in lineage.list_checkpoints(store):
        if entry.manifest is not None:
            promises = promises.after(f"saved {entry.name} {entry.manifest.digest}")
    return Place(store.snapshot(), caches, promises)


class CachedScene(MemoryScene):
    """A case on an object store, beside caches."""

    def __init__(
        self, case: Case, judge: Judge, place: Place, losses: tuple[tuple[Loss, str], ...] = ()
    ) -> None:
        super().__init__(case, judge, (place.home, place.promises), losses)
        self._caches = place.caches

    def _complete(self, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
        return {**self._caches, **files}


# --- actors ---------------------------------------------------------------------------------------


def fetch(store: Store, caches: Mapping[str, bytes]) -> None:
    """Bring home what a launch would resume from, as `_Finish.fetch` of a launch does."""
    table = [[NAME, f"{ATTEMPT:016x}", writer] for writer in range(content.WRITER_COUNT)]
    for name in list_in_caches(store):
        for _, attempt, writer, _ in plan_fetch(store, name, [table], ()) or ():
            for path, data in caches.items():
                if f"-{attempt}-{writer:05d}." in path:
                    create_once(store, path, content=data)


def launch_and_save(caches: Mapping[str, bytes], attempt: int, step: int = 30) -> Action:
    """Begin a launch, with caches or without, load what it says, and save."""

    def action(store: Store, marks: Marks) -> tuple[Launch, list[str]]:
        passed_over: list[str] = []
        if caches:
            fetch(store, caches)
        launch, _ = lineage.begin_launch(
            store, lineage.open_run(store), on_passed_over=passed_over.append
        )
        marks.launched(launch)
        assert launch.resume_from is not None
        assert content.load(
            store.at(launch.resume_from.name), digest=launch.resume_from.digest
        ).exact
        lineage.check_not_fenced(store, launch.launch)
        marks.saved(content.save(store, content.origin_of(launch, step, attempt)))
        return launch, passed_over

    return action


def save_and_retire(store: Store, marks: Marks) -> None:
    """Save step 30 at home as launch 1, which lets step 20 go, and all others but that."""
    lineage.check_not_fenced(store, 1)
    marks.saved(content.save(store, content.origin_of(lineage.read_launch(store, 1), 30, 5)))
    lineage.check_not_fenced(store, 1)
    scenes._clean(launch=1, keep=1)(store, marks)


def from_caches(outcomes: Outcomes, _: MemoryStore) -> list[str]:
    """A launch with the caches never goes back to the older checkpoint."""
    answers = [outcome.answer for outcome in outcomes.values() if isinstance(outcome.answer, tuple)]
    return [
        f"{answer} goes on from {OLDER}"
        for answer in answers
        if answer[0].resume_from.name == OLDER
    ]


def named(outcomes: Outcomes, _: MemoryStore) -> list[str]:
    """A launch without the caches that goes on from the older one says why."""
    launch, passed_over = outcomes["without"].answer or (None, [])
    if launch is None or launch.resume_from.name != OLDER:
        return []
    return (
        []
        if any(NAME in one and "FILES_IN_CACHES" in one for one in passed_over)
        else [f"told: {passed_over}"]
    )


def committer(store: Store, marks: Marks) -> Any:
    """Commit step 20, whose parts are at home, and whose files aren't."""
    return scenes._finalize(ATTEMPT)(store, marks)


FENCED = frozenset({Code.FENCED})


def cases(place: Place) -> dict[str, Case]:
    """Return who meets whom."""
    case = functools.partial(Case, setup=lambda _: None, owned=False)
    with_caches = functools.partial(launch_and_save, place.caches)
    without = launch_and_save({}, 4)
    return {
        "committer": case(actions={"committer": committer, "new": with_caches(3)}, refusals={}),
        "two": case(
            actions={"l0": with_caches(3), "l1": with_caches(4)},
            refusals={"l0": FENCED, "l1": FENCED},
            check=from_caches,
        ),
        "without": case(
            actions={"with": with_caches(3), "without": without},
            refusals={"with": FENCED, "without": FENCED},
            check=named,
        ),
        "retiring": case(
            actions={"old": save_and_retire, "new": with_caches(3, 40)},
            refusals={"old": FENCED, "new": scenes._GONE},
        ),
    }


@pytest.mark.parametrize("name", ["committer", "two", "without", "retiring"])
def test_no_order_of_steps_loses_what_is_in_caches(name):
    """REQ-RUN-041, REQ-CMT-048, REQ-CMT-049: committed at home by its register, whole in the caches."""
    place, judge = prepare(committed=name != "committer"), Judge()
    result = explore(lambda: CachedScene(cases(place)[name], judge, place), preemptions=1)

    tell(f"{name} beside caches, 1 preemption: {result}")
    assert result.violations == []
    assert result.run_count >= 9


def test_what_is_committed_is_whole_in_the_caches_alone():
    """The control: home without them has no file of it, and a launch there goes on from the older one."""
    place = prepare(committed=True)
    home = MemoryStore.from_snapshot(place.home)
    assert place.caches.keys() & set(home.list("")) == set()
    assert content.load(MemoryStore.from_snapshot({**place.home, **place.caches}).at(NAME)).exact
    launch, passed_over = launch_and_save({}, 3)(home, Marks())
    assert (launch.resume_from.name, len(passed_over)) == (OLDER, 1)


@pytest.mark.parametrize("loss", Loss)
def test_every_file_that_is_brought_home_may_be_lost_on_its_way(loss):
    """The launch says that it doesn't know, or goes on from what came home whole."""
    place, judge = prepare(committed=True), Judge()
    case = dataclasses.replace(
        cases(place)["two"],
        actions={"new": launch_and_save(place.caches, 3)},
        refusals={"new": scenes.UNKNOWN},
    )
    for path in place.caches:
        for times in (1, 2, 4):
            make = functools.partial(CachedScene, case, judge, place, ((loss, path),) * times)
            assert explore(make, preemptions=1).violations == []

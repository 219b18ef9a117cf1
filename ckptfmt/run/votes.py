"""The votes of the homes of a run: which launch may commit.

A home votes for a launch by a file that is created once. A launch begins with the votes of a
majority of the homes, and a commit counts once a majority shows no newer launch. Two majorities
have a home in common, so a launch sees each commit that counted before its votes, unless the only
home with the commit is away.

Spec: REQ-RUN-065, REQ-RUN-067, REQ-RUN-068.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final, Self

from ckptfmt import limits
from ckptfmt.commit.decision import create_once, read_register
from ckptfmt.documents.manifest import Manifest, Reference, checkpoint_name
from ckptfmt.documents.run import VOTES, Vote, launch_name, parse_launch_name
from ckptfmt.errors import CkptError, Code, StoreError, err
from ckptfmt.run.homes import HomePlace, ask, errors_of, homes_away, majority_of
from ckptfmt.run.lineage import list_launch_numbers, list_places, read_launch
from ckptfmt.store.protocol import Store

#: Pause before another look for a copy, in seconds: the first, and the longest.
_PAUSE_MIN_S: Final = 0.1
_PAUSE_MAX_S: Final = 1.0
#: Time after which a save waiting for a copy looks for a newer launch, in seconds: at first, and at
#: most.
_SLICE_MIN_S: Final = 2.0
_SLICE_MAX_S: Final = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OtherHomes:
    """The homes of a run beside the home at which a launch commits.

    Attributes:
        homes: the homes.
        home_id: id of the home at which the launch commits.
        away_after_s: time after which a silent home counts as away, in seconds.
        own: nonces of this process's votes: they overrule no launch of this process.
    """

    homes: tuple[HomePlace, ...]
    home_id: str
    away_after_s: float
    own: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the homes as plain values; a store without an address stays a store."""
        return {
            "homes": [[home.address, home.name, home.home_id] for home in self.homes],
            "home_id": self.home_id,
            "away_after_s": str(self.away_after_s),
            "own": list(self.own),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Return the homes of `as_dict`."""
        return cls(
            homes=tuple(HomePlace(*row) for row in value["homes"]),
            home_id=value["home_id"],
            away_after_s=float(value["away_after_s"]),
            own=tuple(value["own"]),
        )

    def await_copy(
        self,
        home: Store,
        run_id: str,
        launch: int,
        *,
        deadline_s: float,
        gives_up: threading.Event,
    ) -> None:
        """Wait until a majority of the homes has the save before the next commit of a launch.

        Args:
            home: the home at which the launch commits.
            deadline_s: longest wait in seconds.
            gives_up: ends the wait when set, as nobody copies any more.

        Raises: StoreError(HOME_BEHIND); FencedError(FENCED). Spec: REQ-RUN-068.
        """
        before = find_previous(home, launch)
        if before is None:
            return
        needed_count = majority_of(len(self.homes) + 1) - 1
        homes = dict(enumerate(self.homes))
        end_s = time.monotonic() + deadline_s
        slice_s = _SLICE_MIN_S

        def is_enough(values: Mapping[int, bool]) -> bool:
            return sum(values.values()) >= needed_count

        while True:
            slice_end_s = min(end_s, time.monotonic() + slice_s)
            is_over = threading.Event()
            question = functools.partial(
                _await, reference=before, end_s=slice_end_s, is_over=is_over, gives_up=gives_up
            )
            answers = ask(
                homes,
                question,
                deadline_s=max(0.0, slice_end_s - time.monotonic()),
                member_of=run_id,
                is_enough=is_enough,
            )
            is_over.set()
            if is_enough(answers.values):
                return
            with contextlib.suppress(StoreError):  # a newer launch is why nobody copies
                self.confirm(home, run_id, launch)
            if gives_up.wait(max(0.0, slice_end_s - time.monotonic())) or time.monotonic() >= end_s:
                break
            slice_s = min(4 * slice_s, _SLICE_MAX_S)
        raise err(
            Code.HOME_BEHIND,
            f"{before.name} isn't at another home yet, and a commit before that could lose two"
            " saves with this home",
            where=home.name,
            requirement="REQ-RUN-068",
        )

    def confirm(self, home: Store, run_id: str, launch: int) -> None:
        """Check that no newer launch may have the votes of a majority.

        Called after a commit at `home`: the commit counts only if this method returns.

        Raises: FencedError(FENCED); StoreError(HOMES_AWAY). Spec: REQ-RUN-067.
        """
        homes = dict(enumerate((HomePlace(home, home.name, self.home_id), *self.homes)))
        check_votes(
            homes,
            run_id,
            launch,
            own=self.own,
            deadline_s=self.away_after_s,
            requirement="REQ-RUN-067",
        )


def find_previous(home: Store, launch: int) -> Reference | None:
    """Return the newest commit of a launch at the home, else the checkpoint at the start."""
    steps = sorted((step for step, number in list_places(home) if number == launch), reverse=True)
    for step in steps:
        name = checkpoint_name(step, launch)
        register = read_register(home.at(name))
        if isinstance(register, Manifest):
            return Reference(name=name, digest=register.digest)
    return read_launch(home, launch).resume_from


def _has(store: Store, reference: Reference) -> bool:
    """Return whether a home has a checkpoint; a retired checkpoint doesn't count."""
    register = read_register(store.at(reference.name))
    return isinstance(register, Manifest) and register.digest == reference.digest


def _await(
    store: Store,
    *,
    reference: Reference,
    end_s: float,
    is_over: threading.Event,
    gives_up: threading.Event,
) -> bool:
    """Wait for a checkpoint at a home, until a time or an event; return whether it is there."""
    pause_s = _PAUSE_MIN_S
    while not _has(store, reference):
        if time.monotonic() >= end_s or gives_up.is_set() or is_over.wait(pause_s):
            return False
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)
    return True


def check_votes(
    homes: Mapping[int, HomePlace],
    run_id: str,
    launch: int,
    *,
    own: Container[str],
    deadline_s: float,
    requirement: str,
) -> None:
    """Check that no launch newer than `launch` may have the votes of a majority.

    Args:
        own: nonces of the caller's own votes, which don't count.
        deadline_s: longest wait for a home in seconds.

    Raises: FencedError(FENCED); StoreError(HOMES_AWAY).
    """
    count = len(homes)

    def question(store: Store) -> dict[int, str]:
        newer = [number for number in list_vote_numbers(store) if number > launch]
        found = {number: _nonce_of(store, number) for number in newer}
        votes = {number: nonce for number, nonce in found.items() if nonce not in own}
        # A launch with a record has had the votes of a majority.
        begun = votes.keys() & list_launch_numbers(store) if votes else votes.keys()
        if begun:
            raise _overruled(launch, max(begun), requirement)
        return votes

    def is_enough(values: Mapping[int, dict[int, str]]) -> bool:
        if len(values) < majority_of(count):
            return False
        return _find_overruling(values.values(), count, count - len(values)) is None

    answers = ask(homes, question, deadline_s=deadline_s, member_of=run_id, is_enough=is_enough)
    if len(answers.values) < majority_of(count):
        raise homes_away(homes, answers, requirement)
    newest = _find_overruling(answers.values.values(), count, 0)
    if newest is not None:
        raise _overruled(launch, newest, requirement)
    if not is_enough(answers.values):
        away = errors_of(list(homes.values()), answers.values, answers.errors)
        names = ", ".join(homes[number].name for number in away)
        raise err(
            Code.HOMES_AWAY,
            f"another launch may have begun with the vote of {names}, which is away",
            where=homes[0].name,
            requirement=requirement,
            remedy="Wait until all homes answer, or start the training anew.",
        )


def _overruled(launch: int, newest: int, requirement: str) -> CkptError:
    return err(
        Code.FENCED,
        f"launch {newest} has the votes of the homes, and takes over from launch {launch}",
        where=f"{VOTES}/{launch_name(newest)}",
        requirement=requirement,
    )


def _find_overruling(
    seen: Iterable[Mapping[int, str]], count: int, unseen_count: int
) -> int | None:
    """Return the newest launch with the votes of a majority, some of which may be unseen; or None.

    A launch without a vote in the answers has no majority.

    Args:
        seen: numbers and nonces of the votes in each answer. An unreadable vote has an
            empty nonce, and counts for each launch of its number.
        count: number of homes.
        unseen_count: number of homes without an answer.
    """
    votes: dict[int, collections.Counter[str]] = {}
    for answer in seen:
        for number, nonce in answer.items():
            votes.setdefault(number, collections.Counter())[nonce] += 1
    found = []
    for number, nonces in votes.items():
        unread_count = nonces.pop("", 0)
        most = max(nonces.values(), default=0)
        if most + unread_count + unseen_count >= majority_of(count):
            found.append(number)
    return max(found, default=None)


def _nonce_of(store: Store, number: int) -> str:
    """Return the nonce of a vote; an empty text for an unreadable vote."""
    try:
        return read_vote(store, number).nonce
    except StoreError:
        raise
    except CkptError:
        return ""


def list_vote_numbers(store: Store) -> list[int]:
    """Return the numbers of the launches with a vote of this home, in ascending numerical order.

    A run with one home has no votes. Spec: REQ-RUN-065.
    """
    names = set(store.list_names(VOTES))
    if store.is_remote:  # a damaged network answer may look like a shorter listing
        names.update(store.list_names(VOTES))
    numbers = map(parse_launch_name, names)
    return sorted(number for number in numbers if number is not None)


def read_vote(store: Store, number: int) -> Vote:
    """Return a vote of a home. Raises: FormatError, IntegrityError."""
    path = f"{VOTES}/{launch_name(number)}"
    return Vote.parse(store.read(path, limit_nbytes=limits.JSON_NBYTES), where=path)


def cast(store: Store, vote: Vote) -> int:
    """Vote for a launch at a home.

    Returns: 0, or the number of the newest launch with a vote, if another launch has this number.
    Raises: StoreError.
    """
    try:
        create_once(store, vote.path, content=vote.dump())
    except CkptError as error:
        if error.code != Code.COMMIT_CONFLICT:
            raise
        return max(list_vote_numbers(store))
    store.sync(VOTES)
    return 0

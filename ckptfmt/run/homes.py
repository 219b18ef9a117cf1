"""The homes of a run: places that hold the whole run, opened and asked in threads.

A home may be away at any moment, so no other thread waits for a store.

Spec: REQ-RUN-065, REQ-RUN-070.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

from ckptfmt import limits
from ckptfmt.documents.run import HOME_NAME, HomeRecord, check_run_id
from ckptfmt.errors import CkptError, Code, StoreError, UnsupportedError, err
from ckptfmt.store import Address, LocalStore, address_of, local_path, open_address
from ckptfmt.store.protocol import Store, read_if_there

T = TypeVar("T")

#: Pause before a silent home is asked again, in seconds: the first, and the longest.
_PAUSE_MIN_S: Final = 0.1
_PAUSE_MAX_S: Final = 5.0
#: The detail of the error of a missing directory.
MISSING: Final = "the directory is missing"
#: The opened stores, by the text of their addresses.
_OPENED: Final[dict[str, Store]] = {}
#: The threads with questions, by the home's name, and the largest number of threads for a home.
_ASKING: Final[dict[str, list[threading.Thread]]] = {}
_ASKING_LOCK: Final = threading.Lock()
_ASKING_COUNT: Final = 32
#: The error of a place that isn't a home of the run.
STRANGER: Final = err(
    Code.FILE_MISSING, "it isn't a home of the run; if nothing there is needed, empty it"
)
#: Codes of errors despite a majority: the homes aren't homes of the same run, or a newer launch
#: has begun.
_FATAL: Final = frozenset({Code.RUN_MISMATCH, Code.HOMES_DIVERGED, Code.ARGUMENT, Code.FENCED})


@dataclasses.dataclass(frozen=True, slots=True)
class HomePlace:
    """A home of a run, opened only for a question: a home can't be opened while away.

    Attributes:
        address: address of the store, or a store without an address.
        name: name for messages.
        home_id: id of the home; empty as long as unknown.
    """

    address: Address | Store
    name: str
    home_id: str = ""

    @classmethod
    def of(cls, place: str | os.PathLike[str] | Store) -> Self:
        """Return the home at a directory, a URL, or a store rooted there."""
        if not isinstance(place, str | os.PathLike):
            return cls(address_of(place) or place, place.name)
        here = local_path(place)
        if here is None:
            return cls({"url": os.fspath(place)}, os.fspath(place))
        return cls(os.fsencode(os.path.abspath(here)), os.fspath(place))  # noqa: PTH100

    def open(self, *, makes: bool = False) -> Store:
        """Return the store for writing, opened at the first call in this process.

        Args:
            makes: whether to make a missing directory. A mount point may be missing, too.

        Raises: StoreError; IntegrityError(FILE_MISSING) for a missing directory.
        """
        if not isinstance(self.address, bytes | dict):
            return self.address
        if isinstance(self.address, bytes) and not makes:
            try:
                os.stat(self.address)  # noqa: PTH116
            except FileNotFoundError as error:
                raise err(Code.FILE_MISSING, MISSING, where=self.name) from error
            except OSError as error:
                raise err(Code.STORE_IO, str(error), where=self.name) from error
        store = _OPENED.get(self.key)
        if store is None:
            store = _OPENED[self.key] = open_address(self.address, writable=True)
        return store

    def open_unasked(self) -> Store:
        """Return a store for the name alone, without a look at the place."""
        if isinstance(self.address, bytes):
            return LocalStore(os.fsdecode(self.address), writable=False)
        if isinstance(self.address, dict):
            return open_address(self.address, writable=False)
        return self.address

    @property
    def key(self) -> str:
        """A text that distinguishes the homes of this process."""
        return repr(self.address) if self.has_address else str(id(self.address))

    @property
    def has_address(self) -> bool:
        """Whether any process of this machine can open the home."""
        return isinstance(self.address, bytes | dict)


#: The queue of answers: the number of a home, and its answer or error.
_Told: TypeAlias = "queue.SimpleQueue[tuple[int, T | None, BaseException | None]]"


@dataclasses.dataclass(slots=True)
class Answers(Generic[T]):
    """The answers of homes to a question, by the number of the home.

    Attributes:
        values: the answers.
        errors: the last error of each home without an answer so far.
    """

    values: dict[int, T] = dataclasses.field(default_factory=dict)
    errors: dict[int, CkptError] = dataclasses.field(default_factory=dict)


def ask(
    homes: Mapping[int, HomePlace],
    question: Callable[[Store], T],
    *,
    deadline_s: float,
    member_of: str = "",
    is_enough: Callable[[Mapping[int, T]], bool] = lambda _: False,
    grace_s: float | None = None,
) -> Answers[T]:
    """Ask several homes at once, and again after a StoreError, until all answers or the deadline.

    A home with damaged documents has no answer either: a majority without damage goes on.

    Args:
        homes: homes by their numbers.
        question: called with the store of each home, in a thread of the home.
        deadline_s: longest wait in seconds. A home without an answer by then is away.
        member_of: id of the run: only a home of the run, with the known id, has an answer. Empty
            to ask any place.
        is_enough: whether the answers so far are enough to end the wait.
        grace_s: longest wait after the answers of a majority, in seconds; None for the deadline.

    Raises: errors of `_FATAL`; exceptions except CkptError.
    """
    told: _Told[T] = queue.SimpleQueue()
    end_s = time.monotonic() + deadline_s
    is_over = threading.Event()
    answers: Answers[T] = Answers()
    final: set[int] = set()

    def ask_member(home: HomePlace) -> T:
        store = home.open()
        if member_of:
            check_member(store, member_of, home.home_id)
        return question(store)

    for number, home in homes.items():
        keep_asking = functools.partial(
            _keep_asking, functools.partial(ask_member, home), end_s, is_over, told, number
        )
        if not _start_asking(home, keep_asking):
            answers.errors[number] = err(Code.STORE_NO_ANSWER, "earlier requests have no answer")
            final.add(number)
    try:
        while len(final) < len(homes) and not is_enough(answers.values):
            try:
                number, value, error = told.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                break
            if error is None:
                answers.errors.pop(number, None)
                answers.values[number] = value  # type: ignore[assignment]
                final.add(number)
                if grace_s is not None and len(answers.values) == majority_of(len(homes)):
                    end_s = min(end_s, time.monotonic() + grace_s)
                continue
            if not isinstance(error, CkptError):
                raise error
            if error.code in _FATAL or isinstance(error, UnsupportedError):
                raise error if error.code == Code.FENCED else error.below(homes[number].name)
            answers.errors[number] = error
            if not isinstance(error, StoreError):
                final.add(number)
    finally:
        is_over.set()
    return answers


def _start_asking(home: HomePlace, keep_asking: Callable[[], None]) -> bool:
    """Ask a home in a thread; return False if too many questions to the home hang in threads."""
    with _ASKING_LOCK:
        threads = _ASKING.setdefault(home.key, [])
        threads[:] = [thread for thread in threads if thread.is_alive()]
        if len(threads) >= _ASKING_COUNT:
            return False
        # A daemon: a request to an unresponsive store may take minutes.
        thread = threading.Thread(target=keep_asking, name="ckptfmt-home", daemon=True)
        thread.start()
        threads.append(thread)
        return True


def _keep_asking(
    question: Callable[[], T],
    end_s: float,
    is_over: threading.Event,
    told: _Told[T],
    number: int,
) -> None:
    """Ask a home until an answer or the end of the time; every error is told."""
    pause_s = _PAUSE_MIN_S
    while True:
        try:
            value = question()
        except BaseException as error:  # noqa: BLE001
            told.put((number, None, error))
            if not isinstance(error, StoreError) or time.monotonic() + pause_s >= end_s:
                return
        else:
            told.put((number, value, None))
            return
        if is_over.wait(pause_s):
            return
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def majority_of(count: int) -> int:
    """Return the smallest majority of so many homes.

    >>> majority_of(3), majority_of(4), majority_of(5)
    (2, 3, 3)
    """
    return count // 2 + 1


def read_home(store: Store) -> HomeRecord | None:
    """Return the identity of a home; None at a place without one.

    Raises: FormatError, IntegrityError.
    """
    content = read_if_there(store, HOME_NAME, limit_nbytes=limits.JSON_NBYTES)
    return None if content is None else HomeRecord.parse(content)


def check_member(store: Store, run_id: str, home_id: str) -> None:
    """Raise unless a place is the home of a run with this id.

    Another place, such as an empty mount point, knows no votes.

    Raises: IntegrityError(FILE_MISSING); FormatError(RUN_MISMATCH). Spec: REQ-RUN-070.
    """
    home = read_home(store)
    if home is None or home.home != home_id:
        raise err(Code.FILE_MISSING, "the place isn't this home of the run", where=HOME_NAME)
    check_run_id(run_id, home.run_id, HOME_NAME)


def create_home(store: Store, run_id: str) -> str:
    """Make a place a home, unless it is one, and return the id of the home.

    Raises: StoreError; FormatError(RUN_MISMATCH).
    """
    home = HomeRecord(run_id=run_id, home=secrets.token_hex(16))
    try:
        store.create(HOME_NAME, [home.dump()])
    except CkptError as error:
        if error.code not in (Code.STORE_EXISTS, Code.STORE_NO_ANSWER):
            raise
    store.sync("")
    found = read_home(store)
    if found is None:
        raise err(Code.STORE_IO, "the home's identity was just created, and isn't there")
    check_run_id(run_id, found.run_id, HOME_NAME)
    return found.home


def errors_of(
    homes: Sequence[HomePlace], answered: Container[int], errors: Mapping[int, CkptError]
) -> dict[int, CkptError]:
    """Return the error of each home without an answer."""
    silent = err(Code.STORE_NO_ANSWER, "no answer in time")
    return {
        number: errors.get(number, silent) for number in range(len(homes)) if number not in answered
    }


def homes_away(
    homes: Mapping[int, HomePlace],
    answers: Answers[Any],
    requirement: str,
    *,
    remedy: str | None = None,
) -> CkptError:
    """Return the error of too few homes with an answer."""
    errors = errors_of(list(homes.values()), answers.values, answers.errors)
    told = "; ".join(f"{homes[number].name}: {error.detail}" for number, error in errors.items())
    count = len(homes) - len(errors)
    return err(
        Code.HOMES_AWAY,
        f"{count} of {len(homes)} homes answer, and {majority_of(len(homes))} are needed: {told}",
        where=homes[0].name,
        requirement=requirement,
        remedy=remedy,
    )

"""A campaign of faults: each request of each scenario of a run meets each fault, and the promises are checked after it.

A scenario is played once undisturbed, which tells its requests: operation and kind of file. Each of
them is then met by each fault that fits, once or for good. Afterwards the proxy is out of the way,
and whoever looks at the server sees:

1. What was acknowledged is there, whole, bit for bit.
2. What has a manifest is whole, acknowledged or not: nothing is half visible.
3. The scenario ended, and if it failed then by an error of ckptfmt.
4. The next save works; the next launch resumes from the newest checkpoint that was acknowledged, or
from a newer one.
5. After a clean-up there is no object that nothing refers to, and no upload that nobody ended.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import random
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias
from unittest import mock

import numpy as np
import obstore

import ckptfmt
from ckptfmt.box import Box
from ckptfmt.commit.decision import commit, decide, read_register
from ckptfmt.commit.lone import remove_alone
from ckptfmt.documents.manifest import MANIFEST_NAME, Manifest, Tombstone, checkpoint_name
from ckptfmt.documents.run import LABELS_FOLDER, LAUNCHES, RUN_NAME
from ckptfmt.errors import CkptError
from ckptfmt.features import LABELS
from ckptfmt.read.files import CheckpointFiles, OpenPart
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.report import Report
from ckptfmt.read.verified_files import index_file, part_files, stored_files
from ckptfmt.read.verify import verify_checkpoint
from ckptfmt.run.catalog import Run
from ckptfmt.run.lineage import begin_launch, list_checkpoints, open_run, read_run
from ckptfmt.run.mirror import mirror_run
from ckptfmt.run.retention import Retention, clean_up
from ckptfmt.run.scrub import scrub_run
from ckptfmt.run.witness import WITNESS
from ckptfmt.store import leases, objects
from ckptfmt.store.leases import Leases
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.objects import ObjectStore
from ckptfmt.store.protocol import TEMPORARY_PREFIX
from ckptfmt.write.writer import tell_failure, write_part
from tests.builders import leaf, origin, snapshot, tensor
from tests.s3.fixtures import Bucket
from tests.s3.proxy import Fault, Proxy, Rule

#: How long a scenario may take: a guard against hanging, and no measure.
GUARD_S: Final = 120.0
#: How long writers wait for each other.
WAIT_S: Final = 1.0
#: How many numbers the weights of most scenarios have.
COUNT: Final = 3000
#: Of the stores that look at what is left: leases that a fault left there run out soon, or have run
#: out.
SHORT_TERM_S: Final = 0.3

#: Kinds of files and listings: the first pattern that a key fits tells the kind.
KINDS: Final = {
    "lease listing": "*/.tmp-leases/",
    "probe": "*/home/.tmp-leases/-*",
    "clock": "*/.tmp-leases/-*",
    "lease": "*/.tmp-leases/[!-]*",
    "launches": "*/launches/",
    "labels": "*/labels/",
    "parts": "*/parts/",
    "run record": "*/run.json",
    "launch record": "*/launches/*.json",
    "labels record": "*/labels/*.json",
    "register": "*/manifest.json",
    "pins": "*.pins.json",
    "failure record": "*.failure.json",
    "part": "*/parts/*.msgpack",
    "index": "*/index-*.msgpack",
    "shard": "*.safetensors",
    "pack": "*.pack",
    "condemnation": "*/condemned-*",
    "mirror directory": "*/other/",
    "run directory": "*/home/",
    "lone directory": "*/lone/",
    "checkpoint directory": "*/",
}
READS: Final = frozenset({"GetObject", "HeadObject", "ListObjectsV2"})
#: What damages an answer without ending it.
DAMAGE: Final = frozenset({"CORRUPT", "TRUNCATE", "ERROR_IN_200"})
_STATUSES: Final = (409, 412, 429, 500, 503)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Combination:
    """One fault at one step.

    Attributes:
        scenario, operation, kind: the step.
        fault: name of the `Fault`; of an answered status with the number behind it.
        when: which of the requests of this kind meet the fault: the "first", the "last" or "all".
        lands: when a request that is late arrives: "soon" is before the next launch, "late" after
            its clean-up.
    """

    scenario: str
    operation: str
    kind: str
    fault: str
    when: str
    lands: str = "soon"

    def rule(self, count: int) -> Rule:
        """Return the rule, given how many such requests there are in all."""
        name, _, status = self.fault.partition(" ")
        return Rule(
            fault=Fault[name],
            operation=self.operation,
            key=KINDS[self.kind],
            nth=max(1, count) if self.when == "last" else 1,
            count=None if self.when == "all" else 1,
            status=int(status or 503),
            delay_s=0.02,
        )

    def __str__(self) -> str:
        late = f", landing {self.lands}" if self.fault == "LATE" else ""
        return f"{self.scenario}: {self.operation} of {self.kind}: {self.fault}, {self.when}{late}"


@dataclasses.dataclass(slots=True)
class Outcome:
    """What a combination led to.

    Attributes:
        met: whether a request met the fault.
        said: the code of the error with which the scenario ended, or "ok".
        wrongs: promises that were broken, in words.
    """

    met: bool
    said: str
    wrongs: list[str]


def kind_of(key: str) -> str:
    """Return of what kind a key is."""
    return next(
        (kind for kind, pattern in KINDS.items() if fnmatch.fnmatchcase(key, pattern)), "other"
    )


def faults_of(operation: str, kind: str) -> list[str]:
    """Return the faults that fit a request."""
    if operation in READS:
        found = [
            "DROP_REQUEST",
            "CUT_DOWNLOAD",
            "DELAY",
            *(f"STATUS {status}" for status in (429, 500, 503)),
        ]
        if operation != "HeadObject":
            # A listing has no digest: what changes it in transit is TLS's to find.
            found += ["TRUNCATE", *(["CORRUPT"] if operation == "GetObject" else [])]
        if operation == "GetObject" or kind == "run directory":
            # obstore takes such a listing for one of nothing, and who isn't seen to hold a file
            # isn't waited for.
            found.append("ERROR_IN_200")
        return found
    found = [
        "DROP_REQUEST",
        "DROP_ANSWER",
        "LATE",
        "DUPLICATE",
        "DELAY",
        "STATUS_AFTER 500",
        "STATUS_AFTER 503",
    ]
    found += [f"STATUS {status}" for status in _STATUSES]
    if operation in ("PutObject", "UploadPart"):
        found.append("CUT_UPLOAD")
    if operation in ("CompleteMultipartUpload", "DeleteObjects"):
        found.append("ERROR_IN_200")
    if operation == "UploadPart":
        found.append("LOSE_ACKNOWLEDGED")
    if kind == "probe" and operation == "PutObject":
        found.append("UNCONDITIONAL")
    return found


# --- what is saved --------------------------------------------------------------------------------


def weights_of(step: int, count: int) -> Any:
    """Return the weights that a step has."""
    weights = np.arange(count, dtype=np.float32)
    weights[::97] += step
    return weights


class Training:
    """A training whose state follows from the step."""

    def __init__(self, count: int = COUNT) -> None:
        self.weights = {"w": weights_of(0, count)}
        self.data = {"position": 0}

    @property
    def state(self) -> Any:
        """What is saved and restored."""
        return ckptfmt.State(weights=self.weights, data=self.data)

    def go_to(self, step: int) -> None:
        """Train until a step."""
        self.weights["w"][:] = weights_of(step, len(self.weights["w"]))
        self.data["position"] = step

    def is_at(self, step: int) -> bool:
        """Return whether the live state is that of a step."""
        return (
            self.data["position"] == step
            and self.weights["w"].tobytes() == weights_of(step, len(self.weights["w"])).tobytes()
        )


class Stage:
    """Two places on a server, ``home`` and ``other``, which a scenario sees through the proxy.

    Attributes:
        home, other: the stores, through the proxy.
        acknowledged: of each place, the checkpoints whose save or copy was said to have succeeded,
            and their steps.
        retirable: what may have been retired by now.
        wrongs: promises that were broken, in words.
        begun: the launch that looked at what is left.
        count: how many numbers the weights have.
        disturbed: operation and key of the requests that may have met a fault; None as long as all
            may.
    """

    def __init__(self, bucket: Bucket, proxy: Proxy, prefix: str) -> None:
        self.bucket, self.proxy, self.prefix = bucket, proxy, prefix
        self.acknowledged: dict[str, dict[str, int]] = {"home": {}, "other": {}}
        self.retirable: set[str] = set()
        self.wrongs: list[str] = []
        self.begun = 0
        self.count = COUNT
        self.disturbed: list[tuple[str, str]] | None = None

    @property
    def home(self) -> ObjectStore:
        """The run, through the proxy."""
        return self.open("home", self.proxy)

    @property
    def other(self) -> ObjectStore:
        """Where its mirror is, through the proxy."""
        return self.open("other", self.proxy)

    def open(
        self, place: str, proxy: Proxy | None = None, *, term_s: float | None = None
    ) -> ObjectStore:
        """Return a place as a store, with short pauses; directly unless a proxy is given."""
        config = (self.bucket if proxy is None else self.bucket.through(proxy)).endpoint.options
        backoff = {
            "init_backoff": timedelta(milliseconds=1),
            "max_backoff": timedelta(milliseconds=10),
            "base": 2,
        }
        store = ObjectStore(
            f"s3://{self.bucket.name}/{self.prefix}/{place}",
            writable=True,
            client_options={**config.pop("client_options"), "timeout": "20s"},
            config=config,
            retry_config={"max_retries": 2, "backoff": backoff},
        )
        if term_s is not None:
            store._leases = Leases(store._lease_objects, writable=True, term_s=term_s)
        return store

    def look(self, place: str) -> tuple[set[str], MemoryStore]:
        """Return the keys of everything that is in a place, and a copy of what isn't of a store's own."""
        store = self.bucket.store(f"{self.prefix}/{place}")
        keys = {entry["path"] for batch in obstore.list(store) for entry in batch}
        shown = {key for key in keys if f"/{TEMPORARY_PREFIX}" not in f"/{key}"}
        return keys, MemoryStore.from_snapshot(
            {key: bytes(obstore.get(store, key).bytes()) for key in shown}
        )

    def put_template(self, place: str, files: dict[str, bytes]) -> None:
        """Put files where a place is."""
        store = self.bucket.store(f"{self.prefix}/{place}")
        for path, content in files.items():
            obstore.put(store, path, content, use_multipart=False)

    @contextlib.contextmanager
    def checkpointer(self, training: Training, store: Any = None, **options: Any) -> Iterator[Any]:
        """Begin a launch, ready to save."""
        options = {"saver": "thread", "deadline_s": 8.0, **options}
        with ckptfmt.Checkpointer(store or self.home, training.state, **options) as checkpointer:
            checkpointer.restore_rng()
            yield checkpointer

    def train(self, checkpointer: Any, training: Training, step: int) -> None:
        """Save a step, and wait until it is acknowledged."""
        training.go_to(step)
        handle = checkpointer.save(step=step).on_failed(lambda _: None)
        try:
            handle.wait(timeout_s=GUARD_S)
            self.acknowledged["home"][checkpoint_name(step, checkpointer.launch.launch)] = step
        finally:
            handle.wait_over(GUARD_S)  # with what is cleaned up behind it

    def check_lone(self, *, must: bool) -> None:
        """Check that a checkpoint outside of a run is whole, if there is one; whether there must be one."""
        _, found = self.look("lone")
        is_there = isinstance(read_register(found), Manifest)
        if is_there:
            self.wrongs += [f"the lone checkpoint: {one}" for one in _problems(found, 1)]
        elif must:
            self.wrongs.append("the lone checkpoint was acknowledged, and isn't there")

    @contextlib.contextmanager
    def calm(self) -> Iterator[None]:
        """Let no more faults happen; what fails in the context now is a broken promise."""
        self.proxy.calm()
        self.disturbed = list(self.proxy.requests)
        with self.no_failure("after the fault"):
            yield

    @contextlib.contextmanager
    def no_failure(self, where: str) -> Iterator[None]:
        """Note a failure of the context as a broken promise."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            frames = "".join(traceback.format_tb(error.__traceback__)[-3:])
            self.wrongs.append(f"{where}: {type(error).__name__}: {error}\n{frames}")


Act: TypeAlias = Callable[[Stage], Iterator[None]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Something that a run does.

    Attributes:
        name: of it.
        act: does it; what comes before its ``yield`` isn't disturbed.
        template: makes what is there before, in memory.
    """

    name: str
    act: Act
    template: Callable[[Stage, MemoryStore], None] | None = None


SCENARIOS: Final[dict[str, Scenario]] = {}


def _scenario(template: Callable[[Stage, MemoryStore], None] | None = None) -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        name = act.__name__.removeprefix("_").replace("_", " ")
        SCENARIOS[name] = Scenario(name=name, act=act, template=template)
        return act

    return add


# --- what is there before -------------------------------------------------------------------------


def _two_full(stage: Stage, store: MemoryStore) -> None:
    training = Training()
    with stage.checkpointer(training, store) as checkpointer:
        for step in (1, 2):
            stage.train(checkpointer, training, step)


def _full_and_delta(stage: Stage, store: MemoryStore) -> None:
    training = Training()
    with stage.checkpointer(training, store, delta="smallest") as checkpointer:
        for step in (1, 2):
            stage.train(checkpointer, training, step)


def _unfinished(stage: Stage, store: MemoryStore) -> None:
    """A save that was killed before its commit, and a clean-up that was killed behind its tombstone."""
    training = Training()
    with stage.checkpointer(training, store) as checkpointer:
        for step in (1, 2, 3):
            stage.train(checkpointer, training, step)
    first, last = checkpoint_name(1, 1), checkpoint_name(3, 1)
    register = read_register(store.at(first))
    assert isinstance(register, Manifest)
    tombstone = Tombstone(
        run_id=register.origin.run_id, launch=1, step=1, manifest_digest=register.digest
    )
    store.at(first).replace(MANIFEST_NAME, tombstone.dump())
    store.at(last).delete(MANIFEST_NAME)
    del stage.acknowledged["home"][first], stage.acknowledged["home"][last]


def at_once(*actions: Callable[[], object]) -> None:
    """Call them, each in a thread; raise what one of them raised."""
    errors: list[BaseException] = []

    def call(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=call, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, CkptError))


# --- scenarios ------------------------------------------------------------------------------------


@_scenario()
def _open(stage: Stage) -> Iterator[None]:
    """Try out a server that this process doesn't know yet, and create a first object."""
    objects._PROVEN.clear()
    yield
    try:
        open_run(stage.home, writer_features=(LABELS,))
    finally:
        objects._PROVEN.clear()


@_scenario()
def _first_save(stage: Stage) -> Iterator[None]:
    """From an empty place on: the run's record, the first launch, the first checkpoint."""
    training = Training()
    stage.open("elsewhere", stage.proxy)  # which tries out the server
    yield
    with stage.checkpointer(training) as checkpointer:
        stage.train(checkpointer, training, 1)


@_scenario()
def _large_save(stage: Stage) -> Iterator[None]:
    """A shard that goes up in parts; and a small save after it."""
    stage.count = 11 << 18  # 11 MiB, in three parts
    training = Training(stage.count)
    with stage.checkpointer(training) as checkpointer:
        yield
        try:
            stage.train(checkpointer, training, 1)
        finally:
            with stage.calm():
                stage.train(checkpointer, training, 2)


@_scenario()
def _delta(stage: Stage) -> Iterator[None]:
    """A delta, with its pins; and another, whatever became of it."""
    training = Training()
    with stage.checkpointer(training, delta="smallest") as checkpointer:
        stage.train(checkpointer, training, 1)
        yield
        try:
            stage.train(checkpointer, training, 2)
        finally:
            with stage.calm():
                stage.train(checkpointer, training, 3)


@_scenario()
def _two_writers(stage: Stage) -> Iterator[None]:
    """Two writers, each with its part; the first one commits, the other waits; and a second committer beside them."""
    run = open_run(stage.home, writer_features=(LABELS,))
    launch, _ = begin_launch(stage.home, run)
    made = origin(
        run_id=run.run_id,
        launch=launch.launch,
        nonce=launch.nonce,
        step=1,
        attempt=secrets.token_hex(8),
        writer_count=2,
    )
    name = checkpoint_name(1, launch.launch)
    yield

    def write(writer: int) -> None:
        place = stage.home.at(name)
        held = Box((writer * COUNT // 2,), (COUNT // 2,))
        content = snapshot(
            tensor("w", weights_of(1, COUNT), boxes=(held,)),
            leaves=[leaf("data", {"position": 1})],
        )
        try:
            write_part(place, content, made, writer=writer)
            decide(place, made, writer=writer, deadline_s=WAIT_S)
        except CkptError as error:
            tell_failure(place, made, writer, error)
            raise
        stage.acknowledged["home"][name] = 1

    def commit_too() -> None:
        commit(stage.home.at(name), made, deadline_s=WAIT_S)
        stage.acknowledged["home"][name] = 1

    at_once(functools.partial(write, 0), functools.partial(write, 1), commit_too)


@_scenario(_two_full)
def _retire(stage: Stage) -> Iterator[None]:
    """Retention lets go of the older one of two."""
    store = stage.home
    run = read_run(store)
    assert run is not None
    yield
    stage.retirable.add(checkpoint_name(1, 1))
    clean_up(store, run, launch=1, retention=Retention(newest=1))


@_scenario(_two_full)
def _save_that_retires(stage: Stage) -> Iterator[None]:
    """A save with ``keep=1``: what goes wrong when the older ones go is no failure of the save."""
    training = Training()
    with stage.checkpointer(training, keep=1) as checkpointer:
        yield
        stage.retirable |= set(stage.acknowledged["home"])
        try:
            stage.train(checkpointer, training, 3)
        finally:
            with stage.calm():
                stage.retirable |= set(stage.acknowledged["home"])
                stage.train(checkpointer, training, 4)


@_scenario(_unfinished)
def _abort(stage: Stage) -> Iterator[None]:
    """Clean up what a killed save left, and a clean-up that was killed."""
    store = stage.home
    run = read_run(store)
    assert run is not None
    launch, checkpoint = begin_launch(store, run)
    assert checkpoint is not None
    checkpoint.close()
    yield
    clean_up(store, run, launch=launch.launch)


@_scenario(_two_full)
def _pin(stage: Stage) -> Iterator[None]:
    """Labels, a pin, and a clean-up that leaves what is pinned."""
    run = Run(stage.home)
    name = checkpoint_name(1, 1)
    yield
    run.set_metrics(name, {"loss": 1.5})
    run.pin(name)
    with stage.calm(), contextlib.suppress(StopIteration):
        found = Run(stage.home).find(name)
        if not found.pinned or found.metrics != {"loss": 1.5}:
            stage.wrongs.append(f"the pin was acknowledged, and isn't there: {found}")


@_scenario(_two_full)
def _roll_back(stage: Stage) -> Iterator[None]:
    """A launch from an older checkpoint, by hand."""
    store = stage.home
    run = read_run(store)
    assert run is not None
    stage.acknowledged["home"] = {
        checkpoint_name(1, 1): 1
    }  # the run goes on from there, or from the newer one
    yield
    _, checkpoint = begin_launch(store, run, choose=checkpoint_name(1, 1))
    assert checkpoint is not None
    checkpoint.close()


@_scenario(_full_and_delta)
def _mirror(stage: Stage) -> Iterator[None]:
    """A copy of a full checkpoint and a delta of it."""
    home, other = stage.home, stage.other
    yield
    try:
        report = mirror_run(home, other)
        if report.current and not report.problems:
            stage.acknowledged["other"] = dict(stage.acknowledged["home"])
    finally:
        with stage.calm():
            again = mirror_run(home, other)
            if not again.current or again.problems:
                stage.wrongs.append(f"the mirror isn't whole: {again}")
            stage.acknowledged["other"] = dict(stage.acknowledged["home"])


@_scenario(_two_full)
def _scrub(stage: Stage) -> Iterator[None]:
    """A shard and a register that are damaged at home are mended from the mirror."""
    whole = stage.look("home")[1].snapshot()
    stage.put_template("other", whole)
    stage.acknowledged["other"] = dict(stage.acknowledged["home"])
    shard = next(
        path for path in whole if "step-00000001" in path and path.endswith(".safetensors")
    )
    damaged = {
        path: whole[path][:-9] + b"?" + whole[path][-8:]
        for path in (shard, "step-00000002-l0001/manifest.json")
    }
    stage.put_template("home", damaged)
    home, other = stage.home, stage.other
    yield
    try:
        scrub_run([home, other])
    finally:
        with stage.calm():
            scrub_run([home, other])


@_scenario(_two_full)
def _load(stage: Stage) -> Iterator[None]:
    """Load what the run goes on from: all of it as it was saved, or an error."""
    training = Training()
    yield
    ckptfmt.load(stage.home, training.state)
    if not training.is_at(2):
        stage.wrongs.append(f"it loaded something else: {training.data}")


@_scenario()
def _lone(stage: Stage) -> Iterator[None]:
    """A checkpoint outside of a run, saved and removed."""
    training = Training()
    training.go_to(1)
    store = stage.open("lone", stage.proxy)
    yield
    saved = False
    try:
        ckptfmt.save(store, training.state, step=1, deadline_s=WAIT_S)
        saved = True
        stage.check_lone(must=True)
        remove_alone(store, deadline_s=WAIT_S)
    finally:
        with stage.calm():
            stage.check_lone(must=False)
            if saved or isinstance(read_register(store), Manifest):
                remove_alone(stage.open("lone", term_s=0.0), deadline_s=WAIT_S)
                stage.check_lone(must=False)


@_scenario()
def _lease(stage: Stage) -> Iterator[None]:
    """Hold a file for some renewals, and look from elsewhere whether it is held."""
    name = "0001-00000-0123456789abcdef"
    with mock.patch.object(leases, "_RENEWALS", 100), mock.patch.object(leases, "_REPEATS", 100):
        store, elsewhere = (stage.open("home", stage.proxy, term_s=5.0) for _ in range(2))
        yield
        with store.hold(f"savers/{name}"):
            if elsewhere.list_held("savers") != [name]:
                stage.wrongs.append("it isn't held")
            time.sleep(0.12)  # renewals are due after 0.05 s each
            if elsewhere.list_held("savers") != [name]:
                stage.wrongs.append("it isn't held any more")


@_scenario()
def _save(stage: Stage) -> Iterator[None]:
    """A checkpoint of a run that goes on; and one more, whatever became of it."""
    training = Training()
    with stage.checkpointer(training) as checkpointer:
        stage.train(checkpointer, training, 1)
        yield
        try:
            stage.train(checkpointer, training, 2)
        finally:
            with stage.calm():
                stage.train(checkpointer, training, 3)


@_scenario(_two_full)
def _resume(stage: Stage) -> Iterator[None]:
    """Wait for savers, choose, verify, take a launch, load."""
    training = Training()
    yield
    with stage.checkpointer(training) as checkpointer:
        if checkpointer.step != 2 or not training.is_at(2):
            stage.wrongs.append(f"it resumed from {checkpointer.step}: {checkpointer.passed_over}")


# --- one combination ------------------------------------------------------------------------------


class Campaign:
    """Plays scenarios on a bucket.

    Attributes:
        met: combinations whose fault met a request.
        said: how often the scenarios ended with each code.
        uploads: for each combination after which an upload was left that nobody ended, how many.
    """

    def __init__(self, bucket: Bucket, proxy: Proxy) -> None:
        self._bucket, self._proxy = bucket, proxy
        self._client = bucket.endpoint.client()
        self._numbers = itertools.count()
        self._templates: dict[str, tuple[dict[str, bytes], dict[str, int]]] = {}
        self._counts: dict[str, collections.Counter[tuple[str, str]]] = {}
        self.met: set[Combination] = set()
        self.said: collections.Counter[str] = collections.Counter()
        self.uploads: dict[Combination, int] = {}

    def combinations(self, scenarios: Sequence[str] = ()) -> list[Combination]:
        """Return all that fit what the scenarios ask of the server."""
        found = []
        for name in scenarios or SCENARIOS:
            for (operation, kind), count in sorted(self.counts_of(name).items()):
                whens = ("first", "last", "all") if count > 1 else ("first", "all")
                for fault, when in itertools.product(faults_of(operation, kind), whens):
                    if kind == "labels record" and when == "all" and fault in DAMAGE:
                        continue  # that record is lost, and the next one is made without it (REQ-RUN-024)
                    if (name, operation, fault) == ("scrub", "DeleteObjects", "LATE"):
                        continue  # it removes what was written anew: the next scrub finds that (page 20)
                    lands = ("soon", "late") if fault == "LATE" else ("soon",)
                    found += [Combination(name, operation, kind, fault, when, one) for one in lands]
        return found

    def sample(self, seed: int, count: int, scenarios: Sequence[str] = ()) -> list[Combination]:
        """Return some of all, in an order that chance says, of each scenario and fault about as many."""
        chance = random.Random(seed)
        groups: dict[tuple[str, str], list[Combination]] = {}
        for one in self.combinations(scenarios):
            groups.setdefault((one.scenario, one.fault), []).append(one)
        for group in groups.values():
            chance.shuffle(group)
        turns = itertools.zip_longest(*groups.values())
        found = [one for turn in turns for one in chance.sample(turn, len(turn)) if one is not None]
        return found[:count]

    def counts_of(self, name: str) -> collections.Counter[tuple[str, str]]:
        """Return how often a scenario asks for what, undisturbed: operation and kind."""
        if name not in self._counts:
            stage = self._stage(SCENARIOS[name])
            said = self._act(SCENARIOS[name], stage, ())
            requests = self._proxy.requests if stage.disturbed is None else stage.disturbed
            counts = collections.Counter((operation, kind_of(key)) for operation, key in requests)
            self._finish(stage, None)
            assert (said, stage.wrongs) == ("ok", []), (name, said, stage.wrongs)
            self._counts[name] = counts
        return self._counts[name]

    def play(self, one: Combination) -> Outcome:
        """Play one combination, and check the promises."""
        scenario = SCENARIOS[one.scenario]
        stage = self._stage(scenario)
        said = self._act(
            scenario, stage, (one.rule(self.counts_of(one.scenario)[one.operation, one.kind]),)
        )
        met = self._proxy.faults[Fault[one.fault.partition(" ")[0]]] > 0
        self._proxy.calm()
        self._finish(stage, one)
        if met:
            self.met.add(one)
            self.said[said] += 1
        return Outcome(met, said, stage.wrongs)

    def _stage(self, scenario: Scenario) -> Stage:
        """Make a place for a scenario, and put there what it begins with."""
        self._proxy.script()
        stage = Stage(self._bucket, self._proxy, f"c{next(self._numbers):05d}")
        if scenario.template is not None:
            if scenario.name not in self._templates:
                store = MemoryStore()
                scenario.template(stage, store)
                self._templates[scenario.name] = store.snapshot(), dict(stage.acknowledged["home"])
            files, acknowledged = self._templates[scenario.name]
            stage.put_template("home", files)
            stage.acknowledged["home"] = dict(acknowledged)
        return stage

    def _act(self, scenario: Scenario, stage: Stage, rules: Sequence[Rule]) -> str:
        """Play a scenario; return the code with which it ended, or "ok"."""
        said = ["hangs"]

        def play() -> None:
            steps = scenario.act(stage)
            try:
                next(steps)
            except BaseException as error:  # noqa: BLE001
                said[0] = f"can't begin: {error!r}"
                return
            self._proxy.script(*rules)
            try:
                next(steps, None)
                said[0] = "ok"
            except CkptError as error:
                said[0] = str(error.code)
                if "testsecret" in str(error):
                    stage.wrongs.append("the error has a secret in it")
            except BaseException as error:  # noqa: BLE001
                said[0] = type(error).__name__
                stage.wrongs.append(
                    f"no error of ckptfmt: {''.join(traceback.format_exception(error))}"
                )

        thread = threading.Thread(target=play, name="test-scenario", daemon=True)
        thread.start()
        thread.join(GUARD_S)
        if said[0].startswith(("hangs", "can't begin")):
            stage.wrongs.append(said[0])
        return said[0]

    def _finish(self, stage: Stage, one: Combination | None) -> None:
        """Check what is there; let late requests land; begin the next launch, save, clean up; check again."""
        _check(stage, "home")
        _check(stage, "other")
        if (one is None or one.lands == "soon") and self._proxy.land():
            _check(stage, "home")
            _check(stage, "other")
        _recover(stage)
        if one is not None and one.lands == "late" and self._proxy.land():
            # A late repair may bring a register back whose files were retired: the next clean-up
            # retires it (page 70).
            if (one.scenario, one.operation, one.kind) != ("scrub", "PutObject", "register"):
                _check(stage, "home")
            _collect(stage)
            _check(stage, "home")
        uploads = self._client.list_multipart_uploads(
            Bucket=self._bucket.name, Prefix=f"{stage.prefix}/"
        )
        left = len(uploads.get("Uploads", ()))
        if left and one is not None:
            self.uploads[one] = left
            if one.operation != "CreateMultipartUpload":  # else nobody knows its id
                stage.wrongs.append("an upload is left that nobody ended")


def _check(stage: Stage, place: str) -> None:
    """Check that all is whole that is visible, and that all is there that was acknowledged."""
    _, store = stage.look(place)
    registers = {}
    with stage.no_failure(f"looking at {place}"):
        for entry in list_checkpoints(store):
            registers[entry.name] = entry.register
            if isinstance(entry.register, CkptError):
                stage.wrongs.append(
                    f"{place}: the register of {entry.name} can't be read: {entry.register}"
                )
            if isinstance(entry.register, Manifest):
                stage.wrongs += [
                    f"{place}: {entry.name}: {one}"
                    for one in _problems(store.at(entry.name), entry.step)
                ]
    for name in stage.acknowledged[place]:
        register = registers.get(name)
        is_retired = isinstance(register, Tombstone) and name in stage.retirable
        if not is_retired and not isinstance(register, Manifest):
            stage.wrongs.append(f"{place}: {name} was acknowledged, and here is {register!r}")


def _problems(store: MemoryStore, step: int) -> list[str]:
    """Return what is wrong with a checkpoint that is said to be that of a step."""
    report = Report(target="x", kind="checkpoint")
    verify_checkpoint(store, report)
    if report.violations:
        return [str(one) for one in report.violations]
    with contextlib.closing(Checkpoint(store)) as checkpoint:
        weights = checkpoint.read("weights", "w")
        found = (
            checkpoint.leaf("data")["position"],
            weights.tobytes() == weights_of(step, len(weights)).tobytes(),
        )
    return [] if found == (step, True) else [f"it holds something else: {found}"]


def _recover(stage: Stage) -> None:
    """Begin the next launch: it resumes from the newest that was acknowledged or is there, saves, and cleans up."""
    newest = max(stage.acknowledged["home"].values(), default=0)
    training = Training(stage.count)
    store = stage.open("home", term_s=SHORT_TERM_S)
    with (
        stage.no_failure("the next launch"),
        stage.checkpointer(training, store, keep=1) as checkpointer,
    ):
        step = checkpointer.step
        if step < newest or not training.is_at(step):
            stage.wrongs.append(
                f"the next launch resumed from {step}, not {newest}: {checkpointer.passed_over}"
            )
        stage.retirable |= {entry.name for entry in list_checkpoints(store)}
        stage.train(checkpointer, training, step + 1)
        stage.retirable.discard(checkpoint_name(step + 1, checkpointer.launch.launch))
        stage.begun = checkpointer.launch.launch
    _check(stage, "home")
    _collect(stage)


def _collect(stage: Stage) -> None:
    """Clean up, when all leases have run out; note what is left that nothing refers to."""
    store = stage.open("home", term_s=0.0)
    with stage.no_failure("the clean-up"):
        run = read_run(store)
        assert run is not None
        clean_up(store, run, launch=stage.begun, retention=Retention(newest=1))
        keys, found = stage.look("home")
        left = keys - set(_referred_to(found))
        if left:
            stage.wrongs.append(f"nothing refers to {sorted(left)}")
    keys, found = stage.look("other")
    left = keys - set(_referred_to(found)) if keys else set()
    if left:
        stage.wrongs.append(f"at the mirror nothing refers to {sorted(left)}")


def _referred_to(store: MemoryStore) -> Iterator[str]:
    """Yield the files of a run that have a reason to be there."""
    yield RUN_NAME
    for folder in (LAUNCHES, LABELS_FOLDER):
        yield from (f"{folder}/{name}" for name in store.list_names(folder))
    yield from store.list(WITNESS)  # a launch removes the logs of old launches
    for entry in list_checkpoints(store):
        if entry.register is not None:
            yield f"{entry.name}/{MANIFEST_NAME}"
        if entry.manifest is not None:
            with CheckpointFiles(store.at(entry.name)) as files:
                parts = part_files(files)
                found = [index_file(entry.manifest), *parts]
                for number in range(len(parts)):
                    found += stored_files(OpenPart(files, files.read_part(number)))
            yield from (f"{entry.name}/{file.path}" for file in found)

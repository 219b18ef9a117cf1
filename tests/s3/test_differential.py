"""`ObjectStore` on a server answers as the model in memory does, step by step; also where requests get lost."""

import collections
import mmap
import random
from datetime import timedelta

import numpy as np
import obstore
import pytest

from ckptfmt.errors import Code
from ckptfmt.store import MemoryStore, objects
from ckptfmt.store.objects import ObjectStore
from ckptfmt.store.protocol import PAGE_NBYTES, SizedChunks
from tests.s3.fixtures import KIND
from tests.s3.proxy import Fault, Rule
from tests.store.helpers import outcome_of

PATHS = ("a", "b/c", "b/d", "b/e/f", "b-/g", "ä ö+%2F/h")
PREFIXES = ("", "b", "b/e", "b-", "nowhere")
#: S3 takes no smaller parts than this, but for the last.
PART_NBYTES = 5 << 20
LARGE_NBYTES = 2 * PART_NBYTES + 12_345


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Shorter pauses, parts and deadlines: the same steps in less time."""
    monkeypatch.setattr(objects, "_PART_NBYTES", PART_NBYTES)
    monkeypatch.setattr(objects, "_PAUSE_MIN_S", 0.002)
    monkeypatch.setattr(objects, "_DEADLINE_S", 1.0)


def open_bucket(bucket, prefix):
    config = bucket.endpoint.options
    backoff = {
        "init_backoff": timedelta(milliseconds=2),
        "max_backoff": timedelta(milliseconds=20),
        "base": 2,
    }
    return ObjectStore(
        f"s3://{bucket.name}/{prefix}",
        writable=True,
        client_options=config.pop("client_options"),
        config=config,
        retry_config={"max_retries": 2, "backoff": backoff},
    )


def content(number, nbytes):
    """Return bytes that tell which object they are of, and where in it they belong."""
    return (np.arange(nbytes // 8 + 1, dtype=">u8") + (number << 40)).tobytes()[:nbytes]


def read_into(store, path, begin, nbytes):
    with store.open_ranges(path) as file:
        return bytes(file.read_into(begin, nbytes, memoryview(mmap.mmap(-1, 4 * PAGE_NBYTES))))


def draw(chance, number):
    """Return an operation, the path that it is about, and what carries it out on a store."""
    op = chance.choice(
        ["create"] * 6
        + ["read", "read_range", "read_into", "list", "list_names", "nbytes"]
        + OTHERS
    )
    path, prefix = chance.choice(PATHS), chance.choice(PREFIXES)
    begin, nbytes = chance.randrange(-1, 40), chance.randrange(-1, 40)
    data = content(
        number, LARGE_NBYTES if op == "create" and chance.random() < 0.1 else chance.randrange(40)
    )
    chunks = [data[:7], memoryview(data)[7:]]
    parent, _, name = path.rpartition("/")
    calls = {
        "create": lambda s: s.create(
            path, SizedChunks(chunks, len(data)) if len(data) % 2 else iter(chunks)
        ),
        "create below": lambda s: s.at(parent).create(name, [data]),
        "replace": lambda s: s.replace(path, data),
        "read": lambda s: s.read(path, limit_nbytes=LARGE_NBYTES),
        "read small": lambda s: s.read(path, limit_nbytes=20),
        "read beside": lambda s: s.at("b").beside("b-").read("g", limit_nbytes=40),
        "read_range": lambda s: s.read_range(path, begin, nbytes),
        "read_into": lambda s: read_into(s, path, begin, nbytes),
        "nbytes": lambda s: s.nbytes(path),
        "list": lambda s: s.list(prefix),
        "list below": lambda s: s.at("b").list(""),
        "list_names": lambda s: s.list_names(prefix),
        "delete": lambda s: s.delete(path),
        "remove_directory": lambda s: s.remove_directory(prefix),
        "delete_leftovers": lambda s: s.delete_leftovers(prefix),
        "sync": lambda s: s.sync(""),
    }
    return op, path, data, calls[op]


OTHERS = [
    *("create below", "replace", "replace", "read small", "read beside", "list below"),
    *("delete", "delete", "remove_directory", "delete_leftovers", "sync"),
]
WRITES = ("create", "create below", "replace", "delete")

SEEDS = range(40 if KIND == "ceph" else 6)


def there(bucket, prefix):
    """Return what is there, asked of the server itself."""
    store = bucket.store(prefix)
    paths = [one["path"] for batch in obstore.list(store) for one in batch]
    return {path: bytes(obstore.get(store, path).bytes()) for path in paths}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_server_answers_as_the_model_does(s3_bucket, seed):
    """REQ-STO-001, REQ-STO-005."""
    chance = random.Random(seed)
    store, model = open_bucket(s3_bucket, "run"), MemoryStore()

    for number in range(50):
        op, path, _, call = draw(chance, number)
        assert outcome_of(lambda: call(store)) == outcome_of(lambda: call(model)), (  # noqa: B023
            number,
            op,
            path,
        )

    assert there(s3_bucket, "run") == model.snapshot()


#: What may happen to a request that changes something, and to one that reads; each often enough to
#: outlast retries.
WRITE_FAULTS = [
    *(
        Rule(fault=fault)
        for fault in (Fault.DROP_REQUEST, Fault.DROP_ANSWER, Fault.LATE, Fault.CUT_UPLOAD)
    ),
    *(Rule(fault=fault) for fault in (Fault.DUPLICATE, Fault.DELAY)),
    *(Rule(fault=Fault.STATUS, status=status) for status in (409, 412, 429, 500, 503)),
    *(Rule(fault=Fault.STATUS_AFTER, status=status) for status in (500, 503)),
    *(
        Rule(fault=Fault.ERROR_IN_200, operation=name)
        for name in ("CompleteMultipartUpload", "DeleteObjects")
    ),
    Rule(fault=Fault.LOSE_ACKNOWLEDGED, operation="UploadPart"),
    *(Rule(fault=fault, operation="HeadObject") for fault in (Fault.DROP_REQUEST, Fault.STATUS)),
    *(
        Rule(fault=fault, operation="CompleteMultipartUpload")
        for fault in (
            Fault.DROP_REQUEST,
            Fault.DROP_ANSWER,
            Fault.LATE,
            Fault.STATUS_AFTER,
            Fault.DUPLICATE,
        )
    ),
]
READ_FAULTS = [
    *(
        Rule(fault=fault)
        for fault in (Fault.DROP_REQUEST, Fault.DROP_ANSWER, Fault.CUT_DOWNLOAD, Fault.DELAY)
    ),
    *(Rule(fault=Fault.STATUS, status=status) for status in (429, 500, 503)),
]


def draw_rules(chance, op):
    rule = chance.choice(WRITE_FAULTS if op in WRITES else READ_FAULTS)
    count = chance.choice([1, 1, 2, None])
    rules = [
        Rule(
            **{
                **{name: getattr(rule, name) for name in Rule.__slots__},
                "nth": chance.choice([1, 1, 1, 2, 3]),
            }
        )
    ]
    rules = [
        Rule(**{**{name: getattr(one, name) for name in Rule.__slots__}, "count": count})
        for one in rules
    ]
    if chance.random() < 0.3:  # and the look at what became of it fails too
        rules.append(Rule(fault=Fault.STATUS, operation="HeadObject", count=None))
    return rules


class Play:
    """A random play on a store whose requests get lost, against what is on the server before and after each step."""

    def __init__(self, bucket, proxy, seed):
        self.chance = random.Random(seed)
        self.bucket, self.proxy = bucket, proxy
        self.store = open_bucket(bucket.through(proxy), "run")
        self.model = MemoryStore()
        self.late = []  # what requests may do that are still under way: path and contents, None for a deletion
        self.faults: collections.Counter[str] = collections.Counter()
        self.codes: collections.Counter[str] = collections.Counter()

    def step(self, number):
        """Carry out one operation, with a fault or without."""
        op, path, data, call = draw(self.chance, number)
        rules = draw_rules(self.chance, op) if self.chance.random() < 0.7 else []
        self.proxy.script(*rules)
        outcome = outcome_of(lambda: call(self.store))
        hit = dict(self.proxy.faults)
        self.faults.update(fault.name for fault in hit)
        if not hit:
            assert outcome == outcome_of(lambda: call(self.model)), (op, path)
            return
        before, now = self.model.snapshot(), there(self.bucket, "run")
        effect = {path: None if op == "delete" else data}
        told = outcome if isinstance(outcome, Code) else "ok"
        self.codes[f"{op}: {told}"] += 1
        if op in WRITES:
            self.check_write(op, told, (before, now), effect)
        else:
            assert now == before
            self.check_read(op, outcome, call)
        if Fault.LATE in hit:
            landed = self.proxy.land()
            after = there(self.bucket, "run")
            changed = {
                one: after.get(one)
                for one in after.keys() | now.keys()
                if after.get(one) != now.get(one)
            }
            assert changed in ({}, effect), (op, landed)
            now = after
        self.model = MemoryStore.from_snapshot(now)

    def check_write(self, op, told, seen, effect):
        """Compare what a write said with what it did."""
        before, now = seen
        path, data = next(iter(effect.items()))
        changed = {
            one: now.get(one)
            for one in now.keys() | before.keys()
            if now.get(one) != before.get(one)
        }
        assert changed in ({}, effect), "something else changed, or there is a part of it"
        if told == "ok":
            assert now.get(path) == data, (op, told)
            assert not op.startswith("create") or path not in before, (op, "two winners")
        elif told != Code.STORE_NO_ANSWER:
            assert not changed, (op, told, "it was done, and said to be refused")
            assert told == Code.STORE_IO or (told == Code.STORE_EXISTS and path in before), (
                op,
                told,
            )

    def check_read(self, op, outcome, call):
        """Compare what a read said with what is there: the same, or that there was no answer."""
        expected = outcome_of(lambda: call(self.model))
        assert outcome in (expected, Code.STORE_NO_ANSWER, Code.STORE_IO), (op, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_where_requests_get_lost_the_promises_hold(s3_bucket, s3_proxy, seed):
    """REQ-STO-001, REQ-STO-002, REQ-STO-003."""
    play = Play(s3_bucket, s3_proxy, seed)

    for number in range(50):
        play.step(number)

    assert len(play.faults) > 3

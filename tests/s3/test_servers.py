"""The servers and the proxy do what the tests of object stores rely on; of racing creates exactly one wins."""

import collections
import concurrent.futures
import json
import subprocess
import sys
from datetime import timedelta

import obstore
import pytest

from ckptfmt_tools.demo import servers
from ckptfmt_tools.demo.servers import Endpoint, ServerError
from tests.s3.fixtures import KIND
from tests.s3.proxy import Fault, Rule

# Says for each name in turn whether the create succeeded, was refused, or is unknown. One line on
# standard input starts each name, so that all contenders ask at once.
CONTENDER = """
import json, sys, obstore, obstore.exceptions, obstore.store
options, bucket, who = json.loads(sys.argv[1])
store = obstore.store.S3Store(bucket, retry_config={"max_retries": 0}, **options)
print("ready", flush=True)
for line in sys.stdin:
    name = line.strip()
    try:
        obstore.put(store, name, who.encode(), mode="create")
        said = "won"
    except obstore.exceptions.AlreadyExistsError:
        said = "taken"
    except Exception as error:
        said = type(error).__name__
    print(said, flush=True)
"""


def start(command, **options):
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1, **options)


def next_line(process):
    return process.stdout.readline().strip()


def race(
    endpoint: Endpoint, bucket: str, name_count: int, contender_count: int
) -> list[dict[str, str]]:
    """Let processes create each of `name_count` names at once; return for each name what each of them was told."""
    contenders = {}
    try:
        for who in (f"{number:04d}" for number in range(contender_count)):
            command = [sys.executable, "-c", CONTENDER, json.dumps([endpoint.options, bucket, who])]
            contenders[who] = start(command, stdin=subprocess.PIPE)
        assert {next_line(contender) for contender in contenders.values()} == {"ready"}
        told = []
        for number in range(name_count):
            for contender in contenders.values():
                contender.stdin.write(f"race/{number:05d}\n")
            told.append({who: next_line(contender) for who, contender in contenders.items()})
        return told
    finally:
        for contender in contenders.values():
            contender.communicate(timeout=60)


def check_race(bucket, told):
    """Assert that each name has one winner, whose bytes are there, and that all others were told that it is taken."""
    store = bucket.store()
    for number, one in enumerate(told):
        assert collections.Counter(one.values()) == {"won": 1, "taken": len(one) - 1}, (number, one)
        winner = next(who for who, said in one.items() if said == "won")
        assert bytes(obstore.get(store, f"race/{number:05d}").bytes()).decode() == winner


def test_of_racing_processes_one_creates_each_name(s3_bucket):
    """REQ-STO-001."""
    check_race(s3_bucket, race(s3_bucket.endpoint, s3_bucket.name, 25, 4))


@pytest.mark.ceph
def test_of_eight_processes_one_creates_each_of_two_thousand_names(s3_bucket):
    """REQ-STO-001."""
    told = race(s3_bucket.endpoint, s3_bucket.name, 2000, 8)
    check_race(s3_bucket, told)
    first = collections.Counter(list(one.values()).index("won") for one in told)
    assert len(first) > 1, "always the same contender wins: this was no race"


def test_a_server_ends_with_its_context_and_each_bucket_is_empty():
    with servers.Server("moto") as server:
        bucket = server.endpoint.make_bucket()
        assert server.endpoint.client().list_objects_v2(Bucket=bucket)["KeyCount"] == 0
        assert server.endpoint.make_bucket() != bucket

    with pytest.raises(Exception, match="Could not connect"):
        server.endpoint.make_bucket()


def test_who_has_no_ceph_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ServerError, match=r"ceph-mon.*apt-get install"):
        servers.Ceph(tmp_path, 1).start()


def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in servers.CEPH_PROGRAMS:
        (programs / name).write_text("#!/bin/sh\necho it is broken\nexit 3\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    place = tmp_path / "ceph"
    place.mkdir()
    with pytest.raises(ServerError, match=r"(?s)monmaptool.*ended with 3.*it is broken"):
        servers.Ceph(place, 1).start()


def test_the_command_prints_what_a_client_needs():
    command = [sys.executable, "-m", "ckptfmt_tools.demo.servers", "moto"]
    with start(command) as process:
        lines = [next_line(process) for _ in range(7)]
        process.terminate()
        process.communicate(timeout=60)

    text = "\n".join(lines)
    assert process.returncode == 0
    for name in (
        "AWS_ENDPOINT_URL=http://127.0.0.1:",
        "AWS_ACCESS_KEY_ID=",
        "AWS_SECRET_ACCESS_KEY=",
        "s3://test-",
    ):
        assert name in text


@pytest.fixture
def through(s3_bucket, s3_proxy):
    """The bucket through the proxy, and a client that tries everything once."""
    return s3_bucket.through(s3_proxy).store(retry_config={"max_retries": 0})


@pytest.fixture
def seen(s3_bucket, s3_proxy, through):
    return s3_bucket, s3_proxy, through


def outcome(action):
    """Return what a client of obstore says of a request: "done", or the name of its error."""
    try:
        action()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__
    return "done"


UNKNOWN = "GenericError"


@pytest.mark.parametrize(
    ("rule", "told", "is_there"),
    [
        (Rule(fault=Fault.DROP_REQUEST), UNKNOWN, False),
        (Rule(fault=Fault.DROP_ANSWER), UNKNOWN, True),
        (Rule(fault=Fault.LATE), UNKNOWN, False),
        (Rule(fault=Fault.CUT_UPLOAD), UNKNOWN, False),
        (Rule(fault=Fault.DUPLICATE), "AlreadyExistsError", True),
        (Rule(fault=Fault.DELAY), "done", True),
        (Rule(fault=Fault.STATUS, status=409), "AlreadyExistsError", False),
        (Rule(fault=Fault.STATUS, status=412), "AlreadyExistsError", False),
        (Rule(fault=Fault.STATUS, status=429), UNKNOWN, False),
        (Rule(fault=Fault.STATUS, status=500), UNKNOWN, False),
        (Rule(fault=Fault.STATUS_AFTER, status=503), UNKNOWN, True),
        (Rule(fault=Fault.LOSE_ACKNOWLEDGED), "done", False),
    ],
    ids=lambda value: (
        f"{value.fault.name}-{value.status}" if isinstance(value, Rule) else str(value)
    ),
)
def test_what_the_proxy_does_to_a_create(seen, rule, told, is_there):
    s3_bucket, s3_proxy, through = seen
    s3_proxy.script(rule)

    assert outcome(lambda: obstore.put(through, "a/b", b"12345678" * 99, mode="create")) == told

    assert s3_proxy.faults == {rule.fault: 1}
    assert s3_proxy.counts == {"PutObject": 1}
    assert [one["path"] for batch in obstore.list(s3_bucket.store()) for one in batch] == [
        "a/b"
    ] * is_there
    if rule.fault is Fault.LATE:
        assert s3_proxy.land() == [200]
        assert obstore.head(s3_bucket.store(), "a/b")["size"] == 792
    else:
        assert outcome(lambda: obstore.put(through, "a/b", b"", mode="create")) == (
            "AlreadyExistsError" if is_there else "done"
        )


@pytest.mark.parametrize(
    "fault", [Fault.CUT_DOWNLOAD, Fault.TRUNCATE, Fault.CORRUPT, Fault.DROP_ANSWER]
)
def test_what_the_proxy_does_to_a_read(s3_bucket, s3_proxy, through, fault):
    obstore.put(s3_bucket.store(), "a", b"12345678")
    s3_proxy.script(Rule(fault=fault, operation="GetObject"))
    got = []

    told = outcome(lambda: got.append(bytes(obstore.get_range(through, "a", start=0, end=8))))

    if fault is Fault.CORRUPT:
        assert (told, got) == ("done", [b"12344678"])
    else:
        assert told != "done" or got == [b"1234"], "a client that doesn't count gets half"
    assert bytes(obstore.get_range(through, "a", start=0, end=8)) == b"12345678"


def test_a_rule_meets_the_requests_that_fit(s3_proxy, through):
    s3_proxy.script(
        Rule(fault=Fault.STATUS, operation="PutObject", key="run/*", nth=2, count=2),
        Rule(fault=Fault.STATUS, operation="HeadObject", count=None),
    )

    told = [outcome(lambda n=n: obstore.put(through, f"run/{n}", b"")) for n in range(4)]
    told += [outcome(lambda: obstore.put(through, "elsewhere", b""))]
    told += [outcome(lambda: obstore.head(through, "run/0")) for _ in range(3)]

    assert told == ["done", UNKNOWN, UNKNOWN, "done", "done", UNKNOWN, UNKNOWN, UNKNOWN]


@pytest.mark.skipif(KIND == "ceph", reason="the condition is signed, and Ceph checks signatures")
def test_a_server_that_ignores_the_condition_lets_two_win(s3_proxy, through):
    s3_proxy.script(Rule(fault=Fault.UNCONDITIONAL, count=None))

    assert [outcome(lambda: obstore.put(through, "a", b"1", mode="create")) for _ in range(2)] == [
        "done",
        "done",
    ]


def test_requests_are_counted_by_what_s3_calls_them(s3_proxy, through):
    obstore.put(through, "big", bytes(13 << 20), chunk_size=5 << 20, max_concurrency=2)
    obstore.get_range(through, "big", start=0, length=5)
    list(obstore.list(through, "run"))
    obstore.delete(through, "big")

    assert s3_proxy.counts == {
        "CreateMultipartUpload": 1,
        "UploadPart": 3,
        "CompleteMultipartUpload": 1,
        "GetObject": 1,
        "ListObjectsV2": 1,
        "DeleteObjects": 1,
    }


def test_an_acknowledged_part_can_be_lost(s3_bucket, s3_proxy, through):
    s3_proxy.script(Rule(fault=Fault.LOSE_ACKNOWLEDGED, operation="UploadPart", nth=2))

    assert (
        outcome(lambda: obstore.put(through, "big", bytes(13 << 20), chunk_size=5 << 20)) != "done"
    )

    assert not list(obstore.list(s3_bucket.store()))


def test_a_server_can_become_unreachable_and_come_back(s3_proxy, through):
    s3_proxy.unreachable = True
    assert outcome(lambda: obstore.put(through, "a", b"")) == UNKNOWN

    s3_proxy.unreachable = False
    assert outcome(lambda: obstore.put(through, "a", b"")) == "done"


def test_a_throttle_lets_all_bytes_pass(s3_proxy, through):
    s3_proxy.bytes_per_s = 4e6
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for future in [
            pool.submit(obstore.put, through, str(n), bytes([n]) * 200_000) for n in range(4)
        ]:
            future.result(timeout=timedelta(minutes=5).total_seconds())

    assert [bytes(obstore.get(through, str(n)).bytes()) for n in range(4)] == [
        bytes([n]) * 200_000 for n in range(4)
    ]

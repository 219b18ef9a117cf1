"""`ObjectStore`: URLs, the trial of a server, lost answers, uploads in parts, and errors without secrets."""

import contextlib
import datetime as dt
import http.server
import json
import random
import socket
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import api
from ckptfmt.errors import CkptError, Code
from ckptfmt.store import (
    ObjectStore,
    address_of,
    objects,
    obstore_errors,
    open_address,
    open_store,
    split_path,
)
from ckptfmt.store.protocol import SizedChunks
from tests.s3.proxy import Fault, Proxy, Rule
from tests.store.helpers import code_of, outcome_of


def test_the_environment_says_how_to_reach_a_bucket(bucket):
    store = open_store(f"{bucket.url}/run/", writable=True)
    store.create("a", [b"abc"])

    assert store.name == f"{bucket.url}/run"
    assert open_store(bucket.url, writable=False).list("") == ["run/a"]
    assert (
        code_of(lambda: open_store(bucket.url, writable=False).create("b", [])) == Code.STORE_ACCESS
    )
    again = open_address(address_of(store) or b"", writable=False)
    assert (again.name, again.list("")) == (store.name, ["a"])


def test_options_go_to_another_process_unless_they_are_code(bucket, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    config = {
        name: value for name, value in bucket.server.options.items() if name != "client_options"
    }
    store = ObjectStore(f"{bucket.url}/x", writable=True, config=config)
    store.create("a", [b"1"])

    assert open_address(address_of(store) or b"", writable=False).list("") == ["a"]
    assert config["secret_access_key"] not in repr(store) + store.name

    def provider():
        return {"access_key_id": key, "secret_access_key": secret, "expires_at": None}

    key, secret = config.pop("access_key_id"), config.pop("secret_access_key")
    asked = ObjectStore(
        f"{bucket.url}/x",
        writable=True,
        config=config,
        credential_provider=provider,
    )
    assert asked.list("") == ["a"]
    assert address_of(asked) is None


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://host/x", Code.STORE_UNSUPPORTED),
        ("s3://", Code.ARGUMENT),
        ("s3://key:hush@bucket/x", Code.ARGUMENT),
        ("s3://bucket/../x", Code.UNSAFE_PATH),
        ("s3://bucket/a//b", Code.UNSAFE_PATH),
        ("file://elsewhere/x", Code.ARGUMENT),
        ("s3:/bucket/x", Code.ARGUMENT),
    ],
)
def test_what_is_no_url_of_ours_is_refused_without_its_secrets(url, code):
    with pytest.raises(CkptError) as raised:
        open_store(url, writable=False)

    assert raised.value.code == code
    assert "hush" not in str(raised.value)


def test_without_obstore_urls_say_what_to_install():
    script = (
        "import sys; sys.modules['obstore'] = None; import ckptfmt; ckptfmt.open('s3://bucket/run')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert 'pip install "ckptfmt[cloud]"' in ran.stderr


def test_file_urls_are_paths(tmp_path):
    open_store(f"file://{tmp_path}/a", writable=True).create("b", [b"1"])

    assert (tmp_path / "a" / "b").read_bytes() == b"1"
    assert split_path(f"file://{tmp_path}/a") == (str(tmp_path), "a")


class Quiet(http.server.BaseHTTPRequestHandler):
    """A server that says nothing of its requests."""

    def answer(self, status, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served_by(handler):
    """Start a server; yield how to reach it."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {
            "endpoint": f"http://127.0.0.1:{server.server_port}",
            "access_key_id": "a",
            "secret_access_key": "b",
        }
        server.shutdown()


class Careless(Quiet):
    """A server that takes every put, whatever its condition."""

    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, ETag='"1"')

    do_DELETE = do_PUT  # noqa: N815


def test_a_server_that_ignores_conditions_is_refused():
    with served_by(Careless) as config:
        with pytest.raises(
            CkptError, match=r"STORE_UNSUPPORTED.*8 creations of one name at once 8 succeeded"
        ):
            ObjectStore("s3://careless", writable=True, config=config)
        ObjectStore("s3://careless", writable=False, config=config)


def test_a_server_that_takes_connections_and_never_answers_is_named_soon(monkeypatch):
    """Nobody at a terminal waits for minutes; and nothing is asked of it again, such as to clean up."""
    monkeypatch.setattr(objects, "_PROBE_TIMEOUT", "1s")
    keys = {"access_key_id": "a", "secret_access_key": "b"}
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        config = {"endpoint": f"http://127.0.0.1:{server.getsockname()[1]}", "region": "x", **keys}
        with pytest.raises(CkptError, match="check the endpoint") as caught:
            ObjectStore("s3://silent", writable=True, config=config)
        assert caught.value.code == Code.STORE_NO_ANSWER
        server.settimeout(0)
        asked = []
        with contextlib.suppress(BlockingIOError):
            while True:
                asked.append(server.accept()[0])
        requests = [connection.recv(6) for connection in asked]
        for connection in asked:
            connection.close()
    assert requests == [b"PUT /s"] * 8


WAITING = """
import sys, threading
from ckptfmt.store import objects
objects._PROBE_TIMEOUT = "600s"
config = {"endpoint": sys.argv[1], "region": "x", "access_key_id": "a", "secret_access_key": "b"}
opened = threading.Thread(
    target=lambda: objects.ObjectStore("s3://silent", writable=True, config=config), daemon=True
)
opened.start()
sys.stdin.readline()
"""


def test_a_process_ends_while_a_server_that_never_answers_is_asked():
    """A home that is away is opened in a daemon thread, which keeps no process from its end."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        command = [sys.executable, "-c", WAITING, f"http://127.0.0.1:{server.getsockname()[1]}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            server.settimeout(60)
            connection, _ = server.accept()
            try:
                process.communicate(b"end\n", timeout=60)
            finally:
                process.kill()
        connection.close()
    assert process.returncode == 0


def test_a_bucket_that_is_not_there_and_a_server_that_is_not_there_are_named(bucket, monkeypatch):
    with pytest.raises(CkptError, match=r"STORE_IO.*Create the bucket"):
        open_store("s3://no-such-bucket/x", writable=True)
    assert (
        outcome_of(lambda: open_store("s3://no-such-bucket/x", writable=False).list(""))
        == Code.STORE_IO
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = ObjectStore(f"{bucket.url}/x", writable=False, retry_config={"max_retries": 1})
    assert code_of(lambda: store.read("a", limit_nbytes=9)) == Code.STORE_NO_ANSWER


class Denying(Quiet):
    """A server that knows no key."""

    def do_GET(self):
        self.answer(403)

    do_HEAD = do_GET  # noqa: N815


def test_a_key_that_may_not_read_is_named():
    with served_by(Denying) as config:
        store = ObjectStore("s3://bucket", writable=False, config=config)
        assert code_of(lambda: store.list("")) == Code.STORE_ACCESS
        assert code_of(lambda: store.read("a", limit_nbytes=9)) == Code.STORE_ACCESS


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("endpoint", ["127.0.0.1:5000", "s3.example.org", "http//s3.example.org"])
def test_an_endpoint_that_is_no_url_is_named(endpoint, writable):
    """obstore panics, which is no Exception."""
    config = {"endpoint": endpoint, "access_key_id": "a", "secret_access_key": "b"}
    with pytest.raises(CkptError, match=r"STORE_IO.*Begin the endpoint.*with http://"):
        ObjectStore("s3://bucket", writable=writable, config=config).list("")


def test_without_credentials_the_variables_are_named():
    said = (
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in"
        " 2.1s, after 1 retries"
    )
    assert "AWS_ACCESS_KEY_ID" in (
        obstore_errors.code_of(OSError(said), missing=Code.FILE_MISSING)[1] or ""
    )


class Forgetful:
    """A client whose first put is carried out, and has no answer."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0

    def put(self, *arguments, **options):
        self.count += 1
        self.inner.put(*arguments, **options)
        if self.count == 1:
            raise OSError("connection reset")

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize("nbytes", [3, 2 * objects._PART_NBYTES], ids=["at once", "in parts"])
def test_who_lost_the_answer_knows_its_own_object(bucket, nbytes):
    store = ObjectStore(f"{bucket.url}/run", writable=True)
    forgetful: Any = Forgetful(store._once)
    store._once = store._client = store._uploads = forgetful

    store.create("a", SizedChunks([bytes(nbytes)], nbytes))

    assert (forgetful.count, store.nbytes("a")) == (2 if nbytes == 3 else 1, nbytes)
    forgetful.count = 0
    with pytest.raises(CkptError, match="STORE_EXISTS"):
        store.create("a", SizedChunks([bytes(nbytes)], nbytes))


def test_an_upload_that_fails_leaves_nothing(bucket):
    store = open_store(bucket.url, writable=True)

    def chunks():
        yield bytes(3 * objects._PART_NBYTES)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.create("a", SizedChunks(chunks(), 1 << 30))

    assert store.list("") == []
    assert "Uploads" not in bucket.server.client().list_multipart_uploads(
        Bucket=bucket.url.removeprefix("s3://")
    )


def test_what_is_uploaded_may_come_from_a_bucket(bucket, monkeypatch):
    """As in copies from bucket to bucket: obstore panics where a request is made within a request."""
    monkeypatch.setattr(objects, "_PART_NBYTES", 5 << 20)
    store = open_store(bucket.url, writable=True)
    content = random.Random(1).randbytes(12 << 20)
    store.create("a", SizedChunks([content], len(content)))

    def chunks():
        assert store.nbytes("a") == len(content)
        for begin in range(0, len(content), 4 << 20):
            yield store.read_range("a", begin, 4 << 20)

    store.create("b", SizedChunks(chunks(), len(content)))
    assert store.read("b", limit_nbytes=len(content)) == content
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("ckptfmt-draw")
    ]


def test_a_part_may_take_longer_than_other_requests(bucket, monkeypatch):
    """All parts that are on their way share a slow link: each takes as long as all of them, and none is sent again."""
    monkeypatch.setattr(objects, "_PART_NBYTES", 5 << 20)
    open_store(bucket.url, writable=True)  # tries out the server, in as much time as that takes
    monkeypatch.setattr(objects, "_CLIENT_OPTIONS", {**objects._CLIENT_OPTIONS, "timeout": "2s"})
    content = bytes(20 << 20)
    with Proxy(bucket.server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint.url)
        store = open_store(bucket.url, writable=True)
        proxy.bytes_per_s = len(content) / 4

        store.create("large", SizedChunks([content], len(content)))

        assert proxy.counts["UploadPart"] == 4
        proxy.bytes_per_s = None
        assert store.nbytes("large") == len(content)


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_part_without_an_answer_is_sent_again(bucket, monkeypatch, is_patient):
    """obstore repeats nothing behind its retry_timeout, which must be longer than the time-out of a part."""
    assert (
        2 * float(objects._PART_TIMEOUT.removesuffix("s")) < objects._PART_PATIENCE.total_seconds()
    )
    monkeypatch.setattr(objects, "_PART_NBYTES", 5 << 20)
    monkeypatch.setattr(objects, "_PART_TIMEOUT", "1s")
    monkeypatch.setattr(objects, "_PART_PATIENCE", dt.timedelta(seconds=60 if is_patient else 0.5))
    monkeypatch.setattr(objects, "_DEADLINE_S", 0.1)
    open_store(bucket.url, writable=True)  # tries out the server
    content = bytes(10 << 20)
    with Proxy(bucket.server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint.url)
        store = open_store(bucket.url, writable=True)
        proxy.script(Rule(fault=Fault.DELAY, operation="UploadPart", delay_s=3.0))

        code = code_of(lambda: store.create("large", SizedChunks([content], len(content))))

        assert code == ("ok" if is_patient else Code.STORE_NO_ANSWER)
        assert proxy.counts["UploadPart"] == (3 if is_patient else 2)


def test_a_file_whose_size_shows_in_the_end_goes_up_while_it_is_made(bucket, monkeypatch):
    """A delta's pack: its first parts are sent before its last bytes are encoded, and it never lies in memory whole."""
    monkeypatch.setattr(objects, "_PART_NBYTES", 5 << 20)
    monkeypatch.setattr(objects, "_PART_COUNT", 1)
    counts = []
    with Proxy(bucket.server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint.url)
        store = open_store(bucket.url, writable=True)

        def chunks(count):
            for number in range(count):
                counts.append(proxy.counts["UploadPart"])
                yield bytes([number]) * (1 << 20)

        store.create("large", SizedChunks(chunks(22), None, most_nbytes=1 << 35))
        assert counts[:6] == [0] * 6
        assert counts[-1] >= 2
        proxy.script()
        store.create("small", SizedChunks(chunks(5), None, most_nbytes=1 << 35))
        assert proxy.counts == {"PutObject": 1}
        assert code_of(
            lambda: store.create("large", SizedChunks(chunks(22), None, most_nbytes=1 << 35))
        ) == (Code.STORE_EXISTS)
        assert store.read("large", limit_nbytes=1 << 30) == b"".join(
            bytes([number]) * (1 << 20) for number in range(22)
        )


WEIGHTS = {"w": np.arange(12 * 2**20, dtype=np.float32)}


def test_a_run_in_a_bucket_is_saved_resumed_checked_and_listed(bucket):
    run = f"{bucket.url}/runs/a"
    data = {"position": 0}
    with ckptfmt.Checkpointer(
        run, ckptfmt.State(weights=WEIGHTS, data=data), keep=2, every=1
    ) as checkpointer:
        for step in range(1, 4):
            data["position"] = step
            checkpointer.end_step(step)
    assert (
        not [line for line in checkpointer.warnings if "SAVER_IN_THREAD" in line]
        if hasattr(checkpointer, "warnings")
        else True
    )

    assert ckptfmt.validate(run).valid
    weights = {"w": np.zeros_like(WEIGHTS["w"])}
    found = ckptfmt.State(weights=weights, data={"position": 0})
    ckptfmt.load(run, found)
    assert (ckptfmt.open(run).step, weights["w"].tobytes()) == (3, WEIGHTS["w"].tobytes())
    log = subprocess.run(
        [sys.executable, "-m", "ckptfmt", "log", "--json", run],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [
        entry["step"]
        for entry in json.loads(log.stdout)["checkpoints"]
        if entry["state"] == "committed"
    ] == [3, 2]
    for command in ("inspect", "validate"):
        subprocess.run(
            [sys.executable, "-m", "ckptfmt", command, run], capture_output=True, check=True
        )


def test_a_checkpoint_in_a_bucket_is_saved_compacted_and_read_in_ranges(bucket):
    path = f"{bucket.url}/lone"
    report = ckptfmt.save(path, ckptfmt.State(weights=WEIGHTS, data={"position": 24}), step=3)

    with ckptfmt.open(path) as checkpoint:
        assert checkpoint.weights["w"][5:9].tolist() == [5, 6, 7, 8]
        assert report.digest == checkpoint.manifest.digest
    assert (
        code_of(lambda: ckptfmt.save(path, ckptfmt.State(data=1), step=3)) == Code.CHECKPOINT_EXISTS
    )
    api.compact(path, out=f"{bucket.url}/full")
    assert code_of(lambda: api.compact(path, out=f"{path}/inside")) == Code.ARGUMENT
    assert ckptfmt.validate(f"{bucket.url}/full").valid

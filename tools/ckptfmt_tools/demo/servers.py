"""S3 servers for the demo, tests and benchmarks: moto, and Ceph's gateway.

A server ends with the process that started the server.

By hand: ``python -m ckptfmt_tools.demo.servers moto``, or the same with ``ceph``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Self

#: Each kind of server, with its description.
KINDS: Final = {"moto": "moto's S3 server", "ceph": "Ceph's S3 gateway"}
#: The programs of Ceph that are started, and the command that installs them.
CEPH_PROGRAMS: Final = ("monmaptool", "ceph-mon", "ceph-osd", "ceph", "radosgw", "radosgw-admin")
CEPH_REMEDY: Final = (
    "On Debian: apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common"
)
#: Time limit for the start of a server, in seconds: other work may leave the server a tenth of a
#: processor.
START_S: Final = 240
#: Number of tries of a request to a monitor before a refusal counts.
_ASK_COUNT: Final = 10
_USER: Final = {"access_key_id": "test", "secret_access_key": "testsecret", "region": "us-east-1"}


class ServerError(Exception):
    """A server didn't start; the message has the reason and a remedy."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The address of an S3 server; all servers here have the same user."""

    url: str

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `obstore.store.S3Store` other than the bucket."""
        return {**_USER, "endpoint": self.url, "client_options": {"allow_http": True}}

    @property
    def environment(self) -> dict[str, str]:
        """The address and the user as environment variables."""
        user = {f"AWS_{name.upper()}": value for name, value in _USER.items()}
        return {**user, "AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true"}

    def client(self) -> Any:
        """Return a client of boto3, for buckets and multipart uploads, which obstore lacks."""
        import boto3  # takes half a second, which a user with a bucket needn't spend
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=_USER["access_key_id"],
            aws_secret_access_key=_USER["secret_access_key"],
            region_name=_USER["region"],
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )

    def make_bucket(self) -> str:
        """Make an empty bucket, and return its name."""
        name = f"test-{uuid.uuid4().hex[:16]}"
        self.client().create_bucket(Bucket=name)
        return name


class Server:
    """A server in a separate process.

    The process ends when its standard input ends: with this process at the latest.
    """

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, kind, "--until-eof"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        output = self._process.stdout
        line = output.readline() if output else ""  # printed when the server answers
        if not line:
            self.close()
            raise ServerError(
                f"the server {kind} didn't start; the server's output stands on standard error"
            )
        self.endpoint: Final = Endpoint(json.loads(line)["url"])

    def close(self) -> None:
        """End the server, and wait until all its processes are gone."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()


def choose_kind() -> str:
    """Return the available kind of server: Ceph if its programs are installed, else moto.

    Raises: ServerError if neither is installed.
    """
    needed = ["boto3", "moto", "flask", "flask_cors"]
    if importlib.util.find_spec("boto3") and all(map(shutil.which, CEPH_PROGRAMS)):
        return "ceph"
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ServerError(
            f'there is no server of S3 here: pip install "moto[s3,server]" (missing: {missing[0]})'
        )
    return "moto"


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def run_moto(port: int) -> Iterator[Endpoint]:
    """Run moto in threads of this process."""
    from moto.moto_server import werkzeug_app as moto  # needed in this process only
    from werkzeug.serving import make_server

    class Handler(moto.MotoRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections

        def log_request(self, *_: object) -> None:
            pass

    # Without moto's dispatcher, which looks for the service by listing directories at each request.
    app = _one_at_a_time(moto.create_backend_app("s3"))
    server = make_server("127.0.0.1", port, app, threaded=True, request_handler=Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Endpoint(f"http://127.0.0.1:{server.port}")
    finally:
        server.shutdown()
        thread.join()


def _one_at_a_time(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Serve one request at a time: moto checks for a key and then writes, without a lock."""
    lock = threading.Lock()

    def serve(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        # The body is read before the lock is taken: a client that sends half a body blocks no other
        # client.
        nbytes = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(nbytes)
        if len(body) < nbytes:
            start_response("400 Bad Request", [("Content-Length", "0")])
            return []
        environ["wsgi.input"] = io.BytesIO(body)
        with lock:
            return list(app(environ, start_response))

    return serve


class Ceph:
    """One monitor, one OSD and the RADOS gateway, in a directory for them."""

    def __init__(self, directory: pathlib.Path, port: int) -> None:
        self.endpoint: Final = Endpoint(f"http://127.0.0.1:{port}")
        self._directory = directory
        self._port = port
        self._processes: list[subprocess.Popen[bytes]] = []
        self._configuration = directory / "ceph.conf"
        self._log = directory / "log" / "start.log"

    def start(self) -> None:
        """Start the three processes and make the user. Raises: ServerError."""
        missing = [program for program in CEPH_PROGRAMS if shutil.which(program) is None]
        if missing:
            raise ServerError(f"there is no {', '.join(missing)} here. {CEPH_REMEDY}")
        for name in ("mon", "osd", "run", "log"):
            (self._directory / name).mkdir()
        cluster = str(uuid.uuid4())
        monitor_port = free_port()
        self._configuration.write_text(self._settings(cluster, monitor_port), "utf-8")
        monmap = self._directory / "monmap"
        address = f"[v1:127.0.0.1:{monitor_port}]"
        self._call("monmaptool", "--create", "--addv", "a", address, "--fsid", cluster, monmap)
        self._call("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, *self._common)
        self._launch("ceph-mon", "-i", "a", *self._common)
        self._ask("osd", "create")  # waits for the monitor
        with (self._directory / "osd" / "block").open("wb") as block:
            block.truncate(10 << 30)  # a sparse file
        self._call("ceph-osd", "-i", "0", "--mkfs", *self._common)
        self._ask("osd", "crush", "add", "0", "1.0", "root=default", "host=local")
        self._launch("ceph-osd", "-i", "0", *self._common)
        self._launch("radosgw", "-n", "client.rgw.x", *self._common)
        self._wait()
        names = ("--uid=test", "--display-name=test")
        keys = (
            f"--access-key={_USER['access_key_id']}",
            f"--secret-key={_USER['secret_access_key']}",
        )
        self._call("radosgw-admin", "-c", self._configuration, "user", "create", *names, *keys)

    def stop(self) -> None:
        """End the processes, the gateway first, so that none waits for another."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()  # no process may outlive the tests
                process.wait()
        self._processes = []

    @property
    def _common(self) -> tuple[str | pathlib.Path, ...]:
        # Started by root, each process would switch to the user `ceph`, without permission to write
        # here.
        who = ("--setuser", "root", "--setgroup", "root") if os.geteuid() == 0 else ()
        return ("-c", self._configuration, *who)

    def _settings(self, cluster: str, monitor_port: int) -> str:
        place = self._directory
        return f"""[global]
fsid = {cluster}
mon_initial_members = a
mon_host = [v1:127.0.0.1:{monitor_port}]
public_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
mon_allow_pool_size_one = true
osd_crush_chooseleaf_type = 0
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
mon_max_pg_per_osd = 1000
osd_objectstore = bluestore
osd_class_update_on_start = false
osd_crush_update_on_start = false
osd_memory_target = 1073741824
run_dir = {place}/run
pid_file = {place}/run/$name.pid
log_file = {place}/log/$name.log
admin_socket = {place}/run/$name.asok
mon_data = {place}/mon
osd_data = {place}/osd
[client.rgw.x]
rgw_frontends = beast endpoint=127.0.0.1:{self._port} tcp_nodelay=1
rgw_gc_obj_min_wait = 1
rgw_gc_processor_period = 1
rgw_gc_processor_max_time = 60
"""

    def _call(self, *command: str | pathlib.Path) -> None:
        with self._log.open("ab") as log:
            try:
                code = subprocess.run(
                    command, stdout=log, stderr=log, timeout=START_S, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        if code:
            raise self._error(f"`{' '.join(map(str, command))}` ended with {code}")

    def _ask(self, *command: str) -> None:
        """Send a command to the monitor, with retries.

        On a busy machine, a new monitor answers with EPERM.
        """
        for left in reversed(range(_ASK_COUNT)):
            try:
                self._call("ceph", "-c", self._configuration, *command)
            except ServerError:
                if not left:
                    raise
                time.sleep(1)
            else:
                return

    def _launch(self, *command: str | pathlib.Path) -> None:
        # In the foreground, as a child of this process. Ctrl-C at the terminal is for this process
        # alone.
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [*command, "-f"], stdout=log, stderr=log, start_new_session=True
            )
        self._processes.append(process)

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            ended = [process for process in self._processes if process.poll() is not None]
            if ended:
                raise self._error(f"{ended[0].args!r} ended with {ended[0].returncode}")
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(self.endpoint.url, timeout=10),  # noqa: S310
            ):
                return
            time.sleep(0.2)
        raise self._error(f"the gateway doesn't answer after {START_S} s")

    def _error(self, detail: str) -> ServerError:
        ends = []
        for path in sorted((self._directory / "log").iterdir()):
            lines = path.read_text("utf-8", errors="replace").splitlines()[-15:]
            ends.append("\n".join([f"--- the end of {path.name}:", *lines]))
        return ServerError("\n".join([f"Ceph: {detail}", *ends]))


@contextlib.contextmanager
def run_ceph(port: int) -> Iterator[Endpoint]:
    """Run Ceph in a temporary directory. Raises: ServerError."""
    with tempfile.TemporaryDirectory(prefix="ckptfmt-ceph-") as directory:
        ceph = Ceph(pathlib.Path(directory), port or free_port())
        try:
            ceph.start()
            yield ceph.endpoint
        finally:
            ceph.stop()


def main(arguments: list[str]) -> int:
    """Run a server until Ctrl-C, or until standard input ends."""
    parser = argparse.ArgumentParser(
        prog="python -m ckptfmt_tools.demo.servers", description="Run an S3 server on loopback."
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument(
        "--port", type=int, default=0, help="where it answers; a free port if left out"
    )
    parser.add_argument(
        "--until-eof", action="store_true", help="say where as JSON, and end with standard input"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if options.until_eof:
        # Ctrl-C at the terminal goes to all foreground processes; the parent process decides when
        # to end the server.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    run = run_moto if options.kind == "moto" else run_ceph
    try:
        with run(options.port) as endpoint:
            if options.until_eof:
                print(json.dumps({"url": endpoint.url}), flush=True)  # for the parent process
                sys.stdin.read()
                return 0
            names = "\n".join(
                f"export {name}={value}" for name, value in endpoint.environment.items()
            )
            bucket = endpoint.make_bucket()
            print(
                f"{names}\n# An empty bucket: s3://{bucket}\n# Ctrl-C ends the server.", flush=True
            )
            threading.Event().wait()
    except KeyboardInterrupt:
        pass
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A proxy between an S3 client and its server, which counts requests and does to some of them what networks do."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import fnmatch
import hashlib
import html
import http.client
import http.server
import re
import socket
import threading
import time
import types
import urllib.parse
from collections.abc import Set as AbstractSet
from typing import Any, Final, Self

from ckptfmt_tools.demo.servers import Endpoint

#: Headers that concern one connection, and no request.
_HOP_BY_HOP: Final[AbstractSet[str]] = {"connection", "expect", "keep-alive", "transfer-encoding"}
_CONDITIONS: Final[AbstractSet[str]] = {"if-match", "if-none-match"}
_CHUNK_NBYTES: Final = 1 << 16
_KEY: Final = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)
#: The code in the error body that S3 sends with a status.
_ERRORS: Final = {
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
}


class Fault(enum.Enum):
    """What happens to a request. "The connection ends" means that the client gets no answer."""

    #: The server never sees the request; the connection ends.
    DROP_REQUEST = enum.auto()
    #: The server carries the request out; the connection ends.
    DROP_ANSWER = enum.auto()
    #: The connection ends; the server sees the request when `Proxy.land` is called.
    LATE = enum.auto()
    #: The server gets half of the body; both connections end.
    CUT_UPLOAD = enum.auto()
    #: The client gets half of the answer's body; the connection ends.
    CUT_DOWNLOAD = enum.auto()
    #: The client gets half of the answer's body, under a Content-Length that fits this half.
    TRUNCATE = enum.auto()
    #: A byte in the middle of the answer's body is another one.
    CORRUPT = enum.auto()
    #: The server gets the request twice; the client gets the second answer.
    DUPLICATE = enum.auto()
    #: The server gets the request after `Rule.delay_s`.
    DELAY = enum.auto()
    #: The client is answered `Rule.status`; the server never sees the request.
    STATUS = enum.auto()
    #: The client is answered `Rule.status`; the server carries the request out.
    STATUS_AFTER = enum.auto()
    #: The client is answered 200 with an error in the body; the server never sees the request.
    ERROR_IN_200 = enum.auto()
    #: The client is answered 200 with an ETag; the server never sees the request.
    LOSE_ACKNOWLEDGED = enum.auto()
    #: The server gets the request without its conditions, as a server that doesn't know them would.
    #: Signatures cover them: a server that checks signatures refuses it.
    UNCONDITIONAL = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One fault, and which requests it meets.

    Attributes:
        operation: as S3 calls it, such as ``PutObject`` or ``UploadPart``; None for any.
        key: a pattern of keys, as `fnmatch` has them; the key of a listing is its prefix.
        nth: the first of the fitting requests that it meets.
        count: how many it meets from then on; None for all.
        status: of `Fault.STATUS` and `Fault.STATUS_AFTER`.
        delay_s: of `Fault.DELAY`.
    """

    fault: Fault
    operation: str | None = None
    key: str = "*"
    nth: int = 1
    count: int | None = 1
    status: int = 503
    delay_s: float = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A request as the client sent it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def operation(self) -> str:
        """What S3 calls it."""
        return operation_of(self.method, self.target, {name.lower() for name, _ in self.headers})

    @property
    def key(self) -> str:
        """The object's key; of a listing the prefix; of a deletion of several objects the first one's key."""
        split = urllib.parse.urlsplit(self.target)
        key = urllib.parse.unquote(split.path.removeprefix("/").partition("/")[2])
        if self.operation == "DeleteObjects":
            found = _KEY.search(self.body)
            return "" if found is None else html.unescape(found[1].decode())
        return key or dict(urllib.parse.parse_qsl(split.query)).get("prefix", "")


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An answer as the server sent it, or as the proxy makes it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def operation_of(method: str, target: str, header_names: set[str]) -> str:
    """Return what S3 calls a request.

    >>> operation_of("PUT", "/bucket/a/b?partNumber=1&uploadId=x", set())
    'UploadPart'
    >>> operation_of("GET", "/bucket?list-type=2&prefix=a%2F", set())
    'ListObjectsV2'
    """
    split = urllib.parse.urlsplit(target)
    query = set(dict(urllib.parse.parse_qsl(split.query, keep_blank_values=True)))
    of_object = bool(split.path.removeprefix("/").partition("/")[2])
    if of_object and "uploadId" in query:
        names = {
            "PUT": "UploadPart",
            "POST": "CompleteMultipartUpload",
            "DELETE": "AbortMultipartUpload",
        }
        return names.get(method, "ListParts")
    if of_object:
        put = "CopyObject" if "x-amz-copy-source" in header_names else "PutObject"
        post = "CreateMultipartUpload" if "uploads" in query else "PostObject"
        return {"PUT": put, "POST": post}.get(method, f"{method.title()}Object")
    if "uploads" in query:
        return "ListMultipartUploads"
    if method == "POST" and "delete" in query:
        return "DeleteObjects"
    return "ListObjectsV2" if method == "GET" else f"{method.title()}Bucket"


class Proxy:
    """Forward requests to `server`, but for those that a `Rule` is for.

    Attributes:
        endpoint: what a client is given in the place of the server's.
        counts: how many requests of each operation came, whatever became of them.
        requests: operation and key of each of them, in the order in which they came.
        faults: how often each fault happened.
        unreachable: while it is True, every connection ends with its next request.
        bytes_per_s: how many bytes pass in a second, in both directions and all connections
            together; None: any.
    """

    def __init__(self, server: Endpoint) -> None:
        self._server = urllib.parse.urlsplit(server.url)
        self._lock = threading.Lock()
        self._rules: list[tuple[Rule, list[int]]] = []
        self._late: list[Request] = []
        self._free_at = 0.0
        self.counts: collections.Counter[str] = collections.Counter()
        self.requests: list[tuple[str, str]] = []
        self.faults: collections.Counter[Fault] = collections.Counter()
        self.unreachable = False
        self.bytes_per_s: float | None = None
        self._listener = _Listener(self)
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()
        self.endpoint: Final = Endpoint(f"http://127.0.0.1:{self._listener.server_address[1]}")

    def script(self, *rules: Rule) -> None:
        """Set which faults happen from now on, in the place of those that were set before; count anew."""
        with self._lock:
            self._rules = [(rule, [0]) for rule in rules]
            self._late.clear()
            self.counts.clear()
            self.requests.clear()
            self.faults.clear()

    def calm(self) -> None:
        """Let no more faults happen; what is late stays late, and what was counted is counted on."""
        with self._lock:
            self._rules = []

    def land(self) -> list[int]:
        """Let requests under `Fault.LATE` arrive at the server; return the status of each answer."""
        with self._lock:
            late, self._late = self._late, []
        return [self._forward(request).status for request in late]

    def close(self) -> None:
        """End all connections and the proxy."""
        self._listener.shutdown()
        self._thread.join()
        self._listener.end_connections()
        self._listener.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def _rule_for(self, request: Request) -> Rule | None:
        """Count a request; return the first rule that meets it."""
        met = None
        with self._lock:
            self.counts[request.operation] += 1
            self.requests.append((request.operation, request.key))
            for rule, seen in self._rules:
                if rule.operation not in (None, request.operation) or not fnmatch.fnmatchcase(
                    request.key, rule.key
                ):
                    continue
                seen[0] += 1
                if seen[0] >= rule.nth and (rule.count is None or seen[0] < rule.nth + rule.count):
                    met = met or rule
            if met is not None:
                self.faults[met.fault] += 1
        return met

    def _forward(
        self,
        request: Request,
        *,
        without: AbstractSet[str] = frozenset(),
        nbytes: int | None = None,
    ) -> Answer:
        """Send a request to the server, or `nbytes` of its body and no more; return the answer."""
        connection = http.client.HTTPConnection(
            self._server.hostname or "", self._server.port, timeout=120
        )
        with contextlib.closing(connection):
            # The host that was signed is the proxy's own, and stays.
            connection.putrequest(
                request.method, request.target, skip_host=True, skip_accept_encoding=True
            )
            for name, value in request.headers:
                if name.lower() not in _HOP_BY_HOP | without:
                    connection.putheader(name, value)
            connection.endheaders()
            connection.send(request.body[:nbytes])
            if nbytes is not None:
                return Answer(0, [], b"")
            response = connection.getresponse()
            body = response.read()
            headers = [
                (name, value)
                for name, value in response.getheaders()
                if name.lower() not in _HOP_BY_HOP
            ]
            return Answer(response.status, headers, body)

    def _pass(self, nbytes: int) -> None:
        """Wait until `nbytes` may pass."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + nbytes / self.bytes_per_s
            wait_s = self._free_at - now
        time.sleep(wait_s)

    def _answer(self, request: Request) -> Answer | None:  # noqa: PLR0911
        """Carry out a request and what a rule does to it; return the answer, None if the connection ends."""
        rule = self._rule_for(request)
        match rule and rule.fault:
            case Fault.DROP_REQUEST:
                return None
            case Fault.DROP_ANSWER:
                self._forward(request)
                return None
            case Fault.LATE:
                with self._lock:
                    self._late.append(request)
                return None
            case Fault.CUT_UPLOAD:
                self._forward(request, nbytes=len(request.body) // 2)
                return None
            case Fault.DUPLICATE:
                self._forward(request)
            case Fault.STATUS | Fault.STATUS_AFTER:
                assert rule is not None
                if rule.fault is Fault.STATUS_AFTER:
                    self._forward(request)
                return Answer(
                    rule.status, [("Content-Type", "application/xml")], _error_body(rule.status)
                )
            case Fault.ERROR_IN_200:
                return Answer(200, [("Content-Type", "application/xml")], _error_body(500))
            case Fault.LOSE_ACKNOWLEDGED:
                etag = hashlib.md5(request.body, usedforsecurity=False).hexdigest()
                return Answer(200, [("ETag", f'"{etag}"')], b"")
            case Fault.DELAY:
                assert rule is not None
                time.sleep(rule.delay_s)
        answer = self._forward(
            request,
            without=_CONDITIONS if rule and rule.fault is Fault.UNCONDITIONAL else frozenset(),
        )
        return _damaged(answer, rule.fault) if rule else answer


def _error_body(status: int) -> bytes:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{_ERRORS[status]}</Code>'
        "<Message>injected by a test</Message><RequestId>0</RequestId></Error>"
    ).encode()


def _damaged(answer: Answer, fault: Fault) -> Answer:
    """Return what the client gets of an answer. A Content-Length that is larger than the body ends the connection."""
    middle = len(answer.body) // 2
    if fault is Fault.CUT_DOWNLOAD:
        return dataclasses.replace(answer, body=answer.body[:middle])
    if fault is Fault.TRUNCATE:
        headers = [
            (name, value) for name, value in answer.headers if name.lower() != "content-length"
        ]
        return Answer(answer.status, headers, answer.body[:middle])
    if fault is Fault.CORRUPT and answer.body:
        changed = bytes([answer.body[middle] ^ 1])
        return dataclasses.replace(
            answer, body=answer.body[:middle] + changed + answer.body[middle + 1 :]
        )
    return answer


class _Listener(http.server.ThreadingHTTPServer):
    """Accept connections, a thread for each."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, proxy: Proxy) -> None:
        self.proxy: Final = proxy
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that give up and servers that end are what the proxy is for."""

    def end_connections(self) -> None:
        """End the connections that clients keep."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Connection(http.server.BaseHTTPRequestHandler):
    """One client's connection."""

    server: _Listener
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer one request."""
        proxy = self.server.proxy
        self.close_connection = True
        if proxy.unreachable:
            return
        request = Request(self.command, self.path, list(self.headers.items()), self._body())
        answer = proxy._answer(request)
        if answer is None:
            return
        named = {name.lower(): value for name, value in answer.headers}
        nbytes = int(named.get("content-length", len(answer.body)))
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            if name.lower() != "content-length":
                self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(nbytes))
        self.end_headers()
        if self.command != "HEAD":
            for begin in range(0, len(answer.body), _CHUNK_NBYTES):
                chunk = answer.body[begin : begin + _CHUNK_NBYTES]
                proxy._pass(len(chunk))
                self.wfile.write(chunk)
        whole = self.command == "HEAD" or nbytes == len(answer.body)
        self.close_connection = not whole or self.headers.get("Connection", "").lower() == "close"

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _body(self) -> bytes:
        body = bytearray()
        nbytes = int(self.headers.get("Content-Length") or 0)
        while len(body) < nbytes:
            chunk = self.rfile.read(min(_CHUNK_NBYTES, nbytes - len(body)))
            if not chunk:
                raise ConnectionError("the client ended the connection")
            self.server.proxy._pass(len(chunk))
            body += chunk
        return bytes(body)

"""A web server for `view`: the page and one directory, for this machine alone, read-only.

Each URL begins with a random token, so that other programs and pages of the machine can't guess the
address. The server answers only requests with the server's own host name, follows no symbolic link
and serves no file outside of the directory.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Final
from urllib.parse import unquote

LOOPBACK: Final = "127.0.0.1"
#: The files of the page with their media types.
PAGE_FILES: Final[Mapping[str, str]] = {
    "index.html": "text/html; charset=utf-8",
    "view.js": "text/javascript; charset=utf-8",
    "view.css": "text/css; charset=utf-8",
}
_DATA: Final = "data"
_RANGE: Final = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?")
#: Sent with each answer. The page's own policy stands in the page.
_HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ViewServer(ThreadingHTTPServer):
    """The server of a page and a directory.

    Attributes:
        token: the first part of each path.
        page: the directory of the page's files.
        root: the descriptor of the served directory.
    """

    daemon_threads = True

    def __init__(self, page: Path, directory: Path) -> None:
        self.token: Final = secrets.token_urlsafe(16)
        self.page: Final = page
        self.root: Final = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        super().__init__((LOOPBACK, 0), _Handler)

    @property
    def url(self) -> str:
        """The address of the page, which opens the directory."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/?url={_DATA}/"

    def server_close(self) -> None:
        """Close the socket and the directory."""
        super().server_close()
        os.close(self.root)


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """A range of the bytes of a file, or the whole file."""

    begin: int
    end: int
    is_part: bool


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a header and a body are two packets; the second never waits
    server: ViewServer

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Write no log."""

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "ckptfmt"

    def _answer(self, *, has_body: bool) -> None:
        port = self.server.server_port
        if self.headers.get_all("Host") not in ([f"{LOOPBACK}:{port}"], [f"localhost:{port}"]):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST)
            return
        path = self.path.partition("?")[0]
        _, token, *names = path.split("/")
        if not names or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        try:
            if names[0] == _DATA and len(names) > 1:
                self._answer_data(
                    [unquote(name, errors="surrogateescape") for name in names[1:]],
                    has_body=has_body,
                )
            else:
                self._answer_page("/".join(names), has_body=has_body)
        except OSError:  # nothing there, a link, no permission, a client that went away
            self.close_connection = True

    def _answer_page(self, name: str, *, has_body: bool) -> None:
        name = name or "index.html"
        if name not in PAGE_FILES:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        content = (self.server.page / name).read_bytes()
        self._send_bytes(content, PAGE_FILES[name], has_body=has_body)

    def _answer_data(self, names: Sequence[str], *, has_body: bool) -> None:
        is_folder = names[-1] == ""
        try:
            descriptor = open_below(self.server.root, names[:-1] if is_folder else names)
        except (OSError, ValueError) as error:
            is_barred = isinstance(error, PermissionError)
            self._refuse(HTTPStatus.FORBIDDEN if is_barred else HTTPStatus.NOT_FOUND)
            return
        try:
            mode = os.fstat(descriptor).st_mode
            if is_folder and stat.S_ISDIR(mode):
                listing = json.dumps(_list(descriptor)).encode()
                self._send_bytes(listing, "application/json", has_body=has_body)
            elif not is_folder and stat.S_ISREG(mode):
                with open(descriptor, "rb", closefd=False) as file:
                    self._send_file(file, has_body=has_body)
            else:
                self._refuse(HTTPStatus.NOT_FOUND)
        finally:
            os.close(descriptor)

    def _send_file(self, file: IO[bytes], *, has_body: bool) -> None:
        """Send a file, or the range of the file that the request names."""
        nbytes = os.fstat(file.fileno()).st_size
        span = _span_of(self.headers.get("Range"), nbytes)
        if span is None:
            self._start(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, "text/plain")
            self.send_header("Content-Range", f"bytes */{nbytes}")
            self.end_headers()
            return
        status = HTTPStatus.PARTIAL_CONTENT if span.is_part else HTTPStatus.OK
        self._start(status, span.end - span.begin, "application/octet-stream")
        self.send_header("Accept-Ranges", "bytes")
        if span.is_part:
            self.send_header("Content-Range", f"bytes {span.begin}-{span.end - 1}/{nbytes}")
        self.end_headers()
        if has_body and span.end > span.begin:
            sent = self.connection.sendfile(file, span.begin, span.end - span.begin)
            if sent < span.end - span.begin:  # the file was truncated in the meantime
                self.close_connection = True

    def _send_bytes(self, content: bytes, media_type: str, *, has_body: bool) -> None:
        self._start(HTTPStatus.OK, len(content), media_type)
        self.end_headers()
        if has_body:
            self.wfile.write(content)

    def _refuse(self, status: HTTPStatus) -> None:
        self._start(status, 0, "text/plain")
        self.end_headers()

    def _start(self, status: HTTPStatus, nbytes: int, media_type: str) -> None:
        """Begin an answer. Names of files and folders never stand in a header."""
        self.send_response(status)
        self.send_header("Content-Length", str(nbytes))
        self.send_header("Content-Type", media_type)
        for name, value in _HEADERS.items():
            self.send_header(name, value)


def open_below(root: int, names: Sequence[str]) -> int:
    """Open a file or folder below a directory, without following a link.

    Args:
        root: the descriptor of the directory.
        names: the names of the folders, and of the file.
    Returns: a new descriptor.
    Raises: OSError; ValueError for a name with a slash or NUL, and for the names "." and "..".
    """
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(name)
    descriptor = os.dup(root)
    try:
        for depth, name in enumerate(names):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            if depth < len(names) - 1:
                flags |= os.O_DIRECTORY
            inner = os.open(name, flags, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _list(folder: int) -> list[dict[str, str]]:
    """List a folder, in the form of nginx's ``autoindex_format json``."""
    with os.scandir(folder) as entries:
        return [{"name": entry.name, "type": _type_of(entry)} for entry in entries]


def _type_of(entry: os.DirEntry[str]) -> str:
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def _span_of(header: str | None, nbytes: int) -> _Span | None:
    """Return the range of a request: the whole file without a usable header, None past the end."""
    found = None if header is None else _RANGE.fullmatch(header)
    if found is None:
        return _Span(0, nbytes, is_part=False)
    begin = int(found[1])
    end = nbytes if found[2] is None else min(int(found[2]) + 1, nbytes)
    return _Span(begin, end, is_part=True) if begin < end else None

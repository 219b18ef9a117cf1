"""Object stores through obstore: S3-compatible servers, Google Cloud Storage, Azure Blob Storage.

A small file is one conditional put (``If-None-Match: *``), which decides commits. Shards and packs
are uploaded in parts, several at a time. Their names are unique to an attempt, so that no other
process creates the same object. Acknowledged puts are durable, and every later read sees them.
"""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import itertools
import posixpath
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from ckptfmt.errors import CkptError, Code, err
from ckptfmt.store.leases import HeldByLeases, Leases, free_key
from ckptfmt.store.obstore_errors import code_of, is_panic, status_of, text_of, without_secrets
from ckptfmt.store.protocol import (
    TEMPORARY_PREFIX,
    Buffer,
    FunctionReader,
    Names,
    RangeReader,
    SizedChunks,
    call_each,
    check_path,
    check_prefix,
    join_path,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

T = TypeVar("T")

#: The kinds of store in URLs.
SCHEMES: Final = ("s3", "gs", "az")
#: Size of a part of an upload, in bytes, and number of concurrent parts. Together they fill a link
#: of 10 Gbit/s at 100 ms for each request, and take 128 MiB of memory.
_PART_NBYTES: Final = 16 << 20
_PART_COUNT: Final = 8
#: Maximum number of parts of an object: S3 allows 10,000.
_MOST_PARTS: Final = 9_000
#: Total time for the attempts to create a file, and the first and the longest pause between
#: attempts, in seconds.
_DEADLINE_S: Final = 60.0
_PAUSE_MIN_S = 0.1
_PAUSE_MAX_S = 5.0
#: Default options of the HTTP client. obstore's own time-out, of 30 seconds in total, is short for
#: a range. A caller who configures an endpoint without TLS intends plain HTTP.
_CLIENT_OPTIONS: Final = {"connect_timeout": "10s", "timeout": "120s", "allow_http": True}
#: Time-out of a part's upload. All concurrent parts share the link: the parts of two concurrent
#: files, 256 MiB, arrive in this time at 0.5 MB/s, and the parts of eight writers of a node at 4
#: MB/s.
_PART_TIMEOUT: Final = "600s"
#: Total time for the repeated uploads of a part without an answer. obstore's own limit, 180 s, ends
#: before its first time-out.
_PART_PATIENCE: Final = dt.timedelta(seconds=1800)
_RETRIES: Final = 6
#: Time-out in seconds, and number of repetitions, of a holder's lease request, which must end well
#: within the lease's term.
_LEASE_TIMEOUT: Final = "8s"
_LEASE_RETRIES: Final = 1
#: Exclusive upper bound of a range's end: obstore has no larger numbers.
_END_LIMIT: Final = 1 << 63
#: Metadata key of an object's creator, a random name. After a lost answer, a writer recognises its
#: own object by this name.
_OWNER: Final = "ckptfmtput"
#: Number of concurrent creations of one name in the test of a server.
_PROBE_COUNT: Final = 8
_PROBE_TIMEOUT: Final = "30s"
#: Servers, by bucket, that passed the test of exclusive creation.
_PROVEN: Final[set[tuple[str, str]]] = set()


class ObjectStore(HeldByLeases):
    """The prefix of a bucket that a URL names, as a `ckptfmt.store.Store`.

    Options and credentials are those of obstore. obstore also reads them from the environment
    (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``,
    ``AZURE_STORAGE_ACCOUNT_NAME`` and so on), and for S3 from the machine. Credentials are never
    written to any file.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``; the prefix
            is used unchanged.
        writable: whether writing calls are allowed (otherwise ``STORE_ACCESS``). Once for each
            bucket and process, the server is then tested: exactly one of several concurrent
            creations of a name must succeed.
        config: options of the store, such as
            ``{"region": "eu-central-1", "endpoint": "https://..."}``.
        client_options: options of the HTTP client, such as
            ``{"timeout": "300s", "allow_http": True}``.
        retry_config: obstore's options for repeated requests.
        credential_provider: the object from which obstore requests credentials. A thread then
            writes the saves, since the object can't be passed to another process.

    Raises:
        CkptError: ``STORE_UNSUPPORTED`` for a URL of another kind, without obstore, and for a
            server that doesn't create exclusively; ``ARGUMENT`` for options that obstore doesn't
            know; the errors of every writing call.
    """

    #: Each call is a network request; see `Store`.
    is_remote = True

    def __init__(
        self,
        url: str,
        *,
        writable: bool,
        config: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        retry_config: Mapping[str, Any] | None = None,
        credential_provider: Any = None,
    ) -> None:
        self._place, self._prefix = _split(url)
        options = {"config": config, "client_options": client_options, "retry_config": retry_config}
        self._options = {name: dict(value) for name, value in options.items() if value is not None}
        self._has_provider = credential_provider is not None
        self._writable = writable
        retries = {"max_retries": _RETRIES, **(retry_config or {})}
        make = _client_maker(self._place, config, client_options, credential_provider)
        self._client: Client = make(retries, {})
        lease_client = self._client
        if writable:  # a client takes 15 ms to create; a reader needs only one
            # The client doesn't repeat a creation: the refusal of a repetition would look like the
            # refusal of the first request.
            self._once: Client = make({**retries, "max_retries": 0}, {})
            patience = {"timeout": (client_options or {}).get("timeout", _PART_TIMEOUT)}
            self._uploads: Client = make({"retry_timeout": _PART_PATIENCE, **retries}, patience)
            lease_client = make(
                {**retries, "max_retries": _LEASE_RETRIES}, {"timeout": _LEASE_TIMEOUT}
            )
        self._lease_objects = _LeaseObjects(self, lease_client)
        self._leases = Leases(self._lease_objects, writable=writable)
        if writable:
            self._prove(lambda: make({**retries, "max_retries": 0}, {"timeout": _PROBE_TIMEOUT}))

    @property
    def name(self) -> str:
        """The URL."""
        return join_path(self._place, self._prefix)

    @property
    def address(self) -> dict[str, Any] | None:
        """The arguments for the same store in another process; None for non-plain options."""
        values = [value for options in self._options.values() for value in options.values()]
        if self._has_provider or not all(
            isinstance(value, str | int | float | None) for value in values
        ):
            return None
        return {"url": self.name, **self._options}

    def __repr__(self) -> str:
        return f"ObjectStore({self.name!r}, writable={self._writable})"

    def at(self, prefix: str) -> ObjectStore:
        """Return the same store with `prefix` as root; see `Store.at`."""
        check_prefix(prefix)
        return self._with_prefix(join_path(self._prefix, prefix))

    def beside(self, name: str) -> ObjectStore:
        """Return the read-only store of a sibling prefix; see `Store.beside`.

        Raises: CkptError(UNSAFE_PATH), also for a whole bucket, which has no siblings.
        """
        check_path(name)
        if not self._prefix:
            raise err(
                Code.UNSAFE_PATH,
                f"beside {self.name} is nothing",
                where=name,
                requirement="REQ-CKP-001",
            )
        other = self._with_prefix(join_path(self._prefix.rpartition("/")[0], name))
        other._writable = False  # noqa: SLF001
        other._leases = Leases(self._lease_objects, writable=False)  # noqa: SLF001
        return other

    def _with_prefix(self, prefix: str) -> ObjectStore:
        other = copy.copy(self)
        other._prefix = prefix  # noqa: SLF001
        return other

    # --- writing ----------------------------------------------------------------------------------

    def create(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Create an object exclusively and whole; see `Store.create`.

        For an object larger than one part, in `SizedChunks`, the store only checks for an existing
        object before the upload: obstore offers no condition for a multipart upload. Such files
        have names that are unique to an attempt. A failed upload is aborted. After a kill, or a
        lost abort request, the parts stay unlisted until the bucket's own rule removes them:
        ``AbortIncompleteMultipartUpload`` of S3 and Google Cloud Storage; Azure removes them after
        a week.
        """
        key = self._key_to_change(path)
        if isinstance(chunks, SizedChunks) and chunks.most_nbytes > _PART_NBYTES:
            first, rest = _draw_first(chunks)
            if rest is not None:
                self._create_in_parts(
                    path, key, itertools.chain(first, rest), most_nbytes=chunks.most_nbytes
                )
                return
            chunks = first
        self._create_at_once(path, key, b"".join(chunks))

    def replace(self, path: str, data: bytes) -> None:
        """Write `data` to an object, and replace existing contents; see `Store.replace`.

        A request whose answer was lost may arrive later, and the put has no condition. Page 70 of
        the specification explains why the replaced files tolerate this.
        """
        key = self._key_to_change(path)
        with self._named_errors(path, missing=Code.STORE_IO):
            self._client.put(key, bytes(data), use_multipart=False)

    def delete(self, path: str) -> None:
        """Remove an object; see `Store.delete`."""
        key = self._key_to_change(path)
        with (
            self._named_errors(path, missing=Code.STORE_IO),
            contextlib.suppress(FileNotFoundError),
        ):
            self._client.delete(key)

    # --- reading ----------------------------------------------------------------------------------

    def read(self, path: str, *, limit_nbytes: int) -> bytes:
        """Return a whole small object; see `Store.read`."""
        key = self._key(path)
        with self._named_errors(path):
            found = self._client.get(key)
            if found.meta["size"] > limit_nbytes:
                detail = f"{found.meta['size']} bytes, of {limit_nbytes} allowed"
                raise err(Code.LIMIT_EXCEEDED, detail, where=path, requirement="REQ-DOC-008")
            return bytes(found.bytes())

    def read_range(self, path: str, byte_begin: int, nbytes: int) -> bytes:
        """Return exactly a range of an object; see `Store.read_range`."""
        return bytes(self._get_range(path, byte_begin, nbytes))

    @contextlib.contextmanager
    def open_ranges(self, path: str) -> Iterator[RangeReader]:
        """Open an object for range reads, without a request; see `Store.open_ranges`."""
        self._key(path)
        # A range lies in the answer's own memory.
        yield FunctionReader(
            lambda begin, nbytes, _: memoryview(self._get_range(path, begin, nbytes))
        )

    def waits(self, path: str) -> bool:
        """Return True: reads wait for a network; see `Store.waits`."""
        del path
        return True

    def nbytes(self, path: str) -> int:
        """Return an object's size in bytes; see `Store.nbytes`."""
        key = self._key(path)
        with self._named_errors(path):
            return self._client.head(key)["size"]

    def list(self, prefix: str) -> Names:
        """Return the paths of all objects below `prefix`; see `Store.list`."""
        check_prefix(prefix)
        root = f"{self._prefix}/" if self._prefix else ""
        with self._named_errors(prefix):
            pages = self._client.list(join_path(self._prefix, prefix) or None)
            paths = [entry["path"].removeprefix(root) for page in pages for entry in page]
        return sorted(path for path in paths if f"/{TEMPORARY_PREFIX}" not in f"/{path}")

    def list_names(self, prefix: str) -> Names:
        """Return the names of objects and sub-prefixes below `prefix`; see `Store.list_names`."""
        check_prefix(prefix)
        with self._named_errors(prefix):
            found = self._client.list_with_delimiter(join_path(self._prefix, prefix) or None)
        names = [posixpath.basename(entry["path"]) for entry in found["objects"]]
        names += [posixpath.basename(directory) + "/" for directory in found["common_prefixes"]]
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def _get_range(self, path: str, byte_begin: int, nbytes: int) -> Any:
        key = self._key(path)
        file_nbytes = None
        with self._named_errors(path):
            if min(byte_begin, nbytes) >= 0 and 0 < nbytes < _END_LIMIT - byte_begin:
                try:
                    found = self._client.get(
                        key, options={"range": (byte_begin, byte_begin + nbytes)}
                    )
                    content = found.bytes()
                    file_nbytes = found.meta["size"]
                except Exception as error:
                    if status_of(error) != 416:  # no such range
                        raise
                else:
                    if len(content) == nbytes:
                        return content
            file_nbytes = self._client.head(key)["size"] if file_nbytes is None else file_nbytes
        if 0 <= byte_begin <= byte_begin + nbytes <= file_nbytes:
            if not nbytes:
                return b""
            detail = f"{self.name} sent {len(content)} bytes of {nbytes}"
            raise err(Code.STORE_IO, detail, where=path)
        detail = f"bytes [{byte_begin}, {byte_begin + nbytes}) of a file of {file_nbytes}"
        raise err(Code.FILE_NBYTES, detail, where=path, requirement="REQ-CKP-003")

    # --- steps of create --------------------------------------------------------------------------

    def _create_at_once(self, path: str, key: str, data: bytes) -> None:
        """Create an object by one put, repeated until a known outcome or the deadline."""
        owner = secrets.token_hex(16)
        unknown: CkptError | None = None  # the error of the last attempt without an answer
        for _ in _pauses(_DEADLINE_S):
            try:
                self._once.put(
                    key, data, mode="create", attributes={_OWNER: owner}, use_multipart=False
                )
            except Exception as error:  # noqa: BLE001
                named = self._named(error, path, missing=Code.STORE_IO, taken=Code.STORE_EXISTS)
            else:
                return
            if named.code == Code.STORE_EXISTS:
                try:
                    found = self._owner_of(key)
                except Exception as error:  # noqa: BLE001
                    raise err(
                        Code.STORE_NO_ANSWER, self._named(error, path).detail, where=path
                    ) from None
                if found == owner:
                    return  # an earlier attempt succeeded, and its answer was lost
                if found is not None:
                    raise named
                continue  # the object is just being created or deleted
            if named.code != Code.STORE_NO_ANSWER:
                raise named if unknown is None else unknown
            unknown = named
        raise unknown or err(
            Code.STORE_NO_ANSWER, f"{self.name} answers with conflicts", where=path
        )

    def _create_in_parts(
        self, path: str, key: str, chunks: Iterable[Buffer], *, most_nbytes: int
    ) -> None:
        """Create a large object from concurrent parts; a part without an answer is sent again."""
        with self._named_errors(path, missing=Code.STORE_IO):
            if self._owner_of(key) is not None:
                raise self._taken(path)
        part_nbytes = max(_PART_NBYTES, -(-most_nbytes // _MOST_PARTS))
        owner = secrets.token_hex(16)
        drawn = _Drawn(chunks)
        try:
            with contextlib.closing(drawn):
                self._uploads.put(
                    key,
                    drawn,
                    attributes={_OWNER: owner},
                    use_multipart=True,
                    chunk_size=part_nbytes,
                    max_concurrency=max(1, _PART_COUNT * _PART_NBYTES // part_nbytes),
                )
        except Exception as error:  # noqa: BLE001
            if drawn.error is not None:
                raise drawn.error from None
            named = self._named(error, path, missing=Code.STORE_IO)
            if drawn.is_complete:  # the last request may have succeeded
                try:
                    if self._owner_of(key) == owner:
                        return
                except Exception:  # noqa: BLE001
                    raise err(Code.STORE_NO_ANSWER, named.detail, where=path) from None
            raise named from None

    def _owner_of(self, key: str) -> str | None:
        """Return the name of an object's creator.

        The name is ``""`` for an object of another program; None stands for a missing object.
        """
        try:
            found = self._client.get(key, options={"head": True})
        except FileNotFoundError:
            return None
        return str(found.attributes.get(_OWNER, ""))

    # --- opening ----------------------------------------------------------------------------------

    def _prove(self, make_client: Callable[[], Client]) -> None:
        """Check that of several concurrent creations of one name exactly one succeeds.

        A server that has passed the check in this process isn't tested again.

        Args:
            make_client: creates the client for the test, which repeats no request and has a
                time-out short enough for an interactive user.

        Raises: CkptError(STORE_UNSUPPORTED).
        Spec: REQ-STO-001.
        """
        proven = (self._place, str(self._options.get("config", {}).get("endpoint", "")))
        if proven in _PROVEN:
            return
        client = make_client()
        # An object left behind by a kill or a lost request expires like a lease.
        key = free_key(self._prefix)
        begin = threading.Barrier(_PROBE_COUNT)

        def create(number: int) -> CkptError | None:
            with contextlib.suppress(threading.BrokenBarrierError):  # some threads couldn't start
                begin.wait(_DEADLINE_S)
            try:
                client.put(key, b"%d" % number, mode="create", use_multipart=False)
            except Exception as error:  # noqa: BLE001
                return self._named(error, self.name, missing=Code.STORE_IO, taken=Code.STORE_EXISTS)
            return None

        with self._named_errors(self.name, missing=Code.STORE_IO):
            found = call_each(self, create, range(_PROBE_COUNT), at_once=_PROBE_COUNT)
        if any(error is None or error.code != Code.STORE_NO_ANSWER for error in found):
            with contextlib.suppress(Exception):  # the object is hidden, and expires
                self._client.delete(key)
        other = [error for error in found if error is not None and error.code != Code.STORE_EXISTS]
        winners = found.count(None)
        if winners > 1:
            detail = f"of {_PROBE_COUNT} creations of one name at once {winners} succeeded"
            remedy = "Use a server that honours If-None-Match: * when several writers come at once."
            raise err(
                Code.STORE_UNSUPPORTED,
                detail,
                where=self.name,
                requirement="REQ-STO-001",
                remedy=remedy,
            )
        if other and (winners == 0 or any(error.code != Code.STORE_NO_ANSWER for error in other)):
            raise other[0]
        if winners == 0:
            detail = f"of {_PROBE_COUNT} creations of one name at once none succeeded"
            raise err(Code.STORE_UNSUPPORTED, detail, where=self.name, requirement="REQ-STO-001")
        _PROVEN.add(proven)

    def _key(self, path: str) -> str:
        check_path(path)
        return join_path(self._prefix, path)

    def _key_to_change(self, path: str) -> str:
        key = self._key(path)
        if not self._writable:
            raise err(
                Code.STORE_ACCESS, f"{self.name} is open for reading only", where=path, remedy=""
            )
        return key

    # --- errors -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _named_errors(self, path: str, *, missing: Code = Code.FILE_MISSING) -> Iterator[None]:
        """Convert errors of obstore into errors with a code."""
        try:
            yield
        except CkptError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise self._named(error, path, missing=missing) from None  # may have a signature

    def _named(
        self,
        error: BaseException,
        path: str,
        *,
        missing: Code = Code.FILE_MISSING,
        taken: Code = Code.STORE_NO_ANSWER,
    ) -> CkptError:
        """Return the error with a code for an error of obstore.

        Args:
            missing: the code for a missing object.
            taken: the code for the answers 409 and 412, which mean no refusal where the request had
                no condition.
        """
        if (
            type(error).__name__ in ("AlreadyExistsError", "PreconditionError")
            and taken == Code.STORE_EXISTS
        ):
            return self._taken(path)
        code, remedy = code_of(error, missing=missing)
        if code == Code.FILE_MISSING:
            return err(
                code, f"no such object in {self.name}", where=path, requirement="REQ-CKP-004"
            )
        return err(code, f"{text_of(error)} in {self.name}", where=path, remedy=remedy)

    def _taken(self, path: str) -> CkptError:
        return err(Code.STORE_EXISTS, f"the file is in {self.name} already", where=path)


class _LeaseObjects:
    """The leases in a bucket; see `LeaseObjects`."""

    def __init__(self, store: ObjectStore, client: Client) -> None:
        self._store = store
        self._client = client

    def put(self, key: str) -> None:
        """Write a lease; see `LeaseObjects.put`."""
        with self._store._named_errors(key, missing=Code.STORE_IO):  # noqa: SLF001
            self._client.put(key, b"", use_multipart=False)

    def delete(self, key: str) -> None:
        """Remove a lease; see `LeaseObjects.delete`."""
        with (
            self._store._named_errors(key, missing=Code.STORE_IO),  # noqa: SLF001
            contextlib.suppress(FileNotFoundError),
        ):
            self._client.delete(key)

    def list_modified(self, directory: str) -> list[tuple[str, float]]:
        """Return keys and times; see `LeaseObjects.list_modified`."""
        with self._store._named_errors(directory):  # noqa: SLF001
            return [
                (entry["path"], entry["last_modified"].timestamp())
                for page in self._client.list(directory)
                for entry in page
            ]


class _Drawn:
    """The chunks of an upload in progress, which are drawn in a separate thread.

    The chunks may come from a bucket, too, and obstore panics at a request within a request.

    Attributes:
        is_complete: whether all chunks were drawn.
        error: the error that the chunks raised; None without an error.
    """

    def __init__(self, chunks: Iterable[Buffer]) -> None:
        self._chunks = iter(chunks)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptfmt-draw")
        self.is_complete = False
        self.error: BaseException | None = None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def __iter__(self) -> _Drawn:
        return self

    def __next__(self) -> Buffer:
        try:
            chunk = self._thread.submit(next, self._chunks, None).result()
        except BaseException as error:
            self.error = error
            raise
        if chunk is None:
            self.is_complete = True
            raise StopIteration
        return chunk


def _draw_first(chunks: SizedChunks) -> tuple[list[Buffer], Iterator[Buffer] | None]:
    """Return the first chunks, which together exceed the size of a part, and the remaining chunks.

    The second value is None if all chunks together don't exceed the size of a part.
    """
    drawn: list[Buffer] = []
    rest = iter(chunks)
    nbytes = chunks.nbytes or 0
    while nbytes <= _PART_NBYTES:
        chunk = next(rest, None)
        if chunk is None:
            return drawn, None
        drawn.append(chunk)
        nbytes += memoryview(chunk).nbytes
    return drawn, rest


def is_url(path: object) -> bool:
    """Return whether a path is a URL.

    >>> is_url("s3://bucket/run"), is_url("/data/run")
    (True, False)
    """
    return isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def _split(url: str) -> tuple[str, str]:
    """Return the bucket's URL, and the prefix in the bucket.

    >>> _split("s3://bucket/runs/a/")
    ('s3://bucket', 'runs/a')
    """
    parts = urlsplit(url)
    shown = without_secrets(url)
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise err(
            Code.STORE_UNSUPPORTED,
            "no such kind of URL",
            where=shown,
            remedy=f"One of {known}, or a path.",
        )
    if not parts.netloc or "@" in parts.netloc:
        remedy = (
            f"{parts.scheme}://bucket/prefix; credentials come from the environment or from"
            " ObjectStore(config=)."
        )
        raise err(Code.ARGUMENT, "the URL doesn't name a bucket alone", where=shown, remedy=remedy)
    prefix = url.partition("://")[2].partition("/")[2].strip("/")
    check_prefix(prefix)
    return f"{parts.scheme}://{parts.netloc}", prefix


def _client_maker(
    place: str,
    config: Mapping[str, Any] | None,
    client_options: Mapping[str, Any] | None,
    credential_provider: Any,
) -> Callable[[Mapping[str, Any], Mapping[str, Any]], Client]:
    """Return a function that creates a client of a bucket.

    The function takes the options for repeated requests, and further options of the HTTP client.
    """
    try:
        from obstore.store import from_url  # noqa: PLC0415
    except ImportError as error:
        remedy = 'pip install "ckptfmt[cloud]"'
        raise err(
            Code.STORE_UNSUPPORTED, "URLs need obstore", where=place, remedy=remedy
        ) from error
    options = {**_CLIENT_OPTIONS, **(client_options or {})}
    provider = {} if credential_provider is None else {"credential_provider": credential_provider}

    def make(retries: Mapping[str, Any], more: Mapping[str, Any]) -> Client:
        given = {
            "config": dict(config or {}),
            "client_options": {**options, **more},
            "retry_config": retries,
        }
        try:
            return from_url(place, **given, **provider)  # type: ignore[arg-type, no-any-return, call-overload, unused-ignore]
        except Exception as error:  # noqa: BLE001
            raise err(
                Code.ARGUMENT,
                text_of(error),
                where=place,
                remedy="See obstore's documentation of options.",
            ) from None

    return make


def _pauses(deadline_s: float) -> Iterator[None]:
    """Yield at once, then after increasing pauses, until the deadline."""
    end = time.monotonic() + deadline_s
    pause = _PAUSE_MIN_S
    yield None
    while time.monotonic() + pause < end:
        time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
        yield None
        pause = min(2 * pause, _PAUSE_MAX_S)

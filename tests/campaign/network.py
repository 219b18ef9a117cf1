"""Homes of a run behind proxies, which cut, delay and refuse the requests of one job."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from ckptfmt.store import ObjectStore

#: What a proxy does: forward; end each connection; accept and never answer; forward the request and
#: end the connection instead of the answer; forward late.
PASS, REFUSE, HOLE, CUT, DELAY = "pass", "refuse", "hole", "cut", "delay"
_DELAY_S: Final = 0.25
_RETRY: Final = {"max_retries": 2}


def open_home(url: str, endpoint: str, *, timeout_s: int) -> ObjectStore:
    """Return a home's store without a request: a home may be away.

    Args:
        timeout_s: longest time of a request, in seconds.
    """
    user = {"access_key_id": "test", "secret_access_key": "testsecret", "region": "us-east-1"}
    config = {**user, "endpoint": endpoint}
    client = {"connect_timeout": "1s", "timeout": f"{timeout_s}s", "allow_http": True}
    return ObjectStore(
        url, writable=False, config=config, client_options=client, retry_config=_RETRY
    )


class Gate:
    """A proxy before a home for one job.

    Attributes:
        mode: see `PASS`.
        url: the endpoint for the job.
    """

    def __init__(self, host: str, port: int) -> None:
        self.mode = PASS
        self.url = ""
        self._server = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen at a free port."""
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def turn(self, mode: str) -> None:
        """Change the mode; a connection that was left without an answer never gets one."""
        before, self.mode = self.mode, mode
        if mode == REFUSE or before == HOLE != mode:
            for writer in list(self._writers):
                writer.transport.abort()

    async def close(self) -> None:
        """End all connections and the proxy."""
        self.turn(REFUSE)
        if self._listener is not None:
            self._listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        up_writer = None
        try:
            if self.mode == REFUSE:
                return
            if self.mode == HOLE:
                while await reader.read(1 << 16):
                    pass
                return
            up_reader, up_writer = await asyncio.open_connection(*self._server)
            answers = asyncio.ensure_future(self._answer(up_reader, writer))
            try:
                while chunk := await reader.read(1 << 16):
                    if self.mode == REFUSE:
                        break
                    if self.mode == DELAY:
                        await asyncio.sleep(_DELAY_S)
                    if self.mode != HOLE:
                        up_writer.write(chunk)
                        await up_writer.drain()
            finally:
                answers.cancel()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            for one in (writer, up_writer):
                if one is not None:
                    one.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                if self.mode in (CUT, REFUSE):
                    break
                if self.mode != HOLE:
                    writer.write(chunk)
                    await writer.drain()
        writer.transport.abort()


class Network:
    """The proxies of all jobs, served by a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def make_gates(self, servers: Iterable[str]) -> list[Gate]:
        """Return a proxy for a job before each server."""

        async def make() -> list[Gate]:
            gates = []
            for server in servers:
                split = urlsplit(server)
                gate = Gate(split.hostname or "", split.port or 0)
                await gate.open()
                gates.append(gate)
            return gates

        return asyncio.run_coroutine_threadsafe(make(), self._loop).result()

    def turn(self, gate: Gate, mode: str) -> None:
        """Change the mode of a proxy, at once."""
        done = threading.Event()

        def turn() -> None:
            gate.turn(mode)
            done.set()

        self._loop.call_soon_threadsafe(turn)
        done.wait()

    def close(self, gates: Iterable[Gate]) -> None:
        """End proxies."""
        for gate in gates:
            asyncio.run_coroutine_threadsafe(gate.close(), self._loop).result()

    def end(self) -> None:
        """End the thread, after all proxies."""

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

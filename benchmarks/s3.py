"""Rates of saves to an S3 server and of loads, with obstore, DCP's S3 writer, and torch.save."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckptfmt
from benchmarks.cached_lost import measure_cached_lost, sum_up_cached_lost
from benchmarks.figures import Figure, median_of, paired_ratio, summarize
from benchmarks.load import Destination
from benchmarks.peers import process_group
from benchmarks.record import Outcome
from benchmarks.rounds import Progress, Workplace, check_room, order_of_round
from benchmarks.state import Bench, Trainer
from ckptfmt import limits
from ckptfmt.digest import block_digests
from ckptfmt_tools.demo.servers import KINDS, Endpoint, Server, choose_kind
from tests.s3.proxy import Proxy

_ROUNDS: Final = 7
_TRIALS: Final = 2  # trials per setting, for the choice by median
_BOUND: Final = "obstore"
_HASHING: Final = "hashing"
#: Parts of an upload and ranges of a download: bytes of each, and the number of concurrent
#: requests.
_SETTINGS: Final = tuple((mib << 20, count) for mib in (8, 16, 32) for count in (4, 8, 16))
#: The link's rate for timed deltas, in bytes per second.
_LINK_NBYTES_PER_S: Final = 20_000_000

#: Our rate divided by a peer's rate: name, operation, peer, goal.
_RATIOS: Final = {
    "save_vs_obstore": ("save", _BOUND, ">= 0.9"),
    "load_vs_obstore": ("load", _BOUND, ">= 0.85"),
    "save_vs_hashing": ("save", _HASHING, ""),
    "load_vs_hashing": ("load", _HASHING, ""),
    "save_vs_s3torchconnector": ("save", "s3torchconnector", ""),
    "load_vs_s3torchconnector": ("load", "s3torchconnector", ""),
    "save_vs_s3fs": ("save", "s3fs", ""),
    "load_vs_s3fs": ("load", "s3fs", ""),
}
#: The speedup of a delta over a full save, divided by the reduction of bytes; and a training's loss
#: for a save through a cache, divided by the loss for a save to a local directory.
_OTHER_GOALS: Final = {"delta_vs_bytes": ">= 0.85", "cache_vs_local_lost": "<= 1"}


class Contestant(Protocol):
    """A contestant that saves and loads.

    Attributes:
        name: the name in the record.
        verifies: the verified part of a load.
    """

    name: str
    verifies: str

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        ...

    def save(self, key: str) -> None:
        """Save under a fresh name, until readers can read the whole state."""
        ...

    def load(self, key: str) -> object:
        """Fill the tensors from a saved name, and return objects to release untimed."""
        ...


class Ours:
    """A `Checkpointer` with a run in the bucket, and `ckptfmt.load` from the bucket."""

    name = "ckptfmt"
    verifies = "every byte"

    def __init__(self, bucket: str, trainer: Trainer, *, key: str, delta: Any = "off") -> None:
        self._trainer = trainer
        self._run = f"{bucket}/{key}"
        self._checkpointer = ckptfmt.Checkpointer(
            self._run,
            trainer.state,
            resume="fresh",
            keep=1,
            saving=ckptfmt.Saving(delta=delta, overlap=False),
        )
        self._checkpointer.prepare()
        self.reads: dict[str, int] = {}

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "Checkpointer.save, until COMMITTED; ckptfmt.load",
            "reports": list(self._checkpointer.reports),
        }

    def save(self, key: str) -> None:  # noqa: ARG002
        """Save the next step."""
        self._checkpointer.step += 1
        handle = self._checkpointer.save()
        assert handle is not None
        handle.wait()

    def load(self, key: str) -> None:  # noqa: ARG002
        """Load the newest checkpoint of the run."""
        report = ckptfmt.load(self._run, self._trainer.state)
        self.reads = {"requests": report.reads.request_count, "nbytes": report.reads.read_nbytes}  # type: ignore[union-attr]

    def settle(self) -> None:
        """Wait until the saver has cleaned up after the last commit."""
        while ckptfmt.Run(self._run).pending:
            time.sleep(0.05)

    def stored_nbytes(self) -> int:
        """Return the size of the newest checkpoint's own files."""
        return ckptfmt.Run(self._run).newest().stored_nbytes or 0

    def close(self) -> None:
        """Stop the saver."""
        self._checkpointer.close()


class Bound:
    """obstore alone: equally many bytes from a buffer in parts, and ranges into a discarded buffer.

    Attributes:
        content: the bytes.
        setting: bytes per part, and the number of concurrent parts.
    """

    name = _BOUND
    verifies = "nothing"

    def __init__(self, bucket: str, content: torch.Tensor, setting: tuple[int, int]) -> None:
        import obstore  # noqa: PLC0415
        from obstore.store import from_url  # noqa: PLC0415

        self._obstore = obstore
        self._store = from_url(bucket, client_options={"timeout": "120s", "allow_http": True})
        self.content = memoryview(content.numpy())
        self.setting = self._part_nbytes, self._count = setting

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "obstore.put; obstore.get_range",
            "part_nbytes": self._part_nbytes,
            "at_once": self._count,
        }

    def save(self, key: str) -> None:
        """Upload an object."""
        self._obstore.put(
            self._store,
            key,
            self.content,
            use_multipart=True,
            chunk_size=self._part_nbytes,
            max_concurrency=self._count,
        )

    def load(self, key: str) -> None:
        """Get all ranges."""
        self.load_each(key, lambda _begin, _found: None)

    def load_each(self, key: str, take: Callable[[int, memoryview], object]) -> None:
        """Get all ranges, and pass on each range with the number of its first byte."""

        def get(begin: int) -> None:
            end = min(begin + self._part_nbytes, len(self.content))
            take(begin, memoryview(self._obstore.get_range(self._store, key, start=begin, end=end)))

        with ThreadPoolExecutor(self._count) as threads:
            list(threads.map(get, range(0, len(self.content), self._part_nbytes)))


class Best:
    """A contestant with separate settings for saves and loads."""

    def __init__(self, saver: Contestant, loader: Contestant) -> None:
        self.name = saver.name
        self.verifies = saver.verifies
        self.saver = saver
        self.loader = loader

    def describe(self) -> dict[str, object]:
        """Return the settings of both."""
        saving = self.saver.describe()
        loading = self.loader.describe()
        return {
            "call": saving.pop("call"),
            "save": saving,
            "load": {key: loading[key] for key in saving},
        }

    def save(self, key: str) -> None:
        """Save."""
        self.saver.save(key)

    def load(self, key: str) -> object:
        """Load."""
        return self.loader.load(key)


class Hashing:
    """obstore and BLAKE3 digests of the same bytes: a lower bound for saves and loads.

    A thread computes a save's digests during the upload, as the saver does. A load's digests are
    computed by the threads that get ranges, and the content is copied once, as into tensors.
    """

    name = _HASHING
    verifies = "every byte, against nothing"

    def __init__(self, saver: Bound, loader: Bound) -> None:
        self._saver = saver
        self._loader = loader
        self._target = memoryview(bytearray(len(saver.content)))

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        digests = "BLAKE3, by one thread; of a load by those that get ranges"
        return {**Best(self._saver, self._loader).describe(), "digests": digests}

    def save(self, key: str) -> None:
        """Upload an object, and digest the bytes meanwhile."""
        with ThreadPoolExecutor(1) as threads:
            digests = threads.submit(block_digests, self._saver.content, limits.BLOCK_NBYTES)
            self._saver.save(key)
            digests.result()

    def load(self, key: str) -> None:
        """Get all ranges, and digest and copy each range."""
        target = np.frombuffer(self._target, np.uint8)

        def take(begin: int, found: memoryview) -> None:
            block_digests(found, limits.BLOCK_NBYTES)
            target[begin : begin + len(found)] = np.frombuffer(found, np.uint8)

        self._loader.load_each(key, take)


class Connector:
    """`torch.distributed.checkpoint` through s3torchconnector's writer and reader for S3."""

    name = "s3torchconnector"
    verifies = "nothing"

    def __init__(
        self, bucket: str, tensors: Mapping[str, torch.Tensor], *, thread_count: int
    ) -> None:
        from s3torchconnector import S3ClientConfig, dcp  # noqa: PLC0415

        self._dcp = dcp
        self._bucket = bucket
        self._tensors = tensors
        self._thread_count = thread_count
        self._config = S3ClientConfig(force_path_style=True)

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "dcp.save with S3StorageWriter; dcp.load",
            "thread_count": self._thread_count,
        }

    def save(self, key: str) -> None:
        """Save."""
        options = {"s3client_config": self._config, "thread_count": self._thread_count}
        writer = self._dcp.S3StorageWriter(
            os.environ["AWS_REGION"], f"{self._bucket}/{key}", **options
        )
        save_dcp(dict(self._tensors), storage_writer=writer)

    def load(self, key: str) -> None:
        """Load in place."""
        options = {"s3client_config": self._config}
        reader = self._dcp.S3StorageReader(
            os.environ["AWS_REGION"], f"{self._bucket}/{key}", **options
        )
        load_dcp(dict(self._tensors), storage_reader=reader)


class TorchS3fs:
    """`torch.save` and `torch.load` on a file of s3fs."""

    name = "s3fs"
    verifies = "nothing"

    def __init__(
        self, bucket: str, tensors: Mapping[str, torch.Tensor], *, block_nbytes: int
    ) -> None:
        import s3fs  # noqa: PLC0415

        self._bucket = bucket.removeprefix("s3://")
        self._tensors = tensors
        self._block_nbytes = block_nbytes
        self._files = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"], use_ssl=False)

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        return {
            "call": "torch.save and torch.load on a file of s3fs",
            "block_nbytes": self._block_nbytes,
        }

    def save(self, key: str) -> None:
        """Save a single object."""
        with self._files.open(f"{self._bucket}/{key}", "wb", block_size=self._block_nbytes) as file:
            torch.save(dict(self._tensors), file)

    def load(self, key: str) -> object:
        """Load a single object, and copy the tensors into place."""
        with self._files.open(f"{self._bucket}/{key}", "rb", block_size=self._block_nbytes) as file:
            found = torch.load(file)
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(found[name])
        return found


def measure_s3(nbytes: int, *, rounds: int | None, place: Workplace, progress: Progress) -> Outcome:
    """Measure saves and loads on a local server in interleaved rounds; deltas; and lost seconds.

    Args:
        nbytes: the approximate size of the state.
        rounds: the number of rounds; None for as many as a figure needs.

    Raises: SystemExit without enough memory or storage; ServerError.
    """
    check_room(place.directory, memory_nbytes=6 * nbytes, storage_nbytes=8 * nbytes)
    rounds = rounds or _ROUNDS
    bench = Bench(
        trainer=Trainer(nbytes, threads=os.cpu_count() or 1), place=place, progress=progress
    )
    kind = choose_kind()
    progress.say(f"s3: starting {KINDS[kind]}")
    with (
        Server(kind) as server,
        _environment(server.endpoint),
        process_group(),
        contextlib.ExitStack() as stack,
    ):
        bucket = f"s3://{server.endpoint.make_bucket()}"
        ours = Ours(bucket, bench.trainer, key="run")
        stack.callback(ours.close)
        races = _Races(bench, Destination(bench.trainer.tensors()), bucket)
        peers, missing = _list_peers(bucket, bench.trainer)
        chosen: list[Best] = []
        for settings in peers:
            try:
                chosen.append(races.choose(settings, min(_TRIALS, rounds)))
            except (
                Exception,
                CheckpointException,
            ) as error:  # any incompatibility of a peer with this server
                if settings[0].name == _BOUND:
                    raise
                missing.append(f"{settings[0].name}: {str(error).strip().splitlines()[-1]}")
        saver = chosen[0].saver
        loader = chosen[0].loader
        assert isinstance(saver, Bound)
        assert isinstance(loader, Bound)
        racing = [ours, *chosen, Hashing(saver, loader)]
        rows = [races.run_round(racing, number, rounds) for number in range(rounds)]
        requests = _count_requests(server.endpoint, bench)
        deltas = [_time_delta(server.endpoint, bench, number) for number in range(min(rounds, 3))]
        lost, lost_notes = measure_cached_lost(bucket, bench, saver.setting, rounds=rounds)
    progress.say("")
    lost_figures, lost_ratios = sum_up_cached_lost(lost)
    return Outcome(
        workload=bench.trainer.describe(),
        settings={one.name: {**one.describe(), "verifies": one.verifies} for one in racing},
        repeats={"s3": rounds, "delta": len(deltas), "lost": len(lost)},
        rounds={"s3": rows, "delta": deltas, "lost": lost},
        figures=_list_figures(rows, bench.trainer.nbytes) | lost_figures,
        ratios=_list_ratios(rows, deltas) | lost_ratios,
        goals={name: goal for name, (*_, goal) in _RATIOS.items() if goal} | _OTHER_GOALS,
        memory={},
        notes={
            "server": f"{KINDS[kind]}, on loopback and on the same processors",
            "missing": missing,
            "requests": requests,
            "tried_s": races.tried,
            "lost": lost_notes,
        },
        cache="the server's own, as it comes; nothing is kept on the client's side",
    )


class _Races:
    """Saves and loads of several contestants in turn, each under a fresh name."""

    def __init__(self, bench: Bench, destination: Destination, bucket: str) -> None:
        self._bench = bench
        self._destination = destination
        self._bucket = bucket
        self._count = 0
        self.tried: dict[str, dict[str, list[float]]] = {}

    def choose(self, settings: Sequence[Contestant], trials: int) -> Best:
        """Return the settings with the shortest median of a save, and of a load."""
        medians = []
        for one in settings:
            self._bench.progress.say(f"s3: trying {one.name}: {one.describe()}")
            times = [self._time(one) for _ in range(trials)]
            medians.append(
                [median_of([time[doing] for time in times]) for doing in ("save", "load")]
            )
        name = settings[0].name
        self.tried[name] = {
            str(one.describe()): median for one, median in zip(settings, medians, strict=True)
        }
        saves, loads = zip(*medians, strict=True)
        return Best(settings[saves.index(min(saves))], settings[loads.index(min(loads))])

    def run_round(
        self, contestants: Sequence[Contestant], number: int, rounds: int
    ) -> dict[str, Any]:
        """Time each contestant once."""
        by_name = {one.name: one for one in contestants}
        order = order_of_round(list(by_name), number)
        seconds = {}
        for name in order:
            self._bench.progress.say(f"s3: round {number + 1} of {rounds}: {name}")
            seconds[name] = self._time(by_name[name])
        return {"order": order, "seconds": seconds}

    def _time(self, one: Contestant) -> dict[str, float]:
        self._count += 1
        key = f"{one.name}-{self._count:05d}"
        begin_s = time.perf_counter()
        one.save(key)
        saved_s = time.perf_counter() - begin_s
        if isinstance(one, Ours):
            one.settle()
        if not isinstance(one, Hashing) and one.name != _BOUND:
            self._destination.spoil()
        begin_s = time.perf_counter()
        left = one.load(key)
        loaded_s = time.perf_counter() - begin_s
        del left
        self._destination.check_all()
        if not isinstance(one, Ours):  # ckptfmt deletes older checkpoints
            self._delete(key)
        return {"save": saved_s, "load": loaded_s}

    def _delete(self, key: str) -> None:
        """Delete the objects of a name: a full server answers no request, without an error."""
        import obstore  # noqa: PLC0415
        from obstore.store import from_url  # noqa: PLC0415

        store = from_url(self._bucket, client_options={"allow_http": True})
        paths = [one["path"] for page in obstore.list(store) for one in page]
        obstore.delete(store, [path for path in paths if path.startswith(key)])


def _list_peers(bucket: str, trainer: Trainer) -> tuple[list[list[Contestant]], list[str]]:
    """Return all peers in each setting worth a trial, and the names of missing peers."""
    tensors = trainer.tensors()
    content = torch.cat(
        [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    )
    makers: dict[str, Callable[[], list[Contestant]]] = {
        _BOUND: lambda: [Bound(bucket, content, setting) for setting in _SETTINGS],
        Connector.name: lambda: [
            Connector(bucket, tensors, thread_count=count) for count in (1, 2, 4)
        ],
        TorchS3fs.name: lambda: [
            TorchS3fs(bucket, tensors, block_nbytes=mib << 20) for mib in (8, 32, 128)
        ],
    }
    found, missing = [], []
    for name, make in makers.items():
        try:
            found.append(make())
        except ImportError as error:
            missing.append(f"{name}: {error}")
    return found, missing


def _count_requests(endpoint: Endpoint, bench: Bench) -> dict[str, dict[str, int]]:
    """Return the number of requests by kind, for a save in a run and for a load."""
    found = {}
    with Proxy(endpoint) as proxy, _environment(proxy.endpoint), contextlib.ExitStack() as stack:
        ours = Ours(f"s3://{endpoint.make_bucket()}", bench.trainer, key="counted")
        stack.callback(ours.close)
        for name, act in (("first save", ours.save), ("save", ours.save), ("load", ours.load)):
            before = dict(proxy.counts)
            act("")
            with _environment(endpoint):  # not counted
                ours.settle()
            found[name] = {
                kind: count - before.get(kind, 0) for kind, count in sorted(proxy.counts.items())
            }
            found[name] = {kind: count for kind, count in found[name].items() if count}
    del found["first save"]
    return found


def _time_delta(endpoint: Endpoint, bench: Bench, number: int) -> dict[str, float]:
    """Time a full save and the delta of the next step behind a slow link, and count their bytes."""
    row: dict[str, float] = {}
    with Proxy(endpoint) as proxy, _environment(proxy.endpoint), contextlib.ExitStack() as stack:
        ours = Ours(f"s3://{endpoint.make_bucket()}", bench.trainer, key="delta", delta="auto")
        stack.callback(ours.close)
        proxy.bytes_per_s = _LINK_NBYTES_PER_S
        for name in ("full", "delta"):
            bench.progress.say(f"s3: behind a slow link, {number + 1}: {name}")
            bench.trainer.step()
            begin_s = time.perf_counter()
            ours.save("")
            row |= {
                f"{name}_s": time.perf_counter() - begin_s,
                f"{name}_nbytes": ours.stored_nbytes(),
            }
    return row


@contextlib.contextmanager
def _environment(endpoint: Endpoint) -> Iterator[None]:
    """Set the environment for access to a server, as users do."""
    before = dict(os.environ)
    os.environ.update(endpoint.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _list_figures(rows: Sequence[Mapping[str, Any]], nbytes: int) -> dict[str, Figure]:
    names = rows[0]["order"]
    return {
        f"{name}_{doing}_gb_per_s": summarize(
            [nbytes / row["seconds"][name][doing] / 1e9 for row in rows]
        )
        for name in names
        for doing in ("save", "load")
    }


def _list_ratios(
    rows: Sequence[Mapping[str, Any]], deltas: Sequence[Mapping[str, float]]
) -> dict[str, Figure]:
    def seconds(name: str, doing: str) -> list[float]:
        return [row["seconds"][name][doing] for row in rows]

    there = set(rows[0]["order"])
    ratios = {
        name: paired_ratio(seconds(peer, doing), seconds(Ours.name, doing))
        for name, (doing, peer, _) in _RATIOS.items()
        if peer in there
    }
    faster = [row["full_s"] / row["delta_s"] for row in deltas]
    fewer = [row["full_nbytes"] / row["delta_nbytes"] for row in deltas]
    return {**ratios, "delta_vs_bytes": paired_ratio(faster, fewer)}

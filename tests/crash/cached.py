"""Kills trainers, with saver and uploader, whose saves go home by way of caches; and holds them to what they told.

A process of its own, with one thread, so that it may fork.

    python -m tests.crash.cached --kills 100 --seed 1 --writers 2
    python -m tests.crash.cached --kills 100 --seed 1 --server ceph --saver process

With ``--server`` the home is a bucket. With ``--saver process`` savers and trainers are killed one
at a time; else saver and uploader are threads of the trainer, and die with it.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from typing import Any, Final, TextIO

import numpy as np
from safetensors.numpy import load_file

import ckptfmt
from ckptfmt.documents.durability import HOME
from ckptfmt.documents.manifest import MANIFEST_NAME, Manifest
from ckptfmt.errors import CkptError, Code
from ckptfmt.read.in_caches import find_elsewhere
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.lineage import RunEntry, list_checkpoints
from ckptfmt.saving.handle import SaveHandle
from ckptfmt.store import LocalStore, is_url, leases, open_store
from ckptfmt.store.protocol import Store
from ckptfmt_tools.demo.servers import KINDS, Server
from tests.interface.test_group import Allgather, run_writers
from tests.store.helpers import FAST_DIRECTORY
from tests.stores.hooked import HookedStore, Operation

#: A launch waits half of it for a living saver, which on a busy machine has much in hand when its
#: trainer is killed.
_DEADLINE_S: Final = 600.0
#: How long a killed trainer lives at most, in seconds, once it has told what was waited for.
_LIFE_S: Final = 0.2
#: What is waited for: nothing, so that it is killed while it finishes what another left; or that it
#: has come so far.
_TARGETS: Final[tuple[str, ...]] = ("", "resumed", "written", "written", "committed")
#: And behind savers that were killed.
_LATER_TARGETS: Final[tuple[str, ...]] = ("", "written", "committed")
#: How many savers are killed before their trainer is, at most, where they are processes.
_SAVER_KILLS: Final = 4
#: How many times as many kills there are at most, while no kill came at a moment of interest.
_KILLS_MORE: Final = 4
#: How long a lease counts here, in seconds: each launch waits so long for a saver that was killed.
_TERM_S: Final = 2.0
#: How long the creation of a file at home takes at most, in seconds: longer than in a cache.
_DELAY_S: Final = 0.02
#: What of a checkpoint stays, beside its register.
_STAYING: Final = (".safetensors", ".msgpack")


@dataclasses.dataclass(slots=True)
class Report:
    """What was done, and what was found.

    Attributes:
        kill_count: trainers and savers killed.
        written_count: saves that all writers told to be written.
        finished_count: launches that resumed from a step that no killed trainer had told to be
            committed.
        node_count: checkpoints that were committed by their documents alone, and are there in the
            end.
        staying_count: files of committed checkpoints that are in caches alone in the end.
        lost: launches that resumed from an older step than all writers told to be written.
        violations: what else was found.
    """

    kill_count: int = 0
    written_count: int = 0
    finished_count: int = 0
    node_count: int = 0
    staying_count: int = 0
    lost: list[str] = dataclasses.field(default_factory=list)
    violations: list[str] = dataclasses.field(default_factory=list)


class _Slow(HookedStore):
    """A home that takes longer than a cache."""

    def before(self, operation: Operation) -> None:
        if operation.op == "create":
            time.sleep(random.uniform(0, _DELAY_S))


def train(
    home: str,
    caches: list[pathlib.Path],
    told_fd: int,
    *,
    saver: Any,
    every: int,
    save_count: int | None,
) -> None:
    """Resume, then save step after step, until killed or so many times; each line that is told has a word first."""
    gather = Allgather(len(caches), timeout_s=2 * _DEADLINE_S)

    def tell(*words: object) -> None:
        os.write(told_fd, (" ".join(map(str, words)) + "\n").encode())

    def body(writer: int) -> None:
        weights = {"w": np.zeros(20_000, np.int64), "v": np.zeros(10_000, np.int64)}
        with ckptfmt.Checkpointer(
            home if saver == "process" or is_url(home) else _Slow(LocalStore(home, writable=True)),
            ckptfmt.State(weights=weights, rng=False),
            cache=caches[writer],
            upload_every=every,
            keep=3,
            saver=saver,
            writer=(writer, len(caches)),
            agree=gather.of(writer),
            deadline_s=_DEADLINE_S,
        ) as checkpointer:
            begin = checkpointer.step
            tell(
                "resumed", writer, begin, all((array == begin).all() for array in weights.values())
            )
            checkpointer.restore_rng()
            handles: list[SaveHandle] = []
            saver_pid: int | None = None
            for step in range(
                begin + 1, sys.maxsize if save_count is None else begin + 1 + save_count
            ):
                checkpointer.step = step
                for array in weights.values():
                    array[...] = step
                handle = _save(checkpointer)
                handles.append(handle)
                if saver == "process" and (pid := _find_saver(checkpointer)) not in (
                    None,
                    saver_pid,
                ):
                    tell("saver", writer, saver_pid := pid)
                for one in list(handles):
                    if one.state == "COMMITTED":
                        tell("committed", writer, one.step)
                        handles.remove(one)
                    elif one.state == "WRITTEN":
                        tell("written", writer, one.step)
                    elif one.error is not None and one.error.code == Code.SAVER_LOST:
                        one.on_failed(lambda _: None)  # it was killed: that is known
                        handles.remove(one)

    for found in run_writers(len(caches), body):
        if found is not None:
            raise found


def _save(checkpointer: ckptfmt.Checkpointer) -> SaveHandle:
    """Save, with another saver where one was killed."""
    while True:
        try:
            handle = checkpointer.save()
        except CkptError as error:
            if error.code != Code.SAVER_LOST:
                raise
        else:
            assert handle is not None
            return handle


def _find_saver(checkpointer: ckptfmt.Checkpointer) -> int | None:
    """Return the process of the saver; None where it was killed just now."""
    link: Any = checkpointer._saves._background._link  # type: ignore[union-attr]
    return None if link is None else link.pid


class _Run:
    """One run with its caches, and what its trainers told.

    Args:
        home: path or URL of the run.
        root: below which the caches lie.
        forget: whether the caches are deleted behind each kill.
        every: of so many saves one goes home in full.
    """

    def __init__(
        self,
        home: str,
        root: pathlib.Path,
        report: Report,
        rng: random.Random,
        *,
        writers: int,
        saver: str,
        forget: bool,
        every: int,
    ) -> None:
        self._every = every
        self._home, self._report, self._rng, self._saver, self._forget = (
            home,
            report,
            rng,
            saver,
            forget,
        )
        self._caches = [root / f"cache-{number}" for number in range(writers)]
        self._written = self._committed = 0

    def train(self, *, save_count: int | None = None) -> None:
        """Start a trainer, kill it or let it end, and judge what it resumed from."""
        if self._forget:
            for cache in self._caches:
                shutil.rmtree(cache, ignore_errors=True)
        self._rng.shuffle(self._caches)  # the processes have other numbers now
        told_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            os.close(told_fd)  # so that who tells notices when nobody listens any more
            try:
                train(
                    self._home,
                    self._caches,
                    write_fd,
                    saver=self._saver,
                    every=self._every,
                    save_count=save_count,
                )
            except BaseException:  # noqa: BLE001
                os.write(write_fd, f"failed {json.dumps(traceback.format_exc())}\n".encode())
                os._exit(1)
            os._exit(0)
        os.close(write_fd)
        lines: list[str] = []
        with os.fdopen(told_fd) as told:
            if save_count is None:
                targets = _TARGETS
                for _ in range(
                    self._rng.randint(0, _SAVER_KILLS) if self._saver == "process" else 0
                ):
                    self._wait_for("saver", told, lines)
                    if saver_pid := _last_saver(lines):
                        self._kill(saver_pid)
                    targets = _LATER_TARGETS
                self._wait_for(self._rng.choice(targets), told, lines)
                self._kill(pid)
            lines += told.readlines()
        _, status = os.waitpid(pid, 0)
        if save_count is not None and status:
            self._report.violations.append(f"the last trainer ended with status {status}")
        self._judge(lines)

    def _wait_for(self, target: str, told: TextIO, lines: list[str]) -> None:
        """Read what is told until there is a line of a kind; and wait for a moment."""
        while target and (line := told.readline()):
            lines.append(line)
            if line.startswith((target, "failed")):
                break
        time.sleep(self._rng.uniform(0, _LIFE_S))

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self._report.kill_count += 1

    def _judge(self, lines: list[str]) -> None:
        written: dict[int, int] = {}
        for line in lines:
            word, *rest = line.split(maxsplit=1 if line.startswith("failed") else -1)
            if word == "failed":
                self._report.violations.append(rest[0])
            elif word == "resumed":
                _, step, exact = rest
                if int(step) < self._written:
                    self._report.lost.append(
                        f"step {self._written} was written, and step {step} is what is there"
                    )
                if int(step) < self._committed or exact != "True":
                    self._report.violations.append(f"step {self._committed} was committed: {line}")
                self._report.finished_count += rest[0] == "0" and int(step) > self._committed
                self._written = self._committed = int(step)
            elif word == "saver":
                pass
            elif word == "committed":
                self._committed = max(self._committed, int(rest[1]))
            else:
                written[int(rest[0])] = int(rest[1])
        if len(written) == len(self._caches):
            self._report.written_count += 1
            self._written = max(self._written, min(written.values()))
        self._written = max(self._written, self._committed)

    def judge_end(self) -> None:
        """Find what is left when the last trainer has ended: whole checkpoints, and nothing that waits in a cache."""
        home = open_store(self._home, writable=False)
        staying: set[str] = (
            set()
        )  # attempts whose files stay in caches, whether they are at home by now or not
        for entry in list_checkpoints(home):
            place = home.at(entry.name)
            if entry.register is None:
                self._report.violations.append(f"{entry.name} is undecided")
            attempt = ""
            if isinstance(entry.register, Manifest):
                attempt = entry.register.origin.attempt
                if entry.register.durability != HOME:
                    staying.add(attempt)
                    self._report.node_count += 1
                with Checkpoint(place) as checkpoint:
                    elsewhere = [
                        name for names in find_elsewhere(checkpoint).values() for name in names
                    ]
                    if elsewhere:
                        self._judge_staying(entry, elsewhere)
                    for item in () if elsewhere else checkpoint.index.tensors:
                        if not (checkpoint.read(*item.key) == entry.step).all():
                            self._report.violations.append(f"{entry.name} isn't of its step")
            for path in _list_all(place):
                if path != MANIFEST_NAME and not (
                    attempt and attempt in path and path.endswith(_STAYING)
                ):
                    self._report.violations.append(f"{entry.name}/{path} is left")
        self._report.violations += [
            f"{path} is left" for path in _list_all(home) if "savers/" in path
        ]
        for cache in self._caches:
            parts = {path.with_suffix("") for path in cache.rglob("parts/*.msgpack")}
            settled = {path.with_suffix("") for path in cache.rglob("parts/*.settled")}
            self._report.violations += [
                f"{path} waits for nobody"
                for path in sorted(parts ^ settled)
                if not any(attempt in path.name for attempt in staying)
            ]

    def _judge_staying(self, entry: RunEntry, names: list[str]) -> None:
        """Find what is wrong with the files of a checkpoint that are in caches alone."""
        for name in names:
            found = [path for cache in self._caches for path in cache.rglob(name)]
            if not found:
                self._report.violations.append(f"{entry.name}/{name} is nowhere")
            if not all(
                (array == entry.step).all() for path in found for array in load_file(path).values()
            ):
                self._report.violations.append(f"{entry.name}/{name} isn't of its step")
            self._report.staying_count += 1


def _last_saver(lines: list[str]) -> int:
    """Return the process of a saver that was told last; 0 for none."""
    return next((int(line.split()[2]) for line in reversed(lines) if line.startswith("saver")), 0)


def _list_all(store: Store) -> list[str]:
    """Return the paths of all files, those among them that are a store's own."""
    if isinstance(store, LocalStore):
        root = pathlib.Path(store.name)
        return [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    client = store._client  # type: ignore[attr-defined]
    prefix = f"{store._prefix}/"  # type: ignore[attr-defined]
    return [entry["path"].removeprefix(prefix) for page in client.list(prefix) for entry in page]


def kill_many(
    kill_count: int,
    seed: int,
    writers: int,
    *,
    server: str | None = None,
    saver: str = "thread",
    forget: bool = False,
    every: int = 1,
    seconds: float = math.inf,
) -> Report:
    """Kill so many trainers, and savers, of one run, and more until `_has_shown`; then let one come to its end.

    Args:
        server: of the bucket in which the run is; None for a directory.
        saver: ``thread``, or ``process``.
        forget: whether the caches are deleted behind each kill: then saves that were written are
            lost.
        every: as ``upload_every`` of a `Checkpointer`.
        seconds: after how many no trainer is started any more but the last.
    """
    report, rng = Report(), random.Random(seed)
    with contextlib.ExitStack() as stack:
        root = pathlib.Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(dir=FAST_DIRECTORY, prefix="ckptfmt-kill-")
            )
        )
        home = str(root / "home")
        if server is not None:
            endpoint = stack.enter_context(Server(server)).endpoint
            os.environ.update(endpoint.environment)
            home = f"s3://{endpoint.make_bucket()}/run"
            _shorten_leases(root / "site")
        run = _Run(
            home, root, report, rng, writers=writers, saver=saver, forget=forget, every=every
        )
        end_s = time.monotonic() + seconds
        while (
            (
                report.kill_count < kill_count
                or (
                    report.kill_count < _KILLS_MORE * kill_count
                    and not _has_shown(report, saver, forget=forget)
                )
            )
            and not report.violations
            and time.monotonic() < end_s
        ):
            run.train()
        # The last launch cleans up behind all that died; the clocks of servers tell whole seconds.
        time.sleep(_TERM_S + 2.0 if server else 0)
        run.train(save_count=2)
        run.judge_end()
    return report


def _has_shown(report: Report, saver: str, *, forget: bool) -> bool:
    """Return whether the kills so far came at the moments that the report is about.

    On a busy machine, many trainers die before their first save is written.
    """
    if forget:
        return bool(report.lost)
    return report.written_count > 0 and (saver == "process" or report.finished_count > 0)


def _shorten_leases(directory: pathlib.Path) -> None:
    """Let leases run out soon, in this process and in those that it starts: a minute for each kill would be an hour."""
    change = f"leases.Leases.__init__.__kwdefaults__['term_s'] = {_TERM_S}\n"
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(
        f"from ckptfmt.store import leases\n{change}", "utf-8"
    )
    sys.path.insert(0, str(directory))
    defaults = leases.Leases.__init__.__kwdefaults__
    assert defaults is not None
    defaults["term_s"] = _TERM_S


def main() -> None:
    """Run from the command line; the report is one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--server", choices=list(KINDS))
    parser.add_argument("--saver", choices=("thread", "process"), default="thread")
    parser.add_argument("--forget", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    given = parser.parse_args()
    options = {
        name: getattr(given, name) for name in ("server", "saver", "forget", "every", "seconds")
    }
    report = kill_many(given.kills, given.seed, given.writers, **options)
    json.dump(dataclasses.asdict(report), sys.stdout)


if __name__ == "__main__":
    main()

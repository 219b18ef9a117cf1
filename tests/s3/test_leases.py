"""Leases on a real server: who lives holds, who was killed or is stopped holds for a term, and launches go by that."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptfmt
from ckptfmt.commit.waiting import poll
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.documents.run import SAVERS
from ckptfmt.store import ObjectStore
from ckptfmt.store.leases import FOLDER, Leases, _name_of, boot_s
from ckptfmt_tools.demo.servers import Endpoint
from tests.s3.fixtures import Bucket
from tests.s3.proxy import Fault, Proxy, Rule

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 300
#: In seconds: some, since S3 tells times in whole ones.
TERM_S = 6.0

#: Holds a file until it is killed; the clocks of its machine are ahead by what it is told.
HOLDER = """
    import sys, time
    name, term_s, skew_s, url = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    right = time.time
    time.time = lambda: right() + skew_s
    from ckptfmt.store import ObjectStore
    from ckptfmt.store.leases import Leases, boot_s
    store = ObjectStore(url, writable=True)
    store._leases = Leases(store._lease_objects, writable=True, term_s=term_s, local_s=lambda: boot_s() + skew_s)
    with store.hold(f"savers/{name}"):
        print("held", flush=True)
        sys.stdin.read()
"""

#: Commits step 1, and is told to begin with step 2. Prints who its saver is.
TRAINER = """
    import sys
    import numpy as np
    import ckptfmt
    weights = {"w": np.zeros(3)}
    with ckptfmt.Checkpointer(sys.argv[1], ckptfmt.State(weights=weights), saver="process") as checkpointer:
        checkpointer.save(step=1).wait("COMMITTED")
        print(checkpointer._saves._background._link.pid, flush=True)
        sys.stdin.readline()
        weights["w"] += 7
        checkpointer.save(step=2).wait("STAGED")
        print("in hand", flush=True)
        sys.stdin.read()
"""


class Process:
    """A script in a process of its own."""

    def __init__(self, script: str, *arguments: object, server: Endpoint) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, **server.environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read_line(self) -> str:
        """Wait for what it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def go_on(self) -> None:
        """Tell it to go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it with SIGKILL, if it lives; wait for its end, and not for that of processes that it started."""
        self._process.kill()
        self._process.wait(HANG_S)
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()


class Asker:
    """Asks who holds, and compares each answer with what the server tells of its clock and of the leases.

    Args:
        bucket: where.
        skew_s: how far ahead the clock of its machine is.
    """

    def __init__(self, bucket: Bucket, *, skew_s: float = 0.0) -> None:
        self.store = open_bucket(bucket)
        self._objects = self.store._lease_objects
        self._leases = Leases(
            self._objects, writable=True, term_s=TERM_S, local_s=lambda: boot_s() + skew_s
        )

    def held(self) -> list[str]:
        """Return who holds, and see that it is right by the server's clock."""
        before_s, then = self._server_s(), self._renewals()
        held = self._leases.list_held(SAVERS)
        now, after_s = self._renewals(), self._server_s()
        for (
            name
        ) in held:  # what was learnt of the clock may be a sixth of a term old, and is rounded down
            assert before_s - now[name] < TERM_S + TERM_S / 6 + 2
        for name in then.keys() - set(held):
            assert after_s - then[name] >= TERM_S - 1
        return held

    def wait_until_held(self, *names: str) -> None:
        """Wait until these hold, and nobody else."""
        assert any(self.held() == [*names] for _ in poll(HANG_S, pause_max_s=0.5))

    def _server_s(self) -> float:
        """Return what the server's clock says, rounded down."""
        self._objects.put("clock/now")
        return dict(self._objects.list_modified("clock"))["clock/now"]

    def _renewals(self) -> dict[str, float]:
        """Return when each lease was written last."""
        found = self._objects.list_modified(f"{SAVERS}/{FOLDER}")
        return {_name_of(key): time_s for key, time_s in found if _name_of(key)}


def open_bucket(bucket: Bucket) -> ObjectStore:
    options = bucket.endpoint.options
    client_options = options.pop("client_options")
    return ObjectStore(
        f"s3://{bucket.name}", writable=True, config=options, client_options=client_options
    )


@pytest.fixture
def start(s3_bucket: Bucket) -> Iterator[Any]:
    """Start a script; all that were started end with the test."""
    processes: list[Process] = []

    def begin(script: str, *arguments: object, server: Endpoint = s3_bucket.endpoint) -> Process:
        processes.append(Process(script, *arguments, f"s3://{s3_bucket.name}", server=server))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()


def test_the_killed_hold_for_a_term_and_the_stopped_hold_again_whatever_their_clocks_say(
    start: Any, s3_bucket: Bucket
) -> None:
    """REQ-STO-008 to REQ-STO-010."""
    alive = start(HOLDER, "alive", TERM_S, 0)
    stopped = start(HOLDER, "stopped", TERM_S, -3600)
    killed = [
        start(HOLDER, "killed", TERM_S, 0),
        start(HOLDER, "killed, an hour ahead", TERM_S, 3600),
    ]
    askers = [Asker(s3_bucket, skew_s=skew_s) for skew_s in (0, -3600, 3600)]
    for process in (alive, stopped, *killed):
        assert process.read_line() == "held"
    for asker in askers:
        asker.wait_until_held("alive", "killed", "killed, an hour ahead", "stopped")

    stopped.send(signal.SIGSTOP)
    for process in killed:
        process.kill()
    for asker in askers:
        asker.wait_until_held("alive")
    assert askers[0].store.list("") == ["clock/now"]  # leases are never listed
    stopped.send(signal.SIGCONT)
    for asker in askers:
        asker.wait_until_held("alive", "stopped")
    askers[0]._leases.delete_ended(SAVERS)
    assert sorted(askers[0]._renewals()) == ["alive", "stopped"]


def have_in_hand(start: Any, proxy: Proxy) -> int:
    """Let a trainer save step 2 as far as to its register, and kill it; return the process id of its saver."""
    trainer = start(TRAINER, server=proxy.endpoint)
    saver = int(trainer.read_line())
    register = f"{checkpoint_name(2, 1)}/manifest.json"
    proxy.script(Rule(fault=Fault.STATUS, operation="PutObject", key=register, count=None))
    trainer.go_on()
    assert trainer.read_line() == "in hand"
    assert any(proxy.faults[Fault.STATUS] for _ in poll(HANG_S))
    trainer.kill()
    return saver


def launch(store: Any, on_wait: Callable[[], Any]) -> tuple[int, list[float], list[str]]:
    """Choose what to resume from, as the next launch does; `on_wait` is called once it waits.

    Returns: step and weights of what was chosen, and what was passed over.
    """
    told = logging.Handler()
    told.emit = lambda record: on_wait() if "waiting at most" in record.getMessage() else None  # type: ignore[method-assign]
    logging.getLogger("ckptfmt").addHandler(told)
    try:
        with ckptfmt.Checkpointer(store, saver="inline") as checkpointer:
            chosen = checkpointer.choose()
            assert chosen is not None
            return chosen.step, chosen.weights["w"][...].tolist(), checkpointer.passed_over
    finally:
        logging.getLogger("ckptfmt").removeHandler(told)


def test_a_launch_waits_for_the_living_saver_of_a_killed_trainer_and_resumes_from_its_save(
    start: Any, s3_bucket: Bucket, s3_proxy: Proxy
) -> None:
    """REQ-RUN-018."""
    saver = have_in_hand(start, s3_proxy)
    waited: list[Any] = []

    def let_it_commit() -> None:
        waited.append(open_bucket(s3_bucket).list(checkpoint_name(2, 1)))
        s3_proxy.script()

    resumed = launch(open_bucket(s3_bucket), let_it_commit)
    assert len(waited) == 1
    assert not [path for path in waited[0] if path.endswith("manifest.json")]
    assert resumed == (2, [7.0] * 3, [])
    assert any(not is_running(saver) for _ in poll(HANG_S))


def test_a_launch_waits_for_a_dead_saver_until_its_lease_has_run_out_and_no_longer(
    start: Any, s3_bucket: Bucket, s3_proxy: Proxy
) -> None:
    """REQ-RUN-018, REQ-STO-008."""
    os.kill(have_in_hand(start, s3_proxy), signal.SIGKILL)
    asker, waited = Asker(s3_bucket), []
    asker.store._leases = asker._leases
    resumed = launch(asker.store, lambda: waited.append(asker.held()))
    assert len(waited) <= 1  # none, if it took this machine a term to begin the launch
    assert asker.held() == []
    # It would have been passed over by name, had the wait ended otherwise than with the lease.
    assert resumed == (1, [0.0] * 3, [])


def is_running(pid: int) -> bool:
    """Say whether a process runs, as opposed to one that has ended and whose end nobody has asked for."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False

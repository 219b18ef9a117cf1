"""The kinds of faults: effect, phase, and promise about the job."""

from __future__ import annotations

import dataclasses
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from ckptfmt_conformance.chaos.nodes import Cluster, Node, signal_all

__all__ = ["KINDS", "Kind", "Scene"]

#: A pause longer than the timeout of the process groups of ckptfmt's own job, in seconds.
LONG_S: Final = 14.0


class Scene(Protocol):
    """A live job, from the point of view of a fault.

    Attributes:
        cluster: the nodes.
        rng: the random generator of the fault, seeded for each injection.
        victim: the number of the fault's node.
        run: the directory where the job saves.
    """

    cluster: Cluster
    rng: random.Random
    victim: int
    run: Path

    def sleep(self, seconds: float) -> None:
        """Wait, and restart ended agents, as a scheduler does."""

    def arm(self, name: str, content: str = "") -> None:
        """Arm a fault inside the job's processes."""

    def disarm(self, name: str) -> None:
        """Disarm a fault that is still armed."""

    def await_struck(self, name: str) -> None:
        """Wait until a process has taken a fault that strikes once."""

    def await_start(self) -> None:
        """Wait until the victim's node has new ranks."""

    def await_steps(self, count: int) -> None:
        """Wait until `count` more steps are done."""

    def keep_away(self, index: int, seconds: float) -> None:
        """Start no agent on a node for `seconds`."""

    def launch_again(self) -> None:
        """Start the job again on all nodes, and wait until the agents of the first launch exit."""

    def newest(self) -> Path:
        """Return the directory of the newest checkpoint."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: group and name.
        phase: the activity of the job when the fault strikes: training, starting, saving, or
            stopped.
        does: the effect, in a line.
        inject: injects the fault; returns when the fault is over.
        damages: the permitted number of unreadable checkpoints afterwards. All the rest must be
            readable.
        fails: the permitted number of failed saves, with steps without a checkpoint. Training
            is informed of each failure.
        needs_network: whether nodes need networks of their own.
    """

    name: str
    phase: str
    does: str
    inject: Callable[[Scene], None]
    damages: int = 0
    fails: int = 0
    needs_network: bool = False

    @property
    def promise(self) -> str:
        """The promise about the job.

        All kinds have the same promise, except for content destroyed by the fault.
        """
        readable = "all checkpoints" if not self.damages else f"all checkpoints but {self.damages}"
        failing = f"; {self.fails} save may fail, which is told" if self.fails else ""
        return (
            f"goes on by itself; {readable} can be read and have the bits of the undisturbed"
            f" run{failing}"
        )


def _victim(scene: Scene) -> Node:
    return scene.cluster.nodes[scene.victim]


def _send(of: Callable[[Node], Sequence[int]], number: int) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        signal_all(of(_victim(scene)), number)

    return inject


def _pause(of: Callable[[Node], Sequence[int]], seconds: float) -> Callable[[Scene], None]:
    """Return a fault that stops processes for a while. torchrun may kill them meanwhile."""

    def inject(scene: Scene) -> None:
        pids = of(_victim(scene))
        signal_all(pids, signal.SIGSTOP)
        scene.sleep(seconds)
        signal_all(set(pids) & set(_victim(scene).pids()), signal.SIGCONT)

    return inject


def _agent(node: Node) -> list[int]:
    return [] if node.agent is None or node.agent.poll() is not None else [node.agent.pid]


def _lose_node(away_s: float) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.keep_away(scene.victim, away_s)
        _victim(scene).kill()

    return inject


def _lose_power(scene: Scene) -> None:
    """Kill a node without closing its connections, as a loss of power does."""
    scene.cluster.cut(scene.victim)
    scene.keep_away(scene.victim, 5)
    _victim(scene).kill()
    scene.sleep(5)
    scene.cluster.mend()


def _kill_all(scene: Scene) -> None:
    for node in scene.cluster.nodes:
        node.kill()


def _while_starting(inject: Callable[[Scene], None]) -> Callable[[Scene], None]:
    def strike(scene: Scene) -> None:
        signal_all(_victim(scene).ranks(), signal.SIGKILL)
        scene.await_start()
        scene.sleep(scene.rng.uniform(0, 4))
        inject(scene)

    return strike


def _once(name: str) -> Callable[[Scene], None]:
    """Return a fault that strikes once, inside the first process that reaches it."""

    def inject(scene: Scene) -> None:
        scene.arm(name)
        scene.await_struck(name)

    return inject


def _for_a_while(name: str, seconds: float, content: str = "") -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.arm(name, content)
        scene.sleep(seconds)
        scene.disarm(name)

    return inject


def _cut(seconds: float) -> Callable[[Scene], None]:
    def inject(scene: Scene) -> None:
        scene.cluster.cut(scene.victim)
        scene.sleep(seconds)
        scene.cluster.mend()

    return inject


def _slow(scene: Scene) -> None:
    scene.cluster.slow(scene.victim)
    scene.sleep(5)
    scene.cluster.mend()


def _flap(scene: Scene) -> None:
    for _ in range(8):
        scene.cluster.cut(scene.victim)
        scene.sleep(scene.rng.uniform(0.05, 0.4))
        scene.cluster.mend()
        scene.sleep(scene.rng.uniform(0.05, 0.4))


def _damage(how: Callable[[Scene, Path], None]) -> Callable[[Scene], None]:
    """Return a fault that kills all nodes, and damages the newest checkpoint before the restart."""

    def inject(scene: Scene) -> None:
        _kill_all(scene)
        how(scene, scene.newest())

    return inject


def _largest(directory: Path) -> Path:
    return max(
        (path for path in directory.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )


def _flip_bit(scene: Scene, directory: Path) -> None:
    path = _largest(directory)
    content = bytearray(path.read_bytes())
    content[scene.rng.randrange(len(content))] ^= 1 << scene.rng.randrange(8)
    path.write_bytes(content)


def _truncate(scene: Scene, directory: Path) -> None:
    path = _largest(directory)
    with path.open("r+b") as file:
        file.truncate(scene.rng.randrange(path.stat().st_size))


def _zero(_: Scene, directory: Path) -> None:
    path = _largest(directory)
    path.write_bytes(bytes(path.stat().st_size))


def _delete_file(_: Scene, directory: Path) -> None:
    _largest(directory).unlink()


def _delete_whole(_: Scene, directory: Path) -> None:
    shutil.rmtree(directory)


def _put_back(scene: Scene) -> None:
    """Replace the run by a copy from some steps ago."""
    _kill_all(scene)
    copy = scene.run.with_name(f"{scene.run.name}.copy")
    shutil.copytree(scene.run, copy)
    scene.await_steps(4)
    _kill_all(scene)
    shutil.rmtree(scene.run)
    copy.rename(scene.run)


def _litter(scene: Scene) -> None:
    """Add files to the run as a crashed writer, or a person, may leave them."""
    _kill_all(scene)
    copy = scene.newest().with_suffix(f".copy{scene.rng.randrange(10**9)}")
    copy.mkdir()
    (copy / "shard.partial").write_bytes(scene.rng.randbytes(1000))
    (scene.run / f".half-written{scene.rng.randrange(10**9)}").write_bytes(b"")


def _launch_again(scene: Scene) -> None:
    scene.launch_again()


_KILL = signal.SIGKILL
_TERM = signal.SIGTERM


def _kind(
    name: str, phase: str, does: str, inject: Callable[[Scene], None], **options: object
) -> Kind:
    return Kind(name=name, phase=phase, does=does, inject=inject, **options)  # type: ignore[arg-type]


#: A campaign has shown for each kind that it strikes, and that ckptfmt's own job recovers as
#: promised.
KINDS: Final[tuple[Kind, ...]] = (
    _kind("process/rank-killed", "training", "SIGKILL of a rank", _send(Node.ranks, _KILL)),
    _kind("process/rank-terminated", "training", "SIGTERM of a rank", _send(Node.ranks, _TERM)),
    _kind(
        "process/helper-killed",
        "training",
        "SIGKILL of a rank's savers",
        _send(Node.helpers, _KILL),
    ),
    _kind(
        "process/rank-and-helper-killed",
        "training",
        "SIGKILL of a rank and its savers",
        _send(lambda node: node.ranks() + node.helpers(), _KILL),
    ),
    _kind(
        "process/agent-killed",
        "training",
        "SIGKILL of an agent; its rank lives on",
        _send(_agent, _KILL),
    ),
    _kind("process/agent-terminated", "training", "SIGTERM of an agent", _send(_agent, _TERM)),
    _kind("process/all-killed", "training", "SIGKILL of all processes of all nodes", _kill_all),
    _kind("process/rank-paused", "training", "SIGSTOP of a rank for 3 s", _pause(Node.ranks, 3)),
    _kind(
        "process/rank-stopped",
        "training",
        f"SIGSTOP of a rank for {LONG_S:.0f} s",
        _pause(Node.ranks, LONG_S),
    ),
    _kind(
        "process/helper-paused",
        "saving",
        "SIGSTOP of a rank's savers for 3 s",
        _pause(Node.helpers, 3),
    ),
    _kind("process/agent-paused", "training", "SIGSTOP of an agent for 3 s", _pause(_agent, 3)),
    _kind("process/rank-raises", "training", "an exception in a rank's step", _once("raise")),
    _kind(
        "process/rank-killed-starting",
        "starting",
        "a rank is killed, and again as it starts",
        _while_starting(_send(Node.ranks, _KILL)),
    ),
    _kind(
        "process/node-killed-starting",
        "starting",
        "a rank is killed, and its node as it starts",
        _while_starting(_lose_node(1)),
    ),
    _kind(
        "process/killed-writing",
        "saving",
        "SIGKILL of the process that writes a file",
        _once("kill-write"),
    ),
    _kind(
        "process/killed-syncing",
        "saving",
        "SIGKILL of the process that calls fsync",
        _once("kill-fsync"),
    ),
    _kind(
        "process/killed-linking",
        "saving",
        "SIGKILL just before a file gets its name",
        _once("kill-link"),
    ),
    _kind(
        "process/killed-linked",
        "saving",
        "SIGKILL just after a file got its name",
        _once("kill-linked"),
    ),
    _kind("node/killed", "training", "all processes of a node are killed", _lose_node(1)),
    _kind("node/away", "training", "the same, and the node comes back after 10 s", _lose_node(10)),
    _kind(
        "node/power-lost",
        "training",
        "the same, and no connection is ended",
        _lose_power,
        needs_network=True,
    ),
    _kind(
        "network/cut-briefly",
        "training",
        "a node's link is down for 2 s",
        _cut(2),
        needs_network=True,
    ),
    _kind(
        "network/cut",
        "training",
        f"a node's link is down for {LONG_S:.0f} s",
        _cut(LONG_S),
        needs_network=True,
    ),
    _kind(
        "network/flapping", "training", "a node's link goes up and down", _flap, needs_network=True
    ),
    _kind("network/slow", "training", "a node sends 256 kbit/s for 5 s", _slow, needs_network=True),
    _kind("storage/slow", "saving", "each write takes 0.2 s, for 5 s", _for_a_while("slow", 5)),
    _kind(
        "storage/full",
        "saving",
        "writes fail with ENOSPC, for 3 s",
        _for_a_while("full", 3),
        fails=1,
    ),
    _kind(
        "storage/failing",
        "saving",
        "writes fail with EIO, for 3 s",
        _for_a_while("fail", 3),
        fails=1,
    ),
    _kind(
        "storage/sync-fails", "saving", "fsync fails once with EIO", _once("fsync-fail"), fails=1
    ),
    _kind(
        "storage/short-write",
        "saving",
        "a write takes half of the bytes, and says so",
        _once("short"),
    ),
    _kind(
        "storage/unknown-outcome",
        "saving",
        "link fails with EIO, and took place",
        _once("link-unknown"),
    ),
    _kind(
        "storage/bit-flipped",
        "saving",
        "a bit is flipped on its way to the file",
        _once("flip"),
        damages=1,
    ),
    _kind(
        "storage/write-lost",
        "saving",
        "a write is confirmed, and doesn't take place",
        _once("lose"),
        damages=1,
    ),
    _kind(
        "checkpoint/bit-flipped",
        "stopped",
        "a bit of the newest is flipped",
        _damage(_flip_bit),
        damages=1,
    ),
    _kind(
        "checkpoint/truncated",
        "stopped",
        "a file of the newest is cut",
        _damage(_truncate),
        damages=1,
    ),
    _kind(
        "checkpoint/zeroed", "stopped", "a file of the newest has zeros", _damage(_zero), damages=1
    ),
    _kind(
        "checkpoint/file-deleted",
        "stopped",
        "a file of the newest is gone",
        _damage(_delete_file),
        damages=1,
    ),
    _kind("checkpoint/deleted", "stopped", "the newest is gone", _damage(_delete_whole), damages=1),
    _kind(
        "checkpoint/stale", "stopped", "the run is put back to a copy of some steps ago", _put_back
    ),
    _kind("checkpoint/litter", "stopped", "files of nobody lie in the run", _litter),
    _kind("computation/nan", "training", "a rank's gradients are NaN", _once("nan")),
    _kind(
        "computation/weight-flipped",
        "training",
        "a bit of a rank's weight is flipped",
        _once("flip-weight"),
    ),
    _kind(
        "computation/moment-flipped",
        "training",
        "a bit of a rank's moment is flipped",
        _once("flip-moment"),
    ),
    _kind(
        "clock/forward",
        "training",
        "the clocks jump ahead by an hour, for 3 s",
        _for_a_while("clock", 3, "3600"),
    ),
    _kind(
        "clock/back",
        "training",
        "the clocks jump back by an hour, for 3 s",
        _for_a_while("clock", 3, "-3600"),
    ),
    _kind(
        "launch/two-at-once", "training", "the job is launched again while it trains", _launch_again
    ),
)

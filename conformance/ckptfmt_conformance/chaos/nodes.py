"""Nodes on one machine: groups of processes, each in a network namespace where possible."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

__all__ = ["Cluster", "Node", "network_problem"]

#: The environment variable with the mark of a node's processes, including children of children.
_MARK: Final = "CKPTFMT_CHAOS_NODE"
#: torchrun's timeouts for the rendezvous and for silent nodes: seconds instead of minutes.
_RENDEZVOUS: Final = (
    "is_host=0,join_timeout=300,last_call_timeout=1,keep_alive_interval=1"
    ",keep_alive_max_attempt=5,read_timeout=60"
)


def _ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def network_problem() -> str:
    """Return the reason why network namespaces can't be created here; "" where they can."""
    name = f"ck{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "add", f"{name}b", "type", "bridge")
        finally:
            _ip("link", "del", f"{name}b", check=False)
            _ip("netns", "del", name, check=False)
    except OSError as error:
        return f"network namespaces aren't allowed here, or iproute2 isn't installed: {error}"
    return ""


class Node:
    """A node: an agent of torchrun, its ranks, and the child processes of the ranks.

    Args:
        name: the node's name in logs, caches and the network.
        mark: a mark unique on this machine.
        namespace: the node's network namespace; None for the caller's own.
        address: the node's address for the cluster.

    Attributes:
        agent: the node's torchrun process; None where none was started.
    """

    def __init__(self, name: str, mark: str, namespace: str | None, address: str) -> None:
        self.name = name
        self.address = address
        self.agent: subprocess.Popen[bytes] | None = None
        self._mark = mark
        self._namespace = namespace

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a program on this node in a new session, with output to the end of `log`."""
        inside = ["ip", "netns", "exec", self._namespace] if self._namespace else []
        interface = {"GLOO_SOCKET_IFNAME": "eth0" if self._namespace else "lo"}
        with log.open("ab") as out:
            return subprocess.Popen(
                [*inside, *argv],
                env={**os.environ, **interface, **environment, _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """Return the ids of all processes of this node."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def ranks(self) -> list[int]:
        """Return the ids of the ranks: the child processes of the agent."""
        agent = self.agent
        return [pid for pid in self.pids() if agent is not None and _parent_of(pid) == agent.pid]

    def helpers(self) -> list[int]:
        """Return the ids of the child processes of ranks, such as savers and loaders."""
        agent = self.agent
        return [
            pid for pid in self.pids() if agent is None or agent.pid not in (pid, _parent_of(pid))
        ]

    def kill(self) -> None:
        """Kill all processes of this node, including newly started processes."""
        while pids := self.pids():
            signal_all(pids, signal.SIGKILL)
            if self.agent is not None:
                self.agent.poll()
            time.sleep(0.02)
        if self.agent is not None:
            self.agent.wait()


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, and ignore missing processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


class Cluster:
    """Nodes, a network, and a rendezvous store independent of each node. A context manager.

    Args:
        count: the number of nodes.
        is_network: whether each node has a separate network namespace.
        logs: the directory of the nodes' logs.
    """

    def __init__(self, count: int, *, is_network: bool, logs: Path) -> None:
        self._token = secrets.token_hex(3)
        self._is_network = is_network
        self._logs = logs
        self._subnet = f"10.{101 + secrets.randbelow(100)}.{secrets.randbelow(256)}"
        self.nodes = [self._make(index) for index in range(count)]
        self._open = contextlib.ExitStack()
        self.endpoint = ""

    def _make(self, index: int) -> Node:
        namespace = f"ck{self._token}{index}" if self._is_network else None
        address = f"{self._subnet}.{index + 1}" if self._is_network else "127.0.0.1"
        return Node(f"node{index}", f"{self._token}{index}", namespace, address)

    def __enter__(self) -> Self:
        """Create the network, and start the store."""
        # Only campaigns need torch.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

        with contextlib.ExitStack() as stack:
            for node in self.nodes:
                stack.callback(node.kill)
            if self._is_network:
                self._make_bridge(stack, f"ck{self._token}")
                # the other side of a network partition
                self._make_bridge(stack, f"ck{self._token}x")
                _ip("address", "add", f"{self._subnet}.254/24", "dev", f"ck{self._token}")
                for index, node in enumerate(self.nodes):
                    self._connect(stack, index, node)
            host = f"{self._subnet}.254" if self._is_network else "127.0.0.1"
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self.endpoint = f"{host}:{self._store.port}"
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes of all nodes, and remove the network."""
        self._open.close()

    def _make_bridge(self, stack: contextlib.ExitStack, name: str) -> None:
        _ip("link", "add", name, "type", "bridge")
        stack.callback(_ip, "link", "del", name, check=False)
        _ip("link", "set", name, "up")

    def _connect(self, stack: contextlib.ExitStack, index: int, node: Node) -> None:
        namespace = f"ck{self._token}{index}"
        port = self._port(index)
        _ip("netns", "add", namespace)
        stack.callback(_ip, "netns", "del", namespace, check=False)
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        stack.callback(_ip, "link", "del", port, check=False)
        _ip("link", "set", port, "master", f"ck{self._token}", "up")
        _ip("-n", namespace, "address", "add", f"{node.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", device, "up")

    def _port(self, index: int) -> str:
        return f"ck{self._token}p{index}"

    def cut(self, index: int) -> None:
        """Take a node's link down, which isolates the node."""
        _ip("link", "set", self._port(index), "down")

    def split(self, indices: Iterable[int]) -> None:
        """Move nodes to a separate network.

        The moved nodes reach each other, but neither the other nodes nor the store.
        """
        for index in indices:
            _ip("link", "set", self._port(index), "master", f"ck{self._token}x")

    def slow(self, index: int) -> None:
        """Limit a node's sending rate to 256 kbit/s."""
        argv = ["tc", "-n", f"ck{self._token}{index}", "qdisc", "add", "dev", "eth0", "root", "tbf"]
        subprocess.run([*argv, "rate", "256kbit", "burst", "4kb", "latency", "500ms"], check=True)

    def mend(self) -> None:
        """Reconnect all nodes, and remove limits on their sending rates."""
        for index in range(len(self.nodes)):
            _ip("link", "set", self._port(index), "master", f"ck{self._token}", "up")
            argv = ["tc", "-n", f"ck{self._token}{index}", "qdisc", "del", "dev", "eth0", "root"]
            # there may be no limit to remove
            subprocess.run(argv, capture_output=True, check=False)

    def start_agent(
        self,
        node: Node,
        program: Sequence[str],
        environment: Mapping[str, str],
        *,
        max_restarts: int = 1000,
        job: str = "run",
    ) -> subprocess.Popen[bytes]:
        """Start a torchrun agent on a node, which trains with any number of nodes.

        Args:
            node: a node of this cluster.
            program: the arguments for the ranks' program: ``-m`` and a module, a script, or
                ``--no-python`` and a command.
            environment: additions to this process's environment.
            max_restarts: how often the agent restarts the ranks.
            job: the job's name, by which agents meet. A successfully ended job accepts no more
                agents.
        """
        argv = [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nnodes=1:{len(self.nodes)}",
                "--nproc-per-node=1",
            ),
            *(f"--max-restarts={max_restarts}", "--monitor-interval=0.1", "--shutdown-timeout=5"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={job}"),
            *(f"--rdzv-conf={_RENDEZVOUS}", f"--local-addr={node.address}"),
            *program,
        ]
        # Each rendezvous round has a new store, because torchrun would keep the address of a lost
        # leader.
        environment = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        node.agent = node.start(argv, environment, self._logs / f"{node.name}.log")
        return node.agent

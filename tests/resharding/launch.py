"""Start real processes, let them play scenes one after another, and collect what each of them says.

An import of torch takes seconds, so the processes are forks of one that has imported it, and one
launch plays many scenes. Each process writes a line of JSON after each scene: what a scene said
stays known even if a later one hangs or dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.forks import fork, settle


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the processes of a launch said: by scene, then by rank."""

    said: dict[str, dict[int, dict[str, Any]]]
    exit_codes: list[int | None]
    errors: str

    def of(self, scene: str) -> list[Any]:
        """Return what every rank returned from a scene; fail with the traceback of one that raised or didn't end."""
        answers = self.said.get(scene, {})
        for rank in range(len(self.exit_codes)):
            answer = answers.get(rank)
            assert answer is not None, (
                f"{scene}: rank {rank} said nothing ({self.exit_codes})\n{self.errors}"
            )
            assert answer["traceback"] is None, (
                f"{scene}: rank {rank} raised\n{answer['traceback']}"
            )
        return [answers[rank]["value"] for rank in range(len(self.exit_codes))]

    def one(self, scene: str, rank: int) -> Any:
        """Return what one rank returned, where not all of them live to say something."""
        answer = self.said.get(scene, {}).get(rank)
        assert answer is not None, (
            f"{scene}: rank {rank} said nothing ({self.exit_codes})\n{self.errors}"
        )
        assert answer["traceback"] is None, f"{scene}: rank {rank} raised\n{answer['traceback']}"
        return answer["value"]


def launch(
    module: str,
    scenes: Sequence[str],
    *,
    world_size: int,
    scratch: Path,
    rendezvous: str = "store",
    timeout_s: float = 900,
) -> Launch:
    """Play scenes of a module on `world_size` processes.

    Args:
        module: such as ``tests.resharding.plain_scenes``.
        scenes: names of functions in it that take a `tests.resharding.stage.Stage`.
        world_size: number of processes.
        scratch: directory that all launches of a test module share.
        rendezvous: how they meet: ``store``, a key-value store in this process that outlives all of
            them; ``env``, one in rank 0; ``file``, a file.
        timeout_s: after which all of them are killed: they hang. On a busy machine a minute's work
            takes ten.
    """
    here = scratch / f"launch-{time.monotonic_ns()}"
    here.mkdir(parents=True)
    (here / "stderr").touch()
    with _meeting(rendezvous, here) as meeting:
        processes: list[Any] = []
        for rank in range(world_size):
            own = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                **meeting,
            }
            told = own, str(here / "stderr"), [module, str(scratch), str(here), *scenes]
            processes.append(fork(_play, *told))
        exit_codes = _wait(processes, timeout_s)
    said: dict[str, dict[int, dict[str, Any]]] = {}
    for path in here.glob("rank-*.jsonl"):
        for line in path.read_text("utf-8").splitlines():
            answer = json.loads(line)
            said.setdefault(answer["scene"], {})[answer["rank"]] = answer
    return Launch(said, exit_codes, (here / "stderr").read_text("utf-8", "replace")[-4000:])


def _play(variables: dict[str, str], errors: str, told: list[str]) -> None:
    """Be one process of a launch, from a fork on."""
    settle(variables, errors)
    from tests.resharding import stage  # noqa: PLC0415

    stage.main(*told)


def _wait(processes: Sequence[Any], timeout_s: float) -> list[int | None]:
    """Return the exit codes; None of what had to be killed."""
    end_s = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.1, end_s - time.monotonic()))
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return exit_codes


@contextlib.contextmanager
def _meeting(rendezvous: str, here: Path) -> Iterator[dict[str, str]]:
    if rendezvous == "file":
        yield {"MEET": f"file://{here / 'meeting'}"}
    elif rendezvous == "env":
        yield {"MEET": "env://", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    else:
        import torch.distributed as dist  # noqa: PLC0415

        make = dist.TCPStore  # type: ignore[attr-defined]
        store = make("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield {"MEET": "store", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        del store


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

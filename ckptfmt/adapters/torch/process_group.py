"""The processes of torch.distributed as `ckptfmt.read.sharing.Peers`: bytes go from host to host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ckptfmt.errors import Code, err
from ckptfmt.group import Group
from ckptfmt.read.sharing import Message, refuse_sharing


class TorchPeers:
    """See `ckptfmt.read.sharing.Peers`.

    Args:
        group: of the same processes, with the same numbers, for small values.
        process_group: of torch, that can send what is in the host's memory.
    """

    def __init__(self, group: Group, process_group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._process_group = process_group

    @property
    def number(self) -> int:
        """The number of this process."""
        return self._group.writer

    @property
    def count(self) -> int:
        """How many there are."""
        return self._group.writer_count

    def all_gather(self, value: object) -> list[Any]:
        """Return the JSON values of all processes, in their order."""
        return self._group.all_gather(value)

    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """Send each of `outgoing` and fill each of `incoming`; between two processes, in their order."""
        try:
            under_way = [
                dist.isend(torch.frombuffer(content, dtype=torch.uint8), peer, group=self._process_group)
                for peer, content in outgoing
            ]
            under_way += [
                dist.irecv(torch.frombuffer(content, dtype=torch.uint8), peer, group=self._process_group)
                for peer, content in incoming
            ]
            for work in under_way:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise err(Code.WRITERS_MISSING, f"a process that shares what it reads is gone: {error}") from error


@contextlib.contextmanager
def open_peers(group: Group) -> Iterator[TorchPeers]:
    """Give the peers of a group, whose processes are those of torch.distributed. All of them call it.

    Raises: StateError(ARGUMENT) where torch.distributed isn't initialised for just these processes.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != group.writer_count:
        raise refuse_sharing(group.writer_count)
    if "gloo" in str(dist.get_backend_config()):
        yield TorchPeers(group, None)
        return
    made = dist.new_group(backend="gloo")  # NCCL can't send from the host's memory
    try:
        yield TorchPeers(group, made)
    finally:
        dist.destroy_process_group(made)

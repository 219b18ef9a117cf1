"""The agreement of all processes of a load on errors, and on another try with a new checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from ckptfmt.documents.tables import TensorKey
from ckptfmt.errors import Code, StateError, err
from ckptfmt.group import Group
from ckptfmt.read.files import ReadTries, ReplacedError, replaced
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.reading import DamagedMemoryError, damaged_memory
from ckptfmt.state import place_of


class JointStep:
    """A step of a load: success on all processes, or an error on all processes.

    Use the object as a context on every process, for one step after the other. The end of each step
    exchanges the errors.

    Args:
        group: the processes.
        checkpoint: the checkpoint to load.

    Raises: the step's own exception; on the other processes as `Group.raise_together`;
        ReplacedError or DamagedMemoryError on all processes if any process raises this error and
        no process has an error without another try. Spec: REQ-OPN-013.
    """

    def __init__(self, group: Group, checkpoint: Checkpoint) -> None:
        self._group = group
        self._checkpoint = checkpoint

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        failed = self._find_cause(error)
        is_replaced = isinstance(failed, ReplacedError)
        is_damaged = isinstance(failed, DamagedMemoryError)
        told = self._group.raise_together(
            None if is_replaced or is_damaged else failed,
            value={"replaced": is_replaced, "damaged": is_damaged},
        )
        if any(theirs["replaced"] for theirs in told):
            raise failed if is_replaced and failed else replaced(self._checkpoint.digest)
        if any(theirs["damaged"] for theirs in told):
            raise failed or damaged_memory("a block")

    def _find_cause(self, error: Exception | None) -> Exception | None:
        """Return the error to exchange: ReplacedError if the checkpoint was replaced meanwhile.

        Where processes share reads, another process's read may have failed for this reason.
        """
        if isinstance(error, StateError) and error.code == Code.PEER_FAILED:
            try:
                self._checkpoint.check_current()
            # Without an exchange the other processes would wait.
            except Exception as other:  # noqa: BLE001
                return other
        return error


class LoadTries(ReadTries):
    """The tries of a load by all processes. A replaced checkpoint starts another try.

    Args:
        group: the processes.

    Raises: as `ReadTries`. Spec: REQ-OPN-013.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group
        self._filled: frozenset[TensorKey] | None = None

    def open(self, open_checkpoint: Callable[[], Checkpoint]) -> Checkpoint:
        """Return the checkpoint for a try; every process calls this method.

        Args:
            open_checkpoint: opens the present checkpoint of the place.

        Raises: the errors of `open_checkpoint`, on all processes;
            IntegrityError(CHECKPOINT_RETIRED) if the checkpoint lacks a tensor of an earlier try's
            checkpoint, since the state may contain the tensor already. Spec: REQ-OPN-014.
        """
        checkpoint = self._group.together(open_checkpoint)
        if self._filled is not None:
            filled = self._filled
            self._group.together(lambda: _check_filled(checkpoint, filled))
        self._filled = frozenset(checkpoint.tensors)
        return checkpoint


def _check_filled(checkpoint: Checkpoint, filled: frozenset[TensorKey]) -> None:
    """Raise CHECKPOINT_RETIRED if a checkpoint lacks a tensor that an earlier try filled."""
    lacking = sorted(filled - checkpoint.tensors.keys())
    if lacking:
        raise err(
            Code.CHECKPOINT_RETIRED,
            "another checkpoint replaced this checkpoint during the load, and lacks some"
            " of the tensors, first"
            f" {place_of(lacking[0][0], lacking[0][1])}: the state is partly loaded",
            where=checkpoint.store.name,
            requirement="REQ-OPN-013",
            remedy="Make the state anew, and load again.",
        )

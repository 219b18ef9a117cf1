"""What a run says of itself in the log, by process 0: what it goes on from, with which claim; and who prints that."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable
from typing import Final

from ckptfmt.documents.run import Launch
from ckptfmt.errors import printable
from ckptfmt.state import State
from ckptfmt.trainer.restore import LoadReport, was_not_asked

_LOG: Final = logging.getLogger("ckptfmt")
#: How many reasons, and how many differences of the configuration, stand in a line.
_SHOWN: Final = 12
#: How many changes by a load are told one by one.
_TOLD: Final = 20
#: What a reason begins with that is told as a difference of the configuration.
_CONFIG: Final = "config:"


class Talk:
    """The lines of a run in the log ``ckptfmt``: those of process 0 are INFO, or WARNING, those of others are DEBUG.

    Where nobody has configured logging, they go to the standard error as long as this is open.

    Args:
        writer: number of this process.
    """

    def __init__(self, writer: int) -> None:
        self._writer = writer
        self._handler: _Fallback | None = None

    def open(self) -> None:
        """See to it that the lines are seen. A second call does nothing."""
        if self._handler is None:
            self._handler = _Fallback.take()

    def close(self) -> None:
        """Leave the log as it was."""
        if self._handler is not None:
            self._handler.give_back()
            self._handler = None

    def say(self, text: str, *arguments: object, level: int = logging.INFO) -> None:
        """Say something of the run."""
        shown = (printable(one) if isinstance(one, str) else one for one in arguments)
        _LOG.log(level if self._writer == 0 else logging.DEBUG, text, *shown)

    def tell_begun(self, launch: Launch, source: str | None, step: int, state: State) -> None:
        """Say that the run begins, from nothing or from another checkpoint; and what a resume can't claim."""
        begins, left = "nothing" if source is None else source, state.absent_reasons()
        most = "S0" if "data" in left else "S1"
        more = f"; not in State: {', '.join(left)}, so that a resume claims {most} at most" if left else ""
        self.say("launch %d begins from %s, at step %d%s", launch.launch, begins, step, more)

    def tell_changed(self, report: LoadReport) -> None:
        """Say what a load changed that lowers no claim, such as a learning rate that was another one here."""
        for sentence in report.notes[:_TOLD]:
            self.say("changed by the load: %s", sentence, level=logging.WARNING)
        if len(report.notes) > _TOLD:
            self.say("changed by the load: %d more, in load_report", len(report.notes) - _TOLD, level=logging.WARNING)

    def tell_resumed(self, launch: Launch, source: str, report: LoadReport, *, harmless: Iterable[str]) -> None:
        """Say what the run goes on from, which claim holds, and why no higher one does."""
        left = [reason for reason in report.lowered_by if was_not_asked(reason)]
        reasons = [reason for reason in report.lowered_by if not (was_not_asked(reason) or reason.startswith(_CONFIG))]
        differences = [(path, f"{path} {old!r} -> {new!r}") for path, old, new in report.config_differences]
        decisive = [text for path, text in differences if not _lies_under(path, harmless)]
        others = [text for path, text in differences if _lies_under(path, harmless)]
        text = f"launch {launch.launch} goes on from step {report.step} of {source}: claim {_claim_text(report.claim)}"
        text += "".join(f" ({reason})" for reason in left)
        text += f", lowered by: {_first(reasons)}" if reasons else ""
        text += f"; config: {_first(decisive)}" if decisive else ""
        text += f"; config, harmless: {_first(others)}" if others else ""
        self.say("%s", text, level=logging.WARNING if left or reasons or decisive else logging.INFO)
        for reason in report.lowered_by:
            _LOG.debug("lowers the claim: %s", reason)


def _claim_text(claim: str) -> str:
    """Return a claim as it may be said before any step: bytes are verified, a course of steps is expected."""
    return claim if claim == "S0" else f"{claim} expected"


def _first(texts: list[str]) -> str:
    more = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f"; and {more} more, in load_report" if more > 0 else "")


def _lies_under(path: str, keys: Iterable[str]) -> bool:
    return any(path == key or path.startswith(f"{key}/") for key in keys)


class _Fallback(logging.Handler):
    """Prints lines where nobody has configured logging; the runs of a process share one.

    It leaves everything to other handlers from the moment there are any, so that no line comes twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("ckptfmt: %(message)s"))
        self.users = 0
        self._level_before = logging.NOTSET

    @classmethod
    def take(cls) -> _Fallback | None:
        """Return the one of this process, made if nobody has configured logging; None where somebody has."""
        for handler in _LOG.handlers:
            if isinstance(handler, cls):
                handler.users += 1
                return handler
        if _LOG.hasHandlers():
            return None
        made = cls()
        made.users, made._level_before = 1, _LOG.level
        _LOG.addHandler(made)
        _LOG.addFilter(made.may_pass)
        if _LOG.level == logging.NOTSET:
            _LOG.setLevel(logging.INFO)
        return made

    def give_back(self) -> None:
        """Take it away with the last run that uses it."""
        self.users -= 1
        if not self.users:
            _LOG.removeHandler(self)
            _LOG.removeFilter(self.may_pass)
            _LOG.setLevel(self._level_before)

    def may_pass(self, record: logging.LogRecord) -> bool:
        """Tell whether a line is to be handled; from the moment that others handle lines, it is as if we weren't."""
        if not _is_handled_elsewhere():
            return True
        _LOG.setLevel(self._level_before)
        return record.levelno >= _LOG.getEffectiveLevel()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line, unless somebody else does."""
        if _is_handled_elsewhere():
            return
        with contextlib.suppress(OSError, ValueError):  # a closed standard error is no reason to stop a training
            print(printable(self.format(record)), file=sys.stderr)  # noqa: T201 - the log of last resort


def _is_handled_elsewhere() -> bool:
    return bool(logging.getLogger().handlers) or len(_LOG.handlers) > 1

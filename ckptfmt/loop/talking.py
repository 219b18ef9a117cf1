"""The log lines of a run by process 0: start, source and claim; with a fallback handler."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable
from typing import Final

from ckptfmt.data.sampler import Sampler
from ckptfmt.documents.run import Launch
from ckptfmt.errors import printable
from ckptfmt.loading.claims import was_not_asked
from ckptfmt.loading.load_report import LoadReport
from ckptfmt.state import State

_LOG: Final = logging.getLogger("ckptfmt")
#: Largest number of reasons or configuration differences in a line.
_SHOWN: Final = 12
#: Largest number of changes by a load to log one by one.
_TOLD: Final = 20
#: Prefix of reasons logged as configuration differences.
_CONFIG: Final = "config:"


class Talk:
    """The lines of a run in the log ``ckptfmt``.

    Lines of process 0 are INFO or WARNING; lines of other processes are DEBUG. If logging isn't
    configured, the lines go to the standard error while this object is open.

    Args:
        writer: number of this process.
    """

    def __init__(self, writer: int) -> None:
        self._writer = writer
        self._handler: _Fallback | None = None

    def open(self) -> None:
        """Install the fallback handler if logging isn't configured. A second call has no effect."""
        if self._handler is None:
            self._handler = _Fallback.take()

    def close(self) -> None:
        """Remove the fallback handler and restore the log's level."""
        if self._handler is not None:
            self._handler.give_back()
            self._handler = None

    def say(self, text: str, *arguments: object, level: int = logging.INFO) -> None:
        """Log a line of the run, as DEBUG on processes other than 0."""
        shown = (printable(one) if isinstance(one, str) else one for one in arguments)
        _LOG.log(level if self._writer == 0 else logging.DEBUG, text, *shown)

    def tell_begun(self, launch: Launch, source: str | None, step: int, state: State) -> None:
        """Log the start of a run, the source, and the highest possible claim of a resume."""
        begins = "nothing" if source is None else source
        left = state.absent_reasons()
        most = "S1" if isinstance(state.data, Sampler) else "S0"
        more = (
            f"; not in State: {', '.join(left)}, so that a resume claims {most} at most"
            if left
            else ""
        )
        self.say("launch %d begins from %s, at step %d%s", launch.launch, begins, step, more)

    def tell_changed(self, report: LoadReport) -> None:
        """Log the changes of a load that lower no claim, such as a restored learning rate."""
        for sentence in report.notes[:_TOLD]:
            self.say("changed by the load: %s", sentence, level=logging.WARNING)
        if len(report.notes) > _TOLD:
            self.say(
                "changed by the load: %d more, in load_report",
                len(report.notes) - _TOLD,
                level=logging.WARNING,
            )

    def tell_resumed(
        self, launch: Launch, source: str, report: LoadReport, *, harmless: Iterable[str]
    ) -> None:
        """Log the source from which a run continues, the claim, and the reasons for the claim."""
        left = [reason for reason in report.lowered_by if was_not_asked(reason)]
        reasons = [
            reason
            for reason in report.lowered_by
            if not (was_not_asked(reason) or reason.startswith(_CONFIG))
        ]
        differences = [
            (path, f"{path} {old!r} -> {new!r}") for path, old, new in report.config_differences
        ]
        decisive = [text for path, text in differences if not _lies_under(path, harmless)]
        others = [text for path, text in differences if _lies_under(path, harmless)]
        text = (
            f"launch {launch.launch} goes on from step {report.step} of {source}: claim"
            f" {_claim_text(report.claim)}"
        )
        text += "".join(f" ({reason})" for reason in left)
        text += f", lowered by: {_first(reasons)}" if reasons else ""
        text += f"; config: {_first(decisive)}" if decisive else ""
        text += f"; config, harmless: {_first(others)}" if others else ""
        self.say("%s", text, level=logging.WARNING if left or reasons or decisive else logging.INFO)
        for reason in report.lowered_by:
            _LOG.debug("lowers the claim: %s", reason)


def _claim_text(claim: str) -> str:
    """Return the text of a claim before the first step.

    S0 is verified by the bytes; the higher claims are only expected.
    """
    return claim if claim == "S0" else f"{claim} expected"


def _first(texts: list[str]) -> str:
    more = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f"; and {more} more, in load_report" if more > 0 else "")


def _lies_under(path: str, keys: Iterable[str]) -> bool:
    return any(path == key or path.startswith(f"{key}/") for key in keys)


class _Fallback(logging.Handler):
    """A handler that prints the lines if logging isn't configured, shared by a process's runs.

    As soon as another handler exists, this handler prints no line, to avoid duplicates.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("ckptfmt: %(message)s"))
        self.users = 0
        self._level_before = logging.NOTSET

    @classmethod
    def take(cls) -> _Fallback | None:
        """Return the process's handler, and count a user; None if logging is configured."""
        for handler in _LOG.handlers:
            if isinstance(handler, cls):
                handler.users += 1
                return handler
        if _LOG.hasHandlers():
            return None
        made = cls()
        made.users = 1
        made._level_before = _LOG.level
        _LOG.addHandler(made)
        _LOG.addFilter(made.may_pass)
        if _LOG.level == logging.NOTSET:
            _LOG.setLevel(logging.INFO)
        return made

    def give_back(self) -> None:
        """Count one user less; the last user removes the handler and restores the level."""
        self.users -= 1
        if not self.users:
            _LOG.removeHandler(self)
            _LOG.removeFilter(self.may_pass)
            _LOG.setLevel(self._level_before)

    def may_pass(self, record: logging.LogRecord) -> bool:
        """Return whether a line is handled.

        As soon as other handlers exist, the level from before this handler counts.
        """
        if not _is_handled_elsewhere():
            return True
        _LOG.setLevel(self._level_before)
        return record.levelno >= _LOG.getEffectiveLevel()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line, unless another handler prints the line."""
        if _is_handled_elsewhere():
            return
        with contextlib.suppress(
            OSError, ValueError
        ):  # a closed standard error is no reason to stop a training
            print(printable(self.format(record)), file=sys.stderr)  # noqa: T201


def _is_handled_elsewhere() -> bool:
    return bool(logging.getLogger().handlers) or len(_LOG.handlers) > 1

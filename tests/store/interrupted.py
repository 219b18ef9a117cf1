"""A KeyboardInterrupt at a chosen moment of what this thread does in some modules."""

import dis
import sys

import pytest

#: The instructions of CPython behind which signals are handled: calls, beginnings of functions, and
#: jumps back.
_HANDLING = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"})


class Interrupted:
    """A context in which the n-th moment of the code of some modules raises a KeyboardInterrupt, once.

    A moment is an instruction before which a signal may be handled.

    Attributes:
        place: where it was raised; empty where there are fewer moments.
    """

    def __init__(self, moment, modules):
        if sys.version_info >= (3, 12):
            pytest.skip(
                "from CPython 3.12 on, frames that have begun get no events of instructions"
            )
        self.place = ""
        self._left = moment
        self._files = {module.__file__ for module in modules}
        #: The instruction that a frame has carried out last.
        self._last = {}

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)
        self._last.clear()

    def _trace(self, frame, event, _arg):
        code = frame.f_code
        if code.co_filename not in self._files or self.place:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            last = self._last.get(frame, "RESUME")
            self._last[frame] = dis.opname[code.co_code[frame.f_lasti]]
            self._left -= last in _HANDLING
            if self._left == 0:
                self.place = f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
                raise KeyboardInterrupt
        return self._trace

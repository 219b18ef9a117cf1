"""A saver's process that fails at one of its messages: ``python -m tests.faults.injected_saver FD``.

The variable `tests.faults.injecting.AT_MESSAGE` says at which: "receive 3" when the third has come,
"send 2" before the second is sent, "sent 2" behind that.
"""

import os
import sys
from typing import Any

from ckptfmt.saving.saver import main
from ckptfmt.write import helper_process
from ckptfmt.write.helper_process import Channel

#: Of `tests.faults.injecting`, which imports torch, and much else that a saver hasn't got.
_AT_MESSAGE = "CKPTFMT_FAULTS_AT_MESSAGE"
_WHERE, _NUMBER = os.environ.get(_AT_MESSAGE, "nowhere 0").split()
_COUNTS = {"send": 0, "sent": 0, "receive": 0}


def _meet(where: str) -> None:
    _COUNTS[where] += 1
    if where == _WHERE and _COUNTS[where] == int(_NUMBER):
        raise LookupError(f"{where} {_NUMBER}")


class _FailingChannel(Channel):
    def send(self, message: dict[str, Any], *, fd: int | None = None) -> None:
        _meet("send")
        super().send(message, fd=fd)
        _meet("sent")

    def receive(self) -> tuple[dict[str, Any], int | None] | None:
        received = super().receive()
        _meet("receive")
        return received


if __name__ == "__main__":
    vars(helper_process)["Channel"] = _FailingChannel
    main(int(sys.argv[1]))

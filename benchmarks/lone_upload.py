"""obstore alone in a process of its own, which puts one object of so many bytes whenever it is asked to."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.peers import Pending

_DONE: Final = "done\n"


class LoneUpload:
    """An upload of as many bytes as a save has, beside a training, and nothing else.

    No upload spares a training what it loses to this one: no copy, digest, or write to a cache has
    a part in it.

    Args:
        bucket: URL of the bucket; where it is, the environment says.
        nbytes: of the object.
        setting: bytes of a part, and how many parts at once.
    """

    name = "obstore_upload"
    is_buffered = False

    def __init__(self, bucket: str, nbytes: int, setting: tuple[int, int]) -> None:
        self._setting = setting
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps([bucket, nbytes, *setting])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,  # as savers have one: many kernels share processors out by session
        )

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        part_nbytes, count = self._setting
        return {"call": "obstore.put in a process", "part_nbytes": part_nbytes, "at_once": count}

    def start(self, path: Path) -> Pending:
        """Ask for an upload."""
        path.touch()
        sender, receiver = self._process.stdin, self._process.stdout
        assert sender is not None
        assert receiver is not None
        sender.write("put\n")

        def is_done() -> bool:
            return bool(select.select([receiver], [], [], 0)[0])

        def wait() -> None:
            if receiver.readline() != _DONE:
                raise RuntimeError("the upload failed; what it said stands on standard error")

        return Pending(path=path, is_done=is_done, wait=wait)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main(arguments: str) -> None:
    """Put an object for each line of the standard input."""
    import obstore  # noqa: PLC0415
    from obstore.store import from_url  # noqa: PLC0415

    bucket, nbytes, part_nbytes, count = json.loads(arguments)
    store = from_url(bucket, client_options={"timeout": "120s", "allow_http": True})
    content = memoryview(bytearray(nbytes))
    content[:: 1 << 12] = b"\1" * len(content[:: 1 << 12])  # pages of its own, not one of zeros
    for _ in sys.stdin:
        obstore.put(
            store,
            "lone",
            content,
            use_multipart=True,
            chunk_size=part_nbytes,
            max_concurrency=count,
        )
        sys.stdout.write(_DONE)
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

"""A separate process with obstore alone that uploads an object of a given size on request."""

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
    """An upload of a save's size during a training, and no other work.

    A save's upload costs a training at least as much, since this process makes no copy, no digest,
    and no write to a cache.

    Args:
        bucket: the URL of the bucket; the environment gives the address.
        nbytes: the size of the object.
        setting: bytes per part, and the number of concurrent parts.
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
            start_new_session=True,  # as with savers: many kernels share CPUs by session
        )

    def describe(self) -> dict[str, object]:
        """Return the settings."""
        part_nbytes, count = self._setting
        return {"call": "obstore.put in a process", "part_nbytes": part_nbytes, "at_once": count}

    def start(self, path: Path) -> Pending:
        """Start an upload."""
        path.touch()
        sender = self._process.stdin
        receiver = self._process.stdout
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
        """Stop the process."""
        self._process.communicate()


def main(arguments: str) -> None:
    """Upload an object for each line of the standard input."""
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

"""The text the demo trains on: the sources of Python's own standard library, as bytes."""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path

from ckptfmt.digest import digest_bytes, digest_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text and where it is from.

    Attributes:
        content: the bytes; each is a token.
        file_count: how many source files they come from.
        chunk_nbytes: bytes in one sample.
    """

    content: bytes
    file_count: int
    chunk_nbytes: int

    def __len__(self) -> int:
        """Return how many samples the text has."""
        return len(self.content) // self.chunk_nbytes

    def chunk(self, sample: int) -> bytes:
        """Return one sample."""
        return self.content[sample * self.chunk_nbytes : (sample + 1) * self.chunk_nbytes]

    def fingerprint(self) -> str:
        """Return the digest of the whole text: another text is another data set."""
        return digest_text(digest_bytes(self.content))


def read_text(*, text_nbytes: int, chunk_nbytes: int) -> Text:
    """Return the first `text_nbytes` bytes of the standard library's modules, in the order of their names.

    Raises: FileNotFoundError where the library has no sources, as in a zipped one.
    """
    library = Path(sysconfig.get_path("stdlib"))
    content, file_count = bytearray(), 0
    for path in sorted(library.glob("*.py")):
        if len(content) >= text_nbytes:
            break
        content += path.read_bytes()
        file_count += 1
    text = Text(content=bytes(content[:text_nbytes]), file_count=file_count, chunk_nbytes=chunk_nbytes)
    if len(text) == 0:
        raise FileNotFoundError(f"{library} has no sources of the standard library")
    return text

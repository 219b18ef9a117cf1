"""Pins: what a save that isn't decided yet will read from. Spec: REQ-CMT-035, REQ-CMT-037."""

from __future__ import annotations

import dataclasses
from typing import Any

from ckptfmt import limits
from ckptfmt.documents.canonical import dump_document, parse_document
from ckptfmt.documents.manifest import Reference, check_references, pins_path
from ckptfmt.errors import Code, err


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """The references of a writer whose part is still to be written.

    Attributes:
        attempt: which it belongs to.
        writer: number of the writer.
        references: what its part may refer to.
    """

    attempt: str
    writer: int
    references: tuple[Reference, ...]

    def dump(self) -> bytes:
        """Return the bytes of the file."""
        signed: dict[str, Any] = {
            "type": "pins",
            "format_version": limits.FORMAT_VERSION,
            "features": {"reader": [], "writer": []},
            **dataclasses.asdict(self),
        }
        return dump_document({**signed, "references": [dataclasses.asdict(one) for one in self.references]})

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> Pins:
        """Return the pins of a file.

        Args:
            where: its path in the checkpoint's directory.

        Raises: FormatError, IntegrityError, UnsupportedError.
        """
        signed, _ = parse_document(content, where=where, types=("pins",))
        references = tuple(Reference(**one) for one in signed["references"])
        check_references(references, f"{where}#/signed/references")
        if pins_path(signed["attempt"], signed["writer"]) != where:
            raise err(Code.DOC_MISMATCH, "they belong to another writer", where=where, requirement="REQ-CMT-037")
        return cls(attempt=signed["attempt"], writer=signed["writer"], references=references)

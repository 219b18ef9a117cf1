"""The text of a package index about ckptfmt: README.md without links to files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\(([^):#]+)(?:#[^)]*)?\)")


class ReadmeHook(MetadataHookInterface):
    """Names the file that a relative link leads to, which is part of the source distribution."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field `readme`."""
        text = Path(self.root, "README.md").read_text("utf-8")
        text = _LINK.sub(
            lambda link: link[1] if link[1] == link[2] else f"{link[1]} (`{link[2]}`)", text
        )
        text += "\nA path in parentheses is that of a file in the source distribution.\n"
        metadata["readme"] = {"content-type": "text/markdown", "text": text}

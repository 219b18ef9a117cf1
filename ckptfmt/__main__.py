"""``python -m ckptfmt``: the command line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ckptfmt.cli.app import run

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `argv` is `sys.argv` without the program's name."""
    return run(sys.argv[1:] if argv is None else list(argv))


if __name__ == "__main__":
    sys.exit(main())

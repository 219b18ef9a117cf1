"""What an exploration has to say of itself: shown for a test that fails, and for all of them with ``pytest -rP``."""

import sys


def tell(line: str) -> None:
    """Write a line to the captured output of the test."""
    sys.stdout.write(f"{line}\n")

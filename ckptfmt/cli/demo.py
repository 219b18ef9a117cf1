"""``demo``: hand over to the demonstration, which has options of its own."""

from __future__ import annotations


def run_demo(argv: list[str]) -> int:
    """Run the demonstration and return its exit code. Raises: StateError(STATE_UNSUPPORTED) without torch."""
    from ckptfmt.demo import main

    return main(argv)

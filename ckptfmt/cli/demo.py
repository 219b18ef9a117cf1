"""``demo``: hand over to the demonstration, which has options of its own."""

from __future__ import annotations

from ckptfmt.errors import Code, err

__all__ = ["run_demo"]


def run_demo(argv: list[str]) -> int:
    """Run the demonstration and return its exit code.

    Raises: StateError(STATE_UNSUPPORTED) where torch isn't installed.
    """
    try:
        from ckptfmt.demo import main as demo_main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise err(
            Code.STATE_UNSUPPORTED,
            "the demo trains a small model with torch",
            where="demo",
            remedy='Install it: pip install "ckptfmt[torch]".',
        ) from error
    return demo_main(argv)

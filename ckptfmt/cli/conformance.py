"""``conformance``: hand over to the conformance suite, which has options of its own."""

from __future__ import annotations

from ckptfmt.errors import Code, err


def run_conformance(argv: list[str]) -> int:
    """Run the suite and return its exit code. Raises: StateError(STATE_UNSUPPORTED) where it isn't installed."""
    try:
        from ckptfmt_conformance.__main__ import main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ckptfmt_conformance":
            raise
        raise err(
            Code.STATE_UNSUPPORTED,
            "the conformance suite isn't installed",
            where="ckptfmt_conformance",
            remedy="Install the wheel of ckptfmt again; in a checkout, run `make venv`.",
        ) from error
    return main(argv, program="python -m ckptfmt conformance")

"""Fuzz one target, guided by coverage: ``python -m tests.fuzz.guided TARGET CORPUS [SECONDS]``.

Needs atheris, which `make fuzz` installs and no test needs. Inputs that reach new code go to the
directory CORPUS. An input is a finding if it raises anything but a CkptError, takes more than ten seconds
or 2 GB, or is accepted and dumped as other bytes; the input is written beside CORPUS. With ``keep`` in
place of SECONDS, the smallest inputs of CORPUS become the kept ones, which `test_corpus.py` plays.
"""

import pathlib
import sys
import tempfile

import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]

with atheris.instrument_imports(include=["ckptfmt"]):
    from tests.fuzz.targets import feed, keep, list_kept, seeds

_OPTIONS = ["-timeout=10", "-rss_limit_mb=2048", "-max_len=65536", "-print_final_stats=1"]
#: How many inputs of a target are kept.
_KEPT = 64


def begin(target: str) -> str:
    """Return a directory with the inputs to begin with."""
    made = pathlib.Path(tempfile.mkdtemp(prefix="ckptfmt-seeds-"))
    for number, content in enumerate([*seeds(target), *list_kept(target)]):
        (made / f"seed-{number}").write_bytes(content)
    return str(made)


def main(target: str, corpus: str, seconds: str = "60") -> None:
    """Fuzz for some time, or keep what was found."""
    pathlib.Path(corpus).mkdir(parents=True, exist_ok=True)
    if seconds == "keep":
        contents = {path.read_bytes() for path in pathlib.Path(corpus).iterdir()}
        keep(target, sorted(contents, key=lambda content: (len(content), content))[:_KEPT])
        return
    findings = f"-artifact_prefix={pathlib.Path(corpus).absolute()}-"
    options = [*_OPTIONS, findings, f"-max_total_time={seconds}", corpus, begin(target)]
    atheris.Setup([sys.argv[0], *options], lambda content: feed(target, content) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])

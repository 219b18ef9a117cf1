"""Whatever full checkpoint a test leaves in its `tmp_path`, the reader of a stranger reads it too.

What a test damaged on purpose is left out: what `ckptfmt.validate` refuses.
"""

import json
from pathlib import Path

import pytest

import ckptfmt
from tests.pages.stranger_reader import FIELDS, read_checkpoint

MAX_NBYTES = 20_000_000
MAX_CHECKPOINTS = 50


def check_with_stranger(directory):
    """Reads a checkpoint with the stranger's reader, and compares what it found with the manifest's summary."""
    read = read_checkpoint(directory)
    for field in FIELDS:
        entry = read["manifest"]["fields"][field]
        found = {
            table: [key for key in read[table] if key[0] == field]
            for table in ("tensors", "leaves", "streams")
        }
        if entry["state"] == "absent":
            assert not any(found.values()), f"{field} is absent, and has {found}"
            continue
        assert entry == {
            "state": "present",
            "tensor_count": len(found["tensors"]),
            "nbytes": sum(len(read["tensors"][key]["bytes"]) for key in found["tensors"]),
            "stream_count": len(found["streams"]),
            "leaf_count": len(found["leaves"]),
        }, f"the manifest's summary of {field}"
    return read


def committed_checkpoints(root):
    """The directories below `root` with a register that holds a manifest, up to the limits of what is cheap."""
    found: list[Path] = []
    nbytes = 0
    for register in sorted(Path(root).rglob("manifest.json")):
        if register.is_symlink() or not register.is_file() or register.stat().st_size > 65_535:
            continue
        try:
            document = json.loads(register.read_bytes())
            if document["signed"]["type"] != "manifest" or document["signed"]["profile"] != "full":
                continue
            if not document["signed"]["format_version"].startswith("1."):
                continue  # it reads no earlier version: tests/read/test_kept.py
            if "frozen" in document["signed"]["features"]["reader"]:
                continue  # the stranger's reader refuses it by this name: tests/adapters/test_frozen.py
            size = sum(path.stat().st_size for path in register.parent.rglob("*") if path.is_file())
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue  # no register that says it is committed: not this reader's business
        if nbytes + size > MAX_NBYTES or len(found) == MAX_CHECKPOINTS:
            break
        nbytes += size
        found.append(register.parent)
    return found


def is_valid(directory):
    """Whether the library finds nothing wrong; a store that fails, as some tests make it, says neither."""
    try:
        return ckptfmt.validate(directory).valid
    except ckptfmt.CkptError:
        return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """As a part of the test itself: it fails if the stranger can't read what it left."""
    result = yield
    root = getattr(item, "funcargs", {}).get("tmp_path")
    for directory in committed_checkpoints(root) if root is not None else ():
        if not is_valid(directory):
            continue  # The stranger isn't armed against what is no regular file.
        try:
            check_with_stranger(directory)
        except (ValueError, AssertionError) as error:
            pytest.fail(
                f"the stranger's reader can't read {directory.relative_to(root)}: {error}",
                pytrace=False,
            )
    return result

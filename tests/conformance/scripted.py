"""An adapter that does what a case's request tells it to, as a class and as a command, and cases for it."""

import base64
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ckptfmt_conformance.protocol import Rejected, Unsupported, run_as_command
from tests.conformance.vectors import read_area, write_area


class Scripted:
    """Does what it is told."""

    def describe(self):
        return {
            "name": "scripted",
            "version": "1",
            "spec": ["0.1", "0.2"],
            "roles": ["reader", "writer"],
            "features": ["deltas"],
            "kinds": ["open", "read", "write"],
        }

    def open(self, path, request):
        return act(request, path)

    def read(self, path, request):
        return act(request, path)

    def write(self, _path, request, output):
        Path(output).mkdir()
        (Path(output) / "manifest.json").write_text(request["content"])
        return {}


def act(request, path):  # noqa: C901, PLR0912
    match request:
        case {"accept": result}:
            return result
        case {"reject": code}:
            raise Rejected(code, "there", request.get("phase", "open"))
        case {"unsupported": feature}:
            raise Unsupported(feature)
        case {"raise": text}:
            raise RuntimeError(text)
        case {"exit": code}:
            os._exit(code)
        case {"kill": number}:
            os.kill(os.getpid(), number)
        case {"sleep": seconds}:
            time.sleep(seconds)
        case {"fork": name}:
            if not os.fork():
                time.sleep(2)
                Path(name).touch()
            time.sleep(3)
        case {"print": text}:
            print(text)  # noqa: T201
            sys.stdout.flush()
            return {}
        case {"files": _}:
            return {"files": sorted(entry.name for entry in path.iterdir())}
        case {"none": _}:
            return None
        case {"object": _}:
            return {"value": object()}
    raise AssertionError(request)


#: The content of `weights.safetensors` in each case.
ALL_BYTES = bytes(range(256))


def write_case(root, case_id, *, request, **members):
    """Write a case that any adapter may be asked, behind those that its area has."""
    area = case_id.partition("/")[0]
    path = Path(root) / f"{area}.json"
    case = {
        "id": case_id,
        "description": f"what {case_id} is",
        "requirements": ["REQ-OPN-001"],
        "kind": "open",
        "roles": ["reader"],
        "spec": "0.1",
        "features": [],
        "derived_from": None,
        "edit": None,
        "path": ".",
        "request": request,
        "expect": {"outcome": "accept"},
        "bug_class": "CRASH",
        "why": "it would be bad",
        "source": {"generator": "a test", "version": "1"},
        "files": {"a-file": "00", "weights.safetensors": "01"},
    }
    before = read_area(path) if path.exists() else []
    contents = {"00": {"text": ""}, "01": {"base64": base64.b64encode(ALL_BYTES).decode()}}
    write_area(Path(root), area, [*before, {**case, **members}], contents)


def reject(*codes, phase="open"):
    return {
        "outcome": "reject",
        "error": codes[0] if len(codes) == 1 else list(codes),
        "phase": phase,
    }


REJECT = reject("TILING_GAP")
TENSOR = {"w": {"dtype": "float32", "shape": [2], "blake3": "ab", "first16": ""}}

#: Request, further members of the case, and how it must go.
BEHAVIOURS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "accepts": ({"accept": {}}, {}, "PASS"),
    "says-more": (
        {"accept": {"step": 1, "more": 2}},
        {"expect": {"outcome": "accept", "step": 1}},
        "PASS",
    ),
    "says-less": ({"accept": {}}, {"expect": {"outcome": "accept", "step": 1}}, "FAIL"),
    "says-true": ({"accept": {"step": True}}, {"expect": {"outcome": "accept", "step": 1}}, "FAIL"),
    "says-float": ({"accept": {"step": 1.0}}, {"expect": {"outcome": "accept", "step": 1}}, "FAIL"),
    "tensors": (
        {"accept": {"tensors": TENSOR}},
        {"expect": {"outcome": "accept", "tensors": TENSOR}},
        "PASS",
    ),
    "tensor-more": (
        {"accept": {"tensors": TENSOR}},
        {"expect": {"outcome": "accept", "tensors": {}}},
        "FAIL",
    ),
    "tensor-less": (
        {"accept": {"tensors": {}}},
        {"expect": {"outcome": "accept", "tensors": TENSOR}},
        "FAIL",
    ),
    "tensor-other": (
        {"accept": {"tensors": {"w": {**TENSOR["w"], "blake3": "cd"}}}},
        {"expect": {"outcome": "accept", "tensors": TENSOR}},
        "FAIL",
    ),
    "tensor-text": (
        {"accept": {"tensors": "w"}},
        {"expect": {"outcome": "accept", "tensors": TENSOR}},
        "FAIL",
    ),
    "prefixed": (
        {"accept": {"blake3": "blake3:ab"}},
        {"kind": "read", "expect": {"outcome": "accept", "blake3": "ab"}},
        "PASS",
    ),
    "sees-input": (
        {"files": 0},
        {"expect": {"outcome": "accept", "files": ["a-file", "weights.safetensors"]}},
        "PASS",
    ),
    "rejects": ({"reject": "TILING_GAP"}, {"expect": REJECT}, "PASS"),
    "rejects-one-of-two": ({"reject": "B"}, {"expect": reject("A", "B")}, "PASS"),
    "rejects-valid": ({"reject": "TILING_GAP"}, {}, "FAIL"),
    "accepts-invalid": ({"accept": {}}, {"expect": REJECT}, "FAIL"),
    "wrong-code": ({"reject": "TILING_OVERLAP"}, {"expect": REJECT}, "FAIL"),
    "too-late": ({"reject": "TILING_GAP", "phase": "read"}, {"expect": REJECT}, "FAIL"),
    "sooner": (
        {"reject": "TILING_GAP"},
        {"expect": reject("TILING_GAP", phase="validate")},
        "PASS",
    ),
    "no-phase": ({"reject": "TILING_GAP", "phase": None}, {"expect": REJECT}, "FAIL"),
    "odd-phase": ({"reject": "TILING_GAP", "phase": "late"}, {"expect": REJECT}, "FAIL"),
    "crash-is-no-refusal": ({"raise": "TILING_GAP"}, {"expect": REJECT}, "ERROR"),
    "exit-1": ({"exit": 1}, {"expect": REJECT}, "ERROR"),
    "exit-10-without-a-word": ({"exit": 10}, {"expect": REJECT}, "ERROR"),
    "exit-0-without-a-word": ({"exit": 0}, {}, "ERROR"),
    "segfault": ({"kill": int(signal.SIGSEGV)}, {"expect": REJECT}, "ERROR"),
    "hang": ({"sleep": 30}, {"expect": REJECT}, "ERROR"),
    "no-object": ({"none": 0}, {}, "ERROR"),
    "no-json": ({"object": 0}, {}, "ERROR"),
    "empty-code": ({"reject": ""}, {"expect": REJECT}, "ERROR"),
    "unsupported": ({"unsupported": "groups"}, {"features": ["groups"]}, "UNSUPPORTED"),
    "refuses-what-it-lacks": (
        {"reject": "FEATURE_UNSUPPORTED"},
        {"features": ["groups"]},
        "UNSUPPORTED",
    ),
    "lacks-it-and-reads-it": ({"accept": {}}, {"features": ["groups"]}, "PASS"),
    "lacks-it-and-misreads": (
        {"accept": {"step": 2}},
        {"features": ["groups"], "expect": {"outcome": "accept", "step": 1}},
        "FAIL",
    ),
    "unsupported-though-it-has-it": ({"unsupported": "deltas"}, {"features": ["deltas"]}, "FAIL"),
    "refuses-what-it-has": ({"reject": "FEATURE_UNSUPPORTED"}, {"features": ["deltas"]}, "FAIL"),
    "unsupported-core": ({"unsupported": "reading"}, {}, "FAIL"),
    "unsupported-in-the-place-of-a-refusal": ({"unsupported": "gaps"}, {"expect": REJECT}, "FAIL"),
    "another-version": ({"reject": "VERSION_UNSUPPORTED"}, {"spec": "0.3"}, "PASS"),
    "another-version-late": (
        {"reject": "VERSION_UNSUPPORTED", "phase": "read"},
        {"spec": "0.3"},
        "FAIL",
    ),
    "another-version-by-another-code": ({"reject": "DOC_SCHEMA"}, {"spec": "0.3"}, "FAIL"),
    "another-version-by-its-features": (
        {"reject": "FEATURE_UNSUPPORTED"},
        {"spec": "0.3", "features": ["groups"]},
        "FAIL",
    ),
    "another-version-accepted": ({"accept": {}}, {"spec": "0.3"}, "FAIL"),
    "another-version-broken": ({"exit": 1}, {"spec": "0.3", "expect": REJECT}, "SKIPPED"),
    "another-role": ({"exit": 1}, {"roles": ["cleaner"]}, "SKIPPED"),
    "another-kind": ({"exit": 1}, {"kind": "reshard"}, "SKIPPED"),
    "writes-nonsense": ({"content": "{}"}, {"kind": "write", "roles": ["writer"]}, "FAIL"),
}


def write_vectors(root, *names):
    """Write cases of these behaviours, or of all."""
    for name in names or BEHAVIOURS:
        request, members, _ = BEHAVIOURS[name]
        write_case(root, f"page/{name}", request=request, **members)
    return Path(root)


if __name__ == "__main__":
    sys.exit(run_as_command(Scripted(), sys.argv[1:]))

"""PyTorch's own tests of torch.distributed.checkpoint, with torch's storage and with ours, side by side.

    python -m tests.plugins.rebound PYTORCH [FILE ...]

PYTORCH is a checkout of PyTorch's sources, best of the version that is installed; FILE is a path below its folder
test/distributed/checkpoint, by default all those of `FILES`. Nothing of it is copied into this repository. Each file
runs twice, in processes of its own: as it is, and with `FileSystemWriter`, `FileSystemReader` and the default storage
bound to ckptfmt before the file's first line. Tests that ask for accelerators run on the processor instead.
The table goes to standard output; the exit status is 1 if a test passes with torch's storage and fails with ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: Files that write or read a checkpoint, and run on the processor.
FILES = (
    "test_file_system_checkpoint_cpu.py",
    "test_file_system_checkpoint.py",
    "test_checkpoint.py",
    "test_planner.py",
    "test_save_load_api.py",
    "test_nested_dict.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_fsdp_model_state.py",
    "test_fsdp_optim_state.py",
    "test_hsdp_checkpoint.py",
    "test_tp_checkpoint.py",
    "test_async_process_executor.py",
    "test_utils.py",
    "e2e/test_e2e_save_and_load.py",
)
#: How long a file may take, in seconds.
_TIMEOUT_S = 900
_HEADER = "import tests.plugins.rebound as _rebound; _rebound.bind({ours})\n"


def bind(ours: bool) -> None:  # noqa: FBT001 - the header of a file passes it
    """Prepare this process for a file of tests: no accelerators, and ckptfmt as the storage if asked for."""
    from torch.testing._internal import common_distributed  # noqa: PLC0415 - torch.distributed is slow to import
    from torch.testing._internal.distributed._tensor import common_dtensor  # noqa: PLC0415

    def run_anyway(_count: int, **_options: object) -> Callable[[Any], Any]:
        return lambda test: test

    for module in (common_distributed, common_dtensor):
        module.skip_if_lt_x_gpu = run_anyway  # type: ignore[attr-defined]
    if ours:
        _bind_storage()


def _bind_storage() -> None:
    from torch.distributed import checkpoint  # noqa: PLC0415
    from torch.distributed.checkpoint import filesystem  # noqa: PLC0415

    from ckptfmt.plugins import dcp  # noqa: PLC0415

    class Writer(dcp.CkptfmtWriter):
        """Ours with the options that torch's are given: how it writes is its own business."""

        def __init__(self, path: Any, *_given: object, overwrite: bool = True, **_options: object) -> None:
            super().__init__(path, overwrite=overwrite, allow_pickle=True)

    class Reader(dcp.CkptfmtReader):
        def __init__(self, path: Any, *_given: object, **_options: object) -> None:
            super().__init__(path, allow_pickle=True)

    for module in (checkpoint, filesystem):
        module.FileSystemWriter, module.FileSystemReader = Writer, Reader  # type: ignore[attr-defined]
    dcp.install(allow_pickle=True)


def outcomes(file: Path, *, ours: bool) -> dict[str, str]:
    """Run a file of tests and return the outcome of each test, with the first line of what it raised."""
    with tempfile.TemporaryDirectory() as folder:
        bound = Path(folder, file.name)
        bound.write_text(_HEADER.format(ours=ours) + file.read_text())
        report = Path(folder, "report.xml")
        root = Path(__file__).parents[2]
        paths = [str(root), folder, str(file.parents[3]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            folder,
        ]
        with Path(folder, "log").open("w") as log:
            subprocess.run(
                [*command, f"--junitxml={report}", str(bound)],
                check=False, cwd=folder, env=environment, stdout=log, stderr=log, timeout=_TIMEOUT_S,
            )  # fmt: skip
        if not report.exists():
            return {"(the file)": "not run: " + Path(folder, "log").read_text()[-300:].replace("\n", " ")}
        return {_name(case): _outcome(case) for case in ET.parse(report).iter("testcase")}


def _name(case: ET.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"


def _outcome(case: ET.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            lines = [line.strip() for line in (found.text or found.get("message") or "").splitlines() if line.strip()]
            errors = [line for line in lines if "Error" in line or "Exception" in line] or lines or [""]
            return f"{kind}: {errors[-1][:160]}"
    return "passed"


def main(pytorch: str, files: Sequence[str]) -> int:
    """Run the files, print the table, and return how many tests only torch's storage passes."""
    worse = 0
    print("| test | torch's storage | ours |\n| --- | --- | --- |", flush=True)  # noqa: T201
    for name in files or FILES:
        file = Path(pytorch, "test", "distributed", "checkpoint", name).resolve()
        if not file.exists():
            print(f"| {name} | not in this checkout | |", flush=True)  # noqa: T201
            continue
        theirs, ours = outcomes(file, ours=False), outcomes(file, ours=True)
        for test in [*theirs, *(ours.keys() - theirs.keys())]:
            left, right = theirs.get(test, "not run"), ours.get(test, "not run")
            worse += left == "passed" != right
            print(f"| {name}: {test} | {left} | {right} |", flush=True)  # noqa: T201
    return worse


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1], sys.argv[2:])))

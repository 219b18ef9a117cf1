"""PyTorch's own tests of torch.distributed.checkpoint, with torch's storage and with ours, side by side.

    python -m tests.plugins.rebound PYTORCH [FILE ...]

PYTORCH is a checkout of PyTorch's sources, best of the version that is installed; FILE is a path
below its folder test/distributed/checkpoint, by default all those of `FILES`. Nothing of it is
copied into this repository. Each file runs twice, in processes of its own: as it is, and with
ckptfmt as the storage. For a file that names no storage this is `install()` alone, as users call
it. In a file that names `FileSystemWriter` or `FileSystemReader`, as a user would name
`CkptfmtWriter` and `CkptfmtReader` there, the two names are bound to these before its first line.
Other modules of torch keep their names. Both times,

- tests that ask for accelerators run on the processor instead, FSDP1 too;
- the storages of `test_checkpoint`, which raise errors and keep nothing, stand before one that
  keeps what it is given.

The table goes to standard output; the exit status is 1 if a test passes with torch's storage and
fails with ours. PyTorch's tests need the package expecttest.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint, fsdp
from torch.distributed.checkpoint import filesystem
from torch.testing._internal import common_distributed, common_fsdp
from torch.testing._internal.distributed._tensor import common_dtensor

from ckptfmt.plugins import dcp

#: Files that write or read a checkpoint, and run on the processor.
FILES = (
    "test_file_system_checkpoint_cpu.py",
    "test_file_system_checkpoint.py",
    "test_checkpoint.py",
    "test_planner.py",
    "test_save_load_api.py",
    "test_format_utils.py",
    "test_compatibility.py",
    "test_nested_dict.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_fsdp_model_state.py",
    "test_fsdp_optim_state.py",
    "test_fsdp_tp_checkpoint_conversion.py",
    "test_hsdp_checkpoint.py",
    "test_tp_checkpoint.py",
    "test_async_process_executor.py",
    "test_utils.py",
    "e2e/test_e2e_save_and_load.py",
    "e2e/test_fine_tuning.py",
    "e2e/test_fsdp.py",
    "e2e/test_pipeline.py",
    "test_2d_fsdp_dt_checkpoint.py",
)
#: How long a file may take, in seconds.
_TIMEOUT_S = 900
_HEADER = "import tests.plugins.rebound as _rebound; _rebound.bind({ours}, names_storage={names})\n"
_FOOTER = "\n_rebound.put_storage_behind(globals())\n"
#: How a file's accelerators become the processor: patterns and what takes their place.
_ON_PROCESSOR = (
    (r"\bcuda:(\d|\{[^}]*\})", "cpu"),
    (r"\.cuda\(([^()]|\([^()]*\))*\)", ""),
    (r'device="cuda"', 'device="cpu"'),
    (r'torch\.device\("cuda"\)', 'torch.device("cpu")'),
    (r"torch\.cuda\.device_count\(\)", "4"),
    (r"with_comms\(init_rpc=False\)", 'with_comms(init_rpc=False, backend="gloo")'),
    (r"\n@?if __name__ == .*\n.*run_tests\(\)\n", "\n"),
)


class Writer(dcp.CkptfmtWriter):
    """Ours with the options that torch's are given: how it writes is its own business."""

    def __init__(
        self, path: Any, *_given: object, overwrite: bool = True, **_options: object
    ) -> None:
        super().__init__(path, overwrite=overwrite, allow_pickle=True)


class Reader(dcp.CkptfmtReader):
    """As `Writer`."""

    def __init__(self, path: Any, *_given: object, **_options: object) -> None:
        super().__init__(path, allow_pickle=True)


def bind(ours: bool, *, names_storage: bool) -> None:  # noqa: FBT001 - as in the header
    """Prepare this process for a file of tests: no accelerators, and ckptfmt as the storage if asked for.

    Args:
        ours: whether ckptfmt is the storage.
        names_storage: whether the file names a storage, so that the names are bound too.
    """

    def run_anyway(*_needed: object, **_options: object) -> Callable[[Any], Any]:
        return lambda test: test

    for helpers in (common_distributed, common_dtensor):
        for decorator in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
            if hasattr(helpers, decorator):
                setattr(helpers, decorator, run_anyway)
    begin = fsdp.FullyShardedDataParallel.__init__

    @functools.wraps(begin)
    def on_processor(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **{"device_id": torch.device("cpu")} | kwargs)

    def fork_ranks(self: Any) -> None:
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._start_processes(context.Process)

    run_rank = common_fsdp.FSDPTest._run.__func__  # type: ignore[attr-defined]

    @functools.wraps(run_rank)
    def on_four_processors(cls: Any, *args: Any, **kwargs: Any) -> None:
        torch.accelerator.device_count = lambda: 4
        run_rank(cls, *args, **kwargs)

    common_fsdp.FSDPTest._run = classmethod(on_four_processors)  # type: ignore[assignment]
    common_fsdp.DEVICE_COUNT, common_fsdp.DISTRIBUTED_BACKEND = 4, "gloo"

    # Ranks that begin with torch imported take a fraction of the time.
    common_distributed.MultiProcessTestCase._spawn_processes = fork_ranks  # type: ignore[method-assign]
    fsdp.FullyShardedDataParallel.__init__ = on_processor  # type: ignore[method-assign]
    if ours:
        dcp.install(allow_pickle=True)
    if ours and names_storage:
        modules: list[Any] = [checkpoint, filesystem]
        for module in modules:
            module.FileSystemWriter, module.FileSystemReader = Writer, Reader


class _Behind:
    """A storage behind one that raises errors: each call goes to both, unless the first one raises."""

    def __init__(self, faulty: Any, storage: Any) -> None:
        self._faulty, self._storage = faulty, storage

    def __getattr__(self, name: str) -> Any:
        raises, keeps = getattr(self._faulty, name), getattr(self._storage, name)
        taken = inspect.signature(raises).parameters

        @functools.wraps(keeps)
        def both(*args: Any, **kwargs: Any) -> Any:
            first = raises(
                *args, **{name: value for name, value in kwargs.items() if name in taken}
            )
            kept = keeps(*args, **kwargs)
            if isinstance(first, torch.futures.Future):
                try:
                    first.wait()
                except ValueError:  # it fails later than the call
                    return first
            return kept

        return both


def put_storage_behind(names: dict[str, Any]) -> None:
    """Let the saves and loads of a file's faulty storages keep and find what is saved."""
    if "FaultyStorageWriter" not in names:
        return
    save, load = names["save_state_dict"], names["load_state_dict"]
    bound: Any = checkpoint

    def folder() -> str:
        shared = [tempfile.mkdtemp()]
        if distributed.is_initialized():
            distributed.broadcast_object_list(shared)
        return shared[0]

    def save_state_dict(state_dict: Any, storage_writer: Any, **options: Any) -> Any:
        return save(
            state_dict, _Behind(storage_writer, bound.FileSystemWriter(folder())), **options
        )

    def load_state_dict(state_dict: Any, storage_reader: Any, **options: Any) -> Any:
        path = folder()
        save(state_dict, bound.FileSystemWriter(path), no_dist=options.get("no_dist", False))
        return load(state_dict, _Behind(storage_reader, bound.FileSystemReader(path)), **options)

    names["save_state_dict"], names["load_state_dict"] = save_state_dict, load_state_dict


def outcomes(file: Path, *, ours: bool) -> dict[str, str]:
    """Run a file of tests and return the outcome of each test, with what it raised."""
    with tempfile.TemporaryDirectory() as folder:
        bound = Path(folder, file.name)
        content = file.read_text()
        names = "FileSystemWriter" in content or "FileSystemReader" in content
        text = _HEADER.format(ours=ours, names=names) + content + _FOOTER
        for pattern, instead in _ON_PROCESSOR:
            text = re.sub(pattern, instead, text)
        text = text.replace('"/tmp/', f'"{folder}/')
        bound.write_text(text)
        report = Path(folder, "report.xml")
        root = Path(__file__).parents[2]
        paths = [str(root), folder, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": folder,
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
        with Path(folder, "log").open("w") as log:
            subprocess.run(
                [*command, "--rootdir", folder, f"--junitxml={report}", str(bound)],
                check=False, cwd=folder, env=environment, stdout=log, stderr=log, timeout=_TIMEOUT_S,
            )  # fmt: skip
        if not report.exists():
            return {
                "(the file)": "not run: "
                + Path(folder, "log").read_text()[-300:].replace("\n", " ")
            }
        return {_name(case): _outcome(case) for case in ET.parse(report).iter("testcase")}


def _name(case: ET.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"


def _outcome(case: ET.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            lines = [
                line.strip()
                for line in (found.text or found.get("message") or "").splitlines()
                if line.strip()
            ]
            raised = [
                line
                for line in lines
                if re.match(r"(E +)?[\w.]*(Error|Exception|Skip)\w*: (?!Process )", line)
            ]
            return f"{kind}: {(raised or lines or [''])[-1][:200]}"
    return "passed"


def main(pytorch: str, files: Sequence[str]) -> int:
    """Run the files, print the table, and return how many tests only torch's storage passes."""
    worse = 0
    print("| test | torch's storage | ours |\n| --- | --- | --- |", flush=True)  # noqa: T201 - the framework's signature
    for name in files or FILES:
        file = Path(pytorch, "test", "distributed", "checkpoint", name).resolve()
        if not file.exists():
            print(f"| {name} | not in this checkout | |", flush=True)  # noqa: T201 - the framework's signature
            continue
        theirs, ours = outcomes(file, ours=False), outcomes(file, ours=True)
        for test in [*theirs, *(ours.keys() - theirs.keys())]:
            left, right = theirs.get(test, "not run"), ours.get(test, "not run")
            worse += left == "passed" != right
            print(f"| {name}: {test} | {left} | {right} |", flush=True)  # noqa: T201 - the framework's signature
    return worse


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1], sys.argv[2:])))

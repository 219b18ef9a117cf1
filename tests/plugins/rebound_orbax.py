"""Orbax's own tests of CheckpointManager, with Orbax and with ckptfmt, side by side.

    python -m tests.plugins.rebound_orbax ORBAX [NAME ...]

ORBAX is a git directory of Orbax's sources, or the file `checkpoint_manager_test.py` of them; NAME
is part of a test's name, by default all tests run. Nothing of it is copied into this repository.
The file runs twice, in processes of its own, on eight virtual devices: as it is, and with
`ManagerByCkptfmt` under the name `CheckpointManager`. That class says each everyday call with the
calls of ckptfmt that the table of docs/moving.md names, and nothing more: a call or an option
without a counterpart raises `NotPromisedError` with the reason.

The table goes to standard output; `ORBAX.md` has the newest. The exit status is 1 if a test fails
that `DIFFERENCES` doesn't name, or no test fails for a reason that is named there.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import types
import unittest
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import ckptfmt
from ckptfmt.errors import CkptError

FILE = "checkpoint/orbax/checkpoint/checkpoint_manager_test.py"
_TIMEOUT_S = 1800
_HEADER = "import tests.plugins.rebound_orbax as _rebound; _rebound.bind(ours={ours})\n"
#: Orbax's name of a manager's only item.
_ONLY = "default"
#: Options of `CheckpointManagerOptions` that need a value other than the default to be refused, and
#: the reason.
_NOT_PROMISED = {
    "keep_time_interval": "retention by time",
    "should_keep_fn": "retention by a function",
    "preservation_policy": "retention by a policy object",
    "should_save_fn": "a rule of the loop: call save()",
    "save_on_steps": "a rule of the loop: call save()",
    "save_decision_policy": "a rule of the loop: call save()",
    "lightweight_initialize": "nothing is read at the begin",
    "single_host_load_and_broadcast": "exchanges of Orbax's own",
    "file_options": "modes of files: the process's umask",
    "temporary_path_class": "parts of Orbax",
}


class NotPromisedError(Exception):
    """A call or an option of Orbax without a counterpart."""


class ManagerByCkptfmt:
    """CheckpointManager's everyday calls, each said with ckptfmt."""

    def __init__(
        self, directory: Any, checkpointers: Any = None, options: Any = None, metadata: Any = None,
        item_names: Sequence[str] | None = None, **others: Any,
    ) -> None:  # fmt: skip
        from orbax.checkpoint import CheckpointManagerOptions  # noqa: PLC0415 - a framework

        self.directory = directory
        options = options or CheckpointManagerOptions()
        plain = CheckpointManagerOptions()
        for given, reason in (
            (checkpointers, "the legacy API"),
            (metadata, "values of a directory: tags, or config= of a State"),
            (others or None, f"{', '.join(others)}: a State has the objects themselves"),
        ):
            if given is not None:
                raise NotPromisedError(reason)
        for name, reason in _NOT_PROMISED.items():
            if getattr(options, name, None) != getattr(plain, name, None):
                raise NotPromisedError(f"{name}=: {reason}")
        if options.max_to_keep == 0:
            raise NotPromisedError("max_to_keep=0: a run keeps one checkpoint at least")
        self._every = options.save_interval_steps
        self._metric = _metric_of(options)
        self._keep = self._retention(options)
        self._saver: Any = "thread" if options.enable_async_checkpointing else "inline"
        self._names = None if item_names is None else set(item_names)
        self._state = ckptfmt.State(rng=False)
        self._is_reader = options.read_only
        self._loop: Any = None
        self._handles: list[Any] = []
        if not self._is_reader:
            Path(directory).mkdir(parents=True, exist_ok=True)

    def __getattr__(self, name: str) -> Any:
        raise NotPromisedError(f"{name}: a part of Orbax")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    def reload(self) -> None:
        """Do nothing: a `Run` reads the run at each call."""

    @property
    def _default_item(self) -> Any:
        """Orbax's tests ask whether the manager has one item without a name; None before a call."""
        return types.SimpleNamespace(get=lambda: self._names and self._names == {_ONLY})

    def _check_writes(self) -> None:
        if self._is_reader:
            raise NotPromisedError("read_only=: a reader opens a Run, which has no save")

    # --- saves

    def save(
        self, step: int, *legacy: Any, args: Any = None, metrics: Any = None, force: bool = False,
        custom_metadata: Any = None, **more: Any,
    ) -> bool:  # fmt: skip
        from orbax.checkpoint.checkpoint_manager import (  # noqa: PLC0415 - a framework
            StepAlreadyExistsError,
        )

        if legacy or more:
            raise NotPromisedError("the legacy API")
        self._check_writes()
        if custom_metadata is not None:
            raise NotPromisedError("values of a step: tags, or config= of a State")
        trees = {name: _tree_of(arg) for name, arg in self._items(args).items()}
        begins = self._loop is None
        checkpointer = self._loop or self._start(trees)
        self._state.weights = trees
        if force or self._every == 1 or (begins and self.latest_step() is None):
            handle = checkpointer.save(step, metrics=metrics)
            if handle is None:
                raise StepAlreadyExistsError(f"step {step} is saved already")
        else:
            handle = checkpointer.end_step(step, metrics=metrics)
        if handle is None:
            return False
        self._handles.append(handle)
        if self._saver == "inline":
            handle.wait()
        return True

    def _start(self, trees: dict[str, Any]) -> Any:
        """Start this launch, which goes on from the newest checkpoint; its values are replaced."""
        import jax  # noqa: PLC0415 - a framework
        import numpy as np  # noqa: PLC0415 - a framework

        def copy(leaf: Any) -> Any:
            return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

        self._state.weights = jax.tree_util.tree_map(copy, trees)
        self._loop = ckptfmt.Checkpointer(
            str(self.directory), self._state, every=self._every, keep=self._keep,
            saving=ckptfmt.Saving(saver=self._saver, overlap=False),
            loading=ckptfmt.Loading(allow=("missing", "unexpected", "dtype")),
            checks=ckptfmt.Checks(witness=False),
        )  # fmt: skip
        self._loop.restore()
        self._loop.restore_rng()
        return self._loop

    def wait_until_finished(self) -> None:
        for handle in self._handles:
            handle.wait_over()
            handle.wait()

    def check_for_errors(self) -> None:
        for handle in self._handles:
            if handle.state == "FAILED":
                handle.wait()

    def is_saving_in_progress(self) -> bool:
        return any(not handle.is_over for handle in self._handles)

    # --- the run

    def _entries(self) -> list[Any]:
        try:
            return [one for one in self._run().list() if one.state == "committed"]
        except CkptError as error:
            if error.code != "FILE_MISSING":  # no run yet
                raise
            return []

    def all_steps(self) -> list[int]:
        return [one.step for one in self._entries()]

    def latest_step(self) -> int | None:
        return self._run().newest().step if self._entries() else None

    def best_step(self) -> int | None:
        if self._metric is None:
            return self.latest_step()
        try:
            return self._run().best(*self._metric).step
        except CkptError as error:
            if error.code != "NOT_COMMITTED":
                raise
            return None

    def metrics(self, step: int) -> Mapping[str, Any] | None:
        return self._run().find(step).metrics

    def metadata(self, step: int | None = None) -> Any:
        if step is None:
            raise NotPromisedError("values of a directory: tags, or config= of a State")
        from orbax.checkpoint import args as orbax_args  # noqa: PLC0415 - a framework

        with self._run().open(step) as checkpoint:
            path = Path(str(self.directory), self._run().find(step).name)
            items: dict[str, Any] = {item: {} for item in _load_all(path)}
            for name in checkpoint.weights:
                item, _, inner = name.partition("/")
                items[item][inner] = checkpoint.tensors["weights", name, "global"]
        is_only = set(items) == {_ONLY}
        told = items[_ONLY] if is_only else orbax_args.Composite(**items)
        return types.SimpleNamespace(item_metadata=told)

    def delete(self, step: int) -> None:
        self._check_writes()
        self._run().delete(step)

    def _run(self) -> Any:
        return ckptfmt.Run(str(self.directory))

    # --- loads

    def restore(
        self, step: int | None = None, *legacy: Any, args: Any = None, directory: Any = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        from orbax.checkpoint import args as orbax_args  # noqa: PLC0415 - a framework

        if legacy or more:
            raise NotPromisedError("the legacy API")
        self.wait_until_finished()
        place = str(self.directory if directory is None else directory)
        try:
            run = ckptfmt.Run(place)
            found = run.newest() if step is None else run.find(step)
        except CkptError as error:
            raise FileNotFoundError(str(error)) from error
        path = Path(place, found.name)
        saved = _load_all(path)
        asked = dict.fromkeys(saved) if args is None else self._items(args)
        if missing := asked.keys() - saved.keys():
            raise FileNotFoundError(f"{path} has no item {sorted(missing)}")
        loaded = {name: _load_item(path, name, saved[name], arg) for name, arg in asked.items()}
        return loaded[_ONLY] if set(loaded) == {_ONLY} else orbax_args.Composite(**loaded)

    # --- arguments

    def _items(self, args: Any) -> dict[str, Any]:
        from orbax.checkpoint import args as orbax_args  # noqa: PLC0415 - a framework

        is_composite = isinstance(args, orbax_args.Composite)
        if not isinstance(args, orbax_args.CheckpointArgs):
            raise TypeError(f"{args!r} isn't of Orbax's classes of arguments")
        found = dict(args.items()) if is_composite else {_ONLY: args}
        if self._names is None:
            self._names = None if is_composite else {_ONLY}
        if self._names is not None and not set(found) <= self._names:
            raise ValueError(f"items {sorted(found)}: does not match with any registered handler")
        return found

    def _retention(self, options: Any) -> ckptfmt.Retention | None:
        count, every = options.max_to_keep, options.keep_period
        if count is None:
            return None
        if self._metric is None:
            return ckptfmt.Retention(newest=count, every=every)
        return ckptfmt.Retention(newest=1, every=every, best=(*self._metric, count))


class _Asked(dict[str, Any]):
    """Metrics that note which of them a function asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.names.append(name)
        return 0.0


def _metric_of(options: Any) -> tuple[str, Any] | None:
    """Return the name of the metric that `best_fn` reads, and the mode."""
    if options.best_fn is None:
        return None
    asked = _Asked()
    options.best_fn(asked)
    (name,) = asked.names
    return name, options.best_mode


def _tree_of(arg: Any) -> Any:
    kind = type(arg).__name__.removesuffix("Args")
    if kind not in ("StandardSave", "PyTreeSave", "ArraySave", "JsonSave"):
        raise NotPromisedError(f"{kind}: give the object itself to a State")
    if kind == "PyTreeSave" and getattr(arg, "save_args", None) is not None:
        raise NotPromisedError("save_args=")
    return arg.item


def _load_all(path: Path) -> dict[str, Any]:
    """Return all items, as arrays of numpy."""
    trees: Any = ckptfmt.load(path, framework="numpy", only="weights:*")
    return dict(trees["weights"])


def _load_item(path: Path, name: str, saved: Any, arg: Any) -> Any:
    """Load an item into the target of the argument; without a target, as arrays of JAX."""
    import jax  # noqa: PLC0415 - a framework
    import numpy as np  # noqa: PLC0415 - a framework

    if getattr(arg, "partial_restore", False):
        raise NotPromisedError("partial_restore=: only= and allow= of a load")

    def abstract(leaf: Any) -> Any:
        is_array = isinstance(leaf, np.ndarray)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf

    target = _target_of(arg, saved)
    has_arrays = any(isinstance(leaf, np.ndarray) for leaf in jax.tree_util.tree_leaves(saved))
    if target is None and (type(arg).__name__ == "ArrayRestoreArgs" or not has_arrays):
        return saved
    if target is None:
        target = jax.tree_util.tree_map(abstract, saved)
    state = ckptfmt.State(weights={name: target}, rng=False)
    ckptfmt.load(path, state, allow=("unexpected", "dtype"))
    found: Any = state.weights
    return found[name]


def _target_of(arg: Any, saved: Any) -> Any:
    """Return a tree of abstract arrays, by the argument's own tree or its shardings; None without."""
    import jax  # noqa: PLC0415 - a framework

    item = getattr(arg, "item", None)
    shardings = getattr(arg, "restore_args", None)
    if any(leaf is ... for leaf in jax.tree_util.tree_leaves(item)):
        raise NotPromisedError("placeholders: only= of a load")
    if item is not None and shardings is None:
        return item
    if shardings is None:
        return None

    def target(leaf: Any, how: Any) -> Any:
        mesh = getattr(how, "mesh", None)
        if mesh is None:
            return leaf
        sharding = jax.sharding.NamedSharding(mesh, how.mesh_axes)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    shape = saved if item is None or not hasattr(item, "replace") else item
    return jax.tree_util.tree_map(target, shape, shardings)


#: Tests that fail with ckptfmt: beginnings of their names, and the reason.
DIFFERENCES: dict[str, str] = {
    "test_all_steps_reload": "a listing is current, without `reload()`",
    "test_async_finalize": "names of directories",
    "test_default_init_default_item": "the texts of Orbax's errors about arguments",
    "test_default_init_multi_item": "the texts of Orbax's errors about arguments",
    "test_delete": "the checkpoint from which the run goes on isn't deleted",
    "test_file_format": "names of directories",
    "test_init_telemetry_continuous_checkpointing": "telemetry of Orbax",
    "test_item_metadata_access_no_handlers_and_default_item": "names and shapes are known without"
    " a handler",
    "test_metadata_finalize_preemption": "names of directories",
    "test_save_best_max": "the newest checkpoint stays beside the best",
    "test_save_best_min": "the newest checkpoint stays beside the best",
    "test_save_best_some_metrics": "a listing has no save in progress, and a checkpoint without the"
    " metric stays only as the newest",
    "test_save_gcs_with_unfinalized_checkpoints": "marker files of Orbax",
    "test_save_on_preemption": "JAX's preemption notice isn't asked: `Stop(signals=)`",
    "test_save_preempted_mock": "parts of Orbax are replaced",
    "test_save_restore_gcs": "marker files of Orbax",
    "test_save_restore_no_kwargs": "without a target, `framework=` decides on the class of arrays",
    "test_slow_save_logs_warning": "the log of Orbax",
}


def bind(*, ours: bool) -> None:
    """Prepare this process for the file: one process of eight devices, and ckptfmt if asked for."""
    import jax  # noqa: PLC0415 - a framework
    from absl import flags  # noqa: PLC0415 - a framework
    from orbax.checkpoint import checkpoint_manager  # noqa: PLC0415 - a framework

    flags.FLAGS.mark_as_parsed()
    with contextlib.closing(socket.socket()) as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    jax.distributed.initialize(f"localhost:{port}", num_processes=1, process_id=0)

    class OneProcess(unittest.TestCase):
        """The base of Orbax's tests, which starts several processes; the wheel lacks it."""

        def multiprocess_create_tempdir(self, name: str | None = None) -> str:
            return tempfile.mkdtemp(prefix=name)

    module = types.ModuleType("orbax.checkpoint._src.testing.multiprocess_test")
    module.MultiProcessTest = OneProcess  # type: ignore[attr-defined]
    module.main = unittest.main  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    testing: Any = __import__("orbax.checkpoint._src.testing", fromlist=["testing"])
    testing.multiprocess_test = module
    if ours:
        inner: Any = checkpoint_manager
        inner.CheckpointManager = ManagerByCkptfmt


def outcomes(text: str, *, ours: bool, names: Sequence[str]) -> dict[str, str]:
    """Run the tests and return the outcome of each, with what it raised."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "test_manager.py")
        file.write_text(_HEADER.format(ours=ours) + text)
        report = Path(folder, "report.xml")
        root = Path(__file__).parents[2]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "TMPDIR": folder,
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
        command += ["--rootdir", folder, f"--junitxml={report}", str(file)]
        command += ["-k", " or ".join(names)] if names else []
        done = subprocess.run(
            command, check=False, cwd=folder, env=environment, capture_output=True, text=True,
            timeout=_TIMEOUT_S,
        )  # fmt: skip
        if not report.exists():
            return {"(the file)": f"not run: {(done.stdout + done.stderr)[-600:]}"}
        return {str(case.get("name")): _outcome(case) for case in ET.parse(report).iter("testcase")}


def _outcome(case: ET.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            message = (found.get("message") or "").replace("\n", " ")
            _, _, reason = message.partition("NotPromisedError: ")
            return f"not promised: {reason}" if reason else f"{kind}: {message[:200]}"
    return "passed"


def grouped(text: str, rows: Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
    """Return the outcomes of each test by name; a test has one for each set of parameters."""
    tests = sorted(re.findall(r"^  def (test_\w+)", text, re.MULTILINE), key=len, reverse=True)
    found: dict[str, list[tuple[str, str]]] = {}
    for name, outcome in rows.items():
        test = next((test for test in tests if name.startswith(test)), name)
        found.setdefault(test, []).append((name, outcome))
    return found


def told(outcomes: Iterable[str]) -> str:
    """Return the outcomes of a test in a sentence."""
    counts = Counter(outcomes)
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{outcome} ({count})" for outcome, count in counts.items())


def difference_of(name: str, outcome: str) -> str:
    """Return the outcome, or the reason of a failure that is known."""
    reasons = [reason for begin, reason in DIFFERENCES.items() if name.startswith(begin)]
    is_known = outcome.startswith(("failure", "error")) and reasons
    return f"differs: {reasons[-1]}" if is_known else outcome


def main(orbax: str, names: Sequence[str]) -> int:
    """Run the tests, print the table, and return how many outcomes aren't those expected."""
    source = Path(orbax)
    if source.is_dir():
        command = ["git", "-C", orbax, "show", f"HEAD:{FILE}"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    else:
        text = source.read_text()
    theirs = grouped(text, outcomes(text, ours=False, names=names))
    rows = outcomes(text, ours=True, names=names)
    found = {name: difference_of(name, outcome) for name, outcome in rows.items()}
    print("| test | Orbax | ckptfmt |\n| --- | --- | --- |")  # noqa: T201 - the output
    for test, ours in grouped(text, found).items():
        right = told(outcome for _, outcome in theirs.get(test, []))
        print(f"| `{test}` | {right} | {told(outcome for _, outcome in ours)} |")  # noqa: T201 - the output
    unexpected = sum(outcome.startswith(("failure", "error")) for outcome in found.values())
    seen = {outcome.removeprefix("differs: ") for outcome in found.values()}
    return unexpected + (0 if names else len(set(DIFFERENCES.values()) - seen))


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1], sys.argv[2:])))

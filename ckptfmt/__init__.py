"""Checkpoints that restore a training run: weights, and the context that produced them.

    state = ckptfmt.State(weights=model, optimizer=optimizer, data=sampler, config=config)
    with ckptfmt.Checkpointer("runs/gpt", state, every="5min", keep=3) as checkpointer:
        for step in checkpointer.steps(total):
            train_step(next(batches))

Importing this package imports neither torch nor numpy, and has no side effect: no signal handler,
no hook, no change of the environment. A public name is imported from its module at the first use.
"""

from __future__ import annotations

from importlib import import_module

# A substitute for typing.TYPE_CHECKING: the import of typing takes longer than this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ckptfmt.adapters.pieces import sink_of, source_of
    from ckptfmt.adapters.rng_streams import capture_rng
    from ckptfmt.api import load, optimizer_state_dict, save, validate
    from ckptfmt.api import open_checkpoint as open
    from ckptfmt.box import Box
    from ckptfmt.checkpointer import Checkpointer
    from ckptfmt.data.sampler import Sampler
    from ckptfmt.errors import CkptError
    from ckptfmt.loading.initial import InitFrom
    from ckptfmt.loading.load_report import LoadReport
    from ckptfmt.loop.triggers import Triggers
    from ckptfmt.read.reader import Checkpoint
    from ckptfmt.read.report import Report
    from ckptfmt.run.catalog import Run, RunCheckpoint
    from ckptfmt.saving.handle import SaveHandle, SaveReport
    from ckptfmt.saving.path_saver import Saver
    from ckptfmt.saving.save_attempt import SaveAttempt
    from ckptfmt.state import FirstWorker, Parts, PerWorker, State
    from ckptfmt.write.snapshot import TensorSink, TensorSource

__version__ = "0.10.0"

__all__ = [
    "Box",
    "Checkpoint",
    "Checkpointer",
    "CkptError",
    "FirstWorker",
    "InitFrom",
    "LoadReport",
    "Parts",
    "PerWorker",
    "Report",
    "Run",
    "RunCheckpoint",
    "Sampler",
    "SaveAttempt",
    "SaveHandle",
    "SaveReport",
    "Saver",
    "State",
    "TensorSink",
    "TensorSource",
    "Triggers",
    "capture_rng",
    "load",
    "open",
    "optimizer_state_dict",
    "save",
    "sink_of",
    "source_of",
    "validate",
]

#: The modules of the public names outside of `api`.
_HOMES = {
    "Box": "box",
    "Checkpoint": "read.reader",
    "Checkpointer": "checkpointer",
    "CkptError": "errors",
    "FirstWorker": "state",
    "InitFrom": "loading.initial",
    "LoadReport": "loading.load_report",
    "Parts": "state",
    "PerWorker": "state",
    "Report": "read.report",
    "Run": "run.catalog",
    "RunCheckpoint": "run.catalog",
    "Sampler": "data.sampler",
    "SaveAttempt": "saving.save_attempt",
    "SaveHandle": "saving.handle",
    "SaveReport": "saving.handle",
    "Saver": "saving.path_saver",
    "State": "state",
    "TensorSink": "write.snapshot",
    "TensorSource": "write.snapshot",
    "Triggers": "loop.triggers",
    "capture_rng": "adapters.rng_streams",
    "sink_of": "adapters.pieces",
    "source_of": "adapters.pieces",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"{__name__}.{_HOMES.get(name, 'api')}")
    value = globals()[name] = getattr(home, "open_checkpoint" if name == "open" else name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

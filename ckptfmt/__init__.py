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
    from ckptfmt.api import load, optimizer_state_dict, save, sign, validate
    from ckptfmt.api import open_checkpoint as open
    from ckptfmt.box import Box
    from ckptfmt.checkpointer import Checkpointer
    from ckptfmt.data.rollouts import Rollouts
    from ckptfmt.data.sampler import Sampler
    from ckptfmt.data.tickets import Ticket
    from ckptfmt.errors import CkptError
    from ckptfmt.loading.initial import InitFrom
    from ckptfmt.loading.load_report import LoadReport
    from ckptfmt.loop.healer import Healer
    from ckptfmt.loop.triggers import Triggers
    from ckptfmt.option_groups import Auto, Checks, Homes, Job, Loading, Mirror, Stop
    from ckptfmt.read.reader import Checkpoint
    from ckptfmt.read.report import Report
    from ckptfmt.run.catalog import Run, RunCheckpoint
    from ckptfmt.run.node_cache import Cache
    from ckptfmt.run.retention import Retention
    from ckptfmt.saving.handle import SaveEvent, SaveHandle, SaveReport
    from ckptfmt.saving.path_saver import PathSaver
    from ckptfmt.saving.save_attempt import SaveAttempt
    from ckptfmt.saving.saves import Saving
    from ckptfmt.signing.signer import Signer
    from ckptfmt.signing.trust import Trust
    from ckptfmt.state import FirstWorker, Parts, PerWorker, State
    from ckptfmt.write.snapshot import TensorSink, TensorSource

    Saver = PathSaver  # the name of 0.9 and 0.10, until 2.0

__version__ = "1.0.0rc1"

__all__ = [
    "Auto",
    "Box",
    "Cache",
    "Checkpoint",
    "Checkpointer",
    "Checks",
    "CkptError",
    "FirstWorker",
    "Healer",
    "Homes",
    "InitFrom",
    "Job",
    "LoadReport",
    "Loading",
    "Mirror",
    "Parts",
    "PathSaver",
    "PerWorker",
    "Report",
    "Retention",
    "Rollouts",
    "Run",
    "RunCheckpoint",
    "Sampler",
    "SaveAttempt",
    "SaveEvent",
    "SaveHandle",
    "SaveReport",
    "Saving",
    "Signer",
    "State",
    "Stop",
    "TensorSink",
    "TensorSource",
    "Ticket",
    "Triggers",
    "Trust",
    "capture_rng",
    "load",
    "open",
    "optimizer_state_dict",
    "save",
    "sign",
    "sink_of",
    "source_of",
    "validate",
]

#: The modules of the public names outside of `api`.
_HOMES = {
    "Auto": "option_groups",
    "Box": "box",
    "Cache": "run.node_cache",
    "Checkpoint": "read.reader",
    "Checkpointer": "checkpointer",
    "Checks": "option_groups",
    "CkptError": "errors",
    "FirstWorker": "state",
    "Healer": "loop.healer",
    "Homes": "option_groups",
    "InitFrom": "loading.initial",
    "Job": "option_groups",
    "LoadReport": "loading.load_report",
    "Loading": "option_groups",
    "Mirror": "option_groups",
    "Parts": "state",
    "PathSaver": "saving.path_saver",
    "PerWorker": "state",
    "Report": "read.report",
    "Retention": "run.retention",
    "Rollouts": "data.rollouts",
    "Run": "run.catalog",
    "RunCheckpoint": "run.catalog",
    "Sampler": "data.sampler",
    "SaveAttempt": "saving.save_attempt",
    "SaveEvent": "saving.handle",
    "SaveHandle": "saving.handle",
    "SaveReport": "saving.handle",
    "Saving": "saving.saves",
    "Signer": "signing.signer",
    "State": "state",
    "Stop": "option_groups",
    "TensorSink": "write.snapshot",
    "TensorSource": "write.snapshot",
    "Ticket": "data.tickets",
    "Triggers": "loop.triggers",
    "Trust": "signing.trust",
    "capture_rng": "adapters.rng_streams",
    "sink_of": "adapters.pieces",
    "source_of": "adapters.pieces",
}


def __getattr__(name: str) -> object:
    if name == "Saver":
        from warnings import warn  # noqa: PLC0415 - this import takes longer than this module

        warn(
            "ckptfmt.Saver is called ckptfmt.PathSaver now; the old name ends with ckptfmt 1.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        return __getattr__("PathSaver")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"{__name__}.{_HOMES.get(name, 'api')}")
    value = globals()[name] = getattr(home, "open_checkpoint" if name == "open" else name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

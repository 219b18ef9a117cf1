"""The demo's story: an undisturbed run, a killed and resumed run, and another world size."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeAlias

import ckptfmt
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt_tools.demo.journal import (
    Header,
    Journal,
    JournalComparison,
    JournalEntry,
    check_history,
    compare,
    compare_worlds,
    join_samples,
    journal_path,
    read_journal,
    read_progress,
)
from ckptfmt_tools.demo.settings import Settings

#: Interval between two readings of the journals, and the greatest time without progress, in
#: seconds.
_POLL_S = 0.02
_STALL_S = 300.0
#: Time for torchrun to end its processes before they are killed, in seconds.
_GRACE_S = 20.0

#: Start of a line in torchrun's own log that reports an error.
_TORCHRUN_ERROR = re.compile(r"E[0-9]{4} ")


class JobError(Exception):
    """A job that failed, stalled or went on against the demo's plan.

    The text has the end of the job's output.
    """


class DemoJob:
    """One launch of the training under torchrun; a context manager that ends all its processes.

    Args:
        directory: the demo's directory, for journals and logs.
        run: directory of the checkpoints, or its URL.
        name: name of the launch.
        world_size: number of processes.
        options: further arguments of the training script.
    """

    def __init__(
        self, directory: Path, *, run: str, name: str, world_size: int, options: Sequence[str]
    ) -> None:
        self.name = name
        journals = directory / "journals"
        self._journal_paths = [journal_path(journals, name, rank) for rank in range(world_size)]
        self._log = directory / "logs" / f"{name}.txt"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        script = ["-m", "ckptfmt_tools.demo.train", "--checkpoints", run]
        command = [
            sys.executable,
            *launcher,
            *script,
            "--journals",
            str(journals),
            "--name",
            name,
            *options,
        ]
        with self._log.open("wb") as log:
            # In a separate session: Ctrl-C reaches only the demo, which then ends the job in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def journals(self) -> list[Journal]:
        """Return the journals of the processes."""
        return [read_journal(path) for path in self._journal_paths]

    def wait(self, on_step: Callable[[int], None]) -> None:
        """Wait until the job has ended successfully; call `on_step` with the steps done so far.

        Raises: JobError if the job fails, or stalls.
        """
        self._watch(on_step)
        if self._process.poll() != 0:
            raise self._failure(f"ended with exit code {self._process.poll()}")

    def kill_after(self, step: int, rank: int, on_step: Callable[[int], None]) -> None:
        """Send SIGKILL to one process after `step` steps of all, and wait until the job has failed.

        Raises: JobError if the job ended before, or didn't fail.
        """
        self._watch(on_step, until=step)
        pid, _ = read_progress(self._journal_paths[rank])
        if pid is None or self._process.poll() is not None:
            raise self._failure(f"ended before it could be killed after step {step}")
        _kill(pid)
        self._watch(on_step)
        if self._process.poll() == 0:
            raise self._failure("ended well, although one of its processes was killed")

    def end(self) -> None:
        """End a running job: first torchrun with its processes, then any remaining process."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            for path in self._journal_paths:
                pid, _ = read_progress(path)
                if pid is not None:
                    _kill(pid)

    def _watch(self, on_step: Callable[[int], None], *, until: int | None = None) -> None:
        """Follow the journals until all processes have done a step, or the job has ended."""
        last_step = 0
        change_s = time.monotonic()
        while self._process.poll() is None:
            step = min(read_progress(path)[1] for path in self._journal_paths)
            if step != last_step:
                last_step = step
                change_s = time.monotonic()
                on_step(step)
            if until is not None and step >= until:
                return
            if time.monotonic() - change_s > _STALL_S:
                raise self._failure(f"did nothing for {_STALL_S:g} s")
            time.sleep(_POLL_S)

    def _failure(self, what: str) -> JobError:
        lines = (
            self._log.read_text("utf-8", errors="replace").splitlines()
            if self._log.exists()
            else []
        )
        # After the last output of the processes, torchrun reports their failure at length.
        own = (
            list(itertools.takewhile(lambda line: not _TORCHRUN_ERROR.match(line), lines)) or lines
        )
        said = "".join(f"\n    {line}" for line in own[-15:])
        return JobError(f"the launch {self.name!r} {what}; its output, {self._log}, says:{said}")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


#: Names of the two runs under the demo's directory.
UNDISTURBED = "undisturbed"
RUN = "run"


@dataclasses.dataclass(frozen=True, slots=True)
class Home:
    """The home of the runs outside of the demo's directory: a URL, and its description in words."""

    url: str
    words: str


#: A function that shows the start of a phase of some steps; returns a function that receives the
#: number of steps done.
ShowPhase: TypeAlias = Callable[[str, int], Callable[[int], None]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """One launch on the time line.

    Attributes:
        first, last: number of steps done at the start and at the end.
        saves: steps with a save.
        killed: whether the launch ended by SIGKILL.
    """

    name: str
    world_size: int
    first: int
    last: int
    saves: tuple[int, ...]
    killed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """The result of a resumption at another world size.

    Attributes:
        world_size: number of processes.
        step: the step of the resumption.
        same: the comparison with the steps of the undisturbed run, on each process.
        new_stream_count: number of RNG streams of additional processes.
        stream_count: number of RNG streams of all processes.
        samples_wrong: the error in the samples of the whole history; an empty text without an
            error.
        sample_count: number of samples in the whole history.
        claim: the claim level reported by the load.
        lowered_by: reasons reported by the load for a lower claim.
    """

    world_size: int
    step: int
    same: JournalComparison
    new_stream_count: int
    stream_count: int
    samples_wrong: str
    sample_count: int
    claim: str
    lowered_by: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether every bit equals the undisturbed run's, and no sample was skipped or repeated."""
        return self.same.identical and not self.samples_wrong


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoryOutcome:
    """The contents of the last screen.

    Attributes:
        same: the comparison of the killed and resumed run with the undisturbed run.
        claim: the claim level reported by the load after the kill.
        resized: the resumption at another world size; None where the run after the kill already
            differs.
        violations: violations found by a validation of the finished run.
        checked_nbytes: number of bytes validated.
        home: place of the runs during the demo, in words; None for `directory`.
    """

    directory: Path
    settings: Settings
    header: Header
    strips: tuple[Strip, ...]
    same: JournalComparison
    claim: str
    losses: tuple[float, float]
    resized: Resized | None
    violations: tuple[str, ...]
    checked_nbytes: int
    without: str | None
    home: str | None = None

    @property
    def sample_count(self) -> int:
        """The number of samples taken by all steps, over all processes."""
        return self.settings.steps * self.settings.global_batch

    @property
    def run(self) -> Path:
        """The directory of the finished run."""
        return self.directory / RUN

    @property
    def last_checkpoint(self) -> Path:
        """The directory of the last launch's last checkpoint."""
        return self.run / checkpoint_name(self.settings.steps, len(self.strips) - 1)

    @property
    def holds(self) -> bool:
        """Whether all claims of the demo hold."""
        return (
            self.same.identical
            and self.resized is not None
            and self.resized.holds
            and not self.violations
        )


def tell(
    directory: Path,
    settings: Settings,
    options: list[str],
    *,
    without: str | None,
    show_phase: ShowPhase,
    home: Home | None = None,
) -> StoryOutcome:
    """Run all launches one after the other and compare the results.

    Args:
        directory: an empty directory, for all files of the demo.
        options: arguments of the training script, which yield the same settings.
        without: state to leave out when the killed run is restored; the comparison must then fail.
        home: the home of the runs; the finished run is copied from there. None for `directory`.

    Raises: JobError; CkptError.
    """
    place = str(directory) if home is None else home.url

    def launch(run: str, name: str, world_size: int, *more: str) -> DemoJob:
        return DemoJob(
            directory,
            run=f"{place}/{run}",
            name=name,
            world_size=world_size,
            options=[*options, *more],
        )

    with launch(UNDISTURBED, "undisturbed", 2) as job:
        job.wait(show_phase("an undisturbed run, to compare with", settings.steps))
        undisturbed = job.journals()
    with launch(RUN, "killed", 2) as job:
        job.kill_after(
            settings.killed_step, 1, show_phase("the run; one process gets SIGKILL", settings.steps)
        )
        killed = job.journals()
    control = ["--leave-out", without] if without else []
    with launch(RUN, "resumed", 2, *control) as job:
        job.wait(show_phase("the same command again: it resumes", settings.steps))
        resumed = job.journals()
    both = [
        [*before.entries, *after.entries] for before, after in zip(killed, resumed, strict=True)
    ]
    same = compare([journal.entries for journal in undisturbed], both, steps=settings.steps)
    resized = None
    strips = [
        _strip(settings, "launch 1", killed, killed=True),
        _strip(settings, "launch 2", resumed),
    ]
    if same.identical:
        saved_by = 2 if settings.resized_step > resumed[0].entries[0].step else 1
        name = checkpoint_name(settings.resized_step, saved_by)
        with launch(RUN, "resized", 3, "--resume", name) as job:
            job.wait(show_phase("resumed once more, on 3 processes", settings.steps))
            wider = job.journals()
        strips.append(_strip(settings, "launch 3", wider))
        resized = _compare_resized(settings, undisturbed, both, wider)
    report = ckptfmt.validate(f"{place}/{RUN}")
    if home is not None:
        ckptfmt.Run(f"{place}/{RUN}").mirror(directory / RUN)
    header = _header(undisturbed)
    return StoryOutcome(
        directory=directory,
        settings=settings,
        header=header,
        strips=(_strip(settings, "undisturbed", undisturbed), *strips),
        same=same,
        claim=_header(resumed).claim or "none",
        losses=(_loss(undisturbed[0], 1), _loss(undisturbed[0], settings.steps)),
        resized=resized,
        violations=tuple(map(str, report.violations)),
        checked_nbytes=report.nbytes,
        without=without,
        home=None if home is None else home.words,
    )


def _compare_resized(
    settings: Settings,
    undisturbed: list[Journal],
    both: list[list[JournalEntry]],
    wider: list[Journal],
) -> Resized:
    step = settings.resized_step
    entries = [journal.entries for journal in wider]
    same = compare_worlds(
        [journal.entries for journal in undisturbed], entries, first=step, steps=settings.steps
    )
    streams = [sum(name.startswith("rng/") for name in process[0].digests) for process in entries]
    history = {past: ids for past, ids in join_samples(_last_times(both)).items() if past <= step}
    history |= join_samples(entries)
    header = _header(wider)
    return Resized(
        world_size=len(wider),
        step=step,
        same=same,
        new_stream_count=sum(streams[len(undisturbed) :]),
        stream_count=sum(streams),
        samples_wrong=check_history(
            history,
            sample_count=header.sample_count,
            global_batch=settings.global_batch,
            steps=settings.steps,
        ),
        sample_count=sum(map(len, history.values())),
        claim=header.claim or "none",
        lowered_by=header.lowered_by,
    )


def _last_times(processes: list[list[JournalEntry]]) -> list[list[JournalEntry]]:
    """Return each step once, as done last: steps between the last save and a kill are void."""
    latest = [
        {entry.step: entry for entry in entries if entry.samples is not None}
        for entries in processes
    ]
    return [list(entries.values()) for entries in latest]


def _strip(
    settings: Settings, name: str, journals: list[Journal], *, killed: bool = False
) -> Strip:
    first = journals[0].entries[0].step
    last = max(journal.last_step for journal in journals)
    saves = tuple(
        step
        for step in range(first + 1, last + 1)
        if step == settings.steps or step % settings.every == 0
    )
    return Strip(
        name=name, world_size=len(journals), first=first, last=last, saves=saves, killed=killed
    )


def _header(journals: list[Journal]) -> Header:
    header = journals[0].header
    assert header is not None  # noqa: S101
    return header


def _loss(journal: Journal, step: int) -> float:
    """Return the loss of a step, which is the same on every process."""
    return next(
        float.fromhex(entry.loss) for entry in journal.entries if entry.step == step and entry.loss
    )

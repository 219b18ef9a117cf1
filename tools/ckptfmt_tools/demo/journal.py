"""The journal of a launch, and the comparison of two journals.

For each step, the journal has the digests of all state, the samples and the loss. There is one file
per process, with one JSON line per step, written at the end of the step. The last line of a killed
process may be incomplete; complete lines count.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The description of a process after the restore.

    Attributes:
        pid: the process id.
        rank, world_size: place of the process in the job.
        launch: number of the launch.
        resumed_from: name of the checkpoint; None after a fresh start.
        claim: the claim level reported by the load; None after a fresh start.
        lowered_by: reasons reported by the load for a lower claim.
        parameter_count: number of trained values, tied ones counted once.
        sample_count: number of samples in the data set.
        text: description of the text, in words.
    """

    pid: int
    rank: int
    world_size: int
    launch: int
    resumed_from: str | None
    claim: str | None
    lowered_by: tuple[str, ...] = ()
    parameter_count: int
    sample_count: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """The state of one process after a step.

    Attributes:
        step: number of training steps done.
        digests: digests by ``<category>/<name>``.
        samples: ids of the samples taken by this process in this step; None at the start of a
            launch, before a step.
        loss: loss of this step, by `float.hex`; None at the start of a launch.
    """

    step: int
    digests: Mapping[str, str]
    samples: tuple[int, ...] | None
    loss: str | None

    def facts(self) -> dict[str, str]:
        """Return all comparable facts by name."""
        facts = dict(self.digests)
        if self.samples is not None:
            facts["sample/ids"] = " ".join(map(str, self.samples))
        if self.loss is not None:
            facts["loss/bits"] = self.loss
        return facts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The records written by one process of one launch."""

    header: Header | None
    entries: tuple[JournalEntry, ...]

    @property
    def last_step(self) -> int:
        """The last step written; 0 without a step."""
        return self.entries[-1].step if self.entries else 0


class JournalWriter:
    """The open journal of one process, written line by line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("x", encoding="utf-8")

    def write(self, record: Header | JournalEntry) -> None:
        """Write one line and flush it to the system, where it survives a kill."""
        self._file.write(json.dumps(dataclasses.asdict(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def journal_path(directory: Path, name: str, rank: int) -> Path:
    """Return the path of one process's journal of a launch."""
    return directory / f"{name}-rank{rank}.jsonl"


def read_journal(path: Path) -> Journal:
    """Return the records of a process so far; an empty journal without a file."""
    try:
        content = path.read_text("utf-8")
    except FileNotFoundError:
        content = ""
    # The last line of a killed process may be incomplete.
    whole = content[: content.rfind("\n") + 1]
    records: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
    header = (
        Header(**records[0] | {"lowered_by": tuple(records[0]["lowered_by"])}) if records else None
    )
    return Journal(header=header, entries=tuple(_parse_entry(record) for record in records[1:]))


def _parse_entry(record: dict[str, Any]) -> JournalEntry:
    samples = record["samples"]
    return JournalEntry(**record | {"samples": None if samples is None else tuple(samples)})


def read_progress(path: Path) -> tuple[int | None, int]:
    """Return the pid of the process that writes a journal, and the last step written.

    The pid is None before the first record, and the step is 0 before the first step.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        lines = []
    return (json.loads(lines[0])["pid"] if lines else None), (
        json.loads(lines[-1])["step"] if len(lines) > 1 else 0
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One fact that differs.

    `expected` or `found` is None where the fact is missing on that side.
    """

    step: int
    rank: int
    name: str
    expected: str | None
    found: str | None

    @property
    def category(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JournalComparison:
    """The result of a comparison of two runs.

    Attributes:
        steps: training steps of the run; each step was compared on each process.
        names: names of all facts, each with the number of comparisons.
        repeated: step and rank of each repeated step; every repetition was compared.
        differences: differences in the order of steps.
    """

    steps: int
    names: Mapping[str, int]
    repeated: tuple[tuple[int, int], ...]
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        """Whether there were comparisons, and no difference."""
        return not self.differences and bool(self.names)

    @property
    def compared(self) -> int:
        """The number of compared facts."""
        return sum(self.names.values())

    def names_of(self, category: str) -> list[str]:
        """Return the names of the facts of a category, without the category."""
        return sorted(
            name.partition("/")[2] for name in self.names if name.partition("/")[0] == category
        )

    def identical_steps(self, category: str | None = None) -> int:
        """Return the number of steps with identical facts, or facts of a category, everywhere."""
        differ = {
            difference.step
            for difference in self.differences
            if category is None or difference.category in (category, _ENTRY)
        }
        return self.steps - len(differ - {0})

    def explain(self) -> str:
        """Return the first divergence in a sentence, with the state that was probably not restored.

        State that differs at the start of a launch was not restored. If the state is equal and the
        next step differs, the cause lies outside of the state.
        """
        if not self.differences:
            return "no divergence"
        first = self.differences[0]
        place = f"step {first.step}, process {first.rank}"
        if first.category == _ENTRY:
            return f"{place}: " + (
                "not in the journal" if first.found is None else "in the journal, and shouldn't be"
            )
        names = sorted(
            {
                one.name
                for one in self.differences
                if (one.step, one.rank) == (first.step, first.rank)
            }
        )
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"first divergence after {place}: {', '.join(names[:3])}{more}; {_guess(names)}"


#: The category of a whole entry, missing or superfluous.
_ENTRY = "entry"


def _guess(names: Sequence[str]) -> str:
    kinds = {_describe(name) for name in names if not name.startswith(("sample/", "loss/"))}
    if not kinds:
        return (
            "the state before it was the same, so look outside of the state: data, threads, kernels"
        )
    if len(kinds) == 1:
        return f"most likely not restored: {kinds.pop()}"
    return "several kinds of state at once, so look at this step's first reads"


def _describe(name: str) -> str:
    category, _, rest = name.partition("/")
    return {
        "parameter": "the parameters",
        "moment": f"the optimizer's {rest.partition('/')[0]}",
        "step": "the optimizer's step",
        "buffer": f"the buffer {rest}",
        "schedule": f"the {rest} (learning rate)",
        "cursor": "the data cursor",
        "trainer": "the trainer",
        "rng": f"the random-number stream {rest}",
    }.get(category, name)


def compare(
    reference: Sequence[Iterable[JournalEntry]],
    candidate: Sequence[Iterable[JournalEntry]],
    *,
    first: int = 0,
    steps: int,
) -> JournalComparison:
    """Compare the entries of a run with the entries of an uninterrupted run, process by process.

    Args:
        reference: entries of each process, each step once.
        candidate: entries of each process; a step repeated after a resume has an entry for each
            time.
        first: the first step of which `candidate` must have an entry.
        steps: the last step.
    """
    if len(reference) != len(candidate):
        raise ValueError(f"{len(candidate)} processes can't be compared with {len(reference)}")
    names: Counter[str] = Counter()
    repeated: list[tuple[int, int]] = []
    differences: list[Difference] = []
    for rank, (ours, theirs) in enumerate(zip(reference, candidate, strict=True)):
        expected = {entry.step: entry for entry in ours if first <= entry.step <= steps}
        found = list(theirs)
        times = Counter(entry.step for entry in found if entry.samples is not None)
        repeated += [(step, rank) for step, count in times.items() if count > 1]
        written = {entry.step for entry in found}
        differences += _compare_presence(set(range(first, steps + 1)), set(expected), written, rank)
        for entry in found:
            if entry.step in expected:
                differences += _compare_entries(expected[entry.step], entry, rank, names)
    differences.sort(key=lambda one: (one.step, one.rank, one.category != _ENTRY, one.name))
    return JournalComparison(
        steps=steps - first,
        names=dict(names),
        repeated=tuple(sorted(repeated)),
        differences=tuple(differences),
    )


def compare_worlds(
    reference: Sequence[Sequence[JournalEntry]],
    candidate: Sequence[Sequence[JournalEntry]],
    *,
    first: int = 0,
    steps: int,
) -> JournalComparison:
    """Compare a run with an uninterrupted run on another number of processes.

    Each process takes a part of the samples: samples are compared over all processes, in the order
    of the ranks. An RNG stream belongs to one process, and is compared where both runs have the
    process. Any other fact is equal on all processes, and compared on each.

    Args and Returns: as in `compare`.
    """
    both = min(len(reference), len(candidate))
    count = len(candidate)
    ours = join_samples(reference)
    theirs = join_samples(candidate)
    return compare(
        [
            _shared(reference[rank if rank < both else 0], ours, streams=rank < both)
            for rank in range(count)
        ],
        [_shared(candidate[rank], theirs, streams=rank < both) for rank in range(count)],
        first=first,
        steps=steps,
    )


def _shared(
    entries: Sequence[JournalEntry], samples: Mapping[int, tuple[int, ...]], *, streams: bool
) -> list[JournalEntry]:
    """Return a process's entries with the samples of all, with or without RNG streams."""
    return [
        dataclasses.replace(
            entry,
            digests={
                name: digest
                for name, digest in entry.digests.items()
                if streams or not name.startswith("rng/")
            },
            samples=None if entry.samples is None else samples[entry.step],
        )
        for entry in entries
    ]


def _compare_presence(
    due: set[int], expected: set[int], found: set[int], rank: int
) -> Iterator[Difference]:
    """Yield the steps that are missing on one side, or superfluous."""
    for step in sorted(due | expected | found):
        if not (step in due and step in expected and step in found):
            sides = ["present" if step in side else None for side in (expected, found)]
            yield Difference(
                step=step, rank=rank, name=f"{_ENTRY}/whole", expected=sides[0], found=sides[1]
            )


def _compare_entries(
    expected: JournalEntry, found: JournalEntry, rank: int, names: Counter[str]
) -> list[Difference]:
    ours = expected.facts()
    theirs = found.facts()
    # At the start of a launch, there is state, and no step yet.
    if found.samples is None or expected.samples is None:
        for facts in (ours, theirs):
            facts.pop("sample/ids", None)
            facts.pop("loss/bits", None)
    names.update(ours.keys() | theirs.keys())
    return [
        Difference(
            step=found.step, rank=rank, name=name, expected=ours.get(name), found=theirs.get(name)
        )
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def join_samples(processes: Sequence[Iterable[JournalEntry]]) -> dict[int, tuple[int, ...]]:
    """Return the samples of each step in the order of the ranks.

    This is the order of the data, if the run is the same.
    """
    samples: dict[int, tuple[int, ...]] = {}
    for entries in processes:
        for step, taken in sorted(
            (entry.step, entry.samples) for entry in entries if entry.samples is not None
        ):
            samples[step] = samples.get(step, ()) + taken
    return samples


def check_history(
    history: Mapping[int, Sequence[int]], *, sample_count: int, global_batch: int, steps: int
) -> str:
    """Check by counting, in any order, that no sample was skipped or repeated.

    Each epoch takes every sample once: so the counts of two samples may differ by one at most.

    Returns: the error in a sentence, or an empty text.
    """
    if sorted(history) != list(range(1, steps + 1)):
        return f"the history has {len(history)} steps, not {steps}"
    for step, samples in sorted(history.items()):
        if len(samples) != global_batch:
            return f"step {step} took {len(samples)} samples, not {global_batch}"
    times = Counter(sample for samples in history.values() for sample in samples)
    most = max(times.values())
    least = min(times.values()) if len(times) == sample_count else 0
    if most - least > 1:
        return f"one sample was taken {most} times, another {least} times"
    return ""

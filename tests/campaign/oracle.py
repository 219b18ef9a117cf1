"""The oracle: what trainers logged before each save decides what is right. It knows JSON and names, and no ckptfmt."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Final

_NAME: Final = re.compile(r"step-([0-9]{8,})-l([0-9]{4,})")
#: What a wait may take beyond its deadline: others have the processors, too.
_SLACK_S: Final = 30.0
#: How a launch says that it waited for a saver in vain.
_GIVEN_UP: Final = "weren't committed within"
#: What a trainer may be told when a process that it needs was killed or stopped.
EXCUSED: Final = frozenset(
    {
        "CHECKPOINT_ABORTED",
        "COMMIT_CONFLICT",
        "COMMIT_UNKNOWN",
        "PEER_FAILED",
        "SAVER_LOST",
        "SAVE_PENDING",
        "SLOTS_BUSY",
        "TRAINER_LOST",
        "WRITERS_DIVERGED",
        "WRITERS_MISSING",
        "WRITER_FAILED",
    }
)

#: Launch and step: a checkpoint.
Place = tuple[int, int]


class Log:
    """Lines of JSON, each durable before anything else is done."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, kind: str, **members: Any) -> None:
        """Append a line."""
        os.write(self._fd, f"{json.dumps({'kind': kind, **members})}\n".encode())
        os.fsync(self._fd)


@dataclasses.dataclass(slots=True)
class _Launch:
    """A launch record, and what its trainers may clean up.

    Attributes:
        resume: what it resumed from.
        by_hand: whether somebody chose that.
        keep: how many of the newest stay; None for all.
        keep_every: steps divisible by this stay as well.
    """

    resume: Place | None
    by_hand: bool
    keep: int | None = None
    keep_every: int | None = None


class Oracle:
    """What was handed to the saves of one run, what was promised, and what was found to be wrong.

    Args:
        root: of the run.
        log: what its trainers write.

    Attributes:
        lost, different, overdue, unexpected: sentences.
        counts: of what happened.
    """

    def __init__(self, root: pathlib.Path, log: pathlib.Path) -> None:
        self._root, self._log = root, log
        self._read_nbytes = 0
        self._handed: dict[Place, list[dict[str, Any]]] = defaultdict(list)
        self._told: dict[str, dict[Place, set[int]]] = {
            "STAGED": defaultdict(set),
            "COMMITTED": defaultdict(set),
        }
        self._launches: dict[int, _Launch] = {}
        self._options: dict[int, dict[str, Any]] = {}
        self._loaded: dict[Place, bytes] = {}
        self._saver_kills: set[int] = set()
        self._seen: set[Place] = set()
        self._best: Place | None = None
        self._quiet_best: Place | None = None
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self.different: list[str] = []
        self.overdue: list[str] = []
        self.unexpected: list[str] = []

    # --- what the trainers told -------------------------------------------------------------------

    def listen(self, *, excused: frozenset[str]) -> None:
        """Take in what the trainers of a life have told.

        Args:
            excused: codes of the errors that they may have met.
        """
        with self._log.open("rb") as log:
            log.seek(self._read_nbytes)
            content = log.read()
        lines = content[: content.rfind(b"\n") + 1]
        self._read_nbytes += len(lines)
        self._read_launches()
        for line in lines.splitlines():
            told = json.loads(line)
            getattr(self, f"_take_{told['kind']}")(told, excused)

    def _take_launch(self, told: dict[str, Any], _: object) -> None:
        launch = told["launch"]
        record = self._launches[launch]
        record.keep, record.keep_every = told["keep"], told["keep_every"]
        # A save that no saver committed in time was promised to nobody; whatever was COMMITTED is
        # asked for below.
        damaged = [sentence for sentence in told["passed_over"] if _GIVEN_UP not in sentence]
        if damaged:
            self.lost.append(f"launch {launch} passed over {damaged}")
        if told["worker"] == 0:
            self.counts["launches"] += 1
            self._check_resume(launch, record)
        if record.resume is not None:
            self._compare_restored(record.resume, told)

    def _take_save(self, told: dict[str, Any], _: object) -> None:
        self._handed[told["launch"], told["step"]].append(told)
        self.counts["handed"] += told["worker"] == 0

    def _take_state(self, told: dict[str, Any], _: object) -> None:
        if told["state"] == "COMMITTED" or (told["state"] == "STAGED" and told["outlives"]):
            self._told[told["state"]][told["launch"], told["step"]].add(told["worker"])
        self.counts[told["state"]] += told["worker"] == 0
        self.counts["deltas"] += told["worker"] == 0 and told.get("profile") == "delta"

    def _take_wait(self, told: dict[str, Any], _: object) -> None:
        if told["seconds"] > told["limit_s"] + _SLACK_S:
            self.overdue.append(
                f"{told['what']} took {told['seconds']:.1f} s of {told['limit_s']:.1f} s: {told}"
            )

    def _take_error(self, told: dict[str, Any], excused: frozenset[str]) -> None:
        self.counts[f"error {told['code']}"] += 1
        if told["code"] not in excused:
            self.unexpected.append(f"{told['during']}: {told['text']}")

    def _take_failed(self, told: dict[str, Any], _: object) -> None:
        self.unexpected.append(told["text"])

    def _take_end(self, _told: dict[str, Any], _: object) -> None:
        self.counts["ends"] += 1

    # --- what is on disk --------------------------------------------------------------------------

    def _read_launches(self) -> None:
        for path in sorted(self._root.glob("launches/*.json")):
            number = int(path.stem)
            if number not in self._launches:
                signed = json.loads(path.read_bytes())["signed"]
                resume = signed["resume_from"]
                self._launches[number] = _Launch(
                    resume=None if resume is None else _place_of(resume["name"]),
                    by_hand=signed["chosen_by"] == "hand",
                )

    def registers(self) -> dict[Place, str]:
        """Return what the registers of the run say: ``manifest``, ``tombstone`` or ``abort``."""
        found = {}
        for path in self._root.glob("step-*"):
            with contextlib.suppress(FileNotFoundError):
                found[_place_of(path.name)] = json.loads((path / "manifest.json").read_bytes())[
                    "signed"
                ]["type"]
        return found

    def place_of(self, place: Place) -> pathlib.Path:
        """Return where a checkpoint is."""
        launch, step = place
        return self._root / f"step-{step:08d}-l{launch:04d}"

    def specs_of(self, place: Place) -> Any:
        """Return the tensors of a checkpoint, as they were handed over."""
        return self._handed[place][-1]["specs"]

    def line(self) -> list[Place]:
        """Return what the next launch may resume from, best first, what is retired by now included."""
        registers = self.registers()
        return list(self._lineage(max(self._launches, default=0), registers))

    def _lineage(self, head: int, registers: dict[Place, str]) -> Iterator[Place]:
        """Yield the commits on the way that led to a launch, best first, retired ones included."""
        decided = sorted(
            (place for place, kind in registers.items() if kind != "abort"), reverse=True
        )
        number: int | None = head
        while number in self._launches and self._is_overtaken(number, registers):
            number -= 1
        bound: int | None = None
        while number is not None and number in self._launches:
            yield from (
                place
                for place in decided
                if place[0] == number and (bound is None or place[1] <= bound)
            )
            resume = self._launches[number].resume
            number, bound = resume if resume is not None else (None, None)

    def _is_overtaken(self, number: int, registers: dict[Place, str]) -> bool:
        launch = self._launches[number]
        saved = any(place[0] == number and kind != "abort" for place, kind in registers.items())
        return (
            not (saved or launch.by_hand or launch.resume is None)
            and registers.get(launch.resume) == "tombstone"
        )

    # --- judging ----------------------------------------------------------------------------------

    def _is_acknowledged(self, place: Place) -> bool:
        return bool(self._told["COMMITTED"].get(place))

    def _check_resume(self, launch: int, record: _Launch) -> None:
        """See that a launch went on from the best that was there."""
        if record.by_hand:
            return
        line = list(self._lineage(launch - 1, self.registers()))
        known = [
            place for place in line if self._is_acknowledged(place) or place == self._quiet_best
        ]
        if known and (
            record.resume not in line or line.index(record.resume) > line.index(known[0])
        ):
            self.lost.append(
                f"launch {launch} resumed from {record.resume}; {known[0]} was COMMITTED"
            )

    def _compare_restored(self, place: Place, told: dict[str, Any]) -> None:
        """See that a trainer went on with what was handed over; it may hold other rows than those that were saved."""
        for handed in self._handed[place]:
            theirs, own = handed["content"], told["content"]
            same = {
                name
                for name in theirs["tensors"].keys() & own["tensors"].keys()
                if _fits(theirs, own, name)
            }
            is_same = all(theirs["tensors"][name] == own["tensors"][name] for name in same)
            if is_same and theirs["values"] == own["values"]:
                return
        self.different.append(
            f"launch {told['launch']} doesn't go on with what was handed to the save of {place}"
        )

    def wanted(self, *, again: Any) -> dict[Place, dict[str, list[list[int]]]]:
        """Return which committed checkpoints to load, and of each tensor which ranges of bytes to digest.

        Args:
            again: says of one that was loaded before whether to load it again.
        """
        found: dict[Place, dict[str, list[list[int]]]] = {}
        for place, kind in self.registers().items():
            self._seen.add(place) if kind != "abort" else None
            if kind != "manifest" or (place in self._loaded and not again()):
                continue
            if place not in self._handed:
                self.different.append(f"{place} is committed, and nobody handed it over")
                continue
            ranges: dict[str, list[list[int]]] = defaultdict(list)
            for handed in self._handed[place]:
                for name, (_, _, begin, end, _) in handed["content"]["tensors"].items():
                    if [begin, end] not in ranges[name]:
                        ranges[name].append([begin, end])
            found[place] = dict(ranges)
        return found

    def compare(self, place: Place, loaded: dict[str, Any]) -> None:
        """Compare a checkpoint as it loads with what was handed over."""
        self.counts["compared"] += 1
        if loaded.get("error"):
            self.lost.append(f"{place} doesn't load: {loaded['error']}")
            return
        self._loaded[place] = b""
        by_attempt: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for handed in self._handed[place]:
            by_attempt[handed["attempt"]].append(handed["content"])
        problems = [_find_difference(contents, loaded) for contents in by_attempt.values()]
        if all(problems):
            self.different.append(f"{place}: {problems}")

    def check_kept(self, *, is_quiet: bool, rescues: bool) -> None:
        """See that what was COMMITTED is there, unless retention was entitled to take it.

        Args:
            is_quiet: whether every saver has ended.
            rescues: whether no saver was killed: then what was STAGED everywhere is committed, too.
        """
        registers = self.registers()
        lines = [list(self._lineage(number, registers)) for number in self._launches]
        for place in self._told["COMMITTED"]:
            kind = registers.get(place)
            if kind == "tombstone" and self._is_entitled(place, lines):
                continue
            if kind != "manifest":
                self.lost.append(f"{place} was COMMITTED, and its register holds {kind}")
        for place, workers in self._told["STAGED"].items() if is_quiet and rescues else ():
            if len(workers) == self._handed[place][0]["worker_count"] and place not in registers:
                self.lost.append(f"{place} was STAGED on all workers; no saver was killed")
        self._told["STAGED"].clear()
        line = [place for place in self.line() if registers[place] == "manifest"]
        self._quiet_best = line[0] if is_quiet and line else None

    def _is_entitled(self, place: Place, lines: list[list[Place]]) -> bool:
        """Tell whether some launch may have retired a checkpoint."""
        for line, launch in zip(lines, self._launches.values(), strict=True):
            keep = launch.keep
            if keep is None or (launch.keep_every and place[1] % launch.keep_every == 0):
                continue
            if place in line[keep:]:
                return True
            if self._was_overtaken(place, line) and len(line) >= keep:
                return True
        return False

    def _was_overtaken(self, place: Place, line: list[Place]) -> bool:
        """Tell whether a checkpoint was committed behind the back of a launch that follows the lineage."""
        launch, step = place
        for other in self._launches.values():
            if (
                other.resume is not None
                and not other.by_hand
                and other.resume[0] == launch
                and step > other.resume[1]
            ):
                return other.resume in line or bool(line)
        return False

    def state_count(self) -> int:
        """Return how many states became checkpoints."""
        return len(self._seen | self._told["COMMITTED"].keys())


def _place_of(name: str) -> Place:
    found = _NAME.fullmatch(name)
    assert found is not None, name
    return int(found[2]), int(found[1])


def _fits(theirs: dict[str, Any], own: dict[str, Any], name: str) -> bool:
    """Tell whether two workers hold the same range of a tensor."""
    return bool(theirs["tensors"][name][2:4] == own["tensors"][name][2:4])


def _find_difference(contents: list[dict[str, Any]], loaded: dict[str, Any]) -> str:
    """Return what of a loaded checkpoint differs from what its workers handed over; an empty string for nothing."""
    names = {name for content in contents for name in content["tensors"]}
    if names != loaded["tensors"].keys():
        return f"other tensors: {sorted(names ^ loaded['tensors'].keys())}"
    for content in contents:
        for name, (dtype, shape, begin, end, digest) in content["tensors"].items():
            found = loaded["tensors"][name]
            if [dtype, shape] != [found["dtype"], found["shape"]] or found["digests"][
                f"{begin}-{end}"
            ] != digest:
                return f"{name}: handed over {dtype} {shape} {digest}, loaded {found}"
        if content["values"] != loaded["values"]:
            return f"values: handed over {content['values']}, loaded {loaded['values']}"
    return ""

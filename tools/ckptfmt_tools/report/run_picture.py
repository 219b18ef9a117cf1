"""The facts shown by ``report``: from a run's registers, records, and newest checkpoint's index.

All facts are recorded, never guessed. Unrecorded facts, such as the way in which a launch ended,
have no member.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from ckptfmt.box import Box
from ckptfmt.cli.console import clean, shorten
from ckptfmt.cli.log import History, read_history
from ckptfmt.cli.places import Place
from ckptfmt.documents.index import IndexTensor
from ckptfmt.documents.manifest import Abort, parse_checkpoint_name
from ckptfmt.documents.sharding import Sharding
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, StoreError
from ckptfmt.read.reader import Checkpoint
from ckptfmt.run.accounts import Goodput
from ckptfmt.run.lineage import RunEntry
from ckptfmt.run.spent_time import read_goodput
from ckptfmt_tools.report.divergence import Divergence

#: The greatest number of cells of a tree map, and of its groups; smaller tensors share a cell.
_CELLS: Final = 300
_CELLS_OF_GROUP: Final = 48
#: The greatest number of ranges that join many small neighbours.
_RANGES: Final = 24
#: The least share of all bytes for a cell of a single tensor or group.
_SMALLEST_SHARE: Final = 1 / 1500
#: The number of largest tensors shown with their pieces, and the greatest number of pieces of each.
_LARGEST: Final = 20
_PIECES: Final = 64
#: The greatest length of a name or text from the run, in characters.
_NAME_LENGTH: Final = 120

_COMPONENT: Final = re.compile(r"[^./]*[./]?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveFacts:
    """A checkpoint directory of a run.

    Attributes:
        name, step, launch: the name of the directory, and the numbers in it.
        state: the state, in the words of `ckptfmt log`.
        on_lineage: whether the newest launch may resume from the checkpoint.
        is_head: whether the checkpoint is the head: the first choice of the newest launch.
        saved_unix_s: time at which writer 0 took the state; None without a manifest.
        profile: "full" or "delta"; None without a manifest.
        nbytes: size of all tensors in bytes; None without a manifest.
        stored_nbytes: bytes that the checkpoint stores itself; None without a manifest.
        durability: least durability of the files at the commit; None without a manifest.
        metrics, tags, pinned: the newest labels.
        suspect: reason why the run doesn't go on from the checkpoint by itself; None if it may.
        reason: reason why the save was given up; None if it wasn't.
        error: code of the error of an unreadable register; None if readable.
    """

    name: str
    step: int
    launch: int
    state: str
    on_lineage: bool
    is_head: bool
    saved_unix_s: int | None
    profile: str | None
    nbytes: int | None
    stored_nbytes: int | None
    durability: str | None
    metrics: Mapping[str, float]
    tags: tuple[str, ...]
    pinned: bool
    suspect: str | None
    reason: str | None
    error: str | None

    @property
    def was_committed(self) -> bool:
        """Whether the save was committed, even if the checkpoint was retired since."""
        return self.state in {"committed", "retired"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """A launch of a run.

    Attributes:
        launch: the launch's number.
        chosen_by: "lineage", "fallback" or "hand"; None if the record can't be read.
        resume_name, resume_step, resume_launch: name, step and launch of the checkpoint that the
            launch resumed from; None for a fresh start.
        first_step, last_step: first and last step of the launch's directories; None without any.
        reached_step: the greatest committed step, or the first step of the launch.
        back_from: the previous launch, if its reached step is above this launch's first step.
        back_steps: the number of steps between both; 0 without a step back.
        verdict: the outcome of the repeated steps, in a sentence; None without a comparison.
    """

    launch: int
    chosen_by: str | None
    resume_name: str | None
    resume_step: int | None
    resume_launch: int | None
    first_step: int | None
    last_step: int | None
    reached_step: int
    back_from: int | None
    back_steps: int
    verdict: str | None = None

    @property
    def begin_step(self) -> int:
        """The step at which the launch began."""
        return self.resume_step or 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TreeCell:
    """A tensor, or a group of tensors with a common prefix of their names.

    Attributes:
        name: the tensor's name, or the prefix; a field's name at the top level.
        nbytes: the size of all tensors of the cell in bytes.
        tensor_count: the number of tensors.
        cells: the inner cells; empty for a tensor, and for a group of very small tensors.
    """

    name: str
    nbytes: int
    tensor_count: int
    cells: tuple[TreeCell, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriterFacts:
    """The number of pieces stored by a writer, and the bytes by field."""

    writer: int
    piece_count: int
    nbytes_by_field: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PieceFacts:
    """A box of a tensor, and the writer that stored it."""

    writer: int
    begin: tuple[int, ...]
    box_shape: tuple[int, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """A large tensor, and its pieces; `pieces` is None for more than `_PIECES` pieces."""

    field: str
    name: str
    scope: str
    dtype: str
    global_shape: tuple[int, ...]
    nbytes: int
    piece_count: int
    pieces: tuple[PieceFacts, ...] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewestFacts:
    """The facts from the index of the newest checkpoint.

    Attributes:
        name: the name of the checkpoint's directory.
        tensor_count: the number of all tensors.
        nbytes: the size of all tensors in bytes.
        cells: a cell for each field.
        writers: the stored pieces and bytes of each writer.
        largest: the largest tensors, largest first.
    """

    name: str
    tensor_count: int
    nbytes: int
    cells: tuple[TreeCell, ...]
    writers: tuple[WriterFacts, ...]
    largest: tuple[TensorFacts, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunPicture:
    """The facts about a run for `report`.

    Attributes:
        target: the path, as given.
        run_id: the run's identifier; None if the run's record can't be read.
        pending: the names of the savers' holds.
        saves: the checkpoint directories, by launch and step.
        launches: the launches, by number.
        newest: the facts about the checkpoint that the run goes on from; None without a checkpoint,
            or with an unreadable index.
        goodput: the time of the run by use; None if records can't be read.
        problems: the errors of unreadable records and documents.
        divergence: the differences from a second run, if given.
    """

    target: str
    run_id: str | None
    pending: tuple[str, ...]
    saves: tuple[SaveFacts, ...]
    launches: tuple[LaunchFacts, ...]
    newest: NewestFacts | None
    goodput: Goodput | None
    problems: tuple[CkptError, ...]
    divergence: Divergence | None = None

    @property
    def committed(self) -> list[SaveFacts]:
        """The committed checkpoints."""
        return [save for save in self.saves if save.state == "committed"]


def read_picture(place: Place) -> RunPicture:
    """Read the registers and records of a run, and the index of its newest checkpoint.

    Raises: StoreError.
    """
    history = read_history(place)
    problems = list(history.problems)
    head = history.head
    saves = _list_saves(history, head)
    newest = None
    if head is not None:
        try:
            newest = _read_newest(place, head)
        except StoreError:
            raise
        except CkptError as error:
            problems.append(error.below(head.name))
    return RunPicture(
        target=place.path,
        run_id=None if history.run is None else history.run.run_id,
        pending=tuple(history.pending),
        saves=saves,
        launches=_list_launches(history, saves),
        newest=newest,
        goodput=_read_goodput(place, history.entries),
        problems=tuple(problems),
    )


def _list_saves(history: History, head: RunEntry | None) -> tuple[SaveFacts, ...]:
    lineage = set(history.lineage)
    saves = []
    for entry in reversed(history.entries):
        manifest = entry.manifest
        register = entry.register
        saves.append(
            SaveFacts(
                name=entry.name,
                step=entry.step,
                launch=entry.launch,
                state=history.state(entry),
                on_lineage=entry.name in lineage,
                is_head=entry is head,
                saved_unix_s=None if manifest is None else manifest.saved_unix_s,
                profile=None if manifest is None else manifest.profile,
                nbytes=None if manifest is None else manifest.nbytes,
                stored_nbytes=None if manifest is None else manifest.stored_nbytes,
                durability=None if manifest is None else manifest.durability,
                metrics=entry.labels.numbers(),
                tags=entry.labels.tags,
                pinned=entry.is_pinned,
                suspect=entry.labels.suspect or None,
                reason=register.reason if isinstance(register, Abort) else None,
                error=str(register.code) if isinstance(register, CkptError) else None,
            )
        )
    return tuple(saves)


def _list_launches(history: History, saves: Iterable[SaveFacts]) -> tuple[LaunchFacts, ...]:
    records = {launch.launch: launch for launch in history.launches}
    of_launch = {
        number: list(group)
        for number, group in itertools.groupby(saves, key=lambda save: save.launch)
    }
    launches: list[LaunchFacts] = []
    for number in sorted(records.keys() | of_launch.keys()):
        record = records.get(number)
        own = of_launch.get(number, [])
        resume = None if record is None else record.resume_from
        place = None if resume is None else parse_checkpoint_name(resume.name)
        begin_step = 0 if place is None else place[0]
        before = launches[-1] if launches else None
        back_steps = (
            0 if before is None or record is None else max(0, before.reached_step - begin_step)
        )
        launches.append(
            LaunchFacts(
                launch=number,
                chosen_by=None if record is None else record.chosen_by,
                resume_name=None if resume is None else resume.name,
                resume_step=None if place is None else place[0],
                resume_launch=None if place is None else place[1],
                first_step=own[0].step if own else None,
                last_step=own[-1].step if own else None,
                reached_step=max([begin_step, *(save.step for save in own if save.was_committed)]),
                back_from=before.launch if before is not None and back_steps else None,
                back_steps=back_steps,
                verdict=history.verdicts[number].summary if number in history.verdicts else None,
            )
        )
    return tuple(launches)


def _read_goodput(place: Place, found: Iterable[RunEntry]) -> Goodput | None:
    try:
        return read_goodput(place.store, found)
    except StoreError:
        raise
    except CkptError:  # already in `problems`
        return None


# --- the newest checkpoint ------------------------------------------------------------------------


def _read_newest(place: Place, head: RunEntry) -> NewestFacts:
    manifest = head.manifest
    checkpoint = Checkpoint(
        place.store.at(head.name), digest=None if manifest is None else manifest.digest
    )
    tensors = checkpoint.index.tensors
    by_size = sorted(tensors, key=lambda tensor: -tensor.nbytes)
    return NewestFacts(
        name=head.name,
        tensor_count=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        cells=group_by_size([(tensor.field, tensor.name, tensor.nbytes) for tensor in tensors]),
        writers=_list_writers(tensors, checkpoint.manifest.origin.writer_count),
        largest=tuple(map(_tensor_facts, by_size[:_LARGEST])),
    )


def _list_writers(tensors: Iterable[IndexTensor], writer_count: int) -> tuple[WriterFacts, ...]:
    counted: dict[Sharding, tuple[list[int], list[int]]] = {}
    pieces = [0] * writer_count
    nbytes: list[dict[str, int]] = [{} for _ in range(writer_count)]
    for tensor in tensors:
        if tensor.sharding not in counted:
            counted[tensor.sharding] = _count_elements(tensor.sharding, writer_count)
        counts, elements = counted[tensor.sharding]
        element_nbytes = DTYPES[tensor.dtype].nbytes
        for writer, count in enumerate(counts):
            if count:
                pieces[writer] += count
                of_field = nbytes[writer]
                of_field[tensor.field] = (
                    of_field.get(tensor.field, 0) + elements[writer] * element_nbytes
                )
    return tuple(
        WriterFacts(writer=writer, piece_count=count, nbytes_by_field=nbytes[writer])
        for writer, count in enumerate(pieces)
    )


def _count_elements(sharding: Sharding, writer_count: int) -> tuple[list[int], list[int]]:
    """Return the number of boxes, and of elements, that each writer stored of a sharding."""
    elements = np.zeros(writer_count, np.int64)
    np.add.at(elements, sharding.part, sharding.box_shape.prod(axis=1, dtype=np.int64))
    return np.bincount(sharding.part, minlength=writer_count).tolist(), elements.tolist()


def _tensor_facts(tensor: IndexTensor) -> TensorFacts:
    element_nbytes = DTYPES[tensor.dtype].nbytes
    listed: Iterable[tuple[Box, int]] | None = (
        tensor.sharding if len(tensor.sharding) <= _PIECES else None
    )
    return TensorFacts(
        field=tensor.field,
        name=_short_name(tensor.name),
        scope=tensor.scope,
        dtype=tensor.dtype,
        global_shape=tensor.global_shape,
        nbytes=tensor.nbytes,
        piece_count=len(tensor.sharding),
        pieces=None
        if listed is None
        else tuple(
            PieceFacts(
                writer=part,
                begin=box.begin,
                box_shape=box.shape,
                nbytes=box.element_count * element_nbytes,
            )
            for box, part in listed
        ),
    )


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
    """A group of tensors with a common prefix, during the construction of cells."""

    name: str
    nbytes: int = 0
    tensor_count: int = 0
    children: dict[str, _Node] = dataclasses.field(default_factory=dict)
    shown: list[_Node] = dataclasses.field(default_factory=list)

    def add(self, nbytes: int) -> None:
        """Add a tensor to the group."""
        self.nbytes += nbytes
        self.tensor_count += 1

    def cell(self) -> TreeCell:
        """Return the cell of the group, with the shown groups within."""
        return TreeCell(
            name=_short_name(self.name),
            nbytes=self.nbytes,
            tensor_count=self.tensor_count,
            cells=tuple(node.cell() for node in sorted(self.shown, key=lambda node: -node.nbytes)),
        )


def group_by_size(tensors: Iterable[tuple[str, str, int]]) -> tuple[TreeCell, ...]:
    """Return nested cells: large tensors have separate cells, small tensors share cells by prefix.

    Args:
        tensors: field, name and size in bytes of each tensor.

    Returns: a cell for each field, largest first, with at most `_CELLS` innermost cells.

    >>> [(cell.name, cell.tensor_count) for cell in group_by_size([("weights", "a.w", 8),
    ...     ("weights", "a.b", 4)])]
    [('weights', 2)]
    """
    fields: dict[str, _Node] = {}
    for field, name, nbytes in tensors:
        node = fields.setdefault(field, _Node(field))
        node.add(nbytes)
        prefix = ""
        for component in _COMPONENT.findall(name)[:-1][:16] or [name]:
            prefix += component
            node = node.children.setdefault(component, _Node(prefix))
            node.add(nbytes)
    smallest_nbytes = sum(node.nbytes for node in fields.values()) * _SMALLEST_SHARE
    numbers = itertools.count()
    heap = [(-node.nbytes, next(numbers), node) for node in fields.values()]
    heapq.heapify(heap)
    cell_count = len(heap)
    while heap:
        node = within = heapq.heappop(heap)[2]
        while len(within.children) == 1:  # a prefix with a single continuation
            (within,) = within.children.values()
        if within is not node and node.name in fields:
            node.shown = [within]
        else:
            node.name = within.name
            room = min(_CELLS_OF_GROUP, _CELLS - cell_count)
            node.shown = _cut(within, room, smallest_nbytes) if within.children else []
        cell_count += max(0, len(node.shown) - 1)
        for child in node.shown:
            heapq.heappush(heap, (-child.nbytes, next(numbers), child))
    return tuple(node.cell() for node in sorted(fields.values(), key=lambda node: -node.nbytes))


def _cut(node: _Node, room: int, smallest_nbytes: float) -> list[_Node]:
    """Return up to `room` nodes that replace a node, or no nodes if the children are too small.

    The largest children stay separate, and the remaining children are joined.
    """
    children = list(node.children.values())
    large = sorted(
        (one for one in children if one.nbytes >= smallest_nbytes and one.nbytes),
        key=lambda one: -one.nbytes,
    )
    if len(large) == len(children) <= room:
        return large
    # Room is left for ranges: of many equal children, the largest few would be a random choice.
    large = large[: max(0, room - _RANGES)]
    apart = {id(one) for one in large}
    small = [one for one in children if id(one) not in apart]
    small_nbytes = sum(one.nbytes for one in small)
    range_count = min(
        _RANGES, len(small), room - len(large), int(small_nbytes / (8 * smallest_nbytes or 1))
    )
    if range_count < 2:
        return [*large, *_join_range(node, small, whole=True)] if large else []
    ranges: list[list[_Node]] = [[] for _ in range(range_count)]
    before_nbytes = 0
    for one in small:  # in the order of the index
        ranges[min(range_count - 1, before_nbytes * range_count // small_nbytes)].append(one)
        before_nbytes += one.nbytes
    return [
        *large,
        *itertools.chain.from_iterable(_join_range(node, part, whole=False) for part in ranges),
    ]


def _join_range(parent: _Node, nodes: Sequence[_Node], *, whole: bool) -> list[_Node]:
    """Return a node that joins some children of `parent`; an empty list for children without bytes.

    Args:
        parent: the node of the children.
        nodes: the children to join.
        whole: whether these are all remaining children, or else a range of neighbours.
    """
    nbytes = sum(one.nbytes for one in nodes)
    if not nbytes:
        return []
    if len(nodes) == 1:
        return list(nodes)
    name = (
        f"{parent.name}*"
        if whole
        else (
            f"{nodes[0].name.rstrip('./')} to"
            f" {nodes[-1].name.removeprefix(parent.name).rstrip('./')}"
        )
    )
    return [_Node(name, nbytes, sum(one.tensor_count for one in nodes))]


def _short_name(name: str) -> str:
    return shorten(clean(name), _NAME_LENGTH)


def durations_of(picture: RunPicture) -> tuple[float | None, float | None]:
    """Return the average cost of a save in training time, and from begin to commit, in seconds.

    The run's ledger has both; None without a ledger.
    """
    return (
        (None, None)
        if picture.goodput is None
        else (picture.goodput.costs.lost_s, picture.goodput.costs.commit_s)
    )


def picture_members(picture: RunPicture) -> dict[str, object]:
    """Return the facts as members of a JSON object, with null for unrecorded facts."""
    members = {
        field.name: getattr(picture, field.name)
        for field in dataclasses.fields(picture)
        if field.name != "problems"
    }
    return {
        "kind": "report",
        "checked": "registers",
        **{name: _plain(member) for name, member in members.items()},
        "goodput": None if picture.goodput is None else picture.goodput.as_json(),
        "durations": dict(zip(("training_s", "commit_s"), durations_of(picture), strict=True)),
        "problems": [problem.as_json() for problem in picture.problems],
    }


def _plain(value: object) -> object:
    """Return a value for JSON, with dataclasses as mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, CkptError):
        return value.as_json()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value

"""RNG streams of devices: saved on one kind of device, loaded on another, numbered by the state's devices."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.adapters import torch_side
from ckptfmt.adapters.capture import capture
from ckptfmt.adapters.device_streams import match_devices
from ckptfmt.adapters.live import Live
from ckptfmt.adapters.unsaved import Unheld
from ckptfmt.errors import CkptError, Code, StateError
from ckptfmt.store import MemoryStore
from tests.adapters.double import checkpoint_of, load
from tests.interface.test_group import run_writers


@dataclasses.dataclass
class Launch:
    """The devices of a process: the current one, None without CUDA; and those that hold its tensors."""

    current: int | None = None
    holding: tuple[int, ...] = ()
    other: str | None = None


SIDE: Any = torch_side()
CPU = Launch()
#: A process that has begun to use CUDA, as a loader with pinned memory does, with its state on the host.
PINNED = Launch(current=0)


class Machine:
    """A stand-in for torch.cuda and for the devices of tensors; each thread has a launch of its own.

    A stream is seed and position, as that of a real device.
    """

    def __init__(self) -> None:
        self.positions = dict.fromkeys(range(4), 0)
        self.own = threading.local()

    @property
    def launch(self) -> Launch:
        return getattr(self.own, "launch", CPU)

    @contextlib.contextmanager
    def launched(self, launch: Launch) -> Iterator[None]:
        """Be a process of a launch, whose streams are fresh: each device has another position."""
        self.begin(launch)
        yield
        self.own.launch = CPU

    def begin(self, launch: Launch) -> None:
        self.own.launch = launch
        self.positions = {index: 1000 * (index + 1) for index in range(4)}

    def draw(self, index: int, count: int = 1) -> int:
        self.positions[index] += 4 * count
        return self.positions[index]

    def read(self, index: int) -> bytes:
        return bytes(self.get_rng_state(index).tolist())

    # --- torch.cuda -------------------------------------------------------------------------------

    def is_initialized(self) -> bool:
        return self.launch.current is not None

    def current_device(self) -> int:
        assert self.launch.current is not None
        return self.launch.current

    def get_rng_state(self, device: int) -> torch.Tensor:
        content = np.array([7, self.positions[device]], "<u8").view(np.uint8)
        return torch.from_numpy(content.copy())

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        assert state.dtype == torch.uint8
        seed, position = state.numpy().view("<u8").tolist()
        assert seed == 7
        self.positions[device] = position

    def get_device_name(self, device: torch.device) -> str:
        return f"{device.type} of a stand-in"

    def is_current_stream_capturing(self) -> bool:
        return False

    def devices_of(self, tensors: list[torch.Tensor]) -> frozenset[str]:
        launch = self.launch
        names = [f"cuda:{index}" for index in launch.holding]
        names += [] if launch.other is None else [launch.other]
        return frozenset(names or ["cpu"] * bool(list(tensors)))


@pytest.fixture(name="machine")
def _machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    for name in (
        "is_initialized", "current_device", "get_rng_state", "set_rng_state", "get_device_name",
        "is_current_stream_capturing",
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(machine, name))
    monkeypatch.setattr(SIDE, "devices_of", machine.devices_of)
    return machine


def make_state(**options: Any) -> ckptfmt.State:
    """Return a state that claims T1 wherever nothing differs."""
    given: dict[str, Any] = {
        "weights": {"w": torch.zeros(3)},
        "optimizer": {"n": 1},
        "data": ckptfmt.Sampler(60, global_batch=4, seed=1),
        "config": {},
    }
    return ckptfmt.State(**(given | options))


def draw_host() -> tuple[Any, ...]:
    return (random.random(), np.random.rand(), torch.rand(2).tolist())  # noqa: NPY002


def save_on(
    machine: Machine, launch: Launch, path: Any, **options: Any
) -> tuple[dict[int, bytes], tuple[Any, ...]]:
    """Save in a launch; return the bytes of the devices' streams and the next draws of the host."""
    with machine.launched(launch):
        for index in range(4):
            machine.draw(index, 10 + index)
        ckptfmt.save(path, make_state(**options), step=1)
        return {index: machine.read(index) for index in range(4)}, draw_host()


def load_on(machine: Machine, launch: Launch, path: Any, **options: Any) -> ckptfmt.LoadReport:
    machine.begin(launch)
    return ckptfmt.load(path, make_state(), **options)


def lines_of(report: ckptfmt.LoadReport) -> list[str]:
    return [reason for reason in report.lowered_by if "STREAM_" in reason]


# --- draws on devices outside of the State --------------------------------------------------------


@pytest.fixture(name="generators")
def _generators(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    made = [object() for _ in range(4)]
    monkeypatch.setattr(torch.cuda, "default_generators", made)
    return made


def names_of(unheld: Unheld, state: ckptfmt.State) -> list[str]:
    live = Live.of(state, worker=0, worker_count=1)
    return [found.name for found in unheld.find(state, live, looks_around=False)]


@pytest.mark.usefixtures("generators")
def test_draws_on_a_device_without_a_tensor_of_the_state_lower_the_claim(machine: Machine) -> None:
    machine.begin(Launch(current=0, holding=(3,)))
    state, unheld = make_state(), Unheld()
    machine.draw(0, 5)  # before the training, such as of initial weights
    assert names_of(unheld, state) == []
    machine.draw(3)
    assert names_of(unheld, state) == []
    machine.draw(0)
    (found,) = unheld.find(state, Live.of(state, worker=0, worker_count=1), looks_around=False)
    assert found.name == "DEVICE_DRAWS"
    assert "cuda:0" in found.text
    assert names_of(unheld, state) == ["DEVICE_DRAWS"]  # at later saves, too


def test_a_generator_that_the_caller_saves_is_no_reason(
    machine: Machine, generators: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.begin(Launch(current=0, holding=(3,)))
    state, unheld = make_state(), Unheld()
    names_of(unheld, state)
    machine.draw(0)
    monkeypatch.setattr(state, "rng", {"noise": generators[0]})
    assert names_of(unheld, state) == []


@pytest.mark.usefixtures("generators")
def test_a_new_seed_at_each_step_is_no_draw(machine: Machine) -> None:
    machine.begin(Launch(current=0, holding=(3,)))
    state, unheld = make_state(), Unheld()
    names_of(unheld, state)
    machine.positions[0] = 0
    assert names_of(unheld, state) == []


# --- another kind of device -----------------------------------------------------------------------


@pytest.mark.parametrize("launch", [PINNED, Launch(current=0, holding=(3,))])
def test_a_checkpoint_of_a_cpu_loads_where_cuda_is_in_use(machine: Machine, launch: Launch) -> None:
    """REQ-CTX-004: the host's streams are restored, the device's stays, and the report says so."""
    store, index = MemoryStore(), 3 if launch.holding else 0
    _, expected = save_on(machine, CPU, store)
    machine.begin(launch)
    fresh = machine.read(index)

    report = load_on(machine, launch, store)

    assert draw_host() == expected
    assert machine.read(index) == fresh
    assert report.claim == "S1"
    assert lines_of(report) == [
        (
            "STREAM_MISSING at rng:torch.cuda/0 (lw/0): no RNG stream of a device was saved: the"
            f" generator of cuda:{index} keeps its own state, so that dropout and other random draws of"
            " the model differ from an uninterrupted run"
        )
    ]
    if not launch.holding:  # nothing else differs: the stream alone lowers the claim
        assert list(report.lowered_by) == lines_of(report)


@pytest.mark.parametrize("launch", [PINNED, Launch(current=0, holding=(3,))])
def test_a_checkpoint_of_a_device_loads_on_a_cpu(machine: Machine, launch: Launch) -> None:
    store = MemoryStore()
    _, expected = save_on(machine, launch, store)

    report = load_on(machine, CPU, store)

    assert draw_host() == expected
    assert report.claim == "S1"
    assert lines_of(report) == [
        (
            "STREAM_UNEXPECTED at rng:torch.cuda/0 (lw/0): no cuda device is in use here: the saved"
            " state is left out, so that dropout and other random draws of the model differ from an"
            " uninterrupted run"
        )
    ]
    if not launch.holding:
        assert list(report.lowered_by) == lines_of(report)


def test_where_nothing_differs_the_bytes_come_back_and_t1_is_claimed(machine: Machine) -> None:
    """The control of all tests here."""
    for launch, index in [(PINNED, 0), (Launch(current=0, holding=(3,)), 3)]:
        store = MemoryStore()
        saved, expected = save_on(machine, launch, store)
        report = load_on(machine, launch, store)
        assert (draw_host(), machine.read(index)) == (expected, saved[index])
        assert (report.claim, report.lowered_by) == ("T1", ())


@pytest.mark.parametrize(
    ("saved", "live", "code"),
    [(CPU, PINNED, Code.STREAM_MISSING), (PINNED, CPU, Code.STREAM_UNEXPECTED)],
)
def test_strict_refuses_another_kind_of_device(
    machine: Machine, saved: Launch, live: Launch, code: Code
) -> None:
    store = MemoryStore()
    save_on(machine, saved, store)
    before = torch.get_rng_state()
    with pytest.raises(StateError, match=r"rng:torch\.cuda/0 \(lw/0\)") as caught:
        load_on(machine, live, store, strict=True)
    assert caught.value.code == code
    assert torch.equal(torch.get_rng_state(), before)
    assert load_on(machine, live, store, strict=True, allow="streams").claim == "S1"


@pytest.mark.parametrize("launch", [CPU, PINNED])
def test_a_stream_that_every_machine_has_is_still_missed(machine: Machine, launch: Launch) -> None:
    """The control: no stream of Python, of numpy, of torch's host or of the caller may be absent."""
    for lacking in ("python", "numpy", "torch.cpu", "user/mine"):
        with machine.launched(PINNED):
            found = capture(make_state(rng={"mine": random.Random(1)}), worker=0, worker_count=1)
        kept = tuple(stream for stream in found.streams if stream.name != lacking)
        assert len(kept) == len(found.streams) - 1
        checkpoint = checkpoint_of(dataclasses.replace(found, streams=kept))
        machine.begin(launch)
        with pytest.raises(StateError, match=rf"rng:{lacking} \(lw/0\): not saved") as caught:
            load(make_state(rng={"mine": random.Random(2)}), checkpoint)
        assert caught.value.code == Code.STREAM_MISSING
        assert "torch.cuda" not in str(caught.value)


@pytest.mark.parametrize("other", ["mps:0", "xpu:1", "hpu:0", "meta"])
def test_other_accelerators_have_no_stream(machine: Machine, other: str) -> None:
    store = MemoryStore()
    save_on(machine, Launch(other=other), store)
    assert "torch.cuda/0" not in streams_in(store)
    assert load_on(machine, Launch(other=other), store).claim == "T1"
    report = load_on(machine, Launch(current=0, holding=(0,)), store)
    assert lines_of(report) != []
    store = MemoryStore()
    saved, _ = save_on(machine, Launch(current=2, other=other), store)
    assert load_on(machine, Launch(current=2, other=other), store).claim == "T1"
    assert machine.read(2) == saved[2]


def streams_in(store: Any) -> list[str]:
    with ckptfmt.open(store) as checkpoint:
        return sorted(name for name, _ in checkpoint.streams)


# --- generators of the caller ---------------------------------------------------------------------


@pytest.fixture(name="noise")
def _noise(monkeypatch: pytest.MonkeyPatch) -> Callable[[], torch.Generator]:
    """Return a function that makes a generator, which is saved as if it were on a device."""
    right = SIDE.generator_stream
    on_device: set[int] = set()

    def generator_stream(generator: torch.Generator) -> dict[str, Any]:
        stream: dict[str, Any] = right(generator)
        if id(generator) in on_device:
            state = {"device": "cuda", "state": np.arange(16, dtype=np.uint8)}
            stream |= {"read": lambda: state, "device": "cuda:0"}
        return stream

    monkeypatch.setattr(SIDE, "generator_stream", generator_stream)

    def make() -> torch.Generator:
        generator = torch.Generator().manual_seed(1)
        on_device.add(id(generator))
        return generator

    return make


class Augment:
    """An object of the state with a generator as an attribute."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize("place", ["user/noise", "user/optimizer/extra/noise", "held"])
def test_a_generator_on_another_type_of_device_keeps_its_state(
    machine: Machine, noise: Callable[[], torch.Generator], place: str
) -> None:
    """A load was refused after its tensors had changed, with allow= as without."""

    def state(generator: torch.Generator) -> ckptfmt.State:
        if place == "user/noise":
            return make_state(rng={"noise": generator})
        return make_state(extra={"noise": Augment(generator) if place == "held" else generator})

    store, saved = MemoryStore(), noise()
    with machine.launched(CPU):
        ckptfmt.save(store, state(saved), step=1)
        expected = draw_host()
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()

    with pytest.raises(StateError, match="saved on cuda, and the generator here is on cpu") as told:
        ckptfmt.load(store, state(generator), strict=True)
    assert told.value.code == Code.STREAM_MISSING
    report: Any = ckptfmt.load(store, state(generator))

    assert torch.equal(generator.get_state(), before)
    assert draw_host() == expected
    assert report.claim == "S1"
    name = "held/optimizer/extra/noise/generator" if place == "held" else place
    assert list(report.lowered_by) == [
        (
            f"STREAM_MISSING at rng:{name} (lw/0): saved on cuda, and the generator here is on cpu: no"
            " other type of device can take the saved state, so that the generator keeps its own state,"
            " and draws from the generator differ from an uninterrupted run"
        )
    ]


def test_a_generator_of_another_kind_or_that_was_not_saved_is_still_refused(
    machine: Machine, noise: Callable[[], torch.Generator]
) -> None:
    store = MemoryStore()
    with machine.launched(CPU):
        ckptfmt.save(store, make_state(rng={"noise": noise()}), step=1)
        for given, says in [
            ({"noise": random.Random(1)}, "saved as torch.generator, here python.mt19937"),
            ({"noise": torch.Generator(), "mine": torch.Generator()}, "user/mine"),
            ({}, "user/noise"),
        ]:
            with pytest.raises(StateError, match=says):
                ckptfmt.load(store, make_state(rng=given))


def test_a_loaders_generator_on_another_type_of_device_is_refused() -> None:
    """The order of the samples depends on it, so that the write itself refuses."""
    stream = SIDE.generator_stream(torch.Generator().manual_seed(1))
    before = stream["read"]()["state"].tobytes()
    with pytest.raises(StateError, match="Make the loader's generator on cuda") as caught:
        stream["write"]({"device": "cuda", "state": np.arange(16, dtype=np.uint8)})
    assert caught.value.code == Code.STREAM_MISSING
    assert stream["read"]()["state"].tobytes() == before


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 2, 3])
@pytest.mark.parametrize("after", [0, 2, 3])
def test_the_current_device_has_no_part_in_the_streams_of_a_state_on_a_device(
    machine: Machine, before: int, after: int
) -> None:
    """A launch with another current device was refused, or took another device's stream."""
    store = MemoryStore()
    saved, expected = save_on(machine, Launch(current=before, holding=(3,)), store)
    assert [name for name in streams_in(store) if "cuda" in name] == ["torch.cuda/0"]
    machine.begin(Launch(current=after, holding=(3,)))
    untouched = {index: machine.read(index) for index in range(3)}

    report = load_on(machine, Launch(current=after, holding=(3,)), store)

    assert (report.claim, report.lowered_by) == ("T1", ())
    assert (draw_host(), machine.read(3)) == (expected, saved[3])
    assert {index: machine.read(index) for index in range(3)} == untouched


def test_numbers_follow_the_order_of_indices(machine: Machine) -> None:
    store = MemoryStore()
    saved, _ = save_on(machine, Launch(current=0, holding=(3, 1)), store)
    report = load_on(machine, Launch(current=3, holding=(0, 2)), store)
    assert report.claim == "T1"
    assert (machine.read(0), machine.read(2)) == (saved[1], saved[3])


def test_a_checkpoint_that_counted_the_current_device_goes_on_in_the_same_launch(
    machine: Machine,
) -> None:
    """Version 0.10 counted it: a run that is updated draws the same numbers, and claims less."""
    for current, index, number in [(0, 3, 1), (3, 0, 0), (1, 2, 1)]:
        store = MemoryStore()
        saved, expected = save_on(machine, Launch(current, tuple({current, index})), store)
        assert [name for name in streams_in(store) if "cuda" in name][1:] == ["torch.cuda/1"]

        report = load_on(machine, Launch(current=current, holding=(index,)), store)

        assert (draw_host(), machine.read(index)) == (expected, saved[index])
        assert report.claim == "S1"
        (line,) = report.lowered_by
        assert line == (
            "STREAM_UNEXPECTED at rng:torch.cuda/0, torch.cuda/1 (lw/0): saved torch.cuda/0,"
            f" torch.cuda/1, here torch.cuda/0 (cuda:{index}): the checkpoint doesn't record the"
            " device of a number, and the numbers are read as version 0.10 counts,"
            f" cuda:{current} included;"
            f" torch.cuda/{number} is put into cuda:{index}; torch.cuda/{1 - number} is left out;"
            " perhaps dropout and other random draws of the model differ from an uninterrupted run"
        )
        with pytest.raises(StateError, match=r"saved torch\.cuda/0, torch\.cuda/1") as caught:
            load_on(machine, Launch(current=current, holding=(index,)), store, strict=True)
        assert caught.value.code == Code.STREAM_UNEXPECTED


def test_numbers_that_cannot_be_known_are_told(machine: Machine) -> None:
    """Saved by version 0.10 with 0 as the current device, and launched with 3."""
    store = MemoryStore()
    saved, _ = save_on(machine, Launch(current=0, holding=(0, 3)), store)
    report = load_on(machine, Launch(current=3, holding=(3,)), store)
    assert machine.read(3) == saved[0]
    (line,) = report.lowered_by
    assert "the checkpoint doesn't record the device of a number" in line
    assert "version 0.10 also counted the current device" in line
    assert "torch.cuda/0 is put into cuda:3; torch.cuda/1 is left out; perhaps" in line
    assert report.claim == "S1"


def test_a_state_on_more_devices_takes_the_streams_that_there_are(machine: Machine) -> None:
    store = MemoryStore()
    saved, _ = save_on(machine, Launch(current=0, holding=(0,)), store)
    machine.begin(PINNED)
    fresh = machine.read(2)
    report = load_on(machine, Launch(current=0, holding=(1, 2)), store)
    assert (machine.read(1), machine.read(2)) == (saved[0], fresh)
    (line,) = report.lowered_by
    assert line.startswith(
        "STREAM_MISSING at rng:torch.cuda/0 (lw/0): saved torch.cuda/0, here torch.cuda/0 (cuda:1),"
    )
    assert "torch.cuda/0 is put into cuda:1; the generator of cuda:2 keeps its own state" in line


def test_each_pair_of_launches_is_matched(machine: Machine) -> None:
    """No launch is refused; T1 needs the same number of streams, and each live stream is explained."""
    launches = [
        Launch(current, holding)
        for current in (None, 0, 1, 2)
        for count in range(3)
        for holding in itertools.combinations(range(3), count)
        if current is not None or not holding
    ]
    for before, after in itertools.product(launches, repeat=2):
        names = [list_live(machine, launch) for launch in (before, after)]
        current = None if after.current is None else f"cuda:{after.current}"
        match = match_devices(names[0], names[1], current)
        assert (match.code is None) == (len(names[0]) == len(names[1]))
        assert {*match.saved_names} <= {*names[1]}
        assert {*match.saved_names.values()} <= {*names[0]}
        assert len({*match.saved_names.values()}) == len(match.saved_names)
        if match.code is None:
            assert match.saved_names == {name: name for name in names[1]}
        else:
            for name, device in names[1].items():
                assert name in match.saved_names or device in match.outcome
            for name in names[0]:
                assert name in match.names


def list_live(machine: Machine, launch: Launch) -> dict[str, str]:
    with machine.launched(launch):
        devices = machine.devices_of([torch.zeros(1)])
        return {
            stream["name"]: stream["device"]
            for stream in SIDE.global_streams(devices)
            if stream["name"] != "torch.cpu"
        }


def test_streams_of_a_later_type_of_device_are_left_out() -> None:
    match = match_devices(["torch.xpu/0", "torch.cuda/0"], {}, None)
    assert (match.code, match.saved_names) == (Code.STREAM_UNEXPECTED, {})
    assert match.detail == "no cuda or xpu device is in use here"
    match = match_devices(["torch.xpu/0"], {"torch.cuda/0": "cuda:1"}, "cuda:1")
    assert (match.code, match.saved_names) == (Code.STREAM_UNEXPECTED, {})
    assert "torch.xpu/0 is left out; the generator of cuda:1 keeps its own state" in match.outcome


# --- captured streams -----------------------------------------------------------------------------


def test_captured_streams_are_those_of_the_states_devices(machine: Machine) -> None:
    """The numbers of a capture are others than those of the state: devices are compared."""
    launch = Launch(current=0, holding=(3,))
    for devices in (["cuda:3"], ["cuda:0", "cuda:3"], [torch.device("cuda", 3), "cuda"], range(0)):
        store = MemoryStore()
        machine.begin(launch)
        captured = ckptfmt.capture_rng(devices=list(devices))
        saved = machine.read(3)
        machine.draw(3)
        state = make_state(rng=captured)
        if not devices:
            with pytest.raises(StateError, match=r"torch\.cuda/0 \(cuda:3\) wasn't captured"):
                ckptfmt.save(store, state, step=1)
            continue
        ckptfmt.save(store, state, step=1)
        assert [name for name in streams_in(store) if "cuda" in name] == ["torch.cuda/0"]
        machine.draw(3)
        assert load_on(machine, launch, store).claim == "T1"
        assert machine.read(3) == saved
        machine.draw(3)
        assert ckptfmt.load(store, state).claim == "T1"
        assert machine.read(3) == saved


def test_all_captured_streams_are_put_back(machine: Machine) -> None:
    machine.begin(Launch(current=0, holding=(3,)))
    for devices, indices in [([], [0]), (["cuda:3"], [3]), (["cuda:1", "cuda:3"], [1, 3])]:
        captured = ckptfmt.capture_rng(devices=devices)
        before = {index: machine.read(index) for index in range(4)}
        for index in range(4):
            machine.draw(index)
        captured.put_back()
        back = [index for index in range(4) if machine.read(index) == before[index]]
        assert back == indices


# --- several processes, and runs ------------------------------------------------------------------


@pytest.mark.parametrize("loads", [(CPU, CPU), (PINNED, PINNED), (PINNED, CPU), (CPU, PINNED)])
def test_of_two_processes_one_used_a_device(machine: Machine, loads: tuple[Launch, ...]) -> None:
    """Each process compares its own devices; all claim the same, and name the reason."""
    store, saves = MemoryStore(), (PINNED, CPU)
    machine.draw(0, 9)
    saved = machine.read(0)

    def save(writer: int) -> str:
        machine.own.launch = saves[writer]
        return ckptfmt.save(
            store, make_state(), step=1, writer=(writer, 2), agree="start-1", deadline_s=20
        ).digest

    def read(writer: int) -> Any:
        machine.own.launch = loads[writer]
        return ckptfmt.load(store, make_state(), writer=(writer, 2), agree="start-2", deadline_s=20)

    digests = run_writers(2, save)
    assert not [one for one in digests if isinstance(one, CkptError)]
    machine.begin(CPU)
    reports = run_writers(2, read)
    assert not [one for one in reports if isinstance(one, CkptError)], reports
    differing = [place for place in range(2) if loads[place] != saves[place]]
    assert {report.claim for report in reports} == {"S1" if differing else "T1"}
    for number, report in enumerate(reports):
        assert len(report.lowered_by) == len(differing)
        for place in differing:
            begin = "" if place == number else f"process {place}: "
            kind = "STREAM_UNEXPECTED" if place == 0 else "STREAM_MISSING"
            told = f"{begin}{kind} at rng:torch.cuda/0 (lw/{place})"
            assert any(reason.startswith(told) for reason in report.lowered_by)
    assert (machine.read(0) == saved) is (loads[0] == PINNED)


def test_another_number_of_processes_names_the_devices_too(machine: Machine) -> None:
    with machine.launched(PINNED):
        snapshots = [capture(make_state(), worker=worker, worker_count=2) for worker in range(2)]
    checkpoint = checkpoint_of(*snapshots)
    machine.begin(CPU)
    report = load(make_state(), checkpoint)
    assert [line.split(": ")[0] for line in lines_of(report)] == [
        "STREAM_UNEXPECTED at rng (lw/1)",
        "STREAM_UNEXPECTED at rng:torch.cuda/0 (lw/0)",
    ]


def train(
    machine: Machine, launch: Launch, run: Path, total: int, *, rewinds_after: int | None = None
) -> tuple[dict[int, Any], ckptfmt.LoadReport | None]:
    """Train in a launch; return the draws of each step, and the report once the streams are back."""
    machine.begin(launch)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    state = make_state()
    rows: dict[int, Any] = {}
    saving = ckptfmt.Saving(saver="inline")
    with ckptfmt.Checkpointer(run, state, every=2, saving=saving) as checkpointer:
        for step in checkpointer.steps(total):
            next(iter(state.data))  # type: ignore[call-overload]
            if launch.current is not None and not launch.holding:
                machine.draw(launch.current)
            rows[step] = ([machine.draw(index) for index in launch.holding], draw_host())
            if step == rewinds_after and not checkpointer.rewinds:
                checkpointer.rewind()
        return rows, checkpointer.load_report


def test_a_run_resumes_in_a_launch_with_another_current_device(
    tmp_path: Path, machine: Machine
) -> None:
    launch, moved = Launch(current=0, holding=(3,)), Launch(current=3, holding=(3,))
    whole, _ = train(machine, launch, tmp_path / "whole", 8)
    first, _ = train(machine, launch, tmp_path / "run", 4)
    second, report = train(machine, moved, tmp_path / "run", 8, rewinds_after=6)
    assert first | second == whole
    assert report is not None
    assert (report.claim, report.lowered_by) == ("T1", ())


@pytest.mark.parametrize("order", [(PINNED, CPU), (CPU, PINNED)])
def test_a_run_resumes_on_another_kind_of_device_and_says_so(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture, order: tuple[Launch, ...]
) -> None:
    """The host's streams go on; the reason is in the log, and a rewind has another claim."""
    whole, _ = train(machine, order[0], tmp_path / "whole", 8)
    first, _ = train(machine, order[0], tmp_path / "run", 4)
    caplog.clear()
    second, report = train(machine, order[1], tmp_path / "run", 6)
    assert report is not None
    assert first | second == {step: whole[step] for step in range(6)}
    assert report.claim == "S1"
    assert list(report.lowered_by) == lines_of(report)
    assert report.downgrades == report.lowered_by
    assert len(report.lowered_by) == 1
    assert report.lowered_by[0] in caplog.text
    third, report = train(machine, order[1], tmp_path / "run", 8, rewinds_after=7)
    assert report is not None
    assert (report.claim, report.lowered_by) == ("T1", ())  # the rewind's own save
    assert third == {step: whole[step] for step in (6, 7)}


def test_a_device_that_is_used_since_the_restore_is_restored(
    tmp_path: Path, machine: Machine
) -> None:
    """A loader with pinned memory uses CUDA once its iterator exists: the load has seen no device."""
    train(machine, PINNED, tmp_path, 4)
    with ckptfmt.open(tmp_path / "step-00000004-l0001") as checkpoint:
        saved = checkpoint.stream("torch.cuda/0", "lw/0")[1]
    machine.begin(CPU)
    with ckptfmt.Checkpointer(tmp_path, make_state(), every=2) as checkpointer:
        report = checkpointer.restore()
        assert report is not None
        assert len(lines_of(report)) == len(report.downgrades) == 1
        machine.begin(PINNED)
        assert machine.read(0) != bytes(saved.content)
        checkpointer.restore_rng()
        report = checkpointer.load_report
        assert report is not None
        assert (report.claim, report.lowered_by, report.downgrades) == ("T1", (), ())
        assert machine.read(0) == bytes(saved.content)


@pytest.mark.cuda
def test_on_a_real_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each direction, with a generator of the caller, and the same device as a control."""
    places = {"cpu": torch.zeros(3), "cuda": torch.zeros(3, device="cuda")}
    own = {name: torch.Generator(device=name).manual_seed(1) for name in places}
    states = {
        name: make_state(weights={"w": tensor}, rng={"own": own[name]})
        for name, tensor in places.items()
    }
    for saved, live in itertools.product(places, repeat=2):
        store = MemoryStore()
        torch.cuda.manual_seed(5)
        torch.rand(7, device="cuda")
        with monkeypatch.context() as patch:
            if saved == "cpu":
                patch.setattr(torch.cuda, "is_initialized", lambda: False)
            ckptfmt.save(store, states[saved], step=1)
        expected = draw_host(), torch.rand(3, device="cuda")
        position = torch.cuda.get_rng_state()
        before = own[live].get_state()
        with monkeypatch.context() as patch:
            if live == "cpu":
                patch.setattr(torch.cuda, "is_initialized", lambda: False)
            report = ckptfmt.load(store, states[live])
        assert draw_host() == expected[0]
        if saved == live:
            assert (report.claim, report.lowered_by) == ("T1", ())
            if live == "cuda":
                assert torch.equal(torch.rand(3, device="cuda"), expected[1])
        else:
            assert report.claim == "S1"
            assert len(lines_of(report)) == 2
            assert torch.equal(torch.cuda.get_rng_state(), position)
            assert torch.equal(own[live].get_state(), before)

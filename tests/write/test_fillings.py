"""What a slot has isn't copied again, and nothing else is left out."""

import dataclasses

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.write import staging
from ckptfmt.write.image import plan_image
from ckptfmt.write.staging import Fillings
from tests.builders import snapshot

BLOCK_NBYTES = 4096
IMAGE = plan_image(snapshot(), block_nbytes=BLOCK_NBYTES)
OTHER_IMAGE = plan_image(snapshot(), block_nbytes=2 * BLOCK_NBYTES)


class Slots:
    """Slots of one piece, filled in turn; notes which bytes were written."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.fillings = Fillings()
        self.slots = [np.full(nbytes, 0xA5, np.uint8) for _ in range(count)]
        self.copied_whole = 0

    def fill(
        self, slot: int, content: np.ndarray, *, was_written: bool = True, image=IMAGE
    ) -> bytes:
        place = self.slots[slot]

        def copy_all() -> None:
            self.copied_whole += 1
            place[:] = content

        before = place.tobytes()
        kept = self.fillings.begin(slot, image, was_written=was_written).copy_changed(
            64, content, place, copy_all
        )
        assert place.tobytes() == content.tobytes(), (
            "a slot holds a whole snapshot, whatever wasn't copied"
        )
        for number, is_kept in enumerate(kept):
            block = slice(number * image.block_nbytes, (number + 1) * image.block_nbytes)
            assert not is_kept or before[block] == content[block].tobytes()
        return kept


@pytest.fixture(autouse=True, scope="module")
def sixteen_bytes_are_a_sample():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_SAMPLE_NBYTES", 16)
        yield


@dataclasses.dataclass(frozen=True)
class Step:
    """One save: which bytes change before it, whether the slot's last save was written, and which slot it takes."""

    changes: tuple[tuple[int, int], ...]
    was_written: bool
    slot: int


STEPS = st.builds(
    Step,
    changes=st.lists(
        st.tuples(st.integers(0, 5 * BLOCK_NBYTES), st.integers(0, 255)), max_size=3
    ).map(tuple),
    was_written=st.sampled_from([True, True, True, False]),
    slot=st.integers(0, 2),
)


@given(st.integers(1, 5 * BLOCK_NBYTES), st.lists(STEPS, max_size=12))
def test_a_slot_is_whole_whatever_changed_and_whichever_slot_is_taken(nbytes, steps) -> None:
    """Of any bits: zeros of either sign and NaNs are bytes like others."""
    slots, content = Slots(nbytes, 3), np.zeros(nbytes, np.uint8)
    for step in steps:
        for at, value in step.changes:
            content[at % nbytes] = value
        kept = slots.fill(step.slot, content, was_written=step.was_written)
        assert step.was_written or not any(kept)


def test_what_stays_as_it_was_is_kept_from_the_second_filling_of_a_slot_on() -> None:
    slots, content = (
        Slots(3 * BLOCK_NBYTES + 5, 2),
        np.arange(3 * BLOCK_NBYTES + 5, dtype=np.uint32).astype(np.uint8),
    )
    assert [slots.fill(number % 2, content) for number in range(6)] == [b"\0" * 4] * 2 + [
        b"\1" * 4
    ] * 4
    content[2 * BLOCK_NBYTES + 100] ^= 0x80  # behind the sample
    assert slots.fill(0, content) == b"\1\1\0\1"
    assert slots.fill(1, content) == b"\1\1\0\1"
    assert slots.fill(0, content) == b"\1\1\1\1"


def test_the_first_bytes_tell_that_a_block_has_changed_and_never_that_it_has_not() -> None:
    slots, content = Slots(2 * BLOCK_NBYTES, 1), np.zeros(2 * BLOCK_NBYTES, np.uint8)
    slots.fill(0, content)
    content[0] += 1
    assert slots.fill(0, content) == b"\0\1"
    assert slots.fill(0, content) == b"\1\1"
    content[BLOCK_NBYTES + 16] += 1
    assert slots.fill(0, content) == b"\1\0"
    # Of what has changed everywhere nothing is known: only from when it has stopped.
    content += 1
    assert slots.fill(0, content) == b"\0\0"
    assert slots.fill(0, content) == b"\0\0"
    assert slots.fill(0, content) == b"\1\1"


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """Of how many bytes checksums were computed."""
    found: list[int] = []

    def checksum(content: memoryview, *, seed: int) -> bytes:
        found.append(content.nbytes)
        return xxhash.xxh3_128_digest(content, seed=seed)

    monkeypatch.setattr(staging, "xxh3_128_digest", checksum)
    return found


def test_what_changes_everywhere_is_copied_whole_and_no_checksum_is_computed_of_it(
    computed,
) -> None:
    slots, content = Slots(4 * BLOCK_NBYTES, 2), np.zeros(4 * BLOCK_NBYTES, np.uint8)
    for number in range(6):
        content += 1
        assert not any(slots.fill(number % 2, content))
    assert slots.copied_whole == 5
    assert sum(nbytes > 16 for nbytes in computed) == 4, (
        "of the first save alone, which has nothing to compare with"
    )


def test_a_checksum_is_computed_once_of_each_block(computed) -> None:
    """Of a tensor's to compare it, else of what was copied; where the first bytes tell, it needn't be compared."""
    slots, content = Slots(4 * BLOCK_NBYTES, 1), np.zeros(4 * BLOCK_NBYTES, np.uint8)
    for _ in range(3):
        slots.fill(0, content)
        content[0] += 1
    assert slots.copied_whole == 0
    assert sum(nbytes > 16 for nbytes in computed) == 3 * 4


def test_what_an_unwritten_save_left_is_not_believed() -> None:
    slots, content = Slots(BLOCK_NBYTES, 1), np.zeros(BLOCK_NBYTES, np.uint8)
    slots.fill(0, content)
    slots.slots[0][:] = 1  # half of a copy that failed
    assert slots.fill(0, content, was_written=False) == b"\0"
    assert slots.fill(0, content) == b"\1"


def test_a_filling_that_did_not_look_leaves_nothing_to_believe() -> None:
    """As that of a tensor whose elements lay apart at that save."""
    slots, content = Slots(BLOCK_NBYTES, 1), np.zeros(BLOCK_NBYTES, np.uint8)
    slots.fill(0, content)
    slots.fillings.begin(0, IMAGE, was_written=True)
    slots.slots[0][:] = 1
    assert slots.fill(0, content) == b"\0"


def test_nothing_is_kept_of_another_image() -> None:
    slots, content = Slots(2 * BLOCK_NBYTES, 1), np.zeros(2 * BLOCK_NBYTES, np.uint8)
    slots.fill(0, content)
    assert slots.fill(0, content, image=OTHER_IMAGE) == b"\0"
    assert slots.fill(0, content) == b"\0\0"


def test_a_tensor_that_is_written_while_it_is_copied_is_looked_at_anew() -> None:
    """Its checksum is that of what lies in the slot."""
    slots, content = Slots(BLOCK_NBYTES, 1), np.zeros(BLOCK_NBYTES, np.uint8)
    slots.fill(0, content)
    content[100] = 1
    copyto = np.copyto
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "copyto", lambda to, of: (copyto(to, of), to.__setitem__(200, 7)))
        with pytest.raises(AssertionError, match="a whole snapshot"):
            slots.fill(0, content)
    assert slots.fill(0, content) == b"\0"

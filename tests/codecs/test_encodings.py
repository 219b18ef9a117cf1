"""Encodings: every bit pattern comes back, few changes cost little more than they tell, and no bytes do harm."""

import itertools
import math
import random
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from ckptfmt.codecs.encodings import ENCODINGS, NEEDS_BASE, QUICK, choose, decode, encode
from ckptfmt.codecs.lanes import LANES, apply_steps, steps_between
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import CkptError, Code
from tests.spec.pages import table


def view(content):
    return np.ascontiguousarray(content).data.cast("B")


def restored(encoding, stored, nbytes, *, dtype, base=None):
    out = bytearray(nbytes)
    decode(encoding, memoryview(stored), memoryview(out), dtype=dtype, base=base, where="a block")
    return bytes(out)


def check_exact(content, base, dtype, encodings=ENCODINGS):
    """All encodings give the content back; return how many bytes each stores."""
    content, base = view(content), view(base)
    stored = {name: encode(name, content, dtype=dtype, base=base) for name in encodings}
    for name, found in stored.items():
        assert restored(name, found, content.nbytes, dtype=dtype, base=base) == bytes(content), name
    return {name: len(found) for name, found in stored.items()}


def entropy(counts):
    shares = np.asarray(counts, float) / np.sum(counts)
    return -float((shares[shares > 0] * np.log2(shares[shares > 0])).sum())


def order_0_bits(content, base, dtype):
    """The floor for whoever knows the share of changed elements and the histogram of their steps, and nothing else."""
    changed = content != base
    steps = steps_between(content[changed], base[changed], LANES[dtype])
    positions = content.size * entropy([changed.sum(), (~changed).sum()])
    return positions + steps.size * entropy(np.unique(steps, return_counts=True)[1])


def sparse_bfloat16(share, *, count=1 << 19):
    """Weights of which a share, at uniform random places, went one or a few units up or down."""
    rng = np.random.default_rng(17)
    base = rng.normal(0, 0.02, count).astype(ml_dtypes.bfloat16).view(np.uint16)
    places = rng.choice(count, rng.binomial(count, share), replace=False)
    far = 1 + (rng.random(places.size) < 0.05) * rng.geometric(0.7, places.size)
    content = base.copy()
    content[places] += (far * rng.choice([-1, 1], places.size)).astype(np.uint16)
    return content, base


def trained(rate, dtype, *, count=1 << 18):
    """Weights before and after a step of about `rate` each, whatever their size, as an optimizer makes it."""
    rng = np.random.default_rng(5)
    before = rng.normal(0, 0.02, count).astype(np.float32)
    after = before + (rate * rng.normal(0, 0.6, count)).astype(np.float32)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    words = np.dtype(f"u{DTYPES[dtype].nbytes}")
    return after.astype(kind).view(words), before.astype(kind).view(words)


# --- the registry ---------------------------------------------------------------------------------


def test_the_registry_is_the_table_of_the_page():
    """REQ-ENC-001, REQ-ENC-002."""
    rows = [
        tuple(cell.strip("`") for cell in row[:3]) for row in table("55-encodings.md", "Encoding")
    ]

    needs = {name: "yes" if name in NEEDS_BASE else "no" for name in ENCODINGS}
    assert rows == [(name, needs[name], "none" if name == "raw" else name) for name in ENCODINGS]
    assert set(QUICK) < set(ENCODINGS)


def test_the_lanes_are_those_of_the_page():
    """REQ-ENC-013."""
    rows = {
        dtype.strip("`"): (int(nbytes), kind.startswith("sign"))
        for names, nbytes, kind in table("55-encodings.md", "dtypes")
        for dtype in names.split(", ")
    }

    assert rows == {name: (lane.nbytes, lane.signed_magnitude) for name, lane in LANES.items()}
    assert LANES.keys() == DTYPES.keys()


@pytest.mark.parametrize(
    ("encoding", "dtype", "nbytes", "base_nbytes"),
    [
        ("zip", "float32", 8, 8),
        ("xor", "float31", 8, 8),
        ("xor", "float32", 8, 4),
        ("sparse", "float32", 8, None),
        ("planes", "float32", 7, None),
    ],
)
def test_what_makes_no_sense_is_refused(encoding, dtype, nbytes, base_nbytes):
    """REQ-ENC-001."""
    base = None if base_nbytes is None else memoryview(bytes(base_nbytes))
    for call in (
        lambda: encode(encoding, memoryview(bytes(nbytes)), dtype=dtype, base=base),
        lambda: restored(encoding, b"\0", nbytes, dtype=dtype, base=base),
    ):
        with pytest.raises(CkptError) as caught:
            call()
        assert caught.value.code == Code.ARGUMENT


# --- exactness ------------------------------------------------------------------------------------


@st.composite
def blocks(draw):
    """A dtype, and content and base of some number of elements: noise, special patterns, and what is like the base."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    count = draw(st.sampled_from([0, 1, 2, 3, 7, 8, 9, 63, 257, 1025, 5000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lane = LANES[dtype]
    lanes = count * DTYPES[dtype].nbytes // lane.nbytes
    bits = 8 * lane.nbytes
    # Zeros, infinities, NaN with payloads, denormals, the ends of integers: all are next to these.
    edges = [
        0,
        1,
        (1 << bits - 1) - 1,
        1 << bits - 1,
        (1 << bits - 1) + 1,
        (1 << bits) - 1,
        0x7F80 << bits >> 16,
    ]

    def words(kind):
        if kind == "edges":
            return np.array(edges, lane.words)[rng.integers(0, len(edges), lanes)]
        if kind == "zeros":
            return np.zeros(lanes, lane.words)
        return np.frombuffer(rng.bytes(lanes * lane.nbytes), lane.words).copy()

    base = words(draw(st.sampled_from(["noise", "edges", "zeros"])))
    changes = draw(st.sampled_from(["noise", "edges", "none", "near", "one", "runs"]))
    content = words(changes) if changes in {"noise", "edges"} else base.copy()
    if lanes and changes == "near":
        places = rng.random(lanes) < draw(st.sampled_from([0.01, 0.2, 0.6, 1]))
        content[places] += rng.integers(-3, 4, places.sum()).astype(lane.words)
    if lanes and changes == "one":
        content[rng.integers(lanes)] ^= lane.words.type(1 << draw(st.integers(0, bits - 1)))
    if lanes and changes == "runs":
        content[lanes // 3 : lanes // 2] ^= words("noise")[lanes // 3 : lanes // 2]
    return dtype, content, base


@given(blocks())
def test_every_encoding_gives_the_content_back(drawn):
    """REQ-ENC-003, REQ-ENC-012, REQ-ENC-014, REQ-ENC-016, REQ-ENC-017, REQ-ENC-019, REQ-ENC-022."""
    dtype, content, base = drawn
    check_exact(content, base, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int16", "uint16"])
def test_every_pattern_of_16_bits_follows_every_other_distance(dtype):
    """REQ-ENC-022: NaN with any payload, both zeros, denormals, infinities; each from several bases."""
    content = np.arange(1 << 16, dtype=np.uint16)
    for base in (
        content,
        content[::-1],
        np.roll(content, 1),
        np.roll(content, 1 << 15),
        content ^ 0x8001,
    ):
        check_exact(content, base, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "complex64", "int8", "bool"])
def test_a_whole_block_of_noise_comes_back(dtype):
    """REQ-ENC-022."""
    rng = np.random.default_rng(3)
    check_exact(
        rng.integers(0, 256, 1 << 20, np.uint8), rng.integers(0, 256, 1 << 20, np.uint8), dtype
    )


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float64", "float8_e5m2", "float8_e4m3fn"]
)
def test_a_step_is_one_unit_in_the_last_place(dtype):
    """REQ-ENC-015."""
    kind = np.dtype(dtype) if hasattr(np, dtype) else np.dtype(getattr(ml_dtypes, dtype))
    lane = LANES[dtype]
    values = np.array([-1.5, -0.25, 0.25, 1, 1.75, 2, 3], kind)
    words = values.view(lane.words)
    above = (
        np.nextafter(values, np.array(np.inf, kind))
        if kind.itemsize > 1
        else (words + 1).view(kind)
    )
    up = values > 0 if kind.itemsize == 1 else np.ones(values.size, bool)

    assert (
        steps_between(above.view(lane.words), words, lane).tolist() == np.where(up, 2, 1).tolist()
    )
    zeros = np.array([0, 1 << 8 * lane.nbytes - 1], lane.words)
    assert steps_between(zeros, zeros[::-1].copy(), lane).tolist() == [2, 1], (
        "-0.0 is one below 0.0"
    )


@pytest.mark.parametrize("dtype", ["uint8", "int16", "bfloat16", "float8_e4m3fn"])
def test_steps_wrap_around(dtype):
    """REQ-ENC-015: modulo 2 to the power of the bits, so that none is too long."""
    lane = LANES[dtype]
    ends = np.array(
        [0, 1, -1, -2, 1 << 8 * lane.nbytes - 1, (1 << 8 * lane.nbytes - 1) - 1]
    ).astype(lane.words)
    content, base = (
        np.array(side, lane.words) for side in zip(*itertools.product(ends, ends), strict=True)
    )

    assert (apply_steps(steps_between(content, base, lane), base, lane) == content).all()


@pytest.mark.parametrize("encoding", sorted(NEEDS_BASE))
def test_a_wrong_base_gives_other_bytes(encoding):
    """What the digest of the content is for: no encoding sees by itself that a base is the wrong one."""
    content, base = trained(1e-4, "bfloat16", count=4096)
    stored = encode(encoding, view(content), dtype="bfloat16", base=view(base))
    wrong = base.copy()
    wrong[::7] += 1
    try:
        found = restored(encoding, stored, 8192, dtype="bfloat16", base=view(wrong))
    except CkptError as error:
        assert (error.code, encoding) == (Code.ENCODED_FORM, "classes")
        return
    assert found != bytes(view(content))
    assert found != bytes(view(base))


def test_a_delta_applied_twice_is_another_content():
    """As above: what comes out isn't what was saved, and its digest says so."""
    content, base = sparse_bfloat16(0.1, count=4096)
    stored = encode("difference", view(content), dtype="bfloat16", base=view(base))
    once = restored("difference", stored, 8192, dtype="bfloat16", base=view(base))
    twice = restored("difference", stored, 8192, dtype="bfloat16", base=memoryview(once))

    assert once == bytes(view(content)) != twice


def test_memory_that_is_not_aligned_is_as_good():
    content, base = trained(1e-4, "float32", count=1000)
    shifted, shifted_base, out = (bytearray(4001) for _ in range(3))
    shifted[1:], shifted_base[1:] = view(content), view(base)
    for name in ENCODINGS:
        stored = encode(
            name, memoryview(shifted)[1:], dtype="float32", base=memoryview(shifted_base)[1:]
        )
        assert stored == encode(name, view(content), dtype="float32", base=view(base))
        behind = memoryview(b"x" + stored)[1:]
        decode(
            name,
            behind,
            memoryview(out)[1:],
            dtype="float32",
            base=memoryview(shifted_base)[1:],
            where="a block",
        )
        assert out[1:] == shifted[1:]


# --- how many bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.001, 0.003, 0.01, 0.012, 0.03, 0.1, 0.3, 0.5, 0.8])
def test_sparse_is_near_the_entropy_of_what_changed(share):
    """Positions and steps within 6 %, of which 4 are the fixed cost of a block with 500 changes."""
    content, base = sparse_bfloat16(share)
    stored = check_exact(content, base, "bfloat16", ["sparse"])["sparse"]

    assert 8 * stored <= (1.06 if share < 0.01 else 1.025) * order_0_bits(content, base, "bfloat16")


def test_planes_that_are_mostly_zero_are_near_their_entropy_too():
    content, base = sparse_bfloat16(0.1)
    stored = check_exact(content, base, "bfloat16", ["difference"])["difference"]

    assert 8 * stored <= 1.15 * order_0_bits(content, base, "bfloat16")


def test_no_change_and_one_change_are_a_few_bytes():
    _, base = trained(1e-4, "bfloat16")
    one = base.copy()
    one[70_000] += 1
    unchanged, changed = check_exact(base, base, "bfloat16"), check_exact(one, base, "bfloat16")

    assert unchanged["sparse"] == 1
    assert changed["sparse"] <= 12
    for name in ("xor", "difference", "classes"):
        assert max(unchanged[name], changed[name]) <= 48


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8"])
def test_a_constant_block_is_a_few_bytes(dtype):
    content = np.full((1 << 20) // DTYPES[dtype].nbytes, 3, LANES[dtype].words)

    assert check_exact(content, content, dtype, ["planes"])["planes"] <= 16


@pytest.mark.parametrize(("rate", "most"), [(1e-6, 0.8), (1e-5, 0.8), (1e-4, 0.85), (1e-3, 0.95)])
def test_classes_go_below_the_order_0_floor_of_weights(rate, most):
    """Small weights change more often and further: whoever sorts by the base's exponent knows more than a histogram."""
    content, base = trained(rate, "bfloat16")
    stored = check_exact(content, base, "bfloat16", ["classes", "sparse"])

    assert stored["classes"] <= 0.95 * stored["sparse"]
    assert 8 * stored["classes"] <= most * order_0_bits(content, base, "bfloat16")


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4, 1e-3])
def test_of_single_precision_each_encoding_is_shorter_than_the_one_before(rate):
    content, base = trained(rate, "float32")
    stored = check_exact(content, base, "float32", ["planes", "xor", "difference", "classes"])

    assert stored["planes"] < 0.9 * content.nbytes
    assert stored["planes"] > stored["xor"] > stored["difference"] > stored["classes"]


def test_touched_rows_cost_what_is_in_them():
    """As in an embedding: where changes stand in runs, their places are told by zstd, not one by one."""
    rng = np.random.default_rng(1)
    base = rng.normal(size=(256, 1024)).astype(np.float32)
    content = base.copy()
    content[rng.choice(256, 12, replace=False)] *= 1.5
    stored = check_exact(content.view(np.uint32).ravel(), base.view(np.uint32).ravel(), "float32")

    touched_nbytes = 12 * 4096
    assert stored["sparse"] < touched_nbytes


def test_no_encoding_is_much_longer_than_noise():
    rng = np.random.default_rng(2)
    content, base = (rng.integers(0, 1 << 16, 1 << 16, np.uint16) for _ in range(2))

    assert max(check_exact(content, base, "bfloat16").values()) <= 1.01 * content.nbytes


# --- the choice -----------------------------------------------------------------------------------


def chosen(content, base, dtype, among=ENCODINGS):
    name, stored = choose(
        view(content), dtype=dtype, base=None if base is None else view(base), among=among
    )
    if name != "raw":
        found = restored(
            name, stored, content.nbytes, dtype=dtype, base=None if base is None else view(base)
        )
        assert found == bytes(view(content))
    return name, len(stored)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4, 1e-3])
def test_the_choice_is_near_the_best(rate, dtype):
    """REQ-ENC-021."""
    content, base = trained(rate, dtype)
    for among in (ENCODINGS, QUICK):
        stored = check_exact(content, base, dtype, among)
        _, nbytes = chosen(content, base, dtype, among)
        assert nbytes <= 1.015 * min(stored.values())


def test_the_choice_for_few_changes():
    content, base = sparse_bfloat16(0.01)
    assert chosen(content, base, "bfloat16", QUICK)[0] == "sparse"
    assert chosen(base, base, "bfloat16") == ("sparse", 1)
    assert chosen(base, None, "bfloat16")[0] == "planes"


def test_noise_is_stored_raw():
    """REQ-ENC-021."""
    rng = np.random.default_rng(4)
    content, base = (rng.integers(0, 1 << 32, 1 << 16, np.uint32) for _ in range(2))

    assert chosen(content, base, "float32") == ("raw", 0)
    assert chosen(content, None, "int32") == ("raw", 0)
    assert chosen(content[:0], base[:0], "int32") == ("raw", 0)
    assert chosen(np.zeros(64, np.uint8), None, "int8", ["raw", "xor"]) == ("raw", 0)


def test_another_base_than_the_contents_is_no_choice():
    with pytest.raises(CkptError) as caught:
        choose(memoryview(bytes(8)), dtype="float32", base=memoryview(bytes(4)))
    assert caught.value.code == Code.ARGUMENT


# --- bytes that aren't of the form ----------------------------------------------------------------


def refused(encoding, stored, nbytes, dtype="uint8", base=None):
    """The clause by which the bytes are refused."""
    with pytest.raises(CkptError) as caught:
        restored(encoding, stored, nbytes, dtype=dtype, base=base)
    assert (caught.value.code, caught.value.where) == (Code.ENCODED_FORM, "a block")
    return caught.value.requirement


def number(value):
    groups = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([group | 0x80 for group in groups[:-1]] + groups[-1:])


def framed(frame):
    return b"\x02" + number(len(frame)) + frame


def compressed(content, **options):
    return zstandard.ZstdCompressor(**options).compress(content)


CONTENT = bytes(range(50)) * 2


def test_a_frame_of_any_compressor_is_read():
    """REQ-ENC-009: what binds is the frame, not how it was made."""
    large = random.Random(1).randbytes(3000) * 700
    for content, options in itertools.product(
        (CONTENT * 9, large),
        ({"level": 1}, {"level": 19}, {"level": -5}, {"level": 3, "write_checksum": True}),
    ):
        stored = framed(compressed(content, **options))
        assert restored("planes", stored, len(content), dtype="uint8") == content


@pytest.mark.parametrize(
    ("frame", "said_nbytes"),
    [
        (compressed(CONTENT, write_content_size=False), None),
        (compressed(CONTENT[:99]), None),
        (compressed(CONTENT + b"x"), None),
        (compressed(CONTENT) + b"x", None),
        (compressed(CONTENT[:50]) + compressed(CONTENT[50:]), None),
        (compressed(CONTENT)[:-1], None),
        (compressed(CONTENT)[:3], None),
        (b"", None),
        (b"\x50\x2a\x4d\x18\x64\0\0\0" + CONTENT, None),
        (compressed(CONTENT)[:-3] + b"\xff\xff\xff", None),
        (compressed(CONTENT, dict_data=zstandard.ZstdCompressionDict(bytes(range(256)) * 9)), None),
        (compressed(CONTENT), 500),
    ],
    ids=["no size", "short", "long", "tail", "two", "cut", "no header", "empty", "skippable", ("bad"
    " block"),
         "raw dictionary", "other size"],
)  # fmt: skip
def test_another_frame_is_refused(frame, said_nbytes):
    """REQ-ENC-009."""
    if len(frame) > len(CONTENT) and said_nbytes is None:
        assert refused("planes", framed(frame), len(CONTENT)) in {"REQ-ENC-007", "REQ-ENC-009"}
        return
    assert refused("planes", framed(frame), said_nbytes or len(CONTENT)) == "REQ-ENC-009"


def test_a_frame_with_a_dictionary_is_refused():
    """REQ-ENC-009: by the id that it states; the library would fail later anyway."""
    samples: list[bytes | bytearray | memoryview] = [bytes(range(k, k + 40)) * 5 for k in range(60)]
    trained_dictionary = zstandard.train_dictionary(1024, samples * 20)
    frame = compressed(CONTENT, dict_data=trained_dictionary)
    assert zstandard.get_frame_parameters(frame).dict_id

    assert refused("planes", framed(frame), len(CONTENT)) == "REQ-ENC-009"


@pytest.mark.parametrize(("window", "is_read"), [(0, True), (1, False), (21 << 3, False)])
def test_a_window_wider_than_the_content_is_refused(window, is_read):
    """REQ-ENC-009: before memory is taken for it. The bytes stand for 1024, 1152 and 2^31 bytes."""
    # Magic, a descriptor with a window and eight bytes of size, and one block: a byte repeated.
    head = b"\x28\xb5\x2f\xfd\xc0" + bytes((window,)) + len(CONTENT).to_bytes(8, "little")
    stored = framed(head + (len(CONTENT) << 3 | 3).to_bytes(3, "little") + b"x")

    if is_read:
        assert restored("planes", stored, len(CONTENT), dtype="uint8") == b"x" * len(CONTENT)
    else:
        assert refused("planes", stored, len(CONTENT)) == "REQ-ENC-009"


def test_a_bomb_takes_no_memory():
    """REQ-ENC-005: 256 MiB in 8 KiB, which the library inflates whatever limit it is given."""
    narrow = zstandard.ZstdCompressionParameters.from_level(1, window_log=17, source_size=1 << 28)
    bombs = [
        framed(compressed(bytes(1 << 28))),
        framed(compressed(bytes(1 << 28), compression_params=narrow)),
    ]
    base = memoryview(bytes(1 << 20))
    tracemalloc.start()
    try:
        for bomb, encoding in itertools.product(bombs, ("planes", "xor", "difference")):
            assert refused(encoding, bomb, 1 << 20, "uint8", base) == "REQ-ENC-009"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 23


#: What three lanes of a byte may not be stored as.
REFUSALS = [
    ("raw", "01 02", "REQ-ENC-006"),
    ("raw", "01 02 03 04", "REQ-ENC-006"),
    ("planes", "", "REQ-ENC-006"),
    ("planes", "00 01 02", "REQ-ENC-006"),
    ("planes", "00 01 02 03 04", "REQ-ENC-006"),
    ("planes", "04 07", "REQ-ENC-008"),
    ("planes", "02 04", "REQ-ENC-007"),
    ("planes", "02 80 00", "REQ-ENC-007"),
    ("planes", "02 ff ff ff ff 0f", "REQ-ENC-007"),
    ("planes", "02 03 00 00", "REQ-ENC-006"),
    ("planes", "02 03 00 00 00", "REQ-ENC-009"),
    # A set: twice the count, low bits, zeros, unary, low parts; then the bytes.
    ("planes", "03 08", "REQ-ENC-007"),
    ("planes", "03 04 00", "REQ-ENC-011"),
    ("planes", "03 03 00", "REQ-ENC-006"),
    ("planes", "03 02 02", "REQ-ENC-011"),
    ("planes", "03 02 00 04", "REQ-ENC-007"),
    ("planes", "03 02 00 02 00 0c 00 05", "REQ-ENC-010"),
    ("planes", "03 02 00 02 00 02 00 05", "REQ-ENC-011"),
    ("planes", "03 02 00 02 00 06 00 05", "REQ-ENC-011"),
    ("planes", "03 02 00 02 00 00 00 05", "REQ-ENC-011"),
    ("planes", "03 02 01 01 00 02 01 00 05", "REQ-ENC-011"),
    ("planes", "03 02 01 01 00 02 02 00 05", "REQ-ENC-010"),
    ("planes", "03 02 00 02 00 04 03", "REQ-ENC-008"),
    ("planes", "03 02 00 02 00 04 00", "REQ-ENC-006"),
    # Changes: a set, signs, levels, what is left.
    ("sparse", "02 00 00 00 01 00 02", "REQ-ENC-010"),
    ("sparse", "02 00 00 00 01 00 01 10", "REQ-ENC-018"),
    ("sparse", "02 00 00 00 01 00 01 02 00 00", "REQ-ENC-018"),
    ("sparse", "02 00 00 00 01 00 01 00 00 7f", "REQ-ENC-018"),
    ("sparse", "02 00 00 00 01 00 00 00 00 80", "REQ-ENC-018"),
    ("sparse", "02 00 00 00 01 00 00 01 01 00 7f", "REQ-ENC-018"),
    ("sparse", "02 00 00 00 01 00 00 01 01 00 ff", "REQ-ENC-018"),
    ("sparse", "02 00 00 00 01 00 00 01 04", "REQ-ENC-007"),
    # Cuts; then low bits, low parts and planes of each class.
    ("classes", "20 " + bytes(range(1, 33)).hex(), "REQ-ENC-020"),
    ("classes", "01 00", "REQ-ENC-020"),
    ("classes", "02 05 04", "REQ-ENC-020"),
    ("classes", "02 05 05", "REQ-ENC-020"),
    # Steps of a class: low bits, signs, low parts, planes.
    ("classes", "00 08", "REQ-ENC-023"),
    ("classes", "00 fe", "REQ-ENC-023"),
    ("classes", "00 03 00 00 00 00 20 20 20", "REQ-ENC-023"),
    ("classes", "00 03 00 08", "REQ-ENC-010"),
    ("classes", "00 03 00 00 40", "REQ-ENC-010"),
    ("classes", "00 04 00 00 00", "REQ-ENC-006"),
]


def test_what_stands_beside_what_is_refused_is_read():
    """The forms of which the refused ones are the neighbours."""
    for encoding, stored, content in [
        ("planes", "03 02 00 02 00 04 00 05", "000005"),
        ("planes", "03 02 01 01 00 02 00 00 05", "000005"),
        ("sparse", "02 00 00 00 01 00 00 00 00 7f", "800000"),
        ("sparse", "02 00 00 00 01 00 00 01 01 00 7e", "800000"),
        ("sparse", "02 00 00 00 01 00 01 01 00", "010000"),
        ("classes", "1f " + bytes(range(1, 32)).hex() + " ff 00", "000000"),
        ("classes", "00 03 00 00 00 00 1f 1f 1f", "7c7c7c"),
    ]:
        base = memoryview(bytes(3))
        assert (
            restored(encoding, bytes.fromhex(stored), 3, dtype="uint8", base=base).hex() == content
        )


@pytest.mark.parametrize(("encoding", "stored", "clause"), REFUSALS)
def test_other_bytes_are_refused(encoding, stored, clause):
    """REQ-ENC-006, REQ-ENC-007, REQ-ENC-008, REQ-ENC-010, REQ-ENC-011, REQ-ENC-018, REQ-ENC-020, REQ-ENC-023."""
    assert refused(encoding, bytes.fromhex(stored), 3, base=memoryview(bytes(3))) == clause


def test_a_number_has_one_form():
    """REQ-ENC-007."""
    assert refused("planes", bytes.fromhex("028000"), 200) == "REQ-ENC-007"
    assert refused("planes", bytes.fromhex("02c901"), 200) == "REQ-ENC-007", "201 is too many"
    assert refused("planes", bytes.fromhex("02c801"), 200) == "REQ-ENC-006", "200 aren't there"


def test_bytes_below_a_sets_smaller_half():
    """REQ-ENC-011: who stores a set of nearly all places says which are missing."""
    assert encode("sparse", memoryview(bytes(8)), dtype="int8", base=memoryview(bytes(8))) == b"\0"
    all_places = encode("sparse", memoryview(b"\1" * 8), dtype="int8", base=memoryview(bytes(8)))
    assert all_places[0] == 1
    assert refused("sparse", b"\x0a\0\0" + bytes(9), 8, base=memoryview(bytes(8))) == "REQ-ENC-011"


@pytest.fixture(scope="module")
def valid():
    """Stored bytes of all forms: dtype, encoding, base, stored."""
    found = []
    for dtype, rate in itertools.product(("bfloat16", "float32", "uint8"), (1e-5, 1e-3)):
        content, base = trained(rate, "float32", count=1024)
        base = bytes(view(base))
        found += [
            (dtype, name, base, encode(name, view(content), dtype=dtype, base=memoryview(base)))
            for name in ENCODINGS
        ]
    few, few_base = sparse_bfloat16(0.02, count=4096)
    found += [
        (
            "bfloat16",
            name,
            bytes(view(few_base)),
            encode(name, view(few), dtype="bfloat16", base=view(few_base)),
        )
        for name in ENCODINGS
    ]
    return found


def decode_or_refuse(encoding, stored, nbytes, dtype, base):
    """Whether the bytes are of the form. Nothing but ENCODED_FORM may come out of it."""
    try:
        restored(encoding, stored, nbytes, dtype=dtype, base=memoryview(base))
    except CkptError as error:
        assert error.code == Code.ENCODED_FORM
        assert str(error.requirement).startswith("REQ-ENC-")
        return False
    return True


@given(
    st.binary(max_size=200),
    st.sampled_from(ENCODINGS),
    st.sampled_from(["uint8", "bfloat16", "float32", "float64"]),
    st.sampled_from([0, 8, 64, 4096]),
)
@example(b"\x03" + b"\x80" * 40, "planes", "uint8", 64)
@example(b"\x01" + b"\x00" * 17, "sparse", "uint8", 4096)
def test_any_bytes_are_decoded_or_refused(stored, encoding, dtype, nbytes):
    """REQ-ENC-005."""
    decode_or_refuse(encoding, stored, nbytes, dtype, memoryview(bytes(range(256)) * 16)[:nbytes])


@given(st.data())
def test_damaged_bytes_are_decoded_or_refused(valid, data):
    """REQ-ENC-005. What decodes to another content is for its digest to see.

    REQ-ENC-004, that the stored bytes' own digest is checked before, is the reader's: its tests
    show it, not this one.
    """
    dtype, encoding, base, stored = data.draw(st.sampled_from(valid))
    damaged = bytearray(stored)
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["flip", "byte", "cut", "insert"]))
        # The head says most: half of the damage goes there.
        at = data.draw(
            st.integers(0, max(0, len(damaged) - 1))
            | st.integers(0, min(40, max(0, len(damaged) - 1)))
        )
        if kind == "cut" or not damaged:
            del damaged[at:]
        elif kind == "flip":
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "byte":
            damaged[at] = data.draw(st.sampled_from([0, 1, 2, 3, 0x7F, 0x80, 0xFF]))
        else:
            damaged[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    decode_or_refuse(encoding, bytes(damaged), len(base), dtype, base)


def test_every_truncation_is_refused(valid):
    """REQ-ENC-006."""
    for dtype, encoding, base, stored in valid:
        for end in {*range(0, len(stored), 37), *range(max(0, len(stored) - 9), len(stored))}:
            assert not decode_or_refuse(encoding, stored[:end], len(base), dtype, base), (
                encoding,
                dtype,
                end,
            )
        assert not decode_or_refuse(encoding, stored + b"\0", len(base), dtype, base)


def test_no_bytes_take_more_memory_than_their_content_allows():
    """REQ-ENC-005: a few times content and stored bytes together, whatever they say."""
    rng = random.Random(6)
    nbytes = 1 << 16
    base = memoryview(rng.randbytes(nbytes))
    worst = 0.0
    for _ in range(400):
        encoding = rng.choice(ENCODINGS[1:])
        head = bytes(
            rng.choice([0, 1, 2, 3, 15, 0x7F, 0x80, 0xFF]) for _ in range(rng.randrange(1, 12))
        )
        stored = head + rng.randbytes(rng.choice([0, 50, 5000]))
        tracemalloc.start()
        decode_or_refuse(
            encoding, stored, nbytes, rng.choice(["uint8", "bfloat16", "float32"]), base
        )
        worst = max(worst, tracemalloc.get_traced_memory()[1] / (nbytes + len(stored)))
        tracemalloc.stop()
    assert worst < 48


def test_lanes_of_a_full_set_are_the_most_memory():
    """REQ-ENC-005: the smallest stored bytes that make the most of the decoder."""
    nbytes = 1 << 16
    everything_up_15 = b"\x01" + b"\x01\x00" + b"\x0f" + b"\x01" * 15 + b"\x01\x00"
    tracemalloc.start()
    restored("sparse", everything_up_15, nbytes, dtype="uint8", base=memoryview(bytes(nbytes)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 48 * nbytes


def test_the_floor_is_what_it_says():
    """The yardstick itself: two elements of four changed, one up and one down, are four bits and two."""
    base = np.zeros(4, np.uint16)
    content = np.array([1, 0, 0x8000, 0], np.uint16)

    assert order_0_bits(content, base, "bfloat16") == pytest.approx(4 * 1 + 2 * 1)
    assert math.isclose(entropy([1, 1, 2]), 1.5)

"""Every bit of a small checkpoint flipped, every length cut: nothing is accepted, and the damaged file is named."""

import functools

import pytest

from ckptfmt.commit import decision as commit
from ckptfmt.documents.index import Index
from ckptfmt.documents.manifest import parse_register
from ckptfmt.documents.part import Part
from ckptfmt.errors import CkptError, Code, FormatError, IntegrityError
from ckptfmt.layout.merge import check_index_tiling
from ckptfmt.read import files, reader
from ckptfmt.read import verify as verify_module
from ckptfmt.store.memory import MemoryStore
from tests.builders import read_all, small_files, verify

FILES = small_files()
OTHERS = small_files(step=4)
EVERYTHING = read_all(MemoryStore.from_snapshot(FILES))


@pytest.fixture(autouse=True)
def _parse_each_document_once(monkeypatch):
    """Parsing is a pure function of the bytes, so that the same bytes needn't be parsed a hundred thousand times."""
    monkeypatch.setattr(commit, "parse_register", functools.cache(parse_register))
    monkeypatch.setattr(Index, "parse", _cached(Index.parse))
    monkeypatch.setattr(Part, "parse", _cached(Part.parse))
    for module in (reader, verify_module):
        monkeypatch.setattr(module, "parse_tree", functools.cache(module.parse_tree))
    tiled: list[Index] = []

    def check_once(index):
        if not any(index is known for known in tiled):
            check_index_tiling(index)
            tiled.append(index)

    monkeypatch.setattr(files, "check_index_tiling", check_once)


def _cached(parse):
    """Return a `parse` that keeps its answers, and needs no cache of tables."""
    kept = functools.cache(parse)

    def parse_once(content, **arguments):
        arguments.pop("known", None)
        return kept(content, **arguments)

    return staticmethod(parse_once)


def assert_refused(path, content):
    """Check that verify refuses a checkpoint with one file damaged, and that load does or isn't concerned."""
    store = MemoryStore.from_snapshot({**FILES, path: content})
    report = verify(store)
    assert report.violations, "accepted"
    for violation in report.violations:
        assert isinstance(violation, FormatError | IntegrityError), violation
        assert path in (violation.where or ""), violation
    try:
        loaded = read_all(store)
    except CkptError as error:
        assert isinstance(error, FormatError | IntegrityError)
        assert path in (error.where or ""), error
        return report.violations
    # Load reads no more of a shard than the blocks it wants: not the header, nor a second copy of a
    # replica.
    assert loaded == EVERYTHING
    assert path.endswith(".safetensors")
    return report.violations


def header_nbytes(content):
    return 8 + int.from_bytes(content[:8], "little")


def test_the_checkpoint_is_sound_and_small():
    assert verify(MemoryStore.from_snapshot(FILES)).valid
    assert 6_000 < sum(map(len, FILES.values())) < 10_000
    assert {path.partition("-")[0] for path in FILES} >= {
        "weights",
        "weights_buffers",
        "weights_opaque",
        "optimizer",
    }


def every_file():
    """The files; those of the second writer, which are of the same kinds, only where all there is is to be run."""
    return [
        pytest.param(path, marks=[pytest.mark.exhaustive] if "-00001." in path else [])
        for path in sorted(FILES)
    ]


#: Which bits, bytes or lengths are tried: by default one in so many, which meets each place of a
#: bit in its byte.
STRIDES = [23, pytest.param(1, marks=pytest.mark.exhaustive)]


@pytest.mark.slow
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("path", every_file())
def test_no_flipped_bit_is_accepted(path, stride):
    """Row 54; REQ-DOC-001, REQ-DOC-009, REQ-DOC-022, REQ-DOC-025, REQ-PRT-008, REQ-OPN-003, REQ-OPN-006."""
    content = FILES[path]
    for bit in range(0, 8 * len(content), stride):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        violations = assert_refused(path, bytes(damaged))
        if path.endswith(".safetensors"):
            (violation,) = violations
            in_header = bit // 8 < header_nbytes(content)
            assert violation.code == (Code.HEADER_DIGEST if in_header else Code.BLOCK_DIGEST)
            begin, end = violation.where.rpartition("[")[2].rstrip("]").split(":")
            assert int(begin) <= bit // 8 < int(end), "the byte range doesn't have the damage"


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("path", sorted(FILES))
def test_no_inverted_byte_is_accepted(path, stride):
    content = FILES[path]
    for at in range(0, len(content), stride):
        assert_refused(path, content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("path", sorted(FILES))
def test_no_cut_file_is_accepted(path, stride):
    """Row 51; REQ-CKP-003."""
    content = FILES[path]
    for nbytes in range(0, len(content), stride):
        violations = assert_refused(path, content[:nbytes])
        if path != "manifest.json":
            assert {violation.code for violation in violations} == {Code.FILE_NBYTES}


@pytest.mark.parametrize("added", [b"\0", b" ", b"\n", b"PK\5\6" + bytes(18)])
@pytest.mark.parametrize("path", sorted(FILES))
def test_no_lengthened_file_is_accepted(path, added):
    """Rows 52 and 79; REQ-CKP-003."""
    violations = assert_refused(path, FILES[path] + added)
    assert {v.code for v in violations} <= {
        Code.FILE_NBYTES,
        Code.DOC_SYNTAX,
        Code.DOC_NOT_CANONICAL,
    }


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("path", sorted(FILES))
def test_no_torn_file_is_accepted(path, stride):
    """Row 53: the right size, and zeros from some byte on."""
    content = FILES[path]
    for at in range(0, len(content), stride):
        torn = content[:at] + bytes(len(content) - at)
        if torn != content:
            assert_refused(path, torn)


@pytest.mark.parametrize("path", sorted(FILES))
def test_a_missing_file_is_named(path):
    """Rows 1, 2 and 48; REQ-CKP-004, REQ-MAN-001."""
    store = MemoryStore.from_snapshot(
        {name: content for name, content in FILES.items() if name != path}
    )
    violations = verify(store).violations
    expected = Code.NOT_COMMITTED if path == "manifest.json" else Code.FILE_MISSING
    assert [violation.code for violation in violations] == [expected]
    assert violations[0].where == path
    with pytest.raises(CkptError) as raised:
        read_all(store)
    assert (raised.value.code, raised.value.where) == (expected, path)


@pytest.mark.parametrize("one", sorted(FILES))
def test_no_two_files_can_be_swapped(one):
    """Row 55: a misdirected write."""
    for other in FILES:
        if FILES[one] != FILES[other]:
            files = {**FILES, one: FILES[other], other: FILES[one]}
            report = verify(MemoryStore.from_snapshot(files))
            assert not report.valid
            assert any(one in str(v.where) or other in str(v.where) for v in report.violations)


def test_files_of_another_checkpoint_are_not_taken():
    """Row 56: everything fits but the digest; REQ-OPN-003."""
    for path in FILES:
        if FILES[path] != OTHERS[path] and path != "manifest.json":
            report = verify(MemoryStore.from_snapshot({**FILES, path: OTHERS[path]}))
            assert report.violations[0].code in (Code.DOC_DIGEST, Code.FILE_NBYTES)


def test_extra_files_are_ignored_with_a_warning():
    """Rows 49 and 50; REQ-CKP-005."""
    extra = {"notes.txt": b"x", "weights-0123456789abcdee-00000.safetensors": b"", "parts/x": b"y"}
    store = MemoryStore.from_snapshot({**FILES, **extra})
    report = verify(store)
    assert report.valid
    assert sorted(warning.partition(" ")[0] for warning in report.warnings) == sorted(extra)
    assert read_all(store) == EVERYTHING

"""Cold and warm: what a benchmark claims of the page cache is what the kernel says."""

import os

import pytest

from benchmarks.cold import cached_nbytes, check_cold, check_warm, list_files, make_cold, make_warm
from tests.benchmarks.storage import skip_unless_cold

PAGE_NBYTES = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def files(tmp_path):
    skip_unless_cold(tmp_path)
    (tmp_path / "parts").mkdir()
    for name, nbytes in (("shard", 50 * PAGE_NBYTES + 1), ("parts/one", 3)):
        (tmp_path / name).write_bytes(bytes(nbytes))
    found = list_files(tmp_path)
    make_cold(found)
    return found


def test_all_files_of_a_checkpoint_are_meant(files):
    assert [file.name for file in files] == ["one", "shard"]
    assert list_files(files[0]) == [files[0]]


def test_cold_files_have_no_page_and_asking_brings_none(files):
    assert [cached_nbytes(files) for _ in range(3)] == [0, 0, 0]
    check_cold(files)


def test_warm_files_have_all_pages(files):
    make_warm(files)

    assert cached_nbytes(files) == 52 * PAGE_NBYTES
    check_warm(files)


def test_one_page_is_enough_to_be_not_cold_and_not_enough_to_be_warm(files):
    with files[1].open("rb", buffering=0) as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        opened.read(1)

    assert cached_nbytes(files) == PAGE_NBYTES
    with pytest.raises(RuntimeError, match="isn't cold"):
        check_cold(files)
    with pytest.raises(RuntimeError, match="isn't warm"):
        check_warm(files)


def test_what_is_dirty_gets_cold_too(files):
    files[1].write_bytes(bytes(7 * PAGE_NBYTES))

    make_cold(files)

    assert cached_nbytes(files) == 0
    assert files[1].read_bytes() == bytes(7 * PAGE_NBYTES)

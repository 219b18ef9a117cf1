"""`validate --split` and `--join`: machines that share a check find what one finds."""

import json

import numpy as np
import pytest

import ckptfmt
from ckptfmt.cli.validate import parse_split
from ckptfmt.read.report import Report
from ckptfmt.read.verify import verify_checkpoint
from ckptfmt.store import LocalStore
from tests.cli.test_validate import flip

BLOCK = 4096


@pytest.fixture
def path(tmp_path):
    """A checkpoint of blocks in boxes of several sizes."""
    arrays = {
        f"w{count}": np.arange(count, dtype=np.float32) for count in (0, 1, 1023, 1024, 5000, 9000)
    }
    ckptfmt.save(tmp_path / "one", ckptfmt.State(weights=arrays), step=1, block_nbytes=BLOCK)
    return tmp_path / "one"


def split(call, path, count, folder):
    """Check each slice, as one machine each would; return the files with what they printed, and the codes."""
    files, codes = [], []
    for number in range(1, count + 1):
        code, out, _ = call("validate", path, "--split", f"{number}/{count}", "--json")
        file = folder / f"part{number}.json"
        file.write_text(out)
        files.append(file)
        codes.append(code)
    return files, codes


@pytest.mark.parametrize("count", [1, 2, 3, 7, 30])
def test_every_damaged_block_is_found_by_exactly_one_slice(call, call_json, path, tmp_path, count):
    shard = next(path.glob("weights-*"))
    content = bytearray(shard.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    for byte in range(begin, len(content), 64):
        content[byte] ^= 1
    shard.write_bytes(content)
    whole = [one["where"] for one in call_json("validate", path)[1]["violations"]]

    files, codes = split(call, path, count, tmp_path)

    assert len(whole) == 1 + 1 + 1 + 5 + 9
    assert sorted(
        one["where"] for file in files for one in json.loads(file.read_text())["violations"]
    ) == sorted(whole)
    assert 1 in codes
    code, answer = call_json("validate", "--join", *files)
    assert (code, answer["verdict"]) == (1, "invalid")
    assert sorted(one["where"] for one in answer["violations"]) == sorted(whole)


def test_a_sound_checkpoint_is_valid_once_all_slices_are_there(call, path, tmp_path):
    files, codes = split(call, path, 3, tmp_path)

    assert codes == [0, 0, 0]
    assert call("validate", path, "--split", "2/3")[1].endswith("slice 2 of 3 of the blocks\n")
    code, out, _ = call("validate", "--join", *files)
    assert (code, out.startswith("valid  ")) == (0, True)
    assert out.rstrip().endswith("checked in 3 slices")
    code, out, err = call("validate", "--join", files[0], files[2])
    assert (code, out) == (2, "")
    assert "of 3 slices, 2 aren't there" in err
    assert "slice 1 is that of" in call("validate", "--join", *files, files[0])[2]


def test_what_all_machines_read_is_said_once(call_json, call, path, tmp_path):
    flip(next(path.glob("index-*")), -1)

    files, codes = split(call, path, 2, tmp_path)

    assert codes == [1, 1]
    assert len(call_json("validate", "--join", *files)[1]["violations"]) == 1


def test_the_slices_share_the_blocks(path):
    """Each reads its part of them, and the documents."""
    nbytes = []
    for share in ((0, 1), (0, 4), (1, 4), (2, 4), (3, 4)):
        report = Report(target="x", kind="checkpoint", share=share)
        verify_checkpoint(LocalStore(path, writable=False), report)
        assert report.valid
        nbytes.append(report.nbytes)
    blocks = 4 * (1 + 1023 + 1024 + 5000 + 9000)
    documents = nbytes[0] - blocks
    assert sum(nbytes[1:]) == blocks + 4 * documents
    assert max(nbytes[1:]) - documents < blocks // 2


def test_a_run_is_shared_too(call, run_path, tmp_path):
    flip(next((run_path / "step-00000030-l0001").glob("weights-*")), -1)

    files, codes = split(call, run_path, 2, tmp_path)

    assert sorted(codes) == [0, 1]
    assert call("validate", "--join", *files)[0] == 1


def test_reports_of_different_checks_are_not_joined(call, path, checkpoint_path, tmp_path):
    files, _ = split(call, path, 2, tmp_path)
    (tmp_path / "other").mkdir()
    others, _ = split(call, checkpoint_path, 2, tmp_path / "other")
    code, _, err = call("validate", "--join", files[0], others[1])
    assert (code, "it isn't of the same checkpoints" in err) == (2, True)
    (tmp_path / "three").mkdir()
    thirds, _ = split(call, path, 3, tmp_path / "three")
    assert "3 slices, where" in call("validate", "--join", files[0], thirds[1])[2]
    for content in ("", "[]", "{}", '{"verdict": "valid"}', "[" * 100_000):
        (tmp_path / "no.json").write_text(content)
        code, _, err = call("validate", "--join", tmp_path / "no.json")
        assert (code, "not the report of a slice" in err) == (2, True)
    assert call("validate", "--join", tmp_path / "nowhere.json")[0] == 2


@pytest.mark.parametrize(
    "text", ["0/2", "3/2", "1", "1/", "/2", "a/b", "1/0", "-1/2", "1/99999999"]
)
def test_what_is_no_slice_is_refused(call, path, text):
    code, out, err = call("validate", path, f"--split={text}")

    assert (code, out) == (2, "")
    assert err.startswith("error: ARGUMENT at --split")


def test_a_path_or_reports_are_needed(call, path):
    assert call("validate")[0] == 2
    assert call("validate", path, "--join", path)[0] == 2
    assert parse_split("8/8") == (7, 8)

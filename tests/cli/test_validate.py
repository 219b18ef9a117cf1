"""What `validate` says of sound, damaged and hostile directories, and by which exit code."""

import errno
import os
import pathlib
import socket

import pytest

from ckptfmt.documents.canonical import dump_document
from ckptfmt.documents.manifest import checkpoint_name
from ckptfmt.errors import Code, err
from ckptfmt.store import LocalStore
from ckptfmt.store.posix import PosixCalls
from tests.cli.conftest import ATTEMPT

INDEX = f"index-{ATTEMPT}.msgpack"
PART = f"parts/{ATTEMPT}-00001.msgpack"
SHARD = f"weights-{ATTEMPT}-00001.safetensors"


def flip(path, byte):
    """Change one byte of a file; a negative number counts from the end."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 0x01
    path.write_bytes(content)


def header_nbytes(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def layers_begin(path):
    """The first byte of the tensor layers.0.w, which has several blocks: the 8 bytes of `scale` come before it."""
    return header_nbytes(path) + 8


def found(call_json, path):
    """Codes and places of the violations, in order."""
    code, answer = call_json("validate", path)
    assert code == 1
    assert (answer["valid"], answer["verdict"]) == (False, "invalid")
    return [(violation["code"], violation["where"]) for violation in answer["violations"]]


# Sound


def test_a_sound_checkpoint_is_valid(call, checkpoint_path):
    code, out, err = call("validate", checkpoint_path)

    assert (code, err) == (0, "")
    assert out.startswith(f"valid  {checkpoint_path}: 1 checkpoint, ")
    assert out.count("\n") == 1


def test_json_says_all_of_the_report_and_keeps_own_bytes_apart(call_json, checkpoint_path):
    code, answer = call_json("validate", checkpoint_path)

    assert code == 0
    assert answer.keys() >= {
        "version",
        "target",
        "kind",
        "violations",
        "warnings",
        "checkpoints",
        "nbytes",
    }
    assert (answer["format"], answer["kind"], answer["valid"], answer["verdict"]) == (
        "1.0",
        "checkpoint",
        True,
        "valid",
    )
    assert answer["own"] == {
        "valid": True,
        "complete": True,
        "nbytes": answer["nbytes"],
        "violation_count": 0,
    }
    assert (answer["references"], answer["closure"], answer["failure"]) == ([], [], None)
    assert answer["nbytes"] > 12 * 700 * 4 * 2


def test_a_run_is_checked_with_all_its_checkpoints(call_json, run_path):
    code, answer = call_json("validate", run_path)

    assert (code, answer["kind"]) == (0, "run")
    assert sorted(answer["checkpoints"]) == [
        checkpoint_name(step, launch)
        for step, launch in ((10, 1), (20, 1), (30, 1), (30, 2), (50, 2))
    ]
    assert [warning for warning in answer["warnings"] if "step-00000040-l0001" in warning]


def test_quiet_says_nothing(call, checkpoint_path):
    assert call("validate", checkpoint_path, "--quiet") == (0, "", "")

    (checkpoint_path / INDEX).unlink()

    assert call("validate", checkpoint_path, "--quiet") == (1, "", "")


def test_an_extra_file_is_a_warning(call, checkpoint_path):
    (checkpoint_path / "notes.txt").write_text("mine")

    code, out, _ = call("validate", checkpoint_path)

    assert code == 0
    assert "warning  notes.txt" in out
    assert "1 warning" in out.splitlines()[-1]


# Damaged


def test_a_changed_byte_of_a_block_is_named_with_its_range(call_json, checkpoint_path):
    begin = layers_begin(checkpoint_path / SHARD)
    flip(checkpoint_path / SHARD, begin + 4096 + 7)

    assert found(call_json, checkpoint_path) == [
        ("BLOCK_DIGEST", f"{SHARD}[{begin + 4096}:{begin + 8192}]")
    ]


def test_every_changed_block_is_named(call_json, checkpoint_path):
    begin = layers_begin(checkpoint_path / SHARD)
    for block in (0, 2):
        flip(checkpoint_path / SHARD, begin + block * 4096)

    places = [where for code, where in found(call_json, checkpoint_path) if code == "BLOCK_DIGEST"]

    assert places == [
        f"{SHARD}[{begin}:{begin + 4096}]",
        f"{SHARD}[{begin + 8192}:{begin + 12288}]",
    ]


@pytest.mark.parametrize("byte", [0, 8, 20, -1], ids=["length", "brace", "json", "padding"])
def test_a_changed_byte_of_a_header_is_named_with_its_range(call_json, checkpoint_path, byte):
    end = header_nbytes(checkpoint_path / SHARD)
    flip(checkpoint_path / SHARD, byte if byte >= 0 else end - 1)

    assert found(call_json, checkpoint_path) == [("HEADER_DIGEST", f"{SHARD}[0:{end}]")]


@pytest.mark.parametrize(
    "change", [lambda content: content[:-1], lambda content: content + b"\0"], ids=["short", "long"]
)
@pytest.mark.parametrize("name", [SHARD, PART, INDEX])
def test_a_file_of_another_size_is_named(call_json, checkpoint_path, name, change):
    (checkpoint_path / name).write_bytes(change((checkpoint_path / name).read_bytes()))

    assert found(call_json, checkpoint_path) == [("FILE_NBYTES", name)]


@pytest.mark.parametrize("name", [SHARD, PART, INDEX])
def test_a_missing_file_is_named(call_json, checkpoint_path, name):
    (checkpoint_path / name).unlink()

    assert found(call_json, checkpoint_path) == [("FILE_MISSING", name)]


@pytest.mark.parametrize("name", [PART, INDEX])
@pytest.mark.parametrize("byte", [0, 3, 100, -1])
def test_a_changed_byte_of_a_document_is_found(call_json, checkpoint_path, name, byte):
    flip(checkpoint_path / name, byte)

    ((code, where),) = found(call_json, checkpoint_path)

    assert where.startswith(name)
    assert code.startswith(("DOC_", "MSGPACK_"))


def test_a_changed_digit_of_the_manifest_is_found(call_json, checkpoint_path):
    manifest = checkpoint_path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":3', b'"step":4'))

    assert found(call_json, checkpoint_path) == [("DOC_DIGEST", "manifest.json")]


def test_text_names_code_place_clause_message_and_remedy(call, checkpoint_path):
    begin = layers_begin(checkpoint_path / SHARD)
    flip(checkpoint_path / SHARD, begin)

    code, out, _ = call("validate", checkpoint_path)

    assert code == 1
    first, remedy, empty, verdict = out.splitlines()
    assert first.startswith(
        f"BLOCK_DIGEST  {SHARD}[{begin}:{begin + 4096}]  REQ-OPN-006  block 0 of weights"
    )
    assert remedy.startswith("  remedy: ")
    assert (empty, verdict[:7]) == ("", "invalid")


# In a run


def test_a_damaged_checkpoint_of_a_run_is_named(call_json, run_path):
    name = checkpoint_name(20, 1)
    (shard,) = (run_path / name).glob("weights-*")
    flip(shard, -1)

    ((code, where),) = found(call_json, run_path)

    assert code == "BLOCK_DIGEST"
    assert where.startswith(f"{name}/{shard.name}[")


@pytest.mark.parametrize("of_run", [True, False], ids=["run", "checkpoint"])
def test_a_renamed_checkpoint_is_a_violation_wherever_one_looks_from(call_json, run_path, of_run):
    moved = run_path / checkpoint_name(21, 1)
    (run_path / checkpoint_name(20, 1)).rename(moved)

    ((code, _),) = found(call_json, run_path if of_run else moved)

    assert code == "STEP_MISMATCH"


def test_a_run_without_its_record_is_a_violation(call_json, run_path):
    (run_path / "run.json").unlink()

    assert found(call_json, run_path) == [("FILE_MISSING", "run.json")]


# Hostile


@pytest.mark.parametrize("kind", ["symlink", "pipe", "directory", "socket"])
@pytest.mark.parametrize("name", ["manifest.json", INDEX, PART, SHARD])
def test_what_is_not_a_regular_file_is_refused_without_waiting(
    call_json, checkpoint_path, name, kind, monkeypatch
):
    path = checkpoint_path / name
    original = path.rename(checkpoint_path / "elsewhere")
    monkeypatch.chdir(path.parent)  # a socket's address must be short
    if kind == "symlink":
        path.symlink_to(original)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)

    assert found(call_json, checkpoint_path) == [("UNSAFE_FILE", name)]


@pytest.mark.parametrize("name", ["run.json", "launches/0001.json"])
def test_a_pipe_in_a_run_is_refused_without_waiting(call_json, run_path, name):
    (run_path / name).unlink()
    os.mkfifo(run_path / name)

    assert ("UNSAFE_FILE", name) in found(call_json, run_path)


def test_a_huge_manifest_is_refused_before_it_is_read(call_json, checkpoint_path):
    os.truncate(checkpoint_path / "manifest.json", 1 << 40)

    assert found(call_json, checkpoint_path) == [("LIMIT_EXCEEDED", "manifest.json")]


def test_a_huge_index_is_refused_before_it_is_read(call_json, checkpoint_path):
    os.truncate(checkpoint_path / INDEX, 1 << 40)

    assert found(call_json, checkpoint_path) == [("FILE_NBYTES", INDEX)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "DOC_SYNTAX"),
        (b"[" * 60_000, "DOC_DEPTH"),
        (b'{"a":' * 10_000, "DOC_DEPTH"),
        (b"\xff\xfe{}", "DOC_ENCODING"),
        (b"{}" * 2, "DOC_SYNTAX"),
        (b'{"digest":1,"digest":2}', "DOC_DUPLICATE_KEY"),
        (b'{"digest":1e999}', "DOC_NUMBER"),
        (b'{"digest":' + b"9" * 60_000 + b"}", "DOC_NUMBER"),
        (b'{"digest":"\\ud800"}', "DOC_STRING"),
        (b"null", "DOC_SYNTAX"),
    ],
)
def test_a_hostile_manifest_is_a_violation(call_json, checkpoint_path, content, expected):
    (checkpoint_path / "manifest.json").write_bytes(content)

    ((code, where),) = found(call_json, checkpoint_path)

    assert code == expected
    assert where.startswith("manifest.json")


def test_another_version_of_the_format_is_said(call_json, checkpoint_path):
    signed = {"type": "manifest", "format_version": "0.1", "features": {"reader": [], "writer": []}}
    (checkpoint_path / "manifest.json").write_bytes(dump_document(signed))

    assert found(call_json, checkpoint_path)[0][0] == "VERSION_UNSUPPORTED"


def test_names_cannot_play_tricks_on_a_terminal(call, checkpoint_path):
    (checkpoint_path / "\x1b[2Jwiped\n\u202egnp").write_text("")

    code, out, _ = call("validate", checkpoint_path)

    assert code == 0
    assert "\\x1b[2Jwiped\\n\\u202egnp" in out
    assert not {"\x1b", "\u202e"} & set(out)


def test_names_that_are_not_utf8_are_shown(call, checkpoint_path):
    pathlib.Path(os.fsdecode(os.fsencode(checkpoint_path) + b"/\xff\xfe")).write_text("")

    code, out, _ = call("validate", checkpoint_path)

    assert code == 0
    assert "\\udcff\\udcfe" in out


# Nothing to check


def test_files_of_an_attempt_without_manifest_are_not_committed(call_json, tmp_path):
    (tmp_path / f"weights-{0:016x}-00000.safetensors").write_bytes(b"")

    assert found(call_json, tmp_path) == [("NOT_COMMITTED", "manifest.json")]


@pytest.mark.parametrize("names", [[], ["notes.txt", "model.safetensors"]])
def test_a_directory_of_anything_else_cannot_run(call, tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"")

    code, out, text = call("validate", tmp_path)

    assert (code, out) == (2, "")
    assert f"{tmp_path}: the directory is neither a checkpoint nor a run" in text


@pytest.mark.parametrize(
    "name", [checkpoint_name(40, 1), checkpoint_name(40, 2)], ids=["unfinished", "aborted"]
)
def test_what_was_not_committed_in_a_run_is_a_violation_by_itself(call_json, run_path, name):
    ((code, where),) = found(call_json, run_path / name)

    assert code in {"NOT_COMMITTED", "CHECKPOINT_ABORTED"}
    assert where == "manifest.json"


def test_no_such_path_cannot_run(call, tmp_path):
    code, out, err = call("validate", tmp_path / "nowhere")

    assert (code, out) == (2, "")
    assert err.startswith(f"error: FILE_MISSING at {tmp_path}/nowhere: ")
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize("name", ["manifest.json", "manifest.json/below"])
def test_a_file_cannot_run(call, checkpoint_path, name):
    assert call("validate", checkpoint_path / name)[0] == 2


@pytest.mark.parametrize("path", ["", "s3://bucket/run", "nul\0character", "x" * 5000])
def test_what_is_no_path_cannot_run(call, path):
    code, _, err = call("validate", path)

    assert code == 2
    assert err.startswith("error: ")


def test_a_pipe_in_place_of_a_directory_cannot_run(call, tmp_path):
    os.mkfifo(tmp_path / "pipe")

    assert call("validate", tmp_path / "pipe")[0] == 2


def test_an_error_is_an_object_too(call_json, tmp_path):
    code, answer = call_json("validate", tmp_path / "nowhere")

    assert code == 2
    assert answer["error"]["code"] == "FILE_MISSING"


def test_a_failing_store_leaves_the_check_incomplete(call, call_json, checkpoint_path, monkeypatch):
    flip(checkpoint_path / f"weights-{ATTEMPT}-00000.safetensors", -1)
    read_range = LocalStore.read_range

    def fail(self, path, *arguments):
        if path == SHARD:
            raise err(Code.STORE_IO, "Input/output error", where=path)
        return read_range(self, path, *arguments)

    monkeypatch.setattr(LocalStore, "read_range", fail)
    code, answer = call_json("validate", checkpoint_path)

    assert (code, answer["verdict"], answer["own"]["complete"]) == (2, "incomplete", False)
    assert (answer["failure"]["code"], answer["failure"]["where"]) == ("STORE_IO", SHARD)
    assert [violation["code"] for violation in answer["violations"]] == ["BLOCK_DIGEST"]
    code, out, _ = call("validate", checkpoint_path)
    assert code == 2
    assert out.splitlines()[-1].startswith("incomplete")
    assert "STORE_IO" in out


def test_a_closed_directory_cannot_run(call, checkpoint_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(
            errno.EACCES, "Permission denied"
        )  # root is never refused: say it in its place

    monkeypatch.setattr(PosixCalls, "open_root", refuse)
    code, out, text = call("validate", checkpoint_path)

    assert (code, out) == (2, "")
    assert text.startswith(f"error: STORE_ACCESS at {checkpoint_path}: ")

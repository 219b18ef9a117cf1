"""Disasters of files that were damaged, mixed up or made to harm: each is refused by name before it has an effect."""

import io
import os
import pickle
import shutil

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.__main__ import main
from tests.builders import Forgery, code_of, edit_strings, error_of, small_files
from tests.convert.made import refused, save_dcp
from tests.homes import files_of
from tests.loop.test_checkpointer import run

INLINE = ckptfmt.Saving(saver="inline")


@pytest.fixture
def saved(tmp_path):
    """Return the directory of a checkpoint of 5,000 numbers."""
    path = tmp_path / "saved"
    ckptfmt.save(path, ckptfmt.State(weights={"w": np.arange(5000.0)}, rng=False), step=4)
    return path


def shard_of(directory):
    """Return the file with the weights."""
    (shard,) = directory.glob("weights-*")
    return shard


def write(store, path):
    """Write the files of a store in memory below a path."""
    for name, content in files_of(store).items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "name", ["../../secret.safetensors", "{outside}/secret.safetensors", "secret.sh"]
)
def test_unsloth_6796_a_file_name_leads_nowhere_else(name, tmp_path):
    """A validation accepted shard paths with `../`, absolute paths and wrong suffixes
    (unsloth#6796).

    A checkpoint under digests that fit, but with such a name for a file, is refused, and the file
    isn't opened.
    """
    outside = tmp_path / "outside"
    outside.mkdir()
    os.mkfifo(outside / "secret.safetensors")  # an open would wait for ever
    forgery = Forgery(small_files())
    name = name.format(outside=outside)
    edit_strings(forgery.parts[0]["files"], "name", lambda names: names.__setitem__(0, name))
    path = write(forgery.store(), tmp_path / "forged")
    report = ckptfmt.validate(path)
    assert not report.valid
    assert {str(found.code) for found in report.violations} == {"UNSAFE_PATH"}
    assert error_of(lambda: ckptfmt.load(path, framework="numpy")).code == "UNSAFE_PATH"


def test_unsloth_6796_a_link_in_the_place_of_a_file_or_directory_is_refused(saved, tmp_path):
    """The same validation followed a directory that was a symbolic link (unsloth#6796).

    Below the path that a user names, no link is followed.
    """
    assert ckptfmt.validate(saved).valid
    (saved / "parts").rename(tmp_path / "elsewhere")
    (saved / "parts").symlink_to(tmp_path / "elsewhere")
    assert error_of(lambda: ckptfmt.load(saved)).code == "UNSAFE_FILE"
    (saved / "parts").unlink()
    (tmp_path / "elsewhere").rename(saved / "parts")
    shard = shard_of(saved)
    shard.rename(tmp_path / "shard")
    shard.symlink_to(tmp_path / "shard")
    assert error_of(lambda: ckptfmt.load(saved)).code == "UNSAFE_FILE"


class Bomb:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pytorch_189308_and_megatron_bridge_5770_no_code_of_a_checkpoint_is_run(saved, tmp_path):
    """The metadata of a checkpoint was unpickled by a public load, and a configuration could hide
    a function (pytorch#189308, Megatron-Bridge#5770).

    No pickle is read: ckptfmt refuses a function at the save, ignores a pickle beside a checkpoint,
    and converts a directory of another library without a call from its pickles.
    """
    planted, bomb = tmp_path / "planted", pickle.dumps(Bomb(tmp_path / "planted"))
    pickle.loads(bomb).close()
    assert planted.exists()  # the bomb works
    planted.unlink()

    (saved / ".metadata").write_bytes(bomb)
    assert ckptfmt.load(saved, framework="numpy")["weights"]["w"].tobytes() == (
        np.arange(5000.0).tobytes()
    )
    foreign = save_dcp({"w": torch.ones(3)}, tmp_path / "dcp")
    (foreign / ".metadata").write_bytes(bomb)
    assert refused(foreign, tmp_path / "out")[0] == "STATE_UNSUPPORTED"
    state = ckptfmt.State(weights={"w": np.ones(1)}, config={"loss": print}, rng=False)
    assert code_of(lambda: ckptfmt.save(tmp_path / "c", state, step=1)) == "STATE_UNSUPPORTED"
    assert not planted.exists()


def test_tob_sftn_1_bytes_behind_the_end_of_a_file_are_refused(saved):
    """Anything could be appended to a file of tensors, so that the file was a valid archive too
    (finding TOB-SFTN-1 of the safetensors audit).

    Header and tensors cover a file exactly, and its size is recorded.
    """
    shard = shard_of(saved)
    content = shard.read_bytes()
    shard.write_bytes(content + b"PK\x05\x06" + bytes(18))
    assert error_of(lambda: ckptfmt.load(saved)).code == "FILE_NBYTES"
    shard.write_bytes(content)
    assert ckptfmt.validate(saved).valid


def test_tob_sftn_7_documents_that_readers_understand_differently_are_refused(saved):
    """Readers of underspecified JSON disagreed on the same header: keys twice, escapes, numbers
    (finding TOB-SFTN-7 of the safetensors audit).

    Documents have one canonical form, and another spelling of the same values is refused.
    """
    manifest = saved / "manifest.json"
    content = manifest.read_bytes()
    for spelling, code in (
        (content.replace(b'"step":4', b'"step":4,"step":5'), "DOC_DUPLICATE_KEY"),
        (content.replace(b'"step":4', b'"step": 4'), "DOC_NOT_CANONICAL"),
        (content.replace(b'"step":4', b'"st\\u0065p":4'), "DOC_NOT_CANONICAL"),
        (content.replace(b'"step":4', b'"step":4.0'), "DOC_NUMBER"),
    ):
        assert spelling != content
        manifest.write_bytes(spelling)
        assert code_of(lambda: ckptfmt.open(saved)) == code
    manifest.write_bytes(content)
    assert ckptfmt.open(saved).step == 4


def test_huggingface_hub_4725_and_sglang_32279_an_index_without_its_files_is_no_checkpoint(
    saved, tmp_path
):
    """An index named tensors or shards that were not there, and models were loaded with
    weights that nobody had set (huggingface_hub#4725, sglang#32279).

    A missing file and a file of another checkpoint are errors with the file's name.
    """
    shard = shard_of(saved)
    content = shard.read_bytes()
    shard.unlink()
    missing = error_of(lambda: ckptfmt.load(saved))
    assert (missing.code, missing.where) == ("FILE_MISSING", shard.name)

    other = tmp_path / "other"
    weights = {"v": np.arange(5000.0) + 1}  # as many bytes, under another name
    ckptfmt.save(other, ckptfmt.State(weights=weights, rng=False), step=4)
    shutil.copy(shard_of(other), shard)
    mixed = error_of(lambda: ckptfmt.load(saved))
    assert mixed.code == "HEADER_DIGEST"
    assert mixed.where.startswith(shard.name)
    assert {str(one.code) for one in ckptfmt.validate(saved).violations} == {
        "HEADER_DIGEST",
        "BLOCK_DIGEST",
    }
    shard.write_bytes(content)
    assert ckptfmt.validate(saved).valid


def test_pytorch_126952_a_flipped_bit_never_reaches_a_tensor(saved):
    """Checkpoints had no check of their integrity, so that a flipped bit was loaded
    (pytorch#126952).

    Each block has a digest, compared before the bytes reach a tensor, and the error names the
    range.
    """
    control = io.BytesIO()
    torch.save({"w": torch.arange(5000.0, dtype=torch.float64)}, control)
    content = bytearray(control.getvalue())
    at = content.index(np.arange(5000.0).tobytes()) + 20_004
    content[at] ^= 1
    assert not torch.equal(
        torch.load(io.BytesIO(content))["w"], torch.arange(5000.0, dtype=torch.float64)
    )

    shard = shard_of(saved)
    content = bytearray(shard.read_bytes())
    content[-20_004] ^= 1
    shard.write_bytes(content)
    live = {"w": np.zeros(5000)}
    damage = error_of(lambda: ckptfmt.load(saved, ckptfmt.State(weights=live, rng=False)))
    assert damage.code == "BLOCK_DIGEST"
    assert damage.where.startswith(f"{shard.name}[")
    assert live["w"].tobytes() == np.zeros(5000).tobytes()


def test_rdsn_459_and_pegasus_492_damage_is_no_success(place, capsys):
    """A restore said 100 % and ok while the data were damaged (rdsn#459, incubator-pegasus#492).

    `ckptfmt validate` exits with 1, names the damage, and says what was compared.
    """
    run(place, 4, every=2, saving=INLINE)
    assert main(["validate", str(place)]) == 0
    shard = shard_of(place / "step-00000002-l0001")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    capsys.readouterr()
    assert main(["validate", str(place)]) == 1
    told = capsys.readouterr().out
    assert "BLOCK_DIGEST" in told
    assert shard.name in told
    assert main(["validate", str(place / "step-00000004-l0001")]) == 0


def test_composer_3252_and_pytorch_133923_another_version_is_named(tmp_path):
    """A checkpoint of another version failed with an error about something else, or couldn't be
    loaded at all (composer#3252, pytorch#133923).

    A reader names the version or the feature that it doesn't know.
    """

    def later_version(forgery):
        forgery.manifest["format_version"] = "2.0"

    def unknown_feature(forgery):
        forgery.manifest["features"]["reader"] = ["quantum"]

    for edit, code, told in (
        (later_version, "VERSION_UNSUPPORTED", "2.0"),
        (unknown_feature, "FEATURE_UNSUPPORTED", "quantum"),
    ):
        forgery = Forgery(small_files())
        edit(forgery)
        path = write(forgery.store(), tmp_path / told)
        refusal = error_of(lambda path=path: ckptfmt.load(path, framework="numpy"))
        assert refusal.code == code
        assert told in str(refusal)
        assert "Install" in refusal.remedy

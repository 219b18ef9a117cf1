"""Signed checkpoints: which are accepted, which are refused, and what keeps its signature."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Signer, State, Trust
from ckptfmt.api import compact
from ckptfmt.documents.manifest import MANIFEST_NAME
from ckptfmt.errors import CkptError
from ckptfmt.signing.keys import load_private_key, load_sigstore
from ckptfmt.store import MemoryStore
from tests.builders import error_of
from tests.homes import Home
from tests.signing.keys import PASSWORD, write_certificates, write_key
from tests.stores.hooked import HookedStore, Operation


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Return the files of a private key and of its public key."""
    return write_key(tmp_path)


def state(number: float = 1.0) -> Any:
    return State(weights={"w": np.full(10, number)}, config={"lr": 0.1})


def signatures(path: Path) -> list[Path]:
    return sorted(path.glob("signature-*"))


def refusal(path: Any, trust: Any) -> Any:
    """Return the error of opening a path, after every way in has refused it alike."""
    found = error_of(lambda: ckptfmt.open(path, require_signature=trust))
    for way_in in (
        lambda: ckptfmt.load(path, require_signature=trust),
        lambda: ckptfmt.load(path, state(), require_signature=trust),
    ):
        assert error_of(way_in).code == found.code
    report = ckptfmt.validate(path, require_signature=trust)
    assert [one.code for one in report.violations] == [found.code]
    return found


def test_a_signed_checkpoint_is_accepted_wherever_a_signature_is_required(tmp_path, keys):
    private, public = keys
    place = tmp_path / "ckpt"
    ckptfmt.save(place, state(), step=3, sign=private)
    assert len(signatures(place)) == 1
    with ckptfmt.open(place, require_signature=public) as checkpoint:
        assert checkpoint.step == 3
    loaded = state(0.0)
    ckptfmt.load(place, loaded, require_signature=Trust(keys=[public]))
    assert loaded.weights["w"].tolist() == [1.0] * 10
    report = ckptfmt.validate(place, require_signature=public)
    assert report.valid
    assert report.warnings == []
    ckptfmt.open(place).close()  # a reader without the key reads it like any other


def test_an_unsigned_checkpoint_is_refused_until_it_is_signed(tmp_path, keys):
    private, public = keys
    place = tmp_path / "ckpt"
    ckptfmt.save(place, state(), step=3)
    found = refusal(place, public)
    assert found.code == "SIGNATURE_MISSING"
    assert "no signature" in found.detail
    assert "ckptfmt sign PATH --key KEY" in found.remedy
    before = {path.name for path in place.iterdir()}
    written = ckptfmt.sign(place, private)
    assert {path.name for path in place.iterdir()} - before == {written}
    ckptfmt.load(place, state(), require_signature=public)


def test_the_signature_of_another_key_is_none(tmp_path, keys):
    other, other_public = write_key(tmp_path, "other")
    place = tmp_path / "ckpt"
    ckptfmt.save(place, state(), step=3, sign=other)
    found = refusal(place, keys[1])
    assert found.code == "SIGNATURE_MISSING"
    assert "not signed by a trusted key" in found.detail
    # Two people sign; either of them is enough.
    ckptfmt.sign(place, keys[0])
    assert len(signatures(place)) == 2
    for public in (keys[1], other_public):
        ckptfmt.open(place, require_signature=public).close()
    ckptfmt.sign(place, keys[0])
    assert len(signatures(place)) == 2  # the same signer's is replaced


def test_a_signature_belongs_to_one_manifest(tmp_path, keys):
    private, public = keys
    for name, number in (("a", 1.0), ("b", 2.0)):
        ckptfmt.save(tmp_path / name, state(number), step=3, sign=private)
    a, b = (signatures(tmp_path / name)[0] for name in "ab")
    stolen = b.read_bytes()
    a.write_bytes(stolen)
    assert "of another manifest.json" in refusal(tmp_path / "a", public).detail
    # Nor does it help to name the stolen one as an attempt's own, or to put the files of `b` there.
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    ckptfmt.open(tmp_path / "c", require_signature=public).close()
    (tmp_path / "c" / MANIFEST_NAME).write_bytes((tmp_path / "a" / MANIFEST_NAME).read_bytes())
    assert error_of(lambda: ckptfmt.open(tmp_path / "c", require_signature=public)).code == (
        "SIGNATURE_MISSING"
    )


def test_a_changed_byte_under_a_right_signature_is_found_by_its_digest(tmp_path, keys):
    place = tmp_path / "ckpt"
    ckptfmt.save(place, state(), step=3, sign=keys[0])
    shard = next(place.glob("weights-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    found = error_of(lambda: ckptfmt.load(place, state(), require_signature=keys[1]))
    assert found.code == "BLOCK_DIGEST"


@pytest.mark.parametrize("curve", ["P-256", "P-384", "P-521"])
def test_each_curve_signs(tmp_path, curve):
    private, public = write_key(tmp_path, curve, curve=curve)
    ckptfmt.save(tmp_path / "ckpt", state(), step=3, sign=private)
    ckptfmt.open(tmp_path / "ckpt", require_signature=public).close()


def test_a_key_may_be_encrypted(tmp_path):
    private, public = write_key(tmp_path, "secret", password=PASSWORD)
    found = error_of(lambda: Signer(key=private))
    assert found.code == "ARGUMENT"
    assert found.where == str(private)
    signer = Signer(key=private, password=PASSWORD)
    assert PASSWORD not in repr(signer)
    ckptfmt.save(tmp_path / "ckpt", state(), step=3, sign=signer)
    ckptfmt.open(tmp_path / "ckpt", require_signature=public).close()
    for path in (tmp_path / "ckpt").rglob("*"):
        assert path.is_dir() or PASSWORD.encode() not in path.read_bytes()


def test_bad_keys_have_named_errors(tmp_path, keys):
    curve, _ = write_key(tmp_path, "bitcoin", curve="secp256k1")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("-----BEGIN NONSENSE-----")
    for path in (curve, nonsense, tmp_path / "absent", keys[1]):
        found = error_of(lambda: Signer(key=path))  # noqa: B023
        assert (found.code, found.where) == ("ARGUMENT", str(path))
    for path in (nonsense, tmp_path / "absent", keys[0]):
        found = error_of(lambda: Trust(keys=[path]))  # noqa: B023
        assert (found.code, found.where) == ("ARGUMENT", str(path))
    for trust in (
        Trust,
        lambda: Trust(identity="me@example.com"),
        lambda: Trust.of(3),  # type: ignore[arg-type]
        lambda: Signer.of(3),  # type: ignore[arg-type]
    ):
        assert error_of(trust).code == "ARGUMENT"


def test_a_certificate_below_a_root_signs(tmp_path, keys):
    private, public = keys
    chain, root = write_certificates(tmp_path)
    place = tmp_path / "ckpt"
    ckptfmt.save(place, state(), step=3, sign=Signer(key=private, certificates=chain))
    ckptfmt.open(place, require_signature=Trust(roots=[root])).close()
    ckptfmt.open(place, require_signature=public).close()
    for _, other in (
        write_certificates(tmp_path, root="other"),
        (chain, write_certificates(tmp_path, "stranger", root="stranger-root")[1]),
    ):
        assert refusal(place, Trust(roots=[other])).code == "SIGNATURE_MISSING"


def test_a_certificate_has_to_allow_signatures(tmp_path, keys):
    chain, root = write_certificates(tmp_path, signs=False)
    place = tmp_path / "ckpt"
    ckptfmt.save(place, state(), step=3, sign=Signer(key=keys[0], certificates=chain))
    assert "isn't for signatures" in refusal(place, Trust(roots=[root])).detail


def test_a_certificate_of_another_key_is_refused(tmp_path, keys):
    write_key(tmp_path, "other")
    chain, _ = write_certificates(tmp_path, "other")
    assert error_of(lambda: Signer(key=keys[0], certificates=chain)).code == "ARGUMENT"


def test_a_save_that_replaces_leaves_one_signature(tmp_path, keys):
    private, public = keys
    place = tmp_path / "ckpt"
    for number in range(3):
        ckptfmt.save(place, state(number), step=number, sign=private, replace=True)
    assert len(signatures(place)) == 1
    with ckptfmt.open(place, require_signature=public) as checkpoint:
        assert checkpoint.step == 2
    ckptfmt.save(place, state(), step=9, replace=True)
    assert signatures(place) == []
    assert refusal(place, public).code == "SIGNATURE_MISSING"
    ckptfmt.sign(place, private)
    ckptfmt.PathSaver(saver="inline").remove(place)
    assert not place.exists() or list(place.iterdir()) == []


def test_every_kind_of_store_has_signatures(home: Home, tmp_path: Path) -> None:
    private, public = write_key(tmp_path)
    place = home.path()
    ckptfmt.save(place, state(), step=3, sign=private)
    ckptfmt.open(place, require_signature=public).close()
    report = ckptfmt.validate(place, require_signature=public)
    assert (report.valid, report.warnings) == (True, [])


def test_a_bundle_that_another_program_made_is_added(tmp_path, keys):
    private, public = keys
    place = tmp_path / "ckpt"
    ckptfmt.save(place, state(), step=3, sign=private)
    ckptfmt.save(tmp_path / "other", state(), step=3)
    bundle = signatures(place)[0].read_bytes()
    signatures(place)[0].unlink()
    found = error_of(lambda: ckptfmt.sign(tmp_path / "other", bundle=bundle))
    assert found.code == "SIGNATURE_MISSING"
    assert signatures(tmp_path / "other") == []
    assert error_of(lambda: ckptfmt.sign(place, bundle=b"{}")).code == "SIGNATURE_MISSING"
    assert error_of(lambda: ckptfmt.sign(place)).code == "ARGUMENT"
    ckptfmt.sign(place, bundle=bundle)
    ckptfmt.open(place, require_signature=public).close()


def test_a_flood_of_bundles_is_bounded(tmp_path, keys):
    """Only the first sixteen names are read; a bundle beyond a mebibyte isn't read at all."""
    place = tmp_path / "ckpt"
    ckptfmt.save(place, state(), step=3, sign=keys[0])
    own = signatures(place)[0]
    attempt = own.name.split("-")[1]
    for number in range(15):
        (place / f"signature-{attempt}-{number:016x}.sigstore.json").write_bytes(
            b"[" * (2 << 20) if number % 2 else b"[" * 100_000
        )
    last = place / f"signature-{attempt}-{'f' * 16}.sigstore.json"
    own.rename(last)
    ckptfmt.open(place, require_signature=keys[1]).close()
    (place / f"signature-{attempt}-{15:016x}.sigstore.json").write_bytes(b"{}")
    assert refusal(place, keys[1]).code == "SIGNATURE_MISSING"
    assert error_of(lambda: ckptfmt.sign(place, bundle=b"x" * (2 << 20))).code == (
        "SIGNATURE_MISSING"
    )


def test_a_program_without_signatures_doesnt_import_cryptography(tmp_path):
    code = (
        "import sys, numpy, ckptfmt;"
        f"ckptfmt.save({str(tmp_path / 'ckpt')!r}, ckptfmt.State(weights={{'w': numpy.ones(3)}}), step=1);"
        f"ckptfmt.load({str(tmp_path / 'ckpt')!r});"
        "assert not [name for name in sys.modules if name.startswith(('cryptography', 'sigstore'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_package_there_is_a_named_error(keys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    load_private_key.cache_clear()
    found = error_of(lambda: Signer(key=keys[0]))
    assert found.code == "ARGUMENT"
    assert "ckptfmt[sign]" in found.remedy
    monkeypatch.setitem(sys.modules, "sigstore", None)
    load_sigstore.cache_clear()
    found = error_of(lambda: Trust(identity="me@example.com", issuer="https://example.com"))
    assert "ckptfmt[sigstore]" in found.remedy


# --- runs -----------------------------------------------------------------------------------------


def grouped(
    *, sign: Any = None, require_signature: Any = None, saving: Any = None, **options: Any
) -> dict[str, Any]:
    """Return the options of a `Checkpointer`, with those of signatures in their groups."""
    saving = dataclasses.replace(saving or ckptfmt.Saving(), sign=sign)
    loading = ckptfmt.Loading(require_signature=require_signature)
    return {"saving": saving, "loading": loading, **options}


def train(run: Path, steps: int, **options: Any) -> Any:
    """Go on with a run to a number of steps, with a save at each step."""
    numbers = state(0.0)
    checkpointer = ckptfmt.Checkpointer(run, numbers, every=1, **grouped(**options))
    with checkpointer:
        for step in checkpointer.steps(steps):
            numbers.weights["w"][:] = step
    return checkpointer


def place_of(run: Path, step: int) -> Path:
    return next(run.glob(f"step-{step:08d}-*"))


@pytest.mark.parametrize("saver", ["inline", "thread", "process"])
def test_a_run_signs_each_save_and_goes_on_from_signed_saves(tmp_path, keys, saver):
    private, public = keys
    saving = ckptfmt.Saving(saver=saver)
    options = {"sign": private, "require_signature": public, "saving": saving}
    train(tmp_path / "run", 3, **options)
    assert [len(signatures(place_of(tmp_path / "run", step))) for step in (1, 2, 3)] == [1, 1, 1]
    assert train(tmp_path / "run", 5, **options).launch.resume_from.name == "step-00000003-l0001"
    assert ckptfmt.validate(tmp_path / "run", require_signature=public).valid
    signatures(place_of(tmp_path / "run", 4))[0].unlink()
    report = ckptfmt.validate(tmp_path / "run", require_signature=public)
    assert [(one.code, str(one.where).split("/")[0]) for one in report.violations] == [
        ("SIGNATURE_MISSING", "step-00000004-l0002")
    ]


def test_no_older_checkpoint_takes_the_place_of_an_unsigned_one(tmp_path, keys):
    private, public = keys
    run = tmp_path / "run"
    train(run, 3, sign=private)
    signatures(place_of(run, 3))[0].unlink()
    launches = sorted((run / "launches").iterdir())
    found = error_of(lambda: train(run, 5, require_signature=public))
    assert found.code == "SIGNATURE_MISSING"
    assert sorted((run / "launches").iterdir()) == launches  # the run isn't taken over
    by_hand = {"resume": "step-00000002-l0001", "require_signature": public}
    assert train(run, 3, sign=private, **by_hand).launch.resume_from.name == "step-00000002-l0001"


def test_a_damaged_signed_checkpoint_is_passed_over_as_always(tmp_path, keys):
    private, public = keys
    run = tmp_path / "run"
    train(run, 3, sign=private)
    shard = next(place_of(run, 3).glob("weights-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    found = train(run, 4, sign=private, require_signature=public)
    assert found.launch.resume_from.name == "step-00000002-l0001"


def test_a_delta_vouches_for_its_bases(tmp_path, keys):
    private, public = keys
    run = tmp_path / "run"
    saving = ckptfmt.Saving(saver="thread", delta="smallest")
    train(run, 4, sign=private, saving=saving)
    for step in (1, 2, 3):
        signatures(place_of(run, step))[0].unlink()
    newest = place_of(run, 4)
    with ckptfmt.open(newest, require_signature=public) as checkpoint:
        assert checkpoint.manifest.references  # bases by their digests, below the signature
        assert checkpoint.weights["w"][:].tolist() == [3.0] * 10
    full = tmp_path / "full"
    compact(newest, out=full)
    assert refusal(full, public).code == "SIGNATURE_MISSING"  # another manifest
    compact(newest, out=tmp_path / "signed", sign=private)
    ckptfmt.open(tmp_path / "signed", require_signature=public).close()
    compact(run, take_over=True, sign=private)
    with ckptfmt.open(run, require_signature=public) as checkpoint:
        assert checkpoint.manifest.profile == "full"


def test_a_mirror_and_what_goes_on_from_it_stay_signed(tmp_path, keys):
    private, public = keys
    run = tmp_path / "run"
    train(run, 3, sign=private)
    ckptfmt.Run(run).mirror(tmp_path / "mirror")
    assert ckptfmt.validate(tmp_path / "mirror", require_signature=public).valid
    ckptfmt.Run(run).promote(tmp_path / "mirror")
    found = train(tmp_path / "mirror", 4, sign=private, require_signature=public)
    assert found.launch.resume_from.name == "step-00000003-l0001"


def test_saves_in_caches_are_signed_by_the_launch_that_completes_them(tmp_path, keys):
    private, public = keys
    cache = ckptfmt.Cache(tmp_path / "cache", upload_every=2)
    options = {"sign": private, "require_signature": public, "copies": [cache]}
    train(tmp_path / "run", 3, **options)
    assert train(tmp_path / "run", 5, **options).launch.resume_from.name == "step-00000003-l0001"
    assert ckptfmt.validate(tmp_path / "run", require_signature=public).valid


def test_a_first_state_may_have_to_be_signed(tmp_path, keys):
    ckptfmt.save(tmp_path / "pretrained", state(), step=3)
    init = ckptfmt.InitFrom(tmp_path / "pretrained", require_signature=keys[1])
    assert error_of(lambda: train(tmp_path / "run", 1, init_from=init)).code == "SIGNATURE_MISSING"
    ckptfmt.sign(tmp_path / "pretrained", keys[0])
    train(tmp_path / "other", 1, init_from=init)


def test_no_kill_leaves_a_committed_save_unsigned(tmp_path):
    """REQ-SIG-003: whenever the manifest is there, a verifier accepts the checkpoint."""
    private, public = write_key(tmp_path)
    store = MemoryStore()
    seen = []

    class Watched(HookedStore):
        """A store that a verifier reads after each change."""

        def after(self, operation: Operation) -> None:
            seen.append(operation.op)
            if MANIFEST_NAME in store.list_names(""):
                ckptfmt.open(store, require_signature=public).close()
                seen.append("accepted")

    ckptfmt.save(Watched(store), state(), step=3, sign=private)
    assert seen.count("accepted") > 1
    assert seen.index("accepted") > 3


# --- the pin --------------------------------------------------------------------------------------


def test_a_rollback_is_refused(tmp_path, keys):
    """An attacker with write access puts an old, signed state of a run back."""
    private, public = keys
    run = tmp_path / "run"
    pin = tmp_path / "pin.json"
    trust = Trust(keys=[public], pin=pin)
    train(run, 2, sign=private, require_signature=trust)
    shutil.copytree(run, tmp_path / "old")
    train(run, 4, sign=private, require_signature=trust)
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "old", run)
    assert ckptfmt.validate(run, require_signature=public).valid  # every signature is right
    for way_in in (
        lambda: ckptfmt.open(run, require_signature=trust),
        lambda: ckptfmt.open(place_of(run, 2), require_signature=trust),
        lambda: train(run, 4, require_signature=trust),
    ):
        found = error_of(way_in)
        assert found.code == "ROLLED_BACK"
        assert found.where == str(pin)
        assert "step 4 of launch 2" in found.detail
    report = ckptfmt.validate(run, require_signature=trust)
    assert [violation.code for violation in report.violations] == ["ROLLED_BACK"]
    shutil.rmtree(place_of(run, 2))  # nothing is left of what was seen
    shutil.rmtree(place_of(run, 1))
    report = ckptfmt.validate(run, require_signature=trust)
    assert [violation.code for violation in report.violations] == ["ROLLED_BACK"]
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "old", run)
    # The remedy: the file is deleted on purpose.
    pin.unlink()
    train(run, 3, sign=private, require_signature=trust)
    assert json.loads(pin.read_bytes())["step"] == 3


def test_the_check_of_a_run_keeps_a_pin(tmp_path, keys):
    private, public = keys
    run = tmp_path / "run"
    trust = Trust(keys=[public], pin=tmp_path / "pin.json")
    train(run, 2, sign=private)
    assert ckptfmt.validate(run, require_signature=trust).valid
    train(run, 4, sign=private)
    shutil.copytree(run, tmp_path / "new")
    assert ckptfmt.validate(run, require_signature=trust).valid
    assert ckptfmt.validate(run, require_signature=trust).valid  # the same again
    shutil.rmtree(place_of(run, 4))
    report = ckptfmt.validate(run, require_signature=trust)
    assert [violation.code for violation in report.violations] == ["ROLLED_BACK"]
    # Going back on purpose: the pinned checkpoint is there, and abandoned ones are newer by step.
    run = tmp_path / "new"
    back = {"sign": private, "require_signature": trust}
    ckptfmt.Checkpointer(run, state(), resume="step-00000002-l0001", **grouped(**back)).choose()
    assert ckptfmt.validate(run, require_signature=trust).valid


def test_a_process_that_only_reads_keeps_a_pin_of_its_own(tmp_path, keys):
    private, public = keys
    run = tmp_path / "run"
    trust = Trust(keys=[public], pin=tmp_path / "reader.json")
    train(run, 2, sign=private)
    ckptfmt.open(run, require_signature=trust).close()
    train(run, 4, sign=private)
    with ckptfmt.open(run, require_signature=trust) as checkpoint:
        assert checkpoint.step == 4
    ckptfmt.open(run, require_signature=trust).close()  # the same again
    assert error_of(lambda: ckptfmt.open(place_of(run, 3), require_signature=trust)).code == (
        "ROLLED_BACK"
    )


def test_going_back_on_purpose_is_no_rollback(tmp_path, keys):
    """By hand; and the launch that began there is killed before its first save."""
    private, public = keys
    run = tmp_path / "run"
    trust = Trust(keys=[public], pin=tmp_path / "pin.json")
    options = {"sign": private, "require_signature": trust}
    train(run, 4, **options)
    back = ckptfmt.Checkpointer(run, state(), resume="step-00000002-l0001", **grouped(**options))
    assert back.choose() is not None  # and then nothing more: a kill
    found = train(run, 3, **options)
    assert found.launch.resume_from.name == "step-00000002-l0001"
    # The abandoned saves are newer by their step, and no way back.
    assert error_of(lambda: ckptfmt.open(place_of(run, 4), require_signature=trust)).code == (
        "ROLLED_BACK"
    )


def test_a_rewind_is_no_rollback(tmp_path, keys):
    private, public = keys
    run = tmp_path / "run"
    trust = Trust(keys=[public], pin=tmp_path / "pin.json")
    numbers = state(0.0)
    options = {"sign": private, "require_signature": trust}
    with ckptfmt.Checkpointer(run, numbers, every=1, **grouped(**options)) as checkpointer:
        for step in checkpointer.steps(5):
            numbers.weights["w"][:] = step
            if step == 4 and not checkpointer.rewinds:
                checkpointer.rewind(to=2)
    assert checkpointer.rewinds == 1
    assert train(run, 6, **options).launch.resume_from.name == "step-00000005-l0002"


def test_a_pin_follows_one_run(tmp_path, keys):
    private, public = keys
    pin = tmp_path / "pin.json"
    trust = Trust(keys=[public], pin=pin)
    train(tmp_path / "run", 1, sign=private, require_signature=trust)
    train(tmp_path / "other", 9, sign=private)
    found = error_of(lambda: ckptfmt.open(tmp_path / "other", require_signature=trust))
    assert found.code == "ROLLED_BACK"
    ckptfmt.save(tmp_path / "alone", state(), step=1, sign=private)
    found = error_of(lambda: ckptfmt.open(tmp_path / "alone", require_signature=trust))
    assert found.code == "ARGUMENT"
    for content in (b"{}", b"[" * 100_000, b"\xff", b'{"run_id": 3}'):
        pin.write_bytes(content)
        found = error_of(lambda: ckptfmt.open(tmp_path / "run", require_signature=trust))
        assert (found.code, found.where) == ("ARGUMENT", str(pin))


def test_a_pin_that_cant_be_written_doesnt_fail_a_save(tmp_path, keys, caplog):
    private, public = keys
    run = tmp_path / "run"
    (tmp_path / "disk").mkdir()
    trust = Trust(keys=[public], pin=tmp_path / "disk" / "pin.json")
    numbers = state()
    saving = ckptfmt.Saving(saver="inline")
    options = {"sign": private, "require_signature": trust, "saving": saving}
    with ckptfmt.Checkpointer(run, numbers, **grouped(**options)) as checkpointer:
        checkpointer.save(1)
        (tmp_path / "disk" / "pin.json").unlink()
        (tmp_path / "disk" / "pin.json").mkdir()
        checkpointer.save(2)
    assert "isn't recorded" in caplog.text
    assert place_of(run, 2).exists()


# --- the command ----------------------------------------------------------------------------------


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckptfmt", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "KEY_PASSWORD": PASSWORD},
    )


def test_the_commands_sign_and_check(tmp_path):
    private, public = write_key(tmp_path, "secret", password=PASSWORD)
    run = tmp_path / "run"
    train(run, 2)
    assert run_command("validate", run, "--key", public).returncode == 1
    assert run_command("sign", run, "--key", private).returncode == 2
    missing = run_command("sign", run, "--key", private, "--password-env", "NO_SUCH_VARIABLE")
    assert (missing.returncode, "NO_SUCH_VARIABLE" in missing.stderr) == (2, True)
    for place in (place_of(run, 1), run):
        done = run_command(
            "sign", place, "--key", private, "--password-env", "KEY_PASSWORD", "--json"
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["signature"].startswith("signature-")
    done = run_command("validate", run, "--key", public, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    bundle = signatures(place_of(run, 2))[0]
    refused = run_command("sign", place_of(run, 1), "--bundle", bundle)
    assert (refused.returncode, "SIGNATURE_MISSING" in refused.stderr) == (2, True)
    added = run_command("sign", place_of(run, 2), "--bundle", bundle)
    assert "added, not verified" in added.stdout
    assert run_command("sign", run).returncode == 2
    assert run_command("validate", run, "--identity", "me@example.com").returncode == 2
    pin = tmp_path / "pin"
    assert run_command("validate", place_of(run, 2), "--key", public, "--pin", pin).returncode == 0
    older = run_command("validate", place_of(run, 1), "--key", public, "--pin", pin)
    assert (older.returncode, "ROLLED_BACK" in older.stdout) == (1, True)
    assert run_command("validate", run, "--key", public, "--pin", pin).returncode == 0
    shutil.rmtree(place_of(run, 2))
    older = run_command("validate", run, "--key", public, "--pin", pin)
    assert (older.returncode, "ROLLED_BACK" in older.stdout) == (1, True)
    nobody = run_command("validate", run, "--pin", pin)
    assert (nobody.returncode, "ARGUMENT at --pin" in nobody.stderr) == (2, True)


def test_an_error_of_trust_is_an_error_of_the_package(tmp_path, keys):
    ckptfmt.save(tmp_path / "ckpt", state(), step=3)
    with pytest.raises(CkptError) as caught:
        ckptfmt.open(tmp_path / "ckpt", require_signature=keys[1])
    assert type(caught.value).__name__ == "TrustError"

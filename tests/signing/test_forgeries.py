"""Ten thousand forged signatures, of which none is accepted."""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import ckptfmt
from ckptfmt import Signer, State, Trust
from ckptfmt.documents.manifest import MANIFEST_NAME
from ckptfmt.documents.signature import (
    PAYLOAD_TYPE,
    BundleError,
    dump_bundle,
    dump_statement,
    signed_bytes,
)
from tests.signing.keys import write_certificates, write_key

#: Number of forgeries of each kind of signature.
COUNT = 5000


class Signed:
    """Two checkpoints of one state, each signed by a trusted signer and by a stranger."""

    def __init__(self, directory: Path, *, certified: bool) -> None:
        directory.mkdir()
        private, public = write_key(directory)
        stranger, _ = write_key(directory, "stranger")
        chain, root = write_certificates(directory)
        strange_chain, _ = write_certificates(directory, "stranger", root="strange")
        self.trust = Trust(roots=[root]) if certified else Trust(keys=[public])
        own = Signer(key=private, certificates=chain if certified else None)
        others = Signer(key=stranger, certificates=strange_chain if certified else None)
        self.manifests = []
        self.bundles = []
        self.strange = []
        for number in range(2):
            place = directory / f"ckpt{number}"
            ckptfmt.save(place, State(weights={"w": np.full(4, number)}), step=number)
            manifest = (place / MANIFEST_NAME).read_bytes()
            self.manifests.append(manifest)
            self.bundles.append(own.make_bundle(manifest, "name")[1])
            self.strange.append(others.make_bundle(manifest, "name")[1])

    def accepts(self, bundle: bytes, manifest: bytes) -> bool:
        """Return whether a bundle is accepted; any other refusal than the named one is a failure."""
        try:
            self.trust.verify(bundle, manifest)
        except BundleError:
            return False
        return True


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a JSON object."""
    yield path
    entries = enumerate(value) if isinstance(value, list) else ()
    for key, one in value.items() if isinstance(value, dict) else entries:
        yield from _leaves(one, (*path, key))


def _put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def _get(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with_statement(bundle: dict[str, Any], edit: Callable[[dict[str, Any]], None]) -> None:
    envelope = bundle["dsseEnvelope"]
    statement = json.loads(base64.b64decode(envelope["payload"]))
    edit(statement)
    envelope["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()


class Forger:
    """Forged bundles of the first checkpoint, from a seed: each is bytes and a manifest."""

    def __init__(self, signed: Signed, seed: int) -> None:
        self._signed = signed
        self._random = random.Random(seed)

    def forge(self) -> tuple[str, bytes, bytes]:
        """Return the kind of a forgery, the bundle and the manifest that it is put beside."""
        kinds = [
            self.flip_a_bit,
            self.cut,
            self.change_the_manifest,
            self.change_a_value,
            self.graft,
            self.name_another_digest,
            self.sign_as_a_stranger,
            self.replay,
        ]
        kind = self._random.choice(kinds)
        bundle, manifest = kind()
        return kind.__name__, bundle, manifest

    def flip_a_bit(self) -> tuple[bytes, bytes]:
        """Flip a bit in signature, statement or certificate, below the text of base64."""
        bundle = json.loads(self._signed.bundles[0])
        places: list[tuple[Any, ...]] = [
            ("dsseEnvelope", "payload"),
            ("dsseEnvelope", "signatures", 0, "sig"),
        ]
        if "x509CertificateChain" in bundle["verificationMaterial"]:
            chain = ("verificationMaterial", "x509CertificateChain", "certificates")
            places += [(*chain, number, "rawBytes") for number in range(2)]
        content = bytearray(base64.b64decode(_get(bundle, place := self._random.choice(places))))
        end = len(content)
        if place[-1] == "rawBytes":
            # Behind the signed part, a parser ignores the unused bits of a bit string.
            end = 4 + len(x509.load_der_x509_certificate(bytes(content)).tbs_certificate_bytes)
        content[self._random.randrange(end)] ^= 1 << self._random.randrange(8)
        _put(bundle, place, base64.b64encode(content).decode())
        return json.dumps(bundle).encode(), self._signed.manifests[0]

    def cut(self) -> tuple[bytes, bytes]:
        """Cut the file, or a value in it."""
        whole = self._signed.bundles[0]
        return whole[: self._random.randrange(len(whole))], self._signed.manifests[0]

    def change_the_manifest(self) -> tuple[bytes, bytes]:
        """Flip a bit of the manifest."""
        manifest = bytearray(self._signed.manifests[0])
        manifest[self._random.randrange(len(manifest))] ^= 1 << self._random.randrange(8)
        return self._signed.bundles[0], bytes(manifest)

    def change_a_value(self) -> tuple[bytes, bytes]:
        """Put a value of another type, or nothing, in a place of the bundle or its statement."""
        values: list[Any] = [
            None,
            0,
            -1,
            "",
            "x",
            [],
            {},
            True,
            1e308,
            "A" * 9,
            [[]],
            {"x": 1},
            "é",
            10**30,
        ]
        bundle = json.loads(self._signed.bundles[0])
        new = self._random.choice(values)

        def edit(value: dict[str, Any]) -> None:
            _put(value, self._random.choice([path for path in _leaves(value) if path]), new)

        if self._random.random() < 0.5:
            # Hints and such say nothing: so the manifest is another one, and all is refused.
            edit(bundle)
            return json.dumps(bundle).encode(), self._signed.manifests[1]
        before = bundle["dsseEnvelope"]["payload"]
        _with_statement(bundle, edit)
        is_changed = bundle["dsseEnvelope"]["payload"] != before
        number = self._random.randrange(2) if is_changed else 1
        return json.dumps(bundle).encode(), self._signed.manifests[number]

    def graft(self) -> tuple[bytes, bytes]:
        """Put a member of another bundle in the place of the bundle's own."""
        bundle = json.loads(self._signed.bundles[0])
        other = json.loads(self._random.choice([self._signed.bundles[1], *self._signed.strange]))
        # The whole envelope of the other checkpoint is a right signature of the other manifest.
        paths = [path for path in _leaves(bundle) if path[:1] == ("dsseEnvelope",) != path]
        path = self._random.choice(paths)
        with contextlib.suppress(KeyError, IndexError, TypeError):
            _put(bundle, path, copy.deepcopy(_get(other, path)))
        return json.dumps(bundle).encode(), self._signed.manifests[1]

    def name_another_digest(self) -> tuple[bytes, bytes]:
        """Write the digests of the other manifest into the signed statement."""
        bundle = json.loads(self._signed.bundles[0])
        digest = hashlib.sha256(self._signed.manifests[1]).digest()

        def edit(statement: dict[str, Any]) -> None:
            row = {"name": MANIFEST_NAME, "algorithm": "sha256", "digest": digest.hex()}
            rows = statement["predicate"]["resources"]
            if self._random.random() < 0.5:
                rows[0] = row
            else:
                rows.insert(self._random.randrange(2), row)
            whole = b"".join(bytes.fromhex(one["digest"]) for one in rows)
            statement["subject"][0]["digest"]["sha256"] = hashlib.sha256(whole).hexdigest()
            statement["subject"][0]["name"] = f"name {self._random.random()}"

        _with_statement(bundle, edit)
        return json.dumps(bundle).encode(), self._signed.manifests[1]

    def sign_as_a_stranger(self) -> tuple[bytes, bytes]:
        """Take a stranger's right signature, with the material of the trusted signer or without."""
        number = self._random.randrange(2)
        bundle = json.loads(self._signed.strange[number])
        own = json.loads(self._signed.bundles[number])
        material = bundle["verificationMaterial"]
        if self._random.random() < 0.5:
            bundle["verificationMaterial"] = own["verificationMaterial"]
        if self._random.random() < 0.5:
            chain = material.get("x509CertificateChain", {}).get("certificates", [])
            own_chain = (
                own["verificationMaterial"].get("x509CertificateChain", {}).get("certificates", [])
            )
            self._random.shuffle(own_chain)
            chain += own_chain
        if self._random.random() < 0.5:
            bundle["dsseEnvelope"]["signatures"].append(own["dsseEnvelope"]["signatures"][0])
        bundle["noise"] = self._random.random()
        return json.dumps(bundle).encode(), self._signed.manifests[number]

    def replay(self) -> tuple[bytes, bytes]:
        """Put a right bundle beside the other checkpoint."""
        number = self._random.randrange(2)
        bundle = json.loads(self._signed.bundles[number])
        bundle["noise"] = self._random.random()
        return json.dumps(bundle).encode(), self._signed.manifests[1 - number]


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@pytest.mark.parametrize("certified", [False, True])
def test_no_forgery_is_accepted(tmp_path, certified):
    signed = Signed(tmp_path / "signed", certified=certified)
    # The control: what is right is accepted, also in another notation of the same JSON.
    for bundle, manifest in zip(signed.bundles, signed.manifests, strict=True):
        assert signed.accepts(bundle, manifest)
        assert signed.accepts(json.dumps(json.loads(bundle), indent=1).encode(), manifest)
    forger = Forger(signed, seed=int(certified))
    kinds: dict[str, int] = {}
    accepted = []
    for _ in range(COUNT):
        kind, bundle, manifest = forger.forge()
        kinds[kind] = kinds.get(kind, 0) + 1
        if signed.accepts(bundle, manifest):
            accepted.append((kind, bundle))
    assert accepted == []
    assert len(kinds) == 8
    assert min(kinds.values()) > COUNT // 16


@pytest.mark.parametrize(
    "removed",
    ["check_statement", "verify_by_key"],
)
def test_without_a_check_forgeries_are_accepted(tmp_path, monkeypatch, removed):
    """The second control: the forgeries convict a reader that leaves out a check."""
    signed = Signed(tmp_path / "signed", certified=False)
    monkeypatch.setattr(f"ckptfmt.signing.trust.{removed}", lambda *_: None)
    forger = Forger(signed, seed=0)
    forged = [forger.forge() for _ in range(500)]
    assert any(signed.accepts(bundle, manifest) for _, bundle, manifest in forged)


def test_a_statement_without_the_manifest_says_nothing(tmp_path):
    """REQ-SIG-002: a trusted signer also signs other things."""
    private, public = write_key(tmp_path)
    statement = json.loads(dump_statement(b"{}", "name"))
    for rows in ([], [{"name": "x", "algorithm": "sha256", "digest": "00" * 32}]):
        statement["predicate"]["resources"] = rows
        whole = b"".join(bytes.fromhex(row["digest"]) for row in rows)
        statement["subject"][0]["digest"]["sha256"] = hashlib.sha256(whole).hexdigest()
        payload = json.dumps(statement).encode()
        key: Any = serialization.load_pem_private_key(private.read_bytes(), None)
        signature = key.sign(signed_bytes(PAYLOAD_TYPE, payload), ec.ECDSA(hashes.SHA256()))
        bundle = dump_bundle(payload, signature, {"publicKey": {"hint": ""}})
        trust = Trust(keys=[public])
        assert trust.verify_envelope(bundle) == payload
        with pytest.raises(BundleError, match="no SHA-256 or BLAKE3 digest"):
            trust.verify(bundle, b"{}")


def test_blake3_is_a_digest_too(tmp_path):
    """REQ-SIG-002: of the digests that the reference library knows, these two."""
    private, public = write_key(tmp_path)
    statement = json.loads(dump_statement(b"{}", "name"))
    row = statement["predicate"]["resources"][0]
    for algorithm, digest, is_right in (
        ("blake3", blake3(b"{}").digest(), True),
        ("sha256", hashlib.sha256(b"{}").digest(), True),
        ("blake3", hashlib.sha256(b"{}").digest(), False),
        ("blake2", hashlib.blake2b(b"{}").digest(), False),
        ("md5", hashlib.sha256(b"{}").digest(), False),
    ):
        row.update(algorithm=algorithm, digest=digest.hex())
        statement["subject"][0]["digest"]["sha256"] = hashlib.sha256(digest).hexdigest()
        payload = json.dumps(statement).encode()
        key: Any = serialization.load_pem_private_key(private.read_bytes(), None)
        signature = key.sign(signed_bytes(PAYLOAD_TYPE, payload), ec.ECDSA(hashes.SHA256()))
        bundle = dump_bundle(payload, signature, {"publicKey": {"hint": ""}})
        with contextlib.nullcontext() if is_right else pytest.raises(BundleError):
            Trust(keys=[public]).verify(bundle, b"{}")


def test_hostile_bundles_cost_little(tmp_path):
    signed = Signed(tmp_path / "signed", certified=True)
    bundle = json.loads(signed.bundles[0])
    chain = bundle["verificationMaterial"]["x509CertificateChain"]["certificates"]
    chain += chain[1:] * 400
    hostile = [
        b"[" * (1 << 20),
        b'{"mediaType":' * 80_000,
        b'{"a":' + b"9" * (1 << 19) + b"}",
        json.dumps(bundle).encode()[: 1 << 20],
        b'{"dsseEnvelope":{"payload":"' + b"A" * 1_000_000 + b'"}}',
    ]
    begin_s = time.process_time()
    for content in hostile:
        signed.accepts(content, signed.manifests[0])
    assert time.process_time() - begin_s < 20

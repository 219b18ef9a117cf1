"""The reference library of model signing: its own bundles, and signatures in both directions."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Signer, State, Trust
from ckptfmt.documents.manifest import MANIFEST_NAME
from ckptfmt.documents.signature import BundleError
from ckptfmt.errors import CkptError
from tests.signing.keys import write_certificates, write_key

#: The folder `scripts/tests` of a checkout of https://github.com/sigstore/model-transparency.
CORPUS = os.environ.get("CKPTFMT_OMS_CORPUS")
IDENTITY = {"identity": "stefanb@us.ibm.com", "issuer": "https://sigstore.verify.ibm.com/oauth2"}


@pytest.mark.skipif(CORPUS is None, reason="CKPTFMT_OMS_CORPUS names the corpus of model signing")
@pytest.mark.parametrize("version", ["v0.2.0", "v0.3.1", "v1.0.0", "v1.0.1", "v1.1.0"])
@pytest.mark.parametrize("kind", ["elliptic-key", "certificate", "sigstore"])
def test_the_corpus_of_the_reference_library(version: str, kind: str) -> None:
    """Envelopes from 0.3 on are accepted; an earlier one has another encoding, and is refused."""
    assert CORPUS is not None
    place = Path(CORPUS) / f"{version}-{kind}"
    if not place.is_dir():
        pytest.skip(f"the corpus has no {place.name}")
    if kind == "sigstore":
        pytest.importorskip("sigstore")
    keys = Path(CORPUS) / "keys" / "certificate"
    trusts: dict[str, Callable[[], Trust]] = {
        "elliptic-key": lambda: Trust(keys=[keys / "signing-key-pub.pem"]),
        "certificate": lambda: Trust(roots=[keys / "ca-cert.pem"]),
        "sigstore": lambda: Trust(**IDENTITY),
    }
    bundle = (place / "model.sig").read_bytes()
    trust = trusts[kind]()
    if version == "v0.2.0":
        with pytest.raises(BundleError):
            trust.verify_envelope(bundle)
        return
    statement = json.loads(trust.verify_envelope(bundle))
    rows = statement["predicate"]["resources"]
    for row in rows:
        file = place / ("signme-1" if row["name"] == "." else row["name"])
        assert row["digest"] == hashlib.sha256(file.read_bytes()).hexdigest()
    changed = json.loads(bundle)
    payload = changed["dsseEnvelope"]["payload"]
    changed["dsseEnvelope"]["payload"] = base64.b64encode(
        base64.b64decode(payload).replace(b"signme", b"forged", 1) + b" "
    ).decode()
    with pytest.raises(BundleError):
        trust.verify_envelope(json.dumps(changed).encode())
    with pytest.raises(BundleError):
        trust.verify(bundle, b"{}")
    if kind == "sigstore":
        with pytest.raises(BundleError):
            Trust(identity="me@example.com", issuer=IDENTITY["issuer"]).verify_envelope(bundle)


def test_the_reference_library_accepts_and_is_accepted(tmp_path):
    """A signature of ckptfmt is verified by the library, and one of the library by ckptfmt."""
    model_signing = pytest.importorskip("model_signing")
    private, public = write_key(tmp_path)
    chain, root = write_certificates(tmp_path)
    state = State(weights={"w": np.ones(4)})
    place = tmp_path / "ckpt"
    ckptfmt.save(place, state, step=3, sign=private)
    ckptfmt.save(
        tmp_path / "certified", state, step=3, sign=Signer(key=private, certificates=chain)
    )

    def verifying(kind: str, **options: Any) -> Any:
        config = model_signing.verifying.Config().set_ignore_unsigned_files(True)
        return getattr(config, f"use_{kind}_verifier")(**options)

    by_key = verifying("elliptic_key", public_key=public)
    by_key.verify(place, next(place.glob("signature-*")))
    by_root = verifying("certificate", certificate_chain=[root])
    by_root.verify(tmp_path / "certified", next((tmp_path / "certified").glob("signature-*")))
    manifest = place / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(ValueError, match="mismatch"):
        by_key.verify(place, next(place.glob("signature-*")))
    # The other way: the library signs all files of a checkpoint, and the manifest among them.
    other = tmp_path / "other"
    ckptfmt.save(other, state, step=3)
    signing = model_signing.signing.Config().use_elliptic_key_signer(private_key=private)
    signing.sign(other, tmp_path / "model.sig")
    ckptfmt.sign(other, bundle=(tmp_path / "model.sig").read_bytes())
    ckptfmt.open(other, require_signature=public).close()
    with pytest.raises(CkptError):
        ckptfmt.open(other, require_signature=write_key(tmp_path, "stranger")[1])

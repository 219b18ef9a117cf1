"""Signatures of a manifest: bundles of Sigstore's form, as of the OpenSSF Model Signing format.

A bundle has an envelope of DSSE around an in-toto statement. The statement has the digest of the
file ``manifest.json``.

Spec: ``spec/companions/79-signatures.md``.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
from typing import Any, Final

from ckptfmt import limits
from ckptfmt.digest import digest_bytes
from ckptfmt.documents.manifest import MANIFEST_NAME

#: Media type of bundles.
MEDIA_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://model_signing/signature/v1.0"

#: The digests that a statement may have, by their name there.
_DIGESTS: Final = {
    "sha256": lambda content: hashlib.sha256(content).digest(),
    "blake3": digest_bytes,
}


class BundleError(ValueError):
    """The reason for which a bundle doesn't sign a manifest."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A parsed bundle. Nothing is verified yet.

    Attributes:
        payload: bytes of the statement.
        payload_type: type of the payload in the envelope.
        signature: signature over `signed_bytes` of type and payload.
        certificates: certificate of the signer and intermediate certificates, in DER; empty for a
            signer with a key.
        is_of_sigstore: whether the bundle has an entry of a transparency log.
    """

    payload: bytes
    payload_type: str
    signature: bytes
    certificates: tuple[bytes, ...]
    is_of_sigstore: bool


def bundle_prefix(attempt: str) -> str:
    """Return the beginning of the names of an attempt's bundles."""
    return f"signature-{attempt}-"


def bundle_path(attempt: str, signer: str) -> str:
    """Return the path of a bundle in a checkpoint's directory.

    Args:
        attempt: id of the checkpoint's attempt.
        signer: digits of the signer, by `hint_of`; the first 16 count.
    """
    return f"{bundle_prefix(attempt)}{signer[:16]}.sigstore.json"


def hint_of(public: bytes) -> str:
    """Return the 64 digits of a public key in PEM, or of a certificate in DER.

    The first 16 digits are the name of the signer.
    """
    return hashlib.sha256(public).hexdigest()


def signed_bytes(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes under the signature of an envelope: DSSE's pre-authentication encoding."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def dump_statement(manifest: bytes, name: str) -> bytes:
    """Return the statement about a file ``manifest.json``.

    Args:
        manifest: content of the file.
        name: name of the checkpoint in the statement, for information.
    """
    digest = hashlib.sha256(manifest).digest()
    return json.dumps(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": hashlib.sha256(digest).hexdigest()}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "serialization": {
                    "method": "files",
                    "hash_type": "sha256",
                    "allow_symlinks": False,
                    "ignore_paths": [],
                },
                "resources": [
                    {"name": MANIFEST_NAME, "algorithm": "sha256", "digest": digest.hex()}
                ],
            },
        }
    ).encode()


def check_statement(payload: bytes, manifest: bytes) -> None:
    """Raise BundleError unless a statement has the digest of a file ``manifest.json``.

    Digests of other files are ignored: the manifest has digests of its files.

    Args:
        payload: the statement, from an envelope with a verified signature.
        manifest: content of the file.

    Spec: REQ-SIG-002.
    """
    statement = _parse_object(payload, "the statement")
    if statement.get("_type") != STATEMENT_TYPE or statement.get("predicateType") != PREDICATE_TYPE:
        detail = f"{statement.get('predicateType')!r:.80} isn't the type of a model's signature"
        raise BundleError(detail)
    try:
        resources = [
            (str(row["name"]), str(row["algorithm"]), bytes.fromhex(row["digest"]))
            for row in statement["predicate"]["resources"]
        ]
        (subject,) = statement["subject"]
        whole = bytes.fromhex(subject["digest"]["sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError("the statement isn't of the form of a model's signature") from error
    if hashlib.sha256(b"".join(digest for *_, digest in resources)).digest() != whole:
        raise BundleError("the digest of the statement's subject isn't that of its resources")
    found = [row for row in resources if row[0] == MANIFEST_NAME]
    if len(found) != 1 or found[0][1] not in _DIGESTS:
        raise BundleError(f"the statement has no SHA-256 or BLAKE3 digest of {MANIFEST_NAME}")
    if _DIGESTS[found[0][1]](manifest) != found[0][2]:
        raise BundleError(f"the signature is of another {MANIFEST_NAME}")


def dump_bundle(payload: bytes, signature: bytes, material: dict[str, Any]) -> bytes:
    """Return the content of a bundle's file.

    Args:
        payload: the statement.
        signature: signature over `signed_bytes`.
        material: the member of the signer's key or certificates.
    """
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {**material, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": to_base64(payload),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": to_base64(signature), "keyid": ""}],
        },
    }
    return json.dumps(bundle, separators=(",", ":")).encode()


def parse_bundle(content: bytes) -> Bundle:
    """Return the parsed bundle of a file. Raises: BundleError. Spec: REQ-SIG-002."""
    if len(content) > limits.JSON_NBYTES:
        raise BundleError(f"a bundle has at most {limits.JSON_NBYTES} bytes")
    bundle = _parse_object(content, "the file")
    try:
        media_type = str(bundle["mediaType"])
        envelope = bundle["dsseEnvelope"]
        material = bundle["verificationMaterial"]
        (signature,) = envelope["signatures"]
        if "certificate" in material:
            certificates = [material["certificate"]]
        else:
            certificates = material.get("x509CertificateChain", {}).get("certificates", [])
        found = Bundle(
            payload=_from_base64(envelope["payload"]),
            payload_type=str(envelope["payloadType"]),
            signature=_from_base64(signature["sig"]),
            certificates=tuple(_from_base64(one["rawBytes"]) for one in certificates),
            is_of_sigstore=bool(material.get("tlogEntries")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError("the file isn't a bundle of Sigstore with an envelope of DSSE") from error
    if not media_type.startswith("application/vnd.dev.sigstore.bundle"):
        raise BundleError(f"{media_type!r:.80} isn't the media type of a bundle of Sigstore")
    if found.payload_type != PAYLOAD_TYPE:
        raise BundleError(f"{found.payload_type!r:.80} isn't the payload type of a statement")
    return found


def to_base64(content: bytes) -> str:
    """Return bytes in the form of bundles."""
    return base64.b64encode(content).decode()


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


def _parse_object(content: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{what} isn't JSON") from error
    if not isinstance(found, dict):
        raise BundleError(f"{what} isn't a JSON object")
    return found

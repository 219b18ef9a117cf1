"""A private key that signs the manifests of saves."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from ckptfmt.documents.manifest import Manifest
from ckptfmt.documents.signature import (
    PAYLOAD_TYPE,
    dump_bundle,
    dump_statement,
    hint_of,
    signed_bytes,
    to_base64,
)
from ckptfmt.signing.bundles import name_of, put_bundle
from ckptfmt.signing.keys import Cryptography, load_private_key, take_key
from ckptfmt.store.protocol import Store

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """A private key with which saves sign their manifests, for ``sign=``.

    The manifest has the digests of all other documents, and these the digests of all bytes. So the
    signature covers the whole checkpoint, and a save hashes nothing again. The process that commits
    a save signs: with a saver process, the saver reads the key.

    Attributes:
        key: PEM file of an elliptic-curve key of the curve P-256, P-384 or P-521.
        password: password of an encrypted file; by default None.
        certificates: PEM file of the key's certificate, followed by intermediate certificates; by
            default None, for a signature that is verified with the public key.

    Raises: StateError(ARGUMENT) for a file without a fitting key, and without the package
        cryptography.

    >>> Signer(key="no-such-file.pem")
    Traceback (most recent call last):
    ...
    ckptfmt.errors.StateError: ARGUMENT at ...no-such-file.pem: the key can't be read: ...
    """

    key: str | os.PathLike[str]
    password: str | None = dataclasses.field(default=None, repr=False)
    certificates: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        # Another process may have another working directory.
        for name in ("key", "certificates"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, os.path.abspath(os.fspath(given)))  # noqa: PTH100
        self._load()

    @classmethod
    def of(cls, given: Signer | str | os.PathLike[str] | None) -> Signer | None:
        """Return a signer from an argument ``sign=``: a signer, or the file of a private key.

        Raises: as the class; StateError(ARGUMENT) for a value of another type.
        """
        return take_key(given, cls, lambda key: cls(key=key), where="sign=")

    def as_dict(self) -> dict[str, Any]:
        """Return the arguments, as plain values for the saver."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _load(self) -> tuple[EllipticCurvePrivateKey, tuple[bytes, ...]]:
        chain = None if self.certificates is None else os.fspath(self.certificates)
        return load_private_key(os.fspath(self.key), self.password, chain)

    def make_bundle(self, manifest: bytes, name: str) -> tuple[str, bytes]:
        """Return the signer's digits, and a bundle that signs a file ``manifest.json``.

        Args:
            manifest: content of the file.
            name: name of the checkpoint in the statement.

        Spec: REQ-SIG-001, REQ-SIG-002.
        """
        crypto = Cryptography()
        key, certificates = self._load()
        public = crypto.dump_public(key.public_key())
        payload = dump_statement(manifest, name)
        signature = key.sign(signed_bytes(PAYLOAD_TYPE, payload), crypto.scheme(key.curve.key_size))
        material: dict[str, Any] = {"publicKey": {"hint": hint_of(public)}}
        if certificates:
            rows = [{"rawBytes": to_base64(one)} for one in certificates]
            material = {"x509CertificateChain": {"certificates": rows}}
        hint = hint_of(certificates[0] if certificates else public)
        return hint, dump_bundle(payload, signature, material)

    def sign(self, store: Store, manifest: Manifest, content: bytes) -> str:
        """Put a signature beside a manifest, which may still be uncommitted.

        An earlier signature of the same signer is replaced.

        Args:
            store: store rooted at the checkpoint's directory.
            content: content of the file ``manifest.json``.

        Returns: the path of the bundle in the checkpoint's directory.
        Raises: StoreError; StateError(ARGUMENT) if the key can't be read any more.
        Spec: REQ-SIG-001, REQ-SIG-003.
        """
        signer, bundle = self.make_bundle(content, name_of(manifest))
        return put_bundle(store, manifest, signer, bundle)

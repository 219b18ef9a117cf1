"""Private and public keys, certificates, and identities of Sigstore."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ckptfmt.documents.signature import Bundle, BundleError, signed_bytes
from ckptfmt.errors import CkptError, Code, err

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )

T = TypeVar("T")

_INSTALL: Final = 'pip install "ckptfmt[sign]"'
KEY_REMEDY: Final = (
    "Give a PEM file of an elliptic-curve key, such as made by `openssl ecparam -name prime256v1"
    " -genkey -noout -out key.pem` and `openssl ec -in key.pem -pubout -out key.pub`."
)


def take_key(given: Any, cls: type[T], make: Callable[[Any], T], *, where: str) -> T | None:
    """Return an argument that is None, an instance of a class, or the file of a key.

    Args:
        make: returns the instance for a file.
        where: name of the argument.

    Raises: StateError(ARGUMENT) for a value of another type; errors of `make`.
    """
    if given is None or isinstance(given, cls):
        return given
    if not isinstance(given, str | os.PathLike):
        detail = f"{given!r} is neither a {cls.__name__} nor a file"
        raise err(Code.ARGUMENT, detail, where=where, remedy=KEY_REMEDY)
    return make(given)


class Cryptography:
    """The needed parts of the package cryptography, imported at the first use.

    Raises: StateError(ARGUMENT) without the package.
    """

    def __init__(self) -> None:
        try:
            from cryptography import exceptions, x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
            from cryptography.x509 import verification
        except ImportError as error:
            detail = f"signatures need the package cryptography, from version 45: {error}"
            raise err(Code.ARGUMENT, detail, where="sign", remedy=_INSTALL) from error
        self.ec = ec
        self.hashes = hashes
        self.serialization = serialization
        self.x509 = x509
        self.verification = verification
        self.InvalidSignature = exceptions.InvalidSignature

    def scheme(self, key_nbits: int) -> Any:
        """Return the signature scheme of a curve: ECDSA with the digest of the curve's size."""
        digests: dict[int, Any] = {
            256: self.hashes.SHA256,
            384: self.hashes.SHA384,
            521: self.hashes.SHA512,
        }
        return self.ec.ECDSA(digests[key_nbits]())

    def dump_public(self, key: EllipticCurvePublicKey) -> bytes:
        """Return a public key in PEM."""
        kind = self.serialization
        return key.public_bytes(kind.Encoding.PEM, kind.PublicFormat.SubjectPublicKeyInfo)

    def check_curve(self, key: Any, kind: type) -> None:
        """Raise ValueError unless a key is of a supported curve."""
        curves = (self.ec.SECP256R1, self.ec.SECP384R1, self.ec.SECP521R1)
        has_curve = isinstance(key, kind) and isinstance(getattr(key, "curve", None), curves)
        if not has_curve:
            raise ValueError("it isn't a key of the curve P-256, P-384 or P-521")


def _refuse_key(path: str, error: Exception) -> CkptError:
    return err(Code.ARGUMENT, f"the key can't be read: {error}", where=path, remedy=KEY_REMEDY)


@functools.lru_cache(maxsize=16)
def load_private_key(
    path: str, password: str | None, certificates: str | None
) -> tuple[EllipticCurvePrivateKey, tuple[bytes, ...]]:
    """Return a private key, and its certificates in DER. Raises: StateError(ARGUMENT)."""
    crypto = Cryptography()
    secret = None if password is None else password.encode()
    try:
        key: Any = crypto.serialization.load_pem_private_key(Path(path).read_bytes(), secret)
        crypto.check_curve(key, crypto.ec.EllipticCurvePrivateKey)
    except (OSError, ValueError, TypeError) as error:
        raise _refuse_key(path, error) from error
    chain = [] if certificates is None else load_certificates(certificates)
    if chain and chain[0].public_key() != key.public_key():
        raise _refuse_key(path, ValueError(f"the first certificate of {certificates} isn't its"))
    encoding = crypto.serialization.Encoding.DER
    return key, tuple(certificate.public_bytes(encoding) for certificate in chain)


@functools.lru_cache(maxsize=64)
def load_public_key(path: str) -> EllipticCurvePublicKey:
    """Return a public key. Raises: StateError(ARGUMENT)."""
    crypto = Cryptography()
    try:
        key: Any = crypto.serialization.load_pem_public_key(Path(path).read_bytes())
        crypto.check_curve(key, crypto.ec.EllipticCurvePublicKey)
    except (OSError, ValueError) as error:
        raise _refuse_key(path, error) from error
    found: EllipticCurvePublicKey = key
    return found


@functools.lru_cache(maxsize=64)
def load_certificates(path: str) -> list[Any]:
    """Return the certificates of a PEM file. Raises: StateError(ARGUMENT)."""
    try:
        return list(Cryptography().x509.load_pem_x509_certificates(Path(path).read_bytes()))
    except (OSError, ValueError) as error:
        detail = f"the certificates can't be read: {error}"
        raise err(Code.ARGUMENT, detail, where=path, remedy="Give a file in PEM.") from error


def verify_by_key(key: EllipticCurvePublicKey, bundle: Bundle, _: bytes) -> None:
    """Raise BundleError unless a key made a bundle's signature. Spec: REQ-SIG-004."""
    crypto = Cryptography()
    signed = signed_bytes(bundle.payload_type, bundle.payload)
    try:
        key.verify(bundle.signature, signed, crypto.scheme(key.curve.key_size))
    except crypto.InvalidSignature as error:
        raise BundleError("not signed by a trusted key") from error


def verify_by_root(roots: list[Any], bundle: Bundle, content: bytes) -> None:
    """Verify the chain of a bundle's certificates, and the signature. Spec: REQ-SIG-005."""
    crypto = Cryptography()
    x509 = crypto.x509
    rules = crypto.verification
    if not bundle.certificates or bundle.is_of_sigstore:
        raise BundleError("no certificate below a trusted root")
    try:
        signing, *between = map(x509.load_der_x509_certificate, bundle.certificates)
        authority = rules.ExtensionPolicy.permit_all().require_present(
            x509.BasicConstraints, rules.Criticality.AGNOSTIC, None
        )
        policy = rules.PolicyBuilder().store(rules.Store(roots))
        policy = policy.time(signing.not_valid_before_utc).extension_policies(
            ca_policy=authority, ee_policy=rules.ExtensionPolicy.permit_all()
        )
        policy.build_client_verifier().verify(signing, between)
        _check_usage(x509, signing)
        key: Any = signing.public_key()
        crypto.check_curve(key, crypto.ec.EllipticCurvePublicKey)
    except Exception as error:
        raise BundleError(f"no certificate below a trusted root: {error}") from error
    verify_by_key(key, bundle, content)


def _check_usage(x509: Any, certificate: Any) -> None:
    """Raise ValueError unless a certificate's extensions allow signatures, or code signing."""
    found = {extension.oid: extension.value for extension in certificate.extensions}
    usage = found.get(x509.KeyUsage.oid)
    purposes = found.get(x509.ExtendedKeyUsage.oid, ())
    signs = usage is not None and usage.digital_signature
    if not signs and x509.oid.ExtendedKeyUsageOID.CODE_SIGNING not in purposes:
        raise ValueError("the certificate isn't for signatures")


@functools.lru_cache(maxsize=4)
def load_sigstore(identity: str, issuer: str, root: str | None) -> Callable[[Bundle, bytes], None]:
    """Return a function that verifies bundles of Sigstore by an identity.

    Args:
        root: file with the keys of an instance of Sigstore; None for the public instance.

    Raises: StateError(ARGUMENT).
    """
    try:
        from sigstore import errors, models
        from sigstore.verify import Verifier, policy
    except ImportError as error:
        detail = f"identities need the package sigstore: {error}"
        remedy = 'pip install "ckptfmt[sigstore]"'
        raise err(Code.ARGUMENT, detail, where="Trust(identity=)", remedy=remedy) from error
    try:
        trusted = (
            models.ClientTrustConfig.production(offline=True).trusted_root
            if root is None
            else models.TrustedRoot.from_file(root)
        )
        verifier = Verifier(trusted_root=trusted)
    except (OSError, ValueError, errors.Error) as error:
        detail = f"the keys of Sigstore can't be read: {error}"
        remedy = "Give the file trusted_root.json of an instance of Sigstore."
        raise err(Code.ARGUMENT, detail, where=root, remedy=remedy) from error
    by = policy.Identity(identity=identity, issuer=issuer)

    def verify(bundle: Bundle, content: bytes) -> None:
        if not bundle.is_of_sigstore:
            raise BundleError("not signed by an identity of Sigstore")
        try:
            kind, payload = verifier.verify_dsse(models.Bundle.from_json(content), by)
        except Exception as error:
            raise BundleError(f"not signed by {identity}: {error}") from error
        if (kind, payload) != (bundle.payload_type, bundle.payload):
            raise BundleError("the bundle has another envelope")

    return verify

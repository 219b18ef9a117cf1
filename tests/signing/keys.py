"""Keys and certificates for tests, made anew in each test run."""

from __future__ import annotations

import datetime as dt
import functools
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PASSWORD = "a password of the key"


@functools.cache
def _key(name: str, curve: str) -> ec.EllipticCurvePrivateKey:
    curves: dict[str, ec.EllipticCurve] = {
        "P-256": ec.SECP256R1(),
        "P-384": ec.SECP384R1(),
        "P-521": ec.SECP521R1(),
        "secp256k1": ec.SECP256K1(),
    }
    assert name
    return ec.generate_private_key(curves[curve])


def write_key(
    directory: Path, name: str = "key", *, curve: str = "P-256", password: str | None = None
) -> tuple[Path, Path]:
    """Write a key, the same for the same name; return the private file and the public file."""
    key = _key(name, curve)
    encryption: Any = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password.encode())
    private = directory / f"{name}.pem"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )
    public = directory / f"{name}.pub"
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


def write_certificates(
    directory: Path, name: str = "key", *, root: str = "root", signs: bool = True
) -> tuple[Path, Path]:
    """Write a certificate of a key, with an intermediate one below a root.

    Args:
        signs: whether the key may be used for signatures.

    Returns: the file of the chain, and the file of the root.
    """
    between = f"between-{root}"
    names = {root: root, between: root, name: between}
    made: dict[str, x509.Certificate] = {}
    for number, (subject, issuer) in enumerate(names.items()):
        is_authority = subject != name
        usage = x509.KeyUsage(
            digital_signature=signs and not is_authority,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=not signs and not is_authority,
            key_cert_sign=is_authority,
            crl_sign=False,
            encipher_only=False,
            decipher_only=False,
        )
        begin = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(_key(subject, "P-256").public_key())
            .serial_number(1000 + number)
            .not_valid_before(begin)
            .not_valid_after(begin + dt.timedelta(days=365))  # expired for long
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(usage, critical=True)
        )
        made[subject] = builder.sign(_key(issuer, "P-256"), hashes.SHA256())
    pem = {subject: one.public_bytes(serialization.Encoding.PEM) for subject, one in made.items()}
    chain = directory / f"{name}.chain"
    chain.write_bytes(pem[name] + pem[between])
    roots = directory / f"{root}.crt"
    roots.write_bytes(pem[root])
    return chain, roots

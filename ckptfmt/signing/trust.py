"""Trusted signers, and the check of a checkpoint's signature."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from ckptfmt import limits
from ckptfmt.documents.manifest import MANIFEST_NAME, Manifest, parse_register
from ckptfmt.documents.signature import Bundle, BundleError, check_statement, parse_bundle
from ckptfmt.errors import CkptError, Code, err
from ckptfmt.signing.bundles import BUNDLES, list_bundles
from ckptfmt.signing.keys import (
    load_certificates,
    load_public_key,
    load_sigstore,
    take_key,
    verify_by_key,
    verify_by_root,
)
from ckptfmt.signing.pin import compare_run_with_pin, compare_with_pin
from ckptfmt.store.protocol import Store

#: Codes of a bundle that is missing by now, is no file or is too large.
_UNREADABLE: Final = frozenset({Code.FILE_MISSING, Code.UNSAFE_FILE, Code.LIMIT_EXCEEDED})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """The signers of acceptable checkpoints, for ``require_signature=``.

    A signature by any of the signers is enough. The signature covers the manifest; digests in the
    manifest cover all further bytes, including the bases of a delta.

    Attributes:
        keys: PEM files of public keys.
        roots: PEM files of root certificates. Every signing certificate below a root is trusted, at
            the beginning of its validity: a checkpoint outlives its certificate.
        identity: identity in a certificate of Sigstore, such as an email address or the URL of a
            workflow; with `issuer`.
        issuer: URL of the provider of the identity.
        sigstore_root: file with the keys of a Sigstore instance (``trusted_root.json``); by default
            None, for the public instance, as in the package sigstore. Nothing is downloaded.
        pin: file with the newest seen checkpoint of a run; by default None. An older checkpoint is
            refused, and so is a checkpoint of another run; a newer checkpoint is recorded. A
            `Checkpointer` also records its saves and launches. The first checkpoint makes the file,
            which belongs on a disk out of reach of the run's writers.

    Raises: StateError(ARGUMENT) without a signer, for a file without a fitting key, and without
        the packages cryptography or sigstore.

    >>> Trust()
    Traceback (most recent call last):
    ...
    ckptfmt.errors.StateError: ARGUMENT at Trust(): no signer is trusted. Remedy: ...
    """

    keys: Iterable[str | os.PathLike[str]] = ()
    roots: Iterable[str | os.PathLike[str]] = ()
    identity: str | None = None
    issuer: str | None = None
    sigstore_root: str | os.PathLike[str] | None = None
    pin: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("keys", "roots"):
            given = getattr(self, name)
            paths = (given,) if isinstance(given, str | os.PathLike) else tuple(given)
            object.__setattr__(self, name, tuple(os.path.abspath(path) for path in paths))  # noqa: PTH100
        if (self.identity is None) != (self.issuer is None):
            detail = "an identity and its issuer belong together"
            raise err(Code.ARGUMENT, detail, where="Trust(identity=, issuer=)", remedy="Give both.")
        if not self.keys and not self.roots and self.identity is None:
            remedy = "Give keys=, roots=, or identity= with issuer=."
            raise err(Code.ARGUMENT, "no signer is trusted", where="Trust()", remedy=remedy)
        if self.pin is not None:
            object.__setattr__(self, "pin", os.path.abspath(self.pin))  # noqa: PTH100
        list(self._verifiers())

    @classmethod
    def of(cls, given: Trust | str | os.PathLike[str] | None) -> Trust | None:
        """Return the trust of an argument ``require_signature=``, also of a public key's file.

        Raises: as the class; StateError(ARGUMENT) for a value of another type.
        """
        return take_key(given, cls, lambda key: cls(keys=(key,)), where="require_signature=")

    def check(self, store: Store, manifest: Manifest, *, may_be_older: bool = False) -> str:
        """Raise unless a trusted signer signed a checkpoint, and no newer checkpoint was seen.

        Args:
            store: store rooted at the checkpoint's directory.
            manifest: the opened manifest.
            may_be_older: whether to leave out the comparison with the pin.

        Returns: the path of the verified bundle in the checkpoint's directory.
        Raises: TrustError(SIGNATURE_MISSING, ROLLED_BACK); IntegrityError; StoreError.
        Spec: REQ-SIG-004 to REQ-SIG-006.
        """
        content = store.read(MANIFEST_NAME, limit_nbytes=limits.MANIFEST_NBYTES)
        register = parse_register(content)
        if not isinstance(register, Manifest) or register.digest != manifest.digest:
            detail = "the checkpoint was replaced during the check of its signature"
            raise err(Code.CHECKPOINT_RETIRED, detail, where=MANIFEST_NAME)
        path = self._find_signature(store, manifest, content)
        if self.pin is not None and not may_be_older:
            compare_with_pin(self.pin, manifest)
        return path

    def check_run(self, manifests: Collection[Manifest]) -> None:
        """Raise if a newer checkpoint of a run was seen than the run has; check no signature.

        Args:
            manifests: manifests of the run's checkpoints.

        Raises: TrustError(ROLLED_BACK); StateError(ARGUMENT); StoreError. Spec: REQ-SIG-006.
        """
        if self.pin is not None:
            compare_run_with_pin(self.pin, manifests)

    def verify(self, bundle: bytes, manifest: bytes) -> None:
        """Raise `BundleError` unless a bundle is by a trusted signer, and signs a manifest.

        Args:
            bundle: content of a bundle's file.
            manifest: content of the file ``manifest.json``.

        Spec: REQ-SIG-002, REQ-SIG-004.
        """
        check_statement(self.verify_envelope(bundle), manifest)

    def verify_envelope(self, bundle: bytes) -> bytes:
        """Return the statement in a bundle by a trusted signer. Raises: BundleError."""
        parsed = parse_bundle(bundle)
        reasons = []
        for verify in self._verifiers():
            try:
                verify(parsed, bundle)
            except BundleError as error:
                reasons.append(str(error))
            else:
                return parsed.payload
        raise BundleError("; ".join(dict.fromkeys(reasons)))

    def _verifiers(self) -> Iterator[Callable[[Bundle, bytes], None]]:
        """Yield functions that raise BundleError unless one of the signers signed a bundle."""
        for path in self.keys:
            yield functools.partial(verify_by_key, load_public_key(os.fspath(path)))
        for path in self.roots:
            yield functools.partial(verify_by_root, load_certificates(os.fspath(path)))
        if self.identity is not None and self.issuer is not None:
            root = None if self.sigstore_root is None else os.fspath(self.sigstore_root)
            yield load_sigstore(self.identity, self.issuer, root)

    def _find_signature(self, store: Store, manifest: Manifest, content: bytes) -> str:
        """Return the path of the first bundle that signs a manifest.

        Raises: TrustError(SIGNATURE_MISSING); StoreError.
        """
        reasons = []
        for path in list_bundles(store, manifest)[:BUNDLES]:
            try:
                self.verify(store.read(path, limit_nbytes=limits.JSON_NBYTES), content)
            except (BundleError, CkptError) as error:
                if isinstance(error, CkptError) and error.code not in _UNREADABLE:
                    raise
                reasons.append(f"{path}: {error}")
            else:
                return path
        raise err(
            Code.SIGNATURE_MISSING,
            f"no trusted signer signed the checkpoint: {'; '.join(reasons) or 'no signature'}",
            where=MANIFEST_NAME,
            requirement="REQ-SIG-004",
        )


def pin_of(trust: Trust | None) -> str:
    """Return the file of a pin; empty without a pin."""
    return "" if trust is None or trust.pin is None else os.fspath(trust.pin)

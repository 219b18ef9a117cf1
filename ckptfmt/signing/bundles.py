"""The bundles of a checkpoint, as files beside the manifest."""

from __future__ import annotations

from typing import Final

from ckptfmt import limits
from ckptfmt.documents.manifest import MANIFEST_NAME, Manifest, checkpoint_name
from ckptfmt.documents.signature import (
    BundleError,
    bundle_path,
    bundle_prefix,
    check_statement,
    hint_of,
    parse_bundle,
)
from ckptfmt.errors import Code, err
from ckptfmt.store.protocol import Store

#: Largest number of bundles of a checkpoint that are read, in the order of their names.
BUNDLES: Final = 16


def list_bundles(store: Store, manifest: Manifest) -> list[str]:
    """Return the paths of a checkpoint's bundles, sorted.

    Args:
        store: store rooted at the checkpoint's directory.
    """
    prefix = bundle_prefix(manifest.origin.attempt)
    return sorted(name for name in store.list_names("") if name.startswith(prefix))


def copy_bundles(source: Store, target: Store, manifest: Manifest) -> None:
    """Copy the bundles of a checkpoint, at most `BUNDLES`.

    Args:
        source, target: stores rooted at the checkpoint's directories.

    Spec: REQ-SIG-007.
    """
    for path in list_bundles(source, manifest)[:BUNDLES]:
        target.replace(path, source.read(path, limit_nbytes=limits.JSON_NBYTES))


def attach_bundle(store: Store, manifest: Manifest, content: bytes, bundle: bytes) -> str:
    """Put a bundle made elsewhere beside a manifest; the signature itself isn't verified.

    Args:
        store: store rooted at the checkpoint's directory.
        content: content of the file ``manifest.json``.
        bundle: content of the bundle's file.

    Returns: the path of the bundle in the checkpoint's directory.
    Raises: TrustError(SIGNATURE_MISSING) if the bundle is of another manifest; StoreError.
    """
    try:
        parsed = parse_bundle(bundle)
        check_statement(parsed.payload, content)
    except BundleError as error:
        raise err(
            Code.SIGNATURE_MISSING,
            f"the bundle doesn't sign this checkpoint: {error}",
            where=store.name,
            requirement="REQ-SIG-002",
            remedy=f"Sign the file {MANIFEST_NAME} of this checkpoint.",
        ) from error
    return put_bundle(store, manifest, hint_of(b"".join(parsed.certificates[:1]) or bundle), bundle)


def put_bundle(store: Store, manifest: Manifest, signer: str, bundle: bytes) -> str:
    """Put a bundle beside a manifest, and return its path.

    Args:
        store: store rooted at the checkpoint's directory.
        signer: digits of the signer, by `hint_of`.

    Spec: REQ-SIG-001.
    """
    path = bundle_path(manifest.origin.attempt, signer)
    store.replace(path, bundle)
    store.sync("")
    return path


def name_of(manifest: Manifest) -> str:
    """Return the name of a checkpoint in statements and messages."""
    origin = manifest.origin
    if origin.launch is None:
        return f"step-{origin.step:08d}"
    return checkpoint_name(origin.step, origin.launch)

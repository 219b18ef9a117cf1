"""One document or header of a checkpoint, read and checked against what names it. Spec: REQ-OPN-001 to REQ-OPN-004."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ckptfmt import limits
from ckptfmt.commit.decision import read_register
from ckptfmt.digest import PREFIX, digest_bytes
from ckptfmt.documents.index import Index
from ckptfmt.documents.manifest import MANIFEST_NAME, Abort, Manifest, index_name
from ckptfmt.errors import Code, err
from ckptfmt.layout.merge import check_index_tiling, summarise

if TYPE_CHECKING:
    from ckptfmt.documents.part import PartFile
    from ckptfmt.store.protocol import Store


def read_manifest(store: Store) -> Manifest:
    """Return the manifest in a checkpoint directory's register.

    Raises: IntegrityError(NOT_COMMITTED, CHECKPOINT_ABORTED, CHECKPOINT_RETIRED) and those of `read_register`.
    Spec: REQ-MAN-001.
    """
    register = read_register(store)
    if isinstance(register, Manifest):
        return register
    if register is None:
        code, detail = Code.NOT_COMMITTED, f"{store.name} has no {MANIFEST_NAME}"
    elif isinstance(register, Abort):
        code, detail = Code.CHECKPOINT_ABORTED, register.reason
    else:
        code, detail = Code.CHECKPOINT_RETIRED, f"it was {register.manifest_digest}"
    raise err(code, detail, where=MANIFEST_NAME, requirement="REQ-MAN-001")


def read_index(store: Store, manifest: Manifest) -> Index:
    """Return the index that a manifest names, checked against it.

    Raises: IntegrityError(FILE_MISSING, FILE_NBYTES, DOC_DIGEST); FormatError(DOC_MISMATCH, MANIFEST_SUMMARY and
        those of parsing); LayoutError.
    Spec: REQ-IDX-001, REQ-IDX-004, REQ-MAN-006.
    """
    path = index_name(manifest.origin.attempt)
    content = read_exactly(store, path, manifest.index_nbytes)
    digest = bytes.fromhex(manifest.index_digest.removeprefix(PREFIX))
    index = Index.parse(content, where=path, digest=digest)
    if index.origin != manifest.origin or index.saved_unix_s != manifest.saved_unix_s:
        raise err(
            Code.DOC_MISMATCH, "manifest and index are of different attempts", where=path, requirement="REQ-IDX-001"
        )
    said = {name: dataclasses.replace(field, stored_nbytes=None) for name, field in manifest.fields.items()}
    if summarise(index) != said:
        raise err(
            Code.MANIFEST_SUMMARY,
            "the fields aren't as the index says",
            where=f"{MANIFEST_NAME}#/signed/fields",
            requirement="REQ-MAN-006",
        )
    check_index_tiling(index)
    return index


def check_nbytes(store: Store, file: PartFile) -> None:
    """Raise unless a file has the size that its part says. Raises: IntegrityError(FILE_NBYTES, FILE_MISSING)."""
    actual = store.nbytes(file.name)
    if actual != file.nbytes:
        raise err(
            Code.FILE_NBYTES,
            f"{actual} bytes where {file.nbytes} are declared",
            where=file.name,
            requirement="REQ-CKP-003",
        )


def read_header(store: Store, file: PartFile) -> bytes:
    """Return a file's header, which is the one that was digested. Raises: IntegrityError(HEADER_DIGEST)."""
    header = store.read_range(file.name, 0, file.header_nbytes)
    if digest_bytes(header) != file.header_digest:
        raise err(
            Code.HEADER_DIGEST,
            "the header isn't the one that was saved",
            where=f"{file.name}[0:{file.header_nbytes}]",
            requirement="REQ-PRT-008",
        )
    return header


def read_exactly(store: Store, path: str, nbytes: int) -> bytes:
    """Return a file that is named with its size. Raises: IntegrityError(FILE_MISSING, FILE_NBYTES)."""
    actual = store.nbytes(path)
    if actual != nbytes:
        raise err(
            Code.FILE_NBYTES, f"{actual} bytes where {nbytes} are declared", where=path, requirement="REQ-CKP-003"
        )
    return store.read(path, limit_nbytes=min(nbytes, limits.MSGPACK_NBYTES))

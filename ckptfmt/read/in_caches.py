"""Which files of a checkpoint aren't at home, because they were written to caches of nodes. Spec: REQ-OPN-012."""

from __future__ import annotations

from ckptfmt.documents.durability import HOME
from ckptfmt.read.files import CheckpointFiles, in_caches


def find_elsewhere(files: CheckpointFiles) -> dict[int, list[str]]:
    """Return the names of the files that aren't at home, by the writers whose parts say that they needn't be.

    Nothing is read unless the manifest has a durability; then the parts are, and the names in the directory.

    Raises: as `CheckpointFiles.open_part`; StoreError. Spec: REQ-OPN-002, REQ-OPN-012.
    """
    if files.manifest.durability == HOME:
        return {}
    files.open_parts(range(len(files.index.parts)))
    parts = [files.open_part(number).part for number in range(len(files.index.parts))]
    there = set(files.store.list_names(""))
    found = {
        part.writer: [file.name for file in part.files if file.name not in there]
        for part in parts
        if part.durability != HOME
    }
    return {writer: names for writer, names in found.items() if names}


def check_at_home(files: CheckpointFiles) -> None:
    """Raise unless the files of a checkpoint are at home, or should be.

    Raises: IntegrityError(FILES_IN_CACHES); as `find_elsewhere`. Spec: REQ-OPN-012.
    """
    elsewhere = find_elsewhere(files)
    if elsewhere:
        raise in_caches(files.manifest.durability, [name for names in elsewhere.values() for name in names])

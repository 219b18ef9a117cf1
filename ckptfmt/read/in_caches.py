"""Find the files of a checkpoint that are only in nodes' caches, not in the home store.

Spec: REQ-OPN-012.
"""

from __future__ import annotations

from ckptfmt.documents.durability import HOME
from ckptfmt.read.files import CheckpointFiles, in_caches


def find_elsewhere(files: CheckpointFiles) -> dict[int, list[str]]:
    """Return the names of files missing from the home store, by writers that permit this.

    If the manifest's durability is "home", no file is read and the result is empty. Otherwise all
    parts and the names in the checkpoint's directory are read.

    Returns: lists of file names, by writer number, for writers with missing files.
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
    """Raise if files are missing from the home store because they were saved to caches.

    Files whose part requires the home store aren't checked here.

    Raises: IntegrityError(FILES_IN_CACHES); as `find_elsewhere`. Spec: REQ-OPN-012.
    """
    elsewhere = find_elsewhere(files)
    if elsewhere:
        raise in_caches(
            files.manifest.durability, [name for names in elsewhere.values() for name in names]
        )

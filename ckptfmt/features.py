"""Which features there are: what a document lists so that who doesn't know it refuses. ``spec/95`` holds the table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: The feature of references, packs, encoded blocks and groups as such.
DELTAS: Final = "deltas"
#: The closed registry of encodings, in its order.
ENCODINGS: Final = ("raw", "same", "planes", "xor", "difference", "sparse", "classes", "gradient")
#: Encodings that read the base's block, unless its prediction stands in its place.
NEEDS_BASE: Final = frozenset({"same", "xor", "difference", "sparse", "classes", "gradient"})
#: Encodings without a form of their own: the content itself, and nothing.
PLAIN: Final = frozenset({"raw", "same"})
#: The closed registry of groups.
GROUP_KINDS: Final = ("adam", "cast", "sgd")
#: The feature of a manifest, and of a part, with metrics or tags; and the writer feature of a run whose checkpoints may
#: be pinned.
LABELS: Final = "labels"
#: Everything that a reader may have to know.
READER_FEATURES: Final = frozenset({DELTAS, LABELS, *ENCODINGS, *GROUP_KINDS}) - PLAIN
#: The writer feature of a run whose checkpoints may read from each other.
REFERENCED: Final = "references"
#: Everything that who writes into a run, or deletes in it, may have to know.
WRITER_FEATURES: Final = frozenset({REFERENCED, LABELS})


def is_of_delta(features: Iterable[str]) -> bool:
    """Return whether reader features are those of a delta: any but that of labels. Spec: REQ-MAN-005.

    >>> is_of_delta(["labels"]), is_of_delta(["deltas", "labels"])
    (False, True)
    """
    return any(feature != LABELS for feature in features)

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
#: The feature of a manifest, and of a part, whose files needn't be at home.
CACHES: Final = "caches"
#: The feature of a manifest, and of a part, of a checkpoint that was saved because something was wrong.
SUSPECT: Final = "suspect"
#: Features that any checkpoint may have, a full one too.
OF_ANY_PROFILE: Final = frozenset({CACHES, LABELS, SUSPECT})
#: Everything that a reader may have to know.
READER_FEATURES: Final = frozenset({*OF_ANY_PROFILE, DELTAS, *ENCODINGS, *GROUP_KINDS}) - PLAIN
#: The writer feature of a run whose checkpoints may read from each other.
REFERENCED: Final = "references"
#: Everything that who writes into a run, or deletes in it, may have to know.
WRITER_FEATURES: Final = frozenset({REFERENCED, LABELS})


def is_of_delta(features: Iterable[str]) -> bool:
    """Return whether reader features are those of a delta: any but those of `OF_ANY_PROFILE`. Spec: REQ-MAN-005.

    >>> is_of_delta(["caches", "labels"]), is_of_delta(["deltas", "labels"])
    (False, True)
    """
    return not OF_ANY_PROFILE.issuperset(features)

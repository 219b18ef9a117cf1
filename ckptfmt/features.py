"""The features of the format: a reader refuses a document with an unknown feature.

The table is on page 01 of the specification.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: The feature of references, packs, encoded blocks and groups in general.
DELTAS: Final = "deltas"
#: The closed registry of encodings, in order.
ENCODINGS: Final = ("raw", "same", "planes", "xor", "difference", "sparse", "classes", "gradient")
#: Encodings that read the base's block, or a prediction instead.
NEEDS_BASE: Final = frozenset({"same", "xor", "difference", "sparse", "classes", "gradient"})
#: Encodings without a form of their own: the contents itself, and an empty content.
PLAIN: Final = frozenset({"raw", "same"})
#: The closed registry of groups.
GROUP_KINDS: Final = ("adam", "cast", "sgd")
#: The feature of a manifest, and of a part, with metrics or tags; and the writer feature of a run
#: with pins.
LABELS: Final = "labels"
#: The feature of a manifest, and of a part, with files perhaps in caches of nodes instead of at
#: home.
CACHES: Final = "caches"
#: The feature of a manifest, and of a part, of a suspect checkpoint, which recorded a fault.
SUSPECT: Final = "suspect"
#: The feature of a manifest, and of a part, with references to tensors of a frozen base.
FROZEN: Final = "frozen"
#: Features of any checkpoint, also of a full checkpoint.
OF_ANY_PROFILE: Final = frozenset({CACHES, FROZEN, LABELS, SUSPECT})
#: All features for a reader to know.
READER_FEATURES: Final = frozenset({*OF_ANY_PROFILE, DELTAS, *ENCODINGS, *GROUP_KINDS}) - PLAIN
#: The profile of the specification that describes each feature.
_PROFILES: Final = {
    **dict.fromkeys((DELTAS, *ENCODINGS), "R-delta"),
    **dict.fromkeys(("gradient", *GROUP_KINDS), "prediction"),
    **{feature: feature for feature in OF_ANY_PROFILE},
}
#: The writer feature of a run with deltas.
REFERENCED: Final = "references"
#: The writer feature of a run with several homes.
HOMES: Final = "homes"
#: All features for a process to know before it writes or deletes in a run.
WRITER_FEATURES: Final = frozenset({REFERENCED, LABELS, HOMES})


def reader_profiles(features: Iterable[str]) -> tuple[str, ...]:
    """Return the profiles that a reader of a checkpoint with these features implements, sorted.

    Spec: page 01.

    >>> reader_profiles([]), reader_profiles(["deltas", "planes", "labels"])
    (('R-core',), ('R-core', 'R-delta', 'labels'))
    """
    return ("R-core", *sorted({_PROFILES[feature] for feature in features}))


def is_of_delta(features: Iterable[str]) -> bool:
    """Return whether reader features belong to a delta: any feature outside of `OF_ANY_PROFILE`.

    Spec: REQ-MAN-005.

    >>> is_of_delta(["caches", "labels"]), is_of_delta(["deltas", "labels"])
    (False, True)
    """
    return not OF_ANY_PROFILE.issuperset(features)

"""Labels of a checkpoint: metrics, tags, and the reason if the checkpoint is suspect.

Spec: REQ-MAN-010, REQ-MAN-011, REQ-MAN-013.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, SupportsFloat

from ckptfmt import limits
from ckptfmt.documents.canonical import check_string
from ckptfmt.errors import CkptError, Code, FormatError, err
from ckptfmt.features import LABELS, SUSPECT

_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-]?[0-9]+)?")
_NUMBER_LENGTH: Final = 32
_NAME_LENGTH: Final = 100
_REASON_LENGTH: Final = 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Metrics and tags of a checkpoint, and the reason if it is suspect.

    False if all three are empty.

    Attributes:
        metrics: each number as decimal text, since JSON documents of the format have no fractions.
        tags: the tags, sorted.
        suspect: the reason not to resume from the checkpoint without an explicit choice; empty if
            there is none. Only the manifest has this member; a record of labels can't add or remove
            it.
    """

    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tags: tuple[str, ...] = ()
    suspect: str = ""

    def __bool__(self) -> bool:
        return bool(self.metrics or self.tags or self.suspect)

    def members(self) -> dict[str, Any]:
        """Return the members of a record of labels: metrics and tags, without features."""
        return {"metrics": dict(self.metrics), "tags": list(self.tags)}

    @property
    def features(self) -> list[str]:
        """The reader features that a manifest or part needs for these labels."""
        return [LABELS] * bool(self.metrics or self.tags) + [SUSPECT] * bool(self.suspect)

    def featured_members(self) -> dict[str, Any]:
        """Return the members of a manifest or part with the features `features`."""
        found = self.members() if LABELS in self.features else {}
        return {**found, **({"suspect": self.suspect} if self.suspect else {})}

    def number(self, metric: str) -> float | None:
        """Return the value of a metric; None if the checkpoint doesn't have the metric."""
        return float(self.metrics[metric]) if metric in self.metrics else None

    def tagged(self, tags: Iterable[str]) -> Labels:
        """Return these labels with further tags.

        Raises: StateError(ARGUMENT) for an exceeded limit.
        """
        return dataclasses.replace(self, tags=Labels.of(None, (*self.tags, *tags)).tags)

    def numbers(self) -> dict[str, float]:
        """Return the values of all metrics."""
        return {name: float(text) for name, text in self.metrics.items()}

    @classmethod
    def of(
        cls,
        metrics: Mapping[str, SupportsFloat] | None = None,
        tags: Iterable[str] = (),
        suspect: str | None = None,
    ) -> Labels:
        """Return labels from a caller's values.

        Raises: StateError(ARGUMENT) for a metric that isn't a finite number, and for an exceeded
            limit.
        """
        if not isinstance(metrics, Mapping | None):
            raise err(
                Code.ARGUMENT,
                f"a {type(metrics).__name__} isn't a mapping of numbers",
                where="metrics=",
            )
        tags = (tags,) if isinstance(tags, str) else tuple(tags)
        numbers = {
            check_name(name, "metrics="): _text_of(name, value)
            for name, value in (metrics or {}).items()
        }
        names = tuple(sorted({check_name(tag, "tags=") for tag in tags}))
        for count, limit, where in (
            (len(numbers), limits.METRICS, "metrics="),
            (len(names), limits.TAGS, "tags="),
        ):
            if count > limit:
                raise err(Code.ARGUMENT, f"{count} of them; at most {limit} are kept", where=where)
        reason = "" if suspect is None else _check_text(suspect, "suspect=", _REASON_LENGTH)
        return cls(metrics=numbers, tags=names, suspect=reason)


#: The labels of a checkpoint without labels.
NO_LABELS: Final = Labels()


def parse_labels(members: Mapping[str, Any], features: Iterable[str], where: str) -> Labels:
    """Return the labels of a manifest or part, which are members behind features.

    Args:
        members: all members of the document.
        features: the reader features that the document lists.

    Raises: FormatError(DOC_SCHEMA). Spec: REQ-MAN-010, REQ-MAN-011, REQ-MAN-013.
    """
    features = tuple(features)
    if {"metrics" in members, "tags" in members} != {LABELS in features}:
        raise _broken("metrics and tags go with the feature labels", where, "REQ-MAN-010")
    labels = NO_LABELS
    if LABELS in features:
        labels = check_labels(members["metrics"], members["tags"], where)
        if not labels:
            raise _broken("the feature labels, and no label", where, "REQ-MAN-010")
    if ("suspect" in members) != (SUSPECT in features):
        raise _broken("suspect goes with the feature suspect", f"{where}/suspect", "REQ-MAN-013")
    if SUSPECT not in features:
        return labels
    if not _is_text(members["suspect"], _REASON_LENGTH):
        detail = f"suspect isn't a reason of 1 to {_REASON_LENGTH} characters"
        raise _broken(detail, f"{where}/suspect", "REQ-MAN-013")
    return dataclasses.replace(labels, suspect=members["suspect"])


def check_labels(metrics: object, tags: object, where: str) -> Labels:
    """Return labels from members of a document.

    Raises: FormatError(DOC_SCHEMA). Spec: REQ-MAN-011.
    """
    if (
        not isinstance(metrics, dict)
        or len(metrics) > limits.METRICS
        or not all(map(_is_name, metrics))
    ):
        raise _broken(
            f"metrics aren't a map of at most {limits.METRICS} names", where, "REQ-MAN-011"
        )
    if not all(map(_is_number, metrics.values())):
        raise _broken("a metric isn't a finite decimal number as text", where, "REQ-MAN-011")
    if not isinstance(tags, list) or len(tags) > limits.TAGS or not all(map(_is_name, tags)):
        raise _broken(f"tags aren't an array of at most {limits.TAGS} names", where, "REQ-MAN-011")
    if tags != sorted(set(tags)):
        raise _broken("tags aren't sorted, each once", where, "REQ-MAN-011")
    return Labels(metrics=metrics, tags=tuple(tags))


def _broken(detail: str, where: str, requirement: str) -> CkptError:
    return err(Code.DOC_SCHEMA, detail, where=where, requirement=requirement)


def _is_number(text: object) -> bool:
    is_decimal = (
        isinstance(text, str)
        and len(text) <= _NUMBER_LENGTH
        and _NUMBER.fullmatch(text) is not None
    )
    return is_decimal and math.isfinite(float(str(text)))


def _is_name(name: object) -> bool:
    return _is_text(name, _NAME_LENGTH)


def _is_text(text: object, length: int) -> bool:
    if not isinstance(text, str) or not 1 <= len(text) <= length:
        return False
    try:
        check_string(text, "")
    except FormatError:
        return False
    return True


def check_name(name: object, where: str) -> str:
    """Return a caller's tag or name of a metric, after a check. Raises: StateError(ARGUMENT)."""
    return _check_text(name, where, _NAME_LENGTH)


def _check_text(text: object, where: str, length: int) -> str:
    if not isinstance(text, str) or not 1 <= len(text) <= length:
        detail = f"{str(text)[:64]!r} isn't a text of 1 to {length} characters"
        raise err(Code.ARGUMENT, detail, where=where)
    try:
        check_string(text, where)
    except FormatError as error:
        raise err(Code.ARGUMENT, f"{text!r}: {error.detail}", where=where) from None
    return text


def _text_of(name: object, value: SupportsFloat) -> str:
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        remedy = "Pass a finite number, or leave the metric out."
        raise err(Code.ARGUMENT, f"{name!r} is {str(value)[:64]}", where="metrics=", remedy=remedy)
    return repr(number)

"""Metrics and tags: what a caller may give, what documents may hold, and the records of a run."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt import limits
from ckptfmt.documents.labels import NO_LABELS, Labels, check_labels
from ckptfmt.documents.manifest import Manifest, parse_register
from ckptfmt.documents.part import Part
from ckptfmt.documents.run import LabelsRecord
from ckptfmt.errors import CkptError, Code
from ckptfmt.store.memory import MemoryStore
from tests import builders

RECORD = LabelsRecord(
    run_id="f" * 32,
    checkpoint="step-00000012-l0001",
    number=3,
    pinned=True,
    labels=Labels.of({"loss": 0.1}, ["a"]),
)


def saved(labels: Labels, writers: int = 2) -> tuple[MemoryStore, Manifest]:
    """Return a checkpoint with labels, which the first of its writers gives."""
    store = MemoryStore()
    given_by = [labels, *[NO_LABELS] * (writers - 1)]
    states = [
        builders.snapshot(builders.tensor("w", np.arange(3.0)), labels=one) for one in given_by
    ]
    return store, builders.save(store, *states)


@given(
    st.dictionaries(
        st.text("abc/ _", min_size=1, max_size=9), st.floats(allow_nan=False, allow_infinity=False)
    )
)
def test_numbers_come_back_bit_by_bit(metrics: dict[str, float]) -> None:
    """REQ-MAN-011: whatever they are."""
    labels = Labels.of(metrics)

    assert check_labels(dict(labels.metrics), [], "") == labels
    found = {name: labels.number(name) for name in metrics}
    assert [struct.pack("<d", number) for number in found.values() if number is not None] == [
        struct.pack("<d", number) for number in metrics.values()
    ]


def test_what_has_the_value_of_a_number_is_one() -> None:
    labels = Labels.of({"a": 3, "b": np.float32(0.5), "c": np.array(2)}, tags=("v2", "best", "v2"))

    assert labels.metrics == {"a": "3.0", "b": "0.5", "c": "2.0"}
    assert labels.tags == ("best", "v2")
    assert labels.number("d") is None
    assert Labels.of(None, "alone").tags == ("alone",)
    assert not Labels.of()


@pytest.mark.parametrize(
    ("metrics", "tags"),
    [
        *[({"loss": value}, ()) for value in (math.nan, math.inf, -math.inf, "2.5", None, True, 10**400, [1.0])],
        ({"": 1.0}, ()), ({"x" * 101: 1.0}, ()), ({3: 1.0}, ()), ([("loss", 1.0)], ()), ({"a\n": 1.0}, ()),
        ({f"m{number}": 1.0 for number in range(limits.METRICS + 1)}, ()),
        ({}, [f"t{number}" for number in range(limits.TAGS + 1)]), ({}, [""]), ({}, ["x" * 101]), ({}, [3]),
        ({}, ["e\u0301"]), ({}, ["\ud800"]),
    ],
)  # fmt: skip
def test_what_a_document_could_not_hold_is_refused_by_name(metrics: Any, tags: Any) -> None:
    with pytest.raises(CkptError) as caught:
        Labels.of(metrics, tags)

    assert caught.value.code == Code.ARGUMENT
    assert caught.value.where in ("metrics=", "tags=")


def test_manifest_and_part_0_have_them_behind_a_feature_and_no_other_part() -> None:
    """REQ-MAN-010, REQ-PRT-014, REQ-CMT-039, REQ-MAN-005"""
    labels = Labels.of({"eval_loss": 2.5}, ["v2"])
    store, manifest = saved(labels)

    assert (manifest.labels, manifest.features, manifest.profile) == (labels, ("labels",), "full")
    assert parse_register(store.read("manifest.json", limit_nbytes=1 << 20)) == manifest
    parts = [
        Part.parse(store.read(path, limit_nbytes=1 << 20), where=path)[0]
        for path in store.list("parts")
        if path.endswith(".msgpack")
    ]
    assert [part.labels for part in parts] == [labels, NO_LABELS]
    assert not builders.verify(store).violations


@pytest.mark.parametrize("metrics", [None, {"loss": 17.5}])
def test_why_it_is_suspect_stands_behind_a_feature_of_its_own(metrics: Any) -> None:
    """REQ-MAN-013, REQ-PRT-014, REQ-CMT-039, REQ-MAN-005"""
    labels = Labels.of(metrics, suspect="loss is nan")
    store, manifest = saved(labels)

    features = ("suspect",) if metrics is None else ("labels", "suspect")
    assert (manifest.labels, manifest.features, manifest.profile) == (labels, features, "full")
    content = store.read("manifest.json", limit_nbytes=1 << 20)
    assert parse_register(content) == manifest
    assert b'"suspect":"loss is nan"' in content
    assert not builders.verify(store).violations


def test_without_them_no_feature_is_needed() -> None:
    """REQ-VER-006, REQ-VER-007"""
    store, manifest = saved(NO_LABELS)

    assert manifest.features == ()
    assert b"suspect" not in store.read("manifest.json", limit_nbytes=1 << 20)
    assert b"metrics" not in store.read("manifest.json", limit_nbytes=1 << 20)


def test_most_labels_and_the_longest_fit_into_a_manifest() -> None:
    """REQ-MAN-011, REQ-MAN-004: of characters of four bytes."""
    names = [f"{number:02}" + "\U0001f642" * 98 for number in range(limits.METRICS)]
    labels = Labels.of(dict.fromkeys(names, -math.pi * 1e-300), names[: limits.TAGS])

    assert saved(labels)[1].labels == labels


def test_a_record_comes_back() -> None:
    """REQ-RUN-023"""
    assert RECORD.path == "labels/step-00000012-l0001-0003.json"
    assert LabelsRecord.parse(RECORD.dump(), where=RECORD.path) == RECORD


@pytest.mark.parametrize(
    "where",
    [
        "labels/step-00000012-l0001-0004.json",
        "labels/step-00000012-l0002-0003.json",
        "labels/step-12-l1-0003.json",
    ],
)
def test_a_record_under_the_name_of_another_is_refused(where: str) -> None:
    """REQ-RUN-023"""
    with pytest.raises(CkptError) as caught:
        LabelsRecord.parse(RECORD.dump(), where=where)

    assert caught.value.code == Code.RUN_MISMATCH

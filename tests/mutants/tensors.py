"""Mutants of what lies in files: values, shards, parts, encoded blocks, and the features that say what is in use."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np

from ckptfmt.adapters.torch import frozen
from ckptfmt.codecs import encodings
from ckptfmt.delta import block_coder as coding
from ckptfmt.delta import delta
from ckptfmt.documents import extents, shard, tree
from ckptfmt.features import DELTAS, ENCODINGS
from ckptfmt.layout import merge as pieces
from ckptfmt.read import frozen_base
from ckptfmt.write import image
from tests.mutants.mutant import Mutant, replaced, rewritten


def _any_nan(value: float, _where: object, _depth: int) -> list[object]:
    return ["f", struct.pack("<d", math.nan if math.isnan(value) else value)]


def _as_its_base(right: Any, value: Any, *rest: Any) -> object:
    """Encode a subclass as what it derives from."""
    kinds: tuple[type, ...] = (int, str, tuple, dict)
    if type(value) not in {*tree._ENCODERS, bool}:
        value = next((kind(value) for kind in kinds if isinstance(value, kind)), value)
    return right(value, *rest)


def _without_widths(rows: Any, *, key: Callable[[Any], Any]) -> list[Any]:
    return sorted(rows, key=lambda row: key(row)[1:])


def _never_raw(
    right: Any, content: memoryview, *, dtype: str, base: memoryview, **rest: Any
) -> tuple[str, bytes]:
    encoding, stored = right(content, dtype=dtype, base=base, **rest)
    if encoding == "raw":
        return "xor", encodings.encode("xor", content, dtype=dtype, base=base)
    return encoding, stored


def _among_the_others(right: Any, table: Any, row: int) -> Any:
    return table.keys[row][0] if table.storages[row] == "non-persistent" else right(table, row)


def _the_base_always(
    right: Any, image: Any, base: Any, references: Sequence[Any], first: Sequence[int]
) -> Any:
    return np.full_like(right(image, base, references, first), references.index(base.reference))


MUTANTS = {
    "payload_of_nan_lost": Mutant(
        clauses=("REQ-TRE-003",),
        fault="keeps of a float that is no number only that",
        patch=functools.partial(mock.patch.dict, tree._ENCODERS, {float: _any_nan}),
        tests=(
            "documents/test_tree.py::test_floats_keep_their_bits",
            "documents/test_tree.py::test_nan_keys_are_told_apart_by_their_bits",
        ),
    ),
    "subclasses_taken_for_their_bases": Mutant(
        clauses=("REQ-TRE-006",),
        fault="saves a value of a derived type as the plain one",
        patch=replaced(tree, "_encode", _as_its_base),
        tests=(
            "documents/test_tree.py::test_values_without_a_form_are_refused_by_name[Point]",
            "documents/test_tree.py::test_values_without_a_form_are_refused_by_name[Flag]",
        ),
    ),
    "buffers_among_the_weights": Mutant(
        clauses=("REQ-TEN-007",),
        fault="writes non-persistent tensors into the file of the others",
        patch=replaced(
            image,
            "_stem",
            lambda right, table, row: (
                table.keys[row][0] if table.storages[row] == "non-persistent" else right(table, row)
            ),
        ),
        tests=("write/test_writer.py::test_kinds_of_tensors_have_files_of_their_own",),
    ),
    "boxes_laid_out_by_size_alone": Mutant(
        clauses=("REQ-SHD-002",),
        fault="lays out boxes without a look at how wide their elements are",
        patch=functools.partial(mock.patch.object, shard, "sorted", _without_widths, create=True),
        tests=(
            "documents/test_shard.py::test_wider_elements_come_first_then_smaller_boxes_and_equal_ones_keep_their_order",
        ),
    ),
    "small_boxes_among_large_ones": Mutant(
        clauses=("REQ-SHD-003",),
        fault="lays out boxes of equal width in the order of their tensors, whatever their size",
        patch=functools.partial(mock.patch.object, shard, "_SMALL_NBYTES", 0),
        tests=(
            "documents/test_shard.py::test_wider_elements_come_first_then_smaller_boxes_and_equal_ones_keep_their_order",
        ),
    ),
    "one_box_twice_on_a_writer": Mutant(
        clauses=("REQ-PRT-011",),
        fault="takes a box that one writer lists twice for a replica",
        patch=replaced(pieces, "_check_listed_once", lambda *_: None),
        tests=(
            (
                "layout/test_merge.py::test_what_does_not_fit_together_is_refused[one box twice"
                " on a"
                " writer]"
            ),
        ),
    ),
    "encoded_and_not_decoded": Mutant(
        clauses=("REQ-DEL-013",),
        fault="believes its encoders",
        patch=replaced(coding, "_time_decoding", lambda *_: 0.0),
        tests=(
            "delta/test_delta.py::test_what_does_not_decode_to_the_content_is_stored_raw[choose]",
            "delta/test_delta.py::test_a_member_predicted_wrongly_is_stored_otherwise",
        ),
    ),
    "blocks_read_through_every_delta": Mutant(
        clauses=("REQ-DEL-014",),
        fault="names the checkpoint before it for a block that that one has of another",
        patch=replaced(delta, "_find_holders", _the_base_always),
        tests=("delta/test_delta.py::test_what_reads_the_base_is_the_one_that_has_it",),
    ),
    "encodings_not_listed": Mutant(
        clauses=("REQ-ENC-002",),
        fault="lists that there are deltas, and not by which encodings",
        patch=replaced(
            extents,
            "delta_features",
            lambda right, *used: [name for name in right(*used) if name not in ENCODINGS],
        ),
        tests=(
            "documents/test_deltas.py::test_features_follow_from_what_a_part_has[builder0-features0]",
        ),
    ),
    "longer_than_raw": Mutant(
        clauses=("REQ-ENC-021",),
        fault="stores an encoded block also where it is longer than its content",
        patch=replaced(encodings, "choose", _never_raw),
        tests=("delta/test_delta.py::test_what_no_encoding_shortens_is_stored_raw",),
    ),
    "deltas_always_listed": Mutant(
        clauses=("REQ-VER-007",),
        fault="lists deltas among the features of a full part",
        patch=replaced(
            extents, "delta_features", lambda right, *used: sorted({DELTAS, *right(*used)})
        ),
        tests=("documents/test_deltas.py::test_a_full_part_has_nothing_of_a_delta",),
    ),
    "any_base_counts": Mutant(
        clauses=("REQ-FRZ-005",),
        fault="takes a base with the same names and shapes for the base",
        patch=rewritten(
            frozen_base.FrozenBase.check,
            "self.digest(tensor.name_in_base) != tensor.digest",
            "False",
        ),
        tests=(
            "adapters/test_frozen.py::test_a_base_that_changed_is_refused_before_anything_changes[content]",
        ),
    ),
    "base_lost_without_a_place": Mutant(
        clauses=("REQ-FRZ-006",),
        fault="doesn't say where the missing base was",
        patch=rewritten(
            frozen_base.find_base,
            "raise err(Code.FROZEN_BASE_MISSING, detail,",
            "raise err(Code.FROZEN_BASE_MISSING, 'there is no base',",
        ),
        tests=(
            "adapters/test_frozen.py::test_a_base_that_moved_is_asked_for_and_found_where_the_caller_says",
        ),
    ),
    "frozen_once_is_frozen_forever": Mutant(
        clauses=("REQ-FRZ-007",),
        fault="refers to the base without a look at the weights of this save",
        patch=replaced(frozen, "_is_valid", lambda *_: True),
        tests=(
            "adapters/test_frozen.py::test_frozen_weights_that_differ_from_the_base_are_stored",
        ),
    ),
}

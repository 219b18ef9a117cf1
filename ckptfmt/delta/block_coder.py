"""What becomes of a block: what the base has, or what stores it in the fewest bytes.

That is chosen by measuring, and decoded again before it is believed.

Spec: REQ-DEL-008, REQ-PRE-012.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ckptfmt.codecs import encodings, prediction
from ckptfmt.codecs.lanes import LANES
from ckptfmt.delta.base import BaseContents
from ckptfmt.delta.prediction_groups import PlannedGroup
from ckptfmt.digest import DIGEST_NBYTES, digest_bytes
from ckptfmt.documents.extents import RAW, SAME
from ckptfmt.dtypes import DTYPES
from ckptfmt.features import ENCODINGS
from ckptfmt.write.image import Image

#: Smallest block that is encoded, in bytes: of a smaller one the digest of what is stored takes all of the gain.
LEAST_NBYTES: Final = 64
#: Below this only what says which few elements changed is tried: all else takes longer than it is worth.
SMALL_NBYTES: Final = 2048
_FOR_SMALL: Final = ("raw", "sparse")
#: Of such a block, if a larger share of its lanes has changed, nothing is tried: biases and gains of norms are a
#: quarter of a per cent of a state, and took a quarter of the time of all that is encoded.
_MOST_CHANGED: Final = 0.5

#: How much more of its bytes than the last block of a piece another may take, before it is chosen for anew.
_ALIKE: Final = 1.1


#: The columns of verdicts: what becomes of each block, as coders tell it and as a delta keeps it.
VERDICT: Final = np.dtype(
    [
        ("encoding", np.uint8),
        ("predicted", np.bool_),
        ("nbytes", np.int64),
        ("digest", f"V{DIGEST_NBYTES}"),
        ("stored_digest", f"V{DIGEST_NBYTES}"),
        ("decode_s", np.float64),
    ]
)
#: In the column of encodings: nobody has decided.
UNDECIDED: Final = 255


class Verdict(NamedTuple):
    """What becomes of a block: a row of `VERDICT`.

    Attributes:
        encoding: number in `ENCODINGS`.
        predicted: whether its group's prediction stands in the place of the base's content.
        nbytes: how many bytes it is stored in.
        digest: of its content.
        stored_digest: of what it is stored as; zeros where that is the content, or nothing.
        decode_s: how long decoding it takes, in seconds.
    """

    encoding: int
    predicted: bool
    nbytes: int
    digest: bytes
    stored_digest: bytes = bytes(DIGEST_NBYTES)
    decode_s: float = 0.0


class _Encoded(NamedTuple):
    """What a changed block is stored as, and how long decoding that takes."""

    encoding: str
    stored: bytes
    decode_s: float
    predicted: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """What was chosen for a piece last, and what share of its bytes a block took."""

    encoding: str
    share: float


class BlockCoder:
    """Encodes blocks of a snapshot against the base's; thread-safe.

    Args:
        image: of the snapshot, and of the base's.
        view: of the slot.
        contents: of the base's blocks.
        groups: pieces that are predicted from each other.
        fields: those whose changed blocks are encoded; of others they are stored raw.
        among: encodings to choose from.
    """

    def __init__(
        self,
        image: Image,
        view: memoryview,
        *,
        contents: BaseContents,
        groups: Sequence[PlannedGroup],
        fields: Collection[str],
        among: Sequence[str],
    ) -> None:
        self._image = image
        self._view = view
        self._fields = fields
        self._contents = contents
        self._groups = {number: group for group in groups for number in group.pieces}
        self._dtypes = image.holdings.table.dtypes_by_key()
        self._among = among
        self._chosen: dict[int | str, _Chosen] = {}

    def end_of(self, number: int, block: int) -> int:
        """Return how much of the slot has to be there for a block to be coded, in bytes."""
        group = self._groups.get(number)
        if group is None:
            return self._image.span(number, block)[1]
        elements = self._elements_of(number, block)
        members = group.pieces[: group.pieces.index(number) + 1]
        return max(self._image.pieces[member].begin + elements.stop * self._width(member) for member in members)

    def code(self, number: int, block: int, *, digest: bytes | None = None) -> tuple[Verdict, bytes]:
        """Return what becomes of a block, and the bytes that store it if it is encoded.

        Args:
            digest: of its content, if that is known.

        Raises: what the contents of the base raise.
        """
        content = self._content(number, block)
        digest = digest_bytes(content) if digest is None else digest
        if digest == self._contents.digest(number, block):
            return Verdict(SAME, predicted=False, nbytes=0, digest=digest), b""
        found = None
        if self._image.pieces[number].key[0] in self._fields and content.nbytes >= LEAST_NBYTES:
            found = self._code_changed(number, block, content)
        if found is None:
            return Verdict(RAW, predicted=False, nbytes=content.nbytes, digest=digest), b""
        verdict = Verdict(
            ENCODINGS.index(found.encoding),
            predicted=found.predicted,
            nbytes=len(found.stored),
            digest=digest,
            stored_digest=digest_bytes(found.stored),
            decode_s=found.decode_s,
        )
        return verdict, found.stored

    def _code_changed(self, number: int, block: int, content: memoryview) -> _Encoded | None:
        """Return what stores a block in the fewest bytes, having seen that it decodes to the same; None for its own."""
        group, is_small = self._groups.get(number), content.nbytes < SMALL_NBYTES
        found = None if group is None or is_small else self._predict(group, number, block, content)
        if found is not None:
            return found
        base, dtype = self._contents.content(number, block), self._dtype(number)
        if is_small:
            encoding, stored = encode_small(content, dtype=dtype, base=base)
        else:
            encoding, stored = self._encode(number, content, dtype=dtype, base=base, among=self._among)
        clock = _Clock()
        decode = functools.partial(encodings.decode, dtype=dtype, base=base)
        if encoding == "raw" or not _decodes(encoding, stored, content, decode, clock):
            return None
        return _Encoded(encoding, stored, clock.seconds)

    def code_as(self, encoding: str, number: int, block: int, *, predicted: bool) -> bytes:
        """Return what a block is stored as by an encoding that was chosen for it before."""
        content = self._content(number, block)
        if predicted:
            found = self._predict(self._groups[number], number, block, content)
            return b"" if found is None else found.stored
        base = self._contents.content(number, block)
        return encodings.encode(encoding, content, dtype=self._dtype(number), base=base)

    def _encode(
        self, like: int | str, content: memoryview, *, dtype: str, base: memoryview, among: Sequence[str]
    ) -> tuple[str, bytes]:
        """Return a block encoded against another: as the last one like it was, as long as that goes as well.

        Choosing takes several times as long as encoding. Blocks of one piece are much alike, and so are those of one
        role, whatever their piece.
        """
        known = self._chosen.get(like)
        if known is not None and known.encoding != "raw":
            stored = encodings.encode(known.encoding, content, dtype=dtype, base=base)
            if len(stored) <= min(_ALIKE * known.share, 1.0 - 1e-9) * len(content):
                return known.encoding, stored
        encoding, stored = encodings.choose(content, dtype=dtype, base=base, among=among)
        self._chosen[like] = _Chosen(encoding=encoding, share=len(stored) / len(content))
        return encoding, stored

    def _predict(self, group: PlannedGroup, number: int, block: int, content: memoryview) -> _Encoded | None:
        """Return a block as its group predicts it; None where that doesn't pay."""
        place, elements = group.pieces.index(number), self._elements_of(number, block)
        role = group.roles[place]
        given: dict[str, Any] = {
            "news": {
                name: self._range(member, elements)
                for name, member in zip(group.roles[:place], group.pieces, strict=False)
            },
            "bases": self._bases_of(group, role, elements),
        }
        if role == "master":
            return None
        clock = _Clock()
        with clock:
            given["predicted"] = prediction.predict_member(group.rule, role, **given)
        # What a prediction misses is noise, or next to nothing: sorting it takes long and gains nothing.
        encode = functools.partial(self._encode, role, among=encodings.QUICK)
        dtype = self._dtype(number)
        encoding, stored = prediction.encode_member(group.rule, role, content, dtype=dtype, encode=encode, **given)
        decode = functools.partial(prediction.decode_member, group.rule, role, **given)
        if encoding == "raw" or not _decodes(encoding, stored, content, decode, clock):
            return None
        return _Encoded(encoding, stored, clock.seconds, predicted=group.is_predicted(role, encoding))

    def _bases_of(self, group: PlannedGroup, role: str, elements: range) -> dict[str, memoryview]:
        """Return the base's elements of the members that a role is decoded from."""
        if not group.needs_base:
            return {}
        wanted = prediction.needed_bases(group.rule, role)
        return {
            name: self._contents.elements(member, elements, self._width(member))
            for name, member in zip(group.roles, group.pieces, strict=True)
            if name in wanted
        }

    def _elements_of(self, number: int, block: int) -> range:
        """Return the elements of a piece that a block has."""
        piece, width = self._image.pieces[number], self._width(number)
        per_block = self._image.block_nbytes // width
        return range(block * per_block, min((block + 1) * per_block, (piece.end - piece.begin) // width))

    def _content(self, number: int, block: int) -> memoryview:
        return self._range(number, self._elements_of(number, block))

    def _range(self, number: int, elements: range) -> memoryview:
        """Return elements of a piece of the snapshot."""
        begin, width = self._image.pieces[number].begin, self._width(number)
        return self._view[begin + elements.start * width : begin + elements.stop * width]

    def _dtype(self, number: int) -> str:
        return self._dtypes[self._image.pieces[number].key]

    def _width(self, number: int) -> int:
        return DTYPES[self._dtype(number)].nbytes


def encode_small(content: memoryview, *, dtype: str, base: memoryview) -> tuple[str, bytes]:
    """Return how a small block is stored, and as what; `("raw", b"")` where nothing pays."""
    if content.nbytes < LEAST_NBYTES:
        return "raw", b""
    words = LANES[dtype].words
    changed = np.frombuffer(content, words) != np.frombuffer(base, words)
    if np.count_nonzero(changed) > _MOST_CHANGED * changed.size:
        return "raw", b""
    return encodings.choose(content, dtype=dtype, base=base, among=_FOR_SMALL)


class _Clock:
    """Adds up the time of what whoever decodes has to do as well."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begin_s = 0.0

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._begin_s


def _decodes(encoding: str, stored: bytes, content: memoryview, decode: Callable[..., None], clock: _Clock) -> bool:
    """Return whether what is stored decodes to the content."""
    out = memoryview(bytearray(content.nbytes))
    with clock:
        decode(encoding, memoryview(stored), out, where="delta")
    # Memoryviews would compare themselves byte by byte, twenty times as slowly.
    return np.array_equal(np.frombuffer(out, np.uint8), np.frombuffer(content, np.uint8))

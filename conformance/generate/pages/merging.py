"""Contradictions between parts and index; spec/core/40-index-and-parts.md, and page 75."""

from __future__ import annotations

from blake3 import blake3

from conformance.generate.bases import RUN_ID, set_at, two_writers
from conformance.generate.cases import Page
from conformance.generate.model import Checkpoint, Edit, build
from conformance.generate.wire import Packed, Strings, packed

__all__ = ["add"]

FORM = "what one document says of another has to be what that one says"


def add(made: Page) -> None:
    """Add the cases of contradictions to the cases of parts."""
    _contradictions(made)
    _rows(made)
    _elsewhere(made)
    _merge(made)
    _merge_values(made)


def _reject(  # noqa: PLR0917 - a row of a table of cases
    made: Page,
    slug: str,
    edit: Edit,
    clauses: str,
    error: str,
    says: str,
    *,
    why: str = FORM,
    bug: str = "AMBIGUITY",
) -> None:
    made.reject(slug, "boxes", edit, clauses, error, says, why=why, bug=bug)


def _contradictions(made: Page) -> None:
    why = "a part of another attempt or writer has other bytes under the same names"
    for key, value in (
        ("step", 4),
        ("nonce", "f" * 32),
        ("block_nbytes", 8192),
        ("writer_count", 2),
    ):
        _reject(
            made,
            f"origin-{key.replace('_', '-')}",
            set_at("part/0", key, value=value),
            "PRT-001 IDX-001 CMT-010",
            "DOC_MISMATCH WRITERS_DIVERGED" + (" EXTENT_COVERAGE" if key == "block_nbytes" else ""),
            f"{key} is {value}, and another in the manifest",
            why=why,
            bug="WRONG_BYTES",
        )
    _reject(
        made,
        "origin-run-id",
        lambda c: c.part.update(run_id=RUN_ID, launch=1),
        "PRT-001 IDX-001 CMT-010",
        "DOC_MISMATCH WRITERS_DIVERGED",
        "the part is of a run, and the manifest of none",
        why=why,
        bug="WRONG_BYTES",
    )

    for document in ("part/0", "index"):
        _reject(
            made,
            f"{document.partition('/')[0]}-launch-of-no-run",
            set_at(document, "launch", value=1),
            "MAN-008 IDX-014",
            "DOC_SCHEMA",
            f"launch is 1 in the {document.partition('/')[0]}, and run_id is null",
            why=why,
        )

    def attempt(c: Checkpoint) -> None:
        c.part["attempt"] = "f" * 16
        c.part["files"]["name"] = Strings(
            name.replace(c.plan.attempt, "f" * 16) for name in c.part["files"]["name"]
        )

    _reject(
        made,
        "origin-attempt",
        attempt,
        "PRT-001 IDX-001 CKP-001",
        "DOC_MISMATCH WRITERS_DIVERGED",
        "the part is of another attempt, its shard too",
        why=why,
        bug="WRONG_BYTES",
    )
    why = (
        "what the index says of a part, the part has to say, or a reader returns another"
        " tensor's bytes"
    )
    for slug, says, edit in (
        ("lacks-tensor", "the part calls the tensor a b2", _renamed),
        (
            "other-dtype",
            "the tensor b is of int8 in the part",
            lambda c: c.part.update(dtypes=["float32", "float64", "int8"]),
        ),
        ("other-shape", "the tensor b has ten rows in the part", _reshaped),
        (
            "other-storage",
            "the tensor b isn't persistent in the part",
            set_at("part/0", "tensors", "storage", 1, value=1),
        ),
        (
            "other-scope",
            "the tensor c is of lw/4 in the part",
            set_at("part/0", "scopes", value=["global", "lw/4"]),
        ),
        ("other-box", "the first box of a is two rows of one, and the part has it so", _recut),
    ):
        _reject(
            made, slug, edit, "OPN-004 IDX-001", "DOC_MISMATCH", says, why=why, bug="WRONG_BYTES"
        )


def _rows(made: Page) -> None:
    """Add parts with rows that differ from the index."""
    why = (
        "what the index says of a part, the part has to say, or a reader returns another"
        " tensor's bytes"
    )
    made.reject(
        "lacks-box",
        "two-writers",
        _exchanged,
        "OPN-004 IDX-001",
        "DOC_MISMATCH",
        "the index names the other writer for each half of a tensor",
        why=why,
        bug="WRONG_BYTES",
    )
    made.reject(
        "lacks-leaf",
        "two-writers",
        _leaf_elsewhere,
        "OPN-004 IDX-001",
        "DOC_MISMATCH",
        "the index names the other writer for a leaf",
        why=why,
        bug="SILENT_DATA_LOSS",
    )
    made.reject(
        "other-kind-of-stream",
        "two-writers",
        set_at("index", "streams", "kind", 0, value="numpy.legacy"),
        "OPN-004 IDX-001 CTX-006",
        "DOC_MISMATCH",
        "the index says that a stream is of another kind",
        why=why,
        bug="WRONG_BYTES",
    )
    other = build(two_writers(step=4)).seal()
    made.reject(
        "of-another-step",
        "two-writers",
        lambda c: c.extra.update({c.part_name(1): other[c.part_name(1)]}),
        "OPN-003 OPN-004",
        "DOC_DIGEST",
        "a part is that of another step, of the same size",
        why=why,
        bug="WRONG_BYTES",
    )


def _elsewhere(made: Page) -> None:
    """Add parts in another place."""
    made.reject(
        "missing",
        "two-writers",
        lambda c: c.extra.update({c.part_name(1): None}),
        "CKP-004",
        "FILE_MISSING",
        "the part of writer 1 isn't there",
        why="what it held is lost, and has to be missed",
        bug="SILENT_DATA_LOSS",
    )
    made.reject(
        "size",
        "two-writers",
        _other_sizes,
        "OPN-004 CKP-003",
        "FILE_NBYTES",
        "the index says that the parts have a byte each",
        why="sizes are compared before anything is read",
    )


def _renamed(c: Checkpoint) -> None:
    c.part["tensors"]["name"][0] = "A"
    c.part["extents"]["key"][1] = "a"
    c.part["extents"]["key"][2] = "a#1"


def _reshaped(c: Checkpoint) -> None:
    c.part["tensors"]["ndim"][1] = 2
    c.part["tensors"]["global_shape"] = Packed([2, 4, 10, 1])
    c.part["boxes"]["begin"].append(0)
    c.part["boxes"]["cut_shape"].append(0)


def _recut(c: Checkpoint) -> None:
    """Cut the two boxes of `a` into rows, in part and shard alike; the index keeps columns."""
    c.part["boxes"]["begin"] = Packed([0, 0, 1, 0, 0])
    c.part["boxes"]["cut_shape"] = Packed([2, 0, 2, 0, 0])


def _exchanged(c: Checkpoint) -> None:
    """Give box 0 of embedding to writer 1 and box 1 to writer 0; all other boxes stay."""
    c.index["shardings"]["part"] = packed(_steps(c, swap=True))


def _steps(c: Checkpoint, *, swap: bool) -> list[int]:
    steps = list(c.index["shardings"]["part"])
    writers = []
    at = -1
    for step in steps:
        at = (at + step + 1) % 2
        writers.append(at)
    counts = list(c.index["shardings"]["box_count"])
    first = next(sum(counts[:number]) for number, count in enumerate(counts) if count == 2)
    if swap:
        writers[first : first + 2] = [1, 0]
    return [
        (writer - before - 1) % 2 for before, writer in zip([-1, *writers], writers, strict=False)
    ]


def _leaf_elsewhere(c: Checkpoint) -> None:
    row = next(
        i
        for i, scope in enumerate(c.index["leaves"]["scope"])
        if c.index["scopes"][scope] == "lw/1"
    )
    c.index["leaves"]["part"][row] = 0


def _merge(made: Page) -> None:
    """Add sound parts from which no committer would have made this index."""

    def edit(  # noqa: PLR0917 - a row of a table of cases
        slug: str,
        error: str,
        clauses: str,
        says: str,
        change: Edit,
        why: str,
        bug: str = "SILENT_DATA_LOSS",
    ) -> None:
        made.reject(
            slug, "two-writers", change, clauses, error, says, why=why, bug=bug, phase="validate"
        )

    why = "the index may leave out nothing that a part holds"
    edit(
        "index-leaves-out-alias",
        "DOC_MISMATCH",
        "IDX-005 IDX-001 CMT-011",
        "the index has no aliases",
        set_at("index", "aliases", value={"tensor": Packed(), "name": Strings()}),
        why,
    )
    edit(
        "index-names-higher",
        "DOC_MISMATCH",
        "CMT-016 IDX-005 IDX-001",
        "the index names writer 1 for a leaf that both have",
        lambda c: c.index["leaves"]["part"].__setitem__(0, 1),
        why,
        "AMBIGUITY",
    )
    edit(
        "index-leaves-out-leaf",
        "DOC_MISMATCH",
        "IDX-005 IDX-001",
        "the index leaves out a leaf",
        _without_leaf,
        why,
    )
    edit(
        "held-not-written",
        "HELD_NOT_WRITTEN",
        "CMT-013 PRT-002",
        "writer 1 holds a tensor that nobody wrote",
        _unwritten,
        "what is held and not written is lost",
    )
    edit(
        "replica-diverged",
        "REPLICA_DIVERGED",
        "CMT-012",
        "writer 1 has other bytes of a tensor that both hold",
        _diverged_replica,
        "one of the two would win silently",
        "WRONG_BYTES",
    )
    edit(
        "leaf-diverged",
        "LEAF_DIVERGED",
        "CMT-014 CTX-001",
        "the two writers have other values of one leaf",
        lambda c: c.parts[1]["leaves"]["value"].__setitem__(
            2, bytes.fromhex("93a164a5776964746804")
        ),
        "one of the values would win silently",
        "WRONG_BYTES",
    )


def _merge_values(made: Page) -> None:
    """Add values and tensors with contradictions between writers."""

    def edit(  # noqa: PLR0917 - a row of a table of cases
        slug: str,
        error: str,
        clauses: str,
        says: str,
        change: Edit,
        why: str,
        bug: str = "SILENT_DATA_LOSS",
    ) -> None:
        made.reject(
            slug, "two-writers", change, clauses, error, says, why=why, bug=bug, phase="validate"
        )

    edit(
        "tensor-diverged",
        "TENSOR_DIVERGED",
        "CMT-011",
        "bias is persistent on writer 0 and not on writer 1",
        lambda c: c.parts[1]["tensors"]["storage"].__setitem__(0, 1),
        "one of the two would win silently",
        "WRONG_BYTES",
    )
    edit(
        "name-of-two",
        "TENSOR_DIVERGED",
        "IDX-008",
        "writer 1 calls embedding scale, which is another tensor",
        lambda c: (
            c.parts[1]["aliases"]["name"].__setitem__(0, "scale"),
            c.index["aliases"].update(tensor=Packed([4, 4]), name=Strings(["head", "scale"])),
        ),
        "who asks for the name gets one or the other",
        "AMBIGUITY",
    )
    edit(
        "clock-of-another",
        "DOC_MISMATCH",
        "CMT-018 IDX-001",
        "saved_unix_s of part 0 is another than the index's",
        lambda c: c.parts[0].update(saved_unix_s=1),
        "index and manifest are a function of the parts",
        "AMBIGUITY",
    )
    edit(
        "absent-of-another",
        "DOC_MISMATCH",
        "CMT-017 IDX-001",
        "the reason in part 0 is another than the index's",
        lambda c: c.parts[0]["absent"].update(topology="lost"),
        "index and manifest are a function of the parts",
        "AMBIGUITY",
    )


def _without_leaf(c: Checkpoint) -> None:
    for column in c.index["leaves"].values():
        column.pop()
    c.manifest["fields"]["config"]["leaf_count"] -= 1


def _unwritten(c: Checkpoint) -> None:
    """Add to writer 1 a second tensor, without a file and absent from the index."""
    part = c.parts[1]
    tensors = part["tensors"]
    for column, value in (
        ("field", 0),
        ("scope", 0),
        ("dtype", 0),
        ("ndim", 1),
        ("storage", 0),
        ("box_count", 1),
    ):
        tensors[column].insert(0, value)
    tensors["name"].insert(0, "adrift")
    tensors["global_shape"].insert(0, 1)
    for column, value in (("begin", 0), ("cut_shape", 0), ("replica", 0), ("digest_count", 1)):
        part["boxes"][column].insert(0, value)
    part["digests"] = bytes(32) + part["digests"]
    part["extents"]["box"][0] += 1
    part["aliases"]["tensor"][0] += 1


def _diverged_replica(c: Checkpoint) -> None:
    """Change the bytes of writer 1's copy of bias, under a matching digest."""
    part = c.parts[1]
    name = next(name for name in c.files if name.startswith("weights-") and "-00001" in name)
    old = bytes(range(6))
    content = c.files[name]
    at = content.rindex(old)
    c.files[name] = content[:at] + b"other!" + content[at + 6 :]
    part["digests"] = part["digests"].replace(blake3(old).digest(), blake3(b"other!").digest())


def _other_sizes(c: Checkpoint) -> None:
    c.kept.add("parts/nbytes")
    c.index["parts"]["nbytes"] = Packed([1, 1])

"""Bases of deltas, and damaged bytes; spec/delta/45-deltas.md, "Bases" and "Read a block"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from blake3 import blake3

from conformance.generate.bases import flip, set_at
from conformance.generate.cases import FileMap, Page
from conformance.generate.chains import (
    BASE,
    DELTA,
    SECOND,
    Chain,
    base_plan,
    chain,
    in_run,
    later,
    placed,
    stored_as,
)
from conformance.generate.model import Checkpoint, build, checkpoint_name
from conformance.generate.pages.delta_scenes import (
    BASE_SHARD,
    BIAS,
    PACK,
    WEIGHT,
    reject,
)
from conformance.generate.plans import Leaf, Piece, Plan, Reference, Tensor
from conformance.generate.wire import FORMAT_VERSION, json_document

__all__ = ["add"]


def add(made: Page, link: Chain) -> None:
    """Add the cases of bases to the cases of deltas."""
    _bases(made, link)
    _contents(made, link)
    _closures(made)
    _bytes(made, link)
    _beyond(made)
    _stored(made, link)


def _record(kind: str, **members: Any) -> bytes:
    head = {
        "type": kind,
        "format_version": FORMAT_VERSION,
        "features": {"reader": [], "writer": []},
    }
    return json_document(head | {"run_id": in_run(3).run_id, "launch": 1, "step": 3} | members)[0]


def _bases(made: Page, link: Chain) -> None:
    why = "a directory that was deleted and written again has the same name and other weights"

    def edit(
        slug: str, error: str, clauses: str, says: str, beside: FileMap, *, bug: str = "WRONG_BYTES"
    ) -> None:
        reject(
            made,
            slug,
            link,
            None,
            clauses,
            error,
            says,
            why=why,
            bug=bug,
            phase="read",
            beside=beside,
        )

    def register(content: bytes) -> FileMap:
        return link.beside | {f"{BASE}/manifest.json": content}

    edit(
        "no-base",
        "BASE_MISSING",
        "DEL-020 CMT-031",
        "the base isn't there",
        {},
        bug="SILENT_DATA_LOSS",
    )
    edit(
        "base-without-register",
        "BASE_MISSING",
        "DEL-020",
        "the base has no register",
        {
            path: content
            for path, content in link.beside.items()
            if not path.endswith("manifest.json")
        },
    )
    made_again = placed(build(base_plan(BIAS, WEIGHT, nonce="f" * 32)))
    edit(
        "base-made-again",
        "BASE_MISMATCH",
        "DEL-020 CMT-031",
        "the base was made again, with the same contents",
        made_again,
    )
    edit(
        "base-aborted",
        "BASE_MISMATCH",
        "DEL-020",
        "an abort record in the base's register",
        register(_record("abort", reason="x")),
    )
    edit(
        "base-retired",
        "BASE_MISMATCH",
        "DEL-020",
        "a tombstone in the base's register",
        register(
            _record("tombstone", manifest_digest=link.delta.manifest["references"][0]["digest"])
        ),
    )


def _contents(made: Page, link: Chain) -> None:
    """Add bases that exist but have other content."""
    why = "a base that doesn't have what is read from it is another's"
    other = Tensor(name="weight", shape=(3, 2), content=WEIGHT.content)
    cut = Tensor(
        name="bias",
        shape=(3,),
        pieces=[Piece(writer=0, begin=(0,), shape=(2,)), Piece(writer=0, begin=(2,), shape=(1,))],
    )
    rows: tuple[tuple[str, str, list[Tensor], dict[str, Any]], ...] = (
        ("base-lacks-tensor", "the base hasn't the bias", [WEIGHT], {}),
        (
            "base-other-dtype",
            "the bias is of int32 in the base",
            [Tensor(name="bias", dtype="int32", shape=(3,)), WEIGHT],
            {},
        ),
        ("base-other-shape", "the weight is of three by two in the base", [BIAS, other], {}),
        ("base-other-boxes", "the bias is in two boxes in the base", [cut, WEIGHT], {}),
        (
            "base-other-content",
            "the bias has other bytes in the base, and is the base's",
            [Tensor(name="bias", shape=(3,), content=bytes(12)), WEIGHT],
            {},
        ),
    )
    for slug, says, tensors, members in rows:
        own = _rebased(link, base_plan(*tensors, **members))
        clauses = "DEL-023" if slug == "base-other-content" else "DEL-022"
        made.reject(
            slug,
            "example",
            functools.partial(_take, own),
            clauses,
            "BASE_BLOCK",
            says,
            why=why,
            bug="WRONG_BYTES",
            phase="read",
            place=DELTA,
            beside=own.beside,
        )
    wrong = _rebased(link, base_plan(BIAS, Tensor(name="weight", shape=(2, 3), content=bytes(24))))
    made.reject(
        "base-of-other-bytes",
        "example",
        functools.partial(_take, wrong),
        "DEL-008",
        "DECODED_DIGEST",
        (
            "the weight has other bytes in the base, which nothing but the digest of what is"
            " decoded"
            " shows"
        ),
        why="an encoding can't tell a wrong base: it decodes to something else",
        bug="WRONG_BYTES",
        phase="read",
        place=DELTA,
        beside=wrong.beside,
    )


def _rebased(link: Chain, base: Plan) -> Chain:
    """Return the same delta against another base, with the right digest."""
    made = build(base)
    digest = made.digest

    def edit(c: Checkpoint) -> None:
        c.manifest["references"][0]["digest"] = "blake3:" + digest.hex()
        c.part["references"][0]["digest"] = digest

    return Chain(link.delta.edited(edit), placed(made))


def _take(own: Chain, c: Checkpoint) -> None:
    c.manifest = own.delta.manifest
    c.parts = own.delta.parts


def _closures(made: Page) -> None:
    why = "the manifest alone says what has to be kept and copied"
    base = build(base_plan(BIAS))
    middle = chain(base, stored_as("same", BIAS, BIAS.content))
    plan = later(
        middle.delta, step=5, tensors=[stored_as("same", BIAS, BIAS.content, reference=DELTA)]
    )
    beside = middle.beside | placed(middle.delta)
    files = beside | {f"{SECOND}/{path}": content for path, content in build(plan).seal().items()}
    features = ["deltas"]
    made.reject(
        "closure-left-out",
        "same-of-same",
        None,
        "DEL-021",
        "REFERENCE_CLOSURE",
        "step 5 lists step 4 alone, which reads from step 3",
        why=why,
        bug="SILENT_DATA_LOSS",
        phase="read",
        files=files,
        path=SECOND,
        features=features,
    )
    kept = {path: content for path, content in beside.items() if not path.startswith(BASE)}
    full = later(
        base, middle.delta, step=5, tensors=[stored_as("same", BIAS, BIAS.content, reference=DELTA)]
    )
    files = kept | {f"{SECOND}/{path}": content for path, content in build(full).seal().items()}
    made.reject(
        "second-base-missing",
        "same-of-same",
        None,
        "DEL-020 DEL-024",
        "BASE_MISSING",
        "of the two that step 5 lists, step 3 isn't there",
        why=why,
        bug="SILENT_DATA_LOSS",
        phase="read",
        files=files,
        path=SECOND,
        features=features,
    )
    itself = Reference(name=checkpoint_name(4, 1), digest=blake3(b"itself").digest())
    ring = in_run(
        4,
        tensors=[stored_as("same", BIAS, BIAS.content, reference=itself.name)],
        references=[itself],
    )
    made.reject(
        "of-itself",
        "example",
        None,
        "DEL-020 DEL-021",
        "BASE_MISMATCH",
        "the reference has the delta's own name, and a digest that can't be its own",
        why="a ring can't be written, and what looks like one isn't followed",
        bug="CRASH",
        phase="read",
        files={f"{DELTA}/{path}": content for path, content in build(ring).seal().items()},
        path=DELTA,
        features=features,
    )


def _bytes(made: Page, link: Chain) -> None:
    why = "a decoder then meets only what a writer wrote, and damage is called damage, where it is"

    def edit(
        slug: str, error: str, clauses: str, says: str, after: Callable[[FileMap], object]
    ) -> None:
        reject(
            made,
            slug,
            link,
            None,
            clauses,
            error,
            says,
            why=why,
            bug="DAMAGE_UNSEEN",
            phase="read",
            after=after,
        )

    edit(
        "stored-bit",
        "BLOCK_DIGEST",
        "ENC-004 DEL-007",
        "one bit of a stored block is another",
        flip(f"{DELTA}/{PACK}", 66),
    )
    edit(
        "pack-header-bit",
        "HEADER_DIGEST",
        "DEL-012 OPN-011",
        "one bit of the pack's header is another",
        flip(f"{DELTA}/{PACK}", 0),
    )
    edit(
        "pack-missing",
        "FILE_MISSING",
        "CKP-004",
        "the pack isn't there",
        lambda files: files.pop(f"{DELTA}/{PACK}"),
    )
    edit(
        "pack-short",
        "FILE_NBYTES",
        "CKP-003 OPN-011",
        "the pack is a byte shorter",
        lambda files: files.update({f"{DELTA}/{PACK}": files[f"{DELTA}/{PACK}"][:-1]}),
    )
    edit(
        "base-bit",
        "BLOCK_DIGEST",
        "DEL-007 DEL-024 OPN-009",
        "one bit of a block of the base is another",
        flip(BASE_SHARD, -1),
    )
    edit(
        "base-shard-missing",
        "FILE_MISSING",
        "DEL-024 CKP-004 OPN-009",
        "the base's shard isn't there",
        lambda files: files.pop(BASE_SHARD),
    )

    def stored(c: Checkpoint) -> None:
        content = c.files[PACK][:-1] + b"\1"
        c.files[PACK] = content
        c.part["stored"]["digest"] = blake3(content[64:-1]).digest() + blake3(b"\1").digest()

    reject(
        made,
        "stored-form",
        link,
        stored,
        "ENC-005 ENC-017",
        "ENCODED_FORM",
        phase="read",
        bug="CRASH",
        says="a stored block isn't of its encoding's form, under a digest that fits",
        why=why,
    )


def _beyond(made: Page) -> None:
    """Add faults in unread parts of a base, found only by a validation."""
    spare = Tensor(name="spare", field="optimizer", shape=(4,))
    plan = base_plan(BIAS, WEIGHT, spare, leaves=[Leaf(field="config", value=["d", "width", 3])])
    link = chain(plan, stored_as("same", BIAS, BIAS.content))
    shard = next(path for path in link.beside if "optimizer" in path)

    def accept(slug: str, own: Chain, says: str, why: str, request: dict[str, Any] | None) -> None:
        made.accept(
            slug,
            own.delta,
            "OPN-009 DEL-024",
            says,
            why=why,
            place=DELTA,
            beside=own.beside,
            request=request,
        )

    accept(
        "base-whole",
        link,
        "a delta that reads one of three tensors of its base",
        "what isn't read is there",
        None,
    )
    no_tree = build(plan).edited(set_at("part/0", "leaves", "value", 0, value=b"\xc1"))
    no_key = build(plan).edited(set_at("part/0", "extents", "key", 0, value="other"))
    flipped = dict(link.beside)
    flip(shard, -1)(flipped)
    rows: tuple[tuple[str, str, Chain, str, str], ...] = (
        (
            "bit",
            "BLOCK_DIGEST",
            Chain(link.delta, flipped),
            "one bit of a tensor of the base is another",
            "TEN-006 ",
        ),
        (
            "lost",
            "FILE_MISSING",
            Chain(
                link.delta,
                {path: content for path, content in link.beside.items() if path != shard},
            ),
            "a shard of the base isn't there",
            "CKP-004 ",
        ),
        (
            "tree",
            "MSGPACK_SYNTAX",
            chain(no_tree, stored_as("same", BIAS, BIAS.content)),
            "a leaf of the base is no tree",
            "DOC-021 ",
        ),
        (
            "key",
            "SHARD_MISMATCH",
            chain(no_key, stored_as("same", BIAS, BIAS.content)),
            "a shard's header in the base has another key than its part",
            "SHD-010 ",
        ),
    )
    for slug, error, own, wrong, more in rows:
        says = f"{wrong}, which the delta doesn't read"
        accept(
            f"base-beyond-{slug}",
            own,
            says,
            "damage in what isn't read is no reason to refuse what is",
            {},
        )
        made.reject(
            f"base-beyond-{slug}",
            "base-whole",
            functools.partial(_take, own),
            f"{more}OPN-009",
            error,
            says,
            why="who validates a delta wants to know whether all that it stands on is whole",
            phase="validate",
            place=DELTA,
            beside=own.beside,
        )
    beside = link.beside | {
        f"{BASE}/notes.txt": b"x",
        f"{BASE}/index-ffffffffffffffff.msgpack": b"x",
    }
    says = "in the base's directory lie two files that it doesn't name"
    accept("base-extra-files", Chain(link.delta, beside), says, "extra files are no damage", None)


def _stored(made: Page, link: Chain) -> None:
    """Add faults in stored bytes under correct digests."""

    def content(c: Checkpoint) -> None:
        digests = c.part["digests"]
        c.part["digests"] = digests[:32] + blake3(b"other").digest() + digests[64:]

    reject(
        made,
        "content-digest",
        link,
        content,
        "DEL-008",
        "DECODED_DIGEST",
        phase="read",
        bug="WRONG_BYTES",
        says="the digest of a block's content is that of other bytes",
        why="a decoder that is wrong by one digit on one machine would be wrong weights",
    )

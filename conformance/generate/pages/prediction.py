"""Prediction; spec/companions/56-prediction.md."""

from __future__ import annotations

import math
import struct
from typing import Any

from blake3 import blake3

from conformance.generate.bases import set_at
from conformance.generate.cases import Page
from conformance.generate.chains import BASE, DELTA, Chain, base_plan, later, placed
from conformance.generate.encodings import changes, planes, steps_between
from conformance.generate.model import Checkpoint, Edit, build
from conformance.generate.plans import Group, Stored, Tensor, whole
from conformance.generate.prediction import (
    ADAM,
    SGD,
    Rule,
    f32,
    first_moment,
    from_stored,
    gradient_of,
    narrow,
    predicted,
    rule_tree,
)
from conformance.generate.wire import Folded, msgpack

__all__ = ["page"]

COUNT = 16
NAN = bytes.fromhex("3412c07f")
WHY = "a rule or an order of operations that is read otherwise gives other weights by one digit"


def page() -> Page:
    """Return the cases of prediction."""
    made = Page("prediction")
    _valid(made)
    _valid_casts(made)
    link = group(ADAM)
    _rules(made, link)
    _members(made, link)
    _blocks(made, link)
    _others(made, link)
    return made


def _pack(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _list(content: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(content) // 4}f", content))


def _start() -> dict[str, list[float]]:
    """Return a state at step 1, with numbers of binary32."""
    moment = [(-1) ** i * (i + 1) / 1024 for i in range(COUNT)]
    square = [(i + 1) / 4194304 for i in range(COUNT)]
    return {
        "exp_avg": moment, "exp_avg_sq": square, "max_exp_avg_sq": [2 * one for one in square],
        "weight": [0.5 + i / 64 for i in range(COUNT)], "momentum_buffer": moment,
    }  # fmt: skip


def _roles(rule: Rule) -> list[str]:
    if rule["kind"] == "sgd":
        return ["momentum_buffer", "weight"]
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if rule["amsgrad"] else []), "weight"]


def group(
    rule: Rule, *, first: str = "gradient", how: int = 0, missed: bool = False, nan: bool = False,
    odd: str = "", without: str = "",
) -> Chain:  # fmt: skip
    """Return a delta of an optimizer's state, a step after its base.

    Args:
        first: the encoding of the first moment; for encodings other than `gradient`, readers derive
            the gradient from the first moment.
        how: 0 for a plain gradient, 1 for planes.
        missed: whether a weight differs from the prediction.
        nan: whether a second moment is a NaN.
        odd: the irregularity of the first moment: "corrected" if an element differs from the result
            of the stored gradient, "nan" if an element's gradient is a NaN, "uneven" if the
            elements have digits up to the last.
        without: a role that the base lacks.
    """
    before = _start()
    roles = _roles(rule)
    if odd == "uneven":
        before[roles[0]] = [f32(one / 3) for one in before[roles[0]]]
    bases = {role: _pack(before[role]) for role in roles}
    if nan:
        before["exp_avg_sq"][3] = float("nan")
        bases["exp_avg_sq"] = bases["exp_avg_sq"][:12] + NAN + bases["exp_avg_sq"][16:]
    kind = "bfloat16" if rule["gradient"] == "float32" else rule["gradient"]
    # Few elements have a gradient if the first moment is stored as a change, so the block is short.
    grain = [
        narrow(0.0 if first == "sparse" and i % 5 else (-1) ** (i // 3) * (i + 1) / 96, kind)
        for i in range(COUNT)
    ]
    if odd == "nan":
        grain[5] = narrow(math.nan, kind)
    wanted = [
        from_stored(rule | {"gradient": kind}, one, w)
        for one, w in zip(grain, before["weight"], strict=True)
    ]
    moments = _moments(rule, wanted, before[roles[0]])
    if odd == "corrected":
        moments[7] *= 2
    found = [
        gradient_of(rule, after, m, w)
        for after, m, w in zip(moments, before[roles[0]], before["weight"], strict=True)
    ]
    rows = zip(
        found,
        moments,
        before["exp_avg_sq"],
        before["max_exp_avg_sq"],
        before["weight"],
        strict=True,
    )
    later_ones = [predicted(rule, g, m, v, x, w) for (g, _), m, v, x, w in rows]
    after = {role: _kept([one[role] for one in later_ones], bases[role]) for role in roles[1:]} | {
        roles[0]: _pack(moments)
    }
    expected = after["weight"]
    after["weight"] = expected[:8] + bytes([expected[8] ^ 1]) + expected[9:] if missed else expected
    blocks = dict.fromkeys(roles[1:], b"\x00")
    blocks["weight"] = changes(steps_between(after["weight"], expected, "float32"), 4)
    if first == "gradient":
        lead = _moments(rule,
                        [from_stored(rule, *one)
                         for one in zip(grain, before["weight"], strict=True)],
                        before[roles[0]])  # fmt: skip
        rest = changes(steps_between(_pack(moments), _pack(lead), "float32"), 4, levels=0)
        blocks[roles[0]] = _gradient_block(b"".join(grain), how, rest)
    else:
        decayed = _pack([first_moment(rule, 0.0, m) for m in before[roles[0]]])
        blocks[roles[0]] = changes(steps_between(_pack(moments), decayed, "float32"), 4, levels=0)
    return _assemble(rule, roles, bases, after, blocks, first, without)


def _moments(rule: Rule, gradients: list[float], before: list[float]) -> list[float]:
    """Return the moments after gradients; for a NaN, the base's element."""
    found = [first_moment(rule, g, m) for g, m in zip(gradients, before, strict=True)]
    return [m if math.isnan(one) else one for one, m in zip(found, before, strict=True)]


def _kept(values: list[float], base: bytes) -> bytes:
    """Return values as binary32; for a NaN, the bits of the base's element."""
    cells = (
        base[4 * at : 4 * at + 4] if math.isnan(value) else struct.pack("<f", value)
        for at, value in enumerate(values)
    )
    return b"".join(cells)


def _gradient_block(stored: bytes, how: int, rest: bytes) -> bytes:
    if how:
        stored = planes(
            [int.from_bytes(stored[at : at + 2], "little") for at in range(0, len(stored), 2)], 2
        )
    return bytes([how]) + struct.pack("<I", len(stored)) + stored + rest


def _assemble(  # noqa: PLR0917 - a row of a table of cases
    rule: Rule,
    roles: list[str],
    before: dict[str, bytes],
    after: dict[str, bytes],
    blocks: dict[str, bytes],
    first: str,
    without: str,
) -> Chain:
    bases = []
    tensors = []
    for role in roles:
        field = "weights" if role == "weight" else "optimizer"
        bases.append(Tensor(name=role, field=field, shape=(COUNT,), content=before[role]))
        stored = Stored(
            encoding=first if role == roles[0] else "sparse", blocks=[blocks[role]], predicted=True
        )
        if role == roles[0] and first == "raw":
            stored = Stored(encoding="raw")
        tensors.append(
            Tensor(
                name=role,
                field=field,
                shape=(COUNT,),
                content=after[role],
                pieces=[whole((COUNT,), stored=[stored])],
            )
        )
    members = list(roles)
    if rule["copy"]:
        content = b"".join(narrow(value, rule["copy"]) for value in _list(after["weight"]))
        bases.append(
            Tensor(name="copy", dtype=rule["copy"], shape=(COUNT,), content=bytes(2 * COUNT))
        )
        stored = Stored(encoding="sparse", blocks=[b"\0"], predicted=True)
        tensors.append(
            Tensor(
                name="copy",
                dtype=rule["copy"],
                shape=(COUNT,),
                content=content,
                pieces=[whole((COUNT,), stored=[stored])],
            )
        )
        members.append("copy")
    base = build(base_plan(*(one for one in bases if one.name != without)))
    own = Group(kind=rule["kind"], rule=rule_tree(rule), members=members, reference=BASE)
    return Chain(build(later(base, tensors=tensors, groups=[own])), placed(base))


def _valid(made: Page) -> None:
    clauses = (
        "PRE-001 PRE-002 PRE-006 PRE-007 PRE-008 PRE-009 PRE-010 PRE-011 PRE-012 PRE-014 PRE-016 "
    )
    clauses += "DEL-009 DEL-010 DEL-011"
    for slug, says, link in (
        ("adam", "AdamW: a stored gradient, second moment and weight as predicted", group(ADAM)),
        ("adam-planes", "the gradient in planes, one weight that wasn't predicted",
         group(ADAM, how=1, missed=True)),
        ("adam-separate", "products and sums rounded one by one",
         group(ADAM | {"arithmetic": "separate"})),
        ("adam-double", "scalars of binary64",
         group(ADAM | {"arithmetic": "double", "square": "gain_last"})),
        ("adam-sum", "a moment by a sum, the square's gain last, a quotient",
         group(ADAM | {"moment": "sum", "square": "gain_last", "update": "quotient"})),
        ("adam-amsgrad", "the maximum of the second moments as a member",
         group(ADAM | {"amsgrad": True})),
        ("adam-copy", "a copy in bfloat16 behind the weight", group(ADAM | {"copy": "bfloat16"})),
        ("adam-l2-and-clip", "weight decay in the gradient, which was clipped",
         group(ADAM | {"l2": 0.01, "clip": 0.5, "shrink": 1.0, "gradient": "float16"})),
        ("adam-large-gain", "a gain of 0.75, at which lerp starts from the other end",
         group(ADAM | {"gain": 0.75, "decay": 0.25})),
        ("adam-large-gain-uneven", ("the same, of moments with so many digits that it matters from"
        " which end"),
         group(ADAM | {"gain": 0.75, "decay": 0.25}, odd="uneven")),
        ("adam-gain-half", ("a gain of 0.5, as of beta1 = 0.5, at which lerp starts from the other"
        " end"),
         group(ADAM | {"gain": 0.5, "decay": 0.5}, odd="uneven")),
        ("adam-gain-nearly-half", "a gain that is 0.5 when it is rounded to binary32",
         group(ADAM | {"gain": 0.5 - 2**-40, "decay": 0.5}, odd="uneven")),
        ("adam-gain-nearly-half-double", "the same, which stays below 0.5 in binary64",
         group(ADAM | {"gain": 0.5 - 2**-40, "decay": 0.5, "arithmetic": "double"}, odd="uneven")),
        ("adam-decayed-l2", ("the same, with weight decay in the gradient: it starts at g = 0 all"
        " the same"),
         group(ADAM | {"l2": 3e-9, "shrink": 1.0}, first="sparse")),
        ("adam-base-without-copy", "a copy of the weights that the base doesn't have",
         group(ADAM | {"copy": "bfloat16"}, without="copy")),
        ("adam-first-raw", "the first moment raw, and the gradient read off it",
         group(ADAM, first="raw")),
        ("adam-float32", ("a gradient of binary32: the first moment as what it differs in from the"
        " decayed one"),
         group(ADAM | {"gradient": "float32"}, first="sparse")),
        ("adam-decayed", ("the first moment as what it differs in from the decayed one, and a"
        " gradient of bfloat16"),
         group(ADAM, first="sparse")),
        ("adam-nan", "a second moment that is a NaN, so that the weight stays as it was",
         group(ADAM, nan=True)),
        ("adam-nan-gradient", ("a stored gradient that is a NaN, so that the first moment stays as"
        " it was"),
         group(ADAM, odd="nan")),
        ("adam-corrected", ("a first moment that isn't what the stored gradient leads to: the"
        " others go by the moment"),
         group(ADAM, odd="corrected")),
        ("sgd", "SGD with momentum", group(SGD)),
        ("sgd-nesterov", "SGD with Nesterov's momentum, and a copy in float16",
         group(SGD | {"nesterov": True, "copy": "float16", "arithmetic": "fused"})),
    ):  # fmt: skip
        own = clauses + {
            "adam-first-raw": "",
            "adam-float32": " PRE-017",
            "adam-decayed": " PRE-017",
            "adam-decayed-l2": " PRE-017",
            "adam-base-without-copy": " PRE-013 PRE-015 DEL-025",
            "adam-nan": " PRE-005 PRE-013",
            "adam-nan-gradient": " PRE-005 PRE-013",
        }.get(slug, " PRE-013 PRE-015")
        made.accept(
            slug, link.delta, own, says, why=WHY, bug="WRONG_BYTES", place=DELTA, beside=link.beside
        )


def _valid_casts(made: Page) -> None:
    for slug, clauses, says, link in (
        ("cast-float16", "PRE-004 ", ("a copy in float16 of a raw master that has NaN, infinity"
        " and ties"),
         _cast("float16", ODD)),
        ("cast-bfloat16", "PRE-004 ", "a copy in bfloat16 of a raw master that has more of these",
         _cast("bfloat16", ODD + MORE_NANS)),
        ("cast-of-two-blocks", "", "a block of the copy goes with two of the master",
         _cast("bfloat16", LONG)),
    ):  # fmt: skip
        own = f"PRE-001 {clauses}PRE-016 DEL-010 DEL-011"
        made.accept(
            slug, link.delta, own, says, why=WHY, bug="WRONG_BYTES", place=DELTA, beside=link.beside
        )


#: Numbers rounded differently by a reader with one rule for all numbers.
ODD = bytes.fromhex(
    "0000807f 000080ff 0100a07f 0000c0ff 0010803f 0030803f ffff7f3f 00000080 00e07f47 01000000"
)
MORE_NANS = bytes.fromhex("0100807f ffffff7f")
#: More than a block of elements of 32 bits, and less than a block of elements of 16 bits.
LONG = b"".join(struct.pack("<f", 1 + number / 256) for number in range(1030))


def _narrowed(value: float, dtype: str) -> bytes:
    try:
        return narrow(value, dtype)
    except OverflowError:
        return b"\0\x7c" if value > 0 else b"\0\xfc"


def _two_casts() -> Chain:
    """Return a delta of two masters and the copies of each."""
    shape = (4,)
    rule = rule_tree({"kind": "cast", "copy": "bfloat16"})
    raw = Stored(encoding="raw")
    rest = Stored(encoding="sparse", blocks=[b"\0"], predicted=True)
    tensors = []
    groups = []
    for name in ("a", "b"):
        content = struct.pack("<4f", 1, 2, 3, 4)
        low = b"".join(narrow(value, "bfloat16") for value in (1, 2, 3, 4))
        tensors += [
            Tensor(name=name, shape=shape, content=content, pieces=[whole(shape, stored=[raw])]),
            Tensor(
                name=f"{name}.low",
                dtype="bfloat16",
                shape=shape,
                content=low,
                pieces=[whole(shape, stored=[rest])],
            ),
        ]
        groups.append(Group(kind="cast", rule=rule, members=[name, f"{name}.low"]))
    return Chain(build(later(tensors=tensors, groups=groups)), {})


def _cast(dtype: str, content: bytes) -> Chain:
    shape = (len(content) // 4,)
    raw = Stored(encoding="raw")
    rest = Stored(encoding="sparse", blocks=[b"\0"], predicted=True)
    master = Tensor(
        name="master",
        shape=shape,
        content=content,
        field="optimizer",
        pieces=[whole(shape, stored=[raw])],
    )
    low = b"".join(_narrowed(value, dtype) for value in _list(content))
    weight = Tensor(
        name="weight", dtype=dtype, shape=shape, content=low, pieces=[whole(shape, stored=[rest])]
    )
    rule = rule_tree({"kind": "cast", "copy": dtype})
    plan = later(
        tensors=[master, weight],
        groups=[Group(kind="cast", rule=rule, members=["master", "weight"])],
    )
    return Chain(build(plan), {})


def _reject(  # noqa: PLR0917 - a row of a table of cases
    made: Page, slug: str, link: Chain, edit: Edit, clauses: str, error: str, says: str, *,
    bug: str = "CRASH", phase: str = "read",
) -> None:  # fmt: skip
    made.reject(
        slug,
        "adam",
        edit,
        clauses,
        error,
        says,
        why=WHY,
        bug=bug,
        phase=phase,
        place=DELTA,
        beside=link.beside,
    )


def _rule(tree: Any) -> Edit:
    return set_at(
        "part/0", "groups", "rule", 0, value=tree if isinstance(tree, bytes) else msgpack(tree)
    )


def _rules(made: Page, link: Chain) -> None:
    reordered = {"gradient": ADAM["gradient"], **ADAM}
    for slug, clauses, says, tree in (
        (
            "rule-short",
            "PRE-006",
            "without eps",
            rule_tree({key: value for key, value in ADAM.items() if key != "eps"}),
        ),
        (
            "rule-more",
            "PRE-006",
            "with nesterov, which adam hasn't",
            rule_tree(ADAM | {"nesterov": False}),
        ),
        ("rule-order", "PRE-006", "in another order", rule_tree(reordered)),
        ("rule-of-another-kind", "PRE-006", "of sgd, in a group of adam", rule_tree(SGD)),
        (
            "rule-update",
            "PRE-007",
            "with an update called sum",
            rule_tree(ADAM | {"update": "sum"}),
        ),
        (
            "rule-nan",
            "PRE-008",
            "with a step_size of NaN",
            rule_tree(ADAM | {"step_size": float("nan")}),
        ),
        ("rule-long", "PRE-006", "of 5000 bytes", rule_tree(ADAM | {"copy": "x" * 5000})),
        ("rule-bytes", "PRE-006 TRE-001", "that is no tree", b"\xc1"),
    ):
        _reject(
            made,
            slug,
            link,
            _rule(tree),
            clauses,
            "ENCODED_FORM MSGPACK_SYNTAX" if slug == "rule-bytes" else "ENCODED_FORM",
            f"a rule {says}",
        )
    for slug, clauses, says, changed in (("other-eps", "PRE-012 DEL-008", "eps", {"eps": 1e-3}),):
        _reject(
            made,
            slug,
            link,
            _rule(rule_tree(ADAM | changed)),
            clauses,
            "DECODED_DIGEST",
            f"{says} of the rule is another than the one of the step",
            bug="WRONG_BYTES",
        )


def _members(made: Page, link: Chain) -> None:
    _reject(
        made,
        "roles-less",
        link,
        _rule(rule_tree(ADAM | {"amsgrad": True})),
        "PRE-001 DEL-009",
        "ENCODED_FORM",
        "three members, and a rule with a maximum",
    )
    copy = group(ADAM | {"copy": "bfloat16"})
    made.reject(
        "copy-of-another-dtype",
        "adam-copy",
        _rule(rule_tree(ADAM | {"copy": "float16"})),
        "PRE-001 DEL-009",
        "ENCODED_FORM",
        "a copy of bfloat16, and a rule of float16",
        why=WHY,
        bug="CRASH",
        phase="read",
        place=DELTA,
        beside=copy.beside,
    )
    _reject(
        made,
        "without-reference",
        link,
        set_at("part/0", "groups", "reference", 0, value=0),
        "DEL-010",
        "COLUMN_FORM",
        "a group of adam without a reference",
        phase="open",
    )


def _blocks(made: Page, link: Chain) -> None:

    pack = "optimizer-0000000000000004-00000.pack"
    block = link.delta.files[pack][64:-1]

    def put(changed: bytes) -> Edit:
        def edit(c: Checkpoint) -> None:
            c.files[pack] = c.files[pack][:64] + changed + b"\0"
            table = c.part["stored"]
            c.part["files"]["nbytes"][0] += len(changed) - table["nbytes"][0]
            table["nbytes"][0] = len(changed)
            table["digest"] = blake3(changed).digest() + table["digest"][32:]
            summary = c.manifest["fields"]["optimizer"]
            summary["stored_nbytes"] += len(changed) - len(block)

        return edit

    for slug, clauses, says, changed in (
        ("gradient-stored-2", "PRE-014", "is stored in the way 2", b"\2" + block[1:]),
        (
            "gradient-beyond",
            "PRE-014 ENC-005",
            "takes more bytes than there are",
            b"\0" + struct.pack("<I", 2**31) + block[5:],
        ),
        (
            "gradient-short",
            "PRE-014",
            "has an element less",
            b"\0" + struct.pack("<I", 30) + block[5:35] + b"\0",
        ),
        ("gradient-behind", "PRE-014 ENC-006", "has a byte behind the sparse part", block + b"\0"),
    ):
        _reject(made, slug, link, put(changed), clauses, "ENCODED_FORM", f"the gradient {says}")
    other = b"\0" + struct.pack("<I", 32) + block[5:7] + b"\0\x40" + block[9:]
    _reject(
        made,
        "gradient-other",
        link,
        put(other),
        "PRE-010 PRE-015 DEL-008",
        "DECODED_DIGEST",
        "an element of the gradient is another",
        bug="WRONG_BYTES",
    )


def _others(made: Page, link: Chain) -> None:
    """Add gradients taken from another block."""

    def later_role(c: Checkpoint) -> None:
        row = next(
            i
            for i, number in enumerate(c.part["extents"]["encoding"])
            if c.part["encodings"][number] == "sparse"
        )
        c.part["extents"]["encoding"][row] = c.part["encodings"].index("gradient")

    two = _two_casts()
    made.accept(
        "two-groups", two.delta, "DEL-009 IDX-003", "two groups of one kind", why=WHY,
        bug="WRONG_BYTES", place=DELTA, beside=two.beside,
    )  # fmt: skip
    made.reject(
        "groups-unsorted", "two-groups",
        set_at("part/0", "groups", "box", value=Folded([2, 1, -3, 1])), "IDX-003",
        "COLUMN_ORDER", "in groups, the two change places", why="one content has one form",
        bug="AMBIGUITY", place=DELTA, beside=two.beside,
    )  # fmt: skip
    made.reject(
        "groups-counted-anew", "two-groups",
        set_at("part/0", "groups", "box", value=Folded([0, 1, 2, 1])), "IDX-002",
        "COLUMN_FORM", ("in groups, the boxes of the second are counted from 0, as if it were the"
        " first"),
        why=("only the first member of all counts from 0: counted so, the members are boxes 0 and"
        " 1, 3 and 4 of four"),
        bug="AMBIGUITY", place=DELTA, beside=two.beside,
    )  # fmt: skip
    bare = group(ADAM, without="weight")
    made.reject(
        "base-without-weight",
        "adam",
        None,
        "DEL-025 DEL-022",
        "BASE_BLOCK",
        "the base doesn't have the weight, which is predicted from its old elements",
        why=WHY,
        phase="read",
        files={f"{DELTA}/{path}": content for path, content in bare.delta.seal().items()}
        | bare.beside,
        path=DELTA,
    )
    _reject(
        made,
        "gradient-of-32-bits",
        link,
        _rule(rule_tree(ADAM | {"gradient": "float32"})),
        "PRE-013",
        "ENCODED_FORM",
        "a stored gradient, by a rule whose gradient has 32 bits",
    )
    _reject(
        made,
        "gradient-of-a-later-role",
        link,
        later_role,
        "PRE-013 DEL-006",
        "ENCODED_FORM COLUMN_FORM",
        "the second moment is stored as a gradient",
    )

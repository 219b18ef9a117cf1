"""Every fenced example of the specification is executed, as its tags say (00-overview.md, Notation)."""

import doctest
import json
import struct
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from ckptfmt import limits
from ckptfmt.commit.decision import finalize
from ckptfmt.data.cursor import dump_cursor, parse_cursor
from ckptfmt.digest import digest_bytes, digest_text
from ckptfmt.documents import msgpk, tree
from ckptfmt.documents.canonical import dump_document
from ckptfmt.documents.index import Index
from ckptfmt.documents.manifest import Manifest, parse_register
from ckptfmt.documents.packed import Columns, dump_packed, dump_strings, parse_packed
from ckptfmt.documents.part import PACK_HEADER, Part, parse_failure
from ckptfmt.documents.run import HomeRecord, LabelsRecord, Launch, Pins, RunRecord, Vote
from ckptfmt.documents.shard import dump_shard_header, parse_shard_header
from ckptfmt.errors import CkptError
from ckptfmt.layout.merge import PartFileEntry, merge_parts
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.report import Report
from ckptfmt.read.verify import verify_checkpoint
from ckptfmt.run.failures import Decision
from ckptfmt.run.ledger import LedgerEntry
from ckptfmt.run.witness import WitnessRecord
from ckptfmt.store.memory import MemoryStore
from conformance.generate.fences import REFUSAL, edited
from tests.spec.pages import SCHEMA, fences, page
from tests.spec.views import document_of, load_schema, view_of

#: Which tags a fence of each language may have, and must have.
TAGS = {
    "text": (set(), set()),
    "python": ({"shows"}, set()),
    "json document": ({"document", "name", "for"}, {"name", "for"}),
    "json view": ({"view", "name", "for"}, {"name", "for"}),
    "json tree": ({"tree", "name"}, {"name"}),
    "json shard": ({"shard", "name", "for"}, {"name", "for"}),
    "edits": ({"of"}, {"of"}),
    "rejects": ({"parse"}, {"parse"}),
    "hex": ({"parse", "shows"}, {"parse"}),
}


# The names in which the values of trees are written.
VALUES = {
    **{
        name: getattr(tree, name)
        for name in ("DeviceName", "DtypeName", "InlineArray", "Size", "TensorRef")
    },
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "deque": deque,
}


def kind_of(fence):
    return next(
        (f"json {tag}" for tag in fence.tags if fence.language == "json" and f"json {tag}" in TAGS),
        None,
    ) or (fence.language)


def only(*kinds):
    return pytest.mark.parametrize(
        "fence",
        [fence for fence in fences() if kind_of(fence) in kinds],
        ids=lambda fence: fence.place,
    )


def example(name):
    (found,) = [fence for fence in fences() if fence.tags.get("name") == name]
    return found


# --- what an example stands for -------------------------------------------------------------------


def parse_json_document(content, where, kind):
    kinds: dict[str, Any] = {
        "run": RunRecord,
        "launch": Launch,
        "ledger": LedgerEntry,
        "witness": WitnessRecord,
        "healing": Decision,
        "vote": Vote,
        "home": HomeRecord,
        "labels": LabelsRecord,
    }
    if kind in kinds:
        return kinds[kind].parse(content, where=where)
    if kind == "pins":
        return Pins.parse(content, where=where)
    if kind == "failure":
        return parse_failure(content, where=where)
    return parse_register(content, where=where)


def seal(content):
    """The document in whose zlib stream the content lies as it is: the examples don't depend on a build of zlib."""
    stored = zlib.compress(content, 0)
    return msgpk.dump_msgpack(
        {"digest": digest_bytes(stored), "nbytes": len(content), "signed": stored}
    )


def inflated(content):
    return msgpk.open_packed_document(content, where="example")[0]


def parse_view(signed, where, kind):
    content = seal(msgpk.dump_msgpack(document_of(signed, load_schema(kind))))
    parsed = (
        Index.parse(content, where=where)
        if kind == "index"
        else Part.parse(content, where=where)[0]
    )
    return parsed, content


def parse_shard(header, where):
    content = dump_shard_header(header)
    return parse_shard_header(content, file_nbytes=len(content) + 36, where=where)


def accept(fence, value):
    """Parse what an example says, or raise."""
    where = fence.tags.get("for", "example")
    match kind_of(fence):
        case "json document":
            return parse_json_document(dump_document(value), where, fence.tags["document"])
        case "json view":
            return parse_view(value, where, fence.tags["view"])
        case "json shard":
            return parse_shard(value, where)
    return parse_cursor(value)


def check_refused(call, line):
    """The call fails with the code and by the clause that the line names."""
    match = REFUSAL.fullmatch(line)
    assert match, line
    _, code, clause, _ = match.groups()
    with pytest.raises(CkptError) as caught:
        call()
    assert (str(caught.value.code), caught.value.requirement) == (code, clause), str(caught.value)


# --- the tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", fences(), ids=lambda fence: fence.place)
def test_every_fence_says_how_it_is_executed(fence):
    assert kind_of(fence) in TAGS, f"```{fence.language} is no kind of example"
    allowed, needed = TAGS[kind_of(fence)]

    assert needed <= fence.tags.keys() <= allowed
    assert fence.content.strip()


def test_names_of_examples_are_unique():
    names = [fence.tags["name"] for fence in fences() if "name" in fence.tags]

    assert len(names) == len(set(names))


@only("json document", "json view", "json tree", "json shard")
def test_an_example_is_accepted(fence):
    assert accept(fence, json.loads(fence.content))


@only("json view", "json tree")
def test_an_example_fits_its_schema(fence):
    name = fence.tags.get("view") or fence.tags["tree"]
    resources = [
        Resource.from_contents(json.loads(path.read_text("utf-8")))
        for path in SCHEMA.glob("*.json")
    ]
    registry: Registry[Any] = Registry().with_resources([(str(one.id()), one) for one in resources])

    Draft202012Validator(load_schema(name), registry=registry).validate(json.loads(fence.content))


@only("json view")
def test_an_example_is_what_is_dumped(fence):
    parsed, content = accept(fence, json.loads(fence.content))

    assert inflated(parsed.dump()[0]) == inflated(content)
    assert view_of(msgpk.parse_packed_document(content, where="example")[0]) == json.loads(
        fence.content
    )


@only("json tree")
def test_an_example_cursor_is_what_is_dumped(fence):
    cursor = json.loads(fence.content)

    assert dump_cursor(parse_cursor(cursor)) == cursor


@only("edits")
def test_an_edited_example_is_refused(fence):
    """REQ-VER-004, REQ-ERR-001."""
    source = example(fence.tags["of"])
    for number, line in fence.numbered_lines():
        match = REFUSAL.fullmatch(line)
        assert match, f"line {number}: {line}"
        value = edited(json.loads(source.content), match[1])
        check_refused(lambda value=value: accept(source, value), line)


@only("rejects")
def test_a_bad_document_is_refused(fence):
    for number, line in fence.numbered_lines():
        match = REFUSAL.fullmatch(line)
        assert match, f"line {number}: {line}"
        text = match[1].removesuffix(" ->")
        if text.startswith("hex:"):
            content = bytes.fromhex(text.removeprefix("hex:"))
        elif text.startswith("padded:"):
            content = pad(text.removeprefix("padded:").encode())
        else:
            content = text.encode()
        parse = {
            "manifest": lambda content: parse_register(content, where="example"),
            "shard": lambda content: parse_shard_header(
                content, file_nbytes=len(content), where="example"
            ),
        }[fence.tags["parse"]]
        check_refused(lambda parse=parse, content=content: parse(content), line)


def pad(text):
    text += b" " * (-(8 + len(text)) % limits.SHARD_ALIGN_NBYTES)
    return len(text).to_bytes(8, "little") + text


def unpack(content):
    return msgpk.parse_msgpack(content, where="example", limit_items=99)


#: How the lines of a `hex` fence are parsed, and dumped again.
FORMS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    "msgpack": (unpack, msgpk.dump_msgpack),
    "packed": (
        lambda content: parse_packed(unpack(content), "example").tolist(),
        lambda value: msgpk.dump_msgpack(dump_packed(value)),
    ),
    "strings": (
        lambda content: (
            Columns({"column": unpack(content)}, ("column",), "example").strings("column").tolist()
        ),
        lambda value: msgpk.dump_msgpack(dump_strings(value)),
    ),
    "packed_document": (
        lambda content: msgpk.parse_packed_document(content, where="example"),
        lambda value: msgpk.dump_packed_document(value[0])[0],
    ),
    "tree": (
        lambda content: tree.parse_tree(content, where="example"),
        lambda value: tree.dump_tree(value, where="example"),
    ),
}


@only("hex")
def test_bytes_are_what_the_page_says(fence):
    parse, dump = FORMS[fence.tags["parse"]]
    for number, line in fence.numbered_lines():
        if " -> " in line:
            content = bytes.fromhex(line.partition(" -> ")[0])
            check_refused(lambda content=content: parse(content), line)
            continue
        digits, _, text = line.partition(" = ")
        value = eval(text, dict(VALUES))
        assert dump(value).hex() == digits, f"line {number}"
        parsed = parse(bytes.fromhex(digits))
        # repr tells True from 1, -0.0 from 0.0, and the order of a dict.
        assert repr(parsed) == repr(value), f"line {number}"


@only("python")
def test_a_session_prints_what_the_page_says(fence):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    parsed = doctest.DocTestParser().get_doctest(
        fence.content, {}, fence.place, fence.page, fence.line
    )
    report: list[str] = []

    doctest.DocTestRunner(optionflags=flags).run(parsed, out=report.append)

    assert not report, "".join(report)
    assert parsed.examples


def test_the_examples_are_one_checkpoint():
    """Shard, part, index, manifest, launch and tombstone name each other by true names, sizes and digests."""
    value = {
        name: json.loads(example(name).content) for name in ("shard", "part", "index", "manifest")
    }
    header = dump_shard_header(value["shard"])
    part, part_content = accept(example("part"), value["part"])
    part_digest = msgpk.parse_packed_document(part_content, where="part")[1]
    index, index_content = accept(example("index"), value["index"])
    manifest = accept(example("manifest"), value["manifest"])
    assert isinstance(manifest, Manifest)

    assert part.files[0].name == example("shard").tags["for"]
    assert part.files[0].header_digest == digest_bytes(header)
    assert part.files[0].nbytes == len(header) + 36
    assert (index.parts[0].digest, index.parts[0].nbytes) == (part_digest, len(part_content))
    assert manifest.index_digest == digest_text(
        msgpk.parse_packed_document(index_content, where="index")[1]
    )
    assert manifest.index_nbytes == len(index_content)
    assert manifest.origin == index.origin == part.origin
    assert json.loads(example("tombstone").content)["manifest_digest"] == manifest.digest

    store = MemoryStore()
    fill_base(store)
    report = Report(target="example", kind="checkpoint")
    checkpoint = verify_checkpoint(store, report)

    assert (report.violations, report.warnings) == ([], [])
    assert checkpoint is not None
    assert checkpoint.read("weights", "head.weight").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint.leaf("config") == {"width": 3}
    assert checkpoint.stream("user/noise", "lw/0") == ("python.mt19937", (3, (1, 2), None))


def fill_base(store):
    """Write the checkpoint of pages 30, 40 and 50."""
    for name in ("manifest", "index", "part", "shard"):
        value = json.loads(example(name).content)
        match name:
            case "manifest":
                content = dump_document(value)
            case "shard":
                content = dump_shard_header(value) + struct.pack("<3f6f", 0.5, 1, 2, *range(6))
            case _:
                content = accept(example(name), value)[1]
        store.create(example(name).tags["for"], [content])


def test_the_examples_of_a_delta_are_one_checkpoint():
    """REQ-DEL-020, REQ-MAN-006: the manifest is what a committer makes of the part; base and pack say the
    rest.
    """
    store = MemoryStore()
    fill_base(store.at("step-00001200-l0003"))
    place = store.at("step-00001210-l0003")
    part, content = accept(example("delta-part"), json.loads(example("delta-part").content))
    digest = msgpk.parse_packed_document(content, where="part")[1]
    index = merge_parts([PartFileEntry(part=part, digest=digest, nbytes=len(content))])
    pins = json.loads(example("pins").content)
    stored = bytes.fromhex("0201010002010001010000")
    place.create(example("pins").tags["for"], [dump_document(pins)])
    place.create(part.files[0].name, [PACK_HEADER, stored])
    place.create(example("delta-part").tags["for"], [content])
    place.create(f"index-{part.origin.attempt}.msgpack", [seal(inflated(index.dump()[0]))])
    manifest = finalize(place, part.origin)

    assert manifest == accept(example("delta"), json.loads(example("delta").content))
    assert (
        part.references
        == manifest.references
        == Pins.parse(dump_document(pins), where=example("pins").tags["for"]).references
    )
    assert f"`{stored[:-1].hex()}` and `{stored[-1:].hex()}`" in "\n".join(
        page("45-deltas.md").lines
    )
    checkpoint = Checkpoint(place)
    after = [[0, 1, 2], [3 + 2**-22, 4, 5]]
    assert checkpoint.read("weights", "layers.0.bias").tolist() == [0.5, 1, 2]
    assert checkpoint.read("weights", "head.weight").tolist() == after
    assert checkpoint.read("weights", "layers.0.weight.bfloat16").astype("f4").tolist() == [
        [0, 1, 2],
        [3, 4, 5],
    ]

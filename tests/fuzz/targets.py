"""What bytes are fed to: each document under a digest that fits, a shard's header, and a whole checkpoint.

A target returns whether the bytes were accepted. Any exception but a CkptError is a finding, and so is an
accepted document that isn't the same when it is dumped again.
"""

import base64
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

from ckptfmt.digest import digest_bytes, digest_text
from ckptfmt.documents.index import Index
from ckptfmt.documents.manifest import Manifest, parse_register
from ckptfmt.documents.msgpk import dump_msgpack, open_packed_document, parse_msgpack
from ckptfmt.documents.part import Part
from ckptfmt.documents.shard import parse_shard_header
from ckptfmt.documents.tree import dump_tree, parse_tree
from ckptfmt.errors import CkptError
from ckptfmt.limits import FORMAT_VERSION
from tests.builders import Forgery, read_all, small_files, verify

#: The kept inputs: for each target a file with a line of base64 for each input.
KEPT = pathlib.Path(__file__).parent / "corpus"

FILES = small_files()
INDEX, PART, SHARD = (
    next(name for name in sorted(FILES) if name.startswith(start))
    for start in ("index-", "parts/", "weights-")
)


def json_envelope(signed: bytes) -> bytes:
    digest = digest_text(digest_bytes(signed)).encode()
    return b'{"digest":"' + digest + b'","signed":' + signed + b"}"


def msgpack_envelope(signed: bytes) -> bytes:
    stored = zlib.compress(signed, 1)
    members = {"digest": digest_bytes(stored), "nbytes": len(signed), "signed": stored}
    return dump_msgpack(members)


def signed_of(path: str) -> bytes:
    """Return what a document of the small checkpoint signs, as bytes."""
    return open_packed_document(FILES[path], where=path)[0]


def feed_manifest(content: bytes) -> None:
    register = parse_register(json_envelope(content))
    if isinstance(register, Manifest) and FORMAT_VERSION.encode() in content:
        assert register.dump() == json_envelope(content)


def feed_index(content: bytes) -> None:
    index = Index.parse(msgpack_envelope(content), where=INDEX)
    check_again(index.dump()[0], content)


def feed_part(content: bytes) -> None:
    part, _ = Part.parse(msgpack_envelope(content), where=PART)
    check_again(part.dump()[0], content)


def check_again(dumped: bytes, content: bytes) -> None:
    """An older version is dumped as the present one, and a newer one without its new members."""
    if content.count(b"format_version\xa3" + FORMAT_VERSION.encode()) == 1:
        assert open_packed_document(dumped, where="")[0] == content


def feed_tree(content: bytes) -> None:
    assert dump_tree(parse_tree(content, where="x"), where="") == content


def feed_shard(content: bytes) -> None:
    parse_shard_header(content, file_nbytes=len(content), where=SHARD)


def feed_checkpoint(content: bytes) -> None:
    """One document is the bytes; digests and sizes fit. What validates can be read whole."""
    forgery = Forgery(FILES)
    number, edited = content[:1], content[1:]
    value: Any = parse_msgpack(edited, where="", limit_items=100_000)
    if number in (b"", b"\0"):
        forgery.index = value
    else:
        forgery.parts[(number[0] - 1) % len(forgery.parts)] = value
    try:
        store = forgery.store()
    except (ValueError, TypeError, AttributeError, OverflowError):
        return  # not even the forger can make digests fit
    if verify(store).violations:
        try:
            read_all(store)
        except CkptError:
            return
    else:
        read_all(store)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "manifest": feed_manifest,
    "index": feed_index,
    "part": feed_part,
    "tree": feed_tree,
    "shard": feed_shard,
    "checkpoint": feed_checkpoint,
}


def seeds(target: str) -> list[bytes]:
    """Return what a fuzzer begins with: the documents of a small checkpoint."""
    parts = [signed_of(path) for path in sorted(FILES) if path.startswith("parts/")]
    shards = [FILES[path] for path in sorted(FILES) if path.endswith(".safetensors")]
    signed = FILES["manifest.json"].partition(b'"signed":')[2].rstrip()[:-1]
    return {
        "manifest": [signed],
        "index": [signed_of(INDEX)],
        "part": parts,
        "tree": [
            *[leaf.value for leaf in Part.parse(FILES[PART], where=PART)[0].leaves],
            *[one.state for one in Part.parse(FILES[PART], where=PART)[0].streams],
        ],
        "shard": shards,
        "checkpoint": [
            b"\0" + signed_of(INDEX),
            *[bytes([number]) + part for number, part in enumerate(parts, start=1)],
        ],
    }[target]


def feed(target: str, content: bytes) -> bool:
    """Return whether a target accepts the bytes; any exception but a CkptError comes through."""
    try:
        TARGETS[target](content)
    except CkptError:
        return False
    return True


def list_kept(target: str) -> list[bytes]:
    """Return the kept inputs of a target, each of which once reached code that no other reached."""
    path = KEPT / f"{target}.txt"
    return [base64.b64decode(line) for line in path.read_text().split()] if path.exists() else []


def keep(target: str, contents: list[bytes]) -> None:
    """Replace the kept inputs of a target."""
    KEPT.mkdir(exist_ok=True)
    lines = sorted(base64.b64encode(content).decode() for content in contents)
    (KEPT / f"{target}.txt").write_text("".join(f"{line}\n" for line in lines))

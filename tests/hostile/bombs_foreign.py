"""Foreign files below 1 MB that ask for far more time or memory than they take: made by hand, one function for each.

Each function is given an empty directory and returns the path to convert. ``python -m
tests.hostile.bombs_foreign NAME DIRECTORY`` makes one, converts it, and prints what came of it, and
what it cost, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

BOMBS: dict[str, Callable[[Path], Path]] = {}

MODULUS = (1 << 61) - 1  # numbers that are equal by it have one hash


def bomb(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """Take a function into the corpus."""
    BOMBS[make.__name__] = make
    return make


# --- pickles, by hand -----------------------------------------------------------------------------


def text(value: str) -> bytes:
    """Return the operation that pushes a string."""
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def number(value: int) -> bytes:
    """Return the operation that pushes an integer."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def put(index: int) -> bytes:
    """Return the operation that remembers what is on top."""
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    """Return the operation that pushes what is remembered."""
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)


def named(name: str) -> bytes:
    """Return the operation that pushes a class or function."""
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def sizes(*values: int) -> bytes:
    """Return the operations that push a tuple of integers."""
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(key: str = "0", kind: str = "torch.FloatStorage", count: int = 4) -> bytes:
    """Return the operations that push a storage."""
    return b"(" + text("storage") + named(kind) + text(key) + text("cpu") + number(count) + b"tQ"


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], of: bytes | None = None) -> bytes:
    """Return the operations that push a tensor."""
    hooks = named("collections.OrderedDict") + b")R"
    held = storage() if of is None else of
    rebuild = named("torch._utils._rebuild_tensor_v2")
    return (
        rebuild
        + b"("
        + held
        + number(0)
        + sizes(*shape)
        + sizes(*strides)
        + b"\x89"
        + hooks
        + b"tR"
    )


def mapping(*pairs: tuple[bytes, bytes]) -> bytes:
    """Return the operations that push a dict."""
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def archive(
    directory: Path, value: bytes, *, compressed: bool = False, data: bytes = bytes(16)
) -> Path:
    """Write a torch.save file of one value under the key ``x``, with one storage."""
    return write_archive(
        directory / "bomb.pt", b"\x80\x02" + mapping((text("x"), value)) + b".", compressed, data
    )


def write_archive(
    path: Path,
    pickled: bytes,
    compressed: bool = False,  # noqa: FBT001, FBT002
    data: bytes = bytes(16),
) -> Path:
    """Write a torch.save file of a whole pickle."""
    method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as made:
        made.writestr("archive/data.pkl", pickled)
        made.writestr("archive/byteorder", b"little")
        made.writestr("archive/data/0", data)
        made.writestr("archive/version", b"3\n")
    return path


# --- files of torch.save --------------------------------------------------------------------------


@bomb
def shared_dicts(directory: Path) -> Path:
    """2^40 paths through dicts that hold the one below twice."""
    made = [b"}" + put(0)]
    made += [
        mapping((text("a"), get(level)), (text("b"), get(level))) + put(level + 1)
        for level in range(40)
    ]
    return archive(directory, b"(" + b"".join(made) + b"t")


@bomb
def shared_lists(directory: Path) -> Path:
    """The same, within the depth that a tree may have: 2^28 leaves."""
    made = [b"]" + put(0)]
    made += [b"](" + get(level) * 2 + b"e" + put(level + 1) for level in range(28)]
    return archive(directory, b"(" + b"".join(made) + b"t")


@bomb
def wide_shared_list(directory: Path) -> Path:
    """A list of 100,000 values, 100,000 times."""
    return archive(
        directory, b"](" + b"](" + b"N" * 100_000 + b"e" + put(0) + get(0) * 100_000 + b"e"
    )


@bomb
def shared_tuples_as_key(directory: Path) -> Path:
    """The hash of a tuple that holds another twice, 60 levels deep."""
    made = [b")" + put(0)]
    made += [get(level) * 2 + b"\x86" + put(level + 1) for level in range(60)]
    return archive(directory, b"(" + b"".join(made) + mapping((get(60), b"N")) + b"t")


@bomb
def deflated_nones(directory: Path) -> Path:
    """64 MiB of None in 64 KB."""
    return archive(directory, b"](" + b"N" * (64 << 20) + b"e", compressed=True)


@bomb
def deflated_levels(directory: Path) -> Path:
    """3 million nested lists in 6 KB."""
    return archive(directory, b"]" * 3_000_000 + b"a" * 2_999_999, compressed=True)


@bomb
def stored_levels(directory: Path) -> Path:
    """450,000 nested lists."""
    return archive(directory, b"]" * 450_000 + b"a" * 449_999)


@bomb
def nested_records(directory: Path) -> Path:
    """200,000 records, each an argument of the next."""
    held = b"(" + named("torch.Size") + put(0)
    return archive(directory, held + get(0) * 200_000 + b")" + b"R\x85" * 199_999 + b"Rt")


@bomb
def nones(directory: Path) -> Path:
    """990,000 times None."""
    return archive(directory, b"](" + b"N" * 990_000 + b"e")


@bomb
def lists(directory: Path) -> Path:
    """990,000 empty lists."""
    return archive(directory, b"](" + b"]" * 990_000 + b"e")


@bomb
def sets(directory: Path) -> Path:
    """990,000 empty sets, of 216 bytes each in Python."""
    return archive(directory, b"](" + b"\x8f" * 990_000 + b"e")


@bomb
def dicts(directory: Path) -> Path:
    """990,000 empty dicts."""
    return archive(directory, b"](" + b"}" * 990_000 + b"e")


@bomb
def marks(directory: Path) -> Path:
    """990,000 marks."""
    return archive(directory, b"(" * 990_000)


@bomb
def string_many_times(directory: Path) -> Path:
    """A text of 400,000 characters, 200,000 times."""
    return archive(directory, b"](" + text("x" * 400_000) + put(0) + get(0) * 200_000 + b"e")


@bomb
def integer_many_times(directory: Path) -> Path:
    """An integer of 400,000 bytes, 200,000 times."""
    long = b"\x8b" + struct.pack("<i", 400_000) + b"\x01" * 400_000
    return archive(directory, b"](" + long + put(0) + get(0) * 200_000 + b"e")


@bomb
def long_key_above_many_tensors(directory: Path) -> Path:
    """A key of 400,000 characters, which is in the names of 30,000 tensors."""
    rows = b"".join(get(0) for _ in range(30_000))
    return archive(
        directory, mapping((text("k" * 400_000), b"](" + tensor((2,), (1,)) + put(0) + rows + b"e"))
    )


@bomb
def keys_within_the_limit_above_many_containers(directory: Path) -> Path:
    """A key of 4,000 characters above 200,000 lists."""
    return archive(directory, mapping((text("k" * 4000), b"](" + b"](Ne" * 200_000 + b"e")))


@bomb
def attributes_many_times(directory: Path) -> Path:
    """An OrderedDict with 20,000 attributes, 100,000 times: each is told as left out."""
    state = mapping(*((text(f"{index}"), b"N") for index in range(20_000)))
    ordered = named("collections.OrderedDict") + b")R" + state + b"b" + put(0)
    return archive(directory, b"](" + ordered + get(0) * 100_000 + b"e")


@bomb
def expanded_tensor(directory: Path) -> Path:
    """2^36 elements by a stride of 0."""
    return archive(directory, tensor((1 << 18, 1 << 18), (0, 0)))


@bomb
def expanded_weights(directory: Path) -> Path:
    """The same as a state_dict."""
    pickled = b"\x80\x02" + mapping((text("w"), tensor((1 << 36,), (0,)))) + b"."
    return write_archive(directory / "bomb.pt", pickled)


def many(rows: int, shape: tuple[int, ...], count: int) -> bytes:
    """Return a dict of tensors of one storage, each of another offset; what they share is written once."""
    made = [b"}("]
    for index in range(rows):
        first = not index
        rebuild = named("torch._utils._rebuild_tensor_v2") + put(0) if first else get(0)
        held = storage(count=count) + put(1) if first else get(1)
        extents = sizes(*shape) + put(3) if first else get(3)
        strides = sizes(*(1 for _ in shape)) + put(4) if first else get(4)
        hooks = named("collections.OrderedDict") + b")R" + put(2) if first else get(2)
        made.append(
            text(f"{index}")
            + rebuild
            + b"("
            + held
            + number(index)
            + extents
            + strides
            + b"\x89"
            + hooks
            + b"tR"
        )
    return b"".join(made) + b"u"


@bomb
def many_views_of_one_storage(directory: Path) -> Path:
    """4,000 views of 240 KB, each of another offset."""
    return archive(directory, many(4000, (60_000,), 65_536), data=bytes(256 << 10))


@bomb
def more_dimensions_than_torch_has(directory: Path) -> Path:
    """A tensor of 100,000 dimensions."""
    return archive(directory, tensor((1,) * 100_000, (1,) * 100_000))


@bomb
def bytes_by_a_call(directory: Path) -> Path:
    """``bytearray(2 ** 40)``."""
    return archive(directory, named("__builtin__.bytearray") + number(1 << 40) + b"\x85R")


@bomb
def tensor_by_a_call(directory: Path) -> Path:
    """``torch.Tensor(2 ** 34)``, 64 GiB of whatever memory held."""
    return archive(directory, named("torch.Tensor") + number(1 << 34) + b"\x85R")


@bomb
def far_place_in_the_memo(directory: Path) -> Path:
    """An unpickler in C makes its memo as long as the largest place in it: 32 GiB."""
    return archive(directory, b"N" + put((1 << 32) - 1))


@bomb
def length_beyond_the_end(directory: Path) -> Path:
    """A text of 2^60 bytes, says its length."""
    return archive(directory, b"\x8d" + struct.pack("<Q", 1 << 60) + b"x")


@bomb
def integers_of_one_hash(directory: Path) -> Path:
    """60,000 keys that a dict can't tell apart by their hash."""
    return archive(
        directory,
        mapping(
            *((number(index * MODULUS + 7), b"N") for index in range(1 << 20, (1 << 20) + 60_000))
        ),
    )


@bomb
def complex_numbers_of_one_hash(directory: Path) -> Path:
    """hash(a + bj) is hash(a) + 1000003 * hash(b)."""

    def pair(index: int) -> bytes:
        parts = (
            struct.pack(">d", float(1000003 * (30_000 - index))),
            struct.pack(">d", float(index)),
        )
        maker = get(0) if index else named("__builtin__.complex") + put(0)
        return maker + b"G" + parts[0] + b"G" + parts[1] + b"\x86R"

    return archive(directory, b"\x8f(" + b"".join(map(pair, range(30_000))) + b"\x90")


@bomb
def long_tuple_as_key(directory: Path) -> Path:
    """A tuple of 200,000 numbers, hashed 100,000 times."""
    held = b"(" + b"K\x01" * 200_000 + b"t" + put(0)
    return archive(directory, b"(" + held + (b"}" + get(0) + b"Ns") * 100_000 + b"t")


@bomb
def many_tensors(directory: Path) -> Path:
    """As many tensors as fit: 28,000 of one element, which is no bomb."""
    return archive(directory, many(28_000, (1,), 28_000), data=bytes(112_000))


# --- directories of torch.distributed.checkpoint --------------------------------------------------

_DCP = "torch.distributed.checkpoint.metadata."


def record(kind: str, **attributes: bytes) -> bytes:
    """Return the operations that push an object of DCP's metadata."""
    full = kind if "." in kind else _DCP + kind
    return (
        named(full)
        + b")\x81"
        + mapping(*((text(name), value) for name, value in attributes.items()))
        + b"b"
    )


def size(*values: int) -> bytes:
    """Return the operations that push a torch.Size."""
    return named("torch.Size") + sizes(*values) + b"\x85R"


def properties() -> bytes:
    """Return the operations that push the properties of a float32 tensor."""
    state = b"(" + named("torch.float32") + b"N\x89N\x89t"
    return named(_DCP + "TensorProperties") + b")\x81" + state + b"b"


def described(shape: tuple[int, ...], chunks: bytes) -> bytes:
    """Return the operations that push what is said of a tensor."""
    return record(
        "TensorStorageMetadata", properties=properties(), size=size(*shape), chunks=chunks
    )


def chunk(offset: int, count: int) -> bytes:
    """Return the operations that push a chunk."""
    return record("ChunkStorageMetadata", offsets=size(offset), sizes=size(count))


def index_of(name: bytes, *offsets: bytes) -> bytes:
    """Return the operations that push what an item is known by."""
    return record("MetadataIndex", fqn=name, **({"offset": offsets[0]} if offsets else {}))


def place(nbytes: int, name: str = "a.distcp") -> bytes:
    """Return the operations that push where an item lies."""
    kind = "torch.distributed.checkpoint.filesystem._StorageInfo"
    return record(kind, relative_path=text(name), offset=number(0), length=number(nbytes))


def dcp(
    directory: Path, tensors: bytes, items: bytes, planner: bytes = b"N", item: bytes = b""
) -> Path:
    """Write a directory."""
    (directory / "a.distcp").write_bytes(item)
    made = record("Metadata", state_dict_metadata=tensors, storage_data=items, planner_data=planner)
    (directory / ".metadata").write_bytes(b"\x80\x02" + made + b".")
    return directory


@bomb
def dcp_shared_chunks(directory: Path) -> Path:
    """A list of 5,000 chunks that 20,000 tensors have."""
    chunks = b"](" + b"".join(chunk(index, 1) for index in range(1500)) + b"e"
    first = described((1500,), chunks + put(9)) + put(8)
    rows = b"".join(text(f"{index}") + get(8) for index in range(20_000))
    return dcp(directory, b"}(" + text("first") + first + rows + b"u", b"}")


@bomb
def dcp_far_place_in_a_list(directory: Path) -> Path:
    """The path of a name leads to place 2^40 of a list."""
    path = b"(" + text("w") + number(1 << 40) + b"t"
    items = mapping((index_of(text("w")), place(0)))
    return _dcp_of_values(directory, ["w"], mapping((text("w"), path)), items)


def _dcp_of_values(directory: Path, names: list[str], planner: bytes, _items: bytes = b"") -> Path:
    item = write_archive(directory / "item", b"\x80\x02N.").read_bytes()
    (directory / "item").unlink()
    tensors = mapping(
        *((text(name), named(_DCP + "BytesStorageMetadata") + b")\x81") for name in names)
    )
    items = mapping(*((index_of(text(name)), place(len(item))) for name in names))
    return dcp(directory, tensors, items, planner, item)


@bomb
def dcp_long_shared_path(directory: Path) -> Path:
    """A path of 100,000 keys."""
    return _dcp_of_values(directory, ["w"], mapping((text("w"), b"(" + text("a") * 100_000 + b"t")))


@bomb
def dcp_item_named_many_times(directory: Path) -> Path:
    """2,000 names of one item of 400 KB."""
    item = write_archive(directory / "item", b"\x80\x02](" + b"N" * 400_000 + b"e.").read_bytes()
    (directory / "item").unlink()
    names = [f"{index}" for index in range(2000)]
    held = named(_DCP + "BytesStorageMetadata") + b")\x81"
    items = mapping(*((index_of(text(name)), place(len(item))) for name in names))
    return dcp(directory, mapping(*((text(name), held) for name in names)), items, b"N", item)


@bomb
def dcp_offsets_of_one_hash(directory: Path) -> Path:
    """Places of one name whose offsets have the hash of each other."""
    offsets = [size(index * MODULUS % (1 << 59), index) for index in range(4000)]
    items = mapping(*((index_of(text("w"), offset), place(0)) for offset in offsets))
    return dcp(directory, b"}", items)


@bomb
def dcp_expanded_tensor(directory: Path) -> Path:
    """A chunk of 2^36 elements, stored as one by a stride of 0."""
    pickled = b"\x80\x02" + tensor((1 << 36,), (0,)) + b"."
    item = write_archive(directory / "item", pickled).read_bytes()
    (directory / "item").unlink()
    chunks = b"](" + chunk(0, 1 << 36) + b"e"
    items = mapping((index_of(text("w"), size(0)), place(len(item))))
    return dcp(directory, mapping((text("w"), described((1 << 36,), chunks))), items, b"N", item)


@bomb
def dcp_nested_metadata(directory: Path) -> Path:
    """A list in a list, 400,000 times, where chunks belong."""
    return dcp(
        directory, mapping((text("w"), described((1,), b"]" * 400_000 + b"a" * 399_999))), b"}"
    )


# --- Hugging Face directories ---------------------------------------------------------------------


def safetensors_file(directory: Path, header: Any, data: bytes = b"") -> Path:
    """Write a safetensors file."""
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(written)) + written + data)
    return directory


@bomb
def hf_many_dimensions(directory: Path) -> Path:
    """A tensor of 300,000 dimensions."""
    return safetensors_file(
        directory, {"w": {"dtype": "U8", "shape": [1] * 300_000, "data_offsets": [0, 1]}}, b"x"
    )


@bomb
def hf_nested_header(directory: Path) -> Path:
    """400,000 lists in each other."""
    return safetensors_file(directory, b'{"w":' + b"[" * 400_000 + b"]" * 400_000 + b"}")


@bomb
def hf_many_empty_tensors(directory: Path) -> Path:
    """14,000 tensors without elements."""
    header = {
        f"{index}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for index in range(14_000)
    }
    return safetensors_file(directory, header)


@bomb
def hf_long_names(directory: Path) -> Path:
    """A name of 900,000 characters."""
    return safetensors_file(
        directory, {"n" * 900_000: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"x"
    )


@bomb
def hf_header_beyond_the_end(directory: Path) -> Path:
    """A header of 2^60 bytes, says its length."""
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    return directory


@bomb
def hf_nested_index(directory: Path) -> Path:
    """450,000 lists in each other."""
    (directory / "model.safetensors.index.json").write_bytes(b"[" * 450_000 + b"]" * 450_000)
    return directory


@bomb
def hf_integer_in_the_index(directory: Path) -> Path:
    """An integer of 900,000 digits."""
    (directory / "model.safetensors.index.json").write_bytes(
        b'{"weight_map":' + b"1" * 900_000 + b"}"
    )
    return directory


@bomb
def hf_many_files(directory: Path) -> Path:
    """An index that names 30,000 files."""
    rows = {f"{index}": f"{index}.safetensors" for index in range(30_000)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": rows}))
    return directory


# --- objects that aren't loaded -------------------------------------------------------------------


@bomb
def long_names(directory: Path) -> Path:
    """A name of 400,000 characters, 200,000 times: each of them would be put together anew."""
    held = text("m" * 400_000) + put(0) + text("n") + put(1)
    return archive(directory, b"](" + held + (get(0) + get(1) + b"\x93") * 100_000 + b"e")


@bomb
def many_names(directory: Path) -> Path:
    """300 texts that are modules and names in turn: 90,000 names of 900 characters."""
    texts = (
        b"](" + b"".join(text(f"{index}" + "x" * 440) + put(index) for index in range(300)) + b"e"
    )
    pairs = b"".join(get(one) + get(other) + b"\x93" for one in range(300) for other in range(300))
    return archive(directory, b"](" + texts + b"(" + pairs + b"te")


@bomb
def unsafe_values(directory: Path) -> Path:
    """One object 480,000 times: each place where it stands has an error of its own."""
    return archive(directory, b"](" + named("os.system") + b")R" + put(0) + get(0) * 480_000 + b"e")


@bomb
def calls_of_calls(directory: Path) -> Path:
    """A call of what a call returned, 480,000 times."""
    return archive(directory, named("os.system") + b")R" * 480_000)


@bomb
def items_of_an_object(directory: Path) -> Path:
    """An object of a class derived from list, to which 900,000 values are added one by one."""
    return archive(directory, named("a.List") + b")R" + b"Na" * 450_000)


# --- files of torch.save before torch 1.6 ---------------------------------------------------------


def old_file(directory: Path, rest: bytes) -> Path:
    """Write a file that begins as one of the old form does."""
    begin = b"".join(b"\x80\x02" + number(value) + b"." for value in (0x1950A86A20F9469CFC6C, 1001))
    (directory / "bomb.pth").write_bytes(begin + rest)
    return directory / "bomb.pth"


@bomb
def old_nones(directory: Path) -> Path:
    """990,000 times None as the facts of the machine."""
    return old_file(directory, b"\x80\x02](" + b"N" * 990_000 + b"e.")


@bomb
def old_lines_without_an_end(directory: Path) -> Path:
    """A name that is the rest of the file."""
    return old_file(directory, b"\x80\x02c" + b"x" * 900_000)


@bomb
def old_storage_of_2_60_elements(directory: Path) -> Path:
    """A storage that ends far behind the file."""
    held = b"}.\x80\x02" + mapping((text("w"), tensor((2,), (1,), storage(count=1 << 60))))
    return old_file(
        directory,
        b"\x80\x02" + held + b".\x80\x02](" + text("0") + b"e." + struct.pack("<q", 1 << 60),
    )


@bomb
def old_keys(directory: Path) -> Path:
    """One key of a storage, 300,000 times."""
    held = b"}.\x80\x02" + mapping((text("w"), tensor((0,), (1,), storage(count=0))))
    return old_file(
        directory,
        b"\x80\x02" + held + b".\x80\x02](" + text("0") + put(0) + get(0) * 300_000 + b"e.",
    )


@bomb
def old_tar_of_many_members(directory: Path) -> Path:
    """1,900 members without contents."""
    with tarfile.open(directory / "bomb.tar", "w") as archive_:
        for index in range(1_900):
            archive_.addfile(tarfile.TarInfo(f"{index}"))
    return directory / "bomb.tar"


# --- what one costs -------------------------------------------------------------------------------


def largest_nbytes() -> int:
    """Return the largest resident size of this program so far; `resource` would count what it was forked from."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text("ascii").splitlines()
        if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) << 10


def cost(source: Path, target: Path, *options: str) -> dict[str, Any]:
    """Convert, and return what came of it, with the processor time and the growth of the largest resident size."""
    from ckptfmt.__main__ import main  # noqa: PLC0415
    from ckptfmt_tools.convert import converting  # noqa: F401, PLC0415

    output, before = io.StringIO(), largest_nbytes()
    begin = time.process_time()
    with contextlib.redirect_stdout(output):
        main(["convert", str(source), str(target), *options, "--json"])
    spent_s = time.process_time() - begin
    grown = largest_nbytes() - before
    said = json.loads(output.getvalue())
    return {
        "code": said.get("error", {}).get("code", "done"),
        "spent_s": spent_s,
        "grown_nbytes": grown,
        "said": said,
    }


def serve() -> None:
    """Print what a conversion costs for each line of source, target and options, each in a fork of this process."""
    import torch  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as directory:  # import all of it here, and not in each fork
        torch.save({"model": {"w": torch.ones(1)}}, Path(directory, "a.pt"))
        for kind in ("ckptfmt", "torch", "dcp", "hf"):
            assert (
                cost(Path(directory, "a.pt"), Path(directory, kind), "--to", kind)["code"] == "done"
            )
    for line in sys.stdin:
        source, target, *options = json.loads(line)
        child = os.fork()
        if not child:
            sys.stdout.write(json.dumps(cost(Path(source), Path(target), *options)) + "\n")
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.stdout.write(json.dumps({"code": f"wait status {status}"}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    serve()

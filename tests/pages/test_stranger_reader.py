"""The reader of a stranger to the code, and the checkpoints that the library writes."""

import ast
import collections
import itertools
import json
import math
import re
import struct
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from blake3 import blake3

import ckptfmt
from tests.pages.stranger_reader import FIELDS, Tagged, read_checkpoint
from tests.plugins_stranger import check_with_stranger

READER = Path(__file__).with_name("stranger_reader.py")
DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
DTYPES += ("float16", "float32", "float64", "complex64", "complex128")
NAN = struct.unpack("<d", bytes.fromhex("efbeadde0000f87f"))[0]


def bits(number):
    return struct.pack("<d", number)


def raw(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def saved(tmp_path, **fields):
    ckptfmt.save(tmp_path / "ckpt", ckptfmt.State(**fields), step=3)
    return check_with_stranger(tmp_path / "ckpt")


def save_by_two(path, state_of):
    """Two threads save together; `state_of` makes the state of each."""
    barrier, said, errors = threading.Barrier(2, timeout=20), [b"", b""], []

    def all_gather(i):
        def agree(value):
            said[i] = bytes(value)
            barrier.wait()
            gathered = list(said)
            barrier.wait()
            return gathered

        return agree

    def work(i):
        try:
            ckptfmt.save(path, state_of(i), step=3, writer=(i, 2), agree=all_gather(i))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise ExceptionGroup("of the writers", errors)


def test_the_reader_is_short_and_imports_neither_the_library_nor_numpy():
    source = READER.read_text()
    assert len(source.splitlines()) < 220
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module.split(".")[0])
    assert names - sys.stdlib_module_names <= {"msgpack", "safetensors", "blake3"}
    assert not names & {"importlib", "runpy", "pickle"}
    assert "__import__" not in source


def test_arrays_of_every_dtype_come_back_as_they_were(tmp_path):
    """REQ-VER-006."""
    random = np.random.default_rng(0)
    arrays = {}
    for name in DTYPES:
        dtype = np.dtype(name)
        content = random.integers(
            0, 2 if name == "bool" else 256, 24 * dtype.itemsize, dtype=np.uint8
        )
        arrays[name] = content.view(dtype).reshape(2, 3, 4)
    arrays |= {
        "negative zero": np.array([-0.0, 0.0]),
        "transposed": np.arange(6, dtype=np.int16).reshape(2, 3).T,
    }
    arrays |= {
        "rank 0": np.array(7, np.int32),
        "empty": np.zeros((3, 0), np.float32),
        "": np.ones(1),
        "__metadata__": np.ones(2),
    }
    arrays |= {"big-endian": np.arange(4, dtype=">f4"), "strided": np.arange(10.0)[::3]}
    found = saved(tmp_path, weights=arrays)["tensors"]
    assert found.keys() == {("weights", name, "global") for name in arrays}
    for name, array in arrays.items():
        tensor = found["weights", name, "global"]
        little = array.astype(array.dtype.newbyteorder("<"))
        assert (tensor["dtype"], tensor["shape"], tensor["bytes"]) == (
            little.dtype.name,
            array.shape,
            little.tobytes(),
        )


def test_a_tensor_of_many_blocks(tmp_path):
    array = np.random.default_rng(1).integers(0, 256, (3, 1 << 20), dtype=np.uint8)[:, :-1]
    assert (
        saved(tmp_path, weights={"w": array})["tensors"]["weights", "w", "global"]["bytes"]
        == array.tobytes()
    )


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.low = torch.nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))
        self.scalar = torch.nn.Parameter(torch.tensor(-0.0))
        self.register_buffer("scratch", torch.arange(6).reshape(2, 3), persistent=False)
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens))) * (1 + self.scalar) + self.low.float().sum()


def trained():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_a_module_its_optimizer_and_its_scheduler(tmp_path):
    model, optimizer, scheduler = trained()
    extra = {"scheduler": scheduler, "average": {"w": torch.randn(3)}}
    read = saved(
        tmp_path,
        weights=model,
        optimizer=optimizer,
        data={"position": 24},
        config={"lr": 1e-3},
        extra=extra,
    )
    tensors, aliases, leaves = read["tensors"], read["aliases"], read["leaves"]

    def look(field, name):
        assert (
            len({scope for f, n, scope in (*tensors, *aliases) if (f, n) == (field, name)}) == 1
        ), name
        scope = next(scope for f, n, scope in (*tensors, *aliases) if (f, n) == (field, name))
        return tensors[aliases.get((field, name, scope), (field, name, scope))]

    live = {**model.state_dict(keep_vars=True), "scratch": model.scratch}
    for name, tensor in live.items():
        found = look("weights", name)
        assert (found["shape"], found["bytes"]) == (tuple(tensor.shape), raw(tensor)), name
        assert found["dtype"] == str(tensor.dtype).removeprefix("torch."), name
        assert found["storage"] == (name == "scratch")
    assert {name for field, name, _ in (*tensors, *aliases) if field == "weights"} == live.keys()
    assert {name for field, name, _ in aliases if field == "weights"} < {
        "embed.weight",
        "head.weight",
    }
    assert len(aliases) == 1

    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert look("optimizer", f"{name}/{key}")["bytes"] == raw(value)
    group = next(
        leaf
        for (field, name, _), leaf in leaves.items()
        if (field, name[:6]) == ("optimizer", "group/")
    )
    assert set(group["params"]) == {name for name, _ in model.named_parameters()}
    assert group["options"]["betas"] == (0.9, 0.999)
    assert bits(group["options"]["lr"]) == bits(optimizer.param_groups[0]["lr"])
    assert raw(extra["average"]["w"]) in [
        t["bytes"] for (_, n, _), t in tensors.items() if n[:13] == "extra/average"
    ]
    assert leaves["data", "", "global"] == {"position": 24}
    assert leaves["config", "", "global"] == {"lr": 1e-3}
    assert all(entry["state"] == "present" for entry in read["manifest"]["fields"].values())
    state = next(value for _, (kind, value) in read["streams"].items() if kind == "torch.mt19937")
    assert state == Tagged("a", ("uint8", (5056,), torch.get_rng_state().numpy().tobytes()))


def test_trees_come_back_with_their_types_and_bits(tmp_path):
    tree = {
        "tuple": (1, [2, (3,)], ()),
        "floats": [NAN, -0.0, math.inf, -math.inf, 5e-324],
        "big": [2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**40, -(10**40)],
        7: {(1, "a"): None, None: b"\x00\xff"},
        False: True,
        "sets": ({1, 2, "x"}, frozenset({(1, 2)}), set()),
        "counter": collections.Counter("abca"),
        "ordered": collections.OrderedDict(b=1, a=2),
        "deque": (collections.deque([1, 2], 3), collections.deque()),
        "complex": complex(-0.0, NAN),
        "text": "\u00e9\u0301\n\u0000",
        "torch": [torch.float32, torch.device("cpu"), torch.Size((2, 3))],
        "numpy": np.float32(-0.0),
    }
    found = saved(tmp_path, weights={"w": np.ones(1)}, data=tree)["leaves"]["data", "", "global"]
    assert list(found) == list(tree)

    def normal(value):  # equal exactly if types and bits are
        if isinstance(value, float):
            return ("float", bits(value))
        if isinstance(value, complex):
            return ("complex", bits(value.real), bits(value.imag))
        if isinstance(value, dict):
            return (type(value), [(normal(key), normal(entry)) for key, entry in value.items()])
        if isinstance(value, set | frozenset):
            return (type(value), sorted((normal(entry) for entry in value), key=repr))
        if isinstance(value, list | tuple | collections.deque):
            return (type(value), getattr(value, "maxlen", None), [normal(entry) for entry in value])
        return (type(value), value)

    expected = tree | {
        "torch": [Tagged("D", ("float32",)), Tagged("V", ("cpu",)), Tagged("S", ((2, 3),))],
        "numpy": Tagged("n", ("float32", b"\x00\x00\x00\x80")),
    }
    for key, value in expected.items():
        assert normal(found[key]) == normal(value), key


def test_two_writers_and_what_each_of_them_holds(tmp_path):
    shared = np.arange(24, dtype=np.float32).reshape(4, 6)

    def state_of(i):
        data = ckptfmt.PerWorker({"seen": (i, float(i))})
        return ckptfmt.State(
            weights={"shared": shared, "other": shared[::2].copy()}, data=data, config={"width": 6}
        )

    save_by_two(tmp_path / "ckpt", state_of)
    read = check_with_stranger(tmp_path / "ckpt")
    assert read["manifest"]["writer_count"] == 2
    assert read["tensors"]["weights", "shared", "global"]["bytes"] == shared.tobytes()
    assert read["tensors"]["weights", "other", "global"]["bytes"] == shared[::2].tobytes()
    assert {key: leaf for key, leaf in read["leaves"].items() if key[0] == "data"} == {
        ("data", "", f"lw/{i}"): {"seen": (i, float(i))} for i in range(2)
    }


class Piece:
    """A TensorSource: some boxes of an array of three dimensions."""

    field, scope, storage, aliases, replica = "weights", "global", "persistent", (), False

    def __init__(self, name, array, boxes):
        self.name, self.array, self.boxes = name, array, tuple(ckptfmt.Box(*box) for box in boxes)
        self.dtype, self.global_shape = array.dtype.name, array.shape

    def copy_into(self, box, out):
        part = self.array[tuple(slice(b, b + n) for b, n in zip(box.begin, box.shape, strict=True))]
        memoryview(out).cast("B")[:] = part.tobytes()


def test_pieces_of_two_writers_are_put_together(tmp_path):
    array = np.random.default_rng(2).standard_normal((5, 4, 3)).astype(np.float32)
    cuts = [
        [((0, 0, 0), (5, 1, 3)), ((0, 1, 2), (5, 3, 1))],
        [((0, 1, 0), (2, 3, 2)), ((2, 1, 0), (3, 3, 2))],
    ]
    save_by_two(
        tmp_path / "ckpt", lambda i: ckptfmt.State(weights={"cut": Piece("cut", array, cuts[i])})
    )
    read = check_with_stranger(tmp_path / "ckpt")
    assert read["tensors"]["weights", "cut", "global"]["bytes"] == array.tobytes()
    shards = (tmp_path / "ckpt").glob("*.safetensors")
    assert {path.stem[-5:] for path in shards} == {"00000", "00001"}


def damage(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def packed(numbers):
    width = next(width for width in (1, 2, 4, 8) if max(numbers, default=0) < 256**width)
    return [width, bytes(number >> 8 * plane & 255 for plane in range(width) for number in numbers)]


def strings(*texts):
    return [packed([len(text.encode()) for text in texts]), "".join(texts)]


def ordered(value):
    return {key: ordered(value[key]) for key in sorted(value)} if isinstance(value, dict) else value


def put_msgpack(path, document):
    """Writes a msgpack document as page 10 says; returns its digest."""
    content = msgpack.packb(ordered(document))
    signed = zlib.compress(content, 0)  # as it is, so that the worked example has one form
    digest = blake3(signed).digest()
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(msgpack.packb({"digest": digest, "nbytes": len(content), "signed": signed}))
    return digest


def put_manifest(path, signed):
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    path.write_text(
        f'{{"digest":"blake3:{blake3(text.encode()).hexdigest()}","signed":{text}}}',
        encoding="utf-8",
    )


def examples(page):
    """The named JSON examples of a page of the specification."""
    text = (Path(__file__).parents[2] / "spec" / page).read_text(encoding="utf-8")
    return {
        name: json.loads(body)
        for name, body in re.findall(r"```json [^\n]*name=(\w+)[^\n]*\n(.*?)```", text, re.DOTALL)
    }


def from_view(value, key=None):
    """A msgpack document from its JSON view."""
    if isinstance(value, dict):
        return {name: from_view(entry, name) for name, entry in value.items()}
    if key in {"digest", "digests", "header_digest"}:
        return bytes.fromhex(value)
    if key in {"value", "state"}:
        return [bytes.fromhex(entry) for entry in value]
    if isinstance(value, list) and [type(entry) for entry in value] == [int, str]:
        return [value[0], bytes.fromhex(value[1])]
    if isinstance(value, list) and [type(entry) for entry in value] == [list, str]:
        return [from_view(value[0]), value[1]]
    return value


def test_the_worked_example_of_the_specification(tmp_path):
    attempt = "a1b2c3d4e5f60718"
    documents = (
        examples("core/30-manifest.md")
        | examples("core/40-index-and-parts.md")
        | examples("writing/52-shards.md")
    )
    put_msgpack(tmp_path / "parts" / f"{attempt}-00000.msgpack", from_view(documents["part"]))
    put_msgpack(tmp_path / f"index-{attempt}.msgpack", from_view(documents["index"]))
    header = json.dumps(documents["shard"], separators=(",", ":")).encode().ljust(184)
    elements = struct.pack("<9f", 0.5, 1, 2, *range(6))
    (tmp_path / f"weights-{attempt}-00000.safetensors").write_bytes(
        struct.pack("<Q", 184) + header + elements
    )
    put_manifest(tmp_path / "manifest.json", documents["manifest"])
    read = check_with_stranger(tmp_path)
    assert {key[1]: tensor["bytes"] for key, tensor in read["tensors"].items()} == {
        "layers.0.bias": elements[:12],
        "layers.0.weight": elements[12:],
    }
    assert read["aliases"] == {
        ("weights", "head.weight", "global"): ("weights", "layers.0.weight", "global")
    }
    assert read["streams"] == {("rng", "user/noise", "lw/0"): ("python.mt19937", (3, (1, 2), None))}
    assert read["leaves"]["optimizer", "group/layers.0.bias", "global"] == {
        "params": ["layers.0.bias", "layers.0.weight"],
        "options": {"lr": 0.1},
    }


def put_cut_tensor(root, array, cuts):  # noqa: PLR0915
    """A checkpoint made from the specification alone: one array, and for each writer the boxes that it wrote."""
    attempt, tables = (
        "0123456789abcdef",
        {"tensors": {}, "aliases": {"name": strings(), "tensor": packed([])}},
    )
    tables["tensors"] = {
        "field": packed([0]),
        "name": strings("cut"),
        "scope": packed([0]),
        "dtype": packed([0]),
    }
    tables["tensors"] |= {
        "ndim": packed([array.ndim]),
        "global_shape": packed(array.shape),
        "storage": packed([0]),
    }
    origin = {"run_id": None, "launch": None, "nonce": "0" * 32, "step": 3, "attempt": attempt}
    origin |= {
        "writer_count": len(cuts),
        "block_nbytes": 4096,
        "format_version": "1.0",
        "saved_unix_s": 1,
    }
    origin |= {"features": {"reader": [], "writer": []}}
    absent = dict.fromkeys(FIELDS[1:], "not given")
    common: dict[str, Any] = origin | {
        "scopes": ["global"],
        "dtypes": [array.dtype.name],
        "absent": absent,
        "aliases": tables["aliases"],
    }
    none = packed([])
    sizes, digests, tiles = [], [], []
    for writer, boxes in enumerate(cuts):
        contents = [
            array[tuple(slice(b, b + n) for b, n in zip(*box, strict=True))].tobytes()
            for box in boxes
        ]
        ends = list(itertools.accumulate(map(len, contents)))
        begins = [end - len(content) for end, content in zip(ends, contents, strict=True)]
        header = {
            f"cut#{i}": {"dtype": "F32", "shape": box[1], "data_offsets": [begins[i], ends[i]]}
            for i, box in enumerate(boxes)
        }
        text = json.dumps(header).encode()
        text = text.ljust(-(len(text) + 8) % 64 + len(text))
        head = struct.pack("<Q", len(text)) + text
        name = f"weights-{attempt}-{writer:05}.safetensors"
        root.mkdir(exist_ok=True)
        (root / name).write_bytes(head + b"".join(contents))
        blocks = [
            [blake3(c[at : at + 4096]).digest() for at in range(0, len(c), 4096)] for c in contents
        ]
        part = common | {"type": "part", "writer": writer, "references": [], "encodings": ["raw"]}
        part["tensors"] = tables["tensors"] | {"box_count": packed([len(boxes)])}
        part["boxes"] = {
            "replica": packed([0] * len(boxes)),
            "digest_count": packed([len(own) for own in blocks]),
        }
        cut_shape = [
            0 if n == extent else n + 1
            for _, shape in boxes
            for n, extent in zip(shape, array.shape, strict=True)
        ]
        part["boxes"] |= {
            "begin": packed(sum((b for b, _ in boxes), ())),
            "cut_shape": packed(cut_shape),
        }
        part["digests"] = b"".join(digest for own in blocks for digest in own)
        part["files"] = {
            "name": strings(name),
            "kind": strings("safetensors"),
            "nbytes": packed([len(head) + ends[-1]]),
        }
        part["files"] |= {
            "header_nbytes": packed([len(head)]),
            "header_digest": blake3(head).digest(),
        }
        zeros, counts = packed([0] * len(boxes)), packed([len(own) for own in blocks])
        part["extents"] = {"box": zeros, "block_begin": zeros, "block_count": counts, "file": zeros}
        part["extents"] |= {"gap_nbytes": zeros, "encoding": zeros, "key": strings(*header)}
        part["streams"] = {"name": strings(), "scope": none, "kind": strings(), "state": []}
        part["leaves"] = {"field": none, "name": strings(), "scope": none, "value": []}
        path = root / "parts" / f"{attempt}-{writer:05}.msgpack"
        digests.append(put_msgpack(path, part))
        sizes.append(path.stat().st_size)
        tiles += [(*box, writer) for box in boxes]
    tiles.sort()
    index = common | {
        "type": "index",
        "parts": {"nbytes": packed(sizes), "digest": b"".join(digests)},
    }
    index["tensors"] = tables["tensors"] | {"sharding": packed([0])}
    index["shardings"] = {
        "ndim": packed([array.ndim]),
        "form": packed([0]),
        "box_count": packed([len(tiles)]),
    }
    index["shardings"] |= {"grid_shape": none, "extent": none}
    steps, base = [], [(0,) * array.ndim] + [(*b[:-1], b[-1] + n[-1]) for b, n, _ in tiles]
    for axis in range(array.ndim):
        steps += [tile[0][axis] - before[axis] for tile, before in zip(tiles, base, strict=False)]
    index["shardings"] |= {
        "begin": packed([-2 * step - 1 if step < 0 else 2 * step for step in steps])
    }
    index["shardings"] |= {
        "box_shape": packed([n[axis] for axis in range(array.ndim) for _, n, _ in tiles])
    }
    writers = [-1, *(writer for _, _, writer in tiles)]
    index["shardings"] |= {
        "part": packed([(b - a - 1) % len(cuts) for a, b in itertools.pairwise(writers)])
    }
    index["streams"] = {"name": strings(), "kind": strings(), "scope": none, "part": none}
    index["leaves"] = {"field": none, "name": strings(), "scope": none, "part": none}
    path = root / f"index-{attempt}.msgpack"
    named = {
        "name": path.name,
        "digest": "blake3:" + put_msgpack(path, index).hex(),
        "nbytes": path.stat().st_size,
    }
    fields: dict[str, Any] = {
        field: {"state": "absent", "reason": reason} for field, reason in absent.items()
    }
    fields["weights"] = {
        "state": "present",
        "tensor_count": 1,
        "nbytes": array.nbytes,
        "stream_count": 0,
        "leaf_count": 0,
    }
    manifest = origin | {
        "type": "manifest",
        "profile": "full",
        "references": [],
        "fields": fields,
        "index": named,
    }
    put_manifest(root / "manifest.json", manifest)


def test_boxes_that_cut_every_dimension_are_put_together(tmp_path):
    array = np.random.default_rng(2).standard_normal((5, 4, 300)).astype(np.float32)
    cuts = [
        [((0, 0, 0), (5, 1, 300)), ((0, 1, 200), (5, 3, 100))],
        [((0, 1, 0), (2, 3, 200)), ((2, 1, 0), (3, 3, 199)), ((2, 1, 199), (3, 3, 1))],
    ]
    put_cut_tensor(tmp_path, array, cuts)
    assert (
        check_with_stranger(tmp_path)["tensors"]["weights", "cut", "global"]["bytes"]
        == array.tobytes()
    )
    with ckptfmt.open(
        tmp_path
    ) as checkpoint:  # and the library reads what was written from the pages alone
        assert np.array_equal(checkpoint.weights["cut"][0:5], array)


@pytest.mark.parametrize(
    "cuts", [[[((0, 0), (2, 2))]], [[((0, 0), (2, 3)), ((0, 2), (2, 1))]], [[((0, 1), (2, 3))]]]
)
def test_gaps_and_overlaps_and_boxes_outside_are_refused(tmp_path, cuts):
    put_cut_tensor(tmp_path, np.zeros((2, 3), np.float32), cuts)
    with pytest.raises(ValueError):
        read_checkpoint(tmp_path)


def test_one_flipped_bit_anywhere_is_refused(tmp_path):
    saved(
        tmp_path,
        weights={"a": np.arange(40, dtype=np.int32), "b": np.ones(3)},
        config={"x": (1, -0.0)},
    )
    for path in sorted(path for path in (tmp_path / "ckpt").rglob("*") if path.is_file()):
        for at in range(0, path.stat().st_size, max(1, path.stat().st_size // 60)):
            damage(path, at)
            with pytest.raises(ValueError):
                read_checkpoint(tmp_path / "ckpt")
            damage(path, at)
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(ValueError):
            read_checkpoint(tmp_path / "ckpt")
        path.unlink()
        with pytest.raises(ValueError):
            read_checkpoint(tmp_path / "ckpt")
        path.write_bytes(content)
    check_with_stranger(tmp_path / "ckpt")


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("format_version", "0.2", "format_version is '0.2' instead of '1.0'"),
        ("profile", "delta", "profile is 'delta' instead of 'full'"),
        ("type", "tombstone", "type is 'tombstone' instead of 'manifest'"),
        ("features", {"reader": ["packs"], "writer": []}, r"needs features \['packs'\]"),
        ("references", ["blake3:" + "0" * 64], "references is"),
    ],
)
def test_other_versions_profiles_and_documents_are_refused_by_name(
    tmp_path, member, value, message
):
    saved(tmp_path, weights={"a": np.ones(1)})
    register = tmp_path / "ckpt" / "manifest.json"
    signed = json.loads(register.read_text())["signed"] | {member: value}
    put_manifest(register, signed)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path / "ckpt")

"""Nothing that a foreign file says changes a class, a module, the environment or a file outside of the target."""

import builtins
import collections
import os
import pathlib
import random
import shutil
import struct
import zipfile

import pytest
import safetensors.torch
import torch

from ckptfmt.errors import CkptError
from ckptfmt_tools.convert import torch_archive, torch_sources
from ckptfmt_tools.convert.pickles import Made, Named, parse_pickle
from tests.convert.made import bits, convert, done, refused, save_dcp, trees
from tests.hostile.bombs_foreign import (
    archive,
    chunk,
    dcp,
    described,
    index_of,
    mapping,
    named,
    number,
    place,
    size,
    storage,
    tensor,
    text,
    write_archive,
)

#: Names of a metadata file, those that have a meaning in an archive, and one that has none.
PERMITTED = sorted(
    {*torch_sources._PERMITTED, *torch_archive.TENSORS, *torch_sources._VALUES, "os.system"}
)


def snapshot():
    """Return what the classes and modules that a pickle could reach are like, and the environment."""
    reached = [
        pathlib,
        pathlib.Path,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
        collections,
        collections.OrderedDict,
    ]
    reached += [
        collections.Counter,
        torch,
        torch.Size,
        torch.Tensor,
        torch.nn.Parameter,
        torch._utils,
        builtins,
        os,
    ]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
    }
    return [sorted(map(str, vars(one))) for one in reached], environment


@pytest.fixture(scope="module", autouse=True)
def loaded(tmp_path_factory):
    """What modules and classes make when they are used first is no change."""
    path = tmp_path_factory.mktemp("loaded")
    for kind in ("torch", "ckptfmt"):
        done(save_dcp({"w": torch.ones(1)}, path / f"dcp-{kind}"), path / kind, "--to", kind)


@pytest.fixture(autouse=True)
def unchanged():
    before, name = snapshot(), pathlib.PurePath.name
    yield
    assert snapshot() == before
    assert pathlib.PurePath.name is name


# --- what BUILD did -------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_build_with_slot_state_on_a_class_planted_a_path(module, tmp_path):
    """``setattr(pathlib.PosixPath, "name", "/victim")``: the target's file was written there, the check passed."""
    path = save_dcp({"w": torch.ones(3)}, tmp_path / "dcp")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    planted = (
        named(f"{module}.PosixPath") + b"N" + mapping((text("name"), text(str(victim)))) + b"\x86b0"
    )
    honest = (path / ".metadata").read_bytes()
    for attack in (planted, planted[:-1]):  # without POP, what stays on the stack is ignored
        (path / ".metadata").write_bytes(b"\x80\x04" + attack + honest[11:])
        assert refused(path, tmp_path / "out.pt", "--to", "torch")[0] == "STATE_UNSUPPORTED"
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", PERMITTED)
def test_state_for_a_name_is_refused(name):
    """Whatever a file may refer to: a name isn't the class or function, and has no attributes to be set."""
    for state in (mapping((text("name"), b"N")), b"N" + mapping((text("name"), b"N")) + b"\x86"):
        with pytest.raises(CkptError, match="STATE_UNSUPPORTED"):
            parse_pickle(named(name) + state + b"b.", permitted=PERMITTED, where="x")


@pytest.mark.parametrize(
    "attack",
    {
        "call": named("os.system") + text("touch executed") + b"\x85R",
        "renamed module": named("__builtin__.eval") + text("1") + b"\x85R",
        "instance": b"(ios\nsystem\n",
        "object": b"(" + named("os.system") + text("touch executed") + b"o",
        "new object with keywords": named("torch.Size") + b")}\x92",
        "extension": b"\x82\x01",
        "persistent id as text": b"Pstorage\n",
        "text of an attribute": text("torch") + text("serialization.os.system") + b"\x93",
        "a name that is no text": b"KKK\x01\x93",
    }.values(),
)
def test_operation_that_could_call_something_is_refused(attack, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for path in (archive(tmp_path / "a", attack), dcp(tmp_path / "b", b"}", attack)):
        assert refused(path, tmp_path / "out", "--to", "ckptfmt")[0] in (
            "STATE_UNSUPPORTED",
            "FILE_NBYTES",
        )


@pytest.mark.parametrize(
    "state",
    [
        mapping((text("__class__"), named("torch.Size"))),
        mapping((text("items"), b"N"), (text("__dict__"), b"}")),
        b"N" + mapping((text("__class__"), named("torch.Size"))) + b"\x86",
    ],
)
def test_state_of_an_ordered_dict_is_left_out_or_refused(state, tmp_path):
    value = named("collections.OrderedDict") + b")R" + text("a") + b"K\x01s" + state + b"b"
    said = convert(archive(tmp_path, value), tmp_path / "out", "--to", "ckptfmt")

    assert said.get("error", {}).get("code", "done") in ("done", "FILE_NBYTES")
    if "error" not in said:
        assert trees(tmp_path / "out")["optimizer"]["extra/x"] == collections.OrderedDict(a=1)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_pickle_says_only_inert_values_come_of_it(seed):
    chance = random.Random(seed)
    pieces = [named(name) for name in PERMITTED] + [bytes([code]) for code in range(256)]
    pieces += [
        text("name"),
        text("x"),
        b"K\x01",
        b"}",
        b")",
        b"]",
        b"(",
        b"N",
        b"b",
        b"R",
        b"\x81",
        b"\x86",
    ] * 20
    for _ in range(2000):
        content = b"".join(chance.choices(pieces, k=chance.randrange(2, 14))) + b"."
        try:
            found = parse_pickle(content, permitted=PERMITTED, where="x")
        except CkptError:
            continue
        assert_inert(found)


def assert_inert(value, depth=0):
    assert type(value) in (type(None), bool, int, float, str, bytes, list, tuple, Named, Made)
    if type(value) is Made:
        value = [value.args, value.state, value.items]
    for item in value if type(value) in (list, tuple) and depth < 20 else ():
        assert_inert(item, depth + 1)


# --- which files are read -------------------------------------------------------------------------


def hostile_dcp(directory, name):
    directory.mkdir()
    pickled = b"\x80\x02" + tensor((3,), (1,)) + b"."
    item = write_archive(directory / "item", pickled).read_bytes()
    (directory / "item").unlink()
    items = mapping((index_of(text("w"), size(0)), place(len(item), name)))
    return dcp(
        directory,
        mapping((text("w"), described((3,), b"]" + chunk(0, 3) + b"a"))),
        items,
        b"N",
        item,
    )


NAMES = [
    "../a.distcp",
    "/etc/passwd",
    "..",
    ".",
    "",
    "sub/a.distcp",
    "a\0b",
    "./a.distcp",
    "a.distcp/",
]


@pytest.mark.parametrize("name", NAMES)
def test_file_name_of_a_metadata_file_stays_in_its_directory(name, tmp_path):
    assert (
        refused(hostile_dcp(tmp_path / "dcp", name), tmp_path / "out", "--to", "ckptfmt")[0]
        == "UNSAFE_PATH"
    )


@pytest.mark.parametrize("name", NAMES)
def test_file_name_of_an_index_stays_in_its_directory(name, tmp_path):
    (tmp_path / "hf").mkdir()
    index = '{"weight_map": {"w": ' + __import__("json").dumps(name) + "}}"
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(index)

    assert refused(tmp_path / "hf", tmp_path / "out", "--to", "ckptfmt")[0] == "UNSAFE_PATH"


def test_sound_directory_made_by_hand_is_converted(tmp_path):
    done(hostile_dcp(tmp_path / "dcp", "a.distcp"), tmp_path / "out", "--to", "ckptfmt")

    assert trees(tmp_path / "out")["weights"]["w"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("what", ["file", "directory", "pipe", "nothing"])
def test_link_that_leads_out_of_the_directory_is_refused(what, tmp_path):
    path = hostile_dcp(tmp_path / "dcp", "a.distcp")
    outside = tmp_path / "outside"
    (path / "a.distcp").rename(outside)
    if what == "directory":
        outside.unlink()
        outside.mkdir()
    elif what == "pipe":
        outside.unlink()
        os.mkfifo(outside)
    elif what == "nothing":
        outside.unlink()
    (path / "a.distcp").symlink_to(outside)

    code = "FILE_MISSING" if what == "nothing" else "UNSAFE_FILE"
    assert refused(path, tmp_path / "out", "--to", "ckptfmt")[0] == code


def test_snapshot_in_a_hugging_face_cache_is_made_of_links_to_its_blobs(tmp_path):
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "1", tmp_path / "models--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    safetensors.torch.save_file({"w": torch.ones(3)}, blobs / "abc")
    (blobs / "def").write_text('{"weight_map": {"w": "model-00001-of-00001.safetensors"}}')
    (snapshot / "model-00001-of-00001.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/def")
    done(snapshot, tmp_path / "out", "--to", "ckptfmt")
    assert trees(tmp_path / "out")["weights"]["w"].tolist() == [1.0] * 3

    shutil.copy(blobs / "abc", tmp_path / "outside")
    (snapshot / "model-00001-of-00001.safetensors").unlink()
    (snapshot / "model-00001-of-00001.safetensors").symlink_to(tmp_path / "outside")
    assert refused(snapshot, tmp_path / "again", "--to", "ckptfmt")[0] == "UNSAFE_FILE"


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", "..", ""])
def test_key_of_a_storage_is_a_record_of_the_archive_or_nothing(key, tmp_path):
    path = archive(tmp_path, tensor((2,), (1,), storage(key)))

    assert refused(path, tmp_path / "out", "--to", "ckptfmt")[0] == "FILE_NBYTES"


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["archive/data.pkl", "archive/data/0"])
def test_two_records_of_one_name_are_refused(name, tmp_path):
    path = archive(tmp_path, tensor((2,), (1,)))
    with zipfile.ZipFile(path, "a") as made:
        made.writestr(name, bytes(64))

    assert refused(path, tmp_path / "out", "--to", "ckptfmt")[0] == "STATE_UNSUPPORTED"


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "archive/../../x"])
def test_record_with_the_name_of_a_file_elsewhere_is_written_nowhere(name, tmp_path):
    path = archive(tmp_path, tensor((2,), (1,)))
    with zipfile.ZipFile(path, "a") as made:
        made.writestr(name, b"x")
    done(path, tmp_path / "out", "--to", "ckptfmt")

    assert {entry.name for entry in tmp_path.iterdir()} == {"bomb.pt", "out"}


def test_compressed_record_was_read_as_it_is_stored(tmp_path):
    """A file that was packed anew: the deflated bytes of a storage became a tensor's elements."""
    torch.save({"w": torch.zeros(4000)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as held,
        zipfile.ZipFile(tmp_path / "b.pt", "w") as made,
    ):
        for record in held.infolist():
            method = zipfile.ZIP_DEFLATED if "/data/" in record.filename else zipfile.ZIP_STORED
            made.writestr(record.filename, held.read(record), method)

    assert refused(tmp_path / "b.pt", tmp_path / "out", "--to", "ckptfmt")[0] == "STATE_UNSUPPORTED"


# --- what tensors are -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "code"),
    [
        ((5,), (1,), "FILE_NBYTES"),
        ((2, 2), (1 << 40, 1), "FILE_NBYTES"),
        ((2,), (-1,), "FILE_NBYTES"),
        ((2,), (), "FILE_NBYTES"),
        ((1 << 62,), (0,), "FILE_NBYTES"),
    ],
)
def test_tensor_beyond_its_storage_is_refused(shape, strides, code, tmp_path):
    path = archive(tmp_path, tensor(shape, strides))

    assert refused(path, tmp_path / "out", "--to", "ckptfmt")[0] == code


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugates_and_negatives_of_a_file_keep_their_values(dtype, tmp_path):
    parts = torch.arange(12.0, dtype=dtype.to_real()).reshape(6, 2)
    values = torch.view_as_complex(parts)
    views = {
        "conj": values.conj(),
        "neg": torch._neg_view(values),
        "both": torch._neg_view(values.conj())[1::2],
    }
    torch.save(views, tmp_path / "a.pt")
    done(tmp_path / "a.pt", tmp_path / "ckpt", "--to", "ckptfmt")
    found = trees(tmp_path / "ckpt")["weights"]
    assert found.keys() == views.keys()
    for name, view in views.items():  # torch's own kernels differ in the sign of zeros
        assert torch.equal(found[name], view.resolve_conj().resolve_neg())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.uint8], ids=str
)
def test_negatives_of_a_file_keep_their_values(dtype, tmp_path):
    values = torch.arange(6).to(dtype)
    torch.save({"w": torch._neg_view(values), "s": torch._neg_view(values[2])}, tmp_path / "a.pt")
    done(tmp_path / "a.pt", tmp_path / "ckpt", "--to", "ckptfmt")

    found = trees(tmp_path / "ckpt")["weights"]
    assert (bits(found["w"]), bits(found["s"])) == (bits(-values), bits(-values[2]))


def test_conjugate_in_a_dcp_directory_keeps_its_values(tmp_path):
    """The bits of a chunk's own pickle were not looked at: its bytes were taken as they lie."""
    values = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)
    save_dcp({"w": values.conj(), "n": torch._neg_view(torch.arange(3.0))}, tmp_path / "dcp")
    done(tmp_path / "dcp", tmp_path / "ckpt", "--to", "ckptfmt")

    found = trees(tmp_path / "ckpt")["weights"]
    assert bits(found["w"]) == bits(values.conj().resolve_conj())
    assert found["n"].tolist() == [0.0, -1.0, -2.0]


def test_file_of_another_byte_order_keeps_its_values(tmp_path):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(
            "archive/data.pkl", b"\x80\x02" + mapping((text("w"), tensor((2,), (1,)))) + b"."
        )
        made.writestr("archive/byteorder", b"big")
        made.writestr("archive/data/0", struct.pack(">4f", 1, 2, 0, 0))
        made.writestr("archive/version", b"3\n")
    assert torch.load(path)["w"].tolist() == [1.0, 2.0]
    done(path, tmp_path / "out", "--to", "ckptfmt")

    assert trees(tmp_path / "out")["weights"]["w"].tolist() == [1.0, 2.0]


def test_numbers_of_any_protocol_are_what_they_are():
    import pickle  # noqa: PLC0415

    value: list[object] = [
        0,
        255,
        256,
        -1,
        1 << 40,
        -(1 << 200),
        1.5,
        True,
        None,
        "é",
        b"\xff",
        ("a", ("b",) * 5),
        [[]],
    ]
    for protocol in range(2, 6):
        if protocol == 2:
            value = [item for item in value if type(item) is not bytes]
        assert parse_pickle(pickle.dumps(value, protocol), permitted=(), where="x") == value
    assert parse_pickle(number(7) + b".", permitted=(), where="x") == 7

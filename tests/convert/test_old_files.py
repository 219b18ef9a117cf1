"""Files that torch.save wrote before torch 1.6 keep each bit, whatever torch, Python or machine wrote them."""

import zipfile

import numpy as np
import pytest
import torch

import ckptfmt
from tests.convert.made import (
    all_dtypes,
    bits,
    done,
    frozen,
    reasons,
    refused,
    tensor_of,
    trained,
    trees,
)
from tests.convert.old_torch import KINDS, ordered, sequence, sizes, storage, tar, tensor, text
from tests.hostile.bombs_foreign import mapping, named, number


def save_old(value, path, **options):
    """Save as torch before 1.6 did, with today's torch."""
    torch.save(value, path, _use_new_zipfile_serialization=False, **options)
    return path


def weights_of(path, tmp_path, *options):
    """Convert a file, and return the weights of the checkpoint."""
    done(path, tmp_path / "ckpt", "--to", "ckptfmt", *options)
    return trees(tmp_path / "ckpt")["weights"]


def elements(kind, count=6):
    """Return arbitrary elements for a storage, and the tensor of torch that has them."""
    dtype = {"BFloat16": "bfloat16", "Bool": "bool"}.get(kind) or np.dtype(KINDS[kind]).name
    held = tensor_of(dtype, (count,), seed=len(kind))
    return held.view(torch.uint8).numpy().view(KINDS[kind]), held


# --- written by torch -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_of_a_file_of_the_old_form_keeps_its_bits(tmp_path):
    path = save_old(all_dtypes(), tmp_path / "a.pth")

    found = weights_of(path, tmp_path)

    assert {name: bits(value) for name, value in found.items()} == {
        name: bits(value) for name, value in all_dtypes().items()
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_training_of_the_old_form_comes_back_whole(protocol, tmp_path):
    net, optimizer, scheduler = trained()
    memory = torch.arange(12.0).reshape(3, 4)
    value = {
        "state_dict": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "global_step": 40,
        "ema": {
            "rows": memory[1:],
            "columns": memory.t(),
            "all": memory,
            "names": ("a", {"b": [1, None, 2.5]}),
        },
        "conj": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    path = save_old(value, tmp_path / "a.pth", pickle_protocol=protocol)
    torch.save(value, tmp_path / "new.pth")

    said = done(path, tmp_path / "ckpt", "--to", "ckptfmt")
    new = done(tmp_path / "new.pth", tmp_path / "new", "--to", "ckptfmt")

    assert (said["step"], reasons(said)) == (40, reasons(new))
    assert frozen(trees(tmp_path / "ckpt")) == frozen(trees(tmp_path / "new"))
    done(path, tmp_path / "there.pt")
    other = trained(seed=1)[0]
    other.load_state_dict(torch.load(tmp_path / "there.pt", weights_only=True)["weights"])
    assert frozen(other.state_dict()) == frozen(net.state_dict())


def test_large_tensors_of_the_old_form_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptfmt_tools.convert.content.CHUNK_NBYTES", 64)
    value = {"w": tensor_of("float64", (13, 11)), "t": tensor_of("int16", (30, 20)).t()}
    path = save_old(value, tmp_path / "a.bin")
    done(path, tmp_path / "w.safetensors")

    assert frozen(weights_of(tmp_path / "w.safetensors", tmp_path)) == frozen(value)


def test_a_file_of_the_old_form_that_is_cut_is_never_half_read(tmp_path):
    path = save_old({"w": torch.arange(1000.0), "b": torch.ones(3)}, tmp_path / "a.pth")
    whole = path.read_bytes()
    for nbytes in (20, 40, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:nbytes])
        assert refused(path, tmp_path / "out", "--to", "ckptfmt")[0] == "FILE_NBYTES"


def test_a_whole_module_of_the_old_form_is_refused_by_its_class(tmp_path):
    path = save_old(torch.nn.Linear(2, 2), tmp_path / "a.pth")
    code, error = refused(path, tmp_path / "out", "--to", "ckptfmt")

    assert (code, "torch.nn.modules.linear.Linear" in error["detail"]) == (
        "STATE_UNSUPPORTED",
        True,
    )


# --- written by other versions, Pythons and machines ----------------------------------------------


@pytest.mark.parametrize("big", [False, True], ids=["little-endian", "big-endian"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_dtype_in_each_byte_order(kind, big, tmp_path):
    held, wanted = elements(kind)
    value = ordered((text("w"), tensor(storage("7", kind, 6), (2, 3), (3, 1))))
    (tmp_path / "a.pth").write_bytes(sequence(value, {"7": held}, big=big, says=big))
    if not big:
        assert bits(torch.load(tmp_path / "a.pth", weights_only=True)["w"]) == bits(
            wanted.reshape(2, 3)
        )

    assert bits(weights_of(tmp_path / "a.pth", tmp_path)["w"]) == bits(wanted.reshape(2, 3))


def test_elements_that_a_machine_of_the_other_order_swapped_as_it_wrote_them(tmp_path):
    """The facts of the machine say big-endian, and torch wrote little-endian elements all the same."""
    held, wanted = elements("Float")
    value = ordered((text("w"), tensor(storage("7", "Float", 6), (6,), (1,))))
    (tmp_path / "a.pth").write_bytes(sequence(value, {"7": held}, says=True))

    assert bits(torch.load(tmp_path / "a.pth", weights_only=True)["w"]) == bits(wanted)
    assert bits(weights_of(tmp_path / "a.pth", tmp_path)["w"]) == bits(wanted)


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("cuda", [False, True])
def test_tensors_of_each_version_written_by_python_2_on_a_gpu(version, cuda, tmp_path):
    """Texts are bytes, numbers long, a dict is a list of lists, and a storage may say that it was a GPU's."""
    held = np.arange(12, dtype="f4")
    kind = "cuda.Float" if cuda else "Float"
    of = storage("94", kind, 12, location="cuda:1" if cuda else "cpu")
    rows = (
        (text("module.fc.weight"), tensor(of, (2, 3), (6, 2), 1, version)),
        (text("b" * 300), tensor(of, (2,), (1,))),
    )
    metadata = mapping(
        (text("_metadata"), ordered((text(""), mapping((text("version"), number(1))))))
    )
    value = mapping(
        (text("epoch"), number(90)), (text("state_dict"), ordered(*rows, state=metadata))
    )
    (tmp_path / "a.tar").write_bytes(sequence(value, {"94": held}))

    found = weights_of(tmp_path / "a.tar", tmp_path)

    assert found["module.fc.weight"].tolist() == [[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]
    assert found["b" * 300].tolist() == [0.0, 1.0]
    assert trees(tmp_path / "ckpt")["optimizer"]["extra/epoch"] == 90


def test_parts_of_storages_that_old_versions_wrote_as_views(tmp_path):
    held = np.arange(10, dtype="i4")
    view = b"(" + text("8") + number(4) + number(3) + b"t"
    rows = (
        (text("all"), tensor(storage("7", "Int", 10), (10,), (1,))),
        (text("part"), tensor(storage("7", "Int", 10, view=view), (2,), (1,), 1)),
    )
    (tmp_path / "a.pth").write_bytes(sequence(ordered(*rows), {"7": held}))

    assert torch.load(tmp_path / "a.pth", weights_only=True)["part"].tolist() == [5, 6]
    assert weights_of(tmp_path / "a.pth", tmp_path)["part"].tolist() == [5, 6]
    beyond = (text("part"), tensor(storage("7", "Int", 10, view=view), (3,), (1,), 1))
    (tmp_path / "b.pth").write_bytes(sequence(ordered(*rows[:1], beyond), {"7": held}))
    assert refused(tmp_path / "b.pth", tmp_path / "out", "--to", "ckptfmt")[0] == "FILE_NBYTES"


@pytest.mark.parametrize("form", ["called", "of torch 0.1", "variable"])
def test_parameters_as_they_were_before_torch_0_4(form, tmp_path):
    inner = tensor(storage("7", "Float", 6), (6,), (1,), version=1)
    kind = (
        "torch.autograd.variable.Variable" if form == "variable" else "torch.nn.parameter.Parameter"
    )
    if form == "of torch 0.1":
        made = named(kind) + b")\x81(" + inner + b"N" + ordered() + b"\x88\x89tb"
    else:
        made = named(kind) + inner + b"\x85R(" + b"\x88\x89" + ordered() + b"tb"
    held, wanted = elements("Float")
    (tmp_path / "a.pth").write_bytes(sequence(ordered((text("w"), made)), {"7": held}))

    found = weights_of(tmp_path / "a.pth", tmp_path)

    assert bits(found["w"]) == bits(wanted)


@pytest.mark.parametrize("big", [False, True], ids=["little-endian", "big-endian"])
@pytest.mark.parametrize(
    "kind", ["Double", "Float", "Half", "Long", "Int", "Short", "Char", "Byte"]
)
def test_the_tar_archives_of_the_first_versions(kind, big, tmp_path):
    held, wanted = elements(kind)
    value = ordered(
        (text("w"), text("11") + b"Q"),
        (text("tied"), text("11") + b"Q"),
        (text("part"), text("12") + b"Q"),
    )
    views = b"](" + b"(" + number(9) + number(7) + number(2) + number(3) + b"te"
    tensors = {11: (7, (3, 2), (2, 1), 0), 12: (9, (2,), (1,), 1)}
    (tmp_path / "a.pth").write_bytes(tar(value, {7: (kind, held)}, tensors, views, big=big))
    if not big:
        assert bits(torch.load(tmp_path / "a.pth", weights_only=False)["part"]) == bits(wanted[3:5])

    found = weights_of(tmp_path / "a.pth", tmp_path)

    assert bits(found["w"]) == bits(wanted.reshape(3, 2))
    assert bits(found["part"]) == bits(wanted[3:5])
    with ckptfmt.open(tmp_path / "ckpt") as checkpoint:
        assert next(
            tensor for tensor in checkpoint.tensors.values() if tensor.name == "w"
        ).aliases == ("tied",)


def test_big_endian_archives_of_every_dtype(tmp_path):
    """Torch swaps the elements of a zip archive whose `byteorder` is another one than the machine's."""
    value = {
        name: tensor_of(name, seed=7)
        for name in ("float16", "bfloat16", "float32", "float64", "int16", "int64")
    }
    value |= {
        "complex64": tensor_of("complex64"),
        "bool": tensor_of("bool"),
        "int8": tensor_of("int8"),
    }
    torch.save(value, tmp_path / "a.pt")
    sized = {name: item.element_size() // (1 + item.is_complex()) for name, item in value.items()}
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as held,
        zipfile.ZipFile(tmp_path / "b.pt", "w") as made,
    ):
        widths = iter(sized.values())
        for record in held.infolist():
            content = held.read(record)
            if "/data/" in record.filename:
                content = np.frombuffer(content, f"u{next(widths)}").byteswap().tobytes()
            made.writestr(record, b"big" if record.filename.endswith("byteorder") else content)

    found = weights_of(tmp_path / "b.pt", tmp_path)

    assert frozen(torch.load(tmp_path / "b.pt", weights_only=True)) == frozen(value)
    assert {name: bits(item) for name, item in found.items()} == {
        name: bits(item) for name, item in value.items()
    }


# --- what isn't safe ------------------------------------------------------------------------------


def test_a_program_in_a_file_of_the_old_form_is_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    attack = named("os.system") + text("touch executed") + b"\x85R"
    weight = ordered((text("w"), tensor(storage("7", "Float", 6), (6,), (1,))))
    held = {"7": elements("Float")[0]}
    for name, content in {
        "a.pth": sequence(mapping((text("state_dict"), weight), (text("x"), attack)), held),
        "b.pth": sequence(attack, held),
        "c.pth": sequence(weight, held)[:15] + b"\x80\x02" + attack + b".",
        "d.pth": tar(attack, {}, {}),
    }.items():
        (tmp_path / "in" / name).write_bytes(content)
        code, _ = refused(tmp_path / "in" / name, tmp_path / "out", "--to", "ckptfmt")
        assert code in ("STATE_UNSUPPORTED", "FILE_NBYTES")
    assert not (tmp_path / "executed").exists()


def test_storages_that_are_not_as_the_pickle_says_are_refused(tmp_path):
    value = ordered((text("w"), tensor(storage("7", "Float", 6), (6,), (1,))))
    sound = sequence(value, {"7": np.zeros(6, "f4")})
    for name, content in {
        "count": sequence(value, {"7": np.zeros(5, "f4")}),
        "key": sequence(value, {"8": np.zeros(6, "f4")}),
        "short": sound[:-1],
        "none": sequence(value, {}),
        "shape": sequence(
            ordered((text("w"), tensor(storage("7", "Float", 6), (7,), (1,)))),
            {"7": np.zeros(6, "f4")},
        ),
        "size": sequence(
            ordered((text("w"), named("torch.Size") + sizes(1) + b"\x85R")),
            {"7": np.zeros(6, "f4")},
        ),
    }.items():
        (tmp_path / name).write_bytes(content)
        assert refused(tmp_path / name, tmp_path / "out", "--to", "ckptfmt")[0] == "FILE_NBYTES"


def test_text_of_python_2_in_another_encoding_is_named_by_its_key(tmp_path):
    weight = ordered((text("w"), tensor(storage("7", "Float", 6), (6,), (1,))))
    value = mapping(
        (text("state_dict"), weight),
        (text("author"), b"U\x02\xe9\xff"),
        (text("place"), text("Zürich")),
    )
    (tmp_path / "a.pth").write_bytes(sequence(value, {"7": elements("Float")[0]}))

    code, error = refused(tmp_path / "a.pth", tmp_path / "out", "--to", "ckptfmt")
    assert (code, error["where"]) == ("STATE_UNSUPPORTED", "author")
    assert "UTF-8" in error["detail"]
    assert weights_of(tmp_path / "a.pth", tmp_path, "--only", "weights").keys() == {"w"}

"""Peers for the neutral cases: a sound one, and others of it that have one fault each."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import shutil
import signal
import struct
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ckptfmt_conformance.neutral.peer import Description, Loaded, Pending
from ckptfmt_conformance.neutral.states import bits_of, from_bits

#: How much later a thread gets its turn: long enough for the caller to go on first.
LATE_S = 0.02


def pack(value):
    """Return a value as JSON that keeps types and bits."""
    if isinstance(value, float):
        return {"float": struct.pack("<d", value).hex()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, tuple):
        return {"tuple": [pack(item) for item in value]}
    if isinstance(value, dict):
        return {"mapping": [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"a {type(value).__name__} isn't saved")


def unpack(value):
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "float":
        return struct.unpack("<d", bytes.fromhex(content))[0]
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "tuple":
        return tuple(unpack(item) for item in content)
    return {unpack(key): unpack(item) for key, item in content}


def digest(content):
    return hashlib.sha256(content).hexdigest()


@dataclasses.dataclass
class Thread:
    thread: threading.Thread

    def wait(self):
        self.thread.join()


class Sound:
    """A directory: a header with digests of a file per tensor, and its own; written aside and renamed."""

    def describe(self):
        return Description(name="sound", version="1", settings="")

    # What the others change, one at a time.

    def encode(self, tensor):
        return bits_of(tensor)

    def decode(self, content, dtype, shape):
        return from_bits(content, dtype, shape)

    def read_tensor(self, path, entry, live):  # noqa: ARG002
        content = (path / entry["file"]).read_bytes()
        if digest(content) != entry["digest"]:
            raise ValueError(f"{entry['file']}: another digest")
        return self.decode(content, getattr(torch, entry["dtype"]), tuple(entry["shape"]))

    def write_header(self, path, header):
        content = json.dumps({**header, "values": pack(header["values"])}).encode()
        (path / "header").write_bytes(content + b"\n" + digest(content).encode())

    def read_header(self, path):
        content, _, expected = (path / "header").read_bytes().rpartition(b"\n")
        if digest(content).encode() != expected:
            raise ValueError("header: another digest")
        header = json.loads(content)
        return {**header, "values": unpack(header["values"])}

    def begin(self, path):
        path.with_name(path.name + ".tmp").mkdir()
        return path.with_name(path.name + ".tmp")

    def end(self, aside, path):
        aside.rename(path)

    # What a peer does.

    def save(self, path, state, step):
        aside = self.begin(path)
        entries = {}
        for number, (name, tensor) in enumerate(state["tensors"].items()):
            content = self.encode(tensor)
            (aside / f"{number}.bin").write_bytes(content)
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries[name] = {"file": f"{number}.bin", "digest": digest(content), "dtype": dtype}
            entries[name]["shape"] = list(tensor.shape)
        self.write_header(aside, {"tensors": entries, "values": state.get("values"), "step": step})
        self.end(aside, path)

    def load(self, path, state):
        header = self.read_header(path)
        live = state["tensors"]
        tensors = {
            name: self.read_tensor(path, entry, live[name])
            for name, entry in header["tensors"].items()
        }
        return Loaded({"tensors": tensors, "values": header["values"]}, header["step"])

    def save_async(self, path, state, step) -> Pending:
        copied = {**state, "values": json.loads(json.dumps(state.get("values")))}
        copied["tensors"] = {name: tensor.clone() for name, tensor in state["tensors"].items()}
        pending: Pending = self.start(path, copied, step)
        return pending

    def start(self, path, state, step):
        thread = threading.Thread(target=self.save, args=(path, state, step))
        thread.start()
        return Thread(thread)

    def save_distributed(self, path, state, step):
        whole = {name: tensor.full_tensor() for name, tensor in state["tensors"].items()}
        if dist.get_rank() == 0:
            self.save(path, {"tensors": whole}, step)
        dist.barrier()

    def load_distributed(self, path, state):
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

        live = state["tensors"]
        loaded = Sound.load(self, path, {"tensors": live})
        tensors = loaded.state["tensors"]
        placed = {
            name: distribute_tensor(tensors[name], live[name].device_mesh, live[name].placements)
            for name in live
        }
        return Loaded({"tensors": placed}, loaded.step)


# --- other bytes ----------------------------------------------------------------------------------


class ThroughFloat32(Sound):
    def encode(self, tensor):
        value = tensor.real if tensor.is_complex() else tensor
        return bits_of(value.to(torch.float32).to(tensor.dtype))


class MinusZeroIsZero(Sound):
    """Canonical zeros and NaNs: what `==` can't tell."""

    def encode(self, tensor):
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            return bits_of(tensor)
        return bits_of(torch.where(tensor == 0, torch.zeros((), dtype=tensor.dtype), tensor))


class Untyped(Sound):
    def decode(self, content, dtype, shape):
        kept = torch.uint8 if dtype.itemsize == 1 else dtype
        return from_bits(content, kept, shape)


class Flat(Sound):
    def decode(self, content, dtype, shape):  # noqa: ARG002
        return from_bits(content, dtype)


class Memory(Sound):
    """Writes the memory from a tensor's first element on, whatever its strides."""

    def encode(self, tensor):
        nbytes = tensor.numel() * tensor.element_size()
        begin = tensor.storage_offset() * tensor.element_size()
        whole = bytes(tensor.untyped_storage())
        return whole[begin : begin + nbytes].ljust(nbytes, b"\0")


class OncePerStorage(Sound):
    """Takes the second name of a storage for one that needs no saving."""

    def save(self, path, state, step):
        kept: dict[int, str] = {}
        for name, tensor in state["tensors"].items():
            kept.setdefault(tensor.untyped_storage().data_ptr(), name)
        tensors = {
            name: tensor for name, tensor in state["tensors"].items() if name in kept.values()
        }
        super().save(path, {**state, "tensors": tensors}, step)

    def load(self, path, state):
        loaded = super().load(path, state)
        return Loaded(
            {**loaded.state, "tensors": {**state["tensors"], **loaded.state["tensors"]}},
            loaded.step,
        )


class NoStep(Sound):
    def load(self, path, state):
        return Loaded(super().load(path, state).state, 0)


class Texts(Sound):
    def save(self, path, state, step):
        values = {name: str(value) for name, value in state.get("values", {}).items()}
        super().save(path, {**state, "values": values}, step)


class PlainJson(Sound):
    def save(self, path, state, step):
        super().save(
            path,
            {**state, "values": json.loads(json.dumps(state.get("values"), default=str))},
            step,
        )


class CannotLoad(Sound):
    def load(self, path, state):  # noqa: ARG002
        raise RuntimeError("not today")


# --- damage ---------------------------------------------------------------------------------------


class Unchecked(Sound):
    """Compares no digest, and fills up what is short."""

    def read_tensor(self, path, entry, live):
        nbytes = live.numel() * live.element_size()
        content = (path / entry["file"]).read_bytes().ljust(nbytes, b"\0")
        return from_bits(content[:nbytes], live.dtype, tuple(live.shape))


class Disclaiming(Unchecked):
    def describe(self):
        said = "Bits that flip are left to the disk: README.md"
        return dataclasses.replace(super().describe(), disclaims={"damage/flipped-bit": said})


class Lenient(Sound):
    """Leaves a tensor as it is whose file isn't there."""

    def read_tensor(self, path, entry, live):
        with contextlib.suppress(FileNotFoundError):
            return super().read_tensor(path, entry, live)
        return live


class OwnDigests(Sound):
    """Each file holds its own digest, and nothing says which files belong together."""

    def encode(self, tensor):
        return digest(super().encode(tensor)).encode() + super().encode(tensor)

    def read_tensor(self, path, entry, live):
        content = (path / entry["file"]).read_bytes()
        if digest(content[64:]).encode() != content[:64]:
            raise ValueError(f"{entry['file']}: another digest")
        return from_bits(content[64:], live.dtype, tuple(live.shape))


class Pickles(Sound):
    def write_header(self, path, header):
        (path / "header").write_bytes(pickle.dumps(header))

    def read_header(self, path):
        return pickle.loads((path / "header").read_bytes())


class Crashes(Sound):
    """Dies of what is damaged."""

    def read_header(self, path):
        try:
            return super().read_header(path)
        except ValueError:
            os.kill(os.getpid(), signal.SIGSEGV)
            raise


# --- processes ------------------------------------------------------------------------------------


class KeepsReferences(Sound):
    def save_async(self, path, state, step):
        return self.start(path, state, step)

    def encode(self, tensor):
        time.sleep(LATE_S)
        return super().encode(tensor)


class CopiesLate(Sound):
    """Copies the tensors beside the caller."""

    def save_async(self, path, state, step):
        return self.start(path, state, step)

    def start(self, path, state, step):
        def copy_and_save():
            time.sleep(LATE_S)
            tensors = {name: tensor.clone() for name, tensor in state["tensors"].items()}
            self.save(path, {**state, "tensors": tensors}, step)

        thread = threading.Thread(target=copy_and_save)
        thread.start()
        return Thread(thread)


class InPlace(Lenient):
    """Writes under the last name, and takes what it finds there for a checkpoint."""

    def begin(self, path):
        path.mkdir()
        return path

    def end(self, aside, path):
        pass

    def load(self, path, state):
        try:
            return super().load(path, state)
        except FileNotFoundError:
            if not path.is_dir():
                raise
            return Loaded(state, 0)


class RemovesFirst(Sound):
    """Makes room for a checkpoint before it is written."""

    def begin(self, path):
        for earlier in path.parent.glob("step-????"):
            shutil.rmtree(earlier)
        return super().begin(path)


class OwnShards(Sound):
    """Each process saves what it holds, and takes the file of its own number."""

    def save_distributed(self, path, state, step):
        local = {name: tensor.to_local() for name, tensor in state["tensors"].items()}
        self.save(Path(f"{path}-{dist.get_rank()}"), {"tensors": local}, step)
        dist.barrier()

    def load_distributed(self, path, state):
        local = {name: tensor.to_local() for name, tensor in state["tensors"].items()}
        loaded = Sound.load(self, Path(f"{path}-{dist.get_rank()}"), {"tensors": local})
        for name, tensor in loaded.state["tensors"].items():
            if tensor.shape == local[name].shape:
                local[name].copy_(tensor)
        return Loaded(state, loaded.step)


class OnlySaves:
    """No peer: it can't load."""

    def describe(self):
        return Description(name="half", version="1", settings="")

    def save(self, path, state, step):
        pass

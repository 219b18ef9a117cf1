"""What ckptfmt makes of a case of the vectors, in this process, and in which phase it finds what is wrong."""

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
from blake3 import blake3

import ckptfmt
from ckptfmt.adapters.data_loaders import ConsumedSamples, ForeignLoader
from ckptfmt.documents.tree import dump_tree, parse_tree
from ckptfmt.dtypes import numpy_dtype
from ckptfmt.errors import CkptError
from ckptfmt.run.lineage import begin_launch, open_run
from ckptfmt.store.memory import MemoryStore
from ckptfmt_conformance.adapters.reference import Reference
from ckptfmt_conformance.protocol import Rejected
from conformance.generate.tagged import tagged
from tests.adapters.double import restore
from tests.pages.stranger_reader import read_checkpoint

PHASES = ("open", "read", "validate")


class RefusedError(Exception):
    def __init__(self, error, phase):
        super().__init__(error, phase)
        self.error, self.phase = error, phase


def judge(path, members, output):
    """Return what is wrong with ckptfmt's answer to a case whose files lie at `path`, or None.

    What it writes lies below `output`.
    """
    request = members.get("request") or {}
    try:
        if members["kind"] == "write":
            answer = answer_write(request, output, leaves="leaves" in members["expect"])
        else:
            answer = ANSWERS[members["kind"]](path, request)
    except RefusedError as refusal:
        return judge_refusal(members["expect"], refusal.error, refusal.phase)
    expect = {key: value for key, value in members["expect"].items() if key != "outcome"}
    if members["expect"]["outcome"] != "accept":
        return f"accepted, where {expect['error']} was expected"
    return (
        None
        if answer == expect
        else f"{json.dumps(answer)[:300]} instead of {json.dumps(expect)[:300]}"
    )


def judge_refusal(expect, error, phase):
    codes = expect.get("error", [])
    if str(error.code) not in (codes if isinstance(codes, list) else [codes]):
        return f"refused in phase {phase}: {error}; expected was {codes or 'that it is accepted'}"
    if phase == "open" and str(error.code) == "FILES_IN_CACHES":
        return None  # it says so at once, where the first read would do
    return (
        None
        if phase == expect["phase"]
        else f"refused in phase {phase} instead of {expect['phase']}: {error}"
    )


@contextlib.contextmanager
def phase(name):
    """Turns an error of the library into a refusal in a phase."""
    try:
        yield
    except CkptError as error:
        raise RefusedError(error, name) from error


def answer_open(path, request):
    if "launch" in request:
        return {"launch": answer_launch(path)}
    bases = [path / base for base in request.get("bases", ())]
    with phase("open"):
        checkpoint = ckptfmt.open(path, digest=request.get("digest"), bases=bases)
        for number in range(len(checkpoint.index.parts)):
            checkpoint.open_part(number)
        for tensor in checkpoint.index.tensors:
            for box, part in tensor.sharding:
                checkpoint.stored_box(tensor, box, part)
        for leaf in checkpoint.index.leaves:
            checkpoint.stored_leaf(leaf)
        for row in checkpoint.index.streams:
            checkpoint.stored_stream(row)
    with phase("read"):
        found = {
            title(tensor.key): describe(checkpoint, tensor) for tensor in checkpoint.index.tensors
        }
        for key in checkpoint.leaves:
            checkpoint.leaf(*key)
        for stream in checkpoint.streams:
            checkpoint.stream(*stream)
    with phase("validate"):
        for error in (
            ckptfmt.validate(path, bases=bases).violations if request.get("verify") == "all" else ()
        ):
            raise error
    return {"tensors": found}


def answer_launch(path):
    """A launch of the run, in memory: what is there is copied, and stays as it is."""
    store = MemoryStore()
    passed_over: list[str] = []
    for file in path.rglob("*"):
        if file.is_file():
            store.create(file.relative_to(path).as_posix(), [file.read_bytes()])
    with phase("open"):
        launch, _ = begin_launch(store, open_run(store), on_passed_over=passed_over.append)
    name = launch.resume_from.name if launch.resume_from else None
    names = [
        name
        for name in (text.split()[0] for text in passed_over)
        if not name.startswith("launches/")
    ]
    return {"resume_from": name, "chosen_by": launch.chosen_by, "passed_over": names}


def describe(checkpoint, tensor):
    content = content_of(checkpoint, tensor, ckptfmt.Box.whole(tensor.global_shape))
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.global_shape),
        "blake3": blake3(content).hexdigest(),
        "first16": content[:16].hex(),
    }


def content_of(checkpoint, tensor, box):
    return b"".join(bytes(content) for _, content in checkpoint.iter_content(tensor, box))


def title(key):
    field, name, scope = key
    return f"{field}/{name}" + ("" if scope == "global" else f"@{scope}")


def parse_title(text):
    field, _, name = text.partition("/")
    stem, _, scope = name.rpartition("@")
    return (field, stem, scope) if scope.startswith("lw/") and stem else (field, name, "global")


def answer_reshard(path, request):
    with phase("open"):
        checkpoint = ckptfmt.open(path)
    boxes = [
        ckptfmt.Box(tuple(b for b, _ in box), tuple(e - b for b, e in box))
        for box in request["boxes"]
    ]
    with phase("read"):
        tensor = checkpoint.find(*parse_title(request["tensor"]))
        return {
            "digests": [blake3(content_of(checkpoint, tensor, box)).hexdigest() for box in boxes]
        }


def answer_read(path, request):
    (digest,) = answer_reshard(path, request | {"boxes": [request["box"]]})["digests"]
    return {"blake3": digest}


def answer_context(path, request):
    if "loader" in request:
        return answer_loader(path, request["loader"])
    content = (path / "tree.msgpack").read_bytes()
    with phase("open" if request else "read"):
        value = parse_tree(content, where="tree.msgpack")
        if "samples" in request:
            return answer_samples(value, request["samples"])
        if "tickets" in request:
            return answer_tickets(value, request["tickets"])
    return {
        "tree": tagged(
            msgpack.unpackb(dump_tree(value, where="tree.msgpack"), strict_map_key=False)
        )
    }


def answer_tickets(cursor, asked):
    """As one that knows its data goes on with a pipeline."""
    found = {}
    alone = {"worker": 0, "worker_count": 1}
    sampler = sampler_for(cursor, alone)
    if "issued" in asked:
        tickets = {ticket.position: ticket for ticket in sampler.issue(asked["issued"])}
        for step in asked["steps"]:
            sampler.consume(map(tickets.__getitem__, step["consume"]))
            sampler.discard(map(tickets.__getitem__, step["discard"]))
            sampler.advance()
        cursor = sampler.state_dict()
        found = {"pipeline": cursor["pipeline"], "ledger": cursor["ledger"]}
        sampler = sampler_for(cursor, alone)
    rows = [[at.position, at.source, at.epoch, at.sample] for at in sampler.issue(asked["count"])]
    return {"tickets": rows, **found}


def answer_samples(cursor, asked):
    """As one that knows its data goes on: the sampler is made by hand, and the cursor loaded into it."""
    found = {}
    sampler = sampler_for(cursor, asked)
    if "fetched" in asked:
        batches = iter(sampler)
        for _ in range(asked["fetched"]):
            next(batches)
        sampler.commit(sampler.steps_done + asked["done"])
        cursor = sampler.state_dict()
        found = {"commit": cursor["commit"], "ledger": cursor["ledger"]}
        sampler = sampler_for(cursor, asked)
    steps = []
    for batch, step in zip(
        sampler, range(sampler.steps_done, sampler.steps_done + asked["steps"]), strict=False
    ):
        named = (
            batch
            if "mixture" in cursor
            else [(cursor["sources"][0]["id"], sample) for sample in batch]
        )
        rows = zip(named, sampler.epochs(step), sampler.weights(step), strict=True)
        steps.append([[name, epoch, sample, weight] for (name, sample), epoch, weight in rows])
    return {"steps": steps, **found}


def sampler_for(cursor, asked):
    worker = (asked["worker"], asked["worker_count"])
    mixture, sources = (
        cursor.get("mixture"),
        {source["id"]: source["n"] for source in cursor["sources"]},
    )
    if mixture is not None and mixture["seed"] != cursor["order"]["seed"]:
        return ckptfmt.Sampler.from_state_dict(cursor, worker=worker)
    (name, n), *_ = sources.items()
    sampler = ckptfmt.Sampler(
        sources if mixture else n,
        global_batch=cursor["plan"]["global_batch"],
        seed=cursor["order"]["seed"],
        worker=worker,
        source=name,
        mixture=mixture and {stage["from_pos"]: stage["counts"] for stage in mixture["stages"]},
        tail=cursor["plan"]["tail"],
        pipeline="pipeline" in cursor,
    )
    sampler.load_state_dict(cursor)
    return sampler


def answer_loader(path, asked):
    checkpoint = ckptfmt.open(path)
    saved = next(checkpoint.leaf(*key) for key in checkpoint.leaves if key[0] == "data")
    given: list[Any] = []
    is_of_run = saved["per"] == "run"
    loader = type("Loader", (SimpleNamespace,), {"__iter__": lambda _: iter(())})(
        state_dict=lambda: given[-1] if given else None, load_state_dict=given.append
    )
    counts = SimpleNamespace(**dict.fromkeys(saved["state"]))
    members = {"lib": saved["lib"], "worker_count": asked["worker_count"]}
    data = (
        ConsumedSamples(counts, names=tuple(saved["state"]), **members)
        if is_of_run
        else ckptfmt.PerWorker(ForeignLoader(loader, **members))
    )
    with phase("open"):
        report = restore(
            ckptfmt.State(data=data),
            checkpoint,
            worker=asked["worker"],
            worker_count=asked["worker_count"],
            allow={"streams", *(["loader"] if asked["allow"] else [])},
        )
    state = vars(counts) if is_of_run else loader.state_dict()
    content = dump_tree(state, where="")
    reported = any("LOADER_NOT_ELASTIC" in line for line in report.downgrades)
    return {"state": tagged(msgpack.unpackb(content)), "reported": reported}


def answer_write(request, folder, *, leaves):
    """What is written is read back by the reader of a stranger, the configuration too if leaves are asked for."""
    fields: dict[str, Any] = {}
    for key, wanted in request["tensors"].items():
        field, name, _ = parse_title(key)
        dtype = numpy_dtype(wanted["dtype"])
        content = (np.arange(dtype.itemsize * int(np.prod(wanted["shape"]))) % 251).astype(np.uint8)
        fields.setdefault(field, {})[name] = content.view(dtype).reshape(wanted["shape"])
    with phase("open"):
        state = ckptfmt.State(**fields, config=request.get("config"))
        ckptfmt.save(folder / "checkpoint", state, step=request["step"])
    read = read_checkpoint(folder / "checkpoint")
    tensors = {
        title(key): {
            "dtype": tensor["dtype"],
            "shape": list(tensor["shape"]),
            "blake3": blake3(tensor["bytes"]).hexdigest(),
            "first16": tensor["bytes"][:16].hex(),
        }
        for key, tensor in read["tensors"].items()
    }
    answer = {"tensors": tensors, "step": read["manifest"]["step"]}
    if leaves:
        answer["leaves"] = {
            "config/": tagged(
                msgpack.unpackb(dump_tree(read["leaves"]["config", "", "global"], where=""))
            )
        }
    return answer


def answer_parse(path, request):
    """The reference adapter's own table is the one place where forms and parsers stand side by side."""
    try:
        return dict(Reference().parse(path, request))
    except Rejected as answer:
        raise RefusedError(SimpleNamespace(code=answer.code), answer.phase) from answer


ANSWERS = {
    "open": answer_open,
    "read": answer_read,
    "reshard": answer_reshard,
    "context": answer_context,
    "parse": answer_parse,
}

"""A check of every byte of deltas: what they store, what they read from, and each thing that is wrong said once."""

import json
from typing import Any

import numpy as np
import pytest

from ckptfmt.digest import digest_bytes
from ckptfmt.documents.canonical import dump_document
from ckptfmt.documents.manifest import MANIFEST_NAME, checkpoint_name, pack_name, shard_name
from ckptfmt.errors import Code, err
from ckptfmt.read.decoding import Decoder
from ckptfmt.read.files import Closure
from ckptfmt.read.reader import Checkpoint
from ckptfmt.read.report import Report
from ckptfmt.read.verify import verify_checkpoint, verify_loadable, verify_run
from ckptfmt.run.lineage import begin_launch, open_run
from ckptfmt.store.memory import MemoryStore
from ckptfmt.store.protocol import call_each
from tests.builders import Forgery, code_of, error_of, parse_json, snapshot, tensor
from tests.chains import Saving, cast_chain
from tests.part_rows import rows_of
from tests.stores.faults import Fault, FaultStore

BLOCK = 4096
NAMES = [checkpoint_name(step, 1) for step in range(1, 5)]


def states(seed=5):
    """Weights of which some elements change by an ULP, and a frozen tensor; a block of `odd` becomes another."""
    rng = np.random.default_rng(seed)
    w, odd = rng.standard_normal((2, 6 * BLOCK // 4), dtype=np.float32)
    frozen = rng.standard_normal(3 * BLOCK // 4 + 5, dtype=np.float32)
    while True:
        yield snapshot(tensor("frozen", frozen), tensor("odd", odd), tensor("w", w))
        w, odd = w.copy(), odd.copy()
        w.view(np.uint32)[rng.choice(4 * BLOCK // 4, 300, replace=False)] += 1
        odd[: BLOCK // 4] = np.frombuffer(rng.bytes(BLOCK), np.float32)


def save_chain(*, seed=5, count=4):
    steps = states(seed)
    first = next(steps)
    saving = Saving(first, block_nbytes=BLOCK)
    saving.save(1, first)
    for step in range(2, count + 1):
        saving.save(step, next(steps))
    return saving.store.snapshot()


@pytest.fixture(scope="module")
def saved():
    return save_chain()


class Files(dict[str, bytes]):
    """The files of a run by path, which a test may damage, and the kind of place where they are then checked."""

    def __init__(self, files, home):
        super().__init__(files)
        self.home = home
        self._store: Any = None
        self._there: dict[str, bytes] = {}

    def stored(self):
        """Return a store that has these files, as they are now."""
        self._store = self._store or self.home.store()
        for path in self._there.keys() - self.keys():
            self._store.delete(path)
        changed = [path for path in self if self[path] != self._there.get(path)]
        call_each(self._store, lambda path: self._store.replace(path, self[path]), changed)
        self._there = dict(self)
        return self._store


@pytest.fixture
def files(saved, home):
    """A run of a full checkpoint and three deltas."""
    return Files(saved, home)


def manifest_of(files, step):
    return parse_json(files[f"{NAMES[step - 1]}/{MANIFEST_NAME}"])


def pack_of(files, step):
    """Name of a delta's only file."""
    return pack_name("weights", manifest_of(files, step)["attempt"], 0)


def shard_of(files):
    """Name of the full checkpoint's file."""
    return shard_name("weights", manifest_of(files, 1)["attempt"], 0)


def blocks_of(files, step):
    """First byte, last byte and encoding of all that a delta stores, by tensor and block."""
    part = Checkpoint(place(files, step)).read_part(0)
    found = {}
    for row in rows_of(part.holdings):
        for extent in row.boxes[0].extents:
            at = extent.byte_begin
            for number in range(extent.block_count):
                nbytes = (extent.stored_nbytes or (BLOCK,) * extent.block_count)[number]
                if extent.encoding != "same":
                    found[row.name, extent.block_begin + number] = at, at + nbytes, extent.encoding
                at += nbytes
    return found


def stored(files):
    return files.stored() if isinstance(files, Files) else MemoryStore.from_snapshot(files)


def place(files, step):
    return stored(files).at(NAMES[step - 1])


def flip(files, step, name, at):
    path = f"{NAMES[step - 1]}/{name}"
    content = bytearray(files[path])
    content[at] ^= 0x10
    files[path] = bytes(content)


def drop(files, step):
    for path in [path for path in files if path.startswith(NAMES[step - 1])]:
        del files[path]


def check(files, step, **members):
    report = Report(target="x", kind="checkpoint")
    verify_checkpoint(place(files, step), report, **members)
    assert report.valid == (not report.violations)
    assert json.loads(json.dumps(report.as_json()))["valid"] == report.valid
    return report


def check_run(files):
    report = Report(target="run", kind="run")
    verify_run(stored(files), report)
    return report


def found(report):
    """Codes and places, in order; each with clause and remedy."""
    assert all(violation.requirement and violation.remedy for violation in report.violations)
    assert {str(violation.code) for violation in report.violations} <= {str(code) for code in Code}
    return [(str(violation.code), violation.where) for violation in report.violations]


# --- sound ----------------------------------------------------------------------------------------


def test_the_chain_has_every_kind_of_block(files):
    for step in (2, 3, 4):
        blocks = blocks_of(files, step)
        assert {encoding for _, _, encoding in blocks.values()} == {"raw", blocks["w", 0][2]}
        assert blocks.keys() == {("odd", 0), *(("w", block) for block in range(4))}


@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_sound_checkpoint_and_its_closure(files, step):
    """REQ-OPN-009: every byte of its own is counted, and apart from these every byte of what it reads from."""
    report = check(files, step)

    assert (report.valid, report.warnings, list(report.checkpoints)) == (True, [], ["x"])
    assert {
        one.name: (one.path is not None, one.reason) for one in report.references
    } == dict.fromkeys(NAMES[: step - 1], (True, ""))
    assert [one.name for one in report.closure] == NAMES[: step - 1][::-1]
    assert all(one.valid for one in report.closure)
    sizes = {
        name: sum(
            len(content)
            for path, content in files.items()
            if path.startswith(name) and MANIFEST_NAME not in path
        )
        for name in NAMES
    }
    assert report.own_nbytes == sizes[NAMES[step - 1]]
    assert {one.name: one.nbytes for one in report.closure} == {
        name: sizes[name] for name in NAMES[: step - 1]
    }


def test_a_sound_run(files):
    report = check_run(files)

    assert (report.valid, list(report.checkpoints), report.closure) == (True, NAMES, [])
    assert len(report.references) == 1 + 2 + 3


def test_of_a_chain_each_block_is_decoded_once(files, monkeypatch):
    decoded = []
    decode = Decoder.content

    def count(self, stored, block):
        if (stored, block) not in self.contents and stored.extent_of(block).is_encoded:
            decoded.append((stored.opened.files.digest, stored.row, block))
        return decode(self, stored, block)

    monkeypatch.setattr(Decoder, "content", count)
    assert check_run(files).valid
    assert len(decoded) == len(set(decoded)) == 3 * 4
    decoded.clear()
    assert check(files, 4).valid
    assert len(decoded) == len(set(decoded)) == 3 * 4


def test_a_check_reads_encoded_blocks_as_a_load_does(saved, monkeypatch):
    """It planned and decoded beside the reader: each block by itself, in a request of its own."""
    files = dict(saved)
    asked: list[str] = []
    read_range = MemoryStore.read_range

    def count(self, path, begin, nbytes):
        asked.append(path)
        return read_range(self, path, begin, nbytes)

    monkeypatch.setattr(MemoryStore, "read_range", count)
    assert loadable(files, 2).valid

    # The header; the raw block; and all four encoded blocks at once.
    assert asked.count(pack_of(files, 2)) == 3


def test_bases_may_lie_elsewhere(files):
    elsewhere = MemoryStore.from_snapshot(
        {path: content for path, content in files.items() if "l0001/" in path}
    )
    own = {path: content for path, content in files.items() if path.startswith(NAMES[3])}

    assert {code for code, _ in found(check(own, 4))} == {"BASE_MISSING"}
    for bases in ([elsewhere], [elsewhere.at(name) for name in NAMES]):
        report = check(own, 4, bases=bases)
        assert (report.valid, len(report.closure)) == (True, 3)


# --- bases ----------------------------------------------------------------------------------------


def test_a_base_that_was_deleted_by_hand_is_said_once(files):
    """REQ-DEL-020: not for each block; what is stored is checked all the same."""
    begin, end, _ = blocks_of(files, 4)["w", 2]
    flip(files, 4, pack_of(files, 4), begin)
    drop(files, 1)
    report = check(files, 4)

    assert found(report) == [
        ("BASE_MISSING", NAMES[0]),
        ("BLOCK_DIGEST", f"{pack_of(files, 4)}[{begin}:{end}]"),
    ]
    assert [one.reason for one in report.references if one.name == NAMES[0]] == ["BASE_MISSING"]
    assert [one.name for one in report.closure] == NAMES[1:3][::-1]


def test_each_base_is_looked_for_once(files, monkeypatch):
    """REQ-DEL-020: whether it is there or not, and however many blocks are read from it."""
    looked: list[str] = []
    find = Closure.find

    def count(self, reference):
        looked.append(reference.name)
        return find(self, reference)

    monkeypatch.setattr(Closure, "find", count)
    assert check(files, 4).valid
    assert sorted(looked) == NAMES[:3]
    looked.clear()
    drop(files, 1)
    assert not loadable(files, 4).valid
    assert sorted(looked) == NAMES[:3]


def test_in_a_run_every_delta_misses_a_base_that_was_deleted(files):
    drop(files, 1)

    assert found(check_run(files)) == [("BASE_MISSING", f"{name}/{NAMES[0]}") for name in NAMES[1:]]


def test_a_base_that_was_replaced_by_another_of_the_same_step(files):
    """REQ-DEL-020: by its digest it is another one, whatever its name says."""
    other = save_chain(seed=6, count=1)
    drop(files, 1)
    files |= {path: content for path, content in other.items() if path.startswith(NAMES[0])}
    report = check(files, 2)

    assert found(report) == [("BASE_MISMATCH", NAMES[0])]
    assert report.closure == []
    assert ("RUN_MISMATCH", f"{NAMES[0]}/{MANIFEST_NAME}") in found(check_run(files))


def test_damage_in_a_base_is_said_once_and_there(files):
    """REQ-DEL-023: of all that can't be decoded for it, nothing is said to be damaged itself."""
    name = shard_of(files)
    begin = len(files[f"{NAMES[0]}/{name}"]) - 6 * BLOCK  # the first block of `w`
    flip(files, 1, name, begin + 5)
    place_of_block = f"{NAMES[0]}/{name}[{begin}:{begin + BLOCK}]"
    report = check(files, 4)

    assert found(report) == [("BLOCK_DIGEST", place_of_block)]
    assert (report.own_violation_count, [one.name for one in report.closure if not one.valid]) == (
        0,
        NAMES[:1],
    )
    assert found(check_run(files)) == [("BLOCK_DIGEST", place_of_block)]


def test_damage_in_the_middle_of_a_chain_is_said_once_and_there(files):
    begin, end, _ = blocks_of(files, 3)["w", 1]
    flip(files, 3, pack_of(files, 3), end - 1)
    where = f"{pack_of(files, 3)}[{begin}:{end}]"

    assert found(check(files, 3)) == [("BLOCK_DIGEST", where)]
    assert found(check(files, 4)) == [("BLOCK_DIGEST", f"{NAMES[2]}/{where}")]
    assert found(check_run(files)) == [("BLOCK_DIGEST", f"{NAMES[2]}/{where}")]


@pytest.mark.parametrize("what", ["index", "parts/"])
def test_a_damaged_document_of_a_base_is_said_once_and_there(files, what):
    (path,) = [path for path in files if path.startswith(f"{NAMES[0]}/{what}")]
    flip(files, 1, path.removeprefix(f"{NAMES[0]}/"), 100)

    for report in (check(files, 4), check_run(files)):
        ((code, where),) = found(report)
        assert code.startswith(("DOC_", "MSGPACK_"))
        assert where.startswith(path)


def test_what_lies_around_is_a_warning(files):
    files[f"{NAMES[0]}/notes.txt"] = b"mine"

    assert check(files, 2).warnings == [
        f"{NAMES[0]}/notes.txt doesn't belong to the checkpoint; readers ignore it"
    ]


def test_a_ring_that_was_made_by_hand_has_a_name(files):
    """REQ-DEL-021: two manifests can't name each other by their digests; one of them is another one then."""
    signed = manifest_of(files, 2)
    signed["references"].append({"name": NAMES[2], "digest": Checkpoint(place(files, 3)).digest})
    signed["references"].sort(key=lambda reference: reference["digest"])
    files[f"{NAMES[1]}/{MANIFEST_NAME}"] = dump_document(signed)

    assert found(check(files, 3)) == [("BASE_MISMATCH", NAMES[1])]
    assert found(check(files, 2))[0] == ("REFERENCE_CLOSURE", f"{MANIFEST_NAME}#/signed/references")
    assert {code for code, _ in found(check_run(files))} == {
        "BASE_MISMATCH",
        "REFERENCE_CLOSURE",
        "DOC_MISMATCH",
    }
    assert code_of(lambda: Checkpoint(place(files, 3)).read("weights", "w")) == Code.BASE_MISMATCH
    signed["references"] = [one for one in signed["references"] if one["name"] != NAMES[2]]
    signed["references"].append(
        {"name": NAMES[1], "digest": Checkpoint(place(files, 2)).digest}
    )  # itself
    signed["references"].sort(key=lambda reference: reference["digest"])
    files[f"{NAMES[1]}/{MANIFEST_NAME}"] = dump_document(signed)
    assert found(check(files, 2))[0] == ("BASE_MISMATCH", NAMES[1])


def test_references_that_leave_out_what_a_base_reads_from(files):
    """REQ-DEL-021."""
    signed = manifest_of(files, 3)
    signed["references"] = [one for one in signed["references"] if one["name"] == NAMES[1]]
    files[f"{NAMES[2]}/{MANIFEST_NAME}"] = dump_document(signed)

    assert [code for code, _ in found(check(files, 3))] == ["REFERENCE_CLOSURE", "DOC_MISMATCH"]
    assert found(check(files, 3))[0][1] == f"{MANIFEST_NAME}#/signed/references"


# --- own bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [("w", 0), ("w", 3), ("odd", 0)], ids=str)
def test_a_flipped_bit_of_what_is_stored(files, at):
    """REQ-OPN-006, REQ-DEL-008: by its byte range, whether it is encoded or raw."""
    begin, end, _ = blocks_of(files, 2)[at]
    for byte in (begin, end - 1):
        damaged = Files(files, files.home)
        flip(damaged, 2, pack_of(files, 2), byte)
        report = check(damaged, 2)
        assert found(report) == [("BLOCK_DIGEST", f"{pack_of(files, 2)}[{begin}:{end}]")]
        assert (report.own_violation_count, report.closure[0].valid) == (1, True)


def test_every_damaged_block_is_named_in_order(files):
    blocks = blocks_of(files, 2)
    for begin, _, _ in blocks.values():
        flip(files, 2, pack_of(files, 2), begin)

    assert {where for _, where in found(check(files, 2))} == {
        f"{pack_of(files, 2)}[{begin}:{end}]" for begin, end, _ in blocks.values()
    }


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda content: content[:-1], "FILE_NBYTES"),
        (lambda content: content + b"x", "FILE_NBYTES"),
    ],
    ids=["short", "long"],
)
def test_a_pack_of_another_size(files, edit, code):
    """REQ-CKP-003: said once, though no block of it can be decoded."""
    path = f"{NAMES[1]}/{pack_of(files, 2)}"
    files[path] = edit(files[path])

    assert found(check(files, 2)) == [(code, pack_of(files, 2))]
    assert found(check(files, 4)) == [(code, path)]
    assert found(check_run(files)) == [(code, path)]


def test_a_missing_pack(files):
    """REQ-CKP-004."""
    path = f"{NAMES[1]}/{pack_of(files, 2)}"
    del files[path]

    assert found(check(files, 2)) == [("FILE_MISSING", pack_of(files, 2))]
    assert found(check(files, 4)) == [("FILE_MISSING", path)]


def test_a_damaged_header_of_a_pack_keeps_nothing_of_it_from_being_checked(files):
    """REQ-PRT-008."""
    name, (begin, end, _) = pack_of(files, 2), blocks_of(files, 2)["w", 1]
    flip(files, 2, name, 20)
    flip(files, 2, name, begin)

    assert found(check(files, 2)) == [
        ("HEADER_DIGEST", f"{name}[0:64]"),
        ("BLOCK_DIGEST", f"{name}[{begin}:{end}]"),
    ]


# --- documents that lie under valid digests -------------------------------------------------------


def forge(files, step, edit):
    """Edit the documents of a checkpoint, and make digests fit again."""
    name = NAMES[step - 1]
    forgery = Forgery(
        {path.removeprefix(f"{name}/"): one for path, one in files.items() if path.startswith(name)}
    )
    edit(forgery)
    return files | {
        f"{name}/{path}": content for path, content in forgery.store().snapshot().items()
    }


def test_features_references_and_summaries_follow_from_the_parts(files):
    """REQ-DEL-021, REQ-MAN-006."""

    def more_features(forgery):
        forgery.manifest["features"]["reader"] = ["adam", *forgery.manifest["features"]["reader"]]

    def other_references(forgery):
        forgery.manifest["references"] = sorted(
            [
                *forgery.manifest["references"],
                {"name": NAMES[3], "digest": Checkpoint(place(files, 4)).digest},
            ],
            key=lambda one: one["digest"],
        )

    def other_sizes(forgery):
        forgery.manifest["fields"]["weights"]["stored_nbytes"] += 1

    assert found(check(forge(files, 2, more_features), 2)) == [
        ("DOC_MISMATCH", f"{MANIFEST_NAME}#/signed/features"),
    ]
    assert ("DOC_MISMATCH", f"{MANIFEST_NAME}#/signed/references") in found(
        check(forge(files, 3, other_references), 3)
    )
    assert found(check(forge(files, 2, other_sizes), 2)) == [
        ("MANIFEST_SUMMARY", f"{MANIFEST_NAME}#/signed/fields")
    ]


def test_content_that_is_not_what_the_part_says(files):
    """REQ-DEL-008, REQ-DEL-022: by encoding, each where it shows."""
    rows = {("frozen", 0): 0, ("odd", 0): 4, ("w", 0): 10}
    outcomes = {}
    for at, row in rows.items():

        def edit(forgery, row=row):
            digests = bytearray(forgery.parts[0]["digests"])
            digests[row * 32 : (row + 1) * 32] = digest_bytes(b"another")
            forgery.parts[0]["digests"] = bytes(digests)

        outcomes[at] = found(check(forge(files, 2, edit), 2))
    blocks, pack = blocks_of(files, 2), pack_of(files, 2)
    raw, encoded = blocks["odd", 0], blocks["w", 0]
    assert outcomes["odd", 0] == [("BLOCK_DIGEST", f"{pack}[{raw[0]}:{raw[1]}]")]
    assert outcomes["w", 0] == [("DECODED_DIGEST", f"{pack}[{encoded[0]}:{encoded[1]}]")]
    attempt = manifest_of(files, 2)["attempt"]
    assert outcomes["frozen", 0] == [("BASE_BLOCK", f"parts/{attempt}-00000.msgpack")]


def test_a_base_of_other_shapes_lacks_the_blocks(files):
    """REQ-DEL-022: said for the box, not for the reader that meets it."""
    other = Saving(snapshot(tensor("w", np.zeros(5, np.float32))), block_nbytes=BLOCK)
    other.save(1, snapshot(tensor("w", np.zeros(5, np.float32))))
    base = {
        path: content
        for path, content in other.store.snapshot().items()
        if path.startswith(NAMES[0])
    }
    reference = {"name": NAMES[0], "digest": Checkpoint(other.place(1)).digest}

    def edit(forgery):
        forgery.manifest["references"] = [reference]
        row = {
            "name": NAMES[0],
            "digest": bytes.fromhex(reference["digest"].removeprefix("blake3:")),
        }
        forgery.parts[0]["references"] = [row]

    report = check(forge({**files, **base}, 2, edit) | base, 2)
    assert {code for code, _ in found(report)} == {"BASE_BLOCK"}


# --- before a launch ------------------------------------------------------------------------------


def loadable(files, step):
    report = Report(target="x", kind="checkpoint")
    verify_loadable(place(files, step), report)
    return report


def test_what_a_launch_resumes_from_is_whole_with_its_bases(files):
    """REQ-RUN-012: a block that it needs of a base counts as its own; one that it doesn't need doesn't."""
    assert loadable(files, 4).valid
    name, size = shard_of(files), len(files[f"{NAMES[0]}/{shard_of(files)}"])
    frozen, odd = size - 12 * BLOCK - (3 * BLOCK + 20), size - 12 * BLOCK
    damaged = Files(files, files.home)
    flip(damaged, 1, name, odd)  # the one block that every delta has anew
    assert loadable(damaged, 4).valid
    assert not check(damaged, 4).valid
    for at in (frozen, odd + 2 * BLOCK, odd + 6 * BLOCK):
        damaged = Files(files, files.home)
        flip(damaged, 1, name, at)
        ((code, where),) = found(loadable(damaged, 4))
        assert code == "BLOCK_DIGEST"
        assert where.startswith(f"{NAMES[0]}/{name}[{at}:")


@pytest.mark.parametrize("what", ["index", "parts/", "weights"])
def test_a_base_without_one_of_its_files_is_not_whole(files, what):
    (path,) = [path for path in files if path.startswith(f"{NAMES[0]}/{what}")]
    del files[path]

    assert found(loadable(files, 4))[0] == ("FILE_MISSING", path)


def test_a_launch_passes_over_a_delta_whose_base_is_damaged(files):
    """REQ-RUN-006, REQ-RUN-007, REQ-RUN-012."""
    begin, _, _ = blocks_of(files, 2)["w", 0]
    flip(files, 2, pack_of(files, 2), begin)
    store = stored(files)
    passed_over: list[str] = []
    launch: Any = begin_launch(store, open_run(store), on_passed_over=passed_over.append)[0]

    assert (launch.chosen_by, launch.resume_from.name) == ("fallback", NAMES[0])
    assert [sentence.split()[0] for sentence in passed_over] == NAMES[1:][::-1]
    assert all(
        f"{NAMES[1]}/{pack_of(files, 2)}[{begin}:" in sentence for sentence in passed_over[:2]
    )


def test_a_launch_that_finds_a_base_gone_says_so(files):
    drop(files, 1)
    store = stored(files)

    assert error_of(lambda: begin_launch(store, open_run(store))).code == Code.NO_VALID_CHECKPOINT


# --- the store, and this machine ------------------------------------------------------------------


@pytest.mark.long_on_s3
def test_an_error_of_the_store_is_raised_and_says_nothing_of_the_checkpoint(files):
    """REQ-OPN-009: it may be whole."""
    for fail_at in range(1, 400, 4):
        fault = Fault(fail_at=fail_at)
        report = Report(target="x", kind="checkpoint")
        store = FaultStore(stored(files), fault).at(NAMES[3])
        outcome = code_of(lambda store=store, report=report: verify_checkpoint(store, report))
        assert report.violations == []
        if not fault.fired_count:
            assert (outcome, fail_at > 40) == ("ok", True)
            return
        assert outcome == Code.STORE_IO
    raise AssertionError("no end of operations")


def test_a_thread_that_rounds_otherwise_cannot_check(files, monkeypatch):
    """REQ-PRE-003: that is no fault of the checkpoint's."""

    def refuse(*_, **__):
        raise err(Code.FLOAT_ENVIRONMENT, "flushed")

    monkeypatch.setattr("ckptfmt.codecs.encodings.decode", refuse)

    assert code_of(lambda: check(files, 2)) == Code.FLOAT_ENVIRONMENT


# --- groups ---------------------------------------------------------------------------------------


def test_a_sound_group():
    files = cast_chain().store.snapshot()

    assert check(files, 2).valid
    assert loadable(files, 2).valid


def test_damage_in_a_member_is_not_said_again_of_what_is_predicted_from_it():
    """REQ-DEL-007: of the block that is damaged, whoever needs it."""
    files = cast_chain().store.snapshot()
    name = pack_name("optimizer", manifest_of(files, 2)["attempt"], 0)
    part = Checkpoint(place(files, 2)).read_part(0)
    extent = (
        next(row for row in rows_of(part.holdings) if row.field == "optimizer").boxes[0].extents[0]
    )
    end = extent.byte_begin + extent.stored_nbytes[0]
    flip(files, 2, name, end - 1)

    assert found(check(files, 2)) == [("BLOCK_DIGEST", f"{name}[{extent.byte_begin}:{end}]")]
    assert found(check_run(files)) == [
        ("BLOCK_DIGEST", f"{NAMES[1]}/{name}[{extent.byte_begin}:{end}]")
    ]

"""A check of every byte: it collects what is wrong, each with its place, and goes on."""

import json

import numpy as np

from ckptfmt.errors import Code
from ckptfmt.read.report import Report
from ckptfmt.read.verify import verify_checkpoint, verify_run
from tests.builders import ATTEMPT, code_of, leaf, save, small_files, snapshot, tensor, verify
from tests.homes import files_of
from tests.run.test_lineage import RunOfSteps
from tests.stores.faults import Fault, FaultStore

SHARD = f"weights-{ATTEMPT}-00000.safetensors"


def check_run(made):
    report = Report(target="run", kind="run")
    verify_run(made.store, report)
    return report


def test_a_sound_checkpoint(home):
    """REQ-OPN-009: every byte of parts, index and shards is counted."""
    files = small_files()
    report = verify(home.store(files))
    assert (report.valid, report.warnings) == (True, [])
    assert report.nbytes == sum(
        len(content) for path, content in files.items() if path != "manifest.json"
    )
    assert list(report.checkpoints) == ["x"]
    assert json.loads(json.dumps(report.as_json()))["valid"] is True


def test_everything_that_is_wrong_is_collected(home):
    """REQ-OPN-006, REQ-PRT-008, REQ-CKP-003, REQ-CKP-004: with byte ranges, and without repeating itself."""
    # REQ-ERR-002
    array = np.arange(40_000, dtype=np.uint8)
    store = home.store()
    save(
        store,
        snapshot(
            tensor("w", array),
            tensor("v", array),
            tensor("m", array, field="optimizer"),
            leaves=[leaf("config", 1)],
        ),
        snapshot(
            tensor("u", array), tensor("n", array, field="optimizer"), leaves=[leaf("data", 1)]
        ),
        snapshot(tensor("t", array)),
    )
    files = files_of(store)
    content = bytearray(files[SHARD])
    data = len(content) - 80_000
    content[20] ^= 1  # header
    for at in (0, 4095, 4096, 79_999):
        content[data + at] ^= 1
    files[SHARD] = bytes(content)
    del files[f"optimizer-{ATTEMPT}-00001.safetensors"]
    files[f"optimizer-{ATTEMPT}-00000.safetensors"] += b"x"
    files[f"parts/{ATTEMPT}-00002.msgpack"] = b""
    report = verify(home.store(files))
    assert sorted(
        (str(violation.code), violation.where) for violation in report.violations
    ) == sorted(
        [
            ("FILE_NBYTES", f"optimizer-{ATTEMPT}-00000.safetensors"),
            ("HEADER_DIGEST", f"{SHARD}[0:{data}]"),
            ("BLOCK_DIGEST", f"{SHARD}[{data}:{data + 4096}]"),
            ("BLOCK_DIGEST", f"{SHARD}[{data + 4096}:{data + 8192}]"),
            ("BLOCK_DIGEST", f"{SHARD}[{data + 40_000 + 36_864}:{data + 80_000}]"),
            ("FILE_MISSING", f"optimizer-{ATTEMPT}-00001.safetensors"),
            ("FILE_NBYTES", f"parts/{ATTEMPT}-00002.msgpack"),
        ]
    )
    assert all(violation.remedy and violation.requirement for violation in report.violations)
    shown = json.loads(json.dumps(report.as_json()))
    assert shown["valid"] is False
    assert {violation["code"] for violation in shown["violations"]} <= {str(code) for code in Code}


def test_damaged_trees_are_all_named(home):
    """REQ-TRE-001."""
    import dataclasses  # noqa: PLC0415

    leaves = [dataclasses.replace(leaf("config", 1, name=name), value=b"\xc1") for name in "ab"]
    store = home.store()
    save(store, snapshot(leaves=leaves))
    violations = verify(store).violations
    assert [str(violation.where).rpartition("/")[2] for violation in violations] == ["a", "b"]


def test_an_error_of_the_store_is_raised_and_says_nothing_of_the_checkpoint(home):
    """REQ-OPN-009: it may be whole."""
    kept = home.store(small_files())
    for fail_at in range(1, 60):
        # Of a remote store parts are read ahead; what fails then is asked for again.
        fault = Fault(fail_at=fail_at, sticky=kept.is_remote)
        report = Report(target="x", kind="checkpoint")
        store = FaultStore(kept, fault)
        outcome = code_of(lambda store=store, report=report: verify_checkpoint(store, report))
        assert report.violations == []
        if not fault.fired_count:
            assert (outcome, fail_at > 20) == ("ok", True)
            return
        assert outcome == Code.STORE_IO
    raise AssertionError("no end of operations")


def test_a_sound_run(home):
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2)
    made.begin()
    made.save(3)
    report = check_run(made)
    assert report.valid
    assert list(report.checkpoints) == [
        "step-00000001-l0001",
        "step-00000002-l0001",
        "step-00000003-l0002",
    ]


def test_a_run_is_checked_to_its_end(home):
    """REQ-RUN-003, REQ-RUN-005, REQ-MAN-002: each violation under the name of its checkpoint."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1, 2, 3)
    made.damage(1, 1)
    made.save(4, run_id="0" * 32)
    for path in made.store.list("step-00000003-l0001"):
        made.store.create(
            path.replace("step-00000003", "step-00000007"),
            [made.store.read(path, limit_nbytes=10_000)],
        )
    made.store.create(
        "launches/0002.json", [made.store.read("launches/0001.json", limit_nbytes=10_000)]
    )
    made.store.create("launches/0003.json", [b"{}"])
    made.store.create("step-00000009-l0001/parts/x", [b""])
    report = check_run(made)
    assert sorted(
        (str(violation.code), violation.where.partition("[")[0]) for violation in report.violations
    ) == [
        ("BLOCK_DIGEST", f"step-00000001-l0001/weights-{1:08x}{1:08x}-00000.safetensors"),
        ("DOC_SCHEMA", "launches/0003.json"),
        ("RUN_MISMATCH", "launches/0002.json"),
        ("RUN_MISMATCH", "step-00000004-l0001/manifest.json"),
        ("STEP_MISMATCH", "step-00000007-l0001/manifest.json"),
    ]
    assert report.warnings == ["step-00000009-l0001/ isn't committed; readers ignore it"]


def test_a_run_without_its_record(home):
    """REQ-RUN-001."""
    made = RunOfSteps(home.store())
    made.begin()
    made.save(1)
    made.store.delete("run.json")
    report = check_run(made)
    assert [(violation.code, violation.where) for violation in report.violations] == [
        (Code.FILE_MISSING, "run.json")
    ]
    assert list(report.checkpoints) == ["step-00000001-l0001"]


def test_progress_is_told_in_bytes(home):
    told: list[int] = []
    report = Report(target="x", kind="checkpoint", on_progress=told.append)
    verify_checkpoint(home.store(small_files()), report)
    assert sum(told) == report.nbytes

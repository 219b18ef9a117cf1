"""What was parsed before isn't parsed again, as long as somebody remembers; files are read anew."""

from types import SimpleNamespace

import numpy as np
import pytest

import ckptfmt
from ckptfmt.commit import decision
from ckptfmt.commit.decision import Known, read_register
from ckptfmt.documents import part, tables
from ckptfmt.documents.manifest import Abort, Manifest, parse_register
from ckptfmt.documents.tables import TensorTable, parse_tensor_table
from ckptfmt.errors import Code
from ckptfmt.run.retention import Retention, tidy_up
from tests.builders import code_of, snapshot, tensor
from tests.chains import Saving


@pytest.fixture
def parsed(monkeypatch):
    """Contents of registers that were parsed."""
    found: list[bytes] = []

    def note(content):
        found.append(content)
        return parse_register(content)

    monkeypatch.setattr(decision, "parse_register", note)
    return found


def register(step):
    return Abort(run_id=None, launch=None, step=step, reason="a test").dump()


def test_the_same_bytes_are_parsed_once_by_whoever_remembers(parsed):
    one = Known()
    first = one.parse_register(register(1))
    assert one.parse_register(register(2)) != first
    assert one.parse_register(bytes(bytearray(register(1)))) == first
    assert len(parsed) == 2
    Known().parse_register(register(1))
    assert len(parsed) == 3


def test_what_is_refused_is_refused_again(parsed):
    one, damaged = Known(), register(1).replace(b"test", b"tost")
    for count in (1, 2):
        assert code_of(lambda: one.parse_register(damaged)) == Code.DOC_DIGEST
        assert len(parsed) == count


def test_those_asked_for_longest_ago_are_forgotten(parsed, monkeypatch):
    monkeypatch.setattr(decision, "_COUNT", 2)
    one = Known()
    for step in (1, 2, 1, 3, 1, 2):
        one.parse_register(register(step))
    assert parsed == [register(step) for step in (1, 2, 3, 2)]


def test_a_register_is_read_anew():
    """What was remembered is what bytes mean, not what a file held."""
    one = Known()
    saving = Saving(snapshot(tensor("w", np.zeros(4, np.float32))))
    saving.save(1, snapshot(tensor("w", np.zeros(4, np.float32))))
    assert isinstance(read_register(saving.place(1), known=one), Manifest)
    saving.place(1).replace("manifest.json", register(1))
    assert isinstance(read_register(saving.place(1), known=one), Abort)


def test_a_save_parses_as_many_registers_however_long_its_chain_is(parsed):
    """Else the thirtieth delta would take longer for those of its bases than for what it stores."""
    array = np.arange(4096, dtype=np.float32)
    counts = []
    saving = Saving(snapshot(tensor("w", array)))
    for step in range(1, 9):
        array[step] += 1
        del parsed[:]
        assert saving.save(step, snapshot(tensor("w", array.copy()))).profile == (
            "delta" if step > 1 else "full"
        )
        launch = saving.launch.launch
        tidy_up(saving.store, saving.run, launch=launch, retention=Retention(), known=saving.known)
        counts.append(len(parsed))
    assert max(counts) == 1  # its own


def test_a_table_of_tensors_is_parsed_once_for_all_saves_of_one_structure(monkeypatch):
    parsed = []

    def note(*given, known):
        before = len(known)
        table = parse_tensor_table(*given, known=known)
        parsed.extend([table] * (len(known) - before))
        return table

    # Of parts alone: an index has its table parsed each time that it is opened.
    monkeypatch.setattr(
        part, "tables", SimpleNamespace(**{**vars(tables), "parse_tensor_table": note})
    )
    one, other = (snapshot(tensor(name, np.zeros(4, np.float32))) for name in ("one", "other"))

    def save(step, made):
        saving.save(step, made)
        with ckptfmt.open(saving.place(step)) as opened:
            return [tensor.name for tensor in opened.index.tensors], len(parsed)

    saving = Saving(one, known=Known())
    assert [save(step, one) for step in (1, 2, 3)] == [(["one"], 1)] * 3
    saving = Saving(other, known=saving.known)
    assert [save(step, other) for step in (1, 2)] == [(["other"], 2)] * 2
    saving = Saving(one)
    assert [save(step, one)[1] for step in (1, 2)] == [3, 3]


def test_too_many_tables_are_forgotten(monkeypatch):
    monkeypatch.setattr(decision, "_TABLE_COUNT", 2)
    one = Known()
    for count in (1, 2, 0, 1):
        one.tables[bytes([len(one.tables)])] = TensorTable.of([])
        one.limit_tables()
        assert len(one.tables) == count

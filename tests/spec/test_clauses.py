"""The clauses of the specification: well-formed, tied to code, schemas, tables and tests, in both directions."""

import functools
import re

import pytest

from ckptfmt import limits
from ckptfmt.dtypes import DTYPES
from ckptfmt.errors import Code
from conformance.generate.fences import REFUSAL
from tests.house.sources import python_files, repository_files
from tests.spec.pages import (
    LABEL,
    ROOT,
    SCHEMA,
    SPEC,
    STRENGTH,
    clauses,
    fences,
    page,
    pages,
    table,
)
from tests.spec.uncited import cited_labels, listed_labels, uncited_labels
from tests.spec.views import load_schema

PAGE_LINES = 400
#: Tables that are made of other pages: nobody reads them from end to end.
MADE = ("96-fields.md", "97-coverage.md")
DECISION_LINES = 60

LABELS = {clause.label for clause in clauses()}
CODE_NAMES = {str(code) for code in Code}
LIMITS = {
    name: value
    for name, value in vars(limits).items()
    if name.isupper() and name not in ("FORMAT_VERSION", "TYPE_CHECKING")
}
SCHEMAS = sorted(path.name.removesuffix(".schema.json") for path in SCHEMA.glob("*.schema.json"))
DECISIONS = sorted((SPEC / "decisions").glob("*.md"))

#: Keywords of JSON Schema that forbid something.
CONSTRAINTS = {
    "additionalProperties", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength",
    "maximum", "minItems", "minLength", "minimum", "multipleOf", "pattern", "propertyNames", "required", "uniqueItems",
}  # fmt: skip


# --- form -----------------------------------------------------------------------------------------


def test_labels_are_unique():
    labels = [clause.label for clause in clauses()]

    assert len(labels) == len(set(labels)), sorted(
        label for label in LABELS if labels.count(label) > 1
    )


@pytest.mark.parametrize("clause", clauses(), ids=lambda clause: clause.label)
def test_a_clause_says_whom_it_binds_and_how_strongly(clause):
    if clause.withdrawn:
        return

    assert clause.roles, f"{clause.place} names no role"
    assert len(STRENGTH.findall(clause.text)) == 1, (
        f"{clause.place} has another number of capital words than one"
    )
    assert set(clause.codes) <= CODE_NAMES
    assert all(re.match(r"Why: |untestable: ", note) for note in clause.notes), (
        f"{clause.place}: {clause.notes}"
    )


@pytest.mark.parametrize("one", pages(), ids=lambda one: one.name)
def test_capital_words_stand_in_clauses_only(one):
    lines = [*one.prose, *((0, note) for clause in one.clauses for note in clause.notes)]

    assert not [f"{one.name}:{number}: {line}" for number, line in lines if STRENGTH.search(line)]


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name)
def test_a_decision_is_one_page_and_binds_nobody(path):
    text = path.read_text("utf-8")

    assert text.count("\n") <= DECISION_LINES
    assert not STRENGTH.search(text)
    assert re.match(r"# .+\n\nStatus: (proposed|accepted|rejected|superseded by `.+`)\.\n", text)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Context", "## Options", "## Choice", "## Cost"
    ]  # fmt: skip
    assert set(LABEL.findall(text)) <= LABELS


@pytest.mark.parametrize("one", pages(), ids=lambda one: one.name)
def test_a_page_is_short_and_has_one_sentence_on_a_line(one):
    sentences = re.compile(r"(?<![0-9])[.!?]\*{0,2} +[*`A-Z]")
    crowded = [
        f"{one.name}:{number}: {line}"
        for number, line in one.prose
        if not line.startswith("|") and sentences.search(re.sub(r"`[^`]*`", "x", line))
    ]

    assert len(one.lines) <= PAGE_LINES or one.name in MADE
    assert not crowded, "\n".join(crowded)


@pytest.mark.parametrize("one", pages(), ids=lambda one: one.name)
def test_links_lead_somewhere(one):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", "\n".join(one.lines))

    assert all((one.path.parent / link).is_file() for link in links), links


# --- clauses and what cites them ------------------------------------------------------------------


@functools.cache
def cited_in_files():
    """The labels that code, tests and schemas cite, each with the files that do."""
    found: dict[str, list[str]] = {}
    for path in [
        *python_files("ckptfmt", "tests", "conformance", "benchmarks"),
        *SCHEMA.glob("*.json"),
    ]:
        for label in set(re.findall(r"REQ-[A-Z]+-[0-9]+", path.read_text("utf-8"))):
            found.setdefault(label, []).append(path.relative_to(ROOT).as_posix())
    return found


def test_what_is_cited_exists():
    assert not {label: files for label, files in cited_in_files().items() if label not in LABELS}


def test_what_the_pages_cite_exists():
    text = "\n".join(line for one in pages() for line in one.lines)

    assert set(LABEL.findall(text)) <= LABELS


def test_a_requirement_of_an_error_raised_in_the_code_names_its_code():
    """Where the code raises `Code.X` by a clause, that clause has X behind its arrow."""
    codes = {clause.label: set(clause.codes) for clause in clauses()}
    raised = re.compile(
        r'err\(\s*Code\.([A-Z_0-9]+),(?:(?!\berr\().)*?requirement="(REQ-[A-Z]{3}-[0-9]{3})"',
        re.DOTALL,
    )
    found = {
        (label, code)
        for path in python_files("ckptfmt")
        for code, label in raised.findall(path.read_text("utf-8"))
        if code != "DOC_SCHEMA" and code not in codes.get(label, set())
    }

    assert not sorted(found)


def test_every_testable_clause_is_cited_by_a_test_or_listed():
    """`uncited.txt` is exact: it names what no test cites, and nothing else. It gets shorter, never longer."""
    uncited, listed = uncited_labels(), listed_labels()

    assert not uncited - listed, "cite these in a test, for they are new"
    assert not listed - uncited, (
        "take these off tests/spec/uncited.txt: python -m tests.spec.uncited"
    )


def test_the_list_of_uncited_clauses_has_an_order():
    lines = [
        line
        for line in (ROOT / "tests/spec/uncited.txt").read_text("utf-8").splitlines()
        if line[:1] != "#"
    ]

    assert lines == sorted(set(lines))
    assert cited_labels() <= LABELS


# --- tables ---------------------------------------------------------------------------------------


def test_the_table_of_errors_is_that_of_the_code():
    rows = [tuple(cell.strip("`") for cell in row) for row in table("81-errors.md", "Code")]

    source = (ROOT / "ckptfmt/errors.py").read_text("utf-8")
    meanings = {
        code: meaning for meaning, code in re.findall(r"    #: (.+)\n    ([A-Z_]+) = \(", source)
    }
    assert rows == [(str(code), code.error.__name__, meanings[code]) for code in Code]


def test_every_code_of_a_refusal_is_the_code_of_a_clause_there():
    """An example that shows a clause shows a code that the clause names."""
    codes = {clause.label: clause.codes for clause in clauses()}
    wrong = [
        f"{fence.page}:{number}: {match[3]} doesn't name {match[2]}"
        for fence in fences()
        if fence.language != "python"
        for number, line in fence.numbered_lines()
        if (match := REFUSAL.fullmatch(line)) and match[2] not in ("DOC_SCHEMA", *codes[match[3]])
    ]

    assert not wrong, "\n".join(wrong)


def limit_rows():
    """The rows of both tables of limits: those of the core, and those of the other pages."""
    return [*table("90-limits.md", "Limit"), *table("91-more-limits.md", "Limit")]


def test_the_table_of_limits_is_that_of_the_code():
    rows = [(name.strip("`"), int(value.split()[0])) for name, value, _ in limit_rows()]

    assert len(dict(rows)) == len(rows), "a limit is in both tables"
    assert dict(rows) == LIMITS


def test_powers_in_the_table_of_limits_are_true():
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    for name, value, _ in limit_rows():
        exact, _, said = value.partition(" ")
        if power := re.fullmatch(r"\(2\^([0-9]+)( - 1)?\)", said):
            assert int(exact) == (1 << int(power[1])) - bool(power[2]), name
        elif amount := re.fullmatch(r"\(([0-9]+) ([KMG]iB)\)", said):
            assert int(exact) == int(amount[1]) * units[amount[2]], name
        else:
            assert not said, name


def test_the_table_of_dtypes_is_that_of_the_code():
    rows = [[cell.strip("`") for cell in row[:3]] for row in table("50-tensors.md", "dtype")]

    assert rows == [
        [dtype.name, str(dtype.nbytes), dtype.safetensors or ""] for dtype in DTYPES.values()
    ]


def test_the_version_is_that_of_the_code():
    assert f'`"{limits.FORMAT_VERSION}"`' in "\n".join(page("95-versions-and-extensions.md").lines)
    assert page("CHANGES.md").lines.index(f"## {limits.FORMAT_VERSION}")


# --- schemas --------------------------------------------------------------------------------------


def walk(schema, clause=None):
    """Yield each subschema with the clause that holds for it: its own `$comment`, or that of the nearest around it."""
    clause = schema.get("$comment", clause)
    yield schema, clause
    for keyword in ("additionalProperties", "items", "propertyNames"):
        if isinstance(schema.get(keyword), dict):
            yield from walk(schema[keyword], clause)
    for keyword in ("anyOf", "oneOf", "prefixItems"):
        for part in schema.get(keyword, []):
            yield from walk(part, clause)
    for keyword in ("properties", "$defs"):
        for part in schema.get(keyword, {}).values():
            yield from walk(part, clause)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_constraint_of_a_schema_carries_its_clause(name):
    bare = [
        schema
        for schema, clause in walk(load_schema(name))
        if CONSTRAINTS & schema.keys() and clause is None
    ]
    cited = {clause for _, clause in walk(load_schema(name)) if clause}

    assert not bare
    assert cited <= LABELS


@pytest.mark.parametrize("name", SCHEMAS)
def test_objects_of_a_schema_are_closed(name):
    for schema, _ in walk(load_schema(name)):
        if schema.get("type") == "object" and "properties" in schema:
            assert schema["additionalProperties"] is False
            optional = set(schema["properties"]) - set(schema["required"])
            assert optional <= {"durability", "metrics", "pipeline", "suspect", "tags"}, (
                "nothing is optional but what stands behind a feature"
            )


@pytest.mark.parametrize("name", SCHEMAS)
def test_numbers_of_a_schema_are_limits(name):
    known = {*LIMITS.values(), 0, 1, 2, 64, 100, 1000, (1 << 64) - 1, limits.DIM << 64}
    keywords = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")
    used = {
        schema[word] for schema, _ in walk(load_schema(name)) for word in keywords if word in schema
    }

    assert used <= known


def members():
    """The names of all members and the values of all enumerations of the schemas."""
    found = set()
    for name in SCHEMAS:
        for schema, _ in walk(load_schema(name)):
            found |= schema.get("properties", {}).keys()
            found |= {
                value
                for value in (*schema.get("enum", ()), schema.get("const"))
                if isinstance(value, str)
            }
    return found


#: Words in backticks that look like members and are none.
OTHER_WORDS = {
    "data_offsets", "packed_document",
    # a member of the ending in a step log, which has no schema
    "is_numeric",
    # members of a statement of model signing, which has a schema of its own
    "_type", "predicate", "resources",
    # what programs call generators and their states
    "torch", "generator", "get_state", "mt19937",
    # what programs call the way back of a state
    "load_state_dict",
    # members of the topology "local" of the reference writer, which is a tree and has no schema
    "unread_samplers", "still_data", "unsaved_shuffle",
    "shuffle_buffer", "unseeded_order", "undeclared_order", "early_epoch",
    # the kind of a cursor; that of another loader's position, and a member of it
    "ckptfmt", "data_cursor", "foreign_loader", "worker_count",
    # members of the position of a loader that is read epoch by epoch
    "process_count", "batch_count", "batch_size", "drop_last", "is_drawn",
    # stems of file names
    "_buffers", "_opaque",
    # the kind of a frozen base's location, and a member of a reference
    "frozen_base", "name_in_base",
    # the members that cursors of later versions may have
    "pipeline", "foreign",
}  # fmt: skip


@pytest.mark.parametrize("one", pages(), ids=lambda one: one.name)
def test_words_in_backticks_exist(one):
    """A word with an underscore is a member, a limit or a code; so is each step of a path with dots."""
    known = members() | OTHER_WORDS | set(DTYPES) | LIMITS.keys() | CODE_NAMES
    known |= {entry.safetensors for entry in DTYPES.values()} | {"__metadata__"}
    outside = [(0, clause.text) for clause in one.clauses] + list(one.prose)
    words = {
        (number, word)
        for number, line in outside
        for quoted in re.findall(r"`([^`]+)`", line)
        if re.fullmatch(r"[A-Za-z_0-9]*_[A-Za-z_0-9]*|[a-z_]+(\.[a-z_]+)+", quoted)
        and "." not in quoted[-9:]
        for word in quoted.split(".")
    }

    assert not sorted((number, word) for number, word in words if word not in known)


def test_no_page_is_left_out_of_the_repository():
    assert set(SPEC.rglob("*.md")) <= set(repository_files())

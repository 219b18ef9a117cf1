"""The distributions, built and installed: whole without the checkout, without torch, suite and tools, small."""

import email
import json
import re
import tarfile
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement

from ckptfmt.cli.commands import COMMANDS, TOOLS
from tests.distributions import Environment, build_once, run
from tests.house.sources import ROOT

pytestmark = pytest.mark.slow

NAMES = ("ckptfmt", "ckptfmt-conformance", "ckptfmt-tools")
SCHEMAS = {path.name: path.read_bytes() for path in (ROOT / "spec" / "schema").glob("*.json")}
LICENCE = (ROOT / "LICENSE").read_bytes()
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]

# What the installed package is asked, far from the checkout: where it lies, what came along, which
# schemas it finds.
QUESTION = """
import importlib.util, json, sys
import ckptfmt
from ckptfmt.documents.canonical import schema_text
names = json.loads(sys.argv[1])
print(json.dumps({
    "file": ckptfmt.__file__,
    "found": [name for name in ("torch", "ckptfmt_conformance", "ckptfmt_tools") if importlib.util.find_spec(name)],
    "schemas": {name: schema_text(name.removesuffix(".schema.json")) for name in names},
}))
"""

SAVE = """
import numpy, ckptfmt
ckptfmt.save("first", ckptfmt.State(weights={"w": numpy.arange(12.0).reshape(3, 4)}), step=1)
print(numpy.asarray(ckptfmt.open("first").weights["w"]).sum())
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return {name: build_once(tmp_path_factory, name) for name in NAMES}


@pytest.fixture(scope="module")
def wheel(built):
    return built["ckptfmt"][1]


@pytest.fixture(scope="module")
def alone(wheel, tmp_path_factory):
    """An environment with ckptfmt and what it requires: pip finds these, or fails."""
    environment = Environment(tmp_path_factory.mktemp("alone"), required_by(wheel))
    environment.install(wheel)
    return environment


def links_to(built):
    """The options of pip that find the built distributions."""
    return [word for _, wheel in built.values() for word in ("--find-links", wheel.parent)]


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def required_by(wheel):
    texts = metadata_of(wheel).get_all("Requires-Dist")
    return [need.name for text in texts if not (need := Requirement(text)).marker]


def test_the_wheel_carries_the_schemas_of_the_spec_and_nothing_else_of_the_checkout(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    carried = {
        name.removeprefix("ckptfmt/_schema/"): file
        for name, file in files.items()
        if "/_schema/" in name
    }

    assert SCHEMAS
    assert carried == SCHEMAS
    assert "ckptfmt/py.typed" in files
    assert {name.partition("/")[0] for name in files} == {"ckptfmt", f"ckptfmt-{VERSION}.dist-info"}


def test_the_wheel_is_small(wheel):
    """Of the package alone: no tests, no vectors, no specification."""
    assert wheel.stat().st_size < 1_200_000


@pytest.mark.parametrize("name", NAMES)
def test_wheel_and_source_have_the_licence_and_no_caches(built, name):
    source, wheel = built[name]
    stem = f"{name.replace('-', '_')}-{VERSION}"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.read(f"{stem}.dist-info/licenses/LICENSE") == LICENCE
    with tarfile.open(source) as archive:
        names += archive.getnames()
        licence = archive.extractfile(f"{stem}/LICENSE")
        assert licence
        assert licence.read() == LICENCE

    assert not [
        name for name in names if re.search(r"__pycache__|\.pyc$|/\.(?!gitignore$)|_cache/", name)
    ]


def test_readme_of_the_source_distribution_leads_to_files_of_it(built):
    with tarfile.open(built["ckptfmt"][0]) as archive:
        names = set(archive.getnames())
    links = re.findall(r"\]\(([^):#]+)\)", (ROOT / "README.md").read_text("utf-8"))

    assert len(links) > 20
    assert not [link for link in links if f"ckptfmt-{VERSION}/{link}" not in names]


@pytest.mark.parametrize("name", NAMES)
def test_the_text_for_a_package_index_has_no_link_into_the_checkout(built, name):
    text = metadata_of(built[name][1]).get_payload()

    assert not re.search(r"\]\((?!https?://)", text)
    if name == "ckptfmt":
        assert (
            "- Files are plain: JSON, msgpack and safetensors, with a specification"
            " (`spec/00-overview.md`)."
        ) in text
        assert 'pip install "ckptfmt[torch]"' in text


def test_the_wheel_works_in_an_environment_without_torch_and_without_the_suite(alone, tmp_path):
    answer = json.loads(
        run(alone.python, "-c", QUESTION, json.dumps(sorted(SCHEMAS)), cwd=tmp_path)
    )

    assert answer["file"].startswith(str(alone.bin.parent))
    assert answer["found"] == []
    assert {name: text.encode() for name, text in answer["schemas"].items()} == SCHEMAS


def test_the_installed_program_saves_validates_and_inspects(alone, tmp_path):
    program = alone.bin / "ckptfmt"

    assert run(program, "--version", cwd=tmp_path).startswith(f"ckptfmt {VERSION} (format ")
    assert run(alone.python, "-c", SAVE, cwd=tmp_path).strip() == "66.0"
    assert "valid" in run(program, "validate", "first", cwd=tmp_path)
    assert "96 B" in run(program, "inspect", "first", cwd=tmp_path)


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("conformance", "conformance"),
        *((name, "tools") for name, (_, module) in COMMANDS.items() if module == TOOLS),
    ],
)
def test_without_suite_and_tools_their_commands_name_the_extra(alone, tmp_path, command, extra):
    said = run(alone.bin / "ckptfmt", command, "--help", cwd=tmp_path, code=2)

    assert "STATE_UNSUPPORTED" in said
    assert f'pip install "ckptfmt[{extra}]"' in said


def test_the_extra_brings_the_tools_and_they_work_without_torch_and_without_the_suite(
    built, tmp_path
):
    environment = Environment(tmp_path, required_by(built["ckptfmt"][1]))
    environment.install(*links_to(built), "ckptfmt[tools]")
    program = environment.bin / "ckptfmt"

    run(environment.python, "-c", SAVE, cwd=tmp_path)
    assert "safetensors" in run(program, "convert", "first", "one.safetensors", cwd=tmp_path)
    assert "usage: ckptfmt convert" in run(program, "convert", "--help", cwd=tmp_path)
    said = run(program, "demo", cwd=tmp_path, code=2)
    assert 'pip install "ckptfmt[conformance,tools,torch]"' in said


def test_the_extra_brings_the_suite_and_its_cases_run(built, tmp_path):
    environment = Environment(tmp_path, required_by(built["ckptfmt"][1]))
    environment.install(*links_to(built), "ckptfmt[conformance]")
    arguments = [
        "run",
        "--adapter",
        "reference",
        "--filter",
        "manifest/valid/*",
        "--filter",
        "trees/invalid/a*",
    ]

    assert re.search(
        r"\d PASS in ", run(environment.bin / "ckptfmt", "conformance", *arguments, cwd=tmp_path)
    )
    assert re.search(
        r"\d PASS in ", run(environment.bin / "ckptfmt-conformance", *arguments, cwd=tmp_path)
    )


def test_the_suite_needs_no_ckptfmt_and_says_so_of_the_reference(built, tmp_path):
    environment = Environment(tmp_path, required_by(built["ckptfmt-conformance"][1]))
    environment.install(built["ckptfmt-conformance"][1])
    program = environment.bin / "ckptfmt-conformance"

    assert "manifest/valid/" in run(program, "list", "--filter", "manifest/*", cwd=tmp_path)
    said = run(
        program, "run", "--adapter", "reference", "--filter", "manifest/*", cwd=tmp_path, code=2
    )
    assert 'pip install "ckptfmt[conformance]"' in said

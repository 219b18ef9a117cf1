"""One version of the package and one of the format, wherever they are said."""

import json
import re
import tomllib

import ckptfmt
import ckptfmt_conformance
import ckptfmt_tools
from ckptfmt import limits
from tests.house.sources import ROOT


def test_package_changelog_suite_and_tools_say_one_version() -> None:
    project, suite, tools = (
        tomllib.loads((ROOT / path).read_text("utf-8"))["project"]
        for path in ("pyproject.toml", "conformance/pyproject.toml", "tools/pyproject.toml")
    )
    headings = re.findall(
        r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )

    assert (
        project["version"]
        == ckptfmt.__version__
        == ckptfmt_conformance.__version__
        == suite["version"]
        == ckptfmt_tools.__version__
        == tools["version"]
    )
    assert project["optional-dependencies"]["conformance"] == [
        f"{suite['name']}=={suite['version']}"
    ]
    assert project["optional-dependencies"]["tools"] == [f"{tools['name']}=={tools['version']}"]
    assert f"ckptfmt=={project['version']}" in tools["dependencies"]
    assert headings[:2] == ["Unreleased", ckptfmt.__version__]


def test_specification_schemas_and_code_say_one_version_of_the_format() -> None:
    changes = re.findall(r"^## (\S+)", (ROOT / "spec/CHANGES.md").read_text("utf-8"), re.MULTILINE)
    definition = json.loads((ROOT / "spec/schema/defs.schema.json").read_text("utf-8"))["$defs"][
        "format_version"
    ]
    title = (ROOT / "spec/00-overview.md").read_text("utf-8").partition("\n")[0]

    assert changes[0] == limits.FORMAT_VERSION
    assert re.fullmatch(definition["pattern"].strip("^$"), limits.FORMAT_VERSION)
    assert title == f"# ckptfmt {limits.FORMAT_VERSION}: the format"

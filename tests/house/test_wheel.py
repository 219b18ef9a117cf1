"""The wheel: whole without the checkout, without torch."""

import json
import os
import subprocess
import sys
import venv
import zipfile

import pytest

from tests.house.sources import ROOT

pytestmark = pytest.mark.slow

SCHEMAS = {path.name: path.read_bytes() for path in (ROOT / "spec" / "schema").glob("*.json")}

# What the installed package is asked, far from the checkout: where it lies, what came along, which schemas it finds.
QUESTION = """
import importlib.util, json, sys
import ckptfmt
from ckptfmt.documents.canonical import schema_text
names = json.loads(sys.argv[1])
print(json.dumps({
    "file": ckptfmt.__file__,
    "torch": "torch" in sys.modules or importlib.util.find_spec("torch") is not None,
    "schemas": {name: schema_text(name.removesuffix(".schema.json")) for name in names},
}))
"""


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_carries_the_schemas_of_the_spec_and_nothing_of_the_tests(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    carried = {name.removeprefix("ckptfmt/_schema/"): file for name, file in files.items() if "/_schema/" in name}

    assert SCHEMAS
    assert carried == SCHEMAS
    assert "ckptfmt/py.typed" in files
    assert {name.partition("/")[0] for name in files} == {
        "ckptfmt",
        "ckptfmt_conformance",
        "ckptfmt-0.9.0.dist-info",
    }


def test_the_wheel_works_in_an_empty_environment_without_torch(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]

    run(*pip, "--constraint", str(ROOT / "constraints.txt"), str(wheel), cwd=tmp_path)
    answer = json.loads(run(python, "-c", QUESTION, json.dumps(sorted(SCHEMAS)), cwd=tmp_path))

    assert answer["file"].startswith(str(tmp_path))
    assert not answer["torch"]
    assert {name: text.encode() for name, text in answer["schemas"].items()} == SCHEMAS


def test_the_wheel_names_its_console_script(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert "ckptfmt = ckptfmt.__main__:main" in archive.read("ckptfmt-0.9.0.dist-info/entry_points.txt").decode()

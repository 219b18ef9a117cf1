"""The pages as Sphinx builds them: without a warning, and with a reference of every public name."""

import importlib.util
import re
import subprocess
import sys

import pytest

import ckptfmt
from tests.house.sources import ROOT, repository_files

#: All links of the pages that lead out of the repository. They are listed here, and fetched by
#: `make docs-links` alone.
EXTERNAL = {"https://developmentseed.org/obstore/"}

needs_sphinx = pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None, reason="Sphinx isn't installed"
)


def built(source, out):
    argv = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-c",
        ROOT / "docs",
        source,
        out,
    ]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)


@needs_sphinx
@pytest.mark.slow
def test_the_pages_are_built_without_a_warning_and_name_all_that_is_public(tmp_path):
    done = built(ROOT, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    reference = (tmp_path / "out/docs/api.html").read_text("utf-8")
    described = set(re.findall(r'id="ckptfmt\.([A-Za-z_]+)"', reference))
    assert set(ckptfmt.__all__) - described == set()
    assert 'id="ckptfmt.Checkpointer.steps"' in reference


@needs_sphinx
def test_a_link_that_leads_nowhere_is_a_warning(tmp_path):
    warnings = {
        "[x](nowhere.md)": "cross-reference target not found: 'nowhere.md'",
        "[x](other.md#nowhere)": "local id not found in doc 'docs/other': 'nowhere'",
        "[x](#nowhere)": "cross-reference target not found: 'nowhere'",
        "[x](other.md#here)": None,
    }
    (tmp_path / "docs").mkdir()
    links = "\n\n".join(warnings)
    (tmp_path / "docs/index.md").write_text(
        f"# A\n\n{links}\n\n```{{toctree}}\nother\n```\n", "utf-8"
    )
    (tmp_path / "docs/other.md").write_text("# B\n\n## Here\n", "utf-8")
    done = built(tmp_path, tmp_path / "out")
    found = [
        line.partition("WARNING: ")[2] for line in done.stderr.splitlines() if "WARNING: " in line
    ]
    assert done.returncode != 0
    assert len(found) == 3, done.stderr
    for line, warning in zip(found, filter(None, warnings.values()), strict=True):
        assert warning in line


def test_links_out_of_the_repository_are_listed():
    pages = [path for path in repository_files() if path.suffix == ".md"]
    links = {
        link
        for page in pages
        for link in re.findall(r"\]\((https?:[^)]+)\)", page.read_text("utf-8"))
    }
    assert links == EXTERNAL

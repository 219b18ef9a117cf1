"""The configuration of Sphinx: README, docs/, spec/ and the rest are one tree with checked links.

`make docs` calls Sphinx with the checkout as the source folder, and fails on the first warning.
Nothing is fetched.
"""

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))[
    "project"
]

project = _PROJECT["name"]
version = release = _PROJECT["version"]
author = "the authors of ckptfmt"
html_title = f"{project} {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "spec/*.md",
    "spec/**/*.md",
    "conformance/*.md",
    "conformance/vectors/README.md",
    "benchmarks/README.md",
    "js/README.md",
    "tests/plugins/DCP.md",
    "tests/plugins/ORBAX.md",
]
exclude_patterns = [".*", "out", "build", "dist", "runs", "ckptfmt", "**/__pycache__"]

html_theme = "alabaster"
html_theme_options = {
    "description": _PROJECT["description"],
    "page_width": "70em",
    "sidebar_width": "16em",
}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
html_copy_source = False

myst_heading_anchors = 4  # links name headings as GitHub does

default_role = "literal"  # text of docstrings in single backticks is code
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style"), "Shapes", "Units", "Spec", "Source"]

# Words of fences in the specification that name no language: spec/appendix/98-notation.md.
_PLAIN_FENCES = ("edits", "hex", "mermaid", "rejects", "serve")


#: Sections of docstrings that begin on the line of their name, with their indented continuation:
#: fields, to docutils.
_SECTION = re.compile(r"(Returns|Yields|Raises|Shapes|Units|Spec|Source|Example): (?=.)")


def _sections_to_fields(
    _app: object, _what: str, _name: str, _value: object, _options: object, lines: list[str]
) -> None:
    fields: list[str] = []
    for line in lines:
        fields += ["", _SECTION.sub(r":\1: ", line)] if _SECTION.match(line) else [line]
    lines[:] = fields


def setup(app: "Sphinx") -> None:
    """Show fences without a lexer as plain text, and the sections of docstrings as fields."""
    for name in _PLAIN_FENCES:
        app.add_lexer(name, TextLexer)
    app.connect(
        "autodoc-process-docstring", _sections_to_fields, priority=400
    )  # before napoleon's, which has 500

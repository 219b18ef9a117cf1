"""The picture of the layers in ARCHITECTURE.md. ``python -m tests.house.picture`` draws it from the contract."""

import tomllib

from tests.house.sources import ROOT

PAGE = ROOT / "ARCHITECTURE.md"
BEGIN = "<!-- layers -->\n"
END = "<!-- end of layers -->"


def read_layers() -> list[list[str]]:
    """Return the modules of each layer of the package, from the top down."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = [
        contract["layers"] for contract in contracts if contract.get("containers") == ["ckptfmt"]
    ]
    return [layer.strip("()").replace("(", "").replace(")", "").split() for layer in layers]


def draw() -> str:
    """Return the picture as Mermaid: a box for each layer, arrows to the lower layers."""
    rows = [", ".join(word for word in layer if word not in "|:") for layer in read_layers()]
    boxes = [f'    L{number}["{row}"]' for number, row in enumerate(rows)]
    arrows = "    " + "-->".join(f"L{number}" for number in range(len(rows)))
    return "\n".join(["```mermaid", "flowchart TD", *boxes, arrows, "```"]) + "\n"


def drawn() -> tuple[str, str, str]:
    """Return the page before the picture, the picture, and the rest of the page."""
    before, begin, rest = PAGE.read_text("utf-8").partition(BEGIN)
    picture, end, after = rest.partition(END)
    return before + begin, picture, end + after


if __name__ == "__main__":
    before, _, after = drawn()
    PAGE.write_text(before + draw() + after, encoding="utf-8")

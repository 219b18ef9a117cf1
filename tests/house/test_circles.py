"""No module of the packages imports itself by way of others: not for types, and not inside a function."""

import ast
import graphlib

from tests.house.sources import ROOT, parse

PACKAGES = (ROOT / "ckptfmt", ROOT / "tools" / "ckptfmt_tools")


def import_graph():
    """The modules of the packages that each of them imports, wherever the import stands."""
    modules = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path
        for package in PACKAGES
        for path in package.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {}
    for name, path in modules.items():
        found = set()
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (whole & modules.keys()) or {node.module}
        graph[name] = found & modules.keys() - {name}
    return graph


def test_no_module_imports_itself_by_way_of_others():
    graph = import_graph()
    assert len(graph) > 100
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the modules of a circle

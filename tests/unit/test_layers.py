"""Imports go one way (docs/design.md), and the shim stands alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import agent_shim
import reconciler

RECONCILER = Path(reconciler.__file__).parent
SHIM = Path(agent_shim.__file__).parent


def imported(file: Path, package: str) -> set[str]:
    """Return the modules of a package that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == package:
                found |= {alias.name for alias in node.names}
            elif node.module.startswith(f"{package}."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith(f"{package}.")}
    return found - {"__version__"}


def test_no_module_knows_one_that_knows_it() -> None:
    graph = {file.stem: imported(file, "reconciler") for file in RECONCILER.glob("*.py")}
    assert {"cli", "passes", "pods", "record", "database"} <= set(graph)
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {name for name, uses in graph.items() if name not in done and uses <= done}
        assert ready, f"these import each other: {sorted(set(graph) - done)}"
        done |= ready


def test_what_reads_pods_knows_no_database_and_the_database_knows_no_pods() -> None:
    readers, writers = {"text", "record", "fields", "pods", "listing"}, {"database", "install"}
    for name in readers:
        assert not imported(RECONCILER / f"{name}.py", "reconciler") & writers, name
    for name in writers:
        assert not imported(RECONCILER / f"{name}.py", "reconciler") & readers, name


def test_the_shim_imports_the_standard_library_alone() -> None:
    allowed = set(sys.stdlib_module_names) | {"agent_shim"}
    files = [file for file in SHIM.rglob("*.py") if "packing" not in file.parts]
    assert len(files) > 3
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            assert {name.split(".")[0] for name in names} <= allowed, (file.name, names)

"""The tree stays as docs/architecture.md describes it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from scripts import names, walk

from freshet.methods import registry
from tests.snippets import ROOT


def test_no_module_or_class_name_is_used_twice_and_no_function_is_a_bare_participle():
    assert not [line for lines in names.findings().values() for line in lines]


def test_there_are_at_most_192_modules_besides_the_methods():
    """A method is one file, so their number grows with the methods and not with the house.

    The benchmark has five modules: worlds and plans, ranks, results, submissions, and its command. Progress and reprs,
    which the command line and Python share, have one, and so have warm devices.
    """
    methods = {f"{method.__module__.removeprefix('freshet.').replace('.', '/')}.py" for method in registry().values()}
    assert sum(str(path) not in methods for path, _ in names.modules()) <= 192


@pytest.mark.parametrize(
    ("name", "bad"), [("settled", True), ("_told", True), ("seed", False), ("with_defaults", False)]
)
def test_a_bare_participle_is_recognised(name: str, bad: bool):
    assert names.is_participle(name) is bad


def test_one_trip_passes_through_at_most_75_files():
    command = [sys.executable, "scripts/walk.py", "--counts"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    files = int(said.splitlines()[-1].removeprefix("one trip: ").split()[0])
    assert 40 < files <= walk.MOST_FILES == 75


def imports_at_load(path: Path, tree: ast.Module) -> Iterator[str]:
    """The modules of Freshet that a module imports when it is loaded; packages count as their ``__init__``."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "freshet":
            inside = node.module.split(".")[1:]
            for alias in node.names:
                for parts in ([*inside, alias.name], inside):
                    place = Path(*parts)
                    if (names.SOURCE / place).with_suffix(".py").is_file():
                        yield str(place.with_suffix(".py"))
                        break
                    if (names.SOURCE / place / "__init__.py").is_file():
                        yield str(place / "__init__.py")
                        break


def test_no_modules_import_each_other_in_a_circle():
    """Else it depends on the order of imports whether they work."""
    graph = {str(path): {*imports_at_load(path, tree)} - {"__init__.py"} for path, tree in names.modules()}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph) - 1
    assert sum(map(len, graph.values())) > 500

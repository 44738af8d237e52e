"""Help is quick, and misspelled names get a suggestion."""

import subprocess
import sys
from typing import Any

import pytest
import typer

import freshet
from freshet.cli.app import app

HEAVY = ("torch", "pandas", "numba", "matplotlib", "plotly", "sklearn", "scipy")
LOADED = """
import sys
from freshet.cli import main
sys.argv = ["freshet", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("LOADED", *sys.modules)
"""


QUICK = [["--help"], ["-h"], ["--version"], ["methods"], ["methods", "moon"], ["cells"], ["run", "-h"], ["data", "-h"]]


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_help_and_lists_import_no_heavy_library(arguments):
    done = subprocess.run([sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, timeout=240)
    said, _, loaded = done.stdout.rpartition("LOADED ")
    assert done.returncode == 0, done.stderr
    assert said.strip() and "freshet.cli" in loaded.split()
    assert not set(HEAVY) & set(loaded.split())


def test_the_command_starts_without_numpy():
    code = "import sys, freshet.cli.app; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_every_public_name_exists_although_it_is_imported_lazily():
    assert all(getattr(freshet, name) is not None for name in freshet.__all__)
    assert set(freshet.__all__) <= set(dir(freshet))
    assert freshet.Federation.__name__ == "Federation"
    with pytest.raises(AttributeError, match="no attribute 'Federaton'"):
        freshet.Federaton  # noqa: B018


def commands() -> dict[str, Any]:
    """Return all commands, also those of groups, by the words that call them."""
    root = typer.main.get_command(app)
    found = dict(root.commands)
    for name, group in list(found.items()):
        found |= {f"{name} {inner}": command for inner, command in getattr(group, "commands", {}).items()}
    return found


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_h_for_help(command, name):
    short, long = command(*name.split(), "-h"), command(*name.split(), "--help")
    assert short.code == long.code == 0
    assert short.out == long.out and "Usage" in short.out


def test_w_means_workers_in_every_command():
    options = {name: [set(p.opts) for p in found.params] for name, found in commands().items()}
    with_workers = {
        name: next(o for o in given if "--workers" in o)
        for name, given in options.items()
        if any("--workers" in o for o in given)
    }
    assert {"run", "compare", "tune", "paper table"} <= with_workers.keys()
    assert all("-w" in option for option in with_workers.values())


@pytest.mark.parametrize(
    ("given", "meant"),
    [("FedAvg", "fedavg"), ("fedasm", "fedasmu"), ("FEDASMU-DA", "fedasmu-da"), ("fedbuf", "fedbuff")],
)
@pytest.mark.parametrize("line", [["methods"], ["run", "-m"]])
def test_a_misspelled_method_is_recognised(command, line, given, meant):
    done = command(*line, given)
    assert done.code == 2
    assert done.err.strip() == f"freshet: method.name: {given!r} is not known; did you mean {meant}?"


def test_an_unknown_method_gets_the_full_list(command):
    said = command("methods", "xyz").err
    assert "did you mean" not in said and "fedasmu, fedasmu-0" in said


@pytest.mark.parametrize(("typed", "meant"), [(["rnu"], "run"), (["data", "lits"], "list")])
def test_a_misspelled_command_is_recognised(command, typed, meant):
    done = command(*typed)
    assert done.code == 2 and f"Did you mean '{meant}'?" in done.err

"""The tree stays as docs/architecture.md describes it."""

import subprocess
import sys

import pytest
from scripts import names, walk

from tests.snippets import ROOT


def test_no_module_or_class_name_is_used_twice_and_no_function_is_a_bare_participle():
    assert not [line for lines in names.findings().values() for line in lines]


def test_there_are_at_most_185_modules():
    assert sum(1 for _ in names.modules()) <= 185


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

"""Every optional extra can be installed under constraints.txt, alone and with all others."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTRAS = sorted(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
CONSTRAINTS = (ROOT / "constraints.txt").read_text().split()
#: What an installer or torch's CUDA wheels bring; CI uses neither.
UNPINNED = re.compile(r"pip|triton|(nvidia|cuda)-.*")


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=\[<>~! ;]", requirement)[0]).lower()


def uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    return found or pytest.skip("uv is not installed (pip install uv)")


def resolve(*extras: str) -> list[str]:
    """The packages that these extras bring, as ``name==version``."""
    command = [uv(), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--system-certs"]
    command += ["--constraint", "constraints.txt", "--python", sys.executable, "pyproject.toml"]
    command += [word for extra in extras for word in ("--extra", extra)]
    if links := os.environ.get("PIP_FIND_LINKS"):
        command += ["--find-links", links]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    if re.search(r"error sending request|dns error|Failed to fetch|Could not connect", done.stderr):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return [line.split(";")[0].strip() for line in done.stdout.splitlines() if "==" in line]


def test_each_package_has_one_version() -> None:
    names = [canonical(line) for line in CONSTRAINTS]
    assert len(names) == len(set(names)) and all("==" in line for line in CONSTRAINTS)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_resolves_alone(extra: str) -> None:
    assert resolve(extra)


def test_all_extras_resolve_together_to_pinned_versions() -> None:
    pinned = {canonical(line) for line in CONSTRAINTS}
    found = {canonical(line) for line in resolve(*EXTRAS)}
    assert sorted(name for name in found - pinned if not UNPINNED.fullmatch(name)) == []

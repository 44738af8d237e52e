"""Benchmarks run in a short form. Their measurements are checked by hand."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from freshet.core.admission import Admission
from freshet.runs.reader import RunDirectory
from freshet.training.outgoing import AttackOptions, choose_attackers

FOLDER = Path(__file__).parent.parent / "benchmarks"
SHORT = {
    "aggregation.py --parameters 1000 --repeat 1": ["(mix, fresh)", "(progress, stale, merged)"],
}


@pytest.mark.parametrize("line", SHORT)
def test_a_benchmark_runs_and_prints_its_rows(line: str) -> None:
    script, *options = line.split()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / script), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(row in done.stdout for row in SHORT[line]), done.stdout


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.py")))
def test_a_benchmark_can_be_loaded(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the library no longer has an imported name. ``make check`` checks the types."""
    monkeypatch.syspath_prepend(str(FOLDER))
    assert runpy.run_path(str(FOLDER / script), run_name="loaded")["__doc__"]


def test_the_ideal_defence_rejects_exactly_the_attackers(tmp_path: Path) -> None:
    names, before = runpy.run_path(str(FOLDER / "protection.py"), run_name="loaded"), Admission.rejection
    federation = names["federation"](0, **names["DIGITS"], run={"until": 100.0})
    left_out = choose_attackers(AttackOptions(kind="label-flip"), 0, federation.config.fleet.devices)
    with names["without"](left_out):
        result = federation.run(out=tmp_path / "run")
    assert Admission.rejection is before, "the patch is undone"
    refused = [event["device"] for event in RunDirectory(result.directory).events() if event["kind"] == "rejected"]
    assert refused and set(refused) <= left_out

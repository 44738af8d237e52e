"""scripts/why.py splits each update of a mixed model into progress and a pull back."""

import runpy
from pathlib import Path

import pytest

from freshet.methods.fedasmu import FedASMU
from freshet.runs.reader import RunDirectory

SCRIPT = Path(__file__).parent.parent / "scripts" / "why.py"


def test_progress_and_pull_back_add_up_to_each_update(federate, tmp_path, capsys) -> None:
    names, rows, before = runpy.run_path(str(SCRIPT)), [], FedASMU.receive
    with names["recording"](rows):
        result = federate({"name": "fedasmu", "slot": "random"}).run(120, out=tmp_path / "run")
    assert FedASMU.receive is before, "the method is restored"
    aggregates = [event for event in RunDirectory(result.directory).events() if event["kind"] == "aggregate"]
    assert len(rows) == len(aggregates) > 5 and any(row["back"] > 0 for row in rows)
    for row, event in zip(rows, aggregates, strict=True):
        whole = row["d"] ** 2 + row["back"] ** 2 + 2 * row["d"] * row["back"] * row["cosine"]
        assert event["update_norm"] == pytest.approx(event["alpha"] * whole**0.5, rel=1e-3)
    names["print_table"](RunDirectory(result.directory), rows)
    assert "cosine of d and back" in capsys.readouterr().out

"""What scripts/why.py says of an upload adds up: progress and the way back are what mixing moves the model by."""

import runpy
from pathlib import Path

import pytest

from freshet.methods.fedasmu import FedASMU
from freshet.runs.reader import RunDirectory

SCRIPT = Path(__file__).parent.parent / "scripts" / "why.py"


def test_progress_and_the_way_back_make_up_each_update(federate, tmp_path, capsys) -> None:
    names, seen, before = runpy.run_path(str(SCRIPT)), [], FedASMU.receive
    with names["watched"](seen):
        result = federate({"name": "fedasmu", "slot": "random"}).run(120, out=tmp_path / "run")
    assert FedASMU.receive is before, "the server is left as it was"
    aggregates = [event for event in RunDirectory(result.directory).events() if event["kind"] == "aggregate"]
    assert len(seen) == len(aggregates) > 5 and any(row["back"] > 0 for row in seen)
    for row, event in zip(seen, aggregates, strict=True):
        whole = row["d"] ** 2 + row["back"] ** 2 + 2 * row["d"] * row["back"] * row["cosine"]
        assert event["update_norm"] == pytest.approx(event["alpha"] * whole**0.5, rel=1e-3)
    names["tell"](RunDirectory(result.directory), seen)
    assert "cosine of d and back" in capsys.readouterr().out

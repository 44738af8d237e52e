"""Tests on the devices at the end of a run: whatever ended it, and none of them in a run that goes on later."""

from pathlib import Path
from typing import Any

import pytest

from freshet import Observer, Stop
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from tests.sim.test_exams import asked, exams
from tests.sim.test_resume import traces


def test_a_run_that_stops_at_its_target_has_its_last_model_tested(federate, tmp_path: Path) -> None:
    run = {"evaluate_devices": "end", "target": 0.2, "stop_at_target": True}
    cut = asked(federate, "fedavg", **run).run(300, out=tmp_path / "cut")
    assert (cut.summary["status"], cut.time_to(0.2)) == ("stopped", cut.summary["virtual_time"])
    [event] = exams(cut.directory)
    assert (event["time"], event["version"]) == (cut.summary["virtual_time"], cut.summary["versions"])
    assert cut.summary["devices_median"] == cut.rows[-1]["devices_median"]
    assert audit(RunDirectory(cut.directory)).passed
    asked(federate, "fedavg", **run).resume(cut.directory)
    whole = asked(federate, "fedavg", evaluate_devices="end").run(300, out=tmp_path / "whole")
    assert traces(cut.directory) == traces(whole.directory)


def test_so_has_one_that_an_observer_ends_at_a_test(federate, tmp_path: Path) -> None:
    class AtTheSecondTest(Observer):
        def on_metrics(self, row: dict[str, Any]) -> None:
            if row["time"] == 20.0:
                raise Stop

    cut = asked(federate, "fedavg").run(100, out=tmp_path / "cut", observers=[AtTheSecondTest()])
    assert [event["time"] for event in exams(cut.directory)] == [0.0, 20.0]


@pytest.mark.parametrize("when", ["end", 2])
@pytest.mark.parametrize("first", [20.0, 47.0, 60.0])
def test_a_run_with_a_later_end_has_none_at_the_earlier_one(
    first: float, when: str | int, federate, tmp_path: Path
) -> None:
    short = asked(federate, "fedavg", evaluate_devices=when).run(first, out=tmp_path / "part")
    assert exams(short.directory)[-1]["time"] == first
    assert [row["time"] for row in short.rows].count(first) == 1
    asked(federate, "fedavg", evaluate_devices=when).resume(tmp_path / "part", until=100)
    whole = asked(federate, "fedavg", evaluate_devices=when).run(100, out=tmp_path / "whole")
    assert traces(tmp_path / "part") == traces(whole.directory)
    assert [event["time"] for event in exams(tmp_path / "part")] == ([100.0] if when == "end" else [0, 40, 80, 100])


def test_a_kill_after_the_last_checkpoint_adds_none(federate, tmp_path: Path) -> None:
    whole = asked(federate, evaluate_devices="end").run(60, out=tmp_path / "run")
    before = traces(whole.directory)
    (whole.directory / "summary.json").unlink()
    asked(federate, evaluate_devices="end").resume(whole.directory)
    assert traces(whole.directory) == before

"""When trips start in a run: as often as the trigger says, whatever happens at the same time."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from freshet import Federation, Observer, Stop
from freshet.runs.reader import RunDirectory
from tests.conftest import small
from tests.sim.helpers import outputs


class StopIfIdle(Observer):
    """Ends a run that does nothing but tests."""

    def __init__(self) -> None:
        self.tests = 0

    def on_event(self, event: dict[str, Any]) -> None:
        self.tests = self.tests + 1 if event["kind"] == "evaluate" else 0
        if self.tests > 50:
            raise Stop("nothing but tests")


@pytest.mark.parametrize("deadline", [4.0, 12.0, 14.0])
def test_a_deadline_starts_no_more_devices_than_the_period_does(deadline: float, tmp_path: Path) -> None:
    run = {"per_round": 1, "period": 4.0, "in_flight": 8, "round_deadline": deadline}
    result = small("fedasync", run=run, fleet={"fastest": 3.0}).run(100, out=tmp_path / "run")
    starts = Counter(event["time"] for event in RunDirectory(result.directory).events() if event["kind"] == "trigger")
    assert set(starts.values()) == {1} and len(starts) > 15
    assert result.summary["lost"] > 0


def test_a_run_with_a_last_round_ended_by_the_deadline_can_be_extended(tmp_path: Path) -> None:
    def made(rounds: int) -> Federation:
        run = {"rounds": rounds, "round_deadline": 8.0, "per_round": 2}
        return small("fedavg", fleet={"fastest": 2.0, "ratio": 20.0}, run=run)

    whole = made(8).run(out=tmp_path / "whole")
    ended = []
    for rounds in range(1, 5):
        directory = tmp_path / str(rounds)
        made(rounds).run(out=directory)
        ended.append([event["kind"] for event in RunDirectory(directory).events()][-3:])
        resumed = made(rounds).resume(directory, rounds=8, observers=[StopIfIdle()])
        assert resumed.summary["status"] == "finished"
        assert outputs(directory) == outputs(whole.directory)
    assert ["lost", "aggregate", "evaluate"] in ended


def test_a_device_that_returns_starts_at_the_next_multiple_of_the_period(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("device,from,seconds_per_sample,available\nd0,0,1,1\nd0,17.3,1,0\nd0,18,0.001,1\n")
    run = {"period": 10.0, "per_round": 1, "in_flight": 1}
    federation = small("fedavg", fleet={"devices": 1, "trace": str(trace)}, run=run, data={"train_samples": 50})
    federation.run(40, out=tmp_path / "run")
    starts = [event["time"] for event in RunDirectory(tmp_path / "run").events() if event["kind"] == "trigger"]
    assert starts[:2] == [0.0, 20.0]

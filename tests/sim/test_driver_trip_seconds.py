"""The mean trip duration of a device: from the trigger on, at the link rates of the time."""

from pathlib import Path

import pytest

from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from tests.conftest import small
from tests.sim.helpers import Crash, CrashError, outputs

#: One slow second in three, so that a model may start on a slow link and arrive on a fast one.
TRACE = ["device,from,seconds_per_sample,up_mbps,down_mbps,cycle"]
for _device in range(6):
    TRACE += [f"d{_device},0,0.01,1,0.02,3", f"d{_device},1,0.01,1,1,"]


@pytest.mark.parametrize("trigger", ["concurrency", "periodic"])
def test_durations_equal_those_of_the_log_if_links_change(trigger: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(TRACE) + "\n")
    run = {"trigger": trigger, "in_flight": 3, "checkpoint_every": 5.0}
    federation = small("asofed", fleet={"devices": 6, "trace": str(file)}, run=run)
    whole = federation.run(60, out=tmp_path / "whole")
    assert whole.summary["aggregations"] > 20
    assert audit(RunDirectory(whole.directory)).problem is None
    with pytest.raises(CrashError):
        federation.run(60, out=tmp_path / "cut", observers=[Crash(60)])
    federation.resume(tmp_path / "cut")
    assert outputs(tmp_path / "cut") == outputs(whole.directory)

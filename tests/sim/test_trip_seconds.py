"""How long a device's trips took, as it is told: from the trigger on, at the rates that its links had at the time."""

from pathlib import Path

import pytest

from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from tests.conftest import small
from tests.sim.test_resume import Crash, CrashError, traces

#: Every three seconds a slow link for one, so that a model may come down slowly and be there when it is fast.
TRACE = ["device,from,seconds_per_sample,up_mbps,down_mbps,cycle"]
for _device in range(6):
    TRACE += [f"d{_device},0,0.01,1,0.02,3", f"d{_device},1,0.01,1,1,"]


@pytest.mark.parametrize("trigger", ["concurrency", "periodic"])
def test_they_are_those_of_the_log_where_links_change(trigger: str, tmp_path: Path) -> None:
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
    assert traces(tmp_path / "cut") == traces(whole.directory)

"""An extended run equals one with the later end from the start, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest

from freshet import ConfigError, Federation, RunError
from freshet.runs import checkpoint
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from tests.conftest import small
from tests.sim.helpers import outputs

METHODS = ["fedasmu", "fedssmu", "fedavg", "feddyn", {"name": "fedsa", "stage1_updates": 4}]


def federation(method: Any, **run: Any) -> Federation:
    return small(method, fleet={"loss": 0.05, "on_seconds": 200.0, "off_seconds": 40.0}, run=run)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_run_extended_twice_equals_the_long_run(method: Any, tmp_path: Path) -> None:
    """The first end lies between two tests, so the short run makes a test that the long run does not."""
    whole = federation(method).run(110, out=tmp_path / "whole")
    first = federation(method).run(47, out=tmp_path / "part")
    assert first.rows[-1]["time"] == 47.0, "a run ends with a test of its last model"
    again = federation(method).resume(tmp_path / "part", until=80)
    assert (again.summary["virtual_time"], again.summary["status"]) == (80.0, "finished")
    last = federation(method).resume(tmp_path / "part", until="110s")
    assert outputs(tmp_path / "part") == outputs(whole.directory)
    assert [row["time"] for row in last.rows] == [row["time"] for row in whole.rows]
    config = [RunDirectory(directory).config() for directory in (tmp_path / "part", tmp_path / "whole")]
    assert config[0] == config[1], "its config.toml has the later end"
    assert audit(RunDirectory(tmp_path / "part")).passed


def test_a_run_extended_on_other_workers_is_the_same(tmp_path: Path) -> None:
    whole = federation("fedasmu").run(80, out=tmp_path / "whole")
    federation("fedasmu").run(47, out=tmp_path / "part")
    federation("fedasmu", executor="processes", workers=2).resume(tmp_path / "part", until=80)
    assert outputs(tmp_path / "part") == outputs(whole.directory)
    assert RunDirectory(tmp_path / "part").config()["run"]["executor"] == "processes"


def test_a_run_by_rounds_is_extended_by_rounds(tmp_path: Path) -> None:
    whole = federation("fedasmu", rounds=8).run(out=tmp_path / "whole")
    federation("fedasmu", rounds=3).run(out=tmp_path / "part")
    with pytest.raises(ConfigError, match=r"run\.rounds: must be more than the 3 rounds"):
        federation("fedasmu", rounds=3).resume(tmp_path / "part", until=500)
    federation("fedasmu", rounds=3).resume(tmp_path / "part", rounds=8)
    assert outputs(tmp_path / "part") == outputs(whole.directory)


def test_a_kill_between_the_last_checkpoint_and_the_summary_is_repaired(tmp_path: Path) -> None:
    """For runs by time and by rounds."""
    for run in ({"until": 47.0}, {"rounds": 3}):
        whole = federation("fedasmu", **run).run(out=tmp_path / f"whole-{len(run)}{next(iter(run))}")
        before = outputs(whole.directory)
        (whole.directory / "summary.json").unlink()
        federation("fedasmu", **run).resume(whole.directory)
        assert outputs(whole.directory) == before


def test_options_derived_from_the_length_of_a_run_stay_those_of_its_first_part(tmp_path: Path) -> None:
    federation("fedsa").run(60, out=tmp_path / "part")
    derived = RunDirectory(tmp_path / "part").config()["method"]["stage1_updates"]
    for until in (120, 180):
        federation("fedsa").resume(tmp_path / "part", until=until)
        assert RunDirectory(tmp_path / "part").config()["method"]["stage1_updates"] == derived
    longer = federation("fedsa").run(180, out=tmp_path / "whole")
    assert RunDirectory(longer.directory).config()["method"]["stage1_updates"] > derived
    same = federation({"name": "fedsa", "stage1_updates": derived}).run(180, out=tmp_path / "same")
    assert outputs(tmp_path / "part") == outputs(same.directory)


def test_a_finished_run_needs_a_later_end_and_its_checkpoint(tmp_path: Path) -> None:
    mine = federation("fedavg", keep_checkpoint=False)
    mine.run(40, out=tmp_path / "dropped")
    assert not (tmp_path / "dropped" / "checkpoint").exists()
    with pytest.raises(RunError, match="has no checkpoint to resume from"):
        mine.resume(tmp_path / "dropped", until=80)
    mine = federation("fedavg")
    mine.run(40, out=tmp_path / "run")
    log = (tmp_path / "run" / "events.jsonl").read_bytes()
    with pytest.raises(RunError, match="already finished; give it a later end with --until"):
        mine.resume(tmp_path / "run")
    for until in (40, 20):
        with pytest.raises(RunError if until == 40 else ConfigError, match=r"finished|must be later than 40 s"):
            mine.resume(tmp_path / "run", until=until)
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == log
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def test_the_final_checkpoint_is_taken_before_the_last_test(tmp_path: Path) -> None:
    result = federation("fedavg").run(47, out=tmp_path / "run")
    tree = checkpoint.read(tmp_path / "run").tree
    assert (tree["now"], tree["last_test"]) == (47.0, 40.0)
    kept = (tmp_path / "run" / "metrics.jsonl").read_bytes()[: tree["log"]["metrics"]]
    assert len(kept.splitlines()) == len(result.rows) - 1


@pytest.mark.parametrize("method", ["fedavg", "fedasync"])
@pytest.mark.parametrize("ends", [({"until": 40.0}, {"until": 110.0}), ({"rounds": 3}, {"rounds": 8})], ids=str)
def test_a_cosine_keeps_the_length_of_the_first_run(ends: Any, method: str, tmp_path: Path) -> None:
    """The length is in config.toml, so that the run can be repeated. Beyond it the rate stays constant."""

    def made(run: dict[str, Any], **training: Any) -> Federation:
        return small(method, training={"lr": 0.05, "schedule": "cosine"} | training, run=run)

    first, later = ends
    made(first).run(out=tmp_path / "part")
    length = RunDirectory(tmp_path / "part").config()["training"]["schedule_rounds"]
    assert length == first.get("rounds", length) >= 1
    made(first).resume(tmp_path / "part", **later)
    assert RunDirectory(tmp_path / "part").config()["training"]["schedule_rounds"] == length
    same = made(later, schedule_rounds=length).run(out=tmp_path / "same")
    assert outputs(tmp_path / "part") == outputs(same.directory)
    assert RunDirectory(tmp_path / "part").config() == RunDirectory(same.directory).config()
    rates = [event["lr"] for event in RunDirectory(tmp_path / "part").events() if event["kind"] == "trigger"]
    assert rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(0.01 * 0.05)


def test_no_other_schedule_depends_on_the_length_of_a_run(tmp_path: Path) -> None:
    federation("fedavg").run(20, out=tmp_path / "run")
    assert "schedule_rounds" not in RunDirectory(tmp_path / "run").config()["training"]

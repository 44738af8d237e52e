"""Remarks on runs without uploads, and on runs that diverge at the first test."""

import json
from pathlib import Path
from typing import Any

import pytest

import freshet
from freshet.runs.summary import remarks


def summary_of(**changes: Any) -> dict[str, Any]:
    kept = {"method": "fedavg", "status": "finished", "uploads": 0, "rejected": 0, "trips": 0, "virtual_time": 100.0}
    return kept | changes


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        (
            {},
            [
                "fedavg: no upload arrived in 100 s: no device was available; check a trace's "
                "available and from, fleet.on_seconds and off_seconds, run.until"
            ],
        ),
        (
            {"trips": 3},
            ["fedavg: no upload arrived in 100 s, and 3 trips were in flight; a later run.until lets them end"],
        ),
        ({"uploads": 1}, []),
        ({"status": "interrupted"}, []),
        ({"status": "failed"}, []),
        (
            {"diverged": 0.0, "status": "diverged"},
            ["fedavg began with a test loss that is not finite; check the model's outputs and the test data"],
        ),
    ],
)
def test_a_run_without_uploads_has_one_remark(changes: dict[str, Any], sentences: list[str]):
    assert remarks(summary_of(**changes), [{"time": 0.0, "loss": None}]) == sentences


def test_lost_trips_have_one_remark():
    assert len(remarks(summary_of(trips=4, lost=4), [])) == 1


def test_a_fleet_that_is_never_online_has_a_remark(tmp_path: Path, caplog):
    trace = tmp_path / "off.csv"
    trace.write_text("device,seconds_per_sample,available\n" + "".join(f"{k},0.1,0\n" for k in range(6)))
    data = {"train_samples": 160, "test_samples": 40}
    run = {"per_round": 3, "executor": "serial"}
    federation = freshet.Federation(method="fedasmu", run=run, fleet={"trace": str(trace)}, data=data)
    federation.run(until=100, out=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["uploads"] == 0
    assert "no upload arrived in 100 s" in caplog.text

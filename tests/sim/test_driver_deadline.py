"""Devices that never return, lost uploads, devices that come and go: no method stalls."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet import Federation, Result
from freshet.methods import registry
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.writer import Observer
from freshet.sim.fleet import Fleet

Federate = Callable[..., Federation]
DEVICES, UNTIL, DEADLINE = 20, 400.0, 30.0
#: Longest pause between uploads in a healthy fleet of these devices.
USUAL_PAUSE = 60.0
TRACE = ["device,from,seconds_per_sample,available,cycle"]
for _number in range(DEVICES):
    TRACE += [f"d{_number},0,0.0{1 + _number % 5},1,120", f"d{_number},{20 + 4 * _number},0.02,0,"]


def fleet(silent: int, **figures: Any) -> Fleet:
    """Twenty devices, some of which never finish."""
    seconds = np.linspace(4.0, 20.0, DEVICES)
    seconds[:silent] = 1e9
    return Fleet(seconds, up_rate=1e6, down_rate=1e6, **figures)


def run_of(federate: Federate, method: str, out: Path, made: Any, **run: Any) -> Result:
    model = {"model": "mlp"} if method == "moon" else {}  # needs the features of a network
    federation = federate(
        method,
        **model,
        fleet=made,
        data={"train_samples": 200, "min_samples": 2},
        training={"epochs": 2},
        run={"period": 4.0, "eval_every": 200.0, "per_round": 4, "in_flight": 8} | run,
    )
    return federation.run(UNTIL, out=out)


def uploads_of(result: Result) -> list[float]:
    """Times of the uploads; no device is triggered while it trains."""
    flying: set[int] = set()
    times = [0.0]
    for event in map(json.loads, (result.directory / "events.jsonl").open()):
        if event["kind"] == "trigger":
            assert event["device"] not in flying
            flying.add(event["device"])
        elif event["kind"] in ("upload", "lost"):
            flying.discard(event["device"])
        if event["kind"] == "upload":
            times.append(event["time"])
    assert audit(RunDirectory(result.directory)).passed
    return times


def never_waits(times: list[float]) -> bool:
    return max(np.diff([*times, UNTIL])) < DEADLINE + USUAL_PAUSE


@pytest.mark.parametrize("method", sorted(registry()))
def test_no_method_stalls_if_a_tenth_never_returns_and_uploads_are_lost(
    method: str, federate: Federate, tmp_path: Path
) -> None:
    made = fleet(2, loss=0.3, seed=1)
    result = run_of(federate, method, tmp_path / "run", made, round_deadline=DEADLINE)
    assert never_waits(uploads_of(result))
    assert result.summary["stalled"] is None and result.summary["lost"] > 0
    lost = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open() if '"lost"' in line]
    given_up = [event["device"] for event in lost if "round_deadline" in event["reason"]]
    assert sorted(given_up) == [0, 1], "each of them once: it was not heard of since"


@pytest.mark.parametrize("method", sorted(registry()))
def test_no_method_stalls_if_devices_come_and_go(method: str, federate: Federate, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(TRACE) + "\n")
    made = {"devices": DEVICES, "trace": str(file), "loss": 0.3}
    result = run_of(federate, method, tmp_path / "run", made, round_deadline=DEADLINE)
    assert never_waits(uploads_of(result)) and result.summary["stalled"] is None


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedssmu", "port", "fedasync"])
def test_without_a_deadline_a_run_reports_that_it_stalls(method: str, federate: Federate, tmp_path: Path) -> None:
    messages: list[str] = []

    class Listener(Observer):
        def on_message(self, message: str) -> None:
            messages.append(message)

    silent = 9 if method == "fedasync" else 2
    federation = federate(
        method,
        fleet=fleet(silent),
        data={"train_samples": 200, "min_samples": 2},
        training={"epochs": 2},
        run={"period": 4.0, "eval_every": 200.0, "per_round": 4, "in_flight": 8},
    )
    summary = federation.run(UNTIL, out=tmp_path / "run", observers=[Listener()]).summary
    assert summary["stalled"] is not None and summary["stalled"] < UNTIL / 2
    assert any("devices that do not return; set run.round_deadline" in message for message in messages)


@pytest.mark.parametrize("method", ["fedavg", "fedasmu", "feddyn"])
def test_a_run_with_a_deadline_resumes_bit_for_bit(method: str, federate: Federate, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    class Stopper(Observer):
        def on_progress(self, time: float) -> None:
            if time >= 250.0:
                raise Stop

    def made() -> Federation:
        # The fast ones never return, and the slow ones are late. Both are given up; the slow ones return later.
        seconds = np.linspace(4.0, 60.0, DEVICES)
        seconds[:2] = 1e9
        return federate(
            method,
            fleet=Fleet(seconds, up_rate=1e6, down_rate=1e6, loss=0.1, seed=1),
            data={"train_samples": 200, "min_samples": 2},
            training={"epochs": 2},
            run={"period": 4.0, "eval_every": 200.0, "per_round": 4, "in_flight": 8, "round_deadline": 30.0}
            | {"checkpoint_every": 10.0},
        )

    whole = made().run(UNTIL, out=tmp_path / "whole")
    with pytest.raises(Stop):
        made().run(UNTIL, out=tmp_path / "cut", observers=[Stopper()])
    rest = made().resume(tmp_path / "cut")
    assert rest.summary["weights_sha256"] == whole.summary["weights_sha256"]
    logs = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("whole", "cut")]
    assert logs[0] == logs[1]
    late = [json.loads(line) for line in logs[0].splitlines() if b"round_deadline" in line]
    assert len({event["device"] for event in late}) > 2
    triggered = [json.loads(line) for line in logs[0].splitlines() if b'"trigger"' in line]
    assert any(e["device"] == late[-1]["device"] for e in triggered)

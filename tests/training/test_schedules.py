"""Learning-rate schedules."""

import json
import math

import pytest

from freshet import ConfigError, RunError
from freshet.config import resolve
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.optimisers import constant, cosine, exponential, step

from ..sim.helpers import Crash, CrashError


def test_each_schedule_follows_its_formula():
    rounds = range(0, 100, 7)
    assert [constant(0.1)(r) for r in rounds] == [0.1] * len(rounds)
    assert [exponential(0.1, 0.9)(r) for r in rounds] == [0.1 * 0.9**r for r in rounds]
    assert [step(0.1, 0.5, 30)(r) for r in (0, 29, 30, 59, 60)] == [0.1, 0.1, 0.05, 0.05, 0.025]
    half = cosine(0.1, 100)
    assert half(50) == pytest.approx(0.05)
    assert half(25) == pytest.approx(0.05 * (1 + math.cos(math.pi / 4)))
    assert [half(0), half(100), half(1000)] == [0.1, 0.001, 0.001]


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"schedule": "constant"}, lambda r: 0.1),
        ({"schedule": "step", "lr_decay": 0.5, "schedule_every": 2}, lambda r: 0.1 * 0.5 ** (r // 2)),
        ({"schedule": "cosine"}, lambda r: 0.1 * max(0.01, 0.5 * (1 + math.cos(math.pi * r / 8)))),
        ({"schedule": lambda lr, r: lr / (1 + r)}, lambda r: 0.1 / (1 + r)),
    ],
    ids=["constant", "step", "cosine", "a function"],
)
def test_a_run_follows_its_schedule(federate, tmp_path, training, expected):
    made = federate("fedavg", training={"lr": 0.1} | training, run={"rounds": 8})
    made.run(out=tmp_path / "run")
    triggers = [event for event in RunDirectory(tmp_path / "run").events() if event["kind"] == "trigger"]
    assert len({event["round"] for event in triggers}) == 8
    for event in triggers:
        assert event["lr"] == pytest.approx(expected(event["round"] - 1), rel=1e-12)


def test_a_custom_schedule_needs_a_function(federate):
    with pytest.raises(
        ConfigError,
        match=r"training\.schedule: 'custom' needs a function from Python; give one or choose another schedule",
    ):
        federate("fedavg", training={"schedule": "custom"}).run(10)


# ---- time instead of rounds


SECONDS = 12.5
BY_TIME = {"lr": 0.1, "schedule_by": "time", "schedule_seconds": SECONDS}
#: Schedules, and the rate after r rounds of a run of 60 s, r a fraction.
FORMULAS = {
    "exponential": ({"lr_decay": 0.8}, lambda r: 0.1 * 0.8**r),
    "step": ({"lr_decay": 0.5, "schedule_every": 2}, lambda r: 0.1 * 0.5 ** math.floor(r / 2)),
    "cosine": ({}, lambda r: 0.1 * max(0.01, 0.5 * (1 + math.cos(math.pi * min(1, r / 5))))),  # 60 / 12.5 = 4.8
    "function": ({"schedule": lambda lr, r: lr / (1 + r)}, lambda r: 0.1 / (1 + r)),
}


def by_time(federate, method, schedule="exponential", until=60.0, **run):
    training = BY_TIME | {"schedule": schedule} | FORMULAS[schedule][0]
    return federate(method, training=training, run={"until": until} | run)


def triggers(directory):
    return [event for event in RunDirectory(directory).events() if event["kind"] == "trigger"]


@pytest.mark.parametrize("method", ["fedavg", "fedasync", "fedasmu"])
@pytest.mark.parametrize("schedule", FORMULAS)
def test_every_method_has_the_rate_of_the_second_at_which_a_trip_starts(federate, tmp_path, method, schedule):
    by_time(federate, method, schedule).run(out=tmp_path / "run")
    found, formula = triggers(tmp_path / "run"), FORMULAS[schedule][1]
    assert len({event["time"] for event in found}) > 3
    for event in found:
        assert event["lr"] == pytest.approx(formula(event["time"] / SECONDS), rel=1e-12)
    assert audit(RunDirectory(tmp_path / "run")).problem is None
    if schedule == "cosine":
        assert RunDirectory(tmp_path / "run").config()["training"]["schedule_rounds"] == round(60 / SECONDS)


def test_the_audit_recomputes_the_rate_of_every_trip(federate, tmp_path):
    by_time(federate, "fedasync").run(out=tmp_path / "run")
    path = tmp_path / "run" / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    line = [event for event in lines if event["kind"] == "trigger"][-1]
    line["lr"] *= 1.0001
    path.write_text("".join(json.dumps(event) + "\n" for event in lines))
    problem = audit(RunDirectory(tmp_path / "run")).problem
    assert problem is not None and problem.startswith(f"events.jsonl, line {line['seq']} (trigger): lr is logged as")


def test_a_damaged_schedule_cannot_be_audited(federate, tmp_path):
    by_time(federate, "fedasync").run(out=tmp_path / "run")
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("schedule_seconds = 12.5", "schedule_seconds = 0.0"))
    with pytest.raises(RunError, match=r"cannot be audited: \[training\] in its config.toml is not valid"):
        audit(RunDirectory(tmp_path / "run"))


@pytest.mark.parametrize("method", ["fedavg", "fedasmu"])
def test_a_resumed_run_and_an_extended_one_have_the_same_rates(federate, tmp_path, method):
    whole = by_time(federate, method).run(out=tmp_path / "whole")
    with pytest.raises(CrashError):
        by_time(federate, method, checkpoint_every=7.0).run(out=tmp_path / "cut", observers=[Crash(18)])
    by_time(federate, method, checkpoint_every=7.0).resume(tmp_path / "cut")
    by_time(federate, method, until=30.0).run(out=tmp_path / "longer")
    by_time(federate, method, until=30.0).resume(tmp_path / "longer", until=60.0)
    log = (whole.directory / "events.jsonl").read_bytes()
    assert (tmp_path / "cut" / "events.jsonl").read_bytes() == log
    assert (tmp_path / "longer" / "events.jsonl").read_bytes() == log


def test_local_steps_before_a_test_use_the_rate_of_that_second(federate, tmp_path):
    tests = {"evaluate_devices": 1, "personalise": 2, "eval_every": 20.0, "checkpoint_every": 7.0}
    by_time(federate, "fedbuff", **tests).run(out=tmp_path / "whole")
    with pytest.raises(CrashError):
        by_time(federate, "fedbuff", **tests).run(out=tmp_path / "cut", observers=[Crash(25)])
    by_time(federate, "fedbuff", **tests).resume(tmp_path / "cut")
    assert (tmp_path / "cut" / "events.jsonl").read_bytes() == (tmp_path / "whole" / "events.jsonl").read_bytes()


def test_time_needs_the_seconds_of_a_round(federate):
    problem = r'training\.schedule_by: "time" needs the seconds of a round; give training\.schedule_seconds'
    with pytest.raises(ConfigError, match=problem):
        federate("fedavg", training={"schedule_by": "time"}).run(10)


def test_runs_that_count_rounds_keep_their_hash():
    plain = resolve({"method": {"name": "fedavg"}})
    assert not {"schedule_by", "schedule_seconds"} & plain.to_hash()["training"].keys()
    timed = resolve({"method": {"name": "fedavg"}, "training": BY_TIME})
    assert {"schedule_by", "schedule_seconds"} <= timed.to_hash()["training"].keys()

"""Learning-rate schedules."""

import math

import pytest

from freshet import ConfigError
from freshet.training.optimisers import constant, cosine, exponential, step


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
    from freshet.runs.reader import RunDirectory

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

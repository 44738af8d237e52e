"""A trip with a learning rate of 0 causes no adaptation. The log says so and the audit checks it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.core.events import Aggregated
from freshet.core.method import Mismatch
from freshet.federation import Federation
from freshet.methods.fedasmu import FedASMU
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.optimisers import constant
from tests.methods.asmu_helpers import plain_layout, server_of, trigger, upload
from tests.methods.conftest import SMALL

VARIANTS: list[dict[str, Any]] = [
    {},
    {"equations": "published"},
    {"apply": "progress", "controls": "direction"},
    {"apply": "progress", "controls": "course"},
]


def rising(lr: float, rounds: int) -> float:
    return lr * min(1.0, rounds / 3)


@pytest.mark.parametrize("options", VARIANTS)
def test_a_schedule_may_begin_at_zero(options: dict[str, Any], tmp_path: Path) -> None:
    training, run = SMALL["training"] | {"schedule": rising}, SMALL["run"] | {"until": 30.0}
    sections = SMALL | {"training": training, "run": run}
    result = Federation(method={"name": "fedasmu", **options}, **sections).run(out=tmp_path / "run")
    made = [event for event in RunDirectory(result.directory).events() if event["kind"] == "aggregate"]
    untaught = [event for event in made if event.get("untaught")]
    assert untaught and all(event["lr"] == 0.0 and not event["adapted"] for event in untaught)
    assert result.summary["adaptations"] == sum(event["adapted"] for event in made) > 0
    assert result.summary["adaptations_skipped"] == 0, "no step was forgotten"
    assert audit(RunDirectory(result.directory)).problem is None


def two_aggregations(rate: float) -> list[Any]:
    """Return the log of a device that uploads twice, the second time after training at this rate."""
    rng, log = np.random.default_rng(0), list[Any]()
    server = server_of("fedasmu", rng.normal(size=5), plain_layout(5))
    for lr in (0.1, rate):
        server.schedule = constant(lr)
        log.append(trigger(server, 0))
        log += upload(server, 0, server.weights + 0.1 * rng.normal(size=5))
    return log


def check_log(log: list[Any]) -> None:
    memory, options = dict[Any, Any](), FedASMU.Options()
    for event in log:
        FedASMU.audit(options, event, 0.0, memory)


def test_controls_stay_at_learning_rate_zero_and_the_audit_checks_it() -> None:
    *before, last = two_aggregations(0.0)
    assert isinstance(last, Aggregated) and isinstance(before[1], Aggregated)
    assert (last.numbers["adapted"], last.numbers["untaught"]) == (False, True)
    assert all(last.numbers[name] == before[1].numbers[name] for name in ("lambda", "sigma", "iota"))
    check_log([*before, last])
    *taught, other = two_aggregations(0.1)
    assert other.numbers["adapted"] and "untaught" not in other.numbers
    check_log([*taught, other])
    claimed = other._replace(numbers=other.numbers | {"adapted": False, "untaught": True})
    denied = other._replace(numbers=other.numbers | {"lr": 0.0})
    for spoilt in (claimed, denied):
        with pytest.raises(Mismatch, match="taught"):
            check_log([*taught, spoilt])

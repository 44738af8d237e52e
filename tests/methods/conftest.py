"""Short simulated runs on the digits, cached for all tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freshet.federation import Federation
from freshet.result import Result

Simulate = Callable[..., Result]
SMALL: dict[str, Any] = {
    "data": {"train_samples": 480, "test_samples": 300, "partition": "iid"},
    "fleet": {"devices": 12, "fastest": 2.0, "ratio": 4.0},
    "training": {"epochs": 3, "lr": 0.1},
    "run": {"per_round": 4, "in_flight": 8, "eval_every": 10.0, "period": 2.0, "executor": "serial"},
}


@pytest.fixture(scope="session")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Simulate:
    """``simulate("fedprox", {"mu": 0.0}, run={"in_flight": 1})``: a run of 40 virtual seconds by default."""
    known: dict[str, Result] = {}

    def run(method: str, options: dict[str, Any] | None = None, until: float = 40.0, **sections: Any) -> Result:
        key = repr((method, options, until, sections))
        if key not in known:
            tables = {name: SMALL.get(name, {}) | sections.get(name, {}) for name in SMALL | sections}
            federation = Federation(method={"name": method} | (options or {}), **tables)
            out: Path = tmp_path_factory.mktemp("run") / method.replace(":", ".")
            known[key] = federation.run(until, out=out)
        return known[key]

    return run

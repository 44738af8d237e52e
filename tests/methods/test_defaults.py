"""Every registered method learns the embedded digits at its defaults. New methods are included automatically."""

from pathlib import Path
from typing import Any

import pytest

from freshet import Federation, Observer
from freshet.methods import registry

GOAL, TIME = 0.5, 800.0


class Goal(Observer):
    """Stops a run, like Ctrl-C, once its model is good enough."""

    def __init__(self) -> None:
        self.best = 0.0

    def on_metrics(self, row: dict[str, Any]) -> None:
        before, self.best = self.best, max(self.best, row["accuracy"])
        if before < GOAL <= self.best:
            raise KeyboardInterrupt


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", sorted(set(registry()) - {"fedrep"}))  # its global model has an untrained head
def test_method_learns_the_digits_at_its_defaults(name: str, seed: int, tmp_path: Path) -> None:
    run = {"executor": "serial", "checkpoint_minutes": 0.0}
    goal = Goal()
    summary = Federation(method=name, seed=seed, run=run).run(TIME, out=tmp_path / "run", observers=[goal]).summary
    assert goal.best >= GOAL, f"accuracy {goal.best:.2f} after {TIME:g} s ({summary['status']})"
    assert summary["diverged"] is None
    assert 2 * summary["rejected"] <= summary["uploads"]

"""The interface between core and drivers: a real-time driver needs only coordinator and local trip."""

import ast
import asyncio
from pathlib import Path

import numpy as np
import pytest

from freshet.config import resolve
from freshet.data.sources import load
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.batches import FederatedData, with_channels_last
from tests.conftest import linear
from tests.core import live

METHODS = {
    "fedasmu": {},
    "fedbuff": {"K": 3},
    "port": {"K": 3, "omega": 1},
    "fedssmu": {},
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", METHODS)
def test_a_real_time_driver_finishes_a_run_and_its_log_passes_the_audit(name, tmp_path):
    run = {"per_round": 4, "in_flight": 6, "period": 0.05, "seed": 3}
    tables = {"method": {"name": name} | METHODS[name], "fleet": {"devices": 8}, "run": run}
    config = resolve(tables | {"training": {"epochs": 3, "lr": 0.05}, "model": {"name": "custom"}})
    data = with_channels_last(load("digits").subset(240, 120, 0))
    shards = np.array_split(np.random.default_rng(0).permutation(240), 8)
    driver = live.Live(config, linear, FederatedData.of(data, shards), tmp_path / "run")
    asyncio.run(driver.run(aggregations=40 if name in ("fedasmu", "fedssmu") else 12))

    found = audit(RunDirectory(tmp_path / "run"))
    assert (found.problem, found.audited) == (None, True)
    counts = driver.coordinator.counts
    assert found.aggregations == counts.aggregations
    assert found.merges == counts.merges
    assert (counts.merges > 0) == (name in ("fedasmu", "fedssmu"))
    hurried = [event for event in RunDirectory(tmp_path / "run").events() if event["kind"] == "hurry"]
    assert bool(hurried) == (name == "port")
    before, after = (driver.nodes[0].trainer.evaluate(w) for w in (driver_start(config), driver.server.weights))
    assert after.metrics["accuracy"] > before.metrics["accuracy"] + 0.2


def driver_start(config):
    from freshet.training.network import initial_weights

    return initial_weights(linear, config.run.seed)


def test_the_real_time_driver_imports_nothing_from_the_simulator():
    tree = ast.parse(Path(live.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in imported if name and name.startswith("freshet.sim")}

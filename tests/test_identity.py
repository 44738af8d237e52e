"""What decides a run's bits is said once, at the field. Resume, a grid's keys and a report's groups all ask there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freshet import Federation, Result
from freshet.config import SECTIONS, non_semantic_keys, resolve
from freshet.errors import RunError
from freshet.experiments.grid import run_key
from freshet.report.groups import group_runs
from freshet.report.reading import read_all
from freshet.runs.segments import LIVE, lines
from freshet.runs.writer import Observer

#: Whether a field decides bits. A new field of [run] is put on one of the two sides here, by somebody who thought.
RUN = {
    "seed": True,
    "until": True,
    "rounds": True,
    "eval_every": True,  # when the model is tested is in the log
    "target": False,  # only what the log is held against, unless it ends the run
    "stop_at_target": True,  # a run that stops has a shorter log
    "trigger": True,
    "per_round": True,
    "period": True,
    "executor": False,
    "checkpoint_every": False,
    "checkpoint_minutes": False,
    "keep_checkpoint": False,
    "keep": False,  # one more file
    "patience": True,  # it ends a run
    "rotate_log": False,  # the same log in other files
    "device_memory_mb": False,
    "address": False,
    "workers": False,
    "selection": True,
    "in_flight": True,
    "evaluate_devices": True,  # so are its results on the devices
    "personalise": True,
    "round_deadline": True,
    "gate": True,  # it decides who is let in
    "diverged": True,  # a run that stops has a shorter log
}
#: Another value for each field that decides nothing, with whatever it needs beside it.
OTHERWISE: dict[str, dict[str, Any]] = {
    "run.target": {"target": 0.31},
    "run.executor": {"executor": "processes", "workers": 1},
    "run.workers": {"executor": "processes", "workers": 2},
    "run.checkpoint_every": {"checkpoint_every": 7.0},
    "run.checkpoint_minutes": {"checkpoint_minutes": 0.0},
    "run.keep_checkpoint": {"keep_checkpoint": False},
    "run.keep": {"keep": "best"},
    "run.rotate_log": {"rotate_log": 0.001, "checkpoint_every": 7.0},
    "run.device_memory_mb": {"device_memory_mb": 1},
}
#: Those that need a cluster, or a data set on disk: tests/compute/test_ray.py and tests/data look after them.
ELSEWHERE = {"run.address", "data.dir"}


def test_every_field_of_a_run_is_on_one_side() -> None:
    aside = non_semantic_keys(SECTIONS)
    assert {key: f"run.{key}" not in aside for key in SECTIONS["run"].model_fields} == RUN


def test_of_the_other_sections_only_the_place_of_the_data_decides_nothing() -> None:
    assert {key for key in non_semantic_keys(SECTIONS) if not key.startswith("run.")} == {"data.dir"}
    assert set(non_semantic_keys(SECTIONS)) == OTHERWISE.keys() | ELSEWHERE


def test_the_essence_is_the_tables_without_what_decides_nothing() -> None:
    config = resolve({"data": {"dir": "/somewhere"}, "run": {"workers": 3, "target": 0.5}})
    tables, essence = config.tables(), config.identity()
    assert list(essence) == list(tables)
    left_out = {f"{section}.{key}" for section in tables for key in tables[section].keys() - essence[section].keys()}
    assert left_out == set(config.non_semantic())
    assert all(tables[section][key] == value for section in essence for key, value in essence[section].items())


def test_a_target_that_ends_the_run_decides() -> None:
    keys = {
        (stops, target): run_key(resolve({"run": {"target": target, "stop_at_target": stops}}))
        for stops in (False, True)
        for target in (0.5, 0.9)
    }
    assert keys[False, 0.5] == keys[False, 0.9]
    assert len(set(keys.values())) == 3


@pytest.fixture(scope="module")
def plain(federate: Callable[..., Federation], tmp_path_factory: pytest.TempPathFactory) -> Result:
    return federate("feddyn").run(40, out=tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize("key", OTHERWISE)
def test_what_decides_nothing_changes_no_bit_no_key_and_no_group(
    key: str, plain: Result, federate: Callable[..., Federation], tmp_path: Path
) -> None:
    other = federate("feddyn", run=OTHERWISE[key])
    result = other.run(40, out=tmp_path / "run")
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    logs = [b"".join(lines(place / LIVE)) for place in (result.directory, plain.directory)]
    assert logs[0] == logs[1]
    runs = read_all([plain.directory, result.directory])
    assert runs[0].config["run"] != runs[1].config["run"]
    assert len(group_runs(runs)) == 1
    assert len({run_key(resolve(run.config)) for run in runs}) == 1


class Stop(Exception):
    """Ends a run as a kill would."""


class Stopper(Observer):
    def on_progress(self, time: float) -> None:
        if time >= 20.0:
            raise Stop


def test_a_run_is_resumed_by_whoever_has_the_same_essence(
    plain: Result, federate: Callable[..., Federation], tmp_path: Path
) -> None:
    with pytest.raises(Stop):
        federate("feddyn", run={"checkpoint_every": 5.0}).run(40, out=tmp_path / "run", observers=[Stopper()])
    with pytest.raises(RunError, match=r"another configuration \(run.eval_every\); build"):
        federate("feddyn", run={"eval_every": 10.0}).resume(tmp_path / "run")
    result = federate("feddyn", run={"target": 0.1, "device_memory_mb": 1}).resume(tmp_path / "run")
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert result.summary["target"] == plain.summary["target"], "the run's own settings hold, not those of the resumer"

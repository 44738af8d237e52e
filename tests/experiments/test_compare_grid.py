"""A comparison under several values of any setting: from Python and on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from freshet import Federation, compare
from freshet.cli.app import app
from freshet.errors import ConfigError
from freshet.experiments.grid import choice_name, choices, parse_grid


def test_every_combination_in_order() -> None:
    found = choices({"a.x": [1, 2], "b.y": ["p", "q"]})
    assert [choice_name(choice) for choice in found] == ["a.x=1, b.y=p", "a.x=1, b.y=q", "a.x=2, b.y=p", "a.x=2, b.y=q"]
    assert choices({}) == [{}] and choice_name({}) == "" and choice_name({"a.x": 1}, "cell") == "cell: a.x=1"


def test_values_of_the_command_line_are_read_as_toml_or_as_text() -> None:
    texts = ["fleet.ratio=1, 20", "data.partition=iid,by_label", "model.hidden=[8],[8, 4]", "training.nesterov=true"]
    assert parse_grid(texts)[-1] == {
        "fleet.ratio": 20,
        "data.partition": "by_label",
        "model.hidden": [8, 4],
        "training.nesterov": True,
    }
    assert len(parse_grid(texts)) == 8


@pytest.mark.parametrize("text", ["fleet.ratio", "ratio=1,2", "fleet.ratio=", "fleet.ratio=3,3"])
def test_what_is_no_grid_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_grid([text])


@pytest.mark.parametrize("values", ["1,2", 3, []])
def test_a_grid_from_python_needs_lists(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"^training\.lr: needs a list of values"):
        choices({"training.lr": values})


def make(method: Any, seed: int) -> Federation:
    run = {"until": 30.0, "executor": "serial", "eval_every": 10.0}
    return Federation("mlp", devices=6, method=method, seed=seed, training={"epochs": 1}, run=run)


def test_a_comparison_over_settings(tmp_path: Path) -> None:
    grid = {"training.lr": [1e-6, 0.1], "data.partition": ["iid", "by_label"]}
    found = compare(make, "fedavg,fedasync", seeds=1, grid=grid, out=tmp_path)
    worlds = [world["name"] for world in found.document["worlds"]]
    assert worlds == [choice_name(choice) for choice in choices(grid)]
    assert len(found.lines) == 8 and list(found.table.index.names) == ["world", "method"]
    assert found.best is not None and "training.lr=0.1" in found.best
    assert len(found.runs) == 8 and "fedavg (training.lr=0.1, data.partition=iid)" in found.runs
    assert all(run.module() is not None for runs in found.runs.values() for run in runs)
    again = compare(make, "fedavg,fedasync", seeds=1, grid=grid, out=tmp_path)  # nothing is run again
    walls = [[run["wall_seconds"] for line in each.lines for run in line["runs"]] for each in (found, again)]
    assert walls[0] == walls[1]


def test_without_a_grid_names_are_the_methods_alone(tmp_path: Path) -> None:
    found = compare(make, "fedavg", seeds=1, out=tmp_path)
    assert found.best == "fedavg" and list(found.runs) == ["fedavg"] and found.table.index.name == "method"


def test_the_command_compares_under_each_value(tmp_path: Path) -> None:
    words = ["compare", "-m", "fedavg", "--seeds", "1", "--until", "20s", "-s", "fleet.devices=6", "-o", str(tmp_path)]
    words += ["-g", "training.epochs=1,2", "-s", "run.executor=serial"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    worlds = json.loads((tmp_path / "comparison.json").read_text())["worlds"]
    assert [world["name"] for world in worlds] == ["training.epochs=1", "training.epochs=2"]
    assert [world["shared"]["training"]["epochs"] for world in worlds] == [1, 2]
    assert "training.epochs=2" in result.output

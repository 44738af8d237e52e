"""The figure of an experiment: the paper's layout as data, in files and on the page."""

import json
from pathlib import Path
from typing import Any

import pytest

from freshet.report.experiment import experiment, read_experiments
from freshet.report.figures import draw, experiment_figure, footnote
from freshet.report.page import document
from freshet.report.panels import Bars, Curves, panels, short_names
from freshet.report.plots import panel_figure
from freshet.report.reading import find, read

from .conftest import Write
from .helpers import EVIL, line, results, spread, world


def test_curves_have_one_panel_per_cell_three_in_a_row() -> None:
    rows = panels(results("curves", [world(f"cell{i}", [line("fedasmu"), line("fedavg", "sync")]) for i in range(4)]))
    assert [len(row) for row in rows] == [3, 1]
    first = rows[0][0]
    assert isinstance(first, Curves) and first.title == "cell0" and first.target == 0.7
    assert [(series.name, series.dashed) for series in first.series] == [("fedasmu", False), ("fedavg", True)]


def test_studies_have_a_row_of_bars_for_each_kind_with_the_settings_as_groups() -> None:
    both = [line("fedasmu", time=None), line("fedasync"), line("fedavg", "sync")]
    rows = panels(
        results("settings", [world("lenet-fmnist, 100 devices", both), world("lenet-fmnist, 200 devices", both)])
    )
    assert [[panel.title for panel in row] for row in rows] == [
        ["asynchronous: accuracy", "asynchronous: time to 0.7"],
        ["synchronous: accuracy", "synchronous: time to 0.7"],
    ]
    time = rows[0][1]
    assert isinstance(time, Bars) and time.groups == ["100 devices", "200 devices"]
    assert [(bar.name, bar.median) for bar in time.bars] == [("fedasmu", [None, None]), ("fedasync", [100.0, 100.0])]


def test_ablations_have_accuracy_above_time_with_a_column_per_cell() -> None:
    lines = [line("fedasmu@slot=rl"), line("fedasmu@slot=h1", diverged=[{"seed": 0, "time": 5.0}])]
    rows = panels(results("methods", [world("lenet", lines), world("cnn", lines)]))
    assert [[panel.title for panel in row] for row in rows] == [
        ["lenet: accuracy", "cnn: accuracy"],
        ["lenet: time to 0.7", "cnn: time to 0.7"],
    ]
    panel = rows[0][0]
    assert isinstance(panel, Bars)
    assert [(bar.name, bar.diverged) for bar in panel.bars] == [("slot=rl", [False]), ("slot=h1", [True])]
    assert "diverged" in footnote(rows, 2)


def test_a_common_prefix_of_names_is_left_out() -> None:
    assert short_names(["a@x=1", "a@x=2"]) == ["x=1", "x=2"]
    assert short_names(["a", "a@x=2"]) == ["a", "a@x=2"]
    assert short_names(["a@x=1"]) == ["a@x=1"]


@pytest.mark.parametrize("look", ["curves", "settings", "methods"])
def test_every_look_is_drawn_as_png_and_pdf(look: str, tmp_path: Path) -> None:
    lines = [line("fedasmu"), line("a $x^$ b", time=None, diverged=[{"seed": 1, "time": 9.0}]), line("fedavg", "sync")]
    made = draw(results(look, [world("one", lines), world("two", lines)]), tmp_path, "figure")
    assert [path.name for path in made] == ["figure.png", "figure.pdf"]
    assert made[0].read_bytes().startswith(b"\x89PNG") and made[1].read_bytes().startswith(b"%PDF")
    assert all(path.stat().st_size > 5_000 for path in made)


def test_an_axis_without_any_time_has_no_numbers() -> None:
    rows = panels(results("methods", [world("w", [line("a", time=None), line("b", time=None)])]))
    accuracy, time = experiment_figure(rows, "t", "n").axes
    assert len(accuracy.get_yticks()) > 1 and len(time.get_yticks()) == 0


def test_without_an_ended_run_there_is_no_figure(tmp_path: Path) -> None:
    nothing = line("fedasmu", finished=0, curve=None)
    assert draw(results("curves", [world("one", [nothing])]), tmp_path, "figure") == []


def test_panels_on_the_page_show_foreign_names_as_text() -> None:
    for look in ("curves", "settings", "methods"):
        found = [panel_figure(panel) for row in panels(results(look, [world("w", [line(EVIL)])])) for panel in row]
        told = json.dumps([figure["data"] for figure in found])
        assert "<script" not in told and "&lt;script" in told


def test_a_dash_for_a_target_that_was_not_reached() -> None:
    (accuracy,), (time,) = panels(results("methods", [world("w", [line("a", time=None)])]))
    assert panel_figure(time)["data"][0]["text"] == ["– not reached"]
    assert panel_figure(accuracy)["data"][0]["text"] == ["0.800"]


# ---- the page


def test_a_folder_of_a_grid_is_reported_with_its_experiments(written: Write, tmp_path: Path) -> None:
    run = written("grid/runs/a")
    folder = tmp_path / "grid"
    (folder / "ablation.json").write_text(json.dumps(results("methods", [world("w", [line("fedasmu")])])))
    (folder / "other.json").write_text(json.dumps({"something": "else"}))
    (folder / "broken.json").write_text('{"worlds": [1], "title": 1, "notes": []}')
    assert find([folder]).runs == [run]
    found, notes = read_experiments(find([folder]).results)
    assert [experiment.name for experiment in found] == ["ablation"]
    assert notes == ["broken.json does not hold valid results of freshet and is not shown."]
    shown = document([read(run)], None, found)["experiments"][0]
    assert shown["title"] == "an experiment" and shown["worlds"][0]["lines"][0]["bytes_fresh"] == 1e6
    assert [len(row) for row in shown["rows"]] == [1, 1]
    json.dumps(shown, allow_nan=False)


def test_a_run_directory_has_no_results_beside_it(written: Write) -> None:
    assert find([written("a")]).results == []


def test_results_without_their_runs_are_a_report_too(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text(json.dumps(results("curves", [world("w", [line("fedasmu")])])))
    runs, files = find([tmp_path])
    assert runs == []
    page = document([], None, read_experiments(files)[0])
    assert (page["worlds"], page["closeups"], len(page["experiments"])) == ([], [], 1)
    json.dumps(page, allow_nan=False)


def test_an_experiments_table_shows_rejected_uploads_and_devices_if_any() -> None:
    more = {"rejected": spread(3.0), "devices_worst": spread(0.0), "devices_jain": spread(0.9)}
    plain, rich = (
        experiment(results("curves", [world("w", lines)]))["worlds"][0]
        for lines in ([line("fedasmu")], [line("fedasmu"), line("fedavg", **more)])
    )
    assert (plain["columns"], plain["devices"]) == ([], [])
    assert [column["key"] for column in rich["columns"]] == ["rejected"]
    assert [column["key"] for column in rich["devices"]] == ["devices_worst", "devices_jain"]
    assert (rich["lines"][0]["rejected"], rich["lines"][1]["rejected"]) == (None, 3.0)


def test_the_trials_of_a_tuning_come_best_first(tmp_path: Path) -> None:
    trials = [(0.4, "complete", 0.1), (None, "pruned", 0.9), (0.7, "complete", 0.2)]
    content = {
        "method": "fedavg", "validation": 0.2, "seeds": [1000], "space": {"training.lr": {}},
        "trials": [{"value": v, "state": s, "values": {"training.lr": lr}, "error": None} for v, s, lr in trials],
    }  # fmt: skip
    (tmp_path / "tuning.json").write_text(json.dumps(content))
    [found], notes = read_experiments(find([tmp_path]).results)
    assert notes == [] and found.content["title"] == "tuning of fedavg"
    assert [(trial["score"], trial["values"]) for trial in found.content["trials"]] == [
        (0.7, [0.2]), (0.4, [0.1]), (None, [0.9]),
    ]  # fmt: skip
    assert found.content["score"]["kind"] == "share"
    (tmp_path / "tuning.json").write_text(json.dumps(content | {"metric": "rmse", "direction": "min"}))
    [found], notes = read_experiments(find([tmp_path]).results)
    assert (found.content["score"]["kind"], "mean -rmse over 1 seed" in found.content["notes"][0]) == ("value", True)


def by_rmse(look: str, target: float | None) -> dict[str, Any]:
    """A comparison of runs that are judged by something else than accuracy."""
    lines = [line("fedasmu", accuracy=14.25), line("fedavg", "sync", accuracy=1425.0, time=None)]
    return results(look, [world("mine", lines) | {"target": target, "metric": "rmse", "direction": "min"}])


@pytest.mark.parametrize("target", [15.0, None])
def test_figures_and_tables_use_the_metric_of_the_runs(target: float | None, tmp_path: Path) -> None:
    for look in ("curves", "settings", "methods"):
        found = by_rmse(look, target)
        flat = [panel for row in panels(found) for panel in row]
        scales = [figure["layout"]["yaxis"]["title"]["text"] for figure in map(panel_figure, flat)]
        drawn = experiment_figure(panels(found), "t", "n")
        assert {axes.get_ylabel() for axes in drawn.axes if axes.axison} == set(scales)
        times = {"virtual time (s)"} if target and look != "curves" else set()
        assert set(scales) == {"test rmse"} | times
        assert len(draw(found, tmp_path, look)) == 2
        assert not any("accuracy" in panel.title for panel in flat)
    (curves,) = panels(by_rmse("curves", target))[0]
    assert len(panel_figure(curves)["layout"]["shapes"]) == (target is not None)
    first = panels(by_rmse("methods", target))[0][0]
    assert [bar["text"] for bar in panel_figure(first)["data"]] == [["14.25"], ["1425"]]


def test_the_table_of_an_experiment_names_the_metric_and_its_kind() -> None:
    (found,) = experiment(by_rmse("curves", 15.0))["worlds"]
    assert found["metric"] == {"name": "rmse", "direction": "min"}
    assert [(c["key"], c["title"], c["kind"]) for c in found["measures"]] == [
        ("accuracy", "rmse", "value"), ("time_raw", "to {target}", "seconds"),
    ]  # fmt: skip
    (found,) = experiment(by_rmse("curves", None))["worlds"]
    assert (found["target"], [c["key"] for c in found["measures"]]) == (None, ["accuracy"])
    (usual,) = experiment(results("curves", [world("a", [line("fedasmu")])]))["worlds"]
    assert [c["kind"] for c in usual["measures"]] == ["share", "seconds"]

"""Figures for a paper: axes and labels follow the metric of the runs."""

from pathlib import Path

import pytest

from freshet.report.figures import _curves_figure, _times_figure, accuracy_figure
from freshet.report.groups import group_runs, headline
from freshet.report.reading import read_all
from freshet.runs.reader import RunDirectory

from .conftest import Write


@pytest.mark.parametrize(
    ("metric", "values", "target", "label", "drawn", "span"),
    [
        ("accuracy", [0.1, 0.5, 0.9], 0.8, "Test accuracy (%)", [10.0, 50.0, 90.0], (0.0, 100.0)),
        ("rmse", [20.0, 16.0, 14.0], 15.0, "Test rmse", [20.0, 16.0, 14.0], (0.0, 20.3)),
        ("rmse", [20.0, 16.0, 14.0], None, "Test rmse", [20.0, 16.0, 14.0], (0.0, 20.3)),
        ("score", [-2.0, -1.0, -1.0], None, "Test score", [-2.0, -1.0, -1.0], (-2.05, 0.0)),
    ],
)
def test_the_axis_follows_the_metric(
    written: Write, metric: str, values: list[float], target: float | None, label: str, drawn: list[float],
    span: tuple[float, float],
) -> None:  # fmt: skip
    figure = _curves_figure(group_runs(read_all([written("a", metric=metric, accuracy=values)])), target, "time")
    assert figure is not None
    (axes,) = figure.axes
    curve, *lines = axes.get_lines()
    assert (axes.get_ylabel(), list(curve.get_ydata())) == (label, drawn)
    assert axes.get_ylim() == pytest.approx(span, rel=0.03)
    scale = 100 if metric == "accuracy" else 1
    assert [line.get_ydata()[0] for line in lines] == ([] if target is None else [scale * target])


@pytest.mark.parametrize(
    ("metric", "first", "last", "said"), [("accuracy", 0.1, 0.9, "to 80 % (s)"), ("rmse", 0.9, 0.1, "to 0.8 (s)")]
)
def test_a_method_that_misses_the_target_stays_inside_the_axes(
    written: Write, metric: str, first: float, last: float, said: str
) -> None:
    runs = [
        written("a", metric=metric, accuracy=[first, last]),
        written("b", method="fedavg", metric=metric, accuracy=[first, first]),
    ]
    groups = group_runs(read_all(runs))
    lines = [headline(group, 0.8, 10.0, None) | {"style": 0} for group in groups]
    figure = _times_figure(groups, lines, 0.8)
    assert figure is not None
    (axes,) = figure.axes
    assert axes.get_ylim() == (1.5, -0.5)
    assert said in axes.get_xlabel()


@pytest.mark.parametrize("target", [None, 15.0])
def test_the_figure_of_runs_with_another_metric(written: Write, tmp_path: Path, target: float | None) -> None:
    facts = {"metric": "rmse", "direction": "min", "target": target, "time_to_target": target and 20.0}
    run = RunDirectory(written("a", metric="rmse", accuracy=[20.0, 16.0, 14.0], summary=facts))
    assert accuracy_figure([run], tmp_path / "a.png").stat().st_size > 1000

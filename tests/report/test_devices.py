"""The devices of one run in figures: bands that are percentiles, points that are devices, and nothing invented."""

import json
from typing import Any

import numpy as np
import pytest

from freshet.report.closeup import closeup, device_accuracies, devices_figures
from freshet.report.reading import read

from .conftest import Write


def sounded(time: float, accuracy: list[Any], **more: Any) -> dict[str, Any]:
    return {"time": time, "kind": "devices", "version": 2, "accuracy": accuracy, **more}


SPEEDS = {"train_seconds": [10.0, 20.0, 40.0], "samples": [5, 5, 5]}
FLEET = {"fleet": {"devices": 3}, "world": SPEEDS}


def test_bands_are_percentiles_over_the_devices(written: Write) -> None:
    values = [0.1, 0.5, 0.9]
    run = read(written("a", events=[sounded(0.0, [0.2] * 3), sounded(10.0, values)], **FLEET))
    figure = devices_figures(run)["band"]
    worst, best, low, high, middle = figure["data"]
    assert [trace["x"] for trace in figure["data"]] == [[0.0, 10.0]] * 5
    expected = [100 * np.quantile(values, q) for q in (0.0, 1.0, 0.1, 0.9, 0.5)]
    assert [trace["y"][1] for trace in (worst, best, low, high, middle)] == pytest.approx(expected)
    assert (best["fill"], high["fill"]) == ("tonexty", "tonexty")


def test_scatters_hold_a_point_per_device_with_a_score(written: Write) -> None:
    last = sounded(10.0, [0.1, None, 0.9], personal_accuracy=[0.3, None, 1.0])
    figures = devices_figures(read(written("a", events=[sounded(0.0, [0.0, 0.0, 0.0]), last], **FLEET)))
    plain, personal = figures["speed"]["data"]
    assert (plain["x"], plain["y"], plain["customdata"]) == ([10.0, 40.0], [10.0, 90.0], [0, 2])
    assert personal["y"] == [30.0, 100.0]
    assert plain["marker"]["color"] == [5, 5]
    assert figures["samples"]["data"][0]["x"] == [5, 5]
    assert [trace["name"] for trace in figures["band"]["data"][-2:]] == ["median, personalised", "worst, personalised"]
    json.dumps(figures, allow_nan=False)


def test_without_such_tests_there_is_nothing(written: Write) -> None:
    assert closeup(read(written("a")))["devices"] is None


def test_without_the_fleet_there_are_bands_only(written: Write) -> None:
    place = written("a", events=[sounded(0.0, [0.5, 0.6])])
    (place / "world.json").unlink()
    figures = devices_figures(read(place))
    assert figures["band"] is not None
    assert (figures["speed"], figures["samples"]) == (None, None)


@pytest.mark.parametrize("accuracy", [None, "high", [], ["x"], [None], {"a": 1}])
def test_damaged_lists_count_as_missing(accuracy: Any, written: Write) -> None:
    run = read(written("a", events=[sounded(0.0, accuracy), sounded(1.0, [0.5, True])], **FLEET))
    assert [test.plain for test in device_accuracies(run)] == [[0.5, None]]

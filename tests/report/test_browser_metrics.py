"""The page of runs that are judged by something else than accuracy, in a real browser."""

import json
from pathlib import Path

import pytest

from freshet.report.page import report

from .conftest import Write
from .helpers import line, results, world
from .test_browser import Driver, browser, errors, look, pytestmark, wait  # noqa: F401


@pytest.mark.parametrize("target", [None, 15.0])
def test_no_per_cent_and_no_target_that_nobody_set(
    browser: Driver,  # noqa: F811
    written: Write,
    tmp_path: Path,
    target: float | None,
) -> None:
    setting = {} if target is None else {"run": {"target": target}}
    runs = [
        written(f"{method}{seed}", method=method, seed=seed, metric="rmse", accuracy=[1425.0, 14.253 + seed], **setting)
        for method in ("fedasync", "fedavg")
        for seed in (0, 1)
    ]
    held = {"reference": "fedasync", "difference": 2.5, "p": 0.5, "pairs": 2, "time_raw": None}
    lines = [line("fedasync", accuracy=14.25, time=None), line("fedavg", accuracy=1425.0, time=None, against=held)]
    found = results("curves", [world("mine", lines) | {"target": target, "metric": "rmse", "direction": "min"}])
    trials = [{"value": -14.25, "state": "complete", "values": {"training.lr": 0.1}, "error": None}]
    study = {"method": "fedavg", "validation": 0.2, "seeds": [1], "space": {"training.lr": {}}, "trials": trials}
    (tmp_path / "a.json").write_text(json.dumps(found))
    (tmp_path / "b.json").write_text(json.dumps(study | {"metric": "rmse", "direction": "min"}))
    path = report(runs, tmp_path / "report.html", None, sorted(tmp_path.glob("*.json")))
    look(browser, 1300, False)
    browser.get_log("browser")
    browser.get(path.as_uri())
    wait(lambda: browser.execute_script("return document.documentElement.dataset.ready === 'yes'"))
    wait(lambda: len(browser.find_elements("css selector", "#experiments .main-svg")) >= 1)
    assert errors(browser) == []
    heads, tables = [], []
    for table in browser.find_elements("css selector", "#experiments table"):
        heads.append([cell.text for cell in table.find_elements("css selector", "th")])
        tables.append([cell.text for cell in table.find_elements("css selector", "tbody tr:last-child td")])
    times = [] if target is None else ["to 15 (s)", "time vs reference"]
    held_by = "rmse vs reference" if target is None else "rmse vs it"
    assert heads[0] == ["method", "runs", "rmse", *times, held_by, "p"]
    assert tables[0][2] == "1425" and "2.5" in tables[0][-2]
    assert heads[-1][1] == "score" and tables[-1][1] == "-14.25"
    text = browser.find_element("css selector", "body").text
    assert ("Time to 15" in text or "First to 15" in text) == (target is not None)
    assert "Time to 0" not in text and "accuracy (%)" not in text

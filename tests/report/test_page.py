"""The page as a file: self-contained, and safe whatever a run directory contains."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freshet import Result
from freshet.errors import ConfigError, RunError
from freshet.report.page import document, embed_json, render, report
from freshet.report.reading import read, read_all

from .conftest import Write
from .helpers import EVIL, line, results, world


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_embedded_json_cannot_end_its_element() -> None:
    text = embed_json({"name": "</script><!--&\u2028\ud800"})
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert json.loads(text) == {"name": "</script><!--&\u2028\ud800"}


def test_foreign_names_stay_data(written: Write, tmp_path: Path) -> None:
    place = written("a", method=EVIL, run={"note": EVIL}, fleet={"x": ["</script>"]})
    page = report([place], tmp_path / "r.html").read_text()
    assert "alert(1)" in page
    assert EVIL not in page
    data = data_of(page)
    assert data["runs"][0]["method"] == EVIL, "the page itself shows it as text"
    curve = data["worlds"][0]["accuracy"]["time"]["data"][0]
    assert curve["name"] == "&lt;script&gt;alert(1)&lt;/script&gt;", "Plotly reads markup"


def test_the_file_is_complete(finished: Callable[[str], Result], tmp_path: Path) -> None:
    path = report([finished("fedasmu").directory], tmp_path / "r.html")
    page = path.read_text()
    shell = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"https?://|src=|@import|url\(", shell.replace("http://www.w3.org/2000/svg", ""))
    assert page.count("plotly.js v") == 1
    assert "default-src 'none'" in page
    assert path.stat().st_size < 8_000_000


def test_the_content_of_the_page(finished: Callable[[str], Result]) -> None:
    runs = read_all(finished(method).directory for method in ("fedasmu", "fedavg"))
    data = document(runs)
    [world] = data["worlds"]
    assert [line["label"] for line in world["lines"]] == ["fedasmu", "fedavg"]
    assert set(world["accuracy"]) == set(world["loss"]) == {"time", "rounds", "bytes", "wall"}
    assert [item["timeline"]["devices"] for item in data["closeups"]] == [8, 8]
    assert data["closeups"][0]["partition"] is not None
    assert data["closeups"][1]["slots"] is None, "FedAvg's devices do not ask"
    json.dumps(data, allow_nan=False)


def test_wall_time_is_shown_if_it_is_logged(written: Write) -> None:
    place = written("a")
    rows = [json.loads(line) | {"wall": 2.0 * i} for i, line in enumerate((place / "metrics.jsonl").open())]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = document([read(place)])["worlds"][0]["accuracy"]["wall"]
    assert figure["data"][0]["x"] == [0.0, 2.0, 4.0]


def test_rounds_are_an_axis_if_they_are_logged(written: Write) -> None:
    place = written("a")
    assert "rounds" not in document([read(place)])["worlds"][0]["accuracy"]
    rows = [json.loads(line) | {"rounds": 3 * i} for i, line in enumerate((place / "metrics.jsonl").open())]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figure = document([read(place)])["worlds"][0]["accuracy"]["rounds"]
    assert figure["data"][0]["x"] == [0.0, 3.0, 6.0]
    assert figure["layout"]["xaxis"]["title"]["text"] == "rounds"


def with_losses(place: Path, losses: list[float | None]) -> Path:
    lines = (place / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"loss": loss} for line, loss in zip(lines, losses, strict=True)]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def test_the_loss_is_drawn_beside_the_accuracy(written: Write) -> None:
    runs = [with_losses(written(f"a{seed}", seed=seed), [2.0, 1.0 + seed, 0.5 * seed]) for seed in (1, 2, 3)]
    figure = document(read_all(runs))["worlds"][0]["loss"]["time"]
    low, high, middle = figure["data"]
    assert (low["y"], high["y"], middle["y"]) == ([2.0, 2.0, 0.5], [2.0, 4.0, 1.5], [2.0, 3.0, 1.0])
    assert figure["layout"]["yaxis"]["rangemode"] == "tozero"


def test_a_loss_over_decades_has_a_logarithmic_axis_and_a_missing_one_a_gap(written: Write) -> None:
    figure = document([read(with_losses(written("a"), [2.0, None, 4e7]))])["worlds"][0]["loss"]["time"]
    assert figure["data"][0]["y"] == [2.0, None, 4e7]
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert len(figure["layout"]["yaxis"]["tickvals"]) <= 12


def test_bands_and_dashes(written: Write) -> None:
    good = [written(f"a{seed}", seed=seed, accuracy=[0.1, 0.1 * seed]) for seed in (1, 2, 3)]
    bad = written("stopped", seed=4, accuracy=[0.9, 0.9], status="interrupted")
    low, high, middle, dashed = document(read_all([*good, bad]))["worlds"][0]["accuracy"]["time"]["data"]
    assert (low["y"], high["y"], middle["y"]) == ([10, 10], [10, 30], [10, 20])
    assert (dashed["line"]["dash"], dashed["name"]) == ("dash", "stopped (interrupted)")


@pytest.mark.parametrize("status", [None, "interrupted", "failed"])
def test_a_run_that_has_only_begun(written: Write, status: str | None) -> None:
    data = document([read(written("a", accuracy=[], status=status))])
    [world] = data["worlds"]
    assert (world["accuracy"], world["loss"]) == ({}, {})
    assert (world["time_to_target"], world["staleness"]) == (None, None)
    assert world["lines"][0]["runs"] == 0
    json.dumps(data, allow_nan=False)


@pytest.mark.parametrize("row", [{}, {"time": "x"}, {"time": 1, "accuracy": "high"}, {"time": 1, "accuracy": True}])
def test_metrics_of_the_wrong_type_count_as_missing(written: Write, row: dict[str, Any]) -> None:
    place = written("a", accuracy=[])
    (place / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert document([read(place)])["worlds"][0]["lines"][0]["accuracy"]["median"] is None


def test_python_takes_the_folders_that_the_command_takes(written: Write, tmp_path: Path) -> None:
    places = [written("compare/runs/a"), written("compare/runs/b", seed=2)]
    folder = tmp_path / "compare"
    (folder / "comparison.json").write_text(json.dumps(results("comparison", [world("w", [line("fedasmu")])])))
    assert [run.name for run in read_all([folder])] == [run.name for run in read_all(str(folder))] == ["a", "b"]
    page = data_of(report(folder, tmp_path / "folder.html").read_text())
    assert [each["title"] for each in page["experiments"]] == ["an experiment"], "results beside the runs, too"
    assert report(str(places[0]), tmp_path / "one.html").is_file()


def test_mistakes_are_one_sentence(written: Write, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run directory: the folder does not exist"):
        report([tmp_path / "nowhere"], tmp_path / "r.html")
    with pytest.raises(ConfigError, match="cannot be written"):
        report([written("a")], tmp_path / "no" / "r.html")
    with pytest.raises(RunError, match="no run"):
        document([])


def test_the_live_page_holds_no_data_and_may_ask_its_server() -> None:
    page = render(None)
    assert data_of(page) is None
    assert "connect-src 'self'" in page


def test_bars_keep_their_groups_colour_and_show_dashes(written: Write) -> None:
    crashed = written("a", method="crashed", status="failed")
    never = written("b", method="never", accuracy=[0.1, 0.2])
    reached = [written(f"c{seed}", method="c", seed=seed, accuracy=[0.1, 0.9 - seed / 5]) for seed in (0, 1)]
    figure = document(read_all([crashed, never, *reached]))["worlds"][0]["time_to_target"]
    raw = figure["data"][0]
    assert (raw["x"], raw["marker"]["color"]) == ([None, None], ["@c1/100", "@c2/100"])
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["— not reached", "— reached by 1 of 2 seeds"]

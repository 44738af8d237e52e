"""The page as a file: self-contained, and safe whatever a run directory contains."""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from freshet import Result
from freshet.errors import ConfigError, RunError
from freshet.report.columns import by_result
from freshet.report.page import SCRIPTS, document, embed_json, render, report
from freshet.report.reading import read, read_all
from freshet.runs.records import Metric

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
    packed = re.search(r'<script type="text/plain" id="plotly">(.*?)</script>', page)
    assert packed is not None
    library = gzip.decompress(base64.b64decode(packed[1])).decode()
    assert "plotly.js (cartesian - minified) v" in library[:100]
    assert base64.b64encode(hashlib.sha256(library.encode()).digest()).decode() in page, "its hash is in the policy"
    assert "default-src 'none'" in page
    assert path.stat().st_size < 1_500_000


def test_the_content_of_the_page(finished: Callable[[str], Result]) -> None:
    runs = read_all(finished(method).directory for method in ("fedasmu", "fedavg"))
    data = document(runs)
    [world] = data["worlds"]
    assert [group["label"] for group in world["groups"]] == ["fedasmu", "fedavg"]
    assert {line["label"] for line in world["lines"]} == {"fedasmu", "fedavg"}
    finals = [line["accuracy"]["median"] for line in world["lines"]]
    assert finals == sorted(finals, reverse=True)
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
    assert (raw["x"], raw["marker"]["color"]) == ([None, None], ["@c2/100", "@c1/100"])
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["— reached by 1 of 2 seeds", "— not reached"]


def test_the_page_without_data_is_small() -> None:
    assert len(render(None)) < 850_000


def test_tables_begin_with_the_best_result(written: Write) -> None:
    values = {"a": 0.5, "b": 0.9, "c": 0.7}
    places = [written(name, method=name, accuracy=[0.1, value]) for name, value in values.items()]
    begun = written("d", method="d", accuracy=[], status=None)
    [world] = document(read_all([begun, *places]))["worlds"]
    assert [line["label"] for line in world["lines"]] == ["b", "c", "a", "d"]
    assert [world["groups"][line["group"]]["label"] for line in world["lines"]] == ["b", "c", "a", "d"]
    assert world["time_to_target"]["layout"]["yaxis"]["ticktext"] == ["b", "c", "a"]


def test_a_table_of_losses_begins_with_the_least() -> None:
    lines = [{"value": value} for value in (2.0, None, 1.0)]
    ordered = by_result(lines, lambda line: line["value"], Metric("loss", "min"))
    assert [line["value"] for line in ordered] == [1.0, 2.0, None]


def test_only_simulated_time_is_virtual(written: Write) -> None:
    simulated, real = written("a", accuracy=[0.1, 0.9]), written("b", accuracy=[0.1, 0.9])
    summary = json.loads((real / "summary.json").read_text()) | {"real_time": True}
    (real / "summary.json").write_text(json.dumps(summary))
    virtual, timed = (document([read(place)]) for place in (simulated, real))
    assert "virtual time (s)" in json.dumps(virtual)
    assert "virtual" not in json.dumps(timed)
    assert [data["worlds"][0]["clock"] for data in (virtual, timed)] == ["virtual time", "time"]
    assert virtual["worlds"][0]["accuracy"]["time"]["layout"]["xaxis"]["title"]["text"] == "virtual time (s)"
    assert timed["worlds"][0]["accuracy"]["time"]["layout"]["xaxis"]["title"]["text"] == "time (s)"
    assert timed["worlds"][0]["time_to_target"]["layout"]["xaxis"]["title"]["text"] == "time to the target (s)"
    assert document(read_all([simulated, real]))["subject"]["clock"] == "time"


def test_no_script_of_the_page_says_virtual_on_its_own() -> None:
    for name in SCRIPTS:
        for words in (files("freshet.report") / "assets" / name).read_text().splitlines():
            assert "irtual" not in words or "world.clock ===" in words, (name, words)


def test_staleness_has_a_legend_if_there_are_several_methods(finished: Callable[[str], Result]) -> None:
    runs = [read(finished(method).directory) for method in ("fedasmu", "fedasync")]
    alone, both = (document(each)["worlds"][0]["staleness"] for each in (runs[:1], runs))
    assert (alone["layout"]["showlegend"], both["layout"]["showlegend"]) == (False, True)
    assert {trace["name"] for trace in both["data"]} == {"fedasmu", "fedasync"}


def test_the_reference_of_a_sweep_is_its_first(written: Write, tmp_path: Path) -> None:
    """The folders of a grid are named by hashes; the results tell the order in which it was given."""
    keys = {"ff00": 0.5, "0a11": 0.1, "c222": 0.9}
    for key, lr in keys.items():
        for seed in (1, 2):
            written(f"{key}{seed}", method="fedavg", training={"lr": lr}, seed=seed)
    lines = [{"runs": [{"key": f"{key}{seed}"} for seed in (1, 2)]} for key in keys]
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps({"worlds": [{"lines": lines}]}))
    page = report(sorted(tmp_path.glob("[0-9a-f]*[12]")), tmp_path / "r.html", results=[file])
    [world] = data_of(page.read_text())["worlds"]
    assert [group["label"] for group in world["groups"]] == [f"fedavg (lr={lr})" for lr in keys.values()]
    found = {line["label"]: line.get("against", {}).get("reference") for line in world["lines"]}
    first = "fedavg (lr=0.5)"
    assert found == {first: None, "fedavg (lr=0.1)": first, "fedavg (lr=0.9)": first}

"""The table of a comparison from handwritten run directories, against numbers computed by hand."""

import csv
import io
import json
from dataclasses import replace

import pytest
import tomli_w
from rich.console import Console

from freshet.cli.screen import print_results
from freshet.core.messages import CONTROL_BYTES
from freshet.errors import ConfigError
from freshet.experiments.compare import run_grid, to_do
from freshet.experiments.grid import Scenario, expand, model_bytes, parse_entries
from freshet.experiments.results import document, rows, write
from freshet.experiments.store import Store
from freshet.report.columns import overhead
from freshet.runs.reader import RunDirectory

from .helpers import jobs

#: Accuracy at 0, 10, ..., 60 s, by method and seed.
CURVES = {
    ("fedasmu", 0): [0.1, 0.4, 0.6, 0.7, 0.7, 0.7, 0.8],
    ("fedasmu", 1): [0.1, 0.6, 0.4, 0.6, 0.6, 0.7, 0.6],
    ("fedasmu", 2): [0.1, 0.3, 0.6, 0.6, 0.6, 0.6, 0.7],
    ("fedavg", 0): [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6],
    ("fedavg", 1): [0.1, 0.2, 0.3, 0.3, 0.4, 0.5, 0.5],
    ("fedavg", 2): [0.1, 0.2, 0.3, 0.3, 0.4, 0.4, 0.4],
}
GRID = ["run.until=60", "run.eval_every=10.0", "run.target=0.6"]


def finish(store, job, curve, **facts):
    """A finished run directory with this curve."""
    directory = store.directory(job.key)
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(tomli_w.dumps(job.config.tables()))
    lines = [json.dumps({"time": 10.0 * i, "accuracy": a, "loss": 1.0, "version": i + 1}) for i, a in enumerate(curve)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    seed = job.seed
    summary = {"status": "finished", "seed": seed, "method": job.entry.method, "trips": 100 + seed}
    summary |= {"bytes_up": 1000 * (seed + 1), "bytes_down": 5000, "mean_staleness": 2.0 + seed, "discards": seed}
    summary |= {"uploads": 9, "lost": 0, "rejected": 0, "wall_seconds": 3.0, "final_accuracy": curve[-1]}
    summary |= {"best_accuracy": max(curve), "weights_sha256": "0", "freshet": "0.1"}
    (directory / "summary.json").write_text(json.dumps(summary | facts))


@pytest.fixture
def grid():
    return jobs("fedasmu,fedavg", (0, 1, 2), GRID)


@pytest.fixture
def store(tmp_path, grid):
    found = Store(tmp_path)
    for job in grid:
        finish(found, job, CURVES[job.entry.label, job.seed])
    return found


def lines(grid, store):
    return {line["label"]: line for line in document(grid, store, title="t")["worlds"][0]["lines"]}


def shown(found):
    console = Console(file=io.StringIO(), width=200)
    print_results(console, found)
    return console.file.getvalue()


def test_medians_and_spreads_over_seeds(grid, store):
    found = lines(grid, store)
    asmu, avg = found["fedasmu"], found["fedavg"]
    assert asmu["accuracy"] == {"median": 0.7, "low": 0.6, "high": 0.8, "count": 3, "of": 3}
    assert asmu["best"]["median"] == 0.7
    assert (avg["accuracy"]["median"], avg["best"]["high"]) == (0.5, 0.6)
    assert (asmu["bytes_up"]["median"], asmu["bytes_down"]["median"]) == (2000, 5000)
    assert (asmu["mean_staleness"]["median"], asmu["discards"]["median"], asmu["trips"]["median"]) == (3.0, 1, 101)


def test_times_to_the_target_raw_and_of_the_five_point_mean(grid, store):
    asmu, avg = (lines(grid, store)[name] for name in ("fedasmu", "fedavg"))
    # raw: seeds reach 0.6 first at 20, 10, 20 s; trailing means of five at 40, 50, 60 s:
    # seed 0: 0.5, 0.62; seed 1: 0.46, 0.58, 0.58; seed 2: 0.44, 0.54, 0.62
    assert asmu["time_raw"] == {"median": 20.0, "low": 10.0, "high": 20.0, "count": 3, "of": 3}
    assert asmu["times_mean"] == [50.0, None, 60.0]
    assert (asmu["time_mean"]["median"], asmu["time_mean"]["count"]) == (60.0, 2)
    # FedAvg: only seed 0 reaches it, so there is no median
    assert (avg["time_raw"]["median"], avg["time_raw"]["low"], avg["time_raw"]["count"]) == (None, 50.0, 1)
    assert avg["time_mean"]["count"] == 0


def test_significance_is_paired_over_seeds_against_the_reference(grid, store):
    found = lines(grid, store)
    assert "against" not in found["fedasmu"]
    assert found["fedavg"]["against"]["reference"] == "fedasmu"
    # differences -0.2, -0.1, -0.3: of the 8 patterns of signs only two are as extreme
    assert found["fedavg"]["against"]["pairs"] == 3
    assert found["fedavg"]["against"]["difference"] == pytest.approx(-0.2)
    assert found["fedavg"]["against"]["p"] == pytest.approx(0.25)


def test_a_crashed_run_is_shown_as_failed_and_not_averaged(tmp_path, grid):
    store = Store(tmp_path / "other")
    for job in grid:
        if (job.entry.label, job.seed) == ("fedasmu", 0):
            finish(store, job, [0.99] * 7, status="failed")
            store.record_failure(job.key, ValueError("out of [red] paint"))
        else:
            finish(store, job, CURVES[job.entry.label, job.seed])
    found = document(grid, store, title="t")
    asmu, avg = found["worlds"][0]["lines"]
    assert (asmu["finished"], asmu["failed"], asmu["all"]) == (2, 1, 3)
    assert asmu["accuracy"] == {"median": pytest.approx(0.65), "low": 0.6, "high": 0.7, "count": 2, "of": 2}
    assert (avg["against"]["pairs"], avg["against"]["p"]) == (2, 0.5)
    text = shown(found)
    assert "2/3 1 failed" in text
    assert "ValueError: out of [red] paint" in text


def test_a_missing_run_is_not_averaged(grid, tmp_path):
    store = Store(tmp_path / "empty")
    found = document(grid, store, title="t")
    line = found["worlds"][0]["lines"][0]
    assert (line["finished"], line["failed"], line["accuracy"]["median"]) == (0, 0, None)
    assert {run["state"] for run in line["runs"]} == {"missing"}
    assert "0/3" in shown(found)


def test_a_damaged_run_counts_as_failed(grid, store):
    (store.directory(grid[0].key) / "metrics.jsonl").write_text("not json\n")
    line = document(grid, store, title="t")["worlds"][0]["lines"][0]
    assert (line["finished"], line["failed"]) == (2, 1)


def test_the_table_has_a_dash_where_the_target_was_not_reached(grid, store):
    text = shown(document(grid, store, title="t"))
    row = next(line for line in text.splitlines() if line.startswith("fedavg"))
    assert "– (1/3)" in row
    assert "-0.200" in row and "0.250" in row
    assert "it is at least 0.25" in text


def test_reconstructed_methods_are_marked_in_table_and_files(tmp_path):
    grid, store = jobs("fedasmu,fedsa", (0,), GRID), Store(tmp_path)
    for job in grid:
        finish(store, job, CURVES["fedavg", 0])
    found = document(grid, store, title="t")
    text = shown(found)
    assert "fedsa [R]" in text and "reconstructed" in text
    assert [row["method"] for row in rows(found)] == ["fedasmu", "fedsa [R]"]


def test_files_hold_everything_and_agree(grid, store, tmp_path):
    found = document(grid, store, title="t", notes=["a note"])
    as_json, as_csv = write(found, tmp_path / "out")
    loaded = json.loads(as_json.read_text())
    assert loaded == json.loads(json.dumps(found))
    assert loaded["worlds"][0]["shared"]["data"]["name"] == "digits"
    with as_csv.open() as file:
        table = list(csv.DictReader(file))
    assert [row["method"] for row in table] == ["fedasmu", "fedavg"]
    assert float(table[0]["accuracy_median"]) == 0.7
    assert table[1]["time_raw_median"] == ""
    assert float(table[1]["accuracy_vs_reference_p"]) == 0.25
    assert (table[1]["reference"], table[1]["time_raw_bound"]) == ("fedasmu", ">")


def test_runs_of_different_versions_get_a_note(grid, store):
    path = store.directory(grid[0].key) / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"freshet": "9.9"}))
    assert "0.1, 9.9" in document(grid, store, title="t")["notes"][-1]


def test_published_numbers_stand_in_the_table_beside_ours(tmp_path):
    grid = expand(parse_entries("fedasmu,fedavg"), [0], None, [Scenario("somewhere")])
    store = Store(tmp_path)
    finish(store, grid[0], CURVES["fedasmu", 0])
    published = {grid[0].key: {"accuracy": 0.858, "time": 11_603}}
    text = shown(document(grid, store, title="t", published=published))
    row = next(line for line in text.splitlines() if line.startswith("fedasmu"))
    assert "0.800" in row and "0.858" in row and "11,603" in row


# ---- references


def curves(store, grid, **by_label):
    for job in grid:
        finish(store, job, by_label[job.entry.label.replace("-", "_")])


def test_each_kind_has_its_reference_and_times_are_ratios_to_it(tmp_path):
    grid, store = jobs("fedasync,fedasmu,fedavg,fedssmu", (0,), GRID), Store(tmp_path)
    reach = {place: [0.1] * place + [0.7] * (7 - place) for place in range(1, 7)}
    curves(store, grid, fedasync=reach[4], fedasmu=reach[2], fedavg=reach[6], fedssmu=reach[3])
    found = lines(grid, store)
    assert found["fedasync"]["against"]["reference"] == "fedasmu"
    assert found["fedasync"]["against"]["time_raw"] == {"ratio": 2.0, "bound": "="}, "40 s against 20 s"
    assert found["fedavg"]["against"]["reference"] == "fedssmu"
    assert found["fedavg"]["against"]["time_raw"] == {"ratio": 2.0, "bound": "="}
    assert "against" not in found["fedasmu"] and "against" not in found["fedssmu"]
    text = shown(document(grid, store, title="t"))
    assert "1.60x = takes 1.6 times as long" in text and "fedasync against fedasmu; fedavg against fedssmu" in text
    row = next(line for line in text.splitlines() if line.startswith("fedasync"))
    assert "2.00x" in row and "+0.000" in row


def test_a_target_that_one_side_never_reached_gives_a_bound(tmp_path):
    grid, store = jobs("fedasmu,fedasync,fedbuff", (0,), GRID), Store(tmp_path)
    curves(store, grid, fedasmu=[0.1] + [0.7] * 6, fedasync=[0.1] * 7, fedbuff=[0.1] + [0.7] * 6)
    text = shown(document(grid, store, title="t"))
    assert ">6.00x" in text, "not in 60 s, the reference in 10 s"
    found = {
        line["label"]: line for line in document(grid, store, title="t", reference="fedasync")["worlds"][0]["lines"]
    }
    assert found["fedbuff"]["against"]["time_raw"] == {"ratio": pytest.approx(10 / 60), "bound": "<"}
    assert found["fedasync"]["style"] != found["fedasmu"]["style"]
    never = {line["label"]: line for line in document(grid[:2], store, title="t")["worlds"][0]["lines"]}
    assert never["fedasync"]["against"]["time_mean"] == {"ratio": pytest.approx(60 / 50), "bound": ">"}


def test_the_reference_can_be_chosen(grid, store):
    found = {line["label"]: line for line in document(grid, store, title="t", reference="fedavg")["worlds"][0]["lines"]}
    assert found["fedasmu"]["against"]["reference"] == "fedavg"
    assert found["fedasmu"]["against"]["difference"] == pytest.approx(0.2)
    with pytest.raises(ConfigError, match="--reference"):
        document(grid, store, title="t", reference="fedbuff")
    more = jobs("fedasmu,fedasync", (0,), GRID)
    with pytest.raises(ConfigError, match="two of one kind"):
        document(more, store, title="t", reference="fedasmu,fedasync")


# ---- divergence, rejections, remarks, traffic


def test_a_diverged_run_has_ended_counts_and_is_marked(tmp_path):
    grid, store = jobs("fedasmu,fedavg", (0, 1), GRID), Store(tmp_path)
    for job in grid:
        if (job.entry.label, job.seed) == ("fedasmu", 1):
            finish(store, job, [0.1, 0.5, 0.1], status="diverged", diverged=20.0)
        else:
            finish(store, job, CURVES[job.entry.label, job.seed], diverged=None)
    assert to_do(grid, store) == to_do(grid, store, retry=True) == [], "it would diverge again"
    assert run_grid(grid, store)
    found = document(grid, store, title="t")
    line = found["worlds"][0]["lines"][0]
    assert (line["finished"], line["failed"], line["diverged"]) == (2, 0, [{"seed": 1, "time": 20.0}])
    assert line["accuracy"] == {"median": pytest.approx(0.45), "low": 0.1, "high": 0.8, "count": 2, "of": 2}
    assert line["curve"]["time"][-1] == 60.0 and line["curve"]["low"][-1] == 0.1, "it keeps its last value"
    text = shown(found)
    assert "2/2 1 diverged at 20 s" in text and "its last numbers count in the medians" in text
    row = rows(found)[0]
    assert (row["diverged"], row["diverged_at"]) == (1, "20")
    assert [run["diverged"] for run in line["runs"]] == [None, 20.0]


def test_a_run_that_went_on_after_diverging_is_marked_too(tmp_path):
    grid, store = jobs("fedasmu", (0,), GRID), Store(tmp_path)
    finish(store, grid[0], [0.1] * 7, diverged=30.0)
    assert "1/1 1 diverged at 30 s" in shown(document(grid, store, title="t"))


def test_rejected_uploads_have_a_column_if_there_are_any(tmp_path):
    grid, store = jobs("fedasmu", (0, 1), GRID), Store(tmp_path)
    finish(store, grid[0], CURVES["fedasmu", 0])
    assert "rejected" not in shown(document(grid, store, title="t"))
    finish(store, grid[1], CURVES["fedasmu", 1], rejected=8)
    text = shown(document(grid, store, title="t"))
    assert "rejected" in text
    assert rows(document(grid, store, title="t"))[0]["rejected"] == 4


def test_the_devices_have_columns_if_they_were_tested(tmp_path):
    grid, store = jobs("fedasmu,fedavg", (0, 1), GRID), Store(tmp_path)
    finish(store, grid[0], CURVES["fedasmu", 0])
    assert "worst device" not in shown(document(grid, store, title="t"))
    for job, worst in zip(grid[1:], (0.0, 0.3, 0.1), strict=True):
        label = job.entry.label
        finish(store, job, CURVES[label, job.seed], devices_median=worst + 0.5, devices_worst=worst, devices_jain=0.987)
    found = document(grid, store, title="t")
    text = shown(found)
    assert "median device" in text and "worst device" in text and "0.987" in text and "1/n" in text
    assert "personal" not in text.split("Jain: 1")[0], "nobody trained on the devices first"
    by_method = {row["method"]: row for row in rows(found)}
    tested = {line["label"]: line["devices_worst"] for line in found["worlds"][0]["lines"]}
    assert {name: by_method[name]["devices_worst"] for name in tested} == {n: s["median"] for n, s in tested.items()}
    assert sum(spread["count"] for spread in tested.values()) == 3
    assert by_method["fedavg"]["personal_median"] is None


def test_a_methods_remark_is_a_footnote(tmp_path, monkeypatch):
    from freshet.core.about import Remark
    from freshet.methods import class_and_preset

    method = class_and_preset("fedavg")[0]
    monkeypatch.setattr(method, "about", replace(method.about, remark=Remark("*", "weighs by samples")))
    grid, store = jobs("fedasmu,fedavg", (0,), GRID), Store(tmp_path)
    for job in grid:
        finish(store, job, CURVES["fedavg", 0])
    text = shown(document(grid, store, title="t"))
    assert "fedavg [*]" in text and "[*] weighs by samples" in text
    assert "fedasmu [*]" not in text


def test_fresh_models_are_the_merges_times_the_bytes_of_the_network(tmp_path):
    grid, store = jobs("fedasmu,fedavg", (0,)), Store(tmp_path)
    assert run_grid(grid, store)
    size = model_bytes(grid[0].config)
    asmu, avg = document(grid, store, title="t")["worlds"][0]["lines"]
    merges = sum(event["kind"] == "merge" for event in RunDirectory(store.directory(grid[0].key)).events())
    uploads = [e["bytes"] for e in RunDirectory(store.directory(grid[0].key)).events() if e["kind"] == "upload"]
    assert set(uploads) == {size}, "the bytes that the simulator counts"
    assert merges > 0 and asmu["bytes_fresh"]["median"] == merges * size
    assert asmu["bytes_down"]["median"] >= asmu["trips"]["median"] * size + merges * size
    assert avg["bytes_fresh"]["median"] == 0
    assert overhead(300.0, 700.0, 200.0) == pytest.approx(0.25)
    assert overhead(None, 1.0, 1.0) is None


@pytest.mark.parametrize("settings", [["fedasmu.refresh=every"], ["fedasmu.slot=never", "fedasmu.push_after=1"]])
def test_several_fresh_models_per_trip_and_pushes_are_counted(tmp_path, settings):
    grid, store = jobs("fedasmu", (0,), settings), Store(tmp_path)
    assert run_grid(grid, store)
    run = RunDirectory(store.directory(grid[0].key))
    events, size = list(run.events()), model_bytes(grid[0].config)
    sent = sum(event["kind"] in ("request", "push") and event["fresh"] is not None for event in events)
    empty = sum(event["kind"] == "request" and event["fresh"] is None for event in events)
    (line,) = document(grid, store, title="t")["worlds"][0]["lines"]
    assert sent > 0 and line["bytes_fresh"]["median"] == sent * size
    assert line["bytes_down"]["median"] == (line["trips"]["median"] + sent) * size + empty * CONTROL_BYTES
    assert "of which fresh models" in shown(document(grid, store, title="t"))

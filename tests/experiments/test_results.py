"""The table of a comparison against numbers computed by hand, from run directories written by hand."""

import csv
import io
import json

import pytest
import tomli_w
from rich.console import Console

from freshet.cli.grids import print_results
from freshet.experiments.cells import CELLS
from freshet.experiments.grid import Request, World, expand, parse_entries
from freshet.experiments.results import document, published, rows, write
from freshet.experiments.store import Store

from .helpers import TINY, jobs

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


def test_significance_is_paired_over_seeds_against_the_first_method(grid, store):
    found = lines(grid, store)
    assert "against" not in found["fedasmu"]
    # differences -0.2, -0.1, -0.3: of the 8 patterns of signs only two are as extreme
    assert found["fedavg"]["against"]["pairs"] == 3
    assert found["fedavg"]["against"]["difference"] == pytest.approx(-0.2)
    assert found["fedavg"]["against"]["p"] == pytest.approx(0.25)


def test_a_crashed_run_is_shown_as_failed_and_not_averaged(tmp_path, grid):
    store = Store(tmp_path / "other")
    for job in grid:
        if (job.entry.label, job.seed) == ("fedasmu", 0):
            finish(store, job, [0.99] * 7, status="failed")
            store.fail(job.key, ValueError("out of [red] paint"))
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


def test_a_run_that_was_not_yet_made_is_missing_and_not_averaged(grid, tmp_path):
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
    assert "cannot be below 0.25" in text


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
    assert float(table[1]["versus_first_p"]) == 0.25


def test_runs_of_different_versions_are_pointed_out(grid, store):
    path = store.directory(grid[0].key) / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"freshet": "9.9"}))
    assert "0.1, 9.9" in document(grid, store, title="t")["notes"][-1]


def test_published_numbers_stand_beside_ours_where_they_belong(tmp_path):
    cell = CELLS["lenet-fmnist"]
    world, other = World("lenet-fmnist", cell), World("x", cell, {}, published=False)
    entries = parse_entries("fedasmu,fedasmu@slot=rl,fedasmu@slot=h1,fedasmu-da,fedavg")
    found = {e.label: published(e, world) for e in entries}
    assert found["fedasmu"] == found["fedasmu@slot=rl"] == {"accuracy": 0.858, "time": 11_603}
    assert found["fedavg"] == {"accuracy": 0.780, "time": 97_692}
    assert found["fedasmu@slot=h1"] is found["fedasmu-da"] is None
    assert published(entries[0], other) is published(entries[0], World()) is None
    grid = expand(parse_entries("fedasmu,fedavg"), [0], Request(settings=[*TINY, *GRID]), [world])
    store = Store(tmp_path)
    finish(store, grid[0], CURVES["fedasmu", 0])
    text = shown(document(grid, store, title="t"))
    row = next(line for line in text.splitlines() if line.startswith("fedasmu"))
    assert "0.800" in row and "0.858" in row and "11,603" in row

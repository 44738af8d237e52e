"""Kept runs: two files instead of many folders, from which every run directory comes back byte for byte."""

import json
from pathlib import Path

import pytest

from freshet import Federation
from freshet.errors import RunError
from freshet.report.reading import find, read, read_all
from freshet.runs.kept_runs import (
    KEPT_FILES,
    RUNS,
    WORLDS,
    KeptRun,
    as_columns,
    as_rows,
    forget,
    keep,
    kept_runs,
    open_run,
    restore_files,
    runs_below,
    unpack,
)
from freshet.runs.reader import RunDirectory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two short runs of one world with tests on the devices, which only the last test has."""
    folder = tmp_path_factory.mktemp("made")
    for method in ("fedasync", "fedasmu"):
        run = {"until": 30.0, "evaluate_devices": "end", "executor": "serial"}
        Federation(method=method, devices=12, data={"train_samples": 300}, run=run).run(out=folder / method)
    return {method: folder / method for method in ("fedasync", "fedasmu")}


@pytest.fixture
def home(made: dict[str, Path], tmp_path: Path) -> Path:
    keep({f"runs/{name}": RunDirectory(path) for name, path in made.items()}, tmp_path / "cell")
    return tmp_path / "cell"


def test_the_files_of_a_run_come_back_byte_for_byte(made: dict[str, Path], home: Path) -> None:
    for name, path in made.items():
        restored = restore_files(kept_runs(home)[f"runs/{name}"])
        assert restored == {file: (path / file).read_bytes() for file in KEPT_FILES}


def test_a_run_is_a_line_and_a_world_is_kept_once(home: Path) -> None:
    assert sorted(path.name for path in home.iterdir()) == [RUNS, WORLDS]
    assert len((home / RUNS).read_text().splitlines()) == 2
    assert len((home / WORLDS).read_text().splitlines()) == 1, "two methods, one fleet and partition"


def test_a_kept_run_reads_like_its_directory(made: dict[str, Path], home: Path) -> None:
    run, there = open_run(home / "runs" / "fedasmu"), RunDirectory(made["fedasmu"])
    assert isinstance(run, KeptRun) and run.finished() and run.method() == "fedasmu"
    assert run.config() == there.config() and run.summary() == there.summary()
    assert run.metrics() == there.metrics() and run.world() == there.world()
    with pytest.raises(RunError, match=r"fedasmu has no events\.jsonl"):
        list(run.events())


def test_a_report_finds_kept_runs_where_their_directories_would_be(made: dict[str, Path], home: Path) -> None:
    paths = [home / "runs" / "fedasmu", home / "runs" / "fedasync"]
    assert find(home).runs == find(home.parent).runs == find(home / "runs").runs == paths
    assert find(paths[0]).runs == paths[:1]
    kept, there = read(paths[0]), read(made["fedasmu"])
    assert (kept.name, kept.metrics, kept.summary, kept.world) == (
        there.name,
        there.metrics,
        there.summary,
        there.world,
    )
    assert [run.name for run in read_all(home)] == ["fedasmu", "fedasync"]


def test_runs_below_a_folder_that_exists_only_in_their_names(made: dict[str, Path], tmp_path: Path) -> None:
    names = ["runs/a", "suites/skew/iid/runs/a", "suites/skew/iid/runs/b"]
    keep({name: RunDirectory(made["fedasync"]) for name in names}, tmp_path)
    assert runs_below(tmp_path / "suites" / "skew") == [tmp_path / name for name in names[1:]]
    assert runs_below(tmp_path, 2) == [tmp_path / "runs" / "a"]
    assert runs_below(tmp_path / "nowhere") == []


def test_a_run_is_replaced_added_and_forgotten(made: dict[str, Path], home: Path) -> None:
    before = (home / RUNS).read_bytes()
    keep({"runs/fedasmu": RunDirectory(made["fedasmu"])}, home)
    assert (home / RUNS).read_bytes() == before, "the same run again changes nothing"
    keep({"runs/third": open_run(home / "runs" / "fedasmu")}, home)
    assert list(kept_runs(home)) == ["runs/fedasmu", "runs/fedasync", "runs/third"]
    forget(["runs/third", "runs/nobody"], home)
    assert (home / RUNS).read_bytes() == before


def test_a_directory_at_the_path_wins(made: dict[str, Path], home: Path) -> None:
    (place,) = unpack([kept_runs(home)["runs/fedasmu"]], home / "runs")
    assert place == home / "runs" / "fedasmu" and not isinstance(open_run(place), KeptRun)
    assert open_run(place).summary() == RunDirectory(made["fedasmu"]).summary()


def test_tests_with_different_keys_become_columns_and_back() -> None:
    rows = [{"time": 0.0, "accuracy": 0.1}, {"time": 1.0, "accuracy": None, "devices_p10": 0.05}]
    columns, more = as_columns(rows)
    assert columns == {"time": [0.0, 1.0], "accuracy": [0.1, None]} and more == {"1": {"devices_p10": 0.05}}
    assert as_rows(columns, more) == rows
    assert as_rows(*as_columns([])) == []


def test_a_changed_line_is_noticed(home: Path) -> None:
    text = (home / RUNS).read_text()
    (home / RUNS).write_text(text.replace('"seed":0', '"seed":1', 1))
    with pytest.raises(RunError, match=r"runs\.jsonl, line 1: was changed after it was written"):
        open_run(home / "runs" / "fedasmu")


def test_a_missing_world_is_noticed(home: Path) -> None:
    (home / WORLDS).unlink()
    with pytest.raises(RunError, match=r"its world is not in worlds\.jsonl"):
        kept_runs(home)


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "{}", '{"sha256":"0","run":"x"}', '{"sha256":"' + "0" * 64 + '","run":"../x"}']
)
def test_a_line_that_is_not_one_of_ours_is_one_sentence(tmp_path: Path, line: str) -> None:
    (tmp_path / RUNS).write_text(line + "\n")
    with pytest.raises(RunError, match=r"runs\.jsonl, line 1"):
        kept_runs(tmp_path)


def sealed(record: object) -> bytes:
    """A line with a right hash."""
    from freshet.runs.kept_runs import _line

    return _line(json.dumps(record, separators=(",", ":")).encode())


GOOD = {"run": "runs/a", "config": {}, "metrics": {"time": [0.0]}, "summary": {}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"run": "../../secret"}, "a path inside the folder"),
        ({"run": "/etc"}, "a path inside the folder"),
        ({"summary": 3}, "must be objects"),
        ({"metrics": {"time": [0.0], "accuracy": []}}, "equal length"),
        ({"metrics": {"time": 3}}, "equal length"),
        ({"more": {"0": 3}}, "equal length"),
        ({"world": "0" * 64}, "its world is not in"),
    ],
)
def test_a_line_with_a_right_hash_is_still_not_trusted(tmp_path: Path, change: dict, problem: str) -> None:
    (tmp_path / RUNS).write_bytes(sealed(GOOD))
    assert list(kept_runs(tmp_path)) == ["runs/a"]
    (tmp_path / RUNS).write_bytes(sealed(GOOD | change))
    with pytest.raises(RunError, match=problem):
        kept_runs(tmp_path)


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / RUNS).write_bytes(2 * sealed(GOOD))
    with pytest.raises(RunError, match="is kept twice"):
        kept_runs(tmp_path)

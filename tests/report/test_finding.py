"""Folders as people name them: a run, some runs, what a grid or a tuning has written, or all of it."""

from pathlib import Path

import pytest

from freshet.errors import RunError
from freshet.report.reading import find, runs_to

from .conftest import Write


def test_a_run_is_itself_and_a_folder_of_runs_its_runs(written: Write, tmp_path: Path) -> None:
    a, b = written("runs/a"), written("runs/b")
    assert find([tmp_path / "runs"]).runs == [a, b]
    assert find([a, tmp_path / "nowhere"]).runs == [a, tmp_path / "nowhere"], "whoever reads it says so"


def test_what_compare_tune_and_paper_write_is_found_also_side_by_side(written: Write, tmp_path: Path) -> None:
    grids = [written(f"all/{name}/runs/{name}-1") for name in ("compare", "paper", "tune")]
    alone = written("all/zero")
    for name, file in (("compare", "comparison"), ("paper", "ablation"), ("tune", "tuning")):
        (tmp_path / "all" / name / f"{file}.json").write_text("{}")
        (tmp_path / "all" / name / "best.toml").write_text("")
    found = find([tmp_path / "all"])
    assert found.runs == [*grids, alone]
    assert [path.stem for path in found.results] == ["comparison", "ablation", "tuning"]
    assert find([tmp_path / "all" / "tune"]).runs == grids[2:]


def test_runs_hidden_folders_and_links_are_not_looked_into(written: Write, tmp_path: Path) -> None:
    a = written("runs/a")
    written("runs/a/checkpoint/inner")
    written("runs/.hidden/b")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    assert find([tmp_path / "runs"]).runs == [a]
    assert find([tmp_path / "runs"]).results == [], "a run's own files are not results"


def test_a_folder_with_neither_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        find([tmp_path])


def test_a_single_place_needs_no_list_and_may_be_a_text(written: Write, tmp_path: Path) -> None:
    a = written("runs/a")
    assert find(a) == find(str(a)) == find([str(a)])
    assert find(str(tmp_path / "runs")).runs == [a]


def test_results_alone_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(RunError, match="there is no run to export"):
        runs_to("export", tmp_path)

"""Scores, tables, JSON and picture of the benchmark, from made-up runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from freshet.cli.app import app
from freshet.errors import RunError
from freshet.experiments.bench import BenchRun, worlds
from freshet.experiments.leaderboard import (
    as_json,
    board,
    draw_ranks,
    fill_page,
    page_results,
    results_text,
    score_run,
    world_record,
    worlds_text,
    write_board,
)

TARGETS = (0.5, 0.8)


def a_run(method: str = "fedavg", seed: int = 0, values=(0.1, 0.5, 0.9), world: str = "image", **summary) -> BenchRun:
    rows = [
        {"time": 10.0 * n, "accuracy": value, "bytes_up": 100 * n, "bytes_down": 300 * n}
        for n, value in enumerate(values)
    ]
    facts = {"wall_seconds": 2.0, "devices_p10": 0.4, "freshet": "1"} | summary
    return BenchRun(world, "quick", method, seed, "sync", {}, 20.0, rows, facts, "run", Path())


def test_the_scores_of_a_run_computed_by_hand():
    found = score_run(a_run(), TARGETS)
    assert found["area"] == pytest.approx((10 * 0.3 + 10 * 0.7) / 20)
    assert found["accuracy"] == pytest.approx(0.5), "the mean of the last tests, here of all three"
    assert found["times"] == [10.0, 20.0] and found["bytes"] == [400.0, 800.0]
    assert found["worst_decile"] == 0.4 and found["wall_seconds"] == 2.0


def test_a_target_that_is_not_reached_and_a_run_that_diverged():
    found = score_run(a_run(values=(0.1, 0.6), diverged=10.0), TARGETS)
    assert found["times"] == [10.0, None] and found["bytes"] == [400.0, None]
    assert found["accuracy"] == 0.0 and found["area"] == pytest.approx(10 * 0.35 / 20), "no model after the divergence"
    assert score_run(a_run(values=(0.1, float("nan"), 0.3)), TARGETS)["area"] == pytest.approx((0.5 + 1.5) / 20)


def test_a_world_is_ranked_with_bands_over_seeds_and_failures_last():
    runs = [a_run("a", 0, (0.5, 0.9)), a_run("a", 1, (0.5, 0.6)), a_run("b", 0, (0.5, 0.7)), a_run("b", 1, (0.5, 0.7))]
    found = world_record(worlds()["image"], "quick", runs, {"c": "seed 0 crashed: why"})
    first, second, last = found["lines"]
    assert [line["method"] for line in found["lines"]] == ["a", "b", "c"]
    assert first["rank"]["area"] == {"median": 1.0, "low": 1.0, "high": 2.0}
    assert second["rank"]["area"] == {"median": 2.0, "low": 1.0, "high": 2.0}
    assert last["rank"]["area"]["median"] == 3.0 and last["failures"] == ["seed 0 crashed: why"]


def test_a_method_that_was_not_run_everywhere_is_left_out_of_the_ranks_over_worlds():
    pair = [worlds()["image"], worlds()["text"]]
    runs = [a_run(m, 0, (0.1, end), w) for m, end in (("a", 0.9), ("b", 0.5)) for w in ("image", "text")]
    found = board(pair, "quick", [*runs, a_run("c", 0, (0.1, 0.2))])
    ranks = found["ranks"]["area"]
    assert ranks["methods"] == ["a", "b"] and ranks["mean"] == [1.0, 2.0] and found["left_out"] == ["c"]
    assert ranks["critical_difference"] == pytest.approx(1.960 * (2 * 3 / 12) ** 0.5, abs=1e-3)
    text = results_text(found)
    assert "Not run in every world, so not ranked: c." in text
    assert "| a | 1.00 | 1.00 to 1.00 | 1 | 1 | 1.00 |" in text
    assert "Over 2 worlds the methods do not differ more than by chance" in text


def test_a_method_that_crashed_in_one_world_is_last_there_and_ranked():
    pair = [worlds()["image"], worlds()["text"]]
    runs = [a_run(m, 0, (0.1, end), w) for m, end in (("a", 0.9), ("b", 0.5)) for w in ("image", "text")][:-1]
    found = board(pair, "quick", runs, {("text", "b"): "seed 0 crashed: x"})
    assert found["ranks"]["area"]["methods"] == ["a", "b"] and found["left_out"] == []
    assert "* b in text: seed 0 crashed: x" in results_text(found)
    json.loads(as_json(found))


def test_the_tables_show_medians_bands_and_how_many_reached_a_target():
    runs = [a_run("fedsa", seed, (0.1, 0.5, end)) for seed, end in enumerate((0.9, 0.85, 0.7))]
    runs = [replace(run, marks={"R": "reconstructed"}) for run in runs]
    text = results_text(board([worlds()["image"]], "quick", runs))
    assert "| fedsa [R] | 1 | 0.487 (0.450 to 0.500) |" in text
    assert "(2/3)" in text and "[R] reconstructed" in text and "3 seeds, nothing tuned" in text


def test_the_page_is_filled_between_its_comments(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- begin worlds -->\nold\n<!-- end worlds -->\n\nlast\n")
    fill_page(page, {"worlds": "new\n"})
    assert page.read_text() == "# Title\n\n<!-- begin worlds -->\n\nnew\n\n<!-- end worlds -->\n\nlast\n"
    with pytest.raises(RunError, match="has no part <!-- begin results -->"):
        fill_page(page, {"results": "x"})


def test_the_worlds_have_a_paragraph_each():
    text = worlds_text(worlds().values())
    assert text.count("### ") == 5 and "Needs shakespeare (`freshet data get shakespeare`)" in text


def test_the_page_and_its_json_are_those_of_the_kept_runs(tmp_path: Path):
    root = Path(__file__).parents[2]
    (tmp_path / "benchmark.md").write_bytes((root / "docs" / "benchmark.md").read_bytes())
    words = ["bench", "page", "--kept", str(root / "results" / "bench-1"), "--page", str(tmp_path / "benchmark.md")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    for name in ("benchmark.md", "benchmark.json"):
        assert (tmp_path / name).read_text() == (root / "docs" / name).read_text(), "write them with freshet bench page"


def test_files_and_picture_are_written(tmp_path: Path):
    pair = [worlds()["image"], worlds()["text"]]
    runs = [a_run(m, 0, (0.1, end), w) for m, end in (("a", 0.9), ("b", 0.5)) for w in ("image", "text")]
    files = write_board(board(pair, "quick", runs), tmp_path)
    assert [path.name for path in files] == ["benchmark.json", "benchmark.md", "benchmark.png"]
    assert files[2].stat().st_size > 5_000
    assert draw_ranks(board(pair, "quick", []), tmp_path / "no.png") == []
    assert page_results(board(pair, "quick", []), False) == "No results are kept yet.\n"

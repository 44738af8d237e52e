"""The page of results says what the protocol counts, from the runs under results/."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "results.py"


@pytest.fixture(scope="module")
def results() -> Any:
    class Names:
        pass

    names = Names()
    names.__dict__.update(runpy.run_path(str(SCRIPT)))
    return names


def write_run(folder: Path, method: str, seed: int, accuracies: list[float], reached: float | None) -> None:
    run = folder / "runs" / f"{method}-seed{seed}"
    run.mkdir(parents=True)
    rows = [{"time": 100.0 * n, "accuracy": value} for n, value in enumerate(accuracies)]
    summary = {
        "method": method,
        "seed": seed,
        "time_to_target": reached,
        "weights_sha256": f"{seed}" * 64,
        "uploads": 600,
        "mean_staleness": 3.0,
        "diverged": None,
    }
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.toml").write_text("[training]\nlr = 0.03\n")
    (run / "world.json").write_text("{}")
    (run / "events.jsonl").write_text("large")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """FedASMU ahead of FedBuff with every seed, equal to FedAsync, and PORT with one seed only."""
    for seed in range(3):
        write_run(tmp_path, "fedasmu", seed, [0.1, 0.5, 0.80 + 0.01 * seed] + [0.85 + 0.001 * seed] * 4, 200.0)
        write_run(tmp_path, "fedasync", seed, [0.1] + [0.847 - 0.002 * seed] * 6, 400.0)
        write_run(tmp_path, "fedbuff", seed, [0.1] + [0.6] * 6, None)
    write_run(tmp_path, "port", 0, [0.1] * 7, None)
    return tmp_path


def test_accuracy_is_the_mean_of_the_last_five_tests_and_the_median_over_seeds(results, folder):
    runs = results.read(folder)
    assert runs["fedasmu"][1].accuracy == pytest.approx((0.81 + 4 * 0.851) / 5)
    assert results.middle(runs["fedasmu"]) == pytest.approx(runs["fedasmu"][1].accuracy)


def test_a_method_that_lacks_seeds_is_left_out_and_the_page_says_so(results, folder):
    runs = results.read(folder)
    assert set(runs) == {"fedasmu", "fedasync", "fedbuff"}
    assert "Not run yet: port, asofed, fedsa, fedssmu" in results.page(runs)


def test_never_is_later_than_everything(results, folder):
    runs = results.read(folder)
    assert results.time_of(runs["fedbuff"]) == float("inf") and results.seconds(float("inf")) == "never"


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([0.80, 0.81, 0.82], [0.70, 0.72, 0.71], "win"),
        ([0.70, 0.72, 0.71], [0.80, 0.81, 0.82], "loss"),
        ([0.80, 0.81, 0.82], [0.805, 0.806, 0.815], "tie"),
        ([0.80, 0.90, 0.95], [0.81, 0.80, 0.80], "open"),
    ],
)
def test_a_win_needs_every_seed_and_more_than_a_point(results, tmp_path, ours, theirs, said):
    for seed in range(3):
        write_run(tmp_path, "fedasmu", seed, [ours[seed]] * 5, None)
        write_run(tmp_path, "fedasync", seed, [theirs[seed]] * 5, None)
    runs = results.read(tmp_path)
    assert results.outcome(runs["fedasmu"], runs["fedasync"]) == said


def test_verdicts_stand_beside_the_papers_own_figures(results, folder):
    runs = results.read(folder)
    rows = results.verdicts(runs, ["fedasmu", "fedasync", "fedbuff"], "fedasmu")
    tie, win = rows[2:4]
    assert [cell.strip() for cell in win.split("|")[1:5]] == ["fedbuff", "+3.1", "+24.3", "confirmed"]
    assert [cell.strip() for cell in tie.split("|")[1:5]] == ["fedasync", "+1.9", "-0.2", "not confirmed (tie)"]
    assert "2.00x" in tie


def test_what_is_brought_in_is_small(results, folder, tmp_path):
    results.take([folder], tmp_path / "into")
    found = sorted(path.name for path in (tmp_path / "into" / "runs" / "fedasmu-seed0").iterdir())
    assert found == ["config.toml", "metrics.jsonl", "summary.json", "world.json"]


def test_the_picture_can_be_drawn(results, folder, tmp_path):
    results.draw(results.read(folder), tmp_path / "results.png")
    assert (tmp_path / "results.png").stat().st_size > 10_000

"""The page of results says what the protocol counts, from the runs under results/."""

from pathlib import Path

import pytest

from freshet.paper import verdicts
from freshet.paper.archive import median_accuracy, outcome, read, copy_runs, median_time
from freshet.paper.claims import CLAIMS
from freshet.paper.other_cells import read_others
from freshet.paper.pictures import draw_study, draw_worlds
from freshet.paper.results_page import INTRO, NOTES, rival_verdicts, text_of, variants_table, worlds_table
from freshet.paper.studies import STUDIES, StudyRuns, name_with_marks, seconds, sort_key
from tests.experiments.kept_runs import write_run

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """FedASMU ahead of FedBuff with every seed, equal to FedAsync, and PORT with one seed only."""
    for seed in range(3):
        write_run(tmp_path, "fedasmu", seed, [0.1, 0.5, 0.80 + 0.01 * seed] + [0.85 + 0.001 * seed] * 4, 200.0)
        write_run(tmp_path, "fedasync", seed, [0.1] + [0.847 - 0.002 * seed] * 6, 400.0)
        write_run(tmp_path, "fedbuff", seed, [0.1] + [0.6] * 6, None)
    write_run(tmp_path, "port", 0, [0.1] * 7, None)
    return tmp_path


def test_accuracy_is_the_mean_of_the_last_five_tests_and_the_median_over_seeds(folder):
    runs = read(folder)
    assert runs["fedasmu"][1].accuracy == pytest.approx((0.81 + 4 * 0.851) / 5)
    assert median_accuracy(runs["fedasmu"]) == pytest.approx(runs["fedasmu"][1].accuracy)


def test_a_method_that_lacks_seeds_is_left_out_and_the_page_says_so(folder):
    runs = read(folder)
    assert set(runs) == {"fedasmu", "fedasync", "fedbuff"}
    assert "Not run yet: port, asofed, fedsa, fedssmu" in text_of([StudyRuns(STUDIES[0], runs, folder)], {})


def test_never_is_later_than_everything(folder):
    runs = read(folder)
    assert median_time(runs["fedbuff"]) == float("inf") and seconds(float("inf")) == "never"


def test_accuracy_is_compared_on_common_seeds_and_time_where_one_gets_there(folder):
    runs = read(folder)
    assert outcome(runs["fedasmu"], runs["fedbuff"]) == "win"
    assert outcome(runs["fedasmu"], runs["fedasync"]) == "tie"
    assert outcome(runs["fedasmu"], runs["fedasync"], "time") == "win"
    assert outcome(runs["fedbuff"], runs["fedasmu"], "time") == "loss"
    assert outcome(runs["fedbuff"], runs["fedbuff"], "time") == "none"


def test_every_sentence_of_the_paper_gets_an_answer(folder):
    runs = read(folder)
    rows = verdicts.section([StudyRuns(STUDIES[0], runs, folder / "suites")])
    found = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:4]] for row in rows if "| fed" in row
    }
    assert found["fedasmu over fedbuff: accuracy 0.68 % to 64.75 %"] == ["+40.5 %", "confirmed"]
    assert found["fedasmu over fedasync: faster 11.42 % to 84.96 %"] == ["+50 %", "confirmed"]
    assert found["fedasmu over fedasync: accuracy 0.41 % to 58.93 %"] == ["-0.3 %", "not confirmed (tie)"]
    assert "fedasmu over fedsa: faster 19.83 % to 67.54 %" not in found
    assert "Not run: " in rows[-2] and "fedasmu over fedsa: faster 19.83 % to 67.54 %" in rows[-2]
    assert "slots: fedasmu over slot = h1: accuracy 2.4 %" in rows[-2]


def test_what_is_run_in_one_cell_only_is_judged_there(folder, tmp_path):
    there = tmp_path / "none"
    both = [StudyRuns(STUDIES[0], read(folder), folder), StudyRuns(STUDIES[1], read(there), there)]
    over = next(claim for claim in CLAIMS if str(claim).startswith("fedasmu over fedbuff: accuracy"))
    assert verdicts.answer(over, both) == (["+40.5 %", "not run"], "confirmed where it was run")


def test_what_must_be_said_of_a_method_stands_beside_its_name():
    assert [name_with_marks(name) for name in ("fedsa", "asofed", "fedavg")] == ["fedsa [R]", "asofed [-F]", "fedavg"]


def test_verdicts_stand_beside_the_papers_own_figures(folder):
    runs = read(folder)
    rows = rival_verdicts(STUDIES[0], runs, ["fedasmu", "fedasync", "fedbuff"], "fedasmu")
    tie, win = rows[2:4]
    assert [cell.strip() for cell in win.split("|")[1:5]] == ["fedbuff", "+3.1", "+24.3", "confirmed"]
    assert [cell.strip() for cell in tie.split("|")[1:5]] == ["fedasync", "+1.9", "-0.2", "not confirmed (tie)"]
    assert "2.00x" in tie


def test_what_is_brought_in_is_small(folder, tmp_path):
    copy_runs([folder], tmp_path / "into")
    found = sorted(path.name for path in (tmp_path / "into" / "runs" / "fedasmu-seed0-0").iterdir())
    assert found == ["config.toml", "metrics.jsonl", "summary.json", "world.json"]


def test_a_run_that_was_interrupted_is_not_brought_in(folder, tmp_path):
    summary = folder / "runs" / "fedasmu-seed0-0" / "summary.json"
    summary.write_text(summary.read_text().replace("finished", "interrupted"))
    copy_runs([folder], tmp_path / "into")
    assert not (tmp_path / "into" / "runs" / "fedasmu-seed0-0").exists()
    assert (tmp_path / "into" / "runs" / "fedasmu-seed1-0").exists()


def test_the_picture_can_be_drawn(folder, tmp_path):
    draw_study(STUDIES[0], read(folder), tmp_path / "results.png")
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_the_picture_of_worlds_can_be_drawn_from_whatever_there_is(folder, tmp_path):
    write_run(folder / "suites" / "skew" / "Dirichlet-0.1", "fedbuff", 0, [0.3] * 31, None)
    draw_worlds(StudyRuns(STUDIES[0], read(folder), folder / "suites"), tmp_path / "worlds.png")
    assert (tmp_path / "worlds.png").stat().st_size > 10_000


def test_settings_are_sorted_by_their_size():
    names = ["iid", "bandwidth 1/100", "Dirichlet 0.1", "250 devices", "ratio 5"]
    assert [sort_key(name) for name in names] == [float("inf"), 100.0, 0.1, 250.0, 5.0]


def test_a_suite_of_variants_is_held_against_the_main_runs_as_they_stood_then(tmp_path):
    for seed in range(3):
        long = [0.1] + [0.5] * 30 + [0.9] * 30  # at 0.5 until 3,000 s
        write_run(tmp_path, "fedasmu", seed, long, 4000.0, "slot = 'rl'\n")
        suite = tmp_path / "suites" / "slots"
        write_run(suite, "fedasmu", seed, [0.1] + [0.6] * 30, 200.0, "slot = 'h1'\neta_iota = 0.5\n")
        write_run(suite, "fedasmu-fa", seed, [0.1] + [0.4] * 30, None)
    rows = variants_table(STUDIES[0], read(tmp_path), suite, "fedasmu")
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:6]] for row in rows[4:-1]}
    assert cells["**fedasmu**"] == ["0.500", "0.500, 0.500, 0.500", "never", ""]
    assert cells["slot = h1"] == ["0.600", "0.600, 0.600, 0.600", "200 s", "behind, -10.0"]
    assert cells["fedasmu-fa"][-1] == "ahead, +10.0"


def test_with_one_seed_a_suite_says_so(tmp_path):
    for seed in range(3):
        write_run(tmp_path, "fedasmu", seed, [0.5] * 31, None)
    write_run(tmp_path / "suites" / "ablation", "fedasmu-da", 1, [0.3] * 31, None)
    rows = variants_table(STUDIES[0], read(tmp_path), tmp_path / "suites" / "ablation", "fedasmu")
    assert rows[-2].endswith("1 seed, +20.0 |"), "one seed shows no lead"


def test_figures_and_verdicts_are_of_the_seeds_that_both_have(tmp_path):
    for seed, accuracy in enumerate((0.8, 0.5, 0.5)):
        write_run(tmp_path, "fedasmu", seed, [accuracy] * 61, 100.0)
    write_run(tmp_path / "suites" / "slots", "fedasmu", 0, [0.4] * 31, 200.0, "slot = 'h1'\n")
    runs = read(tmp_path)
    runs = {"fedasmu": [run._replace(options={"slot": "rl"}) for run in runs["fedasmu"]]}
    claim = next(one for one in CLAIMS if one.rivals == ("slot = h1",) and one.gain == "accuracy")
    figures, said = verdicts.answer(claim, [StudyRuns(STUDIES[0], runs, tmp_path / "suites")])
    assert figures == ["+100.0 %"] and said == "cannot be told (too few seeds)"


def test_a_suite_of_worlds_has_a_column_for_each_and_for_the_main_runs_in_their_order(tmp_path):
    write_run(tmp_path, "fedasmu", 0, [0.5] * 61, None)
    write_run(tmp_path, "fedavg", 0, [0.4] * 61, None)
    write_run(tmp_path / "suites" / "skew" / "Dirichlet-0.1", "fedasmu", 0, [0.3] * 31, None)
    rows = worlds_table(STUDIES[0], read(tmp_path), tmp_path / "suites" / "skew", "Dirichlet 0.5")
    assert rows[2:5] == [
        "| | Dirichlet 0.1 | Dirichlet 0.5 |",
        "|---|---|---|",
        "| fedasmu | 0.300, never | 0.500, never |",
    ]
    assert rows[-2].endswith("Seeds: Dirichlet 0.1: 1, Dirichlet 0.5: 1.")


def test_the_main_column_of_a_suite_has_the_suites_seeds(tmp_path):
    for seed, accuracy in enumerate((0.8, 0.5, 0.5)):
        write_run(tmp_path, "fedasmu", seed, [accuracy] * 61, None)
    write_run(tmp_path / "suites" / "bandwidth" / "bandwidth-1-50", "fedasmu", 0, [0.3] * 31, None)
    rows = worlds_table(STUDIES[0], read(tmp_path), tmp_path / "suites" / "bandwidth", "bandwidth 1")
    assert rows[2] == "| | bandwidth 1 | bandwidth 1/50 |" and rows[4] == "| fedasmu | 0.800, never | 0.300, never |"


def test_the_page_in_the_repository_is_what_the_kept_runs_say():
    results = ROOT / "results"
    found = [StudyRuns.read(study, results) for study in STUDIES]
    words = [(results / name).read_text(encoding="utf-8") for name in (INTRO, NOTES)]
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert page == text_of(found, read_others(results), *words), "run: freshet paper results"
    assert "`freshet paper results`" in page

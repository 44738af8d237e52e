"""The tables of the results pages: the other ten cells, main runs and suites."""

import pytest

from freshet.paper.archive import read
from freshet.paper.cells import CELLS
from freshet.paper.results_page import appendix_text, main_text
from freshet.paper.studies import OTHERS, STUDIES, AblationRuns, Archive, StudyRuns, read_others
from freshet.paper.tables import (
    PLANNED,
    ablation_section,
    ablation_table,
    cells_section,
    cells_summary,
    fresh_models_section,
    rival_verdicts,
    variants_table,
    worlds_table,
)

from .archived_runs import NEW_WORLD, write_ablation, write_run


def rows(lines, first):
    """The cells of all table rows that begin with this."""
    split = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return [row for row in split if row[0] == first]


@pytest.fixture
def results(tmp_path):
    """Two cells: in one ours is ahead and reaches the target, in the other a rival diverged and nobody reaches it."""
    one, other = tmp_path / "cnn-cifar10", tmp_path / "lenet-cifar100"
    write_run(one, "fedasmu", 0, [0.1] * 6 + [0.36] * 5)
    write_run(one, "fedasmu-course", 0, [0.1] * 5 + [0.45] * 6)
    write_run(one, "fedasync", 0, [0.1] * 4 + [0.42] + [0.38] * 6)
    write_run(one, "fedsa", 0, [0.1] * 11)
    write_run(one, "fedavg", 0, [0.2] * 11)
    write_run(other, "fedasmu", 0, [0.05] * 11)
    write_run(other, "fedasync", 0, [0.058] * 11)
    write_run(other, "fedbuff", 0, [0.01] * 3, diverged=200.0)
    return tmp_path


def test_they_are_all_cells_without_a_study():
    assert {*OTHERS, *(study.cell.name for study in STUDIES)} == set(CELLS) and len(OTHERS) == 10
    assert len(set(PLANNED)) == 14


def test_a_column_for_each_cell_with_its_best_in_bold(results):
    lines = cells_section(read_others(results))
    assert rows(lines, "method")[0] == ["method", "lenet-cifar100", "cnn-cifar10"]
    assert rows(lines, "fedasmu-course") == [["fedasmu-course", "–", "**0.450**"]]
    assert rows(lines, "fedasync") == [["fedasync", "**0.058**", "0.380"]]
    assert rows(lines, "fedsa [R]") == [["fedsa [R]", "–", "0.100"]]
    assert rows(lines, "fedavg") == [["fedavg", "**0.200**"]], "the best of its kind"


def test_a_run_that_diverged_is_marked(results):
    assert rows(cells_section(read_others(results)), "fedbuff") == [["fedbuff", "0.010 (diverged at 200 s)", "–"]]


def test_ours_are_compared_with_the_best_rival_of_their_kind(results):
    (there,) = [row for row in rows(cells_section(read_others(results)), "cnn-cifar10") if "fedasync, 0.380" in row]
    assert there[:4] == ["cnn-cifar10", "fedasync, 0.380", "-2.0", "+7.0"]
    assert there[4:] == ["0.40", "400 s: fedasync", "never", "500 s"]


def test_below_a_point_is_a_tie_and_a_missed_target_says_never(results):
    (there,) = [row for row in rows(cells_section(read_others(results)), "lenet-cifar100") if len(row) == 8]
    assert there[1:] == ["fedasync, 0.058", "-0.8 (tie)", "–", "0.13", "never", "never", "–"]


def test_a_kind_without_ours_or_without_rivals_has_dashes(results, tmp_path):
    write_run(tmp_path / "vgg-cifar10", "fedssmu", 0, [0.5] * 6)
    lines = cells_section(read_others(results))
    assert ["cnn-cifar10", "fedavg, 0.200", "–", "–", "0.40", "never", "–", "–"] in rows(lines, "cnn-cifar10")
    (alone,) = [row for row in rows(lines, "vgg-cifar10") if len(row) == 8]
    assert alone == ["vgg-cifar10", "–", "–", "–", "0.45", "0 s: fedssmu", "0 s", "–"]


def test_the_scale_comes_first_and_missing_runs_last(results):
    lines = cells_section(read_others(results))
    assert lines[0] == "## The other ten cells"
    for words in ("part of the training samples", "one seed", "short virtual time", "nothing tuned", "no verdict"):
        assert words in lines[2]
    said = "\n".join(lines)
    assert f"Not run: {', '.join(name for name in OTHERS if name not in ('lenet-cifar100', 'cnn-cifar10'))}." in said
    assert "Not run in cnn-cifar10: port, asofed, fedbuff, fedssmu, " in said


def test_the_first_table_is_the_scale_of_each_cell(results):
    write_run(results / "textcnn-imdb", "fedavg", 0, [0.5] * 6, samples=2500, lr=0.3)
    write_run(results / "textcnn-imdb", "fedasync", 0, [0.5] * 6, samples=0, lr=0.001, optimiser="adam")
    vgg = "norm = ''\nhead = false\nhidden_layers = 0\n"
    write_run(results / "vgg-cifar10", "fedavg", 0, [0.5] * 6, world=("cifar10", "vgg11"), model=vgg)
    first = [line for line in cells_section(read_others(results)) if line.startswith("|")][:6]
    assert rows(first, "cell") == [["cell", "network", "training samples", "batch", "rate", "until"]]
    assert rows(first, "lenet-cifar100") == [["lenet-cifar100", "lenet5", "5,000", "25", "0.03", "1,000 s"]]
    assert rows(first, "textcnn-imdb") == [
        ["textcnn-imdb", "lenet5", "2,500, all", "25", "0.001 with Adam, 0.3 (the cell has 0.001)", "500 s"]
    ]
    assert rows(first, "vgg-cifar10") == [["vgg-cifar10", "vgg11, hidden_layers = 0", "5,000", "25", "0.03", "500 s"]]


def test_the_scale_says_if_one_kind_ran_longer(results):
    write_run(results / "cnn-cifar10", "fedprox", 0, [0.2] * 16)
    (told,) = rows([line for line in cells_section(read_others(results)) if line.startswith("|")][:4], "cnn-cifar10")
    assert told[-1] == "1,000 s asynchronous, 1,500 s synchronous"


def test_the_first_page_has_one_row_per_cell_with_both_kinds(results):
    lines = cells_summary(read_others(results))
    heads = ["cell", "best rival", "fedasmu", "fedasmu-course", "best rival", "fedssmu", "fedssmu-course"]
    assert rows(lines, "cell") == [heads]
    assert rows(lines, "cnn-cifar10") == [["cnn-cifar10", "fedasync, 0.380", "-2.0", "+7.0", "fedavg, 0.200", "–", "–"]]
    assert rows(lines, "lenet-cifar100") == [["lenet-cifar100", "fedasync, 0.058", "-0.8 (tie)", "–", "–", "–", "–"]]
    assert cells_summary({}) == []


def test_without_runs_only_the_missing_cells_are_listed(tmp_path):
    assert cells_section(read_others(tmp_path)) == ["## The other ten cells", "", f"Not run: {', '.join(OTHERS)}.", ""]


def test_complete_cells_leave_nothing_missing(tmp_path):
    for name in OTHERS:
        for method in PLANNED:
            write_run(tmp_path / name, method, 0, [0.1] * 11)
    assert "Not run" not in "\n".join(cells_section(read_others(tmp_path)))


def test_they_follow_the_main_runs_and_precede_the_suites(results):
    for seed in range(3):
        write_run(results / "lenet-fmnist", "fedasmu", seed, [0.5] * 61)
    page = appendix_text(Archive.read(results))
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles[0].startswith("## LeNet5 on 10,000") and titles[1:3] == ["## The other ten cells", "## Suites"]


# ---- main runs and suites


def test_a_method_that_lacks_seeds_is_left_out_and_the_page_says_so(archive):
    runs = read(archive)
    assert set(runs) == {"fedasmu", "fedasync", "fedbuff"}
    assert "Not run yet: port, asofed, fedsa, fedssmu" in main_text(
        Archive([StudyRuns(STUDIES[0], runs, archive)], {}, [])
    )


def test_verdicts_stand_beside_the_papers_own_figures(archive):
    runs = read(archive)
    rows = rival_verdicts(STUDIES[0], runs, ["fedasmu", "fedasync", "fedbuff"], "fedasmu")
    tie, win = rows[2:4]
    assert [cell.strip() for cell in win.split("|")[1:5]] == ["fedbuff", "+3.1", "+24.3", "confirmed"]
    assert [cell.strip() for cell in tie.split("|")[1:5]] == ["fedasync", "+1.9", "-0.2", "not confirmed (tie)"]
    assert "2.00x" in tie


def test_variants_are_compared_with_the_main_runs_at_the_same_time(tmp_path):
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


def test_a_suite_with_one_seed_says_so(tmp_path):
    for seed in range(3):
        write_run(tmp_path, "fedasmu", seed, [0.5] * 31, None)
    write_run(tmp_path / "suites" / "ablation", "fedasmu-da", 1, [0.3] * 31, None)
    rows = variants_table(STUDIES[0], read(tmp_path), tmp_path / "suites" / "ablation", "fedasmu")
    assert rows[-2].endswith("1 seed, +20.0 |"), "one seed shows no lead"


def test_a_suite_of_worlds_has_a_column_for_each_world_in_order(tmp_path):
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


# ---- FedASMU taken apart


@pytest.fixture
def apart(tmp_path):
    """LeNet5 on CIFAR-10 in the new world."""
    finals = {"slot = never": 0.35, "fedasmu": 0.40, "fedasmu-fa": 0.395, "judge = base": 0.50, "fedavg": 0.2}
    tests = {"fedasmu": 10, "fedasmu-fa": 20, "slot = never": 9}
    write_ablation(tmp_path / "world-2" / "lenet-cifar10", finals, tests)
    return tmp_path


def test_a_cell_taken_apart_has_a_row_for_each_variant_and_option(apart):
    lines = ablation_table(AblationRuns.read("lenet-cifar10", apart))
    assert lines[0] == "Training samples: 10,000; batch 25; until 2,900 s."
    names = [line.split("|")[1].strip() for line in lines if line.startswith("|")][2:]
    assert names == ["fedasmu", "fedasmu-fa", "judge = base", "fedavg", "slot = never"]
    assert rows(lines, "fedasmu") == [["fedasmu", "0.401", "0.400, 0.401, 0.402", "1,000 s", "10", "", ""]]
    assert rows(lines, "fedasmu-fa")[0][1:] == ["0.396", "0.395, 0.396, 0.397", "2,000 s", "20", "equal, +0.5", "ahead"]
    assert rows(lines, "judge = base")[0][4:] == ["12", "behind, -10.0", "ahead"]
    assert rows(lines, "slot = never")[0][3:] == ["900 s", "9", "ahead, +5.0", "no resolution"]
    assert rows(lines, "fedavg")[0][3:] == ["never", "30", "ahead, +20.0", "ahead"]
    assert lines[-2] == (
        "Not run yet: fedasmu-da, fedasmu-0, fedasmu-published, slot = h1, slot = h2, slot = h3, slot = random."
    )


def test_an_option_as_in_the_cell_does_not_name_a_run(tmp_path):
    folder = tmp_path / "world-2" / "cnn-cifar10"
    new = NEW_WORLD | {"world": ("cifar10", "cnn")}
    write_run(folder, "fedasmu", 0, [0.1] * 11, options="slot = 'rl'\njudge = 'own'\nlambda0 = 3.5\n", **new)
    write_run(folder, "fedasmu-da", 0, [0.1] * 11, options="slot = 'h1'\n", **new)
    write_run(folder, "fedasmu", 0, [0.1] * 11, options="slot = 'h1 | **0.9**'\njudge = 'base'\n", **new)
    names = set(AblationRuns.read("cnn-cifar10", tmp_path).runs)
    assert names == {"fedasmu", "fedasmu-da, slot = h1", "slot = h1 ? ??0.9??, judge = base"}


def test_cells_that_are_not_taken_apart_yet_say_so(apart):
    lines = ablation_section([AblationRuns.read(name, apart) for name in ("lenet-cifar10", "cnn-cifar10")])
    assert lines.index("### LeNet5 on CIFAR-10") < lines.index("### CNN on CIFAR-10")
    assert lines[lines.index("### CNN on CIFAR-10") + 2] == "Not run yet."
    assert "The new world: fastest device 190 s" in lines[0]


def test_the_first_page_says_in_one_sentence_what_fresh_models_bring(apart):
    found = [AblationRuns.read(name, apart) for name in ("lenet-cifar10", "cnn-cifar10")]
    title, _, sentence, *_ = fresh_models_section(found, "more.md")
    assert title == "## What the fresh models bring"
    assert sentence == (
        "FedASMU reaches, for LeNet5 on CIFAR-10, 0.401 with fresh models and 0.396 without (`fedasmu-fa`; equal, +0.5 "
        "points; time to 0.30: 1,000 s and 2,000 s, ahead)."
    )
    del found[0].runs["fedasmu-fa"]
    assert fresh_models_section(found, "more.md")[2] == (
        "FedASMU reaches, for LeNet5 on CIFAR-10, 0.401 with fresh models and 0.351 without (`slot = never`; ahead, "
        "+5.0 points; time to 0.30: 1,000 s and 900 s, no resolution)."
    )
    assert fresh_models_section(found[1:], "more.md") == []

"""The paper's other ten cells on the page of results: one seed each, a direction and no verdict."""

import pytest

from freshet.paper.cells import CELLS
from freshet.paper.other_cells import OTHERS, PLANNED, read_others, section
from freshet.paper.results_page import text_of
from freshet.paper.studies import STUDIES, StudyRuns

from .kept_runs import write_run


def rows(lines, first):
    """The cells of all table rows that begin with this."""
    split = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return [row for row in split if row[0] == first]


@pytest.fixture
def results(tmp_path):
    """Two cells: in one ours is ahead and at the target, in the other a rival diverged and nobody gets there."""
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


def test_they_are_all_cells_that_are_no_study():
    assert {*OTHERS, *(study.cell.name for study in STUDIES)} == set(CELLS) and len(OTHERS) == 10
    assert len(set(PLANNED)) == 14


def test_a_column_for_each_cell_with_its_best_in_bold(results):
    lines = section(read_others(results))
    assert rows(lines, "method")[0] == ["method", "lenet-cifar100", "cnn-cifar10"]
    assert rows(lines, "fedasmu-course") == [["fedasmu-course", "–", "**0.450**"]]
    assert rows(lines, "fedasync") == [["fedasync", "**0.058**", "0.380"]]
    assert rows(lines, "fedsa [R]") == [["fedsa [R]", "–", "0.100"]]
    assert rows(lines, "fedavg") == [["fedavg", "**0.200**"]], "the best of its kind"


def test_a_run_that_diverged_is_marked(results):
    assert rows(section(read_others(results)), "fedbuff") == [["fedbuff", "0.010 (diverged at 200 s)", "–"]]


def test_ours_are_held_against_the_best_rival_of_their_kind(results):
    (there,) = [row for row in rows(section(read_others(results)), "cnn-cifar10") if "fedasync, 0.380" in row]
    assert there[:4] == ["cnn-cifar10", "fedasync, 0.380", "-2.0", "+7.0"]
    assert there[4:] == ["0.40", "400 s: fedasync", "never", "500 s"]


def test_below_a_point_is_a_tie_and_a_target_that_nobody_reaches_is_never_reached(results):
    (there,) = [row for row in rows(section(read_others(results)), "lenet-cifar100") if len(row) == 8]
    assert there[1:] == ["fedasync, 0.058", "-0.8 (tie)", "–", "0.13", "never", "never", "–"]


def test_a_kind_without_ours_or_without_rivals_is_told_as_far_as_it_goes(results, tmp_path):
    write_run(tmp_path / "vgg-cifar10", "fedssmu", 0, [0.5] * 6)
    lines = section(read_others(results))
    assert ["cnn-cifar10", "fedavg, 0.200", "–", "–", "0.40", "never", "–", "–"] in rows(lines, "cnn-cifar10")
    (alone,) = [row for row in rows(lines, "vgg-cifar10") if len(row) == 8]
    assert alone == ["vgg-cifar10", "–", "–", "–", "0.45", "0 s: fedssmu", "0 s", "–"]


def test_the_scale_is_said_first_and_what_was_not_run_last(results):
    lines = section(read_others(results))
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
    first = [line for line in section(read_others(results)) if line.startswith("|")][:6]
    assert rows(first, "cell") == [["cell", "network", "training samples", "batch", "rate", "until"]]
    assert rows(first, "lenet-cifar100") == [["lenet-cifar100", "lenet5", "5,000", "25", "0.03", "1,000 s"]]
    assert rows(first, "textcnn-imdb") == [
        ["textcnn-imdb", "lenet5", "2,500, all", "25", "0.001 with Adam, 0.3 (the cell has 0.001)", "500 s"]
    ]
    assert rows(first, "vgg-cifar10") == [["vgg-cifar10", "vgg11, hidden_layers = 0", "5,000", "25", "0.03", "500 s"]]


def test_where_one_kind_was_run_longer_the_scale_says_so(results):
    write_run(results / "cnn-cifar10", "fedprox", 0, [0.2] * 16)
    (told,) = rows([line for line in section(read_others(results)) if line.startswith("|")][:4], "cnn-cifar10")
    assert told[-1] == "1,000 s asynchronous, 1,500 s synchronous"


def test_where_none_was_run_only_that_is_said(tmp_path):
    assert section(read_others(tmp_path)) == ["## The other ten cells", "", f"Not run: {', '.join(OTHERS)}.", ""]


def test_all_of_them_run_with_all_methods_leave_nothing_to_name(tmp_path):
    for name in OTHERS:
        for method in PLANNED:
            write_run(tmp_path / name, method, 0, [0.1] * 11)
    assert "Not run" not in "\n".join(section(read_others(tmp_path)))


def test_they_stand_between_the_main_runs_and_the_suites(results):
    for seed in range(3):
        write_run(results / "lenet-fmnist", "fedasmu", seed, [0.5] * 61)
    page = text_of([StudyRuns.read(study, results) for study in STUDIES], read_others(results))
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles[0].startswith("## LeNet5 on 10,000") and titles[1:3] == ["## The other ten cells", "## Suites"]

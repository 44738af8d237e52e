"""``freshet paper results``: the pages and their pictures, imported runs, and mistakes."""

from pathlib import Path

import pytest

from freshet.errors import ConfigError, RunError
from freshet.paper.results_page import page_texts
from freshet.paper.studies import Archive
from freshet.runs.kept_runs import kept_runs

from .archived_runs import write_ablation, write_run

ROOT = Path(__file__).parents[2]


def main_runs(results):
    for seed in range(3):
        write_run(results / "lenet-fmnist", "fedasmu", seed, [0.5] * 61)


def test_the_page_and_its_pictures_are_written_where_they_are_asked_for(command, tmp_path):
    main_runs(tmp_path / "kept")
    (tmp_path / "kept" / "INTRO.md").write_text("# Ours\n")
    (tmp_path / "kept" / "NOTES.md").write_text("## The end\n")
    (tmp_path / "kept" / "APPENDIX_INTRO.md").write_text("# More\n")
    (tmp_path / "kept" / "APPENDIX_NOTES.md").write_text("## The very end\n")
    done = command("paper", "results", "-o", tmp_path / "kept", "--page", tmp_path / "site" / "page.md")
    text = (tmp_path / "site" / "page.md").read_text()
    assert text.startswith("# Ours\n") and text.endswith("## The end\n")
    names = "page.md", "page-appendix.md", "images/results.png", "images/results-worlds.png"
    assert done.output.split() == [str(tmp_path / "site" / name) for name in names]
    assert "[appendix](page-appendix.md)" in text
    appendix = (tmp_path / "site" / "page-appendix.md").read_text()
    assert appendix.startswith("# More\n") and appendix.endswith("## The very end\n")
    assert (tmp_path / "site" / "images" / "results.png").stat().st_size > 10_000


def test_the_defaults_are_results_and_the_documentation(command, tmp_path):
    main_runs(tmp_path / "results")
    command("paper", "results")
    for name in ("results.md", "results-appendix.md"):
        assert "Made by `freshet paper results`" in (tmp_path / "docs" / name).read_text()
    assert not (tmp_path / "runs").exists()


def test_runs_are_imported_and_shown(command, grid, tmp_path):
    done = command("paper", "results", "--take", grid, "--cell", "cnn-cifar10")
    assert "2 runs imported into results/cnn-cifar10/runs" in done.output
    kept = tmp_path / "results" / "cnn-cifar10"
    assert list(kept_runs(kept)) == ["runs/fedasmu-seed0-0", "runs/fedasync-seed0-0"]
    assert sorted(path.name for path in kept.iterdir()) == ["runs.jsonl", "worlds.jsonl"]
    text = (tmp_path / "docs" / "results-appendix.md").read_text()
    assert "| fedasync | **0.100** |" in text
    assert "| cnn-cifar10 | fedasync, 0.100 | +0.0 (tie) |" in (tmp_path / "docs" / "results.md").read_text()
    assert "## Suites" not in text, "there are no main runs"
    assert command("paper", "results", "--take", grid, "--cell", "cnn-cifar10").exit_code == 0, (
        "a second import changes nothing"
    )


def test_runs_of_the_new_world_have_their_own_folder_and_need_no_others(command, tmp_path):
    write_ablation(tmp_path / "grid", {"fedasmu": 0.40, "fedasmu-fa": 0.30, "slot = h1": 0.40})
    done = command("paper", "results", "--take", tmp_path / "grid", "--cell", "lenet-cifar10")
    assert "9 runs imported into results/world-2/lenet-cifar10/runs" in done.output
    page, appendix = ((tmp_path / "docs" / name).read_text() for name in ("results.md", "results-appendix.md"))
    assert "FedASMU reaches, for LeNet5 on CIFAR-10, 0.401 with fresh models and 0.301 without" in page
    assert "| ablation | 1 | 1 | 10 |" in page and "| slots | 0 | 1 | 2 |" in page, "ahead in accuracy, equal in time"
    assert "| ablation: fedasmu over fedasmu-fa: accuracy 1.75 % to 4.71 % | +33.2 % | not tested |" in appendix
    assert "| slot = h1 | 0.401 |" in appendix and "## LeNet5 on 10,000" not in appendix


def test_the_words_may_ask_for_the_verdicts(command, tmp_path):
    main_runs(tmp_path / "results")
    (tmp_path / "results" / "INTRO.md").write_text("# Ours\n\nIn short: {verdicts}\n")
    command("paper", "results")
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "In short: Of the 51 numbers of the paper's evaluation, none is confirmed and 51 are not tested.\n" in page


def test_the_former_world_is_called_so(command, grid, tmp_path):
    main_runs(tmp_path / "results")
    command("paper", "results", "--take", grid, "--cell", "cnn-cifar10")
    page, appendix = ((tmp_path / "docs" / name).read_text() for name in ("results.md", "results-appendix.md"))
    words = "The former world: fastest device 10 s, 10 and 50 Mbit/s, decay per round."
    assert page.count(words) == 2, "main runs and other cells"
    assert appendix.count(words) == 4, "main runs, other cells, suites, answers"


def test_the_first_page_is_short_and_the_appendix_has_the_rest(command, tmp_path):
    main_runs(tmp_path / "results")
    command("paper", "results")
    page, appendix = ((tmp_path / "docs" / name).read_text() for name in ("results.md", "results-appendix.md"))
    assert "| fedasmu | 0.500 | never | never |" in page and "`00000000`" not in page
    assert "`00000000` `11111111` `22222222`" in appendix and "images/" not in appendix
    assert "| suite | confirmed | not tested |" in page and "| all | 0 | 51 |" in page, "nothing to compare with"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["results"], "--out: there is no folder results"),
        (["results", "-o", "grid"], "grid holds no runs"),
        (["results", "--take", "nowhere"], "--take: nowhere has no folder runs"),
        (["results", "--take", "grid", "--cell", "cnn"], "--cell: 'cnn' is not known"),
        (["results", "--take", "grid"], "--cell: lenet-fmnist is lenet5 on fashion-mnist, but"),
        (["results", "--take", "grid", "--cell", "cnn-cifar10", "--suite", "skew/iid"], "--suite: cnn-cifar10 has no"),
        (["results", "--cell", "cnn-cifar10"], "--cell: says where --take"),
        (["results", "--suite", "ours"], "--suite: says where --take"),
        (["results", "--page", "grid"], "--page: grid is a folder"),
    ],
)
def test_a_mistake_is_one_sentence(command, grid, words, problem):
    with pytest.raises((ConfigError, RunError)) as caught:
        command("paper", *words)
    assert str(caught.value).count("\n") == 0 and problem in str(caught.value)


@pytest.mark.parametrize("option", ["--scale", "--list", "--methods", "--set"])
def test_results_has_only_its_own_options(command, option):
    done = command("paper", "results", option, "1")
    assert done.exit_code == 2 and f"No such option: {option}" in done.output


def test_the_pages_in_the_repository_are_what_the_archived_runs_say():
    results = ROOT / "results"
    texts = page_texts(results, Archive.read(results), "results-appendix.md")
    for name, text in zip(("results.md", "results-appendix.md"), texts, strict=True):
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert page == text, "run: freshet paper results"
        assert "`freshet paper results`" in page

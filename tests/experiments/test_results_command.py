"""``freshet paper results`` as a user meets it: the page and its pictures, runs that are brought in, and mistakes."""

import json

import pytest

from freshet.errors import ConfigError, RunError
from freshet.paper.archive import ArchivedRun, read, variants
from freshet.paper.cells import find_cell
from freshet.paper.studies import import_runs, archive_folder

from .kept_runs import write_run


@pytest.fixture
def grid(tmp_path):
    """The folder of a comparison in the cell cnn-cifar10, one of its runs unfinished."""
    world = ("cifar10", "cnn")
    for method in ("fedasmu", "fedasync"):
        write_run(tmp_path / "grid", method, 0, [0.1] * 11, world=world)
    (write_run(tmp_path / "grid", "fedbuff", 0, [0.1] * 4, world=world) / "summary.json").unlink()
    return tmp_path / "grid"


def main_runs(results):
    for seed in range(3):
        write_run(results / "lenet-fmnist", "fedasmu", seed, [0.5] * 61)


def test_the_page_and_its_pictures_are_written_where_they_are_asked_for(command, tmp_path):
    main_runs(tmp_path / "kept")
    (tmp_path / "kept" / "INTRO.md").write_text("# Ours\n")
    (tmp_path / "kept" / "NOTES.md").write_text("## The end\n")
    done = command("paper", "results", "-o", tmp_path / "kept", "--page", tmp_path / "site" / "page.md")
    text = (tmp_path / "site" / "page.md").read_text()
    assert text.startswith("# Ours\n") and text.endswith("## The end\n")
    assert done.output.split() == [
        str(tmp_path / "site" / name) for name in ("page.md", "images/results.png", "images/results-worlds.png")
    ]
    assert (tmp_path / "site" / "images" / "results.png").stat().st_size > 10_000


def test_by_default_it_goes_from_results_to_the_documentation(command, tmp_path):
    main_runs(tmp_path / "results")
    command("paper", "results")
    assert "Made by `freshet paper results`" in (tmp_path / "docs" / "results.md").read_text()
    assert not (tmp_path / "runs").exists()


def test_runs_are_brought_in_and_told_of(command, grid, tmp_path):
    done = command("paper", "results", "--take", grid, "--cell", "cnn-cifar10")
    assert "2 runs brought into results/cnn-cifar10/runs" in done.output
    kept = tmp_path / "results" / "cnn-cifar10" / "runs"
    assert sorted(path.name for path in kept.iterdir()) == ["fedasmu-seed0-0", "fedasync-seed0-0"]
    assert not (kept / "fedasmu-seed0-0" / "events.jsonl").exists()
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "| fedasync | **0.100** |" in text
    assert "## Suites" not in text, "there are no main runs"
    assert command("paper", "results", "--take", grid, "--cell", "cnn-cifar10").exit_code == 0, "once more is no more"


def test_paper_lists_it(command):
    assert "docs/results.md" in command("paper").output


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
        (["results", "--scale", "1"], "--scale: means nothing to results"),
        (["results", "--list"], "--list: means nothing to results"),
        (["table", "--take", "grid"], "--take: is for freshet paper results"),
        (["--page", "x.md"], "--page: is for freshet paper results"),
        (["result"], "theory, results"),
    ],
)
def test_a_mistake_is_one_sentence(command, grid, words, problem):
    with pytest.raises((ConfigError, RunError)) as caught:
        command("paper", *words)
    assert str(caught.value).count("\n") == 0 and problem in str(caught.value)


@pytest.mark.parametrize("suite", ["slots/x", "skew", "skew/../..", "skew/a/b", "skew/..", "nonsense", "../x"])
def test_only_a_suite_that_there_is_takes_runs(tmp_path, suite):
    with pytest.raises(ConfigError, match="--suite"):
        archive_folder(tmp_path, find_cell("lenet-fmnist"), suite)


def test_a_suite_has_its_folder(tmp_path):
    cell = find_cell("lenet-fmnist")
    assert archive_folder(tmp_path, cell, "slots") == tmp_path / "lenet-fmnist" / "suites" / "slots"
    assert archive_folder(tmp_path, cell, "bandwidth/bandwidth-1-50").parts[-2:] == ("bandwidth", "bandwidth-1-50")


def change(run, **values):
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | values))


BROKEN = {
    "a summary that is no JSON": lambda run: (run / "summary.json").write_text("{"),
    "no summary": lambda run: (run / "summary.json").unlink(),
    "no settings": lambda run: (run / "config.toml").unlink(),
    "settings that are no TOML": lambda run: (run / "config.toml").write_text("x ="),
    "no rate": lambda run: (run / "config.toml").write_text("[training]\n"),
    "no tests": lambda run: (run / "metrics.jsonl").write_text(""),
    "a test without accuracy": lambda run: (run / "metrics.jsonl").write_text('{"time": 0.0}\n'),
    "an accuracy that is none": lambda run: (run / "metrics.jsonl").write_text('{"time": 0.0, "accuracy": NaN}\n'),
    "half a line": lambda run: (run / "metrics.jsonl").write_text('{"time": 0.0, "acc'),
    "no method": lambda run: change(run, method=None),
    "a method from elsewhere": lambda run: change(run, method="os:system"),
    "a hash that is a table": lambda run: change(run, weights_sha256="` | **best** | `"),
    "a seed in words": lambda run: change(run, seed="one"),
    "a count beyond all counts": lambda run: change(run, uploads=10**400),
    "a time in words": lambda run: change(run, time_to_target="soon"),
}


@pytest.mark.parametrize("harm", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_run_is_named_in_one_sentence(tmp_path, harm):
    run = write_run(tmp_path, "fedavg", 0, [0.1] * 11)
    harm(run)
    with pytest.raises(RunError) as caught:
        read(tmp_path)
    assert str(run) in str(caught.value) and "\n" not in str(caught.value)


def test_of_a_folder_with_a_broken_run_nothing_is_brought_in(grid, tmp_path):
    change(grid / "runs" / "fedasync-seed0-0", uploads=None)
    with pytest.raises(RunError, match="fedasync-seed0-0 cannot be used: uploads"):
        import_runs([grid], tmp_path / "kept", find_cell("cnn-cifar10"))
    assert not (tmp_path / "kept").exists()


def test_a_seed_that_is_there_twice_is_refused(tmp_path):
    write_run(tmp_path, "fedavg", 0, [0.1] * 11)
    write_run(tmp_path, "fedavg", 0, [0.2] * 11, options="x = 1\n")
    with pytest.raises(RunError, match="two runs of fedavg with seed 0"):
        read(tmp_path)


def test_a_setting_cannot_write_into_the_table(tmp_path):
    main = ArchivedRun.read(write_run(tmp_path / "main", "fedasmu", 0, [0.1] * 11, options="slot = 'rl'\n"))
    write_run(tmp_path / "suite", "fedasmu", 0, [0.1] * 11, options="slot = 'h1 | **0.9** | <script>'\n")
    assert list(variants(tmp_path / "suite", [main])) == ["slot = h1 ? ??0.9?? ? ?script?"]

"""Archived runs: how they are read, checked, imported and counted."""

import json

import pytest

from freshet.errors import ConfigError, RunError
from freshet.paper.archive import ArchivedRun, copy_runs, median_accuracy, median_time, outcome, read, variants
from freshet.paper.cells import find_cell
from freshet.paper.studies import archive_folder, import_runs, name_with_marks, seconds, sort_key

from .archived_runs import write_run


def test_accuracy_is_the_mean_of_the_last_five_tests_and_the_median_over_seeds(archive):
    runs = read(archive)
    assert runs["fedasmu"][1].accuracy == pytest.approx((0.81 + 4 * 0.851) / 5)
    assert median_accuracy(runs["fedasmu"]) == pytest.approx(runs["fedasmu"][1].accuracy)


def test_never_is_later_than_everything(archive):
    runs = read(archive)
    assert median_time(runs["fedbuff"]) == float("inf") and seconds(float("inf")) == "never"


def test_accuracy_is_compared_on_common_seeds_and_time_where_one_reaches_the_target(archive):
    runs = read(archive)
    assert outcome(runs["fedasmu"], runs["fedbuff"]) == "win"
    assert outcome(runs["fedasmu"], runs["fedasync"]) == "tie"
    assert outcome(runs["fedasmu"], runs["fedasync"], "time") == "win"
    assert outcome(runs["fedbuff"], runs["fedasmu"], "time") == "loss"
    assert outcome(runs["fedbuff"], runs["fedbuff"], "time") == "none"


def test_the_marks_of_a_method_stand_beside_its_name():
    assert [name_with_marks(name) for name in ("fedsa", "asofed", "fedavg")] == ["fedsa [R]", "asofed [-F]", "fedavg"]


def test_settings_are_sorted_by_their_number():
    names = ["iid", "bandwidth 1/100", "Dirichlet 0.1", "250 devices", "ratio 5"]
    assert [sort_key(name) for name in names] == [float("inf"), 100.0, 0.1, 250.0, 5.0]


# ---- importing runs


def test_only_small_files_are_imported(archive, tmp_path):
    copy_runs([archive], tmp_path / "into")
    found = sorted(path.name for path in (tmp_path / "into" / "runs" / "fedasmu-seed0-0").iterdir())
    assert found == ["config.toml", "metrics.jsonl", "summary.json", "world.json"]


def test_an_interrupted_run_is_not_imported(archive, tmp_path):
    summary = archive / "runs" / "fedasmu-seed0-0" / "summary.json"
    summary.write_text(summary.read_text().replace("finished", "interrupted"))
    copy_runs([archive], tmp_path / "into")
    assert not (tmp_path / "into" / "runs" / "fedasmu-seed0-0").exists()
    assert (tmp_path / "into" / "runs" / "fedasmu-seed1-0").exists()


def test_nothing_is_imported_from_a_folder_with_a_broken_run(grid, tmp_path):
    change(grid / "runs" / "fedasync-seed0-0", uploads=None)
    with pytest.raises(RunError, match="fedasync-seed0-0 cannot be used: uploads"):
        import_runs([grid], tmp_path / "kept", find_cell("cnn-cifar10"))
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("suite", ["slots/x", "skew", "skew/../..", "skew/a/b", "skew/..", "nonsense", "../x"])
def test_runs_of_an_unknown_suite_are_refused(tmp_path, suite):
    with pytest.raises(ConfigError, match="--suite"):
        archive_folder(tmp_path, find_cell("lenet-fmnist"), suite)


def test_a_suite_has_its_folder(tmp_path):
    cell = find_cell("lenet-fmnist")
    assert archive_folder(tmp_path, cell, "slots") == tmp_path / "lenet-fmnist" / "suites" / "slots"
    assert archive_folder(tmp_path, cell, "bandwidth/bandwidth-1-50").parts[-2:] == ("bandwidth", "bandwidth-1-50")


# ---- broken runs


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


def test_two_runs_of_one_seed_are_refused(tmp_path):
    write_run(tmp_path, "fedavg", 0, [0.1] * 11)
    write_run(tmp_path, "fedavg", 0, [0.2] * 11, options="x = 1\n")
    with pytest.raises(RunError, match="two runs of fedavg with seed 0"):
        read(tmp_path)


def test_a_setting_cannot_write_into_the_table(tmp_path):
    main = ArchivedRun.read(write_run(tmp_path / "main", "fedasmu", 0, [0.1] * 11, options="slot = 'rl'\n"))
    write_run(tmp_path / "suite", "fedasmu", 0, [0.1] * 11, options="slot = 'h1 | **0.9** | <script>'\n")
    assert list(variants(tmp_path / "suite", [main])) == ["slot = h1 ? ??0.9?? ? ?script?"]

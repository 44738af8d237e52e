"""Archived runs: how they are read, checked, imported and counted."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from freshet.errors import ConfigError, RunError
from freshet.paper.archive import ArchivedRun, keep_runs, median_accuracy, median_time, outcome, read, variants
from freshet.paper.cells import find_cell
from freshet.paper.studies import archive_folder, import_runs, name_with_marks, seconds, sort_key, suite_columns
from freshet.runs.kept_runs import keep, kept_runs
from freshet.runs.reader import RunDirectory

from .archived_runs import NEW_WORLD, write_run


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
    assert outcome(runs["fedbuff"], runs["fedbuff"], "time") == "never"
    assert outcome(runs["fedbuff"], [], "time") == outcome([], runs["fedbuff"]) == "none"


# ---- tests before the target


def timed(before: Sequence[int], tests: int = 40) -> list[ArchivedRun]:
    """Runs tested every 100 s that reach the target after so many tests; ``tests`` or more means never."""
    times = [100.0 * n for n in range(tests)]
    return [
        ArchivedRun("fedasmu", seed, times, times, None if n >= tests else times[n], *[None] * 10)
        for seed, n in enumerate(before)
    ]


def test_tests_before_the_target_are_counted_with_that_of_the_initial_model():
    assert [run.tests_before_target for run in timed((0, 1, 10, 40))] == [0, 1, 10, 40]
    first = ArchivedRun("fedasmu", 0, [0.0, 250.0, 300.0], [0.0] * 3, 300.0, *[None] * 10)
    assert first.tests_before_target == 2
    assert first.truncate(299.0).tests_before_target == 2, "never within that time: all tests are before it"


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ((10, 11, 12), (20, 21, 22), "win"),
        ((20, 21, 22), (10, 11, 12), "loss"),
        ((9, 9, 30), (31, 32, 33), "coarse"),  # the median counts
        ((9, 10, 11), (31, 32, 33), "win"),
        ((20, 21, 22), (9, 9, 9), "coarse"),  # both sides need ten
        ((10, 10, 10), (40, 40, 40), "win"),  # the rival never does
        ((40, 40, 40), (10, 10, 10), "loss"),
        ((9, 9, 9), (40, 40, 40), "coarse"),
        ((10, 10, 10), (10, 10, 10), "tie"),
        ((10, 13, 14), (11, 12, 12), "open"),
        ((40, 40, 40), (40, 40, 40), "never"),
        ((30, 40, 40), (40, 40, 40), "few"),  # one seed shows no lead
        ((10, 11), (20, 21), "few"),
        ((1, 2), (3, 4), "coarse"),
    ],
)
def test_a_time_to_target_counts_only_with_ten_tests_before_it(ours, theirs, said):
    assert outcome(timed(ours), timed(theirs), "time") == said


def test_a_short_run_that_never_reaches_the_target_has_no_resolution():
    assert outcome(timed((10, 10, 10)), timed((9, 9, 9), tests=9), "time") == "coarse"


def test_the_marks_of_a_method_stand_beside_its_name():
    assert [name_with_marks(name) for name in ("fedsa", "asofed", "fedavg")] == ["fedsa [R]", "asofed [-F]", "fedavg"]


def test_settings_are_sorted_by_their_number():
    names = ["iid", "bandwidth 1/100", "Dirichlet 0.1", "250 devices", "ratio 5"]
    assert [sort_key(name) for name in names] == [float("inf"), 100.0, 0.1, 250.0, 5.0]


# ---- importing runs


def test_a_run_is_imported_as_a_line_without_its_log(archive, tmp_path):
    keep_runs([archive], tmp_path / "into", Path())
    assert sorted(path.name for path in (tmp_path / "into").iterdir()) == ["runs.jsonl", "worlds.jsonl"]
    assert "large" not in (tmp_path / "into" / "runs.jsonl").read_text()
    before, after = read(archive), read(tmp_path / "into")
    assert before == after and set(before) == {"fedasmu", "fedasync", "fedbuff"}


def test_an_interrupted_run_is_not_imported(archive, tmp_path):
    summary = archive / "runs" / "fedasmu-seed0-0" / "summary.json"
    summary.write_text(summary.read_text().replace("finished", "interrupted"))
    names = [path.name for path in keep_runs([archive], tmp_path / "into", Path())]
    assert "fedasmu-seed0-0" not in names and "fedasmu-seed1-0" in names


def test_an_imported_run_is_no_longer_among_the_unfinished(grid, tmp_path):
    cell, home = find_cell("cnn-cifar10"), tmp_path / "kept" / "cnn-cifar10"
    keep({"unfinished/fedasmu-seed0-0": RunDirectory(grid / "runs" / "fedasmu-seed0-0")}, home)
    keep({"unfinished/fedavg-seed0-0": RunDirectory(grid / "runs" / "fedasmu-seed0-0")}, home)
    import_runs([grid], tmp_path / "kept", cell)
    assert sorted(kept_runs(home)) == ["runs/fedasmu-seed0-0", "runs/fedasync-seed0-0", "unfinished/fedavg-seed0-0"]


def test_the_runs_of_a_suite_lie_in_the_files_of_their_cell(archive, tmp_path):
    import_runs([archive], tmp_path / "kept", find_cell("lenet-fmnist"), "skew/Dirichlet-0.1")
    import_runs([archive], tmp_path / "kept", find_cell("lenet-fmnist"))
    home = tmp_path / "kept" / "lenet-fmnist"
    assert sorted(path.name for path in home.iterdir()) == ["runs.jsonl", "worlds.jsonl"]
    assert read(home / "suites" / "skew" / "Dirichlet-0.1") == read(home) == read(archive)
    assert list(suite_columns(read(home), home / "suites" / "skew", "Dirichlet 0.5")) == [
        "Dirichlet 0.1",
        "Dirichlet 0.5",
    ]


def test_nothing_is_imported_from_a_folder_with_a_broken_run(grid, tmp_path):
    change(grid / "runs" / "fedasync-seed0-0", uploads=None)
    with pytest.raises(RunError, match="fedasync-seed0-0 cannot be used: uploads"):
        import_runs([grid], tmp_path / "kept", find_cell("cnn-cifar10"))
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("suite", ["slots/x", "skew", "skew/../..", "skew/a/b", "skew/..", "nonsense", "../x"])
def test_runs_of_an_unknown_suite_are_refused(tmp_path, suite):
    with pytest.raises(ConfigError, match="--suite"):
        archive_folder(tmp_path, find_cell("lenet-fmnist"), suite)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"fleet": "fastest = 7.0\n"}, "has fleet.fastest = 7.0, but the new world has 190"),
        ({"fleet": "fastest = [1]\n"}, "has fleet.fastest = "),
        ({"fleet": "fastest = 190.0\nup_mbps = 10.0\n"}, "has fleet.up_mbps = 10.0, but the new world has 0.0"),
        ({"schedule": ""}, "has training.schedule_by = None, but the new world has time"),
    ],
)
def test_a_run_of_another_world_is_refused(tmp_path, changed, problem):
    write_run(tmp_path / "grid", "fedasmu", 0, [0.1] * 11, **NEW_WORLD | changed)
    with pytest.raises(ConfigError) as caught:
        import_runs([tmp_path / "grid"], tmp_path / "kept", find_cell("lenet-cifar10"))
    assert problem in str(caught.value) and not (tmp_path / "kept").exists()


def test_runs_of_two_worlds_are_not_imported_together(tmp_path):
    write_run(tmp_path, "fedasmu", 0, [0.1] * 11, **NEW_WORLD)
    write_run(tmp_path, "fedavg", 0, [0.1] * 11, world=NEW_WORLD["world"])
    with pytest.raises(ConfigError, match="--take: the runs are of two worlds"):
        import_runs([tmp_path], tmp_path / "kept", find_cell("lenet-cifar10"))


def test_a_run_of_the_new_world_belongs_to_a_cell_of_the_ablation_and_to_no_suite(tmp_path):
    write_run(tmp_path / "one", "fedasmu", 0, [0.1] * 11, **NEW_WORLD)
    write_run(tmp_path / "other", "fedasmu", 0, [0.1] * 11, **NEW_WORLD | {"world": ("cifar100", "lenet5")})
    with pytest.raises(ConfigError, match="--suite: the new world has no suites"):
        import_runs([tmp_path / "one"], tmp_path / "kept", find_cell("lenet-cifar10"), "ours")
    with pytest.raises(ConfigError, match=r"--cell: .* only for lenet-cifar10 and cnn-cifar10"):
        import_runs([tmp_path / "other"], tmp_path / "kept", find_cell("lenet-cifar100"))


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

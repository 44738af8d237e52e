"""Checking a submission: settings, audit, tests and a repetition up to a random trip."""

import json
from pathlib import Path

import pytest

from freshet.experiments import bench
from freshet.experiments.submission import check_run, compare_events, compare_tests, first_difference

from .test_bench import command, tiny  # noqa: F401


@pytest.fixture
def submission(command, tiny) -> Path:  # noqa: F811
    command("--worlds", "image", "-m", "fedasync")
    (run,) = Path("runs/bench-1/quick/runs").iterdir()
    return run


def test_a_run_is_audited_and_repeated_to_a_random_trip(submission: Path, command):  # noqa: F811
    found = check_run(submission, None, 5)
    assert found.problem is None and (found.world, found.budget, found.method) == ("image", "quick", "fedasync")
    assert "events audited, weights recomputed" in found.done[0]
    assert found.done[1].startswith("repeated from its start to the arrival of trip ")
    assert found.done[1].endswith("the same bits")
    done = command("check", "runs/bench-1/quick", "--seed", "5")
    assert done.exit_code == 0 and "1 of 1 runs pass; trips drawn with --seed 5" in done.output


def change_line(path: Path, kind: str, change) -> None:
    lines = path.read_text().splitlines()
    place = next(n for n, line in enumerate(lines) if json.loads(line).get("kind", "row") == kind)
    lines[place] = json.dumps(change(json.loads(lines[place])), separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")


def test_a_better_accuracy_in_the_metrics_is_noticed(submission: Path, command):  # noqa: F811
    change_line(submission / "metrics.jsonl", "row", lambda row: row | {"accuracy": 0.99})
    assert "is 0.99 in metrics.jsonl" in str(check_run(submission, None, 0).problem)
    assert command("check", "runs/bench-1/quick").exit_code == 1


def test_a_better_accuracy_in_both_files_is_noticed_by_the_repetition(submission: Path):
    change_line(submission / "metrics.jsonl", "row", lambda row: row | {"accuracy": 0.99})
    change_line(submission / "events.jsonl", "evaluate", lambda row: row | {"accuracy": 0.99})
    problem = check_run(submission, None, 0).problem
    assert problem is not None and "accuracy is 0.99, and 0." in problem and problem.endswith("when repeated")


def test_a_changed_weight_is_noticed_by_the_audit(submission: Path):
    def heavier(event):
        event["contributions"][0]["weight"] *= 1.5
        return event

    change_line(submission / "events.jsonl", "aggregate", heavier)
    assert "weight" in str(check_run(submission, None, 0).problem)


def test_a_run_of_no_world_is_refused(submission: Path):
    config = submission / "config.toml"
    config.write_text(config.read_text().replace("in_flight = 5", "in_flight = 6"))
    assert check_run(submission, None, 0).problem == "its settings are not those of a world of bench-1"
    assert bench.find_world({}) is None


def test_a_method_that_is_not_built_in_is_not_imported_unless_it_is_named(submission: Path):
    config = submission / "config.toml"
    config.write_text(config.read_text().replace('name = "fedasync"', 'name = "evil:Evil"'))
    assert "evil:Evil" in str(check_run(submission, None, 0).problem)


def test_numbers_may_differ_by_rounding_and_words_may_not():
    assert first_difference({"a": 1.0, "b": [0.5]}, {"a": 1.0 + 1e-9, "b": [0.51]}) is None
    assert first_difference({"a": {"b": 0.5}}, {"a": {"b": 0.9}}) == "a.b is 0.5, and 0.9 when repeated"
    assert first_difference({"a": 3}, {"a": 4}) == "a is 3, and 4 when repeated"
    assert first_difference({"kind": "lost"}, {"kind": "upload"}) is not None
    assert first_difference({}, {"more": 1}) is not None


def test_the_first_events_of_two_logs_are_compared():
    one = [{"time": 0.0, "x": 1}, {"time": 5.0, "x": 2}]
    other = [{"time": 0.0, "x": 1}, {"time": 5.0, "x": 3}]
    assert compare_events(iter(one), iter(other), 1) == (True, None)
    exact, problem = compare_events(iter(one), iter(other), 2)
    assert not exact and problem is not None and "line 2" in problem
    assert compare_events(iter(one), iter(one[:1]), 2)[1] is not None, "a log that ends too early differs"


def test_a_test_that_the_log_lacks_is_noticed():
    assert compare_tests([{"time": 3.0}], iter([])) == "metrics.jsonl has a test at 3.0 s that the log lacks"

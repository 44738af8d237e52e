"""The check of Theorem 1 on short runs, and ``freshet paper theory``."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from freshet import Federation
from freshet.errors import ConfigError, RunError
from freshet.paper import theory
from freshet.paper.convex import digits
from freshet.paper.theory import TheoryRun
from freshet.runs.lifecycle import interruptible

SHORT = TheoryRun("grid", "fedasmu", 5, 2, 30)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return theory.perform(SHORT, tmp_path_factory.mktemp("theory"))


def test_a_run_measures_the_gradient_at_every_version(outcome):
    problem = digits(theory.MU)
    start = problem.gradient(np.zeros(problem.size))
    assert len(outcome["gradient_sq"]) == 30
    assert outcome["gradient_sq"][0] == pytest.approx(start @ start, rel=1e-12)
    assert outcome["staleness_max"] <= 5 and outcome["discards"] > 0
    assert outcome["n_min"] == outcome["n_max"] == 2
    assert 0 < outcome["alpha_min"] < outcome["alpha_max"] < 1


def test_a_trace_takes_no_more_than_it_wants():
    trace, part = theory.AggregationTrace(2), {"device": 3, "base": 1, "staleness": 1, "weight": 0.5}

    def aggregate(version):
        trace.on_event({"kind": "aggregate", "version": version, "contributions": [part]})

    aggregate(1)
    trace.on_event({"kind": "discard"})
    with pytest.raises(theory.EnoughVersions):
        aggregate(2)
    aggregate(3)
    trace.on_event({"kind": "discard"})
    assert [row["version"] for row in trace.rows] == [1, 2] and trace.discards == 1
    assert [(row["device"], row["staleness"]) for row in trace.rows] == [(3, 1), (3, 1)]


def test_a_run_measures_what_the_assumptions_bound(outcome):
    assert outcome["noise"] < outcome["variance"]
    assert outcome["second_mean"] < outcome["second_moment"]
    assert outcome["variance_mean"] < outcome["variance"]
    assert max(outcome["gradient_sq"]) <= outcome["second_moment"]  # Jensen: |grad F|^2 <= G^2
    assert outcome["smoothness"] >= digits(theory.MU).smoothness()


def test_a_step_is_noted_with_exact_moments():
    problem, shard = digits(theory.MU), np.arange(40, 60)
    own, w = problem.take(shard), np.random.default_rng(0).normal(size=650).astype(np.float32)
    report = {}
    for _ in range(2):
        theory.record_step(report, problem, own, w, 5)
    here, mean = problem.gradient(w), own.gradient(w)
    noise = own.moments(w, 5).noise
    assert report["measured"] == 2
    assert report["path"] == pytest.approx(2 * here @ here)
    assert report["second_max"] == pytest.approx(mean @ mean + noise)
    assert report["variance_max"] == pytest.approx((mean - here) @ (mean - here) + noise)
    assert report["variance_sum"] == pytest.approx(2 * report["variance_max"])


def test_measurements_change_nothing(tmp_path):
    """Plain FedASMU in the same world, with whole shards as batches, ends in the same model."""
    watched = theory.federation(replace(SHORT, tau=99))
    tables = watched.config.tables()
    method = {k: v for k, v in tables["method"].items() if k not in ("mu", "batch", "every", "name")}
    parts = {name: tables[name] for name in ("training", "fleet", "data", "run")}
    tables["method"]["batch"] = parts["training"]["batch_size"]
    one = Federation(model=theory.zero_model, method=tables["method"], **parts).run(60, out=tmp_path / "a")
    two = Federation(model=theory.zero_model, method=method | {"name": "fedasmu"}, **parts).run(60, out=tmp_path / "b")
    assert one.summary["aggregations"] == two.summary["aggregations"] > 20
    np.testing.assert_array_equal(one.weights, two.weights)


def test_influence_makes_the_last_model_of_all_uploads():
    """Mixing and merging forwards, with any displacements, gives w_1 plus the weighted displacements."""
    rng, rows, versions, moved = np.random.default_rng(5), [], [np.array([1.0, -2.0])], []
    for t in range(1, 60):
        base = int(rng.integers(max(1, t - 8), t + 1))
        fresh, beta, alpha = int(rng.integers(base, t + 1)), rng.uniform(0, 0.6) * (t % 3 > 0), rng.uniform(0.05, 0.9)
        d = rng.normal(size=2)
        upload = (1 - beta) * versions[base - 1] + beta * versions[fresh - 1] + d
        versions.append((1 - alpha) * versions[-1] + alpha * upload)
        rows.append({"alpha": alpha, "beta": beta, "base": base, "fresh": fresh, "kept": 1.0})
        moved.append(d)
    np.testing.assert_allclose(versions[-1], versions[0] + theory.influence(rows) @ np.array(moved), atol=1e-12)


def test_devices_that_count_by_their_samples_leave_no_floor():
    def rows(first, second):
        fresh = {"beta": 0.0, "kept": 1.0}
        return [
            fresh | {"device": t % 2, "alpha": (first, second)[t % 2], "base": t + 1, "fresh": t + 1} for t in range(4)
        ]

    shards = [np.arange(200), np.arange(200, 1438)]
    assert theory.participation_floor(rows(0.2 / 1.438, 1.238 / 1.438), shards) < 1e-18
    assert theory.participation_floor(rows(0.5, 0.5), shards) > 1e-4


def test_a_limit_beyond_a_round_is_not_run_twice():
    jobs = theory.settings([0])
    sync = [job for job in jobs if job.part == "grid" and job.method == "fedssmu"]
    assert len(sync) == 9 and len({job.canonical() for job in sync}) == 6
    assert len({job.canonical() for job in jobs if job.part == "grid" and job.method == "fedasmu"}) == 9
    assert all(job.lr == pytest.approx(job.versions**-0.5) for job in jobs)
    assert [job.part for job in jobs].count("witness") == 1


def test_a_line_joins_its_seeds_and_keeps_the_worst_constants(outcome, tmp_path):
    other = outcome | {"setting": outcome["setting"] | {"seed": 1}, "variance": 2 * outcome["variance"]}
    other |= {"gradient_sq": [3 * value for value in outcome["gradient_sq"]]}
    for seed, record in enumerate((outcome, other)):
        (tmp_path / f"{replace(SHORT, seed=seed).name}.json").write_text(json.dumps(record))
    (group,) = theory.groups([SHORT, replace(SHORT, seed=1)])
    line = theory.line(group, tmp_path, gap=0.5)
    assert line["seeds"] == [0, 1]
    assert line["constants"]["variance"] == 2 * outcome["variance"]
    assert line["mean"] == pytest.approx(2 * np.mean(outcome["gradient_sq"]))
    assert line["curve"][0]["T"] == 1 and line["curve"][-1]["T"] == 30
    assert line["curve"][-1]["mean"] == line["mean"]
    assert line["curve"][-1]["printed"] == line["printed"] < line["corrected"]
    assert line["mean"] < line["corrected"]
    with pytest.raises(RunError, match="does not hold"):
        theory.line([replace(SHORT, seed=2)], tmp_path, gap=0.5)


def test_what_was_made_with_other_settings_or_another_version_is_made_again(outcome, tmp_path):
    path = tmp_path / f"{SHORT.name}.json"
    assert theory.load(SHORT, tmp_path) is None
    path.write_text(json.dumps(outcome))
    assert theory.load(SHORT, tmp_path) == outcome
    for damage in ({"freshet": "0"}, {"setting": {}}):
        path.write_text(json.dumps(outcome | damage))
        assert theory.load(SHORT, tmp_path) is None
    path.write_text("{")
    assert theory.load(SHORT, tmp_path) is None


def test_several_processes_find_the_same(outcome, tmp_path):
    done = []
    jobs = [SHORT, TheoryRun("grid", "fedssmu", 5, 1, 10)]
    assert theory.run_all(jobs, tmp_path, 2, lambda job, mean: done.append((job, mean)))
    assert {job for job, _ in done} == set(jobs)
    found = theory.load(SHORT, tmp_path)
    assert found["gradient_sq"] == outcome["gradient_sq"]
    assert theory.missing(jobs, tmp_path) == []


# ---- the command


@pytest.fixture
def few(monkeypatch):
    """Five runs instead of all."""
    monkeypatch.setattr(theory, "TAUS", (5,))
    monkeypatch.setattr(theory, "EPOCHS", (1,))
    monkeypatch.setattr(theory, "HORIZONS", (0.5, 1.0))
    monkeypatch.setattr(theory, "IOTAS", {"fedasmu": (0.0,)})


def test_the_command_writes_numbers_and_a_figure_and_repeats_nothing(few, command, monkeypatch, tmp_path):
    line = ["paper", "theory", "--scale", 0.02, "--seeds", 1, "--out", tmp_path, "--workers", 1]
    done = command(*line)
    assert done.exit_code == 0 and "corrected" in done.output and "horizon" in done.output
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "theory.pdf").read_bytes().startswith(b"%PDF")
    found = json.loads((tmp_path / "theory.json").read_text())
    assert [row["part"] for row in found["lines"]] == ["grid", "grid", "horizon", "horizon", "witness"]
    assert found["problem"]["gradient_at_optimum"] <= 1e-10
    rows = (tmp_path / "theory.csv").read_text().splitlines()
    assert rows[0].startswith("part,method,tau,epochs")
    assert len(rows) == 1 + sum(len(row["curve"]) for row in found["lines"])
    assert "0 to do" in command(*line, "--list").output
    monkeypatch.setattr(theory, "perform", None)
    assert command(*line).exit_code == 0


def test_an_interrupted_command_says_so(few, command, monkeypatch, tmp_path):
    monkeypatch.setattr(theory, "perform", lambda setting, scratch: None)
    done = command("paper", "theory", "--scale", 0.02, "--seeds", 1, "--out", tmp_path, "--workers", 1)
    assert done.exit_code == 130
    assert not (tmp_path / "theory.json").exists()


def test_ctrl_c_at_the_end_of_a_run_prevents_the_next_run(monkeypatch, tmp_path):
    settings, done = theory.settings([0], 5)[:2], []

    def pressed(setting, scratch):
        with interruptible():
            os.kill(os.getpid(), signal.SIGINT)
        return {"gradient_sq": [1.0]}

    monkeypatch.setattr(theory, "perform", pressed)
    assert not theory.run_all(settings, tmp_path, 1, lambda setting, _: done.append(setting))
    assert done == settings[:1]
    assert theory.run_all(settings[1:], tmp_path, 1, lambda setting, _: done.append(setting)), "there is no next one"


def test_wrong_options_are_refused(few, command, tmp_path):
    for option in ("--cells", "--methods", "--set", "--executor", "--retry"):
        done = command("paper", "theory", option, "x")
        assert done.exit_code == 2 and f"No such option: {option}" in done.output
    with pytest.raises(ConfigError, match="--scale"):
        command("paper", "theory", "--scale", 2, "--out", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        command("paper", "theory", "--out", tmp_path / "file")


def test_one_seed_is_the_default(few, command, tmp_path):
    assert "5 runs, 5 to do" in command("paper", "theory", "--list", "--out", tmp_path).output
    assert "15 runs, 15 to do" in command("paper", "theory", "--list", "--seeds", 3, "--out", tmp_path).output

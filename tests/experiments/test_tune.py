"""Tuning: on held-out training data only, with equal budgets, resumable, and a config file that runs."""

import json
import os
import signal

import numpy as np
import pytest

from freshet.config import load_tables, resolve
from freshet.data import load
from freshet.errors import FreshetError, RunError
from freshet.experiments import compare, tune
from freshet.experiments.compare import GridObserver
from freshet.experiments.grid import Scenario, UserSettings, parse_entries, tables_for
from freshet.experiments.tune import Budget, Tuner, best_config, defaults, score, space_for, step_of, trial_config
from freshet.federation import Federation
from freshet.methods import method_options, registry

from .helpers import TINY


def tables(method="fedprox", settings=()):
    return tables_for(
        parse_entries(method)[0], Scenario(), UserSettings(settings=[*TINY, "data.train_samples=200", *settings])
    )


# ---- the spaces


def test_every_method_has_a_space_that_contains_its_defaults():
    without = [name for name, method in registry().items() if not method.about.space]
    assert without == ["fedavg", "mifa"]  # the one has no option, the other only for its variants
    assert registry()["mifa"].about.spaces["fedstale"].keys() == {"beta"}
    for method in registry():
        options = method_options(method, {}).model_dump()
        for name, each in space_for(method).items():
            section, _, key = name.partition(".")
            value = options[key] if section == "method" else 0.1
            assert each.low <= value <= each.high, name
            assert not each.whole or isinstance(value, int), name
            assert not each.log or each.low > 0, name


@pytest.mark.parametrize("method", registry())
@pytest.mark.parametrize("end", ["low", "high"])
def test_both_ends_of_every_range_are_allowed_values(method, end):
    world = tables(method, ["fleet.devices=8", "run.in_flight=8"])
    space = space_for(method, resolve(world).run.in_flight)
    values = {name: int(getattr(each, end)) if each.whole else getattr(each, end) for name, each in space.items()}
    assert trial_config(world, values, 0).method_name == method


def test_a_variant_has_the_space_of_its_method():
    assert space_for("fedasmu-da") == space_for("fedasmu")
    progress = space_for("fedasmu-progress")
    assert list(progress) == list(space_for("fedasmu")) and progress["method.iota0"].high == 0.1
    assert list(space_for("fedavg")) == ["training.lr"]


@pytest.mark.parametrize("method", ["port", "fedbuff"])
def test_no_method_waits_for_more_uploads_than_devices_in_flight(method):
    ends = {in_flight: space_for(method, in_flight)["method.K"] for in_flight in (1, 8, 30)}
    assert {n: (each.low, each.high, each.whole) for n, each in ends.items()} == {
        1: (1, 1, True), 8: (2, 8, True), 30: (2, 20, True),
    }  # fmt: skip
    assert {**space_for(method, 8), "method.K": None} == {**space_for(method), "method.K": None}


# ---- scores


def test_a_trial_is_scored_on_held_out_training_data_whatever_the_config_says():
    config = trial_config(tables("fedprox", ["data.validation=0.0"]), {"method.mu": 0.5}, 7)
    assert (config.data.validation, config.run.seed, config.method.mu) == (tune.VALIDATION, 7, 0.5)
    assert best_config(tables("fedprox", ["data.validation=0.5"]), {}).data.validation == 0.0


def test_the_score_is_the_mean_of_the_last_five_tests():
    assert score([{"accuracy": a} for a in (0.9, 0.1, 0.2, 0.3, 0.4, 0.5)]) == pytest.approx(0.3)
    assert score([{"accuracy": 0.4}, {"accuracy": None}]) == pytest.approx(0.2)
    assert score([]) == 0.0


def test_steps_of_the_second_seed_follow_those_of_the_first():
    config = trial_config(tables(), {}, 0)  # 24 s, tested every 4 s
    first = [step_of({"time": t}, 0, config) for t in (0.0, 4.0, 24.0)]
    assert first == [0, 1, 6]
    assert step_of({"time": 0.0}, 1, config) > 6


def test_a_missing_optuna_is_one_sentence(monkeypatch):
    def gone(name):
        raise ImportError(name)

    monkeypatch.setattr(tune.importlib, "import_module", gone)
    with pytest.raises(RunError, match=r"pip install 'freshet-fl\[tune\]'"):
        tune.load_optuna()


def test_defaults_are_the_first_trial():
    assert defaults(tables("fedprox"), space_for("fedprox")) == {"training.lr": 0.1, "method.mu": 0.01}


# ---- with Optuna


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'freshet-fl[tune]'")


def test_the_tuner_never_scores_on_the_test_set(tmp_path, monkeypatch, optuna):
    whole = load("digits")
    train = {row.tobytes() for row in whole.x_train}
    test = {row.tobytes() for row in whole.x_test} - train
    scored = []
    real = Federation.run

    def watched(self, *args, **options):
        scored.append(self.dataset)
        return real(self, *args, **options)

    monkeypatch.setattr(Federation, "run", watched)
    assert Tuner("fedprox", tables(), tmp_path, Budget(2, 2)).run()
    assert scored
    for dataset in scored:
        samples = {row.tobytes() for row in dataset.x_test}
        assert samples <= train and not samples & test
        assert not samples & {row.tobytes() for row in dataset.x_train}
        assert len(dataset.y_test) == 40 and len(dataset.y_train) == 160
        assert not np.shares_memory(dataset.x_test, whole.x_test)


def test_the_result_is_a_config_file_that_runs_on_the_real_test_set(tmp_path, optuna):
    tuner = Tuner("fedprox", tables(), tmp_path / "t", Budget(3, 1))
    assert tuner.run()
    config = resolve(load_tables(tmp_path / "t" / "best.toml"))
    assert (config.method_name, config.data.validation, config.run.seed) == ("fedprox", 0.0, 0)
    record = json.loads((tmp_path / "t" / "tuning.json").read_text())
    assert config.method.mu == record["values"]["method.mu"]
    assert config.training.lr == record["values"]["training.lr"]
    assert record["budget"] == {"trials": 3, "seeds": 1, "until": 24.0}
    assert len(record["trials"]) == 3
    assert record["trials"][0]["values"] == {"training.lr": 0.1, "method.mu": 0.01}
    assert record["score"] == max(t["value"] for t in record["trials"] if t["value"] is not None)
    result = Federation.from_config(config).run(out=tmp_path / "run")
    assert result.summary["status"] == "finished"


class CtrlC(GridObserver):
    def __init__(self, at):
        self.left = at

    def on_metrics(self, row):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def counted(monkeypatch):
    calls = []
    real = compare.execute
    monkeypatch.setattr(tune, "execute", lambda job, *rest: (calls.append(job.key), real(job, *rest))[1])
    return calls


def test_an_interrupted_study_continues_to_the_same_result(tmp_path, monkeypatch, optuna):
    whole = Tuner("fedprox", tables(), tmp_path / "whole", Budget(3, 2))
    assert whole.run()
    parts = Tuner("fedprox", tables(), tmp_path / "parts", Budget(3, 2))
    assert not parts.run(CtrlC(18))
    assert not (tmp_path / "parts" / "best.toml").exists()
    assert Tuner("fedprox", tables(), tmp_path / "parts", Budget(3, 2)).run()
    one, two = (json.loads((tmp_path / name / "tuning.json").read_text()) for name in ("whole", "parts"))
    assert [t["values"] for t in one["trials"]] == [t["values"] for t in two["trials"]]
    assert [t["value"] for t in one["trials"]] == [t["value"] for t in two["trials"]]
    assert (tmp_path / "whole" / "best.toml").read_text() == (tmp_path / "parts" / "best.toml").read_text()
    calls = counted(monkeypatch)
    assert Tuner("fedprox", tables(), tmp_path / "parts", Budget(3, 2)).run()
    assert calls == []
    told: list[dict] = []
    assert Tuner("fedprox", tables(), tmp_path / "parts", Budget(4, 2)).run(
        on_trial=lambda record, _: told.append(record)
    )
    assert len(calls) == 2
    assert told[0]["best"] >= max(t["value"] for t in one["trials"]), "the best of all trials, not of this session"


@pytest.mark.parametrize(("at", "seeds"), [(7, 2), (7, 1), (14, 2)])
def test_ctrl_c_at_the_last_test_of_a_run_ends_the_study_there(tmp_path, monkeypatch, optuna, at, seeds):
    """Each run has seven tests: between two seeds of a trial, and between two trials."""
    calls = counted(monkeypatch)
    parts = Tuner("fedprox", tables(), tmp_path / "parts", Budget(2, seeds))
    assert not parts.run(CtrlC(at))
    assert len(calls) == at // 7
    assert Tuner("fedprox", tables(), tmp_path / "parts", Budget(2, seeds)).run()
    assert len(calls) == 2 * seeds, "nothing is repeated"
    assert Tuner("fedprox", tables(), tmp_path / "whole", Budget(2, seeds)).run()
    one, two = (json.loads((tmp_path / name / "tuning.json").read_text()) for name in ("whole", "parts"))
    assert [t["value"] for t in one["trials"]] == [t["value"] for t in two["trials"]]


def test_a_study_of_other_settings_is_not_continued(tmp_path, optuna):
    Tuner("fedprox", tables(), tmp_path, Budget(1, 1)).run()
    with pytest.raises(FreshetError, match="other settings"):
        Tuner("fedprox", tables("fedprox", ["fleet.ratio=9.0"]), tmp_path, Budget(1, 1)).run()


def test_a_hopeless_trial_is_stopped_early_and_counts(tmp_path, monkeypatch, optuna):
    class Harsh(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number > 0 and (trial.last_step or 0) >= 2

    monkeypatch.setattr(optuna.pruners, "MedianPruner", lambda **_: Harsh())
    seen = []

    class Rows(GridObserver):
        def on_metrics(self, row):
            seen.append(row["time"])

    tuner = Tuner("fedprox", tables(), tmp_path, Budget(3, 1))
    assert tuner.run(Rows())
    record = json.loads((tmp_path / "tuning.json").read_text())
    assert record["counts"] == {"complete": 1, "pruned": 2, "fail": 0}
    assert max(seen[7:]) < 24.0
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert record["values"] == {"training.lr": 0.1, "method.mu": 0.01}


def test_a_run_that_diverged_scores_nothing(tmp_path, monkeypatch, optuna):
    real = compare.execute

    def diverges(job, store, *rest):
        summary = real(job, store, *rest)
        path = store.directory(job.key) / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "diverged", "diverged": 8.0}))
        return summary

    monkeypatch.setattr(tune, "execute", diverges)
    assert Tuner("fedprox", tables(), tmp_path, Budget(1, 1)).run()
    assert json.loads((tmp_path / "tuning.json").read_text())["score"] == 0.0


def test_a_crashed_trial_counts_and_the_others_go_on(tmp_path, monkeypatch, optuna):
    real, count = compare.execute, []

    def broken(job, *rest):
        count.append(job.key)
        if len(count) == 2:
            raise ZeroDivisionError("oh")
        return real(job, *rest)

    monkeypatch.setattr(tune, "execute", broken)
    assert Tuner("fedprox", tables(), tmp_path, Budget(3, 1)).run()
    record = json.loads((tmp_path / "tuning.json").read_text())
    assert record["counts"] == {"complete": 2, "pruned": 0, "fail": 1}
    assert record["trials"][1]["error"] == "ZeroDivisionError: oh"

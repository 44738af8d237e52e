"""``freshet.compare`` and ``freshet.tune``: your own federation, the commands' folder, and no work done twice."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import freshet
from freshet import ConfigError, Federation
from freshet.cli.app import app
from freshet.config import resolve
from freshet.core.about import About
from freshet.experiments.api import Comparison
from freshet.experiments.compare import Workers
from freshet.experiments.grid import Job
from freshet.experiments.store import State
from freshet.methods.fedasync import FedAsync
from freshet.runs.reader import RunDirectory

from .helpers import Diary

rng = np.random.default_rng(3)
Y = np.arange(120) % 3
X = (rng.normal(size=(120, 5)) + np.eye(5)[Y] * 2).astype(np.float32)


def network() -> nn.Module:
    return nn.Linear(5, 3)


def make(method: Any, seed: int, x: np.ndarray = X, **given: Any) -> Federation:
    run = {"until": 24, "eval_every": 4.0, "period": 4.0, "per_round": 2, "executor": "serial"}
    run |= given.pop("run", {})
    parts = {"devices": 4, "fleet": {"fastest": 4.0}, "training": {"epochs": 2}} | given
    return Federation(network, (x[:90], Y[:90]), (x[90:], Y[90:]), method=method, seed=seed, run=run, **parts)


METHODS = ["fedasmu", "fedasync@alpha=0.4", {"name": "fedbuff", "K": 2}, "fedavg"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return freshet.compare(make, METHODS, seeds=2, out=tmp_path_factory.mktemp("own") / "compare")


def test_the_result_has_a_table_the_runs_and_the_best(compared: Comparison) -> None:
    labels = ["fedasmu", "fedasync@alpha=0.4", "fedbuff@K=2", "fedavg"]
    table = compared.table
    assert (compared.complete, compared.failures) == (True, {})
    assert [name.split(" [")[0] for name in table.index] == labels
    assert table["finished"].tolist() == [2] * 4
    finals = {label: [run.accuracy[-1] for run in runs] for label, runs in compared.runs.items()}
    assert list(finals) == labels
    assert table["accuracy_median"].tolist() == pytest.approx([np.median(each) for each in finals.values()])
    assert compared.best == max(labels, key=lambda label: np.median(finals[label]))
    assert [run.summary["seed"] for run in compared.runs["fedavg"]] == [0, 1]
    assert RunDirectory(compared.runs["fedbuff@K=2"][0].directory).config()["method"]["K"] == 2


def test_a_run_of_it_equals_a_run_of_the_federation_alone(compared: Comparison, tmp_path: Path) -> None:
    alone = make({"name": "fedasync", "alpha": 0.4}, 1).run(out=tmp_path / "run")
    again = compared.runs["fedasync@alpha=0.4"][1]
    assert again.summary["weights_sha256"] == alone.summary["weights_sha256"]
    assert again.module().weight.shape == (3, 5), "its model is known"
    assert not (again.directory / "checkpoint").exists(), "nobody extends a run of a grid"


def test_report_reads_its_folder(compared: Comparison, tmp_path: Path) -> None:
    names = {path.name for path in compared.folder.iterdir()}
    assert {"comparison.json", "comparison.csv", "comparison.png", "runs"} <= names
    done = CliRunner().invoke(app, ["report", str(compared.folder), "--out", str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    assert "fedbuff" in (tmp_path / "report.html").read_text()


def test_a_second_call_runs_only_what_is_missing(tmp_path: Path) -> None:
    diary = Diary()
    freshet.compare(make, "fedavg", seeds=[0], out=tmp_path, watch=diary)
    freshet.compare(make, "fedavg,fedprox", seeds=[0, 4], out=tmp_path, watch=diary)
    again = freshet.compare(make, "fedavg,fedprox", seeds=[0, 4], out=tmp_path, watch=diary)
    assert [key.rsplit("-", 1)[0] for key, _ in diary.begun] == [
        "fedavg-seed0", "fedprox-seed0", "fedavg-seed4", "fedprox-seed4",
    ]  # fmt: skip
    assert again.table["finished"].tolist() == [2, 2]


def test_other_data_are_other_runs(tmp_path: Path) -> None:
    diary = Diary()
    for x in (X, X + np.float32(0.5)):
        freshet.compare(lambda method, seed, x=x: make(method, seed, x), ["fedavg"], seeds=1, out=tmp_path, watch=diary)
    assert len({key for key, _ in diary.begun}) == 2, "the settings are the same, the data are not"


def test_an_interrupted_comparison_has_no_best(tmp_path: Path) -> None:
    class Late(Diary):
        def on_begin(self, job: Job, state: State) -> None:
            super().on_begin(job, state)
            if len(self.begun) == 2:
                raise KeyboardInterrupt

    found = freshet.compare(make, ["fedavg", "fedprox"], seeds=1, out=tmp_path, watch=Late())
    assert (found.complete, found.best, len(found.runs["fedavg"])) == (False, None, 1)


class Halving(FedAsync):
    """A method that no module has, like a class in a notebook."""

    about = About("halving", "async", "half of each", "nobody")

    class Options(FedAsync.Options):
        alpha: float = 0.5


@pytest.mark.parametrize("given", [Halving, {"name": Halving, "alpha": 0.3}], ids=["class", "table"])
def test_a_method_may_be_given_as_its_class(tmp_path: Path, given: Any) -> None:
    found = freshet.compare(make, [given, "fedavg"], seeds=1, out=tmp_path)
    first = next(iter(found.runs))
    assert "Halving" in first and len(found.runs[first]) == 1
    assert RunDirectory(found.runs[first][0].directory).config()["method"]["alpha"] == (
        0.5 if given is Halving else 0.3
    )
    alone = make(given, 0).run(out=tmp_path / "alone")
    assert found.runs[first][0].summary["weights_sha256"] == alone.summary["weights_sha256"]


def test_a_class_is_tuned(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    found = freshet.tune(make, Halving, trials=1, seeds=1, out=tmp_path)
    assert "training.lr" in found.best


def test_an_interrupted_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Crash(Diary):
        def on_progress(self, time: float) -> None:
            if time >= 12.0:
                raise KeyboardInterrupt

    saving = {"checkpoint_every": 4.0}
    first = freshet.compare(lambda m, s: make(m, s, run=saving), ["fedavg"], seeds=1, out=tmp_path, watch=Crash())
    assert (first.complete, first.best, first.runs) == (False, None, {"fedavg": []})
    assert "was interrupted; to do: 1 of 1; make the same call again to continue" in caplog.text
    diary = Diary()
    second = freshet.compare(lambda m, s: make(m, s, run=saving), ["fedavg"], seeds=1, out=tmp_path, watch=diary)
    assert [state for _, state in diary.begun] == ["unfinished"] and second.complete
    alone = make("fedavg", 0).run(out=tmp_path / "alone")
    assert second.runs["fedavg"][0].summary["weights_sha256"] == alone.summary["weights_sha256"]


def test_all_runs_share_one_pool_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    real = Workers.pool

    def pool(self, job):
        found = real(self, job)
        started.append(id(found))
        return found

    monkeypatch.setattr(Workers, "pool", pool)
    many = {"executor": "processes", "workers": 2}
    found = freshet.compare(lambda m, s: make(m, s, run=many), ["fedavg", "fedprox"], seeds=1, out=tmp_path)
    assert len(started) == 2 and len(set(started)) == 1 and not found.failures


def test_a_crash_is_reported_and_retried_on_request(tmp_path: Path) -> None:
    class Angry(Diary):
        def on_progress(self, time: float) -> None:
            raise ValueError("no")

    found = freshet.compare(make, ["fedavg"], seeds=1, out=tmp_path, watch=Angry())
    assert list(found.failures.values()) == ["ValueError: no"] and found.complete
    assert freshet.compare(make, ["fedavg"], seeds=1, out=tmp_path).failures == found.failures
    assert freshet.compare(make, ["fedavg"], seeds=1, out=tmp_path, retry=True).failures == {}


# ---- what make must return


def test_make_must_return_what_it_is_asked_for(tmp_path: Path) -> None:
    wrong = {
        "write Federation\\(seed=seed\\)": lambda method, seed: make(method, 7),
        "write Federation\\(method=method\\)": lambda method, seed: make("fedprox", seed),
        "must return a Federation, but NoneType": lambda method, seed: None,
        "gives other data to fedprox than to fedavg for seed 0": lambda method, seed: make(
            method, seed, X + np.float32(method == "fedprox")
        ),
        "fleet.ratio: differs between": lambda method, seed: make(
            method, seed, fleet={"fastest": 4.0, "ratio": 2.0 if method == "fedprox" else 5.0}
        ),
    }
    for sentence, bad in wrong.items():
        with pytest.raises(ConfigError, match=sentence):
            freshet.compare(bad, ["fedavg", "fedprox"], seeds=1, out=tmp_path / "never")
    assert not (tmp_path / "never").exists(), "before anything runs"
    for seeds in (0, [], [1, 1], [-1]):
        with pytest.raises(ConfigError, match="seeds: must be a number of seeds"):
            freshet.compare(make, ["fedavg"], seeds=seeds, out=tmp_path / "never")


def test_a_make_that_is_not_repeatable_is_detected(tmp_path: Path) -> None:
    calls = iter(range(10))
    found = freshet.compare(lambda m, s: make(m, s, X + np.float32(next(calls))), ["fedavg"], seeds=1, out=tmp_path)
    assert "gives another federation each time" in next(iter(found.failures.values()))


# ---- tuning


def test_tuning_holds_out_training_data_and_gives_values_to_use(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    tuning = freshet.tune(make, "fedprox", trials=3, seeds=2, out=tmp_path)
    assert set(tuning.best) == {"training.lr", "method.mu"} and len(tuning.table) == 3
    assert tuning.table["score"].max() == pytest.approx(tuning.score)
    runs = [RunDirectory(path) for path in (tmp_path / "runs").iterdir()]
    assert {run.config()["data"]["validation"] for run in runs} == {0.2}
    assert {run.summary()["data"]["test"] for run in runs} == {18}, "a fifth of the 90 training samples"
    assert {run.config()["run"]["seed"] for run in runs} == {1000, 1001}
    record = json.loads((tmp_path / "tuning.json").read_text())
    assert record["values"] == tuning.best and (tmp_path / "best.toml").is_file()
    changed = make("fedprox", 0).with_settings(tuning.best)
    assert changed.config.method.mu == tuning.best["method.mu"]


def test_tuning_continues_but_not_on_other_data(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    diary = Diary()
    first = freshet.tune(make, "fedavg", trials=1, seeds=1, out=tmp_path, watch=diary)
    second = freshet.tune(make, "fedavg", trials=2, seeds=1, out=tmp_path, watch=diary)
    assert len(diary.begun) == 2 and second.table.iloc[0]["score"] == first.table.iloc[0]["score"]
    with pytest.raises(freshet.RunError, match="holds a study of other settings"):
        freshet.tune(lambda m, s: make(m, s, X * 2), "fedavg", trials=3, seeds=1, out=tmp_path)


def test_tuning_ignores_a_target_that_would_end_its_runs(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    stops = {"stop_at_target": True, "target": 0.01}
    freshet.tune(lambda m, s: make(m, s, run=stops), "fedavg", trials=1, seeds=1, out=tmp_path)
    assert [RunDirectory(path).summary()["status"] for path in (tmp_path / "runs").iterdir()] == ["finished"]


def test_less_is_better_where_the_metric_says_so(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    targets = X[:, :1] * 2

    def regress(method: Any, seed: int) -> Federation:
        run = {"until": 24, "eval_every": 4.0, "period": 4.0, "per_round": 2, "executor": "serial"}
        data = (X[:90], targets[:90]), (X[90:], targets[90:])
        parts: Any = {"devices": 4, "fleet": {"fastest": 4.0}, "task": "regression", "run": run}
        return Federation(lambda: nn.Linear(5, 1), *data, method=method, seed=seed, **parts)

    tuning = freshet.tune(regress, "fedavg", trials=2, seeds=1, out=tmp_path)
    assert tuning.score < 0 and tuning.score == tuning.table["score"].max()
    assert (tuning.record["metric"], tuning.record["direction"]) == ("rmse", "min")
    assert f"rmse {-tuning.score:.4f} on a held-out" in (tmp_path / "best.toml").read_text()
    found = freshet.compare(regress, ["fedavg", "fedprox@mu=5"], seeds=1, out=tmp_path / "compare")
    finals = {line["name"]: line["accuracy"]["median"] for line in found.lines}
    assert found.best == min(finals, key=lambda name: finals[name]) and len(set(finals.values())) == 2


def test_a_comparison_that_stops_at_the_target_says_so(tmp_path: Path) -> None:
    run = {"stop_at_target": True, "target": 0.4}
    found = freshet.compare(lambda m, s: make(m, s, run=run), ["fedavg"], seeds=1, out=tmp_path)
    assert found.runs["fedavg"][0].summary["status"] == "stopped"
    assert found.complete and found.table["finished"].tolist() == [1]
    assert "runs end when they reach the target" in found.document["notes"][0]
    assert resolve(RunDirectory(found.runs["fedavg"][0].directory).config()).run.stop_at_target


@pytest.mark.parametrize(("run", "kept"), [({}, False), ({"keep_checkpoint": True}, True)])
def test_runs_keep_their_checkpoints_if_asked(run: dict, kept: bool, tmp_path: Path):
    found = freshet.compare(lambda method, seed: make(method, seed, run=run), ["fedavg"], seeds=1, out=tmp_path)
    assert found.complete and bool(list(tmp_path.glob("runs/*/checkpoint/*"))) is kept


@pytest.mark.parametrize("given", ["x", None, 3])
def test_a_make_that_is_not_a_function_is_refused(given, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^make: must be a function of \(method, seed\), but .* was given"):
        freshet.compare(given, ["fedavg"], seeds=1, out=tmp_path)

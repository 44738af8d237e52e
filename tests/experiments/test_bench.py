"""The benchmark: its worlds, what counts as a run of one, kept results, and the commands."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from freshet.cli.app import app
from freshet.config import resolve
from freshet.errors import ConfigError, RunError
from freshet.experiments import bench
from freshet.experiments.bench import BUDGETS, VARIANTS, WORLDS, Plan
from freshet.experiments.grid import Entry, parse_entries
from freshet.experiments.store import Store
from freshet.runs.kept_runs import RUNS, kept_runs

MINE = """
from freshet import About, Aggregate, Contribution, Method, Options
from freshet.core.vectors import mix


class MineOptions(Options):
    pass


class Mine(Method):
    about = About("mine", "async", "Mine", "Me, 2025")
    Options = MineOptions

    def receive(self, server, upload, trip):
        new = mix(server.weights, upload.weights, 0.2)
        return Aggregate(new, [Contribution(upload.device, trip.base, server.staleness(trip), 0.2)], {})
"""


def small(world: bench.BenchWorld) -> bench.BenchWorld:
    """The quick form of a world with 10 devices, for half a minute."""
    quick = dict(world.budgets["quick"])
    quick["data"] = {**quick["data"], "train_samples": 300, "min_samples": 1}
    quick["fleet"] = {"devices": 10, "fastest": 1.0}
    quick["run"] = {**quick["run"], "until": 30.0, "eval_every": 5.0, "in_flight": 5, "per_round": 3}
    quick["targets"] = [0.2, 0.95]
    return replace(world, budgets={**world.budgets, "quick": quick, "standard": quick})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two worlds that take a moment."""
    made = {name: small(bench.worlds()[name]) for name in ("image", "text")}
    monkeypatch.setattr(bench, "worlds", lambda: made)
    monkeypatch.setattr(bench, "WORLDS", tuple(made))
    bench._identity.cache_clear()
    yield
    bench._identity.cache_clear()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: object):
        done = CliRunner().invoke(app, ["bench", *map(str, words)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return call


# ---- worlds


def test_the_worlds_are_what_they_are_called():
    tables = {name: world.tables("full") for name, world in bench.worlds().items()}
    assert tuple(tables) == WORLDS
    image, harder, text, phones, crowd = tables.values()
    assert (image["model"]["name"], image["data"]["name"]) == ("lenet5", "fashion-mnist")
    assert image["data"]["concentration"] == harder["data"]["concentration"] == 0.3
    assert image["run"]["in_flight"] == 30
    assert harder["model"] == {"name": "resnet20", "norm": "group"} and harder["data"]["name"] == "cifar10"
    assert (text["data"]["partition"], text["model"]["name"]) == ("natural", "charlstm")
    assert phones["fleet"]["ratio"] == 440 and phones["fleet"]["loss"] == 0.1 and phones["fleet"]["on_seconds"] > 0
    assert crowd["fleet"]["devices"] == 10_000 and crowd["run"]["in_flight"] == 200


@pytest.mark.parametrize("name", WORLDS)
def test_the_quick_form_has_the_fleet_of_the_world_and_needs_no_files(name: str):
    world = bench.worlds()[name]
    quick, full = world.tables("quick"), world.tables("full")
    assert quick["fleet"] == full["fleet"] and quick["run"]["in_flight"] == full["run"]["in_flight"]
    assert quick["data"]["name"].startswith("digits")
    bench.check_data([world], "quick")


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_world_is_a_valid_configuration_for_both_kinds(budget: str):
    for world in bench.worlds().values():
        jobs = bench.bench_jobs(parse_entries("fedavg,fedasync"), [world], budget, Path("nowhere"), [0])
        assert [job.config.run.trigger for job in jobs] == ["rounds", "concurrency"]
        low, high = world.targets(budget)
        assert 0 < low < high < 1


def test_all_methods_fit_into_a_world():
    entries = [Entry(name, name) for name in bench.all_methods()]
    jobs = bench.bench_jobs(entries, [bench.worlds()["image"]], "quick", Path("nowhere"), [0])
    assert len({job.key for job in jobs}) == len(entries) >= 40
    assert set(VARIANTS) <= {job.entry.method for job in jobs}
    assert not {"ditto", "fedrep"} & {job.entry.method for job in jobs}, "they have no single model to test"


def test_a_world_says_what_data_it_lacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "locate", lambda name: None)
    with pytest.raises(ConfigError, match="image needs fashion-mnist, which this machine lacks; get it with"):
        bench.check_data(bench.choose_worlds("image,phones"), "standard")
    bench.check_data(bench.choose_worlds(None), "quick")


def test_unknown_worlds_are_named():
    with pytest.raises(ConfigError, match="--worlds: 'nowhere' is not known; choose from image"):
        bench.choose_worlds("image,nowhere")


# ---- what counts as a run of a world


def config_of(**changes: dict) -> dict:
    world = bench.worlds()["phones"]
    (job,) = bench.bench_jobs(parse_entries("fedasync"), [world], "quick", Path("nowhere"), [3])
    tables = job.config.tables()
    return {name: {**table, **changes.get(name, {})} for name, table in tables.items()}


def test_method_rate_trigger_seed_and_machine_may_differ():
    free = {"method": {"name": "nobody:Mine"}, "training": {"lr": 0.7}, "run": {"seed": 8, "workers": 3}}
    world, budget = bench.find_world(config_of(**free))
    assert (world.name, budget) == ("phones", "quick")


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("fleet", {"ratio": 439.0}),
        ("fleet", {"loss": 0.0}),
        ("data", {"concentration": 1.0}),
        ("training", {"epochs": 6}),
        ("run", {"until": 11_999.0}),
        ("run", {"in_flight": 31}),
        ("model", {"name": "digits"}),
        ("links", {"up": "top"}),
    ],
)
def test_nothing_else_may_differ(section: str, change: dict):
    assert bench.find_world(config_of(**{section: change})) is None


# ---- running and keeping


def test_a_benchmark_runs_is_kept_and_is_not_run_again(command, tiny, tmp_path: Path):
    done = command("--worlds", "image,text", "-m", "fedasync,fedavg")
    assert done.exit_code == 0 and "mean rank by mean accuracy over the run" in done.output
    folder = tmp_path / "runs" / "bench-1" / "quick"
    found = json.loads((folder / "benchmark.json").read_text())
    assert found["version"] == "bench-1" and [world["name"] for world in found["worlds"]] == ["image", "text"]
    assert sorted(found["ranks"]["area"]["methods"]) == ["fedasync", "fedavg"]
    assert (folder / "benchmark.png").stat().st_size > 5_000 and "| fedavg |" in (folder / "benchmark.md").read_text()
    assert "0 runs to do, about 0:00" in command("--worlds", "image,text", "-m", "fedasync,fedavg", "--list").output

    done = command("keep", folder)
    assert "2 runs kept in results/bench-1/quick/image" in done.output
    done = command("--worlds", "image,text", "-m", "fedasync,fedavg,fedbuff", "-o", "elsewhere", "--list")
    assert "2 runs to do, about" in done.output and "4 runs are kept" in done.output
    assert "fedbuff" in done.output and "fedavg-seed0" not in done.output

    (tmp_path / "mine.py").write_text(MINE)
    done = command("--worlds", "image", "--method", "mine.py:Mine", "-o", "elsewhere")
    found = json.loads((tmp_path / "elsewhere" / "quick" / "benchmark.json").read_text())
    lines = {line["method"]: line["runs"][0]["source"] for line in found["worlds"][0]["lines"]}
    assert lines == {"mine.py:Mine": "run", "fedasync": "kept", "fedavg": "kept"}
    assert len(list((tmp_path / "elsewhere" / "quick" / "runs").iterdir())) == 1, "no rival ran again"
    with pytest.raises(ConfigError, match="no finished run of a benchmark"):
        command("keep", "elsewhere/quick")


def test_a_kept_run_of_another_world_does_not_count_and_is_named(command, tiny, tmp_path, monkeypatch):
    command("--worlds", "image", "-m", "fedavg")
    command("keep", "runs/bench-1/quick")
    runs, notes = bench.read_kept(tmp_path / "results/bench-1", bench.choose_worlds("image"), "quick")
    assert len(runs) == 1 and notes == []
    other = small(bench.worlds()["image"])
    changed = replace(
        other, budgets={**other.budgets, "quick": {**other.budgets["quick"], "fleet": {"devices": 11, "fastest": 1.0}}}
    )
    runs, notes = bench.read_kept(tmp_path / "results/bench-1", [changed], "quick")
    assert runs == [] and "is not a run of bench-1 (fleet.devices differ)" in notes[0]


def test_a_changed_kept_run_is_refused(command, tiny, tmp_path):
    command("--worlds", "image", "-m", "fedavg")
    command("keep", "runs/bench-1/quick")
    file = tmp_path / "results" / "bench-1" / "quick" / "image" / RUNS
    assert len(kept_runs(file.parent)) == 1
    file.write_text(file.read_text().replace('"accuracy":[0.', '"accuracy":[0.9', 1))
    with pytest.raises(RunError, match="was changed after it was written"):
        command("--worlds", "image", "-m", "fedavg")


def test_a_run_with_options_of_its_own_is_shown_and_not_kept(command, tiny, tmp_path):
    command("--worlds", "image", "-m", "fedasync@alpha=0.4,fedasync")
    assert "1 runs kept" in command("keep", "runs/bench-1/quick").output


def test_a_crashed_run_is_named_and_last(command, tiny, tmp_path):
    (tmp_path / "mine.py").write_text(
        MINE.replace("        new = mix", "        raise ZeroDivisionError\n        new = mix")
    )
    done = command("--worlds", "image", "-m", "fedavg,mine.py:Mine")
    assert "seed 0 crashed: ZeroDivisionError" in done.output
    (world,) = json.loads(Path("runs/bench-1/quick/benchmark.json").read_text())["worlds"]
    assert [line["method"] for line in world["lines"]] == ["fedavg", "mine.py:Mine"]


def test_the_rates_come_first_and_the_options_follow(tiny, tmp_path):
    pytest.importorskip("optuna")
    world = bench.worlds()["image"]
    plan = Plan(parse_entries("fedasync"), [world], "standard", Store(tmp_path), [0])
    assert len(plan.studies()) == 1
    tuner = bench.tuner_for("fedasync", world, "standard", tmp_path)
    tuner.budget = replace(tuner.budget, trials=7)
    assert tuner.run()
    record = json.loads((tmp_path / "tune" / "image" / "fedasync" / "tuning.json").read_text())
    values = [trial["values"] for trial in record["trials"]]
    base = world.tables("standard")["training"]["lr"]
    rates = list(dict.fromkeys(bench.LR.clip(base * factor) for factor in bench.RATE_FACTORS))
    assert [value["training.lr"] for value in values[: len(rates)]] == rates
    assert len({value["method.alpha"] for value in values[: len(rates)]}) == 1, "the grid has the default options"
    later = values[len(rates) :]
    grid = [trial for trial in record["trials"][: len(rates)] if trial["state"] == "complete"]
    best = max(grid, key=lambda trial: trial["value"])["values"]["training.lr"]
    assert {value["training.lr"] for value in later} == {best}
    assert len({value["method.alpha"] for value in later}) == len(later)
    assert plan.studies() == [] and plan.jobs()[0].config.training.lr == record["values"]["training.lr"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--budget", "huge"], "--budget: must be one of quick, standard, full"),
        (["--worlds", "mars"], "--worlds: 'mars' is not known"),
        (["-s", "fleet.ratio=2"], "--set: 'fleet.ratio=2' would change the world"),
        (["--method", "fedavg", "-m", "fedasync"], "--method: places one method"),
        (["-m", "nobody"], "nobody"),
    ],
)
def test_mistakes_are_one_sentence(command, words, problem):
    with pytest.raises(ConfigError) as caught:
        command(*words)
    assert problem in str(caught.value)


def test_the_worlds_are_listed(command):
    done = command("worlds")
    assert "crowd" in done.output and "10,000" in done.output


def test_a_setting_of_the_machine_is_allowed(command, tiny):
    done = command("--worlds", "image", "-m", "fedavg", "-s", "run.workers=1", "--list")
    assert "1 runs to do" in done.output


def test_a_resolved_world_keeps_its_identity():
    """What a run writes into config.toml is recognised again."""
    world = bench.worlds()["crowd"]
    (job,) = bench.bench_jobs(parse_entries("fedavg"), [world], "standard", Path("nowhere"), [1])
    assert bench.find_world(resolve(job.config.tables()).tables()) == (world, "standard")

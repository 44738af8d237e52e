"""The paper's cells: every number against the paper's source if FRESHET_PAPER names it; every cell runs."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import freshet.assembly
from freshet import Federation
from freshet.cli import inspect
from freshet.config import resolve
from freshet.data.dataset import DataSet
from freshet.data.sources import load
from freshet.errors import DataError
from freshet.models import names
from freshet.paper.cells import CELLS, METHODS, SOURCES, Cell, Published, all_method_choices, cell_tables, choices
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.sim.fleet import Fleet
from freshet.sim.forecast import trip_seconds

NETWORKS = {
    "LeNet": ("lenet", "lenet5"),
    "CNN": ("cnn", "cnn"),
    "ResNet": ("resnet", "resnet20"),
    "AlexNet": ("alexnet", "alexnet"),
    "VGG": ("vgg", "vgg11"),
    "TextCNN": ("textcnn", "textcnn"),
}
DATASETS = {
    "FMNIST": ("fmnist", "fashion-mnist"),
    "CIFAR-10": ("cifar10", "cifar10"),
    "CIFAR-100": ("cifar100", "cifar100"),
    "Tiny-ImageNet": ("tiny", "tiny-imagenet"),
    "IMDb": ("imdb", "imdb"),
}
ROWS = {r"\AName": "fedasmu", r"\SName": "fedssmu", "ASO-Fed": "asofed"}


@pytest.fixture(scope="module")
def paper() -> str:
    path = os.environ.get("FRESHET_PAPER")
    if not path or not Path(path).is_file():
        pytest.skip(
            "the LaTeX source of the FedASMU paper is not here; set FRESHET_PAPER to its path to check against it"
        )
    return Path(path).read_text(encoding="utf-8")


def table(paper: str, label: str) -> str:
    start = paper.index(rf"\label{{{label}}}")
    return paper[start : paper.index(r"\end{table*}", start)]


def spread(row: str) -> list[str]:
    """A header row with each \\multicolumn{n} repeated n times."""
    heads = re.findall(r"\\multicolumn\{(\d+)\}\{[^}]*\}\{\s*([\w-]+)\s*\}", row)
    return [text for count, text in heads for _ in range(int(count))]


def clean(entry: str) -> str:
    return re.sub(r"\\(?:textbf|rev)\b|\\cite\{[^}]*\}|[{}]", "", entry).strip()


def key(network: str, dataset: str) -> str:
    return f"{NETWORKS[network][0]}-{DATASETS[dataset][0]}"


def test_there_are_twelve_complete_cells() -> None:
    assert list(CELLS) == [
        "lenet-fmnist",
        "lenet-cifar10",
        "lenet-cifar100",
        "cnn-cifar10",
        "cnn-cifar100",
        "resnet-cifar100",
        "resnet-tiny",
        "alexnet-cifar10",
        "alexnet-cifar100",
        "vgg-cifar10",
        "vgg-cifar100",
        "textcnn-imdb",
    ]
    spelt = dict([*NETWORKS.values(), *DATASETS.values()])
    for name, cell in CELLS.items():
        network, dataset = name.split("-")
        assert (cell.name, cell.model, cell.dataset) == (name, spelt[network], spelt[dataset])
        assert cell.model in names()
        assert tuple(cell.published) == METHODS
        assert 0.0 < cell.target < 1.0
        assert hash(cell) == hash(cell)


def test_a_target_is_missed_exactly_where_the_accuracy_is_below_it() -> None:
    for cell in CELLS.values():
        for published in cell.published.values():
            assert (published.time is None) == (published.accuracy < cell.target)


def test_a_few_numbers_from_memory() -> None:
    assert CELLS["lenet-fmnist"].published["fedasmu"] == Published(0.858, 11603)
    assert CELLS["lenet-cifar10"].published["feddyn"] == Published(0.277, None)
    assert CELLS["lenet-cifar100"].published["fedsa"] == Published(0.0836, None)
    assert CELLS["vgg-cifar10"].published["fedlws"] == Published(0.643, 180782)
    assert CELLS["resnet-tiny"].published["fedssmu"] == Published(0.193, 69848)
    assert CELLS["textcnn-imdb"].published["feddyn"] == Published(0.874, 12674)
    assert CELLS["cnn-cifar10"].lr == 0.028
    assert CELLS["cnn-cifar100"].eta_sigma == 1e-5
    assert CELLS["lenet-cifar10"].eta_iota == CELLS["lenet-cifar10"].eta_gamma == 0.1
    assert CELLS["textcnn-imdb"].target == 0.85
    cell = CELLS["resnet-cifar100"]
    assert (cell.devices, cell.per_round, cell.period, cell.rounds, cell.tau_max) == (100, 10, 10.0, 500, 99)


def test_published_results_are_the_papers(paper: str) -> None:
    seen = 0
    for part in table(paper, "tab:cmp_overall").split(r"\begin{tabular}")[1:]:
        rows = [re.sub(r"\\(?:midrule|toprule|bottomrule)", "", row) for row in part.split(r"\\")]
        headers = [spread(row) for row in rows if r"\multicolumn" in row]
        columns = [key(n, d) for n, d in zip(headers[0], headers[1], strict=True)]
        assert len(columns) == 12
        for row in rows:
            label, *entries = [clean(entry) for entry in row.split("&")]
            if len(entries) != 12 or "Acc" in entries:
                continue
            method = ROWS.get(label.split()[0], label.split()[0].lower())
            for i in range(0, 12, 2):
                accuracy, time = float(entries[i]), entries[i + 1]
                expected = Published(accuracy, None if time == "/" else float(time))
                assert CELLS[columns[i]].published[method] == expected, (columns[i], method)
                seen += 1
    assert seen == len(CELLS) * len(METHODS)


def test_hyper_parameters_are_the_papers(paper: str) -> None:
    fields = {
        "$m$": "devices",
        "$m'$": "per_round",
        "$T$": "rounds",
        r"$\tau$": "tau_max",
        r"$\mathcalT$": "period",
        r"$\eta_\lambda^i$": "eta_lambda",
        r"$\eta_\sigma^i$": "eta_sigma",
        r"$\eta_\iota^i$": "eta_iota",
        r"$\eta_\gamma^i$": "eta_gamma",
        r"$\eta_\upsilon^i$": "eta_upsilon",
        r"$\eta_i$": "lr",
        r"$\eta^i_RL$": "eta_rl",
    }
    rows = [row.replace(r"\hline", "") for row in table(paper, "tab:parameters1").split(r"\\")]
    networks = next(spread(row) for row in rows if "{LeNet}" in row)
    networks = networks[-12:]
    datasets = next([clean(e) for e in row.split("&")][1:] for row in rows if "FMNIST" in row)
    columns = [key(n, d) for n, d in zip(networks, datasets, strict=True)]
    assert columns == list(CELLS)
    found = set()
    for row in rows:
        label, *entries = [clean(entry) for entry in row.split("&")]
        if label in fields:
            found.add(label)
            for column, entry in zip(columns, entries, strict=True):
                assert getattr(CELLS[column], fields[label]) == float(entry), (column, fields[label])
    assert found == set(fields)


def test_targets_are_the_papers(paper: str) -> None:
    caption = re.search(r"target accuracy, i\.e\.,(.*?)``/''", paper, re.DOTALL)
    assert caption
    targets: dict[str, float] = {}
    for value, network, dataset in re.findall(r"(\d\.\d+) for (\w+)(?: with ([\w-]+))?", caption[1]):
        targets[key(network, dataset or "IMDb")] = float(value)
    assert targets == {name: cell.target for name, cell in CELLS.items()}


def test_the_spread_of_devices_is_the_papers(paper: str) -> None:
    assert "slowest device's training time is five times that of the fastest" in paper
    assert {cell.slowest_over_fastest for cell in CELLS.values()} == {5.0}


def test_cells_are_frozen() -> None:
    cell = CELLS["lenet-fmnist"]
    assert isinstance(cell, Cell)
    with pytest.raises(AttributeError):
        cell.lr = 1.0  # type: ignore[misc]


# ---- where each setting comes from


@pytest.mark.parametrize("name", ["lenet-cifar10", "textcnn-imdb"])
def test_what_the_paper_states_is_its_own_and_all_else_is_ours(name):
    cell = CELLS[name]
    found = {choice.name: choice for choice in choices(cell)}
    by_source = {source: {key for key, choice in found.items() if choice.source == source} for source in SOURCES}
    stated = {
        "rounds", "training.lr", "training.optimiser", "fleet.devices", "fleet.ratio", "fleet.time", "data.name",
        "data.partition", "model.name", "run.target", "run.trigger", "run.per_round", "run.period", "run.selection",
    }  # fmt: skip
    assert by_source["paper"] == stated - ({"training.optimiser"} if name == "textcnn-imdb" else set())
    assert by_source["paper's numbers"] == {
        "fleet.fastest", "fleet.up_mbps", "fleet.down_mbps", "fleet.up_latency", "fleet.down_latency", "run.in_flight",
    }  # fmt: skip
    ours = {"training.epochs", "training.batch_size", "training.lr_decay", "training.schedule_by", "run.until"}
    ours |= {"training.schedule_seconds", "data.concentration", "data.min_samples", "run.eval_every"}
    assert ours <= by_source["Freshet"]
    assert ("data.vocabulary" in found) is (name == "textcnn-imdb")
    config = resolve(cell_tables(cell, "fedasmu"))
    assert (found["run.until"].value, found["training.lr"].value) == (config.run.until, cell.lr)


def test_what_is_called_stated_is_in_the_paper(paper: str) -> None:
    assert "with the Stochastic Gradient Descent (SGD) approach" in paper
    assert r"The server randomly selects and activates \( m' \) eligible devices" in paper
    assert "Device heterogeneity is modeled by varying local training durations" in paper


def test_the_world_of_every_cell():
    for cell in CELLS.values():
        config = resolve(cell_tables(cell, "fedasmu"))
        fleet, run, training = config.fleet, config.run, config.training
        assert (fleet.fastest, fleet.ratio, fleet.time, run.in_flight) == (190.0, 5.0, "trip", 30)
        assert (fleet.up_mbps, fleet.down_mbps, fleet.up_latency, fleet.down_latency) == (0.0, 0.0, 0.0, 0.0)
        assert training.optimiser == ("adam" if cell.name == "textcnn-imdb" else "sgd")
        drawn = Fleet.draw(fleet, 0)
        assert np.array_equal(trip_seconds(drawn, 10**9), drawn.train_seconds), "whatever the size of the network"
        assert training.schedule_seconds == run.eval_every == run.until / 500


def test_every_method_of_a_cell_has_the_same_learning_rate_at_the_same_second() -> None:
    end = {}
    for method in METHODS:
        tables = cell_tables(CELLS["lenet-fmnist"], method)
        tables["data"] |= {"name": "digits"}
        tables["model"] = {"name": "mlp", "hidden": [2]}
        training = resolve(tables).training
        seconds = training.schedule_seconds
        server = Federation.from_config(resolve(tables)).assembly.begin().server
        rates = [server.learning_rate(time) for time in (0.0, seconds, 250 * seconds)]
        assert rates == pytest.approx([0.005, 0.005 * 0.999, 0.005 * 0.999**250], rel=1e-12)
        end[method] = server.learning_rate(tables["run"]["until"]) / training.lr
    assert end == {method: pytest.approx(0.999**500) for method in METHODS}
    assert round(0.999**500, 2) == 0.61


def test_initial_controls_are_ours_and_rates_the_papers():
    found = all_method_choices(CELLS["lenet-cifar10"])
    for method in ("fedasmu", "fedssmu"):
        whose = {choice.name: choice.source == "paper" for choice in found[method]}
        ours = ("lambda0", "sigma0", "iota0", "gamma0", "upsilon0", "mu_alpha", "epsilon", "phi_q", "psi", "rho")
        assert not any(whose[name] for name in ours)
        assert all(whose[name] for name in ("eta_lambda", "eta_iota", "eta_upsilon", "eta_rl", "tau_max"))
    assert {choice.source for method in ("fedbuff", "fedlws") for choice in found[method]} == {"Freshet"}


def test_the_command_prints_every_setting(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    app = typer.Typer()
    app.command("cells")(inspect.cells)
    app.command("models")(inspect.models)
    done = CliRunner().invoke(app, ["cells", "cnn-cifar10"])
    assert done.exit_code == 0
    text = done.output
    assert "500 synchronous rounds of" in text and "lambda0" in text and "in_flight" in text
    row = next(line for line in text.splitlines() if line.startswith("training.lr_decay"))
    assert row.split() == ["training.lr_decay", "0.999", "Freshet"]
    assert next(line for line in text.splitlines() if line.startswith("fleet.devices")).split()[-1] == "paper"
    row = next(line for line in text.splitlines() if line.startswith("fleet.fastest"))
    assert row.split() == ["fleet.fastest", "190.0", "paper's", "numbers"]
    assert next(line for line in text.splitlines() if line.startswith("feddyn  ")).split() == [
        "feddyn",
        "0.508",
        "43974",
    ]


# ---- every cell runs


SHAPES = {"fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "tiny-imagenet": (3, 64, 64)}
CLASSES = {"fashion-mnist": 10, "cifar10": 10, "cifar100": 100, "tiny-imagenet": 200, "imdb": 2}


def stand_in(name: str) -> DataSet:
    """Random samples of the right shape, for a data set that is not on this machine."""
    rng, classes = np.random.default_rng(0), CLASSES[name]
    y = np.arange(600) % classes
    if name == "imdb":
        x = rng.integers(2, 500, (600, 64), dtype=np.int32)
        return DataSet(name, x, y, x, y, classes, pad_id=0, vocabulary=500)
    x = rng.integers(0, 256, (600, *SHAPES[name]), dtype=np.uint8)
    half = (0.5,) * x.shape[1]
    return DataSet(name, x, y, x, y, classes, mean=half, std=half)


def real_or_stand_in(name: str, data_dir: Any = None, **options: Any) -> DataSet:
    try:
        return load(name, data_dir, download=False, **options)
    except DataError:
        return stand_in(name)


@pytest.mark.parametrize("name", list(CELLS))
def test_a_cell_runs_two_virtual_rounds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freshet.assembly, "load", real_or_stand_in)
    tables = cell_tables(CELLS[name], "fedssmu")
    tables["fleet"] |= {"devices": 6}
    tables["run"] |= {"per_round": 2, "in_flight": 4, "until": 3000.0, "executor": "serial", "eval_every": 3000.0}
    tables["training"] |= {"epochs": 1, "batch_size": 20}
    tables["data"] |= {"train_samples": 240, "test_samples": 200, "vocabulary": 2000, "length": 64}
    config = resolve(tables)
    result = Federation.from_config(config).run(out=tmp_path / "run")
    rounds = {event["round"] for event in RunDirectory(result.directory).events() if event["kind"] == "aggregate"}
    assert len(rounds) >= 2
    assert np.isfinite(result.loss).all() and result.summary["rejected"] == 0
    assert audit(RunDirectory(result.directory)).passed
    assert (config.model.name, config.run.target) == (CELLS[name].model, CELLS[name].target)

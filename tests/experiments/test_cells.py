"""The paper's cells: every number against the paper's source where it is at hand (FRESHET_PAPER), a few from memory."""

import os
import re
from pathlib import Path

import pytest

from freshet.models import names
from freshet.paper.cells import CELLS, METHODS, Cell, Published

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

"""The twelve cells (network x data set) of the FedASMU paper's main table: its settings and its published numbers.

A setting of a cell has one of three sources. The paper states it (``STATED``). Or it follows from the paper's numbers
(``INFERRED``): seconds of the fastest device, links that cost no time, devices in flight; docs/paper-numbers.md has the
arithmetic. Or the paper leaves it open and it is ours: ``OPEN_CHOICES`` and the defaults. ``choices`` lists them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from freshet.config import resolve
from freshet.data.catalogue import CATALOGUE
from freshet.errors import ConfigError
from freshet.experiments.grid import Scenario, Tables, with_length
from freshet.methods import class_and_preset
from freshet.report.palette import ORDER

METHODS = ORDER[:12]
"""The twelve methods in the order of the paper's table: six asynchronous, six synchronous."""


@dataclass(frozen=True)
class Published:
    """One entry of the paper's main table."""

    accuracy: float
    """Convergence accuracy of the global model."""
    time: float | None
    """Training time to the target accuracy; None for the paper's "/". The paper names no unit; we assume seconds."""


@dataclass(frozen=True)
class Cell:
    """One network on one data set, with the rates of the paper's hyper-parameter table."""

    name: str
    dataset: str
    model: str
    eta_lambda: float
    eta_sigma: float
    eta_iota: float
    eta_gamma: float
    eta_upsilon: float
    lr: float
    """Learning rate of local SGD (eta_i), before decay."""
    target: float
    """The accuracy that `Published.time` is the time to."""
    published: Mapping[str, Published] = field(hash=False)
    """By method name, for each of `METHODS`."""
    eta_rl: float = 0.001
    """Learning rate of the slot selector."""
    devices: int = 100
    """m, the number of devices."""
    per_round: int = 10
    """m', devices triggered at once."""
    period: float = 10.0
    """Time between two triggers (calligraphic T); we assume seconds."""
    rounds: int = 500
    """T, global rounds."""
    tau_max: int = 99
    """Largest staleness that the server accepts."""
    slowest_over_fastest: float = 5.0
    """Local training time of the slowest device divided by that of the fastest."""
    optimiser: str = "sgd"
    """Local optimiser: the paper's SGD, or ours where SGD at the paper's rate does not learn."""


def _cell(
    name: str,
    dataset: str,
    model: str,
    *,
    etas: tuple[float, float, float, float, float],
    lr: float,
    target: float,
    accuracy: Sequence[float],
    time: Sequence[float | None],
    optimiser: str = "sgd",
) -> Cell:
    """A cell from columns of the paper's tables: rates of lambda, sigma, iota, gamma, upsilon; results by `METHODS`."""
    published = {m: Published(a, t) for m, a, t in zip(METHODS, accuracy, time, strict=True)}
    return Cell(name, dataset, model, *etas, lr=lr, target=target, published=published, optimiser=optimiser)


_CELLS = (
    _cell(
        "lenet-fmnist",
        "fashion-mnist",
        "lenet5",
        etas=(1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
        lr=0.005,
        target=0.70,
        accuracy=(0.858, 0.839, 0.799, 0.833, 0.827, 0.786, 0.858, 0.780, 0.778, 0.785, 0.842, 0.846),
        time=(11_603, 15_941, 75_323, 42_472, 16_953, 14_473, 13_753, 97_692, 97_692, 97_692, 51_223, 20_599),
    ),
    _cell(
        "lenet-cifar10",
        "cifar10",
        "lenet5",
        etas=(1e-3, 1e-3, 0.1, 0.1, 1e-3),
        lr=0.03,
        target=0.30,
        accuracy=(0.485, 0.483, 0.307, 0.411, 0.366, 0.306, 0.496, 0.450, 0.374, 0.305, 0.277, 0.488),
        time=(8_800, 36_565, 365_642, 83_973, 9_907, 21_562, 63_500, 125_514, 126_958, 437_531, None, 56_019),
    ),
    _cell(
        "lenet-cifar100",
        "cifar100",
        "lenet5",
        etas=(1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
        lr=0.03,
        target=0.13,
        accuracy=(0.183, 0.168, 0.106, 0.151, 0.174, 0.0836, 0.220, 0.167, 0.173, 0.170, 0.150, 0.181),
        time=(20_737, 102_113, None, 110_942, 25_791, None, 98_303, 95_306, 93_430, 93_430, 70_260, 91_686),
    ),
    _cell(
        "cnn-cifar10",
        "cifar10",
        "cnn",
        etas=(1e-3, 1e-3, 1e-4, 0.1, 1e-3),
        lr=0.028,
        target=0.40,
        accuracy=(0.603, 0.491, 0.380, 0.477, 0.366, 0.509, 0.628, 0.562, 0.360, 0.478, 0.508, 0.570),
        time=(10_109, 24_931, None, 92_246, None, 20_415, 44_338, 117_794, None, 100_302, 43_974, 56_019),
    ),
    _cell(
        "cnn-cifar100",
        "cifar100",
        "cnn",
        etas=(1e-5, 1e-5, 1e-5, 1e-5, 1e-5),
        lr=0.013,
        target=0.15,
        accuracy=(0.279, 0.230, 0.146, 0.209, 0.202, 0.191, 0.293, 0.249, 0.244, 0.225, 0.189, 0.264),
        time=(30_569, 37_160, None, 103_090, 65_736, 94_169, 104_844, 73_145, 73_145, 252_703, 52_874, 108_906),
    ),
    _cell(
        "resnet-cifar100",
        "cifar100",
        "resnet20",
        etas=(1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
        lr=0.03,
        target=0.25,
        accuracy=(0.359, 0.316, 0.314, 0.280, 0.317, 0.195, 0.378, 0.298, 0.303, 0.304, 0.327, 0.352),
        time=(16_027, 21_107, 35_712, 198_797, 27_672, None, 35_145, 109_680, 109_680, 106_021, 73_711, 62_891),
    ),
    _cell(
        "resnet-tiny",
        "tiny-imagenet",
        "resnet20",
        etas=(1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
        lr=0.03,
        target=0.12,
        accuracy=(0.168, 0.143, 0.133, 0.125, 0.148, 0.116, 0.193, 0.145, 0.149, 0.151, 0.139, 0.176),
        time=(22_415, 31_288, 78_155, 359_899, 43_523, None, 69_848, 155_023, 151_935, 139_444, 103_661, 92_180),
    ),
    _cell(
        "alexnet-cifar10",
        "cifar10",
        "alexnet",
        etas=(1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
        lr=0.03,
        target=0.40,
        accuracy=(0.490, 0.415, 0.370, 0.450, 0.471, 0.410, 0.496, 0.446, 0.446, 0.440, 0.439, 0.458),
        time=(12_591, 83_693, None, 128_015, 27_763, 22_198, 56_655, 157_678, 141_125, 157_678, 144_999, 125_514),
    ),
    _cell(
        "alexnet-cifar100",
        "cifar100",
        "alexnet",
        etas=(1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
        lr=0.03,
        target=0.12,
        accuracy=(0.246, 0.204, 0.193, 0.243, 0.226, 0.173, 0.255, 0.204, 0.204, 0.197, 0.193, 0.226),
        time=(12_150, 13_717, 17_400, 60_864, 27_672, 17_508, 34_127, 92_558, 91_369, 89_297, 103_950, 58_802),
    ),
    _cell(
        "vgg-cifar10",
        "cifar10",
        "vgg11",
        etas=(1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
        lr=0.03,
        target=0.45,
        accuracy=(0.657, 0.645, 0.561, 0.548, 0.617, 0.417, 0.612, 0.519, 0.522, 0.522, 0.549, 0.643),
        time=(47_356, 77_530, 97_848, 276_352, 192_419, None, 228_078, 346_890, 346_890, 346_890, 195_032, 180_782),
    ),
    _cell(
        "vgg-cifar100",
        "cifar100",
        "vgg11",
        etas=(1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
        lr=0.03,
        target=0.12,
        accuracy=(0.267, 0.168, 0.213, 0.131, 0.258, 0.187, 0.268, 0.115, 0.109, 0.112, 0.224, 0.177),
        time=(83_226, 375_236, 120_533, 405_906, 167_053, 120_426, 243_896, None, None, None, 307_955, 330_701),
    ),
    _cell(
        "textcnn-imdb",
        "imdb",
        "textcnn",
        etas=(1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
        lr=0.001,
        target=0.85,
        accuracy=(0.882, 0.875, 0.876, 0.811, 0.876, 0.865, 0.883, 0.874, 0.875, 0.875, 0.874, 0.874),
        time=(3_994, 5_837, 4_884, None, 7_671, 5_251, 16_940, 13_960, 15_668, 13_960, 12_674, 17_988),
        optimiser="adam",
    ),
)

CELLS: dict[str, Cell] = {cell.name: cell for cell in _CELLS}
"""All twelve cells by name."""


#: Settings that the paper leaves open, chosen by us for all methods: local epochs, batch size, Dirichlet skew.
OPEN_CHOICES = {"epochs": 5, "batch_size": 50, "concentration": 0.5}
#: Seconds of one local training on the fastest device: the slowest of ten trips then takes about 875 s on average, the
#: least with which all published synchronous times lie within 500 rounds.
FASTEST = 190.0
#: Devices in flight below which more are triggered.
IN_FLIGHT = 30
#: Published times are equal to the second for different networks, so transfers cost no time.
COSTLESS_LINKS = {"up_mbps": 0.0, "down_mbps": 0.0, "up_latency": 0.0, "down_latency": 0.0}
_RATES = ("eta_lambda", "eta_sigma", "eta_iota", "eta_gamma", "eta_upsilon", "eta_rl", "tau_max")
#: Settings that the paper states.
STATED = {
    "training.lr",
    "training.optimiser",
    "fleet.devices",
    "fleet.ratio",
    "fleet.time",
    "data.name",
    "data.partition",
    "model.name",
    "run.per_round",
    "run.period",
    "run.selection",
    "run.target",
    "run.trigger",
    *(f"method.{part}" for part in ("slot", "selector", "apply", "dynamic_server", "adaptive_device")),
    *(f"method.{rate}" for rate in _RATES),
}
#: Settings that follow from the paper's numbers.
INFERRED = {"fleet.fastest", "run.in_flight", *(f"fleet.{key}" for key in COSTLESS_LINKS)}
#: Settings of the machine, not of the experiment.
_MACHINE = {"dir", "seed", "executor", "workers", "address", "checkpoint_every", "checkpoint_minutes", "rotate_log"}
_MACHINE |= {"device_memory_mb", "device", "custom", "train_samples", "test_samples", "validation"}


def find_cell(name: str) -> Cell:
    """The cell of this name."""
    if name not in CELLS:
        raise ConfigError("--cell", f"{name!r} is not known; choose one of {', '.join(CELLS)}")
    return CELLS[name]


def cell_settings(cell: Cell, method: str) -> dict[str, dict[str, Any]]:
    """The settings of a cell for one method, with the paper's rates where it has them.

    ``with_length`` adds what follows from the fleet: length, test interval, and seconds of a round of the schedule.
    """
    found, preset = class_and_preset(method)
    known = found.Options.model_fields
    own = found.Options.conditional_defaults.get(("controls", preset.get("controls", "")), {})  # rates on another scale
    rates = {key: getattr(cell, key) for key in _RATES if key in known and key not in own}
    rates = rates if "eta_lambda" in known else {}
    return {
        "method": {"name": method} | rates,
        "training": {
            "epochs": OPEN_CHOICES["epochs"],
            "batch_size": OPEN_CHOICES["batch_size"],
            "optimiser": cell.optimiser,
            "lr": cell.lr,
            "schedule_by": "time",  # the same rate at the same second for every method
        },
        "fleet": {
            "devices": cell.devices,
            "fastest": FASTEST,
            "ratio": cell.slowest_over_fastest,
            "time": "trip",
            **COSTLESS_LINKS,
        },
        "data": {"name": cell.dataset, "partition": "dirichlet", "concentration": OPEN_CHOICES["concentration"]},
        "model": {"name": cell.model},
        "run": {
            "per_round": cell.per_round,
            "in_flight": IN_FLIGHT,
            "period": float(cell.period),
            "target": cell.target,
        },
    }


def cell_tables(cell: Cell, method: str) -> dict[str, dict[str, Any]]:
    """The settings of a cell for one method, with the length of its synchronous rounds."""
    return with_length(cell_settings(cell, method), cell.rounds)


def cell_scenario(
    cell: Cell, name: str = "", tables: Tables | None = None, options: Mapping[str, Mapping[str, Any]] | None = None
) -> Scenario:
    """The cell for a grid; ``tables`` replace settings of the cell, ``options`` those of single methods."""

    def settings(method: str) -> dict[str, dict[str, Any]]:
        found = cell_settings(cell, method)
        return found | {section: found.get(section, {}) | dict(table) for section, table in (tables or {}).items()}

    return Scenario(name or cell.name, settings, options or {}, cell.rounds, cell.name)


# ---- where each setting comes from


Source = Literal["paper", "paper's numbers", "Freshet"]
#: The sources in the order in which they are shown.
SOURCES: tuple[Source, ...] = ("paper", "paper's numbers", "Freshet")


@dataclass(frozen=True)
class Choice:
    """One setting of a cell: stated by the paper, inferred from the paper's numbers, or Freshet's own."""

    name: str
    value: Any
    source: Source


def choices(cell: Cell) -> list[Choice]:
    """Every resolved setting that all methods of a cell share."""
    tables = resolve(cell_tables(cell, "fedasmu")).tables()
    del tables["method"]
    spec = CATALOGUE[cell.dataset]
    void = _MACHINE | {"shards_per_device"} | (set() if spec.kind == "text" else {"vocabulary", "length"})
    return [Choice("rounds", cell.rounds, "paper")] + [
        Choice(f"{section}.{key}", value, _source(cell, f"{section}.{key}"))
        for section, values in tables.items()
        for key, value in values.items()
        if key not in void
    ]


def _source(cell: Cell, key: str) -> Source:
    if key in INFERRED:
        return "paper's numbers"
    stated = key in STATED and not (key == "training.optimiser" and cell.optimiser != "sgd")
    return "paper" if stated else "Freshet"


def method_choices(cell: Cell, method: str) -> list[Choice]:
    """Every resolved option of one method in a cell: initial controls, rates, buffers, ..."""
    options = resolve(cell_tables(cell, method)).tables()["method"]
    rates = class_and_preset(method)[0].Options.model_fields if method in ("fedasmu", "fedssmu") else ()
    return [
        Choice(key, value, "paper" if key in rates and f"method.{key}" in STATED else "Freshet")
        for key, value in options.items()
        if key not in {"name"} | _MACHINE
    ]


def all_method_choices(cell: Cell) -> dict[str, list[Choice]]:
    """Options by method, for the methods of the paper's table."""
    return {method: method_choices(cell, method) for method in METHODS}

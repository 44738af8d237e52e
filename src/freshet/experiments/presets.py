"""From a cell of the paper to a complete configuration, and whose choice each setting is."""

from dataclasses import dataclass
from typing import Any

from freshet.config import resolve
from freshet.data.catalogue import CATALOGUE
from freshet.errors import ConfigError
from freshet.experiments.cells import CELLS, METHODS, Cell
from freshet.experiments.length import with_length
from freshet.methods import find

#: What the paper leaves open, chosen by us and the same for all methods: local epochs, batch size, Dirichlet skew.
OPEN_CHOICES = {"epochs": 5, "batch_size": 50, "concentration": 0.5}
_RATES = ("eta_lambda", "eta_sigma", "eta_iota", "eta_gamma", "eta_upsilon", "eta_rl", "tau_max")
#: Settings that the paper states; every other one is ours.
STATED = {
    "training.lr",
    "fleet.devices",
    "fleet.ratio",
    "data.name",
    "data.partition",
    "model.name",
    "run.per_round",
    "run.period",
    "run.target",
    "run.trigger",
    *(f"method.{part}" for part in ("slot", "apply", "dynamic_server", "adaptive_device")),
    *(f"method.{rate}" for rate in _RATES),
}
#: Settings of the machine, not of the experiment.
_MACHINE = {"dir", "seed", "executor", "workers", "address", "checkpoint_every", "checkpoint_minutes", "rotate_log"}
_MACHINE |= {"device_memory_mb", "device", "meta_from", "custom", "train_samples", "test_samples", "validation"}


def find_cell(name: str) -> Cell:
    """The cell of this name."""
    if name not in CELLS:
        raise ConfigError("--cell", f"{name!r} is not known; choose one of {', '.join(CELLS)}")
    return CELLS[name]


def cell_settings(cell: Cell, method: str) -> dict[str, dict[str, Any]]:
    """The settings of a cell for one method, all but the length of the run: the paper's rates where they concern it."""
    found, preset = find(method)
    known = found.Options.model_fields
    own = getattr(found.Options, "following", {}).get(("controls", preset.get("controls")), {})  # on another scale
    rates = {key: getattr(cell, key) for key in _RATES if key in known and key not in own}
    rates = rates if "eta_lambda" in known else {}
    return {
        "method": {"name": method} | rates,
        "training": {key: OPEN_CHOICES[key] for key in ("epochs", "batch_size")} | {"lr": cell.lr},
        "fleet": {"devices": cell.devices, "ratio": cell.slowest_over_fastest, "time": "trip"},
        "data": {"name": cell.dataset, "partition": "dirichlet", "concentration": OPEN_CHOICES["concentration"]},
        "model": {"name": cell.model},
        "run": {"per_round": cell.per_round, "period": float(cell.period), "target": cell.target},
    }


def cell_tables(cell: Cell, method: str) -> dict[str, dict[str, Any]]:
    """The settings of a cell for one method, as long as its synchronous rounds take on its fleet."""
    return with_length(cell_settings(cell, method), cell.rounds)


# ---- whose choice is it?


@dataclass(frozen=True)
class Choice:
    """One setting of a cell: the paper's, or ours where the paper leaves it open."""

    name: str
    value: Any
    stated: bool


def choices(cell: Cell) -> list[Choice]:
    """Every setting that all methods of a cell share, as it is resolved."""
    tables = resolve(cell_tables(cell, "fedasmu")).tables()
    del tables["method"]
    spec = CATALOGUE[cell.dataset]
    void = _MACHINE | {"shards_per_device"} | (set() if spec.kind == "text" else {"vocabulary", "length"})
    return [Choice("rounds", cell.rounds, True)] + [
        Choice(f"{section}.{key}", value, f"{section}.{key}" in STATED)
        for section, values in tables.items()
        for key, value in values.items()
        if key not in void
    ]


def method_choices(cell: Cell, method: str) -> list[Choice]:
    """Every option of one method in a cell, as it is resolved: initial controls, rates, buffers, ..."""
    options = resolve(cell_tables(cell, method)).tables()["method"]
    rates = find(method)[0].Options.model_fields if method in ("fedasmu", "fedssmu") else ()
    return [
        Choice(key, value, key in rates and f"method.{key}" in STATED)
        for key, value in options.items()
        if key not in {"name"} | _MACHINE
    ]


def all_method_choices(cell: Cell) -> dict[str, list[Choice]]:
    """Options by method, for the methods of the paper's table."""
    return {method: method_choices(cell, method) for method in METHODS}

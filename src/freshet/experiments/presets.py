"""From a cell of the paper to a complete configuration."""

from typing import Any

from freshet.errors import ConfigError
from freshet.experiments.cells import CELLS, Cell
from freshet.methods import find

#: What the paper leaves open, chosen by us and the same for all methods: local epochs, batch size, Dirichlet skew.
OPEN_CHOICES = {"epochs": 5, "batch_size": 50, "concentration": 0.5}
_RATES = ("eta_lambda", "eta_sigma", "eta_iota", "eta_gamma", "eta_upsilon", "eta_rl", "tau_max")


def find_cell(name: str) -> Cell:
    """The cell of this name."""
    if name not in CELLS:
        raise ConfigError("--cell", f"{name!r} is not known; choose one of {', '.join(CELLS)}")
    return CELLS[name]


def cell_tables(cell: Cell, method: str) -> dict[str, dict[str, Any]]:
    """The settings of a cell for one method: the paper's rates where they concern it, 500 rounds of T seconds."""
    known = find(method)[0].Options.model_fields
    rates = {key: getattr(cell, key) for key in _RATES if key in known} if "eta_lambda" in known else {}
    return {
        "method": {"name": method} | rates,
        "training": {key: OPEN_CHOICES[key] for key in ("epochs", "batch_size")} | {"lr": cell.lr},
        "fleet": {"devices": cell.devices, "ratio": cell.slowest_over_fastest},
        "data": {"name": cell.dataset, "partition": "dirichlet", "concentration": OPEN_CHOICES["concentration"]},
        "model": {"name": cell.model},
        "run": {
            "per_round": cell.per_round,
            "period": float(cell.period),
            "until": float(cell.rounds * cell.period),
            "target": cell.target,
        },
    }

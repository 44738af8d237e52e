"""What ``freshet tune`` has left in a folder. It may come from anybody: nothing that it names is imported."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from freshet.config import load_tables
from freshet.errors import ConfigError
from freshet.experiments.grid import Tables
from freshet.files import reason
from freshet.methods import known
from freshet.runs.facts import number, whole


def read_tuned(folder: Path, methods: Collection[str]) -> Tables:
    """The settings in best.toml; the method is a built-in one or one of those that the user has named."""
    tables = load_tables(folder / "best.toml")
    name, rate = tables.get("method", {}).get("name"), tables.get("training", {}).get("lr")
    if not isinstance(name, str) or number(rate) is None:
        raise ConfigError("--tuned", f"{folder}/best.toml does not name a method and its learning rate")
    if known(name) is None and name not in methods:
        problem = "which is neither built in nor compared here; it is not imported for that"
        raise ConfigError("--tuned", f"{folder} is for {name:.80}, {problem}")
    return tables


def tuning_notes(folders: Sequence[Path]) -> list[str]:
    """Which methods were tuned, and a warning when their budgets were not equal."""
    budgets = dict(_budget(folder) for folder in folders)
    said = [f"{name} {trials} trials x {seeds} seeds of {s:g} s" for name, (trials, seeds, s) in budgets.items()]
    unequal = len(set(budgets.values())) > 1
    return [f"tuned: {', '.join(said)}{'; UNEQUAL BUDGETS' if unequal else ''}"] if said else []


def _budget(folder: Path) -> tuple[str, tuple[int, int, float]]:
    """The method of a study, its trials, its seeds, and the seconds of each run."""
    try:
        record = json.loads((folder / "tuning.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--tuned", f"{folder}/tuning.json cannot be read ({reason(error)})") from None
    except (ValueError, RecursionError):
        record = None
    name, budget = (record.get(key) for key in ("method", "budget")) if isinstance(record, dict) else (None, None)
    found: Mapping[str, Any] = budget if isinstance(budget, dict) else {}
    trials, seeds, until = whole(found.get("trials")), whole(found.get("seeds")), number(found.get("until"))
    if not isinstance(name, str) or trials is None or seeds is None or until is None:
        raise ConfigError("--tuned", f"{folder} has no tuning.json made by `freshet tune`")
    return name, (trials, seeds, until)

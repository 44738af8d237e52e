"""What ``freshet tune`` has left in a folder. It may come from anybody: nothing that it names is imported."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from freshet.config import load_tables
from freshet.errors import ConfigError
from freshet.experiments.grid import Tables, tuned_as
from freshet.files import reason
from freshet.methods import known
from freshet.runs.facts import number, whole

#: Trials, seeds, and seconds of each run.
Budget = tuple[int, int, float]


def read_tuned(folder: Path, methods: Collection[str]) -> Tables:
    """The settings in best.toml; the method is a built-in one or one of those that the user has named."""
    if not (folder / "best.toml").is_file():
        raise ConfigError("--tuned", f"{folder} has no best.toml; give a folder made by `freshet tune`")
    tables = load_tables(folder / "best.toml")
    name, rate = tables.get("method", {}).get("name"), tables.get("training", {}).get("lr")
    if not isinstance(name, str) or number(rate) is None:
        raise ConfigError("--tuned", f"{folder}/best.toml does not name a method and its learning rate")
    if known(name) is None and name not in methods:
        problem = "which is neither built in nor compared here; it is not imported for that"
        raise ConfigError("--tuned", f"{folder} is for {name:.80}, {problem}")
    if (studied := _budget(folder)[0]) != name:
        problem = f"best.toml is for {name:.80} and tuning.json for {studied:.80}"
        raise ConfigError("--tuned", f"{folder} is mixed: {problem}; give a folder as `freshet tune` left it")
    return tables


def tuning_notes(folders: Sequence[Path], methods: Sequence[str]) -> list[str]:
    """Whose settings were tuned, and with what; a warning where that was not the same for all."""
    budgets: dict[str, Budget] = {}
    for name, budget in map(_budget, folders):
        if name in budgets:
            raise ConfigError("--tuned", f"two folders are for {name:.80}; give one of them")
        budgets[name] = budget
    if not budgets:
        return []
    source = {method: tuned_as(method, budgets) for method in methods}
    used = {name: budget for name, budget in budgets.items() if name in source.values()}
    said = [f"{name} {trials} trials x {seeds} seeds of {s:g} s" for name, (trials, seeds, s) in used.items()]
    said += [f"{method} as {name}" for method, name in source.items() if name not in (method, None)]
    untuned = [method for method, name in source.items() if name is None]
    warnings = ["UNEQUAL BUDGETS"] if len(set(used.values())) > 1 else []
    warnings += [f"NOT TUNED: {', '.join(untuned)}"] if untuned else []
    return ["; ".join([f"tuned: {', '.join(said) or 'none of these methods'}", *warnings])]


def _budget(folder: Path) -> tuple[str, Budget]:
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

"""Freshet: federated learning over unequal devices, in virtual time and over real networks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from freshet._version import __version__
from freshet.errors import ConfigError, DataError, FreshetError, RunError, Stop

if TYPE_CHECKING:
    from freshet.core.about import About
    from freshet.core.method import LocalRule, Method, Options
    from freshet.experiments.api import compare, tune
    from freshet.federation import Federation
    from freshet.flower.device import Device
    from freshet.result import Result, load
    from freshet.runs.writer import Observer
    from freshet.sim.fleet import Fleet, FleetOptions
    from freshet.training.task import Task

__all__ = [
    "About",
    "ConfigError",
    "DataError",
    "Device",
    "Federation",
    "Fleet",
    "FleetOptions",
    "FreshetError",
    "LocalRule",
    "Method",
    "Observer",
    "Options",
    "Result",
    "RunError",
    "Stop",
    "Task",
    "__version__",
    "compare",
    "load",
    "tune",
]
#: Where the names live that are loaded when they are first used: torch takes seconds, `freshet --help` should not.
_HOMES = {
    "About": "freshet.core.about",
    "Device": "freshet.flower.device",
    "Federation": "freshet.federation",
    "Fleet": "freshet.sim.fleet",
    "FleetOptions": "freshet.sim.fleet",
    "LocalRule": "freshet.core.method",
    "Method": "freshet.core.method",
    "Observer": "freshet.runs.writer",
    "Options": "freshet.core.method",
    "Result": "freshet.result",
    "Task": "freshet.training.task",
    "compare": "freshet.experiments.api",
    "load": "freshet.result",
    "tune": "freshet.experiments.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Freshet: federated learning over unequal devices, in virtual time and over real networks."""

from freshet._version import __version__
from freshet.core.about import About
from freshet.core.method import LocalRule, Method, Options
from freshet.errors import ConfigError, DataError, FreshetError, RunError
from freshet.federation import Federation
from freshet.options import FleetOptions
from freshet.result import Result
from freshet.runs.writer import Observer
from freshet.sim.fleet import Fleet

__all__ = [
    "About",
    "ConfigError",
    "DataError",
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
    "__version__",
]

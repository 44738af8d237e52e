"""Freshet: federated learning over unequal devices, in virtual time and over real networks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from freshet._version import __version__
from freshet.errors import ConfigError, DataError, FreshetError, RunError, Stop

if TYPE_CHECKING:
    from freshet.core.about import About, Range, UploadCount
    from freshet.core.events import Contribution
    from freshet.core.messages import Upload
    from freshet.core.method import (
        Aggregate,
        Discard,
        Local,
        LocalRule,
        Method,
        MethodContext,
        Options,
        Reject,
        Verdict,
        Wait,
    )
    from freshet.core.server import ActiveTrip, Server
    from freshet.experiments.api import compare, tune
    from freshet.federation import Federation
    from freshet.flower.device import Device
    from freshet.methods._shared.rounds import RoundMethod, RoundUpload
    from freshet.result import Result, load
    from freshet.runs.reader import RunDirectory
    from freshet.runs.writer import Observer
    from freshet.sim.fleet import Fleet, FleetOptions
    from freshet.training.task import HuggingFaceTask, Task

__all__ = [
    "About",
    "ActiveTrip",
    "Aggregate",
    "ConfigError",
    "Contribution",
    "DataError",
    "Device",
    "Discard",
    "Federation",
    "Fleet",
    "FleetOptions",
    "FreshetError",
    "HuggingFaceTask",
    "Local",
    "LocalRule",
    "Method",
    "MethodContext",
    "Observer",
    "Options",
    "Range",
    "Reject",
    "Result",
    "RoundMethod",
    "RoundUpload",
    "RunDirectory",
    "RunError",
    "Server",
    "Stop",
    "Task",
    "Upload",
    "UploadCount",
    "Verdict",
    "Wait",
    "__version__",
    "compare",
    "load",
    "tune",
]
#: Where the names live that are loaded when they are first used: torch takes seconds, `freshet --help` should not.
_HOMES = {
    "About": "freshet.core.about",
    "ActiveTrip": "freshet.core.server",
    "Aggregate": "freshet.core.method",
    "Contribution": "freshet.core.events",
    "Device": "freshet.flower.device",
    "Discard": "freshet.core.method",
    "Federation": "freshet.federation",
    "Fleet": "freshet.sim.fleet",
    "FleetOptions": "freshet.sim.fleet",
    "HuggingFaceTask": "freshet.training.task",
    "Local": "freshet.core.method",
    "LocalRule": "freshet.core.method",
    "Method": "freshet.core.method",
    "MethodContext": "freshet.core.method",
    "Observer": "freshet.runs.writer",
    "Options": "freshet.core.method",
    "Range": "freshet.core.about",
    "Reject": "freshet.core.method",
    "Result": "freshet.result",
    "RoundMethod": "freshet.methods._shared.rounds",
    "RoundUpload": "freshet.methods._shared.rounds",
    "RunDirectory": "freshet.runs.reader",
    "Server": "freshet.core.server",
    "Task": "freshet.training.task",
    "Upload": "freshet.core.messages",
    "UploadCount": "freshet.core.about",
    "Verdict": "freshet.core.method",
    "Wait": "freshet.core.method",
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

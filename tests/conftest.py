"""Shared by all tests: one torch thread, a small federation that trains in a blink, and one finished run per method."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

from freshet import Federation, Result

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background of a shell: Ctrl-C is to be heard
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # begun with nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine is no fault of what is tested. The same examples every time, unless faults are sought (make fuzz).
settings.register_profile(
    "freshet",
    deadline=None,
    derandomize="FRESHET_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("freshet")

torch.set_num_threads(1)


def linear() -> nn.Module:
    """The smallest model that learns the digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def with_head() -> nn.Module:
    """The same with a layer before the last, for a method whose last layer does not travel."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def small(method: str | dict[str, Any] = "fedasmu", **given: Any) -> Federation:
    """Eight devices, a linear model, 240 digits; every section may be overridden by a dict."""
    sections: dict[str, dict[str, Any]] = {
        "fleet": {"devices": 8, "fastest": 4.0, "ratio": 5.0, "up_mbps": 0.05, "down_mbps": 0.02, "time": "trip"},
        "training": {"epochs": 4, "lr": 0.05},
        "data": {"train_samples": 240, "test_samples": 120},
        "run": {"per_round": 3, "period": 4.0, "in_flight": 6, "eval_every": 20.0, "executor": "serial"},
    }
    for name, values in sections.items():
        override = given.pop(name, {})
        sections[name] = values | override if isinstance(override, dict) else override
    name = method if isinstance(method, str) else method["name"]
    given.setdefault("model", with_head if name == "fedrep" else linear)
    return Federation(method=method, **sections, **given)


@pytest.fixture(scope="session")
def federate() -> Callable[..., Federation]:
    """Builds small federations: ``federate("fedavg", fleet={"loss": 0.2})``."""
    return small


def exploring(method: str) -> dict[str, Any]:
    """The method; FedASMU's devices explore so often that a short run has merges in several slots."""
    return {"name": method} | ({"epsilon": 0.5} if method.startswith(("fedasmu", "fedssmu")) else {})


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """``finished("fedasmu")``: a short finished run, computed once per session. Copy it before you change it."""
    folder: Path = tmp_path_factory.mktemp("finished")
    results: dict[str, Result] = {}

    def get(method: str) -> Result:
        if method not in results:
            results[method] = small(exploring(method)).run(60, out=folder / method)
        return results[method]

    return get

"""A run frees its models when it ends, without the garbage collector: a grid makes many runs in one process."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freshet import Federation
from freshet.core.server import Server


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Server]]]:
    """The servers that are made during the test, with the garbage collector off."""
    made: list[weakref.ref[Server]] = []
    build = Server.__init__

    def record(self: Server, *given: object, **named: object) -> None:
        build(self, *given, **named)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Server, "__init__", record)
    gc.disable()
    yield made
    gc.enable()


@pytest.mark.parametrize("executor", ["serial", "processes"])
@pytest.mark.parametrize("method", ["fedasmu", "fedavg", "port", "scaffold"])
def test_a_finished_run_frees_its_models(
    method: str,
    executor: str,
    servers: list[weakref.ref[Server]],
    tmp_path: Path,
    federate: Callable[..., Federation],
) -> None:
    federate(method, run={"executor": executor, "workers": 1}).run(30, out=tmp_path / "run")
    assert servers and not any(server() for server in servers)

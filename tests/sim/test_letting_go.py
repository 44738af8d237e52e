"""What a run held goes when it ends, and need not wait for the garbage collector: a grid makes many in one process."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freshet import Federation
from freshet.core.server import Server


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Server]]]:
    """The servers that are made meanwhile; nothing is collected."""
    made: list[weakref.ref[Server]] = []
    build = Server.__init__

    def noted(self: Server, *given: object, **named: object) -> None:
        build(self, *given, **named)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Server, "__init__", noted)
    gc.disable()
    yield made
    gc.enable()


@pytest.mark.parametrize("executor", ["serial", "processes"])
@pytest.mark.parametrize("method", ["fedasmu", "fedavg", "port", "scaffold"])
def test_a_finished_run_lets_its_models_go(
    method: str,
    executor: str,
    servers: list[weakref.ref[Server]],
    tmp_path: Path,
    federate: Callable[..., Federation],
) -> None:
    federate(method, run={"executor": executor, "workers": 1}).run(30, out=tmp_path / "run")
    assert servers and not any(server() for server in servers)

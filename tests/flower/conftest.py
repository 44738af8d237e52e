"""Tests of the deployment need Flower. Without it they are skipped, with a message."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    if collect_ignore_glob:
        print("flwr is not installed: tests/flower is skipped")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no worker starts them last."""
    items.sort(key=lambda item: "test_e2e_faults" not in item.nodeid)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start federations of real processes, and stop them after the test."""
    from freshet.flower.running import LocalRun

    started: list[LocalRun] = []

    def begin(*arguments: Any, **options: Any) -> LocalRun:
        started.append(LocalRun(tmp_path / "deploy", *arguments, tmp_path / "run", print, **options))
        return started[-1]

    yield begin
    for each in started:
        each.stop()

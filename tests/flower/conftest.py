"""Tests of the deployment need Flower; where it is not installed they are skipped, and say so."""

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
    """The longest first, so that no worker begins it when the others have nothing left to do."""
    items.sort(key=lambda item: "test_e2e_faults" not in item.nodeid)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts federations of real processes and stops whatever they have started."""
    from freshet.flower.running import LocalRun

    begun: list[LocalRun] = []

    def begin(*arguments: Any, **options: Any) -> LocalRun:
        begun.append(LocalRun(tmp_path / "deploy", *arguments, tmp_path / "run", print, **options))
        return begun[-1]

    yield begin
    for each in begun:
        each.stop()

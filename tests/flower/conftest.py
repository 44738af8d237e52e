"""Tests of the deployment need Flower; where it is not installed they are skipped, and say so."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    if collect_ignore_glob:
        print("flwr is not installed: tests/flower is skipped")

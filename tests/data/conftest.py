"""Fixtures of the data tests: a private cache, and the folder with real data."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("FRESHET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No local data: no FRESHET_DATA, no system copies."""
    monkeypatch.delenv("FRESHET_DATA", raising=False)
    monkeypatch.setattr("freshet.data.sources.SYSTEM_ROOTS", ())


@pytest.fixture
def real_data() -> Path:
    """The folder with the real data sets."""
    given = os.environ.get("FRESHET_DATA")
    if not given or not Path(given).is_dir():
        pytest.skip("FRESHET_DATA names no folder with real data sets")
    return Path(given)

"""A federation served from Python."""

from pathlib import Path

import pytest

from freshet import Federation, Fleet
from freshet.errors import ConfigError


def test_simulated_fleet_cannot_be_deployed(tmp_path: Path) -> None:
    federation = Federation(fleet=Fleet([1.0, 2.0], 1e6, 1e6))
    with pytest.raises(ConfigError, match="leave it out"):
        federation.deploy(tmp_path / "d")
    assert not (tmp_path / "d").exists()

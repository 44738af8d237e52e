"""The settings of the server app, and its list of nodes."""

from pathlib import Path

import pytest

from freshet.errors import ConfigError, RunError
from freshet.flower.folder import init, run_config
from freshet.flower.server_app import ServerSettings, read_nodes

TABLES = {"method": {"name": "fedasmu"}, "fleet": {"devices": 2}, "run": {"until": 60.0}}


def test_server_app_gets_the_settings_of_the_folder(tmp_path: Path) -> None:
    made = init(tmp_path, TABLES, ["fl.example.org", "10.0.0.7"])
    settings = ServerSettings.read(run_config(made))
    assert (settings.fresh, settings.fresh_bind) == ("side", "0.0.0.0:18002")
    assert settings.fresh_address == "fl.example.org:18002" and settings.out == str(made.root / "run")
    with pytest.raises(ConfigError, match="fresh"):
        ServerSettings.read({"fresh": "pigeons"})
    with pytest.raises(ConfigError, match="ttl"):
        ServerSettings.read({"ttl": "soon", "fresh": "none"})
    with pytest.raises(ConfigError, match="certificate"):
        ServerSettings.read({"fresh": "side"})


@pytest.mark.parametrize("content", ["", "[]", '{"1": "x"}', '{"1": 7}'])
def test_invalid_list_of_nodes_is_one_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(content)
    with pytest.raises(RunError, match=r"nodes\.json"):
        read_nodes(path, 2)

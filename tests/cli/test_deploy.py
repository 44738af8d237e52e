"""``freshet deploy``: the settings that it writes, and what it prints when a run has ended."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from freshet.cli.deploy import deploy_app, trip_cost_lines


@pytest.mark.parametrize(
    ("words", "method", "devices"),
    [
        ([], "fedasmu", 4),
        (["--config", "mine.toml"], "fedbuff", 7),
        (["--config", "mine.toml", "-m", "fedavg", "-d", "3"], "fedavg", 3),
        (["--cell", "lenet-fmnist"], "fedasmu", 100),
    ],
)
def test_a_config_file_decides_method_and_devices_unless_options_do(
    words: list[str], method: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('[method]\nname = "fedbuff"\nK = 2\n[fleet]\ndevices = 7\n')
    asked = CliRunner().invoke(deploy_app, ["app", "made", *words], catch_exceptions=False)
    assert asked.exit_code == 0, asked.output
    (written,) = Path("made").rglob("federation.toml")
    tables = tomllib.loads(written.read_text())
    assert (tables["method"]["name"], tables["fleet"]["devices"]) == (method, devices)


def test_seconds_of_a_trip_are_printed_by_phase() -> None:
    phases = {
        "down": 1.5,
        "start": 0.5,
        "import": 2.0,
        "load": 0.25,
        "train": 9.0,
        "up": 1.0,
        "whole": 14.25,
        "cpu": 3.0,
    }
    lines = trip_cost_lines({"uploads": 7, "messages": 9, "trips": 8, "trip_seconds": phases})
    assert lines[0] == "seconds of a trip (medians of 7 uploads; 9 messages for 8 trips):"
    assert [line.split()[2] for line in lines[1:]] == ["down", "start", "import", "load", "train", "up", "whole"]
    assert trip_cost_lines({"trip_seconds": {}}) == []

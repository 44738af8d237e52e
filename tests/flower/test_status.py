"""``deploy status``: what the server says about itself, and what is printed of it."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from freshet.cli.app import app
from freshet.flower import running, status, wire
from freshet.flower.folder import Folder, init
from freshet.flower.status import DeviceState, duration, lines, progress_line, read
from tests.flower.fakes import FakeFederation


def told(federation: FakeFederation) -> dict[str, Any]:
    """The status file after one more turn of the server."""
    federation.live._last_status = -1e9
    federation.step()
    found = read(Path(federation.live.network.status))
    assert found is not None
    return found


@pytest.fixture
def federation(tmp_path: Path) -> FakeFederation:
    made = FakeFederation(tmp_path)
    made.live.network = replace(made.live.network, status=str(tmp_path / "status.json"))
    return made


def states(found: dict[str, Any]) -> list[str]:
    return [each["state"] for each in found["devices"]]


def test_every_device_has_a_state(federation: FakeFederation) -> None:
    federation.transport.there = {100, 101}
    found = told(federation)
    assert found["running"] and states(found) == ["training", "training", "never"]
    federation.train()
    federation.transport.there = {100}
    found = told(federation)
    assert states(found)[1:] == ["offline", "never"] and found["uploads"] == 2
    first, second = found["devices"][:2]
    assert first["trips"] == second["trips"] == 1 and first["last_upload"] is not None
    assert first["software"] and (first["node"], second["node"]) == (100, 101)


def test_losses_are_told(federation: FakeFederation) -> None:
    federation.step()
    number = next(iter(federation.transport.sent))
    federation.transport.put(number, error="the device is gone")
    found = told(federation)
    assert (found["devices"][0]["lost"], found["devices"][0]["last_loss"], found["lost"]) == (
        1,
        "the device is gone",
        1,
    )


def test_waiting_for_devices_is_told(tmp_path: Path) -> None:
    made = FakeFederation(tmp_path, wait_for=3)
    made.live.network = replace(made.live.network, status=str(tmp_path / "status.json"))
    made.transport.there = {100}
    assert progress_line(told(made)) == "run: waiting for 3 devices; 1 online"


def test_ended_run_is_not_running(federation: FakeFederation) -> None:
    told(federation)
    federation.live.conclude()
    found = read(Path(federation.live.network.status))
    assert found is not None and not found["running"] and "the run has ended" in lines(found, time.time())[0]


def test_dead_or_silent_server_is_not_called_running(tmp_path: Path) -> None:
    facts = {"seconds": 5.0, "until": 100.0, "version": 3, "uploads": 2, "score": ["accuracy", 0.5], "waiting_for": 0}
    status.write(tmp_path / "s", facts, [DeviceState(0)])
    found = read(tmp_path / "s")
    assert found is not None and lines(found, time.time())[0].endswith("running")
    assert "lives, but has said nothing for 2 min" in lines(found, time.time() + 130)[0]
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "s").write_text(json.dumps(dict(found) | {"pid": gone.pid}))
    found = read(tmp_path / "s")
    assert found is not None and not found["running"] and lines(found, time.time())[0].startswith("server: not running")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"pid": "x"}', '{"pid": 1e400}'])
def test_unusable_file_is_no_status(tmp_path: Path, content: str) -> None:
    (tmp_path / "s").write_text(content)
    assert read(tmp_path / "s") is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(45, "45 s"), (119, "119 s"), (125, "2 min"), (3600, "1 h"), (12000, "3 h 20 min"), (187200, "2 d 4 h")],
)
def test_durations_are_readable(seconds: float, words: str) -> None:
    assert duration(seconds) == words


TABLES = {"method": {"name": "fedasmu"}, "fleet": {"devices": 2}, "run": {"until": 7200.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return init(tmp_path_factory.mktemp("d"), TABLES, [])


def printed(folder: Folder, *options: str) -> str:
    done = CliRunner().invoke(app, ["deploy", "status", str(folder.root), *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_command_prints_a_table_or_json(folder: Folder) -> None:
    assert "has not run yet" in printed(folder) and json.loads(printed(folder, "--json"))["running"] is False
    facts = {
        "seconds": 600.0,
        "until": 7200.0,
        "version": 3,
        "uploads": 2,
        "score": ["accuracy", 0.5],
        "waiting_for": 0,
    }
    device = DeviceState(0, 7, "training", time.time() - 30, time.time() - 200, 2, 1, "gone", "1.2")
    status.write(folder.status, facts, [device, DeviceState(1)])
    text = printed(folder)
    assert "run: 10 min of 2 h, version 3, 2 uploads, accuracy 0.500, 1 devices online, 1 h 50 min left" in text
    assert text.splitlines()[3].split() == ["0", "training", "30", "s", "ago", "3", "min", "ago", "2", "1", "1.2"]
    found = json.loads(printed(folder, "--json"))
    assert found["devices"][0]["software"] == "1.2" and found["out"] == str(folder.out())


def test_older_device_does_not_say_its_version(federation: FakeFederation) -> None:
    federation.step()
    number = next(iter(federation.transport.sent))
    record = wire.answer_record(federation.answer(number))
    del record["answer"]["software"]
    assert wire.read_answer(record).software == ""


def test_server_prints_progress_when_something_has_happened(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PROGRESS_SECONDS", 0.0)
    said: list[str] = []
    printer = running.ProgressPrinter(folder, said.append)
    facts = {"seconds": 60.0, "until": None, "version": 1, "uploads": 0, "score": None, "waiting_for": 2}
    for seconds, uploads, waiting in ((1.0, 0, 2), (2.0, 0, 2), (3.0, 0, 0), (4.0, 1, 0), (5.0, 1, 0)):
        now = facts | {"seconds": seconds, "uploads": uploads, "waiting_for": waiting}
        status.write(folder.status, now, [DeviceState(0, 7, "online")])
        printer()
    assert said == [
        "run: waiting for 2 devices; 1 online",
        "run: 3 s, version 1, 0 uploads, 1 devices online",
        "run: 4 s, version 1, 1 uploads, 1 devices online",
    ]

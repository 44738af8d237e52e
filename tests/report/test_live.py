"""The server of ``freshet watch``: two addresses, loopback only, and data only if they are new."""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from freshet.cli.report import watch
from freshet.errors import ConfigError, RunError
from freshet.report import live, loopback

from .conftest import Write
from .helpers import lines, serving


@pytest.fixture
def server(written: Write, monkeypatch: pytest.MonkeyPatch) -> Iterator[live.WatchServer]:
    monkeypatch.setattr(live, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(live, "PAUSE_FACTOR", 0.0)
    with serving(live.WatchServer(written("a", accuracy=[0.1], status=None))) as server:
        yield server


def get(server: live.WatchServer, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def news(server: live.WatchServer, have: str = "") -> Any:
    status, body = get(server, f"/data.json?have={have}")
    return None if status == 204 else json.loads(body)


def test_the_page_and_its_data_and_nothing_else(server: live.WatchServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, page = get(server, "/")
    assert (status, b"Freshet report" in page) == (200, True)
    for path in ("/config.toml", "/../a/config.toml", "/data.json/", "//etc/passwd", "/events.jsonl"):
        assert get(server, path)[0] == 404
    assert get(server, "/data.json", host="evil.example")[0] == 403
    assert get(server, "/", host="evil.example:80")[0] == 403


def test_new_data_as_the_run_continues(server: live.WatchServer, tmp_path: Path) -> None:
    first = news(server)
    assert first["document"]["runs"][0]["status"] == "unfinished"
    assert news(server, first["version"]) is None
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write(lines([{"time": 10.0, "accuracy": 0.75}]) + '{"time": 20.0, "acc')
    second = news(server, first["version"])
    assert second["document"]["runs"][0]["accuracy"] == 0.75
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"status": "finished"}))
    third = news(server, second["version"])
    assert third["document"]["worlds"][0]["lines"][0]["runs"] == 1
    (tmp_path / "a" / "metrics.jsonl").write_text(lines([{"time": 0.0, "accuracy": 0.5}]))
    assert news(server, third["version"])["document"]["runs"][0]["accuracy"] == 0.5, "cut back, as a resumed run is"


def test_a_slow_client_is_disconnected_as_soon_as_a_silent_one(
    server: live.WatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback._Handler, "timeout", 1.0)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=120) as client:
        begun = time.monotonic()
        with pytest.raises(OSError):
            for byte in itertools.cycle(b"GET / HTTP/1.1 "):
                client.sendall(bytes([byte]))
                time.sleep(0.1)
                assert time.monotonic() - begun < 120, "for ever, for all that is known"
    monkeypatch.undo()  # an honest client on a busy machine has its time
    assert get(server, "/")[0] == 200


def test_one_connection_serves_several_requests(server: live.WatchServer) -> None:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    for _ in range(3):
        connection.request("GET", "/data.json", headers={"Host": f"127.0.0.1:{server.server_port}"})
        answer = connection.getresponse()
        assert answer.status == 200 and json.loads(answer.read())
    connection.close()


def test_a_port_that_is_taken(server: live.WatchServer, written: Write) -> None:
    with pytest.raises(ConfigError, match="--port"):
        live.WatchServer(written("b"), server.server_port)


def test_ctrl_c_stops_cleanly(written: Write) -> None:
    program = "import sys; from pathlib import Path; from freshet.cli.report import watch; watch(Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(written("a"))]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert "http://127.0.0.1:" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    assert (child.returncode, out.strip(), err) == (0, "stopped watching", "")


def test_watching_begins_when_the_run_does(written: Write, tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from freshet.cli.report import watch; watch(Path(sys.argv[1]))"
    later = tmp_path / "later"
    command = [sys.executable, "-c", program, str(later)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == f"waiting for a run in {later} (Ctrl-C to stop)\n"
        shutil.copytree(written("a"), later)
        assert f"watching {later} at http://127.0.0.1:" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    assert (child.returncode, out.strip(), err) == (0, "stopped watching", "")


def test_a_folder_that_holds_something_else_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no run")
    with pytest.raises(RunError):
        watch(tmp_path)

"""The Flower commands of a deployment: their words, the access control of the SuperLink, and file modes of secrets."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from freshet.cli.app import app
from freshet.errors import RunError
from freshet.flower import commands
from freshet.flower.folder import Folder, init

TABLES = {"method": {"name": "fedasmu"}, "fleet": {"devices": 2}, "run": {"until": 60.0}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return init(tmp_path_factory.mktemp("d"), TABLES, ["fl.example.org", "10.0.0.7"])


def test_commands_use_tls_and_keys_and_contain_no_secret(made: Folder) -> None:
    link, executor = map(str, commands.superlink(made))
    node, run = str(commands.supernode(made, 1, "mydata:load")), str(commands.run(made))
    assert "--enable-supernode-auth" in link and "--insecure" not in link + executor + node + run
    assert "--ssl-keyfile" in link and "--root-certificates" in executor and "--auth-supernode-private-key" in node
    assert 'data="mydata:load"' in node and "partition-id=1" in node
    assert link.count("--superexec-auth-secret-file") == executor.count("--superexec-auth-secret-file") == 1
    secret = made.key(1).read_text().splitlines()[1]
    assert all(secret not in command for command in (link, executor, node, run))


def test_dry_run_prints_the_commands(tmp_path: Path) -> None:
    runner, root = CliRunner(), str(tmp_path / "d")
    assert runner.invoke(app, ["deploy", "init", root, "--devices", "2", "--host", "h.example"]).exit_code == 0
    server = runner.invoke(app, ["deploy", "server", root, "--dry-run"])
    assert "-m freshet.flower.superlink_auth" in server.output and "supernode register" in server.output
    device = runner.invoke(app, ["deploy", "device", root, "--node", "1", "--data", "m:load", "--dry-run"])
    assert "-m freshet.flower.node" in device.output and "h.example:18000" in device.output
    assert "freshet.flower.node" not in runner.invoke(app, ["deploy", "status", root]).output
    local = runner.invoke(app, ["deploy", "local", "--devices", "2", "--dry-run"])
    assert local.output.count("freshet.flower.node") == 2
    plain = runner.invoke(app, ["deploy", "app", str(tmp_path / "app")])
    assert plain.exit_code == 0 and (tmp_path / "app" / "pyproject.toml").is_file()


@pytest.mark.parametrize("code", [200, 400, 404, 415, 500])
def test_superlink_that_answers_strangers_is_refused(made: Folder, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(code))
    with pytest.raises(RunError, match="lets strangers start apps"):
        commands.check_auth(made)
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(401))
    commands.check_auth(made)


def test_superlink_that_does_not_answer_is_one_sentence(made: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "post", refuse)
    with pytest.raises(RunError, match="does not answer"):
        commands.check_auth(made)


def test_credentials_are_readable_by_their_owner_only(made: Folder) -> None:
    commands.connect(made)
    commands.connect(made)  # the second start of a server
    stored = made.state / "flwr" / "credentials.yaml"
    for path in (stored, made.control_token, made.executor_secret):
        assert path.stat().st_mode & 0o777 == 0o600
    assert made.control_token.read_text() != made.executor_secret.read_text()

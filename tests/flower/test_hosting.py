"""Who serves and who watches over it: a door that is open, a SuperNode that gives up, a fleet that cannot be had."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from freshet import Federation, Fleet
from freshet.errors import ConfigError, RunError
from freshet.flower import commands, node
from freshet.flower.folder import Folder, init

TABLES = {"method": {"name": "fedasmu"}, "fleet": {"devices": 2}, "run": {"until": 60.0}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return init(tmp_path_factory.mktemp("d"), TABLES, [])


@pytest.mark.parametrize("code", [200, 400, 404, 415, 500])
def test_a_superlink_that_answers_strangers_is_not_used(
    made: Folder, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(code))
    with pytest.raises(RunError, match="lets strangers start apps"):
        commands.check_auth(made)
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(401))
    commands.check_auth(made)


def test_a_superlink_that_does_not_answer_is_one_sentence(made: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "post", refuse)
    with pytest.raises(RunError, match="does not answer"):
        commands.check_auth(made)


def test_only_the_owner_reads_what_flwr_shows_to_the_superlink(made: Folder) -> None:
    commands.connect(made)
    commands.connect(made)  # the second start of a server
    stored = made.state / "flwr" / "credentials.yaml"
    for path in (stored, made.control_token, made.executor_secret):
        assert path.stat().st_mode & 0o777 == 0o600
    assert made.control_token.read_text() != made.executor_secret.read_text()


@pytest.mark.parametrize(
    ("end", "code"), [(RuntimeError("handshake"), 1), (SystemExit(305), 305), (SystemExit(None), 0), (None, 1)]
)
def test_a_supernode_whose_work_has_ended_ends(
    end: BaseException | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        if end is not None:
            raise end

    codes: list[int] = []
    importlib.import_module("flwr.supernode.cli.flower_supernode")
    monkeypatch.setattr(sys.modules["flwr.supernode.cli.flower_supernode"], "flower_supernode", work)
    monkeypatch.setattr(os, "_exit", codes.append)
    node.main()
    assert codes == [code]


def test_real_devices_are_as_fast_as_they_are(tmp_path: Path) -> None:
    federation = Federation(fleet=Fleet([1.0, 2.0], 1e6, 1e6))
    with pytest.raises(ConfigError, match="leave it out"):
        federation.deploy(tmp_path / "d")
    assert not (tmp_path / "d").exists()

"""Access control of the SuperLink: who may call which of Flower's interfaces."""

import asyncio
import logging
import logging.config
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from freshet.flower.device_keys import MAX_LINES_PER_HOUR
from freshet.flower.superlink_auth import (
    LIMITED_LOGGERS,
    LOGGED_REFUSALS,
    AuthMiddleware,
    install,
    limit_logging,
    may_pass,
)

TOKEN = "t" * 64
GOOD = [f"Bearer {TOKEN}".encode()]


@pytest.mark.parametrize(
    ("path", "client", "shown", "passes"),
    [
        ("/v1/fleet/activate-node", "10.0.0.5", [], False),  # devices sign their calls
        ("/health", "10.0.0.5", [], True),
        ("/v1/control/start-run", "10.0.0.5", [], False),
        ("/v1/control/start-run", "127.0.0.1", [], False),
        ("/v1/control/start-run", "10.0.0.5", GOOD, True),
        ("/v1/control/start-run", "10.0.0.5", [b"Bearer " + b"x" * 64], False),
        ("/v1/control/start-run", "10.0.0.5", [b"Bearer \xff"], False),
        ("/v1/control/start-run", "10.0.0.5", GOOD * 2, False),
        ("/v1/control/start-run", "10.0.0.5", [TOKEN.encode()], False),
        ("/v1/fleet/../control/start-run", "10.0.0.5", [], False),
        ("/v1/runtime/acquire-task", "127.0.0.1", [], True),  # Flower checks the executor's secret
        ("/v1/runtime/acquire-task", "::1", [], True),
        ("/v1/runtime/acquire-task", "10.0.0.5", GOOD, False),
        ("/v1/runtime/acquire-task", "", [], False),
        ("/docs", "127.0.0.1", [], False),
        ("/v2/anything", "127.0.0.1", [], False),
        ("", "127.0.0.1", [], False),
    ],
)
def test_may_pass(path: str, client: str, shown: list[bytes], passes: bool) -> None:
    assert may_pass(path, client, shown, TOKEN) is passes


def call(scope: dict[str, Any]) -> tuple[bool, list[dict[str, Any]]]:
    """Whether a call reaches Flower, and the answer if it does not."""
    reached, sent = [], []

    async def flower(*_: Any) -> None:
        reached.append(True)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(AuthMiddleware(flower, TOKEN, Path("no keys"), Path("no log"))(scope, lambda: None, send))
    return bool(reached), sent


def test_unauthorised_call_gets_401_and_an_empty_body(capsys: pytest.CaptureFixture[str]) -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/control/start-run",
        "client": ("10.0.0.5", 1),
        "headers": [],
    }
    reached, (head, body) = call(scope)
    assert not reached and head["status"] == 401 and body["body"] == b""
    assert "refused: POST '/v1/control/start-run' from 10.0.0.5" in capsys.readouterr().err
    reached, sent = call(scope | {"headers": [(b"authorization", GOOD[0])]})
    assert reached and not sent


def test_websockets_never_pass() -> None:
    assert call({"type": "lifespan"})[0]
    assert not call({"type": "websocket", "path": "/v1/fleet/x", "headers": []})[0]


def test_refusals_are_counted_and_only_the_first_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    gate, reached = AuthMiddleware(None, TOKEN, Path("no keys"), Path("no log")), 0

    async def send(message: dict[str, Any]) -> None:
        nonlocal reached
        reached += message["type"] == "http.response.start"

    async def flood() -> None:
        for _ in range(3 * LOGGED_REFUSALS):
            await gate({"type": "http", "path": "/" + "a" * 60_000, "headers": []}, lambda: None, send)

    asyncio.run(flood())
    said = capsys.readouterr().err
    assert reached == gate.refused == 3 * LOGGED_REFUSALS
    assert said.count("refused:") == LOGGED_REFUSALS and said.count("further ones are not logged") == 1
    assert len(said) < 200 * (LOGGED_REFUSALS + 1)


def test_strangers_cannot_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line per call, and a limited number of warnings, even after Flower sets up its loggers."""
    from flwr.supercore.http_logging import get_uvicorn_log_config

    limit_logging()
    logging.config.dictConfig(get_uvicorn_log_config(logging.INFO))
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    loggers = [logging.getLogger(name) for name in ("uvicorn.access", *LIMITED_LOGGERS)]
    for logger in loggers:
        logger.addHandler(Lines())
    try:
        for _ in range(MAX_LINES_PER_HOUR + 50):
            for logger in loggers:
                logger.warning("from %s", logger.name)
        assert lines.count("from uvicorn.access") == 0
        assert [lines.count(f"from {name}") for name in LIMITED_LOGGERS] == [MAX_LINES_PER_HOUR] * len(LIMITED_LOGGERS)
        later = time.monotonic() + 3601
        monkeypatch.setattr(time, "monotonic", lambda: later)
        loggers[1].warning("an hour later")
        assert lines[-1] == "an hour later"
    finally:
        for logger in loggers:
            logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, Lines)]
            logger.filters.clear()


def test_flower_uses_the_middleware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.superlink.extensions import get_middleware

    assert get_middleware() == ()
    monkeypatch.setitem(sys.modules, "flwr.ee.superlink.extensions", None)
    install(TOKEN, tmp_path, tmp_path / "access.log")
    [found] = get_middleware()
    assert found.cls is AuthMiddleware and found.kwargs["token"] == TOKEN and found.kwargs["keys"] == tmp_path

"""The commands compare and tune as a user types them."""

import pytest
import typer
from typer.testing import CliRunner

from freshet.cli import experiments


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs a command in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    for name in ("compare", "tune"):
        app.command(name)(getattr(experiments, name))
    runner = CliRunner()

    def call(*words):
        done = runner.invoke(app, [str(word) for word in words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return call

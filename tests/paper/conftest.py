"""The paper commands as a user types them, and an archive of made-up runs."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from freshet.cli.app import app

from .archived_runs import write_run


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Run a command in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()

    def call(*words):
        done = runner.invoke(app, [str(word) for word in words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return call


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """FedASMU ahead of FedBuff with every seed, equal to FedAsync, and PORT with one seed only."""
    for seed in range(3):
        write_run(tmp_path, "fedasmu", seed, [0.1] * 12 + [0.80 + 0.01 * seed] + [0.85 + 0.001 * seed] * 4, 1200.0)
        write_run(tmp_path, "fedasync", seed, [0.1] * 24 + [0.847 - 0.002 * seed] * 6, 2400.0)
        write_run(tmp_path, "fedbuff", seed, [0.1] + [0.6] * 29, None)
    write_run(tmp_path, "port", 0, [0.1] * 30, None)
    return tmp_path


@pytest.fixture
def grid(tmp_path):
    """The folder of a comparison in the cell cnn-cifar10, one of its runs unfinished."""
    world = ("cifar10", "cnn")
    for method in ("fedasmu", "fedasync"):
        write_run(tmp_path / "grid", method, 0, [0.1] * 11, world=world)
    (write_run(tmp_path / "grid", "fedbuff", 0, [0.1] * 4, world=world) / "summary.json").unlink()
    return tmp_path / "grid"

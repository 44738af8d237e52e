"""``freshet data`` through the command line."""

from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from freshet import Federation, data
from freshet.cli.data import SCHEMES, data_app
from freshet.config import resolve
from tests.data import builders as build

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def no_local_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No FRESHET_DATA, no system copies, an empty cache."""
    monkeypatch.setenv("FRESHET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FRESHET_DATA", raising=False)
    monkeypatch.setattr("freshet.data.sources.SYSTEM_ROOTS", ())


def test_list_shows_every_data_set() -> None:
    result = run(data_app, ["list"])
    assert result.exit_code == 0
    for name in ("digits", "fashion-mnist", "cifar10", "cifar100", "imdb", "tiny-imagenet", "shakespeare"):
        assert name in result.stdout


def test_get_and_check_digits() -> None:
    assert "1,438 training" in run(data_app, ["get", "digits"]).stdout
    result = run(data_app, ["check", "digits"])
    assert result.exit_code == 0
    assert "1,438" in result.stdout


def test_check_of_a_different_copy_fails(tmp_path: Path) -> None:
    build.write_fashion(tmp_path)
    result = run(data_app, ["check", "fashion-mnist", "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "differs" in result.stdout
    assert "not the published data set" in result.stderr


@pytest.mark.parametrize("devices", [1, 7, 100, 300])
def test_partition_draws_and_prints(tmp_path: Path, devices: int) -> None:
    picture = tmp_path / "p.png"
    result = run(
        data_app, ["partition", "digits", "--devices", str(devices), "--min-samples", "1", "--out", str(picture)]
    )
    assert result.exit_code == 0, result.output
    assert "Gini" in result.stdout
    with Image.open(picture) as image:
        assert image.width >= 1200
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["get", "mnist"], "data.name"),
        (["check", "cifar10"], "not on this machine"),
        (["get", "cifar10", "--data-dir", "/no/such/folder"], "does not exist"),
        (["partition", "digits", "--devices", "0"], "fleet.devices"),
        (["partition", "digits", "--concentration", "0"], "data.concentration"),
        (["partition", "digits", "--scheme", "banana"], "data.partition"),
        (["partition", "digits", "--out", "p.exe"], "--out"),
        (["partition", "digits", "--out", "/no/such/folder/p.png"], "--out"),
    ],
)
def test_mistakes_give_one_sentence_and_exit_code_2(arguments: list[str], says: str) -> None:
    result = run(data_app, arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_without_options_the_partition_is_that_of_a_run(tmp_path: Path) -> None:
    config = resolve({})
    result = run(data_app, ["partition", "digits", "--out", str(tmp_path / "p.png")])
    federation = Federation.from_config(config)
    sizes = sorted(len(shard) for shard in federation.shards)
    assert f"{config.data.partition}, concentration {config.data.concentration:g}, seed 0" in result.stdout
    assert f"{sum(sizes):,} on {config.fleet.devices} devices" in result.stdout
    assert f"{sizes[0]:,} / {np.median(sizes):,g} / {sizes[-1]:,}" in result.stdout


def test_the_defaults_in_the_help_are_those_of_a_run() -> None:
    config = resolve({})
    shown = {p.name: p.show_default for p in typer.main.get_command(data_app).commands["partition"].params}
    dealt = config.data
    assert shown["devices"] == str(config.fleet.devices) and shown["seed"] == str(config.run.seed)
    assert shown["scheme"] == dealt.partition and shown["concentration"] == str(dealt.concentration)
    assert shown["min_samples"] == str(dealt.min_samples)
    assert shown["shards_per_device"] == str(dealt.shards_per_device)
    assert SCHEMES.split(", ") == list(data.SCHEMES)

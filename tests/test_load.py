"""``freshet.load`` gives the result of a run back, from its directory alone."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import freshet
from freshet import Federation, RunError
from tests.conftest import linear, small


def built_in(tmp_path: Path, **given) -> freshet.Result:
    return small("fedavg", model=given.pop("model", "cnn"), **given).run(30, out=tmp_path / "run")


@pytest.mark.parametrize("network", ["cnn", "mlp"])
def test_a_built_in_network_comes_back_with_the_same_numbers(network: str, tmp_path: Path) -> None:
    """Kernels lie in memory in another order than in the file; and raw images go in."""
    result = built_in(tmp_path, model=network)
    again = freshet.load(result.directory)
    assert np.array_equal(again.weights, result.weights) and again.weights.dtype == np.float32
    assert (again.rows, again.summary) == (
        result.rows,
        json.loads((result.directory / "summary.json").read_text()),
    )
    x = torch.from_numpy(small("fedavg").dataset.x_test[:20].copy())
    assert torch.equal(again.module()(x), result.module()(x))
    assert again.time_to(0.0) == 0.0 and len(again.frame()) == len(again.rows)


def test_a_model_of_ones_own_has_to_be_given(tmp_path: Path) -> None:
    result = small("fedavg").run(30, out=tmp_path / "run")
    again = freshet.load(result.directory)
    assert np.array_equal(again.weights, result.weights)
    with pytest.raises(RunError, match=r"came from Python; pass it, as in result\.module\(build_model\)"):
        again.module()
    x = torch.rand(3, 1, 8, 8)
    expected = result.module()(x)
    for module in (again.module(linear), again.module(linear()), freshet.load(tmp_path / "run", linear).module()):
        assert torch.equal(module(x), expected)
    with pytest.raises(RunError, match="this model has 130 numbers, but the run's model has 650"):
        again.module(lambda: nn.Linear(64, 2))


def test_numbers_that_do_not_train_come_from_the_file(tmp_path: Path) -> None:
    def frozen(value: float) -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        for parameter in module[1].parameters():
            parameter.requires_grad = False
            parameter.data.fill_(value)
        return module

    result = small("fedavg", model=lambda: frozen(0.25)).run(30, out=tmp_path / "run")
    x = torch.rand(3, 1, 8, 8)
    again = freshet.load(result.directory, lambda: frozen(0.0))
    assert torch.equal(again.module()(x), result.module()(x))


def test_what_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    result = built_in(tmp_path, model="mlp")
    path = result.directory / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"\0\0\0\0")
    with pytest.raises(RunError, match=r"is not the model that summary\.json names"):
        freshet.load(result.directory)
    path.write_bytes(content[:40])
    with pytest.raises(RunError, match=r"model\.safetensors cannot be used"):
        freshet.load(result.directory)
    path.write_bytes(content)
    (result.directory / "summary.json").unlink()
    with pytest.raises(RunError, match=r"has no summary\.json: the run is still going, or was killed"):
        freshet.load(result.directory)


def test_a_built_in_network_on_data_from_python(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(80, 6)).astype(np.float32), rng.normal(size=(80, 2)).astype(np.float32)
    run = {"until": 30.0, "executor": "serial", "per_round": 2}
    mine = Federation("mlp", (x, y), (x, y), devices=4, task="regression", method="fedavg", run=run)
    result = mine.run(out=tmp_path / "run")
    module = freshet.load(tmp_path / "run").module()
    assert torch.equal(module(torch.from_numpy(x)), result.module()(torch.from_numpy(x)))

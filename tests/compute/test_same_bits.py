"""The executor never changes a result: the same log, byte for byte, and the same final weights."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from freshet import Federation

from .helpers import METHODS, UNTIL, assert_same_run, federation


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_processes_give_the_same_bits_as_one_process(serial_run, pool_of, tmp_path, method, workers):
    result = federation(method).run(UNTIL, out=tmp_path / "run", pool=pool_of(workers))
    assert_same_run(result, serial_run(method))


# ---- models that do unusual things


class WritesToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(1.5))


class DrawsRandomNumbers(WritesToItsInput):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + 0.1 * torch.randn_like(x))


class HasAnUnsavedBuffer(WritesToItsInput):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.layer(x - self.mean)


class ReplacesItsBuffers(WritesToItsInput):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("hidden", torch.zeros(8), persistent=False)
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.hidden = self.hidden + self.mean
            self.later = self.hidden if self.later is None else self.later + self.mean
        return self.layer(x - self.mean - 0.01 * self.hidden)


class HasAnExpandedBuffer(WritesToItsInput):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 8).expand(4, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.mask[0])


MODELS = [
    WritesToItsInput,
    DrawsRandomNumbers,
    HasAnUnsavedBuffer,
    ReplacesItsBuffers,
    HasAnExpandedBuffer,
]


@pytest.mark.parametrize("model", MODELS)
def test_unusual_models_give_the_same_bits_and_leave_the_users_data_unchanged(model, pool, tmp_path):
    rng = np.random.default_rng(0)
    train = rng.normal(size=(400, 8)).astype(np.float32), rng.integers(0, 3, 400)
    test = rng.normal(size=(100, 8)).astype(np.float32), rng.integers(0, 3, 100)
    before = train[0].copy(), test[0].copy()
    traces = []
    for name, workers in (("serial", None), ("processes", pool)):
        federation = Federation(
            model,
            train,
            test,
            devices=10,
            method="fedavg",
            fleet={"fastest": 3.0, "ratio": 4.0, "time": "trip"},
            run={"executor": "serial", "per_round": 4, "eval_every": 5.0},
        )
        result = federation.run(60, out=tmp_path / name, pool=workers)
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        traces.append(([row["loss"] for row in rows], result.summary["weights_sha256"]))
    assert traces[0] == traces[1]
    assert len(set(traces[0][0])) > 3, "the model trains and is tested"
    np.testing.assert_array_equal(train[0], before[0])
    np.testing.assert_array_equal(test[0], before[1])
    if model is ReplacesItsBuffers:
        assert np.abs(result.weights[27:35]).max() > 0, "the replaced buffer is uploaded"

"""FedRep: head and body in turn against a twin in float64, and runs."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from freshet import Federation
from freshet.config import resolve
from freshet.errors import ConfigError
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.network import initial_module

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(60, 4)).astype(np.float32), RNG.integers(0, 3, 60)
SIZES = (10, 20, 30)
BOUNDS = np.cumsum([0, *SIZES])


class Net(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


def federation(epochs: int = 4, body_epochs: int = 1, **training: Any) -> Federation:
    return Federation(
        Net,
        (X, Y),
        (X[:20], Y[:20]),
        method={"name": "fedrep", "body_epochs": body_epochs},
        training={"epochs": epochs, "lr": 0.2, "batch_size": 100, "schedule": "constant", **training},
        run={"rounds": 3, "per_round": 3, "executor": "serial", "seed": 2},
        shards=[range(BOUNDS[k], BOUNDS[k + 1]) for k in range(3)],
    )


def twin(epochs: int, body_epochs: int, momentum: float) -> dict[str, Tensor]:
    """Three rounds; momentum starts at zero in every trip, separately for head and body."""
    start = initial_module(Net, 2).double()
    body, heads = copy.deepcopy(start.body.state_dict()), [copy.deepcopy(start.head.state_dict()) for _ in SIZES]
    for _ in range(3):
        bodies = []
        for device in range(3):
            net = Net().double()
            net.body.load_state_dict(body)
            net.head.load_state_dict(heads[device])
            rows = slice(BOUNDS[device], BOUNDS[device + 1])
            steppers = [torch.optim.SGD(part.parameters(), 0.2, momentum) for part in (net.head, net.body)]
            for epoch in range(epochs):
                net.zero_grad()
                cross_entropy(net(torch.from_numpy(X[rows]).double()), torch.from_numpy(Y[rows])).backward()
                steppers[epoch >= epochs - body_epochs].step()
            bodies.append(net.body.state_dict())
            heads[device] = copy.deepcopy(net.head.state_dict())
        body = {name: sum(n * each[name] for n, each in zip(SIZES, bodies, strict=True)) / 60 for name in body}
    return body


@pytest.mark.parametrize(("epochs", "body_epochs"), [(4, 1), (5, 3), (1, 1), (2, 2)])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_the_representation_matches_the_twin(tmp_path: Path, epochs: int, body_epochs: int, momentum: float) -> None:
    found = federation(epochs, body_epochs, momentum=momentum).run(out=tmp_path / "run")
    tensors, expected = load_file(found.directory / "model.safetensors"), twin(epochs, body_epochs, momentum)
    assert set(tensors) == {"body.weight", "body.bias"}
    for name, tensor in tensors.items():
        np.testing.assert_allclose(tensor, expected[name.removeprefix("body.")], rtol=2e-5, atol=1e-6)
    assert audit(RunDirectory(found.directory)).passed


def test_the_head_is_the_last_layer_unless_named() -> None:
    assert federation().config.model.local == ["last"]
    assert resolve({"method": {"name": "fedrep"}, "model": {"local": ["*.bias"]}}).model.local == ["*.bias"]
    with pytest.raises(ConfigError, match=r"model\.local: fedrep needs a part that stays"):
        Federation({"local": []}, method="fedrep", devices=4)


def test_devices_with_few_classes_gain(tmp_path: Path) -> None:
    def devices(method: str) -> float:
        run = {"rounds": 6, "per_round": 4, "evaluate_devices": "end", "executor": "serial"}
        data, training = {"partition": "by_label"}, {"epochs": 3, "lr": 0.1}
        made = Federation(method=method, data=data, devices=8, training=training, run=run)
        found: float = made.run(out=tmp_path / method).rows[-1]["devices_median"]
        return found

    assert devices("fedrep") > devices("fedavg")

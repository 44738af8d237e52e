"""A Flower client trains in one piece: the same bits as the built-in loop, without merges in mid-training."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from freshet import ConfigError, RunError
from freshet.integrations.flower_client import FlowerApp, FlowerClient, load_arrays
from tests.integrations.helpers import METHODS as ALL_METHODS
from tests.integrations.helpers import build, events, run_on_one_and_two, samples
from tests.training.test_own_loop import STEPS, with_loop
from tests.training.test_trainer import mlp, trip_input

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'freshet-fl[flower]'")
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

METHODS = [{"name": "fedasmu", "adaptive_device": False}, *ALL_METHODS[1:]]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


def train(model: nn.Module, batches: Any, config: Any) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for _ in range(config["epochs"]):
        for x, y in batches:
            if len(y) == 1:
                continue
            optimiser.zero_grad()
            cross_entropy(model(x), y).backward()
            optimiser.step()


class Client(NumPyClient):
    """As people write them: the network is its own, arrays come and go."""

    def __init__(self, model: nn.Module, data: Any) -> None:
        self.network, self.data = net(), data

    def fit(self, parameters: Any, config: Any) -> Any:
        names = self.network.state_dict()
        self.network.load_state_dict({k: torch.tensor(v) for k, v in zip(names, parameters, strict=True)})
        train(self.network, self.data.batches(), config)
        arrays = [value.numpy() for value in self.network.state_dict().values()]
        return arrays, len(self.data), {"seen": config["extra"], "name": "text"}


app = ClientApp()


@app.train()
def _train(message: Message, context: Any) -> Message:
    network = net()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    place, parts = context.node_config["partition-id"], context.node_config["num-partitions"]
    x, y = (torch.from_numpy(each[place::parts]) for each in samples(240))
    config = message.content["config"]
    train(network, list(zip(x.split(16), y.split(16), strict=True)), config)
    metrics = MetricRecord({"num-examples": len(y), "steps": config["epochs"] * -(-len(y) // 16)})
    return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)


@pytest.mark.parametrize("method", METHODS)
def test_a_client_with_three_methods_on_one_process_and_on_two_workers(method, pool, tmp_path):
    result = run_on_one_and_two(net, FlowerClient(Client, {"extra": 4}), method, pool, tmp_path)
    assert {row.get("train_seen", 4.0) for row in events(result) if row["kind"] == "upload"} == {4.0}


@pytest.mark.parametrize("method", METHODS)
def test_a_message_app_with_three_methods_on_one_process_and_on_two_workers(method, pool, tmp_path):
    result = run_on_one_and_two(net, FlowerApp(app), method, pool, tmp_path)
    assert any("train_num-examples" in row for row in events(result) if row["kind"] == "upload")


def test_fit_is_the_built_in_loop_to_the_bit():
    class Plain(Client):
        def __init__(self, model: nn.Module, data: Any) -> None:
            self.network, self.data = mlp(), data

    mine = with_loop(FlowerClient(Plain, {"extra": 0})).train(trip_input())
    builtin = with_loop(None, fast=False).train(trip_input())
    assert mine.weights.tobytes() == builtin.weights.tobytes() and mine.steps == builtin.steps


def test_steps_are_those_that_the_client_counts_or_a_guess():
    class Still(NumPyClient):
        def __init__(self, metrics: Any) -> None:
            self.metrics = metrics

        def fit(self, parameters: Any, config: Any) -> Any:
            return parameters, 1, self.metrics

    for metrics, steps in ((None, 3 * STEPS), ({"steps": 5}, 5)):
        loop = FlowerClient(lambda *_, metrics=metrics: Still(metrics))
        assert with_loop(loop).train(trip_input()).steps == steps


def test_a_method_that_merges_in_mid_training_is_refused():
    for loop in (FlowerClient(Client), FlowerApp(app)):
        with pytest.raises(ConfigError, match=r"one piece; .* adaptive_device = false"):
            build(net, loop, "fedasmu")


def test_arrays_of_another_model_are_one_sentence():
    with pytest.raises(RunError, match=r"returned arrays of shapes \[\(2,\)\]"):
        load_arrays(mlp(), [[1.0, 2.0]])


def test_an_app_without_arrays_is_one_sentence():
    silent = ClientApp()

    @silent.train()
    def nothing(message: Message, context: Any) -> Message:
        return Message(RecordDict(), reply_to=message)

    with pytest.raises(RunError, match="returned no arrays on device 0"):
        with_loop(FlowerApp(silent)).train(trip_input())

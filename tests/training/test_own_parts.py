"""Parts of a model that stay on the device: training, memory, evaluation, and what travels."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import freshet
from freshet import Device, Federation
from freshet.core.messages import Assignment, Slot
from freshet.core.method import OWN_PARTS, LocalRule
from freshet.data.dataset import from_arrays
from freshet.errors import ConfigError
from freshet.flower import wire
from freshet.flower.device import DeviceFolder
from freshet.training.batches import FederatedData
from freshet.training.network import FlatModel, initial_module, own_names, with_own_parts
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput
from freshet.training.trip import LocalTrip
from tests.sim.helpers import Crash, CrashError, outputs

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(60, 4)).astype(np.float32), RNG.integers(0, 3, 60)


class Net(nn.Module):
    """A body with a norm layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def names(patterns: list[str]) -> list[str]:
    return sorted(own_names(with_own_parts(Net, patterns)()))


# ---- which parts


def test_patterns_match_names_classes_and_the_last_layer() -> None:
    norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert names(["head.*"]) == names(["last"]) == ["head.bias", "head.weight"]
    assert names(["BatchNorm*"]) == names(["body.1.*"]) == sorted(f"body.1.{name}" for name in norm)
    assert names(["*.bias", "head.weight"]) == ["body.0.bias", "body.1.bias", "head.bias", "head.weight"]


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["hed.*"], "'hed.*' matches no parameter of the model, which has body.0.weight"),
        (["*"], "leave some that travel"),
    ],
)
def test_impossible_patterns_are_one_sentence(patterns: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FlatModel(with_own_parts(Net, patterns)())
    assert caught.value.key == "model.local" and words in str(caught.value)


def test_what_travels_and_what_stays_are_apart() -> None:
    flat = FlatModel(with_own_parts(Net, ["BatchNorm*"])())
    assert [entry.name for entry in flat.layout.entries] == ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]
    assert flat.layout.size == flat.layout.learnable == 30 + 21
    assert (flat.own.size, flat.own.learnable, flat.own.floats) == (6 * 4 + 1, 12, 24)
    shared, own = flat.dump(), flat.dump_own()
    flat.module(torch.from_numpy(X))  # the norm layer moves its statistics and its counter
    assert np.array_equal(flat.dump(), shared)
    assert flat.dump_own()[-1] == own[-1] + 1
    flat.load(shared + 1)  # another global model leaves the device's own parts as they are
    assert flat.dump_own()[-1] == own[-1] + 1
    flat.load_own(None)
    assert np.array_equal(flat.dump_own(), own)


# ---- training

LOCAL = ["last", "BatchNorm*"]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heavy": {"momentum": 0.9, "nesterov": True},
    "decay": {"weight_decay": 0.1},
    "clipped": {"clip": 0.05},
    "adam": {"optimiser": "adam"},
    "adamw": {"optimiser": "adamw", "weight_decay": 0.1},
}


def trainer_of(patterns: list[str], **training: Any) -> Trainer:
    data = FederatedData.of(from_arrays("t", (X, Y), (X[:20], Y[:20])), [np.arange(60)])
    options = TrainingOptions(**{"epochs": 2, "batch_size": 20, "lr": 0.1, **training})
    return Trainer(with_own_parts(Net, patterns), data, options, seed=3)


def state_after(trainer: Trainer, trips: int) -> dict[str, Tensor]:
    weights, memory = trainer.flat.dump(), {}
    for number in range(1, trips + 1):
        work = TripInput(Assignment(0, number, 1, 1, weights, 2, 0.1), (), (), LocalRule(), memory)
        weights, memory = trainer.train(work)[0], trainer.trip.memory  # type: ignore[union-attr]
    return {name: tensor.clone() for name, tensor in trainer.flat.module.state_dict().items()}


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_device_alone_trains_the_same_model_wherever_its_parts_are(setting: str) -> None:
    """With one device nothing depends on what travels: the split model equals the whole one, over three trips."""
    split, whole = (state_after(trainer_of(patterns, **SETTINGS[setting]), 3) for patterns in (LOCAL, []))
    for name, tensor in whole.items():
        torch.testing.assert_close(split[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_a_diverged_trip_keeps_the_parts_from_before() -> None:
    trainer = trainer_of(["last"])
    memory = {OWN_PARTS: np.full(21, 0.5, np.float32)}
    work = TripInput(Assignment(0, 1, 1, 1, trainer.flat.dump(), 2, 1e30), (), (), LocalRule(), memory)
    outcome = trainer.train(work)
    assert outcome.diverged and outcome.memory is memory


@pytest.mark.parametrize("setting", ["plain", "heavy", "adam"])
def test_a_paused_trip_keeps_its_own_parts(setting: str) -> None:
    class Asks(LocalRule):
        def plan(self, *_: Any) -> Slot | None:
            return Slot(2, "fixed")

    def begin(trainer: Trainer) -> LocalTrip:
        assignment = Assignment(0, 1, 1, 1, initial, 3, 0.1)
        return LocalTrip(trainer, assignment, [Slot(2, "fixed")], Asks(), {})

    trainer = trainer_of(LOCAL, **SETTINGS[setting])
    initial = trainer.flat.dump()
    trip = begin(trainer)
    trip.to_slot()
    saved = copy.deepcopy(trip.save())
    trip.merge(None)
    expected = trip.finish()
    other = begin(trainer_of(LOCAL, **SETTINGS[setting]))
    other.restore(saved)
    other.merge(None)
    found = other.finish()
    assert np.array_equal(found.weights, expected.weights)
    assert np.array_equal(found.memory[OWN_PARTS], expected.memory[OWN_PARTS])


# ---- runs


def federation(**settings: Any) -> Federation:
    tables: dict[str, Any] = {
        "method": "fedavg",
        "local": ["last"],
        "training": {"epochs": 2, "lr": 0.2, "batch_size": 100, "schedule": "constant"},
        "run": {"rounds": 3, "per_round": 3, "executor": "serial", "seed": 2},
        "shards": [range(20), range(20, 40), range(40, 60)],
    }
    return Federation(Plain, (X, Y), (X[:20], Y[:20]), **{**tables, **settings})


class Plain(nn.Module):
    """Without a norm layer, so that full batches do not depend on the order of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


def test_fedper_matches_a_plain_loop(tmp_path: Path) -> None:
    """FedAvg of the body; each device goes on with its own head (Arivazhagan et al., 2019)."""
    found = federation().run(out=tmp_path / "run")
    start = initial_module(Plain, 2).double()
    body, heads = copy.deepcopy(start.body.state_dict()), [copy.deepcopy(start.head.state_dict()) for _ in range(3)]
    for _ in range(3):
        bodies = []
        for device in range(3):
            net = Plain().double()
            net.body.load_state_dict(body)
            net.head.load_state_dict(heads[device])
            x, y = torch.from_numpy(X[20 * device : 20 * device + 20]).double(), torch.from_numpy(Y)[20 * device :][:20]
            for _ in range(2):
                net.zero_grad()
                cross_entropy(net(x), y).backward()
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter -= 0.2 * parameter.grad  # type: ignore[operator]
            bodies.append(net.body.state_dict())
            heads[device] = copy.deepcopy(net.head.state_dict())
        body = {name: sum(each[name] for each in bodies) / 3 for name in body}
    tensors = load_file(found.directory / "model.safetensors")
    assert set(tensors) == {"body.weight", "body.bias"}  # heads are not in the model of the server
    for name, tensor in tensors.items():
        np.testing.assert_allclose(tensor, body[name.removeprefix("body.")], rtol=1e-5, atol=1e-6)


def test_parts_that_stay_are_not_counted(tmp_path: Path) -> None:
    row = federation().run(out=tmp_path / "run").rows[-1]
    assert row["bytes_up"] == row["uploads"] * 4 * 25  # the body has 25 parameters, the head 18


def test_runs_with_workers_and_resumed_runs_have_the_same_bits(tmp_path: Path) -> None:
    def settings(executor: str) -> dict[str, Any]:
        length = {"until": 120.0, "per_round": 2, "in_flight": 3, "eval_every": 20.0, "checkpoint_every": 20.0}
        run = {**length, "executor": executor, "workers": 2, "seed": 2, "evaluate_devices": 1}
        return {"run": run, "method": "fedasync", "fleet": {"loss": 0.2}, "training": {"epochs": 2, "lr": 0.2}}

    federation(**settings("serial")).run(out=tmp_path / "one")
    federation(**settings("processes")).run(out=tmp_path / "two")
    with pytest.raises(CrashError):
        federation(**settings("serial")).run(out=tmp_path / "three", observers=[Crash(30)])
    federation(**settings("serial")).resume(tmp_path / "three")
    assert b"devices" in outputs(tmp_path / "one")[0]
    assert outputs(tmp_path / "one") == outputs(tmp_path / "two") == outputs(tmp_path / "three")


def test_devices_are_evaluated_with_their_own_parts(tmp_path: Path) -> None:
    """Every device has one class only: a head of its own is always right there, an untrained one is not."""
    order = np.argsort(Y, kind="stable")
    shards = [order[Y[order] == label] for label in range(3)]
    tests = [shard[:5] for shard in (np.flatnonzero(Y[:20] == label) for label in range(3))]
    found = federation(shards=shards, test_shards=tests, training={"epochs": 20, "lr": 0.5})
    assert found.config.run.evaluate_devices == "end"
    result = found.run(out=tmp_path / "run")
    assert result.rows[-1]["devices_worst"] == 1.0 > result.accuracy[-1]


def test_a_run_can_be_loaded_and_its_module_rebuilt(tmp_path: Path) -> None:
    made = federation().run(out=tmp_path / "run")
    for module in (made.module(), freshet.load(tmp_path / "run", Plain).module()):
        tensors = load_file(tmp_path / "run" / "model.safetensors")
        np.testing.assert_array_equal(module.body.weight.detach(), tensors["body.weight"])  # type: ignore[union-attr]
        assert torch.equal(module.head.weight, initial_module(Plain, 2).head.weight)  # type: ignore[union-attr]


def test_a_built_in_network_names_its_parts_in_the_configuration(tmp_path: Path) -> None:
    model = {"name": "digits", "norm": "batch", "local": ["BatchNorm*"]}
    found = Federation(model, devices=4, method="fedavg", run={"rounds": 1, "per_round": 2, "executor": "serial"})
    assert found.assembly.layout.size == found.assembly.layout.learnable  # FedBN: no statistics travel
    assert found.run(out=tmp_path / "run").summary["status"] == "finished"
    assert freshet.load(tmp_path / "run").module() is not None


def test_a_deployed_device_keeps_its_parts_in_its_folder(tmp_path: Path) -> None:
    config, device = federation().config, Device(load=lambda node: (X[:20], Y[:20]), model=Plain)
    node = {"folder": str(tmp_path)}
    memories = []
    for trip in (1, 2):
        assignment = Assignment(1, trip, 1, 1, np.zeros(25, np.float32), 2, 0.1)
        order = wire.Order(assignment, "session", f"ticket {trip}", wire.FreshChannel("none"))
        answer = device.handle(order, config, node, 7)
        assert answer.upload is not None and answer.upload.weights.shape == (25,)
        memories.append(np.array(DeviceFolder(tmp_path, "session").read().memory[OWN_PARTS]))
    assert memories[0].shape == (18,) and not np.array_equal(*memories)

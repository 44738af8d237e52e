"""SCAFFOLD: the device's rule, the effect of its controls, their size, and losses that leave no trace in them."""

from typing import Any

import numpy as np
import pytest
from torch import nn

from freshet.core.layout import Layout
from freshet.core.messages import Assignment
from freshet.core.method import LocalRule, Memory
from freshet.core.server import Server
from freshet.core.vectors import Vector
from freshet.data.dataset import from_arrays
from freshet.methods.scaffold import ControlledRule
from freshet.training.batches import FederatedData
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput
from freshet.training.trip import TripOutcome
from tests.methods.conftest import Simulate
from tests.methods.helpers import (
    CLASSES,
    FEATURES,
    MODELS,
    SAMPLES,
    WEIGHTS,
    Device,
    close,
    regression_data,
    regression_weights,
    same,
    server_of,
    upload_of,
)
from tests.twins import local as local_twins
from tests.twins.extra import scaffold_local

RULE = ControlledRule()
FLAT = Layout.build([("weight", (WEIGHTS,), "learnable")])


def control(seed: int) -> Vector:
    return 0.3 * regression_weights(seed)


@pytest.mark.parametrize("training", [{}, {"weight_decay": 0.05}])
def test_trip_matches_the_twin_with_option_two(training: dict[str, float]) -> None:
    device, memory, c_i = Device(**training), {}, np.zeros(WEIGHTS)
    for trip in (1, 2, 3):
        x, c = regression_weights(trip), control(trip)
        instruction = {"heard": trip - 1}
        outcome = device.train(RULE, x, trip, memory, instruction, vectors={"c": c})
        y, following = scaffold_local(x, c, c_i, device.x, device.y, device.batches(trip), 0.2, **training)
        close(outcome.weights, y, 3e-6)
        close(outcome.vectors["change"], following - c_i, 1e-5)
        memory, c_i = outcome.memory, following


def test_the_first_trip_without_controls_is_plain_training() -> None:
    device, w = Device(), regression_weights(1)
    zero = {"c": np.zeros(WEIGHTS, np.float32)}
    same(device.train(RULE, w, instruction={"heard": 0}, vectors=zero).weights, device.train(LocalRule(), w).weights)


@pytest.mark.parametrize("training", [{"momentum": 0.9}, {"optimiser": "adam"}])
def test_control_is_a_gradient_under_every_optimiser(training: dict[str, Any]) -> None:
    """On one full batch the control is the gradient at x; the displacement of that optimiser is not."""
    device, w = Device(epochs=1, batch=SAMPLES, **training), regression_weights(1)
    zero = {"c": np.zeros(WEIGHTS, np.float32)}
    outcome = device.train(RULE, w, instruction={"heard": 0}, vectors=zero)
    close(outcome.vectors["change"], local_twins.gradient(w, device.x, device.y), 1e-6)


class Pair:
    """Two devices with different labels that train long, so FedAvg drifts."""

    def __init__(self, method: str) -> None:
        self.x, self.y = regression_data()
        shards = np.array_split(np.argsort(self.y, kind="stable"), 2)
        data = FederatedData.of(from_arrays("t", (self.x, self.y), (self.x, self.y)), shards)
        options = TrainingOptions(epochs=10, batch_size=SAMPLES, lr=0.1, weight_decay=0.1)
        self.trainer = Trainer(lambda: nn.Linear(FEATURES, CLASSES), data, options, seed=4)
        counts = [len(shard) for shard in shards]
        self.server = server_of(method, regression_weights(1), samples=[sum(counts) // 2] * 2, layout=FLAT)
        self.shards, self.memories = shards, [dict[str, Any]() for _ in shards]

    def round(self) -> None:
        for assignment in self.server.trigger([0, 1]):
            outcome = self.trainer.train(
                TripInput(assignment._replace(epochs=10), (), (), self.server.rule, self.memories[assignment.device])
            )
            self.memories[assignment.device] = outcome.memory
            self.server.upload(outcome.upload(assignment))

    def slope(self) -> float:
        """Return the length of the gradient of the mean loss; 0 at the optimum."""
        w = self.server.weights
        parts = [local_twins.gradient(w, self.x[shard], self.y[shard]) for shard in self.shards]
        return float(np.linalg.norm(np.mean(parts, axis=0) + 0.1 * w))


def test_scaffold_finds_the_optimum_that_fedavg_drifts_away_from() -> None:
    slopes = {}
    for method in ("fedavg", "scaffold"):
        pair = Pair(method)
        for _ in range(150):
            pair.round()
        slopes[method] = pair.slope()
    assert slopes["fedavg"] > 0.01
    assert slopes["scaffold"] < 1e-5


# ---- bytes


def test_messages_are_twice_as_large_as_fedavgs() -> None:
    sizes: dict[str, tuple[int, int, int]] = {}
    for method in ("fedavg", "scaffold"):
        server = server_of(method, regression_weights(1), devices=2, layout=FLAT)
        (assignment,) = server.trigger([0])
        upload = upload_of(server, 0, regression_weights(2))
        sizes[method] = (assignment.nbytes, upload.nbytes, server.upload_bytes)
    assert sizes["fedavg"] == (4 * WEIGHTS, 4 * WEIGHTS, 4 * WEIGHTS)
    assert sizes["scaffold"] == (8 * WEIGHTS, 8 * WEIGHTS, 8 * WEIGHTS)


def test_run_counts_twice_fedavgs_bytes(simulate: Simulate) -> None:
    plain, controlled = (simulate(name, None, 20.0, model={"name": "mlp"}).summary for name in ("fedavg", "scaffold"))
    for way, messages in (("bytes_up", "uploads"), ("bytes_down", "trips")):
        assert controlled[way] / controlled[messages] == 2 * plain[way] / plain[messages] > 0


# ---- what is lost or refused


def next_control(memory: Memory, heard: int) -> Vector:
    """Return the control with which a device starts its next trip."""
    found = memory.get("next" if memory.get("trip") == heard else "c")
    return np.zeros(WEIGHTS, np.float32) if found is None else found


def arrive(server: Server, assignment: Assignment, outcome: TripOutcome, fate: float) -> None:
    upload = outcome.upload(assignment)
    if fate < 0.25:
        server.drop_trip(assignment.device, assignment.trip, "upload lost")
    elif fate < 0.5:
        vectors = {"change": np.full(WEIGHTS, np.nan, np.float32)} if fate < 0.4 else {}
        (event, *_) = server.upload(upload._replace(vectors=vectors))
        assert type(event).__name__ == "Rejected"
    else:
        server.upload(upload)


@pytest.mark.parametrize("computed", [True, False])
def test_server_control_is_the_mean_of_the_devices_despite_losses(computed: bool) -> None:
    """This also holds if trips with a lost upload are not computed, as in a simulation."""
    server = server_of("scaffold", regression_weights(1), devices=6, per_round=3, layout=FLAT)
    device, rng = Device(), np.random.default_rng(4)
    memories: list[dict[str, Any]] = [{} for _ in range(6)]
    for _ in range(12):
        fates = rng.random(3)
        for assignment, fate in zip(
            server.trigger(sorted(rng.choice(6, 3, replace=False).tolist())), fates, strict=True
        ):
            k = assignment.device
            trip = assignment._replace(device=0)
            outcome = device.trainer.train(TripInput(trip._replace(epochs=2), (), (), RULE, memories[k]))
            memories[k] = outcome.memory if computed or fate >= 0.25 else memories[k]
            arrive(server, assignment, outcome, fate)
        heard = server.method.state.heard
        c_i = [next_control(memory, heard.get(k, 0)) for k, memory in enumerate(memories)]
        close(server.method.state.c, np.mean(c_i, axis=0), 1e-6)
    assert np.linalg.norm(server.method.state.c) > 0.01
    assert len(server.method.state.heard) == 6


def test_upload_without_its_change_is_refused() -> None:
    server = server_of("scaffold")
    before = server.method.state.c
    server.trigger([0])
    (event, _) = server.upload(upload_of(server, 0, MODELS[0], vectors={}))
    assert event.reason == "must send the vectors ['change'] with its model, and no others"
    same(server.method.state.c, before)
    assert server.method.state.heard == {}

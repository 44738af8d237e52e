"""Helpers for the tests of the baselines: scripted servers, and one device that really trains."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import nn

from freshet.core import events
from freshet.core.events import Event, Record
from freshet.core.layout import Layout
from freshet.core.messages import NO_VECTORS, NOTHING, Assignment, Number, Upload
from freshet.core.method import LocalRule, Memory, MethodContext
from freshet.core.server import Server
from freshet.core.streams import stream
from freshet.core.vectors import Vector
from freshet.data.dataset import from_arrays
from freshet.methods import class_and_preset, method_options
from freshet.training.batches import FederatedData
from freshet.training.optimisers import constant
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput
from freshet.training.trip import TripOutcome

ASYNCHRONOUS = (
    "ace",
    "asofed",
    "asyncfeded",
    "ca2fl",
    "fadas",
    "fedac",
    "fedasync",
    "fedat",
    "fedbuff",
    "fedcompass",
    "fedfa",
    "fedsa",
    "fedstaleweight",
    "masfl",
    "pisces",
    "port",
    "safa",
)
SYNCHRONOUS = (
    "ditto",
    "fedacg",
    "fedavg",
    "feddyn",
    "fedexp",
    "fedlws",
    "fednova",
    "fedopt",
    "fedprox",
    "mifa",
    "moon",
    "scaffold",
)
LEARNABLE, BUFFERS, COUNTERS = 18, 3, 2
SIZE = LEARNABLE + BUFFERS + COUNTERS
#: Two layers, each with a weight and a bias, and buffers and counters.
LAYOUT = Layout.build(
    [
        ("a.weight", (2, 3), "learnable"),
        ("a.bias", (2,), "learnable"),
        ("b.weight", (4, 2), "learnable"),
        ("b.bias", (2,), "learnable"),
        ("mean", (BUFFERS,), "buffer"),
        ("count", (COUNTERS,), "counter"),
    ],
    [["a.weight", "a.bias"], ["b.weight", "b.bias"]],
)
TWIN_LAYOUT = {"learnable": LEARNABLE, "counters": COUNTERS}


def vector(seed: int) -> Vector:
    """Return a random model: normal entries, and counters that are whole numbers."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal(SIZE).astype(np.float32)
    out[-COUNTERS:] = rng.integers(0, 50, COUNTERS)
    return out


MODELS = {device: vector(100 + device) for device in range(4)}
#: The report that each method requires with an upload.
REPORTS: dict[str, dict[str, float]] = {"asofed": {"r": 1.0, "seconds": 0.0}, "pisces": {"loss": 1.0}}
UNEQUAL = [5, 20, 1, 7, 11, 3, 40, 13]


def server_of(
    name: str,
    w0: Vector | None = None,
    *,
    samples: list[int] | None = None,
    devices: int = 8,
    epochs: int = 1,
    per_round: int = 4,
    layout: Layout = LAYOUT,
    norm_gate: float | None = None,
    **options: Any,
) -> Server:
    """Return a server of a method. Devices have 10 samples each by default.

    The norm gate is off by default, because random vectors are not training steps.
    """
    method, _ = class_and_preset(name)
    counts = np.array(samples or [10] * devices, np.int64)
    context = MethodContext(len(counts), counts, epochs, per_round, layout, seed=3)
    start = vector(1) if w0 is None else w0
    return Server(method(method_options(name, options), context), context, start, constant(0.1), gate=norm_gate)


def send(server: Server, device: int, weights: Vector, **report: float) -> list[Record]:
    """Upload this model as the device in flight and return the log records."""
    given = report or REPORTS.get(server.method.about.name, {})
    return logged(server.upload(upload_of(server, device, weights, report=given)))


def upload_of(
    server: Server,
    device: int,
    weights: Vector,
    steps: int = 1,
    report: Mapping[str, Number] = NOTHING,
    vectors: Mapping[str, Vector] | None = None,
) -> Upload:
    """Return the upload of a device in flight. Its vectors are zero unless given."""
    active, n = server.active_trips[device], server.context.layout.learnable
    sent = {name: np.zeros(n, np.float32) for name in server.rule.sends} if vectors is None else vectors
    return Upload(device, active.trip, active.base, weights, steps, report, (), sent)


def logged(raised: Iterable[Event]) -> list[Record]:
    """Return the log records of events."""
    return [events.record(event) for event in raised]


def column(aggregate: Record, key: str) -> list[Any]:
    """Return one figure of every contribution to a logged aggregation."""
    return [part[key] for part in aggregate["contributions"]]


def fly(server: Server, device: int, weights: Vector) -> list[Record]:
    """Trigger a device and let it upload at once."""
    server.trigger([device])
    return send(server, device, weights)


def hold_round(server: Server, uploads: dict[int, Vector]) -> Record:
    """Run one synchronous round and return its last event, the aggregation."""
    server.trigger(sorted(uploads))
    records: list[Record] = []
    for device, weights in uploads.items():
        records = send(server, device, weights)
    return records[-1]


def arrivals(server: Server, uploads: dict[int, Vector]) -> Vector:
    """Let all devices start from the same model and upload in turn."""
    for device in uploads:
        server.trigger([device])
    for device, weights in uploads.items():
        send(server, device, weights)
    return server.weights


def fedavg(uploads: dict[int, Vector], samples: list[int]) -> Vector:
    server = server_of("fedavg", samples=samples)
    hold_round(server, uploads)
    return server.weights


def close(a: Any, b: Any, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def same(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(a, b)


# ---- one device on softmax regression, the model of tests.twins.local

FEATURES, CLASSES, SAMPLES, BATCH = 5, 3, 23, 10
WEIGHTS = CLASSES * (FEATURES + 1)


def regression_data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, SAMPLES)


class Device:
    """Trains ``nn.Linear`` on random samples; ``batches`` gives the twin the same order."""

    def __init__(self, lr: float = 0.2, epochs: int = 3, batch: int = BATCH, **training: float) -> None:
        self.x, self.y = regression_data()
        data = FederatedData.of(from_arrays("t", (self.x, self.y), (self.x, self.y)), [np.arange(SAMPLES)])
        self.lr, self.epochs, self.batch = lr, epochs, batch
        options = TrainingOptions(epochs=epochs, batch_size=batch, lr=lr, **training)
        self.trainer = Trainer(lambda: nn.Linear(FEATURES, CLASSES), data, options, seed=4)

    def train(
        self,
        rule: LocalRule,
        weights: Vector,
        trip: int = 1,
        memory: Memory | None = None,
        instruction: Mapping[str, Number] = NOTHING,
        seconds: float | None = None,
        vectors: Mapping[str, Vector] = NO_VECTORS,
    ) -> TripOutcome:
        assignment = Assignment(0, trip, 1, 1, weights, self.epochs, self.lr, instruction, vectors)
        return self.trainer.train(TripInput(assignment, (), (), rule, memory or {}, seconds))

    def batches(self, trip: int = 1) -> list[list[np.ndarray]]:
        order = stream(4, "batches", 0, trip)
        cuts = list(range(self.batch, SAMPLES, self.batch))
        return [np.split(order.permutation(SAMPLES), cuts) for _ in range(self.epochs)]


def regression_weights(seed: int) -> Vector:
    return np.random.default_rng(seed).normal(size=WEIGHTS).astype(np.float32)

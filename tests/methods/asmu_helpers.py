"""Helpers for the tests of FedASMU and FedSSMU: a small smooth network, its loss in float64, a scripted server."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from freshet.core import events
from freshet.core.events import Event, Record, Triggered
from freshet.core.layout import Layout
from freshet.core.messages import Fresh, Merge, Request, Slot, Upload
from freshet.core.method import Method, MethodContext
from freshet.core.server import Server
from freshet.methods import class_and_preset, method_options
from freshet.training.network import FlatModel
from freshet.training.optimisers import constant

FEATURES, CLASSES, SAMPLES = 5, 3, 24


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def samples(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    return x, (np.abs(x[:, 0]) + x[:, 1] > 0.8).astype(np.int64) + (x[:, 2] > 0).astype(np.int64)


class SmoothLoss:
    """The true loss of the network on all samples, in float64, as a function of the flat weights."""

    def __init__(self) -> None:
        self.flat = FlatModel(network())
        self.module = network().double()
        x, y = samples()
        self.x, self.y = torch.from_numpy(x).double(), torch.from_numpy(y)

    def __call__(self, w: np.ndarray) -> float:
        return float(self._loss(torch.from_numpy(np.asarray(w, np.float64))))

    def gradient(self, w: np.ndarray) -> np.ndarray:
        vector = torch.from_numpy(np.asarray(w, np.float64)).requires_grad_()
        (gradient,) = torch.autograd.grad(self._loss(vector), vector)
        return gradient.numpy()

    def _loss(self, vector: torch.Tensor) -> torch.Tensor:
        state = {e.name: vector[e.span].view(e.shape) for e in self.flat.layout.entries}
        return nn.functional.cross_entropy(functional_call(self.module, state, (self.x,)), self.y)


def central(function: Any, at: float, h: float = 1e-4) -> float:
    """Central finite difference."""
    return (function(at + h) - function(at - h)) / (2 * h)


def plain_layout(size: int, buffers: int = 0) -> Layout:
    return Layout.build([("w", (size,), "learnable"), *([("b", (buffers,), "buffer")] if buffers else [])])


def server_of(
    name: str,
    w0: np.ndarray,
    layout: Layout,
    devices: int = 8,
    epochs: int = 1,
    reach: Callable[[int], float] = float,
    **options: Any,
) -> Server:
    """Return a server with a constant learning rate of 0.1; ``reach`` is that of the devices' optimiser."""
    method, _ = class_and_preset(name)
    context = MethodContext(devices, np.full(devices, 10, np.int64), epochs, 4, layout, seed=3, reach=reach)
    rule: Method = method(method_options(name, options), context)
    return Server(rule, context, w0.astype(np.float32), constant(0.1))


def trigger(server: Server, device: int) -> Triggered:
    """Start a trip and return its event."""
    (sent,) = server.trigger([device])
    return Triggered(device, sent.trip, sent.version, sent.epochs, sent.lr)


def ask(server: Server, device: int, epoch: int = 1) -> Fresh | None:
    """Ask for the fresh model as the device in flight."""
    return server.request(Request(device, server.active_trips[device].trip, Slot(epoch, "fixed")))


def upload(server: Server, device: int, weights: np.ndarray, steps: int = 1, **merged: float) -> list[Event]:
    """Upload this model as the device in flight, with the numbers of its merge if any."""
    active, model = server.active_trips[device], weights.astype(np.float32)
    merges = (Merge(active.newest, merged),) if merged else ()
    return server.upload(Upload(device, active.trip, active.base, model, steps, merges=merges))


def send(server: Server, device: int, weights: np.ndarray, steps: int = 1, **merged: float) -> list[Record]:
    """Upload and return the log records. The figures of an aggregation's only contribution join its own."""
    return [flat(event) for event in upload(server, device, weights, steps, **merged)]


def flat(event: Event) -> Record:
    """Return an event's log record with the figures of its only contribution."""
    record = events.record(event)
    (part,) = record.get("contributions", [{}])
    return part | record

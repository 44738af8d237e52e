"""A Flower client as it is: a ``NumPyClient``, or a ``ClientApp`` with a train function.

    Federation(model=Net, trainer=FlowerClient(lambda model, data: MyClient(model, data)), ...)
    Federation(model=Net, trainer=FlowerApp(app), ...)

Flower's clients train in one piece, so a fresh model cannot be merged in mid-training: a method that asks for one is
refused. The number of examples that a client returns is not used; a device counts with its own samples.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from freshet.errors import RunError
from freshet.training.own_loop import DeviceData, Trip

#: The key in a client's metrics for the steps it took.
STEPS = "steps"


class FlowerClient:
    """A training loop for ``Federation(trainer=...)`` from ``make(model, data)``, which returns a ``NumPyClient``.

    ``fit(parameters, config)`` gets the arrays of ``model.state_dict()`` and returns them in the same order. ``config``
    has ``epochs``, ``lr``, ``device``, ``trip`` and what is given here.
    """

    #: ``fit`` cannot be paused.
    pauses = False

    def __init__(self, make: Callable[[nn.Module, DeviceData], Any], config: Mapping[str, Any] | None = None) -> None:
        self.make, self.config = make, dict(config or {})

    def __call__(self, model: nn.Module, data: DeviceData, trip: Trip) -> dict[str, float]:
        client, before = self.make(model, data), [value.cpu().numpy().copy() for value in model.state_dict().values()]
        arrays, _, metrics = client.fit(before, self.config | trip_config(trip))
        load_arrays(model, arrays)
        return count_steps(metrics, data, trip)


class FlowerApp:
    """A training loop for ``Federation(trainer=...)`` from a ``ClientApp`` with ``@app.train()``.

    Its message has the model as ``arrays`` and, as ``config``, what a ``FlowerClient`` gets. Its node config has
    ``partition-id`` and ``num-partitions``. The app loads its data itself.
    """

    pauses = False

    def __init__(self, app: Any, config: Mapping[str, Any] | None = None, run_config: Any = None) -> None:
        self.app, self.config, self.run_config = app, dict(config or {}), dict(run_config or {})

    def __call__(self, model: nn.Module, data: DeviceData, trip: Trip) -> dict[str, float]:
        from flwr.app import DEFAULT_TTL, ArrayRecord, ConfigRecord, Context, Message, Metadata, RecordDict

        arrays = ArrayRecord({name: value.detach().cpu().clone() for name, value in model.state_dict().items()})
        content = RecordDict({"arrays": arrays, "config": ConfigRecord(self.config | trip_config(trip))})
        node: dict[str, Any] = {"partition-id": trip.device, "num-partitions": trip.devices}
        context = Context(0, trip.device, node, RecordDict(), self.run_config)
        about = Metadata(0, "", 0, trip.device, "", "", time.time(), DEFAULT_TTL, "train")
        message = Message(content, metadata=about)  # type: ignore[call-overload,unused-ignore]
        reply = self.app(message, context)
        if reply.has_error():
            raise RunError(f"the Flower app failed on device {trip.device}: {reply.error.reason}")
        found = next(iter(reply.content.array_records.values()), None)
        if found is None:
            raise RunError(f"the Flower app returned no arrays on device {trip.device}; reply with an ArrayRecord")
        load_arrays(model, [array.numpy() for array in found.values()])
        metrics = next(iter(reply.content.metric_records.values()), None)
        return count_steps(metrics, data, trip)


def trip_config(trip: Trip) -> dict[str, float | int]:
    """What a client is told about its trip."""
    return {"epochs": trip.epochs, "lr": trip.lr, "device": trip.device, "trip": trip.number}


def load_arrays(model: nn.Module, arrays: Sequence[Any]) -> None:
    """Copy arrays into a module, in the order of its ``state_dict``."""
    state = model.state_dict()
    shapes = [tuple(np.shape(array)) for array in arrays]
    if shapes != [tuple(value.shape) for value in state.values()]:
        problem = f"the Flower client returned arrays of shapes {shapes!r:.80}"
        raise RunError(f"{problem}; return those of model.state_dict()")
    model.load_state_dict({name: torch.tensor(array) for name, array in zip(state, arrays, strict=True)})


def count_steps(metrics: Mapping[str, Any] | None, data: DeviceData, trip: Trip) -> dict[str, float]:
    """Report the steps of a whole ``fit``: those it counts in its metrics as ``steps``, else the batches drawn from
    ``data``, else ``epochs`` passes in batches of ``training.batch_size``. Returns its metrics that are numbers."""
    found = dict(metrics or {})
    steps = int(found.pop(STEPS, trip.batches_drawn)) or trip.epochs * len(data.batches())
    trip.steps_per_epoch = math.ceil(steps / trip.epochs)
    trip.step(steps)
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}

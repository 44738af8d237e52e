"""The server: answers triggers, requests and uploads. It does no I/O, owns no clock and starts no process.

Every answer comes with the event records that the driver stamps with a time and writes to the log.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freshet.core.messages import Assignment, Fresh, Upload
from freshet.core.method import Discard, Method, Verdict, Wait, World
from freshet.core.selection import Selector, View, selector
from freshet.core.vectors import Vector, is_finite
from freshet.core.versions import VersionStore

Event = dict[str, Any]
FLOAT32 = np.dtype(np.float32)
#: Why an upload that passed the gates was rejected after all.
NOT_FINITE = "the aggregated model would not be finite"


@dataclass(slots=True)
class Flight:
    """What the server remembers of a device that is training."""

    trip: int
    base: int
    age: int
    epochs: int
    lr: float
    fresh: int | None = None
    fresh_age: int = 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def overflows(weights: Vector, update_norm: float) -> bool:
    """Whether a step of this length has led to numbers that are not finite.

    A finite float32 stays finite when less than 1e30 is added, so only longer steps have to be looked at.
    """
    return not update_norm < 1e30 and not (math.isfinite(update_norm) and is_finite(weights))


class Refused(Exception):
    """A request that the server does not answer; the text is the reason."""


class Server:
    """Holds the global model and its versions, applies the gates, and lets the method decide."""

    def __init__(self, method: Method, world: World, weights: Vector, lr: float, lr_decay: float) -> None:
        self.method = method
        self.synchronous = method.kind == "sync"
        self.world = world
        self.store = VersionStore(weights)
        self.lr, self.lr_decay = lr, lr_decay
        self.flights: dict[int, Flight] = {}
        self.waiting: set[int] = set()
        self.trips: dict[int, int] = {}
        self.round = 0
        self.consumed = 0
        self.selector: Selector = selector("uniform", world.seed, world.samples)
        self._prejudges = type(method).prejudge is not Method.prejudge
        self.urgent: list[int] = []

    # ---- what is true now

    @property
    def version(self) -> int:
        return self.store.current

    @property
    def weights(self) -> Vector:
        return self.store.weights

    @property
    def age(self) -> int:
        """What the formulas take the root of: the round of a synchronous method, the version otherwise."""
        return self.round if self.synchronous else self.version

    @property
    def busy(self) -> int:
        """Devices that cannot be triggered: training, or waiting for a buffered aggregation."""
        return len(self.flights) + len(self.waiting)

    def staleness(self, flight: Flight) -> int:
        """``s = t - o + 1``: a fresh upload has staleness 1. The only place where it is counted."""
        return self.version - flight.base + 1

    @property
    def rounds(self) -> int:
        """Rounds that are over; of an asynchronous method, consumed uploads in units of one round's worth."""
        return self.round - bool(self.flights) if self.synchronous else self.consumed // self.world.per_round

    def learning_rate(self) -> float:
        """``lr * decay ** r``, r = rounds that are over."""
        return self.lr * self.lr_decay**self.rounds

    # ---- events

    def select(self, count: int, available: Callable[[int], bool]) -> list[int]:
        """Up to ``count`` idle and available devices with data, as the selector chooses, in ascending order."""
        flights, waiting = self.flights, self.waiting

        def free(device: int) -> bool:
            return device not in flights and device not in waiting and available(device)

        return self.selector.select(count, free, self._look)

    def _look(self, rng: np.random.Generator) -> View:
        return View(self.version, self.rounds, self.world.samples, self.trips, rng)

    @property
    def draws(self) -> int:
        """The selector's place in its random sequence."""
        return self.selector.draws

    @draws.setter
    def draws(self, place: int) -> None:
        self.selector.draws = place

    def trigger(self, devices: Sequence[int]) -> list[Assignment]:
        """Send the current model to these devices. For a synchronous method this opens a round."""
        lr = self.learning_rate()
        if self.synchronous:
            if self.flights:
                raise ValueError("a round is still open")
            self.round += 1
        return [self._assign(device, lr) for device in devices]

    def _assign(self, device: int, lr: float) -> Assignment:
        trip = self.trips[device] = self.trips.get(device, 0) + 1
        epochs, version, age = self.method.epochs(self, device), self.version, self.age
        weights = self.store.hold(version)
        self.flights[device] = Flight(trip, version, age, epochs, lr)
        return Assignment(device, trip, version, age, weights, epochs, lr, self.method.instruct(self, device))

    def empty_round(self) -> list[Event]:
        """Nobody could be selected: the round counts and the model stays (baselines C7)."""
        self.round += 1
        return self._after_landing()

    def request(self, device: int, trip: int) -> Fresh | None:
        """The fresh model for a device in mid-training, or None when there is nothing newer. Repeatable."""
        flight = self.flights.get(device)
        if flight is None or flight.trip != trip:
            raise Refused("this device has no such trip in flight")
        if flight.fresh is None and self.version > flight.base:
            flight.fresh, flight.fresh_age = self.version, self.age
            self.store.hold(self.version)
        return None if flight.fresh is None else Fresh(flight.fresh, flight.fresh_age, self.store.get(flight.fresh))

    def upload(self, upload: Upload) -> list[Event]:
        """A trained model arrives: gates first, then the method's rule."""
        flight = self.flights.get(upload.device)
        if flight is None or flight.trip != upload.trip:
            return [
                {"kind": "rejected", "device": upload.device, "reason": "no such trip in flight", "trip": upload.trip}
            ]
        discarded = self.discard_unseen(upload.device, upload.trip)
        if discarded is not None:
            return discarded
        problem = self._gate(upload, flight)
        if problem is None:
            verdict = self.method.receive(self, upload, flight)
            self.consumed += not isinstance(verdict, Discard)
            if isinstance(verdict, Wait) and self.method.replaces == "aggregation":
                self.waiting.add(upload.device)
            events = self._apply(verdict, upload.device, upload.trip)
            self._land(upload.device)
        else:
            events = [{"kind": "rejected", "device": upload.device, "reason": problem, "trip": upload.trip}]
            self._land(upload.device)
            events += self._forget(upload.device)
        return events + self._after_landing() if self.synchronous else events

    def discard_unseen(self, device: int, trip: int) -> list[Event] | None:
        """Discard an upload by its staleness alone, before anybody looks inside; None when it has to be looked at."""
        if not self._prejudges:
            return None
        flight = self.flights.get(device)
        if flight is None or flight.trip != trip:
            return None
        verdict = self.method.prejudge(self, flight)
        if verdict is None:
            return None
        events = self._apply(verdict, device, trip)
        self._land(device)
        return events + self._after_landing()

    def take_urgent(self) -> list[int]:
        """Devices in flight that the method wants to hear from soon; each is named once."""
        urgent, self.urgent = self.urgent, []
        return [device for device in urgent if device in self.flights]

    def lost(self, device: int, trip: int, reason: str) -> list[Event]:
        """A device in flight will not upload."""
        flight = self.flights.get(device)
        if flight is None or flight.trip != trip:
            return []
        self._land(device)
        events: list[Event] = [{"kind": "lost", "device": device, "reason": reason, "trip": trip}]
        return events + self._forget(device) + self._after_landing()

    # ---- inside

    def _gate(self, upload: Upload, flight: Flight) -> str | None:
        """Why an upload may not touch the model, or None."""
        if upload.base != flight.base:
            return f"trained from version {upload.base}, but was given {flight.base}"
        weights = upload.weights
        if not isinstance(weights, np.ndarray):
            return "model is not an array"
        if weights.dtype != FLOAT32 or weights.shape != (self.world.layout.size,):
            return f"model has shape {weights.shape}, expected ({self.world.layout.size},) of float32"
        flags = weights.flags
        if not (flags.c_contiguous and flags.aligned):
            return "model is not contiguous in memory"
        if not is_finite(weights):
            return "model has entries that are not finite"
        if upload.steps < 1:
            return "no training step was taken"
        if upload.report and not all(_is_number(value) for value in upload.report.values()):
            return "report has something that is not a finite number"
        return self.method.objection(upload, flight)

    def _apply(self, verdict: Verdict, device: int | None, trip: int | None) -> list[Event]:
        who: Event = {} if device is None else {"device": device, "trip": trip}
        if isinstance(verdict, Discard):
            return [{"kind": "discard", **who, "reason": verdict.reason, **verdict.record}]
        if isinstance(verdict, Wait):
            self.urgent += verdict.urgent
            return []
        if overflows(verdict.weights, verdict.record["update_norm"]):
            return [{"kind": "rejected", **who, "reason": NOT_FINITE}]
        record: Event = {"kind": "aggregate", **who, "version": self.version, **verdict.record}
        if self.synchronous:
            record["round"] = self.round
        self.store.advance(verdict.weights)
        self.waiting.clear()
        return [record, *verdict.also]

    def _forget(self, device: int) -> list[Event]:
        verdict = self.method.forget(self, device)
        return [] if verdict is None else self._apply(verdict, None, None)

    def _land(self, device: int) -> None:
        flight = self.flights.pop(device)
        self.store.release(flight.base)
        if flight.fresh is not None:
            self.store.release(flight.fresh)

    def _after_landing(self) -> list[Event]:
        if not self.synchronous or self.flights:
            return []
        verdict = self.method.finish_round(self)
        return [] if verdict is None else self._apply(verdict, None, None)

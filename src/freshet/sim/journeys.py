"""A trip in virtual time, and how it is saved: its training follows from its inputs and is not saved with it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from freshet.compute.base import Future
from freshet.core.messages import Assignment, Fresh, Slot
from freshet.core.saving import Tree
from freshet.core.server import Server
from freshet.runs.checkpoint import owned
from freshet.training.outcome import Outcome


@dataclass(slots=True)
class Journey:
    """A trip in virtual time: what the device was given, and the training that belongs to it."""

    assignment: Assignment
    triggered: float = 0.0
    #: When training began.
    started: float = 0.0
    slot: Slot | None = None
    fresh: Fresh | None = None
    future: Future[Outcome] | None = None
    merge: Future[Outcome] | None = None
    merged: bool = False
    due: float | None = None


def state_of(journey: Journey) -> Tree:
    """What it takes to go on with it, beside what the server remembers."""
    return {
        "epochs": journey.assignment.epochs,
        "instruction": dict(journey.assignment.instruction),
        "vectors": dict(journey.assignment.vectors),
        "fresh_vectors": {} if journey.fresh is None else dict(journey.fresh.vectors),
        "packed": [_packed(journey.assignment), _packed(journey.fresh)],
        "slot": None if journey.slot is None else list(journey.slot),
        "merged": journey.merged,
        "triggered": journey.triggered,
        "started": journey.started,
        "due": journey.due,
    }


def _packed(message: Assignment | Fresh | None) -> list[Any]:
    """Bytes and content of a model that came in fewer bytes; nothing of one that the server has, too."""
    return [message.packed, message.weights] if message is not None and message.packed else []


def restored(server: Server, device: int, saved: Tree) -> Journey:
    """A journey as it was: versions come from the server, which holds those that are needed."""
    flight, store = server.flights[device], server.store
    given, got = saved["packed"]  # a model that came in fewer bytes is not quite a version of the server's
    weights = np.array(given[1]) if given else store.get(flight.base)
    where = (device, flight.trip, flight.base, flight.age, weights, saved["epochs"], flight.lr)
    assignment = Assignment(*where, saved["instruction"], owned(saved["vectors"]), given[0] if given else 0)
    fresh = None
    if flight.fresh is not None:
        weights = np.array(got[1]) if got else store.get(flight.fresh)
        vectors = owned(saved["fresh_vectors"])
        fresh = Fresh(flight.fresh, flight.fresh_age, weights, vectors, got[0] if got else 0)
    slot = None if saved["slot"] is None else Slot(*saved["slot"])
    triggered = saved["triggered" if "triggered" in saved else "started"]  # earlier versions did not save it
    return Journey(assignment, triggered, saved["started"], slot, fresh, merged=saved["merged"])

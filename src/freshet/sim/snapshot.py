"""A simulation in the middle, as plain data: with every device in flight, so that it can go on bit for bit.

Training that is under way is not saved: a trip's work follows from its inputs, so it is simply handed out again.
"""

from dataclasses import asdict, fields
from typing import Any

import numpy as np

from freshet.core.messages import Assignment, Fresh
from freshet.core.server import Flight, Server
from freshet.core.trip import DeviceTrip, Phase, Slot
from freshet.core.versions import VersionStore
from freshet.runs.checkpoint import owned
from freshet.sim.driver import Counts, Journey, Simulation
from freshet.sim.heap import Entry, EventHeap, Rank

Tree = dict[str, Any]
#: What a captured state holds.
PARTS = {"server", "method", "devices", "heap", "now", "last_test", "journeys", "counts", "watch", "rounds", "log"}


def capture(simulation: Simulation) -> Tree:
    """Everything that decides how a run goes on (all pending results are awaited first)."""
    simulation.writer.drain(wait=True)
    return {
        "server": _server(simulation.server),
        "method": simulation.server.method.state(),
        "devices": simulation.devices.state(),
        "heap": [list(entry) for entry in simulation.heap.entries()],
        "now": simulation.heap.now,
        "last_test": simulation.last_test,
        "journeys": {device: _journey(journey) for device, journey in simulation.journeys.items()},
        "counts": asdict(simulation.counts),
        "watch": simulation.watch.state(),
        "rounds": simulation.rounds.state(),
        "log": simulation.writer.position(),
    }


def check(tree: Tree, size: int) -> None:
    """Raise ``ValueError`` unless a captured state has all its parts, with models of this size."""
    missing = PARTS - tree.keys()
    if missing:
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    models = [weights for _, weights, _ in tree["server"]["store"]]
    if not all(isinstance(w, np.ndarray) and w.shape == (size,) and w.dtype == np.float32 for w in models):
        raise ValueError(f"its models are not of {size} numbers")


def reinstate(simulation: Simulation, tree: Tree, until: float) -> None:
    """Put a fresh simulation into a captured state and hand out the training that was under way."""
    _restore_server(simulation.server, owned(tree["server"]))
    simulation.server.method.restore(tree["method"])
    simulation.devices.restore(tree["devices"])
    simulation.heap = EventHeap([Entry(*entry) for entry in tree["heap"]], tree["now"])
    simulation.triggers = {entry.time for entry in simulation.heap.entries() if entry.rank == Rank.TRIGGER}
    simulation.last_test = tree["last_test"]
    simulation.counts = Counts(**tree["counts"])
    simulation.watch.restore(tree["watch"])
    simulation.rounds.restore(tree["rounds"])
    simulation.until = until
    simulation.started = True
    for device, saved in sorted(tree["journeys"].items(), key=lambda item: int(item[0])):
        journey = _restore_journey(simulation.server, saved)
        simulation.journeys[int(device)] = journey
        if saved["due"] is not None:
            simulation.hand_out(journey, saved["due"])


def _server(server: Server) -> Tree:
    return {
        "store": [list(item) for item in server.store.items()],
        "current": server.store.current,
        "flights": {device: asdict(flight) for device, flight in server.flights.items()},
        "waiting": sorted(server.waiting),
        "trips": server.trips,
        "round": server.round,
        "consumed": server.consumed,
        "draws": server.draws,
    }


def _restore_server(server: Server, tree: Tree) -> None:
    server.store = VersionStore.restore([tuple(item) for item in tree["store"]], tree["current"])
    server.flights = {int(device): Flight(**flight) for device, flight in tree["flights"].items()}
    server.waiting = set(tree["waiting"])
    server.trips = {int(device): count for device, count in tree["trips"].items()}
    server.round, server.consumed, server.draws = tree["round"], tree["consumed"], tree["draws"]


def _journey(journey: Journey) -> Tree:
    trip = {field.name: getattr(journey.trip, field.name) for field in fields(journey.trip)}
    trip |= {"slot": None if journey.trip.slot is None else list(journey.trip.slot), "phase": str(journey.trip.phase)}
    return {
        "trip": trip,
        "instruction": dict(journey.assignment.instruction),
        "merged": journey.merged,
        "started": journey.started,
        "due": journey.due,
    }


def _restore_journey(server: Server, tree: Tree) -> Journey:
    saved = dict(tree["trip"])
    saved["slot"] = None if saved["slot"] is None else Slot(*saved["slot"])
    saved["phase"] = Phase(saved["phase"])
    trip = DeviceTrip(**saved)
    assignment = Assignment(
        trip.device,
        trip.trip,
        trip.base,
        trip.age,
        server.store.get(trip.base),
        trip.epochs,
        trip.lr,
        tree["instruction"],
    )
    fresh = None
    if trip.fresh is not None and trip.fresh_age is not None:
        fresh = Fresh(trip.fresh, trip.fresh_age, server.store.get(trip.fresh))
    return Journey(trip, assignment, fresh=fresh, merged=tree["merged"], started=tree["started"])

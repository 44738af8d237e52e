"""Server and devices keep equal sums when a defence shortens uploads."""

from typing import Any

import numpy as np

from freshet.core.defence import Defence, DefenceOptions
from freshet.core.layout import Layout
from freshet.core.messages import Assignment
from freshet.core.server import Server
from freshet.core.vectors import Vector
from freshet.training.trainer import TripInput
from freshet.training.trip import TripOutcome
from tests.methods.helpers import WEIGHTS, Device, close, regression_weights, server_of

FLAT = Layout.build([("weight", (WEIGHTS,), "learnable")])
DEVICES, ROUNDS = 5, 8


def defended(method: str) -> Server:
    """Return a server that clips from the first upload on."""
    server = server_of(method, regression_weights(1), devices=DEVICES, per_round=DEVICES, layout=FLAT)
    defence = Defence(DefenceOptions(rule="clip", factor=0.8), FLAT)
    for device in range(4):
        defence.recent.measures.add(device, 0.5)
    server.admission.defence = defence
    return server


class Fleet:
    """Devices that train for 1, 2, ... epochs, so their steps differ in length."""

    def __init__(self, server: Server) -> None:
        self.server, self.device = server, Device()
        self.memories: list[dict[str, Any]] = [{} for _ in range(DEVICES)]
        self.shares: list[float] = []

    def train(self, assignment: Assignment) -> TripOutcome:
        k = assignment.device
        trip = assignment._replace(device=0, epochs=1 + k)
        outcome = self.device.trainer.train(TripInput(trip, (), (), self.server.rule, self.memories[k]))
        self.memories[k] = outcome.memory
        return outcome

    def upload(self, assignment: Assignment, outcome: TripOutcome) -> None:
        events = self.server.upload(outcome.upload(assignment))
        self.shares += [event.numbers["share"] for event in events if type(event).__name__ == "Noted"]

    def were_shortened(self) -> bool:
        return sum(share < 0.9 for share in self.shares) > 10 and 1.0 in self.shares and 0.0 not in self.shares


def test_scaffold_control_is_the_mean_of_the_devices_controls() -> None:
    fleet = Fleet(defended("scaffold"))
    for number in range(ROUNDS):
        assignments = fleet.server.trigger(list(range(DEVICES)))
        outcomes = [fleet.train(assignment) for assignment in assignments]
        began_with: list[Vector] = [memory["c"] for memory in fleet.memories]
        close(assignments[0].vectors["c"], np.mean(began_with, axis=0), 1e-6)
        for k, (assignment, outcome) in enumerate(zip(assignments, outcomes, strict=True)):
            if (number, k) in ((2, 1), (5, 3)):
                fleet.server.drop_trip(k, assignment.trip, "upload lost")
            else:
                fleet.upload(assignment, outcome)
    assert fleet.were_shortened() and np.linalg.norm(fleet.server.method.state.c) > 0.1


def test_feddyn_dual_is_the_mean_of_the_devices_duals() -> None:
    fleet = Fleet(defended("feddyn"))
    for _ in range(ROUNDS):
        assignments = fleet.server.trigger(list(range(DEVICES)))
        outcomes = [fleet.train(assignment) for assignment in assignments]
        moved = [outcome.weights - assignments[0].weights for outcome in outcomes]
        began_with = [memory["lambda"] - by for memory, by in zip(fleet.memories, moved, strict=True)]
        close(fleet.server.method.state.G, np.mean(began_with, axis=0), 2e-6)
        for assignment, outcome in zip(assignments, outcomes, strict=True):
            fleet.upload(assignment, outcome)
    assert fleet.were_shortened() and np.linalg.norm(fleet.server.method.state.G) > 0.1


def test_device_ignores_the_share_of_another_trip() -> None:
    """The device's last upload was lost, so the server's report is about the one before."""
    fleet = Fleet(defended("feddyn"))
    for fate in ("shortened", "lost", "none"):
        assignments = fleet.server.trigger([4])
        before = fleet.memories[4].get("lambda", np.zeros(WEIGHTS, np.float32))
        outcome = fleet.train(assignments[0])
        began_with = fleet.memories[4]["lambda"] - (outcome.weights - assignments[0].weights)
        if fate == "none":
            close(began_with, before, 1e-6)
        elif fate == "lost":
            assert np.linalg.norm(began_with - before) > 0.05, "the server reported the first one"
            fleet.server.drop_trip(4, assignments[0].trip, "upload lost")
        else:
            fleet.upload(assignments[0], outcome)


def test_partial_uploads_survive_in_the_checkpoint() -> None:
    for method in ("scaffold", "feddyn"):
        fleet, other = Fleet(defended(method)), defended(method)
        for assignment in fleet.server.trigger(list(range(DEVICES))):
            fleet.upload(assignment, fleet.train(assignment))
        other.restore(fleet.server.state())
        for device in range(DEVICES):
            instructions = [server.method.instruct(server, device) for server in (fleet.server, other)]
            assert instructions[0] == instructions[1]
        assert any("share" in fleet.server.method.instruct(fleet.server, device) for device in range(DEVICES))


def test_full_uploads_are_not_reported() -> None:
    for method, keys in (("scaffold", {"heard"}), ("feddyn", {"alpha_k"})):
        server = server_of(method, regression_weights(1), devices=DEVICES, layout=FLAT)
        fleet = Fleet(server)
        for assignment in server.trigger(list(range(DEVICES))):
            fleet.upload(assignment, fleet.train(assignment))
        assert all(server.method.instruct(server, device).keys() == keys for device in range(DEVICES))

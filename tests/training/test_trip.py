"""A trip moves TO_SLOT -> ASKED -> FINISHING -> DONE and gives the same bits with and without pauses."""

from typing import Any

import numpy as np
import pytest
import torch

from freshet.core.messages import Assignment, Fresh, Slot
from freshet.core.method import LocalRule
from freshet.methods import class_and_preset, method_options
from freshet.runs.checkpoint import pack, unpack
from freshet.training.network import initial_weights
from freshet.training.trainer import Trainer
from freshet.training.trip import LocalTrip, Phase
from tests.training.test_trainer import SEED, mlp, trainer, with_batch_norm, with_dropout

MOVES = {
    "to_slot": lambda trip: trip.to_slot(),
    "merge": lambda trip: trip.merge(None),
    "finish": lambda trip: trip.finish(),
}
#: Which move is legal in which phase of a trip that asks.
LEGAL = {Phase.TO_SLOT: "to_slot", Phase.ASKED: "merge", Phase.FINISHING: "finish", Phase.DONE: None}


def begin(t: Trainer, factory=mlp, slot: int | None = 2, rule: LocalRule | None = None, **memory: Any) -> LocalTrip:
    numbers = {"alpha_k": 0.1, "meta_slot": 2}
    assignment = Assignment(0, 1, 4, 4, initial_weights(factory, SEED), 3, 0.1, numbers)
    return LocalTrip(t, assignment, [Slot(slot, "fixed")] if slot else [], rule or LocalRule(), memory)


def fresh(factory=mlp, version: int = 6) -> Fresh:
    return Fresh(version, version, initial_weights(factory, SEED + 1))


def trip_in(phase: Phase) -> LocalTrip:
    trip = begin(trainer())
    for move in MOVES.values():
        if trip.phase is phase:
            break
        move(trip)
    assert trip.phase is phase
    return trip


def test_the_phases_of_a_trip_that_asks():
    trip = begin(trainer())
    phases = [trip.phase]
    for move in MOVES.values():
        move(trip)
        phases.append(trip.phase)
    assert phases == [Phase.TO_SLOT, Phase.ASKED, Phase.FINISHING, Phase.DONE]


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("phase", list(Phase))
def test_any_other_move_raises_and_changes_nothing(phase, move):
    trip = trip_in(phase)
    if move == LEGAL[phase]:
        return
    before = trip.snapshot()
    with pytest.raises(ValueError, match="trip 1 of device 0"):
        MOVES[move](trip)
    assert (trip.phase, trip.snapshot().tobytes()) == (phase, before.tobytes())


def test_a_trip_without_a_slot_never_asks_and_finishes_once():
    trip = begin(trainer(), slot=None)
    assert trip.to_slot() is False
    trip.finish()
    with pytest.raises(ValueError, match="done"):
        trip.finish()


@pytest.mark.parametrize("version", [4, 3])
def test_a_fresh_model_must_be_newer(version):
    trip = trip_in(Phase.ASKED)
    with pytest.raises(ValueError, match="not newer"):
        trip.merge(fresh(version=version))
    assert trip.phase is Phase.ASKED


@pytest.mark.parametrize(("slot", "before"), [(1, 0), (2, 1), (3, 2)])
def test_the_device_asks_at_the_start_of_the_slots_epoch(slot, before):
    trip = begin(trainer(), slot=slot)
    assert trip.to_slot() is True
    assert (trip.epoch, trip.steps) == (before, 7 * before)
    trip.merge(None)
    assert trip.finish().steps == 21


def test_a_trip_cannot_continue_after_another_has_begun():
    t = trainer()
    first = begin(t)
    first.to_slot()
    begin(t)
    with pytest.raises(ValueError, match="another trip has begun"):
        first.merge(None)


# ---- hurry


def test_hurry_makes_the_current_epoch_the_last():
    trip = begin(trainer(), slot=3)
    trip.to_slot()  # two epochs are done
    trip.hurry()
    trip.merge(None)
    assert trip.finish().steps == 14


def test_hurry_before_the_first_epoch_leaves_one_epoch():
    trip = begin(trainer(), slot=None)
    trip.hurry()
    trip.to_slot()
    assert trip.finish().steps == 7


# ---- saving

RULES = {
    "fedavg": {},
    "fedasmu": {"slot": 2},
    "fedssmu": {},
    "fedprox": {"mu": 0.1},
    "feddyn": {},
    "asofed": {},
    "moon": {},
}


def rule_of(method: str) -> LocalRule:
    return class_and_preset(method)[0].rule(method_options(method, RULES[method]))


def finish(trip: LocalTrip, factory) -> Any:
    trip.merge(fresh(factory))
    return trip.finish()


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"optimiser": "adam"}], ids=str)
@pytest.mark.parametrize("factory", [mlp, with_batch_norm, with_dropout])
@pytest.mark.parametrize("method", [name for name in RULES if name != "moon"])
def test_a_trip_saved_at_its_slot_continues_on_another_trainer_with_the_same_bits(method, factory, options):
    memory = {"lambda": np.ones(initial_weights(mlp, SEED)[:73].shape, np.float32)} if method == "feddyn" else {}
    memory = memory if factory is mlp else {}
    trip = begin(trainer(factory, **options), factory, 2, rule_of(method), **memory)
    trip.to_slot()
    plain, arrays = pack(trip.save())  # the state can be written to a file
    expected = finish(trip, factory)
    torch.rand(7)
    other = begin(trainer(factory, **options), factory, 2, rule_of(method), **memory)
    other.restore(unpack(plain, {name: np.array(array) for name, array in arrays.items()}))
    assert other.phase is Phase.ASKED
    outcome = finish(other, factory)
    assert outcome.weights.tobytes() == expected.weights.tobytes()
    assert outcome[1:4] == expected[1:4]
    assert pack(outcome.memory)[0] == pack(expected.memory)[0]


def test_saved_trips_take_turns_on_one_trainer():
    t = trainer(with_dropout)
    alone = [finish_alone(slot) for slot in (1, 2, 3)]
    saved = {}
    for slot in (1, 2, 3):
        trip = begin(t, with_dropout, slot)
        trip.to_slot()
        saved[slot] = trip.save()
    together = []
    for slot in (1, 2, 3):
        trip = begin(t, with_dropout, slot)
        trip.restore(saved[slot])
        trip.merge(None)
        together.append(trip.finish().weights.tobytes())
    assert together == alone


def finish_alone(slot: int) -> bytes:
    trip = begin(trainer(with_dropout), with_dropout, slot)
    trip.to_slot()
    trip.merge(None)
    return trip.finish().weights.tobytes()

"""The device's state machine: TO_SLOT -> ASKED -> FINISHING -> DONE, or straight to DONE without a slot."""

import pytest

from freshet.core.trip import DeviceTrip, Phase, Slot


def trip(slot: int | None = 3) -> DeviceTrip:
    return DeviceTrip(device=1, trip=1, base=4, age=4, epochs=5, lr=0.1, slot=Slot(slot, "fixed") if slot else None)


MOVES = {
    "ask": lambda t: t.ask(),
    "answer": lambda t: t.answer(6, 6),
    "finish": lambda t: t.finish(),
}
#: Which move is legal in which phase of a trip that asks.
LEGAL = {Phase.TO_SLOT: "ask", Phase.ASKED: "answer", Phase.FINISHING: "finish", Phase.DONE: None}


def brought_to(phase: Phase) -> DeviceTrip:
    t = trip()
    for move in ("ask", "answer", "finish"):
        if t.phase is phase:
            break
        MOVES[move](t)
    assert t.phase is phase
    return t


def test_the_way_of_a_trip_that_asks():
    t = trip()
    phases = [t.phase]
    for move in ("ask", "answer", "finish"):
        MOVES[move](t)
        phases.append(t.phase)
    assert phases == [Phase.TO_SLOT, Phase.ASKED, Phase.FINISHING, Phase.DONE]
    assert (t.fresh, t.fresh_age) == (6, 6)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("phase", list(Phase))
def test_every_other_move_is_refused_and_changes_nothing(phase, move):
    t = brought_to(phase)
    if move == LEGAL[phase]:
        return
    fresh = t.fresh
    with pytest.raises(ValueError, match="trip 1 of device 1"):
        MOVES[move](t)
    assert (t.phase, t.fresh) == (phase, fresh)


def test_a_trip_without_slot_finishes_at_once_and_only_once():
    t = trip(None)
    t.finish()
    with pytest.raises(ValueError, match="done"):
        t.finish()


def test_nothing_newer_is_an_answer():
    t = trip()
    t.ask()
    t.answer(None, None)
    assert (t.phase, t.fresh) == (Phase.FINISHING, None)


@pytest.mark.parametrize("fresh", [4, 3])
def test_a_fresh_model_that_is_not_newer_is_refused(fresh):
    t = trip()
    t.ask()
    with pytest.raises(ValueError, match="not newer"):
        t.answer(fresh, fresh)
    assert t.phase is Phase.ASKED


@pytest.mark.parametrize(("slot", "before", "after"), [(1, 0, 5), (3, 2, 3), (5, 4, 1), (None, 5, 0)])
def test_epochs_before_and_after_the_request(slot, before, after):
    t = trip(slot)
    assert (t.epochs_to_slot, t.epochs_after_slot) == (before, after)

"""The event queue: earliest first, ties by rank, device and trip, never into the past."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.sim.driver import EventHeap, Rank, Scheduled

times = st.one_of(st.integers(0, 5).map(float), st.floats(0, 1e6))
entries = st.builds(Scheduled, times, st.sampled_from(list(Rank)), st.integers(0, 4), st.integers(1, 3))
modest = settings(deadline=None, max_examples=80)


def drain(heap: EventHeap) -> list[Scheduled]:
    return [heap.pop() for _ in range(len(heap))]


@modest
@given(st.lists(entries))
def test_events_come_out_by_time_then_rank_then_device_then_trip(pushed):
    heap = EventHeap()
    for entry in pushed:
        heap.push(entry)
    assert drain(heap) == sorted(pushed)


@modest
@given(st.lists(entries), st.lists(st.floats(0, 10), max_size=20))
def test_pushing_while_popping_never_turns_the_clock_back(pushed, delays):
    heap = EventHeap()
    for entry in pushed:
        heap.push(entry)
    seen = [0.0]
    while len(heap):
        seen.append(heap.pop().time)
        assert heap.now == seen[-1]
        if delays:
            heap.push(Scheduled(heap.now + delays.pop(), Rank.UPLOAD))
    assert seen == sorted(seen)


@modest
@given(st.lists(entries), st.integers(0, 10))
def test_a_saved_heap_resumes_in_the_same_order(pushed, popped):
    heap = EventHeap()
    for entry in pushed:
        heap.push(entry)
    for _ in range(min(popped, len(heap))):
        heap.pop()
    copy = EventHeap(heap.in_order(), heap.now)
    assert (copy.now, drain(copy)) == (heap.now, drain(heap))


@pytest.mark.parametrize("time", [9.999, -1.0, math.nan])
def test_an_event_in_the_past_is_rejected(time):
    heap = EventHeap(now=10.0)
    with pytest.raises(ValueError, match="before the clock"):
        heap.push(Scheduled(time, Rank.UPLOAD))
    assert len(heap) == 0


def test_an_event_may_be_scheduled_for_now():
    heap = EventHeap(now=10.0)
    heap.push(Scheduled(10.0, Rank.TRIGGER))
    assert heap.pop().time == 10.0


def test_at_the_same_instant_arrivals_come_before_answers_before_new_trips_before_the_test():
    timeline = [Rank.UPLOAD, Rank.LOST, Rank.REQUEST, Rank.MERGE, Rank.TRIGGER, Rank.EVALUATE]
    assert sorted(Rank) == [*timeline, Rank.SUBMIT], "what is submitted knows all merges of its instant"

"""Events: what is logged comes back as it was, and a log from anybody is checked key by key."""

import json

import pytest

from freshet.core.events import (
    KINDS,
    Aggregated,
    Contribution,
    DevicesEvaluated,
    Discarded,
    Evaluated,
    Event,
    Hurried,
    Lost,
    MalformedEvent,
    Merged,
    Noted,
    Rejected,
    Requested,
    Triggered,
    Uploaded,
    parse,
    record,
)

EXAMPLES: list[Event] = [
    Triggered(3, 1, 7, 5, 0.1),
    Triggered(3, 1, 7, 5, 0.1, round=2),
    Requested(3, 1, 7, 9, 2, "meta", 9),
    Requested(3, 1, 7, 7, 2, "fixed", None),
    Merged(3, 1, 7, 9, 2, numbers={"beta": 0.5, "loss_after": None}),
    Merged(3, 1, 7, 9, 2, round=4, k=2, numbers={}),
    Hurried(3, 1),
    Uploaded(3, 1, 7, 9, 2600),
    Aggregated(9, 0.25, (Contribution(3, 7, 3, 0.5),), 3, 1, numbers={"alpha": 0.5, "adapted": False}),
    Aggregated(9, 0.25, (Contribution(3, 9, 1, 0.5), Contribution(4, 9, 1, 0.5)), round=9, numbers={"samples": [1, 1]}),
    Aggregated(9, 0.0, ()),
    Discarded(3, 1, "too stale", 9, 7, 3),
    Rejected("no such trip in flight", 3, 1),
    Rejected("not a message"),
    Lost(3, 1, "device left"),
    Evaluated(9, {"accuracy": 0.5, "loss": None}),
    DevicesEvaluated(9, {"accuracy": [0.5, None], "loss": [1.5, None]}),
    Noted("slots", {"probabilities": [0.5, 0.5]}),
]


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_a_logged_event_reads_back_as_it_was(event):
    line = json.loads(json.dumps({"seq": 1, "time": 2.5, **record(event)}))
    assert parse(line) == event


def test_there_is_an_example_of_every_kind():
    assert {type(event) for event in EXAMPLES} == set(KINDS.values())


def test_what_does_not_apply_is_left_out_and_nothing_newer_is_said():
    assert "round" not in record(EXAMPLES[0])
    assert record(EXAMPLES[3])["fresh"] is None
    assert "device" not in record(EXAMPLES[9])


def test_a_kind_that_is_not_known_is_no_error():
    assert parse({"seq": 1, "time": 0.0, "kind": "teleport", "x": 1}) is None


@pytest.mark.parametrize(
    ("event", "change", "sentence"),
    [
        (0, {"trip": None}, "trip is None, not a whole number"),
        (0, {"trip": True}, "trip is True, not a whole number"),
        (0, {"lr": "fast"}, "lr is 'fast', not a number"),
        (0, {"device": 1.0}, "device is 1.0, not a whole number"),
        (8, {"contributions": {}}, "contributions is not a list of devices"),
        (8, {"contributions": [{"device": 1, "base": 1, "staleness": 1}]}, "contributions: weight is missing"),
        (8, {"contributions": [{"device": 1, "base": [], "staleness": 1, "weight": 1}]}, "base is"),
        (12, {"reason": 5}, "reason is 5, not a text"),
        (0, {"kind": 5}, "it has no kind"),
    ],
)
def test_what_is_not_what_it_should_be_is_named(event, change, sentence):
    with pytest.raises(MalformedEvent, match=sentence):
        parse(record(EXAMPLES[event]) | change)


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_a_missing_key_is_named(event):
    line = record(event)
    optional = {*event._field_defaults, *getattr(event, "numbers", {}), "kind"}
    for key in line.keys() - optional:
        with pytest.raises(MalformedEvent, match=f"{key} is missing"):
            parse({name: value for name, value in line.items() if name != key})


def test_an_endless_value_makes_no_endless_sentence():
    with pytest.raises(MalformedEvent) as told:
        parse(record(EXAMPLES[0]) | {"trip": "x" * 10_000})
    assert len(str(told.value)) < 200

"""Events: a logged event parses back unchanged, and an untrusted log is checked key by key."""

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
    Pushed,
    Refused,
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
    Refused("no such trip in flight"),
    Lost(3, 1, "device left"),
    Evaluated(9, {"accuracy": 0.5, "loss": None}),
    DevicesEvaluated(9, {"accuracy": [0.5, None], "loss": [1.5, None]}),
    Noted("slots", {"probabilities": [0.5, 0.5]}),
    Pushed(3, 1, 7, 9),
]


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_a_logged_event_parses_back_unchanged(event):
    line = json.loads(json.dumps({"seq": 1, "time": 2.5, **record(event)}))
    assert parse(line) == event


def test_there_is_an_example_of_every_kind():
    assert {type(event) for event in EXAMPLES} == set(KINDS.values())


def test_optional_keys_are_left_out_and_a_missing_fresh_model_is_null():
    assert "round" not in record(EXAMPLES[0])
    assert record(EXAMPLES[3])["fresh"] is None
    assert "device" not in record(EXAMPLES[9])


def test_an_unknown_kind_is_not_an_error():
    assert parse({"seq": 1, "time": 0.0, "kind": "teleport", "x": 1}) is None


@pytest.mark.parametrize(
    ("event", "change", "sentence"),
    [
        (0, {"trip": None}, "trip is None, not an integer"),
        (0, {"trip": True}, "trip is True, not an integer"),
        (0, {"lr": "fast"}, "lr is 'fast', not a number"),
        (0, {"device": 1.0}, "device is 1.0, not an integer"),
        (8, {"contributions": {}}, "contributions is not a list of dicts"),
        (8, {"contributions": [{"device": 1, "base": 1, "staleness": 1}]}, "contributions: weight is missing"),
        (8, {"contributions": [{"device": 1, "base": [], "staleness": 1, "weight": 1}]}, "base is"),
        (12, {"reason": 5}, "reason is 5, not a string"),
        (0, {"kind": 5}, "it has no kind"),
    ],
)
def test_a_wrong_value_is_named(event, change, sentence):
    with pytest.raises(MalformedEvent, match=sentence):
        parse(record(EXAMPLES[event]) | change)


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_a_missing_key_is_named(event):
    line = record(event)
    optional = {*event._field_defaults, *getattr(event, "numbers", {}), "kind"}
    for key in line.keys() - optional:
        with pytest.raises(MalformedEvent, match=f"{key} is missing"):
            parse({name: value for name, value in line.items() if name != key})


def test_a_long_value_is_shortened_in_the_message():
    with pytest.raises(MalformedEvent) as told:
        parse(record(EXAMPLES[0]) | {"trip": "x" * 10_000})
    assert len(str(told.value)) < 200

"""Messages survive the round trip through Flower's records, and hostile ones are refused with a reason."""

import io
import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from freshet.core.messages import Assignment, Fresh, Merge, Slot, Upload
from freshet.flower import wire
from freshet.flower.wire import MalformedMessage, from_bytes, to_bytes

WEIGHTS = np.arange(6, dtype=np.float32)
CONTROL = np.ones(4, np.float32)


def over_the_wire(record: RecordDict) -> RecordDict:
    """Pass a record through the bytes that Flower sends."""
    arrays = {name: record[name] for name in record}
    return RecordDict({name: type(each).inflate(each.deflate(), each.children) for name, each in arrays.items()})


def test_order_round_trip() -> None:
    assignment = Assignment(2, 7, 5, 4, WEIGHTS, 3, 0.1, {"meta_slot": 2, "alpha_k": 0.5}, {"control": CONTROL})
    order = wire.Order(assignment, "session", "ticket", wire.FreshChannel("side", "host:1", "PEM", "token", True))
    back = wire.read_order(over_the_wire(wire.order_record(order)))
    assert isinstance(back, wire.Order)
    assert back.assignment[:4] == assignment[:4] and back.assignment[5:8] == assignment[5:8]
    assert np.array_equal(back.assignment.weights, WEIGHTS) and np.array_equal(
        back.assignment.vectors["control"], CONTROL
    )
    assert (back.session, back.ticket, back.channel) == (order.session, order.ticket, order.channel)


@pytest.mark.parametrize("fresh", [None, Fresh(9, 8, WEIGHTS, {"control": CONTROL})])
def test_delivery_round_trip(fresh: Fresh | None) -> None:
    back = wire.read_order(over_the_wire(wire.delivery_record(wire.FreshDelivery("s", "t", 3, fresh))))
    assert isinstance(back, wire.FreshDelivery) and (back.session, back.ticket, back.slot) == ("s", "t", 3)
    assert (back.fresh is None) == (fresh is None)
    if fresh is not None and back.fresh is not None:
        assert back.fresh[:2] == (9, 8) and np.array_equal(back.fresh.weights, WEIGHTS)


def test_upload_round_trip() -> None:
    merges = (Merge(5, {"beta": np.float64(0.25), "n1": 4}), Merge(7, {}), Merge(8, {"beta": 0.5, "n1": 9}))
    upload = Upload(1, 2, 3, WEIGHTS, 40, {"loss": 0.5}, merges, {"control": CONTROL})
    answer = wire.Answer("t", upload, samples=17, unreached="no", timing={"train": 1.5})
    back = wire.read_answer(over_the_wire(wire.answer_record(answer)))
    assert back.upload is not None and back.upload[:3] == (1, 2, 3) and back.upload.steps == 40
    assert back.upload.report == {"loss": 0.5} and back.upload.merges == merges
    assert np.array_equal(back.upload.weights, WEIGHTS) and np.array_equal(back.upload.vectors["control"], CONTROL)
    assert (back.samples, back.unreached, back.timing) == (17, "no", {"train": 1.5})


@pytest.mark.parametrize("merges", [(), (Merge(2),), (Merge(2), Merge(3, {"beta": 0.5}))])
def test_merges_round_trip_as_flower_sends_them(merges: tuple[Merge, ...]) -> None:
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

    record = wire.answer_record(wire.Answer("t", Upload(0, 1, 1, WEIGHTS, 1, merges=merges)))
    sent = recorddict_to_proto(record).SerializeToString()
    back = wire.read_answer(recorddict_from_proto(type(recorddict_to_proto(record)).FromString(sent)))
    assert back.upload is not None and back.upload.merges == merges


def test_request_and_loss_round_trip() -> None:
    asked = wire.read_answer(wire.answer_record(wire.Answer("t", slot=Slot(3, "q", 1))))
    assert asked.slot == Slot(3, "q", 1) and asked.upload is None
    assert wire.read_answer(wire.answer_record(wire.Answer("t", lost="gone"))).lost == "gone"


def hostile(data: bytes, stype: str = "numpy.ndarray") -> RecordDict:
    record = wire.answer_record(wire.Answer("t", Upload(0, 1, 1, WEIGHTS, 1)))
    record["model"] = ArrayRecord({"weights": Array("float32", (6,), stype, data)})
    return record


def saved(array: np.ndarray, **how: bool) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **how)
    return buffer.getvalue()


def archive() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, WEIGHTS)
    return buffer.getvalue()


CASES = {
    "a pickle": pickle.dumps(WEIGHTS),
    "an array of objects": saved(np.array([{}], dtype=object), allow_pickle=True),
    "an archive": archive(),
    "nothing": b"",
    "half of it": saved(WEIGHTS)[:-3],
    "more than it says": saved(WEIGHTS) + b"x",
    "doubles": saved(WEIGHTS.astype(np.float64)),
    "a matrix": saved(WEIGHTS.reshape(2, 3)),
    "a size that is not there": saved(WEIGHTS).replace(b"(6,), }", b"(9**9,)"),
    "a path": b"/etc/passwd",
    "a scalar": saved(np.float32(1.0)[...]),
}


@pytest.mark.parametrize("name", CASES)
def test_anything_but_a_flat_float32_array_is_refused(name: str) -> None:
    with pytest.raises(MalformedMessage):
        wire.read_answer(hostile(CASES[name]))


def test_other_serialisation_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="not a flat array"):
        wire.read_answer(hostile(saved(WEIGHTS), "pickle"))


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 1.5},
        {"steps": "1"},
        {"trip": True},
        {"device": b"1"},
        {"ticket": "x" * 1000},
        {"samples": [1, 2]},
        {"unreached": 3},
        {"merges": 2},
        {"merges": "2"},
        {"merges": [2.0]},
        {"merges": ["2"]},
        {"merges": [True]},
        {"merges": [b"2"]},
        {"merges": list(range(2, 1003))},
    ],
)
def test_scalars_of_wrong_type_are_refused(change: dict[str, object]) -> None:
    record = wire.answer_record(wire.Answer("t", Upload(0, 1, 1, WEIGHTS, 1)))
    record["answer"] = ConfigRecord(dict(record["answer"]) | change)
    with pytest.raises(MalformedMessage, match=next(iter(change))):
        wire.read_answer(record)


def test_missing_or_wrong_records_are_refused() -> None:
    whole = wire.answer_record(wire.Answer("t", Upload(0, 1, 1, WEIGHTS, 1, {"loss": 1.0})))
    for name, other in (("answer", whole["model"]), ("model", whole["answer"]), ("report", whole["model"])):
        with pytest.raises(MalformedMessage):
            wire.read_answer(RecordDict({key: whole[key] for key in whole} | {name: other}))
    with pytest.raises(MalformedMessage):
        wire.read_answer(RecordDict({}))
    with pytest.raises(MalformedMessage):
        wire.read_order(RecordDict({}))


def test_report_with_texts_or_lists_is_refused() -> None:
    for value in ("1", [1.0], True):
        record = wire.answer_record(wire.Answer("t", Upload(0, 1, 1, WEIGHTS, 1)))
        record["report"] = ConfigRecord({"loss": value})
        with pytest.raises(MalformedMessage, match="report"):
            wire.read_answer(record)


def test_merge_with_texts_lists_or_arrays_is_refused() -> None:
    for place in (0, 1):
        record = wire.answer_record(wire.Answer("t", Upload(0, 1, 1, WEIGHTS, 1, merges=(Merge(2), Merge(3)))))
        others = [ConfigRecord({"beta": value}) for value in ("1", [1.0], True)]
        for other in [*others, record["model"]]:
            with pytest.raises(MalformedMessage, match=f"merge{place}"):
                wire.read_answer(RecordDict({key: record[key] for key in record} | {f"merge{place}": other}))


def test_answer_without_its_list_of_merges_is_refused() -> None:
    record = wire.answer_record(wire.Answer("t", Upload(0, 1, 1, WEIGHTS, 1)))
    record["answer"] = ConfigRecord({key: value for key, value in record["answer"].items() if key != "merges"})
    with pytest.raises(MalformedMessage, match="merges is not a list of versions"):
        wire.read_answer(record)


def test_tree_round_trip_and_invalid_bytes() -> None:
    tree = {"a": WEIGHTS, "b": [1, None, {"c": CONTROL}], "d": 2**100}
    back = from_bytes(to_bytes(tree))
    assert np.array_equal(back["a"], WEIGHTS) and np.array_equal(back["b"][2]["c"], CONTROL) and back["d"] == 2**100
    back["a"][0] = 5  # it is writable
    good = to_bytes(tree)
    for bad in (b"", b"x" * 100, good[:-1], pickle.dumps(tree), good[:8] + b"[" + good[9:], b"\xff" * 8 + good[8:]):
        with pytest.raises(MalformedMessage):
            from_bytes(bad)

"""State as plain data: annotations decide how it is restored, and unsupported values are refused."""

from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Optional

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from freshet.core import saving
from freshet.errors import RunError
from freshet.methods import registry
from freshet.runs.checkpoint import pack, unpack


class Point(NamedTuple):
    name: str
    place: NDArray[np.float32]


@dataclass(frozen=True)
class Inner:
    a: float
    b: "Inner | None" = None


class Own:
    """Saves itself."""

    def __init__(self) -> None:
        self.kept = 0

    def state(self) -> list[int]:
        return [self.kept]

    def restore(self, state: list[int]) -> None:
        (self.kept,) = state


@dataclass
class State:
    count: int = 0
    rate: float = 0.5
    vector: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    maybe: NDArray[np.float32] | None = None
    by_device: dict[int, Inner] = field(default_factory=dict)
    queue: list[tuple[int, int, float]] = field(default_factory=list)
    points: dict[int, Point] = field(default_factory=dict)
    own: "Own" = field(default_factory=Own)


def filled() -> State:
    state = State(3, 0.25, np.array([1.0, np.nan]), np.ones(3, np.float32))
    state.by_device = {7: Inner(1.5, Inner(2.5)), 8: Inner(0.1)}
    state.queue, state.own.kept = [(1, 2, 0.5)], 9
    state.points = {4: Point("x", np.arange(2, dtype=np.float32))}
    return state


def through_a_file(tree):
    plain, arrays = pack(tree)
    for array in arrays.values():
        array.flags.writeable = False
    return unpack(plain, arrays)


def test_a_nested_dataclass_is_restored_with_its_types():
    state, again = filled(), State()
    saving.restore(again, through_a_file(saving.dump(state)))
    assert (again.count, again.rate, again.own.kept, again.queue) == (3, 0.25, 9, [(1, 2, 0.5)])
    assert again.by_device == state.by_device and type(again.queue[0]) is tuple
    assert again.points[4].name == "x" and type(again.points[4]) is Point
    for name in ("vector", "maybe"):
        np.testing.assert_array_equal(getattr(again, name), getattr(state, name))
        assert getattr(again, name).dtype == getattr(state, name).dtype
        assert getattr(again, name).flags.writeable


def test_a_state_of_none_is_saved_as_an_empty_dict():
    assert saving.dump(None) == {}
    saving.restore(None, {})


def test_a_tree_without_a_field_is_refused():
    with pytest.raises(KeyError):
        saving.restore(State(), {"count": 1})


def test_no_method_has_its_own_saving_code():
    for method in registry().values():
        assert not callable(vars(method).get("restore")), method


class Pair(NamedTuple):
    a: int
    b: str


class Mood(StrEnum):
    GOOD = "good"


@dataclass
class Part:
    n: int


def again(hint: Any, value: Any) -> Any:
    """A value of a field with this annotation, after saving to a file and loading."""
    kind = make_dataclass("Kept", [("v", hint, field(default=None))])
    plain, arrays = pack(saving.dump(kind(value)))
    found = kind()
    saving.restore(found, unpack(plain, arrays))
    return found.v


SAME = [
    (dict, {1: 2, "1": 3}),
    (dict, {}),
    (dict, {(5, 1): 1, None: 2, 0.5: 3, (("a", True),): 4}),
    (dict, {"$array": "a0", "$pairs": 1}),
    (dict, {"$tuple": [1]}),
    (dict[int, int], {7: 1}),
    (dict[tuple[int, int], int], {(5, 1): 1}),
    (dict[str, float] | None, {"x": 1.0}),
    (dict[str, float] | None, None),
    (Optional[dict], {3: {4: 5}}),  # noqa: UP045
    (Any, {1: [2, (3, {4: 5})]}),
    (object, (1, 2)),
    ("Unheard | None", {1: 2}),
    (list, [1, (2, 3), {4: 5}]),
    (list[tuple[int, ...]], [(1, 2, 3), ()]),
    (tuple, (1, [2])),
    (tuple[int, ...], (1, 2, 3)),
    (int, 0.5),
    (int | float, 0.5),
    (float, 3),
    (bool, 7),
    (str, 3),
    (Pair, Pair(1, "x")),
    (dict[int, Pair], {1: Pair(1, "x")}),
    (list[Part], [Part(3)]),
    (Part | None, Part(3)),
    (Mood, Mood.GOOD),
    (np.float32, np.float32(0.1)),
]


@pytest.mark.parametrize(("hint", "value"), SAME, ids=[f"{hint} {value}" for hint, value in SAME])
def test_a_value_is_restored_with_its_type(hint, value):
    found = again(hint, value)
    assert repr(found) == repr(value) and type(found) is type(value)


@pytest.mark.parametrize("hint", [Any, list, object, list[np.ndarray]])
def test_arrays_are_restored_as_copies_without_an_annotation(hint):
    (found,) = again(hint, [np.arange(3)])
    assert found.tolist() == [0, 1, 2] and found.flags.writeable and found.dtype == np.arange(3).dtype


BAD = [
    (Any, {1}, r"v is a set"),
    (set[int], {1}, r"v is a set"),
    (Any, b"x", r"v is a bytes"),
    (Any, torch.ones(1), r"v is a torch.Tensor"),
    (Any, {"a": [object()]}, r"v\['a'\]\[0\] is a object"),
    (Any, deque([1]), r"v is a collections.deque"),
    (defaultdict, defaultdict(int), r"v is a collections.defaultdict"),
    (dict[int, int], defaultdict(int), r"v is a collections.defaultdict"),
    (dict, Counter("a"), r"v is a collections.Counter"),
    (dict, OrderedDict(), r"v is a collections.OrderedDict"),
    (Any, np.array([None]), r"v is a numpy.ndarray of object"),
    (Any, 1j, r"v is a complex"),
]


@pytest.mark.parametrize(("hint", "value", "sentence"), BAD, ids=[sentence for _, _, sentence in BAD])
def test_an_unsupported_value_is_refused_with_its_place(hint, value, sentence):
    with pytest.raises(RunError, match=f"^self.state.{sentence}; use numbers, strings, lists, tuples, dicts and numpy"):
        saving.dump(make_dataclass("Kept", [("v", hint)])(value), "self.state")


@pytest.mark.parametrize(
    ("hint", "value", "sentence"),
    [
        (dict, {1: Part(3)}, r"self.state.v\[1\] is a Part, but would not be restored as one; name it in the annot"),
        (Any, Pair(1, "x"), r"self.state.v is a Pair, but would not be restored as one"),
        (dict, {Pair(1, "x"): 3}, r"self.state.v has a key that is a .*Pair; use numbers, strings or tuples of them"),
        (dict, {frozenset(): 3}, r"self.state.v has a key that is a frozenset"),
        (list[int], (1, 2), r"self.state.v is a tuple, but its annotation says list\[int\]"),
        (int, [1], r"self.state.v is a list, but its annotation says int"),
        (tuple[int, int], (1, 2, 3), r"self.state.v is a tuple, but its annotation says tuple\[int, int\]"),
    ],
)
def test_a_value_that_its_annotation_does_not_describe_is_refused(hint, value, sentence):
    with pytest.raises(RunError, match=f"^{sentence}"):
        saving.dump(make_dataclass("Kept", [("v", hint)])(value), "self.state")


@pytest.mark.parametrize(
    ("hint", "saved"),
    [(int, "x"), (int, [1]), (float, {}), (dict[int, int], [1]), (tuple[int, int], [1]), (list[int], 3), (Pair, [1])],
)
def test_saved_data_that_contradict_the_annotation_are_refused(hint, saved):
    with pytest.raises((TypeError, ValueError)):
        saving.restore(make_dataclass("Kept", [("v", hint, field(default=None))])(), {"v": saved})


def test_data_of_format_1_are_restored_by_their_annotations():
    kind = make_dataclass("Kept", [("v", dict[int, tuple[int, int]], field(default=None))])
    found = kind()
    saving.restore(found, {"v": {"7": [1, 2]}})
    assert found.v == {7: (1, 2)}

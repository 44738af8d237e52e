"""State as plain data: what a dataclass holds comes back by its annotations, arrays as copies."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from freshet.core import saving
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


def test_everything_comes_back_as_what_it_was():
    state, again = filled(), State()
    saving.restore(again, through_a_file(saving.dump(state)))
    assert (again.count, again.rate, again.own.kept, again.queue) == (3, 0.25, 9, [(1, 2, 0.5)])
    assert again.by_device == state.by_device and type(again.queue[0]) is tuple
    assert again.points[4].name == "x" and type(again.points[4]) is Point
    for name in ("vector", "maybe"):
        np.testing.assert_array_equal(getattr(again, name), getattr(state, name))
        assert getattr(again, name).dtype == getattr(state, name).dtype
        assert getattr(again, name).flags.writeable


def test_nothing_is_saved_of_nothing():
    assert saving.dump(None) == {}
    saving.restore(None, {})


def test_a_tree_that_lacks_a_field_is_refused():
    with pytest.raises(KeyError):
        saving.restore(State(), {"count": 1})


def test_no_method_writes_its_own_saving():
    for method in registry().values():
        assert not callable(vars(method).get("restore")), method

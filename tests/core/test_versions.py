"""The version store keeps the current model and every model that a trip holds, and nothing else."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from freshet.core.server import VersionStore


def model(version: int) -> np.ndarray:
    return np.full(3, version, np.float32)


class StoreAgainstPlainCounts(RuleBasedStateMachine):
    """The store compared with a naive model: a Counter of holds."""

    def __init__(self):
        super().__init__()
        self.store = VersionStore(model(1))
        self.current = 1
        self.holds: Counter[int] = Counter()

    def known(self) -> list[int]:
        return sorted({self.current} | {version for version, count in self.holds.items() if count})

    @rule(data=st.data())
    def hold(self, data):
        version = data.draw(st.sampled_from(self.known()))
        assert self.store.hold(version)[0] == version
        self.holds[version] += 1

    @precondition(lambda self: +self.holds)
    @rule(data=st.data())
    def release(self, data):
        version = data.draw(st.sampled_from(sorted(+self.holds)))
        self.store.release(version)
        self.holds[version] -= 1

    @rule()
    def advance(self):
        self.current += 1
        assert self.store.advance(model(self.current)) == self.current

    @rule()
    def save_and_restore(self):
        self.store = VersionStore.restore(self.store.items(), self.store.current)

    @invariant()
    def holds_what_is_needed_and_nothing_else(self):
        assert [version for version, _, _ in self.store.items()] == self.known()
        assert len(self.store) == len(self.known())
        for version, weights, holders in self.store.items():
            assert version in self.store
            assert holders == self.holds[version]
            assert (weights == version).all()
            assert (self.store.get(version) == version).all()

    @invariant()
    def the_newest_is_current(self):
        assert self.store.current == self.current
        assert (self.store.weights == self.current).all()


TestStore = StoreAgainstPlainCounts.TestCase
TestStore.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)


def test_the_first_model_has_version_1():
    assert VersionStore(model(1)).current == 1


def test_releasing_more_often_than_holding_is_an_error():
    store = VersionStore(model(1))
    store.hold(1)
    store.release(1)
    with pytest.raises(ValueError, match="version 1"):
        store.release(1)


def test_a_dropped_version_cannot_be_held_again():
    store = VersionStore(model(1))
    store.advance(model(2))
    assert 1 not in store
    with pytest.raises(KeyError):
        store.hold(1)

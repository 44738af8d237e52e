"""The shaped selectors find the best slot in scripted worlds where it is known; the printed ones follow the print."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from freshet.core.messages import Assignment, Merge, Slot
from freshet.core.streams import stream
from freshet.methods import method_options
from freshet.methods.asmu import slots
from freshet.methods.asmu.meta import ShapedSelector
from freshet.methods.asmu.rule import FreshModelRule

EPOCHS, SEEDS, ENOUGH = 5, 10, 9
#: Rewards are as small as real ones (some thousandths): nothing may depend on their scale.
WORLDS: dict[str, Callable[[int, int], float]] = {
    "only the best slot pays": lambda slot, best: 0.003 * (slot == best),
    "every slot pays, the best one most": lambda slot, best: 0.003 * (1 - abs(slot - best) / EPOCHS),
    "every slot costs, the best one nothing": lambda slot, best: -0.003 * abs(slot - best),
}


def local_of(memory: dict[str, Any], number: int, slot: Slot, merged: dict[str, float]) -> Any:
    """Return what a rule sees at the end of a trip with this slot."""
    sent = Assignment(0, number, 1, 1, np.zeros(1, np.float32), EPOCHS, 0.1, {"meta_slot": 3})
    merges = [Merge(2, merged)] if merged else []
    return SimpleNamespace(assignment=sent, slot=slot, memory=dict(memory), merges=merges, report={})


class Device:
    """A device reduced to its rule. The world gives each trip the reward of its slot."""

    def __init__(self, seed: int, selector: slots.Selector = "shaped") -> None:
        self.rule, self.seed = FreshModelRule(method_options("fedasmu", {"selector": selector})), seed
        self.memory: dict[str, Any] = {}

    def trip(self, number: int, reward: Callable[[int], float]) -> tuple[Slot, dict[str, Any]]:
        sent = Assignment(0, number, 1, 1, np.zeros(1, np.float32), EPOCHS, 0.1, {"meta_slot": 3})
        slot = self.rule.plan(self.memory, sent, stream(self.seed, "slot", 0, number))  # as in a run
        assert slot is not None
        local = local_of(self.memory, number, slot, {"reward": reward(slot.epoch)})
        self.rule.finish(local)
        self.memory = local.memory
        return slot, local.report


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("best", range(1, EPOCHS + 1))
def test_q_table_finds_the_best_slot_within_100_trips(world: str, best: int) -> None:
    found = 0
    for seed in range(SEEDS):
        device = Device(seed)
        asked = [device.trip(number, lambda slot: WORLDS[world](slot, best))[0].epoch for number in range(1, 101)]
        found += Counter(asked[-20:]).most_common(1)[0][0] == best
    assert found >= ENOUGH


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("best", range(1, EPOCHS + 1))
def test_meta_model_finds_the_best_slot_within_200_first_trips(world: str, best: int) -> None:
    options, found = method_options("fedasmu", {"selector": "shaped"}), 0
    for seed in range(SEEDS):
        selector = ShapedSelector(EPOCHS, options.eta_rl, options.rho, seed, options.epsilon)
        for device in range(200):
            rng = stream(seed, "slot", device, 1)  # as in a run
            slot = slots.first_slot(selector.best_slot(), EPOCHS, options.epsilon, rng).epoch
            reward = WORLDS[world](slot, best)
            selector.add_reward(reward)
            selector.reinforce(slot, reward)
        found += selector.best_slot() == best
    assert found >= ENOUGH


def test_empty_request_teaches_the_table_a_reward_of_zero() -> None:
    device = Device(0)
    device.trip(1, lambda _: 0.5)
    local = local_of(device.memory, 2, Slot(4, "q", 1), {})
    device.rule.finish(local)
    assert local.report == {"reward": 0.0, "slot": 4, "first": 0}
    options = device.rule.options
    assert local.memory["table"][2, 2] == pytest.approx(options.phi_q * (0.0 - 0.5)) and local.memory["slot"] == 4
    assert {"gamma", "upsilon"}.isdisjoint(local.memory), "controls do not move without a merge"


@pytest.mark.parametrize("name", ["fedasmu", "fedasmu-published", "fedssmu"])
def test_printed_table_starts_at_zero_and_uses_plain_rewards(name: str) -> None:
    """``H(l, a) += phi (R + psi max H(l', .) - H(l, a))`` with R itself."""
    rule = FreshModelRule(method_options(name, {}))
    first = local_of({}, 1, Slot(3, "meta"), {"reward": 0.25})
    rule.finish(first)
    assert first.report == {"slot": 3, "first": 1, "reward": 0.25} and not first.memory["table"].any()
    local = local_of(first.memory, 2, Slot(2, "q", -1), {"reward": 0.5})
    rule.finish(local)
    assert local.memory["table"][2, 0] == pytest.approx(rule.options.phi_q * 0.5)


def test_printed_selector_learns_nothing_without_a_merge() -> None:
    """The paper counts merges (t_i): without one, table, slot and meta model stay, and the device is still new."""
    rule = FreshModelRule(method_options("fedasmu", {}))
    for memory in ({}, {"slot": 3, "b": 0.25, "table": slots.empty_table(EPOCHS, "printed")}):
        local = local_of(memory, 2, Slot(4, "q", 1), {})
        rule.finish(local)
        assert local.report == {} and local.memory == memory


def test_printed_exploration_does_not_fade() -> None:
    rule = FreshModelRule(method_options("fedasmu", {"epsilon": 0.3}))
    memory = {"slot": 3, "b": 0.0, "table": slots.empty_table(EPOCHS, "printed")}
    sent = Assignment(0, 1000, 1, 1, np.zeros(1, np.float32), EPOCHS, 0.1, {"meta_slot": 3})
    planned = [rule.plan(memory, sent, stream(seed, "slot", 0, 1000)) for seed in range(1000)]
    assert sum(slot is not None and slot.by == "explore" for slot in planned) == pytest.approx(300, abs=50)


def test_slot_distribution_is_logged_when_it_changes_by_more_than_one_percent() -> None:
    selector = ShapedSelector(EPOCHS, 1e-3, 0.1, seed=0)
    assert selector.changed_distribution() is None
    before = selector.distribution()
    for _ in range(3):
        selector.add_reward(1.0)
        selector.reinforce(5, 1.0)
    news = selector.changed_distribution()
    assert news is not None and np.abs(np.array(news["probabilities"]) - before).max() > 0.01
    assert selector.changed_distribution() is None

"""When a device asks: fixed policies, the Q-table, the meta model."""

from typing import Any

import numpy as np
import pytest
import torch

from freshet.errors import ConfigError
from freshet.methods._shared.rebase import fixed_slot
from freshet.methods.asmu import slots
from freshet.methods.asmu.meta import SELECTORS, MetaSelector, ShapedSelector, load_pretrained, pretrain
from tests.twins.fedasmu import QTableTwin, baseline_after, slot_distribution

NAMES = {-1: "minus", 0: "stay", 1: "add"}


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("policy", "epochs", "expected"),
    [
        ("h1", 5, 2),
        ("h2", 5, 3),
        ("h3", 5, 4),
        ("h2", 10, 6),
        ("h3", 10, 9),
        ("h1", 1, 1),
        ("h3", 1, 1),
        ("last", 5, 5),
        ("last", 1, 1),
        (4, 5, 4),
    ],
)
def test_fixed_policies_ask_where_the_paper_says(policy: str | int, epochs: int, expected: int) -> None:
    slot = fixed_slot(policy, epochs, rng())
    assert slot is not None and (slot.epoch, slot.by) == (expected, "fixed")


def test_never_never_asks_and_random_reaches_every_epoch() -> None:
    generator = rng()
    assert fixed_slot("never", 5, generator) is None
    drawn = {fixed_slot("random", 5, generator).epoch for _ in range(200)}  # type: ignore[union-attr]
    assert drawn == {1, 2, 3, 4, 5}


def test_q_table_matches_the_twin() -> None:
    generator, table, twin = rng(), slots.empty_table(5, "printed"), QTableTwin(5, phi_q=0.3, psi=0.8)
    last = 3
    for _ in range(300):
        slot = slots.next_slot(table, last, epsilon=0.3, rng=generator)
        assert slot.epoch == twin.next_slot(last, NAMES[slot.action])
        if slot.by == "q":
            assert NAMES[slot.action] in twin.best_actions(last)
        reward = float(generator.normal())
        slots.update_table(table, last, slot.action, slot.epoch, reward, 0.3, 0.8)
        value = twin.update(last, NAMES[slot.action], slot.epoch, reward)
        assert table[last - 1, slots.ACTIONS.index(slot.action)] == pytest.approx(value, rel=1e-12)
        last = slot.epoch


def test_e3_stay_adds_nothing_and_slots_stay_inside_the_training() -> None:
    table = slots.empty_table(4, "printed")
    table[1] = [0.0, 1.0, 0.0]
    assert slots.next_slot(table, 2, 0.0, rng()) == (2, "q", 0)
    table[0] = [1.0, 0.0, 0.0]
    table[3] = [0.0, 0.0, 1.0]
    assert slots.next_slot(table, 1, 0.0, rng()).epoch == 1
    assert slots.next_slot(table, 4, 0.0, rng()).epoch == 4


def test_exploration_has_probability_epsilon_and_is_logged() -> None:
    generator, table = rng(), slots.empty_table(5, "printed")
    explored = sum(slots.next_slot(table, 3, 0.25, generator).by == "explore" for _ in range(4000))
    assert explored == pytest.approx(1000, abs=120)
    first = [slots.first_slot(2, 5, 0.25, generator) for _ in range(4000)]
    assert sum(slot.by == "explore" for slot in first) == pytest.approx(1000, abs=120)
    assert all(slot.epoch == 2 for slot in first if slot.by == "meta")


def test_slot_probabilities_are_those_of_the_first_request() -> None:
    p = rng().random(6)
    assert slots.chain_distribution(p) == pytest.approx(slot_distribution(list(p)))
    assert slots.chain_distribution(np.array([0.0, 1.0, 0.5])) == pytest.approx([0, 1, 0])


def test_ties_are_broken_at_random_and_untried_actions_come_first() -> None:
    generator = rng()
    drawn = [slots.next_slot(slots.empty_table(5, "printed"), 3, 0.0, generator).action for _ in range(900)]
    assert [drawn.count(action) for action in slots.ACTIONS] == pytest.approx([300] * 3, abs=60)
    table = slots.empty_table(5, "shaped")
    slots.update_table(table, 3, 0, 3, reward=2.0, phi_q=0.5, psi=0.5)
    assert table[2, 1] == 1.0
    assert {slots.next_slot(table, 3, 0.0, generator).action for _ in range(50)} == {-1, 1}


def meta(**options: float) -> ShapedSelector:
    return ShapedSelector(5, **({"eta_rl": 0.1, "rho": 0.2, "seed": 1} | options))  # type: ignore[arg-type]


def printed(**options: float) -> MetaSelector:
    return MetaSelector(5, **({"eta_rl": 0.1, "rho": 0.2, "seed": 1} | options))  # type: ignore[arg-type]


def test_printed_meta_model_is_one_lstm_layer_one_linear_layer_and_a_softmax() -> None:
    """Recomputed gate by gate from torch's own initialisation: width 32, one-hot epochs, nothing added."""
    selector = printed()
    state = {name: value.numpy() for name, value in selector.network.state_dict().items()}
    assert {name: value.shape for name, value in state.items()} == {
        "lstm.weight_ih_l0": (128, 5),
        "lstm.weight_hh_l0": (128, 32),
        "lstm.bias_ih_l0": (128,),
        "lstm.bias_hh_l0": (128,),
        "head.weight": (1, 32),
        "head.bias": (1,),
    }
    assert all(np.abs(value).max() <= 1 / np.sqrt(32) for value in state.values()), "torch's default initialisation"

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    h, c, logits = np.zeros(32), np.zeros(32), []
    for epoch in range(5):
        gates = state["lstm.weight_ih_l0"][:, epoch] + state["lstm.bias_ih_l0"]
        gates = gates + state["lstm.weight_hh_l0"] @ h + state["lstm.bias_hh_l0"]
        i, f, g, o = np.split(gates, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        logits.append(float(state["head.weight"][0] @ h + state["head.bias"][0]))
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(selector.distribution(), expected, rtol=1e-10)
    np.testing.assert_allclose(selector.distribution(3), expected[:3] / expected[:3].sum(), rtol=1e-10)


@pytest.mark.parametrize("slot", range(1, 6))
def test_printed_log_probability_is_the_sum_over_the_decisions(slot: int) -> None:
    """The paper's ``sum_l log P(s_l | s_1..s_(l-1))``: not asked at 1..l*-1, asked at l*, nothing left to decide."""
    selector = printed()
    probable = selector.distribution()
    chain = 0.0
    for epoch in range(1, slot + 1):
        asks = probable[epoch - 1] / probable[epoch - 1 :].sum()
        chain += np.log(asks if epoch == slot else 1 - asks)
    assert selector.log_probability(slot).item() == pytest.approx(chain)


def test_untrained_shaped_model_prefers_the_middle_and_allows_every_slot() -> None:
    for seed in range(5):
        distribution = meta(seed=seed).distribution()
        assert distribution.sum() == pytest.approx(1) and distribution.min() > 0.1
        assert meta(seed=seed).best_slot() == 3


@pytest.mark.parametrize(("kind", "expected_advantage"), [("printed", 0.8), ("shaped", 0.8 / 0.5)])
def test_meta_model_step_is_the_log_probability_gradient_times_the_advantage(
    kind: slots.Selector, expected_advantage: float
) -> None:
    selector = SELECTORS[kind](5, eta_rl=0.1, rho=0.2, seed=1)
    selector.rewards.mean, selector.rewards.variance = 0.3, 0.25
    before = [p.detach().clone() for p in selector.network.parameters()]
    h, slot, reward = 1e-6, 4, 1.1
    expected = []
    for parameter in selector.network.parameters():
        gradient = torch.zeros_like(parameter)
        for index in np.ndindex(*parameter.shape):
            with torch.no_grad():
                values = []
                for sign in (1, -1):
                    parameter[index] += sign * h
                    values.append(float(selector.log_probability(slot)))
                    parameter[index] -= sign * h
            gradient[index] = (values[0] - values[1]) / (2 * h)
        expected.append(gradient)
    weight = 1.0
    if isinstance(selector, ShapedSelector):
        assert selector.best_slot() != slot
        weight = min(float(selector.distribution()[slot - 1]) / (0.1 / 5), 10.0)
        assert selector.importance_weight(slot) == pytest.approx(weight)
    selector.reinforce(slot, reward)
    for parameter, old, gradient in zip(selector.network.parameters(), before, expected, strict=True):
        step = 0.1 * weight * expected_advantage
        torch.testing.assert_close(parameter.detach() - old, step * gradient, rtol=1e-4, atol=1e-7)


def test_log_probability_is_that_of_the_decisions_up_to_the_request() -> None:
    selector = meta()
    p = torch.sigmoid(selector.logits()).detach().numpy()
    assert selector.log_probability(3).item() == pytest.approx(np.log((1 - p[0]) * (1 - p[1]) * p[2]))


def test_the_running_mean_of_rewards_follows_rho() -> None:
    selector = meta()
    selector.add_reward(2.0)
    assert selector.rewards.mean == pytest.approx(baseline_after(0.0, 2.0, 0.2))
    selector.add_reward(-1.0)
    assert selector.rewards.mean == pytest.approx(baseline_after(0.4, -1.0, 0.2))


def test_running_deviation_matches_the_rewards_at_every_scale() -> None:
    for scale in (0.003, 1.0):
        rewards, drawn = slots.RunningReward(0.01), np.random.default_rng(3).normal(2 * scale, scale, 5000)
        for reward in drawn:
            rewards.add(float(reward))
        assert np.sqrt(rewards.variance) == pytest.approx(scale, rel=0.2)
        assert rewards.scaled_advantage(3 * scale) == pytest.approx(1.0, abs=0.5)
        assert rewards.advantage(3 * scale) == pytest.approx(scale, abs=0.5 * scale)
    assert slots.RunningReward(0.1).scaled_advantage(0.0) == 0.0


@pytest.mark.parametrize(("make", "rate"), [(meta, 1e-3), (printed, 0.1)])
def test_meta_model_finds_the_rewarded_slot(make: Any, rate: float) -> None:
    """The printed model needs a hundred times the paper's rate even for rewards of 1."""
    selector, generator = make(eta_rl=rate), rng()
    for _ in range(400):
        slot = int(generator.choice(5, p=selector.distribution())) + 1
        reward = 1.0 if slot == 5 else 0.0
        selector.add_reward(reward)
        selector.reinforce(slot, reward)
    assert selector.best_slot() == 5 and selector.distribution()[4] > 0.8


@pytest.mark.parametrize("make", [meta, printed])
def test_meta_model_state_survives_a_round_trip(make: Any) -> None:
    selector, other = make(), make(seed=9)
    selector.add_reward(1.0)
    selector.reinforce(2, 1.5)
    other.restore(selector.state())
    assert other.rewards == selector.rewards and other.lessons == 1
    np.testing.assert_array_equal(other.distribution(), selector.distribution())


def test_pretraining_learns_from_a_log_and_survives_a_file(tmp_path) -> None:
    log = [{"kind": "merge", "slot": 5 if i % 2 else 2, "reward": float(i % 2)} for i in range(300)]
    selector = meta(eta_rl=1e-3)
    assert pretrain(selector, [{"kind": "upload"}, {"kind": "merge", "slot": 1, "reward": None}, *log]) == 300
    assert selector.best_slot() == 5
    selector.save(tmp_path / "meta.safetensors")
    other = meta(seed=8)
    other.load(tmp_path / "meta.safetensors")
    np.testing.assert_array_equal(other.distribution(), selector.distribution())


def test_printed_pretraining_repeats_the_plain_update() -> None:
    """A request that found nothing newer changed no loss: its reward is 0."""
    log = [{"kind": "merge", "slot": 2, "reward": 0.5}, {"kind": "request", "slot": 3, "fresh": None}]
    selector, twin = printed(), printed()
    assert pretrain(selector, log, passes=2) == 2
    for slot, reward in 2 * [(2, 0.5), (3, 0.0)]:
        twin.add_reward(reward)
        twin.reinforce(slot, reward)
    np.testing.assert_array_equal(selector.distribution(), twin.distribution())


@pytest.mark.parametrize(("kind", "expected"), [("async", {2, 3}), ("sync", {4, 5})])
def test_shipped_meta_model_is_for_five_epochs_and_the_printed_selector(kind: Any, expected: set[int]) -> None:
    """In rounds nothing newer exists in the first slots, so FedSSMU's model prefers the later ones."""
    selector = printed()
    before = selector.distribution()
    load_pretrained(selector, "none", kind)
    np.testing.assert_array_equal(selector.distribution(), before)
    load_pretrained(selector, "shipped", kind)
    assert selector.best_slot() in expected
    other = MetaSelector(4, 0.1, 0.2, 1)
    before = other.distribution()
    load_pretrained(other, "shipped", kind)
    np.testing.assert_array_equal(other.distribution(), before)
    with pytest.raises(ConfigError, match=r'^method\.meta_from: the shipped model is for method\.selector = "printed"'):
        load_pretrained(meta(), "shipped", kind)


def test_file_that_is_no_meta_model_is_refused(tmp_path) -> None:
    (tmp_path / "bad").write_bytes(b"nonsense")
    for path in (tmp_path / "bad", tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"method\.meta_from: .* is not a pre-trained meta model"):
            meta().load(path)

"""Selection: uniform with unchanged bits, in proportion to samples, and by a user's function."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.core.scheduling import BLOCK_SIZE, View, selector
from freshet.core.streams import stream
from freshet.errors import ConfigError


def look(rng: np.random.Generator) -> View:
    return View(1, 0, np.ones(3, np.int64), {}, rng)


def everybody(_: int) -> bool:
    return True


class Before:
    """A second implementation of uniform selection, as in version 0.1."""

    def __init__(self, seed: int, samples: np.ndarray) -> None:
        self.seed, self.samples, self.draws = seed, samples, 0

    def select(self, count: int, free) -> list[int]:
        chosen: set[int] = set()
        for _ in range(4 * count + 64):
            if len(chosen) == count:
                return sorted(chosen)
            block, place = divmod(self.draws, BLOCK_SIZE)
            device = int(stream(self.seed, "select", block).integers(len(self.samples), size=BLOCK_SIZE)[place])
            self.draws += 1
            if device not in chosen and free(device) and self.samples[device] > 0:
                chosen.add(device)
        if len(chosen) < count:
            idle = [d for d in range(len(self.samples)) if d not in chosen and self.samples[d] > 0 and free(d)]
            order = stream(self.seed, "select rest", self.draws).permutation(len(idle))
            chosen.update(idle[index] for index in order[: count - len(chosen)])
        return sorted(chosen)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 40), st.integers(0, 99), st.integers(1, 12), st.sets(st.integers(0, 39)))
def test_uniform_selection_keeps_its_bits(devices, seed, count, away):
    samples = np.arange(devices) % 3
    now, before = selector("uniform", seed, samples), Before(seed, samples)
    for _ in range(3):
        assert now.select(count, lambda d: d not in away, look) == before.select(count, lambda d: d not in away)
        assert now.draws == before.draws


def probabilities(weights: np.ndarray, count: int) -> np.ndarray:
    """Inclusion probabilities of sequential drawing without replacement, by enumerating all orders."""
    result = np.zeros(len(weights))
    for order in permutations(range(len(weights)), count):
        chance, left = 1.0, float(weights.sum())
        for device in order:
            chance *= weights[device] / left
            left -= weights[device]
        result[list(order)] += chance
    return result


@pytest.mark.parametrize("busy", [0, 400], ids=["most are free", "hardly any is free"])
def test_by_samples_draws_in_proportion_without_replacement(busy):
    weights = np.array([1, 2, 0, 4, 8])
    samples = np.concatenate([weights, np.full(busy, 50)])
    chooser = selector("by_samples", 3, samples)
    rounds = 4000
    picks = Counter(d for _ in range(rounds) for d in chooser.select(2, lambda d: d < len(weights), look))
    shares = np.array([picks[d] / rounds for d in range(len(weights))])
    np.testing.assert_allclose(shares, probabilities(weights, 2), atol=0.03)  # 3.8 standard deviations
    assert set(picks) <= {0, 1, 3, 4}


@pytest.mark.parametrize("kind", ["uniform", "by_samples"])
def test_a_selector_resumes_from_its_number_of_draws(kind):
    samples = np.arange(1, 31)
    one, two, other = (selector(kind, seed, samples) for seed in (0, 0, 1))
    first = [one.select(4, everybody, look) for _ in range(3)]
    two.draws = one.draws
    later = one.select(4, everybody, look)
    assert two.select(4, everybody, look) == later
    assert [other.select(4, everybody, look) for _ in range(3)] != first
    assert all(len(set(chosen)) == 4 and chosen == sorted(chosen) for chosen in [*first, later])


def test_all_devices_are_taken_if_there_are_too_few():
    chooser = selector("by_samples", 0, np.array([5, 0, 1, 9]))
    assert chooser.select(10, lambda d: d != 3, look) == [0, 2]
    assert chooser.select(2, lambda _: False, look) == []


def test_a_selection_function_gets_the_candidates_and_its_own_random_stream():
    seen = []

    def highest_number(view, count, candidates):
        seen.append((count, candidates, view.rng.random()))
        return sorted(candidates, key=lambda device: -device)[:count]

    samples = np.array([3, 0, 5, 2, 9])
    chooser = selector(highest_number, 0, samples)
    assert chooser.select(2, lambda d: d != 4, look) == [2, 3]
    assert chooser.select(1, everybody, look) == [4]
    assert [row[:2] for row in seen] == [(2, [0, 2, 3]), (1, [0, 2, 3, 4])]
    assert seen[0][2] != seen[1][2]
    again = selector(highest_number, 0, samples)
    again.draws = 1
    again.select(1, everybody, look)
    assert seen[2][2] == seen[1][2]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([0, 1, 2], "returned 3 devices, but at most 2"),
        ([1, 1], "returned a device twice"),
        ([0, 7], "returned device 7, which is not one of the candidates"),
        ([3], "returned device 3, which is not"),
        ([0.0], "must return a list of device numbers"),
        (["a"], "must return a list of device numbers"),
        ([[0, 1]], "must return a list of device numbers"),
        (None, "must return device numbers"),
    ],
)
def test_the_answer_of_a_selection_function_is_checked(given, says):
    with pytest.raises(ConfigError, match=says) as caught:
        selector(lambda *_: given, 0, np.ones(4, int)).select(2, lambda d: d != 3, look)
    assert caught.value.key == "run.selection"


def test_a_selection_function_may_return_an_array_or_no_device():
    def select(given):
        return selector(lambda *_: given, 0, np.ones(4, int)).select(2, everybody, look)

    assert select(np.array([2, 0])) == [0, 2]
    assert select(iter([1])) == [1]
    assert select([]) == []


def test_an_unknown_selection_is_an_error():
    with pytest.raises(ConfigError, match=r"run\.selection: must be one of uniform, by_samples"):
        selector("fastest", 0, np.ones(2, int))

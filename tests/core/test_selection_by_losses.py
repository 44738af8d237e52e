"""Selection by the losses that devices report: Power-of-Choice and Oort."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.core.method import MethodContext
from freshet.core.scheduling import LastReport, Oort, PowerOfChoice, View, draw_weighted
from freshet.core.server import Server
from freshet.errors import ConfigError
from freshet.federation import Federation
from freshet.methods import class_and_preset, method_options
from freshet.training.optimisers import constant
from tests.methods.conftest import SMALL
from tests.methods.helpers import LAYOUT, same, upload_of, vector


def view(rounds: int, seed: int = 0) -> View:
    return View(1, rounds, np.ones(1, np.int64), {}, np.random.default_rng(seed))


def select(selector: PowerOfChoice, count: int, rounds: int = 0, free: Any = lambda device: True) -> list[int]:
    return selector.select(count, free, lambda rng: View(1, rounds, selector.samples, {}, rng))


# ---- Power-of-Choice


def test_power_of_choice_takes_the_largest_losses_among_twice_as_many() -> None:
    selector = PowerOfChoice(3, np.full(4, 10, np.int64))
    for device, loss in enumerate([0.1, 2.0, 0.5, 1.0]):
        selector.record(device, LastReport(loss, 1, 5.0))
    assert select(selector, 2) == [1, 3], "all four are candidates"
    drawn = [select(selector, 1) for _ in range(300)]
    assert drawn.count([0]) == 0, "the least of two is never taken"
    assert 0.4 < drawn.count([1]) / 300 < 0.6, "the largest wins whenever it is drawn, with probability 1/2"


def test_new_devices_come_first() -> None:
    selector = PowerOfChoice(3, np.full(4, 10, np.int64))
    for device in (0, 1):
        selector.record(device, LastReport(9.0, 1, 5.0))
    assert select(selector, 2) == [2, 3]


def test_candidates_are_drawn_in_proportion_to_samples() -> None:
    rng, counts = np.random.default_rng(1), np.zeros(3)
    for _ in range(3000):
        counts[draw_weighted(rng, [0, 1, 2], np.array([1.0, 2.0, 5.0]), 1)] += 1
    np.testing.assert_allclose(counts / 3000, [0.125, 0.25, 0.625], atol=0.03)
    assert sorted(draw_weighted(rng, [4, 7], np.ones(2), 5)) == [4, 7]


# ---- Oort


def oort(*reports: tuple[float, int, float], samples: int = 1, devices: int | None = None) -> Oort:
    """Reports are (U_k, t_k, D_k) with one sample each."""
    selector = Oort(3, np.full(devices or len(reports), samples, np.int64))
    for device, (U, last, seconds) in enumerate(reports):
        selector.record(device, LastReport(U * U, last, seconds))
    return selector


def test_scores_of_the_specification() -> None:
    selector = oort((2.0, 1, 10.0), (4.0, 2, 40.0))
    assert selector.scores([0, 1], 3, 10.0) == pytest.approx([0.332452, 0.077148], abs=1e-6)


def test_utility_is_clipped_at_98_percent() -> None:
    selector = oort(*[(1.0, 1, 1.0)] * 98, (2.0, 1, 1.0), (1e9, 1, 1.0))
    assert selector.scores([99], 1, 9.0) == pytest.approx(selector.scores([98], 1, 9.0))


def test_limit_is_an_entry_of_the_sorted_durations() -> None:
    selector = oort(*[(1.0, 1, float(seconds)) for seconds in range(20, 0, -1)])
    assert selector.limit() == 3.0
    selector.state.rho = 100.0
    assert selector.limit() == np.inf


def test_oort_exploits_high_scores_and_explores_many_samples() -> None:
    selector = Oort(3, np.array([1, 1, 1, 5, 50, 500], np.int64))
    for device, U in enumerate([0.1, 0.1, 8.0]):
        selector.record(device, LastReport(U * U, 1, 1.0))
    selector.state.epsilon, selector.state.round = 0.0, 1
    assert select(selector, 1, rounds=0) == [2]
    selector.state.epsilon = 1.0
    seen = [select(selector, 1)[0] for _ in range(200)]
    assert set(seen) <= {3, 4, 5} and seen.count(5) > 150


def test_oort_fills_up_with_anybody() -> None:
    selector = oort((1.0, 1, 1.0), (1.0, 1, 1.0), devices=3)
    assert select(selector, 3) == [0, 1, 2]
    assert select(selector, 3, free=lambda device: device != 1) == [0, 2]


def test_exploration_falls_once_per_round() -> None:
    selector = oort((1.0, 1, 1.0), devices=4)
    for _ in range(3):
        select(selector, 1, rounds=0)
    assert selector.state.epsilon == pytest.approx(0.9 * 0.95)
    for rounds in range(1, 60):
        select(selector, 1, rounds)
    assert selector.state.epsilon == 0.2


@pytest.mark.parametrize(("growth", "rho"), [(1.0, 15.0), (2.0, 10.0), (50.0, 5.0)])
def test_pacer_follows_the_utility(growth: float, rho: float) -> None:
    selector = oort((1.0, 1, 1.0))
    selector.state.round = 0
    for t in range(1, 41):  # before round t: what the round before gave
        selector.state.exploited = [0]
        selector.record(0, LastReport((1.0 if t <= 20 else growth) ** 2, t, 1.0))
        selector._begin_round(t)
    assert selector.state.rho == rho


# ---- in the server


def server_by(selection: str) -> Server:
    context = MethodContext(8, np.full(8, 10, np.int64), 1, 4, LAYOUT, seed=3)
    method = class_and_preset("fedavg")[0](method_options("fedavg", {}), context)
    return Server(method, context, vector(1), constant(0.1), selection, gate=None)


@pytest.mark.parametrize("selection", ["power_of_choice", "oort"])
def test_server_asks_for_losses_records_them_and_resumes(selection: str) -> None:
    server, other = server_by(selection), server_by(selection)
    for seed in range(3):
        chosen = server.select(4, lambda device: True)
        for assignment in server.trigger(chosen, now=float(seed)):
            assert assignment.instruction["loss_decay"] == 0.2
        for device in chosen:
            server.now = seed + 0.5
            server.upload(upload_of(server, device, vector(seed + device), report={"loss": 0.1 * device}))
    assert server.selector.state.last[chosen[0]] == LastReport(0.1 * chosen[0], 3, 0.5)
    other.restore(deepcopy(server.state()))
    assert [server.select(4, lambda d: True) for _ in range(5)] == [other.select(4, lambda d: True) for _ in range(5)]


@pytest.mark.parametrize("loss", [{}, {"loss": -1.0}, {"loss": float("nan")}])
def test_impossible_losses_are_not_recorded(loss: dict[str, float]) -> None:
    server = server_by("oort")
    server.trigger([2])
    server.upload(upload_of(server, 2, vector(2), report=loss))
    assert server.selector.state.last == {}


@pytest.mark.parametrize("selection", ["power_of_choice", "oort"])
@pytest.mark.parametrize("method", ["fedavg", "fedbuff", "fedasmu"])
def test_runs_learn_and_repeat(tmp_path: Path, selection: str, method: str) -> None:
    runs = []
    for number in range(2):
        tables = {key: dict(SMALL[key]) for key in SMALL}
        tables["run"]["selection"] = selection
        name = {"name": method, "K": 4} if method == "fedbuff" else method
        runs.append(Federation(method=name, **tables).run(30.0, out=tmp_path / str(number)))
    same(runs[0].weights, runs[1].weights)
    assert runs[0].accuracy[-1] > runs[0].accuracy[0] + 0.2


def test_privacy_refuses_losses() -> None:
    with pytest.raises(ConfigError, match=r"losses that run\.selection = oort"):
        Federation(method="fedavg", run={"selection": "oort"}, privacy={"clip": 1.0, "noise": 1.0})


def test_a_method_that_selects_refuses_another_selection() -> None:
    with pytest.raises(ConfigError, match=r"run\.selection: pisces selects devices itself"):
        Federation(method="pisces", run={"selection": "oort"})

"""Several fresh models in one trip: the anchor, the pseudo-gradient, the rule, and what the server computes."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from freshet.core.messages import Assignment, Merge, Slot, Upload
from freshet.core.server import Server
from freshet.errors import ConfigError
from freshet.methods import method_options
from freshet.methods.asmu.rule import FreshModelRule
from freshet.methods.asmu.staleness import training_scale
from tests.methods.asmu_helpers import ask, flat, plain_layout, send, server_of

N = 12


def vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=N)


def walk(
    base: np.ndarray, steps: list[int], models: list[np.ndarray], betas: list[float], gradient: np.ndarray, lr: float
) -> np.ndarray:
    """SGD along a constant gradient, with a merge between every two stretches of ``steps``; in float64."""
    w = base.astype(np.float64)
    for place, count in enumerate(steps):
        w = w - lr * count * gradient
        if place < len(models):
            w = (1 - betas[place]) * w + betas[place] * models[place]
    return w


@pytest.mark.parametrize("betas", [[0.3], [0.3, 0.6], [0.0, 0.5, 0.9], [0.2, 0.2, 0.2, 0.2]])
def test_pseudo_gradient_is_the_gradient_whatever_is_merged(betas: list[float]) -> None:
    """E6 for several merges: ``-(w_i - a) / (eta n')`` with the anchor a and the steps n' that the merges left."""
    base, gradient, lr = vector(0), vector(1), 0.05
    models = [vector(2 + place) for place in range(len(betas))]
    steps = [3, 1, 4, 2, 5][: len(betas) + 1]
    w = walk(base, steps, models, betas, gradient, lr)
    merges = tuple(Merge(2 + place, {"beta": beta}) for place, beta in enumerate(betas))
    upload = Upload(0, 1, 1, w, sum(steps), merges=merges)
    single = {2 + place: model.astype(np.float32) for place, model in enumerate(models)}
    anchor = upload.anchor(base.astype(np.float32), single)
    before = np.cumsum(steps)[:-1].tolist()
    found = -(w - anchor) / training_scale(lr, sum(steps), before, betas)
    np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-5)  # the anchor is single precision


def test_scale_of_several_merges_is_what_each_leaves_of_the_steps_before_it() -> None:
    betas, parts = [0.2, 0.5, 0.1], [4, 3, 2, 6]
    left = [np.prod([1 - beta for beta in betas[place:]]) for place in range(4)]
    assert training_scale(0.1, 15, [4, 7, 9], betas) == pytest.approx(0.1 * float(np.dot(left, parts)))
    assert training_scale(0.1, 15, [], []) == pytest.approx(1.5)


def fresh_server(**options: Any) -> Server:
    server = server_of("fedasmu", vector(0), plain_layout(N), epochs=5, refresh=3, **options)
    server.trigger([0])
    send(server, 0, server.weights + 0.1 * vector(20))  # device 0 has an upload to be judged
    server.trigger([0])
    return server


def three_merges(server: Server) -> tuple[list[np.ndarray], Upload]:
    """Device 0 asks at three epochs; each time another device has uploaded before."""
    models = []
    for place, epoch in enumerate((2, 3, 4)):
        server.trigger([1 + place])
        send(server, 1 + place, server.weights + 0.1 * vector(30 + place))
        fresh = ask(server, 0, epoch)
        assert fresh is not None and fresh.version == server.version
        models.append(fresh.weights.astype(np.float64))
    active = server.active_trips[0]
    merges = tuple(
        Merge(sent.version, {"beta": 0.2 + 0.1 * place, "n1": 2 + 2 * place}) for place, sent in enumerate(active.sent)
    )
    weights = (server.weights + 0.2 * vector(40)).astype(np.float32)
    return models, Upload(0, active.trip, active.base, weights, 9, merges=merges)


@pytest.mark.parametrize("apply", ["mix", "progress"])
@pytest.mark.parametrize("equations", ["corrected", "published"])
@pytest.mark.parametrize("judge", ["own", "base"])
def test_server_computes_step_and_slope_from_all_merges(apply: str, equations: str, judge: str) -> None:
    server = fresh_server(apply=apply, equations=equations, judge=judge)
    base, first = server.weights.astype(np.float64), 0.1 * vector(20)
    past = base - vector(0).astype(np.float32)  # alpha times the first step; only its direction is needed below
    models, upload = three_merges(server)
    before, u = server.weights.astype(np.float64), upload.weights.astype(np.float64)
    anchor, kept, done = base, 0.0, 0
    for model, merge in zip(models, upload.merges, strict=True):
        beta, n1 = merge.numbers["beta"], merge.numbers["n1"]
        anchor = (1 - beta) * anchor + beta * model
        kept, done = (1 - beta) * (kept + n1 - done), n1
    kept += 9 - done
    (record,) = [flat(event) for event in server.upload(upload)]
    step = u - (anchor if apply == "progress" else before)
    np.testing.assert_allclose(server.weights, before + record["alpha"] * step, rtol=2e-5, atol=2e-6)
    assert record["beta"] == pytest.approx([0.2, 0.3, 0.4]) and record["n1"] == [2, 4, 6]
    assert record["adapted"] and np.allclose(past / np.linalg.norm(past), first / np.linalg.norm(first), atol=1e-4)
    measured = u - (anchor if equations == "corrected" else base)
    scale = -0.1 * kept if equations == "corrected" else 0.1 * 9
    assert record["q"] == pytest.approx(float(measured @ first) / scale, rel=1e-3)


def test_further_requests_get_newer_models_and_repetitions_the_same() -> None:
    server = fresh_server()
    models, _ = three_merges(server)
    sent = [each.version for each in server.active_trips[0].sent]
    assert len(set(sent)) == 3
    assert [ask(server, 0, epoch).version for epoch in (2, 3, 4)] == sent  # type: ignore[union-attr]
    server.trigger([5])
    send(server, 5, server.weights + 0.1 * vector(50))
    again = ask(server, 0, 5)
    assert again is not None and again.version == sent[-1], "a fourth request gets nothing new"
    held = [each.version for each in server.active_trips[0].sent]
    assert held == sent and all(version in server.store for version in sent)
    np.testing.assert_array_equal(again.weights, models[-1].astype(np.float32))


def test_versions_are_released_at_the_end_of_the_trip() -> None:
    server = fresh_server()
    _, upload = three_merges(server)
    server.upload(upload)
    assert len(server.store) == 1


def merges_of(server: Server, *changes: tuple[int, dict[str, float]]) -> Upload:
    _, upload = three_merges(server)
    versions = [merge.version for merge in upload.merges]
    return upload._replace(merges=tuple(Merge(versions[place], numbers) for place, numbers in changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (((1, {"beta": 0.1, "n1": 4}), (0, {"beta": 0.1, "n1": 5})), "reports merges of versions"),
        (((0, {"beta": 0.1, "n1": 4}), (0, {"beta": 0.1, "n1": 5})), "reports merges of versions"),
        (((0, {"beta": 0.1, "n1": 4}), (1, {"beta": 0.1, "n1": 3})), "reports a merge after 3 of 9 steps"),
        (((0, {"beta": 0.1, "n1": 4}), (1, {"beta": 1.0, "n1": 5})), "reports a merge with weight 1.0"),
        (((0, {"beta": 0.1, "n1": 4}), (1, {"beta": float("nan"), "n1": 5})), "not a finite number"),
    ],
)
def test_impossible_merges_are_rejected(changes: Any, reason: str) -> None:
    server = fresh_server()
    upload = merges_of(server, *changes)
    version = server.version
    (event, *_) = server.upload(upload)
    assert flat(event)["kind"] == "rejected" and reason in flat(event)["reason"] and server.version == version


# ---- the device's rule


@pytest.mark.parametrize(
    ("refresh", "first", "expected"),
    [(1, 2, []), (2, 2, [3]), (3, 4, [5]), ("every", 1, [2, 3, 4, 5]), ("every", 5, []), (9, 3, [4, 5])],
)
def test_further_slots_are_the_next_epochs(refresh: int | str, first: int, expected: list[int]) -> None:
    rule = FreshModelRule(method_options("fedasmu", {"refresh": refresh}))
    assert [slot.epoch for slot in rule.later_slots(Slot(first, "q"), 5)] == expected
    assert {slot.by for slot in rule.later_slots(Slot(first, "q"), 5)} <= {"again"}


def test_selector_learns_the_sum_of_the_rewards() -> None:
    rule = FreshModelRule(method_options("fedasmu", {"refresh": 3}))
    sent = Assignment(0, 2, 1, 1, np.zeros(1, np.float32), 5, 0.1, {"meta_slot": 3})
    merges = [Merge(4, {"reward": 0.5}), Merge(5, {"reward": -0.2})]
    local: Any = SimpleNamespace(assignment=sent, slot=Slot(2, "meta"), memory={}, merges=merges, report={})
    rule.finish(local)
    assert local.report == {"slot": 2, "first": 1, "reward": pytest.approx(0.3)}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"refresh": 0}, "refresh must be at least 1"),
        ({"refresh": "often"}, "refresh"),
        ({"push_after": 3}, 'push_after takes the place of requests; set slot = "never"'),
        ({"push_after": -1, "slot": "never"}, "push_after"),
    ],
)
def test_impossible_settings_are_one_sentence(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace('"', ".")):
        method_options("fedasmu", options)


def test_pushing_needs_a_device_far_behind_and_nothing_pending() -> None:
    server = server_of("fedasmu", vector(0), plain_layout(N), epochs=5, slot="never", push_after=2)
    server.trigger([0])
    due = []
    for place in range(5):
        server.trigger([1])
        send(server, 1, server.weights + 0.1 * vector(60 + place))
        due.append(server.push_due(0, 1))
        if place == 2:
            assert server.push(0, 1).version == server.version == 4
            assert not server.push_due(0, 1), "one is pending"
        if place == 3:
            server.active_trips[0].sent[-1].merged = True
    assert due == [False, True, True, False, True]
    assert [later - earlier for earlier, later in pairwise([1, server.active_trips[0].newest])] == [3]

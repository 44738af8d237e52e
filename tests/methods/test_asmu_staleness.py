"""Errata E1, E2, E4, E5, E6, E13: the corrected formulas are derivatives of the loss; the printed ones are not."""

import numpy as np
import pytest

from freshet.core.messages import Assignment, Fresh, Slot
from freshet.data.dataset import from_arrays
from freshet.methods import method_options
from freshet.methods.asmu.rule import FreshModelRule
from freshet.methods.asmu.staleness import Control, freshness_weight, saturate, staleness_weight
from freshet.training.batches import FederatedData
from freshet.training.optimisers import sgd
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput
from freshet.training.trip import TripOutcome
from tests.methods.asmu_helpers import SAMPLES, SmoothLoss, ask, central, network, samples, send, server_of

CONTROLS = {"lambda0": 0.9, "sigma0": 0.6, "iota0": 0.1, "mu_alpha": 1.3}


@pytest.fixture
def loss() -> SmoothLoss:
    return SmoothLoss()


def scripted_adaptation(
    loss: SmoothLoss,
    equations: str,
    *,
    steps: int = 1,
    beta: float = 0.0,
    n1: int = 0,
    momentum: float = 0.0,
    nesterov: bool = False,
    momentum_known: bool = True,
    uploader: int = 0,
    **options: float | str,
) -> dict[str, object]:
    """Aggregate device 0 at staleness 3, train ``uploader`` from that model, and return what the server derives.

    Every step follows the gradient at the starting model. A fresh model is merged after ``n1`` steps. With
    ``momentum_known`` the server knows the momentum of these steps.
    """
    rng = np.random.default_rng(1)
    w0 = loss.flat.dump()
    reach = sgd(momentum, nesterov).reach if momentum_known else float
    server = server_of("fedasmu", w0, loss.flat.layout, equations=equations, reach=reach, **(CONTROLS | options))
    server.trigger([0, 1, 2])
    for device in (1, 2):
        send(server, device, w0 + 0.3 * rng.normal(size=w0.size))
    before, uploaded = server.weights.copy(), w0 + 0.3 * rng.normal(size=w0.size).astype(np.float32)
    past = send(server, 0, uploaded)[0]
    produced = server.weights.copy()
    server.trigger([uploader])
    w, g = produced.astype(np.float64), loss.gradient(produced)
    v = np.zeros_like(g)
    for step in range(steps):
        if beta and step == n1:
            server.trigger([3])
            send(server, 3, produced + 0.3 * rng.normal(size=w0.size))
            fresh = ask(server, uploader)
            w = (1 - beta) * w + beta * fresh.weights
        v = momentum * v + g
        w = w - 0.1 / steps * (g + momentum * v if nesterov else v)
    server.active_trips[uploader].lr = 0.1 / steps
    report = {"beta": beta, "n1": n1} if beta else {}
    adapted = send(server, uploader, w, steps=steps, **report)[0]
    return {"before": before, "step": uploaded - before, "past": past, "adapted": adapted}


def true_derivatives(loss: SmoothLoss, script: dict) -> tuple[float, float, float]:
    """Finite differences of the loss of the aggregated model in lambda, sigma and iota."""
    past, before, step = script["past"], script["before"].astype(np.float64), script["step"].astype(np.float64)

    def aggregated(lambda_: float, sigma: float, iota: float) -> float:
        xi = staleness_weight(Control(lambda_, sigma, iota), past["version"], past["staleness"], 1e-3)
        return loss(before + saturate(CONTROLS["mu_alpha"], xi) * step)

    at = (past["lambda"], past["sigma"], past["iota"])
    return tuple(central(lambda v, i=i: aggregated(*at[:i], v, *at[i + 1 :]), at[i]) for i in range(3))


def logged(script: dict) -> tuple[float, float, float]:
    return tuple(script["adapted"][key] for key in ("grad_lambda", "grad_sigma", "grad_iota"))


def test_scripted_upload_is_stale_so_no_derivative_vanishes(loss: SmoothLoss) -> None:
    script = scripted_adaptation(loss, "corrected")
    assert script["past"]["staleness"] == 3
    assert script["adapted"]["adapted"] and all(abs(value) > 1e-4 for value in true_derivatives(loss, script))


def test_corrected_control_gradients_are_derivatives_of_the_aggregated_models_loss(loss: SmoothLoss) -> None:
    script = scripted_adaptation(loss, "corrected")
    assert logged(script) == pytest.approx(true_derivatives(loss, script), rel=1e-3)


@pytest.mark.parametrize("uploader", [0, 4])
@pytest.mark.parametrize("merge", [{}, {"steps": 4}, {"steps": 5, "beta": 0.4, "n1": 3}])
def test_judge_base_gives_derivatives_by_the_controls_of_the_maker(
    loss: SmoothLoss, merge: dict, uploader: int
) -> None:
    """E1, E2, E5, E6 where another device, or the maker itself, starts from the model that device 0 made."""
    script = scripted_adaptation(loss, "corrected", judge="base", uploader=uploader, **merge)
    assert logged(script) == pytest.approx(true_derivatives(loss, script), rel=1e-3)
    assert (script["adapted"]["judged"], script["adapted"]["gap"]) == (0, 0), "E10: nothing was aggregated between"
    printed = scripted_adaptation(loss, "published", judge="base", uploader=uploader, **merge)
    assert printed["adapted"]["grad_sigma"] == pytest.approx(-np.log(0.6) * printed["adapted"]["grad_lambda"], rel=1e-9)


def test_e1_the_printed_gradients_climb_the_loss(loss: SmoothLoss) -> None:
    script = scripted_adaptation(loss, "published")
    true, printed = true_derivatives(loss, script), logged(script)
    assert printed[0] == pytest.approx(-true[0], rel=1e-3)
    assert printed[2] == pytest.approx(-true[2], rel=1e-3)


def test_e2_the_printed_sigma_gradient_has_the_wrong_inner_derivative(loss: SmoothLoss) -> None:
    script = scripted_adaptation(loss, "published")
    true, printed = true_derivatives(loss, script), logged(script)
    assert abs(printed[1]) != pytest.approx(abs(true[1]), rel=0.05)
    assert printed[1] == pytest.approx(printed[0] * -np.log(script["past"]["sigma"]), rel=1e-9)


def test_e5_the_displacement_sums_all_steps_and_not_epochs(loss: SmoothLoss) -> None:
    corrected, printed = (scripted_adaptation(loss, equations, steps=4) for equations in ("corrected", "published"))
    true = true_derivatives(loss, corrected)
    assert logged(corrected) == pytest.approx(true, rel=1e-3)
    assert printed["adapted"]["grad_lambda"] == pytest.approx(-true[0], rel=1e-3), (
        "one epoch of four steps, in print too"
    )


@pytest.mark.parametrize("equations", ["corrected", "published"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_e5_passes_multiply_the_gradients_by_the_steps_per_pass(
    loss: SmoothLoss, equations: str, momentum: float
) -> None:
    merge = {"steps": 6, "beta": 0.4, "n1": 2, "momentum": momentum}  # one pass of six steps
    steps, passes = (
        scripted_adaptation(loss, equations, local_work=work, **merge)["adapted"] for work in ("steps", "passes")
    )
    larger = {"q", "grad_lambda", "grad_sigma", "grad_iota"}
    for name in larger:
        assert passes[name] == pytest.approx(6 * steps[name], rel=1e-12)
    after = {"lambda", "sigma", "iota", "xi", "alpha", "weight", "update_norm", "contributions"}  # follow from them
    assert passes.pop("passes") == 1
    assert {k: v for k, v in passes.items() if k not in larger | after} == {
        k: v for k, v in steps.items() if k not in larger | after
    }


@pytest.mark.parametrize("n1", range(5))
def test_e6_merge_is_no_gradient_and_shrinks_earlier_steps(loss: SmoothLoss, n1: int) -> None:
    merge = {"steps": 5, "beta": 0.4, "n1": n1}
    corrected, printed = (scripted_adaptation(loss, equations, **merge) for equations in ("corrected", "published"))
    true = true_derivatives(loss, corrected)
    assert logged(corrected) == pytest.approx(true, rel=1e-3)
    assert abs(printed["adapted"]["grad_lambda"]) != pytest.approx(abs(true[0]), rel=0.2)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("merge", [{}, {"beta": 0.4, "n1": 2}])
def test_divisor_with_momentum_is_the_reach_of_the_steps(
    loss: SmoothLoss, merge: dict[str, float], nesterov: bool
) -> None:
    steps = {"steps": 6, "momentum": 0.9, "nesterov": nesterov, **merge}
    script = scripted_adaptation(loss, "corrected", **steps)
    true = true_derivatives(loss, script)
    assert logged(script) == pytest.approx(true, rel=1e-3)
    # as if these had been plain steps, q and all that follows from it would be several times too large
    plain = logged(scripted_adaptation(loss, "corrected", **steps, momentum_known=False))
    assert plain[0] / true[0] > 2.0


@pytest.mark.parametrize("report", [{"beta": 0.4}, {"beta": 0.4, "n1": 5}, {"beta": 0.4, "n1": -1}, {"n1": 2.5}])
def test_merge_after_an_impossible_number_of_steps_is_rejected(loss: SmoothLoss, report: dict[str, float]) -> None:
    w0 = loss.flat.dump()
    server = server_of("fedasmu", w0, loss.flat.layout)
    server.trigger([0])
    server.trigger([1])
    send(server, 1, w0)
    ask(server, 0)
    (event,) = send(server, 0, w0, steps=5, **report)
    assert event["kind"] == "rejected" and "of 5 steps, which is impossible" in event["reason"]


def test_e10_log_counts_the_versions_in_between(loss: SmoothLoss) -> None:
    w0 = loss.flat.dump()
    server, gaps = server_of("fedasmu", w0, loss.flat.layout), []
    for others in ([], [1, 2, 3], [], [4]):
        for other in others:
            server.trigger([other])
            send(server, other, w0)
        server.trigger([0])
        (event,) = send(server, 0, w0 + 0.1)
        gaps.append(event.get("gap"))
    assert gaps == [None, 3, 0, 1]


@pytest.mark.parametrize("judge", [{"judge": "own"}, {"judge": "base", "uploader": 4}])
def test_e13_clamped_xi_does_not_depend_on_the_controls(loss: SmoothLoss, judge: dict) -> None:
    held = {"lambda0": 1e-6, "iota0": 0.0, "xi_min": 0.5, **judge}
    assert logged(scripted_adaptation(loss, "corrected", **held)) == (0.0, 0.0, 0.0)
    assert all(scripted_adaptation(loss, "published", **held)["adapted"][k] != 0 for k in ("grad_lambda", "grad_iota"))


# ---- the device's side


def merged_trip(equations: str, lr: float = 1e-6, upsilon: float = 0.7) -> tuple[TripOutcome, np.ndarray, np.ndarray]:
    """Run a trip that asks before its first step, so w_b is the base. Return the outcome, w_b and w_g."""
    x, y = samples()
    data = FederatedData.of(from_arrays("t", (x, y), (x, y)), [np.arange(SAMPLES)])
    trainer = Trainer(network, data, TrainingOptions(epochs=1, batch_size=SAMPLES, lr=lr), seed=0)
    w_b = trainer.flat.dump()
    w_g = w_b + 0.5 * np.random.default_rng(5).normal(size=w_b.size).astype(np.float32)
    options = method_options("fedasmu", {"equations": equations, "eta_gamma": 1.0, "eta_upsilon": 1.0, "mu_beta": 1.5})
    sent, fresh = Assignment(0, 1, 4, 4, w_b, 1, lr), Fresh(9, 9, w_g)
    memory = {"gamma": 1.2, "upsilon": upsilon}
    return trainer.train(TripInput(sent, (Slot(1, "fixed"),), (fresh,), FreshModelRule(options), memory)), w_b, w_g


def true_merge_derivatives(loss: SmoothLoss, w_b: np.ndarray, w_g: np.ndarray) -> tuple[float, float]:
    def merged(gamma: float, upsilon: float) -> float:
        beta = saturate(1.5, freshness_weight(gamma, upsilon, 9, 9 - 4 + 1))
        return loss((1 - beta) * w_b.astype(np.float64) + beta * w_g.astype(np.float64))

    return central(lambda v: merged(v, 0.7), 1.2), central(lambda v: merged(1.2, v), 0.7)


def moved(outcome: TripOutcome) -> tuple[float, float]:
    """The gradients that moved gamma and upsilon (their rates are 1)."""
    (merge,) = outcome.merges
    numbers = merge.numbers
    return numbers["gamma"] - numbers["gamma_after"], numbers["upsilon"] - numbers["upsilon_after"]


def test_corrected_merge_gradients_are_derivatives_of_the_merged_models_loss(loss: SmoothLoss) -> None:
    outcome, w_b, w_g = merged_trip("corrected")
    assert moved(outcome) == pytest.approx(true_merge_derivatives(loss, w_b, w_g), rel=1e-3)


def test_e4_merge_gradients_with_swapped_models_are_not_derivatives(loss: SmoothLoss) -> None:
    outcome, w_b, w_g = merged_trip("published")
    true = true_merge_derivatives(loss, w_b, w_g)
    assert moved(outcome)[0] != pytest.approx(true[0], rel=0.05)
    assert moved(outcome)[1] != pytest.approx(true[1], rel=0.05)


def test_e13_gamma_and_upsilon_stay_where_phi_is_clamped() -> None:
    held, _, _ = merged_trip("corrected", upsilon=5.0)
    assert held.merges[0].numbers["beta"] == 0.0 and moved(held) == (0.0, 0.0)
    printed, _, _ = merged_trip("published", upsilon=5.0)
    assert moved(printed)[0] != 0.0


def test_reward_is_the_drop_of_the_loss_on_the_same_mini_batch(loss: SmoothLoss) -> None:
    outcome, w_b, w_g = merged_trip("corrected")
    beta = outcome.merges[0].numbers["beta"]
    after = (1 - beta) * w_b.astype(np.float64) + beta * w_g
    assert outcome.merges[0].numbers["reward"] == pytest.approx(loss(w_b) - loss(after), rel=1e-4)
    assert outcome.weights == pytest.approx(after.astype(np.float32), abs=1e-5)

"""Tests of the twins themselves: finite differences, the sanity properties of baselines.md, its reduction lattice."""

from __future__ import annotations

import math

import numpy as np
import pytest

from . import local
from .asynchronous import (
    ASOFedTwin,
    FedAsyncTwin,
    FedBuffTwin,
    FedSARTwin,
    PORTTwin,
    aso_feature_attention,
    aso_feature_step,
)
from .fedasmu import (
    FedASMUServerTwin,
    FedSSMUServerTwin,
    QTableTwin,
    baseline_after,
    device_merge,
    device_trip,
    slot_distribution,
    unit_walk,
)
from .helpers import counter_max, cut, dot, f32, f64, norm
from .synchronous import FedAvgTwin, FedDynTwin, FedLWSTwin, FedProxServerTwin, MOONServerTwin

FEATURES, CLASSES = 5, 3
SIZE = CLASSES * (FEATURES + 1)


def rng(seed=0):
    return np.random.default_rng(seed)


def vector(seed, size=SIZE, scale=1.0):
    return (scale * rng(seed).standard_normal(size)).astype(np.float32)


def data(seed=0, count=24):
    r = rng(seed)
    return r.standard_normal((count, FEATURES)), r.integers(0, CLASSES, count)


def full(count=24, epochs=1):
    return [[np.arange(count)] for _ in range(epochs)]


def mini(count=24, epochs=3, size=7, seed=0):
    r = rng(seed)
    out = []
    for _ in range(epochs):
        order = r.permutation(count)
        out.append([order[i : i + size] for i in range(0, count, size)])  # the last partial batch is kept
    return out


def central(f, at, h=1e-5):
    return (f(at + h) - f(at - h)) / (2.0 * h)


def same(a, b):
    np.testing.assert_array_equal(a, b)


def close(a, b, tol=1e-6):
    np.testing.assert_allclose(a, b, rtol=tol, atol=tol)


ASMU = {
    "mu_alpha": 0.7,
    "eta_lambda": 0.3,
    "eta_sigma": 0.2,
    "eta_iota": 0.1,
    "lambda0": 1.3,
    "sigma0": 0.6,
    "iota0": 0.05,
    "tau_max": 99,
    "xi_min": 1e-3,
}
FIXED = ASMU | {"eta_lambda": 0.0, "eta_sigma": 0.0, "eta_iota": 0.0}
TRIP = {"eta": 0.1, "steps": 1}


# ---------------------------------------------------------------- helpers


def test_helpers():
    assert dot([1e16, 1.0, -1e16], [1.0, 1.0, 1.0]) == 1.0
    assert norm([3.0, 4.0]) == 5.0
    assert cut(10, None, 2) == (8, 8)
    assert cut(10, 6, 2) == (6, 8)
    same(counter_max([np.array([0, 3, 9]), np.array([0, 5, 1])], 1), [5, 9])


# ---------------------------------------------------------------- local


def test_gradient_is_the_derivative_of_the_loss():
    x, y = data(1)
    w = f64(vector(2))
    g = local.gradient(w, x, y)
    for j in range(SIZE):
        e = np.eye(SIZE)[j]
        assert central(lambda h, e=e: local.loss(w + h * e, x, y), 0.0) == pytest.approx(g[j], abs=1e-8)


def test_loss_of_the_zero_model_and_layout():
    x, y = data(1)
    assert local.loss(np.zeros(SIZE), x, y) == pytest.approx(math.log(CLASSES))
    w = np.zeros(SIZE)
    w[CLASSES * FEATURES + 1] = 50.0  # bias of class 1
    assert np.argmax(local.probabilities(w, x), axis=1).tolist() == [1] * len(y)
    w = np.zeros(SIZE)
    w[2 * FEATURES + 3] = 1.0  # W[2, 3]
    close(local.unpack(w, x)[0][2, 3], 1.0)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.01), (0.9, 0.01)])
def test_local_sgd_is_torch_sgd(momentum, decay):
    torch = pytest.importorskip("torch")
    x, y = data(3)
    w, batches = vector(4), mini()
    ours = local.local_sgd(w, x, y, batches, 0.1, momentum, decay, extra=local.proximal(w, 0.3))
    layer = torch.nn.Linear(FEATURES, CLASSES).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(w[: CLASSES * FEATURES].reshape(CLASSES, FEATURES)))
        layer.bias.copy_(torch.tensor(w[CLASSES * FEATURES :]))
    anchor = [p.detach().clone() for p in layer.parameters()]
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    for epoch in batches:
        for index in epoch:
            sgd.zero_grad()
            ce = torch.nn.functional.cross_entropy(layer(torch.tensor(x[index])), torch.tensor(y[index]))
            prox = sum(((p - a) ** 2).sum() for p, a in zip(layer.parameters(), anchor, strict=True))
            (ce + 0.15 * prox).backward()
            sgd.step()
    theirs = torch.cat([p.detach().ravel() for p in layer.parameters()]).numpy()
    close(ours, theirs, 1e-6)


def test_proximal_rules():
    x, y = data(5)
    w = vector(6)
    assert local.proximal(w, 0.0) is None  # mu = 0: plain LOCAL, bit for bit
    one = [local.local_sgd(w, x, y, full(), 0.1, extra=local.proximal(w, mu)) for mu in (0.0, 0.1, 10.0)]
    same(one[0], one[1])  # the first step does not depend on mu
    same(one[0], one[2])
    far = [
        norm(f64(local.local_sgd(w, x, y, full(epochs=40), 0.05, extra=local.proximal(w, mu))) - w)
        for mu in (0.0, 0.1, 1.0, 10.0)
    ]
    assert far == sorted(far, reverse=True)
    # f = (c/2)|u|^2 with exact gradient steps ends at mu w / (c + mu)
    c, mu, u = 2.0, 0.5, f64(w)
    pull = local.proximal(w, mu)
    for _ in range(500):
        u = u - 0.1 * (c * u + pull(u))
    close(u, mu * f64(w) / (c + mu), 1e-9)


def test_feddyn_device():
    x, y = data(7)
    theta = vector(8)
    zero = np.zeros(SIZE)
    assert local.feddyn_alpha(0.1, 10, 100, 10) == pytest.approx(0.1)
    assert local.feddyn_alpha(0.1, 20, 100, 10) == pytest.approx(0.05)
    u, dual = local.feddyn_local(theta, zero, x, y, full(), 0.1, 0.5)
    same(u, local.local_sgd(theta, x, y, full(), 0.1))  # first step = plain SGD
    close(dual, f64(u) - theta, 1e-12)
    u2, dual2 = local.feddyn_local(u, dual, x, y, mini(), 0.1, 0.5, 0.9, 0.01)
    close(dual2 - dual, f64(u2) - f64(u), 1e-12)
    # the extra gradient is the derivative of alpha/2 |u - theta|^2 + alpha <dual, u>
    at, extra = f64(vector(9)), local.feddyn_extra(theta, dual, 0.5)
    for j in range(SIZE):
        e = np.eye(SIZE)[j]
        f = lambda h, e=e: 0.25 * dot(at + h * e - theta, at + h * e - theta) + 0.5 * dot(dual, at + h * e)  # noqa: E731
        assert central(f, 0.0) == pytest.approx(extra(at)[j], abs=1e-7)


def test_feddyn_stationary_point():
    """u_k = theta for all k: -alpha_k lambda_k = grad f_k(theta), the duals sum to 0, and no device moves."""
    M, alpha = 3, 0.4
    sets = [data(10 + k) for k in range(M)]
    theta = np.zeros(SIZE)
    for _ in range(600):
        theta = theta - 2.0 * sum(local.gradient(theta, *s) for s in sets) / M
    duals = [-local.gradient(theta, *s) / alpha for s in sets]
    close(sum(duals), 0.0, 1e-6)
    for s, dual in zip(sets, duals, strict=True):
        u, after = local.feddyn_local(f32(theta), dual, *s, full(epochs=5), 0.1, alpha)
        close(u, theta, 1e-6)
        close(after, dual, 1e-6)


def test_aso_fed_device():
    beta, g = 0.3, np.array([2.0])
    H, V, seen = np.zeros(1), np.zeros(1), []
    for _ in range(5):
        z, H, V = local.aso_recursion(g, H, V, beta)
        seen.append(float(z[0] / g[0]))
    close(seen, [1.0, 0.0, 1 - beta, 1 - beta**2, 1 - beta**3], 1e-12)
    assert local.aso_rate([]) == 1.0
    assert local.aso_rate([1.0, 2.0]) == 1.0
    assert local.aso_rate([50.0, 150.0]) == pytest.approx(math.log(100.0))
    assert local.aso_rate([50.0, 150.0], unit=10.0) == pytest.approx(math.log(10.0))
    x, y = data(13)
    w, zero = vector(14), np.zeros(SIZE)
    u, H, V = local.aso_local_s(w, zero, zero, x, y, full(), 0.1, 0.5, 0.9, 1.0)
    same(u, local.local_sgd(w, x, y, full(), 0.1))  # first ever step: z = g for any beta
    same(H, zero)
    close(V, local.gradient(w, x, y), 1e-12)


def test_aso_fed_variants_coincide_for_one_full_batch_step_per_job():
    x, y = data(15)
    zero = np.zeros(SIZE)
    w = vector(16)
    s, r = (w, zero, zero), (w, zero, zero)
    for _ in range(5):
        s = local.aso_local_s(*s, x, y, full(), 0.1, 0.5, 0.3, 2.0)
        r = local.aso_local_r(*r, x, y, full(), 0.1, 0.5, 0.3, 2.0)
        close(s[0], r[0], 2e-6)
        close(0.1 * s[1], r[1], 2e-6)
        close(0.1 * s[2], r[2], 2e-6)
    many = [local.aso_local_s(w, zero, zero, x, y, mini(), 0.1, 0.5, 0.3, 2.0)[0]]
    many.append(local.aso_local_r(w, zero, zero, x, y, mini(), 0.1, 0.5, 0.3, 2.0)[0])
    assert np.abs(many[0] - many[1]).max() > 1e-3  # and only then


def test_moon_contrastive_loss():
    r = rng(17)
    z, zg, zp = r.standard_normal((3, 4, 6))
    T = 0.5
    assert local.moon_contrastive(z, zg, [], T) == 0.0
    assert local.moon_contrastive(z, zg, [zg], T) == pytest.approx(math.log(2.0))
    nudged = z + 0.1 * r.standard_normal(z.shape)
    assert local.moon_contrastive(nudged, zg, [zg], T) == pytest.approx(math.log(2.0))  # zero gradient
    low, high = math.log1p(math.exp(-2 / T)), math.log1p(math.exp(2 / T))
    assert low <= local.moon_contrastive(z, zg, [zp], T) <= high
    assert local.moon_contrastive(z, z, [-z], T) == pytest.approx(low)
    assert local.moon_contrastive(z, -z, [z], T) == pytest.approx(high)
    torch = pytest.importorskip("torch")
    cos = torch.nn.functional.cosine_similarity
    a, b, c = (torch.tensor(v) for v in (z, zg, zp))
    logits = torch.stack([cos(a, b), cos(a, c)], dim=1) / T
    expected = torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
    assert local.moon_contrastive(z, zg, [zp], T) == pytest.approx(float(expected))


# ---------------------------------------------------------------- FedASMU, server


def one_learned_upload(equations="corrected", apply="mix", eta=0.1, merge=False):
    """Device 0 is aggregated with staleness 3, triggered with the very result, and does one full-batch step."""
    x, y = data(20)
    server = FedASMUServerTwin(vector(21), **ASMU, equations=equations, apply=apply)
    for device in (0, 1, 2):
        server.trigger(device)
    server.upload(1, vector(22), **TRIP)
    server.upload(2, vector(23), **TRIP)
    before = f64(server.w)
    sent = vector(24)
    first = server.upload(0, sent, **TRIP)
    assert (first["staleness"], first["version"], first["adapted"]) == (3, 3, False)
    step = f64(sent) - (before if apply == "mix" else f64(server.versions[1]))
    assert server.trigger(0) == 4
    w_o = f64(server.w)
    if not merge:
        w_i = f32(w_o - eta * local.gradient(w_o, x, y))
        return server, (x, y), before, step, first, server.upload(0, w_i, eta=eta, steps=1)
    server.trigger(1)
    server.upload(1, vector(25), **TRIP)
    _, w_g = server.request(0)
    beta = 0.35
    w_a = w_o + beta * (f64(w_g) - w_o)
    h = local.gradient(w_a, x, y)
    result = server.upload(0, f32(w_a - eta * h), eta=eta, steps=1, beta=beta)
    return h, step, f64(w_g) - w_o, beta, result


def fd_of_controls(xy, before, step, first):
    """Central differences of the loss of the aggregated model by lambda, sigma, iota."""
    mu, p, s = ASMU["mu_alpha"], first["version"], first["staleness"]

    def loss(lam, sigma, iota):
        xi = lam / (math.sqrt(p) * s**sigma) + iota
        return local.loss(before + mu * xi / (1 + mu * xi) * step, *xy)

    lam, sigma, iota = first["lambda"], first["sigma"], first["iota"]
    return (
        central(lambda v: loss(v, sigma, iota), lam),
        central(lambda v: loss(lam, v, iota), sigma),
        central(lambda v: loss(lam, sigma, v), iota),
    )


@pytest.mark.parametrize("apply", ["mix", "progress"])
def test_e1_e2_corrected_gradients_are_the_true_derivatives(apply):
    _, xy, before, step, first, r = one_learned_upload(apply=apply)
    assert r["adapted"]
    assert (r["p"], r["s_p"], r["lambda_p"], r["sigma_p"]) == (3, 3, ASMU["lambda0"], ASMU["sigma0"])
    fd = fd_of_controls(xy, before, step, first)
    assert min(abs(v) for v in fd) > 1e-3
    np.testing.assert_allclose((r["grad_lambda"], r["grad_sigma"], r["grad_iota"]), fd, rtol=1e-4)
    assert r["lambda"] == pytest.approx(ASMU["lambda0"] - ASMU["eta_lambda"] * fd[0], rel=1e-4)
    assert r["sigma"] == pytest.approx(ASMU["sigma0"] - ASMU["eta_sigma"] * fd[1], rel=1e-4)
    assert r["iota"] == pytest.approx(ASMU["iota0"] - ASMU["eta_iota"] * fd[2], rel=1e-4)


def test_e1_e2_published_gradients_are_not():
    _, xy, before, step, first, r = one_learned_upload(equations="published")
    fd = fd_of_controls(xy, before, step, first)
    assert r["grad_lambda"] == pytest.approx(-fd[0], rel=1e-4)  # E1: climbs the loss
    assert r["grad_iota"] == pytest.approx(-fd[2], rel=1e-4)
    assert abs(r["grad_sigma"] - fd[1]) > 0.1 * abs(fd[1])  # E2
    q, c = r["q"], ASMU["mu_alpha"] / (1 + ASMU["mu_alpha"] * r["xi_p"]) ** 2
    printed = -q * c * math.log(ASMU["sigma0"]) / (math.sqrt(3) * 3 ** ASMU["sigma0"])
    assert r["grad_sigma"] == pytest.approx(printed)


def test_published_sigma_at_zero_does_not_move():
    server = FedASMUServerTwin(vector(21), **(ASMU | {"sigma0": 0.0}), equations="published")
    for _ in range(2):
        server.trigger(0)
        r = server.upload(0, vector(22), **TRIP)
    assert r["adapted"]
    assert r["grad_sigma"] == 0.0
    assert r["grad_iota"] != 0.0


def test_e5_the_displacement_is_divided_by_steps_in_both_readings():
    for equations in ("corrected", "published"):
        qs = []
        for steps in (1, 12):
            server = FedASMUServerTwin(vector(21), **ASMU, equations=equations)
            server.trigger(0)
            server.upload(0, vector(22), **TRIP)
            server.trigger(0)
            qs.append(server.upload(0, vector(23), eta=0.1, steps=steps)["q"])
        assert qs[1] / qs[0] == pytest.approx(1 / 12)


def test_e6_the_merge_is_taken_out_of_the_pseudo_gradient():
    h, step, pulled, beta, r = one_learned_upload(merge=True)
    assert r["q"] == pytest.approx(dot(h, step), rel=1e-4)
    h, step, pulled, beta, r = one_learned_upload(merge=True, equations="published")
    assert r["q"] == pytest.approx(dot(-h + beta * pulled / 0.1, step), rel=1e-4)


def test_progress_with_a_merge():
    server = FedASMUServerTwin(vector(1), **FIXED, apply="progress")
    server.trigger(0)
    server.trigger(1)
    server.upload(1, vector(2), **TRIP)
    _, w_g = server.request(0)
    w_o, w, d = f64(server.versions[1]), f64(server.w), 0.01 * f64(vector(3))
    w_i = f32(w_o + 0.4 * (f64(w_g) - w_o) + d)
    r = server.upload(0, w_i, **TRIP, beta=0.4, learnable=SIZE - 4)
    close(server.w[:-4], (w + r["alpha"] * d)[:-4])
    close(server.w[-4:], ((1 - r["alpha"]) * w + r["alpha"] * f64(w_i))[-4:])
    close(server.last[0]["step"], d)


def test_fedasmu_bookkeeping():
    server = FedASMUServerTwin(vector(1), **(ASMU | {"tau_max": 2}))
    assert server.trigger(0) == 1
    assert server.request(0) is None
    server.trigger(1)
    assert server.upload(1, vector(2), **TRIP)["staleness"] == 1
    version, fresh = server.request(0)
    assert version == 2
    same(fresh, server.w)
    with pytest.raises(RuntimeError):
        server.trigger(0)
    server.trigger(1)
    server.upload(1, vector(3), **TRIP)
    state = (server.version, server.w, dict(server.controls), dict(server.last))
    r = server.upload(0, vector(4), **TRIP, beta=0.2)
    assert (r["kind"], r["reason"], r["staleness"], r["alpha"]) == ("discard", "stale", 3, None)
    assert server.version == state[0] == 3
    same(server.w, state[1])
    assert (server.controls, server.last) == (state[2], state[3])
    assert server.trigger(0) == 3
    bad = vector(4)
    bad[3] = np.nan
    assert server.upload(0, bad, **TRIP)["reason"] == "not finite"
    assert server.w.dtype == np.float32
    with pytest.raises(RuntimeError):
        server.trigger(0)
        server.upload(0, vector(4), **TRIP, beta=0.2)


def test_fedasmu_staleness_equal_to_the_limit_is_accepted():
    server = FedASMUServerTwin(vector(1), **(ASMU | {"tau_max": 2}))
    server.trigger(0)
    server.trigger(1)
    server.upload(1, vector(2), **TRIP)
    r = server.upload(0, vector(3), **TRIP)
    assert (r["kind"], r["staleness"]) == ("aggregate", 2)


def test_fedasmu_weight_bounds_and_frozen_controls():
    server = FedASMUServerTwin(vector(1), **(ASMU | {"lambda0": -5.0}), dynamic_server=False)
    for i in range(4):
        server.trigger(0)
        r = server.upload(0, vector(2 + i), **TRIP)
        assert r["xi"] == ASMU["xi_min"]
        assert r["adapted"] is False
        assert (r["lambda"], r["sigma"], r["iota"]) == (-5.0, ASMU["sigma0"], ASMU["iota0"])
        assert 0.0 < r["alpha"] < 1.0


def test_fedasmu_mix_follows_the_formula():
    server = FedASMUServerTwin(vector(1), **ASMU, counters=2)
    w, u = vector(1), vector(2)
    server.trigger(0)
    r = server.upload(0, u, **TRIP, learnable=10)
    xi = ASMU["lambda0"] + ASMU["iota0"]
    assert r["xi"] == pytest.approx(xi)
    assert r["alpha"] == pytest.approx(0.7 * xi / (1 + 0.7 * xi))
    same(server.w[:-2], f32((1 - r["alpha"]) * f64(w) + r["alpha"] * f64(u))[:-2])
    same(server.w[-2:], u[-2:])


def test_buffers_do_not_enter_q():
    qs = []
    for junk in (0.0, 100.0):
        server = FedASMUServerTwin(vector(1), **ASMU)
        for seed in (2, 3):
            u = vector(seed)
            u[10:] += np.float32(junk)
            server.trigger(0)
            r = server.upload(0, u, **TRIP, learnable=10)
        qs.append(r["q"])
    assert qs[0] == qs[1]


@pytest.mark.parametrize("apply", ["mix", "progress"])
def test_judge_base_gives_the_derivatives_by_the_controls_of_the_maker(apply):
    """Section 13: devices 3 and 4 start from the model that device 0 made, with different data."""
    server = FedASMUServerTwin(vector(21), **ASMU, judge="base", apply=apply)
    for device in (0, 1, 2):
        server.trigger(device)
    server.upload(1, vector(22), **TRIP)
    server.upload(2, vector(23), **TRIP)
    before, sent = f64(server.w), vector(24)
    first = server.upload(0, sent, **TRIP)
    assert not first["adapted"], "nobody made version 1"
    step = f64(sent) - (before if apply == "mix" else f64(server.versions[1]))
    w_o, moved = f64(server.w), np.array(server.controls[0])
    server.trigger(3), server.trigger(4)
    for device in (3, 4):
        xy = data(20 + device)
        r = server.upload(device, f32(w_o - 0.1 * local.gradient(w_o, *xy)), **TRIP)
        fd = fd_of_controls(xy, before, step, first)
        assert (r["judged"], r["gap"], r["p"], r["s_p"]) == (0, 0, 3, 3)
        np.testing.assert_allclose((r["grad_lambda"], r["grad_sigma"], r["grad_iota"]), fd, rtol=1e-4)
        moved -= np.array([ASMU["eta_lambda"], ASMU["eta_sigma"], ASMU["eta_iota"]]) * fd
        np.testing.assert_allclose(server.controls[0], moved, rtol=1e-4)
        assert server.controls[device] == (ASMU["lambda0"], ASMU["sigma0"], ASMU["iota0"])


def test_judge_base_and_judge_own_agree_on_a_device_that_made_its_base():
    results = []
    for judge in ("own", "base"):
        server = FedASMUServerTwin(vector(21), **ASMU, judge=judge)
        for seed in range(22, 27):
            server.trigger(0)
            results.append(server.upload(0, vector(seed), **TRIP))
    assert results[:5] == results[5:] and results[4]["judged"] == 0


@pytest.mark.parametrize("equations", ["corrected", "published"])
def test_passes_make_every_gradient_steps_per_pass_times_larger(equations):
    merge, results = {"beta": 0.3, "n1": 5}, []
    for local_work in ("steps", "passes"):
        server = FedASMUServerTwin(vector(21), **FIXED, equations=equations, local_work=local_work)
        server.trigger(0)
        server.upload(0, vector(22), **TRIP)
        server.trigger(0), server.trigger(1)
        server.upload(1, vector(23), **TRIP)
        server.request(0)
        results.append(server.upload(0, vector(24), eta=0.1, steps=12, passes=3, **merge))
    steps, passes = results
    for key in ("q", "grad_lambda", "grad_iota"):
        assert passes[key] == pytest.approx(4 * steps[key]) != 0.0
    assert passes["alpha"] == steps["alpha"]


# ---------------------------------------------------------------- FedSSMU


def test_fedssmu_round_is_the_plain_mean():
    """Section 9: sigma 1, iota 0, mu lambda / sqrt(g) = 1: the mean of the old model and all uploads."""
    server = FedSSMUServerTwin(
        vector(1), **(FIXED | {"mu_alpha": 0.5, "lambda0": 2.0, "sigma0": 1.0, "iota0": 0.0, "xi_min": 1e-9})
    )
    uploads = [vector(2 + i) for i in range(4)]
    server.start_round(range(4))
    for i, u in enumerate(uploads):
        r = server.upload(i, u, **TRIP)
        assert r["alpha"] == pytest.approx(1 / (i + 2))
        assert (r["round"], r["k"], r["staleness"], r["base"], r["version"]) == (1, i, i + 1, 1, 1 + i)
    assert server.end_round() == 1
    close(server.w, np.mean([f64(vector(1)), *map(f64, uploads)], axis=0))


def test_fedssmu_bookkeeping():
    server = FedSSMUServerTwin(vector(1), **(ASMU | {"tau_max": 2}))
    assert server.start_round([0, 1, 2, 3]) == 1
    assert server.request(0) is None
    server.upload(1, vector(2), **TRIP)
    version, fresh = server.request(0)
    assert version == 2
    same(fresh, server.w)
    server.upload(2, vector(3), **TRIP)
    r = server.upload(3, vector(4), **TRIP)
    assert (r["kind"], r["staleness"], server.version, server.k) == ("discard", 3, 3, 2)
    server.end_round()  # device 0 is lost
    with pytest.raises(KeyError):
        server.upload(0, vector(4), **TRIP)
    assert server.start_round([1]) == 3
    assert server.request(1) is None  # nothing newer inside the new round
    r = server.upload(1, vector(5), **TRIP)
    assert (r["round"], r["k"], r["base"], r["p"], r["s_p"]) == (2, 0, 3, 1, 1)
    assert r["xi"] == pytest.approx(r["lambda"] / math.sqrt(2) + r["iota"])


@pytest.mark.parametrize("apply", ["mix", "progress"])
@pytest.mark.parametrize("equations", ["corrected", "published"])
def test_fedssmu_gradients(apply, equations):
    """The same derivatives with sqrt(round): the last upload of round 2 makes the model that round 3 starts from."""
    x, y = data(30)
    server = FedSSMUServerTwin(vector(31), **ASMU, equations=equations, apply=apply)
    server.start_round([])
    server.end_round()
    server.start_round([0, 1])
    server.upload(1, vector(32), **TRIP)
    before, sent = f64(server.w), vector(33)
    first = server.upload(0, sent, **TRIP)
    assert (first["round"], first["staleness"], first["version"]) == (2, 2, 2)
    server.end_round()
    server.start_round([0])
    w_o = f64(server.w)
    w_i = f32(w_o - 0.1 * local.gradient(w_o, x, y))
    r = server.upload(0, w_i, **TRIP)
    step = f64(sent) - (before if apply == "mix" else f64(server.versions[1]))
    fd = fd_of_controls((x, y), before, step, first | {"version": 2})  # here p is the round, and it is 2 as well
    assert r["p"] == 2
    if equations == "corrected":
        np.testing.assert_allclose((r["grad_lambda"], r["grad_sigma"], r["grad_iota"]), fd, rtol=1e-4)
    else:
        np.testing.assert_allclose((r["grad_lambda"], r["grad_iota"]), (-fd[0], -fd[2]), rtol=1e-4)
        assert r["grad_sigma"] == pytest.approx(r["grad_lambda"] * -math.log(r["sigma_p"]))


@pytest.mark.parametrize("apply", ["mix", "progress"])
@pytest.mark.parametrize("equations", ["corrected", "published"])
def test_fedssmu_with_a_merge(apply, equations):
    """E5 and E6 inside rounds, and what is applied: device 0 in round 2, after a merge with w_{2,1}."""
    server = FedSSMUServerTwin(vector(1), **FIXED, equations=equations, apply=apply)
    server.start_round([0])
    server.upload(0, vector(2), **TRIP)
    first_step = f64(vector(2)) - vector(1)
    server.end_round()
    server.start_round([0, 1])
    w_o = f64(server.w)
    server.upload(1, vector(3), **TRIP)
    w, d, beta, keep = f64(server.w), 0.1 * f64(vector(4)), 0.4, SIZE - 4
    version, w_g = server.request(0)
    assert version == 3
    w_i = f32(w_o + beta * (f64(w_g) - w_o) + d)
    r = server.upload(0, w_i, eta=0.1, steps=12, beta=beta, learnable=keep)
    seen = -d / (0.1 * 12) if equations == "corrected" else (f64(w_i) - w_o) / (0.1 * 12)
    assert r["q"] == pytest.approx(dot(seen[:keep], first_step[:keep]), rel=1e-4)
    mixed = (1 - r["alpha"]) * w + r["alpha"] * f64(w_i)
    close(server.w[keep:], mixed[keep:])
    close(server.w[:keep], (mixed if apply == "mix" else w + r["alpha"] * d)[:keep])
    close(server.last[0]["step"][:keep], (f64(w_i) - w if apply == "mix" else d)[:keep])


def test_fedssmu_equals_fedasmu_within_one_round():
    """One round of FedSSMU = FedASMU with all devices triggered at version 1, except for sqrt(1) instead of sqrt(t)."""
    sync = FedSSMUServerTwin(vector(1), **FIXED)
    sync.start_round([0, 1, 2])
    asyn = FedASMUServerTwin(vector(1), **FIXED)
    for device in range(3):
        asyn.trigger(device)
    for device in range(3):
        r = sync.upload(device, vector(5 + device), **TRIP)
        q = asyn.upload(device, vector(5 + device), **TRIP)
        assert r["staleness"] == q["staleness"]
        assert (r["xi"] - FIXED["iota0"]) == pytest.approx((q["xi"] - FIXED["iota0"]) * math.sqrt(q["version"]))


# ---------------------------------------------------------------- several merges per trip, pushes


def test_unit_walk():
    assert unit_walk(7, [], 0.0) == 7.0
    assert unit_walk(7, [(2, 0.4, 3)], 0.0) == pytest.approx(0.6 * 3 + 4)
    assert unit_walk(7, [(2, 0.4, 3), (3, 0.5, 5)], 0.0) == pytest.approx(0.5 * (0.6 * 3 + 2) + 2)
    assert unit_walk(3, [], 0.5) == pytest.approx(1.0 + 1.5 + 1.75)
    assert unit_walk(3, [(2, 0.2, 0), (3, 0.9, 2)], 0.5) == pytest.approx(0.1 * 2.5 + 1.75)


def start(server, devices):
    """Start trips, in a round if the method has rounds."""
    if isinstance(server, FedSSMUServerTwin):
        server.start_round(devices)
    else:
        for device in devices:
            server.trigger(device)


def started(kind, **options):
    """A server whose device 0 has uploaded once, is in flight again, and was given versions 3, 4 and 5; its base."""
    server = kind(vector(1), **FIXED, **options)
    start(server, [0])
    server.upload(0, vector(2), **TRIP)
    if kind is FedSSMUServerTwin:
        server.end_round()
    w_o = server.w
    start(server, [0, 1, 2, 3])
    for device in (1, 2, 3):
        assert server.request(0) is None
        server.upload(device, vector(10 + device), **TRIP)
        assert server.request(0)[0] == 2 + device
    return server, f64(w_o)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", [FedASMUServerTwin, FedSSMUServerTwin])
def test_slope_is_that_of_a_constant_gradient_whatever_is_merged(kind, momentum):
    server, w = started(kind, refresh=3, momentum=momentum)
    gradient, velocity, merges = f64(vector(5)), 0.0, [(3, 0.3, 2), (4, 0.6, 2), (5, 0.2, 6)]
    for done in range(9):
        for version, beta, n1 in merges:
            if n1 == done:
                w = (1.0 - beta) * w + beta * f64(server.versions[version])
        velocity = momentum * velocity + gradient
        w = w - 0.01 * velocity
    r = server.upload(0, f32(w), eta=0.01, steps=9, merges=merges)
    assert r["q"] == pytest.approx(dot(gradient, f64(vector(2)) - vector(1)), rel=1e-4)


@pytest.mark.parametrize("kind", [FedASMUServerTwin, FedSSMUServerTwin])
def test_one_merge_may_be_given_either_way(kind):
    results = []
    for merge in ({"beta": 0.4, "n1": 3}, {"merges": [(5, 0.4, 3)]}, {"merges": [(3, 0.0, 1), (5, 0.4, 3)]}):
        server, _ = started(kind, refresh=3, apply="progress")
        r = server.upload(0, vector(6), eta=0.1, steps=9, **merge)
        results.append((r["q"], server.w))
    for q, w in results[1:]:
        assert q == pytest.approx(results[0][0], rel=1e-12)
        same(w, results[0][1])


@pytest.mark.parametrize("kind", [FedASMUServerTwin, FedSSMUServerTwin])
@pytest.mark.parametrize("versions", [[4, 3], [3, 3], [2], [6], [3, 6]])
def test_merges_are_those_of_given_models_in_their_order(kind, versions):
    server, _ = started(kind, refresh=3)
    with pytest.raises(RuntimeError, match="reports merges"):
        server.upload(0, vector(6), **TRIP, merges=[(version, 0.1, 0) for version in versions])


@pytest.mark.parametrize("kind", [FedASMUServerTwin, FedSSMUServerTwin])
def test_no_more_models_than_allowed(kind):
    server, _ = started(kind, refresh=3)
    with pytest.raises(RuntimeError, match="already been given 3"):
        server.request(0)


@pytest.mark.parametrize("kind", [FedASMUServerTwin, FedSSMUServerTwin])
def test_push_bookkeeping(kind):
    server, given = kind(vector(1), **FIXED, push_after=2), []
    start(server, range(8))
    for device in range(1, 8):
        server.upload(device, vector(device), **TRIP)
        answer = server.push(0)
        given.append(None if answer is None else answer[0])
        if device == 5:
            server.merged(0)
    assert given == [None, 3, None, None, None, 7, None]  # the first is merged after version 6 was made
    assert server.upload(0, vector(9), **TRIP, merges=[(3, 0.2, 0)])["kind"] == "aggregate"
    assert not server.pending


# ---------------------------------------------------------------- FedASMU, device

MERGE = {"gamma": 0.9, "upsilon": 0.4, "mu_beta": 0.8, "eta_gamma": 0.3, "eta_upsilon": 0.2}


@pytest.mark.parametrize("age", [None, 3])
def test_e4_corrected_gradients_are_the_true_derivatives(age):
    x, y = data(40)
    w_b, w_g, g, o = vector(41), vector(42), 9, 6
    calls = {"loss": lambda w: local.loss(w, x, y), "gradient": lambda w: local.gradient(w, x, y)}
    r = device_merge(w_b, w_g, g=g, o=o, **MERGE, **calls, equations="corrected", age=age)
    printed = device_merge(w_b, w_g, g=g, o=o, **MERGE, **calls, equations="published", age=age)

    def loss(gamma, upsilon):
        phi = gamma / math.sqrt(g if age is None else age) * (1 - upsilon / math.sqrt(g - o + 1))
        beta = MERGE["mu_beta"] * phi / (1 + MERGE["mu_beta"] * phi)
        return local.loss(f64(w_b) + beta * (f64(w_g) - f64(w_b)), x, y)

    fd = (
        central(lambda v: loss(v, MERGE["upsilon"]), MERGE["gamma"]),
        central(lambda v: loss(MERGE["gamma"], v), MERGE["upsilon"]),
    )
    np.testing.assert_allclose((r["grad_gamma"], r["grad_upsilon"]), fd, rtol=1e-5)
    assert abs(printed["grad_gamma"] - fd[0]) > 0.01 * abs(fd[0])
    assert r["gamma_after"] == pytest.approx(MERGE["gamma"] - 0.3 * fd[0], rel=1e-5)
    assert r["upsilon_after"] == pytest.approx(MERGE["upsilon"] - 0.2 * fd[1], rel=1e-5)
    for out in (r, printed):
        assert out["reward"] == out["loss_before"] - out["loss_after"]
        assert out["loss_before"] == local.loss(w_b, x, y)
        assert out["beta"] == r["beta"]
        same(out["w_a"], f32((1 - r["beta"]) * f64(w_b) + r["beta"] * f64(w_g)))
    expected = dot(local.gradient(w_b, x, y), f64(w_g) - f64(r["w_a"]))
    assert printed["q"] == pytest.approx(expected)


def test_merge_weight_is_held_at_zero():
    x, y = data(40)
    calls = {"loss": lambda w: local.loss(w, x, y), "gradient": lambda w: local.gradient(w, x, y)}
    r = device_merge(vector(1), vector(2), g=2, o=1, **(MERGE | {"upsilon": 5.0}), **calls)
    assert (r["phi"], r["beta"], r["reward"]) == (0.0, 0.0, 0.0)
    same(r["w_a"], vector(1))


def test_trip():
    x, y = data(43)
    w_o, w_g, batches = vector(44), vector(45), mini(epochs=3)
    common = dict(o=2, **MERGE, lr=0.1, momentum=0.9, weight_decay=0.01)
    plain = local.local_sgd(w_o, x, y, batches, 0.1, 0.9, 0.01)
    for slot in (None, 2):
        none = local.fedasmu_trip(w_o, x, y, batches, slot=slot, request=lambda: None, **common)
        same(none["w_i"], plain)
        assert (none["beta"], none["reward"], none["merge"], none["gamma"]) == (0.0, None, None, MERGE["gamma"])
        assert (none["steps"], none["epochs"]) == (12, 3)
    # without momentum: train, merge by hand, train on
    common |= {"momentum": 0.0}
    for slot in (1, 2, 3):
        trip = local.fedasmu_trip(w_o, x, y, batches, slot=slot, request=lambda: (5, w_g), **common)
        w_b = local.local_sgd(w_o, x, y, batches[: slot - 1], 0.1, 0.0, 0.01)
        i = batches[slot - 1][0]
        m = device_merge(
            w_b,
            w_g,
            g=5,
            o=2,
            **MERGE,
            loss=lambda w, i=i: local.loss(w, x[i], y[i]),
            gradient=lambda w, i=i: local.gradient(w, x[i], y[i]),
        )
        same(trip["w_i"], local.local_sgd(m["w_a"], x, y, batches[slot - 1 :], 0.1, 0.0, 0.01))
        assert (trip["beta"], trip["reward"], trip["fresh"]) == (m["beta"], m["reward"], 5)
        assert (trip["gamma"], trip["upsilon"]) == (m["gamma_after"], m["upsilon_after"])


class Softmax:
    """Softmax regression for `device_trip`."""

    def __init__(self, x, y, lr, momentum, weight_decay):
        self.x, self.y, self.options, self.velocity, self.learnable = x, y, (lr, momentum, weight_decay), None, None

    def loss(self, w, index):
        return local.loss(w, self.x[index], self.y[index])

    def gradient(self, w, index):
        return local.gradient(w, self.x[index], self.y[index])

    def train(self, w, index):
        lr, momentum, weight_decay = self.options
        g = self.gradient(w, index) + weight_decay * w
        self.velocity = g if self.velocity is None else momentum * self.velocity + g
        return w - lr * self.velocity


@pytest.mark.parametrize("equations", ["corrected", "published"])
def test_trip_with_several_requests(equations):
    x, y = data(43)
    w_o, w_g, batches = vector(44), vector(45), mini(epochs=4)
    sgd = (0.1, 0.9, 0.01)
    one = local.fedasmu_trip(
        w_o, x, y, batches, slot=2, request=lambda: (5, w_g), o=2, **MERGE, lr=0.1, momentum=0.9, weight_decay=0.01,
        equations=equations,
    )  # fmt: skip
    requests = {2: (5, w_g, None), 3: None}
    trip = device_trip(w_o, batches, Softmax(x, y, *sgd), o=2, requests=requests, **MERGE, equations=equations)
    same(f32(trip["w_i"]), one["w_i"])
    assert (trip["steps"], trip["gamma"], trip["reward"]) == (one["steps"], one["gamma"], one["reward"])
    assert trip["merges"][0]["n1"] == 4
    # a second merge starts from the first: its controls, and the version that the device has
    later = {2: (5, w_g, None), 4: (6, vector(46), None)}
    trip = device_trip(w_o, batches, Softmax(x, y, *sgd), o=2, requests=later, **MERGE, equations=equations)
    first, second = trip["merges"]
    assert first["beta"] == one["beta"] and second["gamma"] == first["gamma_after"] != first["gamma"]
    phi = second["gamma"] / math.sqrt(6) * (1 - second["upsilon"] / math.sqrt(2))
    assert second["phi"] == pytest.approx(phi, rel=1e-12)
    assert trip["reward"] == pytest.approx(first["reward"] + second["reward"], rel=1e-12)


# ---------------------------------------------------------------- FedASMU, selector


def test_q_table():
    q = QTableTwin(epochs=4, phi_q=0.5, psi=0.9)
    assert q.best_actions(2) == {"minus", "stay", "add"}
    assert [q.next_slot(1, a) for a in ("minus", "stay", "add")] == [1, 1, 2]
    assert [q.next_slot(4, a) for a in ("minus", "stay", "add")] == [3, 4, 4]
    assert q.update(2, "add", 3, 1.0) == 0.5
    assert q.best_actions(2) == {"add"}
    assert q.update(1, "add", 2, 0.0) == pytest.approx(0.5 * 0.9 * 0.5)
    q.update(2, "minus", 1, 1.0 - 0.9 * q.H[1, "add"])
    assert q.H[2, "minus"] == 0.5
    assert q.best_actions(2) == {"minus", "add"}
    q.update(3, "stay", 3, -1.0)
    assert q.best_actions(3) == {"minus", "add"}


def test_slot_distribution():
    close(slot_distribution([0.5, 0.5, 0.5]), [4 / 7, 2 / 7, 1 / 7], 1e-12)
    close(slot_distribution([0.0, 1.0, 0.7]), [0.0, 1.0, 0.0], 1e-12)
    close(slot_distribution([0.0, 0.0]), [0.5, 0.5], 1e-12)
    assert math.fsum(slot_distribution([0.1, 0.2, 0.3, 0.4])) == pytest.approx(1.0)
    assert baseline_after(1.0, 3.0, 0.25) == 1.5


# ---------------------------------------------------------------- FedAsync


def fly(server, device, u, **kw):
    server.trigger(device)
    return server.upload(device, u, **kw)


def test_fedasync():
    server = FedAsyncTwin(vector(1), alpha=1.0)
    fly(server, 0, vector(2))
    same(server.w, vector(2))
    for kind in ("constant", "polynomial", "hinge"):
        server = FedAsyncTwin(vector(1), alpha=0.6, staleness=kind, a=0.5, b=4)
        assert server.s(0) == 1.0
        for device in range(5):
            server.trigger(device)
        for device in range(5):
            r = server.upload(device, server.w)
            assert r["staleness"] == device
            same(server.w, vector(1))
    assert [FedAsyncTwin(vector(1), alpha=1.0, staleness="polynomial", a=0.0).s(t) for t in (0, 1, 50)] == [1.0] * 3
    hinge = FedAsyncTwin(vector(1), alpha=1.0, staleness="hinge", a=10.0, b=4.0)
    assert (hinge.s(4), hinge.s(5)) == (1.0, 1 / 11)


def test_fedasync_alpha_depends_on_staleness_only():
    server = FedAsyncTwin(vector(1), alpha=0.6, staleness="polynomial", a=0.5)
    seen = []
    for i in range(60):
        server.trigger("a")
        server.trigger("b")
        server.upload("a", vector(i))
        seen.append(server.upload("b", vector(i + 1))["alpha"])
    assert len(set(seen)) == 1
    assert seen[0] == pytest.approx(0.6 / math.sqrt(2))
    halved = FedAsyncTwin(vector(1), alpha=0.8, halve_after=2)
    assert [fly(halved, 0, vector(i))["alpha"] for i in range(4)] == [0.8, 0.8, 0.4, 0.4]


def test_one_outstanding_job_means_no_staleness():
    for server in (
        FedAsyncTwin(vector(1), alpha=0.5),
        ASOFedTwin(vector(1), samples={0: 3, 1: 4}),
        FedSARTwin(vector(1), alpha=0.5, a=0.5, E1=3, E2=2, V1=1),
    ):
        assert [fly(server, i % 2, vector(i))["staleness"] for i in range(6)] == [0] * 6


# ---------------------------------------------------------------- PORT


def port(**kw):
    return PORTTwin(vector(1), **({"K": 3, "omega": 10, "alpha": 3.0, "beta": 1.0} | kw))


def rounds(server, count, ids=3):
    for i in range(count):
        for device in range(ids):
            server.trigger(device)
        for device in range(ids):
            result = server.upload(device, vector(100 * i + device), n_k=device + 1)
    return result


def test_port_equal_staleness_is_fedavg():
    server = port(beta=0.0)
    r = rounds(server, 3)
    close(r["p"], [1 / 6, 2 / 6, 3 / 6], 1e-12)
    avg = FedAvgTwin(vector(1))
    avg.aggregate({k: vector(200 + k) for k in range(3)}, {k: k + 1 for k in range(3)})
    close(server.w, avg.w, 1e-7)
    first = rounds(port(), 1)  # no previous version: all cosines are 1
    assert first["cos"] == [1.0] * 3
    close(first["p"], [1 / 6, 2 / 6, 3 / 6], 1e-12)


def test_port_buffer_of_one():
    server = port(K=1)
    for i in range(4):
        server.trigger(("old", i))
    for i in range(4):
        server.upload(("old", i), vector(5 + i), n_k=3)
        same(server.w, vector(5 + i))
    assert server.version == 5


def test_port_discount_and_weights():
    for omega in (1.0, 3.0, 10.0):
        for tau in range(int(omega) + 1):
            assert 0.5 <= omega / (tau + omega) <= 1.0
    ps = []
    for scale, samples in ((1.0, 1), (7.0, 1), (1.0, 50)):
        server = port(alpha=3.0 * scale, beta=1.0 * scale, K=2)
        server.trigger("slow")
        rounds(server, 3, ids=2)
        server.trigger(0)
        server.trigger(1)
        assert server.upload("slow", vector(77), n_k=2 * samples) is None
        r = server.upload(0, vector(78), n_k=5 * samples)
        assert r["staleness"] == [3, 0]
        assert r["devices"] == ["slow", 0]
        ps.append(r["p"])
        x, d = f64(vector(77)) - server.versions[4], f64(server.versions[4]) - server.versions[3]
        c = dot(x, d) / norm(x) / norm(d)
        assert r["cos"][0] == pytest.approx(c)
        first = 2 / 7 * scale * (3 * 10 / 13 + (c + 1) / 2)
        second = 5 / 7 * scale * (3 + (r["cos"][1] + 1) / 2)
        assert r["p"][0] == pytest.approx(first / (first + second))
        close(server.w, r["p"][0] * f64(vector(77)) + r["p"][1] * f64(vector(78)))
    close(ps[0], ps[1], 1e-12)
    close(ps[0], ps[2], 1e-12)


def test_port_edges():
    server = port()
    rounds(server, 2)
    for device in range(3):
        server.trigger(device)
    w = server.w
    for device in range(3):
        r = server.upload(device, w, n_k=2)
    assert r["cos"] == [0.0] * 3  # zero progress
    same(server.w, w)  # every u = w: unchanged
    r = rounds(server, 1)
    assert r["cos"] == [0.0] * 3  # zero global step
    r = rounds(port(alpha=0.0, beta=0.0), 2)
    close(r["p"], [1 / 6, 2 / 6, 3 / 6], 1e-12)
    for omega in (0.0, math.inf):
        assert rounds(port(omega=omega), 2)["s"] == [3.0] * 3
    assert rounds(port(gate=True), 3)["cos"] == [1.0] * 3  # tau <= 1: not evaluated
    gated = port(gate=True, K=1)
    gated.trigger("slow")
    for i in range(2):
        fly(gated, 0, vector(i), n_k=1)
    assert gated.upload("slow", vector(9), n_k=1)["cos"][0] != 1.0  # tau = 2


@pytest.mark.parametrize(("wait", "largest"), [("gt", 4), ("ge", 3)])
def test_port_waits_for_the_too_stale(wait, largest):
    server = port(K=1, omega=3, wait=wait)
    server.trigger("slow")
    done = 0
    while True:
        server.trigger(done)
        if server.upload(done, vector(done), n_k=1) is None:
            break
        done += 1
    assert done == largest
    server.trigger("more")
    assert server.upload("more", vector(50), n_k=1) is None
    r = server.upload("slow", vector(51), n_k=1)
    assert r["devices"] == [done, "more", "slow"]
    assert r["staleness"] == [0, 0, largest]
    server.trigger("lost")
    for i in range(largest):
        fly(server, 0, vector(i), n_k=1)
    assert fly(server, 1, vector(52), n_k=1) is None
    assert server.lose("lost")["devices"] == [1]


# ---------------------------------------------------------------- ASO-Fed server


def test_aso_fed_server():
    alone = ASOFedTwin(vector(1), samples={0: 7})
    fly(alone, 0, vector(2))
    close(alone.w, vector(2), 1e-6)
    results = []
    for factor in (1, 9):
        server = ASOFedTwin(vector(1), samples={0: 1 * factor, 1: 3 * factor})
        server.trigger(0)
        fly(server, 1, vector(2))
        close(server.w, f64(vector(1)) + 0.75 * (f64(vector(2)) - vector(1)))
        w = f64(server.w)
        r = server.upload(0, vector(3))
        assert (r["staleness"], r["alpha"]) == (1, 0.25)
        close(server.w, w + 0.25 * (f64(vector(3)) - vector(1)))  # against the base, not the current model
        results.append(server.w)
    close(results[0], results[1], 1e-7)
    grown = ASOFedTwin(vector(1), samples={0: 1, 1: 3})
    assert fly(grown, 0, vector(2), n_k=9)["alpha"] == 0.75


def test_aso_fed_feature_step():
    A = rng(1).standard_normal((4, 6))
    close(aso_feature_attention(A).sum(axis=1), 1.0, 1e-12)
    same(aso_feature_step(np.zeros((4, 6))), np.zeros((4, 6)))
    conv = rng(2).uniform(-0.2, 0.2, (6, 25))  # a fresh 5x5 convolution: 4e-2 of its norm is left
    assert norm(aso_feature_step(conv).ravel()) / norm(conv.ravel()) == pytest.approx(4.2e-2, rel=0.1)


# ---------------------------------------------------------------- FedBuff


def test_fedbuff_buffer_of_one():
    server = FedBuffTwin(vector(1), K=1)
    fly(server, 0, vector(2))
    close(server.w, vector(2), 1e-7)
    server.trigger("old")
    fly(server, 0, vector(3))
    w = f64(server.w)
    r = server.upload("old", vector(4))
    assert r["staleness"] == [1]
    close(server.w, w - (f64(vector(2)) - vector(4)) / math.sqrt(2))  # delta, not mixing


def test_fedbuff_fresh_is_fedavg_and_stale_is_half():
    K = 4
    server = FedBuffTwin(vector(1), K=K)
    for device in range(2 * K):
        server.trigger(device)
    for device in range(K):
        same(server.w, vector(1))
        assert server.version == 1
        r = server.upload(device, vector(10 + device))
        assert (r is None) == (device < K - 1)
    avg = FedAvgTwin(vector(1))
    avg.aggregate({k: vector(10 + k) for k in range(K)}, dict.fromkeys(range(K), 5))
    close(server.w, avg.w, 1e-6)
    fresh = f64(server.w) - vector(1)
    for i in range(2):
        for device in range(100, 100 + K):
            fly(server, device, vector(i + device))
    w = f64(server.w)
    for device in range(K, 2 * K):
        r = server.upload(device, vector(6 + device))  # the same four models as above
    assert r["staleness"] == [3] * K
    assert r["s"] == [0.5] * K
    close(f64(server.w) - w, 0.5 * fresh, 1e-6)


def test_fedbuff_order_momentum_and_limit():
    results = []
    for order in ((0, 1, 2), (2, 0, 1)):
        server = FedBuffTwin(vector(1), K=3, eta_g=0.7, momentum=0.9)
        for repeat in range(3):
            for device in order:
                server.trigger(device)
            for device in order:
                server.upload(device, vector(10 * repeat + device))
        results.append(server.w)
    close(results[0], results[1], 1e-6)
    server = FedBuffTwin(np.zeros(1), K=1, eta_g=0.5, momentum=0.9)
    fly(server, 0, np.array([1.0]))  # m = -1
    fly(server, 0, server.w)  # m = -0.9
    close(server.w, [0.5 + 0.45])
    fly(server, 0, server.w + 1)  # m = -0.81 - 1
    close(server.w, [0.5 + 0.45 + 0.905])
    server = FedBuffTwin(vector(1), K=2, tau_max=0)
    server.trigger("old")
    for device in range(2):
        fly(server, device, vector(device))
    server.trigger(3)
    assert server.upload("old", vector(7))["kind"] == "discard"
    assert server.upload(3, vector(8)) is None  # the discarded one did not count
    assert len(server.buffer) == 1


# ---------------------------------------------------------------- FedSA-R


def test_fedsa_r():
    ours = FedSARTwin(vector(1), alpha=0.6, a=0.5, E1=20, E2=5, V1=0, freeze_estimates=True)
    theirs = FedAsyncTwin(vector(1), alpha=0.6, staleness="polynomial", a=0.5)
    r = rng(3)
    for i in range(40):
        device = int(r.integers(0, 6))
        for server in (ours, theirs):
            if device in server.base:
                server.upload(device, vector(i))
            else:
                server.trigger(device)
        same(ours.w, theirs.w)
    assert set(ours.epochs.values()) == {5}
    server = FedSARTwin(vector(1), alpha=0.6, a=0.5, E1=20, E2=5, V1=3)
    seen = []
    for i in range(5):
        w = server.w
        server.trigger(0)
        seen.append(server.epochs[0])
        server.upload(0, w)
        same(server.w, w)
        assert server.version == i + 2
    assert seen == [20, 20, 20, 5, 5]  # initial while v < 3, v from 0
    server.estimate = {k: float(k) for k in range(12)}
    epochs = [server.epochs_for(k) for k in range(12)]
    assert epochs == sorted(epochs, reverse=True)
    assert (epochs[0], epochs[-1]) == (5, math.floor(5 * 6.5 / 12))
    assert min(epochs) >= 1
    server.estimate = {0: 0.0, 1: 1e6, 2: 0.0}
    assert server.epochs_for(1) == 1
    assert server.epochs_for("new") == 5
    server = FedSARTwin(vector(1), alpha=0.6, a=0.5, E1=1, E2=1, V1=0)
    server.trigger(0)
    for i in range(3):
        fly(server, 1, vector(i))
    assert server.upload(0, vector(5))["estimate"] == 1.5


# ---------------------------------------------------------------- FedAvg and friends


def some(count=4, seed=50):
    return {k: vector(seed + k) for k in range(count)}, {k: 3 * k + 1 for k in range(count)}


def test_fedavg():
    for cls in (FedAvgTwin, FedProxServerTwin, MOONServerTwin):
        server = cls(vector(1))
        server.aggregate({3: vector(2)}, {3: 17})
        same(server.w, vector(2))
        uploads, n = some()
        r = server.aggregate(uploads, n)
        assert math.fsum(r["weights"]) == pytest.approx(1.0, abs=1e-12)
        w = server.w
        close(w, sum(n[k] * f64(u) for k, u in uploads.items()) / sum(n.values()))
        delta = f64(vector(2)) + sum(n[k] / sum(n.values()) * (f64(u) - vector(2)) for k, u in uploads.items())
        close(w, delta)
        server.aggregate(dict.fromkeys(range(4), w), n)
        same(server.w, w)
        again = cls(vector(1))
        again.aggregate(uploads, {k: 13 * v for k, v in n.items()})
        close(again.w, w, 1e-7)
        backwards = cls(vector(1))
        backwards.aggregate(dict(reversed(uploads.items())), n)
        same(backwards.w, w)
        version = server.version
        assert server.aggregate({}, {})["kind"] == "empty"
        same(server.w, w)
        assert server.version == version + 1
        bad = uploads | {9: np.full(SIZE, np.inf)}
        server.aggregate(bad, n | {9: 1000})
        same(server.w, w)


def test_fedavg_full_batch_is_gradient_descent():
    w, sets = vector(1), [data(60 + k, count=6 * (k + 1)) for k in range(3)]
    n = {k: len(s[1]) for k, s in enumerate(sets)}
    server = FedAvgTwin(w)
    server.aggregate({k: local.local_sgd(w, *s, full(n[k]), 0.2) for k, s in enumerate(sets)}, n)
    everything = np.concatenate([s[0] for s in sets]), np.concatenate([s[1] for s in sets])
    close(server.w, f64(w) - 0.2 * local.gradient(w, *everything), 1e-6)


# ---------------------------------------------------------------- FedDyn


def test_feddyn_server():
    uploads, n = some()
    for M in (4, 10):
        server = FedDynTwin(vector(1), M=M)
        server.aggregate(uploads, n)
        mean = np.mean([f64(u) for u in uploads.values()], axis=0)
        close(server.a_bar, mean)
        close(server.w, mean + 4 / M * (mean - vector(1)))
        if M == 4:
            close(server.w, 2 * mean - vector(1))
        G, theta = server.G.copy(), server.w
        server.aggregate(dict.fromkeys(range(4), theta))
        close(server.G, G, 1e-12)
        close(server.w, f64(theta) + G)
        before = server.w
        assert server.aggregate({})["kind"] == "empty"
        same(server.w, before)
    plain, avg = FedDynTwin(vector(1), M=9, use_dual=False), FedAvgTwin(vector(1))
    three = {k: uploads[k] for k in range(3)}
    plain.aggregate(three)
    avg.aggregate(three, dict.fromkeys(range(3), 7))
    same(plain.w, avg.w)


def test_feddyn_dual_is_the_mean_of_the_devices_duals():
    M, alpha = 6, 0.3
    sets = [data(70 + k) for k in range(M)]
    duals = [np.zeros(SIZE) for _ in range(M)]
    server = FedDynTwin(vector(1), M=M)
    h = np.zeros(SIZE)  # the paper's notation
    r = rng(4)
    for t in range(6):
        chosen = sorted(int(k) for k in r.choice(M, 3, replace=False))
        theta, uploads = server.w, {}
        for k in chosen:
            uploads[k], duals[k] = local.feddyn_local(theta, duals[k], *sets[k], mini(epochs=2, seed=t), 0.1, alpha)
        server.aggregate(uploads)
        h = h - alpha / M * sum(f64(u) - theta for u in uploads.values())
        close(server.G, np.mean(duals, axis=0), 1e-6)
        close(server.G, -h / alpha, 1e-6)


# ---------------------------------------------------------------- FedLWS

GROUPS = [(0, 5), (5, 12), (12, SIZE)]


def test_fedlws():
    uploads, n = some()
    avg = FedAvgTwin(vector(1))
    avg.aggregate(uploads, n)
    off = FedLWSTwin(vector(1), groups=GROUPS, beta=0.0, tau_min=0.0)
    off.aggregate(uploads, n)
    same(off.w, avg.w)
    server = FedLWSTwin(vector(1), groups=GROUPS)
    r = server.aggregate(uploads, n)
    w, a = f64(vector(1)), sum(n[k] / sum(n.values()) * f64(u) for k, u in uploads.items())
    for (i, j), gamma, tau, q in zip(GROUPS, r["gamma"], r["tau"], r["q"], strict=True):
        mean = np.mean([f64(u)[i:j] for u in uploads.values()], axis=0)
        assert q == pytest.approx(np.mean([np.linalg.norm(f64(u)[i:j] - mean) for u in uploads.values()]))
        assert tau == pytest.approx(min(max(0.03 * q, 0.01), 0.2))
        length, moved = np.linalg.norm(w[i:j]), np.linalg.norm(a[i:j] - w[i:j])
        assert gamma == pytest.approx(length / (length + tau * moved))
        assert length / (length + 0.2 * moved) <= gamma <= 1.0
        close(server.w[i:j], gamma * a[i:j])
    shuffled = FedLWSTwin(vector(1), groups=GROUPS)
    shuffled.aggregate({3 - k: u for k, u in uploads.items()}, {3 - k: v for k, v in n.items()})
    close(shuffled.w, server.w, 1e-6)


def test_fedlws_edges():
    w = vector(1)
    still = FedLWSTwin(w, groups=GROUPS)
    assert still.aggregate({0: w, 1: w}, {0: 1, 1: 1})["gamma"] == [1.0] * 3
    same(still.w, w)
    for uploads in ({0: vector(2), 1: vector(2)}, {0: vector(2)}):  # identical clients; a single one
        server = FedLWSTwin(w, groups=GROUPS)
        r = server.aggregate(uploads, {0: 1, 1: 1})
        assert r["tau"] == [0.01] * 3
        for (i, j), gamma in zip(GROUPS, r["gamma"], strict=True):
            length = norm(w[i:j])
            assert gamma == pytest.approx(length / (length + 0.01 * norm(f64(vector(2))[i:j] - w[i:j])))
            assert gamma < 1.0
    zero = FedLWSTwin(np.zeros(SIZE), groups=GROUPS)
    assert zero.aggregate({0: vector(2)}, {0: 1})["gamma"] == [1.0] * 3
    same(zero.w, vector(2))
    gammas = []
    for size in (0.1, 1.0, 10.0):
        server = FedLWSTwin(w, groups=GROUPS)
        gammas.append(server.aggregate({0: w + np.float32(size)}, {0: 1})["gamma"][0])
    assert gammas == sorted(gammas, reverse=True)


# ---------------------------------------------------------------- C4 in all of them

LAYOUT = {"learnable": SIZE - 5, "counters": 2}
L, B = SIZE - 5, SIZE - 2


def counted(seed, *numbers):
    v = vector(seed)
    v[B:] = numbers
    return v


def test_buffers_and_counters_of_the_synchronous_servers():
    uploads, n = {0: counted(2, 4, 9), 1: counted(3, 7, 1)}, {0: 1, 1: 3}
    weighted = 0.25 * f64(uploads[0]) + 0.75 * f64(uploads[1])
    uniform = 0.5 * f64(uploads[0]) + 0.5 * f64(uploads[1])
    w0 = counted(1, 3, 3)
    lws = FedLWSTwin(w0, groups=[(0, 6), (6, L)], beta=5.0, **LAYOUT)
    for server, expected in (
        (FedAvgTwin(w0, **LAYOUT), weighted),
        (FedDynTwin(w0, M=2, **LAYOUT), uniform),
        (lws, weighted),
    ):
        server.aggregate(uploads, n)
        close(server.w[L:B], expected[L:B])
        same(server.w[B:], [7, 9])


def test_buffers_and_counters_of_the_asynchronous_servers():
    w0, u, v = counted(1, 3, 3), counted(2, 4, 9), counted(3, 7, 1)
    for server in (
        FedAsyncTwin(w0, alpha=0.3, **LAYOUT),
        FedSARTwin(w0, alpha=0.3, a=0.5, E1=1, E2=1, V1=0, **LAYOUT),
        ASOFedTwin(w0, samples={0: 3, 1: 7}, **LAYOUT),
    ):
        fly(server, 0, u)
        close(server.w[L:B], (0.7 * f64(w0) + 0.3 * f64(u))[L:B])
        same(server.w[B:], [4, 9])
    buff = FedBuffTwin(w0, K=2, eta_g=0.1, momentum=0.5, **LAYOUT)
    ported = PORTTwin(w0, K=2, omega=5, alpha=1.0, beta=1.0, **LAYOUT)
    for server in (buff, ported):
        for _ in range(2):
            server.trigger(0)
            server.trigger(1)
            server.upload(0, u, n_k=1)
            r = server.upload(1, v, n_k=3)
        p = r.get("p", [0.5, 0.5])
        close(server.w[L:B], (p[0] * f64(u) + p[1] * f64(v))[L:B])
        same(server.w[B:], [7, 9])


def test_counters_with_or_without_the_servers_own():
    for server_counts, expected in ((False, [1, 8]), (True, [3, 8])):
        server = FedAsyncTwin(counted(1, 3, 3), alpha=0.3, server_counts=server_counts, **LAYOUT)
        fly(server, 0, counted(2, 1, 8))
        same(server.w[B:], expected)


def test_buffers_do_not_enter_cosines_and_shrink_factors():
    results = []
    for junk in (0.0, 1e3):
        server = PORTTwin(vector(1), K=2, omega=5, alpha=1.0, beta=1.0, **LAYOUT)
        lws = FedLWSTwin(vector(1), groups=[(0, L)], **LAYOUT)
        for _ in range(2):
            uploads = {k: vector(4 + k) for k in range(2)}
            for u in uploads.values():
                u[L:] += np.float32(junk)
            server.trigger(0)
            server.trigger(1)
            server.upload(0, uploads[0], n_k=1)
            r = server.upload(1, uploads[1], n_k=1)
            gamma = lws.aggregate(uploads, {0: 1, 1: 1})["gamma"]
        results.append((r["cos"], gamma))
    assert results[0] == results[1]


def test_models_that_are_not_finite_are_never_counted():
    bad = vector(2)
    bad[-1] = np.inf
    for server in (
        FedAsyncTwin(vector(1), alpha=0.3),
        ASOFedTwin(vector(1), samples={0: 1}),
        FedBuffTwin(vector(1), K=1),
        FedSARTwin(vector(1), alpha=0.3, a=0.5, E1=1, E2=1, V1=0),
        PORTTwin(vector(1), K=1, omega=5, alpha=1.0, beta=1.0),
    ):
        assert fly(server, 0, bad, n_k=1)["kind"] == "discard"
        assert server.version == 1
        same(server.w, vector(1))
    waiting = PORTTwin(vector(1), K=1, omega=0, alpha=1.0, beta=1.0)
    waiting.trigger("slow")
    fly(waiting, 0, vector(3), n_k=1)
    assert fly(waiting, 0, vector(4), n_k=1) is None
    assert waiting.upload("slow", bad, n_k=1)["devices"] == [0]  # nobody left to wait for

"""Naive twins of what devices do, on softmax regression (baselines.md C5 and the device rules; fedasmu.md section 4).

A model is a flat float32 vector: W (classes x features) row by row, then the bias. Arithmetic is float64 all the way
through one job; the result is cast to float32 once. `batches` is a list per epoch of lists of index arrays, one per
SGD step.
"""

from __future__ import annotations

import math

import numpy as np

from .fedasmu import device_merge
from .helpers import dot, f32, f64, norm


def unpack(w, x) -> tuple[np.ndarray, np.ndarray]:
    features = np.shape(x)[1]
    classes = len(w) // (features + 1)
    assert classes * (features + 1) == len(w)
    w = f64(w)
    return w[: classes * features].reshape(classes, features), w[classes * features :]


def probabilities(w, x) -> np.ndarray:
    W, b = unpack(w, x)
    rows = []
    for sample in f64(x):
        logits = W @ sample + b
        e = np.exp(logits - logits.max())
        rows.append(e / e.sum())
    return np.array(rows)


def loss(w, x, y) -> float:
    """Mean cross-entropy over the batch."""
    W, b = unpack(w, x)
    total = 0.0
    for sample, label in zip(f64(x), y, strict=True):
        logits = W @ sample + b
        top = logits.max()
        total += top + math.log(np.exp(logits - top).sum()) - logits[label]
    return total / len(y)


def gradient(w, x, y) -> np.ndarray:
    """Gradient of the mean cross-entropy, in the order of the model vector."""
    W, b = unpack(w, x)
    gW, gb = np.zeros_like(W), np.zeros_like(b)
    for sample, label, p in zip(f64(x), y, probabilities(w, x), strict=True):
        error = p.copy()
        error[label] -= 1.0
        gW += np.outer(error, sample) / len(y)
        gb += error / len(y)
    return np.concatenate([gW.ravel(), gb])


def local_sgd(
    w, x, y, batches: list, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, extra=None
) -> np.ndarray:
    """C5, LOCAL: (gradient + extra(u)), then weight decay, then momentum, as torch SGD does."""
    u = f64(f32(w))
    velocity = None
    for epoch in batches:
        for index in epoch:
            g = gradient(u, x[index], y[index])
            if extra is not None:
                g = g + extra(u)
            g = g + weight_decay * u
            velocity = g if velocity is None else momentum * velocity + g
            u = u - lr * velocity
    return f32(u)


# proximal term: FedAsync (rho), FedSA-R (rho), FedProx (mu)


def proximal(anchor, rho: float):
    """grad_extra of (rho / 2) |u - anchor|^2, or None (the term is skipped) when rho is 0."""
    if rho == 0.0:
        return None
    anchor = f64(f32(anchor))
    return lambda u: rho * (u - anchor)


# FedDyn


def feddyn_alpha(alpha: float, n_k: int, n_total: int, M: int) -> float:
    return alpha / (M * n_k / n_total)


def feddyn_extra(theta, dual, alpha_k: float):
    theta, dual = f64(f32(theta)), f64(dual)
    return lambda u: alpha_k * (u - theta + dual)


def feddyn_local(
    theta, dual, x, y, batches: list, lr: float, alpha_k: float, momentum: float = 0.0, weight_decay: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (u_k, the dual afterwards). The dual is float64 and zero at the start."""
    u = local_sgd(theta, x, y, batches, lr, momentum, weight_decay, extra=feddyn_extra(theta, dual, alpha_k))
    return u, f64(dual) + (f64(u) - f64(f32(theta)))


# ASO-Fed


def aso_rate(durations: list[float], unit: float = 1.0) -> float:
    """r_k = max(1, ln of the mean duration of the completed jobs), counted in `unit` seconds."""
    if not durations:
        return 1.0
    return max(1.0, math.log(math.fsum(durations) / len(durations) / unit))


def aso_recursion(g, H, V, beta: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One application: (z, H afterwards, V afterwards). z uses the old H; H is updated with the old V."""
    z = g - V + H
    return z, beta * H + (1.0 - beta) * V, g


def aso_local_s(
    w_b,
    H,
    V,
    x,
    y,
    batches: list,
    lr: float,
    lam: float,
    beta: float,
    r_k: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Variant S (pinned): the recursion at every mini-batch. Weight decay is a part of the local loss and so of g;
    there is no momentum inside z, it gathers the steps r_k z. Returns (u_k, H, V)."""
    anchor = f64(f32(w_b))
    u, H, V = anchor.copy(), f64(H), f64(V)
    velocity = None
    for epoch in batches:
        for index in epoch:
            g = gradient(u, x[index], y[index]) + lam * (u - anchor) + weight_decay * u
            z, H, V = aso_recursion(g, H, V, beta)
            velocity = r_k * z if velocity is None else momentum * velocity + r_k * z
            u = u - lr * velocity
    return f32(u), H, V


def aso_local_r(
    w_b,
    H,
    V,
    x,
    y,
    batches: list,
    lr: float,
    lam: float,
    beta: float,
    r_k: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Variant R: LOCAL on s_k, then the recursion once with g := w^b - u and a rate of 1."""
    u_hat = local_sgd(w_b, x, y, batches, lr, momentum, weight_decay, extra=proximal(w_b, lam))
    G = f64(f32(w_b)) - f64(u_hat)
    z, H, V = aso_recursion(G, f64(H), f64(V), beta)
    return f32(f64(f32(w_b)) - r_k * z), H, V


# MOON


def cosine(a, b) -> float:
    return dot(a, b) / (max(norm(a), 1e-8) * max(norm(b), 1e-8))


def moon_contrastive(z, z_g, z_previous: list, T: float) -> float:
    """l_con of a batch. `z` and `z_g` are (batch x d), `z_previous` one such array per previous model (may be [])."""
    total = 0.0
    for i in range(len(z)):
        logits = [cosine(z[i], z_g[i]) / T] + [cosine(z[i], z_p[i]) / T for z_p in z_previous]
        top = max(logits)
        total += top + math.log(math.fsum(math.exp(v - top) for v in logits)) - logits[0]
    return total / len(z)


# FedASMU


def fedasmu_trip(
    w_o,
    x,
    y,
    batches: list,
    *,
    slot: int | None,
    o: int,
    request,
    gamma: float,
    upsilon: float,
    mu_beta: float,
    eta_gamma: float,
    eta_upsilon: float,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    equations: str = "corrected",
    age: int | None = None,
    merge_batch=None,
    reset_momentum: bool = False,
) -> dict:
    """Section 4: train to the slot, merge, train on.

    `request()` answers (g, w_g) or None; it is called once, at the start of epoch `slot` (1..L; None: never).
    The merge's mini-batch is the first one of epoch `slot` unless `merge_batch` gives another.
    """
    assert slot is None or 1 <= slot <= len(batches)
    u = f64(f32(w_o))
    velocity = None
    merge = None
    g_version = None
    steps = 0
    for number, epoch in enumerate(batches, start=1):
        if number == slot:
            answer = request()
            if answer is not None:
                g_version, w_g = answer
                index = epoch[0] if merge_batch is None else merge_batch
                bx, by = x[index], y[index]
                merge = device_merge(
                    f32(u),
                    w_g,
                    g=g_version,
                    o=o,
                    gamma=gamma,
                    upsilon=upsilon,
                    mu_beta=mu_beta,
                    eta_gamma=eta_gamma,
                    eta_upsilon=eta_upsilon,
                    loss=lambda w, bx=bx, by=by: loss(w, bx, by),
                    gradient=lambda w, bx=bx, by=by: gradient(w, bx, by),
                    equations=equations,
                    age=age,
                )
                u = f64(merge["w_a"])
                if reset_momentum:
                    velocity = None
        for index in epoch:
            g = gradient(u, x[index], y[index]) + weight_decay * u
            velocity = g if velocity is None else momentum * velocity + g
            u = u - lr * velocity
            steps += 1
    return {
        "w_i": f32(u),
        "steps": steps,
        "epochs": len(batches),
        "fresh": g_version,
        "merge": merge,
        "beta": 0.0 if merge is None else merge["beta"],
        "gamma": gamma if merge is None else merge["gamma_after"],
        "upsilon": upsilon if merge is None else merge["upsilon_after"],
        "reward": None if merge is None else merge["reward"],
    }

"""Naive twins of SCAFFOLD, FedOpt, FedNova, CA2FL and FADAS, written from the papers. Versions start at 1.

Of the synchronous ones ``aggregate(uploads, n, ...)`` ends a round as in ``synchronous``; the asynchronous ones are
driven by ``trigger`` and ``upload`` as in ``asynchronous``. Everything is kept that a paper names, also where it could
be summed up: all controls, all cached updates, all coefficients of a path.
"""

from __future__ import annotations

import math

import numpy as np

from .helpers import counter_max, cut, f32, f64
from .local import gradient
from .synchronous import received


class RoundTwin:
    """Base of the three synchronous twins: versions, and an empty round that changes nothing."""

    def __init__(self, w0, *, learnable: int | None = None, counters: int = 0) -> None:
        self.learnable, self.counters = learnable, counters
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def close(self, new, S: list, models: list, **found) -> dict:
        if S and self.counters:
            new[-self.counters :] = counter_max(models, len(new) - self.counters)
        self.version += 1
        self.versions[self.version] = f32(new)
        return {"version": self.version - 1, "devices": S, **found}


class SCAFFOLDTwin(RoundTwin):
    """Algorithm 1 of the paper, Option II; the server keeps every c_i that it has received."""

    def __init__(self, w0, *, N: int, eta_g: float = 1.0, **layout) -> None:
        super().__init__(w0, **layout)
        self.N, self.eta_g = N, eta_g
        L, _ = cut(self.versions[1].size, self.learnable, self.counters)
        self.c_i = {k: np.zeros(L) for k in range(N)}

    @property
    def c(self) -> np.ndarray:
        return sum(self.c_i.values()) / self.N

    def aggregate(self, uploads: dict, changes: dict) -> dict:
        S, x = received(uploads), f64(self.w)
        if not S:
            return self.close(x, S, [], weights=[])
        L, B = cut(x.size, self.learnable, self.counters)
        new = x.copy()
        for k in S:
            new[:L] += self.eta_g / len(S) * (f64(uploads[k]) - x)[:L]
            self.c_i[k] = self.c_i[k] + f64(changes[k])
        new[L:B] = np.mean([f64(uploads[k])[L:B] for k in S], axis=0)
        weights = [self.eta_g / len(S)] * len(S)
        return self.close(new, S, [uploads[k] for k in S], weights=weights)


def scaffold_local(x, c, c_i, data, labels, batches: list, lr: float, weight_decay: float = 0.0):
    """One device by Option II, literally: ``(y, c_i^+)``, with plain SGD."""
    y, K = f64(x), 0
    for epoch in batches:
        for index in epoch:
            g = gradient(y, data[index], labels[index]) + weight_decay * y
            y = y - lr * (g - c_i + c)
            K += 1
    return y, c_i - c + (f64(x) - y) / (K * lr)


class FedOptTwin(RoundTwin):
    """Algorithm 2 of the paper, and FedAvgM; one coordinate at a time."""

    def __init__(self, w0, *, server: str, eta: float, beta1: float, beta2: float, tau: float, **layout) -> None:
        super().__init__(w0, **layout)
        self.server, self.eta, self.beta1, self.beta2, self.tau = server, eta, beta1, beta2, tau
        L, _ = cut(self.versions[1].size, self.learnable, self.counters)
        self.m, self.v = [0.0] * L, [tau * tau] * L

    def aggregate(self, uploads: dict, n: dict) -> dict:
        S, x = received(uploads), f64(self.w)
        if not S:
            return self.close(x, S, [], weights=[])
        total = sum(n[k] for k in S)
        p = {k: n[k] / total for k in S}
        new = sum(p[k] * f64(uploads[k]) for k in S)
        for j in range(len(self.m)):
            delta = math.fsum(p[k] * (float(uploads[k][j]) - x[j]) for k in S)
            if self.server == "sgd":
                self.m[j] = self.beta1 * self.m[j] + delta
                new[j] = x[j] + self.eta * self.m[j]
                continue
            self.m[j] = self.beta1 * self.m[j] + (1.0 - self.beta1) * delta
            v = self.v[j]
            if self.server == "adagrad":
                v = v + delta**2
            elif self.server == "adam":
                v = self.beta2 * v + (1.0 - self.beta2) * delta**2
            else:
                sign = (v > delta**2) - (v < delta**2)
                v = v - (1.0 - self.beta2) * delta**2 * sign
            self.v[j] = v
            new[j] = x[j] + self.eta * self.m[j] / (math.sqrt(v) + self.tau)
        return self.close(new, S, [uploads[k] for k in S], weights=[p[k] for k in S])


def path_by_unrolling(steps: int, momentum: float = 0.0, nesterov: bool = False, eta_mu: float = 0.0) -> float:
    """``|a|_1``: train on the loss ``z`` of one number, rate 1, and measure its distance (the term pulls it back)."""
    z, v = 0.0, 0.0
    for _ in range(steps):
        g = 1.0 + eta_mu * z  # the gradient of z, and of the proximal term around 0
        v = momentum * v + g
        z -= g + momentum * v if nesterov else v
    return -z


class FedNovaTwin(RoundTwin):
    """Equation 12 of the paper: normalised gradients d_i first, then one step of tau_eff eta along their mean."""

    def __init__(self, w0, *, lr: float, mu: float = 0.0, momentum: float = 0.0, tau_eff: str = "paths", **layout):
        super().__init__(w0, **layout)
        self.lr, self.mu, self.momentum, self.tau_eff = lr, mu, momentum, tau_eff

    def aggregate(self, uploads: dict, n: dict, steps: dict) -> dict:
        S, x = received(uploads), f64(self.w)
        if not S:
            return self.close(x, S, [], weights=[])
        total = sum(n[k] for k in S)
        a = {k: path_by_unrolling(steps[k], self.momentum, eta_mu=self.lr * self.mu) for k in S}
        d = {k: (x - f64(uploads[k])) / (self.lr * a[k]) for k in S}
        tau = math.fsum(n[k] / total * (a[k] if self.tau_eff == "paths" else steps[k]) for k in S)
        new = sum(n[k] / total * f64(uploads[k]) for k in S)
        L, _ = cut(x.size, self.learnable, self.counters)
        new[:L] = (x - tau * self.lr * sum(n[k] / total * d[k] for k in S))[:L]
        weights = [n[k] / total * tau / a[k] for k in S]
        return self.close(new, S, [uploads[k] for k in S], weights=weights, a=[a[k] for k in S], tau_eff=tau)


class BufferedTwin:
    """Base of the two asynchronous twins: bases, and a buffer of M uploads."""

    def __init__(self, w0, *, M: int, learnable: int | None = None, counters: int = 0) -> None:
        self.M, self.learnable, self.counters = M, learnable, counters
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}
        self.base: dict = {}
        self.buffer: list = []  # (device, base, tau, u) in order of arrival

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def trigger(self, device) -> int:
        self.base[device] = self.version
        return self.version

    def lose(self, device) -> None:
        del self.base[device]

    def upload(self, device, u) -> dict | None:
        o = self.base.pop(device)
        self.buffer.append((device, o, self.version - o, f32(u)))
        if len(self.buffer) < self.M:
            return None
        x, taken, self.buffer = f64(self.w), self.buffer, []
        L, B = cut(x.size, self.learnable, self.counters)
        deltas = [(k, f64(u)[:L] - f64(self.versions[o])[:L]) for k, o, _, u in taken]
        new = x.copy()
        found = self.step(new[:L], deltas, max(tau for _, _, tau, _ in taken))
        new[L:B] = np.mean([f64(u)[L:B] for *_, u in taken], axis=0)
        if self.counters:
            new[B:] = counter_max([u for *_, u in taken], B)
        who = {"devices": [k for k, *_ in taken], "base": [o for _, o, *_ in taken]}
        found |= who | {"version": self.version, "staleness": [tau for _, _, tau, _ in taken]}
        self.version += 1
        self.versions[self.version] = f32(new)
        return found

    def step(self, x: np.ndarray, deltas: list, tau_max: int) -> dict:
        """Move x in place and return the numbers that decided it."""
        raise NotImplementedError


class CA2FLTwin(BufferedTwin):
    """Algorithm 2 of the paper: the mean of the cache is recomputed at every step."""

    def __init__(self, w0, *, n: int, eta: float = 1.0, **more) -> None:
        super().__init__(w0, **more)
        L, _ = cut(self.versions[1].size, self.learnable, self.counters)
        self.eta, self.h = eta, {k: np.zeros(L) for k in range(n)}
        self.seen: set = set()

    def step(self, x: np.ndarray, deltas: list, tau_max: int) -> dict:
        h_t = sum(self.h.values()) / len(self.h)
        v = h_t + sum(delta - self.h[k] for k, delta in deltas) / self.M
        x += self.eta * v
        found = {"cached": [int(k in self.seen) for k, _ in deltas], "weights": [self.eta / self.M] * self.M}
        for k, delta in deltas:
            self.h[k] = f64(f32(delta))
            self.seen.add(k)
        return found


class FADASTwin(BufferedTwin):
    """Algorithm 1 of the paper with its delay adaptation, one coordinate at a time."""

    def __init__(
        self, w0, *, eta: float, beta1: float, beta2: float, eps: float, tau_c: int, delay: str = "scale", **more
    ) -> None:
        super().__init__(w0, **more)
        L, _ = cut(self.versions[1].size, self.learnable, self.counters)
        self.eta, self.beta1, self.beta2, self.eps, self.tau_c, self.delay = eta, beta1, beta2, eps, tau_c, delay
        self.m, self.v, self.v_hat = [0.0] * L, [0.0] * L, [0.0] * L

    def step(self, x: np.ndarray, deltas: list, tau_max: int) -> dict:
        eta_t = self.eta
        if tau_max > self.tau_c:
            eta_t = {"scale": self.eta / tau_max, "cap": min(self.eta, 1.0 / tau_max), "none": self.eta}[self.delay]
        for j in range(len(x)):
            delta = math.fsum(delta[j] for _, delta in deltas) / self.M
            self.m[j] = self.beta1 * self.m[j] + (1.0 - self.beta1) * delta
            self.v[j] = self.beta2 * self.v[j] + (1.0 - self.beta2) * delta**2
            self.v_hat[j] = max(self.v_hat[j], self.v[j])
            x[j] += eta_t * self.m[j] / (math.sqrt(self.v_hat[j]) + self.eps)
        return {"eta_t": eta_t, "tau_max": tau_max, "weights": [1.0 / self.M] * self.M}

"""Naive twins of the asynchronous baselines, servers only (baselines.md section 2). Versions start at 1."""

from __future__ import annotations

import math

import numpy as np

from .helpers import counter_max, cut, dot, f32, f64, norm


class FedAsyncTwin:
    """2.1: every arrival is mixed in with alpha * s(tau)."""

    def __init__(
        self,
        w0,
        *,
        alpha: float,
        staleness: str = "constant",
        a: float = 0.5,
        b: float = 4.0,
        halve_after: int | None = None,
        learnable: int | None = None,
        counters: int = 0,
        server_counts: bool = False,
    ) -> None:
        assert staleness in ("constant", "polynomial", "hinge")
        self.alpha, self.staleness, self.a, self.b, self.halve_after = alpha, staleness, a, b, halve_after
        self.learnable, self.counters, self.server_counts = learnable, counters, server_counts
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}
        self.base: dict = {}

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def trigger(self, device) -> int:
        assert device not in self.base
        self.base[device] = self.version
        return self.version

    def s(self, tau: int) -> float:
        if self.staleness == "constant":
            return 1.0
        if self.staleness == "polynomial":
            return (tau + 1.0) ** (-self.a)
        return 1.0 if tau <= self.b else 1.0 / (self.a * (tau - self.b) + 1.0)

    def upload(self, device, u, n_k: int | None = None) -> dict:
        o = self.base.pop(device)
        tau = self.version - o
        u = f64(f32(u))
        if not np.all(np.isfinite(u)):
            return {"kind": "discard", "reason": "not finite", "version": self.version, "base": o, "staleness": tau}
        alpha = self.alpha
        if self.halve_after is not None and self.version - 1 >= self.halve_after:
            alpha = 0.5 * alpha
        alpha_tau = alpha * self.s(tau)
        w = f64(self.versions[self.version])
        new = (1.0 - alpha_tau) * w + alpha_tau * u  # parameters and float buffers alike
        _, B = cut(u.size, self.learnable, self.counters)
        if self.counters:
            new[B:] = counter_max([w, u] if self.server_counts else [u], B)
        result = {"kind": "aggregate", "version": self.version, "base": o, "staleness": tau, "alpha": alpha_tau}
        self.version += 1
        self.versions[self.version] = f32(new)
        return result


class PORTTwin:
    """2.2: wait for K reports and until no device is too stale, then average whole models with weights p_k."""

    def __init__(
        self,
        w0,
        *,
        K: int,
        omega: float,
        alpha: float,
        beta: float,
        gate: bool = False,
        wait: str = "gt",
        learnable: int | None = None,
        counters: int = 0,
        server_counts: bool = False,
    ) -> None:
        assert wait in ("gt", "ge")
        self.K, self.omega, self.alpha, self.beta, self.gate, self.wait = K, omega, alpha, beta, gate, wait
        self.learnable, self.counters, self.server_counts = learnable, counters, server_counts
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}
        self.base: dict = {}  # still training
        self.reported: list = []  # (device, base, u, n_k) in arrival order

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def trigger(self, device) -> int:
        assert device not in self.base
        assert device not in [r[0] for r in self.reported]
        self.base[device] = self.version
        return self.version

    def too_stale(self) -> list:
        """Outstanding devices the server must wait for."""
        late = []
        for device, o in self.base.items():
            tau = self.version - o
            if (self.wait == "gt" and tau > self.omega) or (self.wait == "ge" and tau >= self.omega):
                late.append(device)
        return late

    def upload(self, device, u, n_k: int) -> dict | None:
        o = self.base.pop(device)
        u = f32(u)
        if not np.all(np.isfinite(u)):
            discard = {"kind": "discard", "reason": "not finite", "version": self.version, "base": o}
            return self._aggregate_if_ready() or discard
        self.reported.append((device, o, u, n_k))
        return self._aggregate_if_ready()

    def lose(self, device) -> dict | None:
        """Stop waiting for a lost device."""
        del self.base[device]
        return self._aggregate_if_ready()

    def weights(self, reported: list) -> dict:
        L, _ = cut(self.versions[1].size, self.learnable, self.counters)
        w = f64(self.versions[self.version])[:L]
        total = sum(n for _, _, _, n in reported)
        s, cosines, raw, taus = [], [], [], []
        for _, o, u, n in reported:
            tau = self.version - o
            s_k = self.alpha
            if 0.0 < self.omega < math.inf:
                s_k = self.alpha * self.omega / (tau + self.omega)
            if self.version == 1 or (self.gate and tau <= 1):
                cosine = 1.0
            else:
                direction = w - f64(self.versions[self.version - 1])[:L]
                x = f64(u)[:L] - w
                lengths = norm(x) * norm(direction)
                cosine = dot(x, direction) / lengths if lengths > 0.0 else 0.0
            c_k = self.beta * (cosine + 1.0) / 2.0
            s.append(s_k)
            cosines.append(cosine)
            taus.append(tau)
            raw.append(n / total * (s_k + c_k))
        if math.fsum(raw) == 0.0:
            raw = [n / total for _, _, _, n in reported]
        p = [r / math.fsum(raw) for r in raw]
        return {"staleness": taus, "s": s, "cos": cosines, "p": p}

    def _aggregate_if_ready(self) -> dict | None:
        if len(self.reported) < max(self.K, 1) or self.too_stale():
            return None
        result = {"kind": "aggregate", "version": self.version, "devices": [r[0] for r in self.reported]}
        result |= {"base": [r[1] for r in self.reported]} | self.weights(self.reported)
        new = np.zeros(self.versions[1].size, dtype=np.float64)
        for p, (_, _, u, _) in zip(result["p"], self.reported, strict=True):
            new = new + p * f64(u)  # parameters and float buffers alike
        if self.counters:
            _, B = cut(new.size, self.learnable, self.counters)
            models = [u for _, _, u, _ in self.reported]
            new[B:] = counter_max([*models, self.w] if self.server_counts else models, B)
        self.version += 1
        self.versions[self.version] = f32(new)
        self.reported = []
        return result


class ASOFedTwin:
    """2.3, server: w + (n'_k / N') (u_k - w^b), N' over all devices."""

    def __init__(
        self, w0, *, samples: dict, learnable: int | None = None, counters: int = 0, server_counts: bool = False
    ) -> None:
        self.samples = dict(samples)  # n' of every device of the federation
        self.learnable, self.counters, self.server_counts = learnable, counters, server_counts
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}
        self.base: dict = {}

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def trigger(self, device) -> int:
        assert device not in self.base
        self.base[device] = self.version
        return self.version

    def upload(self, device, u, n_k: int | None = None) -> dict:
        o = self.base.pop(device)
        u = f64(f32(u))
        tau = self.version - o
        if not np.all(np.isfinite(u)):
            return {"kind": "discard", "reason": "not finite", "version": self.version, "base": o, "staleness": tau}
        if n_k is not None:
            self.samples[device] = n_k
        share = self.samples[device] / sum(self.samples.values())
        w = f64(self.versions[self.version])
        L, B = cut(u.size, self.learnable, self.counters)
        new = (1.0 - share) * w + share * u  # float buffers mix
        new[:L] = w[:L] + share * (u[:L] - f64(self.versions[o])[:L])
        if self.counters:
            new[B:] = counter_max([w, u] if self.server_counts else [u], B)
        result = {"kind": "aggregate", "version": self.version, "base": o, "staleness": tau, "alpha": share}
        self.version += 1
        self.versions[self.version] = f32(new)
        return result


def aso_feature_attention(A) -> np.ndarray:
    """2.3, feature step: softmax of |A| along every row."""
    A = f64(A)
    return np.array([[math.exp(abs(x)) / math.fsum(math.exp(abs(y)) for y in row) for x in row] for row in A])


def aso_feature_step(A) -> np.ndarray:
    return aso_feature_attention(A) * f64(A)


class FedBuffTwin:
    """2.4: K discounted deltas make one step; divided by K, not by the sum of the discounts."""

    def __init__(
        self,
        w0,
        *,
        K: int,
        eta_g: float = 1.0,
        momentum: float = 0.0,
        tau_max: float = math.inf,
        learnable: int | None = None,
        counters: int = 0,
        server_counts: bool = False,
    ) -> None:
        self.K, self.eta_g, self.momentum, self.tau_max = K, eta_g, momentum, tau_max
        self.learnable, self.counters, self.server_counts = learnable, counters, server_counts
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}
        self.base: dict = {}
        self.buffer: list = []  # (device, base, tau, u) in arrival order
        self.m: np.ndarray | None = None

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def trigger(self, device) -> int:
        assert device not in self.base
        self.base[device] = self.version
        return self.version

    def upload(self, device, u, n_k: int | None = None) -> dict | None:
        o = self.base.pop(device)
        tau = self.version - o
        u = f32(u)
        discard = {"kind": "discard", "version": self.version, "base": o, "staleness": tau}
        if tau > self.tau_max:
            return discard | {"reason": "stale"}
        if not np.all(np.isfinite(u)):
            return discard | {"reason": "not finite"}
        self.buffer.append((device, o, tau, u))
        if len(self.buffer) < self.K:
            return None

        L, B = cut(u.size, self.learnable, self.counters)
        total = np.zeros(L, dtype=np.float64)
        float_buffers = np.zeros(B - L, dtype=np.float64)
        for _, base, tau_k, u_k in self.buffer:
            delta = f64(self.versions[base])[:L] - f64(u_k)[:L]  # old minus new
            total = total + (1.0 + tau_k) ** -0.5 * delta
            float_buffers = float_buffers + 1.0 / self.K * f64(u_k)[L:B]
        g_bar = total / self.K
        self.m = g_bar if self.m is None else self.momentum * self.m + g_bar
        w = f64(self.versions[self.version])
        new = w.copy()
        new[:L] = w[:L] - self.eta_g * self.m
        new[L:B] = float_buffers
        if self.counters:
            models = [u_k for _, _, _, u_k in self.buffer]
            new[B:] = counter_max([*models, w] if self.server_counts else models, B)
        result = {
            "kind": "aggregate",
            "version": self.version,
            "devices": [b[0] for b in self.buffer],
            "base": [b[1] for b in self.buffer],
            "staleness": [b[2] for b in self.buffer],
            "s": [(1.0 + b[2]) ** -0.5 for b in self.buffer],
        }
        self.version += 1
        self.versions[self.version] = f32(new)
        self.buffer = []
        return result


class FedSARTwin:
    """2.5, reconstructed: FedAsync polynomial, epochs per device from an estimate of its staleness, two stages."""

    def __init__(
        self,
        w0,
        *,
        alpha: float,
        a: float,
        E1: int,
        E2: int,
        V1: int,
        freeze_estimates: bool = False,
        learnable: int | None = None,
        counters: int = 0,
        server_counts: bool = False,
    ) -> None:
        self.alpha, self.a, self.E1, self.E2, self.V1 = alpha, a, E1, E2, V1
        self.freeze_estimates = freeze_estimates
        self.learnable, self.counters, self.server_counts = learnable, counters, server_counts
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}
        self.base: dict = {}
        self.epochs: dict = {}  # device -> E_k fixed at its last dispatch
        self.estimate: dict = {}  # only devices that have reported at least once

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def epochs_for(self, device) -> int:
        if self.version - 1 < self.V1:  # baselines.md counts v from 0
            return self.E1
        mean = sum(self.estimate.values()) / len(self.estimate) if self.estimate else 0.0
        ratio = min(1.0, (1.0 + mean) / (1.0 + self.estimate.get(device, 0.0)))
        return max(1, math.floor(self.E2 * ratio))

    def trigger(self, device) -> int:
        assert device not in self.base
        self.base[device] = self.version
        self.epochs[device] = self.epochs_for(device)
        return self.version

    def upload(self, device, u, n_k: int | None = None) -> dict:
        o = self.base.pop(device)
        tau = self.version - o
        u = f64(f32(u))
        if not np.all(np.isfinite(u)):
            return {"kind": "discard", "reason": "not finite", "version": self.version, "base": o, "staleness": tau}
        old = self.estimate.get(device, 0.0)
        self.estimate[device] = old if self.freeze_estimates else 0.5 * old + 0.5 * tau
        alpha_tau = self.alpha * (1.0 + tau) ** (-self.a)
        w = f64(self.versions[self.version])
        new = (1.0 - alpha_tau) * w + alpha_tau * u
        if self.counters:
            _, B = cut(u.size, self.learnable, self.counters)
            new[B:] = counter_max([w, u] if self.server_counts else [u], B)
        result = {"kind": "aggregate", "version": self.version, "base": o, "staleness": tau, "alpha": alpha_tau}
        result |= {"estimate": self.estimate[device], "epochs": self.epochs[device]}
        self.version += 1
        self.versions[self.version] = f32(new)
        return result

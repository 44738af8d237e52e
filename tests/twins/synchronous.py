"""Naive twins of the synchronous baselines, servers only (baselines.md section 3). Versions start at 1.

`aggregate(uploads, n)` ends one round: `uploads` maps device -> model, `n` maps device -> samples.
"""

from __future__ import annotations

import numpy as np

from .helpers import counter_max, cut, f32, f64, norm


def received(uploads: dict) -> list:
    """Ascending device id (C3), without what is not finite (C6)."""
    return [k for k in sorted(uploads) if np.all(np.isfinite(f32(uploads[k])))]


class FedAvgTwin:
    """3.1: the mean of the models of the round, weighted by samples."""

    def __init__(self, w0, *, learnable: int | None = None, counters: int = 0, server_counts: bool = False) -> None:
        self.learnable, self.counters, self.server_counts = learnable, counters, server_counts
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def aggregate(self, uploads: dict, n: dict) -> dict:
        S = received(uploads)
        if not S:
            self.version += 1
            self.versions[self.version] = self.versions[self.version - 1].copy()
            return {"kind": "empty", "version": self.version - 1, "devices": [], "weights": []}
        m = sum(n[k] for k in S)
        new = np.zeros(self.versions[1].size, dtype=np.float64)
        for k in S:
            new = new + n[k] / m * f64(f32(uploads[k]))
        if self.counters:
            _, B = cut(new.size, self.learnable, self.counters)
            models = [uploads[k] for k in S]
            new[B:] = counter_max([*models, self.w] if self.server_counts else models, B)
        self.version += 1
        self.versions[self.version] = f32(new)
        return {"kind": "aggregate", "version": self.version - 1, "devices": S, "weights": [n[k] / m for k in S]}


class FedProxServerTwin(FedAvgTwin):
    """3.2: the server is FedAvg's."""


class MOONServerTwin(FedAvgTwin):
    """3.3: the server is FedAvg's."""


class FedDynTwin:
    """3.4: theta = mean + G is sent down, the mean is what gets evaluated. `w` is theta, `a_bar` the mean."""

    def __init__(
        self,
        w0,
        *,
        M: int,
        use_dual: bool = True,
        learnable: int | None = None,
        counters: int = 0,
        server_counts: bool = False,
    ) -> None:
        self.M, self.use_dual = M, use_dual
        self.learnable, self.counters, self.server_counts = learnable, counters, server_counts
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}
        L, _ = cut(self.versions[1].size, learnable, counters)
        self.G = np.zeros(L, dtype=np.float64)
        self.a_bar = f32(w0)

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def aggregate(self, uploads: dict, n: dict | None = None) -> dict:
        S = received(uploads)
        if not S:
            self.version += 1
            self.versions[self.version] = self.versions[self.version - 1].copy()
            return {"kind": "empty", "version": self.version - 1, "devices": []}
        theta = f64(self.versions[self.version])
        L, B = cut(theta.size, self.learnable, self.counters)
        mean = np.zeros(theta.size, dtype=np.float64)
        moved = np.zeros(L, dtype=np.float64)
        for k in S:
            u = f64(f32(uploads[k]))
            mean = mean + 1.0 / len(S) * u
            moved = moved + (u[:L] - theta[:L])
        if self.counters:
            models = [uploads[k] for k in S]
            mean[B:] = counter_max([*models, theta] if self.server_counts else models, B)
        new = mean.copy()
        if self.use_dual:
            self.G = self.G + moved / self.M
            new[:L] = mean[:L] + self.G
        self.a_bar = f32(mean)
        self.version += 1
        self.versions[self.version] = f32(new)
        return {"kind": "aggregate", "version": self.version - 1, "devices": S, "G": self.G.copy()}


class FedLWSTwin:
    """3.5: FedAvg, then every layer group is shrunk by gamma_l. Groups are (start, stop) in the learnable part."""

    def __init__(
        self,
        w0,
        *,
        groups: list[tuple[int, int]],
        beta: float = 0.03,
        tau_min: float = 0.01,
        tau_max: float = 0.2,
        learnable: int | None = None,
        counters: int = 0,
        server_counts: bool = False,
    ) -> None:
        self.groups, self.beta, self.tau_min, self.tau_max = list(groups), beta, tau_min, tau_max
        self.learnable, self.counters, self.server_counts = learnable, counters, server_counts
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}
        L, _ = cut(self.versions[1].size, learnable, counters)
        covered = [i for start, stop in self.groups for i in range(start, stop)]
        assert sorted(covered) == list(range(L)), "the groups must cover the learnable part exactly once"

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def aggregate(self, uploads: dict, n: dict) -> dict:
        S = received(uploads)
        if not S:
            self.version += 1
            self.versions[self.version] = self.versions[self.version - 1].copy()
            return {"kind": "empty", "version": self.version - 1, "devices": []}
        w = f64(self.versions[self.version])
        u = {k: f64(f32(uploads[k])) for k in S}
        m = sum(n[k] for k in S)
        a = np.zeros(w.size, dtype=np.float64)
        for k in S:
            a = a + n[k] / m * u[k]
        new = a.copy()
        gammas, taus, qs = [], [], []
        for start, stop in self.groups:
            g = [u[k][start:stop] - w[start:stop] for k in S]
            g_bar = sum(g) / len(S)
            q = sum(norm(g_k - g_bar) for g_k in g) / len(S)
            tau = min(max(self.beta * q, self.tau_min), self.tau_max)
            length = norm(w[start:stop])
            gamma = 1.0
            if length > 0.0:
                gamma = length / (length + tau * norm(a[start:stop] - w[start:stop]))
            new[start:stop] = gamma * a[start:stop]
            gammas.append(gamma)
            taus.append(tau)
            qs.append(q)
        if self.counters:
            _, B = cut(w.size, self.learnable, self.counters)
            models = [uploads[k] for k in S]
            new[B:] = counter_max([*models, w] if self.server_counts else models, B)
        self.version += 1
        self.versions[self.version] = f32(new)
        result = {"kind": "aggregate", "version": self.version - 1, "devices": S, "weights": [n[k] / m for k in S]}
        return result | {"gamma": gammas, "tau": taus, "q": qs}

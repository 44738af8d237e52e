"""Naive twins of the newer rivals, written from their specification. Versions start at 1, staleness tau at 0.

Nothing is summed up: every cached update, queued model and window is kept, and each step is computed from all of them.
The asynchronous ones are driven by ``trigger``, ``lose`` and ``upload``, the synchronous ones by ``aggregate``.
"""

from __future__ import annotations

import math

import numpy as np

from .extra import RoundTwin
from .helpers import counter_max, cut, f32, f64, norm
from .local import gradient
from .synchronous import received


class ArrivalTwin:
    """Base of the asynchronous twins: versions and bases."""

    def __init__(self, w0, *, learnable: int | None = None, counters: int = 0) -> None:
        self.learnable, self.counters = learnable, counters
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}
        self.base: dict = {}
        self.L, self.B = cut(self.versions[1].size, learnable, counters)

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def trigger(self, device) -> int:
        self.base[device] = self.version
        return self.version

    def lose(self, device) -> None:
        del self.base[device]

    def start(self, o) -> np.ndarray:
        return f64(self.versions[o])

    def advance(self, new, models: list, **found) -> dict:
        """The next version: counters are the largest of these models."""
        if self.counters:
            new[self.B :] = counter_max(models, self.B)
        self.version += 1
        self.versions[self.version] = f32(new)
        return {"version": self.version - 1, **found}

    def one(self, device, o, weight, **found) -> dict:
        tau = self.version - o
        return {"devices": [device], "base": [o], "staleness": [tau], "weights": [weight], **found}


class ACETwin(ArrivalTwin):
    """All updates ever received, with their bases; the mean is taken anew at every arrival."""

    def __init__(self, w0, *, M: int, eta: float, tau_algo: float | None = None, **layout) -> None:
        super().__init__(w0, **layout)
        self.M, self.eta, self.tau_algo = M, eta, tau_algo
        self.U: dict = {}
        self.o: dict = {}

    def upload(self, device, u) -> dict | None:
        o = self.base.pop(device)
        self.U[device], self.o[device] = f64(f32(self.start(o)[: self.L] - f64(u)[: self.L])), o
        A = [k for k in self.U if self.tau_algo is None or self.version - self.o[k] <= self.tau_algo]
        if not A:
            return None
        divisor = self.M if self.tau_algo is None else len(A)
        new = f64(self.w)
        new[: self.L] -= self.eta * sum(self.U[k] for k in A) / divisor
        if device in A:  # an update that is too old is no part of the mean, and neither are its buffers
            new[self.L : self.B] += (f64(u) - f64(self.w))[self.L : self.B] / divisor
        found = self.one(device, o, self.eta / divisor if device in A else 0.0, cached=len(A))
        return self.advance(new, [self.w, u] if device in A else [self.w], **found)


class AsyncFedEDTwin(ArrivalTwin):
    def __init__(self, w0, *, lambda_, eps, gamma_bar, kappa, E: int, E_max: int, **layout) -> None:
        super().__init__(w0, **layout)
        self.lambda_, self.eps, self.gamma_bar, self.kappa, self.E_max = lambda_, eps, gamma_bar, kappa, E_max
        self.E: dict = {}
        self.common = E

    def epochs(self, device) -> int:
        return self.E.get(device, self.common)

    def upload(self, device, u) -> dict:
        o, w, u64 = self.base.pop(device), f64(self.w), f64(u)
        delta = (u64 - self.start(o))[: self.L]
        if not delta.any():
            found = self.one(device, o, 0.0, gamma=0.0, next_epochs=self.epochs(device))
            return self.advance(w, [self.w, u], **found)
        gamma = norm((w - self.start(o))[: self.L]) / norm(delta)
        eta = self.lambda_ / (gamma + self.eps)
        new = w.copy()
        new[: self.L] += eta * delta
        share = min(1.0, eta)
        new[self.L : self.B] = (1.0 - share) * w[self.L : self.B] + share * u64[self.L : self.B]
        moved = self.epochs(device) + math.floor(self.kappa * (self.gamma_bar - gamma))
        self.E[device] = min(self.E_max, max(1, moved))
        found = self.one(device, o, eta, gamma=gamma, next_epochs=self.E[device])
        return self.advance(new, [self.w, u], **found)


class FedFaTwin(ArrivalTwin):
    """Every upload ever received; the model is the mean of the last K."""

    def __init__(self, w0, *, K: int, **layout) -> None:
        super().__init__(w0, **layout)
        self.K, self.all = K, []

    def upload(self, device, u) -> dict | None:
        self.all.append((device, self.base.pop(device), f32(u)))
        if len(self.all) < self.K:
            return None
        last = self.all[-self.K :]
        fresh = last if len(self.all) == self.K else last[-1:]
        new = np.mean([f64(u) for *_, u in last], axis=0)
        found = {
            "devices": [k for k, *_ in fresh],
            "base": [o for _, o, _ in fresh],
            "weights": [1 / self.K] * len(fresh),
        }
        found |= {"staleness": [self.version - o for _, o, _ in fresh], "queued": [k for k, *_ in last]}
        return self.advance(new, [u for *_, u in last], **found)


class BufferTwin(ArrivalTwin):
    """Collects K uploads, then calls ``step`` with (device, base, tau, u) of each."""

    def __init__(self, w0, *, K: int, **layout) -> None:
        super().__init__(w0, **layout)
        self.K, self.buffer = K, []

    def upload(self, device, u, **more) -> dict | None:
        o = self.base.pop(device)
        self.buffer.append((device, o, self.version - o, f32(u)))
        if len(self.buffer) < self.K:
            return None
        taken, self.buffer = self.buffer, []
        return self.flush(taken)

    def flush(self, taken: list) -> dict:
        new = f64(self.w)
        deltas = [f64(u)[: self.L] - self.start(o)[: self.L] for _, o, _, u in taken]
        found = self.step(new[: self.L], taken, deltas)
        new[self.L : self.B] = np.mean([f64(u)[self.L : self.B] for *_, u in taken], axis=0)
        who = {"devices": [k for k, *_ in taken], "base": [o for _, o, *_ in taken]}
        found |= who | {"staleness": [tau for _, _, tau, _ in taken]}
        return self.advance(new, [u for *_, u in taken], **found)

    def step(self, w: np.ndarray, taken: list, deltas: list) -> dict:
        """Move the learnable part w in place and return the numbers that decided it."""
        raise NotImplementedError


class FedStaleWeightTwin(BufferTwin):
    """Every staleness of every device is kept; the window is the last W of them."""

    def __init__(self, w0, *, W: int = 5, plus_one: bool = False, **more) -> None:
        super().__init__(w0, **more)
        self.W, self.plus_one, self.taus = W, plus_one, {}

    def step(self, w, taken, deltas) -> dict:
        for k, _, tau, _ in taken:
            self.taus.setdefault(k, []).append(tau)
        sigma = [float(np.mean(self.taus[k][-self.W :])) for k, *_ in taken]
        raw = [1.0 + self.K * s if self.plus_one else s for s in sigma]
        p = [r / sum(raw) if sum(raw) > 0 else 1.0 / self.K for r in raw]
        for p_k, delta in zip(p, deltas, strict=True):
            w += p_k * delta
        return {"sigma": sigma, "weights": p}


class FedATTwin(ArrivalTwin):
    """Tiers are given. Every model that a tier ever had is kept."""

    def __init__(self, w0, *, tiers: dict, G: int, K: int, n: dict, **layout) -> None:
        super().__init__(w0, **layout)
        self.tiers, self.G, self.K, self.n = tiers, G, K, n
        self.buffers: dict = {m: [] for m in range(1, G + 1)}
        self.models: dict = {m: [f64(w0)] for m in range(1, G + 1)}

    def upload(self, device, u) -> dict | None:
        m = self.tiers[device]
        self.buffers[m].append((device, self.base.pop(device), f32(u)))
        if len(self.buffers[m]) < self.K:
            return None
        taken, self.buffers[m] = self.buffers[m], []
        total = sum(self.n[k] for k, *_ in taken)
        mean = sum(self.n[k] / total * f64(u) for k, _, u in taken)
        if self.counters:
            mean[self.B :] = counter_max([u for *_, u in taken], self.B)
        self.models[m].append(f64(f32(mean)))
        T = {tier: len(models) for tier, models in self.models.items()}  # 1 at first
        share = {tier: T[self.G + 1 - tier] / sum(T.values()) for tier in T}
        new = sum(share[tier] * self.models[tier][-1] for tier in T)
        found = {"devices": [k for k, *_ in taken], "base": [o for _, o, _ in taken], "tier": m}
        found |= {"staleness": [self.version - o for _, o, _ in taken], "T": [T[tier] for tier in sorted(T)]}
        found["weights"] = [share[m] * self.n[k] / total for k, *_ in taken]
        return self.advance(new, [models[-1] for models in self.models.values()], **found)


class FedCompassTwin(ArrivalTwin):
    """Groups as plain dicts in the order of their creation; every rule searches all of them."""

    def __init__(self, w0, *, M: int, alpha, a, lambda_, Q_max: int, Q_min: int, **layout) -> None:
        super().__init__(w0, **layout)
        self.M, self.alpha, self.a, self.lambda_, self.Q_max, self.Q_min = M, alpha, a, lambda_, Q_max, Q_min
        self.z: dict = {}
        self.trip: dict = {}  # device -> (start, Q, group or None)
        self.groups: list = []
        self.late: dict = {}

    def start_trip(self, device, now) -> int:
        self.trigger(device)
        z = self.z.get(device)
        if z is None:
            self.trip[device] = (now, self.Q_max, None)
            return self.Q_max
        best = None
        for group in self.groups:
            Q = math.floor((group["expected"] - now) / z)
            if self.Q_min <= Q <= self.Q_max and (best is None or best[0] <= Q):
                best = (Q, group)
        if best is None:
            Q = -1
            for group in self.groups:
                if now < group["latest"]:
                    fastest = min(self.z[k] for k in [*group["flying"], *group["in"]])
                    found = math.floor((group["latest"] + fastest * self.Q_max - now) / z)
                    Q = max(Q, found) if found <= self.Q_max else Q
            Q = self.Q_max if Q < 0 else max(Q, self.Q_min)
            best = (Q, {"expected": now + Q * z, "latest": now + self.lambda_ * Q * z, "flying": [], "in": {}})
            self.groups.append(best[1])
        best[1]["flying"].append(device)
        self.trip[device] = (now, *best)
        return best[0]

    def is_open(self, group) -> bool:
        return any(each is group for each in self.groups)

    def upload(self, device, u, now) -> dict | None:
        start, Q, group = self.trip.pop(device)
        entry = (device, self.base.pop(device), f32(u))
        measured = (now - start) / Q
        self.z[device] = 0.1 * self.z[device] + 0.9 * measured if device in self.z else measured
        if group is None:
            return self.step([entry])
        if not self.is_open(group) or now > group["latest"]:
            self.late[device] = entry
            return None
        group["flying"].remove(device)
        self.late.pop(device, None)
        group["in"][device] = entry
        return self.close(group) if not group["flying"] else None

    def lose_trip(self, device) -> dict | None:
        self.lose(device)
        _, _, group = self.trip.pop(device)
        if group is None or not self.is_open(group):
            return None
        group["flying"].remove(device)
        return self.close(group) if not group["flying"] else None

    def expire(self, now) -> list:
        """Steps of the groups whose time is over, the earliest first."""
        over = sorted((g for g in self.groups if g["latest"] <= now), key=lambda g: g["latest"])
        return [found for group in over if (found := self.close(group)) is not None]

    def close(self, group) -> dict | None:
        self.groups = [each for each in self.groups if each is not group]
        if not group["in"]:
            return None
        entries, self.late = {**self.late, **group["in"]}, {}
        return self.step(list(entries.values()))

    def step(self, entries: list) -> dict:
        new = f64(self.w)
        share = {k: self.alpha * (1.0 + self.version - o) ** -self.a / self.M for k, o, _ in entries}
        for k, o, u in entries:
            new[: self.L] += share[k] * (f64(u) - self.start(o))[: self.L]
        new[self.L : self.B] = np.mean([f64(u)[self.L : self.B] for *_, u in entries], axis=0)
        return self.advance(new, [u for *_, u in entries], shares=share)


class PiscesTwin(ArrivalTwin):
    """Keeps every staleness, loss and duration of every device."""

    def __init__(self, w0, *, n: dict, beta: float, C: int, first: float, **layout) -> None:
        super().__init__(w0, **layout)
        self.n, self.beta, self.C, self.first, self.last = n, beta, C, first, 0.0
        self.flying: dict = {}
        self.history: dict = {k: [] for k in n}  # (tau, loss, seconds) of the uploads that were used
        self.buffer: dict = {}

    def start_trip(self, device, now) -> None:
        self.trigger(device)
        self.flying[device] = now

    def utility(self, k) -> float:
        if not self.history[k]:
            return 0.0
        tau = np.mean([tau for tau, *_ in self.history[k][-5:]])
        return self.n[k] * math.sqrt(self.history[k][-1][1]) * (1.0 + tau) ** -self.beta

    def look(self, now) -> list:
        """Aggregate if the time has come."""
        known = [self.history[k][-1][2] for k in self.flying if self.history[k]]
        pace = max(known or [self.first]) / self.C
        if not self.buffer or (self.flying and now < self.last + pace):
            return []
        w, new = f64(self.w), f64(self.w)
        total = sum(self.n[k] for k in self.buffer)
        share = {}
        for k, (o, u, loss, seconds) in self.buffer.items():
            tau = self.version - o
            share[k] = self.n[k] / total * (1.0 + tau) ** -self.beta
            new[: self.L] += share[k] * (f64(u) - w)[: self.L]
            self.history[k].append((tau, loss, seconds))
        models = [u for _, u, *_ in self.buffer.values()]
        new[self.L : self.B] = np.mean([f64(u)[self.L : self.B] for u in models], axis=0)
        self.advance(new, models)
        self.last, self.buffer = now, {}
        return [share]

    def upload(self, device, u, loss, now) -> list:
        self.buffer.pop(device, None)
        self.buffer[device] = (self.base.pop(device), f32(u), loss, now - self.flying.pop(device))
        return self.look(now)


class SAFATwin(ArrivalTwin):
    """A cache of all devices from the start, and the version that each has."""

    def __init__(self, w0, *, n: dict, quota: int, lag_tol: int, **layout) -> None:
        super().__init__(w0, **layout)
        self.n, self.quota, self.lag_tol = n, quota, lag_tol
        self.cache, self.has = {k: f64(w0) for k in n}, dict.fromkeys(n, 1)
        self.last: set = set()
        self.P: dict = {}
        self.R: dict = {}

    def upload(self, device, u) -> dict | None:
        side = self.R if device in self.last else self.P
        side[device] = (self.base.pop(device), f32(u))
        return self.look()

    def lose_trip(self, device) -> dict | None:
        self.lose(device)
        return self.look()

    def look(self, deadline: bool = False) -> dict | None:
        if not (self.P or self.R) or (len(self.P) < self.quota and self.base and not deadline):
            return None
        while len(self.P) < self.quota and self.R:
            first = next(iter(self.R))
            self.P[first] = self.R.pop(first)
        for k, (_, u) in self.P.items():
            self.cache[k] = f64(u)
        total = sum(self.n.values())
        new = sum(self.n[k] / total * self.cache[k] for k in self.n)
        found = {"picks": {k: self.n[k] / total for k in self.P}, "bypassed": list(self.R)}
        result = self.advance(new, list(self.cache.values()), **found)
        for k, (_, u) in self.R.items():
            self.cache[k] = f64(u)
        self.has |= self.base | dict.fromkeys([*self.P, *self.R], self.version)
        behind = [k for k in self.n if self.version - self.has[k] > self.lag_tol]
        result["cancelled"] = [k for k in behind if k in self.base]
        for k in behind:
            self.cache[k], self.has[k] = f64(self.w), self.version
        for k in result["cancelled"]:
            self.lose(k)
        self.last, self.P, self.R = set(self.P), {}, {}
        return result


class FedACTwin(BufferTwin):
    """One coordinate at a time; the cosine from angles of the whole vectors."""

    def __init__(self, w0, *, eta_g, beta1, beta2, **more) -> None:
        super().__init__(w0, **more)
        self.eta_g, self.beta1, self.beta2 = eta_g, beta1, beta2
        self.m, self.V, self.c = [0.0] * self.L, [0.0] * self.L, np.zeros(self.L)
        self.changes: list = []

    def upload(self, device, u, change) -> dict | None:
        self.changes.append(f64(change))
        return super().upload(device, u)

    def step(self, w, taken, deltas) -> dict:
        r = []
        for (_, o, tau, _), delta in zip(taken, deltas, strict=True):
            course = f64(self.w)[: self.L] - self.start(o)[: self.L]
            r.append(1.0 if tau == 0 else max(float(course @ delta) / (norm(course) * norm(delta)), 0.1))
        p = [each / sum(r) for each in r]
        for j in range(self.L):
            G = math.fsum(p_i * delta[j] for p_i, delta in zip(p, deltas, strict=True))
            self.m[j] = self.beta1 * self.m[j] + (1.0 - self.beta1) * G
            self.V[j] = self.beta2 * self.V[j] + (1.0 - self.beta2) * G**2
            ahead = self.beta1 * self.m[j] + (1.0 - self.beta1) * G
            w[j] += self.eta_g * ahead / (math.sqrt(self.V[j]) + 1e-8)
        self.c = f64(f32(self.c + sum(p_i * change for p_i, change in zip(p, self.changes, strict=True))))
        self.changes = []
        return {"r": r, "weights": p}


class MasFLTwin(BufferTwin):
    """All controls are kept; c is their mean, taken anew."""

    def __init__(self, w0, *, M: int, S: int, beta, gamma, lr: float, normalised: bool = False, **more) -> None:
        super().__init__(w0, K=S, **more)
        self.beta, self.gamma, self.lr, self.normalised = beta, gamma, lr, normalised
        self.controls, self.g = {k: np.zeros(self.L) for k in range(M)}, np.zeros(self.L)
        self.sent: list = []

    @property
    def c(self) -> np.ndarray:
        return sum(self.controls.values()) / len(self.controls)

    def direction(self, device) -> np.ndarray:
        return self.beta * (self.c - self.controls[device]) + (1.0 - self.beta) * self.g

    def upload(self, device, u, gradient, steps) -> dict | None:
        self.sent.append((f64(gradient), steps))
        return super().upload(device, u)

    def step(self, w, taken, deltas) -> dict:
        c, changes = self.c, []
        for (k, *_), (mean, _) in zip(taken, self.sent, strict=True):
            changes.append(mean - self.controls[k])
            self.controls[k] = mean
        self.g = self.beta * (c + sum(changes) / self.K) + (1.0 - self.beta) * self.g
        moves = [delta / (self.lr * steps) for delta, (_, steps) in zip(deltas, self.sent, strict=True)]
        w += self.gamma * sum(moves) / self.K if self.normalised else -self.gamma * self.g
        self.sent = []
        return {"weights": [1.0 / self.K] * self.K}


def masfl_local(w, direction, data, labels, batches: list, lr: float, beta: float, normalised: bool):
    """One device, literally: the model and the mean of its plain gradients."""
    u, gradients = f64(w), []
    for epoch in batches:
        for index in epoch:
            gradients.append(gradient(u, data[index], labels[index]))
            d = beta * gradients[-1] + direction
            u = u - lr * (d / max(norm(d), 1e-12) if normalised else d)
    return u, np.mean(gradients, axis=0)


# ---- rounds


class FedExPTwin(RoundTwin):
    def __init__(self, w0, *, eps: float, **layout) -> None:
        super().__init__(w0, **layout)
        self.eps, self.tested = eps, f32(w0)

    def aggregate(self, uploads: dict, n: dict) -> dict:
        S, w = received(uploads), f64(self.w)
        if not S:
            return self.close(w, S, [], weights=[])
        L, _ = cut(w.size, self.learnable, self.counters)
        p = {k: n[k] / sum(n[j] for j in S) for k in S}
        delta = {k: f64(uploads[k])[:L] - w[:L] for k in S}
        mean = sum(p[k] * delta[k] for k in S)
        q = sum(p[k] * norm(delta[k]) ** 2 for k in S)
        eta = max(1.0, q / (2.0 * (norm(mean) ** 2 + len(S) * self.eps)))
        new = sum(p[k] * f64(uploads[k]) for k in S)
        new[:L] = w[:L] + eta * mean
        first = all(np.array_equal(v, self.versions[1]) for v in self.versions.values())
        found = self.close(new, S, [uploads[k] for k in S], weights=[p[k] for k in S], alpha=eta)
        self.tested = self.w
        if not first:
            self.tested[:L] = f32((w[:L] + f64(self.w)[:L]) / 2.0)
        return found


class FedACGTwin(RoundTwin):
    """Keeps w and m apart; the version that is sent is w + lambda m."""

    def __init__(self, w0, *, lambda_: float, **layout) -> None:
        super().__init__(w0, **layout)
        L, _ = cut(f32(w0).size, self.learnable, self.counters)
        self.lambda_, self.m, self.tested = lambda_, np.zeros(L), f32(w0)

    def aggregate(self, uploads: dict, n: dict) -> dict:
        S, sent = received(uploads), f64(self.w)
        if not S:
            return self.close(sent, S, [], weights=[])
        L = len(self.m)
        mean = np.mean([f64(uploads[k]) for k in S], axis=0)
        self.m = self.lambda_ * self.m + np.mean([f64(uploads[k])[:L] - sent[:L] for k in S], axis=0)
        ahead = mean.copy()
        ahead[:L] += self.lambda_ * self.m
        found = self.close(ahead, S, [uploads[k] for k in S], weights=[1.0 / len(S)] * len(S))
        self.tested = self.w
        self.tested[:L] = f32(mean[:L])
        return found


class MIFATwin(RoundTwin):
    """MIFA without ``p``; FedStale with the probability of taking part of each device."""

    def __init__(self, w0, *, n: dict, lr: float, beta: float = 0.0, p: dict | None = None, **layout) -> None:
        super().__init__(w0, **layout)
        L, _ = cut(f32(w0).size, self.learnable, self.counters)
        self.n, self.lr, self.beta, self.p = n, lr, beta, p
        self.h = {k: np.zeros(L) for k in n}

    def aggregate(self, uploads: dict, n: dict) -> dict:
        S, w = received(uploads), f64(self.w)
        if not S:
            return self.close(w, S, [], weights=[])
        L = len(self.h[0])
        new = np.mean([f64(uploads[k]) for k in S], axis=0)
        delta = {k: f64(uploads[k])[:L] - w[:L] for k in S}
        if self.p is None:
            for k in S:
                self.h[k] = delta[k] / self.lr
            new[:L] = w[:L] + self.lr / len(self.n) * sum(self.h.values())
            weights = [1.0 / len(self.n)] * len(S)
        else:
            a = {k: each / sum(self.n.values()) for k, each in self.n.items()}
            weights = [a[k] / self.p[k] for k in S]
            new[:L] = w[:L] + self.beta * sum(a[k] * self.h[k] for k in self.n)
            for k in S:
                new[:L] += a[k] / self.p[k] * (delta[k] - self.beta * self.h[k])
            self.h |= delta
        return self.close(new, S, [uploads[k] for k in S], weights=weights)

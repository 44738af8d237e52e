"""Naive twins of FedASMU and FedSSMU, from fedasmu.md sections 2 to 6, 9 and 13 (device part and selector too).

A trip may have several merges (`refresh`), and the server may send its model unasked (`push_after`). A merge is
(version, beta, n1): it took place after n1 steps.
"""

from __future__ import annotations

import math

import numpy as np

from .helpers import counter_max, cut, dot, f32, f64, norm

ADAPTATION_KEYS = ("q", "p", "s_p", "xi_p", "lambda_p", "sigma_p", "grad_lambda", "grad_sigma", "grad_iota")
#: The device whose controls move, the versions between its aggregation and w_o, and |g| |step|, the scale of q.
JUDGEMENT_KEYS = ("judged", "gap", "size")


def unit_walk(steps: int, merges: list, momentum: float) -> float:
    """How far SGD along a constant unit gradient gets, at a rate of 1 and step by step.

    A merge takes the device back to 1 - beta of its way; the velocity stays.
    """
    way = velocity = 0.0
    for done in range(steps):
        for _, beta, n1 in merges:
            if n1 == done:
                way *= 1.0 - beta
        velocity = momentum * velocity + 1.0
        way += velocity
    return way


def check_order(device, merges: list, given: list) -> None:
    """A device merges some of the models that it was given, each once and in their order."""
    versions = [version for version, _, _ in merges]
    if versions != sorted(set(versions)) or not set(versions) <= set(given):
        raise RuntimeError(f"device {device} reports merges of {versions} but was given {given}")


class FedASMUServerTwin:
    """Sections 2, 3 and 9. Every version is kept; versions start at 1."""

    def __init__(
        self,
        w0,
        *,
        mu_alpha: float,
        eta_lambda: float,
        eta_sigma: float,
        eta_iota: float,
        lambda0: float,
        sigma0: float,
        iota0: float,
        tau_max: float,
        xi_min: float,
        equations: str = "corrected",
        dynamic_server: bool = True,
        apply: str = "mix",
        judge: str = "own",
        local_work: str = "steps",
        counters: int = 0,
        server_counts: bool = False,
        refresh: float = 1,
        push_after: int = 0,
        momentum: float = 0.0,
    ) -> None:
        assert equations in ("corrected", "published")
        assert apply in ("mix", "progress")
        assert judge in ("own", "base")
        assert local_work in ("steps", "passes")
        self.mu_alpha = mu_alpha
        self.eta_lambda, self.eta_sigma, self.eta_iota = eta_lambda, eta_sigma, eta_iota
        self.lambda0, self.sigma0, self.iota0 = lambda0, sigma0, iota0
        self.tau_max, self.xi_min = tau_max, xi_min
        self.equations, self.dynamic_server, self.apply = equations, dynamic_server, apply
        self.judge, self.local_work = judge, local_work
        self.counters, self.server_counts = counters, server_counts
        self.refresh, self.push_after, self.momentum = refresh, push_after, momentum
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}
        self.controls: dict = {}  # device -> (lambda, sigma, iota)
        self.last: dict = {}  # device -> what is remembered of its last accepted upload
        self.made: dict = {}  # version -> the same of the upload that made it (section 13)
        self.base: dict = {}  # device in flight -> version o
        self.fresh: dict = {}  # device in flight -> the versions that it was given since, in their order
        self.pending: set = set()  # devices with a pushed model that they have not merged yet

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def trigger(self, device) -> int:
        if device in self.base:
            raise RuntimeError(f"device {device} is already in flight")
        self.base[device] = self.version
        return self.version

    def newest(self, device) -> int:
        """The newest version that a device in flight has."""
        return self.fresh[device][-1] if device in self.fresh else self.base[device]

    def request(self, device) -> tuple[int, np.ndarray] | None:
        if len(self.fresh.get(device, [])) >= self.refresh:
            raise RuntimeError(f"device {device} has already been given {self.refresh} fresh models on this trip")
        if self.version <= self.newest(device):
            return None
        self.fresh.setdefault(device, []).append(self.version)
        return self.version, self.w

    def push(self, device) -> tuple[int, np.ndarray] | None:
        """Send the model if the device is `push_after` versions behind and has merged what it was sent before."""
        assert self.push_after > 0
        if device in self.pending or self.version < self.newest(device) + self.push_after:
            return None
        self.fresh.setdefault(device, []).append(self.version)
        self.pending.add(device)
        return self.version, self.w

    def merged(self, device) -> None:
        self.pending.remove(device)

    def upload(
        self,
        device,
        w_i,
        *,
        eta: float,
        steps: int,
        beta: float = 0.0,
        n1: int = 0,
        merges: list | None = None,
        passes: int | None = None,
        learnable: int | None = None,
    ) -> dict:
        """`beta` and `n1` are short for one merge, of the newest version that the device was given."""
        t = self.version
        o = self.base.pop(device)
        given = self.fresh.pop(device, [])
        self.pending.discard(device)
        if beta != 0.0 and not given:
            raise RuntimeError(f"device {device} reports a merge but was never given a fresh model")
        if merges is None:
            merges = [(given[-1], beta, n1)] if beta != 0.0 else []
        check_order(device, merges, given)
        lam, sigma, iota = self.controls.get(device, (self.lambda0, self.sigma0, self.iota0))
        result = {"kind": "discard", "version": t, "base": o, "staleness": t - o + 1, "alpha": None, "xi": None}
        result.update({"lambda": lam, "sigma": sigma, "iota": iota, "adapted": False, "reason": None})
        result.update(dict.fromkeys(ADAPTATION_KEYS + JUDGEMENT_KEYS))

        # 1. staleness
        s = t - o + 1
        w_i = f32(w_i)
        if s > self.tau_max:
            result["reason"] = "stale"
            return result
        if not np.all(np.isfinite(w_i)):
            result["reason"] = "not finite"
            return result

        L, B = cut(w_i.size, learnable, self.counters)
        w = f64(self.versions[t])
        w_o = f64(self.versions[o])
        w_i = f64(w_i)
        # the displacement that training itself produced (E6, section 9)
        d = w_i.copy()
        rest = 1.0  # of the anchor: a merge with beta leaves (1 - beta) of all that came before it
        for version, beta_m, _ in reversed(merges):
            d -= rest * beta_m * f64(self.versions[version])
            rest *= 1.0 - beta_m
        d -= rest * w_o

        # 2. adapt the controls of the device whose aggregation is judged: this one's last, or the one that made w_o
        m = (self.last.get(device) if self.judge == "own" else self.made.get(o)) if self.dynamic_server else None
        if m is not None:
            p, s_p, xi_p, lambda_p, sigma_p = m["p"], m["s"], m["xi"], m["lambda"], m["sigma"]
            # E5: L counts steps or passes, which are steps / passes steps each
            unit = 1.0 if self.local_work == "steps" else passes / steps
            if self.equations == "corrected":
                # E6: a merge shrinks what was trained before it
                pseudo_gradient = -d[:L] / (eta * unit * unit_walk(steps, merges, self.momentum))
            else:
                pseudo_gradient = (w_i - w_o)[:L] / (eta * unit * steps)
            q = dot(pseudo_gradient, m["step"][:L])
            c = self.mu_alpha / (1.0 + self.mu_alpha * xi_p) ** 2
            grad_lambda = q * c / (math.sqrt(p) * s_p**sigma_p)
            if self.equations == "corrected":
                grad_sigma = q * c * (-lambda_p * math.log(s_p)) / (math.sqrt(p) * s_p**sigma_p)
            elif sigma_p > 0.0:
                grad_sigma = q * c * (-math.log(sigma_p)) / (math.sqrt(p) * s_p**sigma_p)
            else:
                grad_sigma = 0.0
            grad_iota = q * c
            if self.equations == "corrected" and m["clamped"]:  # E13
                grad_lambda = grad_sigma = grad_iota = 0.0
            now = self.controls[m["device"]]
            moved_lambda = now[0] - self.eta_lambda * grad_lambda
            moved_sigma = now[1] - self.eta_sigma * grad_sigma
            moved_iota = now[2] - self.eta_iota * grad_iota
            self.controls[m["device"]] = (moved_lambda, moved_sigma, moved_iota)
            result.update(adapted=True, q=q, p=p, s_p=s_p, xi_p=xi_p, lambda_p=lambda_p, sigma_p=sigma_p)
            result.update(grad_lambda=grad_lambda, grad_sigma=grad_sigma, grad_iota=grad_iota)
            result.update(judged=m["device"], gap=o - (p + 1), size=norm(pseudo_gradient) * norm(m["step"][:L]))
            lam, sigma, iota = self.controls.get(device, (lam, sigma, iota))

        # 3. and 4. the weight
        free = lam / (math.sqrt(t) * s**sigma) + iota
        xi = max(free, self.xi_min)
        alpha = self.mu_alpha * xi / (1.0 + self.mu_alpha * xi)

        # 5. the aggregation
        new = (1.0 - alpha) * w + alpha * w_i
        step = w_i - w
        if self.apply == "progress":
            new[:L] = w[:L] + alpha * d[:L]
            step = d
        if self.counters:
            new[B:] = counter_max([w, w_i] if self.server_counts else [w_i], B)
        self.version = t + 1
        self.versions[t + 1] = f32(new)
        self.controls[device] = (lam, sigma, iota)
        self.last[device] = {"step": step, "p": t, "s": s, "xi": xi, "lambda": lam, "sigma": sigma}
        self.last[device].update(clamped=free < self.xi_min, device=device)
        self.made[t + 1] = self.last[device]
        result.update({"kind": "aggregate", "alpha": alpha, "xi": xi, "lambda": lam, "sigma": sigma, "iota": iota})
        return result


class FedSSMUServerTwin:
    """Section 3, last lines: the same inside rounds. g = round (from 1), k = aggregated in this round, s = k + 1."""

    def __init__(
        self,
        w0,
        *,
        mu_alpha: float,
        eta_lambda: float,
        eta_sigma: float,
        eta_iota: float,
        lambda0: float,
        sigma0: float,
        iota0: float,
        tau_max: float,
        xi_min: float,
        equations: str = "corrected",
        dynamic_server: bool = True,
        apply: str = "mix",
        judge: str = "own",
        local_work: str = "steps",
        counters: int = 0,
        server_counts: bool = False,
        refresh: float = 1,
        push_after: int = 0,
        momentum: float = 0.0,
    ) -> None:
        assert equations in ("corrected", "published")
        assert apply in ("mix", "progress")
        assert judge in ("own", "base")
        assert local_work in ("steps", "passes")
        self.mu_alpha = mu_alpha
        self.eta_lambda, self.eta_sigma, self.eta_iota = eta_lambda, eta_sigma, eta_iota
        self.lambda0, self.sigma0, self.iota0 = lambda0, sigma0, iota0
        self.tau_max, self.xi_min = tau_max, xi_min
        self.equations, self.dynamic_server, self.apply = equations, dynamic_server, apply
        self.judge, self.local_work = judge, local_work
        self.counters, self.server_counts = counters, server_counts
        self.refresh, self.push_after, self.momentum = refresh, push_after, momentum
        self.round = 1  # g of the round that is running or comes next
        self.k = 0
        self.running = False
        self.version = 1
        self.versions: dict[int, np.ndarray] = {1: f32(w0)}
        self.round_base = 1  # the version of w_{g,0}
        self.waiting: set = set()  # selected devices that have not uploaded yet
        self.fresh: dict = {}  # of these: the versions that they were given in mid-training
        self.pending: set = set()
        self.controls: dict = {}
        self.last: dict = {}
        self.made: dict = {}

    @property
    def w(self) -> np.ndarray:
        return self.versions[self.version].copy()

    def start_round(self, devices) -> int:
        if self.running:
            raise RuntimeError("a round is running")
        self.running = True
        self.k = 0
        self.round_base = self.version
        self.waiting = set(devices)
        self.fresh = {device: [] for device in devices}
        self.pending = set()
        return self.version

    def request(self, device) -> tuple[int, np.ndarray] | None:
        if device not in self.waiting:
            raise RuntimeError(f"device {device} is not in flight")
        given = self.fresh[device]
        if len(given) >= self.refresh:
            raise RuntimeError(f"device {device} has already been given {self.refresh} fresh models on this trip")
        if self.version in [self.round_base, *given]:
            return None
        given.append(self.version)
        return self.version, self.w

    def push(self, device) -> tuple[int, np.ndarray] | None:
        assert self.push_after > 0
        behind = self.version - max([self.round_base, *self.fresh[device]])
        if device in self.pending or behind < self.push_after:
            return None
        self.fresh[device].append(self.version)
        self.pending.add(device)
        return self.version, self.w

    def merged(self, device) -> None:
        self.pending.remove(device)

    def upload(
        self,
        device,
        w_i,
        *,
        eta: float,
        steps: int,
        beta: float = 0.0,
        n1: int = 0,
        merges: list | None = None,
        passes: int | None = None,
        learnable: int | None = None,
    ) -> dict:
        self.waiting.remove(device)
        self.pending.discard(device)
        given = self.fresh.pop(device)
        if beta != 0.0 and not given:
            raise RuntimeError(f"device {device} reports a merge but was never given a fresh model")
        if merges is None:
            merges = [(given[-1], beta, n1)] if beta != 0.0 else []
        check_order(device, merges, given)
        lam, sigma, iota = self.controls.get(device, (self.lambda0, self.sigma0, self.iota0))
        k = self.k
        s = k + 1
        out = {"kind": "discard", "reason": None, "version": self.version, "base": self.round_base}
        out |= {"round": self.round, "k": k, "staleness": s, "alpha": None, "xi": None}
        out |= {"lambda": lam, "sigma": sigma, "iota": iota, "adapted": False}
        for key in ADAPTATION_KEYS + JUDGEMENT_KEYS:
            out[key] = None

        w_i = f32(w_i)
        if s > self.tau_max:
            return out | {"reason": "stale"}
        if not np.isfinite(w_i).all():
            return out | {"reason": "not finite"}

        L, B = cut(w_i.size, learnable, self.counters)
        uploaded = f64(w_i)
        current = f64(self.versions[self.version])
        started = f64(self.versions[self.round_base])
        anchor = started
        for version, weight, _ in merges:
            anchor = anchor + weight * (f64(self.versions[version]) - anchor)
        progress = uploaded - anchor

        then = None
        if self.dynamic_server and self.judge == "own":
            then = self.last.get(device)
        elif self.dynamic_server:
            then = self.made.get(self.round_base)
        if then is not None:
            root = math.sqrt(then["round"])
            discount = then["s"] ** then["sigma"]
            c = self.mu_alpha / (1.0 + self.mu_alpha * then["xi"]) ** 2
            unit = 1.0 if self.local_work == "steps" else passes / steps  # E5: what one step counts
            if self.equations == "published":
                slope = (uploaded - started)[:L] / (eta * steps * unit)
                log_term = -math.log(then["sigma"]) if then["sigma"] > 0.0 else 0.0
            else:
                left = 0.0  # E6: of each step, what the merges after it left
                for step in range(steps):
                    kept = math.prod(1.0 - weight for _, weight, done in merges if done > step)
                    left += kept * sum(self.momentum**k for k in range(step + 1))
                slope = -progress[:L] / (eta * unit * left)
                log_term = -then["lambda"] * math.log(then["s"])
            q = dot(slope, then["step"][:L])
            grad_lambda = q * c / (root * discount)
            grad_sigma = q * c * log_term / (root * discount)
            grad_iota = q * c
            if then["clamped"] and self.equations == "corrected":  # E13
                grad_lambda, grad_sigma, grad_iota = 0.0, 0.0, 0.0
            slopes, rates = (grad_lambda, grad_sigma, grad_iota), (self.eta_lambda, self.eta_sigma, self.eta_iota)
            maker = then["device"]
            self.controls[maker] = tuple(
                value - rate * by for value, rate, by in zip(self.controls[maker], rates, slopes, strict=True)
            )
            if maker == device:
                lam, sigma, iota = self.controls[maker]
            out |= {"adapted": True, "q": q, "p": then["round"], "s_p": then["s"], "xi_p": then["xi"]}
            out |= {"lambda_p": then["lambda"], "sigma_p": then["sigma"]}
            out |= {"grad_lambda": grad_lambda, "grad_sigma": grad_sigma, "grad_iota": grad_iota}
            out |= {
                "judged": maker,
                "gap": self.round_base - then["made"],
                "size": norm(slope) * norm(then["step"][:L]),
            }

        xi = lam / (math.sqrt(self.round) * s**sigma) + iota
        clamped = xi < self.xi_min
        if clamped:
            xi = self.xi_min
        alpha = self.mu_alpha * xi / (1.0 + self.mu_alpha * xi)

        mixed = (1.0 - alpha) * current + alpha * uploaded
        if self.apply == "mix":
            step = uploaded - current
        else:
            step = progress
            mixed[:L] = current[:L] + alpha * progress[:L]
        if self.counters:
            mixed[B:] = counter_max([current, uploaded] if self.server_counts else [uploaded], B)
        self.version += 1
        self.versions[self.version] = f32(mixed)
        self.k += 1
        self.controls[device] = (lam, sigma, iota)
        self.last[device] = {"step": step, "round": self.round, "s": s, "xi": xi, "lambda": lam, "sigma": sigma}
        self.last[device] |= {"clamped": clamped, "device": device, "made": self.version}
        self.made[self.version] = self.last[device]
        return out | {"kind": "aggregate", "alpha": alpha, "xi": xi, "lambda": lam, "sigma": sigma, "iota": iota}

    def end_round(self) -> int:
        """End the round and return it. Devices that have not uploaded are lost."""
        if not self.running:
            raise RuntimeError("no round is running")
        self.running = False
        self.waiting = set()
        self.fresh = {}
        self.pending = set()
        self.round += 1
        return self.round - 1


def device_merge(
    w_b,
    w_g,
    *,
    g: int,
    o: int,
    gamma: float,
    upsilon: float,
    mu_beta: float,
    eta_gamma: float,
    eta_upsilon: float,
    loss,
    gradient,
    equations: str = "corrected",
    age: int | None = None,
    learnable: int | None = None,
    counters: int = 0,
) -> dict:
    """Section 4. FedSSMU: g - o is k (versions count every aggregation) and age is the round.

    `o` is the newest version that the device has: its base or, after a merge, the one that it merged last.
    """
    assert equations in ("corrected", "published")
    root_age = math.sqrt(g if age is None else age)
    root_s = math.sqrt(g - o + 1)
    free = gamma / root_age * (1.0 - upsilon / root_s)
    phi = max(free, 0.0)
    beta = mu_beta * phi / (1.0 + mu_beta * phi)
    w_b, w_g = f32(w_b), f32(w_g)
    w_a = f32((1.0 - beta) * f64(w_b) + beta * f64(w_g))
    if counters:
        w_a[-counters:] = counter_max([w_b, w_g], len(w_a) - counters)

    if equations == "corrected":
        h = gradient(w_a)
        difference = f64(w_g) - f64(w_b)
    else:
        h = gradient(w_b)
        difference = f64(w_g) - f64(w_a)
    L = len(w_a) if learnable is None else learnable
    q = dot(f64(h)[:L], difference[:L])
    c = mu_beta / (1.0 + mu_beta * phi) ** 2
    grad_gamma = q * c * (1.0 - upsilon / root_s) / root_age
    grad_upsilon = -q * c * gamma / (root_age * root_s)
    if equations == "corrected" and free < 0.0:  # E13
        grad_gamma = grad_upsilon = 0.0

    loss_before, loss_after = float(loss(w_b)), float(loss(w_a))
    return {
        "phi": phi,
        "beta": beta,
        "w_a": w_a,
        "q": q,
        "grad_gamma": grad_gamma,
        "grad_upsilon": grad_upsilon,
        "gamma_after": gamma - eta_gamma * grad_gamma,
        "upsilon_after": upsilon - eta_upsilon * grad_upsilon,
        "loss_before": loss_before,
        "loss_after": loss_after,
        "reward": loss_before - loss_after,
    }


def device_trip(
    w_o,
    epochs: list,
    model,
    *,
    o: int,
    requests: dict,
    gamma: float,
    upsilon: float,
    mu_beta: float,
    eta_gamma: float,
    eta_upsilon: float,
    equations: str = "corrected",
    counters: int = 0,
) -> dict:
    """A whole trip with any number of requests, in float64. Models are rounded where a device has them in float32.

    `epochs` is a list of batches per epoch. `requests` gives the answer at the start of each epoch with a request:
    (g, w_g, age) or None. `model` has loss(w, batch), gradient(w, batch) and train(w, batch), which returns the model
    after one step and keeps the optimiser's state.
    """
    w, have, steps, merges = f64(f32(w_o)), o, 0, []
    for number, batches in enumerate(epochs, start=1):
        answer = requests.get(number)
        if answer is not None:
            g, w_g, age = answer
            first = batches[0]
            merge = device_merge(
                f32(w),
                w_g,
                g=g,
                o=have,
                age=age,
                gamma=gamma,
                upsilon=upsilon,
                mu_beta=mu_beta,
                eta_gamma=eta_gamma,
                eta_upsilon=eta_upsilon,
                loss=lambda v, first=first: model.loss(v, first),
                gradient=lambda v, first=first: model.gradient(v, first),
                equations=equations,
                learnable=model.learnable,
                counters=counters,
            )
            merges.append(merge | {"version": g, "n1": steps, "gamma": gamma, "upsilon": upsilon})
            w, have = f64(merge["w_a"]), g
            gamma, upsilon = merge["gamma_after"], merge["upsilon_after"]
        for batch in batches:
            w = model.train(w, batch)
            steps += 1
    reward = math.fsum(merge["reward"] for merge in merges)
    return {"w_i": w, "steps": steps, "merges": merges, "gamma": gamma, "upsilon": upsilon, "reward": reward}


def baseline_after(b: float, reward: float, rho: float) -> float:
    """Section 4, last line: the running mean of the reward."""
    return (1.0 - rho) * b + rho * reward


MOVES = {"minus": -1, "stay": 0, "add": 1}


class QTableTwin:
    """Section 5, later trips. Slots 1..epochs; actions by name ("minus", "stay", "add"); zero at the start."""

    def __init__(self, epochs: int, phi_q: float, psi: float) -> None:
        self.epochs, self.phi_q, self.psi = epochs, phi_q, psi
        self.H = {(slot, action): 0.0 for slot in range(1, epochs + 1) for action in MOVES}

    def next_slot(self, slot: int, action: str) -> int:
        return min(max(slot + MOVES[action], 1), self.epochs)

    def best_actions(self, slot: int) -> set[str]:
        """Return all equally good actions; ties are broken at random."""
        best = max(self.H[slot, action] for action in MOVES)
        return {action for action in MOVES if self.H[slot, action] == best}

    def update(self, slot: int, action: str, slot_after: int, reward: float) -> float:
        ahead = max(self.H[slot_after, a] for a in MOVES)
        now = self.H[slot, action]
        self.H[slot, action] = now + self.phi_q * (reward + self.psi * ahead - now)
        return self.H[slot, action]


def slot_distribution(p: list[float]) -> list[float]:
    """Section 5: P(ask at k) = p_k prod_{l<k} (1 - p_l), renormalised over 1..L (all zero: uniform, our choice)."""
    raw = []
    for k in range(len(p)):
        not_before = 1.0
        for earlier in p[:k]:
            not_before *= 1.0 - earlier
        raw.append(p[k] * not_before)
    total = math.fsum(raw)
    if total == 0.0:
        return [1.0 / len(p)] * len(p)
    return [r / total for r in raw]

"""Differential privacy: clip updates, add Gaussian noise on the devices or on the server, and account for its cost.

On the devices (``where = "devices"``)::

    d = u - w_b,   d' = d min(1, C / |d|) + N(0, (noise C)^2 I),   sent: w_b + d'

The clipped d lies in a ball of radius C whatever the device's samples are, so exchanging them all moves it by at most
2 C. Each upload is therefore a Gaussian mechanism with noise multiplier ``noise / 2``. The guarantee covers all samples
of a device together, against everybody who sees its uploads, including the server. The number of samples and the times
of availability count as public.

Nothing else that leaves the device may depend on its samples. Reports are withheld except for what a rule declares
public. A model that is not finite is sent as noise. Rules that leak otherwise are refused (``LocalRule.leak``).

The trips of a device compose adaptively. Google's dp-accounting computes epsilon at the given delta with Renyi
differential privacy. A trip counts from its start, even if it is lost, since its update may have been seen.

On the server (``where = "server"``), which is trusted and sees every update. It clips each on arrival and adds noise to
the weighted sum of an aggregation, whose uploads i have the weights c_i::

    d'_i = d_i min(1, C / |d_i|)            W_k = sum of c_i over the uploads i of device k,   W = max W_k
    S = sum_i c_i d'_i + N(0, (noise C W)^2 I)

Exchanging all samples of device k moves each of its d'_i by at most 2 C, and so S by at most 2 C W_k, also if it is in
the buffer twice. For device k, S is a Gaussian mechanism with noise multiplier ``noise W / (2 W_k)``. The weights must
not depend on samples: they follow from numbers of samples and steps, staleness, and who uploads when. All of these
count as public. So nothing may reject an upload for its content: a model that is not finite counts as d = 0.

Aggregations compose adaptively, too. Gaussian mechanisms with multipliers z_1, z_2, ... cost as much as one with
``1 / z^2 = sum 1 / z_j^2``. So device k has spent ``sum (W_k / W)^2`` of full aggregations. A device's chance to be
selected does not enter (no amplification by sampling), since arrival decides who is in a buffer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from freshet.core import saving
from freshet.core.events import Contribution, Noted
from freshet.core.messages import Upload
from freshet.core.method import ADDED, Mismatch, Options, expect
from freshet.core.streams import stream
from freshet.core.vectors import Vector, combine, distance, is_finite, mix, norm
from freshet.errors import ConfigError


class PrivacyOptions(Options):
    """Clipping and noise: differential privacy for all samples of a device together."""

    where: Literal["devices", "server"] = Field(
        "devices",
        description="where noise is added: on the devices (to every update, against the server too), or on the server "
        "(to the sum of a round or buffer, against whoever sees models; the server is trusted)",
        json_schema_extra=ADDED,
    )
    clip: float = Field(0.0, ge=0, description="C, the largest norm of an update (0: no clipping, no noise)")
    noise: float = Field(
        1.0,
        gt=0,
        description="standard deviation of the noise on each number, in units of C (on the server: of C times the "
        "largest weight of a device in the sum)",
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="delta at which epsilon is reported")

    @property
    def on(self) -> bool:
        return self.clip > 0

    @property
    def on_devices(self) -> bool:
        return self.on and self.where == "devices"

    @property
    def on_server(self) -> bool:
        return self.on and self.where == "server"


# ---- on the devices


def privatise(options: PrivacyOptions, weights: Vector, base: Vector, rng: np.random.Generator) -> Vector:
    """``w_b + d'``. All weights must be learnable."""
    with np.errstate(over="ignore", invalid="ignore"):
        d = combine([(1.0, weights), (-1.0, base)])
    length = norm(d) if is_finite(d) else math.inf
    share = 0.0 if math.isinf(length) else min(1.0, options.clip / max(length, 1e-300))
    step = d.astype(np.float64) * share if share else np.zeros(len(d))
    noise = rng.standard_normal(len(d)) * (options.noise * options.clip)
    sent: Vector = (base.astype(np.float64) + step + noise).astype(np.float32)
    return sent


# ---- on the server

Wide = NDArray[np.float64]
#: What the notes in the log are about: a clipped upload, and a noised sum.
CLIP_NOTE, NOISE_NOTE = "clip", "noise"
#: A float32 differs from the number that it stands for by less than this share of it.
ROUNDING = 2.0**-23


@dataclass
class SumAccount:
    """What the aggregations so far have cost each device, in full aggregations, and in how many it took part."""

    #: The key of the noise: the seed of a simulation, or a secret of the server.
    key: str
    #: Noised sums so far.
    sums: int = 0
    spent: dict[int, float] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)


class NoisedSum:
    """Clips uploads and adds noise to sums of them. The server calls it (``core.admission.SumNoise``)."""

    def __init__(self, options: PrivacyOptions, key: int) -> None:
        self.options, self.account = options, SumAccount(f"{key:x}")
        self._note: Noted | None = None

    def clip_upload(self, upload: Upload, start: Vector) -> tuple[Upload, Noted]:
        """Shorten the step of an upload from ``start`` to at most C, whatever it contains."""
        length = distance(upload.weights, start) if is_finite(upload.weights) else math.inf
        bound = clip_bound(self.options.clip, norm(start))
        share = clip_share(self.options.clip, bound, length)
        numbers = {"device": upload.device, "trip": upload.trip, "length": length, "bound": bound, "share": share}
        note = Noted(CLIP_NOTE, numbers if math.isfinite(length) else numbers | {"length": None})
        if share == 1.0:
            return upload, note
        return upload._replace(weights=mix(start, upload.weights, share) if share else start.copy()), note

    def release(self, total: Wide, parts: Sequence[Contribution], version: int) -> Wide:
        """``total`` plus noise. It is the sum of clipped steps with the weights in ``parts``, for this version."""
        weights = device_weights(parts)
        deviation = noise_deviation(self.options.clip, self.options.noise, weights)
        account = self.account
        account.sums += 1
        add_spent(account.spent, weights)
        for device in weights:
            account.times[device] = account.times.get(device, 0) + 1
        places = {"version": version, "devices": list(weights), "weights": list(weights.values())}
        self._note = Noted(NOISE_NOTE, places | {"deviation": deviation})
        drawn = stream(int(account.key, 16), "noised sum", account.sums).standard_normal(len(total))
        noised: Wide = total + deviation * drawn
        return noised

    def take_note(self) -> Noted | None:
        """What the log must know about the last sum; once."""
        note, self._note = self._note, None
        return note

    def state(self) -> saving.Tree:
        tree: saving.Tree = saving.dump(self.account)
        return tree

    def restore(self, tree: saving.Tree) -> None:
        """The inverse of ``state``."""
        saving.restore(self.account, tree)


def clip_bound(clip: float, start: float) -> float:
    """The length of a shortened step: C, less what rounding the model to float32 may add to it.

    The model is at most ``start + C`` long.
    """
    return max(0.0, clip - ROUNDING * (start + clip))


def clip_share(clip: float, bound: float, length: float) -> float:
    """The share of a step of this length that is left."""
    if length <= clip:
        return 1.0
    return 0.0 if math.isinf(length) else bound / length


def device_weights(parts: Sequence[Contribution]) -> dict[int, float]:
    """``W_k``: the weight of each device in a sum, over all its uploads."""
    weights: dict[int, float] = {}
    for part in parts:
        weights[part.device] = weights.get(part.device, 0.0) + abs(part.weight)
    return weights


def noise_deviation(clip: float, noise: float, weights: Mapping[int, float]) -> float:
    """``noise C W``."""
    return noise * clip * max(weights.values())


def add_spent(spent: dict[int, float], weights: Mapping[int, float]) -> None:
    """Add one aggregation to what each device has spent: ``(W_k / W)^2``. A weight of 0 costs nothing."""
    largest = max(weights.values()) or 1.0
    for device, weight in weights.items():
        spent[device] = spent.get(device, 0.0) + (weight / largest) ** 2


@dataclass
class SumAudit:
    """Checks the notes of a log. ``options`` come from its config.toml; ``parts`` are those of the last aggregation."""

    options: PrivacyOptions
    version: int = 0
    parts: Sequence[Contribution] = ()
    spent: dict[int, float] = field(default_factory=dict)

    def expect_note(self, version: int, parts: Sequence[Contribution]) -> None:
        """An aggregation. Its note follows, unless nobody took part in it."""
        if self.parts:
            raise Mismatch(f"the sum of version {self.version} was aggregated without noise")
        self.version, self.parts = version, parts

    def check_clip(self, numbers: Mapping[str, Any]) -> None:
        length, clip = math.inf if numbers["length"] is None else numbers["length"], self.options.clip
        expect("bound", float(numbers["bound"] <= clip), 1.0)
        expect("share", numbers["share"], clip_share(clip, numbers["bound"], length))

    def check_noise(self, numbers: Mapping[str, Any]) -> None:
        weights = dict(zip(numbers["devices"], numbers["weights"], strict=True))
        if numbers["version"] == self.version:  # else the noised model was not finite and was refused
            found = device_weights(self.parts)
            for device in weights.keys() | found.keys():
                expect(f"weight of device {device}", weights.get(device, 0.0), found.get(device, 0.0))
            self.parts = ()
        expect("deviation", numbers["deviation"], noise_deviation(self.options.clip, self.options.noise, weights))
        add_spent(self.spent, weights)


# ---- epsilon


class Accountant:
    """Epsilon per device."""

    def __init__(self, options: PrivacyOptions) -> None:
        if find_spec("dp_accounting") is None:
            problem = "needs dp-accounting, which is not installed; install it: pip install 'freshet-fl[privacy]'"
            raise ConfigError("privacy.clip", problem)
        self.options = options

    def summary(self, trips: Mapping[int, int]) -> dict[str, Any]:
        """Entries of the summary: the largest epsilon, its device, and the epsilon of every device."""
        noise, delta = self.options.noise, self.options.delta
        return self._entries({device: epsilon(noise, count, delta) for device, count in trips.items()}, trips)

    def summary_of_sums(self, account: SumAccount) -> dict[str, Any]:
        """The same for noise on the server, with what each device has spent."""
        noise, delta = self.options.noise, self.options.delta
        by_device = {
            device: epsilon(noise / math.sqrt(cost), 1, delta) if cost else 0.0
            for device, cost in account.spent.items()
        }
        spent = {str(device): cost for device, cost in sorted(account.spent.items())}
        return {"where": "server"} | self._entries(by_device, account.times) | {"spent": spent}

    def _entries(self, by_device: Mapping[int, float], updates: Mapping[int, int]) -> dict[str, Any]:
        ordered = dict(sorted(by_device.items()))
        largest = max(ordered, key=lambda device: ordered[device], default=None)
        return {
            "epsilon": 0.0 if largest is None else ordered[largest],
            "delta": self.options.delta,
            "device": largest,
            "uploads": 0 if largest is None else updates[largest],
            "by_device": {str(device): value for device, value in ordered.items()},
        }


@cache
def epsilon(noise: float, uploads: int, delta: float) -> float:
    """Epsilon at ``delta`` of ``uploads`` updates of one device, with noise in units of the clipping norm."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier=noise / 2.0), uploads)
    return float(accountant.get_epsilon(delta))


def describe(found: Mapping[str, Any]) -> str:
    """The sentence for the terminal."""
    who = f"device {found['device']}, {found['uploads']} updates"
    against = ", against whoever sees models; the server is trusted" if found.get("where") == "server" else ""
    return f"privacy: epsilon is at most {found['epsilon']:.4g} at delta {found['delta']:g} ({who}{against})"

"""Several fresh models per trip, asked for or pushed, compared with the twins: server, device, virtual time, abuse."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from freshet.core.layout import Layout
from freshet.core.messages import Assignment, Fresh, Merge, Request, Slot, Upload
from freshet.core.server import RequestRefused, Server
from freshet.core.streams import stream
from freshet.data.dataset import from_arrays
from freshet.methods import method_options
from freshet.methods.asmu.rule import FreshModelRule
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.batches import FederatedData
from freshet.training.optimisers import sgd
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput
from freshet.training.trip import LocalTrip
from tests.conftest import small
from tests.methods.asmu_helpers import ask, central, flat, plain_layout, send, server_of
from tests.sim.test_driver import CONTROL, MODEL, fleet_of
from tests.twins.fedasmu import FedASMUServerTwin, FedSSMUServerTwin, QTableTwin, baseline_after, device_trip

# ---- the server

LEARNABLE, BUFFERS = 40, 4
EPOCHS, PER_EPOCH = 5, 3
#: Device 8 trains for one epoch only.
OWN_EPOCHS = np.array([5, 5, 4, 5, 3, 5, 5, 5, 1])
DEVICES = len(OWN_EPOCHS)
CONTROLS = {"mu_alpha": 1.2, "lambda0": 0.8, "sigma0": 0.4, "iota0": 0.05, "xi_min": 1e-3}
#: Large enough that the controls move visibly.
RATES = {"eta_lambda": 0.05, "eta_sigma": 0.03, "eta_iota": 0.01}
READINGS = list(product(("own", "base"), ("corrected", "published"), ("mix", "progress"), (0.0, 0.8)))
NAMES = ["-".join(map(str, reading)) for reading in READINGS]
NUMBERS = ("version", "base", "staleness", "alpha", "xi", "lambda", "sigma", "iota")
PAST = ("p", "s_p", "xi_p", "lambda_p", "sigma_p", "gap")
SLOPES = ("q", "grad_lambda", "grad_sigma", "grad_iota")
#: The models have entries up to 4, whose last bit in single precision is 2.4e-7.
TIGHT = 1e-6
Reading = tuple[str, str, str, float]


class Pair:
    """A server and its twin, which get the same events."""

    def __init__(self, name: str, reading: Reading, pushed: bool) -> None:
        judge, equations, apply, momentum = reading
        options: dict[str, Any] = {**CONTROLS, **RATES, "judge": judge, "equations": equations, "apply": apply}
        options |= {"tau_max": 9 if name == "fedasmu" else 7}
        options |= {"local_work": "passes" if apply == "progress" else "steps"}
        self.rng = np.random.default_rng(41)
        w0 = self.rng.normal(size=LEARNABLE + BUFFERS).astype(np.float32)
        layout, reach = plain_layout(LEARNABLE, BUFFERS), sgd(momentum).reach
        asking: dict[str, Any] = {"slot": "never", "push_after": 1} if pushed else {"refresh": "every"}
        self.server = server_of(name, w0, layout, DEVICES, EPOCHS, reach, **options, **asking)
        self.server.method.context = replace(self.server.method.context, own_epochs=OWN_EPOCHS)
        kind = FedASMUServerTwin if name == "fedasmu" else FedSSMUServerTwin
        same: dict[str, Any] = {"push_after": 1} if pushed else {"refresh": math.inf}
        self.twin: Any = kind(w0, **options, **same, momentum=momentum)
        self.next_epoch: dict[int, int] = {}
        self.results: list[dict] = []

    def start(self, devices: list[int]) -> None:
        self.server.trigger(devices)
        if self.server.synchronous:
            self.twin.start_round(devices)
        else:
            for device in devices:
                assert self.twin.trigger(device) == self.server.version
        self.next_epoch |= dict.fromkeys(devices, 1)

    def ask_some(self, share: float) -> None:
        """Some devices ask at the start of their next epoch, if they have one."""
        for device in sorted(self.server.active_trips):
            epoch = self.next_epoch[device]
            if epoch <= OWN_EPOCHS[device] and self.rng.random() < share:
                self.next_epoch[device] += 1
                self.compare_fresh(ask(self.server, device, epoch), self.twin.request(device))

    def push(self) -> None:
        """The server sends its model to those far behind. Some of the others have merged theirs meanwhile."""
        for device, trip in sorted(self.server.active_trips.items()):
            pending = trip.next_merge()
            if pending is not None and self.rng.random() < 0.6:
                pending.merged = True
                self.twin.merged(device)
            fresh = self.server.push(device, trip.trip) if self.server.push_due(device, trip.trip) else None
            self.compare_fresh(fresh, self.twin.push(device))

    def compare_fresh(self, fresh: Fresh | None, expected: Any) -> None:
        assert (fresh is None) == (expected is None)
        if fresh is not None:
            assert fresh.version == expected[0]
            assert fresh.age == (self.twin.round if self.server.synchronous else expected[0])
            np.testing.assert_allclose(fresh.weights, expected[1], rtol=0, atol=TIGHT)

    def upload(self, device: int) -> None:
        """The device has merged most of what it was sent, and uploads a model near the server's."""
        server, rng, trip = self.server, self.rng, self.server.active_trips[device]
        passes = int(OWN_EPOCHS[device])
        steps = PER_EPOCH * passes
        merged = [sent.version for sent in trip.sent if rng.random() < 0.85]
        before = sorted(int(n) for n in rng.integers(steps, size=len(merged)))
        betas = [float(beta) for beta in rng.choice([0.0, 0.05, 0.3, 0.6, 0.9], size=len(merged))]
        merges = list(zip(merged, betas, before, strict=True))
        sent = tuple(Merge(version, {"beta": beta, "n1": n1}) for version, beta, n1 in merges)
        w_i = (server.weights + 0.2 * rng.normal(size=server.weights.size)).astype(np.float32)
        given = {"eta": 0.1, "steps": steps, "passes": passes, "merges": merges, "learnable": LEARNABLE}
        expected = self.twin.upload(device, w_i, **given)
        (event, *_) = server.upload(Upload(device, trip.trip, trip.base, w_i, steps, merges=sent))
        self.compare(flat(event), expected)
        self.results.append(expected | {"merges": len(merges)})

    def compare(self, event: dict, expected: dict) -> None:
        """Compare the event, the model and the controls of all devices."""
        assert event["kind"] == expected["kind"]
        if event["kind"] == "aggregate":
            assert event["adapted"] == expected["adapted"]
            for key in NUMBERS + (PAST if event["adapted"] else ()):
                assert event[key] == pytest.approx(expected[key], rel=TIGHT, abs=TIGHT), key
            for key in SLOPES if event["adapted"] else ():  # their terms cancel: relative to |g| |step|
                assert event[key] == pytest.approx(expected[key], rel=0, abs=TIGHT * max(1.0, expected["size"])), key
            assert event.get("judged", expected["judged"]) == expected["judged"]
        assert self.server.version == self.twin.version
        np.testing.assert_allclose(self.server.weights, self.twin.w, rtol=0, atol=TIGHT)
        kept = {device: state.control for device, state in self.server.method.state.devices.items()}
        assert kept.keys() == self.twin.controls.keys()
        for device, control in kept.items():
            found = (control.lambda_, control.sigma, control.iota)
            assert found == pytest.approx(self.twin.controls[device], rel=TIGHT, abs=TIGHT), device

    def check_coverage(self) -> None:
        """Check that the script held what is to be compared."""
        counts = Counter(result["merges"] for result in self.results if result["adapted"])
        assert all(counts[merges] > 3 for merges in range(5)), counts
        assert {result["kind"] for result in self.results} == {"aggregate", "discard"}


@pytest.mark.parametrize("pushed", [False, True], ids=["asked", "pushed"])
@pytest.mark.parametrize("reading", READINGS, ids=NAMES)
def test_fedasmu_matches_the_twin_with_several_merges(reading: Reading, pushed: bool) -> None:
    pair = Pair("fedasmu", reading, pushed)
    while len(pair.results) < 300:
        idle = [device for device in range(DEVICES) if device not in pair.server.active_trips]
        if len(idle) > 3:
            pair.start(sorted(int(device) for device in pair.rng.choice(idle, size=2, replace=False)))
        pair.upload(int(pair.rng.choice(sorted(pair.server.active_trips))))
        pair.push() if pushed else pair.ask_some(0.4)
    pair.check_coverage()


@pytest.mark.parametrize("pushed", [False, True], ids=["asked", "pushed"])
@pytest.mark.parametrize("reading", READINGS, ids=NAMES)
def test_fedssmu_matches_the_twin_with_several_merges(reading: Reading, pushed: bool) -> None:
    pair = Pair("fedssmu", reading, pushed)
    for _ in range(40):
        members = sorted(int(device) for device in pair.rng.choice(DEVICES, size=8, replace=False))
        pair.start(members)
        for device in map(int, pair.rng.permutation(members)):
            pair.upload(device)
            pair.push() if pushed else pair.ask_some(0.7)
        pair.twin.end_round()
    pair.check_coverage()


# ---- the device

FEATURES, WIDTH, CLASSES, SAMPLES, BATCH = 6, 5, 3, 23, 10
SGD = {"lr": 0.2, "momentum": 0.5, "weight_decay": 1e-3}
LEARNED = {"mu_beta": 1.4, "eta_gamma": 0.3, "eta_upsilon": 0.2}
START = {"gamma": 1.3, "upsilon": 0.4}
BASE_VERSION, TRIP_EPOCHS = 3, 6


def network(norm: bool) -> nn.Module:
    """Two learnable layers with a frozen one between them."""
    torch.manual_seed(11)
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    middle = [nn.BatchNorm1d(WIDTH)] if norm else []
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *middle, nn.Tanh(), frozen, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


class NetworkTwin:
    """The network in float64, by formulas. ``train`` is one step of SGD with momentum and weight decay."""

    def __init__(self, module: nn.Module, layout: Layout, x: np.ndarray, y: np.ndarray) -> None:
        self.learnable = layout.learnable
        self._layout, self._velocity = layout, np.zeros(layout.learnable)
        self._x, self._y = torch.from_numpy(x).double(), torch.from_numpy(y)
        frozen = next(part for part in module if isinstance(part, nn.Linear) and not part.weight.requires_grad)
        self._frozen = frozen.weight.detach().double(), frozen.bias.detach().double()

    def _loss(self, w: Tensor, batch: np.ndarray, training: bool) -> tuple[Tensor, Tensor]:
        """The mean loss and, with BatchNorm, mean and unbiased variance of this batch."""
        learnt, rest = [], []
        for entry in self._layout.entries:
            (learnt if entry.kind == "learnable" else rest).append(w[entry.span].reshape(entry.shape))
        z = self._x[batch] @ learnt[0].T + learnt[1]
        mean, variance = z.mean(0), ((z - z.mean(0)) ** 2).mean(0)
        seen = torch.cat([mean, variance * len(z) / (len(z) - 1)]).detach()
        if rest:
            mean, variance = (mean, variance) if training else rest[:2]
            z = learnt[2] * (z - mean) / torch.sqrt(variance + 1e-5) + learnt[3]
        z = torch.tanh(torch.tanh(z) @ self._frozen[0].T + self._frozen[1]) @ learnt[-2].T + learnt[-1]
        picked = z[torch.arange(len(batch)), self._y[batch]]
        return (torch.logsumexp(z, 1) - picked).mean(), seen

    def loss(self, w: np.ndarray, batch: np.ndarray) -> float:
        return float(self._loss(torch.from_numpy(np.asarray(w, np.float64)), batch, False)[0])

    def gradient(self, w: np.ndarray, batch: np.ndarray, training: bool = False) -> np.ndarray:
        vector = torch.from_numpy(np.array(w, np.float64)).requires_grad_()
        loss, self._seen = self._loss(vector, batch, training)
        (gradient,) = torch.autograd.grad(loss, vector)
        return gradient.numpy()[: self.learnable]

    def train(self, w: np.ndarray, batch: np.ndarray) -> np.ndarray:
        n, floats = self.learnable, self._layout.floats
        g = self.gradient(w, batch, training=True) + SGD["weight_decay"] * w[:n]
        self._velocity = SGD["momentum"] * self._velocity + g
        w = w.copy()
        w[:n] -= SGD["lr"] * self._velocity
        if floats > n:
            w[n:floats] = 0.9 * w[n:floats] + 0.1 * self._seen.numpy()
        w[floats:] += 1
        return w


class Setting:
    """One device's data, a trainer, the twin of its network, and fresh models."""

    def __init__(self, norm: bool, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, SAMPLES)
        data = FederatedData.of(from_arrays("t", (x, y), (x, y)), [np.arange(SAMPLES)])
        options = TrainingOptions(epochs=TRIP_EPOCHS, batch_size=BATCH, **SGD)
        self.trainer = Trainer(lambda: network(norm), data, options, seed=4)
        self.layout = self.trainer.flat.layout
        self.twin = NetworkTwin(self.trainer.flat.module, self.layout, x, y)
        self.models = [self.model(rng) for _ in range(4)]
        order = stream(4, "batches", 0, 2)
        self.epochs = [np.split(order.permutation(SAMPLES), [BATCH, 2 * BATCH]) for _ in range(TRIP_EPOCHS)]
        self.sent = Assignment(0, 2, BASE_VERSION, BASE_VERSION, self.models[0], TRIP_EPOCHS, SGD["lr"])

    def model(self, rng: np.random.Generator) -> np.ndarray:
        """Random weights; positive statistics and a counter."""
        w = 0.7 * rng.normal(size=self.layout.size)
        n, floats = self.layout.learnable, self.layout.floats
        w[n:floats] = np.exp(0.3 * w[n:floats])
        w[floats:] = rng.integers(5, 50)
        return w.astype(np.float32)


def table() -> np.ndarray:
    return np.linspace(-0.2, 0.4, 3 * TRIP_EPOCHS).reshape(TRIP_EPOCHS, 3)


@pytest.mark.parametrize("round_", [None, 7], ids=["versions", "rounds"])
@pytest.mark.parametrize("equations", ["corrected", "published"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_whole_trip_with_several_merges_matches_the_twin(norm: bool, equations: str, round_: int | None) -> None:
    """Requests in slots 2, 3, 4 and 6; nothing is newer in slot 3. In rounds, the round is the age of all of them."""
    setting = Setting(norm)
    _, *models = setting.models
    slots = (Slot(2, "q", 1), Slot(3, "again"), Slot(4, "again"), Slot(6, "again"))
    given = {
        slot: (version, w, round_ or version) for slot, version, w in zip((2, 4, 6), (8, 9, 15), models, strict=True)
    }
    answers = [
        Fresh(given[s.epoch][0], given[s.epoch][2], given[s.epoch][1]) if s.epoch in given else None for s in slots
    ]
    rule = FreshModelRule(method_options("fedasmu", {"equations": equations, "refresh": "every", **LEARNED}))
    memory = {**START, "slot": 1, "table": table(), "b": 0.1}
    outcome = setting.trainer.train(TripInput(setting.sent, slots, tuple(answers), rule, memory))
    twin = device_trip(
        setting.models[0], setting.epochs, setting.twin, o=BASE_VERSION, requests=given, equations=equations,
        counters=setting.layout.size - setting.layout.floats, **START, **LEARNED,
    )  # fmt: skip
    np.testing.assert_allclose(outcome.weights, twin["w_i"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(outcome.weights[setting.layout.floats :], twin["w_i"][setting.layout.floats :])
    assert outcome.steps == twin["steps"] == 18
    assert [(merge.version, merge.numbers["n1"]) for merge in outcome.merges] == [(8, 3), (9, 9), (15, 15)]
    for merge, expected in zip(outcome.merges, twin["merges"], strict=True):
        for key in (
            "n1",
            "phi",
            "beta",
            "gamma",
            "upsilon",
            "gamma_after",
            "upsilon_after",
            "loss_before",
            "loss_after",
        ):
            assert merge.numbers[key] == pytest.approx(expected[key], rel=2e-6), key
        for key in ("q", "reward"):
            assert merge.numbers[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), key
    gaps = [6, 2, 7]  # 8 - 3 + 1, 9 - 8 + 1, 15 - 9 + 1
    for merge, gap, version in zip(outcome.merges, gaps, (8, 9, 15), strict=True):
        n = merge.numbers
        by_hand = n["gamma"] / math.sqrt(round_ or version) * (1 - n["upsilon"] / math.sqrt(gap))
        assert n["phi"] == pytest.approx(by_hand, rel=1e-12)
    for earlier, later in pairwise(outcome.merges):
        assert later.numbers["gamma"] == earlier.numbers["gamma_after"] != earlier.numbers["gamma"]
        assert later.numbers["upsilon"] == earlier.numbers["upsilon_after"] != earlier.numbers["upsilon"]
    check_lesson(outcome.report, outcome.memory, twin)


def check_lesson(report: Any, memory: Any, twin: dict) -> None:
    """The selector learns once per trip, from the sum of the rewards and for the first slot."""
    assert report == {"slot": 2, "first": 0, "reward": pytest.approx(twin["reward"], abs=1e-6)}
    options: Any = method_options("fedasmu", {})
    learner = QTableTwin(TRIP_EPOCHS, options.phi_q, options.psi)
    cells = [(slot, action) for slot in range(1, TRIP_EPOCHS + 1) for action in ("minus", "stay", "add")]
    learner.H = dict(zip(cells, table().ravel().tolist(), strict=True))
    learner.update(1, "add", 2, twin["reward"])
    np.testing.assert_allclose(memory["table"].ravel(), [learner.H[cell] for cell in cells], atol=1e-6)
    assert memory["b"] == pytest.approx(baseline_after(0.1, twin["reward"], options.rho), abs=1e-6)
    assert (memory["gamma"], memory["upsilon"]) == pytest.approx((twin["gamma"], twin["upsilon"]), rel=2e-6)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_slopes_at_the_second_merge_are_those_of_the_loss(seed: int, norm: bool) -> None:
    """gamma and upsilon descend the mini-batch loss of the merged model, as a function of its learnable part."""
    setting = Setting(norm, seed)
    first, second = setting.models[1:3]
    rule = FreshModelRule(method_options("fedasmu", {"slot": 2, "refresh": 2, **LEARNED}))
    trip = LocalTrip(setting.trainer, setting.sent, (Slot(2, "fixed"), Slot(4, "again")), rule, dict(START))
    assert trip.to_slot()
    trip.merge(Fresh(8, 8, first))
    assert trip.to_slot()
    w_b, n, batch = trip.snapshot().astype(np.float64), setting.layout.learnable, setting.epochs[3][0]
    trip.merge(Fresh(13, 13, second))
    w_a, numbers = trip.snapshot().astype(np.float64), trip.merges[1].numbers

    def loss(gamma: float, upsilon: float) -> float:
        phi = gamma / math.sqrt(13) * (1 - upsilon / math.sqrt(13 - 8 + 1))
        beta = LEARNED["mu_beta"] * phi / (1 + LEARNED["mu_beta"] * phi)
        merged = w_a.copy()  # its BatchNorm statistics stay
        merged[:n] = (1 - beta) * w_b[:n] + beta * second[:n].astype(np.float64)
        return setting.twin.loss(merged, batch)

    gamma, upsilon = numbers["gamma"], numbers["upsilon"]
    assert numbers["loss_after"] == pytest.approx(loss(gamma, upsilon), rel=1e-6)
    found = (gamma - numbers["gamma_after"]) / LEARNED["eta_gamma"]
    assert found == pytest.approx(central(lambda value: loss(value, upsilon), gamma), rel=1e-5, abs=1e-7)
    found = (upsilon - numbers["upsilon_after"]) / LEARNED["eta_upsilon"]
    assert found == pytest.approx(central(lambda value: loss(gamma, value), upsilon), rel=1e-5, abs=1e-7)


# ---- virtual time

#: Seconds of a model and of a message without one, down and up (``fleet_of``).
DOWN, UP = 0.2 + MODEL / 5200, 0.3 + MODEL / 650
SHORT_DOWN, SHORT_UP = 0.2 + CONTROL / 5200, 0.3 + CONTROL / 650
Expected = tuple[str, int, float, int | None]


def timeline(method: dict[str, Any], seconds: tuple[float, ...], period: float, until: float, out: Path) -> list[dict]:
    """Run devices of which a whole training takes these seconds; each trigger starts all that are idle."""
    run = {"per_round": len(seconds), "in_flight": len(seconds), "period": period}
    federation = small(method, fleet=fleet_of(*seconds), training={"epochs": 5}, run=run)
    federation.run(until, out=out)
    assert audit(RunDirectory(out)).problem is None
    return [row for row in RunDirectory(out).events() if row["kind"] not in ("evaluate", "aggregate")]


def compare_timeline(rows: list[dict], expected: list[Expected]) -> None:
    """Compare kind, device, time and the version that was sent down."""
    logged = [(row["kind"], row["device"], row.get("fresh", row.get("version"))) for row in rows]
    sent = [(kind, device, None if kind == "upload" else version) for kind, device, version in logged]
    assert sent == [(kind, device, version) for kind, device, _, version in expected]
    np.testing.assert_allclose([row["time"] for row in rows], [row[2] for row in expected], rtol=1e-12)


def test_every_time_of_pushes_follows_from_the_fleet(tmp_path: Path) -> None:
    """Three devices with epochs of 2, 3.1 and 8 s, push_after = 1. DOWN is 0.7 s and UP 4.3 s."""
    assert pytest.approx(0.7) == DOWN and pytest.approx(4.3) == UP
    method = {"name": "fedasmu", "slot": "never", "push_after": 1}
    rows = timeline(method, (10.0, 15.5, 40.0), 20.0, 58.0, tmp_path / "run")
    first, second = DOWN + 10 + UP, DOWN + 15.5 + UP  # 15.0 and 20.5
    again, slow = 20 + first, DOWN + 40 + UP  # 35.0 and 45.0
    expected: list[Expected] = [
        ("trigger", 0, 0.0, 1),
        ("trigger", 1, 0.0, 1),
        ("trigger", 2, 0.0, 1),
        ("upload", 0, first, None),
        ("push", 1, first, 2),  # arrives at 15.7 in its last epoch, which began at 13.1: wasted
        ("push", 2, first, 2),  # arrives at 15.7 in its second epoch
        ("merge", 2, DOWN + 2 * 8, 2),
        ("trigger", 0, 20.0, 2),
        ("upload", 1, second, None),  # device 0 still downloads its base: no push
        ("push", 2, second, 3),  # arrives at 21.2 in its third epoch
        ("merge", 2, DOWN + 3 * 8, 3),
        ("upload", 0, again, None),
        ("push", 2, again, 4),  # arrives at 35.7 in its last epoch, which began at 32.7: wasted
        ("trigger", 0, 40.0, 4),
        ("trigger", 1, 40.0, 4),
        ("upload", 2, slow, None),
        ("push", 0, slow, 5),  # arrives at 45.7, 5 s after they began
        ("push", 1, slow, 5),
        ("merge", 0, 40 + DOWN + 3 * 2, 5),
        ("merge", 1, 40 + DOWN + 2 * 3.1, 5),
        ("upload", 0, 40 + first, None),
        ("push", 1, 40 + first, 6),  # arrives in its last epoch
    ]
    compare_timeline(rows, expected)
    merges = [row for row in rows if row["kind"] == "merge"]
    assert [row["slot"] for row in merges] == [3, 4, 4, 3]
    bytes_down = RunDirectory(tmp_path / "run").summary()["bytes_down"]
    assert bytes_down == MODEL * sum(row["kind"] in ("trigger", "push") for row in rows) == MODEL * 13
    check_numbers(merges[:2], [(2, 1), (3, 2)])
    check_steps(tmp_path / "run", 2, [2, 3])


def test_push_that_arrives_in_the_last_epoch_is_wasted_even_if_it_left_before(tmp_path: Path) -> None:
    """The last epoch of device 1 begins at 32.7. The push leaves at 32.5 and arrives at 33.2."""
    method = {"name": "fedasmu", "slot": "never", "push_after": 1}
    rows = timeline(method, (27.5, 40.0), 1000.0, 50.0, tmp_path / "run")
    first = DOWN + 27.5 + UP
    assert first < DOWN + 4 * 8 < first + DOWN
    expected: list[Expected] = [
        ("trigger", 0, 0.0, 1),
        ("trigger", 1, 0.0, 1),
        ("upload", 0, first, None),
        ("push", 1, first, 2),
        ("upload", 1, DOWN + 40 + UP, None),
    ]
    compare_timeline(rows, expected)
    (last,) = [e for e in RunDirectory(tmp_path / "run").events() if e["kind"] == "aggregate" and e["device"] == 1]
    assert (last["beta"], last["n1"]) == (0.0, 0)


def test_every_time_of_pushes_within_a_round_follows_from_the_fleet(tmp_path: Path) -> None:
    """The same devices in rounds: with the last upload the next round starts, and nobody is left to push to."""
    method = {"name": "fedssmu", "slot": "never", "push_after": 1}
    rows = timeline(method, (10.0, 15.5, 40.0), 20.0, 62.0, tmp_path / "run")
    first, second, slow = DOWN + 10 + UP, DOWN + 15.5 + UP, DOWN + 40 + UP
    expected: list[Expected] = [
        ("trigger", 0, 0.0, 1),
        ("trigger", 1, 0.0, 1),
        ("trigger", 2, 0.0, 1),
        ("upload", 0, first, None),
        ("push", 1, first, 2),
        ("push", 2, first, 2),
        ("merge", 2, DOWN + 2 * 8, 2),
        ("upload", 1, second, None),
        ("push", 2, second, 3),
        ("merge", 2, DOWN + 3 * 8, 3),
        ("upload", 2, slow, None),
        ("trigger", 0, slow, 4),
        ("trigger", 1, slow, 4),
        ("trigger", 2, slow, 4),
        ("upload", 0, slow + first, None),
        ("push", 1, slow + first, 5),
        ("push", 2, slow + first, 5),
        ("merge", 2, slow + DOWN + 2 * 8, 5),
    ]
    compare_timeline(rows, expected)
    merges = [row for row in rows if row["kind"] == "merge"]
    assert [(row["round"], row["k"], row["slot"]) for row in merges] == [(1, 1, 3), (1, 2, 4), (2, 1, 3)]
    check_numbers(merges, [(2, 1), (3, 2), (5, 4)])
    check_steps(tmp_path / "run", 2, [2, 3])


def test_every_time_of_several_requests_follows_from_the_fleet(tmp_path: Path) -> None:
    """Three devices with epochs of 2, 8 and 3.2 s ask in slots 2, 3 and 4; one trigger only."""
    method = {"name": "fedasmu", "slot": 2, "refresh": 3}
    rows = timeline(method, (10.0, 40.0, 16.0), 1000.0, 60.0, tmp_path / "run")
    empty = SHORT_DOWN + SHORT_UP  # between two requests, beside the epoch
    fast = [DOWN + (place + 1) * 2 + place * empty + SHORT_UP for place in range(3)]
    middle = [DOWN + (place + 1) * 3.2 + place * empty + SHORT_UP for place in range(3)]
    fast_end, middle_end = fast[2] + SHORT_DOWN + 2 * 2 + UP, middle[2] + SHORT_DOWN + 2 * 3.2 + UP
    slow = [DOWN + 8 + SHORT_UP]
    slow.append(slow[0] + SHORT_DOWN + 8 + SHORT_UP)  # nothing was newer
    slow.append(slow[1] + DOWN + 8 + SHORT_UP)  # version 2 was
    slow_end = slow[2] + DOWN + 2 * 8 + UP
    expected: list[Expected] = [
        ("trigger", 0, 0.0, 1),
        ("trigger", 1, 0.0, 1),
        ("trigger", 2, 0.0, 1),
        *(("request", 0, time, None) for time in fast),
        *(("request", 2, time, None) for time in middle),
        ("request", 1, slow[0], None),
        ("upload", 0, fast_end, None),
        ("request", 1, slow[1], 2),
        ("merge", 1, slow[1] + DOWN, 2),
        ("upload", 2, middle_end, None),
        ("request", 1, slow[2], 3),
        ("merge", 1, slow[2] + DOWN, 3),
        ("upload", 1, slow_end, None),
    ]
    compare_timeline(rows, sorted(expected, key=lambda row: row[2]))
    asked = [(row["slot"], row["slot_by"]) for row in rows if row["kind"] == "request" and row["device"] == 1]
    assert asked == [(2, "fixed"), (3, "again"), (4, "again")]
    merges = [row for row in rows if row["kind"] == "merge"]
    assert [row["slot"] for row in merges] == [3, 4]
    summary = RunDirectory(tmp_path / "run").summary()
    assert summary["bytes_down"] == MODEL * (3 + 2) + CONTROL * 7
    assert summary["bytes_up"] == MODEL * 3 + CONTROL * 9
    check_numbers(merges, [(2, 1), (3, 2)])
    check_steps(tmp_path / "run", 1, [2, 3])


def check_numbers(merges: list[dict], versions: list[tuple[int, int]]) -> None:
    """Compute phi and beta of one trip's merges from the version merged and the one that the device had."""
    gamma, upsilon = 1.0, 0.5
    for row, (fresh, had) in zip(merges, versions, strict=True):
        assert (row["gamma"], row["upsilon"]) == (gamma, upsilon)
        phi = gamma / math.sqrt(row.get("round", fresh)) * (1 - upsilon / math.sqrt(fresh - had + 1))
        assert (row["phi"], row["beta"]) == pytest.approx((phi, phi / (1 + phi)), rel=1e-12)
        gamma, upsilon = row["gamma_after"], row["upsilon_after"]


def check_steps(run: Path, device: int, epochs: list[int]) -> None:
    """The device's first upload names the steps before each merge: those of so many epochs."""
    rows = [row for row in RunDirectory(run).events() if row["kind"] == "aggregate" and row["device"] == device]
    steps = rows[0]["steps"]
    assert rows[0]["n1"] == [steps * done // 5 for done in epochs] and steps % 5 == 0
    betas = [row["beta"] for row in RunDirectory(run).events() if row["kind"] == "merge" and row["device"] == device]
    assert rows[0]["beta"] == betas[:2]


# ---- abuse


def held(server: Server) -> dict[int, int]:
    """The versions that trips in flight hold, with the number of holds."""
    trips = server.active_trips.values()
    return dict(Counter([trip.base for trip in trips] + [sent.version for trip in trips for sent in trip.sent]))


def check_store(server: Server) -> None:
    """The store has the current version and those that trips hold, as often as they hold them; no more."""
    stored = {version: holders for version, _, holders in server.store.items()}
    assert stored == {server.version: 0} | held(server)


def advance(server: Server, times: int = 1, device: int = 7) -> None:
    """Another device makes new versions."""
    for _ in range(times):
        server.trigger([device])
        send(server, device, server.weights + np.float32(0.01))


def abused(**options: Any) -> Server:
    server = server_of("fedasmu", np.arange(12.0), plain_layout(12), epochs=5, **options)
    server.trigger([0])
    return server


def test_device_that_asks_in_every_epoch_gets_one_model_where_one_is_allowed() -> None:
    server = abused(refresh=1)
    assert ask(server, 0, 1) is None, "nothing is newer"
    for epoch in (2, 3, 4, 5, 4, 3, 2, 1):
        advance(server)
        fresh = ask(server, 0, epoch)
        assert fresh is not None and fresh.version == 2
        check_store(server)
    assert len(server.store) == 3
    send(server, 0, server.weights, beta=0.5, n1=0)
    assert len(server.store) == 1


def test_device_that_asks_backwards_gets_newer_models_and_each_again() -> None:
    server = abused(refresh=3)
    answers = {}
    for epoch in (5, 3, 1):
        advance(server, 2)
        answers[epoch] = ask(server, 0, epoch)
    assert [fresh.version for fresh in answers.values() if fresh is not None] == [3, 5, 7]
    advance(server, 2)
    for epoch in (1, 3, 5, 2, 4, 5):
        again = ask(server, 0, epoch)
        assert again is not None and again.version == (answers.get(epoch) or answers[1]).version  # type: ignore[union-attr]
        check_store(server)
    assert len(server.store) == 5


def test_reward_belongs_to_the_slot_in_which_the_device_asked_first() -> None:
    for claimed, kind in ((4, "aggregate"), (2, "rejected")):
        server = abused(refresh=2)
        versions = []
        for epoch in (4, 2):
            advance(server)
            fresh = ask(server, 0, epoch)
            assert fresh is not None
            versions.append(fresh.version)
        report = {"slot": claimed, "first": 1, "reward": 0.1}
        merges = tuple(Merge(version, {"beta": 0.1, "n1": 0}) for version in versions)
        (event, *_) = server.upload(Upload(0, 1, 1, server.weights + np.float32(0.1), 5, report, merges))
        assert flat(event)["kind"] == kind
        assert len(server.store) == 1


def test_device_that_asks_where_models_are_pushed_gets_no_more_than_one_per_epoch() -> None:
    server = abused(slot="never", push_after=2)
    advance(server)
    assert ask(server, 0, 1) is None, "one version behind is not far enough"
    advance(server)
    assert server.push_due(0, 1) and server.push(0, 1).version == 3
    advance(server)
    assert ask(server, 0, 2) is None
    for _ in range(3):
        for epoch in range(1, 6):
            advance(server)
            ask(server, 0, epoch)
            assert not server.push_due(0, 1), "the device has not merged the first"
            check_store(server)
    trip = server.active_trips[0]
    assert len(trip.sent) == 5 and len(server.store) == 7
    versions = [sent.version for sent in trip.sent]
    assert all(later - earlier >= 2 for earlier, later in pairwise([1, *versions]))
    assert server.drop_trip(0, 1, "device left") and len(server.store) == 1


@pytest.mark.parametrize("epoch", [0, 6, -1, True, 2.0, "2", None])
def test_impossible_slots_hold_nothing(epoch: Any) -> None:
    server = abused(refresh="every")
    advance(server)
    with pytest.raises(RequestRefused):
        server.request(Request(0, 1, Slot(epoch, "fixed")))
    with pytest.raises(RequestRefused):
        server.request(Request(0, 2, Slot(1, "fixed")))
    assert not server.active_trips[0].sent and server.active_trips[0].slot is None
    check_store(server)


def test_every_end_of_a_trip_releases_all_that_it_was_sent() -> None:
    for end in ("upload", "rejected", "forged", "stale", "lost", "given up"):
        server = abused(refresh="every", tau_max=6)
        for epoch in (1, 2, 3):
            advance(server)
            assert ask(server, 0, epoch) is not None
        assert len(server.store) == 4
        merges = {"upload": [2, 3, 4], "forged": [2, 5], "rejected": [3, 2], "stale": [2]}.get(end, [])
        advance(server, 5 if end == "stale" else 0)
        sent = Upload(0, 1, 1, server.weights.copy(), 5, merges=tuple(Merge(v, {"beta": 0.1, "n1": 1}) for v in merges))
        if end == "lost":
            server.drop_trip(0, 1, "device left")
        elif end == "given up":
            server.give_up(0, 1)
        else:
            kind = {"upload": "aggregate", "stale": "discard"}.get(end, "rejected")
            assert flat(server.upload(sent)[0])["kind"] == kind, end
        assert len(server.store) == 1 and not server.active_trips, end
        (late, *_) = server.upload(sent)
        assert flat(late)["reason"] == "no such trip in flight"


@pytest.mark.parametrize("judge", ["own", "base"])
@pytest.mark.parametrize(
    "options", [{"refresh": 1}, {"refresh": 3}, {"refresh": "every"}, {"slot": "never", "push_after": 2}], ids=str
)
def test_store_does_not_grow_with_hostile_devices(options: dict[str, Any], judge: str) -> None:
    """Devices ask in any slot and order, again and again, and end their trips in any way."""
    rng = np.random.default_rng(6)
    server = server_of("fedasmu", np.arange(12.0), plain_layout(12), epochs=4, judge=judge, **options)
    allowed = {1: 1, 3: 3}.get(options.get("refresh", 0), 4)
    largest, stored = 0, set[int]()  # the versions stored before the last aggregation
    for _ in range(1500):
        device = int(rng.integers(6))
        trip = server.active_trips.get(device)
        if trip is None:
            server.trigger([device])
        elif rng.random() < 0.75:
            ask(server, device, int(rng.integers(1, 5)))
            if options.get("push_after") and server.push_due(device, trip.trip):
                server.push(device, trip.trip)
        elif rng.random() < 0.2:
            server.drop_trip(device, trip.trip, "device left")
        else:
            versions = [sent.version for sent in trip.sent if rng.random() < 0.7]
            if rng.random() < 0.2:
                versions.reverse()
            merges = tuple(Merge(version, {"beta": 0.3, "n1": 0}) for version in versions)
            before, version = {kept for kept, _, _ in server.store.items()}, server.version
            server.upload(Upload(device, trip.trip, trip.base, server.weights + np.float32(0.01), 5, merges=merges))
            stored = before if server.version > version else stored
        check_store(server)
        most = max((len(active.sent) for active in server.active_trips.values()), default=0)
        largest = max(largest, most)
        assert most <= allowed
        if judge == "base":  # the makers of unused versions go with the next aggregation
            assert server.method.state.makers.made.keys() <= stored | {server.version}
    assert largest == allowed and server.version > 100
    for device, active in list(server.active_trips.items()):
        server.drop_trip(device, active.trip, "device left")
    assert len(server.store) == 1

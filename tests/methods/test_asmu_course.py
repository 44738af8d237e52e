"""``controls = "course"``: one shared set of controls, learned from devices that start from the new model."""

import json
import math
from collections.abc import Callable
from math import log, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from freshet import Federation
from freshet.assembly import Assembly
from freshet.config import resolve
from freshet.core.events import Aggregated
from freshet.core.messages import Upload
from freshet.core.server import Server
from freshet.errors import ConfigError
from freshet.methods import method_options
from freshet.methods.asmu.staleness import MAX_WEIGHT, Control, PastUpload, control_gradients
from freshet.methods.asmu.steps import Course
from freshet.paper.cells import CELLS, cell_settings
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from tests.methods.asmu_helpers import plain_layout, server_of

COURSE = {"apply": "progress", "controls": "course", "slot": "never"}
SIZE = 12


def vector(seed: int, size: float = 1.0) -> np.ndarray:
    return (size * np.random.default_rng(seed).normal(size=SIZE)).astype(np.float32)


class Twin:
    """An independent implementation of the formulas in float64, without any of the server's parts."""

    def __init__(self, w: np.ndarray, lambda0: float, sigma0: float, iota0: float, rate: float) -> None:
        self.models, self.courses, self.past = [w.astype(np.float64)], [np.zeros_like(w, np.float64)], [None]
        self.controls, self.rate = np.array([lambda0, sigma0, iota0]), rate

    def upload(self, base: int, d: np.ndarray) -> float:
        """Return alpha. Versions count from 0 here."""
        t, s, d = len(self.models) - 1, len(self.models) - base, d.astype(np.float64)
        if self.past[base] is not None:
            p, s_p, (lambda_p, sigma_p, iota_p) = self.past[base]
            xi_p = lambda_p / (sqrt(p) * s_p**sigma_p) + iota_p
            m = self.courses[base]
            q = -float(d @ m) / (np.linalg.norm(d) * np.linalg.norm(m))
            slope = q / (1 + xi_p) ** 2
            inner = slope / (sqrt(p) * s_p**sigma_p)
            self.controls = self.controls - self.rate * np.array([inner, -inner * lambda_p * log(s_p), slope])
        lambda_, sigma, iota = self.controls
        xi = lambda_ / (sqrt(t + 1) * s**sigma) + iota
        alpha = xi / (1 + xi)
        self.models.append(self.models[t] + alpha * d)
        self.courses.append((1 - 1 / s) * self.courses[t] + alpha * d)
        self.past.append((t + 1, s, tuple(self.controls)))
        return float(alpha)


def send(server: Server, device: int, d: np.ndarray) -> dict[str, Any]:
    """Upload the base plus d as a device in flight, and return the numbers of its aggregation."""
    active = server.active_trips[device]
    events = server.upload(Upload(device, active.trip, active.base, server.store.get(active.base) + d, 4))
    return dict(next(event.numbers for event in events if isinstance(event, Aggregated)))


def test_course_matches_a_twin_through_many_stale_uploads() -> None:
    w = vector(0)
    server = server_of("fedasmu", w, plain_layout(SIZE), devices=9, lambda0=2.0, sigma0=0.4, iota0=0.1, **COURSE)
    twin = Twin(w, 2.0, 0.4, 0.1, 0.005)
    rng, bases = np.random.default_rng(1), {}
    for device in range(5):
        server.trigger([device])
        bases[device] = 0
    for number in range(60):
        device = int(rng.choice(sorted(bases)))
        d = vector(100 + number, 0.1)
        assert send(server, device, d)["alpha"] == pytest.approx(twin.upload(bases.pop(device), d), rel=1e-6)
        idle = int(rng.choice([other for other in range(9) if other not in bases]))
        server.trigger([idle])
        bases[idle] = len(twin.models) - 1
    assert server.weights == pytest.approx(twin.models[-1], abs=1e-5)
    control = server.method.state.course.control
    assert (control.lambda_, control.sigma, control.iota) == pytest.approx(tuple(twin.controls), rel=1e-6)
    assert control.iota != pytest.approx(0.1, abs=1e-3), "it has moved"


def test_slope_is_that_of_the_next_devices_loss_along_the_course() -> None:
    """By finite differences, a relative change of the weight that led to a model changes the loss of the device that
    starts there by ``<grad, course>``. The device's step gives this up to both lengths."""
    target = vector(3).astype(np.float64)
    server = server_of("fedasmu", vector(0), plain_layout(SIZE), devices=3, lambda0=0.0, iota0=0.25, **COURSE)
    server.trigger([0])
    course = send(server, 0, vector(4, 0.2))["alpha"] * vector(4, 0.2).astype(np.float64)  # staleness 1: of one upload
    w = server.weights.astype(np.float64)

    def loss(change: float) -> float:
        moved = w + change * course - target
        return 0.5 * float(moved @ moved)

    true = (loss(1e-4) - loss(-1e-4)) / 2e-4
    server.trigger([1])
    found = send(server, 1, (-0.1 * (w - target)).astype(np.float32))
    assert found["q"] * np.linalg.norm(w - target) * np.linalg.norm(course) == pytest.approx(true, rel=1e-4)


def test_continuing_raises_the_weights_and_turning_back_lowers_them() -> None:
    for sign, more in ((1.0, True), (-1.0, False)):
        server = server_of("fedasmu", vector(0), plain_layout(SIZE), devices=3, lambda0=0.0, iota0=0.2, **COURSE)
        server.trigger([0])
        before = send(server, 0, vector(1))
        server.trigger([1])
        after = send(server, 1, np.float32(sign) * vector(1))
        assert before["adapted"] is False and after["adapted"] is True and after["gap"] == 0
        assert (after["alpha"] > before["alpha"]) is more


def test_course_keeps_only_versions_in_use() -> None:
    server = server_of("fedasmu", vector(0), plain_layout(SIZE), devices=40, **COURSE)
    server.trigger([0])
    for device in range(1, 30):
        server.trigger([device])
        send(server, device, vector(device, 0.1))
    assert len(server.method.state.course.made) <= 2


def test_course_restarts_on_overflow() -> None:
    course, huge = Course(Control(1.0, 0.5, 0.1)), np.full(4, 3e38, np.float32)
    for version in range(1, 4):
        length = course.advance(PastUpload(version, version, 9, 0.9, course.control), 0.9, huge, lambda _: True)
        assert np.isfinite(length)


@pytest.mark.parametrize("method", ["fedasmu-course", "fedssmu-course"])
def test_run_passes_the_audit_and_a_changed_length_does_not(
    method: str, tmp_path: Path, federate: Callable[..., Federation]
) -> None:
    run = RunDirectory(federate({"name": method}).run(120, out=tmp_path / "run").directory)
    assert audit(run).problem is None
    rows = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
    judged = {row["contributions"][0]["base"] for row in rows if row.get("adapted")}
    row = next(row for row in rows if "course" in row and row["version"] + 1 in judged)
    row["course"] *= 1.01
    (run.directory / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problem = audit(run).problem
    assert problem is not None and "length_p" in problem


def test_course_finds_weights_from_far_too_small_and_far_too_large_ones(
    tmp_path: Path, federate: Callable[..., Federation]
) -> None:
    """The controls learn: initial values a factor of 100 apart end within a factor of 3."""
    ends = []
    for iota0 in (0.003, 0.3):
        options = {"name": "fedasmu-course", "lambda0": 0.0, "iota0": iota0, "eta_iota": 0.02}
        directory = federate(options).run(600, out=tmp_path / str(iota0)).directory
        alphas = [event["alpha"] for event in RunDirectory(directory).events() if event["kind"] == "aggregate"]
        ends.append(median(alphas[-40:]))
    assert max(ends) / min(ends) < 3.0


def test_clamped_weights_recover_when_devices_ask_for_more(tmp_path: Path, federate: Callable[..., Federation]) -> None:
    """Controls start far below the clamp. Every alpha is that of xi_min until devices have asked for more."""
    options = {"name": "fedasmu-course", "lambda0": 0.0, "iota0": -0.05, "eta_iota": 0.02}
    directory = federate(options).run(600, out=tmp_path / "run").directory
    alphas = [event["alpha"] for event in RunDirectory(directory).events() if event["kind"] == "aggregate"]
    assert alphas[0] == pytest.approx(0.001, rel=0.01) and median(alphas[-40:]) > 0.01
    assert audit(RunDirectory(directory)).passed


@pytest.mark.parametrize(("q", "follows"), [(-0.3, True), (0.3, False), (0.0, False), (math.nan, False)])
def test_clamped_weight_follows_only_a_slope_away_from_the_clamp(q: float, follows: bool) -> None:
    past = PastUpload(3, 4, 2, 0.001, Control(0.1, 0.5, -0.2))
    found = control_gradients(q, 1.0, 0.001, past, "corrected", comes_back=True)
    free = control_gradients(q, 1.0, -1.0, past, "corrected")  # the same weight where no clamp is
    assert found == (free if follows else (0.0, 0.0, 0.0)) and any(found) == follows
    assert control_gradients(q, 1.0, 0.001, past, "corrected") == (0.0, 0.0, 0.0), "the paper's: erratum E13"
    huge = PastUpload(3, 4, 2, MAX_WEIGHT, Control(0.1, 0.5, 2 * MAX_WEIGHT))
    assert any(control_gradients(-q, 1.0, 0.001, huge, "corrected", comes_back=True)) == follows


@pytest.mark.parametrize(
    ("method", "run", "span", "rate"),
    [
        ("fedasmu-course", {}, 30, 0.005),
        ("fedasmu-course", {"in_flight": 60}, 60, 0.0025),
        ("fedasmu-course", {"in_flight": 6, "per_round": 2}, 6, 0.005),
        ("fedssmu-course", {"per_round": 10}, 10, 0.005),
        ("fedssmu-course", {"per_round": 40}, 40, 0.00125),
        ("fedasmu-progress", {"in_flight": 60}, None, 1e-4),
    ],
)
def test_rates_fall_with_the_uploads_in_flight(method: str, run: dict[str, int], span: int | None, rate: float) -> None:
    """A verdict comes as late as uploads are stale, and the verdicts in between say the same."""
    config = resolve({"method": {"name": method}, "fleet": {"devices": 80}, "run": run})
    settled = Assembly(config).begin().config
    assert settled.method.span == span and settled.method.control_rates() == pytest.approx((rate,) * 3)
    assert resolve(settled.tables()).method == settled.method, "the run directory says so"
    given = resolve({"method": {"name": method, "span": 20}, "fleet": {"devices": 80}, "run": run})
    assert Assembly(given).begin().config.method.span == 20


def test_cell_rates_do_not_apply_to_course() -> None:
    for name, rate in (("fedasmu-course", 0.005), ("fedasmu", 0.1)):
        tables = cell_settings(CELLS["lenet-cifar10"], name)["method"]
        given = {key: value for key, value in tables.items() if key != "name"}
        assert method_options(name, given).eta_iota == rate


def test_it_needs_progress() -> None:
    with pytest.raises(ConfigError, match='it needs apply = "progress"'):
        method_options("fedasmu", {"controls": "course"})

"""Virtual time in the log: exact times of every leg, causality, limits, rounds, losses, deferred training."""

import json
from collections import Counter
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from freshet import Fleet, Result
from freshet.compute import executor
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

MODEL, CONTROL = 4 * 650, 64  # bytes: the linear model of conftest.py, a message without a model


def events(result: Result, *kinds: str) -> list[dict[str, Any]]:
    rows = list(RunDirectory(result.directory).events())
    return [row for row in rows if row["kind"] in kinds] if kinds else rows


def passes_audit(result: Result) -> None:
    assert audit(RunDirectory(result.directory)).problem is None


def fleet_of(*seconds: float, **changes: Any) -> Fleet:
    n = len(seconds)
    figures = {"up_rate": np.full(n, 650.0), "down_rate": np.full(n, 5200.0), "up_latency": 0.3, "down_latency": 0.2}
    return Fleet(np.array(seconds), **(figures | changes))


def in_flight_after_each_instant(rows: list[dict[str, Any]]) -> list[tuple[float, int]]:
    flying, seen = 0, []
    for time, group in groupby(rows, key=lambda row: row["time"]):
        for row in group:
            flying += (row["kind"] == "trigger") - (row["kind"] in ("upload", "lost"))
        seen.append((time, flying))
    return seen


# ---- the timeline of a trip


@pytest.fixture(scope="module")
def two_devices(federate, tmp_path_factory) -> Result:
    """A fast and a slow device, five epochs, both ask at the start of the third; one trigger only."""
    federation = federate(
        {"name": "fedasmu", "slot": 3},
        fleet=fleet_of(10.0, 40.0),
        training={"epochs": 5},
        run={"per_round": 2, "in_flight": 2, "period": 1000.0},
    )
    return federation.run(100, out=tmp_path_factory.mktemp("timeline") / "run")


def test_every_time_of_a_trip_follows_from_the_fleet(two_devices):
    down, up = 0.2 + MODEL / 5200, 0.3 + MODEL / 650
    short_down, short_up = 0.2 + CONTROL / 5200, 0.3 + CONTROL / 650
    fast_request = 0.0 + down + 2 * 10 / 5 + short_up
    fast_upload = fast_request + short_down + 3 * 10 / 5 + up
    slow_request = 0.0 + down + 2 * 40 / 5 + short_up
    slow_merge = slow_request + down
    slow_upload = slow_merge + 3 * 40 / 5 + up
    expected = [
        ("trigger", 0, 0.0),
        ("trigger", 1, 0.0),
        ("request", 0, fast_request),
        ("upload", 0, fast_upload),
        ("aggregate", 0, fast_upload),
        ("request", 1, slow_request),
        ("merge", 1, slow_merge),
        ("upload", 1, slow_upload),
        ("aggregate", 1, slow_upload),
    ]
    logged = [(row["kind"], row["device"], row["time"]) for row in events(two_devices) if row["kind"] != "evaluate"]
    assert [row[:2] for row in logged] == [row[:2] for row in expected]
    np.testing.assert_allclose([row[2] for row in logged], [row[2] for row in expected], rtol=1e-12)


def test_a_request_without_a_newer_model_gets_a_short_reply_and_no_merge(two_devices):
    request = events(two_devices, "request")[0]
    assert (request["device"], request["fresh"]) == (0, None)
    assert [row["device"] for row in events(two_devices, "merge")] == [1]


def test_bytes_are_counted_per_leg(two_devices):
    assert two_devices.summary["bytes_down"] == 2 * MODEL + CONTROL + MODEL
    assert two_devices.summary["bytes_up"] == 2 * CONTROL + 2 * MODEL


def test_a_request_is_answered_with_the_model_at_its_arrival(finished):
    version, merged_later, trips = 1, 0, {}
    for row in events(finished("fedasmu")):
        if row["kind"] == "trigger":
            trips[row["device"]] = row["version"]
        if row["kind"] == "request":
            assert row["fresh"] == (version if version > trips[row["device"]] else None)
        if row["kind"] == "merge":
            merged_later += row["fresh"] < version
        version += row["kind"] == "aggregate"
    assert merged_later > 0  # the model changed while some answer was on its way


@pytest.mark.parametrize("method", ["fedasmu", "fedssmu"])
def test_between_request_and_merge_lies_exactly_one_download(finished, federate, method):
    fleet = federate(method).fleet
    requests = {(row["device"], row["trip"]): row for row in events(finished(method), "request")}
    merges = events(finished(method), "merge")
    assert len(merges) > 1
    for merge in merges:
        request = requests[merge["device"], merge["trip"]]
        download = fleet.download_seconds(merge["device"], MODEL)
        assert download > 0
        assert merge["time"] - request["time"] == pytest.approx(download, rel=1e-9)
        assert merge["fresh"] == request["fresh"] > merge["base"]


def test_a_device_trains_after_its_merge(finished, federate):
    fleet = federate("fedasmu").fleet
    uploads = {(row["device"], row["trip"]): row["time"] for row in events(finished("fedasmu"), "upload")}
    checked = 0
    for merge in events(finished("fedasmu"), "merge"):
        device, trip = merge["device"], merge["trip"]
        if (device, trip) in uploads:
            trained = uploads[device, trip] - merge["time"] - fleet.upload_seconds(device, MODEL)
            epochs = 4 - (merge["slot"] - 1)
            assert trained == pytest.approx(epochs * fleet.train_seconds[device] / 4, rel=1e-9)
            checked += 1
    assert checked > 3


def test_nothing_happens_after_the_end(finished):
    rows = events(finished("fedasmu"))
    assert max(row["time"] for row in rows) == 60.0
    assert rows[-1]["kind"] == "evaluate"
    assert finished("fedasmu").summary["virtual_time"] == 60.0


# ---- triggers


def test_the_periodic_trigger_starts_its_devices_whenever_fewer_than_the_cap_are_busy(finished):
    """m' = 3 every 4 s while fewer than 6 of the 8 devices train, or all idle ones if fewer."""
    rows = events(finished("fedasmu"))
    starts = Counter(row["time"] for row in rows if row["kind"] == "trigger")
    ends = [row["time"] for row in rows if row["kind"] in ("upload", "lost")]
    assert all(time % 4.0 == 0 for time in starts)
    expected = {}
    for tick in range(0, 64, 4):  # arrivals at the same instant come first
        busy = sum(count for time, count in starts.items() if time < tick) - sum(time <= tick for time in ends)
        expected[tick] = min(3, 8 - busy) if busy < 6 else 0
    assert {tick: starts[tick] for tick in expected} == expected
    assert {0, 3} <= set(expected.values())
    assert 6 < max(flying for _, flying in in_flight_after_each_instant(rows)) <= 6 + 3 - 1


def test_the_concurrency_trigger_keeps_the_number_in_flight_constant(federate, tmp_path):
    result = federate("fedasmu", run={"trigger": "concurrency", "in_flight": 5}).run(40, out=tmp_path / "run")
    seen = in_flight_after_each_instant(events(result))
    assert len(seen) > 20
    assert {flying for _, flying in seen} == {5}
    passes_audit(result)


def test_under_constant_concurrency_a_round_equivalent_is_the_number_in_flight(federate, tmp_path):
    """Baselines C8 and C9: C jobs are outstanding, and the rate is eta gamma^floor(a / C), a = consumed uploads."""
    run = {"trigger": "concurrency", "in_flight": 6, "per_round": 3}
    result = federate("fedasmu", training={"lr": 0.1, "lr_decay": 0.5}, run=run).run(80, out=tmp_path / "run")
    consumed = 0
    for row in events(result, "trigger", "aggregate"):
        consumed += row["kind"] == "aggregate"
        if row["kind"] == "trigger":
            assert row["lr"] == 0.1 * 0.5 ** (consumed // 6), f"after {consumed} uploads"
    assert consumed > 12


@pytest.mark.parametrize("method", ["fedavg", "fedssmu"])
def test_a_round_starts_with_the_last_upload_of_the_one_before(finished, method):
    rounds: dict[int, list[float]] = {}
    arrived: dict[int, list[float]] = {}
    current = {}
    for row in events(finished(method)):
        if row["kind"] == "trigger":
            rounds.setdefault(row["round"], []).append(row["time"])
            current[row["device"]] = row["round"]
        if row["kind"] == "upload":
            arrived.setdefault(current[row["device"]], []).append(row["time"])
    assert len(rounds) >= 3
    assert list(rounds) == list(range(1, len(rounds) + 1))
    for number, starts in rounds.items():
        assert len(starts) == 3
        assert set(starts) == {0.0 if number == 1 else max(arrived[number - 1])}


# ---- losses


@pytest.mark.parametrize("method", ["fedasmu", "fedssmu", "fedavg"])
@pytest.mark.parametrize(
    "trouble",
    [{"loss": 0.4}, {"on_seconds": 12.0, "off_seconds": 6.0}, {"loss": 0.3, "on_seconds": 30.0, "off_seconds": 9.0}],
)
def test_lost_uploads_and_leaving_devices_never_stop_a_run(federate, tmp_path, method, trouble):
    result = federate(method, fleet=trouble).run(160, out=tmp_path / "run")
    rows = events(result)
    assert result.summary["status"] == "finished"
    assert result.summary["lost"] > 3
    assert max(row["time"] for row in rows if row["kind"] == "trigger") > 120
    reasons = {row["reason"] for row in rows if row["kind"] == "lost"}
    causes = {"upload lost": "loss" in trouble, "device left": "on_seconds" in trouble}
    assert reasons == {reason for reason, present in causes.items() if present}
    passes_audit(result)


def test_a_device_that_left_is_not_triggered_before_it_returns(federate, tmp_path):
    federation = federate("fedasmu", fleet={"on_seconds": 12.0, "off_seconds": 12.0})
    result = federation.run(80, out=tmp_path / "run")
    triggers = events(result, "trigger")
    assert len(triggers) > 10
    assert all(federation.fleet.available(row["device"], row["time"]) for row in triggers)


def test_a_round_with_all_uploads_lost_counts_and_keeps_the_model(federate, tmp_path):
    federation = federate("fedavg", fleet=fleet_of(*[5.0] * 8, loss=1.0))
    result = federation.run(60, out=tmp_path / "run")
    aggregates = events(result, "aggregate")
    assert len(aggregates) > 2
    assert [row["version"] for row in aggregates] == list(range(1, len(aggregates) + 1))
    assert {(row["alpha"], row["update_norm"], tuple(row["contributions"])) for row in aggregates} == {(0.0, 0.0, ())}
    untouched = federate("fedavg").run(0.001, out=tmp_path / "untouched")
    assert result.summary["weights_sha256"] == untouched.summary["weights_sha256"]
    passes_audit(result)


def test_the_store_keeps_only_versions_in_flight(federate, tmp_path, monkeypatch):
    from freshet.sim.driver import Simulation

    kept: list[Simulation] = []
    original = Simulation.run
    monkeypatch.setattr(Simulation, "run", lambda self, *given: kept.append(self) or original(self, *given))
    federate("fedasmu", fleet={"loss": 0.3}).run(80, out=tmp_path / "run")
    server = kept[0].server
    trips = server.active_trips.values()
    needed = {trip.base for trip in trips} | {sent.version for trip in trips for sent in trip.sent}
    assert {version for version, _, _ in server.store.items()} == needed | {server.version}


# ---- deferred training


@pytest.fixture
def eager(monkeypatch):
    """Every training is computed when it is submitted."""
    original = executor.LazyFuture.__init__

    def compute_now(self, compute):
        original(self, compute)
        self.result()

    monkeypatch.setattr(executor.LazyFuture, "__init__", compute_now)


TROUBLE = {
    "discards": ({"name": "fedasmu", "tau_max": 3}, {}),
    "losses": ("fedasmu", {"loss": 0.3, "on_seconds": 20.0, "off_seconds": 8.0}),
    "rounds with losses": ("fedssmu", {"loss": 0.3, "on_seconds": 20.0, "off_seconds": 8.0}),
}


@pytest.fixture(scope="module", params=TROUBLE)
def lazy_run(request, federate, tmp_path_factory) -> tuple[Any, dict[str, Any], Result]:
    method, fleet = TROUBLE[request.param]
    return method, fleet, federate(method, fleet=fleet).run(80, out=tmp_path_factory.mktemp("lazy") / "run")


def test_training_that_is_never_computed_does_not_matter(lazy_run, federate, tmp_path, eager):
    method, fleet, lazy = lazy_run
    result = federate(method, fleet=fleet).run(80, out=tmp_path / "run")
    read = [(r.directory / "events.jsonl").read_bytes() for r in (lazy, result)]
    assert read[0] == read[1]
    assert lazy.summary["weights_sha256"] == result.summary["weights_sha256"]


def test_discards_change_neither_version_nor_model(federate, tmp_path):
    result = federate({"name": "fedasmu", "tau_max": 2}).run(60, out=tmp_path / "run")
    summary = result.summary
    assert summary["discards"] > 5
    assert summary["versions"] == 1 + summary["aggregations"]
    assert summary["uploads"] == summary["aggregations"] + summary["discards"]
    version = 1
    for row in events(result):
        if row["kind"] == "discard":
            assert row["version"] == version
            assert row["staleness"] == version - row["base"] + 1 > 2
            assert row["reason"]
        version += row["kind"] == "aggregate"
    passes_audit(result)


def test_discarded_uploads_leave_the_model_unchanged(federate, tmp_path):
    """tau_max 1: only the first upload counts; all later ones of the same trigger are too stale."""
    run = {"per_round": 8, "in_flight": 8, "period": 1000.0}
    result = federate({"name": "fedasmu", "tau_max": 1}, run=run).run(60, out=tmp_path / "run")
    assert (result.summary["aggregations"], result.summary["discards"]) == (1, 7)
    only = federate({"name": "fedasmu", "tau_max": 1}, run=run).run(
        events(result, "aggregate")[0]["time"], out=tmp_path / "only"
    )
    assert only.summary["weights_sha256"] == result.summary["weights_sha256"]


def test_a_diverging_trip_is_rejected_and_the_run_continues(federate, tmp_path):
    result = federate("fedasmu", training={"lr": 1e38, "lr_decay": 1.0}).run(30, out=tmp_path / "run")
    assert result.summary["status"] == "finished"
    assert result.summary["aggregations"] == 0
    assert result.summary["rejected"] == result.summary["uploads"] > 3
    assert all(row["reason"] for row in events(result, "rejected"))
    passes_audit(result)


@pytest.mark.parametrize(
    "options",
    [
        {"sigma0": -300.0},
        {"mu_alpha": 1e200, "lambda0": 1e200},
        {"mu_alpha": 1e300, "lambda0": 1e300, "dynamic_server": False},
        {"eta_lambda": 1e200, "eta_sigma": 1e200, "eta_iota": 1e200},
        {"eta_gamma": 1e200, "eta_upsilon": 1e200, "gamma0": 1e200, "mu_beta": 1e200},
    ],
    ids=json.dumps,
)
def test_extreme_controls_neither_put_a_nan_into_the_model_nor_stop_the_run(federate, tmp_path, options):
    result = federate({"name": "fedasmu"} | options).run(40, out=tmp_path / "run")
    assert result.summary["status"] == "finished"
    assert np.isfinite(result.weights).all()
    assert all(0.0 < row["alpha"] <= 1.0 for row in events(result, "aggregate"))
    passes_audit(result)

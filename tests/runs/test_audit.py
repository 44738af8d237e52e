"""The audit passes what a run wrote and names the first line that somebody changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.runs.audit import Audit, audit
from freshet.runs.reader import RunDirectory
from freshet.sim.fleet import Fleet

Events = list[dict[str, Any]]


@pytest.fixture
def tampered(finished, tmp_path) -> Callable[[str, Callable[[Events], Any]], Audit]:
    """The audit of a copy of a finished run, after somebody had their way with its events."""

    def check(method: str, change: Callable[[Events], Any]) -> Audit:
        source = finished(method).directory
        events = [json.loads(line) for line in (source / "events.jsonl").read_text().splitlines()]
        change(events)
        (tmp_path / "config.toml").write_bytes((source / "config.toml").read_bytes())
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return audit(RunDirectory(tmp_path))

    return check


def last(events: Events, kind: str, **wanted: Any) -> dict[str, Any]:
    return [e for e in events if e["kind"] == kind and all(e.get(k) == v for k, v in wanted.items())][-1]


@pytest.mark.parametrize(
    "method", ["fedasmu", "fedssmu", "fedavg", "fedasmu-da", "fedasmu-fa", "fedasmu-0", "fedssmu-0"]
)
def test_the_log_of_a_run_passes(finished, method):
    found = audit(RunDirectory(finished(method).directory))
    assert found.problem is None
    summary = finished(method).summary
    assert (found.aggregations, found.merges) == (summary["aggregations"], summary["merges"])
    assert found.aggregations > 1


@pytest.mark.parametrize("equations", ["corrected", "published"])
@pytest.mark.parametrize("apply", ["mix", "progress"])
@pytest.mark.parametrize("name", ["fedasmu", "fedssmu"])
def test_every_reading_of_the_equations_passes(federate, tmp_path, name, equations, apply):
    options = {"name": name, "equations": equations, "apply": apply}
    result = federate(options).run(60, out=tmp_path / "run")
    found = audit(RunDirectory(result.directory))
    assert found.problem is None
    assert found.aggregations > 3


def test_an_untouched_copy_passes(tampered):
    assert tampered("fedasmu", lambda events: None).passed


@pytest.mark.parametrize("up", [1e4, np.inf])
def test_a_download_that_takes_no_time_passes(federate, tmp_path, up):
    fleet = Fleet(np.linspace(1.0, 5.0, 8), up_rate=up, down_rate=np.inf)
    federate("fedasmu", fleet=fleet, run={"trigger": "concurrency"}).run(40, out=tmp_path / "run")
    found = audit(RunDirectory(tmp_path / "run"))
    assert found.problem is None and found.merges > 3


AGGREGATE = "version alpha lambda sigma iota xi beta n1"
CONTRIBUTION = "device base staleness weight"
ADAPTED = "q p s_p xi_p lambda_p sigma_p grad_lambda grad_sigma grad_iota"
MERGE = "fresh phi beta gamma upsilon gamma_after upsilon_after q loss_before loss_after reward"


@pytest.mark.parametrize("method", ["fedasmu", "fedssmu"])
@pytest.mark.parametrize(
    ("kind", "key"),
    [("aggregate", k) for k in f"{AGGREGATE} {CONTRIBUTION} {ADAPTED}".split()] + [("merge", k) for k in MERGE.split()],
)
def test_a_changed_number_is_found_on_its_line(tampered, method, kind, key):
    line = []

    def change(events):
        event = last(events, kind, adapted=True) if kind == "aggregate" else last(events, kind)
        where = event["contributions"][0] if key in CONTRIBUTION.split() else event
        assert key in where
        whole = isinstance(where[key], int) or key == "q"  # q moves a control by q times a small rate
        where[key] += 1 if whole else 1e-6 * (1 + abs(where[key]))
        line.append(event["seq"])

    found = tampered(method, change)
    assert not found.passed
    assert f"line {line[0]} ({kind})" in found.problem


def test_a_number_of_an_earlier_line_is_found_on_that_line(tampered):
    def change(events):
        first = next(e for e in events if e["kind"] == "aggregate")
        first["alpha"] *= 1.000001

    found = tampered("fedasmu", change)
    assert "(aggregate): alpha" in found.problem


def test_a_changed_weight_of_fedavg_is_found(tampered):
    def change(events):
        last(events, "aggregate")["contributions"][0]["weight"] += 1e-6

    found = tampered("fedavg", change)
    assert "weight of device" in found.problem


def test_a_changed_adapted_flag_is_found(tampered):
    assert not tampered("fedasmu", lambda events: last(events, "aggregate", adapted=True).update(adapted=False)).passed


def test_time_that_goes_back_is_found(tampered):
    found = tampered("fedasmu", lambda events: events[40].update(time=events[39]["time"] - 1e-6))
    assert "line 41" in found.problem and "time" in found.problem


def test_a_removed_line_is_found(tampered):
    found = tampered("fedasmu", lambda events: events.pop(30))
    assert "line 31" in found.problem


def test_a_removed_line_is_found_even_when_the_rest_is_renumbered(tampered):
    def change(events):
        events.remove(next(e for e in events if e["kind"] == "aggregate"))
        for number, event in enumerate(events, 1):
            event["seq"] = number

    assert not tampered("fedasmu", change).passed


def test_swapped_lines_are_found(tampered):
    def change(events):
        events[30], events[31] = events[31], events[30]

    assert "line 31" in tampered("fedasmu", change).problem


def test_an_upload_without_a_trip_is_found(tampered):
    def change(events):
        upload = last(events, "upload")
        upload["trip"] += 1

    assert "no such trip" in tampered("fedasmu", change).problem


def test_a_merge_that_takes_no_time_is_found(tampered):
    """Between the answer and the merge lies a download; a log in which it took none is not causal."""

    def change(events):
        merge = next(e for e in events if e["kind"] == "merge")
        place = next(
            i
            for i, e in enumerate(events)
            if e["kind"] == "request" and e["trip"] == merge["trip"] and e["device"] == merge["device"]
        )
        events.remove(merge)
        events.insert(place + 1, merge | {"time": events[place]["time"]})
        for number, event in enumerate(events, 1):
            event["seq"] = number

    assert not tampered("fedasmu", change).passed


def test_a_flag_does_not_switch_the_audit_off(tampered):
    """Only the merge of a trip that diverged has numbers that cannot be checked."""

    def change(events):
        last(events, "aggregate").update(alpha=0.5, diverged=True)

    assert not tampered("fedasmu", change).passed


def test_an_aggregation_without_an_upload_is_found(tampered):
    def change(events):
        aggregate = next(e for e in events if e["kind"] == "aggregate" and not e["adapted"])
        others = {e["device"] for e in events if e["kind"] == "aggregate"}
        aggregate["device"] = next(d for d in range(1000, 2000) if d not in others)

    assert not tampered("fedasmu", change).passed


@pytest.mark.parametrize(
    "change",
    [
        lambda events: events[20].pop("kind"),
        lambda events: events[20].pop("seq"),
        lambda events: events[20].update(time=None),
        lambda events: events[20].update(time="late"),
        lambda events: events[20].update(kind=["aggregate"]),
        lambda events: last(events, "aggregate").update(alpha=None),
        lambda events: last(events, "aggregate").update(alpha="0.5"),
        lambda events: last(events, "aggregate")["contributions"][0].update(base={}),
        lambda events: last(events, "aggregate")["contributions"][0].pop("weight"),
        lambda events: last(events, "aggregate").update(contributions=None),
        lambda events: last(events, "aggregate").update(contributions=[]),
        lambda events: last(events, "aggregate").update(contributions=[7]),
        lambda events: last(events, "aggregate").pop("contributions"),
        lambda events: last(events, "aggregate").pop("xi"),
        lambda events: last(events, "aggregate").update(version=10**400),
        lambda events: last(events, "merge").update(device=[1]),
        lambda events: last(events, "merge").update(fresh=None),
        lambda events: last(events, "merge").pop("q"),
    ],
)
def test_malformed_events_give_a_sentence(tampered, change):
    found = tampered("fedasmu", change)
    assert not found.passed
    assert found.problem.startswith("events.jsonl, line ")
    assert "\n" not in found.problem


@pytest.mark.parametrize("method", ["fedasmu", "fedavg"])
def test_a_contribution_without_an_upload_is_found(tampered, method):
    """Even where its weight is that of the device whose name it took away."""

    def change(events):
        last(events, "aggregate")["contributions"][0]["device"] = 1000

    assert "has not uploaded" in tampered(method, change).problem


def test_a_repeated_verdict_is_found(tampered):
    def change(events):
        place = next(i for i, e in enumerate(events) if e["kind"] == "aggregate")
        who = {key: events[place][key] for key in ("time", "device", "trip")}
        events.insert(place + 1, {"kind": "rejected", "reason": "no"} | who)
        for number, event in enumerate(events, 1):
            event["seq"] = number

    assert "(rejected): device" in tampered("fedasmu", change).problem


def test_a_contribution_that_counts_twice_is_found(tampered):
    def change(events):
        parts = last(events, "aggregate")["contributions"]
        parts[1].update(device=parts[0]["device"])

    assert "has not uploaded" in tampered("fedavg", change).problem


def test_unknown_kinds_are_skipped_and_counted(tampered):
    def change(events):
        events[20:20] = [{"kind": "weather", "time": events[20]["time"], "sky": "grey"}] * 2
        events.append({"kind": "x" * 100, "time": events[-1]["time"]})
        for number, event in enumerate(events, 1):
            events[number - 1] = event | {"seq": number}

    found = tampered("fedasmu", change)
    assert found.problem is None
    assert found.unknown == {"weather": 2, "x" * 40: 1}


def test_an_unknown_kind_does_not_hide_a_gap(tampered):
    found = tampered("fedasmu", lambda events: events[20].update(kind="weather", seq=99))
    assert "line 21 (weather): seq is 99" in found.problem


def test_the_audit_uses_the_configuration_of_the_run(finished, tmp_path):
    source: Path = finished("fedasmu").directory
    (tmp_path / "events.jsonl").write_bytes((source / "events.jsonl").read_bytes())
    config = (source / "config.toml").read_text()
    assert "mu_alpha = 1.0" in config
    (tmp_path / "config.toml").write_text(config.replace("mu_alpha = 1.0", "mu_alpha = 1.5"))
    assert "alpha" in audit(RunDirectory(tmp_path)).problem

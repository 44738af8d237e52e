"""The run directory: documented keys, exact floats, complete files, the same bits from the same seed; its observers."""

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from freshet import ConfigError, Observer
from freshet.core.events import Aggregated, Contribution, Triggered, Uploaded
from freshet.files import write_atomically
from freshet.runs import writer
from freshet.runs.reader import RunDirectory
from freshet.runs.records import json_safe
from freshet.runs.writer import RunWriter, check_observers
from tests.conftest import exploring

METHODS = ["fedasmu", "fedssmu", "fedavg"]
EVERY = "seq time kind"
AGGREGATE = "version contributions alpha update_norm"
CONTRIBUTION = {"device", "base", "staleness", "weight"}
ASMU = "lambda sigma iota xi adapted device beta n1"
ADAPTED = "gap product q p s_p xi_p lambda_p sigma_p grad_lambda grad_sigma grad_iota"
MERGE = "device base fresh phi beta gamma upsilon gamma_after upsilon_after q loss_before loss_after reward slot n1"
SUMMARY = (
    "method seed final_accuracy best_accuracy virtual_time aggregations uploads discards bytes_up bytes_down"
    " weights_sha256 status"
)
FEDASMU = (
    "eta_lambda eta_sigma eta_iota eta_gamma eta_upsilon eta_rl mu_alpha mu_beta lambda0 sigma0 iota0 gamma0 upsilon0"
    " tau_max xi_min epsilon phi_q psi rho slot equations dynamic_server adaptive_device"
)


def expected_keys(event: dict, method: str) -> set[str]:
    more = {
        "aggregate": AGGREGATE,
        "merge": MERGE,
        "trigger": "device trip version epochs lr",
        "request": "device trip base version slot slot_by fresh",
        "hurry": "device trip",
        "upload": "device trip base version bytes",
        "discard": "device reason",
        "rejected": "device reason",
        "lost": "device reason",
        "evaluate": "version accuracy loss",
        "note": "about",
    }[event["kind"]]
    keys = f"{EVERY} {more}"
    if event["kind"] == "aggregate" and method != "fedavg":
        keys += f" {ASMU}" + (f" {ADAPTED}" if event["adapted"] else "")
    if event.get("about") == "slots":
        keys += " probabilities first_trips b"
    if event["kind"] in ("aggregate", "merge") and method == "fedssmu":
        keys += " round k"
    return set(keys.split())


def rows(directory: Path, name: str = "events.jsonl") -> list[dict]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


@pytest.mark.parametrize("method", METHODS)
def test_every_line_is_an_object_with_the_keys_of_its_kind(finished, method):
    kinds = set()
    for event in rows(finished(method).directory):
        assert expected_keys(event, method) <= set(event), event
        assert all(set(part) == CONTRIBUTION for part in event.get("contributions", []))
        kinds.add(event["kind"])
    assert kinds >= {"trigger", "upload", "aggregate", "evaluate"}
    assert ({"request", "merge"} <= kinds) == (method != "fedavg")


def test_discard_rejected_and_lost_name_their_reason(federate, tmp_path):
    trouble = {"loss": 0.3, "on_seconds": 25.0, "off_seconds": 6.0}
    late = federate({"name": "fedasmu", "tau_max": 2}, fleet=trouble).run(60, out=tmp_path / "late")
    wild = federate("fedasmu", training={"lr": 1e38}).run(30, out=tmp_path / "wild")
    events = rows(late.directory) + rows(wild.directory)
    for kind in ("discard", "rejected", "lost"):
        chosen = [event for event in events if event["kind"] == kind]
        assert chosen, kind
        assert all(expected_keys(event, "fedasmu") <= set(event) and event["reason"] for event in chosen)


@pytest.mark.parametrize("method", ["fedasmu", "fedssmu"])
def test_logged_values_mean_what_the_page_says(finished, method):
    events = rows(finished(method).directory)
    aggregates = [e for e in events if e["kind"] == "aggregate"]
    assert {e["adapted"] for e in aggregates} == {True, False}
    for event in aggregates:
        (part,) = event["contributions"]
        assert (part["device"], part["weight"]) == (event["device"], event["alpha"]) and 0 < event["alpha"] < 1
        assert part["staleness"] == event["version"] - part["base"] + 1
        assert method != "fedssmu" or event["k"] == part["staleness"] - 1
    slots = {e["slot_by"] for e in events if e["kind"] == "request"}
    assert slots and slots <= {"meta", "q", "explore", "fixed"}


@pytest.mark.parametrize("method", METHODS)
def test_the_summary_has_its_keys_and_agrees_with_the_log(finished, method):
    result = finished(method)
    summary = json.loads((result.directory / "summary.json").read_text())
    assert set(SUMMARY.split()) <= set(summary)
    events = rows(result.directory)
    count = {kind: sum(e["kind"] == kind for e in events) for kind in ("aggregate", "upload", "discard")}
    assert (summary["aggregations"], summary["uploads"], summary["discards"]) == tuple(count.values())
    tested = [e["accuracy"] for e in events if e["kind"] == "evaluate"]
    assert (summary["final_accuracy"], summary["best_accuracy"]) == (tested[-1], max(tested))
    assert (summary["method"], summary["seed"], summary["status"]) == (method, 0, "finished")
    assert summary["virtual_time"] == 60.0


def test_the_hash_is_of_the_final_flat_float32_vector(finished):
    result = finished("fedasmu")
    assert result.weights.dtype == np.float32
    digest = hashlib.sha256(result.weights.tobytes()).hexdigest()
    assert result.summary["weights_sha256"] == digest
    saved = load_file(result.directory / "model.safetensors")
    flat = np.concatenate([saved["1.weight"].reshape(-1), saved["1.bias"]])
    np.testing.assert_array_equal(flat, result.weights)


def test_metrics_are_the_evaluations(finished):
    directory = finished("fedasmu").directory
    tests = [e for e in rows(directory) if e["kind"] == "evaluate"]
    metrics = rows(directory, "metrics.jsonl")
    assert [e["time"] for e in tests] == [0.0, 20.0, 40.0, 60.0]
    for test, metric in zip(tests, metrics, strict=True):
        assert all(test[key] == metric[key] for key in ("time", "version", "accuracy", "loss"))


@pytest.mark.parametrize("method", METHODS)
def test_config_holds_every_value_in_the_six_sections(finished, method):
    config = tomllib.loads((finished(method).directory / "config.toml").read_text())
    assert {"method", "training", "fleet", "data", "model", "run"} <= set(config)
    assert config["method"]["name"] == method
    if method != "fedavg":
        assert set(FEDASMU.split()) <= set(config["method"])
    assert {"epochs", "batch_size", "lr", "lr_decay", "momentum", "weight_decay"} <= set(config["training"])
    assert {"seed", "until", "trigger", "per_round", "period", "in_flight"} <= set(config["run"])
    assert config["run"]["until"] == 60.0


@settings(deadline=None, max_examples=100)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_comes_back_bit_for_bit(value):
    assert np.float64(tomllib.loads(tomli_w.dumps({"x": value}))["x"]).tobytes() == np.float64(value).tobytes()
    assert np.float64(json.loads(json.dumps(json_safe({"x": value})))["x"]).tobytes() == np.float64(value).tobytes()


def test_floats_of_the_configuration_come_back_bit_for_bit(federate, tmp_path):
    odd = {"lambda0": 0.1 + 0.2, "sigma0": 1e-310, "eta_lambda": 1 / 3, "mu_alpha": 123456789.000000001}
    result = federate({"name": "fedasmu"} | odd, training={"lr": 1 / 7}).run(1, out=tmp_path / "run")
    config = RunDirectory(result.directory).config()
    assert {key: config["method"][key] for key in odd} == odd
    assert config["training"]["lr"] == 1 / 7


def test_observers_see_events_as_they_are_on_disk(federate, tmp_path):
    class Keep(Observer):
        def __init__(self):
            self.events = []

        def on_event(self, event):
            self.events.append(event)

    keep = Keep()
    result = federate("fedasmu").run(20, out=tmp_path / "run", observers=[keep])
    assert keep.events == rows(result.directory)


def test_events_written_together_equal_events_written_one_by_one(tmp_path):
    happened = [
        Triggered(3, 1, 9, 5, 0.1),
        Uploaded(3, 1, 9, 9, 32),
        Aggregated(9, 0.5, (Contribution(3, 9, 1, 1.0),), 3, 1, None, {"alpha": 1 / 3}),
    ]
    logs = []
    for name, groups, observers in (
        ("one by one", [[event] for event in happened], []),
        ("together", [happened], []),
        ("watched", [happened], [Observer()]),
    ):
        (tmp_path / name).mkdir()
        log = RunWriter(tmp_path / name, observers)
        for group in groups:
            log.events(0.1, group)
        log.event(0.2, happened[0])
        log.flush()
        logs.append((log.seq, (tmp_path / name / "events.jsonl").read_bytes()))
    assert logs[0] == logs[1] == logs[2]
    assert [json.loads(line)["seq"] for line in logs[0][1].splitlines()] == [1, 2, 3, 4]


def test_a_number_that_is_not_finite_becomes_null():
    values = {"a": [float("nan"), 1.5, (float("inf"),)], "b": {"c": -float("inf")}, "d": "nan"}
    assert json_safe(values) == {"a": [None, 1.5, [None]], "b": {"c": None}, "d": "nan"}


# ---- the same bits


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(finished, federate, tmp_path, method):
    again = federate(exploring(method)).run(60, out=tmp_path / "again")
    other = federate(exploring(method), seed=1).run(60, out=tmp_path / "other")
    files = [(r.directory / "events.jsonl").read_bytes() for r in (finished(method), again, other)]
    hashes = [r.summary["weights_sha256"] for r in (finished(method), again, other)]
    assert (files[0], hashes[0]) == (files[1], hashes[1])
    assert files[0] != files[2]
    assert hashes[0] != hashes[2]


def test_a_federation_can_be_run_twice(federate, tmp_path):
    federation = federate("fedasmu", fleet={"on_seconds": 20.0, "off_seconds": 5.0})
    one, two = (federation.run(30, out=tmp_path / name) for name in ("one", "two"))
    assert one.summary["weights_sha256"] == two.summary["weights_sha256"]


# ---- whole files


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_atomically(path, b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(writer.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_bytes() == b"old"


def test_a_failed_first_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(writer.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError):
        write_atomically(tmp_path / "config.toml", b"new")
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_leaves_no_temporary_files(finished):
    directory = finished("fedasmu").directory
    files = {"config.toml", "world.json", "events.jsonl", "metrics.jsonl", "summary.json", "model.safetensors"}
    assert {path.name for path in directory.iterdir()} == files | {"checkpoint"}
    assert len(list((directory / "checkpoint").iterdir())) == 1, "the last one, for a later end"


def test_a_run_that_fails_in_the_middle_leaves_a_log_that_adds_up(federate, tmp_path):
    from freshet.runs.audit import audit

    class Bomb(Observer):
        def on_progress(self, time):
            if time > 30:
                raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        federate("fedasmu").run(60, out=tmp_path / "run", observers=[Bomb()])
    run = RunDirectory(tmp_path / "run")
    assert run.summary()["status"] == "failed"
    assert audit(run).problem is None


# ---- observers


class Halfway:
    def on_event(self, event: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([print], "observers: <built-in function print> has no on_event; derive its class from freshet.Observer"),
        ([Observer(), Halfway()], "has no on_metrics; derive its class from freshet.Observer"),
        ([Observer], "observers: Observer is a class; give an object, Observer()"),
        (Observer(), "observers: must be a list, as in observers=[Mine()], but <"),
        (print, "observers: must be a list"),
    ],
)
def test_an_invalid_observer_is_refused_before_anything_is_written(given, sentence, federate, tmp_path):
    with pytest.raises(ConfigError) as told:
        federate("fedavg").run(10, out=tmp_path / "run", observers=given)
    assert sentence in str(told.value) and "\n" not in str(told.value)


def test_an_invalid_observer_leaves_no_default_folder(federate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="observers"):
        federate("fedavg").run(10, observers=[print])
    assert not list(tmp_path.glob("runs/*"))
    assert not (tmp_path / "run").exists()
    federate("fedavg").run(10, out=tmp_path / "run")


def test_a_resume_refuses_an_invalid_observer_and_changes_nothing(federate, tmp_path):
    federate("fedavg", run={"keep_checkpoint": True}).run(10, out=tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match="has no on_event"):
        federate("fedavg", run={"keep_checkpoint": True}).resume(tmp_path / "run", until=20, observers=[print])
    after = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert after == before


def test_any_object_with_the_methods_is_an_observer():
    class Mine(Observer):
        pass

    both = (Mine(), Mock())
    assert check_observers(both) == list(both) == check_observers(iter(both))  # type: ignore[arg-type]

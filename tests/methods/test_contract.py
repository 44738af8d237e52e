"""The contract between method and server: typed verdicts, named contributions, no reserved keys."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.core.events import Aggregated, Noted
from freshet.core.messages import Merge, Request, Slot, Upload
from freshet.core.method import MethodContext, Mismatch
from freshet.core.server import Server
from freshet.errors import RunError
from freshet.methods.asofed import ASOFed
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.optimisers import constant
from tests.methods import contract_methods
from tests.methods.helpers import LAYOUT, REPORTS, SYNCHRONOUS, fly, hold_round, logged, same, send, server_of, vector


def served(method: type[contract_methods.Half]) -> Server:
    context = MethodContext(4, np.full(4, 10, np.int64), 2, 2, LAYOUT, seed=3)
    return Server(method(method.Options(), context), context, vector(1), constant(0.1))


# ---- methods of one's own


@pytest.mark.parametrize("name", [name for name in contract_methods.SENTENCES if name != "MergesNothing"])
def test_invalid_verdict_gives_one_sentence_and_keeps_the_model(name: str) -> None:
    server = served(getattr(contract_methods, name))
    w0, version = server.weights.copy(), server.version
    with pytest.raises(RunError) as caught:
        fly(server, 0, vector(2))
    assert str(caught.value).startswith(contract_methods.SENTENCES[name])
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)
    same(server.weights, w0)
    assert server.version == version


@pytest.mark.parametrize("name", ["GivesNone", "NamesNobody", "MergesNothing"])
def test_run_with_an_invalid_verdict_fails_with_that_sentence(federate: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError) as caught:
        federate(f"{contract_methods.__name__}:{name}").run(60, out=tmp_path / "run")
    assert str(caught.value).startswith(contract_methods.SENTENCES[name])
    assert RunDirectory(tmp_path / "run").summary()["status"] == "failed"


def test_reject_is_no_aggregation_and_consumes_no_upload() -> None:
    server = served(contract_methods.Picky)
    w0 = server.weights.copy()
    (event,) = fly(server, 1, vector(2))
    assert event == {"kind": "rejected", "reason": "odd", "device": 1, "trip": 1}
    same(server.weights, w0)
    assert (server.version, server.consumed, server.active_trips) == (1, 0, {})
    (event,) = fly(server, 0, vector(2))
    assert (event["kind"], server.version, server.consumed) == ("aggregate", 2, 1)


def test_run_counts_rejections_and_passes_the_audit(federate: Any, tmp_path: Path) -> None:
    result = federate(f"{contract_methods.__name__}:Picky").run(60, out=tmp_path / "run")
    events = list(RunDirectory(result.directory).events())
    refused = [e for e in events if e["kind"] == "rejected"]
    assert {e["reason"] for e in refused} == {"odd"} and all(e["device"] % 2 for e in refused)
    assert result.summary["rejected"] == len(refused) > 0
    assert result.summary["uploads"] == len(refused) + result.summary["aggregations"]
    found = audit(RunDirectory(result.directory))
    assert (found.problem, found.audited) == (None, False)


def test_method_may_add_notes_to_the_log(federate: Any, tmp_path: Path) -> None:
    server = served(contract_methods.Talkative)
    server.trigger([0])
    aggregate, note = server.upload(Upload(0, 1, 1, vector(2), 1))
    assert isinstance(aggregate, Aggregated)
    assert note == Noted("weather", {"degrees": 21.5})
    result = federate(f"{contract_methods.__name__}:Talkative").run(30, out=tmp_path / "run")
    notes = [e for e in RunDirectory(result.directory).events() if e["kind"] == "note"]
    assert len(notes) == result.summary["aggregations"] > 0
    assert {(e["about"], e["degrees"]) for e in notes} == {("weather", 21.5)}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_round_without_uploads_may_have_no_contributions(name: str) -> None:
    server = server_of(name)
    w0 = server.weights
    server.trigger([0, 1])
    server.drop_trip(0, 1, "gone")
    _, event = server.drop_trip(1, 1, "gone")
    assert isinstance(event, Aggregated)
    assert (event.contributions, event.update_norm, server.version) == ((), 0.0, 2)
    same(server.weights, w0)
    hold_round(server, {0: vector(2)})
    assert server.version == 3


# ---- what devices say cannot pass for what the server says

FORGED = {"kind": 3, "version": 99, "device": 7, "trip": 8, "update_norm": -1.0, "contributions": 5, "alpha": 0.9}
FORGED |= {"samples": 1e9, "total": 1.0, "seq": 4, "time": 1e9}


def test_asofed_report_cannot_replace_server_numbers() -> None:
    honest, lying = server_of("asofed"), server_of("asofed")
    (true,) = fly(honest, 0, vector(2))
    lying.trigger([0])
    (event,) = logged(lying.upload(Upload(0, 1, 1, vector(2), 1, REPORTS["asofed"] | FORGED)))
    assert event == true
    assert (event["kind"], event["version"], event["device"], event["samples"]) == ("aggregate", 1, 0, 10)
    assert {"seq", "time"}.isdisjoint(event)


@pytest.mark.parametrize("report", [{"r": 1.0}, {"seconds": 0.0}, {"x": 1.0}])
def test_asofed_rejects_a_device_that_does_not_report_its_rate(report: dict[str, float]) -> None:
    server = server_of("asofed")
    server.trigger([0])
    (event,) = send(server, 0, vector(2), **report)
    assert (event["kind"], event["reason"]) == ("rejected", "does not report its r and its seconds")


def test_asofed_audit_finds_a_rate_that_contradicts_the_times() -> None:
    server = server_of("asofed")
    server.trigger([0])
    (event,) = server.upload(Upload(0, 1, 1, vector(2), 1, {"r": 3.0, "seconds": 0.0}))
    memory: dict[Any, Any] = {("trip", 0): (0.0, None)}
    with pytest.raises(Mismatch, match=r"^r is logged as 3\.0, the formula gives 1\.0$"):
        ASOFed.audit(server.method.options, event, 0.0, memory)


@pytest.mark.parametrize("name", ["device", "fresh", "round", "kind", "seq"])
def test_merge_numbers_cannot_use_keys_of_the_event(name: str) -> None:
    server = served(contract_methods.Half)
    server.trigger([0])
    fly(server, 1, vector(2))
    assert server.request(Request(0, 1, Slot(1, "fixed"))) is not None
    (event,) = server.upload(Upload(0, 1, 1, vector(3), 1, merges=(Merge(2, {name: 1, "beta": 0.5}),)))
    assert event.reason == f"reports a merge with ['{name}'], which are reserved keys of the event"


# ---- momentum and FedASMU's divisor


def reach(steps: int, momentum: float) -> float:
    """Return how far ``steps`` steps along a constant unit gradient lead, by taking them."""
    velocity = place = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0
        place += velocity
    return place


@pytest.mark.parametrize("name", ["fedasmu", "fedssmu"])
def test_log_holds_the_reach_with_momentum_and_passes_the_audit(federate: Any, tmp_path: Path, name: str) -> None:
    options = {"name": name, "selector": "shaped"}
    result = federate(options, training={"momentum": 0.9, "lr": 0.01}).run(80, out=tmp_path / "run")
    run = RunDirectory(result.directory)
    adapted = [e for e in run.events() if e["kind"] == "aggregate" and e["adapted"]]
    assert any(e["beta"] > 0 and e["n1"] > 0 for e in adapted), "some merged in mid-training"
    for event in adapted:
        before, whole = reach(event["n1"], 0.9), reach(event["steps"], 0.9)
        assert event["reach"] == pytest.approx([before, whole])
        assert whole > 2 * event["steps"]
        divisor = -event["lr"] * ((1 - event["beta"]) * before + (whole - before))
        assert event["q"] == pytest.approx(event["product"] / divisor)
    assert audit(run).problem is None
    lines = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("reach", None)  # as if these had been steps of plain SGD
    (run.directory / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    problem = audit(run).problem
    assert problem is not None and f"line {adapted[0]['seq']} (aggregate): q is logged" in problem


def test_log_holds_no_reach_without_momentum_or_as_printed(federate: Any, tmp_path: Path) -> None:
    for number, (method, momentum) in enumerate([("fedasmu", 0.0), ("fedasmu-published", 0.9)]):
        training = {"momentum": momentum, "lr": 0.01}
        run = RunDirectory(federate(method, training=training).run(60, out=tmp_path / str(number)).directory)
        adapted = [e for e in run.events() if e["kind"] == "aggregate" and e["adapted"]]
        assert adapted and not any("reach" in e for e in adapted)
        assert audit(run).problem is None

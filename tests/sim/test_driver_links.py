"""Runs with compressed links: bytes, times, resuming, executors, and every method."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freshet import Federation
from freshet.config import check_deployable
from freshet.errors import ConfigError
from freshet.methods import registry
from freshet.runs import checkpoint
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from tests.conftest import with_head
from tests.sim.helpers import Crash, CrashError, outputs

LINKS = {"down": "int8", "up": "topk", "keep": 0.2}
#: Bytes of the linear model of the small federation: 650 numbers.
WHOLE, INT8, TOPK = 4 * 650, 650 + 4 * 3, 8 * 130

Federate = Callable[..., Federation]
#: Seconds of methods with long trips: a larger network, or more epochs.
UNTIL = {"moon": 300.0, "fedsa": 120.0}


def events(directory: Path, kind: str) -> list[dict]:
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


@pytest.mark.parametrize("method", sorted(registry()))
def test_every_method_runs_with_compressed_links_and_passes_the_audit(
    method: str, federate: Federate, tmp_path: Path
) -> None:
    network = {"model": {"name": "digits", "head": True}} if method == "moon" else {}
    result = federate(method, links=LINKS, **network).run(UNTIL.get(method, 60.0), out=tmp_path / "run")
    assert result.summary["status"] == "finished" and result.summary["uploads"] > 3
    assert result.summary["rejected"] == 0
    found = audit(RunDirectory(tmp_path / "run"))
    assert found.passed, found.problem


def test_bytes_are_those_of_the_compressed_messages_and_times_follow(federate: Federate, tmp_path: Path) -> None:
    plain = federate("fedavg").run(60, out=tmp_path / "plain")
    thin = federate("fedavg", links=LINKS).run(60, out=tmp_path / "thin")
    assert {event["bytes"] for event in events(plain.directory, "upload")} == {WHOLE}
    assert {event["bytes"] for event in events(thin.directory, "upload")} == {TOPK}
    assert thin.summary["bytes_up"] == TOPK * thin.summary["uploads"]
    assert thin.summary["bytes_down"] == INT8 * thin.summary["trips"]
    first = {run: events(run.directory, "upload")[0]["time"] for run in (plain, thin)}
    saved = (WHOLE - INT8) * 8 / 0.02e6 + (WHOLE - TOPK) * 8 / 0.05e6
    assert first[plain] - first[thin] == pytest.approx(saved)


def test_fresh_models_are_compressed_too(federate: Federate, tmp_path: Path) -> None:
    result = federate("fedasmu", links=LINKS).run(120, out=tmp_path / "run")
    asked = events(result.directory, "request")
    answered = sum(event["fresh"] is not None for event in asked)
    assert answered > 3
    empty = 64 * (len(asked) - answered)
    assert result.summary["bytes_down"] == INT8 * (result.summary["trips"] + answered) + empty


@pytest.mark.parametrize("method", ["fedasmu", "fedssmu", "fedbuff", "scaffold", "moon"])
def test_a_crashed_run_resumes_with_the_same_bits(method: str, federate: Federate, tmp_path: Path) -> None:
    def made() -> Federation:
        network = {"model": {"name": "digits", "head": True}} if method == "moon" else {}
        fleet, run = {"loss": 0.1, "on_seconds": 100.0, "off_seconds": 20.0}, {"checkpoint_every": 7.0}
        return federate(method, links=LINKS | {"down": "topk"}, fleet=fleet, run=run, **network)

    until = UNTIL.get(method, 80.0)
    whole = made().run(until, out=tmp_path / "whole")
    total = len((whole.directory / "events.jsonl").read_bytes().splitlines())
    with pytest.raises(CrashError):
        made().run(until, out=tmp_path / "cut", observers=[Crash(total // 2)])
    with pytest.raises(CrashError):
        made().resume(tmp_path / "cut", observers=[Crash(total // 4)])
    made().resume(tmp_path / "cut")
    assert outputs(tmp_path / "cut") == outputs(whole.directory)


def test_worker_processes_give_the_same_bits(federate: Federate, tmp_path: Path) -> None:
    one = federate("fedasmu", links=LINKS, fleet={"loss": 0.1}).run(60, out=tmp_path / "one")
    run = {"executor": "processes", "workers": 2}
    two = federate("fedasmu", links=LINKS, fleet={"loss": 0.1}, run=run).run(60, out=tmp_path / "two")
    assert outputs(one.directory) == outputs(two.directory)


def test_a_deployment_takes_compressed_links(federate: Federate) -> None:
    check_deployable(federate("fedavg", links=LINKS).config)


# ---- fresh models in layers

LAYERS = {"fresh": "layers", "budget": 1000}
#: Layers of 1,040 and 170 numbers. Only the second fits into the budget: 4 bytes for its number, 680 for its entries.
SECOND = 4 + 4 * 170
REBASE = {"name": "fedasmu-course", "merge": "rebase", "slot": 2, "refresh": "every"}
PUSH = {"name": "fedasmu", "slot": "never", "push_after": 2}


@pytest.mark.parametrize("method", [{"name": "fedasmu", "slot": 2}, REBASE, PUSH], ids=["mix", "rebase", "push"])
@pytest.mark.parametrize("links", [LAYERS, LAYERS | LINKS], ids=["layers", "layers over int8"])
def test_layers_are_counted_in_bytes_logged_and_audited(
    method: dict[str, Any], links: dict[str, Any], federate: Federate, tmp_path: Path
) -> None:
    result = federate(method, links=links, model=with_head).run(80, out=tmp_path / "run")
    summary, notes = result.summary, [note for note in events(result.directory, "note") if "layers" in note]
    assert len(notes) >= summary["merges"] > 3 and summary["rejected"] == 0
    assert {tuple(note["layers"]) for note in notes} == {(1,)} and {note["bytes"] for note in notes} == {SECOND}
    asked = events(result.directory, "request")
    empty = 64 * sum(event["fresh"] is None for event in asked)
    first = 1210 + 4 * 5 if "down" in links else 4 * 1210
    assert summary["bytes_down"] == first * summary["trips"] + SECOND * len(notes) + empty
    found = audit(RunDirectory(result.directory))
    assert found.passed, found.problem


def test_the_audit_wants_to_know_which_layers_were_sent(federate: Federate, tmp_path: Path) -> None:
    method = {"name": "fedasmu", "slot": 2}
    result = federate(method, links=LAYERS, model=with_head).run(60, out=tmp_path / "run")
    log = result.directory / "events.jsonl"
    lines = log.read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if '"fresh layers"' in line)
    log.write_text(
        "\n".join([*lines[:place], lines[place].replace('"layers":[1]', '"layers":[0]'), *lines[place + 1 :]])
    )
    assert "have moved most within the budget" in str(audit(RunDirectory(result.directory)).problem)
    renumbered = [json.loads(line) for line in [*lines[:place], *lines[place + 1 :]]]
    log.write_text("\n".join(json.dumps(line | {"seq": seq}) for seq, line in enumerate(renumbered, 1)))
    assert "no line says which layers" in str(audit(RunDirectory(result.directory)).problem)


@pytest.mark.parametrize("links", [LAYERS, LAYERS | LINKS], ids=["layers", "layers over int8"])
def test_a_crashed_run_with_layers_resumes_with_the_same_bits(
    links: dict[str, Any], federate: Federate, tmp_path: Path
) -> None:
    def made(**run: Any) -> Federation:
        fleet = {"loss": 0.1, "on_seconds": 100.0, "off_seconds": 20.0}
        return federate(REBASE, links=links, model=with_head, fleet=fleet, run={"checkpoint_every": 7.0} | run)

    whole = made().run(60, out=tmp_path / "whole")
    total = len((whole.directory / "events.jsonl").read_bytes().splitlines())
    with pytest.raises(CrashError):
        made().run(60, out=tmp_path / "cut", observers=[Crash(total // 2)])
    made().resume(tmp_path / "cut")
    assert outputs(tmp_path / "cut") == outputs(whole.directory)


def test_a_budget_that_holds_no_layer_is_one_sentence(federate: Federate) -> None:
    federate("fedasmu", links=LAYERS | {"budget": SECOND}, model=with_head)
    with pytest.raises(ConfigError, match=r"links\.budget: .* the smallest needs 684 bytes"):
        federate("fedasmu", links=LAYERS | {"budget": SECOND - 1}, model=with_head)


def test_residuals_of_lost_uploads_do_not_count(federate: Federate, tmp_path: Path) -> None:
    """The next upload of a device contains what was kept before the lost one, as the device's memory shows."""
    fleet = {"loss": 0.5}
    result = federate("fedasync", links=LINKS, fleet=fleet, run={"checkpoint_every": 20.0}).run(
        60, out=tmp_path / "run"
    )
    lost = {(event["device"], event["trip"]) for event in events(result.directory, "lost")}
    tree = checkpoint.read(result.directory).tree
    taken = tree["coordinator"]["server"]["links"]["taken"]
    arrived = {(event["device"], event["trip"]) for event in events(result.directory, "aggregate")}
    assert lost and dict(taken) == {device: max(trip for d, trip in arrived if d == device) for device, _ in arrived}

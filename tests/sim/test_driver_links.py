"""Runs with compressed links: bytes, times, resuming, executors, and every method."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from freshet import Federation
from freshet.config import check_deployable
from freshet.errors import ConfigError
from freshet.methods import registry
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

from .helpers import Crash, CrashError, outputs

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


def test_a_deployment_rejects_compressed_links(federate: Federate) -> None:
    check_deployable(federate("fedavg").config)
    with pytest.raises(ConfigError, match="links: is for simulations"):
        check_deployable(federate("fedavg", links=LINKS).config)

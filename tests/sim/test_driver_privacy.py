"""Runs with noise on the devices: what they send, what is rejected, what is reported."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from freshet import Federation, LocalRule, Observer
from freshet.core.messages import Assignment, Fresh, Slot
from freshet.errors import ConfigError
from freshet.methods import class_and_preset, registry
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.trainer import TripInput

from .helpers import Crash, CrashError, outputs

Federate = Callable[..., Federation]
PRIVACY = {"clip": 0.5, "noise": 0.5}
#: FedASMU and FedSSMU without anything learned from losses.
STILL = {"slot": "h2", "eta_gamma": 0.0, "eta_upsilon": 0.0}
REJECTED = {"scaffold", "fedac", "masfl", "pisces"}


def options(method: str) -> dict:
    return {"name": method} | (STILL if method in ("fedasmu", "fedssmu") else {})


def network(method: str) -> dict:
    return {"model": {"name": "digits", "head": True}} if method == "moon" else {}


@pytest.mark.parametrize("method", sorted(set(registry()) - REJECTED))
def test_every_method_runs_with_noise_is_audited_and_reports_epsilon(
    method: str, federate: Federate, tmp_path: Path
) -> None:
    pytest.importorskip("dp_accounting")
    messages: list[str] = []

    class Listener(Observer):
        def on_message(self, message: str) -> None:
            messages.append(message)

    run = {"diverged": "continue", "evaluate_devices": "never"}
    made = federate(options(method), privacy=PRIVACY, run=run, **network(method))
    until = 300.0 if method == "moon" else 60.0
    result = made.run(until, out=tmp_path / "run", observers=[Listener()])
    found = audit(RunDirectory(tmp_path / "run"))
    assert found.passed, found.problem
    privacy = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]
    assert privacy["epsilon"] > 0 and result.summary["rejected"] == 0
    assert sum("epsilon is at most" in message for message in messages) == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "scaffold"}, "does not cover all that scaffold sends: it sends change beside the model"),
        ({"method": "fedac"}, "does not cover all that fedac sends: it sends change beside the model"),
        ({"method": "masfl"}, "does not cover all that masfl sends: it sends gradient beside the model"),
        ({"method": "pisces"}, "does not cover all that pisces sends: it reports its training loss"),
        ({"method": "fedasmu"}, "slots are learned from losses; set method.slot"),
        (
            {"method": {"name": "fedasmu", "slot": "h1"}},
            "beta is learned from losses; set method.beta, or method.eta_gamma and",
        ),
        ({"method": "fedavg", "run": {"evaluate_devices": "end"}}, "does not cover scores of the devices"),
        ({"method": "fedavg", "model": "resnet20"}, "does not cover running statistics"),
    ],
)
def test_what_the_noise_does_not_cover_is_rejected(given: dict, sentence: str, federate: Federate) -> None:
    data = {"name": "digits"}
    with pytest.raises(ConfigError, match=sentence):
        federate(privacy=PRIVACY, data=data, **given)


def test_ablations_without_requests_are_covered(federate: Federate) -> None:
    federate({"name": "fedasmu", "adaptive_device": False}, privacy=PRIVACY)
    federate({"name": "fedasmu"} | STILL | {"slot": "never"}, privacy=PRIVACY)


def test_a_custom_rule_with_requests_must_declare_that_it_leaks_nothing() -> None:
    class Asks(LocalRule):
        def plan(self, memory, assignment, rng):
            return None

    assert "fresh model" in (Asks().leak() or "")
    assert LocalRule().leak() is None


def test_samples_influence_what_a_device_sends_only_through_the_noise(federate: Federate) -> None:
    """With all samples replaced, what is sent differs by a bounded step only."""
    for method in ("fedasmu", "fedavg", "asofed", "fedprox"):
        made = federate(options(method), privacy=PRIVACY)
        setup, config = made.assembly.setup(), made.config
        rule = class_and_preset(method)[0].rule(config.method)
        base = np.zeros(made.assembly.layout.size, np.float32)
        slots, fresh = ((Slot(3, "fixed"),), (Fresh(2, 2, base + np.float32(0.01)),)) if rule.asks else ((), ())
        work = TripInput(Assignment(0, 1, 1, 1, base, 4, 0.05), slots, fresh, rule, {}, 3.0 if rule.timed else None)
        one = setup.trainer().train(work)
        other = setup.trainer()
        other.data.train.x.copy_(torch.rand(other.data.train.x.shape) * 9)
        other.data.train.y.copy_(torch.randint(0, 10, other.data.train.y.shape))
        two = other.train(work)
        assert [bool(merge.numbers) for merge in one.merges] == [True] * rule.asks and bool(one.report) == rule.timed
        assert one.report == two.report and one.merges == two.merges and one.vectors == two.vectors == {}
        assert one.steps == two.steps and one.diverged == two.diverged
        gap = np.linalg.norm(one.weights.astype(np.float64) - two.weights)
        assert 0 < gap <= 2 * PRIVACY["clip"] + 1e-4, "the sensitivity that the accountant assumes"


def test_a_crashed_run_resumes_with_the_same_noise(federate: Federate, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")

    def made() -> Federation:
        links = {"up": "topk", "keep": 0.5}
        return federate("fedavg", privacy=PRIVACY, links=links, run={"checkpoint_every": 5.0})

    whole = made().run(60, out=tmp_path / "whole")
    total = len((whole.directory / "events.jsonl").read_bytes().splitlines())
    with pytest.raises(CrashError):
        made().run(60, out=tmp_path / "cut", observers=[Crash(total // 2)])
    made().resume(tmp_path / "cut")
    assert outputs(tmp_path / "cut") == outputs(whole.directory)


# ---- noise on the server

SERVER = {"where": "server", "clip": 0.5, "noise": 0.5}
#: FedASMU and FedSSMU with learned slots. Nothing but the sum is noised, so only the server sees when devices ask.
LEARNED = {"dynamic_server": False, "slot": "rl"}
SUMS = ["fedavg", "fednova", "fedopt", "fedbuff", "fadas", "fedstaleweight", "fedasmu-fresh", "fedssmu-fresh"]


def with_learned_slots(method: str) -> dict:
    return {"name": method} | (LEARNED if method.endswith("-fresh") else {})


@pytest.mark.parametrize("method", SUMS)
def test_sums_with_noise_are_audited_and_the_run_says_its_epsilon(
    method: str, federate: Federate, tmp_path: Path
) -> None:
    pytest.importorskip("dp_accounting")
    messages: list[str] = []

    class Listener(Observer):
        def on_message(self, message: str) -> None:
            messages.append(message)

    made = federate(with_learned_slots(method), privacy=SERVER, run={"diverged": "continue"})
    result = made.run(60, out=tmp_path / "run", observers=[Listener()])
    run = RunDirectory(tmp_path / "run")
    found = audit(run)
    assert found.passed, found.problem
    events = list(run.events())
    assert result.summary["rejected"] == 0 and result.summary["aggregations"] > 0
    said = result.summary["privacy"]
    assert said["where"] == "server" and said["epsilon"] == max(said["by_device"].values()) > 0
    took_part = {part["device"] for event in events if event["kind"] == "aggregate" for part in event["contributions"]}
    assert {int(device) for device in said["spent"]} == took_part
    notes = [event for event in events if event["kind"] == "note"]
    assert sum(note["about"] == "noise" for note in notes) == result.summary["aggregations"]
    assert sum(note["about"] == "clip" for note in notes) == result.summary["uploads"]
    assert sum("against whoever sees models" in message for message in messages) == 1
    assert not any("reward" in event or "loss_before" in event for event in events if event["kind"] == "merge")


def test_an_audit_finds_a_forged_cost(federate: Federate, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    federate("fedbuff", privacy=SERVER).run(60, out=tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text())
    device = next(iter(summary["privacy"]["spent"]))
    summary["privacy"]["spent"][device] *= 0.5
    path.write_text(json.dumps(summary))
    found = audit(RunDirectory(tmp_path / "run"))
    assert found.problem == f"summary.json has another cost in privacy for device {device} than the log"


@pytest.mark.parametrize("method", ["fedavg", "fedbuff", "fedasmu-fresh"])
def test_a_crashed_run_resumes_with_the_same_noise_on_the_server(
    method: str, federate: Federate, tmp_path: Path
) -> None:
    pytest.importorskip("dp_accounting")

    def made() -> Federation:
        return federate(with_learned_slots(method), privacy=SERVER, run={"checkpoint_every": 5.0})

    whole = made().run(60, out=tmp_path / "whole")
    total = len((whole.directory / "events.jsonl").read_bytes().splitlines())
    with pytest.raises(CrashError):
        made().run(60, out=tmp_path / "cut", observers=[Crash(total // 2)])
    resumed = made().resume(tmp_path / "cut")
    assert outputs(tmp_path / "cut") == outputs(whole.directory)
    assert resumed.summary["privacy"] == whole.summary["privacy"]


def test_a_device_whose_training_diverges_counts_with_a_step_of_0(federate: Federate, tmp_path: Path) -> None:
    """Its rejection would change the weights of the others, and so reveal it."""
    pytest.importorskip("dp_accounting")
    run = {"diverged": "continue"}
    made = federate("fedavg", privacy=SERVER, training={"lr": 1e38}, run=run)
    result = made.run(60, out=tmp_path / "run")
    notes = [event for event in RunDirectory(tmp_path / "run").events() if event["kind"] == "note"]
    clipped = [note for note in notes if note["about"] == "clip"]
    assert any(note["length"] is None and note["share"] == 0.0 for note in clipped)
    assert result.summary["rejected"] == 0 and audit(RunDirectory(tmp_path / "run")).passed

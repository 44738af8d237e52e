"""Runs with poisoned devices and a defence, for every method, and their audit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from freshet import Federation
from freshet.errors import ConfigError
from freshet.methods import class_and_preset, registry
from freshet.methods._shared.rounds import RoundMethod
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.outgoing import AttackOptions, choose_attackers

from .helpers import Crash, CrashError, outputs

Federate = Callable[..., Federation]
ATTACK = {"kind": "sign-flip", "share": 0.25}
ROUND_METHODS = [name for name in registry() if issubclass(class_and_preset(name)[0], RoundMethod)]
NETWORKS = {"moon": {"model": {"name": "digits", "head": True}}}
#: Seconds of methods with long trips: a larger network, or more epochs.
UNTIL = {"moon": 400.0, "fedsa": 300.0}


def notes(directory: Path) -> list[dict]:
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "note" and line["about"] == "defence"]


@pytest.mark.parametrize("method", sorted(registry()))
@pytest.mark.parametrize("rule", ["clip", "median-distance"])
def test_every_method_runs_behind_a_defence_and_is_audited(
    method: str, rule: str, federate: Federate, tmp_path: Path
) -> None:
    made = federate(method, attack=ATTACK, defence={"rule": rule}, **NETWORKS.get(method, {}))
    result = made.run(UNTIL.get(method, 90.0), out=tmp_path / "run")
    found, said = audit(RunDirectory(tmp_path / "run")), notes(result.directory)
    assert found.passed, found.problem
    bad = choose_attackers(AttackOptions(**ATTACK), 0, 8)
    judged = [note for note in said if note["bound"] is not None]
    assert any(note["device"] in bad for note in judged)
    assert all(note["share"] < 0.5 for note in judged if note["device"] in bad)
    assert sum(note["share"] > 0.5 for note in judged if note["device"] not in bad) > len(judged) // 3


@pytest.mark.parametrize("method", ROUND_METHODS)
def test_multi_krum_leaves_out_the_poisoned_of_each_round(method: str, federate: Federate, tmp_path: Path) -> None:
    made = federate(
        method,
        attack=ATTACK,
        defence={"rule": "multi-krum", "byzantine": 0.25},
        run={"per_round": 8, "in_flight": 8},
        **NETWORKS.get(method, {}),
    )
    made.run(UNTIL.get(method, 120.0), out=tmp_path / "run")
    found, said = audit(RunDirectory(tmp_path / "run")), notes(tmp_path / "run")
    assert found.passed, found.problem
    bad = choose_attackers(AttackOptions(**ATTACK), 0, 8)
    assert len(said) > 1
    assert all(len(note["kept"]) == 6 and not bad & set(note["kept"]) for note in said)


def test_multi_krum_is_rejected_for_methods_that_use_uploads_one_by_one(federate: Federate) -> None:
    for method in ("fedasmu", "fedbuff", "fedssmu"):
        with pytest.raises(ConfigError, match=r"defence.rule: multi-krum .*; use clip or median-distance"):
            federate(method, defence={"rule": "multi-krum"})


@pytest.mark.parametrize("rule", ["trimmed-mean", "median", "root"])
@pytest.mark.parametrize("method", ["fedavg", "fednova", "fedopt", "fedbuff", "fedasmu", "port"])
def test_rules_that_replace_steps_run_with_rounds_and_buffers(
    method: str, rule: str, federate: Federate, tmp_path: Path
) -> None:
    """Reversed updates do little harm, and the audit passes."""
    setting = {"fleet": {"devices": 10}, "data": {"train_samples": 1000, "partition": "iid"}, "training": {"lr": 0.1}}
    options = {"name": method} | ({"K": 5} if method in ("fedbuff", "port") else {})
    given = {"attack": {"kind": "sign-flip", "share": 0.2}, "defence": {"rule": rule}, "run": {"per_round": 10}}
    result = federate(options, **setting, **given).run(150, out=tmp_path / "run")
    found = audit(RunDirectory(tmp_path / "run"))
    assert found.passed, found.problem
    assert result.summary["status"] == "finished" and result.accuracy[-1] > 0.5
    assert {note["rule"] for note in notes(result.directory)} == {rule}


@pytest.mark.parametrize("rule", ["trimmed-mean", "median", "root"])
@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_rules_that_replace_steps_are_refused_where_devices_keep_sums(
    method: str, rule: str, federate: Federate
) -> None:
    with pytest.raises(ConfigError, match=rf"defence.rule: {rule} replaces updates, but .* use clip or multi-krum"):
        federate(method, defence={"rule": rule})


def test_attacks_on_labels_are_for_classification(federate: Federate) -> None:
    with pytest.raises(ConfigError, match=r"attack.kind: label-flip is for classification"):
        federate("fedavg", attack={"kind": "label-flip"}, training={"task": "regression"})


def test_an_attack_does_harm_without_a_defence_and_little_with_one(federate: Federate, tmp_path: Path) -> None:
    setting = {"fleet": {"devices": 20}, "data": {"train_samples": 1000, "partition": "iid"}, "training": {"lr": 0.1}}
    clean = federate("fedasmu", **setting).run(200, out=tmp_path / "clean")
    harmed = federate("fedasmu", attack={"kind": "sign-flip"}, **setting).run(200, out=tmp_path / "harmed")
    defence = {"rule": "median-distance"}
    saved = federate("fedasmu", attack={"kind": "sign-flip"}, defence=defence, **setting).run(200, out=tmp_path / "s")
    assert harmed.accuracy[-1] < clean.accuracy[-1] - 0.2 or harmed.summary["status"] == "diverged"
    assert saved.accuracy[-1] > clean.accuracy[-1] - 0.03


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("fedasmu", "median-distance"),
        ("fedavg", "clip"),
        ("fedavg", "multi-krum"),
        ("port", "clip"),
        ("fedavg", "median"),
        ("fedbuff", "trimmed-mean"),
        ("fedavg", "root"),
        ("fedasmu", "root"),
    ],
)
def test_a_crashed_run_resumes_with_the_same_bits(method: str, rule: str, federate: Federate, tmp_path: Path) -> None:
    def made() -> Federation:
        fleet, run = {"loss": 0.1}, {"checkpoint_every": 5.0, "per_round": 6, "in_flight": 6}
        return federate(method, attack=ATTACK, defence={"rule": rule}, fleet=fleet, run=run)

    whole = made().run(80, out=tmp_path / "whole")
    total = len((whole.directory / "events.jsonl").read_bytes().splitlines())
    with pytest.raises(CrashError):
        made().run(80, out=tmp_path / "cut", observers=[Crash(total // 2)])
    made().resume(tmp_path / "cut")
    assert outputs(tmp_path / "cut") == outputs(whole.directory)


def test_worker_processes_give_the_same_bits(federate: Federate, tmp_path: Path) -> None:
    given = {"attack": {"kind": "backdoor", "share": 0.25}, "defence": {"rule": "clip"}}
    one = federate("fedasmu", **given).run(60, out=tmp_path / "one")
    two = federate("fedasmu", run={"executor": "processes", "workers": 2}, **given).run(60, out=tmp_path / "two")
    assert outputs(one.directory) == outputs(two.directory)

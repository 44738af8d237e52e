"""Fresh models for any method: the device rebases, and the server adds what training produced."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.core.messages import Assignment, Fresh, Merge, Request, Slot, Upload
from freshet.core.method import LocalRule
from freshet.core.server import Server
from freshet.errors import ConfigError
from freshet.methods import class_and_preset, method_options
from freshet.methods._shared.rebase import DECLARED, Rebasing, further_slots
from freshet.methods.asofed import StepRule
from freshet.methods.fedprox import Proximal
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.trip import LocalTrip
from tests.conftest import small
from tests.methods.helpers import (
    LEARNABLE,
    REPORTS,
    UNEQUAL,
    Device,
    close,
    regression_weights,
    same,
    send,
    server_of,
    upload_of,
    vector,
)
from tests.sim.test_refresh import tampered

#: Methods that add progress, with options that make every upload count at once.
ADDERS: dict[str, dict[str, Any]] = {
    "fedbuff": {"K": 1},
    "ca2fl": {"M": 1},
    "fadas": {"M": 1},
    "asofed": {},
    "ace": {},
    "fedstaleweight": {"K": 1},
}
MIXERS = ("fedasync", "fedsa")


def rule_of(name: str, **options: Any) -> LocalRule:
    return class_and_preset(name)[0].rule(method_options(name, {"fresh": "rebase", **options}))


def flown(name: str, **options: Any) -> Server:
    """A server at version 3 with device 0 in flight from version 1; it has been sent version 3."""
    server = server_of(name, samples=UNEQUAL, epochs=5, fresh="rebase", **options)
    server.trigger([0, 1, 2])
    for device in (1, 2):
        send(server, device, vector(20 + device))
    assert server.version == 3
    fresh = server.request(Request(0, 1, Slot(4, "fixed")))
    assert fresh is not None and fresh.version == 3
    return server


def merged_upload(server: Server, weights: Any, beta: float = 1.0, n1: int = 6) -> Upload:
    plain = upload_of(server, 0, weights, steps=10, report=REPORTS.get(server.method.about.name, {}))
    return plain._replace(merges=(Merge(3, {"n1": n1, "beta": beta}),))


@pytest.mark.parametrize("name", ADDERS)
def test_server_adds_what_training_produced_wherever_it_ended(name: str) -> None:
    """An upload ``w_g + d`` after a rebase moves the model as ``w_o + d`` does without one."""
    progress = 0.1 * vector(7)[:LEARNABLE]
    results = []
    for rebases in (True, False):
        server = flown(name, **ADDERS[name])
        start, plain = server.weights if rebases else server.store.get(1), server.weights.copy()
        weights = vector(8)
        weights[:LEARNABLE] = start[:LEARNABLE] + progress
        upload = merged_upload(server, weights)
        (event,) = server.upload(upload if rebases else upload._replace(merges=()))
        assert type(event).__name__ == "Aggregated"
        results.append(server.weights - plain)
    close(results[0], results[1], 2e-6)
    assert np.abs(results[0][:LEARNABLE]).max() > 1e-3


@pytest.mark.parametrize("name", MIXERS)
def test_server_that_mixes_takes_the_model_as_it_is(name: str) -> None:
    results = []
    for merges in (True, False):
        server = flown(name)
        upload = merged_upload(server, vector(9))
        server.upload(upload if merges else upload._replace(merges=()))
        results.append(server.weights)
    same(*results)


@pytest.mark.parametrize("name", [*ADDERS, *MIXERS])
@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"n1": 6, "beta": 0.5}, "weight 1"),
        ({"n1": 6}, "weight 1"),
        ({"n1": 10, "beta": 1.0}, "after 10 of 10 steps"),
        ({"n1": -1, "beta": 1.0}, "after -1 of 10 steps"),
        ({"beta": 1.0}, "after None of 10 steps"),
    ],
)
def test_impossible_merges_are_rejected_and_change_nothing(name: str, numbers: dict[str, Any], reason: str) -> None:
    server = flown(name, **ADDERS.get(name, {}))
    before = server.weights.copy()
    upload = merged_upload(server, vector(9))._replace(merges=(Merge(3, numbers),))
    (event,) = server.upload(upload)
    assert type(event).__name__ == "Rejected" and reason in event.reason  # type: ignore[attr-defined]
    same(server.weights, before)


def begin(device: Device, rule: LocalRule, slots: tuple[Slot, ...]) -> LocalTrip:
    assignment = Assignment(0, 1, 4, 4, regression_weights(1), device.epochs, device.lr)
    return LocalTrip(device.trainer, assignment, slots, rule, {}, None)


def test_device_continues_from_the_fresh_model_with_its_progress() -> None:
    trip = begin(Device(), rule_of("fedbuff"), (Slot(2, "fixed"), Slot(3, "again")))
    anchor = regression_weights(1)
    for version in (7, 9):
        assert trip.to_slot()
        before, fresh = trip.snapshot(), regression_weights(version)
        trip.merge(Fresh(version, version, fresh))
        close(trip.snapshot() - fresh, before - anchor, 1e-6)
        same(trip.anchor, fresh)
        anchor = fresh
    assert [merge.numbers for merge in trip.finish().merges] == [{"n1": 3, "beta": 1.0}, {"n1": 6, "beta": 1.0}]


def test_proximal_term_pulls_to_the_anchor() -> None:
    """After the merge the term is ``rho (u - a)``: with the same progress it pulls as before."""
    trip = begin(Device(), rule_of("fedasync", rho=0.5), (Slot(2, "fixed"),))
    trip.to_slot()
    progress = trip.snapshot() - regression_weights(1)
    trip.merge(Fresh(7, 7, regression_weights(7)))
    trip.gradient.zero_()
    trip.rule.adjust(trip)
    close(trip.gradient.numpy(), 0.5 * progress, 1e-6)


def test_paused_trip_continues_with_the_same_bits() -> None:
    """A trip saved between two merges keeps its anchor, and with it the centre of the proximal term."""
    slots = (Slot(2, "fixed"), Slot(3, "again"))

    def to_second_slot() -> LocalTrip:
        trip = begin(Device(), rule_of("fedasync", rho=0.5), slots)
        trip.to_slot()
        trip.merge(Fresh(7, 7, regression_weights(7)))
        trip.to_slot()
        return trip

    whole = to_second_slot()
    saved = to_second_slot().save()
    paused = begin(Device(), rule_of("fedasync", rho=0.5), slots)
    paused.restore(saved)
    for trip in (whole, paused):
        trip.merge(Fresh(9, 9, regression_weights(9)))
    same(whole.finish().weights, paused.finish().weights)


def test_rule_declares_what_the_wrapped_one_does() -> None:
    @dataclass(frozen=True)
    class Plain(LocalRule):
        pass

    for inner in (Plain(), Proximal(0.1), StepRule(0.1, 0.2)):
        rule = Rebasing(inner, "h3", 1)
        assert all(getattr(rule, name) == getattr(inner, name) for name in DECLARED)
        assert rule.asks and rule.anchored and set(rule.public) == {*inner.public, "n1", "beta"}
        assert rule.leak() == inner.leak() and rule.holds_out == inner.holds_out


def test_every_hook_reaches_the_wrapped_rule() -> None:
    """Hooks that a rebase does not pass on would be lost silently when a rule gains a new one."""
    own = {"push_after"}  # no method that is wrapped has its server push
    hooks = {name for name in vars(LocalRule) if not name.startswith("_")} - own
    declared = {name for name in hooks if not callable(getattr(LocalRule, name)) and name in vars(LocalRule)}
    properties = {name for name in declared if isinstance(vars(LocalRule)[name], property)}
    assert hooks - declared | properties <= set(vars(Rebasing))
    assert declared - properties <= {*DECLARED, "asks", "public"}


def test_without_fresh_models_the_rule_is_the_published_one() -> None:
    for name in [*ADDERS, *MIXERS]:
        method, _ = class_and_preset(name)
        assert not method.rule(method_options(name, {})).asks


@pytest.mark.parametrize(
    ("first", "refresh", "expected"), [(2, 1, []), (2, 3, [3, 4]), (4, 3, [5]), (1, "every", [2, 3, 4, 5])]
)
def test_further_requests_come_in_the_next_epochs(first: int, refresh: Any, expected: list[int]) -> None:
    assert [slot.epoch for slot in further_slots(Slot(first, "fixed"), 5, refresh)] == expected


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"slot": 9}, "epoch in 1..4"),
        ({"slot": 0}, "epoch in 1..4"),
        ({"refresh": 0}, "at least 1"),
        ({"fresh": "mix"}, "none"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        small({"name": "fedbuff", "fresh": "rebase", **options})


def test_audit_finds_a_changed_weight(tmp_path: Path) -> None:
    small({"name": "fedbuff", "K": 3, "fresh": "rebase"}).run(40, out=tmp_path / "run")
    assert audit(RunDirectory(tmp_path / "run")).problem is None

    def lighter(lines: list[dict[str, Any]]) -> None:
        next(line for line in lines if line["kind"] == "merge")["beta"] = 0.9

    assert "beta is logged as 0.9" in (tampered(tmp_path / "run", lighter) or "")


def test_privacy_lets_only_the_weight_and_the_moment_of_a_merge_through(tmp_path: Path) -> None:
    method = {"name": "fedbuff", "K": 3, "fresh": "rebase", "slot": 2}
    result = small(method, privacy={"clip": 0.5}).run(40, out=tmp_path / "run")
    assert result.summary["merges"] > 3 and audit(RunDirectory(tmp_path / "run")).problem is None
    merges = [event for event in RunDirectory(tmp_path / "run").events() if event["kind"] == "merge"]
    own = {"seq", "time", "kind", "device", "trip", "slot", "base", "fresh"}
    assert all(set(event) - own <= {"n1", "beta", "round"} for event in merges)

"""Attackers who know what honest devices send, and free-riders: what arrives, and that runs can be resumed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from freshet import Federation
from freshet.config import resolve
from freshet.core.messages import Merge, Upload
from freshet.errors import ConfigError
from freshet.training.outgoing import AttackOptions, Collusion, Outgoing, choose_attackers
from freshet.training.trip import TripOutcome

from .helpers import Crash, CrashError, outputs

Federate = Callable[..., Federation]
START = np.linspace(-1, 1, 7).astype(np.float32)


def sent(device: int, step: np.ndarray) -> Upload:
    return Upload(device, 1, 1, (START + step).astype(np.float32), 5)


@pytest.mark.parametrize(
    ("kind", "strength"), [("little-is-enough", 1.5), ("inner-product", 0.5), ("inner-product", 2.0)]
)
def test_forged_step_is_that_of_the_paper(kind: str, strength: float) -> None:
    collusion = Collusion(AttackOptions(kind=kind, strength=strength), frozenset({0, 1}), 7)
    steps = np.random.default_rng(3).normal(size=(5, 7))
    own = sent(0, np.ones(7))
    assert collusion.forge(own, START) is own, "nobody is known yet"
    for device, step in enumerate(steps, 2):
        honest = sent(device, np.full(7, 9.0))
        assert collusion.forge(honest, START) is honest
        collusion.forge(sent(device, step), START)  # the latest counts
    collusion.forge(sent(9, np.full(7, np.nan)), START)  # not finite: it will be rejected
    found = collusion.forge(own, START).weights.astype(np.float64) - START
    mean = [sum(float(step[j]) for step in steps) / 5 for j in range(7)]
    spread = [(sum((float(step[j]) - mean[j]) ** 2 for step in steps) / 5) ** 0.5 for j in range(7)]
    little = [m - strength * s for m, s in zip(mean, spread, strict=True)]
    np.testing.assert_allclose(found, little if kind != "inner-product" else [-strength * m for m in mean], atol=1e-5)


def test_strength_has_a_default_per_attack() -> None:
    kinds = ("sign-flip", "little-is-enough", "inner-product")
    assert [resolve({"attack": {"kind": kind}}).attack.strength for kind in kinds] == [10.0, 1.5, 0.5]
    assert resolve({"attack": {"kind": "inner-product", "strength": 3.0}}).attack.strength == 3.0


def test_only_attacks_that_need_knowledge_collude() -> None:
    found = {kind: Collusion.from_options(AttackOptions(kind=kind), 0, 20, 7) for kind in ("none", "sign-flip")}
    assert set(found.values()) == {None}
    options = AttackOptions(kind="inner-product", share=0.25)
    made = Collusion.from_options(options, 5, 20, 7)
    assert made is not None and made.attackers == choose_attackers(options, 5, 20) and len(made.attackers) == 5


def test_free_rider_sends_back_what_it_got(federate: Federate) -> None:
    layout = federate("fedavg").assembly.layout
    start = np.linspace(0, 1, layout.size).astype(np.float32)
    outgoing = Outgoing(attack=AttackOptions(kind="free-rider"))
    trained = TripOutcome(start + 1.0, 5, {}, (), {}, {})
    assert np.array_equal(outgoing.encode(trained, None, start, layout, True).weights, start)  # type: ignore[arg-type]
    assert outgoing.encode(trained, None, start, layout, False) is trained  # type: ignore[arg-type]


def test_a_step_is_forged_from_the_anchor_of_its_merges() -> None:
    merged = Upload(0, 1, 1, START, 5, merges=(Merge(2, {"beta": 1.0}),))
    assert np.array_equal(merged.anchor(START, {2: START + 1}), START + 1)


@pytest.mark.parametrize("method", ["fedavg", "fedasmu"])
def test_a_crashed_run_resumes_with_the_same_forgeries(method: str, federate: Federate, tmp_path: Path) -> None:
    def made() -> Federation:
        attack = {"kind": "little-is-enough", "share": 0.25}
        return federate(method, attack=attack, run={"checkpoint_every": 5.0})

    whole = made().run(60, out=tmp_path / "whole")
    assert outputs(federate(method).run(60, out=tmp_path / "honest").directory)[1] != outputs(whole.directory)[1]
    total = len((whole.directory / "events.jsonl").read_bytes().splitlines())
    with pytest.raises(CrashError):
        made().run(60, out=tmp_path / "cut", observers=[Crash(2 * total // 3)])
    made().resume(tmp_path / "cut")
    assert outputs(tmp_path / "cut") == outputs(whole.directory)


@pytest.mark.parametrize("kind", ["little-is-enough", "inner-product"])
def test_forged_models_are_refused_with_compressed_uploads(kind: str) -> None:
    with pytest.raises(ConfigError, match=r'attack.kind: .* forges whole models; set links.up to "none"'):
        resolve({"attack": {"kind": kind}, "links": {"up": "topk"}})

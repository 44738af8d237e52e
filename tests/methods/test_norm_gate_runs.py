"""The norm gate does not affect an honest run: same bits with and without it, and no upload is rejected."""

import os
from pathlib import Path
from typing import Any

import pytest

from freshet import Federation
from freshet.core.admission import GATE_FACTOR, MIN_DEVICES, NormGate, RecentLengths
from freshet.methods import method_names, registry

LONG = int(os.environ.get("FRESHET_FUZZ", "1")) > 1
SEEDS = (0, 1, 2) if LONG else (0,)
UNTIL = 200.0 if LONG else 50.0
#: Handwritten digits on 40 devices.
DIGITS: dict[str, dict[str, Any]] = {
    "fleet": {"devices": 40, "fastest": 2.0},
    "training": {"lr": 0.1},
    "data": {"test_samples": 50},
    "run": {"executor": "serial", "eval_every": 50.0, "per_round": 5, "in_flight": 10, "period": 4.0},
}
#: Worlds in which honest devices differ most.
HARD: dict[str, dict[str, dict[str, Any]]] = {
    "skewed data": {"data": {"concentration": 0.05, "min_samples": 2}},
    "ratio 440": {"fleet": {"ratio": 440.0, "fastest": 0.05}},
    "adam": {"training": {"optimiser": "adam", "lr": 0.003}},
    "a rate that falls": {"training": {"schedule": "step", "schedule_every": 2, "lr_decay": 0.1}},
    "one epoch or twenty": {"training": {"local_epochs": [1, 20]}},
}


class RecordingGate(NormGate):
    """Records the largest ratio of a step to the median of recent steps."""

    largest_ratio = 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps = RecentLengths()

    def find_excess(self, lengths: Any, base: Any, samples: int) -> Any:
        if self.steps.median is not None:
            RecordingGate.largest_ratio = max(RecordingGate.largest_ratio, lengths[0] / self.steps.median)
        return super().find_excess(lengths, base, samples)

    def remember(self, device: int, lengths: Any) -> None:
        if lengths[0] > 0.0:
            self.steps.add(device, lengths[0])
        super().remember(device, lengths)


def compare_gates(
    method: str, seed: int, out: Path, monkeypatch: Any, until: float = UNTIL, **world: dict[str, Any]
) -> None:
    """Compare two runs, with the gate and without."""
    tables = {name: DIGITS[name] | world.get(name, {}) for name in DIGITS}
    monkeypatch.setattr("freshet.core.admission.NormGate", RecordingGate)
    RecordingGate.largest_ratio, results = 0.0, []
    for gate in (GATE_FACTOR, "off"):
        run = tables["run"] | {"gate": gate, "seed": seed}
        federation = Federation(method=method, **(tables | {"run": run}))
        results.append(federation.run(until, out=out / str(gate)))
    on, off = (result.summary for result in results)
    assert on["weights_sha256"] == off["weights_sha256"] and on["rejected"] == 0 and on["uploads"] >= MIN_DEVICES
    assert (out / "100.0" / "events.jsonl").read_bytes() == (out / "off" / "events.jsonl").read_bytes()
    assert GATE_FACTOR / 5 > RecordingGate.largest_ratio > 0.0, "the factor is generous, and the gate measured steps"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", method_names() if LONG else sorted(registry()))
def test_gate_changes_no_bit(method: str, seed: int, tmp_path: Path, monkeypatch: Any) -> None:
    compare_gates(method, seed, tmp_path, monkeypatch)


@pytest.mark.parametrize("world", HARD)
@pytest.mark.parametrize("method", sorted(registry()) if LONG else ["fedasmu", "scaffold"])
def test_gate_changes_no_bit_in_hard_worlds(method: str, world: str, tmp_path: Path, monkeypatch: Any) -> None:
    compare_gates(method, 0, tmp_path, monkeypatch, 2 * UNTIL, **HARD[world])

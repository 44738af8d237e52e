"""The gate of proportion costs an honest run nothing: the same bits with it and without it, and nobody is refused."""

import os
from pathlib import Path
from typing import Any

import pytest

from freshet import Federation
from freshet.core.admission import GATE_FACTOR, MIN_LENGTHS, NormGate
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
#: Worlds in which honest devices differ most from each other.
HARD: dict[str, dict[str, dict[str, Any]]] = {
    "skewed data": {"data": {"concentration": 0.05, "min_samples": 2}},
    "ratio 440": {"fleet": {"ratio": 440.0, "fastest": 0.05}},
    "adam": {"training": {"optimiser": "adam", "lr": 0.003}},
    "a rate that falls": {"training": {"schedule": "step", "schedule_every": 2, "lr_decay": 0.1}},
    "one epoch or twenty": {"training": {"local_epochs": [1, 20]}},
}


class Watched(NormGate):
    """Remembers by how much the longest step exceeded the median."""

    most = 0.0

    def excess(self, lengths: Any, base: Any, work: int) -> Any:
        usual = self._known[0].median
        if usual is not None:
            Watched.most = max(Watched.most, lengths[0] / usual)
        return super().find_excess(lengths, base, work)


def compared(method: str, seed: int, out: Path, monkeypatch: Any, **world: dict[str, Any]) -> dict[str, Any]:
    """Two runs, with the gate and without; returns the summary of the first."""
    tables = {name: DIGITS[name] | world.get(name, {}) for name in DIGITS}
    monkeypatch.setattr("freshet.core.admission.Proportion", Watched)
    Watched.most, found = 0.0, []
    for gate in (GATE_FACTOR, "off"):
        run = tables["run"] | {"gate": gate, "seed": seed}
        federation = Federation(method=method, **(tables | {"run": run}))
        found.append(federation.run(UNTIL, out=out / str(gate)))
    on, off = (result.summary for result in found)
    assert on["weights_sha256"] == off["weights_sha256"] and on["rejected"] == 0 and on["uploads"] >= MIN_LENGTHS
    assert (out / "100.0" / "events.jsonl").read_bytes() == (out / "off" / "events.jsonl").read_bytes()
    assert GATE_FACTOR / 5 > Watched.most > 0.0, "the factor is generous, and the gate did look"
    return on


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", method_names() if LONG else sorted(registry()))
def test_the_same_bits_with_the_gate_and_without(method: str, seed: int, tmp_path: Path, monkeypatch: Any) -> None:
    compared(method, seed, tmp_path, monkeypatch)


@pytest.mark.parametrize("world", HARD)
@pytest.mark.parametrize("method", sorted(registry()) if LONG else ["fedasmu", "scaffold"])
def test_also_where_devices_differ(method: str, world: str, tmp_path: Path, monkeypatch: Any) -> None:
    compared(method, 0, tmp_path, monkeypatch, **HARD[world])

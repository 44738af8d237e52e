"""The tables of docs/protection.md: thin links and defences on Fashion-MNIST in short, the rest on the digits.

In short: LeNet5, 5,000 training and 1,000 test samples, 40 devices (Dirichlet 0.3), speeds 1 : 5, 300 s of virtual time
(defences: 200 s), one seed. Digits: all, the same fleet, 300 s (multi-Krum: 2,000 s). A run that is there is not
run again, so that this can be stopped and started.

    python benchmarks/protection.py links|defence|absent|skewed|krum|privacy [--out FOLDER] [--seed N]
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import freshet
from freshet import Federation
from freshet.core.admission import Entrance, Judgement
from freshet.core.defence import ABOUT, Defence
from freshet.core.events import Rejected
from freshet.core.messages import Upload
from freshet.core.server import ActiveTrip
from freshet.core.vectors import Vector
from freshet.runs.reader import RunDirectory
from freshet.training.outgoing import AttackOptions, attackers, marked

#: Mbit/s up and down at "bandwidth 1".
UP, DOWN = 10.0, 50.0
TARGET = 0
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "sign-flip": {"kind": "sign-flip", "strength": 10.0},
    "label-flip": {"kind": "label-flip"},
    "backdoor": {"kind": "backdoor", "target": TARGET},
}
#: The embedded digits instead.
DIGITS: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "train_samples": 0, "test_samples": 0},
    "model": {"name": "digits"},
}
Case = tuple[str, dict[str, Any]]


def federation(seed: int, **given: Any) -> Federation:
    sections: dict[str, Any] = {
        "method": {"name": "fedasmu"},
        "data": {"name": "fashion-mnist", "train_samples": 5_000, "test_samples": 1_000},
        "model": {"name": "lenet5"},
        "fleet": {"devices": 40, "up_mbps": UP, "down_mbps": DOWN},
        "training": {"lr": 0.05, "batch_size": 20, "device": "cpu"},
        "run": {
            "seed": seed,
            "until": 300.0,
            "eval_every": 20.0,
            "executor": "serial",
            "diverged": "continue",
            "gate": "off",
        },
    }
    for name, values in given.items():
        sections[name] = sections.get(name, {}) | values
    return Federation(**sections)


def links() -> Iterator[Case]:
    codecs = {"none": {}, "int8": {"up": "int8", "down": "int8"}, "topk": {"up": "topk", "down": "topk", "keep": 0.1}}
    for name, share in (("1", 1.0), ("1/50", 1 / 50), ("1/100", 1 / 100)):
        rates = {"up_mbps": UP * share, "down_mbps": DOWN * share}
        for codec, given in codecs.items():
            yield f"bandwidth {name}, {codec}", {"links": given, "fleet": rates}


def defence() -> Iterator[Case]:
    rules = {"none": ("none", "median-distance"), "sign-flip": ("none", "clip", "median-distance")}
    short = {"until": 200.0}
    for attack, how in ATTACKS.items():
        for rule in rules.get(attack, ("none", "median-distance")):
            yield f"{attack}, {rule}", {"attack": how, "defence": {"rule": rule}, "run": short}


def absent() -> Iterator[Case]:
    """Nobody attacks, and all uploads of those who do elsewhere are refused: what the best of all defences costs."""
    yield "absent, none", {"run": {"until": 200.0}}


@contextmanager
def without(devices: frozenset[int]) -> Iterator[None]:
    """Every upload of these devices is refused."""
    refusal = Entrance.refusal

    def refuse(
        self: Entrance, upload: Upload, device: int, active: ActiveTrip, base: Vector, fresh: Vector | None
    ) -> Rejected | None:
        if device in devices:
            return Rejected("left out", device, active.trip)
        return refusal(self, upload, device, active, base, fresh)

    Entrance.refusal = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        Entrance.refusal = refusal  # type: ignore[method-assign]


def skewed() -> Iterator[Case]:
    """Whom the direction would refuse where devices hold few classes: everybody is let in, and the log says it."""
    worlds: dict[str, dict[str, Any]] = {
        "two classes per device": {"partition": "by_label", "shards_per_device": 2},
        "Dirichlet 0.1": {"concentration": 0.1},
    }
    for name, data in worlds.items():
        digits = DIGITS | {"data": DIGITS["data"] | data}
        yield name, digits | {"attack": ATTACKS["label-flip"], "defence": {"rule": "median-distance"}}


@contextmanager
def only_watching() -> Iterator[None]:
    """What a defence would refuse is let in all the same; its notes stay in the log."""
    defended = Entrance.defended

    def let_in(
        self: Entrance,
        defence: Defence,
        upload: Upload,
        device: int,
        active: ActiveTrip,
        base: Vector,
        fresh: Vector | None,
    ) -> Judgement:
        return defended(self, defence, upload, device, active, base, fresh)._replace(upload=upload, refusal=None)

    Entrance.defended = let_in  # type: ignore[method-assign]
    try:
        yield
    finally:
        Entrance.defended = defended  # type: ignore[method-assign]


def refused_by_direction(run: RunDirectory, poisoned: frozenset[int]) -> dict[str, float]:
    """The share of poisoned and of honest uploads that went against the others, of those judged by direction."""
    notes = [event for event in run.events() if event["kind"] == "note" and event["about"] == ABOUT]
    judged = [note for note in notes if note["agreement"] is not None and note["least"] is not None]
    against = {note["seq"] for note in judged if note["agreement"] < note["least"]}
    sides = {"poisoned": True, "honest": False}
    who = {name: [note["seq"] for note in judged if (note["device"] in poisoned) is bad] for name, bad in sides.items()}
    return {f"refused_{name}": sum(seq in against for seq in found) / len(found) for name, found in who.items()}


def krum() -> Iterator[Case]:
    for attack, how in ATTACKS.items():
        for rule in ("none", "multi-krum"):
            given = {"attack": how, "defence": {"rule": rule, "byzantine": 0.3}}
            long = {"until": 2000.0, "eval_every": 100.0}
            yield f"fedavg, {attack}, {rule}", DIGITS | {"method": {"name": "fedavg"}, "run": long, **given}


def privacy() -> Iterator[Case]:
    still = {"method": {"slot": "h2", "eta_gamma": 0.0, "eta_upsilon": 0.0}}
    yield "no clipping, no noise", DIGITS | still
    for noise in (0.003, 0.03, 0.3, 3.0, 30.0):
        yield f"clip 1, noise {noise:g}", DIGITS | still | {"privacy": {"clip": 1.0, "noise": noise}}


def opened(module: torch.nn.Module, dataset: Any) -> float:
    """How often a marked test sample of another class is taken for the target."""
    others = dataset.y_test != TARGET
    x = torch.from_numpy(dataset.x_test[others].copy())
    with torch.no_grad():
        return float((module(marked(x)).argmax(1) == TARGET).float().mean())


def figures(result: Any, made: Federation) -> dict[str, Any]:
    summary = result.summary
    found = {key: summary[key] for key in ("status", "uploads", "rejected", "bytes_up", "bytes_down", "final_accuracy")}
    last = [value for value in result.accuracy[-3:] if value == value]
    found["accuracy"] = sum(last) / len(last)
    if made.config.attack.kind == "backdoor":
        found["opened"] = opened(result.module(), made.dataset)
    return found | ({"epsilon": summary["privacy"]["epsilon"]} if "privacy" in summary else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=["links", "defence", "absent", "skewed", "krum", "privacy"])
    parser.add_argument("--out", type=Path, default=Path("runs/protection"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name, sections in globals()[given.suite]():
        folder = given.out / f"{name}, seed {given.seed}".replace("/", " by ")
        made = federation(given.seed, **sections)
        bad = attackers(AttackOptions(kind="label-flip"), given.seed, made.config.fleet.devices)
        around = {"absent": without(bad), "skewed": only_watching()}.get(given.suite, nullcontext())
        with around:
            result = freshet.open(folder) if (folder / "summary.json").is_file() else made.run(out=folder)
        more = refused_by_direction(RunDirectory(result.directory), bad) if given.suite == "skewed" else {}
        print(json.dumps({"run": name} | figures(result, made) | more), flush=True)


if __name__ == "__main__":
    main()

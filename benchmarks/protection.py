"""The tables of docs/protection.md: compression and defences on a part of Fashion-MNIST, the rest on the digits.

Fashion-MNIST: LeNet5, 5,000 training and 1,000 test samples, 40 devices (Dirichlet 0.3), speeds 1 : 5, 300 s of virtual
time (defences: 200 s), one seed. Digits: all samples, the same fleet, 300 s (multi-Krum: 2,000 s). Existing runs are
reused, so the script can be stopped and restarted.

    python benchmarks/protection.py SUITE [--out FOLDER] [--seed N]

SUITE is links, fresh, defence, absent, skewed, krum, attacks, privacy or sums.

``attacks`` is the table of attacks and defences: FedAvg (10 of 40 devices per round) and FedBuff on the digits, 8 of 40
devices attack. Those of "a little is enough" and "inner product" know the honest devices' latest steps.
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
from freshet.core.admission import Admission
from freshet.core.defence import NOTE_ABOUT, Decision, Defence
from freshet.core.events import Rejected
from freshet.core.messages import FreshModels, Upload
from freshet.core.server import ActiveTrip
from freshet.core.vectors import Vector
from freshet.runs.reader import RunDirectory
from freshet.training.outgoing import AttackOptions, add_trigger, choose_attackers

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
    codecs: dict[str, dict[str, Any]] = {
        "none": {},
        "int8": {"up": "int8", "down": "int8"},
        "topk": {"up": "topk", "down": "topk", "keep": 0.1},
        "layers": {"fresh": "layers"},
    }
    for name, share in (("1", 1.0), ("1/50", 1 / 50), ("1/100", 1 / 100)):
        rates = {"up_mbps": UP * share, "down_mbps": DOWN * share}
        for codec, given in codecs.items():
            yield f"bandwidth {name}, {codec}", {"links": given, "fleet": rates}


def fresh() -> Iterator[Case]:
    """What a smaller fresh model costs: the same downlink codecs, only some layers, or no fresh model at all."""
    whole = 54_824  # bytes of the network for the digits
    codecs: dict[str, dict[str, Any]] = {
        "none": {},
        "int8": {"down": "int8"},
        "topk": {"down": "topk", "keep": 0.1},
        "layers, half": {"fresh": "layers", "budget": whole // 2},
        "layers, quarter": {"fresh": "layers", "budget": whole // 4},
    }
    for method in ("fedasmu", "fedasmu-fresh"):
        yield f"{method}, no fresh model", DIGITS | {"method": {"name": method, "slot": "never"}}
        for name, given in codecs.items():
            yield f"{method}, {name}", DIGITS | {"method": {"name": method}, "links": given}


def defence() -> Iterator[Case]:
    rules = {"none": ("none", "median-distance"), "sign-flip": ("none", "clip", "median-distance")}
    short = {"until": 200.0}
    for attack, how in ATTACKS.items():
        for rule in rules.get(attack, ("none", "median-distance")):
            yield f"{attack}, {rule}", {"attack": how, "defence": {"rule": rule}, "run": short}


def absent() -> Iterator[Case]:
    """The cost of a perfect defence: no attack, and every upload of the would-be attackers is rejected."""
    yield "absent, none", {"run": {"until": 200.0}}


@contextmanager
def without(devices: frozenset[int]) -> Iterator[None]:
    """Reject every upload of these devices."""
    original = Admission.rejection

    def rejection(
        self: Admission, upload: Upload, device: int, active: ActiveTrip, base: Vector, fresh: FreshModels
    ) -> Rejected | None:
        if device in devices:
            return Rejected("left out", device, active.trip)
        return original(self, upload, device, active, base, fresh)

    Admission.rejection = rejection  # type: ignore[method-assign]
    try:
        yield
    finally:
        Admission.rejection = original  # type: ignore[method-assign]


def skewed() -> Iterator[Case]:
    """Which uploads the direction test would reject if devices hold few classes. All are admitted and logged."""
    worlds: dict[str, dict[str, Any]] = {
        "two classes per device": {"partition": "by_label", "shards_per_device": 2},
        "Dirichlet 0.1": {"concentration": 0.1},
    }
    for name, data in worlds.items():
        digits = DIGITS | {"data": DIGITS["data"] | data}
        yield name, digits | {"attack": ATTACKS["label-flip"], "defence": {"rule": "median-distance"}}


@contextmanager
def only_watching() -> Iterator[None]:
    """Admit what a defence would reject. Its notes stay in the log."""
    original = Defence.judge

    def judge(self: Defence, upload: Upload, active: ActiveTrip, base: Vector, fresh: FreshModels) -> Decision:
        return original(self, upload, active, base, fresh)._replace(upload=upload, problem=None)

    Defence.judge = judge  # type: ignore[method-assign]
    try:
        yield
    finally:
        Defence.judge = original  # type: ignore[method-assign]


def rejected_by_direction(run: RunDirectory, poisoned: frozenset[int]) -> dict[str, float]:
    """Of the uploads judged by direction, the shares of poisoned and of honest ones that opposed the others."""
    notes = [event for event in run.events() if event["kind"] == "note" and event["about"] == NOTE_ABOUT]
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


RULES = ("none", "clip", "median-distance", "multi-krum", "trimmed-mean", "median", "root")
#: Further attacks: stay 1.5 standard deviations from the honest mean, reverse half of it, send the model back.
FURTHER: dict[str, dict[str, Any]] = {
    "little": {"kind": "little-is-enough", "strength": 1.5},
    "inner product": {"kind": "inner-product", "strength": 0.5},
    "free-rider": {"kind": "free-rider"},
}


def attacks() -> Iterator[Case]:
    for method in ("fedavg", "fedbuff"):
        for attack, how in (ATTACKS | FURTHER).items():
            for rule in RULES if method == "fedavg" else [each for each in RULES if each != "multi-krum"]:
                given = {"attack": how, "defence": {"rule": rule}, "method": {"name": method}}
                run = {"until": 1000.0 if method == "fedavg" else 300.0, "eval_every": 50.0}
                yield f"{method}, {attack}, {rule}", DIGITS | given | {"run": run}


def sums() -> Iterator[Case]:
    """Noise on the server, with buffers of 10 and of 40 uploads."""
    worlds: dict[str, dict[str, Any]] = {
        "fedbuff, 10": {"method": {"name": "fedbuff"}, "run": {"until": 300.0}},
        "fedbuff, 40": {"method": {"name": "fedbuff", "K": 40}, "run": {"until": 600.0, "in_flight": 40}},
    }
    for world, sections in worlds.items():
        yield f"{world}, no noise", DIGITS | sections
        for noise in (0.3, 1.0, 3.0):
            given = {"privacy": {"where": "server", "clip": 1.0, "noise": noise}}
            yield f"{world}, noise {noise:g}", DIGITS | sections | given


def privacy() -> Iterator[Case]:
    still = {"method": {"slot": "h2", "eta_gamma": 0.0, "eta_upsilon": 0.0}}
    yield "no clipping, no noise", DIGITS | still
    for noise in (0.003, 0.03, 0.3, 3.0, 30.0):
        yield f"clip 1, noise {noise:g}", DIGITS | still | {"privacy": {"clip": 1.0, "noise": noise}}


def attack_success(module: torch.nn.Module, dataset: Any) -> float:
    """How often a marked test sample of another class is classified as the target."""
    others = dataset.y_test != TARGET
    x = torch.from_numpy(dataset.x_test[others].copy())
    with torch.no_grad():
        return float((module(add_trigger(x)).argmax(1) == TARGET).float().mean())


def figures(result: Any, made: Federation) -> dict[str, Any]:
    summary = result.summary
    keys = ("status", "uploads", "merges", "rejected", "bytes_up", "bytes_down", "final_accuracy")
    found = {key: summary[key] for key in keys}
    last = [value for value in result.accuracy[-3:] if value == value]
    found["accuracy"] = sum(last) / len(last)
    if made.config.attack.kind == "backdoor":
        found["opened"] = attack_success(result.module(), made.dataset)
    return found | ({"epsilon": summary["privacy"]["epsilon"]} if "privacy" in summary else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    suites = ["links", "fresh", "defence", "absent", "skewed", "krum", "attacks", "privacy", "sums"]
    parser.add_argument("suite", choices=suites)
    parser.add_argument("--out", type=Path, default=Path("runs/protection"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name, sections in globals()[given.suite]():
        folder = given.out / f"{name}, seed {given.seed}".replace("/", " by ")
        made = federation(given.seed, **sections)
        bad = choose_attackers(AttackOptions(kind="label-flip"), given.seed, made.config.fleet.devices)
        around = {"absent": without(bad), "skewed": only_watching()}.get(given.suite, nullcontext())
        with around:
            result = freshet.load(folder) if (folder / "summary.json").is_file() else made.run(out=folder)
        more = rejected_by_direction(RunDirectory(result.directory), bad) if given.suite == "skewed" else {}
        print(json.dumps({"run": name} | figures(result, made) | more), flush=True)


if __name__ == "__main__":
    main()

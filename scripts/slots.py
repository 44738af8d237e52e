"""Where the figures on slots in docs/methods.md come from: does the selector learn in whole runs, and what is there to
learn? On the embedded digits: 100 devices, ratio 5, ``fleet.time = "trip"``, ten at a time, five epochs.

    python scripts/slots.py learned    merges per request, learned against random, and requests that find nothing
    python scripts/slots.py worth      what each slot is worth, with random slots
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from freshet import Federation
from freshet.config import resolve
from freshet.runs.reader import RunDirectory

UNTIL = {"fedssmu": 4700.0, "fedasmu": 1500.0}
USED, UNUSED, FURTHER = (0, 1, 2), (4, 5, 6), (20, 21, 22)
WORLD = {"data": {"name": "digits"}, "fleet": {"devices": 100, "ratio": 5.0, "time": "trip"}}


class Asked(NamedTuple):
    """A request: its slot, and the reward of the merge that followed (None: there was nothing newer)."""

    slot: int
    reward: float | None


@cache
def asked(method: str, slot: str, seed: int) -> Sequence[Asked]:
    """All requests of a run, in order."""
    run = {"until": UNTIL[method], "seed": seed, "per_round": 10, "executor": "serial"}
    config = resolve(WORLD | {"method": {"name": method, "slot": slot}, "run": run})
    with tempfile.TemporaryDirectory() as folder:
        result = Federation.from_config(config).run(out=Path(folder) / "run")
        if result.summary["status"] == "interrupted":
            raise SystemExit("interrupted")
        events = list(RunDirectory(result.directory).events())
    rewards = {(event["device"], event["trip"]): event["reward"] for event in events if event["kind"] == "merge"}
    requests = [event for event in events if event["kind"] == "request"]
    return [Asked(event["slot"], rewards.get((event["device"], event["trip"]))) for event in requests]


def merged(requests: Sequence[Asked]) -> float:
    """Merges per request."""
    return fmean(request.reward is not None for request in requests)


def learned() -> None:
    """Learned against random, for the seeds that the selector's settings were chosen with and for others."""
    print("| | seeds | learned | random | empty, first -> last third |\n|---|---|---|---|---|")
    for method in UNTIL:
        for seeds in (USED, UNUSED):
            by_seed = [asked(method, "rl", seed) for seed in seeds]
            ends = [(1 - merged(runs[: len(runs) // 3]), 1 - merged(runs[-(len(runs) // 3) :])) for runs in by_seed]
            rates = [", ".join(f"{merged(runs):.3f}" for runs in by_seed)]
            rates += [", ".join(f"{merged(asked(method, 'random', seed)):.3f}" for seed in seeds)]
            empty = " -> ".join(", ".join(f"{end[k]:.2f}" for end in ends) for k in (0, 1))
            names = ", ".join(map(str, seeds)) + (", used for the choice" if seeds == USED else ", not used")
            print(f"| {method}, {UNTIL[method]:,.0f} s | {names} | {' | '.join(rates)} | {empty} |", flush=True)


def worth() -> None:
    """Mean reward by slot, a request that finds nothing counted as 0, with its standard error."""
    print("| method | slot | merged | reward | merges with R > 0 |\n|---|---|---|---|---|")
    for method in ("fedasmu", "fedssmu"):
        by_slot: dict[int, list[float | None]] = defaultdict(list)
        for seed in FURTHER:
            for slot, reward in asked(method, "random", seed):
                by_slot[slot].append(reward)
        for slot, rewards in sorted(by_slot.items()):
            there = [reward for reward in rewards if reward is not None]
            all_of_them = [reward or 0.0 for reward in rewards]
            error = stdev(all_of_them) / len(all_of_them) ** 0.5
            above = f"{fmean(reward > 0 for reward in there):.0%}" if there else ""
            found = f"{len(there) / len(rewards):.0%} of {len(rewards)}"
            print(f"| {method} | {slot} | {found} | {fmean(all_of_them):.4f} +- {error:.4f} | {above} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learned", "worth"))
    {"learned": learned, "worth": worth}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
